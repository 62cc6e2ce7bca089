"""Ownership at every exit: whatever way a call ends, each managed tensor is given back once and each reference is back.

A table: how the call ends x which argument is to blame (first, middle, last of 1, 3, 7, 32) x the path that the call takes
(first call, later ones, fast entry, keywords, nogil, tuples, ``*args``, Numba's dispatcher, bound launch, conversions) x who
made the arguments. One body counts, ``counting.account``. What always runs has each pair of a row and a path, of a row and a
place, of a path and a company; the whole product is for the night.
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
from typing import Any, NamedTuple

import hostile_producers as hostile
import made_producers
import numba
import numpy as np
import pytest
import test_escape
from frameworks import has_table, is_borrowed, torch, tvm_ffi
from fuzzing import is_fast
from hostile_producers import CONTENTS, EXPORTED, FUNCTIONS, RETURNS, Gives, GivesLegacy
from interpreter import run_python
from made_producers import ONLY_NUMBA, Dunder, Ledger, Legacy
from numba.core.errors import NumbaError, TypingError

from counting import (  # isort: skip
    BUFFERS, DELETING, PRODUCERS, TENSORS, Exported, Viewed, account, check_dies, end_of, forget_notes, is_resizable, kept,
    memory_of, needs_torch, no_violations, raised, scene, tensor_of,
)
from fastexchange import convert, exchange_api, explain, fast_args, from_dlpack, polyfill, to_dlpack
from fastexchange.calls import dependencies
from fastexchange.dispatch.runtime import runtime

assert no_violations  # a fixture
SIZES = (1, 3, 7, 32)
WARM = 60
"""Calls after which each combination of argument types in use has its fast entry."""


def positions(count: int) -> list[int]:
    """First, middle and last of `count`."""
    return sorted({0, count // 2, count - 1})


PLACES = [(count, position) for count in SIZES for position in positions(count)]
FAST = ["numpy", "exchange table", *["torch"] * has_table()]
COMPANIES = {
    "fast": FAST,
    "owning": [
        "__dlpack__", "legacy", "exports only", "wrapper", "unversioned", *["torch"] * (torch is not None and not has_table()),
    ],
    "buffers": ["memoryview", "array.array", "bytearray"],
    "mixed": list(PRODUCERS),
    "deleting": list(DELETING),
}
"""Who stands beside the argument to blame, by turns. Calls with arguments of the first are made by fast entries."""


class Party:
    """The arguments of a call: `count` of them, made in turn by the producers of a company."""

    def __init__(self, company: str, count: int, start: int = 0):
        kinds = COMPANIES[company]
        self.ledger, self.company = Ledger(), company
        self.kinds = [kinds[(start + i) % len(kinds)] for i in range(count)]
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


# ---- kernels ---------------------------------------------------------------------------------------------------------


def function_of(count: int, body: str, before: str = "", **names):
    """A function of `count` parameters ``a0``, ``a1`` …, behind those in `before`. In `body`: ALL, SUM, FIRST, MIDDLE, LAST."""
    every = [f"a{i}" for i in range(count)]
    words = {"ALL": ", ".join(every), "SUM": " + ".join(f"{name}[0]" for name in every)}
    words.update(zip(("FIRST", "MIDDLE", "LAST"), (every[0], every[count // 2], every[-1]), strict=True))
    for word, text in words.items():
        body = body.replace(word, text)
    exec(f"def function({before}{words['ALL']}):\n    {body}", namespace := {"np": np, "numba": numba, **names})
    return namespace["function"]


SUM = "return SUM"


@functools.cache
def warm_kernel(count: int, company: str, **options):
    """A kernel that knows all calls with arguments of a company, and makes those of the fast one by fast entries."""
    kernel = fast_args(function_of(count, SUM), **options)
    for start in range(len(FAST) if company == "fast" else 1):
        party = Party(company, count, start)
        for _ in range(WARM if company == "fast" and not options else 2):
            assert kernel(*party.tensors) == count
    return kernel


@fast_args
def gather(*arguments):
    return len(arguments)


def first_call(arguments, company, position):
    return functools.partial(fast_args(function_of(len(arguments), SUM)), *arguments)


def later_call(arguments, company, position):
    return functools.partial(warm_kernel(len(arguments), company), *arguments)


def call_by_keyword(arguments, company, position, positional=0):
    named = {f"a{i}": value for i, value in reversed(list(enumerate(arguments))) if i >= positional}
    return functools.partial(warm_kernel(len(arguments), company), *arguments[:positional], **named)


def call_half_by_keyword(arguments, company, position):
    return call_by_keyword(arguments, company, position, len(arguments) // 2)


def call_without_gil(arguments, company, position):
    return functools.partial(warm_kernel(len(arguments), company, nogil=True), *arguments)


def call_beside_a_string(arguments, company, position):
    return functools.partial(gather, "text", *arguments)


def call_for_numba(arguments, company, position):
    return functools.partial(gather, ONLY_NUMBA, *arguments)


def call_variadic(arguments, company, position):
    return functools.partial(gather, *arguments)


def call_in_a_tuple(arguments, company, position):
    return functools.partial(gather, 1, (arguments[:position], 2, (arguments[position:],)))


def bound_launch(arguments, company, position):
    return lambda: warm_kernel(len(arguments), company).bind(*arguments)()


def explain_first(arguments, company, position):
    return functools.partial(fast_args(function_of(len(arguments), SUM)).explain, *arguments)


def explain_later(arguments, company, position):
    """And each by itself, which asks a tensor for its elements' type."""

    def call():
        for argument in arguments:
            end = end_of(explain, argument)
            assert not isinstance(end, tuple) or not issubclass(end[0], Exception), end
        del end, argument
        return warm_kernel(len(arguments), company).explain(*arguments)

    return call


