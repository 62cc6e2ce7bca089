"""Arrays that outlive their call: memory stays alive as long as somebody holds it, and is given back exactly once."""

import collections
import functools
import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np
import pytest
from hostile_producers import FUNCTIONS
from made_producers import ONLY_NUMBA, Dunder, Ledger
from oracle import numbas

from counting import (  # isort: skip
    DELETING, TENSORS, Exported, account, check_dies, end_of, forget_notes, kept, memory_of, no_violations, raised, scene,
    tensor_of,
)
from fastexchange import fast_args

assert no_violations  # a fixture


itself = fast_args(lambda x: x, returns=np.ndarray)
part = fast_args(lambda x: x[1:3], returns=np.ndarray)
two_parts = fast_args(lambda x: (x[:2], (x[2:], 5)), returns=np.ndarray)
thrice = fast_args(lambda x: (x[:3], x[:3], x[1:]), returns=np.ndarray)
beside = fast_args(lambda x, text: x[1:], returns=np.ndarray)
copied = fast_args(lambda x: x.copy(), returns=np.ndarray)
unlocked = fast_args(lambda x: x[1:], nogil=True, returns=np.ndarray)
held: list = []


@fast_args(returns=np.ndarray)
def optional(x, yes):
    if yes:
        return x[1:]
    return None


@fast_args
def keep(container, x):
    container.append(x)


@fast_args
def keep_part(container, x):
    container.append(x[1:])


@fast_args
def through_objmode(x):
    with numba.objmode():
        held.append(x)


def new_list():
    return numba.typed.List.empty_list(numba.float64[::1])


def in_a_list(kernel, tensor):
    container = new_list()
    kernel(container, tensor)
    return container


def in_object_mode(tensor):
    through_objmode(tensor)
    return held.pop()


class Keeps(NamedTuple):
    """``hold(tensor)`` calls a kernel that keeps its argument, and gives what holds it; ``read`` of that gives the arrays."""

    hold: Callable
    values: list
    read: Callable = lambda held: [held]

    @property
    def holds(self) -> bool:
        """Whether what is held has the argument's memory, and so an export where the argument is exported."""
        return bool(self.values) and self.hold is not copied


KEEPS = {
    "part": Keeps(part, [[1, 2]]),
    "beside what only Numba understands": Keeps(lambda x: beside(x, ONLY_NUMBA), [[1, 2, 3]]),
    "two parts": Keeps(two_parts, [[0, 1], [2, 3]], lambda held: [held[0], held[1][0]]),
    "thrice": Keeps(thrice, [[0, 1, 2], [0, 1, 2], [1, 2, 3]], list),
    "optional": Keeps(lambda x: optional(x, True), [[1, 2, 3]]),
    "nothing": Keeps(lambda x: optional(x, False), [], lambda held: []),
    "a copy": Keeps(copied, [[0, 1, 2, 3]]),
    "in a typed list": Keeps(functools.partial(in_a_list, keep), [[0, 1, 2, 3]], list),
    "a part in a typed list": Keeps(functools.partial(in_a_list, keep_part), [[1, 2, 3]], list),
    "in object mode": Keeps(in_object_mode, [[0, 1, 2, 3]]),
    "a text": Keeps(fast_args(lambda x: "text" if x.size else ""), [], lambda held: []),
    "a set": Keeps(fast_args(lambda x: {x[0], 1.0}), [], lambda held: []),
    "without the GIL": Keeps(unlocked, [[1, 2, 3]]),
}


def check_held(way: Keeps, held, memory_at: int) -> None:
    arrays = way.read(held)
    assert [array.tolist() for array in arrays] == way.values
    if way.holds:
        assert all(memory_at <= array.ctypes.data < memory_at + 32 for array in arrays)


@pytest.mark.filterwarnings("ignore:unsafe cast from readonly")  # Numba's, for legacy exports
@pytest.mark.parametrize("name", KEEPS)
def test_kept_arguments(name):
    """What is kept stays valid without the tensor, and is given back when the last holder goes; also by odd deleters."""
    way = KEEPS[name]
    for kind in (*TENSORS, *DELETING):
        ledger, memory = Ledger(), memory_of(0, 1, 2, 3)
        tensor, at = tensor_of(kind, memory, ledger), memory.ctypes.data
        with scene(kind):
            for _ in range(2 if kind in DELETING else 3):
                check_held(way, way.hold(tensor), at)
            with kept(tensor):
                results = [way.hold(tensor) for _ in range(3)]
                out = 1 if way.holds and hasattr(tensor, "ledger") else 0
                assert ledger.out == 3 * out
                del results[1]
                gc.collect() if ledger.out != 2 * out else None
                assert ledger.out == 2 * out
                for result in results:
                    check_held(way, result, at)
                del result, results
            ledger.check(ledger.made)
            result, died = way.hold(tensor), weakref.ref(memory)
            forget_notes(tensor)
            del tensor, memory
            gc.collect()
            assert way.holds == (died() is not None), "the memory has gone" if way.holds else "the memory is held"
            check_held(way, result, at)
            del result
            check_dies(died)
            ledger.check(ledger.made)


