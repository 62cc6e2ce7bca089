"""PyTorch's compile caches: what was compiled with another declaration, or another backward pass, of an operator is not used."""

import json

import pytest
from forked import Stage, fork_python
from torch_operators import torch

from fastexchange import fast_args
from fastexchange.calls.torch_declared import code_of

CASES = {
    "dtypes": ["dtype of the kernel", "dtype by name", "dtype of the overload"],
    "declarations": [
        "mutates of the kernel", "mutates by name", "outputs of the kernel", "outputs by name", "the kernel's code",
    ],
    "gradients of kernels": ["grad kernel", "grad declared", "grad operator"],
    "gradients of functions": ["grad function", "grad calls"],
    "rules for vmap": ["rule for vmap"],
    "a value that cannot be described": ["grad unknown"],
}  # fmt: skip


@pytest.fixture(scope="module")
def stage():
    made = Stage("import torch, fastexchange\n")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_caches_of_an_older_program(cases, tmp_path, stage):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def run(new: int):  # what PyTorch compiles with a C++ compiler takes its time
        ended = stage.run("import cached_operators", str(new), *CASES[cases], seconds=900, exits=False, **environment)
        assert ended.code == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    assert run(0)[0] == []
    assert run(1)[0] == []
    different, joint_misses, misses = run(1)
    is_cached = cases != "a value that cannot be described"
    assert different == [] and (joint_misses == 0) == (misses == 0) == is_cached


@fast_args(out="x[n] -> y[n]")
def copied(x, y):
    y[:] = x


def made(factor):
    return lambda ctx, grad: grad * factor


def test_digests_of_python_functions():
    digests = [
        code_of("fx::d", [each]) for each in (made(2.0), made(2.0), made(3.0), made(torch.ones(2)), made(torch.zeros(2)))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 4 and code_of("fx::d", [copied, None, "loop"]) == ""
    assert code_of("fx::d", [made(object())]) != code_of("fx::d", [made(object())])


# ---- within a process ------------------------------------------------------------------------------------------------


@fast_args(out="x[n] -> y[n]: float64")
def wide(x, y):
    y[:] = 3 * x


@fast_args(out="x[n] -> y[n], z[n]")
def twice(x, y, z):
    y[:] = 4 * x
    z[:] = 5 * x


@fast_args(mutates=("x",))
def written(x: torch.Tensor):
    x[:] = 6 * x


@pytest.mark.parametrize("other", [wide, twice, written], ids=lambda kernel: kernel.py_func.__name__)
def test_an_operator_is_replaced_by_one_of_another_declaration(other):
    """Compiled functions are compiled again; a program that was exported raises."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return torch.ops.fx_caches.replaced(x)

    op = copied.as_torch_op("fx_caches::replaced", replace=True)
    calls = op, lambda x: torch.ops.fx_caches.replaced(x)
    functions = [torch.compile(call, backend="aot_eager", fullgraph=True) for call in calls]
    exported = torch.export.export(Module(), (torch.ones(3),)).module()
    traced = torch.fx.experimental.proxy_tensor.make_fx(Module())(torch.ones(3))
    for call in (*functions, exported, traced):
        assert call(torch.ones(3)).tolist() == [1.0] * 3
    new = other.as_torch_op("fx_caches::replaced", replace=True)
    wanted_x, given = torch.ones(3), [torch.ones(3) for _ in functions]
    wanted = new(wanted_x)
    for call, x in zip(functions, given, strict=True):
        torch.testing.assert_close(call(x), wanted, rtol=0, atol=0)
        assert torch.equal(x, wanted_x)
    for call in (exported, traced):
        with pytest.raises(AttributeError, match="replaced"):
            call(torch.ones(3))


def test_an_operator_is_replaced_by_one_with_another_backward_pass():
    compiled = torch.compile(lambda x: torch.ops.fx_caches.backward(x), backend="aot_eager", fullgraph=True)
    for factor in (2.0, 3.0):
        copied.as_torch_op("fx_caches::backward", backward=made(factor), replace=True)
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        assert x.grad.tolist() == [factor] * 3


def test_a_replaced_kernel_of_the_same_declaration_needs_no_compilation():
    """And names that lead nowhere do not pile up."""
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    compiled = torch.compile(lambda x: torch.ops.fx_caches.same(x), backend=backend, fullgraph=True)
    for kernel in (copied, fast_args(out="x[n] -> y[n]")(wide.py_func)):
        op, x = kernel.as_torch_op("fx_caches::same", replace=True), torch.ones(3)
        assert torch.equal(compiled(x), op(x))
    assert len([name for name in vars(torch.ops.fx_caches) if name.startswith("same")]) == 2


# ---- programs that were exported -------------------------------------------------------------------------------------


EXPORTED = """
    import sys, torch
    from fastexchange import fast_args

    @fast_args(out=sys.argv[2])
    def copied(x, y):
        for i in range(y.shape[0]):
            y[i] = x[i]

    class Module(torch.nn.Module):
        def forward(self, x):
            return {call}(x) + 1

    op, x = copied.as_torch_op("fx_caches::exported"), torch.ones(3)
    if sys.argv[3] == "save":
        torch.export.save(torch.export.export(Module(), (x,)), sys.argv[1])
    print(torch.export.load(sys.argv[1]).module()(x).sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["copied", "torch.ops.fx_caches.exported"])
def test_an_exported_program_is_of_one_declaration(call, tmp_path):
    def run(out: str, what: str):
        return fork_python(EXPORTED.format(call=call), str(tmp_path / "program.pt2"), out, what, check=False)

    assert run("x[n] -> y[n]", "save").stdout == run("x[n] -> y[n]", "load").stdout == "6.0\n"
    done = run("x[n] -> y[n]: float64", "load")
    assert done.returncode == 1 and "error when deserializing" in done.stderr and done.stdout == ""
