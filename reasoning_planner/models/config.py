"""Shapes and token ids of the target: frozen dataclasses, checked when made, and their presets.

The presets `alpamayo-r1` and `alpamayo-1.5` state the published models; `nano` and
`nano-fast` are stand-ins, trained here. Nothing in this file needs torch.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Mapping

from ..errors import ConfigError

CONTROL_TOKENS = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad",
                  "video_pad")
NUM_SPECIAL_TOKENS = 28     # prompt_start .. answer_end, after the trajectory bins


def _require(problems: list[str], name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        problems.append(f"{name}: given {value!r}, expected {expected}")


def _require_positive(problems: list[str], group: str, config: Any) -> None:
    """Every integer field of `config` is a size, hence at least one."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, int) and not isinstance(value, bool):
            _require(problems, f"{group}.{item.name}", value, value >= 1, "1 or more")


def _finish(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class TextConfig:
    """The decoder of the vision-language model (Qwen3-VL text)."""

    vocab_size: int = 155_697
    hidden_size: int = 4096
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12_288
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, ...] = (24, 20, 20)   # frequencies of time, height, width
    max_positions: int = 262_144

    def __post_init__(self) -> None:
        problems: list[str] = []
        _require_positive(problems, "text", self)
        _require(problems, "text.num_heads", self.num_heads,
                 self.num_heads % max(self.num_kv_heads, 1) == 0,
                 f"a multiple of num_kv_heads = {self.num_kv_heads}")
        _require(problems, "text.head_dim", self.head_dim, self.head_dim % 2 == 0, "an even size")
        _require(problems, "text.mrope_section", self.mrope_section,
                 len(self.mrope_section) == 3 and sum(self.mrope_section) == self.head_dim // 2,
                 f"three counts that sum to head_dim / 2 = {self.head_dim // 2}")
        _require(problems, "text.rope_theta", self.rope_theta, self.rope_theta > 1.0, "above 1")
        _finish(problems)


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower, and the one image size a planner feeds it."""

    depth: int = 27
    hidden_size: int = 1152
    num_heads: int = 16
    intermediate_size: int = 4304
    out_hidden_size: int = 4096
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304             # a square grid
    deepstack_indexes: tuple[int, ...] = (8, 16, 24)
    image_height: int = 320
    image_width: int = 576

    def __post_init__(self) -> None:
        problems: list[str] = []
        _require_positive(problems, "vision", self)
        _require(problems, "vision.hidden_size", self.hidden_size,
                 self.hidden_size % (4 * max(self.num_heads, 1)) == 0,
                 f"a multiple of 4 x num_heads = {4 * self.num_heads}")
        _require(problems, "vision.num_position_embeddings", self.num_position_embeddings,
                 self.position_grid_side ** 2 == self.num_position_embeddings, "a square number")
        _require(problems, "vision.deepstack_indexes", self.deepstack_indexes,
                 list(self.deepstack_indexes) == sorted(set(self.deepstack_indexes))
                 and all(0 <= i < self.depth for i in self.deepstack_indexes),
                 f"ascending block indexes below depth = {self.depth}")
        factor = self.patch_size * self.spatial_merge_size
        for name in ("image_height", "image_width"):
            value = getattr(self, name)
            _require(problems, f"vision.{name}", value, value % max(factor, 1) == 0,
                     f"a multiple of patch x merge = {factor}")
        _finish(problems)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def position_grid_side(self) -> int:
        """Side of the learned position grid."""
        return round(self.num_position_embeddings ** 0.5)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in one image."""
        return self.image_height // self.patch_size, self.image_width // self.patch_size

    @property
    def merged_grid(self) -> tuple[int, int]:
        """Rows and columns of visual tokens in one image."""
        rows, columns = self.grid
        return rows // self.spatial_merge_size, columns // self.spatial_merge_size

    @property
    def tokens_per_image(self) -> int:
        """Visual tokens the text decoder sees for one image."""
        rows, columns = self.merged_grid
        return rows * columns


@dataclass(frozen=True)
class ExpertConfig:
    """The action expert. Layers, KV heads, head width and rope are the text decoder's."""

    hidden_size: int = 2048
    intermediate_size: int = 8256
    num_heads: int = 16
    projector_hidden_size: int = 512
    projector_layers: int = 2
    num_fourier_frequencies: int = 10
    max_fourier_frequency: float = 100.0
    fourier_float32: bool = True        # False: features in the weights' dtype (Alpamayo 1.5)

    def __post_init__(self) -> None:
        problems: list[str] = []
        _require_positive(problems, "expert", self)
        _require(problems, "expert.max_fourier_frequency", self.max_fourier_frequency,
                 self.max_fourier_frequency > 1.0, "above 1")
        _finish(problems)


