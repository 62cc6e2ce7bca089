"""The native side of the entry table: from the address of a type, a dtype or a constant to what is known of it.

``state.EntryTable`` writes the table; it starts its searches where :func:`slot_of` does.
"""

from ..ground.cpython import OB_TYPE
from ..ground.native import load, native_inline
from . import layout

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # Knuth's multiplicative hashing: 2**64 divided by the golden ratio


@native_inline
def slot_of(address, mask):
    """Where the search for `address` starts in a table of `mask` + 1 entries."""
    return ((address >> 4) * GOLDEN >> 40) & mask


@native_inline
def find(runtime, address):
    """The address of the fx_entry of the type or dtype object at `address`, 0 if there is none."""
    table = runtime.entries
    mask = layout.entry_at(table).address
    slot = slot_of(address, mask)
    while True:
        entry = table + (1 + slot) * layout.ENTRY_SIZE
        found = layout.entry_at(entry).address
        if found == address:
            return entry
        if found == 0:
            return 0
        slot = (slot + 1) & mask


@native_inline
def Py_TYPE(ob):
    """The type of `ob`, borrowed."""
    return load(ob + OB_TYPE)
