"""Which of two runs is better, metric by metric and scene by scene. Knows tables, no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from ..errors import ConfigError, DataError
from .bootstrap import MIN_SCENES, Interval, paired_interval
from .definitions import BY_NAME, LOWER, METRICS, Metric, metric_of
from .score_table import Table

BETTER, WORSE, SAME, UNSURE, FEW, UNKNOWN = (
    "better", "worse", "same", "unsure", "few scenes", "not in both")


@dataclass(frozen=True)
class Verdict:
    """One metric of two runs: both means over the pairs, the difference B - A, what it says."""

    column: str
    mean_a: float
    mean_b: float
    difference: Interval
    verdict: str


@dataclass(frozen=True)
class SceneChange:
    """A scene that got worse: `bag` from `start_s` on, means of A and B, how many pairs."""

    bag: str
    start_s: float
    metric: str
    mean_a: float
    mean_b: float
    pairs: int

    @property
    def worse_by(self) -> float:
        """In the metric's unit, positive."""
        return abs(self.mean_b - self.mean_a)


@dataclass(frozen=True)
class Limit:
    """A `--fail-on`: columns, and how much worse they may be."""

    text: str
    columns: tuple[str, ...]
    tolerance: float


@dataclass(frozen=True)
class Pairs:
    """The rows of two runs that belong together, row for row.

    Attributes:
        a, b: tables of one length.
        scenes: (N,) int64.
        only_a, only_b: cycles of one run without a partner.
    """

    a: Table
    b: Table
    scenes: np.ndarray
    only_a: int
    only_b: int


def pair_runs(a: Table, b: Table, scene_s: float) -> Pairs:
    """Pair cycles by bag and t0, in the order of A."""
    rows_b = {key: i for i, key in enumerate(_keys(b))}
    found = [(i, rows_b[key]) for i, key in enumerate(_keys(a)) if key in rows_b]
    rows_a, rows_of_b = (np.array(rows, dtype=np.int64) for rows in
                         (zip(*found) if found else ((), ())))
    first, second = _rows(a, rows_a), _rows(b, rows_of_b)
    labels: dict[tuple[str, int], int] = {}
    scenes = np.array([labels.setdefault(key, len(labels)) for key in
                       _scene_keys(first, scene_s)], dtype=np.int64)
    return Pairs(first, second, scenes, len(a) - len(found), len(b) - len(found))


def _keys(table: Table) -> list[tuple[str, int]]:
    return list(zip(table["bag_id"], table["stamp_ns"].tolist()))


def _scene_keys(table: Table, scene_s: float) -> list[tuple[str, int]]:
    return [(bag, int(np.floor(time_s / scene_s)))
            for bag, time_s in zip(table["bag"], table["time_s"])]


def _rows(table: Table, rows: np.ndarray) -> Table:
    return Table({name: [values[i] for i in rows] if isinstance(values, list) else values[rows]
                  for name, values in table.columns.items()})


def judge(pairs: Pairs, confidence: float) -> Iterator[Verdict]:
    """A verdict for every column for which one way is better."""
    for metric in METRICS:
        for column in metric.columns() if metric.better else ():
            difference = pairs.b[column] - pairs.a[column]
            known = np.isfinite(difference)
            interval = paired_interval(difference, pairs.scenes, confidence)
            yield Verdict(column, _mean(pairs.a[column][known]), _mean(pairs.b[column][known]),
                          interval, _verdict(metric, difference[known], interval))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _verdict(metric: Metric, known: np.ndarray, interval: Interval) -> str:
    if not len(known):
        return UNKNOWN
    if not known.any():
        return SAME
    if not np.isfinite(interval.low):
        return FEW
    if interval.low <= 0.0 <= interval.high:
        return UNSURE
    return WORSE if (interval.mean > 0.0) == (metric.better == LOWER) else BETTER


def broken(limits: Sequence[Limit], verdicts: Sequence[Verdict]) -> list[str]:
    """What of `--fail-on` does not hold, one line each.

    Raises:
        DataError: of a metric named alone nothing can be said: it was not measured in both runs,
            or in too few scenes.
    """
    by_column = {verdict.column: verdict for verdict in verdicts}
    failures: dict[str, str] = {}
    for limit in limits:
        asked = [by_column[column] for column in limit.columns]
        unknown = [v for v in asked if v.verdict in (UNKNOWN, FEW)]
        if len(unknown) == len(asked):
            few = [v.difference.scenes for v in unknown if v.verdict == FEW]
            raise DataError(f"--fail-on {limit.text}: " + (
                f"measured in {max(few)} scenes, expected at least {MIN_SCENES}: more drives, or "
                "a shorter --scene-s" if few else "not measured in both runs"))
        for verdict in asked:
            worse_by = abs(verdict.difference.mean)
            if verdict.verdict == WORSE and worse_by > limit.tolerance:
                failures[verdict.column] = (
                    f"{verdict.column} is worse: {shown(verdict.mean_a)} -> "
                    f"{shown(verdict.mean_b)} {metric_of(verdict.column).unit}".rstrip()
                    + (f", {shown(limit.tolerance)} allowed" if limit.tolerance else ""))
    return list(failures.values())


def regressions(pairs: Pairs, column: str, scene_s: float) -> list[SceneChange]:
    """The scenes in which a metric got worse, worst first."""
    sign = 1.0 if metric_of(column).better == LOWER else -1.0
    known = np.isfinite(pairs.b[column] - pairs.a[column])
    keys = _scene_keys(pairs.a, scene_s)
    found = []
    for scene in np.unique(pairs.scenes[known]):
        rows = np.flatnonzero(known & (pairs.scenes == scene))
        bag, number = keys[rows[0]]
        change = SceneChange(bag, number * scene_s, column, _mean(pairs.a[column][rows]),
                             _mean(pairs.b[column][rows]), len(rows))
        if sign * (change.mean_b - change.mean_a) > 0.0:
            found.append(change)
    return sorted(found, key=lambda change: -change.worse_by)


# What must hold

def is_column(text: str) -> bool:
    try:
        metric_of(text)
    except KeyError:
        return False
    return True


def parse_limit(text: str) -> Limit:
    """"ade_m@3:0.05" -> the column and 0.05; without a horizon all of them; "any": all columns.

    Raises:
        ConfigError: no such metric, or a tolerance that is no number.
    """
    name, _, tolerance = text.partition(":")
    metric = BY_NAME.get(name.partition("@")[0])
    try:
        allowed = float(tolerance) if tolerance else 0.0
    except ValueError:
        allowed = -1.0
    if allowed < 0.0:
        raise ConfigError([f"--fail-on: given {text!r}, expected a tolerance of 0 or more behind "
                           "the colon"])
    if name == "any":
        return Limit(text, tuple(c for m in METRICS if m.better for c in m.columns()), allowed)
    if metric is None or not metric.better or not (name == metric.name or is_column(name)):
        known = ", ".join(m.name for m in METRICS if m.better)
        raise ConfigError([f"--fail-on: given {text!r}, expected \"any\" or one of {known}, with "
                           "@HORIZON for one of its horizons"])
    return Limit(text, metric.columns() if name == metric.name else (name,), allowed)


def shown(value: float, signed: bool = False) -> str:
    """Four significant digits; a dash for NaN."""
    if not np.isfinite(value):
        return "-"
    return f"{value:{'+' if signed else ''}.4g}"
