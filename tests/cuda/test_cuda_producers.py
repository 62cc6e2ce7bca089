"""Device arrays of the packages' own, tensors without an exchange table, and arrays with ``__cuda_array_interface__``.

The strides of device arrays are what the attribute says, where their ``__cuda_array_interface__`` says None, as it does of
broadcast arrays. numba-cuda's own launch reads the attribute, and is compared byte for byte. numba-cuda-mlir's reads the
interface, and launches its kernels with strides of memory that is not there.
"""

import contextlib
import functools
import gc
import importlib
import sys

import numpy as np
import pytest
from comparing import numbers_of, what_is_launched, words_of
from cuda_checks import all_given_back, both_ways, is_refused, launched
from cuda_producers import ArrayInterface, Exports, ExportsLegacy
from cuda_stub import Stub
from cuda_tensors import DeviceTensor
from launches import WARM, Interface, address, device_array, dispatcher_of, kernel_of
from made_producers import Ledger, Text, Wrapper, capsule_name
from stub_processes import PACKAGES, is_installed
from test_cuda_bytes import LAYOUTS

from fastexchange import CudaError, fast_args

both_packages = pytest.mark.both_packages


def numbers(record, kernel, *arguments) -> list[int]:
    """The parameters of a launch."""
    return numbers_of(launched(record, kernel[2, 32], *arguments))


# ---- device arrays ---------------------------------------------------------------------------------------------------
def broadcast(package, dtype="f4"):
    return package.to_device(np.broadcast_to(np.arange(5).astype(dtype), (4, 5)))


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def says(package, strides):
    return Interface(DeviceTensor((4, 5), "f4", strides, data=address(package)))


MADE = {
    "broadcast": broadcast,
    **{f"broadcast {dtype}": lambda package, dtype=dtype: broadcast(package, dtype) for dtype in ("i1", "?", "c8", "c16")},
    "of one number": lambda package: package.to_device(np.broadcast_to(np.float32(1), (4, 5))),
    "of one row": lambda package: package.to_device(np.broadcast_to(np.ones(5, "f4"), (1, 5))),
    "in the middle": lambda package: package.to_device(np.broadcast_to(np.ones((4, 1, 5), "f4"), (4, 3, 5))),
    "slice of a broadcast": lambda package: broadcast(package)[:, 1:3],
    "item of a broadcast": lambda package: broadcast(package)[1],
    "slice": lambda package: package.device_array((3, 4, 5), "f4")[1:, ::2, 1:3],
    "transposed": lambda package: device_array(package, DeviceTensor((4, 3), "f4", (1, 4), data=address(package))),
    "F": lambda package: package.to_device(np.asfortranarray(np.ones((3, 4), "f4"))),
    "reversed": lambda package: package.device_array((4, 5), "f4")[::-1],
    "reversed, 1": lambda package: package.device_array(5, "f4")[::-1],
    "as_cuda_array": lambda package: package.as_cuda_array(says(package, (0, 1))),
    "as_cuda_array, reversed": lambda package: package.as_cuda_array(says(package, (5, -1))),
    "as_cuda_array of a broadcast": lambda package: package.as_cuda_array(broadcast(package)),
    "managed": lambda package: package.managed_array((3, 4), "f4"),
    "managed, F": lambda package: package.managed_array((3, 4), "f4", order="F"),
    "mapped": lambda package: package.mapped_array((3, 4), "f4"),
    "0-d": lambda package: package.to_device(np.array(3.0, "f4")),
    "no rows": lambda package: package.device_array((0, 4), "f4"),
    "no columns": lambda package: package.device_array((4, 0), "f4"),
    "broadcast, no rows": lambda package: package.to_device(np.broadcast_to(np.ones(4, "f4"), (0, 4))),
    "view": lambda package: package.device_array((3, 4), "f4").view("i2"),
    "on a stream": lambda package: broadcast(package).bind(package.external_stream(0)),
    "bfloat16": lambda package: package.device_array((3, 4), bfloat16()),
    "bfloat16, on a stream": lambda package: package.device_array((3, 4), bfloat16()).bind(package.external_stream(0)),
}


@both_packages
@pytest.mark.parametrize("name", MADE)
def test_strides_are_those_of_the_array(record, package, name):
    if not isinstance(record, Stub) and name.startswith(("managed", "mapped")):
        pytest.skip("the package launches kernels with these, which only the driver stub records")
    array, kernel = MADE[name](package), kernel_of(package, 1)
    for launch in range(WARM + 1):
        ours = launched(record, kernel[1, 32], array)
        assert numbers_of(ours) == words_of(package, array), launch
    kernel[1, 32].bind(array)()
    if package.__name__ == "numba.cuda" and isinstance(record, Stub):  # which records the package's own
        dispatcher_of(package, 1)[1, 32](array)
    assert all(what_is_launched(launch) == what_is_launched(ours) for launch in record.launches)
    array_type = kernel.signatures[0][0]
    assert array_type.ndim == array.ndim
    if 0 in array.strides and array.size and array.size > max(array.shape):
        assert array_type.layout == "A"


