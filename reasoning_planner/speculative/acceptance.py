"""Which draft tokens the target accepts, and the token it writes itself: functions of values.

Greedy acceptance reproduces the target's argmax text, sampled acceptance its processed
distribution; both for trees, of which a chain is one. Knows no runtime, no cache and no proposer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import numpy as np

from ..datatypes import TokenOrigin
from ..errors import ConfigError, ModelError
from ..runtimes.base import Step
from .token_tree import ROOT, TokenTree, chain

PARTIAL_SORT = 256      # likeliest tokens sorted before the whole row is


@dataclass(frozen=True)
class Accepted:
    """What one verification pass commits.

    Attributes:
        nodes: the accepted path, from the root down.
        token_id: the target's own token behind it.
        rejected: whether draft tokens stood in that token's place: it is a recovered one.
    """

    nodes: tuple[int, ...]
    token_id: int
    rejected: bool


class AcceptanceRule(Protocol):
    """One way to accept.

    Attributes:
        name: for reports.
        lossless: whether the text is distributed as the target alone would write it.
        needs_logits: whether `Step.logits` must be there.
    """

    name: str
    lossless: bool
    needs_logits: bool

    def accept(self, tree: TokenTree, step: Step) -> Accepted:
        """Row 0 of `step` scores what follows the last committed token, row i + 1 node i."""


def accept_greedily(tree: TokenTree, target_ids: Sequence[int]) -> Accepted:
    """Follow the target's argmax through the tree.

    Args:
        tree: n nodes.
        target_ids: (n + 1,), argmax behind the last committed token, then behind each node.
    """
    nodes: list[int] = []
    place, children = ROOT, tree.children
    while True:
        wanted = int(target_ids[place + 1])
        for node in children.get(place, ()):
            if tree.token_ids[node] == wanted:
                break
        else:
            return Accepted(tuple(nodes), wanted, place in children)
        nodes.append(node)
        place = node


def accept_sampled(tree: TokenTree, target_probs: Sequence[np.ndarray],
                   generator: np.random.Generator) -> Accepted:
    """Multi-round rejection sampling down the tree: distributed as the target's own samples.

    Args:
        tree: n nodes.
        target_probs: n + 1 rows (V,), p behind the last committed token, then behind each node.
            Only the rows of the accepted path are asked for.
        generator: source of randomness; the same seed gives the same tokens.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1, for each child in turn as in
        SpecInfer, Miao et al. 2023, arXiv:2305.09781, Algorithm 2.
    """
    nodes: list[int] = []
    place, children = ROOT, tree.children
    while True:
        offered = children.get(place, ())
        node, p = try_children(tree, offered, target_probs[place + 1], generator)
        if node is None:
            return Accepted(tuple(nodes), draw(p, generator), bool(offered))
        nodes.append(node)
        place = node


def try_children(tree: TokenTree, offered: Sequence[int], p: np.ndarray,
                 generator: np.random.Generator) -> tuple[int | None, np.ndarray]:
    """One level: brothers in turn, each against what the rejections before it left of p.

    Returns:
        The accepted node and p as it met it; None and the distribution to recover from.
    """
    for node in offered:
        token_id, q = tree.token_ids[node], tree.drawn_from[node]
        drawn_with = 1.0 if q is None else q[token_id]
        if generator.random() * drawn_with < p[token_id]:
            return node, p
        p = residual(p, token_id, q)
    return None, p


def residual(p: np.ndarray, token_id: int, q: np.ndarray | None) -> np.ndarray:
    """norm(max(p - q, 0)) after a rejection.

    Args:
        p: (V,), sums to 1.
        token_id: the rejected token.
        q: (V,) it was drawn from; None where it was chosen: all of q is on it.
    """
    if q is None:
        rest = p.copy()
        rest[token_id] = 0.0
    else:
        rest = np.maximum(p - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0.0 else p     # p = q: only rounding brought us here


def draw(p: np.ndarray, generator: np.random.Generator) -> int:
    """A token id from p (V,), which need not be normalised."""
    cumulative = np.cumsum(p)
    place = cumulative.searchsorted(generator.random() * cumulative[-1], side="right")
    return int(place) if place < len(p) else int(np.flatnonzero(p)[-1])


def rejection_sample(draft_token_ids: np.ndarray, draft_probs: np.ndarray,
                     target_probs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Accept a prefix of the draft so that the output follows the target distribution.

    Args:
        draft_token_ids: (K,) int64, proposed by the draft.
        draft_probs: (K, V) float32, q; rows sum to 1.
        target_probs: (K + 1, V) float32, p; row K scores the bonus token.
        generator: source of randomness; the same seed gives the same tokens.
    Returns:
        (n + 1,) int64: n accepted tokens and one recovered or bonus token, 0 <= n <= K.
    Raises:
        ValueError: shapes disagree, or a row does not sum to 1 within 1e-4.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    count, vocab_size = len(draft_token_ids), target_probs.shape[-1]
    if draft_probs.shape != (count, vocab_size) or target_probs.shape != (count + 1, vocab_size):
        raise ValueError(f"given {count} draft tokens, q {draft_probs.shape} and p "
                         f"{target_probs.shape}, expected q (K, V) and p (K + 1, V)")
    for name, rows in (("q", draft_probs), ("p", target_probs)):
        sums = rows.sum(axis=1, dtype=np.float64)
        if not (np.abs(sums - 1.0) <= 1e-4).all():
            raise ValueError(f"{name}: given rows with the sums {sums.tolist()}, expected 1")
    tree = chain(draft_token_ids, TokenOrigin.ROUTINE, drawn_from=tuple(draft_probs))
    accepted = accept_sampled(tree, target_probs, generator)
    return np.array([*(tree.token_ids[node] for node in accepted.nodes), accepted.token_id])


@dataclass(frozen=True)
class SamplingConfig:
    """How logits become the distribution that is sampled. The defaults are Alpamayo's."""

    temperature: float = 0.6
    top_p: float = 0.98

    def __post_init__(self) -> None:
        problems = []
        if not 0.01 <= self.temperature <= 10.0:
            problems.append(f"temperature: given {self.temperature!r}, expected 0.01 .. 10 "
                            f"(greedy decoding is a rule of its own)")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p: given {self.top_p!r}, expected 0 < top_p <= 1")
        if problems:
            raise ConfigError(problems)


