"""Exchange tables as Python sees them: which one a type has, lending ours to NumPy, and wrappers that forward to a table.

That ``polyfill`` works is proved with a consumer that nobody wrote for it: apache-tvm-ffi, in processes of their own,
because it remembers what it found for a type.
"""

import ctypes
import functools
import gc
import sys
import threading

import numpy as np
import pytest
from frameworks import torch, tvm_ffi
from interpreter import run_python
from made_producers import (
    TABLE_CAPSULE,
    Dunder,
    Ignorant,
    Ledger,
    Legacy,
    Tabled,
    address_of,
    capsule,
    capsule_name,
    exchange_table,
    ffi,
    tabled_type,
    tabled_type_with_methods,
)
from oracle import numbas, references_kept, type_and_message

from fastexchange import convert, exchange_api, explain, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

ATTRIBUTE, OLDER = "__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"
READONLY, COPIED, PADDED = 1, 2, 4

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
needs_tvm_ffi = pytest.mark.skipif(tvm_ffi is None, reason="apache-tvm-ffi is not installed")
needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
needs_the_attribute_free = pytest.mark.skipif(hasattr(np.ndarray, ATTRIBUTE), reason="this NumPy has a table of its own")

OTHER_CAPSULE = capsule(exchange_table(), b"other")

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def table_in(made):
    return ffi.cast("DLPackExchangeAPI *", _pointer(made, TABLE_CAPSULE))


def call(function, *arguments: int) -> int:
    """Call a function of a table as C does; what it sets is raised."""
    return ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(arguments))(address_of(function))(*arguments)


def look(x):
    return x.ctypes.data, x.sum()


seen, seen_unlocked = fast_args(look), fast_args(look, nogil=True)


@fast_args
def seen_in_tuple(pair):
    return pair[1].ctypes.data, pair[1].sum()


class Sub(np.ndarray):
    pass


# ---- exchange_api --------------------------------------------------------------------------------------------------


def test_a_type_with_a_table_has_its_own():
    assert exchange_api(Tabled) is Tabled.__dict__[ATTRIBUTE]
    assert exchange_api(type("Derived", (Tabled,), {})) is Tabled.__dict__[ATTRIBUTE]


@needs_torch
def test_pytorchs_table_is_pytorchs():
    for cls in (torch.Tensor, torch.nn.Parameter, type("Mine", (torch.Tensor,), {})):
        assert exchange_api(cls) is torch.Tensor.__dlpack_c_exchange_api__


@needs_torch
def test_a_subclass_that_changes_what_dlpack_returns_does_not_have_pytorchs_table():
    class Tenfold(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    assert table_in(exchange_api(Tenfold)).dltensor_from_py_object_no_sync == ffi.NULL


def test_a_type_with_only_dlpack_has_a_table_that_calls_it():
    table = table_in(exchange_api(Dunder))
    assert exchange_api(Dunder) is exchange_api(Dunder) and capsule_name(exchange_api(Dunder)) == TABLE_CAPSULE
    assert (table.header.version.major, table.header.version.minor, table.header.prev_api) == (1, 3, ffi.NULL)
    assert table.dltensor_from_py_object_no_sync == ffi.NULL
    assert ffi.NULL not in (table.managed_tensor_allocator, table.current_work_stream)
    for cls in (Dunder, Legacy, Ignorant):
        ledger = Ledger()
        tensor = cls(np.arange(3.0), ledger)
        out = ffi.new("DLManagedTensorVersioned **")
        assert call(table.managed_tensor_from_py_object_no_sync, id(tensor), address_of(out)) == 0
        managed = out[0]
        assert managed.version.major == 1 and address_of(managed.dl_tensor.data) == tensor.array.ctypes.data
        assert (ledger.made, ledger.deleted) == (1, 0)
        flags = managed.flags
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(managed.deleter))(address_of(managed))
        ledger.check(1)
        assert flags & ~(READONLY | COPIED | PADDED) == 0, f"{cls.__name__}: flags that DLPack does not have: {flags:#x}"


