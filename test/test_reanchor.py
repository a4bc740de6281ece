"""Re-anchoring: against numbers worked out by hand."""

import numpy as np
import pytest

from reasoning_planner.actions.kinematic import stop_trajectory
from reasoning_planner.actions.reanchor import EgoMotion, crop, reanchor
from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.config import KinematicConfig, ReanchorConfig
from reasoning_planner.datatypes import EgoHistory, Plan, PlanStatus, Reason, Refusal

T0_NS = 1_700_000_000_000_000_000
STRAIGHT = controls_to_path(np.zeros(64), np.zeros(64), 10.0)          # 1 m a row
BRAKING = controls_to_path(np.full(64, -1.0), np.zeros(64), 10.0)
CIRCLE = controls_to_path(np.zeros(64), np.full(64, 0.1), 10.0)        # radius 10 m, 1 rad/s
NO_BLEND = ReanchorConfig(blend_s=0.0)


def pose(x=0.0, y=0.0, yaw=0.0, z=0.0):
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    matrix[:3, 3] = x, y, z
    return matrix


def plan(trajectory=STRAIGHT, at=None, status=PlanStatus.OK):
    return Plan(b"0123456789abcdef", T0_NS, "map", pose() if at is None else at, trajectory,
                status, planner="some")


def moved(base, elapsed_s, at, speed_mps=10.0, max_age_s=6.0, config=ReanchorConfig()):
    now = EgoMotion(T0_NS + round(elapsed_s * 1e9), at, speed_mps)
    return reanchor(base, now, max_age_s, config)


def in_map(answer):
    """(N, 2) positions in the map."""
    rotation, offset = answer.map_from_base[:2, :2], answer.map_from_base[:2, 3]
    return answer.trajectory.positions @ rotation.T + offset


def test_whole_steps_are_cropped_and_the_rest_stays_where_it_was():
    answer = moved(plan(), 0.3, pose(3.0))
    assert answer.stamp_ns == T0_NS + 300_000_000 and answer.observed_ns == T0_NS
    assert answer.plan_id == plan().plan_id and answer.status is PlanStatus.OK
    assert len(answer.trajectory.positions) == 62              # 65 less three
    assert answer.trajectory.positions[:, 0] == pytest.approx(np.arange(62.0))
    assert in_map(answer)[-1] == pytest.approx([64.0, 0.0])    # at t0 + 6.4 s, as planned
    assert answer.trajectory.time_from_start_ns[-1] == 6_100_000_000


def test_between_two_rows_the_motion_is_the_unicycle_s():
    # 10 m/s, -1 m/s^2: x(t) = 10 t - t^2 / 2, v(t) = 10 - t; at 0.25 s 2.46875 m and 9.75 m/s.
    answer = moved(plan(BRAKING), 0.25, pose(2.46875), speed_mps=9.75)
    rest = answer.trajectory
    assert len(rest.positions) == 62                           # 0.25, 0.35, .. 6.35 s
    assert rest.positions[0] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert rest.speed_mps[0] == pytest.approx(9.75)
    at = 0.25 + 0.1 * np.arange(62)
    assert in_map(answer)[:, 0] == pytest.approx(10.0 * at - at**2 / 2.0)
    assert rest.speed_mps == pytest.approx(10.0 - at)


def test_a_turn_is_seen_from_the_new_heading():
    # 1 rad/s at 10 m/s: after 1 s on the circle of 10 m about (0, 10), heading 1 rad.
    where = pose(CIRCLE.positions[10, 0], CIRCLE.positions[10, 1], CIRCLE.yaw_rad[10])
    expected = [10.0 * np.sin(1.0), 10.0 * (1.0 - np.cos(1.0))]
    assert where[:2, 3] == pytest.approx(expected, abs=0.02)
    rest = moved(plan(CIRCLE), 1.0, where).trajectory
    # What is left is the same circle again, begun anew.
    assert rest.positions == pytest.approx(CIRCLE.positions[:55], abs=1e-9)
    assert rest.yaw_rad == pytest.approx(CIRCLE.yaw_rad[:55], abs=1e-9)


def test_a_deviation_is_blended_out_within_the_time_given():
    # 0.4 m to the left of the plan, 2 degrees off and 1 m/s too slow, 0.1 s later.
    at = pose(1.0, 0.4, np.radians(2.0))
    rest = moved(plan(), 0.1, at, speed_mps=9.0)
    assert rest.trajectory.positions[0] == pytest.approx([0.0, 0.0])
    assert rest.trajectory.yaw_rad[0] == pytest.approx(0.0)
    assert rest.trajectory.speed_mps[0] == pytest.approx(9.0)
    seen = in_map(rest)
    assert seen[0] == pytest.approx([1.0, 0.4])
    assert seen[5] == pytest.approx([6.0, 0.2])                # half of it after half the time
    assert seen[10:, 1] == pytest.approx(np.zeros(54), abs=1e-12)
    assert seen[10:, 0] == pytest.approx(np.arange(11.0, 65.0))
    assert rest.trajectory.speed_mps[5] == pytest.approx(9.5)
    assert rest.trajectory.yaw_rad[10:] == pytest.approx(np.full(54, -np.radians(2.0)))


