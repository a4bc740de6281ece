"""What a plan must satisfy before it may be published, and how comfortable it would be.

`check` is a gate with typed answers; `comfort` only measures. Neither knows the road or traffic.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np

from ..config import LimitsConfig
from ..datatypes import STEP_S, Reason, Refusal, Trajectory

FIRST_WAYPOINT_M = 2.0       # allowed distance of waypoint 1 from where the odometry leads
MIN_X_M = -2.0               # no plan leads further back than this
ROUNDING = 1e-9              # relative, so that a plan made exactly at a bound passes


def check(trajectory: Trajectory, odometry_speed_mps: float,
          limits: LimitsConfig) -> Refusal | None:
    """Refuse a plan that is not finite, beyond a bound, or does not start with the ego's motion.

    Args:
        trajectory: ego frame at t0.
        odometry_speed_mps: forward speed at t0 from the odometry's twist.
    Returns:
        None when the plan may be published; otherwise ODOMETRY_INVALID, PLAN_NAN or
        PLAN_OVER_LIMIT; the detail names the first quantity found wrong, its value and bound.
    """
    if not np.isfinite(odometry_speed_mps):
        return Refusal(Reason.ODOMETRY_INVALID, f"speed at t0 is {odometry_speed_mps} m/s")
    for item in fields(trajectory):
        values = getattr(trajectory, item.name)
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            return Refusal(Reason.PLAN_NAN,
                           f"{item.name} of waypoint {wrong[0][0]} is {values[tuple(wrong[0])]}")
    return _beyond_bound(trajectory, limits) or _elsewhere(trajectory, odometry_speed_mps, limits)


def _beyond_bound(trajectory: Trajectory, limits: LimitsConfig) -> Refusal | None:
    speed, curvature = trajectory.speed_mps, trajectory.curvature_1pm
    for name, unit, values, bound in (
            ("speed", "m/s", speed, limits.max_speed_mps),
            ("acceleration", "m/s^2", trajectory.acceleration_mps2,
             limits.max_acceleration_mps2),
            ("curvature", "1/m", curvature, limits.max_curvature_1pm),
            ("lateral acceleration", "m/s^2", speed**2 * curvature,
             limits.max_lateral_acceleration_mps2)):
        worst = int(np.argmax(np.abs(values)))
        if abs(values[worst]) > bound * (1.0 + ROUNDING):
            return _over(f"{name} of waypoint {worst}", values[worst], bound, unit)
    return None


def _elsewhere(trajectory: Trajectory, odometry_speed_mps: float,
               limits: LimitsConfig) -> Refusal | None:
    mismatch = abs(trajectory.speed_mps[0] - odometry_speed_mps)
    allowed = limits.speed_mismatch_mps + limits.speed_mismatch_share * abs(odometry_speed_mps)
    if mismatch > allowed * (1.0 + ROUNDING):
        return _over(f"speed at t0 {trajectory.speed_mps[0]:.3g} m/s against the odometry's "
                     f"{odometry_speed_mps:.3g} m/s, difference", mismatch, allowed, "m/s")
    gap = np.hypot(*(trajectory.positions[1] - [STEP_S * odometry_speed_mps, 0.0]))
    if gap > FIRST_WAYPOINT_M:
        return _over("distance of waypoint 1 from the odometry's", gap, FIRST_WAYPOINT_M, "m")
    rearmost = int(np.argmin(trajectory.positions[:, 0]))
    if trajectory.positions[rearmost, 0] < MIN_X_M:
        return _over(f"x of waypoint {rearmost}", trajectory.positions[rearmost, 0], MIN_X_M, "m")
    return None


def _over(name: str, value: float, bound: float, unit: str) -> Refusal:
    return Refusal(Reason.PLAN_OVER_LIMIT, f"{name} {value:.4g} {unit}, bound {bound:.4g} {unit}")


@dataclass(frozen=True)
class Comfort:
    """Six checks, each true when every waypoint keeps strictly within the bounds."""

    lon_accel: bool          # (-4.05, 2.40) m/s^2
    lat_accel: bool          # +-4.89 m/s^2, change of the sideways speed
    jerk: bool               # +-8.37 m/s^3, of the speed
    lon_jerk: bool           # +-4.13 m/s^3, of the forward speed
    yaw_accel: bool          # +-1.93 rad/s^2
    yaw_rate: bool           # +-0.95 rad/s

    @property
    def score(self) -> float:
        """Share of checks held, minus 1: 0 is comfortable, -1 is not at all."""
        return float(np.mean(astuple(self))) - 1.0


def comfort(trajectory: Trajectory) -> Comfort:
    """Comfort as the target's reinforcement learning measures it.

    Finite differences of the 64 future poses at 10 Hz, the last value repeated; the pose at t0 is
    left out. Kept as it is there, with its quirks at the horizon: the repeated last speed reads as
    an acceleration that drops to 0 in one step, so a plan that still accelerates by more than
    0.41 m/s^2 fails lon_jerk (0.84: jerk too); the repeated last velocity against the last heading
    reads as v * yaw rate in lat_accel. Not finite anywhere is uncomfortable.
    """
    x, y = trajectory.positions[1:].T
    yaw = trajectory.yaw_rad[1:]
    vx, vy = _rate(x), _rate(y)
    forward = vx * np.cos(yaw) + vy * np.sin(yaw)
    sideways = -vx * np.sin(yaw) + vy * np.cos(yaw)
    yaw_rate = _rate(np.unwrap(yaw))
    return Comfort(
        lon_accel=_within(_rate(forward), -4.05, 2.40),
        lat_accel=_within(_rate(sideways), -4.89, 4.89),
        jerk=_within(_rate(_rate(np.hypot(vx, vy))), -8.37, 8.37),
        lon_jerk=_within(_rate(_rate(forward)), -4.13, 4.13),
        yaw_accel=_within(_rate(yaw_rate), -1.93, 1.93),
        yaw_rate=_within(yaw_rate, -0.95, 0.95),
    )


def _rate(values: np.ndarray) -> np.ndarray:
    steps = np.diff(values) / STEP_S
    return np.append(steps, steps[-1])


def _within(values: np.ndarray, low: float, high: float) -> bool:
    return bool(np.all((low < values) & (values < high)))
