"""planner_node over real DDS: what it publishes, what it refuses, how it starts and ends."""

import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from builtin_interfaces.msg import Time
from ros_harness import (SPEED_MPS, START_NS, STEP_NS, Vehicle, domain_id, end, environment,
                         nanoseconds, running, start_node)

from reasoning_planner.msg import PlannedTrajectory, PlannerStatus, ReasoningTrace

pytestmark = pytest.mark.ros


@pytest.fixture(scope="module")
def shared():
    """One planner for the tests that leave it as it was."""
    with running({"diagnostics_period_s": 0.2}) as vehicle:
        yield vehicle


@pytest.fixture
def vehicle(shared):
    shared.fresh()
    return shared


def test_plans_carry_the_anchor_stamp_the_frame_and_exact_times(vehicle):
    vehicle.drive(0, 30)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 10)
    vehicle.spin(0.3)
    anchors = {vehicle.start_ns + i * STEP_NS for i in range(31)}
    plans = vehicle.new_plans()
    for plan in plans:
        t0_ns = nanoseconds(plan.header.stamp)
        assert t0_ns in anchors and plan.header.frame_id == "map"
        assert nanoseconds(plan.observation_stamp) == t0_ns
        times = [nanoseconds(point.time_from_start) for point in plan.points]
        assert times == [i * STEP_NS for i in range(65)]
        assert plan.status == PlannedTrajectory.STATUS_KINEMATIC
        assert plan.planner == "kinematic" and not plan.reasons
        start = plan.points[0].pose.position
        assert start.x == pytest.approx(SPEED_MPS * (t0_ns - vehicle.start_ns) * 1e-9, abs=1e-3)
        assert plan.points[-1].pose.position.x - start.x == pytest.approx(64.0, abs=0.1)
        assert plan.points[0].velocity_mps == pytest.approx(SPEED_MPS, abs=1e-3)
    stamps = [nanoseconds(plan.header.stamp) for plan in vehicle.plans]
    assert stamps == sorted(set(stamps))
    assert len({bytes(plan.plan_id.uuid) for plan in plans}) == len(plans)


def test_every_plan_has_its_trace_and_a_kinematic_one_does_not_pretend_to_reason(vehicle):
    vehicle.drive(0, 20)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
    vehicle.spin(0.3)
    assert {bytes(t.plan_id.uuid) for t in vehicle.traces} == \
        {bytes(p.plan_id.uuid) for p in vehicle.plans}
    for trace in vehicle.traces:
        assert trace.status == ReasoningTrace.STATUS_NONE and trace.text == ""
        assert trace.total_ms > 0.0 and trace.header.frame_id == "base_link"
    assert not any(np.any(plan.reasoning_id.uuid) for plan in vehicle.plans)


def test_what_is_awaited_is_said_from_no_clock_to_the_first_plan():
    with running() as vehicle:
        vehicle.wait_for_reason("no clock yet")
        vehicle.tick(START_NS)
        vehicle.wait_for_reason("no camera image received")
        assert "no odometry received" in vehicle.last_reasons()
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_WAITING
        vehicle.drive(0, 10)
        vehicle.wait_for_reason("ego history too short")
        assert not vehicle.plans
        assert vehicle.statuses[-1].state == PlannerStatus.STATE_WAITING
        assert vehicle.wait_for(lambda: "no plan yet" in vehicle.message("plan"))
        assert vehicle.level("plan") == 1
        vehicle.drive(11, 20)
        assert vehicle.wait_for(lambda: vehicle.plans and vehicle.level("plan") == 0)


def test_a_silent_camera_degrades_the_plan_and_is_named(vehicle):
    vehicle.drive(0, 22, slots=(0, 1, 3))
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
    vehicle.wait_for_reason("cameras missing")
    assert "/reasoning_planner/input/image2" in vehicle.last_reasons()
    assert vehicle.statuses[-1].state == PlannerStatus.STATE_DEGRADED
    assert vehicle.statuses[-1].camera_ages_s[2] == -1.0
    assert any("cameras missing" in reason for reason in vehicle.plans[-1].reasons)


