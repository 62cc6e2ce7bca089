"""Launches that run: what kernels compute, in which order, and many of them.

What is marked ``gpu`` has results to look at: against PyTorch, whose streams and graphs these are. What needs none is
launched on the driver stub, too, so that it is known to work before it comes to a device.
"""

import functools
import gc
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from children import at_once
from cuda_tensors import DeviceTensor, OtherTensor
from interpreter import FOR_TESTS, run_python
from launches import elementwise
from other_ways import Protocol
from soak import measured

from fastexchange import fast_args

pytestmark = pytest.mark.both_packages
gpu = pytest.mark.gpu
SIZE = 128
CYCLES = 2_000_000
"""For which a stream sleeps: about a millisecond, long enough for whatever does not wait for it to come too early."""


class Tensors:
    """Makes tensors of float32: PyTorch's on a device, those with a table of our own on the stub, which have no values."""

    def __init__(self, stub, torch):
        self._stub, self._torch = stub, torch

    def __call__(self, fill=0):
        if self._stub is not None:
            return DeviceTensor((SIZE,), data=self._stub.allocate(4 * SIZE))
        return self._torch.full((SIZE,), float(fill), device="cuda")

    def wait(self) -> None:
        """Wait for the device."""
        if self._stub is None:
            self._torch.cuda.synchronize()

    def check(self, tensor, *expected) -> None:
        """The first elements of a tensor are as expected, and all others as the last of these, if a device computes them."""
        self.wait()
        assert self._stub is not None or tensor.tolist() == [*expected, *expected[-1:] * (SIZE - len(expected))]


@pytest.fixture
def tensors(stub_or_none, request):
    return Tensors(stub_or_none, request.getfixturevalue("torch") if stub_or_none is None else None)


@pytest.fixture
def copy(package):
    """A new kernel."""
    return fast_args(elementwise(package, "copy(x, out)", "out[i] = x[i]"))


# ---- results ---------------------------------------------------------------------------------------------------------
@gpu
@pytest.mark.filterwarnings("ignore:Could not find source")
def test_the_packages_own_launches(package, copy, torch):
    """Arrays of the host are copied there and back, hints are kept, a kernel with ``debug=True`` runs."""
    out, there = np.zeros(SIZE, np.float32), torch.zeros(SIZE, device="cuda")
    for x in (np.arange(SIZE, dtype=np.float32), np.arange(SIZE, dtype=np.float32) + 1):
        copy[2, 64](x, out)
        assert (out == x).all()
        copy[2, 64](package.In(x), there)
        assert there.tolist() == x.tolist()
        copy[2, 64](there, package.Out(out))
        assert (out == x).all()
    debug = fast_args(package.jit(debug=True, opt=False)(copy.py_func))
    given, taken = package.to_device(x), package.to_device(np.zeros_like(x))
    debug[2, 64](given, taken)
    assert (taken.copy_to_host() == x).all()


# ---- order -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def pair(torch):
    x, out = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    return x, out


def fill_late(torch, stream, x, number) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        x.fill_(number)


def are_all(torch, out, number, what="") -> None:
    """When the device has done all, this is the value of all elements."""
    torch.cuda.synchronize()
    assert (out == number).all(), what


class _OnlyInterface:
    def __init__(self, tensor, stream):
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream.cuda_stream}


# `x` is filled late on the `side`; the launch, made where that or another stream is PyTorch's current one, and whom to wait for
STREAMS = {
    "PyTorch's current stream": ("side", lambda copy, x, out, side, other: copy[256, 256](x, out), "side"),
    "its current stream, by a bound launch": ("side", lambda copy, x, out, side, other: copy[256, 256].bind(x, out)(), "side"),
    "a stream that is given": ("other", lambda copy, x, out, side, other: copy[256, 256, side](x, out), "side"),
    "another one, which waits for __dlpack__": (
        "side", lambda copy, x, out, side, other: copy[256, 256, other](Protocol(x), out), "other"),
    "another one, which waits for __cuda_array_interface__": (
        "other", lambda copy, x, out, side, other: copy[256, 256, other](_OnlyInterface(x, side), out), "other"),
    "an interface's own": (
        "other", lambda copy, x, out, side, other: copy[256, 256](_OnlyInterface(x, side), _OnlyInterface(out, side)), "side"),
}  # fmt: skip


