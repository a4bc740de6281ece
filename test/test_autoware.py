"""Plans as Autoware hears them, over real DDS, with its message types generated here."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

import autoware_messages
from ros_harness import ROOT, SPEED_MPS, STEP_NS, domain_id, end, environment, nanoseconds, running
from ros_harness import start_node

pytestmark = [pytest.mark.ros, pytest.mark.skipif(shutil.which("colcon") is None,
                                                  reason="generates messages with colcon")]
# Of `interface_type_hashes.jazzy.lock` in autoware_core.
JAZZY_TRAJECTORY = "RIHS01_8259168af0abd0d3fa8297048f83aae4dad0955bd2d4e0904bcdc4f6f99a61b2"
WHEEL_BASE_M = 2.79


@pytest.fixture(scope="module")
def prefix():
    return autoware_messages.build()


@contextmanager
def listening(domain, prefix, heard):
    """What the listener prints is appended to `heard`."""
    env = {**environment(domain), **autoware_messages.environment(prefix)}
    process = subprocess.Popen([sys.executable, str(ROOT / "test" / "autoware_listener.py")],
                               env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               cwd="/")
    reader = threading.Thread(
        target=lambda: heard.extend(map(json.loads, process.stdout)), daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(20)
        reader.join(20)


def of_kind(heard, kind):
    return [message for message in list(heard) if message["kind"] == kind]


def test_the_generated_type_is_autowares_own_on_the_wire(prefix):
    assert autoware_messages.type_hash(prefix, "autoware_planning_msgs",
                                       "Trajectory") == JAZZY_TRAJECTORY


def test_a_drive_as_autoware_hears_it(prefix):
    heard = []
    with running({"output_format": "autoware", "vehicle.wheel_base_m": WHEEL_BASE_M},
                 env=autoware_messages.environment(prefix)) as vehicle:
        with listening(vehicle.context.get_domain_id(), prefix, heard):
            assert vehicle.wait_for(lambda: of_kind(heard, "ready"), 30.0)
            vehicle.spin(0.5)
            vehicle.drive(0, 25)
            assert vehicle.wait_for(lambda: len(of_kind(heard, "trajectory")) >= 5
                                    and len(of_kind(heard, "candidates")) >= 5, 30.0), heard
            named = vehicle.node.get_publishers_info_by_topic(
                "/reasoning_planner/output/trajectory")
            assert [info.topic_type for info in named] == ["autoware_planning_msgs/msg/Trajectory"]
    for message in of_kind(heard, "trajectory") + of_kind(heard, "candidates"):
        points = message["points"]
        assert message["frame_id"] == "map" and 2 <= len(points) <= 65
        assert [p["time_ns"] for p in points] == [i * STEP_NS for i in range(len(points))]
        start_m = SPEED_MPS * (message["stamp_ns"] - vehicle.start_ns) * 1e-9
        assert points[0]["x"] == pytest.approx(start_m, abs=0.05) and points[0]["w"] == 1.0
        assert points[0]["velocity"] == pytest.approx(SPEED_MPS, abs=0.1)
        assert all(math.isfinite(value) for point in points for value in point.values())
    assert any(len(message["points"]) == 65 for message in of_kind(heard, "trajectory"))
    first, *others = of_kind(heard, "candidates")
    assert first["name"] == "reasoning_planner" and first["generator_id"] == first["info_id"]
    assert {other["generator_id"] for other in others} == {first["generator_id"]}


def test_a_turn_has_heading_rate_and_wheel_angle(prefix):
    heard, rate_rps = [], 0.2

    def turn(msg):
        angle = rate_rps * (nanoseconds(msg.header.stamp) - vehicle.start_ns) * 1e-9
        radius = SPEED_MPS / rate_rps
        msg.pose.pose.position.x = radius * math.sin(angle)
        msg.pose.pose.position.y = radius * (1.0 - math.cos(angle))
        msg.pose.pose.orientation.z = math.sin(angle / 2.0)
        msg.pose.pose.orientation.w = math.cos(angle / 2.0)
        msg.twist.twist.angular.z = rate_rps

    with running({"output_format": "autoware", "vehicle.wheel_base_m": WHEEL_BASE_M},
                 env=autoware_messages.environment(prefix)) as vehicle:
        with listening(vehicle.context.get_domain_id(), prefix, heard):
            assert vehicle.wait_for(lambda: of_kind(heard, "ready"), 30.0)
            vehicle.spin(0.5)
            for step in range(26):
                now_ns = vehicle.start_ns + step * STEP_NS
                vehicle.tick(now_ns)
                for k in range(5):
                    vehicle.publish_odometry(now_ns - STEP_NS + (k + 1) * STEP_NS // 5, edit=turn)
                for slot in range(4):
                    vehicle.publish_image(slot, now_ns)
                vehicle.spin(0.08)
            assert vehicle.wait_for(lambda: of_kind(heard, "trajectory"), 30.0)
    start = of_kind(heard, "trajectory")[-1]["points"][0]
    assert start["heading_rate"] == pytest.approx(rate_rps, rel=0.2)
    assert start["front_angle"] == pytest.approx(
        math.atan(WHEEL_BASE_M * rate_rps / SPEED_MPS), rel=0.2)


def test_without_autowares_messages_it_says_what_to_install():
    process = start_node(domain_id(), {"output_format": "autoware"},
                         env={name: os.environ.get(name, "") for name in ("PYTHONPATH",)})
    process.wait(30)
    code, errors = end(process)
    assert code == 1 and "autoware-planning-msgs" in errors and "Traceback" not in errors


def test_fields_that_only_newer_messages_have_are_filled():
    from builtin_interfaces.msg import Time
    from std_msgs.msg import Header

    from reasoning_planner.autoware_output import AutowareOutput

    class Command:
        stamp = None

    class Message:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    class Candidate(Message):
        def __init__(self, **fields):
            super().__init__(turn_indicator=Command(), **fields)

    output = AutowareOutput.__new__(AutowareOutput)     # its messages alone: another version's
    output._types = {"CandidateTrajectory": Candidate, "GeneratorInfo": Message,
                     "CandidateTrajectories": Message}
    output._generator_id, output._name = bytes(16), "planner"
    header = Header(stamp=Time(sec=3))
    candidate, = output._candidates_msg(header, []).candidate_trajectories
    assert candidate.turn_indicator.stamp == header.stamp
