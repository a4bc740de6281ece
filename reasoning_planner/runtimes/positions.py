"""Positions and rotation angles in numpy, for runtimes without torch: models/rope.py's twin.

Angles are float32; a test holds the two files together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Sequence

import numpy as np


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2 i / head_dim), (head_dim / 2,) float32, radians per position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


def mrope_axes(mrope_section: Sequence[int]) -> np.ndarray:
    """Which axis (0 time, 1 height, 2 width) turns each frequency, (D / 2,) int64."""
    frequency = np.arange(sum(mrope_section))
    axes = np.zeros_like(frequency)
    for axis in (1, 2):
        axes[(frequency % 3 == axis) & (frequency < 3 * mrope_section[axis])] = axis
    return axes


def rope_cos_sin(position_ids: np.ndarray, head_dim: int, theta: float,
                 mrope_section: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the rotation angles.

    Args:
        position_ids: (3, n) for M-RoPE, or (n,) where the three axes are equal.
    Returns:
        Two (n, head_dim / 2) float32.
    """
    positions = position_ids.astype(np.float32)
    if positions.ndim == 2:
        positions = positions[mrope_axes(mrope_section)].T
    else:
        positions = positions[:, None]
    angles = positions * inverse_frequencies(head_dim, theta)
    return np.cos(angles), np.sin(angles)


def mrope_position_ids(is_visual: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Qwen3-VL position ids of a prompt whose images all have one grid.

    Args:
        is_visual: (n,) bool, True at image placeholders.
        grid: rows and columns of visual tokens of an image.
    Returns:
        (3, n) int64 ids, and rope_delta: the token at index i >= n has position i + rope_delta.
    Raises:
        ValueError: a run of placeholders is no whole number of images.
    """
    ids, rope_delta = _mrope_of(np.asarray(is_visual, dtype=bool).tobytes(), tuple(grid))
    return ids.copy(), rope_delta


@lru_cache(maxsize=8)                   # a vehicle's prompts have one layout
def _mrope_of(visual_bytes: bytes, grid: tuple[int, int]) -> tuple[np.ndarray, int]:
    is_visual = np.frombuffer(visual_bytes, dtype=bool)
    rows, columns = grid
    row = np.repeat(np.arange(rows), columns)
    column = np.tile(np.arange(columns), rows)
    ids = np.zeros((3, len(is_visual)), dtype=np.int64)
    index = position = 0
    while index < len(is_visual):
        if not is_visual[index]:
            ids[:, index] = position
            index, position = index + 1, position + 1
            continue
        stop = index + rows * columns
        if not (stop <= len(is_visual) and is_visual[index:stop].all()):
            raise ValueError(f"visual tokens at {index}: given a run that is no multiple of "
                             f"{rows} x {columns}")
        ids[:, index:stop] = position + np.stack((np.zeros_like(row), row, column))
        index, position = stop, position + max(rows, columns)
    return ids, position - len(is_visual)
