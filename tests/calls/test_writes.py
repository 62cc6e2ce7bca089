"""What a kernel's code writes to: readonly memory, which is refused, and declared outputs, which have to be written."""

import collections
import importlib
import sys
import warnings

import numba
import numpy as np
import pytest
from numba import types
from numba.experimental import jitclass, structref
from raising import check_raises

from fastexchange import fast_args

Pair = collections.namedtuple("Pair", "first, second")
RECORD = np.dtype([("a", "f8"), ("b", "f8"), ("v", "f8", (3,))])
VECTOR, MATRIX = np.arange(1.0, 7.0), np.arange(1.0, 7.0).reshape(2, 3)
RECORDS = np.array([(i, 2 * i, (3 * i, 4 * i, 5 * i)) for i in (1, 2, 3)], RECORD)


def function(body: str, parameters: str = "x", **names):
    """A function of these parameters with this body."""
    namespace = {"np": np, **names}
    exec(f"def f({parameters}):\n" + "\n".join(f"    {line}" for line in body.splitlines()), namespace)
    namespace["f"].__module__ = __name__
    return namespace["f"]


def readonly(array):
    made = array.copy()
    made.flags.writeable = False
    return made


WRITES = [
    ("x.flat[0] = 9.0", VECTOR), ("it = x.T.flat\nit[2] = 9.0", MATRIX), ("x[0].a = 9.0", RECORDS),
    ("x[0]['b'] = 9.0", RECORDS), ("x[0].a += 9.0", RECORDS), ("x[0].v[1] = 9.0", RECORDS), ("x[0].v += 9.0", RECORDS),
    ("v = x[0]['v'][1:]\nv.fill(9.0)", RECORDS), ("np.asarray(x)[1:][0].a = 9.0", RECORDS),
    ("x.flat[0].a = 9.0", RECORDS), ("for e in x:\n  e.a = 9.0", RECORDS),
    ("for i, e in enumerate(x):\n  e.a = 9.0", RECORDS), ("for i, e in np.ndenumerate(x):\n  e.a = 9.0", RECORDS),
    ("for e, other in zip(x, x.copy()):\n  e.a = 9.0", RECORDS),
    ("e = x.copy()[0]\nfor e in x[1:]:\n  pass\ne.a = 9.0", RECORDS), ("t = (x[0], 1)\nt[0].a = 9.0", RECORDS),
    ("for e in np.nditer(x):\n  e[()] = 9.0", VECTOR),
    ("for e, other in np.nditer((x, x.copy())):\n  e[()] = 9.0", VECTOR), ("np.ascontiguousarray(x)[0] = 9.0", VECTOR),
    ("np.fill_diagonal(x, 9.0)", MATRIX), ("np.dot(np.ones((1, 2)), np.ones((2, 6)), x.reshape(1, 6))", VECTOR),
    ("np.add(x[0].v, 1.0, x[0].v)", RECORDS), ("np.asarray(x[0].v)[0] = 9.0", RECORDS),
    ("np.expand_dims(np.flip(x[0].v), 0)[0] = 9.0", RECORDS), ("np.ravel(x[0]['v'])[0] = 9.0", RECORDS),
    ("for e in np.nditer(x):\n  np.asarray(e)[()] = 9.0", VECTOR), ("Pair(1, x[0]).second.a = 9.0", RECORDS),
    ("e = None\nif x.size:\n  e = x[0]\nif e is not None:\n  e.a = 9.0", RECORDS),
]  # fmt: skip
"""Which plain ``numba.njit`` compiles, and which write to readonly memory."""


@pytest.mark.parametrize(("body", "array"), WRITES, ids=[body for body, _ in WRITES])
def test_no_way_leads_to_readonly_memory(body, array):
    kernel, given = fast_args(function(body, Pair=Pair)), readonly(array)
    check_raises(numba.TypingError, "Cannot modify readonly array", kernel, given)
    assert given.tobytes() == array.tobytes()


