"""A planner_node in a process of its own, fed in real time, and what it says collected.

For commands that measure the node, such as isolation_bench. The drive is a straight one at 10 m/s
with grey images: it is the node that is looked at, not its plans.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Callable, Sequence

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import Image

from ..conversions import stamp_fields
from ..errors import PlannerError
from ..msg import PlannedTrajectory, PlannerStatus

NODE = "/reasoning_planner"
SPEED_MPS = 10.0
CAMERAS = 4
END_TIMEOUT_S = 20.0


class NodeRunError(PlannerError):
    """The node did not do what the measurement needs."""


def environment() -> dict[str, str]:
    """A domain of its own, and the transport that large images need.

    Raw images of 640 x 480 from 4 cameras at 10 Hz hold up odometry by 0.7 s (p99) on Fast DDS's
    default transports and by 4 ms on these. They do not go with discovery on this machine only
    (ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST): nodes do not find each other then.
    """
    env = {**os.environ, "ROS_DOMAIN_ID": str(random.randrange(1, 101)),
           "FASTDDS_BUILTIN_TRANSPORTS": "LARGE_DATA", "ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"}
    env.pop("ROS_LOCALHOST_ONLY", None)
    return env


def machine_load() -> float:
    """Processes that ran or wanted to in the last minute, of everybody: above the number of
    processors, figures tell of the machine as much as of the node.
    """
    return round(os.getloadavg()[0], 2)


class NodeProcess:
    """A node of this package; use it in a with block. Its end must be clean."""

    def __init__(self, parameters: dict[str, object], env: dict[str, str],
                 module: str = "reasoning_planner.node", remappings: Sequence[str] = ()):
        command = [sys.executable, "-m", module, "--ros-args"]
        for rule in remappings:
            command += ["-r", rule]
        for name, value in parameters.items():
            command += ["-p", f"{name}:={json.dumps(value)}"]
        self._process = subprocess.Popen(command, env=env, cwd="/")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """
        Raises:
            NodeRunError: it had ended before, did not end in time, or not with 0.
        """
        if not self.is_running:
            raise NodeRunError(f"planner_node ended early with {self._process.returncode}")
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NodeRunError(f"planner_node did not end within {END_TIMEOUT_S:g} s") from None
        if code != 0:
            raise NodeRunError(f"planner_node ended with {code}, expected 0")

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.end()
        elif self.is_running:
            self._process.kill()
            self._process.wait()


@dataclass
class Heard:
    """What the node published, with the monotonic time of each arrival."""

    plans: list[tuple[float, PlannedTrajectory]] = field(default_factory=list)
    statuses: list[tuple[float, PlannerStatus]] = field(default_factory=list)
    diagnostics: dict[str, dict[str, str]] = field(default_factory=dict)    # newest, by name
    levels: dict[str, int] = field(default_factory=dict)


class Listener:
    """A node of ours that hears the planner; in a with block."""

    def __init__(self, env: dict[str, str]):
        os.environ.update(env)          # the middleware reads it when the context is made
        self._context = Context()
        rclpy.init(context=self._context, domain_id=int(env["ROS_DOMAIN_ID"]))
        self.node = rclpy.create_node("measurement", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self.heard = Heard()
        for kind, topic, keep in (
                (PlannedTrajectory, f"{NODE}/output/trajectory", self.on_plan),
                (PlannerStatus, f"{NODE}/output/status", self.on_status),
                (DiagnosticArray, "/diagnostics", self._on_diagnostics)):
            self.node.create_subscription(kind, topic, keep, 100)

    def on_plan(self, msg: PlannedTrajectory) -> None:
        """Keeps all; for another treatment, override."""
        self.heard.plans.append((time.monotonic(), msg))

    def on_status(self, msg: PlannerStatus) -> None:
        """Likewise."""
        self.heard.statuses.append((time.monotonic(), msg))

    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        for status in msg.status:
            name = status.name.partition(": ")[2]
            self.heard.diagnostics[name] = {item.key: item.value for item in status.values}
            self.heard.levels[name] = status.level[0]

    def spin(self, seconds: float) -> None:
        """Listen for at least one callback or as long as this."""
        self._executor.spin_once(timeout_sec=seconds)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """
        Raises:
            NodeRunError: the condition did not come true in time.
        """
        until_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until_s:
                raise NodeRunError(f"{what}: not within {timeout_s:g} s")
            self.spin(0.02)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown(context=self._context)


class Drive:
    """Publishes odometry and images in real time, stamped with the system's clock."""

    def __init__(self, listener: Listener, odometry_hz: float = 100.0, camera_hz: float = 10.0,
                 size: tuple[int, int] = (480, 640)):
        self._listener = listener
        node = listener.node
        self._odometry = node.create_publisher(Odometry, f"{NODE}/input/odometry", 100)
        self._cameras = [node.create_publisher(Image, f"{NODE}/input/image{slot}", 5)
                         for slot in range(CAMERAS)]
        self._periods_s = (1.0 / odometry_hz, 1.0 / camera_hz)
        self._image = Image(encoding="rgb8", height=size[0], width=size[1], step=size[1] * 3)
        self._image.data = np.full(size[0] * size[1] * 3, 128, np.uint8).tobytes()
        self._start_ns = time.time_ns()

    def is_heard(self) -> bool:
        """Whether the node subscribes everything."""
        return all(p.get_subscription_count() > 0 for p in (self._odometry, *self._cameras))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Drive for so long, or until the condition holds, listening meanwhile."""
        start_s = time.monotonic()
        due_s = [start_s, start_s]
        sends = (self._send_odometry, self._send_images)
        while time.monotonic() < start_s + seconds and not until():
            now_s = time.monotonic()
            for i, send in enumerate(sends):
                if now_s >= due_s[i]:
                    send()
                    due_s[i] = max(due_s[i] + self._periods_s[i], now_s)
            self._listener.spin(max(min(due_s) - time.monotonic(), 0.0))

    def _send_odometry(self) -> None:
        now_ns = time.time_ns()
        msg = Odometry()
        msg.header.stamp = Time(**stamp_fields(now_ns))
        msg.header.frame_id, msg.child_frame_id = "map", "base_link"
        msg.pose.pose.position.x = SPEED_MPS * (now_ns - self._start_ns) * 1e-9
        msg.pose.pose.orientation.w = 1.0
        msg.twist.twist.linear.x = SPEED_MPS
        self._odometry.publish(msg)

    def _send_images(self) -> None:
        self._image.header.stamp = Time(**stamp_fields(time.time_ns()))
        for camera in self._cameras:
            camera.publish(self._image)
