"""Every method the benchmark knows, by name: a new one is one entry of METHODS.

A method is a set of proposers, a block length and an acceptance rule. What it needs (a corpus, a
draft, a previous cycle) decides whether it takes part. A peer is a way to generate with another
library, of which only the names stand here. Knows no clock and no statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ..errors import ConfigError
from ..models.config import ModelConfig
from ..runtimes.draft_base import load_draft_config
from ..runtimes.draft_factory import create_draft
from ..speculative.acceptance import AcceptanceRule, GreedyRule, SamplingConfig, SamplingRule
from ..speculative.block_draft_proposer import BlockDraftConfig
from ..speculative.cost_curve import CostCurve
from ..speculative.drawn_block_proposer import DrawnBlockProposer
from ..speculative.easd import EasdConfig, EasdRule, entropy
from ..speculative.proposer import Proposer
from ..speculative.registry import ProposerConfig, create_proposer
from .bench_scenes import COLD, CONTINUOUS

AUTOREGRESSIVE = "autoregressive"
EASD = "easd_b8"
EASD_PERCENTILE = 90.0         # of entropies on scenes that are not measured
# What a proposer of the registry drafts from; one that is not named here needs nothing.
SOURCES = {"corpus": "corpus", "flat_rope": "draft", "temporal": "previous cycle"}


@dataclass(frozen=True)
class Parts:
    """What there is to draft with.

    Attributes:
        checkpoint: folder of the target.
        model: its configuration.
        corpus: file of `save_corpus`; None: there is none.
        draft: release of train-draft with its graph; None: there is none.
        draft_runtime: engine of the draft.
        costs: of the target's engine.
        easd: thresholds of entropy-aware acceptance.
        kind: COLD or CONTINUOUS; a cold scene has no previous cycle.
        temperature: 0: greedy.
    """

    checkpoint: Path
    model: ModelConfig
    corpus: Path | None = None
    draft: Path | None = None
    draft_runtime: str = "ort"
    costs: CostCurve = field(default_factory=CostCurve)
    easd: EasdConfig = field(default_factory=EasdConfig)
    kind: str = COLD
    temperature: float = 0.0

    def has(self, source: str) -> bool:
        """Whether one of SOURCES' values is there."""
        return {"corpus": self.corpus is not None, "draft": self.draft is not None,
                "previous cycle": self.kind == CONTINUOUS}[source]


def _sampling(parts: Parts, generator: np.random.Generator) -> AcceptanceRule:
    return SamplingRule(SamplingConfig(parts.temperature), parts.model.tokens.trajectory_bins,
                        generator)


def _easd(parts: Parts, generator: np.random.Generator) -> AcceptanceRule:
    return EasdRule(parts.easd, SamplingConfig(parts.temperature),
                    parts.model.tokens.trajectory_bins, generator)


class EntropyLog(EasdRule):
    """Notes how unsure both models are of each accepted draft token, and vetoes none."""

    def __init__(self, parts: Parts, generator: np.random.Generator):
        super().__init__(parts.easd, SamplingConfig(parts.temperature),
                         parts.model.tokens.trajectory_bins, generator)
        self.seen: list[tuple[float, float]] = []       # nats, of target and draft

    def _vetoes(self, p: np.ndarray, q: np.ndarray | None) -> bool:
        if q is not None:
            self.seen.append((entropy(p), entropy(q)))
        return False


def calibrated_easd(logs: Sequence[EntropyLog]) -> EasdConfig:
    """Thresholds at a percentile of what was seen; the configuration's own without anything."""
    seen = [pair for log in logs for pair in log.seen]
    if not seen:
        return EasdConfig()
    target, draft = np.percentile(np.array(seen), EASD_PERCENTILE, axis=0)
    return EasdConfig(float(target), float(draft))


@dataclass(frozen=True)
class Method:
    """One way to write the reasoning.

    Attributes:
        name: of its rows; those of a family begin alike.
        summary: for readers.
        proposers: of speculative.registry.PROPOSERS, the better first.
        block_length: tokens of a pass over a chain: the last committed one and the draft.
        max_nodes, branches: of one proposer's tree; 0 nodes: as many as a chain has.
        at_least: how many of the proposers must have their source; the others are left out.
        make: builds the proposer; None: from the registry.
        sampled_rule: accepts when sampling.
        only_sampled: whether it means nothing when decoding greedily.
        lossless: whether its texts are distributed as the target's own.
    """

    name: str
    summary: str
    proposers: tuple[str, ...]
    block_length: int = 8
    max_nodes: int = 0
    branches: int = 1
    at_least: int = 1
    make: Callable[[Method, Parts], Proposer] | None = None
    sampled_rule: Callable[[Parts, np.random.Generator], AcceptanceRule] = _sampling
    only_sampled: bool = False
    lossless: bool = True

    def available(self, parts: Parts) -> tuple[str, ...]:
        """Its proposers that have what they draft from."""
        return tuple(name for name in self.proposers
                     if name not in SOURCES or parts.has(SOURCES[name]))

    def obstacle(self, parts: Parts) -> str:
        """Why it cannot take part; empty if it can.

        Raises:
            ModelError: the draft's configuration is damaged.
        """
        if self.only_sampled and parts.temperature == 0.0:
            return "means nothing when decoding greedily"
        found = self.available(parts)
        if len(found) < self.at_least:
            missing = [SOURCES[name] for name in self.proposers if name not in found]
            return f"no {', no '.join(missing)}"
        if self.proposers == ("flat_rope",) and parts.draft is not None:
            block_length = load_draft_config(parts.draft).block_length
            if self.block_length > block_length:
                return f"the draft's block is {block_length}"
        return ""

    def proposer(self, parts: Parts) -> Proposer:
        """A new proposer, without a previous text.

        Raises:
            ConfigError, DataError, ModelError: a file is missing, damaged or foreign.
        """
        return self.make(self, parts) if self.make else _from_registry(self, parts)

    def rule(self, parts: Parts, seed: int) -> AcceptanceRule:
        """How one text is accepted."""
        if parts.temperature == 0.0:
            return GreedyRule()
        return self.sampled_rule(parts, np.random.default_rng(seed))


