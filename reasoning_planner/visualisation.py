"""What a person looks at: markers of the plan, and the anchor camera's image with the path in it.

~/debug/markers (visualization_msgs/MarkerArray, in the plan's fixed frame) and ~/debug/image
(sensor_msgs/Image). Nothing is made while nobody listens.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from geometry_msgs.msg import Point
from rclpy.node import Node
from sensor_msgs.msg import Image
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from .config import VehicleConfig
from .conversions import poses_in_map, stamp_fields
from .datatypes import Observation, Plan, PlanStatus
from .path_drawing import Camera, draw_plan, speed_colours
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
    """Publishers, and what goes on them."""

    def __init__(self, node: Node, vehicle: VehicleConfig):
        self._node, self._vehicle = node, vehicle
        self._markers = node.create_publisher(MarkerArray, "~/debug/markers", DEPTH,
                                              event_callbacks=no_events())
        self._image = node.create_publisher(Image, "~/debug/image", DEPTH,
                                            event_callbacks=no_events())

    @property
    def draws_images(self) -> bool:
        """Whether somebody looks at ~/debug/image."""
        return self._image.get_subscription_count() > 0

    def publish_markers(self, plan: Plan) -> None:
        """Of every published plan, repeats too."""
        if self._markers.get_subscription_count() > 0:
            self._markers.publish(markers(plan, self._vehicle))

    def publish_image(self, plan: Plan, observation: Observation, anchor: int,
                      camera: Camera | None) -> None:
        """Of a new plan, if its anchor image is there; without a calibration the image alone."""
        frame = observation.frames[anchor][-1]
        if not self.draws_images or frame is None:
            return
        picture = frame.image
        if camera is not None:
            positions, quaternions = poses_in_map(plan)
            path = plan.trajectory
            picture = draw_plan(picture, camera.scaled_to(picture), plan.map_from_base, positions,
                                quaternions, path.speed_mps, path.time_from_start_ns,
                                np.full((1, 3), np.nan), self._vehicle.width_m,
                                _speed_range(path.speed_mps))
        self._image.publish(_image_msg(picture, plan.stamp_ns, f"camera{anchor}"))

    def destroy(self) -> None:
        """End the publishers."""
        for publisher in (self._markers, self._image):
            self._node.destroy_publisher(publisher)


def markers(plan: Plan, vehicle: VehicleConfig) -> MarkerArray:
    """The path coloured by speed, the vehicle's footprint every second, the reasoning above it."""
    positions, quaternions = poses_in_map(plan)
    speeds = plan.trajectory.speed_mps
    colours = [_colour(rgb / 255.0) for rgb in speed_colours(speeds, *_speed_range(speeds))]
    path = _marker(plan, "path", Marker.LINE_STRIP, LINE_WIDTH_M)
    path.points, path.colors = _points(positions), colours
    footprints = _marker(plan, "footprint", Marker.LINE_LIST, 0.08)
    for row in range(0, len(positions), ROWS_A_FOOTPRINT):
        corners = _footprint(positions[row], quaternions[row], vehicle)
        edges = [corner for i in range(4) for corner in (corners[i], corners[(i + 1) % 4])]
        footprints.points += _points(edges)
        footprints.colors += [colours[row]] * len(edges)
    text = _marker(plan, "reasoning", Marker.TEXT_VIEW_FACING, TEXT_HEIGHT_M)
    text.text = _caption(plan)
    above, = _points([positions[0] + (0.0, 0.0, TEXT_ABOVE_M)])
    text.pose.position = above
    text.color = _colour(WHITE if plan.status in (PlanStatus.OK, PlanStatus.DEGRADED) else RED)
    return MarkerArray(markers=[path, footprints, text])


def _caption(plan: Plan) -> str:
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


def _speed_range(speed_mps: np.ndarray) -> tuple[float, float]:
    return 0.0, max(float(np.max(speed_mps)), FEWEST_MPS)


def _image_msg(image: np.ndarray, stamp_ns: int, frame_id: str) -> Any:
    from builtin_interfaces.msg import Time

    msg = Image(height=image.shape[0], width=image.shape[1], encoding="rgb8",
                step=image.shape[1] * 3)
    msg.header = Header(stamp=Time(**stamp_fields(stamp_ns)), frame_id=frame_id)
    msg.data.frombytes(np.ascontiguousarray(image).tobytes())
    return msg
