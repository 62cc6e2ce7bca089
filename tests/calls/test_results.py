"""Results: arrays that a kernel returns are tensors of the caller's framework, over the same memory, which somebody owns."""

import collections
import gc
import sys
import weakref

import numba
import numpy as np
import pytest
from frameworks import FRAMEWORKS, NUMPY_DTYPES, has_table, needs_torch, torch, tvm_ffi
from hostile_producers import _do, _native, setting
from interoperability import Wrapper, jax, pyarrow
from made_producers import ONLY_NUMBA, Dunder, Ledger, SaysType, Tabled, ffi, tabled_type
from numba import types
from oracle import blocks_in_use, is_same, numbas, references_kept, type_and_message
from raising import check_raises

from fastexchange import fast_args, from_dlpack

pytestmark = pytest.mark.usefixtures("numba_counts_blocks")
WARM = 4
"""Calls after which those of a kind have a cache entry."""
Pair = collections.namedtuple("Pair", "first second")

doubled, copied = fast_args(lambda x: x + x), fast_args(lambda x: x.copy())
itself, itself_unlocked = fast_args(lambda x: x), fast_args(lambda x: x, nogil=True)
tail, swapped = fast_args(lambda x: x[1:]), fast_args(lambda x, y: (y, x))


@fast_args
def made_and_where(x):
    y = x + 1
    return y, y.ctypes.data


_MADE = {"exchange table": Tabled, "torch": torch and torch.Tensor, "tvm_ffi": tvm_ffi and tvm_ffi.Tensor}
SHARING = {each.name: (each.tensor, _MADE.get(each.name, np.ndarray)) for each in FRAMEWORKS} | {"wrapper": (Wrapper, np.ndarray)}
"""By name: a tensor of a NumPy array, and the type that its framework's new tensors have."""
RETURNED = dict(SHARING)
if jax is not None:
    SHARING["jax"] = RETURNED["jax"] = jax.numpy.asarray, jax.Array
if pyarrow is not None:
    makes = hasattr(pyarrow, "from_dlpack") or hasattr(pyarrow.Array, "from_dlpack")  # younger versions
    RETURNED["pyarrow"] = pyarrow.array, pyarrow.Array if makes else np.ndarray
of_each, of_each_returned = (pytest.mark.parametrize("name", names) for names in (SHARING, RETURNED))


def elements(tensor):
    return from_dlpack(tensor).tolist()


# ---- new arrays ------------------------------------------------------------------------------------------------------
@of_each_returned
def test_a_new_array_is_a_tensor_of_the_callers_framework(name):
    array = np.arange(6, dtype=np.float32)
    tensor_of, cls = RETURNED[name]
    tensor = tensor_of(array)
    for call in range(WARM):
        made = doubled(tensor)
        assert isinstance(made, cls) and elements(made) == (2 * array).tolist(), (type(made), call)
    assert from_dlpack(made).dtype == np.float32


@pytest.mark.parametrize("name", ["numpy", *["torch"] * has_table()])
def test_native_code_makes_tensors(name):
    """Warm calls run no Python code where native code makes them."""
    tensor = RETURNED[name][0](np.arange(6.0))
    filled = fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(x[0]))
    for kernel in (doubled, tail, itself, filled, fast_args(lambda x: ((x * 2, x.sum()), x[::2]))):
        for _ in range(WARM):
            kernel(tensor)
        events = []
        sys.setprofile(lambda frame, event, _: event == "call" and events.append(frame.f_code))  # noqa: B023
        try:
            kernel(tensor)
        finally:
            sys.setprofile(None)
        assert not events, (kernel, events)


def test_a_call_without_a_framework_makes_arrays():
    for kernel, argument in ((lambda x: np.full(2, x[0]), memoryview(np.arange(3.0))), (lambda n: np.zeros(n), 3)):
        assert type(fast_args(kernel)(argument)) is np.ndarray


