"""The routine reasoner: a block draft that reads the target's hidden states, FlatRoPE by default.

One pass of the draft a round; its context grows by what the round committed. Knows no engine:
a DraftRuntime is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ConfigError, ModelError
from ..runtimes.draft_base import DraftBlock, DraftRuntime
from .proposer import Commit, DraftContext, PromptContext
from .token_tree import EMPTY, TokenTree, chain


@dataclass(frozen=True)
class BlockDraftConfig:
    """How much of a drafted block is proposed.

    Attributes:
        num_speculative_tokens: most tokens of a draft.
        min_path_prob: a draft ends before the token whose path is less likely than this.
    """

    num_speculative_tokens: int = 7
    min_path_prob: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.num_speculative_tokens <= 256:
            problems.append(f"num_speculative_tokens: given {self.num_speculative_tokens}, "
                            f"expected 1 .. 256")
        if not 0.0 <= self.min_path_prob < 1.0:
            problems.append(f"min_path_prob: given {self.min_path_prob}, expected 0 <= value < 1")
        if problems:
            raise ConfigError(problems)


class BlockDraftProposer:
    """Drafts with a network; see Proposer.

    The target's runtime must give out the hidden states of `draft.config.feature_layers`, and
    the prompt its `input_ids`.
    """

    origin = TokenOrigin.ROUTINE
    runs_network = True

    def __init__(self, draft: DraftRuntime, config: BlockDraftConfig = BlockDraftConfig(),
                 name: str = "flat_rope"):
        self.name = name
        self._draft, self._config = draft, config
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._unread: PromptContext | None = None       # read once a draft is asked for

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer.

        Raises:
            ModelError: the prompt comes without ids.
        """
        if prompt.input_ids is None:
            raise ModelError("draft: given a prompt without input_ids, expected them")
        self._pending, self._unread = [], prompt

    def observe(self, commit: Commit) -> None:
        """See Proposer. The prefill's token comes without hidden states: it is not read yet."""
        if commit.hidden_states:
            self._pending.append(commit.hidden_states)

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer.

        Raises:
            ModelError: the draft's output is not a number, or the prompt came without the hidden
                states it reads.
        """
        count = min(self._config.num_speculative_tokens, context.depth, context.budget)
        if count < 1:
            return EMPTY
        block = self._drafted(context.token_ids[-1])
        probs = np.minimum(np.exp(block.top_log_probs[:count, 0]), 1.0)
        if not np.isfinite(probs).all():
            raise ModelError(f"draft: given probabilities {probs.tolist()}, expected numbers")
        likely = int((np.cumprod(probs) >= self._config.min_path_prob).sum())
        return chain(block.token_ids[:likely].tolist(), self.origin, probs[:likely].tolist())

    def _drafted(self, last_id: int) -> DraftBlock:
        """A pass of the draft, which reads before what it has not read yet."""
        if self._unread is not None:
            assert self._unread.input_ids is not None, "reset refuses it"
            self._draft.begin(self._unread.input_ids, self._unread.step.hidden_states)
            self._unread = None
        block = self._draft.draft(last_id, self._new_hidden_states())
        self._pending = []
        return block

    def _new_hidden_states(self) -> list[np.ndarray]:
        """For each feature layer, of what was committed since the last draft."""
        size, layers = self._draft.config.hidden_size, self._draft.config.feature_layers
        if not self._pending:
            return [np.zeros((0, size), np.float32) for _ in layers]
        return [np.concatenate(parts) for parts in zip(*self._pending)]
