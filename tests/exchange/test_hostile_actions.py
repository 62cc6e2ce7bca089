"""Producers that do something else first: call kernels, collect garbage, change their type, in the middle of a call."""

import contextlib
import gc
import itertools
import sys
import threading
import weakref

import hostile_producers as hostile
import numba
import numpy as np
import pytest
from children import at_once, in_fork
from counting import LEGACY, Exported, Viewed, end_of, forget_notes, gives_deleting, kept, no_violations, scene
from forked import needs_fork
from hostile_producers import ATTRIBUTE, REFUSED, Gives, GivesLegacy, Hostile, before, hostile_type, legacy, versioned
from hostile_ways import WARM, Turning, check_end, ignore, size_of, sum_of, total, unlocked_total, warm, warm_total
from made_producers import ONLY_NUMBA, Dunder, Tabled
from oracle import new_kernel

from fastexchange import explain, fast_args

assert no_violations  # a fixture
part = fast_args(lambda first, x: x[1:], returns=np.ndarray)


# ---- what they do ----------------------------------------------------------------------------------------------------
def call_with_others(tensor, kernel):
    assert ignore(*[tensor] * 5, *range(100)) == 105
    assert (kernel(2, np.ones((2, 2), np.int32)), kernel(None, Dunder(np.ones(2)))) == (4.0, 2.0)
    return unlocked_total(1.0, tensor), part(1.0, tensor).tolist()


def be_refused_by_the_kernel(tensor, kernel):
    tensors = Viewed(lanes=2), Exported(lanes=2), object(), Gives(lambda tensor: None)
    return [end_of(kernel, 1.0, tensor)[0] for tensor in tensors]


def call_deep(tensor, kernel, depth=20):
    deeper = before(lambda tensor: call_deep(tensor, kernel, depth - 1) if depth else None)
    return kernel(1.0, Turning(view=deeper))


def collect_garbage(tensor, kernel):
    cycle = [tensor, type("Short-lived", (Turning,), {})(behaves=True)]
    cycle.append(cycle)
    kernel(1.0, cycle[1])
    del cycle
    gc.collect()


def switch_threads(tensor, kernel):
    ends = []
    at_once(*[lambda: ends.append(end_of(kernel, 1.0, Turning(behaves=True)))] * 3)
    return ends


def make_many_types(tensor, kernel):
    """So many that the table of types is made anew, elsewhere."""
    if not hasattr(tensor, "has_made_types"):
        tensor.has_made_types = True
        many = [hostile_type(f"Many{i}")(behaves=True) for i in range(200)]
        assert ignore(*many[:100]) == ignore(*many[100:]) == 100
        assert kernel(1.0, many[0]) == 6.0


def raise_and_catch(tensor, kernel):
    with contextlib.suppress(BufferError):
        try:
            raise KeyboardInterrupt
        finally:
            raise BufferError("caught")


ACTIONS = {
    "calls the kernel": (lambda tensor, kernel: kernel(1.0, Turning(np.arange(3.0), behaves=True)), 3.0),
    "calls the kernel with itself": (lambda tensor, kernel: kernel(1.0, tensor), 6.0),
    "calls the kernel through Numba": (lambda tensor, kernel: kernel(ONLY_NUMBA, tensor), 6.0),
    "calls it with other types, and other kernels": (call_with_others, (6.0, [1.0, 2.0, 3.0])),
    "is refused by the kernel": (be_refused_by_the_kernel, [BufferError, BufferError, TypeError, BufferError]),
    "calls 20 deep": (call_deep, 6.0), "collects garbage": (collect_garbage, None),
    "switches threads": (switch_threads, [6.0] * 3), "makes many types": (make_many_types, None),
    "makes and drops a kernel": (lambda tensor, kernel: fast_args(lambda x: x.size)(tensor), 4),
    "explains itself": (
        lambda tensor, kernel: (type(tensor).__name__ in str(explain(tensor)), "x" in str(kernel.explain(1.0, tensor))),
        (True, True)),
    "raises and catches": (raise_and_catch, None),
    "looks what is handled": (lambda tensor, kernel: sys.exc_info(), (None, None, None)),
}  # fmt: skip
"""What a tensor does, and what comes of it."""


