"""Where CuPy's arrays have shape, strides, dtype and memory, found on live arrays. What is not as expected is not used.

An array has C++ vectors of its shape and strides, NumPy's dtype object, and a ``MemoryPointer``, which has the address. The
arrays that are looked at here are over memory that nobody owns or touches: none is allocated.

Tried with CuPy 13 and 14.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..ground.once import once
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_GetPointer, PyCapsule_IsValid
from ..ground.readable import is_readable, read_word
from ..interpreter import DISABLED

__all__ = ["Fields", "array_type", "fields"]

_WORD, _INT = ctypes.sizeof(ctypes.c_size_t), ctypes.sizeof(ctypes.c_int)
_STREAMS, _CURRENT_STREAM, _SIGNATURE = "cupy_backends.cuda.stream", "get_current_stream_ptr", b"intptr_t (void)"
_LEGACY_STREAM = 1  # what an array's interface names for the handle 0
_NOWHERE = 1 << 40  # an address that is only written down
_SHAPES = (
    ((), "f4", None), ((3,), "i2", None), ((5,), "f8", (16,)), ((2, 3, 4), "c16", None), ((2, 3, 4), "u1", (1, 2, 6)),
    ((4, 7), "f4", (0, -8)), ((1, 2, 1, 3, 2), "?", None), ((0, 3), "i8", None),
)  # fmt: skip
"""Shape, dtype and strides in bytes of the arrays that are looked at."""


class Fields(NamedTuple):
    """The fields of an ``fx_cupy``: offsets in bytes, types and a function."""

    shape: int
    strides: int
    is_in_c_order: int
    dtype: int
    data: int
    pointer_type: int
    address: int
    device: int
    memory: int
    pooled_type: int
    chunk: int
    chunk_type: int
    chunk_memory: int
    memory_type: int
    async_type: int
    current_stream: int


def array_type() -> type | None:
    """The type of CuPy's arrays, if there is one. Does not import CuPy."""
    found = getattr(sys.modules.get("cupy"), "ndarray", None)
    return found if isinstance(found, type) else None


@once
def fields() -> "Fields | str":
    """The fields; a text that says why not, if they are not as expected."""
    if DISABLED:
        return "FASTEXCHANGE_DISABLE is set"
    try:
        return _find()
    except Exception as error:  # a CuPy with other classes
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"


def _find() -> "Fields | str":
    import cupy
    from cupy.cuda import memory

    def pointer(index: int):
        return memory.MemoryPointer(memory.UnownedMemory(_NOWHERE << 1, _NOWHERE, None, index), _NOWHERE + 512 * index)

    arrays = [cupy.ndarray(each[0], each[1], pointer(i), strides=each[2]) for i, each in enumerate(_SHAPES)]
    pointers = [array.data for array in arrays]
    if {*map(type, arrays)} != {array_type()} or {*map(type, pointers)} != {memory.MemoryPointer}:
        return "its arrays or their pointers have several types"
    current_stream = _current_stream()
    if current_stream is None:
        return f"{_STREAMS} has no C function {_CURRENT_STREAM} of the signature {_SIGNATURE.decode()!r}"
    for array in arrays:
        if why := _why_unlike_interface(array, current_stream):
            return why
    chunk, chunk_memory = _find_pooled(memory)
    return Fields(
        shape=_only("shape", arrays, lambda array, at: _vector(array, at) == array.shape),
        strides=_only("strides", arrays, lambda array, at: _vector(array, at) == array.strides),
        is_in_c_order=_only("order", arrays, lambda array, at: _int(array, at) == array.flags.c_contiguous, _INT),
        dtype=_only("dtype", arrays, lambda array, at: read_word(id(array), at) == id(array.dtype)),
        data=_only("data", arrays, lambda array, at: read_word(id(array), at) == id(array.data)),
        pointer_type=id(memory.MemoryPointer),
        address=_only("address", pointers, lambda pointer, at: read_word(id(pointer), at) == pointer.ptr),
        device=_only("device", pointers, lambda pointer, at: _int(pointer, at) == pointer.device_id, _INT),
        memory=_only("memory", pointers, lambda pointer, at: read_word(id(pointer), at) == id(pointer.mem)),
        pooled_type=id(memory.PooledMemory) if chunk else 0, chunk=chunk,
        chunk_type=id(memory._Chunk) if chunk else 0, chunk_memory=chunk_memory,
        memory_type=id(memory.Memory), async_type=id(memory.MemoryAsync),
        current_stream=ctypes.cast(current_stream, ctypes.c_void_p).value or 0,
    )  # fmt: skip


def _only(what: str, samples: Sequence, is_there: Callable[[Any, int], bool], step: int = _WORD) -> int:
    """The only offset for which `is_there` holds in all objects. Raises LookupError."""
    places = range(2 * _WORD, type(samples[0]).__basicsize__ - step + 1, step)
    found = [at for at in places if all(is_there(sample, at) for sample in samples)]
    if len(found) != 1:
        raise LookupError(f"{what}: {len(found)} places instead of one")
    return found[0]


def _int(ob, at: int) -> int:
    return ctypes.c_int.from_address(id(ob) + at).value


def _vector(ob, at: int) -> "tuple[int, ...] | None":
    """The words between the two pointers at an offset of an object; None if there are none."""
    begin, end = read_word(id(ob), at), read_word(id(ob), at + _WORD)
    if begin is None or end is None or not 0 <= end - begin <= 64 * _WORD or (end - begin) % _WORD:
        return None
    count = (end - begin) // _WORD
    if count and not is_readable(begin, count * _WORD):
        return None
    return tuple((ctypes.c_ssize_t * count).from_address(begin)) if count else ()


def _current_stream():
    """CuPy's function that gives the thread's current stream, as an address; None if it is not as expected."""
    capsule = getattr(sys.modules.get(_STREAMS), "__pyx_capi__", {}).get(_CURRENT_STREAM)
    if capsule is None or not PyCapsule_IsValid(capsule, _SIGNATURE):
        return None
    return ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(PyCapsule_GetPointer(capsule, _SIGNATURE))


def _why_unlike_interface(array, current_stream) -> str:
    """What the interface of an array says otherwise than its attributes and the current stream; "" if nothing."""
    expected = {
        "version": 3, "shape": array.shape, "strides": None if array.flags.c_contiguous else array.strides,
        "typestr": array.dtype.str, "data": (array.data.ptr if array.size else 0, False), "mask": None,
        "stream": current_stream() or _LEGACY_STREAM,
    }  # fmt: skip
    interface = array.__cuda_array_interface__
    return next((f"its interface has another {name}" for name, value in expected.items() if interface.get(name) != value), "")


def _find_pooled(memory) -> tuple[int, int]:
    """Offsets: in memory of a pool of its chunk, in that of the memory of which it is a part; zeros if they are not found."""
    try:
        owned = [memory.UnownedMemory(_NOWHERE, _NOWHERE, None, device) for device in (1, 2)]
        chunks = [memory._Chunk(each, 0, 512, None) for each in owned]
        parts = [memory.PooledMemory(chunk, lambda: None) for chunk in chunks]  # no pool: nothing is given back to it
        of = {id(part): chunk for part, chunk in zip(parts, chunks, strict=True)}
        return (
            _only("chunk", parts, lambda part, at: read_word(id(part), at) == id(of[id(part)])),
            _only("chunk's memory", chunks, lambda chunk, at: read_word(id(chunk), at) == id(chunk.mem)),
        )
    except Exception as error:  # before CuPy 14: the driver is then asked where such memory is
        reraise_passing(error)
        return 0, 0
