"""Which interpreters the package trusts itself to: CPython with the GIL. Imported first of all rooms."""

import sys
import sysconfig

__all__ = ["require_cpython_with_gil"]


def require_cpython_with_gil() -> None:
    """Raise ImportError on any other interpreter.

    A free-threaded build is refused even while its GIL is on: its objects have another head, and native code here reads
    objects and changes the table of types under the protection of the GIL.
    """
    if sys.implementation.name != "cpython":
        name = sys.implementation.name
        raise ImportError(f"fastexchange needs CPython: its native code reads CPython's objects, and this is {name}")
    if sysconfig.get_config_var("Py_GIL_DISABLED") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "fastexchange needs a CPython with the GIL, and this is a free-threaded one "
            f"({sys.version.split()[0]}t): install it for the interpreter without the 't'"
        )


require_cpython_with_gil()
