"""The truth table of PyTorch's tensors: see ``truth_table``."""

import contextlib
import ctypes
import functools
import importlib.util
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from truth_table import DLPACK, FAST_ARGS, TVM_FFI, Column, Look, Row, Seen, Table, njit_on, read, row, rows, use

from fastexchange.ground.dlpack import ffi
from fastexchange.ground.native import address_of


# ---- kinds of tensors ----------------------------------------------------------------------------------------------
def value_of(tensor) -> list:
    """The elements of a tensor as PyTorch says them."""
    return tensor.detach().resolve_conj().resolve_neg().to_dense().tolist()


_row, _rows = (functools.partial(each, value=value_of) for each in (row, rows))
_kept: list[Any] = []  # what a tensor is about lives longer than the cell
_x, _z = functools.partial(torch.arange, 4.0), functools.partial(torch.tensor, [1 + 2j, 3 + 4j])
_leaf = functools.partial(torch.arange, 4.0, requires_grad=True)


def _keep(thing, kept):
    _kept.append(kept)
    return thing


PLAIN = {
    "plain": _x, "view with an offset": lambda: torch.arange(8.0)[3:7], "strided": lambda: torch.arange(8.0)[::2],
    "F order": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "overlapping (`unfold`)": lambda: torch.arange(5.0).unfold(0, 3, 1),
    "expanded, stride 0": lambda: torch.arange(2.0)[:, None].expand(2, 3),
    "one element in a dimension, odd stride": lambda: torch.arange(8.0).as_strided((1, 3), (5, 2)),
    "0-d": lambda: torch.tensor(3.0), "empty": lambda: torch.empty(0, 3),
    "negative stride": lambda: torch.arange(4.0).as_strided((4,), (-1,), 3),
    "negative stride, of NumPy": lambda: torch.from_numpy(np.arange(4.0, dtype=np.float32)[::-1]),
}  # fmt: skip
AUTOGRAD = {
    "leaf that requires grad": _leaf, "result that requires grad": lambda: _leaf() * 2,
    "view of a leaf": lambda: _leaf()[1:], "`nn.Parameter`": lambda: torch.nn.Parameter(torch.arange(4.0)),
}  # fmt: skip


def _in_mode(mode: str, make, look: Look) -> None:
    tensor = make()  # before the mode begins: a result of `no_grad()` would not require grad
    with getattr(torch, mode)():
        look(tensor)


def _view_of_written():
    base = torch.zeros(4)
    view = base[1:]
    base.add_(_leaf())
    return _keep(view, base)


def _dual(look: Look) -> Any:
    """Returns the tensor when its level has ended."""
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        made = forward_ad.make_dual(torch.arange(4.0), torch.ones(4))
        look(made)
    return made


AUTOGRAD_ROWS = [
    *_rows(AUTOGRAD, is_watched=True),
    _row("written by autograd, after its view was made", _view_of_written, is_watched=True),
    *(Row(f"{name}, in `{mode}()`", functools.partial(_in_mode, mode, make), value_of)
      for mode in ("no_grad", "inference_mode") for name, make in AUTOGRAD.items()),
    _row("`nn.Parameter`, frozen", lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False)),
    _row("detached", lambda: _leaf().detach()),
    _row("inference tensor", torch.inference_mode()(lambda: torch.arange(4.0))),
    Row("inference tensor, in `inference_mode()`", torch.inference_mode()(lambda look: look(_x())), value_of),
    _row("`nn.UninitializedParameter`", lambda: torch.nn.UninitializedParameter(), value=None),
    Row("dual tensor of forward mode", _dual, value_of, is_watched=True),
    _row("dual tensor of forward mode, its level ended", lambda: _dual(lambda tensor: None)),
]  # fmt: skip
LAZY_AND_LAYOUTS = {
    "conjugated, lazily (`z.conj()`)": lambda: _z().conj(), "conjugated, in memory": lambda: _z().conj().resolve_conj(),
    "negated, lazily (`z.conj().imag`)": lambda: _z().conj().imag,
    "negated, lazily (`_neg_view`)": lambda: torch._neg_view(_x()),
    "real part of a conjugated one": lambda: _z().conj().real,
    "conjugated and negated": lambda: torch._neg_view(_z().conj()), "sparse COO": lambda: torch.eye(2).to_sparse(),
    "sparse CSR": lambda: torch.eye(2).to_sparse_csr(), "sparse CSC": lambda: torch.eye(2).to_sparse_csc(),
    "sparse BSR": lambda: torch.eye(2).to_sparse_bsr((1, 1)), "mkldnn": lambda: _x().to_mkldnn(),
}  # fmt: skip


def _nested(layout: str):
    return torch.nested.nested_tensor([_x(), _x()[:2]], layout=getattr(torch, layout))


def _cut(count: int, size: int, part: slice | None = None):
    """A tensor, or a part of it, whose storage has then been resized to so many bytes."""
    base = torch.arange(float(count))
    view = base if part is None else base[part]
    base.untyped_storage().resize_(size)
    return _keep(view, base)


