"""``@fast_args``: what becomes of a function, of a dispatcher, and with which options."""

import functools
import inspect
import sys
import warnings
from types import FunctionType
from typing import Any

import numba
from numba.core import sigutils
from numba.core.dispatcher import Dispatcher

from .calls import interpreted
from .calls.kernel import (
    AcceleratedKernel,
    FastKernel,
    Kernel,
    KernelOptions,
    checked_returns,
    declared,
    kernel_of,
    outputs_of,
)  # fmt: skip
from .calls.options import check_names
from .ground.numba_internals import (
    CPUDispatcher,
    add_class_of_dispatchers,
    can_compile,
    njit_as,
    pipeline_of,
    register_dispatcher,
    set_class_of_dispatchers,
)  # fmt: skip
from .ground.parameters import Parameters
from .ground.safe_repr import shown

__all__ = ["accelerate", "decelerate", "fast_args"]


def fast_args(func=None, /, *, grad="refuse", storage=False, returns=None, out=None, cuda=None, launch=None, **options):
    """Let a Numba kernel take tensors of any framework, at the cost of a hand-written C extension.

    Parameters
    ----------
    func : a Python function, which is compiled with ``numba.njit(**options)``; or an existing ``@njit`` dispatcher, whose
        function, options and compiled code the kernel takes over; or, as for ``njit``, one or several explicit signatures; or a
        ``@cuda.jit`` dispatcher of numba-cuda or numba-cuda-mlir, of which it makes a :class:`~fastexchange.CudaKernel`.
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
        ``fastexchange.ground.shape_notation``). An output that a call omits, or gives as None, is allocated by the framework of
        the first tensor in the notation (of `returns`, if that is given), uninitialised; the call returns its outputs. The kernel
        itself returns None.
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
    cuda = _checked_cuda(cuda, launch, out, grad, storage)
    kernel_options = KernelOptions(grad == "allow", storage, returns, out, cuda, launch)
    if func is None:
        own = {"grad": grad, "storage": storage, "returns": returns, "out": out, "cuda": cuda, "launch": launch}
        return functools.partial(fast_args, **own, **options)
    if inspect.isfunction(func):
        return _decorated(func, options, kernel_options)
    if isinstance(func, Kernel) and kernel_options in (KernelOptions(), func._kernel_options):
        _no_options(options, "a kernel")
        return func
    if isinstance(func, (CPUDispatcher, Kernel)) or _cuda_target_of(func) is not None:
        _no_options(options, "a Numba dispatcher")
        return _kernel_of(getattr(func, "dispatcher", func), kernel_options)
    if isinstance(func, Dispatcher):
        raise TypeError(f"fast_args() takes functions, and dispatchers for the CPU and for CUDA, not {type(func).__name__}")
    if sigutils.is_signature(func) or (isinstance(func, list) and all(map(sigutils.is_signature, func))):
        return lambda function: _decorated(function, options, kernel_options, func)
    return _decorated(func, options, kernel_options)


def _decorated(function, options, kernel_options, signatures=None):
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
        return _jit(function, options, kernel_options, signatures)
    pattern = declared(kernel_options.out, function)
    parameters = Parameters(function, 0 if pattern is None else len(pattern.outputs))
    checked_returns(kernel_options.returns, parameters, function)
    return interpreted.interpreted(function, kernel_options, parameters, outputs_of(pattern, parameters, function.__qualname__))


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
            raise TypeError("fast_args(): launch= is given without cuda=, the kernel that it launches")
        return None
    if not isinstance(cuda, Kernel) and _cuda_target_of(cuda) is None:
        raise TypeError(f"fast_args(): cuda is a @cuda.jit dispatcher, or what fast_args made of one, not {shown(cuda)}")
    if launch is None or out is not None:
        raise TypeError("fast_args(): cuda= needs launch=, which says how it is launched, and no out=: it allocates nothing")
    kernel = fast_args(cuda, grad=grad, storage=storage)
    if isinstance(kernel, FastKernel):
        raise TypeError(f"fast_args(): cuda is a kernel for CUDA, and {kernel!r} is one for the CPU")
    return kernel


add_class_of_dispatchers(FastKernel)


def accelerate() -> None:
    """Let ``numba.njit`` and ``numba.jit`` make a :class:`FastKernel` of each function that they are given from now on.

    For programs and libraries that use Numba, without a changed line: call it before they are imported. Their functions then take
    tensors, and calls of them are cheaper; what Numba refuses in a call without a tensor is refused in its words. What else is
    different: code that is kept on disk (``cache=True``) lies in files of its own, so Numba's are not read; Python's profilers
    (``cProfile``) see no call that native code makes. ``python -m fastexchange run PROGRAM`` does it for a program.

    Their class has the name of Numba's ``CPUDispatcher``, is derived from it, and stands in its place where programs find it, so
    ``type(f) is CPUDispatcher`` holds in what is imported from then on. If a program gives that class another ``__call__`` before
    a function's first call, that one makes its calls; another ``_compile_for_args`` makes those with new types. Both are slower.

    What has been decorated before stays what it is; :func:`decelerate` undoes it. Both may be called again.

    Under ``NUMBA_DISABLE_JIT`` Numba gives functions back, and it does nothing. Raises RuntimeError with a Numba that has no such
    registry as is expected here.

    >>> import numba, numpy as np
    >>> accelerate()
    >>> @numba.njit
    ... def total(x):
    ...     return x.sum()
    >>> decelerate()
    >>> type(total).__name__, total(np.arange(4.0)), total.counts().slow
    ('CPUDispatcher', 6.0, 1)
    """
    _set_class(AcceleratedKernel)


def decelerate() -> None:
    """Undo :func:`accelerate`: functions that are decorated from now on become Numba's own dispatchers. Kernels stay kernels."""
    _set_class(CPUDispatcher)


