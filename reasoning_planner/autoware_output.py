"""Plans as Autoware takes them: a Trajectory, and the same as only candidate of its selection.

Needs autoware_planning_msgs and autoware_internal_planning_msgs, imported when asked for. Fields
that only some versions have are set where they exist.
"""

from __future__ import annotations

import math
import uuid
from typing import Any, Sequence

from rclpy.node import Node
from rclpy.qos import QoSProfile

from .conversions import plan_columns, pose_msg, stamp_fields
from .datatypes import Plan
from .errors import MissingDependencyError
from .subscriptions import no_events

DEPTH = 1                       # as Autoware's component interfaces have it: reliable, volatile
# What newer CandidateTrajectory messages call the turn indicator's command.
TURN_INDICATORS = ("turn_indicators_command", "turn_indicator")


class AutowareOutput:
    """~/output/trajectory (autoware_planning_msgs/Trajectory), ~/output/candidate_trajectories."""

    def __init__(self, node: Node, wheel_base_m: float):
        """
        Args:
            wheel_base_m: for the front wheels' angle; 0: it is left at 0.
        Raises:
            MissingDependencyError: Autoware's messages are not installed.
        """
        self._types = _message_types()
        self._wheel_base_m = wheel_base_m
        self._generator_id = uuid.uuid4().bytes         # once a node
        self._name = node.get_fully_qualified_name().lstrip("/")
        trajectory, candidates = self._types["Trajectory"], self._types["CandidateTrajectories"]
        qos = QoSProfile(depth=DEPTH)
        self._trajectories = node.create_lifecycle_publisher(
            trajectory, "~/output/trajectory", qos, event_callbacks=no_events())
        self._candidates = node.create_lifecycle_publisher(
            candidates, "~/output/candidate_trajectories", qos, event_callbacks=no_events())
        self._node = node

    def messages(self, plan: Plan) -> tuple[Any, Any]:
        """Both, in the plan's fixed frame; its stamp is t0, point 0 the pose then."""
        from builtin_interfaces.msg import Time
        from std_msgs.msg import Header

        header = Header(stamp=Time(**stamp_fields(plan.stamp_ns)), frame_id=plan.frame_id)
        points = self._points(plan)
        return (self._types["Trajectory"](header=header, points=points),
                self._candidates_msg(header, points))

    def publish(self, messages: tuple[Any, Any]) -> None:
        """What `messages` made."""
        for publisher, msg in zip((self._trajectories, self._candidates), messages):
            publisher.publish(msg)

    def destroy(self) -> None:
        """End the publishers."""
        for publisher in (self._trajectories, self._candidates):
            self._node.destroy_lifecycle_publisher(publisher)

    def _points(self, plan: Plan) -> list[Any]:
        from builtin_interfaces.msg import Duration

        make = self._types["TrajectoryPoint"]
        return [make(time_from_start=Duration(**stamp_fields(time_ns)), pose=pose_msg(place, turn),
                     longitudinal_velocity_mps=speed, lateral_velocity_mps=0.0,
                     acceleration_mps2=acceleration, heading_rate_rps=yaw_rate,
                     front_wheel_angle_rad=math.atan(self._wheel_base_m * curvature),
                     rear_wheel_angle_rad=0.0)
                for time_ns, place, turn, speed, acceleration, yaw_rate, curvature
                in plan_columns(plan)]

    def _candidates_msg(self, header: Any, points: Sequence[Any]) -> Any:
        from std_msgs.msg import String
        from unique_identifier_msgs.msg import UUID

        generator_id = UUID(uuid=list(self._generator_id))
        candidate = self._types["CandidateTrajectory"](
            header=header, generator_id=generator_id, points=list(points))
        for name in TURN_INDICATORS:
            if hasattr(candidate, name):        # no command of ours: the message's default
                getattr(candidate, name).stamp = header.stamp
        info = self._types["GeneratorInfo"](generator_id=generator_id,
                                            generator_name=String(data=self._name))
        return self._types["CandidateTrajectories"](candidate_trajectories=[candidate],
                                                    generator_info=[info])


def _message_types() -> dict[str, type]:
    """
    Raises:
        MissingDependencyError: a package is not there, or is another version's.
    """
    try:
        from autoware_internal_planning_msgs.msg import (CandidateTrajectories,
                                                         CandidateTrajectory, GeneratorInfo)
        from autoware_planning_msgs.msg import Trajectory, TrajectoryPoint
    except ImportError as error:
        raise MissingDependencyError(
            f"output_format: given autoware, but {error.name or error} cannot be imported: source "
            f"the Autoware workspace, or install ros-$ROS_DISTRO-autoware-planning-msgs and "
            f"ros-$ROS_DISTRO-autoware-internal-planning-msgs") from error
    return {kind.__name__: kind for kind in (
        Trajectory, TrajectoryPoint, CandidateTrajectory, CandidateTrajectories, GeneratorInfo)}
