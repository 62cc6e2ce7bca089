"""Producers that do something else first: call kernels, collect garbage, change their type, in the middle of a call."""

import contextlib
import gc
import sys
import threading
import time
import weakref

import hostile_producers as hostile
import numpy as np
import pytest
from counting import Exported, Viewed, end_of, forget_notes, kept, no_violations, scene
from forked import fork_python
from hostile_ways import TOTALS, WARM, Turning, check_end, ignore, kind_of, size_of, sum_of, total, warm
from made_producers import ONLY_NUMBA, Dunder, Ledger, Tabled, capsule, export_legacy, export_versioned

from hostile_producers import (  # isort: skip
    ATTRIBUTE, REFUSED, Gives, GivesLegacy, Hostile, hostile_type, legacy, managed_and, versioned,
)
from fastexchange import explain, fast_args

assert no_violations  # a fixture


# ---- what they do ----------------------------------------------------------------------------------------------------


def same(got, want):
    assert got == want, got


part = fast_args(lambda first, x: x[1:], returns=np.ndarray)


def call_other_kernels(tensor, kernel):
    assert ignore(*[tensor] * 5, *range(100)) == 105
    assert TOTALS.unlocked(1.0, tensor) == 6.0
    assert part(1.0, tensor).tolist() == [1.0, 2.0, 3.0]


def be_refused_by_the_kernel(tensor, kernel):
    for bad in (Viewed(lanes=2), Exported(lanes=2), object(), Gives(lambda tensor: None)):
        assert kind_of(end_of(kernel, 1.0, bad)) in (BufferError, TypeError)


def call_20_deep(tensor, kernel):
    def nest(depth):
        def function(tensor, out):
            assert not depth or kernel(1.0, Turning(view=nest(depth - 1))) == 6.0
            return hostile.honest(tensor, out)

        return function

    assert kernel(1.0, Turning(view=nest(20))) == 6.0


def collect_garbage(tensor, kernel):
    cycle = [tensor, type("Short-lived", (Turning,), {})(behaves=True)]
    cycle.append(cycle)
    kernel(1.0, cycle[1])
    del cycle
    gc.collect()


