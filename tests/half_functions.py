"""Functions of NumPy of numbers and arrays, for kernels; and the numbers in what they return. ml_dtypes is not needed."""

import random

import numpy as np
from frameworks import torch


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
    return clipped, np.append(x > 1, x), np.ldexp(x, 2), np.ldexp(x[0], 2), np.allclose(x, x.astype(np.float32))


def of_linear_algebra(x):
    return (
        np.cross(np.expand_dims(x[:3], 0), x[:3]), np.interp(x, np.arange(4.0), x),
        np.linalg.det(np.outer(x, x) + np.eye(4, dtype=np.float32)),
    )  # fmt: skip


def of_complex_parts(x):
    return x.real.copy(), x.imag.copy(), np.real(x[0]), np.imag(x[0])
