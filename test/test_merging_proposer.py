"""Merged candidates: calibration, the size that pays, the cost curve, and the registry."""

import numpy as np
import pytest

from fake_runtime import STOP, FakeRuntime, autoregressive, random_prompts
from reasoning_planner.datatypes import Deadline, TokenOrigin
from reasoning_planner.errors import ConfigError, DataError, ModelError
from reasoning_planner.runtimes.base import Step
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.corpus_proposer import CorpusProposer, save_corpus
from reasoning_planner.speculative.cost_curve import CostCurve, measure_cost_curve
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.merging_proposer import (Calibration, MergingProposer,
                                                            NetworkGate, best_size)
from reasoning_planner.speculative.proposer import (Commit, DraftContext, NoProposer,
                                                    PromptContext)
from reasoning_planner.speculative.registry import ProposerConfig, create_proposer
from reasoning_planner.speculative.temporal_proposer import TemporalProposer
from reasoning_planner.speculative.token_tree import chain, merge

ROUTINE, CORPUS = TokenOrigin.ROUTINE, TokenOrigin.CORPUS
PROMPT = PromptContext(Step(np.array([0]), None, None, ()))
CONTEXT = DraftContext((4,), 30, 60)
FREE = CostCurve((1, 64), (1.0, 1.0))


class Fixed(NoProposer):
    """Always proposes the same."""

    name = "fixed"

    def __init__(self, tree):
        self.tree = tree

    def propose(self, context):
        return self.tree


# Cost

def test_a_cost_curve_is_straight_between_its_points():
    curve = CostCurve((1, 5, 9), (1.0, 2.0, 4.0), round_ms=0.5)
    assert curve.round_costs(11) == pytest.approx(
        [1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5])
    assert CostCurve((4,), (2.0,)).round_costs(6) == pytest.approx([2.0] * 6)


@pytest.mark.parametrize("wrong", [
    {"sizes": ()}, {"sizes": (2, 1, 3)}, {"sizes": (0, 1, 2)}, {"cost_ms": (1.0, 2.0)},
    {"cost_ms": (1.0, 2.0, float("nan"))}, {"cost_ms": (1.0, -2.0, 3.0)}, {"round_ms": -1.0}])
