"""The truth table of JAX's arrays: see ``truth_table``. JAX has threads, so no array is made before the fork."""

import contextlib
import functools
import warnings
from typing import Any

import jax
import numpy as np
from frameworks import jax_with_64_bits, torch
from jax import numpy as jnp
from truth_table import DLPACK, FAST_ARGS, TVM_FFI, Column, Look, Row, Seen, Table, njit_on, row, rows, seen_in, use

from fastexchange import fast_args


# ---- kinds of arrays -----------------------------------------------------------------------------------------------
def value_of(array) -> list:
    """The elements of an array as JAX says them."""
    return np.asarray(array).tolist()


_row, _rows = (functools.partial(each, value=value_of) for each in (row, rows))
_x, _shared = functools.partial(jnp.arange, 4.0), jax.dlpack.from_dlpack
_slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, y: jnp.tanh(y @ y) + x, x))
_donate = jax.jit(lambda x: x + 1, donate_argnums=0)


def _pending():
    return _slow(jnp.full((200, 200), 0.01))[0, :4]


@jax.jit
@functools.partial(fast_args, out="x[n] -> y[n]")
def _raising(x, y):
    raise ValueError


def _failed():
    for _ in range(9):  # JAX raises the error at once if the pending array is computed by now
        with contextlib.suppress(Exception):
            return _raising(_pending())
    raise AssertionError


def _after(array, done):
    return array


def _over_both(*axes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "a")
    return jax.device_put(_x(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))).block_until_ready()


def _with_64_bits(look: Look) -> None:
    with jax_with_64_bits():
        look(jnp.arange(4, dtype="float64"))


PLAIN = {
    "plain": _x, "not computed yet": _pending, "0-d": lambda: jnp.array(3.0), "empty": lambda: jnp.zeros((0, 3)),
    "weakly typed": lambda: jnp.asarray(3.0), "committed": lambda: jax.device_put(_x(), jax.devices()[0]),
    "on the second device": lambda: jax.device_put(_x(), jax.devices()[1]), "sharded": lambda: _over_both("a"),
    "replicated": _over_both, "one shard": lambda: _over_both("a").addressable_data(1),
    "over a NumPy array": lambda: _shared(np.arange(32.0, dtype=np.float32)),
    "over an unaligned NumPy array": lambda: _shared(np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)),
}  # fmt: skip
WITHOUT_VALUE = {
    "deleted": lambda: _after(array := _x(), array.delete()), "donated": lambda: _after(array := _x(), _donate(array)),
    "its computation fails": _failed, "random key": lambda: jax.random.key(0),
}  # fmt: skip
OF_TORCH = {
    "over a tensor": lambda: _shared(torch.arange(4.0)), "over a view with an offset": lambda: _shared(torch.arange(32.0)[16:20]),
    "over a tensor in F order": lambda: _shared(torch.arange(6.0).reshape(2, 3).t()),
    "over a channels-last tensor": lambda: _shared(
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)),
}  # fmt: skip
STORAGES: dict[str, Any] = {
    "bool": None, "float16": None, "complex64": None, "bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e8m0fnu": "uint8",
    "float4_e2m1fn": "uint8", "int4": "int8",
}  # fmt: skip
TRACED = {
    "traced by `jax.jit`": lambda look: jax.jit(look)(_x()),
    "traced by `jax.vmap`": lambda look: jax.vmap(lambda x: (look(x), x)[1])(jnp.arange(8.0).reshape(2, 4)),
    "traced by `jax.grad`": lambda look: jax.grad(lambda x: (look(x), x.sum())[1])(_x()),
}
ROWS = [
    *_rows(PLAIN), *_rows(WITHOUT_VALUE, value=None), *_rows(OF_TORCH, needs="torch"),
    *(_row(name, lambda dtype=name: jnp.array([1, 2, 4]).astype(dtype),
           bits=storage and (lambda array, storage=storage: np.asarray(array).view(storage).tolist()))
      for name, storage in STORAGES.items()),
    Row("float64", _with_64_bits, value_of), *(Row(name, give, None) for name, give in TRACED.items()),
    _row("`jax.Ref`", lambda: jax.new_ref(_x()), value=lambda ref: ref[...].tolist()),
]  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------------------------
@functools.partial(fast_args, out="x[...] -> where[2]: uint32, elements[...]", cache=True)
def _declared(x, where, elements):
    where[0], where[1] = x.ctypes.data & 0xFFFFFFFF, x.ctypes.data >> 32
    for i in np.ndindex(x.shape):
        elements[i] = x[i]


def _seen(where, elements) -> Seen | None:
    if isinstance(elements, jax.core.Tracer):
        return None
    low, high = np.asarray(where).tolist()
    return seen_in(np.asarray(elements), low | high << 32)


def _by_torch(array) -> Seen:
    tensor = torch.from_dlpack(array)
    return Seen(tensor.data_ptr(), tensor.tolist(), tensor.dtype in (torch.uint8, torch.uint16, torch.int8))


KERNELS = [
    FAST_ARGS, Column("`@fast_args(out=…)`", (lambda array: _seen(*_declared(array)),)),
    Column("`@fast_args(out=…)` in `jax.jit`", (lambda array: _seen(*jax.jit(_declared)(array)),)),
]  # fmt: skip
COLUMNS = [
    DLPACK, Column("`torch.from_dlpack`", (_by_torch,), "torch", None if torch else "not installed"), TVM_FFI,
    njit_on("np.asarray(x)", np.asarray, "jax"), *KERNELS,
]  # fmt: skip


def _address_of(array) -> int | None:
    """See ``Table.address_of``. JAX would wait for an array that is not computed; it crashes if asked that of a deleted one."""
    try:
        return array.addressable_data(0).unsafe_buffer_pointer() if array.is_deleted() or array.is_ready() else None
    except Exception:
        return None


def begin() -> None:
    """See ``Table.begin``."""
    warnings.simplefilter("ignore")
    use(_x(), np.asarray(_x()))


_ENVIRONMENT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
TABLE = Table(__name__, "jax", ROWS, COLUMNS, _address_of, begin=begin, is_filled_at_once=True, environment=_ENVIRONMENT)
