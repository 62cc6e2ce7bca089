"""The calls that the benchmark times, in groups. Each group is one function; each row is one statement."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import floor
import numba
import numpy as np

from fastexchange import convert, exchange_api, fast_args, from_dlpack, polyfill, unpolyfill
from fastexchange.measuring.timing import Statement

try:
    import torch
except ImportError:
    torch = None
try:
    import tvm_ffi
except ImportError:
    tvm_ffi = None

COUNTS = (1, 2, 3, 6, 12, 32)
"""How many arguments the calls of the first groups have."""

DISPATCHER = "Numba's dispatcher"
OURS = "fastexchange"
C = "hand-written C"
EMPTY = "empty C builtin"


@dataclass(frozen=True)
class Row:
    """One statement, and the row of the same group that its time is divided by."""

    key: str
    label: str
    statement: Statement
    reference: str | None = None


@dataclass
class Group:
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, key: str, label: str, code: str, names: dict[str, Any], reference: str | None = None, calls: int = 1):
        self.rows.append(Row(key, label, Statement(code, names, calls), reference))


def kernel_of(parameters: str):
    """A kernel with these parameters that does nothing: as plain ``@njit``, and with ``@fast_args`` over it."""
    namespace: dict[str, Any] = {}
    exec(f"def kernel({parameters}):\n    pass\n", namespace)
    plain = numba.njit(namespace["kernel"])
    return plain, fast_args(plain)


def call(function: str, names, form: str = "{}") -> str:
    return f"{function}({', '.join(form.format(name) for name in names)})"


def arrays(count: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """1-D arrays of one element: a kernel's own work must not hide what its arguments cost."""
    return {f"x{i}": np.ones(1, dtype) for i in range(count)}


def tensors(count: int) -> dict[str, Any]:
    return {f"x{i}": torch.ones(1) for i in range(count)}


def _both() -> dict[str, dict[str, Any]]:
    """Three arguments of each framework installed."""
    return {"numpy": arrays(3)} | ({"torch": tensors(3)} if torch is not None else {})


# ---- groups --------------------------------------------------------------------------------------------------------


def control() -> Group:
    group = Group("A/A control: the same call twice; what differs is noise")
    for name, values in _both().items():
        _, kernel = kernel_of(", ".join(values))
        names = {"f": kernel, **values}
        group.add(f"control/{name}/a", f"3 {name} arguments", call("f", values), names)
        group.add(f"control/{name}/b", f"3 {name} arguments, again", call("f", values), names, f"control/{name}/a")
    return group


def numpy_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(f"{count} NumPy array{'s' * (count > 1)}")
        values = arrays(count)
        plain, kernel = kernel_of(", ".join(values))
        key, code = f"numpy/{count}/", call("f", values)
        group.add(key + "empty", EMPTY, code, {"f": limit.empty, **values})
        group.add(key + "c", C, code, {"f": limit.numpy, **values}, key + "empty")
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        group.add(key + "njit", DISPATCHER, code, {"f": plain, **values}, key + "fast")
        if tvm_ffi is not None:
            nop = tvm_ffi.get_global_func("testing.nop")
            group.add(key + "tvm", "tvm-ffi testing.nop", code, {"f": nop, **values}, key + "fast")
        if count == 3:
            through = call("f", values, "view({})")
            names = {"f": plain, "view": np.from_dlpack, **values}
            group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", through, names, key + "fast")
        yield group


def torch_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(f"{count} PyTorch CPU tensor{'s' * (count > 1)}")
        values = tensors(count)
        plain, kernel = kernel_of(", ".join(values))
        key, code = f"torch/{count}/", call("f", values)
        group.add(key + "empty", EMPTY, code, {"f": limit.empty, **values})
        group.add(key + "c", f"{C}, borrowing", code, {"f": limit.torch, **values}, key + "empty")
        group.add(key + "managed", f"{C}, owning", code, {"f": limit.torch_managed, **values}, key + "c")
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        if tvm_ffi is not None:
            nop = tvm_ffi.get_global_func("testing.nop")
            group.add(key + "tvm", "tvm-ffi testing.nop", code, {"f": nop, **values}, key + "fast")
        if count == 3:
            names = {"f": plain, "view": np.from_dlpack, **values}
            group.add(key + "views", "njit(x.numpy(), …)", call("f", values, "{}.numpy()"), names, key + "fast")
            through = call("f", values, "view({})")
            group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", through, names, key + "fast")
        yield group


