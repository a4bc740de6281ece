"""How far a planned path is from the path that was driven, and from what driving straight gives.

Plain arrays in, plain arrays out. Errors are taken in the horizontal plane of the fixed frame.
NaN stands for "not known" (no odometry at that moment) and never for zero. Knows no records, no
bags and no planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional, Sequence

import numpy as np

from ..datatypes import OdometrySample
from ..errors import DataError

HORIZONS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.4)
MAX_GAP_NS = 200_000_000


@dataclass(frozen=True)
class PoseTrack:
    """What was driven.

    Attributes:
        frame_id: fixed frame of the poses.
        stamps_ns: (M,) int64, strictly rising.
        positions: (M, 3) float64, metres.
        quaternions_xyzw: (M, 4) float64, unit norm, `frame_id` from base.
        speed_mps: (M,) float64, forward; from the twist, or from the poses without one.
    """

    frame_id: str
    stamps_ns: np.ndarray
    positions: np.ndarray
    quaternions_xyzw: np.ndarray
    speed_mps: np.ndarray

    def __post_init__(self) -> None:
        m = len(self.stamps_ns)
        assert self.positions.shape == (m, 3), self.positions.shape
        assert self.quaternions_xyzw.shape == (m, 4), self.quaternions_xyzw.shape
        assert self.speed_mps.shape == (m,), self.speed_mps.shape


@dataclass(frozen=True)
class PathErrors:
    """Errors of one path, one value a waypoint; NaN where the truth is not known.

    Attributes:
        time_ns: (N,) int64, after t0.
        displacement_m: (N,) distance in the plane.
        longitudinal_m: (N,) along the driven heading, positive when the path is ahead.
        lateral_m: (N,) across it, positive when the path is to the left.
        heading_rad: (N,) path minus truth, -pi..pi.
    """

    time_ns: np.ndarray
    displacement_m: np.ndarray
    longitudinal_m: np.ndarray
    lateral_m: np.ndarray
    heading_rad: np.ndarray


@dataclass(frozen=True)
class HorizonErrors:
    """Means over S paths at H horizons; each path counts for the horizons it has.

    Attributes:
        horizons_s: H horizons.
        samples: (H,) int64, paths that reach the horizon.
        ade_m, fde_m: (H,) displacement: mean up to, and at the horizon.
        ahe_rad, fhe_rad: (H,) absolute heading error: mean up to, and at the horizon.
        longitudinal_m, lateral_m: (H,) absolute errors at the horizon.
        each_ade_m, each_fde_m: (S, H) the single values, NaN where a path falls short.
    """

    horizons_s: tuple[float, ...]
    samples: np.ndarray
    ade_m: np.ndarray
    fde_m: np.ndarray
    ahe_rad: np.ndarray
    fhe_rad: np.ndarray
    longitudinal_m: np.ndarray
    lateral_m: np.ndarray
    each_ade_m: np.ndarray
    each_fde_m: np.ndarray


@dataclass(frozen=True)
class Paired:
    """Two methods on the same samples: (H,) mean of ours minus theirs, share won, count."""

    difference: np.ndarray
    share_better: np.ndarray
    samples: np.ndarray


def track_of_odometry(samples: Iterable[OdometrySample], frame_id: str) -> PoseTrack:
    """Sort odometry by stamp; of equal stamps the first stays.

    Raises:
        DataError: no sample at all.
    """
    by_stamp: dict[int, OdometrySample] = {}
    for sample in samples:
        by_stamp.setdefault(sample.stamp_ns, sample)
    if not by_stamp:
        raise DataError("odometry: given no sample, expected the poses that were driven")
    rows = [by_stamp[stamp] for stamp in sorted(by_stamp)]
    stamps_ns = np.array([r.stamp_ns for r in rows], dtype=np.int64)
    positions = np.array([r.position for r in rows], dtype=np.float64)
    quaternions_xyzw = np.array([r.quaternion_xyzw for r in rows], dtype=np.float64)
    speed_mps = np.array([r.linear_velocity[0] for r in rows], dtype=np.float64)
    if not speed_mps.any():             # some vehicles publish poses with an empty twist
        speed_mps = _speed_of_poses(stamps_ns, positions, quaternions_xyzw)
    return PoseTrack(frame_id, stamps_ns, positions, quaternions_xyzw, speed_mps)


def _speed_of_poses(stamps_ns: np.ndarray, positions: np.ndarray,
                    quaternions_xyzw: np.ndarray) -> np.ndarray:
    """(M,) forward speed by differences of positions; zero for a single pose."""
    if len(stamps_ns) < 2:
        return np.zeros(len(stamps_ns))
    seconds = (stamps_ns - stamps_ns[0]) * 1e-9
    velocity = np.gradient(positions, seconds, axis=0)                              # (M, 3)
    return np.sum(velocity * axes_of(quaternions_xyzw)[:, :, 0], axis=1)


def pose_at(track: PoseTrack, query_ns: np.ndarray, max_gap_ns: int = MAX_GAP_NS
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The driven pose at any moment: linear in position and speed, SLERP in rotation.

    Args:
        query_ns: (N,) int64.
        max_gap_ns: wider gaps between two samples are not bridged.
    Returns:
        positions (N, 3), quaternions_xyzw (N, 4), speed_mps (N,); NaN before the first sample,
        after the last one and inside a gap.
    """
    query = np.asarray(query_ns, dtype=np.int64)
    stamps = track.stamps_ns
    right = np.clip(np.searchsorted(stamps, query, side="left"), 0, len(stamps) - 1)
    left = np.where(stamps[right] == query, right, np.maximum(right - 1, 0))
    span = stamps[right] - stamps[left]
    known = (query >= stamps[0]) & (query <= stamps[-1]) & (span <= max_gap_ns)
    share = np.where(known, (query - stamps[left]) / np.maximum(span, 1), np.nan)   # (N,)
    position, speed = ((1.0 - s) * a[left] + s * a[right] for a, s in
                       ((track.positions, share[:, None]), (track.speed_mps, share)))
    return position, slerp(track.quaternions_xyzw[left], track.quaternions_xyzw[right],
                           share), speed


