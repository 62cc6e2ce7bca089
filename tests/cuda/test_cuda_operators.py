"""Operators of CUDA kernels with PyTorch's tensors, on the stub's devices or on a GPU: what they allocate and launch."""

import re
from pathlib import Path

import pytest
from stub_processes import run_operator_check, why_no_torch

pytestmark = pytest.mark.slow  # PyTorch's part of the stub is compiled
CHECKS = re.findall(r"^def (check_\w+)", Path(__file__).with_name("operator_checks.py").read_text("utf-8"), re.MULTILINE)


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
