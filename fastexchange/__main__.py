"""``python -m fastexchange``: the command line. Here it is parsed, and exit codes are made; ``command/`` does what is asked.

Without a subcommand it is ``bench`` that runs.
"""

import argparse
import io
import math
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from . import __version__
from .command import CommandError
from .measuring.tables import progress

_EXIT_CODES = """\
exit codes:
  0    done
  1    doctor: something is wrong; compare --strict: something got slower; output cut off by a closed pipe
  2    the arguments, a file or an object named in them are no good; a line on stderr says why
  130  interrupted by Ctrl-C"""
_BENCH = """\
examples:
  python -m fastexchange                       the table, in about ten seconds
  python -m fastexchange bench --quick         the same with fewer rounds: noisier
  python -m fastexchange bench --json new.json also write every sample, for compare"""
_DOCTOR = """\
Every line is ok, slow (it works, by a slower way), wrong, unknown, or - (nothing to judge).
Frameworks and native code are tried in processes of their own: one that crashes is a line, too.

wrong  a package that cannot be imported, or is older than this package's metadata ask for;
       an interpreter that they exclude; a call that raises, crashes or gives a wrong result;
       a tensor that has to be refused and is not
slow   a memory layout that could not be verified; a type that goes a slower way than it can;
       a disk cache that cannot be written; settings of Numba's that make kernels slower
unknown  what was not done in time, on a busy machine, was killed from outside, or found no
       memory, disk or process: run doctor again
-      what is not installed; CUDA, where there is no device

examples:
  python -m fastexchange doctor           what is installed, which way types go, what is slow
  python -m fastexchange doctor --json    {"lines": [...], "verdict": "ok"}; or slow, unknown, wrong

exit code 1 when a line says wrong, else 0"""
_EXPLAIN = """\
examples:
  python -m fastexchange explain kernels.softmax:softmax
  python -m fastexchange explain train.py:step --args "np.ones(3), 2.0, out=np.empty(3)"
  python -m fastexchange explain numpy:ndarray

The module is imported, so its code runs. --args is Python, evaluated with np (NumPy), torch
(PyTorch, if installed) and the module's own names. The call is explained, not made.

exit code 0; 2 for what cannot be found, imported or explained"""
_COMPARE = """\
A row has moved beyond noise when it has, in the same direction, by each reading there is:

drift out     new/old of its median, divided by the drift: the median new/old of the yardsticks,
              which are rows of other code (C, Numba's own dispatcher, tvm-ffi ...). With fewer
              than three of those nothing is taken out.
to reference  new/old of its ratio, within a run, to its reference row, if that is a yardstick.

It has to move by more than its noise, which is the largest of
  --threshold;
  what the same call timed twice (rows control/*/a and b) differed by, in either file;
  what nine of ten yardsticks kept within, once the drift is out;
  the mean of its own interquartile ranges, relative to its medians, in the two files.
This is for two runs on one machine; a warning says what differs.

examples:
  python -m fastexchange bench --json old.json       ... then change something ...
  python -m fastexchange bench --json new.json
  python -m fastexchange compare old.json new.json
  python -m fastexchange compare --strict perf/results/OLD.json perf/results/NEW.json

exit code 0; with --strict 1 when a row that is no yardstick and no control got slower beyond
noise; 2 for files that are no results, or have no row in common"""


