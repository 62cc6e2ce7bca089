"""Truth tables: every kind of a framework's tensors, every way to its memory, and what the consumer gets.

``python tests/truth_table.py`` prints the tables of ``docs/explanation/truth-tables.md``; ``--write`` puts them there. Many
cells read what is not there, so all are filled by forks of a process that has imported everything: one for every row or for
all, another after a crash.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import itertools
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from forked import Stage
from oracle import seen_type

sys.path[:0] = [str(Path(__file__).parents[1])]

from fastexchange import fast_args  # noqa: E402

tvm_ffi = None
with contextlib.suppress(ImportError):
    import tvm_ffi
with contextlib.suppress(ImportError):
    import ml_dtypes  # noqa: F401  with which the narrow floats are known

PAGE = Path(__file__).parents[1] / "docs/explanation/truth-tables.md"
MODULES = "torch_truth", "jax_truth"
"""Each has a ``TABLE``."""

RIGHT, AS_BITS, COPIES, NO_TENSOR, TRACED = "right", "right, as bits", "copies", "-", "traced"
LOST, WRONG, CRASH, HANGS = "**gradient lost**", "**silently wrong**", "**crash**", "**hangs**"


# ---- kinds of tensors ----------------------------------------------------------------------------------------------
Look = Callable[[Any], None]


@dataclass(frozen=True)
class Row:
    """A kind of tensor. ``give`` makes one and hands it to a function, in the mode or transform that the kind is about."""

    name: str
    give: Callable[[Look], None]
    value: Callable[[Any], list] | None
    """The elements that a consumer has to get; None where the memory does not hold a value, and only a refusal is right."""
    bits: Callable[[Any], list] | None = None
    """The same as integers, for dtypes that NumPy lacks."""
    is_watched: bool = False
    """Whether autograd has to learn of what happens to it."""
    needs: str | None = None
    """A package that decides what is refused."""

    @property
    def title(self) -> str:
        return self.name if self.needs is None else f"{self.name} ({_version(self.needs) or f'without {self.needs}'})"


def _version(package: str) -> str | None:
    """Name and version of a package that is installed. (PyTorch's build, as in ``+cpu``, is left out.)"""
    try:
        return f"{package} {importlib.metadata.version(package).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return None


def row(name: str, make: Callable[[], Any], value, **more) -> Row:
    return Row(name, lambda look: look(make()), value, **more)


def rows(makers: dict[str, Callable[[], Any]], value, **more) -> list[Row]:
    return [row(name, make, value, **more) for name, make in makers.items()]


# ---- consumers -----------------------------------------------------------------------------------------------------
class Seen(NamedTuple):
    """What a consumer got: where the first element lies, the elements, and whether they are unsigned, or bytes with a sign."""

    address: int
    elements: list
    is_bits: bool


Way = Callable[[Any], Seen | None]


@dataclass(frozen=True)
class Column:
    """A consumer, and the ways in which it looks at a tensor."""

    name: str
    ways: tuple[Way, ...]
    """Each looks twice. None: it got what stands for a tensor while a function is traced, and so is its result."""
    package: str | None = None
    why_not: str | None = None
    """Why the consumer cannot be asked."""

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.name, self.package and (_version(self.package) or self.package)]))


def seen_in(array: np.ndarray, address: int | None = None) -> Seen:
    address = array.ctypes.data if address is None else address
    return Seen(address, array.tolist(), array.dtype.kind == "u" or array.dtype == np.int8)


def read(address: int, code: int, bits: int, lanes: int, shape: list[int], strides: list[int]) -> Seen:
    """Read elements as C code does that has been told where they are, and has not asked for more."""
    kinds = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
    kind, size = kinds.get(code, "u"), bits * lanes // 8
    dtype = {("b", 1): "?", ("c", 4): "u4"}.get((kind, size), f"{kind}{size}")

    def nested(at: int, axis: int):
        if axis < len(shape):
            return [nested(at + i * strides[axis] * size, axis + 1) for i in range(shape[axis])]
        return np.frombuffer(ctypes.string_at(at, size), dtype)[0].item()

    return Seen(address, nested(address, 0), np.dtype(dtype).kind == "u" or np.dtype(dtype) == np.int8)


