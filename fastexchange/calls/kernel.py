"""What ``fast_args`` makes: a Numba dispatcher that takes tensors of any framework, at the cost of C.

Calls go to the native shim (``dispatch.vectorcall``), which makes those that it knows; any other comes back to
:meth:`FastKernel._call_slowly`. Nothing is loaded or compiled before a kernel's first call,
which also makes its native memory.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import compiler

from ..ground.cpython import NativeDispatcher, enable_vectorcall
from ..ground.numba_internals import (
    CPUDispatcher,
    compile_with,
    failures,
    is_object_mode,
    locals_of,
    numbas_call,
    pipeline_of,
    use_cache,
)
from ..ground.once import forkable_lock
from ..ground.parameters import Parameters
from ..ground.shape_notation import pattern_of
from .kernel_cache import KernelCache, with_unique_symbols

__all__ = ["FastKernel", "Kernel", "KernelCounts", "KernelOptions", "kernel_of"]


class KernelCounts(NamedTuple):
    """How a kernel's calls went. See :meth:`FastKernel.counts`."""

    fast: int
    """Calls that the native shim made, without Python."""
    slow: int
    """Calls that went through the slow path: the first of their shape, or with an argument only Numba understands."""
    compiled: int
    """Signatures that Numba has compiled."""


class KernelOptions(NamedTuple):
    """How a kernel treats tensors: what ``fast_args`` is told beside the options of Numba."""

    allows_grad: bool = False
    storage: bool = False
    returns: "str | type | None" = None
    out: "str | None" = None
    cuda: Any = None
    launch: Any = None

    @property
    def guard(self) -> int:
        """The number of the guard that its tensors have to pass: see ``fx_guard``."""
        from ..producers.torch_offsets import BITS_ALLOWED, GRAD_ALLOWED

        return GRAD_ALLOWED * self.allows_grad | BITS_ALLOWED * self.storage


class Kernel:
    """What kernels for the CPU and for CUDA have in common: a Python function, and options."""

    py_func: Any
    _parameters: Any
    _kernel_options = KernelOptions()
    _is_numbas: bool = False  # made by Numba's decorators, see accelerate(): what Numba refuses, it refuses in Numba's words
    _device_kernel: Any = None

    allows_grad = property(lambda self: self._kernel_options.allows_grad, doc="Whether it takes tensors that require grad.")
    storage = property(
        lambda self: self._kernel_options.storage, doc="Whether it gets the bits of elements that Numba has no type for."
    )
    returns = property(lambda self: self._kernel_options.returns, doc="What says of which framework its results are.")
    out = property(lambda self: self._kernel_options.out, doc="The notation that declares its outputs, or None.")
    cuda = property(lambda self: self._kernel_options.cuda, doc="The kernel that gets the calls with tensors on a GPU, or None.")

    def __repr__(self):
        return f"<fast_args {self.py_func.__module__}.{self.py_func.__qualname__}{inspect.signature(self.py_func)}>"

    def _refused(self, position: int, error: BaseException):
        """Called by the shim for an exception that a producer raised: raise it with the argument's name."""
        from ..exchange.errors import refused

        try:
            refused(self, position, error)
        finally:
            del error  # its traceback holds this frame


