"""How kernels for CUDA are called: arguments, declared signatures, configurations, and the package's own launches."""

import functools
import gc
import math
import pickle
import struct
import sys
import textwrap
import weakref

import cuda_stub
import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from launches import (
    ExportedTensor,
    Interface,
    address,
    device_array,
    dispatcher_of,
    function_of,
    is_refused,
    kernel_of,
    launch_fast,
    needs_clusters,
)

from fastexchange import CudaError, fast_args
from fastexchange.cuda.driver import driver

INT_MAX = 2**31 - 1


@pytest.fixture
def x(package):
    return DeviceTensor((3,), data=address(package))


def packed(*values) -> tuple[bytes, ...]:
    """The parameters that int64 and float64 arguments become."""
    return tuple(struct.pack("<q" if isinstance(value, int) else "<d", value) for value in values)


# ---- arguments -------------------------------------------------------------------------------------------------------


def with_defaults(a, b=2, c=3.5):
    pass


def test_keywords_and_defaults(record, package):
    kernel = fast_args(package.jit(with_defaults))
    launcher = kernel[1, 32]
    cases = [
        (lambda: launcher(1), (1, 2, 3.5)),
        (lambda: launcher(1, 5), (1, 5, 3.5)),
        (lambda: launcher(1, c=0.5), (1, 2, 0.5)),
        (lambda: launcher(c=0.5, b=7, a=1), (1, 7, 0.5)),
        (lambda: launcher(1, 5, 6.5), (1, 5, 6.5)),
        (lambda: launcher(*(1,), b=4), (1, 4, 3.5)),
    ]
    for _ in range(30):
        for launch, expected in cases:
            launch()
            assert record.launches[-1].parameters == packed(*expected)
        record.clear()
    assert len(kernel.signatures) == 1 and kernel.counts().slow == 1
    for _ in range(30):  # one kind of call by itself, which gets a fast entry
        launcher(1)
        launcher(1, c=0.5)
    assert record.launches[-1].parameters == packed(1, 2, 0.5)


@pytest.mark.parametrize("warm", [0, 30])
def test_arguments_that_do_not_fit_the_parameters(record, package, warm):
    launcher = fast_args(package.jit(with_defaults))[1, 32]
    for _ in range(warm):
        launcher(1)
    record.clear()
    is_refused(lambda: launcher(), TypeError, "missing 1 required positional argument: 'a'")
    is_refused(lambda: launcher(1, 2, 3.5, 4), TypeError, "takes from 1 to 3 positional arguments but 4 were given")
    is_refused(lambda: launcher(1, d=2), TypeError, "unexpected keyword argument 'd'")
    is_refused(lambda: launcher(1, a=2), TypeError, "multiple values for argument 'a'")
    assert record.launches == []
    launcher(1)
    assert len(record.launches) == 1


def test_no_kernel_for_cuda_has_variadic_parameters(package):
    is_refused(lambda: fast_args(package.jit(lambda *args: None)), TypeError, "*args")


def test_a_kernel_is_launched_with_a_configuration(package, x):
    kernel = kernel_of(package, 1)
    is_refused(lambda: kernel(x), ValueError, "kernel[grid, block]")
    is_refused(lambda: kernel.bind(x), TypeError, "kernel[grid, block].bind")
    is_refused(lambda: fast_args(kernel.dispatcher, out="x[n] -> y[n]"), TypeError, "returns nothing")
    is_refused(lambda: fast_args(kernel.dispatcher, parallel=True), TypeError, "'parallel'")


def test_signatures_in_turn(record, package, x):
    """What one launch was does not show in the next, whichever way each goes."""
    y = DeviceTensor((2, 2), "int64", data=address(package) + 512)
    kernel = kernel_of(package, 2)
    launcher = kernel[1, 32]
    launches = [(1, x), (1.5, x), (True, y), (np.int8(3), y), (np.float32(1), (x, y)), (y, x), (1j, 2)]
    expected = []
    for arguments in launches:
        launcher(*arguments)
        expected.append(record.launches[-1].packed)
    assert len(set(expected)) == len(launches)
    for _ in range(25):
        for arguments, wanted in zip(launches, expected, strict=True):
            launcher(*arguments)
            assert record.launches[-1].packed == wanted
        record.clear()
    assert kernel.counts() == (25 * len(launches), len(launches), len(launches))
    assert kernel.signatures == list(kernel.dispatcher.overloads) and len(kernel.signatures) == len(launches)


