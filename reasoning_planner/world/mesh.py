"""The synthetic world as coloured four-cornered faces: road, markings, scenery, signals.

Faces live in the road's world frame (z up from the road). Convex bodies list their corners
counter-clockwise seen from outside, so that hidden faces can be dropped. Knows no camera and no
weather beyond "is it dark".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .road import START_M, Layout
from .elements import Scene, Signal

GROUND, BACKGROUND, OBJECTS = 0.0, 1.0, 2.0    # layers, painted in this order


@dataclass
class Faces:
    """A batch of faces.

    Attributes:
        corners: (N, 4, 3) or (F, N, 4, 3) float32, metres; F frames where they move.
        colours: (N, 3) or (F, N, 3) float32, 0..255.
        order: (N,) float32, layer and place within its object: lower is painted first.
        anchors: (N, 2) or (F, N, 2) float32, where the object stands, for sorting by distance.
        glow: (N,) or (F, N) float32, 1 where the face shines by itself.
        solid: (N,) bool, hidden when seen from behind.
    """

    corners: np.ndarray
    colours: np.ndarray
    order: np.ndarray
    anchors: np.ndarray
    glow: np.ndarray
    solid: np.ndarray


def faces(corners: np.ndarray, colours, layer: float, place: float = 0.0, anchors=None,
          glow: float | np.ndarray = 0.0, solid: bool = False) -> Faces:
    """A batch with what is common to its faces spread over them."""
    n = len(corners)
    if anchors is None:
        anchors = corners[:, :, :2].mean(axis=1)
    return Faces(np.asarray(corners, np.float32),
                 np.broadcast_to(np.asarray(colours, np.float32), (n, 3)),
                 np.full(n, layer * 1e4 + place, np.float32),
                 np.broadcast_to(np.asarray(anchors, np.float32), (n, 2)),
                 np.broadcast_to(np.asarray(glow, np.float32), (n,)), np.full(n, solid))


def join(batches: list[Faces]) -> Faces:
    """All batches (of equal frame count) as one."""
    axis = batches[0].corners.ndim - 3
    return Faces(*(np.concatenate([getattr(b, name) for b in batches],
                                  axis=axis if name in ("corners", "colours", "anchors", "glow")
                                  else 0)
                   for name in ("corners", "colours", "order", "anchors", "glow", "solid")))


def _flat(road, s0, s1, d0, d1, z: float = 0.0) -> np.ndarray:
    """(N, 4, 3) ground faces between s0 and s1, from d0 (right) to d1 (left), all (N,)."""
    s = np.stack((s0, s1, s1, s0), axis=-1)
    d = np.stack(np.broadcast_arrays(d0, d0, d1, d1), axis=-1) + np.zeros_like(s)
    corners = np.full(s.shape + (3,), z)
    corners[..., :2] = road.points(s, d)
    return corners


def _strip(road, edges: np.ndarray, d0, d1) -> np.ndarray:
    """Ground faces along the road between neighbouring `edges`; d0, d1 scalars or per edge."""
    d0 = np.broadcast_to(np.asarray(d0, float), edges.shape)
    d1 = np.broadcast_to(np.asarray(d1, float), edges.shape)
    right, left = road.points(edges, d0), road.points(edges, d1)
    corners = np.zeros((len(edges) - 1, 4, 3))
    corners[:, 0, :2], corners[:, 1, :2] = right[:-1], right[1:]
    corners[:, 2, :2], corners[:, 3, :2] = left[1:], left[:-1]
    return corners


def _walls(feet: np.ndarray, low, high) -> np.ndarray:
    """(N, M, 4, 3) upright outer faces over M-cornered feet (N, M, 2), counter-clockwise."""
    following = np.roll(feet, -1, axis=1)
    corners = np.empty(feet.shape[:2] + (4, 3))
    corners[:, :, 0, :2] = corners[:, :, 3, :2] = feet
    corners[:, :, 1, :2] = corners[:, :, 2, :2] = following
    low, high = np.asarray(low, float), np.asarray(high, float)
    corners[:, :, :2, 2] = low.reshape(-1, 1, 1)
    corners[:, :, 2:, 2] = high.reshape(-1, 1, 1)
    return corners


@dataclass(frozen=True)
class Look:
    """Colours of one world and what stands beside its road, drawn by the scene's look seed."""

    asphalt: np.ndarray
    paint: np.ndarray
    verge: np.ndarray
    walk: np.ndarray
    sky: np.ndarray
    scenery: np.ndarray      # (cells, 2 sides, 8) uniform draws
    agent_tints: np.ndarray  # (32, 3)


