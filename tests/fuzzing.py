"""What ``test_fuzz.py`` is made of: random arrays, how kernels report them, random DLTensors."""

import dataclasses
import functools
import gc
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import made_producers
import numba
import numpy as np
from cache_entries import cache_entries
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from made_producers import DLPACK_CODES, ONLY_NUMBA, Dunder, Ledger, Legacy, Tabled, address_of, ffi, tabled_type
from numba import types
from numba.extending import overload
from oracle import numbas

from fastexchange import fast_args, from_dlpack
from fastexchange.ground.dtype_registry import ML_DTYPES

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

# ---- what a kernel says of its arguments -----------------------------------------------------------------------------
TYPES: list = []
"""Numba types, by the number that :func:`type_number` gives."""


def type_number(x):
    """In a kernel: the number of the Numba type for which the code in use was compiled. It cannot be another's."""


@overload(type_number)
def _type_number(x):
    if x not in TYPES:
        TYPES.append(x)
    number = TYPES.index(x)
    return lambda x: number


@numba.njit
def report(x):
    """All that a kernel can see of an array without reading its memory."""
    if x.size == 0:  # pointer and strides mean nothing
        return x.shape, x.shape, np.uintp(0), x.size, x.itemsize, x.ndim
    return x.shape, x.strides, np.uintp(x.ctypes.data), x.size, x.itemsize, x.ndim


def look(x):
    return type_number(x), report(x)


def total(x):
    s = 0.0
    for value in x.flat:
        s += value
    return type_number(x), s


def type_of(view):
    """The Numba type that a kernel has to see: ``numba.typeof``'s, which takes every array for aligned, corrected.

    A kernel that Numba's own dispatcher calls sees that of ``numba.typeof``.
    """
    found = numba.typeof(view)
    return found if view.flags.aligned else types.Array(found.dtype, found.ndim, found.layout, not found.mutable, aligned=False)


def is_fast(kernel, *arguments) -> bool:
    """Whether the next call of `kernel` goes to a cache entry for arguments of these types."""
    wanted, last = [id(type(argument)) for argument in arguments], kernel._native.native.last
    return wanted in [entry.types[: len(wanted)] for entry in cache_entries(kernel) if entry.address == last]


# ---- random arrays ---------------------------------------------------------------------------------------------------
GAP = 64
"""Bytes before and behind an array, which nobody may touch; also the alignment of the memory."""


