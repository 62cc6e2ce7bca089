"""The private parts of Numba and llvmlite that this package uses, and checks of the installed versions.

Each private name, layout and convention of theirs has a public name here, or in ``numba_code``. :func:`failures` checks them
without compiling anything, and ``dispatch.self_test`` makes calls, once per installation. A failure turns native calls off:
Numba's dispatcher calls the kernels, ``numba.cfunc`` makes C functions, and ``doctor`` gives the reason.

Read in Numba 0.68 and llvmlite 0.50.
"""

import collections
import contextlib
import ctypes
import functools
import importlib
import os
import pickle
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import compiler, config

from ..interpreter import DISABLED
from .passing import reraise_passing
from .pythonapi import prototype

_missing: dict[str, str] = {}


def imported(module: str, name: str, instead: Any = None) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        _missing[f"{module}.{name}"] = f"{type(error).__name__}: {error}"
        return instead


def module_of(name: str) -> Any:
    """Import a module. One that is imported already takes no lock, which a fork could leave held (CPython before 3.11)."""
    return sys.modules.get(name) or importlib.import_module(name)


class _NoLock(contextlib.nullcontext):
    def __call__(self, function):
        return function

    def is_locked(self) -> bool:
        return True  # nothing waits without it


def note_failure(what: str, error: Exception) -> None:
    """Note a failure that other code has found, for :func:`failures`."""
    _missing[what] = f"{type(error).__name__}: {error}"


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
global_compiler_lock: Any = imported("numba.core.compiler_lock", "global_compiler_lock", _NoLock())
EnvironmentManager: Any = imported("numba.core.pythonapi", "EnvironmentManager", object)
FunctionCache: Any = imported("numba.core.caching", "FunctionCache", object)
CPUDispatcher: Any = imported("numba.core.registry", "CPUDispatcher", type(numba.njit(lambda: None)))
class HelperDispatcher(CPUDispatcher):
    """Numba's dispatcher of a function of this package's own: not compiled by what a program puts in place of Numba's."""

    with contextlib.suppress(AttributeError):
        compile = CPUDispatcher.compile


DispatcherBase: Any = next(base for base in CPUDispatcher.__mro__ if not base.__flags__ & _HEAP_TYPE)
"""The C base type of dispatchers."""
numbas_call: Any = DispatcherBase.__call__
"""Numba's own call of a dispatcher, even if its class overrides ``__call__``."""
OmittedArg: Any = imported("numba.core.dispatcher", "OmittedArg")
"""What a dispatcher gives its function for an argument that is omitted: a default."""
Signature: Any = imported("numba.core.typing", "Signature", ())
register_dispatcher: Any = imported("numba.core.typeinfer", "register_dispatcher", contextlib.nullcontext)
dumps: Any = imported("numba.core.serialize", "dumps", pickle.dumps)
loads: Any = imported("numba.core.serialize", "loads", pickle.loads)
_NumbaPickler: Any = imported("numba.core.serialize", "NumbaPickler")
cpu_target: Any = imported("numba.core.registry", "cpu_target")
_rtsys: Any = imported("numba.core.runtime", "rtsys")
_nrt_functions: Any = getattr(imported("numba.core.runtime", "_nrt_python"), "c_helpers", {})
_get_type_class: Any = imported("numba.core.typing.bufproto", "get_type_class")
_targets: Any = imported("numba.core.target_extension", "target_registry")
_dispatchers: Any = imported("numba.core.target_extension", "dispatcher_registry")
_CPU: Any = imported("numba.core.target_extension", "CPU", object)
infer_global: Any = imported("numba.core.typing.templates", "infer_global")
AbstractTemplate: Any = imported("numba.core.typing.templates", "AbstractTemplate", object)
alloca_once: Any = imported("numba.core.cgutils", "alloca_once")
for_range_slice: Any = imported("numba.core.cgutils", "for_range_slice")
AttributeTemplate: Any = imported("numba.core.typing.templates", "AttributeTemplate", object)
_make_attribute_template: Any = imported("numba.core.typing.templates", "make_overload_attribute_template")
_make_method_template: Any = imported("numba.core.typing.templates", "make_overload_method_template")
functions_of_math: Any = [each for each, _ in getattr(imported("numba.core.typing.mathdecl", "registry"), "globals", ())]
supported_ufuncs: Any = imported("numba.core.typing.npydecl", "supported_ufuncs", ())
Conversion: Any = imported("numba.core.typeconv", "Conversion")
signature: Any = imported("numba.core.typing", "signature")
_excinfo_ptr_t: Any = imported("numba.core.callconv", "excinfo_ptr_t")
numba_ir: Any = imported("numba.core", "ir")
"""Numba's intermediate representation of functions."""
AnalysisPass: Any = imported("numba.core.compiler_machinery", "AnalysisPass", object)
register_pass: Any = imported("numba.core.compiler_machinery", "register_pass", lambda **_: lambda cls: cls)
NopythonTypeInference: Any = imported("numba.core.typed_passes", "NopythonTypeInference")
run_frontend: Any = imported("numba.core.compiler", "run_frontend")
"""Gives the intermediate representation of a Python function, without types."""


_checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: :func:`failures` calls `function`, which raises an exception if Numba or llvmlite are not as expected."""
    _checks.append(function)
    return function


@functools.cache
def failures() -> dict[str, str]:
    """By name, how the installed Numba and llvmlite differ from what this package expects. Empty if they do not."""
    if DISABLED:
        return {"disabled": "FASTEXCHANGE_DISABLE is set"}
    found = dict(_missing)
    for each in _checks:
        try:
            each()
        except Exception as error:  # a changed Numba may raise any exception
            reraise_passing(error)
            found[each.__name__.removeprefix("_check_")] = f"{type(error).__name__}: {error}"
    return found


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"{what} is {found}, not {expected}")


# ---- Numba's contexts ------------------------------------------------------------------------------------------------
#
# Each process has one typing context and one target context for the CPU. What loads definitions into them, asks them to resolve
# something, or makes code by them holds Numba's compiler lock, as Numba's own compiler does: a thread that loads while another
# one loads, or types, ends both with "generator already executing", or with half of the definitions. Two things take no lock, as
# in Numba: reading a data model, and making a dispatcher, which modules do while they are imported (another thread may import
# the module while it holds the compiler lock).


def attribute_template(numba_type: Any, attribute: str, function: Callable, is_method: bool) -> Any:
    """Make the template that ``overload_method`` or ``overload_attribute`` would register for the CPU, to be inlined."""
    make = _make_method_template if is_method else _make_attribute_template
    return make(numba_type, attribute, function, inline="always", target="cpu")


@global_compiler_lock
def functions_of_numpy() -> list:
    """The functions of NumPy that Numba compiles, also ufuncs, but no classes."""
    context = cpu_target.typing_context
    cpu_target.target_context.refresh()  # imports what defines them
    context.refresh()
    known = [each() if isinstance(each, weakref.ref) else each for each in context._globals]
    return [each for each in known if not isinstance(each, type) and _is_numpys(each)]


def _is_numpys(thing: Any) -> bool:
    return isinstance(thing, np.ufunc) or (callable(thing) and str(getattr(thing, "__module__", "")).partition(".")[0] == "numpy")


# ---- types in memory -------------------------------------------------------------------------------------------------


def target_context() -> Any:
    """Numba's target context for the CPU."""
    return cpu_target.target_context


@global_compiler_lock
def target_context_with_references() -> Any:
    """The same with reference counting, which a cache-loaded kernel's context lacks."""
    target = cpu_target.target_context
    target.refresh()
    _rtsys.initialize(target)
    return target.subtarget(enable_nrt=True)


