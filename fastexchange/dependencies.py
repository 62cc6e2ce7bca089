"""What the machine code of a function depends on beside its types, in words that mean the same in every process.

Numba compiles in what a function's names stand for: constants, arrays, other functions, attributes of modules. Here all of
that is followed from name to name and told by value. Of what belongs to Python, NumPy and Numba the name says enough, because
their versions are part of every key.
"""

import dis
import enum
import hashlib
import sys
import types as python_types
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from numba.core import types

from .numba_internals import implementation_of, registered_for

__all__ = ["Untold", "dependencies", "meaning_of"]


class Untold(Exception):
    """A value that nothing tells apart from another one in another process. The message names it."""


def dependencies(function: Callable, options: dict) -> str:
    """A digest of what a Python function's machine code, compiled with these options, depends on now.

    Raises :class:`Untold` for a function that names something whose value cannot be told.
    """
    try:
        told = _Teller().tell((function, options), "an option")
    except (Untold, MemoryError):
        raise
    except Exception as error:  # whatever an object's own methods raise, or too many of them inside one another
        raise Untold(f"what {function.__qualname__} names cannot be looked at ({type(error).__name__}: {error})") from error
    return hashlib.sha256(repr(told).encode("utf-8", "surrogatepass")).hexdigest()


_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_NATIVE = (python_types.BuiltinFunctionType, np.ufunc, type(np.sum), type(str.join))
_KNOWN = frozenset({*sys.stdlib_module_names, "numpy", "numba", "llvmlite"}) - {"__main__"}
_BY_NAME = (BaseException, np.generic, int, float, complex, str, bytes)  # classes of which no more than the name is compiled in


class _Teller:
    """Follows names from one value to the next."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}  # with the objects, so that no other one gets their addresses

    def tell(self, value: Any, name: str) -> tuple:
        """What a value is. `name`: who names it, for the message of :class:`Untold`."""
        kind = type(value)
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if isinstance(value, python_types.CodeType):
            constants = [self.tell(each, name) for each in value.co_consts]
            return value.co_code.hex(), constants, value.co_names, value.co_varnames, value.co_freevars
        if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
            flags = value.flags
            layout = value.shape, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
            return *_named(kind), repr(value.dtype), layout, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, tuple | frozenset):
            told = [self.tell(each, name) for each in value]
            return *_named(kind), getattr(kind, "_fields", ()), sorted(told) if isinstance(value, frozenset) else told
        if id(value) in self._met:
            return "met before", self._met[id(value)][0]
        self._met[id(value)] = len(self._met), value
        if isinstance(value, list | dict | set):
            told = [self.tell(each, name) for each in (value.items() if isinstance(value, dict) else value)]
            return *_named(kind), sorted(told) if isinstance(value, set) else told
        if isinstance(value, np.dtype):
            return "dtype", repr(value)
        if isinstance(value, types.Type):
            meaning = meaning_of((value,))
            if meaning is not None:
                return "type", repr(value), repr(value.key), meaning
        elif isinstance(value, enum.Enum):
            return self._class(kind, name), value.name
        elif isinstance(value, type):
            return self._class(value, name)
        elif isinstance(value, python_types.ModuleType) or _is_known(value):
            return "named", *_named(value)
        elif compiled := implementation_of(value):
            return *_named(kind), [self.tell(each, name) for each in compiled]
        else:
            own = self._function(value) if isinstance(value, python_types.FunctionType) else ()
            registered = [self.tell(each, name) for each in registered_for(value)]
            if own or registered or isinstance(value, _NATIVE):
                return *_named(value), own, registered
        raise Untold(f"{name} is a {kind.__qualname__!r}")

    def _class(self, cls: type, name: str) -> tuple:
        if issubclass(cls, enum.Enum):
            return *_named(cls), [(each, repr(member.value)) for each, member in cls.__members__.items()]
        if issubclass(cls, tuple):
            return *_named(cls), getattr(cls, "_fields", ()), self.tell(getattr(cls, "_field_defaults", ()), name)
        if _is_known(cls) or issubclass(cls, _BY_NAME):
            return _named(cls)
        raise Untold(f"{name} is the class {cls.__qualname__!r}")

    def _function(self, function: python_types.FunctionType) -> tuple:
        code, name = function.__code__, function.__qualname__
        told: list = [self.tell(each, f"a default of {name}") for each in (code, function.__defaults__, function.__kwdefaults__)]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing yet
                told.append(("absent", variable))
            else:
                told.append(self._named_in(code, value, f"{variable!r}, a variable of {name},"))
        for variable in sorted(_globals_of(code)):
            value = function.__globals__.get(variable, _ABSENT)
            told.append((variable, value is _ABSENT or self._named_in(code, value, f"{variable!r}, a global of {name},")))
        return tuple(told)

    def _named_in(self, code: python_types.CodeType, value: Any, name: str, outer: tuple = ()) -> tuple:
        """What a value is to code that names it: a module of somebody's is the attributes that the code may name."""
        if not isinstance(value, python_types.ModuleType) or _is_known(value):
            return self.tell(value, name)
        found = []
        for attribute in sorted({each for part in _parts_of(code) for each in part.co_names}):
            try:
                inner = getattr(value, attribute)
            except Exception:  # most are somebody else's attributes; a module may have a __getattr__ that fails
                continue
            if not any(inner is each for each in (value, *outer)):
                told = self._named_in(code, inner, f"{attribute!r} of module {value.__name__}", (value, *outer))
                found.append((attribute, told))
        return *_named(value), found


