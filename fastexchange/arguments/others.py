"""Objects that only Numba's own dispatcher can read, or refuse, and what to pass instead of those that it refuses.

Types of other packages are known by their names, so that no package is imported, and none has to be installed.
"""

import collections
import types

from ..ground.numba_internals import is_typed_by_extension
from .kind import OTHER, Discovery

__all__ = ["advice_for", "find", "find_typed"]


def find_typed(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Types with a Numba type by an extension of Numba: kernels read them as that type, as ``@njit`` does."""
    if not is_typed_by_extension(cls):
        return None
    notes.append("an extension of Numba gives it a type of its own")
    return Discovery(OTHER, notes=notes)


def find(cls: type, notes: list[str], instance=None) -> Discovery:
    """Any type."""
    notes.append("it is no tensor, scalar or tuple: Numba's own dispatcher unboxes it, and with it the whole call")
    return Discovery(OTHER, notes=notes)


# ---- advice ----------------------------------------------------------------------------------------------------------

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
    ("PIL", "Image"): "pass numpy.asarray({})",
    ("jax", "PRNGKeyArray"): "pass jax.random.key_data({})",
    ("torch", "Proxy"): "it is a Proxy, by which torch.fx.symbolic_trace records operators: call the kernel as one, "
    "as_torch_op(), or from a function that torch.fx.wrap names",
}
"""By package and name of a class: what to pass instead of its objects, ``{}``, and of those of derived classes."""

_SEVERAL = {
    ("torch", "Size"): "pass tuple({})",
    ("torch", "Module"): "pass its tensors, for example list({}.parameters())",
}
"""The same of what a kernel may take as a list or a tuple."""
_ONE_BY_ONE = "pass its items one by one, or numpy.array(list({}))"

_ITERABLES = (types.GeneratorType, *map(type, ({}.keys(), {}.values(), {}.items())), range, collections.deque)


_TRACED = (
    "it is a tracer, which has no elements, because JAX is tracing the function that it is in (jax.jit, jax.grad, jax.vmap, …); "
    "a kernel for the CPU that declares its outputs, fast_args(out=…), can be called there, not bound; call any other outside of "
    "that function, or let JAX call it when there are elements: jax.pure_callback(lambda x: "
    "kernel(numpy.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x), with the result's shape and dtype"
)


def advice_for(value, name: str = "x", is_one: bool = False) -> str:
    """What `value` is and what to pass instead; "" if nothing is known of it. Runs no code of the object's class.

    `name`: the expression by which the caller has the value. `is_one`: only a tensor is taken in its place, no list of them.
    """
    several = _several(value)
    return (_ONE_BY_ONE if several and is_one else several or _instead(value)).replace("{}", name)


def _several(value) -> str:
    cls = type(value)
    for base in cls.__mro__:
        if (known := _SEVERAL.get((str(base.__module__).partition(".")[0], base.__name__))) is not None:
            return known
    if issubclass(cls, _ITERABLES) or any("__next__" in vars(base) for base in cls.__mro__):
        return "pass list({})"
    return "pass list({}.values()), or a numba.typed.Dict" if issubclass(cls, dict) else ""


def _instead(value) -> str:
    cls = type(value)
    for base in cls.__mro__:
        package = str(base.__module__).partition(".")[0]
        if (package, base.__name__) == ("jax", "Tracer"):
            return _TRACED
        if (known := _INSTEAD.get((package, base.__name__))) is not None:
            return known
    return ""
