"""Rows of arguments: how many, by which path, in how many types, and what peers take for the same."""

import array
from collections.abc import Iterator

import floor
import numba
import numpy as np
from groups import (
    DISPATCHER,
    EMPTY,
    OURS,
    C,
    Group,
    OnlyDunder,
    arrays,
    both,
    call,
    float_kernel_of,
    kernel_of,
    many,
    names_of,
    plain_kernel,
    tensors,
    torch,
    tvm_ffi,
)

from fastexchange import fast_args

COUNTS = (1, 3, 16, 32, 58)
"""How many arguments the calls have. None at all is a group of its own."""

SLOPE_COUNTS = (1, 3, 16, 32)
"""Those over which the slope is taken."""

BEYOND = (32, 58)
"""Those between which the slope is taken of the many."""

FRAME = (64, 65)
"""The most leaves that a call's frame has room for, and one more: such calls are made by the general native path."""


def control() -> Group:
    group = Group("A/A control: the same call twice; what differs is noise")
    for name, values in both().items():
        _, kernel = float_kernel_of(", ".join(values))
        names = {"f": kernel, **values}
        group.add(f"control/{name}/a", f"3 {name} arguments", call("f", values), names)
        group.add(f"control/{name}/b", f"3 {name} arguments, again", call("f", values), names, f"control/{name}/a")
    return group


# ---- by path and number ----------------------------------------------------------------------------------------------


def _peers(group: Group, key: str, code: str, values: dict) -> None:
    """tvm-ffi's and nanobind's functions that do nothing, where they are installed."""
    if tvm_ffi is not None:
        nop = tvm_ffi.get_global_func("testing.nop")
        group.add(key + "tvm", "tvm-ffi testing.nop", code, {"f": nop, **values}, key + "fast")
    nanobind = floor.load_nanobind()
    if not isinstance(nanobind, str):
        take = getattr(nanobind, f"take_{len(values)}")
        group.add(key + "nanobind", "nanobind, nb::ndarray", code, {"f": take, **values}, key + "fast")


def no_arguments(limit) -> Group:
    group = Group("No arguments")
    plain, kernel = kernel_of("")
    group.add("none/0/empty", EMPTY, "f()", {"f": limit.empty})
    group.add("none/0/c", C, "f()", {"f": limit.numpy}, "none/0/empty")
    group.add("none/0/fast", OURS, "f()", {"f": kernel}, "none/0/c")
    group.add("none/0/njit", DISPATCHER, "f()", {"f": plain}, "none/0/fast")
    _peers(group, "none/0/", "f()", {})
    return group


def numpy_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(many(count, "NumPy array"))
        values = arrays(count)
        plain, kernel = float_kernel_of(", ".join(values))
        key, code = f"numpy/{count}/", call("f", values)
        group.add(key + "empty", EMPTY, code, {"f": limit.empty, **values})
        group.add(key + "c", C, code, {"f": limit.numpy, **values}, key + "empty")
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        group.add(key + "njit", DISPATCHER, code, {"f": plain, **values}, key + "fast")
        _peers(group, key, code, values)
        if count == 3:
            through = call("f", values, "view({})")
            names = {"f": plain, "view": np.from_dlpack, **values}
            group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", through, names, key + "fast")
        yield group


def torch_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(many(count, "PyTorch CPU tensor"))
        values = tensors(count)
        plain, kernel = float_kernel_of(", ".join(values))
        key, code = f"torch/{count}/", call("f", values)
        group.add(key + "empty", EMPTY, code, {"f": limit.empty, **values})
        group.add(key + "c", f"{C}, borrowing", code, {"f": limit.torch, **values}, key + "empty")
        if (quicker := floor.load_torch()) is not None:
            group.add(key + "memory", f"{C}, in memory", code, {"f": quicker.memory, **values}, key + "c")
            group.add(key + "abi", f"{C}, PyTorch's C ABI", code, {"f": quicker.abi, **values}, key + "c")
        group.add(key + "managed", f"{C}, owning", code, {"f": limit.torch_managed, **values}, key + "c")
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        _peers(group, key, code, values)
        if count in (1, 3):
            holding = fast_args(nogil=True)(plain.py_func)
            group.add(key + "holding", f"{OURS}, nogil=True", code, {"f": holding, **values}, key + "managed")
        if count == 3:
            names = {"f": plain, "view": np.from_dlpack, **values}
            group.add(key + "views", "njit(x.numpy(), …)", call("f", values, "{}.numpy()"), names, key + "fast")
            through = call("f", values, "view({})")
            group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", through, names, key + "fast")
        yield group


