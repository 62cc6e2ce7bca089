"""Numba's types of the formats by DLPack's types. Importing this module teaches Numba."""

import contextlib
import threading
from typing import Any, cast

import numpy as np
from numba.core import event, types
from numba.extending import typeof_impl
from numba.np.numpy_support import FROM_DTYPE

from ..dtype_registry import dtype_of, key_of
from . import boxing, operations, reductions  # noqa: F401 (register what they implement)
from .elements import TYPES, Half
from .formats import FORMATS

__all__ = ["TYPES", "TypedArray", "boxed_by_native_code", "type_dtypes", "type_of_key"]

with contextlib.suppress(ImportError):  # whose import registers the dtypes with NumPy; without it, NumPy has float16 only
    import ml_dtypes  # noqa: F401


class _RefuseTheRest(event.Listener):
    """Registers what is refused before anything is compiled: that loads all that Numba compiles, which takes a second."""

    def on_start(self, event):
        if "refusals" not in _loaded:
            from . import refusals  # noqa: F401 (if that raises, nothing is compiled, and the next pass tries again)

            _loaded.add("refusals")

    def on_end(self, event):
        pass


_loaded: set[str] = set()
event.register("numba:run_pass", _RefuseTheRest())
_KEYS = {(form.code, form.bits): TYPES[form.name] for form in FORMATS}


def type_of_key(code: int, bits: int) -> Half:
    """The type of elements of DLPack's type ``(code, bits)``, one of ``FORMAT_KEYS``."""
    return _KEYS[code, bits]


class _Lowering(event.Listener):
    """Notes whether the innermost pass of this thread's compilation makes machine code, also that which boxes results."""

    def __init__(self):
        self._thread, self._passes = threading.get_ident(), [False]

    def on_start(self, event):
        if threading.get_ident() == self._thread:
            self._passes.append(event.data["name"].startswith(("native_lowering", "native_parfor_lowering")))
            boxing.is_of_bytes = self._passes[-1]

    def on_end(self, event):
        if threading.get_ident() == self._thread and len(self._passes) > 1:  # a pass that did not start ends, too
            self._passes.pop()
            boxing.is_of_bytes = self._passes[-1]


def boxed_by_native_code():
    """A context in which a kernel is compiled whose results native code boxes: of arrays without a dtype it takes the bytes."""
    return event.install_listener("numba:run_pass", _Lowering())


def type_dtypes() -> None:
    """Let Numba type arrays and scalars of ml_dtypes' dtypes, for which it has no type. Its own float16 stays what it is."""
    for half in TYPES.values():
        dtype = dtype_of(half.format.code, half.format.bits)
        if dtype is not None:
            cast(Any, FROM_DTYPE).setdefault(dtype, half)


class TypedArray(np.ndarray):
    """An array of a format, for Numba's dispatcher, which has another type for those of float16, and none for the others."""

    __numba_array_subtype_dispatch__ = True  # Numba asks typeof_impl, not the dtype


@typeof_impl.register(TypedArray)
def _type_of_array(array, _context):
    layout = "C" if array.flags.c_contiguous else "F" if array.flags.f_contiguous else "A"
    key: Any = key_of(array.dtype)
    return types.Array(type_of_key(*key), array.ndim, layout, readonly=not array.flags.writeable)
