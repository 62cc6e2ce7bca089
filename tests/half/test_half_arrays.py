"""Arrays of bfloat16, float16 and float8 in kernels: from every framework, what Numba can do with them, results, and refusals."""

import functools
import math

import halves
import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import paddle, tvm_ffi
from halves import BFLOAT16, CALLS, array, array_of, code_of, nearest, numbers, of_each, of_one, tensor, tensor_of
from interoperability import jax, ml_dtypes
from made_producers import Dunder, Tabled
from numba import types
from numba.core.errors import TypingError
from raising import check_raises
from ways import WAYS, total

torch = pytest.importorskip("torch")
if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half  # noqa: E402
from fastexchange import convert, explain, fast_args, from_dlpack  # noqa: E402
from fastexchange.calls import kernel_cache  # noqa: E402

kernel_of = functools.cache(fast_args)
"""One kernel for all tests that call it with the same options."""
VALUES = 1.0, 2.0, 3.0
MAKERS = {
    "numpy": lambda form: array_of(form, *VALUES), "torch": lambda form: tensor_of(form, *VALUES),
    "jax": lambda form: jax.numpy.array(VALUES, form.dtype), "paddle": lambda form: paddle.to_tensor(VALUES).astype(form.name),
    "tvm_ffi": lambda form: convert(array_of(form, *VALUES), tvm_ffi.Tensor),
    "only __dlpack__": lambda form: Dunder(code_of(array_of(form, *VALUES)), code=form.dlpack[0]),
    "exchange table": lambda form: Tabled(code_of(array_of(form, *VALUES)), code=form.dlpack[0]),
}  # fmt: skip
INSTALLED = {"jax": jax, "tvm_ffi": tvm_ffi, "paddle": paddle}


# ---- from every framework, on every path ---------------------------------------------------------------------------
def parts(x):
    return x, x[1:], x.copy(), x[0]


@of_each
@pytest.mark.parametrize("framework", [name for name in MAKERS if INSTALLED.get(name, name) is not None])
def test_a_kernel_computes_with_tensors_of_every_framework_and_returns_the_callers(framework, form):
    if framework == "paddle" and form.name not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        pytest.skip("paddle has no such tensors")
    x, kernel = MAKERS[framework](form), kernel_of(total)
    assert [kernel(x) for _ in range(CALLS)] == [6.0] * CALLS and type(kernel(x)) is float
    assert form.name in [str(signature[0].dtype) for signature in kernel.signatures]
    assert "refused" not in str(kernel.explain(x)) and "storage" not in str(kernel.explain(x))
    assert not [reason for reason in explain(x).reasons if "compute" in reason or "storage" in reason]
    for _ in range(CALLS if framework in ("numpy", "torch", "jax", "tvm_ffi") else 0):
        same_one, tail, copied, number = kernel_of(parts)(x)
        assert same_one is x and type(tail) is type(copied) is type(x) and (number, type(number)) == (1.0, float)
        for got, want in ((tail, [2.0, 3.0]), (copied, [*VALUES])):
            assert from_dlpack(got).dtype == form.dtype and from_dlpack(got).astype(float).tolist() == want
        if framework != "jax":  # which copies what is not aligned
            assert from_dlpack(tail).ctypes.data == from_dlpack(x).ctypes.data + form.bits // 8


@functools.cache
def pair_of(function, **options):
    """Two kernels of one dispatcher, which share no answer: one computes, the other asks for bits."""
    dispatcher = numba.njit(**options)(function)
    return fast_args(dispatcher), fast_args(dispatcher, storage=True)


@pytest.mark.parametrize("framework", ["numpy", "torch", "exchange table"])
@pytest.mark.parametrize("way", WAYS)
def test_on_every_path_numbers_or_bits(framework, way):
    function, call = WAYS[way]
    x, bits = MAKERS[framework](BFLOAT16), int(nearest(BFLOAT16, np.array(VALUES)).astype(int).sum())
    for options in ({}, {"nogil": True})[: 1 + (way == "position")]:
        kernel, asking = pair_of(function, **options)
        for _ in range(CALLS):
            assert (call(kernel, x), call(asking, x)) == (6.0, bits)


# ---- scalars -------------------------------------------------------------------------------------------------------
ROUNDED = 1.1, -0.3, 0.0, -0.0, 1e9, math.inf, -math.inf, math.nan, 5e-324


