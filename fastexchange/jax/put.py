"""New arrays of JAX by its C++ function behind ``device_put``, without the Python code in front of that.

Tried with JAX 0.6 to 0.12.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ground.once import once
from ..ground.passing import reraise_passing

__all__ = ["putting"]

_MOST = 1 << 21
"""The most bytes of an array that others have for which a copy is quicker than DLPack."""


@once
def putting() -> Callable:
    """A function (array of NumPy, is_new, like) that makes an array of JAX on the CPU with the same values.

    It returns None if JAX's function is not as expected, or if DLPack is quicker. `is_new`: nobody else has the array's memory.
    Then JAX need not copy it, if it is aligned as JAX wants it, and it lives as long. `like`: an array of JAX, on whose device
    the new one is to be, or None.
    """
    return _function() or (lambda array, is_new, like: None)


def _function():
    """JAX's function, verified; None where it is not as expected."""
    try:
        return _find()
    except Exception as error:  # a JAX with other private functions
        reraise_passing(error)
        return None


def _find():
    import jax

    first, *others = jax.local_devices(backend="cpu")
    shardings: dict[Any, Any] = {device: jax.sharding.SingleDeviceSharding(device) for device in (first, *others)}
    own = shardings[first]
    batched_device_put = sys.modules["jaxlib._jax"].batched_device_put

    @functools.lru_cache(1024)
    def type_of(shape, dtype):
        return jax.core.ShapedArray(shape, dtype)

    def function(array, is_new, like=None):
        device, sharding, is_committed = first, own, False
        if others:
            device, is_committed = _place_of(like, shardings)
            sharding = shardings[device]
        if not is_new and array.nbytes > _MOST and device is first:
            return None
        if array.dtype.itemsize >= 8:  # without numbers of 64 bits JAX has others in their place
            array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        aval = type_of(array.shape, array.dtype)
        return batched_device_put(aval, sharding, [array], [device], is_committed, not is_new)

    with jax.ensure_compile_time_eval():  # JAX may be tracing a function
        return function if _is_right(function) else None


def _place_of(like, known) -> tuple[Any, bool]:
    """The device, one of those `known`, for a result beside an array of JAX, or None, and whether the result is bound to it."""
    import jax

    default = getattr(jax.config, "jax_default_device", None)
    devices = getattr(like, "devices", lambda: {default})()
    device = next(iter(devices))
    return (device, getattr(like, "committed", False)) if len(devices) == 1 and device in known else (next(iter(known)), False)


def _is_right(function) -> bool:
    """Whether the function makes what ``from_dlpack`` makes."""
    import jax

    for sample in (np.float32(2.5).reshape(()), np.arange(6, dtype=np.int16).reshape(2, 3), np.ones((2, 2), bool)[:, 1]):
        made, wanted = function(np.asarray(sample), False), jax.dlpack.from_dlpack(np.array(sample))
        if type(made) is not type(wanted) or made.aval != wanted.aval or not np.array_equal(np.asarray(made), sample):
            return False
    return True
