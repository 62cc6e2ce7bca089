"""``compare``: compare two result files row by row and print which rows moved beyond noise.

Noise has several sources:

1. A call's time varies within a run. The interquartile range of its samples shows how much.
2. The whole machine gets faster or slower between two runs. This *drift* is estimated from the *yardsticks*, rows that run none
   of this package's code, and divided out.
3. The addresses of code and data in a process shift single rows by some percent. No sample of that process shows this. The
   *control* (the same call timed as two rows) and the spread of the yardsticks show a part; the threshold must cover the rest.

The drift may differ between rows. So a row whose reference is a yardstick is also judged by its ratio to that reference, taken
within a run. The yardstick may have been shifted, too, so both readings must agree.

A row whose spread exceeds its median in either file is not compared.

A row is a yardstick if the last part of its key is one of :data:`YARDSTICKS`. All other rows,
except controls, are this package's own.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..measuring import files
from ..measuring.tables import Row, show
from ..measuring.timing import is_measurable
from . import CommandError

__all__ = ["YARDSTICKS", "Comparison", "Move", "compare", "run"]

YARDSTICKS = frozenset(
    {"empty", "noargs", "c", "managed", "njit", "views", "from_dlpack", "tvm", "export", "device", "own"}
)
"""Last parts of the keys of rows, in perf/ and in ``bench``, whose calls run no code of this package."""
_CONTROL = "control/"
_FEWEST_YARDSTICKS = 3


class Move(NamedTuple):
    """A row that is in both files. Figures are nanoseconds per call, or bytes."""

    key: str
    old: float
    new: float
    without_drift: float
    """new / old, divided by the drift."""
    to_reference: float | None
    """new / old of the ratio to its reference; None if the reference is not a yardstick."""
    noise: float
    """A change must be larger than this: 0.05 is 5 %."""

    @property
    def is_own(self) -> bool:
        """Whether the row times this package's code, and is not a control."""
        return not _is_yardstick(self.key) and not self.key.startswith(_CONTROL)

    @property
    def direction(self) -> int:
        """1 if the row got slower beyond noise, -1 if faster, else 0."""
        readings = [self.without_drift, *([] if self.to_reference is None else [self.to_reference])]
        if all(reading > 1 + self.noise for reading in readings):
            return 1
        return -1 if all(reading * (1 + self.noise) < 1 for reading in readings) else 0


class Comparison(NamedTuple):
    """The rows of two documents, compared."""

    moves: list[Move]
    drift: float
    """The median new / old of the yardsticks; 1 if there are too few yardsticks."""
    wander: float
    """Nine of ten yardsticks changed by at most this, without the drift: 0.05 is 5 %. 0 if there are too few yardsticks."""
    yardsticks: int
    """The number of yardsticks."""
    floor: float
    """The least noise of every row."""
    incomparable: list[str]
    """Keys of rows in both documents that are not measurable, or have a median of 0, in one of them."""
    only_old: list[str]
    only_new: list[str]


def _is_yardstick(key: str) -> bool:
    return key.rpartition("/")[2] in YARDSTICKS and not key.startswith(_CONTROL)


def _median(row: dict) -> float:
    return row[f"median_{files.unit_of(row)}"]


def _spread(row: dict) -> float:
    return row[f"iqr_{files.unit_of(row)}"]


def _is_measurable(row: dict) -> bool:
    """Whether a row's median is measurable and positive."""
    return _median(row) > 0 and is_measurable(_median(row), _spread(row))


def _is_timed(row: dict) -> bool:
    return files.unit_of(row) == "ns"


def _control(rows: dict[str, dict]) -> float:
    """The largest difference of any control: the same call, timed as two rows of a run."""
    first = [key for key in rows if key.startswith(_CONTROL) and key.endswith("/a")]
    pairs = [(rows[key], rows[key[:-1] + "b"]) for key in first if key[:-1] + "b" in rows]
    ratios = [b.get("ratio", b["median_ns"] / a["median_ns"]) for a, b in pairs if min(a["median_ns"], b["median_ns"]) > 0]
    return max((max(ratio, 1 / ratio) - 1 for ratio in ratios if ratio > 0), default=0.0)


def _ratio_to_reference(old: dict, new: dict) -> float | None:
    """new / old of a row's ratio to its reference; None if the reference is not the same yardstick in both."""
    reference = old.get("reference")
    if reference is None or reference != new.get("reference") or not _is_yardstick(reference):
        return None
    are_measurable = all(row["ratio"] > 0 and is_measurable(row["ratio"], row["ratio_iqr"]) for row in (old, new))
    return new["ratio"] / old["ratio"] if are_measurable else None


