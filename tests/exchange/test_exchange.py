"""Exchange tables as Python sees them, lending ours to NumPy, wrappers that forward to a table, and the functions themselves."""

import copy
import functools
import gc
import inspect
import pickle
import sys
import types
import weakref

import numba
import numpy as np
import pytest

from exchanges import (  # isort: skip
    ATTRIBUTE, OLDER, SOURCES, SWAPPED, TABLE_PRELUDE, WRAPPERS, Wrapper, Sub, call, delete,
    exported, needs_the_attribute_free, table_in,
)
from forked import needs_fork, stage_for_module
from frameworks import needs_torch, torch, tvm_ffi
from hostile_producers import Gives, raising
from interoperability import place
from made_producers import TABLE_CAPSULE, Dunder, Ledger, Tabled, address_of, capsule, capsule_name, exchange_table, ffi
from odd_things import NO_INNER
from oracle import references_kept, type_and_message
from raising import check_raises

import fastexchange
from fastexchange import convert, exchange_api, explain, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill


def look(x):
    return x.ctypes.data, x.sum()


seen, seen_unlocked, doubled = fast_args(look), fast_args(look, nogil=True), fast_args(lambda x: x * 2)
seen_in_tuple = fast_args(lambda pair: (pair[1].ctypes.data, pair[1].sum()))


def test_a_type_has_its_own_table_or_ours():
    ours = exchange_api(np.ndarray)
    table = table_in(ours)
    names = {name for name, _ in ffi.typeof("DLPackExchangeAPI").fields} - {"header"}
    assert len(names) == 5 and all(getattr(table, name) != ffi.NULL for name in names)
    assert all(exchange_api(cls) is ours for cls in (Sub, np.recarray, np.memmap, np.ndarray))
    assert exchange_api(Tabled) is Tabled.__dict__[ATTRIBUTE] is exchange_api(type("Derived", (Tabled,), {}))
    for made in (ours, exchange_api(Dunder)):
        header = table_in(made).header
        assert capsule_name(made) == TABLE_CAPSULE
        assert (header.version.major, header.version.minor, header.prev_api) == (1, 3, ffi.NULL)
    if torch is not None and hasattr(torch.Tensor, ATTRIBUTE):
        for cls in (torch.Tensor, torch.nn.Parameter, type("Mine", (torch.Tensor,), {})):
            assert exchange_api(cls) is torch.Tensor.__dlpack_c_exchange_api__


@needs_torch
def test_a_subclass_that_may_change_what_dlpack_returns_does_not_have_pytorchs_table():
    tenfold = type("Tenfold", (torch.Tensor,), {"__torch_function__": classmethod(lambda cls, *call: NotImplemented)})
    assert table_in(exchange_api(tenfold)).dltensor_from_py_object_no_sync == ffi.NULL


def test_a_type_with_only_dlpack_has_a_table_that_calls_it():
    """What it exports by that: test_round_trips.py."""
    table, made = table_in(exchange_api(Dunder)), ffi.new("intptr_t *")
    assert exchange_api(Dunder) is exchange_api(Dunder) is exchange_api(type("Mine", (Dunder,), {}))
    assert table.dltensor_from_py_object_no_sync == ffi.NULL
    assert ffi.NULL not in (table.managed_tensor_allocator, table.current_work_stream)
    tensor = Dunder(np.arange(3.0))
    managed = exported(tensor, table)
    to_object = functools.partial(call, table.managed_tensor_to_py_object_no_sync)
    assert type_and_message(to_object, address_of(managed), address_of(made))[0] is BufferError  # of which type should it be?
    assert made[0] == 0 and tensor.ledger.deleted == 0
    delete(managed)
    tensor.ledger.check(1)
    tensor = Gives(raising(PermissionError("not this one")))
    check_raises(PermissionError, "not this one", call, table.managed_tensor_from_py_object_no_sync, id(tensor), address_of(made))
    assert made[0] == 0


@needs_the_attribute_free
def test_arrays_whose_layout_is_not_known_have_no_table(monkeypatch):
    monkeypatch.setattr("fastexchange.exchange.polyfill._numpy_capsule", lambda: None)
    for function in (exchange_api, polyfill):
        check_raises(TypeError, "not laid out in memory as expected", function, np.ndarray)
    assert not hasattr(np.ndarray, ATTRIBUTE)


