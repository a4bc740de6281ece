"""The pipeline: the model's plan when it is good, a reasoned fallback when it is not."""

import time
from dataclasses import fields, replace

import numpy as np
import pytest

from reasoning_planner.actions.unicycle import controls_to_path
from reasoning_planner.config import PlannerConfig, PoliciesConfig
from reasoning_planner.datatypes import (STEP_S, Deadline, EgoHistory, Observation, PlanStatus,
                                         Reason, Reasoning, Refusal, StageTimings)
from reasoning_planner.errors import ModelError
from reasoning_planner.planner import ModelResult, Planner


def _observation(speed=10.0, odometry_speed=None, degraded=()):
    positions = np.zeros((16, 3))
    positions[:, 0] = speed * np.arange(-15, 1) * STEP_S
    history = EgoHistory(1_000, positions, np.tile(np.eye(3), (16, 1, 1)), np.eye(4),
                         speed if odometry_speed is None else odometry_speed, 0.0)
    return Observation(stamp_ns=1_000, frame_id="map", history=history, frames=(),
                       degraded=degraded)


class FakeModel:
    """Answers what it is told to."""

    name = "fake"

    def __init__(self, answer, takes_s=0.0):
        self.answer, self.takes_s, self.calls = answer, takes_s, 0

    def plan_trajectory(self, observation, deadline):
        self.calls += 1
        time.sleep(self.takes_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


GOOD = controls_to_path(np.full(64, 0.5), np.full(64, 0.01), 10.0)
RESULT = ModelResult(GOOD, Reasoning(text="Keep lane."), StageTimings(encode_ms=3.0, act_ms=2.0))
LATE_CAMERA = Refusal(Reason.CAMERA_LATE, "image2 by 0.2 s")


def _assert_finite(plan):
    for item in fields(plan.trajectory):
        assert np.isfinite(getattr(plan.trajectory, item.name)).all(), item.name
    assert np.isfinite(plan.map_from_base).all()


KINEMATIC = PoliciesConfig("kinematic", "kinematic", "kinematic", "kinematic")


def _plan(model=None, observation=None, deadline=None, policies=KINEMATIC, last_valid=None):
    planner = Planner(PlannerConfig(policies=policies), model)
    plan = planner.plan(observation or _observation(), deadline or Deadline.after(5.0), last_valid)
    _assert_finite(plan)
    assert plan.stamp_ns == 1_000 and plan.frame_id == "map" and len(plan.plan_id) == 16
    assert plan.timings.total_ms > 0.0
    return plan


def test_without_a_model_the_plan_is_kinematic():
    plan = _plan()
    assert plan.status is PlanStatus.KINEMATIC and plan.planner == "kinematic"
    assert plan.reasons == () and plan.reasoning.text == ""
    assert plan.trajectory.positions[-1] == pytest.approx([64.0, 0.0], abs=1e-6)
    assert 0.0 < plan.timings.act_ms <= plan.timings.total_ms
    assert _plan(observation=_observation(degraded=(LATE_CAMERA,))).reasons == (LATE_CAMERA,)


def test_plan_ids_are_unique():
    planner = Planner(PlannerConfig())
    ids = {planner.plan(_observation(), Deadline.never()).plan_id for _ in range(50)}
    assert len(ids) == 50


def test_a_good_model_is_followed():
    plan = _plan(FakeModel(RESULT))
    assert plan.status is PlanStatus.OK and plan.planner == "fake" and plan.reasons == ()
    assert plan.trajectory is GOOD and plan.reasoning.text == "Keep lane."
    assert plan.timings.encode_ms == 3.0 and plan.timings.act_ms == 2.0


def test_a_good_model_with_a_late_camera_is_degraded():
    unfinished = Refusal(Reason.REASONING_UNFINISHED, "no end after 128 tokens")
    plan = _plan(FakeModel(replace(RESULT, reasons=(unfinished,))),
                 _observation(degraded=(LATE_CAMERA,)))
    assert plan.status is PlanStatus.DEGRADED and plan.reasons == (LATE_CAMERA, unfinished)


def _with_nan(trajectory):
    yaw = np.array(trajectory.yaw_rad)
    yaw[5] = np.nan
    return replace(trajectory, yaw_rad=yaw)


FAULTS = {
    "plan_not_finite": (replace(RESULT, trajectory=_with_nan(GOOD)), Reason.PLAN_NAN),
    "plan_over_limit": (replace(RESULT, trajectory=controls_to_path(
        np.full(64, 12.0), np.zeros(64), 10.0)), Reason.PLAN_OVER_LIMIT),
    "deadline_missed": (Refusal(Reason.REASONING_UNFINISHED, "out of time"),
                        Reason.REASONING_UNFINISHED),
    "model_failed": (ModelError("engine stopped"), Reason.MODEL_FAILED),
}


@pytest.mark.parametrize("answer, reason", [
    *FAULTS.values(),
    (replace(RESULT, trajectory=controls_to_path(np.zeros(64), np.zeros(64), 20.0)),
     Reason.PLAN_OVER_LIMIT),
    (Refusal(Reason.NO_MODEL, "no such file"), Reason.NO_MODEL),
])
def test_a_bad_model_falls_back_to_the_kinematic_plan(answer, reason):
    plan = _plan(FakeModel(answer), _observation(degraded=(LATE_CAMERA,)))
    assert plan.status is PlanStatus.KINEMATIC and plan.planner == "kinematic"
    assert [r.reason for r in plan.reasons] == [Reason.CAMERA_LATE, reason]
    assert plan.trajectory.positions[-1] == pytest.approx([64.0, 0.0], abs=1e-6)


def _last_valid(age_s=0.3):
    """Straight on at 10 m/s, seen `age_s` ago, `age_s` times 10 m back."""
    at = np.eye(4)
    at[0, 3] = -10.0 * age_s
    return replace(_plan(FakeModel(RESULT)), stamp_ns=1_000 - round(age_s * 1e9),
                   map_from_base=at,
                   trajectory=controls_to_path(np.zeros(64), np.zeros(64), 10.0))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy, status", [
    ("kinematic", PlanStatus.KINEMATIC), ("last_valid", PlanStatus.LAST_VALID),
    ("stop", PlanStatus.STOP)])
