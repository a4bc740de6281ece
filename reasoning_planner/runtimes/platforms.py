"""Manifests of the platforms that engines are built for: `engines/*.yaml`, read and checked.

A platform says which graphs it runs, in which precision and for which sizes; what was built from
it says so in its own manifest (engine_manifest.py). Knows files, not engines.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Sequence

import yaml

from .base import default_capacity
from ..config import from_mapping
from ..errors import ConfigError, MissingDependencyError, ModelError
from ..models.config import ModelConfig

GRAPH_KINDS = {"ort": ("ort",), "trt": ("trt", "plain")}    # what each runtime drives
PRECISIONS = ("float32", "float16")
CAPACITY_STEP = 64      # keeps every head's rows on the 256 bytes that CUDA libraries ask for
PROFILES = ("prefill", "decode", "verify")
NUM_IMAGES = 16         # of a prompt
PROMPT_TEXT = 126       # tokens of Alpamayo 1's prompt that are no image
HISTORY_TOKENS = 48     # among them


@dataclass(frozen=True)
class SizeRange:
    """Tokens of a pass: the engine takes minimum .. maximum and is tuned for the usual one."""

    minimum: int = 1
    usual: int = 1
    maximum: int = 1

    def problems(self, name: str) -> list[str]:
        """What is wrong with it."""
        given = (self.minimum, self.usual, self.maximum)
        if all(map(_is_whole, given)) and list(given) == sorted(given):
            return []
        return [f"profiles.{name}: given {self.minimum} .. {self.usual} .. {self.maximum}, "
                f"expected 1 <= minimum <= usual <= maximum"]

    def within(self, limit: int) -> SizeRange:
        """The part of it that a cache of `limit` tokens can hold."""
        return SizeRange(*(min(size, limit) for size in
                           (self.minimum, self.usual, self.maximum)))


@dataclass(frozen=True)
class Profiles:
    """One optimisation profile for each kind of pass."""

    prefill: SizeRange = SizeRange(1, 3006, 3136)
    decode: SizeRange = SizeRange(1, 1, 1)
    verify: SizeRange = SizeRange(2, 8, 64)


@dataclass(frozen=True)
class Versions:
    """Of TensorRT, dotted; from_version <= version < below_version. Empty: not asked for."""

    from_version: str = ""
    below_version: str = ""

    def include(self, version: str) -> bool:
        """Whether a version is one of these."""
        return (parsed_version(self.from_version) <= parsed_version(version)
                < parsed_version(self.below_version))

    def __str__(self) -> str:
        return f"{self.from_version} <= version < {self.below_version}"


@dataclass(frozen=True)
class Platform:
    """One `engines/*.yaml`.

    Attributes:
        name: of the file.
        families: names on the command line that may mean it; TensorRT's version decides.
        runtime: that drives its engines, "ort" or "trt".
        graphs: kind of the export they are built from.
        tensorrt: versions it is for.
        precision: of weights and activations.
        kept_down_proj: layers whose down_proj stays in float32, or in `precision` where the
            others are quantised: their inputs are too large for it (Alpamayo 1.5).
        capacity: tokens the cache holds at most; a smaller model gets what it needs.
        profiles: sizes of the passes.
        workspace_mib: scratch memory that a build may use; 0: no limit.
        source_sha256: of the checkpoint that engines may be built from, as `build-engines`
            prints it; empty: any.
    """

    name: str = ""
    families: tuple[str, ...] = ()
    runtime: str = ""
    graphs: str = ""
    tensorrt: Versions = field(default_factory=Versions)
    precision: str = ""
    kept_down_proj: tuple[int, ...] = ()
    capacity: int = 3200
    profiles: Profiles = field(default_factory=Profiles)
    workspace_mib: int = 0
    source_sha256: str = ""

    def __post_init__(self) -> None:
        problems = [problem for name in PROFILES
                    for problem in getattr(self.profiles, name).problems(name)]
        _require(problems, "name", self.name, bool(self.name), "the file's name without .yaml")
        _require(problems, "families", self.families, bool(self.families), "one name or more")
        _require(problems, "runtime", self.runtime, self.runtime in GRAPH_KINDS,
                 f"one of {', '.join(GRAPH_KINDS)}")
        kinds = GRAPH_KINDS.get(self.runtime, sum(GRAPH_KINDS.values(), ()))
        _require(problems, "graphs", self.graphs, self.graphs in kinds,
                 f"one of {', '.join(kinds)}")
        _require(problems, "precision", self.precision, self.precision in PRECISIONS,
                 f"one of {', '.join(PRECISIONS)}")
        _require(problems, "kept_down_proj", self.kept_down_proj,
                 all(layer == 0 or _is_whole(layer) for layer in self.kept_down_proj),
                 "numbers of layers, from 0")
        _require(problems, "capacity", self.capacity,
                 _is_whole(self.capacity) and self.capacity % CAPACITY_STEP == 0,
                 f"a multiple of {CAPACITY_STEP}")
        _require(problems, "workspace_mib", self.workspace_mib,
                 self.workspace_mib == 0 or _is_whole(self.workspace_mib), "0 or more")
        _require(problems, "source_sha256", self.source_sha256,
                 re.fullmatch(r"([0-9a-f]{64})?", str(self.source_sha256)) is not None,
                 "64 hexadecimal digits or nothing")
        problems += self._version_problems() + self._profile_problems()
        if problems:
            raise ConfigError(problems)

    def _version_problems(self) -> list[str]:
        given, problems = self.tensorrt, []
        for name in ("from_version", "below_version"):
            value = getattr(given, name)
            expected = r"\d+(\.\d+)*" if self.runtime == "trt" else ""
            _require(problems, f"tensorrt.{name}", value,
                     re.fullmatch(expected, str(value)) is not None,
                     "a dotted version" if expected else "nothing, since TensorRT is not used")
        return problems

    def _profile_problems(self) -> list[str]:
        problems: list[str] = []
        for name in PROFILES:
            largest = getattr(self.profiles, name).maximum
            fits = not (_is_whole(largest) and _is_whole(self.capacity)) \
                or largest <= self.capacity
            _require(problems, f"profiles.{name}.maximum", largest, fits,
                     f"at most capacity = {self.capacity}")
        decode = self.profiles.decode
        _require(problems, "profiles.decode", (decode.minimum, decode.maximum),
                 decode.minimum == decode.maximum == 1, "1 .. 1")
        return problems

    def capacity_of(self, config: ModelConfig) -> int:
        """Tokens the cache of a model holds on this platform."""
        needed = -(-default_capacity(config) // CAPACITY_STEP) * CAPACITY_STEP
        return min(self.capacity, needed)

    def slots_of(self, config: ModelConfig) -> int:
        """Slots of a cache tensor (S_max): those tokens, and the waypoints written behind them."""
        needed = self.capacity_of(config) + config.flow.num_waypoints
        return -(-needed // CAPACITY_STEP) * CAPACITY_STEP

    def sizes_of(self, config: ModelConfig) -> dict[str, SizeRange]:
        """Profile -> its sizes for a model: none above the cache, and its own usual prompt."""
        capacity = self.capacity_of(config)
        sizes = {name: getattr(self.profiles, name).within(capacity) for name in PROFILES}
        prompt = NUM_IMAGES * config.vision.tokens_per_image + PROMPT_TEXT
        prefill = sizes["prefill"]
        usual = max(prefill.minimum, min(prefill.usual, prompt))
        return sizes | {"prefill": replace(prefill, usual=usual)}

    def digest(self) -> str:
        """sha256 of all it says: engines of a platform that says otherwise are others."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def kept_layers_of(self, config: ModelConfig) -> tuple[int, ...]:
        """`kept_down_proj`, of the layers that a model has."""
        return tuple(i for i in self.kept_down_proj if i < config.text.num_layers)


