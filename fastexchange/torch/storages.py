"""PyTorch: prevent a storage from freeing memory that is in use."""

import contextlib

__all__ = ["forbid_resizing", "forbid_resizing_of", "without_modes"]


def forbid_resizing(tensor) -> None:
    """Make ``resize_()`` of the tensor's storage raise RuntimeError, as after ``tensor.numpy()``.

    Otherwise another thread could free memory that a kernel reads without the GIL. PyTorch's exports do not prevent that.
    """
    import torch

    if type(tensor) is torch.Tensor and _no_modes(torch._C):
        storage = tensor.untyped_storage()
    else:
        with without_modes():
            storage = tensor.untyped_storage()
    if storage.resizable():
        forbid_resizing_of(storage)


def forbid_resizing_of(storage) -> None:
    """:func:`forbid_resizing` for all tensors in a storage."""
    import torch

    if _no_modes(torch._C):
        _view_nothing_of(storage)
        return
    with without_modes():
        _view_nothing_of(storage)


def _view_nothing_of(storage) -> None:
    """Make a NumPy view of an empty tensor in the storage: that also forbids resizing."""
    import torch

    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (0,), (1,)).numpy()


def _no_modes(torch_c) -> bool:
    """Whether no mode of this thread intercepts PyTorch's functions. False if that is unknown."""
    try:
        return not torch_c._len_torch_function_stack() and not torch_c._len_torch_dispatch_stack()
    except AttributeError:
        return False


@contextlib.contextmanager
def without_modes():
    """Context manager: disable the user's modes (fake tensors, a default device, function modes)."""
    import torch

    with contextlib.ExitStack() as stack:
        for name in ("_DisableTorchDispatch", "DisableTorchFunction"):
            stack.enter_context(getattr(torch._C, name, contextlib.nullcontext)())
        yield
