"""Drafting from a corpus of reasoning texts: a suffix trie with back-off, no network.

Reasoning is templated, so what followed the longest known ending of the text is a good guess of
what follows now. Knows token ids alone; the sequences carry their stop tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Sequence
from zipfile import BadZipFile

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ConfigError, DataError
from .proposer import Commit, DraftContext, PromptContext
from .token_tree import ROOT, TokenTree

BEGIN, END = -1, -2     # around each sequence; never proposed
KEPT_PREDICTIONS = 16   # of each context


@dataclass(frozen=True)
class CorpusConfig:
    """How far and how broadly the corpus is followed."""

    num_speculative_tokens: int = 7     # deepest draft; a pass is over one more
    max_nodes: int = 7                  # draft tokens of one round
    branches: int = 1                   # continuations tried behind each token; 1: a chain
    min_path_prob: float = 0.02         # a less likely token costs more than it saves

    def __post_init__(self) -> None:
        problems = [f"{name}: given {getattr(self, name)}, expected 1 .. {high}"
                    for name, high in (("num_speculative_tokens", 256), ("max_nodes", 1024),
                                       ("branches", KEPT_PREDICTIONS))
                    if not 1 <= getattr(self, name) <= high]
        if not 0.0 <= self.min_path_prob <= 1.0:
            problems.append(f"min_path_prob: given {self.min_path_prob}, expected 0 .. 1")
        if problems:
            raise ConfigError(problems)


class SuffixTrie:
    """What follows every stretch of up to `order` tokens in a corpus.

    A state is a known stretch; `link` leads to the same one without its first token. The same
    sequences give the same trie, whatever their order.
    """

    ROOT = 0        # the empty stretch

    def __init__(self, sequences: Iterable[Sequence[int]], order: int = 8):
        """
        Args:
            sequences: token ids, each with its stop tokens.
            order: longest stretch, the beginning of the text counted as a token.
        """
        self._order = order
        self._child: dict[tuple[int, int], int] = {}
        self._counts: list[Counter[int]] = [Counter()]
        self._links: list[int] = [self.ROOT]
        self._predictions: dict[int, tuple[tuple[int, float], ...]] = {}
        distinct = Counter(tuple(int(i) for i in sequence) for sequence in sequences)
        for sequence, times in sorted(distinct.items()):
            self._insert((BEGIN, *sequence, END), times)
        self._link_states()
        self._totals = [counts.total() for counts in self._counts]
        for state in range(len(self)):      # now, not in the first cycles
            self.predictions(state)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def begin(self) -> int:
        """The state before the first token of a text."""
        return self._child.get((self.ROOT, BEGIN), self.ROOT)

    def advance(self, state: int, token_id: int) -> int:
        """The longest known stretch that ends the text after one more token."""
        while (state, token_id) not in self._child:
            if state == self.ROOT:
                return self.ROOT
            state = self._links[state]
        return self._child[state, token_id]

    def predictions(self, state: int) -> tuple[tuple[int, float], ...]:
        """Tokens that may follow, END among them, and their probabilities, likeliest first."""
        known = self._predictions.get(state)
        if known is None:
            candidates = {token for token, _ in self._counts[state].most_common(KEPT_PREDICTIONS)}
            if state != self.ROOT:
                candidates.update(token for token, _ in self.predictions(self._links[state]))
            ranked = sorted(((token, self._prob(state, token)) for token in candidates),
                            key=lambda entry: (-entry[1], entry[0]))
            known = self._predictions[state] = tuple(ranked[:KEPT_PREDICTIONS])
        return known

    def _prob(self, state: int, token: int) -> float:
        """Interpolated over ever shorter stretches (Witten-Bell)."""
        prob, behind = 0.0, [state]
        while behind[-1] != self.ROOT:
            behind.append(self._links[behind[-1]])
        for shorter in reversed(behind):
            counts, total = self._counts[shorter], self._totals[shorter]
            kinds = len(counts) if shorter != self.ROOT else 0
            prob = (counts.get(token, 0) + kinds * prob) / (total + kinds)
        return prob

    def _insert(self, sequence: tuple[int, ...], times: int) -> None:
        last = len(sequence) - 1
        for start in range(last):       # END alone is no stretch
            state, stop = self.ROOT, min(start + self._order, last)
            for token in sequence[start:stop]:
                self._count(state, token, times)
                state = self._child_of(state, token)
            self._count(state, sequence[stop], times)

    def _count(self, state: int, token: int, times: int) -> None:
        if token != BEGIN:
            self._counts[state][token] += times

    def _child_of(self, state: int, token: int) -> int:
        child = self._child.setdefault((state, token), len(self._counts))
        if child == len(self._counts):
            self._counts.append(Counter())
            self._links.append(self.ROOT)
        return child

    def _link_states(self) -> None:
        """A parent has a lower number than its child, so its link is there first."""
        for (state, token), child in self._child.items():
            if state != self.ROOT:
                self._links[child] = self._child[self._links[state], token]


class CorpusProposer:
    """Drafts what the corpus says next."""

    name = "corpus"
    origin = TokenOrigin.CORPUS
    runs_network = False

    def __init__(self, trie: SuffixTrie, config: CorpusConfig = CorpusConfig()):
        self._trie, self._config = trie, config
        self._state = trie.begin

    def reset(self, prompt: PromptContext) -> None:
        """See Proposer."""
        self._state = self._trie.begin

    def observe(self, commit: Commit) -> None:
        """See Proposer."""
        for token_id in commit.token_ids:
            self._state = self._trie.advance(self._state, token_id)

    def propose(self, context: DraftContext) -> TokenTree:
        """See Proposer. Best first: the next token is always the likeliest to be reached."""
        config = self._config
        deepest = min(config.num_speculative_tokens, context.depth)
        nodes: list[tuple[int, int, float]] = []            # token, parent, probability
        frontier = self._behind(self._state, ROOT, 1.0, 0) if deepest > 0 else []
        heapq.heapify(frontier)
        while frontier and len(nodes) < min(config.max_nodes, context.budget):
            path, depth, token_id, prob, parent, state = heapq.heappop(frontier)
            if -path < config.min_path_prob:
                break
            nodes.append((token_id, parent, prob))
            if depth + 1 < deepest:
                following = self._trie.advance(state, token_id)
                for entry in self._behind(following, len(nodes) - 1, -path, depth + 1):
                    heapq.heappush(frontier, entry)
        return self._tree(nodes)

    def _behind(self, state: int, parent: int, path_prob: float, depth: int
                ) -> list[tuple[float, int, int, float, int, int]]:
        """Entries of the frontier: the likeliest of them sorts first."""
        likeliest = self._trie.predictions(state)[:self._config.branches]
        return [(-path_prob * prob, depth, token_id, prob, parent, state)
                for token_id, prob in likeliest if token_id != END]

    def _tree(self, nodes: list[tuple[int, int, float]]) -> TokenTree:
        count = len(nodes)
        token_ids, parents, probs = zip(*nodes) if nodes else ((), (), ())
        return TokenTree(token_ids, parents, (self.origin,) * count, probs, (None,) * count)


def save_corpus(path: Path, sequences: Iterable[Sequence[int]]) -> None:
    """Write sequences of token ids; each distinct one once, with its number.

    Args:
        path: a new `.npz`.
        sequences: token ids, each with its stop tokens.
    """
    distinct = sorted(Counter(tuple(int(i) for i in s) for s in sequences).items())
    tokens = [token for sequence, _ in distinct for token in sequence]
    with open(path, "wb") as file:
        np.savez_compressed(file, token_ids=np.array(tokens, np.int32),
                            lengths=np.array([len(s) for s, _ in distinct], np.int32),
                            times=np.array([times for _, times in distinct], np.int32))


def load_corpus(path: Path) -> list[tuple[int, ...]]:
    """The sequences of a file of `save_corpus`, repeated ones repeatedly.

    Raises:
        DataError: missing, damaged or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            token_ids, lengths, times = (file[name] for name in ("token_ids", "lengths", "times"))
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(f"corpus {path}: cannot be read ({type(error).__name__}: {error}), "
                        f"expected a .npz with token_ids, lengths and times") from error
    sound = (lengths.shape == times.shape and min(lengths.min(initial=1), times.min(initial=1)) > 0
             and lengths.sum() == len(token_ids) and token_ids.min(initial=0) >= 0)
    if not sound:
        raise DataError(f"corpus {path}: given {len(token_ids)} token ids in {len(lengths)} "
                        f"sequences of {int(lengths.sum())}, expected lengths that fit")
    parts = np.split(token_ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
    return [tuple(part.tolist()) for part, n in zip(parts, times) for _ in range(n)]
