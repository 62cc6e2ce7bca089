"""The registry of DLPack types: NumPy 2.5's rules on every NumPy, held against NumPy's own where it has one."""

import ctypes
import importlib.util
import itertools
import sys
import threading

import numba
import numpy as np
import pytest
from forked import needs_fork, run_forked
from interpreter import run_python

from fastexchange import fast_args, from_dlpack, to_dlpack
from fastexchange._abi import ffi
from fastexchange.ground import dtype_registry
from fastexchange.ground.dlpack import VERSION, DLDataTypeCode
from fastexchange.ground.dtype_registry import dtype_of, key_of, register_dlpack_dtype
from fastexchange.ground.dtypes import dtype_field, storage_of

NUMPY_REGISTERS = hasattr(np.dtypes, "register_dlpack_dtype")
needs_numpy_registry = pytest.mark.skipif(not NUMPY_REGISTERS, reason="NumPy 2.5 has a registry of its own")
PLAIN = "?bBhHiIlLqQefdFD"

_codes = itertools.count(120)


@pytest.fixture
def code() -> int:
    """A type code that nobody else uses; the process keeps what is registered."""
    return next(_codes)


def fresh(size: int) -> np.dtype:
    """A dtype of `size` bytes that equals no other."""
    return np.dtype({"names": [f"f{next(_codes_of_names)}"], "formats": ["u1"], "itemsize": size})


_codes_of_names = itertools.count()


def exported_key(array) -> tuple[int, int]:
    """What NumPy writes into the capsule."""
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    capsule = array.__dlpack__(max_version=VERSION)
    dtype = ffi.cast("DLManagedTensorVersioned *", get(capsule, b"dltensor_versioned")).dl_tensor.dtype
    return dtype.code, dtype.bits


# ---- NumPy's own types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", PLAIN)
def test_numpys_own_types(character):
    dtype = np.dtype(character)
    code, bits = key_of(dtype)
    assert (code, bits) == exported_key(np.empty(1, dtype))
    assert dtype_of(code, bits) == dtype == np.from_dlpack(np.empty(1, dtype)).dtype and type(code) is int
    assert dtype_of(DLDataTypeCode(code), bits) == dtype


def test_all_that_numpy_imports():
    names = {dtype_of(code, bits).name for code in range(18) for bits in range(256) if dtype_of(code, bits) is not None}
    plain = {np.dtype(character).name for character in PLAIN}
    assert names - {*dtype_registry.ML_DTYPES} == plain


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("f4", metadata={"unit": "m"}),
        np.dtype(("i4", [("low", "i2"), ("high", "i2")])),
        np.dtype("f4").newbyteorder("<" if sys.byteorder == "little" else ">"),
        np.dtype("f4").newbyteorder("="),
    ],
    ids=repr,
)
def test_own_types_in_other_clothes(dtype):
    assert key_of(dtype) == key_of(np.dtype(dtype.str)) == exported_key(np.empty(1, dtype))


@pytest.mark.parametrize("character", PLAIN[3:])
def test_foreign_byte_order_is_not_exported(character):
    swapped = np.dtype(character).newbyteorder("S")
    assert key_of(swapped) is None
    with pytest.raises(BufferError):
        np.empty(1, swapped).__dlpack__(max_version=VERSION)


@pytest.mark.parametrize("name", ["S2", "U1", "V3", "V0", "S0", "M8[ns]", "m8", "O", "V64"])
def test_dtypes_that_nobody_registered(name):
    assert key_of(np.dtype(name)) is None


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="a long double is a double here")
@pytest.mark.parametrize("name", ["g", "G"])
def test_long_double_is_not_exported(name):
    assert key_of(np.dtype(name)) is None
    with pytest.raises(BufferError):
        np.empty(1, name).__dlpack__(max_version=VERSION)


