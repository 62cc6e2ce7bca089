"""Operators of kernels for CUDA with PyTorch's tensors on the driver stub's devices: what they allocate and launch."""

import ast
from pathlib import Path

import pytest
from stub_processes import run_operator_check, why_no_torch

pytestmark = pytest.mark.slow  # PyTorch's part of the stub is compiled
CHECKS = [
    each.name
    for each in ast.parse(Path(__file__).with_name("operator_checks.py").read_text(encoding="utf-8")).body
    if isinstance(each, ast.FunctionDef) and each.name.startswith("check_")
]


@pytest.mark.parametrize("name", CHECKS)
def test_operators(name, package, stub):
    if why_not := why_no_torch():
        pytest.skip(f"PyTorch has no tensors on the stub's devices: {why_not}")
    run_operator_check(name, package)
