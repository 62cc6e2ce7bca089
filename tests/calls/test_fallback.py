"""``__dlpack__`` producers written in Python: what they are asked, and that what they export is given back once."""

import array
import functools
import gc
import itertools

import numba
import numpy as np
import pytest
from frameworks import torch, tvm_ffi
from made_producers import (
    ONLY_NUMBA,
    Dunder,
    Ignorant,
    Ledger,
    Legacy,
    Tabled,
    capsule,
    capsule_name,
    export_legacy,
    export_versioned,
    ffi,
    tabled_type,
)
from oracle import references_kept, type_and_message

from fastexchange import explain, fast_args

KINDS = [Dunder, Legacy, Ignorant]


@fast_args
def total(x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


@fast_args
def ignore(*arguments):
    return len(arguments)


@fast_args
def fails(x):
    if x[0] == 1:
        raise ValueError("from the kernel")
    return x[0]


# ---- the protocol --------------------------------------------------------------------------------------------------


def test_max_version_is_offered_first():
    tensor = Dunder(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert set(tensor.asked) == {(1, 3)}
    assert type(tensor.asked[0]) is tuple


def test_without_it_after_a_type_error():
    tensor = Legacy(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert set(tensor.asked) == {"nothing"}


def test_an_ignored_max_version():
    tensor = Ignorant(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert set(tensor.asked) == {(1, 3)}


def test_a_type_error_of_both_ways_is_the_last_one():
    class Broken(Dunder):
        def __dlpack__(self, **keywords):
            self.asked.append(keywords)
            raise TypeError(f"asked with {len(keywords)}")

    tensor = Broken(np.ones(3))
    for _ in range(2):
        tensor.asked.clear()
        kind, message = type_and_message(total, tensor)
        assert kind is TypeError and "asked with 0" in message
        assert tensor.asked == [{"max_version": (1, 3)}, {}]


def test_other_errors_are_not_asked_twice():
    class Broken(Dunder):
        def __dlpack__(self, **keywords):
            self.asked.append(keywords)
            raise BufferError("no")

    tensor = Broken(np.ones(3))
    assert type_and_message(total, tensor)[0] is BufferError
    assert tensor.asked == [{"max_version": (1, 3)}]


@pytest.mark.parametrize("kind", KINDS)
def test_capsules_are_renamed_when_consumed(kind):
    tensor = kind(np.ones(3))
    total(tensor)
    total(tensor)
    want = b"used_dltensor_versioned" if kind is Dunder else b"used_dltensor"
    assert {capsule_name(made) for made in tensor.capsules} == {want}


def test_the_methods_are_called_on_the_type_as_methods():
    class Meta(type):
        def __dlpack__(cls, **keywords):
            raise AssertionError

    cls = Meta("Meta", (Dunder,), {})
    assert total(cls(np.ones(3))) == 3.0


def test_static_and_class_methods():
    array = np.ones(3)

    class Odd:
        __dlpack_device__ = staticmethod(lambda: (1, 0))
        __dlpack__ = classmethod(lambda cls, *, max_version=None: array.__dlpack__(max_version=max_version))

    assert total(Odd()) == total(Odd()) == 3.0


@pytest.mark.parametrize("device", [1, 3, 11, 13], ids=repr)
def test_devices_that_a_cpu_reads(device):
    assert total(Dunder(np.ones(3), device_type=device)) == 3.0


def test_explain_says_that_each_call_calls_dlpack():
    text = str(explain(Dunder(np.ones(3))))
    assert "__dlpack__" in text and "__dlpack_c_exchange_api__" in text


# ---- given back once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [1, 2, 100])
def test_after_a_success(kind, calls):
    tensor = kind(np.ones(3))
    with references_kept(tensor, tensor.array):
        for _ in range(calls):
            assert total(tensor) == 3.0
        tensor.capsules.clear()
    tensor.ledger.check(tensor.ledger.made)
    assert tensor.ledger.made >= calls


def test_a_repeated_call_exports_once():
    tensor = Dunder(np.ones(3))
    total(tensor)
    before = tensor.ledger.made
    total(tensor)
    assert tensor.ledger.made == before + 1


def test_only_after_the_kernel():
    ledger = Ledger()
    looked_at.append(ledger)
    for _ in range(3):
        assert count_exports(Dunder(np.ones(3), ledger)) == 1
    looked_at.clear()
    ledger.check(ledger.made)


looked_at: list[Ledger] = []


@fast_args
def count_exports(x):
    with numba.objmode(out="int64"):
        out = looked_at[0].out
    return out + 0


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_exception_in_the_kernel(kind):
    tensor = kind(np.ones(3))
    for _ in range(20):
        assert type_and_message(fails, tensor) == (ValueError, "from the kernel")
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_compile_error(kind):
    kernel = fast_args(lambda x: x.no_such_attribute)
    tensor = kind(np.ones(3))
    for _ in range(3):
        type_and_message(kernel, tensor)
    del kernel  # Numba keeps the exception, and so the frames that hold the view that it could not compile for
    gc.collect()
    tensor.ledger.check(tensor.ledger.made)


def bad_arguments():
    yield "lanes", lambda ledger: Dunder(np.ones(3), ledger, lanes=2)
    yield "device", lambda ledger: Dunder(np.ones(3), ledger, device_type=2)
    yield "table", lambda ledger: Tabled(np.ones(3), ledger, data=0)
    yield "swapped", lambda ledger: np.ones(3, ">f8")
    yield "unknown", lambda ledger: object()
    yield "no capsule", lambda ledger: NoCapsule()
    yield "too large", lambda ledger: 2**70


class NoCapsule:
    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None):
        return None


@pytest.mark.parametrize("bad", list(bad_arguments()), ids=lambda bad: bad[0])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_refusal_at_every_position(kind, bad):
    ledger = Ledger()
    good = [kind(np.ones(3), ledger) for _ in range(4)]
    assert ignore(*good, 1) == ignore(*good, 1) == 5
    for position in range(5):
        arguments = list(good)
        arguments.insert(position, bad[1](ledger))
        for _ in range(2):
            raised, message = type_and_message(ignore, *arguments)
            assert issubclass(raised, (BufferError, TypeError, OverflowError)) and f"position {position}" in message, (
                message
            )
    ledger.check(ledger.made)
    assert ignore(*good, 1) == 5
    ledger.check(ledger.made)


def test_the_same_tensor_many_times():
    tensor = Dunder(np.ones(3))
    assert ignore(tensor, tensor, (tensor, 1), tensor) == 4
    before = tensor.ledger.made
    assert ignore(tensor, tensor, (tensor, 1), tensor) == 4
    assert tensor.ledger.made == before + 4
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.slow
def test_more_exports_than_fit_the_first_frame():
    ledger = Ledger()
    tensors = [Dunder(np.ones(3), ledger) for _ in range(200)]
    for _ in range(3):
        assert ignore(*tensors) == 200
        ledger.check(ledger.made)
    tensors[150].lies["lanes"] = 2
    for _ in range(2):
        assert type_and_message(ignore, *tensors)[0] is BufferError
    ledger.check(ledger.made)


@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_calls_export_once_and_give_back(kind, options):
    @fast_args(**options)
    def kernel(x, pair, scale):
        return x.sum() + pair[0].sum() * scale

    ledger = Ledger()
    x, y = kind(np.ones(3), ledger), kind(np.full(2, 5.0), ledger)
    call = functools.partial(kernel, x, (y, array.array("d", [1.0])), 2.0)
    for _ in range(60):
        assert call() == 23.0
    x.capsules.clear(), y.capsules.clear()
    before = ledger.made
    for calls in range(1, 50):
        assert call() == 23.0
        assert ledger.made == before + 2 * calls
        x.capsules.clear(), y.capsules.clear()
        ledger.check(ledger.made)
    # What differs from the cached calls, in what is read first and last, is another call, and gives back what was exported.
    x.array = np.ones(3, np.float32)
    assert call() == 23.0
    x.array = np.ones((3, 1))[:, 0]
    y.array = np.full((2, 1), 5.0)
    assert call() == 23.0
    y.lies["lanes"] = 2
    assert type_and_message(kernel, x, (y, array.array("d", [1.0])), 2.0)[0] is BufferError
    x.capsules.clear(), y.capsules.clear()
    ledger.check(ledger.made)


def test_an_exception_of_a_cached_calls_producer_is_raised_and_the_producer_is_asked_once():
    class Interrupted(Dunder):
        bad: BaseException | None = None

        def __dlpack__(self, *, max_version=None):
            if self.bad is not None:
                self.asked.append(max_version)
                bad, self.bad = self.bad, None
                raise bad
            return super().__dlpack__(max_version=max_version)

    ledger = Ledger()
    first, second = Dunder(np.ones(3), ledger), Interrupted(np.ones(3), ledger)
    kernel = fast_args(lambda x, y: x.sum() + y.sum())
    for _ in range(60):
        assert kernel(first, second) == 6.0
    for error in (KeyboardInterrupt(), BufferError("no"), MemoryError()):
        second.bad, asked = error, len(second.asked)
        assert type_and_message(kernel, first, second)[0] is type(error)
        assert len(second.asked) == asked + 1 and second.bad is None
        assert kernel(first, second) == 6.0
    first.capsules.clear(), second.capsules.clear()
    ledger.check(ledger.made)


def test_a_kept_export_of_a_cached_call_lives_as_long_as_the_array():
    ledger = Ledger()
    kernel = fast_args(returns=None)(lambda x, y: (y[1:], x.size))
    for _ in range(60):
        kernel(Dunder(np.ones(3), ledger), Dunder(np.arange(3.0), ledger))
    gc.collect()
    ledger.check(ledger.made)
    kept, size = kernel(Dunder(np.ones(3), ledger), Dunder(np.arange(3.0), ledger))
    assert ledger.out == 1 and size == 3 and np.from_dlpack(kept).tolist() == [1.0, 2.0]
    del kept
    gc.collect()
    ledger.check(ledger.made)


def test_beside_what_only_numba_understands():
    for kind in KINDS:
        tensor = kind(np.ones(3))
        for _ in range(3):
            assert ignore(ONLY_NUMBA, tensor, (1, tensor)) == 3
        tensor.capsules.clear()
        tensor.ledger.check(tensor.ledger.made)


# ---- other frameworks' tensors behind a Python class ---------------------------------------------------------------


class Wrapped:
    """What many libraries' own tensor classes look like."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, max_version=None, **keywords):
        try:
            return self.tensor.__dlpack__(max_version=max_version, **keywords)
        except TypeError:  # PyTorch before 2.9
            return self.tensor.__dlpack__(**keywords)


def test_a_wrapped_array():
    array = np.arange(4.0)
    wrapped = Wrapped(array)
    with references_kept(array, wrapped):
        for _ in range(5):
            assert total(wrapped) == 6.0


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_wrapped_torch_tensor():
    tensor = torch.arange(4.0)
    wrapped = Wrapped(tensor)
    with references_kept(tensor, wrapped):
        for _ in range(5):
            assert total(wrapped) == 6.0
    doubled = Wrapped(torch.ones(3, requires_grad=True))
    assert type_and_message(total, doubled)[0] in (BufferError, RuntimeError)  # the error of its __dlpack__


@pytest.mark.skipif(tvm_ffi is None, reason="apache-tvm-ffi is not installed")
def test_a_wrapped_tvm_ffi_tensor():
    wrapped = Wrapped(tvm_ffi.from_dlpack(np.arange(4.0)))
    for _ in range(5):
        assert total(wrapped) == 6.0


def test_a_readonly_array_stays_readonly():
    array = np.zeros(3)
    array.flags.writeable = False
    kernel = fast_args(total.py_func)
    assert kernel(Wrapped(array)) == kernel(Dunder(array)) == 0.0
    assert not kernel.signatures[0][0].mutable


def test_jax():
    jax = pytest.importorskip("jax")
    array = jax.numpy.arange(4.0)
    assert total(array) == total(array) == 6.0
    assert not total.signatures[-1][0].mutable
    with pytest.raises(numba.core.errors.TypingError, match="readonly"):
        clear(array)
    assert array.tolist() == [0, 1, 2, 3]


@fast_args
def clear(x):
    x[:] = 0


# ---- order ---------------------------------------------------------------------------------------------------------


def test_producers_in_python_run_before_borrowed_views_are_taken():
    """An array that a producer's Python code replaces is seen as it is afterwards, wherever it stands in the call."""

    @fast_args
    def both(a, b):
        return a[0] * 10 + b[0]

    moving = Tabled(np.full(3, 1.0))

    class Moves(Dunder):
        def __dlpack__(self, *, max_version=None):
            moving.array = np.full(3, moving.array[0] + 1)
            return super().__dlpack__(max_version=max_version)

    mover = Moves(np.full(3, 5.0))
    both(moving, mover)
    both(mover, moving)
    moving.array = np.full(3, 1.0)
    assert both(moving, mover) == 25.0
    assert both(mover, moving) == 53.0


def test_a_producer_that_resizes_another_argument():
    array = np.arange(100.0)

    class Resizes(Dunder):
        def __dlpack__(self, *, max_version=None):
            array.resize(array.size * 3, refcheck=False)
            return super().__dlpack__(max_version=max_version)

    @fast_args
    def sums(x, y):
        return x.size + y.size

    resizer = Resizes(np.ones(3))
    for _ in range(2):
        assert sums(array, resizer) == array.size + 3
        assert sums(resizer, array) == array.size + 3
    before = array.size
    assert sums(array, resizer) == array.size + 3 == 3 * before + 3


def test_a_producer_that_calls_the_same_kernel():
    class Calls(Dunder):
        def __dlpack__(self, *, max_version=None):
            assert total(np.ones(4)) == 4.0
            if self.lies.get("deep"):
                assert total(Calls(np.ones(5), self.ledger)) == 5.0
            return super().__dlpack__(max_version=max_version)

    tensor = Calls(np.ones(3), deep=True)
    for _ in range(5):
        assert total(tensor) == 3.0
    tensor.ledger.check(tensor.ledger.made)


def test_a_producer_whose_dtype_changes_with_every_look():
    class Fickle(Dunder):
        dtypes = itertools.cycle(["f4", "f8", "i4", "i8"])

        def __dlpack__(self, *, max_version=None):
            self.array = self.array.astype(next(self.dtypes))
            return super().__dlpack__(max_version=max_version)

    tensor = Fickle(np.ones(3))
    results = [type_or_result(tensor) for _ in range(8)]
    assert set(results) <= {3.0, BufferError}
    assert results[-1] == 3.0
    tensor.ledger.check(tensor.ledger.made)


def type_or_result(tensor):
    try:
        return total(tensor)
    except BufferError:
        return BufferError


def test_a_deleter_that_calls_python_keeps_the_kernels_exception():
    seen = []

    @ffi.callback("void(DLManagedTensorVersioned *)")
    def deleter(managed):
        try:
            raise RuntimeError("inside the deleter")
        except RuntimeError as error:
            seen.append(str(error))

    class Noisy(Dunder):
        def __dlpack__(self, *, max_version=None):
            managed = export_versioned(self.ledger, self.array, deleter=deleter)
            return capsule(managed, b"dltensor_versioned")

    tensor = Noisy(np.ones(3))
    for _ in range(3):
        assert type_and_message(fails, tensor) == (ValueError, "from the kernel")
    assert len(seen) >= 3


def test_a_producer_that_changes_its_type_in_the_middle():
    other = tabled_type("Other")

    class Changes(Dunder):
        def __dlpack__(self, *, max_version=None):
            self.borrows = 0
            made = super().__dlpack__(max_version=max_version)
            self.__class__ = other
            return made

    for _ in range(3):
        tensor = Changes(np.ones(3))
        assert type_or_result(tensor) in (3.0, BufferError)
        tensor.ledger.check(tensor.ledger.made)


def test_legacy_exports_with_every_field():
    ledger = Ledger()
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4).transpose(2, 0, 1)
    tensor = Legacy(array, ledger)
    assert total(tensor) == total(tensor) == array.sum()
    assert export_legacy(Ledger(), array).dl_tensor.ndim == 3
    ledger.check(ledger.made)
