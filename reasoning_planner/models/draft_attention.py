"""Where a block draft looks: the share of its attention on each part of the context.

Shares are of softmax probabilities, by layer and head, over the drafted places alone. It knows no
prompt wording and no training.
"""

from __future__ import annotations

import torch

from .draft import Draft
from .draft_positions import PARTS
from .kv_cache import AttentionBackend, PromptKV


class RecordingAttention(AttentionBackend):
    """New tokens after a read-only prefix, as kv_cache.PrefixAttention; adds up the shares."""

    def __init__(self, prompt: PromptKV, parts: torch.Tensor, weights: torch.Tensor):
        """
        Args:
            parts: (n,) int64, index into PARTS of each key: the prefix's, then the new tokens'.
            weights: (B, q) float, of each new token as a query; 0 leaves it out.
        """
        self._prompt = prompt
        self._parts = torch.nn.functional.one_hot(parts, len(PARTS)).float()
        self._weights = weights
        self._sums: dict[int, torch.Tensor] = {}

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """See AttentionBackend."""
        past_k, past_v = self._prompt.layer(layer_index)
        groups = q.shape[1] // k.shape[1]
        k, v = (torch.cat(pair, dim=2).repeat_interleave(groups, dim=1)
                for pair in ((past_k, k), (past_v, v)))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5            # (B, Hq, q, n)
        probs = (scores if mask is None else scores + mask).softmax(-1)
        by_part = probs @ self._parts.to(probs.dtype)                   # (B, Hq, q, parts)
        weighted = by_part * self._weights[:, None, :, None].to(probs.dtype)
        self._sums[layer_index] = weighted.sum(dim=(0, 2))
        return probs @ v

    def shares(self) -> torch.Tensor:
        """(layers, Hq, parts), rows sum to 1, of the pass that was made."""
        sums = torch.stack([self._sums[index] for index in sorted(self._sums)])
        return sums / self._weights.sum()


def key_parts(prompt_parts: torch.Tensor, text_length: int, draft: Draft, blocks: int
              ) -> torch.Tensor:
    """Parts of all keys of a pass over many blocks: the last committed token is text already.

    Args:
        prompt_parts: (L,) int64, from `draft_positions.prompt_parts`.
        text_length: generated tokens in the context.
        blocks: how many blocks stand behind it, one after the other.
    """
    own = torch.full((draft.config.block_length,), PARTS.index("block"))
    own[0] = PARTS.index("coc")
    text = torch.full((text_length,), PARTS.index("coc"))
    return torch.cat((prompt_parts, text, own.repeat(blocks)))
