"""The corpus proposer: what the suffix trie predicts, and how far it carries on real templates."""

import numpy as np
import pytest

from fake_runtime import STOP, FakeRuntime
from reasoning_planner.datatypes import Deadline, TokenOrigin
from reasoning_planner.errors import ConfigError, DataError
from reasoning_planner.runtimes.base import Step
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.corpus_proposer import (BEGIN, END, CorpusConfig,
                                                           CorpusProposer, SuffixTrie,
                                                           load_corpus, save_corpus)
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.proposer import Commit, DraftContext, NoProposer, PromptContext
from reasoning_planner.speculative.stats import SpeculationStats
from reasoning_planner.speculative.token_tree import ROOT, require_sound
from reasoning_planner.world.language import sample_sentence
from reasoning_planner.world.scene import sample_scene

COT_END = 4
SEQUENCES = [[10, 11, 12, 1]] * 3 + [[10, 11, 13, 14, 1]] + [[20, 11, 15, 1]]
PROMPT = PromptContext(Step(np.array([0]), None, None, ()))


def proposed(proposer, token_ids, depth=9, budget=99):
    proposer.reset(PROMPT)
    proposer.observe(Commit(tuple(token_ids)))
    tree = proposer.propose(DraftContext(tuple(token_ids), depth, budget))
    require_sound(tree, 99)
    return tree


def after(trie, token_ids):
    state = trie.begin
    for token_id in token_ids:
        state = trie.advance(state, token_id)
    return trie.predictions(state)


def test_it_goes_on_as_the_longest_known_ending_did():
    trie = SuffixTrie(SEQUENCES)
    assert after(trie, [])[0][0] == 10
    assert after(trie, [10, 11])[0][0] == 12            # 3 of 4
    assert after(trie, [20, 11])[0][0] == 15            # although 11 is mostly followed by 12
    assert after(trie, [50, 11])[0][0] == 12            # an unknown beginning is forgotten
    assert after(trie, [10, 11, 12])[0][0] == 1
    assert after(trie, [10, 11, 12, 1])[0][0] == END
    assert after(trie, [50])[0][0] in (1, 11)           # nothing known: the commonest tokens


def test_probabilities_are_interpolated():
    """Worked by hand, order 2: behind [20, 11] counts {15: 1}; behind [11] {12: 3, 13: 1, 15: 1};
    of all 20 tokens, 15 is 1 and 12 is 3."""
    trie = SuffixTrie(SEQUENCES, order=2)
    total = sum(len(sequence) for sequence in SEQUENCES)
    one = {token: (count + 3 * count / total) / (5 + 3) for token, count in ((15, 1), (12, 3))}
    expected = {15: (1 + one[15]) / 2, 12: one[12] / 2}
    given = dict(after(trie, [20, 11]))
    assert given[15] == pytest.approx(expected[15]) and given[12] == pytest.approx(expected[12])


@pytest.mark.parametrize("order", [1, 2, 8])
def test_probabilities_sum_to_one(order):
    trie = SuffixTrie(SEQUENCES, order)
    for ids in ([], [10], [10, 11], [10, 11, 13], [11, 11], [99]):
        probs = [prob for _, prob in after(trie, ids)]
        assert sum(probs) == pytest.approx(1.0) and probs == sorted(probs, reverse=True)
        assert BEGIN not in dict(after(trie, ids))


def test_the_order_of_the_sequences_does_not_matter():
    texts = [[10, 12, 1], [10, 11, 1], [10, 13, 1]]         # all as likely
    tries = [SuffixTrie(texts), SuffixTrie(iter(texts[::-1]))]
    assert len(tries[0]) == len(tries[1])
    for ids in ([], [10], [10, 12]):
        assert after(tries[0], ids) == after(tries[1], ids)
    assert [token for token, _ in after(tries[0], [10])][:3] == [11, 12, 13]


def test_a_chain():
    tree = proposed(CorpusProposer(SuffixTrie(SEQUENCES)), [10])
    assert tree.token_ids == (11, 12, 1) and tree.is_chain      # nothing behind the stop token
    assert set(tree.origins) == {TokenOrigin.CORPUS} and set(tree.drawn_from) == {None}
    short = CorpusProposer(SuffixTrie(SEQUENCES), CorpusConfig(num_speculative_tokens=2))
    assert proposed(short, [10]).token_ids == (11, 12)
    assert proposed(short, [10], depth=1).token_ids == (11,)
    assert len(proposed(short, [10], depth=0)) == len(proposed(short, [10], budget=0)) == 0
    assert len(proposed(short, [10, 11, 12, 1])) == 0


