"""Arrays that outlive their call: memory stays alive as long as somebody holds it, and is given back exactly once."""

import gc
import os
import sys
import tracemalloc
import weakref

import numba
import numpy as np
import pytest
from frameworks import torch
from interpreter import run_python
from made_producers import Dunder, Legacy, Tabled, ffi, tabled_type
from oracle import numbas

from fastexchange import fast_args

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args(returns=np.ndarray)
def itself(x):
    return x


@fast_args(returns=np.ndarray)
def part(x):
    return x[1:3]


@fast_args(returns=np.ndarray)
def two_parts(x):
    return x[:2], (x[2:], 5)


@fast_args(returns=np.ndarray)
def second_of_two(x, y):
    return y


@fast_args
def keep(container, x):
    container.append(x)


@fast_args
def keep_part(container, x):
    container.append(x[1:])


@fast_args(returns=np.ndarray)
def copied(x):
    return x.copy()


@fast_args(returns=np.ndarray)
def optional(x, yes):
    if yes:
        return x
    return None


@fast_args
def through_objmode(x):
    with numba.objmode():
        held.append(x)


held: list = []


class Array(np.ndarray):
    """An array that can be weakly referenced from a subclass's instance, to see it die."""


def counted(kind):
    """A tensor whose exports are counted, and its memory."""
    memory = np.arange(4.0)
    return kind(memory), memory


COUNTED = [Dunder, Legacy, Tabled, tabled_type("ExportOnly", dltensor_from_py_object_no_sync=None)]


# ---- NumPy ---------------------------------------------------------------------------------------------------------


def test_a_returned_argument_is_the_argument():
    array = np.arange(4.0)
    for _ in range(3):
        assert itself(array) is array
        assert second_of_two(1, array) is array
    assert numbas(itself)(array) is array


@pytest.mark.parametrize("kernel", [part, two_parts, optional], ids=lambda kernel: kernel.__name__)
def test_what_numpy_memory_a_result_keeps(kernel):
    array = np.arange(4.0)
    arguments = (array, True) if kernel is optional else (array,)
    kernel(*arguments)
    array = np.arange(4.0).view(Array)
    arguments = (array, True) if kernel is optional else (array,)
    result = kernel(*arguments)
    reference = weakref.ref(array)
    del array, arguments
    gc.collect()
    assert reference() is not None, "the result's memory has gone"
    del result
    gc.collect()
    assert reference() is None, "the memory is held for ever"


def test_views_see_the_memory():
    array = np.arange(4.0)
    view = part(array)
    array[1] = 100
    assert view.tolist() == [100.0, 2.0]
    view[1] = 200
    assert array[2] == 200
    assert part(array).flags.writeable


def test_views_of_readonly_arrays_are_readonly():
    array = np.arange(4.0)
    array.flags.writeable = False
    assert not part(array).flags.writeable
    assert not numbas(part)(array).flags.writeable
    assert not itself(array).flags.writeable


def test_a_copy_owns_its_memory():
    array = np.arange(4.0).view(Array)
    copied(array)
    result = copied(array)
    reference = weakref.ref(array)
    del array
    gc.collect()
    assert reference() is None and result.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_same_array_returned_twice():
    @fast_args
    def twice(x):
        return x, x, x[1:]

    array = np.arange(4.0)
    before = sys.getrefcount(array)
    for _ in range(3):
        first, second, third = twice(array)
        assert first is array and second is array and third.tolist() == [1.0, 2.0, 3.0]
    del first, second, third
    gc.collect()
    assert sys.getrefcount(array) == before


def test_a_typed_list_keeps_arrays():
    container = numba.typed.List.empty_list(numba.float64[::1])
    arrays = [np.full(3, float(i)).view(Array) for i in range(5)]
    references = [weakref.ref(array) for array in arrays]
    for array in arrays:
        keep(container, array)
    del array, arrays
    gc.collect()
    assert [entry[0] for entry in container] == [0.0, 1.0, 2.0, 3.0, 4.0]
    del container
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


# ---- every framework -----------------------------------------------------------------------------------------------


def test_results_hold_the_right_memory(framework):
    view = np.arange(4.0)
    tensor = framework.tensor(view)
    for _ in range(3):
        result = itself(tensor)
        same = np.asarray(result if isinstance(result, np.ndarray) else view)
        assert same.ctypes.data == view.ctypes.data and same.tolist() == view.tolist()
        parts, (rest, five) = two_parts(tensor)
        assert (parts.tolist(), rest.tolist(), five) == ([0.0, 1.0], [2.0, 3.0], 5)
        assert parts.ctypes.data == view.ctypes.data


def test_results_outlive_the_tensor(framework):
    view = np.arange(1000.0)
    tensor = framework.tensor(view)
    part(tensor)
    result = part(tensor)
    del tensor, view
    gc.collect()
    noise = [np.full(1000, -1.0) for _ in range(50)]
    assert result.tolist() == [1.0, 2.0]
    del noise


