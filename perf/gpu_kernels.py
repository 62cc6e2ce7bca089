"""``python perf/gpu_kernels.py``: the kernels of ``kernels/gpu`` against PyTorch's operators, on a GPU; heat against a copy.

Of each call, the time on the device between two events; the host is ahead, so its own time is not in it. A round times
each call once, in turn, and ratios are taken round by round. TB/s: the bytes that have to be read and written, in that
time. A ratio above 1: faster than PyTorch's.
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder: `kernels` is the root's, not this file's neighbour

import cuda_launches  # noqa: E402
import cuda_places  # noqa: E402
import report  # noqa: E402

from fastexchange.measuring import files  # noqa: E402
from fastexchange.measuring.timing import Samples  # noqa: E402

_HEAD_START = 100_000
"""Cycles for which the device waits before each call, so that the host has launched it all."""


class Case(NamedTuple):
    """A kernel with data, and what it is compared with."""

    kernel: str
    data: str
    operator: str
    size: int
    """Bytes that have to be read and written."""
    ours: Any
    """A function of the kernel that ``make`` gives."""
    theirs: Any


def cases(torch, log_size: int) -> list[Case]:
    """For arrays of ``2**log_size`` float32."""
    n = 1 << log_size
    x, y, out = (torch.randn(n, device="cuda") for _ in range(3))
    uniform, counts = torch.rand(n, device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
    of_equal, on_edges = torch.full((n,), 0.3, device="cuda"), (uniform * 256).floor_().div_(256)
    normed = torch.nn.functional.rms_norm
    found = [
        Case("axpy", f"{n}", "torch.add(out=)", 12 * n, lambda run: run(2.5, x, y, out),
             lambda: torch.add(y, x, alpha=2.5, out=out)),
    ]  # fmt: skip
    for columns in sorted({128, 4096, 16384, n // 1024}):
        u, to, weight = x.view(-1, columns), out.view(-1, columns), uniform[:columns]
        data = " x ".join(map(str, u.shape))
        found += [
            Case("softmax", data, "torch.softmax(out=)", 8 * n, lambda run, u=u, to=to: run(u, to),
                 lambda u=u, to=to: torch.softmax(u, -1, out=to)),
            Case("rms_norm", data, "torch's rms_norm", 8 * n, lambda run, u=u, w=weight, to=to: run(u, w, 1e-6, to),
                 lambda u=u, w=weight: normed(u, w.shape, w, 1e-6)),
        ]  # fmt: skip
    grid, to = x.view(-1, 1 << (log_size + 1) // 2), out.view(-1, 1 << (log_size + 1) // 2)
    found.append(
        Case("heat", " x ".join(map(str, grid.shape)), "a copy", 8 * n, lambda run: run(grid, 0.2, to), lambda: to.copy_(grid))
    )
    for name, values in ("uniform", uniform), ("all equal", of_equal), ("each on an edge", on_edges):
        found.append(
            Case("histogram", f"{n}, {name}, 256 bins", "torch.histc", 4 * n,
                 lambda run, values=values: run(values, 0.0, 1.0, counts),
                 lambda values=values: torch.histc(values, 256, 0.0, 1.0))
        )  # fmt: skip
    return found


def milliseconds(torch, calls: dict[str, Any], rounds: int) -> dict[str, Samples]:
    """On the device, of each call in each round."""
    for call in calls.values():
        call()
    events = []
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_HEAD_START)
            begin.record()
            call()
            end.record()
            events.append((name, begin, end))
    torch.cuda.synchronize()
    return {name: Samples(np.array([begin.elapsed_time(end) for each, begin, end in events if each == name])) for name in calls}


def main() -> int:
    """Measure the kernels of all packages that are installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", help="only this one; may be repeated")
    parser.add_argument("--size", type=int, default=27, metavar="N", help="arrays of 2**N elements (27)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    place = cuda_places.place()
    if not place.is_gpu or place.torch is None:
        raise SystemExit("There is no GPU here, or no PyTorch that uses it.")
    torch, machine = place.torch, cuda_launches.described(place)
    packages = [name for name, module in cuda_places.PACKAGES.items() if importlib.util.find_spec(module.split(".")[0])]
    lines, entries = [], []
    for case in cases(torch, options.size):
        if options.kernel and case.kernel not in options.kernel:
            continue
        calls = {"theirs": case.theirs}
        for name in packages:
            made = importlib.import_module(f"kernels.gpu.{case.kernel}").make(importlib.import_module(cuda_places.PACKAGES[name]))
            calls[name] = lambda run=made, ours=case.ours: ours(run)
        times = milliseconds(torch, calls, options.rounds)
        for name in packages:
            speeds = [f"{case.size / times[each].median / 1e9:.2f}" for each in (name, "theirs")]
            ratio = times["theirs"] / times[name]
            lines.append((case.kernel, case.data, name, case.operator, *speeds, *report.cells(ratio, 2)))
        for name, samples in times.items():
            result = files.result(f"{case.kernel}/{case.data}/{name}", samples * 1e6, case.operator if name == "theirs" else name)
            entries.append(result | {"kernel": case.kernel, "data": case.data, "who": name, "bytes": case.size})
    print(f"{files.headline(machine)}; {machine['device']['name']}; medians of {options.rounds} rounds\n")
    heads = ("kernel", "data", "package", "compared with", "TB/s", "theirs", "ratio", "IQR")
    print(report.table(heads, lines, left=(0, 1, 2, 3)))
    if options.json:
        files.write(options.json, machine, options.rounds, entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
