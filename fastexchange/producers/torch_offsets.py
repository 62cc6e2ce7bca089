"""The memory layout of PyTorch tensors, found by experiment: offsets with which native code tells plain tensors from odd ones.

Each question to PyTorch costs a call. The answers are in memory: in the tensor's dispatch keys and its autograd metadata. This
module finds the offsets and verifies them on tensors of every kind. If that fails, native code asks PyTorch's C functions
(``dispatch.torch_queries``); if a tensor seems odd to native code, Python decides (``producers.torch.check``).
"""

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import warnings
from pathlib import Path

import numpy as np

from .._abi import ffi
from ..ground.cpython import function_of
from ..ground.dlpack import VERSION
from ..ground.native import address_of
from ..ground.once import once
from ..ground.pythonapi import PyCapsule_GetPointer
from .torch_storage import forbid_resizing_of, without_modes

__all__ = ["BITS_ALLOWED", "GRAD_ALLOWED", "GUARDS", "Guard", "dtypes_not_exported", "guard", "is_narrow", "keys_of"]

CDEF = """
/* Offsets with which native code finds odd tensors of a framework: dispatch.torch_guard. 0: unknown, not checked. */
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
    int64_t storage_object;     /* in a storage's Python object: a pointer to the storage */
    /* What a view needs, read in a tensor that is not odd and has none of `other_keys`. `ndim` 0: its exchange table is asked. */
    int64_t ndim;               /* in the implementation: the number of dimensions */
    int64_t sizes;              /* the extents of up to `inline_ndim` dimensions; of more, a pointer to extents and strides */
    int64_t strides;            /* the strides of up to `inline_ndim` dimensions, in elements */
    int64_t inline_ndim;        /* not an offset */
    int64_t storage_offset;     /* of the first element in the storage, in elements */
    int64_t other_keys;         /* not an offset: dispatch keys of tensors that are on another device than the CPU */
    int64_t elements;           /* int64_t[64]: by the dtype's number its field for DLPack, code | bits << 8; 0: it is not read */
    int64_t is_grad_enabled;    /* bool (*)(void); 0: every tensor with autograd metadata is odd */
    int64_t queries;            /* fx_torch_queries *, 0 if one of them is missing */
    int64_t asks;               /* whether the framework is asked instead, because an offset is unknown */
    int64_t asks_autograd;      /* whether it is also asked about autograd */
} fx_guard;             /* an array of GUARDS; an index has the *_ALLOWED bits of what its guard allows */

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

# Bits of a guard's index:
GRAD_ALLOWED = 1  # tensors that require grad are not odd
BITS_ALLOWED = 2  # integers of less than a byte, stored one in a byte, are not odd
GUARDS = 4

SOURCE = "FASTEXCHANGE_TORCH"
"""The environment variable that chooses how PyTorch's tensors are read: ``memory`` (the default), ``abi`` or ``table``."""

_SCANNED_BYTES = 256  # the C++ objects of a tensor and of a view's autograd metadata are larger
_WORD = 8
_OB_TYPE = ctypes.sizeof(ctypes.c_ssize_t)


