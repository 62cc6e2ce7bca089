"""What operators of CUDA kernels do with PyTorch's tensors, on the stub's devices or on a GPU: see ``test_cuda_operators``.

Each function is called with the stub of the driver, that of PyTorch, and the package that compiles; on a GPU, where the kernels'
results are looked at, too, with what stands for the stubs there.
"""

import collections
import functools
import gc
import pickle
import sys

import numpy as np
import torch
from cuda_checks import is_for_tasks, is_refused
from launches import elementwise
from oracle import type_and_message

from fastexchange import CudaError, fast_args

SHARED = "x[n], w[n] -> y[n]"
ON_GPU = torch.version.cuda is not None


def scale_on(cuda):
    return fast_args(elementwise(cuda, "scale(x, w, y)", "y[i] = w[i] * x[i]"))


@fast_args(out=SHARED)
def scale_on_cpu(x, w, y):
    for i in range(x.shape[0]):
        y[i] = w[i] * x[i]


def tensors(count=100, device="cuda", **options):
    """Two, whose elements are random numbers, but for those on the stub's devices."""
    made = torch.rand if ON_GPU or str(device) == "cpu" else torch.empty
    return made(count, device=device, **options), made(count, device=device, **options)


def operator_of(cuda, name, launch="n"):
    """An operator of that kernel, and two tensors for it."""
    return scale_on(cuda).as_torch_op(f"fx_check::{name}", launch=launch, out=SHARED), *tensors()


def is_product(y, x, w) -> bool:
    """Whether a kernel has computed this, into a tensor like `x`; the stub runs none."""
    is_run = ON_GPU or x.device.type == "cpu"
    return (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device) and (not is_run or torch.equal(y, x * w))


def allocated(stub) -> int:
    """How much memory PyTorch has of the device: in bytes, on the stub in allocations."""
    return torch.cuda.memory_allocated() if ON_GPU else stub.allocations()


