"""Arrays that outlive their call: memory stays alive as long as somebody holds it, and is given back exactly once."""

import contextlib
import functools
import gc
import weakref

import numba
import numpy as np
import pytest
from made_producers import ONLY_NUMBA, Ledger
from oracle import numbas

from counting import (  # isort: skip
    DELETING, TENSORS, account, check_dies, end_of, forget_notes, kept, memory_of, no_violations, scene, tensor_of,
)
from fastexchange import fast_args

assert no_violations  # a fixture
itself = fast_args(lambda x: x, returns=np.ndarray)
part = fast_args(lambda x: x[1:3], returns=np.ndarray)
two_parts = fast_args(lambda x: (x[:2], (x[2:], 5)), returns=np.ndarray)
beside = fast_args(lambda x, text: x[1:], returns=np.ndarray)
copied = fast_args(lambda x: x.copy(), returns=np.ndarray)
optional = fast_args(lambda x, yes: x[1:] if yes else None, returns=np.ndarray)
held: list = []


@fast_args
def through_objmode(x):
    with numba.objmode():
        held.append(x)


def keep_and_raise(container, x):
    container.append(x[1:])
    raise ValueError("kept")


def filling(keep, **options):
    """A call that gives what this kernel puts into a list."""
    kernel = fast_args(keep, **options)

    def filled(tensor):
        container = numba.typed.List.empty_list(numba.float64[::1])
        with contextlib.suppress(ValueError):
            kernel(container, tensor)
        return container

    return filled


KEEPS = {
    "part": (part, [[1, 2]]),
    "beside what only Numba understands": (lambda x: beside(x, ONLY_NUMBA), [[1, 2, 3]]),
    "two parts": (two_parts, [[0, 1], [2, 3]]),
    "thrice": (fast_args(lambda x: (x[:3], x[:3], x[1:]), returns=np.ndarray), [[0, 1, 2], [0, 1, 2], [1, 2, 3]]),
    "optional": (lambda x: optional(x, True), [[1, 2, 3]]), "nothing": (lambda x: optional(x, False), []),
    "a copy": (copied, [[0, 1, 2, 3]]),
    "in a typed list": (filling(lambda container, x: container.append(x)), [[0, 1, 2, 3]]),
    "a part in a typed list": (filling(lambda container, x: container.append(x[1:])), [[1, 2, 3]]),
    "in a typed list, by a kernel that raises": (filling(keep_and_raise), [[1, 2, 3]]),
    "in a typed list, by a kernel that raises without the GIL": (filling(keep_and_raise, nogil=True), [[1, 2, 3]]),
    "in object mode": (lambda x: through_objmode(x) or held.pop(), [[0, 1, 2, 3]]),
    "a text": (fast_args(lambda x: "text" if x.size else ""), []), "a set": (fast_args(lambda x: {x[0], 1.0}), []),
    "without the GIL": (fast_args(lambda x: x[1:], nogil=True, returns=np.ndarray), [[1, 2, 3]]),
}  # fmt: skip
"""A call that keeps its argument, or not, and the values of the arrays in what it gives."""


def arrays_in(result) -> list:
    if isinstance(result, (tuple, numba.typed.List)):
        return [array for each in result for array in arrays_in(each)]
    return [result] if isinstance(result, np.ndarray) else []


@pytest.mark.filterwarnings("ignore:unsafe cast from readonly")  # Numba's, for legacy exports
@pytest.mark.parametrize(("hold", "values"), KEEPS.values(), ids=KEEPS)
def test_kept_arguments(hold, values):
    """What is kept stays valid without the tensor, and is given back when the last holder goes; also by odd deleters."""
    holds = bool(values) and hold is not copied

    def check(*results):
        for result in results:
            assert [array.tolist() for array in arrays_in(result)] == values
            assert not holds or all(at <= array.ctypes.data < at + 32 for array in arrays_in(result))

    for kind in (*TENSORS, *DELETING):
        ledger, memory = Ledger(), memory_of(0, 1, 2, 3)
        tensor, at, died = tensor_of(kind, memory, ledger), memory.ctypes.data, weakref.ref(memory)
        with scene(kind):
            for _ in range(2 if kind in DELETING else 3):
                check(hold(tensor))
            with kept(tensor):
                results = [hold(tensor) for _ in range(3)]
                exports = int(holds and hasattr(tensor, "ledger"))
                assert ledger.out == 3 * exports
                del results[1]
                gc.collect() if ledger.out != 2 * exports else None
                assert ledger.out == 2 * exports
                check(*results)
                del results
            ledger.check(ledger.made)
            result = hold(tensor)
            forget_notes(tensor)
            del tensor, memory
            gc.collect()
            assert holds == (died() is not None), "the memory has gone" if holds else "the memory is held"
            check(result)
            del result
            check_dies(died)
            ledger.check(ledger.made)


@pytest.mark.parametrize("call", [fast_args(lambda x: [x, x]), fast_args(lambda x: {1: x})], ids=["a list", "a dict"])
def test_results_that_python_has_no_object_for(call):
    for kind in ("numpy", "exchange table", "__dlpack__", "exports only"):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(1, 2), ledger)
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


def test_generators_give_their_arguments_back():
    """Before the first element, after the last. (In between Numba itself keeps them for ever; at no time does it own them.)"""
    for kind in ("__dlpack__", "exports only", "exchange table", "numpy"):
        ledger = Ledger()
        tensor = tensor_of(kind, memory_of(0, 1, 2), ledger)
        for values in ([], [0.0, 1.0, 2.0]):
            with scene(kind), kept(tensor):
                generator = each_of(1.0, 2.0, tensor)
                assert not values or list(generator) == values
                del generator
            ledger.check(ledger.made)
