"""The memory layout of PyTorch tensors, found by experiment: offsets with which native code tells plain tensors from odd ones.

Each question to PyTorch costs a call. The answers are in memory: in the tensor's dispatch keys and its autograd metadata. This
module finds the offsets and verifies them on tensors of every kind. If that fails, native code asks PyTorch's C functions
(``torch.queries``); if a tensor seems odd to native code, Python decides (``torch.checks.check``).
"""

import ctypes
import errno
import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._abi import ffi
from ..dispatch.structs import ALLOWS_BITS, ALLOWS_GRAD
from ..ground.cpython import function_of
from ..ground.dlpack import DLDeviceType
from ..ground.native import address_of
from ..ground.once import once
from ..ground.passing import reraise_passing
from ..ground.readable import is_readable, read_byte, read_bytes, read_word
from ..interpreter import DISABLED
from . import samples
from .storages import forbid_resizing_of, without_modes

__all__ = [
    "GUARDS",
    "Guard",
    "dtypes_not_exported",
    "guard",
    "is_narrow",
    "keys_of",
]

CDEF = """
/* Offsets with which native code finds odd tensors of a framework: torch.guard. 0: unknown, not checked. */
typedef struct {
    int64_t object;             /* in a tensor's Python object: a pointer to the implementation */
    /* In the implementation: */
    int64_t keys, odd_keys;     /* the dispatch keys, a word; the bits that make a tensor odd */
    int64_t element_type;       /* the dtype's number, the low 6 bits of a word */
    int64_t odd_types;          /* not an offset: bit i is 1 if dtype number i makes a tensor odd */
    int64_t autograd;           /* a pointer to the autograd metadata, or NULL */
    /* In the autograd metadata: */
    int64_t tangent;            /* a word that is not 0 if the tensor has a tangent */
    int64_t requires_grad;      /* a byte */
    int64_t grad_fn;            /* a pointer, or NULL */
    int64_t is_view;            /* a byte; a view's base is checked like the view */
    int64_t has_base;           /* a byte; not 1 in a view: odd */
    int64_t base;               /* a pointer to the base's implementation */
    int64_t storage;            /* in the implementation: a pointer to the storage */
    /* In the storage: */
    int64_t storage_data;       /* the address of the memory, NULL if it has been freed */
    int64_t storage_size;       /* the size in bytes */
    int64_t storage_checked;    /* a byte that is not 0 if PyTorch checks each access to the memory: copy-on-write, … */
    int64_t storage_movable;    /* a byte that is not 0 if `resize_()` can free the memory; 0: PyTorch is asked */
    int64_t storage_object;     /* in a storage's Python object: a pointer to the storage */
    /* What a view needs, read in a tensor that is not odd. `ndim` 0: its exchange table is asked. */
    int64_t ndim;               /* in the implementation: the number of dimensions */
    int64_t sizes;              /* the extents of up to `inline_ndim` dimensions; of more, a pointer to extents and strides */
    int64_t strides;            /* the strides of up to `inline_ndim` dimensions, in elements */
    int64_t inline_ndim;        /* not an offset */
    int64_t storage_offset;     /* of the first element in the storage, in elements */
    int64_t device;             /* two bytes: the device's type, 0 for the CPU, 1 for a GPU; and its index */
    int64_t cuda;               /* not an offset: DLPack's type of a GPU; 0: tensors there have not been tried yet */
    int64_t elements;           /* int64_t[64]: by the dtype's number its `samples.field_with_lanes`; 0: unknown */
    int64_t is_grad_enabled;    /* bool (*)(void); 0: every tensor with autograd metadata is odd */
    int64_t queries;            /* fx_torch_queries *, 0 if one of them is missing */
    int64_t asks;               /* whether the framework is asked instead, because an offset is unknown */
    int64_t asks_autograd;      /* whether it is also asked about autograd */
    int64_t read_shown, check_tensor;   /* of `tensor_kind` */
    int64_t empty_strided, wrap, delete_tensor; /* functions of PyTorch's, of `new_tensors` */
} fx_guard;             /* an array of GUARDS; by the ALLOWS_* of a kernel */

/* Functions that answer for a framework: PyObject *(PyObject *self, void *NULL), unless another type is given. */
typedef struct {
    int64_t requires_grad, is_neg, is_conj, dtype, untyped_storage; /* of a tensor */
    int64_t data_ptr, nbytes, resizable;                        /* of a storage; they run no Python code */
    int64_t storage_type;                                       /* PyTypeObject *, the type of the storages that they take */
    int64_t int8, uint8;                                        /* PyObject *, dtypes; others exported as bytes are odd */
    int64_t is_grad_enabled;                                    /* PyObject *, a function */
    int64_t forbid_resizing;                                    /* PyObject *, a function of a storage */
    int64_t forward_names, current_level;                       /* a module's dict; a name in it: a level, < 0 if none is open */
} fx_torch_queries;
"""

