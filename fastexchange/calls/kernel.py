"""Kernels: Numba dispatchers that take tensors of any framework.

CPython passes a call to the native dispatcher (``dispatch.vectorcall``). It makes calls with known signatures; other calls go to
:meth:`FastKernel._call_slowly`. The first call of a kernel loads or compiles native code and makes the kernel's native structs.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from types import GenericAlias
from typing import Any, NamedTuple

from numba.core import compiler, sigutils

from ..ground.cpython import NativeDispatcher, enable_vectorcall
from ..ground.disk_cache import claiming
from ..ground.log import is_heard, say
from ..ground.numba_internals import (
    CPUDispatcher,
    compile_with,
    failures,
    global_compiler_lock,
    identify,
    is_compiling,
    is_object_mode,
    locals_of,
    numbas_call,
    pipeline_of,
)
from ..ground.once import cached_property, forkable_lock
from ..ground.parameters import flatten
from ..producers.framework import Framework, framework_that_sees, frameworks
from ..torch.traced import asks_is_traced, is_traced
from .carried_code import CarriedCode, Content
from .code_in_front import last_behind, put_behind, put_in_front
from .kernel_cache import KernelCache, with_unique_symbols
from .options import KernelOptions, OptionsOf, declaring
from .pickled import made_of, reduced_kernel
from .shipped_kernels import shipped_kernels, shipped_with
from .writes import check_outputs, warn_of_lost_fractions

__all__ = ["FastKernel", "Kernel", "KernelCounts", "kernel_of"]


class KernelCounts(NamedTuple):
    """Counts of a kernel's calls. See :meth:`FastKernel.counts`."""

    fast: int
    """Calls that native code made."""
    slow: int
    """Calls on the slow path: the first with a signature, and calls with an argument that only Numba can read."""
    compiled: int
    """Signatures that are compiled, or loaded."""


class Kernel:
    """Base of kernels for the CPU and for CUDA: a Python function and options."""

    py_func: Any
    _parameters: Any
    _kernel_options = KernelOptions()
    _is_numbas: bool = False  # made by Numba's decorators after accelerate(): errors are Numba's own
    _device_kernel: Any = None
    _by_xla: Any = None
    """Of a kernel that is launched by a configuration, the module ``jax.xla_launches``: how XLA launches it."""
    _is_interpreted: bool = False  # see ``calls.interpreted``
    _call_differentiated: Any = None  # a framework's quick way to :meth:`Framework.call`, or NotImplemented, of plain arguments

    allows_grad = property(lambda self: self._kernel_options.allows_grad, doc="Whether it takes tensors that require grad.")
    storage = property(
        lambda self: self._kernel_options.storage, doc="Whether it gets the bits of elements that Numba has no type for."
    )
    returns = property(lambda self: self._kernel_options.returns, doc="What determines the framework of its results.")
    out = property(lambda self: self._kernel_options.out, doc="The notation that declares its outputs, or None.")
    mutates = property(
        lambda self: self._kernel_options.mutates, doc="The names of the arguments that it writes to; None: not declared."
    )
    backward = property(
        lambda self: self._kernel_options.backward, doc="The kernels and functions of its backward pass, or None."
    )
    cuda = property(lambda self: self._kernel_options.cuda, doc="The kernel that gets the calls with tensors on a GPU, or None.")

    def __repr__(self):
        return f"<fast_args {self.py_func.__module__}.{self.py_func.__qualname__}{inspect.signature(self.py_func)}>"

    @property
    def _decorated(self) -> Any:
        """The object that the decorator has returned."""
        return self

    def _complete(self, bound: tuple) -> tuple:
        """`bound` with the omitted outputs allocated."""
        return bound

    def _refused(self, position: int, errors: list[BaseException]):
        """Raise a producer's exception, which it takes from a list, with the argument's name. Native code calls this."""
        from ..exchange.errors import refused

        refused(self, position, errors.pop())

    __iter__ = None  # else Python would iterate by __getitem__

    def __getitem__(self, configuration):
        """Return the launcher of the kernel for CUDA with this configuration, for example ``[grid, block]``."""
        return self._for_cuda("[...]")[configuration]

    def forall(self, *args, **kwargs):
        """``forall(…)`` of the kernel for CUDA: a launcher for so many tasks."""
        return self._for_cuda(".forall(...)").forall(*args, **kwargs)

    def configure(self, *args, **kwargs):
        """``configure(…)`` of the kernel for CUDA: a launcher."""
        return self._for_cuda(".configure(...)").configure(*args, **kwargs)

    def _for_cuda(self, what: str) -> Any:
        """The kernel for CUDA. `what`: how the kernel was used, for the message."""
        raise NotImplementedError


