"""Arrays with ``__cuda_array_interface__`` as native code reads them, and what it leaves to Python."""

import contextlib
import gc
import sys

import numpy as np
import pytest
from cuda_producers import ArrayInterface, Exports, new_stream
from cuda_tensors import DeviceTensor
from launches import Interface, is_refused
from made_producers import Ledger
from test_cuda_bytes import LAYOUTS, words

from fastexchange import CudaError

TYPESTRS = [f"{order}{kind}" for order in "<=" for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]
TYPESTRS += ["|b1", "|i1", "|u1", "<i1"]


def ways(kernel, launch, times: int = 5) -> tuple[int, int]:
    """How many of some launches were native, and how many were not, after a first one."""
    launch()
    before = kernel.counts()
    for _ in range(times):
        launch()
    after = kernel.counts()
    return after.fast - before.fast, after.slow - before.slow


# ---- what is as usual -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typestr", TYPESTRS)
def test_types(stub, package, kernels, typestr):
    value = ArrayInterface(stub, (2, 3), typestr)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    tensor = DeviceTensor((2, 3), np.dtype(typestr), data=value.said["data"][0])
    for record in stub.launches[1:]:
        assert [int.from_bytes(word, "little", signed=True) for word in record.parameters] == words(package, tensor)
    assert stub.launches[0].packed == stub.launches[-1].packed
    kernels[1][1, 32](tensor)
    assert stub.launches[-1].packed == stub.launches[0].packed


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(stub, package, kernels, name):
    shape, strides = LAYOUTS[name]
    tensor = DeviceTensor(shape, "float32", strides, data=stub.allocate(4096, 0) + 2048)
    value = Interface(tensor)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    kernels[1][1, 32](tensor)
    assert len({record.packed for record in stub.launches}) == 1


def test_readonly(stub, package, kernels):
    value = ArrayInterface(stub, readonly=True)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    assert not kernels[1].signatures[-1][0].mutable


@pytest.mark.parametrize("device", [0, 1, 2])
def test_the_device_is_that_of_the_memory(stub, kernels, device):
    value, before = ArrayInterface(stub, device=device), stub.current_context()
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    assert {record.device for record in stub.launches} == {device} and stub.current_context() == before
    other = ArrayInterface(stub, device=(device + 1) % 3)
    for pair in ((value, other), (DeviceTensor((4,), device=device), other), (other, (1, value))):
        for _ in range(3):
            is_refused(lambda: kernels[2][1, 32](*pair), BufferError, "argument 'y' (position 1)", "kDLCUDA")  # noqa: B023


def test_in_tuples_and_beside_others(stub, kernels):
    value, tensor = ArrayInterface(stub), DeviceTensor((4,))
    launches = {
        "tuple": lambda: kernels[1][1, 32]((value, (2, value))),
        "beside a tensor": lambda: kernels[2][1, 32](tensor, value),
        "before a tensor": lambda: kernels[2][1, 32](value, tensor),
        "by keyword": lambda: kernels[3][1, 32](1, z=value, y=2.5),
        "for tasks": lambda: kernels[1].forall(10)(value),
    }
    for name, launch in launches.items():
        assert ways(kernels[1 if name in ("tuple", "for tasks") else 3 if name == "by keyword" else 2], launch) == (5, 0), name
        assert len({record.packed for record in stub.launches}) == 1
        stub.clear()


def test_its_interface_is_preferred_to_its_dlpack(stub, kernels):
    class Both(ArrayInterface):
        def __dlpack_device__(self):
            raise AssertionError("asked")

        __dlpack__ = __dlpack_device__

    value = Both(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    exports = Exports(Ledger())
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, exports)) == (0, 5)


