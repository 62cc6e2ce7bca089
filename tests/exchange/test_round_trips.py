"""A tensor goes out of a framework by every way there is, and comes back: the same memory, shape, strides, dtype, readonly flag.

Where memory lies and what a tensor holds is asked of the frameworks, never of the package.
"""

import itertools
import sys
import time
import weakref

import hostile_producers as hostile
import interoperability as matrix
import made_producers as made
import numpy as np
import pytest
from counting import no_violations, scene

from exchanges import (  # isort: skip
    CALLS, CONVERSIONS, COPIED, CPU, FORMS, LAYOUTS, NARROW, OF_ALL_DTYPES, PADDED, READONLY, SOURCES, TARGETS, VECTORS,
    Given, aligned, borrowed, by_its_table, check_describes, counted, eventually, exported, exporter, imported, managed_in, one,
    result_or_exception, taken_from, tensors, to_versioned,
)
from frameworks import NUMPY_DTYPES, has_versioned_capsules, needs_torch, numpys_reader, torch
from hostile_producers import Sets, raising
from interoperability import elements, jax, place, pyarrow, unwrapped
from made_producers import Dunder, Ledger, Legacy, Tabled, capsule, capsule_name, export_versioned
from oracle import references_kept, type_and_message

from fastexchange import DLDevice, convert, from_dlpack, to_dlpack
from fastexchange.ground.dlpack import DLDeviceType, ffi

assert no_violations  # a fixture


def through_a_capsule(x, **options):
    """By a capsule, whose contents are looked at, and NumPy's own reader."""
    made = to_dlpack(x, **{"max_version": (1, 0), **options})
    managed, own = managed_in(made), elements(x)
    is_copy = options.get("copy") is True
    if capsule_name(made) == b"dltensor_versioned":
        assert (managed.version.major, managed.flags & ~READONLY) == (1, COPIED * is_copy) and managed.version.minor <= 3
    if not is_copy:
        check_describes(managed.dl_tensor, own)
    return numpys_reader(Given(made))


def by_numpys_reader(x):
    """By the export of NumPy's table alone, and NumPy's own reader."""
    managed = exported(x)
    assert (managed.version.major, managed.flags) == (1, int(not x.flags.writeable)) and managed.version.minor <= 3
    check_describes(managed.dl_tensor, x)
    return numpys_reader(Given(capsule(managed, b"dltensor_versioned")))


WAYS = {
    # how a tensor goes out and becomes an array; "legacy" cannot say what is readonly: it refuses that, or comes back so
    "from_dlpack": from_dlpack,
    "from_dlpack, keywords": lambda x: from_dlpack(x, dtype=elements(x).dtype, copy=None),
    "from_dlpack, shared": lambda x: from_dlpack(x, copy=False, device="cpu"),
    "from_dlpack, a copy": lambda x: from_dlpack(x, copy=True),
    "capsule": through_a_capsule,
    "capsule, NumPy asks": lambda x: numpys_reader(exporter(x), device="cpu", copy=False),
    "capsule, a copy": lambda x: through_a_capsule(x, copy=True),
    "capsule, of a later version, shared": lambda x: through_a_capsule(x, copy=False, max_version=[2, 0]),
    "legacy capsule": lambda x: through_a_capsule(x, max_version=None),
    "legacy capsule, from_dlpack": lambda x: from_dlpack(Given(to_dlpack(x, max_version=(0, 99)))),
    "legacy capsule, a copy": lambda x: numpys_reader(Given(to_dlpack(x, copy=True))),
}
OF_LEGACY_CAPSULES = (Legacy, made.Ignorant, *(each.Array for each in (jax, pyarrow) if each is not None))


