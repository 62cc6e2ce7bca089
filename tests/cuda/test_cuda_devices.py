"""Devices: where a launch goes, whose context is current for it and after it, and tensors that are where they must not be."""

import concurrent.futures

import numpy as np
import pytest
from cuda_producers import CUDA, HOST, MANAGED, ArrayInterface, Exports, both_ways, new_stream, traced
from cuda_tensors import DeviceTensor, OtherTensor
from frameworks import torch
from made_producers import Dunder, Ledger, Tabled
from stub_processes import run_package

from fastexchange.cuda.driver import driver


def on_device(device: int, **options) -> DeviceTensor:
    return DeviceTensor((4,), device=device, **options)


def in_new_thread(function):
    """What `function` returns in a thread of its own, which begins without a context."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# ---- where -----------------------------------------------------------------------------------------------------------


def test_a_launch_is_on_the_device_of_its_tensors(stub, kernels):
    launch = kernels[1][1, 32]
    for device in [0, 1, 2] * 20 + [2, 1, 0]:
        launch(on_device(device))
        assert (stub.launches[-1].device, stub.launches[-1].context) == (device, stub.primary_context(device))


def test_the_current_context_is_as_before(stub, kernels):
    launch = kernels[1][1, 32]
    for current in (0, 1, 2):
        with driver().on(current):
            before = stub.current_context()
            assert before == stub.primary_context(current)
            for device in (0, 1, 2):
                launch(on_device(device))
                assert stub.current_context() == before
            kernels[1].forall(10)(on_device(1))
            kernels[1][1, 32].bind(on_device(2))()
            assert stub.current_context() == before


def test_a_new_thread_has_no_context_before_and_after(stub, kernels):
    """Neither where it learns new types there."""
    none, one = kernels[:2]
    launches = [
        (1, lambda: one[1, 32](on_device(1, dtype="int8"))),
        (0, lambda: one[1, 32](np.int16(3))),
        (2, lambda: one[1, 32](ArrayInterface(stub, typestr="<i2", device=2))),
        (2, lambda: one[1, 32]((1, on_device(2)))),
        (0, none[1, 32]),
        (0, lambda: one[1, 32].bind(on_device(0))()),
        (2, lambda: one.forall(3)(on_device(2))),
    ]

    def run():
        for device, launch in launches:
            assert stub.current_context() == 0
            launch()
            assert stub.current_context() == 0 and stub.launches[-1].device == device

    in_new_thread(run)
    assert len(stub.launches) == len(launches)


def test_without_tensors_it_is_the_threads_device(stub, kernels):
    for device in (1, 2, 0):
        with driver().on(device):
            both_ways(kernels[0][1, 32], 3)
            both_ways(lambda: kernels[1][1, 32](2.5), 3)
            kernels[1][1, 32](on_device(0, device_type=HOST))
        assert {each.device for each in stub.launches} == {device}
        stub.clear()


def test_a_context_that_is_not_primary(stub, kernels, package):
    """Launches are in the device's primary context, where the packages load their kernels, whatever is current."""
    from cuda.bindings import driver as bindings

    def new_context(device):
        try:
            error, context = bindings.cuCtxCreate(bindings.CUctxCreateParams(), 0, device)
        except TypeError:  # before CUDA 13
            error, context = bindings.cuCtxCreate(0, device)
        assert not int(error)
        return context

    for device in (0, 1):
        context = new_context(device)
        try:
            assert stub.current_context() == int(context)
            kernels[0][1, 32]()
            kernels[1][1, 32](2)
            kernels[1][1, 32](on_device(device))
            kernels[1][1, 32](on_device(2))
            assert stub.current_context() == int(context)
        finally:
            bindings.cuCtxDestroy(context)
        assert [each.context for each in stub.launches] == [stub.primary_context(d) for d in (device, device, device, 2)]
        stub.clear()


def test_pinned_and_managed_memory(stub, kernels):
    pinned = on_device(0, device_type=HOST)
    for number in (0, -1, 63, 2**31 - 1):  # of pinned memory the number means nothing
        kernels[1][1, 32](on_device(number, device_type=HOST))
        assert stub.launches[-1].device == 0
    for device in (0, 1, 2):
        managed = on_device(1, device_type=MANAGED)
        for arguments in ((pinned, on_device(device), managed), (managed, pinned, on_device(device))):
            both_ways(lambda arguments=arguments: kernels[3][1, 32](*arguments), 20)
            assert {each.device for each in stub.launches} == {device}
            stub.clear()
        kernels[1][1, 32](on_device(device, device_type=MANAGED))
        assert stub.launches[-1].device == device
        stub.clear()


def test_managed_memory_of_another_device_and_another_producer(stub, kernels):
    """The streams are those of the device of the launch."""
    DeviceTensor.streams[0], OtherTensor.streams[0] = new_stream(0), new_stream(0)
    DeviceTensor.streams[1], OtherTensor.streams[1] = new_stream(1), new_stream(1)
    managed, there = on_device(1, device_type=MANAGED), OtherTensor((4,))
    kernels[2][1, 32](managed, there)
    assert (stub.launches[-1].device, stub.launches[-1].stream) == (0, DeviceTensor.streams[0])
    kernels[2][1, 32](there, managed)
    assert (stub.launches[-1].device, stub.launches[-1].stream) == (0, OtherTensor.streams[0])


# ---- where they must not be ------------------------------------------------------------------------------------------


