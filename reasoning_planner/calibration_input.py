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
from .path_drawing import Lens
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
        self._lenses: dict[int, Lens] = {}
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

    def mounted(self, slot: int) -> tuple[Lens | None, np.ndarray | None]:
        """A camera's lens, and its optical axes in the base, (4, 4); None: not known yet."""
        seen = self._cameras.get(slot)
        if seen is None:
            return None, None
        return self._lenses[slot], self._mountings.pose_of(seen.frame_id, self._base_frame)

    def _on_info(self, slot: int, msg: Any) -> None:
        if slot not in self._cameras or self._cameras[slot].width != msg.width:
            self._lenses[slot] = _lens(msg)
            self._cameras[slot] = SeenCamera(msg.header.frame_id.lstrip("/"), int(msg.width),
                                             float(msg.k[0]), msg.distortion_model)

    def _on_transforms(self, msg: Any) -> None:
        for item in msg.transforms:
            turned, moved = item.transform.rotation, item.transform.translation
            self._mountings.add(StaticTransform(
                item.header.frame_id.lstrip("/"), item.child_frame_id.lstrip("/"),
                (turned.x, turned.y, turned.z, turned.w), (moved.x, moved.y, moved.z)))


def _lens(msg: Any) -> Lens:
    return Lens(size=(int(msg.width), int(msg.height)), k=np.reshape(msg.k, (3, 3)),
                projection=np.reshape(msg.p, (3, 4)), distortion=np.array(msg.d),
                model=msg.distortion_model, frame_id=msg.header.frame_id)


def _tf_message() -> type | None:
    """tf2_msgs' TFMessage; None where the package is not installed."""
    try:
        from tf2_msgs.msg import TFMessage
    except ImportError:
        return None
    return TFMessage
