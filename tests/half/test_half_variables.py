"""Variables that hold elements of half precision and other numbers: types and values are those of float32, without ml_dtypes too.

The reference is Numba with float32. What a program has as ``<2>`` is ``2`` beside an element, ``np.float32(2)`` in the reference.
"""

import itertools
import re

import numba
import numpy as np
import pytest
from halves import BFLOAT16, BY_NAME, FORMS, code_of, nearest, numbers, same, tensor
from interpreter import run_python
from numba import types
from numba.core.registry import cpu_target

import fastexchange.half as half
from fastexchange import fast_args

pytest.importorskip("torch")

# ---- types -----------------------------------------------------------------------------------------------------------
HALVES = [getattr(half, form.name) for form in FORMS]
NUMBERS = [
    types.boolean, types.literal(True), types.literal(1), types.int8, types.uint8, types.int16, types.uint16, types.int32,
    types.uint32, types.int64, types.uint64, types.float32, types.float64, types.complex64, types.complex128,
]  # fmt: skip


@pytest.mark.parametrize("of", HALVES, ids=str)
def test_a_variable_has_the_type_that_it_has_with_float32(of):
    unify = cpu_target.typing_context.unify_pairs
    for other in NUMBERS:
        want = unify(types.float32, other)
        for pair in ((of, other), (other, of)):
            assert unify(*pair) == want, pair
            assert unify(*map(types.Optional, pair)) == unify(types.Optional(pair[0]), pair[1]) == types.Optional(want)
            assert unify(*(types.UniTuple(each, 2) for each in pair)) == types.UniTuple(want, 2)
    for other in HALVES:
        assert unify(of, other) == unify(other, of) == (of if of == other else types.float32)
    assert unify(of, types.none) == unify(types.none, of) == types.Optional(of)
    assert unify(of, types.unicode_type) is unify(types.unicode_type, of) is None


# ---- programs --------------------------------------------------------------------------------------------------------
PARAMETERS = "x, z, f, d, h, k, b, c, n, y, j"
"""`x`, `z`: arrays of two formats; `f`, `d`: of float32, float64; `h`: an int16; `k`: an int; `b`: a bool; `c`: complex; `n`: 0
to 2; `y[j]`: where a program may store its result as an element."""
WRITTEN = (
    " s = x[0]\n for i in range(1, x.size): s += x[i]\n return s", " m = x[0]\n for e in x: m = max(m, e)\n return m",
    " a = 1\n if n: a = x[1]\n return a", " return x[1] if n else False", " return x[0] or f[1]",
    " t = True\n if n: t = x[1]\n return t", " t = x[0]\n if n: t = t * <2>\n return t", " s = 0\n for e in x: s += e\n return s",
    " s = 0.0\n for e in x: s += e * e\n return s", " s = x.dtype.type(0)\n for e in x: s += e\n return s",
    " m = -1\n for e in x:\n  if e > m: m = e\n return m", " t = z[0]\n for e in x:\n  if e < t: t = e\n return t",
    " l = [1.0]\n l.append(x[1])\n return l[0], l[1]", " l = [x[1]]\n l.append(1.0)\n return l[0], l[1]",
    " l = [e for e in x]\n l[1] = f[0]\n return l[0], l[2]", " l = [f[0], f[1]]\n l[1] = x[2]\n return l[1]",
    " return sorted([x[0], f[1], x[2]])[0]", " return sum([e for e in x])", " m = {1: 1.0}\n m[2] = x[1]\n return m[2]",
    " a, b = x[0], f[0]\n for i in range(n): a, b = b, a\n return a, b", " t = x[0]\n for e in (x[1], x[2]): t = e\n return t",
    " q = np.concatenate((x, f))\n return q[0], q[-1]", " return np.array([x[0], 1.0, f[1]]).sum()",
    " return max(x[0], f[1], d[2]), min(d[0], x[1], z[2])", " def g(t):\n  return t if n else 1.5\n return g(x[0])",
    " def g(t=1):\n  if n: t = x[0]\n  return t\n return g()", " t = x[0] * <3>\n if n: t = d[1] - x[2]\n y[j] = t\n return t",
)  # fmt: skip
"""What people write."""
OTHERS = ("z[2]", "2", "True", "b", "h", "f[1]", "d[2]", "k", "2.5", "c", "f[1] * 2", "x[1] * f[1]", "x.dtype.type(1)", "x.sum()")
OF_NUMBERS = (
    " t = {0}\n if n: t = {1}\n return t", " return {0} if n else {1}", " return {0} or {1}", " return {0} and {1}",
    " t = <{0}>\n for i in range(3): t += {1}\n return t", " t = <{0}>\n for i in range(3): t = {1} * t\n return t",
    " t = {0}\n i = 0\n while i < n:\n  t = {1}\n  i += 1\n return t", " t = None\n if n: t = {0}\n if n > 1: t = {1}\n return t",
    " l = [{0}, {1}]\n l.append({1})\n l.append({0})\n return l[0], l[1], l[2], l[3]", " if n: return {0}\n return {1}",
    " t = {0}, {1}\n if n: t = {1}, {0}\n return t", " t = {0}\n if n:\n  if n > 1: t = {1}\n  else: t = x[0]\n return t",
)  # fmt: skip
OF_REALS = (
    " t = {0}\n for i in range(3): t = max(t, {1})\n return t", " t = {0}\n for i in range(3): t = min({1}, t)\n return t",
    " t = {0}\n if t > {1}: t = {1}\n return t",
    " t = abs({0} + 1)\n while t < 50: t = t * 3\n while t > {1}: t = t - 20.5\n return t",
)  # fmt: skip


