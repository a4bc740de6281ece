"""Training samples of the synthetic world: images, ego history, controls and causal text, by seed.

One seed, one sample, whatever the process, the order or any global random state. It joins scene,
expert, language and renderer, and knows no model: normalising and tokenising belong to whoever
trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..actions.unicycle import controls_to_path
from ..datatypes import HISTORY_LENGTH
from .elements import VEHICLE_SIZES, WEATHERS, Scene
from .expert import HISTORY_STEPS, Drive, drive_scene
from .language import manoeuvre_of, sample_sentence, valid_sentences
from .render import render_scene
from .scene import KINDS, sample_scene

_AGENTS = tuple(VEHICLE_SIZES)
LABEL_NAMES = (
    *(f"kind_{kind}" for kind in KINDS),
    *(f"weather_{weather}" for weather in WEATHERS),
    *(f"agent_{agent}" for agent in _AGENTS),
    "light_red", "light_green", "stop_sign", "side_left", "side_right", "brake_lights",
    "distance_50m", "lateral_5m", "closing_10mps", "bend_0p05", "offset_1m", "speed_ratio_end",
)


@dataclass(frozen=True)
class WorldSample:
    """One sample anchored at t0, in the ego frame at t0 (x forward, y left, z up).

    Attributes:
        seed, kind, category, manoeuvre, weather: what it is; see scene.py and language.py.
        images: (4, 4, H, W, 3) uint8 RGB: camera (slots 0, 1, 2, 6), then time t0-0.3 .. t0 s.
        history_positions: (16, 3) float64, metres, t0-1.5 .. t0 s; the last is 0.
        history_rotations: (16, 3, 3) float64; the last is the identity.
        v0_mps: speed at t0.
        future_positions: (64, 2) float64, metres, t0+0.1 .. t0+6.4 s.
        future_yaw: (64,) float64, rad.
        controls: (64, 2) float64, acceleration m/s^2 and curvature 1/m; they integrate to the
            future exactly.
        coc: one wording, drawn by the seed.
        valid_cocs: every wording that is right, the preferred one first.
        labels: (len(LABEL_NAMES),) float32, what the scene privately knows, for pretraining.
    """

    seed: int
    kind: str
    category: str
    manoeuvre: str
    weather: str
    images: np.ndarray
    history_positions: np.ndarray
    history_rotations: np.ndarray
    v0_mps: float
    future_positions: np.ndarray
    future_yaw: np.ndarray
    controls: np.ndarray
    coc: str
    valid_cocs: tuple[str, ...]
    labels: np.ndarray


def ego_history(drive: Drive, anchor: int) -> tuple[np.ndarray, np.ndarray]:
    """(16, 3) positions and (16, 3, 3) rotations that end at step `anchor`, in its ego frame."""
    steps = slice(anchor - HISTORY_LENGTH + 1, anchor + 1)
    turn = drive.yaw_rad[anchor]
    moved = drive.positions[steps] - drive.positions[anchor]
    positions = np.zeros((HISTORY_LENGTH, 3))
    positions[:, 0] = np.cos(turn) * moved[:, 0] + np.sin(turn) * moved[:, 1]
    positions[:, 1] = np.cos(turn) * moved[:, 1] - np.sin(turn) * moved[:, 0]
    yaw = drive.yaw_rad[steps] - turn
    rotations = np.zeros((HISTORY_LENGTH, 3, 3))
    rotations[:, 0, 0] = rotations[:, 1, 1] = np.cos(yaw)
    rotations[:, 1, 0], rotations[:, 0, 1] = np.sin(yaw), -np.sin(yaw)
    rotations[:, 2, 2] = 1.0
    return positions, rotations


def privileged_labels(scene: Scene, drive: Drive) -> np.ndarray:
    """(len(LABEL_NAMES),) float32: one-hots, then scaled numbers; see LABEL_NAMES."""
    facts, values = scene.facts, np.zeros(len(LABEL_NAMES), np.float32)
    position = LABEL_NAMES.index
    values[position(f"kind_{scene.kind}")] = 1.0
    values[position(f"weather_{scene.weather}")] = 1.0
    if facts.agent:
        values[position(f"agent_{facts.agent}")] = 1.0
    v0 = float(drive.speed_mps[HISTORY_STEPS])
    closing, braking = 0.0, False
    if scene.decisive >= 0:
        agent = scene.agents[scene.decisive]
        closing, braking = v0 - agent.along(0.0)[1], agent.braking(0.0)
    ahead = np.interp(np.linspace(5.0, 35.0, 7), np.arange(len(scene.road.x)) - 60.0,
                      scene.road.curvature)
    offsets = [offset.offset_m for offset in scene.demands.offsets]
    light = scene.signals[0].state if scene.signals else ""
    tail = (light == "red", light == "green", scene.kind == "stop_sign", facts.side == "left",
            facts.side == "right", braking, facts.distance_m / 50.0, facts.lateral_m / 5.0,
            closing / 10.0, ahead[np.argmax(np.abs(ahead))] / 0.05, sum(offsets),
            min(drive.speed_mps[-1] / max(v0, 2.0), 2.0))
    values[-len(tail):] = tail
    return values


def make_sample(seed: int, kind: str | None = None, size: tuple[int, int] = (64, 128)
                ) -> WorldSample:
    """Draw, drive, describe and render one scene.

    Args:
        seed: 0 or more; the same arguments give the same bytes.
        kind: one of scene.KINDS; None draws it.
        size: (H, W) of the images, multiples of 32.
    Raises:
        ValueError: an unknown kind or a size that is no multiple of 32.
    """
    if size[0] % 32 or size[1] % 32 or min(size) < 32:
        raise ValueError(f"size: given {size}, expected multiples of 32")
    scene = sample_scene(seed, kind)
    drive = drive_scene(scene)
    images = render_scene(scene, drive, HISTORY_STEPS, size)
    history_positions, history_rotations = ego_history(drive, HISTORY_STEPS)
    controls = drive.controls[HISTORY_STEPS:]
    v0 = float(drive.speed_mps[HISTORY_STEPS])
    future = controls_to_path(controls[:, 0], controls[:, 1], v0)
    return WorldSample(
        seed, scene.kind, scene.category, manoeuvre_of(scene.kind, scene.facts), scene.weather,
        images, history_positions, history_rotations, v0, future.positions[1:],
        future.yaw_rad[1:], controls, sample_sentence(scene),
        valid_sentences(scene.kind, scene.facts), privileged_labels(scene, drive))
