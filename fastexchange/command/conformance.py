"""``conformance``: whether a type's exchange table does what DLPack says of its five functions.

The checks run in a process of their own, because a wrong table may end it: the check that it was at is the finding then. They
call the functions as a consumer in C does: with the GIL, deleters and the allocator also without it.

Source: DLPack 1.3, ``DLPackExchangeAPI`` and the functions in it.
"""

import argparse
import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import CommandError
from .probe import OK, WRONG, one_line

__all__ = ["run"]

_REQUIRED = (
    "managed_tensor_allocator", "managed_tensor_from_py_object_no_sync", "managed_tensor_to_py_object_no_sync",
    "current_work_stream",
)  # fmt: skip
_ATTRIBUTE, _CAPSULE = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"
_READONLY = 1
_CPU = 1
_THREADS, _EXPORTS = 4, 2000
_TIMEOUT = 120
_MARK = "fastexchange conformance: "


class _Wrong(Exception):
    """What a check has found."""


def run(options: argparse.Namespace) -> int:
    """Check, and print a line for each check. Returns 1 if a line says wrong."""
    command = [sys.executable, "-m", __name__, options.what]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, output, errors = None, _text(late.stdout), ""
    lines, begun = [], options.what
    for line in output.splitlines():
        if line.startswith(_MARK):
            name, status, text = json.loads(line.removeprefix(_MARK))
            begun = name if status == "" else options.what
            lines += [(name, status, text)] * (status != "")
    if code == 2:
        raise CommandError((errors.strip().splitlines() or ["it failed"])[-1])
    if code != 0:
        how = f"took longer than {_TIMEOUT} s" if code is None else f"ended by {_how(code)}"
        lines.append((begun, WRONG, f"the process that checked it {how}{_last(errors)}"))
    for name, status, text in lines:
        print(f"{status:<6} {name}{f': {text}' if text else ''}")
    wrong = sum(status == WRONG for _, status, _ in lines)
    print(f"{options.what}: {f'{wrong} of {len(lines)} wrong' if wrong else f'all {len(lines)} right'}")
    return int(wrong > 0)


