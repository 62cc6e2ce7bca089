"""``@fast_args`` and what it makes: a Numba kernel that takes tensors of any framework at the cost of C.

Calls go to the native shim (``dispatch.shim``), which makes those that it knows; any other comes back to
:meth:`FastKernel._call_slowly`. The native rooms are imported when the first kernel is made, not before: they cost 25 ms.
"""

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from numba.core import compiler, sigutils
from numba.core.dispatcher import Dispatcher

from . import interpreted
from .cpython import NativeCallable, enable_vectorcall
from .kernel_cache import KernelCache, with_unique_symbols
from .naming import shown
from .numba_internals import CPUDispatcher, failures, register_dispatcher, use_cache
from .options import check_names
from .parameters import Parameters

__all__ = ["FastKernel", "KernelStats", "fast_args"]


class KernelStats(NamedTuple):
    """How a kernel's calls went. See :meth:`FastKernel.stats`."""

    fast: int
    """Calls that the native shim made, without Python."""
    slow: int
    """Calls that went through the slow path: the first of their shape, or with an argument only Numba understands."""
    compiled: int
    """Signatures that Numba has compiled."""


class FastKernel(NativeCallable):
    """A Numba kernel that takes tensors of any framework. Made by :func:`fast_args`.

    Calling it is like calling the Numba dispatcher that it wraps, except that tensors (of PyTorch, of NumPy, of anything
    with ``__dlpack_c_exchange_api__`` or ``__dlpack__``) are passed to the kernel as array views of their memory.

    Attributes
    ----------
    dispatcher : the Numba dispatcher. Called directly, it takes what Numba takes.
    py_func : the Python function.
    allows_grad : whether it takes tensors that require grad while grad mode is on.
    storage : whether it gets the bits of elements that Numba has no type for.
    returns : what says of which framework its results are: None, a parameter's name, or a type.
    out : the notation that declares its outputs, or None.
    cuda : the kernel that gets the calls with tensors on a GPU, or None.
    """

    __slots__ = ("__dict__", "__weakref__", "_native")

    def __init__(self, dispatcher: CPUDispatcher, manner: "_Manner | None" = None):
        from . import results
        from .dispatch.context import KernelContext
        from .dispatch.outputs import vectorcall_with_outputs
        from .dispatch.shim import vectorcall

        functools.update_wrapper(self, dispatcher.py_func)
        self.dispatcher = dispatcher
        self.py_func = dispatcher.py_func
        self._slow_calls = 0
        self._manner = manner = manner or _Manner()
        self.allows_grad, self.storage, self.returns, self.out, self.cuda, launch = manner
        self._parameters, self._outputs = _parameters_and_outputs(dispatcher.py_func, self.out)
        release_gil = bool(dispatcher.targetoptions.get("nogil"))
        self._native = KernelContext(
            self._parameters, self.__qualname__, release_gil, manner.guard, self._returns(), self._outputs
        )
        self._context = self._native.address
        if self._native.runtime.is_native:
            self._vectorcall = (vectorcall if self._outputs is None else vectorcall_with_outputs).address
        self._elsewhere: Any = None
        if self.cuda is not None:
            self._launch_elsewhere(launch)
        if self._native.runtime.is_native:
            results.prepare()
        _kernels[id(dispatcher), manner] = self

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enable_vectorcall(cls)

    def __repr__(self):
        return f"<fast_args {self.py_func.__module__}.{self.py_func.__qualname__}{inspect.signature(self.py_func)}>"

    def __reduce__(self):
        return _kernel_of, (self.dispatcher, self._manner)

    def _element_of(self, field: int):
        """What it computes with for elements of this dtype field. Raises ``dtypes.NoNumbaType``: they are refused."""
        from .dtypes import element_of

        return element_of(field, self.storage)

    def _returns(self) -> type | int | None:
        """What :attr:`returns` is to native code: a type, a parameter's position, or None."""
        return _checked_returns(self.returns, self._parameters, self.py_func)

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

    def _is_elsewhere(self, bound: tuple, is_on_device: bool = False) -> bool:
        """Whether a call with these arguments is for :attr:`cuda`. `is_on_device`: native code has met a tensor on a device."""
        return self._elsewhere is not None and (is_on_device or self._elsewhere.takes(bound))

    def _launch_elsewhere(self, launch) -> None:
        """Let :attr:`cuda` have the calls with tensors on a GPU, launched as `launch` says."""
        from .cuda.elsewhere import Elsewhere

        self._elsewhere = Elsewhere(self, launch)
        self._native.native.elsewhere = id(self._elsewhere.launcher)

    @property
    def _numba_type_(self):
        """Inside other jitted functions this is the dispatcher."""
        return self.dispatcher._numba_type_

    @property
    def signatures(self) -> list:
        """The signatures compiled so far, as ``dispatcher.signatures``."""
        return self.dispatcher.signatures

    def stats(self) -> KernelStats:
        """Counts: calls on the fast path, calls on the slow path, and signatures compiled."""
        return KernelStats(self._native.native.calls, self._slow_calls, len(self.dispatcher.overloads))

    def recompile(self) -> None:
        """``dispatcher.recompile()``, after a global that the function uses has changed: old code is called no more."""
        try:
            self.dispatcher.recompile()
        finally:
            self._native.forget()

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
        from .bound import bind

        return bind(self, self._complete(self._parameters.bind(*args, **kwargs)))

    def explain(self, /, *args, **kwargs):
        """What a call with these arguments would do, without making it: each argument's path and Numba type, and why.

        Producers are asked for their tensors as in a call: a copy-on-write tensor of PyTorch is copied by that.
        Returns a ``CallExplanation``; print it. Raises TypeError for arguments that do not fit the parameters.
        """
        from .explanation import explain_call

        return explain_call(self, self._complete(self._parameters.bind(*args, **kwargs)))

    def _complete(self, bound: tuple) -> tuple:
        """The arguments of a call with the outputs that have been omitted."""
        return bound if self._outputs is None else self._outputs.complete(bound, self.returns)

    def _call_bound(self, bound: tuple):
        """Make a call with arguments in parameter order, in which outputs may be omitted."""
        from .slow_path import call

        self._slow_calls += 1
        make_call = functools.partial(call, self)
        return make_call(bound) if self._outputs is None else self._outputs.call(bound, self.returns, make_call)

    def _call_with_outputs(self, /, *args, **kwargs):
        """Called by the shim for a call whose outputs it could not make: make them, and the call."""
        return self._call_bound(self._parameters.bind(*args, **kwargs))

    def _call_slowly(self, /, *args, **kwargs):
        """Called by the shim for a call that it does not know: learn it, and make it."""
        from .slow_path import call

        bound = self._parameters.bind(*args, **kwargs)
        self._slow_calls += 1
        return call(self, bound)

    def _call_numba(self, /, *args, **kwargs):
        """Called by the shim for a call that is known to be one for Numba's dispatcher."""
        from .numba_call import call_numba

        self._slow_calls += 1
        bound = self._parameters.bind(*args, **kwargs)
        if self._is_elsewhere(bound):
            return self._elsewhere.call(bound)
        return call_numba(self, bound)

    def _plan_call(self, /, *args, **kwargs):
        """Called by the shim after a call like others that it has made: to make such calls faster."""
        from .slow_path import plan

        plan(self, self._parameters.bind(*args, **kwargs))

    def _refused(self, position: int, error: BaseException):
        """Called by the shim for an exception that a producer raised: raise it with the argument's name."""
        from .refusal import refused

        try:
            refused(self, position, error)
        finally:
            del error  # its traceback holds this frame


