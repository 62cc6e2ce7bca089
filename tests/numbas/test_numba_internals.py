"""A Numba that is not as expected: kernels are right all the same, by its dispatcher, and doctor says what has changed."""

import ast
import re
from pathlib import Path

import numba
import numpy as np
import pytest
from forked import needs_fork
from interpreter import copy_native_code, run_python
from nights import at_night
from numba import types
from numba.core.typeconv import Conversion
from numba.extending import NativeValue, lower_cast, models, register_model, unbox
from other_ways import run_changed

import fastexchange
from fastexchange import fast_args
from fastexchange.dispatch.runtime import runtime
from fastexchange.dispatch.self_test import calls_as_numba
from fastexchange.ground import cfunction, numba_internals, sources
from fastexchange.ground.cfunction import code_cache

CHANGES = {
    "a private method": ("hide(callconv.CPUCallConv, '_get_return_status')", "boxing"),
    "how boxing code is made": ("hide(base.BaseContext, 'get_python_api')", "boxing"),
    "a private name of a library": ("hide(codegen.CPUCodeLibrary, '_get_module_for_linking')", "units"),
    "a name that is imported": ("del typeinfer.register_dispatcher", "numba.core.typeinfer.register_dispatcher"),
    "the order of an array's fields": ("swap(models.ArrayModel)", "arrays"),
    "where a call fails": ("hide(dispatcher._DispatcherBase, '_explain_matching_error')", "dispatchers"),
    "a dispatcher's attribute": ("hide(dispatcher.Dispatcher, 'compile')", "dispatchers"),
    "a type to be extended": ("refuse_bases()", "a subclass of Numba's dispatcher"),
    "what a call does": ("self_test._kernel.__code__ = (lambda a, pair, z, number: 5 if number else 'x').__code__", "calls"),
}

OF_EACH_KIND = "the order of an array's fields", "a dispatcher's attribute", "a type to be extended", "what a call does"
"""What is seen in a layout, by name, when a class is made, and only in a call."""

CHANGED = """
    import functools, sys
    import numba, numpy as np
    from numba.core import base, callconv, codegen, dispatcher, registry, typeinfer
    from numba.core.datamodel import models

    class Hidden:
        def __init__(self, owner, name):
            self.original, self.name = owner.__dict__[name], name
        def __get__(self, instance, owner):
            if sys._getframe(1).f_globals["__name__"].startswith("fastexchange"):
                raise AttributeError(f"there is no {self.name} any more")
            return self.original.__get__(instance, owner)

    def hide(owner, name):
        setattr(owner, name, Hidden(owner, name))

    def swap(model):
        before = model.__init__
        def changed(self, dmm, fe_type):
            before(self, dmm, fe_type)
            fields, members = self._fields, self._members
            self._fields = (fields[1], fields[0], *fields[2:])
            self._members = (members[1], members[0], *members[2:])
        model.__init__ = changed

    def refuse_bases():
        from fastexchange.ground import pythonapi
        real = pythonapi.prototype
        def from_spec(function, spec, bases):
            if bases != (object,):
                raise SystemError("another layout")
            return function(spec, bases)
        def prototype(name, *types):
            function = real(name, *types)
            return functools.partial(from_spec, function) if name == "PyType_FromSpecWithBases" else function
        pythonapi.prototype = prototype

    if sys.argv[1].startswith("self_test"):
        from fastexchange.dispatch import self_test
    exec(sys.argv[1])
    from other_ways import check
    from fastexchange.command import probe
    from fastexchange.dispatch.runtime import runtime

    kernel, _ = check(is_compiled=False)
    text = str(kernel.explain(1.0, np.ones(3), (1.0, 2.0)))
    assert isinstance(kernel, registry.CPUDispatcher) and numba.njit(lambda x: kernel(1.0, x, (1.0, 2.0)))(np.ones(3)) == 6.0
    assert kernel.counts().fast == 0 and "Numba's own dispatcher makes all calls" in text, text
    print(*runtime().numba_failures, sep=";")
    finding = next(probe._native())
    print(finding.status, finding.name, finding.text)
    """


