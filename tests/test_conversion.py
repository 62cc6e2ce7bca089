"""``from_dlpack``, ``to_dlpack``, ``convert``: held against the array API standard, DLPack 1.3 and the frameworks themselves.

Sources and targets are real frameworks and producers made for the tests. Where memory lies and what a tensor holds is asked
of the frameworks, never of the package.
"""

import copy as copy_module
import ctypes
import functools
import gc
import inspect
import json
import pickle
import sys
import threading
import time
import types
import weakref

import hostile_producers as hostile
import made_producers as made
import numpy as np
import pytest
from frameworks import NUMPY_DTYPES, torch, tvm_ffi
from hostile_producers import CONTENTS, EXPORTED, FUNCTIONS, GOOD_IN_THE_END, RETURNS, Gives, GivesLegacy, Sets
from interoperability import LAYOUTS, PRODUCERS, jax, pyarrow
from interpreter import run_python
from made_producers import Dunder, Ignorant, Ledger, Legacy, Tabled, capsule_name
from oracle import references_kept, type_and_message
from test_registry import together

import fastexchange
from fastexchange import DLDevice, convert, fast_args, from_dlpack, to_dlpack
from fastexchange.ground.dlpack import DLDeviceType, ffi

ODD = {}
if torch is not None:
    from test_torch import ODD

READONLY, COPIED, PADDED = 1, 2, 4
CPU = (1, 0)


SOURCES = {
    **{producer.name.replace("`", ""): producer.make for producer in PRODUCERS if producer.is_installed},
    "exchange table": Tabled,
    "max_version ignored": Ignorant,
}
ALWAYS_READONLY = ("jax.Array", "pyarrow.Array", "bytes", "only legacy __dlpack__", "max_version ignored")
"""Immutable, or exported by legacy capsules, which cannot say that they are not."""
VECTORS = ("array.array", "bytearray", "bytes", "ctypes array", "pyarrow.Array")
"""Sources of plain vectors only; nothing is readonly there but what always is."""
COUNTED = (Tabled, Dunder, Legacy, Ignorant)
TARGETS = {
    name: getattr(module, name.rpartition(".")[2])
    for name, module in {
        "numpy.ndarray": np, "torch.Tensor": torch, "tvm_ffi.Tensor": tvm_ffi, "jax.Array": jax, "pyarrow.Array": pyarrow,
    }.items()
    if module is not None and (module is not pyarrow or hasattr(pyarrow.Array, "from_dlpack"))
}  # fmt: skip
SHAPES = {
    **LAYOUTS,
    "all strides negative": lambda a: a.reshape(3, 4)[::-1, ::-1],
    "one element of many": lambda a: a.reshape(3, 4)[1:2, 2:3],
    "five dimensions": lambda a: a.reshape(2, 1, 3, 1, 2).transpose(4, 2, 0, 3, 1),
    "empty and strided": lambda a: a.reshape(3, 4)[::2, 4:],
}


def aligned(dtype="f4") -> np.ndarray:
    """Twelve elements that JAX takes without a copy: it wants an alignment of 64 bytes."""
    size = 12 * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][:size].view(dtype)
    array[...] = np.arange(1, 13)
    return array


def tensors(source: str, dtypes=("u1", "f4"), layouts=SHAPES):
    """``(array, tensor, is_readonly)`` of each layout, dtype and mutability that the source has."""
    for layout, dtype, readonly in ((a, b, c) for a in layouts for b in dtypes for c in (False, True)):
        array = SHAPES[layout](aligned(dtype))
        array.flags.writeable = not readonly
        if readonly and source in VECTORS:
            continue
        try:
            tensor = SOURCES[source](array)
        except Exception:  # each framework says no in its own way
            continue
        yield array, tensor, readonly or source in ALWAYS_READONLY


def one(source: str):
    """An array of twelve elements and the source's tensor of it."""
    return next(tensors(source, layouts=["1-d"]))[:2]


def elements(tensor) -> np.ndarray:
    """A tensor's elements as an array, made by its own framework."""
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().numpy()
    if pyarrow is not None and isinstance(tensor, pyarrow.Array):
        return tensor.to_numpy(zero_copy_only=False)
    if tvm_ffi is not None and isinstance(tensor, tvm_ffi.Tensor):
        return np.from_dlpack(tensor)
    if isinstance(tensor, bytes):
        return np.frombuffer(tensor, "u1")
    tensor = getattr(tensor, "inner", tensor)  # of a wrapper
    return tensor.array if hasattr(tensor, "ledger") else np.asarray(tensor)


def place(tensor) -> int:
    """Where its first element lies."""
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.unsafe_buffer_pointer()
    return elements(tensor).ctypes.data


class Given:
    """An object whose ``__dlpack__`` is a function, or gives a capsule."""

    def __init__(self, give):
        self.give = give if callable(give) else lambda **_: give

    def __dlpack_device__(self):
        return CPU

    def __dlpack__(self, *, max_version=None, dl_device=None, copy=None, **_):
        return self.give(max_version=max_version, device=dl_device, copy=copy)


def versioned(tensor, **options):
    return to_dlpack(tensor, max_version=(1, 0), **options)


def managed_in(capsule):
    """The managed tensor in a capsule that nobody has taken."""
    name = capsule_name(capsule)
    kind = {b"dltensor_versioned": "DLManagedTensorVersioned *", b"dltensor": "DLManagedTensor *"}[name]
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    return ffi.cast(kind, get(capsule, name))


def end_of(call, *arguments, **keywords):
    """What a call returns, or the exception that it raises, whose frames are let go of."""
    try:
        return call(*arguments, **keywords)
    except BaseException as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error


def eventually(condition) -> bool:
    """Whether it comes true: a framework may give memory back from a thread of its own."""
    for _ in range(200):
        if condition():
            return True
        gc.collect()
        time.sleep(0.005)
    return False


