"""The build hook for hatchling. Its options, ``build_hooks.Options``: ``[tool.hatch.build.targets.wheel.hooks.fastexchange]``."""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from . import CommandError
from .build_hooks import code_for_wheel, copied, tag_of

__all__ = ["MachineCodeHook", "hatch_register_build_hook"]

_SECTION = "tool.hatch.build.targets.wheel.hooks.fastexchange"
_HATCHS_OWN = "dependencies", "enable-by-default", "require-runtime-dependencies", "require-runtime-features"
"""Options of every hook, which hatchling reads."""


class MachineCodeHook(BuildHookInterface):
    """Adds the machine code of a package's kernels to its wheel. Editable installations have none: their sources change."""

    PLUGIN_NAME = "fastexchange"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the code, and include it from a temporary folder, which lasts until the wheel is written."""
        if self.target_name != "wheel" or version != "standard":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="fastexchange-")
        sources, made = Path(self._folder.name, "sources"), Path(self._folder.name, "made")
        made.mkdir()
        with self.build_config.set_build_data(build_data):  # with what other hooks add
            files = [(each.path, each.distribution_path) for each in self.build_config.builder.recurse_included_files()]
        copied(sources, files, self.metadata.core.name, self.metadata.version)
        options = {name: value for name, value in self.config.items() if name not in _HATCHS_OWN}
        try:
            code = code_for_wheel(options, _SECTION, Path(self.root), sources, made, self.app.display_info)
        except CommandError as error:
            self.app.abort(f"fastexchange: {error}")
            return
        build_data["force_include"].update({str(path): place for place, path in code.items()})
        if code and build_data["pure_python"] and "tag" not in build_data:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            if tag := tag_of(code):
                build_data["tag"] = tag

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if self.target_name == "wheel" and version == "standard":
            self._folder.cleanup()


@hookimpl
def hatch_register_build_hook():
    """Called by hatchling."""
    return MachineCodeHook
