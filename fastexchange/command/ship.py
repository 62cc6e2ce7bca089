"""``precompile … --into PACKAGE``: the machine code of a package's kernels, for its wheel. Builds call :func:`make_code`."""

import concurrent.futures
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from . import CommandError
from .make_code import LEVELS_HERE, levels_by_process, settings_for

__all__ = ["DEFAULT_LEVELS", "Made", "make_code", "package_and_folder", "replace_code", "run_into"]

DEFAULT_LEVELS = [level for level in LEVELS_HERE if level != "x86-64"]
"""What the world's processors have, as far as code can be made here."""


class Made(NamedTuple):
    """One line of what was made."""

    name: str
    """Of the kernel, ``"mypackage.kernels:saxpy"``."""
    signature: str
    sizes: dict[str, int]
    """By level, the bytes of its code."""
    why_not: dict[str, str]
    """By level, why there is no code."""

    def __str__(self):
        parts = []
        if self.sizes:
            parts.append(", ".join(f"{level} {size}" for level, size in self.sizes.items()) + " bytes")
        for why in dict.fromkeys(self.why_not.values()):
            levels = [level for level, its in self.why_not.items() if its == why]
            whom = f" for {', '.join(levels)}" if self.sizes else ""
            parts.append(f"not shipped{whom}: {why}")
        return f"{self.name}{f'({self.signature})' if self.signature else ''}: {'; '.join(parts)}"


def run_into(options) -> int:
    """``precompile TARGETS --into PACKAGE``. Returns 1 with ``--strict`` if a kernel's code is left out."""
    levels = checked_levels(options.cpu)
    package, folder = package_and_folder(options.into)
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{folder} cannot be written")
    with tempfile.TemporaryDirectory() as made_in:
        root = folder.parents[package.count(".")]  # first: another package of this name may be installed
        made = make_code(package, options.targets or [package], levels, Path(made_in), [str(root), *sys.path])
        for each in made:
            print(each)
        written = replace_code(Path(made_in), folder)
    count = sum(bool(each.sizes) for each in made)
    for path in written:
        print(f"{path}: {path.stat().st_size} bytes")
    left = sum(bool(each.why_not) for each in made)
    print(f"{package}: the code of {count} signature{'s' * (count != 1)}{f'; {left} left out' if left else ''}")
    return int(bool(left) and options.strict)


def checked_levels(wanted: list[str] | None, option: str = "--cpu") -> list[str]:
    """The levels that an option names. Raises CommandError."""
    levels = [each for text in wanted for each in text.split(",")] if wanted else DEFAULT_LEVELS
    for level in levels:
        if level not in LEVELS_HERE:
            raise CommandError(f"{option} {level or repr(level)}: code can be made here for {', '.join(LEVELS_HERE)}")
    return list(dict.fromkeys(levels))


def package_and_folder(into: str) -> tuple[str, Path]:
    """The name and the folder of the package that ``--into`` names, by its name or its folder. Raises CommandError."""
    folder = Path(into)
    if (folder / "__init__.py").is_file():
        folder = folder.resolve()
        names = [folder.name]
        for parent in folder.parents:
            if not (parent / "__init__.py").is_file():
                break
            names.insert(0, parent.name)
        return ".".join(names), folder
    try:
        spec = importlib.util.find_spec(into)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise CommandError(f"--into {into}: there is no package of this name, and no such folder with an __init__.py")
    if not spec.submodule_search_locations:
        raise CommandError(f"--into {into}: it is a module, not a package: there is no folder for its code")
    return into, Path(next(iter(spec.submodule_search_locations)))


def make_code(
    package: str, targets: list[str], levels: list[str], folder: Path, path: list[str], cwd: Path | None = None
) -> list[Made]:
    """Make the code files of a package in a folder. `path`: ``sys.path`` of the processes that import it, behind their `cwd`.

    Returns a line for each signature. Raises CommandError if nothing can be made.
    """
    from ..ground.cfunction import code_cache
    from ..ground.shipped import shipped_code

    own_targets = [os.path.abspath(each) if each.partition(":")[0].endswith((".py", ".json")) else each for each in targets]
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as cache:

        def make(index: int, group: list[str], targets: list[str]) -> subprocess.CompletedProcess:
            asked: dict[str, object] = {"levels": group, "folder": str(folder), "package": package, "targets": targets}
            asked["native"] = code_cache.directory
            environment = settings_for(group, f"{cache}/{index}")
            environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(each or ".") for each in path)
            Path(cache, str(index)).mkdir(exist_ok=True)
            command = [sys.executable, "-m", f"{__package__}.make_code", json.dumps(asked)]
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            return subprocess.run(command, env=environment, cwd=cwd, **quiet)

        groups = levels_by_process(levels)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            if shipped_code().why_not:
                _check([["this machine"]], [make(0, [], [])], "native code", "run `python -m fastexchange precompile --self`")
            done = list(pool.map(make, range(len(groups)), groups, itertools.repeat(own_targets)))
            _check(groups, done, "code", "does importing it, or an example call, run such code?")
    lines: dict[tuple[str, str], Made] = {}
    for level in levels:
        for name, signature, size, why in json.loads(Path(folder, f"{level}.json").read_text()):
            line = lines.setdefault((name, signature), Made(name, signature, {}, {}))
            if why:
                line.why_not[level] = why
            else:
                line.sizes[level] = size
    if not any(line.sizes for line in lines.values()) and not any(line.why_not for line in lines.values()):
        raise CommandError(
            f"{', '.join(targets)}: no kernel of {package} was compiled. Give {package} a function __precompile__() that returns "
            "(kernel, example arguments …) for each, declare signatures, or name the modules that do"
        )
    return list(lines.values())


def _check(groups: list[list[str]], all_done: list[subprocess.CompletedProcess], what: str, advice: str) -> None:
    """Raise CommandError for a process that failed. `advice`: for one that this processor has ended."""
    for group, done in zip(groups, all_done, strict=True):
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if done.returncode == 2:
            raise CommandError(said[-1])
        if done.returncode:
            why = said[-1] if done.returncode > 0 else f"signal {-done.returncode}; {advice}"
            raise CommandError(f"the process that made {what} for {', '.join(group)} has ended: {why}")


def replace_code(made_in: Path, folder: Path) -> list[Path]:
    """Put the code files of a folder into the package in another, in place of those for the same Pythons. Raises CommandError.

    Those for other Pythons stay.
    """
    from ..ground.package_code import FOLDER

    new = sorted(made_in.glob("*.code"))
    own = {path.name.split(".")[0] for path in new}
    target = folder / FOLDER
    try:
        target.mkdir(exist_ok=True)
        for path in new:  # all, before one is replaced
            shutil.copy(path, target / f".{path.name}.{os.getpid()}.tmp")
        for path in target.glob("*.code"):
            if path.name.split(".")[0] in own and path.name not in {each.name for each in new}:
                path.unlink()
        for path in new:
            os.replace(target / f".{path.name}.{os.getpid()}.tmp", target / path.name)
    except OSError as error:
        for path in target.glob(f".*.{os.getpid()}.tmp"):
            path.unlink(missing_ok=True)
        raise CommandError(f"{target} cannot be written: {error}") from error
    return [target / path.name for path in new]
