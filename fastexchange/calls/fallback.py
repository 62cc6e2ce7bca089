"""The fallback: calls by Numba's own dispatcher, with tensors as NumPy views."""

import copy
from typing import Any

import numba
import numpy as np
from numba.core.errors import TypingError

from ..arguments.discovery import discover, fields_of
from ..arguments.ndarrays import is_masked_array
from ..dispatch import structs
from ..exchange.convert import from_dlpack
from ..exchange.errors import argument, check_tensors, mixed, refuse_value, refused, why_not_computed
from ..exchange.export import exporter_of_another, numpy_view
from ..ground.dtypes import NoNumbaType, as_kernel_has_it, is_native_order
from ..ground.half import NotForHalf
from ..ground.log import is_heard, say
from ..ground.numba_internals import OmittedArg, fails_to_compile, fails_to_match
from ..ground.omitted import OMITTED
from ..ground.parameters import flatten, item_of, with_items
from ..ground.passing import may_pass
from ..ground.safe_repr import type_name
from ..producers.framework import PLAIN, framework_of
from ..producers.ndarray import dtype_of
from .compile_errors import add_call, check_items, is_half, raise_named, why_not_compiled, why_not_declared
from .numba_type import UnknownType, is_tensor_by_itself, let_numba_take, require_numba_type
from .results import check_argument
from .views import Views

__all__ = ["are_numbas", "as_numba_takes_it", "call_numba", "check_arguments", "copy_of", "forget_frames"]


def call_numba(kernel, bound: tuple, is_made: bool = True):
    """Make the call by Numba's dispatcher. Tensors are passed as NumPy views, which live until the call has ended.

    Without `is_made` the dispatcher only compiles for the call. Returns its entry point for such calls, a builtin function.
    """
    own = kernel._call_own if is_made else kernel._compile_for_args
    if are_numbas(kernel, bound):
        positional, named = _as_given(kernel, bound, not is_made)
        result = own(*positional, **named)
        _let_numba_take(kernel, bound)
        return result
    check_argument(kernel, bound)
    views = Views()
    _take_others(kernel, bound, views)
    viewed = tuple(v if v is OMITTED else as_numba_takes_it(kernel, i, v, views) for i, v in enumerate(bound))
    positional, named = _as_given(kernel, viewed, not is_made)
    try:
        try:
            result = own(*positional, **named)
        finally:
            views.reflect(kernel, bound)
        result = views.returned(kernel, bound, result)
        _let_numba_take(kernel, bound)
        return result
    except Exception as error:
        reworded = _reworded(kernel, bound, positional, named, error)
        if reworded is None:
            raise
    finally:
        del positional, named, viewed, views  # the exception's traceback holds this frame
    try:
        raise reworded
    finally:
        del reworded


def _say_why(kernel, bound: tuple) -> None:
    """Log why Numba's dispatcher makes a call: once for each combination of types."""
    given = [type(value) for value in bound if value is not OMITTED]
    found = [discover(cls) for cls in given]
    numbas = [(type_name(cls), each.notes) for cls, each in zip(given, found, strict=True) if each.path == "numba"]
    slow = [f"{name}: {''.join(notes[-1:])}" for name, notes in numbas]
    why = kernel._native.runtime.why_not_native or "; ".join(slow) or "native code cannot call the code for these types"
    say("slow: Numba's own dispatcher makes %s(%s): %s", kernel.__qualname__, ", ".join(map(type_name, given)), why)


def _let_numba_take(kernel, bound: tuple) -> None:
    """Let native code leave later calls with such arguments to Numba's dispatcher, if it makes calls at all. Log why."""
    if is_heard():
        _say_why(kernel, bound)
    if kernel._native.runtime.is_native:
        for value in bound:
            let_numba_take(value)


