"""Digests of everything that a function's machine code depends on besides its types. They agree between processes.

Numba compiles the values of a function's names into its code: constants, arrays, other functions, attributes of modules. This
module follows all names, *describes* the values in words that are equal in all processes, and makes digests of the descriptions.
For objects of Python, NumPy and Numba the name is enough, because their versions are part of every key. Extensions of Numba
(``numba.extending``) are described by digests of their files and, loosely, by the names in their functions. A function with a
value that cannot be described has no digest.
"""

import builtins
import contextlib
import enum
import functools
import hashlib
import inspect
import itertools
import os
import struct
import sys
import types as python_types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
from numba.core import compiler, event, types

from ..ground.numba_code import is_importable
from ..ground.numba_extensions import conversions, extensions
from ..ground.numba_internals import (
    CPUDispatcher,
    can_compile,
    is_known_file,
    locals_of,
    pipeline_of,
    registered_for,
)
from ..ground.safe_repr import a_type_name, is_type, one_line
from .names_in_code import names_in, parts_of

__all__ = ["NotDescribable", "closure_of", "dependencies", "has_current_code", "meaning_of", "note_loaded"]


class NotDescribable(Exception):
    """A value that cannot be compared between processes. The message names it."""


class Changed(NotDescribable):
    """Machine code in this process was compiled with another value."""


def dependencies(function: python_types.FunctionType, options: dict) -> str:
    """Return a digest of what a Python function's machine code, compiled with these options, depends on now.

    Raises :class:`NotDescribable` if the function names a value that cannot be described.
    """
    _check_module(function, f"{function.__qualname__!r}")

    def describe() -> tuple:
        extended = _extensions()
        return _Describer(is_extended=len(extended) > 1).describe((function, options), "an option"), extended

    return _digest_of(describe, function.__qualname__)


def _check_module(function: python_types.FunctionType, name: str) -> None:
    """Raise :class:`NotDescribable` for a function of no module by which Numba finds its globals in another process."""
    module = function.__globals__.get("__name__")
    if function.__module__ is None or not is_importable(module):
        raise NotDescribable(f"{name} belongs to no module that another process can import: its `__name__` is {module!r}")


def _digest_of(describe: Callable[[], Any], name: str) -> str:
    try:
        described = describe()
    except (NotDescribable, MemoryError):
        raise
    except Exception as error:  # objects' own methods may raise any exception; RecursionError for deep nesting
        raise NotDescribable(f"what {name} names cannot be read ({one_line(error)})") from error
    return _digest(described)


def _digest(described: Any) -> str:
    return hashlib.sha256(repr(described).encode("utf-8", "surrogatepass")).hexdigest()


# ---- describing values ----------------------------------------------------------------------------------------------

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_NATIVE = (python_types.BuiltinFunctionType, np.ufunc, type(np.sum), type(str.join))
_BY_NAME = (BaseException, np.generic)  # classes of which Numba compiles in only the name
_BITS = {float: "<d", complex: "<dd"}  # repr() tells neither the sign nor the payload of a NaN


