"""Two evaluations of the same drives, plan by plan: is RUN_B better or worse than RUN_A?

Cycles are paired by t0 and by the bag's content, whatever its name. Each metric gets the mean
difference B - A, a bootstrap confidence interval over scenes (stretches of --scene-s seconds,
since neighbouring plans are not independent) and a verdict: better, worse, "same" where every pair
is equal, "unsure" where the interval includes 0, "few scenes" with fewer than 5. Then the scenes
that got worse, worst first.

--fail-on METRIC[@HORIZON][:TOLERANCE] ... makes the exit code 1 when one of these is worse in B,
by more than the tolerance in the metric's unit: --fail-on ade_m@3:0.05 comfort. "any" stands for
every metric. A metric named alone must be known: not measured, or too few scenes, fails too. With
many metrics some are worse by chance: 5 in 100 at 95 % confidence.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from ..errors import ConfigError, DataError
from .bootstrap import Interval
from .judging import (SAME, UNKNOWN, Pairs, SceneChange, Verdict, broken, is_column, judge,
                      pair_runs, parse_limit, regressions, shown)
from .score_table import Table, read_csv
from .summary import plain, replace_text

REGRESSIONS = 10
SCENE_METRIC = "ade_m@3"
SHOWN_HORIZONS = ("1", "3", "5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `reasoning-planner compare`."""
    parser.add_argument("run_a", type=Path, metavar="RUN_A",
                        help="the folder of an evaluation: the reference")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the one that is judged")
    parser.add_argument("--fail-on", nargs="+", default=[], metavar="METRIC[@H][:TOLERANCE]",
                        help="exit 1 when one of these is worse in B; \"any\" for every metric")
    parser.add_argument("--scene-s", type=float, default=10.0, metavar="S",
                        help="length of a scene (default %(default)s s)")
    parser.add_argument("--confidence", type=float, default=0.95,
                        help="of the intervals (default %(default)s)")
    parser.add_argument("--by", default=SCENE_METRIC, metavar="METRIC",
                        help="metric by which scenes are ranked (default %(default)s)")
    parser.add_argument("--all", action="store_true",
                        help="print every horizon, and what is the same")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare; 1 when a metric named by --fail-on is worse."""
    limits = [parse_limit(text) for text in args.fail_on]
    _check(args)
    pairs = pair_runs(read_run(args.run_a), read_run(args.run_b), args.scene_s)
    if not len(pairs.a):
        raise DataError(f"{args.run_a} and {args.run_b}: no common cycle, expected evaluations "
                        "of the same bags")
    verdicts = list(judge(pairs, args.confidence))
    failures = broken(limits, verdicts)
    scenes = regressions(pairs, args.by, args.scene_s)
    result = as_json(args, pairs, verdicts, scenes, failures)
    if args.out is not None:
        replace_text(args.out, json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(json.dumps(result, indent=2) if args.json else
          "\n".join(lines_of(args, pairs, verdicts, scenes, failures)))
    return 1 if failures else 0


def _check(args: argparse.Namespace) -> None:
    problems = []
    if not args.scene_s > 0.0:
        problems.append(f"--scene-s: given {args.scene_s}, expected more than 0 s")
    if not 0.5 <= args.confidence < 1.0:
        problems.append(f"--confidence: given {args.confidence}, expected 0.5 .. 1")
    if not is_column(args.by):
        problems.append(f"--by: given {args.by!r}, expected a metric as in plans.csv, "
                        f"such as {SCENE_METRIC}")
    if problems:
        raise ConfigError(problems)


# Runs

def read_run(folder: Path) -> Table:
    """The rows of an evaluation: the folder of `evaluate --out`, or its plans.csv.

    Raises:
        DataError: there are none.
    """
    return read_csv(folder / "plans.csv" if folder.is_dir() else folder)


# Output

def as_json(args: argparse.Namespace, pairs: Pairs, verdicts: Sequence[Verdict],
            scenes: Sequence[SceneChange], failures: Sequence[str]) -> dict[str, Any]:
    """Everything as plain JSON values."""
    return plain({
        "run_a": str(args.run_a), "run_b": str(args.run_b), "pairs": len(pairs.a),
        "scenes": len(set(pairs.scenes.tolist())), "only_in_a": pairs.only_a,
        "only_in_b": pairs.only_b, "scene_s": args.scene_s, "confidence": args.confidence,
        "metrics": {v.column: {"a": v.mean_a, "b": v.mean_b, "verdict": v.verdict,
                               "difference": v.difference.mean,
                               "interval": [v.difference.low, v.difference.high],
                               "pairs": v.difference.pairs, "scenes": v.difference.scenes}
                    for v in verdicts},
        "regressions": [asdict(scene) for scene in scenes], "failures": list(failures)})


def lines_of(args: argparse.Namespace, pairs: Pairs, verdicts: Sequence[Verdict],
             scenes: Sequence[SceneChange], failures: Sequence[str]) -> list[str]:
    """The tables for people."""
    lines = [f"A: {args.run_a}", f"B: {args.run_b}",
             f"{len(pairs.a)} common cycles in {len(set(pairs.scenes.tolist()))} scenes of "
             f"{args.scene_s:g} s; {pairs.only_a} only in A, {pairs.only_b} only in B", ""]
    listed = [v for v in verdicts if v.verdict != UNKNOWN
              and (args.all or v.verdict != SAME and _is_shown(v.column))]
    same = sum(v.verdict == SAME for v in verdicts)
    percent = f"{100.0 * args.confidence:g} % interval"
    rows = [("metric", "A", "B", "B - A", percent, "verdict")]
    rows += [(v.column, shown(v.mean_a), shown(v.mean_b), shown(v.difference.mean, True),
              _interval(v.difference), v.verdict) for v in listed]
    lines += _aligned(rows) if listed else ["no metric differs"]
    if same and not args.all:
        lines.append(f"and {same} columns that are the same; --all lists everything")
    if scenes:
        lines += ["", f"scenes worse by {args.by}, worst first"]
        lines += _aligned([("bag", "from", "A", "B", "pairs"), *(
            (s.bag, f"{s.start_s:g} s", shown(s.mean_a), shown(s.mean_b), str(s.pairs))
            for s in scenes[:REGRESSIONS])])
        if len(scenes) > REGRESSIONS:
            lines.append(f"and {len(scenes) - REGRESSIONS} more: --json lists them")
    return lines + ([""] + [f"FAILED: {failure}" for failure in failures] if failures else [])


def _is_shown(column: str) -> bool:
    _, at, horizon = column.partition("@")
    return not at or horizon in SHOWN_HORIZONS


def _interval(interval: Interval) -> str:
    if not np.isfinite(interval.low):
        return "-"
    return f"{interval.low:+.3g} .. {interval.high:+.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
            for row in rows]