COMPILED = (later_call, call_by_keyword, call_half_by_keyword, call_without_gil, bound_launch, explain_later)
"""What needs a kernel that is compiled for the company."""
EXPLAINING = (explain_first, explain_later)
"""Here the kernel is not run; an argument may be explained to be refused."""
PATHS = (first_call, *COMPILED, call_beside_a_string, call_for_numba, call_variadic, call_in_a_tuple, explain_first)
COMPILED_FOR = {"fast": SIZES, "owning": (1, 3), "buffers": (3,), "mixed": (7,), "deleting": (7,)}
"""The counts of arguments with which such paths are tried."""
AT_NIGHT = {"fast": SIZES, **dict.fromkeys(("owning", "buffers", "mixed", "deleting"), (1, 3, 7))}
"""The same, for the night."""
EVERYWHERE = {**dict.fromkeys(COMPANIES, SIZES), "deleting": (1, 3, 7)}
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


def lying(cls, lies):
    return lambda memory, ledger: cls(memory, ledger, **lies)


def acting(cls, act):
    return lambda memory, ledger: cls(memory, ledger, view=act, export=act)


def released(memory, ledger):
    view = memoryview(bytearray(8))
    view.release()
    return view


BAD: dict[str, Bad] = {}
for _name in (
    "device kDLCUDA", "device 127", "ndim -1", "ndim 65", "NULL shape", "negative size (-1,)", "a stride of 4611686018427387904",
    "NULL data and a byte offset of 0", "2 lanes", "code 0 of 4 bits", "code 200 of 8 bits", "everything wrong",
):  # fmt: skip
    for _form, _cls in {"view": Viewed, "export": Exported, "__dlpack__": Dunder, "legacy": Legacy}.items():
        BAD[f"{_name}, {_form}"] = Bad(
            lying(_cls, CONTENTS[_name][0]), (BufferError,), "exchange table" if _cls is Viewed else None
        )
for _name in ("major version 2", "major version 0", "the largest major version"):
    for _form, _cls in {"export": Exported, "__dlpack__": Dunder}.items():
        BAD[f"{_name}, {_form}"] = Bad(lying(_cls, EXPORTED[_name][0]), (BufferError,))
for _name in (
    "-1 and no exception, -1", "filled, -1 and no exception", "raises BufferError", "raises FileNotFoundError",
    "raises KeyboardInterrupt", "raises SystemExit", "raises MemoryError", "0 and BufferError set",
    "0 and KeyboardInterrupt set", "filled, 0 and OSError set", "filled, 0 and KeyboardInterrupt set",
    "no exception type at all",
):  # fmt: skip
    _act, _want = FUNCTIONS[_name]
    _act = hostile.raising(_want) if _name.startswith("raises ") else _act  # a new one each time
    _kinds = _want if isinstance(_want, tuple) else (_want,)
    BAD[f"a view that {_name}"] = Bad(acting(Viewed, _act), _kinds, "exchange table")
    BAD[f"an export that {_name}"] = Bad(acting(Exported, _act), _kinds)
