"""``@fast_args``, which makes kernels of functions and dispatchers; ``accelerate`` and ``decelerate``."""

import functools
import inspect
import warnings
from types import FunctionType
from typing import Any

import numba
from numba.core import sigutils
from numba.core.dispatcher import Dispatcher

from .calls import interpreted
from .calls.kernel import AcceleratedKernel, FastKernel, Kernel, KernelOfPackages, kernel_of
from .calls.options import KernelOptions, OptionsOf, check_names
from .ground.numba_internals import (
    CPUDispatcher,
    add_class_of_dispatchers,
    can_compile,
    class_of_dispatchers,
    njit_as,
    overloads_of,
    pipeline_of,
    register_dispatcher,
    set_class_of_dispatchers,
)  # fmt: skip
from .ground.passing import reraise_passing
from .ground.safe_repr import shown

__all__ = ["accelerate", "decelerate", "fast_args"]


def fast_args(
    func=None, /, *, grad="refuse", storage=False, returns=None, out=None, mutates=None, backward=None, cuda=None, launch=None,
    **options,
):  # fmt: skip
    """Make a Numba kernel that takes tensors of any framework as they are.

    Parameters
    ----------
    func : one of

        - a Python function, which is compiled with ``numba.njit(**options)``;
        - an ``@njit`` dispatcher: the kernel takes over its function, options and compiled code;
        - one or several explicit signatures, as for ``njit``;
        - a ``@cuda.jit`` dispatcher of numba-cuda or numba-cuda-mlir: the result is a :class:`~fastexchange.CudaKernel`, or, with
          `launch`, a :class:`~fastexchange.LaunchedKernel`, which `out`, `mutates` and `backward` are for, too.
    grad : the rule for tensors that require grad while grad mode is on. ``"refuse"``: BufferError, as for ``__dlpack__``,
        because autograd does not see what a kernel computes. ``"allow"``: the kernel gets their memory, as after ``detach()``;
        for kernels with a backward pass of their own, and for optimiser steps.
    storage : the rule for elements of types that Numba does not know (bfloat16, float16, the float8 types, complex32, ml_dtypes'
        int4, those of ``register_dlpack_dtype``). True: the kernel gets their bits as unsigned integers of the same width; a
        returned view of such an argument has the argument's type again. False: the kernel computes with bfloat16, float16 and
        float8 as ``fastexchange.half`` does, and refuses the others with a BufferError.
    returns : the type of new arrays that the kernel returns, alone or in tuples and lists. None: a tensor of the framework of the
        call's first tensor, or of NumPy if there is none. A type (``torch.Tensor``, ``numpy.ndarray``): a tensor of this type. A
        parameter's name: a tensor of this argument's framework. An argument that the kernel returns stays the same object.
    out : the last parameters that are outputs, and their shapes: ``"x[n, d], w[d] -> y[n, d]"``; the notation is in
        ``docs/reference/notation.md``. If a call omits an output, or gives None, it is allocated, uninitialised, by the
        framework of `returns`, or else of the first tensor in the notation. Its elements are of the declared type, or of the one
        to which the types of the tensors on the left are promoted (as by PyTorch and JAX). The call returns its outputs; the
        kernel must return None.
    mutates : the names of the arguments that the kernel writes to, besides its outputs, for PyTorch's autograd, ``torch.compile``
        and ``torch.export`` (see :meth:`FastKernel.as_torch_op`). None: with `out`, none; without, any tensor may be written to.
    backward : how PyTorch and JAX differentiate the kernel, which declares `out`: a kernel that declares outputs, a Python
        function, or a list of these. Their parameters say what they need: the names of arguments and outputs of `func`, and
        ``grad_`` with an output's name, the gradient of that output. A kernel's outputs are ``grad_`` with an argument's name. A
        function returns a gradient, or None, for each argument of `func`. Then a call with a tensor that requires grad is made by
        an operator of PyTorch, instead of being refused. Gradients of complex numbers are PyTorch's, the conjugate of JAX's.
    cuda : a ``@cuda.jit`` dispatcher, or its kernel, with the same parameters. It gets the calls with tensors on a GPU, `func`
        the calls with tensors on the CPU.
    launch : the configuration of `cuda`, or of `func` if that is for CUDA: ``(grid, block)``, optionally with stream and shared
        memory; or a number of tasks for ``forall``, in the notation of `out`: ``"x[n] -> n"``. Grid and block may be written so,
        too, for example ``("x[m, n] -> (m + 15) // 16, n", (16, 16))``. Or a function that is called with the arguments and
        returns such a tuple, or a number of tasks.
    **options : options of ``numba.njit`` (``parallel``, ``fastmath``, ``nogil``, ``cache``, ``boundscheck`` …).

    Returns
    -------
    A :class:`FastKernel`; without a function, a decorator.

    Raises TypeError for any other `func`, for an option that neither this function nor ``numba.njit`` has, for a `storage` that
    is not a bool, for a `returns` that is not a type of tensors, for a `backward` that is no kernel or function, and for options
    of Numba together with a dispatcher, which has its own; ValueError for another `grad`, for a `returns` that is not a
    parameter's name, and for an `out` or a `backward` that does not fit the parameters. A call raises ValueError for inputs whose
    shapes do not fit `out`, TypeError if their types determine no output's, and ValueError when a kernel is compiled that never
    writes to an output.

    Ownership: a call borrows its tensors until it returns. A kernel that runs without the GIL (``nogil=True``, or a parallel
    loop), or runs Python itself (an ``objmode`` block, ``print``), holds owning exports instead, so no other code can free the
    memory. It also holds the storages of PyTorch tensors, whose ``resize_()`` raises RuntimeError from then on, as after
    ``tensor.numpy()``.
    A result's tensor owns Numba's memory. A result that is a view of an argument keeps the argument alive.

    >>> import numpy as np, torch
    >>> @fast_args
    ... def total(x):
    ...     s = 0.0
    ...     for value in x:
    ...         s += value
    ...     return s
    >>> total(torch.arange(4.0)), total(np.arange(4.0))
    (6.0, 6.0)
    >>> @fast_args(out="x[n] -> y[n]")
    ... def doubled(x, y):
    ...     for i in range(x.shape[0]):
    ...         y[i] = 2 * x[i]
    >>> doubled(torch.ones(2))
    tensor([2., 2.])
    """
    if options:
        check_names(options, fast_args.__kwdefaults__)
    kernel_options = KernelOptions.given(grad, storage, returns, out, None, launch, mutates, backward)
    kernel_options = kernel_options._replace(cuda=_checked_cuda(cuda, launch, out, grad, storage))
    make = functools.partial(_kernel_from, options=options, kernel_options=kernel_options)
    return make if func is None else make(func)