READS = [
    ("for e, o in zip(x, y):\n  o.a = e.a + 1", RECORDS),
    ("for e, o in np.nditer((x, y)):\n  o[()] = e.item() + 1", VECTOR),
    ("t = (x[0], y[0])\nt[1].a = t[0].a + 1", RECORDS), ("y[0] = x[0]\ne = y[0]\ne.a += 1", RECORDS),
    ("y[:] = x\nfor e in y:\n  e.v[1] = x[0].v[2]", RECORDS),
    ("z = np.ascontiguousarray(x.T)\nz[0, 0] = 9.0\ny[0, 0] = z[0, 0] + x.flat[2]", MATRIX),
    ("y.flat[0] = x.flat[1]", VECTOR), ("for i, e in enumerate(x):\n  y[i].a = e.v.sum()", RECORDS),
    ("z = x[0].v.copy()\nz[0] = 5\ny[0].v[:] = z", RECORDS),
    ("z = np.asarray(x[0].v, np.float32)\nz[0] = 5\ny[0].v[:] = z", RECORDS),
    ("z = np.ravel(x.T)\nz[0] = 5\ny[0, :] = z[:3]", MATRIX),
    ("p = Pair(x[0], y[0])\np.second.a = p.first.a + 1", RECORDS),
    ("np.add(x, 1.0, y)\nnp.dot(np.ones((2, 2)), x, y)", MATRIX),
    ("e = y[0]\nfor i in range(2):\n  np.multiply(x[i].v, 2.0, e.v)", RECORDS),
]  # fmt: skip


@pytest.mark.parametrize(("body", "array"), READS, ids=[body for body, _ in READS])
def test_what_only_reads_readonly_memory_compiles(body, array):
    x, y = readonly(array), array.copy()
    fast_args(function(body, "x, y", Pair=Pair))(x, y)
    assert x.tobytes() == array.tobytes() != y.tobytes()


@jitclass([("x", numba.float64[:])])
class Holder:
    def __init__(self, x):
        self.x = x


@jitclass([("total", numba.float64), ("x", numba.float64[::1])])
class Copied:
    def __init__(self, x):
        self.total = x.sum()
        x = x.copy()
        self.x = x


Kept = structref.register(type("Kept", (types.StructRef,), {}))
KeptProxy = type("KeptProxy", (structref.StructRefProxy,), {})
structref.define_proxy(KeptProxy, Kept, ["x"])
FIELDS = ["return H(x).x[0]", "h = H(x.copy())\nh.x = x\nreturn h.x[0]", "k = K(x.copy())\nk.x = x\nreturn k.x[0]"]


@pytest.mark.parametrize("body", FIELDS)
def test_a_field_does_not_make_readonly_memory_writable(body):
    kernel = fast_args(function(body, H=Holder, K=KeptProxy))
    check_raises(numba.TypingError, r"Cannot give the field 'x' of .* a readonly array", kernel, readonly(VECTOR))
    assert kernel(VECTOR.copy()) == 1.0


def test_a_jitclass_may_read_and_copy_readonly_memory():
    assert fast_args(function("return S(x).total", S=Copied))(readonly(VECTOR)) == 21.0


NOT_WRITTEN = [
    "y = x[::2]", "y = y + x", "for i in range(y.shape[0]):\n  y = x[i:]", "z = np.zeros_like(y)\nz[0] = x[0]\ny = z",
    "t = 0.0\nfor i in range(len(y)):\n  t += x[i] * y[i]", "s = y.sum() + y.size\nx[0] = s",
    "if x[0] > 0:\n  raise ValueError('positive')",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_WRITTEN)
def test_an_output_that_is_never_written_is_an_error(body):
    kernel = fast_args(function(body, "x, y"), out="x[n] -> y[n]")
    for _ in range(1 + (body == NOT_WRITTEN[0])):  # it is compiled again each time
        check_raises(ValueError, r"f\(\): the kernel never writes to its output 'y', out='x\[n\] -> y\[n\]'", kernel, np.ones(3))


@fast_args
def fill(y, x):
    y[:] = x


