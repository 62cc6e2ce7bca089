"""A progress bar on standard error, by tqdm if it is installed. None for quick measurements, and without a terminal."""

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from typing import Any

__all__ = ["progress_bar"]

_DELAY = 1.0  # seconds


class _Silent:
    """No progress bar."""

    def step(self, done: int, of: int) -> None:
        """Show that `done` of `of` rounds are done."""


class _Bar(_Silent):
    """A bar that is drawn when the first round has taken a while."""

    def __init__(self, tqdm, title: str):
        self._tqdm, self._title = tqdm, title
        self.bar: Any = None

    def step(self, done: int, of: int) -> None:
        if self.bar is None:
            self.bar = self._tqdm(desc=self._title, total=of, delay=_DELAY, leave=False, unit="round")
        self.bar.update(done - self.bar.n)


def _is_in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def _is_seen() -> bool:
    try:
        return _is_in_notebook() or sys.stderr.isatty()
    except Exception:  # no standard error, or a closed or replaced one
        return False


@contextmanager
def progress_bar(title: str):
    """Context manager: an object with ``step(done, of)``."""
    if not _is_seen() or importlib.util.find_spec("tqdm") is None:
        yield _Silent()
        return
    made = _Bar(importlib.import_module("tqdm").tqdm, title)
    try:
        yield made
    finally:
        if made.bar is not None:
            made.bar.close()
