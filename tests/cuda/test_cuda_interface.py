"""Arrays with ``__cuda_array_interface__`` as native code reads them, and what it leaves to Python."""

import contextlib
import gc
import sys

import numpy as np
import pytest
from cuda_producers import ArrayInterface, Exports, new_stream
from cuda_tensors import DeviceTensor
from launches import Interface, in_threads, is_refused, numbers_of
from made_producers import Ledger
from test_cuda_bytes import LAYOUTS, words

from fastexchange import CudaError, fast_args


def ways(kernel, launch, times: int = 5) -> tuple[int, int]:
    """How many of some launches were native, and how many were not, after a first one."""
    launch()
    before = kernel.counts()
    for _ in range(times):
        launch()
    after = kernel.counts()
    return after.fast - before.fast, after.slow - before.slow


NATIVE, LEFT = (5, 0), (0, 5)


class Text(str):
    pass


class Pair(tuple):
    pass


# ---- what it says is read as it is -----------------------------------------------------------------------------------

TYPESTRS = [f"{order}{kind}" for order in "<=" for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]
READ = {  # by native code; what an array says, and the tensor with a table that is launched like it
    **{typestr: ({"shape": (2, 3), "typestr": typestr}, {"shape": (2, 3), "dtype": typestr})
       for typestr in [*TYPESTRS, "|b1", "|i1", "|u1", "<i1"]},
    "readonly": ({"readonly": True}, {"readonly": True}),
    "no word of strides": ({"strides": ...}, {}), "no word of a stream": ({"stream": ...}, {}), "mask=None": ({"mask": None}, {}),
    "strides of no dimensions": ({"shape": (), "strides": ()}, {"shape": ()}), "descr": ({"descr": [("", "<f4")]}, {}),
    "large steps": ({"shape": (2, 3), "strides": (-24, 8)}, {"shape": (2, 3), "strides": (-6, 2)}),
}  # fmt: skip
LEFT_TO_PYTHON = {
    "shape, a list": ({"shape": [4]}, {}), "shape, NumPy's": ({"shape": (np.int64(2), np.int32(3))}, {"shape": (2, 3)}),
    "shape, another tuple": ({"shape": Pair((4,))}, {}), "strides, a list": ({"strides": [4]}, {"strides": (1,)}),
    "strides, NumPy's": ({"strides": (np.int32(8),)}, {"strides": (2,)}), "typestr, another str": ({"typestr": Text("<f4")}, {}),
    "data, another tuple": ({"data": lambda at: Pair((at, False))}, {}), "data, a list": ({"data": lambda at: [at, False]}, {}),
    "data, readonly an int": ({"data": lambda at: (at, 0)}, {}), "stream, NumPy's": ({"stream": np.int64(1)}, {}),
    "stream, 0": ({"stream": 0}, {}),
}  # fmt: skip


def say(value: ArrayInterface, lies: dict) -> None:
    """Let it say something else; functions get its address, ... leaves out."""
    value.said |= {name: said(value.said["data"][0]) if callable(said) else said for name, said in lies.items()}
    value.said = {name: said for name, said in value.said.items() if said is not ...}


@pytest.mark.parametrize("name", [*READ, *LEFT_TO_PYTHON])
def test_what_it_says(stub, package, kernels, name):
    lies, twin = (READ | LEFT_TO_PYTHON)[name]
    value = ArrayInterface(stub, readonly=lies.get("readonly", False))
    at = value.said["data"][0]
    say(value, {key: said for key, said in lies.items() if key != "readonly"})
    kernels[1][1, 32](ArrayInterface(stub))  # the type is known
    held = sys.getrefcount(value)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == (NATIVE if name in READ else LEFT)
    tensor = DeviceTensor(**{"shape": (4,), "data": at, **twin})
    kernels[1][1, 32](tensor)
    assert len({record.packed for record in stub.launches[1:]}) == 1 and sys.getrefcount(value) == held
    if not tensor._managed.flags:
        assert numbers_of(stub.launches[-1]) == words(package, tensor)
    else:
        assert not kernels[1].signatures[-1][0].mutable


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(stub, kernels, name):
    shape, strides = LAYOUTS[name]
    tensor = DeviceTensor(shape, "float32", strides, data=stub.allocate(4096, 0) + 2048)
    value = Interface(tensor)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    kernels[1][1, 32](tensor)
    assert len({record.packed for record in stub.launches}) == 1