class _CarefulKernel(FastKernel):
    """A kernel on an interpreter whose objects do not lie in memory as native code assumes: Numba's dispatcher calls it."""

    __slots__ = ()

    def __call__(self, /, *args, **kwargs):
        return self._call_bound(self._parameters.bind(*args, **kwargs))

    def _call_bound(self, bound: tuple):
        from .numba_call import call_numba

        self._slow_calls += 1
        make_call = functools.partial(call_numba, self)
        return make_call(bound) if self._outputs is None else self._outputs.call(bound, self.returns, make_call)


_kernels: "weakref.WeakValueDictionary[tuple, FastKernel]" = weakref.WeakValueDictionary()
"""By ``id`` of the dispatcher, which the kernel keeps alive, and manner: what is pickled and loaded in a process is the same."""

enable_vectorcall(FastKernel)


class _Manner(NamedTuple):
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
        from .dispatch.layout import BITS_ALLOWED, GRAD_ALLOWED

        return GRAD_ALLOWED * self.allows_grad | BITS_ALLOWED * self.storage


def _parameters_and_outputs(py_func: Callable, out: str | None):
    """A kernel's parameters, and what it declares of its outputs, None for nothing."""
    parameters = Parameters(py_func)
    if out is None:
        return parameters, None
    from .outputs import Outputs

    outputs = Outputs(out, parameters, py_func.__qualname__)
    return Parameters(py_func, len(outputs)), outputs