def test_values_are_read_in_each_launch(record, package, x):
    launcher = kernel_of(package, 2)[1, 32]
    launch_fast(launcher, 0, x)
    for i in range(5):
        launcher(i, x)
        assert record.launches[-1].parameters[0] == packed(i)[0]
    launcher(2**63, x)  # another type
    assert record.launches[-1].parameters[0] == (2**63).to_bytes(8, "little")
    launcher(-1, x)
    assert record.launches[-1].parameters[0] == packed(-1)[0]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_an_int_that_no_parameter_holds(record, package, number):
    launcher = kernel_of(package, 1)[1, 32]
    for _ in range(2):
        is_refused(lambda: launcher(number), OverflowError, "'a0'", "int64")
        is_refused(lambda: launcher((1, number)), OverflowError, "'a0'")
        launch_fast(launcher, 1)
    assert "OverflowError" in str(launcher.explain(number))


# ---- declared signatures ---------------------------------------------------------------------------------------------

MIXED = "void(float32, int32, float32[:])"


@pytest.fixture(scope="module")
def mixed(package):
    return kernel_of(package, 3, signature=MIXED)


@np.errstate(over="ignore")
def float32(value) -> bytes:
    return np.float32(value).tobytes()


def int32(value) -> bytes:
    return np.int32(value).tobytes()


@pytest.mark.parametrize(
    "given",
    [1.5, 1, -1, True, 2**53 + 1, 2**63, np.float32(2.25), np.float64(2), np.float16(1.5), np.int8(-3), np.uint64(2**64 - 1),
     0.1, 1e300, -1e300, math.nan, math.inf, np.bool_(True), np.uint8(200)],
    ids=repr,
)  # fmt: skip
def test_numbers_for_a_declared_float32(record, mixed, x, given):
    launcher = mixed[1, 32]
    for launch in (launcher, launcher, lambda *arguments: launch_fast(launcher, *arguments)):
        if type(given) is int and given > INT_MAX**2 and launch is not launcher:
            continue  # has no fast entry: the next int may be an int64
        launch(given, 1, x)
        assert record.launches[-1].parameters[:2] == (float32(given), int32(1))


@pytest.mark.parametrize(
    "given", [0, -1, INT_MAX, -INT_MAX - 1, True, np.int8(-1), np.uint8(255), np.uint64(5), np.int64(-7), np.uint32(INT_MAX)],
    ids=repr,
)  # fmt: skip
def test_ints_for_a_declared_int32(record, mixed, x, given):
    launcher = mixed[1, 32]
    for launch in (launcher, launcher, lambda *arguments: launch_fast(launcher, *arguments)):
        launch(1.0, given, x)
        assert record.launches[-1].parameters[:2] == (float32(1), int32(given))


@pytest.mark.parametrize(
    "given", [INT_MAX + 1, -INT_MAX - 2, 2**63, 2**64 - 1, 2**64, np.uint64(2**63 + 1), np.uint32(2**31), np.int64(-(2**40))],
    ids=repr,
)  # fmt: skip
def test_ints_that_a_declared_int32_cannot_hold(record, mixed, x, given):
    launcher = mixed[1, 32]
    if given not in (2**63, 2**64 - 1, 2**64):
        launch_fast(launcher, 1.0, type(given)(1), x)
    record.clear()
    for _ in range(3):
        is_refused(lambda: launcher(1.0, given, x), OverflowError, "kernel()")
        is_refused(lambda: launcher.bind(1.0, given, x), OverflowError, "kernel()")
    assert record.launches == []


@pytest.mark.parametrize("given", [1.0, np.float32(1), np.float16(1), 1j, None, "x", (1,)], ids=repr)
def test_what_is_no_int(record, mixed, x, given):
    launcher = mixed[1, 32]
    launcher(1.0, 1, x)
    record.clear()
    for _ in range(3):
        with pytest.raises((TypeError, ValueError)):
            launcher(1.0, given, x)
    assert record.launches == []


