"""A kernel as a Python callable: how its arguments bind, and all else that functions can do."""

import functools
import gc
import inspect
import sys
import weakref
from functools import partial

import numba
import numpy as np
from frameworks import torch
from made_producers import Dunder, Tabled
from numba import float64, int64
from oracle import numbas, references_kept, type_and_message
from raising import check_raises
from test_lists import Pair, first_doubled
from ways import Acting

from fastexchange import FastKernel, KernelCounts, fast_args
from fastexchange.torch.tracing import prepare_tracing


def plain(a, b, c=3, d=4):
    """Four parameters, two with defaults."""
    return a * 1000 + b * 100 + c * 10 + d


def keyword_only(a, b=3, *, c, d=4):
    return a * 1000 + b * 100 + c * 10 + d


positional_only, nothing = (lambda a, b=2, /, c=3: a * 100 + b * 10 + c), (lambda: 17)
variadic, variadic_with_default = (lambda a, *rest: a * 10 + len(rest)), (lambda a, b=7, *rest: a * 100 + b * 10 + len(rest))
FUNCTIONS = plain, positional_only, variadic, variadic_with_default, keyword_only, nothing
KERNELS = {function: fast_args(function) for function in FUNCTIONS}


# ---- binding -------------------------------------------------------------------------------------------------------
GOOD_CALLS = [
    partial(plain, 1, 2), partial(plain, 1, 2, 3), partial(plain, 1, 2, 3, 4), partial(plain, 1, b=5), partial(plain, b=5, a=6),
    partial(plain, 1, 2, d=9), partial(plain, 1, 2, d=9, c=8), partial(plain, d=1, c=2, b=3, a=4), partial(plain, 1, 2, 3, d=0),
    partial(positional_only, 1), partial(positional_only, 1, 5), partial(positional_only, 1, 5, 6),
    partial(positional_only, 1, c=9), partial(positional_only, 1, 4, c=9),
    partial(variadic, 1), partial(variadic, 1, 2), partial(variadic, 1, 2, 3, 4, 5), partial(variadic, a=4),
    partial(variadic_with_default, 1), partial(variadic_with_default, 1, 2), partial(variadic_with_default, 1, 2, 3, 4),
    partial(variadic_with_default, 1, b=3), partial(variadic_with_default, b=3, a=2), partial(nothing),
    partial(keyword_only, 1, c=2), partial(keyword_only, 1, 2, c=5), partial(keyword_only, 1, d=1, c=2, b=5),
]  # fmt: skip
BAD_CALLS = [
    partial(plain), partial(plain, 1), partial(plain, 1, 2, 3, 4, 5), partial(plain, 1, 2, 3, 4, 5, 6, d=1),
    partial(plain, 1, 2, e=5), partial(plain, 1, 2, a=5), partial(plain, 1, 2, 3, 4, c=5), partial(plain, 1, c=5),
    partial(plain, a=5), partial(plain, 1, 2, **{"": 5}),
    partial(positional_only), partial(positional_only, a=1), partial(positional_only, 1, b=1),
    partial(positional_only, 1, 2, 3, 4), partial(positional_only, 1, 2, 3, c=4),
    partial(variadic), partial(variadic, 1, rest=3), partial(variadic, 1, 2, a=3),
    partial(variadic_with_default, b=1), partial(variadic_with_default, 1, 2, 3, b=1), partial(nothing, 1), partial(nothing, a=1),
    partial(keyword_only, 1), partial(keyword_only, 1, d=2),
]  # fmt: skip


def test_arguments_bind_as_in_python():
    for call in GOOD_CALLS:
        kernel = KERNELS[call.func]
        first, before = kernel(*call.args, **call.keywords), kernel.counts()
        assert first == kernel(*call.args, **call.keywords) == call(), call
        assert kernel.counts() == before._replace(fast=before.fast + 1), call
        launch = kernel.bind(*call.args, **call.keywords)
        assert [launch() for _ in range(3)] == [call()] * 3, call
        assert call.func is not keyword_only or launch.rebind(a=7)() == call() + 6000


def test_a_call_that_does_not_bind_raises_pythons_own_type_error_and_keeps_no_reference():
    for call in BAD_CALLS:
        kernel, array = KERNELS[call.func], np.ones(3)
        assert type_and_message(kernel, *call.args, **call.keywords) == type_and_message(call)
        with references_kept(array, kernel):
            for _ in range(5):
                type_and_message(kernel, *[array] * len(call.args), **dict.fromkeys(call.keywords, array))


