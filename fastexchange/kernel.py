"""``@fast_args`` and what it makes: a Numba kernel that takes tensors of any framework at the cost of C.

The native shim (``dispatch.shim``) makes the calls it knows. This file is its Python side: it makes the kernel's context,
and it holds the slow path, which learns what the shim met for the first time (a type, a dtype, a shape) and repeats the
call. Nothing here runs in a call that has been made once before.
"""

import ctypes
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from numba.core import sigutils
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher

from ._abi import ffi
from .cpython import NativeCallable, enable_vectorcall
from .discovery import OMITTED, PATH_DUNDER, PATH_EXCHANGE, discover, learn
from .dispatch import entry, layout, shim
from .dispatch.entries import GOLDEN
from .dispatch.signature import UnknownDtype, numba_types
from .dispatch.state import runtime
from .dispatch.walk import FLAG_TRUSTED
from .refusal import dtype_name, swapped_dtype, wording

__all__ = ["FastKernel", "KernelStats", "fast_args"]

_MAX_LOOKS = 16  # how often the slow path repeats a call whose arguments keep changing
_REPORT_KEYS = 4096


class KernelStats(NamedTuple):
    """How a kernel's calls went. See :meth:`FastKernel.stats`."""

    fast: int
    """Calls that the native shim made, without Python."""
    slow: int
    """Calls that went through the slow path: the first of their shape, or with an argument only Numba understands."""
    compiled: int
    """Shapes of calls that native code knows: one per combination of argument types."""


class _Native:
    """The memory that a kernel's native code reads: its context and its overloads. Freed with the kernel."""

    def __init__(self, names: list[str], required: int, positional_only: int, variadic: bool, release_gil: bool):
        self.shared = runtime()
        self.names = [sys.intern(name) for name in names]
        self.strings = (sys.intern("_call_slowly"), sys.intern("_refused"))
        self.name_pointers = ffi.new("intptr_t[]", [id(name) for name in self.names] or [0])
        self.buckets = ffi.new("intptr_t[]", 8)
        self.overloads: list[Any] = []
        self.retired: list[Any] = []
        context = self.context = ffi.new("fx_context *")
        context.runtime = self.shared.address
        # Stands for the last call before there was one.
        self.nothing = ffi.new("int64_t[]", 1), ffi.new("fx_overload *")
        self.nothing[1].keys, self.nothing[1].key_count = _address(self.nothing[0]), -1
        self.nothing[1].plan_words = _NO_PLAN
        context.last = _address(self.nothing[1])
        context.overloads, context.overloads_mask = _address(self.buckets), len(self.buckets) - 1
        context.parameter_count, context.required_count = len(names), required
        context.plain_count = -1 if variadic else len(names)
        context.positional_only, context.variadic = positional_only, variadic
        context.names = _address(self.name_pointers)
        context.omitted = id(OMITTED)
        context.slow_name, context.refused_name = map(id, self.strings)
        context.release_gil = release_gil
        context.raise_error = entry.raise_error()

    @property
    def address(self) -> int:
        return _address(self.context)

    def has(self, keys: tuple[int, ...]) -> bool:
        return any(known == keys for _, known, _ in self.overloads)

    def add(self, keys: tuple[int, ...], bound: tuple = (), trampoline=0, kernel=0, box=0, constants=(), keep: Any = None):
        """File an overload for arguments like `bound`; with ``trampoline=0`` one that only Numba's dispatcher can call."""
        key_words = ffi.new("int64_t[]", [*keys, 0])
        pointers = ffi.new("intptr_t[]", [id(constant) for constant in constants] or [0])
        overload = ffi.new("fx_overload *")
        overload.hash, overload.key_count, overload.keys = _hash(keys), len(keys), _address(key_words)
        overload.trampoline, overload.kernel = trampoline, kernel
        overload.box, overload.box_constants = box, _address(pointers)
        plan, held = self._plan(keys, bound)
        overload.plan = _address(plan)
        overload.plan_words = sum(_words_of(key) for key in keys) if trampoline else _NO_PLAN
        self.overloads.append((overload, keys, (key_words, pointers, constants, keep, plan, held)))
        if len(self.overloads) > len(self.buckets):
            # Calls in progress may still look at the old buckets: they stay, all together no larger than the new ones.
            self.retired.append(self.buckets)
            self.buckets = ffi.new("intptr_t[]", 4 * len(self.buckets))
            for other, _, _ in self.overloads:
                other.next = 0
            for other, _, _ in self.overloads:
                self._link(other)
            self.context.overloads_mask = len(self.buckets) - 1
            self.context.overloads = _address(self.buckets)
        else:
            self._link(overload)

    def _plan(self, keys: tuple[int, ...], bound: tuple):
        """The plan of an overload (see ``dispatch.plan``), and the dtypes that it refers to."""
        plan = ffi.new("fx_plan[]", len(bound) or 1)
        held = []
        for record, value, key in zip(plan, bound, keys):
            fields = self.shared.entries.fields(type(value))
            kind = fields["kind"]
            if kind not in _PLANNED_KINDS or (kind == layout.KIND_INT and key != _INT64_KEY):
                break  # from here on keys and arguments need not go together
            if kind == layout.KIND_EXCHANGE and self.context.release_gil:
                break
            record.kind, record.ndim, record.flags = kind, (key >> layout.NDIM_SHIFT) & 0xFF, key >> layout.FLAGS_SHIFT
            field = (key >> layout.DTYPE_SHIFT) & 0xFFFFFF
            if kind == layout.KIND_NDARRAY:
                record.dtype, record.itemsize = id(value.dtype), value.dtype.itemsize
                held.append(value.dtype)
            elif kind == layout.KIND_EXCHANGE:
                record.dtype = record.ndim | field << 32 | 1 << 48
                for name in ("borrow", "guard_object", "guard_word", "guard_mask", "guard_pointer"):
                    setattr(record, name, fields.get(name, 0))
            record.type = id(type(value))
            self.shared.entries.watch(type(value), plan)
        return plan, held

    def _link(self, overload) -> None:
        index = ((overload.hash * GOLDEN & (1 << 64) - 1) >> 40) & (len(self.buckets) - 1)
        overload.next = self.buckets[index]
        self.buckets[index] = _address(overload)