class FastKernel(Kernel, NativeDispatcher, CPUDispatcher):
    """A Numba kernel that takes tensors of any framework. Made by :func:`fast_args`.

    It is a Numba dispatcher, with the attributes of those that ``numba.njit`` makes, and Numba takes it wherever it takes one.
    Its calls also take tensors (of PyTorch, of NumPy, of any type with ``__dlpack_c_exchange_api__`` or ``__dlpack__``). The
    kernel gets arrays that are views of the tensors' memory.

    Attributes
    ----------
    py_func : the Python function.
    allows_grad : whether it takes tensors that require grad while grad mode is on.
    storage : whether elements without a Numba type are passed as integers of the same size.
    returns : what determines the framework of its results: None, a parameter's name, or a type.
    out : the notation that declares its outputs, or None.
    mutates : the names of the arguments that it writes to, or None.
    backward : the kernels and functions of its backward pass, or None.
    cuda : the kernel that gets the calls with tensors on a GPU, or None.
    """

    __slots__ = ("_memory",)
    __class_getitem__: Any = classmethod(GenericAlias)  # for annotations: parameters and result of the function
    _slow_calls: int = 0
    _why_not_cached: str = ""  # with cache=True: why its code is not kept
    _origin: Any = None  # the dispatcher whose machine code it uses: its symbols are removed when that dispatcher dies

    def __init__(self, py_func, locals=None, targetoptions=None, pipeline_class=compiler.Compiler):
        CPUDispatcher.__init__(self, py_func, locals, targetoptions, pipeline_class)
        if not self._is_numbas:
            compile_with(self, with_unique_symbols(pipeline_of(self)))  # its symbols must be unique across processes
        if (shipped := shipped_kernels(self)) is not None:
            put_in_front(self, shipped)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enable_vectorcall(cls, FastKernel.__call__)

    @classmethod
    def __subclasshook__(cls, other):
        return vars(cls).get("_stands_for", cls) in other.__mro__  # after NotImplemented, ABCMeta would ask subclasses

    def __repr__(self):
        return str(self) if self._is_numbas else super().__repr__()

    def __str__(self):
        """Numba's text for dispatchers: Numba makes the names of their types of it."""
        return f"{CPUDispatcher.__name__}({self.py_func})"

    @asks_is_traced
    def __call__(self, /, *args, **kwargs):
        """Make the calls that CPython does not pass to native code, and those that PyTorch's Dynamo traces."""
        if is_traced():
            from ..torch.tracing import call_traced

            return call_traced(self, *args, **kwargs)
        return self._call_first(*args, **kwargs)

    def _call_first(self, /, *args, **kwargs):
        """Make the first call, after which CPython calls native code directly, and all calls where native code is not used."""
        if self._is_numbas and CPUDispatcher.__call__ is not numbas_call:
            return CPUDispatcher.__call__(self, *args, **kwargs)  # a program has replaced it
        if is_object_mode(self) or not self._has_parameters:
            return numbas_call(self, *args, **kwargs)
        # Before anything native: while torch.export traces, PyTorch replaces functions that Numba registers when it starts.
        if (framework := _seen_by(self, (*args, *kwargs.values()))) is not None:
            bound = self._bind(args, kwargs)
            if bound is not None and (result := framework.call(self, bound)) is not NotImplemented:
                return result
        memory = self._native
        if memory.vectorcall:
            enable_vectorcall(type(self), FastKernel.__call__)  # does nothing if a program has replaced __call__
            self._context = memory.address
            self._vectorcall = memory.vectorcall  # last: Ctrl-C may come between any two statements
            return NativeDispatcher.__call__(self, *args, **kwargs)
        bound = self._bind(args, kwargs)
        return self._call_bound(bound) if bound is not None else numbas_call(self, *args, **kwargs)

    @property
    def dispatcher(self):
        """The kernel's Numba dispatcher, which is the kernel itself."""
        return self

    # ---- methods of Numba's dispatchers ------------------------------------------------------------------------------

    def enable_caching(self) -> None:
        """Cache machine code on disk (``cache=True``), in Numba's cache directory. See ``calls.kernel_cache``.

        Raises RuntimeError if there is no writable directory.
        """
        if failures():
            super().enable_caching()
            return
        try:
            cache = KernelCache(self.py_func, self._compiled_with(), warns=not self._is_numbas)
        except RuntimeError:
            if not self._is_numbas:
                raise
            super().enable_caching()  # raises Numba's own error if Numba finds no directory either
            return
        put_behind(self, cache)
        self.compile = self._compile_claimed
        compile_with(self, with_unique_symbols(pipeline_of(self), self._is_numbas))

    def _compiled_with(self) -> dict:
        """All options with which it is compiled."""
        pipeline = pipeline_of(self)
        own = {"pipeline_class": pipeline} if pipeline is not compiler.Compiler else {}
        return {**self.targetoptions, "locals": locals_of(self), **own}

    def _compile_claimed(self, sig):
        """Numba's ``compile`` of a kernel with ``cache=True``: afterwards this process claims no entry any more."""
        try:
            return claiming(super().compile)(sig)
        finally:
            self._cache.release(sig, self.targetctx.codegen())

    def _stored_on_disk(self, signature: tuple) -> Any:
        """The code for these argument types that another process would find on disk, as Numba stores it, or None."""
        if not self._is_cached:
            return None
        met = {*self.stats.cache_hits, *self.stats.cache_misses}  # declared signatures as they were declared
        keys = [key for key in met if tuple(sigutils.normalize_signature(key)[0]) == signature]
        found = (self._cache.stored(key, self.targetctx.codegen()) for key in keys)
        return next((data for data in found if data is not None), None)

    @property
    def _is_cached(self) -> bool:
        """Whether its code is kept on disk."""
        return isinstance(last_behind(self), KernelCache)

    def add_overload(self, cres) -> None:
        """Add machine code, a ``numba.core.compiler.CompileResult``. Resolves calls anew if it may be for their signatures.

        Raises ValueError if it never writes to an output that the kernel declares.
        """
        if self._pattern is not None:
            check_outputs(self, cres)
            warn_of_lost_fractions(self, cres)
        if is_heard():
            shipped = shipped_with(self)
            file = shipped.loaded.get(tuple(cres.signature.args)) if shipped is not None else None
            where = f"found in {file.path}" if file else "loaded from disk" if cres.metadata is None else "compiled"
            say("kernel %s.%s(%s): %s", self.__module__, self.__qualname__, ", ".join(map(str, cres.signature.args)), where)
        is_further = self._can_compile and tuple(cres.signature.args) not in self.overloads
        super().add_overload(cres)
        if not is_further:
            self._forget()

    def disable_compile(self, val: bool = True) -> None:
        """Stop (or, if False, resume) compiling for new types: calls with new types use the existing signatures."""
        super().disable_compile(val)
        self._forget()

    def recompile(self) -> None:
        """Compile all signatures anew, after a global of the function has changed. Calls of other threads wait to compile.

        A call that another thread has begun before may run the old code.
        """
        with global_compiler_lock:
            super().recompile()

    def _reset_overloads(self) -> None:
        super()._reset_overloads()
        self._forget()
        identify(self, None)  # globals may have changed: take a new identity

    def _forget(self) -> None:
        """Resolve all calls anew, because the compiled code has changed."""
        memory = getattr(self, "_memory", None)
        if memory is not None:
            memory.forget()

    def __reduce__(self):
        return reduced_kernel(self, {} if is_compiling() else self._packed().entries)

    def _reduce_states(self) -> dict:
        """All but the machine code: Dask recognises a dispatcher by this, also after it has compiled."""
        own: dict[str, Any] = {"is_numbas": self._is_numbas, "is_cached": self._is_cached}
        if self._kernel_options != Kernel._kernel_options:  # engines pickle a kernel with each task
            own["kernel_options"] = self._kernel_options
        return super()._reduce_states() | own

    @classmethod
    def _rebuild(
        cls, uuid, can_compile, sigs, kernel_options=None, is_numbas=False, is_cached=False, carried=None, **states
    ):
        def complete(made, is_new):
            if carried and isinstance(made, FastKernel):
                made._receive(carried)
            if is_new:
                made._declare(sigs, can_compile)

        def make():
            made = (AcceleratedKernel if is_numbas else cls)(**states)
            if is_cached:
                with contextlib.suppress(RuntimeError):  # its source file, or a folder for its code, is not there
                    made.enable_caching()
            return made

        made = made_of(uuid, make, complete)
        kernel_options = kernel_options or KernelOptions()
        # `made` is Numba's own dispatcher if this process has made the pickled one before accelerate().
        if isinstance(made, FastKernel) and made._kernel_options != kernel_options:
            made._apply(kernel_options)
        return made

    def _declare(self, signatures, can_compile: bool) -> None:
        for signature in signatures:
            self.compile(signature)
        self._can_compile = can_compile

    @cached_property
    def _carried(self) -> CarriedCode:
        return CarriedCode(self.py_func, self._compiled_with())

    def _packed(self) -> CarriedCode:
        """The code of all compiled signatures, as it goes with a pickle."""
        if self.overloads and not failures():
            self._carried.pack(self)
        return self._carried

    def _pickled(self) -> Content:
        """What a pickle carries."""
        return Content(0, 0, {}) if failures() else self._carried.content(self)

    def _receive(self, entries: Any) -> None:
        """Use the code of a pickle."""
        self._carried.add(entries)
        if self._cache is not self._carried:
            put_in_front(self, self._carried)

    # ---- its own -----------------------------------------------------------------------------------------------------

    def _apply(self, kernel_options: KernelOptions) -> "FastKernel":
        """Set the options. Raises TypeError or ValueError if they do not fit the parameters."""
        self._kernel_options, self._declared = kernel_options, OptionsOf(kernel_options, self.py_func)
        self._declared.check()
        if kernel_options.out is not None:
            self.__signature__ = self._declared.signature
        if kernel_options.out is not None or kernel_options.mutates is not None:
            declaring[id(self)] = self
            for framework in frameworks():
                framework.know(self)
        if kernel_options.cuda is not None:
            self._device_kernel = kernel_options.cuda._beside(self, kernel_options.launch)
        return self

    @cached_property
    def _declared(self) -> OptionsOf:
        return OptionsOf(self._kernel_options, self.py_func)

    _pattern = property(lambda self: self._declared.pattern)
    _parameters = property(lambda self: self._declared.parameters)
    _outputs = property(lambda self: self._declared.outputs)

    @property
    def _has_parameters(self) -> bool:
        """Whether Numba can compile its parameters. If not, raises TypeError, or returns False if Numba has to raise."""
        try:
            return self._parameters is not None
        except TypeError:
            if not self._is_numbas:
                raise
            return False

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """The arguments in parameter order. If they do not fit, raises TypeError, or returns None if Numba has to decide.

        Numba also takes keyword-only arguments by position, and positional-only ones by name.
        """
        try:
            return self._parameters.bind(*args, **kwargs)
        except TypeError:
            if not self._is_numbas:
                raise
        return None

    @property
    def _native(self):
        """The ``KernelContext``, made on first access."""
        memory = getattr(self, "_memory", None)
        return memory if memory is not None else self._prepare()

    def _prepare(self):
        """Make the ``KernelContext``. Not under a lock: this may compile, and Numba's compiler has a lock of its own."""
        from ..dispatch.allocation import vectorcall_heeding_modes, vectorcall_with_outputs
        from ..dispatch.overloads import KernelContext
        from ..dispatch.rows import vectorcall
        from . import results

        release_gil = bool(self.targetoptions.get("nogil"))
        memory = KernelContext(
            self._parameters, self.__qualname__, release_gil, self._kernel_options.allows, self._declared.returns, self._outputs
        )
        memory.native.stores = self._kernel_options.storage
        memory.native.is_generator = inspect.isgeneratorfunction(self.py_func)
        if isinstance(self.returns, type):
            results.learn_target(self.returns)
        if memory.runtime.is_native and not is_object_mode(self):
            declared = vectorcall if self.mutates is None else vectorcall_heeding_modes
            memory.vectorcall = (declared if self._outputs is None else vectorcall_with_outputs).address
            results.prepare()
        if self._device_kernel is not None:
            memory.native.device_kernel = id(self._device_kernel.launcher)
        with _publishing:
            if not hasattr(self, "_memory"):
                self._memory = memory
        return self._memory

    def _element_of(self, field: int):
        """The Numba type in the kernel for elements of this dtype field. Raises ``ground.dtypes.NoNumbaType``."""
        from ..ground.dtypes import element_of

        return element_of(field, self.storage)

    def _for_cuda(self, what: str):
        """Return :attr:`cuda`. Raises TypeError if it is None. `what`: how the kernel was used, for the message."""
        if self.cuda is None:
            name = self.__qualname__
            raise TypeError(
                f"{name}{what}: {name}() is a kernel for the CPU, without a launch configuration: call it as {name}(...); "
                "fast_args(cuda=..., launch=...) gives it a kernel for CUDA"
            )
        return self.cuda

    def _is_for_device_kernel(self, bound: tuple, is_on_device: bool = False) -> bool:
        """Whether :attr:`cuda` makes a call with these arguments. `is_on_device`: native code has found a tensor on a GPU."""
        return self._device_kernel is not None and (is_on_device or self._device_kernel.takes(bound))

    def counts(self) -> KernelCounts:
        """Count the calls on the fast path, the calls on the slow path, and the compiled signatures. Returns a ``KernelCounts``.

        >>> import torch
        >>> kernel = fast_args(lambda x: x.sum())
        >>> kernel(torch.ones(3)), kernel(torch.ones(3))
        (3.0, 3.0)
        >>> kernel.counts()
        KernelCounts(fast=1, slow=1, compiled=1)
        """
        memory = getattr(self, "_memory", None)
        if memory is None:
            return KernelCounts(0, self._slow_calls, len(self.overloads))
        return KernelCounts(memory.native.calls, self._slow_calls + memory.native.numba_calls, len(self.overloads))

    def bind(self, /, *args, **kwargs):
        """Bind the arguments. Returns a :class:`~fastexchange.BoundLaunch`: calling it, without arguments, makes the call.

        Raises TypeError for arguments that do not fit the parameters, and what allocating the omitted outputs raises.

        >>> import numpy as np
        >>> x = np.arange(4.0)
        >>> launch = fast_args(lambda x: x.sum()).bind(x)
        >>> launch(), launch()
        (6.0, 6.0)
        """
        from .bound_launch import BoundLaunch

        return BoundLaunch(self, args, kwargs)

    def precompile(self, /, *calls) -> list[tuple]:
        """Compile for signatures, or for example arguments, without calling the kernel.

        Parameters
        ----------
        calls : for each kind of call one of

            - a Numba signature, as for ``numba.njit``: ``"float64(float64[:])"``, or a tuple of Numba types;
            - a tuple of example arguments, positional: what is looked at is their types, element types, dimensions and layout;
            - a dict of example arguments, by name.

            An example also compiles the native code by which repeated calls of its kind are made. Outputs may be omitted.

        Returns
        -------
        The compiled signature of each call, a tuple of Numba types.

        With ``cache=True`` the code is kept on disk, and later processes load it; else it is this process's. Raises what a
        call with such arguments raises before the kernel runs, also the errors of Numba's compiler; TypeError for anything else
        among `calls`, and for types that no declared signature takes.

        >>> import numpy as np
        >>> kernel = fast_args(lambda x, k: x.sum() * k)
        >>> kernel.precompile("(float32[::1], int64)", (np.ones(3), 2.0))
        [(Array(float32, 1, 'C', False, aligned=True), int64), (Array(float64, 1, 'C', False, aligned=True), float64)]
        """
        from .compile_ahead import precompile

        return precompile(self, calls)

    def as_torch_op(
        self, name: str, *, backward=None, setup_context=None, mutates=None, vmap="loop", replace: bool = False
    ):
        """Register the kernel as an operator of PyTorch, ``torch.ops.namespace.name``: for autograd, ``torch.compile``, export.

        Parameters
        ----------
        name : ``"namespace::name"``.
        backward : the backward pass: a function ``backward(ctx, *grads)`` that returns a gradient, or None, for each argument of
            the operator, as for ``torch.library.register_autograd``; or a kernel that declares outputs, or a list of such
            kernels. A kernel's inputs are arguments and outputs of the operator, by their names, which are saved, and
            ``grad_`` and an output's name; its outputs are ``grad_`` and an argument's name. Without a backward pass the operator
            refuses tensors that require grad, as the kernel does.
        setup_context : for a function in `backward`: ``setup_context(ctx, inputs, output)`` saves what it needs.
        mutates : the names of the arguments that the kernel writes to, besides its outputs. None: as in ``fast_args(mutates=…)``.
        vmap : ``"loop"``: ``torch.vmap`` calls the operator for each item of a batch. A function: as for
            ``torch.library.register_vmap``. None: no rule.
        replace : take the place of an operator of this name that an earlier call has registered, as in a notebook.

        Returns
        -------
        A :class:`~fastexchange.TorchOp`: called like the kernel, without its outputs, it returns them.

        The schema comes from the parameters. Those in ``fast_args(out=…)`` are tensors, or ints where they are extents; others
        have an annotation (``torch.Tensor``, ``list[torch.Tensor]``, ``float``, ``int``, ``bool``, or one of these ``| None``) or
        a default. Under FASTEXCHANGE_DEBUG=1, read here, calls check that the kernel writes to no other argument.

        Needs PyTorch 2.8 or newer. Raises ImportError if it is missing or older; TypeError for a parameter that no schema has, a
        kernel that neither declares outputs nor writes to arguments, or whose results are no PyTorch tensors; ValueError for a
        name that is registered, and for a `backward` or `mutates` that does not fit the parameters.

        Source: ``torch.library``.

        >>> import torch
        >>> @fast_args(out="x[n] -> y[n]")
        ... def squares(x, y):
        ...     for i in range(x.shape[0]):
        ...         y[i] = x[i] * x[i]
        >>> op = squares.as_torch_op("docs::squares")
        >>> torch.ops.docs.squares(torch.arange(3.0))
        tensor([0., 1., 4.])
        """
        from ..torch.operator import as_torch_op

        return as_torch_op(
            self, name, backward=backward, setup_context=setup_context, mutates=mutates, vmap=vmap, replace=replace
        )

    def explain(self, /, *args, **kwargs):
        """Explain a call with these arguments without making it: each argument's path and Numba type, and the reasons.

        Reads the tensors as a call does, so a copy-on-write tensor of PyTorch is copied. Returns a ``CallExplanation``; print it.
        Raises TypeError for arguments that do not fit the parameters.

        >>> import torch
        >>> kernel = fast_args(lambda x: x.sum())
        >>> kernel.explain(torch.ones(3)).outcome
        'new: the next such call compiles it'
        """
        from .explanation import explain_call, explain_seen

        bound = self._parameters.bind(*args, **kwargs)
        framework = _seen_by(self, bound)
        seen = explain_seen(self, bound, framework) if framework is not None else None
        return explain_call(self, bound) if seen is None else seen

    def _complete(self, bound: tuple) -> tuple:
        """`bound` with the omitted outputs allocated."""
        return bound if self._outputs is None else self._outputs.complete(bound, self.returns)

    def _call_bound(self, bound: tuple):
        """Make a call with arguments in parameter order; outputs may be omitted."""
        from .resolve import call

        self._slow_calls += 1
        if (result := self._call_seen(bound)) is not NotImplemented:
            return result
        make_call = functools.partial(call, self) if self._native.runtime.is_native else self._call_viewed
        return make_call(bound) if self._outputs is None else self._outputs.call(bound, self.returns, make_call)

    def _call_with_outputs(self, /, *args, **kwargs):
        """Allocate the outputs and make the call. Native code calls this if it could not, or if a mode of PyTorch is active."""
        if self._call_differentiated is not None and not kwargs:
            result = self._call_differentiated(args)
            if result is not NotImplemented:
                return result
        return self._call_bound(self._parameters.bind(*args, **kwargs))

    def _call_slowly(self, /, *args, **kwargs):
        """Learn the call's signature. Native code calls this for unknown signatures.

        Returns AGAIN if native code can make the call now. Else makes it, and returns its result.
        """
        from .resolve import call

        bound = self._bind(args, kwargs)
        self._slow_calls += 1
        if bound is None:
            return numbas_call(self, *args, **kwargs)
        result = self._call_seen(bound)
        return result if result is not NotImplemented else call(self, bound, leaves=True)

    def _call_itself(self, /, *args, **kwargs):
        """Make a call that native code could not make, although :meth:`_call_slowly` had left it to native code."""
        from .resolve import call

        return call(self, self._parameters.bind(*args, **kwargs))

    def _call_seen(self, bound: tuple):
        """Make a call that a framework has to see, because it traces it. NotImplemented for any other call."""
        framework = _seen_by(self, bound)
        return framework.call(self, bound) if framework is not None else NotImplemented

    def _call_numba(self, /, *args, **kwargs):
        """Make the call by Numba's dispatcher. Native code calls this for signatures that it cannot pass."""
        self._slow_calls += 1
        bound = self._bind(args, kwargs)
        return self._call_viewed(bound) if bound is not None else numbas_call(self, *args, **kwargs)

    def _call_viewed(self, bound: tuple):
        """Make a call by Numba's dispatcher, with tensors as NumPy views, or by the kernel for CUDA."""
        from .fallback import call_numba

        return self._device_kernel.call(bound) if self._is_for_device_kernel(bound) else call_numba(self, bound)

    def _failed(self, errors: list[BaseException], args: tuple, named: dict | None):
        """Raise an exception of Numba's dispatcher, taken from a list, with the argument's name. Native code calls this."""
        from .fallback import reword

        error = errors.pop()
        try:
            bound = self._bind(args, named or {})
            if bound is None:
                raise error
            reword(self, bound, error)
        finally:
            del error  # its traceback holds this frame

    _call_own = numbas_call  # the call by Numba's dispatcher


