"""Acceptance rules: tables of draft, target and what is accepted; then distributions."""

import functools

import numpy as np
import pytest

from reasoning_planner.datatypes import TokenOrigin
from reasoning_planner.errors import ConfigError, ModelError
from reasoning_planner.runtimes.base import Step
from reasoning_planner.speculative.acceptance import (PARTIAL_SORT, Accepted, GreedyRule,
                                                      ProcessedRows, SamplingConfig, SamplingRule,
                                                      accept_greedily, accept_sampled, draw,
                                                      processed_probs, rejection_sample, residual)
from reasoning_planner.speculative.easd import EasdConfig, EasdRule, both_unsure, entropy
from reasoning_planner.speculative.token_tree import EMPTY, ROOT, TokenTree, chain, merge

ROUTINE = TokenOrigin.ROUTINE


def tree(token_ids, parents, drawn_from=None):
    count = len(token_ids)
    return TokenTree(tuple(token_ids), tuple(parents), (ROUTINE,) * count, (1.0,) * count,
                     tuple(drawn_from or [None] * count))


def p_value_limit(degrees):
    """Chi-square quantile at 1e-4 (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3


def differs(counts, probs):
    """Whether counts are not a sample of probs: chi-square at 1e-4, thin cells together."""
    expected = np.append(probs, 0.0) * counts.sum()
    observed = np.append(counts, 0)
    thin = expected < 5.0
    observed = np.append(observed[~thin], observed[thin].sum())
    expected = np.append(expected[~thin], expected[thin].sum())
    if expected[-1] < 1e-9:
        if observed[-1]:
            return True
        observed, expected = observed[:-1], expected[:-1]
    return ((observed - expected) ** 2 / expected).sum() > p_value_limit(len(expected) - 1)


# Greedy: draft, the target's argmax behind the last token and behind each draft token, accepted

@pytest.mark.parametrize("draft, target, accepted, own, rejected", [
    ([], [4], 0, 4, False),
    ([5], [5, 6], 1, 6, False),
    ([5], [6, 9], 0, 6, True),
    ([5, 6, 7], [5, 6, 7, 8], 3, 8, False),
    ([5, 6, 7], [5, 6, 9, 8], 2, 9, True),
    ([5, 6, 7], [9, 6, 7, 8], 0, 9, True),
    ([5, 6, 7], [5, 9, 7, 8], 1, 9, True),      # what follows the mismatch does not count
])
def test_greedy_chain(draft, target, accepted, own, rejected):
    result = accept_greedily(chain(draft, ROUTINE), np.array(target))
    assert result == Accepted(tuple(range(accepted)), own, rejected)


@pytest.mark.parametrize("target, nodes, own, rejected", [
    #  ROOT 0:5 1:6 2:7(0) 3:8(0) 4:7(1)
    ([5, 8, 0, 0, 9, 0], (0, 3), 9, False),
    ([5, 7, 0, 3, 0, 0], (0, 2), 3, False),
    ([6, 0, 7, 0, 0, 2], (1, 4), 2, False),
    ([6, 0, 8, 0, 0, 2], (1,), 8, True),
    ([7, 0, 0, 0, 0, 0], (), 7, True),
])
def test_greedy_tree(target, nodes, own, rejected):
    given = tree([5, 6, 7, 8, 7], [ROOT, ROOT, 0, 0, 1])
    assert accept_greedily(given, np.array(target)) == Accepted(nodes, own, rejected)
    assert GreedyRule().accept(given, Step(np.array(target), None, None, ())).nodes == nodes


# Rejection sampling

class Fixed:
    """A generator whose numbers are given."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


@pytest.mark.parametrize("numbers, expected", [
    # p = (.5 .3 .2), (.1 .6 .3), (.2 .2 .6); q = (.25 .5 .25), (.8 .1 .1); draft 1, 0
    ((0.59, 0.12, 0.39), [1, 0, 1]),        # 0.3/0.5, then 0.1/0.8 = 0.125: bonus from (.2 .2 .6)
    ((0.59, 0.13, 0.6), [1, 1]),            # recovered from max(p - q, 0) = (0 .5 .2)
    ((0.59, 0.13, 0.8), [1, 2]),
    ((0.61, 0.9), [0]),                     # recovered from (.25 0 0)
])
def test_rejection_sampling_by_hand(numbers, expected):
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], np.float32)
    q = np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32)
    given = rejection_sample(np.array([1, 0]), q, p, Fixed(*numbers))
    assert given.dtype == np.int64 and given.tolist() == expected


