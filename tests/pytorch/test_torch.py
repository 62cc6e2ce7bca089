"""PyTorch's tensors whose memory is not their value, or not there: the guards in the shim."""

import contextlib
import ctypes
import re
import sys

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forked import fork_python  # noqa: E402
from frameworks import has_table  # noqa: E402
from interpreter import FOR_TESTS, HERE, run_python  # noqa: E402
from made_producers import Dunder, Ledger, Wrapper, tabled_type  # noqa: E402
from odd_tensors import ODD  # noqa: E402
from oracle import new_kernel  # noqa: E402
from raising import check_raises  # noqa: E402
from torch_operators import WITHOUT_TABLE  # noqa: E402

import fastexchange  # noqa: E402
from fastexchange import fast_args  # noqa: E402
from fastexchange._abi import ffi  # noqa: E402
from fastexchange.dispatch.runtime import runtime  # noqa: E402
from fastexchange.exchange.export import known  # noqa: E402
from fastexchange.torch import offsets as producer  # noqa: E402

total_njit = numba.njit(lambda x: x.sum())
total = fast_args(total_njit)
total_without_the_gil = fast_args(total_njit.py_func, nogil=True)
total_without_autograd = fast_args(total_njit.py_func, grad="allow")


def function_of(change):
    """A ``__torch_function__`` that does as PyTorch's own, but for ``__dlpack__``, which `change` makes of the plain tensor."""

    def heard(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__dlpack__ and change is not None:
            return change(args[0].as_subclass(torch.Tensor), **(kwargs or {}))
        return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})

    return classmethod(heard)


Unlike = type("Unlike", (torch.Tensor,), {"__torch_function__": function_of(None)})
"""Takes the way of ``__dlpack__``."""
leaf, parameter = torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4))


# ---- the layout of tensors -----------------------------------------------------------------------------------------
def test_the_layout_of_tensors_is_found_whatever_mode_the_caller_is_in_and_whatever_the_default_dtype():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert producer.guard().knows_all and not producer.guard().native.asks
    for mode in (torch.inference_mode(), torch.no_grad(), FakeTensorMode(), torch.device("meta")):
        with mode:
            assert producer.Guard().knows_all
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert producer.Guard().knows_all
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chance", [-100, 70])
def test_a_byte_that_is_1_by_chance_is_not_taken_for_a_flag_of_the_layout(chance, monkeypatch):
    """In one process of some hundred a byte of an address is 1 in all leaves of the experiment, and 0 in all others.

    `chance`: so far from the flag. Near it none is found.
    """
    expected, offsets = producer.Guard().native.requires_grad, producer._offsets
    by_chance = {1: [expected + chance]}
    monkeypatch.setattr(producer, "_offsets", lambda step, holds: sorted([*offsets(step, holds), *by_chance.get(step, [])]))
    found = producer.Guard()
    assert found.knows_autograd and found.native.requires_grad == expected


def of_autograd():
    plain, written, part = torch.ones(4), torch.zeros(4), torch.zeros(4)
    row = written[1:]
    written.mul_(leaf)
    part[2:].mul_(leaf[2:])
    yield from (plain, plain[1:], plain.detach(), leaf, leaf[1:], leaf[:], leaf[1:].detach(), leaf.data, leaf * 2, (leaf * 2)[1:])
    yield from (written, row, row[1:], part, part[2:], parameter, (parameter * 1)[:], torch.nn.Parameter(torch.ones(2), False))
    yield from (torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_().requires_grad_(False), leaf.clone())
    yield from (*leaf.split(2), leaf.detach().clone(), leaf.view(2, 2).t(), torch.ones(1).expand(3), leaf.as_subclass(Unlike))
    yield from (leaf.as_subclass(torch.nn.Parameter), torch.frombuffer(bytearray(8), dtype=torch.float32))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made = [leaf * 2, torch.ones(2)[1:], *([leaf[1:], leaf.view(2, 2)] if mode is torch.no_grad else [])]
        yield from made


MODES = [(total_without_autograd, mode) for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode)]
MODES += [(total, torch.no_grad), (total, torch.inference_mode)]