def jax_arguments() -> Iterator[Group]:
    """JAX's arrays, and outputs in JAX. Its threads are started here, after all other rows have been made."""
    import jax

    values = {name: jax.numpy.ones(1) for name in names_of(3)}
    jax.block_until_ready(values)
    plain, kernel = float_kernel_of(", ".join(values))
    group = Group(many(3, "JAX array"))
    group.add("jax/3/fast", OURS, call("f", values), {"f": kernel, **values})
    through = call("f", values, "view({})")
    group.add("jax/3/asarray", "njit(np.asarray(x), …)", through, {"f": plain, "view": np.asarray, **values}, "jax/3/fast")
    yield group

    def add(x, y, total):
        for i in range(x.size):
            total[i] = x[i] + y[i]

    group = Group("An output in JAX: the sum of two arrays of 4 elements")
    values = {"x": jax.numpy.arange(4.0), "y": jax.numpy.ones(4)}
    new = "back(f(view(x), view(y)))"
    jitted = jax.jit(lambda x, y: x + y)
    group.add("jax/output/jit", "jax.jit(x + y)", "f(x, y)", {"f": jitted, **values})
    ours = fast_args(out="x[n], y[n] -> total[n]")(add)
    group.add("jax/output/fast", f"{OURS}, out=…", "f(x, y)", {"f": ours, **values}, "jax/output/jit")
    sums = numba.njit(lambda x, y: x + y)
    names = {"f": sums, "view": np.asarray, "back": jax.numpy.asarray, **values}
    group.add("jax/output/asarray", "jnp.asarray(njit(np.asarray(x), …))", new, names, "jax/output/jit")
    group.add("jax/result/fast", f"{OURS}, a new array", "f(x, y)", {"f": fast_args(sums.py_func), **values}, "jax/output/jit")
    yield group


def buffer_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(many(count, "array.array object"))
        values = {name: array.array("f", [1]) for name in names_of(count)}
        plain, kernel = kernel_of(", ".join(values))
        key, code = f"buffer/{count}/", call("f", values)
        group.add(key + "c", f"{C}, PyObject_GetBuffer", code, {"f": limit.buffer, **values})
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        group.add(key + "njit", DISPATCHER, code, {"f": plain, **values}, key + "fast")
        yield group


def dunder_arguments(limit) -> Iterator[Group]:
    for count in COUNTS:
        group = Group(f"{many(count, 'object')} with only __dlpack__, around NumPy")
        values = {name: OnlyDunder(value) for name, value in arrays(count).items()}
        plain, kernel = float_kernel_of(", ".join(values))
        key, code = f"dunder/{count}/", call("f", values)
        group.add(key + "c", f"{C}, calling __dlpack__", code, {"f": limit.dunder, **values})
        group.add(key + "fast", OURS, code, {"f": kernel, **values}, key + "c")
        names = {"f": plain, "view": np.from_dlpack, **values}
        group.add(key + "from_dlpack", "njit(np.from_dlpack(x), …)", call("f", values, "view({})"), names, key + "fast")
        yield group


def unpacked(limit) -> Iterator[Group]:
    """The same calls as ``f(*arguments)``: the interpreter's own part does not grow with their number."""
    makers = {"numpy": (arrays, limit.numpy)} | ({"torch": (tensors, limit.torch)} if torch is not None else {})
    for name, (make, by_hand) in makers.items():
        group = Group(f"f(*arguments), {name}")
        for count in (*COUNTS, *FRAME):
            values = make(count)
            _, kernel = float_kernel_of(", ".join(values))
            key, names = f"unpacked/{name}/{count}/", {"t": tuple(values.values())}
            group.add(key + "empty", f"{count}: {EMPTY}", "f(*t)", {"f": limit.empty, **names})
            group.add(key + "c", f"{count}: {C}", "f(*t)", {"f": by_hand, **names}, key + "empty")
            group.add(key + "fast", f"{count}: {OURS}", "f(*t)", {"f": kernel, **names}, key + "c")
        yield group


