"""Positions and rotary embedding: M-RoPE ids with images, flat ids, cos/sin, the rotation.

Angles are float32 whatever the weights are: at position 3000 a half-precision angle is useless.
"""

from __future__ import annotations

from typing import Sequence

import torch

TEXT, VISUAL = 0, 1


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | None = None
                        ) -> torch.Tensor:
    """theta^(-2 i / head_dim), (head_dim / 2,) float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta ** exponents


def mrope_axes(mrope_section: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Which axis (0 time, 1 height, 2 width) turns each frequency, interleaved.

    Height takes frequencies 1, 4, 7, ..., width 2, 5, 8, ..., as many as their sections say;
    time takes all others, the tail included.

    Returns:
        (sum(mrope_section),) int64.
    """
    frequency = torch.arange(sum(mrope_section), device=device)
    axes = torch.zeros_like(frequency)
    for axis in (1, 2):
        axes[(frequency % 3 == axis) & (frequency < 3 * mrope_section[axis])] = axis
    return axes


def rope_cos_sin(position_ids: torch.Tensor, head_dim: int, theta: float,
                 mrope_section: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation angles.

    Args:
        position_ids: (3, B, L) for M-RoPE, or (B, L) where the three axes are equal (flat).
        mrope_section: frequencies of time, height and width; used by the 3-axis form alone.
    Returns:
        Two (B, L, head_dim / 2) float32.
    """
    inverse = inverse_frequencies(head_dim, theta, position_ids.device)
    positions = position_ids.to(torch.float32)
    if position_ids.dim() == 3:
        axes = mrope_axes(mrope_section, position_ids.device)
        angles = positions.permute(1, 2, 0)[..., axes] * inverse
    else:
        angles = positions[..., None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of the last axis.

    Args:
        x: (B, heads, L, D).
        cos, sin: (B or 1, L, D / 2).
    """
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def flat_position_ids(batch: int, length: int, start: int = 0,
                      device: torch.device | None = None) -> torch.Tensor:
    """FlatRoPE: the index in the flattened sequence, (B, L) int64."""
    return torch.arange(start, start + length, device=device).expand(batch, length)


def _visual_runs(kinds: torch.Tensor) -> list[tuple[int, int, int]]:
    """(kind, start, stop) of each run of equal values in a (L,) tensor."""
    if kinds.numel() == 0:
        return []
    changes = (torch.nonzero(kinds[1:] != kinds[:-1]).flatten() + 1).tolist()
    edges = [0, *changes, kinds.numel()]
    return [(int(kinds[a]), a, b) for a, b in zip(edges[:-1], edges[1:])]


def _row_positions(kinds: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    """(3, L) ids of one unpadded row; takes the grids it uses off the front of `grids`."""
    parts: list[torch.Tensor] = []
    position = 0
    for kind, start, stop in _visual_runs(kinds):
        if kind == TEXT:
            parts.append(torch.arange(position, position + stop - start).expand(3, -1))
            position += stop - start
            continue
        while start < stop:                       # images may follow each other undelimited
            assert grids, "more visual tokens than image grids"
            rows, columns = grids.pop(0)
            height = torch.arange(rows).repeat_interleave(columns) + position
            width = torch.arange(columns).repeat(rows) + position
            parts.append(torch.stack((torch.full_like(height, position), height, width)))
            position += max(rows, columns)
            start += rows * columns
        assert start == stop, "an image grid does not fit its run of visual tokens"
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.int64)


def mrope_position_ids(is_visual: torch.Tensor, grids: Sequence[tuple[int, int]],
                       attention_mask: torch.Tensor | None = None
                       ) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-VL position ids. A text token at s has (s, s, s); a visual token of an image that
    starts at s has (s, s + row, s + column); text goes on at s + max(rows, columns).

    Args:
        is_visual: (B, L) bool, True at image or video placeholder tokens.
        grids: (rows, columns) of visual tokens of every image, in reading order over the batch.
            A video is one grid for each of its temporal patches.
        attention_mask: (B, L), zero at padding, which gets position 0 and counts for nothing.
    Returns:
        (3, B, L) int64 ids, and (B,) int64 rope_delta: the position of the token appended at
        index i >= L of a row is i + rope_delta.
    """
    batch, length = is_visual.shape
    kinds = is_visual.to(torch.int64).cpu()
    remaining = [tuple(grid) for grid in grids]
    position_ids = torch.zeros(3, batch, length, dtype=torch.int64)
    rope_delta = torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        kept = (torch.arange(length) if attention_mask is None
                else torch.nonzero(attention_mask[row].cpu()).flatten())
        ids = _row_positions(kinds[row, kept], remaining)
        position_ids[:, row, kept] = ids
        rope_delta[row] = (int(ids.max()) + 1 if ids.numel() else 0) - length
    assert not remaining, f"{len(remaining)} image grids without visual tokens"
    return position_ids.to(is_visual.device), rope_delta.to(is_visual.device)
