"""Random tensors of every framework on every path, against plain ``@njit``; random bytes, against a model in Python.

    pytest -m "not nightly" tests/exchange/test_fuzz.py                                 # a few hundred examples, always the same
    pytest -m "not nightly" tests/exchange/test_fuzz.py --hypothesis-profile=nightly    # more than 50,000

What fails is printed as a case, for example ``OneTensor(...)``, which ``check_one_tensor`` checks by itself: that is to become
a test with a name. Should a process crash, its case is among the temporary files, in ``fastexchange-fuzz-<its id>.txt``.
"""

import gc
import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frameworks
import fuzzing
import numba
import numpy as np
import pytest
from counting import end_of, is_exception, kept, no_violations
from exchanges import ATTRIBUTE, OLDER, Sub, Wrapper
from forked import fork_python
from fuzzing import TYPES, VIEW, Kind, Spec, is_fast, specs, type_number, type_of
from hostile_producers import EXPORT, Hostile
from hostile_ways import kind_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_producers import Dunder, Ledger, Tabled, WithMethods, exchange_table, ffi, tabled_type
from numpy.lib.stride_tricks import as_strided
from oracle import new_kernel, numbas
from test_hostile_tables import OURS, REQUIRED, check_ends, held

from fastexchange import FastKernel, exchange_api, fast_args

assert no_violations  # a fixture
EXAMPLES = settings.default.max_examples
"""The profile's share of examples; each fuzzer takes some of them."""
IS_NIGHTLY = EXAMPLES > 1000
LAST = Path(tempfile.gettempdir(), f"fastexchange-fuzz-{os.getpid()}.txt")


@dataclass(frozen=True)
class Source:
    """A kind of tensor: how one is made of an array, what plain Numba takes in its place, and of which arrays there are some."""

    name: str
    make: Callable[[np.ndarray], Any]
    takes: Callable[[Kind], bool] = lambda kind: True
    view: Callable[[Any, np.ndarray], Any] = lambda tensor, array: array
    negative: bool = True
    fractional: bool = False
    """Strides that are no multiple of the item size."""


def _split(cls, by: int):
    """Tensors whose ``data`` is `by` bytes before the first element, and the rest ``byte_offset``."""
    return lambda array: cls(array, data=array.ctypes.data - by, byte_offset=by)


