"""The block draft in PyTorch, the oracle of its runtimes: context features, layers, one pass.

Hidden states of some target layers, concatenated and projected, are the context; every layer
takes its keys and values from [context; block] and its queries from the block, whose tokens all
see each other. Context tokens do not attend, so a context is cached by appending. Embedding and
lm_head are the target's, neither trained nor stored here. It knows no prompt and no acceptance.

Source: DFlash (block diffusion drafting), with FlatRoPE of arXiv:2606.31160 as one of its ropes.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np
import torch
from torch import nn

from . import rope
from .draft_config import DraftConfig
from .kv_cache import AttentionBackend, PrefixAttention, PromptKV
from .masks import additive
from .target import Target
from .text import DecoderLayer, LayerShape


class LayerKV:
    """See kv_cache.PromptKV: the context's keys and values, (B, Hkv, n, D) each layer."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._layers = tuple(layers)

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See PromptKV."""
        return self._layers[layer_index]


class Draft(nn.Module):
    """Proposes block_length - 1 tokens in one pass."""

    def __init__(self, config: DraftConfig, target: Target):
        """
        Args:
            target: lends its embedding and lm_head; they are not among the draft's parameters.
        Raises:
            ConfigError: the target is of another shape.
        """
        super().__init__()
        config.require_target(target.config)
        self.config = config
        size = config.hidden_size
        shape = LayerShape(size, config.num_heads, config.num_kv_heads, config.head_dim,
                           config.intermediate_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.context_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        bins = target.config.tokens.trajectory_bins
        self.bins = slice(bins.start, bins.stop)
        # In a tuple, so that the module does not own them.
        self._lent = (target.language_model.embed_tokens, target.lm_head)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Weights to train from."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name == "mask_embedding":
                weight.normal_(0.0, 0.02, generator=generator)
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                std = weight.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * len(self.layers))
                weight.normal_(0.0, std, generator=generator)

    def cos_sin(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, B, n) or (B, n) positions -> two (B, n, head_dim / 2) float32."""
        config = self.config
        return rope.rope_cos_sin(position_ids, config.head_dim, config.rope_theta,
                                 config.mrope_section)

    def context_kv(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                   ) -> LayerKV:
        """Keys and values of context tokens; those of one depend on no other.

        Args:
            hidden_states: (B, n, K * hidden), the target's, of the K feature layers side by side.
            cos, sin: (B or 1, n, head_dim / 2).
        """
        context = self.context_norm(self.fc(hidden_states))             # (B, n, hidden)
        return LayerKV([self._layer_kv(layer, context, cos, sin) for layer in self.layers])

    def _layer_kv(self, layer: DecoderLayer, context: torch.Tensor, cos: torch.Tensor,
                  sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention, heads = layer.self_attn, (-1, self.config.head_dim)
        k = attention.k_norm(attention.k_proj(context).unflatten(-1, heads)).transpose(1, 2)
        v = attention.v_proj(context).unflatten(-1, heads).transpose(1, 2)
        return rope.rotate(k, cos, sin), v                              # (B, Hkv, n, D)

    def block_hidden(self, last_ids: torch.Tensor, context: PromptKV | AttentionBackend,
                     cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
                     ) -> torch.Tensor:
        """One pass over A blocks a row.

        Args:
            last_ids: (B, A) int64, the last committed token of each block.
            context: keys and values of (B) rows, or a backend that holds them.
            cos, sin: (B or 1, A * block_length, head_dim / 2), blocks one after the other.
            mask: from `blocks_mask`; None, for A = 1: the block sees the context and itself.
        Returns:
            (B, A, block_length - 1, hidden), what lm_head reads to write the drafted tokens.
        """
        assert mask is not None or last_ids.shape[1] == 1, "several blocks need their mask"
        first = self._lent[0](last_ids)[:, :, None]                     # (B, A, 1, hidden)
        masked = self.mask_embedding.to(first.dtype).expand(
            *last_ids.shape, self.config.block_length - 1, -1)
        hidden = torch.cat((first, masked), dim=2).flatten(1, 2)        # (B, A * block, hidden)
        backend = context if isinstance(context, AttentionBackend) else PrefixAttention(context)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, mask, backend, index)
        hidden = self.norm(hidden).unflatten(1, (-1, self.config.block_length))
        return hidden[:, :, 1:]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., V), the trajectory bins at -inf: text never holds them."""
        logits = self._lent[1](hidden)
        return logits.index_fill(-1, torch.arange(self.bins.start, self.bins.stop,
                                                  device=logits.device), -math.inf)

    def text_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., V - bins), the bins left out: a sixth of nano's vocabulary."""
        weight = self._lent[1].weight
        return nn.functional.linear(hidden, torch.cat((weight[:self.bins.start],
                                                       weight[self.bins.stop:])))

    def text_columns(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Columns of `text_logits` that belong to tokens, none of them a bin."""
        count = self.bins.stop - self.bins.start
        return torch.where(token_ids >= self.bins.stop, token_ids - count, token_ids)


def blocks_mask(visible: torch.Tensor, block_length: int) -> torch.Tensor:
    """Each of A blocks sees its own context and itself, in both directions.

    Args:
        visible: (B, A, n) bool, from draft_positions.visible_context.
    Returns:
        additive (B, 1, A * block_length, n + A * block_length).
    """
    batch, blocks, _ = visible.shape
    own = torch.arange(blocks, device=visible.device).repeat_interleave(block_length)
    inside = (own[:, None] == own).expand(batch, -1, -1)
    context = visible.repeat_interleave(block_length, dim=1)
    return additive(torch.cat((context, inside), dim=2))[:, None]


class DraftSession:
    """A draft and the cached keys and values of one growing context; numpy in and out."""

    def __init__(self, draft: Draft, capacity: int):
        config = draft.config
        self._draft = draft.eval()
        self._weight = draft.fc.weight
        shape = (config.num_layers, 2, 1, config.num_kv_heads, capacity, config.head_dim)
        self._store = self._weight.new_zeros(shape).detach()
        self.capacity, self.length = capacity, 0

    def clear(self) -> None:
        """Forget the context."""
        self.length = 0

    @torch.no_grad()
    def append(self, hidden_states: np.ndarray, positions: np.ndarray) -> None:
        """Cache context tokens.

        Args:
            hidden_states: (n, K * hidden) float32.
            positions: (3, n) int64.
        """
        stop = self.length + len(hidden_states)
        assert stop <= self.capacity, f"{stop} tokens do not fit a cache of {self.capacity}"
        cos, sin = self._cos_sin(positions)
        given = torch.from_numpy(np.ascontiguousarray(hidden_states)).to(self._weight)[None]
        new = self._draft.context_kv(given, cos, sin)
        for index, (keys, values) in enumerate(self._store):
            keys[:, :, self.length:stop], values[:, :, self.length:stop] = new.layer(index)
        self.length = stop

    @torch.no_grad()
    def block(self, last_id: int, positions: np.ndarray, last: int | None = None) -> np.ndarray:
        """Logits of one block behind the context.

        Args:
            positions: (3, block_length) int64.
            last: how many of the cached tokens it sees, the last ones; None is all of them.
        Returns:
            (block_length - 1, V) float32, bins at -inf.
        """
        start = 0 if last is None else max(0, self.length - last)
        context = LayerKV([(store[0][:, :, start:self.length], store[1][:, :, start:self.length])
                           for store in self._store])
        cos, sin = self._cos_sin(positions)
        ids = torch.tensor([[last_id]], device=self._weight.device)
        hidden = self._draft.block_hidden(ids, context, cos, sin)
        return self._draft.logits(hidden)[0, 0].float().cpu().numpy()

    def _cos_sin(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(np.ascontiguousarray(positions)).to(self._weight.device)
        return self._draft.cos_sin(ids[:, None])
