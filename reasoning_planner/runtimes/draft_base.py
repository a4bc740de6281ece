"""What a draft runtime is: one block draft on one engine, its context inside, numpy in and out.

Where context tokens stand and which of them are kept is worked out here, for all engines alike.
Batch is 1. It knows no proposers and no trees.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Sequence

import numpy as np

from .stored_tensors import tensors_sha256
from ..errors import ConfigError, ModelError
from ..models.config import ModelConfig
from ..models.draft_config import CONFIG_NAME, DraftConfig
from ..models.draft_positions import (DraftPositions, history_tokens, kept_in_context,
                                      place_prompt, visual_tokens)
from .positions import mrope_position_ids

TOP_K = 4
TARGET_PREFIX = "vlm."         # of the names of all tensors of a target but its expert's
GRAPH_NAME, MANIFEST_NAME = "draft.onnx", "draft_ort.json"      # what an export adds


@dataclass(frozen=True)
class DraftBlock:
    """What a draft proposes; m = block_length - 1 tokens, one after the other.

    Attributes:
        token_ids: (m,) int64, the likeliest at each place; never a trajectory bin.
        top_ids: (m, k) int64, best first.
        top_log_probs: (m, k) float32, natural logarithms over the vocabulary without bins.
    """

    token_ids: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray


class DraftRuntime(Protocol):
    """One draft on one engine. Not for use by several threads at once.

    Attributes:
        name: of the engine, for reports.
        config: of the draft; its `feature_layers` are the target's whose outputs it is given.
    """

    name: str
    config: DraftConfig

    def begin(self, input_ids: np.ndarray, hidden_states: Sequence[np.ndarray]) -> None:
        """Forget the context and take a prompt's.

        Args:
            input_ids: (n,) int64.
            hidden_states: for each feature layer, (n, hidden) float32.
        Raises:
            ModelError: arrays do not fit each other or the draft, or not its cache.
        """

    def draft(self, last_id: int, hidden_states: Sequence[np.ndarray]) -> DraftBlock:
        """Take what was committed since, and draft one block behind it.

        Args:
            last_id: the last committed token, which has no hidden state yet.
            hidden_states: for each feature layer, (n, hidden) float32, n >= 0, of the tokens
                committed before it and not given yet.
        Raises:
            ModelError: as for `begin`, or the draft computed something that is not a number.
        """


class Placement:
    """A growing sequence as the draft sees it: positions, and which context tokens are kept."""

    def __init__(self, config: DraftConfig, model: ModelConfig, input_ids: np.ndarray):
        """
        Raises:
            ModelError: the prompt's placeholders are no whole number of images.
        """
        is_visual, is_history = (of(input_ids, model.tokens).tobytes()
                                 for of in (visual_tokens, history_tokens))
        try:
            self._positions, self.kept = _placed(config, model.vision.merged_grid, is_visual,
                                                 is_history)
        except ValueError as error:
            raise ModelError(f"draft prompt: {error}") from error
        self._block_length = config.block_length
        self.length = 0     # tokens so far, those not kept too

    def prompt(self) -> np.ndarray:
        """(3, kept) positions of the prompt's tokens that are context."""
        self.length = len(self.kept)
        return self._positions.of(0, self.length)[:, self.kept]

    def advance(self, count: int) -> np.ndarray:
        """(3, count) positions of tokens that follow."""
        self.length += count
        return self._positions.of(self.length - count, self.length)

    def block(self) -> np.ndarray:
        """(3, block_length) positions of a block behind them."""
        return self._positions.of(self.length, self.length + self._block_length)


@functools.lru_cache(maxsize=4)
def _placed(config: DraftConfig, grid: tuple[int, int], is_visual: bytes, is_history: bytes
            ) -> tuple[DraftPositions, np.ndarray]:
    """Positions, and (L,) bool of tokens kept, of a layout; 0.6 ms on nano, so they are kept too.

    Args:
        is_visual, is_history: (L,) bool each, as bytes.
    """
    visual, history = (np.frombuffer(mask, bool) for mask in (is_visual, is_history))
    mrope, rope_delta = mrope_position_ids(visual, grid)
    return (place_prompt(config.rope, visual, mrope, rope_delta),
            kept_in_context(config, visual, history))


def load_draft_config(folder: Path) -> DraftConfig:
    """Of a release of train-draft.

    Raises:
        ModelError: missing, damaged or refused.
    """
    path = folder / CONFIG_NAME
    try:
        return DraftConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise ModelError(f"{path}: {error}, expected the configuration of a draft that "
                         f"`reasoning-planner train-draft` wrote") from error


def target_sha256(checkpoint: Path) -> str:
    """What binds a draft to its target: images, text, lm_head, all that hidden states come from.

    The action expert is left out: it writes no token, so that it may be trained on.

    Raises:
        ModelError: there are no such weights.
    """
    return tensors_sha256(checkpoint, TARGET_PREFIX)


def require_target_weights(config: DraftConfig, folder: Path, checkpoint: Path) -> None:
    """
    Raises:
        ModelError: the draft of `folder` was trained on another target than the checkpoint's.
    """
    if not config.target_sha256:
        return
    given = target_sha256(checkpoint)
    if given != config.target_sha256:
        raise ModelError(f"{checkpoint}: given tensors {TARGET_PREFIX}* of sha256 {given[:16]}.., "
                         f"expected {config.target_sha256[:16]}.., which the draft {folder} was "
                         f"trained on")


def side_by_side(config: DraftConfig, hidden_states: Sequence[np.ndarray]) -> np.ndarray:
    """(n, K * hidden) float32 of K arrays (n, hidden).

    Raises:
        ModelError: not one array for each feature layer.
    """
    shapes = [np.shape(layer) for layer in hidden_states]
    if len(shapes) != len(config.feature_layers) or len(set(shapes)) != 1 \
            or shapes[0][1:] != (config.hidden_size,):
        raise ModelError(f"draft: given hidden states {shapes}, expected one array (n, "
                         f"{config.hidden_size}) of each of the layers {config.feature_layers}: "
                         f"create the target's runtime with hidden_layers so")
    return np.concatenate(hidden_states, axis=1, dtype=np.float32)


def block_of(logits: np.ndarray, top_k: int = TOP_K) -> DraftBlock:
    """The likeliest tokens.

    Args:
        logits: (m, V) float32, bins at -inf.
    Raises:
        ModelError: a row is not a number.
    """
    peak = logits.max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        raise ModelError(f"draft: {int((~np.isfinite(peak)).sum())} of {len(logits)} rows of "
                         f"logits are not finite")
    top = np.argpartition(-logits, top_k, axis=1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(logits, top, 1), axis=1, kind="stable")
    top = np.take_along_axis(top, order, 1)
    total = np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)) + peak
    log_probs = (np.take_along_axis(logits, top, 1) - total).astype(np.float32)
    return DraftBlock(logits.argmax(axis=1), top, log_probs)