def test_without_blending_only_the_first_row_moves():
    seen = in_map(moved(plan(), 0.1, pose(1.0, 0.4), config=NO_BLEND))
    assert seen[:3] == pytest.approx(np.array([[1.0, 0.4], [2.0, 0.0], [3.0, 0.0]]))


def test_again_and_again_is_the_same_as_once():
    once = moved(plan(BRAKING), 0.25, pose(2.46875), 9.75)
    now = EgoMotion(T0_NS + 250_000_000, pose(2.46875), 9.75)
    twice = reanchor(moved(plan(BRAKING), 0.1, pose(0.995), 9.9), now, 6.0, ReanchorConfig())
    assert in_map(twice) == pytest.approx(in_map(once))
    assert twice.observed_ns == T0_NS and twice.stamp_ns == once.stamp_ns


def test_height_and_frame_follow_the_vehicle():
    answer = moved(plan(at=pose(5.0, 6.0, 1.0, z=2.0)), 0.0, pose(5.0, 6.0, 1.0, z=2.5))
    assert answer.map_from_base[2, 3] == 2.5 and answer.frame_id == "map"
    assert answer.trajectory.positions == pytest.approx(STRAIGHT.positions)


def test_too_old_is_refused_with_its_age():
    assert isinstance(moved(plan(), 2.0, pose(20.0), max_age_s=2.0), Plan)
    answer = moved(plan(), 2.1, pose(21.0), max_age_s=2.0)
    assert answer == Refusal(Reason.PLAN_TOO_OLD, "2.10 s, expected at most 2 s")


def test_the_age_counts_from_the_observation_however_often_it_was_moved():
    first = moved(plan(), 1.5, pose(15.0))
    now = EgoMotion(T0_NS + 2_500_000_000, pose(25.0), 10.0)
    assert reanchor(first, now, 2.0, ReanchorConfig()).reason is Reason.PLAN_TOO_OLD


def test_a_vehicle_elsewhere_does_not_follow_the_plan():
    near = moved(plan(), 0.1, pose(1.0, 2.9))
    assert isinstance(near, Plan)
    far = moved(plan(), 0.1, pose(1.0, 3.1))
    assert far == Refusal(Reason.PLAN_LEFT,
                          "3.10 m from where the plan has it, expected at most 3 m")
    assert moved(plan(), 0.1, pose(np.nan)).reason is Reason.PLAN_LEFT


def test_a_later_plan_than_the_pose_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="expected a later moment"):
        moved(plan(), -0.01, pose())


def test_the_last_two_rows_are_the_end():
    assert len(crop(STRAIGHT, 6_300_000_000).positions) == 2
    assert crop(STRAIGHT, 6_300_000_001) is None and crop(STRAIGHT, 7_000_000_000) is None
    assert moved(plan(), 6.35, pose(63.5), max_age_s=9.0).reason is Reason.PLAN_TOO_OLD


def test_a_stop_stays_a_stop():
    positions = np.zeros((16, 3))
    positions[:, 0] = np.arange(-15, 1) * 0.5                  # 5 m/s
    history = EgoHistory(T0_NS, positions, np.tile(np.eye(3), (16, 1, 1)), np.eye(4), 5.0, 0.0)
    base = plan(stop_trajectory(history, KinematicConfig()), status=PlanStatus.STOP)
    # 5 m/s at 2.5 m/s^2: at rest after 2 s and 5 m; after 1.05 s at 2.375 m/s and 3.871875 m.
    answer = moved(base, 1.05, pose(3.871875), 2.375)
    assert in_map(answer)[-1, 0] == pytest.approx(5.0, abs=1e-6)
    assert answer.trajectory.speed_mps[0] == pytest.approx(2.375)
    assert answer.trajectory.speed_mps[10:] == pytest.approx(np.zeros(len(
        answer.trajectory.speed_mps) - 10), abs=1e-6)
    standing = moved(base, 3.0, pose(5.0), 0.0)
    assert not standing.trajectory.speed_mps.any()
    assert standing.trajectory.positions == pytest.approx(np.zeros((35, 2)), abs=1e-6)


def test_a_heading_beyond_half_a_turn_is_no_deviation():
    where = pose(*CIRCLE.positions[40], CIRCLE.yaw_rad[40])    # 4 rad
    rest = moved(plan(CIRCLE), 4.0, where).trajectory
    assert rest.yaw_rad == pytest.approx(CIRCLE.yaw_rad[:25], abs=1e-9)