def test_gradients_are_taken_while_grad_mode_is_off_or_by_a_kernel_that_allows_them():
    is_read = producer.guard().knows_all or (producer.guard().native.asks and has_table())
    for index, tensor in enumerate(of_autograd()):
        value = tensor.detach().sum().item()
        if not tensor.requires_grad:
            assert total(tensor) == total(tensor) == value, index
        for kernel, mode in MODES if tensor.requires_grad else ():
            with mode():  # also by way of __dlpack__, which refuses it even while grad mode is off
                assert [kernel(tensor) for _ in range(4)] == [value] * 4 and kernel(x=tensor) == value, index
                before = kernel.counts()
                assert [kernel(tensor) for _ in range(4)] == [value] * 4
                after = kernel.counts()
            is_native = kernel is total_without_autograd or is_read
            assert type(tensor) is Unlike or after.fast - before.fast == 4 * is_native
            for _ in range(2):
                check_raises(BufferError, r"requires grad.*detach", total, tensor)
        assert not producer.guard().knows_all or producer.guard()._is_watched(tensor) == tensor.requires_grad, index


@pytest.mark.parametrize("unknown", ["_find_keys", "_find_storage", "_find_autograd", "_find_dtype"])
def test_pytorch_is_asked_where_not_all_of_the_layout_is_found(unknown, monkeypatch):
    monkeypatch.setattr(producer.Guard, unknown, lambda self: False)
    found = producer.Guard()
    assert found.native.asks and not found.knows_all
    assert found.native.odd_keys == -1 and found.native.autograd == found.native.storage == 0  # nothing half-known is used


def test_keys_of_tensors_on_a_gpu_are_plain():
    """The keys by name, and none that makes a tensor odd."""
    if not producer.guard().knows_all:
        pytest.skip("PyTorch is asked about each tensor")
    plain = "CUDA AutocastCUDA"
    names = "Conjugate Negative SparseCUDA SparseCsrCUDA QuantizedCUDA NestedTensorCUDA Python ZeroTensor " + plain
    keys = {name: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names.split()}
    assert {name for name, key in keys.items() if not producer.guard().native.odd_keys & key} == {*plain.split()}
    if torch.cuda.is_available():
        x, z = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.complex64, device="cuda")
        odd = producer.guard().native.odd_keys
        assert not any(producer.keys_of(tensor) & odd for tensor in (x, x[1:], z, x.requires_grad_(), x * 2))
        assert all(producer.keys_of(tensor) & odd for tensor in (z.conj(), z.conj().imag, x.detach().to_sparse()))


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_refused_on_every_path(name):
    plain, kernel = torch.ones(3, dtype=torch.complex64 if name == "conjugated" else None), new_kernel(total_njit)
    is_watched = "grad" in name or name == "non-leaf"
    for calls_before in (0, 2):
        for _ in range(calls_before):
            assert kernel(plain) == 3
        for refusing in (kernel, kernel, *[total_without_autograd] * (not is_watched)):
            check_raises((BufferError, RuntimeError), "'x'", refusing, ODD[name])
        assert not is_watched or total_without_autograd(ODD[name]) == ODD[name].sum().item()


def test_gradients_are_allowed_with_options_of_numba():
    @fast_args(grad="allow", parallel=True, cache=True)
    def double(x, out):
        for i in numba.prange(x.size):
            out[i] = 2 * x[i]

    out = torch.zeros(4, requires_grad=True)
    for _ in range(4):
        double(leaf, out)
    assert out.tolist() == [2.0] * 4


def test_one_dispatcher_two_kernels():
    dispatcher = numba.njit(total_njit.py_func)
    careful, allowing = fast_args(dispatcher), fast_args(dispatcher, grad="allow")
    assert careful is not allowing and fast_args(dispatcher) is careful and fast_args(dispatcher, grad="allow") is allowing
    assert not careful.allows_grad and allowing.allows_grad and fast_args(allowing) is allowing
    for _ in range(4):
        assert allowing(leaf) == 4.0
        check_raises(BufferError, "requires grad", careful, leaf)
    assert fast_args(careful, grad="allow")(leaf) == 4.0  # a kernel is a dispatcher


