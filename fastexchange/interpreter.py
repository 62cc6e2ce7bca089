"""What the package runs on: CPython, and its own ``__init__.py``. Imported before all other modules but ``version``."""

import ctypes
import os
import sys
import sysconfig

from .version import DISTRIBUTION, __version__

__all__ = ["DISABLED", "NONE_IS_IMMORTAL", "TUPLE_ITEMS", "is_free_threaded", "require_cpython", "require_own_package"]


DISABLED = os.environ.get("FASTEXCHANGE_DISABLE", "") .strip().lower() not in ("", "0", "false", "no", "off")
"""Whether the user has switched off all that is native: then Python makes all calls, by Numba's dispatcher and NumPy's views."""


def require_cpython() -> None:
    """Raise ImportError on any other interpreter."""
    if sys.implementation.name != "cpython":
        name = sys.implementation.name
        raise ImportError(f"fastexchange needs CPython: its native code reads CPython's objects, and this is {name}")


def require_own_package() -> None:
    """Raise ImportError if another project's ``fastexchange/__init__.py`` has taken the place of this one's."""
    package = sys.modules[__package__]
    if getattr(package, "__version__", None) is not __version__:  # this very string: the other may be of the same version
        raise ImportError(
            f"{package.__file__} is not of {DISTRIBUTION} {__version__}: another project has a package of the same name; "
            f"pip uninstall fastexchange {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        )


def is_free_threaded() -> bool:
    """Whether this CPython was built to run without the GIL, even while its GIL is on.

    Its objects have another head, and native code here reads objects, and changes the table of types, under the protection of the
    GIL. So Numba's dispatcher makes all calls there: see ``dispatch.runtime``.
    """
    is_off = not getattr(sys, "_is_gil_enabled", lambda: True)()
    return is_off or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


require_cpython()
require_own_package()

# What native code takes from the interpreter that compiles it. Prereleases with one ABI may differ in it, so machine code that is
# kept is only for interpreters that agree: see ``numba_code.native_code_depends_on``.
TUPLE_ITEMS = tuple.__basicsize__
"""The offset of a tuple's items: they follow its head, which has grown by a hash in CPython 3.14."""
NONE_IS_IMMORTAL = ctypes.c_ssize_t.from_address(id(None)).value & 0x80000000 != 0
"""Whether None is not counted, as from CPython 3.12 on."""
