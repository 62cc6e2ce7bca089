"""``python perf/cuda_launches.py``: host time per launch of CUDA kernels, on a GPU, or against the tests' driver stub.

Against the stub nothing runs: what is measured is the host's part alone. The README in this folder says what each row is.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import re
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import cuda_places

_FEWEST_ROUNDS = 11  # that a package's rows are written of, where another's have been measured in the same call
_PACKAGES = ("numba-cuda", "numba-cuda-mlir", "cuda-bindings", "cuda-core", "cupy-cuda12x", "cupy-cuda13x", "triton")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stub", action="store_true", help="against the driver stub, even where there is a GPU")
    parser.add_argument("--rounds", type=int, default=41, help="how often each row is timed (41)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write what was measured; on a GPU perf/results/DATE-cuda-DEVICE.json"
    )
    parser.add_argument("--no-torch", action="store_true", help="on a GPU with PyTorch, too: tensors of the driver's memory")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="end in time; the next call goes on from what this one wrote"
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    options = parser.parse_args()
    if options.minutes < math.inf and options.json is None:
        parser.error("--minutes needs --json FILE, from which the next call goes on")
    return options


def file_for(place) -> Path:
    """Where the results of a run on this GPU go, today."""
    device = re.sub(r"[^a-z0-9]+", "-", place.described()["name"].lower()).strip("-")
    results = Path(__file__).resolve().parent / "results"
    return results / f"{datetime.now(timezone.utc):%Y-%m-%d}-cuda-{device}.json"


def described(place) -> dict:
    """The machine, the device and the packages."""
    from fastexchange.measuring import files

    found = files.machine()
    for name in _PACKAGES:
        try:
            found["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found["packages"][name] = None
    return found | {"device": place.described()}


def results_of(path: Path, device: dict) -> list[dict]:
    """The results that an earlier call, with ``--minutes``, has left. Raises SystemExit for those of another device."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["machine"]["device"] != device:
        raise SystemExit(f"{path} is of another device: name another with --json.")
    return document["results"]


def main() -> int:
    """Run the benchmark. The exit code is 3 when the time was over before all had been measured."""
    options = _options()
    end = time.monotonic() + 60 * options.minutes
    place = cuda_places.place(options.stub, not options.no_torch)  # before anything imports a CUDA package

    import cuda_rows
    import cuda_targets
    import report

    from fastexchange.measuring import files
    from fastexchange.measuring.timing import time_statements

    times, groups, left_out = {}, [], []
    if options.json is None and place.is_gpu:
        options.json = file_for(place)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    before = results_of(options.json, place.described()) if options.minutes < math.inf else []
    done = [package for package in cuda_places.PACKAGES if any(row["key"] == f"{package}/loop" for row in before)]
    times |= report.samples_of(before)
    for package in cuda_places.PACKAGES:
        if package in done:
            left_out.append(f"{package} has been measured, says {options.json}.")
            continue
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            left_out.append(f"{package} is not installed: its rows are left out.")
            continue
        _progress(f"{package}: compiling …")
        rows = cuda_rows.Rows(package, place)
        groups += rows.groups()
        left_out += rows.left_out
    if not groups and done:
        print("Nothing is left to be measured:", *left_out)
        return 0
    if not groups:
        raise SystemExit("Neither package of kernels for CUDA is installed: pip install '.[cuda,cuda-mlir]'")
    if place.device_count < 2:
        left_out.append("There is one device: the rows with tensors on another one are left out.")
    others, why = cuda_rows.peers(place)
    left_out += why
    place.begin()
    sections, now = {}, []
    for group in groups:
        sections.setdefault(group.title.partition(":")[0], []).append(group)
    if others is not None:
        groups.append(others)
        for section in sections.values():
            section.append(others)
    machine = described(place)
    print(files.headline(machine))
    print(", ".join(f"{name} {value}" for name, value in machine["device"].items()))
    for sentence in left_out:
        print(sentence)
    for package, section in sections.items():
        left = end - time.monotonic()
        if left <= 0:
            break
        rows = [cuda_rows.prepared(row, place) for group in section for row in group.rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured, loop = time_statements(
                {row.key: row.statement for row in rows},
                rounds=options.rounds,
                most_ns=1e9 * left,
                progress=lambda n, of, package=package: _progress(f"{package}: round {n} of {of}"),
            )
        if len(loop.values) < min(options.rounds, _FEWEST_ROUNDS) and now:
            break
        now.append(package)
        times |= measured
        times[f"{package}/loop"] = loop
    _progress("")
    if not now:
        print(f"{options.minutes} minutes are too few to prepare a package's rows.")
        return 3
    rounds = min(len(times[f"{package}/loop"].values) for package in now)
    print(f"Nanoseconds per launch, median and interquartile range of {rounds} rounds.")
    print("The loop around it is subtracted.\n")
    groups = [group for group in groups if all(row.key in times for row in group.rows)]
    for group in groups:
        print(report.group_table(group, times))
    found = cuda_targets.targets(times, place.is_gpu)
    verdict = {True: "met", False: "MISSED", None: "-"}
    lines = [(target.call, target.must_be, target.measured, verdict[target.met]) for target in found]
    print(report.table(("target", "must be", "measured", "met?"), lines, left=(0, 1, 2, 3)))
    if options.json:
        labels = {f"{package}/loop": "the loop around a launch, which is subtracted" for package in now}
        known = {row["key"] for row in before}
        new = {key: samples for key, samples in times.items() if key not in known}
        report.write_json(options.json, machine, options.rounds, groups, labels, new, found, {}, before)
        print(f"written to {options.json}")
    if len(now) < len(sections):
        missing = ", ".join(package for package in sections if package not in now)
        print(f"{missing}: the same command goes on, with that file where it is.")
        return 3
    return 1 if options.strict and any(target.met is False for target in found) else 0


if __name__ == "__main__":
    sys.exit(main())
