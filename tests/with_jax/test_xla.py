"""Kernels in functions that JAX compiles: XLA's handler calls them, without Python. The oracle is the eager call, and JAX."""

import contextlib
import gc
import importlib
import inspect
import threading
import time

import numba
import numpy as np
import pytest
from children import at_once
from forked import fork_python
from frameworks import jax_with_64_bits
from interpreter import run_python
from raising import check_raises
from scale_kernels import elementwise

from fastexchange import fast_args
from fastexchange.calls import resolve
from fastexchange.jax import xla_calls, xla_target

jax = pytest.importorskip("jax")
jnp = jax.numpy
SHAPES = (), (1,), (4,), (0, 3), (2, 1, 4, 1, 3)
DTYPES = "bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"
WIDE = "int64", "uint64", "float64", "complex128"


@fast_args(out="x[...] -> y[...]")
def twice(x, y):
    for i in np.ndindex(x.shape):
        y[i] = x[i] + x[i]


@fast_args(out="x[n], s[] -> y[n]")
def scaled(x, s, y):
    for i in range(x.size):
        y[i] = x[i] * s[()]


plus = fast_args(elementwise("plus(x, k, y)", "y[i] = x[i] + k"), out="x[n] -> y[n]")
descend = fast_args(elementwise("descend(w, g, rate)", "w[i] -= rate * g[i]"), mutates="w")
# Of NumPy: an array of JAX starts its threads, and a process that collects these tests forks others.
three, x8 = np.array(3, np.float32), np.arange(8, dtype=np.float32)


def plus_scan(x, s):
    return jax.lax.scan(lambda c, _: (scaled(c, s), None), x, None, length=2)[0]


def filling(k):
    return fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(k))


def has_safe_threads() -> bool:
    """Whether Numba has a threading layer that several threads may use at once: the libraries of OpenMP or of TBB are there."""
    for pool in ("omppool", "tbbpool"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"numba.np.ufunc.{pool}")
            return True
    return False


def calls_python(function, *arguments) -> bool:
    """Whether Python makes a kernel's call in a function of JAX."""
    return "callback" in str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize(("dtype", "shape"), [
    *((dtype, (2, 3)) for dtype in (*DTYPES, *WIDE)), *(("float32", shape) for shape in SHAPES),
])  # fmt: skip
def test_a_compiled_call_is_the_eager_one(dtype, shape):
    with jax_with_64_bits(dtype in WIDE):
        x = (jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 7).astype(dtype)
        want, got = twice(x), jax.jit(twice)(x)
        assert got.dtype == want.dtype == x.dtype and got.shape == x.shape
        assert np.array_equal(np.asarray(got), np.asarray(want))
    assert not calls_python(twice, x8)


def test_an_output_has_the_dtype_that_jax_makes_of_the_declared_one():
    wide = fast_args(out="x[n] -> y[n]: float64")(twice.py_func)
    for is_wide in (True, False):
        with jax_with_64_bits(is_wide):
            want, got = wide(jnp.asarray(x8)), jax.jit(wide)(x8)
            assert got.dtype == want.dtype == ("float64" if is_wide else "float32") and np.array_equal(got, want)
            assert want.nbytes == want.on_device_size_in_bytes() and np.array_equal(want + 1, got + 1)
            assert np.array_equal(jax.lax.scan(lambda c, _: (wide(c), None), got, None, length=2)[0], 8 * x8)


IN_JAX = {
    "jit": lambda x: jax.jit(scaled)(x, three),
    "nested": lambda x: jax.jit(lambda x: jax.jit(lambda x: scaled(x, three))(x))(x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: scaled(x, three))(x),
    "scan": lambda x: jax.lax.scan(lambda c, s: (scaled(c, s), None), x, jnp.array([1.5, 2.0]))[0],
    "while_loop": lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: scaled(c, three), x / 3),
    "cond": lambda x: jax.lax.cond(x[0] < 1, lambda x: scaled(x, three), lambda x: x, x),
    "compiled ahead of time": lambda x: jax.jit(scaled).lower(x, three).compile()(x, three),
    "of a layout that XLA has to change": lambda x: jax.jit(lambda x: scaled(x.reshape(2, 4).T[:, 0], three))(jnp.repeat(x, 1)),
}


