"""Registering kernels with PyTorch's dispatcher.

An operator is what ``torch.compile``, ``torch.export`` and autograd see of a kernel: a schema, a *fake* implementation that gives
the shapes of its results (both in ``schema``), a backward pass (``autograd``), and the kernel itself for tensors with
memory. An operator and its kernel live as long as the process, because compiled graphs refer to the operator.

Source: ``torch.library``.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from ..calls.filled import is_debugging
from ..ground.once import for_ever, forkable_lock
from .autograd import register_backward
from .boxed_operator import BoxedKernel, count_writes, result_refused
from .declaration import code_of, declaration_of, forget_compiled, forget_name, show_in_name, telling
from .dispatch_table import Table
from .mapped import call_mapped
from .schema import Schema, fake_of
from .transforms import refuse_gradients

__all__ = ["Registered", "has_operators", "is_registered", "register", "registered_as"]

_lock = forkable_lock()
_registered: dict[str, "Registered"] = {}
"""By qualified name, what this process has registered."""
_holders: dict[str, Any] = {}
"""By qualified name, a library for each record of PyTorch that has to stay."""
_pending: set[str] = set()
"""Names that are being registered: PyTorch looks each up meanwhile."""


class Registered:
    """A registered operator: the kernel, its schema and options, PyTorch's overload, and what holds the registrations."""

    def __init__(self, kernel, kernels, schema: Schema, options: tuple, overload, function, rows: list[int], libraries, boxed):
        self.kernel, self.schema, self.options, self.overload = kernel, schema, options, overload
        self.kernels = kernels
        """Those that get the calls with tensors on the CPU, and on a GPU; None: none does."""
        self.rows = rows
        """Words of its dispatch table, as ``torch.dispatch_table.Table`` gives them."""
        self.depends: tuple[str, str] = "", ""
        """Digests of what compiled code depends on: its declaration, and its Python functions."""
        self._libraries, self._boxed = libraries, boxed
        self.former: list = []
        """The ``OpOverload`` objects of operators that it has replaced."""
        self.operators: weakref.WeakSet = weakref.WeakSet()
        """The ``TorchOp`` objects of it."""
        self.function = function
        """The ``apply`` of an ``autograd.Function`` that calls the kernel; None without a backward pass."""
        self.is_checked = _is_checked()
        """Whether PyTorch's dispatcher has to make all calls: its implementation checks what the kernel writes to."""

    def take_over(self, replaced: "Registered") -> None:
        """Let all that has the replaced operator's objects find this operator."""
        self.former = [*replaced.former, replaced.overload]
        for overload in self.former:  # PyTorch's dispatcher gives Python the first OpOverload that it has seen
            vars(overload).update(vars(self.overload))
        for operator in list(replaced.operators):
            operator._be_replaced(self)

    def remove(self) -> None:
        """Take the operator back from PyTorch."""
        for boxed in self._boxed:
            boxed.remove()
        for each in self._libraries:
            if each is not None:
                each._destroy()
        forget_name(self.overload._schema.name)


def has_operators(torch) -> bool:
    """Whether this PyTorch has what operators need."""
    return hasattr(torch.library, "register_vmap")  # the newest of it: PyTorch 2.6 has it, 2.4 has not


def registered_as(name: str) -> Registered | None:
    """The operator of this qualified name, if it is registered here."""
    return _registered.get(name)


def is_registered(name: str) -> bool:
    """Whether an operator of this qualified name is registered here, or is being registered."""
    return name in _registered or name in _pending


@contextlib.contextmanager
def _as_pending(name: str):
    _pending.add(name)
    try:
        yield
    finally:
        _pending.discard(name)


def register(torch, kernel, name: str, schema: Schema, options: tuple, replace: bool, what: str):
    """Register an operator, unless the same kernel has it already. Raises ValueError.

    If the operator that replaces another one cannot be registered, the other is registered again.
    """
    with _lock, _as_pending(name):
        known = _registered.get(name)
        if known is not None and known.kernel == kernel and known.options == options:
            return known
        namespace, _, short = name.partition("::")
        if not replace and (known is not None or hasattr(getattr(torch.ops, namespace), short)):
            owner = repr(known.kernel) if known is not None else "another library"
            raise ValueError(f"{what}: {name!r} is registered, by {owner}; give another name, or replace=True")
        if known is None:
            made = _registered[name] = for_ever(_made(torch, kernel, name, schema, options, what))
            return made
        del _registered[name]
        known.remove()
        try:
            made = _made(torch, kernel, name, schema, options, what)
        except BaseException:
            again = _registered[name] = for_ever(_made(torch, known.kernel, name, known.schema, known.options, what))
            again.take_over(known)
            raise
        made.take_over(known)
        if made.depends != known.depends:
            forget_compiled()
        _registered[name] = for_ever(made)
        return made