def autograd(limit) -> Group:
    """Tensors that autograd keeps notes on: views, and leaves that require grad while grad mode is off."""
    group = Group("3 PyTorch CPU tensors that autograd knows")
    for key, label, make in (
        ("views", "views", lambda: torch.ones(4)[1:2]),
        ("weights", "requiring grad, in no_grad()", lambda: torch.ones(1, requires_grad=True)),
    ):
        values = {f"x{i}": make() for i in range(3)}
        _, kernel = kernel_of(", ".join(values))
        code = call("f", values)
        if key == "weights":
            code = f"with no_grad(): {'; '.join([code] * _CALLS_IN_MODE)}"
        calls = _CALLS_IN_MODE if key == "weights" else 1
        names = {"no_grad": torch.no_grad, **values}
        group.add(f"autograd/{key}/c", f"{C}, {label}", code, {"f": limit.torch, **names}, calls=calls)
        group.add(f"autograd/{key}/fast", f"{OURS}, {label}", code, {"f": kernel, **names}, f"autograd/{key}/c", calls)
    return group


_CALLS_IN_MODE = 20  # entering the mode is not what is measured


def unpacked(limit) -> Iterator[Group]:
    """The same calls as ``f(*arguments)``: the interpreter's own part does not grow with their number."""
    makers = {"numpy": (arrays, limit.numpy)} | ({"torch": (tensors, limit.torch)} if torch is not None else {})
    for name, (make, by_hand) in makers.items():
        group = Group(f"f(*arguments), {name}")
        for count in COUNTS:
            values = make(count)
            _, kernel = kernel_of(", ".join(values))
            key, names = f"unpacked/{name}/{count}/", {"t": tuple(values.values())}
            group.add(key + "empty", f"{count}: {EMPTY}", "f(*t)", {"f": limit.empty, **names})
            group.add(key + "c", f"{count}: {C}", "f(*t)", {"f": by_hand, **names}, key + "empty")
            group.add(key + "fast", f"{count}: {OURS}", "f(*t)", {"f": kernel, **names}, key + "c")
        yield group


def scalars(limit) -> Group:
    """Calls with one and with nine scalars of a kind: an eighth of the difference is what one costs."""
    group = Group("Python scalars: 1 and 9 of each kind")
    for kind, value in (("float", 2.5), ("int", 3), ("bool", True)):
        for count in (1, 9):
            values = {f"x{i}": value for i in range(count)}
            plain, kernel = kernel_of(", ".join(values))
            key, code, many = f"scalar/{kind}/{count}/", call("f", values), f"{count} {kind}"
            group.add(key + "c", f"{many}: {C}", code, {"f": limit.scalars, **values})
            group.add(key + "fast", f"{many}: {OURS}", code, {"f": kernel, **values}, key + "c")
            group.add(key + "njit", f"{many}: {DISPATCHER}", code, {"f": plain, **values}, key + "fast")
    return group


def mixed() -> Group:
    """One kernel with one signature that is called with tensors of both frameworks."""
    group = Group("NumPy and PyTorch in one kernel, 3 arguments")
    _, kernel = kernel_of("x0, x1, x2")
    of_numpy, of_torch = call("f", names_of(3)), call("f", names_of(3), "t_{}")
    names = {"f": kernel, **arrays(3), **{f"t_{name}": value for name, value in tensors(3).items()}}
    group.add("mixed/numpy", "NumPy", of_numpy, names)
    group.add("mixed/torch", "PyTorch, with a kernel first called with NumPy", of_torch, names)
    group.add("mixed/turn", "NumPy and PyTorch in turn, per call", f"{of_numpy}; {of_torch}", names, calls=2)
    group.add("mixed/one", "NumPy, PyTorch, NumPy in one call", "f(x0, t_x1, x2)", names)
    return group


SIGNATURES = [
    lambda: np.ones(1, np.float32),
    lambda: np.ones(1),
    lambda: np.ones(1, np.int64),
    lambda: np.ones((2, 2), np.float32),
    lambda: np.ones((2, 2)),
    lambda: np.asfortranarray(np.ones((2, 2))),
    lambda: np.ones(4)[::2],
    lambda: np.ones((2, 2, 2)),
]


