"""This package's own exchange table, its functions called as C calls them: dtypes, memory, streams, and who deletes, and when."""

import ctypes
import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from children import at_once
from counting import no_violations

from exchanges import (  # isort: skip
    ALLOCATE, CALLS, CONVERSIONS, COUNTED, LAYOUTS, READONLY, SOURCES, STREAM, TABLE_PRELUDE, UNTOUCHED, Sub,
    aligned, borrowed, check_describes, counted, delete, eventually, exported, imported, one, result_or_exception,
    to_versioned, words,
)
from forked import needs_fork, stage_for_module
from interoperability import elements, place, unwrapped
from made_producers import Ledger, address_of, export_versioned, fill
from oracle import references_kept, type_and_message
from raising import check_raises

from fastexchange import convert, from_dlpack, register_dlpack_dtype, to_dlpack
from fastexchange.ground.dlpack import ffi

assert no_violations  # a fixture


def test_registered_dtypes_go_out_by_equality_and_come_back_by_identity():
    """Which are equal: test_registry.py."""
    pair, again = (np.dtype([("a", "u1"), ("b", "<u2")], align=True) for _ in range(2))
    register_dlpack_dtype((251, 32), pair)
    for given in (pair, again):
        array = np.frombuffer(bytes(range(32)), given)[::2]
        with references_kept(array, pair, given):
            managed = exported(array)
            assert managed.flags == READONLY
            check_describes(managed.dl_tensor, array, (251, 32))
            back = imported(managed)
            assert back.dtype is pair and back.ctypes.data == array.ctypes.data
            del back, managed
        lent = array.copy()
        check_describes(borrowed(lent), lent, (251, 32))


def test_many_borrowed_views_are_valid_at_once():
    """Their strides lie in memory that is used again, but not while a call has some thousand arguments."""
    arrays = [np.zeros((5, 4, 3 + i % 11))[:, ::2].transpose((i % 3, (i + 1) % 3, (i + 2) % 3)) for i in range(2000)]
    for view, array in [(borrowed(array), array) for array in arrays]:
        check_describes(view, array)
    for _ in range(3000):
        borrowed(LAYOUTS["64-d"](aligned("f8")))
    check_describes(borrowed(arrays[0]), arrays[0])


said: list = []


@ffi.callback("void(void *, char *, char *)")
def say(context, kind, message):
    said.append((address_of(context), ffi.string(kind).decode(), ffi.string(message).decode()))


def allocated(shape=(2, 3), code=2, bits=32, **lies):
    """What the allocator makes for a prototype whose data and strides mean nothing, or what it says to the callback, if any."""
    wanted, out = ffi.new("DLTensor *"), ffi.new("intptr_t *", UNTOUCHED)
    lies = {"data": 0x5, "strides": [-7] * 64, "byte_offset": 3, "ndim": len(shape or ()), **lies}
    _keep = fill(wanted, np.empty(0), shape=shape, code=code, bits=bits, **lies)
    said.clear()
    code = ALLOCATE(address_of(wanted), address_of(out), 0x1234, address_of(say))
    assert (code == 0) is (not said) is (out[0] != UNTOUCHED)
    assert code == 0 or ALLOCATE(address_of(wanted), address_of(out), 0x1234, None) == -1
    return ffi.cast("DLManagedTensorVersioned *", out[0]) if code == 0 else (code, said)