def test_the_table_of_types_with_only_dlpack_reports_what_fails():
    table = table_in(exchange_api(Dunder))

    class Fails(Dunder):
        def __dlpack__(self, *, max_version=None):
            raise PermissionError("not this one")

    tensor, out = Fails(np.ones(3)), ffi.new("DLManagedTensorVersioned **")
    with pytest.raises(PermissionError, match="not this one"):
        call(table.managed_tensor_from_py_object_no_sync, id(tensor), address_of(out))
    assert out[0] == ffi.NULL
    ledger = Ledger()
    tensor = Dunder(np.ones(3), ledger)
    assert call(table.managed_tensor_from_py_object_no_sync, id(tensor), address_of(out)) == 0
    made = ffi.new("intptr_t *")
    with pytest.raises(BufferError):  # of which type should it be?
        call(table.managed_tensor_to_py_object_no_sync, address_of(out[0]), address_of(made))
    assert made[0] == 0 and ledger.deleted == 0
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(out[0].deleter))(address_of(out[0]))
    ledger.check(1)


@pytest.mark.parametrize("thing", [3, None, "ndarray", np.arange(3), Tabled(np.ones(2)), list[int], np.dtype("f8")], ids=str)
def test_what_is_no_type_has_no_table(thing):
    with pytest.raises(TypeError):
        exchange_api(thing)


class Bare:
    pass


NO_TABLE = {
    "nothing": Bare,
    "a list": list,
    "a scalar": np.float64,
    "a buffer": bytearray,
    "a table that lacks functions": tabled_type(managed_tensor_to_py_object_no_sync=None),
    "a table of the future": tabled_type(version=(2, 0)),
    "another capsule": type("Other", (), {ATTRIBUTE: OTHER_CAPSULE}),
    "an integer": type("Integer", (), {ATTRIBUTE: address_of(exchange_table())}),
    "dlpack that cannot be called": type("NoMethod", (), {"__dlpack__": None}),
}


@pytest.mark.parametrize("name", NO_TABLE)
def test_types_without_a_usable_table(name):
    with pytest.raises(TypeError, match=NO_TABLE[name].__name__):
        exchange_api(NO_TABLE[name])


# ---- the attribute's older name ------------------------------------------------------------------------------------


def older_type(value, bases=Tabled.__bases__) -> type:
    return type("Older", bases, {OLDER: value})


@pytest.mark.parametrize("form", ["capsule", "integer"])
def test_the_older_attribute_holds_a_capsule_or_an_address(form):
    table = exchange_table()
    cls = older_type(capsule(table, TABLE_CAPSULE) if form == "capsule" else address_of(table))
    ledger = Ledger()
    tensor = cls(np.arange(3.0), ledger)
    for calls in range(1, 41):
        assert seen(tensor) == (tensor.array.ctypes.data, 3.0)
        assert tensor.borrows >= calls
    assert explain(tensor).path == "c-exchange"
    ledger.check(1)  # explain looks at the elements
    assert from_dlpack(tensor).ctypes.data == convert(tensor, np.ndarray).ctypes.data == tensor.array.ctypes.data
    ledger.check(3)
    made = exchange_api(cls)
    assert capsule_name(made) == TABLE_CAPSULE
    assert table_in(made) == table
    if form == "capsule":
        assert made is vars(cls)[OLDER]


def test_the_newer_attribute_comes_first():
    cls = older_type(capsule(exchange_table(managed_tensor_allocator=None), TABLE_CAPSULE), (Tabled,))
    assert exchange_api(cls) is exchange_api(Tabled)
    assert seen(cls(np.arange(3.0)))[1] == 3.0


@pytest.mark.parametrize("value", [0, -8, True, 3.5, "table", capsule(exchange_table(), b"dltensor")], ids=repr)
def test_an_older_attribute_that_means_nothing(value):
    cls = older_type(value)
    with pytest.raises(TypeError):
        exchange_api(cls)
    assert type_and_message(seen, cls(np.ones(3)))[0] is TypeError
    with_methods = older_type(value, tabled_type_with_methods().__bases__)
    tensor = with_methods(np.arange(3.0))
    assert seen(tensor)[1] == seen(tensor)[1] == 3.0
    assert tensor.dunder_calls >= 2 and tensor.borrows == 0


# ---- polyfill ------------------------------------------------------------------------------------------------------


@pytest.fixture
def polyfilled():
    if hasattr(np.ndarray, ATTRIBUTE):
        pytest.skip("this NumPy has a table of its own")
    polyfill(np.ndarray)
    yield
    unpolyfill(np.ndarray)
    assert not hasattr(np.ndarray, ATTRIBUTE)