class Python:
    """Counts the calls of Python functions between an operator and its launch."""

    def __init__(self, operator):
        self.calls = 0
        for owner in (operator, operator.kernel, operator.kernel._launcher):
            for name in ("_dispatch", "_call_with_outputs", "_call_slowly", "_call_numba"):
                if hasattr(owner, name):
                    setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, function):
        def counting(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return counting


def both_ways(operator):
    """The operator object, and PyTorch's."""
    return operator, operator.overload


def warmed(operator, *args):
    """The same, after so many calls that cache entries make the next ones."""
    for call in both_ways(operator) * 4:
        call(*args)
    return both_ways(operator)


def error_of(call, *args) -> tuple[type, str]:
    """What a call raises, the same three times: the type, and the first line of the text."""
    (found,) = {(kind, text.partition("\n")[0]) for kind, text in [type_and_message(call, *args) for _ in range(3)]}
    return found


CONFIGURATIONS = {
    "fixed": ((2, 64), lambda launch: (launch.grid, launch.block) == ((2, 1, 1), (64, 1, 1))),
    "tasks": ("n", lambda launch: is_for_tasks(launch, 100)),
    "grid": (("(n + 31) // 32", (32, 2)), lambda launch: (launch.grid, launch.block) == ((4, 1, 1), (32, 2, 1))),
}


def check_launches(stub, torch_stub, cuda):
    """Outputs are on the inputs' device, the kernel gets the tensors' memory, and no Python code runs in between."""
    for name, (launch, is_right) in CONFIGURATIONS.items():
        operator, x, w = operator_of(cuda, name, launch)
        for call in warmed(operator, x, w):
            python = Python(operator)
            stub.clear()
            y = call(x, w)
            assert python.calls == 0, (name, call)
            assert type(y) is torch.Tensor and sys.getrefcount(y) == 2 and y._base is None and not y.requires_grad
            (made,) = stub.launches
            assert is_right(made) and made.stream == 0 and is_product(y, x, w), (name, call)
            assert {each.data_ptr() for each in (x, w, y)} <= {int.from_bytes(word, "little") for word in made.parameters}
            if call is operator:
                assert is_product(call(w=w, x=x), x, w) and python.calls == 0
    operator, x, w = operator_of(cuda, "again")
    for call in warmed(operator, x, w):
        operator.kernel.recompile()
        stub.clear()
        for _ in range(4):
            empty = call(*tensors(0))
            assert empty.shape == (0,) and empty.device.type == "cuda" and is_product(call(x, w), x, w)
        assert len(stub.launches) == 4, "of 0 tasks there is none"
    if ON_GPU:
        assert torch.equal(torch.compile(lambda x: operator(2 * x, w) - 1, fullgraph=True)(x), 2 * x * w - 1)
        assert set(torch.library.opcheck(operator.overload, (x, w)).values()) == {"SUCCESS"}


def check_functions(stub, torch_stub, cuda):
    """A configuration that a function of Python's gives: it is called with the arguments and outputs."""
    seen = []

    def launch(x, w, y):
        seen[:] = x, w, y
        if x.shape[0] == 13:
            raise LookupError("thirteen")
        return x.shape[0] if x.shape[0] < 1000 else ((7, 2), 32)

    operator, *_ = operator_of(cuda, "function", launch)
    for call in both_ways(operator) * 3:
        for count in (300, 1000):
            x, w = tensors(count)
            y = call(x, w)
            made = stub.launches[-1]
            assert made.grid == (7, 2, 1) if count == 1000 else is_for_tasks(made, count)
            assert is_product(y[:200], x[:200], w[:200]) and seen[0] is x and seen[2] is y
        assert type_and_message(call, *tensors(13)) == (LookupError, "thirteen")


def check_schemas(stub, torch_stub, cuda):
    """Several outputs, dtypes, numbers, defaults, outputs of another rank."""
    head = "many(x, a: float, k: int, w, flag: bool = True, first=None, second=None, third=None)"
    out = "x[n], k, w[n] -> first[n, k]: x, second[2 * n], third[]: int32"
    many = fast_args(elementwise(cuda, head, "first[i, 0] = a"))
    operator = many.as_torch_op("fx_check::many", launch=("k", "n"), out=out)
    wanted = {torch.float16: torch.float32, torch.float64: torch.float64, torch.int8: torch.float32}
    for dtype, promoted in wanted.items():
        x, w = (torch.empty(12, device=torch_stub.devices[-1], dtype=kind)[::2] for kind in (dtype, torch.float32))
        for call in both_ways(operator) * 4:
            made, again = call(x, 2.0, 3, w), call(x, 2.0, 3, w, False)
            assert [y.dtype for y in made] == [dtype, promoted, torch.int32]
            assert [tuple(y.shape) for y in made] == [(6, 3), (12,), ()] == [tuple(y.shape) for y in again]
            assert all(y.device == x.device and y.is_contiguous() for y in made)
            launch = stub.launches[-1]
            assert launch.grid == (3, 1, 1) and launch.block == (6, 1, 1) and np.float64(2).tobytes() in launch.parameters
    python = Python(operator)
    for call in both_ways(operator):
        call(x, 2.0, 3, w)
    assert python.calls == 0


def check_devices_and_streams(stub, torch_stub, cuda):
    """The launch is on the device and the current stream of the inputs, whatever the current device is; that does not change."""
    operator, *_ = operator_of(cuda, "places")
    for device in [device for device in (1, 0, 2, 1) if device < len(torch_stub.devices)]:
        with cuda.gpus[device]:
            stream = cuda.stream()
        x, w = tensors(device=f"cuda:{device}")
        for call in both_ways(operator) * 4:
            for handle in (int(stream.handle), 0):
                torch_stub.set_stream(device, handle)
                y = call(x, w)
                assert (stub.launches[-1].device, stub.launches[-1].stream, torch_stub.device()) == (device, handle, 0)
                stream.synchronize()
                assert is_product(y, x, w)


def check_errors(stub, torch_stub, cuda):
    """What is refused is refused in the same words before and after the first launches, and leaves nothing."""
    operator, x, w = operator_of(cuda, "refused", ("n // 4", 32))
    others = [tensors(device=device)[0] for device in torch_stub.devices[1:2]]
    cases = [
        *[((x, other), BufferError, "kDLCUDA:1, but an earlier argument is on kDLCUDA:0") for other in others],
        ((x, w[:50]), ValueError, "dimension 0 of its shape (50,) is 50"),
        ((x, torch.empty(100, 2, device="cuda")), ValueError, "has 2 dimensions"),
        ((x[:3], w[:3]), ValueError, "a grid of (0, 1, 1) blocks, for x of shape (3,), w of shape (3,)"),
        ((x.new_empty(100, requires_grad=True), w), BufferError, "requires grad"),
        ((torch.ones(3), torch.ones(3)), NotImplementedError, "'CPU'"),
    ]
    for _ in range(2):
        for args, kind, said in cases:
            for call in both_ways(operator):
                found = error_of(call, *args)
                assert (found[0] is kind or call is operator.overload) and said in found[1], (call, found)
        warmed(operator, x, w)
    mixed = [error_of(call, x, torch.ones(100))[1] for call in both_ways(operator)]
    assert mixed[0] == mixed[1] and "kDLCPU" in mixed[0]
    before = allocated(stub), sys.getrefcount(x)
    for args, _, _ in cases:
        for call in both_ways(operator) * 20:
            error_of(call, *args)
    gc.collect()
    assert (allocated(stub), sys.getrefcount(x)) == before
    assert all(is_product(call(x, w), x, w) for call in both_ways(operator))


def check_failures(stub, torch_stub, cuda):
    """The driver refuses a launch, PyTorch has no memory: each is raised as what it is, and the next call is as before."""
    operator, x, w = operator_of(cuda, "failing", ("n // 4", 32))
    for call in warmed(operator, x, w):
        stub.fail("cuLaunchKernel", 701, sticky=True)
        found = error_of(call, x, w)
        assert found[0] is (CudaError if call is operator else RuntimeError) and "was not launched" in found[1], found
        stub.reset()
        call(x, w)
        torch_stub.fail(3)  # native code tries twice at most, then PyTorch's own function raises
        kind, text = type_and_message(call, x, w)
        assert "no memory, as it was asked for" in text and issubclass(kind, RuntimeError), (kind, text)
        assert kind is torch.OutOfMemoryError or call is operator.overload
        torch_stub.fail(0)
        assert is_product(call(x, w), x, w)


def by_type():
    """How many objects there are of each type that garbage collection knows, and that are no garbage."""
    gc.collect()
    return collections.Counter([type(thing).__name__ for thing in gc.get_objects()])


def check_nothing_is_left(stub, torch_stub, cuda):
    """Many calls allocate nothing but their outputs, whose memory PyTorch's allocator gets back."""
    operator, x, w = operator_of(cuda, "kept")
    by_type()
    for call in both_ways(operator):
        for _ in range(1000):  # what is made once is there
            call(x, w)
        before, references = allocated(stub), sys.getrefcount(x)
        stub.clear()
        objects = by_type()
        for _ in range(1000):
            y = call(x, w)
        stub.clear()
        assert allocated(stub) - before <= (512 if ON_GPU else 1) and sys.getrefcount(x) == references
        more = by_type() - objects
        assert more.total() < 50, more
        address = y.data_ptr()
        del y
        assert call(x, w).data_ptr() == address


def check_one_operator_for_cpu_and_gpu(stub, torch_stub, cuda):
    """Calls go to the kernel for the tensors' place, natively; those with tensors in both are PyTorch's dispatcher's."""
    operator = scale_on(cuda).as_torch_op("fx_check::both", launch="n", cpu=scale_on_cpu)
    here, there = tensors(5, "cpu"), tensors(5)
    for times in (5, 1):
        python = Python(operator)
        stub.clear()
        for call in both_ways(operator) * times:
            assert is_product(call(*here), *here) and is_product(call(*there), *there)
    assert python.calls == 0 and len(stub.launches) == 2
    found = [error_of(call, here[0], there[0])[1] for call in both_ways(operator)]
    assert found[0] == found[1], found


def check_writes(stub, torch_stub, cuda):
    """An operator that writes to an argument, with a kernel for the CPU and one for GPUs: both count the write."""

    @cuda.jit
    def add_there(x: "torch.Tensor", y: "torch.Tensor"):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] += x[i]

    @fast_args(cuda=add_there, launch="x[n] -> n", mutates="y")
    def add(x: "torch.Tensor", y: "torch.Tensor"):
        y += x

    operator = add.as_torch_op("fx_check::add_to")
    for place in ("cpu", "cuda"):
        x, y = tensors(300, place)
        wanted = y + 10 * x if place == "cpu" or ON_GPU else None
        for call in both_ways(operator) * 5:
            version = y._version
            assert call(x, y) is None and y._version == version + 1
        assert wanted is None or torch.allclose(y, wanted)
    assert len(stub.launches) == 10 and is_for_tasks(stub.launches[-1], 300)
    add.cuda.as_torch_op("fx_check::add_there", launch=(3, 128), mutates="y")(x, y)
    assert stub.launches[-1].block == (128, 1, 1) and y._version == version + 2
    python, version = [], y._version
    operator._dispatch = python.append
    operator(x, y)
    assert not python and y._version == version + 1