def draw_look(scene: Scene) -> Look:
    """The look of a scene, the same for every frame of it."""
    rng = np.random.Generator(np.random.PCG64(scene.look_seed))
    cells = int((scene.road.end_m - START_M) / 12.0) + 1
    grey = 70.0 + 45.0 * rng.random()
    city = scene.layout.environment == "city"
    verge = np.array((150.0, 140.0, 125.0) if city and rng.random() < 0.5 else (95, 125, 65))
    return Look(grey + rng.uniform(-6, 6, 3), np.full(3, 205.0 + 45.0 * rng.random()),
                verge * rng.uniform(0.8, 1.15, 3), 150.0 + 40.0 * rng.random()
                + rng.uniform(-8, 8, 3),
                np.array((150.0, 190.0, 235.0)) * rng.uniform(0.85, 1.08, 3),
                rng.random((cells, 2, 8)), rng.uniform(0.88, 1.12, (32, 3)))


_STRIP_STEPS = np.array((-12.0, -3.0, 1.0, 4.0, 8.0, 13.0, 20.0, 29.0, 41.0, 60.0, 95.0))
_STRIP_STEPS_BENT = np.array((-12.0, -6.0, -2.0, 1.0, 3.5, 6.5, 10.0, 14.0, 18.5, 24.0, 30.0, 37.0,
                              46.0, 58.0, 74.0, 95.0))
_FAR_M = 85.0


def static_faces(scene: Scene, look: Look, along_m: float) -> Faces:
    """All that does not move, as far as it matters from the road place `along_m`."""
    road, layout = scene.road, scene.layout
    steps = _STRIP_STEPS_BENT if np.ptp(road.curvature) > 1e-3 else _STRIP_STEPS
    edges = np.minimum(along_m + steps, road.end_m - 1.0)
    batches = [
        faces(_strip(road, edges, layout.right_edge, layout.left_edge), look.asphalt, GROUND, 2),
        *_sides(road, layout, look, edges),
        *_lane_lines(scene, look, edges, along_m),
        *_scenery(scene, look, along_m),
    ]
    if scene.ramp_end_m is not None:
        batches += _ramp(scene, look, edges, along_m)
    near = along_m - 15.0, along_m + _FAR_M
    for signal in scene.signals:
        if near[0] - 20.0 < signal.s_m < near[1]:
            batches += _junction(scene, signal, look)
    batches += [_zebra(scene, look, s) for s in scene.crosswalks_m if near[0] < s < near[1]]
    return join(batches)


def _sides(road, layout: Layout, look: Look, edges: np.ndarray) -> list[Faces]:
    right, left = layout.right_edge, layout.left_edge
    if layout.environment == "city":
        return [faces(_strip(road, edges, right - 3.2, right), look.walk, GROUND, 1),
                faces(_strip(road, edges, left, left + 3.2), look.walk, GROUND, 1)]
    if layout.environment == "highway":
        rails = []
        for d, flip in ((right - 0.4, False), (left + 0.4, True)):
            if not flip and look.scenery[0, 0, 0] < 0.4:
                continue
            wall = np.repeat(_strip(road, edges, d, d)[:, :2], 2, axis=1)[:, (0, 2, 3, 1)]
            wall[:, :2, 2], wall[:, 2:, 2] = 0.35, 0.85
            rails.append(faces(wall, (150, 152, 156), BACKGROUND))
        return rails
    return []