OF_DTYPES = [(dtype, (3,)) for dtype in NUMPY_DTYPES if dtype != "f2"]  # which Numba compiles no copy of
OF_SHAPES = [("f8", shape) for shape in [(), (0,), (1,), (2, 0, 3), (2, 3, 4)]]


@needs_torch
def test_dtypes_shapes_and_layouts():
    for dtype, shape in OF_DTYPES + OF_SHAPES:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        for _ in range(2):
            made = copied(torch.from_numpy(array))
            assert made.dtype == torch.from_numpy(array).dtype and is_same(made, numbas(copied)(array))
    made = fast_args(lambda x: (np.ones((2, 3)).T, np.arange(24.0).reshape(2, 3, 4)[:, ::2, 1:], np.zeros((4, 4))[::2]))
    first, second, third = made(torch.ones(1))
    assert first.stride() == (1, 3) and third.stride() == (8, 1) and second.storage_offset() == 0
    assert second.tolist() == np.arange(24.0).reshape(2, 3, 4)[:, ::2, 1:].tolist()


@of_each
def test_memory_is_shared_and_freed_with_the_last_tensor(name):
    tensor = SHARING[name][0](np.arange(128.0))
    made_and_where(tensor)
    before = blocks_in_use()
    for _ in range(3):
        made, where = made_and_where(tensor)
        assert name == "jax" or from_dlpack(made).ctypes.data == where  # which copies what is not aligned to its taste
        assert elements(made) == list(range(1, 129))
    many_made = [made_and_where(tensor)[0] for _ in range(WARM)]
    assert [elements(each)[-1] for each in many_made] == [128.0] * WARM
    del made, many_made
    assert blocks_in_use() == before


@needs_torch
def test_a_result_can_be_written_to_and_differentiated_but_not_resized():
    made = doubled(torch.ones(3))
    made += 1
    assert made.tolist() == [3.0] * 3 and not made.requires_grad and made.requires_grad_().sum().backward() is None
    with torch.inference_mode():
        assert doubled(torch.ones(3)).tolist() == [2.0] * 3
    check_raises((RuntimeError,), None, doubled(torch.ones(3)).resize_, 1000)  # it does not belong to PyTorch's allocator


# ---- arguments and views of them -------------------------------------------------------------------------------------
@of_each_returned
def test_an_argument_is_returned_as_that_very_object(name):
    tensor = RETURNED[name][0](np.arange(4.0))
    with references_kept(tensor):
        for kernel in (itself, itself_unlocked):
            assert all(kernel(tensor) is tensor for _ in range(WARM)) and kernel(x=tensor) is tensor


strided = fast_args(lambda x, step, _: np.lib.stride_tricks.as_strided(x, x.shape, (4 * step, 4)))


@of_each
def test_strides_that_lead_to_no_element_make_another_array_of_an_ndarray_only(name):
    """PyTorch 2.8 exports others than a tensor has; of an ndarray they can be seen, and Numba compares them."""
    tensor_of, is_ndarray = SHARING[name][0], name == "numpy"
    for shape in ((1, 3), (0, 3)):
        tensor = tensor_of(np.ones(shape, np.float32))
        for way in ("", ONLY_NUMBA):
            assert all((strided(tensor, 9, way) is tensor) != is_ndarray for _ in range(WARM)), (shape, way)
    pairs = tensor_of(np.ones((2, 3), np.float32))
    assert all(strided(pairs, 1, way) is not pairs for way in ("", ONLY_NUMBA) for _ in range(WARM))


ARRAYS = [
    np.zeros(()), np.zeros(0), np.zeros((2, 0)), np.ones((1, 1)), np.ones((2, 3)).T, np.ones((4, 4))[::2, 1:],
    np.arange(3.0)[::-1], np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4"), ("b", "f8")]),
]  # fmt: skip


def views(x):
    return x[:3], x.reshape(2, 2), x.view(np.int64), x[::-1], x.T[1:]