def test_the_installed_numba_is_as_expected():
    assert numba_internals.failures() == {} and calls_as_numba() == ""
    assert runtime().is_native and runtime().numba_failures == {}


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("change", at_night(CHANGES, *OF_EACH_KIND))
def test_a_numba_that_has_changed(change, tmp_path):
    code, name = CHANGES[change]
    if code_cache.directory is not None:  # but for the verdict of the self-test
        copy_native_code(tmp_path, "*self_test*")
    done = run_changed(CHANGED, code, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.splitlines()[0] == name
    assert re.search(f"^slow .*{re.escape(name)}", done.stdout, re.MULTILINE), done.stdout


def test_the_verdict_is_forgotten_with_whatever_source_it_is_about():
    """The stamp with which the self-test's result is kept names all modules that the test uses."""
    module = calls_as_numba.__module__
    stamped = {name.removeprefix("fastexchange.") for name in sources._imports_of(module)}
    assert {"dispatch.boxing", "dispatch.trampoline", "ground.numba_internals"} <= stamped
    for node in ast.walk(ast.parse(sources.read(sources._files()[module]))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.col_offset == 0, f"line {node.lineno} imports inside of a function: the stamp does not see that"


Start = type("Start", (types.Opaque,), {
    "can_convert_from": lambda self, typingctx, other: Conversion.safe if isinstance(other, types.Array) else None,
})  # fmt: skip
"""A user's type of parameters: the address of an array's memory block, which Numba's runtime computes in a cast."""
register_model(Start)(models.OpaqueModel)
unbox(Start)(lambda numba_type, ob, c: NativeValue(c.context.get_constant_null(numba_type)))


@lower_cast(types.Array, Start)
def cast_to_start(context, builder, given, taken, value):
    return context.nrt.meminfo_data(builder, context.make_array(given)(context, builder, value).meminfo)


def test_what_casts_call_of_numbas_runtime_is_in_the_generated_code(monkeypatch):
    finish, finished = cfunction.CodeUnit.finish, {}

    def functions(library, is_declaration: bool) -> set[str]:
        return {function.name for function in library._final_module.functions if function.is_declaration == is_declaration}

    def noted(unit, *extra):
        result = finish(unit, *extra)
        finished[unit.symbol.split(".")[1]] = functions(unit.library, True)
        return result

    monkeypatch.setattr(cfunction.CodeUnit, "finish", noted)

    @fast_args
    @numba.njit([types.int64(Start("Start"))])
    def kernel(start):
        with numba.objmode():  # so the kernel is not inlined: the value has to be passed
            pass
        return 7

    assert {kernel(np.ones(3)) for _ in range(4)} == {kernel.bind(np.ones(3))()} == {7}
    assert finished.keys() >= {"trampoline"}
    defined = functions(numba_internals.runtime_library(), False)
    assert "NRT_MemInfo_data_fast" in defined
    assert not {name: missing for name, declared in finished.items() if (missing := declared & defined)}


@pytest.mark.slow
def test_code_that_is_not_optimised_finds_numbas_runtime(tmp_path):
    """LLVM ends the process for a name that it does not know. Optimised code has lost the calls of these.

    The second process loads what the first has compiled.
    """
    code = "from fastexchange.producers.numpy_table import exchange_table; print(exchange_table() is None)"
    settings = {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert [run_python(code, **settings).stdout for _ in range(2)] == ["False\n"] * 2


PUBLIC = {
    "llvmlite.binding", "llvmlite.ir", "numba", "numba.core.cgutils", "numba.core.compiler", "numba.core.config",
    "numba.core.dispatcher", "numba.core.errors", "numba.core.event", "numba.core.sigutils", "numba.core.types",
    "numba.extending", "numba.np.numpy_support", "numba.types",
}  # fmt: skip
"""Modules that Numba's and llvmlite's documentation names, or tells those who extend Numba to use."""
OF_NUMBA = "numba_internals.py", "numba_code.py", "numba_extensions.py"

PRIVATE = re.compile(r"\b(dispatcher|library|codegen|call_conv|codelib|cres|compiled|pyapi|api)\._(?!numba_type_)[a-z]\w*")


def test_what_is_private_stands_in_these_files():
    """Modules and attributes. The packages for CUDA have a file each (``cuda.targets``)."""
    root = Path(fastexchange.__file__).parent
    for path in root.rglob("*.py"):
        if path.name in OF_NUMBA or path.parent.name == "targets":
            continue
        assert not (found := PRIVATE.findall(path.read_text())), (path.name, found)
        for node in ast.walk(ast.parse(path.read_text())):
            names = {name.name for name in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                inner = {f"{node.module}.{name.name}" for name in node.names}
                names = {name if name in PUBLIC else node.module for name in inner}
            private = {name for name in names if name.split(".")[0] in ("numba", "llvmlite")} - PUBLIC
            assert not private, f"{path.relative_to(root)} imports {private}"
