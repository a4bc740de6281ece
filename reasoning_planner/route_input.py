"""The navigation instruction: from the parameter, from a text topic, or from Autoware's route.

A LaneletRoute names lanes by number and says nothing of their shape; without the map only its goal
is known, and the instruction is the turn towards it, where there is one. Both topics are latched.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rclpy.node import Node
from std_msgs.msg import String

from .datatypes import OdometrySample
from .diagnoses import Diagnosis, Level, joined
from .errors import MissingDependencyError
from .subscriptions import AdaptiveSubscription

FARTHEST_TURN_M = 200.0
SMALLEST_TURN_RAD, LARGEST_TURN_RAD = math.radians(30.0), math.radians(150.0)
LONGEST_TEXT = 200
WITH_ROUTE = "alpamayo-1.5"         # the prompt that has a place for it


class RouteInput:
    """~/input/route_text (std_msgs/String) or ~/input/route (LaneletRoute), by `route_source`."""

    def __init__(self, node: Node, source: str, prompt_version: str):
        """
        Args:
            source: "parameter": no topic; "text"; "lanelet_route".
        Raises:
            MissingDependencyError: Autoware's messages are not installed, and are asked for.
        """
        self._source, self._prompt_version = source, prompt_version
        self._text: str | None = None
        self._goal: tuple[float, float, float] | None = None     # x, y, yaw in the fixed frame
        self._pose: tuple[float, float, float] | None = None
        self.subscriptions: list[AdaptiveSubscription] = []
        if source == "text":
            self.subscriptions.append(AdaptiveSubscription(
                node, String, "~/input/route_text", self._on_text, depth=1, latched=True))
        elif source == "lanelet_route":
            self.subscriptions.append(AdaptiveSubscription(
                node, _lanelet_route(), "~/input/route", self._on_route, depth=1, latched=True))

    def moved(self, sample: OdometrySample) -> None:
        """The vehicle's newest pose."""
        x, y, z, w = sample.quaternion_xyzw
        self._pose = (sample.position[0], sample.position[1],
                      math.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z)))

    def text(self, parameter: str) -> str:
        """The instruction now; empty where there is none.

        Args:
            parameter: `route_text`, for the source "parameter".
        """
        if self._source == "parameter":
            return parameter
        if self._source == "text":
            return self._text or ""
        if self._goal is None or self._pose is None:
            return ""
        return turn_towards(self._pose, self._goal)

    def diagnosis(self, parameter: str) -> Diagnosis:
        """Whether a route that is expected is there, and whether the model can be told."""
        findings, text = [], self.text(parameter)
        if self._text is None and self._goal is None:
            findings += [(Level.WARN, f"{item.topic}: nothing received, expected a latched "
                          f"message") for item in self.subscriptions]
        if (text or self.subscriptions) and self._prompt_version != WITH_ROUTE:
            findings.append((Level.WARN, f"the prompt {self._prompt_version} has no place for a "
                             f"route, which is not told to the model: model.prompt_version "
                             f"{WITH_ROUTE} has one"))
        return joined("route", findings, {"source": self._source, "instruction": text})

    def _on_text(self, msg: Any) -> None:
        self._text = " ".join(msg.data.split())[:LONGEST_TEXT]

    def _on_route(self, msg: Any) -> None:
        goal, turned = msg.goal_pose.position, msg.goal_pose.orientation
        values = (goal.x, goal.y, turned.x, turned.y, turned.z, turned.w)
        if not np.isfinite(values).all():
            return
        yaw = math.atan2(2.0 * (turned.w * turned.z + turned.x * turned.y),
                         1.0 - 2.0 * (turned.y ** 2 + turned.z ** 2))
        self._goal = (goal.x, goal.y, yaw)


def turn_towards(pose: tuple[float, float, float], goal: tuple[float, float, float]) -> str:
    """"Turn left in 40m": the turn between a pose and a goal, where the two directions meet.

    Args:
        pose, goal: x, y in metres and yaw in radians, in one frame.
    Returns:
        Empty where the goal lies straight ahead, behind, or the turn is far away.
    """
    turn = math.remainder(goal[2] - pose[2], math.tau)
    if not SMALLEST_TURN_RAD <= abs(turn) <= LARGEST_TURN_RAD:
        return ""
    dx, dy = goal[0] - pose[0], goal[1] - pose[1]
    ahead = math.cos(pose[2]) * dx + math.sin(pose[2]) * dy
    left = math.cos(pose[2]) * dy - math.sin(pose[2]) * dx
    distance_m = ahead - left * math.cos(turn) / math.sin(turn)
    beyond_turn = left / math.sin(turn)                 # the goal lies so far behind the turn
    if not (0.0 < distance_m <= FARTHEST_TURN_M and beyond_turn > 0.0):
        return ""
    return f"Turn {'left' if turn > 0.0 else 'right'} in {distance_m:.0f}m"


def _lanelet_route() -> type:
    try:
        from autoware_planning_msgs.msg import LaneletRoute
    except ImportError as error:
        raise MissingDependencyError(
            "route_source: given lanelet_route, but autoware_planning_msgs cannot be imported: "
            "source the Autoware workspace, or install ros-$ROS_DISTRO-autoware-planning-msgs"
        ) from error
    return LaneletRoute
