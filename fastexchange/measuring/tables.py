"""Tables for people: rich's where rich is installed and the output is a terminal, aligned plain text everywhere else.

Where rich is installed, the environment variable ``FORCE_COLOR`` asks for its tables in a pipe, too; ``NO_COLOR`` takes the
colours out of them.
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
    """A style of rich's, for the whole row: plain text has none."""


def show(heads: Sequence[str], lines: Iterable[Row | str], left: Sequence[int] = (0,)) -> None:
    """Print a table. A string among the `lines` is the heading of those below; the columns `left` are aligned left."""
    lines = list(lines)
    if not _show_rich(heads, lines, left):
        print(plain(heads, lines, left))


def plain(heads: Sequence[str], lines: Sequence[Row | str], left: Sequence[int] = (0,)) -> str:
    """The table as text: rows below a heading are indented. Without `heads`, if none of them says anything."""
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
    """Print the table by rich. False, and nothing printed, where rich is not wanted, not installed or broken."""
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
    """Shows `text` on the terminal in the place of what was shown before; nothing where there is no terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
