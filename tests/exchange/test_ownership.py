"""Ownership at every exit: whatever way a call ends, each managed tensor is given back once and each reference is back.

A table: how the call ends x which argument is to blame (first, middle, last of 1, 3, 7, 32) x the path that the call takes x who
made the arguments. One body counts, ``counting.account``. What always runs has each row by each path in two companies, the
places taking turns; the whole product is for the night.
"""

import array as stdlib_array
import collections
import ctypes
import enum
import functools
import gc
import itertools
import signal
import sys
import weakref
from collections.abc import Callable
from typing import NamedTuple

import hostile_producers as hostile
import numba
import numpy as np
import pytest
import test_escape
from frameworks import has_table, torch
from fuzzing import is_fast
from hostile_producers import CONTENTS, EXPORTED, FUNCTIONS, RETURNS, Gives
from interpreter import run_python
from made_producers import ONLY_NUMBA, Dunder, Ledger, Legacy
from numba.core.errors import NumbaError, TypingError

from counting import (  # isort: skip
    DELETING, PRODUCERS, TENSORS, Exported, Viewed, account, check_dies, end_of, forget_notes, is_resizable, kept, memory_of,
    no_violations, scene, tensor_of,
)
from fastexchange import explain, fast_args, to_dlpack
from fastexchange.calls import dependencies

