"""What calls and exchanges have to give whatever way they take, for interpreters and libraries that are not as expected."""

import array
import collections
import functools
import pickle
import sys

import numba
import numpy as np

_PRELUDE = """
import sys
sys.path[:0] = {path!r}
import other_ways
other_ways.compile_all()
del sys, other_ways
try:
    import torch
except ImportError:
    pass
"""


@functools.cache
def _stage():
    from forked import Stage  # not where this module is imported to be forked: it imports this package

    return Stage(_PRELUDE.format(path=sys.path))


def run_changed(code: str, *arguments: str, **environment: str):
    """Run `code` in an interpreter that has imported NumPy, Numba and PyTorch, not this package; and compiled what is called."""
    ended = _stage().run(code, *arguments, seconds=500, exits=False, **environment)
    ended.check()
    return ended


class Protocol:
    """A tensor to DLPack alone, and what it has been asked for."""

    def __init__(self, array):
        self.array, self.asked = array, []

    def __dlpack__(self, **options):
        self.asked.append(options)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


Pair = collections.namedtuple("Pair", "a b")


def is_type_error(call, *words: str) -> bool:
    try:
        call()
    except TypeError as error:
        return all(word in str(error) for word in words)
    return False


# ---- functions that Numba has compiled before anything is found, or changed ----------------------------------------------
_kernel = numba.njit(lambda a, x, pair, y=2.0: a * x.sum() + pair[0] + y)
_first = numba.njit(lambda items: items[0].sum() + items[1].sum())
_length = numba.njit(lambda text, i, buffer: len(text) + i + buffer[1])
_twice, _same = numba.njit(lambda x: 2 * x), numba.njit(lambda x: x)


@numba.njit
def _axpy(a, x, y):
    for i in range(x.shape[0]):
        y[i] += a * x[i]
    return y


@numba.njit
def _doubled(x, y):
    for i in range(x.shape[0]):
        y[i] = 2 * x[i]


def compile_all() -> None:
    x, shorts = np.ones(3), array.array("h", [1, 2])
    _kernel(2.0, x, (1.0, 2.0)), _kernel(2.0, x, Pair(1.0, x)), _first([x, x]), _first((x, x))
    _same(x), _twice(x), _twice(x[::-2]), _axpy(1.0, x, x), _doubled(x, x)
    for number in (1, np.int16(1), np.float32(1)):
        _length("abc", number, shorts)


def check(is_compiled: bool = True):
    """Calls, bound launches and exchanges are right. Returns two kernels: of tensors, and of a string, a number and a buffer.

    Without `is_compiled` Numba compiles the kernels now.
    """
    from fastexchange import BoundLaunch, convert, fast_args, from_dlpack, to_dlpack

    kernel, first, length, twice, same, axpy = (
        fast_args(each if is_compiled else each.py_func) for each in (_kernel, _first, _length, _twice, _same, _axpy)
    )
    doubled = fast_args(out="x[n] -> y[n]")(_doubled if is_compiled else _doubled.py_func)
    makers = [np.ones, lambda n: Protocol(np.ones(n))]
    if torch := sys.modules.get("torch"):
        makers.append(lambda n: torch.ones(n, dtype=torch.float64))
    for make in makers * 4:
        x = make(3)
        for result in kernel(2.0, x, (1.0, 2.0)), kernel(2.0, x=x, pair=(1.0, 2.0)), kernel(2.0, x, Pair(1.0, x)):
            assert result == 9.0
        assert first([x, x]) == first((x, x)) == 6.0 and same(x) is x
        assert kernel.bind(2.0, x, (1.0, 2.0))() == 9.0
        assert np.asarray(doubled(x)).tolist() == np.asarray(doubled.bind(x)()).tolist() == [2.0] * 3
        assert type(x) is Protocol or (type(twice(x)) is type(x) and twice(x).tolist() == [2.0] * 3)
        for text in ("abc", "\u20ac\U0001f600c"):
            for number in (1, np.int16(1), np.float32(1)):
                assert length(text, number, array.array("h", [1, 2])) == 6
    for make in makers:
        x = make(3)
        count = sys.getrefcount(x)
        for exchanged in (from_dlpack(x), from_dlpack(x, copy=None), convert(x, np.ndarray)):
            exchanged[0] += 1.0
        assert from_dlpack(x).tolist() == [4.0, 1.0, 1.0] and "dltensor" in repr(to_dlpack(x))
        assert not torch or convert(x, torch.Tensor).tolist() == [4.0, 1.0, 1.0]
        del exchanged
        assert sys.getrefcount(x) == count, type(x)
    assert twice(np.ones(6)[::-2]).tolist() == [2.0] * 3
    readonly = np.ones(3)
    readonly.flags.writeable = False
    assert not from_dlpack(Protocol(readonly)).flags.writeable and from_dlpack(np.ones(3)).flags.writeable
    assert from_dlpack(np.empty((0, 3))).shape == (0, 3)

    x, z = np.arange(3.0), np.zeros(3)
    launch, made = axpy.bind(1.0, x=x, y=np.ones(3)), doubled.bind(x)
    assert isinstance(launch, BoundLaunch) and launch.kernel is axpy and "axpy" in repr(launch)
    assert launch() is launch() is launch.arguments[2] and launch().tolist() == [1.0, 4.0, 7.0]
    assert launch.rebind(y=z, a=2.0) is launch and launch() is z and z.tolist() == [0.0, 2.0, 4.0] and launch.arguments[1] is x
    x.__setstate__(np.ones(5).__reduce__()[2])  # it follows what becomes of a tensor
    assert launch.rebind(y=np.zeros(5))().tolist() == [2.0] * 5
    for wrong in (lambda: launch(1.0), lambda: launch.rebind(b=z), lambda: axpy.bind(1.0), lambda: pickle.dumps(launch)):
        assert is_type_error(wrong)
    assert made.rebind(x=np.arange(3.0), y=None)() is made() is made.arguments[1] and made().tolist() == [0.0, 2.0, 4.0]
    assert is_type_error(lambda: kernel(2.0), "missing 2 required")
    assert is_type_error(lambda: twice(object()), "argument 'x' (position 0)")
    return kernel, length
