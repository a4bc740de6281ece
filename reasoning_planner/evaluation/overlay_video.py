"""A film of a drive: the anchor camera with the planned and the driven path, the text below.

Written by OpenCV as VP8 in a WebM container: every browser plays it, nothing more has to be
installed, and it takes a third of VP9's time. One frame every 0.1 s of the drive, so that it plays
at the speed driven.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import cv2
import numpy as np

from .. import path_drawing
from ..errors import DataError
from ..perception import frames
from .records import PlanRecord
from .summary import ScoredPlan

FRAMES_PER_S = 10.0
WIDTH = 800
# TrackUID and TagTrackUID with their length, 8 bytes. Source: matroska.org/technical/elements.html
_UID_ELEMENTS = (b"\x73\xc5\x88", b"\x63\xc5\x88")
_HEAD_BYTES = 2048
_STEP_NS = 95_000_000           # a little less than 0.1 s: stamps jitter
_INSET = 0.32                   # of the image's height
_SPEEDS_MPS = (0.0, 20.0)
_PLAN, _TRUTH, _INK = (110, 168, 255), (245, 245, 245), (232, 237, 242)


class OverlayVideo:
    """Writes one frame a cycle; the file begins with the first one."""

    def __init__(self, path: Path, camera: Optional[path_drawing.Camera], width_m: float):
        self._path = Path(path)
        self._camera, self._width_m = camera, width_m
        self._writer: Optional[cv2.VideoWriter] = None
        self._size = (0, 0)
        self._last_ns = 0

    def add(self, image: Optional[np.ndarray], plan: PlanRecord,
            scored: Optional[ScoredPlan]) -> None:
        """A cycle; those without an image and those within 0.1 s of the last are left out.

        Raises:
            DataError: OpenCV cannot write such a file here.
        """
        if image is None or plan.stamp_ns - self._last_ns < _STEP_NS and self._writer:
            return
        self._last_ns = plan.stamp_ns
        frame = self.frame(image, plan, scored)
        if self._writer is None:
            self._size = (frame.shape[1], frame.shape[0])
            self._writer = cv2.VideoWriter(str(self._path), cv2.VideoWriter_fourcc(*"VP80"),
                                           FRAMES_PER_S, self._size)
            if not self._writer.isOpened():
                raise DataError(f"{self._path}: this OpenCV cannot write VP8, expected one built "
                                "with FFmpeg, as opencv-python-headless is")
        if (frame.shape[1], frame.shape[0]) == self._size:
            self._writer.write(frame[..., ::-1])

    def frame(self, image: np.ndarray, plan: PlanRecord,
              scored: Optional[ScoredPlan]) -> np.ndarray:
        """(H, W, 3) uint8 RGB of one cycle, both sides even as the codec wants them."""
        truth = np.full((1, 3), np.nan) if scored is None else scored.truth
        height = round(image.shape[0] * WIDTH / image.shape[1] / 2) * 2
        smaller = WIDTH < image.shape[1]
        picture = cv2.resize(image, (WIDTH, height),
                             interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
        if self._camera is not None:
            picture = path_drawing.draw_plan(
                picture, self._camera.scaled_to(picture), plan.map_from_base, plan.positions,
                plan.quaternions_xyzw, plan.speed_mps, plan.time_from_start_ns, truth,
                self._width_m, _SPEEDS_MPS)
        side = int(_INSET * height) // 2 * 2
        picture[:side, -side:] = above(plan, truth, side)
        return np.concatenate([picture, _caption(plan)])

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._writer is not None:
            self._writer.release()
            _fix_track_uid(self._path)


def _fix_track_uid(path: Path) -> None:
    """FFmpeg draws the track's UID by lot: one of our own, so that equal films are equal files."""
    with path.open("r+b") as file:
        head = file.read(_HEAD_BYTES)
        for element in _UID_ELEMENTS:
            if (at := head.find(element)) >= 0:
                file.seek(at + len(element))
                file.write((1).to_bytes(8, "big"))


def above(plan: PlanRecord, truth: np.ndarray, side: int) -> np.ndarray:
    """(side, side, 3) uint8: planned and driven path from above, forward up, rings every 10 m."""
    canvas = np.full((side, side, 3), (24, 32, 41), np.uint8)
    base_from_map = frames.inverse(plan.map_from_base)
    reach = max(30.0, 1.1 * float(np.abs(frames.transform_points(
        base_from_map, plan.positions)[:, :2]).max()))
    scale, origin = side / (1.15 * reach), np.array([side / 2.0, side * 0.92])
    for ring in range(10, int(reach) + 10, 10):
        cv2.circle(canvas, _pixel(origin), int(ring * scale), (42, 53, 65), 1, cv2.LINE_AA)
    for points, colour, thickness in ((truth, _TRUTH, 2), (plan.positions, _PLAN, 3)):
        local = frames.transform_points(base_from_map, points)
        local = local[np.isfinite(local).all(axis=1)]
        pixels = origin + np.stack([-local[:, 1], -local[:, 0]], axis=1) * scale
        cv2.polylines(canvas, [np.rint(pixels).astype(np.int32)], False, colour, thickness,
                      cv2.LINE_AA)
    return canvas


def _pixel(point: np.ndarray) -> tuple[int, int]:
    return int(round(point[0])), int(round(point[1]))


def _caption(plan: PlanRecord) -> np.ndarray:
    """(64, WIDTH, 3): status, speed and the text, as much of it as fits."""
    bar = np.full((64, WIDTH, 3), (16, 21, 27), np.uint8)
    lines = (f"{plan.status}  {plan.planner}  {plan.speed_mps[0]:.1f} m/s",
             plan.text.encode("ascii", "replace").decode()[:88])
    for row, line in enumerate(lines):
        cv2.putText(bar, line, (14, 25 + 26 * row), cv2.FONT_HERSHEY_SIMPLEX, 0.52, _INK, 1,
                    cv2.LINE_AA)
    return bar
