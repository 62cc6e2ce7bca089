"""Random tensors of every framework on every path, against plain ``@njit``; random bytes, against a model in Python.

    python -m pytest -m slow tests/exchange/test_fuzz.py                                 # a few hundred examples, always the same
    python -m pytest -m slow tests/exchange/test_fuzz.py --hypothesis-profile=nightly    # more than 50,000

What fails is printed as a case, for example ``OneTensor(...)``, which ``check_one_tensor`` checks by itself: that is
to become a test with a name. Should the process crash, the case that it died of is in the directory for temporary files,
in ``fastexchange-fuzz-<user id>.txt``. Random bytes are tried in processes of their own; a crash is reported with its
case.
"""

import array as stdlib_array
import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import mmap
import os
import pickle
import random
import struct
import sys
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
from exchanges import ByProperty, Sub, jax, pyarrow
from forked import fork_python
from fuzzing import CALLS_TO_A_FAST_ENTRY, TYPES, VIEW, Kind, Spec, is_fast, report, specs, type_number, type_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_producers import TABLE_CAPSULE, Dunder, Tabled, address_of, capsule, exchange_table, tabled_type
from numpy.lib.stride_tricks import as_strided
from oracle import new_kernel, numbas, seen_type

from fastexchange import FastKernel, explain, fast_args

pytestmark = pytest.mark.slow

EXAMPLES = settings.default.max_examples
"""The profile's share of examples; each fuzzer takes some of them."""
IS_NIGHTLY = EXAMPLES > 1000
LAST = Path(tempfile.gettempdir(), f"fastexchange-fuzz-{os.getuid()}.txt")

tried: collections.Counter = collections.Counter()
"""How many examples there were of each fuzzer, and by ("source", its name), ("path", …), ("kernel", …)."""
outcomes: collections.defaultdict[str, collections.Counter] = collections.defaultdict(collections.Counter)
"""By fuzzer of bytes: how often each outcome was."""


def fuzz(strategy: st.SearchStrategy, check: Callable, shares: float) -> None:
    """Check that many of the profile's shares of examples."""
    settings(max_examples=math.ceil(shares * EXAMPLES))(given(strategy)(check))()


def start(fuzzer: str, case):
    """Count an example, and leave it for whoever looks after a crash. Returns its source, if it has one, and kernel."""
    LAST.write_text(f"{fuzzer}: {case!r}\n")
    source = getattr(case, "source", None)
    tried.update([fuzzer, ("source", source), ("path", case.path), ("kernel", case.kernel)])
    return BY_NAME.get(source), KERNELS[case.kernel]


# ---- sources of tensors ----------------------------------------------------------------------------------------------

NUMBERS = tuple(name for name in frameworks.NUMPY_DTYPES if name != "f2")  # which Numba hardly compiles on a CPU
GIVEN, ALWAYS, NEVER = "as the array", "always", "never"


@dataclass(frozen=True)
class Source:
    """A kind of tensor: how one is made of an array, and what plain Numba takes in its place."""

    name: str
    make: Callable[[np.ndarray], Any]
    view: Callable[[Any, np.ndarray], Any] = lambda tensor, array: array
    mutable: str = GIVEN
    negative: bool = True
    misaligned: bool = True
    fractional: bool = False
    """Strides that are no multiple of the item size."""
    ndims: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    orders: str = "CFA"
    dtypes: tuple[str, ...] = NUMBERS
    is_native: bool = True
    """Whether a fast entry reads it."""

    def has(self, kind: Kind) -> bool:
        """Whether a kernel can see such an array through this source."""
        return (
            kind.dtype in self.dtypes and kind.ndim in self.ndims and kind.order in self.orders
            and (self.misaligned or not kind.misaligned) and self.mutable in (GIVEN, NEVER if kind.readonly else ALWAYS)
        )  # fmt: skip

    def specs(self, kind: Kind) -> st.SearchStrategy[Spec]:
        return specs(kind, self.negative, self.fractional)

    def __str__(self):
        return self.name


def _split(cls, by: int):
    """Tensors whose ``data`` is `by` bytes before the first element, and the rest ``byte_offset``."""
    return lambda array: cls(array, data=array.ctypes.data - by, byte_offset=by)