def _lane_lines(scene: Scene, look: Look, edges: np.ndarray, along_m: float) -> list[Faces]:
    road, layout, width = scene.road, scene.layout, scene.layout.lane_width
    solid, dashed = [layout.right_lane_edge, layout.left_lane_edge], []
    lanes = range(-layout.right_lanes, layout.left_lanes + 1)
    dashed += [(lane + 0.5) * width for lane in lanes[:-1]]
    ours_end = (layout.left_lanes + 0.5) * width
    yellow = np.array((215.0, 170.0, 50.0))
    batches = []
    if layout.oncoming_lanes and layout.centre_line:
        dashed_centre = look.scenery[0, 0, 1] < 0.4
        if dashed_centre:
            dashed.append(ours_end)
        else:
            batches.append(faces(_strip(road, edges, ours_end - 0.11, ours_end + 0.11), yellow,
                                 GROUND, 4))
    if scene.ramp_end_m is not None:
        solid.remove(layout.right_lane_edge)
        dashed.append(layout.right_lane_edge)
    for d in solid:
        batches.append(faces(_strip(road, edges, d - 0.09, d + 0.09), look.paint, GROUND, 4))
    first = np.floor((along_m - 9.0) / 9.0) * 9.0
    s = first + 9.0 * np.arange(9)
    for d in dashed:
        batches.append(faces(_flat(road, s, s + 4.0, d - 0.1, d + 0.1), look.paint, GROUND, 4))
    return batches


def _ramp(scene: Scene, look: Look, edges: np.ndarray, along_m: float) -> list[Faces]:
    road, layout = scene.road, scene.layout
    end = scene.ramp_end_m
    edges = np.unique(np.concatenate((edges[edges < end], (end - 16.0, end))))
    taper = np.clip((end - edges) / 16.0, 0.0, 1.0)
    inner = layout.right_lane_edge
    outer = inner - layout.lane_width * taper
    chevrons = end - 16.0 + np.arange(0.0, 12.0, 3.0)
    return [
        faces(_strip(road, edges, np.minimum(outer - 0.6, layout.right_edge), inner),
              look.asphalt * 1.08, GROUND, 3),
        faces(_strip(road, edges, outer - 0.18, outer + 0.12), look.paint, GROUND, 5),
        faces(_flat(road, chevrons, chevrons + 1.0, layout.right_edge - 2.5,
                    inner - layout.lane_width * (end - chevrons) / 16.0 - 0.5),
              look.paint, GROUND, 5)]


def _zebra(scene: Scene, look: Look, s: float) -> Faces:
    layout = scene.layout
    d = np.arange(layout.right_edge + 0.3, layout.left_edge - 0.3, 1.0)
    n = np.full(len(d), s)
    return faces(_flat(scene.road, n - 1.5, n + 1.5, d, d + 0.5), look.paint, GROUND, 5)


def _junction(scene: Scene, signal: Signal, look: Look) -> list[Faces]:
    """The crossing road, the stop line and a zebra."""
    road, layout = scene.road, scene.layout
    s = signal.s_m
    near, far = s + 4.0, s + 4.0 + signal.crossing_m
    cells = np.linspace(-45.0, 45.0, 10)
    n = len(cells) - 1
    cross = _flat(road, np.full(n, near), np.full(n, far), cells[:-1], cells[1:])
    line = _flat(road, np.array((s,)), np.array((s + 0.6,)), layout.right_lane_edge,
                 (layout.left_lanes + 0.5) * layout.lane_width)
    return [faces(cross, look.asphalt, GROUND, 3), faces(line, look.paint * 1.05, GROUND, 5),
            _zebra(scene, look, s + 2.4)]


def signal_faces(scene: Scene, signal: Signal, state: str) -> Faces:
    """Posts, heads and lamps of a traffic light, or a stop sign; they face the driver."""
    road, layout = scene.road, scene.layout
    s = signal.s_m
    right = layout.right_lane_edge - 1.0
    left = (layout.left_lanes + 0.5) * layout.lane_width
    left += 0.7 if not layout.oncoming_lanes else layout.oncoming_lanes * layout.lane_width + 0.8
    if signal.device == "stop_sign":
        return _stop_sign(road, s, right)
    batches = [_light_head(road, s, right, 2.6, state, 1.0),
               _light_head(road, s, left, 2.6, state, 1.0),
               _light_head(road, s + signal.crossing_m + 6.0, 0.4, 5.4, state, 1.25)]
    return join(batches)


