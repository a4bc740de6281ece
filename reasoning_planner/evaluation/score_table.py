"""Rows of planning cycles as a table, in memory and as a CSV file.

A row has the identity of the cycle, what was said and done, and the columns of `definitions.py`;
NaN stands for "not known". Reports, summaries and comparisons are made from these.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from ..errors import DataError
from .definitions import COLUMNS

TEXTS = ("bag", "bag_id", "status", "planner", "reasons", "text", "said", "done")
INTEGERS = ("stamp_ns", "arrival_ns")
NUMBERS = ("time_s", "speed_mps", "proposed", "accepted", *COLUMNS)


def empty_row(bag: tuple[str, str], stamp_ns: int, arrival_ns: int,
              time_s: float) -> dict[str, Any]:
    """The row of a cycle of which nothing more is known: no plan.

    Args:
        bag: its name in the run, and what tells it from other bags of that name.
        time_s: t0 since the odometry's first stamp.
    """
    return {**dict.fromkeys(TEXTS, ""), **dict.fromkeys(NUMBERS, np.nan),
            "bag": bag[0], "bag_id": bag[1], "stamp_ns": stamp_ns, "arrival_ns": arrival_ns,
            "time_s": time_s, "planned": 0.0, "model_planned": 0.0}


@dataclass(frozen=True)
class Table:
    """Rows by column: texts as lists, `INTEGERS` as int64, numbers as float64, all of one length.
    """

    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.columns["stamp_ns"])

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    def where(self, mask: np.ndarray) -> Table:
        """The rows of an (N,) mask."""
        rows = np.flatnonzero(mask)
        return Table({name: [values[i] for i in rows] if name in TEXTS else values[rows]
                      for name, values in self.columns.items()})


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of rows, in their order."""
    rows = list(rows)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in TEXTS}
    columns |= {name: np.array([row[name] for row in rows], dtype=np.int64) for name in INTEGERS}
    columns |= {name: np.array([row[name] for row in rows], dtype=np.float64)
                for name in NUMBERS}
    return Table(columns)


def joined(tables: Sequence[Table]) -> Table:
    """Tables one below the other."""
    return Table({name: sum((list(t[name]) for t in tables), []) if name in TEXTS
                  else np.concatenate([t[name] for t in tables]) for name in
                  (*TEXTS, *INTEGERS, *NUMBERS)})


def csv_of(table: Table) -> str:
    """The table as CSV text; numbers keep their exact value, what is not known is empty."""
    names = ("bag", *INTEGERS, "time_s", *TEXTS[1:], *NUMBERS[1:])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for i in range(len(table)):
        writer.writerow([_cell(table[name][i]) for name in names])
    return out.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, (str, np.integer)):
        return str(value)
    number = float(value)
    if not np.isfinite(number):
        return ""
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def read_csv(path: Path) -> Table:
    """The inverse of `csv_of`.

    Raises:
        DataError: the file is missing, lacks a column, or holds what is no number.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
            header = rows[0].keys() if rows else csv.reader(io.StringIO(
                Path(path).read_text(encoding="utf-8"))).__next__()
    except (OSError, UnicodeDecodeError, StopIteration, csv.Error) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error or 'empty'}, "
                        "expected a table of plans") from error
    missing = [name for name in (*TEXTS, *INTEGERS, *NUMBERS) if name not in header]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing[:5])}, expected a plans.csv of "
                        "this version of reasoning-planner evaluate")
    try:
        return table_of({name: _parsed(name, row[name]) for name in
                         (*TEXTS, *INTEGERS, *NUMBERS)} for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _parsed(name: str, text: str) -> Any:
    if name in TEXTS:
        return text
    return int(text) if name in INTEGERS else float(text) if text else np.nan