def _text(output) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _last(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f": {lines[-1]}" if lines else ""


# ---- the process that checks -----------------------------------------------------------------------------------------


class _Described(NamedTuple):
    """What a DLTensor says."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[int, int, int]
    device: tuple[int, int]


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

    def call(self, name: str, *arguments: Any, prototype: Any = ctypes.PYFUNCTYPE) -> int:
        """Call one of the functions with addresses, or numbers. Raises the exception that it sets."""
        address = int(self.ffi.cast("intptr_t", getattr(self.table, name)))
        given = [int(self.ffi.cast("intptr_t", each)) if isinstance(each, self.ffi.CData) else each for each in arguments]
        return prototype(ctypes.c_int, *[ctypes.c_void_p] * len(given))(address)(*given)

    def export(self, tensor: Any):
        """An owning export. Raises _Wrong."""
        out = self.ffi.new("DLManagedTensorVersioned **")
        if (code := self.call("managed_tensor_from_py_object_no_sync", id(tensor), out)) != 0:
            raise _Wrong(f"it returned {code}, and set no exception")
        if not out[0]:
            raise _Wrong("it returned 0, and wrote no tensor")
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
    empty = 0 in both[0].shape
    for field, one, two in zip(_Described._fields, *both, strict=True):
        is_free = (field == "address" and empty) or (field == "strides" and (empty or 1 in both[0].shape))
        if one != two and not is_free:
            raise _Wrong(f"its {field} is {one}, and that of __dlpack__ {two}")
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
    failed: list[BaseException] = []

    def delete():
        try:
            for each in managed:
                table.delete(each, ctypes.CFUNCTYPE)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=delete)
    thread.start()
    thread.join()
    if failed:
        raise _Wrong(f"it raises {one_line(failed[0])}")
    if (after := table.references()) != before:
        raise _Wrong(f"it leaves {after - before:+} references to the tensor")
    return ""


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
        except Exception as error:
            return f"refused, as a view cannot say that it is readonly: {one_line(error)[:80]}"
        raise _Wrong("it gives a view of readonly memory, which cannot say that it is readonly")
    for _ in range(100):
        if (code := table.call("dltensor_from_py_object_no_sync", id(table.tensor), view)) != 0:
            raise _Wrong(f"it returned {code}, and set no exception")
    if (after := table.references()) != before:
        raise _Wrong(f"a hundred views leave {after - before:+} references to the tensor: they own nothing")
    managed = table.export(table.tensor)
    both = table.described(view[0]), table.described(managed.dl_tensor)
    table.delete(managed)
    if both[0] != both[1]:
        raise _Wrong(f"it says {both[0]}, and the owning export {both[1]}")
    return ""


def _check_import(table: _Table) -> str:
    before, managed = table.references(), table.export(table.tensor)
    given, out = table.described(managed.dl_tensor), table.ffi.new("intptr_t *")
    if (code := table.call("managed_tensor_to_py_object_no_sync", managed, out)) != 0:
        raise _Wrong(f"it returned {code}, and set no exception")
    if not out[0]:
        raise _Wrong("it returned 0, and made no object")
    made = ctypes.cast(out[0], ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))  # `made` has its own reference
    if not isinstance(made, type(table.tensor)) and not isinstance(table.tensor, type(made)):
        raise _Wrong(f"it made a {type(made).__qualname__}, not a {type(table.tensor).__qualname__}")
    again = table.export(made)
    found = table.described(again.dl_tensor)
    table.delete(again)
    if 0 not in given.shape and (found.address, found.shape) != (given.address, given.shape):
        places = f"shape {found.shape} at {found.address:#x} of one of {given.shape} at {given.address:#x}"
        raise _Wrong(f"it made a tensor of {places}")
    del made
    if (after := table.references()) != before:
        raise _Wrong(f"when what it made has died, {after - before:+} references to the tensor are left")
    return ""


def _check_allocator(table: _Table) -> str:
    ffi, managed = table.ffi, table.export(table.tensor)
    shape, wanted = ffi.new("int64_t[]", [2, 3]), ffi.new("DLTensor *", managed.dl_tensor)
    wanted.data, wanted.ndim, wanted.shape, wanted.strides, wanted.byte_offset = ffi.NULL, 2, shape, ffi.NULL, 0
    device = int(wanted.device.device_type), wanted.device.device_id
    told: list[str] = []

    def set_error(context, kind, message):
        told.append(f"{ffi.string(kind).decode()}: {ffi.string(message).decode()}")

    callback = ffi.callback("void(void *, const char *, const char *)", set_error)
    out = ffi.new("DLManagedTensorVersioned **")

    def allocate() -> int:
        return table.call("managed_tensor_allocator", wanted, out, ffi.NULL, callback, prototype=ctypes.CFUNCTYPE)

    if (code := allocate()) != 0 or not out[0]:
        raise _Wrong(f"it returned {code} for shape (2, 3){f', {told[0]}' if told else ' without a call of SetError'}")
    found = table.described(out[0].dl_tensor)
    if found.shape != (2, 3) or found.device != device or found.strides != (3, 1):
        raise _Wrong(f"asked for shape (2, 3) on device {device} it made {found}")
    if device[0] == _CPU:
        size = 6 * ((wanted.dtype.bits * wanted.dtype.lanes + 7) // 8)
        ctypes.memset(found.address, 0x5A, size)
    table.delete(out[0], ctypes.CFUNCTYPE)
    table.delete(managed)
    shape[0] = shape[1] = 1 << 40
    out[0] = ffi.NULL
    code = allocate()
    if code == 0:
        raise _Wrong("it returned 0 for 2**80 elements")
    if not told:
        raise _Wrong("it refused 2**80 elements without a call of SetError")
    return f"of too much memory it says {told[0][:80]}"


def _check_stream(table: _Table) -> str:
    managed = table.export(table.tensor)
    device = managed.dl_tensor.device
    kind, number = int(device.device_type), device.device_id
    table.delete(managed)
    stream = table.ffi.new("intptr_t *")
    address = int(table.ffi.cast("intptr_t", table.table.current_work_stream))
    get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)(address)
    if (code := get(kind, number, int(table.ffi.cast("intptr_t", stream)))) != 0:
        raise _Wrong(f"it returned {code} for device ({kind}, {number}), and set no exception")
    return f"{stream[0]:#x} for device ({kind}, {number})"


def _check_threads(table: _Table) -> str:
    before, failed = table.references(), []

    def work():
        try:
            for _ in range(_EXPORTS):
                table.delete(table.export(table.tensor))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise _Wrong(one_line(failed[0]))
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
    """(name, status, text) of each check; the status is "" before it begins."""
    for number, tensor in enumerate(tensors):
        of = f"tensor {number}, " if len(tensors) > 1 else ""
        yield f"{of}table", "", ""
        try:
            table = _Table(tensor)
        except _Wrong as wrong:
            yield f"{of}table", WRONG, str(wrong)
            continue
        version = table.table.header.version
        cls = type(tensor)
        yield f"{of}table", OK, f"of {cls.__module__}.{cls.__qualname__}, DLPack {version.major}.{version.minor}"
        for name, check in _CHECKS.items():
            yield f"{of}{name}", "", ""
            try:
                yield f"{of}{name}", OK, check(table)
            except _Wrong as wrong:
                yield f"{of}{name}", WRONG, str(wrong)
            except Exception as error:
                yield f"{of}{name}", WRONG, f"it raises {one_line(error)}"


def _main(what: str) -> int:
    """Print the findings, as lines of JSON behind a mark: what the function itself prints is none."""
    from .objects import find, imported, split

    module, dotted = split(what)
    if not dotted:
        raise CommandError(f"{what}: name a function that makes a tensor, or a list of tensors, MODULE:FUNCTION")
    make = find(imported(module), dotted, module)
    if not callable(make):
        raise CommandError(f"{what} is no function that makes a tensor")
    try:
        made = make()
    except Exception as error:
        raise CommandError(f"{what}() raises {one_line(error)}") from error
    tensors = list(made) if isinstance(made, (list, tuple)) else [made]
    if not tensors:
        raise CommandError(f"{what}() made no tensor")
    del made
    for finding in _findings(tensors):
        print(f"\n{_MARK}{json.dumps(finding)}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_main(sys.argv[1]))
    except CommandError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
