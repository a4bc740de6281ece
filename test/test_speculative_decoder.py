"""The loop: whatever is proposed, the text, its distribution and the cache are the target's."""

import dataclasses
import time

import numpy as np
import pytest

from fake_runtime import BINS, STOP, FakeRuntime, autoregressive, random_prompts
from reasoning_planner.datatypes import Deadline, Reason, Reasoning, TokenOrigin
from reasoning_planner.errors import ModelError
from reasoning_planner.speculative import acceptance
from reasoning_planner.speculative.acceptance import GreedyRule, SamplingConfig, SamplingRule
from reasoning_planner.speculative.corpus_proposer import (CorpusConfig, CorpusProposer,
                                                           SuffixTrie)
from reasoning_planner.speculative.cost_curve import CostCurve
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.merging_proposer import MergingProposer
from reasoning_planner.speculative.proposer import NoProposer, PromptContext
from reasoning_planner.speculative.stats import SpeculationStats
from reasoning_planner.speculative.temporal_proposer import TemporalProposer
from reasoning_planner.speculative.token_tree import EMPTY, ROOT, TokenTree, chain, merge

VOCAB = 24
NEVER = Deadline.never()


class Given(NoProposer):
    """Proposes what a function of the context says, and remembers what it was told."""

    name, origin = "given", TokenOrigin.ROUTINE

    def __init__(self, tree_of):
        self._tree_of = tree_of
        self.commits, self.contexts, self.resets = [], [], 0

    def reset(self, prompt):
        self.commits, self.resets = [], self.resets + 1

    def propose(self, context):
        self.contexts.append(context)
        return self._tree_of(context)

    def observe(self, commit):
        self.commits.append(commit)


def write(runtime, proposer, prompt, rule=None, limit=40, deadline=NEVER):
    rule = rule or GreedyRule()
    step = runtime.prefill(np.array(prompt), logits=rule.needs_logits)
    return SpeculativeDecoder(runtime, proposer, STOP, limit).write(
        PromptContext(step, np.array(prompt)), rule, deadline)


@pytest.fixture(scope="module")
def corpus():
    runtime = FakeRuntime()
    return [autoregressive(runtime, prompt) for prompt in random_prompts(150, seed=1)]


# Greedy: lossless, token for token

def random_tree(generator, size):
    """None to three random paths, merged."""
    return merge([chain(generator.integers(0, VOCAB, generator.integers(1, size + 1)),
                        TokenOrigin.ROUTINE) for _ in range(generator.integers(0, 4))])


def useful_tree(generator, truth, size, tree):
    """The truth with errors, as a chain or with brothers."""
    def tree_of(context):
        wanted = list(truth[len(context.token_ids):len(context.token_ids) + size])
        wrong = [token if generator.random() < 0.8 else int(generator.integers(0, VOCAB))
                 for token in wanted]
        candidates = [chain(wrong, TokenOrigin.ROUTINE)]
        if tree:
            candidates += [chain(wanted[:1] + wrong[2:], TokenOrigin.CORPUS),
                           chain(generator.integers(0, VOCAB, 2), TokenOrigin.TEMPORAL)]
        return merge(candidates)
    return tree_of


def proposers(kind, corpus, size, tree, generator, truth):
    deep = dict(num_speculative_tokens=size, max_nodes=2 * size if tree else size,
                branches=3 if tree else 1)
    if kind == "none":
        return NoProposer()
    if kind == "corpus":
        return CorpusProposer(corpus, CorpusConfig(**deep))
    if kind == "temporal":
        return TemporalProposer(size)
    if kind == "useless":
        return Given(lambda context: random_tree(generator, size))
    if kind == "useful":
        return Given(useful_tree(generator, truth, size, tree))
    return MergingProposer([CorpusProposer(corpus, CorpusConfig(**deep)), TemporalProposer(size),
                            Given(lambda context: random_tree(generator, 2))],
                           CostCurve((1, 16), (1.0, 1.1)), max_nodes=2 * size)


@pytest.fixture(scope="module")
def references():
    """For each prompt: how long a text may be, the target's own, its cache and its passes."""
    runtime, generator, found = FakeRuntime(), np.random.default_rng(7), []
    for case, prompt in enumerate(random_prompts(510, seed=3)):
        limit = 40 if case % 5 else int(generator.integers(1, 12))
        expected = autoregressive(runtime, prompt, max_new_tokens=limit)
        found.append((prompt, limit, expected, runtime.cached, runtime.passes))
    return found


