"""A kernel as a Python callable: how its arguments bind, and all else that functions can do."""

import copy
import functools
import gc
import inspect
import pickle
import sys
import weakref
from functools import partial

import numba
import numpy as np
import pytest
from forked import fork_python
from made_producers import Dunder
from numba import float64, int64
from oracle import numbas, references_kept, type_and_message

from fastexchange import FastKernel, KernelCounts, fast_args


def plain(a, b, c=3, d=4):
    """Four parameters, two with defaults."""
    return a * 1000 + b * 100 + c * 10 + d


def positional_only(a, b=2, /, c=3):
    return a * 100 + b * 10 + c


def variadic(a, *rest):
    return a * 10 + len(rest)


def variadic_with_default(a, b=7, *rest):
    return a * 100 + b * 10 + len(rest)


def nothing():
    return 17


KERNELS = {function: fast_args(function) for function in (plain, positional_only, variadic, variadic_with_default, nothing)}


sum_of = fast_args(lambda x: x.sum())
one = fast_args(lambda x, y=1: 1)


# ---- binding -------------------------------------------------------------------------------------------------------

GOOD_CALLS = [
    partial(plain, 1, 2), partial(plain, 1, 2, 3), partial(plain, 1, 2, 3, 4), partial(plain, 1, b=5), partial(plain, b=5, a=6),
    partial(plain, 1, 2, d=9), partial(plain, 1, 2, d=9, c=8), partial(plain, d=1, c=2, b=3, a=4), partial(plain, 1, 2, 3, d=0),
    partial(positional_only, 1), partial(positional_only, 1, 5), partial(positional_only, 1, 5, 6),
    partial(positional_only, 1, c=9), partial(positional_only, 1, 4, c=9),
    partial(variadic, 1), partial(variadic, 1, 2), partial(variadic, 1, 2, 3, 4, 5), partial(variadic, a=4),
    partial(variadic_with_default, 1), partial(variadic_with_default, 1, 2), partial(variadic_with_default, 1, 2, 3, 4),
    partial(variadic_with_default, 1, b=3), partial(variadic_with_default, b=3, a=2), partial(nothing),
]  # fmt: skip
BAD_CALLS = [
    partial(plain), partial(plain, 1), partial(plain, 1, 2, 3, 4, 5), partial(plain, 1, 2, 3, 4, 5, 6, d=1),
    partial(plain, 1, 2, e=5), partial(plain, 1, 2, a=5), partial(plain, 1, 2, 3, 4, c=5), partial(plain, 1, c=5),
    partial(plain, a=5), partial(plain, 1, 2, **{"": 5}),
    partial(positional_only), partial(positional_only, a=1), partial(positional_only, 1, b=1),
    partial(positional_only, 1, 2, 3, 4), partial(positional_only, 1, 2, 3, c=4),
    partial(variadic), partial(variadic, 1, rest=3), partial(variadic, 1, 2, a=3),
    partial(variadic_with_default, b=1), partial(variadic_with_default, 1, 2, 3, b=1), partial(nothing, 1), partial(nothing, a=1),
]  # fmt: skip


def described(call: partial) -> str:
    listed = [*map(repr, call.args), *(f"{name}={value}" for name, value in call.keywords.items())]
    return f"{call.func.__name__}({', '.join(listed)})"


@pytest.mark.parametrize("call", GOOD_CALLS, ids=described)
def test_arguments_bind_as_in_python(call):
    kernel = KERNELS[call.func]
    assert kernel(*call.args, **call.keywords) == call()
    before = kernel.counts()
    assert kernel(*call.args, **call.keywords) == call()
    assert kernel.counts() == before._replace(fast=before.fast + 1), "the second call left the native path"


@pytest.mark.parametrize("call", BAD_CALLS, ids=described)
def test_a_call_that_does_not_bind_raises_pythons_own_type_error_and_keeps_no_reference(call):
    kernel = KERNELS[call.func]
    assert type_and_message(kernel, *call.args, **call.keywords) == type_and_message(call)
    array = np.ones(3)
    with references_kept(array, kernel):
        for _ in range(5):
            type_and_message(kernel, *[array] * len(call.args), **dict.fromkeys(call.keywords, array))


def test_keyword_names_that_are_not_interned_or_of_a_subclass_of_str():
    kernel = fast_args(lambda long_parameter_name, other=1: long_parameter_name + other)
    name = "".join(["l", "ong_parameter_name"])
    assert kernel(**{name: 5}) == 6
    assert kernel(**{name[:4] + name[4:]: 5, "other": 2}) == 7
    assert type_and_message(kernel, 1, **{name[:4] + name[4:]: 5})[0] is TypeError
    assert kernel(5, **{type("Text", (str,), {})("other"): 9}) == 14