for _name in ("None", "itself", "a capsule of a longer name", "a consumed capsule", "a consumed legacy capsule"):
    BAD[f"__dlpack__ that returns {_name}"] = Bad(functools.partial(Gives, RETURNS[_name]), (BufferError,))
for _error in (BufferError, KeyError, functools.partial(hostile.Odd, 1, 2, third=3), KeyboardInterrupt, SystemExit):
    BAD[f"__dlpack__ that raises {type(_error()).__name__}"] = Bad(functools.partial(Raises, error=_error), (type(_error()),))
BAD |= {
    "an export of NULL": Bad(acting(Exported, lambda tensor, out: 0), (BufferError,)),
    "Ctrl-C in __dlpack__": Bad(Interrupted, (KeyboardInterrupt,)),
    "Ctrl-C at the end of __dlpack__": Bad(InterruptedLater, (KeyboardInterrupt,)),
    "an object": Bad(lambda memory, ledger: object(), (TypeError,)),
    "an int of 71 bits": Bad(lambda memory, ledger: 2**70, (OverflowError,)),
    "a list of objects": Bad(lambda memory, ledger: [object()], (TypeError, NumbaError), by_numba=False),
    "a byte-swapped array": Bad(lambda memory, _: memory.astype(">f8").view(np.ndarray), (BufferError,), "numpy"),
    "a masked array": Bad(lambda memory, _: np.ma.masked_array([1.0, 2.0], [0, 1]), (NumbaError, TypeError), by_numba=False),
    "a released memoryview": Bad(released, (ValueError,), by_numba=False),
}


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


def refuse(bad: Bad | None, path, company: str, count: int, position: int, turn: int = 0) -> None:
    """Calls that are refused because of one argument; or, where none is bad, calls that end well. Then one that does."""
    start = 4 * turn if company == "deleting" else 0
    if company == "fast" and bad is not None and bad.like in FAST:
        start = (FAST.index(bad.like) - position) % len(FAST)
    party, own = Party(company, count, start), Ledger()
    culprit = party.tensors[position] if bad is None else bad.make(memory_of(1, 1, 1), own)
    arguments = party.with_at(position, culprit)
    call = path(arguments, company, position)
    kernel = warm_kernel(count, company) if path in COMPILED else gather
    if path is later_call and company == "fast":
        for _ in range(3):
            kernel(*party.tensors)
        assert is_fast(kernel, *party.tensors)
    counted = [kernel, *party.tensors, *[culprit] * (type(culprit) is not int)]
    if bad is None or path in EXPLAINING:
        for _ in range(2):
            end = end_of(call)  # what is learnt or compiled in the first stays
            assert not isinstance(end, tuple) or issubclass(end[0], bad.kinds), end
            del end
        account(call, *counted, ledgers=(party.ledger, own))
    else:
        account(call, *counted, ledgers=(party.ledger, own), ends=bad.kinds)
    if path in COMPILED:
        account(functools.partial(kernel, *party.tensors), kernel, *party.tensors, ledgers=(party.ledger,), ends=count)
    del call, arguments, culprit, counted
    party.let_go()


def by_all_companies(path, sizes: dict) -> list:
    """The companies in which a path is tried, and with how many arguments."""
    return list((sizes if path in COMPILED else EVERYWHERE).items())


def can_be_refused_by(bad: Bad | None, path) -> bool:
    """Else Numba's dispatcher is the one to refuse it."""
    return bad is None or bad.by_numba or path is not call_for_numba


ROWS: dict[str, Bad | None] = {"nothing": None, **BAD}
NAMED = {"ids": lambda thing: thing if isinstance(thing, str) else thing.__name__}


@pytest.mark.parametrize("path", PATHS, **NAMED)
def test_refused(path, monkeypatch):
    """Each row by each path, in each company; the places take turns. What first calls return, other tests see."""
    monkeypatch.setattr(dependencies, "extensions", dict)  # other tests' extensions of Numba, which each explanation describes
    for (i, (name, bad)), (k, (company, sizes)) in itertools.product(
        enumerate(ROWS.items()), enumerate(by_all_companies(path, COMPILED_FOR))
    ):
        if can_be_refused_by(bad, path) and not (bad is None and path in (first_call, explain_first)):
            places = [place for place in PLACES if place[0] in sizes]
            place = places[(i + 3 * PATHS.index(path) + 7 * k) % len(places)]
            with scene(name, company, place):
                refuse(bad, path, company, *place, turn=i)


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS, **NAMED)
@pytest.mark.parametrize("name", ROWS)
def test_refused_everywhere(name, path):
    for company, sizes in by_all_companies(path, AT_NIGHT):
        for place in PLACES:
            if place[0] in sizes and can_be_refused_by(ROWS[name], path):
                with scene(company, place):
                    refuse(ROWS[name], path, company, *place)


