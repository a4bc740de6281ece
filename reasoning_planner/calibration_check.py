"""Are the cameras where the configuration says? Yaw and field of view against each slot's.

A left and a right camera that are swapped show nowhere else: every image arrives, every plan is
wrong. Pure; what is not known (no camera_info, no transform) is not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Sequence

import numpy as np

from .diagnoses import Diagnosis, Level, joined
from .datatypes import Refusal
from .perception.frames import (compose, matrix_from_quaternion, normalised_quaternion,
                                transform)

YAW_TOLERANCE_RAD = math.radians(25.0)
FOV_TOLERANCE = 0.35            # relative
# Yaw (left positive) and horizontal field of view of the model's cameras, degrees.
SLOT_NAMES = ("front left", "front", "front right", "front telephoto")
SLOT_YAW_DEG = (60.0, 0.0, -60.0, 0.0)
SLOT_FOV_DEG = (120.0, 120.0, 120.0, 30.0)


@dataclass(frozen=True)
class StaticTransform:
    """How a frame is mounted on its parent.

    Attributes:
        parent, child: frames.
        quaternion_xyzw: rotation parent from child.
        translation: of the child's origin in the parent, metres.
    """

    parent: str
    child: str
    quaternion_xyzw: tuple[float, float, float, float]
    translation: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SeenCamera:
    """What a camera_info says.

    Attributes:
        frame_id: optical frame: z ahead, x right, y down.
        width, height: pixels; focal_px: fx.
        k: nine intrinsics of the rectified image, row by row; empty where they are not known.
    """

    frame_id: str
    width: int
    focal_px: float
    height: int = 0
    k: tuple[float, ...] = ()

    @property
    def fov_rad(self) -> float:
        """Horizontal field of view of the pinhole; NaN where it is not known."""
        if self.focal_px <= 0.0 or self.width <= 0:
            return math.nan
        return 2.0 * math.atan(self.width / (2.0 * self.focal_px))


class Mountings:
    """Static transforms as they come; `yaw_of` walks up from a camera to the base."""

    def __init__(self) -> None:
        self._parents: dict[str, StaticTransform] = {}

    def add(self, mounted: StaticTransform) -> None:
        """A newer one of the same child replaces it; one that is no rotation is left out."""
        quaternion = normalised_quaternion(np.array(mounted.quaternion_xyzw, dtype=np.float64))
        if not isinstance(quaternion, Refusal):
            self._parents[mounted.child] = replace(
                mounted, quaternion_xyzw=tuple(quaternion.tolist()))

    def pose_of(self, frame: str, base_frame: str) -> np.ndarray | None:
        """(4, 4) base from frame; None where there is no way."""
        base_from_frame = np.eye(4)
        for _ in range(len(self._parents) + 1):
            if frame == base_frame:
                return base_from_frame
            mounted = self._parents.get(frame)
            if mounted is None:
                return None
            base_from_frame = compose(transform(
                matrix_from_quaternion(np.array(mounted.quaternion_xyzw)),
                np.array(mounted.translation)), base_from_frame)
            frame = mounted.parent
        return None             # a circle

    def yaw_of(self, optical_frame: str, base_frame: str) -> float:
        """Of the optical axis in the base, rad, left positive; NaN where there is no way."""
        pose = self.pose_of(optical_frame, base_frame)
        return math.nan if pose is None else math.atan2(pose[1, 2], pose[0, 2])


def check_calibration(cameras: Mapping[int, SeenCamera], mountings: Mountings, base_frame: str,
                      expected: Mapping[int, int]) -> Diagnosis:
    """Each camera against the slot of the model that it is mapped to.

    Args:
        cameras: by our input's number.
        expected: our input's number -> the model's slot.
    """
    yaws = {i: mountings.yaw_of(camera.frame_id, base_frame) for i, camera in cameras.items()}
    findings = [(Level.ERROR, text) for text in (*_swapped(yaws, expected),
                                                 *_misdirected(yaws, expected))]
    findings += [(Level.WARN, text) for text in _too_wide_or_narrow(cameras, expected)]
    values = {}
    for i, camera in sorted(cameras.items()):
        values[f"image{i} yaw_deg"] = f"{math.degrees(yaws[i]):.1f}"
        values[f"image{i} fov_deg"] = f"{math.degrees(camera.fov_rad):.1f}"
    return joined("calibration", findings, values)


def _off(yaw_rad: float, slot: int) -> bool:
    """Whether a known yaw is not the slot's."""
    apart = abs(math.remainder(yaw_rad - math.radians(SLOT_YAW_DEG[slot]), math.tau))
    return apart > YAW_TOLERANCE_RAD


def _pairs(yaws: Mapping[int, float], expected: Mapping[int, int]) -> list[tuple[int, int]]:
    """Inputs that each look where the other should."""
    known = [i for i in sorted(yaws) if i in expected and math.isfinite(yaws[i])]
    return [(a, b) for n, a in enumerate(known) for b in known[n + 1:]
            if _off(yaws[a], expected[a]) and _off(yaws[b], expected[b])
            and not _off(yaws[a], expected[b]) and not _off(yaws[b], expected[a])]


def _swapped(yaws: Mapping[int, float], expected: Mapping[int, int]) -> Iterator[str]:
    for a, b in _pairs(yaws, expected):
        yield (f"image{a} and image{b} are swapped: image{a}, the {SLOT_NAMES[expected[a]]} "
               f"camera, looks {_direction(yaws[a])}, image{b}, the {SLOT_NAMES[expected[b]]} "
               f"camera, {_direction(yaws[b])}")


def _misdirected(yaws: Mapping[int, float], expected: Mapping[int, int]) -> Iterator[str]:
    """Wrong yaws that no exchange of two explains."""
    swapped = {i for pair in _pairs(yaws, expected) for i in pair}
    for i in sorted(set(yaws) & set(expected) - swapped):
        if math.isfinite(yaws[i]) and _off(yaws[i], expected[i]):
            yield (f"image{i}, the {SLOT_NAMES[expected[i]]} camera, looks {_direction(yaws[i])}, "
                   f"expected {_direction(math.radians(SLOT_YAW_DEG[expected[i]]))}")


def _too_wide_or_narrow(cameras: Mapping[int, SeenCamera], expected: Mapping[int, int]
                        ) -> Iterator[str]:
    for i in sorted(set(cameras) & set(expected)):
        seen_deg, wanted_deg = math.degrees(cameras[i].fov_rad), SLOT_FOV_DEG[expected[i]]
        if math.isfinite(seen_deg) and abs(seen_deg - wanted_deg) > FOV_TOLERANCE * wanted_deg:
            yield (f"image{i}, the {SLOT_NAMES[expected[i]]} camera, sees {seen_deg:.0f} degrees, "
                   f"expected about {wanted_deg:.0f}")


def _direction(yaw_rad: float) -> str:
    degrees = round(math.degrees(yaw_rad))
    side = "left" if degrees > 0 else "right"
    return "ahead" if degrees == 0 else f"{abs(degrees)} degrees to the {side}"


def slots_of_inputs(camera_slots: Sequence[int]) -> dict[int, int]:
    """`model.camera_slots` the other way round: our input's number -> the model's camera."""
    return {number: slot for slot, number in enumerate(camera_slots) if number >= 0}
