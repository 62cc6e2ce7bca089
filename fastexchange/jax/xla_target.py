"""The kernels that compiled functions of JAX call: their names, and XLA's handler (``xla``), which finds them by these."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np

from .._abi import ffi
from ..arguments.decoding import field_of
from ..calls.compile_ahead import compiled_natively
from ..calls.dependencies import closure_of
from ..calls.options import declaring, launched
from ..calls.resolve import Report
from ..dispatch import structs
from ..ground.dtypes import field_to_dtype
from ..ground.native import address_of
from ..ground.numba_code import RUNS_THREADS, runs_python
from ..ground.numba_internals import overloads_of
from ..ground.omitted import OMITTED
from ..ground.once import for_ever, forkable_lock, once
from ..ground.parameters import signature_of
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_New
from . import xla

__all__ = ["PYTHON_SIDE", "TARGET", "compiled_for", "id_of", "name_of", "register_xla_target", "sample_array", "why_no_handler"]

TARGET = "fastexchange"
"""The name of the handler for XLA."""
_lock = forkable_lock()


def compiled_for(kernel, samples: tuple) -> Report:
    """Compile for a call by XLA with arguments like these.

    Raises TypeError for a kernel that returns something, and RuntimeError if XLA's threads cannot run it at once.
    """
    report = compiled_natively(kernel, samples)
    if report.overload is not None and report.overload.native.box:
        raise TypeError(
            f"{kernel.__qualname__}(): a kernel that JAX traces returns None; the call returns what out= and mutates= declare"
        )
    runs = (runs_python(compiled.library) for _, compiled in overloads_of(kernel))
    if (kernel.targetoptions.get("parallel") or RUNS_THREADS in runs) and _threading_layer() == "workqueue":
        raise RuntimeError(
            f"{kernel.__qualname__}(): XLA runs kernels in several threads at once, and Numba's threading layer 'workqueue' ends "
            "the process if two of them have parallel loops: set NUMBA_THREADING_LAYER to omp or tbb"
        )
    return report


def _threading_layer() -> str:
    """What runs Numba's parallel loops; "" before there is one."""
    try:
        return numba.threading_layer()
    except ValueError:
        return ""


def sample_array(dtype, ndim: int, is_writeable: bool) -> np.ndarray:
    """An array as the kernel gets one: in C order, and not in Fortran's as well if it has two dimensions."""
    made = np.zeros((2, 2, *[1] * ndim)[:ndim], dtype)
    made.flags.writeable = is_writeable
    return made


# ---- names -----------------------------------------------------------------------------------------------------------------

_named: dict[str, Any] = {}
"""By name, the kernels that compiled functions may call. They live as long as the process."""


