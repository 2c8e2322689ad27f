"""Tables as text: as wide as they need, or fitted to a terminal without a break inside a word."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mgpu.words import wrapped

_GAP = 3  # blanks between two columns
_PAIR = 2  # columns of a table of names and values


class Table:
    """Rows of text under the names of their columns. `whole`: columns whose cells are not broken between words."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        whole: Collection[str] = (),
        numbers: Collection[str] = (),
    ) -> None:
        """`numbers`: columns whose cells end below each other."""
        self.columns, self.rows, self._whole = tuple(columns), [tuple(row) for row in rows], whole
        self.numbers = numbers

    def fitting(self, width: int, spare: Sequence[str]) -> Table:
        """The same, without as many of the `spare` columns as it takes to fit: first those named first. Where none of
        that helps, rows one below the other have room for all."""
        kept = self
        for name in spare:
            if kept.least <= width:
                break
            kept = kept._without(name)
        return kept if kept.least <= width else self

    def lines(self, width: int | None = None) -> list[str]:
        """The table, with a rule below the names. None: every cell on one line. A table of several columns that does
        not fit has its rows one below the other."""
        if width is not None and self.least > width and len(self.columns) > _PAIR:
            return self._records()
        widths = self._widths(width)
        shown = [self._row(row, widths) for row in (self.columns, *self.rows)]
        rule = "─" * max(len(line) for row in shown for line in row)
        return [*shown[0], rule if width is None else rule[:width], *(line for row in shown[1:] for line in row)]

    @property
    def least(self) -> int:
        """The characters that it takes at least to break no word."""
        return sum(self._longest_words()) + _GAP * (len(self.columns) - 1)

    def _longest_words(self) -> list[int]:
        parts = [[[cell] if cells[0] in self._whole else cell.split() for cell in cells] for cells in self._cells()]
        return [max(len(word) for words in cells for word in words or [""]) for cells in parts]

    def _cells(self) -> list[tuple[str, ...]]:
        return list(zip(self.columns, *self.rows, strict=True))

    def _without(self, name: str) -> Table:
        place = self.columns.index(name)
        columns, *rows = (row[:place] + row[place + 1 :] for row in (self.columns, *self.rows))
        return Table(columns, rows, self._whole, self.numbers)

    def _widths(self, width: int | None) -> list[int]:
        """Of each column: what it needs; where there is less room, what is left goes to those that lack most."""
        wanted = [max(map(len, cells)) for cells in self._cells()]
        if width is None:
            return wanted
        room = width - _GAP * (len(wanted) - 1)
        if len(wanted) == _PAIR:  # a path or an address that is too long goes over the edge, alone
            return [wanted[0], max(1, min(wanted[1], room - wanted[0]))]
        widths = [min(pair) for pair in zip(self._longest_words(), wanted, strict=True)]
        while sum(widths) < min(room, sum(wanted)):
            lacks = [want - has for want, has in zip(wanted, widths, strict=True)]
            widths[lacks.index(max(lacks))] += 1
        return widths

    def _row(self, row: Sequence[str], widths: list[int]) -> list[str]:
        cells = [wrapped(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            sides = (">" if name in self.numbers else "<" for name in self.columns)
            padded = (f"{part:{side}{width}}" for part, side, width in zip(parts, sides, widths, strict=True))
            lines.append((" " * _GAP).join(padded).rstrip())
        return lines

    def _records(self) -> list[str]:
        names = [f"  {name}" for name in self.columns[1:]]
        wide = max(map(len, names)) + _GAP
        lines = []
        for first, *cells in self.rows:
            lines.append(f"{self.columns[0]} {first}".strip())
            lines += [f"{name:{wide}}{cell}" for name, cell in zip(names, cells, strict=True) if cell]
        return lines
