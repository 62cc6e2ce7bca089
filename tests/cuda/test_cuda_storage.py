"""Elements that neither Numba nor a package for CUDA computes with: refused, or passed as their bits."""

import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from launches import address

from fastexchange import fast_args
from fastexchange.cuda.targets import BFLOAT16
from fastexchange.ground.dtypes import dtype_field

ml_dtypes = pytest.importorskip("ml_dtypes")


def takes(x):
    pass


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn"])
def test_elements_that_nobody_computes_with(record, package, name):
    tensor = DeviceTensor((5,), getattr(ml_dtypes, name), data=address(package))
    refusing, asking = fast_args(package.jit(takes)), fast_args(package.jit(takes), storage=True)
    for _ in range(3):
        with pytest.raises(BufferError, match=rf"'x' \(position 0\).*{name}.*storage=True"):
            refusing[1, 32](tensor)
        assert not record.launches
    assert "storage=True" in str(refusing.explain(tensor)) and not refusing.signatures
    assert str(asking._element_of(dtype_field(np.dtype(getattr(ml_dtypes, name))))) == "uint8"


def test_bfloat16_is_the_packages(package):
    """To compile such a kernel takes NVRTC, which is not everywhere."""
    for storage in (False, True):
        assert "bfloat16" in str(fast_args(package.jit(takes), storage=storage)._element_of(BFLOAT16)).lower()