@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kernel", [part, two_parts], ids=lambda kernel: kernel.__name__)
def test_an_export_is_held_as_long_as_the_result(kind, kernel):
    tensor, _ = counted(kind)
    kernel(tensor)
    gc.collect()
    assert tensor.ledger.out == 0
    results = [kernel(tensor) for _ in range(3)]
    assert tensor.ledger.out == 3
    del results[1]
    gc.collect()
    assert tensor.ledger.out == 2
    results.clear()
    gc.collect()
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.filterwarnings("ignore:unsafe cast from readonly")  # Numba's, for legacy exports
@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
def test_an_export_is_held_as_long_as_a_typed_list_holds_it(kind):
    tensor, _ = counted(kind)
    container = numba.typed.List.empty_list(numba.float64[::1])
    for _ in range(4):
        keep_part(container, tensor)
    gc.collect()
    assert tensor.ledger.out == 4
    assert [entry[0] for entry in container] == [1.0] * 4
    container.pop()
    gc.collect()
    assert tensor.ledger.out == 3
    del container
    gc.collect()
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
def test_an_array_handed_to_python_in_object_mode(kind):
    tensor, memory = counted(kind)
    held.clear()
    for _ in range(3):
        through_objmode(tensor)
    gc.collect()
    assert tensor.ledger.out >= 2
    assert all(array.ctypes.data == memory.ctypes.data and array[3] == 3.0 for array in held)
    held.clear()
    gc.collect()
    tensor.ledger.check(tensor.ledger.made)


def test_a_numpy_array_handed_to_python_in_object_mode():
    held.clear()
    array = np.arange(4.0).view(Array)
    for _ in range(3):
        through_objmode(array)
    reference = weakref.ref(array)
    del array
    gc.collect()
    assert reference() is not None and held[2].tolist() == [0.0, 1.0, 2.0, 3.0]
    held.clear()
    gc.collect()
    assert reference() is None


def test_an_array_that_a_producer_of_borrowed_views_does_not_export():
    """A kernel kept a borrowed view, and the producer refuses the export that would keep its memory: the tensor is kept."""

    @ffi.callback("int(void *, DLManagedTensorVersioned **)")
    def refuse(py_object, out):
        return -1

    cls = tabled_type("Refuses", managed_tensor_from_py_object_no_sync=refuse)
    tensor = cls(np.arange(4.0))
    part(tensor)
    result = part(tensor)
    reference = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert result.tolist() == [1.0, 2.0] and reference() is not None
    del result
    gc.collect()
    assert reference() is None


@needs_torch
def test_torch_memory_lives_as_long_as_a_result():
    tensor = torch.arange(4.0)
    part(tensor)
    address = tensor.data_ptr()
    result = part(tensor)
    del tensor
    gc.collect()
    junk = [torch.full((4,), -1.0) for _ in range(1000)]
    assert result.ctypes.data == address + 4 and result.tolist() == [1.0, 2.0]
    del junk


@needs_torch
def test_torch_tensors_die():
    class Mine(torch.Tensor):
        pass

    tensor = torch.arange(4.0).as_subclass(Mine)
    for kernel in (part, itself, two_parts):
        kernel(tensor)
        kernel(tensor)
    reference = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert reference() is None


# ---- nothing is left -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [itself, part, two_parts, copied], ids=lambda kernel: kernel.__name__)
def test_thousands_of_escapes_leave_nothing(kernel, framework):
    view = np.arange(4.0)
    tensor = framework.tensor(view)
    for _ in range(40):  # until nothing is left to compile
        kernel(tensor)
    if hasattr(tensor, "capsules"):
        tensor.capsules = Forgetful()
        tensor.asked = Forgetful()
    gc.collect()
    references = sys.getrefcount(tensor), sys.getrefcount(view)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4000):
            kernel(tensor)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (sys.getrefcount(tensor), sys.getrefcount(view)) == references
    assert after - before < 50_000
    ledger = getattr(tensor, "ledger", None)
    if ledger is not None:
        ledger.check(ledger.made)


class Forgetful(list):
    def append(self, item):
        pass


def test_memory_of_the_process_stays_flat():
    """Native memory too: of frames, of memory blocks of escaped arrays, of exports."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    run_python(
        """
        import gc, os
        import numpy as np
        from fastexchange import fast_args
        from made_producers import Dunder, Legacy, Tabled
        try:
            import torch
        except ImportError:
            torch = None

        @fast_args
        def part(x, *more):
            return x[1:]

        @fast_args
        def refuses(x):
            if x[0] == 0:
                raise ValueError("no")
            return x

        def resident():
            gc.collect()
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        class Forgetful(list):
            def append(self, item):
                pass

        array = np.arange(1000.0)
        tensors = [array, Tabled(array), Dunder(array), Legacy(array)]
        for tensor in tensors[2:]:
            tensor.capsules = tensor.asked = Forgetful()
        if torch is not None:
            tensors.append(torch.from_numpy(array))

        def work(times):
            for _ in range(times):
                for tensor in tensors:
                    part(tensor)
                    part(tensor, 1, None, 2.5, (1, 2))
                    try:
                        refuses(tensor)
                    except ValueError:
                        pass

        work(3000)
        before = resident()
        work(15_000)
        grown = resident() - before
        assert grown < 4_000_000, grown
        """
    )


def test_an_escaped_array_at_exit():
    run_python(
        """
        import numpy as np
        from fastexchange import fast_args
        from made_producers import Dunder, Tabled
        try:
            import torch
        except ImportError:
            torch = None

        @fast_args
        def part(x):
            return x[1:]

        kept = [part(kind(np.arange(4.0))) for kind in (np.asarray, Dunder, Tabled) for _ in range(3)]
        if torch is not None:
            kept.append(part(torch.arange(4.0)))
        """
    )


@pytest.mark.parametrize("producer", ["Dunder", "Legacy", "Tabled"])
def test_views_that_outlive_their_producers_module(producer):
    """At exit a deleter made in Python is gone before the last array is: it must not be called."""
    run_python(
        f"""
        import numpy as np
        from made_producers import {producer}
        from fastexchange import fast_args, from_dlpack

        kept = [from_dlpack({producer}(np.ones(3))), fast_args(lambda x: x[1:])({producer}(np.ones(3)))]
        kept.append(kept)
        np.kept = kept
        """
    )