def _compact(tensor, array):
    """`array`, which is in C order, with the strides that it has to have where there is but one element, too."""
    return as_strided(array, strides=fuzzing.compact(array.shape, array.itemsize, "C"))


Exporting = tabled_type("Exporting", **{VIEW: None})
Newer = tabled_type("Newer", version=(2, 0), prev=exchange_table())
_older = {"__dlpack_c_exchange_api__": None}
Older = tabled_type("Older", attributes={**_older, "__c_dlpack_exchange_api__": address_of(exchange_table())})
OldCapsule = tabled_type(
    "OldCapsule", attributes={**_older, "__c_dlpack_exchange_api__": capsule(exchange_table(), TABLE_CAPSULE)}
)

SOURCES = [
    *[
        Source(
            framework.name, framework.tensor, framework.view,
            GIVEN if framework.readonly else ALWAYS if framework.mutable else NEVER,
            framework.negative_strides, fractional=framework.name == "numpy",
            is_native=framework.name in ("numpy", "exchange table", "torch", "tvm_ffi"),
        )
        for framework in frameworks.FRAMEWORKS
    ],
    Source("subclass of ndarray", lambda array: array.view(Sub), lambda tensor, array: tensor, fractional=True),
    Source("exchange table, byte offset", _split(Tabled, 24), mutable=ALWAYS),
    Source("exchange table, NULL strides", lambda array: Tabled(array, strides=None), _compact, ALWAYS, orders="C"),
    Source("exchange table, pinned memory", lambda array: Tabled(array, device_type=3, device_id=1), mutable=ALWAYS),
    Source("exchange table without views", Exporting, is_native=False),
    Source("exchange table behind a newer one", Newer, mutable=ALWAYS),
    Source("older exchange table", Older, mutable=ALWAYS),
    Source("older exchange table in a capsule", OldCapsule, mutable=ALWAYS),
    Source("__dlpack__, byte offset", _split(Dunder, 4096), is_native=False),
    Source("wrapper", lambda array: ByProperty(Tabled(array)), is_native=False),
]  # fmt: skip
if jax is not None:
    of_jax = {"dtypes": ("?", "i1", "i2", "i4", "u1", "u2", "u4", "f4", "c8"), "orders": "C", "is_native": False}
    SOURCES.append(
        Source("jax", jax.numpy.asarray, lambda tensor, array: np.asarray(tensor), NEVER, misaligned=False, **of_jax))
if pyarrow is not None:
    PYARROW = {
        "mutable": NEVER, "misaligned": False, "ndims": (1,), "orders": "C", "is_native": False,
        "dtypes": tuple(name for name in NUMBERS if name[0] in "iuf"),
    }  # fmt: skip
    SOURCES += [
        Source("pyarrow", pyarrow.array, lambda tensor, array: tensor.to_numpy(), **PYARROW),
        Source("pyarrow slice", lambda array: pyarrow.array(array)[1:], lambda tensor, array: tensor.to_numpy(), **PYARROW),
    ]


def _whole(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1)


def _mapped(array: np.ndarray) -> mmap.mmap:
    memory = mmap.mmap(-1, max(array.nbytes, 1))
    memory[: array.nbytes] = _whole(array).tobytes()
    return memory


def _c_like(array: np.ndarray) -> stdlib_array.array:
    return stdlib_array.array(array.dtype.char, _whole(array).tobytes())


def _of_ctypes(array: np.ndarray):
    return (np.ctypeslib.as_ctypes_type(array.dtype) * array.size)(*array.ravel().tolist())