@pytest.mark.parametrize("key", [(2, 0), (2, 128), (0, 4), (6, 1), (3, 64), (255, 255), (256, 8), (-1, 8), (2, -32), (2, 2**70)])
def test_types_that_nobody_registered(key):
    assert dtype_of(*key) is None


def test_new_style_dtypes():
    assert key_of(np.dtypes.StringDType()) is None


# ---- registering ---------------------------------------------------------------------------------------------------


def test_both_directions(code):
    dtype = fresh(3)
    assert key_of(dtype) is None and dtype_of(code, 24) is None
    assert register_dlpack_dtype((code, 24), dtype) is None
    assert key_of(dtype) == (code, 24) and dtype_of(code, 24) is dtype


def test_again_is_allowed(code):
    dtype = fresh(2)
    for _ in range(3):
        register_dlpack_dtype((code, 16), dtype)
    assert key_of(dtype) == (code, 16) and dtype_of(code, 16) is dtype


def test_export_goes_by_equality_import_by_identity(code):
    dtype = fresh(4)
    equal = np.dtype(dtype, metadata={"unit": "m"})
    assert equal == dtype and equal is not dtype
    register_dlpack_dtype((code, 32), dtype)
    assert key_of(equal) == (code, 32)
    with pytest.raises(ValueError, match="is imported as an equal dtype, but another object already"):
        register_dlpack_dtype((code, 32), equal)
    assert dtype_of(code, 32) is dtype and dtype_of(code, 32).metadata is None


def test_an_export_cannot_be_changed(code):
    dtype, other = fresh(4), next(_codes)
    register_dlpack_dtype((code, 32), dtype)
    for again in (dtype, np.dtype(dtype, metadata={"unit": "m"})):
        with pytest.raises(ValueError, match=rf"is exported as \({code}, 32\) already, so not as \({other}, 32\)"):
            register_dlpack_dtype((other, 32), again)
    assert key_of(dtype) == (code, 32) and dtype_of(other, 32) is None


def test_an_import_cannot_be_changed_but_the_export_holds(code):
    first, second = fresh(4), fresh(4)
    register_dlpack_dtype((code, 32), first)
    with pytest.raises(ValueError, match=rf"\({code}, 32\) is imported as .* already, so not as .*; that is exported as"):
        register_dlpack_dtype((code, 32), second)
    assert dtype_of(code, 32) is first and key_of(first) == key_of(second) == (code, 32)
    with pytest.raises(ValueError, match="is exported as"):  # the export of the second is as firm as any
        register_dlpack_dtype((next(_codes), 32), second)


def test_an_export_conflict_is_told_before_an_import_conflict(code):
    first, second, other = fresh(4), fresh(4), next(_codes)
    register_dlpack_dtype((code, 32), first)
    register_dlpack_dtype((other, 32), second)
    with pytest.raises(ValueError, match="is exported as"):
        register_dlpack_dtype((code, 32), second)


def test_one_dtype_of_every_width(code):
    dtypes = [fresh(size) for size in range(1, 32)]
    for dtype in dtypes:
        register_dlpack_dtype((code, 8 * dtype.itemsize), dtype)
    assert [key_of(dtype) for dtype in dtypes] == [(code, bits) for bits in range(8, 255, 8)]
    assert [dtype_of(code, bits) for bits in range(8, 255, 8)] == dtypes


def test_parametric_dtypes_are_registered_one_by_one(code):
    register_dlpack_dtype((code, 64), np.dtype("M8[7D]"))
    assert key_of(np.dtype("M8[7D]")) == (code, 64) and key_of(np.dtype("M8[6D]")) is None
    assert dtype_of(code, 64) == np.dtype("M8[7D]")


def test_a_registered_dtype_in_foreign_byte_order_is_not_exported(code):
    dtype = np.dtype("U7").newbyteorder("S")
    register_dlpack_dtype((code, 224), dtype)
    assert key_of(dtype) is None and dtype_of(code, 224) is dtype
    assert key_of(np.dtype("U7")) is None


