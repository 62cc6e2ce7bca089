"""A kernel is a dispatcher of Numba's: wherever Numba takes one, and whatever one has."""

import pickle
from typing import get_args, get_origin

import numba
import numpy as np
import pytest
from children import accelerating
from frameworks import torch
from interpreter import run_python
from numba import float64, int64, types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, overload, register_model, typeof_impl
from oracle import type_and_message
from raising import check_raises

import fastexchange
from fastexchange import BoundLaunch, FastKernel, fast_args

WARM = 4
doubled = fast_args(lambda x: 2 * x)
halved, squared = (fast_args("float64(float64)")(each) for each in (lambda x: x / 2, lambda x: x * x))


def test_attributes():
    @fast_args(fastmath=True)
    def kernel(x, y=2):
        """Words."""
        return x * y

    plain, x = numba.njit(fastmath=True)(kernel.py_func), np.ones(3)
    assert kernel(x, 3).tolist() == plain(x, 3).tolist()
    names = "__code__ __name__ __qualname__ __module__ __doc__ __defaults__ __wrapped__ doc targetoptions locals signatures"
    for name in names.split():
        assert getattr(kernel, name) == getattr(plain, name), name
    assert list(kernel.overloads) == list(plain.overloads) and set(kernel.get_metadata()) == set(plain.get_metadata())
    assert list(map(str, kernel.nopython_signatures)) == list(map(str, plain.nopython_signatures))
    assert kernel.stats.cache_path is None and sum(kernel.stats.cache_misses.values()) == 1
    assert callable(kernel.inspect_types) and [len(kernel.inspect_llvm()), len(kernel.inspect_asm())] == [1, 1]
    assert kernel.compile((int64, int64)) is not None and (int64, int64) in kernel.overloads
    assert kernel.get_overload((int64, int64)) is kernel.overloads[int64, int64].entry_point


@pytest.mark.parametrize("inline", ["always", lambda expression, caller, callee: True])
def test_what_is_inlined_has_no_code_of_its_own(inline):
    inner = fast_args(inline=inline)(lambda x: x + 1)
    assert fast_args(lambda x: inner(x) * 2)(3) == 8 and inner.signatures == []


def test_first_class_functions():
    all_of = numba.njit(lambda functions, x: functions[0](x) + functions[1](x))
    apply = fast_args(float64(types.FunctionType(float64(float64)), float64))(lambda function, x: function(x))
    assert all_of((halved, squared), 4.0) == fast_args(all_of)((halved, squared), 4.0) == 18.0
    assert [apply(halved, 4.0), apply(squared, 4.0), apply(numba.njit(halved.py_func), 6.0)] == [2.0, 16.0, 3.0]


def test_ufuncs_callbacks_stencils_and_overloads():
    array, increments, neighbours = np.arange(5.0), fast_args(lambda x: x + 1), lambda a: a[-1] + a[1]
    assert numba.vectorize([float64(float64)])(increments)(2.0) == numba.cfunc("float64(float64)")(increments).ctypes(2.0) == 3.0
    assert numba.stencil(fast_args(neighbours))(array).tolist() == numba.stencil(neighbours)(array).tolist()

    overload(thrice := lambda x: None)(lambda x: fast_args(lambda x: 3 * x).py_func)
    assert fast_args(lambda x: thrice(x))(2) == 6


def test_compilation_that_is_disabled_and_code_that_is_added():
    kernel = fast_args(lambda x: x + 1)
    assert [kernel(1.5) for _ in range(WARM)] == [2.5] * WARM
    kernel.disable_compile()
    assert [type(kernel(2)) for _ in range(WARM)] == [float] * WARM  # by the code for floats
    kernel.disable_compile(False)
    assert [type(kernel(2)) for _ in range(WARM)] == [int] * WARM and kernel.signatures == [(float64,), (int64,)]
    kernel, other = fast_args(lambda x: x + 1), numba.njit(lambda x: x + 10)
    assert [kernel(1) for _ in range(WARM)] == [2] * WARM
    other(1), other(1.5)
    kernel.disable_compile()
    assert kernel(True) == 2
    for compiled in other.overloads.values():
        kernel.add_overload(compiled)
    assert [(kernel(1), kernel(1.5)) for _ in range(WARM)] == [(11, 11.5)] * WARM


def test_a_subclass_that_compiles_in_its_own_way():
    class Counted(FastKernel):
        def compile(self, sig):
            self.compiled = getattr(self, "compiled", 0) + 1
            return super().compile(sig)

    counted = Counted(doubled.py_func, targetoptions={"nopython": True})
    assert [counted(np.ones(1)).tolist() for _ in range(WARM)] == [[2.0]] * WARM and counted.compiled >= 1
    assert counted.counts().fast >= WARM - 2


def test_a_dispatcher_is_taken_over():
    plain, x = numba.njit(fastmath=True, nogil=True)(doubled.py_func), np.ones(2)
    assert plain(x).tolist() == [2.0, 2.0]
    kernel = fast_args(plain)
    assert kernel.targetoptions == plain.targetoptions and list(kernel.overloads) == list(plain.overloads)
    code = kernel.overloads[kernel.signatures[0]]
    assert [kernel(x).tolist() for _ in range(WARM)] == [[2.0, 2.0]] * WARM
    assert code is plain.overloads[plain.signatures[0]] and kernel.stats.cache_misses == {}
    del plain
    assert numba.njit(lambda x: kernel(x))(x).tolist() == [2.0, 2.0]
    assert fast_args(halved, grad="allow").signatures == halved.signatures
    kind, message = type_and_message(fast_args(numba.njit("float64(float64)")(doubled.py_func)), "text")
    assert kind is TypeError and "float64" in message