_itself: dict[str, Any] = {"view": lambda tensor, array: tensor, "is_native": False}
_copies: dict[str, Any] = {**_itself, "orders": "C", "ndims": (1,), "misaligned": False}
_with_code = tuple(name for name in NUMBERS if name[0] in "iuf")
BUFFERS = [
    Source("memoryview", memoryview, fractional=True, **_itself),
    Source("PickleBuffer", pickle.PickleBuffer, fractional=True, **_itself),
    Source("bytes", lambda array: _whole(array).tobytes(), mutable=NEVER, dtypes=("u1",), **_copies),
    Source("bytearray", lambda array: bytearray(_whole(array)), mutable=ALWAYS, dtypes=("u1",), **_copies),
    Source("mmap", _mapped, mutable=ALWAYS, dtypes=("u1",), **_copies),
    Source("array.array", _c_like, mutable=ALWAYS, dtypes=_with_code, **_copies),
    Source("ctypes array", _of_ctypes, mutable=ALWAYS, dtypes=_with_code,
           **{**_copies, "view": lambda tensor, array: np.ctypeslib.as_array(tensor)}),
]  # fmt: skip
BY_NAME = {source.name: source for source in SOURCES + BUFFERS}

# ---- kernels ---------------------------------------------------------------------------------------------------------


def first(x):
    for value in x.flat:
        return type_number(x), value
    raise IndexError("no elements", 0)


def fail(x):
    if x.size % 4 == 1:
        raise ValueError("one")
    if x.size % 4 == 2:
        raise KeyError("two", 2)
    return type_number(x), 7 // (x.size % 4)


def keep(x):
    return np.expand_dims(x, 0)  # a view: an argument would be returned as that very object


def rotate(x, carry):
    """Every element moves one place on, in C order: what is written depends on what was, with overlaps, too."""
    for index in np.ndindex(x.shape):
        carried = carry
        carry = x[index]
        x[index] = carried
    return carry


def mix(a, b, c, d=7):
    numbers = type_number(a), type_number(b), type_number(c), type_number(d)
    return numbers, (report(a), report(b), report(c), report(d))


def gather(a, *rest):
    return (type_number(a), type_number(rest)), (report(a), report(rest))


def look_at_buffer(x):
    return type_number(x), (x.shape, x.strides if x.nbytes else x.shape, x.itemsize, x.nbytes, x.ndim)


def items(x):
    s = 0.0
    for i in range(len(x)):
        s += x[i]
    return type_number(x), s


def rotate_items(x, carry):
    for i in range(len(x)):
        carried = carry
        carry = x[i]
        x[i] = carried
    return carry


def _named(*functions, **options) -> dict[str, FastKernel]:
    suffix = "".join(f", {option}" for option in options)
    return {function.__name__ + suffix: fast_args(**options)(function) for function in functions}


READERS = _named(fuzzing.look, fuzzing.total, first, fail) | _named(fuzzing.look, nogil=True)
READERS["keep"] = fast_args(keep, returns=np.ndarray)
KERNELS = READERS | _named(rotate, mix, gather, look_at_buffer, items, rotate_items)

# ---- paths -----------------------------------------------------------------------------------------------------------

PATHS = ("first call", "second call", "warm call", "keywords", "fast entry", "other fast entry")


def make_call(kernel: FastKernel, path: str, arguments: tuple, rehearsal: tuple, names: tuple[str, ...]):
    """The call that a path ends with, not made yet. `rehearsal`: the arguments of the calls before it."""
    if path in ("first call", "second call"):
        kernel = new_kernel(kernel, kernel._kernel_options)  # which knows nothing, but has nothing to compile
    count = {"first call": 0, "second call": 1, "warm call": 2, "keywords": 0}.get(path, CALLS_TO_A_FAST_ENTRY)
    for call in range(count):
        if outcome(lambda: kernel(*rehearsal))[0] == "raised" and call > 2:
            break
    if path == "keywords":
        start = len(arguments) // 2
        return lambda: kernel(*arguments[:start], **dict(reversed(list(zip(names, arguments, strict=False))[start:])))
    tried["fast entry", type(arguments[0]).__name__] += is_fast(kernel, *arguments)
    return lambda: kernel(*arguments)


def outcome(call):
    """("returned", result) or ("raised", exception type, its arguments)."""
    try:
        return "returned", call()
    except Exception as error:
        error.__traceback__ = None
        return "raised", seen_type(error), error.args


