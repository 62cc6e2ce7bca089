"""The calls that the benchmark times, in groups. Each group is one function; each row is one statement.

Here are the rows of calls as such; those of their arguments are in ``rows_arguments.py``.
"""

import importlib.util
from collections.abc import Iterator

import floor
import numba
import numpy as np
import rows_arguments
from groups import (
    DISPATCHER,
    OURS,
    C,
    Group,
    OnlyDunder,
    arrays,
    both,
    call,
    float_kernel_of,
    kernel_of,
    names_of,
    tensors,
    torch,
    tvm_ffi,
)

from fastexchange import convert, exchange_api, fast_args, from_dlpack, polyfill, unpolyfill


def keywords() -> Group:
    group = Group("Keyword arguments")
    by_name = call("f", names_of(3), "{0}={0}")
    for name, values in both().items():
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


def fallback(limit) -> Iterator[Group]:
    for name, wrapped in both().items():
        group = Group(f"Fallback: 3 objects with only __dlpack__ and __dlpack_device__, around {name}")
        values = {key: OnlyDunder(value) for key, value in wrapped.items()}
        plain, kernel = float_kernel_of(", ".join(values))
        names = {"f": kernel, "p": plain, "view": np.from_dlpack, "v": (1, 3), **values}
        key = f"fallback/{name}/"
        thrice = "; ".join(f"{x}.__dlpack__(max_version=v)" for x in values)
        group.add(key + "export", "__dlpack__(max_version=(1, 3)) of all three", thrice, names)
        devices = "; ".join(f"{x}.__dlpack_device__()" for x in values)
        group.add(key + "device", "__dlpack_device__() of all three", devices, names)
        group.add(key + "c", C, call("f", values), {"f": limit.dunder, **values}, key + "export")
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
    untouched = numba.njit(lambda y: None)
    kernels = {"new": lambda x: np.empty_like(x), "same": lambda x: x, "view": lambda x: x[1:]}
    kinds = {"numpy": (np.ones(4, np.float32), np.empty_like)}
    if torch is not None:
        kinds["torch"] = (torch.ones(4), torch.empty_like)
    for name, (x, empty_like) in kinds.items():
        key = f"results/{name}/"
        group.add(key + "own", f"{name}: its own empty_like(x)", "f(x)", {"f": empty_like, "x": x})
        for what, function in kernels.items():
            group.add(key + what, f"{name}: {OURS}, {what}", "f(x)", {"f": fast_args(function), "x": x}, key + "own")
        declared = fast_args(out="x[n] -> y[n]")(lambda x, y: untouched(y))
        group.add(key + "declared", f"{name}: {OURS}, a declared output", "f(x)", {"f": declared, "x": x}, key + "own")
    return group


def bound() -> Group:
    """Bound launches of an empty kernel, beside its calls with the same arguments."""
    group = Group("Bound launches")
    for count in rows_arguments.COUNTS:
        values = arrays(count) if torch is None else tensors(count)
        _, kernel = float_kernel_of(", ".join(values))
        group.add(f"bound/{count}/call", f"{OURS}, called with {count}", call("f", values), {"f": kernel, **values})
        names = {"f": kernel.bind(*values.values())}
        group.add(f"bound/{count}", f"{OURS}, bound to {count}", "f()", names, f"bound/{count}/call")
    return group


def tuples() -> Group:
    """Three tensors in a tuple, in a list, and as three arguments; a hundred in a list."""
    group = Group("3 tensors in a tuple or a list")
    for name, values in both().items():
        names = {"f": float_kernel_of("x0, x1, x2")[1], "g": kernel_of("t")[1], "t": tuple(values.values()), **values}
        group.add(f"tuple/{name}/apart", f"3 {name}", call("f", values), names)
        group.add(f"tuple/{name}/tuple", f"3 {name} in a tuple", "g(t)", names, f"tuple/{name}/apart")
        names = {"g": kernel_of("t")[1], "t": list(values.values())}
        group.add(f"tuple/{name}/list", f"3 {name} in a list", "g(t)", names, f"tuple/{name}/apart")
        names = {"g": kernel_of("t")[1], "t": 25 * list(values.values()) + [*values.values()][:1] * 25}
        group.add(f"tuple/{name}/100", f"100 {name} in a list", "g(t)", names, f"tuple/{name}/apart")
    return group


has_jax = importlib.util.find_spec("jax") is not None


def groups() -> list[Group]:
    """All groups, without the rows whose framework is not installed."""
    limit, args = floor.load(), rows_arguments
    found = [args.control(), args.no_arguments(limit), *args.numpy_arguments(limit)]
    if torch is not None:
        found += [*args.torch_arguments(limit), args.autograd(limit), args.mixed()]
    found += [*args.buffer_arguments(limit), *args.dunder_arguments(limit), *fallback(limit), *args.unpacked(limit)]
    found += [args.scalars(limit), args.numbas(), args.signatures(), args.operators()]
    found += [keywords(), optionals(), others(), results(), bound(), tuples()]
    if torch is not None:
        found.append(conversions())
    if tvm_ffi is not None:
        found.append(polyfilled())
    found.append(exports(limit))
    return [*found, *args.jax_arguments()] if has_jax else found


def left_out() -> list[str]:
    """One sentence per framework whose rows are missing."""
    frameworks = (("PyTorch", torch), ("apache-tvm-ffi", tvm_ffi), ("JAX", has_jax or None))
    missing = [f"{name} is not installed" for name, module in frameworks if module is None]
    nanobind = floor.load_nanobind()
    if isinstance(nanobind, str):
        missing.append(nanobind)
    return [f"{why[0].upper()}{why[1:]}: its rows are left out." for why in missing]
