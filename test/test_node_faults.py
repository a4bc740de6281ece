"""planner_node and a model that fails in every way: what is published, what is said, over DDS."""

import os
import signal
import time

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from rcl_interfaces.srv import SetParameters
from rclpy.parameter import Parameter
from ros_harness import STEP_NS, Vehicle, domain_id, end, nanoseconds, running, start_node

from reasoning_planner.msg import PlannedTrajectory, PlannerStatus

pytestmark = pytest.mark.ros
OK, KINEMATIC = PlannedTrajectory.STATUS_OK, PlannedTrajectory.STATUS_KINEMATIC
DEGRADED = PlannedTrajectory.STATUS_DEGRADED
LAST_VALID, STOP = PlannedTrajectory.STATUS_LAST_VALID, PlannedTrajectory.STATUS_STOP
ERROR = 2


@pytest.fixture(scope="module")
def shared():
    """A planner whose model does what the route text says."""
    with running({"diagnostics_period_s": 0.2, "deadline_s": 5.0, "settle_s": 0.5},
                 load="load") as vehicle:
        vehicle.client = vehicle.node.create_client(SetParameters,
                                                    "/reasoning_planner/set_parameters")
        assert vehicle.wait_for(vehicle.client.service_is_ready)
        yield vehicle


@pytest.fixture
def vehicle(shared):
    """At 2 s of a new drive, planning as it should."""
    shared.fresh()
    shared.drive(0, 20)
    end_ns = shared.start_ns + 20 * STEP_NS
    assert shared.wait_for(lambda: shared.newest_plan_ns() == end_ns and status(shared) == OK)
    yield shared
    assert change(shared, route_text="", deadline_s=5.0, **{"policies.plan_not_finite":
                                                            "last_valid"}) == ""


def change(vehicle, **values):
    """Set parameters; the reasons of the refusals."""
    request = SetParameters.Request()
    request.parameters = [Parameter(name, value=value).to_parameter_msg()
                          for name, value in values.items()]
    answer = vehicle.client.call_async(request)
    assert vehicle.wait_for(answer.done)
    return "; ".join(r.reason for r in answer.result().results if not r.successful)


def status(vehicle):
    """Of the newest plan that is no repeat."""
    plans = vehicle.new_plans()
    return plans[-1].status if plans else None


@pytest.mark.parametrize("told, reason", [
    ("nan", "plan not finite"), ("limit", "plan over limits"),
    ("refuse", "reasoning unfinished"), ("fail", "model failed")])
def test_a_fault_is_bridged_by_the_last_valid_plan_and_ends_in_a_stop(vehicle, told, reason):
    good = vehicle.new_plans()[-1]
    assert change(vehicle, route_text=told) == ""
    vehicle.drive(21, 24)
    assert vehicle.wait_for(lambda: status(vehicle) == LAST_VALID)
    plan = vehicle.new_plans()[-1]
    assert plan.reasons[0].startswith(reason)
    assert bytes(plan.plan_id.uuid) == bytes(good.plan_id.uuid)
    assert plan.points[0].velocity_mps == pytest.approx(10.0, abs=0.01)
    assert nanoseconds(plan.observation_stamp) < nanoseconds(plan.header.stamp)
    vehicle.wait_for_reason(reason)
    assert vehicle.statuses[-1].state == PlannerStatus.STATE_DEGRADED
    vehicle.drive(25, 42)
    assert vehicle.wait_for(lambda: status(vehicle) == STOP)
    reasons = " | ".join(vehicle.new_plans()[-1].reasons)
    assert reason in reasons and "plan too old" in reasons
    assert vehicle.wait_for(lambda: vehicle.level("plan") == ERROR
                            and "a stop is published" in vehicle.message("plan"))
    assert change(vehicle, route_text="") == ""
    vehicle.drive(43, 44)
    assert vehicle.wait_for(lambda: status(vehicle) == OK)
    assert vehicle.wait_for(lambda: vehicle.level("plan") == 0)


def test_a_policy_may_change_while_it_runs(vehicle):
    assert change(vehicle, route_text="nan", **{"policies.plan_not_finite": "kinematic"}) == ""
    vehicle.drive(21, 23)
    assert vehicle.wait_for(lambda: status(vehicle) == KINEMATIC)
    assert change(vehicle, **{"policies.plan_not_finite": "stop"}) == ""
    vehicle.drive(24, 26)
    assert vehicle.wait_for(lambda: status(vehicle) == STOP)


def test_a_late_model_is_not_waited_for(vehicle):
    assert change(vehicle, route_text="sleep 0.8", deadline_s=0.2) == ""
    vehicle.drive(21, 22)
    assert vehicle.wait_for(lambda: status(vehicle) == LAST_VALID)
    assert any(r.startswith("deadline missed") for r in vehicle.new_plans()[-1].reasons)
    assert vehicle.wait_for(lambda: "not in time" in vehicle.message("inference"))
    assert vehicle.values("inference")["budget_ms"] == "200"


def test_what_may_not_change_while_it_runs_is_refused(vehicle):
    for name, value, told in (("cameras.count", 2, "fixed while the node is configured"),
                              ("model.threads", 2, "fixed while the node is configured"),
                              ("deadline_s", -1.0, "deadline_s: given -1.0, expected"),
                              ("deadline_s", "soon", "deadline_s: given 'soon' (str)"),
                              ("policies.plan_not_finite", "hope", "expected one of kinematic")):
        assert told in change(vehicle, **{name: value})
    assert change(vehicle, deadline_s=4) == ""          # an int for a float


