"""Programs with variables of half precision among others, and what they return with float32 in its place.

ml_dtypes is not needed. The reference is Numba with float32, and README's table for operators of an element and another number:
what a program has as ``<2>`` is ``2`` beside an element, and ``np.float32(2)`` in the reference.
"""

import itertools
import random
import re
from collections.abc import Iterable

import numba
import numpy as np
from halves import BY_NAME, FORMS, code_of, nearest, numbers, same, tensor

from fastexchange import fast_args

__all__ = ["LISTED", "check", "of_pairs", "of_random"]

PARAMETERS = "x, z, f, d, h, k, b, c, n, y, j"
"""`x`, `z`: arrays of two formats; `f`, `d`: of float32, float64; `h`: an int16; `k`: an int; `b`: a bool; `c`: complex; `n`: 0
to 2; `y[j]`: where a program may store its result as an element."""
NARROW, WIDE = ["2", "True", "b", "h"], ["f[1]", "d[2]", "k", "2.5"]
"""Numbers that beside an element are float32, and others."""
OTHERS = ["z[2]", *NARROW, *WIDE, "c", "f[1] * 2", "x[1] * f[1]", "x.dtype.type(1)", "x.sum()"]
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


def of_pairs() -> list[str]:
    """A program of each kind for an element and another number, in both orders."""
    found = []
    for other in OTHERS:
        for text, (a, b) in itertools.product(OF_NUMBERS + OF_REALS * (other != "c"), (("x[1]", other), (other, "x[1]"))):
            start = "<{0}>" if a in ("True", "b", "h") else "{0}"
            found.append(text.replace("<{0}>", start).format(a, b))
    return found


LISTED = (
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
    " def g(t=1):\n  if n: t = x[0]\n  return t\n return g()",
)  # fmt: skip
"""What people write."""


_BESIDE = re.compile(r"<(\w+)>")


class _Expressions(random.Random):
    """Makes programs of one variable, at random."""

    def binary(self, kind: str, a: str, b: str) -> str:
        a, b = (f"<{one}>" if one in NARROW and other[:2] in ("x[", "z[") else one for one, other in ((a, b), (b, a)))
        return f"{kind}({a}, {b})" if kind in ("max", "min") else f"({a} {kind} {b})"

    def expression(self, depth: int) -> str:
        """Nothing is divided by zero."""
        if not depth or self.random() < 0.1:
            return self.choice(["x[0]", "x[i]", "z[i]", *NARROW, *WIDE])
        kind, a = self.choice(["+", "-", "*", "/", "max", "min", "abs", "neg"]), self.expression(depth - 1)
        if kind in ("abs", "neg"):
            return f"abs({a} - 2.5)" if kind == "abs" else f"(-({a} * 0.3))"
        return self.binary(kind, a, self.expression(depth - 1) if kind in "+-*" else self.beside())

    def beside(self) -> str:
        """A number with which an element and a float32 are computed alike: the variable may be either."""
        return self.choice(["x[1]", "x[i]", "z[0]", *WIDE])

    def value(self) -> str:
        """What is assigned: an element, a float, or an integer of 64 bits."""
        return self.beside() if self.random() < 0.5 else self.binary(self.choice("+-*"), self.expression(2), self.beside())

    def statement(self) -> str:
        return self.choice((
            " if n > {limit}: t = {e}", " t = {e}", " t = t {sign} {w}", " for i in range(3): t {sign}= {w}", " t = max(t, {w})",
            " t = min({w}, t)", " for i in range(3):\n  if t > {e}: t = x[i]", " t = t if n > {limit} else {e}", " t = t or {e}",
            " for i in range(3):\n  u = t\n  if {e} > {w}: u = {v}\n  t = u {sign} {w}",
            " l = [t, {e}]\n l.append({v})\n t = l[n]",
            " i = 0\n while t < {w} and i < 2:\n  t = t * 2.5 + {e}\n  i += 1", " t = [v {sign} {w} for v in x][n] if n else t",
        )).format(e=self.value(), v=self.value(), w=self.beside(), sign=self.choice("+-*"), limit=self.randrange(2))  # fmt: skip


def of_random(seeds: Iterable[int]) -> list[str]:
    """A program for each seed."""
    found = []
    for seed in seeds:
        one = _Expressions(seed)
        lines = [f" i = {one.randrange(3)}\n t = {one.value()}", *(one.statement() for _ in range(one.randrange(2, 6)))]
        found.append("\n".join([*lines, " y[j] = t\n return t"]))
    return found


def check(programs: Iterable[str], forms=FORMS, together: int = 10) -> int:
    """Assert that programs return and store the same with each of `forms` as with float32. Returns the number of comparisons.

    `together`: programs in one kernel, which saves time.
    """
    programs, count = [*programs], 0
    for form, first in itertools.product(forms, range(0, len(programs), together)):
        part = programs[first : first + together]
        try:
            count += _compare(part, form)
        except Exception as error:
            if len(part) == 1:
                raise AssertionError(f"{form}:\n{part[0]}\n{type(error).__name__}: {error}") from error
            check(part, [form], 1)
            raise
    return count


def _compare(programs: list[str], form) -> int:
    other = BY_NAME["float16" if form.name == "bfloat16" else "bfloat16"]
    codes = [(each, nearest(each, np.array(values))) for each, values in ((form, [1.3, 0.7, -2.9]), (other, [0.3, 1.7, 0.9]))]
    halves, floats = [tensor(*each) for each in codes], [numbers(each)[code].astype(np.float32) for each, code in codes]
    rest = np.array([0.1, 1.9, -3.3], np.float32), np.array([0.7, 1.1, 2.3]), np.int16(3), 5, True, 0.3 + 1j
    kernel, reference = fast_args(_function(programs, r"\1")), numba.njit(_function(programs, r"np.float32(\1)"))
    for n in range(3):
        stored, want = tensor(form, np.zeros(len(programs))), np.zeros(len(programs), np.float32)
        results = kernel(*halves, *rest, n, stored), reference(*floats, *rest, n, want)
        for got, expected in zip(*map(_flat, results), strict=True):
            assert repr(got) == repr(expected), f"{got!r} instead of {expected!r}, n = {n}"
        same(form, code_of(stored), nearest(form, want))
    return 3 * len(programs)


def _function(programs: list[str], beside: str):
    """A function that returns what each program returns. `beside`: what is in the place of ``<2>``."""
    names = {"np": np}
    for j, program in enumerate(programs):
        exec(f"def program({PARAMETERS}):\n{_BESIDE.sub(beside, program)}", names)
        names[f"program_{j}"] = numba.njit(names["program"])
    calls = (f"program_{j}({PARAMETERS})".replace("j)", f"{j})") for j in range(len(programs)))
    exec(f"def all_of_them({PARAMETERS[:-3]}):\n return {', '.join(calls)},", names)
    return names["all_of_them"]


def _flat(result) -> list:
    return [one for each in result for one in _flat(each)] if isinstance(result, tuple) else [result]
