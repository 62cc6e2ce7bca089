"""The checks of ``conformance``: a process of their own, ``python -m fastexchange.command.conformance_checks MODULE:FUNCTION``.

They call the functions as a consumer in C does: with the GIL, deleters and the allocator also without it.

Source: DLPack 1.3, ``DLPackExchangeAPI`` and the functions in it.
"""

import ctypes
import gc
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from ..ground.safe_repr import a_type_name, one_line
from . import CommandError
from .conformance import BEGINS, ENDS, HAS, MARK
from .probe import NOTHING, OK, WRONG

__all__: list[str] = []

_REQUIRED = (
    "managed_tensor_allocator", "managed_tensor_from_py_object_no_sync", "managed_tensor_to_py_object_no_sync",
    "current_work_stream",
)  # fmt: skip
_ATTRIBUTE, _CAPSULE = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"
_READONLY = 1
_CPU = 1
_THREADS, _EXPORTS = 4, 2000
_POISON = 0x5A5A5A5A
_kept: list[Any] = []
"""C functions, which may be called until the process ends."""


class _Wrong(Exception):
    """What a check has found."""


class _NoExport(_Wrong):
    """There is no export, which all other checks need."""


class _Described(NamedTuple):
    """What a DLTensor says."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[int, int, int]
    device: tuple[int, int]

    def comparable(self) -> "_Described":
        """The same without what is free: the stride of an extent of 1, and strides and address without elements."""
        if 0 in self.shape:
            return self._replace(address=0, strides=())
        return self._replace(strides=tuple(0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)))

    def compare(self, other: "_Described", whose: str) -> None:
        """Raise _Wrong if the other says something else."""
        for field, one, two in zip(self._fields, self.comparable(), other.comparable(), strict=True):
            if one != two:
                said = [f"{value:#x}" if field == "address" else value for value in (getattr(self, field), getattr(other, field))]
                raise _Wrong(f"{field} {said[0]}, {whose} says {said[1]}")


class _Table:
    """A type's table, and one of its tensors."""

    def __init__(self, tensor: Any):
        from ..ground.dlpack import ffi

        self.ffi, self.tensor = ffi, tensor
        capsule = getattr(type(tensor), _ATTRIBUTE, None)
        if capsule is None:
            raise _Wrong(f"{type(tensor).__qualname__} has no attribute {_ATTRIBUTE}")
        try:
            address = _pointer_in(capsule, _CAPSULE)
        except Exception:
            raise _Wrong(f"{_ATTRIBUTE} is no PyCapsule named {_CAPSULE.decode()!r}") from None
        self.table = ffi.cast("DLPackExchangeAPI *", address)
        version = self.table.header.version
        if version.major != 1:
            raise _Wrong(f"its version is {version.major}.{version.minor}: a consumer of 1.3 looks for version 1 in prev_api")
        missing = [name for name in _REQUIRED if not getattr(self.table, name)]
        if missing:
            raise _Wrong(f"{', '.join(missing)} is NULL: only dltensor_from_py_object_no_sync may be")

    @cached_property
    def _caller(self) -> Any:
        """A C function that calls another with three words, and writes what it returns: ctypes loses that with an exception.

        A function of two parameters does not see the third word.
        """
        import numba

        from ..ground.native import call_int, store

        @numba.cfunc("void(intp, intp, intp, intp, intp)")
        def caller(function, a, b, c, result):
            store(result, call_int(function, (a, b, c)))

        _kept.append(caller)
        return ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 5)(int(caller.address or 0))

    def call(self, name: str, *arguments: Any) -> None:
        """Call one of the functions, with the GIL. Raises the exception that it sets, and _Wrong for a wrong result."""
        given = [int(self.ffi.cast("intptr_t", each)) for each in (getattr(self.table, name), *arguments)]
        result = ctypes.c_ssize_t()
        try:
            self._caller(*given, *[0] * (4 - len(given)), ctypes.addressof(result))
        except BaseException as error:
            if result.value == 0:
                raise _Wrong(f"it returned 0 and left {type(error).__name__} set") from None
            raise
        if result.value != 0:
            raise _Wrong(f"it returned {result.value}, and set no exception")

    def export(self, tensor: Any):
        """An owning export. Raises _NoExport."""
        out = self.ffi.new("DLManagedTensorVersioned **")
        try:
            self.call("managed_tensor_from_py_object_no_sync", id(tensor), out)
        except _Wrong as wrong:
            raise _NoExport(*wrong.args) from None
        except Exception as error:
            raise _NoExport(f"it raises {one_line(error)}") from None
        if not out[0]:
            raise _NoExport("it returned 0, and wrote no tensor")
        return out[0]

    def delete(self, managed, prototype: Any = ctypes.PYFUNCTYPE) -> None:
        if managed.deleter:  # NULL: there is nothing to release
            address = int(self.ffi.cast("intptr_t", managed.deleter))
            prototype(None, ctypes.c_void_p)(address)(int(self.ffi.cast("intptr_t", managed)))

    def described(self, tensor) -> _Described:
        """What a DLTensor says. Raises _Wrong for what no tensor can say."""
        if not 0 <= tensor.ndim <= 64:
            raise _Wrong(f"it says that it has {tensor.ndim} dimensions")
        if tensor.ndim and not tensor.shape:
            raise _Wrong("its shape is NULL")
        if tensor.ndim and not tensor.strides:
            raise _Wrong("its strides are NULL: since DLPack 1.2 they have to be there")
        dtype, device, ndim = tensor.dtype, tensor.device, range(tensor.ndim)
        address = int(self.ffi.cast("intptr_t", tensor.data)) + tensor.byte_offset
        shape, strides = tuple(tensor.shape[i] for i in ndim), tuple(tensor.strides[i] for i in ndim)
        if address == 0 and 0 not in shape:
            raise _Wrong("it has elements, and its address is NULL")
        kind = int(dtype.code), dtype.bits, dtype.lanes
        return _Described(address, shape, strides, kind, (int(device.device_type), device.device_id))

    def references(self) -> int:
        return sys.getrefcount(self.tensor)