def test_importing_and_decorating_load_and_compile_nothing():
    """A package's kernels are decorated while it is imported, when what it adds to Numba is not complete."""
    run_python(
        """
        import sys
        import numba, numpy as np
        from numba.core import entrypoints, registry
        from numba.core.typing.context import BaseContext
        asked = []
        entrypoints.init_all = lambda: asked.append("extensions")
        BaseContext.refresh = lambda self, refresh=BaseContext.refresh: (asked.append("typing"), refresh(self))[1]
        target = type(registry.cpu_target.target_context)
        target.refresh = lambda self, refresh=target.refresh: (asked.append("lowering"), refresh(self))[1]
        import fastexchange
        from fastexchange import FastKernel, fast_args
        assert not {"torch", "tvm_ffi", "cffi"} & {*sys.modules}, sys.modules
        before = set(sys.modules)
        kernels = [fast_args(lambda x: x), fast_args(nogil=True)(lambda x: x), fast_args(numba.njit(lambda x: x))]
        kernels.append(fast_args(cache=False, out="x[n] -> y[n]")(lambda x, y: y.fill(0)))
        assert not asked and not [name for name in set(sys.modules) - before if "dispatch." in name]
        cache = getattr(sys.modules.get("fastexchange.ground.cfunction"), "code_cache", None)
        assert cache is None or cache.misses == cache.hits == 0
        from fastexchange.ground.numba_extensions import extensions
        assert (extensions(), "numba.np.arraymath" in sys.modules) == ({}, False)
        kernels[0](1)
        assert {"extensions", "typing"} <= {*asked}
        """
    )


Marked = type("Marked", (np.ndarray,), {"__numba_array_subtype_dispatch__": True})


class MarkedType(types.Array):
    key = property(lambda self: (*super().key, "marked"))
    box_type = Marked

    def __init__(self, dtype, ndim, layout, readonly=False, aligned=True):
        super().__init__(dtype, ndim, layout, readonly=readonly, aligned=aligned, name=f"Marked({dtype}, {ndim}, {layout})")

    def copy(self, dtype=None, ndim=None, layout=None, readonly=None):
        return MarkedType(dtype or self.dtype, self.ndim if ndim is None else ndim, layout or self.layout, not self.mutable)


register_model(MarkedType)(numba.core.datamodel.models.ArrayModel)


@typeof_impl.register(Marked)
def _type_of_marked(value, context):
    plain = numba.typeof(value.view(np.ndarray))
    return MarkedType(plain.dtype, plain.ndim, plain.layout, readonly=not plain.mutable)


@intrinsic
def marked(typing_context, array):
    return MarkedType(array.dtype, array.ndim, array.layout)(array), lambda context, builder, signature, arguments: (
        impl_ret_borrowed(context, builder, signature.return_type, arguments[0])
    )


# Numba keeps the type of an array of any class by dtype, rank and order, and takes it for that of misaligned ones, too.
MARKED = np.asfortranarray(np.arange(8, dtype="c8").reshape(4, 2)).view(Marked)


@pytest.mark.parametrize(("function", "x"), [
    (lambda x, y: marked(x[1:]), np.arange(4.0)), (lambda x, y: (marked(x[1:]), marked(np.zeros(2))), np.arange(4.0)),
    (lambda x, y: x, MARKED), (lambda x, y: x[1:], MARKED), (lambda x, y: (x, x[:2]), MARKED),
])  # fmt: skip
def test_arrays_of_a_class_of_the_users(function, x):
    kernel, want = fast_args(function), numba.njit(function)(x, 1.0)
    for tensor in [np.asarray] + ([torch.from_numpy] if torch is not None else []):
        given = (x, tensor(np.ones(2))) if x is MARKED else (tensor(x), 1.0)
        for _ in range(WARM):
            got = kernel(*given)
            for one, expected in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
                assert type(one) is type(expected) is Marked and one.tolist() == expected.tolist()


def test_an_argument_that_is_nothing_to_numba():
    for error in ((TypeError,), (numba.TypingError,)) * 2:
        raised = check_raises(error, "'x' .position 0.: an object of type object is no tensor", doubled, object())
    made = pickle.loads(pickle.dumps(raised))
    assert type(made) is type(raised) and str(made) == str(raised)


def test_numbas_own_internal_functions_are_kernels_as_well():
    with accelerating():
        assert numba.njit(lambda n: np.sort(np.arange(n))[-1])(4) == 3


def test_annotations_name_parameters_and_results():
    assert get_origin(FastKernel[..., float]) is FastKernel and get_args(BoundLaunch[float]) == (float,)


def test_an_import_that_fails_says_why(monkeypatch):
    """Of an AttributeError in a module's ``__getattr__`` Python's ``import`` says that there is no such name."""
    monkeypatch.delitem(vars(fastexchange), "explain", raising=False)
    monkeypatch.setattr(fastexchange, "_import_module", lambda *_: object().absent)
    with pytest.raises(ImportError, match="explain cannot be imported: 'object' object has no attribute 'absent'"):
        from fastexchange import explain  # noqa: F401