def test_a_cost_curve_has_ranges(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CostCurve(**wrong)


def test_a_cost_curve_is_measured_and_leaves_the_cache_alone():
    runtime = FakeRuntime()
    runtime.prefill(np.array([4, 5, 6]))
    cached = runtime.cached
    curve = measure_cost_curve(runtime, (1, 4), repeats=3, round_ms=0.1)
    assert runtime.cached == cached and curve.sizes == (1, 4) and curve.round_ms == 0.1
    assert runtime.passes == 8 and min(curve.cost_ms) > 0.0


# Size

@pytest.mark.parametrize("path_probs, costs, expected", [
    ([], [1.0, 1.5], 0),
    ([0.9, 0.8, 0.1], [1.0, 1.0, 1.0, 1.0], 3),         # free: all
    ([0.9, 0.8, 0.1], [1.0, 1.2, 1.4, 1.6], 2),         # 1, 1.9/1.2, 2.7/1.4 = 1.93, 2.8/1.6
    ([0.1, 0.1], [1.0, 1.2, 1.4], 0),                   # 1, 1.1/1.2: no draft pays
    ([0.5, 0.5, 0.5], [1.0, 1.9, 1.9, 1.9], 3),         # 2.5/1.9 = 1.3, though one alone loses
])
def test_the_size_that_pays(path_probs, costs, expected):
    assert best_size(path_probs, np.array(costs)) == expected


def test_a_dearer_engine_gets_a_smaller_tree():
    trees = [chain([5, 6, 7, 8], ROUTINE, [0.9, 0.9, 0.5, 0.5]),
             chain([9, 6], CORPUS, [0.08, 0.9])]
    sizes = []
    for slope in (0.0, 0.2, 0.5, 1.0):
        merged = MergingProposer([Fixed(tree) for tree in trees],
                                 CostCurve((1, 11), (1.0, 1.0 + 10 * slope)))
        sizes.append(len(merged.propose(CONTEXT)))
    assert sizes[0] == 6 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 0
    assert 0 < sizes[1] < 6


def test_the_tree_is_within_the_room_there_is():
    merged = MergingProposer([Fixed(chain(range(4, 14), ROUTINE))], FREE, max_nodes=8)
    assert len(merged.propose(CONTEXT)) == 8
    assert len(merged.propose(DraftContext((4,), 30, 3))) == 3
    assert len(merged.propose(DraftContext((4,), 30, 0))) == 0
    assert len(merged.propose(DraftContext((4,), 30, -1))) == 0


# Calibration

def test_a_probability_is_the_proposers_until_something_is_seen():
    calibration = Calibration()
    assert calibration.estimate(0.9) == pytest.approx(0.9)
    for _ in range(100):
        calibration.count(0.9, False)
    assert calibration.estimate(0.9) < 0.1 and calibration.estimate(0.5) == pytest.approx(0.5)
    for _ in range(2000):
        calibration.count(0.9, True)
    assert calibration.estimate(0.9) > 0.95
    assert Calibration().estimate(1.0) == 1.0 and Calibration().estimate(0.0) == 0.0


def test_it_learns_from_the_tokens_the_target_came_by():
    """Of brothers at most one is right; behind a wrong token nothing is known."""
    calibration = Calibration()
    tree = merge([chain([5, 6, 7], ROUTINE, [0.95, 0.85, 0.75]),
                  chain([8, 6], ROUTINE, [0.05, 0.65])])
    calibration.learn(tree, [5, 9, 7])
    for prob, expected in ((0.95, 8.6 / 9), (0.05, 0.4 / 9), (0.85, 6.8 / 9), (0.75, 0.75),
                           (0.65, 0.65)):
        assert calibration.estimate(prob) == pytest.approx(expected)
    calibration.learn(tree, [9])
    assert calibration.estimate(0.95) == pytest.approx(8.6 / 10)


def test_a_boaster_is_found_out():
    """Whose tokens are never accepted soon gets no room; the honest one keeps his."""
    merged = MergingProposer([Fixed(chain([9, 9], ROUTINE, [0.99, 0.99])),
                              Fixed(chain([5, 6], CORPUS, [0.8, 0.8]))],
                             CostCurve((1, 11), (1.0, 3.0)))
    merged.reset(PROMPT)
    assert 9 in merged.propose(CONTEXT).token_ids
    for _ in range(60):
        merged.propose(CONTEXT)
        merged.observe(Commit((5, 6, 7)))
    assert merged.propose(CONTEXT).token_ids == (5, 6)


def test_nan_is_not_calibrated_away():
    merged = MergingProposer([Fixed(chain([5], ROUTINE, [float("nan")]))], FREE)
    with pytest.raises(ModelError, match="nan"):
        merged.propose(CONTEXT)


def test_there_must_be_something_to_merge():
    for arguments in (([], FREE, 8), ([NoProposer()], FREE, 0)):
        with pytest.raises(ConfigError, match="merging"):
            MergingProposer(*arguments)


# Names

def config(tmp_path, **changes):
    save_corpus(tmp_path / "corpus.npz", [[10, 11, 12, 1]])
    return ProposerConfig(**{"corpus": str(tmp_path / "corpus.npz"), **changes})


def test_proposers_by_name(tmp_path):
    kinds = {("none",): NoProposer, ("corpus",): CorpusProposer, ("temporal",): TemporalProposer,
             ("corpus", "temporal"): MergingProposer}
    for names, kind in kinds.items():
        proposer = create_proposer(config(tmp_path, names=names))
        assert type(proposer) is kind
        proposer.reset(PROMPT)
        proposer.observe(Commit((10,)))
        tree = proposer.propose(CONTEXT)
        assert tree.token_ids == ((11, 12, 1) if "corpus" in names else ())


@pytest.mark.parametrize("wrong, complaint", [
    ({"names": ("oracle",)}, "oracle"), ({"names": ()}, "names"), ({"corpus": ""}, "corpus"),
    ({"corpus_order": 0}, "corpus_order")])
def test_a_wrong_configuration_is_refused(tmp_path, wrong, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(tmp_path, **wrong)


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(DataError, match="absent.npz"):
        create_proposer(config(tmp_path, corpus=str(tmp_path / "absent.npz")))


# Together

def test_merged_proposers_need_no_more_passes_than_each(tmp_path):
    """On cycles that repeat with changes, at a flat cost."""
    runtime = FakeRuntime(noise=0.5)
    prompts = random_prompts(120, seed=5)
    texts = [autoregressive(runtime, prompt) for prompt in prompts]
    save_corpus(tmp_path / "corpus.npz", texts[:80])
    passes = {}
    for names in (("none",), ("temporal",), ("corpus",), ("corpus", "temporal")):
        chosen = ProposerConfig(names, str(tmp_path / "corpus.npz"), costs=FREE)
        decoder = SpeculativeDecoder(runtime, create_proposer(chosen), STOP, 40)
        passes[names] = 0
        for prompt, text in zip(prompts[80:], texts[80:]):
            for _ in range(2):
                step = runtime.prefill(np.array(prompt))
                written = decoder.write(PromptContext(step), GreedyRule(), Deadline.never())
                assert list(written.token_ids) == text
                passes[names] += runtime.passes
    best = passes["corpus", "temporal"]
    assert best < min(passes["corpus",], passes["temporal",]) < passes["none",]


# Networks

class Counted(Fixed):
    """A network that counts how often it was asked."""

    runs_network, asked = True, 0

    def propose(self, context):
        self.asked += 1
        return self.tree


def rounds_of(network, cheap, costs, count=40):
    """How often the network drafted in first rounds of `count` texts."""
    proposer = MergingProposer([Fixed(cheap), network], costs)
    for _ in range(count):
        proposer.reset(PROMPT)
        proposer.propose(CONTEXT)
    return network.asked


def test_a_network_drafts_where_the_others_are_unsure_and_not_where_it_costs_more_than_it_gives():
    sure, unsure = chain([5, 6, 7], CORPUS, [0.95] * 3), chain([5, 6, 7], CORPUS, [0.2] * 3)
    better = chain([5, 8, 9, 4], ROUTINE, [0.95] * 4)
    costs = CostCurve((1, 8), (1.0, 1.7), draft_ms=1.0)
    assert rounds_of(Counted(better), unsure, costs) == 40
    assert rounds_of(Counted(better), sure, costs) < 10
    free, dear = (CostCurve((1, 8), (1.0, 1.7), draft_ms=ms) for ms in (0.0, 50.0))
    assert rounds_of(Counted(better), sure, free) == 40
    assert rounds_of(Counted(better), unsure, dear) < 10


def test_a_network_that_was_left_alone_is_tried_again():
    gate = NetworkGate(4.0)
    gate.learn(0.5, False)
    assert not gate.opens(1.0, False) and gate.opens(1.0, True)     # a later round is another
    assert any(gate.opens(1.0, False) for _ in range(200))


def test_what_a_network_costs_is_kept_with_the_curve():
    curve = CostCurve((1, 8), (1.0, 1.7), 0.1, 0.6)
    assert CostCurve.from_dict(curve.to_dict()) == curve
    known = {name: value for name, value in curve.to_dict().items() if name != "draft_ms"}
    assert CostCurve.from_dict(known).draft_ms == 0.0      # written before drafts were measured
    with pytest.raises(ConfigError, match="draft_ms"):
        CostCurve(draft_ms=-1.0)
