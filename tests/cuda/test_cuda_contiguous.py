"""The fast entry's short way for contiguous tensors: what is not as expected goes the general way, with the same parameters."""

import pytest
from cuda_tensors import DeviceTensor
from launches import is_refused, kernel_of

ADDRESS = 0x7F1234560000
MATRICES = {
    "the same": ((3, 4), (4, 1), ADDRESS, 0),
    "without strides": ((3, 4), None, ADDRESS, 0),
    "an extent of 1, whatever its stride": ((1, 4), (99, 1), ADDRESS, 0),
    "a last extent of 1": ((4, 1), (1, 7), ADDRESS, 0),
    "both of 1": ((1, 1), (-5, 1 << 40), ADDRESS, 0),
    "no elements": ((0, 4), (4, 1), ADDRESS, 0),
    "no elements, odd strides": ((3, 0), (7, 9), 0, 0),
    "an offset": ((3, 4), (4, 1), ADDRESS, 64),
    "a large offset": ((3, 4), (4, 1), ADDRESS, 1 << 41),
    "strided": ((3, 4), (8, 2), ADDRESS, 0),
    "transposed": ((3, 4), (1, 3), ADDRESS, 0),
    "large": ((1 << 20, 1 << 20), (1 << 20, 1), ADDRESS, 0),
    "very large": ((1 << 33, 2), (2, 1), ADDRESS, 0),
}
REFUSED = {
    "misaligned": ((3, 4), (4, 1), ADDRESS + 2, 0),
    "no memory": ((3, 4), (4, 1), 0, 0),
    "hardly any memory": ((3, 4), (4, 1), 0, 4096),
    "a negative extent": ((-3, 4), (4, 1), ADDRESS, 0),
    "sizes that overflow": ((1 << 40, 1 << 40), (1 << 40, 1), ADDRESS, 0),
}


def made(shape, strides, data, offset):
    tensor = DeviceTensor(shape, "float32", strides, data=data)
    tensor._managed.dl_tensor.byte_offset = offset
    return tensor


@pytest.fixture(scope="module")
def cached(package):
    """A launcher that has been called often with a contiguous matrix. Calls by keyword go the general way all the same."""
    launcher = kernel_of(package, 2)[2, 32]
    for _ in range(60):
        launcher(made(*MATRICES["the same"]), 1.5)
    return launcher


@pytest.mark.parametrize("case", MATRICES)
def test_parameters_are_those_of_the_general_way(cached, record, case):
    tensor = made(*MATRICES[case])
    cached(a0=tensor, a1=2.5)
    record.clear()
    cached(tensor, 2.5)
    cached(a0=tensor, a1=2.5)
    fast, general = record.launches
    assert fast == general  # the compiled kernel, too, which is another one for other layouts


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_by_the_general_way(cached, record, case):
    tensor = made(*REFUSED[case])
    fast = is_refused(lambda: cached(tensor, 2.5), BufferError)
    assert fast == is_refused(lambda: cached(a0=tensor, a1=2.5), BufferError) and not record.launches