@both_packages
@pytest.mark.parametrize("name", ["broadcast", "in the middle", "of one number", "reversed", "0-d", "no rows"])
def test_those_that_are_read_in_each_launch(record, package, name):
    """Of a class under the packages', whose interface native code asks; and those with a stream of their own."""
    made, stream = MADE[name](package), package.stream()
    array = type("Array", (type(made),), {})(made.shape, made.strides, made.dtype, gpu_data=made.gpu_data)
    assert array.strides == made.strides
    for value in (array, array.bind(stream), made.bind(stream)):
        kernel = kernel_of(package, 1)
        for _ in range(WARM):
            launch = launched(record, kernel[1, 32], value)
            assert numbers_of(launch) == words_of(package, made)
        # Python reads bound arrays of a class of which native code has read others once; else it reads their interface, too.
        fast = kernel.counts().fast
        assert fast == WARM - 1 if value is array and made.size else fast in (0, WARM - 1)
        assert launch.stream == (int(stream.handle) if value is not array else 0)


@both_packages
def test_in_a_tuple_and_of_the_other_package(record, package):
    array, kernel = broadcast(package), kernel_of(package, 2)
    words = words_of(package, array)
    for _ in range(WARM):
        assert numbers(record, kernel, (array, 2), array) == [*words, 2, *words]
    (other,) = (name for name in PACKAGES if name != package.__name__)
    if not is_installed(other):
        pytest.skip(f"{other} is not installed")
    array, kernel = broadcast(importlib.import_module(other)), kernel_of(package, 1)
    for _ in range(WARM):
        assert numbers(record, kernel, array) == words_of(package, array)


@both_packages
@pytest.mark.parametrize("make", ["managed_array", "mapped_array"])
def test_a_view_that_has_lost_its_memory_is_refused(package, make):
    """NumPy makes views of managed and mapped arrays, which do not know of the memory any more; its package may crash on them."""
    array, launcher = getattr(package, make)((3, 4), "f4"), kernel_of(package, 1)[1, 32]
    for view in [array[:, 1:3], np.broadcast_to(array, (2, 3, 4), subok=True)] * 3:
        is_refused(functools.partial(launcher, view), BufferError, "argument 'a0' (position 0)", "view")


def test_what_comes_and_goes(record, package, kernels):
    """A type, or a device array, at the address of one that has died is looked at anew."""
    makers = [
        lambda count: type("Array", (ArrayInterface,), {})(record, shape=(count,)),
        lambda count: type("Export", (Exports,), {})(Ledger(), array=np.zeros(count, np.float32)),
        lambda count: package.to_device(np.zeros(count, np.int32)),
    ]
    for i in range(60):
        assert i + 1 in numbers(record, kernels[1], makers[i % 3](i + 1))
        gc.collect()


# ---- __dlpack__, wrappers, and what is readonly ------------------------------------------------------------------------
def test_wrappers(record, package, kernels):
    x = DeviceTensor((3, 4), data=address(package))
    expected = numbers(record, kernels[1], x)
    for value in [Wrapper(x), Wrapper(Wrapper(Wrapper(x)))] * WARM:
        with all_given_back(x):
            assert numbers(record, kernels[1], value) == expected
    with pytest.raises((TypeError, BufferError)):
        kernels[1][1, 32](Wrapper(3))


def test_what_is_readonly(record, package):
    """As an export or an interface that Python reads says; a legacy export cannot say it."""
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    for value, is_mutable in (
        (Exports(Ledger()), True), (Exports(Ledger(), array=array), False), (ExportsLegacy(Ledger()), False),
        (ArrayInterface(record, version=2), True), (ArrayInterface(record, version=2, readonly=True), False),
    ):  # fmt: skip
        kernel = kernel_of(package, 1)
        for _ in range(3):
            kernel[1, 32](value)
        ((numba_type,),) = kernel.signatures
        assert numba_type.mutable is is_mutable
        assert not isinstance(value, Exports) or capsule_name(value.capsule).startswith(b"used_dltensor")


