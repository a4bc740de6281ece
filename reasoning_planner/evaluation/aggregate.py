"""summary.json of a replay evaluation, out of the rows of all its bags.

Keeps the keys that every summary of this package has (see `summary.build_summary`) and adds the
means of all metrics, their values by bag, and what was read.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Mapping, Sequence

import numpy as np

from ..datatypes import PlanStatus
from .definitions import METRICS, Metric
from .latency import quantiles
from .metrics import HORIZONS_S
from .records import STAGES
from .score_table import Table
from .summary import EXAMPLES, describe_hardware, plain

QUANTILE_METRICS = ("latency_ms", "plan_age_ms", "image_age_ms", "odometry_age_ms")


def summarise(table: Table, results: Sequence[Mapping[str, Any]],
              run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain JSON values.

    Args:
        table: the rows of all bags.
        results: what each bag's result.json holds.
        run_info: "mode", "samples", and what else of the run is to be kept.
    """
    planned = table["planned"] > 0.0
    return plain({
        **_counts(table, planned, results),
        **_reasoning(table, planned),
        "stage_ms": {stage: quantiles(table[f"{stage}_ms"]) for stage in STAGES},
        **{name: quantiles(table[name]) for name in QUANTILE_METRICS},
        **_accuracy(table),
        "anchor_error_m": quantiles(table["anchor_error_m"], ("p50", "p95")),
        "plans_not_scored": int(np.sum(planned & ~np.isfinite(table["anchor_error_m"]))),
        "dropped_by_reason": _dropped(results),
        "model": _only(results, "model"), "runtime": _only(results, "runtime"),
        "hardware": describe_hardware(),
        "metrics": {metric.name: means(table, metric) for metric in METRICS},
        "samples_by_metric": {metric.name: counts(table, metric) for metric in METRICS},
        "bags": {result["name"]: _bag(table, result) for result in results},
        **run_info,
    })


def means(table: Table, metric: Metric) -> Any:
    """The metric's mean over the rows that have it; by horizon where it has one for each."""
    values = [mean(table[column]) for column in metric.columns()]
    return _by_horizon(values) if metric.by_horizon else values[0]


def counts(table: Table, metric: Metric) -> Any:
    """How many rows have it."""
    values = [int(np.isfinite(table[column]).sum()) for column in metric.columns()]
    return _by_horizon(values) if metric.by_horizon else values[0]


def mean(values: np.ndarray) -> float:
    """Mean of what is known; NaN for nothing."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _by_horizon(values: Sequence[Any]) -> dict[str, Any]:
    return {f"{horizon:g}": value for horizon, value in zip(HORIZONS_S, values)}


def _counts(table: Table, planned: np.ndarray,
            results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    statuses = Counter(status for status in table["status"] if status)
    return {
        "cycles": len(table), "plans_published": int(planned.sum()),
        "plans_by_status": {s: statuses[s] for s in PlanStatus.__members__ if statuses[s]},
        "planners": sorted({name for name in table["planner"] if name}),
        "records_cut": False,
        "bag_count": len(results), "driven_m": sum(r["driven_m"] for r in results),
        "duration_s": sum(r["duration_s"] for r in results),
    }


def _accuracy(table: Table) -> dict[str, Any]:
    def over(stem: str) -> dict[str, float]:
        return _by_horizon([mean(table[f"{stem}@{h:g}"]) for h in HORIZONS_S])

    gain = [table[f"ade_m@{h:g}"] - table[f"cv_ade_m@{h:g}"] for h in HORIZONS_S]
    won = [np.where(np.isfinite(g), g < 0.0, np.nan) for g in gain]
    names = {"ade_m": "ade_m", "fde_m": "fde_m", "baseline_ade_m": "cv_ade_m",
             "baseline_fde_m": "cv_fde_m", "kinematic_ade_m": "kinematic_ade_m",
             "kinematic_fde_m": "kinematic_fde_m", "ahe_rad": "ahe_rad", "fhe_rad": "fhe_rad",
             "longitudinal_m": "longitudinal_m", "lateral_m": "lateral_m",
             "min_ade_m": "min_ade_m", "miss_rate": "miss"}
    return {**{key: over(stem) for key, stem in names.items()},
            "samples": _by_horizon([int(np.isfinite(g).sum()) for g in gain]),
            "ade_difference_m": _by_horizon([mean(g) for g in gain]),
            "ade_share_better": _by_horizon([mean(w) for w in won])}


def _reasoning(table: Table, planned: np.ndarray) -> dict[str, Any]:
    rounds = table["rounds"]
    written = np.isfinite(rounds) & (rounds > 0.0)
    drafted = written & (table["proposed"] > 0.0)
    total_rounds = float(np.nansum(rounds[written]))
    reason_ms = table["reason_ms"]
    plain_p50, draft_p50 = (quantiles(times, ("p50",))["p50"] for times in (
        np.concatenate([reason_ms[written & ~drafted], table["autoregressive_ms"]]),
        reason_ms[drafted]))
    mismatch = table["draft_mismatch"]
    texts = [table["text"][i] for i in np.flatnonzero(written)]
    said = Counter(table["said"][i] or "unknown" for i in np.flatnonzero(written))
    return {
        "coc_examples": list(dict.fromkeys(t for t in texts if t))[:EXAMPLES],
        "acceptance_length": 1.0 + float(np.sum(table["accepted"][drafted]) / np.sum(
            rounds[drafted])) if drafted.any() else None,
        "tokens_per_target_pass": float(np.nansum(table["tokens"][written])) / total_rounds
        if total_rounds else None,
        "rounds": quantiles(rounds[written], ("p50", "p95")),
        "lossless_mismatches": int(np.nansum(mismatch)) if np.isfinite(mismatch).any() else None,
        "reasoning_ms": {"autoregressive_p50": plain_p50, "speculative_p50": draft_p50,
                         "speedup": plain_p50 / draft_p50 if plain_p50 and draft_p50 else None},
        "manoeuvres_said": dict(sorted(said.items())),
        "empty_texts": int(np.sum(written)) - sum(1 for t in texts if t),
    }


def _dropped(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result["dropped_by_reason"])
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _only(results: Sequence[Mapping[str, Any]], key: str) -> Any:
    found = sorted({result[key] for result in results if result[key]})
    return ", ".join(found) if found else None


def _bag(table: Table, result: Mapping[str, Any]) -> dict[str, Any]:
    rows = table.where(np.array([name == result["name"] for name in table["bag"]], dtype=bool))
    kept = ("bag", "bag_id", "mode", "topics", "frame_id", "base_frame", "notes", "losses",
            "duration_s", "driven_m", "cycles", "plans", "dropped_by_reason", "passed")
    return {**{name: result[name] for name in kept},
            "metrics": {metric.name: means(rows, metric) for metric in METRICS}}