def test_a_camera_200_ms_late_is_named_and_does_not_hold_up_the_stamp(vehicle):
    vehicle.drive(0, 22, delays_ns={3: 2 * STEP_NS})
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 3)
    vehicle.wait_for_reason("camera late")
    reason = next(r for r in vehicle.plans[-1].reasons if r.startswith("camera late"))
    assert "image3" in reason and "0.200 s" in reason
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 22 * STEP_NS)


def test_odometry_that_stops_ends_the_plans_and_says_why(vehicle):
    vehicle.drive(0, 20)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
    vehicle.spin(0.3)
    vehicle.drive(21, 30, with_odometry=False)
    vehicle.wait_for_reason("odometry stale")
    assert vehicle.statuses[-1].state == PlannerStatus.STATE_BLOCKED
    latest_ns = max(nanoseconds(plan.header.stamp) for plan in vehicle.plans)
    assert latest_ns == vehicle.start_ns + 20 * STEP_NS
    assert vehicle.dropped("odometry stale") >= 1
    assert vehicle.wait_for(lambda: "odometry stale" in vehicle.message("inputs")
                            and vehicle.level("inputs") == 2 == vehicle.level("plan"))


@pytest.mark.parametrize("edit, reason", [
    (lambda msg: setattr(msg.pose.pose.position, "x", float("nan")), "odometry invalid"),
    (lambda msg: setattr(msg.pose.pose.orientation, "w", 0.0), "odometry invalid"),
    (lambda msg: setattr(msg.pose.pose.orientation, "w", float("nan")), "odometry invalid"),
    (lambda msg: setattr(msg.twist.twist.linear, "x", float("inf")), "odometry invalid"),
    (lambda msg: setattr(msg.header, "frame_id", "odom"), "odometry frame unexpected"),
    (lambda msg: setattr(msg.header, "stamp", Time()), "stamp out of order"),
], ids=("nan_position", "zero_quaternion", "nan_quaternion", "infinite_speed", "other_frame",
        "stamp_0"))
def test_unusable_odometry_is_counted_and_never_planned_with(vehicle, edit, reason):
    vehicle.drive(0, 18)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
    vehicle.publish_odometry(vehicle.start_ns + 18 * STEP_NS + 1000, edit=edit)
    vehicle.drive(19, 20)
    assert vehicle.wait_for(lambda: vehicle.dropped(reason) == 1)
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 20 * STEP_NS)
    assert all(np.isfinite(point.pose.position.x)
               for plan in vehicle.plans for point in plan.points)


def test_a_plan_is_repeated_from_the_present_pose_until_it_is_too_old_and_then_a_stop(vehicle):
    vehicle.drive(0, 20)
    assert vehicle.wait_for(lambda: vehicle.plans)
    vehicle.spin(0.3)
    new = vehicle.plans[-1]
    t0_ns = nanoseconds(new.header.stamp)
    vehicle.drive(21, 45, slots=(0, 2, 3))                      # the anchor camera is silent
    assert vehicle.wait_for(lambda: vehicle.plans[-1].status == PlannedTrajectory.STATUS_STOP)
    repeats = [plan for plan in vehicle.plans if plan.repeat
               and plan.status == PlannedTrajectory.STATUS_KINEMATIC]
    assert len(repeats) >= 5
    for plan in repeats:
        now_ns = nanoseconds(plan.header.stamp)
        assert bytes(plan.plan_id.uuid) == bytes(new.plan_id.uuid)
        assert nanoseconds(plan.observation_stamp) == t0_ns < now_ns <= t0_ns + 2 * 10**9
        assert nanoseconds(plan.plan_age) >= now_ns - t0_ns
        assert len(plan.points) == 65 - -(-(now_ns - t0_ns) // STEP_NS)
        for point in (plan.points[0], plan.points[-1]):
            when_ns = now_ns + nanoseconds(point.time_from_start) - vehicle.start_ns
            assert point.pose.position.x == pytest.approx(SPEED_MPS * when_ns * 1e-9, abs=0.01)
    stamps = [nanoseconds(plan.header.stamp) for plan in vehicle.plans]
    assert stamps == sorted(set(stamps))
    stop = vehicle.plans[-1]
    assert stop.repeat and bytes(stop.plan_id.uuid) != bytes(new.plan_id.uuid)
    assert stop.points[-1].velocity_mps == 0.0 < stop.points[0].velocity_mps
    assert any(reason.startswith("plan too old") for reason in stop.reasons)
    vehicle.wait_for_reason("anchor camera /reasoning_planner/input/image1 silent")
    vehicle.wait_for_reason("plan too old")
    assert vehicle.statuses[-1].state == PlannerStatus.STATE_BLOCKED
    assert vehicle.wait_for(lambda: "plan too old" in vehicle.message("plan"))
    assert vehicle.level("plan") == 2
    vehicle.drive(46, 48)                                       # and back
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 48 * STEP_NS)


