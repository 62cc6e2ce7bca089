"""What Python code can change in one argument while another one is read: all that is asked about is asked after that.

`k(p, victim, evil)`: the ``__dlpack__`` of `evil`, a finalizer or a mode changes `victim`, before or
after `victim` has been looked at. A call reads what `victim` is after the change, or refuses it as a call with such a tensor
does; it never reads the memory of the one with the meaning of the other.
"""

import functools
import gc
import itertools
import sys
import weakref

import numba
import numpy as np
import pytest
from counting import scene
from exchanges import CALLS, Given
from frameworks import torch
from made_producers import ONLY_NUMBA
from numba import types
from numba.extending import overload
from oracle import new_kernel
from other_ways import run_changed
from raising import check_raises
from ways import mode_of

from fastexchange import fast_args

if torch is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

each_locking = pytest.mark.parametrize("nogil", [False, True], ids=["with the GIL", "without the GIL"])
REFUSED = (BufferError, RuntimeError, ValueError, TypeError)


# ---- what happens to the victim, and where it stands -----------------------------------------------------------------
def twos(dtype=torch.float32):
    return torch.full((6,), 2.0, dtype=dtype)[1:5]


def negated():
    victim = twos()
    victim.data = torch._neg_view(-victim.detach())
    return victim


complex_twos = functools.partial(twos, torch.complex64)


def become(convert):
    return lambda victim: setattr(victim, "data", convert(victim.detach()))


def give_other_memory(victim, size=4):
    victim.set_(torch.full((size,), 9.0, dtype=victim.dtype))


ACTIONS = {
    "becomes lazily negated": (twos, become(lambda x: torch._neg_view(-x))),  # the same value, and its negative in memory
    "is lazily negated no longer": (negated, become(lambda x: x.resolve_neg())),
    "becomes lazily conjugated": (complex_twos, become(lambda x: x.conj().resolve_conj().conj())),
    "requires grad": (twos, lambda victim: victim.requires_grad_()),
    "is multiplied by what requires grad": (twos, lambda victim: victim.mul_(torch.ones(1, requires_grad=True))),
    "becomes sparse": (complex_twos, become(torch.Tensor.to_sparse)),
    "becomes a meta tensor": (twos, become(lambda x: x.to("meta"))),
    "gets other memory": (twos, give_other_memory),
    "gets other memory, and less": (complex_twos, functools.partial(give_other_memory, size=1)),
    "gets integers": (twos, become(lambda x: torch.full((4,), 9, dtype=torch.int64))),
    "is freed": (twos, lambda victim: victim.untyped_storage().resize_(0)),
    "is shared with other processes": (lambda: torch.full((4,), 2.0), lambda victim: victim.share_memory_()),
    "is cloned lazily": (lambda: torch.full((4,), 2.0), lambda victim: (
        torch._C._is_cow_tensor(victim) or victim.is_shared() or torch._lazy_clone(victim))),
}  # fmt: skip
"""What makes the victim, and what happens to it."""
KINDS = {action: complex_twos for action, (make, _) in ACTIONS.items() if make is complex_twos}


PLACES = {
    "before": lambda victim, evil: (victim, evil, 1.0),
    "after": lambda victim, evil: (evil, victim, 1.0),
    "in a tuple": lambda victim, evil: ((victim, 1.0), evil, 1.0),
    "in a list": lambda victim, evil: ([victim], evil, 1.0),
    "beside an odd one": lambda victim, evil: (victim, evil, made_dual()),
    "beside what only Numba reads": lambda victim, evil: (victim, evil, ONLY_NUMBA),  # such calls are Numba's dispatcher's
    "before, in tuples, beside what only Numba reads": lambda victim, evil: ((victim, 1.0), (evil, 1.0), ONLY_NUMBA),
    "beside seventy": lambda victim, evil: (tuple([victim] + [np.zeros(1, "f4")] * 70), evil, 1.0),  # no frame has room for them
}

QUICK = [place for place in PLACES if place != "beside seventy"]  # which takes long to compile