def ways_of(tensor, own) -> dict:
    """Those that there are for a tensor whose elements are those of the array `own`."""
    if own.dtype.name in NARROW:  # NumPy has no such dtypes
        found = {name: way for name, way in WAYS.items() if "apsule" not in name}
        return found | ({"by its type's table": by_its_table} if isinstance(tensor, np.ndarray) else {})
    found, has_dlpack = dict(WAYS), hasattr(type(tensor), "__dlpack__")
    is_mute = torch is not None and isinstance(tensor, torch.Tensor) and not has_versioned_capsules()
    if has_dlpack or isinstance(tensor, Tabled):
        has_none = not hasattr(type(tensor), "__dlpack_c_exchange_api__")  # nor one of tvm-ffi's
        found["by its type's table" + ", legacy" * (is_mute and has_none)] = by_its_table
    if has_dlpack and not isinstance(tensor, OF_LEGACY_CAPSULES) and not is_mute:
        found["by its own capsule"] = lambda x: imported(taken_from(x.__dlpack__(max_version=(1, 3))))
    if isinstance(tensor, np.ndarray):
        found["by NumPy's table and reader"] = by_numpys_reader
    return found


def check_array(name: str, end, own, want: list, is_readonly: bool) -> None:
    """What has come back is what went out, or it was refused because a legacy capsule cannot say that it is readonly."""
    is_legacy, is_copy = "legacy" in name, name.endswith("a copy")
    if is_legacy and is_readonly and not is_copy:
        assert isinstance(end, BufferError) and "readonly" in str(end)
        return
    assert type(end) is np.ndarray and (end.dtype, end.shape, end.tolist()) == (own.dtype, own.shape, want)
    if own.size:
        assert end.flags.writeable == (not is_legacy and (is_copy or not is_readonly))
        if is_readonly and not is_copy:
            with pytest.raises(ValueError, match="WRITEABLE"):
                end.view().flags.writeable = True
    if is_copy:
        assert not np.may_share_memory(end, own)
    elif own.size:
        assert place(end) == place(own) and counted(end.strides, end) == counted(own.strides, own)


@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_goes_out_and_comes_back_as_an_array(source):
    for layout in LAYOUTS if source not in VECTORS else ["1-d"]:
        is_narrow = source in OF_ALL_DTYPES and layout in ("C", "F", "negative strides", "0-d", "empty", "64-d")
        few = ("i1", "f2", "f4", "f8", "c16") if source == "numpy.ndarray" else ("u1", "f4")
        dtypes = [*(NUMPY_DTYPES if layout in ("C", "1-d") else few), *(NARROW if is_narrow else ())]
        for array, tensor, is_readonly in tensors(source, layout, dtypes):
            ledger, own = getattr(unwrapped(tensor), "ledger", Ledger()), elements(tensor)
            dtype, want = own.dtype, own.tolist()
            from_dlpack(tensor)  # what is learnt at the first call stays
            said = f"{source}, {layout}, {dtype}, readonly: {is_readonly}"
            for attempt in range(4):  # JAX gives back what it had when it likes to, also that of its calls before
                before = [sys.getrefcount(thing) for thing in (array, tensor, own, dtype)]
                for name, way in ways_of(tensor, own).items():
                    end = result_or_exception(way, tensor)
                    with scene(said, name):
                        check_array(name, end, own, want, is_readonly)
                    del end
                after = [sys.getrefcount(thing) for thing in (array, tensor, own, dtype)]
                if after == before:
                    break
                time.sleep(0.01 * attempt)
            assert after == before, said
            if isinstance(tensor, np.ndarray) and not is_readonly:
                check_describes(borrowed(tensor), array)
            if own.flags.writeable and not is_readonly and own.size and dtype.name not in NARROW:
                view, first = from_dlpack(tensor), (0,) * own.ndim
                for writes, reads in ((view, own), (own, view)):
                    writes[first] = not writes[first] if dtype.kind == "b" else writes[first] + 1
                    assert reads[first] == writes[first]
                del view, writes, reads
            assert not ledger.out or eventually(lambda ledger=ledger: not ledger.out)
            ledger.check(ledger.made)


