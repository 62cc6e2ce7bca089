"""PyTorch's compile caches: what was compiled with another declaration, or another backward pass, of an operator is not used."""

import functools
import json

import pytest
from forked import fork_python, stage_for_module
from scale_kernels import elementwise
from torch_operators import torch

from fastexchange import fast_args
from fastexchange.torch.declaration import code_of

compiled_whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
PROGRAM = '''
"""Compiles functions that call operators. Arguments: 0 or 1, whether they are declared as they are later; names of checks."""
import json, sys, torch
from fastexchange import fast_args
from scale_kernels import elementwise
from torch._dynamo.utils import counters

new, which, different = int(sys.argv[1]), sys.argv[2:], []
ops = torch.ops.fx_caches

def check(name, function, *shapes):
    """Note if a function gives something else compiled than as it is."""
    if name not in which:
        return
    results = []
    for call in function, torch.compile(function, fullgraph=True):
        given = [torch.ones(shape, requires_grad=name.startswith("grad")) for shape in shapes]
        made = call(*given)
        if name.startswith("grad"):
            made.sum().backward()
            given = [each.grad for each in given]
        made = made if isinstance(made, tuple) else (made,)
        results.append([(each.tolist(), str(each.dtype)) for each in (*made, *given) if each is not None])
    if results[0] != results[1]:
        different.append((name, results))

def kernel(head, statement, **options):
    return fast_args(elementwise(head, statement, new=new, torch=torch), **options)

dtype = kernel("dtype(x, y)", "y[i] = x[i] + 0.1", out=("x[n] -> y[n]", "x[n] -> y[n]: float64")[new])
writes = kernel("writes(x: torch.Tensor, y: torch.Tensor)", ("x[i] = 7", "y[i] = 7")[new], mutates=("xy"[new],))
if new:
    count = kernel("count(x, y, z)", "y[i], z[i] = x[i] + 1, x[i] + 2", out="x[n] -> y[n], z[n]")
    declared = kernel("declared(grad_y, x, grad_x)", "grad_x[i] = x[i] * 5", out="grad_y[n], x[n] -> grad_x[n]")
else:
    count = kernel("count(x, y)", "y[i] = x[i] + 1", out="x[n] -> y[n]")
    declared = kernel("declared(grad_y, grad_x)", "grad_x[i] = grad_y[i]", out="grad_y[n] -> grad_x[n]")
body = kernel("body(x, y)", "y[i] = x[i] + new", out="x[n] -> y[n]")
by_kernel = kernel("by_kernel(grad_y, grad_x)", "grad_x[i] = grad_y[i] * (2 + new)", out="grad_y[n] -> grad_x[n]")
factor = 2.0 + new

def helped(grad):
    return grad * factor

def backward(ctx, grad):
    return helped(grad)

def writing(function):
    def call(x, y):
        function(x, y)
        return x.clone(), y.clone()
    return call

unknown = type("Unknown", (), {"factor": 2.0 + new})()
dtype_op, writes_op, count_op = (each.as_torch_op(f"fx_caches::{each.__name__}") for each in (dtype, writes, count))
check("dtype of the kernel", lambda x: dtype(x) * 2, 4)
check("dtype by name", lambda x: ops.dtype(x) * 2, 4)
check("dtype of the overload", lambda x: ops.dtype.default(x) * 2, 4)
check("mutates of the kernel", writing(writes), 4, 4)
check("mutates by name", writing(lambda x, y: ops.writes(x, y)), 4, 4)
check("outputs of the kernel", lambda x: count(x)[0], 4)
check("outputs by name", lambda x: ops.count(x)[0], 4)
check("the kernel's code", lambda x: body(x), 4)
for name, each in {
    "function": backward, "kernel": by_kernel, "declared": declared,
    "operator": by_kernel.as_torch_op("fx_caches::by_kernel", backward=backward),
    "calls": lambda ctx, grad: ops.dtype(grad).float(), "unknown": lambda ctx, grad: grad * unknown.factor,
}.items():
    if f"grad {name}" in which:
        body.as_torch_op(f"fx_caches::grad_{name}", backward=each)
        check(f"grad {name}", lambda x: getattr(ops, f"grad_{name}")(x), 4)
body.as_torch_op("fx_caches::rule", vmap=lambda info, in_dims, x: (x * factor, in_dims[0]))
check("rule for vmap", lambda x: torch.vmap(ops.rule)(x), (2, 4))
misses = counters["aot_autograd"].get("autograd_cache_miss", 0), counters["inductor"]["fxgraph_cache_miss"]
print(json.dumps([different, *misses]))
'''
CASES = {
    "dtypes": ["dtype of the kernel", "dtype by name", "dtype of the overload"],
    "declarations": ["mutates of the kernel", "mutates by name", "outputs of the kernel", "outputs by name", "the kernel's code"],
    "gradients of kernels": ["grad kernel", "grad declared", "grad operator"],
    "functions": ["grad function", "grad calls", "rule for vmap"], "a value that cannot be described": ["grad unknown"],
}  # fmt: skip