def test_an_undecodable_image_is_named_and_the_node_lives(vehicle):
    vehicle.drive(0, 18)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
    vehicle.tick(vehicle.start_ns + 19 * STEP_NS)
    vehicle.publish_odometry(vehicle.start_ns + 19 * STEP_NS)
    for slot in (0, 2, 3):
        vehicle.publish_image(slot, vehicle.start_ns + 19 * STEP_NS)
    vehicle.publish_image(1, vehicle.start_ns + 19 * STEP_NS,
                          edit=lambda msg: setattr(msg, "encoding", "no_such"))
    vehicle.wait_for_reason("camera image refused")
    assert "no_such" in vehicle.last_reasons() and "image1" in vehicle.last_reasons()
    vehicle.drive(20, 24)
    newest = vehicle.start_ns + 24 * STEP_NS
    assert vehicle.wait_for(lambda: vehicle.newest_plan_ns() == newest)


def test_a_jump_back_in_time_starts_anew(vehicle):
    vehicle.drive(50, 70)
    assert vehicle.wait_for(lambda: len(vehicle.plans) >= 2)
    vehicle.spin(0.2)
    before = len(vehicle.plans)
    vehicle.drive(0, 20)
    again = [vehicle.start_ns + i * STEP_NS for i in range(16, 21)]
    assert vehicle.wait_for(lambda: any(
        nanoseconds(plan.header.stamp) in again for plan in vehicle.plans[before:]))
    assert vehicle.dropped("time jumped") >= 1      # also what was in flight
    assert not any(nanoseconds(plan.header.stamp) < vehicle.start_ns + 15 * STEP_NS
                   for plan in vehicle.plans[before:])


def test_a_jump_forward_starts_anew(vehicle):
    vehicle.drive(0, 18)
    assert vehicle.wait_for(lambda: vehicle.plans)
    vehicle.spin(0.2)
    before = len(vehicle.plans)
    vehicle.drive(100, 110)                     # 8.2 s later, no history yet
    vehicle.wait_for_reason("ego history too short")
    assert len(vehicle.plans) == before and vehicle.dropped("time jumped") >= 1
    vehicle.drive(111, 118)
    assert vehicle.wait_for(
        lambda: vehicle.newest_plan_ns() == vehicle.start_ns + 118 * STEP_NS)


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
            vehicle.drive(21, 25, patience_s=0.1)
            assert len(vehicle.plans) == before
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors


def test_two_planners_in_two_namespaces_do_not_hear_each_other():
    domain = domain_id()
    names = ("/left", "/right")
    processes = [start_node(domain, {"diagnostics_period_s": 0.2}, ("-r", f"__ns:={name}"))
                 for name in names]
    try:
        with (Vehicle(domain, namespace=names[0]) as left,
              Vehicle(domain, namespace=names[1]) as right, Vehicle(domain) as outside):
            for vehicle in (left, right):
                vehicle.wait_for_planner()
            assert outside.odometry.get_subscription_count() == 0
            left.drive(0, 20)
            assert left.wait_for(lambda: left.plans)
            right.wait_for_reason("no camera image received")
            assert not right.plans and not outside.plans and not outside.statuses
            heard = len(left.new_plans())
            right.drive(21, 41)
            assert right.wait_for(lambda: right.plans)
            left.spin(0.3)
            assert len(left.new_plans()) == heard
    finally:
        ends = [end(process) for process in processes]
    assert [code for code, _ in ends] == [0, 0], ends


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
        refused = set_count(99).results[0]
        assert not refused.successful and "cameras.count: given 99" in refused.reason
        assert set_count(2).results[0].successful
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
        vehicle.drive(0, 18, patience_s=0.1)
        assert vehicle.wait_for(lambda: process.poll() is not None)
        assert not vehicle.plans
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1 and "ZeroDivisionError: a bug" in errors
