"""``__dlpack__`` producers written in Python: what they are asked, what they may do meanwhile, what cached calls give back.

``tests/exchange/test_ownership.py`` and ``test_hostile.py`` have all else that producers may do.
"""

import array
import functools
import itertools
import traceback

import numba
import numpy as np
import pytest
from exchanges import Given
from frameworks import torch
from hostile_producers import hostile_type, setting
from interoperability import Wrapper, jax
from made_producers import ONLY_NUMBA, Dunder, Ignorant, Ledger, Legacy, Tabled, capsule_name
from oracle import references_kept, type_and_message
from ways import Acting

from fastexchange import fast_args

USED = b"used_dltensor"
KINDS = {Dunder: (USED + b"_versioned", (1, 3)), Legacy: (USED, "nothing"), Ignorant: (USED, (1, 3))}
"""How their capsules are called when they are consumed, and with which `max_version` they are asked."""

total = fast_args(lambda x: x.sum())
ignore = fast_args(lambda *arguments: len(arguments))


def check_given_back(*tensors) -> None:
    """All that they have exported; their notes of it go."""
    for tensor in tensors:
        tensor.capsules.clear()
    for tensor in tensors:
        tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_is_consumed_and_given_back(kind):
    tensor = kind(np.ones(3))
    with references_kept(tensor, tensor.array):
        assert [total(tensor) for _ in range(4)] == [3.0] * 4
        assert [ignore(ONLY_NUMBA, tensor, (1, tensor)) for _ in range(3)] == [3] * 3
        consumed, asked = KINDS[kind]
        assert {capsule_name(made) for made in tensor.capsules} == {consumed}
        assert set(tensor.asked) == {asked} and type(tensor.asked[0]) is type(asked)
        check_given_back(tensor)


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


def test_the_methods_are_called_on_the_type_as_methods():
    meta = type("Meta", (type,), {"__dlpack__": lambda cls, **keywords: 1 / 0})
    odd = type("Odd", (), {
        "__dlpack_device__": staticmethod(lambda: (1, 0)),
        "__dlpack__": classmethod(lambda cls, *, max_version=None: np.ones(3).__dlpack__(max_version=max_version)),
    })()  # fmt: skip
    assert total(meta("Meta", (Dunder,), {})(np.ones(3))) == total(odd) == total(odd) == 3.0


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
@pytest.mark.parametrize("kind", KINDS)
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


def test_an_exception_of_a_cached_calls_producer_is_raised_and_the_producer_is_asked_once():
    first, second, asked = Dunder(np.ones(3)), Acting(np.ones(3)), []
    kernel = fast_args(lambda x, y: x.sum() + y.sum())
    assert [kernel(first, second) for _ in range(4)] == [6.0] * 4
    for error in (KeyboardInterrupt, BufferError, MemoryError):

        def fail(error=error):
            asked.append(error)
            raise error("no")

        second.act = fail
        assert type_and_message(kernel, first, second)[0] is error is asked.pop() and not asked
        second.act = None
        assert kernel(first, second) == 6.0
    check_given_back(first, second)


def test_what_is_readonly_stays_so():
    array, kernel = np.zeros(3), fast_args(total.py_func)
    array.flags.writeable = False
    of_a_library = Given(lambda max_version, **_: array.__dlpack__(max_version=max_version))
    assert kernel(Wrapper(array)) == kernel(Dunder(array)) == kernel(of_a_library) == 0.0
    if jax is not None:
        immutable = jax.numpy.arange(3.0)
        assert kernel(immutable) == kernel(immutable) == 3.0
        assert type_and_message(fast_args(lambda x: x.fill(0)), immutable)[0] is numba.core.errors.TypingError
        assert immutable.tolist() == [0, 1, 2]
    assert not any(signature[0].mutable for signature in kernel.signatures)


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
