"""``__dlpack__`` producers written in Python: what they may do meanwhile, what cached calls give back.

``tests/exchange/test_ownership.py`` and ``test_hostile.py`` have all else that producers may do; ``test_dlpack_suites.py`` has
what they are asked.
"""

import array
import functools
import itertools
import traceback

import numba
import numpy as np
import pytest
from frameworks import torch
from hostile_producers import hostile_type, setting
from made_producers import Dunder, Ignorant, Ledger, Legacy, Tabled
from oracle import type_and_message
from ways import Acting

from fastexchange import fast_args

total = fast_args(lambda x: x.sum())


def check_given_back(*tensors) -> None:
    """All that they have exported; their notes of it go."""
    for tensor in tensors:
        tensor.capsules.clear()
    for tensor in tensors:
        tensor.ledger.check(tensor.ledger.made)


MAX_VERSION = {"max_version": (1, 3)}
ASKED = {TypeError: [MAX_VERSION, {}], type("Refused", (TypeError,), {}): [MAX_VERSION], BufferError: [MAX_VERSION]}


@pytest.mark.parametrize(("error", "asked"), ASKED.items())
def test_only_a_type_error_is_asked_again_and_the_last_one_is_raised(error, asked):
    def refuse(self, **keywords):
        self.asked.append(keywords)
        raise error(f"asked with {len(keywords)}")

    tensor = type("Broken", (Dunder,), {"__dlpack__": refuse})(np.ones(3))
    for _ in range(2):
        tensor.asked.clear()
        kind, message = type_and_message(total, tensor)
        assert issubclass(kind, error) and f"asked with {len(asked[-1])}" in message and tensor.asked == asked


ledger_of_all = Ledger()


@fast_args
def count_exports(x):
    with numba.objmode(out="int64"):
        out = ledger_of_all.out
    return out + 0


def test_they_are_given_back_only_after_the_kernel():
    assert [count_exports(Dunder(np.ones(3), ledger_of_all)) for _ in range(3)] == [1] * 3
    ledger_of_all.check(ledger_of_all.made)


SUMS = [fast_args(lambda x, pair, scale: 3 * x[0] + 2 * pair[0][0] * scale, nogil=nogil) for nogil in (False, True)]


@pytest.mark.parametrize("kernel", SUMS, ids=["with the GIL", "without"])
@pytest.mark.parametrize("kind", [Dunder, Legacy, Ignorant])
def test_cached_calls_export_once_and_give_back(kind, kernel):
    ledger = Ledger()
    x, y = kind(np.ones(3), ledger), kind(np.full(2, 5.0), ledger)
    call = functools.partial(kernel, x, (y, array.array("d", [1.0])), 2.0)

    assert [call() for _ in range(4)] == [23.0] * 4
    before = ledger.made
    for calls in range(1, 5):
        assert call() == 23.0 and ledger.made == before + 2 * calls
        check_given_back(x, y)
    # What differs from the cached calls, in what is read first and last, is another call, and gives back what was exported.
    x.array = np.ones(3, np.float32)
    assert call() == 23.0
    x.array = np.ones((3, 1))[:, 0]
    y.array = np.full((2, 1), 5.0)
    assert call() == 23.0
    y.lies["lanes"] = 2
    assert type_and_message(call)[0] is BufferError
    check_given_back(x, y)


def test_a_producer_is_asked_once_whatever_signature_its_tensor_has():
    """The last call had another: what its cached call has exported is read by the general path."""
    kernel, x = fast_args(lambda x, by: x.sum() + by), Dunder(np.ones(3))
    arrays = [np.ones(3), np.ones(3, np.float32), np.ones((2, 2))[:, 1:], np.ones(3)[::-1]]
    for x.array in arrays:
        assert kernel(x, 1) == x.array.size + 1
    before = x.ledger.made
    for count, x.array in enumerate(3 * arrays, start=1):
        assert kernel(x, 1) == x.array.size + 1 and x.ledger.made == before + count
    check_given_back(x)


def test_an_error_in_a_call_that_a_row_has_left_names_its_argument():
    """The first argument's export has another rank than its row, and is not made again; the second one's view raises."""
    kernel, fails = fast_args(lambda x, y: x.size + y.size), setting(-1, ValueError, "no view today")
    x, y = Dunder(np.ones(3)), hostile_type("FailsLater")(view=fails, behaves=True)
    size = kernel(np.ones(0), y)
    for x.array in (np.ones((3, 1)), np.ones(3)):
        assert {kernel(x, y) for _ in range(3)} == {size + 3}
    before, x.array, y.behaves = x.ledger.made, np.ones((3, 1)), False
    kind, message = type_and_message(kernel, x, y)
    assert kind is ValueError and "argument 'y' (position 1)" in message and x.ledger.made == before + 1
    x.array, y.behaves = np.ones(3), True
    assert kernel(x, y) == size + 3
    check_given_back(x)


def test_producers_in_python_run_before_borrowed_views_are_taken():
    both = fast_args(lambda a, b: a[0] * 10 + b[0] + a.size + b.size)
    moving, array = Tabled(np.full(3, 1.0)), np.ones(100)
    mover, resizer = Acting(np.full(3, 5.0)), Acting(np.ones(3))
    mover.act = lambda: setattr(moving, "array", moving.array + 1)
    resizer.act = lambda: array.resize(array.size * 3, refcheck=False)
    both(moving, mover), both(mover, moving)  # a first call asks twice
    moving.array = np.full(3, 1.0)
    assert both(moving, mover) == 25.0 + 6 and both(mover, moving) == 53.0 + 6
    for _ in range(2):
        assert both(array, resizer) == 11 + array.size + 3 and both(resizer, array) == 11 + array.size + 3
    before = array.size
    assert both(array, resizer) == 11 + 3 * before + 3 == 11 + array.size + 3


def raises(x, y=None):
    if x[0] == 1:
        raise ValueError("from the kernel")
    if y is not None:
        y.fill(0)


def frames_of(kernel, *args, **kwargs) -> list[str]:
    """The functions in the traceback of what a call raises; Dynamo, once it has traced a kernel, leaves wrappers."""
    try:
        kernel(*args, **kwargs)
    except ValueError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:] if "_dynamo" not in frame.filename]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("options", [{}, {"out": "x[n] -> y[n]"}, {"nogil": True}], ids=str)
def test_a_first_call_has_the_kernels_frame_only(options):
    """Native code makes the first call with a signature, too, after Python has learnt it; Python allocates first outputs."""
    for make in [np.asarray, *[Dunder] * ("out" not in options), *([torch.from_numpy] if torch is not None else [])]:
        kernel = fast_args(**options)(raises)
        found = [frames_of(kernel, make(np.ones(2))) for _ in range(2)]
        assert found[1] == ["raises"] and found[0][-1] == "raises"
        if "out" not in options:
            assert found[0] == ["__call__", "_call_first", "raises"]
            assert frames_of(kernel, make(np.ones(2, np.float32))) == ["raises"]  # a new signature
            assert frames_of(kernel, x=make(np.ones(2, np.int64))) == ["raises"] and kernel.counts().slow == 3


def test_calls_that_change_after_they_were_learnt_are_made():
    dtypes, alternates = itertools.cycle((np.float32, np.float64, np.int64)), Acting(np.ones(2))
    alternates.act = lambda: setattr(alternates, "array", np.ones(2, next(dtypes)))
    kernel = fast_args(lambda x: x[0] + x[1])
    assert [kernel(alternates) for _ in range(8)] == [2] * 8
