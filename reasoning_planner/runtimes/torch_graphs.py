"""Passes of fixed shapes and addresses in PyTorch, so that a CUDA graph can hold them.

The cache is read over its whole capacity behind a mask, instead of up to its length, and written
by row numbers that lie on the device. Off CUDA the same passes run eagerly, which is how they are
tested. What they compute is models/target.py's and models/draft.py's.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..models.draft import Draft, DraftSession
from ..models.kv_cache import AttentionBackend, KVCache
from ..models.masks import additive
from ..models.target import Target

MAX_STATIC_BLOCK = 64       # longer blocks are rare and take the ordinary way


class StaticCache(KVCache):
    """A KVCache whose memory passes of fixed shapes use too."""

    @classmethod
    def of(cls, target: Target, capacity: int) -> StaticCache:
        """An empty cache of a model's shape, dtype and device; batch 1."""
        text, weight = target.config.text, target.lm_head.weight
        return cls(text.num_layers, 1, text.num_kv_heads, capacity, text.head_dim, weight.dtype,
                   weight.device)

    def clear(self) -> None:
        """Zero every row: a masked one is multiplied by 0, which does not help against a NaN."""
        self._store.zero_()

    def at(self, rows: torch.Tensor) -> StaticAttention:
        """Attention over the whole capacity that writes new keys to `rows`."""
        return StaticAttention(self._store, rows)


