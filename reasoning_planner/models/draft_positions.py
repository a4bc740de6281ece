"""Where a prompt's tokens stand for the draft, and which of them it sees: FlatRoPE and rivals.

Numpy alone, for training and every runtime alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import TokenConfig
from .draft_config import DraftConfig

# What a draft's keys are of. "other": text before the history, image delimiters among it; "coc":
# the reasoning so far; "block": the places that are being drafted.
PARTS = ("visual", "history", "instruction", "coc", "block", "other")


@dataclass(frozen=True)
class DraftPositions:
    """Rotary positions of a sequence.

    Attributes:
        prompt: (3, L) int64, time, height and width; all three are equal but for M-RoPE.
        delta: the token at index i >= L stands at i + delta.
    """

    prompt: np.ndarray
    delta: int

    def of(self, start: int, stop: int) -> np.ndarray:
        """(3, stop - start) int64, of the tokens at these indexes."""
        indexes = np.arange(start, stop)
        length = self.prompt.shape[1]
        inside = self.prompt[:, np.minimum(indexes, length - 1)]
        return np.where(indexes < length, inside, indexes + self.delta)


def place_prompt(rope: str, is_visual: np.ndarray, mrope: np.ndarray, rope_delta: int
                 ) -> DraftPositions:
    """Positions by the name of `DraftConfig.rope`.

    flat: the index in the flattened sequence, visual tokens included.
    mrope: the target's own.
    text_only: only text counts; visual tokens stand where the text token before them does.
    local_reset: as flat, but the reasoning starts again at 0.

    Args:
        is_visual: (L,) bool, True at visual tokens.
        mrope: (3, L) int64, the target's positions.
        rope_delta: the target's.
    """
    length = len(is_visual)
    index = np.broadcast_to(np.arange(length), (3, length))
    if rope == "flat":
        return DraftPositions(index, 0)
    if rope == "mrope":
        return DraftPositions(np.asarray(mrope), int(rope_delta))
    if rope == "local_reset":
        return DraftPositions(index, -length)
    assert rope == "text_only", rope
    text = np.maximum(np.cumsum(~is_visual) - 1, 0)
    return DraftPositions(np.broadcast_to(text, (3, length)), -int(is_visual.sum()))


def visual_tokens(input_ids: np.ndarray, tokens: TokenConfig) -> np.ndarray:
    """(L,) bool, True at image and video placeholders."""
    return np.isin(input_ids, (tokens.image_pad_id, tokens.video_pad_id))


def history_tokens(input_ids: np.ndarray, tokens: TokenConfig) -> np.ndarray:
    """(L,) bool, True between the delimiters of the ego history."""
    opened = np.cumsum(input_ids == tokens.traj_history_start_id)
    closed = np.cumsum(input_ids == tokens.traj_history_end_id)
    return (opened > closed) & (input_ids != tokens.traj_history_start_id)


def prompt_parts(input_ids: np.ndarray, tokens: TokenConfig) -> np.ndarray:
    """(L,) int64, index into PARTS of each token of a prompt; what follows the ego history and
    shows nothing is the instruction."""
    parts = np.full(len(input_ids), PARTS.index("other"))
    history = history_tokens(input_ids, tokens)
    parts[history] = PARTS.index("history")
    if history.any():
        parts[np.flatnonzero(history)[-1] + 2:] = PARTS.index("instruction")
    parts[visual_tokens(input_ids, tokens)] = PARTS.index("visual")
    return parts


def kept_in_context(config: DraftConfig, is_visual: np.ndarray, is_history: np.ndarray
                    ) -> np.ndarray:
    """(L,) bool: which prompt tokens may ever be seen; last_k is a matter of the block."""
    if config.context == "no_visual":
        return ~is_visual
    if config.context == "history_masked":
        return ~is_history
    return np.ones(len(is_visual), bool)


def visible_context(config: DraftConfig, kept: np.ndarray, anchors: np.ndarray, length: int
                    ) -> np.ndarray:
    """Which context tokens the blocks see: those before the anchor, by `DraftConfig.context`.

    Args:
        kept: (L,) bool, from `kept_in_context`.
        anchors: (...) int64, index of each block's first token: the last committed one.
        length: context tokens, prompt and generated.
    Returns:
        (..., length) bool.
    """
    indexes = np.arange(length)
    allowed = np.concatenate([kept, np.ones(length - len(kept), bool)])
    visible = (indexes < anchors[..., None]) & allowed
    if config.context == "last_k":
        visible &= indexes >= anchors[..., None] - config.context_k
    return visible
