"""The one ``fx_runtime`` of a process: the type table, native functions' addresses, the checks before native code runs."""

import weakref
from collections.abc import Callable

from numba import types

from .._abi import ffi
from ..ground import cpython, numba_internals
from ..ground.cfunction import cfunction, code_cache
from ..ground.dtypes import plain_fields_by_type_number
from ..ground.numba_internals import DispatcherBase
from ..ground.once import once
from ..producers import ndarray
from . import bound_launch, frame, lists, outputs, read_arguments, results, vectorcall
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

    ``unverified``: the names of layouts that differ from native code's assumptions. ``numba_failures``: by name, how Numba
    differs from what this package expects. ``is_native``: if False, Numba's dispatcher makes all calls.
    """

    def __init__(self):
        self.native = ffi.new("fx_runtime *")
        for number, field in enumerate(plain_fields_by_type_number()):
            self.native.dtype_fields[number] = field
        self.entries = TypeTable(self.native)
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
        self.native.release_cached = vectorcall.release_cached.address
        self.native.walk = read_arguments.walk.address
        self.native.run = vectorcall.run.address
        self.native.refuse = vectorcall.refuse_argument.address
        self.native.vectorcall_any = vectorcall.vectorcall_any.address
        self.native.release_owner = frame.release_owner.address
        self.native.release_managed = frame.release_managed.address
        self.native.release_both = frame.release_both.address
        for name in ("box_result", "box_cached_result", "box_array", "finish_array", "delete_result"):
            setattr(self.native, name, getattr(results, name).address)
        self.native.let_kept_escape = bound_launch.let_kept_escape.address
        self.native.let_go = bound_launch.let_go.address
        self.native.release_items = lists.release_items.address
        self.native.allocate = outputs.allocate.address
        self.native.note_error = outputs.note_error.address

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