SOURCES = [
    *(Source(each.name, each.tensor, lambda kind, each=each: each.readonly or kind.readonly is not each.mutable,
             each.view, each.negative_strides, each.name == "numpy") for each in frameworks.FRAMEWORKS),
    Source("behind a newer exchange table", tabled_type("Newer", version=(2, 0), prev=exchange_table()),
           lambda kind: not kind.readonly),
    Source("exchange table with a byte offset", _split(Tabled, 24), lambda kind: not kind.readonly),
    Source("exchange table of pinned memory", lambda array: Tabled(array, device_type=3, device_id=1),
           lambda kind: not kind.readonly),
    Source("subclass of ndarray", lambda array: array.view(Sub), view=lambda tensor, array: tensor, fractional=True),
    Source("exchange table, NULL strides", lambda array: Tabled(array, strides=None),
           lambda kind: kind.order == "C" and not kind.readonly,
           # which has the strides that it has to have where there is but one element, too
           lambda tensor, array: as_strided(array, strides=fuzzing.compact(array.shape, array.itemsize, "C"))),
    Source("exchange table without views", tabled_type("Exporting", **{VIEW: None})),
    Source("__dlpack__, byte offset", _split(Dunder, 4096)),
    Source("wrapper", lambda array: Wrapper(Tabled(array))),
]  # fmt: skip
BY_NAME = {source.name: source for source in SOURCES}
PATHS = ("first call", "cached call", "keywords", "another tensor's cached call")
GROUPS = {
    # name: (what is drawn for a source, shares of the examples)
    "one tensor": (lambda source: calls_with_one(source, tuple(READERS)), 6),
    # one of the same type, dtype and rank, but not the same layout
    PATHS[-1]: (lambda source: calls_with_one(source, ("look",), range(4), PATHS[-1:]), 2),
    "writing": (lambda source: calls_with_one(source, ("rotate",)), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=BY_NAME)
@pytest.mark.parametrize(("calls", "shares"), GROUPS.values(), ids=GROUPS)
def test_one_tensor(calls, shares, source):
    fuzz(calls(source), check_one_tensor, shares / len(SOURCES))


@pytest.mark.parametrize("source", SOURCES, ids=BY_NAME)
def test_each_source_by_each_path(source):
    """Whatever examples are drawn; and what is called a cached call is one."""
    kind = kinds(source, NUMBERS, range(6))[0]
    shape = (3,) * kind.ndim
    strides = tuple(fuzzing.compact(shape, np.dtype(kind.dtype).itemsize, "C"))
    spec = Spec(kind.dtype, shape, strides, readonly=kind.readonly)
    kernel, tensor = new_kernel(KERNELS["look"]), source.make(spec.build()[0])
    for path in PATHS:
        for name in (*READERS, "rotate"):
            check_one_tensor(OneTensor(source.name, name, path, spec, spec))
    kernel(tensor)
    assert is_fast(kernel, tensor)


# ---- how one tensor is drawn, and checked ----------------------------------------------------------------------------
def fuzz(strategy: st.SearchStrategy, check: Callable, shares: float) -> None:
    """Check that many of the profile's shares of examples; each is left for whoever looks after a crash."""

    def noted(case):
        LAST.write_text(f"{case!r}\n")
        check(case)

    settings(max_examples=math.ceil(shares * EXAMPLES))(given(strategy)(noted))()
    LAST.unlink(missing_ok=True)


def first(x):
    for value in x.flat:
        return type_number(x), value
    raise IndexError("no elements", 0)


def keep(x):
    return np.expand_dims(x, 0)  # a view: an argument would be returned as that very object


def rotate(x, carry):
    """Every element moves one place on, in C order: what is written depends on what was, with overlaps, too."""
    for index in np.ndindex(x.shape):
        carried = carry
        carry = x[index]
        x[index] = carried
    return carry


READERS = {function.__name__: fast_args(function) for function in (fuzzing.look, fuzzing.total, first)}
READERS |= {"look, nogil": fast_args(fuzzing.look, nogil=True), "keep": fast_args(keep, returns=np.ndarray)}
KERNELS = READERS | {"rotate": fast_args(rotate)}


def make_call(kernel: FastKernel, path: str, arguments: tuple, rehearsal: tuple):
    """The call that a path ends with, not made yet. `rehearsal`: the arguments of the call that makes a cache entry."""
    if path == "keywords":
        return lambda: kernel(**dict(reversed([*zip(("x", "carry"), arguments, strict=False)])))
    kernel = new_kernel(kernel, kernel._kernel_options)  # which knows nothing, but has nothing to compile
    if "cached" in path:
        end_of(kernel, *rehearsal)
    return lambda: kernel(*arguments)


def is_identical(got, want) -> bool:
    """Whether two results are equal in type and in every bit; NaNs are all alike. Arrays share memory and flags."""
    if type(got) is not type(want):
        return False
    if isinstance(want, tuple):
        return len(got) == len(want) and all(map(is_identical, got, want))
    if isinstance(want, np.ndarray):
        return (got.dtype == want.dtype and got.shape == want.shape and got.flags.writeable == want.flags.writeable
                and (not want.size or (got.strides, got.ctypes.data) == (want.strides, want.ctypes.data)))  # fmt: skip
    return repr(got) == repr(want)


NUMBERS = tuple(name for name in frameworks.NUMPY_DTYPES if name != "f2")  # which Numba hardly compiles on a CPU
FEW = ("f8", "i2", "c8", "?")
"""The dtypes of most tests. With all, most of the time would go into compiling."""
KINDS_IN_CI = (("f8", 1), ("i2", 2), ("c8", 3), ("?", 0), ("f4", 5), ("f4", 1), ("u1", 1))


def kinds(source: Source, dtypes: tuple[str, ...], ndims) -> list[Kind]:
    pairs = itertools.product(dtypes, ndims) if IS_NIGHTLY else [pair for pair in KINDS_IN_CI if pair[1] in ndims]
    drawn = [Kind(*pair, order, readonly, misaligned) for pair in pairs for order in "CFA"
             for readonly in (False, False, False, True) for misaligned in (False, False, False, False, True)]  # fmt: skip
    return [kind for kind in drawn if source.takes(kind)]


@dataclass(frozen=True)
class OneTensor:
    """A call with one tensor. `before`: what the call before it is made with, on paths that have one."""

    source: str
    kernel: str
    path: str
    spec: Spec
    before: Spec


@st.composite
def calls_with_one(draw, source: Source, kernels: tuple[str, ...], ndims=range(6), paths=PATHS) -> OneTensor:
    kernel, path = draw(st.sampled_from(kernels)), draw(st.sampled_from(paths))
    found = kinds(source, NUMBERS if kernel == "look" else FEW, ndims) or kinds(source, NUMBERS, ndims)
    kind = before = draw(st.sampled_from(found))
    if path == PATHS[-1]:
        if len(paths) == 1:  # of the same dtype and rank, it is taken for the same more easily
            found = [each for each in found if (each.dtype, each.ndim) == (kind.dtype, kind.ndim)]
        before = draw(st.sampled_from(found))
    spec = draw(specs(kind, source.negative, source.fractional))
    earlier = spec if before is kind else draw(specs(before, source.negative, source.fractional))
    return OneTensor(source.name, kernel, path, spec, earlier)


def check_one_tensor(case: OneTensor) -> None:
    """Its type, the result or exception, the references; what is written is written to an equal array, too."""
    source, kernel, writes = BY_NAME[case.source], KERNELS[case.kernel], case.kernel == "rotate"
    array, memory = case.spec.build()
    twin, wanted_memory = case.spec.build() if writes else (array, memory)
    tensor, rehearsal = source.make(array), source.make(case.before.build()[0])
    view = source.view(source.make(twin) if writes else tensor, twin)
    carries = [(np.dtype(spec.dtype).type(1),) if writes else () for spec in (case.spec, case.before)]
    call = make_call(kernel, case.path, (tensor, *carries[0]), (rehearsal, *carries[1]))
    want = end_of(numbas(kernel), view, *carries[0])
    is_compilers = is_exception(want) and issubclass(want[0], numba.core.errors.NumbaError)  # Numba keeps those, and their frames
    with kept(*[tensor] * (not writes or not is_compilers)):
        got = end_of(call)
        if not (writes or case.kernel == "keep" or is_exception(got) or is_exception(want)):
            assert TYPES[got[0]] == type_of(view)
            got, want = got[1], want[1]
        assert is_exception(got) is is_exception(want), f"@njit: {want}, @fast_args: {got}"
        is_right = got[0] is want[0] if is_compilers else is_identical(got, want)
        assert is_right, f"@njit: {want}, @fast_args: {got}"
        del got
    del want
    assert memory.tobytes() == wanted_memory.tobytes()
    for each in (tensor, rehearsal):
        ledger = getattr(getattr(each, "inner", each), "ledger", Ledger())
        if ledger.out:
            gc.collect()
        ledger.check(ledger.made)


# ---- random bytes ----------------------------------------------------------------------------------------------------
BATCH = 2500  # examples for one process


def test_random_bytes(tmp_path):
    first_number = 0 if settings.default.derandomize else random.SystemRandom().randrange(2**32)
    outcomes, last = set(), tmp_path / "last"
    for batch, start_at in enumerate(range(0, 5 * EXAMPLES, BATCH)):
        arguments = str(min(BATCH, 5 * EXAMPLES - start_at)), str(first_number + batch), str(last)
        done = fork_python("import sys, fuzzing\nfuzzing.fuzz(*map(int, sys.argv[1:3]), sys.argv[3])", *arguments, check=False)
        if done.returncode:
            pytest.fail(
                f"exit code {done.returncode} of fuzz{arguments}; the last example was\n"
                f"{last.read_text() if last.exists() else 'none'}\n{done.stdout[-6000:]}\n{done.stderr[-12000:]}"
            )
        outcomes |= {*json.loads(done.stdout)}
    assert outcomes >= {"accepted", "refused"}, "there was nothing left to try"


# ---- random exchange tables ------------------------------------------------------------------------------------------
VERSIONS = st.tuples(st.one_of(st.just(1), st.sampled_from([0, 2]), st.integers(0, 2**32 - 1)), st.integers(0, 2**32 - 1))
MISSING = st.one_of(st.just([]), st.lists(st.sampled_from((VIEW, *REQUIRED)), max_size=2))
CANNOT = {VIEW: ffi.callback("int(void *, DLTensor *)", lambda *_: -1),
          EXPORT: ffi.callback("int(void *, DLManagedTensorVersioned **)", lambda *_: -1)}  # fmt: skip


@given(st.lists(st.tuples(VERSIONS, MISSING), min_size=1, max_size=5), st.sampled_from([0, 0, 0, 62, 63, 64]),
       st.one_of(st.none(), st.integers(0, 4)), st.booleans(), st.sampled_from([ATTRIBUTE, OLDER]))  # fmt: skip
def test_random_chains_of_tables(tables, others, back, has_methods, attribute):
    """Of 64 the first with DLPack's major version counts, if no function but the view's is missing; else ``__dlpack__``."""
    tables, made = [((2, 0), [])] * others + tables, [None]
    counts = next((i for i, (version, _) in enumerate(tables[:64]) if version[0] == 1), None)
    is_usable = counts is not None and not {*REQUIRED} & {*tables[counts][1]}
    for i, (version, missing) in reversed([*enumerate(tables)]):
        functions = (OURS if i == counts else CANNOT) | dict.fromkeys(missing)
        made.insert(0, exchange_table(version=version, prev=made[0], **functions))
    if back is not None:
        made[-2].header.prev_api = ffi.cast("DLPackExchangeAPIHeader *", made[back % len(tables)])
    cls = type("Random", (WithMethods,) * has_methods + (Hostile,), {attribute: held(made[0])})
    tensor, ends = cls(), 6.0 if is_usable or has_methods else TypeError
    check_ends(tensor, ends)
    assert (tensor.looks > 0) is is_usable and (getattr(tensor, "dunder_calls", 0) > 0) is (has_methods and not is_usable)
    assert (kind_of(end_of(exchange_api, cls)) is TypeError) is (ends is TypeError)