def by_tvm_ffi(tensor) -> Seen:
    seen = []

    def reader(view) -> None:
        if view.device.dlpack_device_type() != 1:
            raise BufferError("not a CPU's memory")
        dtype = view.dtype
        seen.append(read(view.data_ptr(), int(dtype.type_code), dtype.bits, dtype.lanes, list(view.shape), list(view.strides)))

    tvm_ffi.convert(reader)(tensor)
    return seen[0]


def _address_and_elements(x):
    return x.ctypes.data, x.copy()


def _call(kernel, x) -> Seen:
    address, elements = kernel(x)
    return seen_in(elements, int(address))


def use(tensor, array: np.ndarray) -> None:
    """Call the kernels that are not to be new ones."""
    for kernel in _USED * 4:
        kernel(tensor)
    _njit_kernel(array)


_AS_ARRAYS = functools.partial(fast_args, returns=np.ndarray, cache=True)
_njit_kernel, _NEW = numba.njit(_address_and_elements), _AS_ARRAYS(_address_and_elements)
_USED = [_AS_ARRAYS(_address_and_elements), _AS_ARRAYS(_address_and_elements, nogil=True)]

DLPACK = Column("`np.from_dlpack`", (lambda tensor: seen_in(np.from_dlpack(tensor)),), "numpy")
TVM_FFI = Column("", (by_tvm_ffi,), "apache-tvm-ffi", None if tvm_ffi else "not installed")
FAST_ARGS = Column("`@fast_args`", tuple(functools.partial(_call, kernel) for kernel in (_NEW, *_USED)))


def njit_on(expression: str, array_of: Callable[[Any], np.ndarray], package: str) -> Column:
    """A kernel of plain ``@njit``, called with an array that the framework makes."""
    return Column(f"`@njit` on `{expression}`", (lambda tensor: _call(_njit_kernel, array_of(tensor)),), package)


@dataclass(frozen=True)
class Table:
    """All of a framework. The processes that are forked import `module`, where it is ``TABLE``."""

    module: str
    package: str
    rows: list[Row]
    columns: list[Column]
    address_of: Callable[[Any], int | None]
    """Where a tensor's first element lies, asked in a way that changes nothing; None if there is no such way."""
    prepare: Callable[[], None] = lambda: None
    """What the process does that is forked."""
    begin: Callable[[], None] = lambda: None
    """What its forks do first."""
    build: Callable[[Path], None] = lambda folder: None
    """Puts what consumers need into a folder of modules."""
    is_filled_at_once: bool = False
    """Whether one process fills all rows; else each has its own."""
    environment: dict[str, str] = field(default_factory=dict)


# ---- one cell ------------------------------------------------------------------------------------------------------
def judge(row: Row, look: Way, tensor, address: int | None, value: list | None, bits: list | None) -> str:
    try:
        seen = look(tensor)
    except Exception as error:
        return f"refused ({seen_type(error).__name__})"
    if seen is None:
        return TRACED
    if value is not None and seen.elements == value and not (bits is not None and seen.is_bits):
        outcome = RIGHT
    elif bits is not None and seen.is_bits and seen.elements == bits:
        outcome = AS_BITS
    else:
        return WRONG
    if row.is_watched:
        return LOST
    return COPIES if address not in (None, seen.address) and np.size(seen.elements) else outcome


def cell(row: Row, column: Column, address_of: Callable[[Any], int | None]) -> str:
    """The outcome, found in this process, which may not survive it."""
    wanted: list[tuple[list | None, list | None]] = []
    found: list[str] = []

    def look(way, tensor) -> None:
        address = address_of(tensor)
        found.extend(judge(row, way, tensor, address, *wanted[0]) for _ in range(2))

    try:
        row.give(lambda tensor: None)
    except Exception:
        return NO_TENSOR
    row.give(lambda tensor: wanted.append((row.value and row.value(tensor), row.bits and row.bits(tensor))))
    for way in column.ways:
        row.give(functools.partial(look, way))
    return found[0] if len(set(found)) == 1 else "**differs**: " + ", ".join(found)


# ---- processes of their own ----------------------------------------------------------------------------------------
SECONDS = 60  # for one process
_SAID = "outcome: "
Cells = list[tuple[int, int]]
"""Numbers of rows and columns."""