def test_tensors_on_different_devices_are_refused(stub, kernels):
    first, second = on_device(0), on_device(1)
    both_ways(lambda: kernels[2][1, 32](first, first))
    both_ways(lambda: kernels[2][1, 32](second, second))
    stub.clear()
    DeviceTensor.streams[0], OtherTensor.streams[1] = new_stream(0), new_stream(1)
    other, array = OtherTensor((4,), device=1), ArrayInterface(stub, device=1, stream=OtherTensor.streams[1])
    exports = Exports(Ledger(), device=1)
    for value in (second, other, array, exports, (3, second), (array, second)):
        with traced(stub) as calls, pytest.raises(BufferError, match=r"'y' \(position 1\).*kDLCUDA:1.*kDLCUDA:0"):
            kernels[2][1, 32](first, value)
        assert not {"cuEventRecord", "cuLaunchKernel", "cuEventCreate"} & set(calls)
        with pytest.raises(BufferError, match=r"kDLCUDA:0.*kDLCUDA:1"):
            kernels[2][1, 32](value, first)
    with pytest.raises(BufferError, match=r"kDLCUDA:1.*kDLCUDA:0"):
        kernels[2][1, 32].bind(first, second)
    assert not stub.launches
    exports.ledger.check(exports.ledger.made)


@pytest.mark.parametrize("number", [-1, 3, 63, 64, 2**31 - 1])
@pytest.mark.parametrize("kind", [CUDA, MANAGED])
def test_devices_that_there_are_not(stub, kernels, kind, number):
    for value in (on_device(number, device_type=kind), (1, on_device(number, device_type=kind)), Exports(Ledger(), number, kind)):
        for _ in range(2):
            with pytest.raises(BufferError, match=rf"one\(\).*({number}|there is not)"):
                kernels[1][1, 32](value)
    both_ways(lambda: kernels[1][1, 32](on_device(0)))
    with pytest.raises(BufferError):
        kernels[1][1, 32](on_device(number, device_type=kind))
    assert {each.device for each in stub.launches} == {0}


class _Liar(Exports):
    """Says that it is on a device, and exports memory of the host."""

    def __dlpack_device__(self):
        return CUDA, 0


CPU = {
    "a table": lambda ledger: on_device(0, device_type=1),
    "a made table": lambda ledger: Tabled(np.zeros(4, np.float32), ledger),
    "__dlpack__": lambda ledger: Dunder(np.zeros(4, np.float32), ledger),
    "a device, then another": lambda ledger: _Liar(ledger, device_type=1),
    "OpenCL": lambda ledger: on_device(0, device_type=4),
    "pinned by ROCm": lambda ledger: on_device(0, device_type=11),
    "torch": lambda ledger: torch.zeros(4),
    "a torch parameter": lambda ledger: torch.nn.Parameter(torch.zeros(4)),
}


@pytest.mark.parametrize("name", [name for name in CPU if torch is not None or "torch" not in name])
def test_tensors_of_the_host_are_refused_and_never_copied(stub, kernels, package, name):
    ledger = Ledger()
    there = package.to_device(np.zeros(4, np.float32))
    both_ways(lambda: kernels[2][1, 32](there, on_device(0)), 3)
    value = CPU[name](ledger)
    stub.clear()
    host = np.zeros(4, np.float32)
    with traced(stub) as calls:
        ours = [(value, 1), (1, value), ((value, 2), 1), (((value,),), on_device(0)), (on_device(0), value), (there, value)]
        theirs = [(host, value), (value, host), ((host, value), host)]  # who lies about where it is, lies to them
        for arguments in ours + theirs * (type(value) is not _Liar):
            for _ in range(2):
                with pytest.raises(BufferError, match=r"two\(\): argument '[xy]'"):
                    kernels[2][1, 32](*arguments)
        with pytest.raises(BufferError):
            kernels[1][1, 32].bind(value)
    assert not [name for name in calls if name.startswith(("cuMem", "cuLaunch"))]
    assert not stub.launches and ledger.made == ledger.deleted and not ledger.out


# ---- devices of different kinds --------------------------------------------------------------------------------------


@pytest.mark.both_packages
def test_devices_of_different_architectures(package):
    said = run_package("""
        stub.set_devices(3)
        stub.set_capability(1, 8, 0)
        kernel = fast_args(cuda.jit(lambda x: None))
        for device in (0, 1, 2, 1, 0):
            for _ in range(30):
                kernel[1, 32](DeviceTensor((4,), device=device))
        print([each.device for each in stub.launches][::30], len({each.function for each in stub.launches}))
    """, package)
    assert said == "[0, 1, 2, 1, 0] 3\n"


@pytest.mark.both_packages
def test_a_kernel_for_another_architecture(package):
    """Loading is the package's, and so is its error, with the driver's name in it; the next launch finds nothing half done."""
    said = run_package("""
        kernel = fast_args(cuda.jit(lambda x: None))
        for name in ("cuLibraryLoadData", "cuModuleLoadData", "cuModuleLoadDataEx"):
            stub.fail(name, 209)
        try:
            kernel[1, 32](DeviceTensor((4,)))
        except Exception as error:
            print("NO_BINARY_FOR_GPU" in str(error) or "209" in str(error))
        stub.reset()
        kernel[1, 32](DeviceTensor((4,)))
        print(len(stub.launches))
    """, package)
    assert said == "True\n1\n"


@pytest.mark.both_packages
def test_the_first_use_of_a_device_leaves_the_current_context(package):
    """The packages do not: they make the new one's current instead of one that is not primary."""
    said = run_package("""
        stub.set_devices(3)
        cuda.current_context()
        from cuda.bindings import driver as bindings
        try:
            error, context = bindings.cuCtxCreate(bindings.CUctxCreateParams(), 0, 0)
        except TypeError:
            error, context = bindings.cuCtxCreate(0, 0)
        for device in (2, 1, 0):
            fast_args(cuda.jit(lambda x: None))[1, 32](DeviceTensor((4,), device=device))
            print(stub.current_context() == int(context), stub.launches[-1].device)
    """, package)
    assert said == "True 2\nTrue 1\nTrue 0\n"