# ---- to every framework ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_becomes_another_frameworks_shared_copied_or_refused(source):
    """PyTorch, PaddlePaddle and tvm-ffi have nothing readonly, the first two no negative strides."""
    for layout in ("1-d", "F", "negative strides") if source not in VECTORS else ["1-d"]:
        for (_, tensor, is_readonly), (name, to) in itertools.product(tensors(source, layout), TARGETS.items()):
            own, is_one = elements(tensor), isinstance(tensor, to)
            must_copy = (is_readonly and name in ("torch.Tensor", "paddle.Tensor", "tvm_ffi.Tensor")) or (
                layout == "negative strides" and name in ("torch.Tensor", "paddle.Tensor"))  # fmt: skip
            must_copy = must_copy and not is_one
            for options in (*FORMS, {"copy": True}):
                copy, end = options.get("copy"), result_or_exception(convert, tensor, to, **options)
                said = f"{layout}, readonly: {is_readonly}, {options}, {name}: {end!r}"
                if isinstance(end, Exception):
                    is_refused = copy is False and (must_copy or name == "jax.Array") and isinstance(end, BufferError)
                    assert is_refused or (name == "pyarrow.Array" and (layout != "1-d" or copy is False)), said
                    continue
                assert isinstance(end, to) and elements(end).tolist() == own.tolist(), said
                assert not is_one or copy or end is tensor, said
                assert not (copy is False and must_copy), said
                if copy or must_copy:
                    assert not np.may_share_memory(elements(end), own), said
                elif copy is False or to is np.ndarray:
                    assert place(end) == place(tensor), said


@pytest.mark.parametrize("source", SOURCES)
def test_source_and_result_live_apart(source):
    """A result keeps the memory when its source is gone; when both are gone, nothing does."""
    for name, take in {**CALLS, **CONVERSIONS}.items():
        if "to_dlpack" in name:
            continue
        array, tensor = one(source)
        want, at, owner, ledger = array.tolist(), place(array), weakref.ref(array), getattr(unwrapped(tensor), "ledger", Ledger())
        for _ in range(2):
            take(tensor)
        assert elements(tensor).tolist() == want  # the results are gone, the source is not
        result = take(tensor)
        is_shared = place(result) == place(tensor)
        del tensor, array
        _ = [np.full(12, 7, want and "f4") for _ in range(20)]  # what takes the memory, were it free
        assert elements(result).tolist() == want and (owner() is not None or place(result) != at), name
        assert eventually(lambda: ledger.out == (ledger.made > 0 and is_shared)), name  # noqa: B023
        del result
        assert eventually(lambda: owner() is None), name  # noqa: B023
        ledger.check(ledger.made)


# ---- what is demanded, passed on; what else a producer may say: test_hostile.py ---------------------------------------
def test_flags_of_a_producer_are_passed_on():
    for kind in (Tabled, Dunder):
        for flags in (0, READONLY, COPIED, READONLY | COPIED, PADDED):
            tensor = kind(np.arange(4.0), flags=flags)
            assert managed_in(to_versioned(tensor)).flags == flags
            assert from_dlpack(tensor).flags.writeable == (not flags & READONLY)
            tensor.ledger.check(2)


@pytest.mark.parametrize("source", SOURCES)
def test_devices_and_dtypes_are_demands(source):
    array, tensor = one(source)
    dtype = array.dtype
    for device in (None, "cpu", "cpu:0", CPU, [1, 0], DLDevice(1, 0), (DLDeviceType.kDLCPU, 0), (np.int32(1), np.int64(0))):
        assert place(from_dlpack(tensor, device=device)) == place(tensor)
        capsule = to_versioned(tensor, device=device)  # which what is described dies with
        check_describes(managed_in(capsule).dl_tensor, elements(tensor))
    assert {place(from_dlpack(tensor, dtype=good)) for good in (dtype, dtype.str, dtype.name, dtype.type)} == {place(tensor)}
    with references_kept(tensor):
        for device in ((2, 0), (1, 1), (13, 0), DLDevice(2, 3), (99, 0), (-1, 0)):
            assert type_and_message(from_dlpack, tensor, device=device)[0] is ValueError
            assert type_and_message(to_versioned, tensor, device=device)[0] in (BufferError, ValueError)
        for wanted in {"f8", "i4", "i1", "f4", "u1", ">f4", "V4", "M8[s]", "O"} - {dtype.str[1:]}:
            for copy in (None, False, True):
                kind, message = type_and_message(from_dlpack, tensor, dtype=wanted, copy=copy)
                assert kind is TypeError and dtype.name in message
    assert elements(tensor).tolist() == array.tolist()


