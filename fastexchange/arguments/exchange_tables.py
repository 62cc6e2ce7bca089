"""The exchange table of a type, in the attribute ``__dlpack_c_exchange_api__``; wrappers have the wrapped tensor there.

Source: DLPack 1.3, ``DLPackExchangeAPI`` and the Python specification of ``__dlpack_c_exchange_api__``.
"""

from typing import Any, NamedTuple

from .._abi import ffi
from ..ground.cpython import CapsuleType
from ..ground.dlpack import VERSION
from ..ground.pythonapi import PyCapsule_GetPointer, PyCapsule_IsValid
from ..ground.safe_repr import shown
from ..producers.framework import framework_of_type
from . import paddle

__all__ = ["CAPSULE_NAME", "EXCHANGE_ATTRIBUTE", "OwnTable", "is_wrapper", "is_wrapper_type", "lent", "own_table"]

EXCHANGE_ATTRIBUTE = "__dlpack_c_exchange_api__"
OLDER_ATTRIBUTE = "__c_dlpack_exchange_api__"
"""The attribute's name before DLPack 1.3. Its value could also be the table's address, an int."""
CAPSULE_NAME = b"dlpack_exchange_api"
MAJOR = VERSION[0]
MAX_TABLES = 64  # in a chain of tables of older versions
_REQUIRED = (
    "managed_tensor_allocator",
    "managed_tensor_from_py_object_no_sync",
    "managed_tensor_to_py_object_no_sync",
    "current_work_stream",
)


def _table_in(capsule, notes: list[str], attribute: str = EXCHANGE_ATTRIBUTE):
    """Return the ``DLPackExchangeAPI *`` of our major version in `capsule`. If there is none, return None and add a note."""
    if attribute == OLDER_ATTRIBUTE and type(capsule) is int and capsule > 0:
        header = ffi.cast("DLPackExchangeAPIHeader *", capsule)
    elif type(capsule) is CapsuleType and PyCapsule_IsValid(capsule, CAPSULE_NAME):
        header = ffi.cast("DLPackExchangeAPIHeader *", PyCapsule_GetPointer(capsule, CAPSULE_NAME))
    else:
        kind = "a PyCapsule of another name" if type(capsule) is CapsuleType else shown(capsule)
        notes.append(f"its {attribute} is {kind}, not a PyCapsule named {CAPSULE_NAME.decode()!r}")
        return None
    newest = f"{header.version.major}.{header.version.minor}"
    for _ in range(MAX_TABLES):
        if header.version.major == MAJOR:
            table = ffi.cast("DLPackExchangeAPI *", header)
            missing = [name for name in _REQUIRED if getattr(table, name) == ffi.NULL]
            if not missing:
                return table
            notes.append(f"its exchange table lacks {', '.join(missing)}")
            return None
        if header.prev_api == ffi.NULL:
            break
        header = header.prev_api
    notes.append(f"its exchange table is of DLPack version {newest}, and no older one (prev_api) is of major version {MAJOR}")
    return None


def _defining_class(cls: type, name: str) -> int | None:
    """Return the index in the MRO of the class that defines `name`; None if no class does."""
    for index, base in enumerate(cls.__mro__):
        if name in vars(base):
            return index
    return None


def is_wrapper_type(cls: type) -> bool:
    """Whether instances of `cls` wrap a tensor: the attribute in which a type has its table names the wrapped tensor."""
    found = getattr(cls, EXCHANGE_ATTRIBUTE, None)
    return type(found) is not CapsuleType and hasattr(type(found), "__get__")


def is_wrapper(thing) -> bool:
    """Whether `thing` wraps a tensor: the attribute in which a type has its table names the wrapped tensor."""
    if is_wrapper_type(type(thing)):
        return True
    if getattr(type(thing), EXCHANGE_ATTRIBUTE, None) is not None:
        return False
    try:
        found = getattr(thing, EXCHANGE_ATTRIBUTE, None)  # an attribute of the instance, or by __getattr__
    except Exception:
        return False
    return found is not None and type(found) is not CapsuleType


lent: set[int] = set()
"""The addresses of this package's tables that programs have got. A type that has one of these counts as one without a table."""


class OwnTable(NamedTuple):
    """A type's own exchange table and its capsule."""

    capsule: Any
    table: Any
    """``DLPackExchangeAPI *``"""


def own_table(cls: type, notes: list[str]) -> OwnTable | None:
    """The exchange table of `cls`, its own or inherited. None: it has none, or an unusable one, which adds a note."""
    capsule = getattr(cls, EXCHANGE_ATTRIBUTE, None)
    attribute = EXCHANGE_ATTRIBUTE
    if capsule is None:
        capsule = getattr(cls, OLDER_ATTRIBUTE, None)
        attribute = OLDER_ATTRIBUTE
    if capsule is None or is_wrapper_type(cls):
        return None
    if why := framework_of_type(cls).why_no_table(cls):
        notes.append(why)
        return None
    capsule_at, dunder_at = _defining_class(cls, attribute), _defining_class(cls, "__dlpack__")
    if capsule_at is not None and dunder_at is not None and dunder_at < capsule_at:
        notes.append(f"{cls.__mro__[dunder_at].__qualname__} overrides __dlpack__ but inherits its exchange table")
        return None
    table = _table_in(capsule, notes, attribute)
    if table is not None and int(ffi.cast("intptr_t", table)) in lent:
        notes.append("its exchange table is this package's, as given out by exchange_api()")
        return None
    if table is not None and paddle.is_tensor_type(cls) and not paddle.stands_before(table):
        notes.append("its exchange table does not check tensors, and this package cannot check them: each call calls __dlpack__")
        return None
    return None if table is None else OwnTable(capsule, table)
