"""Numba's compiler lock: what loads definitions into Numba's contexts holds it, so that no thread loses a compilation."""

import math
import pickle

import numba
import numpy as np
import pytest
from children import accelerating
from counting import scene
from numba.core.base import BaseContext as TargetContext
from numba.core.codegen import CPUCodegen, CPUCodeLibrary
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.typing.context import BaseContext as TypingContext
from numba.extending import overload
from raising import check_raises

from fastexchange import explain, fast_args
from fastexchange.arguments import strings
from fastexchange.calls.dependencies import dependencies
from fastexchange.ground import numba_internals

TOUCHES = {
    TargetContext: ("refresh", "install_registry", "get_function", "subtarget"),
    CPUContext: ("load_additional_registries",),
    TypingContext: ("refresh", "_load_builtins", "install_registry", "resolve_value_type", "resolve_overload"),
    CPUCodegen: ("create_library",),
    CPUCodeLibrary: ("add_ir_module", "finalize"),
    CompileResult: ("_reduce",),
}
"""What needs the lock. Making a dispatcher does not: see ``ground.numba_internals``."""


def doubled(x):
    """A function that ``overload`` defines."""


overload(doubled)(lambda x: lambda x: 2 * x)


def named(x):
    return doubled(math.sin(x)) + np.abs(x)


def accelerated():
    with accelerating():
        made = numba.njit(lambda x: x)
    assert [made("a") for _ in range(4)] == ["a"] * 4


def repeated():
    kernel, arguments = fast_args(lambda x, y, s: (x[0] + y[0], x), nogil=True), (np.ones(2), (1.0, 2), "text")
    assert [kernel(*arguments)[0] for _ in range(4)] == [2.0] * 4 and kernel.explain(*arguments)


def cached_and_pickled():
    kernel, again = (fast_args(named, cache=True) for _ in range(2))
    assert kernel(1.0) == again(1.0) == pickle.loads(pickle.dumps(kernel))(1.0) and again.stats.cache_hits


ACTIONS = {
    "what an argument is refused for": lambda: [
        check_raises(TypeError, None, fast_args(lambda x: x), argument) for argument in ([1, "a"], object())],
    "the first string": strings.verify.__wrapped__, "what code depends on": lambda: dependencies(named, {}),
    "checks of Numba": lambda: [each() for each in numba_internals._checks],
    "calls that repeat": repeated, "accelerated": accelerated, "kept and carried code": cached_and_pickled,
    "declared signatures": lambda: [fast_args(["float64(float64)"])(lambda x: 1.0)(value) for value in (1, np.float32(1))],
    "explained": lambda: explain(fast_args(named)),
    "outputs": lambda: fast_args(lambda x, y: y.fill(0), out="x[n] -> y[n]")(np.ones(3)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*reflected list")
def test_numbas_contexts_are_touched_under_its_lock(monkeypatch, cache):
    touched: list[tuple] = []

    def watched(cls, name, numbas):
        def watching(*given, **named):
            touched.append((cls, name, global_compiler_lock.is_locked()))
            return numbas(*given, **named)

        return watching

    watches = {(cls, name) for cls, names in TOUCHES.items() for name in names}
    for cls, name in watches:
        monkeypatch.setattr(cls, name, watched(cls, name, getattr(cls, name)))
    for name, action in ACTIONS.items():
        before = len(touched)
        with scene(name):
            action()
            assert len(touched) > before or name == "explained"
            assert not [where for *where, is_locked in touched if not is_locked]
    assert {(cls, name) for cls, name, _ in touched} == watches
