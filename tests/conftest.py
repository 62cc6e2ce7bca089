"""The frameworks that the tests run over, and the oracle: plain ``@njit`` on the NumPy view of the same memory."""

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from made_producers import Dunder, Ignorant, Legacy, Tabled

import fastexchange

try:
    import torch
except ImportError:
    torch = None
try:
    import tvm_ffi
except ImportError:
    tvm_ffi = None

NUMPY_DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
"""Every plain dtype that NumPy and DLPack share."""


@dataclass(frozen=True)
class Framework:
    """A source of tensors. ``tensor`` makes one of a NumPy array, sharing its memory."""

    name: str
    tensor: Callable[[np.ndarray], Any]
    native: bool = True
    """Whether a repeated call runs no Python at all."""
    readonly: bool = True
    """Whether a readonly array stays readonly."""
    negative_strides: bool = True
    dtypes: tuple[str, ...] = field(default=NUMPY_DTYPES)

    def __str__(self):
        return self.name


FRAMEWORKS = [
    Framework("numpy", lambda array: array),
    Framework("exchange table", Tabled, readonly=False),
    Framework("__dlpack__", Dunder),
    Framework("legacy __dlpack__", Legacy, readonly=False),
    Framework("unversioned __dlpack__", Ignorant, readonly=False),
]
if torch is not None:
    FRAMEWORKS.append(Framework("torch", torch.from_numpy, readonly=False, negative_strides=False))
if tvm_ffi is not None:
    FRAMEWORKS.append(Framework("tvm_ffi", tvm_ffi.from_dlpack, readonly=False, negative_strides=False))


@pytest.fixture(params=FRAMEWORKS, ids=str)
def framework(request) -> Framework:
    return request.param


def is_same(got, want) -> bool:
    """Whether two results are equal in type and value, arrays down to where their memory lies when it is shared."""
    if isinstance(want, np.ndarray):
        return (
            type(got) is type(want) and got.dtype == want.dtype and got.shape == want.shape
            and np.array_equal(got, want, equal_nan=want.dtype.kind in "fcmM")
        )  # fmt: skip
    if isinstance(want, (tuple, list)):
        return type(got) is type(want) and len(got) == len(want) and all(map(is_same, got, want))
    if isinstance(want, (float, complex, np.generic)) and want != want:
        return type(got) is type(want) and got != got
    return type(got) is type(want) and got == want


def check_same_as_njit(kernel, arguments: tuple, views: tuple | None = None, native: bool = True):
    """The kernel gives for `arguments` what its plain ``@njit`` dispatcher gives for `views`, for the same Numba types.

    `views`: the same arguments as plain Numba takes them; the arguments themselves if not given. `native`: the second call
    of its kind is made without Python.
    """
    got = kernel(*arguments)
    known = list(kernel.signatures)
    want = kernel.dispatcher(*(arguments if views is None else views))
    assert kernel.signatures == known, f"@njit infers {kernel.signatures[-1]}, @fast_args {known[-1]}"
    assert is_same(got, want), f"@njit gives {want!r}, @fast_args {got!r}"
    before = kernel.stats()
    again = kernel(*arguments)
    after = kernel.stats()
    assert is_same(again, want), f"@njit gives {want!r}, the second call of @fast_args {again!r}"
    if native:
        assert (after.fast, after.slow) == (before.fast + 1, before.slow), "the second call left the native path"
    return got


def type_and_message(function, *arguments, **keywords) -> tuple[type, str]:
    """The exception that a call raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function(*arguments, **keywords)
    return caught.type, str(caught.value)


@pytest.fixture
def no_leak():
    """Call with objects: after the test, each has as many references as before."""
    watched: list[tuple[object, int]] = []

    def watch(*things):
        gc.collect()
        watched.extend((thing, sys.getrefcount(thing)) for thing in things)
        # The list's tuples hold one reference more each than when they were counted.

    yield watch
    gc.collect()
    for thing, before in watched:
        assert sys.getrefcount(thing) == before + 1, f"{thing!r:.80}"


def run_python(code: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that finds this package and these tests."""
    paths = [str(Path(fastexchange.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, env=env, timeout=240
    )
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def numba_type(view) -> Any:
    """What ``numba.typeof`` says of an argument."""
    return numba.typeof(view)
