"""PyTorch's modes and version counters: what a call of an operator has to heed besides its tensors.

A *mode* (``TorchDispatchMode``, ``TorchFunctionMode``: counters of operations, tracers, fake tensors) gets a thread's operators.
Native code asks PyTorch's C++ functions whether one is active. A *version counter* counts the writes to a tensor, for autograd;
native code adds to it in memory. Functions and offsets are verified by experiment. Where that fails, PyTorch's dispatcher makes
the calls of operators, and Python those of kernels that declare outputs.

Source: ``c10/core/impl/LocalDispatchKeySet.h``, ``aten/src/ATen/PythonTorchFunctionTLS.h``, ``c10/core/TensorImpl.h``.
"""

import ctypes
from typing import Any, cast

import llvmlite.binding
from numba import types

from .._abi import ffi
from ..dispatch.runtime import runtime
from ..ground.cfunction import cfunction
from ..ground.native import address_of, atomic_add, call_int, call_word, global_address, load, native, struct_at
from ..ground.once import for_ever, once
from ..ground.passing import reraise_passing
from ..ground.readable import is_readable, read_word
from .offsets import alone, c_function, guard

__all__ = ["are_expected", "count_write", "expect_modes", "has_counter", "is_mode_active", "why_no_counts", "why_no_modes"]

CDEF = """
/* Of PyTorch's modes and version counters. */
typedef struct {
    int64_t is_included, is_excluded;   /* bool (*)(uint16_t): whether the calling thread adds a dispatch key, or drops it */
    int64_t python_key;         /* the dispatch key of modes with __torch_dispatch__ */
    int64_t tracer_key;         /* the dispatch key of torch.jit.trace */
    int64_t transform_key;      /* the dispatch key of the transforms of torch.func */
    int64_t function_modes;     /* int64_t (*)(void): how many modes with __torch_function__ are active; 0: nothing is known */
    int64_t is_unknown;         /* with function_modes 0: whether PyTorch has been seen, so Python has to ask it */
    int64_t object;             /* in a tensor's Python object: a pointer to the implementation */
    int64_t counter;            /* in that: a pointer to the version counter, NULL: the tensor has none; 0: it is unknown where */
    int64_t count;              /* in the version counter: the count, a uint32_t */
} fx_torch_modes;
"""

_modes_at = struct_at("fx_torch_modes")


@native
def _modes():
    """The process's ``fx_torch_modes``, found by its symbol's name."""
    return _modes_at(global_address("fastexchange_torch_modes"))


@native
def is_mode_active(heeds_functions):
    """Whether a mode of PyTorch gets the operators of the calling thread, or may. False before PyTorch is seen.

    ``torch.jit.trace`` is one, and so are the transforms of ``torch.func``, which wrap what is allocated within them.
    `heeds_functions`: whether modes with ``__torch_function__`` count, too.
    """
    modes = _modes()
    if modes.function_modes == 0:
        return modes.is_unknown != 0
    is_included = call_int(modes.is_included, (modes.python_key,)) & 0xFF != 0
    if is_included and call_int(modes.is_excluded, (modes.python_key,)) & 0xFF == 0:
        return True
    if call_int(modes.is_included, (modes.tracer_key,)) & 0xFF != 0:
        return True
    if call_int(modes.is_included, (modes.transform_key,)) & 0xFF != 0:
        return True
    return heeds_functions and call_word(modes.function_modes, ()) != 0


@cfunction(types.intp)
def sees_calls():
    """``fx_runtime.sees_calls``."""
    return types.intp(is_mode_active(False))


@native
def has_counter(ob):
    """Whether the PyTorch tensor `ob` has a version counter, and it is known where."""
    modes = _modes()
    return modes.counter != 0 and load(load(ob + modes.object) + modes.counter) != 0


@native
def count_write(ob):
    """Add 1 to the version counter of the PyTorch tensor `ob`, which :func:`has_counter`."""
    modes = _modes()
    atomic_add(load(load(ob + modes.object) + modes.counter) + modes.count, types.int32(1))


# ---- in Python -----------------------------------------------------------------------------------------------------

_state = for_ever(ffi.new("fx_torch_modes *"))
llvmlite.binding.add_symbol("fastexchange_torch_modes", address_of(_state))

_KEY_FUNCTIONS = {
    "is_included": "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
    "is_excluded": "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE",
}
_STACK_LENGTH = "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"


def expect_modes() -> None:
    """Let native code take a mode for active until :func:`why_no_modes` has been asked: PyTorch's tensors are seen."""
    _state.is_unknown = 1
    _let_see_calls()


