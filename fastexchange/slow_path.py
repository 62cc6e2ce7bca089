"""The slow path: what a kernel does with a call that the shim does not know.

It learns what the shim met for the first time (a type, a dtype, a shape), files it, and repeats the call natively. What
native code cannot do at all goes to Numba's dispatcher, tensors as NumPy views. And it words the refusals.
"""

import copy
import ctypes
import functools
import itertools
import warnings
import weakref
from typing import Any, NoReturn, cast

import numba
import numpy as np
from numba.core import types
from numba.core.errors import TypingError

from ._abi import ffi
from .compiled import may_run_python
from .cpython import NativeCallable
from .discovery import discover, learn
from .dispatch import entry, layout, shim
from .dispatch.context import address_of
from .dispatch.signature import UnknownDtype, numba_types
from .dispatch.walk import FLAG_LOOK, FLAG_TRUSTED
from .dtypes import as_numba_has_it, dtype_field, is_native_order
from .export import numpy_view
from .naming import type_name
from .producers import buffer, torch
from .producers.ndarray import dtype_of
from .producers.omitted import OMITTED
from .refusal import advice, dtype_name, wording

_MAX_LOOKS = 64  # how often a call is repeated whose arguments bring something new each time
_REPORT_KEYS = 4096
_BY_NUMBA = (layout.STATUS_NUMBA, layout.STATUS_BIG_INT)

# Exceptions that are nothing but a message: these can be raised again with the argument's name in it.
_REWORDED = (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError)


class Report:
    """What native code says of an attempted call."""

    def __init__(self):
        self.result: Any = None
        """What the call returned, if its status is STATUS_OK."""
        self._native = ffi.new("fx_report *")
        self._keys = ffi.new("int64_t[]", _REPORT_KEYS)
        self._native.keys, self._native.key_capacity = address_of(self._keys), _REPORT_KEYS
        self.address = address_of(self._native)

    @property
    def status(self) -> int:
        return self._native.status

    @property
    def position(self) -> int:
        """The index of the argument at which the walk stopped."""
        return self._native.position

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self._keys[i] for i in range(self._native.key_count))

    @property
    def tensor(self):
        """A copy of the ``DLTensor`` that was refused; its shape and strides are no longer to be looked at."""
        return ffi.cast("DLTensor *", self._native.tensor)

    @property
    def stopped_at(self):
        """The leaf at which the walk stopped; the caller holds the arguments, so it is alive."""
        return ctypes.cast(self._native.object, ctypes.py_object).value


@functools.cache
def _native_attempt():
    prototype = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_void_p
    )
    return prototype(shim.attempt.address)


def attempt(kernel, bound: tuple, flags: int, report: Report) -> int:
    """Make the call natively if all is known. Returns a STATUS_*; details are in `report`."""
    pointers = ffi.new("intptr_t[]", [id(value) for value in bound] or [0])
    try:
        report.result = _native_attempt()(kernel._native.address, address_of(pointers), len(bound), flags, report.address)
        is_for_numba = report.status == layout.STATUS_CHECK and buffer.is_numba_only(report.stopped_at)
        return layout.STATUS_NUMBA if is_for_numba else report.status
    except Exception as error:
        if report.status == layout.STATUS_ERROR:
            if isinstance(error, RuntimeError):
                error = torch.as_dlpack_raises(report.stopped_at, error)
            refused(kernel, report.position, error)
        raise


def call(kernel, bound: tuple):
    """Make a call that the shim could not make."""
    flags = 0
    report = Report()
    for _ in range(_MAX_LOOKS + 2 * _leaves(bound)):
        status = attempt(kernel, bound, flags, report)
        if status == layout.STATUS_OK:
            return report.result
        if status in (layout.STATUS_UNKNOWN_TYPE, layout.STATUS_UNKNOWN_DTYPE):
            try:
                learn(report.stopped_at)
            except Exception as error:  # a type whose attributes cannot even be asked for
                refused(kernel, report.position, error)
        elif status == layout.STATUS_UNKNOWN_SHAPE:
            edition = kernel._native.edition
            if not specialise(kernel, report.keys, bound):
                result = call_numba(kernel, bound)
                # Numba could do what we cannot (a literal argument, say): next time straight to it.
                kernel._native.add_numba_only(report.keys, edition)
                return result
        elif status in _BY_NUMBA:
            return call_numba(kernel, bound)
        elif status == layout.STATUS_CHECK:
            for position, value in enumerate(bound):
                check_tensors(kernel, position, value)
            flags |= FLAG_TRUSTED
        elif status == layout.STATUS_MOVABLE:
            try:
                torch.forbid_resizing(report.stopped_at)
            except Exception as error:
                refused(kernel, report.position, error)
        else:
            refuse(kernel, report.position, bound, wording(status, report.tensor))
    return refuse(kernel, report.position, bound, f"it, or another argument, was different at each of {_MAX_LOOKS} looks")


def _leaves(values: tuple) -> int:
    """How many things a call may bring for the first time: its arguments, and in tuples their items."""
    return sum(1 + _leaves(value) if issubclass(type(value), tuple) else 1 for value in values)