@needs_the_attribute_free
def test_polyfill_can_be_repeated_and_taken_back():
    array = np.arange(3.0)
    assert not hasattr(np.ndarray, ATTRIBUTE) and not hasattr(array, ATTRIBUTE)
    for _ in range(3):
        for _ in range(2):
            assert polyfill(np.ndarray) is None
            for thing in (np.ndarray, array, Sub, array.view(Sub), np.memmap):
                assert getattr(thing, ATTRIBUTE) is exchange_api(np.ndarray)
        assert unpolyfill(np.ndarray) is None
        for thing in (np.ndarray, array, Sub):
            assert not hasattr(thing, ATTRIBUTE)
        with pytest.raises(ValueError, match="not polyfilled"):
            unpolyfill(np.ndarray)


@pytest.mark.parametrize("cls", [Sub, Tabled, Dunder, list, object, np.float64, 3, None, np.arange(3)], ids=str)
def test_polyfill_is_for_numpys_arrays_only(cls):
    before = repr(getattr(cls, ATTRIBUTE, None))
    with pytest.raises((TypeError, ValueError)):
        polyfill(cls)
    with pytest.raises(ValueError, match="not polyfilled"):
        unpolyfill(cls)
    assert repr(getattr(cls, ATTRIBUTE, None)) == before


@needs_torch
def test_polyfill_leaves_pytorchs_table_alone():
    own = torch.Tensor.__dlpack_c_exchange_api__
    with pytest.raises((TypeError, ValueError)):
        polyfill(torch.Tensor)
    assert torch.Tensor.__dlpack_c_exchange_api__ is own


def test_a_table_that_is_not_ours_is_neither_replaced_nor_removed():
    """As if NumPy had one of its own, before or since."""
    run_python(
        f"""
        import ctypes, gc
        import numpy as np
        from fastexchange import exchange_api, fast_args, from_dlpack, polyfill, unpolyfill
        from made_producers import TABLE_CAPSULE, capsule, exchange_table

        if hasattr(np.ndarray, {ATTRIBUTE!r}):
            raise SystemExit
        [namespace] = [thing for thing in gc.get_referents(np.ndarray.__dict__) if type(thing) is dict]
        own = capsule(exchange_table(), TABLE_CAPSULE)

        def put(thing):
            namespace[{ATTRIBUTE!r}] = thing
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.ndarray))

        put(own)
        for function in (polyfill, unpolyfill):
            try:
                function(np.ndarray)
                raise SystemExit("not refused")
            except ValueError:
                pass
            assert np.ndarray.{ATTRIBUTE} is own
        assert exchange_api(np.ndarray) is own

        del namespace[{ATTRIBUTE!r}]
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.ndarray))
        polyfill(np.ndarray)
        put(own)
        unpolyfill(np.ndarray)
        assert np.ndarray.{ATTRIBUTE} is own
        """
    )


def test_kernels_and_conversions_are_the_same_while_polyfilled(polyfilled):
    kernel = fast_args(look)
    readonly = np.arange(3)
    readonly.flags.writeable = False
    arrays = [np.arange(3.0), np.arange(6.0).reshape(2, 3).T, np.arange(4.0)[::-2], readonly, np.arange(3.0).view(Sub)]
    for array in arrays:
        with references_kept(array):
            assert kernel(array) == kernel(array) == (array.ctypes.data, array.sum())
            assert explain(array).path == "ndarray"
            view = from_dlpack(array)
            assert np.array_equal(view, array) and view.flags.writeable == array.flags.writeable
            del view
    assert kernel.signatures == fast_args_signatures(arrays)


def fast_args_signatures(arrays) -> list:
    """The signatures that plain ``@njit`` infers."""
    kernel = fast_args(look)
    for array in arrays:
        numbas(kernel)(array)
    return kernel.signatures


def test_an_object_array_stays_refused_while_polyfilled(polyfilled):
    for refused in (np.array([None]), np.zeros(3, ">f8" if sys.byteorder == "little" else "<f8")):
        assert type_and_message(from_dlpack, refused)[0] is BufferError