def _checked_returns(returns, parameters: Parameters, function) -> type | int | None:
    """``returns`` of a function: a type, a parameter's position, or None."""
    from .results import check_type

    if isinstance(returns, type):
        check_type(returns)
    elif isinstance(returns, str):
        if returns not in parameters.names:
            signature = f"{function.__qualname__}{inspect.signature(function)}"
            raise ValueError(f"fast_args(): returns={returns!r} names no parameter of {signature}")
        return parameters.names.index(returns)
    return returns


def fast_args(func=None, /, *, grad="refuse", storage=False, returns=None, out=None, cuda=None, launch=None, **options):
    """Let a Numba kernel take tensors of any framework, at the cost of a hand-written C extension.

    Parameters
    ----------
    func : a Python function, which is compiled with ``numba.njit(**options)``; or an existing ``@njit`` dispatcher; or,
        as for ``njit``, one or several explicit signatures; or a ``@cuda.jit`` dispatcher of numba-cuda or numba-cuda-mlir, of
        which it makes a :class:`~fastexchange.CudaKernel`.
    grad : what becomes of tensors that require grad while grad mode is on. ``"refuse"``: BufferError, as ``__dlpack__``
        has it, because autograd sees nothing of what a kernel does. ``"allow"``: the kernel gets their memory, as after
        ``detach()``; for kernels that take part in a backward pass of their own, and for optimiser steps.
    storage : True: elements of types that Numba does not know (bfloat16, the float8 types, complex32, ml_dtypes' int4, those of
        ``register_dlpack_dtype``) are passed as unsigned integers of the same width, their bits; a view of such an argument that
        the kernel returns has the argument's type again. False: BufferError, because arithmetic on the bits means nothing.
    returns : what an array becomes that the kernel makes and returns, alone or in tuples and lists. None: a tensor of the
        framework of the call's first tensor, NumPy's where there is none. A type (``torch.Tensor``, ``numpy.ndarray``): a tensor
        of that type. A parameter's name: a tensor of the framework of that argument. An argument that the kernel returns is
        that very object in any case.
    out : which of the last parameters are outputs, and their shapes: ``"x[n, d], w[d] -> y[n, d]"`` (see the README, and
        ``fastexchange.pattern``). An output that a call omits, or gives as None, is allocated by the framework of the first
        tensor in the notation (of `returns`, if that is given), uninitialised; the call returns its outputs. The kernel itself
        returns None.
    cuda : a ``@cuda.jit`` dispatcher, or what ``fast_args`` made of it, with the same parameters: it gets the calls with
        tensors on a GPU, `func` those with tensors on the CPU.
    launch : how `cuda` is launched: ``(grid, block)``, also with stream and shared memory; or a function that is called with the
        arguments and returns that, or a number of tasks, for ``forall``.
    **options : options of ``numba.njit`` (``parallel``, ``fastmath``, ``nogil``, ``cache``, ``boundscheck`` …).

    Returns
    -------
    A :class:`FastKernel`; without a function, a decorator.

    Raises TypeError for anything else, for an option that neither this function nor ``numba.njit`` has, for a `storage` that is
    no bool, for a `returns` that is no type of tensors, and for options of Numba's given together with a dispatcher, which has
    its own; ValueError for another `grad`, for a `returns` that names no parameter, and for an `out` that does not fit the
    parameters. A call raises ValueError for inputs whose shapes do not fit `out`.

    Ownership: a call borrows its tensors for the time of the call. A kernel that runs without the GIL (``nogil=True``, or a loop
    in parallel), or runs Python itself (an ``objmode`` block, ``print``), holds owning exports instead, and of PyTorch tensors
    the storage, too: its ``resize_()`` is a RuntimeError from then on, as after ``tensor.numpy()``. So no other code frees what
    the kernel reads.
    A tensor that is made of a result owns Numba's memory; one that shows an argument's memory keeps the argument alive.

    >>> import numpy as np
    >>> @fast_args
    ... def total(x):
    ...     s = 0.0
    ...     for value in x:
    ...         s += value
    ...     return s
    >>> total(np.arange(4.0))
    6.0
    """
    if options:
        check_names(options, fast_args.__kwdefaults__)
    if grad not in ("refuse", "allow"):
        raise ValueError(f"fast_args(): grad is 'refuse' or 'allow', not {shown(grad)}")
    if returns is not None and not isinstance(returns, (str, type)):
        raise TypeError(f"fast_args(): returns is a type of tensors, the name of a parameter or None, not {shown(returns)}")
    if not isinstance(storage, bool):
        raise TypeError(f"fast_args(): storage is True or False, not {shown(storage)}")
    manner = _Manner(grad == "allow", storage, returns, out, _checked_cuda(cuda, launch, out, grad, storage), launch)
    if func is None:
        own = {"grad": grad, "storage": storage, "returns": returns, "out": out, "cuda": cuda, "launch": launch}
        return functools.partial(fast_args, **own, **options)
    if isinstance(func, FastKernel):
        _no_options(options, "a FastKernel")
        if manner not in (_Manner(), func._manner):
            raise TypeError("fast_args(): a FastKernel has its options already: pass its dispatcher, with grad=, out= …")
        return func
    if isinstance(func, CPUDispatcher) or _cuda_target_of(func) is not None:
        _no_options(options, "a Numba dispatcher")
        return _kernel_of(func, manner)
    if isinstance(func, Dispatcher):
        raise TypeError(f"fast_args() takes functions, and dispatchers for the CPU and for CUDA, not {type(func).__name__}")
    if sigutils.is_signature(func) or (isinstance(func, list) and all(map(sigutils.is_signature, func))):
        return lambda function: _decorated(function, options, manner, func)
    return _decorated(func, options, manner)