def _kernel_from(func, options: dict, kernel_options: KernelOptions):
    """Make a kernel of what :func:`fast_args` takes as `func`; of signatures, a decorator."""
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
        for signature in func if isinstance(func, list) else [func]:
            if isinstance(signature, str) and "->" in signature:
                raise TypeError(f"fast_args(): {signature!r} is no Numba signature; outputs are declared by out={signature!r}")
        return lambda function: _decorated(function, options, kernel_options, func)
    return _decorated(func, options, kernel_options)


def _decorated(function, options, kernel_options, signatures=None):
    """Make a kernel of a Python function. Raises TypeError for other objects."""
    if type(function).__name__ == "FakeCUDAKernel":
        raise TypeError("fast_args(): kernels of numba.cuda's simulator cannot be launched by a driver; call the kernel itself")
    if not inspect.isfunction(function):
        hint = ""
        if isinstance(function, _NO_FUNCTIONS):
            hint = "; put @staticmethod above @fast_args: a kernel gets tensors and numbers, no object or class"
        raise TypeError(
            f"fast_args() takes a Python function or a Numba dispatcher (from @njit or @cuda.jit), not {shown(function)}{hint}"
        )
    _check_launch(kernel_options)
    if not numba.config.DISABLE_JIT:
        return _jit(function, options, kernel_options, signatures)
    declared = OptionsOf(kernel_options, function)
    declared.check()
    return interpreted.interpreted(declared)


def _check_launch(kernel_options: KernelOptions) -> None:
    """Raise TypeError for a kernel for the CPU with a launch configuration and none for CUDA."""
    if kernel_options.launch is not None and kernel_options.cuda is None:
        raise TypeError("fast_args(): launch= is of a kernel for CUDA: decorate that, or give it as cuda=")


_NO_FUNCTIONS = staticmethod, classmethod, property, functools.cached_property
"""Decorators' results that are not functions."""


def _cuda_target_of(func):
    """Return the package whose dispatcher for CUDA `func` is, or None. Imports none of these packages."""
    from .cuda.targets import target_of

    return target_of(func)


def _checked_cuda(cuda, launch, out, grad: str, storage: bool):
    """Return the kernel for CUDA of ``fast_args(cuda=…)``, or None. Raises TypeError for other objects."""
    if cuda is None:
        return None
    if not isinstance(cuda, Kernel) and _cuda_target_of(cuda) is None:
        raise TypeError(f"fast_args(): cuda must be a @cuda.jit dispatcher or its kernel, not {shown(cuda)}")
    if launch is None or out is not None:
        raise TypeError("fast_args(): cuda= needs launch=, the grid and block, and cannot be given with out=")
    kernel = fast_args(cuda, grad=grad, storage=storage)
    if isinstance(kernel, FastKernel):
        raise TypeError(f"fast_args(): cuda is a kernel for CUDA, and {kernel!r} is one for the CPU")
    return kernel


add_class_of_dispatchers(FastKernel)


