"""What several files here need, and takes long to make."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_copies import build

from fastexchange.ground.disk_cache import CacheFolder


@pytest.fixture
def folder(tmp_path) -> Iterator[CacheFolder]:
    """Where entries are kept. In the end nothing there is open any more, where the system tells."""
    yield CacheFolder(tmp_path / "cache")
    opened = [os.readlink(each) for each in Path("/proc/self/fd").glob("*") if each.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path / "cache"))]


@pytest.fixture(scope="session")
def with_native_code(tmp_path_factory) -> Path:
    """A folder with this package, and its machine code in it, which the first of several processes makes. Tests only read it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.getbasetemp()
    root = folder.parent / f"native-{run}" if run else folder / "native"
    root.mkdir(exist_ok=True)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "made").exists():
            build(root)
            (root / "made").touch()
    return root