# ---- kinds -----------------------------------------------------------------------------------------------------------


def autograd(limit) -> Group:
    """Tensors that autograd keeps notes on: views, and leaves that require grad while grad mode is off."""
    group = Group("3 PyTorch CPU tensors that autograd knows")
    mode = {"no_grad": torch.no_grad}
    group.add("autograd/mode", "no_grad() alone, per call", "with no_grad(): pass", mode, calls=_CALLS_IN_MODE)
    for key, label, make in (
        ("views", "views", lambda: torch.ones(4)[1:2]),
        ("weights", "requiring grad, in no_grad()", lambda: torch.ones(1, requires_grad=True)),
    ):
        values = {name: make() for name in names_of(3)}
        _, kernel = float_kernel_of(", ".join(values))
        code = call("f", values)
        if key == "weights":
            code = f"with no_grad(): {'; '.join([code] * _CALLS_IN_MODE)}"
        calls = _CALLS_IN_MODE if key == "weights" else 1
        names = {"no_grad": torch.no_grad, **values}
        group.add(f"autograd/{key}/c", f"{C}, {label}", code, {"f": limit.torch, **names}, calls=calls)
        group.add(f"autograd/{key}/fast", f"{OURS}, {label}", code, {"f": kernel, **names}, f"autograd/{key}/c", calls)
    return group


_CALLS_IN_MODE = 20  # entering the mode is not what is measured, and has a row of its own


def scalars(limit) -> Group:
    """Calls with one and with nine scalars of a kind: an eighth of the difference is what one costs."""
    group = Group("Python scalars: 1 and 9 of each kind")
    for kind, value in (("float", 2.5), ("int", 3), ("bool", True)):
        for count in (1, 9):
            values = dict.fromkeys(names_of(count), value)
            plain, kernel = kernel_of(", ".join(values))
            key, code, label = f"scalar/{kind}/{count}/", call("f", values), f"{count} {kind}"
            group.add(key + "c", f"{label}: {C}", code, {"f": limit.scalars, **values})
            group.add(key + "fast", f"{label}: {OURS}", code, {"f": kernel, **values}, key + "c")
            group.add(key + "njit", f"{label}: {DISPATCHER}", code, {"f": plain, **values}, key + "fast")
    return group


def numbas() -> Group:
    """Arguments that only Numba's dispatcher reads: what handing the call to it costs."""
    group = Group("Arguments that only Numba's dispatcher reads")
    for key, (label, value) in NUMBAS.items():
        plain, kernel = kernel_of("x0")
        values = {"x0": value}
        group.add(f"numbas/{key}/njit", f"{label}: {DISPATCHER}", "f(x0)", {"f": plain, **values})
        group.add(f"numbas/{key}/fast", f"{label}: {OURS}", "f(x0)", {"f": kernel, **values}, f"numbas/{key}/njit")
    return group


NUMBAS = {
    "floats": ("a list of two floats", [1.0, 2.0]),
    "bools": ("a list of a bool", [True]),
    "thousand": ("a list of 1,000 floats", [1.0] * 1000),
    "tuple": ("a tuple with such a list", ([1.0], 2)),
    "set": ("a set", {1, 2}),
    "typed": ("a typed list", numba.typed.List([1.0])),
    "date": ("a date", np.datetime64("2020-01-01")),
}


def mixed() -> Group:
    """One kernel with one signature that is called with tensors of both frameworks."""
    group = Group("NumPy and PyTorch in one kernel, 3 arguments")
    _, kernel = float_kernel_of("x0, x1, x2")
    of_numpy, of_torch = call("f", names_of(3)), call("f", names_of(3), "t_{}")
    names = {"f": kernel, **arrays(3), **{f"t_{name}": value for name, value in tensors(3).items()}}
    group.add("mixed/numpy", "NumPy", of_numpy, names)
    group.add("mixed/torch", "PyTorch, with a kernel first called with NumPy", of_torch, names)
    group.add("mixed/turn", "NumPy and PyTorch in turn, per call", f"{of_numpy}; {of_torch}", names, calls=2)
    group.add("mixed/one", "NumPy, PyTorch, NumPy in one call", "f(x0, t_x1, x2)", names)
    return group