@pytest.mark.parametrize("device", [0, 1, 2])
def test_the_device_is_that_of_the_memory(stub, kernels, device):
    value, before = ArrayInterface(stub, device=device), stub.current_context()
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    assert {record.device for record in stub.launches} == {device} and stub.current_context() == before
    other = ArrayInterface(stub, device=(device + 1) % 3)
    for pair in ((value, other), (DeviceTensor((4,), device=device), other), (other, (1, value))):
        for _ in range(3):
            is_refused(lambda: kernels[2][1, 32](*pair), BufferError, "argument 'y' (position 1)", "kDLCUDA")  # noqa: B023


def test_an_array_without_elements_is_on_every_device(stub, kernels):
    empty = ArrayInterface(stub, shape=(0,), data=0)
    for device in (0, 1, 2):
        kernels[2][1, 32](empty, DeviceTensor((4,), device=device))
        kernels[2][1, 32](DeviceTensor((4,), device=device), (1, empty))
        assert {each.device for each in stub.launches} == {device}
        stub.clear()
    kernels[1][1, 32](empty)
    assert stub.launches[-1].device == 0


@pytest.mark.parametrize("kind", ["pinned_array", "managed_array", "mapped_array"])
def test_memory_of_the_host_and_managed_memory(stub, package, kernels, kind):
    array = getattr(package, kind)(4, np.float32)
    kernels[1][1, 32](array)
    value = ArrayInterface(stub, data=array.ctypes.data)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    on_second = DeviceTensor((4,), device=1)
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, on_second)) == NATIVE
    assert stub.launches[-1].device == 1


def test_in_tuples_and_beside_others(stub, kernels):
    value, tensor = ArrayInterface(stub), DeviceTensor((4,))
    _none, one, two, three = kernels
    launches = {
        "tuple": (one, lambda: one[1, 32]((value, (2, value)))),
        "beside a tensor": (two, lambda: two[1, 32](tensor, value)),
        "before a tensor": (two, lambda: two[1, 32](value, tensor)),
        "by keyword": (three, lambda: three[1, 32](1, z=value, y=2.5)),
        "for tasks": (one, lambda: one.forall(10)(value)),
    }
    for name, (kernel, launch) in launches.items():
        assert ways(kernel, launch) == NATIVE, name
        assert len({record.packed for record in stub.launches}) == 1
        stub.clear()


class Both(ArrayInterface):
    """Has ``__dlpack__``, too."""

    def __init__(self, stub, **lies):
        super().__init__(stub, **lies)
        self.exports = Exports(Ledger())

    def __dlpack_device__(self):
        return self.exports.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.exports.__dlpack__(stream=stream, max_version=max_version)


def test_its_interface_is_preferred_to_its_dlpack(stub, kernels):
    value, exports = Both(stub), Exports(Ledger())
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    assert ways(kernels[2], lambda: kernels[2][1, 32](value, exports)) == LEFT
    assert value.exports.told == []


@pytest.mark.parametrize("version", [2, 0, None, 3.0, "3", True, ...], ids=repr)
def test_an_interface_that_says_nothing_of_streams(stub, kernels, version):
    """Of a version before 3. Who has ``__dlpack__``, too, as JAX's arrays have, is asked by that: it is told the stream."""
    both, one = type("Both", (Both,), {})(stub, version=version), type("One", (ArrayInterface,), {})(stub, version=version)
    launches = [lambda: kernels[1][1, 32](both), lambda: kernels[1][1, 32](one)]
    assert [ways(kernels[1], launch) for launch in launches] == [LEFT, LEFT]
    assert both.exports.told == [1] * 6
    both.exports.ledger.check(6)
    both.said["version"] = one.said["version"] = 3
    assert [ways(kernels[1], launch) for launch in launches] == [NATIVE, NATIVE]
    assert both.exports.told == [1] * 6
    both.said["version"] = 2
    assert ways(kernels[1], launches[0]) == LEFT and both.exports.told == [1] * 12


