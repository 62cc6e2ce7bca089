"""Figures as text for reports, tables and plots. Values that are not measurable are not shown as numbers."""

from collections.abc import Callable

from .timing import Samples

__all__ = ["figure", "ratio", "spread", "time", "time_text"]


def figure(samples: Samples, form: Callable[[float], str], signed: bool = False) -> str:
    """The median as `form` writes it. If it means nothing (``timing.is_measurable``), a text that says so, with the spread."""
    if samples.is_measurable(signed):
        return form(samples.median)
    return f"not measurable here (spread {spread(samples, form)})"


def spread(samples: Samples, form: Callable[[float], str] = "{:.1f}".format) -> str:
    """The interquartile range as `form` writes it; none for a single round."""
    return form(samples.spread) if samples.rounds > 1 else "not measurable"


def time(samples: Samples) -> str:
    """A time with a unit that fits: ``86.7 ns``."""
    return figure(samples, time_text)


def ratio(samples: Samples) -> str:
    """A ratio, ``2.17``."""
    return figure(samples, "{:.2f}".format)


def time_text(ns: float) -> str:
    """Nanoseconds with a unit that fits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"