@pytest.mark.parametrize("way", IN_JAX)
def test_wherever_jax_traces(way):
    assert np.allclose(IN_JAX[way](jnp.arange(8.0)), x8[: 4 if "layout" in way else 8] * 3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_vmap_is_a_loop_over_the_batch(is_compiled):
    x, s = jnp.arange(24.0).reshape(2, 3, 4), jnp.array([2.0, 3.0, 5.0])
    nested, outer = (jax.vmap(jax.vmap(scaled, (inner, 0)), (0, None)) for inner in (0, None))
    for mapped, given, wanted in (
        (jax.vmap(scaled, (0, None)), (x[0], three), x[0] * 3), (jax.vmap(scaled, (1, None)), (x[0].T, three), x[0] * 3),
        (jax.vmap(scaled, (None, 0)), (x8, s), x8 * s[:, None]), (jax.vmap(scaled, (0, 0)), (x[0], s), x[0] * s[:, None]),
        (nested, (x, s), x * s[:, None]), (outer, (x[0], s), x[0][:, None] * s[None, :, None]),
    ):  # fmt: skip
        assert np.array_equal((jax.jit(mapped) if is_compiled else mapped)(*given), wanted)
    assert np.array_equal(jax.vmap(plus)(x[0], s), x[0] + s[:, None])
    assert jax.vmap(scaled, (0, None))(jnp.zeros((0, 4)), three).shape == (0, 4)
    assert not calls_python(nested, x, s)


# ---- arguments -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [2, 2.5, True, 1j, np.float32(0.1), np.int8(3), np.uint64(2**40), np.complex64(2j)])
def test_numbers_are_constants_and_traced_ones_are_numbers(number):
    x = x8.astype("complex64") if np.iscomplexobj(number) else x8
    wanted = plus(jnp.asarray(x), number)
    for call in (lambda x: plus(x, number), lambda x: plus(x, k=number)):
        assert np.array_equal(jax.jit(call)(x), wanted)
    if type(number) is not np.uint64:  # JAX has 32 bits
        assert np.array_equal(jax.jit(plus)(x, number), wanted) and not calls_python(plus, x, number)
        assert np.array_equal(jax.jit(jax.vmap(plus, (None, 0)))(x, jnp.array([number, number])), [wanted] * 2)


def test_a_float_is_a_float_of_64_bits_for_the_kernel():
    seen = fast_args(out="x[n] -> y[n]: int64")(lambda x, k, y: y.fill(np.int64(k * 2**40)))
    with jax_with_64_bits(True):
        assert jax.jit(lambda x: seen(x, 0.1))(x8)[0] == int(0.1 * 2**40)


def test_tuples_none_defaults_and_keywords():
    statement = "y[i] = x[i] * pair[0][i] + pair[1][1] * k + (0 if other is None else other[i])"
    mixed = fast_args(elementwise("mixed(x, pair, other=None, k=2, y=None)", statement), out="x[n] -> y[n]")

    def function(x, z):
        return mixed(x, (z, (x, 3.0)))[0] + mixed(x, (z, (x, z[1])), k=5)[1] + mixed(x, (z, (x, 2)), other=z)[2]

    x = jnp.asarray(x8)
    assert jax.jit(function)(x, x) == function(x, x) and not calls_python(function, x, x)


def test_what_only_python_passes():
    @fast_args(out="x[n] -> y[n]")
    def summed(x, others, k, y):
        for i in range(x.size):
            y[i] = x[i] * k
            for other in others:
                y[i] += other[i]

    def function(x, k):
        return summed(x, [x, x], k)

    assert np.array_equal(jax.jit(function)(x8, 2.0), x8 * 4) and calls_python(function, x8, 2.0)
    assert np.array_equal(jax.vmap(function, (0, None))(x8.reshape(2, 4), 2.0), x8.reshape(2, 4) * 4)


@pytest.mark.parametrize("is_donated", [False, True])
def test_an_argument_that_is_written_to_is_a_result(is_donated):
    w, g = jnp.ones(8), jnp.arange(8.0)
    step = jax.jit(descend, donate_argnums=[0] if is_donated else [])
    assert np.array_equal(step(w, g, 0.5), 1 - np.arange(8) / 2)
    assert is_donated or np.array_equal(w, np.ones(8))
    assert np.array_equal(jax.jit(lambda w: descend(w, w, 1.0) + w)(g), g)
    assert np.array_equal(jax.vmap(descend, (None, 0, None))(g, jnp.ones((2, 8)), 1.0), [np.arange(8) - 1] * 2)

    both = fast_args(elementwise("both(x, y)", "x[i], y[i] = i, 1"), out="x[n] -> y[n]", mutates="x")
    made = jax.jit(both)(jnp.zeros(3))
    assert np.array_equal(made[0], [1, 1, 1]) and np.array_equal(made[1], [0, 1, 2])


# ---- what is refused -----------------------------------------------------------------------------------------------------
@fast_args
def total(x):
    return x.sum()


deleted = jnp.ones(())
deleted.delete()


@fast_args(out="x[m], n -> y[n]")
def filled(x, n, y):
    y[:] = x[0]


REFUSED = [
    (TypeError, r"total\(\): JAX traces this call.*declare the outputs.*jax\.pure_callback\(total, .*, x\)",
     lambda: jax.jit(total)(x8)),
    (TypeError, r"'x' \(position 0\): .* key<fry>; pass jax\.random\.key_data", lambda: jax.jit(twice)(jax.random.key(0))),
    (TypeError, r"twice\(\): argument 'x' \(position 0\): .* int4", lambda: jax.jit(twice)(jnp.ones(3, "int4"))),
    (TypeError, r"argument 'y' \(position 1\) is an output", lambda: jax.jit(twice)(x8, x8)),
    (TypeError, r"filled\(\): argument 'n' \(position 1\) is an extent .*static_argnames", lambda: jax.jit(filled)(x8, 3)),
    (TypeError, r"argument 'n' \(position 1\) is an extent .* int, not .*float", lambda: jax.jit(lambda x: filled(x, 2.7))(x8)),
    (TypeError, r"argument 'w' \(position 0\) is written to, and is no", lambda: jax.jit(lambda g: descend(3.0, g, 1.0))(x8)),
    (ValueError, r"scaled\(\): argument 's' \(position 1\) has 1 dimension, ", lambda: jax.jit(scaled)(x8, x8)),
    (RuntimeError, r"'s' \(position 1\) has been deleted", lambda: jax.jit(lambda x: scaled(x, deleted))(x8)),
    (BufferError, r"^descend\(\): argument 'w' \(position 0\) .* immutable.* jax\.jit",  # not traced
     lambda: descend(jnp.ones(3), jnp.ones(3), 0.5)),
    (numba.TypingError, "nothing", lambda: jax.jit(fast_args(out="x[] -> y[]")(lambda x, y: y.fill(x.nothing)))(three)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_cannot_be_traced_is_refused(error, message, call):
    check_raises(error, message, call)
    assert np.array_equal(jax.jit(lambda x: filled(x + 2, 3))(x8), [2, 2, 2])


def test_explain_in_a_function_that_jax_traces():
    seen = []
    for kernel, *others in ((plus, 2.0), (scaled, three), (total,)):
        jax.jit(lambda x: seen.append(str(kernel.explain(x, *others))) or x)(x8)  # noqa: B023
    assert "as readonly array(float32, 1d, C)" in seen[0] and "as float64" in seen[0] and "no Numba type" not in seen[0]
    assert "XLA's function 'fastexchange' makes it" in seen[1] and "path xla" in seen[1] and "path numba" not in seen[1]
    assert "refused with TypeError" in seen[2] and "as what is known when the call is made" in seen[2]
    assert "total(): JAX traces this call, and has to know what it returns" in seen[2]


def test_an_exception_of_a_kernel_is_in_jaxs_error():
    @fast_args(out="x[n] -> y[n]")
    def checked(x, y):
        for i in range(x.size):
            y[i] = x[i]
        if x[0] > 1:
            raise ValueError("too large", x[0])

    compiled = jax.jit(checked)
    for _ in range(3):
        check_raises((Exception,), r"checked\(\): ValueError: \('too large', 5.0\)", lambda: compiled(x8 + 5).block_until_ready())
        assert np.array_equal(compiled(x8), x8)
    check_raises((Exception,), "too large", lambda: jax.vmap(compiled)(jnp.array([[1.0], [2.0], [0.0]])).block_until_ready())


# ---- threads, Python, lifetimes --------------------------------------------------------------------------------------------
def in_parallel(x, y):
    for i in numba.prange(x.size):
        y[i] = x[i] * 2


def test_several_threads_and_parallel_loops():
    if not has_safe_threads():
        pytest.skip("neither OpenMP nor TBB is installed")
    parallel = fast_args(out="x[n] -> y[n]", parallel=True)(in_parallel)
    compiled = jax.jit(lambda x: parallel(parallel(x)) + parallel(x + 1) * scaled(x, three))
    x = jnp.arange(30000.0)
    wanted = np.asarray(x) * 4 + (np.asarray(x) + 1) * 2 * np.asarray(x) * 3

    def work(number):
        for _ in range(20):
            assert np.allclose(compiled(x), wanted)

    at_once(*(lambda i=i: work(i) for i in range(4)))


@pytest.mark.slow
def test_a_threading_layer_that_is_not_safe_is_refused():
    done = fork_python("""
        import jax, jax.numpy as jnp
        from fastexchange import fast_args
        from test_xla import in_parallel
        try:
            jax.jit(fast_args(out="x[n] -> y[n]", parallel=True)(in_parallel))(jnp.ones(3))
        except RuntimeError as error:
            print(error)
    """, NUMBA_THREADING_LAYER="workqueue")
    assert "NUMBA_THREADING_LAYER to omp or tbb" in done.stdout


kept: list = []


def test_a_kernel_may_run_python_and_keeps_copies():
    @fast_args(out="x[n] -> y[n]")
    def noted(x, keeps, y):
        y[:] = x
        with numba.objmode():
            kept.extend([x, y] if keeps else [x.sum()])

    assert np.array_equal(jax.jit(lambda x: noted(x, False))(x8), x8) and kept.pop() == 28
    for size in (8, 1_000_000):  # the larger one's memory is given back to the system
        assert np.array_equal(jax.jit(lambda x: noted(x * 2, True))(jnp.arange(float(size))), 2 * np.arange(float(size)))
        gc.collect()
        assert all(np.array_equal(each, 2 * np.arange(float(size))) for each in kept)
        kept.clear()
    assert np.array_equal(jax.vmap(lambda x: noted(x, True))(x8.reshape(2, 4)), x8.reshape(2, 4)) and len(kept) == 4
    kept.clear()


@pytest.mark.parametrize("returned", ["x", "(x, y, 1.0)", "np.ones(3)", "3"])
def test_a_kernel_that_returns_something_is_refused(returned):
    space: dict = {"np": np}
    exec(f"def returns(x, y):\n    x[0], y[0] = 1, 1\n    return {returned}", space)
    for options in ({"mutates": ("x", "y")}, {"out": "x[n] -> y[n]", "mutates": "x"}):
        given = (x8, x8) if "out" not in options else (x8,)
        compiled = jax.jit(fast_args(**options)(space["returns"]))
        check_raises(TypeError, r"returns\(\): a kernel that JAX traces returns None", compiled, *given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "float8_e4m3fn"])
def test_weakly_typed_numbers_that_no_number_of_pythons_becomes(dtype):
    number = jax.ShapeDtypeStruct((), dtype, weak_type=True)
    compiled = jax.jit(plus).lower(x8, number).compile()
    assert np.array_equal(compiled(x8, jnp.asarray(2, dtype)), np.arange(8.0) + 2)
    many = jax.ShapeDtypeStruct((1000,), dtype, weak_type=True)
    mapped = jax.jit(jax.vmap(plus, (None, 0))).lower(x8, many).compile()
    assert np.array_equal(mapped(x8, jnp.full(1000, 2, dtype)), np.tile(np.arange(8.0) + 2, (1000, 1)))


def test_numbers_are_the_same_by_python():
    cancelled = fast_args(out="x[n] -> y[n]")(lambda x, k, others, y: y.fill((k + np.float32(1e-9) - k) * 1e9))
    natively, by_python = jax.jit(lambda x, k: cancelled(x, k, (x,))), jax.jit(lambda x, k: cancelled(x, k, [x]))
    assert natively(x8, three)[0] == by_python(x8, three)[0] and natively(x8, 3.0)[0] == by_python(x8, 3.0)[0]


def test_arrays_of_numpy_are_what_jax_makes_of_them():
    @fast_args(out="x[n], w[n] -> y[n]")
    def both(x, w, y):
        y[:] = x + w

    assert jax.jit(lambda x: both(x, np.arange(8.0)))(x8).dtype == "float32"
    assert np.array_equal(jax.lax.scan(lambda c, _: (both(c, np.ones(8)), None), x8, None, length=2)[0], np.arange(8.0) + 2)
    assert np.array_equal(jax.jit(lambda g: descend(np.ones(8), g, 0.5))(x8), 1 - np.arange(8) / 2)


def test_nothing_keeps_what_jax_has_traced():
    with jax.checking_leaks():
        jax.jit(lambda x: plus(x, 2.0))(x8)
        jax.jit(lambda x: descend(x, x, 2.0))(x8)


def test_arrays_are_written_to_in_whatever_jax_traces():
    assert np.array_equal(jax.jit(lambda: descend(jnp.arange(8.0), jnp.arange(8.0), 1.0))(), np.zeros(8))
    with jax.disable_jit():
        assert np.array_equal(jax.jit(lambda x: descend(x, x, 1.0))(jnp.arange(8.0)), np.zeros(8))


def test_two_exported_kernels_of_one_name_are_none():
    assert xla_target._base_name(filling(1.0)) != xla_target._base_name(filling(10.0))
    same = [fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(1)) for _ in range(2)]
    assert len({xla_target._base_name(each) for each in same}) == 1


def test_a_kernel_is_recompiled_while_compiled_functions_run():
    kernel = fast_args(out=plus.out)(plus.py_func)  # with few signatures
    compiled, ends = jax.jit(kernel), threading.Event()
    compiled(x8, 1.0).block_until_ready()

    def work(number):
        if number == 3:
            for _ in range(5):
                kernel.recompile()
                time.sleep(0.005)
            ends.set()
        assert compiled(x8, 1.0)[0] == 1
        while not ends.is_set():
            assert compiled(x8, 1.0)[0] == 1

    at_once(*(lambda i=i: work(i) for i in range(4)))


def test_a_kernel_is_recompiled_between_two_steps_of_a_call(monkeypatch):
    """By another thread, after the kernel was compiled for the call: here by the step itself."""
    kernel = fast_args(out=plus.out)(plus.py_func)
    compiled, specialise = jax.jit(kernel), resolve.Resolver.specialise

    def interrupted(resolver):
        try:
            return specialise(resolver)
        finally:
            resolver.kernel.recompile()

    compiled(x8, 1.0)
    monkeypatch.setattr(resolve.Resolver, "specialise", interrupted)
    kernel.recompile()
    assert compiled(x8, 2.0)[0] == 2 and jax.jit(kernel)(x8, 3)[0] == 3
    kernel.recompile()
    assert len(kernel.precompile((np.ones(3), 1, np.ones(3)))) == 1


@pytest.mark.slow
def test_a_first_call_while_jax_traces_is_no_obstacle_to_later_ones():
    fork_python("""
        import jax, jax.numpy as jnp
        from test_xla import plus
        from fastexchange import explain
        x = jnp.arange(8.0)
        text = str(jax.make_jaxpr(lambda c: (c + plus(x, 1.0)))(x))
        assert "device_put" not in text, text
        jax.jit(lambda c: c + plus(x, 1.0))(x)
        assert explain(x).path == "jax", explain(x)
    """)


def test_callbacks_in_the_same_function():
    big = jnp.ones(100_000)

    @jax.jit
    def function(x):
        made = jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        jax.debug.callback(lambda x: None, x[:1])
        return made.sum() + scaled(x, three).sum()

    for _ in range(300):
        assert function(big) == 500_000


def test_compiled_functions_keep_their_kernels():
    functions = [jax.jit(filling(k)) for k in range(4)]  # all of one name
    for _ in range(2):
        assert [function(x8)[0] for function in functions] == [0, 1, 2, 3]
        gc.collect()


step = 1.0


def test_a_kernel_that_is_recompiled():
    global step
    stepped = fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(step))
    compiled = jax.jit(stepped)
    for step in (1.0, 5.0):
        stepped.recompile()
        assert compiled(x8)[0] == step


