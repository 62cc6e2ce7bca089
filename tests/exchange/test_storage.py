"""Elements that kernels cannot compute with: refused on every path, or passed as their bits to kernels that ask for those."""

import functools
import pickle

import numba
import numpy as np
import pytest
from exchanges import TARGETS, needs_ml_dtypes
from forked import fork_python
from frameworks import is_exported, needs_torch, torch, tvm_ffi
from interoperability import jax, ml_dtypes
from made_producers import ONLY_NUMBA, Dunder, Tabled, tabled_type
from nights import at_night
from oracle import new_kernel, type_and_message
from raising import check_raises
from ways import WAYS, total, total_beside, total_inside, total_listed, total_of_all

from fastexchange import FastKernel, convert, explain, fast_args, from_dlpack, register_dlpack_dtype, to_dlpack
from fastexchange.calls import dependencies
from fastexchange.dispatch.runtime import runtime
from fastexchange.ground.dtype_registry import ML_DTYPES, ML_DTYPES_PADDED

CALLS = 4  # the first makes the cache entry
V2 = np.dtype("V2")  # this very object is registered
BITS = [127, 128, 129]  # 1.0, 2.0, 4.0 in float8_e8m0fnu, which has exponents only


def _array():
    return np.array(BITS, "u1").view(ml_dtypes.float8_e8m0fnu)


def _narrow(name):
    if not hasattr(torch, name):
        pytest.skip("this PyTorch does not have it")
    return torch.tensor(BITS, dtype=torch.uint8).view(getattr(torch, name))


Exporting = tabled_type("Exporting", dltensor_from_py_object_no_sync=None)
MAKERS = {
    "numpy": _array,
    "torch": lambda: torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu),
    "jax": lambda: jax.numpy.array([1.0, 2.0, 4.0], jax.numpy.float8_e8m0fnu),
    "tvm_ffi": lambda: convert(_array(), tvm_ffi.Tensor),
    "only __dlpack__": lambda: Dunder(np.array(BITS, "u1"), code=14),
    "exchange table": lambda: Tabled(np.array(BITS, "u1"), code=14),
    "exchange table without views": lambda: Exporting(np.array(BITS, "u1"), code=14),
}
NEEDED = {"torch": torch if torch is not None and is_exported(torch.float8_e8m0fnu) else None, "jax": jax, "tvm_ffi": tvm_ffi}
MAKERS = {name: make for name, make in MAKERS.items() if NEEDED.get(name, name) is not None}
OTHERS = {
    # elements other than float8_e8m0fnu: (what makes them, as what a kernel gets their bits)
    "a registered dtype": (lambda: np.array(BITS, "u2").view("V2"), "uint16"),
    "a registered dtype, only __dlpack__": (lambda: Dunder(np.array(BITS, "u2"), code=203), "uint16"),
    "four bytes": (lambda: np.array(BITS, "u4").view("V4"), "uint32"),
}
if torch is not None:
    OTHERS |= {"int4": (lambda: _narrow("int4"), "int8"), "uint4": (lambda: _narrow("uint4"), "uint8")}


compiled = functools.cache(fast_args)


def kernel_of(function, **options) -> FastKernel:
    """A kernel that knows nothing yet, but has nothing to compile where another has been called so."""
    kernel = compiled(function, **options)
    return new_kernel(kernel, kernel._kernel_options)


same_tail_and_copy = fast_args(lambda x: (x, x[1:], x.copy()), storage=True)
same_and_tail = fast_args(lambda x: (x, x[1:]), storage=True)
same_and_tail_beside = fast_args(lambda x, text: (x, x[1:]), storage=True)


def refused(words, call, *arguments, **keywords) -> None:
    """The call raises BufferError, with these words (one, or a list of them) and those that recommend ``storage=True``."""
    kind, message = type_and_message(call, *arguments, **keywords)
    words = [words] if isinstance(words, str) else words
    for word in ("Numba cannot compute with its elements", "fast_args(storage=True)", *words):
        assert kind is BufferError and word in message, (kind, message)


# Producers differ in how the element type is found, ways in who finds it; bits of another type are compiled for.
PAIRS = [(way, maker) for way in WAYS for maker in (*MAKERS, *OTHERS)
         if way == "position" or maker in ("numpy", "torch", "uint4") or (way == "in a tuple" and maker in MAKERS)]  # fmt: skip