def accelerate(*packages: str) -> None:
    """Let ``numba.njit`` and ``numba.jit`` make a :class:`FastKernel` of each function that they decorate from now on.

    `packages`: names of packages or modules, as ``"mylibrary"`` or ``"mylibrary.kernels"``, whose functions alone become kernels:
    for a library that decides for itself and not for its users. Names add up; a call without any means all functions.

    This accelerates unchanged programs and libraries: call it before they are imported. Their functions then take tensors, and
    their calls are cheaper. A call without a tensor raises the same errors as with Numba. Two differences remain: code on disk
    (``cache=True``) is kept in separate files, so Numba's files are not read; and Python's profilers (``cProfile``) do not see
    calls that native code makes. ``python -m fastexchange run PROGRAM`` does this for a program.

    The class of these functions is derived from Numba's ``CPUDispatcher``, has its name, and replaces it where programs find it.
    (With `packages` it replaces it nowhere.) So ``type(f) is CPUDispatcher`` holds in modules that are imported from then on. A
    program may give that class another ``__call__`` before a function's first call; then it makes the function's calls. Another
    ``_compile_for_args`` makes the calls with new types. Both are slower.

    Functions that are already decorated stay unchanged. :func:`decelerate` undoes this function. Both may be called repeatedly.

    Under ``NUMBA_DISABLE_JIT`` this does nothing. Raises TypeError or ValueError for what is no name of a package; RuntimeError
    if this Numba has no registry of dispatchers as expected.

    >>> import numba, numpy as np
    >>> accelerate()
    >>> @numba.njit
    ... def total(x):
    ...     return x.sum()
    >>> decelerate()
    >>> type(total).__name__, total(np.arange(4.0)), total.counts().slow
    ('CPUDispatcher', 6.0, 1)
    """
    for name in packages:
        if not isinstance(name, str):
            raise TypeError(f"accelerate() takes names of packages, not {shown(name)}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"accelerate(): {name!r} is no name by which a package is imported")
    KernelOfPackages.packages |= {*packages}
    _set_class(KernelOfPackages if packages else AcceleratedKernel)


def decelerate() -> None:
    """Undo :func:`accelerate`: functions decorated from now on become Numba's own dispatchers. Kernels stay kernels.

    >>> import numba
    >>> decelerate()
    >>> hasattr(numba.njit(lambda x: x), "counts")
    False
    """
    KernelOfPackages.packages = frozenset()
    _set_class(CPUDispatcher)


def _set_class(cls: type) -> None:
    try:
        if cls is KernelOfPackages and class_of_dispatchers() is AcceleratedKernel:
            return  # all are accelerated
        set_class_of_dispatchers(cls, cls is AcceleratedKernel)
    except Exception as error:
        raise RuntimeError(f"accelerate(): this Numba keeps its dispatchers in another way ({error}); use @fast_args") from error


def _kernel_of(dispatcher: Any, kernel_options: KernelOptions) -> Kernel:
    """Return the kernel of a dispatcher: one for each set of options."""
    if _cuda_target_of(dispatcher) is None:
        _check_launch(kernel_options)
        return kernel_of(dispatcher, kernel_options, _adopted)
    from .cuda.cuda_kernel import cuda_kernel_of

    if kernel_options.launch is None:
        return cuda_kernel_of(dispatcher, kernel_options)
    from .cuda.launched_kernel import launched_kernel_of

    own = KernelOptions(kernel_options.allows_grad, kernel_options.storage)
    return launched_kernel_of(cuda_kernel_of(dispatcher, own), kernel_options)


def _adopted(dispatcher: Any, kernel_options: KernelOptions) -> FastKernel:
    made = FastKernel(dispatcher.py_func, dispatcher.locals, dispatcher.targetoptions, pipeline_of(dispatcher))
    made._origin = dispatcher
    made._apply(kernel_options)
    if dispatcher.stats.cache_path is not None:
        _keep_on_disk(made)
    for _, compiled in overloads_of(dispatcher):
        made.add_overload(compiled)
    if not can_compile(dispatcher):
        made.disable_compile()
    return made


def _no_options(options: dict, what: str) -> None:
    if options:
        raise TypeError(f"fast_args(): {what} has its options already, so {', '.join(map(repr, options))} cannot be given")


def _jit(function: FunctionType, options: dict, kernel_options: KernelOptions, signatures=None) -> FastKernel:
    """Call ``numba.njit`` with our class. Warns, and does without a disk cache, if no directory is writable."""
    options = dict(options)
    is_cached = options.pop("cache", False)
    kernel = njit_as(FastKernel, function, options)._apply(kernel_options)
    if function.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        kernel._parameters  # noqa: B018  # raises for parameters that Numba cannot compile
    if is_cached:
        _keep_on_disk(kernel)
    if signatures is not None:
        from .calls.declared import as_computed

        with register_dispatcher(kernel):  # the function may call itself
            for signature in signatures if isinstance(signatures, list) else [signatures]:
                kernel.compile(as_computed(signature))
        kernel.disable_compile()
    return kernel


def _keep_on_disk(kernel: FastKernel) -> None:
    try:
        kernel.enable_caching()
    except RuntimeError as error:
        reraise_passing(error)
        kernel._why_not_cached = str(error)
        code = kernel.py_func.__code__
        text = f"fast_args(cache=True): {kernel.__qualname__}: {error}; compiling without a disk cache"
        warnings.warn_explicit(text, RuntimeWarning, code.co_filename, code.co_firstlineno)
