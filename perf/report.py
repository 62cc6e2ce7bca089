"""What a run prints and writes: tables, the machine's description, JSON."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from fastexchange.measure import Samples


def table(heads: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """An aligned table in plain text; the columns `left` are aligned left, the others right."""
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]

    def row(cells):
        padded = [cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(cells)]
        return "  ".join(padded).rstrip()

    return "\n".join([row(heads), "  ".join("-" * width for width in widths), *map(row, lines)])


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict:
    """Where a run was made: enough to know whether two runs may be compared."""
    import fastexchange

    packages = ("numba", "llvmlite", "numpy", "torch", "apache-tvm-ffi", "cffi")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {"fastexchange": fastexchange.__version__, **{name: _version(name) for name in packages}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def headline(described: dict) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items() if version)
    return f"{described['cpu']}, {described['cores']} cores; Python {described['python']}; {packages}"


def group_table(group, times: dict[str, Samples]) -> str:
    """A group's rows: time, spread, and the ratio to the row of the group that is named."""
    labels = {row.key: row.label for row in group.rows}
    lines = []
    for row in group.rows:
        samples = times[row.key]
        ratio = f"{(samples / times[row.reference]).median:.2f}" if row.reference else ""
        reference = f"x {labels[row.reference]}" if row.reference else ""
        lines.append((row.label, f"{samples.median:.1f}", f"{samples.spread:.1f}", ratio, reference))
    return f"{group.title}\n{table(('call', 'ns', 'IQR', 'ratio', ''), lines, left=(0, 4))}\n"


def write_json(path: Path, described: dict, rounds: int, groups, times: dict[str, Samples], found) -> None:
    """Everything a run measured. Times in nanoseconds per call, the loop around them subtracted."""
    rows = {row.key: row for group in groups for row in group.rows}
    results = []
    for key, samples in times.items():
        row = rows.get(key)
        entry = {"key": key, "median_ns": samples.median, "iqr_ns": samples.spread}
        entry["samples_ns"] = samples.values.round(3).tolist()
        if row is not None:
            entry |= {"label": row.label, "code": row.statement.code}
        if row is not None and row.reference:
            ratio = samples / times[row.reference]
            entry |= {"reference": row.reference, "ratio": ratio.median, "ratio_iqr": ratio.spread}
        results.append(entry)
    targets = [vars(target) for target in found]
    document = {"machine": described, "rounds": rounds, "results": results, "targets": targets}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
