"""Types whose own exchange table is this package's, which ``exchange_api`` has given out."""

import numpy as np
import pytest
from made_producers import Dunder

from fastexchange import exchange_api, fast_args, from_dlpack


@pytest.mark.parametrize("is_set_late", [False, True])
def test_a_type_that_is_given_this_packages_table_is_one_without_a_table(is_set_late):
    class Own(Dunder):
        pass

    doubled = fast_args(lambda x: x * 2)
    filled = fast_args(lambda x, y: y.fill(3), out="x[n] -> y[n]")
    if is_set_late:
        assert type(doubled(Own(np.ones(3)))) is np.ndarray
    Own.__dlpack_c_exchange_api__ = exchange_api(Own)
    x = Own(np.ones(3))
    for _ in range(40):
        for kernel, wanted in ((doubled, [2.0] * 3), (filled, [3.0] * 3)):
            result = kernel(x)
            assert type(result) is np.ndarray and result.tolist() == wanted
    x.ledger.check(x.ledger.made)
    assert exchange_api(Own) is Own.__dlpack_c_exchange_api__
    assert from_dlpack(Own(np.ones(3))).tolist() == [1.0] * 3
    with pytest.raises(TypeError, match=r"returns is a type of tensors that can be made of memory, not .*Own"):
        fast_args(lambda x: x * 2, returns=Own)(np.ones(3))


def test_a_subclass_of_ndarray_that_is_given_this_packages_table():
    class Sub(np.ndarray):
        pass

    Sub.__dlpack_c_exchange_api__ = exchange_api(Sub)
    doubled = fast_args(lambda x: x * 2)
    for _ in range(40):
        assert doubled(np.ones(3).view(Sub)).tolist() == [2.0] * 3
    assert exchange_api(Sub) is Sub.__dlpack_c_exchange_api__