def _seen_by(kernel: FastKernel, values: tuple) -> Framework | None:
    """The framework that has to see a call, if any."""
    leaves = [value for i, item in enumerate(values) for _, value in flatten(i, item)]
    return framework_that_sees(kernel, leaves)


_publishing = forkable_lock()
enable_vectorcall(FastKernel, FastKernel.__call__)


class AcceleratedKernel(FastKernel):
    """The class of dispatchers that ``numba.jit`` makes after ``accelerate()``. It stands in for Numba's ``CPUDispatcher``.

    It has that class's name and module, and instances of that class are instances of this one. For object mode it makes Numba's
    own dispatcher, because a kernel in object mode takes any object.
    """

    __slots__ = ()
    _is_numbas = True
    _stands_for = CPUDispatcher

    def __new__(cls, py_func, locals=None, targetoptions=None, pipeline_class=compiler.Compiler):
        """Return Numba's own dispatcher for object mode."""
        if (targetoptions or {}).get("forceobj"):
            return CPUDispatcher(py_func, locals, targetoptions, pipeline_class)
        return super().__new__(cls)

    def _reduce_class(self):
        return FastKernel if type(self) is AcceleratedKernel else type(self)  # pickle finds that name in every process


class KernelOfPackages(AcceleratedKernel):
    """What ``numba.jit`` makes its dispatchers of after ``accelerate("package")``: no object has this class."""

    __slots__ = ()
    packages: frozenset[str] = frozenset()

    def __new__(cls, py_func, locals=None, targetoptions=None, pipeline_class=compiler.Compiler):
        """Return a kernel for a function of the named packages, else Numba's own dispatcher."""
        names = str(py_func.__module__).split(".")
        is_named = any(".".join(names[: i + 1]) in cls.packages for i in range(len(names)))
        return (AcceleratedKernel if is_named else CPUDispatcher)(py_func, locals, targetoptions, pipeline_class)


for _attribute in "__name__", "__qualname__", "__module__", "__doc__":
    setattr(AcceleratedKernel, _attribute, getattr(CPUDispatcher, _attribute))


_kernels: "weakref.WeakValueDictionary[tuple, Any]" = weakref.WeakValueDictionary()
"""Kernels by the ``id`` of their dispatcher, which they keep alive, and options."""


def kernel_of(dispatcher: Any, kernel_options: KernelOptions, make: Callable[[Any, KernelOptions], Kernel]) -> Any:
    """Return the only kernel of a dispatcher with these options. ``make(dispatcher, options)`` makes it."""
    known = _kernels.get((id(dispatcher), kernel_options))
    return known if known is not None else _kernels.setdefault((id(dispatcher), kernel_options), make(dispatcher, kernel_options))

