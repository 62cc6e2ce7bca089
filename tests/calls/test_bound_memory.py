"""Bound launches of tensors whose memory moves, is freed, or is shared with others after they were bound.

Each case is compared with an ordinary call: what the tensors show then is what a launch reads and writes. What would end the
process is tried in another one.
"""

import ctypes
import re
import threading
import warnings

import numba
import numpy as np
import pytest
from frameworks import has_table, needs_torch, torch
from interpreter import run_python

from fastexchange import fast_args

COUNTS = [3, 1000, 300_000]  # in a small block, in a large one, in pages of its own


def one_more(x):
    for i in range(x.shape[0]):
        x[i] += 1


increment = fast_args(one_more)
increment_unlocked = fast_args(one_more, nogil=True)


@fast_args
def increment_and_keep(x):
    for i in range(x.shape[0]):
        x[i] += 1
    return x


@fast_args
def increment_first(xs):
    for i in range(xs[0].shape[0]):
        xs[0][i] += 1


@fast_args
def double(x, out):
    for i in range(x.shape[0]):
        out[i] = 2 * x[i]


@fast_args
def fill(x):
    for i in np.ndindex(x.shape):
        x[i] = 3.0


KERNELS = {
    "alone": (increment, lambda tensor: tensor),
    "nogil": (increment_unlocked, lambda tensor: tensor),
    "kept": (increment_and_keep, lambda tensor: tensor),
    "tuple": (increment_first, lambda tensor: (tensor, np.zeros(2))),
    "list": (increment_first, lambda tensor: [tensor, torch.zeros(2)]),
}


def share_twice(tensor):
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        tensor.untyped_storage()._share_fd_cpu_()
        tensor.untyped_storage()._share_filename_cpu_()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def share_part(tensor):
    tensor[1:].share_memory_()


@needs_torch
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [torch and torch.Tensor.share_memory_, share_part, share_twice], ids=["all", "a part", "twice"])
@pytest.mark.parametrize(("kernel", "wrapped"), KERNELS.values(), ids=KERNELS)
def test_a_tensor_that_moves_into_shared_memory(kernel, wrapped, share, count):
    tensor = torch.zeros(count)
    launch = kernel.bind(wrapped(tensor))
    launch()
    before = tensor.data_ptr()
    share(tensor)
    assert tensor.data_ptr() != before and tensor.is_shared()
    junk = [torch.full((count,), 7.0) for _ in range(20)]  # has the memory that was the tensor's, or some of it
    for _ in range(3):
        launch()
    assert bool((tensor == 4.0).all()) and all(bool((each == 7.0).all()) for each in junk)


@needs_torch
def test_it_is_native_again_once_it_has_followed():
    tensor = torch.zeros(5)
    launch = increment.bind(tensor)
    tensor.share_memory_()
    launch()
    native = increment.counts()
    for _ in range(10):
        launch()
    assert increment.counts().fast == native.fast + 10 and launch._pinned.bound[0] is tensor
    assert tensor.tolist() == [11.0] * 5


@needs_torch
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kernel", "wrapped"), KERNELS.values(), ids=KERNELS)
def test_a_tensor_whose_memory_becomes_copy_on_write(kernel, wrapped, count):
    tensor = torch.zeros(count)
    launch = kernel.bind(wrapped(tensor))
    launch()
    clone = torch._lazy_clone(tensor)
    launch()
    assert bool((tensor == 2.0).all()) and bool((clone == 1.0).all())
    clone.add_(10)
    again = torch._lazy_clone(tensor)
    del again  # the memory is the tensor's alone again, and copy-on-write still
    launch()
    assert bool((tensor == 3.0).all()) and bool((clone == 11.0).all())


@needs_torch
def test_one_of_several_tensors_moves():
    @fast_args
    def add(x, y, z):
        for i in range(z.shape[0]):
            z[i] += x[i] + y[i]

    x, y, z = (torch.full((100,), float(i)) for i in range(3))
    launch = add.bind(x, y.numpy(), z)
    launch()
    for moves in (x, z):
        moves.share_memory_()
        launch()
    assert z.tolist() == [5.0] * 100