def compare(old: dict, new: dict, threshold: float = 0.05) -> Comparison:
    """Compare two documents of ``measuring.files``. `threshold`: smaller changes are noise; 0.05 is 5 %."""
    before, after = ({row["key"]: row for row in document["results"]} for document in (old, new))
    common = [key for key in before if key in after]
    usable = [key for key in common if _is_measurable(before[key]) and _is_measurable(after[key])]
    change = {key: _median(after[key]) / _median(before[key]) for key in usable}
    yardsticks = [change[key] for key in usable if _is_yardstick(key) and _is_timed(before[key])]
    drift, wander = 1.0, 0.0
    if len(yardsticks) >= _FEWEST_YARDSTICKS:
        drift = median(yardsticks)
        wandered = sorted(max(ratio / drift, drift / ratio) - 1 for ratio in yardsticks)
        wander = wandered[9 * len(wandered) // 10 - 1]
    floor = max(threshold, wander, _control(before), _control(after))
    moves = []
    for key in usable:
        a, b = before[key], after[key]
        own = (_spread(a) / _median(a) + _spread(b) / _median(b)) / 2
        drifted, least = (drift, floor) if _is_timed(a) else (1.0, threshold)  # memory does not get slower
        moves.append(Move(key, _median(a), _median(b), change[key] / drifted, _ratio_to_reference(a, b), max(least, own)))
    return Comparison(
        moves, drift, wander, len(yardsticks), floor, [key for key in common if key not in change],
        [key for key in before if key not in after], [key for key in after if key not in before],
    )  # fmt: skip


def _differences(old: dict, new: dict) -> list[str]:
    """Return sentences that name the differences of two machines' descriptions."""
    facts = [(name, old.get(name), new.get(name)) for name in ("cpu", "cores", "system", "python")]
    packages = [found if isinstance(found := machine.get("packages"), dict) else {} for machine in (old, new)]
    names = dict.fromkeys([*packages[0], *packages[1]])
    facts += [(name, *(found.get(name) for found in packages)) for name in names]
    return [f"{name} differs: {was or 'none'}, then {now or 'none'}" for name, was, now in facts if was != now]


def _time(ns: float) -> str:
    return f"{ns:.1f}" if ns < 10_000 else f"{ns:.4g}" if ns < 1e15 else f"{ns:.3e}"


def _row(move: Move) -> Row:
    relative = "" if move.to_reference is None else f"{move.to_reference:.3f}"
    times = (_time(move.old), _time(move.new), f"{move.new / move.old:.3f}")
    cells = (move.key, *times, f"{move.without_drift:.3f}", relative, f"{100 * move.noise:.1f} %")
    return Row(cells, {1: "red", 0: "", -1: "green"}[move.direction])


def _show(found: Comparison) -> None:
    by_direction = {d: [move for move in found.moves if move.direction == d] for d in (0, -1, 1)}
    by_direction[-1].sort(key=lambda move: -move.without_drift)
    by_direction[1].sort(key=lambda move: move.without_drift)
    lines: list[Row | str] = []
    for direction, heading in ((0, "within noise"), (-1, "faster beyond noise"), (1, "slower beyond noise")):
        if by_direction[direction]:
            lines += [heading, *map(_row, by_direction[direction])]
    show(("", "old", "new", "new/old", "drift out", "to reference", "noise"), lines)
    print()
    left_out = {"only in OLD": found.only_old, "only in NEW": found.only_new, "not measurable in one of them": found.incomparable}
    for what, keys in left_out.items():
        if keys:
            print(f"{what}: {', '.join(keys)}")
    if found.yardsticks >= _FEWEST_YARDSTICKS:
        print(f"Drift: {found.drift:.3f} x, the median of {found.yardsticks} rows of other code; it is divided out.")
    else:
        print(f"Drift: not known, because only {found.yardsticks} rows are of other code; nothing is divided out.")
    print("Nanoseconds; memory in bytes.")
    print(f"Noise: {100 * found.floor:.1f} % at least, the largest of threshold, control and yardsticks (see --help).")

    def counted(direction: int, word: str) -> str:
        others = sum(not move.is_own for move in by_direction[direction])
        return f"{len(by_direction[direction])} {word}" + (f" ({others} of them yardsticks or controls)" if others else "")

    within = len(by_direction[0])
    print(f"{len(found.moves)} rows: {counted(1, 'slower')}, {counted(-1, 'faster')}, {within} within noise.")


def _read(path: Path) -> dict:
    try:
        return files.read(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error


def run(options: argparse.Namespace) -> int:
    """Compare the files and print the result. The exit code is 1 if ``--strict`` is given and a row of our own got slower."""
    old, new = _read(options.old), _read(options.new)
    found = compare(old, new, options.threshold / 100)
    if not found.moves:
        raise CommandError(f"{options.old} and {options.new} have no row in common")
    for sentence in _differences(old["machine"], new["machine"]):
        print(f"warning: {sentence}")
    _show(found)
    return int(options.strict and any(move.direction > 0 and move.is_own for move in found.moves))
