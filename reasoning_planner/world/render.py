"""A pinhole painter for the four cameras of the model: faces in, uint8 RGB images out.

Painter's algorithm at twice the size, then averaged down; weather is applied face by face, by
distance. It draws what it is given at given poses and decides nothing about the scene.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from . import figures, mesh
from .elements import Scene
from .expert import Drive
from .mesh import Faces, Look

CAMERA_SLOTS = (0, 1, 2, 6)      # Alpamayo's indices: cross left, front wide, cross right, tele
CAMERA_NAMES = ("camera_cross_left_120fov", "camera_front_wide_120fov",
                "camera_cross_right_120fov", "camera_front_tele_30fov")
SUPERSAMPLING = 2
_NEAR_M = 0.3
_SUBPIXEL = 4                    # fixed-point bits of a corner


@dataclass(frozen=True)
class Camera:
    """One camera on the vehicle.

    Attributes:
        name: Alpamayo's clip name of the camera.
        position: (3,) metres in `base_link` (rear axle, on the ground).
        yaw_rad, pitch_rad, roll_rad: of the optical axis; pitch is positive downwards.
        fov_rad: horizontal field of view.
    """

    name: str
    position: tuple[float, float, float]
    yaw_rad: float
    fov_rad: float
    pitch_rad: float = 0.0
    roll_rad: float = 0.0

    def focal_px(self, width: int) -> float:
        """Focal length in pixels of an image this wide."""
        return 0.5 * width / np.tan(0.5 * self.fov_rad)

    def base_from_camera(self) -> np.ndarray:
        """(3, 3) rotation; the camera's x looks forward, y left, z up (no optical frame)."""
        (cy, sy), (cp, sp), (cr, sr) = ((np.cos(a), np.sin(a)) for a in
                                        (self.yaw_rad, self.pitch_rad, self.roll_rad))
        yaw = np.array(((cy, -sy, 0.0), (sy, cy, 0.0), (0.0, 0.0, 1.0)))
        pitch = np.array(((cp, 0.0, sp), (0.0, 1.0, 0.0), (-sp, 0.0, cp)))
        roll = np.array(((1.0, 0.0, 0.0), (0.0, cr, -sr), (0.0, sr, cr)))
        return yaw @ pitch @ roll


RIG = (
    Camera(CAMERA_NAMES[0], (2.2, 0.8, 1.3), np.radians(60.0), np.radians(120.0)),
    Camera(CAMERA_NAMES[1], (1.9, 0.0, 1.5), 0.0, np.radians(120.0), np.radians(1.0)),
    Camera(CAMERA_NAMES[2], (2.2, -0.8, 1.3), np.radians(-60.0), np.radians(120.0)),
    Camera(CAMERA_NAMES[3], (1.9, 0.0, 1.5), 0.0, np.radians(30.0), np.radians(-0.8)),
)


def jittered_rig(rng: np.random.Generator) -> tuple[Camera, ...]:
    """RIG as it would be bolted on another vehicle: centimetres and tenths of degrees off."""
    rig = []
    for camera in RIG:
        move = rng.uniform(-1.0, 1.0, 6)
        wide = camera.fov_rad > 1.0
        x, y, z = camera.position
        rig.append(Camera(camera.name, (x + 0.1 * move[0], y + 0.06 * move[1], z + 0.1 * move[2]),
                          camera.yaw_rad + (0.015 if wide else 0.006) * move[3], camera.fov_rad,
                          camera.pitch_rad + (0.015 if wide else 0.006) * move[4],
                          camera.roll_rad + 0.008 * move[5]))
    return tuple(rig)


@dataclass(frozen=True)
class Air:
    """What weather does to colours: fog colour and range, darkness, grain."""

    sky_top: np.ndarray
    haze: np.ndarray
    sight_m: float
    ambient: float
    gain: float
    grain: int
    streaks: int


def _air(scene: Scene, look: Look, rng: np.random.Generator) -> Air:
    u = rng.random(4)
    if scene.weather == "night":
        top = np.array((10.0, 14.0, 30.0)) * (0.6 + 0.8 * u[0])
        return Air(top, top * 1.6 + 6.0, 300.0, 0.2 + 0.14 * u[1], 1.0, 5, 0)
    if scene.weather == "fog":
        haze = np.full(3, 165.0 + 40.0 * u[0]) + 6.0 * (u[1] - 0.5)
        return Air(haze, haze, 32.0 + 28.0 * u[2], 1.0, 0.95, 3, 0)
    if scene.weather == "rain":
        haze = np.array((150.0, 156.0, 165.0)) * (0.75 + 0.3 * u[0])
        return Air(haze * 0.9, haze, 75.0 + 60.0 * u[1], 0.78, 0.95, 4, 7)
    return Air(look.sky, look.sky * 0.5 + 115.0, 260.0 + 200.0 * u[0], 1.0, 0.9 + 0.2 * u[1], 3, 0)


