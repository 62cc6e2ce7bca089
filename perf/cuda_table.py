"""``python perf/cuda_table.py FILE.json``: the tables of launches, from a run's file; ``--write`` puts them into this README.

Ratios are taken round by round, as the run's own are.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import cuda_targets
import report
from cuda_places import PACKAGES
from table import duration, times_as_much

from fastexchange.measuring.figures import figure

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "perf" / "README.md"
BEGIN, END = "<!-- cuda: begin -->\n", "<!-- cuda: end -->\n"
COLUMNS = {
    "c": "hand-written C", "checked": "C that checks as much", "device": "its own, device arrays",
    "interface": "its own, `__cuda_array_interface__`", "tensor": "its own, these tensors",
}  # fmt: skip
CASES = {
    "1": "1 tensor", "3": "3 tensors", "axpy": "a float, 2 tensors", "26": "26 tensors", "none": "nothing, declared",
    "array/1": "1 tensor, declared", "array/16": "16 tensors, declared", "scalar/16": "16 float32 scalars, declared",
    "scalar/256": "256 float32 scalars, declared",
}  # fmt: skip
TURNS = {
    "kernels": "8 kernels in turn", "grids": "8 configurations in turn", "item": "`kernel[grid, block](…)`, looked up each time",
    "forall": "`kernel.forall(n)(…)`, looked up each time", "held": "`kernel.forall(n)`, held", "keywords": "all by keyword",
}  # fmt: skip
PARTS = {"gradient": ", forward and backward", "graph": ", one of ten in a graph of Inductor's"}
OTHERS = {"change/turn": "2 tensors and a float, an int in turn", "device/fast": "3 tensors on the other device"}


def table(path: Path) -> str:
    """What stands between the README's markers, of the run in the file at `path`."""
    machine, times = report.read_json(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    labels = {row["key"]: row["label"] for row in found["results"]}
    name, device = path.resolve().relative_to(ROOT).as_posix(), machine["device"]
    where = f"{device.get('name') or 'driver stub'}: {device.get('note') or 'driver ' + str(device['driver'])}"
    packages = ("numba-cuda", "numba-cuda-mlir", "cuda-core", "torch")
    versions = ", ".join(f"{each} {machine['packages'].get(each)}" for each in packages)
    lines = [
        f"All rows of one run, [{path.name}](results/{path.name}): `python perf/cuda_launches.py --json {name}`; {where}; "
        f"CPython {machine['python']} on {machine['cores']} cores, {machine['cpu']}; {versions}; {machine['date'][:10]}; "
        f"{found['rounds']} rounds. In brackets: how many times as long as fastexchange's.",
    ]
    for package in PACKAGES:
        if f"{package}/3/fast" in times:
            lines += ["", *_of_package(package, times)]
        if f"{package}/operator/hand" in times:
            lines += ["", *_of_operators(package, times, labels)]
    peers = [f"{labels[key]} {figure(times[key], duration)}" for key in times if key.startswith("peer/")]
    if peers:
        lines += ["", f"In the same rounds: {', '.join(peers)}."]
    promised = cuda_targets.targets(times, "note" not in device)
    missed = [f"{each.call} {each.must_be} ({each.measured})" for each in promised if each.met is False]
    unclear = [f"{each.call} {each.must_be} ({each.measured})" for each in promised if each.met is None]
    said = f"Of {len(promised)} targets {len(missed)} are missed{': ' if missed else ''}{'; '.join(missed)}"
    lines += ["", said + (f"; the run does not say of {len(unclear)}: {'; '.join(unclear)}." if unclear else ".")]
    return "\n".join([*lines, ""])


def _of_package(package: str, times: dict) -> list[str]:
    def ns(key: str) -> str:
        return figure(times[key], duration)

    def beside(key: str, ours: str) -> str:
        if key not in times:
            return "-"
        return f"{ns(key)} ({figure(times[key] / times[ours], times_as_much)})"

    lines = [f"| {package} | fastexchange | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for case, label in CASES.items():
        ours = f"{package}/{case}/fast"
        cells = [beside(f"{package}/{case}/{who}", ours) for who in COLUMNS]
        lines.append(f"| {label} | {ns(ours)} | {' | '.join(cells)} |")
    for case, label in TURNS.items():
        ours = f"{package}/turn/{case}"
        cells = {"c": beside(f"{ours}/c", ours), "device": beside(f"{ours}/own", ours)}
        lines.append(f"| 3 tensors, {label} | {ns(ours)} | {_cells(cells)} |")
    for case, label in OTHERS.items():
        ours, key = f"{package}/{case}", f"{package}/{case.partition('/')[0]}/"
        if ours in times:
            cells = {"c": beside(key + "c", ours), "device": beside(key + "own", ours)}
            lines.append(f"| {label} | {ns(ours)} | {_cells(cells)} |")
    raw, released = (ns(f"{package}/3/{who}") for who in ("raw", "released"))
    fallback = {"device": "device arrays", "interface": "`__cuda_array_interface__`", "dunder": "only `__dlpack__`"}
    found = ", ".join(f"{label} {ns(f'{package}/3/fallback/{who}')}" for who, label in fallback.items())
    each, by_hand, checked = (
        figure((times[f"{package}/26/{who}"] - times[f"{package}/1/{who}"]) / 25, duration) for who in ("fast", "c", "checked")
    )
    return [
        *lines, "",
        f"`cuLaunchKernel` alone, from C, for 3 tensors: {raw}; giving up the GIL for it: {released}. Each further tensor: "
        f"{each}, in C {by_hand}, in C that checks as much {checked}. Three arguments without an exchange table, through "
        f"fastexchange: {found}.{_of_known(package, times)}",
    ]  # fmt: skip


def _of_known(package: str, times: dict) -> str:
    """Three arrays of other frameworks, whose memory is read where they are."""
    found = {"cupy": "CuPy's", "jax": "JAX's"}
    measured = {label: times.get(f"{package}/3/{who}") for who, label in found.items()}
    known = [f"{label} {figure(samples, duration)}" for label, samples in measured.items() if samples is not None]
    return f" Arrays that are read where they are: {', '.join(known)}." if known else ""


def _of_operators(package: str, times: dict, labels: dict[str, str]) -> list[str]:
    """Operators of the package's kernels, and their gradients, each beside what is written by hand."""
    lines = [f"| {package}: an operator | time | beside by hand |", "|---|---|---|"]
    for key in times:
        if key.startswith(f"{package}/operator/"):
            part = key.split("/")[2]
            folder = f"{part}/" if part in PARTS else ""
            hand = f"{package}/operator/{folder}hand"
            ratio = "" if key == hand else figure(times[key] / times[hand], times_as_much)
            label = labels[key] + PARTS.get(part, "")
            lines.append(f"| {label} | {figure(times[key], duration)} | {ratio} |")
    return lines


def _cells(cells: dict[str, str]) -> str:
    return " | ".join(cells.get(who, "-") for who in COLUMNS)


def file_in(text: str) -> Path:
    """The run that the README's tables are of."""
    return README.parent / text.split(BEGIN)[1].split("](")[1].split(")")[0]


if __name__ == "__main__":
    sys.exit(report.write_table(__doc__.splitlines()[0], table, README, BEGIN, END))
