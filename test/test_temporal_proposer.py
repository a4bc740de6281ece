"""The previous text as a draft: where it goes on after the new text has left it."""

import numpy as np
import pytest

from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.errors import ConfigError
from reasoning_planner.runtimes.base import Step
from reasoning_planner.speculative.proposer import Commit, DraftContext, PromptContext
from reasoning_planner.speculative.temporal_proposer import TemporalProposer, resume
from reasoning_planner.speculative.token_tree import require_sound

PROMPT = PromptContext(Step(np.array([0]), None, None, ()))
OLD = (10, 11, 12, 13, 14, 15, 1)


def proposer_after(*texts, block=9):
    """Each text but the last was written whole; the last so far."""
    proposer = TemporalProposer(block)
    for text in texts:
        proposer.reset(PROMPT)
        for token_id in text:
            proposer.observe(Commit((token_id,)))
    return proposer


def proposed(proposer, depth=9, budget=99):
    tree = proposer.propose(DraftContext((0,), depth, budget))
    require_sound(tree, 99)
    assert tree.is_chain and set(tree.origins) <= {TokenOrigin.TEMPORAL}
    return tree.token_ids


@pytest.mark.parametrize("new, expected", [
    ([10], (11, 12, 13, 14, 15, 1)),                # the same so far
    ([10, 11, 12], (13, 14, 15, 1)),
    ([10, 11, 77], (13, 14, 15, 1)),                # a word replaced
    ([10, 11, 77, 78], (14, 15, 1)),                # two
    ([10, 11, 77, 12], (13, 14, 15, 1)),            # a word put in
    ([10, 13], (14, 15, 1)),                        # words left out
    ([10, 77, 78, 79, 13, 14], (15, 1)),
    (OLD, ()),
])
def test_where_it_goes_on(new, expected):
    assert proposed(proposer_after(OLD, new)) == expected


def test_the_longest_common_ending_decides_then_the_nearest():
    previous = (5, 6, 7, 8, 5, 9, 8, 5, 3)
    assert resume(previous, [9, 8, 5], near=3) == (8, 3)
    assert resume(previous, [99, 5], near=4) == (5, 1)
    assert resume(previous, [99, 5], near=0) == (1, 1)
    assert resume(previous, [99], near=4) == (5, 0)
    assert resume((), [99], near=0) == (1, 0)


def test_without_a_previous_text_there_is_no_draft():
    assert proposed(proposer_after([10])) == ()
    assert proposed(proposer_after([], [10])) == ()


def test_a_text_that_was_never_begun_does_not_count():
    assert proposed(proposer_after(OLD, [], [10, 11])) == (12, 13, 14, 15, 1)


def test_the_last_text_alone_counts():
    assert proposed(proposer_after((10, 20, 30), OLD, [10])) == OLD[1:]


def test_the_block_is_as_long_as_asked():
    assert proposed(proposer_after(OLD, [10], block=2)) == (11, 12)
    proposer = proposer_after(OLD, [10])
    assert proposed(proposer, depth=3) == (11, 12, 13) and proposed(proposer, budget=1) == (11,)
    assert proposed(proposer, depth=0) == ()


def test_it_trusts_a_longer_common_ending_more():
    context = DraftContext((0,), 9, 99)
    replaced = proposer_after(OLD, [10, 11, 77]).propose(context).probs
    same = proposer_after(OLD, [10, 11, 12]).propose(context).probs
    assert replaced[0] < same[0] and list(replaced) == sorted(replaced)


def test_tokens_of_one_round_come_together():
    one, by_one = proposer_after(OLD, []), proposer_after(OLD, [10, 77, 12])
    one.observe(Commit((10, 77, 12)))
    assert proposed(one) == proposed(by_one) == (13, 14, 15, 1)


def test_settings_have_ranges():
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        TemporalProposer(0)
