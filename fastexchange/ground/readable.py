"""Words in memory that may be no addresses: whether the bytes there can be read, asked before anything is read.

A layout that is being verified may differ from the expected one in any field, also in a pointer. The system is asked to copy the
bytes, and refuses where a read would end the process.
"""

import ctypes
import mmap
import os
import sys

__all__ = ["checked_address", "is_readable", "read_byte", "read_bytes", "read_word"]

_WORD = 8
_END = 1 << 64


def is_readable(address: int, size: int, alignment: int = _WORD) -> bool:
    """Whether `size` bytes at an address can be read. False for more than pipes hold (4096 or more).

    Raises OSError if the process has too many open files.
    """
    if address <= 0 or address % alignment or address + size > _END:
        return False
    if sys.platform == "win32":
        copy, own = ctypes.create_string_buffer(size), ctypes.c_void_p(-1)  # GetCurrentProcess()
        return bool(ctypes.windll.kernel32.ReadProcessMemory(own, ctypes.c_void_p(address), copy, ctypes.c_size_t(size), None))
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)  # nobody reads the pipe
        return _write(writer, address, size) == size
    finally:
        os.close(reader)
        os.close(writer)


if sys.platform != "win32":
    _write = ctypes.CDLL(None).write
    _write.restype, _write.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]


# An object's size is not known, so a place that is looked at may lie behind it: there memory may end, at the end of a page.


def read_bytes(base: int, size: int) -> bytes:
    """The bytes at `base`, where an object begins; fewer than `size` if memory ends before."""
    on_page = mmap.PAGESIZE - base % mmap.PAGESIZE
    return ctypes.string_at(base, size if size <= on_page or is_readable(base + on_page, 1, 1) else on_page)


def read_word(base: int, offset: int = 0) -> int | None:
    """The signed word `offset` bytes behind `base`, where an object begins. None if memory ends before."""
    return ctypes.c_ssize_t.from_address(base + offset).value if _is_there(base, offset, _WORD) else None


def read_byte(base: int, offset: int) -> int | None:
    """The byte `offset` bytes behind `base`, where an object begins. None if memory ends before."""
    return ctypes.c_uint8.from_address(base + offset).value if _is_there(base, offset, 1) else None


def _is_there(base: int, offset: int, size: int) -> bool:
    last = base + offset + size - 1
    return base // mmap.PAGESIZE == last // mmap.PAGESIZE or is_readable(last, 1, 1)


def checked_address(address: int, size: int) -> int:
    """Return an address that was read where a pointer may be. Raises ValueError if its `size` bytes cannot be read."""
    if not is_readable(address, size):
        raise ValueError(f"{address:#x} is no address of an object")
    return address