def _decorated(function, options, manner, signatures=None):
    """What is made of a Python function."""
    if type(function).__name__ == "FakeCUDAKernel":
        raise TypeError("fast_args(): numba.cuda's simulator has no kernels that a driver could launch; call this one itself")
    if not inspect.isfunction(function):
        hint = ""
        if isinstance(function, _NO_FUNCTIONS):
            hint = "; put @staticmethod above @fast_args: a kernel gets tensors and numbers, no object or class"
        raise TypeError(
            f"fast_args() takes a Python function or a Numba dispatcher (from @njit or @cuda.jit), not {shown(function)}{hint}"
        )
    if not numba.config.DISABLE_JIT:
        return _make(_jit(function, options, signatures), manner)
    parameters, outputs = _parameters_and_outputs(function, manner.out)
    _checked_returns(manner.returns, parameters, function)
    return interpreted.interpreted(function, manner, parameters, outputs)


_NO_FUNCTIONS = staticmethod, classmethod, property, functools.cached_property
"""What decorators make of a method, which then is no function any more."""


def _cuda_target_of(func):
    """The package of which `func` is a dispatcher for CUDA, or None. Without one that has been imported there is none."""
    if not ("numba.cuda.dispatcher" in sys.modules or "numba_cuda_mlir.descriptor" in sys.modules):
        return None
    from .cuda.targets import target_of

    return target_of(func)