def test_a_returned_argument_is_the_argument():
    second, twice = fast_args(lambda x, y: y, returns=np.ndarray), fast_args(lambda x: (x, x, x[1:]))
    for kind in TENSORS:
        ledger, memory = Ledger(), memory_of(0, 1, 2, 3)
        tensor = tensor_of(kind, memory, ledger)
        for kernel, arguments in ((itself, (tensor,)), (second, (1, tensor)), (lambda x: optional(x, True), (tensor,))):
            account(lambda kernel=kernel, arguments=arguments: list(map(id, [kernel(*arguments)])) and None, tensor, times=3)
        if kind in ("numpy", "subclass of numpy"):
            with kept(tensor):
                for _ in range(3):
                    first, same, third = twice(tensor)
                    assert first is same is tensor is itself(tensor) is second(1, tensor) is numbas(itself)(tensor)
                    assert third.tolist() == [1.0, 2.0, 3.0]
                del first, same, third
        del arguments
        ledger.check(ledger.made)


UNBOXED = {"a list": fast_args(lambda x: [x, x]), "a dict": fast_args(lambda x: {1: x})}


@pytest.mark.parametrize("name", UNBOXED)
def test_results_that_python_has_no_object_for(name):
    for kind in ("numpy", "exchange table", "__dlpack__", "exports only"):
        ledger = Ledger()
        tensor, call = tensor_of(kind, memory_of(1, 2), ledger), UNBOXED[name]
        end_of(call, tensor)
        with scene(kind):
            account(functools.partial(call, tensor), tensor, call, ledgers=(ledger,))


def test_views_are_as_writeable_as_their_memory():
    array = np.arange(4.0)
    view = part(array)
    array[1], view[1] = 100, 200
    assert view.tolist() == [100.0, 200.0] and array[2] == 200.0
    array.flags.writeable = False
    assert not any(kernel(array).flags.writeable for kernel in (part, numbas(part), itself))


@fast_args
def each_of(x, y, z):
    for element in z:  # noqa: UP028
        yield element


@pytest.mark.parametrize("is_used", [False, True], ids=["before the first element", "after the last"])
def test_generators_give_their_arguments_back(is_used):
    """(In between Numba itself keeps them for ever; at no time does it own them.)"""
    for kind in ("__dlpack__", "exports only", "exchange table", "numpy"):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(0, 1, 2), ledger)
        with scene(kind), kept(tensor):
            generator = each_of(1.0, 2.0, tensor)
            assert not is_used or list(generator) == [0.0, 1.0, 2.0]
            del generator
        ledger.check(ledger.made)


view_of_two = fast_args(lambda x, y: x[1:], returns=np.ndarray)


@pytest.mark.parametrize("kind", ["exports only", "exchange table", "__dlpack__", "wrapper", "numpy", "subclass of numpy"])
def test_kept_views_among_refused_calls(kind):
    """Views of earlier calls stay valid while later calls are refused; the frames' memory blocks are not mixed up."""
    generator, ledger = np.random.default_rng(7), Ledger()
    tensors = [tensor_of(kind, memory_of(10 * i, 10 * i + 1, 10 * i + 2), ledger) for i in range(6)]
    bad = Dunder(np.ones(3), ledger, lanes=2)
    unlucky = Exported(np.ones(3), ledger, export=FUNCTIONS["raises KeyboardInterrupt"][0])
    with kept(*tensors, bad, unlucky, view_of_two):
        views: collections.deque = collections.deque(maxlen=20)
        for _ in range(200):
            which = int(generator.integers(len(tensors)))
            views.append((which, view_of_two(tensors[which], 1.0)))
            if generator.random() < 0.5:
                assert raised(end_of(view_of_two, tensors[which], bad)) is BufferError
            if generator.random() < 0.3:
                assert raised(end_of(view_of_two, tensors[which], unlucky)) is KeyboardInterrupt
            for index, kept_view in views:
                assert kept_view.tolist() == [10 * index + 1.0, 10 * index + 2.0]
        del kept_view
        assert ledger.out == (20 if "numpy" not in kind else 0)
        views.clear()
    ledger.check(ledger.made)
