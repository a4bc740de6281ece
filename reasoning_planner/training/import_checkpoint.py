"""`reasoning-planner import-checkpoint`: an Alpamayo 1 or 1.5 checkpoint to our layout, verified.

Every tensor is checked by name, shape and dtype before anything is written, and for NaN on its
way. What is written appears at once and whole, or not at all:

    config.json         ModelConfig
    model-*.safetensors the learned tensors, in the order of the forward pass
    tokenizer.json      the text vocabulary, where one was given
    manifest.json       sha256 and size of the files above, which tensor is where, the action scale

Never loads the model: memory stays at a few megabytes for any size of checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ..actions import unicycle
from ..errors import DataError
from ..models.checkpoint_keys import constant_tensors, expected_tensors
from ..models.config import ModelConfig, preset
from ..tokenization.text_tokenizer import TextTokenizer
from .safetensors_stream import StoredTensor, read_header, write_copies

DTYPE = "BF16"
NUMPY_OF_DTYPE = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}  # bfloat16 as its bits
PRESET_OF_MODEL_TYPE = {"alpamayo_r1": "alpamayo-r1", "alpamayo1_5": "alpamayo-1.5"}
MAX_SHARD_BYTES = 4 << 30
BF16_ROUNDING = 2.0 ** -8           # a constant cast to bfloat16 is off by no more than this share
ACTION_CONSTANTS = {"accel_mean": unicycle.ACCELERATION_MEAN,
                    "accel_std": unicycle.ACCELERATION_SCALE,
                    "curvature_mean": unicycle.CURVATURE_MEAN,
                    "curvature_std": unicycle.CURVATURE_SCALE}

Progress = Callable[[int, int], None]       # bytes done, bytes altogether


class CheckpointMismatch(DataError):
    """The checkpoint's tensors are not the model's; `problems` names each, one line a tensor."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__(f"{len(problems)} tensors are not as expected, the first: {problems[0]}")


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        model: name of the configuration.
        num_tensors, num_bytes: learned tensors written.
        files: file name -> sha256.
        notes: what the user should know although it does not stop the import.
    """

    model: str
    num_tensors: int
    num_bytes: int
    files: dict[str, str]
    notes: list[str]


@dataclass
class _Watcher:
    """Sees every piece that is copied: counts it, and looks for values that are not finite."""

    total_bytes: int
    progress: Progress
    done_bytes: int = 0
    not_finite: set[str] = field(default_factory=set)

    def __call__(self, tensor: StoredTensor, chunk: bytes) -> None:
        exponents = np.frombuffer(chunk, dtype="<u2") & 0x7F80
        if (exponents == 0x7F80).any():
            self.not_finite.add(tensor.name)
        self.done_bytes += len(chunk)
        self.progress(self.done_bytes, self.total_bytes)


def import_checkpoint(source: Path, out: Path, config: ModelConfig | None = None,
                      tokenizer: Path | None = None, progress: Progress = lambda *_: None,
                      max_shard_bytes: int = MAX_SHARD_BYTES) -> ImportReport:
    """Check a checkpoint and write it in our layout.

    Args:
        source: directory of config.json and safetensors files.
        out: directory to make; must not exist.
        config: what the checkpoint should be; None to go by its config.json.
        tokenizer: a tokenizer.json; None for the one in `source`, if there is one.
        progress: called with bytes done and bytes altogether.
        max_shard_bytes: where a new file is begun.
    Raises:
        CheckpointMismatch: tensors are missing, unexpected, or of the wrong shape, dtype or value.
        DataError: a file cannot be read, `out` exists, or the disk is too small.
    """
    if out.exists():
        raise DataError(f"--out {out}: given a path that exists, expected a new directory")
    described = _read_json(source / "config.json")
    config = config or _config_of(described, source)
    found = _find_tensors(source)
    problems = find_problems(found, config)
    if problems:
        raise CheckpointMismatch(problems)
    vocabulary, notes = _load_tokenizer(tokenizer, source, config)
    notes += _constant_notes(found, config, described)
    with _PartialDirectory(out) as partial:
        report = _write(partial, found, config, vocabulary, notes, progress, max_shard_bytes)
    return report


def find_problems(found: Mapping[str, StoredTensor], config: ModelConfig) -> list[str]:
    """One line for each tensor that is missing, unexpected, or of the wrong shape or dtype."""
    expected, constants = expected_tensors(config), constant_tensors(config)
    problems = [f"{name}: missing, expected {DTYPE} {shape}"
                for name, shape in expected.items() if name not in found]
    for name, tensor in found.items():
        if name in expected and tensor.shape != expected[name]:
            problems.append(f"{name}: given shape {tensor.shape}, expected {expected[name]}")
        if name in expected and tensor.dtype != DTYPE:
            problems.append(f"{name}: given dtype {tensor.dtype}, expected {DTYPE}")
        if name in constants and not _is_constant(tensor, constants[name]):
            problems.append(f"{name}: given {tensor.dtype} {tensor.shape}, "
                            f"expected floating-point {constants[name]}")
        if name not in expected and name not in constants:
            problems.append(f"{name}: unexpected, given {tensor.dtype} {tensor.shape}")
    return problems


def _is_constant(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    """A scalar may come as (1,)."""
    return tensor.dtype in NUMPY_OF_DTYPE and tensor.shape in (shape, shape or (1,))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected the file of an "
                        f"Alpamayo checkpoint") from error
    except ValueError as error:
        raise DataError(f"{path}: given damaged JSON ({error}), expected an object") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: given a JSON {type(values).__name__}, expected an object")
    return values


def _config_of(described: Mapping[str, Any], source: Path) -> ModelConfig:
    model_type = described.get("model_type")
    if model_type not in PRESET_OF_MODEL_TYPE:
        raise DataError(f"{source / 'config.json'}: given model_type {model_type!r}, expected one "
                        f"of {', '.join(PRESET_OF_MODEL_TYPE)}")
    return preset(PRESET_OF_MODEL_TYPE[model_type])


def _find_tensors(source: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint's files, against the index where there is one."""
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return read_header(source / "model.safetensors")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index}: given no weight_map, expected tensor name -> file name")
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise DataError(f"{index}: given the file {name!r}, expected a name without folders")
        for tensor in read_header(source / name).values():
            if tensor.name in found:
                raise DataError(f"{tensor.name}: given in {found[tensor.name].path} and "
                                f"{tensor.path}, expected in one")
            found[tensor.name] = tensor
    return found