# ---- when they do it -------------------------------------------------------------------------------------------------
FAST = "before a view, in a cached call"
TIMES = {
    "before a view": (lambda act: new(Viewed, view=before(act)), total),
    "after a view": (lambda act: new(Viewed, view=hostile.after(lambda tensor, out: act(tensor))), total),
    FAST: (lambda act: in_a_cached_call(act), warm_total),
    "before an export": (lambda act: new(Exported, export=before(act)), total),
    "before an export without the GIL": (lambda act: new(Viewed, export=before(act)), unlocked_total),
    "in __dlpack__": (lambda act: new(Gives, lambda tensor: act(tensor) or versioned(tensor)), total),
    "in legacy __dlpack__": (lambda act: new(GivesLegacy, lambda tensor: act(tensor) or legacy(tensor)), total),
    "in the deleter of an export": (lambda act: when_deleted(act, base=Exported), total),
    "in the deleter of an export without the GIL": (lambda act: when_deleted(act, base=Viewed), unlocked_total),
    "in the deleter of a capsule": (lambda act: capsule_deleted(act, Gives), total),
    "in the deleter of a legacy capsule": (lambda act: capsule_deleted(act, GivesLegacy, **LEGACY), total),
}
"""What gives a tensor that acts then, and the kernel that is called with it."""


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kernel"), TIMES.values(), ids=TIMES)
@pytest.mark.parametrize(("action", "result"), ACTIONS.values(), ids=ACTIONS)
def test_producers_that_do_something_else_first(action, result, make, kernel):
    act = Once(action, kernel, result)
    tensor = make(act)
    with kept(tensor):
        for _ in range(3):
            check_end(end_of(kernel, 1.0, tensor), 6.0)
    act.check(tensor)


def new(base, *arguments, **acts):
    return type("Once", (base,), {})(*arguments, **acts)


def in_a_cached_call(act):
    warm(warm_total)
    tensor = Turning(view=before(act), behaves=True)
    assert warm_total(1.0, tensor) == 6.0
    tensor.behaves = False
    return tensor


def when_deleted(act, make=new, **form):
    references = []
    tensor = make(delete=lambda: act(references[0]()), **form)
    references.append(weakref.ref(tensor))
    return tensor


def capsule_deleted(act, cls, **form):
    return when_deleted(act, gives_deleting, cls=type("Once", (cls,), {}), **form)


class Once:
    """Does an action, but not while it does it already, and only in this thread."""

    def __init__(self, action, kernel, result=None):
        self.action, self.kernel, self.busy, self.ends, self.result = action, kernel, False, [], result

    def __call__(self, tensor):
        if not self.busy and threading.current_thread() is threading.main_thread():
            self.busy = True
            behaved, tensor.behaves = getattr(tensor, "behaves", None), True
            self.ends.append(end_of(self.action, tensor, self.kernel))
            self.busy, tensor.behaves = False, behaved

    def check(self, tensor):
        assert self.ends and all(end == self.result for end in self.ends), self.ends
        forget_notes(tensor)
        tensor.ledger.check(tensor.ledger.made)
        assert self.kernel(1.0, np.arange(4.0)) == self.kernel(1.0, Turning(behaves=True)) == 6.0


# ---- producers that change what the call relies on -------------------------------------------------------------------
def delete_its_attributes(tensor, kernel):
    for name in (ATTRIBUTE, "__dlpack__", "__dlpack_device__"):
        if name in vars(type(tensor)):
            delattr(type(tensor), name)


def derived(name, tensor):
    return hostile_type(name) if isinstance(tensor, Hostile) else type(name, (Gives,), {})


def recompile_the_kernel(tensor, kernel):
    if not hasattr(tensor, "has_recompiled"):
        tensor.has_recompiled = True
        kernel.recompile()


CHANGES = {
    "deletes its attributes": delete_its_attributes,
    "replaces its table": lambda tensor, kernel: setattr(type(tensor), ATTRIBUTE, Tabled.__dlpack_c_exchange_api__),
    "spoils its table": lambda tensor, kernel: setattr(type(tensor), ATTRIBUTE, 3),
    "changes its class": lambda tensor, kernel: setattr(tensor, "__class__", derived("Changed", tensor)),
    "rebases its class": lambda tensor, kernel: setattr(type(tensor), "__bases__", (derived("Base", tensor),)),
    "recompiles the kernel": recompile_the_kernel,
}


SUMS = {nogil: numba.njit(nogil=nogil)(sum_of) for nogil in (False, True)}


