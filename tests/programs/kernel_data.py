"""What the tests of ``kernels/`` share: memory layouts, data, and calls with the tensors of each framework."""

import itertools

import numpy as np
from frameworks import torch
from scale_kernels import elementwise

from fastexchange import fast_args
from kernels.exponential import exp

FRAMEWORKS = ["numpy"] + (["torch"] if torch is not None else [])
WAYS = [FRAMEWORKS[:1], FRAMEWORKS[1:], FRAMEWORKS][: 2 * len(FRAMEWORKS) - 1]
"""Of which framework the tensors of a call are, in turns."""
RTOL = {"f": 1e-5, "d": 1e-12, "F": 1e-5, "D": 1e-12}
SHAPES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (5, 17), (33, 129)]


exp_of_each = fast_args(elementwise("exp_of_each(x, out)", "out[i] = exp(x[i])", exp=exp))


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


CASES = [
    (np.float32, contiguous, np.float32, contiguous), (np.float64, strided, np.float64, strided),
    (np.int32, transposed, np.float32, contiguous), (np.float32, contiguous, np.float64, transposed),
]  # fmt: skip
"""Element type and layout of an input, and of an output. Every one of both, and not every pair: each is a compilation."""


def that_fit(layout, shapes):
    """The shapes that are tested in a layout: those with an extent below 2, contiguous in any, only if it is contiguous."""
    return [shape for shape in shapes if layout is contiguous or min(shape) > 1]


def blank(shape, dtype, layout=contiguous):
    """An output array full of values that no kernel here writes."""
    dtype = np.dtype(dtype)
    return layout(np.full(shape, {"f": np.nan, "c": np.nan, "u": 77}.get(dtype.kind, -7), dtype))


def random(shape, dtype, seed=0):
    """Normally distributed numbers; integers, 10 times as wide, where the dtype is one, without a sign if that has none."""
    kind, generator = np.dtype(dtype).kind, np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    if kind == "c":
        values = values + 1j * generator.standard_normal(shape)
    return np.asarray({"i": 10 * values, "u": abs(10 * values)}.get(kind, values)).astype(dtype)


def made(framework, value):
    """`value` with each array in it as a tensor of the same memory."""
    if isinstance(value, list):
        return [made(framework, each) for each in value]
    return torch.from_numpy(value) if framework == "torch" and isinstance(value, np.ndarray) else value


def arrays_in(values):
    """The arrays among `values`, and in lists among them."""
    several = (value if isinstance(value, list) else [value] for value in values)
    return [each for each in itertools.chain(*several) if isinstance(each, np.ndarray)]


def memory_of(values):
    """The arrays whose memory they lie in."""
    return [array.base if isinstance(array.base, np.ndarray) else array for array in arrays_in(values)]


def call(kernel, *args, written=(-1,)):
    """What the kernel has written: the last argument, or those at the positions `written`.

    NumPy's arrays, PyTorch's tensors and both are given, all in the memory of `args`: each time it writes the same, and nothing
    beside it, be it in an input or between an output's elements.
    """
    outputs = arrays_in(args[position] for position in written)
    blanks, memory = [output.copy() for output in outputs], memory_of(args)
    before, results = [array.copy() for array in memory], []
    for way in WAYS:
        kernel(*(made(framework, value) for framework, value in zip(itertools.cycle(way), args, strict=False)))
        results.append([output.copy() for output in outputs])
        for output, values in zip(outputs, blanks, strict=True):
            output[...] = values
        for array, values in zip(memory, before, strict=True):
            np.testing.assert_array_equal(array, values)
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)
    return results[0] if len(results[0]) > 1 else results[0][0]


def check(got, expected, scale=1.0):
    """`got` is `expected` as its dtype has it, integers exactly; `scale`: the size of intermediate values."""
    tolerance = RTOL.get(got.dtype.char, 0)
    assert got.shape == expected.shape
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, expected.astype(got.dtype), rtol=tolerance, atol=tolerance * scale)