_PLANNED_KINDS = frozenset(
    (
        layout.KIND_NDARRAY, layout.KIND_EXCHANGE, layout.KIND_FLOAT, layout.KIND_INT, layout.KIND_BOOL, layout.KIND_NONE,
        layout.KIND_NUMPY_SCALAR,
    )
)  # fmt: skip
_INT64_KEY = layout.KIND_SCALAR | (64 << 8) << layout.DTYPE_SHIFT
_NO_PLAN = 1 << 62


def _words_of(key: int) -> int:
    """How many words a leaf with this key takes, at most."""
    if key & 0xFF == layout.KIND_ARRAY:
        return layout.ARRAY_HEAD_WORDS + 2 * ((key >> layout.NDIM_SHIFT) & 0xFF)
    return 2


def _address(cdata) -> int:
    return int(ffi.cast("intptr_t", cdata))


def _hash(keys) -> int:
    """The hash of a key sequence, as :func:`shim.look_up` computes it in wrapping 64-bit arithmetic."""
    value = 0
    for key in keys:
        value = _signed(value << 5) ^ (value >> 59) ^ key
    return value


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class FastKernel(NativeCallable):
    """A Numba kernel that takes tensors of any framework. Made by :func:`fast_args`.

    Calling it is like calling the Numba dispatcher that it wraps, except that tensors (of PyTorch, of NumPy, of anything
    with ``__dlpack_c_exchange_api__`` or ``__dlpack__``) are passed to the kernel as array views of their memory.

    Attributes
    ----------
    dispatcher : the Numba dispatcher. Called directly, it takes what Numba takes.
    py_func : the Python function.
    """

    __slots__ = ("__dict__", "__weakref__", "_native")

    def __init__(self, dispatcher: CPUDispatcher):
        functools.update_wrapper(self, dispatcher.py_func)
        self.dispatcher = dispatcher
        self.py_func = dispatcher.py_func
        self._parameters = _Parameters(dispatcher.py_func)
        self._slow_calls = 0
        p = self._parameters
        release_gil = bool(dispatcher.targetoptions.get("nogil"))
        self._native = _Native(p.names, p.required, p.positional_only, p.variadic is not None, release_gil)
        self._context = self._native.address
        self._vectorcall = shim.vectorcall.address
        _kernels[dispatcher] = self

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        enable_vectorcall(cls)

    def __repr__(self):
        return f"<fast_args {self.py_func.__module__}.{self.py_func.__qualname__}{inspect.signature(self.py_func)}>"

    def __reduce__(self):
        return fast_args, (self.dispatcher,)

    @property
    def _numba_type_(self):
        """Inside other jitted functions this is the dispatcher."""
        return self.dispatcher._numba_type_

    @property
    def signatures(self) -> list:
        """The signatures compiled so far, as ``dispatcher.signatures``."""
        return self.dispatcher.signatures

    def stats(self) -> KernelStats:
        """Counts of calls: on the fast path, on the slow path; and of the shapes of calls that are known."""
        return KernelStats(self._native.context.calls, self._slow_calls, len(self._native.overloads))

    def explain(self, /, *args, **kwargs) -> str:
        """What a call with these arguments would do, without making it: each argument's path and Numba type, and why.

        Raises TypeError for arguments that do not fit the parameters.
        """
        from .explain import explain_call

        return explain_call(self, self._parameters.bind(*args, **kwargs))

    # ---- the slow path ----

    def _call_slowly(self, /, *args, **kwargs):
        """Called by the shim for what it does not know: learn it, and make the call."""
        bound = self._parameters.bind(*args, **kwargs)
        self._slow_calls += 1
        flags = 0
        report = _Report()
        for _ in range(_MAX_LOOKS):
            status = self._attempt(bound, flags, report)
            if status == layout.STATUS_OK:
                return report.take_result()
            if status in (layout.STATUS_UNKNOWN_TYPE, layout.STATUS_UNKNOWN_DTYPE):
                learn(report.stopped_at)
            elif status == layout.STATUS_UNKNOWN_SHAPE:
                try:
                    is_native = self._specialise(report.keys, bound)
                except UnknownDtype as unknown:
                    code, bits = unknown.field & 0xFF, unknown.field >> 8 & 0xFF
                    self._refuse(unknown.position, bound, f"its element type {dtype_name(code, bits)} has no NumPy dtype; convert it first")
                if not is_native:
                    result = self._call_numba(bound)
                    # Numba could do what we cannot (a literal argument, say): next time straight to it.
                    if not self._native.has(report.keys):
                        self._native.add(report.keys)
                    return result
            elif status in (layout.STATUS_NUMBA, layout.STATUS_BIG_INT):
                return self._call_numba(bound)
            elif status == layout.STATUS_CHECK:
                flags |= FLAG_TRUSTED
            elif status == layout.STATUS_NO_ERROR_SET:
                self._refuse(report.position, bound, "its producer failed to export it and did not say why")
            else:
                self._refuse(report.position, bound, wording(status, report.tensor))
        raise BufferError(f"{self.__qualname__}(): the arguments changed at each of {_MAX_LOOKS} looks at them")

    def _attempt(self, bound: tuple, flags: int, report: "_Report") -> int:
        pointers = ffi.new("intptr_t[]", [id(value) for value in bound] or [0])
        try:
            return _attempt()(self._native.address, _address(pointers), len(bound), flags, report.address)
        except Exception as error:
            if report.native.status == layout.STATUS_ERROR:
                self._refused(report.native.position, error)
            raise

    def _specialise(self, keys: tuple[int, ...], bound: tuple) -> bool:
        """Compile the kernel for a call with these keys, and file it. False if the call is for Numba's dispatcher."""
        given = numba_types(keys, self._parameters.defaults, self._native.shared.serials)
        chosen = self._overload_for(given)
        if chosen is None:
            return False
        compiled = chosen[1]
        try:
            trampoline = entry.trampoline(given, chosen[0])
            box, constants = entry.box(compiled.signature.return_type)
        except entry.UnsupportedEntry:
            return False
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        if not self._native.has(keys):
            self._native.add(keys, bound, trampoline, address, box, constants, compiled)
        return True

    def _overload_for(self, given: tuple):
        """The argument types taken and the compile result for arguments of these types, None if Numba has to say why not."""
        dispatcher = self.dispatcher
        if dispatcher._can_compile:
            try:
                dispatcher.compile(given)
            except Exception:  # typing errors, literal requests …: Numba's dispatcher raises or resolves them
                return None
            taken = given
        else:
            taken = self._declared_signature_for(given)
        compiled = dispatcher.overloads.get(taken) if taken is not None else None
        if compiled is None or compiled.objectmode:
            return None
        return taken, compiled

    def _declared_signature_for(self, given: tuple) -> tuple | None:
        """Which of the explicit signatures Numba's overload resolution picks; None if none or several fit."""
        dispatcher = self.dispatcher
        if given in dispatcher.overloads:
            return given
        cases = [compiled.signature for compiled in dispatcher.overloads.values()]
        try:
            chosen = dispatcher.typingctx.resolve_overload(
                dispatcher.py_func, cases, given, {}, allow_ambiguous=False, unsafe_casting=True
            )
        except TypeError:
            return None
        return tuple(chosen.args) if chosen is not None else None

    def _call_numba(self, bound: tuple):
        """Make the call through Numba's dispatcher, tensors passed as NumPy views that live as long as it takes."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        skipped = False
        for position, value in enumerate(bound):
            if value is OMITTED:
                skipped = True
                continue
            dtype = swapped_dtype(value)
            if dtype is not None:
                self._refuse(position, bound, f"its dtype {dtype!r} is not in native byte order; use x.astype(x.dtype.newbyteorder('='))")
            viewed = self._numpy_of(position, value)
            if skipped:
                named[self._parameters.names[position]] = viewed
            else:
                positional.append(viewed)
        return self.dispatcher(*positional, **named)

    def _numpy_of(self, position: int, value):
        """`value` as Numba's dispatcher takes it: tensors become NumPy views, also inside tuples."""
        from .convert import numpy_view

        cls = type(value)
        if isinstance(value, tuple):
            items = [self._numpy_of(position, item) for item in value]
            return cls._make(items) if hasattr(cls, "_make") else tuple(items)
        found = discover(cls)
        if found.path in (PATH_EXCHANGE, PATH_DUNDER):
            try:
                return numpy_view(value, found.entry["managed"])
            except Exception as error:
                self._refused(position, error)
        if isinstance(value, FastKernel):
            return value.dispatcher
        try:
            known = numba.typeof(value)
        except Exception:
            known = None
        if known is None:
            notes = "; ".join(found.notes)
            raise TypeError(
                f"{self._argument(position)}: an object of type {_type_name(cls)} is no tensor that can be exchanged, and "
                f"Numba cannot determine its type (tried __dlpack_c_exchange_api__, __dlpack__, numba.typeof; {notes})"
            )
        return value

    # ---- errors ----

    def _argument(self, position: int) -> str:
        name = self._parameters.name_of(position)
        return f"{self.__qualname__}(): argument {name!r} (position {position})"

    def _refuse(self, position: int, bound: tuple, why: str):
        kind = _type_name(type(bound[position]))
        raise BufferError(f"{self._argument(position)}, a {kind}, cannot be passed to the kernel: {why}")

    def _refused(self, position: int, error: BaseException):
        """Raise a producer's exception again, the argument named; exceptions that are more than a message unchanged."""
        if type(error) not in _REWORDED:
            raise error
        raise type(error)(f"{self._argument(position)} cannot be passed to the kernel: {error}") from error


