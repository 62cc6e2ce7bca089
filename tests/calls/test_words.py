"""What is said of what cannot be passed, compiled or decorated: the parameter, what it got, and what to do."""

import functools
import re

import numba
import numpy as np
import pytest
from counting import end_of
from frameworks import needs_torch, torch
from interoperability import jax, pyarrow
from numba.core.errors import TypingError
from numba.core.registry import CPUDispatcher
from odd_tensors import ODD
from oracle import numbas, references_kept, type_and_message
from raising import check_raises

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack
from fastexchange.calls.options import check_names, numba_options

pytestmark = pytest.mark.filterwarnings(
    "ignore::numba.core.errors.NumbaPendingDeprecationWarning", "ignore:Exporting an unversioned:DeprecationWarning"
)
X = "look(): argument 'x' (position 1)"


@fast_args
def look(before, x):
    return 0


def refused_twice(kernel, *arguments) -> tuple[type, str]:
    """The exception of a first call and of a later one, which are the same; and of ``explain``."""
    kind, message = first = type_and_message(kernel, *arguments)
    assert type_and_message(kernel, *arguments) == first
    assert kernel.explain(*arguments).outcome == f"refused with {kind.__name__}: {message}"
    return first


WITHOUT_MEMORY = {
    "meta": "on device meta.*device='cpu'", "quantised": r"quantised.*dequantize\(\)", "sparse": r"to_dense\(\)",
    "csr": r"to_dense\(\)", "zero": r"zeros that has no memory; pass its clone\(\)", "fake": "FakeTensor.*custom_op",
    "nested": r"nested.*unbind\(\)", "jagged": r"nested.*unbind\(\)", "mkldnn": r"MKLDNN.*to_dense\(\)",
}  # fmt: skip
"""What is said of each of PyTorch's tensors whose memory is not there."""
CONVERSIONS = {"from_dlpack": from_dlpack, "to_dlpack": to_dlpack, "convert": lambda x: convert(x, np.ndarray)}


def tensor_without_memory(name: str):
    if name in ODD:
        return ODD[name]
    if name == "mkldnn":
        return torch.ones(3, 3).to_mkldnn() if torch.backends.mkldnn.is_available() else pytest.skip("without MKLDNN")
    layout = torch.jagged if name == "jagged" else torch.strided
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@needs_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_without_memory(name):
    tensor, words = tensor_without_memory(name), WITHOUT_MEMORY[name]
    look(1, torch.ones(3)), look(1, torch.ones(3))
    with references_kept(tensor):
        for kernel in (fast_args(look.py_func), look, look):
            check_raises(BufferError, f"^{re.escape(X)}, a torch.*, cannot be passed to the kernel: .*{words}", kernel, 1, tensor)
    for way, convert_it in CONVERSIONS.items() if name != "zero" else ():  # of which no more is said than that it has no memory
        check_raises(BufferError, rf"^{way}\(\): a torch.* cannot be exported: .*{words}", convert_it, tensor)


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(torch.ones(3, 4)), "grad": lambda f: torch.func.grad(f)(torch.ones(3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(3)),
}  # fmt: skip


@needs_torch
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_of_transforms(name):
    said = {}

    def note(t):
        said["look"] = type_and_message(look, 1, t)
        if name != "functionalize":  # which can be converted
            said.update((each, type_and_message(convert, t)) for each, convert in CONVERSIONS.items())
        return t.sum()

    TRANSFORMS[name](note)
    where = "outside of vmap" if name == "vmap" else "outside of the transform"
    assert all(kind is BufferError and where in message for kind, message in said.values())
    assert said.pop("look")[1].startswith(f"{X}, a torch.Tensor, cannot be passed")
    assert all(re.match(rf"{each}\(\): a torch.* cannot be exported: ", message) for each, (_, message) in said.items())
    assert look(1, torch.ones(3)) == 0


def test_exceptions_of_frameworks_that_have_only_a_message():
    if pyarrow is not None:
        array = pyarrow.array([1.0, None])
        own, words = type_and_message(array.__dlpack__)
        assert type_and_message(look, 1, array) == (own, f"{X} cannot be passed to the kernel: {words}")
    if jax is not None:
        array = jax.numpy.ones(3)
        array.delete()
        kind, message = type_and_message(look, 1, array)
        assert kind is RuntimeError and message.startswith(f"{X} cannot be passed to the kernel: ")


@fast_args
def raises(x):
    raise TypeError("of the kernel")


def test_scalars_that_numba_has_not_and_masked_arrays_name_their_parameter_and_exceptions_of_the_kernel_arrive():
    check_raises(TypeError, f"^{re.escape(X)}: an object of type numpy.longdouble ", look, 1, np.longdouble(2))
    kind, message = type_and_message(look, 1, np.ma.zeros(3))
    assert kind is type_and_message(numba.njit(look.py_func), 1, np.ma.zeros(3))[0]
    assert message.startswith(f"{X}: a masked array cannot be passed; pass its filled(), ")
    for argument in (np.ones(3), [1, 2], "text"):
        assert type_and_message(raises, argument) == (TypeError, "of the kernel")