def _let_see_calls() -> None:
    if runtime().is_native:
        runtime().add(sees_calls)


def are_expected() -> bool:
    """Whether native code takes a mode for active because nobody has asked, or because PyTorch cannot be asked natively."""
    return _state.is_unknown != 0 and _state.function_modes == 0


@once
def why_no_modes() -> str:
    """Why native code cannot tell if a mode is active; "" if it can. Imports PyTorch."""
    _let_see_calls()
    try:
        found = alone(_find_functions)
    except Exception as error:  # a PyTorch with other private names
        reraise_passing(error)
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, str):
        _state.is_unknown = 1
        return found
    for name, value in found.items():
        setattr(_state, name, value)
    return ""


def _find_functions() -> dict[str, int] | str:
    """Find the functions and the keys. Returns why not, unless they answer as PyTorch does, with a mode and without."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    functions = {name: c_function(symbol, "c10") for name, symbol in _KEY_FUNCTIONS.items()}
    length = c_function(_STACK_LENGTH)
    if length is None or None in functions.values():
        return "this PyTorch lacks a C++ function that tells"
    key = torch._C.DispatchKey.Python
    tracer: Any = torch._C._parse_dispatch_key("Tracer")
    number, tracer_number = int(key), int(tracer)  # type: ignore[call-overload]
    transform_number = int(torch._C._parse_dispatch_key("FuncTorchDynamicLayerFrontMode"))  # type: ignore[call-overload]
    for function in functions.values():
        function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_uint16]
    length.restype, length.argtypes = ctypes.c_int64, []

    def answers() -> tuple:
        included = functions["is_included"]
        asked = included(number), functions["is_excluded"](number), length(), included(tracer_number)
        return *asked, included(transform_number)

    def transformed(x):
        seen.append(answers())
        return x

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    seen = [answers()]
    with Dispatch():
        seen.append(answers())
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            seen.append(answers())
    with Function():
        with Function():
            seen.append(answers())
        seen.append(answers())
    with torch._C._IncludeDispatchKeyGuard(tracer):
        seen.append(answers())
    torch.func.vmap(transformed)(torch.zeros(1))
    seen.append(answers())
    none = (False, False, 0, False, False)
    wanted = [none, (True, False, 0, False, False), (True, True, 0, False, False)]
    wanted += [(False, False, 2, False, False), (False, False, 1, False, False)]
    if seen != [*wanted, (False, False, 0, True, False), (False, False, 0, False, True), none]:
        return "its C++ functions do not tell of a mode that is active"
    addresses = {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()}
    keys = {"python_key": number, "tracer_key": tracer_number, "transform_key": transform_number}
    return {**addresses, **keys, "function_modes": ctypes.cast(length, ctypes.c_void_p).value or 0}


@once
def why_no_counts() -> str:
    """Why native code cannot add to version counters; "" if it can. Imports PyTorch."""
    if not guard().knows_all:
        return "the layout of tensors is not verified"
    try:
        found = alone(_find_counter)
    except Exception as error:
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"
    if len(found) != 1:
        return f"they are found at {len(found)} places, not at one"
    _state.object = guard().native.object
    _state.count = found[0][1]
    _state.counter = found[0][0]
    return ""


_WORDS, _COUNTS = 32, range(8, 32, 4)  # of an implementation, and where the count may be in a version counter


def _find_counter() -> list[tuple[int, int]]:
    """Return the offsets of the pointer to the counter, and in it of the count, that fit tensors with many counts."""
    import torch

    tensors = []
    for writes in (0, 1, 5, 77, 300):
        tensor = torch.zeros(3)
        view = tensor[1:]  # which has the same counter
        for _ in range(writes):
            tensor.add_(1)
        tensors += [tensor, view]
    with torch.inference_mode():
        without = torch.zeros(3)
    implementations = [tensor._cdata for tensor in (*tensors, without)]
    fitting = []
    for word in range(0, 8 * _WORDS, 8):
        *pointers, none = (read_word(address, word) for address in implementations)
        if none == 0 and all(map(_is_counter, pointers)) and len(set(pointers)) == len(tensors) // 2:
            fitting += [
                (word, count)
                for count in _COUNTS
                if all(
                    ctypes.c_uint32.from_address(cast(int, pointer) + count).value == tensor._version
                    for pointer, tensor in zip(pointers, tensors, strict=True)
                )
            ]
    return fitting


def _is_counter(pointer: int | None) -> bool:
    return pointer is not None and is_readable(pointer, _COUNTS.stop)
