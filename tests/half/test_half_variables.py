"""Variables that hold elements of half precision and other numbers: types and values are those of float32."""

import pytest
from half_programs import LISTED, check, of_random
from halves import BFLOAT16, BY_NAME, FORMS, of_some
from interpreter import run_python
from numba import types
from numba.core.registry import cpu_target

import fastexchange.half as half

pytest.importorskip("torch")

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


def test_accumulators_and_conditions():
    assert check(LISTED[:5], [BFLOAT16]) == 3 * 5


@pytest.mark.slow
@of_some
def test_programs(form):
    assert check(LISTED, [form]) == 3 * len(LISTED)


@pytest.mark.slow
def test_programs_made_at_random():
    assert check(of_random(range(8)), [BFLOAT16, BY_NAME["float8_e4m3fnuz"]]) == 8 * 3 * 2


IN_A_PROCESS = """
    import sys
    if sys.argv[1] == "without ml_dtypes":
        sys.modules["ml_dtypes"] = None  # whatever is installed
    from half_programs import check, of_pairs, of_random
    from halves import FORMS

    index = int(sys.argv[2])
    seeds = range(1000 * index + 1, 1000 * index + 31)
    check([*of_pairs()[index::6], *of_random(seeds)], [FORMS[index]])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["with ml_dtypes", "without ml_dtypes"])
@pytest.mark.parametrize("index", range(6), ids=map(str, FORMS))
def test_many_programs(index, way):
    """Each format has its share of all pairs: what is compiled for one test of all would take gigabytes."""
    run_python(IN_A_PROCESS, way, str(index))
