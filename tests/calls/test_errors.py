"""Bad input and exceptions: the right exception, a message that names the argument, nothing leaked, the next call works."""

import contextlib
import ctypes
import gc
import sys
import traceback

import numba
import numpy as np
import pytest
from failing_kernels import fails
from frameworks import is_borrowed, torch
from interpreter import run_python
from made_producers import (
    ONLY_NUMBA,
    Dunder,
    Ledger,
    Legacy,
    Tabled,
    WithMethods,
    capsule,
    exchange_table,
    export_versioned,
    ffi,
    tabled_type,
    tabled_type_with_methods,
)  # fmt: skip
from numba import types
from oracle import numbas, references_kept, type_and_message

from fastexchange import explain, fast_args

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args
def total(first, x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


def check_refused(argument, *words: str, kernel=total, kind=BufferError):
    """`argument` is refused as the second of two, on the slow path and after, and it and its neighbour are let go."""
    good = np.arange(4.0)
    assert kernel(good, good) == kernel(good, good) == 6.0
    messages = []
    with references_kept(argument, good):
        for _ in range(3):
            raised, message = type_and_message(kernel, good, argument)
            assert raised is kind, message
            messages.append(message)
    for word in ("'x'", "position 1", *words):
        assert word in messages[0], messages[0]
    assert messages[1] == messages[2] == messages[0]
    assert kernel(good, good) == 6.0


# ---- objects that no path can handle -------------------------------------------------------------------------------


class Unknown:
    pass


class OnlyDlpack:
    def __dlpack__(self, max_version=None):
        raise AssertionError("not to be called")


class OnlyDevice:
    def __dlpack_device__(self):
        raise AssertionError("not to be called")


@pytest.mark.parametrize(
    "thing", [Unknown(), OnlyDlpack(), OnlyDevice(), object(), lambda: 1], ids=lambda t: type(t).__name__
)
def test_an_object_that_no_path_can_handle(thing):
    check_refused(
        thing,
        type(thing).__name__,
        "__dlpack_c_exchange_api__",
        "__dlpack__",
        "numba.typeof",
        "total()",
        kind=TypeError,
    )


def test_half_a_protocol_is_named():
    assert "__dlpack_device__" in type_and_message(total, 1, OnlyDlpack())[1]


@fast_args
def gathers(*arrays):
    return len(arrays)


@fast_args
def with_default(x, y=None):
    return 1


def test_the_argument_is_named_wherever_it_is():
    thing = Unknown()
    for kernel, arguments, keywords, words in [
        (total, (thing, 1), {}, ("'first'", "position 0")),
        (total, (), {"x": thing, "first": 1}, ("'x'", "position 1")),
        (with_default, (1,), {"y": thing}, ("'y'", "position 1")),
        (gathers, (1, thing), {}, ("'arrays[1]'", "position 1")),
        (total, (1, (2, (thing,))), {}, ("'x'", "position 1")),
    ]:
        kind, message = type_and_message(kernel, *arguments, **keywords)
        assert kind is TypeError
        assert all(word in message for word in (*words, "Unknown")), message


# ---- tensors that cannot go to a CPU kernel ------------------------------------------------------------------------


def producers(**lies):
    """A tensor of each kind of producer that says `lies` of itself."""
    array = np.arange(4.0)
    yield "table", Tabled(array, **lies)
    yield "export only", tabled_type(dltensor_from_py_object_no_sync=None)(array, **lies)
    yield "__dlpack__", Dunder(array, **lies)
    yield "legacy", Legacy(array, **lies)


REFUSED = {
    "CUDA": ({"device_type": 2}, ("kDLCUDA:0", "CPU")),
    "second CUDA device": ({"device_type": 2, "device_id": 1}, ("kDLCUDA:1",)),
    "Metal": ({"device_type": 8}, ("kDLMetal",)),
    "ROCm": ({"device_type": 10}, ("kDLROCM",)),
    "external device": ({"device_type": 12}, ("kDLExtDev",)),
    "unknown device": ({"device_type": 77}, ("77",)),
    "device type 0": ({"device_type": 0}, ("0",)),
    "negative device": ({"device_type": -1}, ("device",)),
    "NULL data": ({"data": 0}, ("NULL",)),
    "two lanes": ({"lanes": 2}, ("2 lanes",)),
    "no lanes": ({"lanes": 0}, ("0 lanes",)),
    "65 dimensions": ({"ndim": 65, "shape": (1,) * 65, "strides": (1,) * 65}, ("65", "64")),
    "too many dimensions to read": ({"ndim": 2**31 - 1}, ("2147483647",)),
    "negative ndim": ({"ndim": -1}, ("-1",)),
    "no shape": ({"shape": None}, ("shape",)),
    "negative extent": ({"shape": (-1,)}, ("shape",)),
    "most negative extent": ({"shape": (-(2**63),)}, ("shape",)),
    "too many elements": ({"shape": (2**62,)}, ("64 bits",)),
    "product overflows": ({"ndim": 2, "shape": (2**32, 2**32), "strides": (0, 0)}, ("64 bits",)),
    "product wraps to 4": ({"ndim": 2, "shape": (2**62 + 1, 4), "strides": (0, 0)}, ("64 bits",)),
    "stride overflows": ({"strides": (2**62,), "shape": (2,)}, ("64 bits",)),
    "most negative stride": ({"strides": (-(2**63),), "shape": (2,)}, ("64 bits",)),
    "bfloat32": ({"code": 4, "bits": 32}, ("kDLBfloat of 32 bits",)),
    "float4": ({"code": 17, "bits": 4}, ("kDLFloat4_e2m1fn of 4 bits",)),
    "opaque handle": ({"code": 3, "bits": 64}, ("kDLOpaqueHandle",)),
    "unknown code": ({"code": 200, "bits": 64}, ("200",)),
    "int of 0 bits": ({"code": 0, "bits": 0}, ("kDLInt of 0 bits",)),
    "int of 4 bits": ({"code": 0, "bits": 4}, ("kDLInt of 4 bits",)),
    "int of 12 bits": ({"code": 0, "bits": 12}, ("kDLInt of 12 bits",)),
    "int of 128 bits": ({"code": 0, "bits": 128}, ("kDLInt of 128 bits",)),
    "float of 128 bits": ({"code": 2, "bits": 128}, ("kDLFloat of 128 bits",)),
    "bool of 1 bit": ({"code": 6, "bits": 1}, ("kDLBool of 1 bits",)),
    "complex of 16 bits": ({"code": 5, "bits": 16}, ("kDLComplex of 16 bits",)),
}


@pytest.mark.parametrize("lie", REFUSED)
def test_tensors_refused(lie):
    lies, words = REFUSED[lie]
    for name, tensor in producers(**lies):
        try:
            check_refused(tensor, *words)
            tensor.ledger.check(tensor.ledger.made)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("lie", REFUSED)
def test_tensors_refused_beside_what_only_numba_understands(lie):
    """Through Numba's own dispatcher the outcome is the same."""
    lies, words = REFUSED[lie]
    for name, tensor in producers(**lies):
        kind, message = type_and_message(total, ONLY_NUMBA, tensor)
        assert kind is BufferError, (name, kind, message)
        assert all(word in message for word in ("'x'", "position 1", *words)), (name, message)
        tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("lie", REFUSED)
def test_tensors_refused_inside_tuples(lie):
    lies, words = REFUSED[lie]
    for name, tensor in producers(**lies):
        kind, message = type_and_message(total, 1, (np.ones(2), (tensor, 1)))
        assert kind is BufferError, (name, kind, message)
        assert all(word in message for word in ("'x'", "position 1", *words)), (name, message)


ACCEPTED = {
    "pinned": {"device_type": 3},
    "managed": {"device_type": 13},
    "pinned ROCm": {"device_type": 11},
    "device id": {"device_id": 5},
    "NULL strides": {"strides": None},
    "NULL data without elements": {"data": 0, "shape": (0,)},
    "byte offset": {"byte_offset": 8, "shape": (3,)},
    "any stride of one element": {"shape": (1,), "strides": (2**40,)},
    "no dimensions, no shape": {"ndim": 0, "shape": None, "strides": None},
    "negative stride": {"byte_offset": 24, "strides": (-1,)},
    "minor version": {"version": (1, 99)},
    "unknown flags": {"flags": 1 << 40},
}
SUMS = {
    "NULL data without elements": 0.0, "any stride of one element": 0.0, "no dimensions, no shape": 0.0
}  # fmt: skip


@pytest.mark.parametrize("truth", ACCEPTED)
def test_unusual_tensors_accepted(truth):
    for name, tensor in producers(**ACCEPTED[truth]):
        if truth == "minor version" and name == "legacy":
            continue
        sums = [total(1, tensor), total(1, tensor), total(ONLY_NUMBA, tensor)]
        assert sums == [SUMS.get(truth, 6.0)] * 3, (name, sums)
        tensor.ledger.check(tensor.ledger.made)


def test_empty_tensors_whose_extents_do_not_fit_numpy():
    """Numba's dispatcher takes NumPy arrays only, so there they cannot be accepted; then nowhere."""
    for name, tensor in producers(ndim=3, shape=(2**40, 0, 2**40), strides=(0, 0, 0)):
        for first in (1, 1, ONLY_NUMBA):
            kind, message = type_and_message(total, first, tensor)
            assert kind is BufferError and "64 bits" in message, (name, message)
        tensor.ledger.check(tensor.ledger.made)


def test_null_strides_mean_row_major():
    @fast_args
    def corner(x):
        return x[1, 0]

    array = np.arange(6.0)
    for _, tensor in producers(ndim=2, shape=(2, 3), strides=None):
        tensor.array = array
        assert corner(tensor) == corner(tensor) == 3.0
    assert {(array.ndim, array.layout) for (array,) in corner.signatures} == {(2, "C")}


def test_the_device_is_the_exported_tensors():
    """``__dlpack_device__`` is for those who have a stream to pass: a CPU kernel looks at what it was given."""
    tensor = Dunder(np.ones(3), device=(1, 0), device_type=2, device_id=3)
    check_refused(tensor, "kDLCUDA:3", "CPU")


# ---- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [">f8", ">i4", ">u2", ">c16", ">M8[s]", ">U3"])
def test_byte_swapped_arrays(dtype):
    check_refused(np.zeros(3, dtype), "byte order", repr(np.dtype(dtype)))


def test_byte_swapped_arrays_anywhere():
    swapped = np.zeros(3, ">f8")
    for arguments in [(swapped, ONLY_NUMBA), (1, (swapped, 1)), (ONLY_NUMBA, (1, (swapped,)))]:
        kind, message = type_and_message(total, *arguments)
        assert kind is BufferError
        assert "byte order" in message, message


def test_a_structured_array_with_a_byte_swapped_field():
    check_refused(np.zeros(3, [("a", "i4"), ("b", ">f8")]), "byte order")


def test_a_swapped_array_of_single_bytes_is_none():
    assert total(1, np.arange(4, dtype=">i1")) == 6.0
    assert total(1, np.arange(4, dtype=">u1")) == 6.0


def test_numpys_most_dimensions():
    @fast_args
    def count(x):
        return x.ndim

    array = np.zeros((1,) * 64)
    for tensor in (array, Dunder(array), Tabled(array)):
        assert count(tensor) == count(tensor) == 64


@needs_torch
def test_torch_tensors_that_are_not_on_the_cpu():
    kind, message = type_and_message(total, 1, torch.empty(3, device="meta"))
    assert issubclass(kind, (BufferError, RuntimeError, ValueError, TypeError))
    assert "'x'" in message and "position 1" in message


@pytest.mark.slow
@needs_torch
def test_torch_dtypes_that_numpy_has_with_ml_dtypes_only():
    run_python(
        """
        import sys
        sys.modules["ml_dtypes"] = None  # whatever is installed
        import torch
        from fastexchange import fast_args, from_dlpack

        @fast_args
        def first(x):
            return x[0]

        assert first(torch.ones(3, dtype=torch.bfloat16)) == first(torch.ones(3).to(torch.float8_e4m3fn)) == 1.0
        for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
            tensor = torch.ones(3).to(dtype)
            for refused, advice in ((first, "storage=True"), (from_dlpack, "import ml_dtypes")):
                if dtype is torch.bfloat16 and refused is first:
                    continue
                try:
                    refused(tensor)
                except BufferError as error:
                    assert advice in str(error), error
                else:
                    raise AssertionError("not refused")
        del sys.modules["ml_dtypes"]
        try:
            import ml_dtypes
        except ImportError:
            sys.exit()
        assert from_dlpack(torch.ones(3, dtype=torch.bfloat16)).dtype == ml_dtypes.bfloat16
        """
    )


@needs_torch
def test_torch_tensors_without_memory():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    check_refused(tensor, "NULL" if is_borrowed() else "storage has been freed")


@needs_torch
def test_torch_tensors_that_are_not_dense():
    for tensor in (torch.ones(3).to_sparse(), torch.ones(3, 3).to_sparse_csr()):
        with references_kept(tensor):
            for _ in range(3):
                kind, message = type_and_message(total, 1, tensor)
                assert issubclass(kind, (BufferError, RuntimeError, NotImplementedError))
                assert "'x'" in message and "position 1" in message
    assert total(1, torch.ones(3)) == 3.0


# ---- capsules of __dlpack__ ----------------------------------------------------------------------------------------


class Returns:
    """``__dlpack__`` gives back what it was given."""

    def __init__(self, result):
        self.result = result

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None):
        return self.result


