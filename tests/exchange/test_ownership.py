"""Ownership at every exit: however a call ends, each managed tensor is given back once, each reference is back."""

import collections
import ctypes
import enum
import functools
import gc
import itertools
import signal
import sys

import made_producers
import numba
import numpy as np
import pytest
import test_escape
from exchanges import CALLS
from forked import fork_python
from frameworks import has_table, is_borrowed, needs_torch, torch
from fuzzing import is_fast
from hostile_producers import CONTENTS, EXPORTED, FUNCTIONS, RETURNS, Gives, raising
from hostile_ways import WARM
from hostile_ways import ignore as gather
from interpreter import run_python
from made_producers import ONLY_NUMBA, Dunder, Ledger, Legacy
from numba.core.errors import NumbaError, TypingError
from odd_tensors import ODD

from counting import (  # isort: skip
    DELETING, PRODUCERS, TENSORS, Exported, Viewed, account, company, end_of, is_exception, kept, memory_of, no_violations,
    raised, scene, tensor_of,
)
from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack
from fastexchange.calls import dependencies
from fastexchange.dispatch.runtime import runtime

assert no_violations  # a fixture
FAST = ["numpy", "exchange table", *["torch"] * has_table()]
OWNING = ["__dlpack__", "legacy", "exports only", "wrapper", "unversioned"]
COMPANIES = {  # who stands beside the argument to blame, by turns; how many arguments there are
    "fast": (FAST, (1, 3, 7, 32)),  # their calls are made by cache entries
    "owning": (OWNING + ["torch"] * (torch is not None and not has_table()), (1, 3)),
    "buffers": (["memoryview", "array.array", "bytearray"], (3,)),
    "mixed": (list(PRODUCERS), (7,)),
    "deleting": (list(DELETING), (7,)),
}


# ---- one argument is refused, or none --------------------------------------------------------------------------------
def sum_kernel(count: int, company=None, **options):
    names = [f"a{i}" for i in range(count)]
    return fast_args(eval(f"lambda {', '.join(names)}: {' + '.join(f'{name}[0]' for name in names)}"), **options)


@functools.cache
def known_kernel(count: int, name: str, **options):
    """A kernel that knows all calls with arguments of a company, and makes those of the fast one by cache entries."""
    kernel, (kinds, _) = sum_kernel(count, **options), COMPANIES[name]
    for start in range(len(FAST) if name == "fast" else 1):
        with company(kinds[start:] + kinds[:start], count) as (tensors, _):
            for _ in range(WARM if name == "fast" and not options else 2):
                assert kernel(*tensors) == count
    return kernel


def by_keyword(kernel, arguments, positional=0):
    return kernel(*arguments[:positional], **{f"a{i}": arguments[i] for i in reversed(range(positional, len(arguments)))})


def explain_each(kernel, arguments):
    """And each by itself, which asks a tensor for its elements' type."""
    ends = [end_of(explain, argument) for argument in arguments]
    assert not any(is_exception(end) and issubclass(end[0], Exception) for end in ends), ends
    del ends
    return kernel.explain(*arguments)


