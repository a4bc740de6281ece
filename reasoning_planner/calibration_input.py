"""camera_info and static transforms as the calibration check takes them.

Transforms are read from /tf_static itself: tf2 is not needed, its message is.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import CameraInfo

from .calibration_check import (Mountings, SeenCamera, StaticTransform, check_calibration,
                                slots_of_inputs)
from .diagnoses import Diagnosis
from .path_drawing import Camera
from .subscriptions import AdaptiveSubscription

INFO_DEPTH, TF_DEPTH = 1, 100


class CalibrationInput:
    """~/input/camera_info0 .. and /tf_static."""

    def __init__(self, node: Node, count: int, base_frame: str, camera_slots: Sequence[int]):
        """
        Args:
            count: camera inputs of the node.
            camera_slots: as `model.camera_slots`: which input each camera of the model is.
        """
        self._base_frame, self._expected = base_frame, slots_of_inputs(camera_slots)
        self._cameras: dict[int, SeenCamera] = {}
        self._mountings = Mountings()
        self.subscriptions = [AdaptiveSubscription(
            node, CameraInfo, f"~/input/camera_info{slot}", partial(self._on_info, slot),
            depth=INFO_DEPTH) for slot in range(count)]
        if (kind := _tf_message()) is not None:
            self.subscriptions.append(AdaptiveSubscription(
                node, kind, "/tf_static", self._on_transforms, depth=TF_DEPTH, latched=True))

    def diagnosis(self) -> Diagnosis:
        """What was seen so far against the configured slots."""
        return check_calibration(self._cameras, self._mountings, self._base_frame, self._expected)

    def camera(self, slot: int) -> Camera | None:
        """The pinhole of an input, mounted; None while it is not known."""
        seen = self._cameras.get(slot)
        pose = None if seen is None else self._mountings.pose_of(seen.frame_id, self._base_frame)
        if seen is None or pose is None or not seen.focal_px > 0.0 or not seen.height:
            return None
        return Camera(np.array(seen.k).reshape(3, 3), pose, (seen.width, seen.height))

    def _on_info(self, slot: int, msg: Any) -> None:
        if slot not in self._cameras or self._cameras[slot].width != msg.width:
            self._cameras[slot] = SeenCamera(
                msg.header.frame_id.lstrip("/"), int(msg.width), float(msg.k[0]), int(msg.height),
                tuple(map(float, msg.k)), msg.distortion_model)

    def _on_transforms(self, msg: Any) -> None:
        for item in msg.transforms:
            turned, moved = item.transform.rotation, item.transform.translation
            self._mountings.add(StaticTransform(
                item.header.frame_id.lstrip("/"), item.child_frame_id.lstrip("/"),
                (turned.x, turned.y, turned.z, turned.w), (moved.x, moved.y, moved.z)))


def _tf_message() -> type | None:
    """tf2_msgs' TFMessage; None where the package is not installed."""
    try:
        from tf2_msgs.msg import TFMessage
    except ImportError:
        return None
    return TFMessage
