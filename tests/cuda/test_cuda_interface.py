"""Arrays with ``__cuda_array_interface__`` as native code reads them, and what it leaves to Python."""

import contextlib
import gc
import sys

import numpy as np
import pytest
from comparing import numbers_of, words_of
from cuda_checks import all_given_back, is_refused
from cuda_producers import ArrayInterface, Exports
from cuda_tensors import DeviceTensor
from made_producers import Ledger
from test_cuda_bytes import LAYOUTS

from fastexchange import CudaError, fast_args

NATIVE, LEFT = (5, 0), (0, 5)


def ways(kernel, launch) -> tuple[int, int]:
    """How many of five launches were native, and how many were not, after a first one."""
    launch()
    before = kernel.counts()
    for _ in range(5):
        launch()
    after = kernel.counts()
    return after.fast - before.fast, after.slow - before.slow


class Text(str):
    pass


class Pair(tuple):
    pass


class Both(ArrayInterface):
    def __init__(self, stub, **lies):
        super().__init__(stub, **lies)
        self.exports = Exports(Ledger())

    __dlpack_device__ = property(lambda self: self.exports.__dlpack_device__)
    __dlpack__ = property(lambda self: self.exports.__dlpack__)


# ---- what it says is read as it is -----------------------------------------------------------------------------------
TYPESTRS = ["|b1", "|i1", "|u1", "<i1", "=f4", "=i8", "=c16",
            *["<" + kind for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]]  # fmt: skip
READ = [  # by native code; what an array says, and the tensor with a table that is launched like it
    *[({"shape": (2, 3), "typestr": typestr}, {"shape": (2, 3), "dtype": typestr}) for typestr in TYPESTRS],
    ({"readonly": True}, {"readonly": True}), ({"strides": ...}, {}), ({"stream": ...}, {}), ({"mask": None}, {}),
    ({"shape": (), "strides": ()}, {"shape": ()}), ({"descr": [("", "<f4")]}, {}),
    *[({"shape": shape, "strides": strides and tuple(4 * stride for stride in strides)}, {"shape": shape, "strides": strides})
      for shape, strides in LAYOUTS.values()],
]  # fmt: skip
LEFT_TO_PYTHON = [
    ({"shape": [4]}, {}), ({"shape": (np.int64(2), np.int32(3))}, {"shape": (2, 3)}), ({"shape": Pair((4,))}, {}),
    ({"strides": [4]}, {"strides": (1,)}), ({"strides": (np.int32(8),)}, {"strides": (2,)}), ({"typestr": Text("<f4")}, {}),
    ({"data": lambda at: Pair((at, False))}, {}), ({"data": lambda at: [at, False]}, {}), ({"data": lambda at: (at, 0)}, {}),
    ({"stream": np.int64(1)}, {}), ({"stream": 0}, {}),
]  # fmt: skip


def say(value: ArrayInterface, lies: dict) -> None:
    """Let it say something else; functions get its address, ... leaves out."""
    value.said |= {name: said(value.said["data"][0]) if callable(said) else said for name, said in lies.items()}
    value.said = {name: said for name, said in value.said.items() if said is not ...}


@pytest.mark.parametrize("lies, twin, way", [(*row, NATIVE) for row in READ] + [(*row, LEFT) for row in LEFT_TO_PYTHON])
def test_what_it_says(stub, package, kernels, lies, twin, way):
    value = ArrayInterface(stub, readonly=lies.get("readonly", False))
    at = value.said["data"][0]
    say(value, {name: said for name, said in lies.items() if name != "readonly"})
    kernels[1][1, 32](ArrayInterface(stub))  # the type is known
    held = sys.getrefcount(value)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == way
    tensor = DeviceTensor(**{"shape": (4,), "data": at, **twin})
    kernels[1][1, 32](tensor)
    assert len({record.packed for record in stub.launches[1:]}) == 1 and sys.getrefcount(value) == held
    if "readonly" in lies:
        assert not kernels[1].signatures[-1][0].mutable
    else:
        assert numbers_of(stub.launches[-1]) == words_of(package, tensor)


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
    both.said["version"] = 2
    assert ways(kernels[1], launches[0]) == LEFT and both.exports.told == [1] * 12


