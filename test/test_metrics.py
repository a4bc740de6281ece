"""Trajectory errors against hand-worked numbers."""

import numpy as np
import pytest

from reasoning_planner.datatypes import OdometrySample
from reasoning_planner.errors import DataError
from reasoning_planner.evaluation import metrics
from reasoning_planner.evaluation.latency import quantiles, stage_quantiles

STEP = 100_000_000
TIMES = np.arange(65) * STEP


def yaw_quaternions(yaw):
    yaw = np.atleast_1d(np.asarray(yaw, dtype=float))
    return np.stack([0 * yaw, 0 * yaw, np.sin(yaw / 2), np.cos(yaw / 2)], axis=1)


def straight(speed, times=TIMES, yaw=0.0, start=(0.0, 0.0)):
    distance = speed * times * 1e-9
    return np.stack([start[0] + distance * np.cos(yaw), start[1] + distance * np.sin(yaw),
                     0 * distance], axis=1)


def make_track(stamps=TIMES, speed=10.0, yaw=0.0):
    return metrics.PoseTrack("map", stamps, straight(speed, stamps, yaw),
                             yaw_quaternions(np.full(len(stamps), yaw)),
                             np.full(len(stamps), speed))


def errors_of(positions, yaw=0.0, true_yaw=0.0, truth=None, times=TIMES):
    n = len(times)
    truth = straight(10.0, times) if truth is None else truth
    return metrics.path_errors(times, positions, yaw_quaternions(np.full(n, yaw)), truth,
                               yaw_quaternions(np.full(n, true_yaw)))