WITHOUT_MEMORY = {
    "nested, strided": lambda: _nested("strided"), "nested, jagged": lambda: _nested("jagged"),
    "meta": lambda: torch.empty(4, device="meta"), "`FakeTensor`": lambda: torch._subclasses.FakeTensorMode().from_tensor(_x()),
    "`_efficientzerotensor`": lambda: torch._efficientzerotensor((4,)),
    "data pointer forbidden (`_set_throw_on_mutable_data_ptr`)": lambda: _keep(
        tensor := _x(), torch._C._set_throw_on_mutable_data_ptr(tensor)),
    "freed storage": lambda: _cut(4, 0),
    "freed storage, view with an offset": lambda: _cut(1024, 0, slice(512, 516)),
}  # fmt: skip
SMALLER = {
    "storage smaller than the tensor": lambda: _cut(64, 16),
    "storage smaller than the view": lambda: _cut(64, 16, slice(16, 20)),
}


class Tenfold(torch.Tensor):
    """Whose value is ten times its memory, for those who ask by a function of Python."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        asked = (torch.Tensor.__dlpack__, torch.Tensor.numpy, torch.Tensor.tolist)
        if function in asked:
            return function(args[0].as_subclass(torch.Tensor) * 10, *args[1:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


def _dispatching(name: str, value: Callable[[Any], Any]) -> type:
    """A subclass whose value is, for every operator, what `value` makes of a tensor."""

    def dispatch(cls, function, types, args=(), kwargs=None):
        return function(*[value(arg) if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))

    return type(name, (torch.Tensor,), {"__torch_dispatch__": classmethod(dispatch)})


Negative = _dispatching("Negative", lambda tensor: -tensor.as_subclass(torch.Tensor))
Wrapper = _dispatching("Wrapper", lambda tensor: tensor.inner)


def _wrapped():
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (4,), dtype=torch.float32)
    wrapper.inner = _x()
    return wrapper


def _dtensor():
    from torch import distributed
    from torch.distributed import tensor as dtensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not distributed.is_initialized():
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return dtensor.DTensor.from_local(_x(), distributed.init_device_mesh("cpu", (1,)), [dtensor.Replicate()])


OF_SUBCLASSES = {
    "subclass with `__torch_dispatch__`": lambda: torch.Tensor._make_subclass(Negative, _x()), "wrapper subclass": _wrapped,
    "`MaskedTensor`": lambda: torch.masked.masked_tensor(_x(), _x() > 1), "`DTensor`": _dtensor,
}  # fmt: skip
TRANSFORMED = {
    "inside `torch.vmap`": lambda look: torch.vmap(lambda x: (look(x), x)[1])(torch.arange(8.0).reshape(2, 4)),
    "inside `torch.func.grad`": lambda look: torch.func.grad(lambda x: (look(x), x.sum())[1])(_x()),
    "inside `torch.func.jvp`": lambda look: torch.func.jvp(lambda x: (look(x), x)[1], (_x(),), (torch.ones(4),)),
}


def _of_bytes(dtype: str):
    return torch.arange(4, dtype=torch.uint8).view(getattr(torch, dtype))


def _as(storage: str) -> Callable[[Any], list]:
    return lambda tensor: tensor.view(getattr(torch, storage)).tolist()


NARROW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8",
          "complex32": "uint32"}  # fmt: skip
DTYPE_ROWS = [
    _row("bool", lambda: torch.tensor([True, False])),
    *(_row(name, lambda dtype=name: torch.arange(4).to(getattr(torch, dtype))) for name in ("uint16", "uint64", "complex64")),
    *(_row(name, lambda dtype=name: torch.arange(4.0).to(getattr(torch, dtype)), bits=_as(storage), needs="ml_dtypes")
      for name, storage in NARROW.items()),
    _row("float4_e2m1fn_x2", lambda: _of_bytes("float4_e2m1fn_x2"), value=None, bits=_as("uint8"), needs="ml_dtypes"),
    *(_row(name, lambda dtype=name: _of_bytes(dtype), value=None, bits=_as("uint8"))  # one in a byte
      for name in ("uint4", "int4")),
    *(_row(name, lambda dtype=name: _of_bytes(dtype), value=None) for name in ("bits8", "bits16", "bits1x8")),
    _row("qint8", lambda: torch.quantize_per_tensor(_x(), 0.5, 0, torch.qint8), value=None),
    _row("quint4x2", lambda: torch.quantize_per_channel(
        torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2), value=None),
]  # fmt: skip


MEMORY = {
    "shared memory": lambda: _x().share_memory_(), "pinned memory": lambda: _x().pin_memory(),
    "over a NumPy array": lambda: torch.from_numpy(np.arange(4.0)),
    "over a readonly NumPy array": lambda: torch.from_numpy(np.broadcast_to(np.arange(4.0), 4)),
    "over `bytes`": lambda: torch.frombuffer(bytes(16), dtype=torch.float32),
    "copy-on-write (`_lazy_clone`)": lambda: _keep(torch._lazy_clone(original := _x()), original),
    "copy-on-write, the original": lambda: _keep(tensor := _x(), torch._lazy_clone(tensor)),
}  # fmt: skip
ROWS = [
    *_rows(PLAIN), *AUTOGRAD_ROWS, *_rows(LAZY_AND_LAYOUTS), *_rows(WITHOUT_MEMORY, value=None),
    _row("freed storage, no elements", lambda: _cut(4, 0, slice(0))), *_rows(SMALLER, value=None),
    _row("storage smaller, view that lies inside", lambda: _cut(64, 16, slice(2)), value=lambda tensor: [0.0, 1.0]),
    _row("subclass", lambda: _x().as_subclass(type("Plain", (torch.Tensor,), {}))),
    _row("subclass with `__torch_function__`", lambda: _x().as_subclass(Tenfold), value=lambda tensor: tensor.tolist()),
    *_rows(OF_SUBCLASSES, value=None), *(Row(name, give, None) for name, give in TRANSFORMED.items()),
    _row("functionalised", lambda: torch._to_functional_tensor(_x()), value=None), *DTYPE_ROWS, *_rows(MEMORY),
]  # fmt: skip


# ---- consumers -----------------------------------------------------------------------------------------------------
@functools.cache
def _borrow():
    """The borrowing function of PyTorch's exchange table, which raises what it sets."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    function = ffi.cast("DLPackExchangeAPI *", table).dltensor_from_py_object_no_sync
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(address_of(function))


