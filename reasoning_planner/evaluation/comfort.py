"""Whether a planned motion would be comfortable, and whether two consecutive plans feel alike.

Derivatives are plain differences of the path's poses without padding: N waypoints give N - 1
velocities, N - 2 accelerations, N - 3 jerks. NVIDIA's recipe and NAVSIM repeat the last value
instead, which reads as a jerk at the end of every braking path. Knows no records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Checks and their open bounds, SI units. Source: NVIDIA's alpamayo-recipes, comfort_reward.py;
# the same values are NAVSIM's (Dauner et al. 2024, arXiv:2406.15349).
BOUNDS = {
    "lon_acceleration": (-4.05, 2.40),
    "lat_acceleration": (-4.89, 4.89),
    "jerk": (-8.37, 8.37),
    "lon_jerk": (-4.13, 4.13),
    "yaw_rate": (-0.95, 0.95),
    "yaw_acceleration": (-1.93, 1.93),
}
CORNERING_MPS2 = 4.89
# RMS differences of two consecutive plans that feel alike. Source: NAVSIM's extended comfort.
EXTENDED_BOUNDS = {"acceleration": 0.7, "jerk": 0.5, "yaw_rate": 0.1, "yaw_acceleration": 0.1}


@dataclass(frozen=True)
class Motion:
    """Derivatives of one path; each has the length its order leaves.

    Attributes:
        lon_acceleration, lat_acceleration: (N - 2,) changes of the speed along and across the
            heading, m/s^2.
        cornering: (N - 2,) speed times yaw rate, m/s^2: what presses passengers sideways.
        acceleration: (N - 2,) magnitude in the plane, m/s^2.
        jerk: (N - 3,) second derivative of the speed, m/s^3.
        lon_jerk: (N - 3,) of `lon_acceleration`.
        jerk_magnitude: (N - 3,) of the acceleration vector.
        yaw_rate: (N - 1,) rad/s.
        yaw_acceleration: (N - 2,) rad/s^2.
    """

    lon_acceleration: np.ndarray
    lat_acceleration: np.ndarray
    cornering: np.ndarray
    acceleration: np.ndarray
    jerk: np.ndarray
    lon_jerk: np.ndarray
    jerk_magnitude: np.ndarray
    yaw_rate: np.ndarray
    yaw_acceleration: np.ndarray


def motion_of(time_ns: np.ndarray, positions: np.ndarray, yaw_rad: np.ndarray) -> Motion:
    """Differentiate a path.

    Args:
        time_ns: (N,) int64, evenly spaced, N >= 4.
        positions: (N, 2) or more columns, metres; only x and y count.
        yaw_rad: (N,).
    """
    step_s = float(time_ns[1] - time_ns[0]) * 1e-9
    velocity = np.diff(positions[:, :2], axis=0) / step_s                       # (N - 1, 2)
    yaw = np.unwrap(yaw_rad)
    middle = 0.5 * (yaw[1:] + yaw[:-1])
    along = np.cos(middle) * velocity[:, 0] + np.sin(middle) * velocity[:, 1]
    across = -np.sin(middle) * velocity[:, 0] + np.cos(middle) * velocity[:, 1]
    speed = np.linalg.norm(velocity, axis=1)
    acceleration = np.diff(velocity, axis=0) / step_s                           # (N - 2, 2)
    yaw_rate = np.diff(yaw) / step_s
    lon_acceleration = np.diff(along) / step_s
    return Motion(
        lon_acceleration=lon_acceleration, lat_acceleration=np.diff(across) / step_s,
        cornering=(0.5 * (speed[1:] + speed[:-1])) * (0.5 * (yaw_rate[1:] + yaw_rate[:-1])),
        acceleration=np.linalg.norm(acceleration, axis=1),
        jerk=np.diff(speed, n=2) / step_s ** 2, lon_jerk=np.diff(lon_acceleration) / step_s,
        jerk_magnitude=np.linalg.norm(np.diff(acceleration, axis=0), axis=1) / step_s,
        yaw_rate=yaw_rate, yaw_acceleration=np.diff(yaw_rate) / step_s)


def checks(motion: Motion) -> dict[str, bool]:
    """Each of `BOUNDS` -> whether every step lies strictly inside."""
    return {name: bool(np.all((getattr(motion, name) > low) & (getattr(motion, name) < high)))
            for name, (low, high) in BOUNDS.items()}


def extended_differences(earlier_ns: np.ndarray, earlier: Motion, later_ns: np.ndarray,
                         later: Motion) -> dict[str, float]:
    """RMS difference of two consecutive plans at the same moments, one value each quantity.

    Args:
        earlier_ns, later_ns: (N,), (M,) int64, stamps of the two plans' waypoints.
    Returns:
        Each of `EXTENDED_BOUNDS` -> RMS over the moments both plans cover; NaN for fewer than two.
    """
    return {name: _rms_difference(earlier_ns, _series(earlier, name), later_ns,
                                  _series(later, name)) for name in EXTENDED_BOUNDS}


def _series(motion: Motion, name: str) -> np.ndarray:
    return motion.jerk_magnitude if name == "jerk" else getattr(motion, name)


def _rms_difference(earlier_ns: np.ndarray, earlier: np.ndarray, later_ns: np.ndarray,
                    later: np.ndarray) -> float:
    """A derivative sits between waypoints, in both plans by the same part of a step."""
    before_s, now_s = ((stamps[:len(values)] - later_ns[0]) * 1e-9 for stamps, values in
                       ((earlier_ns, earlier), (later_ns, later)))
    inside = (now_s >= before_s[0]) & (now_s <= before_s[-1])
    if inside.sum() < 2:
        return float("nan")
    difference = later[inside] - np.interp(now_s[inside], before_s, earlier)
    return float(np.sqrt(np.mean(difference ** 2)))


def feels_alike(differences: dict[str, float]) -> bool:
    """Whether every difference is within `EXTENDED_BOUNDS`."""
    return all(differences[name] <= bound for name, bound in EXTENDED_BOUNDS.items())
