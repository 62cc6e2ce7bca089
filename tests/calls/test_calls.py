"""A kernel as a Python callable: how its arguments bind, and all else that functions can do."""

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import sys
import weakref

import numba
import numpy as np
import pytest
from interpreter import run_python
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


FUNCTIONS = [plain, positional_only, variadic, variadic_with_default, nothing]
KERNELS = {function.__name__: fast_args(function) for function in FUNCTIONS}

# ---- binding -------------------------------------------------------------------------------------------------------

GOOD_CALLS = [
    (plain, (1, 2), {}),
    (plain, (1, 2, 3), {}),
    (plain, (1, 2, 3, 4), {}),
    (plain, (1,), {"b": 5}),
    (plain, (), {"b": 5, "a": 6}),
    (plain, (1, 2), {"d": 9}),
    (plain, (1, 2), {"d": 9, "c": 8}),
    (plain, (), {"d": 1, "c": 2, "b": 3, "a": 4}),
    (plain, (1, 2, 3), {"d": 0}),
    (positional_only, (1,), {}),
    (positional_only, (1, 5), {}),
    (positional_only, (1, 5, 6), {}),
    (positional_only, (1,), {"c": 9}),
    (positional_only, (1, 4), {"c": 9}),
    (variadic, (1,), {}),
    (variadic, (1, 2), {}),
    (variadic, (1, 2, 3, 4, 5), {}),
    (variadic, (), {"a": 4}),
    (variadic_with_default, (1,), {}),
    (variadic_with_default, (1, 2), {}),
    (variadic_with_default, (1, 2, 3, 4), {}),
    (variadic_with_default, (1,), {"b": 3}),
    (variadic_with_default, (), {"b": 3, "a": 2}),
    (nothing, (), {}),
]

BAD_CALLS = [
    (plain, (), {}),
    (plain, (1,), {}),
    (plain, (1, 2, 3, 4, 5), {}),
    (plain, (1, 2, 3, 4, 5, 6), {"d": 1}),
    (plain, (1, 2), {"e": 5}),
    (plain, (1, 2), {"a": 5}),
    (plain, (1, 2, 3, 4), {"c": 5}),
    (plain, (1,), {"c": 5}),
    (plain, (), {"a": 5}),
    (plain, (1, 2), {"": 5}),
    (positional_only, (), {}),
    (positional_only, (), {"a": 1}),
    (positional_only, (1,), {"b": 1}),
    (positional_only, (1, 2, 3, 4), {}),
    (positional_only, (1, 2, 3), {"c": 4}),
    (variadic, (), {}),
    (variadic, (1,), {"rest": 3}),
    (variadic, (1, 2), {"a": 3}),
    (variadic_with_default, (), {"b": 1}),
    (variadic_with_default, (1, 2, 3), {"b": 1}),
    (nothing, (1,), {}),
    (nothing, (), {"a": 1}),
]


def describe(call) -> str:
    function, arguments, keywords = call
    listed = [*map(repr, arguments), *(f"{name}={value}" for name, value in keywords.items())]
    return f"{function.__name__}({', '.join(listed)})"


@pytest.mark.parametrize("call", GOOD_CALLS, ids=describe)
def test_arguments_bind_as_in_python(call):
    function, arguments, keywords = call
    kernel = KERNELS[function.__name__]
    assert kernel(*arguments, **keywords) == function(*arguments, **keywords)
    before = kernel.counts()
    assert kernel(*arguments, **keywords) == function(*arguments, **keywords)
    assert kernel.counts() == before._replace(fast=before.fast + 1), "the second call left the native path"


@pytest.mark.parametrize("call", BAD_CALLS, ids=describe)
def test_a_call_that_does_not_bind_raises_pythons_own_type_error(call):
    function, arguments, keywords = call
    kernel = KERNELS[function.__name__]
    assert type_and_message(kernel, *arguments, **keywords) == type_and_message(function, *arguments, **keywords)


@pytest.mark.parametrize("call", BAD_CALLS, ids=describe)
def test_a_call_that_does_not_bind_keeps_no_reference(call):
    function, arguments, keywords = call
    kernel = KERNELS[function.__name__]
    array = np.ones(3)
    with references_kept(array, kernel):
        for _ in range(5):
            type_and_message(kernel, *[array] * len(arguments), **dict.fromkeys(keywords, array))


