"""The loop of speculative reasoning: propose, verify, accept, commit.

Read `SpeculativeDecoder.write`. The caller has the target read the prompt before and act after.
Every committed token is the target's: a draft only saves passes. Knows no engine, no text and no
way to draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..datatypes import Deadline, Reason, Reasoning, Refusal, TokenOrigin
from ..errors import PlannerError
from ..runtimes.base import Runtime, Step
from .acceptance import Accepted, AcceptanceRule
from .proposer import Commit, DraftContext, NoProposer, PromptContext, Proposer
from .stats import SpeculationStats
from .token_tree import EMPTY, TokenTree, require_sound, verification_inputs, within

CLOSING_TOKENS = 2      # room kept in the cache for the closing pass


@dataclass(frozen=True)
class Generation:
    """A text and how it was written.

    Whatever its end, the cache holds the prompt, these tokens and, where it is not `finished`,
    the stop token behind them: the action expert can be asked.

    Attributes:
        token_ids: stop token included, if it came.
        origins: one a token.
        finished: whether the stop token came.
        stats: of this text.
        refusals: the draft failed; the text has no end, for want of time or of room.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finished: bool
    stats: SpeculationStats
    refusals: tuple[Refusal, ...] = ()

    def reasoning(self, text: str, token_texts: tuple[str, ...]) -> Reasoning:
        """As the planner passes it on.

        Args:
            text: the tokens' text, special tokens left out.
            token_texts: one string a token.
        """
        return Reasoning(text, self.token_ids, token_texts, self.origins, self.stats.passes,
                         self.stats.proposed, self.stats.accepted)


class SpeculativeDecoder:
    """Writes texts on one runtime with one proposer."""

    def __init__(self, runtime: Runtime, proposer: Proposer, stop_id: int, max_new_tokens: int):
        """
        Args:
            stop_id: ends a text.
            max_new_tokens: longest text, the stop token included.
        """
        self._runtime, self._proposer = runtime, proposer
        self._stop_id, self._max_new_tokens = stop_id, max_new_tokens

    def write(self, prompt: PromptContext, rule: AcceptanceRule, deadline: Deadline
              ) -> Generation:
        """Write one text behind the prompt in the runtime's cache.

        Args:
            prompt: its step, with logits if the rule needs them, gives the first token.
            deadline: no round begins after it; the closing pass still runs.
        """
        runtime = self._runtime
        text = _Text(self._stop_id, min(self._max_new_tokens,
                                        runtime.capacity - runtime.length - 1))
        draft = _Draft(self._proposer, prompt, runtime.config.text.vocab_size)
        text.begin(rule.accept(EMPTY, prompt.step))
        draft.observe(Commit(tuple(text.token_ids)))
        while not (text.ended or deadline.passed):
            tree = draft.propose(self._context(text))
            step = self._verify(text.token_ids[-1], tree, rule.needs_logits)
            accepted = text.commit(tree, rule.accept(tree, step))
            self._keep(tree, accepted)
            draft.observe(_commit(text, step, accepted))
        self._close(text)
        return self._generation(text, draft)

    def _context(self, text: _Text) -> DraftContext:
        room = self._runtime.capacity - self._runtime.length - 1 - CLOSING_TOKENS
        return DraftContext(tuple(text.token_ids), text.room - 1, room)

    def _verify(self, last_id: int, tree: TokenTree, logits: bool) -> Step:
        """One target pass over the last committed token and the draft behind it."""
        indices, visible = verification_inputs(tree, self._runtime.length)
        return self._runtime.extend(np.array((last_id, *tree.token_ids)), indices=indices,
                                    visible=visible, logits=logits)

    def _keep(self, tree: TokenTree, accepted: Accepted) -> None:
        """Cut the cache to the last committed token before this round and the accepted ones."""
        start = self._runtime.length - len(tree) - 1
        if tree.is_chain:
            self._runtime.crop(start + 1 + len(accepted.nodes))
        else:
            self._runtime.keep(start, _rows(accepted))

    def _close(self, text: _Text) -> None:
        """Give the expert its keys: all committed tokens, then the stop token, nothing else."""
        unread = text.unread + ([] if text.finished else [self._stop_id])
        if unread:
            self._runtime.extend(np.array(unread))
            text.stats.passes += 1

    def _generation(self, text: _Text, draft: _Draft) -> Generation:
        stats, refusals = text.stats, []
        if draft.refusal is not None:
            stats.draft_failures = 1
            refusals.append(draft.refusal)
        if not text.finished:
            when = "" if text.ended else ", the last before the deadline"
            refusals.append(Refusal(Reason.REASONING_UNFINISHED,
                                    f"no end within {len(text.token_ids)} tokens{when}"))
        stats.texts, stats.committed = 1, len(text.token_ids)
        stats.origins.update(text.origins)
        stats.passes_of_texts[stats.passes] = 1
        return Generation(tuple(text.token_ids), tuple(text.origins), text.finished, stats,
                          tuple(refusals))


