"""The formats of 8 and 16 bits, by their definitions: an exact oracle of float64, which knows nothing of the package's."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from frameworks import torch
from interoperability import ml_dtypes
from nights import at_night

CALLS = 4  # the first makes the cache entry


@dataclass(frozen=True)
class Form:
    """A format by its definition: bits, those of the exponent among them, and its bias."""

    name: str
    bits: int
    exponent: int
    bias: int
    special: str
    """``IEEE``, ``fn`` (one NaN of each sign, no infinity) or ``fnuz`` (one NaN, at minus zero)."""
    dlpack: tuple[int, int]

    def __str__(self):
        return self.name

    fraction = property(lambda form: form.bits - 1 - form.exponent)
    """Bits of it."""
    word = property(lambda form: np.dtype(f"u{form.bits // 8}"))
    """The unsigned integer of its size."""
    dtype = property(lambda form: np.dtype("f2") if form.name == "float16" else np.dtype(getattr(ml_dtypes, form.name)))
    """NumPy's or ml_dtypes' dtype."""
    torch = property(lambda form: getattr(torch, form.name))
    """PyTorch's dtype."""

    @property
    def infinity(self) -> int:
        """The first positive code that is no finite number."""
        sign = 1 << self.bits - 1
        return {"IEEE": sign - (1 << self.fraction), "fn": sign - 1, "fnuz": sign}[self.special]


FORMS = [
    Form("bfloat16", 16, 8, 127, "IEEE", (4, 16)), Form("float16", 16, 5, 15, "IEEE", (2, 16)),
    Form("float8_e5m2", 8, 5, 15, "IEEE", (12, 8)), Form("float8_e4m3fn", 8, 4, 7, "fn", (10, 8)),
    Form("float8_e5m2fnuz", 8, 5, 16, "fnuz", (13, 8)), Form("float8_e4m3fnuz", 8, 4, 8, "fnuz", (11, 8)),
]  # fmt: skip
BY_NAME = {form.name: form for form in FORMS}
BFLOAT16, FLOAT8 = BY_NAME["bfloat16"], BY_NAME["float8_e4m3fn"]
of_each = pytest.mark.parametrize("form", FORMS, ids=str)
of_one = pytest.mark.parametrize("form", at_night(FORMS, BFLOAT16), ids=str)
"""Marks tests that compile much. What a format has of its own, its conversions, others have of each."""


def codes(form: Form) -> np.ndarray:
    """All codes, in order."""
    return np.arange(1 << form.bits).astype(form.word)


@functools.cache
def numbers(form: Form) -> np.ndarray:
    """The number of each code, as float64; NaN for those that are none."""
    code = np.arange(1 << form.bits)
    magnitude = code & (1 << form.bits - 1) - 1
    fraction, exponent = magnitude & (1 << form.fraction) - 1, magnitude >> form.fraction
    value = np.where(
        exponent == 0,
        np.ldexp(fraction.astype(float), 1 - form.bias - form.fraction),
        np.ldexp(1 + fraction / (1 << form.fraction), exponent - form.bias),
    )
    if form.special == "IEEE":
        value[exponent == (1 << form.exponent) - 1] = np.nan
        value[magnitude == form.infinity] = np.inf
    elif form.special == "fn":
        value[magnitude == form.infinity] = np.nan
    value[code != magnitude] *= -1
    if form.special == "fnuz":
        value[1 << form.bits - 1] = np.nan
    value.flags.writeable = False
    return value


@functools.cache
def midpoints(form: Form) -> np.ndarray:
    """The middle between each positive number and the next, as float64; the last: where overflow begins."""
    finite = numbers(form)[: form.infinity]
    beyond = 2 * finite[-1] - finite[-2]  # the number that would come next
    return (finite + [*finite[1:], beyond]) / 2


def nearest(form: Form, value: np.ndarray) -> np.ndarray:
    """The code nearest to each number, found among all: ties to even; at most the largest in ``fn``. NaN is ``nan_code``."""
    wide = np.asarray(value, np.float64)
    magnitude, sign = np.abs(wide), np.signbit(wide)
    middles = midpoints(form)
    code = np.searchsorted(middles, magnitude)  # at a tie the lower one
    tie = middles[np.minimum(code, len(middles) - 1)] == magnitude
    code += tie & (code % 2 == 1)
    if form.special == "fn":
        code = np.minimum(code, form.infinity - 1)
    found = code | sign << form.bits - 1
    if form.special == "fnuz":
        found = np.where(code == form.infinity, 1 << form.bits - 1, np.where(code == 0, 0, found))
    return np.where(np.isnan(wide), nan_code(form, value), found).astype(form.word)


