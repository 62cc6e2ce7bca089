"""The registry of DLPack types: NumPy 2.5's rules on every NumPy, held against NumPy's own where it has one."""

import itertools
import time

import numpy as np
import pytest
from children import at_once
from exchanges import borrowed, exported, managed_in, ml_dtypes, needs_ml_dtypes, result_or_exception
from forked import needs_fork, stage_for_module
from oracle import type_and_message
from raising import check_raises

from fastexchange import from_dlpack, to_dlpack
from fastexchange.ground import dtype_registry
from fastexchange.ground.dlpack import VERSION, DLDataTypeCode
from fastexchange.ground.dtype_registry import dtype_of, key_of, padded_key_of, register_dlpack_dtype
from fastexchange.ground.dtypes import dtype_field, storage_of

NUMPY_REGISTERS = hasattr(np.dtypes, "register_dlpack_dtype")
ML_DTYPES, ML_DTYPES_PADDED = dtype_registry.ML_DTYPES, dtype_registry.ML_DTYPES_PADDED
PLAIN = "?bBhHiIlLqQefdFD"

_codes, _names = itertools.count(120), itertools.count()


@pytest.fixture
def code() -> int:
    """A type code that nobody else uses; the process keeps what is registered."""
    return next(_codes)


def fresh(size: int) -> np.dtype:
    """A dtype of `size` bytes that equals no other."""
    return np.dtype({"names": [f"f{next(_names)}"], "formats": ["u1"], "itemsize": size})


def swapped(dtype) -> np.dtype:
    return np.dtype(dtype).newbyteorder("S")


def exported_key(dtype) -> tuple[int, int] | None:
    """What NumPy writes into the capsule."""
    capsule = result_or_exception(np.empty(1, dtype).__dlpack__, max_version=VERSION)
    if isinstance(capsule, BufferError):
        return None
    dtype = managed_in(capsule).dl_tensor.dtype
    return dtype.code, dtype.bits


def refused(key, dtype, *words: str) -> None:
    kind, message = type_and_message(register_dlpack_dtype, key, dtype)
    assert kind is ValueError and all(word in message for word in words), message


def test_numpys_own_types():
    for dtype in map(np.dtype, PLAIN):
        code, bits = key_of(dtype)
        assert (code, bits) == exported_key(dtype) and type(code) is int
        assert dtype_of(code, bits) == dtype_of(DLDataTypeCode(code), bits) == dtype
    found = {dtype_of(code, bits).name for code in range(18) for bits in range(256) if dtype_of(code, bits) is not None}
    assert found - {*ML_DTYPES} == {np.dtype(character).name for character in PLAIN}
    others = np.dtype("f4", metadata={"unit": "m"}), np.dtype(("i4", [("low", "i2"), ("high", "i2")]))
    for dtype in (*others, swapped(swapped("f4")), np.dtype("f4").newbyteorder("=")):
        assert key_of(dtype) == key_of(np.dtype(dtype.str)) == exported_key(dtype)


def test_dtypes_and_types_that_nobody_registered():
    foreign = [*map(swapped, PLAIN[3:]), *map(np.dtype, "gG" if np.dtype("g").itemsize > 8 else "")]
    assert [dtype for dtype in foreign if key_of(dtype) is not None or exported_key(dtype) is not None] == []
    for dtype in (*map(np.dtype, ("S2", "U1", "V3", "V0", "S0", "M8[ns]", "m8", "O", "V64")), np.dtypes.StringDType()):
        assert key_of(dtype) is padded_key_of(dtype) is None, dtype
    assert not any(map(padded_key_of, map(np.dtype, ("u1", "V1", "f4", "S1"))))
    for key in ((2, 0), (2, 128), (0, 4), (6, 1), (3, 64), (255, 255), (256, 8), (-1, 8), (2, -32), (2, 2**70)):
        assert dtype_of(*key) is None, key


def test_plain_dtypes_are_answered_without_a_look_elsewhere(monkeypatch):
    for name in ("_learn_ml_dtypes", "_known_key", "_known_dtype", "_lock"):
        monkeypatch.setattr(dtype_registry, name, None)
    for character in PLAIN:
        assert dtype_of(*key_of(np.dtype(character))) == np.dtype(character)
    assert key_of(np.dtype("g")) in (None, (2, 64)) and key_of(swapped("f4")) is None


