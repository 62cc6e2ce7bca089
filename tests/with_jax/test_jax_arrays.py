"""JAX's arrays: their address comes from JAX, shape and dtype from memory, and all else is as with ``np.asarray``."""

import gc
import threading
import time

import numpy as np
import pytest
from children import at_once, switch_interval
from forked import fork_python
from frameworks import jax_with_64_bits, torch
from interpreter import run_python
from numba import njit, types
from numba.core.errors import TypingError
from oracle import is_same, new_kernel, references_kept
from raising import check_raises
from scale_kernels import elementwise

from fastexchange import explain, fast_args, from_dlpack
from fastexchange.ground.native import load, store
from fastexchange.jax.array_kind import is_only_thread
from fastexchange.jax.put import putting
from fastexchange.producers.framework import framework_of

jax = pytest.importorskip("jax")
jnp = jax.numpy


@njit
def seen(x):
    total = 0.0
    for value in x.flat:
        total += value
    return total, x.shape, x.strides


total = fast_args(seen)
SHAPES = (), (1,), (4,), (0, 3), (2, 3), (2, 1, 4, 1, 3)
DTYPES = "bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float8_e4m3fn", "complex64"
HALVES = "float16", "bfloat16", "float8_e4m3fn"
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: jnp.tanh(y @ y) * 0.5 + x[0, 0], x))


@pytest.mark.parametrize(("dtype", "shapes"), [("float32", SHAPES), *((dtype, [(2, 3)]) for dtype in DTYPES)])
def test_a_kernel_sees_what_njit_sees(dtype, shapes):
    kernel = new_kernel(seen)
    for shape in shapes:
        with jax_with_64_bits(dtype == "int64"):
            array = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            array = array + 2**40 if dtype == "int64" else array / 2 if dtype in HALVES else array
        assert array.dtype == dtype
        wanted = seen(np.asarray(array).astype(np.float32) if dtype in HALVES else np.asarray(array))
        for _ in range(3):
            assert kernel(array)[:2] == wanted[:2]
        assert dtype in HALVES or kernel(array) == wanted
    assert kernel.counts().slow == (5 if shapes is SHAPES else 1)  # ranks, and (0, 3), which is in Fortran order, too


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4"])
def test_elements_that_jax_does_not_export(dtype):
    x = jnp.ones(3, dtype)
    why = rf"argument 'x' \(position 0\).* cannot be .* elements, {dtype}: .*; convert the array to a wider type"
    for value in x, (x,), [x]:
        check_raises(BufferError, why, total, value)
        assert "refused with BufferError" in total.explain(value).outcome
    for function in from_dlpack, fast_args(seen.py_func, nogil=True):
        check_raises(BufferError, dtype, function, x)


def test_native_code_reads_each_new_array():
    arrays = [jnp.full(3, i, "float32") for i in range(5000)]  # more than are known at once
    total(arrays[0])
    before = total.counts()
    for _ in range(2):
        assert [total(array)[0] for array in arrays] == [3 * i for i in range(5000)]
    assert total.counts().slow == before.slow
    assert explain(arrays[0]).path == "jax"


def test_an_array_at_the_address_of_one_that_has_died_is_waited_for():
    start = jnp.ones((200, 200)) * 0.01
    wanted = total(slow(start).block_until_ready())[0]
    for _ in range(40):
        assert total(slow(start))[0] == wanted


usleep, words = types.ExternalFunction("usleep", types.int32(types.uint32)), np.zeros(2, np.int64)
QUESTION, ANSWER = words.ctypes.data, words.ctypes.data + 8


@fast_args(out="x[n] -> y[n]", nogil=True)
def asks(x, y):
    """Ask a question. What is returned is `x`, or NaN if the answer does not come within a minute."""
    store(QUESTION, load(QUESTION) + 1)
    for _ in range(60_000):
        if load(ANSWER) >= load(QUESTION):
            y[:] = x
            return
        usleep(1000)
    y[:] = np.nan
    store(ANSWER, 10)  # to the other questions, too


