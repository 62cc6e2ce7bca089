"""``@cuda.jit`` kernels as operators of PyTorch. Without a GPU: what PyTorch traces, and what a call passes to the launch."""

import pytest
from cuda_checks import is_refused
from frameworks import torch
from launches import elementwise

from fastexchange import fast_args

pytestmark = pytest.mark.skipif(torch is None, reason="needs PyTorch")


def scale_on_cpu(x, a: float, count: int = 1, y=None):
    for i in range(x.shape[0]):
        y[i] = a * x[i] + count


on_cpu = fast_args(scale_on_cpu, out="x[n] -> y[n]")


SCALE = "scale(x, a: float, count: int = 1, y=None)", "y[i] = a * x[i] + count"


def scale_kernel(package):
    return fast_args(elementwise(package, *SCALE))


def name_of(package, short):
    return f"fx_{package.__name__.replace('.', '_')}::{short}"


def made(package, short, **options):
    given = {"launch": lambda x, *others: x.shape[0], "replace": True, **options}
    return scale_kernel(package).as_torch_op(name_of(package, short), **given)


def note_launches(op, launches: list) -> None:
    """Let the operator's kernel add the arguments of its launches to a list. Then Python code makes its calls."""
    op.kernel.prepare, op.kernel._vectorcall = lambda: None, 0
    op.kernel._launcher = lambda *args: launches.append(args)


def test_pytorch_traces_operators(package):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = made(package, "traced", out="x[n] -> y[n]")
    assert str(op.overload._schema).partition("(")[2] == "Tensor x, float a, SymInt count=1) -> Tensor"
    device = torch.device("cuda", (torch.cuda.device_count() or 2) - 1)  # PyTorch fakes no tensor on a device that is missing
    with FakeTensorMode():
        for dtype in (torch.float32, torch.float64):
            y = op(torch.empty(3, device=device, dtype=dtype), 2.0)
            assert (y.shape, y.dtype, y.device) == ((3,), dtype, device)
    meta = op(torch.empty(5, device="meta"), a=2.0)
    assert meta.shape == (5,)


def test_a_call_launches_the_kernel_with_its_outputs(package):
    op, launches, x = made(package, "launched", out="x[n] -> y[n]"), [], torch.ones(3)
    note_launches(op, launches)
    for args, wanted in [((x, 2.0), (2.0, 1)), ((x, 2.0, 7), (2.0, 7))]:
        y = op.kernel(*args)
        assert torch.is_tensor(y) and y.shape == (3,) and y.dtype == x.dtype
        given = launches.pop()
        assert given[0] is x and given[1:3] == wanted and given[3] is y
    is_refused(lambda: op.kernel(torch.ones(3, 3), 2.0), ValueError, "dimensions")
    assert not launches


def test_calls_with_tensors_on_the_cpu(package):
    both, x = made(package, "both", cpu=on_cpu), torch.arange(3.0)
    for call in (both, both.overload):
        assert call(x, 2.0, 3).tolist() == call(x, a=2.0, count=3).tolist() == [3, 5, 7]
    alone = made(package, "alone", out="x[n] -> y[n]")
    is_refused(lambda: alone(x, 2.0), NotImplementedError, "CPU")
    is_refused(lambda: alone.kernel(x, 2.0), BufferError, "CPU")


def test_a_kernel_that_writes_to_an_argument(package):
    @fast_args
    @package.jit
    def add_there(x: "torch.Tensor", y: "torch.Tensor"):
        i = package.grid(1)
        if i < x.shape[0]:
            y[i] += x[i]

    op, launches = add_there.as_torch_op(name_of(package, "add_to"), launch=(1, 32), mutates="y"), []
    assert str(op.overload._schema).partition("(")[2] == "Tensor x, Tensor(a!) y) -> ()"
    note_launches(op, launches)
    x, y = torch.ones(3), torch.zeros(3)
    assert op.kernel(x, y) is None and launches[0][0] is x and launches[0][1] is y

    @fast_args(cuda=add_there, launch=(1, 32), mutates="y")
    def add(x: "torch.Tensor", y: "torch.Tensor"):
        y += x

    op = add.as_torch_op(name_of(package, "add_to_both"))
    for call in (op, op.overload) * 3:
        version = y._version
        call(x, y)
        assert y._version == version + 1
    assert y.tolist() == [6, 6, 6]
    for device in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.overload.name(), device)


def test_the_same_kernel_is_registered_once(package):
    kernel, given = scale_kernel(package), {"name": name_of(package, "once"), "launch": (1, 32), "out": "x[n] -> y[n]"}
    assert kernel.as_torch_op(**given).overload is kernel.as_torch_op(**given).overload
    is_refused(lambda: kernel.as_torch_op(**given | {"launch": (2, 32)}), ValueError, "is registered")


BAD = {
    r"launch is \(grid, block\)": (TypeError, {"launch": 5, "out": "x[n] -> y[n]"}),
    "one to three": (ValueError, {"launch": (1, ()), "out": "x[n] -> y[n]"}),
    "neither outputs": (TypeError, {}),
    "made by fast_args": (TypeError, {"cpu": scale_on_cpu}),
    "same parameters": (ValueError, {"cpu": fast_args(lambda x, y: None, out="x[n] -> y[n]")}),
    "out=": (ValueError, {"cpu": on_cpu, "out": "x[n] -> y[2*n]"}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(package, message):
    error, options = BAD[message]
    with pytest.raises(error, match=message) as caught:
        scale_kernel(package).as_torch_op(**{"name": "fx_cuda::bad", "launch": (1, 32), **options})
    assert "scale" in str(caught.value)


LAUNCHES = {
    "tasks": "n", "grid": ("(n + 127) // 128", 128), "fixed": (8, 128), "function": lambda x, *others: x.shape[0],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_operators_on_a_gpu(package, launch):
    op = made(package, "on_gpu", cpu=on_cpu, launch=launch, backward=lambda ctx, grad: (3.0 * grad, None, None))
    x = torch.arange(1000.0, device="cuda")  # all results are exact, also those of fused multiply-adds
    assert torch.equal(op(x, 3.0), 3 * x + 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = op(x, 3.0, 2)
    stream.synchronize()
    assert torch.equal(y, 3 * x + 2)
    compiled = torch.compile(lambda x: op(x * 2, 3.0) - 1, fullgraph=True)
    assert torch.equal(compiled(x), 6 * x)
    leaf = x.clone().requires_grad_()
    op(leaf, 3.0).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3.0))
    assert set(torch.library.opcheck(op.overload, (x, 3.0)).values()) == {"SUCCESS"}