@pytest.mark.parametrize("time", TIMES)
def test_producers_that_change_their_type_or_recompile_the_kernel(time):
    """What was found for a type holds for the call in progress; later calls end in one of two ways, defined."""
    make, kernel = TIMES[time]
    for name, change in CHANGES.items():
        act = Once(change, new_kernel(SUMS[kernel is unlocked_total]))
        tensor = make(act) if time != FAST else hostile_type("Fresh")(view=before(act), behaves=True)
        if time == FAST:
            assert [act.kernel(1.0, tensor) for _ in range(WARM)] == [6.0] * WARM
            tensor.behaves = False
        with scene(name), kept(tensor):
            for _ in range(3):
                check_end(end_of(act.kernel, 1.0, tensor), (6.0, REFUSED, TypeError, AttributeError))
        act.check(tensor)


@pytest.mark.parametrize("time", TIMES)
def test_dropping_the_last_references_in_the_middle(time):
    """To the tensor, its neighbour, its type and the kernel: a call holds what it needs, and lets it go."""
    held, (make, kernel) = [], TIMES[time]
    act = Once(lambda tensor, kernel: held.clear(), None)
    tensor, neighbour = make(act), Dunder(np.ones(2))
    ledger, dead = tensor.ledger, [weakref.ref(tensor), weakref.ref(neighbour)]
    if time == FAST:
        held += [kernel, 1.0, tensor]
    else:
        kernel = fast_args(size_of, nogil=kernel is unlocked_total)
        kernel(1.0, np.ones(3))
        dead += [weakref.ref(type(tensor)), weakref.ref(kernel)]
        held += [kernel, neighbour, tensor]
    del kernel, tensor, neighbour, make
    assert held[0](*held[1:]) == (6.0 if time == FAST else 4)
    assert act.ends
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)
    ledger.check(ledger.made)


def recurse_without_end():
    size, unlocked = fast_args(size_of), fast_args(size_of, nogil=True)

    def check(kernel, tensor):
        for _ in range(2):
            kind, message = end_of(kernel, 1.0, tensor)
            assert kind in (RecursionError, BufferError), message
        tensor.ledger.check(tensor.ledger.made)

    for calls, (cls, kernel) in itertools.product((0, 3), ((Viewed, size), (Exported, size), (Viewed, unlocked))):
        forever = before(lambda tensor, kernel=kernel: kernel(1.0, tensor))
        tensor = cls(view=forever, export=forever, behaves=True)
        assert [kernel(1.0, tensor) for _ in range(calls)] == [4] * calls
        tensor.behaves = False
        check(kernel, tensor)
        tensor.behaves = True
        assert kernel(1.0, tensor) == 4
    check(size, Gives(lambda tensor: size(1.0, tensor) and versioned(tensor)))
    tensor = Exported()  # an endless recursion from a deleter: what it raises goes nowhere, the call is right
    tensor.delete = lambda: size(1.0, tensor)
    sys.setrecursionlimit(300)
    assert size(1.0, tensor) == 4
    assert tensor.ledger.made > 3 and not hostile.violations


@needs_fork
def test_recursion_without_end():
    """A producer that calls the kernel with itself, for ever: RecursionError at the latest, and all is given back."""
    assert in_fork(recurse_without_end) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_view_that_is_refused_and_an_export_that_is_given(is_first):
    """As of a readonly tensor: its export can say so. What the export refuses is refused. Cached calls may have read views."""
    tensors, no_view = hostile_type(), hostile.setting(-1, BufferError, "no view")
    plain, readonly = tensors(), tensors(view=no_view, flags=1)
    neither = tensors(view=no_view, export=hostile.setting(-1, BufferError, "no export"))
    kernel = fast_args(lambda x: x.sum())
    if not is_first:
        assert [kernel(plain) for _ in range(WARM)] == [6.0] * WARM
    check_end(end_of(kernel, neither), BufferError, "no export", position=0)
    looks, made = plain.looks, plain.ledger.made
    assert kernel(plain) == 6.0 and plain.ledger.made == made and plain.looks > looks  # views are still taken
    for _ in range(WARM):
        assert kernel(readonly) == kernel(plain) == 6.0
        check_end(end_of(kernel, neither), BufferError, "no export", position=0)
    assert "readonly array" in str(kernel.explain(readonly))
    for tensor in (plain, readonly):
        tensor.ledger.check(tensor.ledger.made)
