"""Print tables: by rich if it is installed and the output is a terminal, else as aligned plain text.

The environment variable ``FORCE_COLOR`` asks for rich's tables in a pipe, too. ``NO_COLOR`` removes their colours.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

__all__ = ["Row", "plain", "progress", "show"]


class Row(NamedTuple):
    """A line of a table. A cell may have several lines."""

    cells: tuple[str, ...]
    style: str = ""
    """A style of rich for the whole row. Plain text has none."""


def show(heads: Sequence[str], lines: Iterable[Row | str], left: Sequence[int] = (0,)) -> None:
    """Print a table. A string in `lines` is the heading of the rows below it. The columns `left` are aligned left."""
    lines = list(lines)
    if not _show_rich(heads, lines, left):
        print(plain(heads, lines, left))


def plain(heads: Sequence[str], lines: Sequence[Row | str], left: Sequence[int] = (0,)) -> str:
    """Return the table as text. Rows below a heading are indented. Empty `heads` are left out."""
    indent = "  " if any(isinstance(line, str) for line in lines) else ""
    rows = [line.cells for line in lines if isinstance(line, Row)]
    split = [[cell.split("\n") for cell in cells] for cells in (tuple(heads), *((indent + r[0], *r[1:]) for r in rows))]
    widths = [max(len(part) for cells in split for part in cells[i]) for i in range(len(heads))]

    def text(cells: list[list[str]]) -> str:
        printed = []
        for number, parts in enumerate(zip_longest(*cells, fillvalue="")):
            parts = (indent + parts[0], *parts[1:]) if number and parts[0] else parts
            sized = enumerate(zip(parts, widths, strict=True))
            padded = [part.ljust(width) if i in left else part.rjust(width) for i, (part, width) in sized]
            printed.append("  ".join(padded).rstrip())
        return "\n".join(printed)

    head, *texts = map(text, split)
    printed = [head] if head else []
    following = iter(texts)
    for line in lines:
        if isinstance(line, str):
            printed += ["", line] if printed else [line]
        else:
            printed.append(next(following))
    return "\n".join(printed)


def _show_rich(heads: Sequence[str], lines: Sequence[Row | str], left: Sequence[int]) -> bool:
    """Print the table by rich. Returns False, and prints nothing, if rich is not wanted, not installed or broken."""
    if sys.stdout is None or not (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")):
        return False
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:
        return False
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    table = Table(box=box.SIMPLE_HEAD, show_header=any(heads), pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i in left else "right", overflow="fold")
    for number, line in enumerate(lines):
        if isinstance(line, str):
            if number:
                table.add_section()
            table.add_row(Text(line, "bold"))
        else:
            table.add_row(*[Text(cell) for cell in line.cells], style=line.style)
    console.print(table)
    return True


def progress(text: str) -> None:
    """Show `text` on the terminal in place of the last one. Does nothing if stderr is not a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def stage(text: str) -> None:
    """:func:`progress` at the beginning of something long: if stderr is not a terminal, this prints a line."""
    if sys.stderr is not None and not sys.stderr.isatty():
        print(f"fastexchange: {text}", file=sys.stderr, flush=True)
    progress(text)
