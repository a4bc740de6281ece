"""The text decoder for TensorRT: `trt` with its cache in place, `plain` with new rows given out.

The same tensors under the same names as decoder_graph.py's, but for how the cache is reached:
`trt` scatters into buffers of a fixed capacity and attends under one explicit mask over all
slots; `plain` reads the past and gives the new tokens' rows out, for the runtime to copy. A masked
slot is multiplied by 0, not skipped: buffers must start as zeros. Batch is 1.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from .decoder_graph import LANGUAGE, swiglu
from .graph_builder import FLOAT, INT64, StoredWeights
from .portable_builder import PortableBuilder
from ..models.config import ModelConfig


def portable_decoder(config: ModelConfig, weights: StoredWeights, top_k: int, kind: str,
                     precision: str, capacity: int, hidden_layers: Sequence[int]
                     ) -> PortableBuilder:
    """n tokens behind the cached ones.

    Inputs: input_ids (n,); visual_index (V,), V >= 1, of which row n is a spare one nobody reads;
    visual_features (1 + D, V, hidden); cos, sin (n, D / 2) float32; logit_index (m,);
    `trt`: attention_bias (1, 1, n, capacity), write_index (1,), past_* (1, Hkv, capacity, D);
    `plain`: attention_bias (1, 1, n, n), past_bias (1, 1, 1, P), past_* (1, Hkv, P, D).
    Outputs: token_ids, top_ids, top_log_probs, logits, last_hidden, hidden_i of `hidden_layers`;
    `trt`: present_*, at the address of their past; `plain`: new_* (1, Hkv, n, D).

    Args:
        kind: "trt" or "plain".
        precision: "fp16" or "fp32".
        capacity: slots of `trt`'s cache.
    """
    text, eps = config.text, config.text.rms_norm_eps
    g = PortableBuilder("decoder", weights, kind, precision)
    levels = 1 + len(config.vision.deepstack_indexes)
    _declare(g, config, levels, capacity)
    hidden, deepstack = _embedded(g, levels)
    normed = g.rms_norm(hidden, f"{LANGUAGE}.layers.0.input_layernorm.weight", eps)
    for i in range(text.num_layers):
        layer = f"{LANGUAGE}.layers.{i}"
        attended = _attention(g, i, normed, f"{layer}.self_attn", config, capacity)
        projected = g.linear(attended, f"{layer}.self_attn.o_proj")
        normed, hidden = g.add_rms_norm(hidden, projected,
                                        f"{layer}.post_attention_layernorm.weight", eps)
        added = swiglu(g, normed, f"{layer}.mlp")
        if i < len(deepstack):
            added = g.op("Add", added, deepstack[i])
        following = f"layers.{i + 1}.input_layernorm" if i + 1 < text.num_layers else "norm"
        normed, hidden = g.add_rms_norm(hidden, added, f"{LANGUAGE}.{following}.weight", eps)
        if i in hidden_layers:
            g.output(hidden, f"hidden_{i}", g.dtype, [1, "n", text.hidden_size])
    g.output(normed, "last_hidden", g.dtype, [1, "n", text.hidden_size])
    _choose(g, normed, config, top_k)
    return g


def _declare(g: PortableBuilder, config: ModelConfig, levels: int, capacity: int) -> None:
    text = config.text
    g.input("input_ids", INT64, ["n"])
    g.input("visual_index", INT64, ["V"])
    g.input("visual_features", g.dtype, [levels, "V", text.hidden_size])
    for name in ("cos", "sin"):
        g.input(name, FLOAT, ["n", text.head_dim // 2])
    g.input("attention_bias", g.dtype, [1, 1, "n", capacity if g.fused else "n"])
    if g.fused:
        g.input("write_index", INT64, [1])
    else:
        g.input("past_bias", g.dtype, [1, 1, 1, "P"])
    g.input("logit_index", INT64, ["m"])


def _embedded(g: PortableBuilder, levels: int) -> tuple[str, list[str]]:
    """(1, n, hidden) token embeddings with visual tokens in their places, and DeepStack's.

    Visual rows are written into one row more than there are tokens: the spare row n.
    """
    words = g.cast(g.op("Gather", g.stored(f"{LANGUAGE}.embed_tokens.weight"), "input_ids"))
    spare = g.op("Concat", g.constant([1], np.int64), g.op("Shape", words, start=1), axis=0)
    count = g.op("Shape", words, start=0, end=1)
    words = g.op("Concat", words, g.zeros(spare), axis=0)               # (n + 1, hidden)
    empty = g.zeros(g.op("Shape", words))
    rows, first = g.unsqueeze("visual_index", 1), g.constant([0], np.int64)
    placed = []
    for level in range(levels):
        feature = g.op("Gather", "visual_features", g.constant(level, np.int64), axis=0)
        full = g.op("ScatterND", words if level == 0 else empty, rows, feature)
        placed.append(g.unsqueeze(g.op("Slice", full, first, count, first), 0))
    return placed[0], placed[1:]


def _attention(g: PortableBuilder, i: int, normed: str, attention: str, config: ModelConfig,
               capacity: int) -> str:
    """Of layer i over the cache and the new tokens, (1, n, heads * D)."""
    text = config.text
    q, k = (g.rotate_heads(g.rms_norm(_part(g, normed, attention, part, text.head_dim),
                                      f"{attention}.{part}_norm.weight", text.rms_norm_eps),
                           "cos", "sin") for part in ("q", "k"))
    v = _part(g, normed, attention, "v", text.head_dim)
    buffer = [1, text.num_kv_heads, capacity if g.fused else "P", text.head_dim]
    past = [g.input(f"past_{kind}_{i}", g.dtype, buffer) for kind in ("key", "value")]
    if g.fused:
        out = _in_place(g, i, q, (k, v), past, buffer, text.head_dim ** -0.5)
    else:
        new = [1, text.num_kv_heads, "n", text.head_dim]
        for kind, value in (("key", k), ("value", v)):
            g.output(value, f"new_{kind}_{i}", g.dtype, new)
        out = _beside(g, q, (k, v), past, text.num_kv_heads, text.head_dim)
    return g.reshape(g.op("Transpose", out, perm=[0, 2, 1, 3]), (1, 0, -1))


def _part(g: PortableBuilder, normed: str, attention: str, part: str, head_dim: int) -> str:
    return g.heads(g.linear(normed, f"{attention}.{part}_proj"), head_dim)


def _in_place(g: PortableBuilder, i: int, q: str, new: Sequence[str], past: Sequence[str],
              buffer: Sequence[int | str], scale: float) -> str:
    """(1, Hq, n, D): rows scattered into the buffers, all slots attended under the mask."""
    present = []
    for kind, value, cache in zip(("key", "value"), new, past):
        name = f"present_{kind}_{i}"
        g.named("TensorScatter", [cache, value, "write_index"], [name], axis=2, mode="linear")
        g.output(name, name, g.dtype, buffer)
        present.append(name)
    return g.op("Attention", q, *present, "attention_bias", scale=scale)


def _beside(g: PortableBuilder, q: str, new: Sequence[str], past: Sequence[str], kv_heads: int,
            head_dim: int) -> str:
    """(1, Hq, n, D): one softmax over the past's scores and the new rows'."""
    q = g.op("Mul", q, g.scalar(head_dim ** -0.5))
    grouped = g.op("Reshape", q, _grouped_shape(g, q, kv_heads, head_dim))  # (1, Hkv, G, n, D)
    (past_k, past_v), (k, v) = ([g.unsqueeze(x, 2) for x in pair] for pair in (past, new))
    scores = [g.op("Add", g.op("MatMul", grouped, g.op("Transpose", keys, perm=[0, 1, 2, 4, 3])),
                   bias) for keys, bias in ((past_k, "past_bias"), (k, "attention_bias"))]
    weights = g.op("Softmax", g.op("Concat", *scores, axis=-1), axis=-1)
    split, axis = g.op("Shape", "past_bias", start=3), g.constant([4], np.int64)
    end = g.constant([np.iinfo(np.int64).max], np.int64)
    seen = g.op("Slice", weights, g.constant([0], np.int64), split, axis)
    own = g.op("Slice", weights, split, end, axis)
    mixed = g.op("Add", g.op("MatMul", seen, past_v), g.op("MatMul", own, v))
    return g.op("Reshape", mixed, g.op("Shape", q))


def _grouped_shape(g: PortableBuilder, q: str, kv_heads: int, head_dim: int) -> str:
    """(1, Hkv, G, n, D) for q (1, Hq, n, D)."""
    count = g.op("Shape", q, start=2, end=3)
    return g.op("Concat", g.constant([1, kv_heads, -1], np.int64), count,
                g.constant([head_dim], np.int64), axis=0)


def _choose(g: PortableBuilder, last_hidden: str, config: ModelConfig, top_k: int) -> None:
    """The next token of the rows asked for, in float32; a trajectory bin never is one."""
    vocabulary, bins = config.text.vocab_size, config.tokens.trajectory_bins
    rows = g.op("Gather", g.op("Squeeze", last_hidden, g.constant([0], np.int64)), "logit_index")
    allowed = np.ones((1, vocabulary), dtype=bool)
    allowed[:, bins.start:bins.stop] = False
    logits = g.op("Where", g.constant(allowed), g.cast(g.linear(rows, "vlm.lm_head"), FLOAT),
                  g.constant([[-np.inf]], np.float32))                      # (m, vocabulary)
    g.output(g.op("ArgMax", logits, axis=-1, keepdims=0), "token_ids", INT64, ["m"])
    log_probs, ids = g.op("TopK", g.op("LogSoftmax", logits, axis=-1),
                          g.constant([top_k], np.int64), axis=-1, outputs=2)
    g.output(ids, "top_ids", INT64, ["m", top_k])
    g.output(log_probs, "top_log_probs", FLOAT, ["m", top_k])
    g.output(logits, "logits", FLOAT, ["m", vocabulary])
