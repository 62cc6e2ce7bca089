"""What is said of what cannot be passed, compiled or decorated: the parameter, what it got, and what to do."""

import functools
import re
import warnings

import numba
import numpy as np
import pytest
from frameworks import torch
from interpreter import run_python
from numba.core.errors import TypingError
from oracle import numbas, type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack
from fastexchange.calls.options import check_names, numba_options

pytestmark = pytest.mark.filterwarnings(
    "ignore::numba.core.errors.NumbaPendingDeprecationWarning", "ignore:Exporting an unversioned:DeprecationWarning"
)
NEEDS_TORCH = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args
def look(before, x):
    return 0


@fast_args
def double(x, out):
    for i in range(out.shape[0]):
        out[i] = 2 * x[i]


def refused_twice(kernel, *arguments) -> tuple[type, str]:
    """The exception of a first call and of a later one, which are the same; and of ``explain``."""
    first = type_and_message(kernel, *arguments)
    assert type_and_message(kernel, *arguments) == first
    kind, message = first
    assert kernel.explain(*arguments).outcome == f"refused with {kind.__name__}: {message}"
    return first


# ---- tensors without memory --------------------------------------------------------------------------------------------


def _odd():
    if torch is None:
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(2), torch.ones(3)]
        yield "meta", torch.ones(3, device="meta"), "on device meta.*device='cpu'"
        yield "nested", torch.nested.nested_tensor(parts), r"nested.*unbind\(\)"
        yield "jagged", torch.nested.nested_tensor(parts, layout=torch.jagged), r"nested.*unbind\(\)"
        yield "quantised", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"quantised.*dequantize\(\)"
        yield "sparse", torch.ones(3).to_sparse(), r"to_dense\(\)"
        yield "zeros", torch._efficientzerotensor(3), r"zeros that has no memory; pass its clone\(\)"
        yield "fake", FakeTensorMode().from_tensor(torch.ones(3)), "FakeTensor.*custom_op"
        if torch.backends.mkldnn.is_available():
            yield "mkldnn", torch.ones(3, 3).to_mkldnn(), r"MKLDNN.*to_dense\(\)"


ODD = list(_odd())


@NEEDS_TORCH
@pytest.mark.parametrize(("tensor", "words"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "warm"])
def test_tensors_without_memory(tensor, words, is_warm):
    kernel = fast_args(look.py_func)
    for _ in range(30 if is_warm else 0):  # until it has an entry of its own for such calls
        kernel(1, torch.ones(3))
    kind, message = type_and_message(kernel, 1, tensor)
    assert kind is BufferError
    assert re.match(r"look\(\): argument 'x' \(position 1\), a torch.*, cannot be passed to the kernel: .*" + words, message)


@NEEDS_TORCH
def test_tensors_of_transforms():
    said = {}

    def call(name):
        def function(t):
            said[name] = type_and_message(look, 1, t)
            return t.sum()

        return function

    torch.vmap(call("vmap"))(torch.ones(3, 4))
    torch.func.grad(call("grad"))(torch.ones(3))
    torch.func.jvp(call("jvp"), (torch.ones(3),), (torch.ones(3),))
    torch.func.functionalize(call("functionalize"))(torch.ones(3))
    assert set(said) == {"vmap", "grad", "jvp", "functionalize"}
    for name, (kind, message) in said.items():
        assert kind is BufferError and message.startswith("look(): argument 'x' (position 1), a torch.Tensor, cannot be passed")
        assert ("outside of vmap" if name == "vmap" else "outside of the transform") in message
    assert look(1, torch.ones(3)) == 0


CONVERSIONS = {"from_dlpack": from_dlpack, "to_dlpack": to_dlpack, "convert": lambda x: convert(x, np.ndarray)}


