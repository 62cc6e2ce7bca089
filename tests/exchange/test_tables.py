"""Real exchange tables beside PyTorch's: PaddlePaddle's tensors, and ``cuda.core``'s views of memory, here of the CPU's."""

import gc
import sys

import numpy as np
import pytest
from frameworks import StridedMemoryView, paddle
from interoperability import memory_view
from oracle import references_kept, type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack
from fastexchange.arguments import paddle as paddle_producer
from fastexchange.arguments.discovery import discover

needs_paddle = pytest.mark.skipif(paddle is None, reason="PaddlePaddle is not installed")
MAKERS = {}
if paddle is not None:
    MAKERS[paddle.Tensor] = paddle.to_tensor  # which copies
if StridedMemoryView is not None:
    MAKERS[StridedMemoryView] = memory_view


@fast_args
def double(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x[i]


total, total_without_the_gil = fast_args(lambda x: x.sum()), fast_args(lambda x: x.sum(), nogil=True)
parts = fast_args(lambda x: (2 * x, x, x[1:]))
CALLS = (total, total_without_the_gil, parts, from_dlpack, lambda x: convert(x, np.ndarray))


@pytest.mark.parametrize("cls", MAKERS, ids=lambda cls: cls.__name__)
def test_calls_are_native_and_keep_no_reference_and_results_are_of_the_same_type(cls):
    parts(MAKERS[cls](np.arange(4.0)))  # Numba keeps an exception of the first compilation, and with it its frames
    array = np.arange(4.0)
    before = sys.getrefcount(array)
    tensor, out = MAKERS[cls](array), MAKERS[cls](np.zeros(4))
    for call in CALLS:
        call(tensor)
        with references_kept(tensor):
            for _ in range(3):
                call(tensor)
    for _ in range(4):  # the first makes the cache entry
        double(tensor, out)
    assert np.from_dlpack(out).tolist() == [0, 2, 4, 6] and double.counts().fast >= 1
    assert explain(tensor).path == "c-exchange"
    new, same, part = parts(tensor)
    assert type(new) is type(part) is cls and same is tensor
    assert np.from_dlpack(new).tolist() == [0, 2, 4, 6]
    assert np.from_dlpack(part).ctypes.data == np.from_dlpack(tensor).ctypes.data + 8
    del tensor, same, new
    gc.collect()
    _ = [MAKERS[cls](np.full(4, 7.0)) for _ in range(20)]  # what takes the memory, were it free
    assert np.from_dlpack(part).tolist() == [1, 2, 3]
    del part
    gc.collect()
    assert sys.getrefcount(array) == before


# ---- PaddlePaddle ----------------------------------------------------------------------------------------------------
@needs_paddle
def test_what_paddles_dlpack_refuses_is_refused():
    """PaddlePaddle's table reads sparse tensors as if they were dense, and exports tensors that require grad."""
    watched = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    cleared, freed, begins = paddle.arange(3.0), paddle.arange(3.0), paddle.ones([3])
    cleared._clear()
    freed._clear_data()
    tensors = {
        "requires grad": watched, "result": watched * 2, "parameter": paddle.create_parameter([3], "float32"),
        "COO": paddle.sparse.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], [3, 3]),
        "CSR": paddle.sparse.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], [2, 2]),
        "cleared": cleared, "without memory": freed, "begins to require grad": begins,
    }  # fmt: skip
    assert [total(begins) for _ in range(4)] == [3.0] * 4
    begins.stop_gradient = False
    total(paddle.zeros([2]))
    for what, tensor in tensors.items():
        expected = type_and_message(tensor.__dlpack__, max_version=(1, 0))[0]
        with references_kept(tensor):
            for take in (total, total_without_the_gil, from_dlpack, to_dlpack, CALLS[-1]) * 2:
                assert type_and_message(take, tensor)[0] is expected, (what, take)
            with paddle.no_grad():
                assert type_and_message(total, tensor)[0] is expected, what
    assert total(begins.detach()) == 3.0
    assert explain(begins.detach()) == explain(paddle.zeros([0]))


@needs_paddle
def test_paddles_declared_outputs():
    @fast_args(out="x[n], k -> y[k, n]")
    def rows(x, k, y):
        for i in range(k):
            y[i] = x

    y = rows(paddle.arange(3.0), 2)
    assert type(y) is paddle.Tensor and y.tolist() == [[0.0, 1.0, 2.0]] * 2 and y.stop_gradient


@needs_paddle
def test_a_paddle_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(paddle_producer, "_queries", lambda: (None, None))
    found = discover(paddle.Tensor)
    assert found.path == "dunder" and "cannot check them" in found.notes[0]


# ---- cuda.core -------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(StridedMemoryView is None, reason="cuda.core is not installed")
def test_a_readonly_view_of_cuda_core_is_not_written():
    """A borrowed view, of which its table would give one, cannot say that it is readonly."""
    array = np.arange(4.0)
    array.flags.writeable = False
    assert type_and_message(double, np.ones(4), memory_view(array))[0].__name__ == "TypingError"
    assert total(memory_view(array)) == total(memory_view(array)) == 6.0
    assert not from_dlpack(memory_view(array)).flags.writeable and convert(array, StridedMemoryView).readonly