def test_structs_are_as_they_were_registered_whatever_their_byte_order(code):
    dtype = np.dtype([(f"f{next(_codes_of_names)}", np.dtype("f4").newbyteorder("S"))])
    register_dlpack_dtype((code, 32), dtype)
    assert key_of(dtype) == (code, 32)


def test_numpys_own_types_keep_their_meaning():
    run_python("""
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of, key_of, register_dlpack_dtype as register
        register((4, 16), np.dtype("f2"))  # allowed, as in NumPy; float16 is float16 nevertheless
        assert key_of(np.dtype("f2")) == (2, 16) and dtype_of(4, 16) is np.dtype("f2")
        register((2, 16), np.dtype("V2"))
        assert key_of(np.dtype("V2")) == (2, 16) and dtype_of(2, 16) == np.dtype("f2")
        register((150, 128), np.dtype("G" if np.dtype("G").itemsize == 16 else "g"))
        for key, dtype in (((2, 16), "f2"), ((151, 16), "f2"), ((2, 16), "S2"), ((152, 16), "V2")):
            try:
                register(key, np.dtype(dtype))
            except ValueError:
                continue
            raise AssertionError((key, dtype))
        assert key_of(np.dtype("f2")) == (2, 16) == key_of(np.dtype("S2")) and dtype_of(151, 16) is None
        if np.dtype("g").itemsize == 16:
            assert key_of(np.dtype("g")) is None and dtype_of(150, 128) is np.dtype("g")
    """)


# ---- what is refused -----------------------------------------------------------------------------------------------

V2 = np.dtype("V2")


@pytest.mark.parametrize("key", [None, 7, "ab", "a", (100,), (100, 16, 1), [], {100: 1, 16: 1}, {100, 16}, 100.16], ids=repr)
def test_keys_that_are_no_pair(key):
    with pytest.raises(TypeError, match=r"argument 1, key, must be a tuple \(code, bits\), not "):
        register_dlpack_dtype(key, V2)


@pytest.mark.parametrize("key", [(100.0, 16), (100, "16"), (None, 16), (100, None), [100, [16]]], ids=repr)
def test_keys_that_are_no_ints(key):
    with pytest.raises(TypeError, match="argument 1, key, must hold two ints, not "):
        register_dlpack_dtype(key, V2)


@pytest.mark.parametrize("dtype", [None, "f2", np.float16, type(np.dtype("f2")), 2, np.zeros(2, "f2")], ids=repr)
def test_dtypes_that_are_none(dtype):
    with pytest.raises(TypeError, match=r"(?s)argument 2, dtype, must be a numpy.dtype, not .*; call np.dtype on it"):
        register_dlpack_dtype((100, 16), dtype)


@pytest.mark.parametrize(
    ("key", "dtype", "message"),
    [
        ((-1, 16), V2, r"a DLPack type code is in 0\.\.255, not -1"),
        ((256, 16), V2, r"a DLPack type code is in 0\.\.255, not 256"),
        ((2**70, 16), V2, "a DLPack type code is in"),
        ((-1, 7), V2, "a DLPack type code is in"),
        ((100, 15), V2, r"its bits must be the 16 of dtype\('V2'\), not 15"),
        ((100, 2), V2, "its bits must be the 16"),
        ((100, 32), V2, "its bits must be the 16"),
        ((100, -16), V2, "its bits must be the 16"),
        ((100, 2**70), V2, "its bits must be the 16"),
        ((100, 256), np.dtype("V32"), r"has 256 bits; DLPack has room for 1\.\.255"),
        ((100, 0), np.dtype("V0"), r"has 0 bits; DLPack has room for 1\.\.255"),
        ((100, 0), np.dtype("S"), "has 0 bits"),
    ],
)
def test_codes_and_bits_out_of_range(key, dtype, message):
    with pytest.raises(ValueError, match=message):
        register_dlpack_dtype(key, dtype)
    assert dtype_of(100, 16) is None and key_of(V2) is None


