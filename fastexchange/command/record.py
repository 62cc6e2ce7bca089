"""``record -o FILE PROGRAM``: run a program, and write down the signatures that its kernels met, for ``precompile FILE``."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import CommandError
from .run import run_program

__all__ = ["kernels_in", "run"]


def run(options: argparse.Namespace) -> int:
    """Run the program in this process as ``__main__``, and write the file when it ends, also with an exception.

    Raises CommandError for a file that cannot be written, before the program runs.
    """
    if options.output.suffix != ".json":
        raise CommandError(f"{options.output} is not a name for a file of signatures: let it end in .json")
    file, process = options.output.absolute(), os.getpid()
    _write(file, {}, {})
    try:
        run_program(options)
    finally:
        if os.getpid() == process:  # not in a forked child that leaves the program by an exception
            kernels, left_out = _recorded()
            _write(file, kernels, left_out)
            print(f"{file}: {_count(sum(map(len, kernels.values())))} of {len(kernels)} kernels", file=sys.stderr)
            for name, why in left_out.items():
                print(f"  left out: {name}: {why}", file=sys.stderr)
    return 0


def _count(signatures: int) -> str:
    return f"{signatures} signature{'s' * (signatures != 1)}"


def _write(file: Path, kernels: dict[str, list[str]], left_out: dict[str, str]) -> None:
    from .. import __version__

    content = {"fastexchange": __version__, "kernels": kernels, "left_out": left_out}
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from error


def kernels_in(file: Path) -> dict[str, list[str]]:
    """Return the content of a file: by ``MODULE:OBJECT``, signatures. Raises CommandError."""
    try:
        kernels = json.loads(file.read_text("utf-8"))["kernels"]
        if all(type(given) is list and all(type(each) is str for each in given) for given in kernels.values()):
            return kernels
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise CommandError(f"{file} is not a file of `python -m fastexchange record`")


def _recorded() -> tuple[dict[str, list[str]], dict[str, str]]:
    """The signatures of the kernels that can be imported by their names, and by kernel why others are left out."""
    if "fastexchange.calls.kernel" not in sys.modules:
        return {}, {}
    import gc

    from ..calls.kernel import FastKernel
    from ..calls.signature_text import text_of

    kernels: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    gc.unfreeze()  # the program may have hidden its objects from get_objects()
    for kernel in [each for each in gc.get_objects() if issubclass(type(each), FastKernel) and each.overloads]:
        name = f"{kernel.py_func.__module__}:{kernel.py_func.__qualname__}"
        if why := _why_not(kernel):
            left_out[name] = why
            continue
        for signature in kernel.signatures:
            if (text := text_of(signature)) is None:
                left_out[f"{name}({', '.join(map(str, signature))})"] = "Numba reads no such type from text"
            else:
                kernels.setdefault(name, []).append(text)
    return {name: sorted(kernels[name]) for name in sorted(kernels)}, dict(sorted(left_out.items()))


def _why_not(kernel) -> str:
    """Why a kernel cannot be imported by its name; "" if it can."""
    module, name = kernel.py_func.__module__, kernel.py_func.__qualname__
    if module == "__main__":
        return "it is defined in the program itself, whose code is not kept for another module: define it in a module"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return "" if found is kernel else "its module has no such name: it was made by a function, or is called otherwise"
