"""The interoperability matrix: every producer, every way in, and whether memory is shared, copied or refused.

``python tests/interoperability.py`` prints the table that docs/reference/conversions.md has; ``--write`` puts it there.
"""

import array as array_module
import functools
import importlib
import itertools
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from frameworks import NUMPY_DTYPES, StridedMemoryView, paddle, torch, tvm_ffi  # noqa: E402
from made_producers import TABLE_CAPSULE, Dunder, Legacy, Tabled, Wrapper, Wraps, capsule, exchange_table  # noqa: E402
from oracle import seen_type  # noqa: E402

from fastexchange import convert, fast_args, from_dlpack  # noqa: E402


def optional(module: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


jax, pyarrow, ml_dtypes = map(optional, ("jax", "pyarrow", "ml_dtypes"))
DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "conversions.md"
BEGIN, END = "<!-- interoperability: begin -->\n", "<!-- interoperability: end -->\n"
DTYPES = NUMPY_DTYPES if ml_dtypes is None else (*NUMPY_DTYPES, "bfloat16")

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda a: a.reshape(3, 4), "F": lambda a: a.reshape(3, 4).T, "strided": lambda a: a.reshape(3, 4)[:, ::2],
    "negative strides": lambda a: a.reshape(3, 4)[::-1],
    "broadcast": lambda a: np.ndarray((3, 4), a.dtype, a, strides=(0, a.itemsize)),
    "0-d": lambda a: a[:1].reshape(()), "1-d": lambda a: a, "empty": lambda a: a[:0].reshape(0, 3),
}  # fmt: skip

TAKEN: dict[str, Callable[[np.ndarray], bool]] = {
    "plain": lambda array: array.dtype.kind != "V",
    "plain and writable": lambda array: array.dtype.kind != "V" and array.flags.writeable,
    "writable": lambda array: array.flags.writeable,
    "a vector": lambda array: array.ndim == 1 and array.dtype.kind in "iuf" and array.flags.c_contiguous,
    "bytes": lambda array: array.ndim == 1 and array.dtype == np.uint8 and array.size > 0,
    # Paddle has nothing readonly, reads negative strides wrongly, and has nine dimensions at most.
    "paddle's": lambda array: array.flags.writeable and min(array.strides, default=0) >= 0 and array.ndim <= 9,
    "of ctypes": lambda array: array.size > 0 and array.flags.c_contiguous and array.dtype.char in "bBhHiIlLqQfd",
}


def of_kind(taken: str, make: Callable[[np.ndarray], Any]):
    def made(array: np.ndarray):
        if not TAKEN[taken](array):
            raise LookupError("it has no such tensors")
        return make(array)

    return made


def if_installed(sides: dict) -> dict:
    return {name: function for name, (module, function) in sides.items() if module is not None}


def _jax(array: np.ndarray):
    made = jax.numpy.asarray(array)
    if made.dtype != array.dtype:
        raise LookupError("JAX has 32 bits unless it is told otherwise")
    return made


Older = type("Older", (Tabled,), {
    "__dlpack_c_exchange_api__": None, "__c_dlpack_exchange_api__": capsule(exchange_table(), TABLE_CAPSULE)})  # fmt: skip


def memory_view(array: np.ndarray):
    return StridedMemoryView.from_dlpack(array, stream_ptr=-1)


