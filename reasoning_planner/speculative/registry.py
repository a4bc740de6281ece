"""Proposers by name: what a configuration may ask for.

A new proposer is a file and a line of PROPOSERS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Callable

from ..errors import ConfigError
from ..runtimes.draft_factory import create_draft
from .block_draft_proposer import BlockDraftConfig, BlockDraftProposer
from .corpus_proposer import CorpusConfig, CorpusProposer, SuffixTrie, load_corpus
from .cost_curve import CostCurve
from .merging_proposer import MergingProposer
from .proposer import NoProposer, Proposer
from .temporal_proposer import TemporalProposer


@dataclass(frozen=True)
class ProposerConfig:
    """Which proposers draft, and how far."""

    names: tuple[str, ...] = ("corpus", "temporal")     # several are merged, the better first
    corpus: str = ""                    # file of `save_corpus`
    draft: str = ""                     # release of train-draft
    checkpoint: str = ""                # the target it was trained on
    draft_runtime: str = "ort"
    draft_threads: int = 0              # of its engine; 0: its own choice
    draft_provider: str = "cpu"         # where "torch" computes, cpu or cuda
    corpus_order: int = 8               # longest stretch of text looked up
    num_speculative_tokens: int = 7     # deepest draft
    max_nodes: int = 7                  # draft tokens of one proposer's tree
    branches: int = 1                   # continuations behind each token; 1: a chain
    costs: CostCurve = field(default_factory=CostCurve)     # of the engine at hand

    def __post_init__(self) -> None:
        problems = [f"names: given {name!r}, expected some of {', '.join(PROPOSERS)}"
                    for name in self.names if name not in PROPOSERS]
        if not self.names:
            problems.append("names: given none, expected \"none\" for target-only decoding")
        if "corpus" in self.names and not self.corpus:
            problems.append("corpus: given none, expected a file")
        if "flat_rope" in self.names and not (self.draft and self.checkpoint):
            problems.append("draft, checkpoint: given none, expected two folders")
        if not 1 <= self.corpus_order <= 64:
            problems.append(f"corpus_order: given {self.corpus_order}, expected 1 .. 64")
        if problems:
            raise ConfigError(problems)


def _corpus(config: ProposerConfig) -> CorpusProposer:
    path = Path(config.corpus)
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    return CorpusProposer(_trie(path, changed_ns, config.corpus_order), CorpusConfig(
        config.num_speculative_tokens, config.max_nodes, config.branches))


@lru_cache(maxsize=2)
def _trie(path: Path, changed_ns: int, order: int) -> SuffixTrie:
    """One for all proposers of a corpus: it does not change once it is made."""
    return SuffixTrie(load_corpus(path), order)


def _temporal(config: ProposerConfig) -> TemporalProposer:
    return TemporalProposer(config.num_speculative_tokens)


def _flat_rope(config: ProposerConfig) -> BlockDraftProposer:
    draft = create_draft(config.draft_runtime, Path(config.draft), Path(config.checkpoint),
                         threads=config.draft_threads, provider=config.draft_provider)
    return BlockDraftProposer(draft, BlockDraftConfig(config.num_speculative_tokens))


PROPOSERS: dict[str, Callable[[ProposerConfig], Proposer]] = {
    "none": lambda config: NoProposer(),
    "corpus": _corpus,
    "temporal": _temporal,
    "flat_rope": _flat_rope,
}


def create_proposer(config: ProposerConfig) -> Proposer:
    """The proposer a configuration names; several names make one that merges them.

    Raises:
        ConfigError, DataError: a value is out of range, a file missing or damaged.
    """
    proposers = [PROPOSERS[name](config) for name in config.names]
    if len(proposers) == 1:
        return proposers[0]
    return MergingProposer(proposers, config.costs)