def _base_name(kernel) -> str:
    """A kernel's name without a number: its function's, and a digest of what it declares, and of the values of its closure."""
    function = kernel.py_func
    declared: tuple[Any, ...] = list(signature_of(function).parameters), kernel.out, kernel.mutates, kernel.storage
    declared += (closure_of(function),)
    if kernel._by_xla is not None:
        declared += ("CUDA", str(getattr(kernel._launcher, "configuration", kernel.launch)))
    digest = hashlib.sha256(repr(declared).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{function.__module__}.{function.__qualname__}#{digest}"


def id_of(name: str) -> int:
    """The number by which the handler finds a name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "little", signed=True)


def name_of(kernel) -> str:
    """The name of a kernel in compiled functions. A second one of the same name, as in a notebook, has a number."""
    with _lock:
        known = vars(kernel).get("_xla_name")
        if known is None:
            base = known = _base_name(kernel)
            number = 2
            while known in _named:
                known = f"{base}_{number}"
                number += 1
            kernel._xla_name = known
            _named[known] = for_ever(kernel)
            xla.know_kernel(id_of(known), kernel._native.address)
        return known


@once
def why_no_handler() -> str:
    """Register the handler. Why there is none; "" if there is."""
    try:
        import jax

        jax.ffi.register_ffi_target(TARGET, PyCapsule_New(xla.handler(), None, None), platform="cpu")
    except Exception as error:  # a JAX with another API
        reraise_passing(error)
        return f"XLA does not take the handler: {type(error).__name__}: {error}"
    return ""


def register_xla_target() -> str:
    """Let XLA find the kernels that functions of JAX call. Returns the name under which it does, ``"fastexchange"``.

    A process that traces a call does this itself. One that runs an exported function has to call this first, and to import the
    modules with its kernels; they are compiled for its calls when they come. Who exports names it:
    ``disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(register_xla_target())]``. That of kernels for CUDA is
    ``"fastexchange_cuda"``.

    Raises ImportError without JAX, and RuntimeError if this one does not take the handler.

    Source: ``jax.ffi``, ``jax.export``.

    >>> register_xla_target()
    'fastexchange'
    """
    import jax  # noqa: F401

    global _is_registered
    _is_registered = True
    if why := why_no_handler():
        raise RuntimeError(f"register_xla_target(): {why}")
    for kernel in list(launched.values()):
        kernel._by_xla.why_no_handler()
    return TARGET


_is_registered = False


def is_registered() -> bool:
    """Whether the program has called :func:`register_xla_target`: kernels for CUDA register their handler, too, then."""
    return _is_registered


# ---- what native code calls ------------------------------------------------------------------------------------------------


def _describe(error: BaseException, kernel: str | None) -> str:
    """The text of an exception in JAX's error. `kernel`: the name of the one that has raised it, if one has."""
    try:
        text = str(error)
    except Exception as failure:
        reraise_passing(failure)
        text = "<its text cannot be had>"
    by = f"{kernel}(): " if kernel else ""
    return f"{by}{type(error).__name__}: {text}".replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _learn(address: int) -> int:
    """Compile for a call by XLA that this process has not traced: by an exported function, or after a kernel was recompiled.

    `address`: of the ``fx_xla_attributes``. Returns the address of the ``fx_overload``, which is never freed. Raises LookupError
    if there is not one kernel of this name.
    """
    kernel, given = _named_in(address, declaring)
    keys = iter(given)
    report = compiled_for(kernel, tuple(_sample(key, keys) for key in keys))
    if report.overload is None or report.keys != given:
        raise TypeError(f"{kernel.__qualname__}(): native code cannot call the kernel with the types of the traced call")
    return address_of(report.overload.native)


def _learn_launch(address: int) -> int:
    """As :func:`_learn`, of a call on CUDA: the kernel is loaded on the device of the thread's context."""
    kernel, given = _named_in(address, launched)
    keys = iter(given)
    return kernel._by_xla.learn(kernel, given, tuple(_sample(key, keys) for key in keys))


def _named_in(address: int, kernels) -> tuple[Any, tuple[int, ...]]:
    """The kernel, one of `kernels` or named before, and the key sequence in an ``fx_xla_attributes``."""
    attributes = ffi.cast("fx_xla_attributes *", address)
    name = bytes(ffi.buffer(attributes.kernel.ptr, attributes.kernel.len)).decode("utf-8", "surrogatepass")
    kernel = _named.get(name)
    if kernel is None:
        same = [each for each in list(kernels.values()) if _base_name(each) == name]
        found = [each for each in same if vars(each).get("_xla_name") in (None, name)]  # another thread may have named it
        if len(found) != 1:
            count = f"{len(found)} kernels" if found else "no kernel"
            raise LookupError(f"this process has {count} {name}, declared as when the call was traced: import its module")
        kernel = found[0]
        if kernel._by_xla is not None:
            kernel._by_xla.check(kernel)
        name_of(kernel)
    words = ffi.cast("int64_t *", attributes.keys.data)
    return kernel, tuple(words[i] for i in range(attributes.keys.size))


def _sample(key: int, keys: Iterator[int]):
    """A value with this key. `keys`: those that follow."""
    kind = key & 0xFF
    if kind == structs.KEY_TUPLE:
        return tuple(_sample(next(keys), keys) for _ in range(key >> structs.SERIAL_SHIFT))
    if kind in (structs.KEY_NONE, structs.KEY_OMITTED):
        return None if kind == structs.KEY_NONE else OMITTED
    dtype = field_to_dtype(field_of(key))
    if kind == structs.KEY_ARRAY:
        return sample_array(dtype, key >> structs.NDIM_SHIFT & 0xFF, bool(key >> structs.FLAGS_SHIFT & structs.WRITEABLE))
    return dtype.type(0)


PYTHON_SIDE = _describe, _learn, _learn_launch