@needs_ml_dtypes
@pytest.mark.parametrize(("way", "maker"), PAIRS)
def test_refused_on_every_path_but_by_a_kernel_that_asks_which_gets_the_bits(way, maker):
    register_dlpack_dtype((203, 16), V2)
    make, bits = OTHERS.get(maker) or (MAKERS[maker], "uint8")
    words = ["position 0", bits, *["float8_e8m0fnu", "float32"] * (maker in MAKERS)]
    (function, call), tensor, plain = WAYS[way], make(), np.ones(3, bits)
    for options in ({}, {"nogil": True}):
        kernel = kernel_of(function, **options)
        for _ in range(2):  # then there are an overload for such bits and a cache entry
            for _ in range(3):
                refused(words, call, kernel, tensor)
            assert [call(kernel, plain) for _ in range(CALLS)] == [3] * CALLS
        if not options or way == "position":
            asking = kernel_of(function, storage=True, **options)
            assert [call(asking, tensor) for _ in range(CALLS)] == [np.array(BITS, "u4").astype(bits).sum()] * CALLS
    refused(words, call, kernel_of(function, grad="allow"), tensor)


COMPUTED = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
"""Elements with which kernels compute; see test_half.py."""


@pytest.mark.slow
@needs_ml_dtypes
@pytest.mark.parametrize("name", [*ML_DTYPES, *ML_DTYPES_PADDED, "bcomplex32"])
def test_every_type_of_ml_dtypes(name):
    if not hasattr(ml_dtypes, name):
        pytest.skip("this ml_dtypes does not have it")
    array = np.array([1, 0, 1], np.float32).astype(getattr(ml_dtypes, name))
    bits = array.view(f"u{array.itemsize}")
    for function, arguments in ((total, (array,)), (total_beside, (array, ""))):
        kernel = kernel_of(function)
        if name in COMPUTED:
            assert [kernel(*arguments) for _ in range(3)] == [2.0] * 3
        else:
            refused([name, bits.dtype.name], kernel, *arguments)
    for _ in range(3):
        for same, tail in (same_and_tail(array), same_and_tail_beside(array, "")):
            assert same is array and tail.dtype == array.dtype and tail.view(bits.dtype).tolist() == bits[1:].tolist()
    assert (numba.typeof(bits),) in same_and_tail.signatures


@needs_torch
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [*COMPUTED, "complex32", "float8_e8m0fnu"])
def test_every_type_of_pytorch(name):
    tensor = torch.tensor([1.0, 2.0, 0.5]).to(getattr(torch, name))
    stored = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    wider = "complex64" if name == "complex32" else "float32"
    if not is_exported(tensor.dtype):
        for options in ({}, {"storage": True}):
            words = rf"'x'.* {name}, which this PyTorch cannot export.*view\(torch.uint8\)"
            check_raises(BufferError, words, kernel_of(total, **options), tensor)
        return
    for _ in range(3):
        if name in COMPUTED:
            assert kernel_of(total)(tensor) == 3.5
        else:
            refused([name, f"to(torch.{wider})", wider if name == "complex32" else ".float()"], kernel_of(total), tensor)
    for _ in range(CALLS):
        same, tail, copied = same_tail_and_copy(tensor)
        assert same is tensor and tail.dtype == tensor.dtype and tail.data_ptr() == tensor[1:].data_ptr()
        assert copied.dtype == stored and copied.tolist() == tensor.view(stored).tolist()


LESS_THAN_A_BYTE = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]


@needs_torch
@pytest.mark.parametrize("name", LESS_THAN_A_BYTE)
def test_integers_of_less_than_a_byte(name):
    """Their exports say that they are bytes."""
    tensor, whole = _narrow(name), f"{name[:-1]}8"
    refused(["position 0", f"elements, {name}", f".view(torch.{whole})", f"bits as {whole}"], kernel_of(total), tensor)
    assert kernel_of(total)(tensor.view(getattr(torch, whole))) == kernel_of(total, storage=True)(tensor)
    for same, tail in (same_and_tail(tensor), same_and_tail_beside(tensor, "")):
        assert same is tensor and tail.dtype == getattr(torch, whole)
    assert f"elements, {name};" in explain(tensor).reasons[-1]
    for convert_it in (from_dlpack, to_dlpack, lambda x: convert(x, np.ndarray)):
        check_raises(BufferError, rf"its elements are {name}, .*pass its view\(torch.{whole}\)", convert_it, tensor)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("unknown", at_night(["_find_dtype", "_find_keys _find_queries"], "_find_dtype"))
