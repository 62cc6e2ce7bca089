"""What others have registered with Numba (``numba.extending`` and below): it changes compiled code that does not name it.

One of the files in which private names of Numba stand: see ``numba_internals``. Nothing of Numba is loaded here for it: what is
not loaded has no registrations of others.
"""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Iterator
from operator import is_
from types import FunctionType
from typing import Any

from numba import types

from .numba_internals import check, cpu_target, expect, imported, is_known_file, load_extensions

__all__ = ["conversions", "extensions"]

_typing_registry: Any = imported("numba.core.typing.templates", "builtin_registry")
_lowering_registry: Any = imported("numba.core.imputils", "builtin_registry")
_rewrites: Any = imported("numba.core.rewrites", "rewrite_registry")
_python_types: Any = imported("numba.core.typing.asnumbatype", "as_numba_type")
_typeof: Any = imported("numba.core.typing.typeof", "typeof_impl")
_models: Any = imported("numba.core.datamodel", "default_manager")
_conversion_rules: Any = imported("numba.core.typeconv", "rules")
_TEMPLATES = {imported("numba.core.typing.templates", name) for name in ("FunctionTemplate", "AttributeTemplate")}
_BOXING = "_boxers", "_unboxers", "_reflectors"
_boxing: Any = [imported("numba.core.pythonapi", name) for name in _BOXING]
_LOWERED = "functions", "getattrs", "setattrs", "casts", "constants"
_TYPED = "functions", "attributes", "globals"
_METHODS, _WRAPPED = "numba.core.typing.templates", "numba.core.imputils"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PLAIN = frozenset({int, float, bool, str, type(None)})
_WRAPPERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",), classmethod: ("__func__",), property: ("fget", "fset"),
    functools.cached_property: ("func",), functools.partial: ("func",),
}  # fmt: skip
_IN_WRAPPERS = _PLAIN | {FunctionType}
_FUNCTIONS = {FunctionType, *_WRAPPERS}

_extensions: dict[str, list[list]] = {}
_seen: dict[int, tuple[Any, Any]] = {}
"""By the id of a list or dictionary of Numba's: itself, and how many of its items, or which, have been looked at."""


def extensions() -> dict[str, list[list]]:
    """By module, not of Numba or this package: what it has registered with Numba, as functions and plain values."""
    load_extensions()
    for where, items in _new():
        for item in items:
            found = _Parts(item)
            for owner in found.owners:
                _extensions.setdefault(owner, []).append([where, *found.parts])
    return _extensions


def _new() -> Iterator[tuple[str, list]]:
    """What has been registered since the last time, and where."""
    typing, target = cpu_target.typing_context._registries, cpu_target.target_context._registries
    for registries, names in (([_typing_registry, *typing], _TYPED), ([_lowering_registry, *target], _LOWERED)):
        for registry in registries:
            for name in names:
                if new := _new_of_list(getattr(registry, name)):
                    yield name, [item for item in new if not _is_of_a_compilation(item)]
    for kind, rewrites in list(_rewrites.rewrites.items()):
        yield kind, _new_of_list(rewrites)
    yield "types of Python", _new_of_list(_python_types.functions)
    of_python = [(cls, given) for cls, given in _new_of_dict(_python_types.lookup) if type(given) is not types.ClassInstanceType]
    yield "types of Python", of_python  # all but jitclasses, which no key describes
    yield "types of values", _new_of_dict(_typeof.registry)
    yield "models", _new_of_dict(_models._handlers)
    for name, registry in zip(_BOXING, _boxing, strict=True):
        yield name, _new_of_dict(registry.functions)


def _is_of_a_compilation(item: Any) -> bool:
    """Whether Numba itself has registered it, when it compiled a call: it follows from what was registered by others before.

    Else a key would be another after the compilation, and nothing kept. What an intrinsic returns is filed under itself; what
    calls an overloaded method of a type is Numba's own function, and what reads an overloaded attribute is one in a wrapper.
    """
    if type(item) is not tuple or type(item[0]) is not FunctionType:
        return False
    function = item[0]
    if function.__module__ == _WRAPPED:
        function = next((cell.cell_contents for cell in function.__closure__ or ()), function)
    return item[0] is item[1] or getattr(function, "__module__", None) == _METHODS


def _new_of_list(items: list) -> list:
    _, count = _seen.get(id(items), (None, 0))
    if len(items) == count:
        return []
    _seen[id(items)] = items, len(items)
    return items[count:]


def _new_of_dict(items: Any) -> list:
    _, known = _seen.get(id(items), (None, {}))
    if known == items:
        return []
    new = [(key, value) for key, value in list(items.items()) if known.get(key) is not value]
    if new:
        _seen[id(items)] = items, {**known, **dict(new)}
    return new


