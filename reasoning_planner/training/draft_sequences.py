"""A draft's passes over what a target wrote: for its loss, its acceptance and its attention.

Many blocks of a text in one pass, each seeing no more than it would while drafting. It knows no
optimiser and no files.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np
import torch

from ..models import rope
from ..models.draft import Draft, LayerKV, blocks_mask
from ..models.draft_attention import RecordingAttention, key_parts
from ..models.draft_positions import (history_tokens, kept_in_context, place_prompt,
                                      prompt_parts, visible_context, visual_tokens)
from ..models.target import Target
from .draft_losses import accepted_counts, count_rounds
from .rollouts import Blocks, Rollouts, RolloutStore

ROWS = 8                # texts of a pass
SHORT_PASS = 8          # tokens of a pass that published acceptance lengths are given for


class Sequences:
    """Positions and visibility that all prompts of one layout share, as a draft has them."""

    def __init__(self, draft: Draft, target: Target, input_ids: np.ndarray):
        config, model = draft.config, target.config
        is_visual = visual_tokens(input_ids, model.tokens)
        count = int(is_visual.sum()) // model.vision.tokens_per_image
        mrope, delta = rope.mrope_position_ids(torch.from_numpy(is_visual)[None],
                                               [model.vision.merged_grid] * count)
        self.draft = draft
        self._positions = place_prompt(config.rope, is_visual, mrope[:, 0].numpy(), int(delta))
        self._kept = kept_in_context(config, is_visual, history_tokens(input_ids, model.tokens))
        self._parts = prompt_parts(input_ids, model.tokens)

    def hidden(self, blocks: Blocks) -> torch.Tensor:
        """(B, A, M, hidden): the draft over many blocks in one differentiable pass."""
        return self._pass(blocks, self._context(blocks))

    @torch.no_grad()
    def attention(self, blocks: Blocks) -> tuple[np.ndarray, int]:
        """Where the drafted places look, those behind a stop token left out.

        Returns:
            (layers, heads, PARTS) float64 shares, and how many places there were.
        """
        draft, text = self.draft, blocks.states.shape[1] - len(self._parts)
        keys = key_parts(torch.from_numpy(self._parts), text, draft, blocks.anchors.shape[1])
        counted = torch.nn.functional.pad(blocks.valid, (1, 0))         # the first is committed
        recording = RecordingAttention(self._context(blocks), keys, counted.flatten(1).float())
        self._pass(blocks, recording)
        return recording.shares().double().numpy(), int(counted.sum())

    def _context(self, blocks: Blocks) -> LayerKV:
        places = torch.from_numpy(self._positions.of(0, blocks.states.shape[1]))
        return self.draft.context_kv(blocks.states, *self.draft.cos_sin(places[:, None]))

    def _pass(self, blocks: Blocks, context: LayerKV | RecordingAttention) -> torch.Tensor:
        draft, length = self.draft, blocks.states.shape[1]
        steps = blocks.anchors[..., None] + np.arange(draft.config.block_length)
        inside = torch.from_numpy(steps.reshape(len(steps), -1) + self._positions.delta)
        visible = visible_context(draft.config, self._kept, blocks.anchors, length)
        mask = blocks_mask(torch.from_numpy(visible), draft.config.block_length)
        return draft.block_hidden(blocks.last_ids, context, *draft.cos_sin(inside), mask)


def all_blocks(rollouts: Rollouts, block_length: int) -> Iterator[Blocks]:
    """Blocks at every place of every text, some texts at a time."""
    store = RolloutStore([rollouts])
    last = max(int(np.max(rollouts.lengths)) - 1, 1)
    for begin in range(0, len(store), ROWS):
        indexes = range(begin, min(begin + ROWS, len(store)))
        yield store.blocks(indexes, np.tile(np.arange(last), (len(indexes), 1)), block_length - 1)


@torch.no_grad()
def accepted_behind(sequences: Sequences, rollouts: Rollouts) -> np.ndarray:
    """(N, T - 1) int64: draft tokens that are accepted behind each place of each text."""
    draft = sequences.draft
    return np.concatenate([
        accepted_counts(draft, sequences.hidden(blocks), blocks.labels, blocks.valid)
        for blocks in all_blocks(rollouts, draft.config.block_length)])


def passes_of(accepted: np.ndarray, lengths: np.ndarray, pass_length: int) -> np.ndarray:
    """(N,) int64: verification passes of each text.

    Args:
        accepted: from `accepted_behind`.
        lengths: (N,), stop token included.
        pass_length: tokens of a pass: the last committed one and the drafted ones.
    """
    return np.array([count_rounds(np.minimum(row, pass_length - 1), int(length))
                     for row, length in zip(accepted, lengths)])


def held_out_figures(sequences: Sequences, rollouts: Rollouts) -> dict[str, float]:
    """Acceptance on texts, greedy.

    Returns:
        tokens_per_pass: tau, the bonus token counted, the prefill's token not; with whole blocks,
        and tokens_per_pass_8 with passes of at most 8 tokens;
        rounds, rounds_p95: verification passes a text, whole blocks; first_right: share of first
        drafted tokens that are accepted, over all places of all texts.
    """
    lengths = np.asarray(rollouts.lengths)
    accepted = accepted_behind(sequences, rollouts)
    passes, short = (passes_of(accepted, lengths, most)
                     for most in (sequences.draft.config.block_length, SHORT_PASS))
    tokens = int((lengths - 1).sum())
    first = sum(int((row[:length - 1] > 0).sum()) for row, length in zip(accepted, lengths))
    return {"tokens_per_pass": tokens / max(int(passes.sum()), 1),
            f"tokens_per_pass_{SHORT_PASS}": tokens / max(int(short.sum()), 1),
            "rounds": float(passes.mean()), "rounds_p95": float(np.quantile(passes, 0.95)),
            "first_right": first / max(tokens, 1)}


def attention_shares(sequences: Sequences, rollouts: Rollouts) -> np.ndarray:
    """(layers, heads, PARTS) float64: where the drafted places of all texts look."""
    found = [sequences.attention(blocks)
             for blocks in all_blocks(rollouts, sequences.draft.config.block_length)]
    total = sum(count for _, count in found)
    return sum(shares * count for shares, count in found) / total
