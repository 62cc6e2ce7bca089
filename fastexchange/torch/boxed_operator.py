"""Giving PyTorch's dispatcher a native function for a kernel, by PyTorch's stable C ABI: no Python code in a call.

Source: ``torch/csrc/stable/c/shim.h``, PyTorch 2.10 or newer.
"""

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from types import BuiltinFunctionType
from typing import Any

from .._abi import ffi
from ..dispatch.allocation import PROMOTED
from ..ground.cpython import CALLABLE_CONTEXT, KERNEL_CONTEXT
from ..ground.native import address_of
from ..ground.once import for_ever, once
from ..ground.promotion import NONE, promote
from ..ground.safe_repr import type_name
from .boxed_kernel import (
    BOXED_BOOL,
    BOXED_FLOAT,
    BOXED_INT,
    BOXED_OPTIONAL,
    BOXED_TENSOR,
    MAX_ARGUMENTS,
    TORCH_NUMBERS,
    boxed_function,
    release_kept,
)
from .modes import why_no_counts
from .offsets import c_function, guard
from .schema import Argument, Schema

__all__ = ["BoxedKernel", "call_overload", "count_writes", "result_refused", "why_by_python"]

_KINDS = {
    "Tensor": BOXED_TENSOR, "SymInt": BOXED_INT, "float": BOXED_FLOAT, "bool": BOXED_BOOL
}  # fmt: skip
_THROW = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
_FUNCTIONS = (
    "aoti_torch_library_init_impl", "aoti_torch_delete_library_object", "torch_library_impl", "aoti_torch_abi_version",
    "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object", "aoti_torch__reinterpret_tensor",
)  # fmt: skip


@once
def _abi() -> dict[str, Any]:
    """The functions of PyTorch's C ABI, and ``throw``, by name; {} if this PyTorch lacks one."""
    import torch

    found = {name: c_function(name) for name in _FUNCTIONS}
    found["throw"] = c_function(_THROW, "c10")
    # Before PyTorch 2.13 has the first, C++ code deletes the value, as C++'s operator new has made it.
    found["delete_value"] = c_function("torch_delete_stable_ivalue") or c_function("_ZdlPv", "c10")
    steals = getattr(getattr(torch._C, "_aoti", None), "alloc_tensors_by_stealing_from_void_ptrs", None)
    if None in found.values() or steals is None or not guard().knows_all:
        return {}
    found["aoti_torch_abi_version"].restype = ctypes.c_uint64
    return found


def why_by_python() -> str:
    """Why PyTorch's dispatcher calls all kernels as Python functions; "" if native functions are possible. Imports PyTorch."""
    if not guard().knows_all:
        return "the layout of tensors is not verified"
    return "" if _abi() else "this PyTorch lacks a function of the C ABI for operators"


def _kind_of(argument: Argument) -> int:
    return BOXED_OPTIONAL if argument.is_optional else _KINDS[argument.type]


def _elements() -> list[int]:
    """The dtype fields of PyTorch's numbers of dtypes; 0: none."""
    return [int(guard()._elements[number]) for number in range(TORCH_NUMBERS)]


@once
def _promoted():
    """The ``promoted`` of an ``fx_boxed``."""
    elements = _elements()
    made = ffi.new("int64_t[]", TORCH_NUMBERS**2)
    for i, one in enumerate(elements):
        for j, other in enumerate(elements):
            field = promote(one, other) if one and other else NONE
            made[TORCH_NUMBERS * i + j] = i if i == j else elements.index(field) if field in elements else NONE
    return made


