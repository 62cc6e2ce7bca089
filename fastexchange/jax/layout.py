"""Where JAX's arrays have their shape and dtype, found on live arrays. What is not as expected is not used.

An array of ``jaxlib`` has a pointer to its ``ShapedArray``, the type of its values, which arrays share. In it are pointers to a
tuple and to NumPy's dtype object. The array's memory is known to two C++ functions only.

Tried with JAX 0.6 to 0.12.
"""

import ctypes
import sys
import weakref
from typing import NamedTuple

import numpy as np

from ..ground.once import once
from ..ground.passing import reraise_passing
from ..ground.readable import read_word
from ..interpreter import DISABLED

__all__ = ["Layout", "array_type", "is_traced_type", "layout"]

WR_OBJECT = object.__basicsize__  # in a weak reference: the object, None once it has died; verified here
_WORD = ctypes.sizeof(ctypes.c_size_t)
_MODULES = "jaxlib._jax", "jaxlib.xla_extension"
"""Where JAX has had its C++ functions."""
_types: list[type] = []


class Layout(NamedTuple):
    """Offsets in bytes: in an array of its ``ShapedArray``, in that of the shape and the dtype; and the ``ShapedArray`` type."""

    aval: int
    shape: int
    dtype: int
    aval_type: type


def array_type() -> type | None:
    """The type of JAX's arrays, if there is one. Does not import JAX."""
    if not _types:
        found = (getattr(sys.modules.get(module), "ArrayImpl", None) for module in _MODULES)
        _types.extend(each for each in found if each is not None)
    return _types[0] if _types else None


def is_traced_type(cls: type) -> bool:
    """Whether values of a type stand for arrays while JAX traces a function."""
    jax = sys.modules.get("jax")
    tracer = getattr(getattr(jax, "core", None), "Tracer", None)
    return isinstance(tracer, type) and issubclass(cls, tracer)


@once
def layout() -> "Layout | str":
    """The layout; a text that says why not, if it is not as expected."""
    if DISABLED:
        return "FASTEXCHANGE_DISABLE is set"
    try:
        return _find()
    except Exception as error:  # a jaxlib with other private functions
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"


def _find() -> "Layout | str":
    import jax

    with jax.ensure_compile_time_eval():  # the first kernel may be called while JAX traces a function
        return _find_on(jax.local_devices(backend="cpu")[0])


def _find_on(device) -> "Layout | str":
    import jax

    given = [np.float32(1.5), np.arange(3.0, dtype=np.float32), np.zeros((0, 3), np.int32), np.ones((2, 3, 4), np.uint8)]
    arrays = [jax.device_put(each, device) for each in (*given, given[1] > 0, given[1] + np.complex64(1j))]
    types = {type(array.aval) for array in arrays}
    if len(types) != 1 or {type(array) for array in arrays} != {array_type()}:
        return "its arrays have several types"
    at = _only(arrays[0], lambda each: all(read_word(id(array), each) == id(array.aval) for array in arrays), "ShapedArray")
    avals = [array.aval for array in arrays]
    shape = _only(avals[0], lambda each: all(read_word(id(aval), each) == id(aval.shape) for aval in avals), "shape")
    dtype = _only(avals[0], lambda each: all(read_word(id(aval), each) == id(aval.dtype) for aval in avals), "dtype")
    for array in arrays:
        if type(array.aval.shape) is not tuple or not isinstance(array.aval.dtype, np.dtype):
            return "a shape is no tuple, or a dtype none of NumPy's"
        seen = np.asarray(memoryview(array))
        if seen.shape != array.shape or (array.size and seen.ctypes.data != array.unsafe_buffer_pointer()):
            return "its buffer is not at the address that it tells"
    if not _are_weak_references_as_expected(lambda: jax.device_put(given[0], device)):
        return "weak references are not as expected"
    return Layout(at, shape, dtype, types.pop())


def _only(ob, is_there, what: str) -> int:
    """The only offset in an object for which `is_there` holds. Raises LookupError."""
    found = [at for at in range(2 * _WORD, type(ob).__basicsize__ - _WORD + 1, _WORD) if is_there(at)]
    if len(found) != 1:
        raise LookupError(f"{what}: {len(found)} places instead of one")
    return found[0]


def _are_weak_references_as_expected(make) -> bool:
    """Whether a weak reference has its object where it is expected, and later None."""
    array = make()
    reference = weakref.ref(array)
    before = read_word(id(reference), WR_OBJECT) == id(array)
    del array
    return before and read_word(id(reference), WR_OBJECT) == id(None)
