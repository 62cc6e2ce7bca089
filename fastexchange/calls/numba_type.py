"""Whether Numba has a type for an argument that is no tensor, and the error if it has none."""

import functools
import inspect
import weakref

from numba.core.errors import TypingError

from ..arguments.discovery import discover, exports_itself, learn_type
from ..arguments.kind import OTHER, Kind
from ..arguments.others import advice_for
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..exchange.errors import argument, expression
from ..ground.numba_internals import type_of_argument
from ..ground.passing import reraise_passing
from ..ground.safe_repr import is_type, type_name

__all__ = ["UnknownType", "has_numba_type", "is_tensor_by_itself", "let_numba_take", "require_numba_type"]


def require_numba_type(kernel, position: int, value) -> None:
    """Raise TypeError for an object without a Numba type."""
    cls = type(value)
    is_known = id(cls) in _typed_by_numba and not is_type(value)  # Numba has types for some classes only
    if is_known or has_numba_type(value):
        if not is_known:
            forget = functools.partial(_forget_type, id(cls))
            _typed_by_numba[id(cls)] = weakref.ref(cls, forget)
        return
    if _is_method_of(kernel, value):
        raise TypeError(
            f"{argument(kernel, position)}: the kernel is a method, and {_owner(value)} cannot be passed to it; put "
            "@staticmethod above @fast_args, and give it the tensors and numbers that it needs"
        )
    if kernel._is_interpreted and (cls.__module__ != "builtins" or inspect.isfunction(value)):
        return  # under NUMBA_DISABLE_JIT jitted functions are Python functions, and jitted classes Python classes
    if advice := advice_for(value, expression(kernel, position)):
        raise UnknownType(f"{argument(kernel, position)}: an object of type {type_name(cls)} is no tensor; {advice}")
    tried = "; ".join(["__dlpack_c_exchange_api__, __dlpack__, the buffer protocol, numba.typeof", *discover(cls).notes[:-1]])
    raise UnknownType(
        f"{argument(kernel, position)}: an object of type {type_name(cls)} is no tensor that can be exchanged, and Numba "
        f"cannot determine its type (tried {tried}); pass a tensor, a scalar, or what plain @njit takes"
    )


def is_tensor_by_itself(value, kind: Kind) -> bool:
    """Whether an object, whose type is of this kind, is a tensor by methods of its own, and nothing to Numba."""
    if kind is not OTHER:
        return False
    try:
        return exports_itself(value) and not _is_typed(value)
    except Exception:  # its __getattr__ raises
        return False


def let_numba_take(value, depth: int = structs.MAX_TUPLE_DEPTH) -> None:
    """File what native code needs to leave later calls with such arguments to Numba's dispatcher directly.

    Those are objects of types for which Numba has had a type, also in tuples, or as the first item of a list.
    """
    cls = type(value)
    entries = runtime().entries
    try:
        learn_type(cls, value)
    except Exception:  # a type whose attributes raise: Python makes each call
        return
    fields = entries.fields(cls)
    if fields["kind"] is OTHER and cls is not list and not fields.get("is_typed") and _is_typed(value):
        entries.update(cls, is_typed=1)
    for item in fields["kind"].items(value) if depth > 0 else ():
        let_numba_take(item, depth - 1)


class UnknownType(TypingError, TypeError):
    """Numba has no type for an argument. Python's users expect TypeError, Numba's users TypingError."""


def _is_method_of(kernel, value) -> bool:
    """Whether the kernel is a method, possibly under another decorator, of `value` or of its class."""
    found = [vars(base).get(kernel.__name__) for base in (value if is_type(value) else type(value)).__mro__]
    found += [each.fget for each in found if isinstance(each, property)]
    found += [each.func for each in found if isinstance(each, functools.cached_property)]
    found += [each.__func__ for each in found if isinstance(each, classmethod)]
    return any(each is kernel._decorated for each in found)


def _owner(value) -> str:
    return f"its class {type_name(value)}" if is_type(value) else f"an object of its class {type_name(type(value))}"


def _forget_type(address: int, _reference) -> None:
    _typed_by_numba.pop(address, None)


_typed_by_numba: dict[int, weakref.ref] = {}
"""Types, by ``id``, for whose objects Numba has had a type. Its dispatcher refuses those for which it has none."""


def _is_typed(value) -> bool:
    try:
        return type_of_argument(value) is not None
    except Exception as error:
        reraise_passing(error)
        return False


def has_numba_type(value) -> bool:
    """Whether ``numba.typeof`` returns a type, or raises an error of its own, which the dispatcher will raise."""
    try:
        return type_of_argument(value) is not None
    except Exception as error:
        reraise_passing(error)
        return True