_ABSENT = object()


def _is_known(value: Any) -> bool:
    """Whether a value belongs to Python, NumPy or Numba, whose versions say what it is."""
    if isinstance(value, python_types.ModuleType):
        module: Any = value.__name__
    else:
        module = getattr(value, "__module__", None)
        namespace = sys.modules.get(module) if isinstance(module, str) else None
        if getattr(namespace, getattr(value, "__name__", ""), None) is not value:
            return False
    return module.partition(".")[0] in _KNOWN


def _named(value: Any) -> tuple:
    """What something is called, and the version of the package that it comes from."""
    is_module = isinstance(value, python_types.ModuleType)
    module = value.__name__ if is_module else str(getattr(value, "__module__", None))
    name = "" if is_module else getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return module, name, str(vars(sys.modules.get(module.partition(".")[0], sys)).get("__version__"))


def _parts_of(code: python_types.CodeType) -> Iterator[python_types.CodeType]:
    """A function's code and that of all functions inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, python_types.CodeType):
            yield from _parts_of(each)


def _globals_of(code: python_types.CodeType) -> set[str]:
    instructions = (each for part in _parts_of(code) for each in dis.get_instructions(part))
    return {each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def meaning_of(signature) -> list | None:
    """What types that a user has defined are in this process: their names need not mean the same in another.

    None where nothing says it: of a jitclass, of another function, of a type of somebody else's package.
    """
    if isinstance(signature, str):  # which can only name Numba's own
        return []
    found: list = []
    for numba_type in getattr(signature, "args", signature):
        if type(numba_type).__module__.partition(".")[0] != "numba" or isinstance(numba_type, _UNTOLD):
            return None
        if isinstance(numba_type, types.BaseNamedTuple):
            found.append(cast(Any, numba_type).fields)
        if isinstance(numba_type, types.EnumMember):
            found.append([(member.name, repr(member.value)) for member in cast(Any, numba_type.instance_class)])
        inner = [getattr(numba_type, name, None) for name in ("dtype", "type", "key_type", "value_type", "yield_type")]
        inner += getattr(numba_type, "types", ())
        inside = meaning_of(tuple(each for each in inner if isinstance(each, types.Type) and each is not numba_type))
        if inside is None:
            return None
        found.append(inside)
    return found


_UNTOLD = (types.ClassType, types.ClassInstanceType, types.Dispatcher, types.DeferredType, types.FunctionType)