def test_rejection_sampling_refuses_what_is_no_distribution():
    p, q = np.full((3, 4), 0.25, np.float32), np.full((2, 4), 0.25, np.float32)
    generator = np.random.default_rng(0)
    assert len(rejection_sample(np.array([1, 2]), q, p, generator)) == 3     # p = q: all accepted
    for changed in ({"draft_probs": q[:1]}, {"target_probs": p[:2]}, {"draft_probs": q * 1.01},
                    {"target_probs": p * 0.99}, {"draft_probs": q * np.nan}):
        given = {"draft_token_ids": np.array([1, 2]), "draft_probs": q, "target_probs": p}
        with pytest.raises(ValueError, match="given"):
            rejection_sample(**given | changed, generator=generator)


@pytest.mark.parametrize("draft", ["same", "useless", "narrow"])
def test_rejection_sampling_follows_the_target(draft):
    generator = np.random.default_rng(5)
    p = generator.dirichlet(np.ones(5), 3)
    q = {"same": p[:2], "useless": generator.dirichlet(np.ones(5), 2),
         "narrow": np.eye(5)[[2, 3]]}[draft]
    counts = np.zeros(5, int)
    second = np.zeros((5, 5), int)
    for _ in range(4_000):
        drafted = np.array([draw(row, generator) for row in q])
        given = rejection_sample(drafted, q, p, generator)
        counts[given[0]] += 1
        if len(given) > 1:      # then the first was the draft's, on which p[1] rests
            second[given[0], given[1]] += 1
    assert not differs(counts, p[0])
    for first in np.flatnonzero(second.sum(axis=1) > 50):
        assert not differs(second[first], p[1])


def test_the_same_seed_gives_the_same_tokens():
    p, q = np.full((5, 9), 1 / 9), np.random.default_rng(1).dirichlet(np.ones(9), 4)
    given = [rejection_sample(np.array([0, 1, 2, 3]), q, p, np.random.default_rng(seed)).tolist()
             for seed in (7, 7, 8, 9, 10)]
    assert given[0] == given[1] and any(other != given[0] for other in given[2:])


# Brothers: chosen, drawn without replacement, drawn independently and merged

def offers(kind, q, generator):
    """Three brothers from q, in the ways proposers make them."""
    if kind == "chosen":
        return tree([2, 0, 4], [ROOT] * 3)
    if kind == "drawn and chosen":
        first = chain([draw(q, generator)], ROUTINE, drawn_from=[q])
        return merge([first, chain([0], ROUTINE), chain([3], ROUTINE)])
    if kind == "chosen and drawn":
        last = chain([draw(q, generator)], ROUTINE, drawn_from=[q])
        return merge([chain([0], ROUTINE), chain([3], ROUTINE), last])
    return merge([chain([draw(q, generator)], ROUTINE, drawn_from=[q]) for _ in range(3)])


@pytest.mark.parametrize("kind", ["chosen", "drawn and chosen", "chosen and drawn", "drawn"])
def test_brothers_follow_the_target(kind):
    generator = np.random.default_rng(3)
    p, q = generator.dirichlet(np.ones(5)), generator.dirichlet(np.ones(5))
    counts, taken = np.zeros(5, int), 0
    for _ in range(4_000):
        offered = offers(kind, q, generator)
        accepted = accept_sampled(offered, [p] * 4, generator)
        taken += len(accepted.nodes)
        counts[offered.token_ids[accepted.nodes[0]] if accepted.nodes
               else accepted.token_id] += 1
    assert not differs(counts, p)
    assert taken > 1_400
    if kind == "chosen":
        assert taken / 4_000 == pytest.approx(p[[0, 2, 4]].sum(), abs=0.03)


class Rows:
    """p behind the text so far and each node, looked up by its path."""

    def __init__(self, p_behind, token_ids, paths):
        self._p_behind, self._token_ids, self._paths = p_behind, token_ids, paths

    def __getitem__(self, row):
        return self._p_behind(self._token_ids + self._paths[row])