def test_defaults_of_every_kind():
    @fast_args
    def kernel(x=None, y=2.5, z=True, t=(1, 2), s="text"):
        return (x is None), y, z, t[1], len(s)

    array = np.arange(3.0)
    for _ in range(2):
        assert kernel() == numbas(kernel)() == (True, 2.5, True, 2, 4)
        assert kernel(array, t=(5, 6)) == (False, 2.5, True, 6, 4)
    assert kernel.counts() == (2, 2, 2)


def test_defaults_are_the_functions_own_when_it_was_decorated():
    def function(a, b=2):
        return a + b

    @functools.wraps(function)
    def wrapping(a, b=4):
        return a + b

    assert fast_args(wrapping)(3) == numba.njit(wrapping)(3) == 7
    kernel = fast_args(function)
    assert kernel(1) == numbas(kernel)(1) == 3
    function.__defaults__ = (100,)
    assert kernel(1) == numbas(kernel)(1)


def test_an_omitted_default_and_the_same_value_given_are_different_types():
    @fast_args
    def kernel(a, b=None):
        if b is None:
            return a
        return a + b

    assert [kernel(1), kernel(1, None), kernel(1, 2), kernel(1), kernel(1, b=2)] == [1, 1, 3, 1, 3]


def test_keyword_only_parameters_as_numba_takes_them():
    """Numba treats them like the others, so a kernel can have them, too."""

    def function(x, *, k):
        return x * 10 + k

    kernel = fast_args(function)
    assert numba.njit(function)(1, k=2) == kernel(1, k=2) == kernel(1, k=2) == 12
    assert type_and_message(kernel, 1) == type_and_message(function, 1)


def test_bound_arguments_move_with_a_frame_that_grows():
    """A producer that calls kernels with keywords, in a call with keywords whose frame was too small."""

    class Calls(Dunder):
        hook = None

        def __dlpack__(self, **keywords):
            if self.hook:
                self.hook()
            return super().__dlpack__(**keywords)

    @fast_args
    def big(t, x, a):
        s = 0.0
        for value in t:
            s += value
        return s + x[0] * 1000 + a * 1e6

    other = fast_args(lambda u, v, w: 0.0)
    outer = fast_args(lambda x: x[0])
    numbers = tuple(float(i) for i in range(100))
    negative = tuple(-value for value in numbers)
    producer, first_producer, results = Calls(np.ones(3)), Calls(np.ones(3)), []
    for _ in range(3):
        big(t=numbers, x=producer, a=1.0)
    other(u=negative, v=1.0, w=5.0)
    other(u=negative, v=producer, w=5.0)
    outer(producer)

    def second():
        producer.hook = None
        other(u=negative, v=producer, w=5.0)

    def first():
        producer.hook = second
        results.append(big(t=numbers, x=producer, a=1.0))

    first_producer.hook = first
    outer(first_producer)
    assert results == [1005950.0]


# ---- what a function has -------------------------------------------------------------------------------------------


def test_what_a_function_has_and_its_unbound_calls():
    kernel = KERNELS[plain]
    assert isinstance(kernel, FastKernel) and callable(kernel)
    assert (kernel.__name__, kernel.__qualname__, kernel.__module__) == ("plain", "plain", __name__)
    assert kernel.__doc__ == plain.__doc__ and kernel.__wrapped__ is kernel.py_func is inspect.unwrap(kernel) is plain
    assert inspect.signature(kernel) == inspect.signature(plain)
    assert "plain" in repr(kernel) and "c=3" in repr(kernel)
    assert kernel.__call__(1, 2) == plain(1, 2)
    assert type(kernel).__call__(kernel, 1, 2, d=5) == plain(1, 2, d=5)
    assert list(map(kernel, [1, 2], [3, 4])) == [plain(1, 3), plain(2, 4)]


def test_a_kernel_is_a_dispatcher_an_object_with_attributes_and_equal_to_itself_only():
    kernel, other = fast_args(plain), fast_args(plain)
    assert isinstance(kernel, numba.core.registry.CPUDispatcher) and kernel.dispatcher is kernel
    assert numba.extending.is_jitted(kernel) and kernel.signatures == []
    kernel(1, 2, 3, 4)
    assert kernel.signatures == list(kernel.overloads) == [(int64, int64, int64, int64)]
    kernel.note = "mine"
    assert kernel.note == vars(kernel)["note"] == "mine"
    del kernel.note
    assert not hasattr(kernel, "note")
    assert kernel == kernel != other and len({kernel, other, kernel}) == 2


