"""Additive attention masks: 0 where a query may look, a large negative number where not.

-1e30 would overflow float16; the dtype's own minimum is used, never -inf (a fully masked row
must stay finite).
"""

from __future__ import annotations

from typing import Sequence

import torch


def additive(allowed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """bool -> 0 where True, the dtype's minimum where False, same shape."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)


def causal_mask(length: int, past: int, dtype: torch.dtype = torch.float32,
                device: torch.device | None = None) -> torch.Tensor:
    """A block of `length` new tokens after `past` cached ones, (1, 1, length, past + length)."""
    allowed = torch.ones(length, past + length, dtype=torch.bool, device=device)
    return additive(allowed.tril(past), dtype)[None, None]


def tree_mask(parents: Sequence[int], past: int, dtype: torch.dtype = torch.float32,
              device: torch.device | None = None) -> torch.Tensor:
    """Each node sees the cache, its ancestors and itself.

    Args:
        parents: index of each node's parent in topological order, -1 for a root.
        past: cached tokens before the tree.
    Returns:
        (1, 1, n, past + n).
    """
    n = len(parents)
    allowed = torch.zeros(n, past + n, dtype=torch.bool)
    allowed[:, :past] = True
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"node {node}: parent {parent} is not before it"
        if parent >= 0:
            allowed[node] = allowed[parent]
        allowed[node, past + node] = True
    return additive(allowed.to(device), dtype)[None, None]


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 0 for a root: its position is the committed length plus this."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def prefix_mask(visible: torch.Tensor, capacity: int, queries: int,
                dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The action expert's mask: the first `visible` of the keys, then all action tokens.

    Args:
        visible: (B,) int64, keys of each row up to and including the stop token.
        capacity: keys in the prompt's KV.
        queries: action tokens.
    Returns:
        (B, 1, 1, capacity + queries), the same for every query.
    """
    keys = torch.arange(capacity + queries, device=visible.device)
    allowed = (keys < visible[:, None]) | (keys >= capacity)
    return additive(allowed, dtype)[:, None, None, :]