def _load_tokenizer(given: Path | None, source: Path, config: ModelConfig
                    ) -> tuple[TextTokenizer | None, list[str]]:
    path = given or source / "tokenizer.json"
    if given is None and not path.exists():
        return None, ["no tokenizer: none in the checkpoint and none given; pass --tokenizer with "
                      "the tokenizer.json of Qwen/Qwen3-VL-8B-Instruct"]
    tokenizer = TextTokenizer.load(path)
    expected = config.tokens.text_vocab_size
    if tokenizer.special.base_size != expected:
        raise DataError(f"tokenizer {path}: given {tokenizer.special.base_size} text tokens, "
                        f"expected {expected}")
    return tokenizer, []


def _constant_notes(found: Mapping[str, StoredTensor], config: ModelConfig,
                    described: Mapping[str, Any]) -> list[str]:
    """Where the checkpoint states other constants than the code; the code's are used."""
    exponents = np.linspace(0.0, np.log10(config.expert.max_fourier_frequency),
                            config.expert.num_fourier_frequencies)
    notes = []
    for name in constant_tensors(config):
        space, _, leaf = name.rpartition(".")
        used = [ACTION_CONSTANTS[leaf]] if space == "action_space" else 10.0 ** exponents
        if name in found:
            notes += _note(name, _values(found[name]), used)
    action_space = described.get("action_space_cfg")
    for leaf, used in ACTION_CONSTANTS.items():
        if isinstance(action_space, dict) and isinstance(action_space.get(leaf), (int, float)):
            notes += _note(f"config.json action_space_cfg.{leaf}", [action_space[leaf]], [used])
    return notes


