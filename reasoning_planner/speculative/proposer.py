"""What a proposer is: the part that drafts tokens for the target to verify.

A gate that skips drafting, a draft model, a corpus: each is a Proposer in its own file, entered
in registry.py. Knows no acceptance and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..datatypes import TokenOrigin
from ..runtimes.base import Step
from .token_tree import EMPTY, TokenTree


@dataclass(frozen=True)
class PromptContext:
    """What is known of a prompt once the target has read it.

    Attributes:
        step: of `Runtime.prefill`; its hidden states are the prompt's.
        input_ids: (n,) int64; None where no proposer asks for it.
        features: visual tokens as `Runtime.encode_images` gives them; None likewise.
    """

    step: Step
    input_ids: np.ndarray | None = None
    features: np.ndarray | None = None


@dataclass(frozen=True)
class DraftContext:
    """What a round starts from.

    Attributes:
        token_ids: committed so far in this text, never empty; the last is not in the cache yet.
        depth: levels of draft tokens that can still be committed; deeper ones are cut off.
        budget: draft tokens the cache has room for; the least likely above it are cut off.
    """

    token_ids: tuple[int, ...]
    depth: int
    budget: int


@dataclass(frozen=True)
class Commit:
    """What a round added.

    Attributes:
        token_ids: accepted draft tokens, then the target's own.
        hidden_states: for each chosen layer, (1 + accepted, hidden) float32, of the tokens that
            went into the cache: the one committed last before, then the accepted ones.
        accepted: how many draft tokens were.
    """

    token_ids: tuple[int, ...]
    hidden_states: tuple[np.ndarray, ...] = ()
    accepted: int = 0


class Proposer(Protocol):
    """Drafts tokens. A PlannerError from any method ends its part in this text, no more.

    Attributes:
        name: for reports.
        origin: of the tokens it proposes itself.
        runs_network: whether a proposal costs the time of a network, `CostCurve.draft_ms`.
    """

    name: str
    origin: TokenOrigin
    runs_network: bool

    def reset(self, prompt: PromptContext) -> None:
        """A new text begins; the one before is complete."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Candidates for what follows; an empty tree asks for a plain target step."""

    def observe(self, commit: Commit) -> None:
        """Tokens were committed: first the prefill's token alone, then once a round."""


class NoProposer:
    """Target-only decoding."""

    name = "none"
    origin = TokenOrigin.DELIBERATIVE
    runs_network = False

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        return EMPTY

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
