"""All native code of this package: what wheels carry, and what ``precompile`` without a target compiles."""

import importlib
import pkgutil
from collections.abc import Iterator

from ..ground.cfunction import CFunction

__all__ = ["native_code"]

_PACKAGE = __name__.partition(".")[0]
PLACES = (
    "ground", "dispatch", "producers", "arguments", "torch", "jax", "exchange", "measuring.exported_calls", "cuda", "cupy",
)  # fmt: skip
"""Packages and modules with native code. Those of ``measuring`` that need an optional package have none, and are not imported."""


def native_code() -> Iterator[CFunction]:
    """Yield the first C function of each library, in an order that depends on the sources only."""
    seen = set()
    for place in PLACES:
        found = importlib.import_module(f"{_PACKAGE}.{place}")
        modules = sorted(each.name for each in pkgutil.iter_modules(getattr(found, "__path__", ()), f"{found.__name__}."))
        for module in modules or (found.__name__,):
            for value in list(vars(importlib.import_module(module)).values()):
                for function in value if isinstance(value, tuple) else (value,):
                    if isinstance(function, CFunction) and function.is_first and function.key not in seen:
                        seen.add(function.key)
                        yield function
