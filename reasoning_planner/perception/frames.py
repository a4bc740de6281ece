"""Rigid motions in float64: matrices, quaternions, interpolation of rotations.

Quaternions are (x, y, z, w), as ROS messages carry them; transforms3d uses (w, x, y, z) and is
only called in here. Transforms are (4, 4) and named target first. No ROS, no time.
"""

from __future__ import annotations

import numpy as np
from transforms3d import quaternions

from ..datatypes import Reason, Refusal

NORM_TOLERANCE = 0.1         # |norm - 1| up to this is normalised, beyond it is refused
NORM_UNREMARKABLE = 1e-3     # |norm - 1| below this is rounding and not worth a count
OPTICAL = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])     # body from optical
_TO_WXYZ = [3, 0, 1, 2]
_TO_XYZW = [1, 2, 3, 0]
_PARALLEL = 1.0 - 1e-9       # cosine above which SLERP divides by nearly nothing


def normalised_quaternion(quaternion_xyzw: np.ndarray) -> np.ndarray | Refusal:
    """A unit quaternion, or why this one cannot be a rotation.

    Returns:
        (4,) float64 of unit norm when the norm was within `NORM_TOLERANCE` of 1; a Refusal
        (`ODOMETRY_INVALID`) for NaN, infinity, zero and every other norm. The sign is kept.
    """
    quaternion = np.asarray(quaternion_xyzw, dtype=np.float64)
    assert quaternion.shape == (4,), quaternion.shape
    norm = float(np.linalg.norm(quaternion))
    if not abs(norm - 1.0) <= NORM_TOLERANCE:
        return Refusal(Reason.ODOMETRY_INVALID,
                       f"quaternion {quaternion.tolist()} has norm {norm:g}, expected 1 "
                       f"within {NORM_TOLERANCE:g}")
    return quaternion / norm


def matrix_from_quaternion(quaternion_xyzw: np.ndarray) -> np.ndarray:
    """(..., 4) unit quaternions -> (..., 3, 3) rotations, float64; all at once, for speed."""
    x, y, z, w = np.moveaxis(np.asarray(quaternion_xyzw, dtype=np.float64), -1, 0)
    entries = [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y),
               2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x),
               2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)]
    return np.stack(entries, axis=-1).reshape(*x.shape, 3, 3)


def quaternion_from_matrix(rotation: np.ndarray) -> np.ndarray:
    """(3, 3) rotation -> (4,) unit quaternion with w >= 0, float64."""
    return quaternions.mat2quat(rotation)[_TO_XYZW]


def rotation_from_vector(vector: np.ndarray) -> np.ndarray:
    """(3,) axis times angle in rad -> (3, 3) rotation, float64; zero gives the identity."""
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return np.eye(3)
    return quaternions.quat2mat(quaternions.axangle2quat(vector / angle, angle,
                                                         is_normalized=True))


def vector_between(start_xyzw: np.ndarray, end_xyzw: np.ndarray) -> np.ndarray:
    """(3,) axis times angle in rad, angle in [0, pi], in the frame of the first quaternion.

    The shorter turn from one (4,) unit quaternion to another, so that
    matrix(end) = matrix(start) @ rotation_from_vector(vector); either sign of either is the same.
    """
    start, end = start_xyzw[_TO_WXYZ], end_xyzw[_TO_WXYZ]
    turn = quaternions.qmult(quaternions.qconjugate(start), end)
    turn = -turn if turn[0] < 0.0 else turn
    sine = float(np.linalg.norm(turn[1:]))
    return turn[1:] * (2.0 * np.arctan2(sine, turn[0]) / sine) if sine > 0.0 else np.zeros(3)


def yaw_from_matrix(rotation: np.ndarray) -> float:
    """Heading in rad of a (3, 3) rotation or (4, 4) transform: its x axis seen from above."""
    return float(np.arctan2(rotation[1, 0], rotation[0, 0]))


def transform(rotation: np.ndarray, translation: np.ndarray) -> np.ndarray:
    """(3, 3) and (3,) -> (4, 4) float64."""
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = translation
    return matrix


def planar_transform(position: np.ndarray, yaw_rad: float) -> np.ndarray:
    """(2,) m and a heading in rad -> (4, 4) float64, z = 0 and level."""
    cosine, sine = np.cos(yaw_rad), np.sin(yaw_rad)
    rotation = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    return transform(rotation, np.array([position[0], position[1], 0.0]))


def compose(a_from_b: np.ndarray, b_from_c: np.ndarray) -> np.ndarray:
    """(4, 4) and (4, 4) -> (4, 4) a_from_c, float64."""
    return np.asarray(a_from_b, dtype=np.float64) @ np.asarray(b_from_c, dtype=np.float64)


def optical(base_from_camera: np.ndarray | None) -> np.ndarray | None:
    """The optical frame, also of a camera whose images are stamped with its body frame, x ahead.

    No camera of a car looks straight up, so a z axis that does is a body frame's.
    """
    if base_from_camera is None or base_from_camera[2, 2] < 0.7:
        return base_from_camera
    return compose(base_from_camera, transform(OPTICAL, np.zeros(3)))


def inverse(a_from_b: np.ndarray) -> np.ndarray:
    """(4, 4) rigid motion -> (4, 4) b_from_a, float64, without a general matrix inverse."""
    rotation = np.asarray(a_from_b, dtype=np.float64)[:3, :3]
    return transform(rotation.T, -rotation.T @ a_from_b[:3, 3])


def transform_points(a_from_b: np.ndarray, points_b: np.ndarray) -> np.ndarray:
    """(4, 4) and (..., 3) points in b -> (..., 3) the same points in a, float64."""
    matrix = np.asarray(a_from_b, dtype=np.float64)
    return np.asarray(points_b, dtype=np.float64) @ matrix[:3, :3].T + matrix[:3, 3]


def slerp(start_xyzw: np.ndarray, end_xyzw: np.ndarray, fraction: float) -> np.ndarray:
    """Turn from one unit quaternion to another at constant rate along the shorter arc.

    Args:
        start_xyzw, end_xyzw: (4,) unit quaternions; either sign.
        fraction: 0 at the start, 1 at the end; values outside extrapolate.
    Returns:
        (4,) unit quaternion, float64.
    Source: Shoemake 1985, "Animating rotation with quaternion curves".
    """
    start = np.asarray(start_xyzw, dtype=np.float64)
    end = np.asarray(end_xyzw, dtype=np.float64)
    cosine = float(start @ end)
    if cosine < 0.0:
        end, cosine = -end, -cosine
    if cosine > _PARALLEL:
        blend = (1.0 - fraction) * start + fraction * end
    else:
        angle = np.arccos(cosine)
        blend = (np.sin((1.0 - fraction) * angle) * start + np.sin(fraction * angle) * end)
    return blend / np.linalg.norm(blend)
