"""``python -m fastexchange``: parse the command line, run a subcommand of ``command/`` and return the exit code.

Without a subcommand ``bench`` runs.
"""

import argparse
import contextlib
import io
import math
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from . import interpreter as _interpreter  # noqa: F401  (first: it refuses a package of another project)
from .command import CommandError
from .measuring.tables import progress
from .version import __version__

_EXIT_CODES = """\
exit codes:
  0    done
  1    doctor: something is wrong; compare --strict: something got slower; precompile: something is
       not compiled, or not kept; output cut off by a closed pipe
  2    wrong arguments, or a file or object in them cannot be used; stderr says why
  130  interrupted by Ctrl-C"""
_BENCH = """\
examples:
  python -m fastexchange                       the table, in about ten seconds
  python -m fastexchange bench --quick         the same with fewer rounds: noisier
  python -m fastexchange bench --json new.json also write every sample, for compare"""
_DOCTOR = """\
Every line is ok, slow (it works, on a slower path), wrong, unknown, or - (nothing to judge).
Frameworks and native code are tested in separate processes: a crash is a line, too.

wrong  a package that cannot be imported, or is older than this package's metadata require;
       an interpreter that they exclude; a call that raises, crashes or gives a wrong result;
       a tensor that must be refused and is not
slow   a memory layout that could not be verified; a type on a slower path than possible;
       a disk cache that cannot be written; settings of Numba that make kernels slower
unknown  a test that timed out, was killed by another process, or found no memory, disk or
       process: run doctor again
-      a package that is not installed; CUDA without a device

examples:
  python -m fastexchange doctor           what is installed, the path of each type, what is slow
  python -m fastexchange doctor --json    {"lines": [...], "verdict": "ok"}; or slow, unknown, wrong

exit code 1 when a line says wrong, else 0"""
_EXPLAIN = """\
examples:
  python -m fastexchange explain kernels.softmax:softmax
  python -m fastexchange explain train.py:step --args "np.ones(3), 2.0, out=np.empty(3)"
  python -m fastexchange explain numpy:ndarray

The module is imported, so its code runs. --args is Python, evaluated with np (NumPy), torch
(PyTorch, if installed) and the module's own names. The call is explained, not made.

exit code 0; 2 if the object cannot be found, imported or explained"""
_COMPARE = """\
A row has moved beyond noise if all its readings moved beyond noise, in the same direction:

drift out     new/old of its median, divided by the drift: the median new/old of the yardsticks,
              which are rows of other code (C, Numba's own dispatcher, tvm-ffi ...). With fewer
              than three yardsticks nothing is divided out.
to reference  new/old of its ratio, within a run, to its reference row, if that is a yardstick.

The noise of a row is the largest of
  --threshold;
  the difference of the same call timed twice (rows control/*/a and b), in either file;
  the change that nine of ten yardsticks did not exceed, without the drift;
  the mean of its own interquartile ranges, relative to its medians, in the two files.
Compare two runs on one machine; a warning names the differences.

examples:
  python -m fastexchange bench --json old.json       ... then change something ...
  python -m fastexchange bench --json new.json
  python -m fastexchange compare old.json new.json
  python -m fastexchange compare --strict perf/results/OLD.json perf/results/NEW.json

exit code 0; with --strict 1 when a row that is no yardstick and no control got slower beyond
noise; 2 for files that are not results, or have no row in common"""


_CONFORMANCE = """\
For libraries whose type has __dlpack_c_exchange_api__. FUNCTION is called without arguments, and
returns a tensor of the type, or a list of some: contiguous, strided, readonly, empty ...

Each line is ok, wrong, or - (not checked): the table; an owning export, and that it says what
__dlpack__ says; references; the deleter, in another thread and without the GIL; a borrowed view;
the object that is made of an export; the allocator, also for too much memory; the stream; exports
in four threads. The checks run in a process of their own: a crash is a line, too, and a check that
does not end.

examples:
  python -m fastexchange conformance mypackage.testing:make_tensor

exit code 1 when a line says wrong, else 0"""

_RUN = """\
examples:
  python -m fastexchange run train.py --epochs 3
  python -m fastexchange run -m pytest tests/

exit code: the program's"""

