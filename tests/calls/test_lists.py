"""Lists of tensors as arguments: read natively, one type for all items, changed as under ``@njit``."""

import gc
import itertools
import sys
import weakref

import numba
import numpy as np
import pytest
from frameworks import FRAMEWORKS, torch
from hypothesis import given
from hypothesis import strategies as st
from made_producers import ONLY_NUMBA, Dunder, Ledger
from oracle import blocks_in_use, is_same

from fastexchange import explain, fast_args, from_dlpack
from fastexchange.ground.parameters import flatten

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


pytestmark = pytest.mark.usefixtures("numba_counts_blocks")


@fast_args
def total(tensors, factor):
    s = 0.0
    for tensor in tensors:
        for value in tensor.flat:
            s += value * factor
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


def arrays(count: int, dtype=np.float64) -> list:
    return [np.arange(i + 1, dtype=dtype) for i in range(count)]


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 300])
def test_every_framework_and_length(framework, count):
    given_arrays = arrays(count)
    tensors = [framework.tensor(array) for array in given_arrays]
    expected = sum(float(array.sum()) for array in given_arrays) * 2
    for _ in range(20):
        assert total(tensors, 2.0) == expected


def test_a_length_is_no_part_of_a_signature():
    kernel = fast_args(lambda tensors: len(tensors))
    for count in (1, 2, 50):
        assert kernel(arrays(count)) == count
    assert len(kernel.signatures) == 1
    calls = kernel.counts()
    assert kernel(arrays(7)) == 7
    assert kernel.counts() == calls._replace(fast=calls.fast + 1)


def test_the_types_are_those_of_njit():
    def plain(tensors):
        return len(tensors)

    kernel, jitted = fast_args(plain), numba.njit(plain)
    for lists in (arrays(2), arrays(2, np.int32), [np.ones((2, 3))] * 2, [np.ones((3, 2)).T] * 2, [np.ones(6)[::2]] * 2):
        assert kernel(lists) == jitted(lists) == 2
    assert kernel.signatures == jitted.signatures


def test_mixed_layouts_have_the_type_that_all_of_them_are():
    kernel = fast_args(lambda tensors: tensors[0][0] + tensors[1][1])
    both = [np.arange(4.0), np.arange(10.0)[::3]]
    assert (kernel(both), kernel(both[::-1])) == (3, 1)
    readonly = np.arange(4.0)
    readonly.flags.writeable = False
    kernel([both[0], readonly])
    unaligned = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float64)
    assert kernel([both[0], unaligned]) == 0
    types = [signature[0].dtype for signature in kernel.signatures]
    assert [t.layout for t in types] == ["A", "C", "C"]
    assert [t.mutable for t in types] == [True, False, True]
    assert [t.aligned for t in types] == [True, True, False]


def test_several_frameworks_in_one_list(framework):
    mixed = [framework.tensor(np.arange(3.0)), np.arange(4.0), framework.tensor(np.arange(5.0))]
    assert total(mixed, 1.0) == 3 + 6 + 10


def test_items_are_written(framework):
    if not framework.mutable:
        pytest.skip("legacy capsules are readonly")
    targets = arrays(3)
    fill([framework.tensor(array) for array in targets], [framework.tensor(np.full_like(array, 7)) for array in targets])
    assert all((array == 7).all() for array in targets)


def test_lists_in_tuples_and_beside_other_arguments():
    @fast_args
    def kernel(pair, scale, *rest):
        s = scale
        for left, right in zip(pair[0], pair[1]):  # noqa: B905  (Numba has no strict=)
            s += left.sum() * right.sum()
        return s + len(rest) + rest[0][0][0]

    x, y = arrays(3), arrays(3)
    for _ in range(20):
        assert kernel((x, y), 1.0, [np.ones(2)], np.ones(1)) == 1 + (0 + 1 * 1 + 3 * 3) + 2 + 1


@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=["with the GIL", "without"])
def test_references(framework, options):
    kernel = fast_args(**options)(lambda tensors: tensors[-1][0])
    tensors = [framework.tensor(array) for array in arrays(70)]
    kernel(tensors)
    before = [sys.getrefcount(tensor) for tensor in tensors], sys.getrefcount(tensors), blocks_in_use()
    for _ in range(20):
        kernel(tensors)
    assert before == ([sys.getrefcount(tensor) for tensor in tensors], sys.getrefcount(tensors), blocks_in_use())