def test_a_tensor_on_another_device_is_copied_by_its_framework_if_asked_to():
    class Elsewhere(Dunder):
        def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
            if dl_device is None:
                return super().__dlpack__(max_version=max_version)
            assert tuple(dl_device) == CPU and copy is not False
            return capsule(export_versioned(self.ledger, self.array.copy(), flags=COPIED), b"dltensor_versioned")

    tensor = Elsewhere(np.arange(4.0), device=(2, 1), device_type=2, device_id=1)
    for options in ({}, {"copy": None}, {"copy": True}, {"dtype": "f8"}):
        view = from_dlpack(tensor, device="cpu", **options)
        assert view.tolist() == [0, 1, 2, 3] and place(view) != place(tensor) and view.flags.writeable
    for device, *want in (("cpu", 1, COPIED), (None, 2, 0), ((2, 1), 2, 0), (DLDevice(2, 1), 2, 0)):
        managed = managed_in(kept := to_versioned(tensor, device=device))
        assert [managed.dl_tensor.device.device_type, managed.flags] == want
    assert type_and_message(from_dlpack, tensor, device="cpu", dtype="f4")[0] is TypeError
    for take, device in ((from_dlpack, "cpu"), (to_versioned, "cpu"), (to_versioned, (2, 0))):
        assert type_and_message(take, tensor, device=device, copy=False)[0] is BufferError
    del view, kept
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize(("code", "bits", "lanes"), [(99, 16, 1), (4, 16, 2), (17, 4, 2), (2, 32, 2)])
def test_a_copy_has_the_bits_of_what_numpy_has_no_dtype_for(code, bits, lanes):
    array = np.arange(12, dtype=f"u{bits * lanes // 8}").reshape(3, 4)[:, ::2]
    for kind in (Tabled, Dunder, Legacy):
        tensor = kind(array, code=code, bits=bits, lanes=lanes)
        copied = to_versioned(tensor, copy=True)
        managed = managed_in(copied)
        assert tensor.ledger.out == 0 and managed.flags == COPIED and managed.dl_tensor.data != ffi.NULL
        dtype = managed.dl_tensor.dtype
        assert (dtype.code, dtype.bits, dtype.lanes) == (code, bits, lanes)
        dtype.code, dtype.bits, dtype.lanes = 1, bits * lanes, 1
        assert from_dlpack(Given(copied)).tolist() == array.tolist()
        assert type_and_message(from_dlpack, tensor, copy=True)[0] is BufferError
        tensor.ledger.check(2)


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
@pytest.mark.parametrize("dtype", ["i8", "u8", "f8", "c16"])
def test_what_jax_narrows_is_not_called_shared(dtype):
    """JAX has 32 bits unless it is told otherwise, so these are copies."""
    array = aligned(dtype)
    result = result_or_exception(convert, array, jax.Array, copy=False)
    assert isinstance(result, BufferError) or place(result) == place(array)
    assert np.asarray(convert(array, jax.Array)).tolist() == array.tolist()


@needs_torch
def test_a_legacy_capsule_does_not_make_pytorchs_memory_readonly():
    class Old(torch.Tensor):
        def __dlpack__(self, **keywords):
            return torch._C._to_dlpack(self.as_subclass(torch.Tensor))

    old = torch.ones(3).as_subclass(Old)
    shared = lambda x: numpys_reader(Given(to_versioned(x)))  # noqa: E731
    for take in (from_dlpack, lambda x: from_dlpack(x, copy=None), shared, CALLS["convert"]) * 2:
        assert place(take(old)) == old.data_ptr() and take(old).flags.writeable
    assert capsule_name(to_dlpack(old)) == b"dltensor"


