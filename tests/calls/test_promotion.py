"""The element type of an output without a declared one whose inputs differ in theirs."""

import itertools

import numpy as np
import pytest
from frameworks import jax_with_64_bits, needs_torch, torch
from interoperability import jax
from raising import check_raises

from fastexchange import DLDataType, fast_args
from fastexchange.ground.promotion import promoted

NAMES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
NAMES += ["complex64", "complex128"]
PAIRS = list(itertools.product([*NAMES, "uint16", "uint32", "uint64"], repeat=2))


def name_of(one: str, other: str) -> str | None:
    found = promoted([DLDataType.from_str(one), DLDataType.from_str(other)])
    return None if found is None else str(found)


@needs_torch
def test_types_are_promoted_as_by_pytorch():
    for one, other in itertools.product(NAMES, repeat=2):
        wanted = torch.promote_types(getattr(torch, one), getattr(torch, other))
        assert f"torch.{name_of(one, other)}" == str(wanted), (one, other)


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_types_are_promoted_as_by_jax():
    with jax_with_64_bits():
        for one, other in PAIRS:
            if {one, other} != {"uint64", name_of(other, one)} and name_of(one, other) is not None:
                assert name_of(one, other) == str(jax.numpy.promote_types(one, other)), (one, other)


def test_types_are_promoted_as_by_numpy_but_for_integers_with_floats():
    for one, other in (pair for pair in PAIRS if "bfloat16" not in pair):  # which NumPy has not
        kinds = {np.dtype(each).kind for each in (one, other)}
        if kinds <= set("biu") or not kinds & set("iu"):
            wanted = np.promote_types(one, other)
            assert name_of(one, other) == (None if kinds == {"i", "u"} and wanted == np.float64 else str(wanted)), (one, other)
        else:
            assert name_of(one, other) == max(one, other, key=lambda name: np.dtype(name).kind in "fc"), (one, other)


def test_types_with_none():
    for other in ("int64", "float8_e5m2", "float64", "float8_e4m3fnuz", "int4", "bool"):
        assert name_of("float8_e4m3fn", other) is None and name_of(other, "float8_e4m3fn") is None
    assert name_of("uint64", "int8") is None and name_of("complex32", "float32") is None
    assert promoted([DLDataType.from_str("float32"), None]) is promoted([None, None]) is None
    assert promoted([*map(DLDataType.from_str, ("uint64", "int8", "float32"))]) is None


@fast_args(out="x[n], w[n], flags[] -> y[n]")
def added(x, w, flags, y):
    for i in range(y.shape[0]):
        y[i] = x[i] + w[i]


MIXED = [  # x, w, flags, y
    ("int64", "float32", "bool", "float32"), ("float32", "int64", "bool", "float32"), ("float32", "float64", "int8", "float64"),
    ("int64", "int32", "bool", "int64"), ("uint8", "int8", "bool", "int16"), ("int16", "float64", "complex64", "complex128"),
    ("float64", "float64", "float64", "float64"),
]  # fmt: skip

PATHS = {"numpy": (np.asarray, added), "memoryview": (memoryview, added)}
"""How a tensor of a NumPy array is made, and how the kernel is called."""
if torch is not None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(*given):
        return make_fx(lambda x, w, flags: added(x, w, flags))(*given)(*given)

    operator = added.as_torch_op("fx_test_promotion::added")
    by_call = {"torch": added, "operator": operator, "torch.ops": torch.ops.fx_test_promotion.added, "traced": traced}
    PATHS |= {path: (torch.from_numpy, call) for path, call in by_call.items()}
    PATHS |= {
        "vmap": (lambda array: torch.from_numpy(np.stack([array, array])), lambda *given: torch.vmap(added)(*given)[0]),
        "mixed": (lambda array: array if array.dtype == "int64" else torch.from_numpy(array), added),
    }
if jax is not None:
    PATHS["jax"] = (lambda array: jax.numpy.asarray(array), added)


@pytest.mark.parametrize("path", PATHS)
def test_an_output_has_the_promoted_type_on_every_path(path):
    tensor_of, call = PATHS[path]
    for x, w, flags, wanted in MIXED[::3] if path in ("memoryview", "jax") else MIXED:  # which have kernels of their own
        given = [tensor_of(np.array(values, dtype)) for values, dtype in (([1, 1], x), ([0.5, 2], w), (1, flags))]
        wanted = str(jax.dtypes.canonicalize_dtype(wanted)) if path == "jax" else wanted
        with np.errstate(all="ignore"):
            for _ in range(2 if path in ("traced", "vmap") else 4):  # by Python and natively
                y = call(*given)
                assert str(y.dtype).removeprefix("torch.") == wanted, (x, w, flags)
                assert path != "jax" or isinstance(y, jax.Array)
                assert [complex(each) for each in y] == [complex(np.array(0.5, w)) + 1, 3]


@fast_args(out="x[n], w[n] -> y[n]")
def unpromoted(x, w, y):
    y[:] = x


def test_without_a_promoted_type_the_line_to_write_is_named():
    message = (
        r"unpromoted\(\): its output 'y' has no declared type, and the types of its inputs are promoted to none: 'x' is uint64, "
        r"'w' is int8; write y\[n\]: float32, or y\[n\]: x, in out="
    )
    given = np.ones(2, np.uint64), np.ones(2, np.int8)
    ways = [(unpromoted, given)]
    if torch is not None:
        functions = unpromoted, unpromoted.as_torch_op("fx_test_promotion::unpromoted"), make_fx(lambda x, w: unpromoted(x, w))
        ways += [(function, tuple(map(torch.from_numpy, given))) for function in functions]
    for call, arguments in ways * 3:
        check_raises((TypeError, RuntimeError), message, call, *arguments)  # RuntimeError: as torch.ops raises it
    y, dates = np.zeros(2, np.uint64), np.array(["2020-01-01"], "M8[D]")
    assert unpromoted(*given, y) is y and y.tolist() == [1, 1]
    check_raises(TypeError, r"'x' is float64, 'w' is of none of DLPack", unpromoted, np.ones(1), dates)
    check_raises(TypeError, r"argument 'x' \(position 0\): its elements have no DLPack type", unpromoted, dates, dates)


def test_a_declared_type_is_not_promoted():
    kernel = fast_args(out="x[n], w[n] -> y[n]: x, z[n]: float16")(lambda x, w, y, z: (y.fill(1), z.fill(1))[0])
    y, z = kernel(np.ones(2, np.float32), np.ones(2))
    assert (y.dtype, z.dtype) == (np.float32, np.float16)
