"""NumPy's exchange table as a consumer written in C sees it: nothing but the five addresses in the capsule.

Functions that need the GIL are called with it (``PYFUNCTYPE``, which also raises what they set), the allocator and the
deleters without it (``CFUNCTYPE``). Every managed tensor that goes in is a ``Ledger``'s, so it is known who deleted it.
"""

import builtins
import ctypes
import gc
import itertools
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from frameworks import NUMPY_DTYPES
from interoperability import LAYOUTS
from interpreter import run_python
from made_producers import TABLE_CAPSULE, Ledger, address_of, capsule, capsule_name, export_versioned, fill
from oracle import references_kept

from fastexchange import exchange_api, register_dlpack_dtype
from fastexchange.ground.dlpack import CDEF, DLDataTypeCode, DLDeviceType, ffi, is_readable_by_cpu

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

TABLE = ffi.cast("DLPackExchangeAPI *", _pointer(exchange_api(np.ndarray), TABLE_CAPSULE))

_int, _at = ctypes.c_int, ctypes.c_void_p
ALLOCATE = ctypes.CFUNCTYPE(_int, _at, _at, _at, _at)(address_of(TABLE.managed_tensor_allocator))
EXPORT = ctypes.PYFUNCTYPE(_int, ctypes.py_object, _at)(address_of(TABLE.managed_tensor_from_py_object_no_sync))
IMPORT = ctypes.PYFUNCTYPE(_int, _at, _at)(address_of(TABLE.managed_tensor_to_py_object_no_sync))
BORROW = ctypes.PYFUNCTYPE(_int, ctypes.py_object, _at)(address_of(TABLE.dltensor_from_py_object_no_sync))
STREAM = ctypes.PYFUNCTYPE(_int, _int, ctypes.c_int32, _at)(address_of(TABLE.current_work_stream))

UNTOUCHED = 0x1DEA
READONLY, COPIED, PADDED = 1, 2, 4


def exported(array):
    """A new owning export: a ``DLManagedTensorVersioned *``."""
    out = ffi.new("DLManagedTensorVersioned **")
    assert EXPORT(array, address_of(out)) == 0
    return out[0]


def delete(managed, prototype=ctypes.CFUNCTYPE):
    """Call the deleter: without the GIL, unless told otherwise."""
    prototype(None, _at)(address_of(managed.deleter))(address_of(managed))


def imported(managed) -> np.ndarray:
    """The array that is made of a managed tensor, which it then owns."""
    out = ffi.new("intptr_t *")
    assert IMPORT(address_of(managed), address_of(out)) == 0
    return taken(out[0])


def taken(address: int):
    """The object to which `address` is a new reference, the only one."""
    made = ctypes.cast(address, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))
    assert sys.getrefcount(made) == 2
    return made


def borrowed(array):
    """A ``DLTensor`` that describes an array and owns nothing."""
    out = ffi.new("DLTensor *")
    assert BORROW(array, address_of(out)) == 0
    return out


def refuses(call, argument, error=BufferError, match=None):
    """The function fails with an exception set, and leaves the pointer that it was to fill as it was."""
    out = ffi.new("intptr_t[16]", [UNTOUCHED] * 16)
    with pytest.raises(error, match=match) as raised:
        call(argument, address_of(out))
    assert str(raised.value)
    assert out[0] == UNTOUCHED


def words(pointer, count: int) -> tuple[int, ...]:
    return tuple(pointer[i] for i in range(count))