def source() -> str:
    """How PyTorch's tensors are to be read: what the environment variable :data:`SOURCE` says."""
    return os.environ.get(SOURCE, "").lower() or "memory"


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
        _alone(self._find)
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
            if number & GRAD_ALLOWED:
                self._guards[number].autograd = self._guards[number].asks_autograd = 0
            if number & BITS_ALLOWED:
                self._guards[number].odd_types = self._not_exported

    @property
    def knows_all(self) -> bool:
        """Whether all offsets are verified, so that PyTorch is not asked."""
        return self.knows_keys and self.knows_storage and self.knows_autograd and self.knows_dtype

    def address_for(self, cls: type) -> int:
        """Return the address of the ``fx_guard`` for tensors of type `cls`. It is valid as long as the process runs."""
        import torch

        if not self.knows_all and getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            return address_of(self._checking)  # a tensor with __torch_dispatch__ may answer for another tensor: Python checks it
        return address_of(self.native)

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            setattr(self.native, name, value)

    def _find(self) -> None:
        self.can_ask = self._has_found("queries", self._find_queries)
        self.knows_keys = self._has_found("keys", self._find_keys)
        if self.knows_keys:
            self.knows_storage = self._has_found("storage", self._find_storage)
            if self.knows_storage:  # if this is not found, bound launches are ordinary calls
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

        plain, views, watched, odd = _plain_tensors(), _views(), _watched_tensors(), _odd_tensors()
        everything = plain + views + watched + odd
        in_object = [
            at
            for at in range(2 * _WORD, torch.Tensor.__basicsize__, _WORD)
            if all(_word(id(tensor) + at) == tensor._cdata for tensor in everything)
        ]
        in_tensor = _offsets(_WORD, lambda at: all(_word(t._cdata + at) == keys_of(t) for t in everything))
        known = views + watched
        autograd = _offsets(
            _WORD, lambda at: all(_word(t._cdata + at) for t in known) and not any(_word(t._cdata + at) for t in plain)
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
        size = _SCANNED_BYTES - _WORD
        tensors = {dtype: made for dtype in _dtypes() if (made := _made_of(dtype))}
        memory = {dtype: [ctypes.string_at(t._cdata, size) for t in made] for dtype, made in tensors.items()}

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
        self._set(element_type=places[0], odd_types=narrow | self._not_exported)
        return True

    def _find_storage(self) -> bool:
        """Find the storage, and in the storage its memory's address (NULL if it is freed) and size."""
        import torch

        freed = torch.ones(8, dtype=torch.float32)
        freed.untyped_storage().resize_(0)
        shrunk = torch.ones(8, dtype=torch.float32)
        shrunk.untyped_storage().resize_(13)
        tensors = [*_plain_tensors(), *_views(), *_watched_tensors(), freed, shrunk]
        storages = [t.untyped_storage() for t in tensors]
        data, size = [s.data_ptr() for s in storages], [s.nbytes() for s in storages]
        at = _offsets(_WORD, lambda at: all(_word(t._cdata + at) == s._cdata for t, s in zip(tensors, storages, strict=True)))

        def inside(wanted: list[int]) -> list[int]:
            found = range(_WORD, 10 * _WORD, _WORD)  # not the first word: in a C++ object it may be the vtable pointer
            return [at for at in found if all(_word(s._cdata + at) == w for s, w in zip(storages, wanted, strict=True))]

        if len(at) != 1 or not inside(data) or len(inside(size)) != 1:
            return self._not_one("storage", storage=at, address=inside(data)[:1], size=inside(size))
        self._set(storage=at[0], storage_data=inside(data)[0], storage_size=inside(size)[0])
        return True

    def _find_views(self) -> bool:
        """Find sizes, strides, their number, the offset in the storage; check the views read there against PyTorch's answers."""
        import torch

        if source() in ("abi", "table"):
            self.why["views"] = f"{SOURCE}={source()}"
            return False

        def at_all(tensors: list, wanted) -> list[int]:
            return _offsets(_WORD, lambda at: all(_word(t._cdata + at) == wanted(t) for t in tensors))

        shapes = [(17,), (19, 23), (3, 29, 5), (7, 1, 31, 2), (2, 3, 2, 37, 3), (3, 2, 2, 2, 2, 41), (2,) * 7, (1, 2) * 4]
        dense = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        views = [tensor.transpose(0, -1)[1:] for tensor in dense[:5]]
        ndim = at_all([*dense, *views], lambda t: t.dim())
        offset = [at for at in at_all([*dense, *views], lambda t: t.storage_offset()) if at not in ndim]

        def counted(count: int, read) -> list[int]:
            of = [tensor for tensor in [*dense, *views] if tensor.dim() <= count]
            return _offsets(_WORD, lambda at: all(_words(t._cdata + at, t.dim()) == read(t) for t in of))

        inline = max((n for n in range(1, 9) if counted(n, lambda t: [*t.size()])), default=0)
        sizes, strides = counted(inline, lambda t: [*t.size()]), counted(inline, lambda t: [*t.stride()])
        if not (len(ndim) == len(offset) == len(sizes) == len(strides) == 1 and inline < 8):
            return self._not_one("views", dimensions=ndim, offset=offset, sizes=sizes, strides=strides)
        for dtype in _dtypes():
            made = _made_of(dtype)
            number = _word(made[0]._cdata + self.native.element_type) & 63 if made else 0
            if made and not is_narrow(dtype):
                self._elements[number] = _field_of(made[0])
        plain = keys_of(dense[0])
        others = _keys_of_cuda(plain) & ~plain
        self._set(
            ndim=ndim[0], sizes=sizes[0], strides=strides[0], inline_ndim=inline, storage_offset=offset[0], other_keys=others,
            elements=address_of(self._elements),
        )  # fmt: skip
        made = [tensor for dtype in _dtypes() for tensor in _made_of(dtype)]
        unusual = [
            torch.ones(1, 3).expand(4, 3), torch.empty(0, 3)[:, 1:], torch.ones(5)[5:], torch.from_numpy(np.arange(6.0)[2:]),
            torch.ones(2, 3, 2, 3, 2, 3).transpose(1, 5)[:, 1:], torch.ones(3, 4)[1, 2], torch.ones(4).view(2, 2, 1, 1, 1, 1, 1),
        ]  # fmt: skip
        if all(map(self.reads, [*_plain_tensors(), *_views(), *_watched_tensors(), *dense, *views, *made, *unusual])):
            return True
        self._set(ndim=0)
        return False

    def reads(self, tensor) -> bool:
        """Whether the view that lies in a tensor's memory is the one that PyTorch tells of."""
        native = self.native
        try:
            with without_modes():
                count, itemsize, size = tensor.dim(), tensor.element_size(), tensor.numel()
                told = tensor.data_ptr(), [*tensor.size()], [*tensor.stride()]
        except Exception:  # a kind of tensor without memory
            return False
        at, owner = tensor._cdata, _word(tensor._cdata + native.storage)
        sizes, strides = at + native.sizes, at + native.strides
        if count > native.inline_ndim:
            sizes = _word(sizes)
            strides = sizes + _WORD * count
        read = _word(owner + native.storage_data) + _word(at + native.storage_offset) * itemsize
        seen = read if size else told[0], _words(sizes, count), _words(strides, count)
        field = self._elements[_word(at + native.element_type) & 63]
        return _word(at + native.ndim) == count and seen == told and field >> 8 in (0, 8 * itemsize)

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
        zeros = [written[0], torch.from_numpy(np.ones(3)), torch.ones(2).share_memory_(), *_plain_tensors(), *_views()]
        storages = [tensor.untyped_storage() for tensor in zeros]
        in_object = [
            at
            for at in range(2 * _WORD, torch.UntypedStorage.__basicsize__, _WORD)
            if all(_word(id(storage) + at) == storage._cdata for storage in storages)
        ]

        def read(tensors: list, at: int) -> set[int]:
            return {_byte(tensor.untyped_storage()._cdata + at) for tensor in tensors}

        checked = [at for at in range(_WORD, 10 * _WORD) if read(ones, at) == {1} and read(zeros, at) == {0}]
        if len(in_object) != 1 or len(checked) != 1:
            return self._not_one("checked", storage=in_object, checked=checked)
        self._set(storage_object=in_object[0], storage_checked=checked[0])
        return True

    def _find_autograd(self) -> bool:
        """Find the fields of the autograd metadata. Check them against ``requires_grad`` on tensors of every kind."""
        views, watched = _views(), _watched_tensors()
        leaves, results = [t for t in watched if t.is_leaf], [t for t in watched if not t.is_leaf and not t._is_view()]
        cleared = [t.clone().requires_grad_().requires_grad_(False) for t in _plain_tensors() if t.is_floating_point()]
        unwatched_views = [view for view in views if not view._base.requires_grad]

        def flag(ones: list, zeros: list) -> list[int]:
            read = [(self._known(tensor), 1) for tensor in ones] + [(self._known(tensor), 0) for tensor in zeros]
            return _offsets(1, lambda at: all(_byte(known + at) == wanted for known, wanted in read))

        # A byte of an address may be 1 in all leaves by chance, so the flag must also change when it is set and cleared.
        set_and_cleared = self._switched()
        requires_grad = [at for at in flag(leaves, cleared + results + unwatched_views) if at in set_and_cleared]
        is_view = [at for at in flag(views, cleared + leaves + results) if requires_grad and abs(at - requires_grad[0]) < _WORD]
        having, lacking = list(map(self._known, results)), list(map(self._known, leaves + cleared + unwatched_views))
        written = self._written(_watched_in_place)
        grad_fn = [at for at in written if all(_word(k + at) for k in having) and not any(_word(k + at) for k in lacking)]
        base = _offsets(_WORD, lambda at: all(_word(self._known(t) + at) == t._base._cdata for t in views))
        # `has_base` is behind `base`. All views have a base, so there is no example of a 0. It is the first byte of a word; the
        # first byte of an aligned address is never 1.
        has_base = [at for at in flag(views, []) if base and at >= base[0] + _WORD and at % _WORD == 0]
        switch = _grad_mode_function()
        # Forward-mode differentiation keeps its tangents in the autograd metadata, too.
        others = list(map(self._known, leaves + results + views + cleared))
        duals = [_dual(), _dual()]
        differentiated = list(map(self._known, duals))
        written = self._written(_differentiated_in_place)
        tangent = [at for at in written if all(_word(k + at) for k in differentiated) and not any(_word(k + at) for k in others)]
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
        return all(self._is_watched(t) == t.requires_grad for t in _plain_tensors() + views + watched + cleared)

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
        for tensor in (*_plain_tensors(), *_watched_tensors(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(3)[1:]):
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
                offsets = [at for at in offsets if _byte(self._known(leaf) + at) == wanted]
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
            offsets = [at for at in offsets if not _word(known + at)]
            change(tensor)
            if self._known(tensor) != known:
                return []
            offsets = [at for at in offsets if _word(known + at)]
        return offsets

    def _known(self, tensor) -> int:
        return _word(tensor._cdata + self.native.autograd)

    def _is_watched(self, tensor) -> bool:
        """Read ``tensor.requires_grad`` from memory, as ``dispatch.torch_guard`` does."""
        known, native = self._known(tensor), self.native
        if not known:
            return False
        watched = _byte(known + native.requires_grad) or _word(known + native.grad_fn)
        if not watched and _byte(known + native.is_view):
            known = _word(_word(known + native.base) + native.autograd)
            if known:
                watched = _byte(known + native.requires_grad) or _word(known + native.grad_fn)
        return bool(watched)


@once
def guard() -> Guard:
    """Return the process's guard for PyTorch's tensors. Imports PyTorch."""
    return Guard()


def _grad_mode_function() -> int | None:
    """Find the function in PyTorch's C shim that tells whether grad mode is on in the calling thread: ``bool (*)(void)``."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    for path in (*folder.glob("libtorch_cpu.*"), *folder.glob("torch_cpu.dll")):
        function = getattr(ctypes.CDLL(str(path)), "aoti_torch_grad_mode_is_enabled", None)
        if function is None:
            continue
        function.restype, function.argtypes = ctypes.c_bool, []
        answers = [function()]
        for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
            with mode:
                answers.append(function())
        if answers == [torch.is_grad_enabled(), False, True, False]:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _alone(find) -> None:
    """Call `find` in a new thread: the caller's modes (inference, no gradients, a default device) do not reach it."""
    experiments = threading.Thread(target=find)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about prototype features
        experiments.start()
        experiments.join()


def _offsets(step: int, holds) -> list[int]:
    """Return the offsets in a C++ object for which `holds` is true."""
    return [at for at in range(0, _SCANNED_BYTES, step) if holds(at)]


def _word(address: int) -> int:
    return ctypes.c_ssize_t.from_address(address).value


def _words(address: int, count: int) -> list[int]:
    return [_word(address + _WORD * i) for i in range(count)]


def _byte(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


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
    except Exception:  # a PyTorch with other private functions
        return 0
    return theirs if ours & plain == ours else 0


def is_narrow(dtype) -> bool:
    """Whether a dtype is an integer of less than a byte: int1 to uint7, which PyTorch stores one in a byte."""
    return re.fullmatch("torch.u?int[1-7]", str(dtype)) is not None


def _field_of(tensor) -> int:
    """Return ``code | bits << 8`` of a tensor's export; 0 if it has none, or another number of lanes than 1."""
    try:
        capsule = tensor.__dlpack__(max_version=VERSION)
        managed = ffi.cast("DLManagedTensorVersioned *", PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
    except Exception:  # a dtype that DLPack lacks
        return 0
    dtype = managed.dl_tensor.dtype
    return dtype.code | dtype.bits << 8 if dtype.lanes == 1 else 0


def _dtypes() -> set:
    import torch

    return {each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@once
def dtypes_not_exported() -> frozenset:
    """Return the dtypes whose tensors PyTorch fails to export. PyTorch before 2.10 keeps the few bytes that are tried here."""
    found = set()

    def find() -> None:
        for dtype in _dtypes():
            for tensor in _made_of(dtype)[:1]:
                try:
                    tensor.__dlpack__()
                except Exception:
                    found.add(dtype)

    _alone(find)
    return frozenset(found)


def _made_of(dtype) -> list:
    """Return some tensors of this dtype; fewer, or none, if ``torch.empty`` fails for it."""
    import torch

    return _made(
        lambda: torch.empty(2, dtype=dtype, device="cpu"),
        lambda: torch.empty((3, 1000), dtype=dtype, device="cpu"),
        lambda: torch.empty((), dtype=dtype, device="cpu"),
    )


def _plain_tensors() -> list:
    import torch

    with torch.inference_mode():
        inference = torch.ones(3)
    return [
        torch.ones(3, dtype=torch.float32), torch.ones(2, 3, dtype=torch.float64), torch.empty(0), torch.ones(()), inference,
        torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.int8),
        torch.ones(2, dtype=torch.bfloat16),
    ]  # fmt: skip


def _views() -> list:
    import torch

    base, written, weights = torch.ones(12), torch.ones(2, 3), torch.ones(3, requires_grad=True)
    row = written[0]
    written.mul_(weights)  # from here on `row`, a view of `written`, requires grad
    table = torch.ones(3, 4, dtype=torch.int16)
    return [base[1:], base.view(3, 4), base.reshape(3, 4).t(), base[::2].view(2, 3), table.t(), table[0], row]


def _watched_tensors() -> list:
    import torch

    leaf = torch.ones(3, dtype=torch.float32, requires_grad=True)
    return [leaf, torch.nn.Parameter(torch.ones(2, 2)), leaf * 2, leaf.sum(), leaf[1:], (leaf * 2)[1:]]


def _watched_in_place(tensor) -> None:
    import torch

    tensor.mul_(torch.ones(1, requires_grad=True))


def _differentiated_in_place(tensor) -> None:
    import torch
    from torch.autograd import forward_ad

    with contextlib.nullcontext() if forward_ad._current_level >= 0 else forward_ad.dual_level():  # no levels within levels
        one = torch.ones(1, dtype=torch.float32)
        tensor.add_(_make_dual(one, one))  # mul_() would import torch._dynamo, which is slow


def _make_dual(tensor, tangent):
    """``forward_ad.make_dual()`` without what that compiles first for other functions' derivatives: a tenth of a second."""
    import torch
    from torch.autograd import forward_ad

    try:
        return torch._VF._make_dual(tensor, tangent, level=forward_ad._current_level)
    except Exception:  # a PyTorch in which this private function is another, or not there
        return forward_ad.make_dual(tensor, tangent)


def _dual():
    import torch

    dual = torch.ones(3, dtype=torch.float32)
    _differentiated_in_place(dual)
    return dual


def _odd_tensors() -> list:
    import torch

    z = torch.ones(3, dtype=torch.complex64)
    x = torch.ones(2, 2, dtype=torch.float32)
    needed = [z.conj(), z.conj().imag, x.to_sparse(), x.to_sparse_csr(), torch.ones(2, device="meta")]
    return needed + _made(
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([x[0], x[1, :1]]),
    )


def _made(*makers) -> list:
    """Call all `makers` and return the tensors. A failed call is skipped: PyTorch's versions have different kinds of tensors."""
    made = []
    for make in makers:
        try:
            made.append(make())
        except Exception:
            continue
    return made