@pytest.mark.parametrize("kind", ["none", "corpus", "temporal", "merged", "useless", "useful"])
def test_the_text_and_the_cache_are_those_of_the_target_alone(kind, corpus, references):
    runtime, trie = FakeRuntime(), SuffixTrie(corpus)
    generator = np.random.default_rng(2)
    total = SpeculationStats()
    for case, (prompt, limit, expected, cached, passes) in enumerate(references):
        size, tree = 1 + case % 16, case // 16 % 2 == 1
        if case % 32 == 0 or kind != "temporal":
            proposer = proposers(kind, trie, size, tree, generator, expected)
        written = write(runtime, proposer, prompt, limit=limit)
        assert list(written.token_ids) == expected
        assert runtime.cached == cached
        runtime.require_one_path()
        assert runtime.kv_allocations == 1
        assert written.stats.passes == runtime.passes <= passes
        assert written.finished == (expected[-1] == STOP)
        assert len(written.origins) == len(expected)
        total.add(written.stats)
    assert total.texts == 510 and sum(total.passes_of_texts.values()) == 510
    if kind in ("corpus", "merged", "useful"):
        assert total.tokens_per_pass > 1.4, total
    if kind == "none":
        assert total.tokens_per_pass == pytest.approx(1.0, abs=0.03)


# Where a text ends

def scripted(*blocks):
    """Proposes the blocks in turn, each a chain."""
    remaining = list(blocks)
    return Given(lambda context: chain(remaining.pop(0), TokenOrigin.ROUTINE)
                 if remaining else EMPTY)


@pytest.fixture(scope="module")
def case():
    """A runtime, a prompt, and the text of at least 6 tokens it writes."""
    runtime = FakeRuntime()
    for prompt in random_prompts(50, seed=4):
        truth = autoregressive(runtime, prompt)
        if len(truth) >= 6 and truth[-1] == STOP:
            return runtime, prompt, truth
    raise AssertionError("no such prompt")


def test_a_stop_token_in_the_middle_of_a_block(case):
    runtime, prompt, truth = case
    block = [*truth[1:], 9, 9, 9]
    written = write(runtime, scripted(block), prompt)
    assert list(written.token_ids) == truth and written.finished
    assert runtime.cached_ids == [*prompt, *truth] and written.stats.passes == 1
    assert runtime.extended == [[truth[0], *block]], "its keys are there already"
    assert written.stats.accepted == len(truth) - 1
    assert written.stats.offered_at_depth == written.stats.accepted_at_depth


def test_nothing_accepted_behind_the_stop_token_is_committed(case):
    """Where the target would have gone on as the draft says."""
    runtime, prompt, truth = case
    runtime.prefill(np.array(prompt))
    behind = [int(runtime.extend(np.array(truth)).token_ids[-1])]
    behind += [int(runtime.extend(np.array(behind)).token_ids[-1])]
    written = write(runtime, scripted([*truth[1:], *behind]), prompt)
    assert list(written.token_ids) == truth and written.stats.accepted == len(truth) - 1
    assert runtime.cached_ids == [*prompt, *truth]


def test_the_stop_token_as_the_targets_own(case):
    """Bonus: the keys of the stop token are written by one more pass."""
    runtime, prompt, truth = case
    written = write(runtime, scripted(truth[1:-1]), prompt)
    assert list(written.token_ids) == truth and written.origins[-1] == TokenOrigin.BONUS
    assert runtime.extended == [truth[:-1], [STOP]] and runtime.cached_ids == [*prompt, *truth]
    wrong = [*truth[1:-1], 9, 8]
    written = write(runtime, scripted(wrong), prompt)
    assert written.origins[-1] == TokenOrigin.RECOVERED
    assert runtime.extended == [[truth[0], *wrong], [STOP]]
    assert runtime.cached_ids == [*prompt, *truth]
    runtime.require_one_path()


def test_the_prefill_says_stop():
    runtime = FakeRuntime(stop_after=-20)
    written = write(runtime, scripted([5]), [4, 5, 6])
    assert written.token_ids == (STOP,) and written.origins == (TokenOrigin.DELIBERATIVE,)
    assert runtime.extended == [[STOP]] and written.finished and written.refusals == ()