@needs_torch
def test_what_no_longer_fits_is_refused_or_an_ordinary_call():
    tensor = torch.zeros(100)
    launch = increment.bind(tensor)
    tensor.share_memory_()
    tensor.requires_grad_()
    with pytest.raises(BufferError, match=r"argument 'x' \(position 0\).*requires grad"):
        launch()
    tensor.requires_grad_(False)
    launch()
    assert tensor.tolist() == [1.0] * 100
    tensor.untyped_storage()._share_filename_cpu_()
    other = torch.arange(4, dtype=torch.int64)
    tensor.data = other  # other memory, of another dtype; that it was bound to has moved
    for _ in range(3):
        launch()
    assert other.tolist() == [3, 4, 5, 6]


@needs_torch
def test_rebinding_after_memory_has_moved():
    tensor, other = torch.zeros(100), torch.zeros(50)
    launch = increment.bind(tensor)
    tensor.share_memory_()
    launch.rebind(x=other)
    launch()
    assert other.tolist() == [1.0] * 50 and tensor.sum() == 0


@needs_torch
@pytest.mark.parametrize("change", ["set_", "data", "resize_"])
def test_a_tensor_that_is_given_other_memory_leaves_the_launch_its_own(change):
    tensor, other = torch.zeros(100), torch.full((100,), 5.0)
    view = tensor[:]
    launch = increment.bind(tensor)
    if change == "set_":
        tensor.set_(other)
    elif change == "data":
        tensor.data = other
    else:
        tensor.resize_(10)
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(1000)
    launch()
    assert view.tolist() == [1.0] * 100 and other.tolist() == [5.0] * 100
    if change == "resize_":
        with pytest.raises(BufferError, match="ends at byte 4000"):  # PyTorch has left the shape that it refused
            launch.rebind()
        tensor.resize_(10)
    assert launch.rebind()() is None  # reads it as it is now
    assert tensor[0].item() == (2.0 if change == "resize_" else 6.0)
    assert tensor.tolist() == tensor[:1].tolist() * len(tensor) and view[50:].tolist() == [1.0] * 50


@needs_torch
def test_declared_outputs_of_a_launch_that_follows():
    x = torch.arange(100.0)
    launch = fast_args(double.py_func, out="x[n] -> out[n]").bind(x)
    result = launch()
    for moves in (x, result) if has_table() else (x,):  # without a table the result is NumPy's
        moves.share_memory_()
        x += 1
        again = launch()
        assert again.tolist() == (2 * x).tolist() and again is result


@needs_torch
def test_moving_while_other_threads_launch():
    tensors = [torch.zeros(1000) for _ in range(40)]
    launches = [increment.bind(tensor) for tensor in tensors]
    failed: list = []
    stop = threading.Event()

    def launch_all():
        try:
            while not stop.is_set():
                for launch in launches:
                    launch()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=launch_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for tensor in tensors:
        tensor.share_memory_()
    stop.set()
    for thread in threads:
        thread.join()
    before = [tensor[0].item() for tensor in tensors]
    for launch in launches:
        launch()
    assert not failed and [tensor[0].item() for tensor in tensors] == [value + 1 for value in before]


# ---- arrays of NumPy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("refcheck", [True, False])
def test_a_bound_array_is_not_resized(refcheck, count):
    array = np.zeros(count)
    held = [increment.bind(array), increment_first.bind((array, np.zeros(2))), increment_first.bind([array])]
    with pytest.raises(ValueError, match="resize"):
        array.resize(2 * count, refcheck=refcheck)
    for launch in held:
        launch()
    assert (array == 3.0).all()
    del held, launch
    array.resize(2 * count, refcheck=False)
    assert array.shape == (2 * count,)


def test_the_owner_of_a_bound_view_is_not_resized():
    array = np.zeros(1000)
    launch = increment.bind(array[1:])
    with pytest.raises(ValueError, match="resize"):
        array.resize(2, refcheck=False)
    assert launch() is None and array.sum() == 999


SHAPES = [(4,), (100,), (124,), (125,), (900,), (1000,), (3000,), (10, 10), (5, 4, 5), ()]
STATES = [((1000,), new, "=") for new in SHAPES] + [((1000,), new, ">") for new in ((4,), (1000,), (10, 10))]
STATES += [(old, new, "=") for old in ((30, 30), (6, 5, 4)) for new in ((100,), (900,), (10, 10), (5, 4, 5), ())]


