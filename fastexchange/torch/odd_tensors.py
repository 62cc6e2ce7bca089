"""Kinds of PyTorch's tensors, and messages for those without memory for each element: what to pass instead.

Messages are used after a refusal, because PyTorch's own describe its internals. The predicates of the kinds are private
to PyTorch: where a version lacks one, another way is taken, or the tensor's dispatch keys decide.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = [
    "has_tangent", "is_differentiated", "is_dispatch_mode_active", "is_jit_tracing", "is_symbolic", "is_wrapper", "private",
    "why_no_memory", "without_subclasses",
]  # fmt: skip


def private(name: str) -> Any:
    """What has this dotted name below ``torch``; None if this PyTorch lacks it, or none is imported."""
    found: Any = sys.modules.get("torch")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def without_subclasses():
    """Context manager: no Python code of a subclass answers for a tensor."""
    return getattr(sys.modules["torch"]._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)()


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` runs."""
    traced = private("_C._get_tracing_state") or private("jit.is_tracing")
    return traced is not None and traced() not in (None, False)


def is_dispatch_mode_active() -> bool:
    """Whether a ``TorchDispatchMode``, ``torch.jit.trace`` or a transform of ``torch.func`` gets this thread's operators.

    Does not import PyTorch.
    """
    if is_jit_tracing():
        return True
    told = [private(f"_C.{name}") for name in ("DispatchKey.Python", _TRANSFORMS, *_TELL_OF_KEYS)]
    if None not in told:
        key, transforms, is_included, is_excluded = told
        return is_included(transforms) or (is_included(key) and not is_excluded(key))
    current = private("utils._python_dispatch._get_current_dispatch_mode")
    return current is not None and current() is not None


_TRANSFORMS = "DispatchKey.FuncTorchDynamicLayerFrontMode"
_TELL_OF_KEYS = "_dispatch_tls_is_dispatch_key_included", "_dispatch_tls_is_dispatch_key_excluded"


def is_differentiated(value) -> bool:
    """Whether a transform of ``torch.func`` differentiates by the tensor `value` (``grad``, ``vjp``, ``jvp`` …)."""
    torch: Any = sys.modules["torch"]
    if not issubclass(type(value), torch.Tensor) or not _asked(private("_C._functorch"), "is_gradtrackingtensor", value):
        return False
    return (torch.is_grad_enabled() and value.requires_grad) or has_tangent(value)  # else it is a constant to the transform


def has_tangent(tensor) -> bool:
    """Whether a tensor is a dual number of forward-mode differentiation at the current level."""
    from torch.autograd import forward_ad

    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    try:
        with _seen_by_autograd():
            return forward_ad.unpack_dual(tensor).tangent is not None
    except Exception:  # fake, functorch's …: their own __dlpack__ decides
        return False


def _seen_by_autograd():
    """Context manager: autograd is asked also where it has been passed, as in the calls of a ``TorchDispatchMode``."""
    names = "_ForceDispatchKeyGuard", "_dispatch_tls_local_include_set", "DispatchKeySet", "DispatchKey", _TELL_OF_KEYS[1]
    guard, included, keys, key, is_excluded = found = [private(f"_C.{name}") for name in names]
    if None in found or not is_excluded(key.AutogradFunctionality):
        return contextlib.nullcontext()
    return guard(included(), keys(key.Python).add(key.FuncTorchDynamicLayerFrontMode))


def is_symbolic(value) -> bool:
    """Whether `value` is a tensor by which PyTorch traces or transforms a function: fake, functional, or of ``torch.func``.

    PyTorch has to make the calls with it, by an operator. Does not import PyTorch, and runs no code of the value's class.
    """
    torch: Any = sys.modules.get("torch")
    if not issubclass(type(value), getattr(torch, "Tensor", ())):
        return False
    functorch = private("_C._functorch")
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        functional = getattr(sys.modules.get("torch._subclasses.functional_tensor"), "FunctionalTensor", ())
        return isinstance(value, functional) or _is_fake(value)
    with without_subclasses():
        return _asked(functorch, "is_functorch_wrapped_tensor", value) or _asked(torch, "_is_functional_tensor", value)


def is_wrapper(value) -> bool:
    """Whether `value` is a tensor that wraps others: by its class's ``__torch_dispatch__``, or for gradients in a batch."""
    if not issubclass(type(value), sys.modules["torch"].Tensor):
        return False
    keys, key = private("_C._dispatch_keys"), private("_C.DispatchKey.Python")
    is_by_class = None not in (keys, key) and keys(value).has(key)
    return is_by_class or _asked(private("_C._functorch"), "is_legacy_batchedtensor", value)


def why_no_memory(tensor) -> str | None:
    """Why a PyTorch tensor has no memory, or other memory than its value, with advice; None for any other kind."""
    torch: Any = sys.modules["torch"]
    functorch = private("_C._functorch")
    with without_subclasses():  # a subclass's Python code may answer otherwise
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
    "it is on device meta: it has a shape and no memory; make it where the kernel runs: "
    "torch.empty_like(x, device='cpu') or device='cuda'"
)
_NESTED = "it is a nested tensor, whose parts differ in shape; pass its unbind() as a list, or its to_padded_tensor(0.0)"
_QUANTIZED = "its elements are quantised, so they are integers with a scale; pass its dequantize(), or its int_repr()"
_MKLDNN = "its layout is that of oneDNN (MKLDNN), which has no strides; pass its to_dense()"
_ZERO = "it is a tensor of zeros that has no memory; pass its clone()"