def is_number(got, want):
    return type(got) is float and repr(got) == repr(float(want))


@of_each
def test_scalars_and_types_round_and_become_floats(form):
    kind = getattr(half, form.name)
    kernel = fast_args(lambda x, value: (x, x + x, kind(value), kind(3), kind(True)))
    for _ in range(CALLS):
        assert kernel(form.dtype.type(1.5), 1.0) == (1.5, 3.0, 1.0, 3.0, 1.0)
    assert form.name == str(kernel.signatures[0][0])
    for code in halves.codes(form)[:: max(1, 1 << form.bits - 8)]:
        assert is_number(kernel(array(form, [code])[0], 0.0)[0], numbers(form)[code])
    with np.errstate(all="ignore"):
        for value in ROUNDED:
            want = numbers(form)[nearest(form, np.array(np.float32(value)))]
            assert is_number(kernel(form.dtype.type(0), value)[2], want) and is_number(kind(value), want)
    assert (kind(3), kind(True)) == (3.0, 1.0)


CONSTANT = half.bfloat16(3.14159)


def test_constants_containers_and_other_numbers():
    x, by_numba = array_of(BFLOAT16, *VALUES), fast_args(lambda x, part: x + 1)
    for value in (np.float16(1.5), ml_dtypes.bfloat16(1.5)):
        assert [by_numba(value, slice(0, 2)) for _ in range(3)] == [2.5] * 3
    for signature in (half.bfloat16(types.float32), "bfloat16(float32)", half.float16(types.float32), "float16(float32)"):
        assert fast_args(signature)(lambda x: x)(np.float32(1.0001)) == 1.0
    assert fast_args(lambda x, *others: others)(x, 1.1, 2**53 + 1, np.float32(1.1)) == (1.1, 2**53 + 1, np.float32(1.1))
    assert fast_args(lambda x: x[0] * CONSTANT)(x) == 3.140625
    assert fast_args(lambda x: ((x[0], (x[1], 1)), [x[0], x[1]]))(x) == ((1.0, (2.0, 1)), [1.0, 2.0])
    first, (second, number) = fast_args(lambda pair: (pair[0][1:], (pair[1], 2)))((x, tensor(BFLOAT16, code_of(x))))
    assert type(first) is type(x) and isinstance(second, torch.Tensor) and number == 2


# ---- what a kernel can do with an array: as with float32 -------------------------------------------------------------
def of_the_same_elements(x):
    return (
        x[1:, ::2], x.T, x[0][x[0] > 0], x[1, ::-1].copy(), np.concatenate((x, x)), np.where(x > 3, x, x[::-1]), np.transpose(x),
        np.full_like(x, 2), np.ones(2, x.dtype), np.zeros(2, x.dtype), x.astype(np.float32).astype(x.dtype), x.ravel(),
        x.reshape(3, 2).copy(), np.zeros_like(x), x[1, np.array([2, 0])], x.flatten(),
    )  # fmt: skip


def of_what_numpy_promotes_to(x):
    return (
        x.astype(np.float32), x.astype(np.float64), 2 * x, x + x, -x, x > 2, x * np.ones(3), np.sqrt(x), np.exp(x), np.isnan(x),
        np.concatenate((x, np.ones((1, 3)))), x.astype(np.float32).sum(axis=0),
    )  # fmt: skip


def numbers_of_arrays(x):
    return (
        x.sum(), np.sum(x), x.max(), x.min(), x.mean(), x[:, ::2].sum(), np.max(x), np.min(x), np.mean(x),
        x.T[1:].max(), np.any(x > 4), x.itemsize * 1000 // x.nbytes, sum(list(x.flat)), sum([v for row in x for v in row]),
        sum([a * b for a, b in zip(x[0], x[1])]), sum([i * v for i, v in enumerate(x[0])]),  # noqa: B905 (Numba has no strict)
    )  # fmt: skip


def numbers_of_elements(x):
    return (
        np.float32(x[0, 1]), abs(-x[0, 1]), min(x[0, 1], x[1, 1]), max(x[0, 2], 1), round(x[0, 1] * 1.26, 1), int(x[1, 2]),
        round(x[0, 1] + 0.7), float(x[1, 2]), x[1, 2] % 3, x[1, 2] // 2, x[0, 2] ** 2, divmod(x[1, 2], 2)[1], (x[0, 1] * 1j).imag,
        math.isnan(x[0, 1]), 1 if x[0, 1] else 0, not x[0, 0], x[0, 1] and x[0, 2], x[0, 0] < x[0, 1] < x[0, 2],
    )  # fmt: skip


