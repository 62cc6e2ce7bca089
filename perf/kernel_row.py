"""One row of ``perf/kernels.py``: a kernel and the operator that it is compared with, on the same data."""

from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """Both callables do the same work on the same data, and both or neither allocate what they write."""

    kernel: str
    """The kernel's name, "softmax"."""
    data: str
    """"float32 (8, 64)"."""
    operator: str
    """What it is compared with, "torch.softmax"."""
    ours: Callable[[], object]
    theirs: Callable[[], object]
    must_be: float | None = None
    """The ratio that is promised: how many times as long the operator takes, at least."""