WRITTEN = [
    "y[:] = x", "y[...] = x", "y.fill(x[0])", "y += x", "y *= 2.0", "z = y\nz[0] = x[0]", "z = y[1:]\nz[:] = x[1:]",
    "z = y.reshape(3, 1)\nz[0, 0] = x[0]", "fill(y, x)", "np.multiply(x, 2.0, y)",
    "np.dot(x.reshape(1, 3), np.ones((3, 3)), y.reshape(1, 3))", "for e in np.nditer(y):\n  e[()] = x[0]",
    "y.flat[0] = x[0]", "t = (y, x)\nt[0][0] = 1.0", "z = y if x[0] > 0 else x\nz[0] = 3.0",
    "for a in (y, x):\n  a[0] = 3.0", "def inner(i):\n  y[i] = x[i]\ninner(0)",
    "for i in numba.prange(3):\n  y[i] = x[i]", "with numba.objmode():\n  y[:] = x", "l = [y]\nl[0][0] = 1.0",
    "for _ in range(2):\n  y[0] = x[0]\n  y = x + 1", "z = None\nif x[0] > 0:\n  z = y\nif z is not None:\n  z[:] = x",
]  # fmt: skip


@pytest.mark.parametrize("body", WRITTEN)
def test_an_output_that_may_be_written_is_none(body):
    kernel = fast_args(function(body, "x, y", fill=fill, numba=numba), out="x[n] -> y[n]")
    assert kernel(np.ones(3)).shape == (3,)


def test_each_compilation_is_looked_at_but_what_only_raises_or_has_no_elements_needs_no_store():
    check_raises(KeyError, None, fast_args(function("raise KeyError('this')", "x, y"), out="x[n] -> y[n]"), np.ones(3))
    assert fast_args(function("pass", "x, y"), out="x[n] -> y[n, 0]")(np.ones(3)).shape == (3, 0)
    of_a_branch = fast_args(function("if mode is None:\n  y = x\nelse:\n  y[:] = x", "x, mode, y"), out="x[n] -> y[n]")
    assert of_a_branch(np.ones(3), 1).tolist() == [1.0] * 3
    check_raises(ValueError, "never writes", of_a_branch, np.ones(3), None)


def test_the_output_that_is_meant_is_named():
    made, out = function("y[:] = x\nz = x", "x, y, z"), "x[n] -> y[n], z[n]"
    check_raises(ValueError, "output 'z'", fast_args(made, out=out, mutates=("x",)), np.ones(3))
    check_raises(ValueError, "output 'z'", fast_args("(float64[:], float64[:], float64[:])", out=out), made)


def test_code_that_is_loaded_has_been_looked_at(tmp_path, monkeypatch):
    (tmp_path / "never_written.py").write_text("def f(x, y):\n    y = x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "never_written", raising=False)
        module = importlib.import_module("never_written")
        fast_args(module.f, cache=True)(np.ones(3), np.ones(3))  # not an output: its code is kept
        kernel = fast_args(module.f, cache=True, out="x[n] -> y[n]")
        check_raises(ValueError, "never writes", kernel, np.ones(3))
        assert sum(kernel.stats.cache_hits.values()) > 0, kernel.stats


STORED = [
    ("y[0] = x[0] * 0.5", "int64", True), ("y[:] = x", "int32", True), ("for i in range(3):\n  y[i] += 0.5", "uint8", True),
    ("y[0] = int(x[0])", "int64", False), ("y[0] = x[0] > 0", "int64", False), ("y[:] = x.astype(np.int64)", "int64", False),
    ("y[0] = x[0]", "float32", False), ("y[0] = x[0]", "bool", True), ("y[:] = x > 0", "bool", False),
]  # fmt: skip


@pytest.mark.parametrize(("body", "type_of_y", "warns"), STORED)
def test_floats_that_are_stored_into_integers_are_a_warning(body, type_of_y, warns):
    kernel = fast_args(function(body, "x, y"), out=f"x[n] -> y[n]: {type_of_y}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel(np.ones(3)), kernel(np.ones(3))
    said = [str(each.message) for each in caught]
    assert [each.partition(",")[0] for each in said] == ["f(): floats are stored into its output 'y'"] * warns
    assert all(each.endswith("or declare another type in out=, y[n]: float64") for each in said)
    assert all(("become True" in each) == (type_of_y == "bool") for each in said)
