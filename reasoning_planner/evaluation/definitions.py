"""Every metric of a replay evaluation: name, unit, which way is better, and what it is.

One entry a metric. Tables, reports and comparisons are made from this list; `scores.py` fills the
columns it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from .comfort import BOUNDS, CORNERING_MPS2, EXTENDED_BOUNDS
from .metrics import HORIZONS_S

LOWER, HIGHER, NEITHER = "lower", "higher", ""
MISS_M = 2.0
ACCURACY, COMFORT, CONSISTENCY, REASONING, TIME, COVERAGE = (
    "accuracy", "comfort", "consistency", "reasoning", "time", "coverage")


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: of its column; with `by_horizon` the columns are NAME@HORIZON.
        title: for people.
        unit: "m", "rad", "ms", "share" (0..1), "" ...
        better: "lower", "higher" or "" where neither is.
        group: one of the groups above.
        definition: one or two sentences.
        by_horizon: one value for each of `HORIZONS_S`.
    """

    name: str
    title: str
    unit: str
    better: str
    group: str
    definition: str
    by_horizon: bool = False

    def columns(self) -> tuple[str, ...]:
        """The columns that hold it."""
        if not self.by_horizon:
            return (self.name,)
        return tuple(f"{self.name}@{horizon:g}" for horizon in HORIZONS_S)


_TRUTH = ("The truth is the bag's odometry, linear in position and SLERP in rotation between its "
          "samples, not across gaps over 0.2 s. A plan counts for the horizons that the odometry "
          "still covers.")

_ACCURACY = (
    Metric("ade_m", "ADE", "m", LOWER, ACCURACY,
           "Average displacement error: mean horizontal distance between the plan's waypoints and "
           "the driven position at the same moments, over 0 < t <= horizon. " + _TRUTH, True),
    Metric("fde_m", "FDE", "m", LOWER, ACCURACY,
           "Final displacement error: the distance at t = horizon, linear between waypoints.",
           True),
    Metric("ahe_rad", "AHE", "rad", LOWER, ACCURACY,
           "Average heading error: mean absolute difference to the driven heading up to the "
           "horizon.", True),
    Metric("fhe_rad", "FHE", "rad", LOWER, ACCURACY,
           "Final heading error: the absolute difference at the horizon.", True),
    Metric("longitudinal_m", "along", "m", LOWER, ACCURACY,
           "Absolute part of the displacement at the horizon along the driven heading.", True),
    Metric("lateral_m", "across", "m", LOWER, ACCURACY,
           "Absolute part of the displacement at the horizon across the driven heading.", True),
    Metric("longitudinal_bias_m", "along, signed", "m", NEITHER, ACCURACY,
           "Signed: positive where the plan is ahead of the vehicle. A plan whose stamp is late "
           "by 0.1 s shows as minus 0.1 s of way.", True),
    Metric("lateral_bias_m", "across, signed", "m", NEITHER, ACCURACY,
           "Signed: positive where the plan is to the left.", True),
    Metric("miss", "miss rate", "share", LOWER, ACCURACY,
           f"Share of plans whose distance at the horizon exceeds {MISS_M:g} m; with several "
           "samples, of which the nearest one does.", True),
    Metric("min_ade_m", "minADE_k", "m", LOWER, ACCURACY,
           "ADE of the best of k samples of the model (--samples). The best is the one of least "
           "ADE at the furthest horizon known, the same one at every horizon. With one sample it "
           "is the ADE.", True),
    Metric("cv_ade_m", "ADE, constant velocity", "m", NEITHER, ACCURACY,
           "ADE of going straight on at the speed and heading driven at t0.", True),
    Metric("cv_fde_m", "FDE, constant velocity", "m", NEITHER, ACCURACY,
           "FDE of the same.", True),
    Metric("kinematic_ade_m", "ADE, kinematic", "m", NEITHER, ACCURACY,
           "ADE of the kinematic planner on the same observation: present acceleration and "
           "curvature, dying away.", True),
    Metric("kinematic_fde_m", "FDE, kinematic", "m", NEITHER, ACCURACY,
           "FDE of the same.", True),
    Metric("anchor_error_m", "error at t0", "m", LOWER, ACCURACY,
           "Distance between the plan's pose at t0 and the driven one: a plan in the wrong frame "
           "or with a wrong stamp shows here first."),
)

_CHECK_TITLES = {
    "lon_acceleration": ("longitudinal acceleration", "m/s^2"),
    "lat_acceleration": ("lateral acceleration", "m/s^2"),
    "jerk": ("jerk", "m/s^3"), "lon_jerk": ("longitudinal jerk", "m/s^3"),
    "yaw_rate": ("yaw rate", "rad/s"), "yaw_acceleration": ("yaw acceleration", "rad/s^2"),
    "acceleration": ("acceleration", "m/s^2"),
}
_HOW = {
    "lon_acceleration": "change of the speed along the heading",
    "lat_acceleration": "change of the speed across the heading, as NVIDIA's recipe has it",
    "jerk": "second derivative of the speed",
    "lon_jerk": "change of the longitudinal acceleration",
    "yaw_rate": "change of the heading", "yaw_acceleration": "second derivative of the heading",
}


