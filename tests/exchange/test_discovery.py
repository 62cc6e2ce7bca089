"""From a type to its way: found once, for subclasses too, and forgotten when the type dies."""

import gc

import numba
import numpy as np
import pytest
from exchanges import ATTRIBUTE
from forked import fork_python
from frameworks import is_borrowed, torch, tvm_ffi
from hostile_producers import fails
from made_producers import Dunder, Tabled, WithMethods, tabled_type, tabled_type_with_methods

from fastexchange import explain, fast_args
from fastexchange.arguments.discovery import discover
from fastexchange.dispatch.runtime import runtime

total, ignore = fast_args(lambda x: x.sum()), fast_args(lambda x: 1)
PATHS = {np.ndarray: "ndarray", Tabled: "c-exchange", Dunder: "dunder", float: "scalar", type(None): "scalar",
         np.float32: "scalar", str: "scalar", tuple: "tuple", list: "list", set: "numba"}  # fmt: skip
TENSORS = []
if torch is not None:
    PATHS[torch.Tensor] = PATHS[torch.nn.Parameter] = "c-exchange" if is_borrowed() else "dunder"
    ones, mine = torch.ones(3), type("Mine", (torch.Tensor,), {})
    TENSORS += [torch.nn.Parameter(ones, requires_grad=False), ones.as_subclass(mine), torch.nn.Buffer(ones)]
if tvm_ffi is not None:
    TENSORS.append(tvm_ffi.from_dlpack(np.ones(3)))


def test_paths():
    assert {cls: discover(cls).path for cls in PATHS} == PATHS
    for tensor in TENSORS:
        assert total(tensor) == total(tensor) == 3.0 and discover(type(tensor)).path in ("c-exchange", "dunder")


Strange = type("Strange", (type,), {"__eq__": fails, "__hash__": fails})


def with_table(self, array):
    Dunder.__init__(self, array)
    self.__dlpack_c_exchange_api__ = Tabled.__dlpack_c_exchange_api__


SLOTTED = {"__slots__": ("array",), "__init__": lambda self, array: setattr(self, "array", array),
           "__dlpack_device__": lambda self: (1, 0),
           "__dlpack__": lambda self, **options: self.array.__dlpack__(**options)}  # fmt: skip
SUBCLASSES = {
    # what is derived: (its type, its path, whether __dlpack__ is asked, what is explained)
    "it inherits the table": (
        lambda: type("Derived", (type("Between", (tabled_type_with_methods(),), {}),), {"more": 1}), "c-exchange", False, ""),
    "it has a table of its own": (
        lambda: tabled_type("Derived", (tabled_type(managed_tensor_allocator=None),)), "c-exchange", None, ""),
    "it overrides __dlpack__": (
        lambda: type("Mine", (tabled_type_with_methods(),), {"__dlpack__": WithMethods.__dlpack__}), "dunder", True,
        "Mine overrides __dlpack__"),
    "it overrides __dlpack__ and the table": (
        lambda: tabled_type("Both", (tabled_type_with_methods(),), {"__dlpack__": WithMethods.__dlpack__}), "c-exchange", False,
        ""),
    "it sets the table to None": (lambda: type("Out", (tabled_type_with_methods(),), {ATTRIBUTE: None}), "dunder", True, ""),
    "an attribute dispatcher means nothing": (
        lambda: tabled_type("Scheduled", attributes={"dispatcher": "some scheduler"}), "c-exchange", None, ""),
    "a table on an instance is none": (lambda: type("WithTable", (Dunder,), {"__init__": with_table}), "dunder", None, ""),
    "its metaclass has hash and equality": (lambda: Strange("Strange", (Dunder,), {}), "dunder", None, ""),
    "it has slots and no dict": (lambda: type("Slotted", (), SLOTTED), "dunder", None, "calls its __dlpack__"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "path", "is_asked", "said"), SUBCLASSES.values(), ids=SUBCLASSES)
def test_a_class_is_taken_for_what_it_is(make, path, is_asked, said):
    cls = make()
    tensor = cls(np.ones(3))
    assert total(tensor) == total(tensor) == 3.0 and discover(cls).path == path and said in str(explain(tensor))
    assert is_asked is None or (tensor.dunder_calls >= 2) is is_asked is not (tensor.borrows > 0)


def test_a_table_of_tensors_that_may_be_readonly():
    """A borrowed view cannot say so: kernels get the owning export, whose flags can."""
    base = tabled_type("Viewed", attributes={"readonly": property(lambda self: not self.array.flags.writeable)})
    for is_readonly in (False, True):
        array, kernel = np.ones(3), fast_args(lambda x: x.sum())
        array.flags.writeable = not is_readonly
        tensor = base(array, flags=int(is_readonly))
        assert kernel(tensor) == kernel(tensor) == 3.0 and tensor.borrows == 0
        assert kernel.signatures == [(numba.typeof(array),)]
        tensor.ledger.check(tensor.ledger.made)
    assert "it may be readonly" in str(explain(tensor))


def test_the_table_is_found_once_per_type_for_all_kernels():
    lookups = []

    class Meta(type):
        def __getattribute__(cls, name):
            if name == ATTRIBUTE:
                lookups.append(cls)
            return super().__getattribute__(name)

    cls = Meta("Counting", (tabled_type(),), {})
    tensors = [cls(np.ones(3)) for _ in range(10)]
    assert total(tensors[0]) == 3.0
    found = len(lookups)
    assert 1 <= found <= 4
    for tensor in tensors * 3:
        assert total(tensor) == 3.0 and ignore(tensor) == 1
    assert fast_args(lambda x: 1)(cls(np.ones(3))) == 1
    assert len(lookups) == found


# ---- types that die; others in their places: ``soak.py`` -------------------------------------------------------------
PILES = {
    # what: (a generator, how many entries may be left of its things)
    "jitted functions": (lambda: (numba.njit(lambda x: x) for _ in range(5)), 1),
    # Every array of a structured dtype may bring a dtype object of its own.
    "structs": (lambda: (np.array([(i, 2.0)], np.dtype([("a", "i4"), ("b", "f8")])) for i in range(5000)), 2000),
}


@pytest.mark.parametrize(("make", "left"), PILES.values(), ids=PILES)
def test_entries_do_not_pile_up(make, left):
    kernel = fast_args(lambda x: 1)
    before = len(runtime().entries)
    for thing in make():
        assert kernel(thing) == kernel(thing) == 1
    del thing
    gc.collect()
    assert len(runtime().entries) <= before + left and len(kernel.signatures) < 20


@pytest.mark.slow
def test_functions_of_ctypes_that_others_have_declared_otherwise():
    """``ctypes.pythonapi`` is everybody's: what others declare its functions to be is not what they are here."""
    fork_python("""
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
    """)
