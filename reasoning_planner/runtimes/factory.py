"""Runtimes by name; the only place that imports one, so that an absent engine is no obstacle."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from .base import Runtime
from ..errors import MissingDependencyError, ModelError

REMEDIES = {"ort": "pip install onnxruntime",
            "torch": "pip install 'reasoning_planner[train]'"}
RUNTIMES = tuple(REMEDIES)


def create_runtime(name: str, checkpoint: Path, *, graphs: Path | None = None, threads: int = 0,
                   capacity: int | None = None, hidden_layers: Sequence[int] = ()) -> Runtime:
    """Load a checkpoint into an engine.

    Args:
        name: one of RUNTIMES.
        checkpoint: directory with config.json and the weights.
        graphs: directory of the export where it is not the checkpoint's ("ort").
        threads: of the engine; 0: its own choice.
        capacity: tokens the cache holds; None: the prompt's images and 512 more.
        hidden_layers: layers whose outputs a draft reads.
    Raises:
        ModelError: unknown name, or files that are missing, damaged or foreign.
        MissingDependencyError: the engine is not installed.
    """
    if name not in RUNTIMES:
        raise ModelError(f"runtime: given {name!r}, expected one of {', '.join(RUNTIMES)}")
    try:
        if name == "ort":
            from .ort_runtime import OrtRuntime

            return OrtRuntime(checkpoint, graphs, threads=threads, capacity=capacity,
                              hidden_layers=hidden_layers)
        from .torch_runtime import TorchRuntime
    except ImportError as error:
        raise MissingDependencyError(f"runtime {name}: {error.name} is not installed: "
                                     f"{REMEDIES[name]}") from error
    return TorchRuntime.load(checkpoint, capacity=capacity, hidden_layers=hidden_layers)