@functools.cache
def initialize_runtime() -> None:
    """Let machine code that is loaded find the functions of Numba's runtime (NRT).

    Numba also compiles what the compiler links, which takes longer than a kernel takes to load.
    """
    if getattr(config, "NRT_STATS", 0):
        _rtsys.initialize(cpu_target.target_context)
    for name, address in _nrt_functions.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@global_compiler_lock
def runtime_library() -> Any:
    """The library of Numba's runtime, for linking."""
    _rtsys.initialize(cpu_target.target_context)
    return _rtsys.library


def leaves_of(*numba_types) -> Iterator[Any]:
    """The types that these consist of: of tuples those of their items, of an optional the one that it may be. In order."""
    for each in numba_types:
        if type(each) is types.Array:  # most are: Numba's classes are abstract ones, of which it takes long to ask
            yield each
        elif isinstance(each, types.BaseTuple):
            yield from leaves_of(*cast(Any, each).types)
        elif isinstance(each, types.Optional):
            yield from leaves_of(each.type)
        else:
            yield each


def fields_of(numba_type) -> list[tuple[str, Any]]:
    """The fields of a type's struct in native code: their names and Numba types, in order."""
    model = cpu_target.target_context.data_model_manager[numba_type]
    return list(zip(model._fields, model._members, strict=True))


@global_compiler_lock  # LLVM is asked
def size_of(numba_type) -> int:
    """Bytes of a value of a type in memory."""
    context = cpu_target.target_context
    return context.get_abi_sizeof(context.get_data_type(numba_type))


def has_representation(numba_type) -> bool:
    """Whether values of this type have a representation on the CPU."""
    try:
        cpu_target.target_context.data_model_manager.lookup(numba_type)
    except (NotImplementedError, KeyError):  # KeyError: another target's type
        return False
    return True


def converts_float16(context) -> bool:
    """Whether the processor for which a target context compiles converts float16 by an instruction. False if unknown."""
    features = getattr(context.codegen(), "_tm_features", "").split(",")
    return "+f16c" in features or llvmlite.binding.get_process_triple().startswith("aarch64")


@global_compiler_lock
def load_representations() -> None:
    """Load the types that Numba loads before its first compilation, for example strings, for :func:`has_representation`.

    That is all of Numba's compiler, a quarter of a second: what has its machine code does without it.
    """
    cpu_target.target_context.refresh()


def load_extensions() -> None:
    """Load what installed packages extend Numba by, as Numba does before it types an argument. Once in a process."""
    module_of("numba.core.entrypoints").init_all()


@check
def _check_arrays() -> None:
    """Check the layout of arrays as ``dispatch.pack`` writes it: five words, then shape and strides in bytes."""
    array = types.Array(types.float64, 2, "A")
    names = [name for name, _ in fields_of(array)]
    expect("Numba's array struct", names, ["meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides"])
    found = [has_representation(each) for each in (types.float32, array, types.float16)]
    expect("which types have values on the CPU", found, [True, True, False])
    expect("an array's size", size_of(array), 8 * (5 + 2 + 2))


# ---- calls of kernels ------------------------------------------------------------------------------------------------


def argument_packer(context, numba_types) -> Any:
    """Numba's packer, which flattens arguments of these types to a kernel's leaves, and back."""
    return context.call_conv._get_arg_packer(numba_types)


def argument_leaves(context, numba_types) -> list:
    """The LLVM types of the leaves."""
    return list(argument_packer(context, numba_types).argument_types)