def signatures() -> Group:
    """Eight signatures of one kernel: the first and last called repeatedly, and all of them in turn."""
    group = Group("8 live signatures of one kernel, 3 NumPy arrays each")
    plain, kernel = kernel_of("x0, x1, x2")
    names = {"f": kernel, "p": plain}
    calls = []
    for number, make in enumerate(SIGNATURES, 1):
        values = {f"s{number}_{i}": make() for i in range(3)}
        names |= values | {f"f{number}": kernel_of("x0, x1, x2")[1]}
        calls.append(", ".join(values))
        kernel(*values.values())  # learnt in this order
    group.add("signatures/1", "signature 1 of 8, called repeatedly", f"f({calls[0]})", names)
    group.add("signatures/8", "signature 8 of 8, called repeatedly", f"f({calls[7]})", names, "signatures/1")
    apart = "; ".join(f"f{number}({values})" for number, values in enumerate(calls, 1))
    group.add("signatures/apart", "8 kernels of one signature each in turn, per call", apart, names, "signatures/1", 8)
    turn, apart = "; ".join(f"f({values})" for values in calls), "signatures/apart"
    group.add("signatures/turn", "8 signatures of one kernel in turn, per call", turn, names, apart, 8)
    turn = turn.replace("f(", "p(")
    group.add("signatures/njit", f"the same, {DISPATCHER}", turn, names, "signatures/turn", 8)
    return group


def keywords() -> Group:
    group = Group("Keyword arguments")
    by_name = call("f", names_of(3), "{0}={0}")
    for name, values in _both().items():
        plain, kernel = kernel_of(", ".join(values))
        key = f"keywords/{name}/"
        names = {"f": kernel, **values}
        group.add(key + "0", f"3 {name}, positional", call("f", values), names)
        group.add(key + "1", f"3 {name}, the last by keyword", "f(x0, x1, x2=x2)", names, key + "0")
        group.add(key + "3", f"3 {name}, all by keyword", by_name, names, key + "0")
        group.add(key + "r", f"3 {name}, all by keyword, reversed", "f(x2=x2, x1=x1, x0=x0)", names, key + "0")
        if name == "numpy":
            names = {"f": plain, **values}
            group.add("keywords/njit", f"3 numpy, all by keyword: {DISPATCHER}", by_name, names, key + "3")
    return group


def names_of(count: int) -> list[str]:
    return [f"x{i}" for i in range(count)]


OPTIONALS = {"omitted": "an omitted default", "none": "None", "bool": "a bool"}


def optionals() -> Group:
    """What an omitted default, a None and a bool add to a call with one array."""
    group = Group("Omitted default, None, bool: added to a call with one NumPy array")
    x = np.ones(1, np.float32)
    for who, label in (("fast", OURS), ("njit", DISPATCHER)):

        def add(kind: str, text: str, parameters: str, code: str, who=who, label=label):
            plain, kernel = kernel_of(parameters)
            names = {"f": kernel if who == "fast" else plain, "x": x, "n": None, "b": True}
            key = f"optional/{kind}/{who}"
            group.add(key, f"{text}: {label}", code, names, f"optional/one/{who}" if kind != "one" else None)

        add("one", "f(x)", "x", "f(x)")
        add("omitted", "f(x), 1 default omitted", "x, a=2.5", "f(x)")
        add("omitted4", "f(x), 4 defaults omitted", "x, a=2.5, b=3, c=None, d=True", "f(x)")
        add("none", "f(x, None)", "x, a", "f(x, n)")
        add("bool", "f(x, True)", "x, a", "f(x, b)")
    return group


def others() -> Group:
    """Single arguments of the kinds that are dear with Numba's dispatcher."""
    group = Group("Other single arguments")
    readonly = np.ones(1, np.float32)
    readonly.flags.writeable = False
    kinds = {
        "a readonly array": readonly,
        "a 6-D array": np.ones((1,) * 6),
        "a NumPy float32": np.float32(2.5),
        "a NumPy bool": np.bool_(True),
        "a complex": 2.5j,
        "a str": "sum",
        "a tuple of two floats": (2.5, 3.5),
        "a tuple of two arrays": (np.ones(1), np.ones(1)),
    }
    for kind, value in kinds.items():
        plain, kernel = kernel_of("x")
        key = f"other/{kind}/"
        group.add(key + "fast", f"{kind}: {OURS}", "f(x)", {"f": kernel, "x": value})
        group.add(key + "njit", f"{kind}: {DISPATCHER}", "f(x)", {"f": plain, "x": value}, key + "fast")
    return group