# ---- registering ---------------------------------------------------------------------------------------------------
def test_a_dtype_is_known_in_both_directions_however_often_and_however_its_key_is_said(code):
    class Index:
        def __index__(self):
            return code

    dtypes = [fresh(size) for size in range(1, 32)]
    assert key_of(dtypes[1]) is None and dtype_of(code, 16) is None
    for key in ((code, 16), (Index(), 16), [code, 16], (np.uint8(code), np.int64(16)), (code, 16)):
        assert register_dlpack_dtype(key, dtypes[1]) is None
        assert key_of(dtypes[1]) == (code, 16) and dtype_of(code, 16) is dtypes[1]
    assert [type(number) for number in key_of(dtypes[1])] == [int, int]
    for dtype in dtypes:  # of every width
        register_dlpack_dtype((code, 8 * dtype.itemsize), dtype)
    assert [key_of(dtype) for dtype in dtypes] == [(code, bits) for bits in range(8, 255, 8)]
    assert [dtype_of(code, bits) for bits in range(8, 255, 8)] == dtypes


def test_export_goes_by_equality_import_by_identity_neither_can_be_changed_and_the_export_holds_where_the_import_is_refused(code):
    first, second, third, other = fresh(4), fresh(4), fresh(4), next(_codes)
    equal = np.dtype(first, metadata={"unit": "m"})
    assert equal == first and equal is not first
    register_dlpack_dtype((code, 32), first)
    assert key_of(equal) == (code, 32)
    refused((code, 32), equal, "is imported as an equal dtype, but another object already")
    for again in (first, equal):
        refused((other, 32), again, f"is exported as ({code}, 32) already, so not as ({other}, 32)")
    assert dtype_of(other, 32) is None
    refused((code, 32), second, f"({code}, 32) is imported as {first!r} already, so not as {second!r}; that is exported as")
    assert dtype_of(code, 32) is first and key_of(first) == key_of(second) == (code, 32)
    register_dlpack_dtype((other, 32), third)
    refused((next(_codes), 32), second, "is exported as")
    refused((code, 32), third, "is exported as")  # in conflict with an import, too


def test_dtypes_with_a_unit_or_a_byte_order(code):
    """Parametric dtypes are registered one by one, in foreign byte order they are not exported, structs are as they are."""
    text, struct = np.dtype("U7").newbyteorder("S"), np.dtype([(f"f{next(_names)}", swapped("f4"))])
    for bits, dtype in ((64, np.dtype("M8[7D]")), (224, text), (32, struct)):
        register_dlpack_dtype((code, bits), dtype)
        assert dtype_of(code, bits) is dtype
    assert key_of(np.dtype("M8[7D]")) == (code, 64) and key_of(np.dtype("M8[6D]")) is None
    assert key_of(text) is key_of(np.dtype("U7")) is None and key_of(struct) == (code, 32)


S2 = np.dtype("S2")  # other tests register "V2"
REFUSED = {
    # message: (keys, dtypes)
    r"argument 1, key, must be a tuple \(code, bits\), not ": (
        (None, 7, "ab", "a", (100,), (1, 16, 1), [], {1: 1, 16: 1}, {1, 16}, 1.16), [S2]),
    "argument 1, key, must hold two ints, not ": (((100.0, 16), (100, "16"), (None, 16), (100, None), [100, [16]]), [S2]),
    r"(?s)argument 2, dtype, must be a numpy.dtype, not .*; call np.dtype on it": (
        [(100, 16)], (None, "f2", np.float16, type(S2), 2, np.zeros(2, "f2"))),
    r"a DLPack type code is in 0\.\.255, not (-1|256|1180591620717411303424)$": (
        ((-1, 16), (256, 16), (2**70, 16), (-1, 7)), [S2]),
    r"its bits must be the 16 of dtype\('S2'\), not (15|2|32|-16|1180591620717411303424)$": (
        [(100, bits) for bits in (15, 2, 32, -16, 2**70)], [S2]),
    r"has 256 bits; DLPack has room for 1\.\.255": ([(100, 256)], [np.dtype("V32")]),
    r"has 0 bits; DLPack has room for 1\.\.255": ([(100, 0)], (np.dtype("V0"), np.dtype("S"))),
}  # fmt: skip


def test_what_is_refused():
    for message, (keys, dtypes) in REFUSED.items():
        for key, dtype in itertools.product(keys, dtypes):
            check_raises(TypeError if "argument" in message else ValueError, message, register_dlpack_dtype, key, dtype)
    for arguments, keywords in (((), {"key": (100, 16), "dtype": S2}), (((100, 16),), {})):
        assert type_and_message(register_dlpack_dtype, *arguments, **keywords)[0] is TypeError
    assert dtype_of(100, 16) is None and key_of(S2) is None


