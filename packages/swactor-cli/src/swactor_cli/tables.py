"""Tables that can be read at any width: whole, else folded between words, else turned on their side.

Knows cells and their widths, not what they say. No word of a cell is cut and no cell left out: of a table too
wide for that each row becomes a column beside the names of the fields, as many rows side by side as fit and
one at least. Rich takes a tenth of a second to import, so whoever has no table does not import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.table import Table

GAP = 2
Row = Sequence[str]


def readable(title: str, columns: Row, rows: Sequence[Row], *, width: int) -> list[Table]:
    """The table in `width` cells of a terminal, or several that have its rows in order; those may be wider
    where one row is."""
    widths = _folded([columns, *rows], width)
    if widths is not None:
        return [_upright(title, columns, rows, widths)]
    groups: list[list[Row]] = []
    for row in rows:
        if groups and _total(_widths(_turned([columns, *groups[-1], row]))) <= width:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_on_its_side("" if index else title, columns, group) for index, group in enumerate(groups)]


def _turned(rows: Iterable[Row]) -> list[Row]:
    return list(zip(*rows, strict=True))


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)


def _widths(rows: Iterable[Row], of: Callable[[str], int] = cell_len) -> list[int]:
    return [max(map(of, column)) for column in _turned(rows)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _folded(rows: Sequence[Row], width: int) -> list[int] | None:
    """Widths of columns that fit and cut no word, the widest taken from first; None where there are none."""
    widths, least = _widths(rows), _widths(rows, _longest_word)
    while _total(widths) > width:
        able = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not able:
            return None
        widths[max(able, key=lambda index: widths[index])] -= 1
    return widths


def _upright(title: str, columns: Row, rows: Sequence[Row], widths: Sequence[int]) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _on_its_side(title: str, columns: Row, rows: Sequence[Row]) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    for _ in rows:
        table.add_column(no_wrap=True)
    for cells in _turned([columns, *rows]):
        table.add_row(*cells)
    return table
