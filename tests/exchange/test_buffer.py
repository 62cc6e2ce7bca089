"""Objects with Python's buffer protocol: the types and results that ``@njit`` gives them, and released exactly once.

A ``bytearray`` cannot be resized, a ``memoryview`` not released, while somebody holds its buffer: that is how the tests
know whether it has been given back.
"""

import array
import ctypes
import gc
import mmap
import pickle
import sys

import numba
import numpy as np
import pytest
from exchanges import CALLS, CONVERSIONS, SWAPPED, end_of, is_held, together, versioned
from forked import fork_python
from frameworks import torch
from oracle import check_same_as_njit, numbas, references_kept, type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack

try:
    import _testbuffer  # CPython's own tests come with it: buffers of any format and layout
except ImportError:
    _testbuffer = None

needs_testbuffer = pytest.mark.skipif(_testbuffer is None, reason="this CPython comes without its tests")
needs_buffer_classes = pytest.mark.skipif(sys.version_info < (3, 12), reason="classes with __buffer__ came with CPython 3.12")


first = fast_args(lambda x: x[0])
pick = fast_args(lambda x, i: x[i])
length = fast_args(lambda x: len(x))
described = fast_args(
    lambda x: (x.nbytes, x.itemsize, x.ndim, x.shape, x.strides, x.contiguous, x.c_contiguous, x.f_contiguous, x.readonly)
)
size = fast_args(lambda x: x.size)


@fast_args
def add_one(x):
    for i in range(len(x)):
        x[i] += 1


def is_typed_by_numba(thing) -> bool:
    try:
        numba.typeof(thing)
    except (ValueError, numba.core.errors.NumbaError):
        return False
    return True


# ---- what there is ---------------------------------------------------------------------------------------------------


def some_bytes(count=48) -> bytearray:
    return bytearray(range(1, count + 1))


def as_mmap():
    made = mmap.mmap(-1, 48)
    made[:] = bytes(some_bytes())
    return made