def test_keyword_names_that_are_not_interned():
    name = "".join(["l", "ong_parameter_name"])

    @fast_args
    def kernel(long_parameter_name, other=1):
        return long_parameter_name + other

    assert kernel(**{name: 5}) == 6
    assert kernel(**{name[:4] + name[4:]: 5, "other": 2}) == 7
    assert type_and_message(kernel, 1, **{name[:4] + name[4:]: 5})[0] is TypeError


class TextSubclass(str):
    pass


def test_keyword_names_of_a_subclass_of_str():
    assert KERNELS["plain"](1, 2, **{TextSubclass("d"): 9}) == 1239


def test_the_unbound_forms_of_a_call():
    kernel = KERNELS["plain"]
    assert kernel.__call__(1, 2) == plain(1, 2)
    assert type(kernel).__call__(kernel, 1, 2, d=5) == plain(1, 2, d=5)
    assert list(map(kernel, [1, 2], [3, 4])) == [plain(1, 3), plain(2, 4)]


def test_defaults_of_every_kind():
    array = np.arange(3.0)

    @fast_args
    def kernel(x=None, y=2.5, z=True, t=(1, 2), s="text"):
        return (x is None), y, z, t[1], len(s)

    assert kernel() == (True, 2.5, True, 2, 4)
    assert kernel(array, t=(5, 6)) == (False, 2.5, True, 6, 4)
    assert kernel() == numbas(kernel)()
    before = kernel.counts().fast
    kernel()
    kernel(array, t=(5, 6))
    assert kernel.counts().fast == before + 2


def test_changed_defaults_of_the_function_do_not_change_the_kernel():
    def function(a, b=2):
        return a + b

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


def test_more_parameters_than_a_machine_has_registers():
    names = [f"p{i}" for i in range(40)]
    namespace: dict[str, object] = {}
    exec(
        f"def many({', '.join(name + '=' + str(i) for i, name in enumerate(names))}): return {'+'.join(names)}",
        namespace,
    )
    kernel = fast_args(namespace["many"])
    assert kernel() == sum(range(40))
    assert kernel(*range(40)) == sum(range(40))
    assert kernel(1000, p39=0) == 1000 + sum(range(39))
    assert kernel(1000, p39=0) == 1000 + sum(range(39))


# ---- what a function has -------------------------------------------------------------------------------------------


def test_metadata_of_the_function():
    kernel = KERNELS["plain"]
    assert isinstance(kernel, FastKernel) and callable(kernel)
    assert (kernel.__name__, kernel.__qualname__, kernel.__module__) == ("plain", "plain", __name__)
    assert kernel.__doc__ == plain.__doc__
    assert kernel.__wrapped__ is plain and kernel.py_func is plain
    assert inspect.signature(kernel) == inspect.signature(plain)
    assert inspect.unwrap(kernel) is plain
    assert "plain" in repr(kernel) and "c=3" in repr(kernel)


def test_a_kernel_is_a_dispatcher():
    kernel = fast_args(plain)
    assert isinstance(kernel, numba.core.registry.CPUDispatcher) and kernel.dispatcher is kernel
    assert numba.extending.is_jitted(kernel)
    assert kernel.signatures == []
    kernel(1, 2, 3, 4)
    assert kernel.signatures == list(kernel.overloads) == [(int64, int64, int64, int64)]


def test_attributes_can_be_set_and_deleted():
    kernel = fast_args(plain)
    kernel.note = "mine"
    assert kernel.note == "mine" and vars(kernel)["note"] == "mine"
    del kernel.note
    assert not hasattr(kernel, "note")


def test_kernels_are_equal_only_to_themselves_and_hashable():
    first, second = fast_args(plain), fast_args(plain)
    assert first == first and first != second
    assert len({first, second, first}) == 2


def test_stats_count_calls_by_path():
    kernel = fast_args(plain)
    assert kernel.counts() == KernelCounts(0, 0, 0)
    kernel(1, 2, 3, 4)
    assert kernel.counts() == KernelCounts(fast=0, slow=1, compiled=1)
    for _ in range(10):
        kernel(1, 2, 3, 4)
    assert kernel.counts() == KernelCounts(fast=10, slow=1, compiled=1)
    kernel(1.0, 2, 3, 4)
    assert kernel.counts() == KernelCounts(fast=10, slow=2, compiled=2)
    assert type_and_message(kernel, 1)[0] is TypeError
    assert kernel.counts() == KernelCounts(fast=10, slow=2, compiled=2)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    @fast_args
    def unbound(self, x):
        return x + 1

    static = staticmethod(fast_args(plain))


