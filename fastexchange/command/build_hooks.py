"""What the hooks for build backends have in common: their options, the code for a wheel, and the wheel's tag.

The processes that compile import a copy of what the wheel will have, so nothing is written into the source tree.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..interpreter import DISABLED
from . import CommandError
from .ship import checked_levels, make_code

__all__ = ["Options", "code_for_wheel", "copied", "tag_of"]

_TYPES: dict[str, tuple[type, str]] = {
    "package": (str, "the name of a package"), "targets": (list, "a list of modules and of files of `record`"),
    "cpu": (list, "a list of levels"), "strict": (bool, "true or false"),
}  # fmt: skip


class Options(NamedTuple):
    """Of a hook, from pyproject.toml."""

    package: str
    targets: Sequence[str] = ()
    cpu: Sequence[str] = ()
    strict: bool = False

    @classmethod
    def read(cls, table: dict[str, Any], section: str) -> "Options":
        """The options in a table, which is `section` of pyproject.toml. Raises CommandError."""
        for name, value in table.items():
            if name not in _TYPES:
                raise CommandError(f"[{section}] has no option {name!r}; it has {', '.join(_TYPES)}")
            wanted, words = _TYPES[name]
            if type(value) is not wanted or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
                raise CommandError(f"[{section}] {name} = {value!r}: it has to be {words}")
        if "package" not in table:
            raise CommandError(f"[{section}] has no package: name the package whose kernels are compiled")
        return cls(**table)


def code_for_wheel(
    table: dict[str, Any], section: str, root: Path, sources: Path, folder: Path, say: Callable[[str], None]
) -> dict[str, Path]:
    """Make the code for a wheel in a folder. Returns the files, by their paths in the wheel. Raises CommandError.

    `table`: the hook's options, which are `section` of pyproject.toml. `root`: the project's folder. `sources`: a folder with
    what the wheel has, see :func:`copied`. Returns no files if FASTEXCHANGE_DISABLE is set.
    """
    options = Options.read(table, section)
    if DISABLED:
        say("fastexchange: FASTEXCHANGE_DISABLE is set: this wheel gets no machine code")
        return {}
    from ..ground.package_code import FOLDER

    place = options.package.replace(".", "/")
    if not (sources / place / "__init__.py").is_file():
        raise CommandError(f"[{section}] package = {options.package!r}: the wheel has no {place}/__init__.py")
    levels = checked_levels(list(options.cpu), f"[{section}] cpu:")
    targets = [str(root / each) if each.endswith(".json") else each for each in options.targets] or [options.package]
    if old := sorted((sources / place / FOLDER).glob("*.code")):
        raise CommandError(f"the sources have {place}/{FOLDER}/{old[0].name}, of an earlier `precompile --into`: remove it")
    made = make_code(options.package, targets, levels, folder, [str(sources), *sys.path], cwd=sources)
    for each in made:
        say(f"fastexchange: {each}")
    left = [each for each in made if each.why_not]
    if left and options.strict:
        raise CommandError(f"[{section}] strict = true: {len(left)} left out, the first is {left[0]}")
    if not any(each.sizes for each in made):
        return {}
    return {f"{place}/{FOLDER}/{path.name}": path for path in sorted(folder.glob("*.code"))}


def copied(sources: Path, files: Iterable[tuple[str, str]], name: str, version: str) -> None:
    """Copy what a wheel will have into a folder, where it can be imported. `files`: of each its path, and that in the wheel.

    A package may ask for its version while it is imported, so its distribution has metadata there.
    """
    for path, place in files:
        target = sources / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    info = sources / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def tag_of(files: Iterable[str]) -> str:
    """The tag of a wheel that has these files of code, and else Python's: what they fit. "" where the backend knows it best.

    A wheel with code for two processors has both in its tag. The code is no shared library, so it needs no version of the C
    library: the oldest that pip and Numba know is named. Indexes refuse wheels for plain "linux".
    """
    abi = str(sysconfig.get_config_var("SOABI"))
    if not abi.endswith(("-linux-gnu", "-linux-musl")):
        return ""
    try:
        is_glibc = bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        is_glibc = False
    libc = "manylinux_2_17" if is_glibc else "musllinux_1_1"
    machines = {Path(each).name.split(".")[0].split("-")[2] for each in files}
    platforms = ".".join(sorted(f"{libc}_{machine}" for machine in machines))
    version = abi.split("-")[1]  # "311", "311d" of a debug build, "314t" without the GIL
    return f"cp{version.rstrip('dt')}-cp{version}-{platforms}"