class _Describer:
    """Follows names and describes their values.

    `is_local`: do not follow other compiled functions. `is_loose`: for a value that cannot be described, take its name.
    """

    def __init__(self, is_local: bool = False, is_loose: bool = False, is_extended: bool | None = None) -> None:
        self._is_local, self._is_loose, self._known = is_local, is_loose, is_extended
        self._met: dict[int, tuple[Any, Any]] = {}  # holds the objects, so their addresses are not reused

    @functools.cached_property
    def _is_extended(self) -> bool:
        """Whether somebody has registered extensions with Numba."""
        return bool(extensions()) if self._known is None else self._known

    def describe(self, value: Any, name: str) -> Any:
        """Describe a value. `name`: the object that names it, for the message of :class:`NotDescribable`."""
        kind = type(value)
        if kind in _BITS:
            return kind.__name__, struct.pack(_BITS[kind], *((value.real, value.imag) if kind is complex else (value,))).hex()
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if id(value) in self._met:
            return self._met[id(value)][0]
        if isinstance(value, tuple | frozenset | slice | python_types.CodeType):  # these cannot contain themselves
            self._met[id(value)] = _digest(self._described(value, kind, name)), value
            return self._met[id(value)][0]
        self._met[id(value)] = f"met before, as number {len(self._met)}", value
        try:
            return self._described(value, kind, name)
        except Changed:
            raise
        except NotDescribable:
            if not self._is_loose:
                raise
            return _named(value)

    def _described(self, value: Any, kind: type, name: str) -> tuple:
        if kind is python_types.CodeType:
            parameters = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
            names = value.co_names, value.co_varnames, value.co_freevars, getattr(value, "co_exceptiontable", b"")
            return parameters, value.co_code.hex(), [self.describe(each, name) for each in value.co_consts], names
        if kind is slice:  # a constant from Python 3.14 on
            return kind.__name__, [self.describe(each, name) for each in (value.start, value.stop, value.step)]
        if isinstance(value, np.generic) or kind is np.ndarray:
            if not value.dtype.hasobject:
                flags = value.flags
                layout = value.shape, flags.c_contiguous, flags.f_contiguous, flags.aligned, flags.writeable
                return *_named(kind), repr(value.dtype), layout, hashlib.sha256(value.tobytes()).hexdigest()
        elif kind is tuple or (isinstance(value, tuple) and kind.__bases__ == (tuple,)):
            named = _TUPLE if kind is tuple else self._class(kind, name)
            return named, [self.describe(each, name) for each in value]
        elif kind in (list, dict):
            return kind.__name__, [self.describe(each, name) for each in (value.items() if kind is dict else value)]
        elif kind in (set, frozenset):
            return kind.__name__, sorted(map(repr, (self.describe(each, name) for each in value)))
        elif isinstance(value, np.dtype):
            return "dtype", repr(value)
        elif isinstance(value, types.Type):
            meaning = meaning_of((value,))
            if meaning is not None:
                return "type", repr(value), repr(value.key), meaning
        elif isinstance(value, enum.Enum):
            return self._class(kind, name), value.name
        elif is_type(value):
            return self._class(value, name)
        elif not isinstance(value, python_types.ModuleType) and _is_known(value):
            return "named", *_named(value)
        elif isinstance(value, CPUDispatcher):
            return self._dispatcher(value, name)
        elif not isinstance(value, python_types.ModuleType):  # whose attributes are described where they are named
            own = self._function(value) if kind is python_types.FunctionType else ()
            registered = registered_for(value) if self._is_extended else []  # asking Numba loads all that it has registered
            if (own or registered or isinstance(value, _NATIVE)) and all(function for function, _ in registered):
                described = [(self.describe(function, name), self.describe(how, name)) for function, how in registered]
                return *_named(value), own, described
        raise NotDescribable(f"{name} is {a_type_name(kind)}")

    def _class(self, cls: type, name: str) -> tuple:
        """Describe a class. In another process the class of the same name has to be the same."""
        if _is_known(cls):
            return _named(cls)
        module = sys.modules.get(cls.__module__)
        if module is not None and cls.__module__ != "__main__" and getattr(module, cls.__qualname__, None) is cls:
            if issubclass(cls, enum.Enum):
                if not any(isinstance(each, property | classmethod) or _is_own(each) for each in vars(cls).values()):
                    return *_named(cls), [(each, self.describe(member.value, name)) for each, member in cls.__members__.items()]
            elif cls.__bases__ == (tuple,):
                return *_named(cls), getattr(cls, "_fields", ()), self.describe(getattr(cls, "_field_defaults", ()), name)
            elif issubclass(cls, _BY_NAME):
                return _named(cls)
        raise NotDescribable(f"{name} is of the class {cls.__qualname__!r}, or is that class")

    def _dispatcher(self, dispatcher: Any, name: str) -> tuple:
        function = dispatcher.py_func
        if self._is_local:
            return "compiled", function.__qualname__, _numbers.setdefault(dispatcher, next(_count))
        _settle(function)
        compiled_with = _compiled[self._is_loose].get(function)
        is_fresh = compiled_with is None and not _has_compiled(dispatcher)
        if not is_fresh and (not compiled_with or compiled_with != _locally(function)[0][self._is_loose]):
            raise Changed(f"{name} has been compiled already, and what it names may have had other values then")
        pipeline = pipeline_of(dispatcher)
        if not issubclass(compiler.Compiler, pipeline):
            raise NotDescribable(f"{name} is compiled by {pipeline.__qualname__!r}")
        _check_module(function, name)
        signatures = () if can_compile(dispatcher) else sorted(map(str, dispatcher.overloads))
        options = self.describe((dict(dispatcher.targetoptions), locals_of(dispatcher)), name)
        return options, signatures, self.describe(function, name)

    def _function(self, function: python_types.FunctionType) -> tuple:
        code, name = function.__code__, function.__qualname__
        values = dict(function.__globals__)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            values.pop(variable, None)
            with contextlib.suppress(ValueError):  # nothing yet
                values[variable] = cell.cell_contents
        described: list = [self.describe(code, f"a constant of {name}")]
        described += [self.describe(each, f"a default of {name}") for each in (function.__defaults__, function.__kwdefaults__)]
        if not self._is_local:
            for inner in list(parts_of(code))[1:]:  # of a function that is overloaded: one of its implementations
                if _globals_of.get(inner, found := _digest_of_globals(inner, function.__globals__)) != found:
                    raise Changed(f"an implementation of {name} has been compiled already, when its globals had other values")
        for variable, attributes in sorted(_named_by(code, name, self._is_loose)):
            for value in _found(variable, values):
                described.append((variable, attributes, self._attribute(value, attributes, f"{variable!r}, named by {name},")))
                break
            else:
                described.append(("absent", variable))
        return tuple(described)

    def _attribute(self, value: Any, attributes: tuple[str, ...], name: str) -> Any:
        """Describe a value whose attributes the code reads: of a module, only those attributes."""
        if not isinstance(value, python_types.ModuleType):
            described = self.describe(value, name)
            is_named = isinstance(described, str) or described == _named(value)  # a text: met before
            if not (self._is_loose and attributes and is_named):
                return described
            inner = inspect.getattr_static(value, attributes[0], None)  # runs no code of the object's class
            return described, self._attribute(inner, attributes[1:], f"{attributes[0]!r} of {name}")
        if not attributes:
            if self._is_loose:
                return _named(value)
            raise NotDescribable(f"{name} is a module, and used as a value")
        try:
            inner = getattr(value, attributes[0])
        except AttributeError:
            return "absent"
        try:
            return self._attribute(inner, attributes[1:], f"{attributes[0]!r} of module {value.__name__}")
        except Changed:
            raise
        except NotDescribable:
            if not (_is_known(value) and _is_method_of_known(inner)):
                raise
            return *_named(value), attributes[0], *_named(type(inner))


