"""Kernels for CUDA in functions that JAX compiles, and with JAX's arrays. By frames made by hand where JAX has no GPU."""

import functools
import importlib
import os

import numpy as np
import pytest
from children import at_once
from comparing import numbers_of
from launches import elementwise
from stub_processes import run_package

from fastexchange import CudaError, fast_args
from fastexchange._abi import ffi
from fastexchange.arguments.discovery import learn_type
from fastexchange.ground.native import address_of
from fastexchange.ground.pythonapi import PyCapsule_New

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
pytestmark = pytest.mark.both_packages
gpu = pytest.mark.gpu


@pytest.fixture
def jax():
    found = pytest.importorskip("jax")
    if found.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return found


def kernel_of(cuda, head, statement, launch="n", **options):
    return fast_args(elementwise(cuda, head, statement), launch=launch, **options)


def saxpy_of(cuda, launch="n"):
    return kernel_of(cuda, "saxpy(a, x, y, z)", "z[i] = a * x[i] + y[i]", launch, out="x[n], y[n] -> z[n]")


LAUNCHES = "n", ("(n + 63) // 64", 64), (1024, 128)


@gpu
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_eager_compiled_and_mapped(package, jax, launch):
    f = saxpy_of(package, launch)
    for n in (1, 7, 1000, 100_003):
        x, y = jax.numpy.arange(float(n)), jax.numpy.ones(n)
        want = 2 * np.asarray(x) + 1
        assert np.array_equal(f(2.0, x, y), want)
        assert np.array_equal(jax.jit(lambda x, y: f(2.0, x, y * 1))(x, y), want)
    x, y = jax.numpy.arange(12.0).reshape(3, 4), jax.numpy.ones(4)
    assert np.array_equal(jax.vmap(lambda x: f(2.0, x, y))(x), 2 * np.asarray(x) + 1)
    assert np.array_equal(jax.jit(jax.vmap(f, (None, 0, None)), static_argnums=0)(2.0, x, y), 2 * np.asarray(x) + 1)


@gpu
def test_launches_are_ordered_among_xlas_own_work(package, jax):
    """On XLA's stream: what comes before has computed its operands, what comes behind waits for it. Captured, too."""
    f = saxpy_of(package)
    big = jax.numpy.full((4096, 4096), 1 / 4096)

    @jax.jit
    def chain(x):
        for _ in range(50):
            y = (big @ big)[0, 0] * x
            x = f(1.0, y, x) * 0.5
        return x

    for _ in range(5):
        want = np.arange(1000.0) * (0.5 + 0.5 / 4096) ** 50
        np.testing.assert_allclose(chain(jax.numpy.arange(1000.0)), want, rtol=1e-4)


@gpu
def test_gradients(package, jax):
    for_x = kernel_of(package, "for_x(grad_z, y, grad_x)", "grad_x[i] = grad_z[i] * y[i]", out="grad_z[n], y[n] -> grad_x[n]")
    for_y = kernel_of(package, "for_y(grad_z, x, grad_y)", "grad_y[i] = grad_z[i] * x[i]", out="grad_z[n], x[n] -> grad_y[n]")
    product = kernel_of(package, "product(x, y, z)", "z[i] = x[i] * y[i]", out="x[n], y[n] -> z[n]", backward=[for_x, for_y])
    x, y = jax.numpy.arange(5.0), jax.numpy.arange(5.0) + 1
    for found in (jax.grad, lambda *given: jax.jit(jax.grad(*given))):
        made = found(lambda x, y: (product(x, y) ** 2).sum(), (0, 1))(x, y)
        np.testing.assert_allclose(made, (2 * x * y**2, 2 * x**2 * y))


@gpu
def test_a_changed_argument_is_returned(package, jax):
    increase = kernel_of(package, "increase(x, by)", "x[i] += by", "x[n] -> n", mutates="x")
    x = jax.numpy.arange(100.0)
    assert np.array_equal(jax.jit(lambda x: increase(increase(x, 1.0), 2))(x), np.arange(100.0) + 3)
    assert np.array_equal(x, np.arange(100.0))
    assert np.array_equal(jax.jit(lambda x: increase(x, 1.0), donate_argnums=0)(x + 0), np.arange(100.0) + 1)
    with pytest.raises(BufferError, match="immutable"):
        increase(x, 1.0)


@gpu
def test_several_threads(package, jax):
    f = saxpy_of(package)
    compiled = jax.jit(lambda x, y: f(2.0, x, y))

    def calls(number):
        x = jax.numpy.full(1000, float(number))
        for _ in range(50):
            assert np.array_equal(compiled(x, x), np.full(1000, 3.0 * number))
            assert np.array_equal(f(2.0, x, x), np.full(1000, 3.0 * number))

    at_once(*(functools.partial(calls, number) for number in range(4)))


