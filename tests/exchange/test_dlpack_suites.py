"""The DLPack tests of NumPy, PyTorch and tvm-ffi, with this package in the framework's place.

NumPy's are the installed ones, run as they stand with another ``from_dlpack`` and another ``__dlpack__``. PyTorch and tvm-ffi
install none: what theirs check, and no other test here does, is checked below.
"""

import ast
import ctypes
import functools
import itertools
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from exchanges import call, needs_torch, needs_tvm_ffi, run_with_tvm_ffi, table_in

from frameworks import (  # isort: skip
    exports_own_strides, has_versioned_capsules, is_exported, numpys_reader, takes_copy, torch, tvm_ffi,
)  # fmt: skip
from interoperability import LAYOUTS
from made_producers import TABLE_CAPSULE, address_of, capsule_name, fill
from oracle import ONE_REFERENCE, type_and_message

from fastexchange import (
    convert,
    exchange_api,
    explain,
    fast_args,
    from_dlpack,
    register_dlpack_dtype,
    to_dlpack,
)
from fastexchange.ground import dtype_registry
from fastexchange.ground.dlpack import VERSION, ffi


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


class Exporter:
    """A tensor whose ``__dlpack__`` is :func:`to_dlpack`."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, dl_device=None, **options):
        return to_dlpack(self.tensor, device=dl_device, **options)


# ---- NumPy's -------------------------------------------------------------------------------------------------------

SUITE = Path(np.__file__).parent / "_core" / "tests" / "test_dlpack.py"


def _own_export(x, **options):
    return x.__dlpack__(**options)


def _our_export(x, **options):
    return Exporter(x).__dlpack__(**options)


PLACES = {
    "Consumer": (lambda x, **options: from_dlpack(Protocol(x), **options), _own_export),
    "Producer": (lambda x, **options: np.from_dlpack(Exporter(x), **options), _our_export),
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
    """A module in which some names have been replaced."""

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
    """The classes of NumPy's tests, with these functions in the place of NumPy's."""
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
    """A tensor of sixteen bytes."""
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

SHARED = {
    "a capsule": lambda x: torch.from_dlpack(to_dlpack(x, max_version=(1, 0))),
    "a legacy capsule": lambda x: torch.from_dlpack(to_dlpack(x)),
    "an object": lambda x: torch.from_dlpack(Exporter(x)),
    "the protocol": lambda x: convert(Protocol(x), torch.Tensor),
    "the tensor": lambda x: convert(x, torch.Tensor),
}
COPIED = {
    "a capsule": lambda x: torch.from_dlpack(to_dlpack(x, max_version=(1, 0), copy=True)),
    "a legacy capsule": lambda x: torch.from_dlpack(to_dlpack(x, copy=True)),
    "an object": lambda x: torch.from_dlpack(Exporter(x), copy=True),
    "the protocol": lambda x: convert(Protocol(x), torch.Tensor, copy=True),
    "the tensor": lambda x: convert(x, torch.Tensor, copy=True),
}
if not takes_copy():
    del SHARED["a capsule"], COPIED["a capsule"], COPIED["an object"]
if not has_versioned_capsules():  # a legacy capsule's tensor seems to be readonly
    del SHARED["the protocol"]
if tvm_ffi is not None:
    SHARED["tvm_ffi"] = lambda x: torch.from_dlpack(convert(x, tvm_ffi.Tensor))
    COPIED["tvm_ffi"] = lambda x: torch.from_dlpack(convert(x, tvm_ffi.Tensor, copy=True))


@pytest.mark.parametrize("dtype", EXCHANGED, ids=str)
def test_element_types_that_pytorch_exchanges(dtype):
    tensor = of_type(dtype)
    for ways in (SHARED, COPIED):
        for name, way in ways.items():
            result = way(tensor)
            assert result.dtype is dtype and torch.equal(result.view(torch.uint8), tensor.view(torch.uint8)), name
            assert (result.data_ptr() == tensor.data_ptr()) == (ways is SHARED), name


@needs_torch
def test_pytorch_exchanges_most_element_types():
    assert {torch.bfloat16, torch.complex64, torch.bool, torch.uint64, torch.float16} < {*EXCHANGED} and REFUSED


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_element_types_that_pytorch_refuses(dtype):
    tensor = of_type(dtype)
    for name, way in {**SHARED, **COPIED, "from_dlpack": from_dlpack, "a kernel": fast_args(lambda x: 0)}.items():
        if name == "the protocol":
            assert type_and_message(way, tensor)[0] is type_and_message(torch.Tensor.__dlpack__, tensor)[0]
        elif name != "the tensor":  # which is returned as it is
            assert type_and_message(way, tensor)[0] is BufferError, name


# ---- all: layouts, held against what each framework makes itself ---------------------------------------------------

FRAMEWORKS = {"numpy": numpys_reader}
SOURCES = {"numpy": lambda array: array}
TARGETS = {"numpy": np.ndarray}
if torch is not None:
    FRAMEWORKS["torch"], SOURCES["torch"], TARGETS["torch"] = torch.from_dlpack, torch.from_dlpack, torch.Tensor
if tvm_ffi is not None:
    FRAMEWORKS["tvm_ffi"], SOURCES["tvm_ffi"], TARGETS["tvm_ffi"] = tvm_ffi.from_dlpack, tvm_ffi.from_dlpack, tvm_ffi.Tensor

PLACED = {
    **{name: make for name, make in LAYOUTS.items() if name not in ("negative strides", "broadcast")},
    "row": lambda a: a.reshape(3, 4)[1],
    "column": lambda a: a.reshape(3, 4)[:, 1],
    "part": lambda a: a.reshape(2, 3, 2)[1:, :2, 1:],
    "one of every third": lambda a: a[::3][:1],
    "last ones": lambda a: a[9:],
    "no columns": lambda a: a.reshape(3, 4)[::2, 4:],
    "no rows in the middle": lambda a: a.reshape(2, 3, 2)[:, 1:1],
}


def described(tensor, is_exact: bool) -> tuple:
    """Element type, shape, strides, place and contiguity, as the tensor's own framework has them.

    `is_exact`: with the strides of dimensions of one element and of tensors without any, which mean nothing.
    """
    if isinstance(tensor, np.ndarray):
        strides, place, rest = tensor.strides, tensor.ctypes.data, (tensor.dtype, tensor.flags.writeable)
    elif torch is not None and isinstance(tensor, torch.Tensor):
        strides, place, rest = tensor.stride(), tensor.data_ptr(), (tensor.dtype, tensor.is_contiguous())
    else:
        strides, place, rest = tensor.strides, tensor.data_ptr(), (np.from_dlpack(tensor).dtype, tensor.is_contiguous())
    shape = tuple(tensor.shape)
    if not is_exact:
        strides = [stride for stride, extent in zip(strides, shape, strict=True) if extent > 1 and 0 not in shape]
        place = place if 0 not in shape else None
    return shape, tuple(strides), place, rest


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SOURCES, FRAMEWORKS)])
def test_tensors_are_placed_as_the_framework_itself_places_them(source, target):
    own, to = FRAMEWORKS[target], TARGETS[target]
    is_mute = source == "torch" and not has_versioned_capsules()  # NumPy takes its tensors for readonly
    is_exact = source != "numpy" and (source != "torch" or exports_own_strides())
    has_copy = target == "numpy" or (target == "torch" and takes_copy())
    ways = {
        "convert": lambda x: convert(x, to),
        "convert the protocol": lambda x: convert(Protocol(x), to, copy=False),
        "an object": lambda x: own(Exporter(x)),
        "a copy in an object": lambda x: own(Exporter(x), **({"copy": False} if has_copy else {})),
    }
    if is_mute and target in ("torch", "tvm_ffi"):  # which have nothing readonly
        del ways["convert the protocol"]

    def seen(tensor):
        *placed, (dtype, rest) = described(tensor, is_exact=is_exact)
        return (*placed, dtype) if is_mute and target == "numpy" else (*placed, dtype, rest)

    for layout, dtype in itertools.product(PLACED, ("?", "i1", "f4", "c16")):
        tensor = SOURCES[source](PLACED[layout](np.arange(12).astype(dtype)))
        want = seen(own(tensor))
        for name, way in ways.items():
            assert seen(way(tensor)) == want, (name, layout, dtype)


@needs_torch
def test_pytorch_makes_tensors_of_our_objects():
    for tensor in (torch.arange(6.0).reshape(2, 3), torch.arange(6, dtype=torch.bfloat16)[::2]):
        assert torch.equal(torch.tensor(Exporter(tensor)), tensor) and torch.equal(torch.as_tensor(Exporter(tensor)), tensor)


ASKING = {
    "a kernel": fast_args(lambda x: x.size),
    "from_dlpack": from_dlpack,
    "from_dlpack, the CPU": lambda x: from_dlpack(x, device="cpu", copy=False),
    "from_dlpack, a copy": lambda x: from_dlpack(x, copy=True),
    "to_dlpack": lambda x: to_dlpack(x, max_version=(1, 0), device=(1, 0)),
    "to_dlpack, legacy": to_dlpack,
    **{f"to {name}": functools.partial(lambda to, x: convert(x, to), to) for name, to in TARGETS.items()},
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_producer_is_asked_for_the_newest_version_and_for_no_stream(source):
    """A tensor on the CPU has none, and PyTorch's refuse to hear of one. PyTorch's before version 2.9 have to be asked again."""
    is_mute = source == "torch" and not has_versioned_capsules()
    asked = [{"max_version": VERSION}, *[{}] * is_mute]
    for name, ask in ASKING.items():
        if is_mute and name == "to_dlpack, legacy":
            continue  # the tensor seems to be readonly, and such a capsule cannot say so
        for _ in range(3):
            tensor = Protocol(SOURCES[source](np.arange(3.0)))
            ask(tensor)
            assert all(options in asked for options in tensor.asked), name
        has_copied = is_mute and name in ("to torch", "to tvm_ffi")  # what seems to be readonly is exported a second time
        assert tensor.asked == asked * (1 + has_copied), name


# ---- PyTorch's and tvm-ffi's: tables -------------------------------------------------------------------------------

TABLES = {
    name: table
    for name, cls in TARGETS.items()
    if (table := table_in(exchange_api(cls))).dltensor_from_py_object_no_sync  # not the one that calls __dlpack__
}
DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
CPU, CODES = 1, {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}


def check_tensor(tensor, shape: tuple, dtype: np.dtype) -> None:
    """A DLTensor on the CPU has this shape, this element type, and memory."""
    assert (tensor.device.device_type, tensor.ndim) == (CPU, len(shape))
    assert tuple(tensor.shape[i] for i in range(tensor.ndim)) == shape
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (CODES[dtype.kind], 8 * dtype.itemsize, 1)
    assert tensor.data != ffi.NULL or 0 in shape


def taken_by(table, managed):
    """The tensor that a table makes of a managed tensor, which it then owns."""
    made = ffi.new("intptr_t *")
    assert call(table.managed_tensor_to_py_object_no_sync, address_of(managed), address_of(made)) == 0
    tensor = ctypes.cast(made[0], ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(tensor))
    assert sys.getrefcount(tensor) == ONE_REFERENCE
    return tensor


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_complete(name):
    table = TABLES[name]
    assert capsule_name(exchange_api(TARGETS[name])) == TABLE_CAPSULE
    while table.header.version.major > VERSION[0] and table.header.prev_api != ffi.NULL:
        table = ffi.cast("DLPackExchangeAPI *", table.header.prev_api)
    assert table.header.version.major == VERSION[0]
    functions = [function for function, _ in ffi.typeof("DLPackExchangeAPI").fields if function != "header"]
    assert all(getattr(table, function) != ffi.NULL for function in functions)
    stream = ffi.new("void **", ffi.cast("void *", 1))
    ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)(address_of(table.current_work_stream))
    assert ask(CPU, 0, address_of(stream)) == 0


@pytest.mark.parametrize(("giver", "taker"), [*itertools.product(TABLES, TABLES)])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (3, 4, 1), (0,), (2, 0, 3)], ids=str)
def test_what_one_table_gives_another_takes(giver, taker, shape):
    """Exported, borrowed and allocated tensors are of that shape; what is made of them is the same memory."""
    give, take = TABLES[giver], TABLES[taker]
    for dtype in map(np.dtype, ("?", "i8", "f2", "f4", "c16")):
        array = np.arange(24).astype(dtype)[: int(np.prod(shape))].reshape(shape)
        tensor = SOURCES[giver](array)
        before, out, view = sys.getrefcount(array), ffi.new("DLManagedTensorVersioned **"), ffi.new("DLTensor *")
        for _ in range(2):
            assert call(give.managed_tensor_from_py_object_no_sync, id(tensor), address_of(out)) == 0
            version, header = out[0].version, give.header.version
            assert (version.major, version.minor) == (header.major, header.minor)
            check_tensor(out[0].dl_tensor, shape, dtype)
            assert call(give.dltensor_from_py_object_no_sync, id(tensor), address_of(view)) == 0
            check_tensor(view, shape, dtype)
            assert view.data == out[0].dl_tensor.data
            made = taken_by(take, out[0])
            assert type(made) is TARGETS[taker] and np.from_dlpack(made).tolist() == array.tolist()
            del made
        assert sys.getrefcount(array) == before

        prototype = ffi.new("DLTensor *")
        kept = fill(prototype, np.empty(shape, dtype), data=0, strides=None)
        assert call(give.managed_tensor_allocator, address_of(prototype), address_of(out), 0, 0) == 0, kept
        check_tensor(out[0].dl_tensor, shape, dtype)
        made = taken_by(take, out[0])
        made[...] = 1
        assert type(made) is TARGETS[taker] and (np.from_dlpack(made) == 1).all()
        assert call(give.managed_tensor_allocator, address_of(prototype), address_of(out), 0, 0) == 0, kept
        DELETER(address_of(out[0].deleter))(address_of(out[0]))


# ---- tvm-ffi's -----------------------------------------------------------------------------------------------------


@needs_tvm_ffi
def test_containers_give_arrays_back():
    """What a function puts into tvm-ffi's containers comes out as arrays over the same memory."""
    run_with_tvm_ffi(
        """
    polyfill(np.ndarray)
    make = lambda name: tvm_ffi.get_global_func(f"testing.make_{name}")
    array, other = np.arange(4, dtype="f4"), np.arange(8, dtype="i4")[::2]
    before = sys.getrefcount(array), sys.getrefcount(other)

    def is_same(tensor, array):
        return type(tensor) is np.ndarray and tensor.ctypes.data == array.ctypes.data and np.array_equal(tensor, array)

    def check():
        assert is_same(make("array_with_tensor")(array)[0], array)
        mixed = make("array_with_mixed")(array, 42)
        assert is_same(mixed[0], array) and list(mixed)[1:] == [42, "hello"]
        nested = make("nested_array_with_tensor")(array)
        assert is_same(nested[0][0], array) and nested[0][1] == 42 and is_same(nested[1], array)
        listed = make("list_with_tensor")(array, 7)
        assert is_same(listed[0], array) and listed[1] == 7
        for name in ("map_with_tensor", "dict_with_tensor"):
            assert is_same(make(name)(array)["tensor"], array)
        both = make("nested_map_with_tensor")(array, other)
        assert is_same(both["array"][0], array) and is_same(both["array"][1], other) and is_same(both["map"]["t"], array)
        assert len(make("empty_array_with_tensor_input")(array)) == 0
        has_value = tvm_ffi.get_global_func("testing.optional_tensor_view_has_value")
        assert has_value(array) and has_value(other) and not has_value(None)

    for _ in range(3):
        check()
    gc.collect()
    assert (sys.getrefcount(array), sys.getrefcount(other)) == before

    def fails(tensor):
        raise ValueError("not this one")

    for _ in range(3):
        try:
            tvm_ffi.convert(fails)(array)
            raise SystemExit("nothing was raised")
        except ValueError as error:
            assert "not this one" in str(error)
    gc.collect()
    assert sys.getrefcount(array) == before[0]
    """
    )