_REWORDED = (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError)
_kernels: "weakref.WeakValueDictionary[Any, FastKernel]"


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


class _Parameters:
    """A kernel's parameters as its context and its messages need them."""

    def __init__(self, py_func: Callable):
        parameters = list(inspect.signature(py_func).parameters.values())
        for parameter in parameters:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                raise TypeError(f"{py_func.__qualname__}(): Numba kernels cannot have keyword-only parameters: {parameter}")
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        plain = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
        self.names = [p.name for p in plain]
        self.defaults = {i: p.default for i, p in enumerate(plain) if p.default is not p.empty}
        self.required = len(plain) - len(self.defaults)
        self.positional_only = sum(p.kind is p.POSITIONAL_ONLY for p in plain)
        self.bind = self._make_binder(py_func)

    def _make_binder(self, py_func: Callable) -> Callable[..., tuple]:
        """A function with the kernel's parameters that returns its arguments in order, defaults as :data:`OMITTED`.

        Python itself binds the arguments of a call to it, and words the TypeError when they do not fit.
        """
        listed = [name + ("=OMITTED" if i in self.defaults else "") for i, name in enumerate(self.names)]
        if self.positional_only:
            listed.insert(self.positional_only, "/")
        returned = [*self.names]
        if self.variadic is not None:
            listed.append("*" + self.variadic)
            returned.append("*" + self.variadic)
        namespace: dict[str, Any] = {"OMITTED": OMITTED}
        exec(f"def bind({', '.join(listed)}): return ({''.join(name + ', ' for name in returned)})", namespace)
        bind = namespace["bind"]
        bind.__name__, bind.__qualname__ = py_func.__name__, py_func.__qualname__
        return bind

    def name_of(self, position: int) -> str:
        if position < len(self.names):
            return self.names[position]
        return f"{self.variadic}[{position - len(self.names)}]"


