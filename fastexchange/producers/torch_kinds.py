"""Messages for PyTorch's tensors without memory for each element: their kind, and what to pass instead.

They are used after a refusal, because PyTorch's own messages describe its internals.
"""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["is_differentiated", "is_dispatch_mode_active", "is_for_autograd", "is_symbolic", "why_no_memory"]


def is_dispatch_mode_active() -> bool:
    """Whether a ``TorchDispatchMode`` gets the operators of this thread. Does not import PyTorch."""
    own: Any = getattr(sys.modules.get("torch"), "_C", None)
    if own is None:
        return False
    key = own.DispatchKey.Python
    return own._dispatch_tls_is_dispatch_key_included(key) and not own._dispatch_tls_is_dispatch_key_excluded(key)


def is_for_autograd(args: tuple) -> bool:
    """Whether autograd alone has to see a call: a tensor requires grad, all are plain but for that, and no mode is active.

    False for a PyTorch that lacks one of the functions asked here: its dispatcher makes the call then.
    """
    torch: Any = sys.modules["torch"]
    own = torch._C
    plain = torch.Tensor, torch.nn.Parameter
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    try:
        if not own.is_grad_enabled() or own._len_torch_dispatch_stack() or own._len_torch_function_stack():
            return False
        if own._functorch.peek_interpreter_stack() is not None or own._get_tracing_state() is not None:
            return False
        are_plain = all(type(value) in plain and value.layout is torch.strided for value in tensors)
        return are_plain and own._any_requires_grad(*tensors)
    except AttributeError:
        return False


def is_differentiated(value) -> bool:
    """Whether `value` is a tensor by which a transform of ``torch.func`` differentiates (``grad``, ``vjp``, ``jvp`` …)."""
    torch: Any = sys.modules["torch"]
    return issubclass(type(value), torch.Tensor) and _asked(torch._C._functorch, "is_gradtrackingtensor", value)


def is_symbolic(value) -> bool:
    """Whether `value` is a tensor by which PyTorch traces or transforms a function: fake, functional, or of ``torch.vmap``.

    PyTorch has to make the calls with it, by an operator. Does not import PyTorch, and runs no code of the value's class.
    """
    torch: Any = sys.modules.get("torch")
    if not issubclass(type(value), getattr(torch, "Tensor", ())):
        return False
    functorch = torch._C._functorch
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        functional = getattr(sys.modules.get("torch._subclasses.functional_tensor"), "FunctionalTensor", ())
        return isinstance(value, functional) or _is_fake(value)
    with torch._C.DisableTorchFunctionSubclass():
        return _asked(functorch, "is_batchedtensor", value) or torch._is_functional_tensor(value)


def why_no_memory(tensor) -> str | None:
    """Why a PyTorch tensor has no memory, or other memory than its value, with advice; None for any other kind."""
    torch: Any = sys.modules["torch"]
    functorch = torch._C._functorch
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's Python code may answer otherwise
        for is_kind, why in (
            (lambda t: _asked(functorch, "is_batchedtensor", t), _BATCHED),
            (lambda t: _asked(functorch, "is_functorch_wrapped_tensor", t), _TRANSFORMED),
            (_is_fake, _FAKE),
            (lambda t: torch.Tensor.is_meta.__get__(t), _META),
            (lambda t: torch.Tensor.is_nested.__get__(t), _NESTED),
            (lambda t: torch.Tensor.is_quantized.__get__(t), _QUANTIZED),
            (lambda t: torch.Tensor.is_mkldnn.__get__(t), _MKLDNN),
            (lambda t: _asked(torch._C, "_is_zerotensor", t) or _asked(torch, "_is_zerotensor", t), _ZERO),
        ):
            if _holds(is_kind, tensor):
                return why
    return None


def _asked(module: Any, name: str, tensor) -> bool:
    """Call a predicate of PyTorch; False if this version lacks it."""
    return hasattr(module, name) and getattr(module, name)(tensor)


def _holds(is_kind: Callable[[Any], bool], tensor) -> bool:
    try:
        return bool(is_kind(tensor))
    except Exception:  # a kind of tensor for which it raises
        return False


def _is_fake(tensor) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


_BATCHED = (
    "it is the tensor that torch.vmap passes, which stands for a batch and has no memory of its own; call this outside of "
    "vmap, with the whole batch"
)
_TRANSFORMED = (
    "it is a tensor of a transform of torch.func, which tracks operations on it; call this outside of the transform, "
    "or from a torch.autograd.Function"
)
_FAKE = (
    "it is a FakeTensor, a shape without memory (torch.compile and torch.export trace with them); call this outside of the "
    "traced code, or from a torch.library.custom_op"
)
_META = (
    "it is on device meta: it has a shape and no memory; make it where the kernel runs, for example by "
    "torch.empty_like(x, device='cpu')"
)
_NESTED = "it is a nested tensor, whose parts differ in shape; pass its unbind() as a list, or its to_padded_tensor(0.0)"
_QUANTIZED = "its elements are quantised, so they are integers with a scale; pass its dequantize(), or its int_repr()"
_MKLDNN = "its layout is that of oneDNN (MKLDNN), which has no strides; pass its to_dense()"
_ZERO = "it is a tensor of zeros that has no memory; pass its clone()"
