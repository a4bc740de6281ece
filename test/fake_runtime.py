"""A runtime without a model, for tests of speculation: next-token scores by the visible path.

What the next token is depends a little on every token a position can see, so a wrong mask, a wrong
index or a rejected draft token left in the cache changes the text. A cached key is known by the
whole path it was computed on.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from reasoning_planner.runtimes.base import Step

STOP = 1
BINS = range(2, 4)      # never written, though the logits like them
HIDDEN = 2


class FakeRuntime:
    """See runtimes.base.Runtime. Nothing is encoded and nothing acts.

    Attributes:
        passes: calls of `extend`; computed: tokens in them.
        kv_allocations: how often memory of the whole cache's size was taken.
    """

    name = "fake"

    def __init__(self, vocab_size=24, capacity=160, seed=0, sharpness=3.0, noise=1.0,
                 stop_after=6):
        generator = np.random.default_rng(seed)
        shape = (vocab_size, vocab_size, vocab_size)
        self._table = sharpness * generator.standard_normal(shape)
        self._noise = noise * generator.standard_normal((509, vocab_size))
        self._stop_after = stop_after
        self._known = {}
        self._cached = [None] * capacity
        self.kv_allocations = 1
        self.config = SimpleNamespace(text=SimpleNamespace(vocab_size=vocab_size))
        self.capacity, self.length, self.prompt_length = capacity, 0, 0
        self.passes = self.computed = 0
        self.extended = []

    @property
    def cached(self):
        """Of each cached token, the path it was computed on, itself the last."""
        return list(self._cached[:self.length])

    @property
    def cached_ids(self):
        return [path[-1] for path in self.cached]

    def scores(self, path):
        """(V,) float32 logits behind a path of token ids, the bins not masked."""
        if path not in self._known:
            key = (*path, self.prompt_length)
            row = self._table[path[-2], path[-1]] + self._noise[hash(key) % len(self._noise)]
            row = np.array(row, np.float32)
            row[STOP] += 0.8 * (len(path) - self.prompt_length - self._stop_after)
            row[BINS.start:BINS.stop] += 2.0
            self._known[path] = row, int(self._masked(row).argmax()), _features(path)
        return self._known[path]

    @staticmethod
    def _masked(row):
        masked = row.copy()
        masked[BINS.start:BINS.stop] = -np.inf
        return masked

    def prefill(self, input_ids, features=None, *, logits=False):
        self.length, self.prompt_length = 0, len(input_ids)
        self._known = {}
        self.passes = self.computed = 0
        self.extended = []
        step = self._pass(np.asarray(input_ids), None, None, logits)
        return Step(step.token_ids[-1:], step.top_ids[-1:], step.top_log_probs[-1:],
                    step.hidden_states, step.logits[-1:] if logits else None)

    def extend(self, token_ids, *, indices=None, visible=None, logits=False):
        self.passes += 1
        self.computed += len(token_ids)
        self.extended.append([int(i) for i in token_ids])
        return self._pass(token_ids, indices, visible, logits)

    def _pass(self, token_ids, indices, visible, logits):
        count, past = len(token_ids), self.length
        assert 0 < count <= self.capacity - past, f"{count} tokens behind {past}"
        before = self._cached[past - 1] if past else ()
        rows = []
        for i in range(count):
            seen = range(i + 1) if visible is None else np.flatnonzero(visible[i])
            assert seen[-1] == i, "a token sees itself and nothing behind it"
            path = (*before, *(int(token_ids[j]) for j in seen))
            assert indices is None or indices[i] == len(path) - 1, "index and path disagree"
            self._cached[past + i] = path
            rows.append(self.scores(path) if len(path) > 1 else self.scores((0, *path)))
        self.length += count
        ids = np.array([greedy for _, greedy, _ in rows])
        hidden = np.array([features for _, _, features in rows], np.float32)
        return Step(ids, ids[:, None], np.zeros((count, 1), np.float32), (hidden,),
                    np.array([row for row, _, _ in rows]) if logits else None)

    def crop(self, length):
        assert 0 <= length <= self.length
        self.length = length

    def keep(self, start, nodes):
        assert list(nodes) == sorted(set(nodes)) and start + max(nodes) < self.length
        for place, node in enumerate(nodes):
            self._cached[start + place] = self._cached[start + node]
        self.length = start + len(nodes)

    def require_one_path(self):
        """Every cached key was computed on the tokens before it, and on those alone."""
        ids = tuple(self.cached_ids)
        for place, path in enumerate(self.cached):
            assert path == ids[:place + 1], f"token {place} was computed on {path}"


def _features(path):
    """(HIDDEN,) that tell the path."""
    return len(path), path[-1]


def autoregressive(runtime, prompt, stop_id=STOP, max_new_tokens=40):
    """The reference: one token a pass, greedily, through the stop token; then an unfinished
    text gets one. Returns the token ids."""
    step = runtime.prefill(np.array(prompt))
    token_ids = []
    while len(token_ids) < max_new_tokens:
        token_ids.append(int(step.token_ids[-1]))
        step = runtime.extend(np.array(token_ids[-1:]))
        if token_ids[-1] == stop_id:
            return token_ids
    runtime.extend(np.array([stop_id]))
    return token_ids


def random_prompts(count, vocab_size=24, seed=0, begins=12):
    """Prompts of 2 to 9 tokens, few different endings: texts resemble each other."""
    generator = np.random.default_rng(seed)
    endings = generator.integers(4, vocab_size, (begins, 2))
    return [[*generator.integers(4, vocab_size, generator.integers(0, 8)).tolist(),
             *endings[generator.integers(begins)].tolist()] for _ in range(count)]
