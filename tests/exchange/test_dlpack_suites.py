"""The DLPack tests of NumPy, as it has installed them, PyTorch and tvm-ffi, with this package in the framework's place."""

import ast
import itertools
import types
from pathlib import Path

import numpy as np
import pytest
from exchanges import CALLS, CONVERSIONS, SOURCES, exporter, needs_tvm_ffi
from frameworks import has_versioned_capsules, is_exported, needs_torch, takes_copy, torch, tvm_ffi
from oracle import type_and_message

from fastexchange import convert, fast_args, from_dlpack, register_dlpack_dtype, to_dlpack
from fastexchange.ground import dtype_registry
from fastexchange.ground.dlpack import VERSION


class Protocol:
    """A tensor of which only ``__dlpack__`` and ``__dlpack_device__`` are to be seen, and what it has been asked for."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.asked: list[dict] = []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options)
        return self.tensor.__dlpack__(**options)


# ---- NumPy's -------------------------------------------------------------------------------------------------------
SUITE = Path(np.__file__).parent / "_core" / "tests" / "test_dlpack.py"


def _own_export(x, **options):
    return x.__dlpack__(**options)


def _our_export(x, **options):
    return exporter(x).__dlpack__(**options)


PLACES = {
    "Consumer": (lambda x, **options: from_dlpack(Protocol(x), **options), _own_export),
    "Producer": (lambda x, **options: np.from_dlpack(exporter(x), **options), _our_export),
    "Both": (from_dlpack, _our_export),
}
"""What this package stands for: ``from_dlpack`` and ``__dlpack__`` of NumPy's tests."""

DIFFERENCES = {
    ("Producer", "test_dunder_dlpack_stream"): "to_dlpack() has no stream: memory of the CPU needs none",
    ("Both", "test_dunder_dlpack_stream"): "to_dlpack() has no stream: memory of the CPU needs none",
    ("Consumer", "test_buffererror_bad_dtype"): "it takes a dtype out of NumPy's registry; ours still has it",
    ("Both", "test_buffererror_bad_dtype"): "it takes a dtype out of NumPy's registry; ours still has it",
}
"""NumPy's tests that fail with this package in that place, and why. One that passes fails the run."""
if type_and_message(np.arange(1).__dlpack__, dl_device=(10, 0))[0] is ValueError:
    for _place in ("Producer", "Both"):
        DIFFERENCES[_place, "test_device"] = "a device that there is not is a BufferError; older NumPys raised ValueError"


class _Changes(ast.NodeTransformer):
    """``x.__dlpack__(...)`` becomes ``__dlpack__(x, ...)``, except ``super()``'s; the words of messages may differ."""

    def visit_Call(self, node):
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name() as tensor, attr="__dlpack__"):
                node.func, node.args = ast.Name("__dlpack__", ast.Load()), [tensor, *node.args]
            case ast.Attribute(attr="raises"):
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != "match"]
            case ast.Name("new_and_old_dlpack"):  # in NumPy before 2.5 a generator, which pytest will not take
                return ast.Call(ast.Name("list", ast.Load()), [node], [])
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list = [each for each in node.decorator_list if "thread_unsafe" not in ast.unparse(each)]
        return node


class _Instead(types.ModuleType):
    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.fixture(scope="class")
def own_registry():
    """As NumPy's tests begin with an empty registry and leave nothing in it, so with ours."""
    with pytest.MonkeyPatch.context() as patch:
        for table in ("_exports", "_imports", "_to_learn"):
            patch.setattr(dtype_registry, table, {})
        yield


def numpys_tests(consume, export) -> dict[str, type]:
    tree = ast.fix_missing_locations(_Changes().visit(ast.parse(SUITE.read_text(encoding="utf-8"))))
    namespace = {"__name__": __name__, "__dlpack__": export}
    exec(compile(tree, SUITE, "exec"), namespace)
    dtypes = _Instead(np.dtypes, register_dlpack_dtype=register_dlpack_dtype)
    namespace["np"] = _Instead(np, from_dlpack=consume, dtypes=dtypes)
    return {name: tests for name, tests in namespace.items() if name.startswith("Test")}


if SUITE.exists():
    for _place, (_consume, _export) in PLACES.items():
        for _name, _tests in numpys_tests(_consume, _export).items():
            for (_where, _test), _reason in DIFFERENCES.items():
                if _where == _place and hasattr(_tests, _test):
                    setattr(_tests, _test, pytest.mark.xfail(reason=_reason, strict=True)(getattr(_tests, _test)))
            globals()[f"{_name}{_place}"] = pytest.mark.usefixtures("own_registry")(_tests)


def test_numpy_has_installed_its_tests():
    if not SUITE.exists():
        pytest.skip("this NumPy has not")


# ---- PyTorch's: element types --------------------------------------------------------------------------------------
def of_type(dtype):
    return torch.arange(16, dtype=torch.uint8).view(dtype)


