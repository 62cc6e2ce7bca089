"""How a PyTorch tensor lies in memory, found by experiment: the offsets by which native code tells plain tensors from odd ones.

Asking PyTorch costs a call into it for every question; the answers lie in memory, in the tensor's set of dispatch keys and in
what its autograd pointer points to. Where they lie is found here and verified on tensors of every kind; where that fails PyTorch
is asked, by native code (``dispatch.torch_queries``), and about what seems odd to that by Python (``producers.torch.check``).
"""

import contextlib
import ctypes
import functools
import re
import sys
import threading
import warnings
from pathlib import Path

from .._abi import ffi
from ..ground.cpython import function_of
from ..ground.native import address_of
from ..ground.once import once
from .torch_storage import forbid_resizing_of

__all__ = ["BITS_ALLOWED", "GRAD_ALLOWED", "GUARDS", "Guard", "guard", "is_narrow", "keys_of"]

CDEF = """
/* How native code tells a framework's plain tensors from those that it has to ask about: offsets, found by experiment. */
typedef struct {
    int64_t object;             /* in the Python object: a pointer to the tensor's implementation, in which … */
    int64_t keys, odd_keys;     /* … the word here must have none of these bits, and … */
    int64_t element_type;       /* … the low 6 bits of the word here must be the number of a bit that is 0 in this one, and … */
    int64_t odd_types;
    int64_t autograd;           /* … if the pointer here, to what autograd knows of the tensor, is not NULL, then there … */
    int64_t tangent;            /* … the word here must be 0 (if that is known where), and … */
    int64_t requires_grad;      /* … the byte here and … */
    int64_t grad_fn;            /* … the word here must be 0; and if the byte … */
    int64_t is_view;            /* … here is not 0, the byte … */
    int64_t has_base;           /* … here must be 1 and the same hold for … */
    int64_t base;               /* … the implementation to which this word points; unless … */
    int64_t storage;            /* in the implementation: a pointer to the storage, 0 if unknown; in that … */
    int64_t storage_data;       /* … the word here is the address of its memory, NULL if that has been freed, and … */
    int64_t storage_size;       /* … the word here its size in bytes; 0 if unknown */
    int64_t storage_deleter;    /* … the word here what frees it, something else while it is copy-on-write; 0 if unknown */
    int64_t storage_object;     /* in the Python object of a storage: a pointer to the storage, 0 if unknown */
    int64_t is_grad_enabled;    /* … bool (*)(void) says that autograd is off. 0: a tensor that autograd knows is asked about */
    int64_t queries;            /* fx_torch_queries *, 0 if the framework has not all of them */
    int64_t asks;               /* whether the framework is asked instead, since offsets are not known, … */
    int64_t asks_autograd;      /* … also about autograd */
} fx_guard;             /* GUARDS of them in a row, whose numbers have the bits *_ALLOWED of what they let pass */

/* What a framework is asked about a tensor or a storage: PyObject *(PyObject *self, void *NULL) each, if not said otherwise. */
typedef struct {
    int64_t requires_grad, is_neg, is_conj, dtype, untyped_storage; /* of a tensor */
    int64_t data_ptr, nbytes, resizable;                        /* of a storage; they run no Python code */
    int64_t storage_type;                                       /* PyTypeObject * of a storage that they take */
    int64_t int8, uint8;                                        /* PyObject *, the dtypes that are what exports of bytes say */
    int64_t is_grad_enabled;                                    /* PyObject *, a function */
    int64_t forbid_resizing;                                    /* PyObject *, a function of a storage */
    int64_t forward_names, current_level;                       /* a module's dict; in it, the name of a number, < 0: no */
} fx_torch_queries;
"""

GRAD_ALLOWED = 1  # tensors that require grad pass a guard whose number has this bit, …
BITS_ALLOWED = 2  # … and whose number has this one, integers of less than a byte, kept one in a byte
GUARDS = 4

