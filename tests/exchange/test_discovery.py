"""From a type to its way: found once, for subclasses too, and forgotten when the type dies."""

import collections
import gc
import sys
import weakref

import numba
import numpy as np
import pytest
from frameworks import is_borrowed, torch, tvm_ffi
from interpreter import run_python
from made_producers import Dunder, Tabled, WithMethods, capsule, exchange_table, tabled_type, tabled_type_with_methods
from oracle import type_and_message

from fastexchange import explain, fast_args
from fastexchange.dispatch.runtime import runtime
from fastexchange.exchange.discovery import discover

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args
def total(x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


@fast_args
def ignore(x):
    return 1


# ---- which way -----------------------------------------------------------------------------------------------------


def test_paths():
    assert discover(np.ndarray).path == "ndarray"
    assert discover(Tabled).path == "c-exchange"
    assert discover(Dunder).path == "dunder"
    assert discover(float).path == discover(type(None)).path == discover(np.float32).path == "scalar"
    assert discover(tuple).path == "tuple"
    assert (discover(str).path, discover(set).path, discover(list).path) == ("scalar", "numba", "list")


@needs_torch
def test_path_of_torch_tensors():
    assert discover(torch.Tensor).path == discover(torch.nn.Parameter).path == ("c-exchange" if is_borrowed() else "dunder")


@pytest.mark.skipif(tvm_ffi is None, reason="apache-tvm-ffi is not installed")
def test_path_of_tvm_ffi_tensors():
    tensor = tvm_ffi.from_dlpack(np.arange(4.0))
    assert total(tensor) == total(tensor) == 6.0
    assert discover(type(tensor)).path in ("c-exchange", "dunder")


def test_an_array_like_is_no_tensor():
    class Like:
        def __array__(self, dtype=None, copy=None):
            return np.ones(3)

    assert type_and_message(total, Like())[0] is TypeError


# ---- subclasses ----------------------------------------------------------------------------------------------------


def test_subclasses_inherit_the_table():
    base = tabled_type_with_methods()
    derived = type("Derived", (type("Between", (base,), {}),), {"more": 1})
    tensor = derived(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert (tensor.dunder_calls, discover(derived).path) == (0, "c-exchange")


def test_a_subclass_with_a_table_of_its_own():
    base = tabled_type(managed_tensor_allocator=None)
    derived = tabled_type("Derived", (base,))
    assert total(derived(np.ones(3))) == 3.0


def test_a_subclass_that_overrides_dlpack_is_asked_by_dlpack():
    """Its table is its base's, which knows nothing of what the subclass does."""
    base = tabled_type_with_methods()

    class Doubled(base):
        def __dlpack__(self, *, max_version=None):
            made = super().__dlpack__(max_version=max_version)
            self.array *= 2
            return made

    tensor = Doubled(np.ones(3))
    total(tensor)
    assert total(tensor) == tensor.array.sum() > 3.0
    assert tensor.borrows == 0
    assert "Doubled overrides __dlpack__" in str(explain(tensor))


def test_a_subclass_that_overrides_dlpack_and_its_table():
    base = tabled_type_with_methods()
    own = capsule(exchange_table(), b"dlpack_exchange_api")
    derived = type("Both", (base,), {"__dlpack_c_exchange_api__": own, "__dlpack__": WithMethods.__dlpack__})
    tensor = derived(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert tensor.dunder_calls == 0


def test_a_table_on_an_instance_is_none():
    tensor = Dunder(np.ones(3))
    tensor.__dlpack_c_exchange_api__ = Tabled.__dlpack_c_exchange_api__
    assert total(tensor) == total(tensor) == 3.0
    assert len(tensor.asked) >= 2


def test_a_table_set_to_none_by_a_subclass():
    derived = type("Opted out", (tabled_type_with_methods(),), {"__dlpack_c_exchange_api__": None})
    tensor = derived(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0
    assert tensor.dunder_calls >= 2 and tensor.borrows == 0


@needs_torch
def test_subclasses_of_torch_tensors():
    class Mine(torch.Tensor):
        pass

    for tensor in (
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3).as_subclass(Mine),
        torch.nn.Buffer(torch.ones(3)),
    ):
        assert total(tensor) == total(tensor) == 3.0


def test_an_attribute_called_dispatcher_means_nothing():
    tensor = tabled_type("Scheduled", attributes={"dispatcher": "some scheduler"})(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0


def test_metaclasses_with_hash_and_equality_of_their_own():
    class Meta(type):
        def __eq__(cls, other):
            raise AssertionError("asked")

        def __hash__(cls):
            raise AssertionError("asked")

    Strange = Meta("Strange", (Dunder,), {})
    assert total(Strange(np.ones(3))) == total(Strange(np.ones(3))) == 3.0


def test_slots_and_classes_without_a_dict():
    class Slotted:
        __slots__ = ("array",)
        __dlpack_c_exchange_api__ = None

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, *, max_version=None):
            return self.array.__dlpack__(max_version=max_version)

    assert total(Slotted(np.ones(3))) == total(Slotted(np.ones(3))) == 3.0


def test_a_table_of_tensors_that_may_be_readonly():
    """A borrowed view cannot say so: kernels get the owning export, whose flags can."""
    base = tabled_type("Viewed", attributes={"readonly": property(lambda self: not self.array.flags.writeable)})
    for is_readonly in (False, True):
        array = np.ones(3)
        array.flags.writeable = not is_readonly
        tensor = base(array, flags=int(is_readonly))
        kernel = fast_args(lambda x: x.sum())
        assert kernel(tensor) == kernel(tensor) == 3.0 and tensor.borrows == 0
        assert kernel.signatures == [(numba.typeof(array),)]
        tensor.ledger.check(tensor.ledger.made)
    assert "it may be readonly" in str(explain(tensor))


# ---- once per type -------------------------------------------------------------------------------------------------


def counting_type():
    """A tensor type that counts look-ups of its table."""

    class Meta(type):
        lookups = 0

        def __getattribute__(cls, name):
            if name == "__dlpack_c_exchange_api__":
                Meta.lookups += 1
            return super().__getattribute__(name)

    base = tabled_type()
    return Meta("Counting", (base,), {}), Meta


def test_the_table_is_found_once_per_type():
    cls, meta = counting_type()
    tensors = [cls(np.ones(3)) for _ in range(10)]
    assert total(tensors[0]) == 3.0
    found = meta.lookups
    assert 1 <= found <= 4
    for tensor in tensors * 3:
        assert total(tensor) == 3.0
        assert ignore(tensor) == 1
    assert meta.lookups == found


def test_the_table_is_found_once_for_all_kernels():
    cls, meta = counting_type()
    total(cls(np.ones(3)))
    found = meta.lookups
    for _ in range(3):
        assert fast_args(ignore.py_func)(cls(np.ones(3))) == 1
    assert meta.lookups == found


# ---- types that die ------------------------------------------------------------------------------------------------


def test_a_type_can_die_and_its_entry_with_it():
    mortal = type("Mortal", (Dunder,), {})
    assert total(mortal(np.ones(3))) == 3.0
    reference, entries = weakref.ref(mortal), len(runtime().entries)
    del mortal
    gc.collect()
    assert reference() is None
    assert len(runtime().entries) < entries


@pytest.mark.slow
def test_types_made_in_a_loop_hit_no_stale_entry_and_do_not_pile_up():
    """20,000 types of four kinds in turn (100,000 in ``soak.py``): one that took another's place is never taken for it."""
    run_python(
        """
        import gc
        import numpy as np
        from fastexchange import fast_args
        from fastexchange.dispatch.runtime import runtime
        from made_producers import Dunder, Tabled

        @fast_args
        def first(x):
            return x[0]

        ones, twos = np.full(3, 1.0), np.full(3, 2.0)
        tabled, dunder, number = Tabled(ones), Dunder(twos), 3.0
        first(ones)

        class Threes(np.ndarray):
            pass

        def attempt(cls, make):
            try:
                return first(make(cls))
            except TypeError:
                return None

        before = len(runtime().entries)
        addresses = set()
        makers = [
            (lambda: type("A", (Tabled,), {}), lambda cls: cls(ones), 1.0),
            (lambda: type("B", (), {"__slots__": ()}), lambda cls: cls(), None),
            (lambda: type("C", (np.ndarray,), {}), lambda cls: twos.view(cls), 2.0),
            (lambda: type("D", (Dunder,), {}), lambda cls: cls(twos), 2.0),
        ]
        gc.disable()
        for i in range(20_000):
            kind = i % 4 if i % 1000 < 100 else 2 * (i % 2)
            make_type, make, want = makers[kind]
            cls = make_type()
            addresses.add(id(cls))
            got = attempt(cls, make)
            assert got == want, (i, kind, got)
            del cls
            if i % 2000 == 1999:
                gc.collect()
        gc.collect()
        assert len(addresses) < 19_800, "no address was used twice: the test tests nothing"
        assert len(runtime().entries) <= before + 8, (before, len(runtime().entries))
        """
    )


def test_the_entry_table_stays_small():
    before = len(runtime().entries)
    for _ in range(500):
        cls = type("Brief", (Tabled,), {})
        assert total(cls(np.ones(2))) == 2.0
        del cls
    gc.collect()
    assert len(runtime().entries) <= before + 1


def test_a_kernel_that_has_seen_a_type_does_not_keep_it():
    kernel = fast_args(ignore.py_func)
    cls = type("Seen", (Tabled,), {})
    tensor = cls(np.ones(2))
    for _ in range(3):
        kernel(tensor)
    reference = weakref.ref(cls)
    del cls, tensor
    gc.collect()
    assert reference() is None
    assert kernel(np.ones(2)) == kernel(Tabled(np.ones(2))) == 1


def test_named_tuple_classes_can_die():
    kernel = fast_args(ignore.py_func)
    for i in range(3):
        cls = collections.namedtuple(f"Mortal{i}", "x")
        assert kernel(cls(1.0)) == kernel(cls(1.0)) == 1
    before = len(runtime().entries)
    del cls
    gc.collect()
    assert len(runtime().entries) <= before


def test_jitted_functions_given_as_arguments_can_die():
    kernel = fast_args(ignore.py_func)
    before = len(runtime().entries)
    for _ in range(5):
        function = numba.njit(lambda x: x)
        assert kernel(function) == kernel(function) == 1
    del function
    gc.collect()
    assert len(runtime().entries) <= before + 6


# ---- dtype objects -------------------------------------------------------------------------------------------------


def test_many_dtype_objects_do_not_pile_up():
    """Every array of a structured dtype may bring a dtype object of its own."""
    before = len(runtime().entries)
    for value in range(5000):
        array = np.array([(value, 2.0)], np.dtype([("a", "i4"), ("b", "f8")]))
        assert ignore(array) == 1
    assert len(runtime().entries) <= before + 2000
    assert len(ignore.signatures) < 20


def test_dtypes_of_unit_and_length_are_told_apart_after_many():
    @fast_args
    def first(x):
        return x[0]

    arrays = [np.array([5], f"M8[{unit}]") for unit in ("s", "ms", "us")]
    for _ in range(3):
        for array in arrays:
            assert first(array) == array[0]
            for _ in range(5):
                ignore(np.zeros(1, np.dtype([("a", "i4"), ("b", "f8")])))


def test_references_to_dtypes_are_bounded():
    dtype = np.dtype([("only", "i4"), ("here", "f8")])
    array = np.zeros(3, dtype)
    ignore(array)
    before = sys.getrefcount(dtype)
    for _ in range(100):
        ignore(array)
        ignore(array[::2])
    assert sys.getrefcount(dtype) <= before + 2


def test_functions_of_ctypes_that_others_have_declared_otherwise():
    """``ctypes.pythonapi`` is everybody's: what others declare its functions to be is not what they are here."""
    run_python(
        """
        import ctypes
        for name in ("PyCapsule_GetPointer", "PyCapsule_IsValid", "PyCapsule_New", "PyType_GetSlot", "PyType_FromSpecWithBases",
                     "PyObject_GetBuffer", "PyBuffer_Release", "Py_IncRef", "Py_DecRef", "PyType_Modified"):
            function = getattr(ctypes.pythonapi, name)
            function.argtypes, function.restype = [ctypes.c_double], None
        import array
        import numpy as np
        from fastexchange import convert, fast_args, from_dlpack, polyfill, unpolyfill
        total_of = fast_args(lambda x: x[0] + x[1] + x[2] + x[3])
        x = np.arange(4.0)
        assert [total_of(x), total_of(array.array("d", x)), from_dlpack(x).sum(), convert(x, np.ndarray).sum()] == [6.0] * 4
        polyfill(np.ndarray)
        assert total_of(x) == 6.0
        unpolyfill(np.ndarray)
        """
    )