@NEEDS_TORCH
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_of_tensors_without_memory(name):
    said = {}

    def note(kind):
        return lambda t: (said.update({kind: type_and_message(CONVERSIONS[name], t)}), t.sum())[1]

    torch.vmap(note("outside of vmap"))(torch.ones(3, 4))
    for transform in (torch.func.grad(note("outside of the transform")), lambda x: torch.func.jvp(note("transform"), (x,), (x,))):
        transform(torch.ones(3))
    for kind, tensor, words in ODD:
        if kind != "zeros":  # of which there is no more to be said than that it holds no memory
            said[words] = type_and_message(CONVERSIONS[name], tensor)
    for words, (error, message) in said.items():
        assert error is BufferError and re.match(rf"{name}\(\): a torch.* cannot be exported: .*{words}", message), message


def test_exceptions_of_frameworks_that_are_nothing_but_words():
    pyarrow = pytest.importorskip("pyarrow")
    kind, message = type_and_message(look, 1, pyarrow.array([1.0, None]))
    with pytest.raises(kind) as own:
        pyarrow.array([1.0, None]).__dlpack__()
    assert message == f"look(): argument 'x' (position 1) cannot be passed to the kernel: {own.value}"


class Told(TypeError):
    """One with a state of its own."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **options):
        raise self.error

    def __dlpack_device__(self):
        return (1, 0)


def test_exceptions_with_a_state_of_their_own_arrive_as_they_are():
    plain = type("Plain", (ValueError,), {})
    with_state = plain("no")
    with_state.code = 7
    for error in (Told("no", 3), with_state, plain("no", 2), plain(3)):
        with pytest.raises(type(error)) as raised:
            look(1, Raises(error))
        assert raised.value is error
    kind, message = type_and_message(look, 1, Raises(plain("no")))
    assert kind is plain and message == "look(): argument 'x' (position 1) cannot be passed to the kernel: no"


def test_a_deleted_array_of_jax():
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(3)
    array.delete()
    kind, message = type_and_message(look, 1, array)
    assert kind is RuntimeError and message.startswith("look(): argument 'x' (position 1) cannot be passed to the kernel: ")


# ---- elements --------------------------------------------------------------------------------------------------------


REFUSED = {"numpy": lambda: np.ones(3, "V2")} | ({"torch": lambda: torch.ones(3).to(torch.float8_e8m0fnu)} if torch else {})


@pytest.mark.parametrize("framework", REFUSED)
@pytest.mark.parametrize("form", ["itself", "tuple", "list"])
def test_what_is_not_computed_with(framework, form):
    tensor, name = REFUSED[framework](), {"numpy": "void16", "torch": "float8_e8m0fnu"}[framework]
    value = {"itself": tensor, "tuple": (tensor, 1), "list": [tensor]}[form]
    kind, message = refused_twice(fast_args(look.py_func), 1, value)
    assert kind is BufferError
    place = {"itself": ", a ", "tuple": ", item [0], a ", "list": ", item [0], a "}[form]
    assert message.startswith(f"look(): argument 'x' (position 1){place}")
    assert f"Numba cannot compute with its elements, {name}" in message and "fast_args(storage=True)" in message
    assert ".float()" in message or framework == "numpy"


def test_scalars_that_numba_has_not_name_their_parameter():
    kind, message = type_and_message(look, 1, np.longdouble(2))
    assert issubclass(kind, TypeError)
    assert message.startswith("look(): argument 'x' (position 1): an object of type numpy.longdouble ")


@fast_args
def raises(x, kind):
    if kind == 1:
        raise NotImplementedError("of the kernel")
    raise TypeError("of the kernel")


@pytest.mark.parametrize("argument", [np.ones(3), [1, 2], "text"], ids=["array", "list", "str"])
@pytest.mark.parametrize("kind", [1, 2])
def test_exceptions_of_the_kernel_itself_arrive(argument, kind):
    assert type_and_message(raises, argument, kind) == ((NotImplementedError, TypeError)[kind - 1], "of the kernel")


# ---- lists -----------------------------------------------------------------------------------------------------------


@fast_args
def count(x, items):
    return len(items)


def test_arguments_that_are_not_declared_name_kernel_types_and_signatures():
    kernel = fast_args("void(float32[:])")(lambda x: None)
    words = r"\(array\(float32, 1d, A\)\)"
    with pytest.raises(TypeError, match=rf"<lambda>\(x: float64\): not one of the declared signatures .* they take {words}"):
        kernel(3.0)
    assert re.search(f"refused with TypeError: not one of the declared .*{words}", str(kernel.explain(3.0)))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.ones(2, "V2"), BufferError),
        (np.ones(2, ">f8"), BufferError),
        (object(), TypeError),
        ([], ValueError),
        *([(torch.ones(2, device="meta"), BufferError), (torch.ones(2).to(torch.float8_e8m0fnu), BufferError)] if torch else []),
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_items_are_named_with_their_place(value, error):
    kernel = fast_args(lambda x, t: None)
    for argument, place in (((1, (2, value)), r"\[1\]\[1\]"), ([value], r"\[0\]"), ((1, [value]), r"\[1\]\[0\]")):
        words = rf"argument 't' \(position 1\), item {place}[,:] "
        for _ in range(2):
            with pytest.raises(error, match=words):
                kernel(1, argument)
        outcome = kernel.explain(1, argument).outcome
        assert re.search(f"refused with {error.__name__}: .*{words}", outcome), outcome


def test_explain_goes_into_tuples_and_lists():
    bits = np.ones(2, "V2")
    for value, place in (((1, (2, bits)), r"item \[1\]: item \[1\]"), ([bits], r"item \[0\]")):
        assert re.search(f"- {place}: Numba cannot compute with its elements, ", str(explain(value)))
    assert not explain((1, np.ones(2))).reasons


@pytest.mark.parametrize("value", [[], [[]], ([], 1), set(), [[[]]]], ids=repr)
def test_a_list_without_items_names_its_parameter(value):
    assert type_and_message(numbas(count), 1.0, value)[0] is ValueError
    kind, message = refused_twice(count, 1.0, value)
    assert kind is ValueError
    place = {"[[]]": ", item [0]", "([], 1)": ", item [0]", "[[[]]]": ", item [0][0]"}.get(repr(value), "")
    assert message.startswith(f"count(): argument 'items' (position 1){place}: Numba cannot tell the type of an empty ")
    assert "; pass " in message


MIXED = {"int": [1, "a"], "float": [1.0, 2.0, 3], "tuple": ([1, "a"], 2), "array": [np.ones(2), 1]}


@pytest.mark.parametrize("value", MIXED.values(), ids=MIXED)
def test_a_mixed_list_names_its_parameter(value):
    expected = type_and_message(numbas(count), 1.0, value)[0]
    kind, message = type_and_message(count, 1.0, value)
    assert kind is expected is TypeError
    assert message.startswith("count(): argument 'items' (position 1): the items of a list have one type; item 0 is ")


# ---- compilation -----------------------------------------------------------------------------------------------------


@fast_args
def wrong(x, y, scale=2.0):
    return x.no_such_attribute(y) * scale


def test_typing_errors_name_kernel_and_types():
    for call in (lambda: wrong(np.ones(3), 4), lambda: wrong(x=np.ones(3), y=4)):
        for _ in range(3):  # Numba keeps the exception, and raises it again
            with pytest.raises(numba.TypingError) as ours:
                call()
            lines = str(ours.value).splitlines()
            line = "wrong(x: array(float64, 1d, C), y: int64): Numba cannot compile the kernel for these argument types. It says:"
            assert lines[0] == line and not any("Numba cannot compile" in each for each in lines[1:])
    with pytest.raises(TypingError) as plain:
        numbas(wrong)(np.ones(3), 4)
    assert type(plain.value) is type(ours.value)
    assert str(ours.value).partition("\n")[2] == str(plain.value)
    assert (ours.value.msg, ours.value.loc, ours.value.contexts) == (plain.value.msg, plain.value.loc, plain.value.contexts)


@NEEDS_TORCH
def test_typing_errors_of_calls_with_tensors_and_keywords_behind_an_omitted_one():
    @fast_args
    def kernel(x, a=1, b=2):
        return x.no_such_attribute

    _, message = type_and_message(lambda: kernel(torch.ones(2, 2), b=torch.ones(3)))
    assert message.startswith("test_typing_errors_of_calls_with_tensors_and_keywords_behind_an_omitted_one.<locals>.kernel(")
    assert "(x: array(float32, 2d, C), b: array(float32, 1d, C)): Numba cannot" in message.splitlines()[0]


def test_a_masked_array_names_its_parameter():
    kind, message = type_and_message(look, 1, np.ma.zeros(3))
    assert kind is type_and_message(numba.njit(look.py_func), 1, np.ma.zeros(3))[0]
    assert message.startswith("look(): argument 'x' (position 1): a masked array cannot be passed; pass its filled(), ")


# ---- decoration ------------------------------------------------------------------------------------------------------


class Model:
    @fast_args
    def method(self, x):
        return x.sum()

    @staticmethod
    @fast_args
    def static(x):
        return x.sum()


class Derived(Model):
    pass


class Decorated:
    @property
    @fast_args
    def kernel(self):
        return 1

    cached = functools.cached_property(fast_args(lambda self: 1))
    cached.func.__name__ = "cached"

    @classmethod
    @fast_args
    def of_class(cls, x):
        return x


def test_a_method_below_another_decorator_is_to_be_a_static_one():
    for call in (lambda: Decorated().kernel, lambda: Decorated().cached, lambda: Decorated.of_class(1)):
        kind, message = type_and_message(call)
        assert kind is TypeError and "put @staticmethod above @fast_args" in message, message


@pytest.mark.parametrize("cls", [Model, Derived])
def test_a_method_is_to_be_a_static_one(cls):
    kind, message = type_and_message(cls().method, np.ones(3))
    assert kind is TypeError
    assert message.startswith("Model.method(): argument 'self' (position 0): ")
    assert "put @staticmethod above @fast_args" in message
    assert cls().static(np.ones(3)) == 3
    assert "staticmethod" not in type_and_message(cls.static, object())[1]


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property, functools.cached_property])
def test_static_methods_are_decorated_from_outside(kind):
    with pytest.raises(TypeError, match="put @staticmethod above @fast_args"):
        fast_args(kind(lambda x: x))


@pytest.mark.parametrize(
    ("options", "nearest"),
    [({"fastmth": True}, "fastmath"), ({"outs": "x[n] -> y[n]"}, "out"), ({"paralel": True}, "parallel"), ({"gradd": 1}, "grad")],
)
@pytest.mark.parametrize("decorate", [lambda o: fast_args(**o), lambda o: fast_args(lambda x: x, **o)], ids=["first", "at once"])
def test_unknown_options_are_refused_at_decoration(options, nearest, decorate):
    with pytest.raises(TypeError) as raised:
        decorate(options)
    assert str(raised.value).startswith(f"fast_args() got an unknown option, {next(iter(options))!r}; did you mean {nearest!r}? ")
    assert "fastmath" in str(raised.value).partition("?")[2]


def test_unknown_options_are_all_named():
    with pytest.raises(TypeError, match=r"unknown option, 'FASTMATH'; did you mean 'fastmath'\? Its options"):
        fast_args(FASTMATH=True)
    words = r"unknown options, 'fastmth', 'zzzzzz', 'Paralel'; did you mean 'fastmath' for 'fastmth', 'parallel' for 'Paralel'\?"
    with pytest.raises(TypeError, match=words):
        fast_args(fastmth=True, nogil=True, zzzzzz=1, Paralel=True)


def test_an_option_that_is_like_no_other():
    with pytest.raises(TypeError, match=r"unknown option, 'zzzzzz'\. Its options and those of numba.njit: "):
        fast_args(zzzzzz=1)


def test_all_options_of_numba_are_known():
    """Whatever Numba's own registry maps is taken, and Numba refuses what it does not map."""
    assert numba_options() >= {"nogil", "parallel", "fastmath", "cache", "boundscheck", "error_model", "inline", "locals"}
    for name in ("looplift", "no_rewrites", "forceinline", "debug"):
        assert name in numba_options()
        assert fast_args(**{name: False})(lambda x: x + 1)(1) == 2
    with pytest.raises(KeyError):
        numba.njit(fastmth=True)(lambda x: x)(1)
    assert fast_args(nogil=True, error_model="numpy", boundscheck=None)(lambda x: x + 1)(1) == 2


