"""Odometry samples in, 16 evenly spaced ego poses out, in float64 throughout.

Between two samples the position follows the cubic with the velocities of the odometry twist at
both ends (Hermite), because at 17 Hz a straight line cuts a curve of 15 m/s and 0.3 rad/s by 2 mm.
The rotation follows the like cubic with the turn rates at both ends, because the heading at t0
turns the whole history: SLERP errs by 0.3 mrad where the turn rate changes by 1 rad/s2, 8 mm at a
distance of 25 m. Where the twist is absent (all zero) or contradicts the poses, the velocities are
those of parabolas through neighbouring samples and the rotation follows SLERP. Not thread-safe:
its owner holds a lock. No ROS, no images.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from . import frames
from ..config import HistoryConfig
from ..datatypes import (
    HISTORY_LENGTH, STEP_NS, STEP_S, EgoHistory, OdometrySample, Reason, Refusal,
)

_RATE_WINDOW_NS = 2_000_000_000
_MAX_SAMPLES = 20_000                # bound of memory whatever the stamps say
_SPAN_NS = (HISTORY_LENGTH - 1) * STEP_NS
_STANDING_M = 0.1                    # an all-zero velocity is believed up to this displacement
_STANDING_RAD = 0.01                 # an all-zero turn rate is believed up to this turn
_TWIST_SLACK_MPS = 0.5               # a twist may differ from the poses by this ...
_TWIST_SLACK_RPS = 0.05
_TWIST_SLACK_SHARE = 0.1             # ... and this share of the motion before it is disbelieved
_JUMP_M = 1.0                        # a step longer than this ...
_JUMP_MPS = 100.0                    # ... and faster than this is a new localisation, not motion


@dataclass(frozen=True)
class _Window:
    """The samples around one history as arrays, N of them, positions less `origin`."""

    stamps_ns: list[int]
    origin: np.ndarray               # (3,)
    positions: np.ndarray            # (N, 3)
    quaternions: np.ndarray          # (N, 4) xyzw
    rotations: np.ndarray            # (N, 3, 3)
    linear: np.ndarray               # (N, 3) m/s, base
    angular: np.ndarray              # (N, 3) rad/s, base
    linear_holds: bool = True        # whether `linear` goes with the positions
    angular_holds: bool = True       # whether `angular` goes with the rotations

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """(N - 1,) from each sample to the next."""
        return np.diff(self.stamps_ns) * 1e-9

    @functools.cached_property
    def twist_velocities(self) -> np.ndarray:
        """(N, 3) m/s in the map, from the twist."""
        return np.einsum("nij,nj->ni", self.rotations, self.linear)

    def bracket(self, time_ns: int) -> tuple[int, float]:
        """Index i and fraction u so that the time lies u of the way from sample i to i + 1."""
        i = min(max(bisect.bisect_right(self.stamps_ns, time_ns) - 1, 0),
                len(self.stamps_ns) - 2)
        span_ns = self.stamps_ns[i + 1] - self.stamps_ns[i]
        return i, (time_ns - self.stamps_ns[i]) / span_ns


def stamp_rate(stamps_ns: list[int], now_ns: int) -> tuple[float, float]:
    """Rate and age of an input out of its rising stamps.

    Returns:
        (rate in Hz over the last 2 s, 0 with fewer than two stamps in them; age in s of the
        newest stamp, infinity for none).
    """
    if not stamps_ns:
        return 0.0, float("inf")
    recent = stamps_ns[bisect.bisect_left(stamps_ns, now_ns - _RATE_WINDOW_NS):]
    rate_hz = (len(recent) - 1) * 1e9 / (recent[-1] - recent[0]) if len(recent) > 1 else 0.0
    return rate_hz, (now_ns - stamps_ns[-1]) * 1e-9


class OdometryBuffer:
    """The last `buffer_s` of odometry, stamps strictly rising.

    Attributes:
        counts: samples refused, by reason.
        normalised: samples kept whose quaternion's norm was off by more than rounding.
    """

    def __init__(self, config: HistoryConfig):
        self._config = config
        self._samples: list[OdometrySample] = []
        self._stamps_ns: list[int] = []
        self.counts: Counter[Reason] = Counter()
        self.normalised = 0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def newest_ns(self) -> int | None:
        """Stamp of the newest sample, None while there is none."""
        return self._stamps_ns[-1] if self._stamps_ns else None

    def rate(self, now_ns: int) -> tuple[float, float]:
        """(rate in Hz over the last 2 s, age in s of the newest sample, infinity for none)."""
        return stamp_rate(self._stamps_ns, now_ns)

    def clear(self) -> None:
        """Forget the samples; the counts stay."""
        self._samples.clear()
        self._stamps_ns.clear()

    def add(self, sample: OdometrySample) -> Refusal | None:
        """Keep a sample, or count it and say why not.

        Refused are a stamp of 0 or not newer than the newest (`OUT_OF_ORDER`), and NaN, infinity
        or a quaternion that is no rotation anywhere in it (`ODOMETRY_INVALID`).
        """
        refusal, sample = self._checked(sample)
        if refusal is not None:
            self.counts[refusal.reason] += 1
            return refusal
        self._samples.append(sample)
        self._stamps_ns.append(sample.stamp_ns)
        self._trim()
        return None

    def _checked(self, sample: OdometrySample) -> tuple[Refusal | None, OdometrySample]:
        """The sample with a unit quaternion, or the reason against it."""
        if sample.stamp_ns <= (self.newest_ns or 0):
            return Refusal(Reason.OUT_OF_ORDER,
                           f"odometry stamp {sample.stamp_ns} ns, expected later than "
                           f"{self.newest_ns or 0} ns"), sample
        for name in ("position", "linear_velocity", "angular_velocity"):
            value = getattr(sample, name)
            if not np.isfinite(value).all():
                return Refusal(Reason.ODOMETRY_INVALID,
                               f"odometry {name} is {np.asarray(value).tolist()}, "
                               "expected finite numbers"), sample
        quaternion = frames.normalised_quaternion(sample.quaternion_xyzw)
        if isinstance(quaternion, Refusal):
            return replace(quaternion, detail=f"odometry {quaternion.detail}"), sample
        off = abs(np.linalg.norm(sample.quaternion_xyzw) - 1.0)
        self.normalised += int(off > frames.NORM_UNREMARKABLE)
        return None, replace(sample, quaternion_xyzw=quaternion)

    def _trim(self) -> None:
        horizon_ns = self._stamps_ns[-1] - int(self._config.buffer_s * 1e9)
        drop = max(bisect.bisect_left(self._stamps_ns, horizon_ns),
                   len(self._stamps_ns) - _MAX_SAMPLES)
        del self._samples[:drop]
        del self._stamps_ns[:drop]

    def reaches(self, t0_ns: int) -> bool:
        """Whether a history at t0 would not be refused as stale."""
        limit_ns = int(self._config.max_extrapolation_s * 1e9)
        return self.newest_ns is not None and t0_ns - self.newest_ns <= limit_ns

    def history_at(self, t0_ns: int) -> EgoHistory | Refusal:
        """16 ego poses, t0 - 1.5 s .. t0.

        A t0 up to `max_extrapolation_s` past the newest sample is reached at constant twist.
        Returns:
            The history, or a Refusal: `NO_ODOMETRY`, `ODOMETRY_STALE` (t0 further past the
            newest sample), `HISTORY_SHORT` (nothing as old as t0 - 1.5 s), `ODOMETRY_GAP` (two
            neighbours over `max_gap_s` apart, or a jump of position between them).
        """
        window = self._window(t0_ns)
        if isinstance(window, Refusal):
            return window
        velocities = _velocities(window)
        times_ns = [t0_ns - _SPAN_NS + i * STEP_NS for i in range(HISTORY_LENGTH)]
        poses = [_pose_at(window, velocities, time_ns) for time_ns in times_ns]
        position_now, rotation_now = poses[-1]
        offsets = np.stack([position for position, _ in poses]) - position_now
        positions = offsets @ rotation_now
        rotations = np.stack([rotation_now.T @ rotation for _, rotation in poses])
        rotations[-1] = np.eye(3)
        speed_mps, yaw_rate_rps = _motion_at(window, t0_ns, positions, rotations)
        map_from_base = frames.transform(rotation_now, position_now + window.origin)
        return EgoHistory(t0_ns, positions, rotations, map_from_base, speed_mps, yaw_rate_rps)

    def _window(self, t0_ns: int) -> _Window | Refusal:
        """The samples that bracket t0 - 1.5 s .. t0, one more at each end where there is one."""
        if not self._stamps_ns:
            return Refusal(Reason.NO_ODOMETRY, "no odometry since the start or the last reset")
        if not self.reaches(t0_ns):
            age_s = (t0_ns - self._stamps_ns[-1]) * 1e-9
            return Refusal(Reason.ODOMETRY_STALE,
                           f"newest odometry is {age_s:.3f} s older than t0, expected at most "
                           f"{self._config.max_extrapolation_s:g} s")
        start_ns = t0_ns - _SPAN_NS
        first = bisect.bisect_right(self._stamps_ns, start_ns) - 1
        if first < 0:
            held_s = (t0_ns - self._stamps_ns[0]) * 1e-9
            return Refusal(Reason.HISTORY_SHORT,
                           f"odometry reaches {held_s:.3f} s before t0, expected "
                           f"{_SPAN_NS * 1e-9:.1f} s")
        last = min(bisect.bisect_left(self._stamps_ns, t0_ns), len(self._stamps_ns) - 1)
        assert first < last, (first, last)
        broken = self._broken(first, last)
        if broken is not None:
            return broken
        if first > 0 and self._broken(first - 1, first) is None:
            first -= 1
        if last + 1 < len(self._stamps_ns) and self._broken(last, last + 1) is None:
            last += 1
        return self._arrays(first, last)

    def _broken(self, first: int, last: int) -> Refusal | None:
        """The first gap in time or jump of position between samples first .. last."""
        for before, after in zip(self._samples[first:last], self._samples[first + 1:last + 1]):
            seconds = (after.stamp_ns - before.stamp_ns) * 1e-9
            if seconds > self._config.max_gap_s:
                return Refusal(Reason.ODOMETRY_GAP,
                               f"no odometry for {seconds:.3f} s after {before.stamp_ns} ns, "
                               f"expected at most {self._config.max_gap_s:g} s")
            step_m = math.dist(before.position, after.position)
            if step_m > max(_JUMP_M, _JUMP_MPS * seconds):
                return Refusal(Reason.ODOMETRY_GAP,
                               f"position jumps by {step_m:.1f} m within {seconds:.3f} s after "
                               f"{before.stamp_ns} ns, expected at most {_JUMP_MPS:g} m/s")
        return None

    def _arrays(self, first: int, last: int) -> _Window:
        samples = self._samples[first:last + 1]
        origin = np.array(samples[-1].position, dtype=np.float64)
        quaternions = np.stack([s.quaternion_xyzw for s in samples])
        window = _Window(
            stamps_ns=self._stamps_ns[first:last + 1],
            origin=origin,
            positions=np.stack([s.position for s in samples]) - origin,
            quaternions=quaternions,
            rotations=frames.matrix_from_quaternion(quaternions),
            linear=np.stack([s.linear_velocity for s in samples]).astype(np.float64),
            angular=np.stack([s.angular_velocity for s in samples]).astype(np.float64),
        )
        return replace(window, linear_holds=_linear_holds(window),
                       angular_holds=_angular_holds(window))


def _linear_holds(window: _Window) -> bool:
    """Whether the velocities, summed over the window, explain how far the vehicle came.

    False where they are all zero although it moved (drivers that leave the twist empty), and where
    they say something else than the positions (a twist in another frame).
    """
    moved = window.positions[-1] - window.positions[0]
    if not window.linear.any():
        return bool(np.linalg.norm(moved) <= _STANDING_M)
    return _explains(window, window.twist_velocities, moved, _TWIST_SLACK_MPS)


def _angular_holds(window: _Window) -> bool:
    """Whether the turn rates, summed over the window, explain how far the vehicle turned."""
    turned = frames.vector_between(window.quaternions[0], window.quaternions[-1])
    if not window.angular.any():
        return bool(np.linalg.norm(turned) <= _STANDING_RAD)
    return _explains(window, window.angular, turned, _TWIST_SLACK_RPS)


def _explains(window: _Window, rates: np.ndarray, change: np.ndarray, slack: float) -> bool:
    """Whether (N, 3) rates sum up to a (3,) change, within slack a second and a share of it."""
    summed = ((rates[:-1] + rates[1:]) / 2.0 * window.seconds[:, None]).sum(axis=0)
    allowed = slack * window.seconds.sum() + _TWIST_SLACK_SHARE * np.linalg.norm(change)
    return bool(np.linalg.norm(summed - change) <= allowed)


def _velocities(window: _Window) -> np.ndarray:
    """(N, 3) m/s in the map at every sample: the twist, or parabolas through the positions."""
    if window.linear_holds:
        return window.twist_velocities
    seconds = window.seconds[:, None]
    chords = np.diff(window.positions, axis=0) / seconds
    inner = (chords[:-1] * seconds[1:] + chords[1:] * seconds[:-1]) / (seconds[:-1] + seconds[1:])
    return np.concatenate([chords[:1], inner, chords[-1:]])


def _turn_rate_at_end(window: _Window) -> np.ndarray:
    """(3,) rad/s in the base at the last sample: the twist, or the last two rotations."""
    if window.angular_holds:
        return window.angular[-1]
    return frames.vector_between(*window.quaternions[-2:]) / window.seconds[-1]


def _pose_at(window: _Window, velocities: np.ndarray,
             time_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """(3,) position less origin and (3, 3) rotation, between two samples or after the last."""
    newest_ns = window.stamps_ns[-1]
    if time_ns > newest_ns:
        return _extrapolated(window, velocities[-1], (time_ns - newest_ns) * 1e-9)
    i, u = window.bracket(time_ns)
    position = _hermite(window.positions[i:i + 2], velocities[i:i + 2], window.seconds[i], u)
    return position, _rotation_between(window, i, u)


def _rotation_between(window: _Window, i: int, u: float) -> np.ndarray:
    """(3, 3) map from base, u of the way from sample i to i + 1."""
    start, end = window.quaternions[i:i + 2]
    if not window.angular_holds:
        return frames.matrix_from_quaternion(frames.slerp(start, end, u))
    vectors = np.stack([np.zeros(3), frames.vector_between(start, end)])
    turned = _hermite(vectors, window.angular[i:i + 2], window.seconds[i], u)
    return window.rotations[i] @ frames.rotation_from_vector(turned)


def _extrapolated(window: _Window, velocity: np.ndarray,
                  seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """The pose `seconds` after the last sample, at constant twist: along the arc, to O(s^3)."""
    turn_rate = _turn_rate_at_end(window)
    rotation = window.rotations[-1]
    midway = rotation @ frames.rotation_from_vector(turn_rate * seconds / 2.0)
    position = window.positions[-1] + midway @ (rotation.T @ velocity) * seconds
    return position, rotation @ frames.rotation_from_vector(turn_rate * seconds)


def _motion_at(window: _Window, t0_ns: int, positions: np.ndarray,
               rotations: np.ndarray) -> tuple[float, float]:
    """Forward speed (m/s) and yaw rate (rad/s) at t0, from the twist or, without, the poses.

    From the poses: slope at t0 of the parabola through t0 - 0.2 s, t0 - 0.1 s and t0, and the
    turn over the last 0.1 s.
    """
    i, u = window.bracket(min(t0_ns, window.stamps_ns[-1]))
    speed_mps = (1.0 - u) * window.linear[i, 0] + u * window.linear[i + 1, 0]
    yaw_rate_rps = (1.0 - u) * window.angular[i, 2] + u * window.angular[i + 1, 2]
    if not window.linear_holds:
        speed_mps = (positions[-3, 0] - 4.0 * positions[-2, 0]) / (2.0 * STEP_S)
    if not window.angular_holds:
        yaw_rate_rps = -frames.yaw_from_matrix(rotations[-2]) / STEP_S
    return float(speed_mps), float(yaw_rate_rps)


def _hermite(positions: np.ndarray, velocities: np.ndarray, span_s: float,
             u: float) -> np.ndarray:
    """(3,): the cubic with (2, 3) positions and (2, 3) velocities at its ends, at fraction u."""
    v = 1.0 - u
    along = v * v * (1.0 + 2.0 * u) * positions[0] + u * u * (1.0 + 2.0 * v) * positions[1]
    bend = u * v * v * velocities[0] - u * u * v * velocities[1]
    return along + span_s * bend