def test_stats_count_calls_by_path():
    kernel = fast_args(plain)
    assert kernel.counts() == KernelCounts(0, 0, 0)
    kernel(1, 2, 3, 4)
    assert kernel.counts() == KernelCounts(fast=0, slow=1, compiled=1)
    for _ in range(10):
        kernel(1, 2, 3, 4)
    assert kernel.counts() == KernelCounts(fast=10, slow=1, compiled=1)
    kernel(1.0, 2, 3, 4)
    assert type_and_message(kernel, 1)[0] is TypeError
    assert kernel.counts() == KernelCounts(fast=10, slow=2, compiled=2)


def test_a_kernel_is_a_method_like_a_function():
    class Number(float):
        add = fast_args(lambda self, other: self + other)
        combine = KERNELS[plain]
        static = staticmethod(KERNELS[plain])

    assert inspect.ismethod(Number().add) and Number.add is Number.__dict__["add"]
    assert Number(1.5).add(2.0) == 3.5 and Number.static(1, 2) == Number().static(1, 2) == plain(1, 2)
    assert Number(1).combine(2) == plain(1, 2) and Number(1).combine(2, d=9) == plain(1, 2, d=9)
    bound = KERNELS[plain].__get__(1)
    assert bound.__self__ == 1 and bound.__func__ is KERNELS[plain]
    assert bound(2, d=9) == bound(2, d=9) == plain(1, 2, d=9)
    assert type_and_message(bound, 2, a=1) == type_and_message(plain.__get__(1), 2, a=1)


# ---- life and death ------------------------------------------------------------------------------------------------


def in_a_cycle(kernel):
    kernel(1)
    kernel.itself = kernel


FATES = {"called": lambda kernel: kernel(1), "in a cycle": in_a_cycle, "failed": lambda kernel: type_and_message(kernel, ())}


@pytest.mark.parametrize("fate", FATES)
def test_kernels_can_be_weakly_referenced_and_die(fate):
    kernel = fast_args(lambda x: x + 1)
    reference = weakref.ref(kernel)
    FATES[fate](kernel)
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


def test_an_object_made_without_init_cannot_be_called_but_does_no_harm():
    fork_python(
        """
        from oracle import type_and_message
        from fastexchange import FastKernel
        assert type_and_message(FastKernel.__new__(FastKernel), 1)[0] in (TypeError, AttributeError)
        """
    )


def test_a_kernel_dropped_while_it_runs():
    holder = {}

    @numba.njit
    def drop_it(x):
        with numba.objmode():
            holder.clear()
            gc.collect()
        return x + 1

    for _ in range(2):
        holder["kernel"] = fast_args(drop_it)
        assert holder["kernel"](1) == 2 and holder == {}


def test_calls_keep_no_reference_to_arguments_or_result():
    kernel = KERNELS[variadic]
    array, text, singletons = np.ones(3), "some text".upper(), (None, True, False)
    for _ in range(40):  # what is compiled on the way holds some
        kernel(1, array, text), kernel(1, None, True, array)
    with references_kept(array, text, kernel):
        before = [sys.getrefcount(thing) for thing in singletons]
        for _ in range(10_000):
            kernel(1, array, text), kernel(1, None, True, array)
        after = [sys.getrefcount(thing) for thing in singletons]
    assert all(abs(y - x) < 1000 for x, y in zip(before, after, strict=True)), (before, after)


def test_a_refusal_leaves_no_cycle():
    class Refuses(Dunder):
        def __dlpack__(self, **keywords):
            raise KeyError("no")

    refuses, array = Refuses(np.ones(1)), np.ones(3)
    gc.collect()
    gc.disable()
    try:
        before = sys.getrefcount(array)
        assert [type_and_message(one, array, refuses)[0] for _ in range(20)] == [KeyError] * 20
        assert sys.getrefcount(array) == before
    finally:
        gc.enable()


# ---- copies and pickles --------------------------------------------------------------------------------------------


