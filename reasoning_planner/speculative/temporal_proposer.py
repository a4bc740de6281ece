"""Drafting from the text of the cycle before: the scene has hardly changed in 100 ms.

Where the new text leaves the old one, the place to go on from is found again by the longest
common ending. Knows token ids alone.
"""

from __future__ import annotations

from typing import Sequence

from ..datatypes import TokenOrigin
from ..errors import ConfigError
from .proposer import Commit, DraftContext, PromptContext
from .token_tree import EMPTY, TokenTree, chain

# Probability of the next token by the length of the common ending, 0: none, one word was
# replaced. First guesses; a MergingProposer puts what it measures in their place.
PROBS = (0.3, 0.6, 0.75, 0.85, 0.9)


def resume(previous: Sequence[int], token_ids: Sequence[int], near: int) -> tuple[int, int]:
    """Where in the previous text to go on.

    Args:
        previous: the text before.
        token_ids: the new text so far, never empty.
        near: place in `previous` that is preferred among equally long endings.
    Returns:
        Place of the next token in `previous`, and the length of the common ending before it;
        without a common ending, the place behind `near`'s word, taken as replaced, and 0.
    """
    found = [(place, _common_ending(previous[:place], token_ids))
             for place in range(1, len(previous) + 1) if previous[place - 1] == token_ids[-1]]
    if not found:
        return near + 1, 0
    return max(found, key=lambda entry: (entry[1], -abs(entry[0] - near - 1)))


def _common_ending(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


class TemporalProposer:
    """Drafts what the previous text said."""

    name = "temporal"
    origin = TokenOrigin.TEMPORAL
    runs_network = False

    def __init__(self, num_speculative_tokens: int = 7):
        if not 1 <= num_speculative_tokens <= 256:
            raise ConfigError([f"num_speculative_tokens: given {num_speculative_tokens}, "
                               f"expected 1 .. 256"])
        self._num_speculative_tokens = num_speculative_tokens
        self._previous: list[int] = []
        self._current: list[int] = []
        self._next = 0          # place in the previous text that the next token is expected at
        self._common = 0        # length of the common ending before it

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer. The text that was observed last becomes the previous one."""
        if self._current:
            self._previous, self._current = self._current, []
        self._next = 0

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
        for token_id in commit.token_ids:
            self._current.append(token_id)
            self._next, self._common = resume(self._previous, self._current, self._next)

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        count = min(self._num_speculative_tokens, context.depth, context.budget)
        token_ids = self._previous[self._next:self._next + count]
        if not token_ids:
            return EMPTY
        common = range(self._common, self._common + len(token_ids))
        return chain(token_ids, self.origin, [PROBS[min(n, len(PROBS) - 1)] for n in common])