def test_a_text_without_end_gets_the_stop_token_behind_it(case):
    runtime, prompt, truth = case
    for proposer in (NoProposer(), scripted(truth[1:])):
        written = write(runtime, proposer, prompt, limit=4)
        assert list(written.token_ids) == truth[:4] and not written.finished
        assert [refusal.reason for refusal in written.refusals] == [Reason.REASONING_UNFINISHED]
        assert "4 tokens" in written.refusals[0].detail
        assert runtime.extended[-1] == [truth[3], STOP]
        assert runtime.cached_ids == [*prompt, *truth[:4], STOP]


def test_a_full_cache_ends_the_text():
    runtime = FakeRuntime(capacity=12, stop_after=100)
    for proposer in (NoProposer(), Given(lambda context: chain([5] * 9, TokenOrigin.ROUTINE)),
                     Given(lambda context: merge([chain([i] * 3, TokenOrigin.ROUTINE)
                                                  for i in range(4, 9)]))):
        written = write(runtime, proposer, [4, 5, 6, 7])
        assert len(written.token_ids) == 7 and runtime.length == 12
        assert written.refusals[-1].reason is Reason.REASONING_UNFINISHED


# Deadline

class Slow(FakeRuntime):
    """Every pass takes 10 ms."""

    def extend(self, *arguments, **options):
        time.sleep(0.01)
        return super().extend(*arguments, **options)


@pytest.mark.parametrize("proposer", [NoProposer(), Given(lambda context: chain(
    [5, 6], TokenOrigin.ROUTINE))], ids=["none", "given"])
def test_a_deadline_inside_the_loop(proposer):
    runtime = Slow(stop_after=1000)
    started_s = time.monotonic()
    written = write(runtime, proposer, [4, 5, 6], limit=150, deadline=Deadline.after(0.05))
    assert time.monotonic() - started_s < 0.4
    assert 1 < len(written.token_ids) < 30 and not written.finished
    refusal, = written.refusals
    assert refusal.reason is Reason.REASONING_UNFINISHED and "deadline" in refusal.detail
    assert runtime.cached_ids == [4, 5, 6, *written.token_ids, STOP]


def test_a_deadline_before_the_loop():
    runtime = FakeRuntime(stop_after=100)
    written = write(runtime, NoProposer(), [4, 5, 6], deadline=Deadline.after(-1.0))
    assert len(written.token_ids) == 1 and runtime.extended == [[written.token_ids[0], STOP]]


# A failing draft

def raising(context):
    raise ModelError("the draft's engine is gone")


def broken(token_id=5, prob=0.5, drawn_from=None):
    return lambda context: TokenTree((token_id,), (ROOT,), (TokenOrigin.ROUTINE,), (prob,),
                                     (drawn_from,))


@pytest.mark.parametrize("tree_of, complaint", [
    (raising, "the draft's engine is gone"), (broken(token_id=VOCAB), "id 24"),
    (broken(token_id=-3), "id -3"), (broken(prob=float("nan")), "nan"),
    (broken(drawn_from=np.full(VOCAB, np.nan)), "distribution"),
])
@pytest.mark.parametrize("merged", [False, True])
def test_a_failing_draft_leaves_the_target_alone(case, tree_of, complaint, merged):
    runtime, prompt, truth = case
    good = chain(truth[1:2], TokenOrigin.CORPUS)
    proposer = Given(lambda context: tree_of(context) if len(context.token_ids) > 2 else good)
    asked = MergingProposer([proposer], CostCurve()) if merged else proposer
    written = write(runtime, asked, prompt)
    assert list(written.token_ids) == truth and runtime.cached_ids == [*prompt, *truth]
    refusal, = written.refusals
    assert refusal.reason is Reason.DRAFT_FAILED and complaint in refusal.detail
    assert written.stats.draft_failures == 1 and len(proposer.contexts) == 2
    assert set(written.origins[3:]) == {TokenOrigin.DELIBERATIVE}
    assert write(runtime, asked, prompt).stats.draft_failures == 1, "the next text tries again"
    assert proposer.resets == 2