def test_a_kernel_is_a_method_like_a_function():
    assert inspect.ismethod(Scale(2).unbound)
    assert Scale.unbound is Scale.__dict__["unbound"]
    assert Scale(1).static(1, 2) == Scale.static(1, 2) == plain(1, 2)
    Number = type("Number", (float,), {})

    @fast_args
    def add(self, other):
        return self + other

    Number.add = add
    assert Number(1.5).add(2.0) == 3.5
    bound = add.__get__(1.0)
    assert bound(2.0) == 3.0
    assert bound.__self__ == 1.0 and bound.__func__ is add


def test_a_bound_kernel_takes_keywords_and_defaults():
    Number = type("Number", (int,), {"combine": KERNELS["plain"]})
    assert Number(1).combine(2) == plain(1, 2)
    assert Number(1).combine(2, d=9) == plain(1, 2, d=9)
    bound = KERNELS["plain"].__get__(1)
    for _ in range(3):
        assert bound(2, d=9) == plain(1, 2, d=9)
    assert type_and_message(bound, 2, a=1) == type_and_message(plain.__get__(1), 2, a=1)


# ---- life and death ------------------------------------------------------------------------------------------------


def test_kernels_can_be_weakly_referenced_and_die():
    kernel = fast_args(plain)
    kernel(1, 2)
    reference = weakref.ref(kernel)
    assert reference() is kernel
    del kernel
    gc.collect()
    assert reference() is None


def test_a_kernel_in_a_reference_cycle_is_collected():
    kernel = fast_args(plain)
    kernel(1, 2)
    kernel.itself = kernel
    reference = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert reference() is None


def test_a_kernel_that_failed_to_compile_dies():
    kernel = fast_args(lambda x: x.no_such_attribute)
    array = np.ones(3)
    before = sys.getrefcount(array)
    type_and_message(kernel, array)
    reference = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert reference() is None
    assert sys.getrefcount(array) == before


def test_a_deep_chain_of_kernels_is_freed():
    dispatcher = numba.njit(plain)
    kernel = None
    for _ in range(100_000):
        link = FastKernel.__new__(FastKernel)
        link.next = kernel
        kernel = link
    reference = weakref.ref(kernel)
    del kernel, link
    gc.collect()
    assert reference() is None
    assert fast_args(dispatcher)(1, 2) == plain(1, 2)


def test_an_object_made_without_init_cannot_be_called_but_does_no_harm():
    run_python(
        """
        from fastexchange import FastKernel
        kernel = FastKernel.__new__(FastKernel)
        try:
            kernel(1)
        except (TypeError, AttributeError):
            pass
        else:
            raise AssertionError("it was called")
        """
    )


def test_a_kernel_outlives_the_name_of_its_dispatcher():
    kernel = fast_args(numba.njit(plain))
    gc.collect()
    assert kernel(1, 2) == plain(1, 2)


def test_a_kernel_dropped_while_it_runs():
    holder = {}

    @numba.njit
    def drop_it(x):
        with numba.objmode():
            holder.clear()
            gc.collect()
        return x + 1

    holder["kernel"] = fast_args(drop_it)
    assert holder["kernel"](1) == 2
    holder["kernel"] = fast_args(drop_it)
    assert holder["kernel"](1) == 2
    assert holder == {}


def test_calls_keep_no_reference_to_arguments_or_result():
    kernel = KERNELS["variadic"]
    array, text = np.ones(3), "some text".upper()
    kernel(1, array, text)
    kernel(1, None, True, array)
    with references_kept(array, text, kernel):
        for _ in range(100):
            kernel(1, array, text)
            kernel(1, None, True, array)


def test_calls_keep_no_reference_to_none_and_bools():
    @fast_args
    def returns_none(x, y, z=None):
        pass

    for _ in range(40):  # what is compiled on the way holds some
        returns_none(None, True)
    singletons = (None, True, False)
    before = [sys.getrefcount(thing) for thing in singletons]
    for _ in range(10_000):
        returns_none(None, True)
    after = [sys.getrefcount(thing) for thing in singletons]
    assert all(abs(y - x) < 1000 for x, y in zip(before, after, strict=True)), (before, after)


