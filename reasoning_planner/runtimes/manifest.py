"""What an export wrote, and the checks before it is used: names, shapes, sha256 of every file.

A graph reads its weights out of the checkpoint by position, so a graph beside another checkpoint
would run and answer nonsense; here it is refused. Knows files, not engines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, TypeVar

from ..errors import ConfigError, ModelError
from ..models.config import ModelConfig

MANIFEST_NAME = "ort_manifest.json"
FORMAT = 1
CHUNK_BYTES = 1 << 22
_Contents = TypeVar("_Contents")


@dataclass(frozen=True)
class Graph:
    """One graph: its file, and its tensors as {"name", "dtype", "shape"}, in order."""

    file: str
    sha256: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """Contents of `ort_manifest.json`.

    Attributes:
        format: version of this file's layout.
        kind: of the graphs: "ort".
        model: name of the configuration.
        top_k: how many likeliest tokens the decoder names.
        checkpoint: file name -> sha256 of what the graphs were made from and read.
        graphs: "vision", "decoder", "expert".
        costs: a cost curve measured with these graphs, see speculative.cost_curve; None: not yet.
    """

    format: int
    kind: str
    model: str
    top_k: int
    checkpoint: dict[str, str]
    graphs: dict[str, Graph]
    costs: dict[str, Any] | None = None

    def serialised(self) -> bytes:
        """The file's bytes."""
        values = dataclasses.asdict(self)
        if self.costs is None:
            del values["costs"]
        return (json.dumps(values, indent=1) + "\n").encode()

    def save(self, directory: Path) -> None:
        """Replace the file in one move.

        Raises:
            ModelError: it cannot be written.
        """
        replace_file(directory / MANIFEST_NAME, self.serialised())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """
        Raises:
            ModelError: missing, damaged or of another version.
        """
        path = directory / MANIFEST_NAME
        remedy = "expected what `reasoning-planner export` writes"
        manifest = read_manifest(path, remedy, lambda values: cls(graphs={
            name: Graph(**graph) for name, graph in values.pop("graphs").items()}, **values))
        graphs = manifest.graphs
        if manifest.format != FORMAT or not {"vision", "decoder", "expert"} <= set(graphs):
            raise ModelError(f"{path}: given format {manifest.format} with graphs "
                             f"{', '.join(graphs)}, {remedy} in this version")
        return manifest

    def require_checkpoint(self, directory: Path) -> None:
        """
        Raises:
            ModelError: a file of the checkpoint is missing or not the one of the export.
        """
        for name, expected in self.checkpoint.items():
            _require_hash(directory / name, sha256_of(directory / name), expected)

    def graph_bytes(self, directory: Path, name: str) -> bytes:
        """A graph's file, checked.

        Raises:
            ModelError: missing, or not the one of the export.
        """
        graph = self.graphs[name]
        content = _read(directory / graph.file)
        _require_hash(directory / graph.file, hashlib.sha256(content).hexdigest(), graph.sha256)
        return content


def read_manifest(path: Path, remedy: str, build: Callable[[dict[str, Any]], _Contents]
                  ) -> _Contents:
    """A manifest's file.

    Args:
        remedy: what is expected there, for the error.
        build: makes the contents of the JSON's values.
    Raises:
        ModelError: missing or damaged.
    """
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}), {remedy}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: damaged ({type(error).__name__}: {error}), "
                         f"{remedy}") from error


def load_config(directory: Path) -> ModelConfig:
    """The model's configuration in a checkpoint directory.

    Raises:
        ModelError: missing, damaged or refused.
    """
    path = directory / "config.json"
    try:
        return ModelConfig.from_dict(json.loads(_read(path)))
    except (ValueError, TypeError, AttributeError, ConfigError) as error:
        raise ModelError(f"{path}: {error}, expected the configuration of a checkpoint in this "
                         f"package's layout") from error


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file at once and whole.

    Raises:
        ModelError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ModelError(f"{path}: cannot be written ({error.strerror})") from error


def sha256_of(path: Path) -> str:
    """Hexadecimal digits.

    Raises:
        ModelError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}), expected a file of the "
                         f"checkpoint") from error
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}), expected a file of a "
                         f"checkpoint or of its export") from error


def _require_hash(path: Path, given: str, expected: str) -> None:
    if given != expected:
        raise ModelError(f"{path}: given sha256 {given[:16]}.., expected {expected[:16]}..: not "
                         f"the file of this export; run `reasoning-planner export` again")
