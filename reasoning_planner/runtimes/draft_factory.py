"""Draft runtimes by name; an engine that is absent is no obstacle to the others."""

from __future__ import annotations

from pathlib import Path

from .draft_base import DraftRuntime
from .factory import REMEDIES
from ..errors import MissingDependencyError, ModelError

RUNTIMES = ("ort", "torch")


def create_draft(name: str, folder: Path, checkpoint: Path, *, threads: int = 0,
                 capacity: int | None = None, provider: str = "cpu") -> DraftRuntime:
    """Load a draft into an engine.

    Args:
        name: one of RUNTIMES; "ort" needs what `export_draft` wrote into the folder.
        folder: a release of train-draft.
        checkpoint: directory of the target; its runtime is to be made with `hidden_layers` =
            `config.feature_layers` of what is returned.
        threads: of the engine; 0: its own choice.
        capacity: context tokens it can hold; None: as many as the target's cache.
        provider: where "torch" computes, "cpu" or "cuda".
    Raises:
        ModelError: unknown name, or files that are missing, damaged or foreign.
        MissingDependencyError: the engine is not installed, or sees no such device.
    """
    if name not in RUNTIMES:
        raise ModelError(f"draft runtime: given {name!r}, expected one of {', '.join(RUNTIMES)}")
    try:
        if name == "ort":
            from .ort_draft import OrtDraft

            return OrtDraft(folder, checkpoint, threads=threads, capacity=capacity)
        from .torch_draft import TorchDraft
    except ImportError as error:
        raise MissingDependencyError(f"draft runtime {name}: {error.name} is not installed: "
                                     f"{REMEDIES[name]}") from error
    return TorchDraft.load(folder, checkpoint, capacity, device=provider)
