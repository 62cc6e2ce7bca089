"""Make ``_abi.py``: cffi's parsed form of the project's C declarations.

Run ``python -m fastexchange._abi_build`` after a change to a ``CDEF``. (It is needed when a declaration changes, never
by users: the result is committed, and a test compares it with the declarations.)
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
FIRST = ("ground/dlpack.py", "ground/cpython.py")
"""What the others use."""


def declarations() -> str:
    """The text of every ``CDEF = ...``, read without importing the files: they import what we make."""
    pattern = re.compile(r'^CDEF = """(.*?)"""', re.DOTALL | re.MULTILINE)
    every = sorted(path.relative_to(HERE).as_posix() for path in HERE.rglob("*.py"))
    names = sorted(every, key=lambda name: name not in FIRST)
    return "".join(found for name in names for found in pattern.findall((HERE / name).read_text("utf-8")))


def emit(target: Path) -> None:
    """Write the out-of-line ABI module to `target`."""
    from cffi import FFI

    builder = FFI()
    builder.cdef(declarations())
    builder.set_source("fastexchange._abi", None)
    builder.emit_python_code(str(target))


if __name__ == "__main__":
    emit(HERE / "_abi.py")
