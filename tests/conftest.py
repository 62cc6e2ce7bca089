"""Fixtures that the whole suite shares."""

import pytest
from frameworks import FRAMEWORKS, Framework


@pytest.fixture(params=FRAMEWORKS, ids=str)
def framework(request) -> Framework:
    """Each framework installed, and each kind of producer made for the tests."""
    return request.param