def test_pinned_tensors_of_pytorch(record, package, stub_or_none, monkeypatch):
    """Each launch asks anew: a tensor of the same type, element type and rank that is not pinned is refused after them.

    With the stub this is simulated: a PyTorch without CUDA pins nothing, so ``is_pinned`` says here what it would say. What
    exchange table and capsule say of such a tensor, memory of the CPU, is not simulated.
    """
    torch = pytest.importorskip("torch")
    kernel, other = kernel_of(package, 1), kernel_of(package, 2)
    x, unpinned = torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.zeros(3, 4)
    if stub_or_none is None:
        x = x.pin_memory()
    else:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor.data_ptr() == x.data_ptr())
    on_device = DeviceTensor((3, 4), data=x.data_ptr())
    expected = words_of(package, on_device)
    Alike = type("Alike", (torch.Tensor,), {"__torch_function__": torch._C._disabled_torch_function_impl})

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    def check_refused(kernel, *arguments, where="argument 'a0' (position 0)"):
        is_refused(functools.partial(kernel[2, 32], *arguments), BufferError, where, "kDLCPU:0")

    for value in (x, Wrapper(x), torch.nn.Parameter(x, requires_grad=False), x.as_subclass(Alike), x.as_subclass(Overriding)):
        for _ in range(WARM):
            with all_given_back(value):
                assert numbers(record, kernel, value) == expected
            check_refused(kernel, unpinned)
    with torch.no_grad():
        assert numbers(record, kernel, torch.nn.Parameter(x)) == expected
    assert all(numba_type.mutable for (numba_type,) in kernel.signatures)
    for _ in range(WARM):  # in any place, beside a tensor of a device
        assert numbers(record, other, on_device, x) == numbers(record, other, x, on_device) == expected * 2
        assert numbers(record, other, (x, 1), x) == [*expected, 1, *expected]
        check_refused(other, (x, unpinned), x)
        check_refused(other, 1, (2, unpinned), where="argument 'a1' (position 1), item [1]")
    kernel[2, 32].bind(x)()
    assert "exported by Python code in every launch" in str(kernel.explain(x))
    assert "refused with BufferError" in str(kernel.explain(unpinned))


def test_a_pytorch_that_cannot_say_what_is_pinned(record, package, kernels, monkeypatch):
    torch = pytest.importorskip("torch")

    def fails(tensor, device=None):
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.Tensor, "is_pinned", fails)
    is_refused(lambda: kernels[1][1, 32](torch.zeros(3)), BufferError, "argument 'x' (position 0)", "kDLCPU:0")
    launched(record, kernels[1][1, 32], DeviceTensor((3,), data=address(package)))


# ---- ``__cuda_array_interface__`` as native code reads it, and what it leaves to Python --------------------------------
NATIVE, LEFT = (5, 0), (0, 5)


def ways(kernel, *arguments, launcher=None) -> tuple[int, int]:
    """How many of five launches were native, and how many were not, after a first one."""
    launcher = launcher or kernel[1, 32]
    launcher(*arguments)
    before = kernel.counts()
    for _ in range(5):
        launcher(*arguments)
    after = kernel.counts()
    return after.fast - before.fast, after.slow - before.slow


Pair = type("Pair", (tuple,), {})


class Both(ArrayInterface, Exports):
    def __init__(self, stub, **lies):
        Exports.__init__(self, Ledger())
        ArrayInterface.__init__(self, stub, **lies)


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


@pytest.mark.parametrize("lies, twin, way", [(*row, NATIVE) for row in READ] + [(*row, LEFT) for row in LEFT_TO_PYTHON])
def test_what_it_says(record, package, kernels, lies, twin, way):
    value = ArrayInterface(record, readonly=lies.get("readonly", False))
    at = value.said["data"][0]
    value.say(**{name: said for name, said in lies.items() if name != "readonly"})
    kernel = kernel_of(package, 1) if "readonly" in lies else kernels[1]
    kernel[1, 32](ArrayInterface(record))  # the type is known
    held = sys.getrefcount(value)
    assert ways(kernel, value) == way
    tensor = DeviceTensor(**{"shape": (4,), "data": at, **twin})
    kernel[1, 32](tensor)
    assert len({launch.packed for launch in record.launches[1:]}) == 1 and sys.getrefcount(value) == held
    if "readonly" in lies:
        assert not kernel.signatures[-1][0].mutable
    else:
        assert numbers_of(record.launches[-1]) == words_of(package, tensor)


@pytest.mark.parametrize("version", [2, 0, None, 3.0, "3", True, ...], ids=repr)
def test_an_interface_that_says_nothing_of_streams(record, kernels, version):
    """Of a version before 3. Who has ``__dlpack__``, too, as JAX's arrays have, is asked by that: it is told the stream."""
    both, one = (type(cls.__name__, (cls,), {})(record, version=version) for cls in (Both, ArrayInterface))
    assert [ways(kernels[1], value) for value in (both, one)] == [LEFT, LEFT]
    assert both.told == [1] * 6
    both.ledger.check(6)
    both.said["version"] = one.said["version"] = 3
    assert [ways(kernels[1], value) for value in (both, one)] == [NATIVE, NATIVE]
    both.said["version"] = 2
    assert ways(kernels[1], both) == LEFT and both.told == [1] * 12