def closure_of(function, describer: type = _Describer) -> list:
    """Describe the values that tell a function from others of the same name. Functions are described by their names."""
    described: list = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(NotDescribable, ValueError):  # nothing yet
            value = getattr(cell.cell_contents, "py_func", cell.cell_contents)
            if isinstance(value, python_types.FunctionType):
                described.append((value.__module__, value.__qualname__))
            else:
                described.append(describer().describe(value, function.__qualname__))
    return described


def _is_own(value: Any) -> bool:
    """Whether an attribute of an enumeration is a method that its author has written."""
    return isinstance(value, python_types.FunctionType) and value.__module__ != "enum"


def _found(name: str, values: dict) -> tuple:
    """The value of a global name as Numba finds it, alone in a tuple; empty without one."""
    if name in values:
        return (values[name],)
    return (getattr(builtins, name),) if hasattr(builtins, name) else ()


_CONTEXTS = numba.objmode, numba.parallel_chunksize
"""Objects of Numba's that have no name themselves."""


def _is_method_of_known(value: Any) -> bool:
    """Whether a value is a known object's method, such as ``np.random.rand``, one of a RandomState."""
    return isinstance(value, python_types.BuiltinMethodType) and _is_known(type(value.__self__))


def _is_known(value: Any) -> bool:
    """Whether a value belongs to Python, NumPy or Numba, so that its name and their versions identify it."""
    if any(value is each for each in _CONTEXTS):
        return True
    function = value.py_func if isinstance(value, CPUDispatcher) else value
    if isinstance(function, python_types.FunctionType) and not is_known_file(function.__code__.co_filename):
        return False  # somebody's with the name of one that it replaces
    module = value
    if not isinstance(value, python_types.ModuleType):
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        if getattr(module, getattr(value, "__name__", ""), None) is not value:
            return False
    file = vars(module).get("__file__")
    if not isinstance(file, str):
        return getattr(vars(module).get("__spec__"), "origin", None) in ("built-in", "frozen")
    return is_known_file(file)


def _named(value: Any) -> tuple:
    """The name of an object, and the version of its package unless each key has that itself."""
    is_module = isinstance(value, python_types.ModuleType)
    if any(value is each for each in _CONTEXTS):
        value = type(value)
    module = value.__name__ if is_module else str(getattr(value, "__module__", None))
    name = "" if is_module else getattr(value, "__qualname__", getattr(value, "__name__", ""))
    package = module.partition(".")[0]
    version = None if package in _IN_EACH_KEY else vars(sys.modules.get(package, sys)).get("__version__")
    return module, name, str(version)


