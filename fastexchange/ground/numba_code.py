"""Numba's code libraries and LLVM's modules: linked, sealed, kept, and what a kernel's code calls.

The other half of ``numba_internals``: private names of Numba and llvmlite stand in these two files, and in ``numba_extensions``.
"""

import contextlib
import copy
import functools
import importlib.util
import itertools
import re
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import llvmlite
import llvmlite.binding as _llvm
import numba
import numpy as np
from numba.core import compiler, config

from ..interpreter import NONE_IS_IMMORTAL, TUPLE_ITEMS
from .passing import reraise_passing

from .numba_internals import (  # isort: skip
    DispatcherBase, check, compiler_locks, cpu_target, expect, failures, global_compiler_lock, has_representation, imported,
    initialize_runtime, load_representations, module_of, runtime_library, target_context,
)  # fmt: skip

_CodeLibrary: Any = imported("numba.core.codegen", "CodeLibrary")
_Environment: Any = imported("numba.core.environment", "Environment")
_ObjModeLiftedWith: Any = imported("numba.core.dispatcher", "ObjModeLiftedWith", ())
_Linkage: Any = imported("llvmlite.binding", "Linkage")
_PassManager: Any = imported("numba.core.compiler_machinery", "PassManager")


# ---- under construction ----------------------------------------------------------------------------------------------

_namings: list[Iterator[str] | None] = []


def unique() -> str:
    """Return a part of a symbol's name that no other process uses."""
    names = _namings[-1] if _namings else None
    return uuid.uuid4().hex if names is None else next(names)


@contextlib.contextmanager
def number_names(of: str | None) -> Iterator[None]:
    """Context manager: let :func:`unique` count, in a process that only writes code: the same sources give the same bytes.

    `of`: a part of all these names, by which what is being made is known from anything else that a process may load. None: in
    such a process, make names of its own.
    """
    depth = len(_namings)
    _namings.append(None if of is None else (f"{of}n{number}" for number in itertools.count()))
    try:
        yield
    finally:
        del _namings[depth:]


def new_library(context, name: str) -> tuple[Any, Any]:
    """Make a code library and an IR module for it."""
    library = context.codegen().create_library(name)
    if _namings:
        kind: Any = type(library)
        library = _keeping(kind)(library.codegen, name)
    library.enable_object_caching()  # before it is finalised
    return library, library.create_ir_module(name)


@functools.cache
def _keeping(kind: Any) -> Any:
    """A kind of library that keeps, in a process that only writes code to files, what code for other platforms is made of.

    LLVM changes the module itself when it makes machine code of it, and then it is for one platform.
    """

    class Keeping(kind):
        def _optimize_final_module(self):
            super()._optimize_final_module()
            if _namings:
                self.fastexchange_optimised = self._final_module.as_bitcode()

    return Keeping


def finish_library(library, module, linked: list, symbols: tuple[str, ...]) -> None:
    """Compile a module, linked with the libraries `linked`. Only `symbols` are visible from outside.

    Otherwise the linker would resolve any other name to another unit's function, or to a kernel's from another process.
    """
    library.add_ir_module(module)
    for each in _HelperLibraries.with_called(linked):
        library._final_module.link_in(each._get_module_for_linking(), preserve=True)
    if any(each.is_declaration and each.name.startswith("NRT_") for each in library._final_module.functions):
        # Also for calls that are optimised away: without optimisation (NUMBA_OPT=0) they stay.
        library._final_module.link_in(runtime_library()._get_module_for_linking(), preserve=True)
    _hide(library._final_module, {*symbols})
    for variable in library._final_module.global_variables:
        if variable.linkage == _Linkage.common:  # a table of Python objects, which native functions do not have
            variable.linkage = "internal"
    library.finalize()


