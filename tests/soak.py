"""Endurance: millions of calls over every path, and types made and destroyed by the hundred thousand. Memory stays flat.

    python tests/soak.py                              # ten million calls, 100,000 types
    python tests/soak.py --calls 100000 --types 4000

Not part of the suite: ``test_ownership.py`` runs it in small. After a warm-up nothing may grow beyond the bounds below: the
process's resident memory, the memory blocks of CPython's allocator, in a debug build all references. Every managed tensor's
deleter is counted. Prints what each path took, and ends with exit code 1 if anything grew or was not given back.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import random
import sys
import time
from pathlib import Path

import numba
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import made_producers  # noqa: E402
import ways  # noqa: E402
from counting import BUFFERS, TENSORS, forget_notes, memory_of, tensor_of  # noqa: E402
from frameworks import torch, tvm_ffi  # noqa: E402
from odd_tensors import ODD  # noqa: E402

from made_producers import (  # noqa: E402  # isort: skip
    ONLY_NUMBA, TABLE_CAPSULE, Dunder, Ignorant, Ledger, Legacy, Tabled, WithMethods, capsule, exchange_table, export_versioned,
    ffi, fill,
)

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack  # noqa: E402
from fastexchange.dispatch.runtime import runtime  # noqa: E402

ROUNDS, WARM_ROUNDS = 40, 8
"""Each path has its share of the calls in each round. What was allocated in the first rounds is not counted."""


def bounds(times: int) -> dict[str, int]:
    """By how much each may grow in so many calls, or types: in the full run not by a byte a call, nor by a block for eight types.

    References are counted in a debug build of CPython only.
    """
    return {"resident bytes": 6 * 2**20, "memory blocks": min(12_000, 1_000 + times // 10), "references": 20_000}


def resident() -> int:
    """Resident memory in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measured() -> tuple[int, int, int]:
    """Resident bytes, blocks of CPython's allocator, references (0 where nobody counts them)."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not every C library can give free memory back to the system
        ctypes.CDLL(None).malloc_trim(0)
    return resident(), sys.getallocatedblocks(), getattr(sys, "gettotalrefcount", int)()


def came_of(before: tuple, after: tuple, ledger: Ledger, times: int) -> list[str]:
    """Print what was measured after the warm-up and at the end; return what grew or was not given back, in words."""
    print(f"{ledger.made:,} managed tensors exported, {ledger.deleted:,} given back. After the warm-up:")
    problems = []
    for (name, bound), then, now in zip(bounds(times).items(), before, after, strict=True):
        print(f"  {name} {then:,} to {now:,} ({now - then:+,})")
        if now - then > bound:
            problems.append(f"{name} grew by {now - then:,}, bound {bound:,}")
    if (ledger.made, 0, 0) != (ledger.deleted, ledger.out, strays := len(made_producers._strays)):
        problems.append(f"{ledger.made:,} tensors were exported, {ledger.deleted:,} given back, {strays} twice")
    return problems


# ---- the paths -------------------------------------------------------------------------------------------------------
class Given:
    """An object whose ``__dlpack__`` is a function."""

    __dlpack_device__ = staticmethod(lambda: (1, 0))

    def __init__(self, give):
        self.give = give

    def __dlpack__(self, **options):
        return self.give(**options)


def interrupted(**options):
    raise KeyboardInterrupt


itself = fast_args(lambda x: x)
tail = fast_args(lambda x: x[1:])
several = fast_args(lambda x, y: (x, (y[1:], x[0]), np.full(3, y[0]), "text", None))
backwards = fast_args(lambda x: (np.ones(3), x[::-1]))
numbers = fast_args(lambda a, b, c, d=2.0, *, check=True: (a, b, c, d))
gather = fast_args(lambda *arguments: len(arguments))
listed = fast_args(lambda tensors, rest: (tensors[0][0] + len(rest[0]), tensors[-1], rest[0][0][1:]))
does_not_compile = fast_args(lambda x: x.no_such_attribute)
keep = fast_args(lambda container, x: container.append(x[1:]))
unlocked, parallel = fast_args(ways.total, nogil=True), fast_args(lambda x: (x * 2).sum(), parallel=True)
CALLED = [(fast_args(function), call) for function, call in ways.WAYS.values()]
"""Each way by which a tensor comes into a kernel."""


@fast_args
def shuffle(tensors, others):
    tensors.append(others[0])
    tensors[0] = tensors[-1]
    tensors.append(tensors[0] * 2)
    return tensors


@fast_args(out="x[n] -> out[n]")
def doubled(x, by=2.0, fail=False, out=None):
    if fail:
        raise ValueError("no", 3)
    out[:] = x * by


class Tensors:
    def __init__(self):
        self.ledger, memory = Ledger(), memory_of(1.0, 2.0, 3.0, 4.0)
        self.array = a = memory.view(np.ndarray)
        self.counted = [tensor_of(kind, memory, self.ledger) for kind in TENSORS]
        self.readonly = a.copy()
        self.readonly.flags.writeable = False
        self.native = [a, self.readonly]
        self.bad = [
            Dunder(a, self.ledger, device_type=2), Tabled(a, self.ledger, data=0), Legacy(a, self.ledger, lanes=2),
            Dunder(a, self.ledger, version=(2, 0)), Given(interrupted), a.astype(">f8"), object(), 2**70, *ODD.values(),
        ]  # fmt: skip
        if torch is not None:
            self.native.append(torch.from_numpy(a))
        if tvm_ffi is not None:
            self.native.append(tvm_ffi.from_dlpack(a))
        self.targets = [np.ndarray, *map(type, self.native[2:])]
        self.wrapped = [Given(tensor.__dlpack__) for tensor in self.native[:3]]
        self.buffers = [tensor_of(kind, memory, self.ledger) for kind in BUFFERS]
        self.tensors = [*self.native, *self.counted]
        self.writeable = [x for x in self.tensors if type(x) not in (Legacy, Ignorant) and x is not self.readonly]
        self.container = numba.typed.List.empty_list(numba.float64[::1])
        self.launches: list = []

    def some(self, i: int):
        """Mostly one of a framework, now and then any."""
        return of(self.native if i % 8 else self.tensors, i)


def of(things, i: int):
    """They take turns."""
    return things[i % len(things)]


def called(t, i):
    kernel, call = of(CALLED, i)
    call(kernel, t.some(i // len(CALLED)))


def doubled_in_turn(t, i):
    tensor = of(t.tensors, i)
    if i % 8 == 7:
        fails(doubled, *((tensor, 2.0, True) if i & 8 else (np.ones((2, 2)),)))
    else:
        doubled(tensor, by=3.0, out=t.array if i & 2 else None)


def bound(t, i):
    if i == 0:
        t.launches += [several.bind(t.array, x) for x in t.tensors] + [several.bind(x, x) for x in t.tensors]
    of(t.launches, i)()
    if i % 1000 == 999:
        t.launches[0].rebind(y=t.array)


def not_binding(t, i):
    given, named = (((t.array,), {}), ((t.array,) * 3, {}), ((t.array,) * 2, {"unknown": t.array}))[i % 3]
    fails(several, *given, **named)


def lists_changed(t, i):
    fresh = [t.array, *t.native[2:]]
    tensors = fresh[i % len(fresh) :]
    shuffle(tensors, tensors if i & 1 else fresh)


def converted(t, i):
    tensor, target = of(t.tensors, i), of(t.targets, i // 3)
    from_dlpack(tensor) if i % 3 == 0 else convert(tensor, target, **{"copy": True} if i % 3 == 2 else {})


def conversions_refused(t, i):
    bad = t.bad[i % 5]  # not on the CPU, NULL, of lanes, of another version, interrupted
    call, arguments, options = (
        (from_dlpack, (bad,), {}), (convert, (bad, np.ndarray), {}), (to_dlpack, (bad,), {"max_version": "1.3"}),
        (from_dlpack, (of(t.tensors, i),), {"device": (2, 0), "copy": False}),
    )[i // 5 % 4]  # fmt: skip
    fails(call, *arguments, **options)


def capsules(t, i):
    tensor, take = of(t.tensors, i), (id, np.from_dlpack, tail, from_dlpack)[i % 4]
    is_readonly = tensor is t.readonly or isinstance(tensor, (Legacy, Ignorant))
    made = to_dlpack(tensor, max_version=(1, 3) if is_readonly or i & 4 or take is not id else None)
    take(Given(lambda **options: made))


WAYS = (
    ("each way into a kernel", 800_000, called),
    ("scalars, tuples, None, keywords and defaults", 80_000, lambda t, i: numbers(i, c=(1, (i, 1j)), b=None)),
    ("buffers", 40_000, lambda t, i: first(of(t.buffers, i))),
    ("exchange tables in Python, owning exports", 15_000, lambda t, i: tail(of(t.counted, i))),
    ("__dlpack__ of NumPy and of PyTorch, wrapped", 10_000, lambda t, i: tail(of(t.wrapped, i))),
    ("nogil", 30_000, lambda t, i: unlocked(t.some(i))),
    ("parallel", 2_000, lambda t, i: parallel(of(t.tensors, i))),
    ("arrays returned, and views of them", 50_000, lambda t, i: (itself, tail)[i & 1](t.some(i // 2))),
    ("results in tuples, new arrays, text", 20_000, lambda t, i: several(t.some(i), t.array)),
    ("results that PyTorch has no tensors for", 1_000, lambda t, i: fails(backwards, t.native[2])),
    ("views kept in a list", 15_000, lambda t, i: (keep(t.container, of(t.writeable, i)), i % 50 or t.container.clear())),
    ("bound launches", 50_000, bound),
    ("lists", 20_000, lambda t, i: listed(t.writeable[i % 5 :] * (1 if i % 50 else 9), ([t.array] * (1 + i % 2), i))),
    ("lists that the kernel changes", 10_000, lists_changed),
    ("lists refused", 1_000, lambda t, i: fails(listed, [*t.tensors, t.bad[i % 6]], ([t.array], 1))),
    ("declared outputs, exceptions in the kernel", 14_000, doubled_in_turn),
    ("refused", 12_000, lambda t, i: fails(several, t.array, of(t.bad, i))),
    ("refused in the middle of seven", 4_000, lambda t, i: fails(gather, *t.tensors[:3], of(t.bad, i), *t.counted[:3])),
    ("arguments that do not bind", 8_000, not_binding),
    ("beside what only Numba takes", 3_000, lambda t, i: gather(ONLY_NUMBA, of(t.tensors, i))),
    ("compile errors, again and again", 1_000, lambda t, i: fails(does_not_compile, of(t.tensors, i))),
    ("compile errors of new kernels", 100, lambda t, i: fails(fast_args(lambda x: x.no_such_attribute), of(t.tensors, i))),
    ("conversions", 10_000, converted),
    ("conversions refused", 3_000, conversions_refused),
    ("capsules dropped and consumed", 6_000, capsules),
    ("explanations", 900, lambda t, i: (several.explain(of(t.tensors, i), t.bad[i % 4]), explain(of(t.tensors, i)))),
)


def fails(call, *arguments, **keywords) -> None:
    try:
        call(*arguments, **keywords)
    except BaseException:
        return
    raise AssertionError(f"{call!r} did not fail")


def soak_calls(total: int) -> list[str]:
    """Make about `total` calls over all paths. Prints a table; returns what grew, in words."""
    tensors, ways = Tensors(), [way for way in WAYS if torch is not None or "PyTorch" not in way[0]]
    whole = sum(share for _, share, _ in ways)
    counts = {name: np.zeros(3) for name, _, _ in ways}  # calls, seconds, blocks
    began, before = time.perf_counter(), None

    def work(call, times: int) -> None:
        for i in range(times):
            call(tensors, i)
        tensors.container.clear()
        tensors.launches.clear()
        for tensor in (*tensors.counted, *tensors.bad):
            forget_notes(tensor)

    for _, share, call in ways:  # whatever is compiled is compiled now
        work(call, 600 if share > 1000 else 20)
    gc.collect()
    gc.freeze()
    for index in range(ROUNDS):
        if index == WARM_ROUNDS:
            before = measured()
        for name, share, call in ways:
            times = max(1, round(total * share / whole / ROUNDS))
            blocks, start = sys.getallocatedblocks(), time.perf_counter()
            work(call, times)
            seconds = time.perf_counter() - start
            gc.collect()
            counts[name] += times, seconds, (sys.getallocatedblocks() - blocks) * (index >= WARM_ROUNDS)
    after = measured()
    gc.unfreeze()
    print(f"\n{'path':<46}{'calls':>12}{'seconds':>9}{'blocks':>9}")
    for name, (calls, seconds, blocks) in counts.items():
        print(f"{name:<46}{calls:>12,.0f}{seconds:>9.1f}{blocks:>9,.0f}")
    print(f"{sum(count[0] for count in counts.values()):,.0f} calls in {time.perf_counter() - began:.0f} s")
    return came_of(before, after, tensors.ledger, total)


# ---- types that come and go ------------------------------------------------------------------------------------------
_ANSWERS = [np.full(3, 10 + i).astype(("f8", "f4", "i8", "u1")[i % 4]) for i in range(8)]
"""What the tensors of a type with one of eight exchange tables hold, whatever the instance."""
answers_given = Ledger()


def _tables_of(answer: np.ndarray):
    """Capsules of tables whose tensors all are `answer`, borrowed or only owned: it is the type's, not the instance's."""
    words = []

    @ffi.callback("int(void *, DLTensor *)")
    def borrow(py_object, out):
        words[:] = [fill(out, answer)]
        return 0

    @ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def export(py_object, out):
        out[0] = export_versioned(answers_given, answer)
        return 0

    functions = {"managed_tensor_from_py_object_no_sync": export}
    tables = (exchange_table(dltensor_from_py_object_no_sync=each, **functions) for each in (borrow, None))
    return [capsule(table, TABLE_CAPSULE) for table in tables]


_TABLES = [_tables_of(answer) for answer in _ANSWERS]


def _new(*bases, table=None, **attributes) -> type:
    return type("T", bases, attributes if table is None else {**attributes, "__dlpack_c_exchange_api__": table})


MAKERS = {
    # by what becomes of the type's instances: of an answer and its number, an instance of a new type
    "table": lambda answer, number: _new(table=of(_TABLES, number)[0])(),
    "table of owning exports": lambda answer, number: _new(table=of(_TABLES, number)[1])(),
    "inherited table": lambda answer, number: _new(_new(table=of(_TABLES, number)[number // 8 & 1]))(),
    "__dlpack__": lambda answer, number: _new(Dunder)(answer, answers_given),
    "__dlpack__, no table": lambda answer, number: _new(Dunder, table=3)(answer, answers_given),
    "__dlpack__, counted": lambda answer, number: _new(WithMethods, made_producers._Tabled)(answer, answers_given),
    "subclass of ndarray": lambda answer, number: answer.view(_new(np.ndarray)),
    "refused": lambda answer, number: _new()(),
    "refused, no table": lambda answer, number: _new(table=number)(),
}
if torch is not None:
    MAKERS["subclass of torch.Tensor"] = lambda answer, number: torch.from_numpy(answer).as_subclass(_new(torch.Tensor))


def made_by(name: str, number: int):
    """An instance of a new type, and what a kernel reads in it; None if it is refused."""
    answer = of(_ANSWERS, number)
    return MAKERS[name](answer, number), None if name.startswith("refused") else answer[0]


first, second = fast_args(lambda x: x[0]), fast_args(lambda x, y: y[0])


def wrong_answer(tensor, want, times: int) -> str:
    """What a kernel read that is not as wanted, in so many calls; nothing if it was right each time."""
    for repetition in range(times):
        try:
            got = first(tensor) if repetition % 2 else second(_ANSWERS[0], tensor)
        except TypeError:
            got = None
        if got != want:
            return f"a kernel read {got!r} in call {repetition}"
    if times == 3 and want is not None and from_dlpack(tensor)[0] != want:
        return "a conversion gave something else"
    return ""


BATCH = 40
"""Types that live at the same time. They die by garbage collection, all together."""


def soak_types(total: int, seed: int = 0) -> list[str]:
    """Make, use and destroy `total` types. Prints what came of it; returns what was wrong, in words."""
    generator, names, problems = random.Random(seed), sorted(MAKERS), []
    last_kind: dict[int, str] = {}  # by address of a type
    reused = by_others = made = calls = 0
    gc.collect()
    gc.freeze()
    for name in names:  # whatever is compiled is compiled now
        for number in range(2 * len(_ANSWERS)):
            wrong_answer(*made_by(name, number), 4)
            gc.collect()
    began, before, warm, known = time.perf_counter(), None, max(total // 10, 30 * BATCH), len(runtime().entries)
    while made < total or before is None:
        if made >= warm and before is None:
            before = measured()
        for name in generator.choices(names, k=BATCH):
            tensor, want = made_by(name, generator.randrange(1000))
            kind, address, times = f"{name} {want!r}", id(type(tensor)), generator.randrange(1, 5)
            reused += address in last_kind
            by_others += last_kind.get(address, kind) != kind
            last_kind[address] = kind
            calls += times
            wrong = wrong_answer(tensor, want, times)
            if wrong and len(problems) < 10:
                problems.append(f"{wrong} in a new type's tensor, {kind}")
        made += BATCH
        del tensor
        gc.collect()
        last = generator.choice(_ANSWERS)
        assert first(last) == last[0]
    after = measured()
    gc.unfreeze()
    if len(runtime().entries) > known + 8:
        problems.append(f"{len(runtime().entries):,} types are known, not {known:,}")
    if made >= 1000 and not by_others:
        problems.append("no address of a type was used again by another kind of type: nothing has been tried")
    print(f"\n{made:,} types, {calls:,} calls in {time.perf_counter() - began:.0f} s")
    print(f"{reused:,} at the address of a dead type, {by_others:,} of another kind than that")
    return problems + came_of(before, after, answers_given, made - warm)


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
