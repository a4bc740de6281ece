"""planner_node over its life: a hundred activations, parameters of every kind and file."""

import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from ros_harness import ROOT, domain_id, end, running, start_node

pytestmark = pytest.mark.ros
WARM_UP, CYCLES = 20, 100
LEAK_MIB = 5.0


def resident_mib(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024.0


def test_a_hundred_activations_leak_nothing():
    with running() as vehicle:
        client = vehicle.node.create_client(ChangeState, "/reasoning_planner/change_state")
        assert vehicle.wait_for(client.service_is_ready)

        def change(transition):
            request = ChangeState.Request()
            request.transition.id = transition
            answer = client.call_async(request)
            assert vehicle.wait_for(answer.done) and answer.result().success

        for cycle in range(WARM_UP + CYCLES):
            if cycle == WARM_UP:
                before_mib = resident_mib(vehicle.process.pid)
            change(Transition.TRANSITION_DEACTIVATE)
            change(Transition.TRANSITION_ACTIVATE)
        grown_mib = resident_mib(vehicle.process.pid) - before_mib
        print(f"grown by {grown_mib:.2f} MiB in {CYCLES} activations")
        assert grown_mib < LEAK_MIB
        vehicle.wait_for_planner()
        vehicle.drive(0, 18)
        assert vehicle.wait_for(lambda: vehicle.plans)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_process_cleanly(number):
    process = start_node(domain_id())
    caught = Path(f"/proc/{process.pid}/status")
    until_s = time.monotonic() + 20.0
    while time.monotonic() < until_s:       # SIGTERM has a handler: the imports begin
        mask = int(caught.read_text().partition("SigCgt:")[2].split()[0], 16)
        if mask >> (signal.SIGTERM - 1) & 1:
            break
    code, errors = end(process, number)
    assert code == 0 and "Traceback" not in errors, errors


def test_another_interpreter_can_be_named(tmp_path):                               # row 25
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho "started by $0 with $2" >&2\n')
    other.chmod(0o755)
    process = start_node(domain_id(), env={"REASONING_PLANNER_PYTHON": str(other)})
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors.strip() == f"started by {other} with --ros-args"


def errors_of(parameters=None, arguments=()):
    """stderr of a node that must end by itself with 1, without a traceback."""
    process = start_node(domain_id(), parameters, arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in errors, errors
    return errors


def test_every_wrong_parameter_is_told_at_once():
    errors = errors_of({
        "cameras.count": 99, "deadline_s": "soon", "history.max_gap_s": True, "autostart": 1,
        "settle_s": "123E5", "model.camera_slots": [0.5, 1.5, 2.5, 3.5], "no_such_parameter": 1,
        "policies.no_such": "stop", "limits": 3.0})
    for told in ("cameras.count: given 99", "deadline_s: given 'soon' (str), expected float",
                 "history.max_gap_s: given True (bool), expected float",
                 "autostart: given 1 (int), expected bool", "settle_s: given",
                 "model.camera_slots[0]: given 0.5 (float), expected int",
                 "no_such_parameter: unknown", "policies.no_such: unknown",
                 "limits: given 3.0, expected a group"):
        assert told in errors, (told, errors)


def test_what_ros_itself_cannot_read_is_one_line_of_ours():
    errors = errors_of(arguments=("-p", "model.camera_slots:=[4.0, 2, one]"))
    ours = [line for line in errors.strip().splitlines() if "[rcl]" not in line]
    assert len(ours) == 1 and "Couldn't parse" in ours[0]


def test_whole_numbers_for_floats_and_a_file_for_another_node(tmp_path):
    foreign, own = tmp_path / "foreign.yaml", tmp_path / "own.yaml"
    foreign.write_text("/some/other_planner:\n  ros__parameters:\n    deadline_s: 9.0\n")
    own.write_text("left:\n  reasoning_planner:\n    ros__parameters:\n"
                   "      deadline_s: 1\n      limits:\n        max_speed_mps: 30\n"
                   "      diagnostics_period_s: 0.2\n")
    arguments = ["-r", "__ns:=/left", "--params-file", str(foreign), "--params-file", str(own)]
    with running(arguments=arguments, namespace="/left") as vehicle:
        assert vehicle.wait_for(lambda: vehicle.level("parameters") == 1)
        assert (f"{foreign}: holds parameters of /some/other_planner, expected some of "
                "/left/reasoning_planner or /**") in vehicle.message("parameters")
        assert str(own) not in vehicle.message("parameters")
        assert vehicle.values("inference")["budget_ms"] == "1000"


def test_the_shipped_file_is_for_this_node_wherever_it_is():
    shipped = ROOT / "config" / "planner.param.yaml"
    arguments = ["-r", "__ns:=/a/b", "--params-file", str(shipped)]
    with running(arguments=arguments, namespace="/a/b") as vehicle:
        assert vehicle.wait_for(lambda: vehicle.level("parameters") == 0)
