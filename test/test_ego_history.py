"""Ego history against curves whose poses are known exactly, and every way odometry goes wrong."""

import numpy as np
import pytest

from reasoning_planner.config import HistoryConfig
from reasoning_planner.datatypes import EgoHistory, OdometrySample, Reason, Refusal
from reasoning_planner.perception import frames
from reasoning_planner.perception.ego_history import OdometryBuffer

START_NS = 1_700_000_000_000_000_000
UTM = np.array([6e5, 5e6, 40.0])
ZERO = np.zeros(3)


class Arc:
    """Constant speed on a circle, climbing a little: position, rotation and twist by formula."""

    def __init__(self, speed_mps=15.0, yaw_rate_rps=0.3, climb_mps=0.2, origin=UTM):
        self.speed, self.rate, self.climb, self.origin = speed_mps, yaw_rate_rps, climb_mps, origin

    def position(self, t):
        radius = self.speed / self.rate
        return self.origin + [radius * np.sin(self.rate * t),
                              radius * (1.0 - np.cos(self.rate * t)), self.climb * t]

    def yaw(self, t):
        return self.rate * t

    def linear(self, t):
        return np.array([self.speed, 0.0, self.climb])

    def angular(self, t):
        return np.array([0.0, 0.0, self.rate])


class Weave(Arc):
    """Slowing from 20 m/s at 3 m/s2 while the heading swings: nothing is constant."""

    def yaw(self, t):
        return 0.15 * np.sin(2.0 * t)

    def position(self, t):
        s = np.linspace(0.0, t, 4001)                      # Simpson: exact far below 1 um
        v = 20.0 - 3.0 * s
        weights = np.ones(4001)
        weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
        weights *= t / 4000.0 / 3.0
        return self.origin + [weights @ (v * np.cos(self.yaw(s))),
                              weights @ (v * np.sin(self.yaw(s))), 0.0]

    def linear(self, t):
        return np.array([20.0 - 3.0 * t, 0.0, 0.0])

    def angular(self, t):
        return np.array([0.0, 0.0, 0.3 * np.cos(2.0 * t)])


def quaternion(yaw):
    return np.array([0.0, 0.0, np.sin(yaw / 2.0), np.cos(yaw / 2.0)])


def sample(curve, t, **changes):
    values = dict(stamp_ns=START_NS + round(t * 1e9), position=curve.position(t),
                  quaternion_xyzw=quaternion(curve.yaw(t)), linear_velocity=curve.linear(t),
                  angular_velocity=curve.angular(t))
    return OdometrySample(**{**values, **changes})


def jittered(rate_hz, end_s=3.0, seed=0):
    """Stamps up to 20 % of a period off the beat, in whole nanoseconds."""
    beat = np.arange(0.0, end_s, 1.0 / rate_hz)
    jitter = np.random.default_rng(seed).uniform(-0.2, 0.2, beat.size) / rate_hz
    return np.round(np.maximum(beat + jitter, 0.0), 9)


def filled(curve, times, **changes):
    buffer = OdometryBuffer(HistoryConfig())
    for t in times:
        assert buffer.add(sample(curve, t, **changes)) is None
    return buffer


def worst_error_m(curve, history, t0):
    """Largest distance of the 16 poses, and of the pose in the map, from the curve."""
    times = t0 - 1.5 + 0.1 * np.arange(16)
    rotation = frames.matrix_from_quaternion(quaternion(curve.yaw(t0)))
    expected = np.stack([curve.position(t) - curve.position(t0) for t in times]) @ rotation
    in_map = np.linalg.norm(history.map_from_base[:3, 3] - curve.position(t0))
    return max(np.linalg.norm(history.positions - expected, axis=1).max(), in_map)


def worst_turn_rad(curve, history, t0):
    times = t0 - 1.5 + 0.1 * np.arange(16)
    yaws = [frames.yaw_from_matrix(rotation) for rotation in history.rotations]
    return np.abs(yaws - np.array([curve.yaw(t) - curve.yaw(t0) for t in times])).max()


@pytest.mark.parametrize("curve", [Arc(), Weave(), Arc(25.0, -0.2)],
                         ids=["arc", "weave", "fast"])
