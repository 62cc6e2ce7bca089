"""What an interpreter imports first that ``command.program`` has started for a program: it prepares the program.

``site`` imports it by its name. What has led here is taken back: the environment variables, which child processes would inherit,
the folder in ``sys.path``, and this module, whose place the environment's own ``sitecustomize`` gets. Nothing else is imported:
the program finds the modules that it would find without.
"""

import os
import sys

__all__ = ["PYTHONPATH", "STARTED", "Accelerating"]

STARTED = "FASTEXCHANGE_STARTED"
"""The variable with the process and what to do: ``"PID run"`` or ``"PID record FILE"``."""
PYTHONPATH = "FASTEXCHANGE_PYTHONPATH"
"""The variable with what ``PYTHONPATH`` was, if it was set."""

_FOLDER = os.path.dirname(__file__)
_ROOT = os.path.dirname(os.path.dirname(_FOLDER))
_PACKAGE = os.path.basename(_ROOT)


class Accelerating:
    """An import hook that calls ``accelerate()`` as soon as the program has imported Numba.

    Numba reads environment variables at its import, and the program may set them before. If this package imports Numba, because
    the program has imported it, that is when the outermost of its modules is complete: ``accelerate`` may be in that.
    It also finds this package where it lies, which the program's ``sys.path`` may not have. That is all if not `is_accelerating`.
    """

    def __init__(self, is_accelerating: bool = True):
        self._is_accelerating = is_accelerating
        self._loading: list[str] = []

    def find_spec(self, name, path=None, target=None):
        """Find Numba or a module of this package with the other finders, and wrap its loader."""
        if name != "numba" and name.partition(".")[0] != _PACKAGE:
            return None
        places = [os.path.dirname(_ROOT)] if name == _PACKAGE else path
        found = (finder.find_spec(name, places, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if name == "numba" and spec is not None and not spec.submodule_search_locations:  # the program's own numba.py
            return spec
        if self._is_accelerating and spec is not None and spec.loader is not None:
            loader, exec_module = spec.loader, spec.loader.exec_module
            loader.exec_module = lambda module: self._load(loader, exec_module, module)
        return spec

    def _load(self, loader, exec_module, module) -> None:
        vars(loader).pop("exec_module", None)  # removes the wrapper; one loader may have more than one module, and so wrapper
        self._loading.append(module.__name__)
        try:
            exec_module(module)
        finally:
            self._loading.remove(module.__name__)
        if self._is_accelerating and not self._loading and "numba" in sys.modules:
            self._is_accelerating = False
            __import__(_PACKAGE).accelerate()
            sys.meta_path.remove(self)


def _prepare(started: str) -> None:
    before = os.environ.pop(PYTHONPATH, None)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    sys.path[:] = [each for each in sys.path if each != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    process, what, *file = started.split(" ", 2)
    if process != str(os.getpid()):  # a child of what `site` has run before, with the variables still set
        return
    sys.meta_path.insert(0, hook := Accelerating(what == "run"))
    if what == "run" and "numba" in sys.modules:  # `site` has run what imports it
        __import__(_PACKAGE).accelerate()
        sys.meta_path.remove(hook)
    if what == "record":
        import atexit

        names = vars(sys.modules["__main__"])
        atexit.register(_record, os.getpid(), names, names.get("__loader__"), *file)  # registered first: called last


def _record(process: int, names: dict, loader, file: str) -> None:
    has_run = names.get("__loader__") is not loader or sys.argv[:1] == ["-"]  # Python sets it when it has found the program
    if os.getpid() != process or not has_run:  # or it is a forked child
        return
    from importlib import import_module

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))  # a program may have set one that suffices for itself
    import_module(f"{_PACKAGE}.command.record").write_at_exit(file)
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        try:
            exec("raise KeyboardInterrupt")  # Python ends as interrupted if the last code that it compiled from text was
        except KeyboardInterrupt:
            pass


if __name__ == "sitecustomize":
    if STARTED in os.environ:
        _prepare(os.environ.pop(STARTED))
    del sys.modules[__name__]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the environment's; where there is none, `site` expects ImportError