@pytest.mark.parametrize("shape", [None, (), (1,), (3,), (2, 3), (0,), (4, 0, 5), (1000, 1001), (1,) * 64, (2,) * 16 + (1,) * 48])
def test_allocated_memory_is_as_the_prototype_says(shape):
    for code, bits, lanes in [(0, 8, 1), (2, 32, 1), (2, 32, 4), (5, 128, 1), (4, 16, 1), (17, 4, 2), (200, 24, 1), (3, 64, 1)]:
        managed = allocated(shape, code, bits, lanes=lanes)
        tensor, extents = managed.dl_tensor, shape or ()
        assert (managed.version.major, managed.version.minor, managed.flags) == (1, 3, 0)
        assert (tensor.device.device_type, tensor.device.device_id, tensor.ndim) == (1, 0, len(extents))
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (code, bits, lanes)
        size = int(np.prod(extents, dtype=np.int64)) * bits * lanes // 8
        start = address_of(tensor.data) + tensor.byte_offset
        assert start % 256 == 0 and words(tensor.shape, len(extents)) == extents
        ffi.memmove(ffi.cast("char *", start), b"\xa5" * size, size)
        compact = np.broadcast_to(np.uint8(0), extents).copy()
        assert counted(words(tensor.strides, len(extents)), compact) == counted(compact.strides, compact)
        assert bytes(ffi.buffer(ffi.cast("char *", start), size)) == b"\xa5" * size
        if (code, bits, lanes) == (2, 32, 1):
            array = imported(managed)
            array[...] = 2.5
            assert (array.shape, array.dtype, array.flags.writeable) == (extents, np.float32, True) and (array == 2.5).all()
        else:
            delete(managed)


def test_allocated_memory_is_freed_with_the_last_view():
    tracemalloc.start()
    try:
        for _ in range(3):
            array = imported(allocated((1 << 20,), 1, 8))
            array[:] = 7
            view = array[5:]
            del array
            assert tracemalloc.get_traced_memory()[0] >= 1 << 20 and view.sum() == 7 * ((1 << 20) - 5)
            del view
        at_once(*[lambda: delete(allocated((1 << 20,), 1, 8))] * 3)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


CANNOT_ALLOCATE = {
    BufferError: {
        "CUDA": {"device_type": 2}, "device 0": {"device_type": 0}, "no such device": {"device_type": -1},
        "pinned": {"device_type": 3}, "4 bits": {"code": 17, "bits": 4}, "1 bit": {"code": 0, "bits": 1},
        "12 bits": {"bits": 6, "lanes": 2}, "no bits": {"bits": 0}, "no lanes": {"lanes": 0},
        "shape NULL": {"shape": None, "ndim": 1}, "ndim -1": {"ndim": -1}, "ndim 65": {"shape": (1,) * 65, "ndim": 65},
        "ndim 2^31 - 1": {"ndim": 2**31 - 1}, "negative extent": {"shape": (3, -1)}, "negative, empty": {"shape": (0, -1)},
    },
    MemoryError: {
        "2^50 bytes": {"shape": (2**50,), "code": 0, "bits": 8}, "2^62 elements": {"shape": (2**62,)},
        "2^63 - 1 elements": {"shape": (2**63 - 1,), "code": 0, "bits": 8}, "2^64 elements": {"shape": (2**32, 2**32)},
        "2^80 elements of 0": {"shape": (2**40, 0, 2**40)}, "2^61 elements of 8 bytes": {"shape": (2**61,), "bits": 64},
        "lanes overflow": {"shape": (2**48,), "bits": 64, "lanes": 65535},
    },
}  # fmt: skip


@pytest.mark.parametrize(("error", "prototypes"), CANNOT_ALLOCATE.items())
def test_an_allocation_that_fails_says_why_to_the_callback(error, prototypes):
    for name, changes in prototypes.items():
        code, [(context, kind, message)] = allocated(**changes)
        assert (code, context, kind) == (-1, 0x1234, error.__name__) and message, name


def test_the_cpu_has_no_stream_and_other_devices_are_not_numpys():
    for device_id in (0, 1):
        out = ffi.new("intptr_t *", UNTOUCHED)
        assert STREAM(1, device_id, address_of(out)) == 0 and out[0] == 0
    for device_type in (0, 2, 3, 10, 13, 99, -1):
        check_raises(BufferError, "CPU", STREAM, device_type, 0, address_of(out))


