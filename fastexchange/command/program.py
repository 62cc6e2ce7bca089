"""Run a program as ``python PROGRAM`` does, for ``run`` and ``record``.

The interpreter itself does it: this process executes Python anew, with the options that it got (:func:`start_anew`). So nothing
of this package lies below the program, and how a program is read, what ``__main__`` has, tracebacks, the exit code and the end
are Python's. ``site`` imports ``started/sitecustomize.py`` before the program, because PYTHONPATH then begins with its folder.

Where that cannot be, the program runs in this process (:func:`run_here`), above frames of this package, which a traceback leaves
out: on Windows, where executing makes another process; with ``-E``, ``-I`` and ``-S``, with which Python does not look there; and
if something else (a debugger, a profiler, a program) has started the command line, which has to stay.
"""

import argparse
import builtins
import importlib.util
import io
import os
import pkgutil
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from . import CommandError
from .started import sitecustomize as started

__all__ = ["NoProgram", "run_here", "start_anew"]

_FOLDER = os.path.dirname(os.path.abspath(started.__file__))
_PACKAGE = __name__.partition(".")[0]
_FLAGS = "bBdiOPqRsuvx"
"""Options of Python without a value, without those that this way is not for."""


def start_anew(options: argparse.Namespace, what: str) -> None:
    """Replace this process by a Python that runs the program, and does `what`. Returns if that cannot be.

    `what`: ``"run"``, to accelerate it, or ``"record FILE"``. Raises CommandError if there is no such file.
    """
    program = options.program
    if not (options.is_module or program == "-" or os.path.exists(program)):
        to_run = "" if program.endswith(".py") or os.sep in program else f"; to run a module, give -m {program}"
        raise CommandError(f"there is no file {program!r}{to_run}")
    given = _options_of_python()
    if given is None or os.name != "posix" or not sys.executable or os.pathsep in _FOLDER:
        return
    if sys.flags.no_site or sys.flags.ignore_environment or PathFinder.find_spec("sitecustomize", [_FOLDER]) is None:
        return
    before = os.environ.get("PYTHONPATH")
    changed = {started.STARTED: f"{os.getpid()} {what}", "PYTHONPATH": os.pathsep.join([_FOLDER, *filter(None, [before])])}
    if before is not None:
        changed[started.PYTHONPATH] = before
    kind = ["-m"] if options.is_module else ["--"] if program.startswith("-") and program != "-" else []
    try:
        os.execve(sys.executable, [sys.executable, *given, *kind, program, *options.arguments], {**os.environ, **changed})
    except OSError:  # for example no room for longer arguments
        return


def _options_of_python() -> list[str] | None:
    """The options before ``-m fastexchange`` in Python's command line; None if that is not what this process was started with."""
    found: list[str] = []
    given = iter(sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1])
    for each in given:
        if last := re.fullmatch(rf"-([{_FLAGS}]*)m(.*)", each, re.DOTALL):
            is_ours = (last[2] or next(given, "")) in (_PACKAGE, f"{_PACKAGE}.__main__") and next(given, None) is None
            return [*found, *([f"-{last[1]}"] if last[1] else [])] if is_ours else None
        if each in ("-X", "-W", "--check-hash-based-pycs"):
            found += [each, next(given, "")]
        elif re.fullmatch(rf"-(?:[{_FLAGS}]+|[XW].+)", each, re.DOTALL):
            found.append(each)
        else:
            return None
    return None


class NoProgram(SystemExit):
    """There is no such module. Its argument is what Python says then; the exit code is 1."""


# ---- in this process -------------------------------------------------------------------------------------------------


def run_here(options: argparse.Namespace) -> None:
    """Run the program in this process as ``__main__``. It remains ``__main__`` afterwards, for threads and ``atexit``.

    Raises what the program raises; CommandError or NoProgram if there is none.
    """
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    sys.argv[:] = [options.program, *options.arguments]
    try:
        code = _module(main, options.program) if options.is_module else _file(main, options.program)
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except (CommandError, NoProgram):
        raise
    except BaseException as error:
        _leave_out_below(error)
        raise


def _leave_out_below(error: BaseException) -> None:
    """Let ``sys.excepthook`` get a traceback of `error` that begins in the program. There is none if it could not be compiled."""
    own, hook = error.__traceback__, sys.excepthook
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next

    def without_ours(kind, value, traceback):
        hook(kind, value.with_traceback(own), own) if value is error else hook(kind, value, traceback)

    sys.excepthook = without_ours


def _module(main: ModuleType, name: str) -> CodeType:
    sys.argv[0] = "-m"
    code = _code_of(main, _spec_of(name))
    sys.argv[0] = str(main.__file__)
    return code


def _file(main: ModuleType, program: str) -> CodeType:
    if program == "-":
        _in_front("")
        return compile(sys.stdin.buffer.read(), "<stdin>", "exec")
    path = os.path.join(os.getcwd(), program)
    if pkgutil.get_importer(path) is None:
        _in_front(os.path.dirname(os.path.realpath(path)))
        main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            content = file.read()  # once: it may be a pipe
        return pkgutil.read_code(io.BytesIO(content)) or compile(content, path, "exec")
    _in_front(path, is_always=True)
    sys.modules.pop("__main__")  # else find_spec finds this command line's
    spec = importlib.util.find_spec("__main__")
    if spec is None:
        raise CommandError(f"there is no __main__ in {program!r}")
    return _code_of(main, spec)


def _in_front(path: str, is_always: bool = False) -> None:
    """Put `path` in the first place of ``sys.path``, as for a script. With ``-P`` or ``-I``, only if `is_always`."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = path
    elif is_always:
        sys.path.insert(0, path)


def _spec_of(name: str) -> ModuleSpec:
    """Return the spec of the module that ``python -m name`` runs. Raises NoProgram if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        package = name.rpartition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{package}.".startswith(f"{error.name}."):
            spec = None
        else:
            raise
    if spec is None:
        raise NoProgram(f"{sys.executable}: No module named {name}")
    return spec if spec.submodule_search_locations is None else _spec_of(f"{name}.__main__")


def _code_of(main: ModuleType, spec: ModuleSpec) -> CodeType:
    """Return the code of a module and set the attributes of `main` for it. Raises CommandError if there is no code."""
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise CommandError(f"{spec.name} has no code to run")
    main.__file__, main.__loader__, main.__spec__, main.__package__ = spec.origin, spec.loader, spec, spec.parent
    vars(main)["__cached__"] = spec.cached
    return code