stage = stage_for_module("import torch, fastexchange\n")


@pytest.mark.nightly
@pytest.mark.parametrize("cases", CASES)
def test_caches_of_an_older_program(cases, tmp_path, stage):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    (tmp_path / "cached_operators.py").write_text(PROGRAM)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cached_operators"

    def run(new: int):  # what PyTorch compiles with a C++ compiler takes its time
        said = stage.run(start, str(new), *CASES[cases], seconds=900, exits=False, **environment).check()
        return json.loads(said.splitlines()[-1])

    assert run(0)[0] == [] and run(1)[0] == []
    different, joint_misses, misses = run(1)
    assert different == [] and (joint_misses == 0) == (misses == 0) == (cases != "a value that cannot be described")


EXPORTED = """
    import sys, torch
    from fastexchange import fast_args

    @fast_args(out=sys.argv[2])
    def copied(x, y):
        y[:] = x

    class Module(torch.nn.Module):
        def forward(self, x):
            return {call}(x) + 1

    op, n = copied.as_torch_op("fx_caches::exported"), torch.export.Dim("n")
    if sys.argv[3] == "save":
        torch.export.save(torch.export.export(Module(), (torch.ones(3),), dynamic_shapes={{"x": {{0: n}}}}), sys.argv[1])
    print(torch.export.load(sys.argv[1]).module()(torch.ones(5)).sum().item())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["copied", "torch.ops.fx_caches.exported"])
def test_an_exported_program_is_of_one_declaration(call, tmp_path):
    def run(out: str, what: str):
        return fork_python(EXPORTED.format(call=call), str(tmp_path / "program.pt2"), out, what, check=False)

    assert run("x[n] -> y[n]", "save").stdout == run("x[n] -> y[n]", "load").stdout == "10.0\n"
    done = run("x[n] -> y[n]: float64", "load")
    assert done.returncode == 1 and "error when deserializing" in done.stderr and done.stdout == ""


copied = fast_args(out="x[n] -> y[n]")(elementwise("copied(x, y)", "y[i] = x[i]"))
OTHERS = {
    "another dtype": fast_args(out="x[n] -> y[n]: float64")(lambda x, y: y.fill(3 * x[0])),
    "two outputs": fast_args(out="x[n] -> y[n], z[n]")(elementwise("twice(x, y, z)", "y[i], z[i] = 4 * x[i], 5 * x[i]")),
    "an argument that is written to": fast_args(mutates=("x",))(lambda x: x.fill(6 * x[0])),
}


def made(factor):
    return lambda ctx, grad: grad * factor


def test_digests_of_python_functions():
    digests = [code_of("fx::d", [each]) for each in (made(2.0), made(2.0), made(3.0), made(torch.ones(2)), made(torch.zeros(2)))]
    assert digests[0] == digests[1] and len(set(digests)) == 4 and code_of("fx::d", [copied, None, "loop"]) == ""
    assert code_of("fx::d", [made(object())]) != code_of("fx::d", [made(object())])


class Module(torch.nn.Module):
    def forward(self, x):
        return torch.ops.fx_caches.replaced(x)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_an_operator_is_replaced_by_one_of_another_declaration(other):
    """Compiled functions are compiled again; a program that was exported raises."""
    op = copied.as_torch_op("fx_caches::replaced", replace=True)
    functions = [compiled_whole(call) for call in (op, lambda x: torch.ops.fx_caches.replaced(x))]
    exported = torch.export.export(Module(), (torch.ones(3),)).module()
    traced = torch.fx.experimental.proxy_tensor.make_fx(Module())(torch.ones(3))
    for call in (*functions, exported, traced):
        assert call(torch.ones(3)).tolist() == [1.0] * 3
    wanted_x = torch.ones(3)
    wanted = other.as_torch_op("fx_caches::replaced", replace=True)(wanted_x)
    for call in functions:
        x = torch.ones(3)
        torch.testing.assert_close(call(x), wanted, rtol=0, atol=0)
        assert torch.equal(x, wanted_x)
    for call in (exported, traced):
        with pytest.raises(AttributeError, match="replaced"):
            call(torch.ones(3))


def test_an_operator_is_replaced_by_one_with_another_backward_pass():
    compiled, x = compiled_whole(lambda x: torch.ops.fx_caches.backward(x)), torch.ones(3, requires_grad=True)
    for factor in (2.0, 3.0):
        copied.as_torch_op("fx_caches::backward", backward=made(factor), replace=True)
        assert torch.autograd.grad(compiled(x).sum(), x)[0].tolist() == [factor] * 3
