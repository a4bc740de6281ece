"""The turn that a route's goal asks for, and the topics over real DDS."""

import json
import math
import sys

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: make ros")
pytest.importorskip("reasoning_planner.msg", reason="needs the built workspace: make ros")

from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from ros_harness import running
from std_msgs.msg import String

from reasoning_planner.route_input import turn_towards

LEFT, RIGHT = math.pi / 2.0, -math.pi / 2.0
LATCHED = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)


@pytest.mark.parametrize("pose, goal, text", [
    ((0.0, 0.0, 0.0), (40.0, 25.0, LEFT), "Turn left in 40m"),
    ((0.0, 0.0, 0.0), (30.0, -9.0, RIGHT), "Turn right in 30m"),
    ((10.0, 5.0, LEFT), (-15.0, 45.0, math.pi), "Turn left in 40m"),    # the map turned
    ((0.0, 0.0, 0.0), (50.0, 20.0, math.radians(45.0)), "Turn left in 30m"),
    ((0.0, 0.0, 0.0), (90.0, 0.5, 0.05), ""),                   # straight ahead
    ((0.0, 0.0, 0.0), (-20.0, 25.0, LEFT), ""),                 # passed
    ((0.0, 0.0, 0.0), (400.0, 25.0, LEFT), ""),                 # far
    ((0.0, 0.0, 0.0), (40.0, -25.0, LEFT), ""),                 # the goal before its turn
    ((0.0, 0.0, 0.0), (40.0, 0.0, math.pi), "")])               # back
def test_the_turn_towards_a_goal(pose, goal, text):
    assert turn_towards(pose, goal) == text


@pytest.mark.ros
def test_a_latched_text_is_heard_and_a_missing_one_is_named():
    with running({"route_source": "text", "diagnostics_period_s": 0.2}) as vehicle:
        assert vehicle.wait_for(lambda: "nothing received" in vehicle.message("route"))
        assert "/reasoning_planner/input/route_text" in vehicle.message("route")
        publisher = vehicle.node.create_publisher(
            String, "/reasoning_planner/input/route_text", LATCHED)
        publisher.publish(String(data="Turn right\n in 30m"))
        heard = vehicle.wait_for(lambda: vehicle.values("route").get("instruction")
                                 == "Turn right in 30m")
        assert heard, vehicle.message("route")
        # The stand-in's prompt is Alpamayo 1's: the driver must know that nobody is told.
        assert "has no place for a route" in vehicle.message("route")
        assert vehicle.level("route") == 1


@pytest.mark.ros
def test_without_a_route_there_is_nothing_to_say():
    with running({"diagnostics_period_s": 0.2}) as vehicle:
        assert vehicle.wait_for(lambda: vehicle.level("route") == 0)
        assert vehicle.values("route") == {"source": "parameter", "instruction": ""}


PUBLISHER = """
import json, math, sys, rclpy
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from autoware_planning_msgs.msg import LaneletRoute
from geometry_msgs.msg import TransformStamped
from sensor_msgs.msg import CameraInfo
from tf2_msgs.msg import TFMessage

rclpy.init()
node = rclpy.create_node("mission")
latched = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
route = LaneletRoute()
route.goal_pose.position.x, route.goal_pose.position.y = 60.0, 30.0
route.goal_pose.orientation.z = route.goal_pose.orientation.w = math.sqrt(0.5)
mission = node.create_publisher(LaneletRoute, "/reasoning_planner/input/route", latched)
mission.publish(route)
transforms, infos = [], []
for slot, yaw in ((0, -60.0), (2, 60.0)):       # left and right the wrong way round
    item = TransformStamped()
    item.header.frame_id, item.child_frame_id = "base_link", f"optical{slot}"
    half = math.radians(yaw - 90.0) / 2.0       # z ahead, x right, y down; then the yaw
    s, c = math.sin(half) * math.sqrt(0.5), math.cos(half) * math.sqrt(0.5)
    item.transform.rotation.x, item.transform.rotation.y = -c, -s
    item.transform.rotation.z, item.transform.rotation.w = s, c
    transforms.append(item)
    info = CameraInfo(width=640, height=480)
    info.header.frame_id = f"optical{slot}"
    info.k[0] = 320.0 / math.tan(math.radians(60.0))
    infos.append((node.create_publisher(
        CameraInfo, f"/reasoning_planner/input/camera_info{slot}", 1), info))
tf = node.create_publisher(TFMessage, "/tf_static", latched)
tf.publish(TFMessage(transforms=transforms))
while rclpy.ok():
    for publisher, info in infos:
        publisher.publish(info)
    rclpy.spin_once(node, timeout_sec=0.2)
"""


@pytest.mark.ros
def test_autowares_route_and_swapped_cameras_are_heard():
    import shutil
    import subprocess

    import autoware_messages
    from ros_harness import environment

    if shutil.which("colcon") is None:
        pytest.skip("generates messages with colcon")
    env = autoware_messages.environment(autoware_messages.build())
    with running({"route_source": "lanelet_route", "diagnostics_period_s": 0.2},
                 env=env) as vehicle:
        domain = vehicle.context.get_domain_id()
        mission = subprocess.Popen([sys.executable, "-c", PUBLISHER],
                                   env={**environment(domain), **env}, cwd="/")
        try:
            vehicle.drive(0, 3)
            heard = vehicle.wait_for(lambda: vehicle.values("route").get(
                "instruction", "").startswith("Turn left in 5"), 30.0)
            assert heard, json.dumps(vehicle.values("route"))
            assert vehicle.wait_for(lambda: vehicle.level("calibration") == 2, 30.0), \
                vehicle.values("calibration")
            assert "image0 and image2 are swapped" in vehicle.message("calibration")
        finally:
            mission.kill()
            mission.wait()