_IN_EACH_KEY = "numba", "numpy"
_TUPLE = _named(tuple)


def _named_by(code: python_types.CodeType, function: str, with_imports: bool = False) -> set[tuple[str, tuple[str, ...]]]:
    """The globals and free variables that a function's code names, each with the attributes that it reads of them.

    Raises :class:`NotDescribable` for a function that imports something, unless `with_imports`.
    """
    known = _names.get(code)  # kept: a function is described again with each kernel that calls it
    if known is None:
        known = _names[code] = names_in(code)
    names, imported = known
    if imported is not None and not with_imports:
        raise NotDescribable(f"{function} imports {imported!r}, which")
    return names


_names: "weakref.WeakKeyDictionary[python_types.CodeType, tuple[set, str | None]]" = weakref.WeakKeyDictionary()


# ---- extensions of Numba ---------------------------------------------------------------------------------------------

_files: dict[str, tuple[Any, str]] = {}


def _extensions() -> list:
    """Describe the modules that have registered extensions with Numba: by digests of their files, and by their functions.

    The functions are described loosely: they are parts of a compiler, and name many objects that do not matter. They are there
    besides the files because those may have been edited since they were imported.
    """
    described: list = [conversions()]
    for name, registered in sorted(extensions().items()):
        loose = _Describer(is_loose=True)
        described.append((name, _digest_of_file(name), [loose.describe(each, name) for each in registered]))
    return described