def plan(kernel, bound: tuple) -> None:
    """Compile a fast entry for calls with arguments of these types, if they still have the shape of the call just made."""
    report = Report()
    try:
        status = attempt(kernel, bound, FLAG_LOOK, report)
    except Exception:  # a producer failed at this look: the call that was made did not need it
        return
    if status != layout.STATUS_UNKNOWN_SHAPE or report.keys not in kernel._native:
        return
    try:
        kernel._native.add_plan(report.keys, bound)
    except Exception as error:  # the call has been made, and the next ones can be made without
        message = f"{kernel.__name__}() stays on the general native path, its fast entry failed to compile: {error!r}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


# ---- compiling -----------------------------------------------------------------------------------------------------


def specialise(kernel, keys: tuple[int, ...], bound: tuple) -> bool:
    """Compile the kernel for a call with these keys, and file it. False if the call is for Numba's dispatcher."""
    native = kernel._native
    edition = native.edition  # before it is looked what has been compiled: that may be recompiled meanwhile
    try:
        given = numba_types(keys, kernel._parameters.defaults, native.runtime.serials)
    except UnknownDtype as unknown:
        code, bits = unknown.field & 0xFF, unknown.field >> 8 & 0xFF
        why = f"its element type, {dtype_name(code, bits)}, has no NumPy dtype; {advice(code, bits)}"
        refuse(kernel, unknown.position, bound, why)
    if not kernel.dispatcher._can_compile:
        given = tuple(map(_as_declared, given))
    chosen = _overload_for(kernel.dispatcher, given)
    if chosen is None:
        return False
    taken, compiled = chosen
    if not all(map(_keeps_the_value, given, taken)):
        return False
    if may_run_python(compiled.library):
        native.native.owns = 1
    try:
        native.add(keys, given, taken, compiled, edition)
    except entry.UnsupportedEntry:
        return False
    return True


def _overload_for(dispatcher, given: tuple):
    """The argument types taken and the compile result for arguments of these types; None if Numba has to say why not."""
    taken: tuple | None = given
    if dispatcher._can_compile:
        try:
            dispatcher.compile(given)
        except Exception as error:  # typing errors, requests for literals …: Numba's dispatcher raises or resolves them
            _forget_frames(error)
            return None
    else:
        taken = _declared_signature_for(dispatcher, given)
    compiled = dispatcher.overloads.get(taken) if taken is not None else None
    if compiled is None or compiled.objectmode:
        return None
    return taken, compiled


def _forget_frames(error: BaseException | None) -> None:
    """Drop the traceback of an exception that Numba keeps, and with it the arguments of the call: it raises it without."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _keeps_the_value(given: Any, taken: Any) -> bool:
    """Whether a cast in machine code makes of an argument what Numba's unboxing for an explicit signature makes of it.

    Unboxing checks: it raises OverflowError for an int that does not fit, ValueError for a NaN that should be an int.
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


def _as_declared(numba_type):
    """The type under which an explicit signature accepts an argument: Numba types every array as aligned."""
    if not isinstance(numba_type, types.Array):
        return numba_type
    return types.Array(numba_type.dtype, numba_type.ndim, numba_type.layout, readonly=not numba_type.mutable, aligned=True)


def _declared_signature_for(dispatcher, given: tuple) -> tuple | None:
    """Which of the explicit signatures Numba's overload resolution picks; None if none or several fit."""
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


# ---- Numba's own dispatcher ----------------------------------------------------------------------------------------


def call_numba(kernel, bound: tuple):
    """Make the call through Numba's dispatcher, tensors passed as NumPy views that live as long as it takes."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for position, value in enumerate(bound):
        if value is OMITTED:
            continue
        viewed = as_numba_takes_it(kernel, position, value)
        if len(positional) == position:
            positional.append(viewed)
        else:  # behind an omitted one
            named[kernel._parameters.names[position]] = viewed
    try:
        return kernel.dispatcher(*positional, **named)
    except TypingError as error:
        own = _copy_of(error)
    finally:
        del positional, named  # the exception's traceback holds this frame
    try:
        raise own
    finally:
        del own


def _copy_of(error: TypingError) -> TypingError:
    """A copy of an exception that Numba keeps, and raises again: it would keep the arguments in all frames of its way, too."""
    made = copy.copy(error)
    if type(made) is not type(error) or (str(made), made.args) != (str(error), error.args):
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    made = made.with_traceback(error.__traceback__)
    _forget_frames(error)
    return made


def as_numba_takes_it(kernel, position: int, value):
    """`value` for Numba's dispatcher: tensors become NumPy views, also inside tuples."""
    cls = type(value)
    try:
        fields = kernel._native.runtime.entries.get(cls) or discover(cls).entry
    except Exception as error:  # a type whose attributes cannot even be asked for
        refused(kernel, position, error)
    kind = fields["kind"]
    if kind == layout.KIND_INT:
        if not -(2**63) <= value < 2**64:
            raise OverflowError(f"{argument(kernel, position)}: int {_shortened(value)} does not fit into 64 bits")
    elif fields.get("key", 0) >> layout.CLASS_SHIFT and kind == layout.KIND_MANAGED:
        return value  # Numba knows it: an object with the buffer protocol
    elif kind in (layout.KIND_EXCHANGE, layout.KIND_MANAGED):
        check_tensors(kernel, position, value)
        try:
            if torch.is_tensor_type(cls):  # other code may run before the kernel does
                torch.forbid_resizing(value)
                value = value.detach()  # which nobody else knows, and so does not give another storage
            return _as_numba_has_it(numpy_view(value, fields["managed"]))
        except Exception as error:
            refused(kernel, position, error)
    elif kind == layout.KIND_TUPLE:
        return tuple([as_numba_takes_it(kernel, position, item) for item in value])
    elif kind == layout.KIND_NAMED_TUPLE:
        return cls._make([as_numba_takes_it(kernel, position, item) for item in value])
    elif isinstance(value, np.ndarray):
        _require_native_order(kernel, position, value)
        if isinstance(value, np.ma.MaskedArray):
            numba.typeof(value)  # raises; Numba's dispatcher would take it for a plain array once it has compiled for one
        return _as_numba_has_it(value)
    elif isinstance(value, NativeCallable):
        return value.dispatcher
    elif kind == layout.KIND_NUMBA:
        _require_numba_type(kernel, position, value)
    return value


