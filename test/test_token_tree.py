"""Trees of draft tokens: merging, pruning, order, and what the target is given."""

import numpy as np
import pytest

from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.errors import ModelError
from reasoning_planner.speculative.token_tree import (EMPTY, ROOT, TokenTree, chain,
                                                      likeliest_first, merge, prune, require_sound,
                                                      select, verification_inputs, within)

ROUTINE, CORPUS, TEMPORAL = TokenOrigin.ROUTINE, TokenOrigin.CORPUS, TokenOrigin.TEMPORAL


def tree(token_ids, parents, probs=None, drawn_from=None):
    count = len(token_ids)
    return TokenTree(tuple(token_ids), tuple(parents), (ROUTINE,) * count,
                     tuple(probs or [1.0] * count), tuple(drawn_from or [None] * count))


def paths(of):
    """Every node as the path to it."""
    found = []
    for node, parent in enumerate(of.parents):
        found.append((*(found[parent] if parent != ROOT else ()), of.token_ids[node]))
    return found


def test_a_chain_is_a_tree_without_branches():
    block = chain([5, 6, 7], CORPUS, [0.9, 0.5, 0.5])
    assert block.parents == (ROOT, 0, 1) and block.is_chain and block.depths == (0, 1, 2)
    assert block.path_probs == pytest.approx((0.9, 0.45, 0.225))
    assert verification_inputs(block, 10) == (None, None)
    assert EMPTY.is_chain and len(EMPTY) == 0 and EMPTY.children == {}


def test_a_parent_must_come_first():
    with pytest.raises(AssertionError, match="is not before it"):
        tree([1, 2], [1, ROOT])


def test_merging_shares_beginnings_and_keeps_the_first_proposers_name():
    merged = merge([chain([5, 6, 7], ROUTINE, [0.5, 0.5, 0.5]),
                    chain([5, 6, 8], CORPUS, [0.9, 0.4, 0.3]), chain([9], TEMPORAL, [0.2])])
    assert paths(merged) == [(5,), (5, 6), (5, 6, 7), (5, 6, 8), (9,)]
    assert merged.origins == (ROUTINE, ROUTINE, ROUTINE, CORPUS, TEMPORAL)
    assert merged.probs == (0.9, 0.5, 0.5, 0.3, 0.2)
    assert merge([]) == EMPTY and merge([EMPTY, EMPTY]) == EMPTY


def test_merging_keeps_every_path_and_no_path_twice():
    generator = np.random.default_rng(0)
    for _ in range(200):
        chains = [chain(generator.integers(0, 3, generator.integers(0, 5)), ROUTINE)
                  for _ in range(4)]
        merged = merge(chains)
        expected = {path for one in chains for path in paths(one)}
        assert set(paths(merged)) == expected and len(merged) == len(expected)
        require_sound(merged, 3)


def test_a_drawn_token_is_conditioned_on_not_being_its_earlier_brother():
    q = np.array([0.5, 0.3, 0.2])
    merged = merge([chain([0], CORPUS), chain([1], ROUTINE, drawn_from=[q])])
    assert merged.drawn_from[0] is None
    assert merged.drawn_from[1] == pytest.approx([0.0, 0.6, 0.4])
    first = merge([chain([1], ROUTINE, [0.2], drawn_from=[q]), chain([1], CORPUS, [0.9])])
    assert first.drawn_from[0] is q and first.probs == (0.2,), "its value tells which was drawn"


def test_pruning_keeps_the_likeliest_paths_with_their_parents():
    given = tree([1, 2, 3, 4, 5], [ROOT, ROOT, 0, 1, 3], [0.3, 0.6, 0.9, 0.9, 0.9])
    assert likeliest_first(given) == [1, 3, 4, 0, 2]
    assert paths(prune(given, 3)) == [(2,), (2, 4), (2, 4, 5)]
    assert paths(prune(given, 4)) == [(1,), (2,), (2, 4), (2, 4, 5)]
    assert prune(given, 9) is given and prune(given, 0) == EMPTY == prune(given, -1)


def test_pruning_is_closed_under_parents_whatever_the_probabilities():
    generator = np.random.default_rng(1)
    for _ in range(200):
        count = int(generator.integers(1, 12))
        given = tree(generator.integers(0, 99, count).tolist(),
                     [int(generator.integers(ROOT, node)) for node in range(count)],
                     generator.choice([0.0, 0.5, 1.0], count).tolist())
        budget = int(generator.integers(0, count + 2))
        kept = prune(given, budget)
        assert len(kept) == min(budget, count)
        assert set(paths(kept)) <= set(paths(given))


def test_cutting_to_depth_then_budget():
    given = tree([1, 2, 3, 4], [ROOT, 0, 1, ROOT], [0.9, 0.9, 0.9, 0.1])
    assert paths(within(given, 2, 9)) == [(1,), (1, 2), (4,)]
    assert paths(within(given, 2, 2)) == [(1,), (1, 2)]
    assert within(given, 0, 9) == EMPTY and within(given, 9, 9) is given
    assert paths(select(given, [0, 3])) == [(1,), (4,)]


def test_what_the_target_is_given():
    given = tree([1, 2, 3], [ROOT, ROOT, 0])
    indices, visible = verification_inputs(given, 20)
    assert indices.tolist() == [20, 21, 21, 22]
    assert visible.tolist() == [[True, False, False, False], [True, True, False, False],
                                [True, False, True, False], [True, True, False, True]]


@pytest.mark.parametrize("unsound, complaint", [
    (tree([7], [ROOT]), "id 7, expected 0 .. 6"),
    (tree([-1], [ROOT]), "id -1"),
    (tree([1], [ROOT], [float("nan")]), "probability nan"),
    (tree([1], [ROOT], [1.5]), "probability 1.5"),
    (tree([1, 1], [ROOT, ROOT]), "twice"),
    (tree([1], [ROOT], drawn_from=[np.full(7, np.nan)]), "distribution"),
    (tree([1], [ROOT], drawn_from=[np.full(7, 0.2)]), "distribution"),
    (tree([1], [ROOT], drawn_from=[np.full(6, 1 / 6)]), "distribution"),
    (tree([1], [ROOT], drawn_from=[np.eye(7)[0]]), "can be drawn"),
])
def test_an_unsound_draft_is_refused(unsound, complaint):
    with pytest.raises(ModelError, match=complaint):
        require_sound(unsound, 7)
    require_sound(tree([1, 1], [ROOT, 0], drawn_from=[np.full(7, 1 / 7), None]), 7)