def together(count, work) -> None:
    """Run ``work(number)`` in threads, for each number from 1 on."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def switch_threads(tensor, kernel):
    ends = []
    together(3, lambda number: ends.append(end_of(kernel, 1.0, Turning(behaves=True))))
    assert ends == [6.0] * 3


def make_many_types(tensor, kernel):
    """So many that the table of types is made anew, elsewhere."""
    if not hasattr(tensor, "has_made_types"):
        tensor.has_made_types = True
        many = [hostile_type(f"Many{i}")(behaves=True) for i in range(200)]
        assert ignore(*many[:100]) == ignore(*many[100:]) == 100
        assert kernel(1.0, many[0]) == 6.0


def explain_itself(tensor, kernel):
    assert type(tensor).__name__ in str(explain(tensor))
    assert "x" in str(kernel.explain(1.0, tensor))


def raise_and_catch(tensor, kernel):
    with contextlib.suppress(BufferError):
        try:
            raise KeyboardInterrupt
        finally:
            raise BufferError("caught")


ACTIONS = {
    "calls the kernel": lambda tensor, kernel: same(kernel(1.0, Turning(np.arange(3.0), behaves=True)), 3.0),
    "calls the kernel with itself": lambda tensor, kernel: same(kernel(1.0, tensor), 6.0),
    "calls the kernel with other types": lambda tensor, kernel: same(kernel(2, np.ones((2, 2), np.int32)), 4.0),
    "calls the kernel with __dlpack__": lambda tensor, kernel: same(kernel(None, Dunder(np.ones(2))), 2.0),
    "calls the kernel through Numba": lambda tensor, kernel: same(kernel(ONLY_NUMBA, tensor), 6.0),
    "calls the kernel many times": lambda tensor, kernel: same({kernel(1.0, np.ones(3)) for _ in range(100)}, {3.0}),
    "calls other kernels": call_other_kernels,
    "is refused by the kernel": be_refused_by_the_kernel,
    "calls 20 deep": call_20_deep,
    "collects garbage": collect_garbage,
    "switches threads": switch_threads,
    "makes many types": make_many_types,
    "makes and drops a kernel": lambda tensor, kernel: same(fast_args(lambda x: x.size)(tensor), 4),
    "explains itself": explain_itself,
    "raises and catches": raise_and_catch,
    "looks what is handled": lambda tensor, kernel: same(sys.exc_info(), (None, None, None)),
    "drops what it made": lambda tensor, kernel: forget_notes(tensor),
}


def delete_its_attributes(tensor, kernel):
    for name in (ATTRIBUTE, "__dlpack__", "__dlpack_device__"):
        if name in vars(type(tensor)):
            delattr(type(tensor), name)
    gc.collect()


def replace_its_table(tensor, kernel):
    setattr(type(tensor), ATTRIBUTE, Tabled.__dlpack_c_exchange_api__)
    gc.collect()


def change_its_class(tensor, kernel):
    tensor.__class__ = type("Changed", (Gives,), {}) if isinstance(tensor, Gives) else hostile_type("Changed")
    gc.collect()


def rebase_its_class(tensor, kernel):
    type(tensor).__bases__ = (hostile_type("Base") if isinstance(tensor, Hostile) else type("Base", (Gives,), {}),)


def recompile_the_kernel(tensor, kernel):
    if not hasattr(tensor, "has_recompiled"):
        tensor.has_recompiled = True
        kernel.recompile()


CHANGES = {
    "deletes its attributes": delete_its_attributes,
    "replaces its table": replace_its_table,
    "spoils its table": lambda tensor, kernel: setattr(type(tensor), ATTRIBUTE, 3),
    "changes its class": change_its_class,
    "rebases its class": rebase_its_class,
}


# ---- when they do it -------------------------------------------------------------------------------------------------


def new(base, *arguments, **acts):
    """A tensor of a type of its own."""
    return type("Once", (base,), {})(*arguments, **acts)


def before(act):
    def function(tensor, out):
        act(tensor)
        return hostile.honest(tensor, out)

    return function


def after(act):
    def function(tensor, out):
        hostile.honest(tensor, out)
        act(tensor)

    return function


def gives(act, cls, make):
    return new(cls, lambda tensor: act(tensor) or make(tensor))


def in_a_fast_entry(act):
    warm(TOTALS.warm)
    tensor = Turning(view=before(act), behaves=True)
    assert TOTALS.warm(1.0, tensor) == 6.0
    tensor.behaves = False
    return tensor


def of_an_export(act, base=Exported):
    tensor = new(base)
    reference = weakref.ref(tensor)
    tensor.delete = lambda: act(reference())
    return tensor


def of_a_capsule(act, cls, export, name):
    def give(tensor):
        reference = weakref.ref(tensor)
        return capsule(managed_and(tensor.ledger, tensor.array, lambda: act(reference()), export), name)

    return new(cls, give)


FAST = "before a view, in a fast entry"
TIMES = {
    "before a view": (lambda act: new(Viewed, view=before(act)), total),
    "after a view": (lambda act: new(Viewed, view=after(act)), total),
    FAST: (in_a_fast_entry, TOTALS.warm),
    "before an export": (lambda act: new(Exported, export=before(act)), total),
    "before an export without the GIL": (lambda act: new(Viewed, export=before(act)), TOTALS.unlocked),
    "in __dlpack__": (lambda act: gives(act, Gives, versioned), total),
    "in legacy __dlpack__": (lambda act: gives(act, GivesLegacy, legacy), total),
    "in the deleter of an export": (of_an_export, total),
    "in the deleter of an export without the GIL": (lambda act: of_an_export(act, Viewed), TOTALS.unlocked),
    "in the deleter of a capsule": (
        lambda act: of_a_capsule(act, Gives, export_versioned, b"dltensor_versioned"), total),
    "in the deleter of a legacy capsule": (
        lambda act: of_a_capsule(act, GivesLegacy, export_legacy, b"dltensor"), total),
}  # fmt: skip
"""What gives a tensor that acts then, and the kernel that is called with it."""


class Once:
    """Does an action, but not while it does it already, and only in this thread."""

    def __init__(self, action, kernel=None):
        self.action, self.kernel, self.busy, self.acted, self.failures = action, kernel, False, 0, []

    def __call__(self, tensor):
        if self.busy or threading.current_thread() is not threading.main_thread():
            return
        self.busy, self.acted = True, self.acted + 1
        behaved, tensor.behaves = getattr(tensor, "behaves", None), True
        try:
            self.action(tensor, self.kernel)
        except BaseException as error:
            error.__traceback__ = None
            self.failures.append(error)
        finally:
            self.busy, tensor.behaves = False, behaved

    def check(self):
        assert self.acted and not self.failures, self.failures


def perform(action, time, ends, kernel=None, times=3) -> None:
    make, usual = TIMES[time]
    act = Once(action, kernel or usual)
    tensor = make(act)
    with scene(time), kept(tensor) if kernel is None else contextlib.nullcontext():
        for _ in range(times):
            check_end(end_of(act.kernel, 1.0, tensor), ends)
        act.check()
    forget_notes(tensor)
    tensor.ledger.check(tensor.ledger.made)
    assert act.kernel(1.0, np.arange(4.0)) == act.kernel(1.0, Turning(behaves=True)) == 6.0


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("action", ACTIONS)
def test_producers_that_do_something_else_first(action, time):
    perform(ACTIONS[action], time, 6.0)


@pytest.mark.parametrize("time", [time for time in TIMES if time != FAST])
@pytest.mark.parametrize("action", CHANGES)
def test_producers_that_change_their_type(action, time):
    """What was found for a type holds for the call in progress; later calls end in one of two ways, defined."""
    perform(CHANGES[action], time, (6.0, REFUSED, TypeError, AttributeError))


@pytest.mark.parametrize("action", [*CHANGES, "recompiles the kernel"])
def test_in_the_middle_of_a_fast_entry(action):
    kernel = fast_args(sum_of)
    act = Once(CHANGES.get(action, recompile_the_kernel), kernel)
    tensor = hostile_type("Fresh")(view=before(act), behaves=True)
    for _ in range(WARM):
        assert kernel(1.0, tensor) == 6.0
    tensor.behaves = False
    for _ in range(3):
        check_end(end_of(kernel, 1.0, tensor), (6.0, REFUSED, TypeError))
    act.check()
    tensor.ledger.check(tensor.ledger.made)
    assert kernel(1.0, np.arange(4.0)) == kernel(1.0, Turning(behaves=True)) == 6.0


@pytest.mark.parametrize("time", ["before a view", "before an export", "in __dlpack__", "in the deleter of an export",
                                  "in the deleter of a capsule"])  # fmt: skip
def test_recompiling_in_the_middle(time):
    perform(recompile_the_kernel, time, 6.0, kernel=fast_args(sum_of), times=2)


@pytest.mark.parametrize("time", TIMES)
def test_dropping_the_last_references_in_the_middle(time):
    """To the tensor, its neighbour, its type and the kernel: a call holds what it needs, and lets it go."""
    held = []
    act = Once(lambda tensor, kernel: (held.clear(), gc.collect()))
    make, kernel = TIMES[time]
    tensor, neighbour = make(act), Dunder(np.ones(2))
    ledger, dead = tensor.ledger, [weakref.ref(tensor), weakref.ref(neighbour)]
    if time == FAST:
        held += [kernel, 1.0, tensor]
    else:
        kernel = fast_args(size_of, nogil=kernel is TOTALS.unlocked)
        kernel(1.0, np.ones(3))
        dead += [weakref.ref(type(tensor)), weakref.ref(kernel)]
        held += [kernel, neighbour, tensor]
    del kernel, tensor, neighbour
    assert held[0](*held[1:]) == (6.0 if time == FAST else 4)
    act.check()
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)
    ledger.check(ledger.made)


@fast_args
def four(a, b, c, d):
    return a[0] * 1000 + b[0] * 100 + c[0] * 10 + d[0]


def test_switching_threads_all_the_time():
    """Threads call one kernel with tensors whose functions let the others run in their middle."""

    def pause(tensor, out):
        time.sleep(0)
        hostile.honest(tensor, out)
        time.sleep(0)

    def give(tensor):
        time.sleep(0)
        return versioned(tensor)

    ledger, ends = Ledger(), []

    def hammer(number):
        array = np.full(3, float(number))
        good = [Turning(array, ledger, view=pause), Exported(array, ledger, export=pause), Gives(give, array, ledger)]
        bad = [Turning(array, view=lambda tensor, out: -1), Exported(array, ledger, export=pause, lanes=2)]
        for _ in range(60):
            ends.extend(end_of(TOTALS.warm, 1.0, tensor) == 3.0 * number for tensor in good)
            ends.append(kind_of(end_of(TOTALS.warm, 1.0, bad[0])) is BufferError)
            ends.append(kind_of(end_of(four, *good[:2], good[0], good[2])) == 1111.0 * number)

    together(4, hammer)
    assert all(ends) and len(ends) == 4 * 60 * 5
    ledger.check(ledger.made)


def test_recursion_without_end():
    """A producer that calls the kernel with itself, for ever: RecursionError at the latest, and all is given back."""
    fork_python(
        """
        import sys
        import numpy as np
        from fastexchange import fast_args
        from hostile_producers import VIEW, Gives, honest, hostile_type, versioned, violations
        from oracle import type_and_message

        size, unlocked = fast_args(lambda first, x: x.size), fast_args(lambda first, x: x.size, nogil=True)
        Viewed, Exported = hostile_type("Viewed"), hostile_type("Exported", **{VIEW: None})

        def forever(kernel):
            def function(tensor, out):
                kernel(1.0, tensor)
                return honest(tensor, out)
            return function

        def check(kernel, tensor):
            for _ in range(2):
                kind, message = type_and_message(kernel, 1.0, tensor)
                assert kind in (RecursionError, BufferError), message
            tensor.ledger.check(tensor.ledger.made)

        for calls in (0, 40):
            for cls, kernel in ((Viewed, size), (Exported, size), (Viewed, unlocked)):
                tensor = cls(view=forever(kernel), export=forever(kernel), behaves=True)
                for _ in range(calls):
                    assert kernel(1.0, tensor) == 4
                tensor.behaves = False
                check(kernel, tensor)
                tensor.behaves = True
                assert kernel(1.0, tensor) == 4
        check(size, Gives(lambda tensor: size(1.0, tensor) and versioned(tensor)))

        # An endless recursion from a deleter: what it raises goes nowhere, the call is right.
        tensor = Exported()
        tensor.delete = lambda: size(1.0, tensor)
        sys.setrecursionlimit(300)
        assert size(1.0, tensor) == 4
        sys.setrecursionlimit(1000)
        assert tensor.ledger.made > 3
        assert not violations
        assert size(1.0, np.ones(3)) == 3
        """
    )