def test_pose_between_two_samples():
    quaternions = yaw_quaternions([0.0, 0.6])
    quaternions[1] *= -1.0                                    # the same rotation
    track = metrics.PoseTrack("map", np.array([0, STEP]), np.array([[0.0, 0, 0], [2, 4, 0]]),
                              quaternions, np.array([20.0, 24.0]))
    position, rotation, speed = metrics.pose_at(track, np.array([STEP // 4]))
    assert position[0] == pytest.approx([0.5, 1.0, 0.0])
    assert metrics.yaw_of(rotation)[0] == pytest.approx(0.15)
    assert speed[0] == pytest.approx(21.0)


def test_nothing_is_known_outside_the_track_and_in_gaps():
    track = make_track(np.array([0, 1, 2, 9, 10]) * STEP)
    position, rotation, speed = metrics.pose_at(
        track, np.array([-1, 0, 2 * STEP, 2 * STEP + 1, 9 * STEP - 1, 9 * STEP, 10 * STEP,
                         10 * STEP + 1]))
    known = [False, True, True, False, False, True, True, False]
    for values in (position[:, 0], rotation[:, 3], speed):
        assert np.isfinite(values).tolist() == known


def test_track_sorts_and_drops_repeated_stamps():
    def sample(stamp, x, speed=3.0):
        return OdometrySample(stamp, np.array([x, 0, 0]), np.array([0.0, 0, 0, 1]),
                              np.array([speed, 0, 0]), np.zeros(3))
    track = metrics.track_of_odometry([sample(20, 2.0), sample(10, 1.0), sample(20, 9.0)], "map")
    assert track.stamps_ns.tolist() == [10, 20]
    assert track.positions[:, 0].tolist() == [1.0, 2.0]
    with pytest.raises(DataError):
        metrics.track_of_odometry([], "map")


def test_speed_comes_from_the_poses_when_the_twist_is_empty():
    samples = [OdometrySample(i * STEP, np.array([0.0, 0.5 * i, 0]), yaw_quaternions(np.pi / 2)[0],
                              np.zeros(3), np.zeros(3)) for i in range(4)]
    assert metrics.track_of_odometry(samples, "map").speed_mps == pytest.approx([5.0] * 4)


def test_parts_of_an_error_along_a_heading():
    # Driving along +y; the plan is 3 m short and 4 m to the right (+x).
    errors = errors_of(np.array([[4.0, 7.0, 0.0]]), yaw=np.pi / 2 + 0.1, true_yaw=np.pi / 2,
                       truth=np.array([[0.0, 10.0, 0.0]]), times=np.array([STEP]))
    assert errors.displacement_m[0] == pytest.approx(5.0)
    assert errors.longitudinal_m[0] == pytest.approx(-3.0)
    assert errors.lateral_m[0] == pytest.approx(-4.0)
    assert errors.heading_rad[0] == pytest.approx(0.1)


def test_heading_error_goes_the_short_way():
    errors = errors_of(straight(10.0), yaw=np.pi - 0.1, true_yaw=-np.pi + 0.1)
    assert errors.heading_rad == pytest.approx(-0.2)


def test_ade_and_fde_of_a_plan_that_is_too_fast():
    # 11 instead of 10 m/s: after i steps 0.1 i m too far; mean of 0.1..0.5 is 0.3, of 0.1..6.4
    # it is 0.1 * 65 / 2.
    result = metrics.horizon_errors([errors_of(straight(11.0))])
    assert result.ade_m[0] == pytest.approx(0.3)
    assert result.fde_m[0] == pytest.approx(0.5)
    assert result.ade_m[-1] == pytest.approx(3.25)
    assert result.fde_m[-1] == pytest.approx(6.4)
    assert result.longitudinal_m[1] == pytest.approx(1.0)
    assert result.lateral_m == pytest.approx(0.0)


@pytest.mark.parametrize("without_first", [False, True])
def test_a_plan_late_by_a_step_shows(without_first):
    rows = slice(1, None) if without_first else slice(None)
    late = straight(10.0)[rows] - [1.0, 0.0, 0.0]   # at t it is where it should be at t - 0.1 s
    errors = metrics.path_errors(TIMES[rows], late, yaw_quaternions(np.zeros(len(late))),
                                 straight(10.0)[rows], yaw_quaternions(np.zeros(len(late))))
    result = metrics.horizon_errors([errors])
    assert result.ade_m == pytest.approx(1.0)
    assert result.fde_m == pytest.approx(1.0)


def test_a_plan_left_in_the_ego_frame_shows():
    truth = straight(10.0, yaw=np.pi / 2, start=(100.0, 50.0))
    errors = errors_of(straight(10.0), true_yaw=np.pi / 2, truth=truth)
    result = metrics.horizon_errors([errors])
    assert result.ade_m[0] > 100.0
    assert result.fhe_rad == pytest.approx(np.pi / 2)


def test_a_short_truth_counts_for_the_horizons_it_has():
    whole = errors_of(straight(11.0))
    truth = straight(10.0)
    truth[25:] = np.nan                                       # known up to 2.4 s
    short = errors_of(straight(13.0), truth=truth)
    result = metrics.horizon_errors([whole, short])
    assert result.samples.tolist() == [2, 2, 2, 1, 1, 1, 1]
    assert result.fde_m[2] == pytest.approx((2.0 + 6.0) / 2)
    assert result.fde_m[3] == pytest.approx(3.0)
    assert np.isnan(result.each_ade_m[1]).tolist() == [False] * 3 + [True] * 4


def test_a_hole_in_the_truth_ends_the_sample_there():
    truth = straight(10.0)
    truth[7] = np.nan
    result = metrics.horizon_errors([errors_of(straight(11.0), truth=truth)])
    assert result.samples.tolist() == [1, 0, 0, 0, 0, 0, 0]


def test_a_short_plan_and_no_plan():
    result = metrics.horizon_errors([errors_of(straight(11.0, TIMES[:11]), times=TIMES[:11])])
    assert result.samples.tolist() == [1, 1, 0, 0, 0, 0, 0]
    nothing = metrics.horizon_errors([])
    assert nothing.samples.tolist() == [0] * 7 and np.isnan(nothing.ade_m).all()


def test_horizon_between_two_waypoints():
    values = np.array([0.0, 1.0, 3.0])
    assert metrics.value_at(TIMES[:3], values, (0.15,))[0] == pytest.approx(2.0)


def test_constant_velocity_is_straight_at_the_present_heading():
    positions, quaternions = metrics.constant_velocity_path(
        np.array([1.0, 2.0, 0.0]), yaw_quaternions(np.pi / 2)[0], 5.0, TIMES)
    assert positions[0] == pytest.approx([1.0, 2.0, 0.0])
    assert positions[64] == pytest.approx([1.0, 2.0 + 32.0, 0.0])
    assert metrics.yaw_of(quaternions) == pytest.approx(np.pi / 2)


def test_paired_uses_common_samples_only():
    ours = np.array([[1.0, 1.0], [2.0, np.nan], [5.0, 1.0]])
    theirs = np.array([[2.0, 3.0], [1.0, 1.0], [9.0, np.nan]])
    result = metrics.paired(ours, theirs)
    assert result.difference == pytest.approx([(-1 + 1 - 4) / 3, -2.0])
    assert result.share_better == pytest.approx([2 / 3, 1.0])
    assert result.samples.tolist() == [3, 1]


def test_axes_are_right_handed_and_orthonormal():
    quaternion = np.array([[0.1, -0.5, 0.3, 0.8]])
    axes = metrics.axes_of(quaternion / np.linalg.norm(quaternion))[0]
    assert axes @ axes.T == pytest.approx(np.eye(3))
    assert np.cross(axes[:, 0], axes[:, 1]) == pytest.approx(axes[:, 2])
    assert metrics.axes_of(yaw_quaternions(np.pi / 2))[0][:, 0] == pytest.approx([0, 1, 0])


def test_quantiles():
    assert quantiles(range(101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert quantiles([1.0, np.nan, 3.0], ("p50",)) == {"p50": 2.0}
    assert quantiles([]) == {"p50": None, "p95": None, "p99": None}


def test_a_stage_that_did_not_run_is_no_sample():
    cycles = [{"act": 1.0, "reason": 0.0}, {"act": 3.0, "reason": 8.0}]
    result = stage_quantiles(cycles, ("act", "reason"))
    assert result["act"]["p50"] == 2.0 and result["reason"]["p50"] == 8.0
