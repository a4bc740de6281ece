"""Shape and switches of the block draft: one frozen dataclass, checked when made.

Nothing in this file needs torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Mapping

from ..errors import ConfigError
from .config import ModelConfig, TextConfig

CONFIG_NAME, WEIGHTS_NAME = "draft_config.json", "draft.safetensors"    # files of a release
KINDS = ("block",)
ROPES = ("flat", "mrope", "text_only", "local_reset")
CONTEXTS = ("full", "no_visual", "last_k", "history_masked")
# Layers 24, 30, 31, 32, 34 of 36 whose outputs the draft reads, as shares of the depth.
FEATURE_FRACTIONS = tuple(layer / 36 for layer in (24, 30, 31, 32, 34))


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """The same places in a target of another depth, each once: 12 layers give (8, 10, 11)."""
    places = {min(round(fraction * num_layers), num_layers - 1) for fraction in FEATURE_FRACTIONS}
    return tuple(sorted(places))


@dataclass(frozen=True)
class DraftConfig:
    """A block draft for one target.

    Attributes:
        kind: "block", all tokens of a draft in one pass.
        num_layers: of the draft.
        hidden_size: the target's too, as embedding and lm_head are.
        block_length: the last committed token and block_length - 1 drafted ones.
        feature_layers: of the target (0 = first), whose outputs are the draft's context.
        rope: see draft_positions.place_prompt.
        context: which context tokens the block sees: "full"; "no_visual" all but visual tokens;
            "last_k" the last `context_k` before the block; "history_masked" all but the ego
            history tokens.
        target_sha256: of the target that the draft was trained on, see
            `runtimes.draft_base.target_sha256`; "" binds to none.
    """

    num_layers: int = 2
    hidden_size: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12_288
    block_length: int = 8
    feature_layers: tuple[int, ...] = (24, 30, 31, 32, 34)
    kind: str = "block"
    rope: str = "flat"
    context: str = "full"
    context_k: int = 64
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, ...] = (24, 20, 20)
    rms_norm_eps: float = 1e-6
    target_sha256: str = ""

    def __post_init__(self) -> None:
        checks = [
            (name, 1 <= getattr(self, name) <= most, f"1 .. {most}")
            for name, most in (("num_layers", 64), ("hidden_size", 65_536), ("num_heads", 1024),
                               ("num_kv_heads", 1024), ("intermediate_size", 1 << 20),
                               ("context_k", 1 << 20))]
        checks += [(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
                   for name, allowed in (("kind", KINDS), ("rope", ROPES), ("context", CONTEXTS))]
        layers = self.feature_layers
        checks += [
            ("block_length", 2 <= self.block_length <= 257, "2 .. 257"),
            ("head_dim", self.head_dim >= 2 and self.head_dim % 2 == 0, "an even size"),
            ("num_heads", self.num_heads % max(self.num_kv_heads, 1) == 0,
             f"a multiple of num_kv_heads = {self.num_kv_heads}"),
            ("feature_layers", len(layers) > 0 and list(layers) == sorted(set(layers))
             and layers[0] >= 0, "ascending layer numbers"),
            ("mrope_section", len(self.mrope_section) == 3
             and sum(self.mrope_section) == self.head_dim // 2,
             f"three counts that sum to head_dim / 2 = {self.head_dim // 2}"),
            ("rope_theta", self.rope_theta > 1.0, "above 1")]
        problems = [f"draft.{name}: given {getattr(self, name)!r}, expected {expected}"
                    for name, holds, expected in checks if not holds]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def for_target(cls, text: TextConfig, **changes: Any) -> DraftConfig:
        """A draft whose layers are the target's own in shape.

        Args:
            changes: fields that are to differ.
        """
        values = {name: getattr(text, name) for name in
                  ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                   "rope_theta", "mrope_section", "rms_norm_eps")}
        return cls(**{**values, "feature_layers": feature_layers(text.num_layers), **changes})

    def require_target(self, model: ModelConfig) -> None:
        """
        Raises:
            ConfigError: the draft was made for a target of another shape.
        """
        text = model.text
        if self.hidden_size != text.hidden_size or self.feature_layers[-1] >= text.num_layers:
            raise ConfigError([f"draft: given hidden_size {self.hidden_size} and feature_layers "
                               f"{self.feature_layers}, expected those of {model.name}: "
                               f"{text.hidden_size} and below {text.num_layers}"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {key: list(value) if isinstance(value, tuple) else value
                for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftConfig:
        """Rebuild from `to_dict` (or its JSON); every field must be there.

        Raises:
            ConfigError: a key is unknown or missing, or a value is refused.
        """
        names = [item.name for item in dataclasses.fields(cls)]
        if sorted(values) != sorted(names):
            raise ConfigError([f"draft: given {', '.join(sorted(values))}, expected "
                               f"{', '.join(sorted(names))}"])
        return cls(**{key: tuple(value) if isinstance(value, list) else value
                      for key, value in values.items()})