_HELPER_PASSES = (
    ("untyped_passes", "TranslateByteCode"), ("untyped_passes", "FixupArgs"), ("untyped_passes", "IRProcessing"),
    ("untyped_passes", "DeadBranchPrune"), ("untyped_passes", "ReconstructSSA"), ("typed_passes", "NopythonTypeInference"),
    ("typed_passes", "PreLowerStripPhis"), ("typed_passes", "NativeLowering"), ("typed_passes", "NoPythonBackend"),
)  # fmt: skip
"""Those of Numba's passes that helpers need. The others, for closures, loops over tuples, raised exceptions and so on, find
nothing in the dialect of ``ground.native``, but take time."""


@functools.cache
def helper_compiler() -> type:
    """The compiler of native helpers: it translates them to LLVM's language, no further.

    The unit that links a helper optimises it and translates it to machine code, once. Numba's own compiler would do so for each
    helper with all that it calls.
    """

    class HelperCompiler(compiler.Compiler):
        def define_pipelines(self):
            if failures():
                return super().define_pipelines()
            self.state.library = _HelperLibraries.make(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
            manager: Any = _PassManager("native")
            for module, name in _HELPER_PASSES:
                manager.add_pass(getattr(module_of(f"numba.core.{module}"), name), name)
            manager.finalize()
            return [manager]

    return HelperCompiler


class _HelperCodegen:
    """A code generator whose functions have no Python objects."""

    def __init__(self, codegen):
        self._codegen = codegen

    def __getattr__(self, name):
        return getattr(self._codegen, name)

    def set_env(self, name, environment) -> None:
        """Do nothing: the function's table of objects is not in memory."""


class _HelperLibraries:
    """Libraries of helpers: LLVM modules with one function each, neither optimised nor translated."""

    @staticmethod
    @functools.cache
    def _derived(kind: Any) -> Any:
        class HelperLibrary(kind):
            codegen = property(lambda self: _HelperCodegen(self._codegen))

            def finalize(self):
                self._finalized = True

            def _get_module_for_linking(self):
                return self._final_module  # not "linkonce_odr": the linker would drop it before the first call is linked

            def get_pointer_to_function(self, name):
                return 0

        return HelperLibrary

    @classmethod
    def make(cls, codegen, name: str) -> Any:
        """Make the library of one helper."""
        kind: Any = type(codegen.create_library(name))
        return cls._derived(kind)(codegen, name)

    @classmethod
    def with_called(cls, libraries) -> list:
        """Return libraries with those of the functions that helpers among them call, each once, after the first that calls it."""
        found: dict[Any, None] = {}
        pending = list(libraries)[::-1]
        while pending:
            library = pending.pop()
            if library not in found:
                found[library] = None
                if isinstance(library.codegen, _HelperCodegen):  # any other library has what it calls
                    pending += library._linking_libraries[::-1]
        return list(found)


def _hide(module, shown: set[str]) -> None:
    """Make a module's functions local, except for `shown`, so that LLVM may change their signatures.

    They also get other names, because the linker resolves later references to local functions, too. The functions of Numba's
    runtime keep theirs: they are the same everywhere, and Numba's LLVM passes know them by name.
    """
    suffix = f".{unique()}"
    for function in list(module.functions):
        if not function.is_declaration and function.name not in shown and not function.name.startswith("NRT_"):
            function.linkage = "internal"
            function.name = _without_address(function.name) + suffix


def _without_address(name: str) -> str:
    """A symbol's name, which Numba makes of an object's address for the parts of a function that it compiles separately."""
    return _ADDRESS.sub(lambda _: unique(), name) if _namings else name


_ADDRESS = re.compile(r"(?<=__numba_parfor_gufunc_)0x[0-9a-f]+|(?<=__numba_array_expr_)0x[0-9a-f]+")


def sealed_library(context, name: str) -> Any:
    """Make a library for a function that is cached on disk: only the function's own symbols are visible from outside.

    Functions linked into it and their environments (Numba's tables of Python objects) have symbols that are unique in this
    process only. In a process that loads the library, they could lead to other functions' code and objects.
    """
    made = context.codegen().create_library(name)
    kind: Any = type(made)
    library = _sealing(kind)(made.codegen, name)
    library.enable_object_caching()
    return library


@functools.cache
def _sealing(kind: Any):
    keeping: Any = _keeping(kind)

    class Sealed(keeping):
        def finalize(self):
            module = self._final_module
            defined = [each for each in (*module.functions, *module.global_variables) if not each.is_declaration]
            self._own = {each.name for each in defined if each.linkage in (_Linkage.external, _Linkage.common)}
            self._environments = []  # Numba does not keep them alive
            super().finalize()
            for environment in self._environments:
                self.codegen.set_env(environment.env_name, environment)

        def _optimize_final_module(self):
            _hide(self._final_module, self._own)
            for variable in list(self._final_module.global_variables):
                if variable.linkage == _Linkage.common and variable.name not in self._own:
                    self._rename(variable)
            super()._optimize_final_module()

        def _rename(self, variable):
            known = _Environment._memo.get(variable.name)
            if known is not None:
                variable.name = f"{_without_address(variable.name)}x{unique()}"
                renamed = _Environment(known.globals)
                renamed.consts[:] = known.consts
                renamed.env_name = variable.name
                _Environment._memo[variable.name] = renamed
                self._environments.append(renamed)

    return Sealed


def bind_globals(lifted) -> None:
    """Let blocks of ``objmode`` that have been taken out of a function find its globals in the function.

    Numba looks into the function's module, in whatever process: that may be another program's ``__main__``. For functions without
    a module it takes the function's own globals, of which a pickle has those that the function names.
    """
    for dispatcher in [each for each in lifted if isinstance(each, _ObjModeLiftedWith)]:
        identity = dispatcher.func_ir.func_id
        function = identity.func
        if function.__module__ == "__main__" or not is_importable(function.__module__):
            made: Any = FunctionType(function.__code__, function.__globals__, None, function.__defaults__, function.__closure__)
            made.__kwdefaults__, made.__qualname__, made.__module__ = function.__kwdefaults__, function.__qualname__, None
            dispatcher.func_ir.func_id = copied = copy.copy(identity)
            copied.func = made


def is_importable(module: str | None) -> bool:
    """Whether a module of this name is there, or found: in another process Numba imports it for a function's globals."""
    if not isinstance(module, str) or module in sys.modules:
        return isinstance(module, str)
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def calls_itself_through_another(library) -> bool:
    """Whether code refers to a name whose address is known to its compiler, but not to a process that loads it."""
    return any(variable.name.startswith(".numba.unresolved$") for variable in library._final_module.global_variables)


def why_not_kept(compiled) -> str:
    """Why another process cannot use the code of a compile result that was made here; "" if it can.

    Source: ``numba.core.caching.CompileResultCacheImpl.check_cachable``, and :func:`sealed_library`.
    """
    library = compiled.library
    if not hasattr(library, "_environments"):
        return "it was compiled by a dispatcher of Numba's, or loaded from a file that is gone"
    if any(not each.can_cache for each in compiled.lifted):
        return "it has loops that Numba compiles separately, in object mode"
    if library.has_dynamic_globals:
        return "it has addresses of this process, such as those of ctypes' pointers and large global arrays"
    if calls_itself_through_another(library):
        return "it calls itself through another function, or with other types"
    return ""


def reduced(compiled) -> tuple:
    """A compile result that was made here, as an object that can be pickled. For results that :func:`why_not_kept` allows."""
    module = compiled.library._final_module
    *result, environments = compiled._reduce()
    if _namings:
        name, kind, (code, linked) = result[_LIBRARY]
        result[_LIBRARY] = name, kind, (code, _bitcode(_llvm.parse_bitcode(linked)))
        result[_ANNOTATION] = _NO_TYPES
    # Numba would import the module of each function that is linked in: for a sum of an array half of Numba, and SciPy.
    text = str(module)
    others = [each for each in environments if each is not compiled.environment]
    used = [each for each in others if text.count(each.env_name) != 1]  # once: the definition of its variable
    described = tuple((str(each.globals["__name__"]), list(each.consts), each.env_name) for each in used)
    _called(compiled.library)
    known = {name: value for name in _KNOWN_OF_CODE if (value := getattr(compiled.library, name, None)) is not None}
    return _names_in(module, is_declaration=True), _names_in(module, is_declaration=False), known, (*result, described)


def _environment(module: str, constants: list, name: str) -> Any:
    """The table of Python objects of a function that is linked in, by its variable's name. `module`: where the function is.

    Its globals are for code in object mode, which Numba's own functions are not, so their module is not imported: those for
    arrays bring strings, hashes and random numbers with them (``perf/shipped_kernels.py`` shows what that costs).
    """
    made = _Environment._memo.get(name)
    if made is None:
        found = sys.modules.get(module)
        if found is None and not module.startswith("numba."):
            found = importlib.import_module(module)
        made = _Environment({"__name__": module} if found is None else vars(found))
        made.consts[:] = constants
        made.env_name = name
        _Environment._memo[name] = made
    return made


def rebuilt(context, state: tuple) -> Any:
    """Make the compile result of :func:`reduced`, possibly in another process.

    Numba's compiler is loaded only if it has a name that the code refers to (LLVM ends the process for an unknown one), or
    one of the signature's types.
    """
    names, defined, known, result = state
    initialize_runtime()
    signature = result[_SIGNATURE]
    for load in result[_RELOAD] or ():  # Numba's threads, whose functions parallel loops name
        load()
    if any(name.startswith(_LINEAR_ALGEBRA) for name in names) and importlib.util.find_spec("scipy") is None:
        for ensure in ("ensure_blas", "ensure_lapack"):
            getattr(importlib.import_module("numba.np.linalg"), ensure)()  # raises ImportError: the code would end the process
    if not (_are_known(names) and all(map(has_representation, (*signature.args, signature.return_type)))):
        load_representations()
    name, _, (code, linked) = result[_LIBRARY]
    loaded = _Loaded(context, _loaded(name, code, defined, linked))
    *result, environments = result
    result.append([_environment(*each) for each in environments])
    made = compiler.CompileResult._rebuild(loaded, *result)._replace(target_context=context)
    vars(made.library).update(known)
    return made


_NO_TYPES = "The machine code came with its package, without this text: numba.njit(kernel.py_func) compiles the function here."
"""The text of ``inspect_types()`` of shipped code. Numba's has paths of modules, and addresses."""
_KNOWN_OF_CODE = ("fastexchange_called", "fastexchange_never_written")
"""Attributes of a library by which what is known of a kernel's code goes with it."""


_LINEAR_ALGEBRA = "numba_xx", "numba_ez", "numba_cblas", "numba_raw_"
"""Prefixes of Numba's functions that call SciPy's BLAS and LAPACK."""
_known_names: set[str] = set()


def _are_known(names: tuple[str, ...]) -> bool:
    """Whether LLVM finds all these names. It is asked once for each that it knows."""
    _known_names.update(name for name in names if name not in _known_names and _llvm.address_of_symbol(name))
    return _known_names.issuperset(names)


_LIBRARY, _SIGNATURE, _ANNOTATION, _RELOAD = 0, 3, 6, 7
"""Positions in what a compile result is reduced to."""


def _names_in(module, is_declaration: bool) -> tuple[str, ...]:
    """The names of the functions and variables that a module declares only, or defines. LLVM has intrinsic functions itself."""
    found = (each.name for each in (*module.functions, *module.global_variables) if each.is_declaration == is_declaration)
    return tuple(name for name in found if not name.startswith("llvm."))


def serialized(library, symbols: tuple[str, ...]) -> Any:
    """A library's machine code, of which only the functions `symbols` are used, as an object that can be pickled."""
    return symbols, library._get_compiled_object()


def serialized_for(triple: str, library, symbols: tuple[str, ...]) -> Any:
    """:func:`serialized` for any processor of a platform, such as ``"aarch64-unknown-linux-gnu"``."""
    return symbols, _machine(triple).emit_object(_moved(triple, library))


def reduced_for(triple: str, compiled) -> tuple:
    """:func:`reduced` for any processor of a platform, such as ``"aarch64-unknown-linux-gnu"``."""
    names, defined, known, (library, *rest) = reduced(compiled)
    linked = _moved(triple, compiled.library)
    for function in linked.functions:
        if not function.is_declaration and function.linkage == _Linkage.external:
            function.linkage = "linkonce_odr"  # as in what Numba links into others
    moved = library[0], library[1], (_machine(triple).emit_object(_moved(triple, compiled.library)), _bitcode(linked))
    return names, defined, known, (moved, *rest)


def _bitcode(module) -> bytes:
    """The bitcode of a module, without addresses of this process: they are in notes on what may be aliased."""
    return _llvm.parse_assembly(_ADDRESS.sub("0x0", str(module))).as_bitcode()


class NotPortable(RuntimeError):
    """Code of which LLVM has made something for one platform only."""


_COUNTED_DOWN = re.compile(r"call i8 @llvm\.x86\.atomic\.sub\.cc\.i64\((ptr [^,]+), i64 ([^,]+), i32 4\)")
_COUNT_DOWN = """
define internal i8 @fastexchange.count_down(ptr %count, i64 %by) alwaysinline {
  %old = atomicrmw sub ptr %count, i64 %by seq_cst
  %is_last = icmp eq i64 %old, %by
  %result = zext i1 %is_last to i8
  ret i8 %result
}
"""
"""What x86-64's LLVM makes of the end of a reference in code that it has translated, and Numba links into others."""


def _moved(triple: str, library) -> Any:
    """The module of a library that was made here, for another platform. Raises NotPortable."""
    module = _llvm.parse_bitcode(library.fastexchange_optimised)
    if not triple.startswith("x86_64"):
        module = _generalised(module)
    module.triple, module.data_layout = triple, str(_machine(triple).target_data)
    return module


def _generalised(module) -> Any:
    """A module without what LLVM has made for x86-64. Raises NotPortable."""
    text, count = _COUNTED_DOWN.subn(r"call i8 @fastexchange.count_down(\1, i64 \2)", str(module))
    if count:
        text = re.sub(r"^declare i8 @llvm\.x86\.atomic\.sub\.cc\.i64.*$", "", text, flags=re.MULTILINE) + _COUNT_DOWN
        module = _llvm.parse_assembly(text)
    if (left := re.search(r"@llvm\.x86\.[\w.]+", text)) is not None:
        raise NotPortable(f"LLVM has used {left[0]}, which is for this platform only")
    return module


@functools.cache
def _machine(triple: str) -> Any:
    """LLVM's code generator for all processors of a platform, with the options by which Numba makes its own for this one."""
    _llvm.initialize_all_targets()
    _llvm.initialize_all_asmprinters()
    relocation = "static" if triple.startswith("x86_64") else "default"
    target = _llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu="generic", opt=3, reloc=relocation, codemodel="jitdefault", jit=True)


