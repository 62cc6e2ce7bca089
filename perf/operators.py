"""``python perf/operators.py``: what kernels cost as operators of PyTorch, beside C++ operators and ``custom_op``; some minutes.

Vectors of 4 float32. Every row's function adds two of them; "in a graph" is one of nine operators in a function that
``torch.compile`` has compiled by Inductor: the difference of nine and one, an eighth of it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import floor
import torch

from fastexchange import fast_args
from fastexchange.measuring import figures, files
from fastexchange.measuring.timing import Statement, time_statements

LONG = 9


@fast_args(out="x[n], y[n] -> z[n]")
def add(x, y, z):
    """Write ``x + y`` into `z`."""
    for i in range(x.shape[0]):
        z[i] = x[i] + y[i]


@fast_args(out="grad_z[n] -> grad_x[n], grad_y[n]")
def add_backward(grad_z, grad_x, grad_y):
    """Write the gradients of ``x + y``."""
    for i in range(grad_z.shape[0]):
        grad_x[i] = grad_y[i] = grad_z[i]


@fast_args
def add_to(x: "torch.Tensor", y: "torch.Tensor"):
    """Add `x` to `y`."""
    for i in range(x.shape[0]):
        y[i] += x[i]


class AddFunction(torch.autograd.Function):
    """The kernels as users put them into autograd by hand."""

    @staticmethod
    def forward(ctx, x, y):
        """Call the kernel: grad mode is off here."""
        return add(x, y)

    @staticmethod
    def backward(ctx, grad):
        """Call the kernel of the gradients."""
        return add_backward(grad)


def operators() -> dict[str, tuple]:
    """By name, the functions that add, and those that add to a vector."""
    own = add.as_torch_op("fx_perf::add"), add_to.as_torch_op("fx_perf::add_to", mutates="y")

    @torch.library.custom_op("fx_perf::custom_add", mutates_args=())
    def custom_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return add(x, y)

    custom_add.register_fake(lambda x, y: torch.empty_like(x))

    @torch.library.custom_op("fx_perf::custom_add_to", mutates_args=("y",))
    def custom_add_to(x: torch.Tensor, y: torch.Tensor) -> None:
        add_to(x, y)

    custom_add_to.register_fake(lambda x, y: None)
    library = torch.library.Library("fx_perf", "FRAGMENT")
    library.define("python_add(Tensor x, Tensor y) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
    library.impl("python_add", add, "CPU")
    torch.library.register_fake("fx_perf::python_add", lambda x, y: torch.empty_like(x), lib=library)
    found = {
        "kernel": (add, add_to),
        "operator object": own,
        "torch.ops": tuple(op.overload for op in own),
        "Library.impl(kernel)": (torch.ops.fx_perf.python_add.default, None),
        "custom_op": (custom_add, custom_add_to),
        "PyTorch's own": (torch.add, torch.Tensor.add_),
    }
    why = floor.load_torch_op()
    if why:
        print(why)
    else:
        torch.library.register_fake("fx_floor::add", lambda x, y: torch.empty_like(x))
        torch.library.register_fake("fx_floor::add_to", lambda x, y: None)
        found["C++"] = torch.ops.fx_floor.add.default, torch.ops.fx_floor.add_to.default
    operators.library = library  # it ends with its object
    return found


def chain(function, count: int):
    """A compiled function of `count` calls, one after the other."""

    def run(x, y):
        for _ in range(count):
            x = function(x, y)
        return x

    return torch.compile(run, fullgraph=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="how often each row is timed (25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, y = torch.ones(4), torch.ones(4)
    names = {"x": x, "y": y}
    rows: dict[str, Statement] = {}
    found = operators()
    for name, (function, writing) in found.items():
        rows[f"add/{name}"] = Statement("f(x, y)", {"f": function, **names})
        if writing is not None:
            rows[f"add to/{name}"] = Statement("f(y, x)" if name == "PyTorch's own" else "f(x, y)", {"f": writing, **names})
    for name in ("operator object", "Library.impl(kernel)", "custom_op", "C++"):
        if name in found:
            for count in (1, LONG):
                compiled = chain(found[name][0], count)
                compiled(x, y)
                rows[f"{count} in a graph/{name}"] = Statement("f(x, y)", {"f": compiled, **names})
    trained = add.as_torch_op("fx_perf::add_trained", backward=add_backward)
    leaves = {"x": x.clone().requires_grad_(), "y": y.clone().requires_grad_(), "g": torch.ones(4), "grad": torch.autograd.grad}
    for name, function in (("operator object", trained), ("autograd.Function", AddFunction.apply), ("PyTorch's own", torch.add)):
        rows[f"with gradients/{name}"] = Statement("grad(f(x, y), (x, y), g)", {"f": function, **leaves})
    times, _ = time_statements(rows, rounds=options.rounds)
    for name in found:
        if f"1 in a graph/{name}" in times:
            times[f"in a graph/{name}"] = (times[f"{LONG} in a graph/{name}"] - times[f"1 in a graph/{name}"]) * (1 / (LONG - 1))
    reference = {"add": "add/kernel", "add to": "add to/kernel", "in a graph": "add/kernel"}
    for key, samples in times.items():
        group = key.partition("/")[0]
        ratio = figures.ratio(samples / times[reference.get(group, "with gradients/autograd.Function")])
        of = "autograd.Function" if group == "with gradients" else "the kernel"
        if not group[0].isdigit():
            print(f"{key:<36}{figures.figure(samples, '{:9.0f} ns'.format)} ± {samples.spread:5.0f}   {ratio} x {of}")
    if options.json:
        results = [files.result(key, samples, key) for key, samples in times.items()]
        files.write(options.json, files.machine(), options.rounds, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
