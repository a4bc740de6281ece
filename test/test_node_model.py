"""planner_node with a real model behind it: a small one of random weights, through real DDS."""

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")
pytest.importorskip("torch", reason="torch writes the random weights")
pytest.importorskip("onnx", reason="onnx writes the graphs")
pytest.importorskip("onnxruntime", reason="runs the graphs")

from ros_harness import Vehicle, domain_id, end, start_node
from tiny_checkpoint import tiny_config, write_checkpoint

from reasoning_planner.export.to_onnx import export
from reasoning_planner.msg import PlannedTrajectory, ReasoningTrace

pytestmark = pytest.mark.ros


def plan_once(parameters):
    """(plan, trace of it, last status, stderr) of a node with these parameters."""
    domain = domain_id()
    process = start_node(domain, {"deadline_s": 20.0, **parameters})
    try:
        with Vehicle(domain) as vehicle:
            vehicle.wait_for_planner()
            vehicle.drive(0, 18)
            assert vehicle.wait_for(lambda: vehicle.plans and vehicle.traces, 30.0)
            plan = vehicle.plans[-1]
            vehicle.wait_for(lambda: any(t.plan_id == plan.plan_id for t in vehicle.traces), 5.0)
            trace = next(t for t in vehicle.traces if t.plan_id == plan.plan_id)
            status = vehicle.statuses[-1]
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors
    return plan, trace, status, errors


def test_a_model_plans_and_its_reasoning_is_published(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "tiny", tiny_config())
    export(checkpoint)
    plan, trace, status, _ = plan_once({"model.checkpoint": str(checkpoint),
                                        "model.max_new_tokens": 6, "limits.max_speed_mps": 99.0})
    assert status.planner == "tiny" and status.runtime == "ort"
    if plan.status == PlannedTrajectory.STATUS_KINEMATIC:   # random weights may plan nonsense
        assert any(reason.startswith("plan ") for reason in plan.reasons), plan.reasons
        return
    assert plan.status == PlannedTrajectory.STATUS_DEGRADED and plan.planner == "tiny"
    assert any(reason.startswith("reasoning unfinished") for reason in plan.reasons)
    assert len(trace.token_ids) == 6 == len(trace.tokens)
    assert 1 <= trace.rounds <= 6           # auto drafts from the text of the cycle before
    assert trace.token_origins[0] == ReasoningTrace.ORIGIN_DELIBERATIVE
    assert min(trace.encode_ms, trace.prefill_ms, trace.reason_ms, trace.act_ms) > 0.0
    assert bytes(plan.reasoning_id.uuid) == bytes(plan.plan_id.uuid)


def test_a_model_that_cannot_be_loaded_is_said_in_every_plan(tmp_path):
    plan, trace, status, errors = plan_once({"model.checkpoint": str(tmp_path / "none")})
    assert plan.status == PlannedTrajectory.STATUS_KINEMATIC and plan.planner == "kinematic"
    assert any(reason.startswith("no model loaded") and "tokenizer.json" in reason
               for reason in plan.reasons), plan.reasons
    assert "the kinematic planner plans" in errors
    assert trace.status == ReasoningTrace.STATUS_NONE
