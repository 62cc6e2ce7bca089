"""Tracebacks of kernels' exceptions: native code makes the first call with a signature, too, after Python has learnt it."""

import traceback

import numpy as np
import pytest
from frameworks import torch
from made_producers import Dunder

from fastexchange import fast_args


def raises(x, y=None):
    if x[0] == 1:
        raise ValueError("from the kernel")
    if y is not None:
        y.fill(0)


def names(kernel, *args, **kwargs) -> list[str]:
    """The functions in the traceback of the exception that a call raises, without this one and PyTorch's wrappers.

    After Dynamo has traced a kernel, functions of this package stay wrapped.
    """
    try:
        kernel(*args, **kwargs)
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        return [frame.name for frame in frames if "_dynamo" not in frame.filename]
    raise AssertionError("nothing was raised")


TENSORS = [np.asarray, Dunder] + ([torch.from_numpy] if torch is not None else [])


@pytest.mark.parametrize("options", [{}, {"out": "x[n] -> y[n]"}, {"nogil": True}], ids=str)
@pytest.mark.parametrize("make", TENSORS)
def test_a_first_call_has_the_kernels_frame_only(make, options):
    if make is Dunder and "out" in options:
        pytest.skip("Python allocates the outputs in each call")
    kernel = fast_args(**options)(raises)
    found = [names(kernel, make(np.ones(2))) for _ in range(2)]
    assert found[1] == ["raises"]
    if "out" in options:  # Python makes the first call with each signature
        assert found[0][-1] == "raises"
        return
    assert found[0] == ["__call__", "_call_first", "raises"]
    assert names(kernel, make(np.ones(2, np.float32))) == ["raises"]  # a new signature
    assert names(kernel, x=make(np.ones(2, np.int64))) == ["raises"]
    assert kernel.counts().slow == 3


def test_calls_that_change_after_they_were_learnt_are_made():
    """The producer's dtype changes between the export for Python and that for native code."""

    class Alternates(Dunder):
        turns = 0

        def __dlpack__(self, **keywords):
            Alternates.turns += 1
            self.array = np.ones(2, (np.float32, np.float64, np.int64)[Alternates.turns % 3])
            return super().__dlpack__(**keywords)

    kernel = fast_args(lambda x: x[0] + x[1])
    for _ in range(8):
        assert kernel(Alternates(np.ones(2))) == 2
