"""Tables of records: text, HTML, JSON values and pandas. Knows no tensors and no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from dcp_zarr.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd

Record = TypeVar("Record")

_SHOWN_ROWS = 60


class Table(Sequence[Record], Generic[Record]):
    """Records of one dataclass, as rows; notebooks draw it.

    Parameters
    ----------
    kind
        The dataclass: its fields are the columns.
    records
        The rows.
    title
        First line.
    """

    def __init__(self, kind: type[Any], records: Iterable[Record], title: str = "") -> None:
        self._columns = [column.name for column in fields(kind)]
        self._records = list(records)
        self._title = title

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return a row, or some."""
        return self._records[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._records)

    def where(self, wanted: Callable[[Record], bool]) -> Table[Record]:
        """Return the rows for which a function says so."""
        return self._with(filter(wanted, self._records))

    def _with(self, records: Iterable[Record]) -> Table[Record]:
        made: Table[Record] = object.__new__(Table)
        made._columns, made._title, made._records = self._columns, self._title, list(records)
        return made

    def sorted_by(self, column: str, *, descending: bool = True) -> Table[Record]:
        """Return the rows by the numbers in a column; those without one come last.

        Raises
        ------
        OptionError
            If there is no such column.
        """
        if column not in self._columns:
            known = ", ".join(self._columns)
            raise OptionError(f"There is no column {column!r}; there are {known}.")

        def key(record: Record) -> tuple[bool, Any]:
            value = getattr(record, column)
            missing = value is None or value != value
            return missing, 0 if missing else -value if descending else value

        return self._with(sorted(self._records, key=key))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts of what JSON holds."""
        return [asdict(record) for record in self._records]  # type: ignore[call-overload]

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame, which needs pandas."""
        import pandas as pd  # noqa: PLC0415

        return pd.DataFrame(self.to_dicts(), columns=self._columns)

    def to_text(self, max_rows: int | None = None) -> str:
        """Return rows as lines of text: the first `max_rows`, or all."""
        lines = [self._columns, *self._cells(max_rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        drawn = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self._title, *drawn] if self._title else drawn)

    def _cells(self, max_rows: int | None) -> list[list[str]]:
        return [
            [_text(getattr(record, column)) for column in self._columns]
            for record in self._records[:max_rows]
        ]

    def _rest(self) -> str:
        hidden = len(self) - _SHOWN_ROWS
        return f"… {hidden} more rows: to_text() and to_pandas() have all" if hidden > 0 else ""

    def __repr__(self) -> str:
        """Draw the first rows as text."""
        return "\n".join(filter(None, [self.to_text(_SHOWN_ROWS), self._rest()]))

    def _repr_html_(self) -> str:
        """Draw the first rows as HTML; every value is escaped."""

        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._cells(_SHOWN_ROWS))
        caption = f"<caption>{escape(self._title)}</caption>" if self._title else ""
        head = f"<table>{caption}<thead>{row(self._columns, 'th')}</thead>"
        return f"{head}<tbody>{body}</tbody></table><p>{escape(self._rest())}</p>"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return str(list(value))
    return "" if value is None else str(value)
