"""Kernels that call a function which raises: Numba's code leaks a reference to what the kernel uses afterwards (numba#10783).

What the kernel cannot have kept is given back; what it may have kept stays valid.
"""

import gc
import importlib
import inspect
import sys
import weakref

import numba
import numpy as np
import pytest
from frameworks import needs_torch, torch
from made_producers import Dunder, Ledger
from numba.experimental import jitclass

from fastexchange import fast_args


@numba.njit
def refuse(x):
    if x[0] >= 0:
        raise ValueError("refused")


def outer(x):
    refuse(x)
    x[0] = 1.0


def caught(x):
    try:
        refuse(x)
    except Exception:
        x[0] = 1.0


def in_a_list(x):
    found = [x]
    refuse(found[0])
    return len(found)


def in_parallel(x):
    for i in numba.prange(x.shape[0]):
        x[i] = i
    refuse(x)
    x[0] = 1.0


KERNELS = {
    "default": fast_args(outer), "nogil": fast_args(outer, nogil=True), "caught": fast_args(caught),
    "a list inside": fast_args(in_a_list), "parallel": fast_args(in_parallel, parallel=True),
    "returns a view": fast_args(lambda x: (refuse(x), x[1:])[1]),
}  # fmt: skip


def call(kernel, *args):
    try:
        return kernel(*args)
    except (ValueError, RuntimeError) as error:
        assert "refused" in str(error)
        return error


def repeat(kernel, *args):
    """By Python, natively, and by a cache entry."""
    for _ in range(40):
        call(kernel, *args)


ledger = Ledger()
SOURCES = {"numpy": np.asarray, "memoryview": memoryview, "__dlpack__": lambda array: Dunder(array, ledger)}
if torch is not None:
    SOURCES["torch"] = torch.from_numpy
    SOURCES["parameter"] = lambda array: torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)


def check_memory_is_given_back(run, source: str, count=1):
    """`run` gets `count` tensors, whose memory has to be free when they are gone."""
    arrays = [np.arange(4.0) for _ in range(count)]
    alive = [weakref.ref(array) for array in arrays]
    run(*map(SOURCES[source], arrays))
    del arrays
    gc.collect()
    assert all(each() is None for each in alive)
    ledger.check(ledger.made)


@fast_args
def of_list(tensors, y):
    y[0] = len(tensors)
    refuse(tensors[1])
    tensors[1][0] = 1.0


@fast_args
def of_tuple(pair, name, y=None):
    refuse(pair[1][0])
    pair[1][0][0] = len(name)


@fast_args(out="x[n] -> y[n]")
def declared(x, y):
    y[:] = x
    refuse(y)
    y[0] = x[0]


@needs_torch
def test_operators():
    op = KERNELS["default"].as_torch_op("fx_test_leaks::outer", mutates=("x",))
    made = declared.as_torch_op("fx_test_leaks::declared")
    for each in (op, op.overload, made, made.overload):
        check_memory_is_given_back(lambda x: repeat(each, x), "torch")  # noqa: B023


CALLS = {
    **{f"{name}, once": (lambda x, y, kernel=kernel: call(kernel, x)) for name, kernel in KERNELS.items()},
    **{name: (lambda x, y, kernel=kernel: repeat(kernel, x)) for name, kernel in KERNELS.items()},
    "bound": lambda x, y: repeat(KERNELS["default"].bind(x)),
    "bound without the GIL": lambda x, y: repeat(KERNELS["nogil"].bind(x)),
    "bound with a list": lambda x, y: repeat(of_list.bind([x, y], y)),
    "a list": lambda x, y: repeat(of_list, [x, y], x), "a list of the same": lambda x, y: repeat(of_list, [x, x], x),
    "a tuple": lambda x, y: repeat(of_tuple, (x, (y, 1)), "ä" + str(gc.isenabled()), x),
    "an output": lambda x, y: repeat(declared, x), "a given output": lambda x, y: repeat(declared, x, y),
}  # fmt: skip
OF_MEMORYVIEWS = [name for name in CALLS if name.startswith(("default", "caught", "bound")) and "list" not in name]
"""Numba's type of one has few operations."""


@pytest.mark.parametrize("source", SOURCES)
def test_arguments_are_given_back(source):
    for name in CALLS if source != "memoryview" else OF_MEMORYVIEWS:
        check_memory_is_given_back(CALLS[name], source, 2)


def test_code_that_is_loaded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaking.py").write_text(f"import numba\n{inspect.getsource(refuse.py_func)}\n{inspect.getsource(outer)}")
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "leaking", raising=False)
        kernel = fast_args(importlib.import_module("leaking").outer, cache=True)
        check_memory_is_given_back(lambda x: call(kernel, x), "numpy")  # noqa: B023
    assert sum(kernel.stats.cache_hits.values()) == 1


@jitclass([("x", numba.float64[::1])])
class Holder:
    def __init__(self, x):
        self.x = x


kept_by_python: list = []


def into_a_class(holder, x):
    holder.x = x
    refuse(x)
    x[0] = 1.0


def into_a_list(found, x):
    found.append(x)
    refuse(x)
    x[0] = 1.0


def into_python(found, x):
    with numba.objmode():
        kept_by_python.append(x)
    refuse(x)
    x[0] = 1.0


def into_an_exception(found, x):
    raise ValueError("refused", x)


KEEPERS = {
    "an exception": (into_an_exception, int, lambda _, error: error.args[1]),
    "a jitclass": (into_a_class, lambda: Holder(np.zeros(4)), lambda holder, _: holder.x),
    "a list": (into_a_list, lambda: [np.zeros(4)], lambda found, _: found[-1]),
    "a typed list": (into_a_list, lambda: numba.typed.List.empty_list(numba.float64[::1]), lambda found, _: found[-1]),
    "Python": (into_python, int, lambda *_: kept_by_python.pop()),
}
"""The kernel, what it keeps its argument in, and how that is got at."""


@pytest.mark.parametrize("name", KEEPERS)
def test_what_a_kernel_that_raises_has_kept_is_valid(name):
    function, make, kept_in = KEEPERS[name]
    kernel = fast_args(function)
    for _ in range(40):
        array, holder = np.arange(4.0) + 7, make()
        kept, address = kept_in(holder, call(kernel, holder, array)), array.ctypes.data
        del array
        gc.collect()
        others = [np.full(4, -1.0) for _ in range(8)]
        assert all(each.ctypes.data != address for each in others) and np.asarray(kept).tolist() == [7, 8, 9, 10]
