"""What the rows of the benchmark are made of: groups, kernels that do nothing, and tensors of one element."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np

from fastexchange import fast_args
from fastexchange.measuring.timing import Statement

try:
    import torch
except ImportError:
    torch = None
try:
    import tvm_ffi
except ImportError:
    tvm_ffi = None

DISPATCHER = "Numba's dispatcher"
OURS = "fastexchange"
C = "hand-written C"
EMPTY = "empty C builtin"


@dataclass(frozen=True)
class Row:
    """One statement, and the row of the same group that its time is divided by."""

    key: str
    label: str
    statement: Statement
    reference: str | None = None


@dataclass
class Group:
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, key: str, label: str, code: str, names: dict[str, Any], reference: str | None = None, calls: int = 1):
        self.rows.append(Row(key, label, Statement(code, names, calls), reference))


def plain_kernel(parameters: str):
    """A plain ``@njit`` kernel with these parameters that does nothing."""
    namespace: dict[str, Any] = {}
    exec(f"def kernel({parameters}):\n    pass\n", namespace)
    return numba.njit(namespace["kernel"])


def kernel_of(parameters: str):
    """A kernel with these parameters that does nothing: as plain ``@njit``, and with ``@fast_args`` over it."""
    plain = plain_kernel(parameters)
    return plain, fast_args(plain)


_float_kernel = functools.cache(plain_kernel)


def float_kernel_of(parameters: str):
    """:func:`kernel_of` for calls with one signature, float32 vectors. The plain one is shared: Numba compiles it once.

    That one must not be called with anything else, as its dispatcher is slower with each signature that it has.
    """
    plain = _float_kernel(parameters)
    return plain, fast_args(plain)


def names_of(count: int) -> list[str]:
    return [f"x{i}" for i in range(count)]


def call(function: str, names, form: str = "{}") -> str:
    return f"{function}({', '.join(form.format(name) for name in names)})"


def many(count: int, what: str) -> str:
    """ "3 NumPy arrays", "1 NumPy array"."""
    return f"{count} {what}{'s' * (count != 1)}"


def arrays(count: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """1-D arrays of one element: a kernel's own work must not hide what its arguments cost."""
    return {name: np.ones(1, dtype) for name in names_of(count)}


def tensors(count: int) -> dict[str, Any]:
    return {name: torch.ones(1) for name in names_of(count)}


def both() -> dict[str, dict[str, Any]]:
    """Three arguments of each framework installed."""
    return {"numpy": arrays(3)} | ({"torch": tensors(3)} if torch is not None else {})


class OnlyDunder:
    """A producer of the plainest kind: the two methods of the protocol, in Python, and nothing else."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._tensor.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()
