"""Kernels as operators of PyTorch: ``kernel.as_torch_op``. See ``library``."""

import re
import sys

from .._abi import ffi
from ..arguments.discovery import learn_type
from ..calls.options import checked_mutates
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..ground.cpython import (
    CALLABLE_CONTEXT,
    CALLABLE_VECTORCALL,
    KERNEL_CONTEXT,
    NativeCallable,
    NativeDispatcher,
    enable_vectorcall,
)
from ..ground.native import address_of
from ..ground.once import for_ever
from ..ground.safe_repr import shown, type_name
from ..producers.framework import framework_of_type
from .autograd import backward_by_place
from .boxed_operator import call_overload
from .declaration import declaration_of
from .library import Registered, has_operators, register, registered_as
from .modes import why_no_counts, why_no_modes
from .schema import Argument, Schema, schema_of
from .traced import asks_is_traced, is_traced

__all__ = ["TorchOp", "as_torch_op"]

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*", re.ASCII)


class TorchOp(NativeCallable):
    """A kernel as an operator of PyTorch. Made by ``kernel.as_torch_op(...)``; called as ``torch.ops.namespace.name`` is.

    Attributes
    ----------
    kernel : the kernel.
    name : the qualified name, ``"namespace::name"``.
    overload : PyTorch's operator, a ``torch._ops.OpOverload``.
    """

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, kernel, name: str, schema: Schema, registered: Registered):
        self.kernel, self.name, self.overload = kernel, name, registered.overload
        self._function, self._schema, self._options = registered.function, schema, registered.options
        self._kernels, self._waits = registered.kernels, False
        self._has_backward = registered.options[1] is not None
        self._is_replaced, self._is_checked, self._rows = False, registered.is_checked, registered.rows
        registered.operators.add(self)

    @asks_is_traced
    def __call__(self, /, *args, **kwargs):
        """Make the calls that CPython does not pass to native code, and those that PyTorch's Dynamo traces."""
        if is_traced():
            return self.overload(*args, **kwargs)
        self._prepare()
        return self._dispatch(*args, **kwargs)

    def _prepare(self) -> None:
        """Let CPython call native code, once it can tell which calls the kernel may make."""
        is_native = any(map(_is_native, self._kernels)) and not self._is_replaced and not self._is_checked and not why_no_modes()
        if not is_native or not self._rows or (self._schema.mutated and why_no_counts()):
            return
        from .operator_call import vectorcall_operator

        torch = sys.modules["torch"]
        for each in (torch.Tensor, torch.nn.Parameter):  # the kernel may meet neither: PyTorch's dispatcher gives it handles
            learn_type(each)
        names = [id(for_ever(sys.intern(each.name))) for each in self._schema.arguments]
        kinds = [_kinds_of(each) for each in self._schema.arguments]
        self._buffers = [ffi.new("int64_t[]", list(words) or [0]) for words in (self._schema.mutated, names, kinds, self._rows)]
        native = self._native = ffi.new("fx_operator *")
        native.slow_name, native.runtime = id(for_ever(sys.intern("_dispatch"))), runtime().address
        native.tensor_type, native.parameter_type = id(torch.Tensor), id(torch.nn.Parameter)
        native.mutated, native.names, native.kinds, native.rows = map(address_of, self._buffers)
        native.mutated_count, native.count, native.row_count = len(self._schema.mutated), len(names), len(self._rows) // 2
        native.function = 0 if self._function is None else id(self._function)
        self._take_kernels()
        enable_vectorcall(TorchOp, TorchOp.__call__)
        self._context = address_of(native)
        self._vectorcall = vectorcall_operator.address  # last: Ctrl-C may come between any two statements

    def _take_kernels(self) -> None:
        """Let native code call the kernels that it can call by now."""
        native = self._native
        for place, kernel in enumerate(self._kernels):
            if _is_native(kernel) and not native.kernels[place]:
                context = KERNEL_CONTEXT if isinstance(kernel, NativeDispatcher) else CALLABLE_CONTEXT
                native.contexts[place] = kernel._native.address
                native.vectorcalls[place] = id(kernel) + context - (CALLABLE_CONTEXT - CALLABLE_VECTORCALL)
                native.kernels[place] = id(kernel)
        self._waits = any(kernel is not None and not _is_native(kernel) for kernel in self._kernels)

    def _be_replaced(self, registered: Registered) -> None:
        """Let PyTorch's dispatcher make all calls: another kernel has the name now, and compiled graphs call that, too."""
        self._is_replaced, self.overload = True, registered.overload
        self._vectorcall = 0

    def _dispatch(self, /, *args, **kwargs):
        """Make a call by PyTorch's dispatcher. Native code calls this."""
        if self._waits:
            self._take_kernels()
        return call_overload(self.overload, args, kwargs)

    def __repr__(self) -> str:
        return f"<fast_args operator {self.overload._schema}>"

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self  # as functions are, and PyTorch's overloads: a module that has one can be copied

    def __reduce__(self):
        _, backward, setup_context, vmap = self._options
        mutates = tuple(self._schema.arguments[position].name for position in self._schema.mutated)
        return _unpickled, (self.kernel, self.name, mutates, backward, setup_context, vmap)