def check_gradients(stub, torch_stub, cuda):
    """The kernels of a backward pass are launched by autograd's thread for the device, on the stream of the forward pass."""

    @fast_args(out="x[n], w[n], grad_y[n] -> grad_x[n], grad_w[n]")
    def backward_on_cpu(x, w, grad_y, grad_x, grad_w):
        for i in range(x.shape[0]):
            grad_x[i] = w[i] * grad_y[i]
            grad_w[i] = x[i] * grad_y[i]

    scale_backward = fast_args(elementwise(cuda, "scale_backward(x, w, grad_y, grad_x, grad_w)", "grad_x[i] = w[i] * grad_y[i]"))
    backward = scale_backward.as_torch_op("fx_check::scale_backward", launch=("n", 32), cpu=backward_on_cpu)
    operator = scale_on(cuda).as_torch_op("fx_check::scale", launch=("n", 64), cpu=scale_on_cpu, backward=backward)
    last = torch_stub.devices[-1]
    with cuda.gpus[last.index]:
        stream = cuda.stream()
    for call in both_ways(operator):
        for place, handle in ((last, int(stream.handle)), (torch_stub.devices[0], 0), (torch.device("cpu"), 0)):
            x, w = tensors(7, place, requires_grad=True)
            torch_stub.set_stream(last.index, handle)
            for _ in range(3):
                stub.clear()
                y = call(x, w)
                torch_stub.set_stream(last.index, 0)  # autograd sets that of the forward pass
                given, _ = tensors(7, place)
                grads = torch.autograd.grad(y, (x, w), given)
                torch_stub.set_stream(last.index, handle)
                assert y.requires_grad and (grads[1].shape, grads[1].device) == (x.shape, x.device)
                if place.type == "cpu":
                    assert not stub.launches
                else:
                    first, second = stub.launches
                    assert (first.block, second.block) == ((64, 1, 1), (32, 1, 1)) and first.thread != second.thread
                    assert first.stream == second.stream == handle and first.device == second.device == x.device.index
                    stream.synchronize()
                assert is_product(y, x, w) and is_product(grads[0], given, w)
            torch_stub.set_stream(last.index, 0)
    python = Python(backward)
    x, w = tensors(7, last, requires_grad=True)
    y = operator(x, w)
    torch.autograd.grad(y, (x, w), torch.empty_like(y))
    assert python.calls == 0