@check
def _check_arguments() -> None:
    context = target_context()
    given = (types.Array(types.float64, 2, "A"), types.UniTuple(types.int64, 2), types.complex128)
    leaves = [str(leaf) for leaf in argument_leaves(context, given)]
    expected = ["i8*", "i8*", "i64", "i64", "double*", *["i64"] * 4, "i64", "i64", "double", "double"]
    expect("what kernels take", leaves, expected)
    kernel = context.call_conv.get_function_type(types.int64, given)
    expect("a kernel's type", f"{kernel.return_type} {kernel.args[0]} {kernel.args[1]}", "i32 i64* {i8*, i32, i8*, i8*, i32}**")
    expect("a kernel's arguments", [str(leaf) for leaf in kernel.args[2:]], expected)
    convention = module_of("numba.core.callconv")
    codes = [convention.RETCODE_OK, convention.RETCODE_NONE, convention.RETCODE_EXC]
    expect("what kernels return", [code.constant for code in codes], [0, -2, -1])


@global_compiler_lock  # as for all calls of LLVM: prevents a fork in the middle
def address_of_kernel(compiled) -> int:
    """The address of a compile result's native function; 0 if its name belongs to another function.

    LLVM finds functions by name, and Numba's names are unique in one process only. Two kernels from the disk cache may have the
    same name, which then belongs to the last one loaded. The address of the wrapper that Numba calls was found when its kernel
    was loaded. If the wrapper's name still leads to that address, the function's name leads to this kernel, too.
    """
    wrapper = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cpython_wrapper_name)
    if wrapper != (_c_function(compiled.entry_point) or 0):
        return 0
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


_c_function = prototype("PyCFunction_GetFunction", ctypes.c_void_p, ctypes.py_object)


# ---- boxing ----------------------------------------------------------------------------------------------------------


def set_exception(context, builder, code, excinfo) -> None:
    """Emit the code that sets the Python exception of a kernel's return `code`, which is not RETCODE_OK, and `excinfo`."""
    convention = context.call_conv
    status = convention._get_return_status(builder, builder.trunc(code, ir.IntType(32)), builder.bitcast(excinfo, _excinfo_ptr_t))
    convention.raise_error(builder, context.get_python_api(builder), status)


@check
@global_compiler_lock
def _check_boxing() -> None:
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), []), "fastexchange.check")
    api = target_context().get_python_api(ir.IRBuilder(function.append_basic_block("entry")))
    for name in (
        "from_native_return", "serialize_object", "unserialize", "call_function_objargs", "nrt_adapt_ndarray_to_python",
        "incref", "decref", "pyobj",
    ):  # fmt: skip
        getattr(api, name)
    for name in ("add_const", "read_const"):
        getattr(EnvironmentManager, name)
    for name in ("_get_return_status", "raise_error", "get_return_type"):
        getattr(target_context().call_conv, name)
    for name in ("push_code_library", "get_returned_value", "get_value_type", "insert_const_string", "get_dummy_value", "cast"):
        getattr(target_context(), name)


# ---- files and locks -------------------------------------------------------------------------------------------------

FOLDERS = tuple(f"{os.path.dirname(str(package.__file__))}{os.sep}" for package in (np, numba, llvmlite))
"""The folders of the packages whose versions :func:`numba_code.code_depends_on` has."""
_LIBRARY = tuple({
    f"{folder}{os.sep}"
    for folder in (
        os.path.dirname(os.__file__),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}),  # in a virtual environment: the base's
    )
})  # fmt: skip


@functools.lru_cache(maxsize=4096)
def is_known_file(file: str) -> bool:
    """Whether a source file belongs to Python, NumPy or Numba, so that their versions identify it.

    Other files below Python's library are somebody's: in ``site-packages``, the base's too if a virtual environment has it. In a
    program that PyInstaller has frozen, modules' code is of files below the folder of all packages, named without it.
    """
    if getattr(sys, "frozen", False) and not os.path.isabs(file):
        file = os.path.join(os.path.dirname(os.__file__), file)
    if file.startswith("<frozen "):
        return file[8:].partition(".")[0].rstrip(">") in sys.stdlib_module_names
    inside = next((file[len(folder) :] for folder in _LIBRARY if file.startswith(folder)), "")
    for folder in ("lib-dynload", "base_library.zip"):  # the second is PyInstaller's
        inside = inside.removeprefix(f"{folder}{os.sep}")
    name = inside.partition(os.sep)[0].partition(".")[0]
    return name in sys.stdlib_module_names or file.startswith(FOLDERS)


