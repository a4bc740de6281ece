"""Vehicles and people of the synthetic world as faces, at several moments at once.

Knows scripts and paints of agents, not the road's surface and no camera; see mesh.py for faces.
"""

from __future__ import annotations

import functools

import numpy as np

from .elements import VEHICLE_SIZES, Agent, Scene
from .mesh import OBJECTS, Faces, Look

_BODY, _GLASS, _DARK, _REAR_LAMP, _HEAD_LAMP, _LEFT_BLINKER, _RIGHT_BLINKER, _TRIM = range(8)
PAINT = {
    "white": (235, 235, 230), "black": (38, 38, 42), "grey": (140, 144, 150),
    "red": (190, 35, 35), "blue": (40, 75, 185), "green": (40, 120, 60), "yellow": (225, 190, 40),
}


def _box(x0, x1, y0, y1, z0, z1, role: int, place: float) -> list[tuple]:
    """Outer faces of a box as (corners, role, shade, place)."""
    corners = {
        "rear": ((x0, y1, z0), (x0, y0, z0), (x0, y0, z1), (x0, y1, z1)),
        "front": ((x1, y0, z0), (x1, y1, z0), (x1, y1, z1), (x1, y0, z1)),
        "right": ((x0, y0, z0), (x1, y0, z0), (x1, y0, z1), (x0, y0, z1)),
        "left": ((x1, y1, z0), (x0, y1, z0), (x0, y1, z1), (x1, y1, z1)),
        "top": ((x0, y0, z1), (x1, y0, z1), (x1, y1, z1), (x0, y1, z1)),
    }
    shades = {"rear": 0.82, "front": 0.9, "right": 0.7, "left": 0.95, "top": 1.12}
    return [(corners[name], role, shades[name], place) for name in corners]


def _face_x(x, y0, y1, z0, z1, role, place, front: bool) -> tuple:
    """One face across the vehicle at x, looking to the front or the rear."""
    if front:
        return ((x, y0, z0), (x, y1, z0), (x, y1, z1), (x, y0, z1)), role, 1.0, place
    return ((x, y1, z0), (x, y0, z0), (x, y0, z1), (x, y1, z1)), role, 1.0, place


