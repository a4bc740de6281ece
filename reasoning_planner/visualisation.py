"""~/debug/markers (visualization_msgs/MarkerArray): a plan in its fixed frame, and why it is so.

Nothing is made while nobody listens.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np
from geometry_msgs.msg import Point
from rclpy.node import Node
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from .config import VehicleConfig
from .conversions import poses_in_map, stamp_fields
from .datatypes import Plan, PlanStatus
from .path_drawing import speed_colours
from .perception.frames import matrix_from_quaternion
from .subscriptions import no_events

DEPTH = 1
LINE_WIDTH_M = 0.35
TEXT_HEIGHT_M = 1.0
TEXT_ABOVE_M = 3.0
ROWS_A_FOOTPRINT = 10               # one a second
LIFETIME_S = 1
FEWEST_MPS = 5.0                    # the scale of colours spans at least so much
WHITE, RED = (1.0, 1.0, 1.0), (1.0, 0.25, 0.2)


class Visualisation:
    """The publisher, and what goes on it."""

    def __init__(self, node: Node, publish: Callable[[Any, Any], None], vehicle: VehicleConfig):
        """
        Args:
            publish: puts a message on a publisher while the node is active.
        """
        self._node, self._publish, self._vehicle = node, publish, vehicle
        self._markers = node.create_publisher(MarkerArray, "~/debug/markers", DEPTH,
                                              event_callbacks=no_events())

    def publish_markers(self, plan: Plan) -> None:
        """Of every published plan, repeats too."""
        if self._markers.get_subscription_count() > 0:
            self._publish(self._markers, markers(plan, self._vehicle))

    def destroy(self) -> None:
        """End the publisher."""
        self._node.destroy_publisher(self._markers)


def markers(plan: Plan, vehicle: VehicleConfig) -> MarkerArray:
    """The path coloured by speed, the vehicle's footprint every second, the reasoning above it."""
    positions, quaternions = poses_in_map(plan)
    speeds = plan.trajectory.speed_mps
    colours = [_colour(rgb / 255.0) for rgb in speed_colours(speeds, *speed_range(speeds))]
    path = _marker(plan, "path", Marker.LINE_STRIP, LINE_WIDTH_M)
    path.points, path.colors = _points(positions), colours
    footprints = _marker(plan, "footprint", Marker.LINE_LIST, 0.08)
    for row in range(0, len(positions), ROWS_A_FOOTPRINT):
        corners = _footprint(positions[row], quaternions[row], vehicle)
        edges = [corner for i in range(4) for corner in (corners[i], corners[(i + 1) % 4])]
        footprints.points += _points(edges)
        footprints.colors += [colours[row]] * len(edges)
    text = _marker(plan, "reasoning", Marker.TEXT_VIEW_FACING, TEXT_HEIGHT_M)
    text.text = caption(plan)
    above, = _points([positions[0] + (0.0, 0.0, TEXT_ABOVE_M)])
    text.pose.position = above
    text.color = _colour(WHITE if plan.status in (PlanStatus.OK, PlanStatus.DEGRADED) else RED)
    return MarkerArray(markers=[path, footprints, text])


def caption(plan: Plan) -> str:
    """The sentence, then why the plan is not better; a text marker shows nothing for ""."""
    lines = [plan.reasoning.text or plan.planner,
             *(reason.reason.value for reason in plan.reasons)]
    return "\n".join(dict.fromkeys(lines))


def _marker(plan: Plan, namespace: str, kind: int, size_m: float) -> Marker:
    from builtin_interfaces.msg import Duration, Time

    marker = Marker(ns=namespace, type=kind, action=Marker.ADD, frame_locked=False)
    marker.header = Header(stamp=Time(**stamp_fields(plan.stamp_ns)), frame_id=plan.frame_id)
    marker.lifetime = Duration(sec=LIFETIME_S)      # a planner that fell silent leaves nothing
    marker.pose.orientation.w = 1.0
    marker.scale.x = marker.scale.y = marker.scale.z = size_m
    marker.color = _colour(WHITE)
    return marker


def _footprint(position: np.ndarray, quaternion_xyzw: np.ndarray, vehicle: VehicleConfig
               ) -> np.ndarray:
    """(4, 3) corners on the ground, front left first."""
    half = vehicle.width_m / 2.0
    corners = np.array([(vehicle.front_m, half, 0.0), (vehicle.front_m, -half, 0.0),
                        (-vehicle.rear_m, -half, 0.0), (-vehicle.rear_m, half, 0.0)])
    return position + corners @ matrix_from_quaternion(quaternion_xyzw).T


def _points(positions: Sequence[np.ndarray] | np.ndarray) -> list[Point]:
    return [Point(x=x, y=y, z=z) for x, y, z in np.asarray(positions, dtype=float).tolist()]


def _colour(rgb: Sequence[float]) -> ColorRGBA:
    red, green, blue = map(float, rgb)
    return ColorRGBA(r=red, g=green, b=blue, a=1.0)


def speed_range(speed_mps: np.ndarray) -> tuple[float, float]:
    """Speeds of the first and the last colour."""
    return 0.0, max(float(np.max(speed_mps)), FEWEST_MPS)