SIX = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.slow
@of_one
def test_arrays_of_the_same_elements(form):
    code, kernel, wanted = nearest(form, SIX), fast_args(of_the_same_elements), of_the_same_elements(SIX)
    for got, of_torch, want in zip(kernel(array(form, code)), kernel(tensor(form, code)), wanted, strict=True):
        assert got.dtype == form.dtype and got.astype(float).tolist() == want.tolist()
        assert of_torch.dtype == form.torch and of_torch.float().tolist() == want.tolist()


@pytest.mark.nightly
@of_one
def test_arrays_and_numbers_of_what_numpy_promotes_to(form):
    x = array(form, nearest(form, SIX))
    for got, want in zip(fast_args(of_what_numpy_promotes_to)(x), of_what_numpy_promotes_to(SIX), strict=True):
        assert got.dtype == want.dtype and np.allclose(got, want, rtol=1e-6)
    for function in (numbers_of_arrays, numbers_of_elements):
        found, wanted = fast_args(function)(x), function(SIX)
        assert found == pytest.approx(wanted, rel=1e-6)
        assert list(map(type, found)) == [type(np.asarray(want).item()) for want in wanted]


def in_place(x, y):
    """Numba once took each operation for the first that was compiled."""
    x[0] += 2
    x[1] **= 2
    np.multiply(x[2], x[0], x[2])
    np.sqrt(x[3], x[3])
    x[4, 0] -= 1
    y[:] = 2 * x[4] + np.float32(1)


@of_one
def test_operations_in_place(form):
    wide = np.tile(np.array(VALUES, np.float32), (5, 1)), np.empty(3, np.float32)
    x, y = (array(form, nearest(form, each)) for each in wide)
    fast_args(in_place)(x, y)
    in_place(*wide)
    assert [code_of(each).tolist() for each in (x, y)] == [nearest(form, each).tolist() for each in wide]


def changed(x):
    masked, subtracted, found = np.zeros(x.shape, x.dtype), x.copy(), set()
    masked[x > 0] = x[x > 0]
    subtracted -= x[1]
    for each in x:
        found.add(each)
    return masked, subtracted, len(found)


def of_no_dimension(x):
    x, y = x[3:].reshape(()), x[:1].copy().reshape(())
    y += 1
    return x + 1, x * x, np.negative(x), x > 1, x.sum(), y


FUNCTIONS = {
    "changed": changed, "of no dimension": of_no_dimension,
    "with arrays": lambda x: (
        x[0] * x, x > x[0], np.maximum(x, np.float32(x[0])), x[0] + np.ones(4, np.complex64), np.where(x[0] > 0, x[1], 0),
        np.divmod(x, x + 5), np.isnan(x[:0].mean()), x.reshape(2, 2).sum(), x - x[1] + 2 * x),
    "with containers": lambda x: (
        max((x[0], x[1])), (x[0], 1) == (x[0], 1), (x[0], 1) < (x[1], 2), [x[0]] == [x[0]], 3.0 in x, max(x)),
}  # fmt: skip


def plain(result):
    if isinstance(result, tuple):
        return tuple(map(plain, result))
    return result.tolist() if hasattr(result, "tolist") else result


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning", "ignore::RuntimeWarning")
def test_functions_do_what_they_do_with_float32(name, is_parallel):
    function = FUNCTIONS[name]
    x = tensor_of(BFLOAT16, 3.0, -1.5, 0.0, 2.25)
    assert plain(fast_args(function, parallel=is_parallel)(x)) == plain(function(x.float().numpy()))


# ---- reductions ----------------------------------------------------------------------------------------------------
def reductions(x):
    return x.sum(), np.mean(x), x.max(), np.min(x)