def registered_together(pairs: list) -> int:
    """Which of the registrations was made; all others were refused."""
    ends: dict = {}
    at_once(*(lambda i=i: ends.update({i: result_or_exception(register_dlpack_dtype, *pairs[i])}) for i in range(len(pairs))))
    [winner] = [i for i, end in ends.items() if end is None]
    assert sum(isinstance(end, ValueError) for end in ends.values()) == len(pairs) - 1
    return winner


def test_one_of_many_threads_gets_the_import_or_the_export(monkeypatch):
    told = dtype_registry._register_with_numpy  # between the look-ups and the entry: there a thread lets others in
    monkeypatch.setattr(dtype_registry, "_register_with_numpy", lambda *pair: time.sleep(0.001) or told(*pair))
    for _ in range(2):
        code, dtypes = next(_codes), [fresh(4) for _ in range(8)]
        winner = registered_together([((code, 32), dtype) for dtype in dtypes])
        assert dtype_of(code, 32) is dtypes[winner] and {key_of(dtype) for dtype in dtypes} == {(code, 32)}
        dtype, codes = fresh(4), [next(_codes) for _ in range(6)]
        winner = registered_together([((code, 32), dtype) for code in codes])
        assert key_of(dtype) == (codes[winner], 32)
        assert [dtype_of(each, 32) for each in codes] == [dtype if i == winner else None for i in range(6)]


def test_the_codes_of_ml_dtypes():
    named = {name: DLDataTypeCode(code).name for name, (code, _bits) in (ML_DTYPES | ML_DTYPES_PADDED).items()}
    assert named.pop("bfloat16") == "kDLBfloat" and named.pop("complex32") == "kDLComplex"
    for bits in (1, 2, 4):
        assert named.pop(f"int{bits}") == "kDLInt" and named.pop(f"uint{bits}") == "kDLUInt"
    assert named == {name: "kDL" + name[0].upper() + name[1:] for name in named}
    floats = {code for code in DLDataTypeCode if "Float" in code.name} - {DLDataTypeCode.kDLFloat}
    assert set(named.values()) == {code.name for code in floats}


@needs_ml_dtypes
def test_ml_dtypes_out_of_the_box():
    for name, key in ML_DTYPES.items():
        dtype = np.dtype(getattr(ml_dtypes, name))
        assert key_of(dtype) == key and dtype_of(*key) is dtype and key[1] == 8 * dtype.itemsize
        assert storage_of(dtype_field(dtype)) == np.dtype(f"u{dtype.itemsize}")
        assert key_of(swapped(dtype)) is padded_key_of(dtype) is None
        register_dlpack_dtype(key, dtype)  # what the user, or ml_dtypes itself, may do as well
    # bfloat16 is the upper half of a float32, complex32 two float16: as other frameworks have them
    halves = np.array([1.5, -2], ml_dtypes.bfloat16).view("u2")
    assert np.array([1.5, -2], "f4").view("u4").tolist() == [bits << 16 for bits in halves.tolist()]
    assert np.array([1.5 - 2j], ml_dtypes.complex32).view("f2").tolist() == [1.5, -2]


@needs_ml_dtypes
@pytest.mark.parametrize("name", ML_DTYPES_PADDED)
def test_less_than_a_byte_is_not_exchanged(name):
    """What a kernel gets of it: test_storage.py."""
    key, dtype = ML_DTYPES_PADDED[name], np.dtype(getattr(ml_dtypes, name))
    assert dtype.itemsize == 1 and key_of(dtype) is None and dtype_of(*key) is None
    assert padded_key_of(dtype) == key and padded_key_of(swapped(dtype)) is None
    refused(key, dtype, "its bits must be the 8 of")
    assert storage_of(dtype_field(dtype)) == np.dtype("u1")
    array = np.array([-4, -2, -1, -0.5, 0, 0.5, 1, 2, 4], "f4").astype(dtype)
    assert int(array.view("u1").max()) < 1 << key[1], "its value is in the low bits"
    for give in (from_dlpack, to_dlpack, exported, borrowed):  # the latter two as C calls them
        assert type_and_message(give, array)[0] is BufferError


