"""Which of a test's parameters wait for the night (``.ci/nightly``)."""

from collections.abc import Iterable

import pytest


def at_night(values: Iterable, *chosen) -> list:
    """The values as parameters. All but those chosen are ``nightly``."""
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.nightly) for each in values]
