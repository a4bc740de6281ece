"""Paths drawn into camera images by the camera's calibration.

Images are (H, W, 3) uint8 RGB and rectified. Knows no ROS, no records and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from .errors import DataError
from .perception import frames

NEAR_M = 1.0                     # what is closer to the image plane is cut off
RIBBON_OPACITY = 0.55
SPEED_STOPS = ((91, 61, 245), (42, 143, 232), (23, 195, 178), (155, 225, 93), (253, 231, 37))
SUBPIXEL_BITS = 4


@dataclass(frozen=True)
class Camera:
    """A rectified pinhole camera on the vehicle.

    Attributes:
        k: (3, 3) float64, pixels.
        base_from_camera: (4, 4) float64; camera axes x right, y down, z forward.
        size: image width and height, pixels.
    """

    k: np.ndarray
    base_from_camera: np.ndarray
    size: tuple[int, int]

    def scaled_to(self, image: np.ndarray) -> Camera:
        """The same camera for an (H, W, 3) image of another resolution than calibrated."""
        width, height = image.shape[1], image.shape[0]
        scale = np.array([width / self.size[0], height / self.size[1], 1.0])
        return Camera(self.k * scale[:, None], self.base_from_camera, (width, height))

    def from_fixed(self, map_from_base: np.ndarray, points: np.ndarray) -> np.ndarray:
        """(N, 3) points of the fixed frame, seen from a base pose -> (N, 3) camera frame."""
        map_from_camera = frames.compose(map_from_base, self.base_from_camera)
        return frames.transform_points(frames.inverse(map_from_camera), points)

    def project(self, points_camera: np.ndarray) -> np.ndarray:
        """(N, 3) camera frame -> (N, 2) pixels; NaN for points nearer than `NEAR_M`."""
        depth = points_camera[:, 2:3]
        visible = depth >= NEAR_M * (1.0 - 1e-9)        # clipping may round a hair below
        homogeneous = points_camera @ self.k.T
        return np.where(visible, homogeneous[:, :2] / np.where(visible, depth, 1.0), np.nan)


@dataclass(frozen=True)
class Lens:
    """How a camera projects, as its camera_info has it.

    Attributes:
        size: width and height that it is calibrated for, pixels.
        k: (3, 3) of the image as taken.
        projection: (3, 4) of the rectified image.
        distortion: coefficients of `model`, as ROS names it.
        frame_id: of the camera.
    """

    size: tuple[int, int]
    k: np.ndarray
    projection: np.ndarray
    distortion: np.ndarray
    model: str
    frame_id: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is calibrated at all: drivers fill camera_info with zeros otherwise."""
        return min(self.size) > 0 and self.k[0, 0] > 0.0

    def rectify(self, image: np.ndarray, is_rectified: bool) -> tuple[np.ndarray, np.ndarray]:
        """An image without its distortion, and the (3, 3) matrix of what is returned.

        Args:
            image: (H, W, 3), of any resolution.
            is_rectified: it has been done already.
        Raises:
            DataError: a distortion that cannot be undone here.
        """
        scale = np.array([image.shape[1] / self.size[0], image.shape[0] / self.size[1], 1.0])
        k = self.k * scale[:, None]
        if is_rectified:
            projection = self.projection[:, :3]
            return image, projection * scale[:, None] if projection[0, 0] > 0.0 else k
        if not self.distortion.any():
            return image, k
        try:
            if self.model in ("plumb_bob", "rational_polynomial"):
                return cv2.undistort(image, k, self.distortion), k
            if self.model == "equidistant":
                return cv2.fisheye.undistortImage(image, k, self.distortion, Knew=k), k
        except cv2.error as error:      # another number of coefficients than the model has
            raise DataError(f"{len(self.distortion)} coefficients of {self.model} are not what "
                            "OpenCV takes") from error
        raise DataError(f"distortion model {self.model!r}, expected plumb_bob, "
                        "rational_polynomial or equidistant")


def clip_near(polygon: np.ndarray, closed: bool = True) -> np.ndarray:
    """Cut the part of a polygon or line in the camera frame that is nearer than `NEAR_M`.

    Args:
        polygon: (N, 3) corners in order.
        closed: whether the last corner is joined to the first.
    Returns:
        (M, 3), M = 0 when nothing is left. A line must be cut at most once (one segment).
    Source: Sutherland and Hodgman 1974, one plane.
    """
    kept: list[np.ndarray] = []
    for i, corner in enumerate(polygon):
        previous = polygon[i - 1]
        if (i > 0 or closed) and (previous[2] >= NEAR_M) != (corner[2] >= NEAR_M):
            share = (NEAR_M - previous[2]) / (corner[2] - previous[2])
            kept.append(previous + share * (corner - previous))
        if corner[2] >= NEAR_M:
            kept.append(corner)
    return np.array(kept).reshape(-1, 3)