_SCANNED_BYTES = 256  # of the C++ objects of a tensor and of a view's autograd data, which are larger
_WORD = 8
_OB_TYPE = ctypes.sizeof(ctypes.c_ssize_t)


class Guard:
    """The ``fx_guard`` for PyTorch's tensors: offsets, if all could be verified; if not, PyTorch is asked."""

    def __init__(self):
        self._guards, self._checking = ffi.new("fx_guard[]", GUARDS), ffi.new("fx_guard[]", GUARDS)
        self.native = ffi.addressof(self._guards[0])
        self._queries = ffi.new("fx_torch_queries *")
        self.knows_keys = self.knows_storage = self.knows_autograd = self.knows_dtype = False
        self.can_ask = False
        self.why: dict[str, str] = {}
        """Of what could not be found, ``keys``, ``storage``, ``deleter``, ``autograd``, ``dtype`` or ``queries``: why not."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototype features announce themselves
            # PyTorch's modes (inference, no gradients, fake tensors, a default device) are a thread's own.
            experiments = threading.Thread(target=self._find)
            experiments.start()
            experiments.join()
        if self.can_ask:
            self._set(queries=address_of(self._queries))
        if not self.knows_all:
            # Every tensor is odd: the word at the start of every type object, its reference count, is not 0.
            odd = {"object": _OB_TYPE, "odd_keys": -1, "odd_types": -1, "queries": self.native.queries}
            self.native[0] = ffi.new("fx_guard *", odd)[0]
            for number in range(GUARDS):
                self._checking[number] = self.native[0]
            self._set(asks=self.native.queries != 0, asks_autograd=1)
        for number in range(1, GUARDS):
            self._guards[number] = self.native[0]
            if number & GRAD_ALLOWED:
                self._guards[number].autograd = self._guards[number].asks_autograd = 0
            if number & BITS_ALLOWED:
                self._guards[number].odd_types = 0

    @property
    def knows_all(self) -> bool:
        """Whether the answers to all questions are read in memory."""
        return self.knows_keys and self.knows_storage and self.knows_autograd and self.knows_dtype

    def address_for(self, cls: type) -> int:
        """The address of the ``fx_guard`` for tensors of this type. It holds for the life of the process."""
        import torch

        if not self.knows_all and getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            return address_of(self._checking)  # its answers may be those of other tensors
        return address_of(self.native)

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            setattr(self.native, name, value)

    def _find(self) -> None:
        self.can_ask = self._has_found("queries", self._find_queries)
        self.knows_keys = self._has_found("keys", self._find_keys)
        if self.knows_keys:
            self.knows_storage = self._has_found("storage", self._find_storage)
            if self.knows_storage:  # without it bound launches are ordinary calls
                self._has_found("deleter", self._find_deleter)
            self.knows_autograd = self._has_found("autograd", self._find_autograd)
            self.knows_dtype = self._has_found("dtype", self._find_dtype)

    def _has_found(self, what: str, find) -> bool:
        """Whether `find` has found `what`; if not, :attr:`why` says why."""
        try:
            if find():
                return True
        except Exception as error:  # a PyTorch without these private functions
            self.why[what] = f"{type(error).__name__}: {error}"
        self.why.setdefault(what, "what was found does not agree with what PyTorch says of its tensors")
        return False

    def _not_one(self, what: str, **places: list) -> bool:
        """Note that `what` was not found because of these lists of places, which have to hold one each. Returns False."""
        counts = ", ".join(f"{name} at {len(found)} places" for name, found in places.items() if len(found) != 1)
        self.why[what] = f"not found at one place each: {counts}"
        return False

    def _find_keys(self) -> bool:
        """Find the implementation, its dispatch keys and its autograd pointer; see that they tell plain tensors from odd."""
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
            self.why["keys"] = "there are odd tensors that have no dispatch key which plain ones lack"
            return False
        allowed |= _keys_of_cuda(keys_of(plain[0]))
        self._set(object=in_object[0], keys=in_tensor[0], odd_keys=~allowed, autograd=autograd[0])
        return True

    def _find_dtype(self) -> bool:
        """Find the number of a tensor's dtype; note those of the narrow integers, of which an export says that they are bytes."""
        tensors = {dtype: made for dtype in _dtypes() if (made := _made_of(dtype))}

        def numbers(at: int) -> dict:
            return {dtype: {_byte(t._cdata + at) & 63 for t in made} for dtype, made in tensors.items()}

        def tells(found: dict) -> bool:
            return all(len(each) == 1 for each in found.values()) and len(set().union(*found.values())) == len(found)

        places = [at for at in range(0, _SCANNED_BYTES - _WORD, 2) if tells(numbers(at))]
        if len(places) != 1:
            return self._not_one("dtype", dtype=places)
        narrow = [number for dtype, (number,) in numbers(places[0]).items() if is_narrow(dtype)]
        self._set(element_type=places[0], odd_types=sum(1 << number for number in narrow))
        return True

    def _find_storage(self) -> bool:
        """Find the storage and in it the address of its memory, which is NULL once that is freed, and the size of that."""
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
            found = range(_WORD, 10 * _WORD, _WORD)  # behind the first word, which a C++ object with virtual functions needs
            return [at for at in found if all(_word(s._cdata + at) == w for s, w in zip(storages, wanted, strict=True))]

        if len(at) != 1 or not inside(data) or len(inside(size)) != 1:
            return self._not_one("storage", storage=at, address=inside(data)[:1], size=inside(size))
        self._set(storage=at[0], storage_data=inside(data)[0], storage_size=inside(size)[0])
        return True

    def _find_deleter(self) -> bool:
        """Find a storage in its Python object, and in it the word that is another one while it is copy-on-write.

        That is the function that frees the memory, the same for all that are not. The words beside it will not do: the address
        stays as it is when a storage becomes copy-on-write, and who owns the memory may lie where another owner has lain.
        """
        import torch

        offsets = list(range(_WORD, 10 * _WORD, _WORD))
        tensors = [torch.ones(count, dtype=torch.float32) for count in (1, 3, 1000)]
        in_object = [
            at
            for at in range(2 * _WORD, torch.UntypedStorage.__basicsize__, _WORD)
            if all(_word(id(storage) + at) == storage._cdata for storage in (tensor.untyped_storage() for tensor in tensors))
        ]
        usual = {at: _word(tensors[0].untyped_storage()._cdata + at) for at in offsets}
        for tensor in tensors:
            at_storage = tensor.untyped_storage()._cdata
            address = tensor.data_ptr()
            offsets = [at for at in offsets if _word(at_storage + at) == usual[at]]
            clone = torch._lazy_clone(tensor)
            offsets = [at for at in offsets if _word(at_storage + at) != usual[at]]
            tensor.add_(1)
            if tensor.data_ptr() == address or clone.sum() != clone.numel():
                return False  # nothing was copied on writing
            offsets = [at for at in offsets if _word(at_storage + at) == usual[at]]
        if len(in_object) != 1 or not offsets:
            return self._not_one("deleter", storage=in_object, deleter=offsets[:1])
        self._set(storage_object=in_object[0], storage_deleter=offsets[0])
        return True

    def _find_autograd(self) -> bool:
        """Find what autograd notes of a tensor; see that it agrees with ``requires_grad`` on tensors of every kind."""
        views, watched = _views(), _watched_tensors()
        leaves, results = [t for t in watched if t.is_leaf], [t for t in watched if not t.is_leaf and not t._is_view()]
        cleared = [t.clone().requires_grad_().requires_grad_(False) for t in _plain_tensors() if t.is_floating_point()]
        unwatched_views = [view for view in views if not view._base.requires_grad]

        def flag(ones: list, zeros: list) -> list[int]:
            read = [(self._known(tensor), 1) for tensor in ones] + [(self._known(tensor), 0) for tensor in zeros]
            return _offsets(1, lambda at: all(_byte(known + at) == wanted for known, wanted in read))

        # A byte of an address may be 1 in all the leaves by chance: the flag is the byte that changes when it is set and cleared.
        set_and_cleared = self._switched()
        requires_grad = [at for at in flag(leaves, cleared + results + unwatched_views) if at in set_and_cleared]
        is_view = [at for at in flag(views, cleared + leaves + results) if requires_grad and abs(at - requires_grad[0]) < _WORD]
        having, lacking = list(map(self._known, results)), list(map(self._known, leaves + cleared + unwatched_views))
        written = self._written(_watched_in_place)
        grad_fn = [at for at in written if all(_word(k + at) for k in having) and not any(_word(k + at) for k in lacking)]
        base = _offsets(_WORD, lambda at: all(_word(self._known(t) + at) == t._base._cdata for t in views))
        # A flag behind the base says that there is one. No tensor is known to be a view and to lack it. (It begins a word: the
        # byte that does so in an address is never 1.)
        has_base = [at for at in flag(views, []) if base and at >= base[0] + _WORD and at % _WORD == 0]
        switch = _grad_mode_function()
        # Forward-mode differentiation notes its tangents there as well.
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
        # The first of several: further on lie second words of smart pointers, and memory behind a plain tensor's data.
        self._set(
            requires_grad=requires_grad[0], grad_fn=grad_fn[0], is_view=is_view[0], has_base=has_base[0], base=base[0],
            is_grad_enabled=switch, tangent=tangent[0],
        )  # fmt: skip
        return all(self._is_watched(t) == t.requires_grad for t in _plain_tensors() + views + watched + cleared)

    def _find_queries(self) -> bool:
        """Find the C functions by which PyTorch is asked; see that they answer as the methods do."""
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
        """Where a byte is 1 while a leaf requires grad, and 0 while it does not, of the same leaf and in turn."""
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
        """Where words of what autograd knows become nonzero by a change in place, of several tensors, one by one.

        What differs between tensors need not mean anything: the unused part of a short string, for example, is left as it was
        in whatever had that memory before.
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
        """``tensor.requires_grad``, read as ``dispatch.torch_guard`` reads it."""
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
    """The process's one guard for PyTorch's tensors. PyTorch is imported."""
    return Guard()


def _grad_mode_function() -> int | None:
    """The address of ``bool (*)(void)``, whether grad mode is on in the calling thread: a function of PyTorch's C shim."""
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