def _as_given(kernel, bound: tuple, is_folded: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Return the given arguments, positional and by name.

    Numba assigns defaults to the last parameters. If these are keyword-only, the defaults are passed explicitly. `is_folded`: for
    Numba's compiler, which gets one value for each parameter, ``*args`` as a tuple.
    """
    parameters = kernel._parameters
    if is_folded or parameters.positional < len(parameters.names):
        defaults = parameters.defaults
        values = [OmittedArg(defaults[i]) if value is OMITTED else value for i, value in enumerate(bound)]
        if is_folded and parameters.variadic is not None:
            values[len(parameters.names) :] = [tuple(values[len(parameters.names) :])]
        return values, {}
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for position, value in enumerate(bound):
        if value is OMITTED:
            continue
        if len(positional) == position:
            positional.append(value)
        else:  # follows an omitted argument
            named[kernel._parameters.names[position]] = value
    return positional, named


def are_numbas(kernel, bound: tuple) -> bool:
    """Whether Numba makes or refuses the call: its decorators made the kernel, and no argument is another library's tensor."""
    return kernel._is_numbas and not any(_has_tensor(kernel, value) for value in bound)


def _has_tensor(kernel, value, depth: int = 0) -> bool:
    """Whether Numba gets something else for a value, as for a tensor, or a list or tuple that contains one."""
    cls = type(value)
    if issubclass(cls, tuple) or cls is list:
        items = value[:1] if cls is list else value  # a list's items are of one type
        return depth < structs.MAX_TUPLE_DEPTH and any(_has_tensor(kernel, item, depth + 1) for item in items)
    if value is OMITTED:
        return False
    try:
        fields = fields_of(cls)
    except Exception:  # a type whose attributes raise
        return False
    kind = fields["kind"]
    is_converted = kind.form == structs.FORM_OTHER and kind.for_numba is not None
    return kind.form == structs.FORM_TENSOR or is_converted or is_tensor_by_itself(value, kind)


def reword(kernel, bound: tuple, error: BaseException) -> None:
    """Raise the exception of :func:`call_numba` for `error`, which Numba's dispatcher has raised for the arguments themselves."""
    if are_numbas(kernel, bound):
        raise error
    try:
        for position, value in enumerate(bound):
            if value is not OMITTED:
                as_numba_takes_it(kernel, position, value)
    except BaseException:
        forget_frames(error)  # Numba keeps it, as in copy_of
        raise
    try:
        raise error
    except Exception as raised:
        own = _reworded(kernel, bound, *_as_given(kernel, bound), raised)
        if own is None:
            raise
    finally:
        del error
    try:
        raise own
    finally:
        del own


def _reworded(kernel, bound: tuple, positional: list, named: dict, error: Exception) -> Exception | None:
    """Return the exception to raise instead of `error`, which Numba's dispatcher has raised; None: `error` itself.

    Raises the error of an argument that is to blame, with its name.
    """
    if isinstance(error, (TypingError, ValueError, OverflowError)) and not kernel._is_interpreted:
        try:
            for position, value in enumerate(bound):
                _refuse_large_ints(kernel, position, value)
        except OverflowError as refused_int:
            refused_int.__context__ = None  # Numba's, which says less
            return refused_int.with_traceback(None)
    if isinstance(error, TypingError):
        own = copy_of(error)
        if own is not error:
            add_call(own, kernel, positional, named)
        return own
    is_verdict = fails_to_compile(error) and not may_pass(error) and any(map(is_half, [*positional, *named.values()]))
    if is_verdict or isinstance(error, NotForHalf):
        return TypingError(why_not_compiled(error, kernel, positional, named))
    if isinstance(error, (NotImplementedError, TypeError)):
        raise_named(kernel, bound, as_numba_takes_it)
        if fails_to_compile(error) and isinstance(error, NotImplementedError):
            return NotImplementedError(why_not_compiled(error, kernel, positional, named))
        if fails_to_match(error):
            return TypeError(why_not_declared(error, kernel, positional, named))
    return None


def check_arguments(kernel, bound: tuple) -> None:
    """Raise the errors of :func:`call_numba` for arguments that are refused, without making a call."""
    _take_others(kernel, bound, Views())
    for position, value in enumerate(bound):
        as_numba_takes_it(kernel, position, value)
    raise_named(kernel, bound, as_numba_takes_it)


def _take_others(kernel, bound: tuple, views: Views) -> None:
    """Convert producers that may run Python code first: the code may change PyTorch's tensors."""
    for position, given_value in enumerate(bound):
        for at, value in flatten(position, given_value):
            cls = type(value)
            is_simple = value is OMITTED or cls is list or issubclass(cls, (tuple, np.ndarray, *_NUMBERS))
            if not is_simple and framework_of(value) is PLAIN:
                views.taken[id(value)] = as_numba_takes_it(kernel, at, value, views)


def copy_of(error: TypingError) -> TypingError:
    """Copy an exception that Numba stores and raises again: with it, Numba would store the frames, and their arguments."""
    made = copy.copy(error)
    if type(made) is not type(error) or (str(made), made.args) != (str(error), error.args):
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    made = made.with_traceback(error.__traceback__)
    forget_frames(error)
    return made


def as_numba_takes_it(kernel, position: int, value, views: Views | None = None):
    """Return `value` as Numba's dispatcher gets it: tensors become NumPy views, also inside tuples.

    `views`: records the views of a call. None: no call follows, so no memory is held.
    """
    if views is not None and id(value) in views.taken:
        return views.taken[id(value)]
    cls = type(value)
    try:
        fields = fields_of(cls)
    except Exception as error:  # a type whose attributes raise
        refused(kernel, position, error)
    kind = fields["kind"]
    if kind.for_numba is not None:
        try:
            return kind.for_numba(value)
        except Exception as error:
            refused(kernel, position, error)
    if kind.form == structs.FORM_TENSOR or is_tensor_by_itself(value, kind):
        framework = framework_of(value)
        is_native = kernel._native.runtime.is_native
        is_checked = framework is not PLAIN and not kernel.allows_grad and is_native and _can_be_viewed(value)
        if not is_checked:
            check_tensors(kernel, position, value)
        try:
            if views is not None:
                framework.hold_memory(value)
            detached = framework.detached(value)
            if is_checked:
                view = from_dlpack(detached)
            else:
                check_tensors(kernel, position, detached)
                view = numpy_view(detached, fields.get("managed") or exporter_of_another(detached), kernel.storage)
            viewed = as_kernel_has_it(view, dtype_of(view), kernel.storage)
            return viewed if views is None else views.add(value, view, viewed)
        except NoNumbaType as error:
            why = why_not_computed(error.field, value)
        except Exception as error:
            why = framework.why_no_memory(value) or refused(kernel, position, error)
        refuse_value(kernel, position, value, why)
    elif kind.form == structs.FORM_TUPLE:
        items = [as_numba_takes_it(kernel, item_of(position, i), item, views) for i, item in enumerate(value)]
        return with_items(value, items)
    elif cls is list:  # also where native code leaves lists to Numba, because Numba's own are not laid out as expected
        return _list(kernel, position, value, views)
    elif issubclass(cls, np.ndarray):  # not isinstance(), which reads __class__
        _require_native_order(kernel, position, value)
        if is_masked_array(cls):
            try:
                numba.typeof(value)  # raises; Numba's dispatcher would take it for a plain array once it has compiled for one
            except TypingError as error:
                advice = "a masked array cannot be passed; pass its filled(), or its data and its mask"
                error.patch_message(f"{argument(kernel, position)}: {advice}. Numba says: {error}")
                raise
        try:
            viewed = as_kernel_has_it(value, dtype_of(value), kernel.storage)
        except NoNumbaType as error:
            field = error.field
        else:
            return viewed if views is None else views.add(value, value, viewed)
        refuse_value(kernel, position, value, why_not_computed(field, value))
    elif kind.form == structs.FORM_OTHER:
        check_items(kernel, position, value)
        require_numba_type(kernel, position, value)
    return value


_NUMBERS = int, float, complex, str, np.generic


def _can_be_viewed(tensor) -> bool:
    """Whether native code can read a PyTorch tensor. This takes a fraction of the time that Python's checks take."""
    try:
        from_dlpack(tensor)
    except Exception:
        return False
    return True


def _list(kernel, position: int, value: list, views: Views | None) -> list:
    """Return a list of views for a list of tensors, and any other list itself."""
    check_items(kernel, position, value)
    if not _is_tensor(value[0]):
        if type(value[0]) is list and type(value[0][0]) is not np.ndarray and _is_tensor(value[0][0]):
            raise UnknownType(f"{argument(kernel, position)}: a list of lists of tensors cannot be passed; pass a tuple of lists")
        require_numba_type(kernel, position, value)
        return value
    lists = [i for i, item in enumerate(value) if type(item) is list]
    if lists:
        raise TypeError(mixed(kernel, position, f"item 0 is a tensor, item {lists[0]} a list"))

    def viewed() -> list:
        items = [as_numba_takes_it(kernel, item_of(position, i), item, views) for i, item in enumerate(value)]
        return items if views is None else views.of_one_type(items)

    return viewed() if views is None else views.add_list(value, viewed)


def _refuse_large_ints(kernel, position, value) -> None:
    """Raise OverflowError for an int beyond 64 bits in a list or set, which Numba refuses in other words, without a place."""
    if type(value) in (list, tuple, set):
        for i, item in enumerate(value):
            _refuse_large_ints(kernel, item_of(position, i), item)
    elif type(value) is int:
        as_numba_takes_it(kernel, position, value)


def _is_tensor(value) -> bool:
    return structs.is_tensor.py_func(fields_of(type(value))["kind"])


def _require_native_order(kernel, position: int, array: np.ndarray) -> None:
    if not is_native_order(dtype_of(array)):
        advice = "pass its astype() of dtype.newbyteorder('=')"
        refuse_value(kernel, position, array, f"its dtype {dtype_of(array)!r} is not in native byte order; {advice}")


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception that Numba stores: their frames hold the call's arguments."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