class _Parts:
    """The parts of something registered: functions and classes that are not Numba's, by their modules, and plain values."""

    def __init__(self, item: Any) -> None:
        self.owners: set[str] = set()
        self.parts: list = []
        self._met: set[int] = set()
        for value in item if type(item) is tuple else (item,):
            for each in value if type(value) in (tuple, list) else (value,):  # a tuple: a signature
                self._add(each, depth=2)

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is FunctionType:
            self._add_function(value, depth)
        elif kind in _PLAIN:
            self.parts.append(value)
        elif kind in _WRAPPERS:
            for name in _WRAPPERS[kind]:
                self._add(getattr(value, name), depth)
        elif kind is types.Function:
            for template in value.templates:
                self._add_class(template, depth)
        else:
            self._add_class(value if issubclass(kind, type) else kind, depth)

    def _add_function(self, function: FunctionType, depth: int) -> None:
        if _is_others(function.__module__, function.__code__.co_filename):
            self.owners.add(str(function.__module__))
            self.parts.append(function)
            self._add(getattr(function, "__wrapped__", None), depth)
        elif depth:  # perhaps a wrapper around what was registered
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # nothing yet
                    if type(cell.cell_contents) in _IN_WRAPPERS or isinstance(cell.cell_contents, type):
                        self._add(cell.cell_contents, depth - 1)

    def _add_class(self, cls: type, depth: int) -> None:
        others, is_template = _bases_of(cls)
        if not (others or is_template) or id(cls) in self._met:
            return
        self._met.add(id(cls))
        for each in others:
            self.owners.add(each.__module__)
            self.parts.append(each.__qualname__)
        for each in others or (cls,):  # Numba makes a template for functions of others
            attributes = vars(each)
            for value in attributes.values():
                if type(value) in _FUNCTIONS:
                    self._add(value, depth)
            if self.owners:
                self.parts += [item for item in attributes.items() if type(item[1]) in _PLAIN]
                self.parts += sorted(attributes.get("_jit_options", {}).items())
                self.parts.append(getattr(attributes.get("_inline"), "value", None))


@functools.lru_cache(maxsize=4096)
def _bases_of(cls: type) -> tuple[tuple[type, ...], bool]:
    """A class and its bases that others wrote in Python, and whether it is a template of Numba's typing."""
    return tuple(filter(_is_class_of_others, cls.__mro__)), not _TEMPLATES.isdisjoint(cls.__mro__)


@functools.lru_cache(maxsize=4096)
def _is_class_of_others(cls: type) -> bool:
    if not cls.__flags__ & _HEAP_TYPE or not _is_others(cls.__module__, None):
        return False
    has_file = hasattr(sys.modules.get(cls.__module__), "__file__")
    return has_file or any(type(value) is FunctionType for value in vars(cls).values())  # not one of C, without a module


@functools.lru_cache(maxsize=4096)
def _is_others(module: str | None, file: str | None) -> bool:
    """Whether a function of a file, or a class (None), of a module is not of Python, NumPy, Numba or this package."""
    if str(module).partition(".")[0] in ("numba", "fastexchange"):
        return False
    return not is_known_file(str(file or getattr(sys.modules.get(str(module)), "__file__", None)))


def conversions() -> str:
    """A digest of the conversions between types, Numba's and those that others have allowed or changed."""
    global _last_conversions
    graph = _conversion_rules.default_casting_rules._tg._forwards
    seen = [conversion for others in list(graph.values()) for _, conversion in list(others.items())]
    before, digest = _last_conversions  # rules are added, or changed, never removed
    if not (len(seen) == len(before) and all(map(is_, seen, before))):
        digest = hashlib.sha256(repr(sorted(_edges(graph))).encode()).hexdigest()
        _last_conversions = seen, digest
    return digest


_last_conversions: tuple[list, str] = ([], "")


def _edges(graph) -> list[tuple[str, str, int]]:
    return [(str(one), str(other), how.value) for one, others in list(graph.items()) for other, how in list(others.items())]


@check
def _check_registries() -> None:
    for registry, names in ((_typing_registry, _TYPED), (_lowering_registry, _LOWERED)):
        for name in names:
            len(getattr(registry, name)), getattr(registry, name)[:0]
    for items in (_models._handlers, _typeof.registry, _python_types.lookup, _rewrites.rewrites):
        items.items()
    for boxing in _boxing:
        boxing.functions.items()
    len(_python_types.functions)
    for context in (cpu_target.typing_context, cpu_target.target_context):
        list(context._registries)
    graph = _conversion_rules.default_casting_rules._tg._forwards
    expect("a conversion of Numba's", graph[types.int32][types.int64].name, "promote")
