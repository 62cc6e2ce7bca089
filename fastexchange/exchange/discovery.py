"""Discovery: the path of a type's instances into kernels. It is found once per type and filed in the type table.

A :class:`Discovery` has the path, one of the ``PATH_*`` names, the functions of the type's exchange table, and why there is no
faster path. A new producer needs a file in ``producers/`` and a line in :data:`_RULES`.
"""

import ctypes
import itertools
import sys
from dataclasses import dataclass, field

import numpy as np
from numba.core.dispatcher import Dispatcher

from .._abi import ffi
from ..dispatch import strings, structs
from ..dispatch.lists import release_items
from ..dispatch.runtime import runtime
from ..ground.cpython import NUMPY_SCALAR_VALUE
from ..ground.dtypes import PLAIN_DTYPES, dtype_field, field_itemsize
from ..ground.half.formats import FORMATS
from ..ground.numba_internals import is_typed_by_extension
from ..ground.omitted import Omitted
from ..producers import buffer, dunder, forwarded, paddle, torch, torch_modes, torch_offsets
from ..producers.ndarray import dtype_of
from . import torch_capsule
from .tables import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper, is_wrapper_type, own_table

__all__ = ["Discovery", "discover", "learn"]

PATH_EXCHANGE = "c-exchange"
PATH_NDARRAY = "ndarray"
PATH_BUFFER = "buffer"
PATH_DUNDER = "dunder"
PATH_SCALAR = "scalar"
PATH_TUPLE = "tuple"
PATH_LIST = "list"
PATH_NUMBA = "numba"


@dataclass
class Discovery:
    """How instances of a type become kernel arguments."""

    path: str
    """One of the ``PATH_*`` names."""
    entry: dict[str, int]
    """The fields of the type's ``fx_entry``."""
    notes: list[str] = field(default_factory=list)
    """Why there is no faster path."""
    holder: object = None
    """The capsule, which has to live as long as the type."""
    source: str = ""
    """What gives the views if there are several ways: a key of ``torch_offsets.SOURCES``."""


_serial = itertools.count(1)


# ---- exchange tables -----------------------------------------------------------------------------------------------


