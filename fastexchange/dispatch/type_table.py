"""The hash table from the address of a type, a dtype or a constant to its ``fx_entry``: read natively, written here.

Source of the hash: Knuth, The Art of Computer Programming, volume 3, section 6.4, multiplicative hashing.
"""

import sys
import weakref
from typing import Any, NamedTuple

from .._abi import ffi
from ..ground.native import address_of, load, native
from ..ground.once import forkable_lock

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
    mask = load(table)
    slot = slot_of(address, mask)
    while True:
        place = table + 16 * (1 + slot)
        found = load(place)
        if found == address:
            return load(place + 8)
        if found == FREE:
            return 0
        slot = (slot + 1) & mask


def _use_of(thing, fields: dict[str, Any]) -> object:
    """What the ``fx_entry`` of `thing`, with these fields, can be used for again. Cache entries refer to those of types only."""
    return tuple(sorted(fields.items())) if issubclass(type(thing), type) else "object"


class _Used(NamedTuple):
    """An ``fx_entry *``, and what it can be used for again."""

    entry: Any
    use: object


class TypeTable:
    """The native hash table from an object's address (a type, a dtype, a constant) to its ``fx_entry``.

    When an object dies, a weak reference's callback removes its entry before the address can be used again. Dtype objects
    cannot be weakly referenced: the last :data:`DTYPES_KEPT` are kept alive.

    An ``fx_entry`` is never freed, because cache entries refer to those of types. One of a type that has died is used again for a
    type that is read in the same way, any other for any other object.
    """

    DTYPES_KEPT = 1024

    def __init__(self, runtime, derived):
        """`derived`: returns further fields of an ``fx_entry`` with given fields."""
        self._runtime, self._derived = runtime, derived
        self._lock = forkable_lock()
        self._fields: dict[int, dict[str, Any]] = {}
        self._holders: dict[int, object] = {}
        self._kept: dict[int, object] = {}
        self._entries: dict[int, _Used] = {}
        self._unused: dict[Any, list[Any]] = {}
        self._slots = None
        self._rebuild(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, thing) -> bool:
        return id(thing) in self._fields

    def add(self, thing, holder=None, **fields: Any) -> None:
        """File the type or object `thing` until it dies. `holder` is kept alive until then. The field ``kind`` is a Kind."""
        address = id(thing)
        table = weakref.ref(self)

        def forget(_reference, address=address, table=table, is_finalizing=sys.is_finalizing):
            self = table()
            if self is not None and not is_finalizing():
                self.remove(address)

        every = fields | self._derived(fields)  # not under the lock, which a garbage collection may want: it loads native code
        use = _use_of(thing, every)
        with self._lock:
            if address not in self._fields:
                self._holders[address] = (weakref.ref(thing, forget), holder)
                self._insert(address, fields, every, use)

    def find_again(self, thing) -> None:
        """Insert `thing` again if it is filed but native code does not find it: Ctrl-C may have interrupted the insertion."""
        if (fields := self._fields.get(id(thing))) is None:
            return
        every = fields | self._derived(fields)
        with self._lock:
            if id(thing) in self._fields and self._slots[self._slot(self._slots, id(thing))] != id(thing):
                self._insert(id(thing), fields, every, _use_of(thing, every))

    def add_kept(self, thing, **fields: Any) -> None:
        """File a dtype object, and keep it alive until :data:`DTYPES_KEPT` others have been filed."""
        every = fields | self._derived(fields)
        with self._lock:
            if id(thing) in self._fields:
                return
            if len(self._kept) >= self.DTYPES_KEPT:
                self.remove(next(iter(self._kept)))
            self._kept[id(thing)] = thing
            self._insert(id(thing), fields, every, _use_of(thing, every))

    def update(self, thing, **fields: Any) -> None:
        """Change fields of `thing`'s entry."""
        changed = self._fields[id(thing)] | fields
        every = changed | self._derived(changed)
        with self._lock:
            self._fields[id(thing)].update(fields)
            self._fill(self._entries[id(thing)].entry, every)

    def fields(self, thing) -> dict[str, Any]:
        """The fields of `thing`'s ``fx_entry``."""
        return self._fields[id(thing)]

    def get(self, thing) -> dict[str, Any] | None:
        """The fields of `thing`'s ``fx_entry``; None if it has none."""
        return self._fields.get(id(thing))

    def remove(self, address: int) -> None:
        """Remove the entry of `address`. Weak references call this at any moment, even during a :meth:`_rebuild`."""
        with self._lock:
            if self._fields.pop(address, None) is not None:
                self._slots[self._slot(self._slots, address)] = REMOVED
            if (used := self._entries.pop(address, None)) is not None:
                used.entry.address = 0
                self._unused.setdefault(used.use, []).append(used.entry)
            holder, kept = self._holders.pop(address, None), self._kept.pop(address, None)
        del holder, kept  # outside of the lock: their destructors may run any code

    def remove_kind(self, kind) -> bool:
        """Remove all entries of a Kind. Returns whether there were any."""
        with self._lock:
            addresses = [address for address, fields in self._fields.items() if fields.get("kind") == kind]
        for address in addresses:
            self.remove(address)
        return bool(addresses)

    def _insert(self, address: int, fields: dict[str, Any], every: dict[str, Any], use: object) -> None:
        if address not in self._entries:
            unused = self._unused.get(use)
            entry = unused.pop() if unused else ffi.new("fx_entry *")
            ffi.memmove(entry, bytes(ffi.sizeof("fx_entry")), ffi.sizeof("fx_entry"))
            self._fill(entry, every)
            self._entries[address] = _Used(entry, use)
        self._entries[address].entry.address = address
        self._fields[address] = fields
        if 2 * (self._used + 1) > self._slots[0]:
            self._rebuild(max(_FIRST_CAPACITY, 4 * len(self._fields)))
        else:
            self._write(self._slots, address)
            self._used += 1

    @staticmethod
    def _fill(entry, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            setattr(entry, name, value)

    @staticmethod
    def _slot(slots, address: int) -> int:
        """The index of `address` in a table, or of the free slot for it. The first slot has the mask."""
        mask = slots[0]
        slot = slot_of.py_func(address, mask)
        while slots[2 + 2 * slot] not in (address, FREE):
            slot = (slot + 1) & mask
        return 2 + 2 * slot

    def _write(self, slots, address: int) -> None:
        slot = self._slot(slots, address)
        used = self._entries.get(address)
        if used is not None:  # a garbage collection may have removed it just now
            slots[slot + 1] = address_of(used.entry)
            slots[slot] = address  # last: native code finds only complete ones

    def _rebuild(self, capacity: int) -> None:
        """Fill a new table, publish it, then remove the objects that have died meanwhile."""
        size = 1 << (capacity - 1).bit_length()
        slots = ffi.new("int64_t[]", 2 + 2 * size)
        slots[0] = size - 1
        snapshot = tuple(self._fields)  # one step: no garbage collection between two items
        for address in snapshot:
            if address in self._entries:
                self._write(slots, address)
        replaced, self._slots, self._used = self._slots, slots, len(snapshot)
        self._runtime.entries = address_of(slots)
        for address in set(snapshot) - self._fields.keys():
            slots[self._slot(slots, address)] = REMOVED
        del replaced
