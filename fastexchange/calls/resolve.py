"""The slow path: calls that native code does not know yet.

:class:`Resolver` repeats an attempt at the call, and after each one learns what native code sees for the first time: a type, a
dtype, a signature. Calls that native code cannot make go to Numba's dispatcher (``calls.fallback``).
"""

import contextlib
import ctypes
import functools
import itertools
import sys
import warnings
from typing import Any, cast

from numba.core import types
from numba.core.errors import NumbaError, NumbaPendingDeprecationWarning, TypingError

from .._abi import ffi
from ..arguments.buffer import is_numba_only
from ..arguments.decoding import UnknownDtype, numba_types
from ..arguments.discovery import compare, learn
from ..dispatch import structs, vectorcall
from ..dispatch.boxing import UnsupportedEntry
from ..dispatch.overloads import AGAIN, Overload
from ..dispatch.reading import DRY_RUN, FLAG_ASKED
from ..dispatch.signature import lists_in
from ..exchange.errors import check_tensors, refuse, refuse_elements, refuse_mixed, refused, wording
from ..ground import half
from ..ground.dtypes import lacks_dtype
from ..ground.native import address_of
from ..ground.numba_code import runs_python
from ..ground.numba_internals import can_compile, compile_result, compiles_as_numba, declared_signature, leaves_of
from ..ground.parameters import find_item, flatten
from ..ground.passing import reraise_passing
from ..producers.framework import framework_of
from .compile_errors import add_call, why_not_compiled
from .fallback import are_numbas, call_numba, copy_of, forget_frames
from .results import check_argument

MAX_LOOKS = 64  # attempts at one call, besides those for each argument and item
_REPORT_KEYS = 4096


_as_it_is = ffi.new_allocator(should_clear_after_alloc=False)


class Report:
    """The result of an attempted call: an ``fx_report`` and the Python objects besides it."""

    def __init__(self):
        self.result: Any = None
        """With STATUS_OK: the call's result."""
        self.unmade: tuple | None = None
        """If native code can read the arguments but cannot make the call: the keys and the generation."""
        self.overload: Overload | None = None
        """What native code can make the call with, if ``compile_ahead.compiled_natively`` has looked for it."""
        self._native = ffi.new("fx_report *")
        self._keys = _as_it_is("int64_t[]", _REPORT_KEYS)
        self._native.keys, self._native.key_capacity = address_of(self._keys), _REPORT_KEYS
        self.address = address_of(self._native)

    def take_result(self):
        """Return the result and drop it here: Numba may store a compilation's frames, and those would keep it alive."""
        try:
            return self.result
        finally:
            self.result = None

    @property
    def status(self) -> int:
        return self._native.status

    @property
    def position(self) -> int:
        """The index of the argument at which reading stopped."""
        return self._native.position

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self._keys[i] for i in range(self._native.key_count))

    @property
    def tensor(self):
        """A copy of the refused ``DLTensor``. Its shape and strides may dangle."""
        return ffi.cast("DLTensor *", self._native.tensor)

    def place(self, bound: tuple) -> int:
        """The position at which reading stopped: the argument, and the item in it."""
        found = find_item(self.position, bound[self.position], self.stopped_at) if 0 <= self.position < len(bound) else None
        return self.position if found is None else found

    @property
    def stopped_at(self):
        """The object at which reading stopped. It is alive, because the caller holds the arguments."""
        return ctypes.cast(self._native.object, ctypes.py_object).value

    @property
    def native(self):
        """The ``fx_report *``."""
        return self._native


@functools.cache
def _attempt():
    prototype = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_void_p
    )
    return prototype(vectorcall.attempt.address)


def attempt(kernel, bound: tuple, flags: int, report: Report) -> int:
    """Attempt the call natively. Returns a STATUS_*; `report` has the details.

    Raises the kernel's exception, and a producer's with the argument's name.
    """
    pointers = ffi.new("intptr_t[]", [id(value) for value in bound] or [0])
    try:
        report.result = _attempt()(kernel._native.address, address_of(pointers), len(bound), flags, report.address)
        if report.status == structs.STATUS_CHECK and is_numba_only(report.stopped_at):
            report.native.status = structs.STATUS_NUMBA
        return report.status
    except Exception as error:
        if report.status == structs.STATUS_ERROR:
            if isinstance(error, RuntimeError):
                error = framework_of(report.stopped_at).as_dlpack_raises(report.stopped_at, error)
            refused(kernel, report.place(bound), error)
        raise


def call(kernel, bound: tuple, leaves: bool = False):
    """Make a call that native code does not know. With `leaves`, return AGAIN instead as soon as native code can make it."""
    if not compiles_as_numba(kernel):
        return call_numba(kernel, bound)
    resolver = Resolver(kernel, bound, is_call=True)
    resolver.leaves = leaves
    report = resolver.report
    try:
        resolver.run()
    except Exception:
        if report.status == structs.STATUS_OK or not are_numbas(kernel, bound):  # with STATUS_OK the kernel itself has raised
            raise
        report.native.status = structs.STATUS_NUMBA
    if resolver.has_learnt:
        return AGAIN
    if report.status == structs.STATUS_OK:
        return report.take_result()
    if kernel._is_for_device_kernel(bound, report.status == structs.STATUS_DEVICE):
        return kernel._device_kernel.call(bound)
    result = call_numba(kernel, bound)
    if report.unmade is not None:  # Numba could make it, for example with a literal argument: next time call it directly
        kernel._native.add_numba_only(*report.unmade)
    return result