def _as_numba_has_it(array: np.ndarray) -> np.ndarray:
    """`array`, or a view of it as unsigned integers if its dtype is a registered one for which Numba has no type."""
    given = dtype_of(array)
    if dtype_field(given) is None:
        return array
    dtype = as_numba_has_it(given)
    return array if dtype is given else array.view(dtype)


def _require_native_order(kernel, position: int, array: np.ndarray) -> None:
    if not is_native_order(dtype_of(array)):
        advice = "pass x.astype(x.dtype.newbyteorder('='))"
        refuse_value(kernel, position, array, f"its dtype {dtype_of(array)!r} is not in native byte order; {advice}")


def _require_numba_type(kernel, position: int, value) -> None:
    """Raise TypeError for an object that nobody can pass."""
    cls = type(value)
    if id(cls) in _typed_by_numba or _has_numba_type(value):
        if id(cls) not in _typed_by_numba:
            forget = functools.partial(_forget_type, id(cls))
            _typed_by_numba[id(cls)] = weakref.ref(cls, forget)
        return
    tried = "; ".join(discover(cls).notes)
    raise TypeError(
        f"{argument(kernel, position)}: an object of type {type_name(cls)} is no tensor that can be exchanged, and Numba "
        f"cannot determine its type (tried __dlpack_c_exchange_api__, __dlpack__ and numba.typeof; {tried})"
    )


def _forget_type(address: int, _reference) -> None:
    _typed_by_numba.pop(address, None)


_typed_by_numba: dict[int, weakref.ref] = {}
"""Types, by ``id``, of which Numba has typed an object: those that it then does not know, its dispatcher refuses."""


def _shortened(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"of {value.bit_length()} bits"


def check_tensors(kernel, position: int, value) -> None:
    """Ask PyTorch whether its tensors in `value` are plain, or may be taken for plain; raise what it says if not."""
    if issubclass(type(value), tuple):
        for item in value:
            check_tensors(kernel, position, item)
    elif torch.is_tensor_type(type(value)):
        try:
            torch.check(value, kernel.allows_grad)
        except BufferError as error:
            refuse_value(kernel, position, value, str(error))
        except Exception as error:
            refused(kernel, position, error)


def _has_numba_type(value) -> bool:
    """Whether ``numba.typeof`` has an answer, or an objection of its own, which its dispatcher then words."""
    try:
        numba.typeof(value)
    except ValueError as error:
        return "Cannot determine Numba type" not in str(error)
    except Exception:
        return True
    return True


# ---- words ---------------------------------------------------------------------------------------------------------


def argument(kernel, position: int) -> str:
    """The argument at `position`, for a message."""
    return f"{kernel.__qualname__}(): argument {kernel._parameters.name_of(position)!r} (position {position})"


def refuse(kernel, position: int, bound: tuple, why: str) -> NoReturn:
    """Raise BufferError for the argument at `position`."""
    refuse_value(kernel, position, bound[position], why)


def refuse_value(kernel, position: int, value, why: str) -> NoReturn:
    """Raise BufferError for `value`, all or part of the argument at `position`."""
    raise BufferError(f"{argument(kernel, position)}, a {type_name(type(value))}, cannot be passed to the kernel: {why}")


def refused(kernel, position: int, error: BaseException) -> NoReturn:
    """Raise a producer's exception again, the argument named; an exception that is more than a message unchanged."""
    try:
        if type(error) not in _REWORDED:
            raise error
        raise type(error)(f"{argument(kernel, position)} cannot be passed to the kernel: {error}") from error
    finally:
        del error  # its traceback holds this frame
