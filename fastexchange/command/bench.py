"""``bench``: print the cost of a call per argument on this machine, for this package and for the alternatives."""

import argparse
import importlib.util
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..measuring import figures, files
from ..measuring.tables import Row, progress, show, stage
from ..measuring.timing import Statement, time_statements
from . import CommandError
from .probe import OnlyDunder

__all__ = ["run"]

_PARAMETERS = ("x", "y", "out")
# Last parts of keys in files:
_OURS = "fast"  # of this package's rows
_YARDSTICK = "export"  # of the rows with which they are compared: every kind of argument has one


class _Call(NamedTuple):
    key: str
    label: str
    code: str
    names: dict[str, Any]


class _Kind(NamedTuple):
    """A kind of argument and the calls that are timed with it. The first call is this package's."""

    name: str
    calls: list[_Call]
    control: list[_Call]
    """The first call again, as two more rows that measure noise."""


def _add(x, y, out):
    for i in range(out.shape[0]):
        out[i] = x[i] + y[i]


def _peer(name: str, package: str, notes: list[str]) -> ModuleType | None:
    """Import the module `name`. Returns None, and adds a sentence to `notes`, if that fails."""
    if importlib.util.find_spec(name) is None:
        notes.append(f"{package} is not installed: its rows are left out.")
        return None
    try:
        return import_module(name)
    except Exception as error:  # a broken peer must not prevent the other rows
        notes.append(f"{package} cannot be imported ({type(error).__name__}: {error}): its rows are left out.")
        return None


def _each(form: str) -> str:
    return ", ".join(form.format(name) for name in _PARAMETERS)


def _kinds(notes: list[str]) -> list[_Kind]:
    """Return the calls to time, by kind of argument."""
    import numba
    import numpy as np

    from .. import fast_args

    torch, tvm_ffi = _peer("torch", "PyTorch", notes), _peer("tvm_ffi", "apache-tvm-ffi", notes)
    functions = {"view": np.from_dlpack, "v": (1, 3)}
    if tvm_ffi is not None:
        functions["nop"] = tvm_ffi.get_global_func("testing.nop")
    arrays = [np.ones(1, np.float32) for _ in _PARAMETERS]
    values: dict[tuple[str, str], list[Any]] = {("numpy", "NumPy arrays"): arrays}
    if torch is not None:
        values["torch", "PyTorch tensors (CPU)"] = [torch.ones(1) for _ in _PARAMETERS]
    values["dunder", "objects with only __dlpack__"] = [OnlyDunder(np.ones(1, np.float32)) for _ in _PARAMETERS]

    kinds = []
    for (short, name), arguments in values.items():
        plain = numba.njit(_add)
        names = {
            "kernel": fast_args(plain),
            "njit": plain,
            **functions,
            **dict(zip(_PARAMETERS, arguments, strict=True)),
        }
        calls: list[_Call] = []

        def add(key: str, label: str, code: str, short=short, names=names, calls=calls) -> None:
            calls.append(_Call(f"bench/{short}/{key}", label, code, names))

        ours = f"kernel({_each('{}')})"
        add(_OURS, "fastexchange: kernel(x, y, out)", ours)
        if short == "numpy":
            add("njit", "plain @njit: kernel(x, y, out)", f"njit({_each('{}')})")
        if short == "torch":
            add("views", "@njit through x.numpy()", f"njit({_each('{}.numpy()')})")
        add("from_dlpack", "@njit through np.from_dlpack(x)", f"njit({_each('view({})')})")
        told = _version_told(arguments[0])
        exports = "; ".join(f"{name}.__dlpack__({'max_version=v' if told else ''})" for name in _PARAMETERS)
        add(_YARDSTICK, f"x.__dlpack__({told}) alone", exports)
        if tvm_ffi is not None and short != "dunder":
            add("tvm", "tvm-ffi testing.nop(x, y, out), no kernel", f"nop({_each('{}')})")
        control = [_Call(f"control/bench-{short}/{which}", f"the same call, {which}", ours, names) for which in "ab"]
        kinds.append(_Kind(name, calls, control))
    return kinds


def _version_told(argument) -> str:
    """The argument by which ``__dlpack__`` is told the version of DLPack; "" if it takes none, as in PyTorch before 2.9."""
    try:
        argument.__dlpack__(max_version=(1, 3))
    except TypeError:
        return ""
    return "max_version=(1, 3)"