def _forwarded(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Rule for a wrapper around a tensor whose type has an exchange table."""
    if not is_wrapper_type(cls) and (instance is None or not is_wrapper(instance)):
        return None
    notes.append(
        f"its {EXCHANGE_ATTRIBUTE} is no PyCapsule named {CAPSULE_NAME.decode()!r} but another object: each call exports that "
        "object, or calls __dlpack__ if that object has no exchange table"
    )
    managed = forwarded.managed_tensor_from_py_object_no_sync.address
    return Discovery(PATH_EXCHANGE, {"kind": structs.KIND_MANAGED, "managed": managed, "asks_python": 1}, notes)


def _exchange(cls: type, notes: list[str]) -> Discovery | None:
    """Rule for a type with an exchange table, own or inherited."""
    found = own_table(cls, notes)
    if found is None:
        return None
    capsule, table = found
    view = int(ffi.cast("intptr_t", table.dltensor_from_py_object_no_sync))
    managed = int(ffi.cast("intptr_t", table.managed_tensor_from_py_object_no_sync))
    if paddle.is_tensor_type(cls):
        view = view and paddle.dltensor_from_py_object_no_sync.address
        managed = paddle.managed_tensor_from_py_object_no_sync.address
    if not view:
        notes.append("its exchange table has no dltensor_from_py_object_no_sync: each call takes an owning export")
    elif hasattr(cls, "readonly"):  # the name of it in Python's buffers, too
        notes.append("it may be readonly, which a borrowed view cannot say: each call takes an owning export")
        view = 0
    source = ""
    if view and torch.is_tensor_type(cls):
        source = _source_of_views(notes)
    made = int(ffi.cast("intptr_t", table.managed_tensor_to_py_object_no_sync))
    guard = _guard(cls, notes)
    is_asked = guard and ffi.cast("fx_guard *", guard).asks  # asking may run Python code: it comes before any view is borrowed
    kind = structs.KIND_EXCHANGE if view and not is_asked else structs.KIND_MANAGED
    fields = {
        "kind": kind, "borrow": view, "managed": managed, "guard": guard, "is_own_memory": int(bool(view)),
        "to_object": made, "takes_all": not (torch.is_tensor_type(cls) or paddle.is_tensor_type(cls)),
        "allocator": int(ffi.cast("intptr_t", table.managed_tensor_allocator)),
        "stream": int(ffi.cast("intptr_t", table.current_work_stream)),
    }  # fmt: skip
    return Discovery(PATH_EXCHANGE, fields, notes, capsule, source)


def _source_of_views(notes: list[str], has_table: bool = True) -> str:
    """The source of most views of PyTorch's tensors, one of ``torch_offsets.SOURCES``; "" if each is exported."""
    torch_modes.expect_modes()
    guard = torch_offsets.guard()
    if not guard.knows_all:
        return ""
    if guard.knows_views:
        return "memory"
    notes.append(f"it is not read in memory: {guard.why_no_views}")
    return "table" if has_table else ""


def _guard(cls: type, notes: list[str]) -> int:
    """The address of the ``fx_guard`` for tensors of this type; 0 if the framework's exports need no guard."""
    if not torch.is_tensor_type(cls):
        return 0
    torch_modes.expect_modes()
    guard = torch_offsets.guard()
    if not guard.knows_all:
        notes.append("this PyTorch's tensors do not have the expected layout: PyTorch is asked about each, and each is exported")
    elif not guard.can_ask:
        who = "Numba's own dispatcher makes the calls of kernels without the GIL"
        notes.append(f"no C function tells native code of PyTorch's storages, so {who}: {guard.why['queries']}")
    return guard.address_for(cls)


def _dunder(cls: type, notes: list[str]) -> Discovery | None:
    """A type with ``__dlpack__`` and ``__dlpack_device__``."""
    if not hasattr(cls, "__dlpack__"):
        return None
    if not hasattr(cls, "__dlpack_device__"):
        notes.append("it has __dlpack__ but no __dlpack_device__")
        return None
    if torch.is_tensor_type(cls) and torch_capsule.is_usable(cls):
        notes.append(f"it has no usable {EXCHANGE_ATTRIBUTE}: an owning export is a capsule of torch.utils.dlpack.to_dlpack")
        source = _source_of_views(notes, has_table=False)
        kind = structs.KIND_EXCHANGE if source else structs.KIND_MANAGED  # what is not read in memory is for Numba's dispatcher
        managed = torch_capsule.managed_tensor_from_py_object_no_sync.address
        fields = {"kind": kind, "managed": managed, "guard": _guard(cls, notes), "is_own_memory": 1, "asks_python": 1}
        return Discovery(PATH_EXCHANGE if source else PATH_DUNDER, fields, notes, source=source)
    if not notes:
        notes.append(f"it has no {EXCHANGE_ATTRIBUTE}: each call calls its __dlpack__")
    # PyTorch's __dlpack__ refuses tensors that require grad. The guard refuses them instead, only in grad mode.
    producer = forwarded if torch.is_tensor_type(cls) else dunder
    managed = producer.managed_tensor_from_py_object_no_sync.address
    fields = {"kind": structs.KIND_MANAGED, "managed": managed, "guard": _guard(cls, notes), "asks_python": 1}
    return Discovery(PATH_DUNDER, fields, notes)


# ---- NumPy, scalars, tuples ----------------------------------------------------------------------------------------


def _typed(cls: type, notes: list[str]) -> Discovery | None:
    """Types with a Numba type by an extension of Numba: kernels read them as that type, as ``@njit`` does."""
    if not is_typed_by_extension(cls):
        return None
    notes.append("an extension of Numba gives it a type of its own")
    return Discovery(PATH_NUMBA, {"kind": structs.KIND_NUMBA}, notes)


def is_masked_array(cls: type) -> bool:
    """Whether this is ``numpy.ma.MaskedArray`` or derived from it. Does not import ``numpy.ma``, which takes time."""
    ma = sys.modules.get("numpy.ma")
    return issubclass(cls, getattr(ma, "MaskedArray", ()))


def _ndarray(cls: type, notes: list[str]) -> Discovery | None:
    """``numpy.ndarray`` and its subclasses, which Numba treats as ndarrays."""
    if not issubclass(cls, np.ndarray):
        return None
    if is_masked_array(cls) or hasattr(cls, "__numba_array_subtype_dispatch__"):
        notes.append("Numba has rules of its own for this subclass of ndarray")
        return Discovery(PATH_NUMBA, {"kind": structs.KIND_NUMBA}, notes)
    if "ndarray" in runtime().unverified:
        notes.append("this NumPy's array struct is not as declared: each call calls __dlpack__")
        return None
    return Discovery(PATH_NDARRAY, {"kind": structs.KIND_NDARRAY}, notes)


_PYTHON_SCALARS = (
    (float, structs.KIND_FLOAT),
    (int, structs.KIND_INT),
    (bool, structs.KIND_BOOL),
    (complex, structs.KIND_COMPLEX),
    (str, structs.KIND_STRING),
    (type(None), structs.KIND_NONE),
    (Omitted, structs.KIND_OMITTED),
)
_NUMPY_SCALARS = {id(np.dtype(code).type): np.dtype(code) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
"""NumPy's scalar types by ``id``, because hashing an unknown type may raise."""


def _dtype_of_scalar(cls: type) -> np.dtype | None:
    """The dtype of a scalar type of NumPy or ml_dtypes with which kernels compute, or None."""
    known = _NUMPY_SCALARS.get(id(cls))
    ml_dtypes = sys.modules.get("ml_dtypes")
    if known is None and any(getattr(ml_dtypes, form.name, None) is cls for form in FORMATS):
        return np.dtype(cls)
    return known


def _scalar(cls: type, notes: list[str]) -> Discovery | None:
    """Scalar types of Python, NumPy and ml_dtypes, but not their subclasses, whose value may mean something else."""
    kind = next((kind for known, kind in _PYTHON_SCALARS if cls is known), None)
    dtype = _dtype_of_scalar(cls)
    element = dtype_field(dtype) if dtype is not None and dtype.itemsize <= 16 else None
    if (
        (kind is not None and cls.__name__ in runtime().unverified)
        or (cls is str and not strings.verify())
        or (dtype is not None and element is not None and not _scalar_reads_as_declared(dtype))
    ):
        notes.append(f"the layout of {cls.__name__} is not as expected")
        return None
    if kind is not None:
        return Discovery(PATH_SCALAR, {"kind": kind})
    if dtype is None or element is None:
        return None
    kind = structs.KIND_NUMPY_SCALAR
    if dtype.kind == "c":
        kind = structs.KIND_NUMPY_COMPLEX64 if dtype.itemsize == 8 else structs.KIND_NUMPY_COMPLEX128
    return Discovery(PATH_SCALAR, {"kind": kind, "key": structs.KIND_SCALAR | element << structs.DTYPE_SHIFT})


def _scalar_reads_as_declared(dtype: np.dtype) -> bool:
    """Whether a NumPy scalar's value follows the object's head. Tests a scalar whose bytes all differ."""
    expected = bytes([1]) if dtype.kind == "b" else bytes(range(1, dtype.itemsize + 1))
    if dtype.type.__basicsize__ < NUMPY_SCALAR_VALUE + max(8, dtype.itemsize):
        return False
    value = np.frombuffer(expected, dtype)[0]
    return ctypes.string_at(id(value) + NUMPY_SCALAR_VALUE, dtype.itemsize) == expected


def _tuple(cls: type, notes: list[str]) -> Discovery | None:
    """Tuples and named tuples, whose items are read one by one."""
    if not issubclass(cls, tuple) or (cls is not tuple and not hasattr(cls, "_asdict")):
        return None
    if cls is tuple:
        return Discovery(PATH_TUPLE, {"kind": structs.KIND_TUPLE})
    serial = next(_serial)
    runtime().name(serial, cls)
    return Discovery(
        PATH_TUPLE, {"kind": structs.KIND_NAMED_TUPLE, "key": structs.KIND_NAMED_TUPLE | serial << structs.SERIAL_SHIFT}
    )


def _list(cls: type, notes: list[str]) -> Discovery | None:
    """Lists, but not subclasses. Native code reads lists of tensors, Numba all others in each call."""
    if cls is not list:
        return None
    if "list" in runtime().unverified:
        notes.append("the layout of Numba's lists is not as expected")
        return None
    if runtime().is_native:
        runtime().add(release_items)
    return Discovery(PATH_LIST, {"kind": structs.KIND_LIST})


def _constant(cls: type, notes: list[str]) -> Discovery | None:
    """Jitted functions, each of which has a Numba type of its own."""
    if not any(base is Dispatcher for base in cls.__mro__):
        return None
    return Discovery(PATH_SCALAR, {"kind": structs.KIND_CONSTANT})


def _buffer(cls: type, notes: list[str]) -> Discovery | None:
    """A type with the buffer protocol and no faster path."""
    if not buffer.is_buffer_type(cls):
        return None
    if not buffer.prepare():
        notes.append("the layout of Py_buffer is not as expected")
        return None
    managed = buffer.managed_tensor_from_py_object_no_sync.address
    notes.append("it has the buffer protocol only: each call takes its buffer")
    key = buffer.numba_class(cls) << structs.CLASS_SHIFT
    fields = {"kind": structs.KIND_MANAGED, "managed": managed, "key": key, "memory": buffer.memory_of(cls)}
    return Discovery(PATH_BUFFER, fields, notes)


def _numba(cls: type, notes: list[str]) -> Discovery:
    """Any other type: Numba's own dispatcher takes or refuses it."""
    notes.append("it is no tensor, scalar or tuple: Numba's own dispatcher unboxes it, and with it the whole call")
    return Discovery(PATH_NUMBA, {"kind": structs.KIND_NUMBA}, notes)


_RULES = (_scalar, _typed, _ndarray, _tuple, _list, _constant, _exchange, _forwarded, _dunder, _buffer, _numba)


def discover(cls: type, instance=None) -> Discovery:
    """Find the path of instances of `cls`, of which `instance` is one. Files nothing."""
    notes: list[str] = []
    for rule in _RULES:
        found = rule(cls, notes) if rule is not _forwarded else _forwarded(cls, notes, instance)
        if found is not None:
            return found
    raise AssertionError("the last rule takes everything")


def exports_itself(value) -> bool:
    """Whether an object has ``__dlpack__`` and ``__dlpack_device__`` that its class has not. Runs its ``__getattr__``.

    The class is filed as it is: other objects of it may have none, so Python asks each.
    """
    if issubclass(type(value), type) or hasattr(type(value), "__dlpack__"):  # a class has them for its objects
        return False
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def fields_of(cls: type) -> dict[str, int]:
    """The fields of the ``fx_entry`` of `cls`. Files a new type only where native code makes no calls: otherwise a call does."""
    entries = runtime().entries
    if cls not in entries and not runtime().is_native:
        learn_type(cls)
    return entries.get(cls) or discover(cls).entry


# ---- filing --------------------------------------------------------------------------------------------------------


def learn_type(cls: type, instance=None) -> bool:
    """Discover `cls` by an `instance` of it, and file the result. Returns whether the type was unknown."""
    entries = runtime().entries
    if cls in entries:
        entries.find_again(cls)
        return False
    found = discover(cls, instance)
    entries.add(cls, found.holder, **found.entry)
    return True


def learn(value) -> bool:
    """File everything that native code needs to read `value`: its type, items, dtype. Returns whether anything was unknown."""
    entries = runtime().entries
    cls = type(value)
    news = learn_type(cls, value)
    if entries.fields(cls)["kind"] in structs.TUPLE_KINDS:
        return sum(learn(item) for item in value) > 0 or news  # not any(), which would stop at the first
    if entries.fields(cls)["kind"] == structs.KIND_LIST:
        return sum(learn(item) for item in value[:1]) > 0 or news  # further items when native code meets them
    if issubclass(cls, np.ndarray):
        return _learn_dtype(dtype_of(value)) or news
    if entries.fields(cls)["kind"] == structs.KIND_CONSTANT:
        return _learn_constant(value) or news
    return news


def compare_memory(value) -> None:
    """Compare how native code reads a tensor of PyTorch in memory with what PyTorch tells, before code for its like is called.

    Once they differ, no tensor is read in memory, and the types are learnt anew. Tensors on a GPU are read there once one of them
    has been as PyTorch tells.
    """
    if torch.is_tensor_type(type(value)) and torch_offsets.guard().is_wrong_about(value):
        torch_offsets.guard().distrust()
        runtime().entries.remove_kind(structs.KIND_EXCHANGE)


def _learn_dtype(dtype: np.dtype) -> bool:
    entries = runtime().entries
    if dtype in _plain_dtypes:
        return False
    if dtype in entries:
        entries.find_again(dtype)
        return False
    element = dtype_field(dtype)
    if element is None:
        entries.add_kept(dtype, kind=structs.KIND_NUMBA)
    else:
        entries.add_kept(dtype, kind=structs.KIND_DTYPE, key=element, size=field_itemsize(element))
    return True


_plain_dtypes = frozenset(PLAIN_DTYPES)


def _learn_constant(value) -> bool:
    from numba import typeof

    entries = runtime().entries
    if value in entries:
        entries.find_again(value)
        return False
    serial = next(_serial)
    runtime().name(serial, value, typeof(value))
    entries.add(value, kind=structs.KIND_CONSTANT, key=structs.KIND_CONSTANT | serial << structs.SERIAL_SHIFT)
    return True