def test_copies_are_what_copies_of_numbas_dispatchers_are():
    kernel, dispatcher = KERNELS[plain], numba.njit(plain)
    for copier in (copy.copy, copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))):
        assert (copier(dispatcher) is dispatcher) == (copier(kernel) is kernel)
        assert copier(kernel)(1, 2) == plain(1, 2)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        kernel = pickle.loads(pickle.dumps(KERNELS[positional_only], protocol))
        assert type(kernel) is FastKernel and kernel(1, c=5) == positional_only(1, c=5)


def test_a_pickle_of_a_closure_works_in_another_process():
    factor = 3

    @fast_args
    def closure(x, n=2):
        return x * factor * n

    assert closure(1.0) == 6.0
    fork_python(
        """
        import pickle, sys
        kernel = pickle.loads(bytes.fromhex(sys.argv[1]))
        assert kernel(2.0) == 12.0 and kernel(2.0, n=1) == 6.0 and kernel.__name__ == "closure", kernel(2.0)
        """,
        pickle.dumps(closure).hex(),
    )


# ---- inside other jitted functions, and subclasses -----------------------------------------------------------------


def test_a_kernel_called_inside_jitted_functions_passed_to_them_and_in_closures():
    def outer(x):
        return sum_of(x) + 1

    @numba.njit
    def apply(function, x):
        return function(x)

    def doubled(function):
        return fast_args(lambda x: function(x) * 2)

    array = np.arange(4.0)
    assert numba.njit(outer)(array) == fast_args(outer)(array) == 7.0
    assert apply(sum_of, array) == apply(numba.njit(sum_of.py_func), array) == 6.0
    assert doubled(sum_of)(array) == 12.0 and doubled(doubled(sum_of))(array) == 24.0


class Counted(FastKernel):
    """Counts its calls."""

    count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("cls", [Counted, type("More", (Counted,), {})])
def test_a_subclass_that_overrides_call_is_asked(cls):
    kernel = cls(numba.njit(plain))
    for _ in range(3):
        assert kernel(1, 2, d=5) == plain(1, 2, d=5)
    assert kernel.count == 3 and kernel.counts() == KernelCounts(fast=2, slow=1, compiled=1)


def test_a_subclass_that_overrides_nothing_stays_native_until_call_is_overridden_later():
    class Labelled(FastKernel):
        label = "mine"

    kernel = Labelled(numba.njit(plain))
    assert [kernel(1, 2), kernel(1, 2), kernel.label] == [plain(1, 2), plain(1, 2), "mine"]
    assert kernel.counts().fast == 1
    if sys.version_info >= (3, 12):  # before, a class keeps its vectorcall when __call__ is set
        Labelled.__call__ = lambda self, *arguments: "overridden"
        assert type(kernel).__call__(kernel, 1, 2) == kernel(1, 2) == "overridden"


# ---- the decorator -------------------------------------------------------------------------------------------------


def test_options_are_those_of_njit_with_and_without_parentheses():
    def divide(a, b):
        return a / b

    assert fast_args()(plain)(1, 2) == plain(1, 2)
    assert fast_args(error_model="numpy")(divide)(1.0, 0.0) == np.inf
    assert type_and_message(fast_args(divide), 1.0, 0.0)[0] is ZeroDivisionError
    kernel = fast_args(plain, fastmath=True, nogil=True)
    assert kernel.targetoptions["fastmath"] is True and kernel.targetoptions["nogil"] is True
    assert kernel(1, 2) == plain(1, 2)
    third = fast_args(boundscheck=True)(lambda x: x[3])
    for _ in range(2):
        assert type_and_message(third, np.ones(3)) == (IndexError, "index is out of bounds")


def test_a_dispatcher_has_one_kernel_and_need_not_be_kept():
    dispatcher = numba.njit(plain)
    dispatcher(1, 2, 3, 4)
    kernel = fast_args(dispatcher)
    assert kernel.py_func is dispatcher.py_func and kernel is not dispatcher
    assert fast_args(dispatcher) is fast_args(kernel) is kernel
    assert kernel.signatures == [(int64, int64, int64, int64)]
    del dispatcher
    gc.collect()
    assert kernel(1, 2, 3, 4) == plain(1, 2, 3, 4) and len(kernel.signatures) == 1


SIGNATURES = ["int64(int64)", int64(int64), (int64,), ["int64(int64)"], ["int64(int64)", "float64(float64)"], [(int64,)]]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_explicit_signatures_are_given_first_as_for_njit(signature):
    double = fast_args(signature)(lambda x: x * 2)
    assert double(3) == double(3) == 6
    assert double.signatures[0] == (int64,) and not double._can_compile
    assert double.counts().fast == 1