class Renderer:
    """Draws one scene; keeps what does not change between its frames."""

    def __init__(self, scene: Scene, size: tuple[int, int] = (64, 128),
                 rig: tuple[Camera, ...] | None = None):
        self.scene, self.size = scene, size
        self._rng = np.random.Generator(np.random.PCG64((scene.look_seed, 3)))
        self.rig = jittered_rig(self._rng) if rig is None else rig
        self._look = mesh.draw_look(scene)
        self._air = _air(scene, self._look, self._rng)
        self._rotations = np.stack([c.base_from_camera() for c in self.rig]).astype(np.float32)
        self._centres = np.array([c.position for c in self.rig], np.float32)
        self._focal = np.array([c.focal_px(size[1] * SUPERSAMPLING) for c in self.rig], np.float32)

    def frames(self, times: np.ndarray, positions: np.ndarray, yaw_rad: np.ndarray,
               along_m: float) -> np.ndarray:
        """Images of all cameras at several moments close together.

        Args:
            times: (F,) seconds.
            positions: (F, 2) and yaw_rad (F,): the ego vehicle's poses at those times.
            along_m: its road place at the last of them.
        Returns:
            (4, F, H, W, 3) uint8 RGB, cameras in the order of CAMERA_SLOTS.
        """
        still, moving = self._shapes(times, positions[-1], along_m)
        batch = _merge(still, moving, len(times))
        return self._paint(batch, positions.astype(np.float32), yaw_rad.astype(np.float32))

    def _shapes(self, times: np.ndarray, eye: np.ndarray, along_m: float
                ) -> tuple[list[Faces], list[Faces]]:
        scene = self.scene
        still = [mesh.static_faces(scene, self._look, along_m)]
        now = float(times[-1])
        for signal in scene.signals:
            if -20.0 < signal.s_m - along_m < 85.0:
                still.append(mesh.signal_faces(scene, signal, signal.state_at(now)))
        moving = []
        for index, agent in enumerate(scene.agents):
            if now >= agent.from_s and -30.0 < agent.along(now)[0] - along_m < 110.0:
                moving.append(figures.agent_faces(scene, index, agent, self._look, times, eye))
        return still, moving

    def _paint(self, batch: Faces, positions: np.ndarray, yaw: np.ndarray) -> np.ndarray:
        height, width = (n * SUPERSAMPLING for n in self.size)
        n_frames, n_cameras = len(positions), len(self.rig)
        # One plane per corner and axis: reductions over a leading axis of 4 are ten times faster.
        in_base = np.ascontiguousarray(_into_base(batch.corners, positions, yaw)
                                       .transpose(3, 2, 0, 1))               # (3, 4, F, N)
        anchors = _into_base(batch.anchors, positions, yaw)                  # (F, N, 2)
        lit = self._lit_colours(batch, anchors)                              # (F, N, 3)
        canvas = np.empty((n_cameras, n_frames, height, width, 3), np.uint8)
        for c in range(n_cameras):
            canvas[c] = cv2.resize(self._background(c, height)[:, None], (width, height),
                                   interpolation=cv2.INTER_NEAREST)
            self._paint_camera(canvas[c], c, in_base, anchors, batch, lit)
        return self._develop(canvas)

    def _paint_camera(self, canvas: np.ndarray, c: int, in_base: np.ndarray, anchors: np.ndarray,
                      batch: Faces, lit: np.ndarray) -> None:
        height, width = canvas.shape[1:3]
        turn, centre, focal = self._rotations[c], self._centres[c], float(self._focal[c])
        x, y, z = (in_base[axis] - centre[axis] for axis in range(3))        # (4, F, N)
        x, y, z = (x * turn[0, axis] + y * turn[1, axis] + z * turn[2, axis] for axis in range(3))
        ahead = x > _NEAR_M
        whole = ahead[0] & ahead[1] & ahead[2] & ahead[3]                    # (F, N)
        inverse = focal / np.maximum(x, _NEAR_M)
        u, v = 0.5 * width - y * inverse, 0.5 * height - z * inverse
        shown = whole & (u.max(0) > 0) & (u.min(0) < width) & (v.max(0) > 0) & (v.min(0) < height)
        area = (u[2] - u[0]) * (v[3] - v[1]) - (u[3] - u[1]) * (v[2] - v[0])
        # Twice the area, negative when seen from outside; below one painted pixel it is noise.
        shown &= np.where(batch.solid, area < -1.0, np.abs(area) > 1.0)
        points = _fixed_point(u, v).transpose(1, 2, 0, 3)                    # (F, N, 4, 2)
        cut_rows, cut_points = _clip(ahead, x, y, z, focal, (height, width))
        shown |= cut_rows >= 0
        away = np.hypot(anchors[..., 0] - centre[0], anchors[..., 1] - centre[1])
        key = batch.order - np.where(batch.order >= 1e4, away, 0.0)
        for f in range(len(canvas)):
            index = np.flatnonzero(shown[f])
            index = index[np.argsort(key[f, index], kind="stable")]
            image, whole_points = canvas[f], np.ascontiguousarray(points[f, index])
            rows, colours = cut_rows[f, index].tolist(), lit[f, index].tolist()
            for polygon, row, colour in zip(whole_points, rows, colours):
                if row >= 0:
                    polygon = cut_points[row]
                cv2.fillConvexPoly(image, polygon, colour, cv2.LINE_8, _SUBPIXEL)

    def _lit_colours(self, batch: Faces, anchors: np.ndarray) -> np.ndarray:
        air = self._air
        centre = anchors
        away = np.hypot(centre[..., 0], centre[..., 1])
        light = np.full_like(away, air.ambient)
        if air.ambient < 0.5:
            bearing = np.abs(np.arctan2(centre[..., 1], centre[..., 0] - 2.0))
            beam = np.clip(1.25 - bearing / 0.6, 0.0, 1.0)
            light += 0.75 * beam * np.exp(-(away / 38.0) ** 2)
        light = np.maximum(light, batch.glow)
        clear = np.exp(-away / (air.sight_m * (1.0 + 0.8 * batch.glow)))[..., None]
        return (np.clip(batch.colours * light[..., None] * air.gain, 0.0, 255.0) * clear
                + air.haze * (1.0 - clear))

    def _background(self, c: int, height: int) -> np.ndarray:
        """(height, 3) sky above and verge below the horizon, by row."""
        air, camera = self._air, self.rig[c]
        horizon = 0.5 * height - self._focal[c] * np.tan(camera.pitch_rad)
        below = np.arange(height) + 0.5 - horizon
        up = np.clip(-below / (0.5 * height), 0.0, 1.0)[:, None]
        sky = air.haze + (air.sky_top - air.haze) * np.sqrt(up)
        reach = camera.position[2] * self._focal[c] / np.maximum(below, 0.5)
        light = np.full_like(reach, air.ambient)
        if air.ambient < 0.5:
            light += 0.3 * np.exp(-(reach / 30.0) ** 2) * (abs(camera.yaw_rad) < 0.5)
        clear = np.exp(-reach / air.sight_m)[:, None]
        ground = self._look.verge * light[:, None] * air.gain * clear + air.haze * (1.0 - clear)
        return np.where(below[:, None] > 0.0, ground, sky).clip(0, 255).astype(np.uint8)

    def _develop(self, canvas: np.ndarray) -> np.ndarray:
        """Average down, add rain streaks and sensor grain."""
        n_cameras, n_frames, height, width, _ = canvas.shape
        rng, air = self._rng, self._air
        if air.streaks:
            draws = rng.random((n_cameras, n_frames, air.streaks, 3))
            for c in range(n_cameras):
                for f in range(n_frames):
                    for x, y, length in draws[c, f].tolist():
                        start = (int(x * width), int(y * height))
                        end = (start[0] + 2, start[1] + int((0.05 + 0.12 * length) * height))
                        cv2.line(canvas[c, f], start, end, (178, 182, 190), 1)
        small = cv2.resize(canvas.reshape(-1, width, 3),
                           (width // SUPERSAMPLING, canvas.size // (3 * width * SUPERSAMPLING)),
                           interpolation=cv2.INTER_AREA)
        # One strip of noise read from 16 places: drawing every pixel took a tenth of the time.
        pixels = self.size[0] * self.size[1] * 3
        strip = rng.integers(0, 2 * air.grain + 1, pixels + 8192, dtype=np.uint8)
        places = rng.integers(0, 8192, n_cameras * n_frames).tolist()
        grain = np.stack([strip[place:place + pixels] for place in places])
        small = cv2.subtract(cv2.add(small.reshape(grain.shape), grain), float(air.grain))
        return small.reshape(n_cameras, n_frames, *self.size, 3)


def _into_base(points: np.ndarray, positions: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    """World points (F, N, ..., 2 or 3) seen from each frame's ego pose."""
    extra = (1,) * (points.ndim - 2)
    cos, sin = np.cos(yaw).reshape(-1, *extra), np.sin(yaw).reshape(-1, *extra)
    x = points[..., 0] - positions[:, 0].reshape(-1, *extra)
    y = points[..., 1] - positions[:, 1].reshape(-1, *extra)
    seen = np.empty_like(points)
    seen[..., 0] = cos * x + sin * y
    seen[..., 1] = cos * y - sin * x
    seen[..., 2:] = points[..., 2:]
    return seen


def _merge(still: list[Faces], moving: list[Faces], n_frames: int) -> Faces:
    """Both kinds as one batch with a frame axis."""
    base = mesh.join(still)
    spread = Faces(*(np.broadcast_to(value, (n_frames,) + value.shape)
                     for value in (base.corners, base.colours)), base.order,
                   np.broadcast_to(base.anchors, (n_frames,) + base.anchors.shape),
                   np.broadcast_to(base.glow, (n_frames,) + base.glow.shape), base.solid)
    return mesh.join([spread, *moving])


def _fixed_point(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Image points (..., 2) int32 with _SUBPIXEL fractional bits, bounded for OpenCV."""
    points = np.stack((u, v), axis=-1) * float(1 << _SUBPIXEL)
    return np.clip(points, -3e5, 3e5).astype(np.int32)


def _clip(ahead: np.ndarray, x: np.ndarray, y: np.ndarray, z: np.ndarray, focal: float,
          size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Cut the faces that pass through the near plane.

    Args:
        ahead, x, y, z: (4, F, N) corners in the camera frame, and which are before the plane.
        size: (height, width) of the canvas; what falls outside is dropped.
    Returns:
        rows: (F, N) int64, -1 or the face's row in the second value.
        points: (M, 8, 2) int32, fixed point; unused places repeat a neighbour.
    """
    count = ahead.sum(axis=0)
    rows = np.full(count.shape, -1)
    frame, face = np.nonzero((count > 0) & (count < 4))
    a = np.stack((x[:, frame, face], y[:, frame, face], z[:, frame, face]))    # (3, 4, M)
    b = np.roll(a, -1, axis=1)
    inside, next_inside = a[0] > _NEAR_M, b[0] > _NEAR_M
    crossing = inside != next_inside
    step = np.where(crossing, b[0] - a[0], 1.0)
    cut = a + (_NEAR_M - a[0]) / step * (b - a)
    slots = np.stack((a, cut), axis=2).reshape(3, 8, -1)
    used = np.stack((inside, crossing), axis=1).reshape(8, -1)
    source = np.maximum.accumulate(np.where(used, np.arange(8)[:, None], -1), axis=0)
    source = np.where(source < 0, source[-1], source)
    slots = np.take_along_axis(slots, np.broadcast_to(source, slots.shape), axis=1)
    height, width = size
    u = 0.5 * width - focal * slots[1] / slots[0]
    v = 0.5 * height - focal * slots[2] / slots[0]
    shown = (u.max(0) > 0) & (u.min(0) < width) & (v.max(0) > 0) & (v.min(0) < height)
    rows[frame[shown], face[shown]] = np.arange(int(shown.sum()))
    points = _fixed_point(u[:, shown].T, v[:, shown].T)
    return rows, np.ascontiguousarray(points)


def render_scene(scene: Scene, drive: Drive, anchor: int, size: tuple[int, int] = (64, 128)
                 ) -> np.ndarray:
    """The 16 images that end at step `anchor` of the drive: (4, 4, H, W, 3) uint8 RGB."""
    steps = slice(anchor - 3, anchor + 1)
    return Renderer(scene, size).frames(drive.time_s[steps], drive.positions[steps],
                                        drive.yaw_rad[steps], float(drive.along_m[anchor]))
