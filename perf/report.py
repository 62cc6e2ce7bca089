"""What a run prints and writes: tables, and JSON, which is also read back."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fastexchange.measuring import figures, files, tables
from fastexchange.measuring.timing import Samples


def table(heads: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """An aligned table in plain text; the columns `left` are aligned left, the others right."""
    return tables.plain(heads, [tables.Row(tuple(line)) for line in lines], left)


def cells(samples: Samples, digits: int = 1) -> tuple[str, str]:
    """The median and the interquartile range, for two columns."""
    form = f"{{:.{digits}f}}".format
    return figures.figure(samples, form), form(samples.spread)


def group_table(group, times: dict[str, Samples]) -> str:
    """A group's rows: time, spread, and the ratio to the row of the group that is named."""
    labels = {row.key: row.label for row in group.rows}
    lines = []
    for row in group.rows:
        samples = times[row.key]
        ratio = figures.ratio(samples / times[row.reference]) if row.reference else ""
        reference = f"x {labels[row.reference]}" if row.reference else ""
        lines.append((row.label, *cells(samples), ratio, reference))
    return f"{group.title}\n{table(('call', 'ns', 'IQR', 'ratio', ''), lines, left=(0, 4))}\n"


def unit_of(key: str) -> str:
    """The unit of the row `key`, as it stands in the JSON."""
    return "bytes" if key.startswith("memory/") else "ns"


def rows_table(title: str, labels: dict[str, str], times: dict[str, Samples], unit: str, of: float) -> str:
    """The rows of `labels` that were measured, in `unit`, which is `of` of the JSON's; nothing if none was."""
    lines = [(label, *cells(times[key] / of)) for key, label in labels.items() if key in times]
    return f"{title}\n{table(('what', unit, 'IQR'), lines)}\n" if lines else ""


def write_json(
    path: Path, described: dict, rounds: int, groups, labels, times: dict[str, Samples], found, seconds: dict, before=(),
) -> None:  # fmt: skip
    """Everything a run measured, in a file as ``fastexchange/measuring/files.py`` has them, with the targets.

    `labels`: of the rows that are in none of the `groups`. `seconds`: how long each section took. `before`: the results of
    an earlier call of the same run.
    """
    rows = {row.key: row for group in groups for row in group.rows}
    results = list(before)
    for key, samples in times.items():
        row = rows.get(key)
        if row is None:
            results.append(files.result(key, samples, labels.get(key, ""), unit=unit_of(key)))
        else:
            reference = (row.reference, times[row.reference]) if row.reference else None
            results.append(files.result(key, samples, row.label, row.statement.code, reference))
    files.write(path, described, rounds, results, targets=[vars(target) for target in found], seconds=seconds)


def read_json(path: Path) -> tuple[dict, dict[str, Samples]]:
    """What :func:`write_json` wrote: the machine, and by key the samples. Raises KeyError or ValueError for other files."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["machine"], samples_of(document["results"])


def samples_of(results) -> dict[str, Samples]:
    """By key the samples of results as :func:`write_json` writes them."""
    return {row["key"]: Samples(np.array(row[f"samples_{unit_of(row['key'])}"])) for row in results}


def write_table(description: str, table: Callable[[Path], str], page: Path, begin: str, end: str) -> int:
    """The program of a table of a run's file: print it, or with ``--write`` put it between two markers of a page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path, help="a run's file, in perf/results/")
    parser.add_argument("--write", action="store_true", help=f"put it into {page.parent.name}/{page.name}")
    options = parser.parse_args()
    made = table(options.file.resolve())
    if not options.write:
        print(made, end="")
        return 0
    head, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(head + begin + made + end + rest.split(end)[1], encoding="utf-8")
    return 0