@dataclass
class _Text:
    """The text as it grows: the loop's state besides the runtime's cache."""

    stop_id: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    unread: list[int] = field(default_factory=list)     # committed, not in the cache

    @property
    def finished(self) -> bool:
        return self.token_ids[-1] == self.stop_id

    @property
    def room(self) -> int:
        return self.limit - len(self.token_ids)

    @property
    def ended(self) -> bool:
        return self.finished or self.room <= 0

    def begin(self, first: Accepted) -> None:
        """The prefill's token."""
        self._own(first.token_id, TokenOrigin.DELIBERATIVE)

    def commit(self, tree: TokenTree, accepted: Accepted) -> Accepted:
        """Take over what was accepted, up to the stop token; returns what was taken."""
        taken = _up_to_stop(tree, accepted, self.stop_id)
        self.stats.count_round(tree, taken)
        self.token_ids += [tree.token_ids[node] for node in taken.nodes]
        self.origins += [tree.origins[node] for node in taken.nodes]
        self.unread = []
        if not (taken.nodes and self.finished):
            self._own(taken.token_id, _own_origin(tree, taken))
        return taken

    def _own(self, token_id: int, origin: TokenOrigin) -> None:
        self.token_ids.append(token_id)
        self.origins.append(origin)
        self.unread = [token_id]


class _Draft:
    """The proposer until it fails in this text, then none."""

    def __init__(self, proposer: Proposer, prompt: PromptContext, vocab_size: int):
        self.refusal: Refusal | None = None
        self._proposer, self._vocab_size = proposer, vocab_size
        try:
            proposer.reset(prompt)
        except PlannerError as error:
            self._give_up(error)

    def propose(self, context: DraftContext) -> TokenTree:
        try:
            tree = self._proposer.propose(context)
            require_sound(tree, self._vocab_size)
            return within(tree, context.depth, context.budget)
        except PlannerError as error:
            self._give_up(error)
            return EMPTY

    def observe(self, commit: Commit) -> None:
        try:
            self._proposer.observe(commit)
        except PlannerError as error:
            self._give_up(error)

    def _give_up(self, error: PlannerError) -> None:
        self.refusal = Refusal(Reason.DRAFT_FAILED, f"{self._proposer.name}: {error}")
        self._proposer = NoProposer()


def _up_to_stop(tree: TokenTree, accepted: Accepted, stop_id: int) -> Accepted:
    """Nothing behind an accepted stop token counts, the target's own token neither."""
    for depth, node in enumerate(accepted.nodes, start=1):
        if tree.token_ids[node] == stop_id:
            return Accepted(accepted.nodes[:depth], stop_id, False)
    return accepted


def _own_origin(tree: TokenTree, accepted: Accepted) -> TokenOrigin:
    """Whose the target's own token is."""
    if not len(tree):
        return TokenOrigin.DELIBERATIVE
    return TokenOrigin.RECOVERED if accepted.rejected else TokenOrigin.BONUS


def _rows(accepted: Accepted) -> list[int]:
    """Which tokens of the pass stay: the last committed one before it, then the accepted."""
    return [0, *(node + 1 for node in accepted.nodes)]


def _commit(text: _Text, step: Step, accepted: Accepted) -> Commit:
    rows = _rows(accepted)
    count = len(rows) - 1
    return Commit(tuple(text.token_ids[len(text.token_ids) - count - len(text.unread):]),
                  tuple(layer[rows] for layer in step.hidden_states), count)
