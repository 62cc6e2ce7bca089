"""A progress bar on standard error, by tqdm where it is installed; silent for what is quick, and where nobody looks."""

import importlib
import importlib.util
import sys
from contextlib import contextmanager

__all__ = ["progress_bar"]

_DELAY = 1.0  # seconds


class _Silent:
    """No progress bar."""

    def say(self, what: str) -> None:
        """What is being done."""

    def step(self, done: int, of: int) -> None:
        """`done` of so many rounds are done."""


class _Bar(_Silent):
    def __init__(self, bar, title: str):
        self._bar, self._title = bar, title

    def say(self, what: str) -> None:
        self._bar.set_description(f"{self._title}: {what}")

    def step(self, done: int, of: int) -> None:
        self._bar.total = of
        self._bar.update(done - self._bar.n)


def _is_in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def progress_bar(title: str):
    """Something with ``say(what)`` and ``step(done, of)``."""
    is_seen = sys.stderr is not None and (_is_in_notebook() or sys.stderr.isatty())
    if not is_seen or importlib.util.find_spec("tqdm") is None:
        yield _Silent()
        return
    tqdm = importlib.import_module("tqdm").tqdm
    with tqdm(desc=title, delay=_DELAY, leave=False, unit="round") as bar:
        yield _Bar(bar, title)
