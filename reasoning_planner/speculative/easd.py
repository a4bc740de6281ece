"""Entropy-aware acceptance: a training-free rule that is NOT lossless.

After standard acceptance, a draft token is rejected all the same where target and draft are both
unsure and unsure about the same tokens; another token is then drawn from p without it. Only
tokens that were drawn from a distribution have an entropy: chosen ones are accepted as usual.
Source: EASD, arXiv:2512.23765.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..runtimes.base import Step
from .acceptance import Accepted, ProcessedRows, SamplingConfig, draw, residual, try_children
from .token_tree import ROOT, TokenTree


@dataclass(frozen=True)
class EasdConfig:
    """When both models count as unsure; thresholds come as percentiles of a calibration set."""

    target_entropy: float = 1.0     # nats
    draft_entropy: float = 1.0      # nats
    top_n: int = 5                  # likeliest tokens compared
    min_overlap: float = 0.8        # share of them in common

    def __post_init__(self) -> None:
        problems = [f"{name}: given {getattr(self, name)!r}, expected 0 or more"
                    for name in ("target_entropy", "draft_entropy") if getattr(self, name) < 0.0]
        if self.top_n < 1:
            problems.append(f"top_n: given {self.top_n}, expected 1 or more")
        if not 0.0 <= self.min_overlap <= 1.0:
            problems.append(f"min_overlap: given {self.min_overlap}, expected 0 .. 1")
        if problems:
            raise ConfigError(problems)


def entropy(p: np.ndarray) -> float:
    """Of a distribution (V,), in nats."""
    positive = p[p > 0.0]
    return float(-(positive * np.log(positive)).sum())


def both_unsure(p: np.ndarray, q: np.ndarray, config: EasdConfig) -> bool:
    """Whether target p (V,) and draft q (V,) hesitate between the same tokens."""
    if entropy(p) <= config.target_entropy or entropy(q) <= config.draft_entropy:
        return False
    n = min(config.top_n, len(p) - 1)
    common = np.intersect1d(np.argpartition(-p, n)[:n], np.argpartition(-q, n)[:n])
    return len(common) >= config.min_overlap * n


class EasdRule:
    """Sampled acceptance with the veto. One object a text: it holds the randomness."""

    name, lossless, needs_logits = "easd", False, True

    def __init__(self, config: EasdConfig, sampling: SamplingConfig, masked_ids: range,
                 generator: np.random.Generator):
        self._config, self._sampling = config, sampling
        self._masked_ids, self._generator = masked_ids, generator

    def accept(self, tree: TokenTree, step: Step) -> Accepted:
        """See acceptance.AcceptanceRule."""
        assert step.logits is not None, "sampling needs the logits of every pass"
        rows = ProcessedRows(step.logits, self._sampling, self._masked_ids)
        nodes: list[int] = []
        place = ROOT
        while True:
            offered, p = tree.children.get(place, ()), rows[place + 1]
            node, rest = try_children(tree, offered, p, self._generator)
            if node is not None and self._vetoes(p, tree.drawn_from[node]):
                node, rest = None, residual(p, tree.token_ids[node], None)
            if node is None:
                return Accepted(tuple(nodes), draw(rest, self._generator), bool(offered))
            nodes.append(node)
            place = node

    def _vetoes(self, p: np.ndarray, q: np.ndarray | None) -> bool:
        return q is not None and both_unsure(p, q, self._config)
