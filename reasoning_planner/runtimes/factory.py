"""Runtimes by name; the only place that imports one, so that an absent engine is no obstacle.

A runtime that cannot be had is an error and never another runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from .base import Runtime
from .engine_manifest import ENGINE_MANIFEST, EngineManifest, find_engines
from .manifest import MANIFEST_NAME
from ..errors import MissingDependencyError, ModelError

REMEDIES = {"ort": "pip install onnxruntime",
            "torch": "pip install 'reasoning_planner[train]'",
            "trt": "it comes with JetPack; on x86: pip install tensorrt"}
RUNTIMES = tuple(REMEDIES)
PROVIDERS = ("cpu", "cuda", "tensorrt")     # cpu: also where a runtime has no choice


def create_runtime(name: str, checkpoint: Path, *, graphs: Path | None = None, threads: int = 0,
                   capacity: int | None = None, hidden_layers: Sequence[int] = (),
                   provider: str = "cpu") -> Runtime:
    """Load a checkpoint into an engine.

    Args:
        name: one of RUNTIMES.
        checkpoint: directory with config.json and the weights.
        graphs: directory of the engines (build-engines) or of the graphs (export); None: the
            engines beside the checkpoint, else the graphs in it.
        threads: of the engine; 0: its own choice.
        capacity: tokens the cache holds; None: the engines' own, else the prompt's images and
            512 more.
        hidden_layers: layers whose outputs a draft reads.
        provider: where "ort" (cpu, cuda, tensorrt) and "torch" (cpu, cuda) compute.
    Raises:
        ModelError: unknown name, or files that are missing, damaged, stale or foreign.
        MissingDependencyError: the engine is not installed, or its provider not in its build.
    """
    if name not in RUNTIMES:
        raise ModelError(f"runtime: given {name!r}, expected one of {', '.join(RUNTIMES)}")
    checkpoint = Path(checkpoint)
    try:
        if name == "ort":
            from .ort_runtime import OrtRuntime

            graphs, capacity = _built_graphs(checkpoint, graphs, capacity)
            return OrtRuntime(checkpoint, graphs, threads=threads, capacity=capacity,
                              hidden_layers=hidden_layers, provider=provider)
        if name == "trt":
            _require_no_provider(provider)
            from .trt_runtime import TrtRuntime

            return TrtRuntime.load(checkpoint, graphs, capacity=capacity,
                                   hidden_layers=hidden_layers)
        _require_no_engines(graphs)
        from .torch_runtime import TorchRuntime
    except ImportError as error:
        raise MissingDependencyError(f"runtime {name}: {error.name} is not installed: "
                                     f"{REMEDIES[name]}") from error
    return TorchRuntime.load(checkpoint, device=provider, capacity=capacity,
                             hidden_layers=hidden_layers)


def _require_no_provider(provider: str) -> None:
    if provider != "cpu":
        raise ModelError(f"provider: given {provider!r} for the runtime trt, expected cpu, the "
                         f"default: its engines run on the GPU they were built for")


def _require_no_engines(folder: Path | None) -> None:
    if folder is not None:
        raise ModelError(f"engines: given {folder} for the runtime torch, expected none: it runs "
                         f"the checkpoint itself")


def _built_graphs(checkpoint: Path, folder: Path | None, capacity: int | None
                  ) -> tuple[Path | None, int | None]:
    """Engines of the platform `cpu` are graphs with a manifest: which, and for how many tokens.

    Raises:
        ModelError: they are another runtime's or another checkpoint's, or hold fewer tokens.
    """
    if folder is None:
        folder = find_engines(checkpoint, "ort")
    if folder is None:
        return None, capacity
    folder = Path(folder)
    if not (folder / ENGINE_MANIFEST).is_file():
        if not (folder / MANIFEST_NAME).is_file():
            raise ModelError(f"{folder}: given neither {ENGINE_MANIFEST} nor {MANIFEST_NAME}, "
                             f"expected engines of `reasoning-planner build-engines --checkpoint "
                             f"{checkpoint} --platform cpu`")
        return folder, capacity         # an export, whose own manifest is checked
    manifest = EngineManifest.load(folder)
    manifest.require_runtime(folder, "ort", "")
    manifest.require_checkpoint(folder, checkpoint)
    for name in manifest.engines:
        manifest.engine_content(folder, name).close()
    if capacity is not None and capacity > manifest.capacity:
        raise ModelError(f"capacity: given {capacity} tokens, expected at most "
                         f"{manifest.capacity}, the cache of the engines in {folder}")
    return folder, manifest.capacity if capacity is None else capacity