@gpu
@pytest.mark.parametrize("name", STREAMS)
def test_a_launch_is_after_the_work_of_its_stream(copy, torch, pair, name):
    current, launch, waited = STREAMS[name]
    (x, out), streams = pair, {"side": torch.cuda.Stream(), "other": torch.cuda.Stream()}
    for number in range(1, 8):
        out.zero_()
        torch.cuda.synchronize()
        fill_late(torch, streams["side"], x, number)
        with torch.cuda.stream(streams[current]):
            launch(copy, x, out, *streams.values())
        streams[waited].synchronize()
        assert (out == number).all(), f"launch {number} was too early"


@gpu
def test_an_interfaces_own_stream(copy, torch, pair):
    """Native launches are on it also from a thread that has no context yet, and in a capture."""
    side, (x, out) = torch.cuda.Stream(), pair
    given = _OnlyInterface(x, side), _OnlyInterface(out, side)
    copy[256, 256](*given)
    before = copy.counts()
    x.fill_(-1)
    torch.cuda.synchronize()
    at_once(lambda: copy[256, 256](*given))
    are_all(torch, out, -1)
    assert copy.counts() == (before.fast + 1, before.slow, before.compiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        copy[256, 256](*given)
    for number in (50, 51):
        x.fill_(number)
        graph.replay()
        are_all(torch, out, number, f"replay {number}")


@gpu
def test_producers_on_different_streams_are_ordered(package, torch):
    """The launch is after the work of both, and what the second does next is after the launch."""
    add = fast_args(elementwise(package, "added(x, y, out)", "out[i] = x[i] + y[i]"))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x, y, out = (torch.zeros(1 << 16, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    given = [cls(each.shape, data=each.data_ptr()) for cls, each in ((DeviceTensor, x), (OtherTensor, y), (DeviceTensor, out))]
    DeviceTensor.streams[0], OtherTensor.streams[0] = first.cuda_stream, second.cuda_stream
    for number in range(1, 8):
        with torch.cuda.stream(first):
            x.fill_(number)
        fill_late(torch, second, y, number)
        with torch.cuda.stream(first):
            torch.cuda._sleep(CYCLES)
        add[256, 256](*given)
        with torch.cuda.stream(second):
            y.fill_(-1)
        are_all(torch, out, 2 * number, f"launch {number}")


@gpu
def test_graphs(copy, torch):
    x, between, out = (torch.zeros(1000, device="cuda") for _ in range(3))
    launcher = copy[8, 128]
    bound = launcher.bind(between, out)
    for launch in [functools.partial(launcher, x, between)] * 4 + [bound]:
        launch()
    x.fill_(-1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(x, between)
        bound()
    are_all(torch, out, 0, "it was launched, and not captured")
    for number in range(1, 6):
        x.fill_(number)
        graph.replay()
        are_all(torch, out, number, f"replay {number}")


# ---- threads, devices, errors ----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_new_threads_without_a_context(copy, tensors, stub_or_none, count):
    """The kernel is new to them: the first of them compiles and loads it."""
    pairs = [(tensors(3 + i), tensors()) for i in range(count)]
    tensors.wait()
    if stub_or_none is not None:
        stub_or_none.set_fast(True, threads=True)

    def work(pair) -> None:
        for _ in range(2000):
            copy[1, SIZE](*pair)

    at_once(*[functools.partial(work, pair) for pair in pairs])
    for i, (_, out) in enumerate(pairs):
        tensors.check(out, 3 + i)
    assert stub_or_none is None or stub_or_none.fast_count == 2000 * count


def test_one_thread_at_a_time_loads(copy, tensors, monkeypatch):
    """numba-cuda fails when two do, and its kernels are then loaded half way."""
    loading, most, compile_ = [], [], type(copy.target).compile
    pairs = [(tensors(3), tensors()) for _ in range(4)]

    def slowly(*arguments):
        loading.append(1)
        time.sleep(0.02)
        most.append(len(loading))
        loading.pop()
        return compile_(*arguments)

    monkeypatch.setattr(type(copy.target), "compile", slowly)
    at_once(*[functools.partial(copy[1, SIZE], *pair) for pair in pairs])
    assert set(most) == {1}


@gpu
def test_a_kernel_that_breaks_the_context(package, torch):
    """In a process of its own, which it ends as far as CUDA is concerned: each launch after it says so.

    How such a process ends is up to PyTorch and the package: as without our launches.
    """
    begin = f"""
        import warnings
        warnings.simplefilter("ignore")
        import torch
        import {package.__name__} as cuda

        @cuda.jit
        def write(x, i):
            x[i] = 1

        def broken(launch, array):
            for _ in range(4):
                launch(array, 0)
            torch.cuda.synchronize()
            launch(array, 1 << 36)  # nothing is there
            try:
                torch.cuda.synchronize()
            except Exception as error:
                print("illegal" in str(error), flush=True)
    """
    ours = run_python(begin + """
        from fastexchange import CudaError, fast_args

        write, good = fast_args(write), torch.zeros(4, device="cuda")
        broken(write[1, 1], good)
        for launch in (lambda: write[1, 1](good, 0), lambda: write[1, 1](good, i=0)):
            try:
                launch()
            except CudaError as error:
                print(error.is_sticky, error.name, "restart the process" in str(error), flush=True)
    """, check=False)
    said = f"exit code {ours.returncode}\n{ours.stdout}\n{ours.stderr}"
    assert ours.stdout.splitlines() == ["True", *["True CUDA_ERROR_ILLEGAL_ADDRESS True"] * 2], said
    if ours.returncode != 0:
        theirs = run_python(begin + """
        broken(write[1, 1], cuda.to_device(torch.zeros(4).numpy()))
        """, check=False)
        said += f"\nwithout fastexchange: exit code {theirs.returncode}\n{theirs.stderr}"
        assert ours.returncode == theirs.returncode, said


# ---- many ------------------------------------------------------------------------------------------------------------
def test_soak(package, tensors, stub_or_none, record_property):
    launches = 100_000 if stub_or_none is None else 8_000
    kernel, other = (
        fast_args(elementwise(package, head, "total[i] += i == 0")) for head in ("count(total, x, scalar)", "count_bound(total)")
    )
    total, others = tensors(), [tensors() for _ in range(4)]
    if stub_or_none is not None:
        stub_or_none.set_fast(True)
    bound = other[1, 32].bind(total)
    launchers = kernel[1, 32], kernel[2, 32], kernel.forall(64)

    def some(number: int) -> None:
        for i in range(number // 4):
            launchers[i % 3](total, others[i % 4], i)
            launchers[i % 3](total, others[i % 4], 0.5)
            kernel[1, 64](total, scalar=i, x=others[-1])
            bound()
            if i % 100 == 0:  # before the device's queue is full
                tensors.wait()
        gc.collect()

    some(launches // 10)
    references, (memory, *_) = [sys.getrefcount(each) for each in (total, *others)], measured()
    some(launches)
    assert [sys.getrefcount(each) for each in (total, *others)] == references
    grown = measured()[0] - memory
    assert grown < 8 << 20, f"{grown} bytes more"
    record_property("launches", launches)
    record_property("grown_bytes", grown)
    made = launches + launches // 10
    tensors.check(total, made, 0)
    assert stub_or_none is None or stub_or_none.fast_count == made


# ---- compute-sanitizer -----------------------------------------------------------------------------------------------
@gpu
def test_under_compute_sanitizer(torch):
    tool, kernels = shutil.which("compute-sanitizer"), str(Path(__file__).with_name("test_cuda_gpu_kernels.py"))
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [tool, "--error-exitcode", "9", "--report-api-errors", "no"]  # those that matter are exceptions
    command += [sys.executable, "-m", "pytest", "-v", "-n0", "-p", "no:cacheprovider", "-m", "not nightly"]
    command += ["-k", "gpu_kernels or new_threads", __file__, kernels]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=FOR_TESTS)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    for name in ("test_new_threads", "test_cuda_gpu_kernels.py::"):
        assert re.search(f"{name}.* PASSED", done.stdout), f"none of {name} ran"
