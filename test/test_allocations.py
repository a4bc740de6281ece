"""A round of the verify loop allocates nothing of the size of a layer's keys or values."""

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="runs the graphs")
pytest.importorskip("tqdm")

from reasoning_planner.datatypes import Deadline
from reasoning_planner.evaluation.bench_loop import read_prompt
from reasoning_planner.evaluation.bench_setup import Bench
from reasoning_planner.evaluation.lossless import CHAIN, TREE, Shaped, UselessProposer
from reasoning_planner.speculative.acceptance import GreedyRule
from reasoning_planner.speculative.decoder import SpeculativeDecoder
from reasoning_planner.speculative.selection import select

SEED = 10_881_000


class Counted:
    """A runtime whose every call tells the most memory that numpy held during it, in bytes."""

    def __init__(self, runtime):
        self._runtime, self.peaks = runtime, []
        self.config = runtime.config

    length = property(lambda self: self._runtime.length)
    capacity = property(lambda self: self._runtime.capacity)

    def _watched(self, call, *args, **options):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = call(*args, **options)
        self.peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return result

    def extend(self, *args, **options):
        return self._watched(self._runtime.extend, *args, **options)

    def keep(self, *args):
        return self._watched(self._runtime.keep, *args)

    def crop(self, *args):
        return self._watched(self._runtime.crop, *args)


@pytest.fixture(scope="module")
def bench():
    return Bench.load("nano", threads=1, max_new_tokens=40)


@pytest.fixture(scope="module")
def prompt(bench):
    scene, = bench.source.cold(1, SEED)
    return read_prompt(bench.runtime, scene, False)


def largest(bench, prompt, proposer):
    """Of all calls of one text, once each size of a pass is known."""
    length = bench.runtime.length
    for warm in (True, False):
        counted = Counted(bench.runtime)
        decoder = SpeculativeDecoder(counted, proposer,
                                     bench.tokenizer.special.traj_future_start, 40)
        tracemalloc.start()
        try:
            decoder.write(prompt, GreedyRule(), Deadline.never())
        finally:
            tracemalloc.stop()
            bench.runtime.crop(length)
    assert len(counted.peaks) >= 2
    return max(counted.peaks)


def proposers(bench):
    vocabulary, checkpoint = bench.runtime.config.text.vocab_size, bench.parts.checkpoint
    chosen = [select(name, checkpoint).create(15, "ort", None, 1)
              for name in ("corpus", "temporal", "flat_rope", "merged")]
    useless = UselessProposer(vocabulary, np.random.default_rng(0))
    return [Shaped(one, 12, shape, vocabulary)
            for one in (*chosen, useless) for shape in (CHAIN, TREE)]


def test_no_round_allocates_a_layers_cache(bench, prompt):
    text, capacity = bench.runtime.config.text, bench.runtime.capacity
    one_layers_keys = capacity * text.num_kv_heads * text.head_dim * 4
    for proposer in proposers(bench):
        assert largest(bench, prompt, proposer) < one_layers_keys / 2


def test_a_copied_cache_is_noticed(bench, prompt, monkeypatch):
    text, capacity = bench.runtime.config.text, bench.runtime.capacity
    crop = type(bench.runtime).crop

    def copying(self, length):
        buffer = next(iter(self._cache.values()))
        buffer[:] = buffer.copy()
        crop(self, length)

    monkeypatch.setattr(type(bench.runtime), "crop", copying)
    found = largest(bench, prompt, proposers(bench)[0])
    assert found >= capacity * text.num_kv_heads * text.head_dim * 4
