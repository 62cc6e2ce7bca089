"""An interpreter whose objects do not lie in memory as native code assumes: the next safer way, and ``explain`` says so."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import importlib.util, sys, types
import numpy as np
from fastexchange import convert, fast_args, from_dlpack, to_dlpack
from fastexchange.ground import cpython
{change}
from fastexchange.dispatch import runtime
what = {what!r}

@fast_args
def kernel(a, x, pair, y=2.0):
    return a * x.sum() + pair[0] + y

@fast_args
def twice(x):
    return 2 * x

@fast_args
def sums(items):
    s = 0.0
    for item in items:
        s += item.sum()
    return s

class Protocol:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return 1, 0

of = [np.ones, lambda n: Protocol(np.ones(n))]
if importlib.util.find_spec("torch"):
    import torch
    of.append(lambda n: torch.ones(n, dtype=torch.float64))
for _ in range(40):
    for make in of:
        x = make(3)
        assert kernel(2.0, x, (1.0, 2.0)) == kernel(2.0, x=x, pair=(1.0, 2.0)) == kernel(2.0, x, (1.0, x)) == 9.0
        assert sums([x, x]) == sums((x, x)) == 6.0
        if type(x) is not Protocol:
            made = twice(x)
            assert type(made) is type(x) and made.tolist() == [2.0] * 3
for make in of:
    x = make(3)
    count = sys.getrefcount(x)
    for array in (from_dlpack(x), from_dlpack(x, copy=None), convert(x, np.ndarray)):
        array[0] += 1.0
    assert from_dlpack(x).tolist() == [4.0, 1.0, 1.0] and "dltensor" in repr(to_dlpack(x))
    if len(of) == 3:
        assert convert(x, torch.Tensor).tolist() == [4.0, 1.0, 1.0]
    del array
    assert sys.getrefcount(x) == count, type(x)
try:
    kernel(2.0)
except TypeError as error:
    assert "missing 2 required" in str(error)
text = str(kernel.explain(2.0, np.ones(3), (1.0, 2.0)))
assert repr(what) in text, text
print(kernel.counts().fast)
"""


CHECKS = {
    "ndarray": "from fastexchange.producers import ndarray; ndarray.verify = lambda: False",
    "meminfo": "from fastexchange.dispatch import runtime; runtime._verify_meminfo = lambda: False",
    "list": "from fastexchange.dispatch import lists; lists.verify = lambda: False",
}
for _name in ("object", "float", "complex", "tuple", "dispatcher"):
    CHECKS[_name] = f"checks = dict(cpython.verify()); cpython.verify = lambda: {{**checks, {_name!r}: not checks[{_name!r}]}}"
LAYOUTS = {  # what is read lies elsewhere than it does in this interpreter
    "object": "cpython.OB_TYPE += 8",
    "object, by its count": "cpython._word = lambda at, word=cpython._word: word(at) + 1",
    "float": "cpython._double = lambda at: 0.0",
    "complex": "cpython.OB_FVAL -= 8",
    "tuple": "cpython.OB_ITEM -= 8",  # as with code for CPython 3.13 on 3.14
    "tuple, by its size": "cpython.OB_SIZE -= 8",
    "dispatcher": "cpython.KERNEL_CONTEXT -= 8",
    "ndarray": (
        "from fastexchange.producers import ndarray\n"
        "from fastexchange.ground.dlpack import ffi\n"
        "moved = lambda kind, at: ffi.cast(kind, at + 8 * isinstance(at, int))\n"
        "ndarray.ffi = types.SimpleNamespace(cast=moved, sizeof=ffi.sizeof)"
    ),
}


def _run(what: str, change: str) -> None:
    code = textwrap.dedent(SCRIPT.format(what=what, change=change))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if what in ("object", "tuple", "meminfo", "dispatcher"):
        assert done.stdout.strip() == "0"


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKS)
def test_what_cannot_be_verified_is_not_used(what):
    _run(what, CHECKS[what])


@pytest.mark.slow
@pytest.mark.parametrize("what", LAYOUTS)
def test_a_layout_that_has_changed_is_noticed(what):
    _run(what.partition(",")[0], LAYOUTS[what])
