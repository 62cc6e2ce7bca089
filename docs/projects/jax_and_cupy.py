"""What an array costs a consumer with and without an exchange table: ``python jax_and_cupy.py``.

Needs NumPy, JAX, PyTorch 2.10 or newer and apache-tvm-ffi; CuPy's rows need a GPU. The consumer is tvm-ffi's function that does
nothing, ``testing.nop``: it reads three arguments, by the table of their type if that has one, else by ``__dlpack__``. All rows
take turns in one process; printed is the least of 15 rounds. Read ratios.
"""

import gc
import platform
import time
from itertools import repeat

import jax
import jax.numpy as jnp
import numpy as np
import torch
import tvm_ffi

ROUNDS, CALLS = 15, 3000


def cupys_array():
    """None without CuPy or a GPU."""
    try:
        import cupy

        return cupy.ones(1, np.float32)
    except Exception:
        return None


def rows() -> dict:
    """By label the function, its arguments, and how many arrays it reads."""
    nop = tvm_ffi.get_global_func("testing.nop")
    arrays = {"PyTorch": torch.ones(1), "NumPy": np.ones(1, np.float32), "JAX": jax.block_until_ready(jnp.ones(1))}
    cupys = cupys_array()
    if cupys is not None:
        arrays |= {"CuPy": cupys, "PyTorch, on the GPU": torch.ones(1, device="cuda")}
    found = {}
    for name, x in arrays.items():
        table = "a table" if hasattr(type(x), "__dlpack_c_exchange_api__") else "no table"
        found[f"{name}: tvm-ffi, three arrays ({table})"] = nop, (x, x, x), 3
        found[f"{name}: x.__dlpack__()"] = type(x).__dlpack__, (x,), 1
        found[f"{name}: x.__dlpack_device__()"] = type(x).__dlpack_device__, (x,), 1
    x = arrays["JAX"]
    found["JAX: np.asarray(x)"] = np.asarray, (x,), 1
    found["JAX: memoryview(x)"] = memoryview, (x,), 1
    try:  # not public: the part of __dlpack__ that is native
        from jax._src.lib import _jax

        found["JAX: _jax.buffer_to_dlpack_managed_tensor(x)"] = _jax.buffer_to_dlpack_managed_tensor, (x,), 1
    except (ImportError, AttributeError):
        pass
    if cupys is not None:
        found["CuPy: x.__cuda_array_interface__"] = getattr, (cupys, "__cuda_array_interface__"), 1
    return found


def nanoseconds(function, arguments, calls: int = CALLS) -> float:
    begin = time.perf_counter()
    for _ in repeat(None, calls):
        function(*arguments)
    return (time.perf_counter() - begin) / calls * 1e9


def main() -> None:
    versions = f"jax {jax.__version__}, numpy {np.__version__}, torch {torch.__version__}, apache-tvm-ffi {tvm_ffi.__version__}"
    print(f"Python {platform.python_version()}, {versions}")
    found = rows()
    samples: dict[str, list[float]] = {label: [] for label in found}
    gc.disable()
    for _ in range(ROUNDS):
        for label, (function, arguments, count) in found.items():
            samples[label].append(nanoseconds(function, arguments) / count)
    least_of = {label: min(each) for label, each in samples.items()}
    base = least_of["PyTorch: tvm-ffi, three arrays (a table)"]
    for label, time_ in least_of.items():
        print(f"{label:48} {time_:8.0f} ns an array, {time_ / base:6.1f} x PyTorch's by its table")
    if not any(label.startswith("CuPy") for label in found):
        print("CuPy: not installed, or no GPU")


if __name__ == "__main__":
    main()