def bad_arrays(package):
    at = address(package)
    exported = ExportedTensor((3,), data=at, readonly=True)
    return {
        "2-d": DeviceTensor((3, 4), data=at), "float64": DeviceTensor((3,), "float64", data=at), "a number": 1,
        "readonly": exported, "readonly object": Interface(exported), "2-d object": Interface(DeviceTensor((1, 3), data=at)),
        "2-d device array": device_array(package, DeviceTensor((3, 4), data=at)), "tuple": (DeviceTensor((3,), data=at),),
        "host array of another type": np.zeros(3), "2-d host array": np.zeros((3, 1), np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "2-d", "float64", "a number", "readonly", "readonly object", "2-d object", "2-d device array", "tuple",
    "host array of another type", "2-d host array",
])  # fmt: skip
def test_arrays_that_are_not_the_declared_ones(record, package, mixed, name):
    launcher, array = mixed[1, 32], bad_arrays(package)[name]
    for _ in range(3):
        is_refused(lambda: launcher(1.0, 1, array), TypeError, "no signature for arguments of types")
    assert record.launches == []


@pytest.mark.parametrize("kind", [DeviceTensor, ExportedTensor, "Interface", "device array"])
def test_layouts_of_declared_arrays(record, package, kind):
    """What "C" says is relied on by the kernel. Extents of 1 and 0 have any layout."""
    def made(shape, strides=None):
        tensor = DeviceTensor(shape, "float32", strides, data=address(package))
        if kind == "Interface":
            return Interface(tensor)
        if kind == "device array":
            return device_array(package, tensor)
        return kind(shape, "float32", strides, data=address(package))

    c, f, a = (kernel_of(package, 1, signature=f"void(float32[{what}])")[1, 1] for what in (":,::1", "::1,:", ":,:"))
    for launcher in (c, f, a):
        assert isinstance(launcher.kernel.signatures, list)
    for _ in range(2):
        c(made((3, 4)))
        c(made((3, 4), (4, 1)))
        f(made((3, 4), (1, 3)))
        for strides in (None, (1, 3), (8, 2), (-4, 1)):
            a(made((3, 4), strides))
        assert len(record.launches) == 7
        for launcher, strides in ((c, (1, 3)), (c, (8, 1)), (c, (-4, 1)), (f, None), (f, (1, 4))):
            is_refused(functools.partial(launcher, made((3, 4), strides)), TypeError, "no signature")
        assert len(record.launches) == 7
        record.clear()


@pytest.mark.parametrize("declared, given, parameters", [
    ("uint64", 2**64 - 1, b"\xff" * 8), ("uint64", True, packed(1)[0]), ("uint64", np.int8(5), packed(5)[0]),
    ("int64", np.uint8(255), packed(255)[0]), ("int8", -128, b"\x80"), ("uint8", 255, b"\xff"), ("uint16", 65535, b"\xff\xff"),
    ("float64", 2**53 + 1, struct.pack("<d", 2**53)), ("float64", np.float32(0.1), np.float64(np.float32(0.1)).tobytes()),
    ("float64", np.float16(1e-7), np.float64(np.float16(1e-7)).tobytes()), ("boolean", True, b"\1"),
    ("float16", 0.1, np.float16(0.1).tobytes()), ("float16", 65520.0, np.float16(np.inf).tobytes()),
    ("float16", 65519.0, np.float16(65504).tobytes()), ("float16", -3e-8, np.float16(-6e-8).tobytes()),
    ("float16", 2**-25, b"\0\0"), ("float16", 7, np.float16(7).tobytes()), ("float16", -math.inf, np.float16(-np.inf).tobytes()),
])  # fmt: skip
def test_other_numbers(record, package, declared, given, parameters):
    launcher = kernel_of(package, 1, signature=f"void({declared})")[1, 1]
    launcher(given)
    launcher(given)
    assert [each.parameters for each in record.launches] == [(parameters,)] * 2


@pytest.mark.parametrize("declared, given", [
    ("uint64", -1), ("uint64", np.int8(-1)), ("uint64", 2**64), ("int64", 2**63), ("int64", np.uint64(2**63)), ("int8", 128),
    ("int8", -129), ("uint8", 256), ("uint8", -1), ("uint16", 65536), ("int16", np.uint16(32768)), ("uint32", 2**32),
])  # fmt: skip
def test_other_ints_out_of_range(record, package, declared, given):
    launcher = kernel_of(package, 1, signature=f"void({declared})")[1, 1]
    for _ in range(3):
        is_refused(lambda: launcher(given), OverflowError)
    assert record.launches == []