def _plate(road, s: float, d: float, shapes: list[tuple[float, float, float, float, bool]]):
    """Upright faces across the road at (s, d): (middle d, middle z, width, height, diamond)."""
    x, y, yaw = (float(v) for v in road.poses(s))
    corners = np.empty((len(shapes), 4, 3))
    for i, (right, up, width, height, diamond) in enumerate(shapes):
        unit = (((0, -1), (1, 0), (0, 1), (-1, 0)) if diamond
                else ((-1, -1), (1, -1), (1, 1), (-1, 1)))
        for j, (a, b) in enumerate(unit):
            across = d + right - 0.5 * width * a
            corners[i, j] = (x - across * np.sin(yaw), y + across * np.cos(yaw),
                             up + 0.5 * height * b)
    return corners, (x - d * np.sin(yaw), y + d * np.cos(yaw))


def _light_head(road, s: float, d: float, z: float, state: str, scale: float) -> Faces:
    lamp = 0.78 * scale
    shapes = [(0.0, 0.5 * z, 0.16, z, False), (0.0, z, 1.0 * scale, 2.7 * scale, False)]
    colours, glow = [(70, 72, 74), (16, 17, 18)], [0.0, 0.0]
    lit = {"red": ((255, 30, 20), 0), "green": ((25, 255, 110), 2)}[state]
    for i, dark in enumerate(((66, 18, 16), (62, 48, 14), (12, 56, 32))):
        up = z + (1 - i) * 0.85 * scale
        on = lit[1] == i
        for diamond in (False, True):
            size = lamp * (1.0 if not diamond else 1.25) * (0.8 if not diamond else 1.0)
            shapes.append((0.0, up, size, size, diamond))
            colours.append(lit[0] if on else dark)
            glow.append(1.0 if on else 0.0)
    corners, anchor = _plate(road, s, d, shapes)
    batch = faces(corners, np.array(colours), OBJECTS, 0.0, anchor, np.array(glow))
    batch.order = batch.order + 1e-3 * np.arange(len(corners), dtype=np.float32)
    return batch


def _stop_sign(road, s: float, d: float) -> Faces:
    shapes = [(0.0, 1.1, 0.14, 2.2, False)]
    for size in (1.35, 1.15):
        shapes += [(0.0, 2.2, size * 0.86, size * 0.86, False), (0.0, 2.2, size * 1.16,
                                                                 size * 1.16, True)]
    shapes.append((0.0, 2.2, 0.9, 0.26, False))
    corners, anchor = _plate(road, s, d, shapes)
    white, red = (245, 245, 245), (205, 15, 25)
    batch = faces(corners, np.array(((110, 110, 112), white, white, red, red, white)), OBJECTS,
                  0.0, anchor, np.array((0.0, 0.35, 0.35, 0.35, 0.35, 0.35)))
    batch.order = batch.order + 1e-3 * np.arange(len(corners), dtype=np.float32)
    return batch


def _scenery(scene: Scene, look: Look, along_m: float) -> list[Faces]:
    """Buildings or trees in 12 m cells on both sides."""
    road, layout = scene.road, scene.layout
    first = max(int((along_m - 20.0 - START_M) / 12.0), 0)
    last = min(int((along_m + _FAR_M - START_M) / 12.0), len(look.scenery))
    draws = look.scenery[first:last]
    cell = np.broadcast_to((START_M + 12.0 * np.arange(first, last))[:, None], draws.shape[:2])
    sign = np.broadcast_to(np.array((-1.0, 1.0)), draws.shape[:2])
    edge = np.broadcast_to(np.array((-layout.right_edge, layout.left_edge)), draws.shape[:2])
    built = {"city": 0.75, "rural": 0.1, "highway": 0.05}[layout.environment]
    house = draws[..., 0] < built
    tree = ~house & (draws[..., 0] < 0.85)
    for signal in scene.signals:
        clear = (cell < signal.s_m + signal.crossing_m + 6.0) & (cell + 12.0 > signal.s_m + 1.0)
        house, tree = house & ~clear, tree & ~clear
    batches = []
    if house.any():
        batches += _houses(road, cell[house], sign[house], edge[house], draws[house],
                           layout.environment == "city", scene.weather == "night")
    if tree.any():
        eye = road.points(along_m, 0.0)
        batches += _trees(road, eye, cell[tree], sign[tree], edge[tree], draws[tree])
    return batches