def is_compiling() -> bool:
    """Whether this thread compiles, or stores code. What it pickles meanwhile is part of that code."""
    return global_compiler_lock.is_locked()


def compiler_locks() -> list[Any]:
    """Numba's compiler lock, and llvmlite's, which finalizers take alone."""
    found = []
    with contextlib.suppress(AttributeError):
        found.append(global_compiler_lock._lock)
    with contextlib.suppress(AttributeError):
        found.append(module_of("llvmlite.binding.ffi").lib._lock._lock)
    return found


# ---- dispatchers -----------------------------------------------------------------------------------------------------


@global_compiler_lock  # another thread may recompile it: Numba lets it compile meanwhile
def can_compile(dispatcher) -> bool:
    """Whether a dispatcher compiles for new types; if not, it only has declared signatures."""
    return dispatcher._can_compile


@global_compiler_lock  # as `can_compile`: meanwhile it has no code
def compile_result(dispatcher, given: tuple) -> Any:
    """What a dispatcher has compiled for arguments of these types; None if it has not."""
    return dispatcher.overloads.get(given)


def compiles_as_numba(dispatcher) -> bool:
    """Whether a dispatcher's ``_compile_for_args`` is Numba's, not a replacement by a program."""
    return getattr(dispatcher._compile_for_args, "__globals__", None) is vars(sys.modules["numba.core.dispatcher"])


def fails_to_compile(error: BaseException) -> bool:
    """Whether a dispatcher raised `error`, caught around its call, because it could not compile."""
    return _raised_in(error, CPUDispatcher._compile_for_args)


def fails_to_match(error: BaseException) -> bool:
    """Whether a dispatcher raised `error`, caught around its call, because no declared signature fits."""
    return _raised_in(error, CPUDispatcher._explain_matching_error)


def _raised_in(error: BaseException, function) -> bool:
    """Whether `error` comes from `function`, called through native code by the function that caught it."""
    first = error.__traceback__
    return first is not None and first.tb_next is not None and first.tb_next.tb_frame.f_code is function.__code__


def overloads_of(dispatcher) -> list[tuple[tuple, Any]]:
    """The argument types and compile results of a dispatcher, as they are at one moment.

    An ``OrderedDict`` itself compares keys while it is read, and raises if another thread compiles meanwhile.
    """
    return list(dict.items(dispatcher.overloads))


@global_compiler_lock
def declared_signature(dispatcher, given: tuple) -> tuple | None:
    """The declared signature that Numba's overload resolution picks for these types; None if none or several fit."""
    cases = [compiled.signature for _, compiled in overloads_of(dispatcher)]
    try:
        chosen = dispatcher.typingctx.resolve_overload(
            dispatcher.py_func, cases, given, {}, allow_ambiguous=False, unsafe_casting=True
        )
    except TypeError:
        return None
    return tuple(chosen.args) if chosen is not None else None


def use_cache(dispatcher, cache) -> None:
    """Let a dispatcher load and save its machine code by `cache`, a :data:`FunctionCache`."""
    dispatcher._cache = cache


def compile_with(dispatcher, pipeline: type) -> None:
    """Set the compiler of a dispatcher's functions."""
    dispatcher._compiler.pipeline_class = pipeline


def dispatcher_of(identity: str) -> Any:
    """The dispatcher of this process with the ``_uuid`` of a pickled one, or None."""
    return CPUDispatcher._memo.get(identity)


def identify(dispatcher, identity: str | None) -> None:
    """Give a dispatcher the identity of a pickled one, or (None) a new one. :func:`make_known` lets it be found."""
    dispatcher._MemoMixin__uuid = identity


