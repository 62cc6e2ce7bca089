"""What PyTorch's tensors have besides what DLPack says of them."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..ground.dtype_registry import ML_DTYPES, dtype_of
from ..producers.framework import Framework
from . import modes
from .checks import (
    call_dlpack,
    check,
    check_kind,
    check_storage,
    is_recorded,
    is_tensor,
    is_tensor_type,
    narrow_elements,
    overrides_functions,
)
from .odd_tensors import is_dispatch_mode_active, is_symbolic, why_no_memory
from .offsets import guard
from .storages import forbid_resizing

__all__ = ["FRAMEWORK"]


class _PyTorch(Framework):
    """PyTorch. All its tensors are mutable, and their storages may be resized."""

    takes_all = False
    is_mutable = True
    ignores_offset = True  # before version 2.10

    def is_tensor_type(self, cls: type) -> bool:
        return is_tensor_type(cls)

    def tensor_type(self, cls: type) -> type:
        import torch

        return torch.Tensor

    def why_no_table(self, cls: type) -> str:
        return "its __torch_function__ intercepts __dlpack__: each call calls __dlpack__" if overrides_functions(cls) else ""

    def check(self, tensor, allows_grad: bool = False, allows_bits: bool = False) -> None:
        check(tensor, allows_grad, allows_bits)

    def why_no_memory(self, tensor) -> str | None:
        return why_no_memory(tensor)

    def why_narrow(self, tensor) -> str | None:
        name = narrow_elements(tensor)
        whole = f"{name[:-1]}8" if name else None
        return name and (
            f"Numba cannot compute with its elements, {name}; convert it (.view(torch.{whole})), or make the kernel with "
            f"fast_args(storage=True), which gives it their bits as {whole}"
        )

    def conversion(self, wider: str) -> str:
        return f"{'.float() or ' if wider == 'float32' else ''}.to(torch.{wider})"

    def is_read_in_memory(self, tensor) -> bool:
        return guard().knows_views and tensor.device.type == "cpu" and guard().reads(tensor)

    def exported_as(self, tensor):
        check_kind(tensor)
        check_storage(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    def detached(self, tensor):
        return tensor.detach()

    def as_numpy(self, tensor) -> np.ndarray:
        """See :class:`Framework`. Elements of which only ml_dtypes has a type are viewed as integers first."""
        import torch

        key = ML_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if key is None or tensor.device.type != "cpu":
            return tensor.detach().numpy()
        with suppress(ImportError):
            import ml_dtypes  # noqa: F401  (then their types have dtypes)
        dtype = dtype_of(*key)
        if dtype is None:
            raise BufferError(f"NumPy has no dtype for elements {tensor.dtype}: install ml_dtypes")
        return tensor.detach().view(getattr(torch, f"int{key[1]}")).numpy().view(dtype)

    def from_numpy(self, array: np.ndarray, from_dlpack):
        import torch

        if str(array.dtype) not in ML_DTYPES:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, str(array.dtype)))

    def hold_memory(self, tensor) -> None:
        forbid_resizing(tensor)

    def elements_of(self, tensor):
        import torch

        return torch.empty(0, dtype=tensor.dtype)

    def with_elements_of(self, made, origin):
        """See :class:`Framework`. Native code views integers of less than a byte as bytes."""
        if not is_tensor_type(type(origin)) or narrow_elements(origin) is not None or made.dtype == origin.dtype:
            return made
        return made.view(origin.dtype)

    def as_dlpack_raises(self, tensor, error: Exception) -> Exception:
        """See :class:`Framework`. For dtypes unknown to DLPack the table's functions raise RuntimeError with a C++ trace."""
        if type(error) is not RuntimeError:
            return error
        try:
            call_dlpack(tensor.detach())
        except Exception as own:
            return own
        return error

    def sees_calls(self, kernel, values: list) -> bool:
        """See :class:`Framework`. A mode sees only the calls of kernels that declare their outputs, or what they write to."""
        if kernel.backward is not None and is_recorded([each for each in values if is_tensor(each)]):
            return True
        if kernel.out is not None or kernel.mutates is not None:
            has_tensors = any(map(is_tensor, values))
            if has_tensors or modes.are_expected():
                modes.why_no_modes()  # asked now, as the next call may be native
            if has_tensors and is_dispatch_mode_active():
                return True
        return any(map(is_symbolic, values))

    def why_calls_are_slow(self) -> str:
        why = modes.why_no_modes()
        return f"native code cannot tell PyTorch's modes: {why}" if why else ""

    def know(self, kernel) -> None:
        from .tracing import find_by_name

        find_by_name()

    def call(self, kernel, bound: tuple):
        """See :class:`Framework`. Raises an error for a call that autograd has to see, and that no operator makes."""
        from .tracing import call_symbolic, check_recorded

        result = call_symbolic(kernel, bound)
        if result is NotImplemented and kernel.backward is not None:
            check_recorded(kernel, bound)
        return result

    def called(self, kernel, bound: tuple) -> tuple[str, Sequence[str]]:
        from .tracing import operator_of

        name = operator_of(kernel, bound)
        return f"PyTorch sees this call, and makes it by torch.ops.fastexchange.{name}" if name else "", ()

    def numpy_expression(self, tensor) -> str:
        return "{}.detach().numpy()" if tensor.requires_grad else "{}.numpy()"


FRAMEWORK = _PyTorch()
