"""The arguments of a kernel that is called again and again: what it changes in them, and putting it back."""

import numpy as np

from ..conversion import from_dlpack
from ..producers import torch

__all__ = ["Snapshot"]


class Snapshot:
    """Copies of what a kernel may change in its arguments: tensors that can be written, and lists.

    As a context manager it puts everything back at the end. It takes as much memory as the tensors. Arguments of other mutable
    types, which only Numba knows, are not looked at.
    """

    def __init__(self, arguments: dict):
        """`arguments`: by what they are called."""
        self._tensors: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._lists: list[tuple[str, list, list]] = []
        self.unseen: list[str] = []
        """Arguments with tensors whose memory cannot be viewed."""
        for name, value in arguments.items():
            self._add(name, value)

    def _add(self, name: str, value) -> None:
        if type(value) is list:
            self._lists.append((name, value, value[:]))
        if isinstance(value, (tuple, list)):
            for item in value:
                self._add(name, item)
            return
        try:
            view = from_dlpack(value.detach() if torch.is_tensor_type(type(value)) else value)
        except TypeError:  # no tensor
            return
        except Exception:
            self.unseen.append(name)
            return
        if view.flags.writeable:
            self._tensors.append((name, view, view.copy()))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.restore()

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(copy.nbytes for _, _, copy in self._tensors)

    def changed(self) -> list[str]:
        """Which arguments are not as they were; of floating-point numbers, all their bits."""
        names = [name for name, view, copy in self._tensors if view.tobytes() != copy.tobytes()]
        names += [name for name, now, before in self._lists if not _same_items(now, before)]
        return list(dict.fromkeys(names))

    def take(self) -> None:
        """From now on, how they are now."""
        for _, view, copy in self._tensors:
            copy[...] = view
        self._lists = [(name, now, now[:]) for name, now, _ in self._lists]

    def restore(self) -> None:
        """Put all back as it was."""
        for _, view, copy in self._tensors:
            view[...] = copy
        for _, now, before in self._lists:
            if not _same_items(now, before):
                now[:] = before


def _same_items(now: list, before: list) -> bool:
    return len(now) == len(before) and all(a is b or (type(a) in _NUMBERS and a == b) for a, b in zip(now, before, strict=True))


_NUMBERS = (int, float, complex, bool)
