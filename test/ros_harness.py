"""A planner_node in its own process and domain, fed over real DDS by the test.

Time is simulated: the test publishes /clock, so that 2 s of history pass in a fraction of that.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import QoSProfile, QoSReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

from reasoning_planner.msg import PlannedTrajectory, PlannerStatus, ReasoningTrace

START_NS = 1_700_000_000_000_000_000
STEP_NS = 100_000_000
SPEED_MPS = 10.0
IMAGE = np.full((48, 64, 3), 128, dtype=np.uint8)
ROOT = Path(__file__).resolve().parent.parent


def domain_id():
    """One for each test process and call, so that no two runs hear each other."""
    domain_id.calls = getattr(domain_id, "calls", 0) + 1
    return (os.getpid() + domain_id.calls * 37) % 101 + 1


def environment(domain):
    return {**os.environ, "ROS_DOMAIN_ID": str(domain), "PYTHONUNBUFFERED": "1",
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}


def executable(name):
    from ament_index_python.packages import get_package_prefix

    return str(Path(get_package_prefix("reasoning_planner"), "lib", "reasoning_planner", name))


def start_node(domain, parameters=None, arguments=()):
    """A planner_node process; its stderr can be read once it has ended."""
    values = {"use_sim_time": True, **(parameters or {})}
    command = [executable("planner_node"), "--ros-args", *arguments]
    for name, value in values.items():
        command += ["-p", f"{name}:={json.dumps(value)}"]
    return subprocess.Popen(command, env=environment(domain), stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, text=True)


def end(process, number=signal.SIGINT):
    """(exit code, stderr) after a signal."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        errors += "\nkilled after 20 s"
    return process.returncode, errors


class Vehicle:
    """Publishes a straight drive at 10 m/s and keeps what the planner answers."""

    def __init__(self, domain, cameras=4, namespace="", reliable=True):
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node("vehicle", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        base = f"{namespace}/reasoning_planner"
        policy = (QoSReliabilityPolicy.RELIABLE if reliable
                  else QoSReliabilityPolicy.BEST_EFFORT)
        qos = QoSProfile(depth=20, reliability=policy)
        self.cameras = [self.node.create_publisher(Image, f"{base}/input/image{slot}", qos)
                        for slot in range(cameras)]
        self.odometry = self.node.create_publisher(Odometry, f"{base}/input/odometry", 100)
        self.clock = self.node.create_publisher(Clock, "/clock", 10)
        self.plans, self.traces, self.statuses = [], [], []
        for kind, name, kept in ((PlannedTrajectory, "trajectory", self.plans),
                                 (ReasoningTrace, "reasoning", self.traces),
                                 (PlannerStatus, "status", self.statuses)):
            self.node.create_subscription(kind, f"{base}/output/{name}", kept.append, 100)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown(context=self.context)

    def spin(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.executor.spin_once(timeout_sec=0.01)

    def wait_for(self, condition, timeout_s=20.0):
        """Spin until the condition holds; False after the time-out."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if condition():
                return True
            self.executor.spin_once(timeout_sec=0.02)
        return condition()

    def wait_for_planner(self):
        assert self.wait_for(lambda: self.odometry.get_subscription_count() > 0
                             and all(c.get_subscription_count() > 0 for c in self.cameras)
                             and self.node.count_publishers(
                                 self.node.resolve_topic_name("/clock")) > 0), "no planner heard"
        self.spin(0.3)

    def tick(self, time_ns):
        self.clock.publish(Clock(clock=stamp(time_ns)))

    def publish_odometry(self, time_ns, speed_mps=SPEED_MPS, frame_id="map", edit=None):
        msg = Odometry()
        msg.header.stamp = stamp(time_ns)
        msg.header.frame_id, msg.child_frame_id = frame_id, "base_link"
        msg.pose.pose.position.x = speed_mps * (time_ns - START_NS) * 1e-9
        msg.pose.pose.orientation.w = 1.0
        msg.twist.twist.linear.x = speed_mps
        if edit is not None:
            edit(msg)
        self.odometry.publish(msg)

    def publish_image(self, slot, time_ns, edit=None):
        msg = Image()
        msg.header.stamp = stamp(time_ns)
        msg.encoding, msg.height, msg.width = "rgb8", IMAGE.shape[0], IMAGE.shape[1]
        msg.step = IMAGE.shape[1] * 3
        msg.data = IMAGE.tobytes()
        if edit is not None:
            edit(msg)
        self.cameras[slot].publish(msg)

    def drive(self, first, last, slots=(0, 1, 2, 3), delays_ns=None, with_odometry=True,
              patience_s=0.3):
        """Steps first..last of 0.1 s each: clock, odometry at 50 Hz, one image a camera.

        The next step comes when the planner has answered this one's cycle, or after `patience_s`.
        `delays_ns` maps a slot to how late its frames come: at step i it publishes the frame of
        that much earlier.
        """
        for i in range(first, last + 1):
            now_ns = START_NS + i * STEP_NS
            self.tick(now_ns)
            if with_odometry:
                for k in range(5):
                    self.publish_odometry(now_ns - STEP_NS + (k + 1) * STEP_NS // 5)
            for slot in slots:
                self.publish_image(slot, now_ns - (delays_ns or {}).get(slot, 0))
            self._wait_for_cycle(patience_s)

    def _wait_for_cycle(self, patience_s):
        before = self.statuses[-1].cycles if self.statuses else 0
        self.wait_for(lambda: self.statuses and self.statuses[-1].cycles > before, patience_s)


def stamp(time_ns):
    return Time(sec=time_ns // 10**9, nanosec=time_ns % 10**9)


def nanoseconds(value):
    return value.sec * 10**9 + value.nanosec