BUFFERS = {
    "bytes": lambda: bytes(some_bytes()),
    "one byte": lambda: b"a",
    "bytearray": some_bytes,
    "subclass of bytearray": lambda: type("Mine", (bytearray,), {})(b"abc"),
    "memoryview": lambda: memoryview(some_bytes()),
    "readonly memoryview": lambda: memoryview(bytes(some_bytes())),
    "memoryview.toreadonly": lambda: memoryview(some_bytes()).toreadonly(),
    "mmap": as_mmap,
    "PickleBuffer": lambda: pickle.PickleBuffer(some_bytes()),
    "readonly PickleBuffer": lambda: pickle.PickleBuffer(b"abc"),
    "PickleBuffer of an array": lambda: pickle.PickleBuffer(np.arange(4.0)),
    "every second": lambda: memoryview(some_bytes())[::2],
    "backwards": lambda: memoryview(some_bytes())[::-1],
    "every third of int32, backwards": lambda: memoryview(some_bytes()).cast("i")[::-3],
    "part": lambda: memoryview(some_bytes())[5:9],
    "one": lambda: memoryview(some_bytes())[5:6],
    "subclass of array": lambda: type("Mine", (array.array,), {})("d", [1.0, 2.0]),
    **{f"array {code}": lambda code=code: array.array(code, range(1, 7)) for code in "bBhHiIlLqQfd"},
    **{f"memoryview {code}": lambda code=code: memoryview(some_bytes()).cast(code) for code in "bBhHiIlLqQnNfd?"},
    "complex64": lambda: memoryview(np.arange(3, dtype="c8") * 1j),
    "complex128": lambda: memoryview(np.arange(3, dtype="c16") * 1j),
    "empty bytes": lambda: b"",
    "empty bytearray": bytearray,
    "empty array": lambda: array.array("d"),
    "empty memoryview": lambda: memoryview(b""),
    "empty memoryview of doubles": lambda: memoryview(some_bytes()).cast("d")[6:],
    "empty PickleBuffer": lambda: pickle.PickleBuffer(b""),
    "2-d C": lambda: memoryview(some_bytes()).cast("h", (4, 6)),
    "2-d F": lambda: memoryview(np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "2-d rows": lambda: memoryview(np.arange(12.0).reshape(4, 3))[::2],
    "2-d rows backwards": lambda: memoryview(np.arange(12.0).reshape(4, 3))[::-1],
    "2-d columns": lambda: memoryview(np.arange(12.0).reshape(4, 3)[:, ::2]),
    "2-d broadcast": lambda: memoryview(np.broadcast_to(np.arange(3.0), (2, 3))),
    "2-d one row": lambda: memoryview(some_bytes()).cast("h", (1, 24)),
    "2-d readonly": lambda: memoryview(bytes(some_bytes())).cast("h", (4, 6)),
    "2-d PickleBuffer": lambda: pickle.PickleBuffer(memoryview(some_bytes()).cast("h", (4, 6))),
    "3-d C": lambda: memoryview(some_bytes()).cast("I", (2, 3, 2)),
    "3-d permuted": lambda: memoryview(np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)),
    "no dimensions": lambda: memoryview(some_bytes(8)).cast("d", ()),
    "misaligned": lambda: memoryview(bytearray(b"x") + np.arange(3.0).tobytes())[1:].cast("d"),
    "float16": lambda: memoryview(np.arange(3, dtype="f2")),
}
"""By name: what makes one."""
DESCRIBED = ("memoryview", "backwards")
WRITTEN = ("bytearray", "memoryview", "array d", "mmap", "backwards")
KERNELS = {
    0: fast_args(lambda x: x.ndim),
    2: fast_args(lambda x: (len(x), x[0, 0], x[-1, -1])),
    3: fast_args(lambda x: (len(x), x[0, 0, 0], x[-1, -1, -1])),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_what_memoryview_says_of_it(name):
    """To a kernel as to ``@njit``; to conversions: the same memory, of the same type, released again."""
    thing = BUFFERS[name]()
    want = np.asarray(memoryview(thing))
    with references_kept(*[thing] * (thing != b"")):  # there is one of those
        if not want.size:
            check_same_as_njit(length, (thing,))
        elif want.ndim != 1:
            check_same_as_njit(KERNELS[want.ndim], (thing,))
        elif want.dtype != np.float16:  # which Numba does not read
            if is_typed_by_numba(thing):
                check_same_as_njit(pick, (thing, -1))
            assert [pick(thing, i) for i in range(len(want))] == want.tolist()
            before = pick.counts()
            assert [pick(thing, 0) for _ in range(20)] == want[:1].tolist() * 20
            assert pick.counts()[:2] == (before.fast + 20, before.slow)
            assert explain(thing).path == "buffer"
        if isinstance(thing, memoryview) and (want.ndim > 1 or name in DESCRIBED):
            check_same_as_njit(described, (thing,))
        if name in WRITTEN:
            for _ in range(2):
                expected = (want + 1).tolist()
                add_one(thing)
                assert want.tolist() == expected
        for take in (from_dlpack, CALLS["convert"]):
            view = take(thing)
            assert (view.dtype, view.shape, view.tolist()) == (want.dtype, want.shape, want.tolist())
            assert (not want.size or view.ctypes.data == want.ctypes.data) and view.flags.writeable is want.flags.writeable
            assert view.flags.aligned is (view.ctypes.data % view.dtype.alignment == 0) or not want.size
            steps = zip(view.strides, want.strides, want.shape, strict=True)
            assert not want.size or all(step == wanted for step, wanted, extent in steps if extent > 1)
            if not want.flags.writeable:
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view.flags.writeable = True
        assert type(versioned(thing)).__name__ == "PyCapsule"
        assert from_dlpack(thing, dtype=want.dtype).dtype == want.dtype
        assert not np.shares_memory(from_dlpack(thing, copy=True), want)
        if torch is not None and want.dtype.newbyteorder("=").char not in "IHLQ":
            tensor = convert(thing, torch.Tensor)
            assert np.array_equal(tensor.numpy(), want)
            can_share = want.flags.writeable and all(s >= 0 for s, n in zip(want.strides, want.shape, strict=True) if n > 1)
            assert not want.size or (tensor.data_ptr() == want.ctypes.data) is can_share
            del tensor
        del view
    if not want.flags.writeable and want.ndim == 1 and want.size > 1 and is_typed_by_numba(thing):
        got, wanted = type_and_message(add_one, thing), type_and_message(numbas(add_one), thing)
        assert got[0] is wanted[0] and issubclass(wanted[0], numba.core.errors.TypingError)


def test_a_readonly_mmap(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(some_bytes()))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as thing:
        check_same_as_njit(pick, (thing, 3))
        assert type_and_message(add_one, thing)[0] is type_and_message(numbas(add_one), thing)[0]
        view = from_dlpack(thing)
        assert bytes(view) == bytes(some_bytes()) and not view.flags.writeable
        with pytest.raises(BufferError):
            thing.close()
        del view


# ---- ctypes ----------------------------------------------------------------------------------------------------------

PLAIN = [
    ctypes.c_bool, ctypes.c_byte, ctypes.c_ubyte, ctypes.c_short, ctypes.c_ushort, ctypes.c_int, ctypes.c_uint, ctypes.c_long,
    ctypes.c_ulong, ctypes.c_longlong, ctypes.c_ulonglong, ctypes.c_float, ctypes.c_double, ctypes.c_size_t, ctypes.c_ssize_t,
]  # fmt: skip


@pytest.mark.parametrize("element", PLAIN, ids=lambda cls: cls.__name__)
def test_arrays_of_ctypes(element):
    """Numba does not know their formats, so a kernel sees them as the arrays that they are."""
    vector, plane = (element * 3)(1, 0, 1), ((element * 3) * 2)((1, 0, 1), (0, 1, 1))
    for thing in (vector, plane, (((element * 2) * 1) * 3)(), (element * 0)()):
        want = np.ctypeslib.as_array(thing)
        with references_kept(thing):
            if thing is vector:
                assert size(thing) == size(thing) == 3 and (numba.typeof(want),) in size.signatures
            view = from_dlpack(thing)
            assert (view.dtype, view.shape) == (want.dtype, want.shape) and np.array_equal(view, want)
            assert view.flags.writeable and (not want.size or view.ctypes.data == ctypes.addressof(thing))
            del view


def test_kernels_write_to_what_is_of_ctypes_and_call_its_functions():
    vector, scalar = (ctypes.c_double * 3)(1, 2, 3), ctypes.c_double(2.5)
    add_one(vector)
    view = from_dlpack(scalar)  # without dimensions
    view[()] = 3.5
    assert list(vector) == [2, 3, 4] and type(fast_args(lambda x: x[1:])(vector)) is np.ndarray
    assert view.shape == () and scalar.value == fast_args(lambda x: x[()])(scalar) == 3.5
    # functions have a buffer, too: the pointer; Numba calls them
    sine = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(("sin", ctypes.CDLL("libm.so.6")))
    apply = fast_args(lambda function, x: function(x))
    assert apply(sine, 1.0) == numbas(apply)(sine, 1.0) == np.sin(1.0)


FORMATS = {
    "@i": "i4", "=i": "i4", "<i": "i4", "@l": "i8", "=l": "i4", "<L": "u4", "=q": "i8", "@N": "u8", "n": "i8", "<h": "i2",
    "<d": "f8", "=f": "f4", "<e": "f2", ">b": "i1", "!B": "u1", "@?": "?", "<?": "?",
}  # fmt: skip


@needs_testbuffer
def test_native_formats_however_they_are_written_and_many_dimensions():
    for text, dtype in FORMATS.items():
        thing = memoryview(_testbuffer.ndarray([1] * 3, shape=[3], format=text))
        view = from_dlpack(thing)
        assert view.dtype == np.dtype(dtype) and view.tolist() == [1, 1, 1] and not view.flags.writeable, text
        assert dtype == "f2" or [pick(thing, i) for i in range(3)] == [1, 1, 1], text
    for ndim in (8, 9, 64):
        shape = (1,) * (ndim - 2) + (2, 3)
        buffer = _testbuffer.ndarray(list(range(6)), shape=list(shape), format="i")
        view = from_dlpack(memoryview(buffer))
        assert view.shape == shape and view.ravel().tolist() == list(range(6))
        assert view.strides == np.asarray(buffer).strides


# ---- released exactly once -----------------------------------------------------------------------------------------


def _fails(x, y):
    if x[0] >= 0:
        raise ValueError("as asked")
    return x[0]


fails, fails_unlocked = fast_args(_fails), fast_args(_fails, nogil=True)
does_not_compile = fast_args(lambda x, y: x[0] + y.no_such_attribute)
works = fast_args(lambda x, y: x[0])
works_unlocked = fast_args(lambda x, y: x[0], nogil=True)
returns_itself = fast_args(lambda x, y: x)
returns_a_part = fast_args(lambda x, y: x[1:])
returns_it_in_a_tuple = fast_args(lambda x, y: (1, x))
SWAPPED_ARRAY = np.zeros(3, SWAPPED + "f8")
ENDS = [
    (works, None), (works_unlocked, None), (fails, ValueError), (fails_unlocked, ValueError),
    (does_not_compile, numba.core.errors.TypingError),
]  # fmt: skip
HOLDERS = {
    "bytearray": lambda thing: thing,
    "memoryview": memoryview,
    "memoryview of a memoryview": lambda thing: memoryview(memoryview(thing).cast("b"))[::2],
    "PickleBuffer": pickle.PickleBuffer,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_buffer_is_released_however_a_call_ends(holder):
    """The other holders, and where it stands among other arguments: test_ownership.py."""
    thing = some_bytes()
    for kernel, error in ENDS * 2:
        argument = HOLDERS[holder](thing)
        for other, wanted in ((1.0, error), (SWAPPED_ARRAY, BufferError), (memoryview(np.zeros(2, "S3")), BufferError)):
            for _ in range(2):
                end = end_of(kernel, argument, other)
                assert end == 1 if wanted is None else isinstance(end, wanted), end
                del end
        assert isinstance(end_of(kernel, argument, 1, 2), TypeError)
        if isinstance(argument, (memoryview, pickle.PickleBuffer)):
            argument.release()
        del argument
        assert not is_held(thing)


def test_a_buffer_that_is_refused_is_released():
    thing = some_bytes()
    odd = memoryview(thing).cast("c")  # a format of which DLPack has no elements
    for take in (from_dlpack, to_dlpack, lambda x: works(x, 1), lambda x: works_unlocked(x, 1)):
        assert type_and_message(take, odd)[0] is BufferError
    odd.release()
    assert not is_held(thing)


@pytest.mark.filterwarnings("ignore:Code running in object mode")
def test_a_buffer_is_held_while_the_kernel_runs():
    thing, seen = some_bytes(), []

    def look():
        seen.append(is_held(thing))

    for options in ({}, {"nogil": True}):

        @fast_args(**options)
        def kernel(x):
            with numba.objmode():
                look()
            return x[0]

        assert kernel(thing) == kernel(thing) == 1
    assert seen == [True] * 4 and not is_held(thing)


def ended(kernel, *arguments) -> tuple:
    """The type of what it returns, and that, or the exception's type and text, but for a line of ours before Numba's words."""
    end = end_of(kernel, *arguments)
    if not isinstance(end, Exception):
        return type(end), end
    assert isinstance(end, (TypeError, SystemError, numba.core.errors.TypingError)), repr(end)
    ours, _, numbas = str(end).partition(" It says:\n")
    return type(end), "" if isinstance(end, SystemError) else numbas or ours  # which names the function that was called


@pytest.mark.parametrize("kernel", [returns_itself, returns_a_part, returns_it_in_a_tuple], ids=["all", "a part", "a tuple"])
@pytest.mark.parametrize("name", ["bytes", "bytearray", "memoryview", "array d", "mmap", "PickleBuffer"])
def test_a_kernel_that_returns_its_buffer_does_as_njit_does(kernel, name):
    """Numba has no way to return most of them, and its attempt costs a reference to the object, but not the buffer."""
    thing = BUFFERS[name]()
    for _ in range(3):
        assert ended(kernel, thing, 1) == ended(numbas(kernel), thing, 1)
        gc.collect()
        if name == "bytearray":
            assert not is_held(thing)
        if name == "array d":
            thing.append(1.0)
    if name in ("memoryview", "PickleBuffer"):
        thing.release()
    if name == "mmap":
        thing.close()


def test_an_array_of_a_buffer_that_a_kernel_returns_holds_it():
    """Of ctypes Numba makes arrays: those can be returned, and live on."""
    thing = (ctypes.c_double * 3)(1, 2, 3)
    before = sys.getrefcount(thing)
    part = returns_a_part(thing, 1)
    assert sys.getrefcount(thing) > before
    thing[1] = 7
    assert part.tolist() == [7, 3]
    del part
    gc.collect()
    assert sys.getrefcount(thing) == before


HOLDING = {name: take for name, take in {**CALLS, **CONVERSIONS, "legacy to_dlpack": to_dlpack}.items() if "copy" not in name}


@pytest.mark.parametrize("name", HOLDING)
def test_a_result_holds_the_buffer_until_it_dies(name):
    count = 1 if name == "to paddle.Tensor" else 2  # of two of the same memory it never releases one, see test_tables.py
    take, thing = HOLDING[name], some_bytes()
    results = [take(thing) for _ in range(count)]
    if not is_held(thing):
        pytest.skip("this framework has copied it")
    while results:
        assert is_held(thing)
        results.pop()
        gc.collect()
    assert not is_held(thing)
    view = memoryview(thing)
    made = take(view)
    with pytest.raises(BufferError):
        view.release()
    del made
    gc.collect()
    view.release()
    assert not is_held(thing)


def test_views_of_a_result_hold_the_buffer_and_its_owner_is_locked():
    thing = some_bytes()
    part = from_dlpack(thing)[3:5][::-1]
    thing[4] = 99
    assert part.tolist() == [99, 4] and is_held(thing)
    del part
    assert not is_held(thing)
    from_dlpack(thing, copy=True)
    assert not is_held(thing)
    vector, mapped = array.array("d", [1.0, 2.0]), mmap.mmap(-1, 16)
    for thing, change in ((vector, lambda: vector.append(3.0)), (mapped, mapped.close)):
        first(thing)
        view = from_dlpack(thing)
        with pytest.raises(BufferError):
            change()
        del view
        change()


def test_many_threads_share_a_buffer():
    thing = some_bytes()

    def work(number):
        for _ in range(300):
            assert works(thing, 1) == works_unlocked(memoryview(thing), 1) == from_dlpack(thing)[0] == 1
            assert type_and_message(fails, thing, 1)[0] is ValueError

    together(8, work)
    gc.collect()
    assert not is_held(thing)


def test_memory_stays_flat():
    fork_python("""
        import resource
        from fastexchange import fast_args, from_dlpack

        kernel = fast_args(lambda x: x[0])
        thing = bytearray(1 << 16)

        def peak(rounds):
            for _ in range(rounds):
                kernel(thing)
                kernel(memoryview(thing)[::2])
                from_dlpack(thing)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        before = peak(1000)
        assert peak(15_000) - before < 4096, "KiB"
    """)


# ---- classes with __buffer__ ---------------------------------------------------------------------------------------


class Counts:
    """A buffer made in Python."""

    def __init__(self, data):
        self.data, self.taken, self.released = data, 0, 0

    def __buffer__(self, flags):
        self.taken += 1
        return memoryview(self.data)

    def __release_buffer__(self, view):
        self.released += 1
        view.release()


@needs_buffer_classes
def test_a_class_with_buffer_methods():
    thing = Counts(some_bytes())
    check_same_as_njit(first, (thing,))
    assert thing.taken == thing.released > 0
    taken = thing.taken
    assert first(thing) == 1 and (thing.taken, thing.released) == (taken + 1, taken + 1)
    view = from_dlpack(thing)
    assert (thing.taken, thing.released) == (taken + 2, taken + 1) and is_held(thing.data)
    view[0] = 5
    assert thing.data[0] == 5
    del view
    assert thing.released == taken + 2 and not is_held(thing.data)
    for _ in range(3):
        assert type_and_message(fails, thing, 1)[0] is ValueError
        assert thing.taken == thing.released and not is_held(thing.data)


@needs_buffer_classes
def test_a_buffer_method_may_call_the_kernel_and_the_collector():
    class Busy(Counts):
        def __buffer__(self, flags):
            assert first(bytearray(b"a")) == 97
            gc.collect()
            return super().__buffer__(flags)

    thing = Busy(some_bytes())
    for _ in range(5):
        assert first(thing) == 1
    assert thing.taken == thing.released


@needs_buffer_classes
def test_dlpack_comes_before_the_buffer():
    class HasBoth(Counts):
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            return np.full(3, 2.0).__dlpack__(**options)

    thing = HasBoth(some_bytes())
    assert first(thing) == first(thing) == from_dlpack(thing)[0] == 2.0
    assert not thing.taken