def test_integers_of_less_than_a_byte_where_the_layout_is_not_found(unknown):
    fork_python(
        """
        import sys
        import pytest
        from fastexchange.torch import offsets as torch_offsets
        for name in sys.argv[1].split():
            setattr(torch_offsets.Guard, name, lambda self: False)
        import test_storage as tests
        for name in tests.LESS_THAN_A_BYTE:
            try:
                tests.test_integers_of_less_than_a_byte(name)
            except pytest.skip.Exception:
                continue
        for way, maker in tests.PAIRS:
            if maker in ("int4", "uint4") and (way != "bound" or "queries" not in sys.argv[1]):
                tests.test_refused_on_every_path_but_by_a_kernel_that_asks_which_gets_the_bits(way, maker)
        """,
        unknown,
    )


PACKED = "of {} bits.*packed in bytes.*pass the bytes, as uint8"
WITHOUT_INTEGER = {  # DLPack's code, bits and lanes: what is said
    (0, 4, 1): PACKED, (0, 4, 2): PACKED, (15, 6, 2): PACKED, (16, 6, 1): PACKED, (17, 4, 1): PACKED,
    (2, 128, 1): "cannot compute", (200, 24, 1): "cannot compute",
    (4, 16, 2): "{} bits in 2 lanes has no NumPy dtype; convert it first",
}  # fmt: skip


@pytest.mark.parametrize("storage", [False, True])
def test_elements_without_an_integer_of_their_width(storage):
    """``storage=True`` does not help, and is not recommended."""
    for (code, bits, lanes), words in WITHOUT_INTEGER.items():
        for producer in (Dunder, Tabled):
            tensor = producer(np.zeros(4), code=code, bits=bits, lanes=lanes)
            said = str(check_raises(BufferError, words.format(bits), kernel_of(total, storage=storage), tensor))
            assert "storage" not in said and "import ml_dtypes" not in said
    if hasattr(torch, "float4_e2m1fn_x2") and is_exported(torch.float4_e2m1fn_x2):
        packed, kernel = torch.ones(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), kernel_of(total, storage=storage)
        check_raises(BufferError, r"packed in bytes.*\.view\(torch\.uint8\)", kernel, packed)
        assert kernel(packed.view(torch.uint8)) == 3


def test_what_numba_computes_with_is_passed_as_it_is():
    kernel = fast_args(lambda x: x, storage=True)
    for dtype in ("?", "i1", "u8", "f4", "c8", "M8[s]", [("a", "i4"), ("b", "f8")], "S3", "U2"):
        array = np.zeros(3, dtype)
        assert kernel(array) is array and kernel.signatures[-1] == (numba.typeof(array),)
    assert kernel_of(total, storage=True)(np.array([1.5, 2.0])) == 3.5


def nothing(x, y):
    pass


@needs_ml_dtypes
def test_declared_outputs():
    declared = {out: fast_args(out=out)(nothing) for out in ("x[n] -> y[n]", "x[n] -> y[n]: float8_e8m0fnu")}
    for maker in {*MAKERS} - {"exchange table", "exchange table without views"}:  # whose allocator makes no such tensors
        tensor = MAKERS[maker]()
        for kernel in declared.values():
            refused("'x' (position 0)", kernel, tensor)
        refused("'y' (position 1)", declared["x[n] -> y[n]"], np.ones(3), y=tensor)
    refused("'y' (position 1)", declared["x[n] -> y[n]: float8_e8m0fnu"], np.ones(3))


@needs_torch
def test_declared_outputs_of_kernels_that_ask():
    @fast_args(out="x[n] -> y[n]: bfloat16", storage=True)
    def upper_half(x, y):
        for i in range(x.shape[0]):
            y[i] = x[i] >> 16

    for _ in range(CALLS):
        made = upper_half(torch.tensor([1.0, 2.0, 3.0]).view(torch.int32))
        assert made.dtype == torch.bfloat16 and made.tolist() == [1.0, 2.0, 3.0]