def _comfort() -> Iterator[Metric]:
    yield Metric("comfort", "comfortable", "share", HIGHER, COMFORT,
                 "Share of plans that pass all six checks below. Derivatives are differences of "
                 "the plan's own poses 0.1 s apart, without padding at the end; a check is passed "
                 "when every step lies strictly inside its bounds.")
    yield Metric("comfort_score", "comfort score", "", HIGHER, COMFORT,
                 "Mean of the six checks minus 1, in -1..0, as NVIDIA's recipe rewards it.")
    for name, (low, high) in BOUNDS.items():
        title, unit = _CHECK_TITLES[name]
        yield Metric(f"comfort_{name}", title, "share", HIGHER, COMFORT,
                     f"{_HOW[name].capitalize()}, within {low:g} and {high:g} {unit}.")
    yield Metric("comfort_cornering", "cornering", "share", HIGHER, COMFORT,
                 f"Speed times yaw rate within {CORNERING_MPS2:g} m/s^2 either way: what presses "
                 "passengers sideways. Not one of the six.")
    yield Metric("extended_comfort", "extended comfort", "share", HIGHER, COMFORT,
                 "Share of consecutive plans, at most 0.5 s apart, whose RMS differences at the "
                 "same moments are all within "
                 + ", ".join(f"{_CHECK_TITLES[name][0]} {bound:g} {_CHECK_TITLES[name][1]}"
                             for name, bound in EXTENDED_BOUNDS.items()) + " (NAVSIM).")
    for name in EXTENDED_BOUNDS:
        title, unit = _CHECK_TITLES[name]
        yield Metric(f"extended_{name}", f"change of {title}", unit, LOWER, COMFORT,
                     f"RMS difference of the {title} between consecutive plans at the same "
                     "moments" + (", of its vector's magnitude." if name in
                                  ("acceleration", "jerk") else "."))


_CONSISTENCY = (
    Metric("plan_gap_m", "gap to the plan before", "m", LOWER, CONSISTENCY,
           "Mean distance between consecutive plans at the same moments, up to the horizon after "
           "the later t0; plans over 0.5 s apart are not compared.", True),
)

_REASONING = (
    Metric("agreement", "text and path agree", "share", HIGHER, REASONING,
           "Share of plans whose path does what the opening words of the text say (keep, follow, "
           "slow, stop, yield, nudge left or right, accelerate, adapt to the curve). Over the "
           "texts with a known opening."),
    Metric("tokens", "tokens", "", NEITHER, REASONING, "Tokens of the text, stop token included."),
    Metric("rounds", "target passes", "", LOWER, REASONING,
           "Passes of the target spent on the text."),
    Metric("tokens_per_pass", "tokens per target pass", "", HIGHER, REASONING,
           "Tokens over target passes of a plan, bonus tokens included."),
    Metric("acceptance_rate", "acceptance rate", "share", HIGHER, REASONING,
           "Draft tokens accepted over draft tokens proposed, of a plan with a draft."),
    Metric("drafted_share", "drafted tokens", "share", NEITHER, REASONING,
           "Share of a text's tokens that were drafted (routine, temporal or corpus) and "
           "accepted."),
    Metric("draft_mismatch", "text differs without a draft", "share", LOWER, REASONING,
           "Share of texts that the target, writing without a draft on the same observation, "
           "writes otherwise (--check-draft). A lossless draft has none."),
)

_TIME = (
    *(Metric(f"{stage}_ms", stage, "ms", LOWER, TIME, text) for stage, text in (
        ("encode", "Wall time of the vision encoder on this machine."),
        ("prefill", "Wall time of reading the prompt."),
        ("reason", "Wall time of writing the text."),
        ("act", "Wall time of the trajectory head, or of the kinematic plan."),
        ("total", "Wall time of planning. Times are kept in real time mode, and in lockstep with "
                  "--times, since they differ from run to run."))),
    Metric("autoregressive_ms", "reason, without a draft", "ms", LOWER, TIME,
           "Wall time of writing the same text without a draft (--check-draft)."),
    Metric("latency_ms", "image to plan", "ms", LOWER, TIME,
           "From the anchor image's arrival (its log time) to the plan, waiting included; real "
           "time mode."),
    Metric("plan_age_ms", "plan age", "ms", LOWER, TIME,
           "The bag's clock at publication less t0; real time mode."),
    Metric("image_age_ms", "image age", "ms", LOWER, TIME,
           "Log time of the anchor image less its stamp: how old the recorder saw it arrive."),
    Metric("odometry_age_ms", "odometry age", "ms", LOWER, TIME,
           "t0 less the newest odometry when planning began; negative where it is newer."),
)

_COVERAGE = (
    Metric("planned", "planned", "share", HIGHER, COVERAGE,
           "Share of planning cycles that gave a plan."),
    Metric("model_planned", "planned by the model", "share", HIGHER, COVERAGE,
           "Share of planning cycles whose plan is the model's own rather than a fallback."),
)

METRICS: tuple[Metric, ...] = (*_ACCURACY, *_comfort(), *_CONSISTENCY, *_REASONING, *_TIME,
                               *_COVERAGE)
BY_NAME = {metric.name: metric for metric in METRICS}
COLUMNS: tuple[str, ...] = tuple(column for metric in METRICS for column in metric.columns())


def metric_of(column: str) -> Metric:
    """The metric a column belongs to: "ade_m@3" -> ADE.

    Raises:
        KeyError: no such column.
    """
    metric = BY_NAME[column.partition("@")[0]]
    if column not in metric.columns():
        raise KeyError(column)
    return metric