@each_locking
@pytest.mark.parametrize("action", ACTIONS)
def test_no_argument_is_changed_behind_the_guard(action, nogil):
    places = PLACES if action == "gets other memory" else QUICK
    for place, when in itertools.product(places, ("before", "afterwards")):
        for armed_at in range(1, 6 if place == "beside an odd one" else 3):  # a call may ask for an export several times
            with scene(place, when, armed_at):
                for kernel in (new_kernel(DISPATCHERS[nogil]), later(nogil, place, KINDS.get(action, twos))):
                    check_change(kernel, place, when, action, armed_at)


# ---- who changes the victim, and what is read of it ------------------------------------------------------------------
class Evil:
    """A tensor whose ``__dlpack__`` runs `action` before it makes its answer, or `afterwards`. Kernels ask for no device."""

    def __init__(self, action, when="before"):
        self.array, self.act, self.asked = np.zeros(2), lambda now: action() if now == when else None, []

    def __dlpack_device__(self):
        self.asked.append("__dlpack_device__")
        return (1, 0)

    def __dlpack__(self, **options):
        self.asked.append("__dlpack__")
        self.act("before")
        made = self.array.__dlpack__(**options)
        self.act("afterwards")
        return made


def total(x):
    """In a kernel: of a tensor, or of the first in a tuple or list."""


@overload(total)
def _total(x):
    if isinstance(x, (types.BaseTuple, types.List)):
        return lambda x: total(x[0])
    return lambda x: x.sum()


def read(a, b, c):
    return total(a), total(b)


DISPATCHERS = {nogil: numba.njit(nogil=nogil)(read) for nogil in (False, True)}
KNOWN = {nogil: new_kernel(DISPATCHERS[nogil]) for nogil in DISPATCHERS}


@functools.cache
def later(nogil: bool, place: str = "before", make=twos):
    for _ in range(4):
        KNOWN[nogil](*PLACES[place](make(), Evil(lambda: None)))
    return KNOWN[nogil]


def value_of(victim):
    """What a kernel may say of `victim` as it is now; None if it has to refuse it."""
    try:
        if victim.requires_grad or victim.is_neg() or victim.is_conj() or not victim.untyped_storage().nbytes():
            return None
        return victim.detach().numpy().sum()
    except REFUSED:
        return None


def check_change(kernel, place, when, action, armed_at):
    """When it is asked for the `armed_at`-th time, it changes the victim: what is read is right then, or refused."""
    (make, change), calls = ACTIONS[action], itertools.count(1)
    victim = make()

    def act():
        if next(calls) == armed_at:
            change(victim)

    evil = Evil(act, when)
    try:
        got = kernel(*PLACES[place](victim, evil))[place == "after"]
    except REFUSED:
        return
    finally:
        assert "__dlpack_device__" not in evil.asked
    if next(calls) > armed_at:
        after = value_of(victim)
        assert after is not None, "read what has to be refused"
        assert got == after


@pytest.mark.slow
@each_locking
def test_modes_that_another_argument_begins(nogil):
    """Grad mode; a level of differentiation."""
    for place in QUICK:
        leaf, victim, level = torch.full((4,), 2.0, requires_grad=True), torch.full((4,), 2.0), forward_ad.dual_level()

        def enter(victim=victim, level=level):
            if forward_ad._current_level < 0:
                level.__enter__()
                make_dual(victim)

        with torch.no_grad(), scene(place):
            for _ in range(4):
                later(nogil)(*PLACES[place](leaf, Evil(lambda: None)))
            evil = Evil(lambda: torch.set_grad_enabled(True))
            check_raises(BufferError, "requires grad", later(nogil), *PLACES[place](leaf, evil))
        try:
            check_raises(BufferError, "tangent", later(nogil), *PLACES[place](victim, Evil(enter)))
        finally:
            level.__exit__(None, None, None)


def make_dual(x):
    return x.mul_(forward_ad.make_dual(torch.ones(1), torch.ones(1)))


def made_dual():
    with forward_ad.dual_level():
        return make_dual(torch.ones(3))


class Cycle:
    """A garbage collection finds it."""

    def __init__(self):
        self.itself = self