def paths_of(given):
    paths = [()]
    for node, parent in enumerate(given.parents):
        paths.append((*paths[parent + 1], given.token_ids[node]))
    return paths


def test_three_tokens_together_follow_the_target():
    """Rounds of a drawn chain of two merged with chosen tokens, until there are three."""
    generator = np.random.default_rng(8)
    logits, q = 2.0 * generator.standard_normal((400, 6)), generator.dirichlet(np.ones(6))
    table = [processed_probs(row, SamplingConfig(0.6, 0.95), range(2, 4)) for row in logits]

    def p_behind(token_ids):
        return table[hash(token_ids) % len(table)]

    @functools.cache
    def offered(first, second):
        drawn = chain([first, second], ROUTINE, drawn_from=[q, q])
        given = merge([drawn, chain([0, 5], ROUTINE), chain([4], ROUTINE)])
        return given, paths_of(given)

    def three_tokens():
        token_ids = ()
        while len(token_ids) < 3:
            given, paths = offered(draw(q, generator), draw(q, generator))
            accepted = accept_sampled(given, Rows(p_behind, token_ids, paths), generator)
            accepted_ids = [given.token_ids[node] for node in accepted.nodes]
            token_ids += (*accepted_ids, accepted.token_id)
        return token_ids[:3]

    counts = np.zeros((6, 6, 6), int)
    for _ in range(50_000):
        counts[three_tokens()] += 1
    probs = np.array([[[p_behind(())[a] * p_behind((a,))[b] * p_behind((a, b))[c]
                        for c in range(6)] for b in range(6)] for a in range(6)])
    assert not differs(counts.ravel(), probs.ravel())
    assert differs(counts.ravel(), 0.9 * probs.ravel() + 0.1 / 216)


def test_the_test_sees_a_wrong_residual():
    generator = np.random.default_rng(3)
    p, q = generator.dirichlet(np.ones(5)), generator.dirichlet(np.ones(5))
    counts = np.zeros(5, int)
    for _ in range(4_000):
        drafted = draw(q, generator)
        taken = generator.random() * q[drafted] < p[drafted]
        counts[drafted if taken else draw(p, generator)] += 1       # p where max(p - q, 0) belongs
    assert differs(counts, p)


def test_what_is_left_after_a_rejection():
    p = np.array([0.5, 0.3, 0.2])
    assert residual(p, 0, None) == pytest.approx([0.0, 0.6, 0.4])
    assert residual(p, 1, np.array([0.25, 0.5, 0.25])) == pytest.approx([1.0, 0.0, 0.0])
    assert residual(p, 1, p) is p       # rounding alone can reject here


def test_a_draw_never_has_probability_zero():
    p = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [draw(p, Fixed(u)) for u in (0.0, 0.4999, 0.5, 0.9999, 1.0)] == [1, 1, 3, 3, 3]


# The processed distribution

def test_mask_then_temperature_then_top_p():
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32))
    assert processed_probs(logits, SamplingConfig(1.0, 1.0)) == pytest.approx(np.exp(logits))
    masked = processed_probs(logits, SamplingConfig(1.0, 1.0), range(1, 2))
    assert masked == pytest.approx([0.2, 0.0, 0.5, 0.3])
    # at T = 0.5: squares (.01 .0625 .0225) / .095; 0.8 is reached by the first two
    cold = processed_probs(logits, SamplingConfig(0.5, 0.8), range(1, 2))
    assert cold == pytest.approx([0.0, 0.0, 0.0625 / 0.085, 0.0225 / 0.085])
    # top_p on the whole distribution first would have kept the masked token and one more
    assert processed_probs(logits, SamplingConfig(1.0, 0.01)) == pytest.approx([0, 1, 0, 0])
    infinite = np.array([-np.inf, 0.0, 0.0, -np.inf], np.float32)
    assert processed_probs(infinite, SamplingConfig()) == pytest.approx([0, 0.5, 0.5, 0])


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_logits_without_a_largest_are_refused(broken):
    logits = np.full(4, -np.inf if broken < 0 else 0.0, np.float32)
    logits[1] = broken
    with pytest.raises(ModelError, match="logits"):
        processed_probs(logits, SamplingConfig())


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_a_large_vocabulary_is_cut_as_a_small_one(scale):
    logits = scale * np.random.default_rng(0).standard_normal(8 * PARTIAL_SORT)
    probs = processed_probs(logits, SamplingConfig(1.0, 1.0))
    order = np.argsort(-probs)
    kept = order[:int(np.searchsorted(np.cumsum(probs[order]), 0.6)) + 1]
    expected = np.zeros_like(probs)
    expected[kept] = probs[kept] / probs[kept].sum()
    assert (len(kept) > PARTIAL_SORT) == (scale == 0.3)
    assert processed_probs(logits, SamplingConfig(1.0, 0.6)) == pytest.approx(expected)