def test_more_arrays_than_have_room_on_the_stack():
    names = [f"a{i}" for i in range(60)]
    statement = "y[i] = " + " + ".join(f"{each}[i]" for each in names)
    many = fast_args(elementwise(f"many({', '.join(names)}, y)", statement), out="a0[n] -> y[n]")
    assert np.array_equal(jax.jit(many)(*[x8] * 60), x8 * 60) and not calls_python(many, *[x8] * 60)


def test_a_jax_that_does_not_take_the_handler_leaves_the_calls_to_python(monkeypatch):
    monkeypatch.setattr(xla_calls, "why_no_handler", lambda: "this one is another")
    assert calls_python(lambda x: scaled(x, three), x8 + 0) and np.array_equal(jax.jit(lambda x: scaled(x, three))(x8), x8 * 3)
    monkeypatch.setattr(xla_target, "why_no_handler", xla_calls.why_no_handler)
    check_raises(RuntimeError, "this one is another", xla_target.register_xla_target)


# ---- other processes -------------------------------------------------------------------------------------------------------
EXPORT = """
    import sys
    import jax, jax.export, jax.numpy as jnp
    from fastexchange import register_xla_target
    from test_xla import scaled
    symbols = jax.export.symbolic_shape("n")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(register_xla_target())]
    given = jax.ShapeDtypeStruct(symbols, jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    open(sys.argv[1], "wb").write(jax.export.export(jax.jit(scaled), disabled_checks=allowed)(*given).serialize())
"""
LOAD = """
    import gc, sys
    import jax, jax.export, jax.numpy as jnp
    from fastexchange import fast_args, register_xla_target
    register_xla_target()
    function = jax.export.deserialize(open(sys.argv[1], "rb").read())
    sources = "", sys.argv[2] + "\\nanother = scaled\\n" + sys.argv[2]
    for source in sources:
        namespace = {"__name__": "test_xla", "fast_args": fast_args}
        exec(compile(source, "<twice>", "exec"), namespace)
        try:
            function.call(jnp.arange(5.0), jnp.float32(3))
        except Exception as error:
            print(error)
    del namespace
    gc.collect()
    import test_xla
    print(function.call(jnp.arange(5.0), jnp.float32(3)), function.call(jnp.arange(3.0), jnp.float32(3)))
"""