def slerp(start: np.ndarray, end: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Spherical interpolation the short way: (N, 4), (N, 4), (N,) -> (N, 4)."""
    dot = np.sum(start * end, axis=1)
    end = np.where(dot[:, None] < 0.0, -end, end)
    angle = np.arccos(np.clip(np.abs(dot), 0.0, 1.0))
    sine = np.sin(angle)
    near = sine < 1e-6                      # so close that a straight line is exact enough
    sine = np.where(near, 1.0, sine)
    a = np.where(near, 1.0 - share, np.sin((1.0 - share) * angle) / sine)
    b = np.where(near, share, np.sin(share * angle) / sine)
    result = a[:, None] * start + b[:, None] * end
    return result / np.linalg.norm(result, axis=1, keepdims=True)


def yaw_of(quaternions_xyzw: np.ndarray) -> np.ndarray:
    """(N, 4) -> (N,) heading of the base's x axis in the horizontal plane, rad."""
    x, y, z, w = np.moveaxis(quaternions_xyzw, -1, 0)
    return np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


def axes_of(quaternions_xyzw: np.ndarray) -> np.ndarray:
    """(N, 4) -> (N, 3, 3) rotation matrices; column 0 is forward, column 1 left, column 2 up."""
    x, y, z, w = np.moveaxis(quaternions_xyzw, -1, 0)
    rows = [[1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))


def wrap_angle(angle_rad: np.ndarray) -> np.ndarray:
    """Into -pi..pi."""
    return np.arctan2(np.sin(angle_rad), np.cos(angle_rad))


def constant_velocity_path(position: np.ndarray, quaternion_xyzw: np.ndarray, speed_mps: float,
                           time_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Straight on at the present speed and heading: the baseline every planner must beat.

    Args:
        position, quaternion_xyzw, speed_mps: (3,), (4,) and scalar, at t0, in the fixed frame.
        time_ns: (N,) after t0.
    Returns:
        positions (N, 3) and quaternions_xyzw (N, 4) in the fixed frame.
    """
    forward = axes_of(quaternion_xyzw[None])[0, :, 0]
    distance = speed_mps * np.asarray(time_ns) * 1e-9
    return (position + distance[:, None] * forward,
            np.tile(quaternion_xyzw, (len(distance), 1)))


def path_errors(time_ns: np.ndarray, positions: np.ndarray, quaternions_xyzw: np.ndarray,
                true_positions: np.ndarray, true_quaternions_xyzw: np.ndarray) -> PathErrors:
    """Errors of a path at each of its N waypoints.

    Args:
        time_ns: (N,) int64, after t0.
        positions, true_positions: (N, 3) metres, same fixed frame.
        quaternions_xyzw, true_quaternions_xyzw: (N, 4).
    """
    offset = (positions - true_positions)[:, :2]                                # (N, 2)
    yaw = yaw_of(true_quaternions_xyzw)
    cos, sin = np.cos(yaw), np.sin(yaw)
    return PathErrors(
        time_ns=np.asarray(time_ns, dtype=np.int64),
        displacement_m=np.hypot(offset[:, 0], offset[:, 1]),
        longitudinal_m=cos * offset[:, 0] + sin * offset[:, 1],
        lateral_m=-sin * offset[:, 0] + cos * offset[:, 1],
        heading_rad=wrap_angle(yaw_of(quaternions_xyzw) - yaw))


def mean_until(time_ns: np.ndarray, values: np.ndarray,
               horizons_s: Sequence[float] = HORIZONS_S) -> np.ndarray:
    """Mean of the values at 0 < t <= horizon, for each horizon.

    Args:
        time_ns, values: (N,).
    Returns:
        (H,) NaN where the path ends before the horizon or a value up to it is not known.
    """
    means = np.full(len(horizons_s), np.nan)
    for i, horizon_ns in enumerate(_nanoseconds(horizons_s)):
        until = (time_ns > 0) & (time_ns <= horizon_ns)
        if until.any() and time_ns[-1] >= horizon_ns:
            means[i] = np.mean(values[until])
    return means


def value_at(time_ns: np.ndarray, values: np.ndarray,
             horizons_s: Sequence[float] = HORIZONS_S) -> np.ndarray:
    """The value at each horizon, linear between waypoints: (N,), (N,) -> (H,), else NaN.

    As for `mean_until`, every value up to the horizon must be known.
    """
    found = np.interp(_nanoseconds(horizons_s), time_ns, np.nan_to_num(values))
    return np.where(np.isfinite(mean_until(time_ns, values, horizons_s)), found, np.nan)


def _nanoseconds(horizons_s: Sequence[float]) -> np.ndarray:
    return np.rint(np.asarray(horizons_s) * 1e9).astype(np.int64)


def horizon_errors(paths: Sequence[PathErrors],
                   horizons_s: Sequence[float] = HORIZONS_S) -> HorizonErrors:
    """ADE, FDE, AHE, FHE and their parts over many paths."""
    ade, ahe = (_stacked(mean_until, paths, name, horizons_s)
                for name in ("displacement_m", "heading_rad"))
    fde, fhe, ahead, across = (_stacked(value_at, paths, name, horizons_s) for name in (
        "displacement_m", "heading_rad", "longitudinal_m", "lateral_m"))
    return HorizonErrors(
        horizons_s=tuple(horizons_s), samples=np.isfinite(ade).sum(axis=0),
        ade_m=_column_means(ade), fde_m=_column_means(fde),
        ahe_rad=_column_means(ahe), fhe_rad=_column_means(fhe),
        longitudinal_m=_column_means(ahead), lateral_m=_column_means(across),
        each_ade_m=ade, each_fde_m=fde)


def _stacked(function, paths: Sequence[PathErrors], name: str,
             horizons_s: Sequence[float]) -> np.ndarray:
    rows = [function(p.time_ns, np.abs(getattr(p, name)), horizons_s) for p in paths]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(horizons_s))     # (S, H)


def _column_means(values: np.ndarray) -> np.ndarray:
    """(S, H) -> (H,): mean of what is known; NaN for a column without any."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def paired(ours: np.ndarray, theirs: np.ndarray) -> Paired:
    """Compare two (S, H) tables sample by sample, where both are known."""
    difference = ours - theirs
    known = np.isfinite(difference)
    count = known.sum(axis=0)
    won = (known & (difference < 0.0)).sum(axis=0)
    return Paired(difference=_column_means(difference),
                  share_better=np.where(count > 0, won / np.maximum(count, 1), np.nan),
                  samples=count)


def best_sample(each_ade_m: np.ndarray) -> Optional[int]:
    """Which of K paths is meant by minADE_k: least ADE at the furthest horizon that all reach.

    Args:
        each_ade_m: (K, H), NaN where a path falls short.
    Returns:
        Its row, the same one for every horizon; None where no horizon is reached.
    """
    reached = np.flatnonzero(np.isfinite(each_ade_m).all(axis=0))
    return int(np.argmin(each_ade_m[:, reached[-1]])) if len(reached) else None


def plan_gap(earlier_ns: np.ndarray, earlier: np.ndarray, later_ns: np.ndarray,
             later: np.ndarray, horizons_s: Sequence[float] = HORIZONS_S) -> np.ndarray:
    """How far two consecutive plans are from each other at the same moments.

    Args:
        earlier_ns, later_ns: (N,), (M,) int64, stamps of the waypoints (not times after t0).
        earlier, later: (N, 3), (M, 3) positions in one fixed frame.
    Returns:
        (H,) metres: mean distance over the later plan's waypoints up to each horizon after its
        t0; NaN where the earlier plan ends before.
    """
    inside = (later_ns >= earlier_ns[0]) & (later_ns <= earlier_ns[-1])
    there = np.stack([np.interp(later_ns - later_ns[0], earlier_ns - later_ns[0], earlier[:, axis])
                      for axis in (0, 1)], axis=1)                                      # (M, 2)
    gaps = np.where(inside, np.linalg.norm(later[:, :2] - there, axis=1), np.nan)
    return mean_until(later_ns - later_ns[0], gaps, horizons_s)