@needs_ml_dtypes
@pytest.mark.parametrize("target", [
    name for name in TARGETS if name not in ("paddle.Tensor", "pyarrow.Array") and (name != "torch.Tensor" or "torch" in MAKERS)])
def test_a_view_that_is_returned_has_the_arguments_type(target):
    array, returns = _array(), TARGETS[target]
    native = fast_args(lambda x: x[1:], storage=True, returns=returns)
    by_numba = fast_args(lambda x, text: x[1:], storage=True, returns=returns)
    for made in [*(native(array) for _ in range(CALLS)), *(by_numba(array, "") for _ in range(CALLS))]:
        assert isinstance(made, returns) and from_dlpack(made).dtype == ml_dtypes.float8_e8m0fnu
        assert from_dlpack(made).tolist() == [2.0, 4.0]


@needs_ml_dtypes
def test_a_launch_that_is_bound_anew():
    launch = fast_args(total).bind(np.ones(3))
    assert launch() == 3.0
    refused("", launch.rebind(x=_array()))
    launch = fast_args(total, storage=True).bind(_array())
    assert [launch() for _ in range(3)] == [sum(BITS)] * 3


# ---- without Numba's compiler, without native calls -------------------------------------------------------------------
@needs_torch
@needs_ml_dtypes
def test_without_compiling(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    bits = np.array([127, 128], "u1")
    elements = bits.view(ml_dtypes.float8_e8m0fnu), Dunder(bits, code=14), torch.tensor(bits).view(torch.uint4)
    for tensor in elements:
        assert fast_args(lambda x: x[0] + 0, storage=True)(tensor) == 127
        for argument in (tensor, (tensor, 1), [tensor]):
            refused("", fast_args(lambda x: 0), argument)
    same, tail = fast_args(lambda x: (x, x[1:]), storage=True)(elements[0])
    assert same is elements[0] and tail.dtype == ml_dtypes.float8_e8m0fnu and tail.tolist() == [2.0]


@needs_ml_dtypes
def test_where_numbas_dispatcher_makes_all_calls(monkeypatch):
    for make in MAKERS.values():
        kernel_of(total, storage=True)(make())  # what is learnt of a type stays
    monkeypatch.setattr(runtime(), "why_not_native", "a test")
    dispatcher = numba.njit(total)
    kernels = {storage: fast_args(dispatcher, storage=storage) for storage in (False, True)}
    for make in MAKERS.values():
        refused("position 0", kernels[False], make())
        assert kernels[True](make()) == sum(BITS) and kernels[True].counts().fast == 0


@needs_ml_dtypes
@pytest.mark.parametrize("maker", MAKERS)
def test_explained(maker, monkeypatch):
    monkeypatch.setattr(dependencies, "extensions", dict)  # other tests' extensions of Numba, which each explanation describes
    tensor = MAKERS[maker]()
    said = str(explain(tensor))
    assert "fast_args(storage=True)" in said and "float32" in said and "float8_e8m0fnu" in said, said
    rest = {total: (tensor,), total_beside: (tensor, ""), total_inside: ((tensor, 0),), total_listed: ([tensor],)}
    for function, arguments in (*rest.items(), (total_beside, (tensor, ONLY_NUMBA)), (total_of_all, (tensor,))):
        said = kernel_of(function).explain(*arguments)
        assert said.outcome.startswith("refused with BufferError") and "fast_args(storage=True)" in said.outcome, said
        said = kernel_of(function, storage=True).explain(*arguments)
        assert "refused" not in str(said) and "storage=True" not in str(said), said
    assert "the bits of its elements, which are float8_e8m0fnu" in str(kernel_of(total, storage=True).explain(tensor))


def _length(x):
    return x.shape[0]


asking = fast_args(_length, storage=True)


def test_the_option_is_a_bool_and_a_kernel_knows_it():
    for storage in (1, None, "allow"):
        check_raises(TypeError, "storage is True or False", fast_args, total, storage=storage)
    assert asking.storage is True and fast_args(_length).storage is False
    assert isinstance(asking, FastKernel) and pickle.loads(pickle.dumps(asking)).storage is True
    assert fast_args(fast_args(_length), storage=True).storage is True
