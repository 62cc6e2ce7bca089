"""New arrays of JAX by its C++ function behind ``device_put``, without the Python code in front of that.

Tried with JAX 0.6 to 0.12.
"""

import functools
import sys

import numpy as np

from ..ground.once import once
from ..ground.passing import reraise_passing

__all__ = ["MOST_PUT", "put"]

MOST_PUT = 1 << 21
"""The most bytes of an array that others have for which a copy, by :func:`put`, is quicker than DLPack."""


def put(array: np.ndarray, is_new: bool):
    """An array of JAX on the CPU with the values of `array`, as ``from_dlpack`` makes it. None: this JAX has no such function.

    `is_new`: nobody else has its memory, so JAX need not copy it, if it is aligned as JAX wants it. The array lives as long then.
    """
    function = _function()
    return None if function is None else function(array, not is_new)


@once
def _function():
    """The function, verified; None where it is not as expected."""
    try:
        return _find()
    except Exception as error:  # a JAX with other private functions
        reraise_passing(error)
        return None


def _find():
    import jax

    device = jax.local_devices(backend="cpu")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    batched_device_put = sys.modules["jaxlib._jax"].batched_device_put

    @functools.lru_cache(1024)
    def type_of(shape, dtype):
        return jax.core.ShapedArray(shape, dtype)

    def function(array, is_copied):
        is_committed = False
        if array.dtype.itemsize >= 8:  # without numbers of 64 bits JAX has others in their place
            array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        return batched_device_put(type_of(array.shape, array.dtype), sharding, [array], [device], is_committed, is_copied)

    with jax.ensure_compile_time_eval():  # JAX may be tracing a function
        return function if _is_right(function) else None


def _is_right(function) -> bool:
    """Whether the function makes what ``from_dlpack`` makes."""
    import jax

    for sample in (np.float32(2.5).reshape(()), np.arange(6, dtype=np.int16).reshape(2, 3), np.ones((2, 2), bool)[:, 1]):
        made, wanted = function(np.asarray(sample), True), jax.dlpack.from_dlpack(np.array(sample))
        if type(made) is not type(wanted) or made.aval != wanted.aval or not np.array_equal(np.asarray(made), sample):
            return False
    return True