def speed_colours(speed_mps: np.ndarray, low_mps: float, high_mps: float) -> np.ndarray:
    """(N,) -> (N, 3) uint8 RGB, from `SPEED_STOPS`; outside low..high the end colours."""
    share = (np.asarray(speed_mps) - low_mps) / max(high_mps - low_mps, 1e-9)
    stops = np.linspace(0.0, 1.0, len(SPEED_STOPS))
    channels = [np.interp(share, stops, channel) for channel in zip(*SPEED_STOPS)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def ribbon_edges(positions: np.ndarray, quaternions_xyzw: np.ndarray,
                 width_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Left and right edge, (N, 3) each, of the ground a vehicle of this width covers."""
    left = frames.matrix_from_quaternion(quaternions_xyzw)[:, :, 1] * (width_m / 2.0)
    return positions + left, positions - left


def draw_ribbon(image: np.ndarray, camera: Camera, left: np.ndarray, right: np.ndarray,
                colours: np.ndarray) -> np.ndarray:
    """A translucent ribbon on the ground.

    Args:
        image: (H, W, 3) uint8.
        left, right: (N, 3) edges in the camera frame.
        colours: (N, 3) uint8, of the stretch that begins at each point.
    Returns:
        (H, W, 3) uint8, a new image.
    """
    paint, mask = image.copy(), np.zeros(image.shape[:2], dtype=np.uint8)
    for i in reversed(range(len(left) - 1)):                    # far to near
        quad = clip_near(np.stack([left[i], left[i + 1], right[i + 1], right[i]]))
        if len(quad) == 0:
            continue
        corners, colour = _fixed_point(camera.project(quad)), colours[i].tolist()
        cv2.fillPoly(paint, [corners], colour, cv2.LINE_8, SUBPIXEL_BITS)
        cv2.polylines(paint, [corners], True, colour, 2, cv2.LINE_8, SUBPIXEL_BITS)
        cv2.fillPoly(mask, [corners], 255, cv2.LINE_AA, SUBPIXEL_BITS)
    opacity = mask[..., None] * (RIBBON_OPACITY / 255.0)
    blended = np.rint(image * (1.0 - opacity) + paint * opacity).astype(np.uint8)
    for edge in (left, right):
        draw_line(blended, camera, edge, colours, 1)
    return blended


def draw_line(image: np.ndarray, camera: Camera, points: np.ndarray, colours: np.ndarray,
              thickness: int) -> None:
    """A line through (N, 3) points of the camera frame, into the image; NaN points are gaps."""
    for i in range(len(points) - 1):
        segment = points[i:i + 2]
        if np.isfinite(segment).all():
            segment = clip_near(segment, closed=False)
            if len(segment) == 2:
                cv2.polylines(image, [_fixed_point(camera.project(segment))], False,
                              colours[i].tolist(), thickness, cv2.LINE_AA, SUBPIXEL_BITS)


def _fixed_point(pixels: np.ndarray) -> np.ndarray:
    """(N, 2) pixels -> int32 with `SUBPIXEL_BITS` fractional bits, as cv2 wants them."""
    scaled = np.clip(pixels, -2.0e4, 2.0e4) * (1 << SUBPIXEL_BITS)
    return np.rint(scaled).astype(np.int32)


def draw_seconds(image: np.ndarray, camera: Camera, left: np.ndarray, right: np.ndarray,
                 time_ns: np.ndarray) -> None:
    """A cross-bar with its label at each whole second of a ribbon, where it is in the image."""
    last_row = np.inf
    for i in np.flatnonzero((time_ns > 0) & (time_ns % 1_000_000_000 == 0)):
        ends = camera.project(np.stack([left[i], right[i]]))
        inside = np.isfinite(ends).all() and _in_image(ends, image.shape)
        if not inside or last_row - ends[1, 1] < 12.0:
            continue
        last_row = ends[1, 1]
        cv2.line(image, *map(tuple, _fixed_point(ends).tolist()), (255, 255, 255), 1, cv2.LINE_AA,
                 SUBPIXEL_BITS)
        label = f"{time_ns[i] // 1_000_000_000} s"
        at = tuple(np.rint(ends[1] + (5, 4)).astype(int).tolist())
        for colour, thickness in (((20, 20, 20), 3), ((255, 255, 255), 1)):
            cv2.putText(image, label, at, cv2.FONT_HERSHEY_SIMPLEX, 0.42, colour,
                        thickness, cv2.LINE_AA)


def _in_image(pixels: np.ndarray, shape: tuple[int, ...]) -> bool:
    return bool(np.all((pixels >= 0.0) & (pixels < (shape[1], shape[0]))))


def draw_plan(image: np.ndarray, camera: Camera, map_from_base: np.ndarray,
              positions: np.ndarray, quaternions_xyzw: np.ndarray, speed_mps: np.ndarray,
              time_ns: np.ndarray, truth: np.ndarray, width_m: float,
              speed_range_mps: tuple[float, float]) -> np.ndarray:
    """The planned path as a ribbon coloured by speed, the driven path as a thin white line.

    Args:
        image: (H, W, 3) uint8 RGB, taken at the pose `map_from_base`.
        positions, quaternions_xyzw, speed_mps, time_ns: (N, 3), (N, 4), (N,), (N,) of the plan.
        truth: (T, 3) driven positions in the same fixed frame; NaN where not known.
        width_m: of the vehicle.
        speed_range_mps: speeds of the first and the last colour.
    Returns:
        (H, W, 3) uint8, a new image.
    """
    left, right = (camera.from_fixed(map_from_base, edge) for edge in
                   ribbon_edges(positions, quaternions_xyzw, width_m))
    colours = speed_colours(speed_mps, *speed_range_mps)
    drawn = draw_ribbon(image, camera, left, right, colours)
    driven = camera.from_fixed(map_from_base, truth)
    for colour, thickness in ((25, 4), (255, 2)):
        draw_line(drawn, camera, driven, np.full((len(driven), 3), colour), thickness)
    draw_seconds(drawn, camera, left, right, time_ns)
    return drawn