def _made(torch, kernel, name: str, schema: Schema, options: tuple, what: str) -> Registered:
    """Register an operator whose name is free. Nothing is left of one that fails."""
    _, backward, setup_context, vmap = options
    namespace, _, short = name.partition("::")
    fragment = for_ever(torch.library.Library(namespace, "FRAGMENT"))  # one that is freed takes the name's OpOverload with it
    function = shadows = None
    boxed: list[BoxedKernel] = []
    try:
        fragment.define(short + str(schema), tags=_tags(torch))
        _hold(torch, namespace, short)
        overload = getattr(getattr(torch.ops, namespace), short).default
        is_checked = _is_checked()
        on_cpu, on_cuda = _kernels_of(kernel)
        table = Table(overload, on_cuda is not None)
        for each, key in (on_cpu, "CPU"), (on_cuda, "CUDA"):
            if each is not None and not is_checked and BoxedKernel.takes(each, schema):
                boxed.append(BoxedKernel(each, schema))
                boxed[-1].register(namespace, short)
            elif each is not None:
                fragment.impl(short, _implementation(each, schema, is_checked), key)
        depends = declared, code = declaration_of(kernel, schema, backward), code_of(name, (backward, setup_context, vmap))
        if declared not in name:
            show_in_name(overload, declared)
        fake = telling(fake_of(kernel, schema), code)
        torch.library.register_fake(name, _counting(fake, schema) if schema.mutated else fake, lib=fragment)
        if schema.mutated:
            _count_functional(torch, fragment, name, schema)
        if kernel.allows_grad:  # else PyTorch lets the results require grad, with a backward pass that warns
            fragment.impl(short, torch.library.fallthrough_kernel, "Autograd")
        else:
            shadows = refuse_gradients(torch, fragment, overload, kernel, schema, backward is not None)
        if backward is not None:
            function = register_backward(torch, fragment, overload, kernel, schema, backward, setup_context, what)
        if vmap is not None and (vmap != "loop" or not _has_tensors_by_keyword(schema)):
            is_loop = vmap == "loop"  # a rule of the user's may call no operator of ours
            rule = _looping(torch, kernel, overload, schema) if is_loop else telling(vmap, code)
            torch.library.register_vmap(name, rule, lib=fragment)
    except BaseException:
        for each in boxed:
            each.remove()
        fragment._destroy()
        if shadows is not None:
            shadows._destroy()
        forget_name(name)
        raise
    made = Registered(kernel, (on_cpu, on_cuda), schema, options, overload, function, table.words(), [fragment, shadows], boxed)
    made.depends = depends
    return made


def _kernels_of(kernel) -> tuple:
    """Return the kernels that get the calls with tensors on the CPU and on CUDA devices; None: none."""
    if hasattr(kernel, "cuda_kernel"):
        return kernel.on_cpu, kernel
    if kernel._device_kernel is None:
        return kernel, None
    return kernel, kernel.cuda._launched(kernel._kernel_options.launch, None, kernel.mutates, None, kernel.__qualname__)


def _implementation(kernel, schema: Schema, is_checked: bool) -> Callable:
    """Return the Python function that makes calls of PyTorch's dispatcher by a kernel, the kernel itself if possible."""
    call = _checking(kernel, schema) if is_checked else kernel
    if schema.outputs == 0:
        call = _without_result(call, kernel)
    return _counting(call, schema) if schema.mutated else call


def _hold(torch, namespace: str, short: str) -> None:
    """Let PyTorch keep its record of an operator's name for ever.

    Compiled graphs and overloads have the record's address. Without a registration PyTorch frees it, and another operator
    gets it.
    """
    name = f"{namespace}::{short}"
    if name not in _holders:
        fragment = torch.library.Library(namespace, "FRAGMENT")
        fragment.impl(short, torch.library.fallthrough_kernel, "AutogradPrivateUse3")  # a key that no tensor of this process has
        _holders[name] = fragment