def _houses(road, cell, sign, edge, draws, city: bool, dark: bool) -> list[Faces]:
    n = len(cell)
    near = edge + 4.0 + 5.0 * draws[:, 1] + (0.0 if city else 8.0)
    s0, s1 = cell + 0.5 + draws[:, 2], cell + 10.0 + 1.5 * draws[:, 3]
    s = np.stack((s0, s1, s1, s0), axis=1)
    d = np.stack((near, near, near + 8.0, near + 8.0), axis=1) * sign[:, None]
    s = np.where(sign[:, None] > 0, s, s[:, ::-1])      # counter-clockwise on either side
    d = np.where(sign[:, None] > 0, d, d[:, ::-1])
    height = 4.0 + 14.0 * draws[:, 4] ** 1.5 if city else 3.5 + 3.0 * draws[:, 4]
    walls = _walls(road.points(s, d), np.zeros(n), height)     # (n, 4, 4, 3)
    tint = np.stack((draws[:, 5], draws[:, 6], draws[:, 7]), axis=1)
    base = 95.0 + 90.0 * draws[:, 5:6] + 45.0 * (tint - 0.5)
    shade = np.array((1.0, 0.8, 0.7, 0.88))
    colours = base[:, None, :] * shade[None, :, None]
    anchors = np.repeat(road.points(0.5 * (s0 + s1), sign * near), 4, axis=0)
    batches = [faces(walls.reshape(-1, 4, 3), colours.reshape(-1, 3), BACKGROUND, 0.0, anchors,
                     solid=True)]
    front = np.where(sign > 0, 0, 2)
    face = walls[np.arange(n), front]
    for floor in (0, 1):
        keep = height > 3.5 + 3.0 * floor
        band = face[keep].copy()
        band[:, :2, 2], band[:, 2:, 2] = 1.2 + 3.0 * floor, 2.6 + 3.0 * floor
        lit = dark and floor == 0
        colour = (230, 190, 110) if lit else (60, 70, 85)
        batches.append(faces(band, colour, BACKGROUND, 2e-3, anchors[::4][keep],
                             0.6 if lit else 0.0))
    return batches


def _trees(road, eye, cell, sign, edge, draws) -> list[Faces]:
    place = road.points(cell + 12.0 * draws[:, 1], sign * (edge + 3.8 + 9.0 * draws[:, 2] ** 2))
    height = 3.5 + 5.0 * draws[:, 3]
    reach = (0.22 + 0.12 * draws[:, 4]) * height
    sight = place - eye
    side = sight / np.maximum(np.linalg.norm(sight, axis=1, keepdims=True), 1.0)
    side = np.stack((-side[:, 1], side[:, 0]), axis=1)     # across the line of sight
    crown = np.stack((40 + 60 * draws[:, 5], 80 + 60 * draws[:, 6], 30 + 25 * draws[:, 7]), axis=1)
    batches = []
    for width, low, high, colour, bump in (
            (0.18 + 0.0 * reach, 0.0 * height, 0.5 * height, np.array((85.0, 62.0, 45.0)), 0.0),
            (reach, 0.4 * height, 0.95 * height, crown, 1e-3),
            (0.65 * reach, 0.3 * height, 1.1 * height, crown * 1.08, 2e-3)):
        corners = np.empty((len(cell), 4, 3))
        left, right = place + side * width[:, None], place - side * width[:, None]
        corners[:, (0, 3), :2], corners[:, (1, 2), :2] = left[:, None], right[:, None]
        corners[:, :2, 2], corners[:, 2:, 2] = low[:, None], high[:, None]
        batches.append(faces(corners, colour, BACKGROUND, bump, place))
    return batches
