"""Where attention meets the KV cache: one backend interface, three PyTorch backends.

A layer hands its rotated q, k, v to `backend.attend`; what is kept, and where, is the backend's
business. A graph exporter adds its own backend (GroupQueryAttention, TensorScatter, delta-KV)
and no layer changes.
"""

from __future__ import annotations

from typing import Protocol, Sequence

import torch
import torch.nn.functional as F

from . import rope


class AttentionBackend:
    """Base of all backends."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of q or k, (B, heads, n, D); cos, sin (B or 1, n, D / 2)."""
        return rope.rotate(x, cos, sin)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer.

        Args:
            q: (B, Hq, n, D), rotated.
            k, v: (B, Hkv, n, D), of the same tokens; k rotated.
            mask: additive, broadcastable to (B, Hq, n, keys), over the keys the backend holds
                followed by the new ones. None: what the backend states.
        Returns:
            (B, Hq, n, D).
        """
        raise NotImplementedError


class PromptKV(Protocol):
    """Keys and values of a prompt, as the action expert reads them."""

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v of one layer, each (B, Hkv, length, D)."""


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None,
          is_causal: bool = False) -> torch.Tensor:
    mask = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal,
                                          enable_gqa=q.shape[1] != k.shape[1])


class CausalAttention(AttentionBackend):
    """No cache: the sequence attends to itself, causally unless a mask is given.

    With `collect`, the layers' k and v are kept, detached, for the action expert.
    """

    def __init__(self, collect: bool = False):
        self._collect = collect
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """See AttentionBackend; mask None is causal."""
        if self._collect:
            self._layers[layer_index] = (k.detach(), v.detach())
        return _sdpa(q, k, v, mask, is_causal=mask is None)

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See PromptKV."""
        return self._layers[layer_index]


class PrefixAttention(AttentionBackend):
    """New tokens after a fixed, read-only prefix; mask None lets every token see everything."""

    def __init__(self, prompt: PromptKV, length: int | None = None):
        """`length`: how many of the prompt's keys exist for the reader; None is all of them."""
        self._prompt = prompt
        self._length = length

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """See AttentionBackend."""
        past_k, past_v = self._prompt.layer(layer_index)
        k = torch.cat((past_k[:, :, :self._length], k), dim=2)
        v = torch.cat((past_v[:, :, :self._length], v), dim=2)
        return _sdpa(q, k, v, mask)


class KVCache(AttentionBackend):
    """Static-capacity cache: appends in place, is cut by moving one number, never reallocates.

    Rows of a batch share one length. Inference only: nothing here is differentiable.
    """

    def __init__(self, num_layers: int, batch: int, num_kv_heads: int, capacity: int,
                 head_dim: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | None = None):
        shape = (num_layers, 2, batch, num_kv_heads, capacity, head_dim)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values are committed."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens it can hold."""
        return self._store.shape[4]

    @property
    def batch(self) -> int:
        """Rows."""
        return self._store.shape[2]

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """See AttentionBackend. Writes k, v behind the committed tokens; `advance` commits them.

        mask None is causal, and allowed for a first block or for a single token.
        """
        n = k.shape[2]
        stop = self._length + n
        assert stop <= self.capacity, f"{stop} tokens do not fit a cache of {self.capacity}"
        keys, values = self._store[layer_index]
        keys[:, :, self._length:stop] = k
        values[:, :, self._length:stop] = v
        first_block = self._length == 0 and mask is None
        assert mask is not None or first_block or n == 1, "a later block needs its mask"
        return _sdpa(q, keys[:, :, :stop], values[:, :, :stop], mask,
                     is_causal=first_block and n > 1)

    def advance(self, count: int) -> None:
        """Commit the `count` tokens that every layer has just written."""
        assert 0 <= count <= self.capacity - self._length, (count, self._length, self.capacity)
        self._length += count

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens (rejected draft tokens are behind them)."""
        assert 0 <= length <= self._length, f"cannot crop {self._length} tokens to {length}"
        self._length = length

    def compact(self, start: int, indices: Sequence[int]) -> None:
        """After a tree pass: keep tokens start + i for i in `indices`, moved up to `start`.

        Args:
            start: committed length before the tree was written.
            indices: ascending node numbers of the accepted path.
        """
        kept = list(indices)
        assert all(a < b for a, b in zip(kept, kept[1:])), f"not ascending: {kept}"
        assert not kept or (kept[0] >= 0 and start + kept[-1] < self._length), (start, kept)
        stop = start + len(kept)
        if kept != list(range(len(kept))):
            source = torch.tensor(kept, device=self._store.device) + start
            self._store[..., start:stop, :] = self._store.index_select(4, source)
        self._length = stop

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See PromptKV: views, valid until the next append."""
        keys, values = self._store[layer_index]
        return keys[:, :, :self._length], values[:, :, :self._length]
