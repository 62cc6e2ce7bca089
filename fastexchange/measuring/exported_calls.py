"""The producers' part of a call: the calls that this package makes to export tensors, and nothing else.

A native loop makes thousands of them: calls of a type's exchange function and, for owning exports, of the deleter; or taking and
releasing a buffer. For types with ``__dlpack__`` only, Python calls that method.
"""

import ctypes
import time
from typing import NamedTuple

from numba import types

from .._abi import ffi
from ..arguments import forwarded
from ..arguments.buffer import PyBUF_STRIDED_RO_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from ..arguments.discovery import fields_of, learn_type
from ..arguments.dunder import DUNDER
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..exchange import wrappers
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import VERSION
from ..ground.dltensor import DL_TENSOR_WORDS, delete_managed
from ..ground.native import address_of, call_int, load, native, sizeof, stack, store
from ..producers.framework import framework_of
from .timing import Statement

__all__ = ["statements_of"]

_BORROW, _OWN, _BUFFER = 0, 1, 2
_LEAF_BYTES = 24  # three words: the kind of export, the object, the function
_BUFFER_WORDS = sizeof("fx_buffer") // 8
_CALLS = 2_000
"""The most exports in one statement: enough that the call of the loop itself, about 0.3 µs, does not matter."""
_LOOP_NS = 100_000
"""The approximate time of a statement with slow exports."""


@native
def _export(leaf):
    """Make and release one export. Returns 0; 1 after an exception, which is cleared."""
    kind = load(leaf)
    if kind == _BORROW:
        failed = call_int(load(leaf + 16), (load(leaf + 8), stack(DL_TENSOR_WORDS)))
    elif kind == _OWN:
        out = stack(1)
        store(out, 0)
        failed = call_int(load(leaf + 16), (load(leaf + 8), out))
        if load(out) == 0:
            failed = 1
        elif failed == 0:
            delete_managed(load(out))
    else:
        buffer = stack(_BUFFER_WORDS)
        failed = types.intp(PyObject_GetBuffer(load(leaf + 8), buffer, PyBUF_STRIDED_RO_FORMAT))
        if failed == 0:
            PyBuffer_Release(buffer)
    if failed != 0:
        c.PyErr_Clear()
    return types.intp(failed != 0)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def export_repeatedly(leaves, count, times):
    """Export the tensors of the `count` records at `leaves`, `times` times. Returns the number of failures."""
    failed = 0
    for _ in range(times):
        for i in range(count):
            failed += _export(leaves + _LEAF_BYTES * i)
    return failed


class _Leaf(NamedTuple):
    kind: int
    tensor: object
    function: int


def _tensors_in(value) -> list:
    """The argument itself, or the items of its tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return [value]


def _leaf(tensor, needs_owning_exports: bool) -> "_Leaf | None":
    """The record by which native code exports `tensor`; None if only ``__dlpack__`` can."""
    cls = type(tensor)
    learn_type(cls, tensor)
    fields = runtime().entries.fields(cls)
    if fields["kind"].form == structs.FORM_BUFFER:
        return _Leaf(_BUFFER, tensor, 0)
    function = fields.get("managed", 0)
    if fields["kind"].path == DUNDER.path or function == forwarded.managed_tensor_from_py_object_no_sync.address:
        found = wrappers.resolve(tensor)  # the producer may be another tensor
        return _Leaf(_OWN, *found) if found else None
    if fields["kind"].exports == structs.EXPORTS_IF_OWNING and not needs_owning_exports and fields.get("borrow"):
        return _Leaf(_BORROW, tensor, fields["borrow"])
    return _Leaf(_OWN, tensor, function)


def _is_exported(value, is_read: bool) -> bool:
    """Whether a producer exports `value`. NumPy arrays are read in place, and so are PyTorch's tensors if `is_read`."""
    if is_read and framework_of(value).is_read_in_memory(value):
        return False
    return fields_of(type(value))["kind"].exports != structs.EXPORTS_NEVER


def _dunder_statement(tensors: list) -> Statement:
    """Make a statement that calls ``__dlpack__`` as the exporting function does."""
    calls = []
    for i, tensor in enumerate(tensors):
        try:
            tensor.__dlpack__(max_version=VERSION)
            calls.append(f"x{i}.__dlpack__(max_version=version)")
        except TypeError:
            calls.append(f"x{i}.__dlpack__()")
    return Statement("; ".join(calls), {"version": VERSION, **{f"x{i}": tensor for i, tensor in enumerate(tensors)}})


_LOOP = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t)


def statements_of(value, needs_owning_exports: bool) -> list[Statement]:
    """The statements that time the producers' part of reading `value` in one call. Empty if no producer has a part.

    `needs_owning_exports`: whether the kernel holds owning exports. The statements keep `value` alive.
    """
    is_read = not needs_owning_exports
    tensors = [tensor for tensor in _tensors_in(value) if _is_exported(tensor, is_read)]
    leaves = [(tensor, _leaf(tensor, needs_owning_exports)) for tensor in tensors]
    statements = []
    if native_leaves := [leaf for _, leaf in leaves if leaf is not None]:
        records = ffi.new("intptr_t[]", 3 * len(native_leaves))
        for i, leaf in enumerate(native_leaves):
            records[3 * i], records[3 * i + 1], records[3 * i + 2] = leaf.kind, id(leaf.tensor), leaf.function
        function, address = _LOOP(export_repeatedly.address), address_of(records)
        if not function(address, len(native_leaves), 1):
            most = max(1, _CALLS // len(native_leaves))
            times = 1  # double the number until it takes long enough: the first exports are slow
            while times < most:
                start = time.perf_counter_ns()
                function(address, len(native_leaves), times)
                if time.perf_counter_ns() - start > _LOOP_NS:
                    break
                times = min(2 * times, most)
            names = {"export": function, "leaves": address, "held": (records, native_leaves)}
            statements.append(Statement(f"export(leaves, {len(native_leaves)}, {times})", names, calls=times))
    if by_method := [tensor for tensor, leaf in leaves if leaf is None]:
        statements.append(_dunder_statement(by_method))
    return statements
