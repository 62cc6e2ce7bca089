"""What the tests of ``kernels/`` share: frameworks, memory layouts, data, and how a result is compared."""

import itertools

import numpy as np
import pytest
from oracle import numbas

try:
    import torch
except ImportError:
    torch = None

FRAMEWORKS = ["numpy"] + (["torch"] if torch is not None else [])
MIXED = list(itertools.product(FRAMEWORKS, FRAMEWORKS))
DTYPES = [np.float32, np.float64]
SHAPES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (5, 17), (33, 129)]
RTOL = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-12}
RTOL |= {np.dtype(np.complex64): 1e-5, np.dtype(np.complex128): 1e-12}


def contiguous(array):
    return array.copy()


def transposed(array):
    """The same values in column-major memory."""
    return array.T.copy().T


def strided(array):
    """The same values at every third element of memory that is NaN (or 77) elsewhere."""
    shape = (*array.shape[:-1], 3 * array.shape[-1] + 1)
    wide = np.full(shape, np.nan if array.dtype.kind in "fc" else 77, array.dtype)
    view = wide[..., 1::3]
    view[...] = array
    return view


def that_fit(layout, shapes):
    """The shapes that are tested in a layout: those with an extent below 2 only if it is contiguous.

    Without any stride they are contiguous in any layout, so that each would be one more compilation.
    """
    return [shape for shape in shapes if layout is contiguous or min(shape) > 1]


# Every layout and every dtype; not every pair, because each is a compilation.
MATRICES = [(np.float32, contiguous), (np.float32, strided), (np.float64, contiguous), (np.float64, transposed)]


def make(framework, array):
    """`array` itself or a tensor of the same memory."""
    return torch.from_numpy(array) if framework == "torch" else array


def blank(shape, dtype, layout=contiguous):
    """An output array full of values that no kernel here writes."""
    dtype = np.dtype(dtype)
    return layout(np.full(shape, {"f": np.nan, "c": np.nan, "u": 77}.get(dtype.kind, -7), dtype))


def zeros(*shape, dtype=np.float64):
    return np.zeros(shape, dtype)


def random(shape, dtype, seed=0):
    """Normally distributed numbers; integers, 10 times as wide, where the dtype is one, without a sign if that has none."""
    dtype, generator = np.dtype(dtype), np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    if dtype.kind == "c":
        return (values + 1j * generator.standard_normal(shape)).astype(dtype)
    if dtype.kind in "iu":
        values = abs(10 * values) if dtype.kind == "u" else 10 * values
    return values.astype(dtype)


def check(got, expected, scale=1.0):
    """`got`, of any framework, is `expected` to the rounding of its dtype; `scale`: the size of intermediate values."""
    got = np.asarray(got)
    assert got.shape == expected.shape
    tolerance = RTOL[got.dtype]
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)


def check_refused(framework, kernel, args, message, compiled=True):
    """Compiled code raises a ValueError that begins with `message`, a pattern, and has written nothing.

    So does the kernel, unless the notation of its outputs has been found not to fit before. Where it would be compiled for
    this refusal only, and in threads, that can be left out (``compiled=False``): then Python runs the kernel's own lines, and
    what they call, most of its checks, is compiled.
    """
    args = [make(framework, a.copy()) if isinstance(a, np.ndarray) else a for a in args]
    before = [np.asarray(a).copy() for a in args]
    arrays = [a if isinstance(a, (int, float, type(None))) else np.asarray(a) for a in args]
    of_the_notation = rf"^{kernel.__name__}\(\): (argument .*(its shape|dimensions)|its output .* cannot be made)"
    if compiled:
        for _ in range(2):  # the call that compiles, and one that finds the kernel compiled
            with pytest.raises(ValueError, match=f"^{message}|{of_the_notation}"):
                kernel(*args)
    with pytest.raises(ValueError, match="^" + message):
        (numbas(kernel) if compiled else kernel.py_func)(*arrays)
    for argument, copy in zip(args, before, strict=True):
        np.testing.assert_array_equal(np.asarray(argument), copy)