@dataclass(frozen=True)
class Spec:
    """An array to be made, over memory of its own with the same contents each time. Strides and offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    readonly: bool = False
    contents: int = 0

    def build(self) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.dtype(self.dtype)
        spans = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True) if 0 not in self.shape]
        low, high = sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + dtype.itemsize
        size = GAP + self.offset + high - low + GAP
        memory = np.empty(size + GAP, np.uint8)
        memory = memory[-memory.ctypes.data % GAP :][:size]
        generator = np.random.default_rng(self.contents)
        memory[:] = np.frombuffer(generator.bytes(size), np.uint8) & (1 if dtype.kind == "b" else 255)
        array = np.ndarray(self.shape, dtype, memory, GAP + self.offset - low, self.strides)
        if self.contents % 2:  # else, among random bits, what is special would be rare
            array[...] = generator.choice(special_values(dtype), self.shape)
        array.flags.writeable = not self.readonly
        return array, memory


def special_values(dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iub":
        info = np.iinfo(dtype) if dtype.kind != "b" else np.iinfo("u1")
        return np.array([0, 1, 2, info.min, info.max, info.max - 1]).astype(dtype)
    info = np.finfo(dtype)
    values = [0.0, -0.0, 1.0, 0.1, -2.5, math.inf, -math.inf, math.nan, info.max, info.tiny, info.smallest_subnormal]
    return np.array([complex(a, b) for a in values for b in values] if dtype.kind == "c" else values).astype(dtype)


def compact(shape, itemsize: int, order: str) -> list[int]:
    strides, step = [0] * len(shape), itemsize
    for i in range(len(shape)) if order == "F" else reversed(range(len(shape))):
        strides[i] = step
        step *= max(shape[i], 1)
    return strides


@dataclass(frozen=True)
class Kind:
    """What of an array its Numba type depends on. ``order`` A is any; it may turn out to be C or F."""

    dtype: str
    ndim: int
    order: str
    readonly: bool = False
    misaligned: bool = False


@st.composite
def specs(draw, kind: Kind, negative: bool = True, fractional: bool = False):
    """An array of this kind: any extents and strides that NumPy has, negative and fractional ones where allowed."""
    itemsize = np.dtype(kind.dtype).itemsize
    extents = st.sampled_from([2, 1, 3, 0, 4] if kind.ndim < 4 else [2, 1, 3, 0])
    shape = draw(st.tuples(*[extents] * kind.ndim))
    if kind.order != "A":
        strides = compact(shape, itemsize, kind.order)
    elif draw(st.booleans()):  # as slicing and transposing make them, and broadcasting
        strides, step = [0] * kind.ndim, itemsize
        for i in draw(st.permutations(range(kind.ndim))):
            factor = draw(st.sampled_from([1, 2, 0, 3, -1, -2] if negative else [1, 2, 0, 3]))
            strides[i] = factor * step
            step *= max(shape[i], 1) * max(abs(factor), 1)
    else:  # overlapping, mostly
        strides = [itemsize * draw(st.integers(-9 if negative else 0, 9)) for _ in shape]
    if fractional and shape and draw(st.integers(0, 3)) == 0:
        strides[draw(st.integers(0, kind.ndim - 1))] += draw(st.integers(1, 7))
    for i, extent in enumerate(shape):  # of a single element the stride means nothing
        if extent == 1 and draw(st.booleans()):
            strides[i] = itemsize * draw(st.integers(-(2**32) if negative else 0, 2**32))
    offset = draw(st.integers(1, 7)) if kind.misaligned else itemsize * draw(st.integers(0, 4))
    return Spec(kind.dtype, shape, tuple(strides), offset, kind.readonly, draw(st.integers(0, 2**16)))


# ---- random DLTensors ------------------------------------------------------------------------------------------------
VIEW = "dltensor_from_py_object_no_sync"
NAMES = {name: (DLPACK_CODES[np.dtype(name).kind], 8 * np.dtype(name).itemsize)
         for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")}  # fmt: skip
"""DLPack's codes and bits of NumPy's dtypes."""
KNOWN_DTYPES = {key: np.dtype(name) for name, key in NAMES.items()}
KNOWN_DTYPES |= {key: np.dtype(getattr(ml_dtypes, name)) for name, key in ML_DTYPES.items() if hasattr(ml_dtypes, name)}
READABLE_DEVICES = (1, 3, 11, 13)
LARGEST = 2**55
"""Elements in a tensor, and from its first to its last."""
LARGEST_OFFSET = 2**60
LOWEST_ADDRESS = 2**22
MAX_NDIM = 64

KERNEL_KINDS = {("f8", 1), ("c8", 2), ("?", 0), ("u1", 3)}
"""Dtypes and ranks of accepted tensors of which kernels are called: each is compiled for. ``from_dlpack`` takes all."""


@dataclass(frozen=True)
class Tensor:
    """Every field of a DLTensor, and of its DLManagedTensorVersioned, as a producer writes it.

    `shape` and `strides` are NULL (None) or real, and as long as any that a consumer may look at: 1 follows. `data` is
    a distance from the middle of the producer's memory if `is_real`, else an address.
    """

    code: int = 2
    bits: int = 64
    lanes: int = 1
    device_type: int = 1
    device_id: int = 0
    ndim: int = 1
    shape: tuple[int, ...] | None = (4,)
    strides: tuple[int, ...] | None = None
    is_real: bool = True
    data: int = 0
    byte_offset: int = 0
    version: tuple[int, int] = (1, 3)
    flags: int = 0
    has_deleter: bool = True

    def lies(self, memory: np.ndarray) -> dict:
        words = {"shape": self.shape, "strides": self.strides}
        words = {name: None if given is None else given + (1,) * MAX_NDIM for name, given in words.items()}
        lies = {**vars(self), **words, "data": self.pointer(memory)}
        return lies if self.has_deleter else {**lies, "deleter": ffi.NULL}

    def pointer(self, memory: np.ndarray) -> int:
        return (self.data + (memory.ctypes.data + memory.size // 2) * self.is_real) % 2**64


def is_in(memory: np.ndarray, array: np.ndarray) -> bool:
    first, end = np.lib.array_utils.byte_bounds(array)
    at = memory.ctypes.data
    return 0 < array.size <= 4096 and at <= first and end <= at + memory.size


def expected(tensor: Tensor, memory: np.ndarray, protocol: str) -> np.ndarray | None:
    """What a tensor means by DLPack's header and within this package's limits, in Python's numbers. None: refused.

    `protocol`: how it is handed over, "borrowed", "versioned" or "legacy".
    """
    if protocol == "versioned" and tensor.version[0] != 1:
        return None
    if tensor.device_type not in READABLE_DEVICES or tensor.lanes != 1:
        return None
    if not 0 <= tensor.ndim <= MAX_NDIM or (tensor.ndim and tensor.shape is None):
        return None
    shape = ((tensor.shape or ()) + (1,) * MAX_NDIM)[: tensor.ndim]
    if any(extent < 0 for extent in shape) or math.prod(extent for extent in shape if extent) > LARGEST:
        return None
    strides = tuple(compact(shape, 1, "C"))
    if tensor.strides is not None:
        strides = (tensor.strides + (1,) * MAX_NDIM)[: tensor.ndim]
        if sum(abs(stride) * (extent - 1) for extent, stride in zip(shape, strides, strict=True) if extent > 1) > LARGEST:
            return None
    if tensor.byte_offset > LARGEST_OFFSET:
        return None
    dtype = KNOWN_DTYPES.get((tensor.code, tensor.bits))
    address = (tensor.pointer(memory) + tensor.byte_offset) % 2**64
    if dtype is None or (0 not in shape and min(tensor.pointer(memory), address) < LOWEST_ADDRESS):
        return None
    readonly = {"borrowed": False, "versioned": tensor.flags % 2 == 1, "legacy": True}[protocol]
    steps = [stride * dtype.itemsize for stride in led_to(shape, strides)]
    return made_producers.array_at(dtype, shape, steps, address, readonly)


_NEAR = [2**n + more for n in (7, 16, 18, 31, 32, 40, 52, 54, 55, 56, *range(58, 63)) for more in (-1, 0, 1)]
_LIMITS = [*_NEAR, *(-word for word in _NEAR), 2**63 - 1, -(2**63), -(2**63) + 1]
WORDS = st.one_of(st.integers(-3, 6), st.sampled_from(_LIMITS), st.integers(-(2**63), 2**63 - 1))
"""Extents and strides: small ones, those around limits, any."""
UNSIGNED_WORDS = WORDS.map(lambda word: word % 2**64)
INT32 = st.one_of(st.integers(-2, 7), st.sampled_from([63, 64, 65, 2**31 - 1, -(2**31)]), st.integers(-(2**31), 2**31 - 1))
UINT32 = st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1))
DISTANCES = st.integers(-300, 300)
DTYPES = st.one_of(st.sampled_from(sorted({*NAMES.values(), *ML_DTYPES.values()})),
                   st.tuples(st.integers(0, 18), st.sampled_from([0, 1, 2, 4, 6, 8, 16, 24, 32, 64, 128])),
                   st.tuples(st.integers(0, 255), st.integers(0, 255)))  # fmt: skip


CHANGES = {
    ("code", "bits"): DTYPES,
    ("lanes",): st.sampled_from([0, 2, 4, 255, 256, 257, 65535]),
    ("device_type", "device_id"): st.tuples(UINT32, INT32),
    ("ndim",): INT32,
    ("shape",): st.one_of(st.none(), st.lists(WORDS, max_size=5).map(tuple)),
    ("strides",): st.one_of(st.none(), st.lists(WORDS, max_size=5).map(tuple)),
    ("is_real", "data"): st.tuples(st.just(False), st.one_of(st.just(0), st.integers(0, LOWEST_ADDRESS + 9))),
    ("data",): DISTANCES,
    ("byte_offset",): st.one_of(DISTANCES.map(abs), UNSIGNED_WORDS),
    ("data", "byte_offset"): st.one_of(DISTANCES, WORDS).map(lambda at: (-at, at % 2**64)),
    ("version",): st.tuples(UINT32, UINT32),
    ("flags",): st.one_of(st.integers(0, 7), UNSIGNED_WORDS),
    ("has_deleter",): st.just(False),
}
"""By the fields of a Tensor: what they become."""


@st.composite
def tensors(draw) -> Tensor:
    """A sound tensor with nothing or some things changed; now and then one of random bytes, but for the pointers."""
    if draw(st.integers(0, 9)) == 0:
        size = ffi.sizeof("DLTensor")
        raw = ffi.from_buffer("DLTensor *", draw(st.binary(min_size=size, max_size=size)))
        words = st.one_of(st.none(), st.lists(WORDS, max_size=MAX_NDIM).map(tuple))
        return Tensor(
            raw.dtype.code, raw.dtype.bits, raw.dtype.lanes, int(raw.device.device_type), raw.device.device_id, raw.ndim,
            draw(words), draw(words), draw(st.booleans()), address_of(raw.data), raw.byte_offset,
        )  # fmt: skip
    dtype, ndim = draw(st.sampled_from(sorted(KERNEL_KINDS)))
    spec = draw(specs(Kind(dtype, ndim, draw(st.sampled_from("CFA")))))
    strides = tuple(stride // np.dtype(dtype).itemsize for stride in spec.strides)
    tensor = Tensor(*NAMES[dtype], ndim=ndim, shape=spec.shape, strides=strides)
    for fields in draw(st.lists(st.sampled_from(list(CHANGES)), max_size=3)):
        value = draw(CHANGES[fields])
        tensor = dataclasses.replace(tensor, **dict(zip(fields, value if len(fields) > 1 else (value,), strict=True)))
    return tensor


PRODUCERS = {
    "view": Tabled, "export": tabled_type("Exported", **{VIEW: None}), "__dlpack__": Dunder, "legacy __dlpack__": Legacy,
}  # fmt: skip

looks, looks_unlocked, adds = fast_args(look), fast_args(look, nogil=True), fast_args(total)
looks_inside = fast_args(lambda pair: (type_number(pair[0]), report(pair[0])))
looks_beside = fast_args(lambda text, x: (type_number(x), report(x)))
BY_NUMBA = "kernel, beside what only Numba reads"
CONSUMERS = {
    "kernel": looks,
    "cached call": looks,
    "keyword": lambda tensor: looks(x=tensor),
    "kernel without the GIL": looks_unlocked,
    "kernel, in a tuple": lambda tensor: looks_inside((tensor, 1)),
    BY_NUMBA: lambda tensor: looks_beside(ONLY_NUMBA, tensor),
    "from_dlpack": from_dlpack,
    "from_dlpack, by Python": lambda tensor: from_dlpack(tensor, copy=None),
}


@functools.cache
def honest(dtype: str, ndim: int):
    tensor = Tabled(np.ones((2,) * ndim, dtype))
    looks(tensor)
    assert is_fast(looks, tensor)
    return tensor


def try_tensor(case: tuple[Tensor, str, str]) -> str:
    """Hand a tensor over: what :func:`expected` says comes of it, and nothing is lost. Returns the outcome."""
    described, producer, consumer = case
    memory, ledger = np.arange(2048).astype(np.uint8) % 251, Ledger()
    tensor = PRODUCERS[producer](memory, ledger, **described.lies(memory))
    borrows = producer == "view" and consumer in ("kernel", "cached call", "keyword", "kernel, in a tuple")
    want = expected(described, memory, "legacy" if producer == "legacy __dlpack__" else "borrowed" if borrows else "versioned")
    is_kernel = not consumer.startswith("from_dlpack")
    if want is not None and is_kernel and (want.dtype.str[1:].replace("b1", "?"), want.ndim) not in KERNEL_KINDS:
        return "not compiled"
    if consumer == "cached call":
        known = [kind for kind in KERNEL_KINDS if (*NAMES[kind[0]], kind[1]) == (described.code, described.bits, described.ndim)]
        looks(honest(*known[0] if known else ("f8", 1)))  # the next call goes to its cache entry
    outcome, held = "refused", [tensor]  # CPython 3.14 counts no reference where it lends a variable
    references = sys.getrefcount(held[0])
    try:
        got = CONSUMERS[consumer](tensor)
    except BufferError as error:
        assert want is None, f"refused, though it is {want.__array_interface__}: {error}"
        assert not is_kernel or "(position " in str(error)
    else:
        assert want is not None, f"accepted: {got!r}" if is_kernel else f"accepted: {got.__array_interface__}"
        outcome = "accepted"
        if is_kernel:
            assert TYPES[got[0]] == (numba.typeof if consumer == BY_NUMBA else type_of)(want)
            shape, strides, data, *rest = got[1]
            assert rest == [want.size, want.itemsize, want.ndim]
        else:
            shape, strides, data = got.shape, got.strides, got.ctypes.data
            assert (got.dtype, got.flags.writeable) == (want.dtype, want.flags.writeable)
            assert not want.size or got.flags.aligned == want.flags.aligned
            assert not is_in(memory, want) or got.tobytes() == want.tobytes()
        assert shape == want.shape and (not want.size or (led_to(shape, strides), data) == (want.strides, want.ctypes.data))
        del got
        if consumer == "kernel" and want.dtype.char in "di" and is_in(memory, want):
            assert adds(tensor)[1] == numbas(adds)(want)[1]
    if sys.getrefcount(held[0]) != references:  # tracebacks and their frames may hold each other
        gc.collect()
        assert sys.getrefcount(held[0]) == references
    if described.has_deleter:
        ledger.check(ledger.made)
    assert not made_producers._strays and (described.has_deleter or not ledger.deleted)
    if is_kernel:
        assert looks(honest("f8", 1))[1][0] == (2,)
    return outcome


def led_to(shape, strides):
    """The strides that lead to an element; of others, which mean nothing, 0."""
    return tuple(stride if extent > 1 else 0 for extent, stride in zip(shape, strides, strict=True))


CASES = st.tuples(tensors(), st.sampled_from(sorted(PRODUCERS)), st.sampled_from(sorted(CONSUMERS)))


def fuzz(examples: int, number: int, note: str) -> None:
    """Try `examples` random examples, always the same ones for the same `number`; print what came of them.

    Each is written to the file `note` before it is tried.
    """
    outcomes = set()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(number)
    @given(CASES)
    def run(case):
        Path(note).write_text(f"{case!r}\n")
        outcomes.add(try_tensor(case))

    run()
    print(json.dumps(sorted(outcomes)))
