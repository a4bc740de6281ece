"""What drafts a checkpoint's reasoning: a setting's word, held against the files that are there.

A checkpoint may bring a corpus of texts (CORPUS_NAME) and a trained draft (DRAFT_FOLDER); the text
of the cycle before is always there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import PROPOSERS
from ..errors import ModelError
from ..runtimes.draft_base import load_draft_config
from ..runtimes.engine_manifest import find_engines
from .cost_curve import CostCurve, load_cost_curve
from .proposer import NoProposer, Proposer
from .registry import ProposerConfig, create_proposer

CORPUS_NAME, DRAFT_FOLDER = "corpus.npz", "draft"
# The better first: a token proposed by several counts as the first one's.
_MERGED_ORDER = ("corpus", "flat_rope", "temporal")
# Until `bench --calibrate` has measured: nano's draft costs about a target pass over one token.
_UNMEASURED = CostCurve(draft_ms=1.0)
_FILES = {"corpus": CORPUS_NAME, "flat_rope": DRAFT_FOLDER}
_MADE_BY = {"corpus": "python -m reasoning_planner.training.corpus",
            "flat_rope": "reasoning-planner train-draft"}


@dataclass(frozen=True)
class Selection:
    """What a setting comes to.

    Attributes:
        names: of registry.PROPOSERS, several are merged; empty: token by token.
        hidden_layers: of the target, whose outputs the draft reads.
    """

    checkpoint: Path
    names: tuple[str, ...] = ()
    hidden_layers: tuple[int, ...] = ()

    @property
    def reads_prompt(self) -> bool:
        """Whether a proposer asks for the prompt's ids."""
        return "flat_rope" in self.names

    def create(self, num_speculative_tokens: int, runtime: str, graphs: Path | None,
               threads: int, provider: str = "cpu") -> Proposer:
        """The proposer.

        Args:
            num_speculative_tokens: deepest draft for one pass of the target.
            runtime, graphs, threads, provider: of the target, see runtimes.factory.create_runtime;
                beside TensorRT the draft runs on ONNX Runtime.
        Raises:
            ModelError, DataError: a file is damaged or foreign.
        """
        if not self.names:
            return NoProposer()
        on_torch = runtime == "torch"
        return create_proposer(ProposerConfig(
            names=self.names, corpus=str(self.checkpoint / CORPUS_NAME),
            draft=str(self.checkpoint / DRAFT_FOLDER), checkpoint=str(self.checkpoint),
            draft_runtime="torch" if on_torch else "ort", draft_threads=threads,
            draft_provider=provider if on_torch else "cpu", max_nodes=num_speculative_tokens,
            num_speculative_tokens=num_speculative_tokens, costs=self._costs(runtime, graphs)))

    def _costs(self, runtime: str, graphs: Path | None) -> CostCurve:
        """T(k) of the engines in use, by which merged proposers decide how far to draft."""
        if len(self.names) == 1 or runtime == "torch":      # PyTorch has no engine's manifest
            return CostCurve()
        folder = graphs or find_engines(self.checkpoint, runtime) or self.checkpoint
        return load_cost_curve(folder) or _UNMEASURED


def select(choice: str, checkpoint: Path) -> Selection:
    """Hold a choice against a checkpoint's files.

    Args:
        choice: one of config.PROPOSERS; "auto" merges the text before with the corpus, which is
            the fastest on a drive with nano (`reasoning-planner bench`), or with a draft where
            there is no corpus.
    Raises:
        ModelError: the choice is none, or a file it needs is not there, or is damaged.
    """
    if choice not in PROPOSERS:
        raise ModelError(f"proposer: given {choice!r}, expected one of {', '.join(PROPOSERS)}")
    there = {name: (checkpoint / file).exists() for name, file in _FILES.items()}
    if choice in there and not there[choice]:
        raise ModelError(f"proposer {choice}: given a checkpoint without "
                         f"{checkpoint / _FILES[choice]}, expected what "
                         f"`{_MADE_BY[choice]}` writes")
    names = {"auto": _best(there), "none": (),
             "merged": tuple(name for name in _MERGED_ORDER if there.get(name, True))
             }.get(choice, (choice,))
    layers: tuple[int, ...] = ()
    if "flat_rope" in names:
        layers = load_draft_config(checkpoint / DRAFT_FOLDER).feature_layers
    return Selection(checkpoint, names, layers)


def _best(there: dict[str, bool]) -> tuple[str, ...]:
    first = next(((name,) for name in ("corpus", "flat_rope") if there[name]), ())
    return (*first, "temporal")