@pytest.mark.slow
def test_many_lists_and_more_arrays_behind_them():
    @fast_args
    def kernel(a, b, c, *rest):
        return len(a) + len(b) + len(c) + len(rest) + rest[-1][0]

    lists = [arrays(count) for count in (50, 60, 63)]
    for count in (1, 14, 70):
        for _ in range(3):
            assert kernel(*lists, *[np.full(1, 0.5)] * count) == 173 + count + 0.5


BY_NAME = {each.name: each for each in FRAMEWORKS}


@st.composite
def lists_of_arrays(draw):
    """(arrays of one element type and rank, where they come from)."""
    dtype, ndim = draw(st.sampled_from(["f4", "i2"])), draw(st.integers(1, 2))
    names, arrays = [], []
    for _ in range(draw(st.integers(1, 5))):
        names.append(draw(st.sampled_from(list(BY_NAME))))
        shape = draw(st.tuples(*[st.integers(0, 3)] * ndim))
        layout = draw(st.sampled_from(["C", "F", "strided", "readonly"]))
        array = np.zeros([2 * extent for extent in shape], dtype)[tuple([slice(None, None, 2)] * ndim)]
        if layout != "strided":
            array = np.array(array, order="F" if layout == "F" else "C")
        array[...] = np.arange(array.size).reshape(shape).astype(dtype)
        array.flags.writeable = layout != "readonly" or not BY_NAME[names[-1]].readonly
        arrays.append(array)
    return arrays, names


described = fast_args(lambda tensors, i: (len(tensors), tensors[i], [tensor.size for tensor in tensors]))


