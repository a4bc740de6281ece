"""Trajectories as tokens: ego history for the prompt, controls for the discrete future.

Numbers in, vocabulary ids out, and back. Knows the bins, not where in the prompt they go.
All arithmetic is float32 and rounds half to even: a parked car lies exactly between two bins, so
any other rounding gives other tokens.
Source: alpamayo.md, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..datatypes import HISTORY_LENGTH, HORIZON_LENGTH
from ..errors import InputError
from .special_tokens import NUM_FUTURE_BINS, NUM_HISTORY_BINS, SpecialTokens

NUM_HISTORY_TOKENS = HISTORY_LENGTH * 3     # (dx, dy, dz) for each pose, time-major
NUM_FUTURE_TOKENS = HORIZON_LENGTH * 2      # (acceleration, curvature) for each waypoint
DELTA_MIN_M = np.array([-4.0, -4.0, -10.0], dtype=np.float32)
DELTA_MAX_M = np.array([4.0, 4.0, 10.0], dtype=np.float32)
CONTROL_MIN = np.float32(-10.0)             # normalised controls
CONTROL_MAX = np.float32(10.0)
MAX_COORDINATE_M = 1e6                      # beyond this a position is not a position


def _quantise(values: np.ndarray, low: np.ndarray, high: np.ndarray, bins: int) -> np.ndarray:
    """float32 -> bin numbers 0..bins-1, int64: round half to even, then integer, then clamp."""
    scaled = (values - low) / (high - low) * np.float32(bins - 1)
    return np.clip(np.rint(scaled).astype(np.int64), 0, bins - 1)


def _dequantise(indexes: np.ndarray, low: np.ndarray, high: np.ndarray, bins: int) -> np.ndarray:
    return indexes.astype(np.float32) / np.float32(bins - 1) * (high - low) + low


def _require(values: np.ndarray, shape: tuple[int, ...], limit: float, what: str) -> None:
    if values.shape != shape:
        raise InputError(f"{what}: given shape {values.shape}, expected {shape}")
    if not np.all(np.abs(values) <= limit):     # a NaN compares false
        raise InputError(f"{what}: given a value that is not finite or beyond {limit:g}, "
                         f"expected magnitudes up to {limit:g}")


def _bin_numbers(token_ids: np.ndarray, first: int, count: int, length: int) -> np.ndarray:
    indexes = np.asarray(token_ids, dtype=np.int64) - first
    if indexes.shape != (length,):
        raise InputError(f"trajectory tokens: given shape {indexes.shape}, expected ({length},)")
    if indexes.min() < 0 or indexes.max() >= count:
        raise InputError(f"trajectory tokens: given an id outside its bins, "
                         f"expected {first} .. {first + count - 1}")
    return indexes


@dataclass(frozen=True)
class DeltaTrajectoryTokenizer:
    """Ego history as 48 tokens: the steps between poses, 1,000 bins an axis.

    The step before the first pose is measured from the origin, as the model was trained: above
    about 2.7 m/s it saturates at -4 m, and is neither a step nor the mean of the steps.
    """

    special: SpecialTokens

    def encode(self, positions: np.ndarray) -> np.ndarray:
        """Positions of the ego history to vocabulary ids.

        Args:
            positions: (16, 3), metres, ego frame at t0, oldest first.
        Returns:
            (48,) int64: x0, y0, z0, x1, ...
        Raises:
            InputError: wrong shape, or a value that is not a position.
        """
        positions = np.asarray(positions)
        _require(positions, (HISTORY_LENGTH, 3), MAX_COORDINATE_M, "ego history")
        padded = np.zeros((HISTORY_LENGTH + 1, 3), dtype=np.float32)
        padded[1:] = positions
        deltas = padded[1:] - padded[:-1]                                       # (16, 3)
        bins = _quantise(deltas, DELTA_MIN_M, DELTA_MAX_M, NUM_HISTORY_BINS)
        return bins.reshape(-1) + self.special.first_history_bin

    def decode(self, token_ids: np.ndarray) -> np.ndarray:
        """Vocabulary ids to the steps they stand for.

        Args:
            token_ids: (48,) int64.
        Returns:
            (16, 3) float32, metres; row 0 is the saturating step from the origin. The sum of
            rows 0..i is pose i wherever no step saturated.
        Raises:
            InputError: wrong shape, or an id that is no history bin.
        """
        bins = _bin_numbers(token_ids, self.special.first_history_bin, NUM_HISTORY_BINS,
                            NUM_HISTORY_TOKENS)
        return _dequantise(bins.reshape(HISTORY_LENGTH, 3), DELTA_MIN_M, DELTA_MAX_M,
                           NUM_HISTORY_BINS)


@dataclass(frozen=True)
class ControlTokenizer:
    """64 normalised controls as 128 tokens, 3,000 bins: the discrete future of training."""

    special: SpecialTokens

    def encode(self, controls: np.ndarray) -> np.ndarray:
        """Normalised controls to vocabulary ids.

        Args:
            controls: (64, 2), (acceleration, curvature), normalised as the action expert's.
        Returns:
            (128,) int64; values beyond +-10 take the outermost bin.
        Raises:
            InputError: wrong shape, or a value that is not finite.
        """
        controls = np.asarray(controls)
        _require(controls, (HORIZON_LENGTH, 2), MAX_COORDINATE_M, "controls")
        bins = _quantise(controls.astype(np.float32), CONTROL_MIN, CONTROL_MAX, NUM_FUTURE_BINS)
        return bins.reshape(-1) + self.special.first_future_bin

    def decode(self, token_ids: np.ndarray) -> np.ndarray:
        """(128,) vocabulary ids to (64, 2) float32 normalised controls.

        Raises:
            InputError: wrong shape, or an id that is no future bin.
        """
        bins = _bin_numbers(token_ids, self.special.first_future_bin, NUM_FUTURE_BINS,
                            NUM_FUTURE_TOKENS)
        return _dequantise(bins.reshape(HORIZON_LENGTH, 2), CONTROL_MIN, CONTROL_MAX,
                           NUM_FUTURE_BINS)
