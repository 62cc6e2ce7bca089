"""What the kernels of ``kernels/`` refuse, and in which words. Nothing has been written then."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
from kernel_data import FRAMEWORKS, WAYS, made, memory_of, random, strided
from oracle import numbas
from scipy import signal

from kernels.adamw import adamw_step
from kernels.axpy import axpy
from kernels.cross_entropy import cross_entropy
from kernels.csr import csr_matvec
from kernels.distances import nearest, pairwise
from kernels.heat import heat_step
from kernels.histogram import histogram
from kernels.iir import sosfilt
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.runs import run_length_decode, run_length_encode
from kernels.sampling import sample
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum
from kernels.softmax import softmax

INF, NAN = math.inf, math.nan


def zeros(dtype):
    return lambda *shape: np.zeros(shape, dtype)


floats, doubles, longs = map(zeros, (np.float32, np.float64, np.int64))


def ints(*values):
    return np.array(values)


def adamw(**changed):
    lists = {name: [random(5, np.float64, i), random(5, np.float64, i + 9)] for i, name in enumerate(LISTS)}
    numbers = {"step": 1, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    return tuple((lists | numbers | changed).values())


def indices_with(bad, at, size):
    indices = longs(size)
    indices[at] = bad
    return indices


SOS = signal.butter(6, 0.2, output="sos")
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs")
ROTARY = (floats(1, 2, 3, 4), floats(4, 2), floats(4, 2), 0, False, floats(1, 2, 3, 4))
CSR = (ints(0, 1, 3), longs(3), doubles(3), doubles(2), doubles(2))
MANY = (np.arange(601) * 100, longs(60_000), doubles(60_000), doubles(400), doubles(600))  # read by several threads
NEAREST = (floats(4, 3), floats(5, 3), 2, floats(4, 2), longs(4, 2))
SAMPLE = (floats(2, 5), 3, 0.5, 1.0, doubles(2), longs(2))
SOSFILT = (SOS, doubles(2, 9), doubles(3, 2, 2), doubles(2, 9), doubles(3, 2, 2))
# a kernel, arguments that it takes, and by parameter what it does not take; the message begins with the parameter's name
REFUSED = [
    (axpy, (2.0, floats(3), floats(3), floats(3)), {"x": [floats(4)], "y": [floats(2)]}),
    (softmax, (floats(3, 4), floats(3, 4)), {"x": [floats(2, 4), floats(4, 3)]}),
    (log_softmax, (floats(3, 4), floats(3, 4)), {"x": [floats(2, 4)]}),
    (layer_norm, (floats(3, 4), None, None, 1.0, floats(3, 4)), {"x": [floats(2, 4)]}),
    (layer_norm, (floats(3, 4), floats(4), floats(4), 1.0, floats(3, 4)), {"weight": [floats(3)], "bias": [floats(5)]}),
    (rms_norm, (floats(3, 4), floats(4), 1e-5, floats(3, 4)), {"x": [floats(2, 4)], "weight": [floats(3)]}),
    (heat_step, (floats(4, 4), 0.2, floats(4, 4)), {"u": [floats(4, 5)]}),
    (histogram, (doubles(3), 4, 0.0, 1e308, longs(4)),
     {"bins": [0], "out": [longs(3)], "low": [1e308, INF, NAN, -INF, -1e308]}),
    (histogram, (floats(3), 4, 0.0, 1.0, longs(4)), {"low": [-1e39]}),
    (rotary, ROTARY, {"x": [floats(1, 2, 3, 2)], "cos": [floats(4, 4)], "sin": [floats(3, 2)], "start": [2, -1]}),
    (rotary, (floats(1, 2, 3, 5), floats(4, 2), floats(4, 2), 0, False, floats(1, 2, 3, 5)),
     {"x": [floats(1, 2, 3, 5)]}),
    (cross_entropy, (floats(3, 4), longs(3), 0.0, -100, floats(3)),
     {"target": [longs(2), ints(0, 4, 0), ints(-1, 0, 0)], "smoothing": [1.1, -0.1, NAN], "out": [floats(4)]}),
    (cross_entropy, (floats(3, 0), longs(3), 0.0, -100, floats(3)), {"target": [longs(3)]}),
    (exclusive_scan, (doubles(3), doubles(3)), {"x": [doubles(4)]}),
    (segment_sum, (floats(3), ints(0, 3), floats(1)),
     {"offsets": [longs(0), ints(1, 0), ints(0, 4)], "out": [floats(2)]}),
    (segment_sum, (floats(3, 2), ints(0, 3), floats(1, 2)), {"out": [floats(1, 3)]}),
    (segment_mean, (floats(3), ints(0, 3), floats(1)), {"offsets": [ints(0, 4)]}),
    (segment_max, (floats(3), ints(0, 3), 0, floats(1)), {"offsets": [ints(-1, 3)]}),
    (segment_min, (floats(3), ints(0, 3), 0, floats(1)), {"offsets": [ints(0, 4)]}),
    (csr_matvec, CSR, {"data": [doubles(2)], "out": [doubles(3)], "indptr": [ints(0, 2, 1), ints(0, 1, 4)]}),
    (csr_matvec, CSR, {"indices": [indices_with(2, -1, 3), indices_with(-1, 0, 3)]}),
    (csr_matvec, MANY, {"indices": [indices_with(400, 1000, 60_000), indices_with(-(1 << 31), -1, 60_000)]}),
    (run_length_decode, (doubles(3), longs(3)),
     {"lengths": [longs(2), ints(1, -1, 1), ints(1 << 62, 1 << 62, 5), ints(*[-(1 << 63)] * 3)]}),
    (pairwise, (floats(4, 3), floats(5, 3), floats(4, 5)), {"y": [floats(5, 2)], "out": [floats(5, 4)]}),
    (nearest, NEAREST,
     {"y": [floats(5, 2)], "distances": [floats(3, 2), floats(4, 3)], "indices": [longs(4, 3)], "k": [6, -1]}),
    (sample, SAMPLE, {"logits": [floats(2, 0)], "k": [0], "p": [0.0, 1.01, NAN], "temperature": [0.0, -1.0, INF, NAN]}),
    (sample, SAMPLE, {"u": [doubles(3), *(np.array([0.5, u]) for u in (1.0, -0.1, NAN))], "out": [longs(3)]}),
    (sosfilt, SOSFILT, {"sos": [SOS[:, 1:], 2 * SOS], "x": [doubles(2, 8)], "initial": [doubles(3, 3, 2)]}),
    (sosfilt, SOSFILT, {"final": [doubles(3, 1, 2), doubles(2, 2, 2)]}),
    *(
        (adamw_step, adamw(), {name: [[doubles(5)], [*[doubles(5)] * 2, doubles(1)], [doubles(5), doubles(4)]]})
        for name in LISTS[1:]
    ),
    (adamw_step, adamw(),
     {"grads": [[doubles(5, 1), doubles(5, 1)]], "step": [0, -1], "lr": [-1e-9, NAN], "seed": [5]}),
    (adamw_step, adamw(), {"eps": [-1e-9, NAN], "weight_decay": [-1e-9, NAN]}),
    (adamw_step, adamw(), {"beta1": [-0.1, 1.0, NAN], "beta2": [-0.1, 1.0, NAN]}),
]  # fmt: skip
# Of types that no other call has: Python runs the kernel's own lines, and what they call, most of its checks, is compiled.
OF_TYPES = [
    (axpy, (2.0, floats(3), floats(3), floats(3)), {"out": [doubles(2, 2), longs(3)]}),
    (softmax, (floats(3, 4), floats(3, 4)), {"out": [longs(3, 4), floats(3)]}),
    (heat_step, (floats(4, 4), 0.2, floats(4, 4)), {"out": [longs(4, 4)]}),
    (histogram, (doubles(3), 3, 0.0, 1.0, longs(3)), {"x": [doubles(3, 4)], "out": [np.zeros(3, np.int8), doubles(3)]}),
    (rotary, ROTARY, {"out": [longs(1, 2, 3, 4)]}),
    (cross_entropy, (floats(3, 4), longs(3), 0.0, -100, floats(3)), {"target": [floats(3)], "out": [longs(3)]}),
    (exclusive_scan, (longs(2), longs(2)), {"out": [longs(2, 2), np.zeros(2, np.int32), np.zeros(2, np.uint64)]}),
    (exclusive_scan, (doubles(2), doubles(2)), {"out": [longs(2)]}),
    (segment_sum, (floats(3), ints(0, 3), floats(1)),
     {"x": [floats(3, 2, 2)], "offsets": [floats(2)], "out": [longs(1)]}),
    (segment_sum, (longs(1), ints(0, 1), longs(1)), {"out": [np.zeros(1, np.int32)]}),
    (segment_mean, (longs(1), ints(0, 1), doubles(1)), {"out": [longs(1)]}),
    (segment_max, (floats(1), ints(0, 1), 0, floats(1)), {"out": [doubles(1)]}),
    (segment_max, (longs(1), ints(0, 1), 0, longs(1)), {"initial": [0.5, -INF]}),
    (csr_matvec, CSR,
     {"indptr": [doubles(3), longs(1, 3)], "indices": [doubles(3)], "x": [doubles(2, 1)], "out": [longs(2)]}),
    (run_length_encode, (doubles(3),), {"x": [doubles(2, 2)]}),
    (run_length_decode, (doubles(3), longs(3)), {"values": [doubles(2, 2)], "lengths": [doubles(3)]}),
    (pairwise, (floats(4, 3), floats(5, 3), floats(4, 5)), {"out": [longs(4, 5)]}),
    (nearest, NEAREST, {"distances": [longs(4, 2)], "indices": [np.zeros((4, 2), np.int32)]}),
    (sample, SAMPLE, {"out": [np.zeros(2, np.int32)]}),
    (sosfilt, SOSFILT, {"out": [longs(2, 9)], "final": [longs(3, 2, 2)]}),
    (adamw_step, adamw(), {"params": [[longs(5)] * 2], "exp_avgs": [[floats(5)] * 2], "exp_avg_sqs": [[longs(5)] * 2]}),
]  # fmt: skip


def each_refused(table):
    """A kernel, arguments, and how the message begins."""
    for kernel, valid, wrong in table:
        names = kernel.py_func.__code__.co_varnames
        for name, values in wrong.items():
            for value in values:
                arguments = dict(zip(names, valid, strict=False)) | {name: value}
                yield kernel, tuple(arguments.values()), rf"{name}(, \w+)?: "


# ---- memory ----
SINGLES, DOUBLES, LONGS = floats(1000), doubles(400), longs(400)
GRID = SINGLES[:400].reshape(20, 20)
BITS = floats(64)
BITS_AS_DOUBLES, BITS_AS_LONGS = BITS.view(np.float64), BITS.view(np.int64)
COEFFICIENTS = np.concatenate([SOS.ravel(), DOUBLES])


def at(start, *shape, of=SINGLES):
    return of[start : start + math.prod(shape)].reshape(shape)


def expanded(*shape, dtype=np.float64):
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, [0] * len(shape))


def apart(*shape, dtype=np.float64):
    return strided(np.zeros(shape, dtype))


ROW, POINTS = floats(5, 3), apart(5, 3, dtype=np.int32)
ROTATED = at(0, 1, 1, 3, 16)
X, INITIAL, OUT, FINAL = doubles(2, 9), doubles(3, 2, 2), doubles(2, 9), doubles(3, 2, 2)
OVERLAPPING = [
    (axpy, (2.0, SINGLES[:-1], SINGLES[:-1], SINGLES[1:]), "out: overlaps x or y"),
    (axpy, (2.0, SINGLES[:50], SINGLES[1:51], SINGLES[:50]), "out: overlaps x or y"),
    (softmax, (GRID[:-1], GRID[1:]), "out: overlaps x"),
    (layer_norm, (floats(20, 20), GRID[3], floats(20), 1.0, GRID), "out: overlaps weight"),
    (layer_norm, (floats(20, 20), floats(20), GRID[3], 1.0, GRID), "out: overlaps bias"),
    (rms_norm, (GRID, GRID[3], 1e-5, GRID), "out: overlaps weight"),
    (heat_step, (GRID, 0.2, GRID), "out: overlaps u"),
    (heat_step, (GRID[1:], 0.2, GRID[:-1]), "out: overlaps u"),
    (histogram, (LONGS, 10, 0, 1, LONGS[:10]), "out: overlaps x"),
    (rotary, (ROTATED, floats(3, 8), floats(3, 8), 0, False, at(16, 1, 1, 3, 16)), "out: overlaps x"),
    (rotary, (floats(1, 1, 3, 16), at(20, 3, 8), floats(3, 8), 0, False, ROTATED), "out: overlaps cos or sin"),
    (rotary, (floats(1, 1, 3, 16), floats(3, 8), at(20, 3, 8), 0, False, ROTATED), "out: overlaps cos or sin"),
    (cross_entropy, (at(0, 5, 20), longs(5), 0.0, -100, SINGLES[45:50]), "out: overlaps"),
    (exclusive_scan, (DOUBLES[:-1], DOUBLES[1:]), "out: overlaps x without"),
    (exclusive_scan, (LONGS[1:], LONGS[:-1]), "out: overlaps x without"),
    (segment_sum, (SINGLES[:30], longs(4), SINGLES[:3]), "out: overlaps x or offsets"),
    (segment_sum, (LONGS[20:], LONGS[1:5], LONGS[3:6]), "out: overlaps x or offsets"),
    (csr_matvec, (longs(3), longs(3), doubles(3), DOUBLES[:2], DOUBLES[1:3]), "out: overlaps data or x"),
    (csr_matvec, (longs(3), longs(3), DOUBLES[:3], doubles(2), DOUBLES[2:4]), "out: overlaps data or x"),
    (csr_matvec, (BITS_AS_LONGS[:3], longs(0), doubles(0), doubles(2), BITS_AS_DOUBLES[1:3]), "out: overlaps indptr"),
    (pairwise, (at(0, 4, 3), at(12, 5, 3), at(10, 4, 5)), "out: overlaps x or y"),
    (nearest, (at(0, 4, 3), at(12, 5, 3), 2, at(8, 4, 2), longs(4, 2)), "distances: overlaps x or y"),
    (nearest, (at(0, 4, 3, of=BITS), ROW, 2, floats(4, 2), at(0, 4, 2, of=BITS_AS_LONGS)), "indices: overlaps x or y"),
    (nearest, (ROW[:4], ROW, 2, at(2, 4, 2, of=BITS), at(0, 4, 2, of=BITS_AS_LONGS)), "indices: overlaps distances"),
    (sample, (at(0, 4, 4, of=BITS), 2, 0.5, 1.0, doubles(4), BITS_AS_LONGS[2:6]), "out: overlaps logits or u"),
    (sample, (floats(4, 4), 2, 0.5, 1.0, BITS_AS_DOUBLES[8:12], BITS_AS_LONGS[9:13]), "out: overlaps logits or u"),
    (sosfilt, (SOS, at(1, 2, 9, of=DOUBLES), INITIAL, at(0, 2, 9, of=DOUBLES), FINAL), "out: overlaps x without"),
    (sosfilt, (at(0, 3, 6, of=COEFFICIENTS), X, INITIAL, at(9, 2, 9, of=COEFFICIENTS), FINAL), "out: overlaps sos or final"),
    (sosfilt, (SOS, X, INITIAL, at(0, 2, 9, of=DOUBLES), at(10, 3, 2, 2, of=DOUBLES)), "out: overlaps sos or final"),
    (sosfilt, (at(0, 3, 6, of=COEFFICIENTS), X, INITIAL, OUT, at(9, 3, 2, 2, of=COEFFICIENTS)), "final: overlaps sos or x"),
    (sosfilt, (SOS, at(0, 2, 9, of=DOUBLES), INITIAL, OUT, at(9, 3, 2, 2, of=DOUBLES)), "final: overlaps sos or x"),
    (sosfilt, (SOS, X, at(10, 3, 2, 2, of=DOUBLES), at(0, 2, 9, of=DOUBLES), FINAL), "out: overlaps initial"),
    (sosfilt, (SOS, X, at(1, 3, 2, 2, of=DOUBLES), OUT, at(0, 3, 2, 2, of=DOUBLES)), "final: overlaps initial without"),
    *(
        (adamw_step, adamw(**{one: [doubles(5), DOUBLES[:5]], other: [doubles(5), DOUBLES[4:9]]}), f"{names}: one overlaps")
        for (one, other), names in zip(
            itertools.combinations(LISTS, 2), ["params"] * 3 + ["exp_avgs, exp_avg_sqs"] * 2 + ["exp_avgs"], strict=True
        )
    ),
    (axpy, (2.0, apart(6), apart(6), expanded(6)), "out: each element"),
    (softmax, (apart(6, 6), expanded(6, 6)), "out: each element"),
    (heat_step, (apart(6, 6), 0.1, expanded(6, 6)), "out: each element"),
    (histogram, (apart(9, dtype=np.float32), 6, 0.0, 1.0, expanded(6, dtype=np.int64)), "out: each element"),
    (rotary, (apart(1, 1, 6, 6), doubles(6, 3), doubles(6, 3), 0, False, expanded(1, 1, 6, 6)), "out: each element"),
    (cross_entropy, (apart(6, 6), np.zeros(6, np.int32), 0.0, -100, expanded(6)), "out: each element"),
    (exclusive_scan, (apart(2, dtype=np.uint8), expanded(2, dtype=np.int64)), "out: each element"),
    (segment_sum, (apart(2), np.zeros(3, np.int32), expanded(2)), "out: each element"),
    (csr_matvec, (apart(3, dtype=int), apart(0, dtype=int), *[apart(n, dtype=np.float32) for n in (0, 2)],
                  expanded(2, dtype=np.float32)), "out: each element"),
    (pairwise, (POINTS[:4], POINTS[:2], expanded(4, 2)), "out: each element"),
    (nearest, (POINTS[:4], POINTS, 2, expanded(4, 2), apart(4, 2, dtype=int)), "distances: each element"),
    (nearest, (POINTS[:4], POINTS, 2, apart(4, 2), expanded(4, 2, dtype=int)), "indices: each element"),
    (sample, (apart(6, 5), 2, 0.5, 1.0, apart(6), expanded(6, dtype=np.int64)), "out: each element"),
    (sosfilt, (SOS, apart(2, 9), INITIAL, expanded(2, 9), apart(3, 2, 2)), "out: each element"),
    (sosfilt, (SOS, apart(2, 9), INITIAL, apart(2, 9), expanded(3, 2, 2)), "final: each element"),
    *(
        (adamw_step, adamw(**{each: [expanded(4) if each == name else apart(4)] for each in LISTS}), f"{name}: each element")
        for name in ("params", "exp_avgs", "exp_avg_sqs")
    ),
]  # fmt: skip


def as_sentence(row):
    return f"{row[0].__name__} refuses {re.sub('[(].*', '', row[2])}"


@contextlib.contextmanager
def refused(args, message):
    """What is called raises a ValueError that begins with `message`, and has written nothing."""
    before = [array.copy() for array in memory_of(args)]
    with pytest.raises(ValueError, match=f"^({message})") as found:
        yield found
    for array, values in zip(memory_of(args), before, strict=True):
        np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("row", [*each_refused(REFUSED), *OVERLAPPING], ids=as_sentence)
def test_refused(row):
    """By compiled code; or before, because its output's notation does not fit, in which case compiled code would, too."""
    kernel, args, message = row
    unfit = rf"{kernel.__name__}\(\): (argument .*(its shape|dimensions)|its output .* cannot be made)"
    for way in WAYS:
        with refused(args, f"{message}|{unfit}") as found:
            kernel(*(made(framework, value) for framework, value in zip(itertools.cycle(way), args, strict=False)))
    if re.match(unfit, str(found.value)):
        with refused(args, message):
            numbas(kernel)(*args)


@pytest.mark.parametrize("row", [*each_refused(OF_TYPES)], ids=as_sentence)
def test_refused_before_anything_is_written(row):
    kernel, args, message = row
    with refused(args, message):
        kernel.py_func(*args)


def test_an_output_that_is_made_is_refused_as_one_that_is_given():
    with pytest.raises(ValueError, match=r"^out: its dtype must be floating"):
        softmax(np.ones((2, 3), np.int32))


def test_empty_lists_are_refused():
    with pytest.raises(ValueError, match="empty list"):
        adamw_step(*adamw(params=[], grads=[], exp_avgs=[], exp_avg_sqs=[]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_memory_for_the_result(framework):
    with pytest.raises(MemoryError):
        run_length_decode(made(framework, doubles(1)), made(framework, ints(1 << 50)))