GUARDS = 4

_SCANNED_BYTES = 256  # of a C++ object, and of what lies behind it
_WORD = 8
_OB_TYPE = ctypes.sizeof(ctypes.c_ssize_t)
_CUDA = 1
_CUDA_IN_DLPACK = (DLDeviceType.kDLCUDA, DLDeviceType.kDLROCM)


class Guard:
    """The ``fx_guard`` for PyTorch's tensors. Its offsets are set if all could be verified; otherwise PyTorch is asked."""

    def __init__(self):
        self._guards, self._checking = ffi.new("fx_guard[]", GUARDS), ffi.new("fx_guard[]", GUARDS)
        self.native = ffi.addressof(self._guards[0])
        self._queries = ffi.new("fx_torch_queries *")
        self._elements = ffi.new("int64_t[]", 64)
        self._not_exported = 0  # as `odd_types`
        self.knows_keys = self.knows_storage = self.knows_autograd = self.knows_dtype = self.knows_views = False
        self.can_ask = False
        self.why: dict[str, str] = {}
        """Why ``keys``, ``storage``, ``checked``, ``autograd``, ``dtype`` or ``queries`` could not be found."""
        if DISABLED:
            self.why["views"] = "FASTEXCHANGE_DISABLE is set"
        else:
            alone(self._find)
        if self.can_ask:
            self._set(queries=address_of(self._queries))
        if not self.knows_all:
            # Make every tensor odd: read its type object as the implementation. The word at 0 there, a refcount, is not 0.
            odd = {"object": _OB_TYPE, "odd_keys": -1, "odd_types": -1, "queries": self.native.queries}
            self.native[0] = ffi.new("fx_guard *", odd)[0]
            for number in range(GUARDS):
                self._checking[number] = self.native[0]
            self._not_exported = 0
            self._set(asks=self.native.queries != 0, asks_autograd=1)
        for number in range(1, GUARDS):
            self._guards[number] = self.native[0]
            if number & ALLOWS_GRAD:
                self._guards[number].autograd = self._guards[number].asks_autograd = 0
            if number & ALLOWS_BITS:
                self._guards[number].odd_types = self._not_exported

    @property
    def knows_all(self) -> bool:
        """Whether all offsets are verified, so that PyTorch is not asked."""
        return self.knows_keys and self.knows_storage and self.knows_autograd and self.knows_dtype

    @property
    def why_no_views(self) -> str:
        """Why tensors are not read in memory; "" if they are."""
        return "" if self.knows_views else self.why.get("views") or self.why.get("checked") or "it needs all offsets"

    def address_for(self, cls: type) -> int:
        """Return the address of the ``fx_guard`` for tensors of type `cls`. It is valid as long as the process runs."""
        import torch

        if not self.knows_all and getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            return address_of(self._checking)  # a tensor with __torch_dispatch__ may answer for another tensor: Python checks it
        return address_of(self.native)

    def add(self, *functions) -> None:
        """Put the addresses of C functions into the fields of their names."""
        for function in functions:
            for number in range(GUARDS):
                for guards in (self._guards, self._checking):
                    setattr(guards[number], function.__name__, function.address)

    def set_all(self, **fields: int) -> None:
        """Set fields of the guards for all kernels."""
        for number in range(GUARDS):
            for name, value in fields.items():
                setattr(self._guards[number], name, value)

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            setattr(self.native, name, value)

    def _find(self) -> None:
        self.can_ask = self._has_found("queries", self._find_queries)
        self.knows_keys = self._has_found("keys", self._find_keys)
        if self.knows_keys:
            self.knows_storage = self._has_found("storage", self._find_storage)
            if self.knows_storage:
                self._has_found("checked", self._find_checked)
            self.knows_autograd = self._has_found("autograd", self._find_autograd)
            self.knows_dtype = self._has_found("dtype", self._find_dtype)
            if self.knows_all and self.native.storage_checked:
                self.knows_views = self._has_found("views", self._find_views)

    def _has_found(self, what: str, find) -> bool:
        """Call `find` and return whether it has found `what`. If not, put the reason into :attr:`why`."""
        try:
            if find():
                return True
        except Exception as error:  # a PyTorch without these private functions
            reraise_passing(error)
            self.why[what] = f"{type(error).__name__}: {error}"
        self.why.setdefault(what, "the values found in memory differ from PyTorch's answers")
        return False

    def _not_one(self, what: str, **places: list) -> bool:
        """Note in :attr:`why` which of the lists `places`, found for `what`, do not have one item. Return False."""
        counts = ", ".join(f"{name} at {len(found)} places" for name, found in places.items() if len(found) != 1)
        self.why[what] = f"not found at one place each: {counts}"
        return False

    def _find_keys(self) -> bool:
        """Find the implementation, its dispatch keys and its autograd pointer. Check that the keys identify odd tensors."""
        import torch

        plain, views, watched, odd = samples.plain_tensors(), samples.views(), samples.watched_tensors(), samples.odd_tensors()
        everything = plain + views + watched + odd
        in_object = [
            at
            for at in range(2 * _WORD, torch.Tensor.__basicsize__, _WORD)
            if all(read_word(id(tensor), at) == tensor._cdata for tensor in everything)
        ]
        in_tensor = _offsets(_WORD, lambda at: all(read_word(t._cdata, at) == keys_of(t) for t in everything))
        known = views + watched
        autograd = _offsets(
            _WORD, lambda at: all(read_word(t._cdata, at) for t in known) and not any(read_word(t._cdata, at) for t in plain)
        )
        if len(in_object) != 1 or len(in_tensor) != 1 or len(autograd) != 1:
            return self._not_one("keys", implementation=in_object, keys=in_tensor, autograd=autograd)
        allowed = functools.reduce(int.__or__, map(keys_of, plain + views + watched))
        if any(keys_of(tensor) & ~allowed == 0 for tensor in odd):
            self.why["keys"] = "an odd tensor has only dispatch keys that plain tensors have, too"
            return False
        allowed |= _keys_of_cuda(keys_of(plain[0]))
        self._set(object=in_object[0], keys=in_tensor[0], odd_keys=~allowed, autograd=autograd[0])
        return True

    def _find_dtype(self) -> bool:
        """Find the number of a tensor's dtype. Odd are dtypes that PyTorch does not export, and integers of less than a byte.

        PyTorch exports the latter as bytes.
        """
        tensors = {dtype: made for dtype in samples.dtypes() if (made := samples.tensors_of(dtype))}
        memory = {dtype: [read_bytes(t._cdata, _SCANNED_BYTES) for t in made] for dtype, made in tensors.items()}
        size = min(len(each) for of in memory.values() for each in of)

        def numbers(at: int) -> dict:
            return {dtype: {each[at] & 63 for each in of} for dtype, of in memory.items()}

        def tells(at: int) -> bool:
            seen: set[int] = set()
            for of in memory.values():
                found = {each[at] & 63 for each in of}
                if len(found) > 1 or found & seen:
                    return False
                seen |= found
            return True

        places = [at for at in range(0, size, 2) if tells(at)]
        if len(places) != 1:
            return self._not_one("dtype", dtype=places)
        bits = {dtype: 1 << number for dtype, (number,) in numbers(places[0]).items()}
        self._not_exported = sum(bits[dtype] for dtype in dtypes_not_exported() if dtype in bits)
        narrow = sum(bits[dtype] for dtype in bits if is_narrow(dtype))
        for dtype, made in tensors.items():
            self._elements[bits[dtype].bit_length() - 1] = samples.field_of(made[0])
        self._set(element_type=places[0], odd_types=narrow | self._not_exported, elements=address_of(self._elements))
        return True

    def _find_storage(self) -> bool:
        """Find the storage, and in the storage its memory's address (NULL if it is freed) and size."""
        import torch

        freed = torch.ones(8, dtype=torch.float32)
        freed.untyped_storage().resize_(0)
        shrunk = torch.ones(8, dtype=torch.float32)
        shrunk.untyped_storage().resize_(13)
        tensors = [*samples.plain_tensors(), *samples.views(), *samples.watched_tensors(), freed, shrunk]
        storages = [t.untyped_storage() for t in tensors]
        data, size = [s.data_ptr() for s in storages], [s.nbytes() for s in storages]
        at = _offsets(_WORD, lambda at: all(read_word(t._cdata, at) == s._cdata for t, s in zip(tensors, storages, strict=True)))

        def inside(wanted: list[int]) -> list[int]:
            found = range(_WORD, 10 * _WORD, _WORD)  # not the first word: in a C++ object it may be the vtable pointer
            return [at for at in found if all(read_word(s._cdata, at) == w for s, w in zip(storages, wanted, strict=True))]

        if len(at) != 1 or not inside(data) or len(inside(size)) != 1:
            return self._not_one("storage", storage=at, address=inside(data)[:1], size=inside(size))
        self._set(storage=at[0], storage_data=inside(data)[0], storage_size=inside(size)[0])
        return True

    def _find_views(self) -> bool:
        """Find sizes, strides, their number, the offset in the storage; check the views read there against PyTorch's answers."""
        def at_all(tensors: list, wanted) -> list[int]:
            return _offsets(_WORD, lambda at: all(read_word(t._cdata, at) == wanted(t) for t in tensors))

        unusual = samples.unusual()
        ndim = at_all(unusual, lambda t: t.dim())
        offset = [at for at in at_all(unusual, lambda t: t.storage_offset()) if at not in ndim]

        def counted(count: int, read) -> list[int]:
            of = [tensor for tensor in unusual if tensor.dim() <= count]
            return _offsets(_WORD, lambda at: all(_words(t._cdata, at, t.dim()) == read(t) for t in of))

        inline = max((n for n in range(1, 9) if counted(n, lambda t: [*t.size()])), default=0)
        sizes, strides = counted(inline, lambda t: [*t.size()]), counted(inline, lambda t: [*t.stride()])
        if not (len(ndim) == len(offset) == len(sizes) == len(strides) == 1 and inline < 8):
            return self._not_one("views", dimensions=ndim, offset=offset, sizes=sizes, strides=strides)
        device = self._places_of_devices()
        if len(device) != 1:
            return self._not_one("views", device=device)
        self._set(
            ndim=ndim[0], sizes=sizes[0], strides=strides[0], inline_ndim=inline, storage_offset=offset[0], device=device[0]
        )  # fmt: skip
        if all(map(self.reads, samples.strided_tensors())):
            return True
        self._set(ndim=0)
        return False

    def _places_of_devices(self) -> list[int]:
        """Find the two bytes of a tensor's device: type and index. Some of the tensors have no memory, so no GPU is needed."""
        import torch

        numbers = torch._C._autograd.DeviceType
        wanted = [(tensor, numbers.CPU.value, -1) for tensor in samples.plain_tensors()]
        wanted += [(torch.empty(2, device="meta"), numbers.Meta.value, -1)]
        wanted += [(samples.without_memory(f"cuda:{index}"), numbers.CUDA.value, index) for index in (0, 1, 5)]
        return _offsets(1, lambda at: all(self._device(tensor, at) == (kind, index) for tensor, kind, index in wanted))

    def _device(self, tensor, at: int) -> tuple[int | None, int | None]:
        index = read_byte(tensor._cdata, at + 1)
        return read_byte(tensor._cdata, at), index if index is None or index < 128 else index - 256

    def reads(self, tensor) -> bool:
        """Whether the view that lies in a tensor's memory is the one that PyTorch tells of.

        Tensors on a GPU are read in memory once this has been so for one of them.
        """
        told, read = self._views(tensor)
        return read is not None and told == read

    def _views(self, tensor) -> tuple[Any, Any]:
        """Dimensions, address, sizes, strides and bits: as PyTorch tells of them, and as they lie in memory.

        None for either that cannot be had. The bits are PyTorch's where memory does not have to tell.
        """
        native, at = self.native, tensor._cdata
        try:
            with without_modes():
                count, itemsize = tensor.dim(), tensor.element_size()
                told = count, tensor.data_ptr(), [*tensor.size()], [*tensor.stride()], 8 * itemsize
                device_type, device_id = tensor.__dlpack_device__()
        except Exception as error:  # a kind of tensor without memory
            reraise_passing(error)
            return None, None
        kind, index = self._device(tensor, native.device)
        is_on_cpu = (device_type, device_id, kind) == (DLDeviceType.kDLCPU, 0, 0)
        if not is_on_cpu and (kind != _CUDA or device_id != index or device_type not in _CUDA_IN_DLPACK):
            return told, None
        base, sizes, strides = at, native.sizes, native.strides
        try:
            data = _known_word(_address(at, native.storage), native.storage_data)
            offset, number = _known_word(at, native.storage_offset), _known_word(at, native.element_type)
            if count > native.inline_ndim:
                base, sizes, strides = _address(at, native.sizes), 0, _WORD * count
        except ValueError:
            return told, None
        address = data + offset * itemsize if tensor.numel() else 0
        field = self._elements[number & 63]
        bits = (field >> 8 & 0xFF) * (1 + (field >> 16)) or 8 * itemsize
        read = read_word(at, native.ndim), address, _words(base, sizes, count), _words(base, strides, count), bits
        if read == told and not is_on_cpu:
            for number in range(GUARDS):
                self._guards[number].cuda = int(device_type)
        return told, read

    def why_wrong_about(self, tensor) -> str:
        """Why native code would not read the view of a tensor on the CPU in memory as PyTorch tells; "" if it would.

        It reads none with odd keys there, nor one whose storage PyTorch checks at each access.
        """
        import torch

        native = self.native
        if not self.knows_views or self.reads(tensor) or keys_of(tensor) & native.odd_keys:
            return ""
        told, read = self._views(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or told == read or (told, read) != self._views(tensor):
            return ""  # a subclass may tell anything; another thread may change the tensor meanwhile
        with without_modes():
            is_on_cpu = tensor.device.type == "cpu"
        if not is_on_cpu or (read and read_byte(_address(tensor._cdata, native.storage), native.storage_checked)):
            return ""
        return f"a tensor of this process was read otherwise than PyTorch tells: {read}, not {told}"

    def distrust(self, why: str) -> None:
        """Let native code read no view in memory from now on."""
        self.knows_views = False
        self.why["views"] = why
        self._set(ndim=0)
        for number in range(GUARDS):
            self._guards[number].ndim = 0

    def _find_checked(self) -> bool:
        """Find a storage in its Python object, and in the storage the byte that says that PyTorch checks each access.

        Such memory is copy-on-write, or the access is forbidden or warned of.
        """
        import torch

        def new(act):
            tensor = torch.ones(4, dtype=torch.float32)
            return tensor, act(tensor)

        lazy, written = new(torch._lazy_clone), new(torch._lazy_clone)
        forbidden, warned = new(torch._C._set_throw_on_mutable_data_ptr), new(torch._C._set_warn_deprecated_on_mutable_data_ptr)
        written[0].add_(1)
        ones = [*lazy, written[1], forbidden[0], warned[0]]
        zeros = [written[0], *samples.unusual(), *samples.plain_tensors(), *samples.views()]
        storages = [tensor.untyped_storage() for tensor in zeros]
        in_object = [
            at
            for at in range(2 * _WORD, torch.UntypedStorage.__basicsize__, _WORD)
            if all(read_word(id(storage), at) == storage._cdata for storage in storages)
        ]

        def read(tensors: list, at: int) -> set[int | None]:
            return {read_byte(tensor.untyped_storage()._cdata, at) for tensor in tensors}

        checked = [at for at in range(_WORD, 10 * _WORD) if read(ones, at) == {1} and read(zeros, at) == {0}]
        if len(in_object) != 1 or len(checked) != 1:
            return self._not_one("checked", storage=in_object, checked=checked)
        self._set(storage_object=in_object[0], storage_checked=checked[0], storage_movable=self._place_of_movable(storages))
        return True

    def _place_of_movable(self, storages: list) -> int:
        """Find the byte that is 1 in storages that can be resized; 0 if it is not found at one place."""
        import torch

        fixed = [torch.ones(count, dtype=torch.float32).untyped_storage() for count in (1, 2, 1000)]
        before = [_bytes_of(storage) for storage in fixed]
        for storage in fixed:
            forbid_resizing_of(storage)
        after = [_bytes_of(storage) for storage in fixed]
        others = [(storage.resizable(), _bytes_of(storage)) for storage in storages]
        known = [*((True, seen) for seen in before), *((False, seen) for seen in after), *others]
        places = range(_WORD, min(len(seen) for _, seen in known))
        found = [at for at in places if all(seen[at] == is_movable for is_movable, seen in known)]
        return found[0] if len(found) == 1 else 0

    def _find_autograd(self) -> bool:
        """Find the fields of the autograd metadata. Check them against ``requires_grad`` on tensors of every kind."""
        views, watched = samples.views(), samples.watched_tensors()
        leaves, results = [t for t in watched if t.is_leaf], [t for t in watched if not t.is_leaf and not t._is_view()]
        cleared = [t.clone().requires_grad_().requires_grad_(False) for t in samples.plain_tensors() if t.is_floating_point()]
        unwatched_views = [view for view in views if not view._base.requires_grad]

        def flag(ones: list, zeros: list) -> list[int]:
            read = [(self._known(tensor), 1) for tensor in ones] + [(self._known(tensor), 0) for tensor in zeros]
            return _offsets(1, lambda at: all(read_byte(known, at) == wanted for known, wanted in read))

        # A byte of an address may be 1 in all leaves by chance, so the flag must also change when it is set and cleared.
        set_and_cleared = self._switched()
        requires_grad = [at for at in flag(leaves, cleared + results + unwatched_views) if at in set_and_cleared]
        is_view = [at for at in flag(views, cleared + leaves + results) if requires_grad and abs(at - requires_grad[0]) < _WORD]
        having, lacking = list(map(self._known, results)), list(map(self._known, leaves + cleared + unwatched_views))
        written = self._written(samples.watched_in_place)
        grad_fn = [at for at in written if all(read_word(k, at) for k in having) and not any(read_word(k, at) for k in lacking)]
        base = _offsets(_WORD, lambda at: all(read_word(self._known(t), at) == t._base._cdata for t in views))
        # `has_base` is behind `base`. All views have a base, so there is no example of a 0. It is the first byte of a word; the
        # first byte of an aligned address is never 1.
        has_base = [at for at in flag(views, []) if base and at >= base[0] + _WORD and at % _WORD == 0]
        switch = _grad_mode_function()
        # Forward-mode differentiation keeps its tangents in the autograd metadata, too.
        others = list(map(self._known, leaves + results + views + cleared))
        duals = [samples.dual(), samples.dual()]
        differentiated = list(map(self._known, duals))
        written = self._written(samples.differentiated_in_place)
        tangent = [
            at for at in written if all(read_word(k, at) for k in differentiated) and not any(read_word(k, at) for k in others)
        ]
        if not (len(requires_grad) == len(is_view) == 1 and grad_fn and tangent and base and has_base and switch):
            return self._not_one(
                "autograd", requires_grad=requires_grad, is_view=is_view, grad_fn=grad_fn[:1], tangent=tangent[:1],
                base=base[:1], has_base=has_base[:1], is_grad_enabled=[switch] if switch else [],
            )  # fmt: skip
        # The first of several: later ones are second words of smart pointers, or memory behind a plain tensor's metadata.
        self._set(
            requires_grad=requires_grad[0], grad_fn=grad_fn[0], is_view=is_view[0], has_base=has_base[0], base=base[0],
            is_grad_enabled=switch, tangent=tangent[0],
        )  # fmt: skip
        return all(self._is_watched(t) == t.requires_grad for t in samples.plain_tensors() + views + watched + cleared)

    def _find_queries(self) -> bool:
        """Find the C functions that answer for PyTorch. Check that they answer as the methods do."""
        import torch
        from torch.autograd import forward_ad

        of_tensor = ("requires_grad", "dtype", "is_neg", "is_conj", "untyped_storage")
        of_storage = ("data_ptr", "nbytes", "resizable")
        functions = {name: function_of(getattr(torch.Tensor, name, None)) for name in of_tensor}
        functions |= {name: function_of(getattr(torch.UntypedStorage, name, None)) for name in of_storage}
        if not all(functions.values()):
            self.why["queries"] = f"no C function for {', '.join(name for name, found in functions.items() if not found)}"
            return False
        ask = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
        conjugated = torch.ones(2, dtype=torch.complex64).conj()
        for tensor in (*samples.plain_tensors(), *samples.watched_tensors(), conjugated, torch.ones(3)[1:]):
            storage = tensor.untyped_storage()
            if (
                type(storage) is not torch.UntypedStorage
                or any(ask(functions[name])(tensor, None) is not getattr(tensor, name) for name in of_tensor[:2])
                or any(ask(functions[name])(tensor, None) != getattr(tensor, name)() for name in of_tensor[2:4])
                or ask(functions["untyped_storage"])(tensor, None) is not storage
                or any(ask(functions[name])(storage, None) != getattr(storage, name)() for name in of_storage)
            ):
                return False
        things = {"storage_type": torch.UntypedStorage, "is_grad_enabled": torch.is_grad_enabled}
        things |= {"forward_names": vars(forward_ad), "current_level": sys.intern("_current_level")}
        things |= {"int8": torch.int8, "uint8": torch.uint8, "forbid_resizing": forbid_resizing_of}
        self._kept = things
        for name, number in {**functions, **{name: id(thing) for name, thing in things.items()}}.items():
            setattr(self._queries, name, number)
        return True

    def _switched(self) -> list[int]:
        """Return the offsets of bytes that are 1 while a leaf requires grad and 0 while it does not, switched several times."""
        import torch

        used = torch.ones(3, dtype=torch.float32, requires_grad=True)
        _result = used * 2
        offsets = list(range(_SCANNED_BYTES))
        for leaf in (used, torch.nn.Parameter(torch.ones(2)), torch.ones(1000, dtype=torch.float32, requires_grad=True)):
            for wanted in (False, True, False, True):
                leaf.requires_grad_(wanted)
                offsets = [at for at in offsets if read_byte(self._known(leaf), at) == wanted]
        return offsets

    def _written(self, change) -> list[int]:
        """Return the offsets of words in the autograd metadata that `change` makes nonzero in each of several tensors.

        A difference between two tensors proves nothing: the unused part of a short string, for example, keeps the bytes of
        the object that had this memory before.
        """
        import torch

        offsets = _offsets(_WORD, lambda at: True)
        for length in (1, 2, 3, 30, 1000):
            tensor = torch.ones(length, dtype=torch.float32).requires_grad_().requires_grad_(False)
            known = self._known(tensor)
            offsets = [at for at in offsets if not read_word(known, at)]
            change(tensor)
            if self._known(tensor) != known:
                return []
            offsets = [at for at in offsets if read_word(known, at)]
        return offsets

    def _known(self, tensor) -> int:
        """The address of a tensor's autograd metadata. Raises ValueError if the word found is no address."""
        return _address(tensor._cdata, self.native.autograd)

    def _is_watched(self, tensor) -> bool:
        """Read ``tensor.requires_grad`` from memory, as ``torch.guard`` does."""
        native = self.native
        if not read_word(tensor._cdata, native.autograd):
            return False
        known = self._known(tensor)
        watched = read_byte(known, native.requires_grad) or read_word(known, native.grad_fn)
        if not watched and read_byte(known, native.is_view):
            base = _address(known, native.base)
            if read_word(base, native.autograd):
                known = _address(base, native.autograd)
                watched = read_byte(known, native.requires_grad) or read_word(known, native.grad_fn)
        return bool(watched)


@once
def guard() -> Guard:
    """Return the process's guard for PyTorch's tensors. Imports PyTorch."""
    return Guard()


def c_function(name: str, library: str = "torch_cpu"):
    """Return the ``ctypes`` function of this name in a library of PyTorch's, a new object; None if there is none."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    libraries = (*folder.glob(f"lib{library}.*"), *folder.glob(f"{library}.dll"))
    return next((found for path in libraries if (found := getattr(ctypes.CDLL(str(path)), name, None)) is not None), None)


def _grad_mode_function() -> int | None:
    """Find the function in PyTorch's C shim that tells whether grad mode is on in the calling thread: ``bool (*)(void)``."""
    import torch

    function = c_function("aoti_torch_grad_mode_is_enabled")
    if function is None:
        return None
    function.restype, function.argtypes = ctypes.c_bool, []
    answers = [function()]
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            answers.append(function())
    is_right = answers == [torch.is_grad_enabled(), False, True, False]
    return ctypes.cast(function, ctypes.c_void_p).value if is_right else None


def alone(find: Callable[[], Any]) -> Any:
    """Return what `find` returns in a new thread: the caller's modes (inference, no gradients, a default device) do not reach it.

    Raises its exception.
    """
    outcome: list = []

    def act() -> None:
        try:
            outcome.extend((find(), None))
        except BaseException as error:
            outcome.extend((None, error))

    experiments = threading.Thread(target=act)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about prototype features
        try:
            experiments.start()
        except RuntimeError as why:
            raise OSError(errno.EAGAIN, "a thread in which PyTorch is looked at cannot be started") from why
        experiments.join()
    found, error = outcome
    if error is not None:
        raise error
    return found


def _offsets(step: int, holds) -> list[int]:
    """Return the offsets in a C++ object for which `holds` is true."""
    return [at for at in range(0, _SCANNED_BYTES, step) if holds(at)]


def _bytes_of(storage) -> bytes:
    return read_bytes(storage._cdata, 10 * _WORD)


def _words(base: int, at: int, count: int) -> list[int | None]:
    return [read_word(base, at + _WORD * i) for i in range(count)]


def _known_word(base: int, at: int) -> int:
    """The word at a place. Raises ValueError if there is no memory."""
    word = read_word(base, at)
    if word is None:
        raise ValueError(f"there is no memory {at} bytes behind {base:#x}")
    return word


def _address(base: int, at: int) -> int:
    """The address of an object at a place. Raises ValueError if there is none."""
    address = _known_word(base, at)
    if not is_readable(address, _WORD):
        raise ValueError(f"{address:#x} is no address of an object")
    return address


def keys_of(tensor) -> int:
    """Return a tensor's dispatch keys as a signed word."""
    import torch

    return ctypes.c_ssize_t(torch._C._dispatch_keys(tensor).raw_repr()).value


def _keys_of_cuda(plain: int) -> int:
    """Return the dispatch keys that plain tensors on a GPU have and on the CPU lack: the backend's and autocast's.

    There may be no GPU, so PyTorch is asked for the keys by name. `plain`, the keys of a plain tensor on the CPU, must have the
    CPU's keys by name. If not, return 0: then all tensors on a GPU are odd.
    """
    import torch

    def named(*names: str) -> int:
        keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names]
        return ctypes.c_ssize_t(functools.reduce(int.__or__, keys)).value

    try:
        ours, theirs = named("CPU", "AutocastCPU"), named("CUDA", "AutocastCUDA")
    except Exception as error:  # a PyTorch with other private functions
        reraise_passing(error)
        return 0
    return theirs if ours & plain == ours else 0


def is_narrow(dtype) -> bool:
    """Whether a dtype is an integer of less than a byte: int1 to uint7, which PyTorch stores one in a byte."""
    return re.fullmatch("torch.u?int[1-7]", str(dtype)) is not None


@once
def dtypes_not_exported() -> frozenset:
    """Return the dtypes whose tensors PyTorch fails to export. PyTorch before 2.10 keeps the few bytes that are tried here."""
    found = set()

    def find() -> None:
        for dtype in samples.dtypes():
            for tensor in samples.tensors_of(dtype)[:1]:
                try:
                    tensor.__dlpack__()
                except Exception as error:
                    reraise_passing(error)
                    found.add(dtype)

    alone(find)
    return frozenset(found)
