"""Exchange tables in Python: a type's table, and this package's table for types without one.

Source: DLPack 1.3, the Python specification of ``__dlpack_c_exchange_api__``.
"""

import gc

import numpy as np

from .._abi import ffi
from ..arguments import dunder
from ..arguments.discovery import discover
from ..arguments.exchange_tables import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, lent, own_table
from ..arguments.ndarrays import NDARRAY
from ..ground.cpython import CapsuleType
from ..ground.once import for_ever, forkable_lock, once
from ..ground.pythonapi import PyCapsule_New, PyType_Modified
from ..ground.safe_repr import is_type, shown, type_name
from ..interpreter import DISABLED
from ..producers import numpy_table

__all__ = ["exchange_api", "polyfill", "unpolyfill"]

_capsule_name = for_ever(ffi.new("char[]", CAPSULE_NAME))
_lock = forkable_lock()
_polyfilled: set[type] = set()


def _capsule_of(table):
    """Make a capsule ``"dlpack_exchange_api"`` of a table that is never freed."""
    return PyCapsule_New(int(ffi.cast("intptr_t", table)), int(ffi.cast("intptr_t", _capsule_name)), None)


def _lent(table):
    """Make a capsule of a table of this package."""
    lent.add(int(ffi.cast("intptr_t", table)))
    return _capsule_of(table)


_UNKNOWN_LAYOUT = "its arrays, or CPython's objects, are not laid out in memory as expected"


@once
def _numpy_capsule():
    table = numpy_table.exchange_table()
    return None if table is None else _lent(table)


@once
def _dunder_capsule():
    return _lent(dunder.exchange_table())


def exchange_api(cls: type, /):
    """Return the PyCapsule ``"dlpack_exchange_api"`` for tensors of the type `cls`: its own, or this package's.

    The capsule holds a ``DLPackExchangeAPI *`` that is valid as long as the process runs (DLPack 1.3): the type's own table if it
    has one; for ``numpy.ndarray`` and its subclasses this package's, with native functions only; for any other type with
    ``__dlpack__``, also for a subclass that overrides it, a table whose owning export calls that method.

    Raises TypeError if `cls` is no type, or a type without any of these.

    >>> import torch
    >>> exchange_api(torch.Tensor)  # doctest: +ELLIPSIS
    <capsule object "dlpack_exchange_api" at ...>
    """
    if not is_type(cls):
        raise TypeError(f"exchange_api() takes a type of tensors, not an object of type {type_name(type(cls))}")
    notes: list[str] = []
    own = own_table(cls, notes)
    if own is not None:
        return own.capsule if type(own.capsule) is CapsuleType else _capsule_of(own.table)
    found = discover(cls)
    notes += [note for note in found.notes[:-1] if note not in notes]  # the last is about kernels
    overrides = getattr(cls, "__dlpack__", None) is not np.ndarray.__dlpack__
    if found.kind is NDARRAY and not overrides:
        capsule = _numpy_capsule()
        if capsule is not None:
            return capsule
        notes.append(_UNKNOWN_LAYOUT)
    elif (overrides or not issubclass(cls, np.ndarray)) and callable(getattr(cls, "__dlpack__", None)):
        return _dunder_capsule()
    reasons = "; ".join(notes) or f"it has neither {EXCHANGE_ATTRIBUTE} nor __dlpack__"
    raise TypeError(f"exchange_api(): type {type_name(cls)} has no exchange table that can be used: {reasons}")


def polyfill(cls: type, /) -> None:
    """Set the attribute ``__dlpack_c_exchange_api__`` of `cls` to this package's exchange table, for the whole process.

    Use it for ``numpy.ndarray``, which has no table yet: libraries that look for the attribute then read arrays by native
    functions. Does nothing if `cls` is polyfilled already; :func:`unpolyfill` undoes it. Consumers may keep the table, which is
    never freed.

    A borrowed view has no readonly flag, so readonly arrays are refused there (``BufferError``); consumers then take an owning
    export, or refuse. Some consumers ignore the readonly flag of an export, for example apache-tvm-ffi 0.1.15. Call this before
    such a library first meets an array: it may remember that there was no table.

    Raises TypeError for types for which this package has no table, ValueError for a type with a table of its own.

    >>> import numpy as np
    >>> polyfill(np.ndarray)
    >>> hasattr(np.ndarray, "__dlpack_c_exchange_api__")
    True
    >>> unpolyfill(np.ndarray)
    """
    if DISABLED:
        return
    if cls is not np.ndarray:
        raise TypeError(f"polyfill(): only numpy.ndarray can be given an exchange table, not {shown(cls)}")
    capsule = _numpy_capsule()
    if capsule is None:
        raise TypeError(f"polyfill(): numpy.ndarray cannot be given an exchange table: {_UNKNOWN_LAYOUT}")
    with _lock:
        if cls in _polyfilled:
            return
        namespace = _namespace(cls)
        if EXCHANGE_ATTRIBUTE in namespace:
            raise ValueError(f"polyfill(): {type_name(cls)} already has an exchange table of its own")
        namespace[EXCHANGE_ATTRIBUTE] = capsule
        _polyfilled.add(cls)
        PyType_Modified(cls)


def unpolyfill(cls: type, /) -> None:
    """Undo :func:`polyfill`, whose example shows it. Raises ValueError for a type that is not polyfilled."""
    with _lock:
        if DISABLED:
            return
        if not is_type(cls) or cls not in _polyfilled:
            raise ValueError(f"unpolyfill(): {shown(cls)} is not polyfilled")
        _polyfilled.remove(cls)
        namespace = _namespace(cls)
        if namespace.get(EXCHANGE_ATTRIBUTE) is _numpy_capsule():  # otherwise another library has set it since
            del namespace[EXCHANGE_ATTRIBUTE]
        PyType_Modified(cls)


def _namespace(cls: type) -> dict:
    """The dict behind ``cls.__dict__``: the only way to set an attribute of a type made in C."""
    found = [thing for thing in gc.get_referents(cls.__dict__) if type(thing) is dict]
    if len(found) != 1 or found[0] != dict(cls.__dict__):
        raise TypeError(f"this interpreter does not show the attributes of {type_name(cls)}")
    return found[0]