def make_known(dispatcher) -> None:
    """Let :func:`dispatcher_of` find a dispatcher, which Numba keeps alive for some time."""
    CPUDispatcher._memo[dispatcher._uuid] = dispatcher
    CPUDispatcher._recent.append(dispatcher)


def pickled_inside(cls: type, reduce: Callable[[Any], tuple]) -> None:
    """Let Numba's pickler, and no other, pickle objects of `cls` by this function."""
    if _NumbaPickler is not None:
        if "dispatch_table" not in vars(_NumbaPickler):  # it has that of ``numba.cloudpickle``
            _NumbaPickler.dispatch_table = collections.ChainMap({}, _NumbaPickler.dispatch_table)
        _NumbaPickler.dispatch_table[cls] = reduce


def is_object_mode(dispatcher) -> bool:
    """Whether a dispatcher compiles in object mode (``forceobj=True``)."""
    return bool(dispatcher.targetoptions.get("forceobj"))


def add_class_of_dispatchers(cls: type) -> None:
    """Make `cls`, a subclass of :data:`CPUDispatcher`, known to :func:`njit_as`."""
    if _targets is not None and _dispatchers is not None:
        target: Any = type(cls.__name__, (_CPU,), {"__doc__": f"The processor, by a {cls.__name__}."})
        _targets[_target_of(cls)] = target
        _dispatchers[target] = cls


def class_of_dispatchers() -> Any:
    """The class of the dispatchers that ``numba.jit`` makes for the CPU."""
    return _dispatchers[_CPU]


def set_class_of_dispatchers(cls: Any, is_named: bool) -> None:
    """Let ``numba.jit`` make objects of `cls`; if it `is_named`, put `cls` in place of ``CPUDispatcher``.

    ``numba.jit`` reads the class in a registry. Dispatchers are pickled with the name of their class, so Numba's own class gets
    its other name, which it has in every process.
    """
    where, also = map(module_of, ("numba.core.registry", "numba.core.target_extension"))
    if also.CPUDispatcher is not CPUDispatcher:
        raise RuntimeError(f"{also.__name__} has another CPUDispatcher")
    dict.__setitem__(_dispatchers, _CPU, cls)  # the registry's own __setitem__ refuses a second value
    where.CPUDispatcher = cls if is_named else CPUDispatcher
    CPUDispatcher.__module__ = (also if is_named else where).__name__


def _target_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def njit_as(cls: Any, function: FunctionType, options: dict) -> Any:
    """``numba.njit(**options)(function)`` of the class `cls`: see :func:`add_class_of_dispatchers`."""
    njit: Any = numba.njit
    made = njit(_target=_target_of(cls), **options)(function)
    if type(made) is cls:
        return made
    targetoptions = {name: value for name, value in made.targetoptions.items() if name != "_target"}
    return cls(function, made.locals, targetoptions, pipeline_of(made))


def plain_dispatcher(kernel) -> Any:
    """Make ``numba.njit``'s dispatcher of a kernel's function, with the kernel's options."""
    return CPUDispatcher(kernel.py_func, dict(kernel.locals), dict(kernel.targetoptions), pipeline_of(kernel))


def pipeline_of(dispatcher) -> type:
    """The compiler of a dispatcher's functions, a ``numba.core.compiler.CompilerBase``."""
    return getattr(dispatcher._compiler.pipeline_class, "fastexchange_of", dispatcher._compiler.pipeline_class)


def registered_for(value: Any) -> list[tuple[Callable | None, dict]]:
    """The Python functions that define a function in compiled code by ``numba.extending``, each with the kind of definition.

    The function is None for other kinds of definition.
    """
    typing_context = cpu_target.typing_context
    try:
        load_extensions()  # before the lock is taken: others' modules are imported, and may compile
        with global_compiler_lock:
            typing_context._load_builtins()  # the part of refresh() with others' definitions: the rest imports cffi
            templates = getattr(typing_context.resolve_value_type(value), "templates", ())
    except Exception as error:  # typing may raise any exception for a value without a type
        reraise_passing(error)
        raised: BaseException | None = error
        while raised is not None:  # typing stores it in a frame: a cycle with all frames
            raised.__traceback__, raised = None, raised.__cause__ or raised.__context__
        return []
    return list(_registered(templates))