@needs_tvm_ffi
def test_a_kernel_is_a_function_of_tvm_ffis():
    total = tvm_ffi.convert(fast_args(lambda x: x.sum()))
    apply = tvm_ffi.get_global_func("testing.apply")
    for array in (np.arange(6.0), np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3))):
        assert total(array) == apply(total, array) == total(tvm_ffi.from_dlpack(array)) == array.sum()
        if torch is not None:
            assert total(torch.from_numpy(array)) == array.sum()


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


@needs_tvm_ffi
def test_a_table_of_tvm_ffis_that_is_not_complete():
    """It cannot allocate, so the protocol is asked."""
    array = np.arange(4.0)
    wrapped = tvm_ffi.core.DLTensorTestWrapper(tvm_ffi.from_dlpack(array))
    assert explain(wrapped).path == "dunder" and from_dlpack(wrapped).ctypes.data == array.ctypes.data
    doubled = fast_args(lambda x: x * 2)(wrapped)
    assert from_dlpack(doubled).tolist() == [0, 2, 4, 6]


@needs_tvm_ffi
@pytest.mark.parametrize("options", [{"require_contiguous": True}, {"require_alignment": 64}, {"require_alignment": 8}], ids=str)
def test_what_tvm_ffi_demands_of_a_tensor_it_demands_of_ours(options):
    memory = np.zeros(128, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][:64].view("f4")
    for part in (array.reshape(4, 4), array.reshape(4, 4).T, array[::2], array[2:], array[1:]):
        ends = []
        for tensor in (part, Exporter(part)):
            try:
                ends.append(tvm_ffi.from_dlpack(tensor, **options).strides)
            except RuntimeError as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