@pytest.mark.slow
@given(lists_of_arrays())
def test_random_lists(case):
    given_arrays, names = case
    frameworks = [BY_NAME[name] for name in names]
    tensors = [each.tensor(array) for each, array in zip(frameworks, given_arrays, strict=True)]
    views = [each.view(tensor, array) for each, tensor, array in zip(frameworks, tensors, given_arrays, strict=True)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for i in range(len(tensors)):
        count, same, sizes = described(tensors, i)
        assert (count, sizes) == (len(tensors), [array.size for array in given_arrays])
        assert same is tensors[i]
        del same
    assert before == [sys.getrefcount(tensor) for tensor in tensors]
    types_given = [numba.typeof(view) for view in views]
    (element,) = {
        signature[0].dtype for signature in described.signatures
        if signature[0].dtype.dtype == types_given[0].dtype and signature[0].dtype.ndim == views[0].ndim
        and signature[0].dtype.mutable == all(t.mutable for t in types_given)
        and signature[0].dtype.layout == unified(views)
    }  # fmt: skip
    assert element.aligned


def unified(views) -> str:
    """The layout that all arrays have."""
    return next((order for order in "CF" if all(view.flags[f"{order}_CONTIGUOUS"] for view in views)), "A")


# ---- what a kernel does to a list ------------------------------------------------------------------------------------


def test_a_changed_list_is_changed(framework):
    for _ in range(20):
        tensors = [framework.tensor(array) for array in (np.ones(3), np.ones(2))]
        first, second = tensors
        assert first_doubled(tensors) is tensors
        assert len(tensors) == 3
        assert tensors[0] is second and tensors[1] is second
        assert from_dlpack(tensors[2]).tolist() == [2.0, 2.0, 2.0]
        assert framework.name not in ("numpy", "torch", "tvm_ffi") or type(tensors[2]) is type(first)


def test_what_a_changed_list_loses_is_set_free(framework):
    @fast_args
    def cut(tensors):
        tensors.pop()
        tensors.pop(0)

    tensors = [framework.tensor(array) for array in arrays(4)]
    cut(tensors[:])
    before = [sys.getrefcount(tensor) for tensor in tensors]
    blocks = blocks_in_use()
    for _ in range(20):
        short = tensors[:]
        cut(short)
        assert len(short) == 2 and short[0] is tensors[1] and short[1] is tensors[2]
    del short
    assert before == [sys.getrefcount(tensor) for tensor in tensors]
    assert blocks == blocks_in_use()


def test_a_list_passed_twice_is_one_list():
    def grow(one, other):
        one.append(other[0])
        return len(other)

    for kernel in (fast_args(grow), numba.njit(grow)):
        x = arrays(2)
        assert kernel(x, x) == 3 and len(x) == 3 and x[2] is x[0]
        y = arrays(2)
        assert kernel(y, y[:]) == 2 and len(y) == 3


def test_a_list_is_changed_although_the_kernel_raises():
    @fast_args
    def kernel(tensors):
        tensors.append(tensors[0])
        raise ValueError("no more")

    for _ in range(3):
        tensors = arrays(1)
        with pytest.raises(ValueError, match="no more"):
            kernel(tensors)
        assert len(tensors) == 2 and tensors[1] is tensors[0]


@needs_torch
def test_a_list_that_cannot_be_changed_as_the_kernel_did():
    @fast_args
    def kernel(tensors):
        tensors[0] = tensors[0][::-1]
        return 1

    for _ in range(3):
        tensors = [torch.ones(6)[::2]]
        with pytest.raises(BufferError, match="negative stride"):
            kernel(tensors)
        assert len(tensors) == 1 and tensors[0].tolist() == [1, 1, 1]
    assert total([torch.ones(2)], 1.0) == 2


def test_items_in_results(framework):
    kernel = fast_args(lambda tensors: (tensors[1], tensors[0][1:], len(tensors)))
    tensors = [framework.tensor(array) for array in (np.arange(3.0), np.arange(4.0))]
    for _ in range(20):
        one, view, count = kernel(tensors)
        assert one is tensors[1] and count == 2
        assert from_dlpack(view).tolist() == [1.0, 2.0]
    blocks = blocks_in_use()
    del tensors, one
    gc.collect()
    assert from_dlpack(view).tolist() == [1.0, 2.0]
    del view
    assert blocks_in_use() < blocks


def test_a_new_list_in_a_result():
    kernel = fast_args(lambda tensors: [tensor * 2 for tensor in tensors])
    for _ in range(3):
        assert [each.tolist() for each in kernel([np.ones(1), np.ones(2)])] == [[2.0], [2.0, 2.0]]


# ---- bound launches --------------------------------------------------------------------------------------------------


def test_bound(framework):
    if not framework.mutable:
        pytest.skip("legacy capsules are readonly")
    targets, values = arrays(70), arrays(70)
    launch = fill.bind([framework.tensor(array) for array in targets], [framework.tensor(array) for array in values])
    blocks = blocks_in_use()
    for factor in (3, 5):
        for array in values:
            array *= factor
        launch()
        assert all(map(np.array_equal, targets, values))
    assert blocks == blocks_in_use()
    with pytest.raises(TypeError, match="another signature"):
        launch.rebind(values=[np.ones(2, np.float32)])
    launch.rebind(values=[np.full_like(array, 2) for array in targets])
    launch()
    assert targets[5].tolist() == [2.0] * 6


def test_bound_items_that_are_kept(framework):
    kernel = fast_args(lambda tensors: (tensors[0][1:], tensors[1]))
    tensors = [framework.tensor(np.arange(3.0)), framework.tensor(np.arange(4.0))]
    launch = kernel.bind(tensors)
    kept = [launch() for _ in range(5)]
    assert all(one is tensors[1] for _, one in kept)
    del launch, tensors
    gc.collect()
    assert [from_dlpack(view).tolist() for view, _ in kept] == [[1.0, 2.0]] * 5
    blocks = blocks_in_use()
    del kept
    assert blocks_in_use() < blocks


def test_a_bound_list_that_the_kernel_changes():
    x = [np.ones(1), np.full(1, 2.0)]
    launch = first_doubled.bind(x)
    for count in (3, 4, 5):
        assert launch() is x
        assert len(x) == count and x[-1].tolist() == [2.0 if count == 3 else 4.0]
    blocks = blocks_in_use()
    del launch, x
    assert blocks_in_use() < blocks


def test_changes_by_a_bound_launch_leave_nothing_behind(framework):
    @fast_args
    def swap(tensors):
        tensors[0], tensors[1] = tensors[1], tensors[0]
        return tensors[0]

    tensors = [framework.tensor(np.full(2, 1.0 * i)) for i in range(2)]
    launch = swap.bind(tensors)
    launch()
    before = blocks_in_use(), [sys.getrefcount(tensor) for tensor in tensors]
    for i in range(40):
        assert launch() is tensors[0] and np.asarray(from_dlpack(tensors[0]))[0] == i % 2
    assert before == (blocks_in_use(), [sys.getrefcount(tensor) for tensor in tensors])
    references = [weakref.ref(tensor) for tensor in tensors if framework.name not in ("tvm_ffi",)]
    del launch, tensors
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_bound_launch_whose_list_becomes_one_that_cannot_be_bound():
    @fast_args
    def drain(tensors):
        while len(tensors):
            tensors.pop()

    x = arrays(2)
    launch = drain.bind(x)
    assert launch() is None and x == []
    with pytest.raises(ValueError, match="empty list"):  # an ordinary call, as under plain Numba
        launch()
    x += arrays(3)
    assert launch() is None and x == []
    launch.rebind(tensors=arrays(2))
    assert launch() is None and launch.arguments == ([],)


@needs_torch
def test_a_bound_launch_whose_change_cannot_be_made_in_python():
    @fast_args
    def turn(tensors):
        tensors[0] = tensors[0][::-1]

    tensors = [torch.arange(6.0)[::2], torch.ones(3)]
    launch = turn.bind(tensors)
    for _ in range(3):
        with pytest.raises(BufferError, match="negative stride"):
            launch()
    blocks = blocks_in_use()
    for _ in range(20):
        with pytest.raises(BufferError, match="negative stride"):
            launch()
    assert tensors[0].tolist() == [0, 2, 4] and blocks_in_use() <= blocks + 1


# ---- other lists, and bad ones ---------------------------------------------------------------------------------------


def test_lists_of_anything_else_are_numbas():
    kernel = fast_args(lambda values: values.append(values[0]))
    floats, texts = [1.5], ["a"]
    kernel(floats)
    kernel(texts)
    assert (floats, texts) == ([1.5, 1.5], ["a", "a"])
    with pytest.raises(ValueError, match="empty list"):
        kernel([])


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 64, 65, 1000])
def test_many_lists_of_anything_beside_what_is_exported(count):
    kernel = fast_args(lambda x, items: x[0] + len(items))
    x = Dunder(np.ones(2))
    if count in (64, 65):  # each length is a type, and compiled: seconds
        assert kernel(x, tuple([np.ones(1)] for _ in range(count))) == 1 + count
    for wrong in ([[1.0] for _ in range(count)], [[np.ones(1)] for _ in range(count)]):
        with pytest.raises((TypeError, numba.core.errors.TypingError)):  # Numba has no lists of lists
            kernel(x, wrong)
        with pytest.raises((TypeError, numba.core.errors.TypingError)):
            kernel.bind(x, wrong)
    assert kernel(x, [x]) == 2


