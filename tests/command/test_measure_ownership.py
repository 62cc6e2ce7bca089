"""``measure``: what it makes thousands of is given back, each once."""

import gc
import sys

import numpy as np
import pytest
from made_producers import Dunder, Tabled, tabled_type
from test_measure import nothing, quick

from fastexchange import fast_args
from fastexchange.ground.dlpack import ffi

pytestmark = pytest.mark.filterwarnings("ignore:measure:RuntimeWarning")


@fast_args(nogil=True)
def without_the_gil(x):
    pass


def test_every_export_is_given_back_once():
    tensor = Tabled(np.ones(3))
    report = quick(without_the_gil, tensor, alternatives=True)
    assert report.arguments[0].producer is not None
    del report
    gc.collect()  # NumPy's views among the alternatives
    tensor.ledger.check(tensor.ledger.made)
    assert tensor.ledger.made > 1000


def test_every_capsule_of_dlpack_is_given_back():
    class OfNumPy(Dunder):
        """Its capsules release what nobody has taken, as those of all frameworks do."""

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    array = np.ones(3)
    tensor = OfNumPy(array)
    before = sys.getrefcount(array)
    report = quick(nothing, tensor, alternatives=True)
    assert report.arguments[0].producer is not None
    del report
    gc.collect()
    assert sys.getrefcount(array) == before


def test_every_buffer_is_given_back():
    buffer = bytearray(8)
    assert quick(nothing, buffer, alternatives=True).arguments[0].producer is not None
    buffer.append(0)  # BufferError while somebody holds its buffer


@pytest.mark.parametrize("status", [0, -1])
def test_an_export_that_fails_is_no_export(status):
    from fastexchange.measuring.exports import statements_of

    @ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def nothing_exported(py_object, out):
        return status

    failing = tabled_type("Failing", managed_tensor_from_py_object_no_sync=nothing_exported)
    assert statements_of(failing(np.ones(3)), needs_owning_exports=True) == []
    assert len(statements_of(failing(np.ones(3)), needs_owning_exports=False)) == 1
