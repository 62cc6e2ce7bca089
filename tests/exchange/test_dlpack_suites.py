"""The DLPack tests of NumPy, as it has installed them, and what frameworks with tables of their own check and refuse."""

import ast
import gc
import inspect
import itertools
import types
from pathlib import Path

import numpy as np
import pytest
from exchanges import CALLS, CONVERSIONS, SOURCES, exporter, needs_tvm_ffi
from frameworks import has_versioned_capsules, is_exported, needs_torch, paddle, takes_copy, torch, tvm_ffi
from interoperability import StridedMemoryView, memory_view
from oracle import references_kept, type_and_message
from other_ways import Protocol

from fastexchange import convert, explain, fast_args, from_dlpack, register_dlpack_dtype, to_dlpack
from fastexchange.arguments import paddle as paddle_producer
from fastexchange.arguments.discovery import discover
from fastexchange.ground import dtype_registry
from fastexchange.ground.dlpack import VERSION

# ---- NumPy's -------------------------------------------------------------------------------------------------------
SUITE = Path(np.__file__).parent / "_core" / "tests" / "test_dlpack.py"


def _our_export(x, **options):
    return exporter(x).__dlpack__(**options)


PLACES = {"Consumer": (lambda x, **options: from_dlpack(Protocol(x), **options), lambda x, **options: x.__dlpack__(**options)),
          "Producer": (lambda x, **options: np.from_dlpack(exporter(x), **options), _our_export),
          "Both": (from_dlpack, _our_export)}  # fmt: skip
"""What this package stands for: ``from_dlpack`` and ``__dlpack__`` of NumPy's tests."""

DIFFERENCES = {
    "test_dunder_dlpack_stream": ("Producer", "to_dlpack() has no stream: memory of the CPU needs none"),
    "test_buffererror_bad_dtype": ("Consumer", "it takes a dtype out of NumPy's registry; ours still has it"),
}
"""NumPy's tests that fail with this package in that place, and in both, and why. One that passes fails the run."""
if type_and_message(np.arange(1).__dlpack__, dl_device=(10, 0))[0] is ValueError:
    DIFFERENCES["test_device"] = "Producer", "a device that there is not is a BufferError; older NumPys raised ValueError"


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
    dtypes = types.SimpleNamespace(**vars(np.dtypes) | {"register_dlpack_dtype": register_dlpack_dtype})
    namespace["np"] = types.SimpleNamespace(**vars(np) | {"from_dlpack": consume, "dtypes": dtypes})
    return {name: tests for name, tests in namespace.items() if name.startswith("Test")}


def exports_only(test) -> bool:
    """Whether one of NumPy's tests reads no tensor: it says something in the place of the producer alone."""
    return inspect.isfunction(test) and "from_dlpack" not in test.__code__.co_names


if SUITE.exists():
    for _place, (_consume, _export) in PLACES.items():
        for _name, _tests in numpys_tests(_consume, _export).items():
            for _test in [name for name, test in vars(_tests).items() if exports_only(test) and _place != "Producer"]:
                delattr(_tests, _test)
            for _test, (_where, _reason) in DIFFERENCES.items():
                if _place in (_where, "Both") and hasattr(_tests, _test):
                    setattr(_tests, _test, pytest.mark.xfail(reason=_reason, strict=True)(getattr(_tests, _test)))
            globals()[f"{_name}{_place}"] = pytest.mark.usefixtures("own_registry")(_tests)


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
        assert SHARED["the tensor"](tensor) is tensor
        ways = [way for way in SHARED.items() if way[0] != "the tensor"]
        for name, way in [*ways, *COPIED.items(), ("from_dlpack", from_dlpack), ("a kernel", ignore)]:
            wanted = type_and_message(torch.Tensor.__dlpack__, tensor)[0] if name == "the protocol" else BufferError
            assert type_and_message(way, tensor)[0] is wanted, (dtype, name)


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


# ---- PaddlePaddle's, and cuda.core's, here of the CPU's memory ---------------------------------------------------------
needs_paddle = pytest.mark.skipif(paddle is None, reason="PaddlePaddle is not installed")
MAKERS = {paddle and paddle.Tensor: paddle and paddle.to_tensor, StridedMemoryView: memory_view}  # the former copies
MAKERS.pop(None, None)


