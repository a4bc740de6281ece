"""Controls <-> path of the unicycle with acceleration and curvature: the target's action space.

With dt = 0.1 s, a the acceleration, k the curvature, v the speed and h the heading:

    v[i+1] = v[i] + a[i] dt
    h[i+1] = h[i] + k[i] s[i],          s[i] = v[i] dt + a[i] dt^2 / 2, the length of the step
    p[i+1] = p[i] + dt / 2 (v[i] u[i] + v[i+1] u[i+1]),   u = (cos h, sin h)

from p[0] = (0, 0), h[0] = 0, in the ego frame at t0. All arrays are float64. Knows no limits: an
absurd control gives an absurd path, and `limits.check` is what refuses it.
"""

from __future__ import annotations

import numpy as np

from ..datatypes import HISTORY_LENGTH, HORIZON_LENGTH, STEP_S, Trajectory

# The controls as the model sees them are (value - MEAN) / SCALE. Constants of the trained model,
# the same in Alpamayo 1, 1.5 and 2; kept here in float64 because 1.5 does not ship them.
ACCELERATION_SCALE = 0.6810426736454882
ACCELERATION_MEAN = 0.02902694707164455
CURVATURE_SCALE = 0.026148280660833106
CURVATURE_MEAN = 0.0002692167976330542

# What Alpamayo 2 adds to the training inverse: no curvature below this speed, and a bound.
ALPAMAYO2_MIN_SPEED_MPS = 0.6
ALPAMAYO2_MAX_CURVATURE_1PM = 0.33

# Below this length of a step its curvature cannot be read from the path and is defined as 0:
# 1e-6 m turned at 0.33 1/m is 3e-7 rad.
SHORTEST_ARC_M = 1e-6


