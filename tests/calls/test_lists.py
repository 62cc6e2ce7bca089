"""Lists of tensors as arguments: read natively, one type for all items, changed as under ``@njit``. And tuples."""

import collections
import functools
import gc
import itertools
import re
import sys
import weakref

import numba
import numpy as np
import pytest
from cache_entries import cache_entries
from frameworks import FRAMEWORKS, each_mutable_framework, needs_torch, torch
from made_producers import ONLY_NUMBA, Dunder, Ledger, borrow, ffi, tabled_type
from numba import literal_unroll
from oracle import blocks_in_use, check_same_as_njit, references_kept, type_and_message, unchanged
from raising import check_raises
from ways import Acting

from fastexchange import fast_args, from_dlpack
from fastexchange.ground.parameters import flatten

pytestmark = pytest.mark.usefixtures("numba_counts_blocks")
WARM = 4  # the first call makes the cache entry
Pair = collections.namedtuple("Pair", "left right")


@fast_args
def total(tensors, factor):
    s = 0.0
    for tensor in tensors:
        s += tensor.sum() * factor
    return s


@fast_args
def fill(tensors, values):
    for i in range(len(tensors)):
        tensors[i][:] = values[i]


@fast_args
def first_doubled(tensors):
    tensors.append(tensors[0] * 2)
    tensors[0] = tensors[1]
    return tensors


@fast_args
def swap(tensors):
    tensors[0], tensors[1] = tensors[1], tensors[0]
    return tensors[0]


@fast_args
def turn_first(tensors):
    tensors[0] = tensors[0][::-1]


unlocked_total = fast_args(total.py_func, nogil=True)
length = fast_args(lambda tensors: len(tensors))
item_and_view = fast_args(lambda tensors: (tensors[1], tensors[0][1:], len(tensors)))
LIKE_ARRAYS = [lambda array: array, *([torch.from_numpy] if torch is not None else [])]


def arrays(count: int, dtype=np.float64) -> list:
    return [np.arange(i + 1, dtype=dtype) for i in range(count)]


def tensors_of(framework, arrays: list) -> list:
    return [framework.tensor(array) for array in arrays]


def blocks_kept():
    """After the block there are as many of Numba's memory blocks as before it."""
    return unchanged(blocks_in_use)


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_every_framework_and_length(framework):
    for kernel, count in itertools.product((total, unlocked_total), (1, 2, 64, 65, 300)):
        tensors, wanted = tensors_of(framework, arrays(count)), 2.0 * sum(array.sum() for array in arrays(count))
        kernel(tensors, 2.0)
        with blocks_kept(), references_kept(*tensors, tensors):
            assert [kernel(tensors, 2.0) for _ in range(WARM)] == [wanted] * WARM
        mixed = [tensors[0], np.arange(4.0), framework.tensor(np.arange(5.0))]
        assert kernel(mixed, 1.0) == kernel(mixed[::-1], 1.0) == 6 + 10


def test_the_types_are_those_of_njit_and_have_no_length():
    for tensors in (arrays(2), arrays(2, np.int32), [np.ones((2, 3))] * 2, [np.ones((3, 2)).T] * 2, [np.ones(6)[::2]] * 2):
        assert check_same_as_njit(length, (tensors,)) == 2
    calls = length.counts()
    assert [length(arrays(count)) for count in (1, 2, 50)] == [1, 2, 50] and length.counts().fast == calls.fast + 3


def test_lists_in_tuples_and_beside_other_arguments():
    kernel = fast_args(lambda pair, by, *rest: pair[0][2].sum() * pair[1][2].sum() + by + len(rest) + rest[0][0][0] + rest[-1][0])
    for behind in (1, 14, 70):
        for _ in range(4):
            assert kernel((arrays(3), arrays(3)), 1.0, [np.ones(2)] * 63, *[np.ones(1)] * behind) == 13 + behind


ITEMS = {
    "C": np.ones((2, 3), "f4"), "F": np.ones((3, 2), "f4").T, "strided": np.ones((4, 6), "f4")[::2, ::2],
    "C and F": np.ones((1, 1), "f4"), "empty": np.ones((0, 2), "f4"), "readonly": np.ones((2, 3), "f4"),
}  # fmt: skip
ITEMS["readonly"].flags.writeable = False


def common_type(views) -> numba.types.Array:
    """The type that all arrays are of."""
    layout = next((order for order in "CF" if all(view.flags[f"{order}_CONTIGUOUS"] for view in views)), "A")
    return numba.types.Array(numba.float32, 2, layout, readonly=not all(view.flags.writeable for view in views))