def test_polyfill_from_many_threads():
    run_python(
        f"""
        import threading
        import numpy as np
        from fastexchange import exchange_api, fast_args, from_dlpack, polyfill, unpolyfill

        if hasattr(np.ndarray, {ATTRIBUTE!r}):
            raise SystemExit
        failed, start = [], threading.Barrier(8)
        kernel = fast_args(lambda x: x.sum())

        def work(number, rounds, undo):
            try:
                start.wait()
                for _ in range(rounds):
                    polyfill(np.ndarray)
                    found = getattr(np.ndarray, {ATTRIBUTE!r}, None)
                    assert found is exchange_api(np.ndarray) or (undo and found is None), found
                    assert kernel(np.ones(3)) == from_dlpack(np.ones(3)).sum() == 3.0
                    if undo:
                        try:
                            unpolyfill(np.ndarray)
                        except ValueError:  # another thread was faster
                            pass
            except BaseException as error:
                failed.append(error)

        for undo in (False, True):
            threads = [threading.Thread(target=work, args=(number, 60, undo)) for number in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not failed, failed
            assert hasattr(np.ndarray, {ATTRIBUTE!r}) is (not undo)
        """
    )


# ---- polyfill: what a consumer makes of it -------------------------------------------------------------------------

TVM = f"""
    import ctypes, gc, sys
    import numpy as np
    sys.modules["torch"] = None  # which tvm-ffi would import, for seconds
    import tvm_ffi
    from fastexchange import exchange_api, fast_args, polyfill, unpolyfill
    from made_producers import TABLE_CAPSULE, address_of, ffi, fill

    if hasattr(np.ndarray, {ATTRIBUTE!r}):
        raise SystemExit
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ffi.cast("DLPackExchangeAPI *", get(exchange_api(np.ndarray), TABLE_CAPSULE))
    counts, kept = {{}}, []

    def count(name, kind):
        "Put a function that counts its calls before the one in our table."
        words = [ctypes.c_int if type.kind == "enum" or type.cname == "int32_t" else ctypes.c_void_p for type in kind.args]
        real = ctypes.PYFUNCTYPE(ctypes.c_int, *words)(address_of(getattr(table, name)))

        @ffi.callback(kind, error=-1)
        def counting(*given):
            counts[name] = counts.get(name, 0) + 1
            return real(*(address_of(word) if isinstance(word, ffi.CData) else word for word in given))

        kept.append(counting)
        setattr(table, name, counting)

    def count_all():
        for name, field in ffi.typeof("DLPackExchangeAPI").fields:
            if name != "header":
                count(name, field.type)

    EXPORT, IMPORT, ALLOCATE = ("managed_tensor_from_py_object_no_sync", "managed_tensor_to_py_object_no_sync",
                                "managed_tensor_allocator")
    echo, nop, apply = (tvm_ffi.get_global_func("testing." + name) for name in ("echo", "nop", "apply"))
"""


def run_with_tvm_ffi(code: str) -> str:
    return run_python(TVM + code).stdout


@needs_tvm_ffi
def test_tvm_ffi_calls_our_functions():
    run_with_tvm_ffi(
        """
    count_all()

    class Before(np.ndarray):
        "A type that tvm-ffi meets before there is a table."

    array = np.arange(6.0).reshape(2, 3)
    assert type(echo(array.view(Before))) is tvm_ffi.Tensor and not counts

    polyfill(np.ndarray)
    before = sys.getrefcount(array)
    for calls in range(1, 6):
        nop(array, array, array)
        assert counts == {EXPORT: 3 * calls}, counts
    assert sys.getrefcount(array) == before

    counts.clear()
    back = echo(array)
    assert counts == {EXPORT: 1, IMPORT: 1}, counts
    assert type(back) is np.ndarray and back.ctypes.data == array.ctypes.data and np.array_equal(back, array)
    back[1, 2] = -1
    assert array[1, 2] == -1 and sys.getrefcount(array) == before + 1
    del back
    gc.collect()
    assert sys.getrefcount(array) == before

    counts.clear()
    doubled = tvm_ffi.convert_func(lambda x: x * 2, tensor_cls=np.ndarray)(array)
    assert type(doubled) is np.ndarray and np.array_equal(doubled, array * 2), doubled
    assert counts[EXPORT] >= 1 and counts[IMPORT] >= 1, counts

    counts.clear()
    assert np.array_equal(np.from_dlpack(tvm_ffi.from_dlpack(array)), array) and counts == {EXPORT: 1}, counts

    unpolyfill(np.ndarray)
    assert np.array_equal(np.from_dlpack(echo(array)), array)  # tvm-ffi keeps what it found: the table is still there
    """
    )