# ---- copies and pickles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_copies_are_what_copies_of_numbas_dispatchers_are(copier):
    kernel, dispatcher = KERNELS["plain"], numba.njit(plain)
    assert (copier(dispatcher) is dispatcher) == (copier(kernel) is kernel)
    assert copier(kernel)(1, 2) == plain(1, 2)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(protocol):
    kernel = pickle.loads(pickle.dumps(KERNELS["positional_only"], protocol))
    assert type(kernel) is FastKernel
    assert kernel(1, c=5) == positional_only(1, c=5)


def test_a_pickle_works_in_another_process():
    factor = 3

    @fast_args
    def closure(x, n=2):
        return x * factor * n

    assert closure(1.0) == 6.0
    run_python(
        """
        import pickle, sys
        kernel = pickle.loads(bytes.fromhex(sys.argv[1]))
        assert kernel(2.0) == 12.0 and kernel(2.0, n=1) == 6.0, kernel(2.0)
        assert kernel.__name__ == "closure"
        """,
        pickle.dumps(closure).hex(),
    )


# ---- inside other jitted functions ---------------------------------------------------------------------------------


@fast_args
def inner(x):
    return x.sum()


def test_a_kernel_called_inside_a_jitted_function():
    @numba.njit
    def outer(x):
        return inner(x) + 1

    @fast_args
    def fast_outer(x):
        return inner(x) + 1

    array = np.arange(4.0)
    assert outer(array) == fast_outer(array) == fast_outer(array) == 7.0


def test_a_kernel_passed_to_a_jitted_function():
    @numba.njit
    def apply(function, x):
        return function(x)

    array = np.arange(4.0)
    assert apply(inner, array) == apply(numba.njit(inner.py_func), array) == 6.0


def test_a_kernel_in_a_closure_and_in_an_overload():
    def make(function):
        return fast_args(lambda x: function(x) * 2)

    assert make(inner)(np.arange(4.0)) == 12.0
    assert make(make(inner))(np.arange(4.0)) == 24.0


# ---- subclasses ----------------------------------------------------------------------------------------------------


class Counted(FastKernel):
    """Counts its calls."""

    def __init__(self, dispatcher):
        super().__init__(dispatcher)
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return super().__call__(*args, **kwargs)


class Labelled(FastKernel):
    label = "mine"


def test_a_subclass_that_overrides_call_is_asked():
    kernel = Counted(numba.njit(plain))
    for _ in range(3):
        assert kernel(1, 2, d=5) == plain(1, 2, d=5)
    assert kernel.count == 3
    assert kernel.counts() == KernelCounts(fast=2, slow=1, compiled=1)


def test_a_subclass_of_a_subclass_that_overrides_call_is_asked():
    class More(Counted):
        pass

    kernel = More(numba.njit(plain))
    assert [kernel(1, 2), kernel(1, 2), kernel.count] == [plain(1, 2), plain(1, 2), 2]


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="before CPython 3.12 a class keeps its vectorcall when __call__ is set"
)
def test_call_overridden_later_is_asked():
    class Late(FastKernel):
        pass

    kernel = Late(numba.njit(plain))
    assert kernel(1, 2) == plain(1, 2)
    Late.__call__ = lambda self, *arguments: "overridden"
    assert type(kernel).__call__(kernel, 1, 2) == "overridden"
    assert kernel(1, 2) == "overridden"


def test_a_subclass_that_overrides_nothing_stays_native():
    kernel = Labelled(numba.njit(plain))
    assert [kernel(1, 2), kernel(1, 2), kernel.label] == [plain(1, 2), plain(1, 2), "mine"]
    assert kernel.counts().fast == 1


# ---- the decorator -------------------------------------------------------------------------------------------------


def test_decorating_with_and_without_parentheses():
    assert fast_args(plain)(1, 2) == fast_args()(plain)(1, 2) == plain(1, 2)


def test_options_are_those_of_njit():
    def divide(a, b):
        return a / b

    assert fast_args(error_model="numpy")(divide)(1.0, 0.0) == np.inf
    assert type_and_message(fast_args(divide), 1.0, 0.0)[0] is ZeroDivisionError
    kernel = fast_args(plain, fastmath=True, nogil=True)
    assert kernel.targetoptions["fastmath"] is True and kernel.targetoptions["nogil"] is True
    assert kernel(1, 2) == plain(1, 2)


def test_boundscheck_keeps_its_meaning():
    def third(x):
        return x[3]

    kernel = fast_args(boundscheck=True)(third)
    for _ in range(2):
        assert type_and_message(kernel, np.ones(3)) == (IndexError, "index is out of bounds")