def test_it_is_read_in_each_launch(stub, kernels):
    value = ArrayInterface(stub)
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    bound = kernels[1][1, 32].bind(value)
    for data in (stub.allocate(64, 0), stub.allocate(64, 1)):
        value.said["data"] = (data, False)
        kernels[1][1, 32](value)
        assert data in numbers_of(stub.launches[-1])
    value.said["shape"] = (2, 2)
    kernels[1][1, 32](value)
    bound()
    assert stub.launches[-1].packed == stub.launches[-2].packed != stub.launches[-3].packed


# ---- what is not as usual ---------------------------------------------------------------------------------------------
class Items(dict):
    def __getitem__(self, name):
        raise AssertionError("asked")


class Odd(ArrayInterface):
    """Raises what it says if that is an exception."""

    @property
    def __cuda_array_interface__(self):
        if isinstance(self.said, type):
            raise self.said("no")
        return self.said


ODD = {ValueError: ValueError, AttributeError: ValueError, KeyboardInterrupt: KeyboardInterrupt, SystemExit: SystemExit,
       Items: AssertionError, None: ValueError, list: TypeError}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_interface_that_is_odd(stub, kernels, odd):
    value = Odd(stub)
    said = value.said
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE
    value.said = odd(said) if odd in (Items, list) else odd
    stub.clear()
    with all_given_back(value):
        for _ in range(3):
            with pytest.raises(ODD[odd]) as caught:
                kernels[1][1, 32](value)
            del caught
    assert not stub.launches
    value.said = said
    assert ways(kernels[1], lambda: kernels[1][1, 32](value)) == NATIVE


@pytest.mark.parametrize("name", ["mask", "data", "typestr", "shape", "strides", "stream"])
def test_keys_that_change_the_dict(stub, kernels, name):
    """Looking into a dict may run Python code, if its keys are not only str."""
    cleared = []

    class Key:
        def __hash__(self):
            return hash(name)

        def __eq__(self, other):
            if is_made:
                cleared.append(other)
                value.said.clear()
                gc.collect()
            return False

    value, is_made = ArrayInterface(stub), False
    kernels[1][1, 32](value)
    kernels[1][1, 32](value)
    value.said, is_made = {Key(): 1, **value.said}, True
    for _ in range(3):
        with contextlib.suppress(KeyError, TypeError, BufferError, RuntimeError):
            kernels[1][1, 32](value)
    assert cleared


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


@pytest.mark.parametrize("code", [700, 2])
def test_errors_of_the_driver_name_the_launch(stub, kernels, code):
    """Also where it is asked about an address by Python."""
    value = ArrayInterface(stub, version=2)
    for _ in range(2):
        for launch in (lambda: kernels[1][1, 32](value), kernels[1][1, 32].bind(value)):
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
def test_under_one_name_with_a_kernel_for_the_cpu(stub, package, kernels):
    """Native code sees that these are on a device; the kernel for the CPU alone does not take them."""
    array, value, here = package.device_array(3, np.float32), ArrayInterface(stub), fast_args(lambda x: 1)
    both = fast_args(cuda=kernels[2].dispatcher, launch=(1, 32))(lambda x, y: None)
    for _ in range(2):
        with pytest.raises(TypeError):
            here(value)
    for each in (array, value):
        assert ways(both.cuda, lambda: both(each, 1)) == NATIVE  # noqa: B023
    before = both.counts()
    both(array, 1)
    assert both.counts() == before
    for each in (array, DeviceTensor((4,)), value):
        stub.clear()
        both.bind(each, 1)()
        both.cuda[1, 32].bind(each, 1)()
        assert len(stub.launches) == 2 and stub.launches[0].packed == stub.launches[1].packed
