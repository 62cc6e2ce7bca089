"""Operators whose implementations a program registers itself: every call gets what PyTorch's dispatcher gives it."""

import gc

import pytest
from scale_kernels import elementwise
from torch_operators import doubled, doubled_backward, native_calls, torch

from fastexchange import fast_args
from fastexchange.torch import dispatch_table as torch_table

add_one = fast_args(elementwise("add_one(x: torch.Tensor)", "x[i] += 1", torch=torch))


@pytest.fixture
def library():
    """For registrations, which are taken back."""
    made = torch.library.Library("fx_table", "FRAGMENT")
    yield made
    made._destroy()


@pytest.fixture
def operator(request):
    """A new operator, and the name that it has in the library."""
    name = f"op_{abs(hash(request.node.name))}"
    return doubled.as_torch_op(f"fx_table::{name}", backward=doubled_backward, replace=True), name


def test_dispatch_tables_are_found():
    assert torch_table.why_no_tables() == ""
    rows = [offset for offset, _ in torch_table._known.values()]
    assert len(set(rows)) == len(rows) == 8


@pytest.mark.parametrize("is_first", [False, True])
def test_autocast(operator, library, is_first):
    (op, name), x = operator, torch.arange(4.0)
    if not is_first:
        assert [op(x).dtype for _ in range(4)] == [torch.float32] * 4 and native_calls(op, x) == 1
    torch.library.register_autocast(op.name, "cpu", torch.bfloat16, lib=library)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x).dtype == getattr(torch.ops.fx_table, name)(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert op(x).dtype == torch.float32
            with torch.inference_mode():
                assert op(x).dtype == torch.bfloat16
        assert op(x).dtype == torch.float32
    library._destroy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [op(x).dtype for _ in range(5)] == [torch.float32] * 5
    assert native_calls(op, x) == 1


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "Autograd", "ADInplaceOrView", "AutocastCPU", "BackendSelect"])
@pytest.mark.filterwarnings("ignore:.*Warning only once for all operators")
def test_implementations_that_a_program_registers(operator, library, key, is_first):
    (op, name), x, leaf = operator, torch.arange(4.0), torch.arange(4.0, requires_grad=True)
    by_name = getattr(torch.ops.fx_table, name)
    if not is_first:
        for _ in range(4):
            op(x)
            op(leaf)
        assert native_calls(op, x) == native_calls(op, leaf) == 1
    options = {"allow_override": True} if "allow_override" in torch.library.Library.impl.__code__.co_varnames else {}
    library.impl(name, lambda x: x.detach() + 100, key, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(op(x), by_name(x))
    for given in (x, leaf, x):
        assert torch.equal(op(given), by_name(given))
        with torch.inference_mode():
            assert torch.equal(op(given), by_name(given))
    assert (op(x)[0] == 100) == (key != "AutocastCPU")  # autocast is off
    library._destroy()
    gc.collect()
    assert torch.equal(op(x), 2 * x) and native_calls(op, x) == native_calls(op, leaf) == 1


def test_an_operator_that_writes(library):
    op, x, calls = add_one.as_torch_op("fx_table::add_one", mutates=("x",), replace=True), torch.zeros(2), []
    for _ in range(4):
        op(x)
    assert native_calls(op, x) == 1 and x[0] == 5
    library.impl("add_one", lambda x: calls.append(x), "AutocastCPU")
    op(x)
    with torch.autocast("cpu"):
        op(x)
    assert x[0] == 6 and len(calls) == 1


def test_an_implementation_stays_when_the_operator_is_replaced(library):
    x = torch.arange(3.0)
    doubled.as_torch_op("fx_table::again")
    torch.library.register_autocast("fx_table::again", "cpu", torch.bfloat16, lib=library)
    op = fast_args(out="x[n] -> y[n]")(doubled.py_func).as_torch_op("fx_table::again", replace=True)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(x).dtype == torch.bfloat16
    library._destroy()
    assert torch.equal(op(x), 2 * x) and native_calls(op, x) == 1


def test_a_pytorch_whose_tables_are_unknown(monkeypatch):
    monkeypatch.setattr(torch_table, "_known", {})
    monkeypatch.setattr(torch_table, "why_no_tables", lambda: "because")
    op, x = doubled.as_torch_op("fx_table::unknown", replace=True), torch.arange(3.0)
    for _ in range(4):
        assert torch.equal(op(x), 2 * x)
    assert native_calls(op, x) == 0
