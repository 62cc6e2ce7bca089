"""``measure`` of launches: what is launched for it, what it attributes to whom, and that arguments stay as they are."""

import functools
import itertools
import warnings

import numpy as np
import pytest
from cuda_checks import is_refused, launched, new_stream
from cuda_tensors import DeviceTensor
from launches import Interface, address, elementwise, tensor

from fastexchange import CudaError, fast_args, measure
from fastexchange.cuda import specialising
from fastexchange.measuring import launches

pytestmark = [pytest.mark.both_packages, pytest.mark.filterwarnings("ignore:measure:RuntimeWarning")]  # of noise


def writer(package, *signature, **options):
    """A kernel that writes to its last tensor."""
    return fast_args(elementwise(package, "write(a, x, y, n=3)", "y[i] = a * x[i] + n", *signature, **options))


def test_parts_of_a_launch(stub_or_none, package):
    """The parts are the whole, beside the driver and the package; the kernel itself is not compiled, and writes nothing."""
    kernel, x = writer(package), tensor(package, (4,))
    given = np.arange(4, dtype=np.float32)
    y = package.to_device(given)
    if stub_or_none is not None:
        stub_or_none.set_fast(True)
    report = measure(kernel[3, 64], 2.0, x, y=y, rounds=5)
    assert [(each.name, each.path) for each in report.arguments] == [("a", "scalar"), ("x", "c-exchange"), ("y", "device-array")]
    assert [each.numba_type for each in report.arguments[:2]] == ["float64", "array(float32, 1d, C)"]
    assert report.callee == "cuLaunchKernel" and ", cuLaunchKernel " in report.headline
    whole = sum((each.total for each in report.arguments), report.call) + report.keywords
    np.testing.assert_allclose(whole.values, report.overhead.values)
    np.testing.assert_allclose((report.overhead + report.alone).values, report.total.values)
    assert report.alone.median > 0
    assert [way.label for way in report.alternatives] == [f"{kernel.target.name}'s own launch"]
    assert report.alternatives[0].overhead is None and report.alternatives[0].why_not, "the package takes no such tensor"
    assert kernel.counts() == (0, 0, 0) and not kernel.signatures
    package.synchronize()
    assert y.copy_to_host().tolist() == given.tolist()
    assert report.to_dict()["callee"] == "cuLaunchKernel" and "cuLaunchKernel" in report._repr_html_()


@pytest.mark.parametrize("configuration", [(3, 64), (3, 64, "stream", 100), ((2, 2), (8, 8)), 1000, (4, 32, None, 0, 2)], ids=str)
def test_what_is_launched(stub, package, monkeypatch, configuration):
    """The launch's stream, block and shared memory; the driver's alone have the launch's parameters, by number and size."""
    monkeypatch.setattr(launches, "_IN_A_ROW", 4)
    kernel, stream = writer(package), new_stream()
    x, y = (DeviceTensor((4,), data=address(package)) for _ in range(2))
    if configuration == (4, 32, None, 0, 2) and package.__name__ == "numba.cuda":
        pytest.skip("it has no clusters")
    if isinstance(configuration, tuple):
        launcher = kernel[tuple(stream if each == "stream" else each for each in configuration)]
    else:
        launcher = kernel.forall(configuration)
    usual = launched(stub, launcher, 2.0, x, y)
    stub.clear()
    measure(launcher, 2.0, x, y, rounds=1, alternatives=False)
    made = stub.launches
    for name in ("block", "stream", "shared", "cluster", "device", "api"):
        assert {getattr(launch, name) for launch in made} == {getattr(usual, name)}, name
    assert {launch.packed for launch in made if launch.offsets == usual.offsets} == {usual.packed, bytes(len(usual.packed))}
    assert {launch.grid for launch in made} == {usual.cluster if any(usual.cluster) else (1, 1, 1)}
    assert usual.function not in {launch.function for launch in made}, "the kernel itself was launched"
    assert len({launch.offsets for launch in made}) == 4  # also without the default, with 4 floats more, with 4 tensors


def test_the_device_is_waited_for_before_its_queue_is_full(stub, package):
    kernel, x, y = writer(package), tensor(package, (4,)), tensor(package, (4,))
    stub.set_trace(True)
    measure(kernel[3, 64], 2.0, x, y, rounds=1)
    names = [name for name in stub.trace if name.startswith(("cuLaunchKernel", "cuCtxSynchronize"))]
    rows = [len(list(group)) for is_launch, group in itertools.groupby(names, lambda name: name.startswith("cuL")) if is_launch]
    assert max(rows) <= 400 + 20 and sum(rows) > 2000  # a few launches are tried before anything is timed
    assert names[-1] == "cuCtxSynchronize"


def test_declared_signatures_and_objects_with_an_interface(stub_or_none, package):
    """The package's own launch is timed with the objects, and with device arrays made of them."""
    kernel = writer(package, "void(float32, float32[::1], float32[::1], int64)")
    x, y = Interface(tensor(package, (4,))), package.to_device(np.zeros(4, np.float32))
    if stub_or_none is not None:
        stub_or_none.set_fast(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = measure(kernel[1, 32], 2, x, y, 5, rounds=2)
    assert {warning.category for warning in said} <= {RuntimeWarning}, "the grid of one block is not the caller's"
    assert [each.path for each in report.arguments] == ["scalar", "cuda-interface", "device-array", "scalar"]
    name = kernel.target.name
    labels = [f"{name}'s own launch", f"{name}'s own launch, its device arrays made beforehand"]
    assert [way.label for way in report.alternatives] == labels
    assert all(way.overhead.median > 0 for way in report.alternatives)
    is_refused(lambda: measure(kernel[1, 32], 2, 3, y, 5), TypeError, "write(): no signature for arguments of types")


def test_what_is_refused(package, monkeypatch):
    kernel, x, host = writer(package), tensor(package, (4,)), np.zeros(4, np.float32)
    launcher, debugged, array = kernel[1, 32], writer(package, debug=True, opt=False)[1, 32], package.to_device(host)
    for given, kind, text in (
        ((kernel, 2.0, x, x), TypeError, "say how to launch this one for CUDA: measure(kernel[grid, block], ...)"),
        ((launcher, 2.0, host, host), TypeError, "fastexchange does not make this launch of"),
        ((debugged, 2.0, x, x), TypeError, "debug=True"), ((debugged, 2.0, array, array), TypeError, "debug=True"),
        ((launcher, 2.0, DeviceTensor((4,), device_type=1), x), BufferError, "write(): argument 'x'"),
        ((launcher, 2.0), TypeError, "missing"), ((kernel[1, 2000], 2.0, x, x), CudaError, "write() was not launched"),
    ):  # fmt: skip
        is_refused(functools.partial(measure, *given), kind, text)
    is_refused(lambda: measure(launcher, 2.0, x, x, rounds=0), ValueError, "rounds")
    assert kernel.counts() == (0, 0, 0)
    # That the package launches it turns out when the kernel is loaded, and its parameters are compared.
    monkeypatch.setattr(specialising, "is_as_driver_says", lambda *words: False)
    is_refused(lambda: measure(writer(package)[1, 32], 2.0, array, array), TypeError, "other parameters than expected")