def _note(name: str, given: Sequence[float], used: Sequence[float]) -> list[str]:
    given, used = np.asarray(given), np.asarray(used)
    if np.allclose(given, used, rtol=BF16_ROUNDING, atol=0.0):
        return []
    return [f"{name}: the checkpoint has {given.tolist()}, {used.tolist()} is used"]


def _values(tensor: StoredTensor) -> np.ndarray:
    """A small floating-point tensor's values, flat."""
    stored = np.frombuffer(b"".join(tensor.chunks()), dtype=NUMPY_OF_DTYPE[tensor.dtype])
    if tensor.dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


class _PartialDirectory:
    """A directory beside `out` that becomes `out` on success and vanishes on any failure."""

    def __init__(self, out: Path):
        self.out = out

    def __enter__(self) -> Path:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.", dir=self.out.parent))
        except OSError as error:
            raise DataError(f"--out {self.out}: cannot be made ({error.strerror}), expected a "
                            f"directory that can be written") from error
        return self.path

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        try:
            if kind is None:
                self.path.chmod(0o755)
                self.path.rename(self.out)
        except OSError as failure:
            error = failure
        if error is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"--out {self.out}: copying failed ({error.strerror}), expected room "
                            f"for the whole checkpoint") from error


def _shards(tensors: list[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """The tensors in order, cut where a file would grow beyond `max_bytes`."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _write(directory: Path, found: Mapping[str, StoredTensor], config: ModelConfig,
           tokenizer: TextTokenizer | None, notes: list[str], progress: Progress,
           max_shard_bytes: int) -> ImportReport:
    tensors = [found[name] for name in expected_tensors(config)]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise DataError(f"{directory.parent}: given {free / 1e9:.1f} GB of free disk, "
                        f"expected {num_bytes / 1e9:.1f} GB")
    watcher = _Watcher(num_bytes, progress)
    shards = _shards(tensors, max_shard_bytes)
    files, places = {}, {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name] = write_copies(shard, directory / name, watcher)
        places |= {tensor.name: name for tensor in shard}
    if watcher.not_finite:
        raise CheckpointMismatch([f"{name}: given a NaN or an infinity, expected finite weights"
                                  for name in places if name in watcher.not_finite])
    files |= _write_small_files(directory, config, tokenizer)
    manifest = {"format": 1, "model": config.name, "dtype": DTYPE,
                "action_constants": ACTION_CONSTANTS, "notes": notes,
                "files": {name: {"bytes": (directory / name).stat().st_size, "sha256": digest}
                          for name, digest in files.items()},
                "tensors": places}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return ImportReport(config.name, len(tensors), num_bytes, files, notes)


def _write_small_files(directory: Path, config: ModelConfig, tokenizer: TextTokenizer | None
                       ) -> dict[str, str]:
    names = ["config.json"]
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
    if tokenizer is not None:
        tokenizer.save(directory / "tokenizer.json")
        names.append("tokenizer.json")
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


# The command

def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `reasoning-planner import-checkpoint`."""
    parser.add_argument("checkpoint", type=Path, metavar="DIR",
                        help="directory of an Alpamayo 1 or 1.5 checkpoint: config.json and "
                             "safetensors files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="directory to make; must not exist")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE",
                        help="tokenizer.json of Qwen3-VL (default: the checkpoint's own, if any; "
                             "Alpamayo 1.5 has none)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Import; 0 when all is verified and written, 1 with one line for each problem otherwise."""
    progress = _show_progress if sys.stderr.isatty() else (lambda *_: None)
    try:
        report = import_checkpoint(args.checkpoint, args.out, tokenizer=args.tokenizer,
                                   progress=progress)
    except CheckpointMismatch as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(dataclasses.asdict(report) | {"out": os.fspath(args.out)}))
        return 0
    print(f"{report.model}: {report.num_tensors} tensors, {report.num_bytes / 1e9:.2f} GB, "
          f"verified and written to {args.out}")
    for note in report.notes:
        print(f"note: {note}")
    return 0


def _show_progress(done_bytes: int, total_bytes: int) -> None:
    end = "\n" if done_bytes == total_bytes else ""
    print(f"\rimporting {done_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB", end=end,
          file=sys.stderr, flush=True)
