"""Objects with Python's buffer protocol: the types and results that ``@njit`` gives them, and released exactly once."""

import array
import ctypes
import gc
import mmap
import pickle
import sys

import numba
import numpy as np
import pytest
from counting import scene
from exchanges import CALLS, CONVERSIONS, SOURCES, SWAPPED, counted, result_or_exception
from interoperability import optional, pyarrow
from made_producers import Dunder, is_held
from oracle import check_same_as_njit, numbas, references_kept, type_and_message

from fastexchange import explain, fast_args, from_dlpack, to_dlpack

pick = fast_args(lambda x, i: x[i])
KERNELS = {0: fast_args(lambda x: x.ndim), 1: fast_args(lambda x: len(x)), 2: fast_args(lambda x: (len(x), x[0, 0], x[-1, -1])),
           3: fast_args(lambda x: (len(x), x[0, 0, 0], x[-1, -1, -1]))}  # fmt: skip
described = fast_args(
    lambda x: (x.nbytes, x.itemsize, x.ndim, x.shape, x.strides, x.contiguous, x.c_contiguous, x.f_contiguous, x.readonly)
)


@fast_args
def add_one(x):
    for i in range(len(x)):
        x[i] += 1


def some_bytes(count=48) -> bytearray:
    return bytearray(range(1, count + 1))


plane, cube = np.arange(12.0).reshape(4, 3), np.arange(24.0).reshape(2, 3, 4)
BUFFERS = {
    "bytes": lambda: bytes(some_bytes()), "bytearray": some_bytes,
    "subclass of bytearray": lambda: type("Mine", (bytearray,), {})(b"abc"),
    "memoryview": lambda: memoryview(some_bytes()),
    "readonly memoryview": lambda: memoryview(some_bytes()).toreadonly(),
    "mmap": lambda: SOURCES["mmap"](np.frombuffer(some_bytes(), "u1")),
    "readonly mmap": lambda: mmap.mmap(-1, 48, access=mmap.ACCESS_READ),
    "PickleBuffer": lambda: pickle.PickleBuffer(some_bytes()), "readonly PickleBuffer": lambda: pickle.PickleBuffer(b"abc"),
    "PickleBuffer of an array": lambda: pickle.PickleBuffer(np.arange(4.0)),
    "every second": lambda: memoryview(some_bytes())[::2], "backwards": lambda: memoryview(some_bytes())[::-1],
    "every third of int32, backwards": lambda: memoryview(some_bytes()).cast("i")[::-3],
    "one": lambda: memoryview(some_bytes())[5:6],
    "subclass of array": lambda: type("Mine", (array.array,), {})("d", [1.0, 2.0]),
    **{f"array {code}": lambda code=code: array.array(code, range(1, 7)) for code in "bBhHiIlLqQfd"},
    **{f"memoryview {code}": lambda code=code: memoryview(some_bytes()).cast(code) for code in "bBhHiIlLqQnNfd?"},
    **{f"memoryview of {dtype}": lambda dtype=dtype: memoryview(np.arange(3).astype(dtype)) for dtype in ("c8", "c16", "f2")},
    "empty bytes": lambda: b"", "empty array": lambda: array.array("d"),
    "empty memoryview of doubles": lambda: memoryview(some_bytes()).cast("d")[6:],
    "empty PickleBuffer": lambda: pickle.PickleBuffer(b""), "2-d C": lambda: memoryview(some_bytes()).cast("h", (4, 6)),
    "2-d F": lambda: memoryview(np.asfortranarray(plane)), "2-d rows backwards": lambda: memoryview(plane)[::-2],
    "2-d columns": lambda: memoryview(plane[:, ::2]),
    "2-d broadcast": lambda: memoryview(np.broadcast_to(np.arange(3.0), (2, 3))),
    "2-d one row": lambda: memoryview(some_bytes()).cast("h", (1, 24)),
    "2-d readonly": lambda: memoryview(bytes(some_bytes())).cast("h", (4, 6)),
    "2-d PickleBuffer": lambda: pickle.PickleBuffer(memoryview(some_bytes()).cast("h", (4, 6))),
    "3-d C": lambda: memoryview(some_bytes()).cast("I", (2, 3, 2)),
    "3-d permuted": lambda: memoryview(cube.transpose(2, 0, 1)),
    "no dimensions": lambda: memoryview(some_bytes(8)).cast("d", ()),
    "misaligned": lambda: memoryview(bytearray(b"x") + np.arange(3.0).tobytes())[1:].cast("d"),
    **{f"ctypes {code}": lambda code=code: (np.ctypeslib.as_ctypes_type(code) * 3)(1, 0, 1) for code in "?bBhHiIlLqQfd"},
    "ctypes 2-d": lambda: ((ctypes.c_float * 3) * 2)((1, 0, 1), (0, 1, 1)),
    "ctypes 3-d": lambda: (((ctypes.c_ushort * 2) * 1) * 3)(), "ctypes empty": lambda: (ctypes.c_double * 0)(),
    "ctypes scalar": lambda: ctypes.c_double(2.5),
}  # fmt: skip
if pyarrow is not None:
    BUFFERS["pyarrow's"] = lambda: pyarrow.py_buffer(b"abc")
