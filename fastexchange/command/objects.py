"""Modules and objects that are named on the command line: ``MODULE:OBJECT``, ``FILE.py:OBJECT``."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..ground.safe_repr import one_line
from . import CommandError

__all__ = ["find", "imported", "split"]


def split(what: str) -> tuple[str, str]:
    """Return the module, or the file, and the dotted name of the object in it; "" for none."""
    name, separator, dotted = what.rpartition(":")
    return (name, dotted) if separator else (what, "")


def imported(given: str) -> ModuleType:
    """Import a module by its name, or by its file: then the file's folder is put into ``sys.path``, as for a script."""
    try:
        if not given.endswith(".py"):
            return importlib.import_module(given)
        path = Path(given)
        if not path.is_file():
            raise CommandError(f"there is no file {given}")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem if path.stem not in sys.modules else f"imported_{path.stem}"  # numpy.py must not be numpy
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{given} cannot be imported: {one_line(error)}") from error


def find(module: ModuleType, dotted: str, what: str, is_kernel: bool = True) -> Any:
    """Return the object with this dotted name in the module. `is_kernel`: the message for a wrong name lists the kernels."""
    found: Any = module
    for number, name in enumerate(names := dotted.split("."), 1):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            owner, instead = ".".join(names[: number - 1]), _instead(module) if is_kernel else ""
            raise CommandError(f"{what} has no {name!r}{' in ' + owner if owner else ''}{instead}") from error
        except Exception as error:
            raise CommandError(f"{what}: {dotted} cannot be read: {one_line(error)}") from error
    return found


def _instead(module: ModuleType) -> str:
    from ..calls.kernel import Kernel

    kernels = [name for name, value in list(vars(module).items()) if issubclass(type(value), Kernel)]
    return f"; its kernels: {', '.join(sorted(kernels))}" if kernels else "; it has no kernels of fast_args"
