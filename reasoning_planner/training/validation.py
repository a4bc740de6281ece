"""How right a text and a path are for samples of the world.

Shared by the training log and by evaluate-target. Knows no model and needs no torch.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ..actions.unicycle import controls_to_path, denormalise_controls
from ..datatypes import HORIZON_LENGTH
from ..world.language import MANOEUVRES, manoeuvre_of_text
from .dataset import Shard

MAX_NEW_TOKENS = 32
NOISE_SEED = 0


def path_of(controls: np.ndarray, v0_mps: float) -> np.ndarray:
    """(64, 2) normalised controls -> (64, 2) metres."""
    acceleration, curvature = denormalise_controls(controls)
    return controls_to_path(acceleration, curvature, v0_mps).positions[1:]


def fixed_noise(scale: float = 1.0) -> np.ndarray:
    """(64, 2) float32: the noise that every scene's plan starts from."""
    noise = np.random.default_rng(NOISE_SEED).standard_normal((HORIZON_LENGTH, 2), np.float32)
    return np.float32(scale) * noise


def true_paths(shard: Shard) -> np.ndarray:
    """(N, 64, 2) float64, metres: what the expert drove."""
    return np.stack([path_of(controls, float(v0))
                     for controls, v0 in zip(shard.controls.astype(np.float64), shard.v0_mps)])


def ade(paths: np.ndarray, truth: np.ndarray, horizon_s: float) -> np.ndarray:
    """(N,) mean distance up to the horizon, metres."""
    steps = round(horizon_s * 10)
    return np.linalg.norm(paths[:, :steps] - truth[:, :steps], axis=2).mean(1)


def exact_matches(texts: Sequence[str], shard: Shard) -> np.ndarray:
    """(N,) bool, the text is one of the sample's valid wordings."""
    return np.array([text in valid for text, valid in zip(texts, shard.cocs)])


def right_manoeuvres(texts: Sequence[str], shard: Shard) -> np.ndarray:
    """(N,) bool, the text states the manoeuvre that the expert carries out."""
    return np.array([manoeuvre_of_text(text) == MANOEUVRES[wanted]
                     for text, wanted in zip(texts, shard.manoeuvres)])