def test_arguments_that_are_not_declared_name_kernel_types_and_signatures():
    kernel, words = fast_args("void(float32[:])")(lambda x: None), r"\(array\(float32, 1d, A\)\)"
    check_raises(TypeError, rf"<lambda>\(x: float64\): not one of the declared signatures .* they take {words}", kernel, 3.0)
    assert re.search(f"refused with TypeError: not one of the declared .*{words}", str(kernel.explain(3.0)))


BITS = np.ones(2, "V2")
ITEMS = [(BITS, BufferError), (np.ones(2, ">f8"), BufferError), (object(), TypeError), ([], ValueError)]
if torch is not None:
    ITEMS += [(each, BufferError) for each in (torch.ones(2, device="meta"), torch.ones(3).to(torch.float8_e8m0fnu))]


def test_items_are_named_with_their_place():
    """``tests/exchange/test_storage.py`` has what is said of elements that are not computed with."""
    for value, error in ITEMS:
        for argument, place in (((1, (2, value)), "[1][1]"), ([value], "[0]"), ((1, [value]), "[1][0]")):
            kind, message = refused_twice(look, 1, argument)
            assert kind is error and message.startswith((f"{X}, item {place}, ", f"{X}, item {place}: ")), message
    for value, place in (((1, (2, BITS)), r"item \[1\]: item \[1\]"), ([BITS], r"item \[0\]")):
        assert re.search(f"- {place}: Numba cannot compute with its elements, ", str(explain(value)))
    assert not explain((1, np.ones(2))).reasons and explain([np.ones(2)]).path == "list"


def test_a_list_without_items_or_of_several_types_names_its_parameter():
    count = fast_args(lambda x, items: len(items))
    items_of = f"{count.__qualname__}(): argument 'items' (position 1)"
    for value, place in (([], ""), ([[]], ", item [0]"), (([], 1), ", item [0]"), (set(), ""), ([[[]]], ", item [0][0]")):
        assert type_and_message(numbas(count), 1.0, value)[0] is ValueError
        kind, message = refused_twice(count, 1.0, value)
        assert kind is ValueError and "; pass " in message
        assert message.startswith(f"{items_of}{place}: Numba cannot tell the type of an empty ")
    for value in ([1, "a"], [1.0, 2.0, 3], ([1, "a"], 2), [np.ones(2), 1]):
        kind, message = type_and_message(count, 1.0, value)
        assert kind is type_and_message(numbas(count), 1.0, value)[0] is TypeError
        assert message.startswith(f"{items_of}: the items of a list have one type; item 0 is ")


def test_typing_errors_name_kernel_and_types():
    wrong, x = fast_args(lambda x, y, scale=2.0: x.no_such_attribute(y) * scale), np.ones(3)
    called = f"{wrong.__qualname__}(x: array(float64, 1d, C), y: int64)"
    for args, kwargs in 3 * (((x, 4), {}), ((), {"x": x, "y": 4})):  # Numba keeps the exception, and raises it again
        ours = check_raises(TypingError, None, wrong, *args, **kwargs)
        first, *others = str(ours).splitlines()
        assert first == f"{called}: Numba cannot compile the kernel for these argument types. It says:"
        assert not any("Numba cannot compile" in each for each in others)
    plain = check_raises(TypingError, None, numbas(wrong), x, 4)
    known = [(type(e), e.__suppress_context__, type(e.__context__), type(e.__cause__), e.msg, e.loc) for e in (plain, ours)]
    assert known[0] == known[1] and plain.contexts == ours.contexts and str(ours).partition("\n")[2] == str(plain)
    if torch is not None:  # a keyword behind an omitted one
        line = type_and_message(fast_args(lambda x, a=1, b=2: x.no_such), torch.ones(2, 2), b=torch.ones(3))[1].splitlines()[0]
        assert line.startswith("test_typing_errors_name_kernel_and_types.<locals>.<lambda>(")
        assert "(x: array(float32, 2d, C), b: array(float32, 1d, C)): Numba cannot" in line


class Model:
    @fast_args
    def method(self, x):
        return x.sum()

    @classmethod
    @fast_args
    def of_class(cls, x):
        return x

    @property
    @fast_args
    def kernel(self):
        return 1

    static, cached = staticmethod(fast_args(lambda x: x.sum())), functools.cached_property(fast_args(lambda self: 1))
    cached.func.__name__ = "cached"


def test_a_method_is_to_be_a_static_one():
    derived, below = type("Derived", (Model,), {}), (staticmethod, classmethod, property, functools.cached_property)
    for cls in (Model, derived):
        assert type_and_message(cls().method, np.ones(3))[1].startswith("Model.method(): argument 'self' (position 0): ")
    others = [lambda: derived().method(1), lambda: Model().kernel, lambda: Model().cached, lambda: Model.of_class(1)]
    for call in [*others, *(lambda kind=kind: fast_args(kind(lambda x: x)) for kind in below)]:
        check_raises(TypeError, "put @staticmethod above @fast_args", call)
    assert Model().static(np.ones(3)) == derived.static(np.ones(3)) == 3
    assert "staticmethod" not in type_and_message(Model.static, object())[1]


