"""Outputs that a kernel declares, ``fast_args(out=…)``: allocated by the caller's framework, returned, or given."""

import functools
import gc
import inspect
import pickle
import sys

import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import each_mutable_framework, has_table, needs_torch, torch, tvm_ffi
from interoperability import ml_dtypes
from made_producers import ALLOCATED, ONLY_NUMBA, Dunder, Ledger, Tabled, export_versioned, ffi, tabled_type
from oracle import ONE_REFERENCE, references_kept, type_and_message
from raising import check_raises

from fastexchange import fast_args, from_dlpack
from fastexchange.ground.omitted import OMITTED

WARM = 4
ONES = [np.ones, *([torch.ones] if torch is not None else [])]
MADE = {"torch": torch and torch.Tensor, "exchange table": Tabled, "tvm_ffi": tvm_ffi and tvm_ffi.Tensor}

untouched = numba.njit(lambda *arrays: None)
"""Stands for a function that writes to outputs: which it does not show."""
of_x = numba.njit(lambda x, y: untouched(y))
of_x_w, of_x_k = numba.njit(lambda x, w, y: untouched(y)), numba.njit(lambda x, k, y: untouched(y))
of_x_w_z = numba.njit(lambda x, w, y, z: untouched(y, z))
X, W = np.ones((2, 3)), np.ones(3)


@fast_args(out="x[n, d], w[d] -> y[n, d]")
def weighted(x, w, y):
    y[...] = x * w


@fast_args(out="x[..., n], k -> largest[..., k], where[..., k]: int64")
def shapes(x, k, largest, where):
    largest[...] = k
    where[...] = k


@fast_args(out="x[n] -> y[n]")
def scaled(x, factor=2.0, y=None):
    y[:] = x * factor


# ---- allocation ------------------------------------------------------------------------------------------------------
def test_outputs_are_the_callers_frameworks(framework):
    x, w = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float32)
    for _ in range(WARM):
        y = weighted(framework.tensor(x), framework.tensor(w))
        assert isinstance(y, MADE.get(framework.name, np.ndarray)), type(y)
        assert np.array_equal(from_dlpack(y), x * w) and from_dlpack(y).dtype == np.float32
        largest, where = map(from_dlpack, shapes(framework.tensor(np.ones((2, 3, 4), np.float32)), 5))
        assert largest.tolist() == where.tolist() == [[[5] * 5] * 3] * 2
        assert (largest.dtype, where.dtype) == (np.float32, np.int64)
    assert from_dlpack(shapes(framework.tensor(np.ones(4)), 0)[0]).shape == (0,)


@pytest.mark.parametrize("ones", ONES if has_table() else [np.ones])  # without a table Python makes the outputs
def test_a_repeated_call_runs_no_python(ones):
    x = ones(3)
    for _ in range(4):
        calls = scaled.counts()
        assert scaled(x)[0] == 2.0 and scaled(x, 3.0)[0] == scaled(x, factor=3.0)[0] == 3.0 and scaled(x, 1.0, x) is x
    assert scaled.counts() == calls._replace(fast=calls.fast + 4)


def test_a_first_call_with_numpy_is_native_from_the_second_on():
    """Where nothing but the calls themselves has asked for NumPy's exchange table."""
    fork_python("""
        import numpy as np
        from fastexchange import fast_args
        kernel = fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(0))
        assert [kernel(np.ones(3)).shape for _ in range(4)] == [(3,)] * 4 and kernel.counts().fast == 3
    """)


NOTATIONS = {
    "x[n, m] -> y[m, n]": (3, 2), "x[n, m] -> y[]": (), "x[n, m] -> y[n * m]": (6,), "x[2, m] -> y[m - 3]": (0,),
    "x[n, m] -> y[2 * (n - 1) + m // 2, 7]": (3, 7), "x[..., m] -> y[m, ..., m]": (3, 2, 3), "x[...] -> y[..., 1]": (2, 3, 1),
    "x[n, ...] -> y[..., n]": (3, 2), "  x[ n,m ]->y[ n , 0*m ] : bool ": (2, 0),
}  # fmt: skip
"""By notation: the shape of y for an x of 2 by 3."""


