"""Kernels for CUDA in functions that JAX traces, and with JAX's arrays: XLA launches them on its own stream (``xla_cuda``).

They are ``cuda.launched_kernel.LaunchedKernel``: what they return or change is declared, and so is their configuration.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cuda.driver import driver
from ..cuda.launcher import CudaLauncher
from ..cuda.specialising import load, specialise
from ..dispatch import structs
from ..dispatch.pack import flags_in_order
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT, field_of_type
from ..ground.dtypes import dtype_field
from ..ground.native import address_of
from ..ground.omitted import OMITTED
from ..ground.once import once
from ..ground.parameters import flatten, with_items
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_New
from ..ground.safe_repr import type_name
from . import xla_cuda
from .layout import array_type
from .xla_calls import Traced

__all__ = ["TARGET", "call_eagerly", "check", "compiled", "learn", "why_no_handler"]

TARGET = "fastexchange_cuda"
"""The name of the handler for XLA."""
_JITTED = 128
"""Each is an XLA program, with its numbers as constants."""
_PYTHONS = {bool: field_of_type(BOOL, 8), int: field_of_type(INT, 64), float: field_of_type(FLOAT, 64)}
_PYTHONS[complex] = field_of_type(COMPLEX, 128)


@once
def why_no_handler() -> str:
    """Register the handler. Why there is none; "" if there is."""
    try:
        import jax

        jax.ffi.register_ffi_target(TARGET, PyCapsule_New(xla_cuda.handler(), None, None), platform="CUDA")
    except Exception as error:  # a JAX with another API
        reraise_passing(error)
        return f"XLA does not take the handler: {type(error).__name__}: {error}"
    return ""


def check(kernel) -> None:
    """Raise TypeError for a kernel that native code cannot launch with any arguments."""
    launcher, what = kernel._launcher, f"{kernel.__qualname__}(): JAX traces this call"
    if not isinstance(launcher, CudaLauncher):
        raise TypeError(f"{what}, and launch= is a Python function: write it in the notation of shapes, such as launch='n'")
    if launcher.configuration.stream is not None:
        raise TypeError(f"{what}, and launch= has a stream: XLA launches kernels on its own")
    if why := launcher.why_not or why_no_handler():
        raise TypeError(f"{what}, and native code cannot launch the kernel: {why}")


def keys_of(value) -> Iterator[int]:
    """The key sequence of a value like those that XLA passes: an array in C order, a number, or a tuple of such."""
    if isinstance(value, tuple):
        yield structs.KEY_TUPLE | len(value) << structs.SERIAL_SHIFT
        for each in value:
            yield from keys_of(each)
    elif isinstance(value, np.ndarray):
        flags = flags_in_order.py_func(value.ndim, value.size) | structs.ALIGNED
        flags |= structs.WRITEABLE if value.flags.writeable else 0
        field = dtype_field(value.dtype)
        assert field is not None
        yield structs.KEY_ARRAY | field << structs.DTYPE_SHIFT | value.ndim << structs.NDIM_SHIFT | flags << structs.FLAGS_SHIFT
    else:
        field = _PYTHONS.get(type(value)) or dtype_field(value.dtype)
        if type(value) is int and value >= 2**63:
            field = field_of_type(UINT, 64)
        assert field is not None
        yield structs.KEY_SCALAR | field << structs.DTYPE_SHIFT


def compiled(kernel, samples: tuple) -> tuple[int, ...]:
    """Compile for a call with values like these, and load the kernel on each device of JAX's. Returns the key sequence.

    Raises TypeError for a kernel that native code cannot launch so, and what the compiler says of it.
    """
    check(kernel)
    for position, value in enumerate(samples):
        for _, each in flatten(position, value):
            if each is None or (isinstance(each, np.generic) and dtype_field(each.dtype) is None):
                where = f"{kernel.__qualname__}(): argument {kernel._parameters.name_of(position)!r} (position {position})"
                raise TypeError(f"{where}: no kernel for CUDA takes {type_name(type(each))}")
    keys = tuple(key for sample in samples for key in keys_of(sample))
    for device in devices(kernel):
        learn(kernel, keys, samples, device.local_hardware_id)
    return keys


def devices(kernel) -> list:
    """JAX's GPUs. Raises TypeError if it has none."""
    import jax

    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise TypeError(f"{kernel.__qualname__}() is a kernel for CUDA, and JAX has no GPU: {error}") from error