def test_a_dispatcher_has_one_kernel():
    dispatcher = numba.njit(plain)
    kernel = fast_args(dispatcher)
    assert kernel.py_func is dispatcher.py_func and kernel is not dispatcher
    assert fast_args(dispatcher) is kernel
    assert fast_args(kernel) is kernel


def test_a_dispatcher_that_has_compiled_already():
    dispatcher = numba.njit(plain)
    dispatcher(1, 2, 3, 4)
    kernel = fast_args(dispatcher)
    assert kernel.signatures == [(int64, int64, int64, int64)]
    assert kernel(1, 2, 3, 4) == plain(1, 2, 3, 4)
    assert len(kernel.signatures) == 1


@pytest.mark.parametrize(
    "signature",
    ["int64(int64)", int64(int64), (int64,), ["int64(int64)"], ["int64(int64)", "float64(float64)"], [(int64,)]],
)
def test_explicit_signatures_are_given_first_as_for_njit(signature):
    @fast_args(signature)
    def double(x):
        return x * 2

    assert double(3) == double(3) == 6
    assert double.signatures[0] == (int64,)
    assert not double._can_compile
    assert double.counts().fast == 1


def test_explicit_signatures_and_options():
    @fast_args("float64(float64, float64)", error_model="numpy")
    def divide(a, b):
        return a / b

    assert divide(1, 0) == np.inf
    assert divide.signatures == [(float64, float64)]


class AClass:
    pass


@pytest.mark.parametrize("thing", [AClass, len, 3, [1, 2], AClass(), np.sin, b""], ids=lambda thing: type(thing).__name__)
@pytest.mark.parametrize("options", [{}, {"fastmath": True}], ids=["", "options"])
def test_what_cannot_be_decorated_is_a_type_error(thing, options):
    kind, message = type_and_message(fast_args, thing, **options)
    assert kind is TypeError
    assert "fast_args()" in message


def test_options_given_with_a_dispatcher_are_a_type_error():
    for given in (numba.njit(plain), fast_args(plain)):
        kind, message = type_and_message(fast_args, given, fastmath=True)
        assert kind is TypeError and "fastmath" in message


def test_an_unknown_option_is_refused_where_the_kernel_is_decorated():
    """Numba looks at its options when it compiles, and raises KeyError."""
    kind, message = type_and_message(lambda: fast_args(plain, no_such_option=True))
    assert kind is TypeError and "'no_such_option'" in message


def test_functions_without_source_and_lambdas():
    namespace: dict[str, object] = {}
    exec("def made(x, y=1): return x + y", namespace)
    assert fast_args(namespace["made"])(1) == 2
    assert fast_args(lambda x: x * 2)(4) == 8


def test_keyword_only_parameters_as_numba_takes_them():
    """Numba treats them like the others, so a kernel can have them, too."""

    def function(x, *, k):
        return x * 10 + k

    assert numba.njit(function)(1, k=2) == 12
    kernel = fast_args(function)
    for _ in range(2):
        assert kernel(1, k=2) == 12
    assert type_and_message(kernel, 1) == type_and_message(function, 1)


def test_bound_arguments_move_with_a_frame_that_grows():
    """A producer that calls kernels with keywords, in a call with keywords whose frame was too small."""

    class Producer:
        def __init__(self, array, hook=None):
            self.array, self.hook = array, hook

        def __dlpack__(self, **keywords):
            if self.hook:
                self.hook()
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return (1, 0)

    @fast_args
    def big(t, x, a):
        s = 0.0
        for value in t:
            s += value
        return s + x[0] * 1000 + a * 1e6

    @fast_args
    def other(u, v, w):
        return 0.0

    @fast_args
    def outer(x):
        return x[0]

    numbers = tuple(float(i) for i in range(100))
    negative = tuple(-value for value in numbers)
    producer = Producer(np.ones(3))
    for _ in range(3):
        big(t=numbers, x=producer, a=1.0)
    other(u=negative, v=1.0, w=5.0)
    other(u=negative, v=producer, w=5.0)
    outer(producer)
    results = []

    def second():
        producer.hook = None
        other(u=negative, v=producer, w=5.0)

    def first():
        producer.hook = second
        results.append(big(t=numbers, x=producer, a=1.0))

    outer(Producer(np.ones(3), first))
    assert results == [1005950.0]


FACTOR = 1