@dataclass(frozen=True)
class FlowConfig:
    """Flow matching of the action sequence."""

    num_waypoints: int = 64
    action_size: int = 2                # acceleration, curvature
    num_steps: int = 10                 # Euler steps; 5 is said to be about lossless
    time_scale: float = 0.999           # t = time_scale * (1 - Beta(time_beta, 1))
    time_beta: float = 1.5

    def __post_init__(self) -> None:
        problems: list[str] = []
        _require_positive(problems, "flow", self)
        _require(problems, "flow.time_scale", self.time_scale, 0.0 < self.time_scale <= 1.0,
                 "0 < value <= 1")
        _require(problems, "flow.time_beta", self.time_beta, self.time_beta > 0.0, "above 0")
        _finish(problems)


@dataclass(frozen=True)
class TokenConfig:
    """Ids the model code must know. Layout: text ids | trajectory bins | 28 special tokens.

    The tokenizer owns the strings; `TokenConfig.extending` derives the ids from the size of the
    text vocabulary, the way Alpamayo 1 and 1.5 extend Qwen's. The defaults are theirs.
    """

    text_vocab_size: int = 151_669
    num_trajectory_bins: int = 4000
    num_history_bins: int = 1000        # the last ones; the future bins come before them
    endoftext_id: int = 151_643
    im_start_id: int = 151_644
    im_end_id: int = 151_645
    vision_start_id: int = 151_652
    vision_end_id: int = 151_653
    image_pad_id: int = 151_655
    video_pad_id: int = 151_656
    traj_history_start_id: int = 155_674
    traj_history_end_id: int = 155_676
    cot_start_id: int = 155_677
    cot_end_id: int = 155_678
    traj_future_start_id: int = 155_681
    traj_future_end_id: int = 155_683
    traj_history_id: int = 155_684
    traj_future_id: int = 155_685
    route_start_id: int = 155_690
    route_end_id: int = 155_692

    def __post_init__(self) -> None:
        problems: list[str] = []
        ids = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
               if f.name.endswith("_id")}
        for name, value in ids.items():
            _require(problems, f"tokens.{name}", value, 0 <= value < self.vocab_size,
                     f"0 <= value < {self.vocab_size}")
        _require(problems, "tokens", sorted(ids.values()), len(set(ids.values())) == len(ids),
                 "distinct ids")
        _require(problems, "tokens.num_history_bins", self.num_history_bins,
                 0 <= self.num_history_bins <= self.num_trajectory_bins,
                 f"at most num_trajectory_bins = {self.num_trajectory_bins}")
        _finish(problems)

    @classmethod
    def extending(cls, text_vocab_size: int, control_ids: Mapping[str, int] | None = None
                  ) -> TokenConfig:
        """Ids over a text vocabulary of another size.

        Args:
            text_vocab_size: also the id of the first trajectory bin.
            control_ids: id of each of CONTROL_TOKENS; None: they are the last ids of the text
                vocabulary, in that order.
        """
        if control_ids is None:
            first = text_vocab_size - len(CONTROL_TOKENS)
            control_ids = {name: first + i for i, name in enumerate(CONTROL_TOKENS)}
        if sorted(control_ids) != sorted(CONTROL_TOKENS):
            raise ConfigError([f"control_ids: given {sorted(control_ids)}, "
                               f"expected {sorted(CONTROL_TOKENS)}"])
        default = cls()
        shift = text_vocab_size - default.text_vocab_size
        values = {f.name: getattr(default, f.name) + shift for f in dataclasses.fields(cls)
                  if f.name.endswith("_id")}
        values.update({f"{name}_id": value for name, value in control_ids.items()})
        return cls(text_vocab_size=text_vocab_size, **values)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.text_vocab_size + self.num_trajectory_bins + NUM_SPECIAL_TOKENS

    @property
    def trajectory_bins(self) -> range:
        """Ids that may not be generated in the text."""
        return range(self.text_vocab_size, self.text_vocab_size + self.num_trajectory_bins)

    @property
    def future_bin_start(self) -> int:
        """Id of the first bin of future actions."""
        return self.text_vocab_size

    @property
    def history_bin_start(self) -> int:
        """Id of the first bin of ego history."""
        return self.trajectory_bins.stop - self.num_history_bins