def test_notation():
    for notation, shape in NOTATIONS.items():
        kernel = fast_args(of_x, out=notation)
        for ones in [*ONES, lambda shape: Dunder(np.ones(shape))] * 3:
            assert tuple(from_dlpack(kernel(ones((2, 3)))).shape) == shape, notation


def test_what_is_no_extent_may_be_anything():
    """A notation may name any parameter; and outputs have a default for those who ask for a kernel's signature."""
    kernel = fast_args(of_x_k, out="x[n], k -> y[n]")
    assert kernel(np.ones(2), 2.5).shape == kernel(np.ones(2), (1, 2)).shape == (2,)
    assert str(inspect.signature(kernel)) == "(x, k, y=None)"


def test_element_types():
    for dtype in ("bool", "int8", "uint64", "complex64"):
        kernel = fast_args(of_x, out=f"x[n] -> y[n]: {dtype}")
        assert kernel(np.ones(2)).dtype == dtype
        assert torch is None or kernel(torch.ones(2)).dtype == getattr(torch, dtype)
    y, z = fast_args(of_x_w_z, out="x[n], w[m] -> y[n]: w, z[m]")(np.ones(2, np.int8), np.ones(3, np.float32))
    assert (y.dtype, y.shape, z.dtype, z.shape) == (np.float32, (2,), np.float32, (3,))
    of_dates, dates = fast_args(of_x, out="x[n] -> y[n]"), np.array(["2020-01-01"], "M8[D]")
    said = r"argument 'x' \(position 0\): its elements have no DLPack type, so output 'y'"
    check_raises(TypeError, said, of_dates, dates)
    assert fast_args(of_x, out="x[n] -> y[n]: int64")(dates).dtype == np.int64
    if ml_dtypes is not None:
        assert fast_args(of_x, out="x[n] -> y[n]: bfloat16", storage=True)(np.ones(2)).dtype == ml_dtypes.bfloat16
    of_int4 = fast_args(of_x, out="x[n] -> y[n]: int4")
    check_raises(BufferError, "its output 'y', of int4, has no NumPy dtype", of_int4, np.ones(2))


