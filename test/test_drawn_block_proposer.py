"""Drawn block drafts: drawn as told, told without looking at what was drawn, judged losslessly."""

from types import SimpleNamespace

import numpy as np
import pytest

from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.errors import ConfigError
from reasoning_planner.runtimes.draft_base import DraftBlock
from reasoning_planner.speculative.acceptance import accept_sampled
from reasoning_planner.speculative.block_draft_proposer import BlockDraftConfig
from reasoning_planner.speculative.drawn_block_proposer import DrawnBlockProposer, drawing_probs
from reasoning_planner.speculative.proposer import DraftContext
from reasoning_planner.speculative.token_tree import require_sound

VOCABULARY = 6
PROBS = np.array([[0.6, 0.3], [0.5, 0.1], [0.8, 0.2]])      # of two named tokens at three places
IDS = np.array([[4, 2], [1, 5], [0, 3]])


class OneBlock:
    """A DraftRuntime that always drafts the same."""

    name, config = "fixed", SimpleNamespace(hidden_size=2, feature_layers=(0,))

    def draft(self, last_id, hidden_states):
        return DraftBlock(IDS[:, 0], IDS, np.log(PROBS).astype(np.float32))


def proposer(seed=0, temperature=1.0, tokens=7):
    return DrawnBlockProposer(OneBlock(), VOCABULARY, np.random.default_rng(seed), temperature,
                              BlockDraftConfig(tokens))


def test_probabilities_are_those_of_the_named_tokens():
    block = OneBlock().draft(0, ())
    assert drawing_probs(block, 1.0) == pytest.approx(np.array([[2 / 3, 1 / 3], [5 / 6, 1 / 6],
                                                                [0.8, 0.2]]), abs=1e-6)
    assert drawing_probs(block, 0.5)[0] == pytest.approx([0.8, 0.2], abs=1e-6)    # 4 : 1


def test_tokens_are_drawn_as_told():
    draft, context, counts = proposer(), DraftContext((3,), 9, 9), np.zeros((3, VOCABULARY))
    for _ in range(3000):
        tree = draft.propose(context)
        require_sound(tree, VOCABULARY)
        assert tree.is_chain and tree.origins == (TokenOrigin.ROUTINE,) * 3
        assert tree.probs == pytest.approx((2 / 3, 5 / 6, 0.8), abs=1e-6), "whatever was drawn"
        counts[range(3), tree.token_ids] += 1
    for row, drawn_from in zip(counts / 3000, tree.drawn_from):
        assert row == pytest.approx(drawn_from, abs=0.04)


def test_a_draft_ends_where_there_is_no_more_room():
    for context, count in ((DraftContext((3,), 2, 9), 2), (DraftContext((3,), 9, 1), 1),
                           (DraftContext((3,), 0, 9), 0)):
        assert len(proposer().propose(context)) == count
    assert len(proposer(tokens=1).propose(DraftContext((3,), 9, 9))) == 1


def test_accepted_or_not_the_target_decides_the_distribution():
    target = np.array([[0.1, 0.2, 0.3, 0.1, 0.2, 0.1]] * 2)
    draft, generator = proposer(tokens=1), np.random.default_rng(5)
    counts = np.zeros(VOCABULARY)
    for _ in range(6000):
        tree = draft.propose(DraftContext((3,), 9, 9))
        accepted = accept_sampled(tree, target, generator)
        counts[tree.token_ids[0] if accepted.nodes else accepted.token_id] += 1
    expected = 6000 * target[0]
    assert ((counts - expected) ** 2 / expected).sum() < 20.5      # chi-square, 5 free, p = 0.001


def test_the_temperature_has_a_range():
    with pytest.raises(ConfigError, match="temperature: given 0.0"):
        proposer(temperature=0.0)
