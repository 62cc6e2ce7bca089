"""``FASTEXCHANGE_DISABLE=1``: programs do what they did, by Numba's dispatcher and NumPy's views; nothing native is loaded."""

import pytest
from interpreter import run_python

pytestmark = pytest.mark.slow
PROGRAM = """
import itertools, pickle, sys, warnings
import numpy as np
import fastexchange
from fastexchange import fast_args
try:
    import jax, torch
    import jax.numpy as jnp
except ImportError:  # only NumPy's arrays
    torch = None
warnings.simplefilter("ignore")

@fast_args(out="x[n], grad_y[n] -> grad_x[n]")
def square_backward(x, grad_y, grad_x):
    for i in range(x.shape[0]):
        grad_x[i] = 2 * x[i] * grad_y[i]
@fast_args(out="x[n] -> y[n]", backward=square_backward)
def square(x, y):
    for i in range(x.shape[0]):
        y[i] = x[i] * x[i]
@fast_args
def total(x, k=1.0):
    s = 0.0
    for value in x:
        s += value
    return s * k
@fast_args
def changed(x):
    x[0] += 1
    return x, x[1:], x * 2
@fast_args
def scaled(xs):
    for i in range(len(xs)):
        xs[i][0] *= 3
    return xs[0][0]
@fast_args(out="x[n] -> y[n]")
def never(x, y):
    y = x * 2  # noqa: F841
firsts = fast_args(lambda xs: xs[0][0] + xs[1][0])
readonly = fast_args(lambda x: np.broadcast_to(x, x.shape))
strided = fast_args(lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (72, 8)))

def say(what, call):
    try:
        result = call()
    except Exception as error:
        result = type(error).__name__, "argument 'x' (position 0)" in str(error)
    print(what, type(result).__name__, str(result).replace("\\n", " "))

def of_numpy():
    x = np.arange(3.0)
    say("total", lambda: (total(x), total(x, k=2), total.bind(x)(), total(np.arange(3)), total(b"ab"), total((1, 2))))
    say("square", lambda: (square(x), square(x, np.empty(3)), square(np.ones(3, np.float16))))
    say("changed", lambda: changed(x.copy()))
    say("firsts", lambda: (firsts([x, x]), firsts((x, x))))
    for row in (np.ones((1, 3)), np.ones((1, 3)).view(type("Sub", (np.ndarray,), {}))):
        say("same", lambda: [kernel(row) is row for kernel in (readonly, strided)])
    say("pickled", lambda: pickle.loads(pickle.dumps(total))(x))
    say("precompiled", lambda: total.precompile((np.ones(2, np.int8),)))
    say("declared", lambda: fast_args("float64(float64[::1])", nogil=True)(lambda x: x.sum())(x))
    say("from_dlpack", lambda: (fastexchange.from_dlpack(x), fastexchange.from_dlpack(b"ab", dtype="u1", copy=True)))
    say("capsule", lambda: "dltensor_versioned" in str(fastexchange.to_dlpack(x, max_version=(1, 0))))
    say("polyfill", lambda: (fastexchange.polyfill(np.ndarray), fastexchange.unpolyfill(np.ndarray)))
    for wrong in (object(), "text", np.ones(3, ">f8"), None):
        say("refused", lambda: total(wrong))
    say("too few", total)
    say("shapes", lambda: square(x, np.empty(4)))
    say("no tensor", lambda: fastexchange.from_dlpack(3))
    say("no name", lambda: [fastexchange.from_dlpack(x.astype(each)) for each in (">f8", "M8[s]")])
    say("mixed list", lambda: scaled([x[::2], x[1:]]))
    say("mixed list", lambda: (scaled([np.ones((2, 3)).T, np.ones((2, 2))]), x))
    say("readonly list", lambda: firsts([np.broadcast_to(x, (3,)), x]))
    say("never written", lambda: never(x))

def of_frameworks_converted():
    def shared(source, to, copy=None):
        made = fastexchange.convert(source, to, copy=copy)
        if to is torch.Tensor and len(made):
            made[0] = 7
        return made, source

    memory = np.zeros(192, "u1")  # JAX shares memory at multiples of 64
    readonly, x = memory[-memory.ctypes.data % 64 :][:128].view("f8").reshape(2, 8)[:, :4]
    readonly.flags.writeable = False
    for source in (b"abc", readonly, jnp.arange(3), x[::-1], x[::2], x.astype(">f8"), x):
        for to, copy in itertools.product((torch.Tensor, jax.Array), (None, True, False)):
            if (type(source), to, copy) != (bytes, jax.Array, False):
                say(f"converted, copy={copy}", lambda: shared(source, to, copy))
    half = torch.arange(3.0).to(torch.bfloat16)
    say("half", lambda: (fastexchange.convert(half, jax.Array), type(fastexchange.to_dlpack(half, max_version=(1, 0)))))
    lists = [torch.ones(4)[::2], torch.ones(2)], [jnp.ones(2), torch.ones(2)]
    say("mixed lists", lambda: (scaled(lists[0]), lists[0], firsts(lists[1])))
    say("never written", lambda: never(jnp.ones(2)))

def of_frameworks():
    x = torch.arange(3.0)
    say("total", lambda: (total(x), total(x.to(torch.int8)), total(jnp.arange(3)), total(x.numpy())))
    say("square", lambda: (square(x), square(jnp.arange(3.0)), square(x, torch.empty(3))))
    say("half", lambda: [square(x.to(dtype)) for dtype in (torch.bfloat16, torch.float16)])
    say("half", lambda: square(jnp.arange(3, dtype=jnp.bfloat16)))
    say("bits", lambda: fast_args(storage=True)(lambda x: (x[1], x[1:], x + x[0], x.view(np.int16)))(x.to(torch.bfloat16)))
    say("changed", lambda: changed(x.clone()))
    say("same", lambda: changed(x)[0] is x)
    say("returns", lambda: fast_args(returns=torch.Tensor)(lambda x: x * 2)(np.ones(2)))
    say("firsts", lambda: (firsts([x, x]), firsts((x, np.ones(2, np.float32)))))
    y = torch.ones(3, requires_grad=True)
    say("gradient", lambda: (square(y).sum().backward(), y.grad))
    say("gradient", lambda: jax.jit(jax.grad(lambda x: square(x).sum()))(jnp.ones(3)))
    say("vmap", lambda: torch.vmap(square)(torch.ones(2, 3)))
    say("compile", lambda: torch.compile(lambda x: square(x) + 1, backend="eager", fullgraph=True)(x))
    say("operator", lambda: square.as_torch_op("off::square")(x))
    z = torch.ones(3, dtype=torch.complex64)
    odd = torch.ones(3, requires_grad=True), z.conj(), z.conj().imag, torch.eye(3).to_sparse(), torch.ones(3, device="meta")
    for each in odd:
        say("refused", lambda: total(each))
    say("converted", lambda: (fastexchange.convert(np.ones(2), torch.Tensor), fastexchange.convert(x, jax.Array)))
    say("converted", lambda: (fastexchange.from_dlpack(x), fastexchange.convert(x.to(torch.bfloat16), np.ndarray)))
    say("no type", lambda: fastexchange.convert(x, int))

of_numpy()
if torch is not None:
    of_frameworks(), of_frameworks_converted()
"""
OFF = """
from fastexchange.ground.cfunction import code_cache
counts = [each.counts().fast for each in (total, square, changed, firsts)]
assert not any(counts) and code_cache.shipped + code_cache.hits + code_cache.misses == 0, (counts, vars(code_cache))
for said in (total.explain(np.ones(3)), fastexchange.explain(np.ones(3))):
    assert "FASTEXCHANGE_DISABLE is set" in str(said)

@fast_args(out="x[n] -> y[n]")
def half_written(x, y):
    y[0] = x[0]

import os
os.environ["FASTEXCHANGE_DEBUG"] = "1"
assert np.isnan(half_written(np.ones(2))[1])
from raising import check_raises
check_raises(RuntimeError, "FASTEXCHANGE_DISABLE is set", fastexchange.exchange_api, np.ndarray)  # a table of native functions
"""


def test_a_program_does_the_same(tmp_path):
    on = run_python(PROGRAM, FASTEXCHANGE_DISABLE="0").stdout.splitlines()
    off = run_python(PROGRAM + OFF, NUMBA_CACHE_DIR=str(tmp_path / "off"), FASTEXCHANGE_DISABLE="1").stdout.splitlines()
    assert len(on) > 15 and "square tuple" in "\n".join(on) and off == on and not list(tmp_path.glob("off/**/*.entry"))