def test_items_of_several_layouts_and_frameworks():
    """In this order: a list of several layouts also takes a signature for all layouts that another has had compiled."""
    kernel = fast_args(lambda tensors, i: (len(tensors), tensors[i], tensors[i].size))
    for layouts in itertools.combinations_with_replacement(ITEMS, 2):
        for frameworks in itertools.product(FRAMEWORKS, repeat=2):
            arrays = [ITEMS[layout][...] for layout in layouts]
            if all(array.flags.writeable or each.readonly for each, array in zip(frameworks, arrays, strict=True)):
                tensors = [each.tensor(array) for each, array in zip(frameworks, arrays, strict=True)]
                views = [each.view(*pair) for each, *pair in zip(frameworks, tensors, arrays, strict=True)]
                before = [sys.getrefcount(tensor) for tensor in tensors]
                for i in range(2):
                    count, same, size = kernel(tensors, i)
                    assert (count, size) == (2, arrays[i].size) and same is tensors[i]
                    del same
                assert [sys.getrefcount(tensor) for tensor in tensors] == before
                assert common_type(views) in [signature[0].dtype for signature in kernel.signatures], (layouts, frameworks)


# ---- what a kernel does to a list ------------------------------------------------------------------------------------
def test_a_changed_list_is_changed_and_what_it_loses_is_set_free(framework):
    for _ in range(4):
        first, second = tensors = tensors_of(framework, [np.ones(3), np.ones(2)])
        assert first_doubled(tensors) is tensors and len(tensors) == 3 and tensors[0] is tensors[1] is second
        assert from_dlpack(tensors[2]).tolist() == [2.0, 2.0, 2.0]
        assert framework.name not in ("numpy", "torch", "tvm_ffi") or type(tensors[2]) is type(first)
    cut, tensors = fast_args(lambda tensors: (tensors.pop(), tensors.pop(0))[2:]), tensors_of(framework, arrays(4))
    cut(tensors[:])
    with blocks_kept(), references_kept(*tensors):
        for short in [tensors[:] for _ in range(WARM)]:
            cut(short)
            assert len(short) == 2 and short[0] is tensors[1] and short[1] is tensors[2]
        del short


def test_a_list_passed_twice_is_one_list_and_is_changed_although_the_kernel_raises():
    def grow(before, one, other):
        one.append(other[0])
        if len(other) == 4:
            raise ValueError("no more")
        return len(before), len(other)

    for kernel in (numba.njit(grow), fast_args(grow)):
        x, y, z = arrays(2), arrays(2), arrays(2)
        assert kernel(arrays(1), x, x) == (1, 3) and len(x) == 3 and x[2] is x[0]
        assert kernel(arrays(1), y, y[:]) == (1, 2) and len(y) == 3 and kernel(z, z, x) == (3, 3) and z[2] is x[0]
    for x in [arrays(3) for _ in range(3)]:
        assert type_and_message(kernel, arrays(1), x, x) == (ValueError, "no more") and len(x) == 4 and x[3] is x[0]


@needs_torch
def test_a_list_that_cannot_be_changed_as_the_kernel_did():
    tensors = [torch.arange(6.0)[::2], torch.ones(3)]
    for call in (lambda: turn_first(tensors), turn_first.bind(tensors)):
        blocks = []
        for _ in range(7):
            check_raises(BufferError, "negative stride", call)
            blocks.append(blocks_in_use())
        assert blocks[6] <= blocks[2] + 1 and len(tensors) == 2 and tensors[0].tolist() == [0, 2, 4]
    assert total([torch.ones(2)], 1.0) == 2


def test_items_in_results(framework):
    for bind in (item_and_view.bind, lambda tensors: functools.partial(item_and_view, tensors)):
        tensors = tensors_of(framework, [np.arange(3.0), np.arange(4.0)])
        call = bind(tensors)
        results = [call() for _ in range(4)]
        assert all(one is tensors[1] and count == 2 for one, _, count in results)
        del call, tensors
        gc.collect()
        assert [from_dlpack(view).tolist() for _, view, _ in results] == [[1.0, 2.0]] * 4
        blocks = blocks_in_use()
        del results
        assert blocks_in_use() < blocks


# ---- bound launches --------------------------------------------------------------------------------------------------
@each_mutable_framework
def test_bound(framework):
    targets, values = arrays(70), arrays(70)
    given = tensors_of(framework, targets), tensors_of(framework, values)
    launch = fill.bind(*given)
    fill(*given)
    assert all(map(np.array_equal, targets, values))
    launch()  # a frame that is large enough is kept
    with blocks_kept():
        for factor in (3, 5):
            for array in values:
                array *= factor
            launch()
            assert all(map(np.array_equal, targets, values))
    launch.rebind(values=[np.full_like(array, 2) for array in targets])
    launch()
    assert targets[5].tolist() == [2.0] * 6


