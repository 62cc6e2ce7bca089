"""Errors of the driver, processes without one, and ownership on every exit of a launch: nothing is left behind."""

import functools
import gc
import pickle
import sys
import weakref

import pytest
from cuda_checks import all_given_back, both_ways, is_refused, new_stream, traced
from cuda_producers import ArrayInterface, Exports, ExportsLegacy
from cuda_stub import SONAME, Stub, real_driver
from cuda_tensors import DeviceTensor, OtherTensor
from interpreter import run_python
from launches import ExportedTensor, Interface, address, device_array, kernel_of, launch_cached
from made_producers import Ledger
from oracle import type_and_message
from stub_processes import PACKAGES, is_installed, run_package, why_no_torch

from fastexchange import CudaError, fast_args
from fastexchange.cuda.driver import driver

STICKY = {700: "ILLEGAL_ADDRESS", 719: "LAUNCH_FAILED", 721: "TENSOR_MEMORY_LEAK", 226: "CONTAINED", 710: "ASSERT"}
OTHERS = {1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 201: "INVALID_CONTEXT", 209: "NO_BINARY_FOR_GPU", 400: "INVALID_HANDLE",
          701: "LAUNCH_OUT_OF_RESOURCES", 709: "CONTEXT_IS_DESTROYED", 999: "UNKNOWN"}  # fmt: skip


# ---- what the driver refuses -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("function, code", [
    *[("cuLaunchKernel", code) for code in [*OTHERS, *STICKY]], ("cuCtxGetCurrent", 201), ("cuCtxPushCurrent", 201),
])  # fmt: skip
def test_a_launch_that_the_driver_refuses(stub, kernels, function, code):
    device = 0 if function == "cuLaunchKernel" else 1  # which is not the current one
    x, exports = DeviceTensor((4,), device=device), Exports(Ledger(), device=device)
    launcher = kernels[1][(2, 3), (8, 4), None, 64]
    ways = [lambda: launcher(x), lambda: launcher(x=x), lambda: launcher(exports), launcher.bind(x)]
    for launch in ways:
        both_ways(launch)
    stub.clear()
    before = stub.current_context()
    for launch in ways:
        stub.fail(function, code)
        with pytest.raises(CudaError) as caught:
            launch()
        error, said = caught.value, str(caught.value)
        assert (error.code, error.name) == (code, f"CUDA_ERROR_{(STICKY | OTHERS)[code]}")
        assert error.is_sticky == (code in STICKY) == ("sticky" in said)
        assert said.startswith("kernel() was not launched (grid (2, 3, 1), block (8, 4, 1), stream ")
        assert error.name in said and "64 bytes of dynamic shared memory" in said
        assert stub.current_context() == before and error.__cause__ is error.__context__ is None
        del caught, error
        launch()
    assert len(stub.launches) == len(ways)
    exports.ledger.check(6)
    stub.fail(function, code, sticky=True)
    for _ in range(3):
        said = is_refused(lambda: launcher(x), CudaError, (STICKY | OTHERS)[code])
        assert ("restart the process" in said) is (code in STICKY)


LEARNING = ["cuLibraryLoadData", "cuModuleLoadData", "cuLibraryGetKernel", "cuModuleGetFunction", "cuKernelGetFunction",
            "cuFuncGetParamInfo", "cuFuncGetAttribute", "cuOccupancyMaxPotentialBlockSize", "cuFuncSetAttribute"]  # fmt: skip


@pytest.mark.both_packages
@pytest.mark.parametrize("function", LEARNING)
def test_a_first_launch_that_fails_leaves_nothing_behind(stub, package, function):
    others = {"numba.cuda": ("cuModule",), "numba_cuda_mlir.cuda": ("cuLibrary", "cuKernel")}[package.__name__]
    for device in (0, 1):
        x, before = DeviceTensor((4,), device=device), stub.current_context()
        launch = functools.partial(fast_args(package.jit(lambda x: None)).forall(1000, 0, None, 60_000), x)
        stub.fail(function, 2)
        if function.startswith(others):  # which this package does not call
            launch()
        else:
            kind, said = type_and_message(launch)
            assert "OUT_OF_MEMORY" in said or "out of memory" in said.lower() or "[2]" in said, said
            assert kind is not CudaError or ("() was not launched (for 1000 tasks" in said and function in said)
        assert stub.current_context() == before
        stub.reset()
        stub.clear()
        both_ways(launch)
        assert len(stub.launches) == 4 and {(each.device, each.shared) for each in stub.launches} == {(device, 60_000)}