def test_it_is_read_in_each_launch_and_held_by_what_is_bound(stub, kernels):
    value = ArrayInterface(stub)
    for _ in range(3):
        kernels[1][1, 32](value)
    bound, packed = kernels[1][1, 32].bind(value), stub.launches[-1].packed
    for data in (stub.allocate(64, 0), stub.allocate(64, 1)):
        value.said["data"] = (data, False)
        kernels[1][1, 32](value)
        assert stub.launches[-1].packed.find(data.to_bytes(8, "little")) >= 0
    value.said["shape"] = (2, 2)
    kernels[1][1, 32](value)
    assert len(stub.launches[-1].parameters) > len(stub.launches[-2].parameters)
    bound()
    assert stub.launches[-1].packed == packed


# ---- streams ----------------------------------------------------------------------------------------------------------


def test_the_launch_is_on_its_stream(stub, kernels):
    one, other = new_stream(), new_stream()
    for stream in (None, 0, 1, 2, one):
        kernels[1][1, 32](ArrayInterface(stub, stream=stream))
        assert stub.launches[-1].stream == (stream or 0)
    assert {each.api for each in stub.log} == {"cuLaunchKernel"}
    stub.clear()
    x, y = ArrayInterface(stub, stream=one), ArrayInterface(stub, stream=one)
    assert ways(kernels[2], lambda: kernels[2][1, 32](x, y)) == NATIVE
    assert {each.stream for each in stub.launches} == {one} and {each.api for each in stub.log} == {"cuLaunchKernel"}
    for stream in (other, None):  # of None it does not matter when it is used
        x.said["stream"], y.said["stream"] = stream, other
        kernels[2][1, 32](x, y)
        assert stub.launches[-1].stream == other
    stub.clear()
    x.said["stream"] = one
    assert ways(kernels[2], lambda: kernels[2][1, 32](x, y)) == LEFT
    assert {each.stream for each in stub.launches} == {one}
    assert [each.api for each in stub.log][:5] == [
        "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent",
    ]  # fmt: skip


ONE, OTHER = "one", "other"  # new streams
PAIRS = [  # its own, one that is given or a tensor's, whether they are the same
    (ONE, ONE, True), (1, 0, True), (1, 1, True), (None, ONE, True), (2, 2, True),
    (ONE, OTHER, False), (1, ONE, False), (ONE, 0, False), (2, 1, False),
]  # fmt: skip


@pytest.mark.parametrize("of_a_tensor", [False, True], ids=["a stream that is given", "a tensor's stream"])
def test_beside_another_stream(stub, kernels, of_a_tensor):
    named = {ONE: new_stream(), OTHER: new_stream()}
    for own, given, are_one in PAIRS:
        own, given = named.get(own, own), named.get(given, given)
        value, tensor = ArrayInterface(stub, stream=own), DeviceTensor((4,))
        launches = [lambda: kernels[1][1, 32, given](value)]  # noqa: B023
        if of_a_tensor:
            DeviceTensor.streams[0] = given
            launches = [lambda: kernels[2][1, 32](tensor, value), lambda: kernels[2][1, 32](value, tensor)]  # noqa: B023
        kernel = kernels[1 + of_a_tensor]
        for i, launch in enumerate(launches):
            stub.clear()
            assert ways(kernel, launch) == (NATIVE if are_one else LEFT), (own, given)
            assert {each.stream for each in stub.launches} == {own if i == 1 and not are_one else given}
            assert ("cuEventRecord" in {each.api for each in stub.log}) is not are_one
        assert not (are_one and of_a_tensor) or "known: native" in str(kernels[2].explain(value, tensor))


def test_a_bound_launch_is_on_the_stream_that_is_given(stub, kernels):
    one, other = new_stream(), new_stream()
    kernels[1][1, 32, one].bind(ArrayInterface(stub, stream=one))()
    kernels[1][1, 32, 0].bind(ArrayInterface(stub, stream=1))()
    kernels[1][1, 32, one].bind(ArrayInterface(stub))()
    assert [each.stream for each in stub.launches] == [one, 0, one]
    value = ArrayInterface(stub, stream=one)
    said = is_refused(lambda: kernels[1][1, 32, other].bind(value), TypeError, "another stream than the one")
    assert "[grid, block, stream]" not in said


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


# ---- what is not as usual ---------------------------------------------------------------------------------------------