@gpu
def test_dtypes(package, jax):
    copy = kernel_of(package, "copy(x, y)", "y[i] = x[i]", out="x[n] -> y[n]")
    for dtype in ("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "float32", "complex64"):
        x = jax.numpy.asarray([0, 1, 1, 0, 1]).astype(dtype)
        assert np.array_equal(jax.jit(copy)(x), x) and copy(x).dtype == x.dtype
    assert copy(jax.numpy.zeros(0)).shape == (0,)


@gpu
def test_what_is_refused(package, jax):
    f, x, long = saxpy_of(package), jax.numpy.ones(4), jax.numpy.ones(2000)
    with_launch, of_xla = functools.partial(saxpy_of, package), jax.errors.JaxRuntimeError
    for call, kind, message in (
        (lambda: jax.jit(f)(2.0, x, x), TypeError, r"argument 'a' \(position 0\) is a number that JAX computes.*static_argnames"),
        (lambda: f(2.0, x, jax.numpy.ones(5)), ValueError, r"argument 'y'.*'n' is 4 in"),
        (lambda: f("text", x, x), TypeError, r"argument 'a' \(position 0\) is str, and XLA launches the kernel"),
        (lambda: with_launch(lambda *args: 4)(2.0, x, x), TypeError, "launch= is a Python function"),
        (lambda: with_launch((1, 32, 1))(2.0, x, x), TypeError, "has a stream"),
        (lambda: with_launch(("n", "n"))(2.0, long, long).block_until_ready(), of_xla, "no device takes the sizes"),
        (lambda: with_launch((1, 32, None, 1_000_000))(2.0, x, x), CudaError, "CUDA_ERROR_INVALID_VALUE"),  # as it is traced
    ):
        with pytest.raises(kind, match=message):
            call()
    assert np.array_equal(f(2.0, x, x), np.full(4, 3.0))
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(of_xla, match="fastexchange_cuda"):
        f(2.0, jax.numpy.ones(4), jax.numpy.ones(4))


# ---- frames made by hand ---------------------------------------------------------------------------------------------------
@pytest.fixture
def calls(package, stub):
    pytest.importorskip("jax")
    return importlib.import_module("xla_frames").Calls(stub, package.stream())


@pytest.mark.slow
def test_the_handler_may_be_captured(calls):
    found = calls.metadata()
    assert (found.api_version.major_version, found.api_version.minor_version, found.traits) == (0, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_frame_is_launched_on_its_stream(package, stub, calls, launch):
    f = saxpy_of(package, launch)
    grid = {"n": (4, 1, 1), LAUNCHES[1]: (16, 1, 1), LAUNCHES[2]: (1024, 1, 1)}[launch]
    for count in (1, 2):  # by Python, which compiles and loads it; without
        assert calls(f, (1000,), (1000,), (1000,)) is None
        made = stub.launches[-1]
        assert made.grid == grid and made.stream == calls.stream and f.counts().fast == count
        assert set(calls.data) <= {*numbers_of(made)} and np.float64(2).tobytes() in made.parameters


def test_a_batch_is_a_launch_for_each_item(package, stub, calls):
    f = saxpy_of(package)
    assert calls(f) is None
    stub.clear()
    assert calls(f, (3, 100), (1, 100), (3, 100)) is None
    x, y, z = calls.data
    assert len(stub.launches) == 3
    for i, launch in enumerate(stub.launches):
        assert {x + 400 * i, y, z + 400 * i} <= {*numbers_of(launch)}


def test_what_is_wrong_is_an_error_of_xla(package, stub, calls):
    """A frame that is not as traced, what the driver refuses, and XLA's own error; the next call is as before."""
    f, wrong = saxpy_of(package), "the buffers of a call are not as they were when it was traced"
    assert calls(f) is None
    stub.clear()
    assert wrong in calls(f, (5, 1), (5,), (5,)) and wrong in calls(f, (2, 5), (3, 5), (2, 5))
    calls.fails = True
    assert calls(f) == 77  # XLA's own error
    calls.fails = False
    assert "no device takes the sizes" in calls(saxpy_of(package, ("n", "n")), (2000,), (2000,), (2000,))
    assert not stub.launches and calls(f) is None
    stub.fail("cuLaunchKernel", 701)
    text = calls(f)
    assert "CudaError: " in text and "saxpy() was not launched (launch=n" in text and "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in text
    assert calls(f) is None


# ---- JAX's arrays in launches ------------------------------------------------------------------------------------------------
class Exports:
    """In place of JAX's function: exports an array of JAX's on the CPU as one on the stub's device, at its address."""

    def __init__(self, stream: int):
        from fastexchange.jax import launch_arrays

        self.streams, self._kept, self._state = [], [], launch_arrays.state
        self._named = {"stream": stream}
        self._state.function, self._state.named, self._state.stream = id(self), id(self._named), stream
        self._state.deleter, self._state.number = launch_arrays.delete_interface.address, 0
        self._state.runtime = launch_arrays.runtime().address
        self._table = launch_arrays.new_table()
        self._state.arrays = address_of(self._table)
        learn_type(launch_arrays.array_type())
        launch_arrays.runtime().entries.update(
            launch_arrays.array_type(), interface=launch_arrays.managed_tensor_of_device_memory.address,
            device_kind=launch_arrays.KIND,
        )  # fmt: skip

    def __call__(self, array, stream):
        self.streams.append(stream)
        managed, extents = ffi.new("DLManagedTensorVersioned *"), ffi.new("int64_t[]", [*array.shape, 0])
        managed.version.major, tensor = 1, managed.dl_tensor
        tensor.data, tensor.ndim, tensor.shape = ffi.cast("void *", array.unsafe_buffer_pointer()), array.ndim, extents
        tensor.device, tensor.dtype = {"device_type": 2}, {"code": 2, "bits": 32, "lanes": 1}
        self._kept.append((managed, extents))
        return PyCapsule_New(address_of(managed), b"dltensor_versioned", None)


EXPORTED = """
import jax, sys
from comparing import numbers_of
from cuda_checks import is_refused, launched
from cuda_producers import ArrayInterface
from test_cuda_jax import Exports, add_of
stream = cuda.stream()
handle = int(getattr(stream.handle, "value", stream.handle))
exports, f = Exports(handle), add_of(cuda)
x, y = jax.numpy.ones((30, 4))[:, 0], jax.numpy.ones(30)
out = ArrayInterface(stub, (30,), stream=handle)
fast_args(cuda.jit(lambda out: None))[1, 1](out)  # its type is known then
counts = [sys.getrefcount(x), sys.getrefcount(y)]
for _ in range(3):
    launch = launched(stub, f[1, 32], x, y, out)
    assert {each.unsafe_buffer_pointer() for each in (x, y)} <= {*numbers_of(launch)} and launch.stream == handle
    assert exports.streams == [handle] * 2, exports.streams  # each array once
assert f.counts().slow == 1, f.counts()
assert [sys.getrefcount(x), sys.getrefcount(y)] == counts
y.delete()
is_refused(lambda: f[1, 32](x, y, out), BufferError)  # Python code is asked then, and here it says that these are on the CPU
for number in range(3000):  # more than are known
    z = jax.numpy.full(30, number)
    f[1, 32](x, jax.numpy.ones(30), out)
assert f.counts().slow <= 3 and sys.getrefcount(x) == counts[0], f.counts()
print("right")
"""


@pytest.mark.slow
def test_what_is_exported_once_is_read_in_memory(package, stub):
    pytest.importorskip("jax")
    assert run_package(EXPORTED, package) == "right\n"


def add_of(cuda):
    return fast_args(elementwise(cuda, "add(x, y, out)", "out[i] = x[i] + y[i]"))


@gpu
def test_launches_read_arrays_natively(package, jax):
    """Computed or not, dropped at once, and without Python from the second launch on if all is on XLA's stream."""
    cupy = pytest.importorskip("cupy")
    from fastexchange.jax import launch_arrays

    f = add_of(package)
    big = jax.numpy.full((4096, 4096), 1 / 4096)

    def launches(out, count):
        for number in range(count):
            x = (big @ big @ big)[0] * number
            f[16, 256](x, x + 1, out)
            del x
            jax.numpy.zeros((4096,)) + 5  # may get the memory
            np.testing.assert_allclose(out.get(), np.full(4096, 2 * number / 4096 + 1), rtol=1e-3)

    launches(cupy.zeros(4096, "f4"), 3)
    slow = f.counts().slow
    assert launch_arrays.why_not() == ""
    with cupy.cuda.ExternalStream(launch_arrays.state.stream):
        launches(cupy.zeros(4096, "f4"), 20)
    assert f.counts().slow <= slow + 1


@gpu
def test_what_launches_refuse(package, jax):
    f, x, gone = add_of(package), jax.numpy.ones(100), jax.numpy.ones(100) + 1
    gone.delete()
    on_cpu = jax.device_put(np.ones(100, np.float32), jax.devices("cpu")[0])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="deleted"):
            f[1, 128](x, gone, x)
        with pytest.raises(BufferError, match=r"argument 'y' \(position 1\)"):
            f[1, 128](x, on_cpu, x)