def test_arrays_of_all_kinds_are_returned_as_they_are_and_what_differs_is_no_argument():
    other = np.ones(3)
    for array in ARRAYS * 3:
        y, x = swapped(other, array)
        assert y is array is itself(array) and x is other
    x, kernel = np.arange(4.0), fast_args(views)
    for _ in range(3):
        for made, wanted in zip(kernel(x), views(x), strict=True):
            assert made is not x and np.array_equal(made, wanted) and made.dtype == wanted.dtype


@of_each
def test_a_view_of_an_argument_keeps_it_alive(name):
    tensor_of, cls = SHARING[name]
    for calls in (1, 2, WARM):
        array, died = np.arange(1000.0), []
        tensor = tensor_of(array)
        for _ in range(calls):
            made = tail(tensor)
        assert isinstance(made, cls)
        if name != "jax":
            assert from_dlpack(made).ctypes.data == from_dlpack(tensor).ctypes.data + 8
            weakref.finalize(array, died.append, True)
        del tensor, array
        gc.collect()
        assert not died and elements(made) == list(range(1, 1000))
        del made
        gc.collect()
        assert name in ("jax", "exchange table") or died == [True], calls  # whose views are noted


# ---- tuples, lists, several frameworks -------------------------------------------------------------------------------
@of_each
def test_nests(name):
    many = fast_args(lambda x, y: (x, Pair(np.ones(3), (y[1:], 2.5)), y, x.size))
    tensor_of, cls = SHARING[name]
    x, y = tensor_of(np.arange(3.0)), tensor_of(np.arange(4.0))
    with references_kept(x, y):
        for _ in range(WARM):
            first, pair, second, size = many(x, y)
            assert first is x and second is y and size == 3
            assert type(pair) is Pair and isinstance(pair.first, cls) and isinstance(pair.second[0], cls)
            assert elements(pair.first) == [1.0] * 3 and elements(pair.second[0]) == [1.0, 2.0, 3.0] and pair.second[1] == 2.5
        del first, pair, second


@needs_torch
def test_lists_and_optionals_are_of_the_first_tensors_framework():
    made = fast_args(lambda x: [x[1:], x.copy(), x])(torch.arange(3.0))
    assert [(type(each), each.tolist()) for each in made] == [(torch.Tensor, each) for each in ([1, 2], [0, 1, 2], [0, 1, 2])]
    perhaps = fast_args(lambda x, n: x.copy() if n > 0 else None)
    kernel, two = fast_args(lambda n, pair, y: (np.ones(n), pair[0])), fast_args(lambda x, y: x + y)
    array, tensor = np.ones(2), torch.ones(2)
    for _ in range(WARM):
        assert type(perhaps(tensor, 1)) is torch.Tensor and perhaps(tensor, 0) is None
        assert type(kernel(2, (array, tensor), tensor)[0]) is np.ndarray
        made, same = kernel(2, (tensor, array), array)
        assert type(made) is torch.Tensor and same is tensor
        assert type(two(array, tensor)) is np.ndarray and type(two(tensor, array)) is torch.Tensor


