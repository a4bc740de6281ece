"""What `build-engines` wrote: engine.json, and the checks before an engine is used.

A stale or foreign engine is refused with one line: other weights, other graphs, another version of
the builder, another runtime. Knows files, not engines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from .manifest import Manifest, read_manifest, replace_file, sha256_of
from ..errors import ModelError

ENGINE_MANIFEST = "engine.json"
ENGINES_FOLDER = "engines"      # beside a checkpoint: engines/<platform>
FORMAT = 1
NEEDED_FILES = ("config.json", "tokenizer.json")    # of a checkpoint, also without its weights


@dataclass(frozen=True)
class BuiltEngine:
    """One engine.

    Attributes:
        file: in the folder of the manifest.
        sha256: of that file.
        graph_sha256: of the graph it was built from.
        inputs, outputs: tensors as {"name", "dtype", "shape"}; a string is a size that varies.
        aliases: output -> the input whose memory it is.
        profiles: name -> size that varies -> [smallest, usual, largest]; in the engine's order.
    """

    file: str
    sha256: str
    graph_sha256: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    profiles: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Name -> description, of all inputs and outputs."""
        return {tensor["name"]: tensor for tensor in (*self.inputs, *self.outputs)}


@dataclass(frozen=True)
class EngineManifest:
    """Contents of `engine.json`.

    Attributes:
        format: version of this file's layout.
        platform: name of its manifest in `engines/`.
        platform_sha256: of what that manifest said, see `Platform.digest`.
        runtime: that drives the engines, "ort" or "trt".
        graphs: kind of the export they were built from.
        precision: of weights and activations.
        model: name of the configuration.
        builder: and its version, such as "tensorrt 10.16.1.11".
        machine: where it was built.
        capacity: tokens the cache holds.
        slots: of a cache tensor: the capacity and, where the action expert writes, its waypoints.
        top_k: how many likeliest tokens the decoder names.
        hidden_layers: whose outputs the decoder gives; None: any.
        sizes: profile -> [smallest, usual, largest] number of tokens.
        checkpoint: file -> sha256 of what the graphs were made from.
        source_sha256: of all of those, see `source_hash`.
        engines: by the name of the graph.
        costs: a cost curve T(k), see speculative.cost_curve; None: not measured.
    """

    format: int
    platform: str
    platform_sha256: str
    runtime: str
    graphs: str
    precision: str
    model: str
    builder: str
    machine: str
    capacity: int
    slots: int
    top_k: int
    hidden_layers: list[int] | None
    sizes: dict[str, list[int]]
    checkpoint: dict[str, str]
    source_sha256: str
    engines: dict[str, BuiltEngine]
    costs: dict[str, Any] | None = None

    def save(self, directory: Path) -> None:
        """Replace the file in one move.

        Raises:
            ModelError: it cannot be written.
        """
        content = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        replace_file(directory / ENGINE_MANIFEST, content.encode())

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """
        Raises:
            ModelError: missing, damaged or of another version.
        """
        path = directory / ENGINE_MANIFEST
        remedy = "expected what `reasoning-planner build-engines` writes"
        manifest = read_manifest(path, remedy, lambda values: cls(engines={
            name: BuiltEngine(**engine) for name, engine in values.pop("engines").items()},
            **values))
        if manifest.format != FORMAT:
            raise ModelError(f"{path}: given format {manifest.format}, expected {FORMAT}: run "
                             f"`reasoning-planner build-engines` again")
        return manifest

    def require_runtime(self, directory: Path, runtime: str, builder: str) -> None:
        """
        Args:
            builder: name and version of the library at hand; empty: any will do.
        Raises:
            ModelError: the engines are another runtime's, or another version's.
        """
        if self.runtime != runtime:
            raise ModelError(f"{directory}: given engines of platform {self.platform} for the "
                             f"runtime {self.runtime}, expected the runtime {runtime}")
        if builder and self.builder != builder:
            raise ModelError(f"{directory}: given engines built by {self.builder}, expected "
                             f"{builder}; run `reasoning-planner build-engines` again")

    def require_checkpoint(self, directory: Path, checkpoint: Path) -> None:
        """The weights are in the engines: a checkpoint without them is one for running only.

        Raises:
            ModelError: a file of the checkpoint is another than the one built from, or missing.
        """
        for name, expected in self.checkpoint.items():
            path = checkpoint / name
            if not path.exists() and name not in NEEDED_FILES:
                continue
            if (given := sha256_of(path)) != expected:
                raise ModelError(
                    f"{directory}: engines of another checkpoint: {path} has sha256 "
                    f"{given[:16]}.., expected {expected[:16]}..; run `reasoning-planner "
                    f"build-engines --checkpoint {checkpoint}` again")

    def engine_content(self, directory: Path, name: str) -> mmap.mmap:
        """An engine's file, checked, and read where it is used.

        Raises:
            ModelError: missing, or not the one that was built.
        """
        if name not in self.engines:
            raise ModelError(f"{directory / ENGINE_MANIFEST}: given {', '.join(self.engines)}, "
                             f"expected an engine {name}")
        path = directory / self.engines[name].file
        if not path.is_file():
            raise ModelError(f"{path}: no such file, expected an engine; run "
                             f"`reasoning-planner build-engines`")
        given = sha256_of(path)
        if given != self.engines[name].sha256:
            raise ModelError(f"{path}: given sha256 {given[:16]}.., expected "
                             f"{self.engines[name].sha256[:16]}..: not the engine of its "
                             f"manifest; run `reasoning-planner build-engines` again")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def load_built(directory: Path) -> EngineManifest | Manifest:
    """The manifest of the engines in a directory, or else of the graphs exported to it.

    Raises:
        ModelError: missing, damaged or of another version.
    """
    has_engines = (directory / ENGINE_MANIFEST).is_file()
    return EngineManifest.load(directory) if has_engines else Manifest.load(directory)


def find_engines(checkpoint: Path, runtime: str) -> Path | None:
    """The folder of a runtime's engines beside a checkpoint; None: there is none.

    Raises:
        ModelError: there are several, or one is damaged.
    """
    found = [path.parent for path in sorted(
        checkpoint.glob(f"{ENGINES_FOLDER}/*/{ENGINE_MANIFEST}"))
        if EngineManifest.load(path.parent).runtime == runtime]
    if len(found) > 1:
        raise ModelError(f"engines: given {', '.join(map(str, found))} for the runtime {runtime}, "
                         f"expected one, or its folder named")
    return found[0] if found else None


def source_hash(checkpoint: Mapping[str, str]) -> str:
    """One sha256 for the files of a checkpoint, from theirs."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(checkpoint.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
