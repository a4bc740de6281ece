"""The text decoder of Qwen3-VL, and the decoder layer that the action expert shares.

Positions arrive as cos and sin, visibility as an additive mask, memory as an attention backend:
prefill, decode, block verification and tree verification are one forward. It knows neither
images nor tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .config import TextConfig
from .kv_cache import AttentionBackend


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one decoder layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float

    @classmethod
    def of_text(cls, text: TextConfig) -> LayerShape:
        """The text decoder's own layers."""
        return cls(text.hidden_size, text.num_heads, text.num_kv_heads, text.head_dim,
                   text.intermediate_size, text.rms_norm_eps)


class Attention(nn.Module):
    """Grouped-query attention; q and k are normalised per head before the rotation."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))                     # (B, n, heads, D)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                mask: torch.Tensor | None, backend: AttentionBackend, layer_index: int
                ) -> torch.Tensor:
        """(B, n, hidden) -> (B, n, hidden); cos, sin (B or 1, n, D / 2)."""
        q = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        k = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        v = self._heads(self.v_proj(hidden)).transpose(1, 2)            # (B, Hkv, n, D)
        q, k = backend.rotate(q, cos, sin), backend.rotate(k, cos, sin)
        attended = backend.attend(layer_index, q, k, v, mask)           # (B, Hq, n, D)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = SwiGlu(shape.hidden_size, shape.intermediate_size)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                mask: torch.Tensor | None, backend: AttentionBackend, layer_index: int
                ) -> torch.Tensor:
        """See Attention.forward."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask, backend,
                                         layer_index)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass(frozen=True)
class TextOutput:
    """What a pass over n tokens leaves.

    Attributes:
        last_hidden: (B, n, hidden), after the final norm: what lm_head reads.
        selected: (B, n, hidden) for each layer asked for, before the final norm.
    """

    last_hidden: torch.Tensor
    selected: tuple[torch.Tensor, ...]


class TextModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        shape = LayerShape.of_text(config)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs_embeds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                mask: torch.Tensor | None, backend: AttentionBackend,
                deepstack: Sequence[torch.Tensor] = (), select_layers: Sequence[int] = ()
                ) -> TextOutput:
        """Run the decoder.

        Args:
            inputs_embeds: (B, n, hidden).
            cos, sin: (B or 1, n, head_dim / 2).
            mask: additive, broadcastable to (B, 1, n, keys); None as the backend states.
            backend: keeps keys and values.
            deepstack: one (B, n, hidden) per early layer, zero outside visual tokens, added to
                the output of layers 0, 1, 2.
            select_layers: layers (0 = first) whose output, DeepStack included, is returned.
        """
        assert len(deepstack) <= len(self.layers), len(deepstack)
        hidden = inputs_embeds
        outputs: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, mask, backend, index)
            if index < len(deepstack):
                hidden = hidden + deepstack[index]
            if index in select_layers:
                outputs[index] = hidden
        return TextOutput(self.norm(hidden), tuple(outputs[i] for i in select_layers))