@needs_torch
def test_pytorchs_own_types_and_allocator_and_returns():
    kernel = fast_args(of_x, out="x[n] -> y[n]", storage=True)
    assert kernel(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    weight = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert type(kernel(weight)) is torch.Tensor and not kernel(weight).requires_grad
    check_raises(BufferError, r"requires grad", kernel, weight)
    like = fast_args(of_x_w, out="x[n], w[n] -> y[n]", returns="w")
    for given, returns in [(np.ones(2), torch.Tensor), (torch.ones(2), np.ndarray)] * 3:
        assert type(fast_args(of_x, out="x[n] -> y[n]", returns=returns)(given)) is returns
        assert type(like(given, torch.ones(2) if returns is torch.Tensor else np.ones(2))) is returns


# ---- outputs that are given ------------------------------------------------------------------------------------------
@each_mutable_framework
def test_given_outputs_are_used_and_returned(framework):
    x, w, target = np.ones((2, 3)), np.arange(3.0), np.zeros((2, 3))
    tensor, largest = framework.tensor(target), np.empty(3)
    for _ in range(WARM):
        target[:] = 0
        assert weighted(framework.tensor(x), framework.tensor(w), tensor) is tensor and np.array_equal(target, x * w)
    assert weighted(x, w=w, y=tensor) is weighted(y=tensor, w=w, x=x) is tensor
    assert weighted(x, w, None).shape == weighted(x, w, y=None).shape == (2, 3)
    assert shapes(np.ones(4), 3, largest)[0] is largest  # the other one is made
    assert shapes(np.ones(4), 3, where=np.empty(3, np.int64))[0].shape == (3,)


# ---- ownership -------------------------------------------------------------------------------------------------------
def test_references(framework):
    x, w = framework.tensor(np.ones((2, 3))), framework.tensor(np.ones(3))
    weighted(x, w)
    with references_kept(x, w):
        for _ in range(WARM):
            y = weighted(x, w)
            assert sys.getrefcount(y) == ONE_REFERENCE


def test_references_to_none_and_what_stands_for_omitted():
    x, counts = np.ones(3), []
    for _ in range(2001):
        scaled(x), scaled(x, y=None), scaled(x, y=x)
        counts.append((sys.getrefcount(None), sys.getrefcount(OMITTED)))
    assert abs(counts[-1][0] - counts[0][0]) < 1000 and abs(counts[-1][1] - counts[0][1]) < 100


@fast_args(out="x[n] -> y[n], z[n]")
def failing(x, y, z):
    raise ValueError("no")


def test_a_kernel_that_raises_sets_its_outputs_free():
    def fail(x, times):
        assert [type_and_message(failing, x) for _ in range(times)] == [(ValueError, "no")] * times
        gc.collect()
        return sum(type(thing) is MADE["torch"] for thing in gc.get_objects())

    ledger, out, made = Ledger(), ALLOCATED.out, ALLOCATED.made
    fail(tabled_type("Allocates")(np.ones(2), ledger), 60)
    assert (ledger.out, ALLOCATED.out) == (0, out) and ALLOCATED.made >= made + 120
    if torch is not None:
        assert fail(x := torch.ones(2), 1) == fail(x, 60)


def test_a_kernel_that_returns_something():
    for kernel in [fast_args(out="x[n] -> y[n]", nogil=nogil)(lambda x, y: x) for nogil in (False, True)] * 3:
        for call in (kernel, np.ones(2)), (kernel, Dunder(np.ones(2))), (kernel.bind(np.ones(2)),):
            check_raises(TypeError, r"declares outputs, fast_args\(out=.*None", *call)


def test_allocators_that_fail():
    """They are asked natively, and again by Python, which has the words."""

    @ffi.callback("DLPackManagedTensorAllocator")
    def allocate(prototype, out, error_ctx, set_error):
        calls.append(what)
        if what == "fails":
            set_error(error_ctx, ffi.new("char[]", b"MemoryError"), ffi.new("char[]", b"full"))
        if what == "stints":
            out[0] = export_versioned(ALLOCATED, np.empty(1))
        return 0 if what in ("lies", "stints") else -1

    calls, out = [], ALLOCATED.out
    said = dict.fromkeys(("silent", "lies"), (BufferError, "its output 'y', float64 of shape (2,), cannot be allocated by"))
    said |= {"fails": (BufferError, ": full"), "stints": (ValueError, "its shape is (1,), and must be (2,)")}
    for what, (kind, words) in said.items():
        cls = tabled_type("Failing", managed_tensor_allocator=allocate)
        for _ in range(3):
            found, message = type_and_message(scaled, cls(np.ones(2)))
            assert found is kind and words in message and calls and set(calls) == {what}
        calls.clear()
    gc.collect()
    assert ALLOCATED.out == out and scaled(np.ones(2)).shape == (2,)


# ---- inputs that do not fit ------------------------------------------------------------------------------------------
def test_shapes_that_do_not_fit(framework):
    x, w = framework.tensor(np.ones((2, 3))), framework.tensor(np.ones(4))
    for _ in range(3):
        assert type_and_message(weighted, x, w) == (ValueError, (
            "weighted(): argument 'w' (position 1): dimension 0 of its shape (4,) is 4, but 'd' is 3 in argument 'x' "
            "(position 0) (x[n, d], w[d] -> y[n, d])"
        ))  # fmt: skip
        check_raises(ValueError, r"argument 'x' \(position 0\) has 1 dimension, \(4,\); .* says x\[n, d\]", weighted, w, w)


two_made = fast_args(of_x_w_z, out="x[n], w[n] -> y[n], z[n + 1]")


def test_given_outputs_of_another_shape(framework):
    x, w, whole = framework.tensor(np.ones(8)), framework.tensor(np.ones(8)), np.zeros(16)
    short, right = framework.tensor(whole[:4]), np.empty(9)
    named, said = functools.partial(two_made, y=short, z=right), r"'y' \(position 2\): its shape is \(4,\), and must be \(8,\)"
    for _ in range(3):
        for call in (two_made, x, w, short, right), (two_made, x, w, short), (named, x, w), (two_made.bind, x, w, short):
            check_raises(ValueError, f"argument {said}", *call)
        said_of_w = r"'w' .position 1.: dimension 0 of its shape \(4,\) is 4, but 'n' is 8"
        check_raises(ValueError, said_of_w, two_made, x, short, np.empty(8), right)
    assert not whole.any()


RESTS, LESS = ("x[..., 3], w[2, ...] -> y[...]", of_x_w), ("x[n], k -> y[n - k]", of_x_k)
HUGE, DEEP = ("x[n], k -> y[k * k * k * k]", of_x_k), ("x[...], w[m] -> y[..., m, 1]", of_x_w)
NAMES = [f"n{i}" for i in range(70)]
UNFIT = [  # a notation, the shape of x, w's shape or k, the error
    (RESTS, (5, 4), (2, 5), ValueError, r"dimension 1 of its shape .5, 4. is 4, but it must be 3"),
    (RESTS, (5, 3), (2, 6), ValueError, r"'...' is \(6,\) in its shape \(2, 6\), but \(5,\) in "),
    (RESTS, (), (2, 6), ValueError, r"has 0 dimensions"),
    (LESS, 3, 4, ValueError, r"its output 'y' cannot be made: dimension n - k is -1 \(k=4, n=3\)"),
    (LESS, 3, 1.0, TypeError, r"argument 'k' .position 1. is an extent in .*: an int, not float"),
    (("x[n], k -> y[k // n]", of_x_k), 0, 1, ValueError, r"divides by zero"),
    (HUGE, 3, 2**12, (BufferError, MemoryError), r"its output 'y'.* of shape \(281474976710656,\)"),
    (HUGE, 3, 2**20, ValueError, r"its output 'y' cannot be made: dimension k \* k"),
    (HUGE, 3, 2**70, OverflowError, r"argument 'k' .position 1. is an extent that does not fit into 64 bits"),
    (DEEP, (1,) * 63, (2,), ValueError, "output 'y' cannot be made: it has more than 64"),
    (("x[n], w[m] -> y[n + 1099511627776 * 1099511627776 - m]", of_x_w), (1,), (1,), ValueError, "dimension .* is too large"),
    (("x[n], w[m] -> y[n], z[1, n // (m - 1)]", of_x_w_z), (1,), (1,), ValueError, r"'z' .* n // \(m - 1\) divides by zero"),
    (("x[n], w[m] -> y[n], z[1, (n + 2147483647) * (m + 4294967296)]", of_x_w_z), (1,), (1,), ValueError, "'z' .* is too large"),
]
JUST_FIT = [  # the shape of the output; of many names and of many operands, too
    (RESTS, (5, 3), (2, 5), (5,)), (LESS, 3, 3, (0,)), (DEEP, (1,) * 62, (2,), (*(1,) * 62, 2, 1)),
    ((f"x[{', '.join(NAMES[:60])}], w[{', '.join(NAMES[60:])}] -> y[n1 + n69]", of_x_w), (1,) * 60, (1,) * 10, (2,)),
    (("x[n], w[m] -> y[" + "n + (" * 65 + "m" + ")" * 65 + "]", of_x_w), (1,), (2,), (67,)),
    (("x[n], w[m] -> y[n * 1000000000000 * m]", of_x_w), (0,), (1,), (0,)),
    (("x[n], w[m] -> y[(n - m) // 2 + 3]", of_x_w), (0,), (3,), (1,)),
]  # fmt: skip


def test_notations_that_just_fit_and_that_do_not():
    kernel_of = functools.cache(lambda notation, function: fast_args(function, out=notation))
    for notation, x, other, *wanted in UNFIT + JUST_FIT:
        for ones in ONES * 3:
            call = kernel_of(*notation), ones(x), ones(other) if isinstance(other, tuple) else other
            if len(wanted) == 2:
                check_raises(*wanted, *call)
            else:
                assert [tuple(call[0](*call[1:]).shape)] == wanted, notation


@numba.njit
def first_is(array, value):
    array.flat[0] = value


@pytest.mark.slow
@pytest.mark.parametrize("inputs, outputs", [(20, 1), (1, 18)])
def test_more_dimensions_than_native_code_has_room_for(inputs, outputs):
    xs, ys = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
    function = eval(f"lambda {', '.join(xs + ys)}: ({', '.join(f'first_is({y}, {y[1:]})' for y in ys)},)[0]")
    kernel = fast_args(function, out=" -> ".join(", ".join(f"{name}[...]" for name in names) for names in (xs, ys)))
    for _ in range(2):
        made = kernel(*[np.ones((1,) * 14)] * inputs)
        for i, each in enumerate(made if outputs > 1 else [made]):
            assert each.shape == (1,) * 14 and each.item() == i


@pytest.mark.slow
def test_on_a_small_stack():
    """As far as the operating system and PyTorch leave something of it to others, as in a call without declared outputs."""
    fork_python("""
        import contextlib, threading
        from test_outputs import ONES, scaled

        given = [ones(4) for ones in ONES]
        for _ in range(4):
            [scaled(x) for x in given]  # compiled before

        def work():
            for _ in range(100):
                results.extend(scaled(x).tolist() == [2, 2, 2, 2] for x in given)

        results = []
        for size in (32768, 65536):  # CPython 3.14 wants more than the former
            with contextlib.suppress(ValueError):
                threading.stack_size(size)
                break
        thread = threading.Thread(target=work)
        thread.start(), thread.join()
        assert results == [True] * 100 * len(given), results
    """)


defaulted = fast_args(lambda x=2.0, y=None: None, out="x[n] -> y[n]")
BAD_CALLS = {
    "missing 1 required positional argument: 'w'": lambda: weighted(X),
    "takes from 2 to 3 positional arguments but 4 were given": lambda: weighted(1, 2, 3, 4),
    "unexpected keyword argument 'q'": lambda: weighted(X, W, q=1),
    r"argument 'x' \(position 0\).* of type list is no tensor, and 'x\[n, d\], .*' says that x is one; pass one, or take x out":
        lambda: weighted([1, 2], W),
    r"argument 'w' \(position 1\).* float is no tensor, and .* says that w is one; pass one, or": lambda: weighted(X, 2.0),
    r"argument 'w' .*; pass its items one by one, or numpy.array\(list\(w\)\)": lambda: weighted(X, range(3)),
    r"argument 'x' .* float is no tensor, and 'x\[n\] -> y\[n\]' says that x is one; pass one$": defaulted,
}


def test_bad_arguments():
    for words, call in [*BAD_CALLS.items()] * 2:
        check_raises(TypeError, words, call)


BAD_NOTATION = [
    ("x[n]", "needs one '->'"), ("-> y[n]", "needs a tensor on the left"), ("x[n] -> y[m]", "'m' is no dimension of an input"),
    ("x[n] -> x[n]", "are not the last parameters"), ("x[n] ->", "its outputs, none, are not the last"),
    ("q[n] -> y[n]", "'q' is no parameter of the kernel"), ("x[n] -> y[f(n)]", "is no dimension"),
    ("x[n] -> y", "output 'y' has no brackets; write its dimensions, as in y\\[n\\], or y\\[\\] for none"),
    ("x[n], x[n] -> y[n]", "stands in it twice"), ("x[n], y[n] -> y[n]", "stands in it twice"),
    ("x[n]: int8 -> y[n]", "'x' is an input"), ("x[n] -> y[n]: foo", "'foo' is neither an element type"),
    ("x[n] -> y[n ** 2]", "'n \\*\\* 2' is no dimension"), ("x[n] -> y[n +]", "is no dimension"),
    ("x[n+1] -> y[n]", "'n\\+1' is no dimension of an input"), ("x[n -> y[n]", "cannot read 'x\\[n'"),
    ("x[n] -> y[...]", "'...' stands for dimensions that an input has"), ("x[..., ...] -> y[...]", "has '...' more than once"),
    ("x[n] -> y[n]: float32x4", "is a vector type; write float32 and a dimension of 4"),
    ("x[n] -> y[99999999999999]", "is larger than any extent"), ("x[99999999999999] -> y[1]", "is larger than any extent"),
    ("x[n] -> y[" + "n + " * 400 + "n]", "more than 1000 characters"),
]  # fmt: skip


def test_bad_notation_and_kernels_that_cannot_declare_outputs():
    for notation, why in BAD_NOTATION:
        said = str(check_raises(ValueError, why, fast_args, of_x, out=notation))
        assert said.startswith("fast_args(): ") and repr(notation) in said
    check_raises(TypeError, r"out is a notation such as", fast_args, of_x, out=3)
    for kernel in (lambda x, *y: None, lambda x, *, y: None):
        check_raises(ValueError, r"cannot declare outputs", fast_args(out="x[n] -> y[n]"), kernel)


def test_bound(framework):
    w = np.ones(3)
    launch = weighted.bind(framework.tensor(X), framework.tensor(w))
    y = launch()
    assert launch() is y and launch.arguments[2] is y
    w[:] = 7
    assert launch() is y and from_dlpack(y).tolist() == [[7.0] * 3] * 2
    other = np.empty((2, 3))
    assert launch.rebind(y=other)() is other and other[0, 0] == 7
    with references_kept(other):
        assert all(launch() is other for _ in range(WARM))
    larger, said = framework.tensor(np.ones((4, 3))), r"'y' .position 2.: its shape is \(2, 3\), and must be \(4, 3\)"
    check_raises(ValueError, said, launch.rebind, x=larger)
    assert launch() is other and from_dlpack(launch.rebind(x=larger, y=None)()).shape == (4, 3)
    one, two = shapes.bind(np.ones(4), 2)()
    assert (one.shape, two.dtype) == ((2,), np.int64)


@pytest.mark.parametrize("given", [(X, X), (X, 2.0), (X, W, W)])
def test_inputs_that_do_not_fit_are_explained_as_refused(given):
    refused, explained = check_raises((TypeError, ValueError), None, weighted, *given), weighted.explain(*given)
    assert explained.kind == "refused" and f"refused with {type(refused).__name__}: {refused}" == explained.outcome
    assert [name for name, *_ in explained.arguments] == ["x", "w", "y"]
    check_raises(TypeError, "positional arguments", weighted.explain, *given, *given)


def test_explained_pickled_and_beside_what_only_numba_takes():
    weighted(X, W)
    assert "native from the first argument" in weighted.explain(X, W).outcome
    assert pickle.loads(pickle.dumps(weighted)) is weighted and weighted.out == "x[n, d], w[d] -> y[n, d]"
    kernel = fast_args(out="x[n] -> y[n]")(lambda x, text, y: y.fill(len(text)))
    for ones in ONES * 3:
        y = kernel(ones(2), ONLY_NUMBA)
        assert type(y) is type(ones(2)) and y.tolist() == [4.0, 4.0]
