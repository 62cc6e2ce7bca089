"""The description of a kind of argument, which native code, discovery, ``explain`` and Numba's dispatcher interpret.

A file of a kind has a :class:`Kind`, its native readers, and ``find(cls, notes, instance)``: how instances of a type become
arguments of this kind, a :class:`Discovery`, or None for a type of another kind. ``discovery`` has their order.

A kind of tensor needs no reader: with a native function that borrows a view, or makes an owning export, it is
:func:`tensors.borrowed` or :func:`tensors.exported`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.owning_exports import BY_PYTHON
from ..ground.cfunction import CFunction, cfunction
from ..ground.native import address_of
from ..ground.once import cached_property

__all__ = ["Discovery", "Kind", "reader"]

MEANINGS: dict[str, str] = {}
"""What ``explain`` says of each path, and of each source of views."""
_FUNCTIONS = "reader", "fill_row", "mark", "read_shape", "prepare", "take_turn", "owner", "is_odd"
_NUMBERS = "form", "exports", "turns", "makes_tensors"
PLACES = dict(ffi.typeof("fx_entry").fields)["row_readers"].type.length
"""Of row readers: see ``dispatch.inline_cache.place_of``."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of argument. Native code has an ``fx_kind`` of it."""

    path: str
    """What ``explain`` calls it; several kinds share a path."""
    meaning: str
    """What ``explain`` says of the path."""
    form: int
    """One of ``structs.FORM_*``: what such a value is to Numba's dispatcher, which makes the calls that native code does not."""
    reader: CFunction | None = None
    """Reads a value into its key and its words: see :func:`reader`. None: its items are read, or only Numba can read it."""
    row_readers: Callable[[dict[str, Any]], tuple[CFunction, ...]] = lambda fields: ()
    """From the fields of a type's ``fx_entry`` to quicker readers of its values in cached calls: see ``dispatch.rows``.

    Of one value by `rows.frequent`, and in terms of ``is_of_type``, ``leave`` and ``go_on`` there. Of arrays :data:`PLACES`: of
    any rank, of rank 1 to 4 in C order, and five for other orders; if they are fewer, the same again. None is needed:
    ``rows.read_value`` calls `reader`.
    """
    fill_row: CFunction | None = None
    """``int (fx_context *, fx_row *, PyObject *)``: completes the row of a value: see ``dispatch.inline_cache.expect_value``."""
    mark: CFunction | None = None
    """``word (fx_entry *, PyObject *)``: what tells values of one type apart: see ``dispatch.inline_cache.site_of``."""
    read_shape: CFunction | None = None
    """``word (fx_context *, fx_entry *, PyObject *, shape, room)``: reads a tensor's shape: see ``allocation.read_shape``."""
    exports: int = -1
    """One of ``structs.EXPORTS_*``: whether a call needs an owning export of a value. It has to be said of tensors.

    An owning export also keeps the memory of an array that the kernel keeps, and is what Numba's dispatcher gets a view of. So
    the entries of all types of tensors have the field ``managed``.
    """
    turns: int = 1 << BY_PYTHON
    """The turns in which exports do something, as bits: see ``dispatch.owning_exports``."""
    take_turn: CFunction | None = None
    """``STATUS_* (fx_context *, fx_entry *, fx_export *, turn, flags)``: that, if it is more than ``make_export``."""
    prepare: CFunction | None = None
    """``STATUS_* (fx_context *, fx_entry *, PyObject *)``: does what may run Python code, so that `reader` can read a value.

    It is called after `reader` has returned ``-STATUS_EXPORT`` for one of the call's values, before any view is borrowed, and
    once in a call: then there is ``FLAG_PREPARED``. For an export that the call holds there is `take_turn`.
    """
    owner: CFunction | None = None
    """``PyObject * (fx_entry *, PyObject *)``: a new reference to what owns its memory; 0 if that is the tensor."""
    is_odd: CFunction | None = None
    """``bool (fx_entry *, PyObject *, DLTensor *)``: whether a tensor's memory is not its value, or its framework has to see what
    is done with it; with a DLTensor also whether the memory that this shows is no longer the tensor's. Calls no Python code.
    """
    makes_tensors: bool = False
    """Whether native code makes tensors by ``to_object`` of its entries: that takes an export only if it succeeds."""
    for_numba: Callable[[Any], Any] | None = None
    """From a value to what Numba's dispatcher gets. None: what the form says. Raises an exception with the reason of a refusal.

    A value for which Numba has no type, and of which a kernel gets a number, has ``FORM_OTHER`` and this. Where native code makes
    no calls, this is all that is used of a kind.
    """
    schema_type: str = ""
    """Its type in an operator's schema, one of ``structs.SCHEMA_TYPES``; "": PyTorch converts it first, or refuses it."""
    is_read_on_device: bool = False
    """Whether native code reads it for kernels on a device, too; if not, their own package does. A type may have another kind."""
    items: Callable[[Any], Iterable] = lambda value: ()
    """From a value to those of its items that have kinds of their own; of a list only the first."""
    learn: Callable[[Any], bool] | None = None
    """Files what native code needs to read a value besides its type. Returns whether that was unknown."""
    compare: Callable[[Any], None] | None = None
    """Compares what native code reads with what the framework tells, before code for such a value is called."""

    def __post_init__(self):
        assert self.form != structs.FORM_TENSOR or self.exports >= 0, "say whether a call needs an owning export"
        object.__setattr__(self, "exports", max(self.exports, structs.EXPORTS_NEVER))
        MEANINGS[self.path] = self.meaning

    @cached_property  # one for all threads: entries have its address
    def native(self):
        """The ``fx_kind``. Loads the native functions."""
        functions = {name: getattr(self, name) for name in _FUNCTIONS}
        addresses = {name: function.address for name, function in functions.items() if function is not None}
        schema_type = 1 << structs.SCHEMA_TYPES.index(self.schema_type) if self.schema_type else 0
        return ffi.new("fx_kind *", {name: getattr(self, name) for name in _NUMBERS} | {"schema_type": schema_type} | addresses)

    def native_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of an ``fx_entry`` that follow from the kind and the other `fields`."""
        is_exported = fields.get("managed") or fields.get("shown")
        assert self.form != structs.FORM_TENSOR or is_exported, f"{self.path}: without `managed` no array can be kept"
        readers = tuple(function.address for function in self.row_readers(fields)) or (0,)
        on_device = fields.get("device_kind") or (self if self.is_read_on_device else OTHER)
        return {
            "kind": address_of(self.native), "device_kind": address_of(on_device.native),
            "row_readers": readers * (PLACES // len(readers)),
        }  # fmt: skip


@dataclass
class Discovery:
    """How instances of a type become kernel arguments."""

    kind: Kind
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the type's ``fx_entry``."""
    notes: list[str] = field(default_factory=list)
    """Why there is no faster path."""
    holder: object = None
    """The capsule, which has to live as long as the type."""
    source: str = ""
    """What gives the views if there are several ways: a key of :data:`MEANINGS`."""

    @property
    def path(self) -> str:
        """What ``explain`` calls the way into a kernel."""
        return self.kind.path


def reader(function) -> CFunction:
    """Decorator: the native function that reads a value of a kind.

    It gets the object, the ``fx_entry`` of its type, the call's frame, the address of its first word, and its ``fx_array``. It
    writes the words, and returns the key, or ``-STATUS_*``: that of an array begins with ``KEY_ARRAY``, whatever its framework.
    The general path files the key (``dispatch.read_arguments``); a cached call compares it with that of its row
    (``dispatch.rows``).

    ``-STATUS_NUMBA``: Numba's dispatcher makes the call. ``-STATUS_ERROR``: an exception is set. The layout that is read has been
    verified: by ``find``, or in ``cpython.verify``.

    More than two words, as those of an array, need room: ``reading.has_no_room``, then ``-STATUS_GROW``. An array's memory has an
    owner: ``reading.note_array``, with one of ``ORIGIN_*``. ``pack.keep_tensor`` keeps the tensor that a refusal is about.
    """
    return cfunction(types.intp, *[types.intp] * 5)(function)


OTHER = Kind("numba", "Numba's own dispatcher makes the call", structs.FORM_OTHER)
"""Values that only Numba's dispatcher can read, or refuse; on a device the kernel's own package."""
