"""The vision tower of Qwen3-VL for a batch of images of one size, and image -> patches.

It knows nothing of resizing (perception does that) or of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import rope
from .config import VisionConfig

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6


def _merge_order(x: torch.Tensor, merge: int) -> torch.Tensor:
    """(rows, columns, ...) -> (rows * columns, ...), merge x merge blocks together."""
    rows, columns = x.shape[:2]
    blocks = x.reshape(rows // merge, merge, columns // merge, merge, *x.shape[2:])
    return blocks.transpose(1, 2).reshape(rows * columns, *x.shape[2:])


def image_patches(images: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """Normalise and cut images (mean = std = 0.5, so 0..255 -> -1..1).

    Args:
        images: (N, H, W, 3) uint8, sides multiples of patch x merge.
    Returns:
        (N, patches, channels * patch * patch) float32, in the tower's order: the patches of one
        merged token are neighbours. A still is not duplicated in time: the tower folds that in.
    """
    count, height, width, channels = images.shape
    patch, merge = config.patch_size, config.spatial_merge_size
    rows, columns = height // patch, width // patch
    assert rows % merge == 0 and columns % merge == 0, images.shape
    assert (rows * patch, columns * patch) == (height, width), images.shape
    pixels = images.to(torch.float32) / 127.5 - 1.0
    blocks = pixels.reshape(count, rows // merge, merge, patch, columns // merge, merge, patch,
                            channels)
    blocks = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6)     # N, row, col, row in, col in, C, ph, pw
    return blocks.reshape(count, rows * columns, channels * patch * patch)


class PatchEmbed(nn.Module):
    """A Conv3d over (time 2, patch, patch), held as such for the checkpoint, run as a matmul."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(N, P, C * patch * patch) stills -> (N, P, hidden).

        A still repeated in time meets the sum of the temporal weights: half the work and memory.
        """
        weight = self.proj.weight.sum(dim=2).flatten(1)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class VisionAttention(nn.Module):
    """Full attention within one image."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(N, P, hidden) -> (N, P, hidden)."""
        heads = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.transpose(1, 3).unbind(2)                       # (N, heads, P, D)
        attended = F.scaled_dot_product_attention(rope.rotate(q, cos, sin),
                                                  rope.rotate(k, cos, sin), v)
        return self.proj(attended.transpose(1, 2).flatten(2))


class VisionMlp(nn.Module):
    """Linear, tanh-approximated GELU, linear."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = VisionMlp(config)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(N, P, hidden) -> (N, P, hidden)."""
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin)
        return hidden + self.mlp(self.norm2(hidden))


class PatchMerger(nn.Module):
    """Join merge x merge neighbours into one token of the text decoder's width."""

    def __init__(self, config: VisionConfig, norm_after_merge: bool):
        super().__init__()
        merged_size = config.hidden_size * config.spatial_merge_size ** 2
        self.merged_size = merged_size
        self.norm_after_merge = norm_after_merge
        self.norm = nn.LayerNorm(merged_size if norm_after_merge else config.hidden_size,
                                 eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(merged_size, merged_size)
        self.linear_fc2 = nn.Linear(merged_size, config.out_hidden_size)

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], -1, self.merged_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, P, hidden) -> (N, P / merge^2, out_hidden)."""
        merged = self.norm(self._merge(x)) if self.norm_after_merge else self._merge(self.norm(x))
        return self.linear_fc2(F.gelu(self.linear_fc1(merged)))


@dataclass(frozen=True)
class VisionFeatures:
    """Visual tokens of N images.

    Attributes:
        tokens: (N, T, text hidden), put in the place of the image placeholders.
        deepstack: for each early text layer (N, T, text hidden), added to its output.
    """

    tokens: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


class VisionTower(nn.Module):
    """Patches -> visual tokens and DeepStack features."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_after_merge=True) for _ in config.deepstack_indexes)

    def _positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """The learned side x side grid stretched over `grid`, corners on corners, (P, hidden)."""
        side = self.config.position_grid_side
        table = self.pos_embed.weight.T.reshape(1, -1, side, side)
        stretched = F.interpolate(table, size=grid, mode="bilinear", align_corners=True)
        return _merge_order(stretched[0].permute(1, 2, 0), self.config.spatial_merge_size)

    def _rotation(self, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (1, P, D / 2): the first half turns with the row, the second the column."""
        device = self.pos_embed.weight.device
        inverse = rope.inverse_frequencies(self.config.head_dim // 2, ROPE_THETA, device)
        axes = [torch.arange(size, dtype=torch.float32, device=device) for size in grid]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        cells = _merge_order(cells, self.config.spatial_merge_size)      # (P, 2)
        angles = (cells[..., None] * inverse).flatten(1)[None]
        return angles.cos(), angles.sin()

    def forward(self, patches: torch.Tensor, grid: tuple[int, int]) -> VisionFeatures:
        """Encode images of one size.

        Args:
            patches: (N, rows * columns, C * patch * patch), from `image_patches`.
            grid: rows and columns of patches.
        """
        assert patches.shape[1] == grid[0] * grid[1], (patches.shape, grid)
        cos, sin = self._rotation(grid)
        hidden = self.patch_embed(patches)
        hidden = hidden + self._positions(grid).to(hidden.dtype)
        deepstack: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin)
            if index in self.config.deepstack_indexes:
                deepstack.append(self.deepstack_merger_list[len(deepstack)](hidden))
        return VisionFeatures(self.merger(hidden), tuple(deepstack))
