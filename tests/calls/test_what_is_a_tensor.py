"""What counts as a tensor in conversions and kernels where the type alone does not say it, and the words where it is none."""

import array
import ctypes
import types

import numpy as np
import pytest
from made_producers import Dunder
from oracle import type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack


@fast_args
def first(x):
    return x[0]


@fast_args
def second_of_first(x):
    return x[0][1]


class Proxy:
    """Forwards all attributes that it has not."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        return getattr(self.target, name)


class Numbas(np.ndarray):
    """An array for which Numba has rules of its own."""

    __numba_array_subtype_dispatch__ = True


def with_methods_of(tensor):
    made = types.SimpleNamespace()
    made.__dlpack__, made.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__
    return made


# ---- buffers -------------------------------------------------------------------------------------------------------


def buffers():
    cffi, pyarrow = pytest.importorskip("cffi"), pytest.importorskip("pyarrow")
    memory = cffi.FFI().new("char[3]", b"abc")
    return [pyarrow.py_buffer(b"abc"), cffi.FFI().buffer(memory), memoryview(b"abc"), array.array("B", b"abc")]


def test_whatever_has_the_buffer_protocol_is_a_tensor():
    for each in buffers():
        array_ = from_dlpack(each)
        assert array_.tolist() == [97, 98, 99] and np.shares_memory(array_, np.frombuffer(each, np.uint8))
        assert first(each) == first(each) == 97
        assert explain(each).path == "buffer"


class Struct(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32),)


@pytest.mark.parametrize(
    "thing, text",
    [
        (array.array("u", "ab"), f"'{memoryview(array.array('u')).format}', items of {array.array('u').itemsize} bytes"),
        ((ctypes.c_char * 3)(), "'<c', items of 1 bytes"),
        (Struct(), "'T{<i:a:}', items of 4 bytes"),
    ],
)
def test_a_format_that_is_refused_is_named(thing, text):
    for function, subject in ((from_dlpack, "from_dlpack(): a "), (to_dlpack, "to_dlpack(): a "), (first, "'x' (position 0)")):
        kind, message = type_and_message(function, thing)
        assert kind is BufferError and text in message and subject in message


# ---- NumPy's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.int8(3), np.bool_(True), np.complex64(1j), np.float16(2)])
def test_numpys_scalars_are_converted(scalar):
    made = from_dlpack(scalar)
    assert made.shape == () and made.dtype == scalar.dtype and made == scalar and not made.flags.writeable
    assert from_dlpack(convert(scalar, np.ndarray)) == scalar
    to_dlpack(scalar, max_version=(1, 0))


@pytest.mark.parametrize("scalar", [np.datetime64(1, "s"), np.str_("a"), np.longdouble(1)])
def test_scalars_that_dlpack_has_no_type_for(scalar):
    kind, message = type_and_message(from_dlpack, scalar)
    assert kind is BufferError and repr(scalar.dtype) in message


def test_masked_arrays_are_refused_in_words():
    for function in (from_dlpack, to_dlpack, lambda x: convert(x, np.ndarray)):
        kind, message = type_and_message(function, np.ma.ones(3))
        assert kind is TypeError and "filled()" in message


def test_arrays_for_which_numba_has_rules_of_its_own():
    given = np.ones(3).view(Numbas)
    assert np.shares_memory(from_dlpack(given), given)
    assert convert(given, np.ndarray) is given


# ---- methods of the object itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [with_methods_of, Proxy])
def test_an_object_may_have_the_methods_that_its_class_lacks(make):
    target = np.arange(3.0)
    for _ in range(3):
        thing = make(target)
        assert np.shares_memory(from_dlpack(thing), target)
        assert first(thing) == 0.0 and second_of_first((thing,)) == 1.0
        assert explain(thing).path == "dunder"
        for function in (from_dlpack, first):
            assert issubclass(type_and_message(function, make(Dunder))[0], TypeError)  # a class: no methods of its own
        assert issubclass(type_and_message(first, types.SimpleNamespace())[0], TypeError)


def test_a_type_error_of_the_producer_is_not_taken_for_an_older_method():
    class Refused(TypeError):
        pass

    class Refuses(Dunder):
        def __dlpack__(self, **keywords):
            asked.append(keywords)
            raise Refused("no")

    asked: list = []
    for function in (from_dlpack, first):
        assert issubclass(type_and_message(function, Refuses(np.ones(3)))[0], Refused)
    assert all("max_version" in keywords for keywords in asked) and len(asked) == 2


# ---- dtype= ----------------------------------------------------------------------------------------------------------


def test_a_dtype_of_another_framework():
    torch = pytest.importorskip("torch")
    kind, message = type_and_message(from_dlpack, torch.ones(2), dtype=torch.float32)
    assert kind is TypeError and message.endswith("torch.dtype; pass 'float32'")
    kind, message = type_and_message(from_dlpack, np.ones(2), dtype="nothing")
    assert kind is TypeError and "from_dlpack(): dtype is what numpy.dtype takes, not 'nothing'" in message