def of_pairs():
    """A program of each kind for an element and another number, in both orders."""
    found = []
    for other in OTHERS:
        for text, (a, b) in itertools.product(OF_NUMBERS + OF_REALS * (other != "c"), (("x[1]", other), (other, "x[1]"))):
            start = "<{0}>" if a in ("True", "b", "h") else "{0}"
            found.append(text.replace("<{0}>", start).format(a, b))
    return found


def function_of(programs, beside):
    """A function that returns what each program returns. `beside`: what is in place of ``<2>``."""
    names = {"np": np}
    for j, program in enumerate(programs):
        body = re.sub(r"<(\w+)>", beside, program)
        exec(f"def program({PARAMETERS}):\n{body}", names)
        names[f"program_{j}"] = numba.njit(names["program"])
    calls = (f"program_{j}({PARAMETERS})".replace("j)", f"{j})") for j in range(len(programs)))
    exec(f"def all_of_them({PARAMETERS[:-3]}):\n return {', '.join(calls)},", names)
    return names["all_of_them"]


def flat(result):
    return [one for each in result for one in flat(each)] if isinstance(result, tuple) else [result]


def compare(programs, form):
    other = BY_NAME["float16" if form.name == "bfloat16" else "bfloat16"]
    codes = [(each, nearest(each, np.array(values))) for each, values in ((form, [1.3, 0.7, -2.9]), (other, [0.3, 1.7, 0.9]))]
    halves, floats = [tensor(*each) for each in codes], [numbers(each)[code].astype(np.float32) for each, code in codes]
    rest = np.array([0.1, 1.9, -3.3], np.float32), np.array([0.7, 1.1, 2.3]), np.int16(3), 5, True, 0.3 + 1j
    kernel, reference = fast_args(function_of(programs, r"\1")), numba.njit(function_of(programs, r"np.float32(\1)"))
    for n in range(3):
        stored, want = tensor(form, np.zeros(len(programs))), np.zeros(len(programs), np.float32)
        results = kernel(*halves, *rest, n, stored), reference(*floats, *rest, n, want)
        for got, expected in zip(*map(flat, results), strict=True):
            assert repr(got) == repr(expected), f"{got!r} instead of {expected!r}, n = {n}"
        same(form, code_of(stored), nearest(form, want))


def check(programs, form, together=10):
    """Programs return and store the same as with float32. `together`: programs in one kernel, which saves time."""
    for first in range(0, len(programs), together):
        part = programs[first : first + together]
        try:
            compare(part, form)
        except Exception as error:
            if len(part) == 1:
                raise AssertionError(f"{form}:\n{part[0]}\n{type(error).__name__}: {error}") from error
            check(part, form, 1)
            raise


@pytest.mark.parametrize("programs", [[*WRITTEN[:5], WRITTEN[-1]], pytest.param(WRITTEN[5:-1], marks=pytest.mark.slow)],
                         ids=["accumulators and conditions", "others"])  # fmt: skip
def test_programs(programs):
    check(programs, BFLOAT16)


IN_A_PROCESS = """
    import sys
    if sys.argv[1] == "without ml_dtypes":
        sys.modules["ml_dtypes"] = None  # whatever is installed
    import test_half_variables as tests

    index = int(sys.argv[2])
    tests.check([*tests.WRITTEN, *tests.of_pairs()[index::6]], tests.FORMS[index])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["with ml_dtypes", "without ml_dtypes"])
@pytest.mark.parametrize("index", range(6), ids=map(str, FORMS))
def test_many_programs(index, way):
    """Each format has its share of all pairs: what is compiled for one test of all would take gigabytes."""
    run_python(IN_A_PROCESS, way, str(index))