def stage_of(table: Table, prelude: str = "") -> Stage:
    """The process that is forked. `prelude`: what it runs first."""
    imports = f"from truth_table import fill\nfrom {table.module} import TABLE\n"
    return Stage(f"{prelude}\n{imports}TABLE.prepare()\n", **table.environment)


def fill(table: Table, cells: Cells) -> None:
    """Print the outcomes of cells, in a process that may die of one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # tvm-ffi's handler takes seconds to say where it was
    table.begin()
    for row, column in cells:
        try:
            outcome = cell(table.rows[row], table.columns[column], table.address_of)
        except BaseException as error:
            outcome = f"**no outcome**: {type(error).__name__}: {error}; {error.__cause__!r}"
        print("\n" + _SAID + json.dumps(outcome), flush=True)


def filled(stage: Stage, cells: Cells) -> list[str]:
    """The outcomes of cells. The one in which a process died begins the next process: a crash is never that of another."""
    found: list[str] = []
    while len(found) < len(cells):
        ended = stage.run(f"fill(TABLE, {cells[len(found) :]})", seconds=SECONDS, exits=False)
        said = [json.loads(line.removeprefix(_SAID)) for line in ended.stdout.splitlines() if line.startswith(_SAID)]
        found += said
        if ended.code == -signal.SIGALRM:
            found.append(HANGS)
        elif not said:
            found.append(CRASH)
    return found


Outcomes = dict[str, dict[str, str]]
"""By title of the row, by title of the column."""


def outcomes(table: Table, columns: Sequence[Column] = ()) -> Outcomes:
    """Every cell of the table, or of these of its columns, filled anew."""
    asked = [each for each, column in enumerate(table.columns) if column.why_not is None and column in (columns or table.columns)]
    parts = [[(row, column) for column in asked] for row in range(len(table.rows))]
    if table.is_filled_at_once:
        parts = [[*itertools.chain(*parts)]]
    with tempfile.TemporaryDirectory() as folder:
        if not columns:
            table.build(Path(folder))
        with stage_of(table, f"import sys; sys.path.append({folder!r})") as stage:
            said = iter([outcome for part in parts for outcome in filled(stage, part)])
    return {row.title: {column.title: column.why_not or next(said) for column in columns or table.columns} for row in table.rows}


# ---- Markdown ------------------------------------------------------------------------------------------------------
def markdown(found: Outcomes) -> str:
    """The table in Markdown. What its words mean is said above it."""
    columns = list(next(iter(found.values())))
    lines = ["| tensor | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(cells.values()) + " |" for row, cells in found.items()]
    return "\n".join(lines) + "\n"


def committed(table: Table) -> tuple[str, Outcomes, str]:
    """What the page says before the table, in it and after it."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {table.module}: begin -->\n")
    text, end, after = rest.partition(f"<!-- {table.module}: end -->\n")
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = lines or [[], []]
    return before + begin, {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}, end + after


def check_committed(table: Table, found: Outcomes) -> None:
    """The page's table is the one that is made, as far as its columns are filled and the same packages are installed."""
    said, again = committed(table)[1], "python tests/truth_table.py --write"
    in_it, filled = ({*next(iter(cells.values()))} for cells in (said, found))
    in_both = [column.title for column in table.columns if column.title in in_it & filled and not column.why_not]
    if not any(column.title in in_it for column in table.columns if column.package == table.package):
        pytest.skip(f"the table is of another version of {table.package}")
    rows = [row.title for row in table.rows if row.title in said]
    assert len(said) == len(table.rows) and {row.title for row in table.rows if row.needs is None} <= {*rows}, again
    both = [(row, column, said[row][column], found[row][column]) for row in rows for column in in_both]
    differing = [cell for cell in both if cell[2] not in (NO_TENSOR, cell[3])]  # pinned memory can be made elsewhere
    assert not differing, again


if __name__ == "__main__":
    for module in MODULES:
        each = importlib.import_module(module).TABLE
        made = markdown(outcomes(each))
        print(made)
        if "--write" in sys.argv[1:]:
            if "not installed" in made:
                sys.exit("the page is left as it is: not every consumer is installed (nanobind, apache-tvm-ffi)")
            before, _, after = committed(each)
            PAGE.write_text(before + made + after)
