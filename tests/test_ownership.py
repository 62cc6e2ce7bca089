"""Ownership at every exit: whatever way a call ends, each managed tensor is given back once and each reference is back.

A matrix: how the call ends x which argument is to blame (first, middle, last of 1, 3, 7, 32) x the path that the call takes
(first call, later ones, fast entry, keywords, nogil, tuples, ``*args``, Numba's dispatcher) x who made the arguments. The
deleters of the tensors count; of what has none, references are counted, or it is shown to be free to be resized.
"""

import array as stdlib_array
import collections
import contextlib
import enum
import functools
import gc
import itertools
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import hostile_producers as hostile
import made_producers
import numba
import numpy as np
import pytest
from frameworks import torch, tvm_ffi
from fuzzing import is_fast
from hostile_producers import CONTENTS, EXPORTED, FUNCTIONS, RETURNS, VIEW, Gives, GivesLegacy, Hostile, hostile_type
from interoperability import Wrapper
from interpreter import run_python
from made_producers import Dunder, Ignorant, Ledger, Legacy, Tabled
from oracle import seen_type

from fastexchange import convert, exchange_api, explain, fast_args, from_dlpack, polyfill, to_dlpack

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
SIZES = (1, 3, 7, 32)
WARM = 60
"""Calls after which each combination of argument types in use has its fast entry."""