CALLS = {
    "from_dlpack": from_dlpack,
    "from_dlpack, keywords": lambda x: from_dlpack(x, dtype=None, copy=None),
    "from_dlpack to the CPU": lambda x: from_dlpack(x, device="cpu"),
    "to_dlpack": versioned,
    "to_dlpack, a copy": lambda x: versioned(x, copy=True),
    "convert": lambda x: convert(x, np.ndarray),
    "convert, keywords": lambda x: convert(x, np.ndarray, copy=False),
    "convert, a copy": lambda x: convert(x, np.ndarray, copy=True),
}
"""Every way through the three functions that needs no other framework."""
CONVERSIONS = {f"to {name}": functools.partial(lambda to, x: convert(x, to), to) for name, to in TARGETS.items()}
WAYS = {"from_dlpack": from_dlpack, "to_dlpack": lambda x: np.from_dlpack(Given(versioned(x))), **CONVERSIONS}
FORMS = ({}, {}, {"copy": None}, {"copy": False})
"""Options of a call that Python code makes first, where it has to learn something, then native code, then Python code."""


@pytest.fixture(autouse=True)
def _no_strays(monkeypatch):
    """No deleter is called twice, and no function of a table while an exception is set."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of deleters; pytest's would keep the frames
    hostile.violations.clear()
    yield
    strays, made._strays[:] = made._strays[:], []
    assert not strays and not hostile.violations


# ---- from_dlpack ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "layout"), [(s, layout) for s in SOURCES for layout in SHAPES if s not in VECTORS or layout == "1-d"]
)
def test_a_view_is_the_memory(source, layout):
    seen = 0
    for _, tensor, is_readonly in tensors(source, NUMPY_DTYPES, [layout]):
        for options in ({}, {"copy": False, "device": "cpu"}):
            seen += 1
            own, view = elements(tensor), from_dlpack(tensor, **options)
            assert type(view) is np.ndarray and (view.dtype, view.shape) == (own.dtype, own.shape)
            assert view.tolist() == own.tolist() and view.flags.writeable == (not is_readonly)
            if is_readonly:
                with pytest.raises(ValueError):
                    view.flags.writeable = True
            if not view.size:
                continue
            assert place(view) == place(tensor)
            steps = zip(view.shape, view.strides, own.strides, strict=True)
            assert all(extent == 1 or step == own_step for extent, step, own_step in steps)
            for writes, reads in ((view, own), (own, view)) if not is_readonly and own.flags.writeable else ():
                first = (0,) * view.ndim
                writes[first] = not writes[first] if view.dtype == bool else writes[first] + 1
                assert reads[first] == writes[first]
    if not seen:
        pytest.skip("there are none such")


DESCRIPTIONS = {
    "no strides": lambda a: (a.reshape(3, 4), {"strides": None}),
    "no shape, no strides": lambda a: (a[:1].reshape(()), {"shape": None, "strides": None}),
    "a byte offset": lambda a: (a[3:], {"data": a.ctypes.data, "byte_offset": 3 * a.itemsize}),
    "a byte offset, strided": lambda a: (a[4::3], {"data": a.ctypes.data, "byte_offset": 4 * a.itemsize}),
    "strides that mean nothing": lambda a: (a.reshape(1, 12, 1), {"strides": (1 << 40, 1, -7)}),
    "no elements, no memory": lambda a: (a.reshape(3, 4)[:0], {"data": 0}),
    "no elements, no memory, no strides": lambda a: (a[:0], {"data": 0, "strides": None}),
    "unknown flags": lambda a: (a, {"flags": 1 << 40}),
    "a newer minor version": lambda a: (a, {"version": (1, 9)}),
    "another id of the CPU": lambda a: (a, {"device_id": 7}),
    "64 dimensions": lambda a: (a.reshape((3,) + (1,) * 62 + (4,)), {}),
    "pinned": lambda a: (a, {"device_type": int(DLDeviceType.kDLCUDAHost)}),
    "managed": lambda a: (a, {"device_type": int(DLDeviceType.kDLCUDAManaged)}),
}
"""What tensors may look like that no framework here makes; the last three are not for every framework."""


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_unusual_descriptions_are_understood(description, kind):
    for way, call in WAYS.items():
        is_numpy = way in ("from_dlpack", "to_dlpack", "to numpy.ndarray")
        for dtype in NUMPY_DTYPES if is_numpy else ("f4",):
            array, lies = DESCRIPTIONS[description](aligned(dtype))
            if not is_numpy and (description in [*DESCRIPTIONS][-3:] or (way == "to pyarrow.Array" and array.ndim != 1)):
                continue
            tensor = kind(array, **lies)
            seen = elements(call(tensor))
            assert (seen.dtype, seen.shape) == (array.dtype, array.shape) and seen.tolist() == array.tolist(), way
            assert not is_numpy or not array.size or place(seen) == place(array)
            del seen
            assert eventually(lambda tensor=tensor: not tensor.ledger.out)
            tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("source", SOURCES)
def test_dtype_is_a_demand(source):
    array, tensor = one(source)
    dtype = array.dtype
    for good in (dtype, dtype.str, dtype.name, dtype.type):
        assert place(from_dlpack(tensor, dtype=good)) == place(tensor)
    with references_kept(tensor):
        for wanted in {"f8", "i4", "i1", "f4", "u1", ">f4", "V4", "M8[s]", "O"} - {dtype.str[1:]}:
            for copy in (None, False, True):
                kind, message = type_and_message(from_dlpack, tensor, dtype=wanted, copy=copy)
                assert kind is TypeError and dtype.name in message
    assert elements(tensor).tolist() == array.tolist()


# ---- device= and copy= ---------------------------------------------------------------------------------------------

NO_DEVICES = ("gpu", "cuda", "cuda:0", "", "CPU ", "cpu:1", 1, 0, 1.5, (1,), (1, 0, 0), (), ("cpu", 0), ("1", "0"), (1, "0"),
              (1.5, 0), (None, 0), object(), {}, b"cpu", b"\1\0", True)  # fmt: skip
NO_VERSIONS = (3, 1.0, "1.0", "10", (1,), (1, 0, 0), (), ("1", "0"), ("a", "b"), (None, 1), (1.5, 0), object(), True, b"\1\0")
NO_COPIES = (1, 0, "never", 2.0, [], object())
BAD_OPTIONS = {
    "device": (NO_DEVICES, ValueError, (from_dlpack, to_dlpack, versioned)),
    "max_version": (NO_VERSIONS, ValueError, (to_dlpack,)),
    "copy": (NO_COPIES, ValueError, (from_dlpack, to_dlpack, lambda x, **options: convert(x, np.ndarray, **options))),
    "dtype": (("f4", "nonsense", object()), TypeError, (from_dlpack,)),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    (values, error, calls), wrong = BAD_OPTIONS[name], []
    for value, call, kind in ((value, call, kind) for value in values for call in calls for kind in COUNTED):
        tensor = kind(np.arange(4.0))
        end = end_of(call, tensor, **{name: value})
        if type(end) is not error or (name not in str(end) and name != "dtype"):
            wrong.append((value, call, end))
        del end
    assert not wrong
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("source", SOURCES)
def test_devices(source):
    _, tensor = one(source)
    for device in (None, "cpu", CPU, [1, 0], DLDevice(1, 0), (DLDeviceType.kDLCPU, 0), (np.int32(1), np.int64(0))):
        assert place(from_dlpack(tensor, device=device)) == place(tensor)
        capsule = versioned(tensor, device=device)  # which what is described dies with
        described = managed_in(capsule).dl_tensor
        assert (described.device.device_type, described.device.device_id) == CPU
    with references_kept(tensor):
        for device in ((2, 0), (1, 1), (13, 0), DLDevice(2, 3), (99, 0), (-1, 0)):
            assert type_and_message(from_dlpack, tensor, device=device)[0] is ValueError
            assert type_and_message(versioned, tensor, device=device)[0] in (BufferError, ValueError)


class Elsewhere(Dunder):
    """A tensor on a GPU, it says, whose framework copies it to the CPU when it is asked to."""

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is None:
            return super().__dlpack__(max_version=max_version)
        assert tuple(dl_device) == CPU and copy is not False
        return made.capsule(made.export_versioned(self.ledger, self.array.copy(), flags=COPIED), b"dltensor_versioned")


def test_a_tensor_on_another_device_is_copied_by_its_framework_if_asked_to():
    tensor = Elsewhere(np.arange(4.0), device=(2, 1), device_type=2, device_id=1)
    for options in ({}, {"copy": None}, {"copy": True}, {"dtype": "f8"}):
        view = from_dlpack(tensor, device="cpu", **options)
        assert view.tolist() == [0, 1, 2, 3] and place(view) != place(tensor) and view.flags.writeable
    for device, kind, flags in (("cpu", 1, COPIED), (None, 2, 0), ((2, 1), 2, 0), (DLDevice(2, 1), 2, 0)):
        capsule = versioned(tensor, device=device)
        assert managed_in(capsule).dl_tensor.device.device_type == kind and managed_in(capsule).flags == flags
    assert type_and_message(from_dlpack, tensor, device="cpu", dtype="f4")[0] is TypeError
    for call, device in ((from_dlpack, "cpu"), (versioned, "cpu"), (versioned, (2, 0))):
        assert type_and_message(call, tensor, device=device, copy=False)[0] is BufferError
    del view, capsule
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("source", SOURCES)
def test_copies_are_copies(source):
    for array, tensor, _ in tensors(source, ("u1", "f4", "c8")):
        want = elements(tensor).tolist()
        capsule, legacy = versioned(tensor, copy=True), to_dlpack(tensor, copy=True)  # a copy is writeable: legacy will do
        assert managed_in(capsule).flags == COPIED and capsule_name(legacy) == b"dltensor"
        for copied in (from_dlpack(tensor, copy=True), convert(tensor, np.ndarray, copy=True), np.from_dlpack(Given(capsule))):
            assert copied.dtype == array.dtype and copied.tolist() == want
            assert copied.flags.writeable and not np.may_share_memory(copied, elements(tensor))
            copied[...] = 0
        assert elements(tensor).tolist() == want


@pytest.mark.parametrize(("code", "bits", "lanes"), [(99, 16, 1), (4, 16, 2), (17, 4, 2), (2, 32, 2)])
def test_a_copy_has_the_bits_of_what_numpy_has_no_dtype_for(code, bits, lanes):
    array = np.arange(12, dtype=f"u{bits * lanes // 8}").reshape(3, 4)[:, ::2]
    for kind in (Tabled, Dunder, Legacy):
        tensor = kind(array, code=code, bits=bits, lanes=lanes)
        capsule = versioned(tensor, copy=True)
        copied = managed_in(capsule)
        assert tensor.ledger.out == 0 and copied.flags == COPIED and copied.dl_tensor.data != ffi.NULL
        dtype = copied.dl_tensor.dtype
        assert (dtype.code, dtype.bits, dtype.lanes) == (code, bits, lanes)
        dtype.code, dtype.bits, dtype.lanes = 1, bits * lanes, 1
        assert from_dlpack(Given(capsule)).tolist() == array.tolist()
        assert type_and_message(from_dlpack, tensor, copy=True)[0] is BufferError
        tensor.ledger.check(2)


def test_a_copy_of_elements_without_an_integer_of_their_width():
    for lies in ({"code": 99, "bits": 128}, {"lanes": 4}, {"code": 0, "bits": 4}):
        tensor = Tabled(np.arange(4.0), **lies)
        assert type_and_message(versioned, tensor, copy=True)[0] is BufferError
        tensor.ledger.check(1)


# ---- to_dlpack -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_capsules_say_what_they_hold(source):
    for array, tensor, is_readonly in tensors(source, layouts=["1-d"]):
        for copy in (None, False):
            capsules = [to_dlpack(tensor, max_version=v, copy=copy) for v in ((1, 0), (1, 3), (1, 99), (2, 0), [1, 1])]
            for capsule in capsules:
                managed = managed_in(capsule)
                assert capsule_name(capsule) == b"dltensor_versioned" and managed.flags == is_readonly * READONLY
                assert managed.version.major == 1 and managed.version.minor <= 3
            for max_version in (None, (0, 8), (0, 99), (0, 0)):
                capsule = end_of(to_dlpack, tensor, max_version=max_version, copy=copy)
                if is_readonly:
                    assert type(capsule) is BufferError and "readonly" in str(capsule)
                else:
                    assert capsule_name(capsule) == b"dltensor"
                    capsules.append(capsule)
            for capsule in capsules:
                described = managed_in(capsule).dl_tensor
                assert made.address_of(described.data) + described.byte_offset == place(tensor)
                assert described.dtype.code == {"u": 1, "f": 2}[array.dtype.kind] and described.dtype.lanes == 1
                assert described.dtype.bits == 8 * array.itemsize and described.device.device_type == 1
                assert (described.ndim, described.shape[0]) == (1, 12)
                assert described.strides == ffi.NULL or described.strides[0] == 1


@pytest.mark.parametrize("flags", [0, READONLY, COPIED, READONLY | COPIED, PADDED])
def test_flags_of_a_producer_are_passed_on(flags):
    for kind in (Tabled, Dunder):
        tensor = kind(np.arange(4.0), flags=flags)
        assert managed_in(versioned(tensor)).flags == flags
        assert from_dlpack(tensor).flags.writeable == (not flags & READONLY)
        tensor.ledger.check(2)


def exporter(tensor):
    return Given(functools.partial(to_dlpack, tensor))


CONSUMERS = {
    "numpy": (np, lambda x: np.from_dlpack(exporter(x))),
    "numpy, a legacy capsule": (np, lambda x: np.from_dlpack(Given(to_dlpack(x)))),
    "numpy, the CPU": (np, lambda x: np.from_dlpack(exporter(x), device="cpu", copy=False)),
    "from_dlpack, a legacy capsule": (np, lambda x: from_dlpack(Given(to_dlpack(x)))),
    "torch": (torch, lambda x: torch.from_dlpack(exporter(x))),
    "torch, a capsule": (torch, lambda x: torch.from_dlpack(versioned(x))),
    "torch, a legacy capsule": (torch, lambda x: torch.from_dlpack(to_dlpack(x))),
    "tvm_ffi": (tvm_ffi, lambda x: tvm_ffi.from_dlpack(exporter(x))),
    "tvm_ffi, a capsule": (tvm_ffi, lambda x: tvm_ffi.from_dlpack(versioned(x))),
    "tvm_ffi, a legacy capsule": (tvm_ffi, lambda x: tvm_ffi.from_dlpack(to_dlpack(x))),
    "jax": (jax, lambda x: jax.dlpack.from_dlpack(exporter(x))),
}


@pytest.mark.parametrize("consumer", [name for name, (module, _) in CONSUMERS.items() if module is not None])
def test_capsules_are_consumed(consumer):
    for kind in (Tabled, Dunder):
        tensor = kind(aligned())
        with references_kept(tensor.array):
            result = CONSUMERS[consumer][1](tensor)
            assert elements(result).tolist() == tensor.array.tolist() and place(result) == place(tensor)
            assert tensor.ledger.out == 1
            del result
            assert eventually(lambda tensor=tensor: tensor.ledger.out == 0)
        tensor.ledger.check(1)


def test_a_capsule_is_consumed_once():
    tensor = Tabled(np.arange(4.0))
    capsule = versioned(tensor)
    view = from_dlpack(Given(capsule))
    assert capsule_name(capsule) == b"used_dltensor_versioned"
    for call in CALLS.values():
        kind, message = type_and_message(call, Given(capsule))
        assert kind is BufferError and "used_dltensor_versioned" in message
        assert type_and_message(call, capsule)[0] is TypeError  # a capsule is not a tensor
    del capsule, view
    tensor.ledger.check(1)


@pytest.mark.parametrize("source", SOURCES)
def test_a_capsule_that_nobody_takes_gives_its_tensor_back(source):
    array, tensor = one(source)
    with references_kept(array, tensor):
        for options in ({"max_version": (1, 0)}, {}, {"max_version": (1, 3), "device": "cpu"}, {"copy": True}):
            end_of(to_dlpack, tensor, **options)
            held = [end_of(to_dlpack, tensor, **options)]
            thread = threading.Thread(target=held.clear)  # a capsule may die anywhere
            thread.start()
            thread.join()
    assert elements(tensor).tolist() == array.tolist()
    if hasattr(tensor, "ledger"):
        tensor.ledger.check(8)


# ---- convert: every pair -------------------------------------------------------------------------------------------


def jax_misreads(array) -> bool:
    """Whether JAX itself takes an array for another one; old ones do, in column-major order."""
    seen = end_of(lambda: np.asarray(jax.dlpack.from_dlpack(array)))
    return isinstance(seen, np.ndarray) and not np.array_equal(seen, array)


@pytest.mark.parametrize("source", SOURCES)
def test_every_pair(source):
    wrong = []
    for array, tensor, is_readonly in tensors(source, ("?", "u1", "f4", "c8")):
        own = elements(tensor)
        for target, to in TARGETS.items():
            is_one = isinstance(tensor, to)
            must_copy = not is_one and (
                (is_readonly and target in ("torch.Tensor", "tvm_ffi.Tensor"))
                or (min(own.strides, default=0) < 0 and target == "torch.Tensor")
            )
            for options in (*FORMS, {"copy": True}) if target != "jax.Array" or not jax_misreads(array) else ():
                result, copy = end_of(convert, tensor, to, **options), options.get("copy")
                if isinstance(result, Exception):
                    is_right = isinstance(result, BufferError) and copy is False and (must_copy or target == "jax.Array")
                    is_right |= target == "pyarrow.Array" and (array.ndim != 1 or array.dtype.kind in "bc" or copy is False)
                else:
                    seen = elements(result)
                    is_right = isinstance(result, to) and (seen.dtype, seen.tolist()) == (own.dtype, own.tolist())
                    is_right &= (copy is True or not is_one or result is tensor) and not (copy is False and must_copy)
                    is_right &= copy is not False or not own.size or place(result) == place(tensor)
                    is_right &= not (copy or must_copy) or not np.may_share_memory(seen, own)
                    is_right &= to is not np.ndarray or result.flags.writeable == (copy is True or not is_readonly)
                if not is_right:
                    wrong.append((target, array.shape, array.strides, array.dtype.str, is_readonly, options, result))
    assert not wrong


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
@pytest.mark.parametrize("dtype", ["i8", "u8", "f8", "c16"])
def test_what_jax_narrows_is_not_called_shared(dtype):
    """JAX has 32 bits unless it is told otherwise, so these are copies."""
    array = aligned(dtype)
    result = end_of(convert, array, jax.Array, copy=False)
    assert isinstance(result, BufferError) or place(result) == place(array)
    assert np.asarray(convert(array, jax.Array)).tolist() == array.tolist()


# ---- convert: types ------------------------------------------------------------------------------------------------


class OwnArray(np.ndarray):
    pass


class OwnTensor(torch.Tensor if torch is not None else object):
    pass


NO_TYPES = (int, float, bool, str, list, tuple, dict, type, type(None), bytes, bytearray, memoryview, np.generic, np.float64,
            np.dtype, Exception, Ledger, Dunder, type(np), DLDevice, 3, "numpy.ndarray", None,
            (np.ndarray,), np.dtype("f4"), np, len, np.zeros(2), np.ndarray | None, list[int])  # fmt: skip
NO_TENSORS = (3, 1.5, None, "abc", [1.0], (1,), {}, object(), int, np.float64(3), np.dtype("f4"), len, np.ndarray,
              np.ma.array([1.0, 2.0], mask=[False, True]))  # fmt: skip
SUBCLASSES = [OwnArray, np.memmap, np.recarray, np.ma.MaskedArray]
INSTANCES = [np.arange(4.0), np.arange(4.0).view(OwnArray), np.rec.array(np.arange(3.0))]
if torch is not None:
    SUBCLASSES += [OwnTensor, torch.nn.Parameter, torch.nn.Buffer, torch.nn.UninitializedParameter]
    INSTANCES += [torch.ones(3), torch.ones(3).as_subclass(OwnTensor), torch.nn.Parameter(torch.ones(3), False)]
if pyarrow is not None:
    SUBCLASSES += [pyarrow.DoubleArray, pyarrow.Int32Array]
if jax is not None:
    INSTANCES += [jax.numpy.ones(3)]


@pytest.mark.parametrize("to", NO_TYPES, ids=lambda to: getattr(to, "__name__", repr(to))[:20])
def test_what_is_no_type_of_tensors(to):
    for x in (np.arange(3.0), Tabled(np.arange(3.0)), Dunder(np.arange(3.0))):
        for options in (*FORMS, {"copy": True}):
            end = end_of(convert, x, to, **options)
            assert type(end) is TypeError or (end is x and type(x) is to and not options.get("copy")), (end, options)


@pytest.mark.parametrize("x", NO_TENSORS, ids=lambda x: repr(x)[:20])
def test_what_is_no_tensor(x):
    for call in (*CALLS.values(), *CONVERSIONS.values(), lambda x: convert(x, type(x))):
        assert type_and_message(call, x)[0] is TypeError


@pytest.mark.parametrize("to", SUBCLASSES, ids=lambda to: to.__name__)
def test_subclasses_as_targets(to):
    """The result is what was asked for, or there is none."""
    for x in (*INSTANCES, Tabled(np.arange(4.0)), Dunder(np.arange(4.0)), bytearray(b"abc")):
        for options in (*FORMS, {"copy": True}):
            end = end_of(convert, x, to, **options)
            assert isinstance(end, (to, TypeError, BufferError, ValueError)), (type(end), type(x), options)


@pytest.mark.parametrize("x", INSTANCES, ids=lambda x: type(x).__name__)
def test_instances_of_subclasses(x):
    """They are of their base's type already, however the call is written; so is what a framework makes of its own type."""
    assert type(from_dlpack(x)) is np.ndarray and place(from_dlpack(x)) == place(x)
    for to in (type(x), *[to for to in TARGETS.values() if isinstance(x, to)]):
        ends = [end_of(convert, x, to, **options) for options in FORMS]
        assert all(isinstance(end, to) and place(end) == place(x) for end in ends)
        assert len({(type(end), end is x) for end in ends}) == 1 and (to is not type(x) or ends[0] is x), list(map(type, ends))
        copied = end_of(convert, x, to, copy=True)
        assert isinstance(copied, TypeError) or (place(copied) != place(x) and copied.tolist() == x.tolist())