@pytest.mark.parametrize("method", ["reset", "observe"])
def test_a_draft_that_fails_otherwise(case, method):
    runtime, prompt, truth = case
    proposer = Given(lambda context: chain(truth[1:3], TokenOrigin.ROUTINE))
    setattr(proposer, method, raising)
    written = write(runtime, proposer, prompt)
    assert list(written.token_ids) == truth and proposer.contexts == []
    assert written.refusals[0].reason is Reason.DRAFT_FAILED


def test_a_bug_is_not_a_draft_failure(case):
    runtime, prompt, _ = case
    with pytest.raises(ZeroDivisionError):
        write(runtime, Given(lambda context: 1 // 0), prompt)


# Origins, counts, and what a proposer is told

def test_every_token_has_its_origin(case):
    runtime, prompt, truth = case
    wrong = 9 if truth[3] != 9 else 8
    tree = merge([chain([truth[1], truth[2], wrong], TokenOrigin.CORPUS),
                  chain([truth[1], 8], TokenOrigin.TEMPORAL)])
    blocks = [tree, EMPTY, chain(truth[5:6], TokenOrigin.TEMPORAL)]
    proposer = Given(lambda context: blocks.pop(0) if blocks else EMPTY)
    written = write(runtime, proposer, prompt)
    assert list(written.token_ids) == truth
    expected = [TokenOrigin.DELIBERATIVE, TokenOrigin.CORPUS, TokenOrigin.CORPUS,
                TokenOrigin.RECOVERED, TokenOrigin.DELIBERATIVE, TokenOrigin.TEMPORAL]
    expected += [TokenOrigin.BONUS] * (truth[5] != STOP)
    assert list(written.origins[:len(expected)]) == expected
    stats = written.stats
    assert (stats.proposed, stats.accepted, stats.drafts) == (5, 3, 2)
    assert stats.acceptance_length == 2.5 and stats.acceptance_rate == 0.6
    assert stats.acceptance_by_depth == [1.0, 1.0, 0.0]
    assert stats.origins[TokenOrigin.CORPUS] == 2 and stats.origins.total() == len(truth)
    reasoning = written.reasoning("text", ("t",) * len(truth))
    assert isinstance(reasoning, Reasoning) and reasoning.rounds == runtime.passes
    assert (reasoning.proposed, reasoning.accepted) == (5, 3)
    assert reasoning.tokens_per_target_pass == stats.tokens_per_pass


def test_a_proposer_is_told_every_token_and_its_hidden_states(case):
    runtime, prompt, truth = case
    generator = np.random.default_rng(0)
    proposer = Given(useful_tree(generator, truth, 4, True))
    written = write(runtime, proposer, prompt)
    assert [token for commit in proposer.commits for token in commit.token_ids] == truth
    assert proposer.commits[0].hidden_states == ()
    cached = np.concatenate([commit.hidden_states[0] for commit in proposer.commits[1:]])
    expected = [(len(prompt) + place + 1, token) for place, token in enumerate(truth)]
    assert cached.tolist() == [list(map(float, pair)) for pair in expected[:len(cached)]]
    assert len(cached) >= len(truth) - 1
    assert sum(commit.accepted for commit in proposer.commits) == written.stats.accepted
    assert [context.token_ids[-1] for context in proposer.contexts] == [
        commit.token_ids[-1] for commit in proposer.commits[:len(proposer.contexts)]]


# Sampling: the joint distribution of three tokens, every random decision enumerated

class Branching:
    """A generator that goes through all outcomes: each run follows a script of choices, then
    takes the first open one; `weight` is the probability of the run."""

    def __init__(self, script):
        self._script, self.taken, self.weight = list(script), [], 1.0

    def choose(self, probs):
        open_ = [i for i, p in enumerate(probs) if p > 0.0]
        place = self._script[len(self.taken)] if len(self.taken) < len(self._script) else 0
        self.taken.append((place, len(open_)))
        self.weight *= probs[open_[place]]
        return open_[place]

    def random(self):
        return Coin(self, 1.0)


class Coin:
    """A uniform number not yet looked at."""

    def __init__(self, branching, scale):
        self._branching, self._scale = branching, scale

    def __mul__(self, scale):
        return Coin(self._branching, self._scale * scale)

    def __lt__(self, limit):
        below = min(1.0, limit / self._scale)
        return self._branching.choose([below, 1.0 - below]) == 0


def distribution(run):
    """{outcome: exact probability} over every choice `run(generator)` makes."""
    found, script = {}, []
    while script is not None:
        branching = Branching(script)
        outcome = run(branching)
        found[outcome] = found.get(outcome, 0.0) + branching.weight
        taken = branching.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        script = [place for place, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return found


SAMPLING = SamplingConfig(temperature=0.8, top_p=0.9)
SMALL = 6       # ids 0, 1 (stop), 4, 5 can be written


def offered(kind, quality, generator, runtime):
    """Two levels of draft tokens; a good draft knows the target's distribution, a useless one
    has its own opinion."""
    opinion = np.random.default_rng(9).dirichlet(np.ones(SMALL), 50)
    opinion[:, [0, 3]] = 0.0            # q is not everywhere that p is, and where p is not
    opinion /= opinion.sum(axis=1, keepdims=True)

    def q_behind(path):
        if quality == "useless":
            return opinion[len(path)]
        return acceptance.processed_probs(runtime.scores(path)[0], SAMPLING, BINS)

    def path_by(pick, path, depth, origin):
        token_ids, rows = [], []
        for _ in range(depth):
            rows.append(q_behind((*path, *token_ids)))
            token_ids.append(pick(rows[-1]))
        return chain(token_ids, origin, drawn_from=rows if pick == generator.choose else ())

    def tree_of(context):
        path = (*runtime.cached[-1], context.token_ids[-1])
        depth = min(context.depth, 2)
        chosen = path_by(lambda q: int(q.argmax()), path, depth, TokenOrigin.CORPUS)
        if kind == "chosen chain":
            return chosen
        drawn = path_by(generator.choose, path, depth, TokenOrigin.ROUTINE)
        if kind == "chain":
            return drawn
        return merge([chain([4], TokenOrigin.TEMPORAL), drawn, chosen])
    return tree_of


class Unprocessed(SamplingRule):
    """What must not be: the target's softmax as it is, without temperature, top_p and mask."""

    def __init__(self, generator):
        super().__init__(SamplingConfig(1.0, 1.0), range(0), generator)


def joint(proposer_of, rule_of):
    """Of the three tokens behind the prefill's, which is made certain: token 4."""
    runtime = FakeRuntime(vocab_size=SMALL, seed=6, sharpness=0.6, noise=0.6, stop_after=3)
    step = runtime.prefill(np.array([4, 5, 4]), logits=True)
    step = dataclasses.replace(step, logits=100.0 * np.eye(SMALL, dtype=np.float32)[[4]])

    def run(generator):
        runtime.crop(3)
        decoder = SpeculativeDecoder(runtime, proposer_of(generator, runtime), STOP, 4)
        written = decoder.write(PromptContext(step), rule_of(generator), NEVER)
        runtime.require_one_path()
        assert runtime.cached_ids[3:3 + len(written.token_ids)] == list(written.token_ids)
        return written.token_ids
    return distribution(run)


def processed(generator):
    return SamplingRule(SAMPLING, BINS, generator)


def difference(left, right):
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right})


@pytest.fixture
def enumerated(monkeypatch):
    """Draws become choices."""
    monkeypatch.setattr(acceptance, "draw", lambda p, generator: generator.choose(p / p.sum()))


@pytest.mark.parametrize("kind", ["chain", "chosen chain", "tree"])
@pytest.mark.parametrize("quality", ["good", "useless"])
def test_sampled_texts_are_distributed_as_the_targets(enumerated, kind, quality):
    expected = joint(lambda *_: NoProposer(), processed)
    assert len(expected) >= 20 and any(text[-1] == STOP for text in expected)
    assert not any(set(text) & set(BINS) for text in expected)

    def proposer_of(generator, runtime):
        return Given(offered(kind, quality, generator, runtime))
    assert difference(joint(proposer_of, processed), expected) < 1e-12
    if (kind, quality) == ("chosen chain", "good"):
        assert difference(joint(proposer_of, Unprocessed), expected) > 0.02


def test_the_same_seed_writes_the_same_text(corpus):
    runtime, trie = FakeRuntime(), SuffixTrie(corpus)

    def sampled(seed):
        rule = SamplingRule(SamplingConfig(), BINS, np.random.default_rng(seed))
        return write(runtime, CorpusProposer(trie), [4, 5, 6, 7], rule).token_ids
    assert sampled(3) == sampled(3)
    assert len({sampled(seed) for seed in range(6)}) > 2