def _from_registry(method: Method, parts: Parts) -> Proposer:
    return create_proposer(ProposerConfig(
        names=method.available(parts), corpus=str(parts.corpus or ""),
        draft=str(parts.draft or ""), checkpoint=str(parts.checkpoint),
        draft_runtime=parts.draft_runtime, num_speculative_tokens=max(method.block_length - 1, 1),
        max_nodes=method.max_nodes or max(method.block_length - 1, 1),
        branches=method.branches, costs=parts.costs))


def _drawn(method: Method, parts: Parts) -> Proposer:
    assert parts.draft is not None, "a method's obstacle comes first"
    draft = create_draft(parts.draft_runtime, parts.draft, parts.checkpoint)
    return DrawnBlockProposer(draft, parts.model.text.vocab_size, np.random.default_rng(0),
                              parts.temperature, BlockDraftConfig(method.block_length - 1))


def _entries() -> tuple[Method, ...]:
    return (
        Method(AUTOREGRESSIVE, "the target alone, one token a pass", ("none",), 1),
        *(Method(f"corpus_b{b}", f"n-gram back-off over a corpus of texts, block {b}",
                 ("corpus",), b) for b in (4, 8, 16)),
        Method("corpus_tree_b8", "the corpus' two likeliest continuations, up to 15 tokens",
               ("corpus",), 8, max_nodes=15, branches=2),
        *(Method(f"temporal_b{b}", f"the previous cycle's text, block {b}", ("temporal",), b)
          for b in (4, 8, 16)),
        *(Method(f"flat_rope_b{b}", f"the routine reasoner, a FlatRoPE block draft, block {b}",
                 ("flat_rope",), b) for b in (4, 8, 16)),
        *(Method(f"merged_b{b}", f"all proposers in one tree, sized by the measured T(k), up to "
                 f"block {b}", ("flat_rope", "corpus", "temporal"), b, at_least=2)
          for b in (8, 16)),
        Method("flat_rope_drawn_b8", "the block draft with drawn tokens", ("flat_rope",), 8,
               make=_drawn, only_sampled=True),
        Method(EASD, "drawn drafts, accepted entropy-aware: not lossless", ("flat_rope",), 8,
               make=_drawn, sampled_rule=_easd, only_sampled=True, lossless=False),
    )


METHODS: dict[str, Method] = {method.name: method for method in _entries()}


@dataclass(frozen=True)
class Peer:
    """One way to generate with Hugging Face transformers; see bench_peers.

    Attributes:
        name, summary: of its row.
        method: ours whose proposer drafts; None: the library drafts, or nobody.
        options: of its `generate`.
    """

    name: str
    summary: str
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def obstacle(self, parts: Parts) -> str:
        """Why it cannot take part; empty if it can."""
        return METHODS[self.method].obstacle(parts) if self.method else ""

    def proposer(self, parts: Parts) -> Proposer | None:
        """What drafts for it; None: the library itself."""
        return METHODS[self.method].proposer(parts) if self.method else None


GENERATE = "hf_generate"
ASSISTED = {"prompt_lookup_num_tokens": 7}      # what makes the library draft and verify
PEERS: dict[str, Peer] = {peer.name: peer for peer in (
    Peer(GENERATE, "Hugging Face generate"),
    Peer("hf_prompt_lookup", "Hugging Face assisted generation, prompt lookup", None, ASSISTED),
    Peer("hf_assisted_corpus", "Hugging Face assisted generation with our corpus proposer",
         "corpus_b8", ASSISTED),
    Peer("hf_assisted_flat_rope", "Hugging Face assisted generation with our block draft",
         "flat_rope_b8", ASSISTED),
)}


def select(asked: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Names of METHODS and of PEERS that were asked for; None: all.

    A name stands for itself and for its family: "corpus" for all that begin with "corpus_".

    Raises:
        ConfigError: a name that stands for nothing.
    """
    known = [*METHODS, *PEERS]
    if asked is None:
        return list(METHODS), list(PEERS)
    wrong = [name for name in asked
             if not any(k == name or k.startswith(f"{name}_") for k in known)]
    if wrong:
        raise ConfigError([f"--methods: given {', '.join(wrong)}, expected some of "
                           f"{', '.join(known)}, or how several of them begin"])
    chosen = {k for k in known for name in asked if k == name or k.startswith(f"{name}_")}
    return [name for name in METHODS if name in chosen], [n for n in PEERS if n in chosen]