@pytest.mark.parametrize("rate_hz", [17, 20, 50, 100])
def test_jittered_odometry_at_utm_size_is_within_a_millimetre(rate_hz, curve):
    buffer = filled(curve, jittered(rate_hz))
    for t0 in np.linspace(1.75, 2.85, 12):
        history = buffer.history_at(START_NS + round(t0 * 1e9))
        assert isinstance(history, EgoHistory), history
        assert worst_error_m(curve, history, t0) < 1e-3
        assert worst_turn_rad(curve, history, t0) < 1e-3
        assert history.speed_mps == pytest.approx(curve.linear(t0)[0], abs=1e-3)
        assert history.yaw_rate_rps == pytest.approx(curve.angular(t0)[2], abs=2e-3)
        np.testing.assert_array_equal(history.positions[-1], ZERO)
        np.testing.assert_array_equal(history.rotations[-1], np.eye(3))


@pytest.mark.parametrize("rate_hz", [17, 20, 50, 100])
def test_without_a_twist_the_positions_give_it(rate_hz):
    curve = Arc()
    buffer = filled(curve, jittered(rate_hz), linear_velocity=ZERO, angular_velocity=ZERO)
    for t0 in np.linspace(1.75, 2.85, 12):
        history = buffer.history_at(START_NS + round(t0 * 1e9))
        assert worst_error_m(curve, history, t0) < 2e-3
        assert history.speed_mps == pytest.approx(15.0, abs=0.05)
        assert history.yaw_rate_rps == pytest.approx(0.3, abs=0.01)


def test_a_twist_in_the_wrong_frame_is_not_believed():
    curve = Arc(yaw_rate_rps=0.3)
    times = jittered(20)
    buffer = filled(curve, times, linear_velocity=np.array([0.0, 15.0, 0.0]))
    history = buffer.history_at(START_NS + 2_500_000_000)
    assert worst_error_m(curve, history, 2.5) < 2e-3
    assert history.speed_mps == pytest.approx(15.0, abs=0.05)


def test_a_parked_vehicle_is_at_rest():
    buffer = OdometryBuffer(HistoryConfig())
    rng = np.random.default_rng(0)
    for i in range(250):
        buffer.add(OdometrySample(START_NS + i * 10_000_000, UTM + rng.normal(0.0, 0.005, 3),
                                  quaternion(0.7), ZERO, ZERO))
    history = buffer.history_at(START_NS + 2_400_000_000)
    assert history.speed_mps == 0.0 and history.yaw_rate_rps == 0.0
    assert np.abs(history.positions).max() < 0.05


def test_sign_flips_of_the_quaternion_change_nothing():
    curve, times = Weave(), jittered(50)
    plain = filled(curve, times)
    flipped = OdometryBuffer(HistoryConfig())
    for i, t in enumerate(times):
        flipped.add(sample(curve, t, quaternion_xyzw=(-1.0) ** i * quaternion(curve.yaw(t))))
    t0_ns = START_NS + 2_000_000_123
    np.testing.assert_allclose(flipped.history_at(t0_ns).rotations,
                               plain.history_at(t0_ns).rotations, atol=1e-12)


def test_a_little_past_the_newest_sample_is_extrapolated_and_further_is_stale():
    curve = Arc()
    newest = 2.5
    buffer = filled(curve, np.arange(0.0, newest + 1e-6, 0.02))
    for past in (0.01, 0.03, 0.05):
        history = buffer.history_at(START_NS + round((newest + past) * 1e9))
        assert worst_error_m(curve, history, newest + past) < 1e-3
    refusal = buffer.history_at(START_NS + 2_551_000_000)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.ODOMETRY_STALE
    assert "0.051" in refusal.detail and "0.05" in refusal.detail
    assert buffer.reaches(START_NS + 2_550_000_000)
    assert not buffer.reaches(START_NS + 2_551_000_000)


def test_a_gap_is_refused_until_it_has_left_the_window():
    curve = Arc()
    times = np.concatenate([np.arange(0.0, 1.0, 0.02), np.arange(1.21, 3.5, 0.02)])
    buffer = filled(curve, times)
    refusal = buffer.history_at(START_NS + 2_000_000_000)
    assert refusal.reason is Reason.ODOMETRY_GAP and "0.230" in refusal.detail
    assert buffer.history_at(START_NS + 2_700_000_000).reason is Reason.ODOMETRY_GAP
    assert isinstance(buffer.history_at(START_NS + 2_715_000_000), EgoHistory)


def test_a_gap_as_wide_as_allowed_is_bridged():
    curve = Arc()
    times = np.concatenate([np.arange(0.0, 1.0, 0.02), np.arange(1.18, 3.0, 0.02)])
    history = filled(curve, times).history_at(START_NS + 2_000_000_000)
    assert worst_error_m(curve, history, 2.0) < 1e-3