def test_positions_only():
    with pytest.raises(TypeError):
        register_dlpack_dtype(key=(100, 16), dtype=V2)
    with pytest.raises(TypeError):
        register_dlpack_dtype((100, 16))


def test_keys_in_other_clothes(code):
    class Index:
        def __index__(self):
            return code

    dtype = fresh(2)
    for key in ((Index(), 16), [code, 16], (np.uint8(code), np.int64(16)), (code, 16)):
        register_dlpack_dtype(key, dtype)
    assert key_of(dtype) == (code, 16) and [type(number) for number in key_of(dtype)] == [int, int]


# ---- threads -------------------------------------------------------------------------------------------------------


def together(count, work):
    """Run ``work(i)`` in `count` threads that start at once; return what each returned or raised."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(i):
        barrier.wait()
        try:
            results[i] = work(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


@pytest.mark.parametrize("attempt", range(10))
def test_one_of_many_threads_gets_the_import(code, attempt):
    dtypes = [fresh(4) for _ in range(8)]
    results = together(8, lambda i: register_dlpack_dtype((code, 32), dtypes[i]))
    (winner,) = [i for i, result in enumerate(results) if result is None]
    assert all(isinstance(result, ValueError) for i, result in enumerate(results) if i != winner)
    assert dtype_of(code, 32) is dtypes[winner]
    assert {key_of(dtype) for dtype in dtypes} == {(code, 32)}


@pytest.mark.parametrize("attempt", range(5))
def test_one_of_many_threads_gets_the_export(attempt):
    dtype, codes = fresh(4), [next(_codes) for _ in range(6)]
    results = together(6, lambda i: register_dlpack_dtype((codes[i], 32), dtype))
    (winner,) = [i for i, result in enumerate(results) if result is None]
    assert key_of(dtype) == (codes[winner], 32)
    assert [dtype_of(each, 32) for each in codes] == [dtype if i == winner else None for i in range(6)]


def test_lookups_and_registrations_at_once(code):
    dtypes = [fresh(size) for size in range(1, 25)]

    def work(i):
        for dtype in dtypes[i % 3 :: 3] if i < 6 else dtypes:
            if i < 6:
                register_dlpack_dtype((code, 8 * dtype.itemsize), dtype)
            else:
                assert key_of(dtype) in (None, (code, 8 * dtype.itemsize))
                assert dtype_of(code, 8 * dtype.itemsize) in (None, dtype)

    assert together(12, work) == [None] * 12


# ---- storage -------------------------------------------------------------------------------------------------------


# ---- ml_dtypes -----------------------------------------------------------------------------------------------------

needs_ml_dtypes = pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed")


def test_the_codes_of_ml_dtypes():
    known = dtype_registry.ML_DTYPES | dtype_registry.ML_DTYPES_PADDED
    named = {name: DLDataTypeCode(code).name for name, (code, _bits) in known.items()}
    assert named.pop("bfloat16") == "kDLBfloat" and named.pop("complex32") == "kDLComplex"
    for bits in (1, 2, 4):
        assert named.pop(f"int{bits}") == "kDLInt" and named.pop(f"uint{bits}") == "kDLUInt"
    assert named == {name: "kDL" + name[0].upper() + name[1:] for name in named}
    floats = {code for code in DLDataTypeCode if "Float" in code.name} - {DLDataTypeCode.kDLFloat}
    assert set(named.values()) == {code.name for code in floats}


@needs_ml_dtypes
@pytest.mark.parametrize(("name", "key"), dtype_registry.ML_DTYPES.items())
def test_ml_dtypes_out_of_the_box(name, key):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name))
    assert key_of(dtype) == key and dtype_of(*key) is dtype and key[1] == 8 * dtype.itemsize
    assert storage_of(dtype_field(dtype)) == np.dtype(f"u{dtype.itemsize}")
    assert key_of(dtype.newbyteorder("S")) is None
    assert dtype_registry.padded_key_of(dtype) is None
    register_dlpack_dtype(key, dtype)  # what the user, or ml_dtypes itself, may do as well


@needs_ml_dtypes
def test_the_values_are_what_the_codes_say():
    """bfloat16 is the upper half of a float32, complex32 two float16: as other frameworks have them."""
    import ml_dtypes

    assert np.array([1.5, -2], "f4").view("u4").tolist() == [
        bits << 16 for bits in np.array([1.5, -2], ml_dtypes.bfloat16).view("u2").tolist()
    ]
    assert np.array([1.5 - 2j], ml_dtypes.complex32).view("f2").tolist() == [1.5, -2]


@needs_ml_dtypes
@pytest.mark.parametrize("first", ["fastexchange", "ml_dtypes", "lookup"])
def test_ml_dtypes_before_or_after(first):
    run_python(
        """
        import sys
        import numpy as np
        first = sys.argv[1]
        if first == "ml_dtypes":
            import ml_dtypes
        from fastexchange.ground.dtype_registry import dtype_of, key_of
        if first == "lookup":
            assert dtype_of(4, 16) is None and key_of(np.dtype("V2")) is None
        assert key_of(np.dtype("f4")) == (2, 32) and dtype_of(2, 32) == np.dtype("f4")
        assert ("ml_dtypes" in sys.modules) == (first == "ml_dtypes")
        import ml_dtypes
        assert dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16)
        assert key_of(np.dtype(ml_dtypes.float8_e5m2)) == (12, 8)
        if hasattr(np.dtypes, "register_dlpack_dtype"):
            array = np.ones(2, ml_dtypes.bfloat16)
            assert np.from_dlpack(array).dtype is np.dtype(ml_dtypes.bfloat16)
            np.dtypes.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
        """,
        first,
    )


@needs_ml_dtypes
def test_who_registered_first_keeps_the_import():
    run_python("""
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of, key_of, register_dlpack_dtype
        mine = np.dtype([("bits", "u2")])
        register_dlpack_dtype((4, 16), mine)
        import ml_dtypes
        assert dtype_of(4, 16) is mine and key_of(np.dtype(ml_dtypes.bfloat16)) == (4, 16) == key_of(mine)
        assert dtype_of(12, 8) is np.dtype(ml_dtypes.float8_e5m2)
    """)


@needs_ml_dtypes
def test_ml_dtypes_comes_before_a_registration_after_its_import():
    run_python("""
        import ml_dtypes
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of, register_dlpack_dtype
        try:
            register_dlpack_dtype((4, 16), np.dtype([("bits", "u2")]))
        except ValueError as refused:
            assert "is imported as dtype(bfloat16) already" in str(refused)
        else:
            raise AssertionError
        assert dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16)
    """)


@pytest.mark.parametrize(
    "module",
    ["None", "types.ModuleType('ml_dtypes')", "types.SimpleNamespace(bfloat16=int, float8_e5m2=np.float32)", "mock.MagicMock()"],
)
def test_something_else_under_the_name_of_ml_dtypes(module):
    run_python(f"""
        import sys
        import types
        from unittest import mock
        import numpy as np
        sys.modules["ml_dtypes"] = {module}
        from fastexchange.ground.dtype_registry import dtype_of, key_of, padded_key_of
        for _ in range(2):
            assert dtype_of(4, 16) is None and key_of(np.dtype("V2")) is None
            assert padded_key_of(np.dtype("V1")) is None
    """)


@needs_ml_dtypes
def test_while_ml_dtypes_is_being_imported():
    """Half of the names are there at first; the others are found later."""
    run_python("""
        import sys
        import types
        import ml_dtypes
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of
        half = sys.modules["ml_dtypes"] = types.ModuleType("ml_dtypes")
        half.bfloat16 = ml_dtypes.bfloat16
        assert dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16) and dtype_of(12, 8) is None
        sys.modules["ml_dtypes"] = ml_dtypes
        assert dtype_of(12, 8) is np.dtype(ml_dtypes.float8_e5m2)
    """)


@needs_ml_dtypes
def test_threads_that_meet_ml_dtypes_first():
    run_python("""
        import sys
        import threading
        import numpy as np
        from fastexchange.ground.dtype_registry import ML_DTYPES, dtype_of, key_of
        import ml_dtypes
        sys.setswitchinterval(1e-6)
        barrier, wrong = threading.Barrier(12), []
        def work():
            barrier.wait()
            for name, key in ML_DTYPES.items():
                dtype = np.dtype(getattr(ml_dtypes, name))
                if key_of(dtype) != key or dtype_of(*key) is not dtype:
                    wrong.append(name)
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not wrong, wrong
    """)


# ---- less than a byte ----------------------------------------------------------------------------------------------


@needs_ml_dtypes
@pytest.mark.parametrize(("name", "key"), dtype_registry.ML_DTYPES_PADDED.items())
def test_less_than_a_byte_is_not_exchanged(name, key):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name))
    assert dtype.itemsize == 1 and key_of(dtype) is None and dtype_of(*key) is None
    assert dtype_registry.padded_key_of(dtype) == key
    assert dtype_registry.padded_key_of(dtype.newbyteorder("S")) is None
    with pytest.raises(ValueError, match="its bits must be the 8 of"):
        register_dlpack_dtype(key, dtype)
    assert storage_of(dtype_field(dtype)) == np.dtype("u1")


@needs_ml_dtypes
@pytest.mark.parametrize("name", dtype_registry.ML_DTYPES_PADDED)
def test_a_kernel_gets_less_than_a_byte_as_bytes(name):
    import ml_dtypes

    array = np.array([1, 0, 1], "f4").astype(getattr(ml_dtypes, name))
    kernel = fast_args(lambda x: x.sum(), storage=True)
    for _ in range(3):
        assert kernel(array) == array.view("u1").sum()
    assert kernel.signatures == [(numba.uint8[::1],)]
    assert "uint8" in str(kernel.explain(array)), kernel.explain(array)
    for convert in (from_dlpack, to_dlpack):
        with pytest.raises(BufferError, match="dtype"):
            convert(array)


@needs_ml_dtypes
@pytest.mark.parametrize("name", dtype_registry.ML_DTYPES_PADDED)
def test_the_value_is_in_the_low_bits(name):
    import ml_dtypes

    bits = dtype_registry.ML_DTYPES_PADDED[name][1]
    values = np.array([-4, -2, -1, -0.5, 0, 0.5, 1, 2, 4], "f4").astype(getattr(ml_dtypes, name))
    assert int(values.view("u1").max()) < 1 << bits


@pytest.mark.parametrize("name", ["u1", "V1", "f4", "O", "S1"])
def test_no_padded_key(name):
    assert dtype_registry.padded_key_of(np.dtype(name)) is None


# ---- NumPy's own registry ------------------------------------------------------------------------------------------


@needs_numpy_registry
def test_numpy_is_told(code):
    dtype = fresh(4)
    register_dlpack_dtype((code, 32), dtype)
    array = np.zeros(3, dtype)
    assert exported_key(array) == (code, 32) and np.from_dlpack(array).dtype is dtype
    assert np.shares_memory(np.from_dlpack(array), array)
    np.dtypes.register_dlpack_dtype((code, 32), dtype)


@needs_numpy_registry
def test_numpy_is_told_of_an_export_without_an_import(code):
    first, second = fresh(4), fresh(4)
    register_dlpack_dtype((code, 32), first)
    with pytest.raises(ValueError):
        register_dlpack_dtype((code, 32), second)
    assert exported_key(np.zeros(3, second)) == (code, 32) and np.from_dlpack(np.zeros(3, second)).dtype is first


@needs_numpy_registry
def test_what_numpy_was_told_is_known(code):
    dtype, conflicting = fresh(4), fresh(4)
    np.dtypes.register_dlpack_dtype((code, 32), dtype)
    assert key_of(dtype) == (code, 32) and dtype_of(code, 32) is dtype
    register_dlpack_dtype((code, 32), dtype)
    with pytest.raises(ValueError, match="is imported as"):
        register_dlpack_dtype((code, 32), conflicting)
    assert exported_key(np.zeros(3, conflicting)) == (code, 32) == key_of(conflicting)
    with pytest.raises(ValueError, match="is exported as"):
        register_dlpack_dtype((next(_codes), 32), dtype)


@needs_numpy_registry
@pytest.mark.parametrize("size", [1, 2, 3, 8, 31])
def test_what_numpy_was_told_is_known_in_either_order(size, code):
    other, dtypes = next(_codes), [fresh(size), fresh(size)]
    np.dtypes.register_dlpack_dtype((code, 8 * size), dtypes[0])
    np.dtypes.register_dlpack_dtype((other, 8 * size), dtypes[1])
    assert dtype_of(code, 8 * size) is dtypes[0] and key_of(dtypes[0]) == (code, 8 * size)
    assert key_of(dtypes[1]) == (other, 8 * size) and dtype_of(other, 8 * size) is dtypes[1]


@needs_numpy_registry
@pytest.mark.parametrize(
    "told",
    ["'V0'", "'O'", "'M8[ns]'", "'>f2'", "('f2', (2,))", "('f2', (1,))", "[('a', 'O')]", "np.dtypes.StringDType()"],
)
def test_numpy_is_asked_for_anything_it_was_told_without_harm(told):
    """NumPy cannot export arrays of elements without size: it divides by it."""
    run_python(f"""
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of, key_of
        dtype = np.dtype({told})
        key = 160, 8 * dtype.itemsize
        np.dtypes.register_dlpack_dtype(key, dtype)
        assert key_of(dtype) == (key if dtype.itemsize and dtype.subdtype is None and dtype.isnative else None), key_of(dtype)
        dtype_of(*key)
    """)


@needs_numpy_registry
def test_numpys_own_types_hide_what_was_registered_for_them():
    run_python("""
        import numpy as np
        from fastexchange.ground.dtype_registry import dtype_of, key_of, register_dlpack_dtype
        np.dtypes.register_dlpack_dtype((161, 16), np.dtype("f2"))
        np.dtypes.register_dlpack_dtype((2, 32), np.dtype("V4"))
        for key, dtype in (((162, 16), "f2"), ((2, 32), "S4")):
            try:
                register_dlpack_dtype(key, np.dtype(dtype))
            except ValueError as refused:
                assert "NumPy's own registry holds something else" in str(refused)
                continue
            raise AssertionError(key)
        assert key_of(np.dtype("f2")) == (2, 16) and dtype_of(2, 32) == np.dtype("f4") and key_of(np.dtype("V4")) == (2, 32)
        assert key_of(np.dtype("S4")) == (2, 32) and dtype_of(162, 16) is None
    """)


@needs_ml_dtypes
@needs_numpy_registry
def test_numpy_knew_ml_dtypes_already():
    """As with an ml_dtypes that registers its types itself; or a third party that was quicker with something else."""
    run_python("""
        import ml_dtypes
        import numpy as np
        np.dtypes.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
        mine = np.dtype([("bits", "u1")])
        np.dtypes.register_dlpack_dtype((12, 8), mine)
        from fastexchange.ground.dtype_registry import dtype_of, key_of, register_dlpack_dtype
        assert key_of(np.dtype(ml_dtypes.bfloat16)) == (4, 16) and dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16)
        assert dtype_of(12, 8) is mine is np.from_dlpack(np.zeros(1, mine)).dtype
        assert key_of(mine) == (12, 8) == key_of(np.dtype(ml_dtypes.float8_e5m2))
        register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
    """)


IMPORTS = """
import random

