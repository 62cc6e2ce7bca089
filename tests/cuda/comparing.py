"""Whether two launches are the same: their bytes, as the driver stub has recorded them, or what their kernels have read.

For the latter a kernel's source is made of the arguments. One thread writes into two arrays, ``ints`` and ``floats``, which come
after them: the launch's grid and block; of each array its extents and some elements; each number; of each tuple its items.
"""

import functools
import math

import cuda_stub
import numpy as np
from cuda_tensors import DeviceTensor, _Tensor
from launches import data_of, dispatcher_of

MAGIC = 0x5EED
"""The first of the integers: the kernel has run."""
_GRID = [f"cuda.{what}.{axis}" for what in ("gridDim", "blockDim") for axis in "xyz"]
_PLACE = [f"cuda.{what}.{axis}" for what in ("blockIdx", "threadIdx") for axis in "xyz"]


def _add(value, name: str, ints: list[str], floats: list[str]) -> None:
    """Add what a kernel writes of a value that it has by this name: expressions for integers, and for floats."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _add(item, f"{name}[{i}]", ints, floats)
        return
    is_array, places = isinstance(value, _Tensor | np.ndarray), [name]
    kind = (value if is_array else np.asarray(value)).dtype.kind
    if is_array:
        ints += [f"{name}.shape[{i}]" for i in range(len(value.shape))]
        places = [f"{name}[{', '.join(map(str, index)) or '()'}]" for index in _places(value.shape)]
    if kind == "c":
        floats += [f"{place}.{part}" for place in places for part in ("real", "imag")]
    else:  # "V": bfloat16
        (ints if kind in "biu" else floats).extend(places)


def _places(shape: tuple) -> list[tuple]:
    """Indices that tell every stride: the first element, the last, and the last along each dimension."""
    if 0 in shape:
        return []
    last = [extent - 1 for extent in shape]
    ends = [tuple(last[i] if i == dimension else 0 for i in range(len(shape))) for dimension in range(len(shape))]
    return sorted({tuple([0] * len(shape)), tuple(last), *ends})


def digest_of(arguments, body: str = "pass", **names):
    """``(function, ints, floats)``: the Python function of such a kernel, and how many of each it writes.

    `body`: what every thread does first. `names`: its globals, ``cuda`` among them.
    """
    ints, floats = [str(MAGIC), *_GRID], []
    for i, value in enumerate(arguments):
        _add(value, f"a{i}", ints, floats)
    parameters = [*(f"a{i}" for i in range(len(arguments))), "ints", "floats"]
    lines = [f"def digest({', '.join(parameters)}):", f"    {body}", f"    if {' + '.join(_PLACE)} == 0:"]
    lines += [f"        ints[{i}] = {expression}" for i, expression in enumerate(ints)]
    lines += [f"        floats[{i}] = {expression}" for i, expression in enumerate(floats)]
    namespace = dict(names)
    exec("\n".join(lines), namespace)
    return namespace["digest"], len(ints), max(len(floats), 1)


def on_their_side(package, value, array):
    """An argument, or a tuple, as the package's own launch takes it: `array` makes its arrays."""
    if isinstance(value, _Tensor):
        return array(value)
    if isinstance(value, tuple):
        items = [on_their_side(package, item, array) for item in value]
        return value._make(items) if hasattr(value, "_fields") else tuple(items)
    return value


def words_of(package, array) -> list[int]:
    """The parameters that an array or a tensor becomes."""
    shape, strides, size, at = array.shape, array.strides, array.dtype.itemsize, data_of(array)
    if package.__name__ == "numba.cuda":
        return [0, 0, math.prod(shape), size, at, *shape, *strides]
    return [at, at, 0, *shape, *[stride // size for stride in strides]]


# ---- whether two launches are the same --------------------------------------------------------------------------------
def what_is_launched(launch) -> dict:
    """All but the compiled kernel, the thread and the driver's function."""
    return {name: value for name, value in launch._asdict().items() if name not in ("api", "function", "name", "graph", "thread")}


def numbers_of(launch) -> list[int]:
    """The parameters of a launch, as integers."""
    return [int.from_bytes(parameter, "little", signed=True) for parameter in launch.parameters]


def launches_of(record, package, arguments, body="pass", **options):
    """``(arguments, dispatcher, seen)``: what compares launches with these arguments, and some more where there is no stub.

    `dispatcher` makes a new one, of the package's own; `seen`: what the last launch was, as the stub has recorded it, byte for
    byte, of a kernel without code; else the bytes that a kernel which reads all of its arguments has written since the last time.
    """
    if isinstance(record, cuda_stub.Stub):
        empty = functools.partial(dispatcher_of, package, len(arguments), body, **options)
        return tuple(arguments), empty, lambda: what_is_launched(record.launches[-1])
    function, *counts = digest_of(arguments, body, cuda=package, np=np, cg=getattr(package, "cg", None))
    empty = [np.full(count, -1, dtype) for count, dtype in zip(counts, (np.int64, np.float64), strict=True)]
    written = [package.to_device(each) for each in empty]

    def seen():
        package.synchronize()
        found = [each.copy_to_host() for each in written]
        for each, blank in zip(written, empty, strict=True):
            each.copy_to_device(blank)
        package.synchronize()
        assert found[0][0] == MAGIC, "the kernel did not run"
        return [each.tobytes() for each in found]

    outs = [DeviceTensor(each.shape, each.dtype, data=data_of(each)) for each in written]
    return (*arguments, *outs), lambda: package.jit(**options)(function), seen
