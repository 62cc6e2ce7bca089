"""What the package says to Python's ``logging``, in the logger ``fastexchange`` at DEBUG: each text once."""

import logging

__all__ = ["is_heard", "say"]

_MOST_TEXTS = 4096
_logger = logging.getLogger("fastexchange")
_said: set[str] = set()


def is_heard() -> bool:
    """Whether anybody listens. Texts that take time are made only then."""
    return _logger.isEnabledFor(logging.DEBUG)


def say(text: str, *parts: object) -> None:
    """Log ``text % parts``, unless it has been logged before."""
    if not is_heard():
        return
    whole = text % parts
    if whole not in _said:
        if len(_said) >= _MOST_TEXTS:
            _said.clear()
        _said.add(whole)
        _logger.debug("%s", whole)