def test_float16_as_numpy_rounds_it(record, package):
    launcher = kernel_of(package, 1, signature="void(float16)")[1, 1]
    halves = np.arange(0, 0x7C00, 61, dtype=np.uint16).view(np.float16).astype(float)
    middles = (halves[:-1] + halves[1:]) / 2
    values = [*halves, *middles, *np.nextafter(middles, 9), *-np.nextafter(middles, -9)]
    for value in values:
        launcher(float(value))
    assert [each.packed for each in record.launches] == [np.float16(value).tobytes() for value in values]


def test_declared_tuples(record, package):
    launcher = kernel_of(package, 1, signature="void(UniTuple(float32, 2))")[1, 1]
    for _ in range(30):
        launcher((1, 2.5))
    assert record.launches[-1].parameters == (float32(1), float32(2.5))
    for wrong in ((1.0,), (1.0, 2.0, 3.0), 1.0, (1j, 2)):
        is_refused(lambda wrong=wrong: launcher(wrong), TypeError, "no signature")


def test_one_of_several_signatures(record, package):
    kernel = kernel_of(package, 1, signature=["void(int32)", "void(float64)"])
    launcher = kernel[1, 1]
    for given, parameter in ((1, packed(1.0)), (1.5, packed(1.5)), (np.int32(3), (int32(3),)), (np.float32(2), packed(2.0))):
        for _ in range(2):
            launcher(given)
        if type(given) is not int:  # which of the two an int64 becomes is the package's choice
            assert record.launches[-1].parameters == parameter
    is_refused(lambda: launcher(1j), TypeError, "no signature")
    assert len(kernel.signatures) == 2 == kernel.counts().compiled


def test_numbers_and_names_of_arguments_of_a_declared_signature(record, mixed, x):
    launcher = mixed[1, 32]
    is_refused(lambda: launcher(1.0, 1), TypeError, "missing")
    is_refused(lambda: launcher(1.0, 1, x, x), TypeError, "takes 3")
    is_refused(lambda: launcher(1.0, 1, b=x), TypeError, "unexpected keyword")
    assert record.launches == []
    launcher(a2=x, a1=2, a0=1)
    assert record.launches[-1].parameters[:2] == (float32(1), int32(2))


# ---- configurations --------------------------------------------------------------------------------------------------


def test_launchers_are_remembered(package):
    kernel = kernel_of(package, 0)
    assert kernel[1, 32] is kernel[1, 32] is kernel[1, 32] and kernel[1, 32] is not kernel[2, 32]
    assert kernel[(1, 2), (3, 4)] is kernel[(1, 2), (3, 4)]
    assert kernel.configure(1, 32) is kernel.configure(1, 32)
    assert kernel.forall(10) is kernel.forall(10) is not kernel.forall(11)
    assert kernel[1, 32].kernel is kernel
    assert kernel[[1], 32].configuration == kernel[1, 32].configuration
    for i in range(1, 5000):
        kernel[i, 32]
        kernel.forall(i)
    assert len(kernel._launchers) <= 4096 and len(kernel._for_tasks) <= 4096


@pytest.mark.parametrize("configuration, kind", [
    (1, ValueError), ((1,), ValueError), ((), ValueError), ((1, 2, 3, 4, 5, 6), ValueError), (None, ValueError),
    (slice(1), ValueError), ((1.0, 32), TypeError), ((1, "32"), TypeError), ((None, 32), TypeError), (((), 32), ValueError),
    (((1, 1, 1, 1), 32), ValueError), ((1, (1, 2, 3, 4)), ValueError), ((-1, 32), ValueError), ((1, 2**32), ValueError),
    ((1, 32, "stream"), TypeError), ((1, 32, 1.5), TypeError), ((1, 32, True), TypeError), ((1, 32, -1), ValueError),
    ((1, 32, None, -1), ValueError), ((1, 32, None, 1.0), TypeError), ((1, 32, None, 2**32), ValueError),
    ((1, 32, None, 0, (1, 1, 1, 1)), ValueError), ((1, 32, None, 0, "c"), TypeError), (({1}, 32), TypeError),
], ids=str)  # fmt: skip
def test_what_is_no_configuration(package, configuration, kind):
    kernel = kernel_of(package, 0)
    is_refused(lambda: kernel[configuration], kind, "kernel[...]")


