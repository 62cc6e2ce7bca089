"""Endurance: millions of calls over every path, and types made and destroyed by the hundred thousand. Memory stays flat.

    python tests/soak.py                              # ten million calls, 100,000 types
    python tests/soak.py --calls 100000 --types 1000

Not part of the suite: ``test_ownership.py`` runs it in small. After a warm-up nothing may grow beyond the bounds below: the
process's resident memory, the memory blocks of CPython's allocator, in a debug build all references. Every managed tensor's
deleter is counted. Prints what each path took, and ends with exit code 1 if anything grew or was not given back.
"""

import argparse
import array as stdlib_array
import collections
import contextlib
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import made_producers  # noqa: E402
from frameworks import torch, tvm_ffi  # noqa: E402
from made_producers import (  # noqa: E402
    ONLY_NUMBA,
    TABLE_CAPSULE,
    Dunder,
    Ignorant,
    Ledger,
    Legacy,
    Tabled,
    capsule,
    exchange_table,
    export_versioned,
    ffi,
    fill,
    tabled_type,
)

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack  # noqa: E402

ROUNDS, WARM_ROUNDS = 40, 8
"""Each path has its share of the calls in each round. What was allocated in the first rounds is not counted."""
RESIDENT_BOUND = 6 * 2**20
"""Bytes by which resident memory may grow: less than one for each call of the full run."""
BLOCKS_BOUND = 12_000
"""Memory blocks of CPython's allocator by which it may grow: some 3,000 for each fast entry that is compiled late, which cannot
be ruled out; in the full run not one block for a thousand calls, or for eight types."""
REFERENCES_BOUND = 20_000
"""The same for all references, which only a debug build of CPython counts."""


# ---- measuring -------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Resident memory in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def trim() -> None:
    """Give free memory back to the system, where the C library can."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def measured() -> tuple[int, int, int]:
    """Resident bytes, blocks of CPython's allocator, references (0 where nobody counts them)."""
    trim()
    return resident(), sys.getallocatedblocks(), getattr(sys, "gettotalrefcount", int)()


def grown(before, after) -> list[str]:
    """What grew beyond its bound, in words."""
    bounds = (("resident bytes", RESIDENT_BOUND), ("memory blocks", BLOCKS_BOUND), ("references", REFERENCES_BOUND))
    return [
        f"{name} grew by {now - then:,}, bound {bound:,}"
        for (name, bound), then, now in zip(bounds, before, after, strict=True) if now - then > bound
    ]  # fmt: skip


@dataclass
class Way:
    """A way that calls go. ``work(times)`` makes so many."""

    name: str
    share: float
    """Of a million calls."""
    work: Callable[[int], None]
    calls: int = 0
    seconds: float = 0.0
    blocks: int = 0
    resident: int = 0


# ---- the paths -------------------------------------------------------------------------------------------------------


class Forgetful(list):
    """A list that stays empty: what producers note of their exports."""

    def append(self, item):
        pass


def forgetful(tensor):
    """`tensor`, which notes nothing."""
    tensor.capsules = tensor.asked = Forgetful()
    return tensor