def test_where_numbas_options_cannot_be_had_nothing_is_refused(monkeypatch):
    from numba.core.registry import CPUDispatcher

    numba_options.cache_clear()
    monkeypatch.setattr(type(CPUDispatcher.targetdescr), "options", object)
    try:
        assert numba_options() is None
        check_names(["fastmth"], ["out"])
    finally:
        numba_options.cache_clear()


@pytest.mark.parametrize(
    "use", [lambda k: k[4, 256], lambda k: k.forall(100), lambda k: k.configure(4, 256)], ids=["[]", "forall", "configure"]
)
def test_launches_of_a_kernel_for_the_cpu(use):
    with pytest.raises(TypeError, match=r"look\(\) is a kernel for the CPU, .*: call it as look\(\.\.\.\); fast_args\(cuda="):
        use(look)


WITHOUT_COMPILING = """
    import numba, numpy as np, pickle, sys
    from fastexchange import fast_args

    def kernel(x, y=2):
        return None

    class Unlike:
        pass

    def said(call):
        try:
            return repr(call())
        except Exception as error:
            return type(error).__name__, str(error)

    made = fast_args(kernel)
    print([
        *(said(lambda: fast_args(**options)(kernel)) for options in (
            {"fastmth": True}, {"returns": "q"}, {"returns": 3}, {"out": "x[n -> y[n]"}, {"out": "x[n] -> w[n]"},
            {"grad": "alow"},
        )),
        *(said(lambda: fast_args(thing)) for thing in (3, Unlike, staticmethod(kernel), property(kernel), lambda **o: 0)),
        said(lambda: fast_args("void(int64)")(3)),
        *(said(lambda: made(value)) for value in (
            np.ones(2, np.float16), np.float16(1), object(), {}, [], [1, 2.0], 2**70, np.ones(2, ">f8"), np.ma.ones(3),
            np.ones(2, "V2"), (1, [np.ones(2, np.float16)]), 1, "text", None, (1, 2.0), np.ones(2),
        )),
        said(lambda: made()), said(lambda: made(1, 2, 3)), said(lambda: made(1, y=object())), said(lambda: made(1, z={})),
        said(lambda: fast_args(returns="x")(kernel)(1)),
    ])
"""


