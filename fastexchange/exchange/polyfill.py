"""Exchange tables in Python: get a type's table, and give ``numpy.ndarray`` this package's table.

Source: DLPack 1.3, the Python specification of ``__dlpack_c_exchange_api__``.
"""

import gc

import numpy as np

from .._abi import ffi
from ..ground.cpython import CapsuleType
from ..ground.once import for_ever, forkable_lock, once
from ..ground.pythonapi import PyCapsule_New, PyType_Modified
from ..ground.safe_repr import shown, type_name
from ..producers import dunder, numpy_table
from .discovery import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, PATH_NDARRAY, discover, own_table

__all__ = ["exchange_api", "polyfill", "unpolyfill"]

_capsule_name = for_ever(ffi.new("char[]", CAPSULE_NAME))
_lock = forkable_lock()
_polyfilled: set[type] = set()


def _capsule_of(table):
    """Return a new capsule ``"dlpack_exchange_api"`` for a table that is never freed."""
    return PyCapsule_New(int(ffi.cast("intptr_t", table)), int(ffi.cast("intptr_t", _capsule_name)), None)


@once
def _numpy_capsule():
    table = numpy_table.exchange_table()
    return None if table is None else _capsule_of(table)


@once
def _dunder_capsule():
    return _capsule_of(dunder.exchange_table())


def exchange_api(cls: type, /):
    """Return the PyCapsule ``"dlpack_exchange_api"`` that this package uses for tensors of the type `cls`.

    The capsule holds a ``DLPackExchangeAPI *`` that is valid as long as the process runs (DLPack 1.3):

    - a type with an exchange table: its own table;
    - ``numpy.ndarray`` and its subclasses: this package's table, all functions native;
    - another type with ``__dlpack__``, also a subclass that overrides it: a table whose owning export calls ``__dlpack__``.

    Raises TypeError for an object that is no type, and for a type without any of these.

    >>> import numpy as np
    >>> type(exchange_api(np.ndarray)).__name__
    'PyCapsule'
    """
    if not isinstance(cls, type):
        raise TypeError(f"exchange_api() takes a type of tensors, not an object of type {type_name(type(cls))}")
    notes: list[str] = []
    own = own_table(cls, notes)
    if own is not None:
        return own.capsule if type(own.capsule) is CapsuleType else _capsule_of(own.table)
    found = discover(cls)
    notes += [note for note in found.notes if note not in notes]
    overrides = getattr(cls, "__dlpack__", None) is not np.ndarray.__dlpack__
    if found.path == PATH_NDARRAY and not overrides:
        capsule = _numpy_capsule()
        if capsule is not None:
            return capsule
        notes.append("NumPy's C API is not as expected")
    elif (overrides or not issubclass(cls, np.ndarray)) and callable(getattr(cls, "__dlpack__", None)):
        return _dunder_capsule()
    reasons = "; ".join(notes) or f"it has neither {EXCHANGE_ATTRIBUTE} nor __dlpack__"
    raise TypeError(f"type {type_name(cls)} has no exchange table: {reasons}")


def polyfill(cls: type, /) -> None:
    """Set the attribute ``__dlpack_c_exchange_api__`` of `cls` to this package's exchange table, for the whole process.

    `cls` must be ``numpy.ndarray``, which has no table of its own yet. Libraries that look for the attribute then read arrays
    through native functions. A second call does nothing; :func:`unpolyfill` removes the attribute. The table itself is never
    freed, so consumers may keep it. Call this before a library first reads an array: it may remember that there was no table.

    A borrowed view cannot say that it is readonly, so the table refuses borrowed views of readonly arrays (``BufferError``).
    Consumers then take an owning export, or refuse. They may ignore an export's readonly flag: apache-tvm-ffi 0.1.15 does.

    Raises TypeError for other types, ValueError for a type that has its own table.
    """
    if cls is not np.ndarray:
        raise TypeError(f"only numpy.ndarray can be given an exchange table, not {shown(cls)}")
    capsule = _numpy_capsule()
    if capsule is None:
        raise TypeError("this NumPy's C API is not as expected: numpy.ndarray cannot be given an exchange table")
    with _lock:
        if cls in _polyfilled:
            return
        namespace = _namespace(cls)
        if EXCHANGE_ATTRIBUTE in namespace:
            raise ValueError(f"{type_name(cls)} already has an exchange table of its own")
        namespace[EXCHANGE_ATTRIBUTE] = capsule
        _polyfilled.add(cls)
        PyType_Modified(cls)


def unpolyfill(cls: type, /) -> None:
    """Remove the attribute that :func:`polyfill` has set. Raises ValueError for a type that is not polyfilled."""
    with _lock:
        if not isinstance(cls, type) or cls not in _polyfilled:
            raise ValueError(f"{shown(cls)} is not polyfilled")
        _polyfilled.remove(cls)
        namespace = _namespace(cls)
        if namespace.get(EXCHANGE_ATTRIBUTE) is _numpy_capsule():  # not a table that other code has set since
            del namespace[EXCHANGE_ATTRIBUTE]
        PyType_Modified(cls)


def _namespace(cls: type) -> dict:
    """Return the dict behind ``cls.__dict__``. For a type made in C, it is the only way to set an attribute."""
    found = [thing for thing in gc.get_referents(cls.__dict__) if type(thing) is dict]
    if len(found) != 1 or found[0] != dict(cls.__dict__):
        raise TypeError(f"this interpreter does not show the attributes of {type_name(cls)}")
    return found[0]