@pytest.mark.slow
def test_exported_functions_run_in_another_process(tmp_path):
    pytest.importorskip("flatbuffers")
    path = str(tmp_path / "exported")
    fork_python(EXPORT, path)
    said = fork_python(LOAD, path, inspect.getsource(scaled.py_func)).stdout
    for words in ("no kernel test_xla.scaled", "2 kernels test_xla.scaled", "[ 0.  3.  6.  9. 12.] [0. 3. 6.]"):
        assert words in said


@pytest.mark.slow
def test_functions_that_jax_keeps_on_disk_find_the_kernel_of_their_process(tmp_path):
    said = [
        fork_python("""
            import jax, jax.monitoring, jax.numpy as jnp
            events = []
            jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            from test_xla import scaled
            assert jax.jit(lambda x: scaled(x, jnp.float32(4)) + 1)(jnp.arange(3.0)).tolist() == [1, 5, 9]
            print("cache_misses" in events, "cache_hits" in events)
        """, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).stdout for _ in range(2)
    ]
    assert said == ["True False\n", "False True\n"]


ENDING = """
    import atexit, contextlib, time
    import jax, jax.numpy as jnp, numba
    from fastexchange import fast_args

    @fast_args(out="x[n] -> y[n]")
    def raising(x, y):
        raise ValueError

    @fast_args(out="x[n] -> y[n]")
    def sleeping(x, y):
        with numba.objmode():
            time.sleep(0.2)
        y[:] = x

    atexit.register(lambda: print(calls[0](jnp.arange(3.0))))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: jnp.tanh(y @ y) + x, x))
    calls = [jax.jit(sleeping), jax.jit(raising)]
    start = slow(jnp.ones((500, 500)))[0].block_until_ready()
    calls[0](start).block_until_ready()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # on a busy machine it has been raised already
        pending = [call(slow(jnp.ones((500, 500)))[0]) for call in calls]
"""