def _pointer_in(capsule: Any, name: bytes) -> int:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    return get(capsule, name)


def _check_export(table: _Table) -> str:
    managed = table.export(table.tensor)
    version = managed.version
    if version.major != 1:
        raise _Wrong(f"its version is {version.major}.{version.minor}")
    found = table.described(managed.dl_tensor)
    readonly = bool(managed.flags & _READONLY)
    table.delete(managed)
    return f"{found.shape}, strides {found.strides}, {'readonly' if readonly else 'writable'}"


def _check_dunder(table: _Table) -> str:
    """The table and ``__dlpack__`` show the same tensor."""
    if not hasattr(table.tensor, "__dlpack__"):
        raise _Wrong("the type has no __dlpack__: consumers without the table cannot read it")
    name = b"dltensor_versioned"
    try:
        capsule = table.tensor.__dlpack__(max_version=(1, 3))
        other = table.ffi.cast("DLManagedTensorVersioned *", _pointer_in(capsule, name))
    except Exception as error:
        raise _Wrong(f"__dlpack__(max_version=(1, 3)) gives no capsule named {name.decode()!r} ({one_line(error)})") from None
    managed = table.export(table.tensor)
    both = table.described(managed.dl_tensor), table.described(other.dl_tensor)
    flags = managed.flags & _READONLY, other.flags & _READONLY
    table.delete(managed)
    both[0].compare(both[1], "__dlpack__")
    if flags[0] != flags[1]:
        raise _Wrong("it and __dlpack__ differ in whether it is readonly")
    return ""


def _check_references(table: _Table) -> str:
    before = table.references()
    held = [table.export(table.tensor) for _ in range(100)]
    for managed in held:
        table.delete(managed)
    if (after := table.references()) != before:
        raise _Wrong(f"a hundred exports and their deleters leave {after - before:+} references to the tensor")
    return ""


def _check_deleter(table: _Table) -> str:
    before, managed = table.references(), [table.export(table.tensor) for _ in range(2)]

    def delete() -> None:
        for each in managed:
            table.delete(each, ctypes.CFUNCTYPE)

    _in_threads(delete, 1)
    if (after := table.references()) != before:
        raise _Wrong(f"it leaves {after - before:+} references to the tensor")
    return ""


