"""What Python code can change in one argument while another one is read: all that is asked about is asked after that.

`k(p, victim, evil)`: the ``__dlpack__`` of `evil`, its ``__dlpack_device__``, a finalizer or a mode changes `victim`, before or
after `victim` has been looked at. A call reads what `victim` is after the change, or refuses it as a call with such a tensor
does; it never reads the memory of the one with the meaning of the other.
"""

import gc
import itertools

import numba
import numpy as np
import pytest
from frameworks import torch
from interpreter import run_python
from made_producers import ONLY_NUMBA
from numba import types
from numba.extending import overload

from fastexchange import convert, fast_args, from_dlpack, to_dlpack

if torch is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.slow


class Evil:
    """A tensor whose ``__dlpack__`` runs `action` first."""

    def __init__(self, action, when="__dlpack__"):
        self.array, self.action, self.when = np.zeros(2), action, when

    def __dlpack_device__(self):
        if self.when == "__dlpack_device__":
            self.action()
        return (1, 0)

    def __dlpack__(self, **options):
        if self.when == "__dlpack__":
            self.action()
        made = self.array.__dlpack__(**options)
        if self.when == "afterwards":
            self.action()
        return made


def negate(victim):
    victim.data = torch._neg_view(-victim.detach())  # the same value, and its negative in memory


def conjugate(victim):
    victim.data = victim.detach().conj().resolve_conj().conj()


def require_grad(victim):
    victim.requires_grad_()


def watch_in_place(victim):
    victim.mul_(torch.ones(1, requires_grad=True))


def make_sparse(victim):
    victim.data = victim.detach().to_sparse()


def make_meta(victim):
    victim.data = victim.detach().to("meta")


def give_other_memory(victim):
    victim.set_(torch.full((4,), 9.0, dtype=victim.dtype))


def make_smaller(victim):
    victim.set_(torch.full((1,), 9.0, dtype=victim.dtype))


def make_integers(victim):
    victim.data = torch.full((4,), 9, dtype=torch.int64)


def free(victim):
    victim.untyped_storage().resize_(0)


def share(victim):
    victim.share_memory_()


def clone_lazily(victim):
    if not torch._C._is_cow_tensor(victim) and not victim.is_shared():
        torch._lazy_clone(victim)


def dual(victim):
    with torch.no_grad():
        victim.set_(torch.full((4,), 2.0))
    if forward_ad._current_level >= 0:
        victim.mul_(forward_ad.make_dual(torch.ones(1), torch.ones(1)))


REFUSED = (BufferError, RuntimeError, ValueError, TypeError)
ACTIONS = [
    negate, conjugate, require_grad, watch_in_place, make_sparse, make_meta, give_other_memory, make_smaller, make_integers, free,
    share, clone_lazily,
]  # fmt: skip
VICTIMS = {
    "plain": lambda: torch.full((4,), 2.0),
    "complex": lambda: torch.full((4,), 2.0 + 1j),
    "view": lambda: torch.full((6,), 2.0)[1:5],
}
PLACES = {
    "before": lambda victim, evil: (victim, evil, 1.0),
    "after": lambda victim, evil: (evil, victim, 1.0),
    "in a tuple": lambda victim, evil: ((victim, 1.0), evil, 1.0),
    "in a list": lambda victim, evil: ([victim], evil, 1.0),
    "beside an odd one": lambda victim, evil: (victim, evil, made_dual()),
    "beside what only Numba reads": lambda victim, evil: (victim, evil, ONLY_NUMBA),  # such calls are Numba's dispatcher's
    "before, in tuples, beside what only Numba reads": lambda victim, evil: ((victim, 1.0), (evil, 1.0), ONLY_NUMBA),
    "beside a hundred": lambda victim, evil: (tuple([victim] + [np.zeros(1)] * 100), evil, 1.0),  # no frame has room for them
}


def made_dual():
    with forward_ad.dual_level():
        one = torch.ones(3)
        one.mul_(forward_ad.make_dual(torch.ones(1), torch.ones(1)))
        return one


def reading(nogil: bool):
    """A kernel that says what it reads: the sums of real and imaginary parts of the arrays among its first two arguments."""

    @fast_args(nogil=nogil)
    def read(a, b, c):
        return total(a), total(b)

    return read


def total_of(x):
    raise NotImplementedError


@overload(total_of)
def _total_of(x):
    if isinstance(x, (types.BaseTuple, types.List)):
        return lambda x: total_of(x[0])
    return lambda x: x.sum()


