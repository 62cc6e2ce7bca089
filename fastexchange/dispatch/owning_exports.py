"""Owning exports: of which values a call needs them, and what makes one.

Exports are made in three turns:

1. BY_PYTHON: exports by code that may run Python's.
2. HOLDING: hold what owns a tensor's memory, so that no other code can free it.
3. NATIVELY: export these tensors, and check each at once. This comes last, because Python code of the other turns (also by a
   garbage collection) could change a tensor after its check.

A kind says in which turns its exports do something, and has a function of its own for them if that is more than
:func:`make_export`.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.dltensor import delete_managed
from ..ground.native import call_int, call_word, global_address, load, native, stack, store
from . import structs
from .frame import EXPORT_BYTES
from .reading import FLAG_ASKED, is_owning

TURNS = 3
BY_PYTHON, HOLDING, NATIVELY = range(TURNS)


@native
def is_exported(context, entry, flags):
    """Whether a call needs owning exports of values of a type."""
    exports = structs.kind_of(context, entry).exports
    return exports == structs.EXPORTS_ALWAYS or (exports == structs.EXPORTS_IF_OWNING and is_owning(context, flags) != 0)


@native
def has_turn(context, entry, turn):
    """Whether exports of a type's values do something in a turn."""
    return structs.kind_of(context, entry).turns >> turn & 1 != 0


@native
def begin_export(frame, ob, is_interface):
    """Add an export that is still to be made. `ob`: of which object; 0: not known yet."""
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.export_count)
    export.object, export.managed, export.storage, export.state = ob, 0, 0, structs.UNDECIDED
    export.is_given, export.is_interface = 0, types.intp(is_interface)
    frame.export_count += 1


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def take_turn(context_address, entry_address, export_address, turn, flags):
    """What an export does in one of its turns. Returns a STATUS_*."""
    entry = structs.entry_at(entry_address)
    own = structs.kind_of(structs.context_at(context_address), entry).take_turn
    if own != 0:
        return call_word(own, (context_address, entry_address, export_address, turn, flags))
    return make_export(entry, structs.export_at(export_address), flags)


@native
def make_export(entry, export, flags):
    """Make an owning export. Returns a STATUS_*."""
    out = stack(1)
    store(out, 0)
    failed = call_int(entry.interface if export.is_interface != 0 else entry.managed, (export.object, out)) != 0
    if not failed and PyErr_Occurred() == 0 and load(out) != 0:
        export.managed = load(out)
        return structs.STATUS_OK
    if not failed and load(out) != 0:
        delete_managed(load(out))
    status = structs.STATUS_ERROR if PyErr_Occurred() != 0 else structs.STATUS_NO_ERROR_SET
    if export.is_interface != 0:
        if status == structs.STATUS_NO_ERROR_SET:  # an unusual array, which Python has to read
            status = structs.STATUS_STREAM
    elif status == structs.STATUS_ERROR and flags & FLAG_ASKED == 0 and entry.is_own_memory == 0 and entry.key != 0:
        # Numba may be able to read the buffer that DLPack cannot describe.
        if c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) != 0:
            c.PyErr_Clear()
            status = structs.STATUS_CHECK
    return status
