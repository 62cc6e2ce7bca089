"""Real exchange tables beside PyTorch's: PaddlePaddle's tensors, and ``cuda.core``'s views of memory, here of the CPU's.

Their round trips are in ``test_round_trips.py``, all dtypes and layouts in kernels in ``test_interoperability.py``.
"""

import gc
import sys

import numpy as np
import pytest
from frameworks import StridedMemoryView, paddle
from interoperability import memory_view
from made_producers import Tabled
from oracle import references_kept, type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack
from fastexchange.arguments import paddle as paddle_producer
from fastexchange.arguments.discovery import discover

needs_paddle = pytest.mark.skipif(paddle is None, reason="PaddlePaddle is not installed")
needs_views = pytest.mark.skipif(StridedMemoryView is None, reason="cuda.core is not installed")
CALLS = 4  # the first makes the cache entry


@fast_args
def double(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x[i]


@fast_args
def total(x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


total_without_the_gil = fast_args(lambda x: x.sum(), nogil=True)
bits_of_second = fast_args(lambda x: x[1], storage=True)


@fast_args
def new_same_and_part(x):
    y = np.empty_like(x)
    y[:] = 2 * x
    return y, x, x[1:]


# ---- PaddlePaddle ----------------------------------------------------------------------------------------------------
@needs_paddle
def test_paddle_tensors_are_read_natively():
    x, out = paddle.arange(4.0), paddle.zeros([4])
    for _ in range(CALLS):
        double(x, out)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert double.counts().fast >= CALLS - 4
    assert explain(x) == explain(paddle.zeros([0])) and (explain(x).path, explain(x).reasons) == ("c-exchange", ())


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
    for _ in range(CALLS):
        assert total(begins) == 3.0
    begins.stop_gradient = False
    total(paddle.zeros([2]))
    for what, tensor in tensors.items():
        expected = type_and_message(tensor.__dlpack__, max_version=(1, 0))[0]
        with references_kept(tensor):
            for take in (total, total_without_the_gil, from_dlpack, to_dlpack, lambda x: convert(x, np.ndarray)) * 2:
                assert type_and_message(take, tensor)[0] is expected, (what, take)
            with paddle.no_grad():
                assert type_and_message(total, tensor)[0] is expected, what
    assert total(begins.detach()) == 3.0


@needs_paddle
def test_paddles_narrow_elements_and_their_bits():
    for name, want in {"bfloat16": 0x3F80, "float16": 0x3C00, "float8_e4m3fn": 0x38, "float8_e5m2": 0x3C}.items():
        tensor = paddle.to_tensor([0.0, 1.0]).astype(name)
        assert bits_of_second(tensor) == bits_of_second(tensor) == want, name
        assert total(tensor) == total(tensor) == 1.0 and not explain(tensor).reasons


@needs_paddle
def test_calls_keep_no_reference_and_results_are_paddle_tensors():
    x = paddle.arange(4.0)
    for take in (total, total_without_the_gil, new_same_and_part, from_dlpack, lambda x: convert(x, np.ndarray)):
        take(x)
        with references_kept(x):
            for _ in range(CALLS):
                take(x)
    new, same, part = new_same_and_part(x)
    assert type(new) is type(part) is paddle.Tensor and same is x and new.stop_gradient
    assert (new.tolist(), part.tolist()) == ([0.0, 2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert part.data_ptr() == x.data_ptr() + 4
    del x, same
    gc.collect()
    _ = [paddle.full([4], 7.0) for _ in range(20)]  # what takes the memory, were it free
    assert part.tolist() == [1.0, 2.0, 3.0]

    @fast_args(out="x[n], k -> y[k, n]")
    def rows(x, k, y):
        for i in range(k):
            y[i] = x

    y = rows(paddle.arange(3.0), 2)
    assert type(y) is paddle.Tensor and y.tolist() == [[0.0, 1.0, 2.0]] * 2


@needs_paddle
@pytest.mark.parametrize("to_paddle", [lambda x: convert(x, paddle.Tensor), lambda x: paddle.from_dlpack(to_dlpack(x))])
def test_paddle_gives_back_what_it_gets(to_paddle):
    """One tensor at a time: PaddlePaddle keeps owners by their address, so of two of the same memory it releases one."""
    tensor = Tabled(np.arange(4.0))
    made = to_paddle(tensor)
    assert made.data_ptr() == tensor.array.ctypes.data and tensor.ledger.out == 1
    del made
    assert tensor.ledger.out == 0
    memory = bytearray(8)
    made = to_paddle(memory)
    del made
    memory.append(0)  # a BufferError if it were held


@needs_paddle
def test_paddle_has_no_negative_strides_and_nothing_readonly():
    array = np.arange(6.0)
    readonly = array.view()
    readonly.flags.writeable = False
    for odd in (array[::-1], readonly):
        assert type_and_message(convert, odd, paddle.Tensor, copy=False)[0] is BufferError
        copy = convert(odd, paddle.Tensor)
        assert copy.tolist() == odd.tolist() and copy.data_ptr() != odd.ctypes.data


@needs_paddle
def test_a_paddle_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(paddle_producer, "_queries", lambda: (None, None))
    found = discover(paddle.Tensor)
    assert found.path == "dunder" and "cannot check them" in found.notes[0]


# ---- cuda.core -------------------------------------------------------------------------------------------------------
@needs_views
def test_views_of_cuda_core():
    array = np.arange(12.0).reshape(3, 4)
    for seen in (array, array.T, array[:, ::2], array[::-1], array[1, 1:2].reshape(()), array[:0]):
        view = memory_view(seen)
        assert total(view) == total(view) == total_without_the_gil(view) == seen.sum()
        assert not seen.size or from_dlpack(view).ctypes.data == seen.ctypes.data
    assert explain(memory_view(array)).path == "c-exchange"
    assert total(memory_view(np.ones(2, "f2"))) == 2.0
    assert bits_of_second(memory_view(np.ones(2, "f2"))) == 0x3C00


@needs_views
def test_a_readonly_view_of_cuda_core_is_not_written():
    """A borrowed view, of which its table would give one, cannot say that it is readonly."""
    array = np.arange(4.0)
    out = np.zeros(4)
    double(array, memory_view(out))
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
    out.flags.writeable = False
    assert type_and_message(double, array, memory_view(out))[0].__name__ == "TypingError"
    assert total(memory_view(out)) == total(memory_view(out)) == 12.0
    assert not from_dlpack(memory_view(out)).flags.writeable and convert(out, StridedMemoryView).readonly


@needs_views
def test_views_of_cuda_core_own_and_are_released():
    new_same_and_part(memory_view(np.arange(4.0)))  # Numba keeps an exception of the first compilation, and with it its frames
    array = np.arange(4.0)
    before = sys.getrefcount(array)
    view = memory_view(array)
    for take in (total, total_without_the_gil, new_same_and_part, from_dlpack):
        for _ in range(3):
            result = take(view)
    new, same, part = new_same_and_part(view)
    assert type(new) is type(part) is StridedMemoryView and same is view
    assert np.from_dlpack(new).tolist() == [0.0, 2.0, 4.0, 6.0]
    del view, same, result, new
    assert np.from_dlpack(part).tolist() == [1.0, 2.0, 3.0] and sys.getrefcount(array) > before
    del part
    gc.collect()
    assert sys.getrefcount(array) == before