def test_a_jump_of_position_is_a_gap():
    curve, moved = Arc(), Arc(origin=UTM + 100.0)
    buffer = filled(curve, np.arange(0.0, 1.0, 0.02))
    for t in np.arange(1.0, 3.0, 0.02):
        buffer.add(sample(moved, t))
    refusal = buffer.history_at(START_NS + 2_000_000_000)
    assert refusal.reason is Reason.ODOMETRY_GAP and "jumps by 17" in refusal.detail
    after = buffer.history_at(START_NS + 2_505_000_000)
    assert worst_error_m(moved, after, 2.505) < 1e-3


def test_too_little_odometry():
    curve = Arc()
    buffer = OdometryBuffer(HistoryConfig())
    assert buffer.history_at(START_NS).reason is Reason.NO_ODOMETRY
    for t in np.arange(0.1, 1.6, 0.02):
        buffer.add(sample(curve, t))
    refusal = buffer.history_at(START_NS + 1_590_000_000)
    assert refusal.reason is Reason.HISTORY_SHORT and "1.490" in refusal.detail
    for t in np.arange(1.6, 2.0, 0.02):
        buffer.add(sample(curve, t))
    assert isinstance(buffer.history_at(START_NS + 1_600_000_000), EgoHistory)
    buffer.clear()
    assert buffer.history_at(START_NS + 1_600_000_000).reason is Reason.NO_ODOMETRY


@pytest.mark.parametrize("changes", [
    {"position": np.array([np.nan, 0.0, 0.0])},
    {"position": np.array([0.0, np.inf, 0.0])},
    {"linear_velocity": np.array([np.nan, 0.0, 0.0])},
    {"angular_velocity": np.array([0.0, 0.0, -np.inf])},
    {"quaternion_xyzw": np.array([np.nan, 0.0, 0.0, 1.0])},
    {"quaternion_xyzw": np.zeros(4)},
    {"quaternion_xyzw": np.array([0.0, 0.0, 0.0, 1.2])},
], ids=["nan x", "inf y", "nan speed", "inf rate", "nan q", "zero q", "norm 1.2"])
def test_invalid_samples_are_counted_and_never_seen(changes):
    curve = Arc()
    buffer = OdometryBuffer(HistoryConfig())
    for i, t in enumerate(np.arange(0.0, 2.5, 0.01)):
        bad = sample(curve, t, **changes) if i % 2 else None
        refusal = buffer.add(bad or sample(curve, t))
        assert (refusal is not None) == (bad is not None)
        if bad:
            assert refusal.reason is Reason.ODOMETRY_INVALID and "odometry" in refusal.detail
    assert buffer.counts == {Reason.ODOMETRY_INVALID: 125}
    history = buffer.history_at(START_NS + 2_400_000_000)
    assert worst_error_m(curve, history, 2.4) < 1e-3


def test_a_norm_slightly_off_is_normalised_and_counted():
    curve = Arc()
    buffer = OdometryBuffer(HistoryConfig())
    for t in np.arange(0.0, 2.5, 0.02):
        buffer.add(sample(curve, t, quaternion_xyzw=1.02 * quaternion(curve.yaw(t))))
    assert buffer.normalised == len(buffer) == 125 and not buffer.counts
    assert worst_error_m(curve, buffer.history_at(START_NS + 2_400_000_000), 2.4) < 1e-3
    assert filled(curve, [0.0]).normalised == 0


def test_repeated_older_and_zero_stamps_are_refused():
    curve = Arc()
    buffer = filled(curve, [0.0, 0.1])
    for stamp_ns in (START_NS + 100_000_000, START_NS + 50_000_000, 0, -5):
        refusal = buffer.add(sample(curve, 0.1, stamp_ns=stamp_ns))
        assert refusal.reason is Reason.OUT_OF_ORDER and str(stamp_ns) in refusal.detail
    assert buffer.counts == {Reason.OUT_OF_ORDER: 4} and len(buffer) == 2
    empty = OdometryBuffer(HistoryConfig())
    assert empty.add(sample(curve, 0.0, stamp_ns=0)).reason is Reason.OUT_OF_ORDER


def test_the_buffer_is_bounded_by_time():
    curve = Arc()
    buffer = OdometryBuffer(HistoryConfig(buffer_s=2.0))
    for i in range(1000):
        buffer.add(sample(curve, i * 0.01))
    assert len(buffer) == 201