@needs_tvm_ffi
def test_tvm_ffi_gets_every_layout_and_dtype_and_gives_it_back():
    run_with_tvm_ffi(
        """
    polyfill(np.ndarray)
    layouts = {
        "C": lambda a: a.reshape(3, 4), "F": lambda a: a.reshape(3, 4).T, "strided": lambda a: a.reshape(3, 4)[:, ::2],
        "negative strides": lambda a: a.reshape(3, 4)[::-1, ::-1], "0-d": lambda a: a[5:6].reshape(()),
        "empty": lambda a: a[:0].reshape(0, 3),
        "broadcast": lambda a: np.ndarray((3, 4), a.dtype, a, strides=(0, a.itemsize)),
        "5-d": lambda a: a.reshape(1, 2, 3, 1, 2),
    }
    for layout, make in layouts.items():
        for dtype in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"):
            for cls in (np.ndarray, np.memmap):
                array = np.asarray(make(np.arange(12).astype(dtype))).view(cls)
                before = sys.getrefcount(array)
                back = echo(array)
                assert type(back) is np.ndarray and (back.dtype, back.shape) == (array.dtype, array.shape), (layout, dtype)
                assert np.array_equal(back, array) and back.ctypes.data == array.ctypes.data, (layout, dtype)
                del back
                assert sys.getrefcount(array) == before
    for refused in (np.array([None]), np.array(["a"]), np.zeros(3, ">i4"), np.zeros(3, "M8[s]")):
        for _ in range(3):
            before = sys.getrefcount(refused)
            try:
                echo(refused)
                raise SystemExit("not refused")
            except BufferError as error:
                assert "cannot be exported" in str(error)
                del error
            assert sys.getrefcount(refused) == before
    assert np.array_equal(echo(np.arange(3)), [0, 1, 2])
    """
    )


@needs_tvm_ffi
def test_tvm_ffi_gets_readonly_arrays_with_their_flag():
    """Without our table it refuses them. What it does with the flag is its own affair: 0.1 hands the memory on."""
    run_with_tvm_ffi(
        """
    flags = []
    export_of_ours = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
        address_of(table.managed_tensor_from_py_object_no_sync)
    )

    @ffi.callback("int(void *, DLManagedTensorVersioned **)", error=-1)
    def noting(array, out):
        code = export_of_ours(address_of(array), address_of(out))
        flags.append(out[0].flags)
        return code

    table.managed_tensor_from_py_object_no_sync = noting
    readonly = np.frombuffer(b"abcdef", np.uint8)
    try:
        tvm_ffi.from_dlpack(readonly)
        raise SystemExit("tvm-ffi takes readonly arrays: this test is out of date")
    except BufferError:
        pass
    polyfill(np.ndarray)
    before = sys.getrefcount(readonly)
    assert echo(readonly).tobytes() == b"abcdef" and flags == [1]
    assert np.from_dlpack(tvm_ffi.from_dlpack(readonly)).tobytes() == b"abcdef" and flags == [1, 1]
    assert echo(np.zeros(3)).sum() == 0 and flags == [1, 1, 0]
    assert sys.getrefcount(readonly) == before and not readonly.flags.writeable
    """
    )


@needs_tvm_ffi
def test_tvm_ffi_allocates_with_our_function():
    """A function that is called with our arrays makes its results where the arrays come from."""
    run_with_tvm_ffi(
        """
    count_all()
    polyfill(np.ndarray)
    allocate = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIEnvTensorAlloc
    codes = []

    def inside(tensor):
        for shape, device in (((2, 3), 1), ((2, 3), 2), ((2**62,), 1), ((0,), 1)):
            prototype, handle = ffi.new("DLTensor *"), ctypes.c_void_p()
            kept.append(fill(prototype, np.empty(0, "f4"), shape=shape, ndim=len(shape), device_type=device))
            codes.append(allocate(ctypes.c_void_p(address_of(prototype)), ctypes.byref(handle)))
        return 7

    assert apply(tvm_ffi.convert(inside), np.zeros(3)) == 7
    assert counts[ALLOCATE] == 4 and codes == [0, -1, -1, 0], (counts, codes)
    """
    )


