"""A kernel's parameters: their names, their defaults, and how Python binds arguments to them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .omitted import OMITTED

__all__ = ["MAX_TUPLE_DEPTH", "Item", "Parameters", "find_item", "flatten", "item_of", "signature_of", "value_at"]

MAX_TUPLE_DEPTH = 8
"""How deep tuples and lists may be nested for native code."""


class Item(int):
    """The position of an item in an argument: the argument's position, and the indices from the outermost on."""

    place: tuple[int, ...]


def item_of(position: int, index: int) -> Item:
    """The position of item `index` of the argument or item at `position`."""
    made = Item(position)
    made.place = (*getattr(position, "place", ()), index)
    return made


def value_at(bound: tuple, position: int) -> Any:
    """The argument, or the item, at `position`."""
    value = bound[position]
    for index in getattr(position, "place", ()):
        value = value[index]
    return value


def find_item(position: int, value, part) -> int | None:
    """The position of the object `part` in `value`, which is at `position`; None if it is not in it."""
    return next((at for at, found in flatten(position, value) if found is part), None)


def flatten(position: int, value, depth: int = 0, entered: dict[int, Any] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the position and the object of an argument, then, depth first, those of the items of its tuples and lists.

    Each tuple and list is entered once, because a list may contain itself many times. Items that are deeper than
    ``MAX_TUPLE_DEPTH`` are left out. Runs no code of the objects' classes.
    """
    entered = {} if entered is None else entered
    yield position, value
    nest = list if type(value) is list else tuple
    if issubclass(type(value), nest) and depth < MAX_TUPLE_DEPTH and id(value) not in entered:
        entered[id(value)] = value  # keeps it alive: a list may change meanwhile, and an address must not be used again
        for index, item in enumerate(nest.__getitem__(value, slice(None))):
            yield from flatten(item_of(position, index), item, depth + 1, entered)


def with_items(value, items: Iterable):
    """A tuple, named tuple or list like `value`, with other items."""
    cls = type(value)
    return cls._make(items) if hasattr(cls, "_make") else (list if isinstance(value, list) else tuple)(items)


def signature_of(function: Callable) -> inspect.Signature:
    """The signature of the function itself, which Numba compiles, whatever it wraps."""
    return inspect.signature(function, follow_wrapped=False)


class Parameters:
    """A kernel's parameters. `outputs`: how many of the last ones are outputs, which may be omitted."""

    def __init__(self, py_func: Callable, outputs: int = 0):
        parameters = list(signature_of(py_func).parameters.values())
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                raise TypeError(f"{py_func.__qualname__}(): Numba compiles no functions with {parameter}; name its parameters")
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        """The name of ``*args``, or None."""
        plain = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
        self.names = [p.name for p in plain]
        """The names of all other parameters, in order."""
        self.defaults: dict[int, Any] = {i: p.default for i, p in enumerate(plain) if p.default is not p.empty}
        """By index, the defaults."""
        self._outputs = range(len(plain) - outputs, len(plain))
        self.positional_only = sum(p.kind is p.POSITIONAL_ONLY for p in plain)
        self.positional = sum(p.kind is not p.KEYWORD_ONLY for p in plain)
        keyword_only = len(plain) - self.positional
        if keyword_only and self.variadic is not None:
            raise TypeError(
                f"{py_func.__qualname__}(): Numba compiles no functions with keyword-only parameters behind "
                f"*{self.variadic}; put them in front of it"
            )
        self.bind = self._make_binder(py_func)
        """``bind(*args, **kwargs)``: the arguments as a tuple in order, :data:`OMITTED` for defaults, ``*args`` at the end."""

    def _make_binder(self, py_func: Callable) -> Callable[..., tuple]:
        """Make a function with the kernel's parameters: Python itself binds the arguments and raises the TypeErrors."""
        listed = [name + ("=OMITTED" if self.may_be_omitted(i) else "") for i, name in enumerate(self.names)]
        if self.positional < len(self.names):
            listed.insert(self.positional, "*")
        if self.positional_only:
            listed.insert(self.positional_only, "/")
        returned = [*self.names]
        if self.variadic is not None:
            listed.append("*" + self.variadic)
            returned.append("*" + self.variadic)
        namespace: dict[str, Any] = {"OMITTED": OMITTED}
        exec(f"def bind({', '.join(listed)}): return ({''.join(name + ', ' for name in returned)})", namespace)
        bind = namespace["bind"]
        bind.__name__, bind.__qualname__ = py_func.__name__, py_func.__qualname__
        return bind

    def unfolded(self, position: int) -> int:
        """Convert a position among Numba's arguments, with ``*args`` folded into a tuple, to one among the given arguments."""
        place = getattr(position, "place", ())
        if self.variadic is None or position < len(self.names) or not place:
            return position
        return functools.reduce(item_of, place[1:], position + place[0])

    def may_be_omitted(self, index: int) -> bool:
        """Whether the parameter has a default, or is an output."""
        return index in self.defaults or index in self._outputs

    def name_of(self, position: int) -> str:
        """The name of the argument at `position`; ``rest[2]`` for one of ``*rest``."""
        if position < len(self.names):
            return self.names[position]
        return f"{self.variadic}[{position - len(self.names)}]"