ask_ten = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda i, y: asks(y + 1), x))


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x + 1], ids=["itself", "what is made of it"])
def test_the_gil_is_released_while_jax_computes(of):
    """Also if the computation may need it: a kernel of another array's computation raises an exception, or is compiled."""
    begins, ends, x, words[:] = threading.Event(), threading.Event(), jnp.zeros(10_000), (0, 10)
    of(ask_ten(x)).block_until_ready()

    def answer():
        begins.wait()
        while not ends.wait(0.001):
            words[1] = words[0]

    words[:], other = 0, threading.Thread(target=answer, daemon=True)
    other.start()
    array = of(ask_ten(x))  # whose computation goes on, because `x` is not small
    with switch_interval(1000):  # so `other` does not run before the call releases the GIL
        begins.set()
        assert total(array)[0] == of(10) * x.size
    ends.set()
    other.join()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"nogil": True}])
def test_deleted_and_donated_arrays_are_refused_as_by_jax(options, dtype):
    """After calls with them: JAX does not donate what a call still holds."""
    kernel = fast_args(seen.py_func, **options)
    give = jax.jit(lambda x: x + 1, donate_argnums=0)
    deleted, donated = jnp.ones(4, dtype), jnp.ones(4, dtype)
    for array in (deleted, donated):
        assert [kernel(array)[0] for _ in range(2)] == [4] * 2
    deleted.delete()
    heir = give(donated)
    for array in (deleted, donated):
        check_raises(RuntimeError, r"argument 'x' \(position 0\) .*Array has been deleted with shape=\w+\[4\]", kernel, array)
    assert kernel(heir)[0] == 8


DONATED = {
    "a function that needs the GIL": """
def sleeps(x):
    time.sleep(0.01)
    return float(x[0])

@fast_args(mutates="w")
def write(w):
    with numba.objmode(s="float64"):
        s = sleeps(w)
    w[0] = s

write, size = jax.jit(write, donate_argnums=0), 1000
""",
    "a function that needs no GIL": "write, size = jax.jit(lambda x: x + 1, donate_argnums=0), 1 << 20",
}


@pytest.mark.slow
@pytest.mark.parametrize("write", DONATED)
def test_an_array_that_another_thread_donates_while_a_kernel_reads_it(write):
    """The call waits, or is refused as by JAX; it does not read what the function writes. The array has been read before."""
    run_python(DONATED_BEFORE + DONATED[write] + DONATED_AFTER)


DONATED_BEFORE = """
import threading, time
import jax, numba, numpy as np
from fastexchange import fast_args

@fast_args
def spread(x):
    low = high = x[0]
    for _ in range(3):
        for i in range(x.size):
            low, high = min(low, x[i]), max(high, x[i])
    return high - low
"""
DONATED_AFTER = """
def donate(x, begins):
    begins.set()
    write(x).block_until_ready()

ends = []
donate(jax.numpy.zeros(size), threading.Event())
for _ in range(30):
    x, begins = jax.numpy.zeros(size), threading.Event()
    assert spread(x) == 0
    thread = threading.Thread(target=donate, args=(x, begins))
    thread.start()
    begins.wait()
    try:
        ends.append(spread(x))
    except RuntimeError as error:
        assert "deleted" in str(error) or "donated" in str(error), error
    thread.join()
assert set(ends) <= {0}, ends
"""


def test_an_array_that_is_deleted_while_jax_computes_it():
    start, outcomes = jnp.ones((500, 500)) * 0.01, []
    wanted = total(slow(start))[0]

    def call(array):
        try:
            outcomes.append(total(array)[0])
        except RuntimeError as error:
            outcomes.append("deleted" if "deleted" in str(error) else error)

    for _ in range(5):
        array = slow(start)
        other = threading.Thread(target=call, args=(array,))
        other.start()
        time.sleep(0.005)
        array.delete()
        other.join()
    assert set(outcomes) <= {wanted, "deleted"} and len(outcomes) == 5


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_layout_that_is_not_in_c_order():
    array = jax.dlpack.from_dlpack(torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1))
    for _ in range(3):
        assert total(array) == seen(from_dlpack(array))