ALL_PRODUCERS: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "`numpy.ndarray`": (np, lambda array: array),
    "`torch.Tensor`": (torch, of_kind("writable", torch and torch.from_numpy)),
    "`paddle.Tensor`": (paddle, of_kind("paddle's", lambda array: paddle.from_dlpack(array))),
    "`cuda.core`'s `StridedMemoryView`": (StridedMemoryView, of_kind("plain", memory_view)),  # no bfloat16 goes out
    "`tvm_ffi.Tensor`": (tvm_ffi, lambda array: tvm_ffi.from_dlpack(array)),
    "`jax.Array`": (jax, _jax),
    "`pyarrow.Array`": (pyarrow, of_kind("a vector", lambda array: pyarrow.array(array))),
    "`memoryview`": (np, memoryview),
    "`array.array`": (np, of_kind("a vector", lambda array: array_module.array(array.dtype.char, array.tolist()))),
    "`bytearray`": (np, of_kind("bytes", lambda array: bytearray(array.tobytes()))),
    "`bytes`": (np, of_kind("bytes", lambda array: array.tobytes())),
    "`ctypes` array": (np, of_kind("of ctypes", np.ctypeslib.as_ctypes)),
    "exchange table": (np, of_kind("plain and writable", Tabled)),
    "exchange table, older attribute": (np, of_kind("plain and writable", Older)),
    "wrapper of an `ndarray`": (np, Wrapper),
    "only `__dlpack__`": (np, of_kind("plain", Dunder)),
    "only legacy `__dlpack__`": (np, of_kind("plain", Legacy)),
}
"""Sources of tensors: the module, None if it is not installed, and what makes one over an array's memory, or raises."""
PRODUCERS = if_installed(ALL_PRODUCERS)


_kernel = fast_args(lambda x: (x.ctypes.data, x.copy()), returns=np.ndarray, storage=True)
_items = fast_args(lambda x: [item for item in x])  # noqa: C416


def _by_kernel(tensor) -> tuple[int, list]:
    if isinstance(tensor, (memoryview, array_module.array, bytes, bytearray)):  # Numba's types of these have no copy()
        if memoryview(tensor).ndim != 1 or memoryview(tensor).format == "e":
            raise NotImplementedError("under @njit, too, these are indexed in one dimension, and have no float16")
        return _by_numpy(tensor)[0], list(_items(tensor))
    address, copied = _kernel(tensor)
    return int(address), np.asarray(copied).tolist()


def _by_numpy(tensor) -> tuple[int, list]:
    view = from_dlpack(tensor)
    return view.ctypes.data, view.tolist()


def _by(cls) -> Callable[[Any], tuple[int, list]]:
    return lambda tensor: _by_numpy(convert(tensor, cls))


def _by_pyarrow(tensor) -> tuple[int, list]:
    if not TAKEN["a vector"](from_dlpack(tensor)):
        try:
            convert(tensor, pyarrow.Array)
        except pyarrow.ArrowInvalid as error:
            raise NotImplementedError("pyarrow's arrays are plain vectors of numbers") from error
    return _by(pyarrow.Array)(tensor)


ALL_TARGETS = {"torch.Tensor": torch and torch.Tensor, "paddle.Tensor": paddle and paddle.Tensor,
               "tvm_ffi.Tensor": tvm_ffi and tvm_ffi.Tensor, "jax.Array": jax and jax.Array}  # fmt: skip
PYARROWS = pyarrow.Array if hasattr(pyarrow and pyarrow.Array, "from_dlpack") else None
ALL_WAYS: dict[str, tuple[Any, Callable[[Any], tuple[int, list]]]] = {
    "kernel": (np, _by_kernel), "`from_dlpack`": (np, _by_numpy),
    **{f"to `{name}`": (cls, _by(cls)) for name, cls in ALL_TARGETS.items()},
    "vectors to `pyarrow.Array`": (PYARROWS, _by_pyarrow),
}  # fmt: skip
"""Ways in: what gives the address of the memory that the consumer sees, and its elements, in a list."""
WAYS = if_installed(ALL_WAYS)


def unwrapped(tensor):
    return unwrapped(tensor.inner) if isinstance(tensor, Wraps) else tensor


OF_DLPACK = tuple(cls for cls in (tvm_ffi and tvm_ffi.Tensor, paddle and paddle.Tensor, StridedMemoryView) if cls is not None)
"""Types whose memory only their ``__dlpack__`` shows."""


