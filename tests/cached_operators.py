"""A program that compiles operators of PyTorch: ``new`` says whether as they are declared later. Prints what went wrong.

Arguments: 0 or 1, for ``new``, and names of checks.
"""

import json
import sys

import torch
from torch._dynamo.utils import counters

from fastexchange import fast_args

new = int(sys.argv[1])
which = sys.argv[2:]
different = []


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


@fast_args(out=("x[n] -> y[n]", "x[n] -> y[n]: float64")[new])
def dtype(x, y):
    for i in range(y.shape[0]):
        y[i] = x[i] + 0.1


dtype_op = dtype.as_torch_op("fx_caches::dtype")
check("dtype of the kernel", lambda x: dtype(x) * 2, 4)
check("dtype by name", lambda x: torch.ops.fx_caches.dtype(x) * 2, 4)
check("dtype of the overload", lambda x: torch.ops.fx_caches.dtype.default(x) * 2, 4)

if new:

    @fast_args(mutates=("y",))
    def writes(x: torch.Tensor, y: torch.Tensor):
        y[:] = 7
else:

    @fast_args(mutates=("x",))
    def writes(x: torch.Tensor, y: torch.Tensor):
        x[:] = 7


writes_op = writes.as_torch_op("fx_caches::writes")


def writing(function):
    def call(x, y):
        function(x, y)
        return x.clone(), y.clone()

    return call


check("mutates of the kernel", writing(writes), 4, 4)
check("mutates by name", writing(lambda x, y: torch.ops.fx_caches.writes(x, y)), 4, 4)

if new:

    @fast_args(out="x[n] -> y[n], z[n]")
    def count(x, y, z):
        for i in range(y.shape[0]):
            y[i] = x[i] + 1
            z[i] = x[i] + 2
else:

    @fast_args(out="x[n] -> y[n]")
    def count(x, y):
        for i in range(y.shape[0]):
            y[i] = x[i] + 1


count_op = count.as_torch_op("fx_caches::count")
check("outputs of the kernel", lambda x: count(x)[0], 4)
check("outputs by name", lambda x: torch.ops.fx_caches.count(x)[0], 4)


@fast_args(out="x[n] -> y[n]")
def body(x, y):
    for i in range(y.shape[0]):
        y[i] = x[i] + new


check("the kernel's code", lambda x: body(x), 4)

factor = 2.0 + new


def helped(grad):
    return grad * factor


def backward(ctx, grad):
    return helped(grad)


@fast_args(out="grad_y[n] -> grad_x[n]")
def by_kernel(grad_y, grad_x):
    for i in range(grad_y.shape[0]):
        grad_x[i] = grad_y[i] * (2 + new)


if new:

    @fast_args(out="grad_y[n], x[n] -> grad_x[n]")
    def declared(grad_y, x, grad_x):
        for i in range(grad_y.shape[0]):
            grad_x[i] = x[i] * 5
else:

    @fast_args(out="grad_y[n] -> grad_x[n]")
    def declared(grad_y, grad_x):
        for i in range(grad_y.shape[0]):
            grad_x[i] = grad_y[i]


class Unknown:
    factor = 2.0 + new


unknown = Unknown()
by_op = by_kernel.as_torch_op("fx_caches::by_kernel", backward=backward)
for name, each in [
    ("function", backward),
    ("kernel", by_kernel),
    ("declared", declared),
    ("operator", by_op),
    ("calls", lambda ctx, grad: torch.ops.fx_caches.dtype(grad).float()),
    ("unknown", lambda ctx, grad: grad * unknown.factor),
]:
    if f"grad {name}" in which:
        body.as_torch_op(f"fx_caches::grad_{name}", backward=each)
        check(f"grad {name}", lambda x: getattr(torch.ops.fx_caches, f"grad_{name}")(x), 4)  # noqa: B023

body.as_torch_op("fx_caches::rule", vmap=lambda info, in_dims, x: (x * factor, in_dims[0]))
check("rule for vmap", lambda x: torch.vmap(torch.ops.fx_caches.rule)(x), (2, 4))

print(
    json.dumps([different, counters["aot_autograd"].get("autograd_cache_miss", 0), counters["inductor"]["fxgraph_cache_miss"]])
)
