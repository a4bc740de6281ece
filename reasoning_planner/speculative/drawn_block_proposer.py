"""The routine reasoner that draws its tokens instead of choosing them: what sampling can judge.

A drawn token is accepted with min(1, p / q), so a draft that spreads as the target does is
accepted more often than its likeliest token alone; and only a drawn token has an entropy, which
entropy-aware acceptance asks for.
"""

from __future__ import annotations

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ConfigError
from ..runtimes.draft_base import DraftBlock, DraftRuntime
from .acceptance import draw
from .block_draft_proposer import BlockDraftConfig, BlockDraftProposer
from .proposer import DraftContext
from .token_tree import EMPTY, TokenTree, chain


class DrawnBlockProposer(BlockDraftProposer):
    """Draws among the likeliest tokens that the draft names; see Proposer."""

    def __init__(self, draft: DraftRuntime, vocab_size: int, generator: np.random.Generator,
                 temperature: float = 1.0, config: BlockDraftConfig = BlockDraftConfig()):
        """
        Args:
            vocab_size: the target's, V.
            generator: source of randomness.
            temperature: of the draft's own distribution.
        """
        super().__init__(draft, config, "flat_rope_drawn")
        if not 0.01 <= temperature <= 10.0:
            raise ConfigError([f"temperature: given {temperature!r}, expected 0.01 .. 10"])
        self._vocab_size, self._generator = vocab_size, generator
        self._temperature = temperature

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer. How likely a token is accepted is told without looking which it is."""
        count = min(self._config.num_speculative_tokens, context.depth, context.budget)
        if count < 1:
            return EMPTY
        block = self._drafted(context.token_ids[-1])
        q = drawing_probs(block, self._temperature)[:count]                 # (count, k)
        rows = [_spread(probs, ids, self._vocab_size) for probs, ids in zip(q, block.top_ids)]
        token_ids = [draw(row, self._generator) for row in rows]
        return chain(token_ids, TokenOrigin.ROUTINE, q.max(axis=1).tolist(), rows)


def drawing_probs(block: DraftBlock, temperature: float) -> np.ndarray:
    """(m, k) float64, what each of the named tokens is drawn with; rows sum to 1."""
    scaled = block.top_log_probs.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True)


def _spread(probs: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """(V,) float64 of k probabilities."""
    row = np.zeros(vocab_size)
    row[ids] = probs
    return row