def _digest_of_file(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        status = os.stat(str(file))
        stamp = file, status.st_mtime_ns, status.st_size
        if _files.get(module, ("",))[0] != stamp:
            _files[module] = stamp, hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
        return _files[module][1]
    except OSError:
        return ""


# ---- what has been compiled in this process --------------------------------------------------------------------------

_compiled: "tuple[weakref.WeakKeyDictionary[Any, str], ...]" = (weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary())
"""By function, a digest of the values with which all its machine code in this process was compiled; "" if they have changed or
cannot be described. The second dictionary: of loose descriptions."""


_globals_of: "weakref.WeakKeyDictionary[python_types.CodeType, str]" = weakref.WeakKeyDictionary()
"""By code object, a digest of the globals with which it was compiled: several functions may share a code object."""
_numbers: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Numbers of dispatchers, unique in this process."""
_count = itertools.count()


_loaded: "weakref.WeakKeyDictionary[Any, tuple[str, dict]]" = weakref.WeakKeyDictionary()
"""By function whose machine code was loaded, what it depended on then, and its options. Looked at when somebody asks."""


def note_loaded(function: python_types.FunctionType, described: str, options: dict) -> None:
    """Note that machine code of a function has been loaded, compiled with the values that :func:`dependencies` described."""
    _settle(function)
    _loaded[function] = described, options


def _settle(function: python_types.FunctionType) -> None:
    """Note what loaded machine code of a function was compiled with: the current values, if nothing has changed since."""
    if (noted := _loaded.pop(function, None)) is not None:
        described, options = noted
        with contextlib.suppress(NotDescribable):
            if dependencies(function, options) == described:
                _note_all(function, is_first=True)
                return
        for compiled in _compiled:
            compiled[function] = ""


def has_current_code(function: python_types.FunctionType) -> bool:
    """Whether all machine code of a function in this process was compiled with the values that its names have now.

    What the functions that it calls name does not count; :func:`dependencies` looks at that.
    """
    _settle(function)
    compiled_with = _compiled[False].get(function)
    return bool(compiled_with) and compiled_with == _locally(function)[0][False]


def _note_all(function: python_types.FunctionType, is_first: bool) -> None:
    """Note the values with which a function and all that it calls are being compiled: Numba may inline the called functions."""
    waiting = [(function, is_first)]
    while waiting:
        each, is_first = waiting.pop()
        _settle(each)
        is_known = each in _compiled[False]
        if each is function or not is_known:
            dispatchers = _note(each, is_first)
        if not is_known:
            waiting += [(dispatcher.py_func, not _has_compiled(dispatcher)) for dispatcher in dispatchers]


def _note(function: python_types.FunctionType, is_first: bool) -> list[Any]:
    """Note the values for one function. Returns the dispatchers that its names lead to."""
    code = function.__code__
    digests, dispatchers = _locally(function)
    for found, compiled in zip(digests, _compiled, strict=True):
        compiled[function] = found if compiled.get(function, found if is_first else "") == found else ""
    if "<locals>" in function.__qualname__:  # only these are parts of another function
        described = _digest_of_globals(code, function.__globals__)
        _globals_of[code] = described if _globals_of.get(code, described) == described else ""
    return dispatchers


def _digest_of_globals(code: python_types.CodeType, values: dict) -> str:
    """A digest of the globals that code names; "" if one cannot be described."""
    describer = _Describer(is_local=True, is_loose=True)

    def describe() -> list:
        named = sorted(_named_by(code, code.co_name, with_imports=True))
        return [(name, parts, describer._attribute(each, parts, name)) for name, parts in named for each in _found(name, values)]

    try:
        return _digest_of(describe, code.co_name)
    except NotDescribable:
        return ""


def _locally(function: python_types.FunctionType) -> tuple[tuple[str, str], list[Any]]:
    """Digests of a function's names without the functions that Numba compiles separately, and the dispatchers among these.

    The second digest is of loose descriptions. A digest is "" if a name cannot be described. The machine code of the dispatchers
    may be a part of the function's.
    """
    digest = ""
    for is_loose in (False, True):
        describer = _Describer(is_local=True, is_loose=is_loose)
        strict = digest
        with contextlib.suppress(NotDescribable):
            digest = _digest_of(functools.partial(describer.describe, function, "it"), function.__qualname__)
        if digest and not is_loose:
            strict = digest
            break  # loosely it is described as strictly
    return (strict, digest), [value for _, value in describer._met.values() if isinstance(value, CPUDispatcher)]


def _has_compiled(dispatcher) -> bool:
    """Whether a dispatcher has machine code that is not from a cache. Code that Numba loads is trusted as Numba trusts it."""
    return len(dispatcher.overloads) > sum(dispatcher.stats.cache_hits.values())


class _Listener(event.Listener):
    def on_start(self, event):
        with contextlib.suppress(Exception):  # a compilation must not fail because of this
            dispatcher = event.data["dispatcher"]
            function = dispatcher.py_func
            if not str(function.__module__).startswith(("numba.", "fastexchange.")):
                _note_all(function, not _has_compiled(dispatcher))

    def on_end(self, event):
        pass


event.register("numba:compile", _Listener())


# ---- types -----------------------------------------------------------------------------------------------------------


def meaning_of(signature) -> list | None:
    """Describe the user-defined types in a signature, whose names may mean other types in another process.

    Returns None if one cannot be described: a jitclass, a function, a type of a third package, a class of ``__main__``.
    """
    if isinstance(signature, str):  # a string can only name Numba's own types
        return []
    found: list = []
    for numba_type in getattr(signature, "args", signature):
        if type(numba_type) in _MEAN_THEMSELVES:
            found.append([])
            continue
        module = type(numba_type).__module__
        if module == _HALF:
            continue
        if module.partition(".")[0] != "numba" or isinstance(numba_type, _NOT_DESCRIBABLE):
            return None
        if not _is_found_again(getattr(numba_type, "instance_class", None)):
            return None
        if isinstance(numba_type, types.BaseNamedTuple):
            found.append(cast(Any, numba_type).fields)
        if isinstance(numba_type, types.NamedTupleClass):
            found.append(cast(Any, numba_type.instance_class)._fields)
        if isinstance(numba_type, types.EnumMember | types.EnumClass):
            members = cast(Any, numba_type).instance_class.__members__.items()
            try:
                found.append([(name, _Describer().describe(member.value, name)) for name, member in members])
            except NotDescribable:
                return None
        inner = [getattr(numba_type, name, None) for name in _INNER_TYPES]
        inner += getattr(numba_type, "types", ())
        inside = meaning_of(tuple(each for each in inner if isinstance(each, types.Type) and each is not numba_type))
        if inside is None:
            return None
        found.append(inside)
    return found


def _is_found_again(cls: type | None) -> bool:
    """Whether another process finds a class by its name: one of the script itself is made anew there. True for None."""
    found: Any = None if cls is None or cls.__module__ == "__main__" else sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split(".") if cls is not None else ():
        found = getattr(found, part, None)
    return found is cls


_MEAN_THEMSELVES = {type(each) for each in (types.float64, types.int64, types.boolean, types.complex128, types.none)}
_INNER_TYPES = "dtype", "type", "key_type", "value_type", "yield_type", "instance_type"
_HALF = "fastexchange.ground.half.elements"
"""Its types mean their names; it is not imported for kernels without them."""
_NOT_DESCRIBABLE = (types.ClassType, types.ClassInstanceType, types.Dispatcher, types.DeferredType, types.FunctionType)
