"""What JAX's arrays have besides their memory."""

import sys
from collections.abc import Sequence

import numpy as np

from ..arguments.kind import MEANINGS
from ..ground.dlpack import VERSION
from ..ground.once import cached_property
from ..producers.framework import Framework
from . import ending  # noqa: F401  it registers what has to come before JAX's end
from .layout import array_type, is_traced_type
from .put import putting

__all__ = ["FRAMEWORK"]


class _JAX(Framework):
    """JAX. Its arrays are immutable, computed in the background, and may be deleted."""

    def is_tensor_type(self, cls: type) -> bool:
        return cls is array_type() or (cls is not object and cls is getattr(sys.modules.get("jax"), "Array", object))

    def check(self, tensor, allows_grad: bool = False, allows_bits: bool = False) -> None:
        """See :class:`Framework`. Raises JAX's own error for an array that is deleted, or whose computation has failed."""
        if tensor.is_deleted():
            tensor.__dlpack__()
        tensor.block_until_ready()

    def as_numpy(self, tensor) -> np.ndarray:
        return np.asarray(tensor)

    def from_numpy(self, array: np.ndarray, from_dlpack):
        """See :class:`Framework`. JAX copies what it does not take, as ml_dtypes' elements, which NumPy does not export."""
        import jax.numpy as jnp

        try:
            return from_dlpack(array)
        except Exception:
            return jnp.array(array)

    def elements_of(self, tensor):
        """See :class:`Framework`. Whoever reads a deleted array says so, with the argument's name."""
        return np.empty(0, tensor.dtype) if isinstance(tensor.dtype, np.dtype) else tensor

    def as_dlpack_raises(self, tensor, error: Exception) -> Exception:
        """See :class:`Framework`. JAX's Python code says more, for example of a deleted array."""
        try:
            tensor.__dlpack__(max_version=VERSION)
        except Exception as own:
            return own
        return error

    _put = cached_property(lambda self: putting())

    def tensor_of(self, array, is_new: bool, like):
        return self._put(array, is_new, like)

    def sees_calls(self, kernel, values: list) -> bool:
        """See :class:`Framework`. JAX traces functions by values that are no arrays. Arrays are not written to."""
        sees_arrays = kernel.mutates or kernel._by_xla is not None
        return any(is_traced_type(type(each)) or (sees_arrays and type(each) is array_type()) for each in values)

    def call(self, kernel, bound: tuple):
        """See :class:`Framework`. Raises BufferError for an array that a kernel would write to in a call that is not traced."""
        from .xla_calls import Traced, check_changed, is_functional, is_traced

        if kernel._is_numbas:
            return NotImplemented
        if is_traced(bound) or (kernel.mutates and is_functional()):
            return Traced(kernel, bound).make()
        check_changed(kernel, bound)
        if kernel._by_xla is None or kernel._pattern is None:
            return NotImplemented
        if type(bound[kernel._pattern.inputs[0].position]) is not array_type():  # another framework allocates the outputs
            return NotImplemented
        return kernel._by_xla.call_eagerly(kernel, bound)

    def path_of(self, value) -> str:
        from .xla_calls import is_traced

        return "xla" if is_traced([value]) else ""

    def called(self, kernel, bound: tuple) -> tuple[str, Sequence[str]]:
        from .xla_calls import Traced, is_traced
        from .xla_target import TARGET

        if kernel._is_numbas or not is_traced(bound):
            return "", ()
        traced = Traced(kernel, bound)
        why = traced.why_not_native()
        target = TARGET if kernel._by_xla is None else kernel._by_xla.TARGET
        by = f"Python makes it, jax.pure_callback: {why}" if why else f"XLA's function {target!r} makes it, without Python"
        return f"JAX traces this call; {by}", traced.kernel_types()

    def numpy_expression(self, tensor) -> str:
        return "np.asarray({})"


MEANINGS["xla"] = "JAX traces it: XLA gives its memory when the compiled function runs"
FRAMEWORK = _JAX()