def test_a_tree_has_the_likeliest_nodes_first():
    config = CorpusConfig(num_speculative_tokens=3, max_nodes=6, branches=3, min_path_prob=0.0)
    tree = proposed(CorpusProposer(SuffixTrie(SEQUENCES), config), [10])
    assert len(tree) == 6 and max(tree.depths) <= 2
    assert list(tree.path_probs) == sorted(tree.path_probs, reverse=True)
    behind_11 = [tree.token_ids[node] for node in tree.children[0]]
    assert tree.token_ids[0] == 11 and behind_11[:2] == [12, 13]
    thrifty = CorpusConfig(num_speculative_tokens=3, max_nodes=6, branches=3, min_path_prob=0.3)
    few = proposed(CorpusProposer(SuffixTrie(SEQUENCES), thrifty), [10])
    assert 0 < len(few) < 6 and min(few.path_probs) >= 0.3
    assert few.parents[0] == ROOT


def test_an_empty_corpus_proposes_nothing():
    assert len(proposed(CorpusProposer(SuffixTrie([])), [10])) == 0


def test_the_file(tmp_path):
    path = tmp_path / "corpus.npz"
    save_corpus(path, (np.array(sequence) for sequence in SEQUENCES))
    assert load_corpus(path) == sorted(map(tuple, SEQUENCES))
    save_corpus(tmp_path / "again.npz", SEQUENCES[::-1])
    assert sorted(load_corpus(tmp_path / "again.npz")) == load_corpus(path)
    save_corpus(tmp_path / "empty.npz", [])
    assert load_corpus(tmp_path / "empty.npz") == []


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "corpus.npz"
    with pytest.raises(DataError, match="corpus.npz: cannot be read"):
        load_corpus(path)
    save_corpus(path, SEQUENCES)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(path)
    np.savez(path, token_ids=np.arange(4), lengths=np.array([3]))
    with pytest.raises(DataError, match="times"):
        load_corpus(path)
    np.savez(path, token_ids=np.arange(4), lengths=np.array([3]), times=np.array([1]))
    with pytest.raises(DataError, match="4 token ids in 1 sequences of 3"):
        load_corpus(path)


@pytest.mark.parametrize("wrong", [{"num_speculative_tokens": 0}, {"max_nodes": 0},
                                   {"branches": 17}, {"min_path_prob": float("nan")}])
def test_settings_have_ranges(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CorpusConfig(**wrong)


# How far it carries: the synthetic world's sentences, by words, held out

class Replaying(FakeRuntime):
    """Writes a given text; where the path left it, nonsense."""

    def scores(self, path):
        written = path[self.prompt_length:]
        row = np.zeros(self.config.text.vocab_size, np.float32)
        follows = written == self.text[:len(written)] and len(written) < len(self.text)
        row[self.text[len(written)] if follows else 0] = 1.0
        return row, int(row.argmax()), (0, 0)


def replay(proposer, texts, vocab_size):
    runtime, total = Replaying(vocab_size=2), SpeculationStats()
    runtime.config.text.vocab_size = vocab_size
    decoder = SpeculativeDecoder(runtime, proposer, STOP, 60)
    for text in texts:
        runtime.text = text
        step = runtime.prefill(np.array([2, 3]))
        written = decoder.write(PromptContext(step), GreedyRule(), Deadline.never())
        assert written.token_ids == text
        total.add(written.stats)
    return total


@pytest.fixture(scope="module")
def world():
    """Sentences of 1,200 scenes as word ids and the two stop tokens; two thirds to learn from."""
    vocabulary = {}
    texts = []
    for seed in range(1200):
        words = sample_sentence(sample_scene(seed)).replace(".", " .").split()
        ids = [vocabulary.setdefault(word, 5 + len(vocabulary)) for word in words]
        texts.append((*ids, COT_END, STOP))
    return texts[:800], texts[800:], 5 + len(vocabulary)


def test_tokens_per_pass_on_the_worlds_sentences(world):
    """Measured in blocks of 4, 8 and 16: 3.06, 4.24, 5.25. On 1,181 texts of the real model an
    n-gram back-off made 2.71, 3.71, 4.35; here 88 % of the held-out sentences were learnt from."""
    learnt, held_out, vocab_size = world
    trie = SuffixTrie(learnt)
    measured = []
    for block in (4, 8, 16):
        config = CorpusConfig(num_speculative_tokens=block - 1, max_nodes=block - 1,
                              min_path_prob=0.0)
        measured.append(replay(CorpusProposer(trie, config), held_out, vocab_size)
                        .tokens_per_pass)
    assert measured == pytest.approx([3.06, 4.24, 5.25], abs=0.15), measured
    assert replay(NoProposer(), held_out[:50], vocab_size).tokens_per_pass == 1.0


def test_a_tree_of_as_many_tokens_carries_no_less_far(world):
    learnt, held_out, vocab_size = world
    trie, held_out = SuffixTrie(learnt), held_out[:200]
    by_branches = [replay(CorpusProposer(trie, CorpusConfig(15, 15, branches, 0.0)), held_out,
                          vocab_size).tokens_per_pass for branches in (1, 4)]
    assert by_branches[1] > by_branches[0] + 0.3, by_branches