def restored(state) -> tuple[Any, tuple[int, ...]]:
    """Make the library of :func:`serialized`, possibly in another process. Returns it, and its functions' addresses."""
    symbols, code = state
    library = _loaded(symbols[0], code, symbols)
    return library, tuple(map(library.get_pointer_to_function, symbols))


def _loaded(name: str, code: bytes, symbols: tuple[str, ...], linked: bytes = b"") -> Any:
    """Load machine code that defines these symbols. `linked`: bitcode of the same, for libraries that link it.

    Numba's ``unserialize_library`` reads the bitcode, too, and gives LLVM the code in a callback, whose exceptions are lost.
    """
    codegen = cpu_target.target_context.codegen()
    kind: Any = codegen._library_class
    library = _loading(kind)(codegen, name, linked)
    engine = codegen._engine
    engine._ee.add_object_file(_llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    engine._defined_symbols.update(symbols)
    return library


@functools.cache
def _loading(kind: Any) -> Any:
    class Loading(kind):
        _disable_inspection = _finalized = True

        def __init__(self, codegen, name, linked):
            _CodeLibrary.__init__(self, codegen, name)  # that of `kind` would have LLVM make a module
            self._linking_libraries, self._linked = [], linked

        @functools.cached_property
        def _final_module(self):
            return _llvm.parse_bitcode(self._linked) if self._linked else _llvm.parse_assembly("")

        def _get_module_for_linking(self):
            return self._final_module

    return Loading


class _Loaded:
    """A target context of which :func:`rebuilt` has loaded the library that Numba is to load."""

    def __init__(self, context, library):
        self.real, self.loaded = context, library

    def codegen(self):
        return self

    def unserialize_library(self, _state):
        return self.loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def native_code_depends_on() -> tuple:
    """What the code of native functions depends on besides their sources and the processor: Python, Numba, llvmlite."""
    packages = numba.__version__, llvmlite.__version__, DispatcherBase.__basicsize__
    return sysconfig.get_config_var("SOABI"), *packages, TUPLE_ITEMS, NONE_IS_IMMORTAL


def processor_of(codegen) -> tuple:
    """The processor that a code generator makes code for. Numba asks LLVM each time, which takes as long as reading an entry."""
    named: Any = config
    return _asked_processor(codegen, named.CPU_NAME, named.CPU_FEATURES)


@functools.lru_cache(maxsize=8)
def _asked_processor(codegen, name, features) -> tuple:
    return codegen.magic_tuple()


def processor() -> tuple:
    """The processor that Numba makes code for: LLVM's triple, a name, and features, as "+avx2,-avx512f"."""
    return processor_of(cpu_target.target_context.codegen())


@functools.cache
def this_processor() -> tuple[str, str]:
    """LLVM's name for the processor that this process runs on, and its features, whatever Numba was told to make code for."""
    try:
        return _llvm.get_host_cpu_name(), _llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM does not know that processor's features
        return _llvm.get_host_cpu_name(), ""


def settings() -> list[tuple[str, str]]:
    """Numba's settings that affect the code of a function."""
    return [(name, str(getattr(config, name, None))) for name in _SETTINGS]


def native_settings() -> dict[str, Any]:
    """The values that Numba's settings have while native code is compiled, whatever is set for users' functions.

    They are Numba's own defaults: so another thread that reads the settings meanwhile sees others only if somebody has set them.
    """
    return {"OPT": type(_OPTIMISATION)(3), "BOUNDSCHECK": None, "DEBUGINFO_DEFAULT": 0, "DEBUG_JIT": 0, "USING_SVML": False}


def native_settings_left() -> tuple:
    """The settings on which machine code of native functions depends: what :func:`native_settings` leaves alone."""
    own = native_settings()
    return int(_OPTIMISATION), [(name, value) for name, value in settings() if name not in own]


def code_depends_on(machine: tuple = ()) -> tuple:
    """Everything that a kernel's machine code depends on besides its sources: builds and versions, the processor, settings.

    `machine`: processor and settings, if not those for users' functions.
    """
    return native_code_depends_on(), sys.version, sys.maxsize, np.__version__, machine or (processor(), settings())


_SETTINGS = (
    "OPT", "DEBUG_JIT", "DEBUGINFO_DEFAULT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "USING_SVML",
    "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS",
)  # fmt: skip
"""Numba's settings that affect the code of a function."""
_OPTIMISATION: Any = getattr(config, "OPT", 3)
"""LLVM's target machine keeps the level of optimisation that was set when Numba made it."""


@check
@global_compiler_lock
def _check_units() -> None:
    parameters = compiler.CompileResult._rebuild.__code__.co_varnames
    found = [parameters[2 + each] for each in (_LIBRARY, _SIGNATURE, _ANNOTATION, _RELOAD, _RELOAD + 1)]
    expected = ["libdata", "signature", "typeann", "reload_init", "referenced_envs"]
    expect("what a compile result is made of", found, expected)
    expect("the number of the compiler's locks", len(compiler_locks()), 2)
    library, module = new_library(target_context(), "fastexchange.check")
    for thing, names in (
        (compiler.CompileResult, "_reduce _rebuild signature reload_init"),
        (library, "add_ir_module finalize _optimize_final_module get_pointer_to_function _final_module"),
        (library, "codegen _codegen _finalized _linking_libraries"),
        (library, "serialize_using_object_code _get_module_for_linking _disable_inspection"),
        (library._final_module, "link_in functions"),
        (target_context().codegen(), "_library_class magic_tuple set_env"),
        (target_context().codegen()._engine, "_ee _defined_symbols finalize_object"),
        (module, "globals"),
        (library._final_module, "global_variables"),
        (_Environment, "_memo consts globals"),
        (_Linkage, "external common"),
        *((module_of(f"numba.core.{module}"), name) for module, name in _HELPER_PASSES),
    ):
        for name in names.split():
            getattr(thing, name)


# ---- compiled --------------------------------------------------------------------------------------------------------

RUNS_THREADS, RUNS_PYTHON = 1, 2
_RUN_THREADS = "PyEval_SaveThread"
_RUN_PYTHON = ("PyObject_Call", "PySys_FormatStdout")
_BOX = ("NRT_adapt", "NRT_MemInfo_acquire", "numba_unpickle")


def _called_by(library) -> Iterator[str | None]:
    """The names of all functions that a kernel's code calls; None for a call through a pointer.

    Leaves out Numba's wrappers around kernels, which run before and after them, and the functions that count references.
    """
    for function in library._get_module_for_linking().functions:
        if function.is_declaration or function.name.startswith(("_ZN7cpython", "cfunc.", "NRT_")):
            continue
        for callee in re.findall(r"^[^;\n]*?\b(?:call|invoke)\b[^@%\n]*(@\"?[\w.$]+|%|$)", str(function), re.MULTILINE):
            yield callee.lstrip('@"') if callee.startswith("@") else None


def runs_python(library) -> int:
    """Which Python code may run during a kernel: 0, none; else a ``RUNS_*``.

    RUNS_PYTHON: the kernel may run some itself (an ``objmode`` block, ``print``, a callback). That is assumed for code
    that cannot be read, or calls a function by a pointer (ctypes, cffi, first-class functions). RUNS_THREADS: it lets other
    threads run; a parallel loop releases the GIL.
    """
    return _called(library)[0]


def boxes_arrays(library) -> bool:
    """Whether a kernel may make Python objects of arrays, as for the arguments of an exception. Assumed of unreadable code."""
    return _called(library)[1]


def _called(library) -> tuple[int, bool]:
    """What :func:`runs_python` and :func:`boxes_arrays` say. It is kept with the code, as reading it takes as long as loading."""
    known = getattr(library, "fastexchange_called", None)
    if known is None:
        try:
            names = set(_called_by(library))
        except Exception as error:
            reraise_passing(error)
            return RUNS_PYTHON, True
        runs = RUNS_THREADS * (_RUN_THREADS in names)
        if any(name is None or name.startswith(_RUN_PYTHON) for name in names):
            runs = RUNS_PYTHON
        known = library.fastexchange_called = runs, any(name is None or name.startswith(_BOX) for name in names)
    return known