def elements(tensor) -> np.ndarray:
    """A tensor's elements as an array, made by its own framework."""
    tensor = unwrapped(tensor)
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().numpy()
    if pyarrow is not None and isinstance(tensor, pyarrow.Array):
        return tensor.to_numpy(zero_copy_only=False)
    if isinstance(tensor, OF_DLPACK):
        return np.from_dlpack(tensor)
    if isinstance(tensor, (bytes, mmap.mmap)):
        return np.frombuffer(tensor, "u1")
    return tensor.array if hasattr(tensor, "ledger") else np.asarray(tensor)


def place(tensor) -> int:
    """Where a tensor's first element lies."""
    if jax is not None and isinstance(tensor, jax.Array):
        return tensor.unsafe_buffer_pointer()
    return elements(tensor).ctypes.data


def cases_in(layout: str, way: str) -> list[tuple[str, bool]]:
    """Dtypes, and whether readonly. Kernels are compiled for each case: in all layouts but one, they get two or three."""
    if way != "kernel" or layout == "1-d":
        return [*itertools.product(DTYPES, (False, True))]
    return [(dtype, i % 2 == 1) for i, dtype in enumerate(DTYPES[list(LAYOUTS).index(layout) % 7 :: 7])]


@functools.cache  # the tests ask tensor by tensor, and then for a line of the table
def outcome(producer: str, way: str, dtype: str, layout: str, readonly: bool) -> str | None:
    """``zero-copy``, ``copy``, ``no elements``, or the name of the exception; None where the producer has no such tensor.

    Raises AssertionError if the consumer sees other elements than the array has.
    """
    array = LAYOUTS[layout](np.arange(12).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    array.flags.writeable = not readonly
    try:
        tensor = PRODUCERS[producer](array)
    except Exception:  # each framework says no in its own way
        return None
    try:
        address, seen = WAYS[way](tensor)
    except NotImplementedError:
        return None
    except Exception as error:
        return seen_type(error).__name__
    expected = array.view("u2") if way == "kernel" and dtype in ("bfloat16", "f2") else array
    assert seen == expected.tolist(), (producer, way, dtype, layout, readonly, seen)
    if not array.size:
        return "no elements"
    return "zero-copy" if address == place(tensor) else "copy"


def summary(producer: str, way: str) -> str:
    """One cell of the table: what nearly always happens, and the exceptions."""
    seen: dict[str, list[tuple[str, str, bool]]] = {}
    for layout in LAYOUTS:
        for dtype, readonly in cases_in(layout, way):
            found = outcome(producer, way, dtype, layout, readonly)
            if found not in (None, "no elements"):
                seen.setdefault(found, []).append((dtype, layout, readonly))
    if not seen:
        return "-"
    if way == "to `jax.Array`" and set(seen) <= {"zero-copy", "copy"} and producer != "`jax.Array`":
        return "zero-copy if aligned, else copy"
    usual = "zero-copy" if "zero-copy" in seen else max(seen, key=lambda name: len(seen[name]))
    rest = [f"{_common(seen[name], seen)}: {name}" for name in sorted(seen) if name != usual]
    return "; ".join([usual, *rest])


def _common(cases: list, seen: dict) -> str:
    """In which cases it is so: those that are readonly, of one layout or of one dtype, as far as that says it all."""
    others = [case for found in seen.values() if found is not cases for case in found]
    named: list[str] = []
    for index in (2, 1, 0):
        mine = {case[index] for case in cases} - {case[index] for case in others}
        for value in sorted(mine):
            is_code = index == 0 and value != "bfloat16"
            named.append("readonly" if value is True else np.dtype(value).name if is_code else str(value))
        cases = [case for case in cases if case[index] not in mine]
    return ", ".join(named if named and not cases else [*named, "some others"])


HEAD = ["| from | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]


def line(producer: str) -> str:
    """Of the table."""
    return f"| {producer} | " + " | ".join(summary(producer, way) for way in WAYS) + " |"


if __name__ == "__main__":
    made = "\n".join([*HEAD, *map(line, PRODUCERS)]) + "\n"
    print(made)
    if "--write" in sys.argv[1:]:
        text = DOCUMENT.read_text()
        head, rest = text.split(BEGIN)
        DOCUMENT.write_text(head + BEGIN + made + END + rest.split(END)[1])
