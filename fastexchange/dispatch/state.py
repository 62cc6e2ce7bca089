"""The one ``fx_runtime`` of a process: the table of known types, and what has to hold before native code may run."""

import sys
import weakref
from collections.abc import Callable

from numba import types

from .._abi import ffi
from ..ground import cpython, numba_internals
from ..ground.cfunction import cfunction, code_cache
from ..ground.dtypes import plain_fields_by_type_number
from ..ground.numba_internals import DispatcherBase
from ..ground.once import forkable_lock, once
from ..producers import ndarray
from . import frame, launch, lists, outputs, results, shim
from .self_test import calls_as_numba

FREE, REMOVED = 0, 1
_FIRST_CAPACITY = 256
_GOLDEN = 0x9E3779B97F4A7C15


class EntryTable:
    """The native table from an object's address (a type, a dtype, a constant) to what is known of it.

    Entries of objects that can die are removed by a weak reference's callback, before their address can be used again.
    Dtype objects cannot be weakly referenced: the last :data:`DTYPES_KEPT` are kept alive.
    """

    DTYPES_KEPT = 1024

    def __init__(self, runtime):
        self._runtime = runtime
        self._lock = forkable_lock()
        self._fields: dict[int, dict[str, int]] = {}
        self._holders: dict[int, object] = {}
        self._kept: dict[int, object] = {}
        self._plans: dict[int, weakref.WeakSet] = {}
        self._entries = None
        self._rebuild(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, thing) -> bool:
        return id(thing) in self._fields

    def add(self, thing, holder=None, **fields: int) -> None:
        """File the type or constant `thing`, until it dies. `holder` is kept alive as long."""
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
        """Native code did not find `thing`, which has been filed: another thread was about to show it, or Ctrl-C came."""
        with self._lock:
            fields = self._fields.get(id(thing))
            if fields is not None and self._entries[self._slot(self._entries, id(thing))].address != id(thing):
                self._insert(id(thing), fields)

    def add_kept(self, thing, **fields: int) -> None:
        """File a dtype object, kept alive until many others have been filed."""
        with self._lock:
            if id(thing) in self._fields:
                return
            if len(self._kept) >= self.DTYPES_KEPT:
                self.remove(next(iter(self._kept)))
            self._kept[id(thing)] = thing
            self._insert(id(thing), fields)

    def update(self, thing, **fields: int) -> None:
        """Add to what has been filed for `thing`."""
        with self._lock:
            self._fields[id(thing)].update(fields)
            entry = self._entries[self._slot(self._entries, id(thing))]
            for name, value in fields.items():
                setattr(entry, name, value)

    def fields(self, thing) -> dict[str, int]:
        """What has been filed for `thing`, the fields of its ``fx_entry``."""
        return self._fields[id(thing)]

    def get(self, thing) -> dict[str, int] | None:
        """What has been filed for `thing`, None if nothing was."""
        return self._fields.get(id(thing))

    def watch(self, thing, plan) -> None:
        """Clear the records of `plan` (``fx_plan[]``) that name the type `thing`, when that type dies."""
        self._plans.setdefault(id(thing), weakref.WeakSet()).add(plan)

    def remove(self, address: int) -> None:
        """Forget what lies at `address`. Called by weak references too, so at any moment: also amid a :meth:`_rebuild`."""
        with self._lock:
            for plan in list(self._plans.pop(address, ())):
                for record in plan:
                    if record.type == address:
                        record.type = 0
            if self._fields.pop(address, None) is not None:
                self._entries[self._slot(self._entries, address)].address = REMOVED
            holder, kept = self._holders.pop(address, None), self._kept.pop(address, None)
        del holder, kept  # outside of the lock: they may set anything free

    def remove_kind(self, kind: int) -> None:
        """Forget all things of a KIND_*."""
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
        """The index of `address` in a table, or of the free entry where it belongs. Entry 0 holds the mask."""
        mask = entries[0].address
        slot = ((address >> 4) * _GOLDEN & (1 << 64) - 1) >> 40 & mask
        while entries[1 + slot].address not in (address, FREE):
            slot = (slot + 1) & mask
        return 1 + slot

    def _write(self, entries, address: int, fields: dict[str, int]) -> None:
        entry = entries[self._slot(entries, address)]
        for name, value in fields.items():
            setattr(entry, name, value)
        entry.address = address  # last: the entry is complete when it can be found

    def _rebuild(self, capacity: int) -> None:
        """Fill a new table, then publish it. What dies meanwhile is removed from the old one, and from the new one at the end."""
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


