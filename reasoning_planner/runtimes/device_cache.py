"""Keys and values of all layers in one piece of device memory: moved, cut and cleared by rows.

One copy moves a token's rows of every layer and head. Knows no engines.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from .device_memory import ALIGNMENT, Buffer, DeviceMemory, Rows, aligned
from ..models.config import TextConfig

KINDS = ("key", "value")


class DeviceCache:
    """(2 x layers, KV heads, slots, D): key of layer 0, value of layer 0, key of layer 1, ..."""

    def __init__(self, memory: DeviceMemory, text: TextConfig, slots: int, dtype: np.dtype):
        row_bytes = text.head_dim * np.dtype(dtype).itemsize
        head_bytes = slots * row_bytes
        assert text.num_kv_heads * head_bytes % ALIGNMENT == 0, (slots, row_bytes)
        self.slots = slots
        self._memory = memory
        self._text = text
        self._row_bytes, self._head_bytes = row_bytes, head_bytes
        self._heads = 2 * text.num_layers * text.num_kv_heads
        self._buffer = memory.allocate(self._heads * head_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """"key_0", "value_0", "key_1", ... in the order of the memory."""
        return tuple(f"{kind}_{i}" for i in range(self._text.num_layers) for kind in KINDS)

    @property
    def addresses(self) -> dict[str, int]:
        """Name -> address of a tensor (1, KV heads, slots, D)."""
        size = self._text.num_kv_heads * self._head_bytes
        return {name: self._buffer.address + index * size
                for index, name in enumerate(self.names)}

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """Move the tokens start + i for i in `nodes`, ascending, up to start."""
        for place, node in enumerate(nodes):
            if node != place:
                self._memory.copy_rows(self._rows(start + place, 1), self._rows(start + node, 1))

    def clear(self) -> None:
        """Zero every slot: a hidden one is multiplied by 0, which does not help against a NaN."""
        self._memory.clear_rows(self._rows(0, self.slots))

    def write(self, start: int, rows: NewRows) -> None:
        """Copy new tokens' rows to the slots from `start` on."""
        target = self._rows(start, rows.count)
        if rows.is_even:
            width = rows.count * self._row_bytes
            self._memory.copy_rows(target, Rows(rows.buffer, 0, width, width, self._heads))
            return
        heads, width = self._text.num_kv_heads, rows.count * self._row_bytes
        for index in range(2 * self._text.num_layers):
            piece = Rows(self._buffer, target.offset + index * heads * self._head_bytes,
                         self._head_bytes, width, heads)
            self._memory.copy_rows(piece, Rows(rows.buffer, index * rows.tensor_bytes, width,
                                               width, heads))

    def new_rows(self, count: int) -> NewRows:
        """Memory for the rows of `count` new tokens, as an engine gives them out."""
        return NewRows(self._memory, self.names,
                       self._text.num_kv_heads * count * self._row_bytes, count)

    def _rows(self, start: int, count: int) -> Rows:
        assert 0 <= start and start + count <= self.slots, (start, count, self.slots)
        return Rows(self._buffer, start * self._row_bytes, self._head_bytes,
                    count * self._row_bytes, self._heads)


class NewRows:
    """Tensors (1, KV heads, count, D), one for each of the cache's.

    Attributes:
        count: tokens.
        tensor_bytes: from one tensor to the next.
        is_even: they lie one behind the other without a gap.
        addresses: name -> address.
    """

    def __init__(self, memory: DeviceMemory, names: Sequence[str], num_bytes: int, count: int):
        self.count = count
        self.tensor_bytes = aligned(num_bytes)
        self.is_even = self.tensor_bytes == num_bytes
        self.buffer: Buffer = memory.allocate(self.tensor_bytes * len(names))
        self.addresses = {name: self.buffer.address + index * self.tensor_bytes
                          for index, name in enumerate(names)}