def learn(kernel, keys: tuple[int, ...], samples: tuple, device: int | None = None) -> int:
    """Compile and load a kernel for this key sequence on a device, or on the thread's. Returns the address of ``fx_overload``."""
    check(kernel)
    cuda_kernel = kernel.cuda_kernel
    device = driver().current_device() if device is None else device
    overload = cuda_kernel._native.find(keys) or specialise(cuda_kernel, keys, device, samples)
    if overload is None or not overload.is_native:
        why = cuda_kernel._native.why_own.get(keys, "")
        raise TypeError(f"{kernel.__qualname__}(): only {cuda_kernel.target.name} launches it with the types of this call: {why}")
    load(cuda_kernel, keys, device, kernel._launcher._native)
    return address_of(overload.native)


# ---- with JAX's arrays, not traced ------------------------------------------------------------------------------------------


def call_eagerly(kernel, bound: tuple):
    """Make a call with arrays of JAX: by a function that JAX compiles, once for each kernel and the arguments that are no arrays.

    So XLA orders it among its own work, and allocates the results.
    """
    import jax

    arrays = []
    for position, value in enumerate(bound):
        where = f"{kernel.__qualname__}(): argument {kernel._parameters.name_of(position)!r} (position {position})"
        for _, each in flatten(position, value):
            if _is_array(each):
                arrays.append(each)
                narrow = jax.dtypes.canonicalize_dtype(each.dtype)
                if narrow != each.dtype:
                    raise TypeError(f"{where} is of {each.dtype}, and JAX takes {narrow} in its place: convert it, or enable x64")
            elif not (each is None or each is OMITTED or type(each) in _PYTHONS or isinstance(each, np.generic)):
                raise TypeError(f"{where} is {type_name(type(each))}, and XLA launches the kernel: pass JAX's arrays and numbers")
        if kernel._parameters.name_of(position) in (kernel.mutates or ()):
            raise BufferError(
                f"{where} is written to, and XLA launches the kernel, because its first input is JAX's: call it in a function "
                "that jax.jit compiles, where it returns the new value"
            )
    return _jitted(kernel, tuple(map(_template, bound)))(*arrays)


def _is_array(value) -> bool:
    return type(value) is array_type() or isinstance(value, np.ndarray)


class _Number:
    """A number among the arguments: equal to those of the same type and digits. ``1 == 1.0``, and no NaN is equal to itself."""

    def __init__(self, value):
        self.value, self._key = value, (type(value), repr(value))

    def __eq__(self, other):
        return isinstance(other, _Number) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


def _template(value):
    """An argument with ``_is_array`` in place of its arrays. Hashable."""
    if isinstance(value, tuple):
        return with_items(value, [_template(each) for each in value])
    if _is_array(value):
        return _is_array
    return _Number(value) if value is not None and value is not OMITTED else value


def _filled(template, arrays: Iterator) -> Any:
    if isinstance(template, tuple):
        return with_items(template, [_filled(each, arrays) for each in template])
    return next(arrays) if template is _is_array else template.value if isinstance(template, _Number) else template


@functools.lru_cache(_JITTED)
def _jitted(kernel, templates: tuple):
    import jax

    def call(*arrays):
        given = iter(arrays)
        return Traced(kernel, tuple(_filled(each, given) for each in templates)).make()

    call.__name__ = kernel.py_func.__name__
    return jax.jit(call)