def denormalise_controls(controls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Model output to physical controls.

    Args:
        controls: (64, 2), normalised acceleration and curvature.
    Returns:
        acceleration (64,) float64 m/s^2 and curvature (64,) float64 1/m.
    Raises:
        ValueError: another shape.
    """
    controls = np.asarray(controls, dtype=np.float64)
    if controls.shape != (HORIZON_LENGTH, 2):
        raise ValueError(f"controls: given shape {controls.shape}, "
                         f"expected ({HORIZON_LENGTH}, 2)")
    return (controls[:, 0] * ACCELERATION_SCALE + ACCELERATION_MEAN,
            controls[:, 1] * CURVATURE_SCALE + CURVATURE_MEAN)


def normalise_controls(acceleration: np.ndarray, curvature: np.ndarray) -> np.ndarray:
    """The inverse of `denormalise_controls`: (64,) and (64,) to (64, 2) float64."""
    acceleration = _array("acceleration", acceleration, (HORIZON_LENGTH,))
    curvature = _array("curvature", curvature, (HORIZON_LENGTH,))
    return np.stack([(acceleration - ACCELERATION_MEAN) / ACCELERATION_SCALE,
                     (curvature - CURVATURE_MEAN) / CURVATURE_SCALE], axis=1)


def controls_to_path(acceleration: np.ndarray, curvature: np.ndarray, v0: float) -> Trajectory:
    """Integrate the controls of 64 steps into 65 poses.

    Args:
        acceleration: (64,), m/s^2, along the heading.
        curvature: (64,), 1/m, positive to the left.
        v0: m/s, signed speed at t0.
    Returns:
        Trajectory, float64; NaN and infinity in the controls come out as they went in.
    Raises:
        ValueError: a control has another shape.
    """
    acceleration = _array("acceleration", acceleration, (HORIZON_LENGTH,))
    curvature = _array("curvature", curvature, (HORIZON_LENGTH,))
    speed = v0 + STEP_S * np.concatenate([[0.0], np.cumsum(acceleration)])         # (65,)
    arc = STEP_S * speed[:-1] + 0.5 * STEP_S**2 * acceleration                     # (64,)
    yaw = np.concatenate([[0.0], np.cumsum(curvature * arc)])
    velocity = speed[:, None] * np.stack([np.cos(yaw), np.sin(yaw)], axis=1)       # (65, 2)
    steps = 0.5 * STEP_S * (velocity[:-1] + velocity[1:])
    return Trajectory(
        positions=np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)]),
        yaw_rad=yaw,
        speed_mps=speed,
        acceleration_mps2=np.append(acceleration, acceleration[-1]),
        curvature_1pm=np.append(curvature, curvature[-1]),
    )


def path_to_controls(positions: np.ndarray, yaw_rad: np.ndarray,
                     v0: float) -> tuple[np.ndarray, np.ndarray]:
    """The exact inverse of `controls_to_path`, for paths that the unicycle can drive.

    Speeds follow from v0 by the trapezoid rule, v[i+1] = (2 dp[i] / dt - v[i] u[i]) . u[i+1], so
    an error in v0 or noise in the positions swings from step to step undamped: for measured paths
    use `fit_controls`. A path without motion has accelerations and curvatures of 0; a step shorter
    than SHORTEST_ARC_M has curvature 0, whatever curvature made it.

    Args:
        positions: (65, 2), metres, ego frame at t0.
        yaw_rad: (65,), heading, wrapped or not.
        v0: m/s, signed speed at t0.
    Returns:
        acceleration (64,) float64 m/s^2 and curvature (64,) float64 1/m.
    Raises:
        ValueError: another shape.
    """
    steps, yaw_rad = _path(positions, yaw_rad)
    forward = np.stack([np.cos(yaw_rad), np.sin(yaw_rad)], axis=1)                 # (65, 2)
    speed = np.empty(HORIZON_LENGTH + 1)
    speed[0] = v0
    for i in range(HORIZON_LENGTH):
        speed[i + 1] = (2.0 * steps[i] / STEP_S - speed[i] * forward[i]) @ forward[i + 1]
    acceleration = np.diff(speed) / STEP_S
    arc = STEP_S * speed[:-1] + 0.5 * STEP_S**2 * acceleration
    moving = np.abs(arc) >= SHORTEST_ARC_M
    curvature = np.where(moving, np.diff(yaw_rad) / np.where(moving, arc, 1.0), 0.0)
    return acceleration, curvature


def fit_controls(positions: np.ndarray, yaw_rad: np.ndarray, v0: float, *,
                 min_speed_mps: float = 0.0,
                 max_curvature_1pm: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """The smoothed inverse the target was trained with: controls that drive near a measured path.

    Four regularised least squares in turn: headings (the first is 0 and fixed), speeds (the first
    is v0 and fixed), accelerations from the speeds, curvatures from headings and step lengths.

    Args:
        positions: (65, 2), metres, ego frame at t0.
        yaw_rad: (65,), heading, wrapped or not.
        v0: m/s, signed speed at t0, see `initial_speed`.
        min_speed_mps: curvature is 0 where either end of the step is slower (Alpamayo 2: 0.6).
        max_curvature_1pm: curvature is clamped to it (Alpamayo 2: 0.33).
    Returns:
        acceleration (64,) float64 m/s^2 and curvature (64,) float64 1/m.
    Raises:
        ValueError: another shape.
    """
    n = HORIZON_LENGTH
    steps, yaw_rad = _path(positions, yaw_rad)
    yaw_rad = _least_squares(np.eye(n + 1), yaw_rad, 3, 1e-6, 1e-8, first=0.0)
    design, target = _trapezoid(steps, yaw_rad)
    speed = _least_squares(design, target, 3, 1e-6, 1e-4, first=v0)
    acceleration = _least_squares(STEP_S * np.eye(n), np.diff(speed), 2, 1e-4, 1e-4)
    arc = STEP_S * speed[:-1] + 0.5 * STEP_S**2 * acceleration
    curvature = _least_squares(np.diag(arc), np.diff(yaw_rad), 2, 1e-4, 1e-4)
    slow = np.minimum(np.abs(speed[:-1]), np.abs(speed[1:])) < min_speed_mps
    curvature = np.where(slow, 0.0, curvature)
    return acceleration, np.clip(curvature, -max_curvature_1pm, max_curvature_1pm)


def initial_speed(history_positions: np.ndarray, history_rotations: np.ndarray) -> float:
    """Signed speed at t0 out of 16 poses, as the target solves it.

    Args:
        history_positions: (16, 3), metres, oldest first, any fixed frame with z up.
        history_rotations: (16, 3, 3), fixed frame from base.
    Returns:
        m/s along the heading, the last of 16 speeds; the ridge draws 12 m/s down by 3e-4.
    Raises:
        ValueError: another shape.
    """
    positions = _array("history_positions", history_positions, (HISTORY_LENGTH, 3))
    rotations = _array("history_rotations", history_rotations, (HISTORY_LENGTH, 3, 3))
    yaw = np.unwrap(np.arctan2(rotations[:, 1, 0], rotations[:, 0, 0]))
    design, target = _trapezoid(np.diff(positions[:, :2], axis=0), yaw)
    return float(_least_squares(design, target, 3, 1e-6, 1e-4)[-1])


def _trapezoid(steps: np.ndarray, yaw_rad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows v[i] u[i] + v[i+1] u[i+1] = 2 dp[i] / dt: design (2n, n + 1) and target (2n,)."""
    n = len(steps)
    step = np.arange(n)
    design = np.zeros((2, n, n + 1))
    for axis, component in enumerate((np.cos(yaw_rad), np.sin(yaw_rad))):
        design[axis, step, step] = component[:-1]
        design[axis, step, step + 1] = component[1:]
    return design.reshape(2 * n, n + 1), (2.0 / STEP_S * steps.T).reshape(2 * n)


def _least_squares(design: np.ndarray, target: np.ndarray, order: int, smooth: float,
                   ridge: float, first: float | None = None) -> np.ndarray:
    """Minimise |design x - target|^2 + smooth |d^order x / dt^order|^2 + ridge |x|^2.

    With `first`, x[0] is that number and not an unknown (nor under the ridge).
    """
    n = design.shape[1]
    difference = np.diff(np.eye(n), n=order, axis=0) / STEP_S**order
    normal = design.T @ design + smooth * difference.T @ difference                # (n, n)
    right = design.T @ target
    if first is not None:
        right, normal = right[1:] - first * normal[1:, 0], normal[1:, 1:]
    lower = np.linalg.cholesky(normal + ridge * np.eye(len(right)))
    x = np.linalg.solve(lower.T, np.linalg.solve(lower, right))
    return x if first is None else np.concatenate([[first], x])


def _path(positions: np.ndarray, yaw_rad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Checked steps (64, 2) and unwrapped headings (65,)."""
    positions = _array("positions", positions, (HORIZON_LENGTH + 1, 2))
    yaw_rad = _array("yaw_rad", yaw_rad, (HORIZON_LENGTH + 1,))
    return np.diff(positions, axis=0), np.unwrap(yaw_rad)


def _array(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(f"{name}: given shape {values.shape}, expected {shape}")
    return values
