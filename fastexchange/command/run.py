"""``python -m fastexchange run``: run an unchanged program with its jitted functions made kernels."""

import argparse
import builtins
import functools
import importlib.util
import io
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from . import CommandError

__all__ = ["run", "run_program"]


def run(options: argparse.Namespace) -> int:
    """Run the program in this process as ``__main__``, with its jitted functions made kernels."""
    if "numba" in sys.modules:
        _accelerate()
    else:
        sys.meta_path.insert(0, _Accelerating())
    run_program(options)
    return 0


def run_program(options: argparse.Namespace) -> None:
    """Run the program in this process as ``__main__``. It remains ``__main__`` afterwards, for threads and ``atexit``."""
    program = options.program
    if not options.is_module and not os.path.exists(program):
        raise CommandError(f"{program!r} is not a file; to run a module, give -m {program}")
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.argv[:] = [program, *options.arguments]
    path = os.path.join(os.getcwd(), program)
    if options.is_module:
        sys.argv[0] = "-m"
        code = _code_of(main, _spec_of(program))
        sys.argv[0] = str(main.__file__)
    elif pkgutil.get_importer(path) is None:
        _in_front(os.path.dirname(os.path.realpath(path)))
        main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)  # the program may be a .pyc file, as for runpy
        if code is None:
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec")
    else:
        _in_front(path, is_always=True)
        sys.modules.pop("__main__")  # else find_spec finds this command line's
        spec = importlib.util.find_spec("__main__")
        if spec is None:
            raise CommandError(f"there is no __main__ in {program!r}")
        code = _code_of(main, spec)
    sys.modules["__main__"] = main
    exec(code, vars(main))


class _Accelerating:
    """An import hook that calls ``accelerate()`` when the program imports Numba.

    Numba reads environment variables at its import, and the program may set them before.
    """

    def find_spec(self, name, path=None, target=None):
        """Find Numba with the other finders, and wrap its loader."""
        if name != "numba":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._load, spec.loader, spec.loader.exec_module)
        return spec

    def _load(self, loader, exec_module, module):
        del loader.exec_module  # removes the wrapper
        exec_module(module)
        sys.meta_path.remove(self)
        _accelerate()


def _accelerate() -> None:
    from .. import accelerate

    accelerate()


def _in_front(path: str, is_always: bool = False) -> None:
    """Put `path` in the first place of ``sys.path``, as for a script. With ``-P`` or ``-I``, only if `is_always`."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = path
    elif is_always:
        sys.path.insert(0, path)


def _spec_of(name: str) -> ModuleSpec:
    """Return the spec of the module that ``python -m name`` runs. Raises CommandError if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        package = name.rpartition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{package}.".startswith(f"{error.name}."):
            spec = None
        else:
            raise
    if spec is None:
        raise CommandError(f"there is no module {name}")
    return spec if spec.submodule_search_locations is None else _spec_of(f"{name}.__main__")


def _code_of(main: ModuleType, spec: ModuleSpec) -> CodeType:
    """Return the code of a module and set the attributes of `main` for it. Raises CommandError if there is no code."""
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise CommandError(f"{spec.name} has no code to run")
    main.__file__, main.__loader__, main.__spec__, main.__package__ = spec.origin, spec.loader, spec, spec.parent
    vars(main)["__cached__"] = spec.cached
    return code