class StaticAttention(AttentionBackend):
    """Writes k and v to given rows and attends to every row behind a mask.

    The query heads that share a key head are rows of one product, so no key is repeated.
    """

    def __init__(self, store: torch.Tensor, rows: torch.Tensor):
        """
        Args:
            store: (layers, 2, 1, Hkv, capacity, D).
            rows: (n,) int64, where the n tokens of a pass go.
        """
        self._store, self._rows = store, rows

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """See AttentionBackend; mask (1, 1, n, capacity) is a must."""
        assert mask is not None, "every row is read: unused ones need a mask"
        keys, values = self._store[layer_index]
        keys.index_copy_(2, self._rows, k)
        values.index_copy_(2, self._rows, v)
        batch, heads, n, size = q.shape
        shared = keys.shape[1]
        grouped = q.reshape(batch, shared, heads // shared * n, size)
        mask = mask.repeat(1, 1, heads // shared, 1)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.reshape(batch, heads, n, size)


class Replay:
    """A function of fixed tensors; on CUDA captured once and replayed.

    What it returns is overwritten by the next call.
    """

    def __init__(self, function: Callable[[], tuple[torch.Tensor, ...]], device: torch.device):
        self._function, self._device = function, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None:
            self._capture()
        self._graph.replay()
        return self._results

    def _capture(self) -> None:
        """After one run aside, in which libraries set up what no graph may hold."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._results = self._function()
        self._graph = graph


class Given:
    """Small whole numbers that change with every pass: one copy from pinned memory takes all."""

    def __init__(self, sizes: dict[str, int], device: torch.device):
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int64,
                                 pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        self._arrays = dict(zip(sizes, np.split(self._host.numpy(),
                                                np.cumsum([*sizes.values()])[:-1])))
        self.tensors = dict(zip(sizes, self._device.split([*sizes.values()])))

    def upload(self, **values: np.ndarray | int) -> None:
        """Set all of them; what was given before must have been used up."""
        assert values.keys() == self._arrays.keys(), (sorted(values), sorted(self._arrays))
        for name, value in values.items():
            self._arrays[name][:] = value
        self._device.copy_(self._host, non_blocking=True)


class StaticBlock:
    """A decoder pass over n tokens behind whatever is cached."""

    def __init__(self, target: Target, cache: StaticCache, n: int, layers: Sequence[int],
                 top_k: int):
        device = target.lm_head.weight.device
        self._target, self._layers, self._top_k, self._n = target, tuple(layers), top_k, n
        self._capacity = cache.capacity
        self._given = Given({"ids": n, "positions": n, "rows": n, "past": 1, "visible": n * n},
                            device)
        self._backend = cache.at(self._given.tensors["rows"])
        self._replay = Replay(self._forward, device)

    def run(self, token_ids: np.ndarray, positions: np.ndarray, past: int,
            visible: np.ndarray | None) -> tuple[torch.Tensor, ...]:
        """One pass.

        Args:
            token_ids, positions: (n,) int64.
            past: cached tokens, behind which the n are written.
            visible: (n, n) bool among the new ones; None: all before it and itself.
        Returns:
            token_ids (n,), top_ids and top_log_probs (n, k), logits (n, V) float32 with bins at
            -inf, and (n, hidden) of each chosen layer; valid until the next pass.
        """
        seen = np.tri(self._n, dtype=bool) if visible is None else visible
        self._given.upload(ids=token_ids, positions=positions, past=past,
                           rows=np.arange(past, past + self._n), visible=seen.reshape(-1))
        return self._replay()

    @torch.no_grad()
    def _forward(self) -> tuple[torch.Tensor, ...]:
        target, given = self._target, self._given.tensors
        cos, sin = target.cos_sin(given["positions"][None])
        embeds = target.language_model.embed_tokens(given["ids"][None])
        output = target.language_model(embeds, cos, sin, self._mask(embeds.dtype), self._backend,
                                       (), self._layers)
        logits = target.lm_head(output.last_hidden)[0].float()
        masked = target.mask_trajectory_bins(logits)                        # (n, V)
        top = masked.log_softmax(-1).topk(self._top_k, dim=-1)
        return (masked.argmax(-1), top.indices, top.values, masked,
                *(layer[0] for layer in output.selected))

    def _mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(1, 1, n, capacity): the past, and of the new rows those said to be visible."""
        given = self._given.tensors
        columns = torch.arange(self._capacity, device=given["past"].device)
        allowed = (columns < given["past"]).expand(self._n, -1).clone()
        allowed.index_copy_(1, given["rows"], given["visible"].view(self._n, self._n).bool())
        return additive(allowed, dtype)[None, None]


class StaticDraftSession(DraftSession):
    """A DraftSession whose block is one pass of fixed shapes, behind the context's rows."""

    def __init__(self, draft: Draft, capacity: int, top_k: int):
        block = draft.config.block_length
        super().__init__(draft, capacity + block)
        self.capacity, self._top_k = capacity, top_k
        device, half = self._weight.device, draft.config.head_dim // 2
        self._given = Given({"id": 1, "start": 1, "stop": 1}, device)
        self._rotation = torch.zeros(2, 1, block, half, device=device)
        rows = torch.arange(capacity, capacity + block, device=device)
        self._backend = StaticAttention(self._store, rows)
        self._replay = Replay(self._forward, device)

    def choose(self, last_id: int, positions: np.ndarray, last: int | None = None
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The likeliest tokens of one block behind the context; arguments as of `block`.

        Returns:
            token_ids (block_length - 1,), top_ids and top_log_probs (block_length - 1, k).
        """
        found = self._run(last_id, positions, last)
        return tuple(tensor.cpu().numpy() for tensor in found[:3])

    def block(self, last_id: int, positions: np.ndarray, last: int | None = None) -> np.ndarray:
        """See DraftSession."""
        return self._run(last_id, positions, last)[3].cpu().numpy()

    @torch.no_grad()
    def _run(self, last_id: int, positions: np.ndarray, last: int | None
             ) -> tuple[torch.Tensor, ...]:
        for place, angles in zip(self._rotation, self._cos_sin(positions)):
            place.copy_(angles)
        start = 0 if last is None else max(0, self.length - last)
        self._given.upload(id=last_id, start=start, stop=self.length)
        return self._replay()

    @torch.no_grad()
    def _forward(self) -> tuple[torch.Tensor, ...]:
        draft, given = self._draft, self._given.tensors
        hidden = draft.block_hidden(given["id"][None], self._backend, *self._rotation,
                                    mask=self._mask())
        logits = draft.logits(hidden)[0, 0].float()                         # (block - 1, V)
        top = logits.log_softmax(-1).topk(self._top_k, dim=-1)
        return logits.argmax(-1), top.indices, top.values, logits

    def _mask(self) -> torch.Tensor:
        """(1, 1, block, capacity + block): context rows start .. stop, and the block's own."""
        given, block = self._given.tensors, self._draft.config.block_length
        columns = torch.arange(self.capacity + block, device=self._weight.device)
        allowed = (columns >= given["start"]) & (columns < given["stop"])
        allowed |= columns >= self.capacity
        return additive(allowed.expand(block, -1), self._weight.dtype)[None, None]
