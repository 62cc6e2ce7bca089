"""Functions of NumPy of numbers and arrays, for kernels, and what they return of float32. ml_dtypes is not needed."""

import random

import numba
import numpy as np
from frameworks import torch


def of_float32(function, *arguments):
    """What Numba's kernel returns for the same numbers as float32."""
    return numba.njit(function)(*(each.astype(np.float32) if isinstance(each, np.ndarray) else each for each in arguments))


def numbers_in(result):
    """All numbers of a result, one after the other."""
    if isinstance(result, (tuple, list)):
        return [number for each in result for number in numbers_in(each)]
    if isinstance(result, torch.Tensor):
        result = result.to(torch.float64).numpy()
    return np.asarray(result).astype(complex).ravel().tolist()


def of_random(x):
    e = x[0]
    np.random.seed(1)
    random.seed(1)
    return (
        np.random.normal(e, 1), np.random.uniform(0, e), np.random.normal(e, e, 3), np.random.gamma(e, e), random.gauss(e, 1),
        random.uniform(e, 3),
    )  # fmt: skip


def of_ranges(x):
    return np.arange(x[0], 4, x[1]), np.linspace(x[0], 3, 4), np.histogram(x, 3), np.histogram(x, 3, (x[1], x[2]))


def of_arrays(x):
    clipped = np.empty_like(x)
    np.clip(x, 1, 2, clipped)
    return (
        clipped, np.cross(np.expand_dims(x[:3], 0), x[:3]), np.append(x > 1, x), np.interp(x, np.arange(4.0), x),
        np.nan_to_num(x), np.ldexp(x, 2), np.ldexp(x[0], 2), np.linalg.det(np.outer(x, x) + np.eye(4, dtype=np.float32)),
        np.allclose(x, x.astype(np.float32)),
    )  # fmt: skip


def of_complex_parts(x):
    return x.real.copy(), x.imag.copy(), np.real(x[0]), np.imag(x[0])


WITHOUT_CODE_OF_NUMBAS = {
    "random numbers": of_random, "ranges and histograms": of_ranges, "arrays": of_arrays, "complex parts": of_complex_parts,
}  # fmt: skip


CALLS = (
    "f(x)", "f(e)", "f(X)", "f(x, y)", "f(e, e)", "f(x, 2)", "f(x, e)", "f(2, e)", "f((x, y))", "f([x, y])", "f(x, I)", "f(I, x)",
    "f(X, x)", "f(x > 1, x)", "f(e, e, 3)", "f(x, 0.5)", "f(x, y, x)", "f(x, x > 1, x)", "f(X, 1)", "f((2, 2), e)", "f(3, e)",
    "f([e, e])", "f([x > 1], [x])",
)  # fmt: skip
"""Ways to call a function `f` with arrays, numbers and what contains them. `x`, `y`, `X`: arrays; `e`: a number; `I`: indices."""


def called(function, call):
    """A kernel that calls `function`."""
    names = {"f": function, "np": np}
    exec(f"def kernel(x, y, X, I):\n e = x[0]\n np.random.seed(1)\n return {call}\n", names)
    return names["kernel"]


def arguments():
    """Those of :func:`called`, as float32."""
    x, I = np.array([1.5, 0.5, 3.0, 2.0], np.float32), np.array([0, 1, 1, 2])  # noqa: E741
    return x, x[::-1].copy(), np.array([[2, 1, 0.5, 1], [1, 3, 0, 1], [0.5, 0, 4, 1], [1, 1, 1, 8]], np.float32), I