@functools.cache
def _vehicle_template(agent: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Corners (N, 4, 3) about the vehicle's centre, roles, shades and places of its faces."""
    length, width, height = VEHICLE_SIZES[agent]
    a, b = 0.5 * length, 0.5 * width
    if agent == "car":
        parts = _box(-a, a, -b, b, 0.25, 0.9, _BODY, 0.0)
        parts += _box(-a + 0.35, a - 1.3, -b + 0.12, b - 0.12, 0.9, height, _GLASS, 1e-3)
        parts[-1] = (parts[-1][0], _BODY, 1.1, 1e-3)
        lamp_z, lamp_top = 0.5, 0.82
    elif agent == "van":
        parts = _box(-a, a - 0.9, -b, b, 0.3, height, _BODY, 0.0)
        parts += _box(a - 0.9, a, -b, b, 0.3, 1.2, _BODY, 1e-3)
        parts.append(_face_x(-a - 0.01, -b + 0.25, b - 0.25, 1.25, 2.0, _GLASS, 2e-3, False))
        parts.append(_face_x(a - 0.89, -b + 0.2, b - 0.2, 1.25, 2.05, _GLASS, 2e-3, True))
        lamp_z, lamp_top = 0.6, 1.05
    else:
        parts = _box(-a, a - (1.9 if agent == "truck" else 0.0), -b, b, 0.45, height, _BODY, 0.0)
        if agent == "truck":
            parts += _box(a - 1.8, a, -b + 0.1, b - 0.1, 0.45, 2.5, _TRIM, 1e-3)
            parts.append(_face_x(a + 0.01, -b + 0.2, b - 0.2, 1.4, 2.3, _GLASS, 2e-3, True))
            parts.append(_face_x(-a - 0.01, -0.06, 0.06, 0.5, height - 0.1, _DARK, 2e-3, False))
        else:
            for y, front in ((-b - 0.01, False), (b + 0.01, True)):
                x0, x1 = (-a + 0.3, a - 0.3) if not front else (a - 0.3, -a + 0.3)
                parts.append((((x0, y, 1.5), (x1, y, 1.5), (x1, y, 2.4), (x0, y, 2.4)), _GLASS,
                              1.0, 2e-3))
            parts.append(_face_x(-a - 0.01, -b + 0.2, b - 0.2, 1.6, 2.6, _GLASS, 2e-3, False))
            parts.append(_face_x(a + 0.01, -b + 0.15, b - 0.15, 1.2, 2.7, _GLASS, 2e-3, True))
        lamp_z, lamp_top = 0.75, 1.2
    lamp = 0.24 * width
    for y0, y1 in ((-b + 0.03, -b + lamp), (b - lamp, b - 0.03)):
        parts.append(_face_x(-a - 0.02, y0, y1, lamp_z, lamp_top, _REAR_LAMP, 3e-3, False))
        parts.append(_face_x(a + 0.02, y0, y1, lamp_z, lamp_top - 0.04, _HEAD_LAMP, 3e-3, True))
    if agent in ("car", "van"):
        top = 1.0 if agent == "car" else height - 0.22
        parts.append(_face_x(-a + (0.33 if agent == "car" else -0.02), -0.4, 0.4, top, top + 0.16,
                             _REAR_LAMP, 3e-3, False))
    for role, y in ((_LEFT_BLINKER, b), (_RIGHT_BLINKER, -b)):
        inner = y - 0.34 * np.sign(y)
        low, high = min(inner, y), max(inner, y)
        z = (lamp_z - 0.15, lamp_z + 0.14)
        parts.append(_face_x(-a - 0.03, low, high, *z, role, 4e-3, False))
        parts.append(_face_x(a + 0.03, low, high, *z, role, 4e-3, True))
    for x in (-a + 0.2 * length, a - 0.2 * length):
        for y in (-b - 0.02, b + 0.02):
            x0, x1 = (x - 0.36, x + 0.36) if y < 0 else (x + 0.36, x - 0.36)
            parts.append((((x0, y, 0.0), (x1, y, 0.0), (x1, y, 0.66), (x0, y, 0.66)), _DARK, 1.0,
                          2e-3))
    parts.append(_face_x(-a, -b + 0.1, b - 0.1, 0.02, 0.3, _DARK, 0.0, False))
    parts.append(_face_x(a, -b + 0.1, b - 0.1, 0.02, 0.3, _DARK, 0.0, True))
    corners, roles, shades, places = zip(*parts)
    return (np.array(corners, np.float64), np.array(roles), np.array(shades),
            np.array(places, np.float32))


def agent_faces(scene: Scene, index: int, agent: Agent, look: Look,
                times: np.ndarray, eye: np.ndarray) -> Faces:
    """One agent at each of the times (F,); `eye` (2,) is where people and trees are turned to."""
    s = np.array([agent.along(t)[0] for t in times])
    moves = [agent.across(t) for t in times]
    d = np.array([move[0] for move in moves])
    x, y, yaw = scene.road.poses(s)
    centre = np.stack((x - d * np.sin(yaw), y + d * np.cos(yaw)), axis=1)       # (F, 2)
    tint = look.agent_tints[index % len(look.agent_tints)]
    if agent.agent == "pedestrian":
        return _pedestrian(agent, centre, moves, times, tint, eye)
    speed = np.array([max(abs(agent.along(t)[1]), 1.0) for t in times])
    drift = np.clip(np.array([move[1] for move in moves]) / speed * 1.4, -0.3, 0.3)
    yaw = yaw + np.pi + drift if agent.faces_back else yaw + drift
    corners, roles, shades, places = _vehicle_template(agent.agent)
    cos, sin = np.cos(yaw)[:, None, None], np.sin(yaw)[:, None, None]
    world = np.empty((len(times),) + corners.shape, np.float32)
    world[..., 0] = centre[:, 0, None, None] + cos * corners[..., 0] - sin * corners[..., 1]
    world[..., 1] = centre[:, 1, None, None] + sin * corners[..., 0] + cos * corners[..., 1]
    world[..., 2] = corners[..., 2]
    colours = np.empty((len(times), len(corners), 3), np.float32)
    glow = np.zeros((len(times), len(corners)), np.float32)
    for i, t in enumerate(times):
        palette, shine = _vehicle_palette(agent, t, tint, scene.weather == "night")
        colours[i] = palette[roles] * shades[:, None]
        glow[i] = shine[roles]
    return Faces(world, colours, OBJECTS * 1e4 + places,
                 np.repeat(centre[:, None].astype(np.float32), len(corners), axis=1), glow,
                 np.ones(len(corners), bool))


def _vehicle_palette(agent: Agent, t: float, tint: np.ndarray, dark: bool
                     ) -> tuple[np.ndarray, np.ndarray]:
    """Colours (8, 3) and glow (8,) of the vehicle's roles at time t."""
    paint = np.array(PAINT[agent.colour]) * tint
    palette = np.array((paint, (52, 62, 74), (24, 24, 26), (118, 16, 16), (200, 200, 195), paint,
                        paint, (175, 175, 178)), np.float32)
    shine = np.zeros(8, np.float32)
    if agent.braking(t):
        palette[_REAR_LAMP], shine[_REAR_LAMP] = (255, 40, 25), 1.0
    elif dark:
        palette[_REAR_LAMP], shine[_REAR_LAMP] = (130, 8, 8), 0.9
    if dark or agent.faces_back and agent.speed_mps:
        palette[_HEAD_LAMP], shine[_HEAD_LAMP] = (255, 250, 220), 1.0
    if agent.blinker:
        role = _LEFT_BLINKER if agent.blinker > 0 else _RIGHT_BLINKER
        if (t + 0.45) % 0.8 < 0.6:
            palette[role], shine[role] = (255, 165, 20), 1.0
    return palette, shine


def _pedestrian(agent: Agent, centre: np.ndarray, moves: list[tuple[float, float]],
                times: np.ndarray, tint: np.ndarray, eye: np.ndarray) -> Faces:
    """A person turned to the eye: legs that stride when walking, torso, head and hair."""
    towards = centre[-1] - eye
    side = np.array((-towards[1], towards[0])) / max(float(np.hypot(*towards)), 0.1)
    stride = np.array([0.32 * np.sin(7.0 * t) * (abs(move[1]) > 0.1)
                       for t, move in zip(times, moves)])
    walking = np.array([abs(move[1]) > 0.1 for move in moves])
    lean = np.where(walking, 0.24, 0.13)
    n = len(times)
    corners = np.empty((n, 5, 4, 3), np.float32)
    spec = (            # foot offset, top offset, half width, low, high
        (-lean - stride, -0.1, 0.12, 0.0, 0.95), (lean + stride, 0.1, 0.12, 0.0, 0.95),
        (0.0, 0.0, 0.36, 0.85, 1.55), (0.0, 0.0, 0.16, 1.52, 1.95), (0.0, 0.0, 0.18, 1.82, 1.98))
    for i, (foot, top, half, low, high) in enumerate(spec):
        for j, (offset, across, z) in enumerate(((foot, half, low), (foot, -half, low),
                                                 (top, -half, high), (top, half, high))):
            corners[:, i, j, :2] = centre + side * (offset + np.full(n, across))[:, None]
            corners[:, i, j, 2] = z
    shirt = np.array(PAINT[agent.colour]) * tint
    colours = np.array(((40, 42, 60), (48, 50, 70), shirt, (225, 175, 140), (60, 40, 30)),
                       np.float32)
    return Faces(corners, np.broadcast_to(colours, (n, 5, 3)),
                 (OBJECTS * 1e4 + np.array((0, 0, 1, 2, 3)) * 1e-3).astype(np.float32),
                 np.repeat(centre[:, None].astype(np.float32), 5, axis=1),
                 np.zeros((n, 5), np.float32), np.zeros(5, bool))