_PRECOMPILE = """\
A module says what to compile in __precompile__: a list of tuples (kernel, call, call ...), or a
function that returns it. A call is what kernel.precompile() takes: a Numba signature, or example
arguments in a tuple or a dict. A kernel's code is kept if it has cache=True.

Without a TARGET it compiles the native code of fastexchange itself: all that any later process
would compile when it first needs it, if the package came without native code for this Python.
With --self it puts that beside the package, for every user and process of this installation.

With --into it writes the machine code of a package's kernels beside the package, in
mypackage/_kernels, for its wheel: first calls on other machines load it, and compile nothing. It
lists each signature, with the sizes of its code, or why it cannot be shipped.

  __precompile__ = [(saxpy, "(float64, float64[::1], float64[::1], float64[::1])")]

examples:
  python -m fastexchange precompile
  python -m fastexchange precompile mypackage.kernels
  python -m fastexchange precompile mypackage.kernels:saxpy other.kernels
  python -m fastexchange precompile recorded.json
  python -m fastexchange precompile --self
  python -m fastexchange precompile mypackage --into mypackage
  python -m fastexchange precompile recorded.json --into mypackage --cpu x86-64-v3 --strict

exit code 1 when a kernel cannot be compiled, or its code is not kept, or, with --into --strict, is
left out, else 0"""
_RECORD = """\
FILE gets the signatures, as JSON, when the program ends, also by an exception or sys.exit(). If it
ends by os._exit() or is killed, FILE stays as it was. Kernels that the program defines itself, or
makes in functions, cannot be imported by their names: they are left out, and named. Only this
process is seen: calls in child processes, as those of a pool's workers, are not recorded.

examples:
  python -m fastexchange record -o recorded.json -- train.py --epochs 1
  python -m fastexchange record -o recorded.json -m pytest tests/
  python -m fastexchange precompile recorded.json

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
        made.set_defaults(error=made.error)  # it shows this command's usage
        made.add_argument("--traceback", action="store_true", help="after an error, also show the traceback")
        return made

    bench = add(
        "bench",
        "print the cost of a call per argument on this machine, for this package and the alternatives",
        "Compiles a kernel and prints what a call with three tensors costs on this machine.",
        _BENCH,
    )
    bench.add_argument("--quick", action="store_true", help="fewer rounds: two seconds, noisier")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")

    doctor = add(
        "doctor",
        "check the installation, and print what is slow or wrong and what to do",
        "Checks interpreter, packages, native code, frameworks, disk cache and environment.",
        _DOCTOR,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--timeout", type=_seconds, default=180.0, metavar="SECONDS", help="for each process (default: %(default)g)"
    )

    explain = add(
        "explain",
        "describe a kernel, the call of a kernel, or the path of an object or a type into kernels",
        "Imports a module and describes an object in it: a kernel, a bound launch, a type, or an argument.",
        _EXPLAIN,
    )
    explain.add_argument("what", metavar="MODULE:OBJECT", help="a module or a .py file, and a dotted name in it")
    explain.add_argument("--args", metavar="ARGUMENTS", help="for a kernel: explain the call with these arguments")

    conformance = add(
        "conformance",
        "check the exchange table of your own type of tensors against DLPack",
        "Calls the five functions of a type's exchange table as consumers do, and says what each does wrong.",
        _CONFORMANCE,
    )
    conformance.add_argument("what", metavar="MODULE:FUNCTION", help="a function that makes a tensor, or a list of tensors")
    conformance.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="for each check (default: %(default)g)"
    )

    run = add(
        "run",
        "run a program with all its jitted functions made kernels",
        "Calls accelerate(), then runs the program as `python PROGRAM` or `python -m MODULE` would.",
        _RUN,
    )
    _add_program(run)

    record = add(
        "record",
        "run a program, and write down the signatures that its kernels met, for precompile",
        "Runs a program as `python PROGRAM` would, and writes its kernels' signatures to FILE.",
        _RECORD,
    )
    record.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="the file to write, FILE.json")
    _add_program(record)

    precompile = add(
        "precompile",
        "compile kernels and keep their code, so that later processes load it",
        "Imports modules, compiles what they list, and keeps the code in the disk cache.",
        _PRECOMPILE,
    )
    precompile.add_argument(
        "targets", metavar="TARGET", nargs="*", help="MODULE, FILE.py, MODULE:OBJECT, or a .json file of `record`"
    )

    precompile.add_argument(
        "--into", metavar="PACKAGE", help="write the machine code beside this package, for its wheel, not into the disk cache"
    )
    precompile.add_argument(
        "--cpu", action="append", metavar="LEVEL", help="with --into: x86-64-v2, x86-64-v3, ..., aarch64 (default: all of these)"
    )
    precompile.add_argument(
        "--self", action="store_true", dest="own", help="make the native code of fastexchange beside it, as wheels carry it"
    )
    precompile.add_argument("--strict", action="store_true", help="with --into: exit code 1 if the code of a kernel is left out")

    compare = add(
        "compare",
        "compare two result files row by row, and print which rows moved beyond noise",
        "Compares two files written by `bench --json` or by `perf/run.py --json`.",
        _COMPARE,
    )
    compare.add_argument("old", type=Path, metavar="OLD", help="the result file to compare with")
    compare.add_argument("new", type=Path, metavar="NEW", help="the result file to judge")
    compare.add_argument("--strict", action="store_true", help="exit code 1 when a row got slower beyond noise")
    compare.add_argument(
        "--threshold", type=_percent, default=5.0, metavar="PERCENT", help="smaller changes are noise (default: %(default)g)"
    )
    return parser


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", action="store_true", dest="is_module", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a file, -, a folder or zip file with __main__.py; with -m a module")
    parser.add_argument("arguments", nargs="*", default=[], metavar="ARGUMENTS", help="the program's sys.argv[1:]")


def _number(text: str) -> float:
    """Return `text` as a number; NaN, which is outside of all limits, if it is not one."""
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
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


_RUNS_PROGRAM = "run", "record"


def _split_program_arguments(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments of a command that runs a program behind it. The program's own, ``--`` included, are not parsed."""
    if arguments[0] not in _RUNS_PROGRAM:
        return arguments, None
    given = iter(range(1, len(arguments)))
    for at in given:
        if arguments[at : at + 2] == ["--", "-m"] and at + 2 < len(arguments):  # as without "--"
            return [*arguments[:at], *arguments[at + 1 : at + 3]], arguments[at + 3 :]
        if arguments[at].startswith("-m") and len(arguments[at]) > 2:  # ``-mMODULE``, as for python
            return [*arguments[:at], "-m", arguments[at][2:]], arguments[at + 1 :]
        if arguments[at] in ("-o", "--output"):
            next(given, None)
            continue
        if arguments[at] == "--" and at + 1 < len(arguments):
            at = next(given)
        elif arguments[at].startswith("-") and arguments[at] != "-":
            continue
        return arguments[: at + 1], arguments[at + 1 :]
    return arguments, None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code. Raises SystemExit(2) for wrong arguments, as argparse does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["bench", *arguments]
    arguments, of_program = _split_program_arguments(arguments)
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.error(f"unrecognized arguments: {' '.join(unknown)}")
    if of_program is not None:
        options.arguments = of_program
    # The encoding of stdout may have no ±: print another character then.
    if options.command not in _RUNS_PROGRAM and isinstance(sys.stdout, io.TextIOWrapper):
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
        if options.command in _RUNS_PROGRAM:  # it is the program's exception
            raise
        progress("")
        if isinstance(error, KeyboardInterrupt):
            return 130
        # `| head` has closed the pipe: the interpreter's last flush must not fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _end(*_: object) -> NoReturn:
    """End at once, as interrupted: after an interrupted import an orderly end may trip over threads of other packages."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is no stream, or the signal came while it was written to
            progress("")
            stream.flush()
    os._exit(130)


if __name__ == "__main__":
    # As an exception Ctrl-C may come up in C++ that expects none, in an import or a callback, and end as an abort.
    # A program sees its own; doctor imports none of these packages, and has processes to end.
    is_ours = sys.argv[1:2] not in ([name] for name in (*_RUNS_PROGRAM, "doctor"))
    if is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    exit_code = main()
    if exit_code == 130:
        _end()
    sys.exit(exit_code)
