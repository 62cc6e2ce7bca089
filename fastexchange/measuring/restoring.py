"""Detect and undo the changes that a kernel makes to its arguments."""

import contextlib
import hashlib
from collections.abc import Callable

import numpy as np

from ..exchange.convert import from_dlpack
from ..ground.cpython import NativeCallable
from ..producers.framework import framework_of

__all__ = ["Snapshot"]

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), np.number, np.bool_, np.datetime64, np.timedelta64, type)


class Snapshot:
    """Copies of everything that a kernel may change in its arguments: writable tensors, lists, sets.

    As a context manager it restores them at the end. It needs as much memory as the tensors.
    """

    def __init__(self, arguments: dict):
        """`arguments`: by name."""
        self._tensors: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._containers: list[tuple[str, list | set, list | set]] = []
        self.unseen: list[str] = []
        """Arguments that a kernel may change, but that have no copy: typed containers, objects, memory without a view."""
        for name, value in arguments.items():
            self._add(name, value)

    def _add(self, name: str, value) -> None:
        if type(value) in (list, set):
            self._containers.append((name, value, value.copy()))
        if isinstance(value, (tuple, list)):
            for item in value:
                self._add(name, item)
        elif isinstance(value, (set, NativeCallable, *_IMMUTABLE)) or hasattr(value, "py_func"):
            pass
        elif (view := _view(value)) is None:
            self.unseen.append(name)
        elif view.flags.writeable:
            self._tensors.append((name, view, view.copy()))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        interrupt = None
        for _ in range(100):  # Ctrl-C may come again during restore()
            try:
                self.restore()
                break
            except KeyboardInterrupt as again:
                interrupt = again
        if interrupt is not None:
            raise interrupt

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(copy.nbytes for _, _, copy in self._tensors)

    def changed(self) -> list[str]:
        """Return the names of the changed arguments. Floating-point numbers are compared by their bits."""
        names = [name for name, view, copy in self._tensors if _digest(view) != _digest(copy)]
        names += [name for name, now, before in self._containers if not _same_items(now, before)]
        return list(dict.fromkeys(names))

    def digests(self) -> dict[str, bytes]:
        """Return a digest of the present content of each argument."""
        found: dict[str, bytes] = {}
        for name, view, _ in self._tensors:
            found[name] = found.get(name, b"") + _digest(view)
        for name, now, _ in self._containers:
            found[name] = found.get(name, b"") + repr([item if type(item) in _NUMBERS else id(item) for item in now]).encode()
        return found

    def restore(self) -> None:
        """Restore all arguments."""
        for _, view, copy in self._tensors:
            view[...] = copy
        for _, now, before in self._containers:
            if not _same_items(now, before):
                now.clear()
                _filler(now)(before)


def _filler(container: "list | set") -> Callable:
    return container.extend if isinstance(container, list) else container.update


def _view(value) -> np.ndarray | None:
    """Return a view of a tensor's memory, each element once; None if the value has no such view."""
    view = None
    with contextlib.suppress(Exception):
        if isinstance(value, np.ndarray):
            view = value.view(np.ndarray)
        else:
            view = from_dlpack(framework_of(value).detached(value))
    if view is None:
        return None
    return view[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.strides)]


def _digest(array: np.ndarray) -> bytes:
    if array.dtype.hasobject:
        return repr(array.tolist()).encode()
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return hashlib.blake2b(whole.reshape(-1).view(np.uint8).data).digest() if whole.size else b""


def _same_items(now, before) -> bool:
    if isinstance(now, set):
        return now == before
    return len(now) == len(before) and all(
        a is b or (type(a) in _NUMBERS and (a == b or (a != a and b != b))) for a, b in zip(now, before, strict=True)
    )


_NUMBERS = (int, float, complex, bool)