def test_the_older_attribute_holds_a_capsule_or_an_address():
    table = exchange_table()
    for held in (capsule(table, TABLE_CAPSULE), address_of(table)):
        cls = type("Older", Tabled.__bases__, {OLDER: held})
        tensor = cls(np.arange(3.0))
        for calls in range(1, 41):
            assert seen(tensor) == (tensor.array.ctypes.data, 3.0) and tensor.borrows >= calls
        assert explain(tensor).path == "c-exchange"  # its conversions: test_round_trips.py
        made = exchange_api(cls)
        assert capsule_name(made) == TABLE_CAPSULE and table_in(made) == table and (type(held) is int or made is held)
    # The newer one comes first.
    cls = type("Both", (Tabled,), {OLDER: capsule(exchange_table(managed_tensor_allocator=None), TABLE_CAPSULE)})
    assert exchange_api(cls) is exchange_api(Tabled) and seen(cls(np.arange(3.0)))[1] == 3.0


@pytest.mark.parametrize("is_set_late", [False, True])
def test_a_type_that_is_given_this_packages_table_is_one_without_a_table(is_set_late):
    own, filled = type("Own", (Dunder,), {}), fast_args(lambda x, y: y.fill(3), out="x[n] -> y[n]")
    array = type("OwnArray", (np.ndarray,), {})
    if is_set_late:
        assert type(doubled(own(np.ones(3)))) is np.ndarray
    for cls in (own, array):
        setattr(cls, ATTRIBUTE, exchange_api(cls))
    x = own(np.ones(3))
    for _ in range(4):
        for result, wanted in ((doubled(x), 2.0), (filled(x), 3.0)):
            assert type(result) is np.ndarray and result.tolist() == [wanted] * 3
        assert doubled(np.ones(3).view(array)).tolist() == [2.0] * 3
    x.ledger.check(x.ledger.made)
    assert all(exchange_api(cls) is getattr(cls, ATTRIBUTE) for cls in (own, array))
    assert from_dlpack(own(np.ones(3))).tolist() == [1.0] * 3
    kernel = fast_args(lambda x: x * 2, returns=own)
    check_raises(TypeError, "returns is a type of tensors that can be made of memory, not .*Own", kernel, np.ones(3))


@needs_the_attribute_free
def test_polyfill_can_be_repeated_and_taken_back_and_changes_no_call():
    kernel, array = fast_args(look), np.arange(6.0).reshape(2, 3)
    arrays = [array, array.T, array[::-1, ::2], np.broadcast_to(array[0], (3, 3)), array.view(Sub)]
    for _ in range(3):
        assert not hasattr(np.ndarray, ATTRIBUTE) and not hasattr(array, ATTRIBUTE) and not hasattr(Sub, ATTRIBUTE)
        for _ in range(2):
            assert polyfill(np.ndarray) is None
            for thing in (np.ndarray, array, Sub, array.view(Sub), np.memmap):
                assert getattr(thing, ATTRIBUTE) is exchange_api(np.ndarray)
        for each in arrays:
            with references_kept(each):
                assert kernel(each) == kernel(each) == (each.ctypes.data, each.sum()) and explain(each).path == "ndarray"
                assert np.array_equal(from_dlpack(each), each) and from_dlpack(each).flags.writeable == each.flags.writeable
        assert {*kernel.signatures} == {(numba.typeof(each),) for each in arrays}
        for strange in (np.array([None]), np.zeros(3, SWAPPED + "f8")):
            assert type_and_message(from_dlpack, strange)[0] is BufferError
        assert unpolyfill(np.ndarray) is None
        check_raises(ValueError, "not polyfilled", unpolyfill, np.ndarray)