@needs_tvm_ffi
def test_tvm_ffi_calls_our_functions_from_many_threads():
    run_with_tvm_ffi(
        """
    import threading
    polyfill(np.ndarray)
    arrays, failed = [np.full(4, float(i)) for i in range(8)], []
    before = [sys.getrefcount(array) for array in arrays]

    def work(array):
        try:
            for _ in range(300):
                nop(array, array)
                assert np.array_equal(echo(array), array)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(array,)) for array in arrays]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    del threads
    assert not failed, failed
    gc.collect()
    arrays_now = [sys.getrefcount(array) for array in arrays]
    assert arrays_now == before, (arrays_now, before)
    """
    )


# ---- wrappers ------------------------------------------------------------------------------------------------------


class ByProperty:
    def __init__(self, inner):
        self.inner = inner

    @property
    def __dlpack_c_exchange_api__(self):
        return self.inner


class ByCachedProperty:
    def __init__(self, inner):
        self.inner = inner

    @functools.cached_property
    def __dlpack_c_exchange_api__(self):
        return self.inner


class BySlot:
    __slots__ = ("__dlpack_c_exchange_api__",)

    def __init__(self, inner):
        self.__dlpack_c_exchange_api__ = inner


class Derived(ByProperty):
    pass


WRAPPERS = [ByProperty, ByCachedProperty, BySlot, Derived]
wrapper_types = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda cls: cls.__name__)

INNER = {
    "numpy": lambda array, ledger: array,
    "numpy subclass": lambda array, ledger: array.view(Sub),
    "table": Tabled,
    "__dlpack__": Dunder,
    "legacy": Legacy,
    "memoryview": lambda array, ledger: memoryview(array),
}
if torch is not None:
    INNER["torch"] = lambda array, ledger: torch.from_numpy(array)
if tvm_ffi is not None:
    INNER["tvm_ffi"] = lambda array, ledger: tvm_ffi.from_dlpack(array)


@wrapper_types
@pytest.mark.parametrize("name", INNER)
def test_a_wrapper_stands_for_what_it_wraps(wrapper, name):
    array, ledger = np.arange(4.0), Ledger()
    wrapped = wrapper(INNER[name](array, ledger))
    getattr(wrapped, ATTRIBUTE)  # which functools keeps
    want = (array.ctypes.data, 6.0)
    with references_kept(array, wrapped):
        for _ in range(20):
            assert seen(wrapped) == seen(x=wrapped) == seen_unlocked(wrapped) == seen_in_tuple((1, wrapped)) == want
        before = seen.counts()
        assert seen(wrapped) == want
        assert seen.counts()[:2] == (before.fast + 1, before.slow)
        for take in (from_dlpack, lambda x: convert(x, np.ndarray), through_a_capsule):
            view = take(wrapped)
            assert (view.ctypes.data, view.sum()) == want
        del view
        if torch is not None and name != "legacy":
            tensor = convert(wrapped, torch.Tensor)
            assert type(tensor) is torch.Tensor and tensor.data_ptr() == array.ctypes.data
            del tensor
        gc.collect()
        assert ledger.out == 0
    if name in ("table", "__dlpack__", "legacy"):
        ledger.check(ledger.made)
        assert ledger.made >= 80
    del wrapped


def through_a_capsule(x) -> np.ndarray:
    return np.from_dlpack(Taken(to_dlpack(x, max_version=(1, 0))))


class Taken:
    """A capsule as an object for ``from_dlpack`` functions."""

    def __init__(self, made):
        self.made = made

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.made


def test_what_is_readonly_stays_so_behind_a_wrapper():
    array = np.arange(3.0)
    array.flags.writeable = False
    for inner in (array, memoryview(array), Dunder(array), Legacy(np.arange(3.0)), b"bytes"):
        wrapped, size = ByProperty(inner), fast_args(lambda x: x.size)
        assert size(wrapped) == len(inner.array if isinstance(inner, Dunder) else inner)
        assert not size.signatures[0][0].mutable
        assert not from_dlpack(wrapped).flags.writeable


@needs_ml_dtypes
def test_wrapped_dtypes_beyond_numpys_own():
    array = np.arange(3).astype(ml_dtypes.bfloat16)
    view = from_dlpack(ByProperty(array))
    assert view.dtype == array.dtype and view.tobytes() == array.tobytes()
    assert fast_args(lambda x: x[1], storage=True)(ByProperty(array)) == array.view("u2")[1]