@pytest.fixture
def program(monkeypatch):
    """A module of a user's, with a class of tensors."""
    module = types.ModuleType("program_of_a_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.Tensor = type("Tensor", (Dunder,), {"__module__": module.__name__})
    return module


def test_a_from_dlpack_that_a_program_has_imported_is_not_that_of_its_tensors(program):
    program.from_dlpack = np.from_dlpack
    kind, message = type_and_message(convert, np.arange(3.0), program.Tensor)
    assert kind is TypeError and "no from_dlpack" in message
    assert type(fast_args(lambda x: x * 2)(program.Tensor(np.arange(3.0)))) is np.ndarray


def test_a_from_dlpack_of_its_own(program):
    def from_dlpack(x):
        return cls(np.from_dlpack(x))

    from_dlpack.__module__ = program.__name__
    program.from_dlpack = from_dlpack
    derived = type("Derived", (program.Tensor,), {"__module__": "another_program"})
    array = np.arange(3.0)
    for cls in (program.Tensor, derived):
        made = convert(array, cls)
        assert type(made) is cls and place(made) == place(array)
        doubled = fast_args(lambda x: x * 2)(made)
        assert type(doubled) is cls and doubled.array.tolist() == [0, 2, 4]


# ---- lifetime ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_source_and_result_live_apart(source, way):
    call, (array, tensor) = WAYS[way], one(source)
    want, at, owner, ledger = array.tolist(), place(array), weakref.ref(array), getattr(tensor, "ledger", Ledger())
    call(tensor)  # what is learnt at the first call stays
    with references_kept(array, tensor):
        for _ in range(4):
            call(tensor)
        assert eventually(lambda: not ledger.out)
    assert elements(tensor).tolist() == want  # the results are gone, the source is not
    result = call(tensor)
    is_shared = place(result) == place(tensor)
    assert is_shared or source in ALWAYS_READONLY or way in ("to jax.Array", "to pyarrow.Array")
    del tensor, array
    _ = [np.full(12, 7, "f4") for _ in range(20)]  # what takes the memory, were it free
    assert elements(result).tolist() == want and (owner() is not None or place(result) != at)
    assert eventually(lambda: ledger.out == (ledger.made > 0 and is_shared))
    del result
    assert eventually(lambda: owner() is None)
    ledger.check(ledger.made)


# ---- targets made for the tests ------------------------------------------------------------------------------------

_taking: list = []


@ffi.callback("int(DLManagedTensorVersioned *, void **)", error=-1)
def _take(managed, out):
    return hostile._do(_taking[-1], managed, out)


Taker = made.tabled_type("Taker", managed_tensor_to_py_object_no_sync=hostile._native(_take, 1))


def give(out, thing) -> int:
    """Put a new reference into `out`, as the table's function does."""
    out[0] = ffi.cast("void *", hostile._new_reference(thing))
    return 0


def give_something_else(managed, out) -> int:
    managed.deleter(managed)
    return give(out, [])


def fail(error, *_):
    raise error


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "exchange table"])
def test_a_target_sees_the_flags(source):
    """Those of the source, readonly also where that cannot say; none of the package's own."""
    held: list = []

    def take(managed, out):
        held.append((managed, managed.flags))
        memory = ffi.buffer(ffi.cast("char *", managed.dl_tensor.data), 12 * managed.dl_tensor.dtype.bits // 8)
        return give(out, Taker(np.frombuffer(memory, {8: "u1", 32: "f4"}[managed.dl_tensor.dtype.bits])))

    _taking.append(take)
    for _, tensor, is_readonly in tensors(source, layouts=["1-d"]):
        for options in FORMS:
            result = convert(tensor, Taker, **options)
            assert type(result) is Taker and place(result) == place(tensor) and held[-1][1] == READONLY * is_readonly
        assert place(convert(tensor, Taker, copy=True)) != place(tensor) and held[-1][1] in (0, COPIED)
    for managed, _ in held:
        managed.deleter(managed)


TAKES = {
    "refuses": (lambda managed, out: -1, BufferError, ""),
    "refuses in words": (functools.partial(fail, BufferError("no such tensors here")), BufferError, "no such tensors here"),
    "fails": (functools.partial(fail, PermissionError("not today")), PermissionError, "not today"),
    "gives nothing": (lambda managed, out: 0, BufferError, ""),
    "gives another type": (give_something_else, (TypeError, BufferError), ""),
    "gives and fails": (lambda *both: fail(Sets(give_something_else(*both), ValueError, ValueError("made"))), ValueError, "made"),
}


@pytest.mark.parametrize("name", TAKES)
def test_a_target_that_fails(name):
    act, error, words = TAKES[name]
    _taking.append(act)
    for kind in (Tabled, Dunder, Legacy):
        tensor = kind(np.arange(12.0))
        with references_kept(tensor, tensor.array):
            for options in (*FORMS, {"copy": True}):
                end = end_of(convert, tensor, Taker, **options)
                assert isinstance(end, error) and words in str(end), (kind, options, repr(end))
                del end
                assert tensor.ledger.out == 0
        tensor.ledger.check(tensor.ledger.made)


# ---- errors --------------------------------------------------------------------------------------------------------

Exported = hostile.hostile_type("Exported", **{hostile.VIEW: None})
LIES = {**CONTENTS, **EXPORTED}
ERRORS = [
    BufferError("busy"), ValueError("no"), TypeError("not so"), RuntimeError("broken"), KeyError("key"), OSError(5, "disk"),
    MemoryError(), StopIteration(3), RecursionError("deep"), KeyboardInterrupt(), SystemExit(3), NotImplementedError(),
    AttributeError("no such"), hostile.Odd(1, 2, third=3),
]  # fmt: skip


def check_usable(tensor):
    """Nothing is out, and the producer goes on working."""
    gc.collect()
    assert tensor.ledger.out == 0
    tensor.behaves = True
    assert from_dlpack(tensor).tolist() == tensor.array.tolist() and np.from_dlpack(Given(versioned(tensor))).size == 4
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_producers_whose_function_misbehaves(name):
    act, want = FUNCTIONS[name]
    tensor = Exported(export=act)
    with references_kept(tensor, tensor.array):
        for call in CALLS:
            kind = type(end_of(CALLS[call], tensor))
            assert kind in (want if isinstance(want, tuple) else (want,)), call
            assert tensor.ledger.out == 0, call
    check_usable(tensor)


@pytest.mark.parametrize("name", RETURNS)
def test_producers_that_return_no_capsule(name):
    for tensor in (Gives(RETURNS[name]), GivesLegacy(RETURNS[name])):
        for call in CALLS.values():
            kind, message = type_and_message(call, tensor)
            assert kind is BufferError and "__dlpack__" in message, (kind, message)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_exceptions_of_producers_arrive_unchanged(error):
    act = functools.partial(fail, error)
    tensor = Exported(export=act)
    for producer in (Gives(act), GivesLegacy(act), tensor):
        for name, call in {**CALLS, **CONVERSIONS}.items():
            assert end_of(call, producer) is error, name
    check_usable(tensor)


def group_of(name: str) -> str:
    word = name.split()[0]
    return word if word in ("device", "ndim", "code", "negative", "too", "no", "a", "major") else "other"


def is_among(end, want) -> bool:
    """Whether a call may end so: with one of these exceptions, or with a result where there is a value for one."""
    wanted = want if isinstance(want, tuple) else (want,)
    if isinstance(end, BaseException):
        return isinstance(end, tuple(one for one in wanted if isinstance(one, type)))
    return any(not isinstance(one, type) for one in wanted)


@pytest.mark.parametrize("kind", [Exported, Dunder, Legacy], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("group", sorted({group_of(name) for name in LIES}))
def test_lies(group, kind):
    """Refused by all, by its name. A capsule may hold what is on another device, or of a dtype that NumPy does not have."""
    wrong = []
    for name, (lies, want, word) in LIES.items():
        tensor = kind(np.arange(4.0), **lies)
        for call in CALLS if group_of(name) == group and (kind is not Legacy or name in CONTENTS) else ():
            end = end_of(CALLS[call], tensor)
            held = {"code", "bits", "lanes", *(("device_type",) if call == "to_dlpack" else ())}
            may_hold = call.startswith("to_dlpack") and held & set(lies)
            if isinstance(end, BaseException):
                is_right = is_among(end, want) and any(one in str(end) for one in (word, "not on the CPU", "unknown to DLPack"))
            else:
                is_right = is_among(end, want) or may_hold
            if not is_right:
                wrong.append((name, call, repr(end)))
            del end
            if tensor.ledger.out and "no deleter" not in name:
                wrong.append((name, call, "not given back"))
    assert not wrong


@pytest.mark.parametrize("make", GOOD_IN_THE_END, ids=[*map(vars(type)["__name__"].__get__, GOOD_IN_THE_END)])
def test_strange_producers_that_are_good_in_the_end(make):
    tensor = make(np.arange(4.0))
    for way, call in [*WAYS.items()] * 2:
        assert elements(call(tensor)).tolist() == [0, 1, 2, 3], way
    assert eventually(lambda: tensor.ledger.out == 0)


@pytest.mark.parametrize(
    "array",
    [np.zeros(3, "O"), np.zeros(3, "S4"), np.zeros(3, "M8[s]"), np.zeros(3, [("a", "f4")]), np.zeros(3, ">f4"), np.zeros(3, "U2"),
     np.zeros(3, [("a", "u1"), ("b", "f4")])["b"], np.ndarray((2,), "f4", bytes(20), strides=(5,))],
    ids=["objects", "bytes", "dates", "records", "swapped", "text", "packed", "odd strides"],
)  # fmt: skip
def test_arrays_that_dlpack_has_no_words_for(array):
    """A conversion that may copy takes those whose elements DLPack has a name for, and which it cannot place."""
    has_name = array.dtype.kind == "f"
    with references_kept(array):
        for name, call in {**CALLS, **CONVERSIONS}.items():
            end = end_of(call, array)
            if isinstance(end, BufferError):
                assert not (has_name and name.startswith("to ")), name
            elif not isinstance(end, np.ndarray):
                assert has_name and name.startswith(("convert", "to ")), name
                assert elements(end).tolist() == array.tolist()
            del end


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("copy", [None, True, False])
def test_a_copy_where_dlpack_has_no_words_for_the_place(copy):
    packed = np.zeros(3, [("a", "u1"), ("b", "f4")])["b"]
    packed[:] = [1, 2, 3]
    for array in (packed, packed.astype(">f4")):
        if copy is False:
            with pytest.raises(BufferError):
                convert(array, torch.Tensor, copy=copy)
        else:
            assert convert(array, torch.Tensor, copy=copy).tolist() == [1, 2, 3]


# ---- errors of frameworks, in a process of their own ---------------------------------------------------------------


def print_ends(start: int) -> None:
    """How each conversion of a lying tensor into each framework ends, a line of JSON before and one after."""
    for number, (target, name) in enumerate((target, name) for target in TARGETS for name in LIES):
        for options in ({}, {"copy": False}) if number >= start else ():
            print(json.dumps([number, target, name, str(options)]), flush=True)
            tensor = Exported(np.arange(4.0), **LIES[name][0])
            end = end_of(convert, tensor, TARGETS[target], **options)
            if isinstance(end, BaseException):
                line = ["error", isinstance(end, (BufferError, TypeError, ValueError)), repr(end)[:400]]
            elif {"code", "bits", "lanes", "device_type"} & set(LIES[name][0]):  # perhaps one that the framework has
                line = ["result", None, ""]
            else:
                line = ["result", float(elements(end).sum()), ""]
            del end
            is_kept = "no deleter" in name or eventually(lambda tensor=tensor: not tensor.ledger.out)
            print(json.dumps([*line, is_kept and not made._strays]), flush=True)
            made._strays.clear()


@pytest.fixture(scope="module")
def framework_ends():
    """By target: (name of the lie, options, how it ended, or None where that was the end of the process)."""
    ends, start = {target: [] for target in TARGETS}, 0
    while start < len(TARGETS) * len(LIES):
        done = run_python("import sys, test_conversion; test_conversion.print_ends(int(sys.argv[1]))", str(start), check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert done.returncode == 0 or (done.returncode < 0 and len(lines) % 2), done.stderr[-3000:]
        lines += [None] * (len(lines) % 2)
        for (number, target, name, options), end in zip(lines[::2], lines[1::2], strict=True):
            ends[target].append((name, options, end))
            start = number + 1
    return ends


@pytest.mark.parametrize("target", TARGETS)
def test_lies_to_frameworks(framework_ends, target):
    """What cannot be is refused, never followed; what a framework knows and NumPy does not may pass."""
    wrong = []
    for name, options, end in framework_ends[target]:
        what, value, text, is_kept = end or ("crash", None, "", True)
        _, want, word = LIES[name]
        numbers = [one for one in (want if isinstance(want, tuple) else (want,)) if not isinstance(one, type)]
        is_right = value if what == "error" else value is None or (numbers and value in (*numbers, 6.0))
        is_right = is_right and (what != "error" or target != "torch.Tensor" or word in text)
        if not is_right or not is_kept or what == "crash":
            wrong.append((name, options, what, value, text, is_kept))
    assert not wrong
    assert {name for name, *_ in framework_ends[target]} == set(LIES)


# ---- PyTorch's tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD)
def test_odd_torch_tensors_are_refused(name):
    tensor, wrong = ODD[name], []
    with references_kept(tensor):
        for way, call in {**CALLS, **CONVERSIONS}.items():
            kind = type(end_of(call, tensor))
            if not (issubclass(kind, (BufferError, RuntimeError)) or (way == "to torch.Tensor" and kind is type(tensor))):
                wrong.append((way, kind))
    assert not wrong
    assert convert(tensor, torch.Tensor) is tensor is convert(tensor, torch.Tensor, copy=False)
    assert isinstance(end_of(convert, tensor, torch.Tensor, copy=True), (BufferError, RuntimeError))


@pytest.mark.parametrize("name", [name for name in ODD if "grad" in name or name == "non-leaf"])
def test_gradients_are_taken_while_grad_mode_is_off(name):
    tensor = ODD[name]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for way, call in WAYS.items():
                if tensor.ndim == 1 or way != "to pyarrow.Array":
                    assert place(call(tensor)) == tensor.data_ptr() or way == "to jax.Array"
            assert convert(tensor, torch.Tensor) is tensor
    kind, message = type_and_message(from_dlpack, tensor)
    assert kind is BufferError and "detach" in message


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_legacy_capsule_does_not_make_pytorchs_memory_readonly():
    class Old(torch.Tensor):
        def __dlpack__(self, **keywords):
            return torch._C._to_dlpack(self.as_subclass(torch.Tensor))

    old = torch.ones(3).as_subclass(Old)
    for call in (from_dlpack, lambda x: from_dlpack(x, copy=None), WAYS["to_dlpack"], WAYS["to numpy.ndarray"]):
        for _ in range(2):
            assert place(call(old)) == old.data_ptr() and call(old).flags.writeable
    assert capsule_name(to_dlpack(old)) == b"dltensor"


# ---- the functions themselves --------------------------------------------------------------------------------------

SIGNATURES = {
    from_dlpack: "(x, /, *, dtype=None, device=None, copy=None)",
    to_dlpack: "(x, /, *, max_version=None, device=None, copy=None)",
    convert: "(x, to, /, *, copy=None)",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_they_behave_like_functions(function):
    name, signature = function.__name__, inspect.signature(function)
    assert function.__qualname__ == name and name in repr(function) and inspect.getdoc(function) and callable(function)
    assert getattr(fastexchange, name) is function is getattr(sys.modules[function.__module__], name)
    for again in (pickle.loads(pickle.dumps(function)), copy_module.copy(function), copy_module.deepcopy(function)):
        assert again is function is weakref.ref(function)()
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == SIGNATURES[function]
    namespace: dict = {}
    exec(f"def {name}{SIGNATURES[function]}: pass", namespace)
    array = np.arange(3.0)
    good = (array, np.ndarray) if function is convert else (array,)
    for arguments, keywords in [
        ((), {}), (good[:-1], {}), ((*good, array), {}), (good + (array,) * 7, {}), (good, {"other": 1}), ((), {"x": array}),
        (good[:-1], {"to": np.ndarray}), (good, {"x": array}), (good, {"copy": None, "nothing": 1}),
    ]:  # fmt: skip
        with references_kept(array):  # in the words of Python for a function of the same signature
            assert type_and_message(function, *arguments, **keywords) == type_and_message(namespace[name], *arguments, **keywords)


def test_many_threads():
    ledger, array = Ledger(), aligned()

    def work(number):
        kind = COUNTED[number % len(COUNTED)]
        fresh = type(f"Fresh{number}", (kind,), {})
        for turn in range(40):
            tensor = (fresh if turn % 2 else kind)(array, ledger)
            assert place(from_dlpack(tensor)) == place(convert(tensor, np.ndarray, copy=False)) == place(array)
            for call in CONVERSIONS.values():
                assert elements(call(tensor)).tolist() == array.tolist()
            assert type_and_message(from_dlpack, tensor, dtype="i4")[0] is TypeError
            versioned(tensor)

    assert together(8, work) == [None] * 8
    assert eventually(lambda: ledger.out == 0)
    ledger.check(ledger.made)
