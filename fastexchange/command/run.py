"""``python -m fastexchange run``: a program whose jitted functions are kernels, not one of its lines changed."""

import argparse
import os
import runpy
import sys

from . import CommandError


def run(options: argparse.Namespace) -> int:
    """Run the program in this process, as its ``__main__``."""
    from .. import accelerate

    program = options.program
    if not options.is_module and not os.path.exists(program):
        raise CommandError(f"{program!r} is no file; a module is run by -m {program}")
    accelerate()
    sys.argv[:] = [program, *options.arguments]
    if options.is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return 0
    if os.path.isfile(program):
        sys.path[0] = os.path.dirname(os.path.realpath(program))
    runpy.run_path(program, run_name="__main__")
    return 0
