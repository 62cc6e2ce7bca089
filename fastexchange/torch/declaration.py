"""What code that PyTorch has compiled of an operator depends on, in words that PyTorch's caches see.

The keys of PyTorch's compile caches, exported programs and generated code have of an operator its name, and nothing else: not
its schema, not the dtypes of its results, not its backward pass. So an operator's name has a digest of what it declares. The
names that kernels choose themselves contain it. Of a name that a program has chosen, PyTorch's objects show it: the
``__name__`` of the ``OpOverload`` is ``name.default__<digest>`` instead of ``name.default``, that of the ``OpOverloadPacket``
``name__<digest>``, and attributes of these names lead to them. With another declaration these are missing: what was saved is
compiled again, or refused.

Python functions that PyTorch traces (a backward pass, a rule for vmap) are no part of the operator: a program that was exported
stays right when they change. A digest of these goes into ``torch.compiler.config.cache_key_tag`` before PyTorch makes the key of
a graph with the operator.

Source: ``torch/_functorch/_aot_autograd/autograd_cache.py``, ``torch/_inductor/codecache.py``, ``torch/fx/node.py``.
"""

import hashlib
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from ..calls import dependencies
from ..calls.backward import is_function
from ..ground.parameters import signature_of
from .schema import Schema

__all__ = ["code_of", "declaration_of", "forget_compiled", "forget_name", "show_in_name", "telling"]

_RULES = 1
"""To be another number if a later version of this package makes results of other shapes or dtypes for the same declaration."""
_DIGITS = 12


def declaration_of(kernel, schema: Schema, backward) -> str:
    """Return a digest of an operator's declaration: equal in all processes, whatever the code of its kernels is."""
    kernels = [_kernel(each) for each in _steps(backward) if each is not None and not is_function(each)]
    closure = dependencies.closure_of(kernel.py_func, _Describer)
    return _digest((_RULES, str(schema), kernel.out, kernel.allows_grad, closure, kernels))


def _steps(backward) -> list:
    """The steps of a backward pass, or of two, for different places."""
    return [step for each in backward for step in _steps(each)] if isinstance(backward, (list, tuple)) else [backward]


def _kernel(kernel) -> tuple:
    """Describe a kernel, or an operator object, by what it declares and by what tells it from others of its name."""
    if hasattr(kernel, "overload"):
        return _operator(kernel.overload)
    function = kernel.py_func
    declared = str(signature_of(function)), kernel.out, kernel.mutates
    return function.__module__, function.__qualname__, declared, dependencies.closure_of(function, _Describer)


def _operator(overload) -> tuple:
    """Describe an operator of PyTorch by its name, which shows what it declares, and by its Python functions."""
    name = overload._qualified_op_name if hasattr(overload, "overloads") else overload.name()
    return str(overload.__module__), str(overload.__name__), _codes.get(name)


def _digest(described) -> str:
    return hashlib.sha256(repr(described).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


# ---- names -----------------------------------------------------------------------------------------------------------


def show_in_name(overload, declared: str) -> None:
    """Let an operator's name show its declaration wherever PyTorch writes it down."""
    packet, (namespace, _, name) = overload.overloadpacket, overload._schema.name.partition("::")
    shown = f"{name}__{declared}"  # Inductor makes names of it
    packet.__name__, overload.__name__ = shown, f"{name}.default__{declared}"
    setattr(packet, f"default__{declared}", overload)
    setattr(getattr(sys.modules["torch"].ops, namespace), shown, packet)


def forget_name(qualified: str) -> None:
    """Undo :func:`show_in_name`, for an operator that is removed: code with that name does not find another one."""
    namespace = vars(getattr(sys.modules["torch"].ops, qualified.partition("::")[0]))
    for name, packet in list(namespace.items()):
        if getattr(packet, "_qualified_op_name", None) == qualified and packet.__name__ == name:
            del namespace[name]


# ---- Python functions ------------------------------------------------------------------------------------------------

_codes: dict[str, str] = {}
"""By qualified name, the digests of operators' Python functions."""
_told: set[str] = set()
"""The digests of the operators that PyTorch has traced."""


class _Describer(dependencies._Describer):
    """Describes what functions name that call PyTorch: its objects by their names, as its version is part of its keys."""

    def describe(self, value: Any, name: str) -> Any:
        torch = sys.modules["torch"]
        if hasattr(type(value), "_kernel_options") or hasattr(type(value), "_be_replaced"):  # a kernel, an operator object
            return _kernel(value)
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return _operator(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return repr(value)
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.is_contiguous():
            return (
                str(value.dtype),
                tuple(value.shape),
                _digest(bytes(value.detach().reshape(-1).view(torch.uint8).tolist())),
            )
        if str(getattr(value, "__module__", "")).partition(".")[0] == "torch" and hasattr(value, "__qualname__"):
            return value.__module__, value.__qualname__
        return super().describe(value, name)


def code_of(name: str, functions: Iterable) -> str:
    """Return a digest of an operator's Python functions and of what they name; "" if it has none.

    If that cannot be described, it is another one in each process: nothing of the operator is taken from a cache.
    """
    flat = [part for each in functions for part in (each if isinstance(each, (list, tuple)) else [each])]
    found = [each for each in flat if is_function(each)]
    code = ""
    if found:
        describer = _Describer()
        try:
            code = dependencies._digest_of(lambda: [describer.describe(each, name) for each in found], name)[:_DIGITS]
        except dependencies.NotDescribable:
            code = uuid.uuid4().hex[:_DIGITS]
    _codes[name] = code
    return code


def telling(traced: Callable, code: str) -> Callable:
    """A function by which PyTorch traces an operator: its fake implementation, or a rule for vmap, which takes the place of that.

    It tells the caches the digest of the operator's Python functions.
    """

    def tell(*args, **kwargs):
        _told.add(code)
        config = sys.modules["torch"].compiler.config
        if hasattr(config, "cache_key_tag"):
            own = f" fastexchange {_digest(sorted(_told))}"
            if not config.cache_key_tag.endswith(own):
                config.cache_key_tag = config.cache_key_tag.partition(" fastexchange ")[0] + own
        else:  # before PyTorch 2.7
            sys.modules["torch"]._inductor.config.force_disable_caches = True
        return traced(*args, **kwargs)

    return tell if code else traced


# ---- within a process ------------------------------------------------------------------------------------------------


def forget_compiled() -> None:
    """Let PyTorch compile all functions again: some may have been compiled with another declaration of an operator."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
