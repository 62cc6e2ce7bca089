"""``python perf/operators_jax.py``: what kernels cost in functions that JAX compiles; a minute. ``--cuda``: on a GPU.

Vectors of 4 float32 (``--size``), on the CPU. "in a graph" is one of fifty calls, one after the other, in a function of
``jax.jit``. JAX's own additions are fused into one loop there. jax-tvm-ffi's function is an empty one in C++: it reads its
arguments and does nothing. "a batch" is a function of ``jax.vmap`` over a thousand rows, "with gradients"
``jax.jit(jax.grad(…))`` of the sum. "three arrays" is a kernel that reads them, called by Python, beside ``njit`` with
``np.asarray`` of each; "and a thread": the program has another. These rows, and jax-tvm-ffi's, are the CPU's.
"""

import argparse
import sys
import threading
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import jax
import numba
import numpy as np

from fastexchange import fast_args
from fastexchange.measuring import figures, files
from fastexchange.measuring.timing import Statement, time_statements

LONG, ROWS = 50, 1000


@fast_args(out="grad_z[n] -> grad_x[n], grad_y[n]")
def add_backward(grad_z, grad_x, grad_y):
    """Write the gradients of ``x + y``."""
    for i in range(grad_z.shape[0]):
        grad_x[i] = grad_y[i] = grad_z[i]


@fast_args(out="x[n], y[n] -> z[n]", backward=add_backward)
def add(x, y, z):
    """Write ``x + y`` into `z`."""
    for i in range(x.shape[0]):
        z[i] = x[i] + y[i]


@fast_args
def first(x, y, z):
    """Return the sum of the first elements."""
    return x[0] + y[0] + z[0]


def add_on_cuda():
    """``add`` for CUDA, by numba-cuda."""
    from numba import cuda

    @fast_args(out="grad_z[n] -> grad_x[n], grad_y[n]", launch="n")
    @cuda.jit
    def backward(grad_z, grad_x, grad_y):
        i = cuda.grid(1)
        if i < grad_z.shape[0]:
            grad_x[i] = grad_y[i] = grad_z[i]

    @fast_args(out="x[n], y[n] -> z[n]", backward=backward, launch="n")
    @cuda.jit
    def add(x, y, z):
        i = cuda.grid(1)
        if i < x.shape[0]:
            z[i] = x[i] + y[i]

    return add


def functions(kernel, is_on_cuda: bool) -> dict:
    """By name, the functions that add."""
    found = {
        "kernel": kernel,
        "JAX's own": lambda x, y: x + y,
        "pure_callback": lambda x, y: jax.pure_callback(
            lambda x, y: np.asarray(x) + np.asarray(y), jax.ShapeDtypeStruct(x.shape, x.dtype), x, y, vmap_method="sequential"
        ),
    }
    if is_on_cuda:
        return found
    try:
        import jax_tvm_ffi
        import tvm_ffi
    except ImportError as error:
        print(f"no row for jax-tvm-ffi: {error}")
        return found
    jax_tvm_ffi.register_ffi_target("fx_perf_nop", tvm_ffi.get_global_func("testing.nop"), platform="cpu")
    found["jax-tvm-ffi"] = lambda x, y: jax.ffi.ffi_call("fx_perf_nop", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)
    return found


def chain(function, count: int):
    """A compiled function of `count` calls, one after the other."""

    def run(x, y):
        for _ in range(count):
            x = function(x, y)
        return x

    return jax.jit(run)


def reading() -> dict[str, Statement]:
    """By name, the calls that read three arrays."""
    arrays = [jax.numpy.arange(4.0) + i for i in range(3)]
    by_hand = numba.njit(first.py_func)
    names = {"f": first, "g": by_hand, "n": np.asarray, "x": arrays[0], "y": arrays[1], "z": arrays[2]}
    first(*arrays), by_hand(*map(np.asarray, arrays))
    return {"kernel": Statement("f(x, y, z)", names), "by hand": Statement("g(n(x), n(y), n(z))", names)}


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="how often each row is timed (25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--size", type=int, default=4, help="elements of a vector (4)")
    parser.add_argument("--cuda", action="store_true", help="on a GPU: kernels for CUDA, launched by XLA")
    options = parser.parse_args(arguments)
    x, y = jax.numpy.arange(float(options.size)), jax.numpy.ones(options.size)
    batch = jax.numpy.ones((ROWS, options.size))
    rows: dict[str, Statement] = {}
    kernel = add_on_cuda() if options.cuda else add
    found = functions(kernel, options.cuda)
    for name, function in found.items():
        for count in (1, LONG):
            rows[f"{count} in a graph/{name}"] = _statement(chain(function, count), x, y)
        if name != "jax-tvm-ffi" and not (options.cuda and name == "pure_callback"):  # seconds
            rows[f"a batch/{name}"] = _statement(jax.jit(jax.vmap(function, (0, None))), batch, y)
    rows["eager/kernel"], rows["eager/JAX's own"] = _statement(kernel, x, y), _statement(jax.jit(found["JAX's own"]), x, y)
    for name in ("kernel", "JAX's own"):
        rows[f"with gradients/{name}"] = _statement(jax.jit(jax.grad(lambda x, y, f=found[name]: f(x, y).sum())), x, y)
    times, _ = time_statements(rows, rounds=options.rounds)
    if not options.cuda:
        times |= read_times(options.rounds)
    for name in found:
        one, many = times[f"1 in a graph/{name}"], times[f"{LONG} in a graph/{name}"]
        times[f"in a graph/{name}"] = (many - one) * (1 / (LONG - 1))
    for key, samples in times.items():
        group = key.partition("/")[0]
        if not group[0].isdigit():
            ratio = figures.ratio(samples / times[f"{group}/kernel"])
            print(f"{key:<36}{figures.figure(samples, '{:9.0f} ns'.format)} ± {samples.spread:5.0f}   {ratio} x the kernel")
    if options.json:
        results = [files.result(key, samples, key) for key, samples in times.items()]
        device = {"device": {"name": jax.devices()[0].device_kind}} if options.cuda else {}
        files.write(options.json, files.machine() | device, options.rounds, results)
    return 0


def read_times(rounds: int) -> dict:
    """By name, the times of reading three arrays, without and with another thread."""
    reads = {f"three arrays/{name}": each for name, each in reading().items()}
    times = time_statements(reads, rounds=rounds)[0]
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    reads = {f"three arrays and a thread/{name}": each for name, each in reading().items()}
    times |= time_statements(reads, rounds=rounds)[0]
    ends.set()
    thread.join()
    return times


def _statement(function, x, y) -> Statement:
    function(x, y)
    return Statement("f(x, y).block_until_ready()", {"f": function, "x": x, "y": y})


if __name__ == "__main__":
    sys.exit(main())