@pytest.mark.parametrize("function", ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"])
@pytest.mark.parametrize("after", [0, 1])
def test_events_that_fail(stub, kernels, function, after):
    DeviceTensor.streams[0], OtherTensor.streams[0] = new_stream(), new_stream()
    x, y = DeviceTensor((4,)), OtherTensor((4,))
    kernels[2][1, 32](x, y)
    before = stub.current_context()
    stub.fail(function, 2, after=after)
    said = "was not launched" if after == 0 else "was launched .*, but"
    with traced(stub) as calls, pytest.raises(CudaError, match=rf"kernel\(\) {said}.*{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        kernels[2][1, 32](x, y)
    assert calls.count("cuEventCreate") - (function == "cuEventCreate") == calls.count("cuEventDestroy")
    assert len(stub.launches) == after, "what could not be ordered before was not launched"
    assert stub.current_context() == before
    with traced(stub) as calls:
        kernels[2][1, 32](x, y)
    assert len(stub.launches) == 1 and calls.count("cuEventCreate") == calls.count("cuEventDestroy") == 2
    OtherTensor.streams[0] = DeviceTensor.streams[0]
    with traced(stub) as calls:
        kernels[2][1, 32](x, y)
    assert not [name for name in calls if "Event" in name]


BEYOND = [
    (0, 32), (1, 0), ((1, 0), 32), ((1, 1, 0), 32), (1, (32, 0)), (1, 2000), (1, (1, 1, 65)), (1, (1024, 2)), (2**31, 32),
    ((1, 65536), 32), ((1, 1, 65536), 32), (1, 32, None, 232449), (1, 32, None, 2**32 - 1),
]  # fmt: skip
TASKS = [2**31, 2**31 + 5, 2**32, 2**32 + 5, 2**40, 2**41, 2**41 + 1, 2**63, 2**64 + 1]


def test_configurations_beyond_the_limits(record, kernels):
    x, forall = DeviceTensor((4,)), kernels[1].forall
    both_ways(lambda: kernels[1][1, 32](x))
    both_ways(lambda: forall(10, 1)(x))
    record.clear()
    for configuration in BEYOND * 2:
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE") as caught:
            kernels[1][configuration](x)
        assert caught.value.code == 1 and not caught.value.is_sticky
    for tasks in TASKS:
        with pytest.raises((CudaError, ValueError), match=r"CUDA_ERROR_INVALID_VALUE|no grid"):
            forall(tasks, 1)(x)
    assert not record.launches
    most = 2**31 - 1 if isinstance(record, Stub) else 2**20  # a GPU would take seconds
    forall(most, 1)(x)
    assert record.launches[-1].grid == (most, 1, 1)


@pytest.mark.slow
@pytest.mark.both_packages
def test_a_process_with_a_broken_context_ends(package):
    """Nothing of ours that is torn down at its end calls the driver, which refuses every call by then."""
    code = """
        def copy(x, y):
            y[0] = x[0]

        kernel, x, y = fast_args(cuda.jit(copy)), DeviceTensor((4,)), cuda.device_array(4, np.float32)
        bound = kernel[1, 32, cuda.stream()].bind(x, x)
        launches = [lambda: kernel[1, 32](x, y), lambda: kernel[1, 32](x, y=x), lambda: kernel.forall(4)(y, x), bound]
        for launch in launches * 4:
            launch()
        stub.fail("cuLaunchKernel", 700, sticky=True)
        for launch in launches * 2:
            try:
                launch()
            except CudaError as error:
                print(error.is_sticky, end=" ")
    """
    assert run_package(code, package, exits=True) == "True " * 8


def test_a_cuda_error_is_one_after_pickling():
    error = pickle.loads(pickle.dumps(driver().error(700, "f()")))
    assert (error.code, error.name, error.is_sticky) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS", True)
    assert driver().error(12345, "f()").code == 12345


# ---- in processes of their own ---------------------------------------------------------------------------------------
_OTHER_PARAMETERS = """
from cuda.bindings import driver as bindings

names = "cuFuncGetParamInfo", "cuFuncGetParamCount"
originals = [getattr(bindings, name) for name in names]
success, invalid, not_there = (getattr(bindings.CUresult, f"CUDA_{name}")
                               for name in ("SUCCESS", "ERROR_INVALID_VALUE", "ERROR_NOT_FOUND"))
sizes = [8] * {"numba.cuda": 8, "numba_cuda_mlir.cuda": 6}[cuda.__name__]
x = cuda.to_device(np.zeros(4, np.float32))

def says(*sizes):
    return lambda function, i: (success, 8 * i, sizes[i]) if i < len(sizes) else (invalid,)

def absent(function, *args):
    raise RuntimeError("it is not found")

def check(*functions):
    for name, function in zip(names, functions):
        vars(bindings).pop(name, None)
        if function is not None:
            setattr(bindings, name, function)
    stub.clear()
    kernel = fast_args(cuda.jit(lambda x, a: None))
    for _ in range(4):
        kernel[2, 32](x, 1.5)
    said = str(kernel.explain(x, 1.5))
    print(len(stub.launches), kernel.counts().fast, "own launch: the driver reports other parameters" in said)

nowhere = absent, lambda *_: (not_there,), None
for other in (*nowhere, says(*sizes[:-1]), says(*sizes[:-1], 4), says(*sizes, 8)):
    for no_count in nowhere:
        check(other, no_count)
for number in (-1, 1, 0):
    check(says(*sizes), lambda function: (success, len(sizes) + number))
check(*originals)
"""
# ``stub.failed``, what fails, is what compute-sanitizer reports. The packages themselves ask for nothing that fails.
_QUESTIONS = """
cuda.to_device(np.zeros(4, np.float32))
def three(x, y, a):
    cuda.syncthreads()

stub.clear()
kernels, x = [fast_args(cuda.jit(function)) for function in (lambda x: None, lambda x, a: None, three)], DeviceTensor((4,))
for _ in range(4):
    kernels[0][2, 32](x)
    kernels[1][2, 32](x, 1.5)
    kernels[2][2, 32](x, x, 1j)
print([kernel.counts().fast for kernel in kernels], stub.failed)
"""
_ODD_INTERPRETER = """
from cuda_checks import is_refused
from fastexchange.ground import cpython
checks = dict(cpython.verify())
cpython.verify = lambda: checks | dict(object=False)
dispatcher = cuda.jit(lambda x: None)
said = "native code makes no launches here, so use the dispatcher: the layout of object is not as expected"
for make in (lambda: fast_args(dispatcher), lambda: fast_args(cuda=dispatcher, launch=(1, 32))(lambda x: None)):
    assert is_refused(make, TypeError) == f"fast_args(): {said}"
assert fast_args(lambda x: x + 1)(2) == 3
dispatcher[1, 32](3)
assert len(stub.launches) == 1
"""
# CUDA cannot be used in a child of a process that has used it, and each launch there says so.
_FORK = """
import os
from oracle import type_and_message
kernel, x = fast_args(cuda.jit(lambda x: None)), DeviceTensor((4,))
for _ in range(4):
    kernel[1, 32](x)
bound = kernel[1, 32].bind(x)
child = os.fork()
if child == 0:
    launches = lambda: kernel[1, 32](x), lambda: kernel[1, 2](x=x), bound, lambda: kernel[1, 32](2)
    texts = [type_and_message(launch)[1] for launch in launches]
    said = ["CUDA_ERROR_NOT_INITIALIZED" in text and "before this process was forked" in text for text in texts]
    os.write(1, f"{said} {fast_args(lambda x: x + 1)(1)}\\n".encode())
    os._exit(0)
os.waitpid(child, 0)
kernel[1, 32](x)
os.write(1, f"{len(stub.launches)}\\n".encode())
"""


@pytest.mark.both_packages
@pytest.mark.parametrize("code, said", [
    (_OTHER_PARAMETERS, "4 0 True\n" * (18 + 2) + "4 3 False\n" * 2),
    (f"stub.set_version(13020)\n{_QUESTIONS}", "[3, 3, 3] []\n"),  # counts parameters, so it is asked for no other
    (f"stub.set_version(13000)\n{_QUESTIONS}", "[3, 3, 3] ['cuFuncGetParamInfo']\n"),
], ids=["other parameters", "a driver that counts them", "an older one"])  # fmt: skip
@pytest.mark.slow
def test_what_the_driver_reports_of_parameters(package, code, said):
    assert run_package(code, package) == said


@pytest.mark.slow
@pytest.mark.parametrize("code, said", [(_ODD_INTERPRETER, ""), (_FORK, "[True, True, True, True] 2\n5\n")],
                         ids=["an interpreter that is not as expected", "after a fork"])  # fmt: skip
def test_what_has_no_kernels_for_cuda(package, code, said):
    assert run_package(code, package) == said


def test_nothing_of_cuda_is_imported_for_the_cpu():
    run_python("""
        import sys
        import numpy as np
        import fastexchange
        kernel = fastexchange.fast_args(lambda x: x.sum())
        assert kernel(np.ones(3)) == 3.0 and kernel.bind(np.ones(3))() == 3.0
        str(kernel.explain(np.ones(3)))
        assert not [name for name in sys.modules if name.split(".")[0] in ("cuda", "numba_cuda", "numba_cuda_mlir")
                    or name.startswith(("numba.cuda", "fastexchange.cuda"))]
    """)


_NO_DRIVER = """
import importlib
import sys
import numpy as np
from fastexchange import CudaError, fast_args

for name in NAMES:
    cuda, kernel = importlib.import_module(name), None
    for _ in range(2):
        try:
            kernel = kernel or fast_args(cuda.jit(lambda x: None))
            kernel[1, 32](np.float32(2))
        except Exception as error:
            print(name, type(error).__name__, error)
assert fast_args(lambda x: x + 1)(1) == 2
"""


@pytest.mark.slow
@pytest.mark.skipif(real_driver(), reason=f"there is a {SONAME}")
def test_without_a_driver():
    names = list(filter(is_installed, PACKAGES))
    said = set(run_python(f"NAMES = {names}\n{_NO_DRIVER}").stdout.splitlines())
    assert sorted(line.split()[0] for line in said) == sorted(names), said
    assert all("CUDA" in line and ("driver" in line or "libcuda" in line) for line in said), said


@pytest.mark.slow
@pytest.mark.both_packages
def test_without_a_device(package):
    said = run_package(f"NAMES = [{package.__name__!r}]\nstub.set_devices(0)\n{_NO_DRIVER}", package).splitlines()
    assert said and "CUDA_ERROR_NO_DEVICE" in said[0], said


# ---- ownership: each export is given back once, each reference is back, no frame is lost ----
def company(record, package, size: int) -> list:
    """Arguments of every kind."""

    def made(i, cls=DeviceTensor, shape=(3,)):
        return cls(shape, data=address(package) + 64 * i)

    return [
        made(0), made(1, ExportedTensor), 10.5, (made(3, shape=(2, 2)), 1003), Exports(Ledger()), Interface(made(5)),
        device_array(package, made(6)), ExportsLegacy(Ledger()),
    ][:size]  # fmt: skip


def lenders(record, package, size: int) -> list:
    return [(DeviceTensor((3,), data=address(package) + 64 * i), 300 + i)[i % 4 == 3] for i in range(size)]


def crowd(record, package, size: int) -> list:
    """More interfaces than a call's frame has room for at first, before the others."""
    return [tuple(ArrayInterface(record, stream=1) for _ in range(100)), *lenders(record, package, size)[1:]]


def parts(arguments) -> list:
    """The arguments, and what those of a crowd consist of."""
    items = [item for value in arguments if type(value) is tuple for item in value if type(item) is ArrayInterface]
    return [*arguments, *items, *[item.said for item in items]]


def named(arguments) -> dict:
    return {f"a{i}": value for i, value in enumerate(arguments)}


each_kind = pytest.mark.parametrize("kind", [company, lenders, crowd])


@pytest.mark.parametrize("size", [1, 8])
@each_kind
def test_launches(record, package, kind, size):
    arguments, kernel = kind(record, package, size), kernel_of(package, size)
    launcher, given = kernel[1, 32], kernel[1, 32, 0]
    with all_given_back(*parts(arguments)):
        launcher(*arguments)
    if kind is lenders:
        launch_cached(launcher, *arguments)
    for times in (4, 100):  # the first for all that is compiled for them, and cache entries
        gc.collect()  # what compilation has left holds some
        nones = sys.getrefcount(None)
        with all_given_back(*[kernel, launcher] * (times == 100), *parts(arguments)):
            for _ in range(times):
                launcher(*arguments)
                launcher(**named(arguments))
                launcher.explain(*arguments)
    assert abs(sys.getrefcount(None) - nones) < 100, "of 200 that were returned; others use it, too"
    with all_given_back(*parts(arguments), given, kernel):
        launch = given.bind(*arguments)
        for _ in range(10):
            launch()
        launch.rebind(a0=arguments[0])
        del launch


REFUSALS = (BufferError, TypeError, ValueError, OverflowError, NotImplementedError)
CULPRITS = {  # test_cuda_refusals.py has more of them, each alone and beside one other
    "CPU": lambda at: DeviceTensor((3,), data=at, device_type=1),
    "exported from the CPU": lambda at: ExportedTensor((3,), data=at, device_type=1),
    "another device": lambda at: DeviceTensor((3,), data=at, device=2),
    "no type": lambda at: object(),
    "beyond 64 bits": lambda at: 2**70,
    "in a tuple": lambda at: (1, (DeviceTensor((3,), data=at, device_type=1), 2)),
    "nothing of CUDA's": lambda at: Interface(DeviceTensor((3,), data=12345)),
}


@pytest.mark.parametrize("warm", [False, True])
@each_kind
def test_refusals(record, package, kind, warm):
    arguments, launcher = kind(record, package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    for _ in range(4 * warm):
        launcher(*arguments)
    record.clear()
    for name, position in [(name, position) for name in CULPRITS for position in (kind is crowd, 4, 7)]:
        culprit = CULPRITS[name](address(package))
        bad = [*arguments]
        bad[position] = culprit
        with all_given_back(launcher, culprit, *parts(arguments), *bad):
            for attempt in (launcher, given) * 2:
                with pytest.raises(REFUSALS) as caught:
                    attempt(*bad)
            assert type(caught.value).__name__ in str(launcher.explain(*bad)) or name in ("another device", "no type")
            del caught
    assert record.launches == []
    launcher(*arguments)
    assert len(record.launches) == 1


@each_kind
def test_errors_of_the_driver(stub, package, kind):
    """Of a first launch, and of those by the cache entry, by keyword, and bound."""
    arguments, launcher = kind(stub, package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    ways = lambda: launcher(*arguments), lambda: launcher(**named(arguments)), lambda: given.bind(*arguments)()
    for calls, failing in ((ways[:1], "cuLaunchKernel"), (ways, "cuLaunchKernel"), (ways, "cuCtxGetCurrent")):
        with all_given_back(*parts(arguments), given, launcher):
            for call in calls:
                stub.fail(failing, 700)
                is_refused(call, CudaError, "ILLEGAL_ADDRESS")
        for call in ways * 2:
            call()


def test_what_is_freed(package):
    """Kernels, launchers, tensors and device arrays, after launches of every way; nothing knows them any more."""
    Mine = type("Mine", (DeviceTensor,), {"__slots__": ()})
    kernel, stream = kernel_of(package, 2), type("Stream", (), {"__cuda_stream__": lambda self: (0, 2)})()
    launcher, given, x = kernel[1, 32], kernel[1, 32, stream], Mine((3,), data=address(package))
    array = device_array(package, x)
    launch_cached(launcher, x, 1)
    launcher(array, 1)
    launcher((x, array), 1)
    launch, forall = launcher.bind(x, array), kernel.forall(10)
    forall(x, 1)
    alive, *references = [weakref.ref(each) for each in (stream, kernel, launcher, x, array, launch, forall)]
    del stream
    gc.collect()
    assert alive() is not None, "it lives as long as its launcher"
    del kernel, launcher, x, array, launch, forall, given, Mine
    gc.collect()
    assert [reference() for reference in (alive, *references)] == [None] * 7


_DISABLED = """
import sys, warnings
import numpy as np
import cuda_stub
stub = cuda_stub.load(sys.argv[1], force=True)
{more}
import {package} as cuda
from cuda_checks import is_refused
from fastexchange import fast_args

warnings.simplefilter("ignore")
cuda.current_context()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*filter(is_installed, PACKAGES)])
def test_native_code_that_is_switched_off(name, tmp_path):
    """The kernel's package makes all launches, with the checks of this one."""
    run_python(_DISABLED.format(more="", package=name) + """
from fastexchange.ground.cfunction import code_cache

@fast_args
@cuda.jit
def axpy(a, x, y):
    y[0] = a * x[0]

@fast_args(cuda=axpy, launch=lambda a, x, y: 100)
def anywhere(a, x, y):
    y[0] = a * x[0]

x, y, host = cuda.device_array(4), cuda.device_array(4), np.ones(4)
stub.clear()
axpy[1, 32](2.0, x, y=y)
axpy.forall(4)(2.0, x, y)
axpy[1, 32].bind(2.0, x, y)()
anywhere(2.0, x, y)
assert len(stub.launches) == 4 and anywhere(2.0, host, host) is None and host.tolist() == [2, 1, 1, 1]
assert axpy.counts()[:2] == (0, 4) and "FASTEXCHANGE_DISABLE is set" in str(axpy[1, 32].explain(2.0, x, y))
for wrong in (lambda: axpy[1, 32](2.0, x), lambda: axpy[1, 32](2.0, x, object())):
    is_refused(wrong, TypeError, "axpy()")
assert len(stub.launches) == 4 and code_cache.shipped + code_cache.hits + code_cache.misses == 0
""", str(tmp_path), FASTEXCHANGE_DISABLE="1")


@pytest.mark.slow  # PyTorch's part of the stub is compiled
def test_pytorchs_tensors_where_native_code_is_switched_off(package, stub, tmp_path):
    """The package launches them, and objects with an array interface; what is no plain tensor on one device is refused."""
    if why_not := why_no_torch():
        pytest.skip(f"PyTorch has no tensors on the stub's devices: {why_not}")
    more = "stub.set_devices(2)\ncuda_stub.load_torch(sys.argv[1]).set_devices(2)\nimport torch"
    run_python(_DISABLED.format(more=more, package=package.__name__) + """
class Interface:
    def __init__(self, tensor):
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__ | dict(version=3, stream=None)

@fast_args
@cuda.jit
def copy(x, y):
    y[0] = x[0]

x, y = (torch.empty(4, device="cuda") for _ in range(2))
array, launcher = Interface(y), copy[1, 32]
launches = [lambda: launcher(x, y), lambda: launcher(x, y=y), launcher.bind(x, y), lambda: copy.forall(4)(x, y)]
for launch in [*launches, lambda: launcher(array, y), lambda: launcher(x, array)] * 2:
    stub.clear()
    launch()
    assert len(stub.launches) == 1
stub.clear()
tracked, elsewhere = torch.empty(4, device="cuda", requires_grad=True), torch.empty(4, device="cuda:1")
for value, why in ((tracked, "requires grad"), (elsewhere, "kDLCUDA:1"), (torch.empty(4), "kDLCPU")):
    is_refused(lambda: launcher(value, y), BufferError, why)
    is_refused(lambda: launcher(y, value), BufferError, why)
assert not stub.launches
""", str(tmp_path), FASTEXCHANGE_DISABLE="1")