def _is_launched(kernel) -> bool:
    """Whether a kernel is a ``LaunchedKernel``."""
    return hasattr(kernel, "cuda_kernel")


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class BoxedKernel:
    """A kernel as a native function of PyTorch's dispatcher. It lives as long as the process: machine code has its address."""

    def __init__(self, kernel, schema: Schema):
        self._kernel, self._schema = kernel, schema
        self._kinds = [_kind_of(each) for each in schema.arguments]
        self._library = ctypes.c_void_p()
        self._buffers = [ffi.new("int64_t[]", list(words) or [0]) for words in (self._kinds, self._dtypes(), schema.mutated)]
        native = self._native = ffi.new("fx_boxed *")
        self._key, offset = (b"CUDA", CALLABLE_CONTEXT) if _is_launched(kernel) else (b"CPU", KERNEL_CONTEXT)
        native.context, native.owner, native.tensor_type = id(kernel) + offset, id(self), id(sys.modules["torch"].Tensor)
        if _is_launched(kernel):
            native.call, native.launcher, native.launch = kernel._boxed_call, id(kernel._launcher), kernel._launcher._vectorcall
        native.make_name, native.note_name = (id(for_ever(sys.intern(name))) for name in ("make", "note"))
        native.kinds, native.dtypes, native.mutated = map(address_of, self._buffers)
        native.mutated_count = len(schema.mutated)
        if PROMOTED in self._dtypes():
            native.promoted = address_of(_promoted())
        native.count, native.output_count = len(self._kinds), schema.outputs
        native.empty_strided = _address(_abi()["aoti_torch_empty_strided"])
        native.delete_tensor = _address(_abi()["aoti_torch_delete_tensor_object"])
        native.reinterpret = _address(_abi()["aoti_torch__reinterpret_tensor"])
        native.delete_value = _address(_abi()["delete_value"])
        native.release_kept = release_kept.address
        for_ever(self)

    @staticmethod
    def takes(kernel, schema: Schema) -> bool:
        """Whether a kernel can be such a function: its arguments are tensors, which may be None, and numbers.

        Nothing is compiled while ``torch.export`` traces: it replaces functions of ``math``, which Numba looks up when it starts.
        """
        return (
            isinstance(math.pow, BuiltinFunctionType)
            and not kernel._is_interpreted
            and (not _is_launched(kernel) or kernel._is_native)
            and bool(_abi())
            and kernel._native.runtime.is_native
            and len(schema.arguments) + schema.outputs <= MAX_ARGUMENTS
            and all(each.type == "Tensor" or (each.type in _KINDS and not each.is_optional) for each in schema.arguments)
            and (schema.outputs > 0 or kernel._pattern is None)
            and (not schema.mutated or not why_no_counts())
        )

    def _dtypes(self) -> list[int]:
        """Of each output: PyTorch's number of its dtype, or ``~position`` of the tensor that has it, or PROMOTED."""
        if not self._schema.outputs:
            return []
        elements = _elements()

        def word(dtype) -> int:
            if dtype is None:
                return PROMOTED
            return ~dtype if isinstance(dtype, int) else elements.index(dtype.code | dtype.bits << 8)

        return [word(each.dtype) for each in self._kernel._pattern.outputs]

    def register(self, namespace: str, name: str) -> None:
        """Give the function to the dispatcher, for tensors in the kernel's place. Raises RuntimeError if it does not take it."""
        abi = _abi()
        made = abi["aoti_torch_library_init_impl"](namespace.encode(), self._key, b"fastexchange", 0, ctypes.byref(self._library))
        function = ctypes.c_void_p(boxed_function(address_of(self._native), _address(abi["throw"])))
        version = ctypes.c_uint64(abi["aoti_torch_abi_version"]())
        if made != 0 or abi["torch_library_impl"](self._library, name.encode(), function, version) != 0:
            raise RuntimeError(f"{namespace}::{name}: PyTorch does not take a native function for it")

    def remove(self) -> None:
        """Take the function back from the dispatcher."""
        _abi()["aoti_torch_delete_library_object"](self._library)

    # ---- called by native code -----------------------------------------------------------------------------------------

    def make(self, words: int, message: int) -> bool:
        """Make a call that native code cannot. `words`: the address of the dispatcher's stack. Returns whether it succeeded."""
        aoti = sys.modules["torch"]._C._aoti
        stack = (ctypes.c_int64 * max(len(self._kinds), self._schema.outputs, 1)).from_address(words)
        try:
            given: list[Any] = list(stack[: len(self._kinds)])
            can_be_tensors = BOXED_TENSOR, BOXED_OPTIONAL
            given = [None if kind in can_be_tensors and not word else word for word, kind in zip(given, self._kinds, strict=True)]
            at = [i for i, kind in enumerate(self._kinds) if kind in can_be_tensors and given[i] is not None]
            # Not alloc_tensor_by_stealing_from_void_ptr: PyTorch 2.13's leaks the handle.
            owned = aoti.alloc_tensors_by_stealing_from_void_ptrs([_CAPSULE(given[i], None, None) for i in at])
            for i, tensor in zip(at, owned, strict=True):
                given[i] = tensor
            for i, kind in enumerate(self._kinds):
                if kind == BOXED_FLOAT:
                    given[i] = ctypes.c_double.from_buffer(ctypes.c_int64(given[i])).value
                elif kind == BOXED_BOOL:
                    given[i] = bool(given[i] & 0xFF)
            positional = [value for value, each in zip(given, self._schema.arguments, strict=True) if not each.is_keyword_only]
            named = {each.name: value for value, each in zip(given, self._schema.arguments, strict=True) if each.is_keyword_only}
            count_writes(self._schema, given, {})
            result = self._kernel(*positional, **named)
            if not self._schema.outputs and result is not None:
                raise result_refused(self._kernel, result)
            for i, made in enumerate((result,) if self._schema.outputs == 1 else result or ()):
                stack[i] = _POINTER(aoti.unsafe_alloc_void_ptr_from_tensor(made), None)
            return True
        except BaseException as error:
            self.note(error, message)
            return False

    def note(self, error: BaseException, message: int) -> None:
        """Store the address of an exception's text at `message`, and keep the exception for :func:`call_overload`.

        Raises Ctrl-C if nothing waits for it: native code lets it come again.
        """
        if getattr(_thread, "is_waiting", False):
            _thread.error = error
        elif isinstance(error, KeyboardInterrupt):
            raise error
        text = str(error).replace("\0", "\\x00").encode(errors="backslashreplace")  # PyTorch reads a C string, and decodes it
        _thread.text = ctypes.create_string_buffer(text)
        ctypes.c_size_t.from_address(message).value = ctypes.addressof(_thread.text)