def test_it_is_read_in_each_launch(record, kernels):
    value, launcher = ArrayInterface(record), kernels[1][1, 32]
    assert ways(kernels[1], value) == NATIVE
    bound = launcher.bind(value)
    for data in (record.allocate(64), record.allocate(64, int(isinstance(record, Stub)))):  # and of another device
        value.said["data"] = (data, False)
        before = launched(record, launcher, value)
        assert data in numbers_of(before)
    value.said["shape"] = (2, 2)
    assert launched(record, launcher, value).packed == launched(record, bound).packed != before.packed


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


OF_PACKAGE = ValueError, TypeError  # the packages do not agree
ODD = {ValueError: ValueError, AttributeError: OF_PACKAGE, KeyboardInterrupt: KeyboardInterrupt, SystemExit: SystemExit,
       Items: AssertionError, None: OF_PACKAGE, list: TypeError}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_interface_that_is_odd(record, kernels, odd):
    value = Odd(record)
    said = value.said
    assert ways(kernels[1], value) == NATIVE
    value.said = odd(said) if odd in (Items, list) else odd
    record.clear()
    with all_given_back(value):
        for _ in range(3):
            with pytest.raises(ODD[odd]) as caught:
                kernels[1][1, 32](value)
            del caught
    assert not record.launches
    value.said = said
    assert ways(kernels[1], value) == NATIVE


@pytest.mark.parametrize("name", ["mask", "data", "typestr", "shape", "strides", "stream"])
def test_keys_that_change_the_dict(record, kernels, name):
    """Looking into a dict may run Python code, if its keys are not only str."""
    cleared, value, launcher = [], ArrayInterface(record), kernels[1][1, 32]

    class Key:
        __hash__ = functools.partial(hash, name)

        def __eq__(self, other):
            if is_made:
                cleared.append(other)
                value.said.clear()
                gc.collect()
            return False

    is_made = False
    both_ways(functools.partial(launcher, value))
    value.said, is_made = {Key(): 1, **value.said}, True
    for _ in range(3):
        with contextlib.suppress(KeyError, TypeError, BufferError, RuntimeError):
            launcher(value)
    assert cleared


def test_a_type_that_is_no_array_any_more(record, kernels):
    Array = type("Array", (ArrayInterface,), {})
    value = Array(record)
    assert ways(kernels[1], value) == NATIVE
    Array.__cuda_array_interface__ = None
    for _ in range(3):
        with pytest.raises(OF_PACKAGE):
            kernels[1][1, 32](value)
    del Array.__cuda_array_interface__
    assert ways(kernels[1], value) == NATIVE


def test_a_type_that_becomes_an_array_amid_an_export(record, kernels):
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
    value = Late(record)
    for _ in range(3):
        kernels[2][1, 32](value, 1)
    assert {each.stream for each in record.launches} <= {0, 1}
    value.ledger.check(value.ledger.made)


@pytest.mark.parametrize("code", [700, 2])
def test_errors_of_the_driver_name_the_launch(stub, kernels, code):
    """Also where it is asked about an address by Python."""
    value = ArrayInterface(stub, version=2)
    for _ in range(2):
        for launch in (lambda: kernels[1][1, 32](value), kernels[1][1, 32].bind(value)):
            stub.fail("cuPointerGetAttribute", code)
            said = is_refused(launch, CudaError, "kernel() was not launched (grid (1, 1, 1), block", "cuPointerGetAttribute")
            assert ("sticky" in said) is (code == 700)
        stub.reset()
        kernels[1][1, 32](value)


def test_what_explain_says(record, kernels):
    value = ArrayInterface(record)
    for known in ("", "known: native"):
        said = str(kernels[1].explain(value))
        assert "path cuda-interface" in said and "exported by Python" not in said and known in said
        kernels[1][1, 32](value)
    value.said["version"] = 2
    assert "exported by Python" in str(kernels[1].explain(value))


# ---- under one name with a kernel for the CPU ------------------------------------------------------------------------
def test_under_one_name_with_a_kernel_for_the_cpu(record, package, kernels):
    """Native code sees that these are on a device; the kernel for the CPU alone does not take them."""
    array, value, here = package.device_array(3, np.float32), ArrayInterface(record), fast_args(lambda x: 1)
    both = fast_args(cuda=kernels[2].dispatcher, launch=(1, 32))(lambda x, y: None)
    for _ in range(2):
        with pytest.raises(TypeError):
            here(value)
    for each in (array, value):
        assert ways(both.cuda, each, 1, launcher=both) == NATIVE
    before = both.counts()
    both(array, 1)
    assert both.counts() == before
    for each in (array, DeviceTensor((4,)), value):
        ours, theirs = (launched(record, launch) for launch in (both.bind(each, 1), both.cuda[1, 32].bind(each, 1)))
        assert ours.packed == theirs.packed