def is_same(got, want) -> bool:
    """Whether two results are equal in type and in every bit; NaNs are all alike. Arrays share memory and flags."""
    if type(got) is not type(want):
        return False
    if isinstance(want, tuple):
        return len(got) == len(want) and all(map(is_same, got, want))
    if isinstance(want, float):
        return (got != got and want != want) or struct.pack("d", got) == struct.pack("d", want)
    if isinstance(want, complex):
        return is_same((got.real, got.imag), (want.real, want.imag))
    if isinstance(want, np.ndarray):
        return (
            got.dtype == want.dtype and got.shape == want.shape and got.flags.writeable == want.flags.writeable
            and (not want.size or (got.strides, got.ctypes.data) == (want.strides, want.ctypes.data))
        )  # fmt: skip
    return bool(got == want)


def is_numba_error(result) -> bool:
    """Whether an outcome is an error of the compiler. Numba keeps those, and with them what their frames hold."""
    return result[0] == "raised" and issubclass(result[1], numba.core.errors.NumbaError)


def check_outcome(got, want) -> None:
    if want[0] == "returned":
        assert got[0] == "returned", f"@njit returns {want[1]!r}, @fast_args raises {got[1:]}"
        assert is_same(got[1], want[1]), f"@njit returns {want[1]!r}, @fast_args {got[1]!r}"
        return
    assert got[0] == "raised", f"@njit raises {want[1:]}, @fast_args returns {got[1]!r}"
    assert got[1] is want[1], f"@njit raises {want[1:]}, @fast_args {got[1:]}"
    if not is_numba_error(want):
        assert got[2] == want[2]


@contextlib.contextmanager
def references_kept(*things, unless: bool = False):
    """After the block each of `things` has as many references as before. Garbage is collected only where it matters."""
    before = [sys.getrefcount(thing) for thing in things]
    yield
    if unless:
        return
    if [sys.getrefcount(thing) for thing in things] != before:  # tracebacks and their frames may hold each other
        gc.collect()
        assert [sys.getrefcount(thing) for thing in things] == before


def check_given_back(*tensors) -> None:
    """Every managed tensor that made producers exported was given back once."""
    for tensor in tensors:
        ledger = getattr(getattr(tensor, "inner", tensor), "ledger", None)
        if ledger is not None:
            if ledger.out:
                gc.collect()
            ledger.check(ledger.made)


# ---- one tensor ------------------------------------------------------------------------------------------------------

FEW = ("f8", "i2", "c8", "?")
"""The dtypes of most tests. With all, most of the time would go into compiling."""
KINDS_IN_CI = (("f8", 1), ("i2", 2), ("c8", 3), ("?", 0), ("f4", 5), ("f4", 1), ("u1", 1))