def test_keyword_names_that_are_not_interned_or_of_a_subclass_of_str():
    kernel, name = fast_args(lambda long_parameter_name, other=1: long_parameter_name + other), "long_parameter_name"
    assert kernel(**{name: 5}) == 6 and kernel(**{name[:4] + name[4:]: 5, "other": 2}) == 7
    assert type_and_message(kernel, 1, **{name[:4] + name[4:]: 5})[0] is TypeError
    assert kernel(5, **{type("Text", (str,), {})("other"): 9}) == 14


def test_defaults_of_every_kind():
    kernel = fast_args(lambda x=None, y=2.5, z=True, t=(1, 2), s="text": ((x is None), y, z, t[1], len(s)))
    array = np.arange(3.0)
    for _ in range(2):
        assert kernel() == numbas(kernel)() == (True, 2.5, True, 2, 4)
        assert kernel(array, t=(5, 6)) == (False, 2.5, True, 6, 4)
    assert kernel(None) == kernel() and kernel.counts() == (3, 3, 3), "an omitted default has a type of its own"


def test_defaults_are_the_functions_own_when_it_was_decorated():
    function = lambda a, b=2: a + b  # noqa: E731
    wrapping = functools.wraps(function)(lambda a, b=4: a + b)
    assert fast_args(wrapping)(3) == numba.njit(wrapping)(3) == 7
    kernel = fast_args(function)
    assert kernel(1) == numbas(kernel)(1) == 3
    function.__defaults__ = (100,)
    assert kernel(1) == numbas(kernel)(1)


def test_bound_arguments_move_with_a_frame_that_grows():
    """A producer that calls kernels with keywords, in a call with keywords whose frame was too small."""
    big = fast_args(lambda t, x, a: np.array(t).sum() + x[0] * 1000 + a * 1e6)
    other, outer = fast_args(lambda u, v, w: 0.0), fast_args(lambda x: x[0])
    numbers, negative = tuple(map(float, range(100))), tuple(-float(i) for i in range(100))
    producer, first, results = Acting(np.ones(3)), Acting(np.ones(3)), []

    def call_other():
        producer.act = None
        other(u=negative, v=producer, w=5.0)

    for _ in range(3):
        big(t=numbers, x=producer, a=1.0)
    other(u=negative, v=1.0, w=5.0), other(u=negative, v=producer, w=5.0), outer(producer)
    first.act, producer.act = lambda: results.append(big(t=numbers, x=producer, a=1.0)), call_other
    outer(first)
    assert results == [1005950.0]


def test_a_kernel_counts_its_calls_by_path_and_is_equal_to_itself_only():
    kernel, other = fast_args(plain), fast_args(plain)
    assert kernel.signatures == [] and kernel.counts() == KernelCounts(0, 0, 0)
    for count in range(11):
        kernel(1, 2, 3, 4)
        assert kernel.counts() == KernelCounts(fast=count, slow=1, compiled=1)
    assert kernel.signatures == list(kernel.overloads) == [(int64, int64, int64, int64)]
    kernel(1.0, 2, 3, 4)
    assert type_and_message(kernel, 1)[0] is TypeError and kernel.counts() == KernelCounts(fast=10, slow=2, compiled=2)
    kernel.note = "mine"
    assert kernel.note == vars(kernel)["note"] == "mine"
    del kernel.note
    assert not hasattr(kernel, "note") and kernel == kernel != other and len({kernel, other, kernel}) == 2


def test_a_kernel_is_a_method_like_a_function():
    class Number(float):
        add, combine, static = fast_args(lambda self, other: self + other), KERNELS[plain], staticmethod(KERNELS[plain])

    assert inspect.ismethod(Number().add) and Number.add is Number.__dict__["add"]
    assert KERNELS[plain].__call__(1, 2) == FastKernel.__call__(KERNELS[plain], 1, c=3, b=2) == plain(1, 2)
    assert Number(1.5).add(2.0) == 3.5 and Number.static(1, 2) == Number().static(1, 2) == plain(1, 2)
    assert Number(1).combine(2) == plain(1, 2) and Number(1).combine(2, d=9) == plain(1, 2, d=9)
    bound = KERNELS[plain].__get__(1)
    assert bound.__self__ == 1 and bound.__func__ is KERNELS[plain] and bound(2, d=9) == bound(2, d=9) == plain(1, 2, d=9)
    assert type_and_message(bound, 2, a=1) == type_and_message(plain.__get__(1), 2, a=1)