# ---- how kernels end -------------------------------------------------------------------------------------------------


class Body(NamedTuple):
    """A kernel's body, what it is given before the tensors, and the check of its last result of `calls` that are held."""

    text: str
    how: Callable
    check: Callable


RESULT = """s = SUM
    if s < 0:
        raise ValueError("from the kernel", 3)
    return FIRST[1:], (MIDDLE, LAST[:2]), np.full(2, s), s, None, "text", (how, how, how)"""
OF_BUFFERS = RESULT.replace("FIRST[1:]", "FIRST[0]").replace("MIDDLE", "MIDDLE[0]").replace("LAST[:2]", "LAST[0]")
OF_ALL = RESULT.replace("MIDDLE", "MIDDLE[0]").replace("LAST[:2]", "LAST[0]")
"""Numba has no way to give buffers that are no arrays back to Python."""
STORE = """how.append(FIRST)
    how.append(MIDDLE[1:])
    how.append(LAST[:1])
    if SUM < 0:
        raise ValueError("from the kernel", 3)"""
PARALLEL = """s = 0.0
    for i in numba.prange(FIRST.shape[0]):
        s += FIRST[i] / FIRST.shape[0]
    if SUM < 0:
        raise ValueError("from the kernel", 3)
    return FIRST[1:], s"""


def check_result(result, how, calls, count) -> None:
    assert result[3] == count and result[2].tolist() == [count] * 2 and result[-1] == (5, 5, 5)


def check_stored(result, how, calls, count) -> None:
    assert result is None and len(how) == 3 * calls and all(array[0] == 1.0 for array in how)


def check_parallel(result, how, calls, count) -> None:
    assert result[1] == pytest.approx(1.0) and result[0].tolist() == [1.0, 1.0]


BODIES = {
    "results": Body(RESULT, lambda: 5, check_result),
    "results, of buffers": Body(OF_BUFFERS, lambda: 5, check_result),
    "results, of all": Body(OF_ALL, lambda: 5, check_result),
    "stored": Body(STORE, test_escape.new_list, check_stored),
    "parallel": Body(PARALLEL, lambda: 5, check_parallel),
}
OPTIONS = {"": {}, "nogil": {"nogil": True}, "parallel": {"parallel": True}}
ENDS = [
    ("results", 1, "owning", ""), ("results", 3, "owning", "nogil"), ("results", 3, "fast", ""), ("results", 7, "fast", "nogil"),
    ("results", 3, "deleting", ""), ("results, of buffers", 3, "buffers", ""), ("results, of all", 7, "mixed", ""),
    ("results, of all", 32, "mixed", "nogil"), ("stored", 1, "fast", "nogil"), ("stored", 3, "fast", ""),
    ("stored", 7, "owning", "nogil"), ("parallel", 3, "mixed", "parallel"), ("parallel", 7, "owning", "parallel"),
]  # fmt: skip
"""Each body, count, company and option, and most pairs of them. The others at night."""
FORMS = {"mixed": "results, of all", "buffers": "results, of buffers"}
ENDS_AT_NIGHT = [
    (FORMS.get(company, "results"), count, company, options)
    for count, company, options in itertools.product(SIZES, COMPANIES, ("", "nogil"))
] + [("stored", count, company, options)
     for count, company, options in itertools.product((1, 3, 7), ("fast", "owning"), ("", "nogil"))]  # fmt: skip


def clear(how) -> None:
    if not isinstance(how, int):
        how.clear()