def check_modes(stub, torch_stub, cuda):
    """A mode, and an implementation of the program's own, get the calls."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    operator, x, w = operator_of(cuda, "seen")
    warmed(operator, x, w)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        stub.clear()
        y = operator(fake, fake)
        assert y.device == x.device and y.shape == x.shape and type(y) is type(fake) and not stub.launches
    with torch.inference_mode():
        assert operator(x, w).is_inference()
    library = torch.library.Library("fx_check", "IMPL")
    library.impl("seen", lambda x, w: x.new_empty(1), "CUDA", allow_override=True)
    assert operator(x, w).shape == (1,)
    library._destroy()
    assert operator(x, w).shape == x.shape


def check_pickles(stub, torch_stub, cuda):
    """An operator is pickled with its kernels and configuration, if these can be."""
    for name, (launch, is_right) in CONFIGURATIONS.items():
        operator, x, w = operator_of(cuda, f"pickled_{name}", launch)
        again, copied = (pickle.loads(pickle.dumps(made)) for made in (operator, operator.kernel))
        assert again.overload is operator.overload and is_product(again(x, w), x, w)
        assert copied == operator.kernel or copied.cuda_kernel is not operator.kernel.cuda_kernel
        stub.clear()
        assert is_product(copied(x, w), x, w) and is_right(*stub.launches)


def check_threads(stub, torch_stub, cuda):
    """Threads that call one operator with tensors of other shapes: each launch has its own sizes."""
    from children import at_once

    operator, *_ = operator_of(cuda, "threads", ("n", 32))

    def act(count):
        x, w = tensors(count)
        for i in range(300):
            assert is_product(both_ways(operator)[i % 2](x, w), x, w)

    act(1)
    stub.clear()
    at_once(*[functools.partial(act, count) for count in (5, 50, 500)])
    sizes = {(launch.thread, launch.grid[0]) for launch in stub.launches}
    assert sorted(size for _, size in sizes) == [5, 50, 500] and len(dict(sizes)) == 3 and len(stub.launches) == 900


def check_package_launches(stub, torch_stub, cuda):
    """Kernels that the package launches itself, and those that stop being launched natively."""
    kernel = fast_args(elementwise(cuda, "debugged(x, w, y)", "y[i] = x[i]", debug=True, opt=False))
    operator = kernel.as_torch_op("fx_check::debugged", launch=("(n + 31) // 32", 32), out=SHARED)
    assert operator.kernel._launcher.why_not and not operator.kernel._is_native
    x, w = tensors()
    for _ in range(3):
        y = torch.empty_like(x)
        kernel[4, 32](x, w, y)
    assert torch.equal(x, y) if ON_GPU else [launch.grid for launch in stub.launches] == [(4, 1, 1)] * 3
    operator, x, w = operator_of(cuda, "retired")
    warmed(operator, x, w)
    operator.kernel._launcher._retire()
    for call in both_ways(operator):
        assert "reset" in error_of(call, x, w)[1]


def check_kernels_with_a_configuration(stub, torch_stub, cuda):
    """``fast_args(out=…, launch=…)``: a call returns the outputs, natively; autograd and operators take it."""
    backward = elementwise(cuda, "backward(grad_y, w, grad_x)", "grad_x[i] = grad_y[i] * w[i]")
    backward = fast_args(backward, out="grad_y[n], w[n] -> grad_x[n]", launch="n")
    dispatcher = elementwise(cuda, "scale(x, w, y)", "y[i] = w[i] * x[i]")
    scale = fast_args(dispatcher, out=SHARED, launch="n", backward=backward)
    x, w = tensors()
    assert all(is_product(scale(x, w), x, w) for _ in range(4))
    assert stub.launches[-1].grid == (1, 1, 1) and scale.counts().fast == 3
    given = torch.empty(100, device="cuda")
    assert scale(x, w, given) is given and scale(x, y=given, w=w) is given and is_product(scale(x, w, y=None), x, w)
    x.requires_grad_()
    y = scale(x, w)
    stub.clear()
    (grad,) = torch.autograd.grad(y, (x,), torch.empty(100, device="cuda"))
    assert grad.shape == x.shape and len(stub.launches) == 1
    assert scale.as_torch_op("fx_check::configured")(x, w).grad_fn is not None
    assert pickle.loads(pickle.dumps(backward)).launch == "n" and fast_args(backward) is backward
    last = torch_stub.devices[-1]
    assert backward(*tensors(device=last)).device == last

    assert "native" in str(backward.explain(x.detach(), w)) and len(backward.precompile((x.detach(), w))[0]) == 3
    said = str(backward.explain(x.detach(), w[:5]))
    assert "backward: refused with ValueError: " in said and "backward(): argument 'w' (position 1)" in said, said
    if ON_GPU:  # Dynamo does not know the stub's
        stub.clear()
        compiled = torch.compile(lambda x, w: backward(x, w), backend="eager", fullgraph=True)
        assert compiled(x.detach(), w).shape == x.shape and len(stub.launches) == 1

    increase = fast_args(elementwise(cuda, "increase(x, by)", "x[i] += by"), launch="x[n] -> n", mutates="x")
    assert increase(w, 1.0) is increase(w, by=2.0) is None
    assert increase[2, 32] is increase.cuda_kernel[2, 32] and increase.forall(4) is increase.cuda_kernel.forall(4)
    configured = functools.partial(fast_args, dispatcher)
    for call, kind, text in (
        (lambda: scale(x.detach(), torch.empty(3, device="cuda")), ValueError, "dimension 0 of its shape (3,) is 3"),
        (lambda: scale(x.detach(), w, w[:5]), ValueError, "its shape is (5,), and must be (100,)"),
        (lambda: backward(torch.ones(3), torch.ones(3)), BufferError, "argument 'grad_y' (position 0)"),
        (lambda: backward(cuda.device_array(3), cuda.device_array(3)), TypeError, "determines who allocates the output"),
        (lambda: fast_args(out=SHARED)(dispatcher), TypeError, "out=, mutates= and backward= need launch="),
        (lambda: fast_args(lambda x: None, launch="n"), TypeError, "launch= is of a kernel for CUDA"),
        (lambda: configured(launch="m", out=SHARED), ValueError, "'m' is no dimension of an input"),
        (lambda: configured(launch="n", out=5), TypeError, "out is a notation such as"),
        (lambda: configured(launch="n", out="x[n] - > y[n]"), ValueError, "it needs one '->'"),
        *[(lambda: backward(torch.ones(100).pin_memory(), w), BufferError, "pass the output, too")] * ON_GPU,
    ):
        is_refused(call, kind, text)


def check_backward_passes_by_place(stub, torch_stub, cuda):
    """Tensors on the CPU get the backward pass of the kernel in ``cpu=``, those on a GPU that of ``backward=``."""
    on_gpu = elementwise(cuda, "on_gpu(grad_y, w, grad_x)", "grad_x[i] = grad_y[i] * w[i]")
    on_gpu = fast_args(on_gpu, out="grad_y[n], w[n] -> grad_x[n]", launch="n")

    @fast_args(out="grad_y[n], x[n], w[n] -> grad_x[n]")  # needs more than the other
    def on_cpu(grad_y, x, w, grad_x):
        grad_x[:] = grad_y * w + 0 * x

    trained_on_cpu = fast_args(scale_on_cpu.py_func, out=SHARED, backward=on_cpu)
    operator = scale_on(cuda).as_torch_op("fx_check::by_place", launch="n", cpu=trained_on_cpu, backward=on_gpu)
    for call in both_ways(operator):
        for place in ("cpu", "cuda"):
            (x, w), (given, _) = tensors(5, place), tensors(5, place)
            y = call(x.requires_grad_(), w)
            stub.clear()
            (grad,) = torch.autograd.grad(y, (x,), given)
            assert is_product(grad, given, w) and len(stub.launches) == (place == "cuda")
    assert pickle.loads(pickle.dumps(operator))._options == operator._options
    wrong = functools.partial(scale_on(cuda).as_torch_op, "fx_check::by_place_wrong", launch="n")
    for cpu, backward, text in ((trained_on_cpu, None, "those on a GPU"), (scale_on_cpu, on_gpu, "those on the CPU")):
        is_refused(functools.partial(wrong, cpu=cpu, backward=backward), ValueError, text)
