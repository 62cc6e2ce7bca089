"""Advice for objects that users pass as tensors and that are none: what they are, and what to pass instead.

Types are known by their names, so that no framework is imported, and none has to be installed. Only messages depend on it.
"""

import collections
import types

__all__ = ["advice_for"]

_INSTEAD = {
    ("pandas", "NDFrame"): "pass its .to_numpy()",
    ("pandas", "Index"): "pass its .to_numpy()",
    ("pandas", "ExtensionArray"): "pass its .to_numpy()",
    ("polars", "Series"): "pass its .to_numpy()",
    ("polars", "DataFrame"): "pass its .to_numpy()",
    ("xarray", "DataArray"): "pass its .data",
    ("xarray", "Variable"): "pass its .data",
    ("xarray", "Dataset"): "pass the .data of its variables",
    ("scipy", "spmatrix"): "pass its .toarray(), or the arrays that it consists of",
    ("scipy", "sparray"): "pass its .toarray(), or the arrays that it consists of",
    ("PIL", "Image"): "pass numpy.asarray(…) of it",
}
"""By package and name of a class: what to pass instead of its objects, and of those of derived classes."""

_SEVERAL = {
    ("torch", "Size"): "pass tuple(…) of it",
    ("torch", "Module"): "pass its tensors, for example list(module.parameters())",
}
"""The same of what a kernel may take as a list or a tuple."""
_ONE_BY_ONE = "pass its items one by one, or numpy.array(list(…)) of it"

_ITERABLES = (types.GeneratorType, *map(type, ({}.keys(), {}.values(), {}.items())), range, collections.deque)


_TRACED = (
    "it is a tracer, which has no elements, because JAX is tracing the function that it is in (jax.jit, jax.grad, jax.vmap, …); "
    "call the kernel outside of that function, or let JAX call it when there are elements: jax.pure_callback(lambda x: "
    "kernel(numpy.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x), with the result's shape and dtype"
)


def advice_for(value, is_one: bool = False) -> str:
    """What `value` is and what to pass instead; "" if nothing is known of it. Runs no code of the object's class.

    `is_one`: only a tensor is taken in its place, no list of them.
    """
    several = _several(value)
    return _ONE_BY_ONE if several and is_one else several or _instead(value)


def _several(value) -> str:
    cls = type(value)
    for base in cls.__mro__:
        if (known := _SEVERAL.get((str(base.__module__).partition(".")[0], base.__name__))) is not None:
            return known
    if issubclass(cls, _ITERABLES) or any("__next__" in vars(base) for base in cls.__mro__):
        return "pass list(…) of it"
    return "pass list(….values()) of it, or a numba.typed.Dict" if issubclass(cls, dict) else ""


def _instead(value) -> str:
    cls = type(value)
    for base in cls.__mro__:
        package = str(base.__module__).partition(".")[0]
        if (package, base.__name__) == ("jax", "Tracer"):
            return _TRACED
        if (known := _INSTEAD.get((package, base.__name__))) is not None:
            return known
    return ""