def processed_probs(logits: np.ndarray, sampling: SamplingConfig,
                    masked_ids: range = range(0)) -> np.ndarray:
    """The target distribution p: mask, then temperature, then top_p, in Hugging Face's order.

    Args:
        logits: (V,) float32.
        masked_ids: the trajectory bins, never written as text.
    Returns:
        (V,) float64, sums to 1.
    Raises:
        ModelError: the logits have no largest one.
    """
    scaled = np.array(logits, dtype=np.float64)
    scaled[masked_ids.start:masked_ids.stop] = -np.inf
    largest = scaled.max()
    if not np.isfinite(largest):
        raise ModelError(f"logits: given {largest} as the largest, expected a number")
    probs = np.exp((scaled - largest) / sampling.temperature)
    probs /= probs.sum()
    if sampling.top_p == 1.0:
        return probs
    kept = _nucleus(probs, sampling.top_p)
    truncated = np.zeros_like(probs)
    truncated[kept] = probs[kept]
    return truncated / truncated.sum()


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Ids of the likeliest tokens, as few as reach top_p together.

    Of 155,697 ids, sorting all takes 25 ms on one core, finding and sorting 256 takes 0.9 ms.
    """
    if len(probs) > 2 * PARTIAL_SORT:
        top = np.argpartition(-probs, PARTIAL_SORT)[:PARTIAL_SORT]
        if probs[top].sum() >= top_p:
            return _smallest_prefix(top, probs, top_p)
    return _smallest_prefix(np.arange(len(probs)), probs, top_p)


def _smallest_prefix(ids: np.ndarray, probs: np.ndarray, top_p: float) -> np.ndarray:
    ids = ids[np.argsort(-probs[ids], kind="stable")]
    before = np.cumsum(probs[ids]) - probs[ids]
    return ids[before < top_p]


class ProcessedRows:
    """`processed_probs` of each row, worked out when it is asked for."""

    def __init__(self, logits: np.ndarray, sampling: SamplingConfig, masked_ids: range):
        self._logits, self._sampling, self._masked_ids = logits, sampling, masked_ids

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> np.ndarray:
        return processed_probs(self._logits[row], self._sampling, self._masked_ids)


class GreedyRule:
    """The target's argmax, token for token."""

    name, lossless, needs_logits = "greedy", True, False

    def accept(self, tree: TokenTree, step: Step) -> Accepted:
        """See AcceptanceRule."""
        return accept_greedily(tree, step.token_ids)


class SamplingRule:
    """The target's processed distribution. One object a text: it holds the randomness."""

    name, lossless, needs_logits = "sampling", True, True

    def __init__(self, sampling: SamplingConfig, masked_ids: range,
                 generator: np.random.Generator):
        self._sampling, self._masked_ids, self._generator = sampling, masked_ids, generator

    def accept(self, tree: TokenTree, step: Step) -> Accepted:
        """See AcceptanceRule."""
        assert step.logits is not None, "sampling needs the logits of every pass"
        rows = ProcessedRows(step.logits, self._sampling, self._masked_ids)
        return accept_sampled(tree, rows, self._generator)