def _checked_cuda(cuda, launch, out, grad: str, storage: bool):
    """The kernel for CUDA that ``fast_args(cuda=...)`` is given, None for none."""
    if cuda is None:
        if launch is not None:
            raise TypeError("fast_args(): launch says how the kernel cuda= is launched, and there is none")
        return None
    if not isinstance(cuda, FastKernel) and _cuda_target_of(cuda) is None:
        raise TypeError(f"fast_args(): cuda is a @cuda.jit dispatcher, or what fast_args made of one, not {shown(cuda)}")
    if launch is None or out is not None:
        raise TypeError("fast_args(): cuda= needs launch=, which says how it is launched, and no out=: it allocates nothing")
    kernel = fast_args(cuda, grad=grad, storage=storage)
    if _cuda_target_of(kernel.dispatcher) is None:
        raise TypeError(f"fast_args(): cuda is a kernel for CUDA, and {kernel!r} is one for the CPU")
    return kernel


def _kernel_of(dispatcher: Any, manner: _Manner) -> FastKernel:
    """The kernel of a dispatcher: there is one for each manner."""
    known = _kernels.get((id(dispatcher), manner))
    return known if known is not None else _make(dispatcher, manner)


def _make(dispatcher: Any, manner: _Manner) -> FastKernel:
    from .dispatch.state import runtime

    target = _cuda_target_of(dispatcher)
    if target is not None:
        if not runtime().is_native:
            raise TypeError("fast_args(): this interpreter's objects are not laid out as launches need it: use the dispatcher")
        from .cuda.kernel import CudaKernel

        made: FastKernel = CudaKernel(dispatcher, manner, target)
        _kernels[id(dispatcher), manner] = made
        return made
    return (FastKernel if runtime().is_native else _CarefulKernel)(dispatcher, manner)


def _no_options(options: dict, what: str) -> None:
    if options:
        raise TypeError(f"fast_args(): {what} has its options already, so {', '.join(map(repr, options))} cannot be given")


def _jit(function: Callable, options: dict, signatures=None) -> CPUDispatcher:
    """``numba.njit``, with a disk cache of ours; without one where no directory can be written."""
    options = dict(options)
    is_cached = bool(options.get("cache")) and not failures()
    if is_cached:
        del options["cache"]
    given = dict(options)
    if is_cached:
        options["pipeline_class"] = with_unique_symbols(options.get("pipeline_class", compiler.Compiler))
    dispatcher: Any = numba.njit(**options)(function)
    if is_cached:
        try:
            use_cache(dispatcher, KernelCache(function, given))
        except RuntimeError as error:
            warnings.warn(f"fast_args(cache=True): {error}; compiling without a disk cache", RuntimeWarning, stacklevel=3)
    if signatures is not None:
        from .compile_errors import why_not_declarable

        with register_dispatcher(dispatcher):  # it may call itself
            for signature in signatures if isinstance(signatures, list) else [signatures]:
                try:
                    dispatcher.compile(signature)
                except NotImplementedError:
                    if (why := why_not_declarable(function, signature)) is None:
                        raise
                    raise NotImplementedError(why) from None
        dispatcher.disable_compile()
    return dispatcher
