"""``python perf/table.py FILE.json``: what a call costs, by a run's file; ``--write`` puts that into docs/how-to/measuring.md.

A row whose figures the run does not have is left out. Ratios are taken round by round, as the run's own are.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import report
from targets import per_scalar, slope, slope_beyond

from fastexchange.measuring.figures import figure
from fastexchange.measuring.timing import Samples

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "docs" / "how-to" / "measuring.md"
BEGIN, END = "<!-- perf: begin -->\n", "<!-- perf: end -->\n"
PLOT = ROOT / "perf" / "results" / "overhead.svg"
COLUMNS = {"c": "hand-written C", "njit": "Numba's dispatcher", "tvm": "tvm-ffi `nop`", "nanobind": "nanobind"}
_BLANK = "-"


def number(value: float) -> str:
    """Three digits or so: 2.9, 20.1, 147, 1885."""
    return f"{value:.1f}" if abs(value) < 99.5 else f"{value:.0f}"


def duration(ns: float) -> str:
    """ "20.1 ns", "6.4 µs"."""
    return f"{number(ns)} ns" if abs(ns) < 10_000 else f"{number(ns / 1000)} µs"


def times_as_much(ratio: float) -> str:
    """ "0.71 x", "2.5 x", "31 x"."""
    return f"{ratio:.2f} x" if ratio < 2 else f"{ratio:.1f} x" if ratio < 9.95 else f"{ratio:.0f} x"


class _Lines:
    """Lines of the table, for a run."""

    def __init__(self, times: dict[str, Samples]):
        self.times = times
        self.lines: list[str] = []
        self.columns = [name for name in COLUMNS if f"numpy/3/{name}" in times]

    def beside(self, key: str, ours: str) -> str:
        """A call, and how many times ours it takes."""
        return f"{self.ns(key)} ({figure(self.times[key] / self.times[ours], times_as_much)})"

    def ns(self, key: str) -> str:
        return figure(self.times[key], duration)

    def more(self, key: str, than: str) -> str:
        """How much more a call takes."""
        return figure(self.times[key] - self.times[than], duration, signed=True)

    def add(self, label: str, ours: str, other: str = "", **cells: str) -> None:
        middle = [cells.get(name, _BLANK) for name in self.columns]
        self.lines.append(f"| {' | '.join([label, ours, *middle, other or _BLANK])} |")

    def call(self, label: str, key: str, *others: tuple[str, str]) -> None:
        """The rows ``key/fast``, ``key/c`` …, and `others`, each the row's key and what it is called."""
        ours = f"{key}/fast"
        cells = {name: self.beside(f"{key}/{name}", ours) for name in COLUMNS if f"{key}/{name}" in self.times}
        named = [f"{name} {self.beside(other, ours)}" for other, name in others if other in self.times]
        self.add(label, self.ns(ours), "; ".join(named), **cells)


def _arguments(t: _Lines) -> Iterator[Callable[[], None]]:
    yield lambda: t.call("no arguments", "none/0", ("none/0/empty", "empty C builtin"))
    empty, from_dlpack = "empty C builtin", "`njit_kernel(np.from_dlpack(x), …)`"
    yield lambda: t.call("3 NumPy arrays", "numpy/3", ("numpy/3/empty", empty), ("numpy/3/from_dlpack", from_dlpack))
    others = ("memory", "C in memory"), ("abi", "C by PyTorch's C ABI"), ("views", "`njit_kernel(x.numpy(), …)`")
    yield lambda: t.call("3 PyTorch tensors", "torch/3", *((f"torch/3/{key}", label) for key, label in others))
    yield lambda: t.call("3 PyTorch views", "autograd/views")
    yield lambda: t.call("3 PyTorch weights, in `no_grad()`", "autograd/weights")
    yield lambda: t.call("3 PyTorch tensors, not where they are expected in memory: PyTorch is asked", "asked")
    yield lambda: t.call("3 PyTorch tensors, no exchange table", "tableless", ("tableless/views", "`njit_kernel(x.numpy(), …)`"))
    yield lambda: t.call("3 `array.array`", "buffer/3")
    yield lambda: t.call("3 objects with only `__dlpack__`", "dunder/3", ("dunder/3/from_dlpack", from_dlpack))
    yield lambda: t.call("58 NumPy arrays", "numpy/58", ("numpy/58/empty", empty))
    yield lambda: t.call("58 PyTorch tensors", "torch/58")
    for label, take in (("each further argument of `f(*args)`, up to 32", slope), ("beyond 32", slope_beyond)):

        def further(label=label, take=take):
            found = {
                (name, who): figure(take(t.times, f"unpacked/{name}/{{}}/{who}"), duration)
                for name in ("numpy", "torch")
                for who in ("fast", "c")
            }
            cells = {who: f"NumPy {found['numpy', who]}, PyTorch {found['torch', who]}" for who in ("fast", "c")}
            t.add(label, cells["fast"], c=cells["c"])

        yield further
    kinds = ("float", "int", "bool")

    def scalars():
        cells = {
            who: ", ".join(figure(per_scalar(t.times, kind, who), number) for kind in kinds) + " ns"
            for who in ("fast", "c", "njit")
        }
        t.add("a float, an int, a bool, each", cells["fast"], c=cells["c"], njit=cells["njit"])

    yield scalars