def test_recompile_takes_up_changed_globals():
    global FACTOR

    @fast_args
    def scaled(x):
        return x * FACTOR

    try:
        assert [scaled(2.0) for _ in range(40)] == [2.0] * 40
        FACTOR = 5
        assert scaled(2.0) == 2.0, "a global is a constant of the compiled code, as under @njit"
        scaled.recompile()
        assert [scaled(2.0) for _ in range(40)] == [10.0] * 40
    finally:
        FACTOR = 1


def test_a_refusal_leaves_no_cycle():
    class Refuses:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **keywords):
            raise KeyError("no")

    @fast_args
    def kernel(x, y):
        return 1

    refuses, array = Refuses(), np.ones(3)
    gc.collect()
    gc.disable()
    try:
        before = sys.getrefcount(array)
        for _ in range(20):
            with contextlib.suppress(KeyError):
                kernel(array, refuses)
        assert sys.getrefcount(array) == before
    finally:
        gc.enable()


def test_a_type_that_cannot_be_asked():
    class Meta(type):
        def __getattr__(cls, name):
            raise RuntimeError(f"do not ask for {name}")

    class Mute(metaclass=Meta):
        pass

    @fast_args
    def kernel(x):
        return 1

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'x'.*position 0.*do not ask"):
            kernel(Mute())


def test_a_wrapping_function_has_its_own_defaults():
    def base(x, y=3):
        return x * y

    @functools.wraps(base)
    def other(x, y=4):
        return x * y

    assert fast_args(other)(3) == numba.njit(other)(3) == 12


def test_kernels_made_in_many_threads_at_once():
    run_python(
        """
        import threading
        import numpy as np
        from fastexchange import fast_args

        start = threading.Barrier(6)
        failed = []

        class Sub(np.ndarray):
            pass

        def work():
            try:
                start.wait()
                kernel = fast_args(lambda x: x.size)
                assert [kernel(np.ones(4).view(Sub)) for _ in range(40)] == [4] * 40
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        """
    )


def test_with_numbas_compiler_off_functions_run_as_python():
    run_python(
        """
        import numpy as np
        from fastexchange import fast_args

        class Wrapped:
            def __init__(self, array):
                self.array = array
            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)
            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        @fast_args
        def scale(x, by=2.0):
            for i in range(x.shape[0]):
                x[i] *= by
            return x.sum()

        @fast_args("float64(float64)", cache=False)
        def same(x):
            return x

        array = np.ones(3)
        assert scale(array) == 6.0 and scale(Wrapped(array), by=3) == 18.0 and same(2.5) == 2.5
        assert scale.py_func is scale.__wrapped__
        """,
        NUMBA_DISABLE_JIT="1",
    )


def test_explain_says_who_makes_a_call():
    @fast_args
    def generates(x):
        for value in x:  # noqa: UP028
            yield value

    array = np.ones(2)
    assert list(generates(array)) == [1.0, 1.0]
    assert "Numba's own dispatcher makes this call" in str(generates.explain(array))
    assert "refused with TypeError" in str(generates.explain(object()))


def test_an_array_subclass_may_call_anything_dtype():
    class Odd(np.ndarray):
        @property
        def dtype(self):
            raise KeyError("mine")

    kernel = fast_args(lambda x: x.size)
    for dtype in ("M8[s]", "f8"):
        array = np.zeros(3, dtype).view(Odd)
        assert [kernel(array) for _ in range(40)] == [3] * 40
    swapped = np.zeros(3, ">f8").view(Odd)
    with pytest.raises((BufferError, TypeError, numba.core.errors.NumbaError)):
        kernel(swapped)


def test_explain_shows_no_type_of_ours_for_a_default():
    @fast_args
    def scaled(x, by=2.0, *, s="text"):
        return x

    assert "mitted" not in str(scaled.explain(object())).replace("omitted: the default", "")


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_try_catches_nothing_that_has_not_been_raised(is_tensor):
    """Whatever calls have left on the stack, by each way into the kernel."""

    @fast_args
    def checked(x, limit):
        try:
            if x[0] > limit:
                raise ValueError("large")
        except Exception:
            return -1
        return 1

    array = np.zeros(2)
    x = Dunder(array) if is_tensor else array
    launch = checked.bind(x, 1.0)
    for _ in range(50):
        assert checked(x, 1.0) == 1
        assert checked(x, limit=1.0) == 1
        assert checked(x, -1.0) == -1
        assert launch() == 1
        str(array)
