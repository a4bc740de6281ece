"""planner_node over real DDS: what it publishes, what it refuses, how it starts and ends."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from ros_harness import (SPEED_MPS, START_NS, STEP_NS, Vehicle, domain_id, end, environment,
                         nanoseconds, start_node)

from reasoning_planner.msg import PlannedTrajectory, PlannerStatus, ReasoningTrace

pytestmark = pytest.mark.ros


@contextmanager
def running(parameters=None, arguments=(), **vehicle_arguments):
    """A vehicle and its planner; the planner must end cleanly."""
    domain = domain_id()
    process = start_node(domain, parameters, arguments)
    try:
        with Vehicle(domain, **vehicle_arguments) as vehicle:
            vehicle.wait_for_planner()
            yield vehicle
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors


def last_reasons(vehicle):
    return " | ".join(vehicle.statuses[-1].degraded_reasons)


def wait_for_reason(vehicle, text):
    heard = vehicle.wait_for(lambda: vehicle.statuses and text in last_reasons(vehicle), 15.0)
    assert heard, f"expected {text!r}, last status: {vehicle.statuses[-1:]}"


def test_plans_carry_the_anchor_stamp_the_frame_and_exact_times():
    with running() as vehicle:
        vehicle.drive(0, 30)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 10)
        vehicle.spin(0.3)
        anchors = {START_NS + i * STEP_NS for i in range(31)}
        for plan in vehicle.plans:
            t0_ns = nanoseconds(plan.header.stamp)
            assert t0_ns in anchors and plan.header.frame_id == "map"
            times = [nanoseconds(point.time_from_start) for point in plan.points]
            assert times == [i * STEP_NS for i in range(65)]
            assert plan.status == PlannedTrajectory.STATUS_KINEMATIC
            assert plan.planner == "kinematic" and not plan.reasons
            start = plan.points[0].pose.position
            assert start.x == pytest.approx(SPEED_MPS * (t0_ns - START_NS) * 1e-9, abs=1e-3)
            assert plan.points[-1].pose.position.x - start.x == pytest.approx(64.0, abs=0.1)
            assert plan.points[0].velocity_mps == pytest.approx(SPEED_MPS, abs=1e-3)
        stamps = [nanoseconds(plan.header.stamp) for plan in vehicle.plans]
        assert stamps == sorted(set(stamps))
        assert len({bytes(plan.plan_id.uuid) for plan in vehicle.plans}) == len(vehicle.plans)


def test_every_plan_has_its_trace_and_a_kinematic_one_does_not_pretend_to_reason():
    with running() as vehicle:
        vehicle.drive(0, 20)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
        vehicle.spin(0.3)
        assert {bytes(t.plan_id.uuid) for t in vehicle.traces} == \
            {bytes(p.plan_id.uuid) for p in vehicle.plans}
        for trace in vehicle.traces:
            assert trace.status == ReasoningTrace.STATUS_NONE and trace.text == ""
            assert trace.total_ms > 0.0 and trace.header.frame_id == "base_link"
        assert not any(np.any(plan.reasoning_id.uuid) for plan in vehicle.plans)


def test_no_plan_before_the_history_is_complete_and_the_status_says_so():
    with running() as vehicle:
        vehicle.drive(0, 10)
        wait_for_reason(vehicle, "ego history too short")
        assert not vehicle.plans
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_WAITING


def test_a_silent_camera_degrades_the_plan_and_is_named():
    with running() as vehicle:
        vehicle.drive(0, 22, slots=(0, 1, 3))
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
        wait_for_reason(vehicle, "cameras missing")
        assert "/reasoning_planner/input/image2" in last_reasons(vehicle)
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_DEGRADED
        assert vehicle.statuses[-1].camera_ages_s[2] == -1.0
        assert any("cameras missing" in reason for reason in vehicle.plans[-1].reasons)


def test_a_camera_200_ms_late_is_named_and_does_not_hold_up_the_stamp():
    with running() as vehicle:
        vehicle.drive(0, 22, delays_ns={3: 2 * STEP_NS})
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
        wait_for_reason(vehicle, "camera late")
        reason = next(r for r in vehicle.plans[-1].reasons if r.startswith("camera late"))
        assert "image3" in reason and "0.200 s" in reason
        newest_ns = nanoseconds(vehicle.plans[-1].header.stamp)
        assert newest_ns == START_NS + 22 * STEP_NS


def test_odometry_that_stops_ends_the_plans_and_says_why():
    with running() as vehicle:
        vehicle.drive(0, 20)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
        vehicle.spin(0.3)
        vehicle.drive(21, 30, with_odometry=False)
        wait_for_reason(vehicle, "odometry stale")
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_BLOCKED
        latest_ns = max(nanoseconds(plan.header.stamp) for plan in vehicle.plans)
        assert latest_ns == START_NS + 20 * STEP_NS
        counts = dict(zip(vehicle.statuses[-1].drop_reasons, vehicle.statuses[-1].drop_counts))
        assert counts["odometry stale"] >= 1


def test_a_silent_anchor_is_told_by_the_heartbeat():
    with running() as vehicle:
        vehicle.drive(0, 20)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
        vehicle.drive(21, 30, slots=(0, 2, 3))
        wait_for_reason(vehicle, "anchor camera /reasoning_planner/input/image1 silent")
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_BLOCKED


def test_without_any_input_or_clock_the_status_says_what_is_awaited():
    with running() as vehicle:
        wait_for_reason(vehicle, "no clock yet")
        vehicle.tick(START_NS)
        wait_for_reason(vehicle, "no camera image received")
        assert "no odometry received" in last_reasons(vehicle)
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_WAITING


@pytest.mark.parametrize("edit, reason", [
    (lambda msg: setattr(msg.pose.pose.position, "x", float("nan")), "odometry invalid"),
    (lambda msg: setattr(msg.pose.pose.orientation, "w", 0.0), "odometry invalid"),
    (lambda msg: setattr(msg.header, "frame_id", "odom"), "odometry frame unexpected"),
])
def test_unusable_odometry_is_counted_and_never_planned_with(edit, reason):
    with running() as vehicle:
        vehicle.drive(0, 18)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
        vehicle.publish_odometry(START_NS + 18 * STEP_NS + 1000, edit=edit)
        vehicle.drive(19, 20)
        assert vehicle.wait_for(lambda: reason in vehicle.statuses[-1].drop_reasons)
        assert all(np.isfinite(point.pose.position.x)
                   for plan in vehicle.plans for point in plan.points)


def test_an_undecodable_image_is_named_and_the_node_lives():
    with running() as vehicle:
        vehicle.drive(0, 18)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
        vehicle.tick(START_NS + 19 * STEP_NS)
        vehicle.publish_odometry(START_NS + 19 * STEP_NS)
        for slot in (0, 2, 3):
            vehicle.publish_image(slot, START_NS + 19 * STEP_NS)
        vehicle.publish_image(1, START_NS + 19 * STEP_NS,
                              edit=lambda msg: setattr(msg, "encoding", "no_such"))
        wait_for_reason(vehicle, "camera image refused")
        assert "no_such" in last_reasons(vehicle) and "image1" in last_reasons(vehicle)
        vehicle.drive(20, 24)
        newest = START_NS + 24 * STEP_NS
        assert vehicle.wait_for(
            lambda: nanoseconds(vehicle.plans[-1].header.stamp) == newest)


def test_a_jump_back_in_time_starts_anew():
    with running() as vehicle:
        vehicle.drive(50, 70)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
        vehicle.spin(0.2)
        before = len(vehicle.plans)
        vehicle.drive(0, 20)
        again = [START_NS + i * STEP_NS for i in range(16, 21)]
        assert vehicle.wait_for(lambda: any(
            nanoseconds(plan.header.stamp) in again for plan in vehicle.plans[before:]))
        assert "time jumped" in " ".join(vehicle.statuses[-1].drop_reasons)


def test_cameras_that_offer_best_effort_only_are_heard():
    with running(reliable=False) as vehicle:
        vehicle.drive(0, 30)
        assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_node_with_0_and_without_traceback(number):
    domain = domain_id()
    process = start_node(domain)
    with Vehicle(domain) as vehicle:
        vehicle.wait_for_planner()
        vehicle.drive(0, 20)
        assert vehicle.wait_for(lambda: vehicle.plans)
        code, errors = end(process, number)
    assert code == 0 and "Traceback" not in errors and "rror" not in errors, errors


def test_bad_parameters_are_all_told_and_the_exit_code_is_1():
    process = start_node(domain_id(), {"cameras.count": 99, "deadline_s": "soon",
                                       "no_such_parameter": 1})
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in errors
    for name in ("cameras.count: given 99", "deadline_s: given 'soon'",
                 "no_such_parameter: unknown"):
        assert name in errors


def test_an_int_is_accepted_where_a_float_is_expected():
    with running({"deadline_s": 1, "history.buffer_s": 4}) as vehicle:
        vehicle.drive(0, 18)
        assert vehicle.wait_for(lambda: vehicle.plans)


def test_without_autostart_it_waits_for_a_lifecycle_manager():
    from lifecycle_msgs.msg import Transition
    from lifecycle_msgs.srv import ChangeState

    domain = domain_id()
    process = start_node(domain, {"autostart": False})
    try:
        with Vehicle(domain) as vehicle:
            client = vehicle.node.create_client(ChangeState, "/reasoning_planner/change_state")
            assert vehicle.wait_for(client.service_is_ready)
            assert vehicle.odometry.get_subscription_count() == 0
            for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
                request = ChangeState.Request()
                request.transition.id = transition
                answer = client.call_async(request)
                assert vehicle.wait_for(answer.done) and answer.result().success
            vehicle.wait_for_planner()
            vehicle.drive(0, 20)
            assert vehicle.wait_for(lambda: vehicle.plans)
            request = ChangeState.Request()
            request.transition.id = Transition.TRANSITION_DEACTIVATE
            answer = client.call_async(request)
            assert vehicle.wait_for(answer.done) and answer.result().success
            vehicle.spin(0.3)
            before = len(vehicle.plans)
            vehicle.drive(21, 25)
            assert len(vehicle.plans) == before
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors


def test_a_namespace_keeps_two_planners_apart():
    domain = domain_id()
    process = start_node(domain, arguments=("-r", "__ns:=/left"))
    try:
        with Vehicle(domain, namespace="/left") as left, Vehicle(domain) as right:
            left.wait_for_planner()
            left.drive(0, 20)
            assert left.wait_for(lambda: left.plans)
            right.spin(0.2)
            assert not right.plans and not right.statuses
    finally:
        assert end(process)[0] == 0


def test_it_can_be_configured_again_with_other_parameters():
    from lifecycle_msgs.msg import Transition
    from lifecycle_msgs.srv import ChangeState
    from rcl_interfaces.srv import SetParameters
    from rclpy.parameter import Parameter

    with running() as vehicle:
        change = vehicle.node.create_client(ChangeState, "/reasoning_planner/change_state")
        set_parameters = vehicle.node.create_client(SetParameters,
                                                    "/reasoning_planner/set_parameters")
        assert vehicle.wait_for(change.service_is_ready)

        def call(client, request):
            answer = client.call_async(request)
            assert vehicle.wait_for(answer.done)
            return answer.result()

        def transition(number):
            request = ChangeState.Request()
            request.transition.id = number
            return call(change, request).success

        def set_count(value):
            request = SetParameters.Request()
            request.parameters = [Parameter("cameras.count", value=value).to_parameter_msg()]
            return call(set_parameters, request)

        assert transition(Transition.TRANSITION_DEACTIVATE)
        assert transition(Transition.TRANSITION_CLEANUP)
        set_count(99)
        assert not transition(Transition.TRANSITION_CONFIGURE)
        set_count(2)
        assert transition(Transition.TRANSITION_CONFIGURE)
        assert transition(Transition.TRANSITION_ACTIVATE)
        assert vehicle.wait_for(lambda: vehicle.cameras[1].get_subscription_count() == 1)
        assert vehicle.wait_for(lambda: vehicle.cameras[2].get_subscription_count() == 0)
        vehicle.drive(0, 20, slots=(0, 1))
        assert vehicle.wait_for(lambda: vehicle.plans)
        assert not vehicle.plans[-1].reasons


def test_a_bug_in_the_planning_thread_ends_the_process_with_1():
    code = ("from reasoning_planner import node, planner\n"
            "def broken(*_):\n"
            "    raise ZeroDivisionError('a bug')\n"
            "planner.Planner.plan = broken\n"
            "raise SystemExit(node.main())\n")
    domain = domain_id()
    process = subprocess.Popen([sys.executable, "-c", code, "--ros-args", "-p",
                                "use_sim_time:=true"], env=environment(domain), cwd="/",
                               stderr=subprocess.PIPE, text=True)
    with Vehicle(domain) as vehicle:
        vehicle.wait_for_planner()
        vehicle.drive(0, 18)
        assert vehicle.wait_for(lambda: process.poll() is not None)
        assert not vehicle.plans
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1 and "ZeroDivisionError: a bug" in errors