@pytest.mark.parametrize("result", [None, 1, "text", np.ones(3), (1, 2)], ids=repr)
def test_dlpack_that_returns_no_capsule(result):
    check_refused(Returns(result), "__dlpack__", type(result).__name__)


@pytest.mark.parametrize(
    "name", [b"dltensor_v2", b"used_dltensor", b"used_dltensor_versioned", b"dlpack_exchange_api", b"", None]
)
def test_dlpack_that_returns_a_capsule_of_another_name(name):
    ledger = Ledger()
    managed = export_versioned(ledger, np.ones(3))
    check_refused(Returns(capsule(managed, name)), "__dlpack__")
    assert ledger.deleted == 0


def test_a_capsule_consumed_already():
    total(1, Dunder(np.ones(3)))  # the first call of its shape asks more than once
    ledger = Ledger()
    producer = Returns(capsule(export_versioned(ledger, np.ones(3)), b"dltensor_versioned"))
    assert total(1, producer) == 3.0
    assert type_and_message(total, 1, producer)[0] is BufferError
    ledger.check(1)


@pytest.mark.parametrize("version", [(2, 0), (0, 8), (99, 1)])
def test_managed_tensors_of_another_major_version_are_given_back(version):
    for tensor in (
        Dunder(np.ones(3), version=version),
        tabled_type(dltensor_from_py_object_no_sync=None)(np.ones(3), version=version),
    ):
        check_refused(tensor, "version")
        type_and_message(total, ONLY_NUMBA, tensor)
        tensor.ledger.check(tensor.ledger.made)


