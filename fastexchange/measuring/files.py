"""Runs kept as JSON: the machine they were made on, and every row's samples.

A document is ``{"machine": …, "rounds": n, "results": [row, …]}``, a row ``{"key", "median_ns", "iqr_ns", "samples_ns"}`` and,
where it has them, ``label``, ``code`` (the statement that was timed) and ``reference``, ``ratio``, ``ratio_iqr`` (to the row of
that key, computed for each round); and ``"measurable": false`` if the median means nothing. Times are nanoseconds per call, the
loop around the call subtracted. A row of another unit has its name in place of ``ns``: ``median_bytes``, ``iqr_bytes``,
``samples_bytes``.
"""

import importlib.metadata
import json
import math
import os
import platform
from datetime import datetime, timezone
from pathlib import Path

from ..version import __version__
from .timing import Samples

__all__ = ["cpu_model", "headline", "machine", "read", "result", "unit_of", "write"]

_PACKAGES = ("numba", "llvmlite", "numpy", "torch", "apache-tvm-ffi", "nanobind", "cffi")


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
    """The machine and the time of a run, by which to judge whether two runs may be compared."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {"fastexchange": __version__, **{name: _version(name) for name in _PACKAGES}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def headline(described: dict) -> str:
    """:func:`machine`'s result as one line."""
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items() if version)
    return f"{described['cpu']}, {described['cores']} cores; Python {described['python']}; {packages}"


def result(
    key: str,
    samples: Samples,
    label: str = "",
    code: str = "",
    reference: tuple[str, Samples] | None = None,
    unit: str = "ns",
) -> dict:
    """Make a row of a document. `reference`: the key and the samples of the row with which this one is compared."""
    row: dict = {
        "key": key,
        f"median_{unit}": samples.median,
        f"iqr_{unit}": samples.spread,
        f"samples_{unit}": samples.values.round(3).tolist(),
    }
    if not samples.is_measurable():
        row["measurable"] = False
    row |= {name: text for name, text in (("label", label), ("code", code)) if text}
    if reference:
        ratio = samples / reference[1]
        row |= {"reference": reference[0], "ratio": ratio.median, "ratio_iqr": ratio.spread}
    return row


def write(path: Path, described: dict, rounds: int, results: list[dict], **more) -> None:
    """Write a document, and make its folders. `more`: further fields besides the results."""
    document = {"machine": described, "rounds": rounds, "results": results, **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict:
    """Read a document that :func:`write` has written, and check its fields and that its rows' keys differ.

    Raises OSError if the file cannot be read; ValueError, with a message that begins with `path`, for any other content.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path} is not JSON: {error}") from error
    if wrong := _not_a_document(document):
        raise ValueError(f"{path} is not a result file of `bench --json` or `perf/run.py --json`: {wrong}")
    return document


def unit_of(row: dict) -> str:
    """The unit of a row's figures, from the name of its ``median_…``: ``ns``, for example."""
    return next((name.removeprefix("median_") for name in row if name.startswith("median_")), "ns")


def _not_a_document(document) -> str:
    """Why `document` is not a result document; "" if it is one."""
    if not isinstance(document, dict):
        return f"it holds {_kind(document)}, not an object"
    for name, kind in (("machine", dict), ("results", list)):
        if not isinstance(document.get(name), kind):
            return f"its {name!r} is {_kind(document.get(name))}"
    seen = set()
    for number, row in enumerate(document["results"]):
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            return f"row {number} of its results has no 'key'"
        if row["key"] in seen:
            return f"two rows have the key {row['key']!r}"
        seen.add(row["key"])
        unit = unit_of(row)
        for name in (f"median_{unit}", f"iqr_{unit}"):
            if not _is_number(row.get(name)):
                return f"the {name!r} of row {row['key']!r} is no number"
        if "reference" in row and not (isinstance(row["reference"], str) and all(map(_is_number, map(row.get, _RATIO)))):
            return f"row {row['key']!r} has a 'reference', but not a 'ratio' and a 'ratio_iqr' to it"
    return ""


_RATIO = ("ratio", "ratio_iqr")


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "missing or null"}
    return names.get(type(value), "a number or a boolean")


def _is_number(value) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int larger than any float
        return False
