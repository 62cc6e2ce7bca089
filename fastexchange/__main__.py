"""``python -m fastexchange``: what a call costs per argument on this machine, in a table.

One subcommand so far, ``bench``, which is also what runs when none is named.
"""

import argparse
import importlib.util
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

from . import __version__

_PARAMETERS = ("x", "y", "out")
_EXAMPLES = """\
examples:
  python -m fastexchange                  the table, in about ten seconds
  python -m fastexchange bench --quick    the same with fewer rounds: noisier
"""


# ---- bench ---------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    label: str
    code: str
    names: dict[str, Any]


def _add(x, y, out):
    for i in range(out.shape[0]):
        out[i] = x[i] + y[i]


class _OnlyDunder:
    """A producer with the two methods of the DLPack protocol for Python, and no faster way."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def _progress(text: str) -> None:
    """Shows `text` on the terminal in the place of what was shown before; nothing where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _peer(name: str, package: str, notes: list[str]) -> ModuleType | None:
    """The module `name` if it can be imported; if not, `notes` gets a sentence that says so."""
    if importlib.util.find_spec(name) is None:
        notes.append(f"{package} is not installed: its rows are left out.")
        return None
    try:
        return import_module(name)
    except Exception as error:  # a broken installation of a peer is no reason to show nothing
        notes.append(f"{package} cannot be imported ({type(error).__name__}: {error}): its rows are left out.")
        return None


def _each(form: str) -> str:
    return ", ".join(form.format(name) for name in _PARAMETERS)


def _groups(notes: list[str]) -> dict[str, list[_Row]]:
    """The rows, by kind of argument. The first of each group is this package's."""
    import numba
    import numpy as np

    from . import fast_args

    torch, tvm_ffi = _peer("torch", "PyTorch", notes), _peer("tvm_ffi", "apache-tvm-ffi", notes)
    functions = {"view": np.from_dlpack, "v": (1, 3)}
    if tvm_ffi is not None:
        functions["nop"] = tvm_ffi.get_global_func("testing.nop")
    arrays = [np.ones(1, np.float32) for _ in _PARAMETERS]
    values: dict[str, list[Any]] = {"NumPy arrays": arrays}
    if torch is not None:
        values["PyTorch tensors (CPU)"] = [torch.ones(1) for _ in _PARAMETERS]
    values["objects with only __dlpack__"] = [_OnlyDunder(array) for array in arrays]

    groups = {}
    for kind, arguments in values.items():
        plain = numba.njit(_add)
        names = {
            "kernel": fast_args(plain),
            "njit": plain,
            **functions,
            **dict(zip(_PARAMETERS, arguments, strict=True)),
        }
        is_numpy, is_torch = kind.startswith("NumPy"), kind.startswith("PyTorch")
        rows = [_Row("fastexchange: kernel(x, y, out)", f"kernel({_each('{}')})", names)]
        if is_numpy:
            rows.append(_Row("plain @njit: kernel(x, y, out)", f"njit({_each('{}')})", names))
        if is_torch:
            rows.append(_Row("@njit through x.numpy()", f"njit({_each('{}.numpy()')})", names))
        rows.append(_Row("@njit through np.from_dlpack(x)", f"njit({_each('view({})')})", names))
        exports = "; ".join(f"{name}.__dlpack__(max_version=v)" for name in _PARAMETERS)
        rows.append(_Row("x.__dlpack__(max_version=(1, 3)) alone", exports, names))
        if tvm_ffi is not None and (is_numpy or is_torch):
            rows.append(_Row("tvm-ffi testing.nop(x, y, out), no kernel", f"nop({_each('{}')})", names))
        groups[kind] = rows
    return groups


def _check(groups: dict[str, list[_Row]]) -> None:
    """One call of this package's kernel per kind of argument, compiled, and its result compared."""
    import numpy as np

    for kind, (row, *_) in groups.items():
        result = np.from_dlpack(row.names["out"])
        result.fill(0)
        row.names["kernel"](*(row.names[name] for name in _PARAMETERS))
        if result.tolist() != [2.0]:
            raise RuntimeError(f"{kind}: the kernel wrote {result.tolist()}, not [2.0]")


def _table(groups, times, count: int) -> str:
    """The rows in aligned columns: nanoseconds per call, its spread, per argument, and against this package."""
    lines: list[tuple[str, ...]] = [("", "ns/call", "±", "ns/argument", "x fastexchange")]
    for kind, rows in groups.items():
        lines += [(), (f"{count} {kind}",)]
        for row in rows:
            samples, ours = times[kind, row.label], times[kind, rows[0].label]
            ratio = "1" if row is rows[0] else f"{(samples / ours).median:.1f}"
            cells = (f"{samples.median:.1f}", f"{samples.spread:.1f}", f"{samples.median / count:.1f}", ratio)
            lines.append(("  " + row.label, *cells))
    full = [line for line in lines if len(line) > 1]
    widths = [max(len(line[i]) for line in full) for i in range(5)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))).rstrip()
        for line in lines
    )


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in ("numba", "numpy", "torch", "apache-tvm-ffi"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    return f"fastexchange {__version__}; {', '.join(found)}; {platform.machine()}, {os.cpu_count()} cores"


def _bench(options: argparse.Namespace) -> int:
    """What a call with three arguments costs, here and elsewhere."""
    _progress("importing …")
    from .measuring.timing import Statement, time_statements

    notes: list[str] = []
    groups = _groups(notes)
    _progress("compiling …")
    _check(groups)
    statements = {(kind, row.label): Statement(row.code, row.names) for kind, rows in groups.items() for row in rows}
    rounds = 5 if options.quick else 101
    times, _ = time_statements(
        statements, rounds=rounds, progress=lambda done, of: _progress(f"measuring: round {done} of {of}")
    )
    _progress("")

    print(_versions())
    print("\nWhat it costs to call a compiled kernel with tensors of one element: the overhead, as there is no work.\n")
    print(_table(groups, times, len(_PARAMETERS)))
    print(f"\nMedian and interquartile range (±) of {rounds} interleaved rounds in one process.")
    for note in notes:
        print(note)
    return 0


# ---- command line --------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastexchange",
        description="Tensors straight into Numba kernels. Without a command: bench.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastexchange {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    bench = commands.add_parser(
        "bench",
        help="print what a call costs per argument on this machine, by this package and by the alternatives",
        description="Compiles a kernel and prints what a call with three tensors costs on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("--quick", action="store_true", help="fewer rounds: two seconds, noisier")
    bench.set_defaults(run=_bench)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; bad arguments exit with 2, as argparse does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["bench", *arguments]
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        _progress("")
        return 130
    except BrokenPipeError:  # `| head` has read enough; the interpreter's last flush must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
