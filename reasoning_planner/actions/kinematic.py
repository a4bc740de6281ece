"""Plans from the ego history alone: the fallback of every cycle, and the baselines of evaluation.

The kinematic plan goes on with the present acceleration and curvature, both dying away. Nothing
here knows the road, other traffic or what the cameras see. No plan reverses: braking ends at rest,
and a vehicle found rolling backwards is brought to rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..config import KinematicConfig
from ..datatypes import HORIZON_LENGTH, STEP_S, EgoHistory, Trajectory
from .unicycle import controls_to_path

# Residuals beyond these count linearly in the fit (Huber): about three times what wheel odometry
# jitters at 10 Hz.
SPEED_OUTLIER_MPS = 0.3
YAW_RATE_OUTLIER_RPS = 0.03
FIT_ROUNDS = 20


@dataclass(frozen=True)
class MotionState:
    """Motion at t0: speed_mps (signed), acceleration_mps2, curvature_1pm."""

    speed_mps: float
    acceleration_mps2: float
    curvature_1pm: float


def estimate_motion(history: EgoHistory, config: KinematicConfig) -> MotionState:
    """Speed and acceleration by a robust line through the last steps' speeds, yaw rate likewise.

    Only the poses are read, not the twist, so that the plan check against the odometry's speed
    compares two independent figures. Slower than `standing_speed_mps` is exactly at rest. A
    history that is not finite gives a state that is not finite.
    """
    steps = max(2, round(config.fit_window_s / STEP_S))
    positions = history.positions[-steps - 1:, :2]
    rotations = history.rotations[-steps - 1:]
    yaw = np.unwrap(np.arctan2(rotations[:, 1, 0], rotations[:, 0, 0]))
    middle = 0.5 * (yaw[:-1] + yaw[1:])
    forward = np.stack([np.cos(middle), np.sin(middle)], axis=1)
    speeds = np.sum(np.diff(positions, axis=0) * forward, axis=1) / STEP_S         # (steps,)
    times = (np.arange(steps) - steps + 0.5) * STEP_S
    if not (np.isfinite(speeds).all() and np.isfinite(yaw).all()):
        return MotionState(np.nan, np.nan, np.nan)
    speed, acceleration = _robust_line(times, speeds, SPEED_OUTLIER_MPS)
    yaw_rate, _ = _robust_line(times, np.diff(yaw) / STEP_S, YAW_RATE_OUTLIER_RPS)
    if abs(speed) < config.standing_speed_mps:
        return MotionState(0.0, 0.0, 0.0)
    bound = config.max_curvature_1pm
    return MotionState(speed, acceleration, float(np.clip(yaw_rate / speed, -bound, bound)))


def plan_kinematic(history: EgoHistory, config: KinematicConfig) -> Trajectory:
    """Constant turn rate and acceleration with decay: 64 steps in the ego frame at t0."""
    state = estimate_motion(history, config)
    acceleration = _decayed(state.acceleration_mps2, config.acceleration_decay_s)
    if state.speed_mps < 0.0:
        acceleration = np.full(HORIZON_LENGTH, config.stop_deceleration_mps2)
    curvature = _decayed(state.curvature_1pm, config.curvature_decay_s)
    return _drive_to_rest(acceleration, curvature, state.speed_mps)


def constant_velocity(history: EgoHistory, config: KinematicConfig) -> Trajectory:
    """The baseline: straight on at the present speed (also backwards, as measured)."""
    speed = estimate_motion(history, config).speed_mps
    return controls_to_path(np.zeros(HORIZON_LENGTH), np.zeros(HORIZON_LENGTH), speed)


def stop_trajectory(history: EgoHistory, config: KinematicConfig) -> Trajectory:
    """Brake evenly to rest along the present curvature, at `stop_deceleration_mps2`."""
    state = estimate_motion(history, config)
    braking = np.full(HORIZON_LENGTH, -np.copysign(config.stop_deceleration_mps2, state.speed_mps))
    curvature = np.full(HORIZON_LENGTH, state.curvature_1pm)
    return _drive_to_rest(braking, curvature, state.speed_mps)


def standing_trajectory() -> Trajectory:
    """At rest at t0's pose: what a refused plan carries."""
    return controls_to_path(np.zeros(HORIZON_LENGTH), np.zeros(HORIZON_LENGTH), 0.0)


def _decayed(value: float, decay_s: float) -> np.ndarray:
    """(64,) step means of value * exp(-t / decay_s)."""
    edges = np.exp(-np.arange(HORIZON_LENGTH + 1) * STEP_S / decay_s)
    return value * decay_s / STEP_S * -np.diff(edges)


def _drive_to_rest(acceleration: np.ndarray, curvature: np.ndarray, v0: float) -> Trajectory:
    """Follow the controls until the speed reaches 0, then stay exactly there."""
    speed = v0 + STEP_S * np.cumsum(acceleration)                                  # (64,)
    crossed = np.flatnonzero(speed * v0 <= 0.0)
    if not len(crossed):
        return controls_to_path(acceleration, curvature, v0)
    last = crossed[0]                                # the step that ends at rest
    limited = np.where(np.arange(HORIZON_LENGTH) < last, acceleration, 0.0)
    limited[last] = acceleration[last] - speed[last] / STEP_S
    path = controls_to_path(limited, curvature, v0)
    resting = np.arange(HORIZON_LENGTH + 1) > last
    return replace(path,                             # the sums leave some 1e-17 m/s
                   positions=np.where(resting[:, None], path.positions[last + 1], path.positions),
                   yaw_rad=np.where(resting, path.yaw_rad[last + 1], path.yaw_rad),
                   speed_mps=np.where(resting, 0.0, path.speed_mps))


def _robust_line(x: np.ndarray, y: np.ndarray, outlier: float) -> tuple[float, float]:
    """Value at x = 0 and slope of the line of least Huber loss through the points."""
    design = np.stack([np.ones_like(x), x], axis=1)
    weights = np.ones_like(x)
    for _ in range(FIT_ROUNDS):
        weighted = design.T * weights
        value_slope = np.linalg.solve(weighted @ design, weighted @ y)
        residuals = np.abs(y - design @ value_slope)
        previous, weights = weights, outlier / np.maximum(residuals, outlier)
        if np.abs(weights - previous).max() < 1e-3:
            break
    return float(value_slope[0]), float(value_slope[1])
