"""The hash table from the address of a type, a dtype or a constant to its ``fx_entry``: read natively, written here.

Source of the hash: Knuth, The Art of Computer Programming, volume 3, section 6.4, multiplicative hashing.
"""

import sys
import weakref

from .._abi import ffi
from ..ground.native import native
from ..ground.once import forkable_lock
from . import structs

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, as a signed word
FREE, REMOVED = 0, 1
_FIRST_CAPACITY = 256


@native
def slot_of(address, mask):
    """The first slot of the search for `address` in a table of `mask` + 1 entries, at most 2**24. Python calls it too."""
    return ((address >> 4) * GOLDEN >> 40) & mask


@native
def find(runtime, address):
    """Return the address of the ``fx_entry`` of the object at `address`; 0 if there is none."""
    table = runtime.entries
    # 1. Hash the address. 2. Probe linearly up to the entry or a free one: a REMOVED entry does not end the search.
    mask = structs.entry_at(table).address
    slot = slot_of(address, mask)
    while True:
        entry = table + (1 + slot) * structs.ENTRY_SIZE
        found = structs.entry_at(entry).address
        if found == address:
            return entry
        if found == FREE:
            return 0
        slot = (slot + 1) & mask


class TypeTable:
    """The native hash table from an object's address (a type, a dtype, a constant) to its ``fx_entry``.

    When an object dies, a weak reference's callback removes its entry before the address can be used again. Dtype objects
    cannot be weakly referenced: the last :data:`DTYPES_KEPT` are kept alive.
    """

    DTYPES_KEPT = 1024

    def __init__(self, runtime):
        self._runtime = runtime
        self._lock = forkable_lock()
        self._fields: dict[int, dict[str, int]] = {}
        self._holders: dict[int, object] = {}
        self._kept: dict[int, object] = {}
        self._expectations: dict[int, weakref.WeakSet] = {}
        self._entries = None
        self._rebuild(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, thing) -> bool:
        return id(thing) in self._fields

    def add(self, thing, holder=None, **fields: int) -> None:
        """File the type or constant `thing` until it dies. `holder` is kept alive until then."""
        address = id(thing)
        table = weakref.ref(self)

        def forget(_reference, address=address, table=table, is_finalizing=sys.is_finalizing):
            self = table()
            if self is not None and not is_finalizing():
                self.remove(address)

        with self._lock:
            if address not in self._fields:
                self._holders[address] = (weakref.ref(thing, forget), holder)
                self._insert(address, fields)

    def find_again(self, thing) -> None:
        """Insert `thing` again if it is filed but native code does not find it: Ctrl-C may have interrupted the insertion."""
        with self._lock:
            fields = self._fields.get(id(thing))
            if fields is not None and self._entries[self._slot(self._entries, id(thing))].address != id(thing):
                self._insert(id(thing), fields)

    def add_kept(self, thing, **fields: int) -> None:
        """File a dtype object, and keep it alive until :data:`DTYPES_KEPT` others have been filed."""
        with self._lock:
            if id(thing) in self._fields:
                return
            if len(self._kept) >= self.DTYPES_KEPT:
                self.remove(next(iter(self._kept)))
            self._kept[id(thing)] = thing
            self._insert(id(thing), fields)

    def update(self, thing, **fields: int) -> None:
        """Change fields of `thing`'s entry."""
        with self._lock:
            self._fields[id(thing)].update(fields)
            entry = self._entries[self._slot(self._entries, id(thing))]
            for name, value in fields.items():
                setattr(entry, name, value)

    def fields(self, thing) -> dict[str, int]:
        """The fields of `thing`'s ``fx_entry``."""
        return self._fields[id(thing)]

    def get(self, thing) -> dict[str, int] | None:
        """The fields of `thing`'s ``fx_entry``; None if it has none."""
        return self._fields.get(id(thing))

    def watch(self, thing, expected) -> None:
        """Clear the records of `expected` (``fx_expected[]``) with the type `thing` when the type dies."""
        self._expectations.setdefault(id(thing), weakref.WeakSet()).add(expected)

    def remove(self, address: int) -> None:
        """Remove the entry of `address`. Weak references call this at any moment, even during a :meth:`_rebuild`."""
        with self._lock:
            for expected in list(self._expectations.pop(address, ())):
                for record in expected:
                    if record.type == address:
                        record.type = 0
            if self._fields.pop(address, None) is not None:
                self._entries[self._slot(self._entries, address)].address = REMOVED
            holder, kept = self._holders.pop(address, None), self._kept.pop(address, None)
        del holder, kept  # outside of the lock: their destructors may run any code

    def remove_kind(self, kind: int) -> None:
        """Remove all entries of a KIND_*."""
        with self._lock:
            addresses = [address for address, fields in self._fields.items() if fields.get("kind") == kind]
        for address in addresses:
            self.remove(address)

    def _insert(self, address: int, fields: dict[str, int]) -> None:
        self._fields[address] = fields
        if 2 * (self._used + 1) > self._entries[0].address:
            self._rebuild(max(_FIRST_CAPACITY, 4 * len(self._fields)))
        else:
            self._write(self._entries, address, fields)
            self._used += 1

    @staticmethod
    def _slot(entries, address: int) -> int:
        """The index of `address` in a table, or of the free entry for it. Entry 0 has the mask."""
        mask = entries[0].address
        slot = slot_of.py_func(address, mask)
        while entries[1 + slot].address not in (address, FREE):
            slot = (slot + 1) & mask
        return 1 + slot

    def _write(self, entries, address: int, fields: dict[str, int]) -> None:
        entry = entries[self._slot(entries, address)]
        for name, value in fields.items():
            setattr(entry, name, value)
        entry.address = address  # last: native code finds only complete entries

    def _rebuild(self, capacity: int) -> None:
        """Fill a new table, publish it, then remove the entries of objects that have died meanwhile."""
        size = 1 << (capacity - 1).bit_length()
        entries = ffi.new("fx_entry[]", 1 + size)
        entries[0].address = size - 1
        snapshot = self._fields.copy()  # one step: no garbage collection between two items
        for address, fields in snapshot.items():
            self._write(entries, address, fields)
        replaced, self._entries, self._used = self._entries, entries, len(snapshot)
        self._runtime.entries = int(ffi.cast("intptr_t", entries))
        for address in snapshot.keys() - self._fields.keys():
            entries[self._slot(entries, address)].address = REMOVED
        del replaced