PRELUDE = """
    import sys
    sys.modules["torch"] = None  # which tvm-ffi would import, for seconds
""" + TABLE_PRELUDE + """
    try:
        import tvm_ffi
    except ImportError:
        tvm_ffi = None
    else:
        echo, nop, apply = (tvm_ffi.get_global_func("testing." + name) for name in ("echo", "nop", "apply"))
    from oracle import references_kept, type_and_message

    kernel = fast_args(lambda x: x.sum())
    kernel(np.ones(3))
"""
SCENES = {
    "a table that is not ours is neither replaced nor removed": """
    # As if NumPy had one of its own, before or since.
    [namespace] = [thing for thing in gc.get_referents(np.ndarray.__dict__) if type(thing) is dict]
    own = capsule(exchange_table(), TABLE_CAPSULE)

    def put(thing):
        namespace["__dlpack_c_exchange_api__"] = thing
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.ndarray))

    put(own)
    for function in (polyfill, unpolyfill):
        assert type_and_message(function, np.ndarray)[0] is ValueError and np.ndarray.__dlpack_c_exchange_api__ is own
    assert exchange_api(np.ndarray) is own
    del namespace["__dlpack_c_exchange_api__"]
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.ndarray))
    polyfill(np.ndarray)
    put(own)
    unpolyfill(np.ndarray)
    assert np.ndarray.__dlpack_c_exchange_api__ is own
    """,
    "from many threads": """
    import contextlib
    from concurrent import futures

    def work(barrier):
        barrier.wait()
        for _ in range(60):
            polyfill(np.ndarray)
            found = getattr(np.ndarray, "__dlpack_c_exchange_api__", None)
            assert found is exchange_api(np.ndarray) or (undo and found is None), found
            assert kernel(np.ones(3)) == from_dlpack(np.ones(3)).sum() == 3.0
            with contextlib.suppress(ValueError):  # another thread was faster
                undo and unpolyfill(np.ndarray)

    for undo in (False, True):
        with futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, [threading.Barrier(8)] * 8))
        assert hasattr(np.ndarray, "__dlpack_c_exchange_api__") is not undo
    """,
}
if tvm_ffi is not None:
    SCENES |= {
        "tvm-ffi makes arrays, of our table, which it found while the type was polyfilled": """
    class Before(np.ndarray):
        "A type that tvm-ffi meets before there is a table."

    array, readonly = np.arange(6.0).reshape(2, 3), np.frombuffer(b"abcdef", np.uint8)
    assert type(echo(array.view(Before))) is tvm_ffi.Tensor
    assert type_and_message(tvm_ffi.from_dlpack, readonly)[0] in (BufferError, ValueError)  # while there is no table
    polyfill(np.ndarray)
    layouts = {
        "C": array, "strided": array[:, ::2].T, "0-d": array[1, 1:2].reshape(()), "negative strides": array[::-1, ::-1],
        "empty": array[:0], "broadcast": np.ndarray((3, 4), array.dtype, array, strides=(0, 8)), "memmap": array.view(np.memmap),
        **{dtype: array.astype(dtype) for dtype in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()},
    }
    for layout, each in layouts.items():
        with references_kept(each):
            nop(each, each, each)
        with references_kept(each):
            back = echo(each)
            assert type(back) is np.ndarray and (back.dtype, back.shape) == (each.dtype, each.shape), layout
            assert np.array_equal(back, each) and back.ctypes.data == each.ctypes.data, layout
            del back
    for strange in (np.array([None]), np.array(["a"]), np.zeros(3, ">i4"), np.zeros(3, "M8[s]")):
        with references_kept(strange):
            kind, message = type_and_message(echo, strange)
            assert kind in (BufferError, ValueError) and "cannot be exported" in message
    assert echo(readonly).tobytes() == b"abcdef" and not readonly.flags.writeable  # what it does with the flag is its affair
    unpolyfill(np.ndarray)
    assert np.array_equal(np.from_dlpack(echo(array)), array)  # tvm-ffi keeps what it found: the table is still there
    """,
    }


stage = stage_for_module(PRELUDE)


@pytest.mark.slow
@needs_fork
@needs_the_attribute_free
@pytest.mark.parametrize("scene", SCENES)
def test_polyfill_in_a_process_of_its_own(scene, stage):
    stage.run(SCENES[scene]).check_silent()