if (_cffi := optional("cffi")) is not None:
    BUFFERS["cffi's"] = lambda: _cffi.FFI().buffer(_cffi.FFI().new("char[3]", b"abc"))
if (_testbuffer := optional("_testbuffer")) is not None:  # CPython's own tests have it: buffers of any format and layout
    for _format in ("@i", "=i", "<i", "@l", "=l", "<L", "=q", "@N", "n", "<h", "<d", "=f", "<e", ">b", "!B", "@?", "<?"):
        BUFFERS[f"format {_format}"] = lambda form=_format: memoryview(_testbuffer.ndarray([1] * 3, shape=[3], format=form))
    for _ndim in (8, 9, 64):
        BUFFERS[f"{_ndim}-d"] = lambda ndim=_ndim: memoryview(
            _testbuffer.ndarray([1] * 6, shape=[1] * (ndim - 2) + [2, 3], format="i"))  # fmt: skip
WRITTEN = ("bytearray", "memoryview", "array d", "mmap", "backwards", "ctypes d")


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_to_a_kernel_what_it_is_to_njit(name):
    thing = BUFFERS[name]()
    want = np.asarray(memoryview(thing))
    is_typed = not isinstance(result_or_exception(numba.typeof, thing), Exception)
    with references_kept(*[thing] * (thing != b"")):  # there is one of those
        if want.ndim != 1 or not want.size:
            check_same_as_njit(KERNELS.get(want.ndim, KERNELS[0]), (thing,), None if is_typed else (want,))
        else:
            if is_typed and want.dtype != np.float16:  # which Numba does not read
                check_same_as_njit(pick, (thing, -1))
            assert [pick(thing, i) for i in range(len(want))] == want.tolist()
            before = pick.counts()
            assert [pick(thing, 0) for _ in range(4)] == want[:1].tolist() * 4
            assert pick.counts()[:2] == (before.fast + 4, before.slow)
            assert explain(thing).path == "buffer"
        if isinstance(thing, memoryview) and (1 < want.ndim < 4 or name in ("memoryview", "backwards")):
            check_same_as_njit(described, (thing,))
    if name in WRITTEN:
        for _ in range(2):
            expected = (want + 1).tolist()
            add_one(thing)
            assert want.tolist() == expected
    elif not want.flags.writeable and want.ndim == 1 and want.size > 1 and is_typed:
        got, wanted = type_and_message(add_one, thing)[0], type_and_message(numbas(add_one), thing)[0]
        assert got is wanted and issubclass(wanted, numba.core.errors.TypingError)


@pytest.mark.parametrize("take", [from_dlpack, CALLS["convert"]])
def test_a_buffer_is_converted_as_the_memory_that_memoryview_shows(take):
    for name, make in BUFFERS.items():
        thing = make()
        want = np.asarray(memoryview(thing))
        with scene(name), references_kept(*[thing] * (thing != b"")):
            view = take(thing)
            assert (view.dtype, view.shape, view.tolist()) == (want.dtype, want.shape, want.tolist())
            assert view.flags.writeable is want.flags.writeable
            if want.size:
                assert view.ctypes.data == want.ctypes.data and counted(view.strides, view) == counted(want.strides, want)
                assert view.flags.aligned is (view.ctypes.data % view.dtype.alignment == 0)
            if not want.flags.writeable:
                assert type_and_message(setattr, view.flags, "writeable", True)[0] is ValueError
            del view


def test_ctypes_functions_are_numbas_and_arrays_of_ctypes_can_be_returned():
    """Functions have a buffer, too: the pointer. Of ctypes arrays Numba makes arrays, which hold them."""
    sine = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(("sin", ctypes.CDLL("libm.so.6")))
    apply = fast_args(lambda function, x: function(x))
    assert apply(sine, 1.0) == numbas(apply)(sine, 1.0) == np.sin(1.0)
    thing = (ctypes.c_double * 3)(1, 2, 3)
    with references_kept(thing):
        part = returns_a_part(thing, 1)
        assert type(part) is np.ndarray
        thing[1] = 7
        assert part.tolist() == [7, 3]
        del part


def test_a_memoryview_whose_strides_are_no_multiple_of_its_items():
    """Numba has them, DLPack has not: it makes the call."""
    view = memoryview(np.array([(1, 2.5), (3, 4.5)], [("a", "i1"), ("b", "f8")])["b"])
    assert [pick(view, 1), pick(view, 1)] == [numbas(pick)(view, 1)] * 2 == [4.5] * 2
    assert "Numba's own dispatcher makes this call" in str(pick.explain(view, 1))
    assert explain(view).path == "numba" and type_and_message(from_dlpack, view)[0] is BufferError


@fast_args
def fails(x, y):
    if x[0] >= 0:
        raise ValueError("as asked")
    return x[0]


