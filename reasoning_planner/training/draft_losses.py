"""The distillation loss of a block draft, and how many of its tokens a target would accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..models.draft import Draft


@dataclass(frozen=True)
class DraftLoss:
    """Attributes:
        cross_entropy, total_variation: weighted means over the drafted places.
        right: share of places, unweighted, whose likeliest token is the target's.
    """

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    right: float


def place_weights(count: int, gamma: float) -> torch.Tensor:
    """exp(-(j - 1) / gamma) for j = 1 .. count: an early mistake costs all that follows."""
    return torch.exp(-torch.arange(count, dtype=torch.float32) / gamma)


def draft_loss(draft: Draft, hidden: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor,
               before: torch.Tensor | None, gamma: float) -> DraftLoss:
    """Distil the target's own greedy text.

    Args:
        hidden: (B, A, M, hidden), from `Draft.block_hidden`.
        labels, valid, before: of `rollouts.Blocks`; `before` None leaves out total variation,
            which is 1 - acceptance of a sampled token.
    """
    weights = place_weights(labels.shape[-1], gamma).expand(labels.shape)[valid]
    logits = draft.text_logits(hidden[valid])                           # (n, text vocabulary)
    columns = draft.text_columns(labels[valid])
    total = weights.sum().clamp_min(1e-9)
    cross_entropy = (weights * F.cross_entropy(logits, columns, reduction="none")).sum() / total
    variation = torch.zeros(())
    if before is not None:
        with torch.no_grad():
            wanted = draft.text_logits(before[valid]).softmax(-1)
        apart = 0.5 * (logits.softmax(-1) - wanted).abs().sum(-1)
        variation = (weights * apart).sum() / total
    right = (logits.argmax(-1) == columns).float().mean() if len(columns) else torch.zeros(())
    return DraftLoss(cross_entropy, variation, float(right))


def accepted_counts(draft: Draft, hidden: torch.Tensor, labels: torch.Tensor,
                    valid: torch.Tensor) -> np.ndarray:
    """(B, A) int64: drafted tokens of each block that greedy verification accepts."""
    chosen = draft.text_logits(hidden).argmax(-1)
    right = (chosen == draft.text_columns(labels)) & valid
    return right.long().cumprod(-1).sum(-1).numpy()


def count_rounds(accepted: Sequence[int], length: int) -> int:
    """Verification passes for one text, its first token given by the prefill.

    Args:
        accepted: for each place in the text, draft tokens accepted behind it.
        length: of the text, stop token included.
    """
    place = rounds = 0
    while place < length - 1:
        place += int(accepted[place]) + 1
        rounds += 1
    return rounds
