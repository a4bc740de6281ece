"""ROS messages <-> datatypes, on stand-ins with the messages' fields and on the real messages."""

from types import SimpleNamespace as Fields

import numpy as np
import pytest

from reasoning_planner import conversions
from reasoning_planner.datatypes import (OdometrySample, Plan, PlanStatus, Reason, Reasoning,
                                         Refusal, StageTimings, TokenOrigin, Trajectory)
from reasoning_planner.perception.frames import rotation_from_vector, transform

N = 65


def odometry(frame_id="map", child_frame_id="base_link"):
    return Fields(
        header=Fields(stamp=Fields(sec=12, nanosec=345), frame_id=frame_id),
        child_frame_id=child_frame_id,
        pose=Fields(pose=Fields(position=Fields(x=6e5, y=5e6, z=3.0),
                                orientation=Fields(x=0.0, y=0.0, z=0.6, w=0.8))),
        twist=Fields(twist=Fields(linear=Fields(x=1.0, y=2.0, z=3.0),
                                  angular=Fields(x=0.1, y=0.2, z=0.3))))


def plan(**changes):
    t = np.arange(N) * 0.1
    values = dict(
        plan_id=bytes(range(16)), stamp_ns=5_200_000_000, frame_id="map",
        map_from_base=transform(rotation_from_vector(np.array([0, 0, np.pi / 2])),
                                np.array([6e5, 5e6, 2.0])),
        trajectory=Trajectory(
            positions=np.stack([4.0 * t, 0.5 * t], axis=1), yaw_rad=np.zeros(N),
            speed_mps=np.full(N, 4.0), acceleration_mps2=np.zeros(N),
            curvature_1pm=np.full(N, 0.05)),
        status=PlanStatus.DEGRADED, reasons=(Refusal(Reason.CAMERAS_MISSING, "slot 2"),),
        timings=StageTimings(reason_ms=3.0, total_ms=5.0), planner="some")
    return Plan(**{**values, **changes})


def test_stamps_are_exact_both_ways():
    for value in (0, 1, 999_999_999, 1_700_000_000_123_456_789, -1):
        assert conversions.stamp_ns(Fields(**conversions.stamp_fields(value))) == value


def test_odometry_is_reduced_without_loss():
    sample = conversions.odometry_from_msg(odometry(), "map", "base_link")
    assert isinstance(sample, OdometrySample) and sample.stamp_ns == 12_000_000_345
    assert sample.position.tolist() == [6e5, 5e6, 3.0]
    assert sample.quaternion_xyzw.tolist() == [0.0, 0.0, 0.6, 0.8]
    assert sample.linear_velocity.tolist() == [1.0, 2.0, 3.0]
    assert sample.angular_velocity.tolist() == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("frame_id, child, told", [
    ("odom", "base_link", "header.frame_id is 'odom', expected 'map'"),
    ("map", "oxts_link", "child_frame_id is 'oxts_link', expected 'base_link'")])
def test_odometry_in_another_frame_is_refused(frame_id, child, told):
    refusal = conversions.odometry_from_msg(odometry(frame_id, child), "map", "base_link")
    assert refusal.reason is Reason.WRONG_FRAME and told in refusal.detail


def test_an_empty_child_frame_is_let_pass():
    assert isinstance(conversions.odometry_from_msg(odometry(child_frame_id=""), "map",
                                                    "base_link"), OdometrySample)


@pytest.mark.parametrize("origins, score", [
    ((), 0.0),
    ((TokenOrigin.ROUTINE, TokenOrigin.BONUS), 0.0),
    ((TokenOrigin.ROUTINE, TokenOrigin.RECOVERED, TokenOrigin.CORPUS,
      TokenOrigin.DELIBERATIVE), 0.5)])
def test_deliberation_score_is_the_share_the_target_wrote(origins, score):
    assert conversions.deliberation_score(Reasoning(origins=origins)) == score


class TestRealMessages:
    """Needs the built messages."""

    @pytest.fixture(autouse=True)
    def _messages(self):
        pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

    def test_a_trajectory_stands_in_the_map_with_exact_times(self):
        msg = conversions.trajectory_to_msg(plan(), now_ns=5_350_000_000, latency_ms=12.5)
        assert (msg.header.stamp.sec, msg.header.stamp.nanosec) == (5, 200_000_000)
        assert (msg.plan_age.sec, msg.plan_age.nanosec) == (0, 150_000_000)
        assert msg.header.frame_id == "map" and msg.planner == "some" and msg.latency_ms == 12.5
        assert msg.status == 1 and msg.reasons == ["cameras missing: slot 2"]
        last = msg.points[-1]
        assert (last.time_from_start.sec, last.time_from_start.nanosec) == (6, 400_000_000)
        # the base faces +y of the map: 25.6 m ahead is +y, 3.2 m to its left is -x
        assert last.pose.position.x == pytest.approx(6e5 - 3.2, abs=1e-6)
        assert last.pose.position.y == pytest.approx(5e6 + 25.6, abs=1e-6)
        assert last.pose.orientation.z == pytest.approx(np.sqrt(0.5))
        assert last.velocity_mps == 4.0 and last.yaw_rate_rps == pytest.approx(0.2)

    def test_a_plan_that_does_not_reason_names_no_reasoning(self):
        msg = conversions.trajectory_to_msg(plan(), 0, 0.0)
        assert not np.any(msg.reasoning_id.uuid)
        spoken = plan(reasoning=Reasoning(text="Keep lane.", token_ids=(1,), token_texts=("K",),
                                          origins=(TokenOrigin.ROUTINE,), rounds=1))
        msg = conversions.trajectory_to_msg(spoken, 0, 0.0)
        assert bytes(msg.reasoning_id.uuid) == bytes(range(16))

    @pytest.mark.parametrize("reasoning, reasons, status", [
        (Reasoning(), (), 0),
        (Reasoning(text="a", token_ids=(1, 2), token_texts=("a", "b"), rounds=1, proposed=1,
                   accepted=1, origins=(TokenOrigin.ROUTINE, TokenOrigin.BONUS)), (), 1),
        (Reasoning(text="a", token_ids=(1,), token_texts=("a",), rounds=1, proposed=1,
                   origins=(TokenOrigin.RECOVERED,)),
         (Refusal(Reason.REASONING_UNFINISHED, "deadline"),), 2),
        (Reasoning(text="a", token_ids=(1,), token_texts=("a",), rounds=1,
                   origins=(TokenOrigin.DELIBERATIVE,)), (), 3)])
    def test_a_trace_says_how_it_was_written(self, reasoning, reasons, status):
        msg = conversions.reasoning_to_msg(plan(reasoning=reasoning, reasons=reasons), "base_link")
        assert msg.status == status and msg.header.frame_id == "base_link"
        assert list(msg.token_ids) == list(reasoning.token_ids)
        assert msg.reason_ms == 3.0 and msg.total_ms == 5.0
        if reasoning.rounds:
            assert msg.acceptance_length == len(reasoning.token_ids) / reasoning.rounds

    def test_a_refused_plan_is_never_made_a_trajectory(self):
        with pytest.raises(AssertionError):
            conversions.trajectory_to_msg(plan(status=PlanStatus.REFUSED), 0, 0.0)

    def test_the_message_constants_are_the_enums(self):
        from reasoning_planner.msg import PlannedTrajectory, ReasoningTrace

        for status in PlanStatus:
            assert getattr(PlannedTrajectory, f"STATUS_{status.name}") == status
        for origin in TokenOrigin:
            assert getattr(ReasoningTrace, f"ORIGIN_{origin.name}") == origin