UNKNOWN = [
    (["outs"], r"option, 'outs'; did you mean 'out'\? "),
    (["zzzzzz"], r"option, 'zzzzzz'\. Its options and those of numba.njit: "),
    (["FASTMATH"], r"option, 'FASTMATH'; did you mean 'fastmath'\? Its options.*fastmath"),
    (["fastmth", "nogil", "zzzzzz", "Paralel"],
     r"options, 'fastmth', 'zzzzzz', 'Paralel'; did you mean 'fastmath' for 'fastmth', 'parallel' for 'Paralel'\?"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "words"), UNKNOWN)
def test_unknown_options_are_refused_at_decoration(names, words):
    for function in ((), (lambda x: x,)):
        check_raises(TypeError, rf"^fast_args\(\) got (an )?unknown {words}", fast_args, *function, **dict.fromkeys(names, True))


def test_all_options_of_numba_are_known(monkeypatch):
    """Whatever Numba's own registry maps is taken, and Numba refuses what it does not map; without it nothing is refused."""
    names = ("looplift", "no_rewrites", "forceinline", "debug")
    known = {"nogil", "parallel", "fastmath", "cache", "boundscheck", "error_model", "inline", "locals", *names}
    assert numba_options() >= known
    assert fast_args(**dict.fromkeys(names, False), nogil=True, error_model="numpy", boundscheck=None)(lambda x: x + 1)(1) == 2
    check_raises(KeyError, None, numba.njit(fastmth=True)(lambda x: x), 1)
    numba_options.cache_clear()
    monkeypatch.setattr(type(CPUDispatcher.targetdescr), "options", object)
    try:
        assert numba_options() is None
        check_names(["fastmth"], ["out"])
    finally:
        numba_options.cache_clear()


def test_launches_of_a_kernel_for_the_cpu():
    for use in (lambda k: k[4, 256], lambda k: k.forall(100), lambda k: k.configure(4, 256)):
        check_raises(TypeError, r"look\(\) is a kernel for the CPU, .*: call it as look\(\.\.\.\); fast_args\(cuda=", use, look)


def what_is_said() -> list:
    kernel = lambda x, y=2: None  # noqa: E731
    made, unlike = fast_args(kernel), type("Unlike", (), {})
    outs = {"out": "x[n -> y[n]"}, {"out": "x[n] -> w[n]"}
    options = {"fastmth": True}, {"returns": "q"}, {"returns": 3}, {"grad": "alow"}, *outs
    values = (
        np.ones(2, np.float16), np.float16(1), object(), {}, [], [1, 2.0], 2**70, np.ones(2, ">f8"), np.ma.ones(3),
        np.ones(2, "V2"), (1, [np.ones(2, np.float16)]), 1, "text", None, (1, 2.0), np.ones(2),
    )  # fmt: skip
    return [
        *(end_of(lambda: fast_args(**each)(kernel)) for each in options),  # noqa: B023
        *(end_of(fast_args, each) for each in (3, unlike, staticmethod(kernel), property(kernel), lambda **o: 0)),
        *(end_of(made, each) for each in values), end_of(made), end_of(made, 1, 2, 3), end_of(made, 1, y=object()),
        end_of(made, 1, z={}), end_of(lambda: fast_args("void(int64)")(3)), end_of(fast_args(kernel, returns="x"), 1),
    ]  # fmt: skip


def test_without_compiling_the_words_are_the_same(monkeypatch):
    compiled = what_is_said()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert what_is_said() == compiled and len(str(compiled)) > 1000


def test_parameters_that_numba_has_not_are_named_with_advice():
    for function in (lambda x, **options: None, lambda x, *rest, key: None):
        check_raises(TypeError, r"<lambda>\(\): Numba compiles no functions with .*; (name its|put them)", fast_args, function)


def test_the_kind_of_an_outcome_is_said_beside_its_words():
    x, total = np.arange(3.0), fast_args(lambda x: x.sum())
    assert total.explain(x).kind == "new"
    total(x)
    assert [total.explain(each).kind for each in (x, slice(1), np.ma.ones(1))] == ["native", "numba", "refused"]
    declared = fast_args("float64(float64[:])")(lambda x: x.sum())
    assert declared.explain(x).kind == "new" and "a declared signature takes" in declared.explain(x).outcome
    assert declared(x) == 3.0 and declared.explain(x).kind == "native" and declared.explain(1.0).kind == "refused"
    narrow = fast_args("int8(int8)")(lambda x: x)  # unboxing checks the number, a cast would not
    assert narrow(5) == 5 and narrow.explain(5).kind == "numba-signature"
