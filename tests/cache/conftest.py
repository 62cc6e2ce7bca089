"""What several files here need, and takes long to make."""

import os
from pathlib import Path

import pytest
from native_copies import built_once

from fastexchange.ground.disk_cache import CacheFolder


@pytest.fixture
def folder(tmp_path) -> CacheFolder:
    """Where entries are kept."""
    return CacheFolder(tmp_path / "cache")


@pytest.fixture(scope="session")
def with_native_code(tmp_path_factory) -> Path:
    """A folder with this package, and its machine code in it. Tests only read it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.getbasetemp()
    return built_once(folder.parent / f"native-{run}" if run else folder / "native")