enable_vectorcall(TorchOp, TorchOp.__call__)


def _is_native(kernel) -> bool:
    """Whether native code can call a kernel by now: one for the CPU, after its first call."""
    if hasattr(kernel, "_prepare"):
        kernel._prepare()
    return kernel is not None and bool(kernel._vectorcall)


def _kinds_of(argument: Argument) -> int:
    """The types of a schema whose objects the kernel gets for an argument without a conversion by PyTorch, as bits."""
    return 1 << structs.SCHEMA_TYPES.index(argument.type) | (structs.SCHEMA_NONE if argument.is_optional else 0)


def as_torch_op(kernel, name: str, *, backward, setup_context, mutates, vmap, replace: bool) -> TorchOp:
    """Register a kernel as an operator. See :meth:`FastKernel.as_torch_op`."""
    what = f"{kernel.__qualname__}.as_torch_op()"
    torch = _torch(what)
    framework_of_type(torch.Tensor).know(kernel)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"{what}: an operator's name is 'namespace::name', not {shown(name)}")
    mutates = checked_mutates(mutates if mutates is not None else kernel.mutates or (), what)
    backward = backward_by_place(kernel, kernel.backward if backward is None else backward, what)
    if backward is not None and kernel.allows_grad:
        raise ValueError(f"{what}: a kernel with grad='allow' hides its arguments from autograd; backward= needs grad='refuse'")
    if backward is None and setup_context is not None:
        raise ValueError(f"{what}: setup_context= needs backward=")
    if isinstance(kernel.returns, type) and not issubclass(kernel.returns, torch.Tensor):
        raise TypeError(f"{what}: an operator returns PyTorch's tensors, and this kernel returns={type_name(kernel.returns)}")
    if kernel._pattern is None and not mutates:
        raise TypeError(
            f"{what}: the kernel declares neither outputs, fast_args(out=...), nor arguments that it writes to, mutates=(...): "
            "as an operator it would do nothing"
        )
    schema = schema_of(kernel.py_func, kernel._pattern, mutates, what)
    registered = register(torch, kernel, name, schema, (str(schema), backward, setup_context, vmap), replace, what)
    return TorchOp(kernel, name, schema, registered)


def _unpickled(kernel, name: str, mutates: tuple, backward, setup_context, vmap) -> TorchOp:
    """Return the operator of a pickle: the one of this name, or one of the pickled kernel.

    Raises ValueError if the name is registered with another declaration.
    """
    known = registered_as(name)
    if known is None:
        return as_torch_op(
            kernel, name, backward=backward, setup_context=setup_context, mutates=mutates, vmap=vmap, replace=False
        )
    what = f"{kernel.__qualname__}, an operator that was pickled"
    schema = schema_of(kernel.py_func, kernel._pattern, mutates, what)
    if known.depends[0] != declaration_of(kernel, schema, backward):
        raise ValueError(f"{what}: {name!r} is registered, by {known.kernel!r}, with another declaration")
    return TorchOp(known.kernel, name, known.schema, known)


def _torch(what: str):
    """Return PyTorch. Raises ImportError if it is missing or too old."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{what} needs PyTorch, pip install torch: {error}", name="torch") from error
    if not has_operators(torch):
        raise ImportError(
            f"{what} needs a PyTorch with torch.library.register_vmap, and {torch.__version__} has none: install a newer one",
            name="torch",
        )
    return torch