@numba.njit
def total(x):
    return total_of(x)


def value_of(victim):
    """What a kernel may say of `victim` as it is now; None if it has to refuse it."""
    try:
        if victim.requires_grad or victim.is_neg() or victim.is_conj() or not victim.untyped_storage().nbytes():
            return None
        return victim.detach().numpy().sum()
    except REFUSED:
        return None


KERNELS = {(nogil, order): reading(nogil) for nogil, order in itertools.product((False, True), ("first", "later"))}


@pytest.mark.parametrize("when", ["__dlpack__", "__dlpack_device__", "afterwards"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", VICTIMS)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_argument_is_changed_behind_the_guard(action, make, place, when):
    if action is conjugate and make != "complex":
        pytest.skip("only complex tensors can be conjugated")
    for (nogil, order), read in KERNELS.items():
        if order == "later":
            for _ in range(20):
                read(*PLACES[place](VICTIMS[make](), Evil(lambda: None)))
        for armed_at in range(1, 6 if place.startswith("beside an odd") else 3):  # a call may ask for an export several times
            victim = VICTIMS[make]()
            calls = itertools.count(1)

            def act(victim=victim, calls=calls, armed_at=armed_at):
                if next(calls) == armed_at:
                    action(victim)

            evil = Evil(act, when)
            try:
                got = read(*PLACES[place](victim, evil))[place == "after"]
            except REFUSED:
                continue
            if next(calls) <= armed_at:
                continue  # it has not been asked so often
            after = value_of(victim)
            assert after is not None, (nogil, order, armed_at, "read what has to be refused")
            assert got == after, (nogil, order, armed_at, got, after)


@pytest.mark.parametrize("nogil", [False, True])
@pytest.mark.parametrize("make", VICTIMS)
def test_memory_is_that_of_the_value(nogil, make):
    """A tensor that becomes lazily negated, and one that is no longer: what is read is the value, before and after."""
    read = KERNELS[nogil, "first"]
    for place in PLACES:
        victim = VICTIMS[make]()
        victim.data = torch._neg_view(-victim.detach())
        want = victim.resolve_neg().numpy().sum()
        evil = Evil(lambda victim=victim: setattr(victim, "data", victim.detach().resolve_neg()))
        try:
            assert read(*PLACES[place](victim, evil))[place == "after"] == want
        except BufferError as error:
            assert "negated" in str(error)


@pytest.mark.parametrize("nogil", [False, True])
def test_grad_mode_and_levels_of_differentiation_that_another_argument_opens(nogil):
    read = KERNELS[nogil, "later"]
    leaf = torch.full((4,), 2.0, requires_grad=True)
    for place in PLACES:
        for _ in range(20):
            with torch.no_grad():
                read(*PLACES[place](leaf, Evil(lambda: None)))
                assert torch.is_grad_enabled() is False
                with pytest.raises(BufferError, match="requires grad"):
                    read(*PLACES[place](leaf, Evil(lambda: torch.set_grad_enabled(True))))
    opened = []
    for place in PLACES:
        victim = torch.full((4,), 2.0)

        def act(victim=victim):
            if not opened:
                level = forward_ad.dual_level()
                level.__enter__()
                opened.append(level)
                dual(victim)

        try:
            with pytest.raises(BufferError, match="tangent"):
                read(*PLACES[place](victim, Evil(act)))
        finally:
            while opened:
                opened.pop().__exit__(None, None, None)


def test_a_dual_tensor_whose_level_has_ended_is_native():
    one = made_dual()
    kernel = fast_args(lambda x: x.sum())
    kernel(one)
    before = kernel.counts()
    assert [kernel(one) for _ in range(40)] == [3.0] * 40
    assert kernel.counts()[:2] == (before.fast + 40, before.slow)


class Finalizer:
    """In a reference cycle: a garbage collection calls it."""

    def __init__(self, action):
        self.action, self.cycle = action, self

    def __del__(self):
        self.action()


@pytest.mark.parametrize("nogil", [False, True])
@pytest.mark.parametrize("action", [negate, require_grad, give_other_memory, make_smaller, free], ids=lambda each: each.__name__)
def test_a_garbage_collection_at_each_allocation_of_a_call(action, nogil):
    """The snapshot of a list, or the object of a storage, may set it off when other arguments have been read."""
    read = KERNELS[nogil, "later"]
    threshold = gc.get_threshold()
    for _ in range(20):
        read(torch.full((4,), 2.0), [torch.ones(2)], 1.0)
    try:
        for allocations in range(1, 12):
            victim = torch.full((4,), 2.0)
            lists = [torch.ones(2)]
            gc.collect()
            gc.disable()
            Finalizer(lambda victim=victim: action(victim))
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            try:
                got = read(victim, lists, 1.0)[0]
            except REFUSED:
                continue
            finally:
                gc.set_threshold(*threshold)
            assert got in (8.0, 9.0, 36.0)
    finally:
        gc.set_threshold(*threshold)


class Changing(TorchFunctionMode):
    """A mode that changes a tensor at the n-th function that it sees."""

    def __init__(self, action, number):
        super().__init__()
        self.action, self.number = action, number

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.number -= 1
        if self.number == 0:
            self.action()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("take", [
    lambda x: from_dlpack(x), lambda x: from_dlpack(x, copy=False), lambda x: convert(x, np.ndarray),
    lambda x: convert(x, np.ndarray, copy=False), lambda x: np.from_dlpack(Capsule(to_dlpack(x, max_version=(1, 0)))),
], ids=["from_dlpack", "from_dlpack copy", "convert", "convert copy", "to_dlpack"])  # fmt: skip
@pytest.mark.parametrize("action", [negate, require_grad, make_smaller], ids=lambda each: each.__name__)
def test_conversions_in_a_mode_that_changes_the_tensor(take, action):
    for number in range(1, 40):
        victim = torch.full((4,), 2.0)
        memory = victim.untyped_storage()  # an export does not keep it when the tensor is given other memory
        with Changing(lambda victim=victim: action(victim), number):
            try:
                got = take(victim)
            except REFUSED:
                continue
        assert got.tolist() in ([2.0] * 4, [9.0]) and memory.nbytes() == 16


class Capsule:
    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.capsule


def test_flags_and_shape_of_an_array_that_another_argument_changes():
    read = KERNELS[False, "later"]
    for place in PLACES:
        array = np.full(4, 2.0)
        evil = Evil(lambda array=array: setattr(array.flags, "writeable", False))
        assert read(*PLACES[place](array, evil))[place == "after"] == 8.0

    @fast_args
    def write(a, b):
        a[0] = 7.0
        return b[0]

    for _ in range(3):
        array = np.full(4, 2.0)
        evil = Evil(lambda array=array: setattr(array.flags, "writeable", False))
        with pytest.raises(Exception, match=r"readonly|read-only|immutable"):
            write(array, evil)
        assert array[0] == 2.0


def test_without_an_exchange_table():
    """PyTorch before 2.10 has none: its tensors are exported after all others, too."""
    run_python(
        """
        import sys
        sys.modules["tvm_ffi"] = None  # it gives PyTorch's tensors a table where they have none
        import torch
        del torch.Tensor.__dlpack_c_exchange_api__
        import gc
        import numpy as np
        from fastexchange import fast_args
        from made_producers import ONLY_NUMBA
        from test_outrun import ACTIONS, Evil, Finalizer, REFUSED, give_other_memory, reading, value_of
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        for nogil in (False, True):
            read = reading(nogil)
            for action in ACTIONS:
                for third in (1.0, "text", ONLY_NUMBA):
                    for _ in range(20):
                        victim = torch.full((4,), 2.0)
                        try:
                            got, _ = read(victim, Evil(lambda: action(victim)), third)
                        except REFUSED:
                            continue
                        assert got == value_of(victim), (nogil, action, third, got, value_of(victim))

        for allocations in range(1, 40):  # a garbage collection at each of PyTorch's function, too
            victim = torch.full((4,), 2.0)
            gc.collect()
            gc.disable()
            Finalizer(lambda: setattr(victim, "data", torch._neg_view(torch.full((4,), 3.0))))
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            try:
                got, _ = read(victim, np.zeros(1), 1.0)
            except REFUSED:
                continue
            finally:
                gc.set_threshold(700, 10, 10)
            assert got == 8.0, (allocations, got)

        @fast_args
        def increase(x, other):
            for i in range(x.shape[0]):
                x[i] += 1

        def share():
            victim.share_memory_()

        def clone():
            global clone_of_it
            clone_of_it = torch._lazy_clone(victim)

        for _ in range(100):
            victim = torch.zeros(300)
            increase(victim, Evil(share))
            assert victim.tolist() == [1.0] * 300
            victim = torch.zeros(300)
            increase(victim, Evil(clone))
            assert victim.tolist() == [1.0] * 300 and clone_of_it.tolist() == [0.0] * 300
        """
    )