_taking: list = []


@ffi.callback("int(DLManagedTensorVersioned *, void **)", error=-1)
def _take(managed, out):
    return hostile._do(_taking[-1], managed, out)


Taker = made.tabled_type("Taker", managed_tensor_to_py_object_no_sync=hostile._native(_take, 1))


def give_something_else(managed, out) -> int:
    managed.deleter(managed)
    return made.give(out, [])


@pytest.mark.parametrize("source", SOURCES)
def test_a_target_sees_the_flags(source):
    """Those of the source, readonly also where that cannot say; none of the package's own."""
    held: list = []

    def take(managed, out):
        held.append((managed, managed.flags))
        memory = ffi.buffer(ffi.cast("char *", managed.dl_tensor.data), 12 * managed.dl_tensor.dtype.bits // 8)
        return made.give(out, Taker(np.frombuffer(memory, {8: "u1", 32: "f4"}[managed.dl_tensor.dtype.bits])))

    _taking.append(take)
    for _, tensor, is_readonly in tensors(source, "1-d"):
        for options in FORMS:
            result = convert(tensor, Taker, **options)
            assert type(result) is Taker and place(result) == place(tensor) and held[-1][1] == READONLY * is_readonly
        assert place(convert(tensor, Taker, copy=True)) != place(tensor) and held[-1][1] in (0, COPIED)
    for managed, _ in held:
        managed.deleter(managed)


TAKES = {
    "refuses": (hostile.returning(-1), BufferError, ""),
    "refuses in words": (raising(BufferError("no such tensors here")), BufferError, "no such tensors here"),
    "refuses late": (lambda managed, out: -1 if managed.deleter(managed) is None else 0, BufferError, ""),
    "fails": (raising(PermissionError("not today")), PermissionError, "not today"),
    "gives nothing": (hostile.returning(0), BufferError, ""),
    "gives another type": (give_something_else, (TypeError, BufferError), ""),
    "gives and fails": (lambda *both: raising(Sets(give_something_else(*both), ValueError, ValueError("made")))(*both),
                        ValueError, "made"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "error", "said"), TAKES.values(), ids=TAKES)
def test_a_target_that_fails(act, error, said):
    _taking.append(act)
    for kind in (Tabled, Dunder, Legacy):
        tensor = kind(np.arange(12.0))
        with references_kept(tensor, tensor.array):
            for options in (*FORMS, {"copy": True}):
                end = result_or_exception(convert, tensor, Taker, **options)
                assert isinstance(end, error) and said in str(end), (kind, options, repr(end))
                del end
                assert tensor.ledger.out == 0
        tensor.ledger.check(tensor.ledger.made)


# ---- the table in the documentation ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("producer", matrix.PRODUCERS)
def test_every_tensor_goes_in(producer):
    """With the same elements, nothing refused without a reason. The documentation's table is of Python 3.11, all frameworks."""
    for way, layout in itertools.product(matrix.WAYS, matrix.LAYOUTS):
        for dtype, readonly in matrix.cases_in(layout, way):
            found = matrix.outcome(producer, way, dtype, layout, readonly)
            assert found in (None, "zero-copy", "copy", "no elements"), (way, layout, dtype, readonly, found)
    if sys.version_info[:2] == (3, 11) and [*matrix.ALL_PRODUCERS, *matrix.ALL_WAYS] == [*matrix.PRODUCERS, *matrix.WAYS]:
        head, first, *lines = matrix.DOCUMENT.read_text().split(matrix.BEGIN)[1].split(matrix.END)[0].splitlines()
        assert [head, first] == matrix.HEAD and len(lines) == len(matrix.PRODUCERS), "python tests/interoperability.py --write"
        assert matrix.line(producer) in lines, "python tests/interoperability.py --write"
