"""~/debug/image: the anchor camera's picture with the plan drawn in.

Drawn in a thread of its own, the newest plan only, so that planning does not wait for it; nothing
is done while nobody listens.
"""

from __future__ import annotations

import textwrap
import threading
from array import array
from typing import Any, Callable

import cv2
import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import Image

from .conversions import poses_in_map, stamp_fields
from .datatypes import CameraFrame, Observation, Plan
from .errors import DataError
from .path_drawing import Camera, Lens, draw_plan
from .subscriptions import no_events
from .visualisation import caption, speed_range

DEPTH = 1
WIDTH = 960                     # pixels at most
LINE_PX, COLUMN_PX, INK, SHADE = 22, 10, (232, 237, 242), 0.35
NO_TRUTH = np.full((1, 3), np.nan)

Mounted = Callable[[int], tuple[Lens | None, np.ndarray | None]]


class DebugImage:
    """One publisher and, from the first listener on, one thread."""

    def __init__(self, node: Node, mounted: Mounted, publish: Callable[[Any, Any], None],
                 width_m: float, is_rectified: bool):
        """
        Args:
            mounted: a slot's lens and its optical axes in the base, None where not known.
            publish: puts a message on a publisher while the node is active.
            width_m: of the vehicle.
            is_rectified: the images come without distortion.
        """
        self._node, self._mounted, self._publish = node, mounted, publish
        self._width_m, self._is_rectified = width_m, is_rectified
        self._publisher = node.create_publisher(Image, "~/debug/image", DEPTH,
                                                event_callbacks=no_events())
        self._condition = threading.Condition()
        self._waiting: tuple[CameraFrame, Plan] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def offer(self, observation: Observation, plan: Plan, anchor: int) -> None:
        """A new plan and what it was made from; returns at once."""
        frame = observation.frames[anchor][-1]
        if frame is None or self._publisher.get_subscription_count() == 0:
            return
        with self._condition:
            self._waiting = (frame, plan)
            if self._thread is None:
                self._ended = False
                self._thread = threading.Thread(target=self._loop, name="drawing", daemon=True)
                self._thread.start()
            self._condition.notify()

    def stop(self) -> None:
        """End the thread, until the next offer; safe to repeat."""
        with self._condition:
            thread, self._thread, self._ended = self._thread, None, True
            self._condition.notify()
        if thread is not None:
            thread.join()

    def destroy(self) -> None:
        """End the thread and the publisher."""
        self.stop()
        self._node.destroy_publisher(self._publisher)

    def _loop(self) -> None:
        while True:
            with self._condition:
                while self._waiting is None and not self._ended:
                    self._condition.wait()
                if self._ended:
                    return
                assert self._waiting is not None
                (frame, plan), self._waiting = self._waiting, None
            lens, base_from_camera = self._mounted(frame.slot)
            picture = draw(frame.image, plan, lens, base_from_camera, self._width_m,
                           self._is_rectified)
            self._publish(self._publisher, _image_msg(picture, plan.stamp_ns,
                                                      lens.frame_id if lens else ""))


def draw(image: np.ndarray, plan: Plan, lens: Lens | None, base_from_camera: np.ndarray | None,
         width_m: float, is_rectified: bool) -> np.ndarray:
    """
    Args:
        image: (H, W, 3) uint8 RGB, taken at the plan's stamp.
        lens, base_from_camera: None where not known: then the picture says so.
        width_m: of the vehicle.
    Returns:
        (H', W', 3) uint8 RGB, at most `WIDTH` wide.
    """
    picture = _shrunk(image)
    columns = max(picture.shape[1] // COLUMN_PX, 10)
    lines = [part for line in caption(plan).split("\n") for part in textwrap.wrap(line, columns)]
    try:
        picture = _with_path(picture, plan, lens, base_from_camera, width_m, is_rectified)
    except DataError as error:
        lines.insert(0, f"path not drawn: {error}")
    return _captioned(picture, lines)


def _with_path(picture: np.ndarray, plan: Plan, lens: Lens | None,
               base_from_camera: np.ndarray | None, width_m: float,
               is_rectified: bool) -> np.ndarray:
    """
    Raises:
        DataError: the camera is not known well enough.
    """
    if lens is None:
        raise DataError("no camera_info received")
    if not lens.is_known:
        raise DataError("camera_info is not calibrated")
    if base_from_camera is None:
        raise DataError(f"no static transform to {lens.frame_id}")
    picture, k = lens.rectify(picture, is_rectified)
    camera = Camera(k, base_from_camera, (picture.shape[1], picture.shape[0]))
    path = plan.trajectory
    positions, quaternions = poses_in_map(plan)
    return draw_plan(picture, camera, plan.map_from_base, positions, quaternions, path.speed_mps,
                     path.time_from_start_ns, NO_TRUTH, width_m, speed_range(path.speed_mps))


def _shrunk(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    if width <= WIDTH:
        return image.copy()
    return cv2.resize(image, (WIDTH, round(height * WIDTH / width)), interpolation=cv2.INTER_AREA)


def _captioned(picture: np.ndarray, lines: list[str]) -> np.ndarray:
    """The lines at the top, on a shade, in a third of the picture; into it."""
    lines = lines[:max(picture.shape[0] // (3 * LINE_PX), 1)]
    band = picture[:LINE_PX * len(lines) + 8]
    band[:] = (band * SHADE).astype(np.uint8)
    for row, line in enumerate(lines):
        cv2.putText(picture, line.encode("ascii", "replace").decode(), (10, LINE_PX * (row + 1)),
                    cv2.FONT_HERSHEY_SIMPLEX, 0.5, INK, 1, cv2.LINE_AA)
    return picture


def _image_msg(picture: np.ndarray, stamp_ns: int, frame_id: str) -> Image:
    msg = Image(encoding="rgb8", height=picture.shape[0], width=picture.shape[1],
                step=3 * picture.shape[1])
    fields = stamp_fields(stamp_ns)
    msg.header.stamp.sec, msg.header.stamp.nanosec = fields["sec"], fields["nanosec"]
    msg.header.frame_id = frame_id
    msg.data = array("B", picture.tobytes())
    return msg
