"""Kernels that read all of their arguments, and write what they have read: whether two launches have the same effect.

The source is made of the arguments. One thread writes into two arrays, ``ints`` and ``floats``, which come after them: the
launch's grid and block; of each array its extents and some elements; each number; of each tuple its items.
"""

import numpy as np
from cuda_tensors import _Tensor

MAGIC = 0x5EED
"""The first of the integers: the kernel has run."""
_GRID = [f"cuda.{what}.{axis}" for what in ("gridDim", "blockDim") for axis in "xyz"]
_PLACE = [f"cuda.{what}.{axis}" for what in ("blockIdx", "threadIdx") for axis in "xyz"]


def expressions_of(arguments, names=None) -> tuple[list[str], list[str]]:
    """What a kernel writes of its arguments, named ``a0, a1 …``: expressions for integers, and for floats."""
    ints: list[str] = []
    floats: list[str] = []
    for i, value in enumerate(arguments):
        _add(value, f"a{i}" if names is None else names[i], ints, floats)
    return ints, floats


def _add(value, name: str, ints: list[str], floats: list[str]) -> None:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _add(item, f"{name}[{i}]", ints, floats)
    elif isinstance(value, _Tensor | np.ndarray):
        ints += [f"{name}.shape[{i}]" for i in range(len(value.shape))]
        for index in _places(value.shape):
            _add_number(value.dtype.kind, f"{name}[{', '.join(map(str, index)) or '()'}]", ints, floats)
    else:
        _add_number(np.asarray(value).dtype.kind, name, ints, floats)


def _places(shape: tuple) -> list[tuple]:
    """Indices that tell every stride: the first element, the last, and the last along each dimension."""
    if 0 in shape:
        return []
    last = [extent - 1 for extent in shape]
    ends = [tuple(last[i] if i == dimension else 0 for i in range(len(shape))) for dimension in range(len(shape))]
    return sorted({tuple([0] * len(shape)), tuple(last), *ends})


def _add_number(kind: str, expression: str, ints: list[str], floats: list[str]) -> None:
    if kind in "biu":
        ints.append(expression)
    elif kind == "c":
        floats += [f"{expression}.real", f"{expression}.imag"]
    else:  # "V": bfloat16
        floats.append(expression)


def digest_of(arguments, body: str = "", **names):
    """``(function, ints, floats)``: the Python function of such a kernel, and how many of each it writes.

    `body`: what every thread does first. `names`: its globals, ``cuda`` among them.
    """
    ints, floats = expressions_of(arguments)
    ints = [str(MAGIC), *_GRID, *ints]
    parameters = [*(f"a{i}" for i in range(len(arguments))), "ints", "floats"]
    lines = [f"def digest({', '.join(parameters)}):", *([f"    {body}"] if body else []), f"    if {' + '.join(_PLACE)} == 0:"]
    lines += [f"        ints[{i}] = {expression}" for i, expression in enumerate(ints)]
    lines += [f"        floats[{i}] = {expression}" for i, expression in enumerate(floats)]
    namespace = dict(names)
    exec("\n".join(lines), namespace)
    return namespace["digest"], len(ints), max(len(floats), 1)
