"""Keys and values of a frozen target's prompts, computed once and read by many steps.

The action expert's stage changes nothing of the text decoder, so what the expert reads of a sample
stays the same: half precision in memory, widened again for the rows of a step. Knows no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import numpy as np
import torch

from ..models.config import TextConfig
from .dataset import Batch
from .losses import TextPass


def bytes_of(text: TextConfig, tokens: int) -> int:
    """Memory of one sample of so many tokens in half precision."""
    return text.num_layers * 2 * text.num_kv_heads * tokens * text.head_dim * 2


class StoredKV:
    """Keys and values of B rows; see PromptKV."""

    def __init__(self, stored: torch.Tensor):
        """`stored`: (B, layers, 2, Hkv, length, D), any floating type."""
        self._stored = stored

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See PromptKV; float32."""
        keys, values = self._stored[:, layer_index].unbind(1)
        return keys.float(), values.float()


@dataclass(frozen=True)
class CachedRows:
    """What the expert's loss needs of B samples.

    Attributes:
        prompt_kv: as long as the longest row; shorter rows are masked by `offset`.
        rope_delta, offset: (B,) int64.
        controls: (B, 64, 2) float32, normalised.
        v0_mps: (B,) float32.
    """

    prompt_kv: StoredKV
    rope_delta: torch.Tensor
    offset: torch.Tensor
    controls: torch.Tensor
    v0_mps: torch.Tensor


class CachedKeys:
    """N samples as the frozen target sees them, answers included."""

    def __init__(self, stored: torch.Tensor, rope_delta: torch.Tensor, offset: torch.Tensor,
                 controls: torch.Tensor, v0_mps: torch.Tensor):
        """`stored`: (N, layers, 2, Hkv, longest, D); the others as in CachedRows."""
        self._stored, self._rope_delta, self._offset = stored, rope_delta, offset
        self._controls, self._v0_mps = controls, v0_mps

    def __len__(self) -> int:
        return len(self._offset)

    @classmethod
    def collect(cls, passes: Iterable[tuple[Batch, TextPass]], text: TextConfig, count: int,
                longest: int, dtype: torch.dtype = torch.float16) -> CachedKeys:
        """Keep what text passes left.

        Args:
            passes: batches and the frozen target's passes over them, `count` rows in all.
            longest: tokens of the longest sample; memory is taken once, for all rows.
            dtype: float16 holds a nano's keys and values to 1e-3 of their size.
        """
        stored = torch.zeros((count, text.num_layers, 2, text.num_kv_heads, longest,
                              text.head_dim), dtype=dtype)
        numbers: list[tuple[torch.Tensor, ...]] = []
        start = 0
        for batch, given in passes:
            stop, length = start + len(batch.offset), batch.input_ids.shape[1]
            assert length <= longest, f"a sample of {length} tokens, expected <= {longest}"
            for layer in range(text.num_layers):
                for part, values in enumerate(given.prompt_kv.layer(layer)):
                    stored[start:stop, layer, part, :, :length] = values
            numbers.append((given.rope_delta, torch.from_numpy(batch.offset),
                            torch.from_numpy(batch.controls), torch.from_numpy(batch.v0_mps)))
            start = stop
        assert start == count, f"{start} rows, expected {count}"
        return cls(stored, *(torch.cat(parts) for parts in zip(*numbers)))

    def rows(self, chosen: np.ndarray) -> CachedRows:
        """The samples `chosen`, (B,) integers below len(self)."""
        index = torch.from_numpy(np.asarray(chosen, np.int64))
        offset = self._offset[index]
        stored = self._stored[index, ..., :int(offset.max()), :]
        return CachedRows(StoredKV(stored), self._rope_delta[index], offset,
                          self._controls[index], self._v0_mps[index])