import numpy as np

from fastexchange.ground import dtype_registry
"""

DIFFERENTIAL = """
if not forwarded:
    dtype_registry._numpy_register = None
theirs = np.dtypes.register_dlpack_dtype
choose = random.Random(seed)
names = ["f2", "i2", "S2", "V2", ">f2", "M8[s]", "m8[s]", "S8", "f8", "g", "V16", "S1", "?", "u1", "V32"]
dtypes = [np.dtype(name) for name in names]
dtypes += [np.dtype([("a", "u1"), ("b", "u1")]), np.dtype([("a", ">f2")])]
dtypes += [np.dtype(dtype, metadata={"unit": "m"}) for dtype in dtypes]
codes, widths = [0, 1, 2, 4, 6, 100, 101, 255, 256, -1], [8, 16, 64, 128, 256, 15]


class Tensor:  # an import, seen through NumPy
    def __init__(self, key):
        self.empty = dtype_registry._Empty(*key)
    def __dlpack__(self, **options):
        return self.empty.__dlpack__()
    def __dlpack_device__(self):
        return 1, 0


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return type(error)


def exported(dtype):
    array = np.empty(0, dtype)
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except BufferError:
        return None
    address = dtype_registry.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    dtype = dtype_registry.ffi.cast("DLManagedTensorVersioned *", address).dl_tensor.dtype
    return dtype.code, dtype.bits