def test_a_bound_list_that_the_kernel_changes():
    x = [np.ones(1), np.full(1, 2.0)]
    launch = first_doubled.bind(x)
    for count in (3, 4, 5):
        assert launch() is x and len(x) == count and x[-1].tolist() == [2.0 if count == 3 else 4.0]
    blocks = blocks_in_use()
    del launch, x
    assert blocks_in_use() < blocks


def test_changes_by_a_bound_launch_leave_nothing_behind(framework):
    tensors = tensors_of(framework, [np.full(2, 1.0 * i) for i in range(2)])
    launch = swap.bind(tensors)
    launch()
    with blocks_kept(), references_kept(*tensors):
        for i in range(4):
            assert launch() is tensors[0] and np.asarray(from_dlpack(tensors[0]))[0] == i % 2
    references = [weakref.ref(tensor) for tensor in tensors if framework.name != "tvm_ffi"]
    del launch, tensors
    gc.collect()
    assert all(reference() is None for reference in references)


def test_a_bound_launch_whose_list_becomes_one_that_cannot_be_bound():
    x = arrays(2)
    launch = fast_args(lambda tensors: tensors.clear()).bind(x)
    assert launch() is None and x == []
    check_raises(ValueError, "empty list", launch)  # an ordinary call, as under plain Numba
    x += arrays(3)
    assert launch() is None and x == []
    launch.rebind(tensors=arrays(2))
    assert launch() is None and launch.arguments == ([],)


# ---- other lists, and bad ones ---------------------------------------------------------------------------------------
def test_lists_of_anything_else_and_beside_what_only_numba_takes():
    kernel = fast_args(lambda values, text: values.append(values[0] + values[0]))
    for first in (1.5, "a", *(make(np.ones(2)) for make in LIKE_ARRAYS)):
        for text in ("", "", ONLY_NUMBA, ONLY_NUMBA):
            values = [first]
            kernel(values, text)
            assert len(values) == 2 and type(values[1]) is type(first)
            assert type(first) in (float, str) or values[0] is first
    check_raises(ValueError, "empty list", kernel, [], "")


@pytest.mark.slow
def test_many_lists_beside_what_is_exported():
    kernel, x = fast_args(lambda x, items: x[0] + len(items)), Dunder(np.ones(2))
    for count, item in itertools.product((60, 1000), (1.0, np.ones(1))):  # Numba has no lists of lists
        check_raises((TypeError, numba.core.errors.TypingError), None, kernel, x, [[item] for _ in range(count)])
    assert kernel(x, [x]) == 2
    assert kernel(x, tuple([np.ones(1)] for _ in range(65))) == 66  # more than fit a frame


def test_frames_of_unusual_size_are_not_kept():
    assert length(arrays(1) * 9000) == 9000
    blocks = blocks_in_use()
    assert length(arrays(1) * 20000) == 20000 and blocks_in_use() < blocks + 9000


def test_items_of_different_types(framework):
    said = r"^total\(\): argument 'tensors' \(position 0\): the tensors of a list have one element type"
    for other in (np.ones(2, np.float32), np.ones((2, 2))):
        check_raises(TypeError, said, total, tensors_of(framework, [np.ones(2), np.ones(2), other]), 1.0)
        assert total([np.ones(2)], 1.0) == 2.0
        check_raises(TypeError, r"item 0 is 1-d float64, item 2 \d-d float", total, [np.ones(2), np.ones(2), other], 1.0)
        assert "refused with TypeError" in total.explain([np.ones(2), other], 1.0).outcome


@fast_args
def walked(xs):
    found = 0.0
    for each in literal_unroll(xs):
        found += each.sum()
    return found


def test_a_tuple_of_different_types_is_walked_as_the_message_says(framework):
    given = tensors_of(framework, [np.ones(2), np.ones(3, np.int32), np.ones((2, 2))])
    assert walked(tuple(given)) == walked(tuple(given)) == 9.0
    advice = re.escape("pass a tuple: `from numba import literal_unroll`, `for each in literal_unroll(xs)`") + "$"
    for kernel, mixed in ((walked, given), (fast_args(lambda xs: len(xs)), [np.ones(2), 1])):
        check_raises(TypeError, advice, kernel, mixed)


def of_itself(x, times: int) -> list:
    made = [x]
    made += [made] * times
    return made