@pytest.mark.parametrize(
    "configuration", [(0, 32), (1, 0), (1, 2000), ((1, 70000), 32), ((1, 1, 65536), 1), (1, (1, 1, 65)), (2**31, 1)]
)
def test_what_the_device_does_not_launch(record, package, configuration):
    launcher = kernel_of(package, 0)[configuration]
    for _ in range(20):
        is_refused(launcher, CudaError, "CUDA_ERROR_INVALID_VALUE", "kernel()", str(launcher.configuration))
    assert record.launches == []


def test_for_all_tasks(stub, package, x):
    kernel = kernel_of(package, 1)
    stub.set_occupancy(10, 96)
    kernel.forall(0)(x)
    assert stub.launches == []
    for _ in range(30):
        kernel.forall(1000)(x)
        assert (stub.launches[-1].grid, stub.launches[-1].block) == ((11, 1, 1), (96, 1, 1))
    kernel.forall(1000, 128, None, 512)(x)
    record = stub.launches[-1]
    assert (record.grid, record.block, record.shared) == ((8, 1, 1), (128, 1, 1), 512)
    kernel.forall(1, tpb=32, sharedmem=16)(x)
    assert (stub.launches[-1].grid, stub.launches[-1].shared) == ((1, 1, 1), 16)
    kernel.forall(np.int64(96))(x)
    assert stub.launches[-1].grid == (1, 1, 1)
    for _ in range(30):
        kernel.forall(0)(x)
        kernel.forall(0).bind(x)()
    assert len(stub.launches) == 33
    stub.set_occupancy(264, 256)
    refused = {(-1,): ValueError, (1, -1): ValueError, (1.5,): TypeError, ("1",): TypeError, (1, None): TypeError}
    for bad, error in refused.items():
        is_refused(functools.partial(kernel.forall, *bad), error, "forall()")
    is_refused(lambda: kernel.forall(), TypeError)
    is_refused(lambda: kernel.forall(1, sharedmem=-1), ValueError)


def test_clusters_need_numba_cuda_mlir(record, package):
    needs_clusters(package)
    kernel = kernel_of(package, 0)
    launcher = kernel[(4, 2), 32, None, 0, (2, 1)]
    launcher()
    launch = record.launches[-1]
    assert launch.cluster == (2, 1, 1) and launch.api == "cuLaunchKernelEx" and not launch.cooperative