_RUN = """\
examples:
  python -m fastexchange run train.py --epochs 3
  python -m fastexchange run -m pytest tests/

exit code: the program's"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastexchange",
        description="Tensors straight into Numba kernels. Without a command: bench.",
        epilog=f"{_BENCH}\n  python -m fastexchange COMMAND --help         more about one\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastexchange {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, dest="command")

    def add(name: str, line: str, description: str, epilog: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=line, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.add_argument("--traceback", action="store_true", help="after an error, also show where it came from")
        return made

    bench = add(
        "bench",
        "print what a call costs per argument on this machine, by this package and by the alternatives",
        "Compiles a kernel and prints what a call with three tensors costs on this machine.",
        _BENCH,
    )
    bench.add_argument("--quick", action="store_true", help="fewer rounds: two seconds, noisier")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")

    doctor = add(
        "doctor",
        "look whether all is well with the installation, and say what is slow or wrong and what to do",
        "Looks at interpreter, packages, native code, frameworks, disk cache and environment.",
        _DOCTOR,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--timeout", type=_seconds, default=180.0, metavar="SECONDS", help="of each process that tries something; %(default)g"
    )

    explain = add(
        "explain",
        "describe a kernel, the call of a kernel, or the way an object or a type takes into kernels",
        "Imports a module and describes an object in it: a kernel, a bound launch, a type, or an argument.",
        _EXPLAIN,
    )
    explain.add_argument("what", metavar="MODULE:OBJECT", help="a module, or a file that ends in .py, and a dotted name in it")
    explain.add_argument("--args", metavar="ARGUMENTS", help="of a kernel: explain the call with these arguments")

    run = add(
        "run",
        "run a program with all of its jitted functions made kernels",
        "Calls fastexchange.accelerate() and then runs the program, as `python PROGRAM` or `python -m MODULE` would.",
        _RUN,
    )
    run.add_argument("-m", action="store_true", dest="is_module", help="PROGRAM is a module, as for python -m")
    run.add_argument("program", metavar="PROGRAM", help="a file, a folder or a zip file with __main__.py, or with -m a module")
    run.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="of the program: its sys.argv[1:]")

    compare = add(
        "compare",
        "compare two result files row by row, and say which rows moved beyond noise",
        "Compares two files written by `bench --json` or by `perf/run.py --json`.",
        _COMPARE,
    )
    compare.add_argument("old", type=Path, metavar="OLD", help="the result file to compare with")
    compare.add_argument("new", type=Path, metavar="NEW", help="the result file to judge")
    compare.add_argument("--strict", action="store_true", help="exit code 1 when a row got slower beyond noise")
    compare.add_argument(
        "--threshold", type=_percent, default=5.0, metavar="PERCENT", help="what is noise in any case (default: %(default)g)"
    )
    return parser


def _number(text: str) -> float:
    """The number that `text` is, NaN for none, which lies between no limits."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _percent(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to 1000")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _without_those_of_a_program(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments of ``run`` up to the program, and the program's own, which are not looked at: not for ``--`` either."""
    if arguments[0] != "run":
        return arguments, None
    given = iter(range(1, len(arguments)))
    for at in given:
        if arguments[at].startswith("-m") and len(arguments[at]) > 2:  # as Python has it
            return ["run", *arguments[1:at], "-m", arguments[at][2:]], arguments[at + 1 :]
        if arguments[at] == "--" and at + 1 < len(arguments):
            at = next(given)
        elif arguments[at].startswith("-") and arguments[at] != "-":
            continue
        return arguments[: at + 1], arguments[at + 1 :]
    return arguments, None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; bad arguments exit with 2, as argparse does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["bench", *arguments]
    arguments, of_program = _without_those_of_a_program(arguments)
    options = _parser().parse_args(arguments)
    if of_program is not None:
        options.arguments = of_program
    # No ± in its encoding is no reason to lose what was measured.
    if options.command != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        return import_module(f".command.{options.command}", __package__).run(options)
    except CommandError as error:
        progress("")
        if options.traceback:
            traceback.print_exception(error)
        print(f"python -m fastexchange {options.command}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError) as error:
        if options.command == "run":  # the program's own
            raise
        progress("")
        if isinstance(error, KeyboardInterrupt):
            return 130
        # `| head` has read enough; the interpreter's last flush must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    exit_code = main()
    if exit_code == 130:  # interrupted amid an import or a compilation, others' threads may not survive an orderly end
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
