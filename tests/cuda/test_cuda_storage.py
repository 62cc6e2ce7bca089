"""Elements that neither Numba nor a package for CUDA computes with: refused, or passed as their bits. bfloat16 the packages have."""

import pytest
from cuda_tensors import DeviceTensor
from launches import address

from fastexchange import fast_args
from fastexchange.cuda.targets import BFLOAT16

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
    for _ in range(20):
        asking[1, 32](tensor)
    assert len(record.launches) == 20
    assert "uint8" in str(asking.signatures) and f"which are {name}" in str(asking.explain(tensor))


def test_bfloat16_is_the_packages(package):
    """To compile such a kernel takes NVRTC, which is not everywhere."""
    for storage in (False, True):
        assert "bfloat16" in str(fast_args(package.jit(takes), storage=storage)._element_of(BFLOAT16)).lower()