@dataclass(frozen=True)
class ModelConfig:
    """The whole target. `name` is what reports call it."""

    name: str
    text: TextConfig
    vision: VisionConfig
    expert: ExpertConfig
    flow: FlowConfig
    tokens: TokenConfig

    def __post_init__(self) -> None:
        problems: list[str] = []
        _require(problems, "text.vocab_size", self.text.vocab_size,
                 self.text.vocab_size == self.tokens.vocab_size,
                 f"text ids + bins + special tokens = {self.tokens.vocab_size}")
        _require(problems, "vision.out_hidden_size", self.vision.out_hidden_size,
                 self.vision.out_hidden_size == self.text.hidden_size,
                 f"text.hidden_size = {self.text.hidden_size}")
        _require(problems, "vision.deepstack_indexes", self.vision.deepstack_indexes,
                 len(self.vision.deepstack_indexes) <= self.text.num_layers,
                 f"no more entries than text layers, {self.text.num_layers}")
        _require(problems, "expert.num_heads", self.expert.num_heads,
                 self.expert.num_heads % self.text.num_kv_heads == 0,
                 f"a multiple of text.num_kv_heads = {self.text.num_kv_heads}")
        _finish(problems)

    def with_tokens(self, tokens: TokenConfig) -> ModelConfig:
        """The same shapes over another vocabulary."""
        text = dataclasses.replace(self.text, vocab_size=tokens.vocab_size)
        return dataclasses.replace(self, text=text, tokens=tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, as JSON holds them."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Rebuild from `to_dict` (or its JSON).

        Raises:
            ConfigError: a key is unknown or missing, or a value is refused.
        """
        return _build(cls, values, "")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(cls)
    wrong = [f"{prefix}{key}: unknown, expected one of {', '.join(sorted(kinds))}"
             for key in values if key not in kinds]
    wrong += [f"{prefix}{f.name}: missing, expected a value" for f in dataclasses.fields(cls)
              if f.default is dataclasses.MISSING and f.name not in values]
    _finish(wrong)
    built: dict[str, Any] = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(kinds[key]):
            built[key] = _build(kinds[key], value, f"{prefix}{key}.")
        else:
            built[key] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def _alpamayo_r1() -> ModelConfig:
    return ModelConfig("alpamayo-r1", TextConfig(), VisionConfig(), ExpertConfig(), FlowConfig(),
                       TokenConfig())


def _alpamayo_1_5() -> ModelConfig:
    return dataclasses.replace(_alpamayo_r1(), name="alpamayo-1.5",
                               expert=ExpertConfig(fourier_float32=False))


def nano(text_vocab_size: int = 1000) -> ModelConfig:
    """The stand-in: Alpamayo's layout, deep and thin, at a size a laptop runs and trains."""
    tokens = TokenConfig.extending(text_vocab_size)
    text = TextConfig(
        vocab_size=tokens.vocab_size, hidden_size=128, num_layers=12, num_heads=4,
        num_kv_heads=2, head_dim=32, intermediate_size=384, rope_theta=10_000.0,
        mrope_section=(6, 5, 5), max_positions=2048)
    vision = VisionConfig(
        depth=4, hidden_size=160, num_heads=4, intermediate_size=480, out_hidden_size=128,
        num_position_embeddings=64, deepstack_indexes=(0, 1, 2), image_height=64,
        image_width=128)
    # Frequencies up to 100 take a small expert thousands of steps to read a number from: after
    # 150 steps the identity is fitted to 0.93 of its variance with them, to 0.01 with 1 .. 2.
    expert = ExpertConfig(hidden_size=128, intermediate_size=256, num_heads=4,
                          projector_hidden_size=128, max_fourier_frequency=2.0)
    return ModelConfig("nano", text, vision, expert, FlowConfig(), tokens)


def nano_fast(text_vocab_size: int = 1000) -> ModelConfig:
    """The stand-in again, with a smaller vision tower."""
    slower = nano(text_vocab_size)
    text = dataclasses.replace(slower.text, num_layers=12, intermediate_size=384)
    vision = dataclasses.replace(slower.vision, depth=4, hidden_size=96, intermediate_size=256,
                                 deepstack_indexes=(0, 1, 2))
    return dataclasses.replace(slower, name="nano-fast", text=text, vision=vision)


_PRESETS = {"alpamayo-r1": _alpamayo_r1, "alpamayo-1.5": _alpamayo_1_5, "nano": nano,
            "nano-fast": nano_fast}


def preset(name: str) -> ModelConfig:
    """The configuration called `name`.

    Raises:
        ConfigError: no such preset.
    """
    if name not in _PRESETS:
        raise ConfigError([f"preset: given {name!r}, expected one of {', '.join(_PRESETS)}"])
    return _PRESETS[name]()