@pytest.mark.parametrize(
    "case", [*ENDS, *(pytest.param(case, marks=pytest.mark.nightly) for case in ENDS_AT_NIGHT if case not in ENDS)],
    ids=lambda case: "-".join(map(str, case)),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:unsafe cast from readonly")  # Numba's, for legacy exports
def test_how_kernels_end(case):
    """Results that hold arguments, views of them, and new objects; views stored; exceptions; refusals: by each path."""
    name, count, company, options = case
    body, party = BODIES[name], Party(company, count)
    if name == "stored" and company == "owning":  # the list takes no readonly arrays
        party.tensors[:] = [Exported(memory_of(1, 1, 1), party.ledger) for _ in range(count)]
        party.memories.clear()
    kernel, how = fast_args(function_of(count, body.text, "how, "), **OPTIONS[options]), body.how()
    calls: list[tuple] = [
        ("first", 0, kernel), ("later", 0, kernel), ("often called", WARM, kernel),
        ("by keyword", 0, lambda how, *tensors: kernel(how=how, **{f"a{i}": x for i, x in enumerate(tensors)})),
        ("bound", 0, lambda how, *tensors: kernel.bind(how, *tensors)()),
    ]  # fmt: skip
    for path, before, call in calls[: 5 if name != "stored" else 4]:
        with scene(path), kept(*party.tensors, kernel):
            for _ in range(before):
                kernel(how, *party.tensors)
                clear(how)
            if path == "often called" and company == "fast" and not options and name != "stored":
                assert is_fast(kernel, how, *party.tensors)
            results = [call(how, *party.tensors) for _ in range(3)]
            for result in results:
                body.check(result, how, 3, count)
            del results[1], result
            for result in results:
                body.check(result, how, 3, count)
            del results, result
            clear(how)
        party.ledger.check(party.ledger.made)
        with scene(path):
            blame(kernel, how, party, by_keyword=path == "by keyword")
    del call, calls
    party.let_go()


def blame(kernel, how, party: Party, by_keyword: bool) -> None:
    """The kernel raises because of an element of the argument at each position, or one is refused there."""
    for position in positions(len(party.tensors)):
        refused = ("device kDLCUDA, export", "a view that raises BufferError", "__dlpack__ that raises KeyboardInterrupt")
        for kind in dict.fromkeys((party.kinds[position], "numpy", "exchange table", *refused)):
            if kind in ("bytearray", "memoryview"):
                continue  # no negative elements; others' type
            ledger, memory, is_taken = Ledger(), memory_of(-100, -100, -100), kind not in BAD
            culprit = BAD[kind].make(memory, ledger) if kind in BAD else tensor_of(kind, memory, ledger)
            arguments = party.with_at(position, culprit)

            def call(arguments=arguments, is_taken=is_taken, ledger=ledger):
                try:
                    if by_keyword:
                        kernel(how=how, **{f"a{i}": value for i, value in enumerate(arguments)})
                    else:
                        kernel(how, *arguments)
                except ValueError as error:
                    assert is_taken and str(error) == "('from the kernel', 3)", error
                    if not isinstance(how, int):
                        assert len(how) == 3 and ledger.out == (ledger.made > 0), "what the kernel stored has lost its memory"
                    raise
                finally:
                    clear(how)

            with scene(position, kind):
                ends = (ValueError,) if is_taken else BAD[kind].kinds
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


LEAVES: dict[str, tuple[Any, list]] = {
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
    """The first call that fails, later ones, and by another path: nobody is kept alive by what Numba remembers."""
    function = function_of(count, COMPILE_ERRORS[name], lower_not=lower_not, type_not=type_not)
    kernel, party = fast_args(function, **options), Party(company, count, start)
    with scene(count, company, options):
        named = {f"a{i}": tensor for i, tensor in enumerate(party.tensors)}
        for call in (functools.partial(kernel, *party.tensors), functools.partial(kernel, **named)):
            account(call, *party.tensors, kernel, ledgers=(party.ledger,), ends=(Exception,), times=3)
        del named, call
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
    for kind, others in itertools.product(PRODUCERS, (((), (1.0,)), ((1.0,), ()))):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
        with scene(kind, others):
            account(lambda t=tensor, o=others: kernel(*o[0], t, *o[1]), tensor, kernel, ledgers=(ledger,), ends=(TypeError,))


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
    for kind, kernel in itertools.product(PRODUCERS, (fast_args(function_of(count, SUM)), warm_kernel(count, "fast"))):
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
ALWAYS_WRITEABLE = ("torch", "tvm_ffi", *BUFFERS)


@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions(way):
    """However a conversion ends, with a result that is dropped or with an exception: nothing is left."""
    rows = [(kind, functools.partial(tensor_of, kind)) for kind in PRODUCERS]
    rows += [(name, bad.make) for name, bad in BAD.items() if name != "an int of 71 bits"]
    for (name, make), readonly in itertools.product(rows, (False, True)):
        if readonly and (name in ALWAYS_WRITEABLE or name in BAD):
            continue
        if way == "to_dlpack, consumed by PyTorch" and name.startswith("device"):
            continue  # PyTorch takes the capsule, fails, and calls the deleter with its exception set
        ledger, memory = Ledger(), memory_of(1, 1, 1)
        memory.flags.writeable = not readonly
        tensor = make(memory, ledger)
        end_of(CONVERSIONS[way], tensor)  # what is learnt at the first call stays
        with scene(name, readonly):
            account(functools.partial(CONVERSIONS[way], tensor), tensor, ledgers=(ledger,))
            owner = weakref.ref(memory)
            forget_notes(tensor)
            del tensor, memory
            check_dies(owner)


def subclass_of_tensors() -> type:
    """A subclass, which PyTorch's table does not make."""
    return type("Derived", (torch.Tensor,), {})


def ndarray() -> type:
    return np.ndarray


EXPORTED_OTHERWISE = {
    "of another major version": ({"version": (2, 0)}, None, ndarray),
    "without memory": ({"data": 0}, None, ndarray),
    "of a type that the target lacks": ({"code": 200}, None, ndarray),
    "for a subclass": ({}, None, subclass_of_tensors),
    "of a tensor that autograd tracks since": ({}, lambda tensor: tensor.requires_grad_(), ndarray),
    "of a tensor whose memory is gone since": ({}, lambda tensor: tensor.untyped_storage().resize_(0), ndarray),
}
"""By what native code finds after it has made an export: lies of the export, what happens to the tensor meanwhile, the target."""


@pytest.mark.skipif(not has_table(), reason="native code exports no tensor of this PyTorch")
@pytest.mark.parametrize("what", EXPORTED_OTHERWISE)
def test_a_conversion_that_native_code_gives_up_after_the_export(what):
    """Python code makes another export, and raises or converts. Both exports are given back."""
    lies, happens, make_target = EXPORTED_OTHERWISE[what]
    target, ledger = make_target(), Ledger()

    @made_producers.ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def export(py_object, out):
        if happens is not None:
            happens(tensor)
        out[0] = made_producers.export_versioned(ledger, np.ones(3, np.float32), **lies)
        return 0

    tensor = torch.ones(3)
    for known in (tensor, tensor if target is np.ndarray else tensor.as_subclass(target)):  # native code has to know both types
        convert(known, np.ndarray)
    entries = runtime().entries
    honest = entries.fields(torch.Tensor)["managed"]
    entries.update(torch.Tensor, managed=made_producers.address_of(export))
    try:
        end_of(lambda: convert(tensor, target))
    finally:
        entries.update(torch.Tensor, managed=honest)
    gc.collect()
    assert ledger.made > 0
    ledger.check(ledger.made)


# ---- in a process of its own -----------------------------------------------------------------------------------------

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
    assert is_fast(kernel, tensor) is is_borrowed()
    for bad in (tensor.clone().requires_grad_(), torch._neg_view(tensor.as_subclass(torch.Tensor)).as_subclass(type(tensor))):
        assert raised(end_of(kernel, bad)) is BufferError


@pytest.mark.slow
def test_what_would_crash():
    """In a process of its own, to its exit. What it did last it has printed."""
    done = run_python(
        """
        import gc
        import numpy as np
        from test_ownership import *

        if torch is not None:
            tensor = resized(0)  # PyTorch reads the elements for the repr of a tensor, also of one whose memory was freed
            for name, call in SPEAKING.items():
                print(name, flush=True)
                assert raised(end_of(call, tensor)) in (TypeError, ValueError, BufferError), name
            print("a cache entry with a guard is used again, for other tensors", flush=True)
            kernel = fast_args(lambda x: x[0])
            call_often(kernel, guarded_table())
            gc.collect()
            call_often(kernel, plain_table())
        print("the end: a deleter made in Python is gone before the last array is, and must not be called", flush=True)
        kept = [keeping(kind, np.arange(4.0)) for kind in TENSORS for keeping in (first_part, imported)]
        np.kept = [*(keeping(kind, np.arange(4.0)) for kind in TENSORS for keeping in (first_part, imported))]
        np.kept.append(np.kept)
        """,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode} at {done.stdout.splitlines()[-1:]}\n{done.stderr[-1000:]}"


def first_part(kind: str, array):
    return test_escape.part(tensor_of(kind, array, Ledger()))


def imported(kind: str, array):
    return from_dlpack(tensor_of(kind, array, Ledger()))