EXCHANGED, REFUSED = [], []
"""PyTorch's element types that come back from its own exchange, and those that it refuses to export."""
for _dtype in dict.fromkeys(each for each in vars(torch).values() if isinstance(each, torch.dtype)) if torch else ():
    try:
        _tensor = of_type(_dtype)
        if not is_exported(_dtype):
            REFUSED.append(_dtype)
        elif torch.from_dlpack(_tensor).dtype is _dtype:
            EXCHANGED.append(_dtype)
    except RuntimeError:  # there are no such tensors
        pass


def ways_to_pytorch(**copy) -> dict:
    return {
        "a capsule": lambda x: torch.from_dlpack(to_dlpack(x, max_version=(1, 0), **copy)),
        "a legacy capsule": lambda x: torch.from_dlpack(to_dlpack(x, **copy)),
        "an object": lambda x: torch.from_dlpack(exporter(x), **copy),
        "the protocol": lambda x: convert(Protocol(x), torch.Tensor, **copy),
        "the tensor": lambda x: convert(x, torch.Tensor, **copy),
        **({"tvm_ffi": lambda x: torch.from_dlpack(convert(x, tvm_ffi.Tensor, **copy))} if tvm_ffi is not None else {}),
    }


SHARED, COPIED = ways_to_pytorch(), ways_to_pytorch(copy=True)
if not takes_copy():
    del SHARED["a capsule"], COPIED["a capsule"], COPIED["an object"]
if not has_versioned_capsules():  # a legacy capsule's tensor seems to be readonly
    del SHARED["the protocol"]


@needs_torch
def test_element_types_that_pytorch_exchanges():
    assert {torch.bfloat16, torch.complex64, torch.bool, torch.uint64, torch.float16} < {*EXCHANGED} and REFUSED
    for dtype, ways in itertools.product(EXCHANGED, (SHARED, COPIED)):
        tensor = of_type(dtype)
        for name, way in ways.items():
            result = way(tensor)
            assert result.dtype is dtype and torch.equal(result.view(torch.uint8), tensor.view(torch.uint8)), (dtype, name)
            assert (result.data_ptr() == tensor.data_ptr()) == (ways is SHARED), (dtype, name)


@needs_torch
def test_element_types_that_pytorch_refuses():
    ignore = fast_args(lambda x: 0)
    for dtype in REFUSED:
        tensor = of_type(dtype)
        for name, way in {**SHARED, **COPIED, "from_dlpack": from_dlpack, "a kernel": ignore}.items():
            if name == "the protocol":
                assert type_and_message(way, tensor)[0] is type_and_message(torch.Tensor.__dlpack__, tensor)[0], dtype
            elif name != "the tensor":  # which is returned as it is
                assert type_and_message(way, tensor)[0] is BufferError, (dtype, name)


# ---- what frameworks are asked for, and ask for ---------------------------------------------------------------------
ASKING = {**CALLS, **CONVERSIONS, "a kernel": fast_args(lambda x: x.size), "to_dlpack, legacy": to_dlpack}


@pytest.mark.parametrize("source", [name for name in ("numpy.ndarray", "torch.Tensor", "tvm_ffi.Tensor") if name in SOURCES])
def test_a_producer_is_asked_for_the_newest_version_and_for_no_stream(source):
    """A tensor on the CPU has none, and PyTorch's refuse to hear of one. PyTorch's before version 2.9 have to be asked again."""
    is_mute = source == "torch.Tensor" and not has_versioned_capsules()
    asked = [{"max_version": VERSION}, *[{}] * is_mute]
    for name, ask in ASKING.items():
        if is_mute and name == "to_dlpack, legacy":
            continue  # the tensor seems to be readonly, and such a capsule cannot say so
        for _ in range(3):
            tensor = Protocol(SOURCES[source](np.arange(3.0)))
            ask(tensor)
            assert all(options in asked for options in tensor.asked), name
        # what seems to be readonly is exported a second time
        has_copied = is_mute and name in ("to torch.Tensor", "to tvm_ffi.Tensor")
        assert tensor.asked == asked * (1 + has_copied), name


# ---- tvm-ffi's -----------------------------------------------------------------------------------------------------
@needs_tvm_ffi
def test_a_class_of_tensors_that_tvm_ffi_was_told_to_make():
    core, own = tvm_ffi.core, tvm_ffi.core._CLASS_TENSOR
    made = type("Made", (tvm_ffi.Tensor,), {})
    array = np.arange(4.0)
    core._set_class_tensor(made)
    try:
        for to in (tvm_ffi.Tensor, made):
            assert type(convert(array, to)) is made
        tensor = tvm_ffi.get_global_func("testing.echo")(array)
        doubled = fast_args(lambda x: (x * 2, x[1:], x))(tensor)
    finally:
        core._set_class_tensor(own)
    assert [type(each) for each in doubled] == [made] * 3 and doubled[2] is tensor
    assert [from_dlpack(each).tolist() for each in doubled[:2]] == [[0, 2, 4, 6], [1, 2, 3]]
    assert type_and_message(convert, array, made)[0] is TypeError  # there are none any more