@pytest.mark.slow
def test_without_compiling_the_words_are_the_same():
    compiled, interpreted = run_python(WITHOUT_COMPILING), run_python(WITHOUT_COMPILING, NUMBA_DISABLE_JIT="1")
    assert interpreted.stdout == compiled.stdout


def test_without_compiling_functions_and_objects_are_passed():
    run_python(
        """
        import numba, numpy as np
        from fastexchange import fast_args
        one = numba.njit(lambda: 1)
        class Jitted:
            value = 2
        assert fast_args(lambda function, ob, *, x: (function() + ob.value, x))(one, Jitted(), x="text") == (3, "text")
        """,
        NUMBA_DISABLE_JIT="1",
    )


@pytest.mark.parametrize("parameters", ["**options", "*rest, key"])
def test_parameters_that_numba_has_not_are_named_with_advice(parameters):
    namespace = {}
    exec(f"def function(x, {parameters}): pass", namespace)
    with pytest.raises(TypeError, match=r"function\(\): Numba compiles no functions with .*; (name its|put them)"):
        fast_args(namespace["function"])


def test_the_kind_of_an_outcome_is_said_beside_its_words():
    x = np.arange(3.0)
    total = fast_args(lambda x: x.sum())
    assert total.explain(x).kind == "new"
    total(x)
    assert total.explain(x).kind == "native"
    assert total.explain(slice(1)).kind == "numba"
    assert total.explain(np.ma.masked_array([1.0], [0])).kind == "refused"
    declared = fast_args("float64(float64[:])")(lambda x: x.sum())
    assert declared.explain(x).kind == "new" and "a declared signature takes" in declared.explain(x).outcome
    assert declared(x) == 3.0 and declared.explain(x).kind == "native" and declared.explain(1.0).kind == "refused"
    narrow = fast_args("int8(int8)")(lambda x: x)  # unboxing checks the number, a cast would not
    assert narrow(5) == 5 and narrow.explain(5).kind == "numba-signature"