LATER, BY_DISPATCHER = "later call", "by Numba's dispatcher"
PATHS = {
    "first call": (sum_kernel, lambda kernel, tensors: kernel(*tensors)),
    LATER: (known_kernel, lambda kernel, tensors: kernel(*tensors)),
    "by keyword": (known_kernel, by_keyword),
    "half by keyword": (known_kernel, lambda kernel, tensors: by_keyword(kernel, tensors, len(tensors) // 2)),
    "without the GIL": (functools.partial(known_kernel, nogil=True), lambda kernel, tensors: kernel(*tensors)),
    "bound launch": (known_kernel, lambda kernel, tensors: kernel.bind(*tensors)()),
    "beside a string": (None, lambda kernel, tensors: kernel("text", *tensors)),
    BY_DISPATCHER: (None, lambda kernel, tensors: kernel(ONLY_NUMBA, *tensors)),
    "as *args": (None, lambda kernel, tensors: kernel(*tensors)),
    "in a tuple": (None, lambda kernel, tensors: kernel(1, (tensors[:1], 2, (tensors[1:],)))),
    "explained first": (sum_kernel, lambda kernel, tensors: kernel.explain(*tensors)),
    "explained later": (known_kernel, explain_each),
}
"""By name: what makes a kernel for a count of arguments and a company (None: `gather` takes all), and how it is called."""


@pytest.mark.parametrize("path", PATHS)
def test_refused(path, monkeypatch):
    """Each argument by each path, in two companies, the later calls always by the fast one; the places take turns, too."""
    monkeypatch.setattr(dependencies, "extensions", dict)  # other tests' extensions of Numba, which each explanation describes
    p, names = list(PATHS).index(path), list(COMPANIES)
    for i, bad in enumerate(BAD):
        if path == BY_DISPATCHER and bad in BY_NUMBA:
            continue
        for k in {i + p, i + p + 2, *[0] * (path == LATER)}:
            name = names[k % len(names)]
            places = [(count, place) for count in COMPANIES[name][1] for place in sorted({0, count // 2, count - 1})]
            count, position = places[(i // 5 + p + k) % len(places)]
            with scene(bad, name, count, position):
                check_refused(bad, path, name, count, position, turn=i)


@pytest.mark.parametrize("path", [path for path in PATHS if "first" not in path])
def test_nothing_is_refused(path):
    kernel_for, call = PATHS[path]
    for name, (kinds, counts) in COMPANIES.items():
        for count in counts:
            kernel = kernel_for(count, name) if kernel_for else gather
            with scene(name, count), company(kinds, count) as (tensors, ledger):
                assert path != LATER or name != "fast" or (kernel(*tensors) == count and is_fast(kernel, *tensors))
                assert not isinstance(end_of(call, kernel, tuple(tensors)), tuple), path  # what is learnt in it stays
                account(functools.partial(call, kernel, tuple(tensors)), *tensors, kernel, ledgers=(ledger,))


@pytest.mark.parametrize("kind", [*PRODUCERS, *DELETING])
def test_the_same_tensor_several_times(kind):
    ledger, kernel = Ledger(), known_kernel(3, "mixed")
    tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
    for call in (lambda: kernel(tensor, tensor, tensor), lambda: gather(tensor, (tensor, tensor), ONLY_NUMBA)):
        assert end_of(call) == 3
        account(call, tensor, kernel, ledgers=(ledger,), ends=3)


# ---- what is refused -------------------------------------------------------------------------------------------------
def interrupted(tensor):
    """Ctrl-C arrives while ``__dlpack__`` runs, and it has made its capsule, which gives its tensor back."""
    made = to_dlpack(Exported(tensor.array, tensor.ledger), max_version=(1, 0))
    signal.raise_signal(signal.SIGINT)
    return made


FORMS = {"view": Viewed, "export": Exported, "__dlpack__": Dunder, "legacy": Legacy}
SAID = (
    "device kDLCUDA", "device 127", "ndim -1", "ndim 65", "NULL shape", "negative size (-1,)", "a stride of 4611686018427387904",
    "NULL data and a byte offset of 0", "2 lanes", "code 0 of 4 bits", "code 200 of 8 bits", "everything wrong",
)  # fmt: skip
DONE = (
    "-1 and no exception, -1", "filled, -1 and no exception", "raises BufferError", "raises a new KeyboardInterrupt",
    "0 and BufferError set", "filled, 0 and OSError set", "filled, 0 and KeyboardInterrupt set", "no exception type at all",
)  # fmt: skip
RELEASED = memoryview(b"")
RELEASED.release()
BAD = {
    **{f"{name}, {form}": (functools.partial(cls, **CONTENTS[name][0]), BufferError)
       for name in SAID for form, cls in FORMS.items()},
    **{f"{name}, {form}": (functools.partial(FORMS[form], **EXPORTED[name][0]), BufferError)
       for name in ("major version 2", "major version 0", "the largest major version") for form in ("export", "__dlpack__")},
    **{f"{form} that {name}": (functools.partial(FORMS[form], view=FUNCTIONS[name][0], export=FUNCTIONS[name][0]),
                               FUNCTIONS[name][1]) for name in DONE for form in ("view", "export")},
    "export of NULL": (functools.partial(Exported, export=lambda tensor, out: 0), BufferError),
    **{f"__dlpack__ that returns {name}": (functools.partial(Gives, RETURNS[name]), BufferError)
       for name in ("None", "itself", "a capsule of a longer name", "a consumed capsule", "a consumed legacy capsule")},
    **{f"__dlpack__ that raises {error.__name__}": (functools.partial(Gives, raising(error)), error)
       for error in (BufferError, KeyError, KeyboardInterrupt, SystemExit)},
    "Ctrl-C in __dlpack__": (functools.partial(Gives, interrupted), KeyboardInterrupt),
    "Ctrl-C at its end": (functools.partial(Gives, lambda tensor: signal.raise_signal(signal.SIGINT)), KeyboardInterrupt),
    "object": (lambda memory, ledger: object(), TypeError),
    "int of 71 bits": (lambda memory, ledger: 2**70, OverflowError),
    "byte-swapped array": (lambda memory, ledger: memory.astype(">f8").view(np.ndarray), BufferError),
    "list of objects": (lambda memory, ledger: [object()], (TypeError, NumbaError)),
    "masked array": (lambda memory, ledger: np.ma.masked_array([1.0, 2.0], [0, 1]), (NumbaError, TypeError)),
    "released memoryview": (lambda memory, ledger: RELEASED, ValueError),
}  # fmt: skip
BY_NUMBA = ("list of objects", "masked array", "released memoryview")
"""Refused by Numba itself, where Numba's dispatcher makes the call."""
if torch is not None:
    BAD |= {"torch tensor that requires grad": (lambda memory, ledger: torch.from_numpy(memory).requires_grad_(), BufferError),
            "torch tensor negated lazily": (lambda memory, ledger: torch._neg_view(torch.from_numpy(memory)), BufferError),
            **{f"torch tensor {name}": (lambda memory, ledger, name=name: ODD[name], BufferError)
               for name in ("freed storage", "meta", "zero")}}  # fmt: skip
LIKE = {Viewed: "exchange table", np.ndarray: "numpy", **({torch.Tensor: "torch"} if torch is not None else {})}


def check_refused(bad: str, path: str, name: str, count: int, position: int, turn: int) -> None:
    """Calls that are refused because of one argument, and one that ends well."""
    (make, errors), (kernel_for, call), ledger = BAD[bad], PATHS[path], Ledger()
    kernel = kernel_for(count, name) if kernel_for else gather
    culprit, kinds = make(memory_of(1, 1, 1), ledger), COMPANIES[name][0]
    like = LIKE.get(type(culprit))
    start = (FAST.index(like) - position if name == "fast" and like in FAST else 4 * turn) % len(kinds)
    with company(kinds[start:] + kinds[:start], count) as (tensors, of_others):
        arguments, ledgers = (*tensors[:position], culprit, *tensors[position + 1 :]), (ledger, of_others)
        counted = [*tensors, *[kernel] * bool(kernel.signatures), *[culprit] * (type(culprit) is not int)]
        is_call = not path.startswith("explained")
        if not is_call:
            end_of(call, kernel, arguments)  # what is learnt stays
        ends = (errors if isinstance(errors, tuple) else (errors,)) if is_call else None
        account(functools.partial(call, kernel, arguments), *counted, ledgers=ledgers, ends=ends)
        if kernel is not gather and kernel.signatures:
            account(functools.partial(kernel, *tensors), kernel, *tensors, ledgers=ledgers, ends=len(tensors))
        del arguments, counted


# ---- how kernels end -------------------------------------------------------------------------------------------------
@numba.njit
def sum_or_raise(first, middle, last):
    if first[0] + middle[0] + last[0] < 0:
        raise ValueError("from the kernel", 3)
    return first[0] + middle[0] + last[0]


def views(tag, first, middle, last):
    """Results that hold arguments, and new objects."""
    s = sum_or_raise(first, middle, last)
    return first[1:], (middle, last[:2]), np.full(2, s), s, None, "text", (tag, tag, tag)


def check_views(results) -> None:
    assert all((r[0].tolist(), r[2].tolist(), r[3], r[-1]) == ([1, 1], [3, 3], 3, (5, 5, 5)) for r in results)


ENDS = {
    # its arguments' producers, its options
    "fast calls": (FAST, {}),
    "fast calls, without the GIL": (FAST, {"nogil": True}),
    "exports": (["exports only", "wrapper", "__dlpack__"], {"returns": np.ndarray}),
    "exports, without the GIL": (OWNING, {"nogil": True}),
    "what has odd deleters": (list(DELETING)[4:7], {}),
}
BLAMED = ("numpy", "device kDLCUDA, export", "view that raises BufferError", "__dlpack__ that raises KeyboardInterrupt")


def check_blamed(kernel, tensors, others, position, kind) -> None:
    make, error = BAD.get(kind, (functools.partial(tensor_of, kind), ValueError))
    ledger = Ledger()
    culprit = make(memory_of(-100, -100, -100), ledger)
    call = functools.partial(kernel, 5, *tensors[:position], culprit, *tensors[position + 1 :])
    account(call, culprit, *tensors, ledgers=(ledger, others), ends=(error,))
    assert error is not ValueError or end_of(call) == (ValueError, "('from the kernel', 3)")


@pytest.mark.parametrize(("kinds", "options"), ENDS.values(), ids=ENDS)
def test_how_kernels_end(kinds, options):
    """With results that hold their arguments, exceptions, refusals: by each path. What they store: test_escape.py."""
    kernel = fast_args(views, **options)
    ways = {**dict.fromkeys(("first", "later", "often called"), kernel),
            "by keyword": lambda tag, a, b, c: kernel(tag=tag, last=c, middle=b, first=a),
            "bound": lambda *arguments: kernel.bind(*arguments)()}  # fmt: skip
    with company(kinds, 3) as (tensors, ledger):
        for way, call in ways.items():
            with scene(way), kept(*tensors, kernel):
                for _ in range(WARM if way == "often called" else 0):
                    kernel(5, *tensors)
                assert way != "often called" or kinds is not FAST or options or is_fast(kernel, 5, *tensors)
                results = [call(5, *tensors) for _ in range(3)]
                check_views(results)
                del results[1]
                check_views(results)
                del results
            ledger.check(ledger.made)
            for position, kind in itertools.product(range(3), (kinds[0], *BLAMED)):
                with scene(way, position, kind):
                    check_blamed(kernel if way == "bound" else call, tensors, ledger, position, kind)
        with company(kinds, 3) as (others, _):  # what earlier calls have given stays valid among those that raise
            results = [kernel(5, *others) for _ in range(20)]
            for position, kind in itertools.product(range(3), BLAMED):
                check_blamed(kernel, tensors, ledger, position, kind)
                check_views(results)
            del results
        del call


# ---- nothing is left -------------------------------------------------------------------------------------------------
Pair = collections.namedtuple("Pair", "first second")
TEXT = "a text that nobody else has".upper()


class Answer(enum.Enum):
    YES = 123456789  # no small int, which there is only one of


def refuses(x):
    if x[0] == 0:
        raise ValueError("no")
    return x


ONES, RECORDS = np.ones(3), np.zeros(4, [("only", "i4"), ("here", "f8")])
LEAVES = {
    "itself": (test_escape.itself, []), "two parts": (test_escape.two_parts, []), "a copy": (test_escape.copied, []),
    "more": (lambda x: gather(x, 1, None, 2.5, (1, 2)), []),
    "records": (lambda x: gather(RECORDS, RECORDS[::2]), [RECORDS.dtype]),
    "an exception": (functools.partial(end_of, fast_args(refuses)), []),
    "a refusal": (functools.partial(end_of, gather, 1, object()), []),
    **{f"a refusal by {take.__name__}, {how}": (lambda x, take=take, make=make: end_of(take, make(x)), [])
       for take in (gather, from_dlpack, to_dlpack) for how, make in {
           "of what lies": lambda x: Dunder(ONES, lanes=2), "of what raises": lambda x: Gives(raising(BufferError)),
           "of an export that sets": lambda x: Exported(ONES, export=FUNCTIONS["0 and BufferError set"][0]),
           "of a view that fails": lambda x: Viewed(ONES, view=FUNCTIONS["-1 and no exception, -1"][0])}.items()},
    "an array": (fast_args(lambda x: x[1:]), [np.ndarray, np.dtype("f8")]),
    "a text": (fast_args(lambda x: TEXT), [TEXT]),
    "a tuple with a text": (fast_args(lambda x: (x[0], TEXT)), [TEXT, tuple]),
    "a named tuple": (fast_args(lambda x: Pair(x[0], x)), [Pair, np.ndarray]),
    "a dtype": (fast_args(lambda x: x.dtype), [np.dtype("f8")]),
    "a scalar type": (fast_args(lambda x: np.float32), [np.float32, np.dtype("f4")]),
    "an enum": (fast_args(lambda x: Answer.YES), [Answer, Answer.YES]),
}  # fmt: skip
"""Calls, and the objects that live elsewhere which every result refers to: it neither uses their references up nor adds any."""


FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
Mallinfo = type("Mallinfo", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]})
mallinfo = ctypes.CFUNCTYPE(Mallinfo)(("mallinfo2", ctypes.CDLL(None))) if hasattr(ctypes.CDLL(None), "mallinfo2") else Mallinfo
"""``uordblks``: what C's allocator has given and not got back: frames, memory blocks of escaped arrays, exports. 0: unknown."""


@pytest.mark.parametrize("name", LEAVES)
def test_a_thousand_calls_leave_nothing(name):
    call, constants = LEAVES[name]
    for kind in TENSORS if "refusal by" not in name else ["numpy"]:
        ledger, memory = Ledger(), np.arange(4.0)
        tensor = tensor_of(kind, memory, ledger)
        if isinstance(tensor, Dunder):
            tensor.capsules = tensor.asked = collections.deque(maxlen=0)
        for _ in range(250):  # until nothing is left to compile, and notes are full
            call(tensor)
        gc.collect()
        counted = [*constants, memory]
        for _ in range(3):  # a leak is there each time; the heap may also grow once, for whatever reason
            before = [sys.getrefcount(each) for each in counted], sys.getallocatedblocks(), mallinfo().uordblks
            for _ in range(1000):
                call(tensor)
            gc.collect()
            blocks, native = sys.getallocatedblocks() - before[1], mallinfo().uordblks - before[2]
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
    assert "memory flat" in run_python("import soak; soak.main(['--calls', '40000', '--types', '4000'])").stdout


# ---- what does not compile, does not bind ----------------------------------------------------------------------------
def type_not(x):
    """In a kernel: an overload that raises an exception which is none of Numba's."""


@numba.extending.overload(type_not)
def _overload_type_not(x):
    raise ZeroDivisionError("not for this type")


@numba.extending.intrinsic
def lower_not(typing_context, x):
    """In a kernel: types, and does not lower."""

    def code(context, builder, signature, arguments):
        raise NotImplementedError("it does not lower")

    return numba.float64(x), code


COMPILE_ERRORS = {
    lambda a, b, c, d: d.no_such_attribute: TypingError, lambda a, b, c, d: lower_not(a): NotImplementedError,
    lambda a, b, c, d: type_not(a): ZeroDivisionError,
}  # fmt: skip


@pytest.mark.parametrize(("i", "function", "error"), [(i, *row) for i, row in enumerate(COMPILE_ERRORS.items())])
def test_what_does_not_compile(i, function, error):
    """Beside everybody: nobody is kept alive by what Numba remembers, and no deleter loses the error."""
    starts = [(kinds, start) for kinds, _ in COMPANIES.values() for start in range(4 * i % len(kinds), len(kinds), 12)]
    for k, (kinds, start) in enumerate(starts):
        kernel = fast_args(function, nogil=(i + k) % 3 == 0)
        with scene(*kinds[start:]), company(kinds[start:] + kinds[:start], 4) as (tensors, ledger):
            named = dict(zip("dcba", tensors[::-1], strict=True))
            for call in (functools.partial(kernel, *tensors), functools.partial(kernel, **named)):
                account(call, *tensors, kernel, ledgers=(ledger,), ends=(error,), times=3)
            del call, named


def test_a_caught_compile_error_holds_its_arguments_no_longer_than_it_lives():
    """The exception's frames hold the arguments, as those of any exception do; what Numba keeps does not."""
    kernel = fast_args(lambda a, b, c, d: d.no_such_attribute)
    kinds = ["__dlpack__", "exports only", "numpy", "torch" if torch else "wrapper"]
    with company(kinds, 4) as (tensors, _), kept(*tensors, kernel), pytest.raises(TypingError):
        kernel(*tensors)


@pytest.mark.parametrize(("kernel", "kinds", "other", "error"), [
    (fast_args(lambda x, y: x.no_such_attribute), DELETING, ONLY_NUMBA, TypingError),
    (fast_args("float64(float64, float64)")(lambda x, y: x + y), PRODUCERS, 1.0, TypeError),
], ids=["a typing error of Numba's dispatcher", "explicit signatures that do not fit"])  # fmt: skip
def test_what_has_no_signature(kernel, kinds, other, error):
    for kind in kinds:
        with scene(kind), company([kind], 1) as (tensors, ledger):
            for arguments in ((*tensors, other), (other, *tensors)):
                account(functools.partial(kernel, *arguments), *tensors, kernel, ledgers=(ledger,), ends=(error,))
            del arguments


@pytest.mark.parametrize("position", range(3))
def test_writing_to_what_is_readonly(position):
    def write(x, y, z):
        (x, y, z)[position][0] = 2.0

    kernel, memory, ledger = fast_args(write), memory_of(1, 1, 1), Ledger()
    misaligned = np.zeros(17, np.uint8)[1:].view(np.float64)  # of which there is an error that the caller never sees
    memory.flags.writeable = misaligned.flags.writeable = False
    told = [cls(np.ones(3), ledger, flags=flags) for cls in (Exported, Dunder) for flags in (1, 1 | 2**40)]
    told += [cls(memory, ledger) for cls in (Dunder, Legacy, Exported)]
    with company(FAST, 3) as (tensors, others):
        for tensor in (memory, memory.view(np.ndarray), misaligned, *told):
            call = functools.partial(kernel, *tensors[:position], tensor, *tensors[position + 1 :])
            with scene(type(tensor).__name__):
                account(call, tensor, *tensors, kernel, ledgers=(ledger, others), ends=(TypingError,))
        del call
    assert memory[0] == 1.0 and all(tensor.array[0] == 1.0 for tensor in told)


def test_nothing_is_exported_for_what_does_not_bind():
    for kind, kernel in itertools.product(PRODUCERS, (sum_kernel(3), known_kernel(3, "fast"))):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(1, 1, 1), ledger)
        for count, named in [(2, ()), (4, ()), (6, ()), (3, ("x",)), (2, ("x",)), (3, ("a0",)), (3, ("a2", "x")), (3, ("a0\0",))]:
            with scene(kind, count, *named):
                call = functools.partial(kernel, *[tensor] * count, **dict.fromkeys(named, tensor))
                account(call, tensor, kernel, ends=(TypeError,))
        ledger.check(0)
        del call


# ---- conversions, where others do not have them: exports of native code, odd deleters ----------------------------------
EXPORTED_OTHERWISE = {
    "of another major version": ({"version": (2, 0)}, None), "without memory": ({"data": 0}, None),
    "of a type that the target lacks": ({"code": 200}, None),
    "for a subclass, which PyTorch's table does not make": ({}, None),
    "of a tensor that autograd tracks since": ({}, lambda tensor: tensor.requires_grad_()),
    "of a tensor whose memory is gone since": ({}, lambda tensor: tensor.untyped_storage().resize_(0)),
}  # fmt: skip
"""What native code finds after it has made an export: lies of the export, and what happens to the tensor meanwhile."""


@pytest.mark.skipif(not has_table(), reason="native code exports no tensor of this PyTorch")
@pytest.mark.parametrize("what", EXPORTED_OTHERWISE)
def test_a_conversion_that_native_code_gives_up_after_the_export(what):
    """Python code makes another export, and raises or converts. Both exports are given back."""
    (lies, happens), ledger, tensor = EXPORTED_OTHERWISE[what], Ledger(), torch.ones(3)
    target = type("Derived", (torch.Tensor,), {}) if "subclass" in what else np.ndarray

    @made_producers.ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def export(py_object, out):
        if happens is not None:
            happens(tensor)
        out[0] = made_producers.export_versioned(ledger, np.ones(3, np.float32), **lies)
        return 0

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


@pytest.mark.parametrize("name", CALLS)
def test_conversions_of_what_has_odd_deleters(name):
    for kind, make in DELETING.items():
        ledger = Ledger()
        tensor = make(memory_of(1, 1, 1), ledger)
        with scene(kind):
            end_of(CALLS[name], tensor)  # what is learnt at the first call stays
            account(functools.partial(CALLS[name], tensor), tensor, ledgers=(ledger,))


@needs_torch
def test_a_plan_without_a_guard_is_not_used_again_for_pytorch():
    """A new type with an exchange table needs no guard; it comes before and after a subclass of PyTorch's, which has one."""
    kernel, guarded = fast_args(lambda x: x[0]), type("Guarded", (torch.Tensor,), {})
    tensor = torch.ones(3, dtype=torch.float64).as_subclass(guarded)
    for make in (lambda: made_producers.tabled_type("Plain")(np.ones(3)), lambda: tensor) * 2:
        assert [kernel(each) for each in [make()] * WARM] == [1.0] * WARM
        gc.collect()
    assert is_fast(kernel, tensor) is is_borrowed()
    for bad in (tensor.clone().requires_grad_(), torch._neg_view(tensor.as_subclass(torch.Tensor)).as_subclass(guarded)):
        assert raised(end_of(kernel, bad)) is BufferError
    plain = made_producers.tabled_type("Plain")(np.ones(3))
    assert [kernel(plain) for _ in range(WARM)] == [1.0] * WARM


@needs_torch
def test_messages_do_not_read_a_tensor_whose_memory_was_freed():
    """In a process of its own: for the repr of a tensor PyTorch reads its elements."""
    fork_python(
        """
        import numpy as np
        import torch
        from fastexchange import convert, exchange_api, fast_args, from_dlpack, polyfill, to_dlpack
        from oracle import type_and_message

        freed, array = torch.ones(3), np.ones(3)
        freed.untyped_storage().resize_(0)
        for call in (
            lambda: fast_args(freed), lambda: fast_args(grad=freed), lambda: convert(array, freed),
            lambda: convert(array, np.ndarray, copy=freed), lambda: from_dlpack(array, copy=freed),
            lambda: from_dlpack(array, device=freed), lambda: from_dlpack(array, dtype=freed),
            lambda: to_dlpack(array, max_version=freed), lambda: to_dlpack(array, device=freed), lambda: polyfill(freed),
            lambda: exchange_api(freed),
        ):
            assert type_and_message(call)[0] in (TypeError, ValueError, BufferError)
        """
    )