# ---- who deletes an export, and when ---------------------------------------------------------------------------------
def test_a_tensor_is_stolen_and_given_back_when_the_last_view_dies():
    ledger, source = Ledger(), np.arange(12.0).reshape(3, 4)
    with references_kept(source):
        array = imported(export_versioned(ledger, source))
        assert array.base is not None and not array.flags.owndata
        view = array[1:]
        array[1, 1] = -1
        del array
        gc.collect()
        assert (ledger.made, ledger.deleted) == (1, 0) and source[1, 1] == view[0, 1] == -1
        del view
        assert ledger.deleted == 1


def test_deleters_from_threads_that_python_does_not_know():
    """Made by pthread_create: no thread state, no GIL."""
    libc, array, last, died = ctypes.CDLL(None), np.arange(5.0), Sub((3,)), []
    weakref.finalize(last, died.append, "last")
    with references_kept(array):
        threads, made = [], [exported(array) for _ in range(40)] + [exported(last)]
        del last
        for managed in made:
            thread, function = ctypes.c_ulong(), ctypes.c_void_p(address_of(managed.deleter))
            assert libc.pthread_create(ctypes.byref(thread), None, function, ctypes.c_void_p(address_of(managed))) == 0
            threads.append(thread)
        assert all(libc.pthread_join(thread, None) == 0 for thread in threads)
    assert died == ["last"]


def test_exports_imports_and_deleters_from_many_threads_at_once():
    ledger, array, plane = Ledger(), aligned(), np.arange(6.0).reshape(2, 3)
    # PaddlePaddle 3.3 calls a deleter while it holds a mutex: one in Python lets go of the GIL, and a thread that frees another
    # tensor waits for the mutex with the GIL. And of two owners of the same memory it keeps one.
    conversions = [take for name, take in CONVERSIONS.items() if "paddle" not in name]

    def work(number):
        kind = COUNTED[number % len(COUNTED)]
        fresh = type(f"Fresh{number}", (kind,), {})
        for turn in range(40):
            for _ in range(8):
                delete(exported(plane), ctypes.CFUNCTYPE if turn % 2 else ctypes.PYFUNCTYPE)
                assert borrowed(plane).shape[1] == imported(exported(plane)).shape[1] == 3
            tensor = (fresh if turn % 2 else kind)(array, ledger)
            assert place(from_dlpack(tensor)) == place(convert(tensor, np.ndarray, copy=False)) == place(array)
            for take in conversions:
                assert elements(take(tensor)).tolist() == array.tolist()
            assert type_and_message(from_dlpack, tensor, dtype="i4")[0] is TypeError
            to_versioned(tensor)

    with references_kept(plane):
        at_once(*(lambda i=i: work(i) for i in range(8)))
    assert eventually(lambda: ledger.out == 0)
    ledger.check(ledger.made)


@pytest.mark.parametrize("source", SOURCES)
def test_results_and_capsules_may_die_in_another_thread_or_in_a_cycle(source):
    array, tensor = one(source)
    with references_kept(array, tensor):
        for way in (from_dlpack, to_versioned, to_dlpack, CALLS["to_dlpack, a copy"], lambda x: to_versioned(x, device="cpu")):
            result_or_exception(way, tensor)  # a capsule that nobody takes gives its tensor back
            held, cycle = [result_or_exception(way, tensor) for _ in range(3)], [result_or_exception(way, tensor)]
            cycle.append(cycle)
            del cycle
            at_once(*[held.pop] * 3)
        gc.collect()
    assert elements(tensor).tolist() == array.tolist()
    if hasattr(unwrapped(tensor), "ledger"):
        unwrapped(tensor).ledger.check(25)