def _without_result(call: Callable, kernel) -> Callable:
    """`call` of a kernel as an operator without outputs: a result is an argument that it has been given, or it is refused."""

    def without_result(*args, **kwargs) -> None:
        result = call(*args, **kwargs)
        if result is not None and kernel._pattern is None:
            raise result_refused(kernel, result)

    return without_result


def _tags(torch) -> tuple:
    """The tags of all operators: their arguments keep the strides that they have outside of a compiled graph."""
    exact = getattr(torch.Tag, "needs_exact_strides", None)
    return torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order if exact is None else exact


def _counting(call: Callable, schema: Schema) -> Callable:
    """`call`, which first tells autograd which arguments are written to: it moves their version counters."""

    def counting(*args, **kwargs):
        count_writes(schema, args, kwargs)
        return call(*args, **kwargs)

    return counting


def _count_functional(torch, fragment, name: str, schema: Schema) -> None:
    """Let the tensors by which AOTAutograd traces have their writes counted: no implementation of the operator gets these.

    Without it a compiled backward pass would read a tensor that was saved and then written to, where PyTorch raises. PyTorch
    before 2.5 has no such rules.
    """
    register_rule = getattr(torch.library, "register_torch_dispatch", None)
    if register_rule is None:
        return
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def count(mode, function, types, args=(), kwargs=None):
        count_writes(schema, args, kwargs or {})
        return mode.__torch_dispatch__(function, types, args, kwargs)

    register_rule(name, FunctionalTensorMode, count, lib=fragment)


def _has_tensors_by_keyword(schema: Schema) -> bool:
    """Whether tensors are keyword-only, for which PyTorch takes no rule for ``torch.vmap``."""
    return any(each.is_keyword_only and each.type.startswith("Tensor") for each in schema.arguments)


def _looping(torch, kernel, overload, schema: Schema) -> Callable:
    """The rule for ``torch.vmap``: a native loop if possible, else call the operator for each item, and stack the results."""

    def loop(info, in_dims, *args, **named):
        if not named and (made := call_mapped(kernel, schema, in_dims, args)) is not NotImplemented:
            return made, (0,) * len(made) if isinstance(made, tuple) else 0
        for position in schema.mutated:
            if position < len(args) and args[position] is not None and in_dims[position] is None:
                name = schema.arguments[position].name
                raise ValueError(
                    f"{overload}: {name!r} is written to, and vmap has not been given a batch of it (in_dims is None)"
                )
        rows = [
            overload(*(_row(value, dim, i) for value, dim in zip(args, in_dims, strict=True)), **named)
            for i in range(info.batch_size)
        ]
        if not schema.outputs:
            return None, None
        if not rows:
            empty = [_row_of_empty(value, dim) for value, dim in zip(args, in_dims, strict=True)]
            return _stacked(torch, [overload(*empty, **named)], slice(0))
        return _stacked(torch, rows, slice(None))

    return loop


def _row(value, dim, i: int):
    if isinstance(value, (list, tuple)):
        return [_row(each, of, i) for each, of in zip(value, dim, strict=True)] if dim is not None else value
    return value if dim is None else value.select(dim, i)


def _row_of_empty(value, dim):
    if isinstance(value, (list, tuple)):
        return [_row_of_empty(each, of) for each, of in zip(value, dim, strict=True)] if dim is not None else value
    return (
        value if dim is None else value.new_zeros([extent for at, extent in enumerate(value.shape) if at != dim % value.dim()])
    )


def _stacked(torch, rows: list, part: slice):
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(each)[part] for each in zip(*rows, strict=True)), (0,) * len(rows[0])
    return torch.stack(rows)[part], 0


# ---- FASTEXCHANGE_DEBUG=1 ------------------------------------------------------------------------------------------


_is_checked = is_debugging


def _checking(kernel, schema: Schema) -> Callable:
    """The kernel, which raises RuntimeError after it has written to an argument that is not declared as written."""

    def call(*args, **kwargs):
        import torch

        names = [each.name for each in schema.arguments]
        before = []
        for position, name in enumerate(names):
            value = args[position] if position < len(args) else kwargs.get(name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, torch.Tensor) and position not in schema.mutated:
                    before.append((name, position, each, each.clone()))
        result = kernel(*args, **kwargs)
        for name, position, value, copy in before:
            if not torch.equal(value.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8)):
                raise RuntimeError(
                    f"{kernel.__qualname__}(): the kernel has written to argument {name!r} (position {position}), which "
                    "mutates= does not name; PyTorch assumes that it is unchanged"
                )
        return result

    return call