@needs_ml_dtypes
def test_wrapped_dtypes_beyond_numpys_own_at_the_first_look():
    run_python(
        """
        import ml_dtypes
        import numpy as np
        from fastexchange import from_dlpack

        class Wrapper:
            array = np.arange(3).astype(ml_dtypes.bfloat16)
            __dlpack_c_exchange_api__ = property(lambda self: self.array)

        assert from_dlpack(Wrapper()).dtype == ml_dtypes.bfloat16
        """
    )


@needs_torch
def test_wrapped_tensors_whose_memory_is_not_their_value_are_refused():
    z = torch.ones(3, dtype=torch.complex64) * 1j
    odd = z.conj(), z.conj().imag, torch.ones(3, requires_grad=True), torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    for inner in odd:
        for wrapped in (ByProperty(inner), BySlot(ByProperty(inner))):
            for call_it in (seen, seen_unlocked, from_dlpack, lambda x: convert(x, np.ndarray)):
                assert type_and_message(call_it, wrapped)[0] in (BufferError, RuntimeError, NotImplementedError, ValueError)


@wrapper_types
def test_wrappers_around_wrappers(wrapper):
    array, ledger = np.arange(4.0), Ledger()
    thing = Tabled(array, ledger)
    for depth in range(1, 9):
        thing = wrapper(thing)
        assert seen(thing) == (array.ctypes.data, 6.0), depth
        assert from_dlpack(thing).sum() == 6.0
    ledger.check(16)
    for _ in range(92):  # so many that there is perhaps no end
        thing = wrapper(thing)
    for call_it in (seen, from_dlpack, lambda x: convert(x, np.ndarray)):
        assert issubclass(type_and_message(call_it, thing)[0], TypeError)
    ledger.check(16)


class WithMethods(ByProperty):
    """A wrapper that can be exported by ``__dlpack__`` as well."""

    def __init__(self, inner, ledger=None):
        super().__init__(inner)
        self.own = Dunder(np.full(3, 7.0), ledger)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None):
        return self.own.__dlpack__(max_version=max_version)


def test_a_wrapper_forwards_before_it_is_asked_itself():
    wrapped = WithMethods(np.arange(3.0))
    assert seen(wrapped)[1] == from_dlpack(wrapped).sum() == 3.0
    assert not wrapped.own.asked


NO_TENSOR = [None, 3, 2.5, "text", [1.0], Bare(), np.float64(1.0), Tabled, Tabled.__dict__[ATTRIBUTE], OTHER_CAPSULE]


@pytest.mark.parametrize("inner", NO_TENSOR, ids=lambda thing: type(thing).__name__)
def test_a_wrapper_around_no_tensor(inner):
    for wrapper in WRAPPERS:
        for call_it in (seen, seen_unlocked, from_dlpack, lambda x: convert(x, np.ndarray), to_dlpack):
            kind, message = type_and_message(call_it, wrapper(inner))
            assert issubclass(kind, TypeError) and wrapper.__name__ in message
    ledger = Ledger()
    wrapped = WithMethods(inner, ledger)
    assert seen(wrapped)[1] == from_dlpack(wrapped).sum() == 21.0
    ledger.check(2)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_wrappers_in_a_cycle(length):
    for cls in (ByProperty, WithMethods):
        ring = [cls(None) for _ in range(length)]
        for one, next_one in zip(ring, ring[1:] + ring[:1], strict=True):
            one.inner = next_one
        for call_it in (lambda x: seen(x)[1], lambda x: seen_unlocked(x)[1], lambda x: from_dlpack(x).sum()):
            for _ in range(2):
                if cls is ByProperty:
                    assert issubclass(type_and_message(call_it, ring[0])[0], TypeError)
                else:
                    assert call_it(ring[0]) == 21.0
        ring[-1].inner = None


class Raises(WithMethods):
    def __init__(self, error, ledger=None):
        super().__init__(None, ledger)
        self.error = error

    @property
    def __dlpack_c_exchange_api__(self):
        raise self.error


class RaisesOnly(ByProperty):
    __dlpack_c_exchange_api__ = Raises.__dlpack_c_exchange_api__

    def __init__(self, error):
        self.error = error


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError, BufferError, ZeroDivisionError])
def test_wrappers_that_raise(error):
    ledger = Ledger()
    with_methods, without = Raises(error("no"), ledger), RaisesOnly(error("no"))
    assert seen(with_methods)[1] == from_dlpack(with_methods).sum() == 21.0
    ledger.check(2)
    for wrapped in (without, BySlot(without), ByProperty(BySlot(without))):
        for call_it in (seen, from_dlpack, lambda x: convert(x, np.ndarray)):
            assert issubclass(type_and_message(call_it, wrapped)[0], (TypeError, error))
    assert seen(np.arange(3.0))[1] == seen(ByProperty(np.arange(3.0)))[1] == 3.0