def check_describes(tensor, array: np.ndarray, field: tuple[int, int]) -> None:
    """A DLTensor is that array: the same memory, the same extents, the strides that count."""
    assert address_of(tensor.data) + tensor.byte_offset == array.ctypes.data
    assert (tensor.device.device_type, tensor.device.device_id) == (DLDeviceType.kDLCPU, 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (*field, 1)
    assert tensor.ndim == array.ndim
    assert words(tensor.shape, array.ndim) == array.shape
    assert array.ndim == 0 or tensor.strides != ffi.NULL
    in_bytes = [stride * array.itemsize for stride in words(tensor.strides, array.ndim)]
    counted = [i for i in range(array.ndim) if array.shape[i] > 1] if array.size else []
    assert [in_bytes[i] for i in counted] == [array.strides[i] for i in counted]


def field_of(dtype) -> tuple[int, int]:
    """DLPack's code and bits of one of NumPy's plain dtypes."""
    dtype = np.dtype(dtype)
    return {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}[dtype.kind], 8 * dtype.itemsize


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_table_is_of_version_1_3_and_complete():
    assert capsule_name(exchange_api(np.ndarray)) == TABLE_CAPSULE
    assert (TABLE.header.version.major, TABLE.header.version.minor) == (1, 3)
    assert TABLE.header.prev_api == ffi.NULL
    names = [name for name, _ in ffi.typeof("DLPackExchangeAPI").fields if name != "header"]
    assert len(names) == 5 and all(getattr(TABLE, name) != ffi.NULL for name in names)


class Sub(np.ndarray):
    pass


def test_there_is_one_table_for_all_arrays():
    for cls in (np.ndarray, Sub, np.recarray, np.memmap, np.ndarray):
        assert exchange_api(cls) is exchange_api(np.ndarray)
    assert exported(np.arange(3.0).view(Sub)).dl_tensor.shape[0] == 3


def test_the_table_outlives_whoever_made_it():
    """A consumer keeps the pointer, not the capsule, nor this package."""
    run_python(
        f"""
        import cffi, ctypes, gc, sys
        import numpy as np
        from fastexchange import exchange_api

        get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
        address = get(exchange_api(np.ndarray), {TABLE_CAPSULE!r})
        del exchange_api
        for name in [name for name in sys.modules if name.split(".")[0] == "fastexchange"]:
            del sys.modules[name]
        gc.collect()
        churn = [bytearray(size) for size in range(5000)]
        ffi = cffi.FFI()
        ffi.cdef({CDEF!r})
        table = ffi.cast("DLPackExchangeAPI *", address)
        at = lambda pointer: int(ffi.cast("intptr_t", pointer))
        call = lambda function, *words: ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(words))(at(function))(*words)
        array = np.arange(3.0)
        before = sys.getrefcount(array)
        for _ in range(10):
            managed, made = ffi.new("DLManagedTensorVersioned **"), ffi.new("intptr_t *")
            assert call(table.managed_tensor_from_py_object_no_sync, id(array), at(managed)) == 0
            assert sys.getrefcount(array) == before + 1
            assert call(table.managed_tensor_to_py_object_no_sync, at(managed[0]), at(made)) == 0
            back = ctypes.cast(made[0], ctypes.py_object).value
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(back))
            assert np.shares_memory(back, array)
            del back
            assert sys.getrefcount(array) == before
        """
    )


# ---- managed_tensor_allocator --------------------------------------------------------------------------------------


def prototype(shape=(2, 3), code=2, bits=32, **lies):
    """A ``DLTensor *`` that asks for memory, and what it points to. Its data and strides mean nothing."""
    tensor = ffi.new("DLTensor *")
    lies = {"data": 0x5, "strides": [-7] * 64, "byte_offset": 3, "ndim": len(shape or ()), **lies}
    return tensor, fill(tensor, np.empty(0), shape=shape, code=code, bits=bits, **lies)


SHAPES = [(), (1,), (3,), (2, 3), (0,), (4, 0, 5), (1000, 1001), (1,) * 64, (2,) * 16 + (1,) * 48]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allocated_memory_is_as_the_prototype_says(shape):
    for code, bits, lanes in [(0, 8, 1), (2, 32, 1), (2, 32, 4), (5, 128, 1), (4, 16, 1), (17, 4, 2), (200, 24, 1), (3, 64, 1)]:
        wanted, _keep = prototype(shape, code, bits, lanes=lanes)
        out = ffi.new("DLManagedTensorVersioned **")
        assert ALLOCATE(address_of(wanted), address_of(out), None, None) == 0
        managed, tensor = out[0], out[0].dl_tensor
        assert (managed.version.major, managed.version.minor, managed.flags) == (1, 3, 0)
        assert (tensor.device.device_type, tensor.device.device_id) == (1, 0)
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (code, bits, lanes)
        assert tensor.ndim == len(shape)
        size = int(np.prod(shape, dtype=np.int64)) * bits * lanes // 8
        start = address_of(tensor.data) + tensor.byte_offset
        assert start % 256 == 0
        ffi.memmove(ffi.cast("char *", start), b"\xa5" * size, size)
        assert words(tensor.shape, len(shape)) == shape
        if shape and 0 not in shape:
            compact = [stride // 8 for stride in np.broadcast_to(np.float64(0), shape).copy().strides]
            assert [tensor.strides[i] for i in range(len(shape)) if shape[i] > 1] == [
                compact[i] for i in range(len(shape)) if shape[i] > 1
            ]
        assert bytes(ffi.buffer(ffi.cast("char *", start), size)) == b"\xa5" * size
        delete(managed)


def test_a_prototype_without_dimensions_needs_no_shape():
    wanted, _keep = prototype(None, ndim=0, strides=None)
    out = ffi.new("DLManagedTensorVersioned **")
    assert ALLOCATE(address_of(wanted), address_of(out), None, None) == 0
    array = imported(out[0])
    array[()] = 2.5
    assert (array.shape, array.dtype, array[()]) == ((), np.float32, 2.5)


def test_allocated_memory_becomes_an_array_and_is_freed_with_it():
    wanted, _keep = prototype((1 << 20,), 1, 8)
    out = ffi.new("DLManagedTensorVersioned **")
    tracemalloc.start()
    try:
        for _ in range(3):
            assert ALLOCATE(address_of(wanted), address_of(out), None, None) == 0
            array = imported(out[0])
            array[:] = 7
            assert array.flags.writeable and array.sum() == 7 << 20
            assert tracemalloc.get_traced_memory()[0] >= 1 << 20
            view = array[5:]
            del array
            assert view.sum() == 7 * ((1 << 20) - 5)
            del view
        threads = [threading.Thread(target=delete, args=(made,)) for made in itertools.starmap(_allocated, [(wanted,)] * 4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def _allocated(wanted):
    out = ffi.new("DLManagedTensorVersioned **")
    assert ALLOCATE(address_of(wanted), address_of(out), None, None) == 0
    return out[0]


CANNOT_ALLOCATE = {
    "CUDA": ({"device_type": 2}, BufferError),
    "device 0": ({"device_type": 0}, BufferError),
    "no such device": ({"device_type": -1}, BufferError),
    "4 bits": ({"code": 17, "bits": 4}, BufferError),
    "1 bit": ({"code": 0, "bits": 1}, BufferError),
    "12 bits": ({"bits": 6, "lanes": 2}, BufferError),
    "no bits": ({"bits": 0}, BufferError),
    "no lanes": ({"lanes": 0}, BufferError),
    "shape NULL": ({"shape": None, "ndim": 1}, BufferError),
    "ndim -1": ({"ndim": -1}, BufferError),
    "ndim 65": ({"shape": (1,) * 65, "ndim": 65}, BufferError),
    "ndim 2^31 - 1": ({"ndim": 2**31 - 1}, BufferError),
    "negative extent": ({"shape": (3, -1)}, BufferError),
    "negative extent, empty": ({"shape": (0, -1)}, BufferError),
    "2^50 bytes": ({"shape": (2**50,), "code": 0, "bits": 8}, MemoryError),
    "2^62 elements": ({"shape": (2**62,)}, MemoryError),
    "2^63 - 1 elements": ({"shape": (2**63 - 1,), "code": 0, "bits": 8}, MemoryError),
    "2^64 elements": ({"shape": (2**32, 2**32)}, MemoryError),
    "2^80 elements of 0": ({"shape": (2**40, 0, 2**40)}, MemoryError),
    "2^61 elements of 8 bytes": ({"shape": (2**61,), "bits": 64}, MemoryError),
    "lanes overflow": ({"shape": (2**48,), "bits": 64, "lanes": 65535}, MemoryError),
}


@pytest.mark.parametrize("name", CANNOT_ALLOCATE)
def test_an_allocation_that_fails_says_why_to_the_callback(name):
    changes, error = CANNOT_ALLOCATE[name]
    wanted, _keep = prototype(**changes)
    said = []

    @ffi.callback("void(void *, char *, char *)")
    def set_error(context, kind, message):
        said.append((address_of(context), ffi.string(kind).decode(), ffi.string(message).decode()))

    out = ffi.new("intptr_t *", UNTOUCHED)
    assert ALLOCATE(address_of(wanted), address_of(out), 0x1234, address_of(set_error)) == -1
    [(context, kind, message)] = said
    assert context == 0x1234 and message
    assert issubclass(error, getattr(builtins, kind)), kind
    assert out[0] == UNTOUCHED
    assert ALLOCATE(address_of(wanted), address_of(out), 0x1234, None) == -1
    assert out[0] == UNTOUCHED


def test_the_callback_is_not_called_when_nothing_fails():
    @ffi.callback("void(void *, char *, char *)")
    def set_error(context, kind, message):
        raise AssertionError("called")

    wanted, _keep = prototype()
    out = ffi.new("DLManagedTensorVersioned **")
    assert ALLOCATE(address_of(wanted), address_of(out), None, address_of(set_error)) == 0
    delete(out[0])


# ---- managed_tensor_from_py_object_no_sync -------------------------------------------------------------------------

MORE_LAYOUTS = {
    **LAYOUTS,
    "3-d permuted": lambda a: a.reshape(2, 3, 2).transpose(1, 2, 0),
    "all strides negative": lambda a: a.reshape(3, 4)[::-1, ::-1],
    "offset": lambda a: a[5:],
    "64-d": lambda a: a[:4].reshape((1,) * 31 + (2,) + (1,) * 31 + (2,)),
    "one element": lambda a: np.lib.stride_tricks.as_strided(a, (1, 1), (3 * a.itemsize + 1, 1)),
    "overlapping": lambda a: np.lib.stride_tricks.as_strided(a, (4, 4), (2 * a.itemsize, a.itemsize)),
}


def base(dtype) -> np.ndarray:
    return np.arange(12).astype(dtype)


@pytest.mark.parametrize("readonly", [False, True], ids=["writeable", "readonly"])
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_every_layout_and_dtype_goes_out_and_comes_back(layout, readonly):
    for dtype in NUMPY_DTYPES:
        array = MORE_LAYOUTS[layout](base(dtype))
        if readonly:
            array.flags.writeable = False
        with references_kept(array, array.dtype):
            before = sys.getrefcount(array)
            managed = exported(array)
            assert sys.getrefcount(array) == before + 1
            assert (managed.version.major, managed.flags) == (1, int(readonly))
            assert managed.version.minor <= 3 and managed.deleter != ffi.NULL
            check_describes(managed.dl_tensor, array, field_of(dtype))
            back = imported(managed)
            assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
            assert back.ctypes.data == array.ctypes.data
            assert back.flags.writeable is (not readonly)
            assert np.array_equal(back, array)
            strides = [(a, b) for a, b, n in zip(back.strides, array.strides, array.shape, strict=True) if n > 1 and array.size]
            assert all(a == b for a, b in strides)
            assert sys.getrefcount(array) == before + 1
            del back
        delete(exported(array))


class Capsuled:
    """An export as an object for ``from_dlpack`` functions, all but the capsule made by the table."""

    def __init__(self, managed):
        self.managed = managed

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return capsule(self.managed, b"dltensor_versioned")


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_numpys_own_reader_takes_the_exports(layout):
    for dtype, readonly in itertools.product(NUMPY_DTYPES, (False, True)):
        array = MORE_LAYOUTS[layout](base(dtype))
        if readonly:
            array.flags.writeable = False
        with references_kept(array):
            back = np.from_dlpack(Capsuled(exported(array)))
            assert back.dtype == array.dtype and np.array_equal(back, array)
            assert back.flags.writeable is (not readonly)
            assert not array.size or np.shares_memory(back, array)
            del back


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_numpys_own_exports_are_taken(layout):
    for dtype, readonly in itertools.product(NUMPY_DTYPES, (False, True)):
        array = MORE_LAYOUTS[layout](base(dtype))
        if readonly:
            array.flags.writeable = False
        with references_kept(array):
            made = array.__dlpack__(max_version=(1, 3))
            back = imported(ffi.cast("DLManagedTensorVersioned *", _pointer(made, b"dltensor_versioned")))
            ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(made), USED)
            assert back.dtype == array.dtype and np.array_equal(back, array)
            assert back.flags.writeable is (not readonly)
            del back, made


USED = ctypes.c_char_p(b"used_dltensor_versioned")


def test_aliases_of_a_dtype_are_exported_as_it_is():
    for character in "?bBhHiIlLqQefdFD":
        managed = exported(np.zeros(3, character))
        assert (managed.dl_tensor.dtype.code, managed.dl_tensor.dtype.bits) == field_of(character)
        delete(managed)
    for dtype in (np.dtype("f8", metadata={"unit": "m"}), np.dtype("f8").newbyteorder("="), np.dtype(">i1"), np.dtype("|b1")):
        managed = exported(np.zeros(3, dtype))
        assert (managed.dl_tensor.dtype.code, managed.dl_tensor.dtype.bits) == field_of(dtype)
        delete(managed)


SWAPPED = ">" if sys.byteorder == "little" else "<"
OFF_GRID = np.zeros(4, np.dtype([("a", "u1"), ("b", "f8")]))
CANNOT_EXPORT = {
    **{f"swapped {name}": np.zeros(3, SWAPPED + name) for name in ("i2", "u8", "f4", "c16", "f2")},
    "object": np.array([None, 1]),
    "empty object": np.empty(0, object),
    "text": np.array(["a"]),
    "bytes": np.array([b"abc"]),
    "variable text": np.array(["a"], np.dtypes.StringDType()),
    "date": np.zeros(2, "M8[s]"),
    "duration": np.zeros(2, "m8[s]"),
    "void": np.zeros(2, "V5"),
    "structured": np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "record": np.zeros(2, [("a", "i4")]).view(np.recarray),
    "long double": np.zeros(2, np.longdouble),
    "complex long double": np.zeros(2, np.clongdouble),
    "strides off the grid": OFF_GRID["b"],
    "strides off the grid, backwards": OFF_GRID["b"][::-1],
}
if ml_dtypes is not None and np.dtype(ml_dtypes.bfloat16).newbyteorder(SWAPPED).byteorder == SWAPPED:
    CANNOT_EXPORT["swapped bfloat16"] = np.zeros(3, np.dtype(ml_dtypes.bfloat16).newbyteorder(SWAPPED))


@pytest.mark.parametrize("function", [EXPORT, BORROW], ids=["owning", "borrowed"])
@pytest.mark.parametrize("name", CANNOT_EXPORT)
def test_what_dlpack_has_no_name_for_is_refused(name, function):
    array = CANNOT_EXPORT[name]
    with references_kept(array, array.dtype):
        refuses(function, array, match="export|dtype|stride|order|DLPack")


def test_strides_off_the_grid_do_not_matter_where_nothing_is_stepped_over():
    empty = np.zeros((5, 4), OFF_GRID.dtype)["b"][:, :0]
    assert empty.strides[0] % 8
    for array in (OFF_GRID["b"][:1], OFF_GRID["b"][1:2], empty):
        array.__dlpack__()  # NumPy exports them
        managed = exported(array)
        check_describes(managed.dl_tensor, array, (2, 64))
        delete(managed)
        check_describes(borrowed(array), array, (2, 64))


# ---- dtypes beyond NumPy's own -------------------------------------------------------------------------------------

NARROW = {
    "bfloat16": (DLDataTypeCode.kDLBfloat, 16),
    **{code.name[3:].lower(): (code, 8) for code in DLDataTypeCode if code.name.startswith("kDLFloat8_")},
}
NARROW = {name: (int(code), bits) for name, (code, bits) in NARROW.items() if hasattr(ml_dtypes, name)}


@pytest.mark.parametrize("name", NARROW)
def test_ml_dtypes_go_out_and_come_back(name):
    assert len(NARROW) >= 8
    dtype = np.dtype(getattr(ml_dtypes, name))
    for layout in ("C", "F", "negative strides", "0-d", "empty", "64-d"):
        array = MORE_LAYOUTS[layout](base(dtype))
        delete(exported(array))  # a dtype may be kept when it is first met
        with references_kept(array, dtype):
            managed = exported(array)
            check_describes(managed.dl_tensor, array, NARROW[name])
            back = imported(managed)
            assert back.dtype == dtype and back.tobytes() == array.tobytes()
            check_describes(borrowed(array), array, NARROW[name])
            del back, managed


FRESH = """
    import ctypes
    import numpy as np
    {before}
    from fastexchange import exchange_api
    from made_producers import Ledger, address_of, export_versioned, ffi

    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ffi.cast("DLPackExchangeAPI *", get(exchange_api(np.ndarray), {capsule!r}))

    def call(function, *words):
        assert ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(words))(address_of(function))(*words) == 0

    {after}
    ledger = Ledger()
    for name, (code, bits) in {narrow!r}.items():
        array = np.arange(4).astype(getattr(ml_dtypes, name))
        managed, made, view = ffi.new("DLManagedTensorVersioned **"), ffi.new("intptr_t *"), ffi.new("DLTensor *")
        if {import_first}:
            managed[0] = export_versioned(ledger, array, code=code, bits=bits)
        else:
            call(table.dltensor_from_py_object_no_sync, id(array), address_of(view))
            call(table.managed_tensor_from_py_object_no_sync, id(array), address_of(managed))
            for tensor in (view, managed[0].dl_tensor):
                assert (tensor.dtype.code, tensor.dtype.bits) == (code, bits), name
        call(table.managed_tensor_to_py_object_no_sync, address_of(managed[0]), address_of(made))
        back = ctypes.cast(made[0], ctypes.py_object).value
        assert back.dtype == array.dtype and back.tobytes() == array.tobytes(), name
    """


@needs_ml_dtypes
@pytest.mark.parametrize("import_first", [False, True], ids=["export first", "import first"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ml_dtypes_are_known_at_the_first_look(when, import_first):
    """No conversion, no registration, no kernel before: a consumer found the table and calls it."""
    lines = {"before": "", "after": "", when: "import ml_dtypes"}
    run_python(FRESH.format(capsule=TABLE_CAPSULE, narrow=NARROW, import_first=import_first, **lines))


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_types_of_less_than_a_byte_never_pass_for_packed(name):
    """ml_dtypes keeps one in a byte, DLPack packs them, unless an export says that they are padded."""
    if not hasattr(ml_dtypes, name):
        pytest.skip("this ml_dtypes, if it is installed, does not have it")
    array = np.arange(3).astype(getattr(ml_dtypes, name))
    out = ffi.new("DLManagedTensorVersioned **")
    with references_kept(array):
        try:
            EXPORT(array, address_of(out))
        except BufferError:
            assert out[0] == ffi.NULL
        else:
            assert out[0].flags & PADDED and out[0].dl_tensor.dtype.bits < 8
            delete(out[0])
    refuses(BORROW, array)


VOID, PAIR = np.dtype("V13"), np.dtype([("a", "u1"), ("b", "<u2")], align=True)


@pytest.fixture(scope="module")
def _registered():
    register_dlpack_dtype((250, 104), VOID)
    register_dlpack_dtype((251, 32), PAIR)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(("code", "dtype"), [(250, VOID), (251, PAIR)], ids=["void", "structured"])
def test_registered_dtypes_go_out_by_equality_and_come_back_by_identity(code, dtype):
    again = np.dtype("V13") if code == 250 else np.dtype([("a", "u1"), ("b", "<u2")], align=True)
    field = (code, 8 * dtype.itemsize)
    assert again == dtype and again is not dtype
    for given in (dtype, again):
        array = np.frombuffer(bytes(range(8 * dtype.itemsize)), given)[::2]
        delete(exported(array))
        with references_kept(array, dtype, given):
            managed = exported(array)
            assert managed.flags == READONLY
            check_describes(managed.dl_tensor, array, field)
            back = imported(managed)
            assert back.dtype is dtype
            assert back.tolist() == array.tolist() and back.ctypes.data == array.ctypes.data
            del back, managed
        lent = array.copy()
        check_describes(borrowed(lent), lent, field)
    other = np.zeros(2, [("a", "u1"), ("c", "<u2")])
    refuses(EXPORT, other)


@pytest.mark.usefixtures("_registered")
def test_registered_structures_with_other_names_or_order_are_others():
    for dtype in ([("b", "u1"), ("a", "<u2")], [("a", "u1"), ("b", SWAPPED + "u2")], [("a", "<u2"), ("b", "u1")]):
        refuses(EXPORT, np.zeros(2, np.dtype(dtype, align=True)))


@pytest.mark.usefixtures("_registered")
def test_a_dtype_that_lost_the_import_is_exported_nevertheless():
    second = np.dtype([("second", "u4")])
    with pytest.raises(ValueError, match="already"):
        register_dlpack_dtype((251, 32), second)
    array = np.zeros(3, second)
    managed = exported(array)
    check_describes(managed.dl_tensor, array, (251, 32))
    assert imported(managed).dtype is PAIR


def test_what_nobody_registered_is_not_imported():
    ledger = Ledger()
    for code, bits in [(249, 24), (0, 128), (2, 80), (2, 8), (6, 16), (3, 64), (0, 4), (17, 4), (255, 255), (4, 32), (0, 0)]:
        managed = export_versioned(ledger, np.zeros(3), code=code, bits=bits)
        refuses(IMPORT, address_of(managed), match="dtype|type")
        delete(managed)
    ledger.check(11)


# ---- who deletes an export, and when -------------------------------------------------------------------------------


def test_deleters_from_threads_that_python_does_not_know():
    """Made by pthread_create: no thread state, no GIL."""
    libc = ctypes.CDLL(None)
    array = np.arange(5.0)
    died = []
    last = Sub((3,))
    weakref.finalize(last, died.append, "last")
    with references_kept(array):
        made = [exported(array) for _ in range(40)] + [exported(last)]
        del last
        threads = []
        for managed in made:
            thread = ctypes.c_ulong()
            function = ctypes.c_void_p(address_of(managed.deleter))
            assert libc.pthread_create(ctypes.byref(thread), None, function, ctypes.c_void_p(address_of(managed))) == 0
            threads.append(thread)
        assert all(libc.pthread_join(thread, None) == 0 for thread in threads)
    assert died == ["last"]


def test_exports_and_deleters_from_many_threads_at_once():
    array = np.arange(6.0).reshape(2, 3)
    failed = []

    def work():
        try:
            for _ in range(300):
                managed = exported(array)
                back = imported(exported(array))
                delete(managed, ctypes.CFUNCTYPE if len(failed) == 0 else ctypes.PYFUNCTYPE)
                assert borrowed(array).shape[1] == back.shape[1] == 3
        except BaseException as error:
            failed.append(error)

    with references_kept(array):
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        del threads



AT_THE_END = """
    import atexit, ctypes, sys, threading, weakref
    import numpy as np
    from fastexchange import exchange_api
    from made_producers import address_of, ffi

    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ffi.cast("DLPackExchangeAPI *", get(exchange_api(np.ndarray), {capsule!r}))
    libc = ctypes.CDLL(None)

    def export():
        class Told(np.ndarray):
            pass

        array = np.zeros(1000).view(Told)
        array.cycle = array
        weakref.finalize(array, print, "freed").atexit = False
        out = ffi.new("DLManagedTensorVersioned **")
        function = address_of(table.managed_tensor_from_py_object_no_sync)
        assert ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(function)(array, address_of(out)) == 0
        del array.cycle
        return out[0]

    managed = export()
    function, argument = ctypes.c_void_p(address_of(managed.deleter)), ctypes.c_void_p(address_of(managed))
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

    {act}
    print("end of the script")
    """

AT_THE_END_ACTS = {
    "atexit": ("atexit.register(without, argument)", True),
    "atexit, from a thread": ("atexit.register(by_a_thread)", True),
    "while modules are cleared": ("np.late = Late(without, argument)", None),
    "while modules are cleared, with the GIL": ("np.late = Late(with_gil, argument)", None),
    "while modules are cleared, from a thread": ("np.late = Late(by_a_thread)", None),
    "after the interpreter": ("assert libc.__cxa_atexit(function, argument, None) == 0", False),
    "never": ("pass", False),
}


@pytest.mark.parametrize("when", AT_THE_END_ACTS)
def test_deleters_at_the_end_of_the_process(when):
    act, frees = AT_THE_END_ACTS[when]
    done = run_python(AT_THE_END.format(capsule=TABLE_CAPSULE, act=act))
    assert not done.stderr
    said = done.stdout.split("\n")
    assert said[0] == "end of the script"
    assert frees is None or ("freed" in said) is frees


def test_threads_that_delete_while_the_process_ends():
    """Daemon threads are stopped wherever they next want the GIL: inside a deleter, too."""
    run_python(
        f"""
        import ctypes, threading
        import numpy as np
        from fastexchange import exchange_api
        from made_producers import address_of, ffi

        get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
        table = ffi.cast("DLPackExchangeAPI *", get(exchange_api(np.ndarray), {TABLE_CAPSULE!r}))
        function = address_of(table.managed_tensor_from_py_object_no_sync)
        export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(function)
        array, started = np.zeros(10), threading.Semaphore(0)

        def work():
            while True:
                made = [ffi.new("DLManagedTensorVersioned **") for _ in range(50)]
                for out in made:
                    export(array, address_of(out))
                delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(made[0][0].deleter))
                for out in made:
                    delete(address_of(out[0]))
                started.release()

        for _ in range(6):
            threading.Thread(target=work, daemon=True).start()
        for _ in range(6):
            started.acquire()
        """
    )


# ---- managed_tensor_to_py_object_no_sync ---------------------------------------------------------------------------


def test_a_tensor_is_stolen_and_given_back_when_the_last_view_dies():
    ledger, source = Ledger(), np.arange(12.0).reshape(3, 4)
    with references_kept(source):
        array = imported(export_versioned(ledger, source))
        assert type(array) is np.ndarray and array.ctypes.data == source.ctypes.data
        assert array.base is not None and not array.flags.owndata
        view, item = array[1:], array[0, 0]
        array[1, 1] = -1
        assert source[1, 1] == -1
        assert (ledger.made, ledger.deleted) == (1, 0)
        del array
        gc.collect()
        assert ledger.deleted == 0 and view[0, 1] == -1
        del view
        assert ledger.deleted == 1 and item == 0
    ledger.check(1)


def test_a_tensor_without_a_deleter_is_nobodys():
    """The header allows a NULL deleter."""
    ledger, source = Ledger(), np.arange(3.0)
    array = imported(export_versioned(ledger, source, deleter=ffi.NULL))
    assert array.sum() == 3.0
    del array
    assert ledger.deleted == 0


LIES = {
    # name: (what the tensor says of twelve float64, what the array is then)
    "C, strides NULL": ({"strides": None, "shape": (3, 4)}, lambda a: a.reshape(3, 4)),
    "64-d, strides NULL": ({"strides": None, "shape": (1,) * 62 + (3, 4)}, lambda a: a.reshape((1,) * 62 + (3, 4))),
    "0-d": ({"shape": (), "ndim": 0}, lambda a: a[0]),
    "0-d, all NULL": ({"shape": None, "strides": None, "ndim": 0}, lambda a: a[0]),
    "empty": ({"shape": (0, 3), "strides": (3, 1)}, lambda a: a[:0].reshape(0, 3)),
    "empty, strides NULL": ({"shape": (0, 3), "strides": None}, lambda a: a[:0].reshape(0, 3)),
    "empty, data NULL": ({"shape": (0, 3), "strides": (3, 1), "data": 0}, lambda a: np.empty((0, 3))),
    "empty, data and strides NULL": ({"shape": (2, 0, 3), "strides": None, "data": 0}, lambda a: np.empty((2, 0, 3))),
    "F": ({"shape": (3, 4), "strides": (1, 3)}, lambda a: a.reshape(4, 3).T),
    "negative strides": ({"shape": (3, 4), "strides": (-4, -1), "byte_offset": 88}, lambda a: a.reshape(3, 4)[::-1, ::-1]),
    "zero strides": ({"shape": (3, 4), "strides": (0, 0), "byte_offset": 8}, lambda a: np.full((3, 4), 1.0)),
    "overlapping": ({"shape": (3, 4), "strides": (1, 1)}, lambda a: np.lib.stride_tricks.sliding_window_view(a[:6], 4)),
    "byte_offset": ({"shape": (2, 3), "strides": (3, 2), "byte_offset": 16}, lambda a: np.array([[2.0, 4, 6], [5, 7, 9]])),
    "byte_offset, strides NULL": ({"shape": (2, 3), "strides": None, "byte_offset": 48}, lambda a: a[6:].reshape(2, 3)),
    "any stride where there is one element": ({"shape": (1, 3), "strides": (2**50, 1)}, lambda a: a[None, :3]),
    "version 1.0": ({"version": (1, 0)}, lambda a: a),
    "version 1.99": ({"version": (1, 99)}, lambda a: a),
    "flagged as a copy": ({"flags": COPIED}, lambda a: a),
    "device id 3": ({"device_id": 3}, lambda a: a),
    "as uint32": ({"code": 1, "bits": 32, "shape": (24,), "strides": (1,)}, lambda a: a.view("u4")),
    "as complex128": ({"code": 5, "bits": 128, "shape": (6,), "strides": (1,)}, lambda a: a.view("c16")),
    **{
        f"on {device.name}": ({"device_type": int(device)}, lambda a: a)
        for device in DLDeviceType
        if is_readable_by_cpu(device)
    },
}


@pytest.mark.parametrize("flags", [0, READONLY], ids=["writeable", "readonly"])
@pytest.mark.parametrize("name", LIES)
def test_what_a_tensor_says_is_what_the_array_is(name, flags):
    lies, want = LIES[name]
    source, ledger = np.arange(12.0), Ledger()
    lies = {"ndim": len(lies.get("shape") or source.shape), **lies, "flags": flags | lies.get("flags", 0)}
    with references_kept(source):
        array, wanted = imported(export_versioned(ledger, source, **lies)), np.asarray(want(source))
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(array, wanted)
        assert array.flags.writeable is not bool(flags)
        assert array.flags.aligned
        if array.size and "zero" not in name and np.shares_memory(source, wanted):
            assert array.ctypes.data == wanted.ctypes.data
        assert ledger.deleted == 0
        del array, wanted
    ledger.check(1)


def test_readonly_memory_cannot_be_made_writeable_again():
    ledger, source = Ledger(), np.arange(3.0)
    array = imported(export_versioned(ledger, source, flags=READONLY))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    for attempt in (array, array[1:], array.view("i8")):
        with pytest.raises(ValueError, match="WRITEABLE"):
            attempt.flags.writeable = True


@pytest.mark.parametrize("strides", [(1,), None], ids=["strides", "strides NULL"])
def test_misaligned_memory_is_an_array_that_says_so(strides):
    source, ledger = np.frombuffer(bytearray(b"x" + np.arange(3.0).tobytes()), np.uint8), Ledger()
    lies = {"code": 2, "bits": 64, "shape": (3,), "strides": strides, "byte_offset": 1}
    array = imported(export_versioned(ledger, source, **lies))
    assert not array.flags.aligned and array.tolist() == [0.0, 1.0, 2.0]
    del array
    ledger.check(1)


UNSOUND = {
    "version 0.8": {"version": (0, 8)},
    "version 2.0": {"version": (2, 0)},
    "data NULL": {"data": 0},
    "data NULL and an offset": {"data": 0, "byte_offset": 16},
    "2 lanes": {"lanes": 2, "shape": (6,)},
    "no lanes": {"lanes": 0},
    "ndim -1": {"ndim": -1},
    "ndim 65": {"ndim": 65, "shape": (1,) * 65, "strides": (1,) * 65},
    "ndim 2^31 - 1": {"ndim": 2**31 - 1},
    "shape NULL": {"shape": None},
    "negative extent": {"shape": (-1,)},
    "negative extent, empty": {"shape": (0, -1), "strides": (1, 1), "ndim": 2},
    "smallest extent": {"shape": (-(2**63),)},
    "2^63 - 1 elements": {"shape": (2**63 - 1,), "strides": (0,)},
    "2^64 elements": {"shape": (2**32, 2**32), "strides": (0, 0), "ndim": 2},
    "2^64 elements, strides NULL": {"shape": (2**32, 2**32), "strides": None, "ndim": 2},
    "2^62 elements of 8 bytes": {"shape": (2**62,), "strides": None},
    "strides that overflow in bytes": {"shape": (2,), "strides": (2**61,)},
    "smallest stride": {"shape": (2,), "strides": (-(2**63),)},
    "packed int4": {"code": 0, "bits": 4},
    "packed float4": {"code": 17, "bits": 4},
    "1 bit": {"code": 1, "bits": 1},
    "12 bits": {"code": 1, "bits": 12},
    **{
        f"on {device.name}": {"device_type": int(device)} for device in DLDeviceType if not is_readable_by_cpu(device)
    },
    "on device 0": {"device_type": 0},
    "on device 99": {"device_type": 99},
    "on device -1": {"device_type": -1},
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_tensor_stays_the_callers(name):
    source, ledger = np.arange(12.0), Ledger()
    with references_kept(source):
        managed = export_versioned(ledger, source, **UNSOUND[name])
        for _ in range(2):
            refuses(IMPORT, address_of(managed))
            assert (ledger.deleted, ledger.out) == (0, 1)
        delete(managed)
        del managed
    ledger.check(1)
    assert imported(export_versioned(ledger, source)).sum() == 66.0


def test_a_deleter_may_run_python_code_and_come_from_any_thread():
    """The deleter of these is a cffi callback: it takes the GIL itself, whoever drops the array."""
    ledger = Ledger()
    arrays = [imported(export_versioned(ledger, np.arange(3.0))) for _ in range(8)]
    cycle = [arrays.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert ledger.deleted == 1
    threads = [threading.Thread(target=arrays.pop) for _ in range(7)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    ledger.check(8)


# ---- dltensor_from_py_object_no_sync -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_a_borrowed_view_describes_the_array_and_keeps_nothing(layout):
    for dtype in NUMPY_DTYPES:
        array = MORE_LAYOUTS[layout](base(dtype))
        with references_kept(array, array.dtype):
            before = sys.getrefcount(array)
            view = borrowed(array)
            assert sys.getrefcount(array) == before
            check_describes(view, array, field_of(dtype))


def test_a_readonly_array_is_not_lent():
    """A DLTensor cannot say that it is readonly."""
    array = np.arange(3.0)
    array.flags.writeable = False
    refuses(BORROW, array, match="readonly")
    refuses(BORROW, np.broadcast_to(1.0, (3, 4)), match="readonly")
    assert exported(array).flags == READONLY


def test_many_borrowed_views_are_valid_at_once():
    """Their strides lie in memory that is used again, but not while a call has some thousand arguments."""
    arrays = [np.zeros((5, 4, 3))[:, ::2].transpose((i % 3, (i + 1) % 3, (i + 2) % 3)) for i in range(2000)]
    views = [borrowed(array) for array in arrays]
    for view, array in zip(views, arrays, strict=True):
        check_describes(view, array, (2, 64))
    for _ in range(3000):
        borrowed(MORE_LAYOUTS["64-d"](base("f8")))
    check_describes(borrowed(arrays[0]), arrays[0], (2, 64))


# ---- current_work_stream -------------------------------------------------------------------------------------------


def test_the_cpu_has_no_stream():
    for device_id in (0, 1):
        out = ffi.new("intptr_t *", UNTOUCHED)
        assert STREAM(1, device_id, address_of(out)) == 0
        assert out[0] == 0


@pytest.mark.parametrize("device_type", [0, 2, 3, 10, 13, 99, -1])
def test_other_devices_are_not_numpys(device_type):
    out = ffi.new("intptr_t *", UNTOUCHED)
    with pytest.raises(BufferError, match="CPU"):
        STREAM(device_type, 0, address_of(out))
