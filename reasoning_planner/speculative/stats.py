"""Counts of speculative decoding: what was proposed, what was accepted, how deep.

Filled by the loop, read by reports. Knows no clock and no text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..datatypes import TokenOrigin
from .acceptance import Accepted
from .token_tree import TokenTree


@dataclass
class SpeculationStats:
    """Counts over one text, or over many once added.

    Attributes:
        texts: texts counted.
        passes: target passes after the prefill, the closing one of a text included.
        drafts: passes that verified draft tokens.
        committed: tokens written, the first of each text included.
        proposed, accepted: draft tokens.
        draft_failures: texts in which the proposer failed.
        origins: committed tokens by origin.
        offered_at_depth, accepted_at_depth: at how many places of this depth the target came by
            and found draft tokens, and took one.
        passes_of_texts: texts by the number of their passes.
    """

    texts: int = 0
    passes: int = 0
    drafts: int = 0
    committed: int = 0
    proposed: int = 0
    accepted: int = 0
    draft_failures: int = 0
    origins: Counter[TokenOrigin] = field(default_factory=Counter)
    offered_at_depth: Counter[int] = field(default_factory=Counter)
    accepted_at_depth: Counter[int] = field(default_factory=Counter)
    passes_of_texts: Counter[int] = field(default_factory=Counter)

    def count_round(self, tree: TokenTree, accepted: Accepted) -> None:
        """One pass over the last committed token and `tree`."""
        depth = len(accepted.nodes)
        self.passes += 1
        self.drafts += len(tree) > 0
        self.proposed += len(tree)
        self.accepted += depth
        self.accepted_at_depth.update(range(depth))
        self.offered_at_depth.update(range(depth + accepted.rejected))

    def add(self, other: SpeculationStats) -> None:
        """Count another's texts too."""
        for name in ("texts", "passes", "drafts", "committed", "proposed", "accepted",
                     "draft_failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("origins", "offered_at_depth", "accepted_at_depth", "passes_of_texts"):
            getattr(self, name).update(getattr(other, name))

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens per target pass after the prefill; 0 before anything was written."""
        return self.committed / self.passes if self.passes else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per verification, bonus included; 1 without drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 without drafts."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth from 0: how often one of the draft tokens there was accepted."""
        return [self.accepted_at_depth[depth] / offered
                for depth, offered in sorted(self.offered_at_depth.items())]
