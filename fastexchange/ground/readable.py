"""Words in memory that may be no addresses: whether the bytes there can be read, asked before anything is read.

A layout that is being verified may differ from the expected one in any field, also in a pointer.
"""

__all__ = ["checked_address", "is_readable"]

_WORD = 8


def is_readable(address: int, size: int, alignment: int = _WORD) -> bool:
    """Whether `size` bytes at an address can be read. Only on Linux is more known than that NULL and unaligned words cannot."""
    if address <= 0 or address % alignment:
        return False
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return len(memory.read(size)) == size
    except (FileNotFoundError, PermissionError):  # another system than Linux, or a sandbox
        return True
    except (OSError, ValueError, OverflowError):
        return False


def checked_address(address: int, size: int) -> int:
    """Return an address that was read where a pointer may be. Raises ValueError if its `size` bytes cannot be read."""
    if not is_readable(address, size):
        raise ValueError(f"{address:#x} is no address of an object")
    return address