def nan_code(form: Form, value: np.ndarray) -> np.ndarray:
    """What a NaN becomes: its sign and the first bits of its payload, quiet; or the format's NaN of that sign."""
    word = np.asarray(value, np.float32).view(np.uint32).astype(np.int64)
    sign = word >> 31 << form.bits - 1
    if form.special == "IEEE":
        payload = word >> 23 - form.fraction & (1 << form.fraction) - 1
        return sign | form.infinity | payload | 1 << form.fraction - 1
    return sign | form.infinity if form.special == "fn" else np.full_like(sign, 1 << form.bits - 1)


def wide_bits(form: Form) -> np.ndarray:
    """The bits of each code's float32: of NaN the sign and the payload in front. It is quiet, unless bfloat16's bits are not."""
    code = np.arange(1 << form.bits)
    with np.errstate(invalid="ignore"):
        found = numbers(form).astype(np.float32).view(np.uint32).astype(np.int64)
    sign = code >> form.bits - 1 << 31
    payload = (code & (1 << form.fraction) - 1) << 23 - form.fraction if form.special == "IEEE" else 0
    nan = sign | payload | (0x7F80_0000 if form.name == "bfloat16" else 0x7FC0_0000)
    return np.where(np.isnan(numbers(form)), nan, found).astype(np.uint32)


def edges(form: Form) -> np.ndarray:
    """Numbers of float32 at and beside each boundary of rounding and each number, of both signs, and those at the ends."""
    found = np.concatenate([midpoints(form), numbers(form)[: form.infinity]]).astype(np.float32)
    word = found.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    ends = [0, 1, 2, 0x7F_FFFF, 0x80_0000, 0x7F7F_FFFF, 0x7F80_0000]
    nans = [0x7F80_0001, 0x7FBF_FFFF, 0x7FC0_0000, 0x7FFF_FFFF, 0x7F81_2345, 0x7FA0_0000, 0x7FFF_8000, 0x7FFF_7FFF]
    word = np.concatenate([word[word >= 0], ends, nans]).astype(np.uint32)
    return np.concatenate([word, word | 0x8000_0000]).view(np.float32)


def array(form: Form, code: np.ndarray) -> np.ndarray:
    """Codes as an array of the format."""
    return np.asarray(code).astype(form.word).view(form.dtype)


def array_of(form: Form, *values: float) -> np.ndarray:
    """Numbers as an array of the format."""
    return array(form, nearest(form, np.array(values, float)))


def tensor(form: Form, code: np.ndarray):
    """Codes as a tensor of PyTorch's."""
    return torch.from_numpy(np.array(code).astype(form.word)).view(form.torch)


def tensor_of(form: Form, *values: float):
    """Numbers as a tensor of PyTorch's."""
    return tensor(form, nearest(form, np.array(values, float)))


def code_of(values) -> np.ndarray:
    """The codes of an array or a tensor of PyTorch's."""
    if torch is not None and isinstance(values, torch.Tensor):
        return values.view({1: torch.uint8, 2: torch.uint16}[values.element_size()]).numpy()
    return values.view(f"u{values.itemsize}")


def converts_as_pytorch(form: Form) -> bool:
    """Whether the installed PyTorch converts to this format as version 2.13 does: what is too large for ``fn`` saturates."""
    return torch is not None and (form.special != "fn" or torch.tensor(1e9).to(form.torch).item() == 448)


def same(form: Form, got: np.ndarray, want: np.ndarray) -> None:
    """Assert that codes are the same, or both NaN."""
    is_nan = np.isnan(numbers(form))
    differ = (got != want) & ~(is_nan[got] & is_nan[want])
    where = np.flatnonzero(differ)[:5]
    assert not differ.any(), f"{differ.sum()} differ, as {[(int(i), hex(got.flat[i]), hex(want.flat[i])) for i in where]}"