def _check(kinds: list[_Kind], notes: list[str]) -> None:
    """Make each call once, which compiles the kernels. Raises RuntimeError for a wrong result of this package's.

    A call of an alternative that raises is taken out, and a sentence added to `notes`: NumPy's views of the tensors of PyTorch
    before 2.9, for instance, are readonly.
    """
    import numpy as np

    for kind in kinds:
        names = kind.calls[0].names
        out = names["out"]
        result = out.numpy() if hasattr(out, "numpy") else np.from_dlpack(out)
        names["kernel"](*(names[name] for name in _PARAMETERS))
        if result.tolist() != [2.0]:
            raise RuntimeError(f"{kind.name}: the kernel wrote {result.tolist()}, not [2.0]")
        for call in kind.calls[1:]:
            try:
                exec(call.code, {}, dict(names))
            except Exception as error:  # frameworks, and Numba, raise their own
                kind.calls.remove(call)
                words = str(error).partition("\n")[0]
                notes.append(f"{kind.name}, {call.label}: {type(error).__name__}: {words}: the row is left out.")


def _show_table(kinds: list[_Kind], times) -> None:
    """Print a row for each call: nanoseconds per call, spread, nanoseconds per argument, ratio to this package's call."""
    count, tenths = len(_PARAMETERS), "{:.1f}".format
    lines: list[Row | str] = []
    for kind in kinds:
        lines.append(f"{count} {kind.name}")
        for call in kind.calls:
            samples, ours = times[call.key], times[kind.calls[0].key]
            is_ours = call is kind.calls[0]
            ratio = "1" if is_ours else figures.figure(samples / ours, tenths)
            each = tenths(samples.median / count) if samples.is_measurable() else "-"
            cells = (figures.figure(samples, tenths), tenths(samples.spread), each, ratio)
            lines.append(Row((call.label, *cells), "green" if is_ours else ""))
    show(("", "ns/call", "±", "ns/argument", "x fastexchange"), lines)


def _noise(kinds: list[_Kind], times) -> str:
    """Return a sentence about the control: the ratio of two rows that time the same call."""
    ratios = [(kind.name, times[kind.control[1].key] / times[kind.control[0].key]) for kind in kinds]
    listed = ", ".join(f"{figures.figure(ratio, '{:.3f} x'.format)} with {name}" for name, ratio in ratios)
    return f"Noise: fastexchange's call timed as two rows, the second against the first: {listed}."


def _write(path: Path, kinds: list[_Kind], rounds: int, times) -> None:
    """Write all samples to a file in the format of ``measuring.files``."""
    results = []
    for kind in kinds:
        calls = {call.key.rpartition("/")[2]: call for call in (*kind.calls, *kind.control)}
        references = {_OURS: calls[_YARDSTICK], "b": calls["a"]}
        for last, call in calls.items():
            other = references.get(last)
            reference = (other.key, times[other.key]) if other else None
            results.append(files.result(call.key, times[call.key], call.label, call.code, reference))
    files.write(path, files.machine(), rounds, results)


def _writable(path: Path) -> None:
    """Raise CommandError if `path` cannot be written. Called before measuring; creates nothing."""
    if path.is_dir():
        raise CommandError(f"--json: {path} is a directory")
    existing = path
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    if existing != path and not existing.is_dir():
        raise CommandError(f"--json: {existing} is not a directory")
    if not os.access(existing, os.W_OK):
        raise CommandError(f"--json: {existing} cannot be written")


def run(options: argparse.Namespace) -> int:
    """Time a call with three arguments and print the table."""
    if options.json:
        _writable(options.json)
    stage("importing …")
    notes: list[str] = []
    kinds = _kinds(notes)
    stage("compiling …")
    _check(kinds, notes)
    stage("measuring …")
    statements = {c.key: Statement(c.code, c.names) for kind in kinds for c in (*kind.calls, *kind.control)}
    rounds = 5 if options.quick else 101
    times, _ = time_statements(
        statements, rounds=rounds, progress=lambda done, of: progress(f"measuring: round {done} of {of}")
    )
    progress("")
    print(files.headline(files.machine()))
    print("\nThe time of calls of a compiled kernel with tensors of one element: almost all of it is overhead.\n")
    _show_table(kinds, times)
    print(f"\nMedian and interquartile range (±) of {rounds} interleaved rounds in one process.")
    print(_noise(kinds, times))
    for note in notes:
        print(note)
    if options.json:
        try:
            _write(options.json, kinds, rounds, times)
        except OSError as error:
            raise CommandError(f"--json: {error}") from error
    return 0