class Resolver:
    """Resolves a call that native code does not know: learns and compiles until native code has made it, or cannot.

    1. Attempt the call. 2. If the status is final, return. 3. Otherwise learn the type or dtype, compile for the signature, or
    check the tensors in Python, and attempt it again. Errors of arguments are raised on the way.
    """

    ends = frozenset((structs.STATUS_OK, structs.STATUS_NUMBA, structs.STATUS_BIG_INT))
    """The final statuses: with STATUS_OK native code has made the call, with the others Numba or the device kernel makes it."""

    leaves = False
    """Whether to end when native code can make the call, rather than make it."""
    has_learnt = False
    """Whether it has ended so."""

    def __init__(self, kernel, bound: tuple, is_call: bool = False):
        """`is_call`: Numba's dispatcher makes the call if compiling fails and may succeed later. Else the error is raised.
        """
        self.kernel, self.bound, self.report = kernel, bound, Report()
        self._is_call = is_call
        if kernel._device_kernel is not None:
            self.ends |= {structs.STATUS_DEVICE}

    def run(self, flags: int = 0) -> Report:
        """Resolve the call. Returns the last report: its status is one of :attr:`ends`, with DRY_RUN also STATUS_UNKNOWN_SHAPE.

        Raises the exceptions of the call.
        """
        kernel, report = self.kernel, self.report
        for _ in range(MAX_LOOKS + 2 * leaf_count(self.bound)):
            status = attempt(kernel, self.bound, flags, report)
            if status in self.ends or (status == structs.STATUS_UNKNOWN_SHAPE and flags & DRY_RUN):
                return report
            if status in (structs.STATUS_UNKNOWN_TYPE, structs.STATUS_UNKNOWN_DTYPE):
                try:
                    learn(report.stopped_at)
                except Exception as error:  # a type whose attributes raise
                    refused(kernel, report.position, error)
                for value in self.bound:  # at once, so that no producer is asked again for each type
                    with contextlib.suppress(Exception):  # raised when the reading stops there
                        learn(value)
            elif status == structs.STATUS_UNKNOWN_SHAPE:
                for position, value in enumerate(self.bound):
                    for _, item in flatten(position, value):
                        compare(item)
                if not self.specialise():
                    report.native.status = structs.STATUS_NUMBA
                    return report
                if self.leaves and not flags:  # not if Python code had to check the tensors
                    self.has_learnt = True
                    return report
            elif status == structs.STATUS_CHECK:
                for position, value in enumerate(self.bound):
                    check_tensors(kernel, position, value)
                flags |= FLAG_ASKED
            else:
                self.handle(status)
        return refuse(kernel, report.position, self.bound, f"it, or another argument, was different at each of {MAX_LOOKS} looks")

    def specialise(self) -> Overload | None:
        """Compile the kernel for the reported signature. Returns None if native code cannot make such calls, or not now."""
        native, keys = self.kernel._native, self.report.keys
        generation = native.generation
        if self._is_call and not native.retries.is_due(keys):
            return None
        try:
            if overload := specialise(self.kernel, keys, self.bound):
                native.retries.succeeded(keys)
                return overload
        except NotCompiledNow as error:
            native.retries.failed(keys, error.why)
            if not self._is_call:
                raise error.why from None
            return None
        self.report.unmade = keys, generation
        return None

    def handle(self, status: int) -> None:
        """Handle any other status: remove the obstacle for the next attempt, or raise the error."""
        kernel, report = self.kernel, self.report
        if status == structs.STATUS_MOVABLE:
            try:
                framework_of(report.stopped_at).hold_memory(report.stopped_at)
            except Exception as error:
                refused(kernel, report.position, error)
        elif status == structs.STATUS_MIXED:
            refuse_mixed(kernel, report.position, self.bound, report.stopped_at)
        else:
            refuse(kernel, report.place(self.bound), self.bound, wording(status, report.tensor))


def leaf_count(values: tuple) -> int:
    """The number of objects that may be new in a call: its arguments and the items of tuples and lists."""
    return sum(1 + leaf_count(value) if issubclass(type(value), tuple) else 1 + _items(value) for value in values)


def _items(value) -> int:
    return len(value) if type(value) is list else 0


# ---- compiling -----------------------------------------------------------------------------------------------------


class NotCompiledNow(Exception):
    """Compiling has failed in a way that says nothing of the next try. `why`: the exception."""

    def __init__(self, why: BaseException):
        super().__init__(why)
        self.why = why