def positions(count: int) -> list[int]:
    """First, middle and last of `count`."""
    return sorted({0, count // 2, count - 1})


# ---- arguments that can be counted -----------------------------------------------------------------------------------


class Memory(np.ndarray):
    """An array whose death can be seen."""


Viewed = hostile_type("OwnedView")
Exported = hostile_type("OwnedExport", **{VIEW: None})


class WrapsExport(Wrapper):
    """Leads to a tensor that is exported, and counted."""

    def __init__(self, memory, ledger):
        self.inner, self.ledger, self.array = Exported(memory, ledger), ledger, memory


def _double_array(memory, ledger):
    return stdlib_array.array("d", memory.tolist())


def _memoryview(memory, ledger):
    return memoryview(bytearray(memory.tobytes())).cast("d")


PRODUCERS: dict[str, Callable] = {
    "numpy": lambda memory, ledger: memory.view(np.ndarray),
    "exchange table": Viewed,
    "__dlpack__": Dunder,
    "legacy": Legacy,
    "unversioned": Ignorant,
    "exchange table in Python": Tabled,
    "exports only": Exported,
    "wrapper": WrapsExport,
    "subclass of numpy": lambda memory, ledger: memory,
    "array.array": _double_array,
    "memoryview": _memoryview,
    "bytearray": lambda memory, ledger: bytearray(memory.astype("u1").tobytes()),
}
FAST = ["numpy", "exchange table"]
if torch is not None:
    PRODUCERS["torch"] = lambda memory, ledger: torch.from_numpy(memory)
    FAST.append("torch")
if tvm_ffi is not None:
    PRODUCERS["tvm_ffi"] = lambda memory, ledger: tvm_ffi.from_dlpack(memory)

COMPANIES = {
    "fast": FAST,
    "owning": ["__dlpack__", "legacy", "exports only", "wrapper", "unversioned"],
    "buffers": ["memoryview", "array.array", "bytearray"],
    "mixed": list(PRODUCERS),
}
"""Who stands beside the argument to blame, by turns. Calls with arguments of the first are made by fast entries."""


def tensor_of(kind: str, memory, ledger):
    return PRODUCERS[kind](memory, ledger)


def forget_notes(thing) -> None:
    """Drop what producers made for the tests have noted of their exports; it holds references."""
    for name in ("words", "capsules", "asked"):
        notes = getattr(thing, name, None)
        if notes is not None:
            notes.clear()
    made_producers._borrowed.pop(id(thing), None)


def is_resizable(thing) -> bool:
    """Whether nobody holds a buffer of an array of bytes or numbers."""
    try:
        thing.append(1)
        thing.pop()
    except BufferError:
        return False
    return True


def counts_of(thing) -> list:
    """What has to be the same again after a call."""
    counted = [sys.getrefcount(thing)]
    if isinstance(thing, (Dunder, Hostile, Tabled, WrapsExport)):
        forget_notes(getattr(thing, "inner", thing))
        forget_notes(thing)
        counted += [sys.getrefcount(thing.array), thing.ledger.out]
    elif torch is not None and isinstance(thing, torch.Tensor):
        if hasattr(thing, "_use_count"):
            counted.append(thing._use_count())
    elif isinstance(thing, (bytearray, stdlib_array.array)):
        counted.append(is_resizable(thing))
    return counted


@contextlib.contextmanager
def kept(*things):
    """After the block each of `things` has the references that it had, and all exports are given back."""
    for thing in things:
        counts_of(thing)
    before = [counts_of(thing) for thing in things]
    yield
    after = [counts_of(thing) for thing in things]
    if after != before:  # tracebacks and their frames may hold each other
        gc.collect()
        after = [counts_of(thing) for thing in things]
    assert after == before, [
        (index, type(things[index]).__name__, then, now)
        for index, (then, now) in enumerate(zip(before, after, strict=True)) if now != then
    ]  # fmt: skip


class Party:
    """The arguments of a call: `count` of them, made in turn by the producers of a company."""

    def __init__(self, company: str, count: int, start: int = 0):
        kinds = COMPANIES[company]
        self.ledger = Ledger()
        self.kinds = [kinds[(start + i) % len(kinds)] for i in range(count)]
        memories = [np.full(3, 1.0).view(Memory) for _ in range(count)]
        self.memories = [weakref.ref(memory) for memory in memories]
        self.tensors = [
            tensor_of(kind, memory, self.ledger) for kind, memory in zip(self.kinds, memories, strict=True)
        ]

    def with_at(self, position: int, thing) -> tuple:
        """The arguments, `thing` in the place of one."""
        return (*self.tensors[:position], thing, *self.tensors[position + 1 :])

    def check(self) -> None:
        """Every export was given back once."""
        self.ledger.check(self.ledger.made)

    def let_go(self) -> None:
        """Nobody else holds the arguments, or their memory."""
        self.check()
        for tensor in self.tensors:
            forget_notes(getattr(tensor, "inner", tensor))
            forget_notes(tensor)
            if isinstance(tensor, memoryview):
                tensor.release()
            elif isinstance(tensor, (bytearray, stdlib_array.array)):
                assert is_resizable(tensor)
        tensor = None
        self.tensors.clear()
        if any(memory() is not None for memory in self.memories):
            gc.collect()
        alive = [kind for kind, memory in zip(self.kinds, self.memories, strict=True) if memory() is not None]
        assert not alive, f"held for ever: {alive}"


def end_of(call, *arguments, **keywords):
    """What a call returns, or the type and the text of its exception, which is gone."""
    try:
        return call(*arguments, **keywords)
    except BaseException as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            return seen_type(error), str(error)
        except RuntimeError:
            return seen_type(error), "without words"


def raised(end):
    """The type of the exception with which a call ended."""
    assert isinstance(end, tuple) and isinstance(end[0], type), f"nothing was raised, {end!r} returned"
    return end[0]


@contextlib.contextmanager
def scene(*names):
    """A failure inside says where in the matrix it is."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


@pytest.fixture(autouse=True)
def _no_violations(monkeypatch):
    """No deleter ran twice, no function of a producer was entered with an exception set."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of deleters; pytest's would keep the frames
    hostile.violations.clear()
    yield
    strays, made_producers._strays[:] = made_producers._strays[:], []
    assert not strays and not hostile.violations


# ---- kernels ---------------------------------------------------------------------------------------------------------


def function_of(count: int, body: str, before: str = ""):
    """A function of `count` parameters ``a0``, ``a1`` …, behind those in `before`. In `body`: ALL, SUM, FIRST, MIDDLE, LAST."""
    names = [f"a{i}" for i in range(count)]
    words = {"ALL": ", ".join(names), "SUM": " + ".join(f"{name}[0]" for name in names)}
    words.update(zip(("FIRST", "MIDDLE", "LAST"), (names[0], names[count // 2], names[-1]), strict=True))
    for word, text in words.items():
        body = body.replace(word, text)
    namespace = {"np": np}
    exec(f"def function({before}{words['ALL']}):\n    {body}", namespace)
    return namespace["function"]


SUM = "return SUM"
RESULT = """s = SUM
    if s < 0:
        raise ValueError("from the kernel", 3)
    return FIRST[1:], (MIDDLE, LAST[:2]), np.full(2, s), s, None, "text", (how, how, how)"""
STORE = """stored.append(FIRST)
    stored.append(MIDDLE[1:])
    stored.append(LAST[:1])
    if SUM < 0:
        raise ValueError("from the kernel")"""


@functools.cache
def warm_kernel(count: int, company: str, **options):
    """A kernel that knows all calls with arguments of a company, and makes those of the fast one by fast entries."""
    kernel = fast_args(function_of(count, SUM), **options)
    for start in range(len(FAST) if company == "fast" else 1):
        party = Party(company, count, start)
        for _ in range(WARM if company == "fast" and not options else 2):
            assert kernel(*party.tensors) == count
    return kernel


# ---- refused at the n-th of m ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """An argument that is refused: ``make(memory, ledger)``, how, and of which kind of the fast company it is."""

    make: Callable
    kinds: tuple
    like: str | None = None
    by_numba: bool = True
    """Whether it is refused beside what only Numba understands, before Numba is asked."""


def _content(name: str, cls):
    lies, kinds, _ = CONTENTS[name]
    return lambda memory, ledger: cls(memory, ledger, **lies), (kinds,)


class _Raises(Dunder):
    """``__dlpack__`` raises a new exception each time: one that is raised again would collect tracebacks."""

    def __init__(self, memory, ledger, error):
        super().__init__(memory, ledger)
        self.error = error

    def __dlpack__(self, *, max_version=None):
        raise self.error()


class _Interrupted(Dunder):
    """Ctrl-C arrives while ``__dlpack__`` runs, and it has made its capsule, which gives its tensor back."""

    def __dlpack__(self, *, max_version=None):
        made = to_dlpack(Exported(self.array, self.ledger), max_version=(1, 0))
        signal.raise_signal(signal.SIGINT)
        return made


class _InterruptedLater(Dunder):
    """Ctrl-C is noticed after ``__dlpack__`` has returned, by the next Python code that runs."""

    def __dlpack__(self, *, max_version=None):
        signal.raise_signal(signal.SIGINT)


def _refused_dunder(name):
    return lambda memory, ledger: Gives(RETURNS[name], memory, ledger)


def _outcomes(name) -> tuple:
    want = FUNCTIONS[name][1]
    return want if isinstance(want, tuple) else (want,)


BAD: dict[str, Bad] = {}
for _name in (
    "device kDLCUDA", "device 77" if "device 77" in CONTENTS else "device 127", "ndim -1", "ndim 65", "NULL shape",
    "negative size (-1,)", "a stride of 4611686018427387904", "NULL data and a byte offset of 0", "2 lanes",
    "code 0 of 4 bits", "code 200 of 8 bits", "everything wrong",
):  # fmt: skip
    BAD[f"{_name}, view"] = Bad(*_content(_name, Viewed), "exchange table")
    BAD[f"{_name}, export"] = Bad(*_content(_name, Exported))
    BAD[f"{_name}, __dlpack__"] = Bad(*_content(_name, Dunder))
    BAD[f"{_name}, legacy"] = Bad(*_content(_name, Legacy))
for _name in ("major version 2", "major version 0", "the largest major version"):
    BAD[f"{_name}, export"] = Bad(lambda memory, ledger, n=_name: Exported(memory, ledger, **EXPORTED[n][0]), (BufferError,))
    BAD[f"{_name}, __dlpack__"] = Bad(lambda memory, ledger, n=_name: Dunder(memory, ledger, **EXPORTED[n][0]), (BufferError,))
for _name in (
    "-1 and no exception, -1", "filled, -1 and no exception", "raises BufferError", "raises FileNotFoundError",
    "raises KeyboardInterrupt", "raises SystemExit", "raises MemoryError", "0 and BufferError set",
    "0 and KeyboardInterrupt set", "filled, 0 and OSError set", "filled, 0 and KeyboardInterrupt set",
    "no exception type at all",
):  # fmt: skip
    _act = hostile._raise(FUNCTIONS[_name][1]) if _name.startswith("raises ") else FUNCTIONS[_name][0]  # a new one each time

    def _acts(memory, ledger, cls, act=_act):
        return cls(memory, ledger, view=act, export=act)

    BAD[f"a view that {_name}"] = Bad(functools.partial(_acts, cls=Viewed), _outcomes(_name), "exchange table")
    BAD[f"an export that {_name}"] = Bad(functools.partial(_acts, cls=Exported), _outcomes(_name))
BAD["an export of NULL"] = Bad(lambda m, ledger: Exported(m, ledger, export=lambda tensor, out: 0), (BufferError,))
for _name in ("None", "itself", "a capsule of a longer name", "a consumed capsule", "a consumed legacy capsule"):
    BAD[f"__dlpack__ that returns {_name}"] = Bad(_refused_dunder(_name), (BufferError,))
for _error in (BufferError, KeyError, functools.partial(hostile.Odd, 1, 2, third=3), KeyboardInterrupt, SystemExit):
    BAD[f"__dlpack__ that raises {type(_error()).__name__}"] = Bad(
        functools.partial(_Raises, error=_error), (type(_error()),)
    )
BAD["Ctrl-C in __dlpack__"] = Bad(_Interrupted, (KeyboardInterrupt,))
BAD["Ctrl-C at the end of __dlpack__"] = Bad(_InterruptedLater, (KeyboardInterrupt,))
BAD["an object"] = Bad(lambda memory, ledger: object(), (TypeError,))
BAD["an int of 71 bits"] = Bad(lambda memory, ledger: 2**70, (OverflowError,))
BAD["a list of objects"] = Bad(lambda memory, ledger: [object()], (TypeError, numba.core.errors.NumbaError), by_numba=False)
BAD["a byte-swapped array"] = Bad(lambda memory, ledger: memory.astype(">f8").view(np.ndarray), (BufferError,), "numpy")
BAD["a masked array"] = Bad(
    lambda memory, ledger: np.ma.masked_array([1.0, 2.0], [0, 1]), (numba.core.errors.NumbaError, TypeError), by_numba=False
)


def _released(memory, ledger):
    view = memoryview(bytearray(8))
    view.release()
    return view


BAD["a released memoryview"] = Bad(_released, (ValueError,), by_numba=False)


def _torch_bad():
    def gradient(memory, ledger):
        return torch.from_numpy(memory).requires_grad_()

    def result(memory, ledger):
        return gradient(memory, ledger) * 2

    def negated(memory, ledger):
        return torch._neg_view(torch.from_numpy(memory))

    def conjugated(memory, ledger):
        return torch.from_numpy(memory.astype("c16").view(np.ndarray)).conj()

    def freed(memory, ledger):
        tensor = torch.ones(3, dtype=torch.float64)
        tensor.untyped_storage().resize_(0)
        return tensor

    def cut(memory, ledger):
        tensor = torch.ones(3, dtype=torch.float64)
        tensor.untyped_storage().resize_(8)
        return tensor

    yield "that requires grad", gradient, BufferError
    yield "computed from one that requires grad", result, BufferError
    yield "negated lazily", negated, BufferError
    yield "conjugated lazily", conjugated, BufferError
    yield "of freed storage", freed, BufferError
    yield "cut off", cut, BufferError
    yield "sparse", lambda memory, ledger: torch.ones(3).to_sparse(), BufferError
    yield "meta", lambda memory, ledger: torch.ones(3, device="meta"), BufferError
    yield "with __torch_dispatch__", lambda memory, ledger: torch._efficientzerotensor(3), BufferError


if torch is not None:
    for _name, _make, _kind in _torch_bad():
        BAD[f"a torch tensor {_name}"] = Bad(_make, (_kind,), "torch")


def _call(kernel, arguments, company, position):
    return lambda: kernel(*arguments)


def _call_first(_, arguments, company, position):
    return lambda: fast_args(function_of(len(arguments), SUM))(*arguments)


def _call_by_keyword(kernel, arguments, company, position):
    named = {f"a{i}": value for i, value in reversed(list(enumerate(arguments)))}
    return lambda: kernel(**named)


def _call_half_by_keyword(kernel, arguments, company, position):
    half = len(arguments) // 2
    named = {f"a{i}": value for i, value in enumerate(arguments) if i >= half}
    return lambda: kernel(*arguments[:half], **named)


def _call_nogil(_, arguments, company, position):
    kernel = warm_kernel(len(arguments), company, nogil=True)
    return lambda: kernel(*arguments)


def _call_by_numba(_, arguments, company, position):
    return lambda: gather("text", *arguments)


def _call_variadic(_, arguments, company, position):
    return lambda: gather(*arguments)


def _call_in_a_tuple(_, arguments, company, position):
    return lambda: gather(1, (arguments[:position], 2, (arguments[position:],)))


@fast_args
def gather(*arguments):
    return len(arguments)


PATHS = {
    "first call": _call_first,
    "later call": _call,
    "by keyword": _call_by_keyword,
    "half by keyword": _call_half_by_keyword,
    "nogil": _call_nogil,
    "beside a string": _call_by_numba,
    "*args": _call_variadic,
    "in a tuple": _call_in_a_tuple,
}
NEEDS_COMPILATION = ("later call", "by keyword", "half by keyword", "nogil")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD)
def test_refused_at_every_position(name, path):
    bad = BAD[name]
    if path == "beside a string" and not bad.by_numba:
        pytest.skip("Numba's dispatcher is the one to refuse it")
    for count, company in itertools.product(SIZES, COMPANIES):
        if company == "buffers" and path != "first call":
            continue
        if count == 32 and path in NEEDS_COMPILATION and company != "fast":
            continue
        for position in positions(count):
            with scene(f"{position} of {count}", company):
                refuse(bad, path, count, company, position)


def refuse(bad: Bad, path: str, count: int, company: str, position: int) -> None:
    """Calls that are refused because of one argument, and one that is not."""
    start = (FAST.index(bad.like) - position) % len(FAST) if company == "fast" and bad.like in FAST else 0
    party, own = Party(company, count, start), Ledger()
    kernel = warm_kernel(count, company) if path in NEEDS_COMPILATION else None
    culprit = bad.make(np.full(3, 1.0).view(Memory), own)
    arguments = party.with_at(position, culprit)
    call = PATHS[path](kernel, arguments, company, position)
    if path == "later call" and company == "fast":
        for _ in range(3):
            kernel(*party.tensors)
        assert is_fast(kernel, *party.tensors)
    counted = [kernel] if kernel is not None else []
    if type(culprit) is not int:
        counted.append(culprit)
    with kept(*party.tensors, *counted):
        for _ in range(2):
            kind = raised(end_of(call))
            assert issubclass(kind, bad.kinds), f"raised {kind.__name__}, not {bad.kinds}"
            party.check()
            own.check(own.made)
    if path in NEEDS_COMPILATION:
        with kept(*party.tensors, kernel):
            assert kernel(*party.tensors) == count
    party.check()
    del call, arguments, culprit, counted
    party.let_go()


# ---- results and exceptions of kernels -------------------------------------------------------------------------------


def result_paths(kernel, party):
    """The calls of a kernel with ``how`` before the arguments: its very first, later ones, its fast entry if it has one."""
    names = [f"a{i}" for i in range(len(party.tensors))]
    for index in range(WARM):
        if index in (0, 1, WARM - 1):
            yield ("first call", "later call")[index] if index < 2 else "often called", functools.partial(
                kernel, 5, *party.tensors
            )
        else:
            kernel(5, *party.tensors)
    yield "by keyword", functools.partial(kernel, how=5, **dict(zip(names, party.tensors, strict=True)))


RESULTS = [
    (count, company, options)
    for count, company, options in itertools.product(SIZES, COMPANIES, ({}, {"nogil": True}))
    if (count < 32 or company == "mixed") and (not options or company in ("mixed", "fast")) and (
        company != "buffers" or count == 3)
]  # fmt: skip


def _result_id(case) -> str:
    count, company, options = case
    return "-".join([str(count), company, *options])


def result_body(count: int, company: str) -> str:
    """Numba has no way to give buffers that are no arrays back to Python."""
    return RESULT if company in ("fast", "owning") else RESULT.replace("MIDDLE", "MIDDLE[0]").replace("LAST[:2]", "LAST[0]")


@pytest.mark.parametrize("case", RESULTS, ids=_result_id)
def test_results_and_exceptions(case):
    """Results that hold arguments, views of them, and new objects; and exceptions: in a call of each path."""
    count, company, options = case
    body = result_body(count, company).replace("FIRST[1:]", "FIRST[0]" if company == "buffers" else "FIRST[1:]")
    kernel = fast_args(function_of(count, body, "how, "), **options)
    party = Party(company, count)
    with kept(*party.tensors, kernel):
        for path, call in result_paths(kernel, party):
            with scene(path):
                if path == "often called" and company == "fast" and not options:
                    assert is_fast(kernel, 5, *party.tensors)
                results = [call() for _ in range(3)]
                assert [result[3] for result in results] == [count] * 3
                assert all(result[-1] == (5, 5, 5) and result[2].tolist() == [count] * 2 for result in results)
                del results[1]
                assert [result[3] for result in results] == [count] * 2
                del results
                party.check()
        del call
    with kept(*party.tensors, kernel):
        check_exceptions(kernel, party, count, company)
    party.let_go()


def check_exceptions(kernel, party, count: int, company: str) -> None:
    """The kernel raises because of an element of the argument at each position."""
    for position in positions(count):
        for kind in ("numpy", party.kinds[position]):
            ledger = Ledger()
            if kind in ("bytearray", "memoryview"):
                continue  # no negative elements; others' type
            culprit = tensor_of(kind, np.full(3, -100.0).view(Memory), ledger)
            with scene(position, kind), kept(culprit):
                for _ in range(2):
                    end = end_of(kernel, 5, *party.with_at(position, culprit))
                    assert end == (ValueError, "('from the kernel', 3)"), end
                    party.check()
                    ledger.check(ledger.made)


Pair = collections.namedtuple("Pair", "first second")
TEXT = "a text that nobody else has".upper()



class Answer(enum.Enum):
    YES = 123456789  # no small int, which there is only one of


RESULTS_WITH_CONSTANTS = {
    "array": (lambda x: x[1:], [np.ndarray, np.dtype("f8")]),
    "text": (lambda x: TEXT, [TEXT]),
    "tuple with a text": (lambda x: (x[0], TEXT), [TEXT, tuple]),
    "named tuple": (lambda x: Pair(x[0], x), [Pair, np.ndarray]),
    "dtype": (lambda x: x.dtype, [np.dtype("f8")]),
    "scalar type": (lambda x: np.float32, [np.float32, np.dtype("f4")]),
    "enum": (lambda x: Answer.YES, [Answer, Answer.YES]),
}


@pytest.mark.parametrize("result", RESULTS_WITH_CONSTANTS)
def test_objects_that_every_result_refers_to(result):
    """The machine code that makes a result of objects that live elsewhere neither uses their references up nor adds any."""
    function, constants = RESULTS_WITH_CONSTANTS[result]
    kernel = fast_args(function)
    tensor = np.ones(3)
    for _ in range(WARM):
        kernel(tensor)
    gc.collect()
    before, blocks = [sys.getrefcount(constant) for constant in constants], sys.getallocatedblocks()
    for _ in range(1000):
        kernel(tensor)
    assert sys.getallocatedblocks() - blocks < 500
    changes = [sys.getrefcount(constant) - count for constant, count in zip(constants, before, strict=True)]
    assert all(-10 < change < 10 for change in changes), changes


@pytest.mark.parametrize("count", [3, 7])
def test_parallel_kernels(count):
    body = """s = 0.0
    for i in numba.prange(LAST.shape[0]):
        s += LAST[i]
    if SUM < 0:
        raise ValueError("from the kernel", 3)
    return FIRST[1:], s"""
    function = function_of(count, body, "how, ")
    function.__globals__["numba"] = numba
    kernel = fast_args(function, parallel=True)
    party = Party("mixed", count, 2)
    for _, call in result_paths(kernel, party):
        with kept(*party.tensors, kernel):
            assert [call()[1] for _ in range(3)] == [3.0] * 3
            party.check()
    del call
    with kept(*party.tensors, kernel):
        check_exceptions(kernel, party, count, "mixed")
    for name in ("device kDLCUDA, export", "__dlpack__ that raises KeyboardInterrupt", "a view that raises BufferError"):
        for position in positions(count):
            ledger = Ledger()
            culprit = BAD[name].make(np.ones(3).view(Memory), ledger)
            with scene(name, position), kept(*party.tensors, culprit, kernel):
                assert issubclass(raised(end_of(kernel, 5, *party.with_at(position, culprit))), BAD[name].kinds)
                party.check()
                ledger.check(ledger.made)
    culprit = None
    party.let_go()


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=["", "nogil"])
def test_stored_arguments(count, options):
    """A kernel keeps views of three arguments, and ends well or raises: they are held until the list lets them go."""
    kernel = fast_args(function_of(count, STORE, "stored, "), **options)
    stored = numba.typed.List.empty_list(numba.float64[::1])
    for company in ("fast", "owning") if options else ("fast",):
        party = Party(company, count)
        if company == "owning":
            party.tensors = [Exported(np.ones(3).view(Memory), party.ledger) for _ in range(count)]
            party.memories.clear()
            party.kinds.clear()
        ledger = Ledger()
        culprit = Viewed(np.full(3, -100.0).view(Memory), ledger)
        with kept(*party.tensors, culprit, kernel):
            for path in range(WARM):
                with scene(company, path):
                    kernel(stored, *party.tensors)
                    if path in (0, 1, 2, WARM - 1):
                        assert len(stored) == 3 and stored[0][0] == 1.0
                        for position in positions(count):
                            end = end_of(kernel, stored, *party.with_at(position, culprit))
                            assert end == (ValueError, "from the kernel"), end
                            assert ledger.out, "the view that the kernel stored has lost its memory"
                            refused = Dunder(np.ones(3), lanes=2)
                            assert raised(end_of(kernel, stored, *party.with_at(position, refused))) is BufferError
                        assert len(stored) == 3 + 3 * len(positions(count))
                    stored.clear()
                    party.check()
                    ledger.check(ledger.made)
        party.let_go()


# ---- what does not compile -------------------------------------------------------------------------------------------

COMPILE_ERRORS = {
    "TypingError at the first": "return FIRST.no_such_attribute",
    "TypingError at the middle": "return MIDDLE.no_such_attribute",
    "TypingError at the last": "return LAST.no_such_attribute",
    "a call of what is no function": "return FIRST(MIDDLE, LAST)",
    "an unsupported statement": "import os; return FIRST",
    "an unknown name": "return FIRST[0] + no_such_name",
    "a LoweringError": "return lower_not(FIRST)",
    "an exception in the compiler": "return type_not(FIRST)",
}


def lower_not(x):
    """In a kernel: types, and does not lower."""


def type_not(x):
    """In a kernel: an overload that raises an exception which is none of Numba's."""


@numba.extending.intrinsic
def _lower_not(typing_context, x):
    def code(context, builder, signature, arguments):
        raise NotImplementedError("it does not lower")

    return numba.float64(x), code


@numba.extending.overload(lower_not)
def _overload_lower_not(x):
    return lambda x: _lower_not(x)


@numba.extending.overload(type_not)
def _overload_type_not(x):
    raise ZeroDivisionError("not for this type")


@pytest.mark.parametrize("name", COMPILE_ERRORS)
@pytest.mark.parametrize("count", SIZES)
def test_what_does_not_compile(count, name):
    """The first call that fails, later ones, and by another path: nobody is kept alive by what Numba remembers."""
    function = function_of(count, COMPILE_ERRORS[name])
    function.__globals__.update(lower_not=lower_not, type_not=type_not)
    for company, options in itertools.product(COMPANIES, ({}, {"nogil": True})):
        if company == "mixed" and count < 32 and options:
            continue
        kernel = fast_args(function, **options)
        party = Party(company, count)
        with scene(company, options):
            for _ in range(3):
                with kept(*party.tensors, kernel):
                    assert issubclass(raised(end_of(kernel, *party.tensors)), Exception)
                party.check()
            named = {f"a{i}": tensor for i, tensor in enumerate(party.tensors)}
            with kept(*party.tensors, kernel):
                raised(end_of(kernel, **named))
                party.check()
            del named
            party.let_go()


def test_a_caught_compile_error_holds_its_arguments_no_longer_than_it_lives():
    """The exception's frames hold the arguments, as those of any exception do; what Numba keeps does not."""
    kernel = fast_args(function_of(3, "return LAST.no_such_attribute"))
    for _ in range(3):
        party = Party("mixed", 3)
        with kept(*party.tensors, kernel):
            with pytest.raises(numba.core.errors.TypingError) as caught:
                kernel(*party.tensors)
            del caught
        party.let_go()


def test_explicit_signatures_that_do_not_fit():
    kernel = fast_args("float64(float64, float64)")(lambda x, y: x + y)
    for position, kind in itertools.product((0, 1), PRODUCERS):
        ledger = Ledger()
        memory = np.ones(3).view(Memory)
        tensor = tensor_of(kind, memory, ledger)
        arguments = (tensor, 1.0) if position == 0 else (1.0, tensor)
        with scene(kind, position), kept(tensor, kernel):
            for _ in range(3):
                assert raised(end_of(kernel, *arguments)) is TypeError
        ledger.check(ledger.made)


def test_writing_to_what_is_readonly():
    for count in (1, 3, 7):
        for word, position in zip(("FIRST", "MIDDLE", "LAST"), (0, count // 2, count - 1), strict=True):
            kernel = fast_args(function_of(count, f"{word}[0] = 2.0"))
            party, ledger = Party("fast", count), Ledger()
            memory = np.ones(3).view(Memory)
            memory.flags.writeable = False
            for tensor in (memory, memory.view(np.ndarray), Dunder(memory, ledger), Legacy(memory, ledger)):
                arguments = party.with_at(position, tensor)
                with scene(word, type(tensor).__name__), kept(*arguments, kernel):
                    for _ in range(3):
                        assert issubclass(raised(end_of(kernel, *arguments)), numba.core.errors.TypingError)
                    party.check()
                    ledger.check(ledger.made)
            assert memory[0] == 1.0
            del arguments, tensor
            party.let_go()


# ---- what cannot be boxed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_results_that_python_has_no_object_for(count):
    """A kernel that returns a generator over an argument, a function, an optional; and one whose result cannot be boxed."""
    bodies = {
        "generator": "return (x for x in LAST)",
        "optional": "return LAST if SUM > 0 else None",
        "optional, none": "return LAST if SUM < 0 else None",
        "set": "return {SUM, 1.0}",
        "list": "return [LAST, LAST]",
        "dict": "return {1: LAST}",
        "text": "return 'text' + str(LAST.size)",
    }
    for (name, body), company in itertools.product(bodies.items(), ("fast", "owning")):
        kernel, party = fast_args(function_of(count, body)), Party(company, count)
        if name == "generator":
            kernel = fast_args(function_of(count, "for x in LAST:\n        yield x"))
        with scene(name, company), kept(*party.tensors, kernel):
            results = [end_of(kernel, *party.tensors) for _ in range(4)]
            assert results[0] is not results[1] or name == "optional, none" or count
            del results
            gc.collect()
            party.check()
        party.let_go()


@pytest.mark.parametrize("kind", ["__dlpack__", "exports only", "exchange table", "numpy"])
def test_generators_give_their_arguments_back(kind):
    """Before the first element and after the last. (In between Numba itself keeps them for ever; at no time does it own them.)"""
    kernel = fast_args(function_of(3, "for x in LAST:\n        yield x"))
    for is_used in (False, True):
        ledger, memory = Ledger(), np.arange(3.0).view(Memory)
        tensor = tensor_of(kind, memory, ledger)
        with kept(tensor):
            generator = kernel(1.0, 2.0, tensor)
            assert not is_used or list(generator) == [0.0, 1.0, 2.0]
            del generator
        ledger.check(ledger.made)


# ---- arguments that do not bind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PRODUCERS)
def test_what_does_not_bind(kind):
    """Missing, surplus, unknown and repeated arguments: nothing is exported at all, on a new kernel and on a warm one."""
    for count in (1, 3, 7, 32):
        kernels = [fast_args(function_of(count, SUM))]
        if count < 32:
            kernels.append(warm_kernel(count, "fast"))
        for kernel in kernels:
            ledger, memory = Ledger(), np.ones(3).view(Memory)
            tensor = tensor_of(kind, memory, ledger)
            same = [tensor] * count
            last = f"a{count - 1}"
            calls = [
                (same[1:], {}),
                ([], {}),
                ([*same, tensor], {}),
                ([*same, *same], {}),
                (same, {"unknown": tensor}),
                (same[1:], {"unknown": tensor}),
                (same, {"a0": tensor}),
                (same, {last: tensor}),
                (same, {last: tensor, "unknown": tensor}),
                ([], {"unknown": tensor, last: tensor}),
                ([*same, tensor], {last: tensor}),
                (same, {"": tensor}),
                (same, {"a0\0": tensor}),
            ]
            for arguments, named in calls:
                with scene(count, len(arguments), *named), kept(tensor, kernel):
                    for _ in range(3):
                        assert raised(end_of(kernel, *arguments, **named)) is TypeError
            ledger.check(0)
            del calls, same, arguments, named
            with kept(tensor):
                pass


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *BAD])
def test_explaining(name):
    """The kernel is not run, and what was exported to see is given back."""
    for count, company in itertools.product((1, 3, 7), ("fast", "mixed")):
        for position in positions(count):
            party, own = Party(company, count), Ledger()
            arguments, counted = tuple(party.tensors), ()
            if name is not None:
                culprit = BAD[name].make(np.ones(3).view(Memory), own)
                arguments = party.with_at(position, culprit)
                counted = () if type(culprit) is int else (culprit,)
                del culprit
            for kernel in (fast_args(function_of(count, SUM)), warm_kernel(count, company)):
                with scene(position, count, company), kept(*party.tensors, *counted, kernel):
                    for _ in range(2):
                        end = end_of(kernel.explain, *arguments)
                        assert name is None or not isinstance(end, tuple) or issubclass(end[0], BAD[name].kinds), end
                        for argument in arguments:
                            end = end_of(explain, argument)  # which asks a tensor for its elements' type
                            assert not isinstance(end, tuple) or not issubclass(end[0], Exception), end
                        del argument, end
                party.check()
                own.check(own.made)
            del arguments, counted
            party.let_go()


# ---- conversions -----------------------------------------------------------------------------------------------------


class Unmade:
    """A type that no tensor can be converted to."""


CONVERSIONS = {
    "from_dlpack": from_dlpack,
    "from_dlpack, copied": lambda x: from_dlpack(x, copy=True),
    "from_dlpack, another dtype": lambda x: from_dlpack(x, dtype="i2"),
    "from_dlpack, another device": lambda x: from_dlpack(x, device=(2, 0)),
    "from_dlpack, no device": lambda x: from_dlpack(x, device="nowhere"),
    "from_dlpack, a bad copy": lambda x: from_dlpack(x, copy="yes"),
    "from_dlpack, an unknown option": lambda x: from_dlpack(x, unknown=x),
    "from_dlpack, two": lambda x: from_dlpack(x, x),
    "to_dlpack, dropped": to_dlpack,
    "to_dlpack, versioned and dropped": lambda x: to_dlpack(x, max_version=(1, 3)),
    "to_dlpack, copied and dropped": lambda x: to_dlpack(x, max_version=(1, 0), copy=True),
    "to_dlpack, consumed": lambda x: np.from_dlpack(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, legacy and consumed": lambda x: np.from_dlpack(GivesLegacy(lambda _: to_dlpack(x))),
    "to_dlpack, consumed by a kernel": lambda x: gather(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, consumed by from_dlpack": lambda x: from_dlpack(Gives(lambda _: to_dlpack(x, max_version=(1, 0)))),
    "to_dlpack, a bad version": lambda x: to_dlpack(x, max_version="1.3"),
    "to_dlpack, another device": lambda x: to_dlpack(x, device=(2, 0)),
    "convert to NumPy": lambda x: convert(x, np.ndarray),
    "convert to NumPy, copied": lambda x: convert(x, np.ndarray, copy=True),
    "convert to NumPy, shared": lambda x: convert(x, np.ndarray, copy=False),
    "convert to what is no tensor": lambda x: convert(x, int),
    "convert to what is no tensor either": lambda x: convert(x, Unmade),
    "convert to what is no type": lambda x: convert(x, 5),
    "convert, a bad copy": lambda x: convert(x, np.ndarray, copy=3),
}
if torch is not None:
    CONVERSIONS["convert to PyTorch"] = lambda x: convert(x, torch.Tensor)
    CONVERSIONS["convert to PyTorch, copied"] = lambda x: convert(x, torch.Tensor, copy=True)
    CONVERSIONS["convert to PyTorch, shared"] = lambda x: convert(x, torch.Tensor, copy=False)
    CONVERSIONS["to_dlpack, consumed by PyTorch"] = lambda x: torch.from_dlpack(to_dlpack(x, max_version=(1, 0)))
if tvm_ffi is not None:
    CONVERSIONS["convert to tvm_ffi"] = lambda x: convert(x, tvm_ffi.Tensor)


@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions(way):
    """However a conversion ends, with a result that is dropped or with an exception: nothing is left."""
    call = CONVERSIONS[way]
    for kind, readonly in itertools.product(PRODUCERS, (False, True)):
        ledger, memory = Ledger(), np.ones(3).view(Memory)
        memory.flags.writeable = not readonly
        if readonly and kind in ("torch", "tvm_ffi", "array.array", "memoryview", "bytearray"):
            continue
        tensor = tensor_of(kind, memory, ledger)
        end_of(call, tensor)  # what is learnt at the first call stays
        with scene(kind, readonly), kept(tensor):
            for _ in range(3):
                end = end_of(call, tensor)
                del end
            if ledger.out:
                gc.collect()
            ledger.check(ledger.made)
        owner = weakref.ref(memory)
        forget_notes(getattr(tensor, "inner", tensor))
        forget_notes(tensor)
        del tensor, memory
        if owner() is not None:
            gc.collect()
        assert owner() is None, f"the memory of {kind} is held for ever"


@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions_that_are_refused(way):
    call = CONVERSIONS[way]
    for name, bad in BAD.items():
        if way == "to_dlpack, consumed by PyTorch" and name.startswith("device"):
            continue  # PyTorch takes the capsule, fails, and calls the deleter with its exception set
        ledger, memory = Ledger(), np.ones(3).view(Memory)
        tensor = bad.make(memory, ledger)
        if type(tensor) is int:
            continue
        end_of(call, tensor)
        with scene(name), kept(tensor):
            for _ in range(2):
                end = end_of(call, tensor)
                del end
            if ledger.out:
                gc.collect()
            ledger.check(ledger.made)


SPEAKING = {
    "fast_args": lambda thing: fast_args(thing),
    "fast_args, grad": lambda thing: fast_args(grad=thing),
    "convert, to": lambda thing: convert(np.ones(3), thing),
    "convert, copy": lambda thing: convert(np.ones(3), np.ndarray, copy=thing),
    "from_dlpack, copy": lambda thing: from_dlpack(np.ones(3), copy=thing),
    "from_dlpack, device": lambda thing: from_dlpack(np.ones(3), device=thing),
    "from_dlpack, dtype": lambda thing: from_dlpack(np.ones(3), dtype=thing),
    "to_dlpack, max_version": lambda thing: to_dlpack(np.ones(3), max_version=thing),
    "to_dlpack, device": lambda thing: to_dlpack(np.ones(3), device=thing),
    "polyfill": lambda thing: polyfill(thing),
    "exchange_api": lambda thing: exchange_api(thing),
}
"""Calls that name in their exception what they were given."""


@needs_torch
def test_messages_do_not_read_a_tensor_without_memory():
    """PyTorch reads the elements for the ``repr`` of a tensor, also of one whose memory was freed: the process would die."""
    done = run_python(
        """
        import torch
        from test_ownership import SPEAKING

        tensor = torch.ones(3)
        tensor.untyped_storage().resize_(0)
        for name, call in SPEAKING.items():
            print(name, flush=True)
            try:
                call(tensor)
            except (TypeError, ValueError, BufferError):
                pass
            else:
                raise AssertionError("it was accepted")
        """,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode} at {done.stdout.splitlines()[-1:]}\n{done.stderr[-1000:]}"


# ---- results that outlive refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exports only", "exchange table", "__dlpack__", "wrapper", "numpy", "subclass of numpy"])
def test_kept_views_among_refused_calls(kind):
    """Views of earlier calls stay valid while later calls are refused; the frames' memory blocks are not mixed up."""

    @fast_args(returns=np.ndarray)
    def view(x, y):
        return x[1:]

    generator = np.random.default_rng(7)
    ledger = Ledger()
    memories = [np.arange(3.0) + 10 * i for i in range(6)]
    tensors = [tensor_of(kind, memory.view(Memory), ledger) for memory in memories]
    bad = Dunder(np.ones(3), ledger, lanes=2)
    unlucky = Exported(np.ones(3), ledger, export=FUNCTIONS["raises KeyboardInterrupt"][0])
    with kept(*tensors, bad, unlucky, view):
        held: collections.deque = collections.deque(maxlen=20)
        for _ in range(400):
            which = int(generator.integers(len(tensors)))
            held.append((which, view(tensors[which], 1.0)))
            if generator.random() < 0.5:
                assert raised(end_of(view, tensors[which], bad)) is BufferError
            if generator.random() < 0.3:
                assert raised(end_of(view, tensors[which], unlucky)) is KeyboardInterrupt
            for index, kept_view in held:
                assert kept_view.tolist() == [10 * index + 1.0, 10 * index + 2.0]
        del kept_view
        if kind not in ("numpy", "subclass of numpy"):
            assert ledger.out == 20
        held.clear()
    ledger.check(ledger.made)


# ---- types that come and go ------------------------------------------------------------------------------------------


def plain_table():
    """A new type with an exchange table, whose tensors need no guard: an instance."""
    return made_producers.tabled_type("Plain")(np.ones(3))


def guarded_table():
    """A new subclass of PyTorch's tensor, which has a guard: an instance."""
    return torch.ones(3, dtype=torch.float64).as_subclass(type("Guarded", (torch.Tensor,), {}))


def call_often(kernel, tensor) -> None:
    for _ in range(WARM):
        assert kernel(tensor) == 1.0


@needs_torch
def test_a_plan_without_a_guard_is_not_used_again_for_pytorch():
    kernel = fast_args(lambda x: x[0])
    call_often(kernel, plain_table())
    gc.collect()
    tensor = guarded_table()
    call_often(kernel, tensor)
    assert is_fast(kernel, tensor)
    for bad in (tensor.clone().requires_grad_(), torch._neg_view(tensor.as_subclass(torch.Tensor)).as_subclass(type(tensor))):
        assert raised(end_of(kernel, bad)) is BufferError


@needs_torch
def test_a_plan_with_a_guard_is_not_used_again_for_other_tensors():
    run_python(
        """
        import gc
        from fastexchange import fast_args
        from test_ownership import call_often, guarded_table, plain_table

        kernel = fast_args(lambda x: x[0])
        call_often(kernel, guarded_table())
        gc.collect()
        call_often(kernel, plain_table())
        """
    )


# ---- endurance -------------------------------------------------------------------------------------------------------


def test_memory_stays_flat():
    """The soak of ``soak.py``, in small: calls, and types that come and go."""
    done = run_python("import soak; soak.main(['--calls', '20000', '--types', '2000'])")
    assert "memory flat" in done.stdout, done.stdout