def test_each_fault_has_its_policy(fault, policy, status):
    answer, reason = FAULTS[fault]
    others = "stop" if policy != "stop" else "kinematic"
    policies = PoliciesConfig(**{**dict.fromkeys(FAULTS, others), fault: policy})
    plan = _plan(FakeModel(answer), policies=policies, last_valid=_last_valid())
    assert plan.status is status and [r.reason for r in plan.reasons] == [reason]


def test_by_default_every_fault_ends_in_the_last_valid_plan_and_then_in_a_stop():
    for answer, reason in FAULTS.values():
        last = _last_valid()
        plan = _plan(FakeModel(answer), policies=PoliciesConfig(), last_valid=last)
        assert plan.status is PlanStatus.LAST_VALID and plan.plan_id == last.plan_id
        assert plan.observed_ns == last.stamp_ns and len(plan.trajectory.positions) == 62
        assert plan.trajectory.positions[-1] == pytest.approx([61.0, 0.0])
        for old in (_last_valid(2.1), None):
            plan = _plan(FakeModel(answer), policies=PoliciesConfig(), last_valid=old)
            assert plan.status is PlanStatus.STOP and plan.observed_ns == 1_000
            assert [r.reason for r in plan.reasons] == [reason, Reason.PLAN_TOO_OLD]
            assert plan.trajectory.speed_mps[-1] == 0.0


def test_a_last_valid_plan_the_vehicle_has_left_becomes_a_stop():
    last = replace(_last_valid(), map_from_base=np.eye(4) + np.eye(4, k=3) * 50.0)
    plan = _plan(FakeModel(FAULTS["plan_not_finite"][0]), policies=PoliciesConfig(),
                 last_valid=last)
    assert plan.status is PlanStatus.STOP
    assert [r.reason for r in plan.reasons] == [Reason.PLAN_NAN, Reason.PLAN_LEFT]


def test_a_last_valid_plan_is_not_kept_when_all_is_well():
    assert _plan(FakeModel(RESULT), last_valid=_last_valid()).status is PlanStatus.OK
    assert _plan(last_valid=_last_valid()).status is PlanStatus.KINEMATIC


def test_a_late_model_falls_back():
    plan = _plan(FakeModel(RESULT, takes_s=0.05), deadline=Deadline.after(0.01))
    assert plan.status is PlanStatus.KINEMATIC
    assert [r.reason for r in plan.reasons] == [Reason.DEADLINE_MISSED]
    assert "fake late by" in plan.reasons[0].detail


def test_a_model_is_not_started_past_the_deadline():
    model = FakeModel(RESULT)
    plan = _plan(model, deadline=Deadline.after(-0.01))
    assert model.calls == 0 and plan.status is PlanStatus.KINEMATIC
    assert [r.reason for r in plan.reasons] == [Reason.DEADLINE_MISSED]


def test_a_bug_in_a_model_is_not_hidden():
    with pytest.raises(KeyError):
        _plan(FakeModel(KeyError("position_ids")))


def test_poses_against_the_twist_are_refused():
    plan = _plan(observation=_observation(10.0, odometry_speed=3.0))
    assert plan.status is PlanStatus.REFUSED
    assert [r.reason for r in plan.reasons] == [Reason.PLAN_OVER_LIMIT]    # said once, not twice
    assert "difference 7 m/s" in plan.reasons[0].detail
    assert not plan.trajectory.positions.any()


def test_a_kinematic_plan_over_a_limit_becomes_a_stop():
    # 44 m/s and 2 m/s^2 would pass 45 m/s; braking from 44 m/s keeps every bound.
    observation = _observation(44.0)
    t = np.arange(-15, 1) * STEP_S
    observation.history.positions[:, 0] = 44.0 * t + t**2
    plan = _plan(observation=observation)
    assert plan.status is PlanStatus.STOP
    assert "speed of waypoint" in plan.reasons[0].detail
    assert plan.trajectory.acceleration_mps2[0] == pytest.approx(-2.5)


@pytest.mark.parametrize("name", ["positions", "rotations", "map_from_base"])
def test_a_history_that_is_not_finite_is_refused(name):
    observation = _observation()
    getattr(observation.history, name)[-1] = np.nan
    plan = _plan(FakeModel(RESULT) if name == "map_from_base" else None, observation)
    assert plan.status is PlanStatus.REFUSED
    assert plan.reasons


def test_odometry_speed_that_is_not_finite_is_refused():
    plan = _plan(observation=_observation(odometry_speed=float("nan")))
    assert plan.status is PlanStatus.REFUSED
    assert plan.reasons[0].reason is Reason.ODOMETRY_INVALID