def test_lists_in_a_list():
    in_it = "item 1 a list"
    for x in [Dunder(np.ones(2)), *([torch.ones(2)] if torch is not None else [])]:
        for bad, words in (([x, [x]], in_it), (of_itself(x, 1), in_it), ([[x], [x]], "a list of lists"), ([[x], x], "")):
            with references_kept(x):
                for _ in range(2):
                    check_raises(TypeError, rf"argument 'tensors' \(position 0\).*{words}", total, bad, 1.0)
        assert total([x, x], 1.0) == 2 * np.asarray(from_dlpack(x)).sum()


def test_a_list_of_itself_is_entered_once():
    """There are 20**8 ways to the items of this one, down to the depth at which the search ends."""
    tensors = of_itself(Dunder(np.ones(2)), 20)
    value = tensors, 5, tensors
    found = list(itertools.islice(flatten(3, value), 100))
    assert [id(item) for _, item in found] == list(map(id, [value, tensors, *tensors, 5, tensors]))
    assert [found[i][0].place for i in (2, 3, 24)] == [(0, 0), (0, 1), (2,)]
    check_raises((TypeError, ValueError), None, total, tensors, 1.0)


def test_a_list_that_changes_while_it_is_read():
    ledger, others = Ledger(), [np.ones(1)]
    kernel = fast_args(lambda x, y: x[0][0] + x[3][1] + y[0][0])
    assert kernel([Dunder(np.ones(2), ledger)] * 4, others) == 3
    for _ in range(4):
        tensors = [Acting(np.full(2, 1.0 * i), ledger) for i in range(1, 5)]
        for i in range(4):
            tensors[i].act = lambda: (tensors.clear(), gc.collect())  # noqa: B023
        assert kernel(tensors, others) == 6.0 and tensors == []
    ledger.check(ledger.made)


def test_a_producer_that_fails_amid_a_list():
    ledger = Ledger()
    good, bad = [Dunder(np.ones(2), ledger) for _ in range(70)], Acting(np.ones(2), ledger)
    bad.act = lambda: 1 / 0
    for _ in range(3):
        check_raises(ZeroDivisionError, "division by zero", total, [*good, bad], 1.0)
    ledger.check(ledger.made)
    assert total(good, 1.0) == 140


def test_a_tuple_with_indexing_of_its_own_is_no_tensor():
    odd = type("Odd", (tuple,), {"__getitem__": lambda self, index: pytest.fail("asked")})
    check_raises(TypeError, "Odd is no tensor", total, odd((np.ones(2),)), 1.0)


# ---- tuples in cached calls: each item is read by a row of its own, whatever its type is in this call ---------------
def test_items_of_other_types_get_a_cache_entry_of_their_own():
    kernel = fast_args(lambda pair: pair[0][0] - pair[1][0])
    x, y, of = np.array([1.0]), np.array([5.0]), [tabled_type("Other"), *LIKE_ARRAYS]
    for left, right in list(itertools.product(of, of)) * WARM:
        assert kernel((left(x), right(y))) == -4.0
    assert len(kernel.signatures) == 1 and len(cache_entries(kernel)) == min(len(of) ** 2, 8)


def test_lengths_named_tuples_and_lists():
    kernel, fields = fast_args(lambda items: len(items)), fast_args(lambda pair, by: (pair.right[0] + by, pair.left))
    listed = fast_args(lambda pair, items: pair[0][0][0] + items[0][0])
    x, pair = np.ones(1), Pair(np.array([1.0]), np.array([2.0]))
    for _ in range(WARM):
        assert [kernel((x,) * length) for length in (0, 1, 2, 5)] == [0, 1, 2, 5] and kernel(pair) == 2
        value, same = fields(pair, 0.5)
        assert value == 2.5 and same is pair.left and listed(([x],), [x]) == listed(([x], x), [x]) == 2.0
    assert len(kernel.signatures) == 5 and len(cache_entries(fields)) == 1


def test_a_producer_that_fails_amid_a_tuple():
    """By its table, which the cached call asks; with a view that is written already."""

    @ffi.callback("int(void *, DLTensor *)")
    def view(py_object, out):
        return borrow(py_object, out) or -(int(ffi.cast("intptr_t", py_object)) == id(bad))

    cls = tabled_type("Failing", dltensor_from_py_object_no_sync=view)
    kernel = fast_args(lambda x, pair: x[0] + pair[1][0])
    good, bad = cls(np.ones(1)), cls(np.ones(1))
    assert [kernel(good, (1, good)) for _ in range(WARM)] == [2.0] * WARM and len(cache_entries(kernel)) == 1
    with references_kept(good, bad):
        for _ in range(3):
            check_raises(BufferError, r"argument 'pair' \(position 1\)", kernel, good, (1, bad))
            assert kernel(good, (1, good)) == 2.0