def _offsets(step: int, holds) -> list[int]:
    """At which offsets in a C++ object something holds."""
    return [at for at in range(0, _SCANNED_BYTES, step) if holds(at)]


def _word(address: int) -> int:
    return ctypes.c_ssize_t.from_address(address).value


def _byte(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def keys_of(tensor) -> int:
    """A tensor's dispatch keys, as the signed word that holds them."""
    import torch

    return ctypes.c_ssize_t(torch._C._dispatch_keys(tensor).raw_repr()).value


def _keys_of_cuda(plain: int) -> int:
    """The keys that plain tensors on a GPU have beside those of the CPU's: the backend, and what autocast may do there.

    There need not be a GPU to make such a tensor, so PyTorch is asked for the keys by name, and for the CPU's, which the
    word of a `plain` tensor on the CPU has to have. 0 where that is not so: then tensors on a GPU are asked about, one by one.
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
    """Whether a dtype is one of the integers of less than a byte, int1 to uint7, which PyTorch keeps one in a byte."""
    return re.fullmatch("torch.u?int[1-7]", str(dtype)) is not None


def _dtypes() -> set:
    import torch

    return {each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def _made_of(dtype) -> list:
    """Some tensors of this dtype, where PyTorch makes any without more being said."""
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
    written.mul_(weights)  # only now the view of it requires grad
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
        tensor.mul_(forward_ad.make_dual(one, one))


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
    """What can be made: kinds of tensors come and go with PyTorch's versions."""
    made = []
    for make in makers:
        try:
            made.append(make())
        except Exception:
            continue
    return made