def _by_table(tensor) -> Seen:
    view = ffi.new("DLTensor *")
    if _borrow()(tensor, address_of(view)):
        raise SystemError("it failed and set no exception")
    if view.device.device_type != 1:
        raise BufferError("not a CPU's memory")
    shape, strides = (list(words[0 : view.ndim]) if view.ndim else [] for words in (view.shape, view.strides))
    address = address_of(view.data) + view.byte_offset
    return read(address, view.dtype.code, view.dtype.bits, view.dtype.lanes, shape, strides)


# ---- nanobind ------------------------------------------------------------------------------------------------------
_NANOBIND_SOURCE = """
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
namespace nb = nanobind;

NB_MODULE(truth_nanobind, module) {
    module.def("look", [](nb::ndarray<nb::device::cpu> x, nb::callable read) {
        nb::list shape, strides;
        for (size_t i = 0; i < x.ndim(); i++) {
            shape.append(x.shape(i));
            strides.append(x.stride(i));
        }
        nb::dlpack::dtype dtype = x.dtype();
        return read((uintptr_t) x.data(), (int) dtype.code, (int) dtype.bits, (int) dtype.lanes, shape, strides);
    });
}
"""


def _why_no_nanobind() -> str | None:
    if importlib.util.find_spec("nanobind") is None:
        return "not installed"
    return None if shutil.which("c++") else "not built: no C++ compiler"


def build_nanobind(folder: Path) -> None:
    """Compile the extension into a folder, some seconds."""
    if _why_no_nanobind() is not None:
        return
    import nanobind

    source, home = folder / "truth_nanobind.cpp", Path(nanobind.__file__).parent
    source.write_text(_NANOBIND_SOURCE)
    includes = [nanobind.include_dir(), str(home / "ext/robin_map/include"), sysconfig.get_path("include")]
    command = ["c++", "-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
    command += [f"-I{include}" for include in includes]
    command += [str(home / "src/nb_combined.cpp"), str(source), "-o", str(folder / "truth_nanobind.so")]
    subprocess.run(command, check=True)


# ---- the table -----------------------------------------------------------------------------------------------------
COLUMNS = [
    DLPACK, Column("exchange table, bare", (_by_table,), "torch"), TVM_FFI,
    Column("", (lambda tensor: importlib.import_module("truth_nanobind").look(tensor, read),), "nanobind", _why_no_nanobind()),
    njit_on("x.numpy()", lambda tensor: tensor.numpy(), "numba"), FAST_ARGS,
]  # fmt: skip


def _address_of(tensor) -> int | None:
    """See ``Table.address_of``. It does not copy what is copied on writing."""
    try:
        return torch._C._data_address(tensor) + tensor.storage_offset() * tensor.element_size()
    except Exception:
        return None


def prepare() -> None:
    """See ``Table.prepare``. Making the first tensor of some kinds imports a great deal."""
    torch.set_num_threads(1)  # threads do not survive a fork
    warnings.simplefilter("ignore")
    for each in ROWS:
        with contextlib.suppress(Exception):
            each.give(lambda tensor: None)
    use(_x(), _x().numpy())


TABLE = Table(__name__, "torch", ROWS, COLUMNS, _address_of, prepare, build=build_nanobind)