def test_an_interrupt_in_a_wrapper_arrives():
    for cls in (Raises, RaisesOnly):
        for call_it in (seen, seen_unlocked, from_dlpack, lambda x: convert(x, np.ndarray)):
            assert type_and_message(call_it, cls(KeyboardInterrupt()))[0] is KeyboardInterrupt
    assert seen(ByProperty(np.arange(3.0)))[1] == 3.0


def test_an_empty_slot():
    empty = BySlot(None)
    del empty.__dlpack_c_exchange_api__
    assert {type_and_message(each, empty)[0] for each in (seen, from_dlpack)} == {TypeError}


class Fleeting:
    """Gives away the only reference to what it wraps."""

    def __init__(self, make):
        self.make = make

    @property
    def __dlpack_c_exchange_api__(self):
        return self.make()


def test_what_nobody_else_holds_lives_as_long_as_it_is_needed():
    ledger = Ledger()
    for make in (lambda: np.full(1000, 2.0), lambda: Tabled(np.full(1000, 2.0), ledger), lambda: ByProperty(np.full(1000, 2.0))):
        wrapped = Fleeting(make)
        views = [from_dlpack(wrapped) for _ in range(20)]
        assert [seen(wrapped)[1] for _ in range(20)] == [2000.0] * 20
        assert all((view == 2.0).all() for view in views)
        del views
    ledger.check(40)


def test_what_a_wrapper_wraps_may_change_from_call_to_call():
    array = np.arange(4.0)
    inners = [array, array.astype("f4"), array.astype("i8")[::2], Tabled(array), Dunder(array), memoryview(array), array[None]]
    wrapped, total = ByProperty(None), fast_args(lambda x: x.sum())
    for _ in range(3):
        for inner in inners:
            wrapped.inner = inner
            want = from_dlpack(inner).sum()
            assert total(wrapped) == total(wrapped) == want
        wrapped.inner = None
        assert issubclass(type_and_message(total, wrapped)[0], TypeError)


def test_a_wrapper_may_call_the_kernel_itself():
    class Busy(ByProperty):
        @property
        def __dlpack_c_exchange_api__(self):
            assert seen(np.arange(3.0))[1] == seen(ByProperty(np.arange(3)))[1] == 3
            gc.collect()
            return self.inner

    array = np.arange(4.0)
    for _ in range(20):
        assert seen(Busy(array)) == (array.ctypes.data, 6.0)


def test_wrappers_in_many_threads():
    failed, ledger = [], Ledger()

    def work(number):
        try:
            array = np.full(4, float(number))
            wrapped = [ByProperty(array), BySlot(Tabled(array, ledger)), ByCachedProperty(Dunder(array, ledger))]
            for _ in range(100):
                for thing in wrapped:
                    assert seen(thing) == (array.ctypes.data, 4.0 * number)
                    assert from_dlpack(thing).ctypes.data == array.ctypes.data
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed
    assert ledger.out == 0 and ledger.made == ledger.deleted


def test_a_class_may_turn_a_table_into_a_forward_and_back():
    forwards = type("Forwards", (Tabled,), {ATTRIBUTE: property(lambda self: self.inner)})
    tensor, array = forwards(np.zeros(3)), np.arange(3.0)
    tensor.inner = array
    assert seen(tensor) == (array.ctypes.data, 3.0) and tensor.borrows == 0
    back = type("Back", (forwards,), {ATTRIBUTE: Tabled.__dict__[ATTRIBUTE]})
    tensor = back(np.full(3, 2.0))
    assert seen(tensor)[1] == 6.0 and tensor.borrows > 0


def test_the_table_of_a_wrapper_type():
    """There is none that would do for all its instances but the one that calls ``__dlpack__``."""
    assert exchange_api(WithMethods) is exchange_api(Dunder)
    for cls in (ByProperty, BySlot, ByCachedProperty):
        with pytest.raises(TypeError, match=cls.__name__):
            exchange_api(cls)
