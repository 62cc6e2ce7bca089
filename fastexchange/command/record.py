"""``record -o FILE PROGRAM``: run a program, and write down the signatures that its kernels met, for ``precompile FILE``."""

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ground.safe_repr import one_line
from . import CommandError
from .program import NoProgram, run_here, start_anew

__all__ = ["kernels_in", "run", "write_at_exit"]


def run(options: argparse.Namespace) -> int:
    """Run the program as ``__main__``, and write the file when it ends, also with an exception.

    Until then the file is as it was. Raises CommandError before the program runs, if the file cannot be written. Returns only if
    this process runs the program: else ``started/sitecustomize.py`` calls :func:`write_at_exit`.
    """
    if options.output.suffix != ".json":
        raise CommandError(f"{options.output} is not a name for a file of signatures: let it end in .json")
    file, process = options.output.resolve(), os.getpid()
    with _replaced(file) as temporary:
        temporary.unlink()
    start_anew(options, f"record {file}")
    try:
        run_here(options)
    except (CommandError, NoProgram):
        raise
    except BaseException:
        if os.getpid() == process:  # not in a forked child that leaves the program by an exception
            _write(file)
        raise
    if os.getpid() == process:
        _write(file)
    return 0


def write_at_exit(file: str) -> None:
    """Write what this process has met, while the interpreter ends: what prevents it is said, and the exit code the program's."""
    try:
        _write(Path(file))
    except CommandError as error:
        print(f"python -m fastexchange record: {error}", file=sys.stderr)


def _count(signatures: int) -> str:
    return f"{signatures} signature{'s' * (signatures != 1)}"


@contextlib.contextmanager
def _replaced(file: Path) -> Iterator[Path]:
    """Make a file beside `file` that takes its place, if it is still there at the end. Raises CommandError."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        try:
            if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            temporary.touch()
            yield temporary
            if temporary.exists():
                os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from error


def _write(file: Path) -> None:
    """Write what the kernels of this process have met."""
    from .. import __version__

    kernels, left_out = _recorded()
    content = {"fastexchange": __version__, "kernels": kernels, "left_out": left_out}
    with _replaced(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    met = f"{_count(sum(map(len, kernels.values())))} of {len(kernels)} kernel{'s' * (len(kernels) != 1)}"
    print(f"{file}: {met}, as this process met them; what its child processes met is not recorded", file=sys.stderr)
    for name, why in left_out.items():
        print(f"  left out: {name}: {why}", file=sys.stderr)


def kernels_in(file: Path) -> dict[str, list[tuple]]:
    """Return the content of a file: by ``MODULE:OBJECT``, the argument types of each signature. Raises CommandError.

    Nothing in it is evaluated.
    """
    from ..calls.signature_text import types_in

    try:
        kernels = json.loads(file.read_text("utf-8"))["kernels"]
        modules = [module for module, _ in (of.split(":") for of in kernels)]
        if not any(module.endswith(".py") for module in modules):  # a file, anywhere
            return {of: [types_in(text) for text in given] for of, given in kernels.items()}
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CommandError(f"{file} is not a file of `python -m fastexchange record`: {one_line(error)}") from error
    raise CommandError(f"{file} is not a file of `python -m fastexchange record`: it names a file, not a module")


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