# ---- interpreters of their own, which have imported no framework: what is registered stays -----------------------
PRELUDE = """
import random, sys, threading, types
from concurrent import futures
from unittest import mock
import numpy as np
import pytest
from fastexchange.ground import dtype_registry
from fastexchange.ground.dtype_registry import ML_DTYPES, dtype_of, key_of, padded_key_of, register_dlpack_dtype

assert not {"ml_dtypes", "torch", "jax", "pyarrow", "tvm_ffi"} & set(sys.modules)
"""
SCENES = {
    "NumPy's own types keep their meaning": """
        register_dlpack_dtype((4, 16), np.dtype("f2"))  # allowed, as in NumPy; float16 is float16 nevertheless
        assert key_of(np.dtype("f2")) == (2, 16) and dtype_of(4, 16) is np.dtype("f2")
        register_dlpack_dtype((2, 16), np.dtype("V2"))
        assert key_of(np.dtype("V2")) == (2, 16) and dtype_of(2, 16) == np.dtype("f2")
        register_dlpack_dtype((150, 128), np.dtype("G" if np.dtype("G").itemsize == 16 else "g"))
        for key, dtype in (((2, 16), "f2"), ((151, 16), "f2"), ((2, 16), "S2"), ((152, 16), "V2")):
            with pytest.raises(ValueError):
                register_dlpack_dtype(key, np.dtype(dtype))
        assert key_of(np.dtype("f2")) == (2, 16) == key_of(np.dtype("S2")) and dtype_of(151, 16) is None
        if np.dtype("g").itemsize == 16:
            assert key_of(np.dtype("g")) is None and dtype_of(150, 128) is np.dtype("g")
    """,
    **{
        f"something else under the name of ml_dtypes: {module}": f"""
        sys.modules["ml_dtypes"] = {module}
        for _ in range(2):
            assert dtype_of(4, 16) is None and key_of(np.dtype("V2")) is None and padded_key_of(np.dtype("V1")) is None
    """
        for module in ("None", "types.ModuleType('ml_dtypes')", "mock.MagicMock()",
                       "types.SimpleNamespace(bfloat16=int, float8_e5m2=np.float32)")
    },
}  # fmt: skip
OF_ML_DTYPES = {
    "ml_dtypes are found when they are imported": """
        assert dtype_of(4, 16) is None and key_of(np.dtype("V2")) is None and "ml_dtypes" not in sys.modules
        import ml_dtypes
        assert dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16) and key_of(np.dtype(ml_dtypes.float8_e5m2)) == (12, 8)
        if hasattr(np.dtypes, "register_dlpack_dtype"):
            assert np.from_dlpack(np.ones(2, ml_dtypes.bfloat16)).dtype is np.dtype(ml_dtypes.bfloat16)
            np.dtypes.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
    """,
    "what ml_dtypes has is taken before anybody looks": """
        import ml_dtypes
        with pytest.raises(ValueError, match=r"is imported as dtype\\(bfloat16\\) already"):
            register_dlpack_dtype((4, 16), np.dtype("V2"))
    """,
    "who registered first keeps the import": """
        mine = np.dtype([("bits", "u2")])
        register_dlpack_dtype((4, 16), mine)
        import ml_dtypes
        assert dtype_of(4, 16) is mine and key_of(np.dtype(ml_dtypes.bfloat16)) == (4, 16) == key_of(mine)
        assert dtype_of(12, 8) is np.dtype(ml_dtypes.float8_e5m2)
        with pytest.raises(ValueError, match=r"is imported as dtype\\(float8_e5m2\\) already"):
            register_dlpack_dtype((12, 8), np.dtype([("bits", "u1")]))
    """,
    "while ml_dtypes is being imported": """
        import ml_dtypes
        half = sys.modules["ml_dtypes"] = types.ModuleType("ml_dtypes")
        half.bfloat16 = ml_dtypes.bfloat16  # the other names are found later
        assert dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16) and dtype_of(12, 8) is None
        sys.modules["ml_dtypes"] = ml_dtypes
        assert dtype_of(12, 8) is np.dtype(ml_dtypes.float8_e5m2)
    """,
    "threads that meet ml_dtypes first": """
        import ml_dtypes
        sys.setswitchinterval(1e-6)

        def learn(barrier):
            barrier.wait()
            dtypes = {np.dtype(getattr(ml_dtypes, name)): key for name, key in ML_DTYPES.items()}
            return all(key_of(dtype) == key and dtype_of(*key) is dtype for dtype, key in dtypes.items())

        with futures.ThreadPoolExecutor(12) as pool:
            assert all(pool.map(learn, [threading.Barrier(12)] * 12))
    """,
}
OF_NUMPYS_REGISTRY = {
    "NumPy knew ml_dtypes already, and a third party was quicker": """
        import ml_dtypes
        np.dtypes.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
        mine = np.dtype([("bits", "u1")])
        np.dtypes.register_dlpack_dtype((12, 8), mine)
        assert key_of(np.dtype(ml_dtypes.bfloat16)) == (4, 16) and dtype_of(4, 16) is np.dtype(ml_dtypes.bfloat16)
        assert dtype_of(12, 8) is mine is np.from_dlpack(np.zeros(1, mine)).dtype
        assert key_of(mine) == (12, 8) == key_of(np.dtype(ml_dtypes.float8_e5m2))
        register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))
    """,
    **{
        f"NumPy, which divides by the size of elements, was told {told}": f"""
        dtype = np.dtype({told})
        key = 160, 8 * dtype.itemsize
        np.dtypes.register_dlpack_dtype(key, dtype)
        assert key_of(dtype) == (key if dtype.itemsize and dtype.subdtype is None and dtype.isnative else None), key_of(dtype)
        dtype_of(*key)
    """
        for told in ("'V0'", "'O'", "'M8[ns]'", "'>f2'", "('f2', (2,))", "('f2', (1,))", "[('a', 'O')]",
                     "np.dtypes.StringDType()")
    },
}  # fmt: skip
DIFFERENTIAL = """
if not forwarded:
    dtype_registry._numpy_register = None
choose = random.Random(seed)
names = ["f2", "i2", "S2", "V2", ">f2", "M8[s]", "m8[s]", "S8", "f8", "g", "V16", "S1", "?", "u1", "V32"]
dtypes = [np.dtype(name) for name in names]
dtypes += [np.dtype([("a", "u1"), ("b", "u1")]), np.dtype([("a", ">f2")])]
dtypes += [np.dtype(dtype, metadata={"unit": "m"}) for dtype in dtypes]
codes, widths = [0, 1, 2, 4, 6, 100, 101, 255, 256, -1], [8, 16, 64, 128, 256, 15]


class Tensor:  # an import, seen through NumPy; it keeps what it exports
    def __init__(self, key):
        self.empty = dtype_registry._Empty(*key)
    def __dlpack__(self, **options):
        return self.empty.__dlpack__()
    def __dlpack_device__(self):
        return 1, 0


def outcome(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except Exception as error:
        return type(error)


def exported(dtype):
    capsule = outcome(np.empty(0, dtype).__dlpack__, max_version=(1, 0))
    if capsule is BufferError:
        return None
    address = dtype_registry.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    dtype = dtype_registry.ffi.cast("DLManagedTensorVersioned *", address).dl_tensor.dtype
    return dtype.code, dtype.bits


for step in range(60):
    dtype = choose.choice(dtypes)
    width = 8 * dtype.itemsize if choose.random() < 0.9 else choose.choice(widths)
    call = (choose.choice(codes), width), dtype
    ours = outcome(register_dlpack_dtype, *call)
    assert ours == outcome(np.dtypes.register_dlpack_dtype, *call), (step, call, ours)  # told already, it must say the same again
    for dtype in dtypes:
        assert key_of(dtype) == exported(dtype), (step, dtype)
    for key in [(code, bits) for code in codes[:-2] for bits in widths[:4]]:
        theirs = outcome(np.from_dlpack, Tensor(key))
        a, b = dtype_of(*key), None if theirs is BufferError else theirs.dtype
        assert a == b and (a is b or key in dtype_registry.BUILT_IN_DTYPES), (step, key, a, b)
"""
"""Random registrations, in both registries: the same outcome of each, and after each the same exports and imports."""
if ml_dtypes is not None:
    SCENES |= OF_ML_DTYPES
if NUMPY_REGISTERS:
    SCENES |= OF_NUMPYS_REGISTRY
    for _seed, _word in itertools.product(range(6), ("forwarded", "apart")):
        SCENES[f"as NumPy's registry step by step, {_seed}, {_word}"] = (
            f"seed, forwarded = {_seed}, {_word == 'forwarded'}\n{DIFFERENTIAL}"
        )


stage = stage_for_module(PRELUDE)


@needs_fork
@pytest.mark.parametrize("scene", SCENES)
def test_in_an_interpreter_of_its_own(scene, stage):
    stage.run(SCENES[scene]).check_silent()