# ---- wrappers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda cls: cls.__name__)
def test_a_wrapper_stands_for_what_it_wraps(wrapper):
    for name in filter(SOURCES.__contains__, (
            "numpy.ndarray", "subclass of ndarray", "exchange table", "only __dlpack__", "only legacy __dlpack__", "memoryview",
            "torch.Tensor", "tvm_ffi.Tensor")):  # fmt: skip
        array = np.arange(4.0)
        wrapped = wrapper(SOURCES[name](array))
        ledger, want = getattr(wrapped.inner, "ledger", Ledger()), (array.ctypes.data, 6.0)
        getattr(wrapped, ATTRIBUTE)  # which functools keeps
        with references_kept(array, wrapped):
            for _ in range(3):
                assert seen(wrapped) == seen(x=wrapped) == seen_unlocked(wrapped) == seen_in_tuple((1, wrapped)) == want
            before = seen.counts()
            assert seen(wrapped) == want and seen.counts()[:2] == (before.fast + 1, before.slow)
            gc.collect()
            assert ledger.out == 0
        ledger.check(ledger.made)
        assert ledger.made >= 13 * isinstance(wrapped.inner, (Tabled, Dunder))
        del wrapped
    thing = Tabled(np.arange(4.0), ledger := Ledger())
    for depth in range(1, 9):
        thing = wrapper(thing)
        assert seen(thing)[1] == from_dlpack(thing).sum() == 6.0, depth
    ledger.check(16)


class Calls:
    """Its attribute is made by a function, whose result nobody else holds."""

    __dlpack_c_exchange_api__ = property(lambda self: self.make())

    def __init__(self, make):
        self.make = make


class WithMethods(Calls, Dunder):
    def __init__(self, make):
        Calls.__init__(self, make)
        Dunder.__init__(self, np.full(3, 7.0))


def test_a_wrapper_is_asked_itself_where_it_forwards_to_nothing():
    array = np.arange(3.0)
    wrapped = WithMethods(lambda: array)
    assert seen(wrapped)[1] == from_dlpack(wrapped).sum() == seen_unlocked(wrapped)[1] == 3.0 and not wrapped.asked
    ring = [WithMethods(lambda i=i: ring[(i + 1) % 3]) for i in range(3)]
    makes = [lambda thing=thing: thing for thing in NO_INNER]
    errors = (RuntimeError, AttributeError, TypeError, BufferError, ZeroDivisionError)
    makes += [functools.partial(raising(error), None) for error in errors]
    for wrapped in (*map(WithMethods, makes), ring[0]):
        for _ in range(2):
            assert seen(wrapped)[1] == seen_unlocked(wrapped)[1] == from_dlpack(wrapped).sum() == 21.0
        wrapped.ledger.check(6)
    for take in (seen, seen_unlocked, from_dlpack, lambda x: convert(x, np.ndarray)):
        assert type_and_message(take, WithMethods(functools.partial(raising(KeyboardInterrupt), None)))[0] is KeyboardInterrupt
    assert seen(np.arange(3.0))[1] == seen(Wrapper(np.arange(3.0)))[1] == 3.0


def test_what_nobody_else_holds_lives_as_long_as_it_is_needed():
    ledger = Ledger()
    for make in (lambda: np.full(1000, 2.0), lambda: Tabled(np.full(1000, 2.0), ledger), lambda: Wrapper(np.full(1000, 2.0))):
        wrapped = Calls(make)
        views = [from_dlpack(wrapped) for _ in range(20)]
        assert [seen(wrapped)[1] for _ in range(20)] == [2000.0] * 20
        assert all((view == 2.0).all() for view in views)
        del views
    ledger.check(40)


def test_what_a_wrapper_wraps_may_change_from_call_to_call():
    array = np.arange(4.0)
    inners = [array, array.astype("f4"), array.astype("i8")[::2], Tabled(array), Dunder(array), memoryview(array), array[None]]
    wrapped = Wrapper(None)
    for _ in range(3):
        for inner in inners:
            wrapped.inner = inner
            assert seen(wrapped)[1] == seen(wrapped)[1] == from_dlpack(inner).sum()
        wrapped.inner = None
        assert issubclass(type_and_message(seen, wrapped)[0], TypeError)