class FastKernel(Kernel, NativeDispatcher, CPUDispatcher):
    """A Numba kernel that takes tensors of any framework. Made by :func:`fast_args`.

    It is a dispatcher of Numba's, as ``numba.njit`` makes them, with all that they have and wherever Numba takes one. Its calls
    take tensors, too (of PyTorch, of NumPy, of anything with ``__dlpack_c_exchange_api__`` or ``__dlpack__``), which are passed
    to the kernel as array views of their memory.

    Attributes
    ----------
    py_func : the Python function.
    allows_grad : whether it takes tensors that require grad while grad mode is on.
    storage : whether it gets the bits of elements that Numba has no type for.
    returns : what says of which framework its results are: None, a parameter's name, or a type.
    out : the notation that declares its outputs, or None.
    cuda : the kernel that gets the calls with tensors on a GPU, or None.
    """

    __slots__ = ("_memory",)
    _slow_calls: int = 0
    _origin: Any = None  # the dispatcher whose machine code it has: that is called by names that go when the dispatcher does

    def __init__(self, py_func, locals=None, targetoptions=None, pipeline_class=compiler.Compiler):
        CPUDispatcher.__init__(self, py_func, locals, targetoptions, pipeline_class)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enable_vectorcall(cls, FastKernel.__call__)

    @classmethod
    def __subclasshook__(cls, other):
        return vars(cls).get("_stands_for", cls) in other.__mro__  # NotImplemented would let subclasses answer for this one

    def __repr__(self):
        return str(self) if self._is_numbas else super().__repr__()

    def __str__(self):
        """As of Numba's dispatchers: the names of their types are made of it."""
        return f"{CPUDispatcher.__name__}({self.py_func})"

    def __call__(self, /, *args, **kwargs):
        """Make the first call, which prepares native ones, and all calls where there are none."""
        if self._is_numbas and CPUDispatcher.__call__ is not numbas_call:
            return CPUDispatcher.__call__(self, *args, **kwargs)  # what a program has put in its place
        if is_object_mode(self) or not self._has_parameters:
            return numbas_call(self, *args, **kwargs)
        memory = self._native
        if memory.vectorcall:
            enable_vectorcall(type(self), FastKernel.__call__)  # not if that is another one now
            self._context = memory.address
            self._vectorcall = memory.vectorcall  # last, as Ctrl-C may come between any two: from now on calls go there
            return NativeDispatcher.__call__(self, *args, **kwargs)
        bound = self._bind(args, kwargs)
        return self._call_bound(bound) if bound is not None else numbas_call(self, *args, **kwargs)

    @property
    def dispatcher(self):
        """Numba's dispatcher: the kernel itself."""
        return self

    # ---- what Numba asks of a dispatcher -----------------------------------------------------------------------------

    def enable_caching(self) -> None:
        """Keep machine code on disk (``cache=True``). Raises RuntimeError where there is no directory for it.

        See ``calls.kernel_cache``: it lies where Numba's would, in files that prove what they are.
        """
        if failures():
            super().enable_caching()
            return
        pipeline = pipeline_of(self)
        own = {"pipeline_class": pipeline} if pipeline is not compiler.Compiler else {}
        options = {**self.targetoptions, "locals": locals_of(self), **own}
        try:
            cache = KernelCache(self.py_func, options, warns=not self._is_numbas)
        except RuntimeError:
            if not self._is_numbas:
                raise
            super().enable_caching()  # where Numba finds no directory either, it says so
            return
        use_cache(self, cache)
        compile_with(self, with_unique_symbols(pipeline))

    def add_overload(self, cres) -> None:
        """Add machine code, a ``numba.core.compiler.CompileResult``; calls are resolved anew if that may concern them."""
        is_further = self._can_compile and tuple(cres.signature.args) not in self.overloads
        super().add_overload(cres)
        if not is_further:
            self._forget()

    def disable_compile(self, val: bool = True) -> None:
        """Compile nothing for further types (or do so again): calls with those are for what has been compiled."""
        super().disable_compile(val)
        self._forget()

    def _reset_overloads(self) -> None:
        super()._reset_overloads()
        self._forget()

    def _forget(self) -> None:
        """Resolve all calls anew: what has been compiled has changed."""
        memory = getattr(self, "_memory", None)
        if memory is not None:
            memory.forget()

    def _reduce_states(self) -> dict:
        return dict(super()._reduce_states(), kernel_options=self._kernel_options, is_numbas=self._is_numbas)

    @classmethod
    def _rebuild(cls, kernel_options=KernelOptions(), is_numbas=False, **states):  # noqa: B008  # immutable
        made = super(FastKernel, AcceleratedKernel if is_numbas else cls)._rebuild(**states)
        # Numba's own where this process has this very dispatcher, made before accelerate().
        if isinstance(made, FastKernel) and made._kernel_options != kernel_options:
            made._apply(kernel_options)
        return made

    # ---- its own -----------------------------------------------------------------------------------------------------

    def _apply(self, kernel_options: KernelOptions) -> "FastKernel":
        """Take these options. Raises TypeError and ValueError for what does not fit the parameters."""
        self._kernel_options = kernel_options
        if kernel_options.out is not None or kernel_options.returns is not None:
            self._returns()
        if kernel_options.cuda is not None:
            self._device_kernel = kernel_options.cuda.beside(self, kernel_options.launch)
        return self

    @functools.cached_property
    def _pattern(self):
        """What :attr:`out` says, None for nothing."""
        return declared(self.out, self.py_func)

    @functools.cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.py_func, 0 if self._pattern is None else len(self._pattern.outputs))

    @property
    def _has_parameters(self) -> bool:
        """Whether its parameters are such as Numba compiles. Raises TypeError if not, unless that is for Numba to say."""
        try:
            return self._parameters is not None
        except TypeError:
            if not self._is_numbas:
                raise
            return False

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """The arguments in parameter order. Raises TypeError if they do not fit, or that is for Numba to say: None.

        Numba takes keyword-only arguments by position, too, and positional-only ones by name.
        """
        try:
            return self._parameters.bind(*args, **kwargs)
        except TypeError:
            if not self._is_numbas:
                raise
        return None

    @functools.cached_property
    def _outputs(self):
        """Its outputs, None if it declares none."""
        return outputs_of(self._pattern, self._parameters, self.__qualname__)

    def _returns(self) -> type | int | None:
        """What :attr:`returns` is to native code: a type, a parameter's position, or None."""
        return checked_returns(self.returns, self._parameters, self.py_func)

    @property
    def _native(self):
        """What its native code reads, made when it is first asked for."""
        memory = getattr(self, "_memory", None)
        return memory if memory is not None else self._prepare()

    def _prepare(self):
        """Make what native code reads. Not under a lock: it may compile, and so may who waits."""
        from ..dispatch.outputs import vectorcall_with_outputs
        from ..dispatch.overloads import KernelContext
        from ..dispatch.vectorcall import vectorcall
        from . import results

        release_gil = bool(self.targetoptions.get("nogil"))
        memory = KernelContext(
            self._parameters, self.__qualname__, release_gil, self._kernel_options.guard, self._returns(), self._outputs
        )
        if isinstance(self.returns, type):
            results.learn_target(self.returns)
        if memory.runtime.is_native and not is_object_mode(self):
            memory.vectorcall = (vectorcall if self._outputs is None else vectorcall_with_outputs).address
            results.prepare()
        if self._device_kernel is not None:
            memory.native.device_kernel = id(self._device_kernel.launcher)
        with _publishing:
            if not hasattr(self, "_memory"):
                self._memory = memory
        return self._memory

    def _element_of(self, field: int):
        """What it computes with for elements of this dtype field. Raises ``ground.dtypes.NoNumbaType``: they are refused."""
        from ..ground.dtypes import element_of

        return element_of(field, self.storage)

    __iter__ = None  # else Python would iterate over what can be subscripted

    def __getitem__(self, configuration):
        """The launcher of :attr:`cuda` with this configuration, for example ``[grid, block]``."""
        return self._for_cuda("[...]")[configuration]

    def forall(self, *args, **kwargs):
        """``cuda.forall(…)``: a launcher of :attr:`cuda` for so many tasks."""
        return self._for_cuda(".forall(...)").forall(*args, **kwargs)

    def configure(self, *args, **kwargs):
        """``cuda.configure(…)``: a launcher of :attr:`cuda`."""
        return self._for_cuda(".configure(...)").configure(*args, **kwargs)

    def _for_cuda(self, what: str):
        """:attr:`cuda`. `what`: how the kernel has been used, for the TypeError where there is none."""
        if self.cuda is None:
            name = self.__qualname__
            raise TypeError(
                f"{name}{what}: {name}() is a kernel for the CPU, without a launch configuration: call it as {name}(...); "
                "fast_args(cuda=..., launch=...) gives it a kernel for CUDA"
            )
        return self.cuda

    def _is_for_device_kernel(self, bound: tuple, is_on_device: bool = False) -> bool:
        """Whether a call with these arguments is for :attr:`cuda`. `is_on_device`: native code has met a tensor on a device."""
        return self._device_kernel is not None and (is_on_device or self._device_kernel.takes(bound))

    def counts(self) -> KernelCounts:
        """Counts: calls on the fast path, calls on the slow path, and signatures compiled."""
        memory = getattr(self, "_memory", None)
        if memory is None:
            return KernelCounts(0, self._slow_calls, len(self.overloads))
        return KernelCounts(memory.native.calls, self._slow_calls + memory.native.numba_calls, len(self.overloads))

    def bind(self, /, *args, **kwargs):
        """A launch with these arguments: called without any, it goes straight to the compiled kernel.

        For loops that call a kernel with the same tensors again and again. See :class:`~fastexchange.BoundLaunch`: what it
        holds, what becomes of a tensor that is changed, how to replace an argument.

        Raises TypeError for arguments that do not fit the parameters, or that only Numba's own dispatcher can pass; what a call
        with these arguments raises before the kernel runs.

        >>> import numpy as np
        >>> x = np.arange(4.0)
        >>> launch = fast_args(lambda x: x.sum()).bind(x)
        >>> launch(), launch()
        (6.0, 6.0)
        """
        from .bound_launch import bind

        return bind(self, self._complete(self._parameters.bind(*args, **kwargs)))

    def explain(self, /, *args, **kwargs):
        """What a call with these arguments would do, without making it: each argument's path and Numba type, and why.

        Producers are asked for their tensors as in a call: a copy-on-write tensor of PyTorch is copied by that.
        Returns a ``CallExplanation``; print it. Raises TypeError for arguments that do not fit the parameters.
        """
        from .explain import explain_call

        return explain_call(self, self._complete(self._parameters.bind(*args, **kwargs)))

    def _complete(self, bound: tuple) -> tuple:
        """The arguments of a call with the outputs that have been omitted."""
        return bound if self._outputs is None else self._outputs.complete(bound, self.returns)

    def _call_bound(self, bound: tuple):
        """Make a call with arguments in parameter order, in which outputs may be omitted."""
        from .fallback import call_numba
        from .resolve import call

        self._slow_calls += 1
        make_call = functools.partial(call if self._native.runtime.is_native else call_numba, self)
        return make_call(bound) if self._outputs is None else self._outputs.call(bound, self.returns, make_call)

    def _call_with_outputs(self, /, *args, **kwargs):
        """Called by the shim for a call whose outputs it could not make: make them, and the call."""
        return self._call_bound(self._parameters.bind(*args, **kwargs))

    def _call_slowly(self, /, *args, **kwargs):
        """Called by the shim for a call that it does not know: learn it, and make it."""
        from .resolve import call

        bound = self._bind(args, kwargs)
        self._slow_calls += 1
        return call(self, bound) if bound is not None else numbas_call(self, *args, **kwargs)

    def _call_numba(self, /, *args, **kwargs):
        """Called by the shim for a call that is known to be one for Numba's dispatcher."""
        from .fallback import call_numba

        self._slow_calls += 1
        bound = self._bind(args, kwargs)
        if bound is None:
            return numbas_call(self, *args, **kwargs)
        if self._is_for_device_kernel(bound):
            return self._device_kernel.call(bound)
        return call_numba(self, bound)

    def _failed(self, error: BaseException, args: tuple):
        """Called by the shim for an exception of a call that it has left to Numba's dispatcher: raise it, in better words."""
        from .fallback import reword

        try:
            reword(self, self._parameters.bind(*args), error)
        finally:
            del error  # its traceback holds this frame

    def _plan_call(self, /, *args, **kwargs):
        """Called by the shim after a call like others that it has made: to make such calls faster."""
        from .resolve import plan

        plan(self, self._parameters.bind(*args, **kwargs))

    _call_own = numbas_call  # with what Numba itself takes