@pytest.mark.slow
@of_one
def test_reductions(form):
    """Sums are of float32 side by side: of few bits here, so they are exact. NaN as in NumPy."""
    kernel = kernel_of(reductions)
    for count in (1, 63, 64, 65, 1000):
        whole = np.random.default_rng(9).integers(0, 4, count).astype(float)
        for view in (array_of(form, *whole), array_of(form, *np.repeat(whole, 2))[::2]):
            assert kernel(view) == (whole.sum(), np.float32(whole.mean()), whole.max(), whole.min())
        whole[count // 2] = math.nan
        assert all(map(math.isnan, kernel(array_of(form, *whole))))
    assert fast_args(lambda x: x.sum())(array(form, [])) == 0.0
    check_raises(ValueError, "zero-size array", kernel, array(form, []))


def sums(x):
    return x.sum(), np.mean(x), x.max(), np.min(x), (x[:-1] * x[1:]).sum()


@pytest.mark.slow
def test_reductions_in_parallel():
    """They depend neither on parallel loops nor on the number of threads. Numba's own parallel ones would overlook NaN."""
    kernel, alone, largest = fast_args(sums, parallel=True), kernel_of(reductions), fast_args(lambda x: x.max(), parallel=True)
    for count in (1, 63, 16384, 50_001):
        x = tensor_of(BFLOAT16, *np.random.default_rng(11).normal(size=count))
        wide = x.float().numpy()
        assert kernel(x) == pytest.approx(sums(wide), rel=1e-4, abs=1e-6)
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            assert kernel(x)[:4] == alone(x)
        assert largest(x.view(1, -1).T[::2]) == wide[::2].max()
        x[count // 2] = math.nan
        assert all(map(math.isnan, kernel(x)[:4]))
    check_raises(ValueError, "zero-size array", kernel, x[:0])
    assert fast_args(lambda x: x.sum(), parallel=True)(np.arange(5.0)) == 10  # by Numba's own loops


def test_parallel_kernels():
    """What Numba's parallel passes make of arrays: loops over whole arrays, new arrays, ``x.dtype``, sums of threads."""

    def made(x):
        y, total = np.empty(x.size, x.dtype), np.float32(0)
        for i in numba.prange(x.size):
            y[i] = 2 * x[i]
            total += x[i]
        z = np.zeros_like(x)
        z[:] = x * x + 1
        return y, total, z, np.ones(3, x.dtype), np.zeros(x.shape, half.bfloat16), np.exp(x[:1])

    x = tensor_of(BFLOAT16, *range(8))
    y, total, z, ones, zeros, exponential = fast_args(made, parallel=True)(x)
    assert y.dtype == z.dtype == x.dtype and y.tolist() == (2 * x).tolist() and z.tolist() == (x * x + 1).tolist()
    assert (total, ones.tolist(), zeros.tolist(), exponential.tolist()) == (28, [1.0] * 3, [0.0] * 8, [1.0])


# ---- outputs ------------------------------------------------------------------------
@of_one
def test_declared_outputs(form):
    def scaled(x, y):
        for i in range(x.size):
            y[i] = 1.1 * x[i]

    want = numbers(form)[nearest(form, np.float32(1.1) * np.ones(3))].tolist()
    kernel = fast_args(out=f"x[n] -> y[n]: {form.name}")(scaled)
    for x in (np.ones(3), torch.ones(3), tensor_of(form, 1.0, 1.0, 1.0)):
        for _ in range(CALLS):
            y = kernel(x)
            assert type(y) is type(x) and y.dtype == (form.dtype if type(x) is np.ndarray else form.torch)
            assert (y.astype(float) if type(x) is np.ndarray else y.float()).tolist() == want
    same_type = fast_args(out="x[n] -> y[n]")(scaled)
    assert same_type(tensor_of(form, 1.0)).dtype == form.torch and same_type(array_of(form, 1.0)).dtype == form.dtype


def test_integers_that_show_no_argument_stay_integers_beside_the_bits_of_numbers():
    kernel = fast_args(storage=True)(lambda x, other: np.zeros(2, np.uint16))
    for other in (1.0, {1.0}):  # Numba's dispatcher takes sets
        assert str(kernel(tensor_of(BFLOAT16, *VALUES), other).dtype).endswith("uint16")


def test_a_view_of_other_elements_has_those():
    """``x.view(np.uint16)`` is an array of integers also where it shows an argument's memory."""
    kernel = fast_args(lambda x: (x.view(np.uint16), x[1:], x))
    for x in (array_of(BFLOAT16, *VALUES), tensor_of(BFLOAT16, *VALUES)):
        for _ in range(CALLS):
            got, part, same_one = kernel(x)
            assert str(got.dtype).endswith("uint16") and got.tolist() == [0x3F80, 0x4000, 0x4040]
            assert part.dtype == x.dtype and part.tolist() == [2.0, 3.0] and same_one is x


# ---- caches --------------------------------------------------------------------------------------------------------
def test_a_cached_kernel_is_compiled_anew_when_a_conversion_changes(cache, monkeypatch):
    """Its code has the conversions in it."""
    kept = kernel_cache.source_stamp
    hits = []
    for changed in ("", "", "changed"):
        stamp = lambda module, changed=changed: kept(module) + changed * module.endswith("half.known")  # noqa: E731
        monkeypatch.setattr(kernel_cache, "source_stamp", stamp)
        kernel = fast_args(total, cache=True)
        assert kernel(array_of(BFLOAT16, *VALUES)) == 6.0
        hits.append(sum(kernel.stats.cache_hits.values()))
    assert hits == [0, 1, 0]


# ---- plain Numba, and declared signatures ----------------------------------------------------------------------------
@numba.njit
def doubled(x, scalar):
    for i in range(x.size):
        x[i] = 2 * x[i]
    return x, x[0], x.copy(), scalar + 1, np.full(2, 1.5, half.bfloat16)


@of_each
def test_plain_njit(form):
    x = array_of(form, *VALUES)
    if form.name == "float16":
        check_raises(NotImplementedError, "float16", doubled, x, form.dtype.type(1.5))  # Numba's type, as without this package
        return
    same_one, number, copied, more, made = doubled(x, form.dtype.type(1.5))
    assert same_one is x and x.astype(float).tolist() == [2, 4, 6] and (number, type(number), more) == (2.0, float, 2.5)
    assert numba.typeof(x).dtype == getattr(half, form.name)
    assert copied.dtype == form.dtype and made.dtype == ml_dtypes.bfloat16


def test_without_compiling_arrays_are_numpys():
    """Not those that Numba's dispatcher gets."""
    fork_python("""
        import numpy as np
        from fastexchange import bfloat16, fast_args
        x = np.ones(3, np.float16)
        same_one, *others = fast_args(lambda x: (x, x + 1, x[1:], np.empty(2, bfloat16)))(x)
        assert same_one is x and {type(each) for each in others} == {np.ndarray}
    """, NUMBA_DISABLE_JIT="1")  # fmt: skip


F16 = types.float16  # Numba's own, which is the package's in a signature


@pytest.mark.parametrize("signature", [
    *(signature for name, kind in (("bfloat16", half.bfloat16), ("float16", half.float16))
      for signature in (types.float32(kind[:]), f"float32({name}[:])", [f"({name}[:],)"])),
    types.float32(F16[::1]), (types.Tuple((F16[:], types.int64)),), "(Tuple((float16[:], int64)),)", (types.Optional(F16[:]),),
], ids=str)  # fmt: skip
def test_declared_signatures(signature):
    kernel = fast_args(signature)(lambda x: x[0])
    declared = str(kernel.signatures[0])
    given = array_of(halves.BY_NAME["bfloat16" if "bfloat16" in declared else "float16"], *VALUES)
    assert "float16" in declared
    for _ in range(CALLS):
        assert np.ravel(kernel((given, 1) if "Tuple" in declared else given))[0] == VALUES[0]
    check_raises(TypeError, "not one of the declared signatures", kernel, np.ones(2))


# ---- bad input -----------------------------------------------------------------------------------------------------
def stored(x):
    x[0] = "a"


@pytest.mark.parametrize("function", [
    stored, lambda x: x[0].real, lambda x: x[0][0], lambda x: x[0](1), lambda x: "a" in x[0], lambda x: x.sum(axis=0),
    lambda x: x[0] is x[0], lambda x: x[0] * len(1),
])  # fmt: skip
def test_what_numba_refuses(function):
    kernel = fast_args(function)
    for x in (array_of(BFLOAT16, *VALUES), tensor_of(BFLOAT16, *VALUES)):  # Numba keeps the exception
        line, _, numbas = str(check_raises(TypingError, None, kernel, x)).partition("\n")
        called = f"{kernel.__qualname__}(x: array(bfloat16, 1d, C)): Numba cannot compile the kernel for these argument types. "
        assert line == called + "What it cannot do with numbers of half precision, it can do with x.astype(np.float32). It says:"
        assert numbas