@st.composite
def kinds(draw, source: Source, dtypes: tuple[str, ...] = FEW, ndims: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> Kind:
    """A kind of array that a kernel can see through the source."""
    readonly = source.mutable == NEVER or (source.mutable == GIVEN and draw(st.integers(0, 3)) == 0)
    misaligned = source.misaligned and draw(st.integers(0, 4)) == 0
    pairs = itertools.product(dtypes, ndims) if IS_NIGHTLY else [pair for pair in KINDS_IN_CI if pair[1] in ndims]
    pairs = [pair for pair in pairs if source.has(Kind(*pair, source.orders[0], readonly, misaligned))]
    dtype, ndim = draw(st.sampled_from(pairs or [(source.dtypes[0], ndim) for ndim in ndims if ndim in source.ndims]))
    return Kind(dtype, ndim, draw(st.sampled_from(source.orders)), readonly, misaligned)


@dataclass(frozen=True)
class OneTensor:
    """A call with one tensor. `before`: what the calls before it are made with, on paths that have such."""

    source: str
    kernel: str
    path: str
    spec: Spec
    before: Spec


@st.composite
def calls_with_one(draw, source: Source, kernels: tuple[str, ...], ndims=(0, 1, 2, 3, 4, 5), paths=PATHS) -> OneTensor:
    kernel, path = draw(st.sampled_from(kernels)), draw(st.sampled_from(paths))
    dtypes = NUMBERS if kernel == "look" else FEW
    kind = draw(kinds(source, dtypes, ndims))
    before = kind
    if path == "other fast entry":
        before = draw(kinds(source, dtypes, ndims))
        if len(paths) == 1:  # what differs in few ways is taken for the same more easily
            before = dataclasses.replace(before, dtype=kind.dtype, ndim=kind.ndim)
    spec = draw(source.specs(kind))
    return OneTensor(source.name, kernel, path, spec, spec if before is kind else draw(source.specs(before)))


def seen_by_numba(view):
    """What plain Numba takes for a view, and its type there; None if it does not read a buffer's format."""
    try:
        return view, type_of(view)
    except numba.core.errors.NumbaError:
        return np.asarray(view), None


def check_one_tensor(case: OneTensor) -> None:
    """Its type, the result or exception, the references; what is written is written to an equal array, too."""
    writes, is_buffer = "rotate" in case.kernel, BY_NAME[case.source] in BUFFERS
    source, kernel = start("buffers" if is_buffer else "writing" if writes else "one tensor", case)
    array, memory = case.spec.build()
    twin, wanted_memory = case.spec.build() if writes else (array, memory)
    tensor, rehearsal = source.make(array), source.make(case.before.build()[0])
    twin_tensor = source.make(twin) if writes else tensor
    view, wanted_type = seen_by_numba(source.view(twin_tensor, twin))
    steps = zip(view.shape, view.strides, strict=True) if wanted_type is None and view.nbytes else ()
    is_beyond_both = any(extent > 1 and step % view.itemsize for extent, step in steps)
    carries = [(np.dtype(spec.dtype).type(1),) if writes else () for spec in (case.spec, case.before)]
    call = make_call(kernel, case.path, (tensor, *carries[0]), (rehearsal, *carries[1]), ("x", "carry"))
    want = outcome(lambda: numbas(kernel)(view, *carries[0]))
    with references_kept(tensor, unless=(writes or is_buffer) and is_numba_error(want)):
        got = outcome(call)
        if is_beyond_both:  # DLPack has no such strides, Numba does not read such a format
            assert got[:2] == ("raised", BufferError)
            return
        if not writes and case.kernel != "keep" and got[0] == want[0] == "returned":
            assert wanted_type is None or TYPES[got[1][0]] == wanted_type
            got, want = ("returned", got[1][1]), ("returned", want[1][1])
        check_outcome(got, want)
        del got
    del want
    assert memory.tobytes() == wanted_memory.tobytes()
    if case.kernel == "rotate_items":
        assert memoryview(tensor).tobytes() == memoryview(twin_tensor).tobytes()
    check_given_back(tensor, rehearsal)


NATIVE = [source for source in SOURCES if source.is_native]
GROUPS = {
    # name: (sources, what is drawn for one, shares of the examples)
    "one tensor": (SOURCES, lambda source: calls_with_one(source, tuple(READERS)), 6),
    # for a tensor of the same type, dtype and rank, but not the same layout
    "another tensor's fast entry": (
        NATIVE, lambda source: calls_with_one(source, ("look",), (0, 1, 2, 3), ("other fast entry",)), 2),
    "writing": (SOURCES, lambda source: calls_with_one(source, ("rotate",)), 2),
    "buffers": (BUFFERS, lambda source: calls_with_one(source, ("items", "rotate_items"), ndims=(1,)), 1),
    "memoryviews of several dimensions": (BUFFERS[:1], lambda source: calls_with_one(source, ("look_at_buffer",)), 1 / 7),
}  # fmt: skip
PAIRS = [(group, source) for group, (sources, _, _) in GROUPS.items() for source in sources]
fuzzed: list[tuple] = []


@pytest.mark.parametrize(("group", "source"), PAIRS, ids=str)
def test_one_tensor(group, source):
    sources, calls, shares = GROUPS[group]
    fuzz(calls(source), check_one_tensor, shares / len(sources))
    fuzzed.append((group, source))


def test_a_call_that_does_not_compile_keeps_no_arguments():
    """Numba keeps what it raises. For misaligned arrays there is an error that the caller never sees."""

    @fast_args
    def write(x):
        x[0] = 1

    array, _ = Spec("f8", (2,), (8,), offset=1, readonly=True).build()
    with references_kept(array):
        assert outcome(lambda: write(array))[1] is numba.core.errors.TypingError


def test_a_memoryview_whose_strides_are_no_multiple_of_its_items():
    """Numba has them, DLPack has not: it makes the call."""
    field = np.array([(1, 2.5), (3, 4.5)], [("a", "i1"), ("b", "f8")])["b"]
    kernel, view = KERNELS["items"], memoryview(field)
    assert [kernel(view), kernel(view)] == [numbas(kernel)(view)] * 2
    assert "Numba's own dispatcher makes this call" in str(kernel.explain(view))
    assert explain(view).path == "numba"


# ---- several arguments -----------------------------------------------------------------------------------------------

SCALARS = {
    "float": st.floats(), "int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans(), "None": st.none(),
    "complex": st.complex_numbers(), "float32": st.floats(width=32).map(np.float32),
    "int8": st.integers(-128, 127).map(np.int8), "uint64": st.integers(0, 2**64 - 1).map(np.uint64),
    "bool_": st.booleans().map(np.bool_), "complex64": st.complex_numbers(width=64).map(np.complex64),
    "text": st.text(max_size=3),
}  # fmt: skip
"""Arguments that are no tensors."""


def random_leaf(generator: random.Random, depth: int = 0):
    """A scalar's name, a kind of array, or a tuple of such."""
    what = generator.random()
    if what < 0.35:
        return generator.choice([name for name in SCALARS if name != "text"])
    if what < 0.85 or depth == 2:
        dtype, ndim = generator.choice([("f8", 1), ("f8", 2), ("i2", 2), ("c8", 1), ("?", 0), ("f4", 3)])
        return Kind(dtype, ndim, generator.choice("CFA"), generator.random() < 0.2, generator.random() < 0.15)
    return tuple(random_leaf(generator, depth + 1) for _ in range(generator.randint(1, 3)))


def random_signatures(count: int) -> list[tuple]:
    """Of several arguments each; always the same, for each is compiled. In every fourth one argument is text."""
    generator = random.Random(7)
    made = []
    for i in range(count):
        leaves = [random_leaf(generator) for _ in range(generator.randint(3, 4))]
        if i % 4 == 3:
            leaves[generator.randrange(len(leaves))] = "text"
        made.append(tuple(leaves))
    return made


SIGNATURES = random_signatures(48 if IS_NIGHTLY else 4)


@dataclass(frozen=True)
class Given:
    """A tensor among the arguments. Equal ones in a call are one object."""

    source: str
    spec: Spec


@dataclass(frozen=True)
class Several:
    """A call with several arguments: scalars as they are, tensors as :class:`Given`, tuples of both."""

    kernel: str
    path: str
    arguments: tuple


@st.composite
def leaves(draw, leaf, earlier: dict):
    if isinstance(leaf, str):
        return draw(SCALARS[leaf])
    if isinstance(leaf, tuple):
        return tuple(draw(leaves(inner, earlier)) for inner in leaf)
    if leaf in earlier and draw(st.booleans()):
        return earlier[leaf]
    source = draw(st.sampled_from([source for source in SOURCES if source.has(leaf)]))
    earlier[leaf] = Given(source.name, draw(source.specs(leaf)))
    return earlier[leaf]


@st.composite
def calls_with_several(draw) -> Several:
    earlier: dict = {}
    arguments = tuple(draw(leaves(leaf, earlier)) for leaf in draw(st.sampled_from(SIGNATURES)))
    return Several(draw(st.sampled_from(["mix", "gather"])), draw(st.sampled_from(PATHS)), arguments)


def built(value, made: dict, side: int):
    """An argument (side 0), or what plain Numba gets for it (side 1)."""
    if isinstance(value, tuple):
        return tuple(built(item, made, side) for item in value)
    if not isinstance(value, Given):
        return value
    if value not in made:
        source, (array, _) = BY_NAME[value.source], value.spec.build()
        tensor = source.make(array)
        made[value] = tensor, source.view(tensor, array)
    return made[value][side]


def check_several_arguments(case: Several) -> None:
    _, kernel = start("several arguments", case)
    made: dict = {}
    arguments, views = built(case.arguments, made, 0), built(case.arguments, made, 1)
    rehearsal = built(case.arguments, {}, 0)
    path = "warm call" if case.kernel == "gather" and case.path == "keywords" else case.path
    call = make_call(kernel, path, arguments, rehearsal, ("a", "b", "c", "d"))
    wanted_numbers, want = numbas(kernel)(*views)
    tensors = [tensor for tensor, _ in made.values()]
    with references_kept(*tensors):
        numbers, got = call()
        assert is_same(got, want)
        del got
    wanted_types = tuple(map(type_of, views))
    if case.kernel == "gather":
        assert (TYPES[numbers[0]], *TYPES[numbers[1]].types) == wanted_types
    else:
        assert tuple(TYPES[number] for number in numbers[: len(views)]) == wanted_types
        assert numbers[len(views) :] == wanted_numbers[len(views) :]
    check_given_back(*tensors)


@pytest.mark.slow
def test_several_arguments():
    fuzz(calls_with_several(), check_several_arguments, 2)


# ---- random bytes ----------------------------------------------------------------------------------------------------

BATCH = 2500  # examples for one process

FUZZ = """
import sys, fuzzing
fuzzing.fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


@pytest.mark.parametrize(("name", "shares"), [("tensors", 5), ("tables", 1)])
def test_random_bytes(name, shares, tmp_path):
    first_number = 0 if settings.default.derandomize else random.SystemRandom().randrange(2**32)
    total = shares * EXAMPLES
    for batch, start_at in enumerate(range(0, total, BATCH)):
        number, last = first_number + batch, tmp_path / "last"
        examples = min(BATCH, total - start_at)
        done = fork_python(FUZZ, name, str(examples), str(number), str(last), check=False)
        if done.returncode:
            pytest.fail(
                f"exit code {done.returncode} of fuzz({name!r}, {examples}, {number}); the last example was\n"
                f"{last.read_text() if last.exists() else 'none'}\n{done.stdout[-6000:]}\n{done.stderr[-12000:]}"
            )
        outcomes[name].update(json.loads(done.stdout))


EVERY = ("kernel", "fast entry", "kernel without the GIL", "from_dlpack")
OUT_OF_64_BITS = {
    "an address that is NULL once the byte offset is added": (
        fuzzing.Tensor(is_real=False, data=-8, byte_offset=8), (*EVERY, "from_dlpack, by Python")),
    "a stride that in bytes is that of C order only in 64 bits": (fuzzing.Tensor(shape=(4,), strides=(2**61 + 1,)), EVERY),
}  # fmt: skip


@pytest.mark.parametrize("what", OUT_OF_64_BITS)
def test_what_overflows_is_refused(what):
    tensor, consumers = OUT_OF_64_BITS[what]
    for consumer in consumers:
        assert fuzzing.try_tensor(fuzzing.TensorCase(tensor, "view", consumer)) == "refused"


# ---- was it all tried? -----------------------------------------------------------------------------------------------


def test_everything_was_tried():
    """A fuzzer that has nothing left to try does not fail by itself."""
    if {*fuzzed} != {*PAIRS} or not tried["several arguments"] or {*outcomes} != {*fuzzing.FUZZERS}:
        pytest.skip("after all other tests of this file only")
    print(tried, outcomes)
    for kind, names in (("source", BY_NAME), ("path", PATHS), ("kernel", KERNELS)):
        assert not [name for name in names if not tried[kind, name]]
    assert tried["fast entry", "ndarray"] and tried["fast entry", "Tabled"]
    assert outcomes["tensors"].keys() >= {"accepted", "refused"}
    assert outcomes["tables"].keys() >= {"view", "__dlpack__", "refused"}
    if IS_NIGHTLY:
        made = {type(source.make(np.ones(2))).__name__ for source in NATIVE}
        assert not [name for name in made if not tried["fast entry", name]]
        assert outcomes["tables"]["export"]
        assert sum(tried[name] for name in ("one tensor", "writing", "several arguments", "buffers")) >= 20_000
        assert sum(sum(counts.values()) for counts in outcomes.values()) >= 20_000
