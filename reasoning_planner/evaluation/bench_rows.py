"""From timed texts to rows of bench.json: paired speed-ups with intervals, shares, quantiles.

Texts of a method and of its reference belong to the same scenes, in the same order. Functions of
values; knows no runtime and no page.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import numpy as np

from ..speculative.stats import SpeculationStats
from .bench_runs import DRAFTED, Scores, TimedText, differs_by_tie
from .bench_scenes import CONTINUOUS
from .latency import quantiles

RESAMPLES, BOOTSTRAP_SEED = 4000, 0
TIME_PARTS = ("draft", "verify", "accept", "host")
CYCLES_A_BLOCK = 10         # of a drive are resampled together: neighbours are alike
LEAST_BLOCKS = 5


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        """[low, high], rounded."""
        return [round(self.low, 3), round(self.high, 3)]


def paired_speedup(reference_ms: Sequence[float], ms: Sequence[float], block: int = 1) -> Interval:
    """How many times faster: the reference's time for all scenes over the method's.

    Args:
        reference_ms, ms: (N,) of the same scenes.
        block: neighbours that are resampled together, fewer where that left no LEAST_BLOCKS;
            1 for independent scenes.
    Returns:
        The ratio and its percentile bootstrap interval over scenes.
    """
    times = np.stack([np.asarray(reference_ms, float), np.asarray(ms, float)])      # (2, N)
    block = max(min(block, times.shape[1] // LEAST_BLOCKS), 1)
    starts = range(0, times.shape[1], block)
    sums = np.stack([times[:, start:start + block].sum(axis=1) for start in starts], axis=1)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = generator.integers(sums.shape[1], size=(RESAMPLES, sums.shape[1]))
    ratios = sums[0][drawn].sum(axis=1) / sums[1][drawn].sum(axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Interval(float(times[0].sum() / times[1].sum()), float(low), float(high))


@dataclass(frozen=True)
class RowHead:
    """What a row is about, before anything was measured.

    Attributes:
        method, kind, runtime: the row's name, see bench_scenes, and the engine.
        lossless: whether the method promises the target's own texts.
        temperature: 0: greedy.
        reference: method of the same kind and temperature that the speed-up is against.
    """

    method: str
    kind: str
    runtime: str
    lossless: bool
    temperature: float
    reference: str


@dataclass(frozen=True)
class Agreement:
    """How a method's greedy texts compare with the target's own.

    Attributes:
        exact: texts that are the same, token for token.
        ties: different ones that part at two tokens of equal probability.
        compared: texts.
    """

    exact: int
    ties: int
    compared: int


def agreement(texts: Sequence[TimedText], own: Sequence[TimedText], scores: Sequence[Scores]
              ) -> Agreement:
    """Compare with greedy texts of the same scenes and what the target thinks of them."""
    different = [(a.token_ids, b.token_ids, s.margins) for a, b, s in zip(texts, own, scores)
                 if a.token_ids != b.token_ids]
    ties = sum(differs_by_tie(*entry) for entry in different)
    return Agreement(len(texts) - len(different), ties, len(texts))


def make_row(head: RowHead, texts: Sequence[TimedText], reference: Sequence[TimedText],
             compared: Agreement | None) -> dict[str, Any]:
    """One row of bench.json; the contract's keys first.

    Args:
        compared: None where two draws of one distribution need not be alike.
    """
    stats = added_stats(texts)
    times = [text.total_ms for text in texts]
    block = CYCLES_A_BLOCK if head.kind == CONTINUOUS else 1
    speedup = paired_speedup([text.total_ms for text in reference], times, block)
    times_q = quantiles(times, ("p50", "p95"))
    rounds = [text.stats.passes for text in texts]
    return {
        "method": head.method, "kind": head.kind, "lossless": head.lossless,
        "runtime": head.runtime, "temperature": head.temperature, "scenes": len(texts),
        "acceptance_length": round(stats.acceptance_length, 3),
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "rounds_p50": _whole_quantile(rounds, 50.0), "rounds_p95": _whole_quantile(rounds, 95.0),
        "reasoning_ms_p50": _rounded(times_q["p50"]), "reasoning_ms_p95": _rounded(times_q["p95"]),
        "speedup": round(speedup.value, 3), "speedup_ci95": speedup.as_list(),
        "exact_match_rate": None if compared is None else compared.exact / compared.compared,
        "draft_share": round(draft_share(texts), 4),
        "reference": head.reference, "reasoning_ms_mean": round(float(np.mean(times)), 3),
        "ties": None if compared is None else compared.ties,
        "mismatches": None if compared is None
        else compared.compared - compared.exact - compared.ties,
        "tokens": stats.committed, "passes": stats.passes,
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "draft_failures": stats.draft_failures,
        "time_share": time_share(texts),
        "rounds_histogram": {str(n): count for n, count in sorted(Counter(rounds).items())},
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth],
    }


def added_stats(texts: Iterable[TimedText]) -> SpeculationStats:
    """Counts of all texts."""
    total = SpeculationStats()
    for text in texts:
        total.add(text.stats)
    return total


def draft_share(texts: Iterable[TimedText]) -> float:
    """Share of the committed tokens that a proposer wrote; 0 without any token."""
    origins = [origin for text in texts for origin in text.origins]
    return sum(origin in DRAFTED for origin in origins) / max(len(origins), 1)


def time_share(texts: Sequence[TimedText]) -> dict[str, float]:
    """Shares of the reasoning time; they add up to 1."""
    total = sum(text.total_ms for text in texts)
    return {name: round(sum(getattr(text, f"{name}_ms") for text in texts) / total, 4)
            for name in TIME_PARTS}


def _whole_quantile(counts: Sequence[int], percent: float) -> int:
    """A count that occurred: of whole things no 3.4 are shown."""
    return int(np.percentile(counts, percent, method="inverted_cdf"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