def _set_class(cls: type) -> None:
    try:
        set_class_of_dispatchers(cls)
    except Exception as error:
        raise RuntimeError(f"accelerate(): this Numba keeps its dispatchers in another way ({error}); use @fast_args") from error


def _kernel_of(dispatcher: Any, kernel_options: KernelOptions) -> Kernel:
    """The kernel of a dispatcher: there is one for each set of options."""
    if _cuda_target_of(dispatcher) is None:
        return kernel_of(dispatcher, kernel_options, _adopted)
    from .cuda.kernel import cuda_kernel_of

    return cuda_kernel_of(dispatcher, kernel_options)


def _adopted(dispatcher: Any, kernel_options: KernelOptions) -> FastKernel:
    made = FastKernel(dispatcher.py_func, dispatcher.locals, dispatcher.targetoptions, pipeline_of(dispatcher))
    made._origin = dispatcher
    made._apply(kernel_options)
    if dispatcher.stats.cache_path is not None:
        _keep_on_disk(made)
    for compiled in dispatcher.overloads.values():
        made.add_overload(compiled)
    if not can_compile(dispatcher):
        made.disable_compile()
    return made


def _no_options(options: dict, what: str) -> None:
    if options:
        raise TypeError(f"fast_args(): {what} has its options already, so {', '.join(map(repr, options))} cannot be given")


def _jit(function: FunctionType, options: dict, kernel_options: KernelOptions, signatures=None) -> FastKernel:
    """``numba.njit``, of our class; without a disk cache where no directory can be written."""
    options = dict(options)
    is_cached = options.pop("cache", False)
    kernel = njit_as(FastKernel, function, options)._apply(kernel_options)
    if function.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        kernel._parameters  # noqa: B018  # it raises for what Numba cannot compile
    if is_cached:
        _keep_on_disk(kernel)
    if signatures is not None:
        from .calls.compile_errors import why_not_declarable

        with register_dispatcher(kernel):  # it may call itself
            for signature in signatures if isinstance(signatures, list) else [signatures]:
                try:
                    kernel.compile(signature)
                except NotImplementedError:
                    if (why := why_not_declarable(function, signature)) is None:
                        raise
                    raise NotImplementedError(why) from None
        kernel.disable_compile()
    return kernel


def _keep_on_disk(kernel: FastKernel) -> None:
    try:
        kernel.enable_caching()
    except RuntimeError as error:
        warnings.warn(f"fast_args(cache=True): {error}; compiling without a disk cache", RuntimeWarning, stacklevel=4)