class _Report:
    """What native code says of an attempted call."""

    def __init__(self):
        self.native = ffi.new("fx_report *")
        self._keys = ffi.new("int64_t[]", _REPORT_KEYS)
        self.native.keys, self.native.key_capacity = _address(self._keys), _REPORT_KEYS
        self.address = _address(self.native)

    @property
    def position(self) -> int:
        return self.native.position

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self._keys[i] for i in range(self.native.key_count))

    @property
    def tensor(self):
        return ffi.cast("DLTensor *", self.native.tensor)

    @property
    def stopped_at(self):
        """The leaf at which the walk stopped; the caller holds the arguments, so it is alive."""
        return ctypes.cast(self.native.object, ctypes.py_object).value

    def take_result(self):
        """The result, whose reference native code gave us."""
        result = ctypes.cast(self.native.result, ctypes.py_object)
        value = result.value
        ctypes.pythonapi.Py_DecRef(result)
        return value


@functools.cache
def _attempt():
    prototype = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_void_p
    )
    return prototype(shim.attempt.address)


_kernels = weakref.WeakValueDictionary()
enable_vectorcall(FastKernel)


def fast_args(func=None, /, **options):
    """Let a Numba kernel take tensors of any framework, at the cost of a hand-written C extension.

    Parameters
    ----------
    func : a Python function, which is compiled with ``numba.njit(**options)``; or an existing ``@njit`` dispatcher; or,
        as for ``njit``, one or several explicit signatures.
    **options : options of ``numba.njit`` (``parallel``, ``fastmath``, ``nogil``, ``cache``, ``boundscheck`` …).

    Returns
    -------
    A :class:`FastKernel`; without a function, a decorator.

    Raises TypeError for anything else, and for options given together with a dispatcher, which has its own.

    Ownership: a call borrows its tensors for the time of the call. With ``nogil=True`` it holds owning exports instead,
    so that another thread cannot free what the kernel reads.

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
    if func is None:
        return functools.partial(fast_args, **options)
    if isinstance(func, FastKernel):
        _no_options(options, "a FastKernel")
        return func
    if isinstance(func, CPUDispatcher):
        _no_options(options, "a Numba dispatcher")
        known = _kernels.get(func)
        return known if known is not None else FastKernel(func)
    if isinstance(func, Dispatcher):
        raise TypeError(f"fast_args() takes functions and CPU dispatchers, not {type(func).__name__}: only CPU kernels are supported")
    if sigutils.is_signature(func) or (isinstance(func, list) and all(map(sigutils.is_signature, func))):
        return lambda function: FastKernel(_jit(function, options, func))
    if not inspect.isfunction(func):
        raise TypeError(
            f"fast_args() takes a Python function or a Numba dispatcher (from @njit), not {func!r} of type {_type_name(type(func))}"
        )
    return FastKernel(_jit(func, options))


def _no_options(options: dict, what: str) -> None:
    if options:
        raise TypeError(f"fast_args(): {what} has its options already, so {', '.join(map(repr, options))} cannot be given")


def _jit(function: Callable, options: dict, signatures=None) -> CPUDispatcher:
    """``numba.njit``; without its disk cache where no directory can be written."""
    if not inspect.isfunction(function):
        raise TypeError(f"fast_args() decorates a Python function, not {function!r}")
    try:
        return numba.njit(signatures, **options)(function) if signatures is not None else numba.njit(**options)(function)
    except KeyError as error:
        raise TypeError(f"fast_args(): {error.args[0] if error.args else error}") from error
    except RuntimeError as error:
        if not options.get("cache") or "cannot cache function" not in str(error):
            raise
        warnings.warn(f"fast_args(cache=True): {error}; compiling without a disk cache", RuntimeWarning, stacklevel=3)
        return _jit(function, {**options, "cache": False}, signatures)


