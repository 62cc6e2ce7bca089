"""Operators of CUDA kernels with PyTorch's tensors, on the stub's devices or on a GPU: what they allocate and launch."""

import re
from pathlib import Path

import pytest
import scale_kernels
from cuda_checks import is_refused
from launches import elementwise
from stub_processes import run_operator_check, why_no_torch

from fastexchange import fast_args

CHECKS = re.findall(r"^def (check_\w+)", Path(__file__).with_name("operator_checks.py").read_text("utf-8"), re.MULTILINE)


@pytest.mark.slow  # PyTorch's part of the stub is compiled
@pytest.mark.parametrize("name", CHECKS)
def test_operators(name, package, record, stub_or_none, request):
    if stub_or_none is not None:
        if why_not := why_no_torch():
            pytest.skip(f"PyTorch has no tensors on the stub's devices: {why_not}")
        run_operator_check(name, package)
        return
    request.getfixturevalue("torch")
    if name == "check_failures":
        pytest.skip("it needs errors that the driver stub and PyTorch's inject")
    import operator_checks
    from recorder import TorchOnDevice

    pytorch = TorchOnDevice()
    try:
        getattr(operator_checks, name)(record, pytorch, package)
    finally:
        for device in pytorch.devices:
            pytorch.set_stream(device.index, 0)


def test_what_operators_do_with_fake_tensors_and_those_on_the_cpu(package):
    """With any PyTorch, also one that has no tensors on the stub's devices."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    scale = "scale(x, a: float, count: int = 1, y=None)", "y[i] = a * x[i] + count"
    kernel, on_cpu = fast_args(elementwise(package, *scale)), fast_args(scale_kernels.elementwise(*scale), out="x[n] -> y[n]")
    given = {"name": "fx_any::scale", "launch": "n", "cpu": on_cpu}
    op = kernel.as_torch_op(**given)
    assert str(op.overload._schema) == "fx_any::scale(Tensor x, float a, SymInt count=1) -> Tensor"
    device = torch.device("cuda", (torch.cuda.device_count() or 2) - 1)  # PyTorch fakes no tensor on a device that is missing
    with FakeTensorMode():
        y = op(torch.empty(3, device=device, dtype=torch.float64), 2.0)
        assert (y.shape, y.dtype, y.device) == ((3,), torch.float64, device)
    for call in (op, op.overload):
        assert call(torch.arange(3.0), 2.0, 3).tolist() == [3, 5, 7] and call(torch.empty(5, device="meta"), a=2.0).shape == (5,)
    assert kernel.as_torch_op(**given).overload is op.overload
    for options, kind, said in (
        ({"launch": (2, 32)}, ValueError, "is registered"), ({"cpu": on_cpu.py_func}, TypeError, "made by fast_args"),
        ({"cpu": fast_args(lambda x, y: None, out=on_cpu.out)}, ValueError, "same parameters"),
        ({"out": "x[n] -> y[2*n]"}, ValueError, "the same parameters and out="),
    ):  # fmt: skip
        is_refused(lambda: kernel.as_torch_op(**given | options), kind, "scale", said)  # noqa: B023