def test_subclasses_that_change_what_dlpack_returns_are_heard():
    """Also one that exports what PyTorch does not."""

    def refuse(tensor, **options):
        raise PermissionError("not this one")

    def subclass(**attributes):
        return type("Heard", (torch.Tensor,), attributes)

    tenfold = function_of(lambda tensor, **options: (tensor * 10).__dlpack__(**options))
    tensor = torch.ones(3).as_subclass(subclass(__torch_function__=tenfold))
    assert "__torch_function__" in str(fastexchange.explain(tensor)) or not has_table()
    exporting = subclass(__dlpack__=lambda self, **options: self.as_subclass(torch.Tensor).view(torch.uint8).__dlpack__())
    exported = torch.ones(3, dtype=torch.uint8).view(torch.bits8).as_subclass(exporting)
    refusing = torch.ones(3).as_subclass(subclass(__torch_function__=function_of(refuse)))
    for _ in range(4):
        assert (total(tensor), total(exported)) == (30, 3)
        check_raises(PermissionError, "not this one", total, refusing)


def test_subclasses_with_a_torch_function_are_checked_like_any_other():
    cls = type("Denies", (Unlike,), {"is_neg": lambda self: False})
    tensor, cut = torch.ones(1 << 10).as_subclass(cls), torch.ones(1 << 20).as_subclass(cls)
    cut.untyped_storage().resize_(8)
    negated = (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag.as_subclass(cls)
    for kernel in (total, total_without_the_gil):
        for _ in range(3):
            assert kernel(tensor) == 1 << 10
            for bad, why in ((cut, "storage"), (negated, "negated")):
                check_raises(BufferError, f"'x'.*{why}", kernel, bad)


def test_explain_tells_which_tensors_of_a_kernel_without_the_gil_go_to_numbas_dispatcher():
    for x in (torch.ones(3).as_subclass(Unlike), torch.ones(3)):
        assert total_without_the_gil(x) == 3.0
        assert ("Numba's own dispatcher" in str(total_without_the_gil.explain(x))) == (type(x) is Unlike)


def test_tensors_that_pytorch_does_not_export_are_not_kept():
    """PyTorch before 2.10 keeps each such tensor that it is asked to export."""
    bits = fast_args(storage=True)(lambda x: x.sum())
    ways = [total, bits, fastexchange.from_dlpack, fastexchange.to_dlpack, lambda x: fastexchange.convert(x, np.ndarray)]
    cases = [(torch.empty(3, dtype=dtype), f"{dtype}, which".removeprefix("torch.")) for dtype in producer.dtypes_not_exported()]
    cases = [(tensor, "" if tensor.is_quantized else said) for tensor, said in cases]
    cases += [(torch.empty(3, device="meta"), "device meta")]
    cases += [(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize")]
    for tensor, said in cases:
        for _ in range(2):
            before = tensor._use_count(), sys.getrefcount(tensor)
            for way in ways:
                check_raises(BufferError, said or ".", way, tensor)
            assert (tensor._use_count(), sys.getrefcount(tensor)) == before


# ---- a PyTorch that is otherwise -------------------------------------------------------------------------------------
WITHOUT_KEYS = "producer.Guard._find_keys = lambda self: False\n"
WITHOUT_QUERIES = "producer.Guard._find_queries = lambda self: False\n"
OTHERWISE = {
    "its keys are not found": WITHOUT_KEYS, "it has no table": WITHOUT_TABLE,
    "it cannot be asked either": WITHOUT_KEYS + WITHOUT_QUERIES, "neither keys nor table": WITHOUT_KEYS + WITHOUT_TABLE,
}  # fmt: skip
OF_THE_PROCESS = "layout or otherwise or first_call or exchange_table"
OF_NATIVE_CODE = "native or is_read or borrowed or without_the_gil or box_hold or owner or modes or grad_mode_is_off"


@pytest.mark.nightly
@pytest.mark.parametrize("how", OTHERWISE)
def test_a_pytorch_that_is_otherwise_gets_the_same_answers(how):
    """Whose tensors lie in memory in some other way, or that is older than 2.10: all that is not about how fast it is."""
    others = OF_THE_PROCESS + f" or {OF_NATIVE_CODE}" * ("either" in how or "neither" in how)
    files = [str(HERE / f"pytorch/{name}.py") for name in ("test_torch", "test_torch_storages")]
    script = f"""
import pytest, torch
from fastexchange import explain
from fastexchange.torch import offsets as producer
{OTHERWISE[how]}
assert ("to_dlpack" in str(explain(torch.ones(3)))) == ({how!r} == "it has no table")
guard = producer.guard()
assert guard.knows_all == ({how!r} == "it has no table") and guard.native.asks == ("keys" in {how!r})
raise SystemExit(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", "-k", "not ({others})", *{files}]))
"""
    done = run_python(script, seconds=FOR_TESTS)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30


@pytest.mark.slow
def test_the_first_call_does_not_import_pytorchs_compiler():
    fork_python("""
        import sys
        import torch
        from fastexchange import fast_args
        before = set(sys.modules)
        assert fast_args(lambda x, y: x[0] + y[0])(torch.ones(3), torch.ones(3)) == 2
        imported = {name.partition(".")[0] + "." + name.split(".")[1] for name in set(sys.modules) - before if "torch." in name}
        assert not {"torch._dynamo", "torch._inductor"} & imported, imported
    """)


# ---- conversions to PyTorch --------------------------------------------------------------------------------------------
@pytest.mark.skipif(not has_table(), reason="this PyTorch has no table")
def test_pytorch_gets_no_offset_that_it_could_ignore():
    """Its conversions did before version 2.9, also behind the table that tvm-ffi gives such a version."""
    own, offsets = known(torch.Tensor)["to_object"], []
    convert_it = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    @convert_it
    def to_object(managed, out):
        offsets.append(ffi.cast("DLManagedTensorVersioned *", managed).dl_tensor.byte_offset)
        return convert_it(own)(managed, out)

    array, made = np.arange(12.0), []
    runtime().entries.update(torch.Tensor, to_object=ctypes.cast(to_object, ctypes.c_void_p).value)
    try:
        for offset in (0, 32):
            given = Dunder(array[:4], Ledger(), byte_offset=offset)
            made += [fastexchange.convert(given, torch.Tensor) for _ in range(3)]
    finally:
        runtime().entries.update(torch.Tensor, to_object=own)
    assert offsets == [0] * 6
    assert [tensor.tolist() for tensor in made] == [[0, 1, 2, 3]] * 3 + [[4, 5, 6, 7]] * 3


def test_what_the_framework_itself_would_misread():
    """PyTorch before 2.10 has no table, and its ``from_dlpack`` aborts at negative strides and ignores byte offsets."""
    array, readonly = np.arange(4.0), np.arange(4.0)
    readonly.flags.writeable = False
    for memory in (array[::-1], array.reshape(2, 2)[:, ::-1], readonly) * 2:
        tensor = fastexchange.convert(memory, torch.Tensor)
        assert np.array_equal(tensor.numpy(), memory) and not np.shares_memory(tensor.numpy(), memory)
        check_raises(BufferError, "has no (negative strides|readonly)", fastexchange.convert, memory, torch.Tensor, copy=False)
    address = array.ctypes.data
    for options in ({}, {"copy": False}) * 2:
        ledger = Ledger()
        tensor = fastexchange.convert(Dunder(array, ledger, data=address - 64, byte_offset=64), torch.Tensor, **options)
        assert tensor.data_ptr() == address and tensor.tolist() == [0, 1, 2, 3]
        del tensor
        ledger.check(ledger.made)  # native code gives an export with an offset back, and Python code makes another
    ledger = Ledger()
    exporting = tabled_type("Exporting", dltensor_from_py_object_no_sync=None)(array, ledger, device_type=4)
    with contextlib.suppress(BufferError):  # a device that PyTorch knows, and may refuse after it has released the export
        fastexchange.convert(exporting, torch.Tensor)
    ledger.check(1)


def test_a_wrapped_tensor_is_mutable():
    """As the tensor is, also where PyTorch exports it by capsules that cannot say so."""
    tensor, fill = torch.zeros(3), fast_args(lambda x: x.fill(3.0))
    for _ in range(3):
        fill(Wrapper(tensor))
    fastexchange.from_dlpack(Wrapper(tensor))[0] = 7
    assert tensor.tolist() == [7, 3, 3]