def test_what_a_kernel_keeps_outlives_the_array():
    array = jnp.arange(4.0)
    kept = fast_args(lambda x: x[1:])(array)
    array.delete()
    del array
    gc.collect()
    assert type(kept) is type(jnp.ones(1)) and is_same(kept, np.arange(1, 4, dtype=np.float32))


def test_tuples_lists_and_names():
    one, two = jnp.arange(3.0), jnp.ones((2, 2))
    kernel = fast_args(lambda pair, arrays: pair[0].sum() + pair[1][0].sum() + arrays[0].sum() + arrays[1].sum())
    for _ in range(3):
        assert kernel((one, (two,)), arrays=[one, one + 1]) == 3 + 4 + 3 + 6


statement = "total[i] = both[0, i] = both[1, i] = x[i] + y[i]"
added = fast_args(elementwise("added(x, y, total, both)", statement), out="x[n], y[n] -> total[n], both[2, n]")


@pytest.mark.parametrize("size", [1, 3, 1000, 50_000, 100_000, 1_000_000])
def test_outputs_and_results(size):
    """Small ones are put, large ones exported: a kernel gets the same, each in its place, and nobody writes to them later."""
    one, two, made = jnp.arange(float(size)), jnp.ones(size, "int32"), []
    wanted, slow = np.arange(float(size), dtype=np.float32) + 1, added.counts().slow
    double = fast_args(lambda x: (x + x, x[:2]))
    for _ in range(3):
        total, both = added(one, two)
        made += [total, both]
        assert {type(total), type(both)} == {type(one)}
        doubled, part = double(one)
        assert is_same(doubled, 2 * wanted - 2) and type(part) is type(one) and part.tolist() == [0, 1][:size]
        assert jax.jit(lambda x: x * 2)(total)[-1] == 2 * size
    assert all(is_same(each, wanted if each.ndim == 1 else np.stack([wanted, wanted])) for each in made)
    assert len({each.unsafe_buffer_pointer() for each in made}) == 6 and added.counts().slow <= slow + 2


def test_results_do_not_take_the_slow_way():
    """JAX's function behind ``device_put`` is as expected."""
    assert putting()(np.ones(3, np.float32), True, None).tolist() == [1.0] * 3


def test_a_small_result_shows_no_memory_that_others_write_to():
    memory = np.zeros(64, np.float32)
    start = -memory.ctypes.data % 64 // 4  # where JAX would share it
    given = memory[start : start + 32]
    made = fast_args(lambda x: x[16:], returns=type(jnp.ones(1)))(given)
    given[:] = 7
    assert type(made) is type(jnp.ones(1)) and set(made.tolist()) == {0}


def test_ctrl_c_while_an_array_is_exported(monkeypatch):
    def interrupted_once(*args, **options):
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return own(*args, **options)

    array, calls = jnp.ones(3, "bfloat16"), []  # which has no buffer, so its __dlpack__ is called if there is no other thread
    total(jnp.ones(3, "bfloat16"))
    name = "__dlpack__" if is_only_thread() else "addressable_data"
    own = getattr(type(array), name)
    monkeypatch.setattr(type(array), name, interrupted_once)
    check_raises(KeyboardInterrupt, "^$", total, array)
    assert total(array)[0] == 3


def test_outputs_that_jax_cannot_make_leave_nothing(monkeypatch):
    one = jnp.ones(3)
    added(one, one)
    with references_kept(one), monkeypatch.context() as patch:
        patch.setattr(type(framework_of(one)), "tensor_of", lambda self, array, is_new, like: 1 / 0)
        for _ in range(3):
            check_raises(ZeroDivisionError, "division", added, one, one)
    assert added(one, one)[0].tolist() == [2, 2, 2]


def test_an_error_of_jax_names_the_argument_also_of_kernels_with_outputs():
    one, two = jnp.ones(3), jnp.ones(3)
    added(one, two)
    two.delete()
    check_raises(RuntimeError, r"^added\(\): argument '\w+' \(position 1\) cannot be passed .*deleted", added, one, two)