def test_explicit_signatures_and_options():
    divide = fast_args("float64(float64, float64)", error_model="numpy")(lambda a, b: a / b)
    assert divide(1, 0) == np.inf and divide.signatures == [(float64, float64)]


def test_what_cannot_be_decorated_is_a_type_error():
    for thing in (type("AClass", (), {}), len, 3, [1, 2], object(), np.sin, b""):
        for options in ({}, {"fastmath": True}):
            kind, message = type_and_message(fast_args, thing, **options)
            assert kind is TypeError and "fast_args()" in message


def test_options_that_cannot_be_given_are_refused_where_the_kernel_is_decorated():
    """Numba looks at its options when it compiles, and raises KeyError."""
    for given, option in ((numba.njit(plain), "fastmath"), (fast_args(plain), "fastmath"), (plain, "no_such_option")):
        kind, message = type_and_message(fast_args, given, **{option: True})
        assert kind is TypeError and option in message


FACTOR = 1


def test_recompile_takes_up_changed_globals(monkeypatch):
    scaled = fast_args(lambda x: x * FACTOR)
    assert [scaled(2.0) for _ in range(40)] == [2.0] * 40
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5)
    assert scaled(2.0) == 2.0, "a global is a constant of the compiled code, as under @njit"
    scaled.recompile()
    assert [scaled(2.0) for _ in range(40)] == [10.0] * 40


def test_kernels_made_in_many_threads_at_once():
    fork_python(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np
        from fastexchange import fast_args

        class Sub(np.ndarray):
            pass

        start = threading.Barrier(6)

        def work(_):
            start.wait()
            kernel = fast_args(lambda x: x.size)
            assert [kernel(np.ones(4).view(Sub)) for _ in range(40)] == [4] * 40

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        """
    )


def test_with_numbas_compiler_off_functions_run_as_python():
    fork_python(
        """
        import numpy as np
        from made_producers import Dunder
        from fastexchange import fast_args

        @fast_args
        def scale(x, by=2.0):
            assert type(x) in {np.ndarray}, "which Numba does not compile"
            for i in range(x.shape[0]):
                x[i] *= by
            return x.sum()

        @fast_args("float64(float64)", cache=False)
        def same(x):
            return x

        array = np.ones(3)
        assert scale(array) == 6.0 and scale(Dunder(array), by=3) == 18.0 and same(2.5) == 2.5
        assert scale.py_func is scale.__wrapped__
        """,
        NUMBA_DISABLE_JIT="1",
    )


# ---- odd arguments -------------------------------------------------------------------------------------------------


def test_a_type_that_cannot_be_asked():
    class Meta(type):
        def __getattr__(cls, name):
            raise RuntimeError(f"do not ask for {name}")

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'x'.*position 0.*do not ask"):
            one(Meta("Mute", (), {})())


def test_explain_says_who_makes_a_call_and_shows_no_type_of_ours_for_a_default():
    @fast_args
    def generates(x, by=2.0, *, s="text"):
        for value in x:  # noqa: UP028
            yield value

    array = np.ones(2)
    assert list(generates(array)) == [1.0, 1.0]
    assert "Numba's own dispatcher makes this call" in str(generates.explain(array))
    refused = str(generates.explain(object()))
    assert "refused with TypeError" in refused and "mitted" not in refused.replace("omitted: the default", "")


def test_an_array_subclass_may_call_anything_dtype():
    class Odd(np.ndarray):
        @property
        def dtype(self):
            raise KeyError("mine")

    kernel = fast_args(lambda x: x.size)
    for dtype in ("M8[s]", "f8"):
        array = np.zeros(3, dtype).view(Odd)
        assert [kernel(array) for _ in range(40)] == [3] * 40
    with pytest.raises((BufferError, TypeError, numba.core.errors.NumbaError)):
        kernel(np.zeros(3, ">f8").view(Odd))


@pytest.mark.parametrize("make", [np.asarray, Dunder])
def test_a_try_catches_nothing_that_has_not_been_raised(make):
    """Whatever calls have left on the stack, by each way into the kernel."""

    @fast_args
    def checked(x, limit):
        try:
            if x[0] > limit:
                raise ValueError("large")
        except Exception:
            return -1
        return 1

    x = make(np.zeros(2))
    launch = checked.bind(x, 1.0)
    for _ in range(50):
        assert checked(x, 1.0) == checked(x, limit=1.0) == launch() == 1 and checked(x, -1.0) == -1
        str(np.zeros(2))