def test_a_list_that_holds_itself():
    kernel = fast_args(lambda tensors: len(tensors))
    tensors = arrays(1)
    tensors.append(tensors)
    for x in (tensors, [*arrays(1), tensors]):
        with pytest.raises(TypeError):
            kernel(x)
    assert kernel(arrays(2)) == 2


def test_frames_of_unusual_size_are_not_kept():
    kernel = fast_args(lambda tensors: len(tensors))
    assert kernel(arrays(1) * 9000) == 9000
    blocks = blocks_in_use()
    assert kernel(arrays(1) * 20000) == 20000
    assert blocks_in_use() < blocks + 9000


@needs_torch
def test_beside_what_only_numba_takes():
    @fast_args
    def kernel(tensors, text):
        tensors.append(tensors[0] + 1)
        tensors[0] = tensors[1]
        return text, tensors[1]

    one, other = torch.ones(2), torch.zeros(3)
    for _ in range(3):
        tensors = [one, other]
        text, back = kernel(tensors, ONLY_NUMBA)
        assert text == ONLY_NUMBA and back is other
        assert tensors[0] is other and tensors[1] is other and tensors[2].tolist() == [2.0, 2.0]
        assert type(tensors[2]) is torch.Tensor


@pytest.mark.parametrize("other", [np.ones(2, np.float32), np.ones((2, 2))], ids=["dtype", "rank"])
def test_items_of_different_types(framework, other):
    with pytest.raises(TypeError) as caught:
        total([framework.tensor(np.ones(2)), framework.tensor(np.ones(2)), framework.tensor(other)], 1.0)
    message = str(caught.value)
    assert message.startswith("total(): argument 'tensors' (position 0): the tensors of a list have one element type")
    assert total([np.ones(2)], 1.0) == 2.0
    with pytest.raises(TypeError, match=r"item 0 is 1-d float64, item 1 \d-d float"):
        total([np.ones(2), other], 1.0)
    assert "refused with TypeError" in total.explain([np.ones(2), other], 1.0).outcome


