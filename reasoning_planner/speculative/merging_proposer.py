"""Several proposers' candidates in one tree, as large as pays on this engine.

Tree and block are chosen to maximise expected committed tokens per millisecond, from the measured
cost T(k) of a pass and from acceptance probabilities that are corrected by what was accepted. A
network drafts only where it is expected to be worth its own time.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ConfigError
from .cost_curve import CostCurve
from .proposer import Commit, DraftContext, PromptContext, Proposer
from .token_tree import EMPTY, ROOT, TokenTree, merge, prune, require_probs

BINS = 10
PRIOR_WEIGHT = 8.0      # observations that a proposer's own probability is worth
MEMORY = 400.0          # observations of a bin that are remembered
RATE_MEMORY = 0.05      # weight of the newest round in the rate that networks are known by
WORTH = 1.15            # a network's rate over the others' from which it is run
RATE_RETURN = 0.002     # how much of a rate is forgotten in a round without them


class Calibration:
    """How often tokens were accepted to which their proposer gave a probability."""

    def __init__(self) -> None:
        self._seen = [0.0] * BINS
        self._accepted = [0.0] * BINS

    def estimate(self, prob: float) -> float:
        """The probability by what was seen so far; the proposer's own before anything was."""
        place = _bin(prob)
        return ((self._accepted[place] + PRIOR_WEIGHT * prob)
                / (self._seen[place] + PRIOR_WEIGHT))

    def count(self, prob: float, accepted: bool) -> None:
        """The target came by a token of this probability."""
        place = _bin(prob)
        self._seen[place] += 1.0
        self._accepted[place] += accepted
        if self._seen[place] > MEMORY:
            self._seen[place] /= 2.0
            self._accepted[place] /= 2.0

    def learn(self, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Compare a whole proposal, pruned tokens included, with what was committed."""
        place = ROOT
        for token_id in token_ids:
            offered, place = tree.children.get(place, ()), None
            for node in offered:
                hit = tree.token_ids[node] == token_id
                self.count(tree.probs[node], hit)
                place = node if hit else place
            if place is None:
                return


def _bin(prob: float) -> int:
    return min(int(prob * BINS), BINS - 1)


def best_size(path_probs: Sequence[float], round_costs: np.ndarray) -> int:
    """How many draft tokens give the most committed tokens per millisecond.

    Args:
        path_probs: probability that each is accepted with its ancestors, falling.
        round_costs: (m,) milliseconds of a pass over 1 .. m tokens, m > len(path_probs).
    Returns:
        0 .. len(path_probs).
    """
    return int(np.argmax(_rates(path_probs, round_costs)))


def _rates(path_probs: Sequence[float], round_costs: np.ndarray) -> np.ndarray:
    """Expected committed tokens per millisecond with the first 0, 1, .. of the tokens."""
    expected = 1.0 + np.concatenate([[0.0], np.cumsum(path_probs)])
    return expected / round_costs[:len(expected)]


class NetworkGate:
    """Whether a network is worth its time, by the rates of the rounds in which it drafted.

    Rates of first and of later rounds are kept apart: less is left to be written in these. What
    was not tried for long is thought better of again. No clock: the same texts, the same answers.
    """

    def __init__(self, hoped: float):
        """
        Args:
            hoped: rate in committed tokens per millisecond, before any was seen.
        """
        self._hoped = hoped
        self._rates, self._seen = [hoped, hoped], [0, 0]

    def opens(self, rate: float, later: bool) -> bool:
        """
        Args:
            rate: that the others' candidates promise.
        """
        known = self._rates[later]
        if known > WORTH * rate:
            return True
        self._rates[later] += RATE_RETURN * (self._hoped - known)
        return False

    def learn(self, rate: float, later: bool) -> None:
        """A round with the network promised this, its own time counted."""
        self._seen[later] += 1
        weight = max(RATE_MEMORY, 1.0 / self._seen[later])
        self._rates[later] += weight * (rate - self._rates[later])


class MergingProposer:
    """Merges others. A token proposed by several counts as the first one's."""

    name = "merged"
    origin = TokenOrigin.ROUTINE    # its tokens carry their proposers' origins
    runs_network = False

    def __init__(self, proposers: Sequence[Proposer], costs: CostCurve, max_nodes: int = 31):
        """
        Args:
            proposers: the better ones first.
            max_nodes: most draft tokens of one pass, whatever they promise.
        """
        if not proposers or max_nodes < 1:
            raise ConfigError([f"merging: given {len(proposers)} proposers and {max_nodes} nodes, "
                               f"expected one or more of each"])
        self._proposers = tuple(proposers)
        self._calibrations = [Calibration() for _ in proposers]
        self._proposals: list[TokenTree] = [EMPTY] * len(proposers)
        self._round_costs = costs.round_costs(max_nodes + 1)
        self._draft_ms = costs.draft_ms
        self._gate = NetworkGate((max_nodes + 1) / float(self._round_costs[-1] + costs.draft_ms))
        self._rounds = 0

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""
        self._proposals = [EMPTY] * len(self._proposers)
        self._rounds = 0
        for proposer in self._proposers:
            proposer.reset(prompt)

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
        for calibration, proposal in zip(self._calibrations, self._proposals):
            calibration.learn(proposal, commit.token_ids)
        for proposer in self._proposers:
            proposer.observe(commit)

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer."""
        later, self._rounds = self._rounds > 0, self._rounds + 1
        self._proposals = [EMPTY if proposer.runs_network else proposer.propose(context)
                           for proposer in self._proposers]
        tree, rate = self._pruned(context.budget, 0.0)
        networks = [i for i, proposer in enumerate(self._proposers) if proposer.runs_network]
        if networks and self._gate.opens(rate, later):
            for i in networks:
                self._proposals[i] = self._proposers[i].propose(context)
            tree, rate = self._pruned(context.budget, len(networks) * self._draft_ms)
            self._gate.learn(rate, later)
        return tree

    def _pruned(self, budget: int, draft_ms: float) -> tuple[TokenTree, float]:
        """What pays of all proposals, and the tokens per millisecond it promises."""
        tree = merge([_calibrated(proposal, calibration) for proposal, calibration
                      in zip(self._proposals, self._calibrations)])
        most = min(len(self._round_costs) - 1, budget)
        falling = sorted(tree.path_probs, reverse=True)[:max(most, 0)]
        rates = _rates(falling, self._round_costs + draft_ms)
        size = int(np.argmax(rates))
        return prune(tree, size), float(rates[size])


def _calibrated(tree: TokenTree, calibration: Calibration) -> TokenTree:
    require_probs(tree)
    return TokenTree(tree.token_ids, tree.parents, tree.origins,
                     tuple(calibration.estimate(prob) for prob in tree.probs), tree.drawn_from)
