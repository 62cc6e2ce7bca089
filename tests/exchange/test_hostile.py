"""Hostile and broken producers: each ends in a right result or an exception that names the argument; nothing is lost.

After every case the process lives, what was exported has been given back once, reference counts are what they were, and
the next ordinary call of the same kernel is right. The producers are those of ``hostile_producers``.
"""

import contextlib
import functools
import gc
import itertools
import re
import sys
import threading
import time
import weakref

import hostile_producers as hostile
import made_producers
import numba
import numpy as np
import pytest
from frameworks import has_table, torch
from hostile_producers import (
    ATTRIBUTE,
    CONTENTS,
    EXPORT,
    EXPORTED,
    FUNCTIONS,
    GOOD_IN_THE_END,
    REFUSED,
    RETURNS,
    REWORDED,
    UNCHANGED,
    VIEW,
    Gives,
    GivesLegacy,
    Hostile,
    Sets,
    capsule_with_destructor,
    delete_function,
    hostile_type,
    legacy,
    managed_and,
    raising_tables,
    unusable_tables,
    usable_tables,
    versioned,
)
from interpreter import run_python
from made_producers import (
    ONLY_NUMBA,
    Dunder,
    Ledger,
    Legacy,
    Tabled,
    WithMethods,
    address_of,
    capsule,
    capsule_name,
    exchange_table,
    export_legacy,
    export_versioned,
    ffi,
)
from oracle import numbas, seen_type

