"""What one planning cycle scores: the columns of `definitions.py`, filled from its plan.

Joins the metrics, which know plain arrays, with the records of plans and what was driven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np

from .agreement import agrees, manoeuvre_said, path_manoeuvre
from .comfort import (CORNERING_MPS2, Motion, checks, extended_differences, feels_alike,
                      motion_of)
from .definitions import MISS_M
from .metrics import (HORIZONS_S, PathErrors, PoseTrack, best_sample, mean_until, plan_gap,
                      value_at, yaw_of)
from .records import STAGES, PlanRecord
from .summary import ScoredPlan, score_plans

MAX_STEP_NS = 500_000_000           # consecutive plans further apart are not compared
MODEL_STATUSES = ("OK", "DEGRADED")
DRAFTED = ("ROUTINE", "TEMPORAL", "CORPUS")


@dataclass(frozen=True)
class Scored:
    """A cycle with a plan: the row, and what the next cycle and the pictures need.

    Attributes:
        row: column -> value.
        plan: the record of the plan.
        motion: its derivatives; None for a plan too short for them.
        beside_truth: the plan beside what was driven; None where that is not known.
    """

    row: dict[str, Any]
    plan: PlanRecord
    motion: Optional[Motion]
    beside_truth: Optional[ScoredPlan]


def score_plan(row: dict[str, Any], samples: Sequence[PlanRecord], kinematic: PlanRecord,
               previous: Optional[Scored], track: PoseTrack) -> Scored:
    """Fill the row of a cycle that gave a plan.

    Args:
        row: from `empty_row`; it is filled in place.
        samples: the plan, then further samples of the model.
        kinematic: the kinematic plan of the same observation.
        previous: the plan before, if there is one.
        track: what was driven.
    """
    plan = samples[0]
    scored = [(score_plans([sample], track) or [None])[0] for sample in samples]
    row |= {"planned": 1.0, "model_planned": float(plan.status in MODEL_STATUSES),
            "status": plan.status, "planner": plan.planner, "text": plan.text,
            "reasons": "; ".join(dict.fromkeys(reason for reason, _ in plan.reasons)),
            **{f"{stage}_ms": plan.timings_ms[stage] or np.nan for stage in STAGES}}
    if scored[0] is not None:
        row |= _accuracy(scored[0]) | _best_of([s for s in scored if s is not None])
        row |= _baselines(scored[0], (score_plans([kinematic], track) or [None])[0])
    motion = _motion(plan)
    if motion is not None:
        row |= _comfort(motion)
    if previous is not None:
        row |= _consecutive(previous, plan, motion)
    row |= _reasoning(plan, kinematic)
    return Scored(row, plan, motion, scored[0])


def _named(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}@{horizon:g}": float(value) for horizon, value in zip(HORIZONS_S, values)}


def _accuracy(scored: ScoredPlan) -> dict[str, float]:
    errors = scored.errors
    time_ns, displacement = errors.time_ns, errors.displacement_m
    ahead, left = (value_at(time_ns, values) for values in
                   (errors.longitudinal_m, errors.lateral_m))
    turned = np.abs(errors.heading_rad)
    return {**_named("ade_m", mean_until(time_ns, displacement)),
            **_named("fde_m", value_at(time_ns, displacement)),
            **_named("ahe_rad", mean_until(time_ns, turned)),
            **_named("fhe_rad", value_at(time_ns, turned)),
            **_named("longitudinal_m", np.abs(ahead)), **_named("lateral_m", np.abs(left)),
            **_named("longitudinal_bias_m", ahead), **_named("lateral_bias_m", left),
            "anchor_error_m": scored.anchor_error_m,
            "speed_mps": float(scored.truth_speed_mps[0])}


def _best_of(samples: Sequence[ScoredPlan]) -> dict[str, float]:
    """minADE_k and whether the nearest of k paths misses."""
    each = np.stack([mean_until(s.errors.time_ns, s.errors.displacement_m) for s in samples])
    ends = np.stack([value_at(s.errors.time_ns, s.errors.displacement_m) for s in samples])
    best = best_sample(each)
    nearest = ends.min(axis=0)
    missed = np.where(np.isfinite(nearest), nearest > MISS_M, np.nan)
    return {**_named("min_ade_m", each[0 if best is None else best]), **_named("miss", missed)}


def _baselines(scored: ScoredPlan, kinematic: Optional[ScoredPlan]) -> dict[str, float]:
    columns = _both("cv", scored.baseline_errors)
    return columns if kinematic is None else columns | _both("kinematic", kinematic.errors)


def _both(name: str, errors: PathErrors) -> dict[str, float]:
    return {**_named(f"{name}_ade_m", mean_until(errors.time_ns, errors.displacement_m)),
            **_named(f"{name}_fde_m", value_at(errors.time_ns, errors.displacement_m))}


def _motion(plan: PlanRecord) -> Optional[Motion]:
    if len(plan.positions) < 4:
        return None
    return motion_of(plan.time_from_start_ns, plan.positions, yaw_of(plan.quaternions_xyzw))


def _comfort(motion: Motion) -> dict[str, float]:
    passed = checks(motion)
    return {"comfort": float(all(passed.values())),
            "comfort_score": float(np.mean(list(passed.values()))) - 1.0,
            **{f"comfort_{name}": float(value) for name, value in passed.items()},
            "comfort_cornering": float(np.abs(motion.cornering).max() < CORNERING_MPS2)}


def _consecutive(previous: Scored, plan: PlanRecord, motion: Optional[Motion]) -> dict[str, float]:
    step_ns = plan.stamp_ns - previous.plan.stamp_ns
    if not 0 < step_ns <= MAX_STEP_NS or previous.plan.frame_id != plan.frame_id:
        return {}
    before_ns = previous.plan.stamp_ns + previous.plan.time_from_start_ns
    now_ns = plan.stamp_ns + plan.time_from_start_ns
    columns = _named("plan_gap_m", plan_gap(before_ns, previous.plan.positions, now_ns,
                                            plan.positions))
    if motion is None or previous.motion is None:
        return columns
    changes = extended_differences(before_ns, previous.motion, now_ns, motion)
    return {**columns, "extended_comfort": float(feels_alike(changes)),
            **{f"extended_{name}": value for name, value in changes.items()}}


def _reasoning(plan: PlanRecord, kinematic: PlanRecord) -> dict[str, Any]:
    """The text's figures, and what the path does; the kinematic plan starts as was driven."""
    done = path_manoeuvre(plan.speed_mps, plan.curvature_1pm, yaw_of(plan.quaternions_xyzw),
                          float(kinematic.curvature_1pm[0]))
    if not plan.rounds:
        return {"done": str(done)}
    said = manoeuvre_said(plan.text)
    agreed = agrees(said, done)
    drafted = sum(origin in DRAFTED for origin in plan.origins)
    tokens = len(plan.token_texts)
    return {"said": said or "", "done": str(done), "tokens": float(tokens),
            "agreement": np.nan if agreed is None else float(agreed),
            "rounds": float(plan.rounds), "tokens_per_pass": tokens / plan.rounds,
            "proposed": float(plan.proposed), "accepted": float(plan.accepted),
            "acceptance_rate": plan.accepted / plan.proposed if plan.proposed else np.nan,
            "drafted_share": drafted / tokens if tokens else np.nan}
