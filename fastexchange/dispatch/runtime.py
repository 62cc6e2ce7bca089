"""The one ``fx_runtime`` of a process: the type table, native functions' addresses, the checks before native code runs."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

from numba import types

from .._abi import ffi
from ..ground import cpython, numba_internals
from ..ground.cfunction import CFunction, cfunction, code_cache
from ..ground.dtypes import PLAIN_DTYPES, plain_fields_by_type_number
from ..ground.log import say
from ..ground.numba_internals import DispatcherBase
from ..ground.once import cached_property, once
from ..interpreter import DISABLED, is_free_threaded
from ..producers import ndarray
from . import frame, inline_cache, lists, owning_exports, read_arguments, rows, take_exports, vectorcall
from .self_test import calls_as_numba
from .type_table import TypeTable


@cfunction(types.intp)
def new_meminfo():
    """Allocate an NRT memory block. Returns its address."""
    return frame.NRT_MemInfo_alloc(0)


@cfunction(types.void, types.intp)
def release_meminfo(address):
    """Drop one reference of an NRT memory block."""
    frame.NRT_MemInfo_release(address)


def _verify_meminfo() -> bool:
    """Whether Numba's memory block begins with reference count, destructor and the destructor's argument."""
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
    """The state that all kernels of a process share.

    ``unverified``: the names of layouts that differ from native code's assumptions; only ``object`` if that one does, because
    then no other is looked at. ``numba_failures``: by name, how Numba differs from what this package expects. ``why_not_native``:
    why Numba's dispatcher makes all calls, and only Python code reads their arguments; "" where native code makes calls.
    """

    def __init__(self):
        self.native = ffi.new("fx_runtime *")
        for number, field in enumerate(plain_fields_by_type_number()):
            self.native.dtype_fields[number] = field
        self._descrs = [dtype for dtype in PLAIN_DTYPES if dtype.isnative]
        for dtype in self._descrs:
            self.native.descrs[dtype.num] = id(dtype)
        self.entries = TypeTable(self.native, self._derived_fields)
        self.serials: dict[int, Callable[[], object]] = {}
        checks = {} if DISABLED else cpython.verify()
        self.numba_failures: dict[str, str] = {}
        if not checks.get("object"):
            checks = dict.fromkeys(checks.keys() & {"object"}, False)
        else:
            checks["ndarray"] = ndarray.verify()
            self.numba_failures = numba_internals.failures()
            if not self.numba_failures:
                checks |= {"meminfo": _verify_meminfo(), "list": lists.verify()}
                why = code_cache.proved("dispatch.self_test", f"{__package__}.self_test", calls_as_numba)
                self.numba_failures = {"calls": why} if why else {}
        self.unverified = [name for name, holds in checks.items() if not holds]
        self.why_not_native = self._why_not_native()
        if self.why_not_native:
            say("Numba's own dispatcher makes all calls: %s", self.why_not_native)
        if self.is_native:
            self.native.numbas_call = cpython.address_of_call(DispatcherBase)
            self._nothing = ffi.new("fx_entry *")
            self.native.nothing = int(ffi.cast("intptr_t", self._nothing))
            self._numbas_entry = ffi.new("fx_overload *")
            self._numbas_entry.enter = vectorcall.call_numbas_cached.address
            self.native.numbas_entry = int(ffi.cast("intptr_t", self._numbas_entry))
            self.add(read_arguments.walk, take_exports.export_managed)
            self.add(vectorcall.run, vectorcall.vectorcall_any, vectorcall.leave_row, rows.call_cached, rows.end_call)
            self.add(rows.read_value, rows.leave_tuple, rows.begin_row, rows.launch_row)
            self.add(rows.export_row, rows.call_kernel, owning_exports.take_turn)
            self.add(frame.release_owner, frame.release_managed, frame.release_both)

    def _derived_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields["kind"].native_fields(fields) if self.is_native else {"kind": 0, "device_kind": 0}

    def _why_not_native(self) -> str:
        if DISABLED:
            return "FASTEXCHANGE_DISABLE is set"
        if is_free_threaded():
            return "this CPython is free-threaded, and native code relies on the GIL"
        if numba_internals.reports_calls():
            return "NUMBA_ENABLE_SYS_MONITORING is set, and only Numba's dispatcher reports calls to sys.monitoring"
        needed = [name for name in ("object", "tuple", "dispatcher", "meminfo") if name in self.unverified]
        if needed:
            return f"the layout of {', '.join(needed)} is not as expected"
        return "; ".join(f"this Numba is not as expected, {name}: {why}" for name, why in self.numba_failures.items())

    @property
    def is_native(self) -> bool:
        """Whether native code makes calls."""
        return not self.why_not_native

    def add(self, *functions: CFunction) -> None:
        """Put the addresses of C functions into the fields of their names.

        Native code calls what it finds there, so add a function before the first call that may need it. Those of all calls are
        added at once; others are compiled, where no machine code is cached, with the first list and so on.
        """
        for function in functions:
            if not getattr(self.native, function.__name__):
                setattr(self.native, function.__name__, function.address)

    @cached_property
    def free_entries(self) -> Callable[[Any], None]:
        """Frees the cache entries of an ``fx_overload``, at whose end it is called."""
        free: Any = ffi.cast("void (*)(fx_overload *)", inline_cache.free_entries.address)

        def free_entries(overload, is_finalizing=sys.is_finalizing):
            if not is_finalizing():
                free(overload)

        return free_entries

    def kill_entries(self, overload) -> None:
        """Let no call agree with a cache entry of an ``fx_overload`` that there is."""
        ffi.cast("void (*)(fx_overload *, intptr_t)", inline_cache.kill_entries.address)(overload, self.native.nothing)

    def name(self, serial: int, thing, meaning=None) -> None:
        """Map the serial number in a key to `meaning`, or to `thing` itself, as long as `thing` lives."""
        self.serials[serial] = weakref.ref(thing) if meaning is None else lambda: meaning
        weakref.finalize(thing, self.serials.pop, serial, None).atexit = False

    @property
    def address(self) -> int:
        """The address of the ``fx_runtime``."""
        return int(ffi.cast("intptr_t", self.native))


@once
def runtime() -> Runtime:
    """The process's runtime, made with the first kernel."""
    return Runtime()


