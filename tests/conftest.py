"""Fixtures that the whole suite shares."""

import gc

import pytest
from frameworks import FRAMEWORKS, Framework


@pytest.fixture(params=FRAMEWORKS, ids=str)
def framework(request) -> Framework:
    """Each framework installed, and each kind of producer made for the tests."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Garbage collection looks at what a module's tests make, not at all that frameworks and compiler made before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