@cfunction(types.intp)
def new_meminfo():
    """A new NRT memory block: its address."""
    return frame.NRT_MemInfo_alloc(0)


@cfunction(types.void, types.intp)
def release_meminfo(address):
    """Drop one reference of an NRT memory block."""
    frame.NRT_MemInfo_release(address)


def _verify_meminfo() -> bool:
    """Whether Numba's memory block begins with reference count, destructor, destructor's argument, as the shim assumes."""
    calls = []

    @ffi.callback("void(void *, size_t, void *)")
    def dtor(data, size, info):
        calls.append(int(ffi.cast("intptr_t", info)))

    address = int(ffi.cast("intptr_t", dtor))
    make = ffi.cast("intptr_t (*)()", new_meminfo.address)
    drop = ffi.cast("void (*)(intptr_t)", release_meminfo.address)
    block = make()
    words = ffi.cast("intptr_t *", block)
    if words[0] != 1 or words[1] != 0 or words[2] != 0:
        return False
    words[1], words[2] = address, 4711
    drop(block)
    return calls == [4711]


class Runtime:
    """What all kernels of a process share.

    ``unverified`` names the layouts that are not as native code assumes; with ``is_native`` False kernels leave all calls
    to Numba's dispatcher. ``numba_failures``: what of Numba is not as expected, and how it is.
    """

    def __init__(self):

        self.native = ffi.new("fx_runtime *")
        for number, field in enumerate(plain_fields_by_type_number()):
            self.native.dtype_fields[number] = field
        self.entries = EntryTable(self.native)
        self.serials: dict[int, Callable[[], object]] = {}
        checks = dict(cpython.verify(), ndarray=ndarray.verify())
        self.numba_failures = numba_internals.failures()
        if not self.numba_failures:
            numba_internals.initialize_runtime()
            checks |= {"meminfo": _verify_meminfo(), "list": lists.verify()}
            why = code_cache.proved("dispatch.self_test", f"{__package__}.self_test", calls_as_numba)
            self.numba_failures = {"calls": why} if why else {}
        self.unverified = [name for name, holds in checks.items() if not holds]
        self.is_native = not self.numba_failures and not {"object", "tuple", "dispatcher", "meminfo"} & set(self.unverified)
        if self.is_native:
            self._take_addresses()

    def _take_addresses(self) -> None:
        self.native.numbas_call = cpython.address_of_call(DispatcherBase)
        self.native.release_planned = shim.release_planned.address
        self.native.run = shim.run.address
        self.native.refuse = shim.refuse_argument.address
        self.native.vectorcall_any = shim.vectorcall_any.address
        self.native.release_owner = frame.release_owner.address
        self.native.release_managed = frame.release_managed.address
        self.native.release_both = frame.release_both.address
        for name in ("box_result", "box_planned_result", "box_array", "finish_array", "delete_result"):
            setattr(self.native, name, getattr(results, name).address)
        self.native.let_kept_escape = launch.let_kept_escape.address
        self.native.let_go = launch.let_go.address
        self.native.release_items = lists.release_items.address
        self.native.allocate = outputs.allocate.address
        self.native.note_error = outputs.note_error.address

    def name(self, serial: int, thing, meaning=None) -> None:
        """Let the serial number in a key mean `meaning`, or `thing` itself, as long as `thing` lives."""
        self.serials[serial] = weakref.ref(thing) if meaning is None else lambda: meaning
        weakref.finalize(thing, self.serials.pop, serial, None).atexit = False

    @property
    def address(self) -> int:
        """The address of the ``fx_runtime``."""
        return int(ffi.cast("intptr_t", self.native))


@once
def runtime() -> Runtime:
    """The process's runtime, made when the first kernel is."""
    return Runtime()