AT_THE_END = TABLE_PRELUDE + """
    import atexit, weakref

    libc, array, out = ctypes.CDLL(None), np.zeros(1000).view(type("Told", (np.ndarray,), {})), ffi.new("intptr_t *")
    weakref.finalize(array, print, "freed").atexit = False
    assert call(table.managed_tensor_from_py_object_no_sync, id(array), at(out)) == 0
    del array
    managed = ffi.cast("DLManagedTensorVersioned *", out[0])
    function, argument = ctypes.c_void_p(at(managed.deleter)), ctypes.c_void_p(at(managed))
    without, with_gil = (kind(None, ctypes.c_void_p)(function.value) for kind in (ctypes.CFUNCTYPE, ctypes.PYFUNCTYPE))

    def by_a_thread(create=libc.pthread_create, join=libc.pthread_join, id=ctypes.c_ulong(), byref=ctypes.byref):
        assert create(byref(id), None, function, argument) == 0
        assert join(id, None) == 0

    class Late:
        "Dies when the interpreter clears what is left."

        def __init__(self, act, *arguments):
            self.act = lambda: act(*arguments)

        def __del__(self):
            self.act()
    """
ENDS = {
    # name: (what is done, whether the array is freed)
    "atexit": ("atexit.register(without, argument)", True),
    "atexit, from a thread": ("atexit.register(by_a_thread)", True),
    "while modules are cleared": ("np.late = Late(without, argument)", None),
    "while modules are cleared, with the GIL": ("np.late = Late(with_gil, argument)", None),
    "while modules are cleared, from a thread": ("np.late = Late(by_a_thread)", None),
    "after the interpreter": ("assert libc.__cxa_atexit(function, argument, None) == 0", False),
    "never": ("pass", False),
    "in daemon threads, which are stopped wherever they next want the GIL": ("""
started = threading.Semaphore(0)

def work():
    array, delete = np.zeros(10), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
    while True:
        made = [ffi.new("DLManagedTensorVersioned **") for _ in range(50)]
        for out in made:
            call(table.managed_tensor_from_py_object_no_sync, id(array), at(out))
        for out in made:
            delete(at(out[0]))
        started.release()

for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
for _ in range(6):
    started.acquire()
""", False),
    "results of buffers that outlive everything": ("""
import array as arrays, mmap
things = bytearray(8), memoryview(bytearray(8)), arrays.array("d", [1.0]), mmap.mmap(-1, 16), (ctypes.c_int * 3)(), b"abc"
np.kept = [from_dlpack(thing) for thing in things] + [to_dlpack(thing, max_version=(1, 0)) for thing in things]
np.kept.append(np.kept)
""", False),
    "the package is gone, a consumer has kept the table": ("""
del exchange_api, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill
import cffi
from fastexchange.ground.dlpack import CDEF
own = cffi.FFI()
own.cdef(CDEF)
table = own.cast("DLPackExchangeAPI *", at(table))
at = lambda pointer: int(own.cast("intptr_t", pointer))
for name in [name for name in sys.modules if name.split(".")[0] in ("fastexchange", "made_producers")]:
    del sys.modules[name]
gc.collect()
churn, array = [bytearray(size) for size in range(5000)], np.arange(3.0)
before = sys.getrefcount(array)
for _ in range(10):
    managed, made = own.new("DLManagedTensorVersioned **"), own.new("intptr_t *")
    assert call(table.managed_tensor_from_py_object_no_sync, id(array), at(managed)) == 0
    assert sys.getrefcount(array) == before + 1
    assert call(table.managed_tensor_to_py_object_no_sync, at(managed[0]), at(made)) == 0
    back = ctypes.cast(made[0], ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(back))
    assert np.shares_memory(back, array)
    del back
    assert sys.getrefcount(array) == before
""", False),
}  # fmt: skip


stage = stage_for_module(AT_THE_END)


@needs_fork
@pytest.mark.parametrize("when", ENDS)
def test_the_end_of_the_process(when, stage):
    act, is_freed = ENDS[when]
    lines = stage.run(f"{act}\nprint('end of the script')").check_silent().split("\n")
    assert lines[0] == "end of the script" and (is_freed is None or ("freed" in lines) is is_freed)