@pytest.mark.parametrize("version", [2, 0, None, 3.0, "3", True, ...], ids=repr)
def test_an_interface_that_says_nothing_of_streams(stub, kernels, version):
    """Of a version before 3. Who has ``__dlpack__``, too, as JAX's arrays have, is asked by that: it is told the stream."""
    class Both(ArrayInterface):
        def __dlpack_device__(self):
            return self.exports.__dlpack_device__()

        def __dlpack__(self, *, stream=None, max_version=None):
            return self.exports.__dlpack__(stream=stream, max_version=max_version)

    class Interface(ArrayInterface):
        pass

    both, one = Both(stub, version=version), Interface(stub, version=version)
    both.exports = Exports(Ledger())
    assert ways(kernels[1], lambda: kernels[1][1, 32](both)) == (0, 5)
    assert both.exports.told == [1] * 6
    both.exports.ledger.check(6)
    assert ways(kernels[1], lambda: kernels[1][1, 32](one)) == (0, 5)
    both.said["version"] = one.said["version"] = 3
    assert ways(kernels[1], lambda: kernels[1][1, 32](both)) == (5, 0)
    assert ways(kernels[1], lambda: kernels[1][1, 32](one)) == (5, 0)
    assert both.exports.told == [1] * 6
    both.said["version"] = 2
    assert ways(kernels[1], lambda: kernels[1][1, 32](both)) == (0, 5)
    assert both.exports.told == [1] * 12


def test_it_is_read_in_each_launch(stub, kernels):
    value = ArrayInterface(stub)
    for _ in range(3):
        kernels[1][1, 32](value)
    for data in (stub.allocate(64, 0), stub.allocate(64, 1)):
        value.said["data"] = (data, False)
        kernels[1][1, 32](value)
        assert stub.launches[-1].packed.find(data.to_bytes(8, "little")) >= 0
    value.said["shape"] = (2, 2)
    kernels[1][1, 32](value)
    assert len(stub.launches[-1].parameters) > len(stub.launches[-2].parameters)


# ---- streams ----------------------------------------------------------------------------------------------------------


def test_the_launch_is_on_its_stream(stub, kernels):
    one, other = new_stream(), new_stream()
    x, y = ArrayInterface(stub, stream=one), ArrayInterface(stub, stream=one)
    assert ways(kernels[2], lambda: kernels[2][1, 32](x, y)) == (5, 0)
    assert {each.stream for each in stub.launches} == {one} and {each.api for each in stub.log} == {"cuLaunchKernel"}
    x.said["stream"] = y.said["stream"] = other
    kernels[2][1, 32](x, y)
    assert stub.launches[-1].stream == other
    x.said["stream"] = None  # it does not matter when it is used
    kernels[2][1, 32](x, y)
    assert stub.launches[-1].stream == other
    stub.clear()
    x.said["stream"] = one
    assert ways(kernels[2], lambda: kernels[2][1, 32](x, y)) == (0, 5)
    assert {each.stream for each in stub.launches} == {one}
    assert [each.api for each in stub.log][:5] == [
        "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent",
    ]  # fmt: skip


def test_beside_a_stream_that_is_given(stub, kernels):
    one, other = new_stream(), new_stream()
    for own, given, are_one in ((one, one, True), (1, 0, True), (1, 1, True), (None, one, True), (2, 2, True),
                                (one, other, False), (1, one, False), (one, 0, False), (2, 1, False)):  # fmt: skip
        value = ArrayInterface(stub, stream=own)
        stub.clear()
        assert ways(kernels[1], lambda: kernels[1][1, 32, given](value)) == ((5, 0) if are_one else (0, 5)), (own, given)  # noqa: B023
        assert {each.stream for each in stub.launches} == {given}
        assert ("cuEventRecord" in {each.api for each in stub.log}) is not are_one


def test_beside_a_tensor_on_the_same_stream(stub, kernels):
    one = new_stream()
    for own, given in ((one, one), (1, 0), (1, 1), (2, 2)):
        value, tensor = ArrayInterface(stub, stream=own), DeviceTensor((4,))
        DeviceTensor.streams[0] = given
        stub.clear()
        for launch in (lambda: kernels[2][1, 32](value, tensor), lambda: kernels[2][1, 32](tensor, value)):  # noqa: B023
            assert ways(kernels[2], launch) == (5, 0)
            assert "known: native" in str(kernels[2].explain(value, tensor))
        assert {each.stream for each in stub.launches} == {given} and {each.api for each in stub.log} == {"cuLaunchKernel"}