def test_it_is_hugging_faces():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    generator = np.random.default_rng(2)
    for _ in range(20):
        logits = 3.0 * generator.standard_normal(300).astype(np.float32)
        scores = torch.from_numpy(logits.copy())[None]
        scores[:, 20:60] = -np.inf
        scores = process.TemperatureLogitsWarper(0.6)(None, scores)
        scores = process.TopPLogitsWarper(0.98)(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        given = processed_probs(logits, SamplingConfig(), range(20, 60))
        assert np.array_equal(given > 0, expected > 0)
        assert given == pytest.approx(expected, abs=1e-6)


def test_rows_are_worked_out_when_asked_for():
    rows = ProcessedRows(np.zeros((3, 4), np.float32), SamplingConfig(), range(1, 2))
    assert len(rows) == 3 and rows[2] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1},
                                   {"temperature": float("nan")}])
def test_settings_have_ranges(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingConfig(**wrong)


# EASD

def logits_step(p, rows):
    return Step(np.zeros(rows, int), None, None, (), np.tile(np.log(p), (rows, 1)))


def easd_share(p, q, drafted, config):
    """How often the drafted token is accepted, and what comes instead."""
    rule = EasdRule(config, SamplingConfig(1.0, 1.0), range(0), np.random.default_rng(0))
    given = chain([drafted], ROUTINE, drawn_from=() if q is None else [q])
    results = [rule.accept(given, logits_step(p, 2)) for _ in range(300)]
    return np.mean([len(r.nodes) for r in results]), {r.token_id for r in results if not r.nodes}


def test_easd_rejects_where_both_hesitate_between_the_same_tokens():
    flat = np.array([0.24, 0.25, 0.26, 0.24, 0.01])
    sure = np.array([0.01, 0.01, 0.96, 0.01, 0.01])
    config = EasdConfig(target_entropy=1.0, draft_entropy=1.0, top_n=4, min_overlap=1.0)
    assert entropy(np.full(4, 0.25)) == pytest.approx(np.log(4.0))
    assert both_unsure(flat, flat, config)
    assert not both_unsure(sure, flat, config) and not both_unsure(flat, sure, config)
    assert not both_unsure(flat, flat[::-1], config)        # unsure, but about others
    share, instead = easd_share(flat, flat, 2, config)
    assert share == 0.0 and 2 not in instead and len(instead) >= 3
    assert easd_share(sure, sure, 2, config)[0] == 1.0
    assert easd_share(flat, None, 2, config)[0] == pytest.approx(0.26, abs=0.08)
    assert not EasdRule.lossless and SamplingRule.lossless and GreedyRule.lossless


def test_easd_is_sampling_where_nothing_is_vetoed():
    generator = np.random.default_rng(4)
    p, q = generator.dirichlet(np.ones(5), 2)
    given = chain([1], ROUTINE, drawn_from=[q])
    never = EasdRule(EasdConfig(target_entropy=9.0), SamplingConfig(1.0, 1.0), range(0),
                     np.random.default_rng(0))
    plain = SamplingRule(SamplingConfig(1.0, 1.0), range(0), np.random.default_rng(0))
    step = logits_step(p, 2)
    for _ in range(50):
        assert never.accept(given, step) == plain.accept(given, step)
    assert plain.accept(EMPTY, logits_step(p, 1)).nodes == ()


@pytest.mark.parametrize("wrong", [{"target_entropy": -1.0}, {"draft_entropy": -1.0},
                                   {"top_n": 0}, {"min_overlap": 2.0}])
def test_easd_settings_have_ranges(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EasdConfig(**wrong)
