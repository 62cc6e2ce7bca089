"""``python perf/cuda_launches.py``: host time per launch of CUDA kernels, on a GPU, or against the tests' driver stub.

Against the stub nothing runs: what is measured is the host's part alone. The README in this folder says what each row is.
"""

import argparse
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import cuda_places

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
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    return parser.parse_args()


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


def main() -> int:
    """Run the benchmark."""
    options = _options()
    place = cuda_places.place(options.stub)  # before anything imports a CUDA package

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
    for package in cuda_places.PACKAGES:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            left_out.append(f"{package} is not installed: its rows are left out.")
            continue
        _progress(f"{package}: compiling …")
        rows = cuda_rows.Rows(package, place)
        groups += rows.groups()
    if not groups:
        raise SystemExit("Neither package of kernels for CUDA is installed: pip install '.[cuda,cuda-mlir]'")
    if place.device_count < 2:
        left_out.append("There is one device: the rows with tensors on another one are left out.")
    others, why = cuda_rows.peers(place)
    left_out += why
    place.begin()
    sections = {}
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
        rows = [cuda_rows.prepared(row, place) for group in section for row in group.rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured, loop = time_statements(
                {row.key: row.statement for row in rows},
                rounds=options.rounds,
                progress=lambda n, of, package=package: _progress(f"{package}: round {n} of {of}"),
            )
        times |= measured
        times[f"{package}/loop"] = loop
    _progress("")
    print(f"Nanoseconds per launch, median and interquartile range of {options.rounds} rounds.")
    print("The loop around it is subtracted.\n")
    for group in groups:
        print(report.group_table(group, times))
    found = cuda_targets.targets(times, place.is_gpu)
    verdict = {True: "met", False: "MISSED", None: "-"}
    lines = [(target.call, target.must_be, target.measured, verdict[target.met]) for target in found]
    print(report.table(("target", "must be", "measured", "met?"), lines, left=(0, 1, 2, 3)))
    if options.json:
        labels = {f"{package}/loop": "the loop around a launch, which is subtracted" for package in sections}
        report.write_json(options.json, machine, options.rounds, groups, labels, times, found, {})
        print(f"written to {options.json}")
    return 1 if options.strict and any(target.met is False for target in found) else 0


if __name__ == "__main__":
    sys.exit(main())