def test_beside_a_tensor_with_a_stream(stub, kernels):
    one, other = new_stream(), new_stream()
    value, tensor = ArrayInterface(stub, stream=one), DeviceTensor((4,))
    DeviceTensor.streams[0] = other
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, tensor)) == (0, 5)
    assert "cuEventRecord" in {each.api for each in stub.log}
    value.said["stream"] = None
    stub.clear()
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, tensor)) == (5, 0)
    assert {each.stream for each in stub.launches} == {other} and {each.api for each in stub.log} == {"cuLaunchKernel"}


# ---- what is not as usual ---------------------------------------------------------------------------------------------


class Text(str):
    pass


class Pair(tuple):
    pass


class Items(dict):
    def __getitem__(self, name):
        raise AssertionError("asked")


ODD = {
    "shape, a list": {"shape": [4]}, "shape, NumPy's": {"shape": (np.int64(4),)}, "shape, another tuple": {"shape": Pair((4,))},
    "strides, a list": {"strides": [4]}, "strides, NumPy's": {"strides": (np.int32(4),)},
    "typestr, another str": {"typestr": Text("<f4")},
    "data, another tuple": {"data": "pair"}, "data, readonly an int": {"data": "int"}, "data, a list": {"data": "list"},
    "stream, NumPy's": {"stream": np.int64(1)}, "stream, 0": {"stream": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_and_right_is_left_to_python(stub, kernels, name):
    lies = dict(ODD[name])
    value = ArrayInterface(stub)
    pointer = value.said["data"][0]
    if "data" in lies:
        lies["data"] = {"pair": Pair((pointer, False)), "int": (pointer, 0), "list": [pointer, False]}[lies["data"]]
    usual = ArrayInterface(stub, data=pointer)
    for _ in range(3):
        kernels[1][1, 32](usual)
    value.said.update(lies)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (0, 5)
    assert len({record.packed for record in stub.launches}) == 1


WRONG = {
    "mask": ({"mask": 1}, BufferError), "strides": ({"strides": (6,)}, BufferError),
    "more strides": ({"strides": (4, 4)}, BufferError), "an address of nobody": ({"data": (2**40 + 64, False)}, BufferError),
    "a negative address": ({"data": (-8, False)}, BufferError),
    "a large address": ({"data": (2**64, False)}, BufferError), "a large extent": ({"shape": (2**63,)}, BufferError),
    "a negative extent": ({"shape": (-1,)}, BufferError), "extents": ({"shape": (2**40, 2**40)}, BufferError),
    "65 dimensions": ({"shape": (1,) * 65}, BufferError), "stream": ({"stream": -1}, BufferError),
    "flag": ({"stream": True}, BufferError), "text": ({"stream": "1"}, BufferError),
    "no elements' type": ({"typestr": "<x4"}, TypeError), "no shape": ({"shape": ...}, KeyError),
    "no data": ({"data": ...}, KeyError), "no type": ({"typestr": ...}, KeyError),
    "not aligned": ({"data": "odd"}, BufferError), "None for a type": ({"typestr": None}, TypeError),
    "data of one": ({"data": (2**40,)}, ValueError), "data of three": ({"data": (2**40, False, 1)}, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_as_python_does(stub, kernels, name):
    """Also where such arrays have been read by native code before."""
    lies, error = WRONG[name]
    value = ArrayInterface(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    good = dict(value.said)
    if lies.get("data") == "odd":
        lies = {"data": (good["data"][0] + 1, False)}
    for key, said in lies.items():
        value.said.pop(key, None)
        if said is not ...:
            value.said[key] = said
    stub.clear()
    held = sys.getrefcount(value), sys.getrefcount(value.said)
    for launch in (lambda: kernels[1][1, 32](value), lambda: kernels[2][1, 32](DeviceTensor((4,)), value)):
        for _ in range(3):
            with pytest.raises(error) as caught:
                launch()
            del caught
    gc.collect()
    assert (sys.getrefcount(value), sys.getrefcount(value.said)) == held and not stub.launches
    value.said = good
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)


@pytest.mark.parametrize("error", [ValueError, AttributeError, KeyboardInterrupt, SystemExit])
def test_an_interface_that_raises(stub, kernels, error):
    class Raises(ArrayInterface):
        error = None

        @property
        def __cuda_array_interface__(self):
            if self.error is not None:
                self.asked += 1
                raise self.error("no")
            return self.said

    value = Raises(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    value.error = error
    stub.clear()
    held = sys.getrefcount(value)
    for _ in range(3):
        with pytest.raises((ValueError, TypeError) if issubclass(error, Exception) else error) as caught:
            kernels[1][1, 32](value)
        del caught
    gc.collect()
    assert (value.asked == 3 or issubclass(error, Exception)) and not stub.launches
    assert sys.getrefcount(value) == held
    value.error = None
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)


@pytest.mark.parametrize("make", [Items, lambda said: None, lambda said: list(said.items())], ids=["subclass", "None", "list"])
def test_an_interface_that_is_no_dict(stub, kernels, make):
    value = ArrayInterface(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    value.said = make(value.said)
    for _ in range(3):
        with pytest.raises((AssertionError, TypeError, ValueError, BufferError)):
            kernels[1][1, 32](value)


def test_keys_that_change_the_dict(stub, kernels):
    """Looking into a dict may run Python code, if its keys are not only str."""
    class Key:
        cleared = 0

        def __init__(self, name, said):
            self.name, self.said = name, said

        def __hash__(self):
            return hash(self.name)

        def __eq__(self, other):
            Key.cleared += 1
            self.said.clear()
            gc.collect()
            return False

    for name in ("mask", "data", "typestr", "shape", "strides", "stream"):
        value = ArrayInterface(stub)
        kernels[1][1, 32](value)
        kernels[1][1, 32](value)
        Key.cleared = 0
        said = {}
        said[Key(name, said)] = 1
        said |= value.said
        said[next(iter(said))] = 1
        value.said = said
        for _ in range(3):
            try:
                kernels[1][1, 32](value)
            except (KeyError, TypeError, BufferError, RuntimeError):
                pass
        assert Key.cleared


def test_nothing_is_kept(stub, kernels):
    value, other = ArrayInterface(stub), ArrayInterface(stub, stream=new_stream())
    for _ in range(3):
        kernels[2][1, 32](value, other)
    held = [sys.getrefcount(each) for each in (value, value.said, other, other.said)]
    for _ in range(500):
        kernels[2][1, 32](value, other)
        stub.fail("cuLaunchKernel", 2)
        with pytest.raises(RuntimeError):
            kernels[2][1, 32](value, other)
        stub.reset()
        stub.clear()
    gc.collect()
    assert [sys.getrefcount(each) for each in (value, value.said, other, other.said)] == held


def _amid(stub, package) -> dict:
    """Arguments that end a launch, or let it go by Python, after arrays before them have been exported."""
    wrong, raising = ArrayInterface(stub), ArrayInterface(stub, strides=(6,))
    wrong.said["shape"] = (-1,)
    return {
        "wrong": wrong, "refused": raising, "CPU": DeviceTensor((4,), device_type=1), "text": "text", "big": 2**70,
        "elsewhere": DeviceTensor((4,), device=1), "host": np.zeros(3), "__dlpack__": Exports(Ledger()), "new": _New(stub),
        "other stream": ArrayInterface(stub, stream=new_stream()), "unknown": object(),
    }  # fmt: skip


class _New(ArrayInterface):
    """Of a type that native code has not met."""


AMID = ["wrong", "refused", "CPU", "text", "big", "elsewhere", "host", "__dlpack__", "new", "other stream", "unknown"]


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("name", AMID)
def test_exports_are_given_back_whatever_comes_after_them(stub, package, kernels, name, count):
    """Also where there are more of them than a call's frame has room for at first."""
    culprit = _amid(stub, package)[name]
    good = [ArrayInterface(stub, stream=1) for _ in range(count)]
    first = good[0] if count == 1 else tuple(good)
    assert ways(kernels[2], lambda: kernels[2][1, 32](first, 1)) == (5, 0)
    for _ in range(2):
        with contextlib.suppress(Exception):
            kernels[2][1, 32](first, culprit)
    gc.collect()
    held = [(sys.getrefcount(each), sys.getrefcount(each.said)) for each in good]
    for _ in range(5):
        with contextlib.suppress(Exception):
            kernels[2][1, 32](first, culprit)
        with contextlib.suppress(Exception):
            kernels[2].explain(first, culprit)
    gc.collect()
    assert [(sys.getrefcount(each), sys.getrefcount(each.said)) for each in good] == held
    if isinstance(culprit, Exports):
        culprit.ledger.check(culprit.ledger.made)
    assert ways(kernels[2], lambda: kernels[2][1, 32](first, 1)) == (5, 0)


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_memory_of_the_host_and_managed_memory(stub, package, kernels, kind):
    array = (package.pinned_array if kind == "pinned" else package.managed_array)(4, np.float32)
    value = ArrayInterface(stub, data=array.ctypes.data)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    on_second = DeviceTensor((4,), device=1)
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, on_second)) == (5, 0)
    assert stub.launches[-1].device == 1


def test_in_a_thread_without_a_context(stub, kernels):
    import threading

    value, found = ArrayInterface(stub), []
    kernels[1][1, 32](value)

    def launch():
        found.append(ways(kernels[1], lambda: kernels[1][1, 32](value)))
        found.append(stub.current_context())

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert found == [(5, 0), 0]


def test_a_type_that_becomes_an_array_amid_an_export(stub, kernels):
    """A ``__dlpack__`` that launches a kernel, after which native code reads the interfaces of this type."""
    class Late(ArrayInterface):
        is_late = False

        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, *, stream=None, max_version=None):
            if not self.is_late:
                Late.__cuda_array_interface__ = ArrayInterface.__cuda_array_interface__
                self.is_late = True
                kernels[1][1, 32](self)
            return self.exports.__dlpack__(stream=stream, max_version=max_version)

    Late.__cuda_array_interface__ = None
    value = Late(stub)
    value.exports = Exports(Ledger())
    for _ in range(3):
        kernels[2][1, 32](value, 1)
    assert {each.stream for each in stub.launches} <= {0, 1}
    value.exports.ledger.check(value.exports.ledger.made)


@pytest.mark.parametrize("swapped", [False, True])
def test_beside_what_has_to_be_told_of_the_stream(stub, kernels, swapped):
    """Its ``__dlpack__`` is called once for each launch, and told the stream."""
    value, exports = ArrayInterface(stub, stream=new_stream()), Exports(Ledger())
    pair = (exports, value) if swapped else (value, exports)
    kernels[1][1, 32](value)
    kernels[1][1, 32](exports)
    exports.told.clear()
    for i in range(5):
        kernels[2][1, 32](*pair)
        assert exports.told == [value.said["stream"]] * (i + 1)
    exports.ledger.check(6)


def test_a_bound_launch_is_on_the_stream_that_is_given(stub, kernels):
    one, other = new_stream(), new_stream()
    kernels[1][1, 32, one].bind(ArrayInterface(stub, stream=one))()
    kernels[1][1, 32, 0].bind(ArrayInterface(stub, stream=1))()
    kernels[1][1, 32, one].bind(ArrayInterface(stub))()
    assert [each.stream for each in stub.launches] == [one, 0, one]
    value = ArrayInterface(stub, stream=one)
    said = is_refused(lambda: kernels[1][1, 32, other].bind(value), TypeError, "another stream than the one")
    assert "[grid, block, stream]" not in said


@pytest.mark.parametrize("code", [700, 2])
def test_errors_of_the_driver_name_the_launch(stub, kernels, code):
    """Also where it is asked about an address by Python."""
    value = ArrayInterface(stub, version=2)
    for _ in range(2):
        for launch in (lambda: kernels[1][1, 32](value), lambda: kernels[1][1, 32].bind(value)):
            stub.fail("cuPointerGetAttribute", code)
            said = is_refused(launch, CudaError, "one() was not launched (grid (1, 1, 1), block", "cuPointerGetAttribute")
            assert ("sticky" in said) is (code == 700)
        stub.reset()
        kernels[1][1, 32](value)


@pytest.mark.parametrize("typestr", ["<f/", "<f0", "<f04", "<f40", "<i:4", "<4f", "f4<", "<c-8"])
def test_nonsense_for_a_type(stub, kernels, typestr):
    value = ArrayInterface(stub)
    kernels[1][1, 32](value)
    kernels[1][1, 32](value)
    value.said["typestr"] = typestr
    stub.clear()
    try:
        np.dtype(typestr)
    except TypeError:
        for _ in range(2):
            with pytest.raises(TypeError):
                kernels[1][1, 32](value)
        assert not stub.launches


def test_a_type_that_is_no_array_any_more(stub, kernels):
    class Array(ArrayInterface):
        pass

    value = Array(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)
    Array.__cuda_array_interface__ = None
    for _ in range(3):
        with pytest.raises((ValueError, TypeError)):
            kernels[1][1, 32](value)
    del Array.__cuda_array_interface__
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (5, 0)


def test_what_explain_says(stub, kernels):
    value = ArrayInterface(stub)
    for _ in range(2):
        said = str(kernels[1].explain(value))
        assert "path cuda-interface" in said and "exported by Python" not in said
        kernels[1][1, 32](value)
    assert "known: native" in str(kernels[1].explain(value))
    value.said["version"] = 2
    assert "exported by Python" in str(kernels[1].explain(value))


def test_bound_launches(stub, kernels):
    """They hold what they were bound to."""
    value = ArrayInterface(stub)
    for _ in range(3):
        kernels[1][1, 32](value)
    bound = kernels[1][1, 32].bind(value)
    packed = stub.launches[-1].packed
    value.said["shape"] = (2,)
    bound()
    assert stub.launches[-1].packed == packed


def test_a_kernel_for_the_cpu_still_does_not_know_it(stub, package, kernels):
    from fastexchange import fast_args

    value = ArrayInterface(stub)
    kernels[1][1, 32](value)
    here = fast_args(lambda x: 1)
    for _ in range(2):
        with pytest.raises(TypeError):
            here(value)
    there = fast_args(cuda=kernels[1].dispatcher, launch=(1, 32))(lambda x: 1)
    stub.clear()
    for _ in range(3):
        assert there(value) is None
    assert len(stub.launches) == 3


def test_device_arrays_under_one_name(stub, package, kernels):
    """Of a kernel for both, native code sees that numba's device arrays are on a device."""
    from fastexchange import fast_args

    there = fast_args(cuda=kernels[2].dispatcher, launch=(1, 32))(lambda x, y: None)
    array = package.device_array(3, np.float32)
    assert ways(there.cuda, lambda: there(array, 1)) == (5, 0)
    before = there.counts()
    there(array, 1)
    assert there.counts() == before
    for value in (array, DeviceTensor((4,)), ArrayInterface(stub)):
        is_refused(lambda: there.bind(value, 1), TypeError, ".cuda[grid, block].bind")  # noqa: B023
    there.cuda[1, 32].bind(array, 1)()