class OnlyDunder:
    """A producer of the plainest kind: the two methods of the protocol, in Python, and nothing else."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._tensor.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def fallback() -> Iterator[Group]:
    for name, wrapped in _both().items():
        group = Group(f"Fallback: 3 objects with only __dlpack__ and __dlpack_device__, around {name}")
        values = {key: OnlyDunder(value) for key, value in wrapped.items()}
        plain, kernel = kernel_of(", ".join(values))
        names = {"f": kernel, "p": plain, "view": np.from_dlpack, "v": (1, 3), **values}
        key = f"fallback/{name}/"
        thrice = "; ".join(f"{x}.__dlpack__(max_version=v)" for x in values)
        group.add(key + "export", "__dlpack__(max_version=(1, 3)) of all three", thrice, names)
        devices = "; ".join(f"{x}.__dlpack_device__()" for x in values)
        group.add(key + "device", "__dlpack_device__() of all three", devices, names)
        group.add(key + "fast", OURS, call("f", values), names, key + "export")
        through = call("p", values, "view({})")
        group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", through, names, key + "fast")
        yield group


def conversions() -> Group:
    """One tensor into the other framework; what is made is dropped within the statement."""
    group = Group("Conversions between NumPy and PyTorch, 1 tensor")
    x, t = np.ones(1, np.float32), torch.ones(1)
    ours = "convert/numpy/fast"
    group.add(ours, "from_dlpack(tensor)", "f(t)", {"f": from_dlpack, "t": t})
    group.add("convert/numpy/numpy", "np.from_dlpack(tensor)", "f(t)", {"f": np.from_dlpack, "t": t}, ours)
    ours = "convert/torch/fast"
    group.add(ours, "convert(array, torch.Tensor)", "f(x, to)", {"f": convert, "x": x, "to": torch.Tensor})
    group.add("convert/torch/dlpack", "torch.from_dlpack(array)", "f(x)", {"f": torch.from_dlpack, "x": x}, ours)
    group.add("convert/torch/from_numpy", "torch.from_numpy(array)", "f(x)", {"f": torch.from_numpy, "x": x}, ours)
    return group


def polyfilled() -> Group:
    """tvm-ffi's empty function with arrays for which it found our exchange table, and with arrays for which it did not.

    It remembers per type, for the life of the thread, whether there was a table at its first look. So a subclass shows it
    the table once, and then ``numpy.ndarray`` is again as it was: the rows of other groups see nothing of it.
    """

    class Array(np.ndarray):
        pass

    class PolyfilledArray(np.ndarray):
        pass

    group = Group("tvm-ffi testing.nop, 3 NumPy arrays, with and without polyfill(numpy.ndarray)")
    nop = tvm_ffi.get_global_func("testing.nop")

    def add(key: str, label: str, cls: type, reference: str | None = None):
        values = {name: array.view(cls) for name, array in arrays(3).items()}
        nop(*values.values())  # its first look at the type
        group.add(f"polyfill/{key}", label, call("f", values), {"f": nop, **values}, reference)

    polyfill(np.ndarray)
    try:
        add("with", "polyfilled (a subclass of ndarray)", PolyfilledArray)
    finally:
        unpolyfill(np.ndarray)
    add("without", "not polyfilled", np.ndarray, "polyfill/with")
    add("subclass", "not polyfilled, a subclass of ndarray", Array, "polyfill/without")
    return group


EXPORTED_NDIMS = (1, 3)
_EXPORTS = 100  # per statement, in a loop in C: the interpreter has no part in them


def exports(limit) -> Group:
    """NumPy's owning export and its deleter, through two tables and one caller in C."""
    group = Group("NumPy's managed export and its deleter, called from C")
    for ndim in EXPORTED_NDIMS:
        key, code = f"export/{ndim}/", "f(table, x, n)"
        names = {"f": limit.export_and_delete, "x": np.ones((1,) * ndim, np.float32), "n": _EXPORTS}
        by_hand, ours = ({"table": table, **names} for table in (limit.numpy_table, exchange_api(np.ndarray)))
        group.add(key + "c", f"{ndim}-D: {C}", code, by_hand, calls=_EXPORTS)
        group.add(key + "fast", f"{ndim}-D: {OURS}", code, ours, key + "c", _EXPORTS)
    return group