# ---- life and death ------------------------------------------------------------------------------------------------
def test_kernels_can_be_weakly_referenced_and_die():
    for fate in (lambda kernel: kernel(1), lambda kernel: [kernel(1), setattr(kernel, "itself", kernel)], type_and_message):
        kernel = fast_args(lambda x: x + 1)
        reference = weakref.ref(kernel)
        fate(kernel)
        assert reference() is kernel
        del kernel
        gc.collect()
        assert reference() is None


def test_a_deep_chain_of_kernels_is_freed():
    kernel = None
    for _ in range(100_000):
        link = FastKernel.__new__(FastKernel)
        link.next = kernel
        kernel = link
    reference = weakref.ref(kernel)
    del kernel, link
    gc.collect()
    assert reference() is None
    assert type_and_message(FastKernel.__new__(FastKernel), 1)[0] in (TypeError, AttributeError)


def test_a_kernel_dropped_while_it_runs():
    holder = []

    @numba.njit
    def drop_it(x):
        with numba.objmode():
            holder.clear()
            gc.collect()
        return x + 1

    for _ in range(2):
        holder.append(fast_args(drop_it))
        assert holder[0](1) == 2 and holder == []


def test_a_refusal_leaves_no_cycle():
    """Also where Dynamo has traced a kernel."""
    kernel, refuses, array, strange = fast_args(lambda x, y: 1), Acting(np.ones(1)), np.ones(3), Tabled(np.ones(3), lanes=2)
    refuses.act = {}.popitem
    if torch is not None and hasattr(torch.library, "register_vmap"):
        prepare_tracing(id(kernel))
    gc.collect(), gc.disable()
    try:
        before, objects = sys.getrefcount(array), []
        for tensor, kind, times in ((refuses, KeyError, 4), (strange, BufferError, 1), (strange, BufferError, 100)):
            assert [type_and_message(kernel, array, tensor)[0] for _ in range(times)] == [kind] * times
            assert sys.getrefcount(array) == before
            objects.append(len(gc.get_objects()))
        assert abs(objects[2] - objects[1]) < 50
    finally:
        gc.enable()


def test_a_subclass_that_overrides_call_is_asked_and_another_stays_native_until_it_does():
    class Counted(FastKernel):
        count = 0

        def __call__(self, *args, **kwargs):
            self.count += 1
            return super().__call__(*args, **kwargs)

    labelled = type("Labelled", (FastKernel,), {"count": 3})
    for cls in (Counted, type("More", (Counted,), {}), labelled):
        kernel = cls(numba.njit(plain))
        assert [kernel(1, 2, d=5) for _ in range(3)] == [plain(1, 2, d=5)] * 3
        assert kernel.count == 3 and kernel.counts() == KernelCounts(fast=2, slow=1, compiled=1)
    if sys.version_info >= (3, 12):  # before, a class keeps its vectorcall when __call__ is set
        labelled.__call__ = lambda self, *arguments: "overridden"
        assert type(kernel).__call__(kernel, 1, 2) == kernel(1, 2) == "overridden"


# ---- the decorator -------------------------------------------------------------------------------------------------
def test_options_are_those_of_njit_with_and_without_parentheses():
    divide = lambda a, b: a / b  # noqa: E731
    assert fast_args(error_model="numpy")(divide)(1.0, 0.0) == np.inf
    assert type_and_message(fast_args(divide), 1.0, 0.0)[0] is ZeroDivisionError
    kernel, third = fast_args(plain, fastmath=True, nogil=True), fast_args(boundscheck=True)(lambda x: x[3])
    assert kernel.targetoptions["fastmath"] is True and kernel.targetoptions["nogil"] is True and kernel(1, 2) == plain(1, 2)
    assert [type_and_message(third, np.ones(3)) for _ in range(2)] == [(IndexError, "index is out of bounds")] * 2


SIGNATURES = ["int64(int64)", int64(int64), (int64,), ["int64(int64)"], ["int64(int64)", "float64(float64)"], [(int64,)]]


def test_explicit_signatures_are_given_first_as_for_njit():
    for signature in SIGNATURES:
        double = fast_args(signature)(lambda x: x * 2)
        assert double(3) == double(3) == 6 and double.counts().fast == 1
        assert double.signatures[0] == (int64,) and not double._can_compile
    divide = fast_args("float64(float64, float64)", error_model="numpy")(lambda a, b: a / b)
    assert divide(1, 0) == np.inf and divide.signatures == [(float64, float64)]