def _in_threads(work: Callable[[], None], count: int) -> None:
    """Do `work` in so many threads. Raises what it raises in one of them."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _check_view(table: _Table) -> str:
    if not table.table.dltensor_from_py_object_no_sync:
        return "NULL: each call has to take an owning export"
    managed = table.export(table.tensor)
    is_readonly = bool(managed.flags & _READONLY)
    table.delete(managed)
    view, before = table.ffi.new("DLTensor *"), table.references()
    if is_readonly:
        try:
            table.call("dltensor_from_py_object_no_sync", id(table.tensor), view)
        except BufferError as error:
            return f"refused, as a view cannot say that it is readonly: {one_line(error)[:80]}"
        except Exception as error:
            raise _Wrong(f"it refuses readonly memory by {type(error).__name__}: that has to be a BufferError") from None
        raise _Wrong("it gives a view of readonly memory, which cannot say that it is readonly")
    for _ in range(100):
        table.call("dltensor_from_py_object_no_sync", id(table.tensor), view)
    if (after := table.references()) != before:
        raise _Wrong(f"a hundred views leave {after - before:+} references to the tensor: they own nothing")
    managed = table.export(table.tensor)
    both = table.described(view[0]), table.described(managed.dl_tensor)
    table.delete(managed)
    both[0].compare(both[1], "the export")
    return ""


def _access(flag: int) -> str:
    return "a readonly" if flag else "a writable"


def _check_import(table: _Table) -> str:
    before, managed = table.references(), table.export(table.tensor)
    given, was_readonly = table.described(managed.dl_tensor), managed.flags & _READONLY
    deleted: list[int] = []
    deleter, hears = int(table.ffi.cast("intptr_t", managed.deleter)), bool(managed.deleter)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def delete(address):
        deleted.append(address)
        if len(deleted) == 1:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(address)

    if hears:
        address = ctypes.cast(delete, ctypes.c_void_p).value
        managed.deleter = table.ffi.cast("void (*)(struct DLManagedTensorVersioned *)", address)
    _kept.append(delete)
    out = table.ffi.new("intptr_t *")
    table.call("managed_tensor_to_py_object_no_sync", managed, out)
    if not out[0]:
        raise _Wrong("it returned 0, and made no object")
    made = ctypes.cast(out[0], ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))  # `made` has its own reference
    if not isinstance(made, type(table.tensor)) and not isinstance(table.tensor, type(made)):
        raise _Wrong(f"it made {a_type_name(type(made))}, not {a_type_name(type(table.tensor))}")
    again = table.export(made)
    found, is_readonly = table.described(again.dl_tensor), again.flags & _READONLY
    table.delete(again)
    found.compare(given, "the export that it got")
    if is_readonly != was_readonly:
        raise _Wrong(f"it made {_access(is_readonly)} tensor of {_access(was_readonly)} export")
    if deleted and made is not table.tensor and 0 not in given.shape:
        raise _Wrong("it called the deleter, and the tensor that it made lives")
    del made
    gc.collect()
    if hears and len(deleted) != 1:
        raise _Wrong(f"when what it made has died, the deleter of the export was called {len(deleted)} times")
    if (after := table.references()) != before:
        raise _Wrong(f"when what it made has died, {after - before:+} references to the tensor are left")
    return ""


def _check_allocator(table: _Table) -> str:
    ffi, managed = table.ffi, table.export(table.tensor)
    ndim, wanted = managed.dl_tensor.ndim, ffi.new("DLTensor *", managed.dl_tensor)
    extents = tuple(range(2, 2 + ndim)) if ndim <= 8 else (1,) * ndim
    shape = ffi.new("int64_t[]", extents)
    wanted.data, wanted.shape, wanted.strides, wanted.byte_offset = ffi.NULL, shape, ffi.NULL, 0
    device = int(wanted.device.device_type), wanted.device.device_id
    size = (wanted.dtype.bits * wanted.dtype.lanes + 7) // 8
    told: list[str] = []

    def set_error(context, kind, message):
        told.append(f"{ffi.string(kind).decode()}: {ffi.string(message).decode()}")

    callback = ffi.callback("void(void *, const char *, const char *)", set_error)
    out = ffi.new("DLManagedTensorVersioned **")
    arguments = [int(ffi.cast("intptr_t", each)) for each in (wanted, out, ffi.NULL, callback)]
    address = int(ffi.cast("intptr_t", table.table.managed_tensor_allocator))
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(address)

    def allocate(what: str) -> int:
        try:
            code = call(*arguments)
        except SystemError as error:  # of the call by ctypes, which has a result then
            raise _Wrong(f"for {what} it left {type(error.__cause__).__name__} set: it has to call SetError") from None
        if code == 0 and told:
            raise _Wrong(f"for {what} it called SetError, and returned 0: {told[0]}")
        if code != 0 and not told:
            raise _Wrong(f"it returned {code} for {what} without a call of SetError")
        return code

    if allocate(f"shape {extents}") != 0:
        raise _Wrong(f"it refused shape {extents}: {told[0]}")
    if not out[0]:
        raise _Wrong("it returned 0, and wrote no tensor")
    for i in range(ndim):
        shape[i] = _POISON  # the prototype's: what it made has its own
    found = table.described(out[0].dl_tensor)
    steps = [1]
    for extent in extents[:0:-1]:
        steps.insert(0, steps[0] * extent)
    kind = table.described(managed.dl_tensor).dtype
    found.compare(_Described(found.address, extents, tuple(steps[:ndim]), kind, device), "the prototype")
    if device[0] == _CPU:
        ctypes.memset(found.address, 0x5A, size * math.prod(extents))
    table.delete(out[0], ctypes.CFUNCTYPE)
    table.delete(managed)
    if ndim == 0:
        return "of a scalar; too much memory has one dimension or more"
    for i in range(ndim):
        shape[i] = 1 if i > 1 else 1 << (62 if ndim == 1 else 40)
    power, out[0] = 62 if ndim == 1 else 80, ffi.NULL
    if allocate(f"2**{power} elements") == 0:
        raise _Wrong(f"it returned 0 for 2**{power} elements")
    return f"of too much memory it says {told[0][:80]}"


def _check_stream(table: _Table) -> str:
    managed = table.export(table.tensor)
    device = managed.dl_tensor.device
    kind, number = int(device.device_type), device.device_id
    table.delete(managed)
    stream = table.ffi.new("intptr_t *", _POISON)
    table.call("current_work_stream", kind, number, stream)
    if stream[0] == _POISON:
        raise _Wrong(f"it returned 0 for device ({kind}, {number}), and wrote no stream")
    if kind == _CPU and stream[0] != 0:
        raise _Wrong(f"it wrote {stream[0]:#x} for the CPU, which has no streams: that has to be NULL")
    return f"{stream[0]:#x} for device ({kind}, {number})"


def _check_threads(table: _Table) -> str:
    before = table.references()

    def work() -> None:
        for _ in range(_EXPORTS):
            table.delete(table.export(table.tensor))

    _in_threads(work, _THREADS)
    if (after := table.references()) != before:
        raise _Wrong(f"{after - before:+} references to the tensor are left")
    return f"{_THREADS} threads, {_EXPORTS} exports each"


_CHECKS: dict[str, Callable[[_Table], str]] = {
    "managed_tensor_from_py_object_no_sync": _check_export, "the same as __dlpack__": _check_dunder,
    "exports hold the tensor and let it go": _check_references, "deleter, in another thread, without the GIL": _check_deleter,
    "dltensor_from_py_object_no_sync": _check_view, "managed_tensor_to_py_object_no_sync": _check_import,
    "managed_tensor_allocator": _check_allocator, "current_work_stream": _check_stream, "threads": _check_threads,
}  # fmt: skip


def _findings(tensors: list[Any]) -> Iterator[tuple[str, str, str]]:
    """(name, status, text) of each check, and before it begins."""
    yield "", HAS, str(len(tensors) * (1 + len(_CHECKS)))
    for number, tensor in enumerate(tensors):
        of = f"tensor {number}, " if len(tensors) > 1 else ""
        yield f"{of}table", BEGINS, ""
        try:
            table = _Table(tensor)
        except _Wrong as wrong:
            yield f"{of}table", WRONG, str(wrong)
            continue
        version = table.table.header.version
        cls = type(tensor)
        yield f"{of}table", OK, f"of {cls.__module__}.{cls.__qualname__}, DLPack {version.major}.{version.minor}"
        exports = True
        for name, check in _CHECKS.items():
            if not exports:
                yield f"{of}{name}", NOTHING, "not checked: needs an export"
                continue
            yield f"{of}{name}", BEGINS, ""
            try:
                yield f"{of}{name}", OK, check(table)
            except _Wrong as wrong:
                exports = check is not _check_export or not isinstance(wrong, _NoExport)
                yield f"{of}{name}", WRONG, str(wrong)
            except Exception as error:
                yield f"{of}{name}", WRONG, f"it raises {one_line(error)}"
    yield "", ENDS, ""


def _main(what: str) -> int:
    """Print the findings, as lines of JSON behind a mark: what the function itself prints is none."""
    from .objects import find, imported, split

    module, dotted = split(what)
    if not dotted:
        raise CommandError(f"{what}: name a function that makes a tensor, or a list of tensors, MODULE:FUNCTION")
    make = find(imported(module), dotted, module, is_kernel=False)
    if not callable(make):
        raise CommandError(f"{what} is no function that makes a tensor")
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise CommandError(f"{what}() raises {one_line(error)}") from error
    tensors = list(made) if isinstance(made, (list, tuple)) else [made]
    if not tensors:
        raise CommandError(f"{what}() made no tensor")
    del made
    for finding in _findings(tensors):
        print(f"\n{MARK}{json.dumps(finding)}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_main(sys.argv[1]))
    except CommandError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