def results() -> Group:
    """Kernels that return an array: a new one of four elements, their argument, a view of it."""
    group = Group("Results")
    kernels = {"new": lambda x: np.empty_like(x), "same": lambda x: x, "view": lambda x: x[1:]}
    kinds = {"numpy": (np.ones(4, np.float32), np.empty_like)}
    if torch is not None:
        kinds["torch"] = (torch.ones(4), torch.empty_like)
    for name, (x, empty_like) in kinds.items():
        key = f"results/{name}/"
        group.add(key + "own", f"{name}: its own empty_like(x)", "f(x)", {"f": empty_like, "x": x})
        for what, function in kernels.items():
            group.add(key + what, f"{name}: {OURS}, {what}", "f(x)", {"f": fast_args(function), "x": x}, key + "own")
        declared = fast_args(out="x[n] -> y[n]")(lambda x, y: None)
        group.add(key + "declared", f"{name}: {OURS}, a declared output", "f(x)", {"f": declared, "x": x}, key + "own")
    return group


def bound(limit) -> Group:
    """Bound launches of an empty kernel: whatever it was bound to, against C that is called with nothing.

    CPython 3.11 has a shortcut for the empty builtin that is declared to take arguments (METH_FASTCALL). No object has it
    that is not a builtin function, so a C object whose call is a C function is the limit for a launch.
    """
    group = Group("Bound launches")
    group.add("bound/empty", f"{EMPTY}, without arguments", "f()", {"f": limit.empty})
    group.add("bound/noargs", f"{EMPTY} that takes none (METH_NOARGS)", "f()", {"f": limit.empty_without}, "bound/empty")
    group.add("bound/object", f"{C}: an object with vectorcall", "f()", {"f": limit.launch()}, "bound/empty")
    make = arrays if torch is None else tensors
    for count in COUNTS:
        values = make(count)
        _, kernel = kernel_of(", ".join(values))
        group.add(f"bound/{count}", f"{OURS}, bound to {count}", "f()", {"f": kernel.bind(*values.values())}, "bound/empty")
    return group


def tuples() -> Group:
    """Three tensors in a tuple, in a list, and as three arguments; a hundred in a list."""
    group = Group("3 tensors in a tuple or a list")
    for name, values in _both().items():
        names = {"f": kernel_of("x0, x1, x2")[1], "g": kernel_of("t")[1], "t": tuple(values.values()), **values}
        group.add(f"tuple/{name}/apart", f"3 {name}", call("f", values), names)
        group.add(f"tuple/{name}/tuple", f"3 {name} in a tuple", "g(t)", names, f"tuple/{name}/apart")
        names = {"g": kernel_of("t")[1], "t": list(values.values())}
        group.add(f"tuple/{name}/list", f"3 {name} in a list", "g(t)", names, f"tuple/{name}/apart")
        names = {"g": kernel_of("t")[1], "t": 25 * list(values.values()) + [*values.values()][:1] * 25}
        group.add(f"tuple/{name}/100", f"100 {name} in a list", "g(t)", names, f"tuple/{name}/apart")
    return group


def groups() -> list[Group]:
    """All groups, without the rows whose framework is not installed."""
    limit = floor.load()
    found = [control(), *numpy_arguments(limit)]
    if torch is not None:
        found += [*torch_arguments(limit), autograd(limit), mixed()]
    found += [*unpacked(limit), scalars(limit), signatures(), keywords(), optionals(), others(), *fallback()]
    found += [results(), bound(limit), tuples()]
    if torch is not None:
        found.append(conversions())
    if tvm_ffi is not None:
        found.append(polyfilled())
    return [*found, exports(limit)]


def left_out() -> list[str]:
    """One sentence per framework whose rows are missing."""
    frameworks = (("PyTorch", torch), ("apache-tvm-ffi", tvm_ffi))
    return [f"{name} is not installed: its rows are left out." for name, module in frameworks if module is None]