def test_managed_tensors_without_a_deleter():
    for tensor in (Dunder(np.ones(3), deleter=ffi.NULL), Legacy(np.ones(3), deleter=ffi.NULL)):
        assert [total(1, tensor), total(1, tensor), total(ONLY_NUMBA, tensor)] == [3.0] * 3


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None):
        raise self.error


class Custom(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)
        self.first, self.second = first, second


class OutOfLuck(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        BufferError("no"),
        ValueError("no"),
        RuntimeError("no"),
        TypeError("no"),
        AttributeError("no"),
        NotImplementedError("no"),
    ],
    ids=repr,
)
def test_exceptions_of_a_producer_name_the_argument(error):
    for first in (1, ONLY_NUMBA):
        for _ in range(2):
            kind, message = type_and_message(total, first, Raises(error))
            assert kind is type(error)
            assert "no" in message and "'x'" in message and "position 1" in message


@pytest.mark.parametrize(
    "error", [Custom(1, 2), KeyError("key"), OutOfLuck("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr
)
def test_other_exceptions_of_a_producer_arrive_as_they_are(error):
    for first in (1, ONLY_NUMBA):
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                total(first, Raises(error))
            assert caught.value is error
    if isinstance(error, Exception) and sys.version_info >= (3, 11):
        assert error.__notes__ == ["raised for total(): argument 'x' (position 1)"]
    else:
        assert not hasattr(error, "__notes__")
    assert total(1, np.ones(3)) == 3.0


def test_an_exception_that_takes_no_note():
    error = KeyError("key")
    error.__notes__ = 5
    with pytest.raises(KeyError) as caught:
        total(1, Raises(error))
    assert caught.value is error and error.__notes__ == 5


def test_the_cause_of_a_producers_exception_is_kept():
    error = BufferError("no")
    with pytest.raises(BufferError) as caught:
        total(1, Raises(error))
    assert caught.value.__cause__ is error
    assert "__dlpack__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# ---- exchange tables -----------------------------------------------------------------------------------------------


def wrong_capsules():
    """Values of ``__dlpack_c_exchange_api__`` that cannot be used, and a word of why."""
    table = exchange_table()
    yield "capsule of another name", capsule(table, b"dltensor"), "dlpack_exchange_api"
    yield "capsule without a name", capsule(table, None), "dlpack_exchange_api"
    yield "an int", 3, "dlpack_exchange_api"
    yield "a property", property(lambda self: 1), "dlpack_exchange_api"
    yield "version 2", capsule(exchange_table(version=(2, 0)), b"dlpack_exchange_api"), "2.0"
    yield "version 0", capsule(exchange_table(version=(0, 9)), b"dlpack_exchange_api"), "0.9"
    older = exchange_table(version=(2, 5))
    yield "version 3 over 2", capsule(exchange_table(version=(3, 1), prev=older), b"dlpack_exchange_api"), "3.1"
    for name in (
        "managed_tensor_allocator", "managed_tensor_from_py_object_no_sync", "managed_tensor_to_py_object_no_sync",
        "current_work_stream",
    ):  # fmt: skip
        yield f"no {name}", capsule(exchange_table(**{name: None}), b"dlpack_exchange_api"), name
    looped = exchange_table(version=(2, 0))
    looped.header.prev_api = ffi.cast("DLPackExchangeAPIHeader *", looped)
    yield "a loop of tables", capsule(looped, b"dlpack_exchange_api"), "2.0"


@pytest.mark.parametrize("case", list(wrong_capsules()), ids=lambda case: case[0])
def test_a_table_that_cannot_be_used_falls_back_to_dlpack(case):
    _, value, word = case
    base = tabled_type_with_methods()
    cls = type("Broken", (base,), {"__dlpack_c_exchange_api__": value, "__dlpack__": WithMethods.__dlpack__})
    tensor = cls(np.ones(3))
    assert total(1, tensor) == total(1, tensor) == total(ONLY_NUMBA, tensor) == 3.0
    assert tensor.dunder_calls >= 3 and tensor.borrows == 0
    tensor.ledger.check(tensor.ledger.made)
    assert word in str(explain(tensor)), str(explain(tensor))
    assert word in str(total.explain(1, tensor)), str(total.explain(1, tensor))


@pytest.mark.parametrize("case", list(wrong_capsules()), ids=lambda case: case[0])
def test_a_table_that_cannot_be_used_and_no_dlpack_is_a_type_error_that_says_why(case):
    _, value, word = case
    cls = type("Broken", (), {"__dlpack_c_exchange_api__": value})
    check_refused(cls(), "Broken", word, kind=TypeError)


def test_an_older_table_behind_a_newer_one_is_used():
    older = exchange_table(version=(1, 1))
    between = exchange_table(version=(2, 0), prev=older)
    newest = exchange_table(version=(3, 0), prev=between, managed_tensor_allocator=None)
    cls = type("Newer", (tabled_type_with_methods(),), {
        "__dlpack_c_exchange_api__": capsule(newest, b"dlpack_exchange_api"), "__dlpack__": WithMethods.__dlpack__,
    })  # fmt: skip
    tensor = cls(np.ones(3))
    assert total(1, tensor) == total(1, tensor) == 3.0
    assert tensor.dunder_calls == 0 and tensor.borrows >= 2


def test_a_minor_version_of_the_future_is_used():
    tensor = tabled_type(version=(1, 99))(np.ones(3))
    assert total(1, tensor) == total(1, tensor) == 3.0


def test_a_table_without_borrowed_views_exports_each_time():
    tensor = tabled_type(dltensor_from_py_object_no_sync=None)(np.ones(3))
    assert total(1, tensor) == total(1, tensor) == total(ONLY_NUMBA, tensor) == 3.0
    assert tensor.borrows == 0
    tensor.ledger.check(tensor.ledger.made)
    assert "dltensor_from_py_object_no_sync" in str(explain(tensor))


SetString = types.ExternalFunction("PyErr_SetString", types.void(types.intp, types.intp))


def failing_function(return_code: int, error: type[BaseException] | None):
    """A C function ``int (void *, void *)`` that returns `return_code`, with `error` set if given."""
    if error is None:
        return numba.cfunc("int32(intp, intp)")(lambda py_object, out: return_code)
    message = ctypes.create_string_buffer(b"the producer is sorry")
    where, what = id(error), ctypes.addressof(message)

    @numba.cfunc("int32(intp, intp)")
    def function(py_object, out):
        SetString(where, what)
        return return_code

    function.message = message
    return function


@pytest.mark.parametrize("error", [BufferError, RuntimeError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("return_code", [-1, 1, 0])
def test_functions_of_a_table_that_set_an_exception(error, return_code):
    function = failing_function(return_code, error)
    for name in ("dltensor_from_py_object_no_sync", "managed_tensor_from_py_object_no_sync"):
        functions = {"dltensor_from_py_object_no_sync": None, name: function.address}
        tensor = tabled_type(**functions)(np.ones(3))
        with references_kept(tensor):
            for first in (1, 1, ONLY_NUMBA):
                if first == ONLY_NUMBA and name.startswith("dltensor"):
                    continue  # only the export is asked
                kind, message = type_and_message(total, first, tensor)
                assert kind is error and "the producer is sorry" in message
                if error in (BufferError, RuntimeError):
                    assert "'x'" in message and "position 1" in message
    assert total(1, np.ones(3)) == 3.0


@pytest.mark.parametrize("name", ["dltensor_from_py_object_no_sync", "managed_tensor_from_py_object_no_sync"])
def test_functions_of_a_table_that_fail_and_do_not_say_why(name):
    functions = {"dltensor_from_py_object_no_sync": None, name: failing_function(-1, None).address}
    check_refused(tabled_type(**functions)(np.ones(3)), "did not say why")


def test_an_export_that_succeeds_with_null():
    functions = {
        "dltensor_from_py_object_no_sync": None,
        "managed_tensor_from_py_object_no_sync": failing_function(0, None).address,
    }
    tensor = tabled_type(**functions)(np.ones(3))
    check_refused(tensor, "did not say why")
    assert type_and_message(total, ONLY_NUMBA, tensor)[0] is BufferError


# ---- exceptions in kernels -----------------------------------------------------------------------------------------


def caught(function, *arguments):
    """What is known of the exception that a call raises: type, arguments, and the frames below the call."""
    try:
        function(*arguments)
    except BaseException as error:
        frames = [(frame.filename, frame.name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        context = error.__cause__, error.__context__
        return type(error), error.args, str(error), context, frames[1:]
    raise AssertionError("nothing was raised")


def assert_same_exception(got, want):
    """The same, down to the frames of the kernel; those of the slow path may be above them."""
    assert got[:4] == want[:4]
    assert got[4][len(got[4]) - len(want[4]) :] == want[4]


@pytest.mark.parametrize("how", range(11))
def test_exceptions_in_kernels_arrive_as_from_njit(how, framework):
    view = np.ones(3)
    tensor = framework.tensor(view)
    fails(-1, tensor)
    want = caught(numbas(fails), how, view)
    for _ in range(3):
        assert_same_exception(caught(fails, how, tensor), want)
    before = fails.counts().fast
    assert fails(-1, tensor) == 0
    assert fails.counts().fast == before + 1


@pytest.mark.parametrize("how", range(11))
def test_an_exception_in_the_very_first_call(how):
    """The slow path makes it: the frames of the kernel are there, below those of the slow path."""
    kernel = fast_args(fails.py_func)
    want = caught(numba.njit(fails.py_func), how, np.ones(3))
    assert_same_exception(caught(kernel, how, np.ones(3)), want)


# Not 3: an exception of an inner function leaks its arguments in Numba itself.
@pytest.mark.parametrize("how", [0, 1, 4, 6, 8])
def test_exceptions_in_kernels_leak_nothing(how, framework):
    tensor = framework.tensor(np.ones(3))
    fails(-1, tensor)
    with references_kept(tensor):
        for _ in range(50):
            with contextlib.suppress(Exception):
                fails(how, tensor)
    ledger = getattr(tensor, "ledger", None)
    if ledger is not None:
        ledger.check(ledger.made)


def test_the_first_bad_argument_of_many_decides():
    ledger = Ledger()
    good = [Dunder(np.ones(3), ledger) for _ in range(5)]

    @fast_args
    def kernel(a, b, c, d, e, f):
        return 1

    for position in range(6):
        arguments = list(good)
        arguments.insert(position, Dunder(np.ones(3), ledger, lanes=2))
        for _ in range(2):
            kind, message = type_and_message(kernel, *arguments)
            assert kind is BufferError and f"position {position}" in message
    ledger.check(ledger.made)
    assert kernel(*good, good[0]) == 1
    ledger.check(ledger.made)


# ---- compile errors ------------------------------------------------------------------------------------------------


def behind_our_line(raised: tuple[type, str]) -> tuple[type, str]:
    """The type, and what Numba says behind the line that names kernel and argument types."""
    kind, message = raised
    line, _, rest = message.partition("\n")
    assert line.endswith(": Numba cannot compile the kernel for these argument types. It says:")
    return kind, rest


def test_compile_errors_arrive_as_from_njit(framework):
    def function(x):
        return x.no_such_attribute

    view = np.ones(3)
    tensor = framework.tensor(view)
    kernel = fast_args(function)
    want = type_and_message(numba.njit(function), framework.view(tensor, view))
    gc.collect()
    with references_kept(tensor):
        for _ in range(2):
            assert behind_our_line(type_and_message(kernel, tensor)) == want
        del kernel  # Numba's dispatcher keeps the exception, whose frames keep the arguments
    ledger = getattr(tensor, "ledger", None)
    if ledger is not None:
        ledger.check(ledger.made)


def test_a_kernel_that_compiles_for_some_types_only():
    @fast_args
    def kernel(x):
        return x + 1

    for _ in range(2):
        assert issubclass(type_and_message(kernel, (1, 2))[0], numba.core.errors.TypingError)
        assert kernel(1) == 2


def test_a_kernel_that_writes_to_a_readonly_array_does_not_compile():
    @fast_args
    def write(x):
        x[0] = 1

    array = np.zeros(3)
    write(array)
    array.flags.writeable = False
    for tensor in (array, Dunder(array)):
        for _ in range(2):
            assert behind_our_line(type_and_message(write, tensor)) == type_and_message(numbas(write), array)
    assert array[0] == 1.0
    array.flags.writeable = True
    write(array)


def test_refusals_leave_no_garbage():
    tensor = Tabled(np.ones(3), lanes=2)

    def refuse(times: int) -> int:
        for _ in range(times):
            type_and_message(total, 1, tensor)
        return len(gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        assert abs(refuse(100) - refuse(1)) < 50
    finally:
        gc.enable()


def test_errors_of_the_compiler_are_chained_as_plain_numba_chains_them():
    def wrong(x, name):
        return x.no_such_attribute

    plain, kernel = numba.njit(wrong), fast_args(wrong)
    for _ in range(2):
        ends = []
        for call in (plain, kernel):
            with pytest.raises(numba.core.errors.TypingError) as raised:
                call(np.ones(3), ONLY_NUMBA)
            ends.append(raised.value)
        assert [end.__suppress_context__ for end in ends] == [ends[0].__suppress_context__] * 2
        assert [type(end.__context__) for end in ends] == [type(ends[0].__context__)] * 2
        assert [type(end.__cause__) for end in ends] == [type(ends[0].__cause__)] * 2


def test_messages_run_no_code_of_what_they_name():
    class Lies:
        def __repr__(self):
            raise OSError

    nested: list = []
    nested.append(nested)
    for thing in (Lies(), nested, 10**5000, (10**5000, Lies())):
        with pytest.raises(ValueError, match="'refuse' or 'allow', not"):
            fast_args(grad=thing)
    with pytest.raises(TypeError, match="Lies"):
        fast_args(Lies())