@needs_torch
def test_refused_items():
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    for bad in (torch.ones(2, requires_grad=True), torch.ones(2, device="meta"), negated):
        tensors = [torch.ones(2), bad]
        before = [sys.getrefcount(tensor) for tensor in tensors]
        with pytest.raises((BufferError, RuntimeError), match=r"argument 'tensors' \(position 0\)"):
            total(tensors, 1.0)
        assert before == [sys.getrefcount(tensor) for tensor in tensors]
    with torch.no_grad():
        assert total([torch.ones(2), torch.ones(2, requires_grad=True)], 1.0) == 4


@needs_torch
def test_lists_in_a_list():
    x = torch.ones(2)
    cyclic = [x]
    cyclic.append(cyclic)
    for bad, words in (([x, [x]], "item 1 a list"), (cyclic, "item 1 a list"), ([[x], [x]], "a list of lists"), ([[x], x], "")):
        count = sys.getrefcount(x)
        for _ in range(2):
            with pytest.raises(TypeError, match=rf"argument 'tensors' \(position 0\).*{words}"):
                total(bad, 1.0)
        assert sys.getrefcount(x) == count
    assert total([x, x], 1.0) == 4


def test_a_list_that_changes_while_it_is_read():
    """What it held when the call began is what the kernel gets."""
    ledger = Ledger()

    class Changes(Dunder):
        def __dlpack__(self, **options):
            tensors.clear()
            gc.collect()
            return super().__dlpack__(**options)

    kernel = fast_args(lambda x, y: x[0][0] + x[3][1] + y[0][0])
    others = [np.ones(1)]
    assert kernel([Dunder(np.ones(2), ledger)] * 4, others) == 3
    for _ in range(20):
        tensors = [Changes(np.full(2, 1.0 * i), ledger) for i in range(1, 5)]
        assert kernel(tensors, others) == 6.0
        assert tensors == []
    ledger.check(ledger.made)


def test_a_producer_that_fails_amid_a_list():
    ledger = Ledger()

    class Fails(Dunder):
        def __dlpack__(self, **options):
            raise BufferError("not today")

    good = [Dunder(np.ones(2), ledger) for _ in range(70)]
    for _ in range(3):
        with pytest.raises(BufferError, match=r"argument 'tensors' \(position 0\).*not today"):
            total([*good, Fails(np.ones(2), ledger)], 1.0)
    ledger.check(ledger.made)
    assert total(good, 1.0) == 140


def test_explained():
    assert explain([np.ones(2)]).path == "list"
    total([np.ones(2)], 1.0)
    text = str(total.explain([np.ones(2)], 1.0))
    assert "native from the first argument" in text and "list(array(float64, 1d, C))" in text


def test_a_copy_of_the_arrays_is_not_made(framework):
    kernel = fast_args(lambda tensors: tensors[0])
    array = np.arange(3.0)
    assert is_same(kernel([framework.tensor(array)]), array)


def of_itself():
    tensors = [Dunder(np.ones(2), Ledger())]
    tensors += [tensors] * 20
    return tensors


def test_a_list_of_itself_is_entered_once():
    """There are 20**8 ways to the items of this one, down to the depth at which the search ends."""
    tensors = of_itself()
    value = tensors, 5, tensors
    found = list(itertools.islice(flatten(3, value), 100))
    assert [id(item) for _, item in found] == list(map(id, [value, tensors, *tensors, 5, tensors]))
    assert [found[i][0].place for i in (2, 3, 24)] == [(0, 0), (0, 1), (2,)]
    for refused in (total, total.bind):
        with pytest.raises((TypeError, ValueError)):
            refused(tensors, 1.0)


def test_a_tuple_with_indexing_of_its_own_is_no_tensor():
    class Odd(tuple):
        def __getitem__(self, index):
            raise AssertionError("asked")

    for refused in (total, total.bind):
        with pytest.raises(TypeError, match="Odd is no tensor"):
            refused(Odd((np.ones(2),)), 1.0)