def test_a_wrapper_may_call_the_kernel_itself_or_be_a_table_by_inheritance():
    array = np.arange(4.0)

    def busy():
        assert seen(np.arange(3.0))[1] == seen(Wrapper(np.arange(3)))[1] == 3
        gc.collect()
        return array

    for _ in range(3):
        assert seen(Calls(busy)) == (array.ctypes.data, 6.0)
    forwards = type("Forwards", (Tabled,), {ATTRIBUTE: property(lambda self: array)})
    tensor = forwards(np.zeros(3))
    assert seen(tensor) == (array.ctypes.data, 6.0) and tensor.borrows == 0
    tensor = type("Back", (forwards,), {ATTRIBUTE: Tabled.__dict__[ATTRIBUTE]})(np.full(3, 2.0))
    assert seen(tensor)[1] == 6.0 and tensor.borrows > 0


class RaisingText(BufferError):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("has_dlpack", [True, False])
def test_what_a_wrappers_attribute_raises_is_named_and_keeps_nothing(has_dlpack):
    """Raised while another exception is handled, whose frames are those of the call."""

    def attribute(self):
        try:
            raise ValueError("before")
        except ValueError as error:
            raise RaisingText from error

    wrapper = type("Raising", (Dunder,) if has_dlpack else (), {ATTRIBUTE: property(attribute)})(*[np.ones(3)] * has_dlpack)
    gc.collect()
    gc.disable()
    try:
        before = sys.getrefcount(wrapper)
        for way in (doubled, from_dlpack) * 3:
            if has_dlpack:
                assert way(wrapper)[0] in (1.0, 2.0)
            else:
                check_raises(TypeError, "Raising leads to an exception, RaisingText, and", way, wrapper)
        assert sys.getrefcount(wrapper) == before
    finally:
        gc.enable()


# ---- the functions themselves ----------------------------------------------------------------------------------------
def test_a_from_dlpack_that_a_program_has_imported_is_not_that_of_its_tensors_but_its_own_is(monkeypatch):
    program = types.ModuleType("program_of_a_user")
    monkeypatch.setitem(sys.modules, program.__name__, program)
    first, tensor = (type("Tensor", (Dunder,), {"__module__": program.__name__}) for _ in range(2))
    program.from_dlpack, array = np.from_dlpack, np.arange(3.0)
    kind, message = type_and_message(convert, array, first)
    assert kind is TypeError and "no from_dlpack" in message
    assert type(doubled(first(array))) is np.ndarray
    program.from_dlpack = lambda x: cls(np.from_dlpack(x))
    program.from_dlpack.__module__ = program.__name__
    for cls in (tensor, type("Derived", (tensor,), {"__module__": "another_program"})):
        made = convert(array, cls)
        assert type(made) is cls and place(made) == place(array)
        twice = doubled(made)
        assert type(twice) is cls and twice.array.tolist() == [0, 2, 4]


SIGNATURES = {from_dlpack: "(x, /, *, dtype=None, device=None, copy=None)",
              to_dlpack: "(x, /, *, max_version=None, device=None, copy=None)",
              convert: "(x, to, /, *, copy=None)"}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_they_behave_like_functions(function):
    name, signature = function.__name__, inspect.signature(function)
    assert function.__qualname__ == name and name in repr(function) and inspect.getdoc(function) and callable(function)
    assert getattr(fastexchange, name) is function is getattr(sys.modules[function.__module__], name)
    for again in (pickle.loads(pickle.dumps(function)), copy.copy(function), copy.deepcopy(function)):
        assert again is function is weakref.ref(function)()
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == SIGNATURES[function]
    namespace: dict = {}
    exec(f"def {name}{SIGNATURES[function]}: pass", namespace)
    array = np.arange(3.0)
    good = (array, np.ndarray) if function is convert else (array,)
    for arguments, keywords in [
        ((), {}), (good[:-1], {}), ((*good, array), {}), (good + (array,) * 7, {}), (good, {"other": 1}), ((), {"x": array}),
        (good[:-1], {"to": np.ndarray}), (good, {"x": array}), (good, {"copy": None, "nothing": 1}),
    ]:  # fmt: skip
        with references_kept(array):  # in the words of Python for a function of the same signature
            assert type_and_message(function, *arguments, **keywords) == type_and_message(namespace[name], *arguments, **keywords)