@pytest.mark.parametrize("is_wide", [False, True])
def test_results_of_64_bits_are_what_jax_makes_of_them(is_wide):
    for dtype in map(np.dtype, ("float64", "int64", "uint64", "complex128")):
        new = fast_args(returns="x")(lambda x: np.ones(3, dtype))  # noqa: B023
        with jax_with_64_bits(is_wide):
            made = new(jnp.ones(3, "float32"))
            assert made.dtype == jax.dtypes.canonicalize_dtype(dtype) and made.nbytes == made.on_device_size_in_bytes()
            assert (made + made).tolist() == [2, 2, 2]


@fast_args
def writes(x):
    same = x
    same[0] = 1


def test_arrays_are_readonly():
    """Numba's error begins with what to do. It also shows source code, so only its first line is looked at."""
    x, fills = jnp.ones(3), fast_args(elementwise("fills(x, y)", "y[i] = x[i]"), out="x[n] -> y[n]")
    said = {
        "It writes to 'x', a readonly array: pass one that is writable, such as numpy.array\\(x\\), or": (writes, x),
        "It writes to its output 'y', and is given a readonly array: leave the output out": (fills, x, x),
        "for these argument types. It says:": (fast_args(lambda x: misspelt[0]), x),  # noqa: F821
    }
    for words, call in said.items():
        check_raises(TypingError, rf"\A.*{words}", *call)


def test_threads():
    def call(first):
        for i in range(first, first + 500):
            assert total(jnp.full(3, i, "float32"))[0] == 3 * i

    at_once(*(lambda i=i: call(1000 * i) for i in range(4)))


DEVICES = """
import jax, numpy as np
from fastexchange import fast_args
total = fast_args(lambda x: x.sum())
parts, whole = (jax.NamedSharding(jax.make_mesh((2,), ("a",)), jax.sharding.PartitionSpec(*axes)) for axes in (["a"], []))
for sharding in (parts, whole):
    array = jax.device_put(jax.numpy.arange(8.0), sharding)
    for kernel in (total, fast_args(total.py_func, nogil=True)):
        try:
            raise SystemExit(f"{kernel(array)} of an array on two devices")
        except BufferError as error:
            assert "argument 'x' (position 0)" in str(error) and "2 devices" in str(error), error
array = jax.device_put(jax.numpy.arange(8.0), jax.devices()[1])
assert [total(array) for _ in range(3)] == [28.0] * 3

@fast_args(out="x[n] -> y[n]")
def twice(x, y):
    for i in range(x.size):
        y[i] = x[i] + x[i]

def place(array):
    return array.devices(), array.committed

new = fast_args(lambda x: x + x)
for kernel in (twice, new):
    for _ in range(3):
        assert place(kernel(array)) == place(array + array)
        assert place(kernel(jax.numpy.ones(8))) == place(jax.numpy.ones(8) + 1)
    with jax.default_device(jax.devices()[1]):
        assert place(kernel(jax.numpy.ones(8))) == place(jax.numpy.ones(8) + 1)
        assert place(fast_args(lambda x: x + x, returns=jax.Array)(np.ones(8, np.float32))) == place(jax.numpy.ones(8))
big = jax.device_put(jax.numpy.ones(1 << 20), jax.devices()[1])
assert place(new(big)) == place(big) and new(big)[0] == 2
"""


def test_several_devices():
    fork_python(DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2")


OTHERWISE = {
    "the dtype stands at two places": "layout._only = lambda ob, is_there, what: 1 / 0",
    "there is no CPU": "jax.local_devices = lambda backend: 1 / 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_a_jax_that_is_otherwise_gets_the_same_answers(change):
    fork_python(f"""
    import jax, jaxlib, numpy as np
    from fastexchange import explain, fast_args
    from fastexchange.jax import layout
    array = jax.numpy.arange(4.0)
    {change}
    total = fast_args(lambda x: x.sum())
    assert [total(array) for _ in range(3)] == [6.0] * 3
    found = explain(array)
    assert found.path == "dunder" and "JAX's arrays are not read natively" in str(found), found
    """)
