"""The build hook for setuptools. Its options, ``build_hooks.Options``: ``[tool.fastexchange]`` in pyproject.toml."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["add_machine_code"]

_SECTION = "tool.fastexchange"


def add_machine_code(distribution: Any) -> None:
    """Let ``bdist_wheel`` add the machine code of a package's kernels. Called by setuptools for each distribution.

    Does nothing without the options. Editable installations have no code: their sources change.
    """
    file = Path(distribution.src_root or os.curdir, "pyproject.toml")
    if not file.is_file() or f"[{_SECTION}" not in file.read_text("utf-8", "replace"):
        return  # nearly all builds: nothing is imported for them, and an older setuptools does
    try:
        from setuptools.config.pyprojecttoml import load_file
        from setuptools.errors import SetupError
    except ImportError:
        raise RuntimeError(f"[{_SECTION}] in {file}: it needs setuptools 70.1 or newer") from None
    tools = load_file(file).get("tool", {})
    if "fastexchange" in tools and not hasattr(distribution.cmdclass.get("bdist_wheel"), "fastexchange"):
        if "cmdclass" in tools.get("setuptools", {}):
            raise SetupError(f"[tool.setuptools] cmdclass takes the place of what [{_SECTION}] adds: give it in setup.py")
        made = _with_machine_code(distribution.get_command_class("bdist_wheel"), tools["fastexchange"], file.parent)
        distribution.cmdclass["bdist_wheel"] = made


def _with_machine_code(command: Any, options: dict[str, Any], root: Path) -> type:
    """A command that makes a wheel, with these options."""
    from setuptools.errors import SetupError

    from . import CommandError
    from .build_hooks import code_for_wheel, copied, tag_of

    class bdist_wheel(command):
        fastexchange = options
        _has_code, _tag = False, ""

        def run_command(self, command: str) -> None:
            if command == "install":  # what has been built goes into the wheel
                self._add_code(Path(self.get_finalized_command("build").build_lib))
            super().run_command(command)

        def _add_code(self, build_lib: Path) -> None:
            from ..ground.package_code import FOLDER

            for old in build_lib.glob(f"**/{FOLDER}/*.code"):  # of an earlier build in the same folder
                old.unlink()
            with tempfile.TemporaryDirectory(prefix="fastexchange-") as folder:
                sources, made = Path(folder, "sources"), Path(folder, "made")
                made.mkdir()
                files = [(str(each), str(each.relative_to(build_lib))) for each in build_lib.glob("**/*") if each.is_file()]
                copied(sources, files, self.distribution.get_name(), self.distribution.get_version())
                try:
                    code = code_for_wheel(self.fastexchange, _SECTION, root.resolve(), sources, made, self._say)
                except CommandError as error:
                    raise SetupError(f"fastexchange: {error}") from error
                for place, path in code.items():
                    (build_lib / place).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, build_lib / place)
            self._has_code = bool(code)
            self._tag = tag_of(code) if code and self.root_is_pure else ""

        def _say(self, line: str) -> None:
            self.announce(line, logging.INFO)

        def get_tag(self) -> tuple[str, str, str]:
            if self._has_code:
                self.root_is_pure = False
            python, abi, platform = self._tag.split("-") if self._tag else super().get_tag()
            return python, abi, platform

    return bdist_wheel