def _registered(templates) -> Iterator[tuple[Callable | None, dict]]:
    for each in templates:
        function = getattr(each, "_overload_func", getattr(each, "_definition_func", None))
        how = {name: vars(each)[name] for name in ("_jit_options", "_strict", "prefer_literal") if name in vars(each)}
        inline = getattr(getattr(each, "_inline", None), "value", None)
        yield function if isinstance(function, FunctionType) else None, {**how, "inline": inline}


def locals_of(dispatcher) -> dict[str, Any]:
    """The variables' types that a dispatcher was given, without those that Numba adds when it compiles (``x.1``)."""
    return {name: numba_type for name, numba_type in dispatcher.locals.items() if name.isidentifier()}


def type_of_argument(value) -> Any:
    """The Numba type of a value as an argument, or None. Raises the exceptions of the function that types it."""
    load_extensions()
    typeof = module_of("numba.core.typing.typeof")
    return typeof.typeof_impl(value, typeof._TypeofContext(typeof.Purpose.argument))  # numba.typeof raises ValueError for None


def is_typed_by_extension(cls: type) -> bool:
    """Whether an extension, not Numba itself, has registered a type for objects of `cls` by ``numba.extending.typeof_impl``."""
    load_extensions()
    try:
        asked = module_of("numba.extending").typeof_impl.dispatch(cls)
    except Exception as error:  # a metaclass may raise for a hash or for the bases
        reraise_passing(error)
        return False
    return not re.match(r"numba\.(?!tests\b)", getattr(asked, "__module__", None) or "")


def names_of_target_options() -> set[str]:
    """The names of the CPU target's options."""
    registered, kind = CPUDispatcher.targetdescr.options, module_of("numba.core.options").TargetOptions.Mapping
    return {name for name in dir(registered) if isinstance(getattr(registered, name), kind)}


def class_of_buffer(cls: type) -> Any:
    """The class of Numba's types for objects of `cls`, a type with the buffer protocol."""
    return _get_type_class(cls)


def reports_calls() -> bool:
    """Whether Numba's dispatchers report calls to ``sys.monitoring``, which they do on request, from CPython 3.12 on."""
    return hasattr(sys, "monitoring") and bool(getattr(config, "ENABLE_SYS_MONITORING", False))


@check
def _check_dispatchers() -> None:
    made = CPUDispatcher(py_func=lambda: None, targetoptions={"nopython": True})
    for name in (
        "_can_compile", "_cache", "_compile_for_args", "_explain_matching_error", "overloads", "typingctx", "targetoptions",
        "locals", "compile", "disable_compile", "py_func", "stats", "_memo", "_recent",
    ):  # fmt: skip
        getattr(made, name)
    module_of("numba.core.entrypoints").init_all, made.typingctx._load_builtins
    expect("whether this thread compiles", type(global_compiler_lock.is_locked()), bool)
    expect("a dispatcher's compiler", pipeline_of(made), compiler.Compiler)
    identify(made, "an identity")
    expect("a dispatcher's identity", (made._uuid, dispatcher_of("an identity")), ("an identity", None))
    templates = module_of("numba.core.typing.templates")
    overload = templates.make_overload_template(len, _raised_in, {}, False, "never")
    intrinsic = templates.make_intrinsic_template(len, _raised_in, "len")
    expect("how functions are overloaded", [each for each, _ in _registered([overload, intrinsic])], [_raised_in] * 2)
    expect("the overloads of a function", types.Function(overload).templates, (overload,))
    expect("the type of an int", type_of_argument(1), types.int64)
    expect("the type of a bytearray", class_of_buffer(bytearray), types.ByteArray)