assert no_violations  # a fixture
SIZES = (1, 3, 7, 32)
PLACES = [(count, position) for count in SIZES for position in sorted({0, count // 2, count - 1})]
"""How many arguments there are, and which is to blame: the first, the middle one, the last."""
WARM = 60
"""Calls after which each combination of argument types in use has its fast entry."""
FAST = ["numpy", "exchange table", *["torch"] * has_table()]
SLOW_TORCH = ["torch"] * (torch is not None and not has_table())
COMPANIES = {
    "fast": FAST,
    "owning": ["__dlpack__", "legacy", "exports only", "wrapper", "unversioned", *SLOW_TORCH],
    "buffers": ["memoryview", "array.array", "bytearray"],
    "mixed": list(PRODUCERS),
    "deleting": list(DELETING),
}
"""Who stands beside the argument to blame, by turns. Calls with arguments of the first are made by fast entries."""


class Party:
    """The arguments of a call: `count` of them, made in turn by the producers of a company."""

    def __init__(self, company: str, count: int, start: int = 0):
        kinds = COMPANIES[company]
        self.ledger, self.kinds = Ledger(), [kinds[(start + i) % len(kinds)] for i in range(count)]
        memories = [memory_of(1, 1, 1) for _ in range(count)]
        self.memories = [weakref.ref(memory) for memory in memories]
        self.tensors = [tensor_of(kind, memory, self.ledger) for kind, memory in zip(self.kinds, memories, strict=True)]

    def with_at(self, position: int, thing) -> tuple:
        """The arguments, `thing` in the place of one."""
        return (*self.tensors[:position], thing, *self.tensors[position + 1 :])

    def let_go(self) -> None:
        """Every export was given back once; nobody else holds the arguments, or their memory."""
        self.ledger.check(self.ledger.made)
        for tensor in self.tensors:
            forget_notes(tensor)
            if isinstance(tensor, memoryview):
                tensor.release()
            elif isinstance(tensor, (bytearray, stdlib_array.array)):
                assert is_resizable(tensor)
        tensor = None
        self.tensors.clear()
        for kind, memory in zip(self.kinds, self.memories, strict=False):
            with scene(kind):
                check_dies(memory)


def function_of(count: int, body: str, before: str = "", **names):
    """A function of `count` parameters ``a0``, ``a1`` …, behind those in `before`. In `body`: ALL, SUM, FIRST, MIDDLE, LAST."""
    every = [f"a{i}" for i in range(count)]
    words = {"ALL": ", ".join(every), "SUM": " + ".join(f"{name}[0]" for name in every)}
    words.update(zip(("FIRST", "MIDDLE", "LAST"), (every[0], every[count // 2], every[-1]), strict=True))
    for word, text in words.items():
        body = body.replace(word, text)
    exec(f"def function({before}{words['ALL']}):\n    {body}", namespace := {"np": np, "numba": numba, **names})
    return namespace["function"]


def new_kernel(count: int, **options):
    return fast_args(function_of(count, "return SUM"), **options)


@functools.cache
def known_kernel(count: int, company: str, **options):
    """A kernel that knows all calls with arguments of a company, and makes those of the fast one by fast entries."""
    kernel = new_kernel(count, **options)
    for start in range(len(FAST) if company == "fast" else 1):
        party = Party(company, count, start)
        for _ in range(WARM if company == "fast" and not options else 2):
            assert kernel(*party.tensors) == count
    return kernel


@fast_args
def gather(*arguments):
    return len(arguments)


def by_keyword(kernel, arguments, positional=0):
    named = {f"a{i}": value for i, value in reversed(list(enumerate(arguments))) if i >= positional}
    return kernel(*arguments[:positional], **named)


def explain_each(kernel, arguments):
    """And each by itself, which asks a tensor for its elements' type."""
    for argument in arguments:
        end = end_of(explain, argument)
        assert not isinstance(end, tuple) or not issubclass(end[0], Exception), end
    del end, argument
    return kernel.explain(*arguments)


class Path(NamedTuple):
    call: Callable
    """``call(kernel, arguments, position)``"""
    kernel: Callable = lambda count, company: gather

    @property
    def is_compiled(self) -> bool:
        """Whether it needs a kernel that is compiled for the company."""
        return self.kernel in (known_kernel, known_without_gil)


def known_without_gil(count, company):
    return known_kernel(count, company, nogil=True)


def another(count, company):
    return new_kernel(count)


LATER = "later call"
PATHS = {
    "first call": Path(lambda kernel, tensors, _: kernel(*tensors), another),
    LATER: Path(lambda kernel, tensors, _: kernel(*tensors), known_kernel),
    "by keyword": Path(lambda kernel, tensors, _: by_keyword(kernel, tensors), known_kernel),
    "half by keyword": Path(lambda kernel, tensors, _: by_keyword(kernel, tensors, len(tensors) // 2), known_kernel),
    "without the GIL": Path(lambda kernel, tensors, _: kernel(*tensors), known_without_gil),
    "bound launch": Path(lambda kernel, tensors, _: kernel.bind(*tensors)(), known_kernel),
    "explained later": Path(lambda kernel, tensors, _: explain_each(kernel, tensors), known_kernel),
    "beside a string": Path(lambda kernel, tensors, _: kernel("text", *tensors)),
    "by Numba's dispatcher": Path(lambda kernel, tensors, _: kernel(ONLY_NUMBA, *tensors)),
    "as *args": Path(lambda kernel, tensors, _: kernel(*tensors)),
    "in a tuple": Path(lambda kernel, tensors, position: kernel(1, (tensors[:position], 2, (tensors[position:],)))),
    "explained first": Path(lambda kernel, tensors, _: kernel.explain(*tensors), another),
}
COMPILED_FOR = {"fast": SIZES, "owning": (1, 3), "buffers": (3,), "mixed": (7,), "deleting": (7,)}
"""The counts of arguments with which paths are tried that need a compiled kernel."""
COMPILED_AT_NIGHT = {"fast": SIZES, **dict.fromkeys(("owning", "buffers", "mixed", "deleting"), (1, 3, 7))}
ANY_COUNT = {**dict.fromkeys(COMPANIES, SIZES), "deleting": (1, 3, 7)}
"""The same for the other paths. Some deleters take long."""


# ---- what is refused -------------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """An argument that is refused: ``make(memory, ledger)``, how, and of which kind of the fast company it is."""

    make: Callable
    kinds: tuple
    like: str | None = None
    by_numba: bool = True
    """Whether it is refused beside what only Numba understands, before Numba is asked."""


class Raises(Dunder):
    """``__dlpack__`` raises a new exception each time: one that is raised again would collect tracebacks."""

    def __init__(self, memory, ledger, error):
        super().__init__(memory, ledger)
        self.error = error

    def __dlpack__(self, *, max_version=None):
        raise self.error()


class Interrupted(Dunder):
    """Ctrl-C arrives while ``__dlpack__`` runs, and it has made its capsule, which gives its tensor back."""

    def __dlpack__(self, *, max_version=None):
        made = to_dlpack(Exported(self.array, self.ledger), max_version=(1, 0))
        signal.raise_signal(signal.SIGINT)
        return made


class InterruptedLater(Dunder):
    """Ctrl-C is noticed after ``__dlpack__`` has returned, by the next Python code that runs."""

    def __dlpack__(self, *, max_version=None):
        signal.raise_signal(signal.SIGINT)


def lying(cls, lies, like=None):
    return Bad(lambda memory, ledger: cls(memory, ledger, **lies), (BufferError,), like)


def acting(cls, act, kinds, like=None):
    return Bad(lambda memory, ledger: cls(memory, ledger, view=act, export=act), kinds, like)


def released(memory, ledger):
    view = memoryview(bytearray(8))
    view.release()
    return view


SAID = (
    "device kDLCUDA", "device 127", "ndim -1", "ndim 65", "NULL shape", "negative size (-1,)", "a stride of 4611686018427387904",
    "NULL data and a byte offset of 0", "2 lanes", "code 0 of 4 bits", "code 200 of 8 bits", "everything wrong",
)  # fmt: skip
SAID_BY_EXPORTS = ("major version 2", "major version 0", "the largest major version")
DONE = {name: FUNCTIONS[name] for name in (
    "-1 and no exception, -1", "filled, -1 and no exception", "raises BufferError", "raises FileNotFoundError",
    "raises KeyboardInterrupt", "raises SystemExit", "raises MemoryError", "0 and BufferError set",
    "0 and KeyboardInterrupt set", "filled, 0 and OSError set", "filled, 0 and KeyboardInterrupt set",
    "no exception type at all",
)}  # fmt: skip
DONE = {  # who raises, raises a new exception each time
    name: (hostile.raising(ends) if name.startswith("raises ") else act, ends if isinstance(ends, tuple) else (ends,))
    for name, (act, ends) in DONE.items()
}
RETURNED = ("None", "itself", "a capsule of a longer name", "a consumed capsule", "a consumed legacy capsule")
RAISED = (BufferError, KeyError, functools.partial(hostile.Odd, 1, 2, third=3), KeyboardInterrupt, SystemExit)
BAD = {
    **{f"{name}, view": lying(Viewed, CONTENTS[name][0], "exchange table") for name in SAID},
    **{f"{name}, {form}": lying(cls, CONTENTS[name][0])
       for name in SAID for form, cls in (("export", Exported), ("__dlpack__", Dunder), ("legacy", Legacy))},
    **{f"{name}, {form}": lying(cls, EXPORTED[name][0])
       for name in SAID_BY_EXPORTS for form, cls in (("export", Exported), ("__dlpack__", Dunder))},
    **{f"a view that {name}": acting(Viewed, *row, "exchange table") for name, row in DONE.items()},
    **{f"an export that {name}": acting(Exported, *row) for name, row in DONE.items()},
    **{f"__dlpack__ that returns {name}": Bad(functools.partial(Gives, RETURNS[name]), (BufferError,)) for name in RETURNED},
    **{f"__dlpack__ that raises {type(error()).__name__}": Bad(functools.partial(Raises, error=error), (type(error()),))
       for error in RAISED},
    "an export of NULL": acting(Exported, lambda tensor, out: 0, (BufferError,)),
    "Ctrl-C in __dlpack__": Bad(Interrupted, (KeyboardInterrupt,)),
    "Ctrl-C at the end of __dlpack__": Bad(InterruptedLater, (KeyboardInterrupt,)),
    "an object": Bad(lambda memory, ledger: object(), (TypeError,)),
    "an int of 71 bits": Bad(lambda memory, ledger: 2**70, (OverflowError,)),
    "a list of objects": Bad(lambda memory, ledger: [object()], (TypeError, NumbaError), by_numba=False),
    "a byte-swapped array": Bad(lambda memory, _: memory.astype(">f8").view(np.ndarray), (BufferError,), "numpy"),
    "a masked array": Bad(lambda memory, _: np.ma.masked_array([1.0, 2.0], [0, 1]), (NumbaError, TypeError), by_numba=False),
    "a released memoryview": Bad(released, (ValueError,), by_numba=False),
}  # fmt: skip


def resized(nbytes: int):
    tensor = torch.ones(3, dtype=torch.float64)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


if torch is not None:
    for _name, _make in {
        "that requires grad": lambda memory: torch.from_numpy(memory).requires_grad_(),
        "computed from one that requires grad": lambda memory: torch.from_numpy(memory).requires_grad_() * 2,
        "negated lazily": lambda memory: torch._neg_view(torch.from_numpy(memory)),
        "conjugated lazily": lambda memory: torch.from_numpy(memory.astype("c16").view(np.ndarray)).conj(),
        "of freed storage": lambda memory: resized(0),
        "cut off": lambda memory: resized(8),
        "sparse": lambda memory: torch.ones(3).to_sparse(),
        "meta": lambda memory: torch.ones(3, device="meta"),
        "with __torch_dispatch__": lambda memory: torch._efficientzerotensor(3),
    }.items():
        BAD[f"a torch tensor {_name}"] = Bad(lambda memory, ledger, make=_make: make(memory), (BufferError,), "torch")


def refuse(bad: Bad | None, path: Path, company: str, count: int, position: int, turn: int = 0) -> None:
    """Calls that are refused because of one argument; or, where none is bad, calls that end well. Then one that does."""
    start = 4 * turn if company == "deleting" else 0
    if company == "fast" and bad is not None and bad.like in FAST:
        start = (FAST.index(bad.like) - position) % len(FAST)
    party, own = Party(company, count, start), Ledger()
    culprit = party.tensors[position] if bad is None else bad.make(memory_of(1, 1, 1), own)
    arguments, kernel = party.with_at(position, culprit), path.kernel(count, company)
    if path is PATHS[LATER] and company == "fast":
        for _ in range(3):
            kernel(*party.tensors)
        assert is_fast(kernel, *party.tensors)

    call = functools.partial(path.call, kernel, arguments, position)
    counted = [*party.tensors, *[kernel] * (path.kernel is not another), *[culprit] * (type(culprit) is not int)]
    if bad is None or path.call in (PATHS["explained first"].call, PATHS["explained later"].call):  # may explain a refusal
        for _ in range(2):
            end = end_of(call)  # what is learnt or compiled in the first stays
            assert not isinstance(end, tuple) or issubclass(end[0], bad.kinds), end
            del end
        account(call, *counted, ledgers=(party.ledger, own))
    else:
        account(call, *counted, ledgers=(party.ledger, own), ends=bad.kinds)
    if path.is_compiled:
        account(functools.partial(kernel, *party.tensors), kernel, *party.tensors, ledgers=(party.ledger,), ends=count)
    del call, arguments, culprit, counted
    party.let_go()


ROWS: dict[str, Bad | None] = {"nothing": None, **BAD}


def can_be_tried(bad: Bad | None, path: str) -> bool:
    """Else Numba's dispatcher is the one to refuse it; or the call that ends well is no first one, when it is counted."""
    return path not in ("first call", "explained first") if bad is None else bad.by_numba or path != "by Numba's dispatcher"


@pytest.mark.parametrize("path", PATHS)
def test_refused(path, monkeypatch):
    """Each row by each path, in two companies, the later calls always by the fast one; the places take turns, too."""
    monkeypatch.setattr(dependencies, "extensions", dict)  # other tests' extensions of Numba, which each explanation describes
    sizes, p = COMPILED_FOR if PATHS[path].is_compiled else ANY_COUNT, list(PATHS).index(path)
    for i, (name, bad) in enumerate(ROWS.items()):
        turns = (i + p) % 5, (i + p + 2) % 5, *[0] * (path == LATER)
        for company in {list(COMPANIES)[k]: None for k in turns} if can_be_tried(bad, path) else ():
            places = [place for place in PLACES if place[0] in sizes[company]]
            place = places[(i + 3 * p + 7 * turns[0]) % len(places)]
            with scene(name, company, place):
                refuse(bad, PATHS[path], company, *place, turn=i)


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ROWS)
def test_refused_everywhere(name, path):
    sizes = COMPILED_AT_NIGHT if PATHS[path].is_compiled else ANY_COUNT
    for company, place in itertools.product(COMPANIES, PLACES):
        if place[0] in sizes[company] and can_be_tried(ROWS[name], path):
            with scene(company, place):
                refuse(ROWS[name], PATHS[path], company, *place)


@pytest.mark.parametrize("kind", [*PRODUCERS, *DELETING])
def test_the_same_tensor_several_times(kind):
    ledger, kernel = Ledger(), known_kernel(3, "mixed")
    tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
    for call in (lambda: kernel(tensor, tensor, tensor), lambda: gather(tensor, (tensor, tensor), ONLY_NUMBA)):
        assert end_of(call) == 3
        account(call, tensor, kernel, ledgers=(ledger,), ends=3)


# ---- how kernels end -------------------------------------------------------------------------------------------------

RAISE = """if SUM < 0:
        raise ValueError("from the kernel", 3)
    """
OF_ALL = RAISE + """s = SUM
    return FIRST[1:], (MIDDLE[0], LAST[0]), np.full(2, s), s, None, "text", (how, how, how)"""
BODIES = {
    "results": OF_ALL.replace("MIDDLE[0]", "MIDDLE").replace("LAST[0]", "LAST[:2]"),
    "results, of buffers": OF_ALL.replace("FIRST[1:]", "FIRST[0]"),  # Numba gives only arrays back to Python
    "results, of all": OF_ALL,
    "stored": "how.append(FIRST); how.append(MIDDLE[1:]); how.append(LAST[:1])\n    " + RAISE,
    "parallel": RAISE + """s = 0.0
    for i in numba.prange(FIRST.shape[0]):
        s += FIRST[i] / FIRST.shape[0]
    return FIRST[1:], (), np.full(2, SUM), SUM, (how, how, how)""",
}
"""Kernels of `how` and tensors: results that hold arguments, views of them, and new objects; views stored in a list `how`."""
OPTIONS = {"": {}, "nogil": {"nogil": True}, "parallel": {"parallel": True}}
ENDS = [
    ("results", 1, "owning", ""), ("results", 3, "owning", "nogil"), ("results", 3, "fast", ""), ("results", 7, "fast", "nogil"),
    ("results", 3, "deleting", ""), ("results, of buffers", 3, "buffers", ""), ("results, of all", 7, "mixed", ""),
    ("results, of all", 32, "mixed", "nogil"), ("stored", 1, "fast", "nogil"), ("stored", 3, "fast", ""),
    ("stored", 7, "owning", "nogil"), ("parallel", 3, "mixed", "parallel"), ("parallel", 7, "owning", "parallel"),
]  # fmt: skip
"""Each body, count, company and option, and most pairs of them. The others at night."""
FORMS = {"mixed": "results, of all", "buffers": "results, of buffers"}
ENDS_AT_NIGHT = {
    *((FORMS.get(each[1], "results"), *each) for each in itertools.product(SIZES, COMPANIES, ("", "nogil"))),
    *(("stored", *each) for each in itertools.product((1, 3, 7), ("fast", "owning"), ("", "nogil"))),
}


def check_result(body: str, result, how, calls: int, count: int) -> None:
    if body == "stored":
        assert result is None and len(how) == 3 * calls and all(array[0] == 1.0 for array in how)
    else:
        assert result[3] == count and result[2].tolist() == [count] * 2 and result[-1] == (5, 5, 5)
        assert body == "results, of buffers" or result[0].tolist() == [1.0, 1.0]


def clear(how) -> None:
    if type(how) is not int:
        how.clear()


@pytest.mark.parametrize(
    "case", [*ENDS, *(pytest.param(case, marks=pytest.mark.nightly) for case in sorted(ENDS_AT_NIGHT - {*ENDS}))],
    ids=lambda case: "-".join(map(str, case)),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:unsafe cast from readonly")  # Numba's, for legacy exports
def test_how_kernels_end(case):
    """With results that hold their arguments, exceptions, refusals: by each path."""
    body, count, company, options = case
    party = Party(company, count)
    if body == "stored" and company == "owning":  # the list takes no readonly arrays
        party.tensors[:] = [Exported(memory_of(1, 1, 1), party.ledger) for _ in range(count)]
        party.memories.clear()
    kernel = fast_args(function_of(count, BODIES[body], "how, "), **OPTIONS[options])
    how = test_escape.new_list() if body == "stored" else 5

    def named(how, *tensors):
        return kernel(how=how, **{f"a{i}": tensor for i, tensor in enumerate(tensors)})

    calls = {"first": kernel, "later": kernel, "often called": kernel, "by keyword": named}
    if body != "stored":
        calls["bound"] = lambda how, *tensors: kernel.bind(how, *tensors)()
    for path, call in calls.items():
        with scene(path), kept(*party.tensors, kernel):
            for _ in range(WARM if path == "often called" else 0):
                kernel(how, *party.tensors)
                clear(how)
            if path == "often called" and company == "fast" and not options and body != "stored":
                assert is_fast(kernel, how, *party.tensors)
            results = [call(how, *party.tensors) for _ in range(3)]
            for result in results:
                check_result(body, result, how, 3, count)
            del results[1], result
            for result in results:
                check_result(body, result, how, 3, count)
            del results, result
            clear(how)
        party.ledger.check(party.ledger.made)
        with scene(path):
            blame(named if path == "by keyword" else kernel, how, party)
    del call, calls
    party.let_go()


def blame(kernel, how, party: Party) -> None:
    """The kernel raises because of an element of the argument at each position, or one is refused there."""
    count = len(party.tensors)
    refused = ("device kDLCUDA, export", "a view that raises BufferError", "__dlpack__ that raises KeyboardInterrupt")
    for position in sorted({0, count // 2, count - 1}):
        for kind in dict.fromkeys((party.kinds[position], "numpy", "exchange table", *refused)):
            if kind in ("bytearray", "memoryview"):
                continue  # no negative elements; others' type
            ledger, memory = Ledger(), memory_of(-100, -100, -100)
            culprit = BAD[kind].make(memory, ledger) if kind in BAD else tensor_of(kind, memory, ledger)
            arguments = party.with_at(position, culprit)

            def call(arguments=arguments, ledger=ledger, is_taken=kind not in BAD):
                try:
                    kernel(how, *arguments)
                except ValueError as error:
                    assert is_taken and str(error) == "('from the kernel', 3)", error
                    if type(how) is not int:
                        assert len(how) == 3 and ledger.out == (ledger.made > 0), "what was stored has lost its memory"
                    raise
                finally:
                    clear(how)

            with scene(position, kind):
                ends = BAD[kind].kinds if kind in BAD else (ValueError,)
                account(call, culprit, *party.tensors, ledgers=(ledger, party.ledger), ends=ends)
            del call, culprit, arguments


# ---- nothing is left -------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "first second")
TEXT = "a text that nobody else has".upper()


class Answer(enum.Enum):
    YES = 123456789  # no small int, which there is only one of


def refuses(x):
    if x[0] == 0:
        raise ValueError("no")
    return x


LEAVES = {
    "itself": (test_escape.itself, []),
    "two parts": (test_escape.two_parts, []),
    "a copy": (test_escape.copied, []),
    "more": (lambda x: gather(x, 1, None, 2.5, (1, 2)), []),
    "an exception": (functools.partial(end_of, fast_args(refuses)), []),
    "a refusal": (functools.partial(end_of, gather, 1, object()), []),
    "an array": (fast_args(lambda x: x[1:]), [np.ndarray, np.dtype("f8")]),
    "a text": (fast_args(lambda x: TEXT), [TEXT]),
    "a tuple with a text": (fast_args(lambda x: (x[0], TEXT)), [TEXT, tuple]),
    "a named tuple": (fast_args(lambda x: Pair(x[0], x)), [Pair, np.ndarray]),
    "a dtype": (fast_args(lambda x: x.dtype), [np.dtype("f8")]),
    "a scalar type": (fast_args(lambda x: np.float32), [np.float32, np.dtype("f4")]),
    "an enum": (fast_args(lambda x: Answer.YES), [Answer, Answer.YES]),
}
"""Calls, and the objects that live elsewhere which every result refers to: it neither uses their references up nor adds any."""


class Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "uordblks", "h", "i")]


def bytes_in_use() -> int:
    """What C's allocator has given and not got back: frames, memory blocks of escaped arrays, exports. 0 if it cannot say."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = Mallinfo
    return count().uordblks


class Forgetful(list):
    def append(self, item):
        pass


@pytest.mark.parametrize("name", LEAVES)
def test_a_thousand_calls_leave_nothing(name):
    call, constants = LEAVES[name]
    for kind in TENSORS:
        ledger, memory = Ledger(), np.arange(4.0)
        tensor = tensor_of(kind, memory, ledger)
        for each in (tensor, getattr(tensor, "inner", tensor)):
            if isinstance(each, Dunder):
                each.capsules = each.asked = Forgetful()
        for _ in range(250):  # until nothing is left to compile, and notes are full
            call(tensor)
        gc.collect()
        counted = [*constants, memory]
        for _ in range(3):  # a leak is there each time; the heap may also grow once, for whatever reason
            before = [sys.getrefcount(each) for each in counted], sys.getallocatedblocks(), bytes_in_use()
            for _ in range(1000):
                call(tensor)
            gc.collect()
            blocks, native = sys.getallocatedblocks() - before[1], bytes_in_use() - before[2]
            changes = [sys.getrefcount(each) - count for each, count in zip(counted, before[0], strict=True)]
            if blocks < 500 and native < 12_000:
                break
        with scene(kind):
            assert all(-10 < change < 10 for change in changes), changes
            assert blocks < 500 and native < 12_000, (blocks, native)
        ledger.check(ledger.made)


@pytest.mark.slow
def test_memory_stays_flat():
    """The soak of ``soak.py``, in small: calls, and types that come and go."""
    done = run_python("import soak; soak.main(['--calls', '4000', '--types', '1500'])")
    assert "memory flat" in done.stdout, done.stdout


# ---- what does not compile, does not bind ----------------------------------------------------------------------------

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


def check_compile_error(name: str, count: int, company: str, start: int, options: dict) -> None:
    """The first call that fails, later ones, and by other paths: nobody is kept alive by what Numba remembers."""
    function = function_of(count, COMPILE_ERRORS[name], lower_not=lower_not, type_not=type_not)
    kernel, party = fast_args(function, **options), Party(company, count, start)
    with scene(count, company, options):
        for call in (kernel, lambda *tensors: by_keyword(kernel, tensors)):
            call = functools.partial(call, *party.tensors)
            account(call, *party.tensors, kernel, ledgers=(party.ledger,), ends=(Exception,), times=3)
        del call
        party.let_go()


@pytest.mark.parametrize("name", COMPILE_ERRORS)
def test_what_does_not_compile(name):
    """Each error with each company, and with each count of arguments."""
    i = list(COMPILE_ERRORS).index(name)
    for k, company in enumerate(COMPANIES):
        check_compile_error(name, SIZES[(i + k) % 4], company, 4 * i, {"nogil": True} if (i + k) % 3 == 0 else {})


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILE_ERRORS)
@pytest.mark.parametrize("count", SIZES)
def test_what_does_not_compile_anywhere(count, name):
    for company, options in itertools.product(COMPANIES, ({}, {"nogil": True})):
        check_compile_error(name, count, company, 0, options)


def test_a_caught_compile_error_holds_its_arguments_no_longer_than_it_lives():
    """The exception's frames hold the arguments, as those of any exception do; what Numba keeps does not."""
    kernel = fast_args(function_of(3, "return LAST.no_such_attribute"))
    for _ in range(3):
        party = Party("mixed", 3)
        with kept(*party.tensors, kernel):
            with pytest.raises(TypingError) as caught:
                kernel(*party.tensors)
            del caught
        party.let_go()


def test_explicit_signatures_that_do_not_fit():
    kernel = fast_args("float64(float64, float64)")(lambda x, y: x + y)
    for kind in PRODUCERS:
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
        for arguments in ((tensor, 1.0), (1.0, tensor)):
            with scene(kind):
                account(functools.partial(kernel, *arguments), tensor, kernel, ledgers=(ledger,), ends=(TypeError,))


@pytest.mark.parametrize("word", ["FIRST", "MIDDLE", "LAST"])
def test_writing_to_what_is_readonly(word):
    kernel = fast_args(function_of(3, f"{word}[0] = 2.0"))
    position, memory = ("FIRST", "MIDDLE", "LAST").index(word), memory_of(1, 1, 1)
    memory.flags.writeable = False
    party, ledger = Party("fast", 3), Ledger()
    told = [cls(np.ones(3), ledger, flags=flags) for cls in (Exported, Dunder) for flags in (1, 1 | 2**40)]
    told += [Dunder(memory, ledger), Legacy(memory, ledger), Exported(memory, ledger)]
    for tensor in (memory, memory.view(np.ndarray), *told):
        arguments = party.with_at(position, tensor)
        with scene(type(tensor).__name__):
            call = functools.partial(kernel, *arguments)
            account(call, *arguments, kernel, ledgers=(ledger, party.ledger), ends=(TypingError,))
    assert memory[0] == 1.0 and all(tensor.array[0] == 1.0 for tensor in told)
    del arguments, tensor, call
    party.let_go()


@pytest.mark.parametrize("count", SIZES)
def test_what_does_not_bind(count):
    """Missing, surplus, unknown and repeated arguments: nothing is exported at all, on a new kernel and on a warm one."""
    for kind, kernel in itertools.product(PRODUCERS, (new_kernel(count), known_kernel(count, "fast"))):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
        same, last = [tensor] * count, f"a{count - 1}"
        for arguments, named in [
            (same[1:], {}), ([], {}), ([*same, tensor], {}), ([*same, *same], {}), (same, {"unknown": tensor}),
            (same[1:], {"unknown": tensor}), (same, {"a0": tensor}), (same, {last: tensor}),
            (same, {last: tensor, "unknown": tensor}), ([], {"unknown": tensor, last: tensor}),
            ([*same, tensor], {last: tensor}), (same, {"": tensor}), (same, {"a0\0": tensor}),
        ]:  # fmt: skip
            with scene(kind, len(arguments), *named):
                account(functools.partial(kernel, *arguments, **named), tensor, kernel, ends=(TypeError,))
        ledger.check(0)