def operators() -> Group:
    """One element added to one element, into given memory: by a kernel, and by the frameworks' own operators."""

    def add(x, y, out):
        for i in range(out.shape[0]):
            out[i] = x[i] + y[i]

    group = Group("The frameworks' own operators: x + y of one element, into out")
    theirs = {"numpy": ("np.add(x, y, out)", "f(x0, x1, x2)", np.add)}
    if torch is not None:
        theirs["torch"] = ("torch.add(x, y, out=out)", "f(x0, x1, out=x2)", torch.add)
    for name, values in both().items():
        label, code, operator = theirs[name]
        ours = f"operator/{name}/fast"
        group.add(ours, f"{name}: {OURS}, a kernel that adds", "f(x0, x1, x2)", {"f": fast_args(add), **values})
        group.add(f"operator/{name}/own", label, code, {"f": operator, **values}, ours)
    return group


# ---- call sites that see many types ----------------------------------------------------------------------------------

SIGNATURES = (1, 2, 4, 8, 16, 32, 64)
"""How many signatures a kernel has."""


def _arrays_of_types() -> list[np.ndarray]:
    """64 arrays that Numba has different types for. The first eight differ in element type, dimensions and layout."""
    square = np.ones((2, 2))
    found = [np.ones(1, np.float32), np.ones(1), np.ones(1, np.int64), square.astype(np.float32), square]
    found += [np.asfortranarray(square), np.ones(4)[::2], np.ones((2, 2, 2))]
    for ndim in (1, 2, 3, 4):
        for dtype in ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8"):
            whole = np.ones((3,) * ndim, dtype)
            found += [whole, whole[..., ::2]]
    by_type: dict = {}
    for array_ in found:
        by_type.setdefault(numba.typeof(array_), array_)
    return list(by_type.values())[: SIGNATURES[-1]]


def signatures() -> Group:
    """Kernels of 1 to 64 signatures: the first and the last called repeatedly, and all of them in turn.

    "Apart" are as many kernels of one signature each, called in turn: the same code at the call sites, and as many types.
    """
    group = Group("Polymorphic kernels, 3 NumPy arrays per call")
    values = {f"v{i}": value for i, value in enumerate(_arrays_of_types())}
    arguments = {name: f"{name}, {name}, {name}" for name in values}
    alone = {name: kernel_of("x0, x1, x2")[1] for name in values}
    shared = plain_kernel("x0, x1, x2")  # ours do not look at how many signatures it has
    for count in SIGNATURES:
        used = list(values)[:count]
        plain, kernel = plain_kernel("x0, x1, x2"), fast_args(shared)
        names = {"f": kernel, "p": plain, **{name: values[name] for name in used}}
        for name in used:
            kernel(values[name], values[name], values[name])  # learnt in this order
        key, label = f"sites/{count}/", f"{many(count, 'signature')}: "
        once = {name: names[name] for name in ("f", used[0], used[-1])}
        group.add(key + "last", label + "the last, repeatedly", f"f({arguments[used[-1]]})", once)
        if count > 1:
            group.add(key + "first", label + "the first, repeatedly", f"f({arguments[used[0]]})", once)
        apart = {f"f_{name}": alone[name] for name in used} | names
        code = "; ".join(f"f_{name}({arguments[name]})" for name in used)
        group.add(key + "apart", f"{many(count, 'kernel')} of one in turn, per call", code, apart, key + "last", count)
        turn = "; ".join(f"f({arguments[name]})" for name in used)
        group.add(key + "turn", label + "in turn, per call", turn, names, key + "apart", count)
        turn = turn.replace("f(", "p(")
        group.add(key + "njit", label + f"the same, {DISPATCHER}", turn, names, key + "turn", count)
    return group