def test_cooperative_launches(record, package):
    function = function_of(1, "g = cg.this_grid(); g.sync()")
    function.__globals__["cg"] = package.cg
    launcher = fast_args(package.jit(function))[2, 32]
    launch_fast(launcher, 1.0)
    bound = launcher.bind(1.0)
    bound()
    assert all(each.cooperative for each in record.launches)
    too_many = launcher.kernel[10**6, 1024]
    is_refused(lambda: too_many(1.0), CudaError, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")


@pytest.mark.parametrize("shared", [0, 1, 48 * 1024, 48 * 1024 + 1, 100_000])
def test_dynamic_shared_memory(stub, package, x, shared):
    """More than 48 KiB has to be asked for, once."""
    launcher = kernel_of(package, 1)[1, 32, None, shared]
    stub.set_trace(True)
    launch_fast(launcher, x)
    launcher.bind(x)()
    asked = stub.trace.count("cuFuncSetAttribute") + stub.trace.count("cuKernelSetAttribute")
    assert asked == (shared > 48 * 1024) and stub.launches[-1].shared == shared
    more = launcher.kernel[1, 32, None, 110_000]
    more(x)
    launcher(x)
    launcher.kernel[1, 32, None, 105_000](x)
    more(x)
    assert stub.trace.count("cuFuncSetAttribute") == asked + 1
    assert [each.shared for each in stub.launches[-4:]] == [110_000, shared, 105_000, 110_000]


def test_more_shared_memory_than_there_is(record, package, x):
    launcher = kernel_of(package, 1)[1, 32, None, 10**6]
    for _ in range(3):
        is_refused(lambda: launcher(x), CudaError, "CUDA_ERROR_INVALID_VALUE")
    assert record.launches == []


@pytest.mark.filterwarnings("ignore:Could not find source")
@pytest.mark.parametrize("options", [{"max_registers": 32}, {"launch_bounds": 128}, {"fastmath": True}, {"lineinfo": True}])
def test_options_that_change_nothing_here(record, package, x, options):
    kernel = kernel_of(package, 1, **options)
    launch_fast(kernel[1, 32], x)
    assert kernel.why_not == "" and kernel.dispatcher.targetoptions.items() >= options.items()


# ---- the package's own launch ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Could not find source")
def test_debug_kernels(stub, package):
    kernel = kernel_of(package, 1, debug=True, opt=False)
    array = device_array(package, DeviceTensor((3,), data=address(package)))
    for _ in range(3):
        kernel[1, 32](array)
    assert len(stub.launches) == 3 and kernel.counts()[:2] == (0, 3)
    assert stub.log[-1].api == "cuMemcpyDtoH"
    explained = str(kernel[1, 32].explain(array))
    assert f"{kernel.target.name}'s own launch" in explained and "debug=True" in explained
    is_refused(lambda: kernel[1, 32].bind(array), TypeError, "cannot be bound")


def test_extensions(stub, package, x):
    class Doubling:
        seen = 0

        def prepare_args(self, numba_type, value, **_):
            self.seen += 1
            return numba_type, 2 * value if type(value) is float else value

    extension = Doubling()
    kernel = kernel_of(package, 1, extensions=[extension])
    for i in range(3):
        kernel[1, 32](1.5)
        assert stub.launches[-1].parameters == packed(3.0) and extension.seen == i + 1
    assert "extensions" in str(kernel.explain(1.5)) and kernel.counts()[:2] == (0, 3)


def test_callbacks_before_a_launch(stub, package):
    launcher = kernel_of(package, 1)[1, 32]
    launcher(1.0)
    if package.__name__ != "numba.cuda":
        is_refused(lambda: launcher.pre_launch_callbacks, AttributeError)
        return
    called = []
    launcher.pre_launch_callbacks.append(lambda kernel, configuration: called.append((kernel, configuration)))
    for i in range(20):
        launcher(1.0)
        assert len(called) == i + 1
    assert called[0][1].griddim == (1, 1, 1) and len(stub.launches) == 21
    assert "own launch" in str(launcher.explain(1.0)) and "own launch" not in str(launcher.kernel.explain(1.0))
    is_refused(lambda: launcher.bind(1.0), TypeError, "cannot be bound")
    launcher.kernel.dispatcher[1, 32](1.0)
    assert len(called) == 20 and launcher.kernel[1, 64].pre_launch_callbacks == []
    stream = package.stream()  # of the tensors' framework: another launch to the package
    DeviceTensor.streams[0] = int(stream.handle)
    try:
        launcher(device_array(package, DeviceTensor((3,), data=address(package))))
    finally:
        DeviceTensor.streams[0] = 0
    assert len(called) == 21
    is_refused(lambda: launcher.kernel.forall(10).pre_launch_callbacks, AttributeError)


def test_arrays_of_the_host(stub, package):
    kernel = kernel_of(package, 2)
    array = np.arange(3, dtype=np.float32)
    for i in range(3):
        kernel[1, 32](1.0, array)
        names = [entry.api for entry in stub.log if "Memcpy" in entry.api]
        assert len(stub.launches) == i + 1 and len(names) == 2 * (i + 1), "to the device and back"
    assert "own launch" in str(kernel.explain(1.0, array)) and kernel.counts().fast == 0
    is_refused(lambda: kernel[1, 32].bind(1.0, array), TypeError, "cannot be bound")


def test_records(stub, package):
    kernel = kernel_of(package, 1)
    array = np.zeros(3, [("a", "i4"), ("b", "f8")])
    there = package.to_device(array)
    for value in (array, there, array[0]):
        kernel[1, 32](value)
        assert "own launch" in str(kernel.explain(value))
    assert len(stub.launches) == 3 and kernel.counts().fast == 0


@pytest.mark.parametrize("hint, copies", [("In", ["HtoD"]), ("Out", ["DtoH"]), ("InOut", ["HtoD", "DtoH"])])
def test_hints(stub, package, hint, copies):
    kernel = kernel_of(package, 1)
    value = getattr(package, hint)(np.zeros(3))
    kernel[1, 32](value)
    apis = [entry.api for entry in stub.log]
    assert len(stub.launches) == 1 and all(any(copy in api for api in apis) for copy in copies), apis
    assert "own launch" in str(kernel.explain(value))


def test_arrays_of_the_host_for_a_declared_signature(stub, mixed):
    array = np.zeros(3, np.float32)
    mixed[1, 32](1.0, 1, array)
    assert len(stub.launches) == 1
    is_refused(lambda: mixed[1, 32](1.0, 2**31, array), OverflowError, "'a1'", "int32")
    is_refused(lambda: mixed[1, 32](1.0, 1.5, array), TypeError, "cannot be converted to int32 exactly")
    is_refused(lambda: mixed[1, 32](1.0, 1, array.astype("f8")), TypeError, "no signature")
    assert len(stub.launches) == 1


# ---- the kernel itself -----------------------------------------------------------------------------------------------

SCALE = 2.0


def scale(y):
    y[0] = SCALE


def test_recompile(record, package):
    global SCALE
    x = DeviceTensor((3,), data=address(package, 16))  # a kernel that writes: where no other test reads
    kernel = fast_args(package.jit(scale))
    launcher = kernel[1, 32]
    bound = launcher.bind(x)
    launch_fast(launcher, x)
    functions = {each.function for each in record.launches}
    assert len(functions) == 1
    SCALE = 3.0
    try:
        kernel.recompile()
        launch_fast(launcher, x)
        assert record.launches[-1].function not in functions and kernel.counts().compiled == 1
        bound()  # goes on as it was bound
        assert record.launches[-1].packed == record.launches[0].packed
    finally:
        SCALE = 2.0


def test_one_kernel_for_each_dispatcher(package):
    dispatcher = dispatcher_of(package, 1)
    kernel = fast_args(dispatcher)
    assert fast_args(dispatcher) is kernel is fast_args(kernel) and fast_args(dispatcher, grad="allow") is not kernel
    assert kernel.dispatcher is dispatcher and kernel.py_func is dispatcher.py_func and kernel.__name__ == "kernel"
    assert "kernel(a0)" in repr(kernel) and "grid (1, 1, 1), block (32, 1, 1)" in repr(kernel[1, 32])
    assert "for 10 tasks" in repr(kernel.forall(10))
    assert kernel.counts() == (0, 0, 0) and kernel.signatures == []


def pickled(y):
    pass


def test_pickling(record, package, x):
    kernel = fast_args(package.jit(pickled))
    launcher = kernel[(2, 3), 32, None, 64]
    launcher(x)
    for each in (kernel, launcher, kernel.forall(100), kernel[2, 32]):
        again = pickle.loads(pickle.dumps(each))
        assert type(again) is type(each) and repr(again) == repr(each)
    again = pickle.loads(pickle.dumps(launcher))
    assert again.configuration == launcher.configuration
    again(x)
    assert record.launches[-1].packed == record.launches[0].packed and record.launches[-1].grid == (2, 3, 1)
    is_refused(lambda: pickle.dumps(kernel[1, 32, 1]), TypeError, "stream")


CACHED = """
    import sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, DIRECTORY)
    from cuda_tensors import DeviceTensor
    import compiled_kernels
    x = DeviceTensor((3,))
    for _ in range(30):
        compiled_kernels.fast[1, 32](2.0, x)
    dispatcher = compiled_kernels.fast.dispatcher
    print(sum(dispatcher.stats.cache_hits.values()), sum(dispatcher.stats.cache_misses.values()), len(stub.launches))
    print(stub.launches[-1].packed == stub.launches[0].packed)
"""


def test_the_disk_cache(package, tmp_path):
    """A second process compiles nothing."""
    source = f"""
        from {package.__name__} import jit
        from fastexchange import CudaError, fast_args

        @fast_args
        @jit(cache=True)
        def fast(a, x):
            x[0] = a
    """
    (tmp_path / "compiled_kernels.py").write_text(textwrap.dedent(source))
    code = CACHED.replace("DIRECTORY", repr(str(tmp_path)))
    environment = {"NUMBA_CUDA_MLIR_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (cuda_stub.run_with_stub(code, tmp_path, environment).split() for _ in range(2))
    assert first == ["0", "1", "30", "True"] and second == ["1", "0", "30", "True"]


# ---- what is freed ---------------------------------------------------------------------------------------------------


def test_kernels_and_launchers_are_freed(package, x):
    before = sys.getrefcount(x)
    kernel = kernel_of(package, 1)
    launcher = kernel[1, 32]
    launch_fast(launcher, x)
    references = [weakref.ref(each) for each in (kernel, launcher)]
    del kernel, launcher
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert sys.getrefcount(x) == before


def test_the_best_block_is_that_for_the_shared_memory(stub, package):
    """The driver is asked once for each amount of it that launches for tasks have, if they are not too many."""

    def empty(x):
        pass

    kernel, x = fast_args(package.jit(empty)), DeviceTensor((4,))
    stub.clear()
    stub.set_trace(True)
    try:
        few = [0, 1024, 512, 2048] * 10
        for shared in few:
            kernel.forall(1000, 0, None, shared)(x)
        assert stub.trace.count("cuOccupancyMaxPotentialBlockSize") == 4
        many = [4 * i for i in (0, 1024, 2048, 512, 256)] * 10
        for shared in many:
            kernel.forall(1000, 0, None, shared)(x)
        assert stub.trace.count("cuOccupancyMaxPotentialBlockSize") <= 4 + 50
    finally:
        stub.set_trace(False)
    assert [launch.shared for launch in stub.launches] == few + many


@pytest.mark.parametrize("shared", [0, 1024])
def test_where_no_block_can_run(stub, package, x, monkeypatch, shared):
    kernel = kernel_of(package, 1)
    asked = []

    def none(*args):
        asked.append(args)
        return driver().bindings.CUresult.CUDA_SUCCESS, 0, 0

    with monkeypatch.context() as patch:
        patch.setattr(driver().bindings, "cuOccupancyMaxPotentialBlockSize", none)
        for _ in range(3):
            is_refused(
                lambda: kernel.forall(1000, 0, None, shared)(x), CudaError, "kernel() was not launched (for 1000 tasks",
                f"no block with {shared} bytes", "LAUNCH_OUT_OF_RESOURCES",
            )  # fmt: skip
    assert len(asked) == 3 and stub.launches == []
    kernel.forall(1000, 0, None, shared)(x)
    assert len(stub.launches) == 1


@pytest.mark.parametrize("warm", [0, 30])
def test_a_number_beyond_a_declared_parameter_is_named(stub, package, x, warm):
    kernel = kernel_of(package, 3, signature="void(int8, float32[:], uint16)")
    launcher = kernel[1, 32]
    for _ in range(warm):
        launcher(1, x, 2)
    for arguments, name, number in (((300, x, 2), "a0", 300), ((1, x, -1), "a2", -1), ((1, x, np.int64(65536)), "a2", 65536)):
        for launch in (launcher, launcher.bind):
            launched = functools.partial(launch, *arguments)
            is_refused(launched, OverflowError, f"argument {name!r}", f": {number} does not fit into")
    launcher(1, x, 2)


def test_explain_of_what_a_declared_signature_has_no_place_for(stub, package, x):
    kernel = kernel_of(package, 2, signature="void(int8, float32[:])")
    for bad, name in ((1.5, "'a0' (position 0)"), ((1, 2), "no signature")):
        is_refused(lambda: kernel[1, 32](bad, x), TypeError, name)  # noqa: B023
        said = str(kernel.explain(bad, x))
        assert "refused with TypeError" in said and name in said
    assert "next such call compiles" in str(kernel.explain(1, x))
    kernel[1, 32](1, x)
    assert "known: native" in str(kernel.explain(1, x)) and len(kernel.signatures) == 1


# ---- precompile ------------------------------------------------------------------------------------------------------


def test_precompile_launches_nothing(record, package, x):
    kernel = kernel_of(package, 2)
    record.clear()
    assert kernel.precompile((2.5, x), {"a1": x, "a0": 1}) == kernel.signatures
    assert record.launches == [] and len(kernel.signatures) == 2 and kernel.counts().fast == 0
    for _ in range(20):
        kernel[1, 32](2.5, x)
    assert len(record.launches) == 20 and len(kernel.signatures) == 2


def test_precompile_for_signatures(record, package, x):
    kernel = kernel_of(package, 2)
    (taken,) = kernel.precompile("(float64, int64)")
    assert kernel.signatures == [taken] and record.launches == []
    kernel[1, 32](2.5, 3)
    assert kernel.signatures == [taken] and len(record.launches) == 1
    is_refused(lambda: kernel.precompile(x), TypeError, "into a tuple")
    is_refused(lambda: kernel.precompile((np.ones(3), 1)), TypeError, "give the signature")


def test_precompile_by_the_name_of_the_kernel_for_the_cpu(record, package, x):
    beside = kernel_of(package, 2)
    kernel = fast_args(lambda a0, a1: None, cuda=beside, launch=(1, 32))
    assert kernel.precompile((1, x)) == beside.signatures and kernel.counts().compiled == 0
    kernel.precompile((1, 2))
    assert kernel.counts().compiled == 1 == len(beside.signatures) and record.launches == []
