"""An interpreter whose objects do not lie in memory as native code assumes: the next safer way, and ``explain`` says so."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import numpy as np
from fastexchange import fast_args
from fastexchange.ground import cpython
from fastexchange.dispatch import runtime
from fastexchange.producers import ndarray
what = {what!r}
if what == "ndarray":
    ndarray.verify = lambda: False
elif what == "meminfo":
    runtime._verify_meminfo = lambda: False
else:
    checks = dict(cpython.verify())
    assert checks[what]
    cpython.verify = lambda: {{**checks, what: False}}

@fast_args
def kernel(a, x, pair, y=2.0):
    return a * x.sum() + pair[0] + y

for _ in range(40):
    assert kernel(2.0, np.ones(3), (1.0, 2.0)) == kernel(2.0, x=np.ones(3), pair=(1.0, 2.0)) == 9.0
try:
    kernel(2.0)
except TypeError as error:
    assert "missing 2 required" in str(error)
text = str(kernel.explain(2.0, np.ones(3), (1.0, 2.0)))
assert repr(what) in text, text
print(kernel.counts().fast)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["object", "float", "complex", "tuple", "meminfo", "ndarray"])
def test_what_cannot_be_verified_is_not_used(what):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT.format(what=what))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if what in ("object", "tuple", "meminfo"):
        assert done.stdout.strip() == "0"
