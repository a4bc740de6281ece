"""The vision tower as a graph: images in, visual tokens and DeepStack features out.

The arithmetic is that of models/vision.py; the patches are cut inside the graph. It knows nothing
of resizing.
"""

from __future__ import annotations

import numpy as np

from .graph_builder import FLOAT, MICROSOFT, UINT8, GraphBuilder, StoredWeights
from ..models.config import ModelConfig, VisionConfig
from ..runtimes.positions import inverse_frequencies

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
VISUAL = "vlm.model.visual"


def vision_graph(config: ModelConfig, weights: StoredWeights) -> GraphBuilder:
    """images (N, H, W, 3) uint8 RGB -> features (N, 1 + D, T, hidden): the visual tokens, then
    what DeepStack adds to them behind the first D layers."""
    vision = config.vision
    g = GraphBuilder("vision", weights)
    g.input("images", UINT8, ["N", vision.image_height, vision.image_width, vision.in_channels])
    hidden = _patches(g, vision)
    cos, sin = (g.constant(table) for table in _vision_rotation(vision))
    features: list[str] = []
    for index in range(vision.depth):
        hidden = _vision_block(g, hidden, f"{VISUAL}.blocks.{index}", vision, cos, sin)
        if index in vision.deepstack_indexes:
            name = f"{VISUAL}.deepstack_merger_list.{len(features)}"
            features.append(_merger(g, hidden, name, vision, norm_first=False))
    features.insert(0, _merger(g, hidden, f"{VISUAL}.merger", vision, norm_first=True))
    axis = g.constant([1], np.int64)
    stacked = g.op("Concat", *(g.op("Unsqueeze", f, axis) for f in features), axis=1)
    g.output(stacked, "features", FLOAT,
             ["N", len(features), vision.tokens_per_image, vision.out_hidden_size])
    return g


def _patches(g: GraphBuilder, vision: VisionConfig) -> str:
    """Normalise, cut, embed and place: (N, patches, hidden)."""
    patch, merge, channels = vision.patch_size, vision.spatial_merge_size, vision.in_channels
    rows, columns = vision.grid
    pixels = g.op("Sub", g.op("Div", g.op("Cast", "images", to=FLOAT),
                              g.constant(127.5, np.float32)), g.constant(1.0, np.float32))
    blocks = g.reshape(pixels, (-1, rows // merge, merge, patch, columns // merge, merge, patch,
                                channels))
    blocks = g.op("Transpose", blocks, perm=[0, 1, 4, 2, 5, 7, 3, 6])
    patches = g.reshape(blocks, (-1, rows * columns, channels * patch * patch))
    # A still repeated in time meets the sum of the temporal weights.
    kernel = g.op("ReduceSum", g.weight(f"{VISUAL}.patch_embed.proj.weight"),
                  g.constant([2], np.int64), keepdims=0)
    kernel = g.op("Transpose", g.reshape(kernel, (vision.hidden_size, -1)), perm=[1, 0])
    embedded = g.op("Add", g.op("MatMul", patches, kernel),
                    g.weight(f"{VISUAL}.patch_embed.proj.bias"))
    return g.op("Add", embedded, _vision_positions(g, vision))


def _vision_positions(g: GraphBuilder, vision: VisionConfig) -> str:
    """The learned side x side grid stretched over the image's, corners on corners: (P, hidden)."""
    side, merge, hidden = vision.position_grid_side, vision.spatial_merge_size, vision.hidden_size
    rows, columns = vision.grid
    table = g.op("Transpose", g.weight(f"{VISUAL}.pos_embed.weight"), perm=[1, 0])
    table = g.reshape(table, (1, hidden, side, side))
    sizes = g.constant((1, hidden, rows, columns), np.int64)
    stretched = g.op("Resize", table, "", "", sizes, mode="linear",
                     coordinate_transformation_mode="align_corners")
    blocks = g.reshape(stretched, (hidden, rows // merge, merge, columns // merge, merge))
    return g.reshape(g.op("Transpose", blocks, perm=[1, 3, 2, 4, 0]), (rows * columns, hidden))


def _vision_rotation(vision: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, (P, D / 2) float32: one half turns with the row, the other with the column."""
    rows, columns = vision.grid
    merge = vision.spatial_merge_size
    cells = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    cells = cells.reshape(rows // merge, merge, columns // merge, merge, 2)
    cells = cells.transpose(0, 2, 1, 3, 4).reshape(rows * columns, 2).astype(np.float32)
    inverse = inverse_frequencies(vision.head_dim // 2, ROPE_THETA)
    angles = (cells[..., None] * inverse).reshape(rows * columns, -1)
    return np.cos(angles), np.sin(angles)


def _vision_block(g: GraphBuilder, hidden: str, block: str, vision: VisionConfig, cos: str,
                  sin: str) -> str:
    normed = g.layer_norm(hidden, f"{block}.norm1", NORM_EPS)
    qkv = g.linear(normed, f"{block}.attn.qkv", bias=True)
    q, k, v = g.op("Split", qkv, axis=-1, num_outputs=3, outputs=3)
    attended = g.op("MultiHeadAttention", g.rotate(q, cos, sin), g.rotate(k, cos, sin), v,
                    domain=MICROSOFT, num_heads=vision.num_heads)
    hidden = g.op("Add", hidden, g.linear(attended, f"{block}.attn.proj", bias=True))
    normed = g.layer_norm(hidden, f"{block}.norm2", NORM_EPS)
    wide = g.op("Gelu", g.linear(normed, f"{block}.mlp.linear_fc1", bias=True),
                approximate="tanh")
    return g.op("Add", hidden, g.linear(wide, f"{block}.mlp.linear_fc2", bias=True))


def _merger(g: GraphBuilder, hidden: str, merger: str, vision: VisionConfig,
            norm_first: bool) -> str:
    """merge x merge neighbours to one token of the text decoder's width."""
    joined = (-1, vision.tokens_per_image, vision.hidden_size * vision.spatial_merge_size ** 2)
    if norm_first:
        merged = g.reshape(g.layer_norm(hidden, f"{merger}.norm", NORM_EPS), joined)
    else:
        merged = g.layer_norm(g.reshape(hidden, joined), f"{merger}.norm", NORM_EPS)
    wide = g.op("Gelu", g.linear(merged, f"{merger}.linear_fc1", bias=True))
    return g.linear(wide, f"{merger}.linear_fc2", bias=True)