@fast_args
def double(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x[i]


total, total_without_the_gil = fast_args(lambda x: x.sum()), fast_args(lambda x: x.sum(), nogil=True)
parts = fast_args(lambda x: (2 * x, x, x[1:]))
TAKES = (total, total_without_the_gil, parts, from_dlpack, lambda x: convert(x, np.ndarray))


@pytest.mark.parametrize("cls", MAKERS, ids=lambda cls: cls.__name__)
def test_calls_are_native_and_keep_no_reference_and_results_are_of_the_same_type(cls):
    parts(MAKERS[cls](np.arange(4.0)))  # Numba keeps an exception of the first compilation, and with it its frames
    array = np.arange(4.0)
    with references_kept(array):
        tensor, out = MAKERS[cls](array), MAKERS[cls](np.zeros(4))
        for call in TAKES:
            call(tensor)
            with references_kept(tensor):
                for _ in range(3):
                    call(tensor)
        for _ in range(4):  # the first makes the cache entry
            double(tensor, out)
        assert np.from_dlpack(out).tolist() == [0, 2, 4, 6] and double.counts().fast >= 1
        assert explain(tensor).path == "c-exchange"
        new, same, part = parts(tensor)
        assert type(new) is type(part) is cls and same is tensor and np.from_dlpack(new).tolist() == [0, 2, 4, 6]
        assert np.from_dlpack(part).ctypes.data == np.from_dlpack(tensor).ctypes.data + 8
        del tensor, same, new
        gc.collect()
        _ = [MAKERS[cls](np.full(4, 7.0)) for _ in range(20)]  # what takes the memory, were it free
        assert np.from_dlpack(part).tolist() == [1, 2, 3]
        del part


@needs_paddle
def test_what_paddles_dlpack_refuses_is_refused():
    """PaddlePaddle's table reads sparse tensors as if they were dense, and exports tensors that require grad."""
    watched = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    cleared, freed, begins = paddle.arange(3.0), paddle.arange(3.0), paddle.ones([3])
    cleared._clear()
    freed._clear_data()
    tensors = {"requires grad": watched, "result": watched * 2, "parameter": paddle.create_parameter([3], "float32"),
               "COO": paddle.sparse.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], [3, 3]),
               "CSR": paddle.sparse.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], [2, 2]),
               "cleared": cleared, "without memory": freed, "begins to require grad": begins}  # fmt: skip
    assert [total(begins) for _ in range(4)] == [3.0] * 4
    begins.stop_gradient = False
    total(paddle.zeros([2]))
    for what, tensor in tensors.items():
        expected = type_and_message(tensor.__dlpack__, max_version=(1, 0))[0]
        with references_kept(tensor):
            for take in (total, total_without_the_gil, from_dlpack, to_dlpack, TAKES[-1]) * 2:
                assert type_and_message(take, tensor)[0] is expected, (what, take)
            with paddle.no_grad():
                assert type_and_message(total, tensor)[0] is expected, what
    assert total(begins.detach()) == 3.0
    assert explain(begins.detach()) == explain(paddle.zeros([0]))


@pytest.mark.slow
@needs_paddle
def test_paddles_declared_outputs():
    @fast_args(out="x[n], k -> y[k, n]")
    def rows(x, k, y):
        for i in range(k):
            y[i] = x

    y = rows(paddle.arange(3.0), 2)
    assert type(y) is paddle.Tensor and y.tolist() == [[0.0, 1.0, 2.0]] * 2 and y.stop_gradient


@needs_paddle
def test_a_paddle_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(paddle_producer, "_queries", lambda: (None, None))
    found = discover(paddle.Tensor)
    assert found.path == "dunder" and "cannot check them" in found.notes[0]


@pytest.mark.skipif(StridedMemoryView is None, reason="cuda.core is not installed")
def test_a_readonly_view_of_cuda_core_is_not_written():
    """A borrowed view, of which its table would give one, cannot say that it is readonly."""
    array = np.arange(4.0)
    array.flags.writeable = False
    assert type_and_message(double, np.ones(4), memory_view(array))[0].__name__ == "TypingError"
    assert total(memory_view(array)) == total(memory_view(array)) == 6.0
    assert not from_dlpack(memory_view(array)).flags.writeable and convert(array, StridedMemoryView).readonly