class Wrapped:
    """A tensor class in Python over another tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None, **options):
        return self.tensor.__dlpack__(max_version=max_version)


class Interrupted(Dunder):
    """``__dlpack__`` is interrupted."""

    def __dlpack__(self, *, max_version=None):
        raise KeyboardInterrupt


class Once:
    """An object with ``__dlpack__`` that gives a capsule once."""

    def __init__(self, made):
        self.made = made

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.made


@fast_args
def add(x, y, z):
    return x[0] + y[0] + z[0]


@fast_args(nogil=True)
def add_unlocked(x, y, z):
    return x[0] + y[0] + z[0]


@fast_args(parallel=True)
def add_parallel(x):
    s = 0.0
    for i in numba.prange(x.shape[0]):
        s += x[i]
    return s


@fast_args
def scale(x, by=2.0, *, check=True):
    return x[0] * by


@fast_args
def tail(x):
    return x[1:]


@fast_args
def itself(x):
    return x


@fast_args
def several(x, y):
    return x, (y[1:], x[0]), np.full(3, y[0]), "text", None


@fast_args
def backwards(x):
    return np.ones(3), x[::-1]


Pair = collections.namedtuple("Pair", "left right")
other_shape = np.ones((2, 2))


@fast_args
def nest(tree, pair):
    return tree[0][0] + tree[1][1][0], pair.left[1:], tree[1][0]


@fast_args
def total(tensors, rest):
    s = 0.0
    for tensor in tensors:
        s += tensor[0]
    return s + len(rest[0]), tensors[-1], rest[0][0][1:]


@fast_args
def shuffle(tensors, others):
    tensors.append(others[0])
    tensors[0] = tensors[-1]
    tensors.append(tensors[0] * 2)
    return tensors


@fast_args(out="x[n] -> out[n]")
def doubled(x, by=2.0, fail=False, out=None):
    if fail:
        raise ValueError("no")
    for i in range(x.shape[0]):
        out[i] = x[i] * by


@fast_args
def numbers(a, b, c, d):
    return a, b, c, d


@fast_args
def keep(container, x):
    container.append(x[1:])


@fast_args
def raises(x):
    if x[0] > 0:
        raise ValueError("no", 3)
    return x


@fast_args
def gather(*arguments):
    return len(arguments)


def _no_such_attribute(x):
    return x.no_such_attribute


does_not_compile = fast_args(_no_such_attribute)


class Calls:
    """The paths, and the tensors that take them."""

    def __init__(self):
        self.ledger = Ledger()
        self.array = np.arange(1.0, 5.0)
        self.readonly = self.array.copy()
        self.readonly.flags.writeable = False
        self.counted = [
            Tabled(self.array, self.ledger), forgetful(Dunder(self.array, self.ledger)),
            forgetful(Legacy(self.array, self.ledger)), forgetful(Ignorant(self.array, self.ledger)),
            tabled_type("ExportOnly", dltensor_from_py_object_no_sync=None)(self.array, self.ledger),
        ]  # fmt: skip
        self.native = [self.array, self.readonly]
        if torch is not None:
            self.native.append(torch.from_numpy(self.array))
        if tvm_ffi is not None:
            self.native.append(tvm_ffi.from_dlpack(self.array))
        self.buffers = [
            memoryview(self.array), stdlib_array.array("d", self.array), bytearray(8), b"12345678", memoryview(b"12345678"),
        ]  # fmt: skip
        self.tensors = [*self.native, *self.counted]
        readonly = (Legacy, Ignorant)
        self.writeable = [x for x in self.tensors if type(x) not in readonly and x is not self.readonly]
        self.bad = [
            forgetful(Dunder(self.array, self.ledger, device_type=2)), Tabled(self.array, self.ledger, data=0),
            forgetful(Legacy(self.array, self.ledger, lanes=2)), forgetful(Dunder(self.array, self.ledger, version=(2, 0))),
            Interrupted(self.array, self.ledger), self.array.astype(">f8"), object(), 2**70,
        ]  # fmt: skip
        if torch is not None:
            self.bad += [
                torch.ones(4, requires_grad=True), torch._neg_view(torch.ones(4)), torch.ones(3, device="meta"),
                torch.ones(4).to_sparse(),
            ]  # fmt: skip
        self.container = numba.typed.List.empty_list(numba.float64[::1])
        self.paths = [Way(name, share, getattr(self, work)) for name, share, work in self.MIX]
        if torch is None:
            self.paths = [path for path in self.paths if "PyTorch" not in path.name]

    MIX = (
        ("three arrays of NumPy", 240_000, "three_numpy"),
        ("three tensors of PyTorch", 200_000, "three_torch"),
        ("three of any framework", 80_000, "any_three"),
        ("keywords and defaults", 90_000, "by_keyword"),
        ("scalars, tuples, None", 80_000, "scalars"),
        ("buffers", 40_000, "by_buffer"),
        ("exchange tables in Python, owning exports", 15_000, "by_export"),
        ("__dlpack__ of NumPy and of PyTorch, wrapped", 10_000, "by_dunder"),
        ("nogil", 30_000, "without_gil"),
        ("parallel", 2_000, "in_parallel"),
        ("arrays returned, and views of them", 50_000, "results"),
        ("results in tuples, new arrays, text", 20_000, "several_results"),
        ("results that PyTorch has no tensors for", 1_000, "results_refused"),
        ("views kept in a list", 15_000, "kept"),
        ("bound launches", 50_000, "bound"),
        ("tuples and named tuples", 15_000, "in_tuples"),
        ("lists", 20_000, "in_lists"),
        ("lists that the kernel changes", 10_000, "changed_lists"),
        ("lists refused", 1_000, "lists_refused"),
        ("declared outputs", 14_000, "declared"),
        ("exceptions in the kernel", 20_000, "exceptions"),
        ("refused", 12_000, "refused"),
        ("refused in the middle of seven", 4_000, "refused_in_the_middle"),
        ("arguments that do not bind", 8_000, "not_binding"),
        ("beside what only Numba takes", 3_000, "by_numba"),
        ("compile errors, again and again", 1_000, "compile_errors"),
        ("compile errors of new kernels", 100, "compile_errors_of_new_kernels"),
        ("conversions", 10_000, "conversions"),
        ("conversions refused", 3_000, "conversions_refused"),
        ("capsules dropped", 3_000, "capsules_dropped"),
        ("capsules consumed", 3_000, "capsules_consumed"),
        ("explanations", 900, "explanations"),
    )

    def three_numpy(self, times):
        a = self.array
        for _ in range(times):
            add(a, a, a)

    def three_torch(self, times):
        t = self.native[2]
        for _ in range(times):
            add(t, t, t)

    def any_three(self, times):
        count = len(self.native)
        for i in range(times):
            add(self.native[i % count], self.native[i // count % count], self.native[i // 7 % count])

    def by_keyword(self, times):
        a, last = self.array, self.native[-1]
        for i in range(times):
            if i & 1:
                scale(x=a, by=3.0)
            else:
                scale(last, check=False)

    def scalars(self, times):
        for i in range(times):
            numbers(i, 2.5, (1, (i, 1j)), None)

    def by_buffer(self, times):
        for i in range(times):
            scale(self.buffers[i % len(self.buffers)])

    def by_export(self, times):
        for i in range(times):
            scale(self.counted[i % len(self.counted)])

    def by_dunder(self, times):
        wrapped = [Wrapped(tensor) for tensor in self.native[:3]]
        for i in range(times):
            scale(wrapped[i % len(wrapped)])

    def without_gil(self, times):
        tensors = [*self.native, *self.native, *self.native, *self.counted]
        for i in range(times):
            tensor = tensors[i % len(tensors)]
            add_unlocked(self.array, tensor, tensor)

    def in_parallel(self, times):
        for i in range(times):
            add_parallel(self.tensors[i % len(self.tensors)])

    def results(self, times):
        kernels = (itself, tail)
        for i in range(times):
            tensors = self.native if i % 8 else self.tensors
            kernels[i & 1](tensors[i // 2 % len(tensors)])

    def several_results(self, times):
        for i in range(times):
            tensors = self.native if i % 8 else self.tensors
            several(tensors[i % len(tensors)], self.array)

    def results_refused(self, times):
        for _ in range(times):
            fails(backwards, self.native[2])

    def bound(self, times):
        launches = [add.bind(self.array, x, x) for x in self.tensors] + [several.bind(x, x) for x in self.tensors]
        for i in range(times):
            launches[i % len(launches)]()
        launches[0].rebind(z=self.array)

    def in_tuples(self, times):
        tensors = self.writeable
        count = len(tensors)
        for i in range(times):
            one, other = tensors[i % count], tensors[i // count % count]
            nest((one, (2.5, other)), Pair(other, one))

    def in_lists(self, times):
        for i in range(times):
            at = i % len(self.writeable)
            total(self.writeable[at:] if i % 50 else self.writeable * 10, ([self.array] * (1 + i % 2), i))

    def changed_lists(self, times):
        fresh = [self.array, *self.native[2:]]
        for i in range(times):
            tensors = fresh[i % len(fresh) :]
            shuffle(tensors, tensors if i & 1 else fresh[:])

    def lists_refused(self, times):
        other = np.ones((2, 2))
        for i in range(times):
            fails(total, [*self.tensors, other if i & 1 else self.bad[i // 2 % 6]], ([self.array], 1))

    def declared(self, times):
        for i in range(times):
            tensor = self.tensors[i % len(self.tensors)]
            if i % 16 == 7:
                fails(doubled, tensor, fail=True)
            elif i % 16 == 11:
                fails(doubled, other_shape)
            elif i & 1:
                doubled(tensor)
            else:
                doubled(tensor, by=3.0, out=self.array if i & 2 else None)

    def kept(self, times):
        tensors = self.writeable
        for i in range(times):
            keep(self.container, tensors[i % len(tensors)])
            if i % 50 == 49:
                self.container.clear()
        self.container.clear()

    def exceptions(self, times):
        for i in range(times):
            tensors = self.native if i % 8 else self.tensors
            with contextlib.suppress(ValueError):
                raises(tensors[i % len(tensors)])

    def refused(self, times):
        for i in range(times):
            fails(add, self.array, self.bad[i % len(self.bad)], self.array)

    def refused_in_the_middle(self, times):
        for i in range(times):
            fails(gather, *self.tensors[:3], self.bad[i % len(self.bad)], *self.counted[:3])

    def not_binding(self, times):
        a = self.array
        for i in range(times):
            if i % 3 == 0:
                fails(add, a, a)
            elif i % 3 == 1:
                fails(add, a, a, a, a)
            else:
                fails(add, a, a, a, unknown=a)

    def by_numba(self, times):
        for i in range(times):
            gather(ONLY_NUMBA, self.tensors[i % len(self.tensors)])

    def compile_errors(self, times):
        for i in range(times):
            fails(does_not_compile, self.tensors[i % len(self.tensors)])

    def compile_errors_of_new_kernels(self, times):
        for i in range(times):
            fails(fast_args(_no_such_attribute), self.tensors[i % len(self.tensors)])

    def conversions(self, times):
        targets = [np.ndarray]
        if torch is not None:
            targets.append(torch.Tensor)
        if tvm_ffi is not None:
            targets.append(tvm_ffi.Tensor)
        for i in range(times):
            tensor = self.tensors[i % len(self.tensors)]
            if i % 3 == 0:
                from_dlpack(tensor)
            elif i % 3 == 1:
                convert(tensor, targets[i // 3 % len(targets)])
            else:
                convert(tensor, targets[i // 3 % len(targets)], copy=True)

    def conversions_refused(self, times):
        for i in range(times):
            bad = self.bad[i % 5]  # not on the CPU, NULL, of lanes, of another version, interrupted
            way = i // 5 % 4
            if way == 0:
                fails(from_dlpack, bad)
            elif way == 1:
                fails(convert, bad, np.ndarray)
            elif way == 2:
                fails(to_dlpack, bad, max_version="1.3")
            else:
                fails(from_dlpack, self.tensors[i % len(self.tensors)], device=(2, 0), copy=False)

    def capsules_dropped(self, times):
        for i in range(times):
            tensor = self.tensors[i % len(self.tensors)]
            if tensor is self.readonly or isinstance(tensor, (Legacy, Ignorant)):
                to_dlpack(tensor, max_version=(1, 3))
            else:
                to_dlpack(tensor, max_version=(1, 3) if i & 1 else None)

    def capsules_consumed(self, times):
        for i in range(times):
            made = Once(to_dlpack(self.tensors[i % len(self.tensors)], max_version=(1, 3)))
            if i % 3 == 0:
                np.from_dlpack(made)
            elif i % 3 == 1:
                scale(made)
            else:
                from_dlpack(made)

    def explanations(self, times):
        for i in range(times):
            tensor = self.tensors[i % len(self.tensors)]
            add.explain(tensor, self.array, self.bad[i % 4])
            explain(tensor)


def fails(call, *arguments, **keywords) -> None:
    """The call raises; the exception is gone."""
    try:
        call(*arguments, **keywords)
    except BaseException:
        return
    raise AssertionError(f"{call!r} did not fail")


def soak_calls(total: int) -> list[str]:
    """Make about `total` calls over all paths. Prints a table; returns what grew, in words."""
    calls = Calls()
    whole = sum(path.share for path in calls.paths)
    began, before = time.perf_counter(), None
    for path in calls.paths:  # whatever is compiled is compiled now, fast entries too
        path.work(600 if path.share > 1000 else 20)
    made = 0
    gc.collect()
    gc.freeze()
    for index in range(ROUNDS):
        if index == WARM_ROUNDS:
            before = measured()
        for path in calls.paths:
            times = max(1, round(total * path.share / whole / ROUNDS))
            blocks, bytes_, start = sys.getallocatedblocks(), resident(), time.perf_counter()
            path.work(times)
            path.seconds += time.perf_counter() - start
            path.calls += times
            made += times
            gc.collect()
            if index >= WARM_ROUNDS:
                path.blocks += sys.getallocatedblocks() - blocks
                path.resident += resident() - bytes_
    after = measured()
    gc.unfreeze()
    seconds = time.perf_counter() - began
    print(f"\n{'path':<46}{'calls':>12}{'seconds':>9}{'blocks':>9}{'KiB':>9}")
    for path in calls.paths:
        print(f"{path.name:<46}{path.calls:>12,}{path.seconds:>9.1f}{path.blocks:>9,}{path.resident // 1024:>9,}")
    problems = grown(before, after)
    ledger = calls.ledger
    if (ledger.made, 0) != (ledger.deleted, ledger.out) or made_producers._strays:
        strays = len(made_producers._strays)
        problems.append(f"{ledger.made:,} tensors were exported, {ledger.deleted:,} given back, {strays} twice")
    print(
        f"{made:,} calls in {seconds:.0f} s; {ledger.made:,} managed tensors exported, {ledger.deleted:,} given back.\n"
        f"After the warm-up: resident {_change(before[0] >> 10, after[0] >> 10)} KiB, blocks {_change(before[1], after[1])}"
        + (f", references {_change(before[2], after[2])}" if after[2] else "")
    )
    return problems


def _change(before: int, after: int) -> str:
    return f"{before:,} to {after:,} ({after - before:+,})"


# ---- types that come and go ------------------------------------------------------------------------------------------

_DTYPES = ("f8", "f4", "i8", "u1")
_ANSWERS = [np.full(3, 10 + i).astype(_DTYPES[i % len(_DTYPES)]) for i in range(8)]
"""What the tensors of a type with one of eight exchange tables hold, whatever the instance."""
answers_given = Ledger()


def _table_of(answer: np.ndarray):
    """A capsule of a table whose tensors all are `answer`: the answer is the type's, not the instance's."""
    words = []

    @ffi.callback("int(void *, DLTensor *)")
    def borrow(py_object, out):
        words[:] = [fill(out, answer)]
        return 0

    @ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def export(py_object, out):
        out[0] = export_versioned(answers_given, answer)
        return 0

    table = exchange_table(dltensor_from_py_object_no_sync=borrow, managed_tensor_from_py_object_no_sync=export)
    owning = exchange_table(dltensor_from_py_object_no_sync=None, managed_tensor_from_py_object_no_sync=export)
    return capsule(table, TABLE_CAPSULE), capsule(owning, TABLE_CAPSULE)


def _dlpack_of(answer: np.ndarray):
    def __dlpack__(self, *, max_version=None):
        return capsule(export_versioned(answers_given, answer), b"dltensor_versioned")

    return __dlpack__


def _makers() -> list[Callable]:
    """Functions of a number: a new type, an instance of it, and what a kernel reads in it (None: it is refused)."""

    def table(number):
        answer = number % len(_ANSWERS)
        cls = type("T", (), {"__dlpack_c_exchange_api__": tables[answer][0]})
        return cls, cls(), _ANSWERS[answer][0]

    def owning(number):
        answer = number % len(_ANSWERS)
        cls = type("T", (), {"__dlpack_c_exchange_api__": tables[answer][1]})
        return cls, cls(), _ANSWERS[answer][0]

    def method(number):
        answer = _ANSWERS[number % len(_ANSWERS)]
        cls = type("T", (), {"__dlpack__": _dlpack_of(answer), "__dlpack_device__": lambda self: (1, 0)})
        return cls, cls(), answer[0]

    def subclass(number):
        cls = type("T", (np.ndarray,), {})
        answer = _ANSWERS[number % len(_ANSWERS)]
        return cls, answer.view(cls), answer[0]

    def of_torch(number):
        cls = type("T", (torch.Tensor,), {})
        answer = _ANSWERS[number % len(_ANSWERS)]
        return cls, torch.from_numpy(answer).as_subclass(cls), answer[0]

    def nothing(number):
        cls = type("T", (), {})
        return cls, cls(), None

    def no_table(number):
        cls = type("T", (), {"__dlpack_c_exchange_api__": number})
        return cls, cls(), None

    def inherits(number):
        answer = number % len(_ANSWERS)
        base = type("B", (), {"__dlpack_c_exchange_api__": tables[answer][number & 1]})
        cls = type("T", (base,), {})
        return cls, cls(), _ANSWERS[answer][0]

    tables = [_table_of(answer) for answer in _ANSWERS]
    return [table, owning, method, subclass, nothing, no_table, inherits, *[of_torch] * (torch is not None)]


@fast_args
def first(x):
    return x[0]


@fast_args
def second(x, y):
    return y[0]


def wrong_answer(tensor, want, times: int) -> str:
    """What a kernel read that is not as wanted, in so many calls; nothing if it was right each time."""
    for repetition in range(times):
        try:
            got = first(tensor) if repetition % 2 else second(_ONE, tensor)
        except TypeError:
            got = None
        if got != want:
            return f"a kernel read {got!r} in call {repetition}"
    return ""


_ONE = np.ones(3)
BATCH = 40
"""Types that live at the same time. They die by garbage collection, all together."""


def soak_types(total: int, seed: int = 0) -> list[str]:
    """Make, use and destroy `total` types. Prints what came of it; returns what was wrong, in words."""
    generator, makers = random.Random(seed), _makers()
    last_kind: dict[int, str] = {}  # by address of a type
    reused = by_others = made = calls = 0
    problems: list[str] = []
    gc.collect()
    gc.freeze()
    for maker in makers:  # whatever is compiled is compiled now, fast entries too: a kernel has eight for one signature
        for number in range(2 * len(_ANSWERS)):
            _, tensor, want = maker(number)
            wrong_answer(tensor, want, 80)
            del _, tensor
            gc.collect()
    began, before, warm = time.perf_counter(), None, max(total // 10, 30 * BATCH)
    while made < total or before is None:
        if made >= warm and before is None:
            before = measured()
        alive = []
        for _ in range(BATCH):
            maker = generator.choice(makers)
            cls, tensor, want = maker(generator.randrange(1000))
            kind = f"{maker.__name__} {want!r}"
            if id(cls) in last_kind:
                reused += 1
                by_others += last_kind[id(cls)] != kind
            last_kind[id(cls)] = kind
            alive.append((cls, tensor, want, kind))
        made += BATCH
        generator.shuffle(alive)
        for _, tensor, want, kind in alive:
            times = 40 if generator.random() < 0.05 else generator.randrange(1, 4)
            calls += times
            wrong = wrong_answer(tensor, want, times)
            if wrong and len(problems) < 10:
                problems.append(f"{wrong} in a new type's tensor, {kind}")
        del cls, tensor, alive, _
        gc.collect()
        if generator.random() < 0.1:
            last = generator.choice(_ANSWERS)
            assert first(last) == last[0]
    after = measured()
    gc.unfreeze()
    problems += grown(before, after)
    ledger = answers_given
    if (ledger.made, 0) != (ledger.deleted, ledger.out):
        problems.append(f"{ledger.made:,} tensors were exported, {ledger.deleted:,} given back")
    if made >= 1000 and not by_others:
        problems.append("no address of a type was used again by another kind of type: nothing has been tried")
    print(
        f"\n{made:,} types, {calls:,} calls in {time.perf_counter() - began:.0f} s; {reused:,} at the address of a dead type, "
        f"{by_others:,} of another kind than that;\n{ledger.made:,} managed tensors exported, {ledger.deleted:,} given back.\n"
        f"After the warm-up: resident {_change(before[0] >> 10, after[0] >> 10)} KiB, blocks {_change(before[1], after[1])}"
    )
    return problems


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000_000, help="calls over all paths (default 10,000,000)")
    parser.add_argument("--types", type=int, default=100_000, help="types to make and destroy (default 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="for the choice of types")
    options = parser.parse_args(arguments)
    print(f"Python {sys.version.split()[0]}, NumPy {np.__version__}, Numba {numba.__version__}")
    problems = soak_calls(options.calls) if options.calls else []
    if options.types:
        problems += soak_types(options.types, options.seed)
    if problems:
        print("FAILED:", *problems, sep="\n  ")
        sys.exit(1)
    print("memory flat")


if __name__ == "__main__":
    main()
