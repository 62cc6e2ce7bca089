"""Run-length encoding and decoding, against PyTorch and NumPy."""

import math

import numpy as np
import pytest
from kernel_data import FRAMEWORKS, check_refused, contiguous, make, random, strided, torch, zeros

from kernels.runs import run_length_decode, run_length_encode


def oracle(x):
    if torch is not None and x.dtype.kind != "c":
        values, lengths = torch.unique_consecutive(torch.from_numpy(np.ascontiguousarray(x)), return_counts=True)
        return values.numpy(), lengths.numpy()
    starts = np.flatnonzero(np.concatenate([np.ones(min(x.size, 1), bool), x[1:] != x[:-1]]))
    return x[starts], np.diff(np.append(starts, x.size))


def runs_of(size, length, dtype, seed=0):
    """Values that repeat `length` times on average."""
    return np.cumsum(np.random.default_rng(seed).random(size) < 1 / length).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(np.int64, contiguous), (np.float32, strided), (np.complex128, contiguous), (np.bool_, contiguous)],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_runs(framework, dtype, layout):
    for size in [0, 1, 2, 3, 15, 16, 17, 1000, 100_003]:
        for length in [1, 2, 10, 300, math.inf]:  # short runs and long ones are found in different ways
            x = runs_of(size, length, np.int64)
            x = layout((x % 2 if dtype is np.bool_ else x).astype(dtype))
            values, lengths = run_length_encode(make(framework, x))
            expected_values, expected_lengths = oracle(x)
            for got, expected in [(values, expected_values), (lengths, expected_lengths)]:
                assert type(got) is type(make(framework, expected))
                np.testing.assert_array_equal(np.asarray(got), expected, strict=True)
            decoded = run_length_decode(values, lengths)
            np.testing.assert_array_equal(np.asarray(decoded), x, strict=True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_runs_of_nan_and_signed_zeros(framework):
    for start in [[], [7.0] * 500]:  # short runs, long runs
        x = np.array([*start, math.nan, math.nan, -0.0, 0.0, 0.0, -0.0, math.inf, math.inf])
        values, lengths = run_length_encode(make(framework, x))
        more = [500] if start else []
        np.testing.assert_array_equal(np.asarray(lengths), [*more, 1, 1, 4, 2])
        np.testing.assert_array_equal(np.asarray(values)[-4:], [math.nan, math.nan, 0.0, math.inf])
        assert math.copysign(1, values[-2]) == -1  # the first of the run


@pytest.mark.parametrize("length_dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_run_length_decode(framework, length_dtype):
    lengths = np.random.default_rng(0).integers(0, 40, 500).astype(length_dtype)
    for number in [0, 1, 2, 500]:
        values = random(number, np.float64)
        got = run_length_decode(make(framework, values), make(framework, lengths[:number]))
        expected = np.repeat(values, lengths[:number])
        if torch is not None:
            counts = torch.from_numpy(lengths[:number].astype(np.int64))
            np.testing.assert_array_equal(torch.repeat_interleave(torch.from_numpy(values), counts).numpy(), expected)
        np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework):
    ints = np.arange(3)
    check_refused(framework, run_length_encode, (zeros(2, 2),), "x: must have one")
    check_refused(framework, run_length_decode, (zeros(2, 2), ints), "values: must have one")
    check_refused(framework, run_length_decode, (zeros(2), ints), "lengths: its shape")
    check_refused(framework, run_length_decode, (zeros(3), zeros(3)), "lengths: must be integers")
    for lengths in ([1, -1, 1], [1 << 62, 1 << 62, 5], [-(1 << 63)] * 3):
        check_refused(framework, run_length_decode, (zeros(3), np.array(lengths)), "lengths: must not be negative")
    with pytest.raises(MemoryError):
        run_length_decode(make(framework, zeros(1)), make(framework, np.array([1 << 50])))