def engines_directory() -> Path:
    """Where the manifests lie: in the source tree, or in the prefix of an installation.

    Raises:
        ModelError: in neither.
    """
    package = Path(__file__).resolve().parent.parent
    places = [package.parent / "engines",
              *(folder / "share" / "reasoning_planner" / "engines" for folder in package.parents)]
    for place in places:
        if any(place.glob("*.yaml")):
            return place
    raise ModelError(f"platform manifests: given none in {places[0]} or in share/"
                     f"reasoning_planner/engines of the installation, expected *.yaml")


def load_platform(path: Path) -> Platform:
    """Read one manifest.

    Raises:
        ModelError: unreadable, or with every wrong entry told.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ConfigError([f"given {type(values).__name__}, expected a mapping"])
        platform = from_mapping(Platform, values)
        if platform.name != path.stem:
            raise ConfigError([f"name: given {platform.name!r}, expected {path.stem!r}, as the "
                               f"file is called"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
    return platform


def load_platforms(directory: Path | None = None) -> dict[str, Platform]:
    """Name -> platform, all of a directory; None: those of the package."""
    paths = sorted((directory or engines_directory()).glob("*.yaml"))
    return {path.stem: load_platform(path) for path in paths}


def choose_platform(asked: str, tensorrt_version: str | None,
                    platforms: dict[str, Platform] | None = None) -> Platform:
    """What a name on the command line means on a machine.

    Args:
        asked: a platform or a family of them, or the path of a manifest.
        tensorrt_version: of the one installed; None: there is none.
    Raises:
        ModelError: unknown, or for other versions of TensorRT.
        MissingDependencyError: TensorRT is needed and not installed.
    """
    if asked.endswith(".yaml"):
        candidates: Sequence[Platform] = [load_platform(Path(asked))]
    else:
        known = load_platforms() if platforms is None else platforms
        candidates = [known[asked]] if asked in known else sorted(
            (platform for platform in known.values() if asked in platform.families),
            key=lambda platform: parsed_version(platform.tensorrt.from_version))
        if not candidates:
            names = sorted({*known, *(f for p in known.values() for f in p.families)})
            raise ModelError(f"platform: given {asked!r}, expected one of {', '.join(names)}, or "
                             f"the path of a manifest")
    for platform in candidates:
        if platform.runtime != "trt" or (tensorrt_version is not None
                                         and platform.tensorrt.include(tensorrt_version)):
            return platform
    wanted = " or ".join(f"{p.tensorrt} ({p.name})" for p in candidates)
    if tensorrt_version is None:
        raise MissingDependencyError(
            f"platform {asked}: tensorrt is not installed, expected {wanted}: it comes with "
            f"JetPack; on x86: pip install tensorrt")
    raise ModelError(f"platform {asked}: given TensorRT {tensorrt_version}, expected {wanted}")


def parsed_version(version: str) -> tuple[int, ...]:
    """"10.16.2.5" -> (10, 16, 2, 5); what follows the digits of a part is left out."""
    return tuple(int(match.group()) for part in version.split(".")
                 if (match := re.match(r"\d+", part)))


def _is_whole(value: Any) -> bool:
    """A whole number from 1; what YAML held may be of any type."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(problems: list[str], name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        problems.append(f"{name}: given {value!r}, expected {expected}")
