"""Elements that neither Numba nor a package for CUDA computes with: refused, or passed as their bits."""

import contextlib

import numpy as np
import pytest
from launches import dispatcher_of
from numba import types

from fastexchange import bfloat16, fast_args, float8_e5m2, float16
from fastexchange.cuda.targets import BFLOAT16, target_of
from fastexchange.ground.dtypes import dtype_field

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.both_packages


def test_elements_that_nobody_computes_with_are_their_bits_if_asked(package):
    """bfloat16 is the package's; to compile a kernel with it takes NVRTC, which is not everywhere."""
    dispatcher = dispatcher_of(package, 1)
    asking = fast_args(dispatcher, storage=True)
    for name in ("float8_e5m2", "float8_e4m3fn"):
        assert str(asking._element_of(dtype_field(np.dtype(getattr(ml_dtypes, name))))) == "uint8"
    for kernel in (asking, fast_args(dispatcher)):
        assert "bfloat16" in str(kernel._element_of(BFLOAT16)).lower()


def scaled(x, y):
    y[0] = bfloat16(np.float32(x[0]) * np.float32(2))


def halved(x, y):
    y[0] = float16(np.float32(x[0]) / np.float32(2))


def eighth(x, y):
    y[0] = float8_e5m2(1.5)


def test_names_of_half_precision_are_the_packages(package):
    """A kernel's source is one for processor and GPU; of formats that the package has not, its error tells."""
    target = target_of(package.jit(scaled))
    own = {"bfloat16": package.types.bfloat16, "float16": target.type_of(types.float16)}
    float32 = target.type_of(types.float32)

    def compiled(kernel, element):
        array = target.type_of(types.Array(types.float32, 1, "C")).copy(dtype=element)
        return package.compile_ptx(kernel, (array, array), cc=(8, 0))[0]

    with contextlib.suppress(ImportError):  # NVRTC, which is not everywhere
        import cuda.bindings.nvrtc

        assert cuda.bindings.nvrtc.nvrtcVersion()[1] > 0
        for element in (own["bfloat16"], float32):
            assert ".entry" in compiled(scaled, element)
        with pytest.raises(Exception, match="has no type for float8_e5m2"):
            compiled(eighth, float32)
    assert ".entry" in compiled(halved, own["float16"])
    x = np.ones(1, np.float16)
    fast_args(halved)(x, x)  # on the processor
    assert x[0] == 0.5