@pytest.mark.parametrize(("old", "new", "byteorder"), STATES)
def test_an_array_that_is_given_another_state(old, new, byteorder):
    other = np.array(np.zeros(new), np.dtype("f8").newbyteorder(byteorder))
    for _ in range(3):
        array = np.zeros(old)
        launch = fill.bind(array)
        launch()
        array.__setstate__(other.__reduce__()[2])
        launch()
        fill(array)
        want = array.copy()
        array[...] = 0.0
        launch()
        assert array.shape == new and array.tolist() == want.tolist() == np.full(new, 3.0).tolist()


@pytest.mark.filterwarnings("ignore:Setting the dtype:DeprecationWarning")
def test_the_same_address_and_shape_with_other_elements_or_flags():
    for _ in range(10):
        array, out = np.ones(3), np.zeros(3)
        launch = double.bind(array, out)
        launch()
        array.__setstate__((1, (3,), np.dtype("i8"), False, np.array([1, 2, 3]).tobytes()))
        launch()
        assert out.tolist() == [2.0, 4.0, 6.0]
        array.dtype = np.float64
        launch()
        assert out.tolist() == (2 * array).tolist()
    out.flags.writeable = False
    for call in (lambda: double(array, out), launch):
        with pytest.raises(numba.TypingError):
            call()


@pytest.mark.filterwarnings("ignore:Setting the dtype:DeprecationWarning")
def test_the_same_address_and_rank_with_another_shape():
    """A smaller block of memory may lie where a larger one was; here it is the same one, as other elements."""
    array = np.zeros(1000)
    launch = increment.bind(array)
    launch()
    array.dtype = np.complex128
    launch()
    assert array.tolist() == [2 + 1j] * 500
    array.dtype = np.float64
    launch()
    assert array.tolist() == [3.0, 2.0] * 500
    matrix = np.zeros((4, 6))
    launch = increment_and_keep.bind(matrix)
    matrix.shape = (6, 4)
    assert launch().shape == (6, 4)


@fast_args
def mark(x):
    for i in np.ndindex(x.shape):
        x[i] += 1


@pytest.mark.parametrize(
    ("shape", "part", "strides"),
    [
        (16, np.s_[:8:2], (32,)),
        (8, np.s_[:4], (16,)),
        ((4, 6), np.s_[:2, :3], (96, 8)),
        ((4, 6), np.s_[:2], (96, 8)),
        ((2, 2, 4), np.s_[:, :, :2], (64, 16, 8)),
    ],
)
def test_an_array_that_is_not_contiguous_gets_other_strides(shape, part, strides):
    """Of a contiguous one the flags change with the strides."""
    array, want = np.zeros(shape), np.zeros(shape)
    view = array[part]
    launch = mark.bind(view)
    launch()
    want[part] += 1
    assert array.tolist() == want.tolist()
    np.lib.stride_tricks.as_strided(want, view.shape, strides)[...] += 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        view.strides = strides
    launch()
    launch()
    assert array.tolist() == want.tolist()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kernel", [increment, increment_unlocked, increment_and_keep])
def test_an_object_of_ctypes_that_is_resized(kernel, count):
    held = (ctypes.c_double * count)()
    launch = kernel.bind(held)
    launch()
    before = ctypes.addressof(held)
    behind = []  # what lies behind it, so that it cannot grow where it is
    while ctypes.addressof(held) == before:
        assert len(behind) < 20
        behind.append(np.zeros(100_000))
        ctypes.resize(held, 8 * count + 2_000_000 * len(behind))
    junk = [np.full(count, 7.0) for _ in range(20)]
    native = kernel.counts()
    for _ in range(3):
        launch()
    assert (np.ctypeslib.as_array(held) == 4.0).all() and all((each == 7.0).all() for each in junk)
    assert kernel.counts().slow == native.slow + 1  # then it is native again


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("unknown", ["_find_checked", "_find_keys"])
def test_where_words_do_not_tell_each_launch_is_an_ordinary_call(unknown):
    program = f"""
        import pytest
        from fastexchange.producers import torch_offsets
        asked = []
        setattr(torch_offsets.Guard, {unknown!r}, lambda self: asked.append(self) or False)
        others = "native_again or ctypes or words_do_not_tell or leaves_the_launch or array or view or 1000 or 300000"
        arguments = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not nightly", "tests/calls/test_bound_memory.py"]
        code = pytest.main(arguments + ["-k", f"not ({{others}})"])
        assert asked
        raise SystemExit(code)
    """
    done = run_python(program)  # which may take minutes on a busy machine
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
