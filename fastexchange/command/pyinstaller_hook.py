"""The entry point by which PyInstaller finds its hook for this package."""

from pathlib import Path

__all__ = ["folders"]


def folders() -> list[str]:
    """The folders of hooks. Called by PyInstaller."""
    return [str(Path(__file__).with_name("pyinstaller"))]