@pytest.mark.slow
def test_a_program_ends_while_kernels_need_python():
    """JAX waits for its threads then, with the GIL. What the program does at its end comes before."""
    assert "[0. 1. 2.]" in run_python(ENDING).stdout


@pytest.mark.slow
def test_several_devices():
    fork_python("""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from test_xla import plus_scan, scaled, three
        mesh, parts = Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d")
        x = jnp.arange(8.0)
        mapped = jax.jit(jax.shard_map(lambda x: scaled(x, three), mesh=mesh, in_specs=parts, out_specs=parts))
        for check_vma in (True, False):
            lossy = jax.shard_map(
                lambda x, s: jax.lax.psum((three * plus_scan(x, s)).sum(), "d"), mesh=mesh, in_specs=(parts, PartitionSpec()),
                out_specs=PartitionSpec(), check_vma=check_vma,
            )
            assert np.allclose(jax.jit(lossy)(x, three), 3 * 28 * 9)
        try:
            jax.shard_map(lambda x: scaled(x, three), mesh=mesh, in_specs=parts, out_specs=PartitionSpec())(x)
        except ValueError as error:
            print(error)
        else:
            raise AssertionError("a result that differs between devices is taken for one that does not")
        for made in (
            mapped(x), jax.jit(scaled)(jax.device_put(x, NamedSharding(mesh, parts)), three),
            jax.pmap(lambda x: scaled(x, three))(x.reshape(4, 2)).reshape(8),
        ):
            assert np.array_equal(made, np.arange(8.0) * 3)
    """, XLA_FLAGS="--xla_force_host_platform_device_count=4")
