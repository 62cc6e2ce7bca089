"""Make ``_abi.py``: cffi's parsed form of the project's C declarations.

Run ``python -m fastexchange._abi_build`` after a change to a ``CDEF``. (It is needed when a declaration changes, never
by users: the result is committed, and a test compares it with the declarations.)
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (
    "ground/dlpack.py",
    "ground/cpython.py",
    "producers/ndarray.py",
    "producers/numpy_table.py",
    "arguments/buffer.py",
    "exchange/capsules.py",
    "producers/torch_offsets.py",
    "producers/torch_modes.py",
    "dispatch/structs.py",
    "cuda/structs.py",
    "exchange/transfer.py",
)


def declarations() -> str:
    """The text of every ``CDEF = ...`` of :data:`SOURCES`, read without importing them: they import what we make."""
    pattern = re.compile(r'^CDEF = """(.*?)"""', re.DOTALL | re.MULTILINE)
    return "".join(found for name in SOURCES for found in pattern.findall((HERE / name).read_text()))


def emit(target: Path) -> None:
    """Write the out-of-line ABI module to `target`."""
    from cffi import FFI

    builder = FFI()
    builder.cdef(declarations())
    builder.set_source("fastexchange._abi", None)
    builder.emit_python_code(str(target))


if __name__ == "__main__":
    emit(HERE / "_abi.py")