def specialise(kernel, keys: tuple[int, ...], bound: tuple) -> Overload | None:
    """Compile the kernel for a call with these keys, and file the overload. Returns it; None if only Numba can call it.

    Raises NotCompiledNow if the next call is to try again.
    """
    check_argument(kernel, bound)
    native = kernel._native
    generation = native.generation  # first: another thread may recompile the kernel from here on
    given, unknown = (), None
    try:
        given = numba_types(keys, kernel._parameters.defaults, native.runtime.serials, kernel._element_of)
    except UnknownDtype as error:
        unknown = error.position, error.field  # not the error, whose traceback holds this frame
    if unknown is not None:
        refuse_elements(kernel, bound, *unknown)
    if any(isinstance(each, types.FunctionType) for each in leaves_of(*given)):  # Numba passes a jitted function as a struct
        return None
    if not can_compile(kernel):
        given = tuple(map(as_declared, given))
    own = None
    try:
        chosen = _overload_for(kernel, given)
    except TypingError as error:
        own = copy_of(error)
        add_call(own, kernel, [*given], {})
    except Exception as error:
        if not isinstance(error, half.NotForHalf) and not any(map(lacks_dtype, given)):
            raise
        reraise_passing(error)
        own = TypingError(why_not_compiled(error, kernel, [*given], {}))
    if own is not None:
        raise own
    if chosen is None:
        return None
    taken, compiled = chosen
    if not all(map(_keeps_the_value, given, taken)):
        return None
    native.require_owning_exports(runs_python(compiled.library))
    try:
        return native.add(keys, given, taken, compiled, generation)
    except UnsupportedEntry:
        return None
    except Exception as error:
        raise NotCompiledNow(error) from None


def _overload_for(dispatcher, given: tuple):
    """Return the overload's argument types and its compile result for arguments of these types; None if Numba has to raise.

    Raises Numba's error if Numba's dispatcher cannot: it makes no call for elements that NumPy does not know. NotCompiledNow
    stands for exceptions that are not Numba's verdict.
    """
    taken: tuple | None = given
    if can_compile(dispatcher):
        try:
            with _without_warnings_of_lists(given), _boxing_half_precision():
                dispatcher.compile(given)
        except Exception as error:
            if isinstance(error, half.NotForHalf) or any(map(lacks_dtype, given)):
                raise
            forget_frames(error)
            if isinstance(error, (NumbaError, NotImplementedError)):  # Numba's dispatcher raises it, or passes literals
                return None
            if compile_result(dispatcher, given) is None:  # otherwise it is compiled, and what followed has failed
                raise NotCompiledNow(error) from None
    else:
        taken = declared_signature_for(dispatcher, given)
    compiled = compile_result(dispatcher, taken) if taken is not None else None
    if compiled is None or compiled.objectmode:
        return None
    return taken, compiled


def _boxing_half_precision():
    known = sys.modules.get(half.__name__ + ".known")  # not imported: the kernel has no such arrays
    return known.boxed_by_native_code() if known is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _without_warnings_of_lists(given: tuple):
    """Suppress Numba's warning that it will no longer reflect lists: this package reflects them itself."""
    if not lists_in(given):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPendingDeprecationWarning)
        yield


def _keeps_the_value(given: Any, taken: Any) -> bool:
    """Whether a cast in machine code equals Numba's unboxing for an explicit signature.

    Unboxing also checks: it raises OverflowError for an int that does not fit, and ValueError for a NaN as an int.
    """
    if given == taken or isinstance(given, (types.Array, types.Omitted)):
        return True
    if isinstance(taken, types.Optional):
        return given == types.none or _keeps_the_value(given, taken.type)
    if isinstance(given, types.BaseTuple) and isinstance(taken, types.BaseTuple):
        inner: tuple = cast(Any, given).types
        wanted: tuple = cast(Any, taken).types
        return len(inner) == len(wanted) and all(itertools.starmap(_keeps_the_value, zip(inner, wanted, strict=True)))
    if isinstance(taken, (types.Float, types.Complex)):
        whole = isinstance(given, (types.Integer, types.Boolean)) and taken in (types.float64, types.complex128)
        return whole or (isinstance(given, (types.Float, types.Complex)) and given.bitwidth >= 32)
    if isinstance(given, types.Boolean):
        return isinstance(taken, types.Integer)
    if isinstance(given, types.Integer) and isinstance(taken, types.Integer):
        given, taken = cast(Any, given), cast(Any, taken)  # Numba's annotations lack the two attributes
        return given.bitwidth < taken.bitwidth and (taken.signed or not given.signed)
    return False


def as_declared(numba_type):
    """The type by which an explicit signature accepts an argument: Numba types all arrays as aligned."""
    if not isinstance(numba_type, types.Array):
        return numba_type
    return types.Array(numba_type.dtype, numba_type.ndim, numba_type.layout, readonly=not numba_type.mutable, aligned=True)


def declared_signature_for(dispatcher, given: tuple) -> tuple | None:
    """The explicit signature that Numba's overload resolution picks for these types; None if none or several fit."""
    if compile_result(dispatcher, given) is not None:
        return given
    return declared_signature(dispatcher, given)