returns_a_part = fast_args(lambda x, y: x[1:])
ENDS = [(fast_args(lambda x, y: x[0]), None), (fast_args(lambda x, y: x[0], nogil=True), None), (fails, ValueError),
        (fast_args(fails.py_func, nogil=True), ValueError),
        (fast_args(lambda x, y: y.no_such_attribute), numba.core.errors.TypingError)]  # fmt: skip


@pytest.mark.parametrize("holder", [memoryview, lambda thing: memoryview(memoryview(thing).cast("b"))[::2], pickle.PickleBuffer])
def test_a_buffer_is_released_however_a_call_ends(holder):
    """Other holders, and where it stands among other arguments: test_ownership.py."""
    thing, refused = some_bytes(), (np.zeros(3, SWAPPED + "f8"), memoryview(np.zeros(2, "S3")))
    for kernel, error in ENDS * 2:
        argument = holder(thing)
        for others, wanted in (((1.0,), error), *(((each,), BufferError) for each in refused), ((1, 2), TypeError)):
            end = result_or_exception(kernel, argument, *others)
            assert end == 1 if wanted is None else isinstance(end, wanted), end
            del end
        argument.release()
        del argument
        assert not is_held(thing)


@pytest.mark.filterwarnings("ignore:Code running in object mode")
@pytest.mark.parametrize("nogil", [False, True])
def test_a_buffer_is_held_while_the_kernel_runs(nogil):
    thing, seen = some_bytes(), []

    @fast_args(nogil=nogil)
    def kernel(x):
        with numba.objmode():
            seen.append(is_held(thing))
        return x[0]

    assert kernel(thing) == kernel(thing) == 1
    assert seen == [True] * 2 and not is_held(thing)


def ended(kernel, *arguments) -> tuple:
    """What it returns, or the exception's type and text, but for a line of ours before Numba's words."""
    end = result_or_exception(kernel, *arguments)
    if isinstance(end, Exception):
        return type(end), type(end) is SystemError or str(end).rpartition(" It says:\n")[2]  # that names the function called
    return type(end), end


@pytest.mark.parametrize("name", ["bytes", "bytearray", "memoryview", "array d", "mmap", "PickleBuffer"])
def test_a_kernel_that_returns_its_buffer_does_as_njit_does(name):
    """Numba has no way to return most of them, and its attempt costs a reference to the object, but not the buffer."""
    for kernel in (fast_args(lambda x, y: x), returns_a_part, fast_args(lambda x, y: (1, x))):
        thing = BUFFERS[name]()
        for _ in range(2):
            assert ended(kernel, thing, 1) == ended(numbas(kernel), thing, 1)
            gc.collect()
            assert not hasattr(thing, "append") or not is_held(thing)
        for name_of_end in {"release", "close"} & {*dir(thing)}:
            getattr(thing, name_of_end)()


HOLDING = {name: take for name, take in {**CALLS, **CONVERSIONS, "legacy to_dlpack": to_dlpack}.items() if "copy" not in name}


@pytest.mark.parametrize("name", HOLDING)
def test_a_result_holds_the_buffer_until_it_dies(name):
    take, thing = HOLDING[name], some_bytes()
    results = [take(thing) for _ in range(1 if "paddle" in name else 2)]  # it keeps owners by address, and of two releases one
    if name == "to jax.Array" and not is_held(thing):
        pytest.skip("JAX has copied it")
    while results:
        assert is_held(thing)
        results.pop()
        gc.collect()
    assert not is_held(thing)
    view = memoryview(thing)
    made = take(view)
    assert type_and_message(view.release)[0] is BufferError
    del made
    gc.collect()
    view.release()


first = fast_args(lambda x: x[0])


class Counts:
    def __init__(self, data):
        self.data, self.taken, self.released = data, 0, 0

    def __buffer__(self, flags):
        self.taken += 1
        assert first(bytearray(b"a")) == 97
        gc.collect()
        return memoryview(self.data)

    def __release_buffer__(self, view):
        self.released += 1
        view.release()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes with __buffer__ came with CPython 3.12")
def test_a_class_with_buffer_methods_is_asked_and_released_once_and_only_if_it_has_no_dlpack():
    thing = Counts(some_bytes())
    check_same_as_njit(first, (thing,), native=False)  # it calls the kernel, too
    taken = thing.taken
    assert first(thing) == 1 and thing.taken == thing.released == taken + 1
    view = from_dlpack(thing)
    assert (thing.taken, thing.released) == (taken + 2, taken + 1) and is_held(thing.data)
    view[0] = 5
    assert thing.data[0] == 5
    del view
    assert thing.released == taken + 2
    for _ in range(3):
        assert type_and_message(fails, thing, 1)[0] is ValueError
        assert thing.taken == thing.released and not is_held(thing.data)
    both = type("HasBoth", (Counts, Dunder), {})(some_bytes())
    Dunder.__init__(both, np.full(3, 2.0))
    assert first(both) == first(both) == from_dlpack(both)[0] == 2.0 and not both.taken
