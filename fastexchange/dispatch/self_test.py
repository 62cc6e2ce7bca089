"""A test that kernels called by this package behave as under Numba's own dispatcher.

It calls a kernel through a trampoline, boxes the result, and lets one call raise. The runtime runs the test once per
installation (``CodeCache.proved``), after ``ground.numba_internals.failures`` has found nothing.
"""

import ctypes

import numpy as np
from numba import types

from .._abi import ffi
from ..ground import numba_internals
from ..ground.native import address_of
from . import boxing
from .structs import ARRAY_HEAD_WORDS, RESULT_BYTES
from .trampoline import trampoline

_TRAMPOLINE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_BOX = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_RAISE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_ssize_t, ctypes.c_void_p)  # it sets an exception, whatever it returns


def _kernel(a, pair, z, number):
    if number == 3:
        raise ValueError("three", number)
    a[1, 1] += number
    shape = a.shape[0], a.shape[1], a.strides[0], a.strides[1], a.size, a.itemsize
    return shape, a[0, 1] + pair[0] - pair[1], z.imag, number


def _words(a: np.ndarray, pair: tuple[int, int], z: complex, number: int):
    """The words of :func:`_kernel`'s arguments. The array has no memory block: the kernel does not keep it."""
    words = [0, 0, a.size, a.itemsize, a.ctypes.data, *a.shape, *a.strides, *pair]
    assert len(words) == ARRAY_HEAD_WORDS + 2 * a.ndim + 2
    return ffi.new("int64_t[]", [*words, *(int(bits) for bits in np.array([z.real, z.imag]).view(np.int64)), number])


def calls_as_numba() -> str:
    """Describe how calls differ; "" if they do not."""
    if (found := numba_internals.type_of_argument(object())) is not None:  # here and not in failures(): Numba imports cffi for it
        return f"the type of an object is {found}, not None"
    given = (types.Array(types.float64, 2, "A"), types.UniTuple(types.int64, 2), types.complex128, types.int64)
    dispatcher = numba_internals.HelperDispatcher(py_func=_kernel, targetoptions={"nopython": True})
    dispatcher.compile(given)
    compiled = dispatcher.overloads[given]
    kernel = numba_internals.address_of_kernel(compiled)
    box, constants = boxing.box(compiled.signature.return_type)
    pointers = ffi.new("intptr_t[]", [id(constant) for constant in constants] or [0])
    result, excinfo = ffi.new("char[]", RESULT_BYTES), ffi.new("intptr_t *")

    def call(*arguments):
        words = _words(*arguments)
        excinfo[0] = 0
        call_kernel = _TRAMPOLINE(trampoline(given, given))
        code = call_kernel(kernel, address_of(result), address_of(excinfo), address_of(words))
        if code != 0:
            _RAISE(boxing.raise_error())(code, excinfo[0])
        return _BOX(box)(address_of(result), address_of(pointers), 0)

    def outcome(function, number: int):
        a = np.arange(24.0).reshape(4, 6)[::-2, ::3]
        try:
            returned = function(a, (7, 5), 1 + 2j, number)
        except Exception as error:
            returned = type(error), error.args
        return returned, a.tolist()

    for number in (2, 3):
        expected, found = outcome(_kernel, number), outcome(call, number)
        if found != expected:
            return f"a kernel's call gave {found}, not {expected}"
    return ""
