"""Streams that are given, producers that cannot tell theirs, and which calls a launch makes. Where it goes: test_cuda_places."""

import ctypes
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_producers import FAILURES, FailingTensor, both_ways, new_stream, traced
from cuda_tensors import DeviceTensor, OtherTensor
from stub_processes import PACKAGES, is_installed, run_package

from fastexchange.cuda.driver import driver


class _Says:
    def __init__(self, said):
        self.said = said

    def __cuda_stream__(self):
        return self.said


class _Property(_Says):
    __cuda_stream__ = property(lambda self: self.said)


def _torch(handle):
    return SimpleNamespace(cuda_stream=handle)


def _of(package: str):
    """Of the package, whose numba.cuda is another than that in Numba itself."""
    (module,) = (name for name, installed in PACKAGES.items() if installed == package)
    if not is_installed(module):
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(module).external_stream


KINDS = {
    "__cuda_stream__": lambda handle: _Says((0, handle)),
    "__cuda_stream__, a property": lambda handle: _Property((0, handle)), "torch": _torch,
    "cupy": lambda handle: SimpleNamespace(ptr=handle), "int": int, "numpy int": np.int64,
    "CUstream": lambda handle: driver().bindings.CUstream(handle), "c_void_p": ctypes.c_void_p,
    "handle, a c_void_p": lambda handle: SimpleNamespace(handle=ctypes.c_void_p(handle)),
    "cuda.core": lambda handle: pytest.importorskip("cuda.core").Stream.from_handle(handle),
    **{package: lambda handle, package=package: _of(package)(handle) for package in PACKAGES.values()},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_given_wins(stub, kernels, kind):
    handle = new_stream()
    DeviceTensor.streams[0] = OtherTensor.streams[0] = new_stream()
    stream = KINDS[kind](handle)
    kernels[1][1, 32, stream](DeviceTensor((4,)))
    both_ways(lambda: kernels[2][1, 32, stream](DeviceTensor((4,)), OtherTensor((4,))))
    kernels[1].forall(5, 0, stream)(DeviceTensor((4,)))
    kernels[1][1, 32, stream](7)
    kernels[1][1, 32, stream].bind(DeviceTensor((4,)))()
    assert {(each.api, each.stream) for each in stub.log} == {("cuLaunchKernel", handle)}


@pytest.mark.both_packages
@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_can_be_given(record, kernels, package, handle):
    DeviceTensor.streams[0] = new_stream()
    made = [package.default_stream, package.legacy_default_stream, package.per_thread_default_stream][handle]()
    for stream in (handle, made, _torch(handle), _Says((0, handle)), ctypes.c_void_p(handle)):
        kernels[1][1, 32, stream](DeviceTensor((4,)))
        assert record.launches[-1].stream == handle


_PER_THREAD = """
class Framework:
    cuda_stream = 0

def empty(x):
    pass

def two(x, y):
    pass

x, mine, other = cuda.device_array(3), DeviceTensor((4,)), OtherTensor((4,))
own, kernel = cuda.jit(empty), fast_args(cuda.jit(empty))

def streams(launch):
    stub.clear()
    for _ in range(4):
        launch()
    return sorted({each.stream for each in stub.launches})

print(streams(lambda: kernel[1, 32](x)), streams(lambda: kernel[1, 32](7)), streams(lambda: kernel[1, 32, 0](mine)))
framework = Framework()
print(*[streams(lambda: kernel[1, 32, stream](mine)) for stream in (None, framework, 1)])
made = cuda.default_stream(), cuda.legacy_default_stream(), cuda.per_thread_default_stream()
print(*[streams(lambda: kernel[1, 32, stream](mine)) for stream in made])
debug = fast_args(cuda.jit(debug=True, opt=False)(empty))
print(streams(lambda: debug[1, 32](x)), streams(lambda: debug[1, 32, Framework()](x)))
if cuda.__name__ == "numba.cuda":  # the other's own launcher does not ask
    print(streams(lambda: own[1, 32](x)))
stub.clear()
OtherTensor.streams[0] = 2
fast_args(cuda.jit(two))[1, 32](mine, other)
for each in stub.log:
    if each.api in ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"):
        print(each.api, each.stream)
"""


@pytest.mark.both_packages
def test_where_each_thread_has_a_default_stream_of_its_own(package):
    """Then it is that of launches without a producer's, and of the number 0; a framework's 0 still is the legacy one."""
    said = run_package(_PER_THREAD, package, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")
    lines = said.splitlines()
    assert lines[:4] == ["[2] [2] [2]", "[0] [0] [1]", "[2] [1] [2]", "[2] [1]"]
    assert package.__name__ != "numba.cuda" or lines.pop(4) == "[2]"
    assert lines[4:] == ["cuEventRecord 2", "cuStreamWaitEvent 1", "cuLaunchKernel 0", "cuEventRecord 1", "cuStreamWaitEvent 2"]


BAD = {
    "(stream|handle)": [True, np.True_, 1.0, np.float32(3), 1j, "1", b"1", object(), [1], -1, 2**63, 2**64, _Says((0, -1)),
                        _torch("x"), _torch(1.0)],
    "version 1, only version 0": [_Says((1, 0))], r"is .*, not \(0, handle\)": [_Says(3), _Says((0, 1, 2))],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_stream_is_refused(kernels, message):
    for stream in BAD[message]:
        with pytest.raises((TypeError, ValueError), match=rf"one\[\.\.\.\]: .*{message}"):
            kernels[1][2, 32, stream]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_producer_that_cannot_tell_its_stream(record, kernels, failure):
    x, kind = FailingTensor((4,)), BufferError if failure == FAILURES["mute"] else MemoryError
    both_ways(lambda: kernels[1][1, 32](x))
    bound = kernels[1][1, 32].bind(x)
    record.clear()
    FailingTensor.streams[0] = failure
    for launch in (lambda: kernels[1][1, 32](x), bound, lambda: kernels[2][1, 32](1, x), lambda: kernels[1].forall(3)(x)):
        with pytest.raises(kind) as caught:
            launch()
        said = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        if launch is not bound:  # a MemoryError is more than a message: it has a note, which Python 3.10 knows nothing of
            is_said = kind is BufferError or sys.version_info >= (3, 11)
            assert ("the stream on which the tensors' producer works" in said) == is_said
    kernels[1][1, 32, 2](x)
    assert [each.stream for each in record.launches] == [2]
    FailingTensor.streams[0] = 0
    kernels[1][1, 32](x)
    bound()
    assert len(record.launches) == 3


# ---- capture, and the calls of a launch ------------------------------------------------------------------------------
def test_a_launch_on_a_capturing_stream_is_captured(stub, kernels):
    bindings, stream, x = driver().bindings, new_stream(), DeviceTensor((4,))
    DeviceTensor.streams[0] = stream
    both_ways(lambda: kernels[1][1, 32](x))
    bound = kernels[1][1, 32].bind(x)
    with driver().on(0):
        driver().call("cuStreamBeginCapture", bindings.CUstream(stream), bindings.CUstreamCaptureMode(0))
        with traced(stub) as calls:
            kernels[1][1, 32](x)
            kernels[1].forall(100)(x)
            bound()
        launches = stub.launches
        driver().call("cuStreamEndCapture", bindings.CUstream(stream))
    assert len(launches) == 3 and all(each.graph for each in launches) and len({each.graph for each in launches}) == 1
    assert set(calls) <= {"cuCtxGetCurrent", "cuLaunchKernel", "cuOccupancyMaxPotentialBlockSize", "cuFuncGetAttribute",
                          "cuCtxPushCurrent", "cuCtxPopCurrent"}  # fmt: skip
    kernels[1][1, 32](x)
    assert not stub.launches[-1].graph


STEADY = {
    "general": lambda kernel, x: kernel[1, 32](x=x), "fast": lambda kernel, x: kernel[1, 32](x),
    "given": lambda kernel, x: kernel[1, 32, 2](x), "forall": lambda kernel, x: kernel.forall(1000)(x),
    "large shared": lambda kernel, x: kernel[1, 32, None, 100_000](x),
    "a number": lambda kernel, x: kernel[1, 32](2.0), "bound": None,
}  # fmt: skip


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("device", [0, 1])
def test_a_launch_makes_no_call_but_those_that_it_needs(stub, kernels, name, device):
    x = DeviceTensor((4,), device=device)
    launch = kernels[1][1, 32].bind(x) if name == "bound" else lambda: STEADY[name](kernels[1], x)
    both_ways(launch)
    both_ways(kernels[0][1, 32])
    with driver().on(0), traced(stub) as calls:
        launch()
        kernels[0][1, 32]()
    needed = ["cuCtxGetCurrent", "cuLaunchKernel"]
    pushed = ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]
    assert calls == (needed if device == 0 or name == "a number" else pushed) + needed