@needs_torch
def test_returns():
    array, tensor = np.ones(2), torch.ones(2)
    by_name = fast_args(returns="y")(lambda x, y: x + y)
    numpys, torchs = fast_args(returns=np.ndarray)(lambda x: (x + 1, x)), fast_args(returns=torch.Tensor)(lambda n: np.zeros(n))
    for _ in range(WARM):
        assert type(by_name(array, tensor)) is torch.Tensor and type(by_name(tensor, array)) is np.ndarray
        assert type(by_name(y=tensor, x=array)) is torch.Tensor
        made, same = numpys(tensor)
        assert type(made) is np.ndarray and same is tensor and type(torchs(3)) is torch.Tensor
    assert by_name.returns == "y" and numpys.returns is np.ndarray and itself.returns is None
    with torch.no_grad():
        assert type(doubled(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor
    other = fast_args(by_name, returns="x")
    assert fast_args(by_name) is by_name and other is not by_name and (by_name.returns, other.returns) == ("y", "x")
    assert type(other(array, tensor)) is np.ndarray and other.signatures == by_name.signatures


SUBCLASSES = (np.matrix, np.ma.MaskedArray, *([torch.nn.Parameter] if torch is not None else []))
NO_RETURNS = [
    ((3, [np.ndarray], np.zeros(1), list[int], SaysType()), TypeError, "returns is a type of tensors, the name of a parameter"),
    ((int, object, str, memoryview, Dunder), TypeError, "returns is a type of tensors that can be made"),
    (SUBCLASSES, TypeError, r"its framework makes a (numpy.ndarray|torch.Tensor); pass that type"),
    (("y", "rest", ""), ValueError, r"names no parameter of .*<lambda>\(x, \*rest\)"),
]


def test_what_returns_cannot_be():
    for values, error, words in NO_RETURNS:
        for value in values:
            check_raises(error, words, fast_args, lambda x, *rest: x, returns=value)
    named = fast_args(lambda x, n: np.zeros(n), returns="n")
    for x in (np.ones(2), np.ones(2), "text", "text"):
        check_raises(TypeError, r"argument 'n' \(position 1\).*returns='n'.*int", named, x, 3)


by_numba = fast_args(lambda x, text, n: (x, Pair(x[1:], np.zeros(n)), [x.copy()], n, text))
numpys_by_numba = fast_args(lambda x, text: x + 1, returns=np.ndarray)
named_by_numba = fast_args(lambda x, text, y: x + 1, returns="y")


@of_each
def test_calls_through_numbas_dispatcher(name):
    tensor_of, cls = SHARING[name]
    tensor = tensor_of(np.arange(3.0))
    for _ in range(2):
        same, pair, copies, n, text = by_numba(tensor, "text", 2)
        assert same is tensor and (n, text) == (2, "text") and type(pair) is Pair and type(copies) is list
        assert all(isinstance(each, cls) for each in (*pair, *copies))
        assert [elements(each) for each in (*pair, *copies)] == [[1.0, 2.0], [0.0, 0.0], [0.0, 1.0, 2.0]]
    assert type(numpys_by_numba(tensor, "text")) is type(named_by_numba(tensor, "text", np.ones(3))) is np.ndarray


# ---- what cannot be made ---------------------------------------------------------------------------------------------
PACKED, READONLY = np.zeros(3, [("a", "i4"), ("b", "f8")]), np.arange(3.0)
READONLY.flags.writeable = False
NO_TENSORS = {
    "negative stride, alone": (np.ones(3), lambda x, y: x[::-1]),
    "negative stride, in a named tuple": (np.ones(3), lambda x, y: Pair(np.ones(3), x[::-1])),
    "negative stride, in a list": (np.ones(3), lambda x, y: [x[::-1], x[::-1]]),
    "negative stride, twice": (np.ones(3), lambda x, y: (x[::-1], x[1:], x[::-1], x.copy())),
    "readonly, in a tuple": (READONLY, lambda x, y: (np.ones(3), (x, y[1:]), np.ones(4))),
    "datetime64, in a tuple": (np.zeros(3, "M8[s]"), lambda x, y: (np.ones(3), (x, y.copy()), np.ones(4))),
    "dtype, in a tuple": (PACKED, lambda x, y: (np.ones(3), (x, y.copy()), np.ones(4))),
    "stride, in a tuple": (PACKED, lambda x, y: (np.ones(3), (x, y["b"]), np.ones(4))),
}
"""By a word of the message, and where the array is: the second argument, and the kernel."""


@needs_torch
@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_pytorch_has_no_tensor_for(name):
    (y, function), word = NO_TENSORS[name], name.partition(",")[0]
    kernel, x = fast_args(function), torch.ones(3, dtype=torch.float64)
    assert type_and_message(kernel, x, y)[0] is BufferError
    before = blocks_in_use()
    with references_kept(x, y):
        for _ in range(WARM):
            kind, message = type_and_message(kernel, x, y)
            assert kind is BufferError and word in message and "its result" in message, message
    assert blocks_in_use() == before and kernel(x.numpy(), y) is not None  # NumPy has such arrays


GLOBAL, RECORDS = np.arange(3.0), np.zeros(2, [("a", "f8", (3,)), ("b", "i4")])
OWNED_BY_NOBODY = [lambda x: GLOBAL, lambda x: GLOBAL[1:], lambda x: GLOBAL[3:], lambda x: RECORDS[1].a]


@pytest.mark.parametrize("function", OWNED_BY_NOBODY)
def test_memory_that_nobody_owns(function):
    """Arrays get it as from plain @njit, tensors get a copy."""
    kernel, plain, array = fast_args(function), numba.njit(function), np.ones(3)
    for _ in range(WARM):
        for argument in (array, 1.0):
            got, want = kernel(argument), plain(argument)
            assert type(got) is np.ndarray and got.tolist() == want.tolist() and got.flags == want.flags
        if torch is not None:
            got = kernel(torch.ones(3))
            assert type(got) is torch.Tensor and got.tolist() == want.tolist()
            if got.numel():
                got[0] = 7.0
                assert kernel(array).tolist() == want.tolist()


def test_a_table_that_fails_to_make_a_tensor():
    """It says so, or not; sets an exception or not; or both contradict each other."""
    kernel = fast_args(lambda x: (x.copy(), x[1:]))
    for act in (lambda *_: -1, lambda *_: 0, setting(-1, ValueError, ValueError), setting(0, ValueError, "no tensors today")):
        to_py_object = ffi.callback("int(void *, void **)", lambda managed, out: _do(act, managed, out), error=-1)  # noqa: B023
        ledger = Ledger()
        tensor = tabled_type("Failing", managed_tensor_to_py_object_no_sync=_native(to_py_object, 1))(np.arange(3.0), ledger)
        type_and_message(kernel, tensor)
        before = blocks_in_use()
        for _ in range(WARM):
            kind, message = type_and_message(kernel, tensor)
            assert kind is BufferError and "its result" in message, (kind, message)
        assert blocks_in_use() == before
        ledger.check(ledger.made)
        assert itself(tensor) is tensor


def test_a_readonly_view_of_all_of_an_argument_is_not_the_argument():
    """Numba's ``broadcast_to`` makes a readonly array of the same elements: who writes to it is to get an error."""
    show, memory = fast_args(lambda x, *others: np.broadcast_to(x, (3,))), np.arange(3.0)
    for others in [(), (READONLY,), ((READONLY, 1),), (ONLY_NUMBA,)] * 3:
        shown = show(memory, *others)
        assert shown is not memory and not shown.flags.writeable and shown.base is not None and list(shown) == [0, 1, 2]
        if torch is not None:
            x = torch.arange(3.0)
            assert show(x, *others) is x  # PyTorch has no readonly tensors


def test_an_argument_that_is_declared_as_readonly_is_itself_when_it_returns():
    declared = types.Array(types.float64, 1, "C", readonly=True)
    second = fast_args([(declared, declared)])(lambda x, y: y)
    for y in (np.ones(3), np.broadcast_to(np.ones(3), 3)):
        assert second(np.zeros(3), y) is second(np.zeros(3), y) is numbas(second)(np.zeros(3), y) is y


def test_explain_says_where_python_makes_the_tensors():
    note = "Python code makes tensors of the arrays in its result"
    tails, sums = fast_args(lambda x: x[1:]), fast_args(lambda x: x.sum())
    outputs = fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(1))
    for tensor in (Dunder(np.ones(3)), np.ones(3), *([torch.ones(3)] if torch is not None else [])):
        is_made_so = type(tensor) is Dunder
        for kernel in (tails, sums, outputs, fast_args(returns=np.ndarray)(lambda x: x[1:])):
            kernel(tensor)
            assert (note in str(kernel.explain(tensor))) is (is_made_so and kernel is tails)
        fast = outputs.counts().fast
        outputs(tensor)
        assert (outputs.counts().fast == fast) is is_made_so is ("Python makes each call" in str(outputs.explain(tensor)))
