"""A plan made for t0, moved to a later pose: what has passed is cropped, absolute times are kept.

The planned poses stay where they are in the map. Row 0 becomes the vehicle's pose and speed now;
where the vehicle is not quite where the plan has it, the first `blend_s` lead over smoothly.
Always starts from the plan as it was made, so that nothing adds up. Knows no clock and no topics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..config import ReanchorConfig
from ..datatypes import STEP_NS, STEP_S, Plan, Reason, Refusal, Trajectory

MIN_ROWS = 2


@dataclass(frozen=True)
class EgoMotion:
    """Where the vehicle is: stamp_ns, map_from_base (4, 4) float64, forward speed_mps."""

    stamp_ns: int
    map_from_base: np.ndarray
    speed_mps: float


def reanchor(plan: Plan, now: EgoMotion, max_age_s: float,
             config: ReanchorConfig) -> Plan | Refusal:
    """The rest of a plan, from the vehicle's present pose on.

    Args:
        plan: as made, or re-anchored before.
        now: not older than the plan's row 0.
        max_age_s: from t0 of the plan's observation to `now`.
    Returns:
        The plan with the same id, status, reasons and reasoning, `stamp_ns` and `map_from_base`
        those of `now`, row i at now + 0.1 i s, up to the last planned moment; or a Refusal:
        `PLAN_TOO_OLD`, or `PLAN_LEFT` when the vehicle is not where the plan has it.
    Raises:
        ValueError: `now` lies before the plan's row 0.
    """
    elapsed_ns = now.stamp_ns - plan.stamp_ns
    if elapsed_ns < 0:
        raise ValueError(f"now: given {-elapsed_ns} ns before the plan, expected a later moment")
    age_s = (now.stamp_ns - plan.observed_ns) * 1e-9
    if age_s > max_age_s:
        return Refusal(Reason.PLAN_TOO_OLD, f"{age_s:.2f} s, expected at most {max_age_s:g} s")
    rest = crop(plan.trajectory, elapsed_ns)
    if rest is None:
        return Refusal(Reason.PLAN_TOO_OLD, f"{age_s:.2f} s, nothing of it is left")
    moved = _seen_from(rest, plan.map_from_base, now.map_from_base)
    deviation_m = float(np.hypot(*moved.positions[0]))
    if not deviation_m <= config.max_deviation_m:
        return Refusal(Reason.PLAN_LEFT, f"{deviation_m:.2f} m from where the plan has it, "
                       f"expected at most {config.max_deviation_m:g} m")
    return replace(plan, stamp_ns=now.stamp_ns, map_from_base=now.map_from_base,
                   trajectory=_blended(moved, now.speed_mps, config.blend_s),
                   reanchored_from_ns=plan.observed_ns)


def crop(trajectory: Trajectory, elapsed_ns: int) -> Trajectory | None:
    """The motion from `elapsed_ns` on, in steps of 0.1 s, still in the frame of row 0.

    Between two rows as the unicycle drives them (unicycle.py): speed linear in time, curvature
    constant. None where fewer than two rows are left.
    """
    skipped, into_ns = divmod(elapsed_ns, STEP_NS)
    if into_ns == 0:
        rows = slice(skipped, None)
        return None if len(trajectory.positions) - skipped < MIN_ROWS else Trajectory(
            trajectory.positions[rows], trajectory.yaw_rad[rows], trajectory.speed_mps[rows],
            trajectory.acceleration_mps2[rows], trajectory.curvature_1pm[rows])
    if len(trajectory.positions) - 1 - skipped < MIN_ROWS:
        return None
    return _between_rows(trajectory, skipped, into_ns * 1e-9)


def _between_rows(path: Trajectory, skipped: int, seconds: float) -> Trajectory:
    """Rows skipped, skipped + 1, ... each `seconds` (less than a step) later; the last is gone."""
    rows = slice(skipped, -1)
    speed, acceleration = path.speed_mps[rows], path.acceleration_mps2[rows]
    later_speed = speed + acceleration * seconds
    arc = 0.5 * seconds * (speed + later_speed)
    yaw = path.yaw_rad[rows]
    later_yaw = yaw + path.curvature_1pm[rows] * arc
    steps = 0.5 * seconds * (speed[:, None] * _forward(yaw)
                             + later_speed[:, None] * _forward(later_yaw))
    return Trajectory(path.positions[rows] + steps, later_yaw, later_speed, acceleration,
                      path.curvature_1pm[rows])


def _forward(yaw_rad: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(yaw_rad), np.sin(yaw_rad)], axis=1)


def _seen_from(path: Trajectory, map_from_then: np.ndarray,
               map_from_now: np.ndarray) -> Trajectory:
    """The same poses in another ego frame, seen from above."""
    now_from_map = map_from_now[:3, :3].T
    rotation = (now_from_map @ map_from_then[:3, :3])[:2, :2]
    offset = (now_from_map @ (map_from_then[:3, 3] - map_from_now[:3, 3]))[:2]
    turn = np.arctan2(rotation[1, 0], rotation[0, 0])
    return replace(path, positions=path.positions @ rotation.T + offset,
                   yaw_rad=path.yaw_rad + turn)


def _blended(path: Trajectory, speed_mps: float, blend_s: float) -> Trajectory:
    """Row 0 at the origin, level and at `speed_mps`; rows from `blend_s` on as they are.

    What row 0 is off by is taken from the rows after it with a weight that falls smoothly.
    """
    weight = _fading(len(path.positions), blend_s)
    yaw = path.yaw_rad - 2.0 * np.pi * np.round(path.yaw_rad[0] / (2.0 * np.pi))
    return replace(path, positions=path.positions - weight[:, None] * path.positions[0],
                   yaw_rad=yaw - weight * yaw[0],
                   speed_mps=path.speed_mps - weight * (path.speed_mps[0] - speed_mps))


def _fading(rows: int, blend_s: float) -> np.ndarray:
    """(rows,): 1 at row 0, 0 from `blend_s` on, level at both ends."""
    if blend_s <= 0.0:
        return (np.arange(rows) == 0).astype(np.float64)
    share = np.minimum(np.arange(rows) * STEP_S / blend_s, 1.0)
    return 1.0 - share**2 * (3.0 - 2.0 * share)
