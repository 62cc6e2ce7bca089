"""``python -m fastexchange run``: run an unchanged program with its jitted functions made kernels."""

import argparse
import sys

from .program import run_here, start_anew
from .started.sitecustomize import Accelerating

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Run the program as ``__main__``, with its jitted functions made kernels. Returns only if this process runs it."""
    start_anew(options, "run")
    if "numba" in sys.modules:
        from .. import accelerate

        accelerate()
    else:
        sys.meta_path.insert(0, Accelerating())
    run_here(options)
    return 0
