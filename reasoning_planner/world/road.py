"""Geometry of one synthetic road: a lane centre line and the lanes, shoulders and sides about it.

Places on the road are (s, d): metres along the centre of the ego lane and metres to its left.
Knows nothing of traffic, cameras or drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GRID_M = 1.0
START_M = -60.0


@dataclass(frozen=True)
class Layout:
    """Cross-section of the road, seen along the ego lane.

    Attributes:
        environment: "city", "rural" or "highway": decides what stands beside the road.
        lane_width: metres.
        left_lanes, right_lanes: lanes in our direction to the left and right of the ego lane.
        oncoming_lanes: lanes of the other direction, left of ours.
        left_shoulder, right_shoulder: paved metres between the outermost lane and the kerb.
        centre_line: whether the line towards oncoming traffic is painted.
    """

    environment: str
    lane_width: float
    left_lanes: int = 0
    right_lanes: int = 0
    oncoming_lanes: int = 0
    left_shoulder: float = 0.5
    right_shoulder: float = 0.5
    centre_line: bool = True

    @property
    def right_lane_edge(self) -> float:
        """d of the outer edge of our rightmost lane."""
        return -(0.5 + self.right_lanes) * self.lane_width

    @property
    def left_lane_edge(self) -> float:
        """d of the outer edge of the leftmost lane, oncoming ones included."""
        return (0.5 + self.left_lanes + self.oncoming_lanes) * self.lane_width

    @property
    def right_edge(self) -> float:
        """d of the right kerb."""
        return self.right_lane_edge - self.right_shoulder

    @property
    def left_edge(self) -> float:
        """d of the left kerb."""
        return self.left_lane_edge + self.left_shoulder


@dataclass(frozen=True)
class Road:
    """The ego lane's centre line on a grid of 1 m, from s = -60 m; s = 0 is the origin, yaw 0.

    Attributes:
        x, y, yaw, curvature: (N,) float64, metres, radians and 1/m.
    """

    x: np.ndarray
    y: np.ndarray
    yaw: np.ndarray
    curvature: np.ndarray

    @property
    def end_m(self) -> float:
        """The last s on the grid."""
        return START_M + GRID_M * (len(self.x) - 1)

    def poses(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and yaw of the centre line at each s; straight on beyond either end."""
        s = np.asarray(s, dtype=np.float64)
        place = (s - START_M) / GRID_M
        index = np.clip(place.astype(np.int64), 0, len(self.x) - 2)
        fraction = place - index
        yaw = self.yaw[index] + np.clip(fraction, 0.0, 1.0) * (
            self.yaw[index + 1] - self.yaw[index])
        x = self.x[index] + fraction * (self.x[index + 1] - self.x[index])
        y = self.y[index] + fraction * (self.y[index + 1] - self.y[index])
        return x, y, yaw

    def points(self, s: np.ndarray, d: np.ndarray) -> np.ndarray:
        """(..., 2) float64 world positions of road places (s, d)."""
        x, y, yaw = self.poses(s)
        return np.stack((x - d * np.sin(yaw), y + d * np.cos(yaw)), axis=-1)


def build_road(curvature: np.ndarray) -> Road:
    """Integrate a curvature profile given on the grid into a road through the origin at s = 0."""
    turns = 0.5 * (curvature[1:] + curvature[:-1]) * GRID_M
    yaw = np.concatenate(([0.0], np.cumsum(turns)))
    middle = 0.5 * (yaw[1:] + yaw[:-1])
    x = np.concatenate(([0.0], np.cumsum(np.cos(middle) * GRID_M)))
    y = np.concatenate(([0.0], np.cumsum(np.sin(middle) * GRID_M)))
    origin = int(round(-START_M / GRID_M))
    cos, sin = np.cos(yaw[origin]), np.sin(yaw[origin])
    x, y = x - x[origin], y - y[origin]
    return Road(cos * x + sin * y, -sin * x + cos * y, yaw - yaw[origin], curvature)


def curvature_profile(length_m: float, bends: tuple[tuple[float, float, float, float], ...]
                      ) -> np.ndarray:
    """Curvature on the grid from START_M to `length_m`.

    Args:
        length_m: the last s.
        bends: (begin, ramp, hold, curvature) each: metres of s where it begins, length of the
            linear ramp at either end, length at full curvature, and 1/m, positive to the left.
    """
    s = np.arange(START_M, length_m + GRID_M, GRID_M)
    total = np.zeros_like(s)
    for begin, ramp, hold, curvature in bends:
        rise = np.clip((s - begin) / ramp, 0.0, 1.0)
        fall = np.clip((s - begin - ramp - hold) / ramp, 0.0, 1.0)
        total += curvature * (rise - fall)
    return total