def test_the_model_s_process_is_started_again_after_kill_9(vehicle):
    assert vehicle.wait_for(lambda: vehicle.level("engine") == 0)
    before = vehicle.values("engine")
    vehicle.worst.clear()
    killed_s = time.monotonic()
    os.kill(int(before["process id"]), signal.SIGKILL)
    step = 20
    while status(vehicle) == OK and step < 200:
        step += 1
        vehicle.drive(step, step)
    assert status(vehicle) in (LAST_VALID, STOP)
    assert "signal 9 (SIGKILL)" in " ".join(vehicle.new_plans()[-1].reasons)
    while status(vehicle) != OK and time.monotonic() < killed_s + 30.0:
        step += 1
        vehicle.drive(step, step)
        vehicle.spin(0.05)
    assert status(vehicle) == OK
    print(f"planning again {time.monotonic() - killed_s:.2f} s after the kill")
    assert vehicle.wait_for(lambda: vehicle.values("engine")["process starts"]
                            == str(int(before["process starts"]) + 1))
    assert vehicle.values("engine")["process id"] != before["process id"]
    assert vehicle.worst["engine"] == ERROR
    assert vehicle.wait_for(lambda: vehicle.level("engine") == 0)


def test_an_engine_that_cannot_start_is_an_error():
    with running({"diagnostics_period_s": 0.2, "load_timeout_s": 1.0}, load="load_and_die",
                 ) as vehicle:
        assert vehicle.wait_for(lambda: "exit code 7, starting again" in vehicle.message("engine"))
        assert vehicle.level("engine") == ERROR
        vehicle.drive(0, 17)
        assert vehicle.wait_for(lambda: status(vehicle) == STOP)


def test_speculation_is_told(vehicle):
    vehicle.drive(21, 23)
    assert vehicle.wait_for(lambda: "acceptance_rate" in vehicle.values("speculation"))
    values = vehicle.values("speculation")
    assert values["tokens_per_target_pass"] == "1.500" and values["acceptance_rate"] == "0.250"
    assert vehicle.level("speculation") == 0
    assert change(vehicle, route_text="draft") == ""
    vehicle.drive(24, 26)
    assert vehicle.wait_for(lambda: vehicle.level("speculation") == 1)
    assert "the draft failed" in vehicle.message("speculation") and status(vehicle) == DEGRADED


def test_time_that_jumps_while_the_model_works_drops_its_plan(vehicle):
    assert change(vehicle, route_text="sleep 1") == ""
    vehicle.drive(21, 21, patience_s=0.2)
    overtaken_ns = vehicle.start_ns + 21 * STEP_NS
    vehicle.start_ns -= 50 * 10**9
    vehicle.drive(0, 3, patience_s=0.1)
    assert vehicle.wait_for(lambda: vehicle.dropped("time jumped") >= 2)    # buffers, and the plan
    vehicle.spin(0.2)
    assert not any(nanoseconds(p.observation_stamp) == overtaken_ns for p in vehicle.plans)


def test_a_model_of_700_ms_does_not_slow_the_topic_down():
    with running({"diagnostics_period_s": 0.2, "deadline_s": 5.0, "settle_s": 0.5}, load="load",
                 env={"TEST_MODEL_MS": "700"}) as vehicle:
        vehicle.tick(vehicle.start_ns)
        vehicle.cruise(3.0)
        assert vehicle.wait_for(lambda: vehicle.plans)
        first, begin_ns = len(vehicle.plans), vehicle.now_ns
        vehicle.cruise(3.0)
        rate_hz = (len(vehicle.plans) - first) / ((vehicle.now_ns - begin_ns) * 1e-9)
        plans = vehicle.plans[first:]
        assert 8.0 <= rate_hz <= 12.0
        stamps = [nanoseconds(plan.header.stamp) for plan in plans]
        assert stamps == sorted(stamps)
        assert all(plan.status == OK for plan in plans)
        assert len(plans) > len({bytes(plan.plan_id.uuid) for plan in plans}) >= 2
        for plan in plans:                  # whatever its age, it starts where the vehicle is
            when_s = (nanoseconds(plan.header.stamp) - vehicle.start_ns) * 1e-9
            assert plan.points[0].pose.position.x == pytest.approx(10.0 * when_s, abs=0.01)
        latency = vehicle.values("transport")
        print(f"{rate_hz:.2f} Hz, odometry callback p50 {latency['odometry callback p50_ms']} ms, "
              f"p99 {latency['odometry callback p99_ms']} ms")
        assert float(latency["odometry callback p50_ms"]) < 100.0


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_signal_during_inference_ends_the_node_cleanly(isolation):
    domain = domain_id()
    process = start_node(domain, {"isolation": isolation, "deadline_s": 30.0}, load="load",
                         env={"TEST_MODEL_MS": "1500"})
    with Vehicle(domain) as vehicle:
        vehicle.process = process
        vehicle.wait_for_planner()
        vehicle.drive(0, 17, patience_s=0.05)
        assert vehicle.wait_for(lambda: vehicle.plans)
        vehicle.drive(18, 19, patience_s=0.1)           # the model is at the next plan
        vehicle.spin(0.2)
        before = len(vehicle.plans)
        code, errors = end(process, signal.SIGTERM)
        vehicle.spin(0.3)
        assert len(vehicle.plans) == before
    assert code == 0 and "Traceback" not in errors, errors