NONSENSE = ["<f/", "<f0", "<f40", "<i:4", "f4<", "<c-8", "<x4", "nonsense", None]
WRONG = {
    "a mask": ({"mask": np.ones(4, bool)}, BufferError), "mask": ({"mask": 1}, BufferError),
    "a stride of another size": ({"strides": (6,)}, BufferError), "too many strides": ({"strides": (4, 4)}, BufferError),
    "too few strides": ({"shape": (4, 5), "strides": (20,)}, BufferError),
    "an address of nobody": ({"data": (2**40 + 64, False)}, BufferError), "no address": ({"data": (0, False)}, BufferError),
    "a negative address": ({"data": (-8, False)}, BufferError), "a large address": ({"data": (2**64, False)}, BufferError),
    "not aligned": ({"data": lambda at: (at + 1, False)}, BufferError), "a large extent": ({"shape": (2**63,)}, BufferError),
    "a negative extent": ({"shape": (-1,)}, BufferError), "extents": ({"shape": (2**40, 2**40)}, BufferError),
    "a reach beyond": ({"shape": (3, 3), "strides": (2**62, 4)}, BufferError),
    "65 dimensions": ({"shape": (1,) * 65}, BufferError), "a negative stream": ({"stream": -1}, BufferError),
    "a stream that is a bool": ({"stream": True}, BufferError), "text for a stream": ({"stream": "1"}, BufferError),
    "a stream beyond": ({"stream": 2**64}, BufferError), "no shape": ({"shape": ...}, KeyError),
    "no data": ({"data": ...}, KeyError), "no type": ({"typestr": ...}, KeyError), "data, an int": ({"data": 5}, TypeError),
    "data of one": ({"data": (2**40,)}, ValueError), "data of three": ({"data": (2**40, False, 1)}, ValueError),
    "shape, None": ({"shape": None}, TypeError), **{f"type {text}": ({"typestr": text}, TypeError) for text in NONSENSE},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(stub, kernels, name):
    """Before such arrays have been read by native code, and after."""
    lies, error = WRONG[name]
    value = type("Array", (ArrayInterface,), {})(stub)
    good, launches = dict(value.said), [lambda: kernels[1][1, 32](value), lambda: kernels[1][1, 32].bind(value)]
    launches += [lambda: kernels[2][1, 32](1, value), lambda: kernels[2][1, 32](DeviceTensor((4,)), (value, 2))]
    for _ in range(2):
        say(value, lies)
        stub.clear()
        gc.collect()
        held = sys.getrefcount(value), sys.getrefcount(value.said)
        for launch in launches * 2:
            with pytest.raises(error) as caught:
                launch()
            text = str(caught.value)
            assert error is not BufferError or (text.count("(): argument '") == 1 and "_View" not in text), text
            del caught
        assert error is not BufferError or "refused" in str(kernels[1][1, 32].explain(value))
        gc.collect()
        assert (sys.getrefcount(value), sys.getrefcount(value.said)) == held and not stub.launches
        value.said = dict(good)
        assert ways(kernels[1], launches[0]) == NATIVE


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
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
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
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE


class Items(dict):
    def __getitem__(self, name):
        raise AssertionError("asked")


@pytest.mark.parametrize("make", [Items, lambda said: None, lambda said: list(said.items())], ids=["subclass", "None", "list"])
def test_an_interface_that_is_no_dict(stub, kernels, make):
    value = ArrayInterface(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
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
            with contextlib.suppress(KeyError, TypeError, BufferError, RuntimeError):
                kernels[1][1, 32](value)
        assert Key.cleared


def test_a_type_that_is_no_array_any_more(stub, kernels):
    Array = type("Array", (ArrayInterface,), {})
    value = Array(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    Array.__cuda_array_interface__ = None
    for _ in range(3):
        with pytest.raises((ValueError, TypeError)):
            kernels[1][1, 32](value)
    del Array.__cuda_array_interface__
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE


def test_a_type_that_becomes_an_array_amid_an_export(stub, kernels):
    """A ``__dlpack__`` that launches a kernel, after which native code reads the interfaces of this type."""
    class Late(Both):
        is_late = False

        def __dlpack__(self, **options):
            if not self.is_late:
                Late.__cuda_array_interface__ = ArrayInterface.__cuda_array_interface__
                self.is_late = True
                kernels[1][1, 32](self)
            return super().__dlpack__(**options)

    Late.__cuda_array_interface__ = None
    value = Late(stub)
    for _ in range(3):
        kernels[2][1, 32](value, 1)
    assert {each.stream for each in stub.launches} <= {0, 1}
    value.exports.ledger.check(value.exports.ledger.made)


# ---- what is given back ----------------------------------------------------------------------------------------------


def test_nothing_is_kept(stub, kernels):
    value, other = ArrayInterface(stub), ArrayInterface(stub, stream=new_stream())
    for _ in range(3):
        kernels[2][1, 32](value, other)
    held = [sys.getrefcount(each) for each in (value, value.said, other, other.said)]
    for _ in range(100):
        kernels[2][1, 32](value, other)
        stub.fail("cuLaunchKernel", 2)
        with pytest.raises(RuntimeError):
            kernels[2][1, 32](value, other)
        stub.reset()
        stub.clear()
    gc.collect()
    assert [sys.getrefcount(each) for each in (value, value.said, other, other.said)] == held


CULPRITS = {
    "wrong": lambda stub: ArrayInterface(stub, shape=(-1,)),
    "refused": lambda stub: ArrayInterface(stub, strides=(6,)),
    "CPU": lambda stub: DeviceTensor((4,), device_type=1),
    "text": lambda stub: "text",
    "big": lambda stub: 2**70,
    "elsewhere": lambda stub: DeviceTensor((4,), device=1),
    "host": lambda stub: np.zeros(3),
    "__dlpack__": lambda stub: Exports(Ledger()),
    "of a type that native code has not met": lambda stub: type("New", (ArrayInterface,), {})(stub),
    "other stream": lambda stub: ArrayInterface(stub, stream=new_stream()),
    "unknown": lambda stub: object(),
}


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("name", CULPRITS)
def test_exports_are_given_back_whatever_comes_after_them(stub, kernels, name, count):
    """Also where there are more of them than a call's frame has room for at first."""
    culprit, good = CULPRITS[name](stub), [ArrayInterface(stub, stream=1) for _ in range(count)]
    first = good[0] if count == 1 else tuple(good)
    assert ways(kernels[2], lambda: kernels[2][1, 32](first, 1)) == NATIVE

    def counts(times):
        for _ in range(times):
            for what in (kernels[2][1, 32], kernels[2].explain):
                with contextlib.suppress(Exception):
                    what(first, culprit)
        gc.collect()
        return [(sys.getrefcount(each), sys.getrefcount(each.said)) for each in good]

    assert counts(2) == counts(5)
    if isinstance(culprit, Exports):
        culprit.ledger.check(culprit.ledger.made)
    assert ways(kernels[2], lambda: kernels[2][1, 32](first, 1)) == NATIVE


def test_in_a_thread_without_a_context(stub, kernels):
    value, found = ArrayInterface(stub), []
    kernels[1][1, 32](value)

    def launch():
        found.append(ways(kernels[1], lambda: kernels[1][1, 32](value)))
        found.append(stub.current_context())

    in_threads(launch)
    assert found == [NATIVE, 0]


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


def test_what_explain_says(stub, kernels):
    value = ArrayInterface(stub)
    for _ in range(2):
        said = str(kernels[1].explain(value))
        assert "path cuda-interface" in said and "exported by Python" not in said
        kernels[1][1, 32](value)
    assert "known: native" in str(kernels[1].explain(value))
    value.said["version"] = 2
    assert "exported by Python" in str(kernels[1].explain(value))


# ---- under one name with a kernel for the CPU ------------------------------------------------------------------------


def test_a_kernel_for_the_cpu_still_does_not_know_it(stub, kernels):
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
    there = fast_args(cuda=kernels[2].dispatcher, launch=(1, 32))(lambda x, y: None)
    array = package.device_array(3, np.float32)
    assert ways(there.cuda, lambda: there(array, 1)) == NATIVE
    before = there.counts()
    there(array, 1)
    assert there.counts() == before
    for value in (array, DeviceTensor((4,)), ArrayInterface(stub)):
        is_refused(lambda: there.bind(value, 1), TypeError, ".cuda[grid, block].bind")  # noqa: B023
    there.cuda[1, 32].bind(array, 1)()
