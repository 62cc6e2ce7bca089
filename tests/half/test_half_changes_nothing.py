"""Half precision replaces nothing of Numba, and plain programs are typed and compute as without it."""

import inspect
import operator
import sys

import numba
import numpy as np
import pytest
from numba import types
from numba.core.registry import cpu_target
from numba.core.typing.templates import builtin_registry


# ---- what Numba consists of ------------------------------------------------------------------------------------------
def parts():
    """By path, the functions, classes, templates and tables of Numba that are loaded, with what each is made of."""
    found = {("context", side): type(getattr(cpu_target, side)) for side in ("typing_context", "target_context")}
    classes = {}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "numba" or module is None:
            continue
        for attribute, value in [*vars(module).items()]:
            is_part = callable(value) or isinstance(value, (frozenset, types.Type))
            if isinstance(value, dict) and not attribute.startswith("__"):
                kept = {key: each for key, each in value.items() if inspect.isfunction(each) or isinstance(each, types.Type)}
                found.update({(name, attribute, repr(key)): each for key, each in kept.items()})
            elif is_part or inspect.ismodule(value):
                found[name, attribute] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "numba":
                classes[f"{value.__module__}.{value.__qualname__}"] = value
    for kind in ("functions", "attributes", "globals"):
        for place, each in enumerate(getattr(builtin_registry, kind)):
            found[kind, place] = each[1] if kind == "globals" else each
            for template in getattr(found[kind, place], "templates", (found[kind, place],)):
                classes[kind, place, getattr(template, "__name__", "")] = template
    for name, cls in classes.items():
        own = vars(cls).items() if isinstance(cls, type) else ()
        found.update({(name, attribute): value for attribute, value in own if not isinstance(value, int)})  # counters
    return found


def codes(found):
    return {path: value.__code__ for path, value in found.items() if inspect.isfunction(value)}


def changed(before):
    """The paths of what `before`, parts and their code objects, had and Numba has no longer."""
    now = parts()
    both = zip(before, (now, codes(now)), strict=True)
    return [path for was, is_now in both for path in was if is_now.get(path) is not was[path]]


# ---- what plain programs do ------------------------------------------------------------------------------------------
NUMBERS = types.boolean, types.int8, types.int64, types.uint64, types.float32, types.float64, types.complex64, types.literal(2)
KINDS = *NUMBERS, types.float32[::1], types.int64[:, :], types.float64[::1, :], types.UniTuple(types.int64, 2), types.float16[:]
OF_TWO = (
    operator.add, operator.truediv, operator.pow, operator.iadd, operator.lt, operator.eq, operator.getitem, operator.lshift,
    min, max, divmod, np.maximum, np.add,
)  # fmt: skip
ATTRIBUTES = "dtype", "shape", "T", "sum", "max", "argmax", "value"
OF_ONE = abs, float, bool, round, np.sqrt, np.isnan, np.sum, np.mean, np.max, np.min, np.median, np.argmax, np.zeros


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[:1]


def plain(x, y, n):
    t = 1
    if n:
        t = x[0]
    y[:] = 2 * x + t
    y += x
    some = x.dtype.type(t), np.where(x > 1, x, 0)[0], x.T.shape, np.zeros(2)[0]
    return x.sum(), x.max(), np.mean(y), np.argmax(y), some


def behaviour():
    context = cpu_target.typing_context
    context.refresh()
    given = [(function, (kind,)) for function in OF_ONE for kind in KINDS]
    given += [(function, (one, other)) for function in OF_TWO for one in KINDS for other in KINDS]
    found: list = [outcome(context.resolve_function_type, function, kinds, {}) for function, kinds in given]
    found += [context.unify_pairs(one, other) for one in NUMBERS for other in NUMBERS]
    found += [context.resolve_getattr(kind, name) for kind in KINDS for name in ATTRIBUTES]
    halves, x = np.ones(2, np.float16), np.arange(5, dtype=np.float32)
    for parallel in (False, True):
        found.append(numba.njit(plain, parallel=parallel)(x, x.copy(), 1))
    found += [numba.typeof(halves), numba.typeof(halves[0]), numba.from_dtype(halves.dtype)]
    found += [outcome(numba.njit(function), halves) for function in (lambda x: x[0], lambda x: x.sum(), lambda x: x.size)]
    found += [outcome(numba.njit(lambda: np.dtype("float16"))), outcome(numba.vectorize(lambda a: a + 1), halves)]
    return list(map(str, found))


def check(behaviour=behaviour):
    """In an interpreter without this package: what there is, then with it, step by step."""
    import warnings

    warnings.simplefilter("ignore")
    assert "fastexchange" not in sys.modules
    numba.njit(plain)(np.ones(5, np.float32), np.ones(5, np.float32), 1)  # a first compilation loads overloads
    did, before = behaviour(), parts()
    before = before, codes(before)
    assert len(before[0]) > 10_000 and not changed(before)

    from fastexchange import fast_args

    def of_half(x):
        y = np.empty_like(x)
        y[:] = 2 * x + x.max()
        return y.sum()

    dtype = pytest.importorskip("ml_dtypes").bfloat16
    for given, parallel in ((np.float16, False), (dtype, True)):
        assert fast_args(of_half, parallel=parallel)(np.arange(4).astype(given)) == 24.0
        assert not changed(before)
    import fastexchange.half

    assert numba.njit(of_half)(np.arange(4).astype(dtype)) == 24.0
    assert numba.vectorize([fastexchange.half.bfloat16(fastexchange.half.bfloat16)])(lambda a: a + a)(np.ones(2, dtype))[0] == 2.0
    assert not changed(before) and behaviour() == did


@pytest.mark.parametrize("form", ["check(lambda: None)", pytest.param("check()", marks=pytest.mark.slow)])
def test_nothing_of_numba_is_replaced_and_plain_programs_are_as_without(form):
    from other_ways import run_changed  # it imports this package, which the interpreter itself must not find there

    run_changed(f"import test_half_changes_nothing as tests; tests.{form}")
