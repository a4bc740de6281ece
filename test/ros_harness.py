"""A planner_node in its own process and domain, fed over real DDS by the test.

Time is simulated: the test publishes /clock, so that 2 s of history pass in a fraction of that.
"""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
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
ANCHOR = 1
IMAGE = np.full((48, 64, 3), 128, dtype=np.uint8)
LOCKS = []                      # of the domains in use; the system drops them with the process
ROOT = Path(__file__).resolve().parent.parent


def domain_id():
    """A domain that no other test on this machine has until this process ends."""
    for number in random.sample(range(1, 102), 101):
        lock = open(Path(tempfile.gettempdir(), f"ros_test_domain_{number}.lock"), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        LOCKS.append(lock)
        return number
    raise RuntimeError("all 101 ROS domains are in use by tests")


def environment(domain):
    return {**os.environ, "ROS_DOMAIN_ID": str(domain), "PYTHONUNBUFFERED": "1",
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}


def executable(name):
    from ament_index_python.packages import get_package_prefix

    return str(Path(get_package_prefix("reasoning_planner"), "lib", "reasoning_planner", name))


WITH_MODEL = ("import sys; sys.path[:0] = [sys.argv.pop(1)]; import slow_model; "
              "from reasoning_planner import node; "
              "sys.exit(node.main(load=getattr(slow_model, sys.argv.pop(1))))")


def start_node(domain, parameters=None, arguments=(), load="", env=None):
    """A planner_node process; its stderr can be read once it has ended.

    `load` names a function of slow_model.py that makes its model in place of load_model.
    """
    values = {"use_sim_time": True, **(parameters or {})}
    command = [executable("planner_node")]
    if load:
        values = {"model.checkpoint": "a model for tests", **values}
        command = [sys.executable, "-c", WITH_MODEL, str(ROOT / "test"), load]
    command += ["--ros-args", *arguments]
    for name, value in values.items():
        command += ["-p", f"{name}:={json.dumps(value)}"]
    return subprocess.Popen(command, env={**environment(domain), **(env or {})}, cwd="/",
                            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


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


@contextmanager
def running(parameters=None, arguments=(), load="", env=None, awaited=True, **vehicle_arguments):
    """A vehicle and its planner, which is awaited; the planner must end cleanly."""
    domain = domain_id()
    process = start_node(domain, parameters, arguments, load, env)
    try:
        with Vehicle(domain, **vehicle_arguments) as vehicle:
            vehicle.process = process
            if awaited:
                vehicle.wait_for_planner()
            yield vehicle
    finally:
        code, errors = end(process)
    assert code == 0 and "Traceback" not in errors, errors


class Vehicle:
    """Publishes a straight drive at 10 m/s and keeps what the planner answers."""

    def __init__(self, domain, cameras=4, namespace="", reliable=True, camera_type=Image):
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node("vehicle", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        base = f"{namespace}/reasoning_planner"
        policy = (QoSReliabilityPolicy.RELIABLE if reliable
                  else QoSReliabilityPolicy.BEST_EFFORT)
        qos = QoSProfile(depth=20, reliability=policy)
        self.camera_type, self.process = camera_type, None
        self.cameras = [self.node.create_publisher(camera_type, f"{base}/input/image{slot}", qos)
                        for slot in range(cameras)]
        self.odometry = self.node.create_publisher(Odometry, f"{base}/input/odometry", 100)
        self.clock = self.node.create_publisher(Clock, "/clock", 10)
        self.start_ns = START_NS
        self.now_ns = START_NS
        self.plans, self.traces, self.statuses = [], [], []
        self.cycles = 0                 # as the newest status has it
        self.diagnostics = {}           # newest of each name, without the node's
        self.worst = {}                 # highest level of each name since `fresh`
        self.drops, self._drops_before = {}, {}
        for kind, name, kept in ((PlannedTrajectory, "trajectory", self.plans),
                                 (ReasoningTrace, "reasoning", self.traces),
                                 (PlannerStatus, "status", self.statuses)):
            self.node.create_subscription(kind, f"{base}/output/{name}", kept.append, 100)
        self.node.create_subscription(PlannerStatus, f"{base}/output/status", self._on_status, 100)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)

    def _on_diagnostics(self, msg):
        for status in msg.status:
            name = status.name.partition(": ")[2]
            self.diagnostics[name] = status
            self.worst[name] = max(self.worst.get(name, 0), status.level[0])

    def _on_status(self, msg):
        self.cycles = msg.cycles
        self.drops = dict(zip(msg.drop_reasons, msg.drop_counts))

    def dropped(self, reason):
        """How often since `fresh`, as the newest status has it."""
        return self.drops.get(reason, 0) - self._drops_before.get(reason, 0)

    def last_reasons(self):
        return " | ".join(self.statuses[-1].degraded_reasons) if self.statuses else ""

    def wait_for_reason(self, text, timeout_s=20.0):
        heard = self.wait_for(lambda: text in self.last_reasons(), timeout_s)
        assert heard, f"expected {text!r}, last status: {self.statuses[-1:]}"

    def newest_plan_ns(self):
        return nanoseconds(self.new_plans()[-1].header.stamp) if self.new_plans() else 0

    def level(self, name):
        """Newest level of a diagnosis, -1 before the first."""
        return self.diagnostics[name].level[0] if name in self.diagnostics else -1

    def message(self, name):
        return self.diagnostics[name].message if name in self.diagnostics else ""

    def values(self, name):
        found = self.diagnostics[name].values if name in self.diagnostics else ()
        return {item.key: item.value for item in found}

    def fresh(self):
        """A hundred seconds later, which the node takes for a jump of time: begins anew."""
        self.start_ns = self.now_ns + 100 * 10**9
        self.now_ns = self.start_ns
        self.tick(self.start_ns)
        heard = len(self.statuses)
        jumped = self.wait_for(lambda: any(nanoseconds(status.header.stamp) >= self.start_ns
                                           for status in self.statuses[heard:]))
        assert jumped, "the node does not follow the clock"
        for kept in (self.plans, self.traces, self.statuses):
            kept.clear()
        self.diagnostics.clear()
        self.worst.clear()
        self._drops_before = dict(self.drops)

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
        """Spin until the condition holds; False after the time-out, or once the node has ended."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if condition():
                return True
            if self.process is not None and self.process.poll() is not None:
                return condition()
            self.executor.spin_once(timeout_sec=0.02)
        return condition()

    def wait_for_planner(self):
        assert self.wait_for(lambda: self.odometry.get_subscription_count() > 0
                             and all(c.get_subscription_count() > 0 for c in self.cameras)
                             and self.node.count_publishers(
                                 self.node.resolve_topic_name("/clock")) > 0), "no planner heard"
        self.spin(0.3)

    def tick(self, time_ns):
        self.now_ns = time_ns
        self.clock.publish(Clock(clock=stamp(time_ns)))

    def publish_odometry(self, time_ns, speed_mps=SPEED_MPS, frame_id="map", edit=None):
        msg = Odometry()
        msg.header.stamp = stamp(time_ns)
        msg.header.frame_id, msg.child_frame_id = frame_id, "base_link"
        msg.pose.pose.position.x = speed_mps * (time_ns - self.start_ns) * 1e-9
        msg.pose.pose.orientation.w = 1.0
        msg.twist.twist.linear.x = speed_mps
        if edit is not None:
            edit(msg)
        self.odometry.publish(msg)

    def publish_image(self, slot, time_ns, edit=None):
        msg = self.camera_type()
        msg.header.stamp = stamp(time_ns)
        if self.camera_type is Image:
            msg.encoding, msg.height, msg.width = "rgb8", IMAGE.shape[0], IMAGE.shape[1]
            msg.step = IMAGE.shape[1] * 3
            msg.data = IMAGE.tobytes()
        if edit is not None:
            edit(msg)
        self.cameras[slot].publish(msg)

    def drive(self, first, last, slots=(0, 1, 2, 3), delays_ns=None, with_odometry=True,
              patience_s=None):
        """Steps first..last of 0.1 s each: clock, odometry at 50 Hz, one image a camera.

        The next step comes when the planner has answered this one's cycle, or after `patience_s`:
        1.5 s, or 0.08 s where no cycle can be expected for want of the anchor's image.
        `delays_ns` maps a slot to how late its frames come: at step i it publishes the frame of
        that much earlier.
        """
        for i in range(first, last + 1):
            now_ns = self.start_ns + i * STEP_NS
            self.tick(now_ns)
            if with_odometry:
                for k in range(5):
                    self.publish_odometry(now_ns - STEP_NS + (k + 1) * STEP_NS // 5)
            for slot in slots:
                self.publish_image(slot, now_ns - (delays_ns or {}).get(slot, 0))
            usual_s = 1.5 if ANCHOR in slots else 0.08
            self._wait_for_cycle(usual_s if patience_s is None else patience_s)

    def new_plans(self):
        """Those that are no repeats: on a busy machine some may come between."""
        return [plan for plan in self.plans if not plan.repeat]

    def cruise(self, seconds, slots=(0, 1, 2, 3)):
        """In real time from where the clock stands: clock 100 Hz, odometry 50, images 10."""
        start_s, begin_ns, sent = time.monotonic(), self.now_ns, 0
        while (now_s := time.monotonic() - start_s) < seconds:
            if now_s * 100.0 >= sent:
                self.tick(begin_ns + round(now_s * 1e9))
                if sent % 2 == 0:
                    self.publish_odometry(self.now_ns)
                for slot in slots if sent % 10 == 0 else ():
                    self.publish_image(slot, self.now_ns)
                sent += 1
            self.executor.spin_once(timeout_sec=0.002)

    def _wait_for_cycle(self, patience_s):
        before = self.cycles
        self.wait_for(lambda: self.cycles > before, patience_s)


def stamp(time_ns):
    return Time(sec=time_ns // 10**9, nanosec=time_ns % 10**9)


def nanoseconds(value):
    return value.sec * 10**9 + value.nanosec
