"""PyTorch: that a storage keeps its memory while something else reads it."""

import contextlib

__all__ = ["forbid_resizing", "forbid_resizing_of"]


def forbid_resizing(tensor) -> None:
    """From now on ``resize_()`` of the tensor's storage is a RuntimeError, as it is after ``tensor.numpy()``.

    Otherwise it could free, from another thread, what a kernel reads that runs without the GIL. PyTorch's exports share the
    storage and do not prevent it.
    """
    import torch

    if type(tensor) is torch.Tensor and _no_modes(torch._C):
        storage = tensor.untyped_storage()
    else:
        with _without_modes():
            storage = tensor.untyped_storage()
    if storage.resizable():
        forbid_resizing_of(storage)


def forbid_resizing_of(storage) -> None:
    """:func:`forbid_resizing` of any tensor in a storage."""
    import torch

    if _no_modes(torch._C):
        _view_nothing_of(storage)
        return
    with _without_modes():
        _view_nothing_of(storage)


def _view_nothing_of(storage) -> None:
    """NumPy's view of any tensor in a storage forbids that it is resized, also of one without elements."""
    import torch

    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (0,), (1,)).numpy()


def _no_modes(torch_c) -> bool:
    """Whether this thread is in no mode that would see calls of PyTorch's functions. False where that cannot be told."""
    try:
        return not torch_c._len_torch_function_stack() and not torch_c._len_torch_dispatch_stack()
    except AttributeError:
        return False


@contextlib.contextmanager
def _without_modes():
    """Modes of the user's (fake tensors, a default device, functions that see all calls) are none of our business meanwhile."""
    import torch

    with contextlib.ExitStack() as stack:
        for name in ("_DisableTorchDispatch", "DisableTorchFunction"):
            stack.enter_context(getattr(torch._C, name, contextlib.nullcontext)())
        yield