from fastexchange import explain, fast_args

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def sum_of(first, x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


def size_of(first, x):
    return x.size


def both_of(a, b):
    return a[0] * 10 + b[0]


total, size, both = fast_args(sum_of), fast_args(size_of), fast_args(both_of)
# Kernels of their own for what is to reach a fast entry: there are eight for each combination of types.
warm_total, warm_size, warm_both = fast_args(sum_of), fast_args(size_of), fast_args(both_of)
unlocked_total, unlocked_size = fast_args(sum_of, nogil=True), fast_args(size_of, nogil=True)


@fast_args
def ignore(*arguments):
    return len(arguments)


@fast_args(returns=np.ndarray)
def column(first, x):
    """A view: an argument would be returned as that very object."""
    return x.reshape(4, 1)


Viewed = hostile_type("Viewed")
Exported = hostile_type("Exported", **{VIEW: None})
Turning = hostile_type("Turning")
"""The type of the tensors that behave until their kernel's fast entry is in use."""
WARM = 40  # calls after which it is


@pytest.fixture(autouse=True)
def _no_violations(monkeypatch):
    """No function of a producer was entered with an exception set, no deleter called for what was not its own."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of deleters; pytest's would keep the frames
    hostile.violations.clear()
    yield
    assert not hostile.violations
    assert not made_producers._strays


def end_of(kernel, *arguments, **keywords):
    """How a call ends: its result, or the exception's type and its text. The exception itself is gone."""
    try:
        return kernel(*arguments, **keywords)
    except BaseException as error:
        error.__traceback__ = error.__context__ = None  # some of them are raised more than once
        try:
            return seen_type(error), str(error)
        except RuntimeError:
            return seen_type(error), "without words"


def kind_of(end):
    """The type of the exception, or the result."""
    return end[0] if isinstance(end, tuple) else end


def check_end(end, want, word="", name="x", position=1) -> None:
    """The call ended as wanted (one value or exception type, or one of several); what can name the argument does."""
    wanted = want if isinstance(want, tuple) else (want,)
    if not isinstance(end, tuple):
        assert end in [value for value in wanted if not isinstance(value, type)], f"returned {end!r}, not {want}"
        return
    kind, message = end
    assert kind in wanted, f"raised {kind.__name__}: {message}; not {want}"
    if kind in REWORDED:
        for needed in (f"'{name}'", f"position {position}", word):
            assert needed in message, message


@contextlib.contextmanager
def counts_kept(*things):
    """After the block each of `things` has the references that it had."""
    before = [sys.getrefcount(thing) for thing in things]
    yield
    after = [sys.getrefcount(thing) for thing in things]
    if after != before:
        gc.collect()
        after = [sys.getrefcount(thing) for thing in things]
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@functools.cache
def warm(kernel) -> None:
    """Bring `kernel` to its fast entry for a float and a well-behaved tensor of the type ``Turning``."""
    tensor = Turning(behaves=True)
    for _ in range(WARM):
        kernel(1.0, tensor)
    fast = kernel.counts().fast
    kernel(1.0, tensor)
    assert kernel.counts().fast == fast + 1


# ---- scenes: the ways that one hostile tensor can take ---------------------------------------------------------------


def scene_view(kernels, **acts):
    tensor = hostile_type()(**acts)
    return tensor, functools.partial(kernels[0], 1.0, tensor)


def scene_fast(kernels, **acts):
    warm(kernels[1])
    tensor = Turning(behaves=True, **acts)
    for _ in range(3):
        kernels[1](1.0, tensor)
    tensor.behaves = False
    return tensor, functools.partial(kernels[1], 1.0, tensor)


def scene_keyword(kernels, **acts):
    tensor = Viewed(**acts)
    return tensor, functools.partial(kernels[0], x=tensor, first=1.0)


def scene_export(kernels, **acts):
    tensor = hostile_type(**{VIEW: None})(**acts)
    return tensor, functools.partial(kernels[0], 1.0, tensor)


def scene_nogil(kernels, **acts):
    tensor = Viewed(**acts)
    return tensor, functools.partial(kernels[2], 1.0, tensor)


def scene_numba(kernels, **acts):
    tensor = Viewed(**acts)
    return tensor, functools.partial(kernels[0], ONLY_NUMBA, tensor)


VIEW_SCENES = {"view": scene_view, "fast entry": scene_fast, "keyword": scene_keyword}
EXPORT_SCENES = {"export": scene_export, "nogil": scene_nogil, "beside what only Numba reads": scene_numba}
TOTALS, SIZES = (total, warm_total, unlocked_total), (size, warm_size, unlocked_size)


def play(make, kernels, want, word="", **acts):
    """One scene: three hostile calls, an honest one of the same tensor, an ordinary one. Returns how the first ends."""
    tensor, call = make(kernels, **acts)
    ends = []
    is_counted = "deleter" not in acts
    with counts_kept(tensor, *[tensor.array] * is_counted):
        for _ in range(3):
            end = end_of(call)
            check_end(end, want, word)
            ends.append(end)
        tensor.words.clear()
    assert ends[1] == ends[0] and ends[2] == ends[0], f"the calls end differently: {ends}"
    if is_counted:
        tensor.ledger.check(tensor.ledger.made)
    tensor.behaves = True
    right = 6.0 if kernels is TOTALS else 4
    assert call() == right
    assert kernels[0](1.0, np.arange(4.0)) == right
    if is_counted:
        tensor.ledger.check(tensor.ledger.made)
    return ends[0]


def play_dunder(cls, kernels, want, word="", **lies):
    """The same for a class with ``__dlpack__``."""
    tensor = cls(np.arange(4.0), **lies)
    ends = []
    for first in (1.0, 1.0, ONLY_NUMBA):
        with counts_kept(tensor, *[tensor.array] * ("deleter" not in lies)):
            end = end_of(kernels[0], first, tensor)
            tensor.capsules.clear()
        check_end(end, want, word)
        ends.append(end)
    assert kind_of(ends[1]) == kind_of(ends[0]) == kind_of(ends[2]), f"the calls end differently: {ends}"
    if "deleter" not in lies:
        tensor.ledger.check(tensor.ledger.made)
    return ends[0]


def kernels_for(want):
    """Kernels that look at the elements only where they are to be there."""
    return TOTALS if isinstance(want, float) or (isinstance(want, tuple) and isinstance(want[-1], float)) else SIZES


def named(scene: str, play, *arguments, **keywords):
    """Play a scene; a failure says which."""
    try:
        return play(*arguments, **keywords)
    except AssertionError as error:
        raise AssertionError(f"{scene}: {error}") from error


# ---- what a tensor says of itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTENTS)
def test_contents(name):
    """Every path comes to the same end."""
    lies, want, word = CONTENTS[name]
    kernels = kernels_for(want)
    ends = {}
    for scene, make in {**VIEW_SCENES, **EXPORT_SCENES}.items():
        ends[scene] = named(scene, play, make, kernels, want, word, **lies)
    for cls in (Dunder, Legacy):
        ends[cls.__name__] = named(cls.__name__, play_dunder, cls, kernels, want, word, **lies)
    kinds = {scene: kind_of(end) for scene, end in ends.items()}
    assert len(set(kinds.values())) == 1, f"the paths end differently: {kinds}"


@pytest.mark.parametrize("name", EXPORTED)
def test_managed_tensors(name):
    lies, want, word = EXPORTED[name]
    for scene, make in EXPORT_SCENES.items():
        named(scene, play, make, kernels_for(want), want, word, **lies)
    named("Dunder", play_dunder, Dunder, kernels_for(want), want, word, **lies)


def test_an_exported_readonly_tensor_is_not_written_to():
    @fast_args
    def write(x):
        x[0] = 100.0

    for tensor in (Exported(flags=1), Dunder(np.arange(4.0), flags=1), Exported(flags=1 | 2**40)):
        for _ in range(3):
            assert issubclass(end_of(write, tensor)[0], numba.core.errors.TypingError)
        assert tensor.array[0] == 0.0
        gc.collect()
        tensor.ledger.check(tensor.ledger.made)


# ---- what the functions of a table do --------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", VIEW_SCENES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_views(name, scene):
    what, want = FUNCTIONS[name]
    play(VIEW_SCENES[scene], TOTALS, want, view=what)


@pytest.mark.parametrize("scene", EXPORT_SCENES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exports(name, scene):
    what, want = FUNCTIONS[name]
    play(EXPORT_SCENES[scene], TOTALS, want, export=what)


@pytest.mark.parametrize("scene", EXPORT_SCENES)
def test_an_export_of_nothing(scene):
    """It returns 0 and NULL, with and without having touched the pointer."""

    def null(tensor, out):
        out[0] = ffi.NULL

    for what in (null, lambda tensor, out: 0):
        play(EXPORT_SCENES[scene], TOTALS, REFUSED, "did not say why", export=what)


@pytest.mark.parametrize("error", UNCHANGED, ids=lambda error: type(error).__name__)
def test_an_exception_that_is_more_than_a_message_arrives_as_it_is(error):
    def fails(tensor, out):
        raise error

    for scene, make in {**VIEW_SCENES, **EXPORT_SCENES}.items():
        acts = {"view": fails, "export": fails}
        _, call = make(TOTALS, **acts)
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error, scene
        error.__traceback__ = None


def view_that_stays_silent(tensor, out):
    """Success, and nothing written."""
    return 0


def test_a_view_that_writes_nothing_is_not_taken_for_the_argument_before_it():
    for kernel in (both, warm_both):
        honest = Turning(np.array([3.0, 4.0]), behaves=True)
        silent = Turning(np.array([7.0, 8.0]), behaves=True, view=view_that_stays_silent)
        for _ in range(WARM):
            assert kernel(honest, silent) == 37.0
        silent.behaves = False
        for _ in range(3):
            check_end(end_of(kernel, honest, silent), REFUSED, name="b")
        silent.behaves = True
        assert kernel(honest, silent) == 37.0


@pytest.mark.slow
def test_a_view_that_writes_nothing():
    """What lay there before is not used: in a process of its own, where it may be anything."""
    run_python(
        """
        import numpy as np
        from fastexchange import fast_args
        from hostile_producers import hostile_type
        from test_hostile import WARM, check_end, end_of, view_that_stays_silent

        @fast_args
        def total(first, x):
            s = 0.0
            for value in x:
                s += value
            return s

        Silent = hostile_type("Silent")
        for calls in (0, WARM):
            tensor = Silent(view=view_that_stays_silent, behaves=True)
            for _ in range(calls):
                assert total(1.0, tensor) == 6.0
            tensor.behaves = False
            for _ in range(3):
                check_end(end_of(total, 1.0, tensor), BufferError)
            tensor.behaves = True
            assert total(1.0, tensor) == 6.0
        """
    )


def half_a_view(tensor, out):
    """Success, and only some of the fields written."""
    hostile.honest_view(tensor, out)
    out.shape = out.strides = ffi.NULL


def test_half_a_view():
    for make in VIEW_SCENES.values():
        play(make, TOTALS, REFUSED, "shape", view=half_a_view)


# ---- an exception of one argument beside another ---------------------------------------------------------------------


OUTCOMES = {
    "0 and BufferError": (FUNCTIONS["filled, 0 and BufferError set"][0], BufferError),
    "0 and OSError": (FUNCTIONS["filled, 0 and OSError set"][0], OSError),
    "0 and KeyboardInterrupt": (
        FUNCTIONS["filled, 0 and KeyboardInterrupt set"][0], KeyboardInterrupt
    ),
    "-1 and BufferError": (FUNCTIONS["raises BufferError"][0], BufferError),
    "-1 and no exception": (FUNCTIONS["filled, -1 and no exception"][0], BufferError),
}  # fmt: skip


@fast_args
def four(a, b, c, d):
    return a[0] * 1000 + b[0] * 100 + c[0] * 10 + d[0]


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("position", range(4))
def test_beside_honest_tensors(name, position):
    """No producer is entered with another one's exception set, and none swallows it."""
    what, want = OUTCOMES[name]
    tensors = [Turning(np.full(3, float(i)), behaves=True) for i in range(1, 5)]
    tensors[position].view = what
    for _ in range(WARM):
        assert four(*tensors) == 1234.0
    for _ in range(3):
        tensors[position].behaves = False
        check_end(end_of(four, *tensors), want, name="abcd"[position], position=position)
        tensors[position].behaves = True
        assert four(*tensors) == 1234.0


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("position", range(4))
def test_beside_what_the_fast_entry_does_not_expect(name, position):
    """An exception is set when the fast entry finds that a later, or an earlier, argument is another than planned."""
    what, want = OUTCOMES[name]
    tensors = [Turning(np.full(3, float(i)), behaves=True) for i in range(1, 5)]
    for _ in range(WARM):
        assert four(*tensors) == 1234.0
    for other in (np.full(3, 5), Turning(np.full(3, 5, np.int32)), Dunder(np.full(3, 5.0)), Exported(np.full(3, 5.0))):
        for place in set(range(4)) - {position}:
            arguments = list(tensors)
            arguments[place] = other
            arguments[position] = Turning(np.full(3, 9.0), view=what)
            check_end(end_of(four, *arguments), want, name="abcd"[position], position=position)
        if hasattr(other, "ledger"):
            other.ledger.check(other.ledger.made)
    assert four(*tensors) == 1234.0


def test_two_hostile_tensors():
    """The first decides."""
    for first, second in [("0 and BufferError", "0 and OSError"), ("0 and OSError", "-1 and BufferError"),
                          ("-1 and no exception", "0 and KeyboardInterrupt")]:  # fmt: skip
        tensors = [Turning(np.full(3, float(i)), behaves=True) for i in range(1, 5)]
        for _ in range(WARM):
            assert four(*tensors) == 1234.0
        tensors[1].view, tensors[2].view = OUTCOMES[first][0], OUTCOMES[second][0]
        tensors[1].behaves = tensors[2].behaves = False
        for _ in range(3):
            check_end(end_of(four, *tensors), OUTCOMES[first][1], name="b", position=1)


@pytest.mark.parametrize("name", ["raises BufferError", "0 and BufferError set", "-1 and no exception, -1"])
def test_inside_tuples_and_variadics(name):
    what, want = FUNCTIONS[name]
    neighbour = Dunder(np.ones(3))
    for tensor in (Viewed(view=what, export=what), Exported(export=what)):
        for arguments in ((1, (neighbour, (tensor, neighbour))), (neighbour, tensor), (ONLY_NUMBA, (tensor,), neighbour)):
            with counts_kept(tensor, neighbour):
                for _ in range(3):
                    check_end(end_of(ignore, *arguments), want, name="arguments[1]")
            neighbour.capsules.clear()
            neighbour.ledger.check(neighbour.ledger.made)
    assert ignore(1, 2) == 2


# ---- different at each look ------------------------------------------------------------------------------------------


def changing(*states):
    """A view or an export that describes another of `states` (lies) at each look."""
    looks = iter(range(10**9))

    def function(tensor, out):
        lies = states[next(looks) % len(states)]
        if ffi.typeof(out) is ffi.typeof("DLTensor *"):
            return hostile.honest_view(tensor, out, **lies)
        return hostile.honest_export(tensor, out, **lies)

    return function


_grid = {"ndim": 2, "shape": (2, 2), "strides": (2, 1)}
CHANGES = {
    "shape": ([{}, {"shape": (2,)}, {"shape": (3,)}], (6.0, 1.0, 3.0)),
    "ndim": ([{}, _grid, {"ndim": 0}], (6.0, 0.0)),
    "strides": ([{}, {"shape": (2,), "strides": (2,)}, {"shape": (4,), "strides": (0,)}], (6.0, 2.0, 0.0)),
    "dtype": ([{}, {"code": 0}, {"code": 1}], None),
    "layout": ([_grid, {**_grid, "strides": (1, 2)}], (6.0,)),
    "bits": ([{}, {"bits": 32, "shape": (8,)}], None),
    "device": ([{}, {"device_type": 2}], (6.0, REFUSED)),
    "data": ([{}, {"data": 0}], (6.0, REFUSED)),
    "sanity": ([{}, {"ndim": -1}, {"shape": None}, {"lanes": 0}], (6.0, REFUSED)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_different_at_each_look(what):
    """A call uses one look from beginning to end."""
    states, values = CHANGES[what]
    for cls in (Viewed, Exported):
        tensor = cls(view=changing(*states), export=changing(*states))
        for first in (1.0, ONLY_NUMBA):
            for _ in range(10):
                end = end_of(total, first, tensor)
                if values is None:
                    assert isinstance(end, float) or end[0] is REFUSED
                else:
                    check_end(end, (*values, REFUSED))
        tensor.ledger.check(tensor.ledger.made)
    tensor = Turning(behaves=True, view=changing(*states))
    warm(warm_total)
    for _ in range(20):
        tensor.behaves = not tensor.behaves
        end = end_of(warm_total, 1.0, tensor)
        if tensor.behaves:
            assert end == 6.0
        elif values is not None:
            check_end(end, (*values, REFUSED))


def test_the_same_tensor_twice_in_a_call_different_at_each_look():
    @fast_args
    def sizes(a, b):
        return a.size * 10 + b.size

    tensor = Viewed(view=changing({}, {"shape": (2,)}))
    assert {end_of(sizes, tensor, tensor) for _ in range(6)} <= {42, 24}
    tensor = Exported(export=changing({}, {"shape": (2,)}))
    assert {end_of(sizes, tensor, tensor) for _ in range(6)} <= {42, 24}
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("bad", [BufferError, KeyboardInterrupt, None], ids=str)
@pytest.mark.parametrize("cls", [Viewed, Exported], ids=lambda cls: cls.__name__)
def test_a_failure_at_any_one_look(cls, bad):
    """One look fails: the call in which it fell ends so, or is right; every other call is right."""
    for failing in (1, 2, 3, 4, 16, 17, 18, 19, 20, 21):  # the first calls, and those in which the fast entry is made
        kernel = fast_args(size_of)
        tensor = cls()

        def once(tensor, out, failing=failing):
            if tensor.looks == failing:
                if bad is None:
                    return -1
                raise bad("no")
            hostile.fill_either(tensor, out)
            return 0

        tensor.view = tensor.export = once
        ends = [end_of(kernel, 1.0, tensor) for _ in range(25)]
        wrong = [end for end in ends if end != 4]
        assert len(wrong) <= 1, (failing, wrong)
        for end in wrong:
            check_end(end, bad or BufferError)
        tensor.ledger.check(tensor.ledger.made)


# ---- what producers do besides ---------------------------------------------------------------------------------------


def call_the_kernel(tensor, kernel):
    assert kernel(1.0, Turning(np.arange(3.0), behaves=True)) == 3.0


def call_the_kernel_with_itself(tensor, kernel):
    assert kernel(1.0, tensor) == 6.0


def call_the_kernel_with_other_types(tensor, kernel):
    assert kernel(2, np.ones((2, 2), np.int32)) == 4.0
    assert kernel(None, Dunder(np.ones(2))) == 2.0


def call_the_kernel_through_numba(tensor, kernel):
    assert kernel(ONLY_NUMBA, tensor) == 6.0


def call_the_kernel_many_times(tensor, kernel):
    for _ in range(100):
        assert kernel(1.0, np.ones(3)) == 3.0


def call_other_kernels(tensor, kernel):
    assert ignore(*[tensor] * 5, *range(100)) == 105
    assert unlocked_total(1.0, tensor) == 6.0
    assert column(1.0, tensor).ravel().tolist() == [0.0, 1.0, 2.0, 3.0]


def be_refused_by_the_kernel(tensor, kernel):
    for bad in (Viewed(lanes=2), Exported(lanes=2), object(), Gives(lambda tensor: None)):
        assert end_of(kernel, 1.0, bad)[0] in (BufferError, TypeError)


def call_20_deep(tensor, kernel):
    def nest(depth):
        def function(tensor, out):
            if depth:
                assert kernel(1.0, Turning(view=nest(depth - 1))) == 6.0
            return hostile.honest_view(tensor, out)

        return function

    assert kernel(1.0, Turning(view=nest(20))) == 6.0


def recompile_the_kernel(tensor, kernel):
    if not hasattr(tensor, "has_recompiled"):
        tensor.has_recompiled = True
        kernel.recompile()


def collect_garbage(tensor, kernel):
    cycle = [tensor, type("Short-lived", (Turning,), {})(behaves=True)]
    cycle.append(cycle)
    kernel(1.0, cycle[1])
    del cycle
    gc.collect()


def switch_threads(tensor, kernel):
    ends = []
    threads = [
        threading.Thread(target=lambda: ends.append(end_of(kernel, 1.0, Turning(behaves=True)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [6.0] * 3


def make_many_types(tensor, kernel):
    """So many that the table of types is made anew, elsewhere."""
    if not hasattr(tensor, "has_made_types"):
        tensor.has_made_types = True
        kept = [hostile_type(f"Many{i}")(behaves=True) for i in range(200)]
        assert ignore(*kept[:100]) == ignore(*kept[100:]) == 100
        assert kernel(1.0, kept[0]) == 6.0


def make_and_drop_a_kernel(tensor, kernel):
    other = fast_args(lambda x: x.size)
    assert other(tensor) == 4


def explain_itself(tensor, kernel):
    assert type(tensor).__name__ in str(explain(tensor))
    assert "x" in str(kernel.explain(1.0, tensor))


def raise_and_catch(tensor, kernel):
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise BufferError("caught")
    except BufferError:
        pass


def print_what_is_handled(tensor, kernel):
    assert sys.exc_info() == (None, None, None)


def drop_what_it_made(tensor, kernel):
    if isinstance(tensor, Hostile):
        tensor.words.clear()
    else:
        tensor.capsules.clear()


def delete_its_attributes(tensor, kernel):
    for name in (ATTRIBUTE, "__dlpack__", "__dlpack_device__"):
        if name in vars(type(tensor)):
            delattr(type(tensor), name)
    gc.collect()


def replace_its_table(tensor, kernel):
    setattr(type(tensor), ATTRIBUTE, Tabled.__dlpack_c_exchange_api__)
    gc.collect()


def spoil_its_table(tensor, kernel):
    setattr(type(tensor), ATTRIBUTE, 3)


def change_its_class(tensor, kernel):
    bases = (Gives if isinstance(tensor, Gives) else Hostile,)
    tensor.__class__ = hostile_type("Changed", bases) if bases == (Hostile,) else type("Changed", bases, {})
    gc.collect()


def rebase_its_class(tensor, kernel):
    other = hostile_type("Base") if isinstance(tensor, Hostile) else type("Base", (Gives,), {})
    type(tensor).__bases__ = (other,)


ACTIONS = (
    call_the_kernel, call_the_kernel_with_itself, call_the_kernel_with_other_types, call_the_kernel_through_numba,
    call_the_kernel_many_times, call_other_kernels, be_refused_by_the_kernel, call_20_deep, collect_garbage,
    switch_threads, make_many_types, make_and_drop_a_kernel, explain_itself, raise_and_catch, print_what_is_handled,
    drop_what_it_made,
)  # fmt: skip
MUTATIONS = (delete_its_attributes, replace_its_table, spoil_its_table, change_its_class, rebase_its_class)


def acting(act):
    """A view or an export that acts before it is honest."""

    def function(tensor, out):
        act(tensor)
        hostile.fill_either(tensor, out)
        return 0

    return function


def at_view(act, base=Viewed):
    return type("View", (base,), {})(view=acting(act)), total


def after_view(act, base=Viewed):
    def function(tensor, out):
        hostile.honest_view(tensor, out)
        act(tensor)
        return 0

    return type("View", (base,), {})(view=function), total


def at_fast_view(act):
    warm(warm_total)
    tensor = Turning(view=acting(act), behaves=True)
    assert warm_total(1.0, tensor) == 6.0
    tensor.behaves = False
    return tensor, warm_total


def at_export(act, base=Exported):
    return type("Export", (base,), {})(export=acting(act)), total


def at_export_without_gil(act, base=Viewed):
    return type("Export", (base,), {})(export=acting(act)), unlocked_total


def at_dlpack(act):
    def give(tensor):
        act(tensor)
        return versioned(tensor)

    return type("GivesOnce", (Gives,), {})(give), total


def at_legacy_dlpack(act):
    def give(tensor):
        act(tensor)
        return legacy(tensor)

    return type("GivesOnce", (GivesLegacy,), {})(give), total


def at_deleter(act, base=Exported):
    tensor = type("Deleter", (base,), {})()
    reference = weakref.ref(tensor)
    tensor.delete = lambda: act(reference())
    return tensor, total


def at_deleter_without_gil(act):
    tensor, _ = at_deleter(act, Viewed)
    return tensor, unlocked_total


def at_capsules_deleter(act, cls=Gives, export=export_versioned, name=b"dltensor_versioned"):
    def give(tensor):
        reference = weakref.ref(tensor)
        return capsule(managed_and(tensor.ledger, tensor.array, lambda: act(reference()), export), name)

    return type("GivesOnce", (cls,), {})(give), total


def at_legacy_capsules_deleter(act):
    return at_capsules_deleter(act, GivesLegacy, export_legacy, b"dltensor")


PLACES = (
    at_view, after_view, at_fast_view, at_export, at_export_without_gil, at_dlpack, at_legacy_dlpack, at_deleter,
    at_deleter_without_gil, at_capsules_deleter, at_legacy_capsules_deleter,
)  # fmt: skip


def once_at_a_time(action, kernel):
    """The action, but not while it acts already; how often it acted; what it raised."""
    busy, acted, failures = threading.local(), [], []

    def act(tensor):
        if getattr(busy, "yes", False) or threading.current_thread() is not threading.main_thread():
            return
        busy.yes = True
        acted.append(1)
        behaved, tensor.behaves = getattr(tensor, "behaves", None), True
        try:
            action(tensor, kernel())
        except BaseException as error:
            error.__traceback__ = None
            failures.append(error)
        finally:
            busy.yes, tensor.behaves = False, behaved

    return act, acted, failures


def perform(action, place, want, base_kernel=None):
    box = []
    act, acted, failures = once_at_a_time(action, lambda: box[0])
    tensor, kernel = place(act)
    box.append(base_kernel or kernel)
    with counts_kept(tensor, tensor.array):
        for _ in range(3):
            check_end(end_of(box[0], 1.0, tensor), want)
            assert not failures, failures
            if isinstance(tensor, Gives):
                tensor.capsules.clear()
        drop_what_it_made(tensor, None)
    assert acted
    tensor.ledger.check(tensor.ledger.made)
    assert box[0](1.0, np.arange(4.0)) == 6.0
    assert box[0](1.0, Turning(behaves=True)) == 6.0


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_producers_that_do_something_else_first(action, place):
    perform(action, place, 6.0)


@pytest.mark.parametrize(
    "place", [place for place in PLACES if place is not at_fast_view], ids=lambda place: place.__name__
)
@pytest.mark.parametrize("action", MUTATIONS, ids=lambda action: action.__name__)
def test_producers_that_change_their_type(action, place):
    """What was found for a type holds for the call in progress; later calls end in one of two ways, defined."""
    perform(action, place, (6.0, REFUSED, TypeError, AttributeError))


@pytest.mark.parametrize("action", [*MUTATIONS, recompile_the_kernel], ids=lambda action: action.__name__)
def test_in_the_middle_of_a_fast_entry(action):
    kernel, cls = fast_args(sum_of), hostile_type("Fresh")
    act, acted, failures = once_at_a_time(action, lambda: kernel)
    tensor = cls(view=acting(act), behaves=True)
    for _ in range(WARM):
        assert kernel(1.0, tensor) == 6.0
    tensor.behaves = False
    for _ in range(3):
        check_end(end_of(kernel, 1.0, tensor), (6.0, REFUSED, TypeError))
        assert not failures
    assert acted
    tensor.ledger.check(tensor.ledger.made)
    assert kernel(1.0, np.arange(4.0)) == 6.0
    assert kernel(1.0, Turning(behaves=True)) == 6.0


@pytest.mark.parametrize(
    "place", [at_view, at_export, at_dlpack, at_deleter, at_capsules_deleter], ids=lambda p: p.__name__
)
def test_recompiling_in_the_middle(place):
    kernel = fast_args(sum_of)
    act, acted, failures = once_at_a_time(recompile_the_kernel, lambda: kernel)
    tensor, _ = place(act)
    for _ in range(2):
        check_end(end_of(kernel, 1.0, tensor), 6.0)
    assert acted and not failures
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_dropping_the_last_references_in_the_middle(place):
    """To the tensor, its neighbour, its type and the kernel: a call holds what it needs, and lets it go."""
    held = []
    act, acted, failures = once_at_a_time(lambda tensor, kernel: (held.clear(), gc.collect()), lambda: None)
    tensor, kernel = place(act)
    cls = type(tensor)
    if place is not at_fast_view:
        kernel = fast_args(size_of, nogil=kernel is unlocked_total)
        kernel(1.0, np.ones(3))
    want = 6.0 if place is at_fast_view else 4
    neighbour = Dunder(np.ones(2))
    ledger, dead = tensor.ledger, [weakref.ref(tensor), weakref.ref(neighbour)]
    if place is not at_fast_view:
        dead += [weakref.ref(cls), weakref.ref(kernel)]
    held += [kernel, 1.0 if place is at_fast_view else neighbour, tensor]
    del kernel, tensor, neighbour, cls, act
    assert held[0](*held[1:]) == want
    assert acted and not failures
    place = None
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)
    ledger.check(ledger.made)


def test_switching_threads_all_the_time():
    """Threads call one kernel with tensors whose functions let the others run in their middle."""

    def pause(tensor, out):
        time.sleep(0)
        hostile.fill_either(tensor, out)
        time.sleep(0)
        return 0

    def give(tensor):
        time.sleep(0)
        return versioned(tensor)

    ledger, ends = Ledger(), []

    def hammer(number):
        array = np.full(3, float(number))
        tensors = [
            Turning(array, ledger, view=pause),
            Exported(array, ledger, export=pause),
            Gives(give, array, ledger),
        ]
        bad = [Turning(array, view=lambda tensor, out: -1), Exported(array, ledger, export=pause, lanes=2)]
        for i in range(60):
            for tensor in tensors:
                ends.append(end_of(warm_total, 1.0, tensor) == 3.0 * number)
            ends.append(end_of(warm_total, 1.0, bad[i % 2])[0] is BufferError if i % 2 == 0 else True)
            ends.append(end_of(four, tensors[0], tensors[1], tensors[0], tensors[2]) == 1111.0 * number)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ends) and len(ends) == 4 * 60 * 5
    ledger.check(ledger.made)


@pytest.mark.slow
def test_recursion_without_end():
    """A producer that calls the kernel with itself, for ever: RecursionError at the latest, and all is given back."""
    run_python(
        """
        import sys
        import numpy as np
        from fastexchange import fast_args
        from hostile_producers import VIEW, Gives, fill_either, hostile_type, versioned, violations
        from test_hostile import end_of

        @fast_args
        def size(first, x):
            return x.size

        @fast_args(nogil=True)
        def unlocked(first, x):
            return x.size

        def forever(kernel):
            def function(tensor, out):
                kernel(1.0, tensor)
                fill_either(tensor, out)
                return 0
            return function

        def give(tensor):
            size(1.0, tensor)
            return versioned(tensor)

        Viewed, Exported = hostile_type("Viewed"), hostile_type("Exported", **{VIEW: None})
        ends = []
        for calls in (0, 40):
            for cls, kernel in ((Viewed, size), (Exported, size), (Viewed, unlocked)):
                tensor = cls(view=forever(kernel), export=forever(kernel), behaves=True)
                for _ in range(calls):
                    assert kernel(1.0, tensor) == 4
                tensor.behaves = False
                for _ in range(2):
                    end = end_of(kernel, 1.0, tensor)
                    assert end[0] in (RecursionError, BufferError), end
                tensor.ledger.check(tensor.ledger.made)
                tensor.behaves = True
                assert kernel(1.0, tensor) == 4
        tensor = Gives(give)
        for _ in range(2):
            end = end_of(size, 1.0, tensor)
            assert end[0] in (RecursionError, BufferError), end
        tensor.ledger.check(tensor.ledger.made)

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


# ---- given back once, at every exit ----------------------------------------------------------------------------------


@fast_args
def middle(a, x, b):
    if a[0] < 0:
        raise ValueError("from the kernel")
    return x[0] + b[0]


@fast_args(nogil=True)
def middle_unlocked(a, x, b):
    if a[0] < 0:
        raise ValueError("from the kernel")
    return x[0] + b[0]


def deletes_nothing_else():
    pass


def sets_an_exception():
    raise Sets(0, BufferError, BufferError("from the deleter"))


def sets_an_interrupt():
    raise Sets(0, KeyboardInterrupt)


def sets_what_is_no_exception():
    raise Sets(0, int, 5)


def calls_the_kernel():
    assert middle(np.ones(2), Turning(np.ones(2), behaves=True), np.ones(2)) == 2.0


def fails_in_the_kernel():
    assert end_of(middle, -np.ones(2), Dunder(np.ones(2)), np.ones(2)) == (ValueError, "from the kernel")


def collects():
    gc.collect()


def runs_a_thread():
    thread = threading.Thread(target=calls_the_kernel)
    thread.start()
    thread.join()


DELETERS = (
    deletes_nothing_else, sets_an_exception, sets_an_interrupt, sets_what_is_no_exception, calls_the_kernel,
    fails_in_the_kernel, collects, runs_a_thread,
)  # fmt: skip


def versioned_producer(what, ledger, array):
    return Gives(lambda tensor: capsule(managed_and(ledger, array, what), b"dltensor_versioned"), array, ledger)


def legacy_producer(what, ledger, array):
    return GivesLegacy(
        lambda tensor: capsule(managed_and(ledger, array, what, export_legacy), b"dltensor"), array, ledger
    )


def table_producer(what, ledger, array):
    return Exported(array, ledger, delete=what)


def viewed_producer(what, ledger, array):
    return Viewed(array, ledger, delete=what)


PRODUCERS = (versioned_producer, legacy_producer, table_producer, viewed_producer)


@pytest.mark.parametrize("deleter", DELETERS, ids=lambda deleter: deleter.__name__)
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: producer.__name__)
def test_deleters_run_once_at_every_exit(producer, deleter):
    ledger, array = Ledger(), np.full(3, 5.0)
    tensor, same = producer(deleter, ledger, array), producer(deletes_nothing_else, ledger, array)
    one, negative = np.ones(3), -np.ones(3)
    unknown, lanes, raising = object(), Dunder(one, lanes=2), Exported(export=FUNCTIONS["raises BufferError"][0])
    viewing = Viewed(view=FUNCTIONS["0 and BufferError set"][0], export=FUNCTIONS["0 and BufferError set"][0])
    kernel = middle_unlocked if producer is viewed_producer else middle
    exits = [
        ((one, tensor, one), 6.0, ""),
        ((tensor, tensor, tensor), 10.0, ""),
        ((one, tensor, same), 10.0, ""),
        ((negative, tensor, one), ValueError, "from the kernel"),
        ((one, tensor, unknown), TypeError, "position 2"),
        ((unknown, tensor, one), TypeError, "position 0"),
        ((one, tensor, lanes), BufferError, "position 2"),
        ((lanes, tensor, one), BufferError, "position 0"),
        ((one, tensor, raising), BufferError, "position 2"),
        ((raising, tensor, one), BufferError, "position 0"),
        ((one, tensor, viewing), BufferError, "position 2"),
        ((viewing, tensor, one), BufferError, "position 0"),
        ((one, tensor), TypeError, "missing"),
        ((one, tensor, one, one), TypeError, "positional"),
        ((one, tensor, np.ones(3, ">f8")), BufferError, "position 2"),
        ((one, tensor, 2**70), OverflowError, "position 2"),
        ((tensor, tensor, ONLY_NUMBA), numba.core.errors.TypingError, ""),
    ]
    for _ in range(2):
        for arguments, want, word in exits:
            with counts_kept(*arguments, array):
                end = end_of(kernel, *arguments)
            if isinstance(want, float):
                assert end == want
            else:
                assert end[0] is want and word in end[1], end
            if want is not numba.core.errors.TypingError:  # Numba's dispatcher keeps that, and what its frames hold
                ledger.check(ledger.made)
        assert kernel(one, one, one) == 2.0
    assert ledger.made >= 10
    assert same.ledger is ledger and lanes.ledger.out == 0


@pytest.mark.parametrize("deleter", DELETERS[:4], ids=lambda deleter: deleter.__name__)
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: producer.__name__)
def test_deleters_run_once_after_a_compile_error(producer, deleter):
    kernel = fast_args(lambda x: x.no_such_attribute, nogil=producer is viewed_producer)
    ledger = Ledger()
    tensor = producer(deleter, ledger, np.ones(3))
    for _ in range(2):
        assert issubclass(end_of(kernel, tensor)[0], numba.core.errors.TypingError)
    del kernel  # Numba keeps the exception, and so the frames that hold the view that it could not compile for
    gc.collect()
    ledger.check(ledger.made)
    assert ledger.made


@pytest.mark.parametrize("deleter", DELETERS, ids=lambda deleter: deleter.__name__)
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: producer.__name__)
def test_deleters_run_once_when_an_array_is_kept(producer, deleter):
    """The last holder of the array calls them."""
    ledger = Ledger()
    for first in (1.0, ONLY_NUMBA):
        for _ in range(2):
            tensor = producer(deleter, ledger, np.arange(4.0))
            before = ledger.deleted
            kept = column(first, tensor).ravel()
            assert ledger.out == 1
            part = kept[1:]
            del tensor, kept
            assert part.tolist() == [1.0, 2.0, 3.0] and ledger.out == 1
            del part
            assert ledger.out == 0 and ledger.deleted > before
    ledger.check(ledger.made)


@pytest.mark.parametrize("scene", ["view", "fast entry"])
def test_a_kept_array_whose_export_is_elsewhere(scene):
    """The borrowed memory must live as long as the array, whatever the export, made when it was kept, holds."""

    class Memory(np.ndarray):
        """An array whose death can be seen."""

    copies = []

    def copy(tensor, out):
        copies.append(tensor.array.copy())
        out[0] = export_versioned(tensor.ledger, copies[-1], flags=2)

    kernel, cls = fast_args(column.py_func, returns=np.ndarray), hostile_type("Copying")
    if scene == "fast entry":
        tensor = cls(behaves=True)
        for _ in range(WARM):
            kernel(1.0, tensor)
    tensor = cls(np.arange(4.0).view(Memory), export=copy)
    memory, ledger = weakref.ref(tensor.array), tensor.ledger
    kept = kernel(1.0, tensor)
    del tensor
    gc.collect()
    is_copy = any(kept.ctypes.data == made.ctypes.data for made in copies)
    assert is_copy or memory() is not None, "the array's memory has gone"
    assert kept.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    del kept
    gc.collect()
    assert memory() is None
    ledger.check(ledger.made)


ESCAPES = {
    **{name: FUNCTIONS[name][0] for name in (
        "-1 and no exception, -1", "raises BufferError", "raises FileNotFoundError", "raises KeyboardInterrupt",
        "0 and BufferError set", "filled, 0 and BufferError set", "1 and ValueError set", "no exception type at all",
    )},
    "NULL": lambda tensor, out: 0,
    "major version 2": lambda tensor, out: hostile.honest_export(tensor, out, version=(2, 0)),
    "no deleter": lambda tensor, out: hostile.honest_export(tensor, out, deleter=ffi.NULL),
    "calls the kernel": acting(lambda tensor: column(1.0, np.ones(4))),
    "collects": acting(lambda tensor: gc.collect()),
}  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_a_kept_array_whose_export_fails(name):
    """The call has been made: its result is right, and the tensor itself is kept, or what was exported."""
    for kernel in (column, fast_args(column.py_func, returns=np.ndarray)):
        tensor = Turning(behaves=True)
        if kernel is not column:
            for _ in range(WARM):
                kernel(1.0, tensor)
        ledger = tensor.ledger
        tensor.export, tensor.behaves = ESCAPES[name], False
        array = weakref.ref(tensor)
        for _ in range(3):
            end = end_of(kernel, 1.0, tensor)
            if isinstance(end, tuple):
                check_end(end, (BufferError, ValueError, OSError, KeyboardInterrupt, SystemError, TypeError))
                continue
            assert end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
        memory = tensor.array
        del tensor
        assert isinstance(end, tuple) or end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
        del end, memory
        if array() is not None:
            gc.collect()
        assert array() is None, "the tensor is held for ever"
        if name != "no deleter":
            ledger.check(ledger.made)


def test_the_same_capsule_again():
    """The second time it has been consumed."""
    for cls, make in ((Gives, versioned), (GivesLegacy, legacy)):
        again = []

        def give(tensor, again=again, make=make):
            if not again:
                again.append(make(tensor))
            return again[0]

        tensor = cls(give)
        assert total(1.0, tensor) == 6.0
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
        tensor.ledger.check(1)
        again.clear()
        check_end(end_of(ignore, tensor, tensor), REFUSED, "__dlpack__", name="arguments[1]")
        tensor.ledger.check(2)


def test_a_capsules_destructor():
    """A capsule is renamed before it dies, so that its destructor leaves the tensor alone."""
    calls = [lambda: None, gc.collect, lambda: total(1.0, np.ones(3))]
    for what in calls:
        hostile.at_destruction[:] = [what]
        for export, name, cls in (
            (export_versioned, b"dltensor_versioned", Gives),
            (export_legacy, b"dltensor", GivesLegacy),
        ):
            hostile.destroyed_names.clear()
            tensor = cls(lambda tensor, e=export, n=name: capsule_with_destructor(e(tensor.ledger, tensor.array), n))
            for first in (1.0, 1.0, ONLY_NUMBA):
                assert total(first, tensor) == 6.0
            assert set(hostile.destroyed_names) == {b"used_" + name} and len(hostile.destroyed_names) >= 3
            tensor.ledger.check(tensor.ledger.made)
    hostile.at_destruction.clear()


@pytest.mark.skipif(hasattr(sys, "gettotalrefcount"), reason="a debug build of CPython aborts by itself")
@pytest.mark.parametrize(
    "error", [BufferError("no"), OSError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_capsules_destructor_that_sets_an_exception(error):
    """The call ends in it, or goes on without it; the tensor is given back all the same."""

    def fail():
        raise Sets(0, type(error), error)

    hostile.at_destruction[:] = [fail]
    for export, name, cls in (
        (export_versioned, b"dltensor_versioned", Gives),
        (export_legacy, b"dltensor", GivesLegacy),
    ):
        tensor = cls(lambda tensor, e=export, n=name: capsule_with_destructor(e(tensor.ledger, tensor.array), n))
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(total, first, tensor), (6.0, type(error)))
            tensor.ledger.check(tensor.ledger.made)
    hostile.at_destruction.clear()
    assert total(1.0, np.arange(4.0)) == 6.0


def test_a_refused_capsules_tensor_stays_its_own():
    """What is no unconsumed capsule is not renamed, and its tensor not deleted."""
    for name in (b"dltensor_v2", b"used_dltensor_versioned", None):
        ledger = Ledger()
        made = capsule(export_versioned(ledger, np.ones(3)), name)
        tensor = Gives(lambda tensor, made=made: made)
        with counts_kept(made):
            for first in (1.0, 1.0, ONLY_NUMBA):
                check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
        assert ledger.deleted == 0 and capsule_name(made) == name


# ---- __dlpack__ ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Gives, GivesLegacy], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", RETURNS)
def test_what_dlpack_returns(name, cls):
    tensor = cls(RETURNS[name])
    neighbour = Dunder(np.ones(3))
    with counts_kept(tensor, tensor.array, neighbour):
        for first in (1.0, neighbour, ONLY_NUMBA, 1.0):
            check_end(end_of(total, first, tensor), (REFUSED, ValueError), "")
        neighbour.capsules.clear()
    neighbour.ledger.check(neighbour.ledger.made)
    assert total(1.0, np.arange(4.0)) == 6.0


def raises(error):
    def give(tensor):
        raise error

    return give


@pytest.mark.parametrize("cls", [Gives, GivesLegacy], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "error", [*(kind("no") for kind in REWORDED), *UNCHANGED], ids=lambda error: type(error).__name__
)
def test_what_dlpack_raises(error, cls):
    tensor = cls(raises(error))
    neighbour = Dunder(np.ones(3))
    for first in (1.0, neighbour, ONLY_NUMBA, 1.0):
        check_end(end_of(total, first, tensor), type(error))
        error.__traceback__ = None
    neighbour.ledger.check(neighbour.ledger.made)
    assert total(1.0, np.arange(4.0)) == 6.0


@pytest.mark.parametrize("cls", GOOD_IN_THE_END, ids=lambda cls: type.__getattribute__(cls, "__qualname__"))
def test_strange_and_good(cls):
    tensor = cls(np.arange(4.0))
    with counts_kept(tensor.array):
        for arguments in ((1.0, tensor), (1.0, tensor), (Dunder(np.ones(3)), tensor), (ONLY_NUMBA, tensor)):
            check_end(end_of(total, *arguments), 6.0)
        assert end_of(ignore, (tensor, (tensor,)), ONLY_NUMBA) == 2
        tensor.capsules.clear()
    tensor.ledger.check(tensor.ledger.made)
    assert isinstance(str(explain(tensor)), str)


@pytest.mark.parametrize("cls", GOOD_IN_THE_END, ids=lambda cls: type.__getattribute__(cls, "__qualname__"))
def test_strange_and_refused(cls):
    """The argument is named also where its type, its class or its text cannot be asked."""
    tensor = cls(np.arange(4.0), device_type=2)
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), REFUSED, "kDLCUDA")
    tensor.ledger.check(tensor.ledger.made)


class NoMethods:
    """What has no ``__dlpack__``, or none that anybody could call."""


def broken_methods():
    device = lambda self: (1, 0)  # noqa: E731
    good = lambda self, *, max_version=None: np.arange(4.0).__dlpack__(max_version=max_version)  # noqa: E731

    def raising(self):
        raise ZeroDivisionError("a property")

    yield "None", {"__dlpack__": None, "__dlpack_device__": device}, TypeError
    yield "an int", {"__dlpack__": 3, "__dlpack_device__": device}, TypeError
    yield "a C function without self", {"__dlpack__": len, "__dlpack_device__": device}, TypeError
    yield "a C function of another type", {"__dlpack__": list.append, "__dlpack_device__": device}, TypeError
    yield "a slot of another type", {"__dlpack__": int.__add__, "__dlpack_device__": device}, TypeError
    yield "ndarray's own", {"__dlpack__": np.ndarray.__dlpack__, "__dlpack_device__": device}, TypeError
    yield "a class", {"__dlpack__": dict, "__dlpack_device__": device}, REFUSED
    yield "a property that raises", {"__dlpack__": property(raising), "__dlpack_device__": device}, ZeroDivisionError
    yield (
        "a property that gives None",
        {"__dlpack__": property(lambda self: None), "__dlpack_device__": device},
        TypeError,
    )
    yield "a static method with a parameter", {"__dlpack__": staticmethod(good), "__dlpack_device__": device}, TypeError
    yield "a method without self", {"__dlpack__": lambda: 1, "__dlpack_device__": device}, TypeError
    yield "a generator", {"__dlpack__": lambda self, max_version=None: (yield), "__dlpack_device__": device}, REFUSED
    yield "no __dlpack_device__", {"__dlpack__": good}, TypeError
    yield "no __dlpack__", {"__dlpack_device__": device}, TypeError
    yield "a descriptor that raises", {
        "__dlpack__": hostile.RaisingDescriptor(ValueError("no")), "__dlpack_device__": device,
    }, ValueError  # fmt: skip
    yield "a device descriptor that raises", {
        "__dlpack__": good, "__dlpack_device__": hostile.RaisingDescriptor(ValueError("no")),
    }, ValueError  # fmt: skip


@pytest.mark.parametrize("case", list(broken_methods()), ids=lambda case: case[0])
def test_methods_that_are_none(case):
    _, attributes, want = case
    tensor = type("Methods", (NoMethods,), attributes)()
    with counts_kept(tensor):
        for first in (1.0, Dunder(np.ones(2)), ONLY_NUMBA, 1.0):
            check_end(end_of(total, first, tensor), want)
    assert total(1.0, np.arange(4.0)) == 6.0


def test_methods_of_the_instance_only():
    tensor, array = NoMethods(), np.arange(4.0)
    tensor.__dlpack__, tensor.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
    for first in (1.0, ONLY_NUMBA, 1.0):
        assert total(first, tensor) == total(first, array)


@pytest.mark.parametrize(
    "error", [ValueError("no"), AttributeError("no"), KeyboardInterrupt(), SystemExit(2)], ids=repr
)
def test_getattr_that_raises(error):
    """It is no tensor. The call ends as under plain ``@njit``, or in a TypeError that names the argument."""

    class Evil:
        def __getattr__(self, name):
            raise error

    for first in (1.0, ONLY_NUMBA):
        for _ in range(2):
            want, got = end_of(numbas(total), first, Evil()), end_of(total, first, Evil())
            if kind_of(got) is not kind_of(want):
                check_end(got, TypeError)
            error.__traceback__ = None
    assert total(1.0, np.arange(4.0)) == 6.0


# ---- exchange tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(unusable_tables()), ids=lambda case: re.sub("[0-9]{4,}", "N", case[0]))
def test_tables_that_cannot_be_used(case):
    """A type with ``__dlpack__`` is asked by that; one without is refused, and the refusal says why."""
    _, value = case
    is_mute = isinstance(value, (hostile.FalsePyCapsule, hostile.Unprintable))  # why it cannot be used, cannot be said
    cls = type("Broken", (WithMethods, Hostile), {ATTRIBUTE: value})
    tensor = cls()
    with counts_kept(tensor):
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(total, first, tensor), (6.0, ValueError) if is_mute else 6.0)
    assert tensor.looks == 0
    tensor.ledger.check(tensor.ledger.made)
    if not is_mute:
        assert tensor.dunder_calls >= 3
        assert "Broken" in str(explain(tensor))
    bare = type("Bare", (), {ATTRIBUTE: value})()
    with counts_kept(bare):
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(
                end_of(total, first, bare), (TypeError, ValueError) if is_mute else TypeError, "" if is_mute else "Bare"
            )
    assert total(1.0, np.arange(4.0)) == 6.0


@pytest.mark.parametrize("by_meta", [False, True], ids=["attribute", "metaclass"])
@pytest.mark.parametrize("case", list(usable_tables()), ids=lambda case: case[0])
def test_tables_that_can_be_used(case, by_meta):
    _, value = case
    meta = hostile.metaclass_with(value) if by_meta else type
    cls = meta("Usable", (Hostile,), {} if by_meta else {ATTRIBUTE: value})
    tensor = cls()
    with counts_kept(tensor, tensor.array):
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(total, first, tensor), 6.0)
        tensor.words.clear()
    assert tensor.looks >= 3
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("case", list(raising_tables()), ids=lambda case: case[0])
def test_tables_that_cannot_even_be_asked_for(case):
    """What asking raises arrives, the argument named, or the type counts as one without a table."""
    _, value, meta, error = case
    attributes = {} if value is None else {ATTRIBUTE: value}
    tensor = meta("Raising", (WithMethods, Hostile), attributes)()
    bare = meta("Bare", (), attributes)()
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), (6.0, type(error)))
        check_end(end_of(total, first, bare), (TypeError, type(error)))
    tensor.ledger.check(tensor.ledger.made)
    with contextlib.suppress(type(error)):
        explain(tensor)
    if meta is type:
        delattr(type(tensor), ATTRIBUTE)
        assert total(1.0, tensor) == 6.0
    assert total(1.0, np.arange(4.0)) == 6.0


def test_a_metaclass_with_a_new_capsule_each_time():
    """The one whose table is in use lives as long as the type."""
    hostile.destroyed_names.clear()
    table, made = exchange_table(**{VIEW: hostile.view_function, EXPORT: hostile.export_function}), []

    def read(cls):
        made.append(1)
        return capsule_with_destructor(table, b"dlpack_exchange_api")

    cls = type("Meta", (type,), {ATTRIBUTE: property(read)})("Generous", (Hostile,), {})
    tensor = cls()
    for first in [1.0] * WARM + [ONLY_NUMBA] * 2:
        assert total(first, tensor) == 6.0
        assert len(hostile.destroyed_names) < len(made)
    del cls, tensor
    gc.collect()
    assert len(hostile.destroyed_names) == len(made)


def test_a_metaclass_that_answers_differently_each_time():
    capsule_of_ours = Viewed.__dlpack_c_exchange_api__
    answers = itertools.cycle([None, 3, capsule_of_ours, ValueError("no"), AttributeError("no"), KeyboardInterrupt()])

    def read(cls):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise type(answer)(*answer.args)
        return answer

    seen = []
    for _ in range(12):
        cls = type("Meta", (type,), {ATTRIBUTE: property(read)})("Fickle", (WithMethods, Hostile), {})
        tensor = cls()
        ends = [end_of(total, first, tensor) for first in (1.0, 1.0, ONLY_NUMBA, 1.0, 1.0, 1.0)]
        for end in ends:
            check_end(end, (6.0, ValueError, KeyboardInterrupt))
        seen += ends
        tensor.ledger.check(tensor.ledger.made)
    assert 6.0 in seen


def test_the_capsule_of_another_type():
    """Its functions see objects that are none of theirs, and say so."""
    cls = type("Borrowed", (), {ATTRIBUTE: Viewed.__dlpack_c_exchange_api__})
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, cls()), TypeError, "not one of mine")
    check_end(end_of(unlocked_total, 1.0, cls()), TypeError, "not one of mine")


@needs_torch
def test_the_capsule_of_torch():
    if not has_table():
        pytest.skip("this PyTorch has none")
    cls = type("Borrowed", (), {ATTRIBUTE: torch.Tensor.__dlpack_c_exchange_api__})
    for kernel in (total, unlocked_total):
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(kernel, first, cls()), (TypeError, BufferError, RuntimeError))
    assert total(1.0, torch.arange(4.0)) == 6.0


@needs_torch
def test_a_part_of_a_torch_tensor_whose_memory_was_freed():
    """PyTorch adds the offset to NULL: its data pointer is none, and not NULL either."""
    for start in (1, 511, 512, 2048, 2**20):
        tensor = torch.ones(start + 8, dtype=torch.float64)[start:]
        tensor.untyped_storage().resize_(0)
        for kernel in (size, unlocked_size):
            for first in (1.0, 1.0, ONLY_NUMBA):
                check_end(end_of(kernel, first, tensor), REFUSED)


def test_a_table_replaced_after_calls():
    """The table found first stays in use, and its capsule alive, as long as its type lives."""
    hostile.destroyed_names.clear()
    first, second = (exchange_table(**{VIEW: hostile.view_function, EXPORT: hostile.export_function}) for _ in range(2))
    for replacement in (lambda: capsule(second, b"dlpack_exchange_api"), lambda: None, lambda: 3, None):
        for calls in (1, WARM):
            cls = type("Replaced", (Hostile,), {ATTRIBUTE: capsule_with_destructor(first, b"dlpack_exchange_api")})
            tensor, kernel = cls(), fast_args(size_of)
            for _ in range(calls):
                assert kernel(1.0, tensor) == 4
            if replacement is None:
                delattr(cls, ATTRIBUTE)
            else:
                setattr(cls, ATTRIBUTE, replacement())
            gc.collect()
            assert not hostile.destroyed_names, "the capsule has gone while its table is in use"
            for _ in range(WARM):
                assert kernel(1.0, tensor) == 4
            assert total(1.0, tensor) == total(ONLY_NUMBA, tensor) == 6.0
            tensor.ledger.check(tensor.ledger.made)
            reference = weakref.ref(cls)
            del cls, tensor, kernel
            gc.collect()
            assert reference() is None and hostile.destroyed_names == [b"dlpack_exchange_api"]
            hostile.destroyed_names.clear()


def test_a_function_replaced_in_the_table():
    """A table is read once: what others write into it later is not called, for the type's life."""
    table = exchange_table(**{VIEW: hostile.view_function, EXPORT: hostile.export_function})
    cls = type("Rewritten", (Hostile,), {ATTRIBUTE: capsule(table, b"dlpack_exchange_api")})
    tensor = cls()
    assert total(1.0, tensor) == 6.0
    for name in (VIEW, EXPORT):
        setattr(table, name, ffi.NULL)
    table.header.version.major = 99
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), (6.0, REFUSED))
    tensor.ledger.check(tensor.ledger.made)


# ---- all the same to the process -------------------------------------------------------------------------------------


def test_refusals_leave_nothing_behind():
    """The number of objects is the same after ten and after a hundred rounds of what is hostile in every way."""
    tensors = [
        Viewed(lanes=2), Exported(lanes=2), Viewed(view=FUNCTIONS["raises BufferError"][0]),
        Exported(export=FUNCTIONS["filled, 0 and BufferError set"][0]),
        Exported(export=FUNCTIONS["-1 and no exception, -1"][0]), Gives(lambda tensor: None),
        Gives(raises(BufferError("no"))), Dunder(np.ones(3), data=0), Legacy(np.ones(3), ndim=-1),
        Exported(version=(2, 0)), Viewed(view=half_a_view), object(),
    ]  # fmt: skip

    def rounds(times: int) -> int:
        for _ in range(times):
            for tensor in tensors:
                assert end_of(total, 1.0, tensor)[0] in (BufferError, TypeError)
                if hasattr(tensor, "asked"):
                    tensor.asked.clear()
                    tensor.capsules.clear()
                if hasattr(tensor, "words"):
                    tensor.words.clear()
        gc.collect()
        return len(gc.get_objects())

    assert abs(rounds(100) - rounds(10)) < 100


def test_the_deleter_of_these_tests_is_native():
    """It returns with an exception set, which only native code can do."""
    ledger = Ledger()
    managed = managed_and(ledger, np.ones(3), sets_an_exception)
    assert address_of(managed.deleter) == delete_function
    with pytest.raises(BufferError, match="from the deleter"):
        import ctypes

        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(delete_function)(address_of(managed))
    ledger.check(1)