def imported(key):
    try:
        return np.from_dlpack(Tensor(key)).dtype
    except BufferError:
        return None


for step in range(60):
    dtype = choose.choice(dtypes)
    width = 8 * dtype.itemsize if choose.random() < 0.9 else choose.choice(widths)
    call = (choose.choice(codes), width), dtype
    ours = outcome(dtype_registry.register_dlpack_dtype, *call)
    assert ours == outcome(theirs, *call), (step, call, ours)  # told already, NumPy must say the same again
    for dtype in dtypes:
        assert dtype_registry.key_of(dtype) == exported(dtype), (step, dtype)
    for code in codes[:-2]:
        for bits in widths[:4]:
            a, b = dtype_registry.dtype_of(code, bits), imported((code, bits))
            assert a == b and (a is b or (code, bits) in dtype_registry.BUILT_IN_DTYPES), (step, code, bits, a, b)
"""


COMPARISONS = {f"{seed}-{word}": (seed, word == "forwarded") for seed in range(6) for word in ("forwarded", "apart")}


@pytest.fixture(scope="module")
def comparisons():
    """How they ended. Each registers in an interpreter of its own."""
    scenes = {name: f"seed, forwarded = {case}\n{DIFFERENTIAL}" for name, case in COMPARISONS.items()}
    return run_forked(IMPORTS, scenes)


@needs_fork
@needs_numpy_registry
@pytest.mark.parametrize("name", COMPARISONS)
def test_against_numpys_registry_step_by_step(name, comparisons):
    """Random registrations, in both registries: the same outcome of each, and after each the same exports and imports."""
    comparisons[name].check()


# ---- weight --------------------------------------------------------------------------------------------------------


def test_importing_the_registry_imports_no_framework():
    run_python("""
        import sys
        import fastexchange.ground.dtype_registry, fastexchange.ground.dlpack_types
        assert not {"ml_dtypes", "torch", "jax", "pyarrow", "tvm_ffi"} & set(sys.modules)
    """)


def test_plain_dtypes_are_answered_without_a_look_elsewhere(monkeypatch):
    def fail(*arguments):
        raise AssertionError("asked further")

    for name in ("_learn_ml_dtypes", "_known_key", "_known_dtype"):
        monkeypatch.setattr(dtype_registry, name, fail)
    monkeypatch.setattr(dtype_registry, "_lock", None)
    for character in PLAIN:
        assert dtype_of(*key_of(np.dtype(character))) == np.dtype(character)
    assert key_of(np.dtype("g")) in (None, (2, 64)) and key_of(np.dtype("f4").newbyteorder("S")) is None
