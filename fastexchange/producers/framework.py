"""What a framework's tensors have besides what DLPack says of them: :class:`Framework`, and how the others find it."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["PLAIN", "Framework", "framework_of", "framework_of_type", "framework_that_sees", "frameworks"]


class Framework:
    """A framework of tensors. The methods here are those of one whose tensors are all that their exports say.

    No method imports the framework before it has made a tensor.
    """

    takes_all = True
    """Whether its tensors can be readonly and have negative strides."""
    is_mutable = False
    """Whether all its tensors are mutable, whatever a legacy export says, which has no flags."""
    ignores_offset = False
    """Whether its ``from_dlpack`` may ignore ``byte_offset``."""

    def is_tensor_type(self, cls: type) -> bool:
        """Whether its tensors have the type `cls`."""
        return False

    def tensor_type(self, cls: type) -> type:
        """The type of new tensors, for those of type `cls`."""
        return cls

    def why_no_table(self, cls: type) -> str:
        """Why the exchange table of the tensor type `cls` is not used; "" if it is."""
        return ""

    def check(self, tensor, allows_grad: bool = False, allows_bits: bool = False) -> None:
        """Raise BufferError for a tensor whose memory is not its value, or with which the framework would not see the call."""

    def why_no_memory(self, tensor) -> str | None:
        """Why a tensor has no memory, or other memory than its value, with advice; None for any other."""
        return None

    def why_narrow(self, tensor) -> str | None:
        """Why kernels do not compute with a tensor's elements, which it exports as others; None if it does not."""
        return None

    def conversion(self, wider: str) -> str:
        """The expressions that convert a tensor to the dtype `wider`."""
        return f".astype({wider!r})"

    def is_read_in_memory(self, tensor) -> bool:
        """Whether native code reads a tensor in memory, by no function of the framework."""
        return False

    def exported_as(self, tensor):
        """The tensor whose ``__dlpack__`` exports the memory of `tensor`, which has no usable exchange table."""
        return tensor

    def detached(self, tensor):
        """A tensor that shows the same memory, and that no other code can change."""
        return tensor

    def as_numpy(self, tensor) -> np.ndarray:
        """A NumPy array over a tensor's memory, by functions of Python alone. Raises what they raise."""
        return np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else np.asarray(memoryview(tensor))

    def from_numpy(self, array: np.ndarray, from_dlpack):
        """A tensor over an array's memory, by functions of Python alone: `from_dlpack` is the framework's."""
        return from_dlpack(array)

    def hold_memory(self, tensor) -> None:
        """Let nothing free the memory of a tensor while exports of it are in use."""

    def elements_of(self, tensor):
        """A tensor of the same element type that can be exported, also if `tensor` cannot."""
        return tensor

    def tensor_of(self, array, is_new: bool, like):
        """A tensor of a result, an array of NumPy, by a function that is quicker than DLPack; None: there is none.

        `is_new`: nobody else has the array's memory. `like`: a tensor, beside which it is to lie, or None.
        """

    def shape_of(self, tensor) -> tuple[int, ...]:
        """A tensor's shape, also if it cannot be exported."""
        return tuple(map(int, tensor.shape))

    def with_elements_of(self, made, origin):
        """Give the result `made`, which shares the memory of `origin`, the element type of `origin`."""
        return made

    def as_dlpack_raises(self, tensor, error: Exception) -> Exception:
        """The error that ``__dlpack__`` of `tensor` raises in place of `error`, which its exchange table has raised."""
        return error

    def sees_calls(self, kernel, values: list) -> bool:
        """Whether the framework has to see a call with these arguments and items.

        It does if it traces the call, if a mode is active, or if it computes gradients and the kernel declares how.
        """
        return False

    def why_calls_are_slow(self) -> str:
        """Why Python makes each call that declares outputs, if there is a tensor of the framework; "" if native code does."""
        return ""

    def numpy_expression(self, tensor) -> str:
        """The expression that users write for a tensor's NumPy view, ``{}`` for the tensor; "" if there is none."""
        return ""

    def know(self, kernel) -> None:
        """Take note of a kernel whose options say what it returns, or what it writes to."""

    def call(self, kernel, bound: tuple):
        """Make a call that the framework sees, with arguments in parameter order. NotImplemented if it cannot be made so."""
        return NotImplemented

    def path_of(self, value) -> str:
        """How a call that the framework makes gets a value, in a word; "" if as any call does."""
        return ""

    def called(self, kernel, bound: tuple) -> tuple[str, Sequence[str]]:
        """How :meth:`call` makes a call, for ``explain``; "" if it does not. Prepares it, as the call does.

        Also the names of the Numba types that the kernel gets, as far as they are known.
        """
        return "", ()


PLAIN = Framework()
_MODULES = {"torch": "torch.torch_framework", "jax": "jax.jax_framework"}
"""By a framework's module, that of this package with its ``FRAMEWORK``. It is imported once there is the framework's."""
_loaded: dict[str, Framework] = {}


def frameworks() -> list[Framework]:
    """The frameworks that the program has imported."""
    return [_loaded.get(name) or _load(name) for name in _MODULES if sys.modules.get(name) is not None]


def _load(name: str) -> Framework:
    module = importlib.import_module(f"{__package__.rpartition('.')[0]}.{_MODULES[name]}")
    return _loaded.setdefault(name, module.FRAMEWORK)


def framework_that_sees(kernel, values: list) -> Framework | None:
    """The framework that has to see a call, if any: :meth:`Framework.sees_calls`."""
    return next((framework for framework in frameworks() if framework.sees_calls(kernel, values)), None)


def framework_of(value: Any) -> Framework:
    """The framework of a tensor, or :data:`PLAIN`. Runs no code of the object's class."""
    return framework_of_type(type(value))


def framework_of_type(cls: type) -> Framework:
    """The framework of a type of tensors, or :data:`PLAIN`."""
    for framework in frameworks():
        if framework.is_tensor_type(cls):
            return framework
    return PLAIN