_publishing = forkable_lock()
enable_vectorcall(FastKernel, FastKernel.__call__)


class AcceleratedKernel(FastKernel):
    """What ``numba.jit`` makes after ``accelerate()``: to the programs that ask, Numba's own class.

    It has that one's name and module, and whatever is an instance of that one, is one of this, too. Of a function in object
    mode, which takes any object, it makes Numba's dispatcher: there is nothing to gain.
    """

    __slots__ = ()
    _is_numbas = True
    _stands_for = CPUDispatcher

    def __new__(cls, py_func, locals=None, targetoptions=None, pipeline_class=compiler.Compiler):
        """An object of another class in object mode."""
        if (targetoptions or {}).get("forceobj"):
            return CPUDispatcher(py_func, locals, targetoptions, pipeline_class)
        return super().__new__(cls)

    def _reduce_class(self):
        return FastKernel if type(self) is AcceleratedKernel else type(self)  # a name that pickle finds, accelerated or not


for _attribute in "__name__", "__qualname__", "__module__", "__doc__":
    setattr(AcceleratedKernel, _attribute, getattr(CPUDispatcher, _attribute))


_kernels: "weakref.WeakValueDictionary[tuple, Any]" = weakref.WeakValueDictionary()
"""By ``id`` of the dispatcher, which the kernel keeps alive, and options."""