def _calls(t: _Lines) -> Iterator[Callable[[], None]]:
    one = "optional/one/fast"
    yield lambda: t.add(
        "an omitted default, None", f"{t.more('optional/omitted/fast', one)}, {t.more('optional/none/fast', one)} more"
    )
    kinds = (("NumPy", "numpy"), ("PyTorch", "torch"))
    yield lambda: t.add(
        "3 keywords instead of positions",
        ", ".join(f"{label} {t.more(f'keywords/{name}/3', f'keywords/{name}/0')}" for label, name in kinds) + " more",
    )
    yield lambda: t.add(
        "3 in a list; 100 in a list",
        "; ".join(", ".join(f"{label} {t.ns(f'tuple/{name}/{form}')}" for label, name in kinds) for form in ("list", "100")),
    )
    yield lambda: t.add(
        "64 signatures of one kernel in turn, per call",
        t.ns("sites/64/turn"),
        f"64 kernels of one {t.beside('sites/64/apart', 'sites/64/turn')}",
        njit=t.beside("sites/64/njit", "sites/64/turn"),
    )
    yield lambda: t.add(
        "a new PyTorch tensor of 4 elements, made by the kernel; a declared output",
        f"{t.ns('results/torch/new')}; {t.ns('results/torch/declared')}",
        f"`torch.empty_like` alone {t.ns('results/torch/own')}",
    )
    for name, label in (("numpy", "`np.add(x, y, out)`"), ("torch", "`torch.add(x, y, out=out)`")):

        def operator(ours=f"operator/{name}/fast", theirs=f"operator/{name}/own", label=label):
            t.add(f"a kernel for {label}, one element", t.ns(ours), f"itself {t.beside(theirs, ours)}")

        yield operator
    yield lambda: t.call("a string", "other/a str")


def _processes(t: _Lines) -> Iterator[Callable[[], None]]:
    def ratio(ours: str, theirs: str) -> str:
        return figure(t.times[ours] / t.times[theirs], times_as_much)

    warm, cold = "decorating and calling in a new process, cached on disk", "the same, a kernel not called before"
    yield lambda: t.add(f"{warm}", f"{ratio('start/numpy/fast/both', 'start/numpy/njit/both')} `@njit(cache=True)`")
    yield lambda: t.add(f"{cold}", f"{ratio('cold/installed/both', 'cold/njit/both')} `@njit(cache=True)`")
    for label, way in (("NumPy arrays", "numpy/call"), ("PyTorch tensors", "torch/call")):

        def installed(label=label, way=way):
            ours, plain = (figure(t.times[f"new/{key}/both"] / 1e9, "{:.2f} s".format) for key in (way, "numpy/njit"))
            t.add(f"the very first call after installing a wheel, {label}", ours, njit=plain)

        yield installed
    yield lambda: t.add("the same from a checkout, compiling", figure(t.times["cold/fast/both"] / 1e9, "{:.1f} s".format))
    yield lambda: t.add("`import fastexchange` after `import numba`", figure(t.times["import/after"] / 1e6, "{:.0f} ms".format))

    def memory():
        ours, plain = (figure(t.times[f"memory/kernels/{who}"] / 1e3, "{:.0f} kB".format) for who in ("fast", "njit"))
        t.add("memory of a kernel with one signature", ours, njit=plain)

    yield memory

    def threads():
        ours, plain = (ratio(f"threads/long/numpy/{who}/1", f"threads/long/numpy/{who}/2") for who in ("nogil", "njit"))
        t.add("2 threads with `nogil=True`, calls per second of one", ours, njit=plain)

    yield threads


def table(path: Path) -> str:
    """What stands between the README's markers, of the run in the file at `path`."""
    machine, times = report.read_json(path)
    t = _Lines(times)
    for part in (_arguments, _calls, _processes):
        for line in part(t):
            try:
                line()
            except KeyError:  # the run has no such rows
                continue
    packages = {name: machine["packages"].get(name) for name in ("torch", "numpy", "numba", "apache-tvm-ffi", "nanobind")}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    name = path.resolve().relative_to(ROOT).as_posix()
    heads = ["call", "fastexchange", *(COLUMNS[column] for column in t.columns), "other"]
    return "\n".join(
        [
            f"All rows of one run, [{name}]({from_readme(path)}): CPython {machine['python']} on {machine['cores']} cores, "
            f"{machine['cpu']}; "
            f"{versions}; {machine['date'][:10]}. In brackets: how many times as long as fastexchange's.",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
            *t.lines,
            "",
            f"![Nanoseconds per call against the number of arguments, by kind of argument]({from_readme(PLOT)})",
            "",
        ]
    )


def from_readme(path: Path) -> str:
    return os.path.relpath(path.resolve(), README.parent)


def file_in(text: str) -> Path:
    """The run that the README's table is of."""
    return (README.parent / text.split(BEGIN)[1].split("](")[1].split(")")[0]).resolve()


def main() -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what `run.py --json` wrote, in this checkout")
    parser.add_argument("--write", action="store_true", help="put it into docs/how-to/measuring.md")
    options = parser.parse_args()
    try:
        made = table(options.file.resolve())
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.file}: no file of `run.py --json` in this checkout ({error})")
    if not options.write:
        print(made, end="")
        return 0
    head, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(head + BEGIN + made + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
