"""Are the cameras where the configuration says? Yaw and field of view against each slot's.

Two cameras that are swapped show nowhere else: every image arrives, every plan is wrong. Pure;
what is not known (no camera_info, no transform) is not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Mapping, Sequence

import numpy as np

from .diagnoses import Diagnosis, Level, joined
from .datatypes import Refusal
from .perception.frames import (compose, matrix_from_quaternion, normalised_quaternion, optical,
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
        frame_id: the camera's, optical (z ahead, x right, y down) or with x ahead.
        width: pixels; focal_px: fx.
        model: of the distortion, as ROS names it.
    """

    frame_id: str
    width: int
    focal_px: float
    model: str = ""

    @property
    def fov_rad(self) -> float:
        """Horizontal field of view of the pinhole or fisheye; NaN where it is not known."""
        if self.focal_px <= 0.0 or self.width <= 0:
            return math.nan
        if self.model == "equidistant":
            return self.width / self.focal_px
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
        """(4, 4) base from a camera's optical axes; None where there is no way.

        A frame with x ahead, as some drivers stamp images, is turned to its optical one.
        """
        base_from_frame = np.eye(4)
        for _ in range(len(self._parents) + 1):
            if frame == base_frame:
                return optical(base_from_frame)
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
    fovs = {i: camera.fov_rad for i, camera in cameras.items()}
    turned, exchanged = _pairs(yaws, expected, _yaw_off), _pairs(fovs, expected, _fov_off)
    findings = [(Level.ERROR, text) for text in (*_swapped(turned, yaws, expected, _direction),
                                                 *_misdirected(turned, yaws, expected),
                                                 *_swapped(exchanged, fovs, expected, _width))]
    findings += [(Level.WARN, text) for text in _too_wide_or_narrow(exchanged, fovs, expected)]
    values = {}
    for i, camera in sorted(cameras.items()):
        values[f"image{i} yaw_deg"] = f"{math.degrees(yaws[i]):.1f}"
        values[f"image{i} fov_deg"] = f"{math.degrees(camera.fov_rad):.1f}"
    return joined("calibration", findings, values)


def _yaw_off(yaw_rad: float, slot: int) -> bool:
    """Whether a yaw is known and not the slot's."""
    apart = abs(math.remainder(yaw_rad - math.radians(SLOT_YAW_DEG[slot]), math.tau))
    return apart > YAW_TOLERANCE_RAD


def _fov_off(fov_rad: float, slot: int) -> bool:
    """Whether a field of view is known and not the slot's."""
    wanted_rad = math.radians(SLOT_FOV_DEG[slot])
    return abs(fov_rad - wanted_rad) > FOV_TOLERANCE * wanted_rad


def _pairs(values: Mapping[int, float], expected: Mapping[int, int],
           off: Callable[[float, int], bool]) -> list[tuple[int, int]]:
    """Inputs that are each what the other should be."""
    known = sorted(set(values) & set(expected))
    return [(a, b) for n, a in enumerate(known) for b in known[n + 1:]
            if off(values[a], expected[a]) and off(values[b], expected[b])
            and not off(values[a], expected[b]) and not off(values[b], expected[a])]


def _swapped(pairs: Sequence[tuple[int, int]], values: Mapping[int, float],
             expected: Mapping[int, int], said: Callable[[float], str]) -> Iterator[str]:
    for a, b in pairs:
        yield (f"image{a} and image{b} are swapped: image{a}, the {SLOT_NAMES[expected[a]]} "
               f"camera, {said(values[a])}, image{b}, the {SLOT_NAMES[expected[b]]} camera, "
               f"{said(values[b])}")


def _misdirected(pairs: Sequence[tuple[int, int]], yaws: Mapping[int, float],
                 expected: Mapping[int, int]) -> Iterator[str]:
    """Wrong yaws that no exchange of two explains."""
    swapped = {i for pair in pairs for i in pair}
    for i in sorted(set(yaws) & set(expected) - swapped):
        if _yaw_off(yaws[i], expected[i]):
            wanted = _direction(math.radians(SLOT_YAW_DEG[expected[i]])).removeprefix("looks ")
            yield (f"image{i}, the {SLOT_NAMES[expected[i]]} camera, {_direction(yaws[i])}, "
                   f"expected {wanted}")


def _too_wide_or_narrow(pairs: Sequence[tuple[int, int]], fovs: Mapping[int, float],
                        expected: Mapping[int, int]) -> Iterator[str]:
    """Wrong fields of view that no exchange of two explains."""
    swapped = {i for pair in pairs for i in pair}
    for i in sorted(set(fovs) & set(expected) - swapped):
        if _fov_off(fovs[i], expected[i]):
            yield (f"image{i}, the {SLOT_NAMES[expected[i]]} camera, {_width(fovs[i])}, "
                   f"expected about {SLOT_FOV_DEG[expected[i]]:.0f}")


def _width(fov_rad: float) -> str:
    return f"sees {math.degrees(fov_rad):.0f} degrees"


def _direction(yaw_rad: float) -> str:
    degrees = round(math.degrees(yaw_rad))
    side = "left" if degrees > 0 else "right"
    return "looks ahead" if degrees == 0 else f"looks {abs(degrees)} degrees to the {side}"


def slots_of_inputs(camera_slots: Sequence[int]) -> dict[int, int]:
    """`model.camera_slots` the other way round: our input's number -> the model's camera."""
    return {number: slot for slot, number in enumerate(camera_slots) if number >= 0}