def kernel_of(dispatcher: Any, kernel_options: KernelOptions, make: Callable[[Any, KernelOptions], Kernel]) -> Any:
    """The kernel of a dispatcher with these options, of which there is one; `make` makes it of both."""
    known = _kernels.get((id(dispatcher), kernel_options))
    return known if known is not None else _kernels.setdefault((id(dispatcher), kernel_options), make(dispatcher, kernel_options))


def declared(out: str | None, function):
    """The ``shape_notation.Pattern`` of a function's notation, None for none. Raises ValueError for one that does not fit."""
    return None if out is None else pattern_of(out, Parameters(function), f"fast_args(): {function.__qualname__}()")


def outputs_of(pattern, parameters: Parameters, name: str):
    """The outputs of a kernel that declares them so, None for none."""
    if pattern is None:
        return None
    from .outputs import Outputs

    return Outputs(pattern, parameters, name)


def checked_returns(returns, parameters: Parameters, function) -> type | int | None:
    """``returns`` of a function: a type, a parameter's position, or None."""
    if isinstance(returns, type):
        from .results import check_type

        check_type(returns)
    elif isinstance(returns, str):
        if returns not in parameters.names:
            signature = f"{function.__qualname__}{inspect.signature(function)}"
            raise ValueError(f"fast_args(): returns={returns!r} names no parameter of {signature}")
        return parameters.names.index(returns)
    return returns