def test_what_cannot_be_decorated_or_given_is_a_type_error():
    for thing in (type("AClass", (), {}), len, 3, [1, 2], object(), np.sin, b""):
        for options in ({}, {"fastmath": True}):
            check_raises(TypeError, r"fast_args\(\)", fast_args, thing, **options)
    for given in (numba.njit(plain), fast_args(plain)):
        check_raises(TypeError, "fastmath", fast_args, given, fastmath=True)


def test_with_numbas_compiler_off_functions_run_as_python(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)

    @fast_args
    def scaled(x, by=2.0):
        assert type(x) in {np.ndarray}, "which Numba does not compile"
        x *= by
        return x.sum()

    @fast_args(out="x[n] -> y[n + 1]")
    def longer(x, by=1.0, y=None):
        y[0], y[1:] = 0, x + by

    array, same = np.ones(3), fast_args("float64(float64)", cache=False)(lambda x: x)
    assert scaled(array) == 6.0 and scaled(Dunder(array), by=3) == 18.0 and same(2.5) == 2.5
    assert scaled.py_func is scaled.__wrapped__ and longer(np.ones(2)).tolist() == [0.0, 2.0, 2.0]
    out = np.empty(3)
    assert longer(np.ones(2), 2.0, out) is out and out.tolist() == [0.0, 3.0, 3.0]
    listed = [np.ones(1), second := np.ones(2)]
    assert fast_args(first_doubled.py_func)(listed) is listed and len(listed) == 3 and listed[0] is listed[1] is second
    one, jitted = numba.njit(lambda: 1), type("Jitted", (), {"value": 2})()
    assert fast_args(lambda function, ob, *, x: (function() + ob.value, x))(one, jitted, x="text") == (3, "text")
    if torch is not None:
        x, y = torch.ones(3), torch.ones(3)
        same, new, view = fast_args(lambda x, y: (x, x + y, y[1:]))(x, y)
        assert same is x and type(new) is type(view) is torch.Tensor and view.data_ptr() == y.data_ptr() + 4
        pair = fast_args(lambda x: Pair(x, x + 1))(x)
        assert type(pair) is Pair and pair.left is x and type(pair.right) is torch.Tensor
        assert type(fast_args(returns="y")(lambda x, y: x + y)(x, np.ones(3))) is np.ndarray
        assert type(fast_args(returns=torch.Tensor)(lambda x: x + 1)(np.ones(3))) is torch.Tensor

        leaf, negated = torch.ones(3, requires_grad=True), (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag
        careful, allowing = fast_args(lambda x: x.sum()), fast_args(lambda x: x.sum(), grad="allow")
        assert allowing(leaf) == careful(leaf.detach()) == 3.0
        refused = [type_and_message(*call)[0] for call in ((careful, leaf), (careful, negated), (allowing, negated))]
        assert refused == [BufferError] * 3


def test_explain_says_who_makes_a_call_and_shows_no_type_of_ours_for_a_default():
    @fast_args
    def generates(x, by=2.0, *, s="text"):
        for value in x:  # noqa: UP028
            yield value

    array, refused = np.ones(2), str(generates.explain(object()))
    assert list(generates(array)) == [1.0, 1.0] and "Numba's own dispatcher makes this call" in str(generates.explain(array))
    assert "refused with TypeError" in refused and "mitted" not in refused.replace("omitted: the default", "")


def test_an_array_subclass_may_call_anything_dtype():
    kernel, odd = fast_args(lambda x: x.size), type("Odd", (np.ndarray,), {"dtype": property(lambda self: {}["mine"])})
    for dtype in ("M8[s]", "f8"):
        array = np.zeros(3, dtype).view(odd)
        assert [kernel(array) for _ in range(4)] == [3] * 4
    check_raises((BufferError, TypeError, numba.core.errors.NumbaError), None, kernel, np.zeros(3, ">f8").view(odd))


def test_a_try_catches_nothing_that_has_not_been_raised():
    """Whatever calls have left on the stack, by each way into the kernel."""

    @fast_args
    def checked(x, limit):
        try:
            if x[0] > limit:
                raise ValueError("large")
        except Exception:
            return -1
        return 1

    for x in (np.zeros(2), Dunder(np.zeros(2))):
        launch = checked.bind(x, 1.0)
        for _ in range(4):
            assert checked(x, 1.0) == checked(x, limit=1.0) == launch() == 1 and checked(x, -1.0) == -1
            str(np.zeros(2))