@each_locking
@pytest.mark.parametrize("action", ["becomes lazily negated", "requires grad", "gets other memory", "gets other memory, and less",
                                    "is freed"])  # fmt: skip
def test_a_garbage_collection_at_each_allocation_of_a_call(action, nogil):
    """The snapshot of a list, or the object of a storage, sets it off when other arguments have been read.

    A call that keeps the GIL makes neither. Since CPython 3.12 allocations in native code set no collection off.
    """
    threshold, beside, set_off = gc.get_threshold(), [torch.ones(2)], []
    for _ in range(4):
        later(nogil)(torch.full((4,), 2.0), beside, 1.0)
    for allocations in range(1, 12):
        victim = torch.full((4,), 2.0)
        gc.collect()
        gc.disable()
        collected = weakref.finalize(Cycle(), ACTIONS[action][1], victim)
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        try:
            got = later(nogil)(victim, beside, 1.0)[0]
        except REFUSED:
            continue
        finally:
            set_off.append(not collected.alive)
            gc.set_threshold(*threshold)
        assert got in (8.0, 9.0, 36.0)
    assert any(set_off) is (nogil and sys.version_info < (3, 12))


@fast_args
def increase(x, other):
    for i in range(x.shape[0]):
        x[i] += 1


def test_memory_that_is_shared_or_cloned_lazily_meanwhile_is_the_one_that_is_written():
    for _ in range(30):
        victim, clones = torch.zeros(300), []
        increase(victim, Evil(victim.share_memory_))
        assert victim.tolist() == [1.0] * 300
        victim = torch.zeros(300)
        increase(victim, Evil(lambda victim=victim, clones=clones: clones.append(torch._lazy_clone(victim))))
        assert victim.tolist() == [1.0] * 300 and all(clone.tolist() == [0.0] * 300 for clone in clones)


@pytest.mark.nightly
def test_without_an_exchange_table():
    """PyTorch before 2.10 has none: its tensors are exported after all others, too."""
    run_changed("""
        import sys
        sys.modules["tvm_ffi"] = None  # it gives PyTorch's tensors a table where they have none
        del torch.Tensor.__dlpack_c_exchange_api__
        import test_outrun as tests
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        for action in tests.ACTIONS:
            for nogil in (False, True):
                tests.test_no_argument_is_changed_behind_the_guard(action, nogil)
        tests.test_a_garbage_collection_at_each_allocation_of_a_call("becomes lazily negated", False)
        tests.test_memory_that_is_shared_or_cloned_lazily_meanwhile_is_the_one_that_is_written()
    """)


# Two ways call no function of PyTorch, in which a mode could do something.
@pytest.mark.parametrize("way", [way for way in CALLS if way not in ("from_dlpack", "convert")])
@pytest.mark.parametrize("action", ["becomes lazily negated", "requires grad", "gets other memory, and less"])
def test_conversions_in_a_mode_that_changes_the_tensor(way, action):
    for number in range(1, 40):
        victim, calls = torch.full((4,), 2.0), itertools.count(1)
        memory = victim.untyped_storage()  # an export does not keep it when the tensor is given other memory

        def change(*_, victim=victim, calls=calls, number=number):
            if next(calls) == number:
                ACTIONS[action][1](victim)

        with mode_of(TorchFunctionMode, change):
            try:
                got = CALLS[way](victim)
            except REFUSED:
                continue
        if way.startswith("to_dlpack"):
            got = np.from_dlpack(Given(got))
        assert got.tolist() in ([2.0] * 4, [9.0]) and memory.nbytes() == 16


def test_flags_of_an_array_that_another_argument_changes():
    @fast_args
    def write(a, b):
        a[0] = 7.0
        return b[0]

    for place in ("before", "after", "in a tuple", "in a list"):
        array = np.full(4, 2.0, np.float32)
        evil = Evil(lambda array=array: setattr(array.flags, "writeable", False))
        assert later(False)(*PLACES[place](array, evil))[place == "after"] == 8.0
        array.flags.writeable = True
        check_raises((Exception,), "readonly|read-only|immutable", write, array, evil)
        assert array[0] == 2.0