def count_writes(schema: Schema, args: Sequence, kwargs: dict[str, Any]) -> None:
    """Move the version counters of the arguments that a call writes to."""
    import torch

    for position in schema.mutated:
        value = args[position] if position < len(args) else kwargs.get(schema.arguments[position].name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if each is not None and not each.is_inference():
                torch.autograd.graph.increment_version(each)


def result_refused(kernel, result) -> TypeError:
    """The exception for a result of a kernel that is an operator without outputs."""
    return TypeError(
        f"{kernel.__qualname__}(): an operator whose kernel declares no outputs, fast_args(out=...), has to return None, not "
        f"{type_name(type(result))}"
    )


def call_overload(overload, args: tuple, kwargs: dict[str, Any]):
    """Make a call by PyTorch's dispatcher. Raises a kernel's own exception, for which PyTorch raises RuntimeError."""
    was_waiting, _thread.is_waiting = getattr(_thread, "is_waiting", False), True
    own = None
    try:
        return overload(*args, **kwargs)
    except RuntimeError as error:
        own, replaced = vars(_thread).pop("error", None), error.with_traceback(None)
        if own is None:
            raise
    finally:
        _thread.is_waiting = was_waiting
        vars(_thread).pop("error", None)
    try:
        raise own from replaced
    finally:
        del own  # its traceback holds this frame


_thread = threading.local()
_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
