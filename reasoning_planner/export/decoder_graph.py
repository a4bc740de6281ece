"""The text decoder as a graph of ONNX Runtime's own operators, and the layer it shares.

One graph serves prefill, decode, block verification and tree verification: positions come as cos
and sin, visibility as a bias, memory as buffers that are past and present at once. The arithmetic
is that of models/text.py (the oracle; a test holds the two together). Batch is 1.
"""

from __future__ import annotations

import numpy as np

from .graph_builder import FLOAT, INT32, INT64, MICROSOFT, GraphBuilder, StoredWeights
from ..models.config import ModelConfig

LANGUAGE = "vlm.model.language_model"


def decoder_graph(config: ModelConfig, weights: StoredWeights, top_k: int) -> GraphBuilder:
    """n tokens behind `total_length - n` cached ones.

    Inputs: input_ids (n,); visual_index (V,) rows of the n that are visual tokens, and
    visual_features (1 + D, V, hidden), both empty but for a prompt; cos, sin (n, D / 2);
    attention_bias (1, 1, n, total), on top of causality; total_length (1,); logit_index (m,), the
    rows whose next token is wanted; past_key_i, past_value_i (1, Hkv, capacity, D).
    Outputs: token_ids (m,) greedy; top_ids, top_log_probs (m, k); logits (m, vocabulary);
    last_hidden (1, n, hidden) after the final norm, hidden_i after layer i; present_key_i,
    present_value_i, to be bound to the memory of their past.
    """
    text, eps = config.text, config.text.rms_norm_eps
    g = GraphBuilder("decoder", weights)
    g.input("input_ids", INT64, ["n"])
    g.input("visual_index", INT64, ["V"])
    levels = 1 + len(config.vision.deepstack_indexes)
    g.input("visual_features", FLOAT, [levels, "V", text.hidden_size])
    for name in ("cos", "sin"):
        g.input(name, FLOAT, ["n", text.head_dim // 2])
    g.input("attention_bias", FLOAT, [1, 1, "n", "total"])
    g.input("total_length", INT32, [1])
    g.input("logit_index", INT64, ["m"])
    last_key = g.op("Sub", "total_length", g.constant([1], np.int32))
    total = g.op("Squeeze", "total_length")
    embeds, deepstack = _embedded(g, levels)

    hidden = embeds
    normed = g.rms_norm(embeds, f"{LANGUAGE}.layers.0.input_layernorm.weight", eps)
    for i in range(text.num_layers):
        layer = f"{LANGUAGE}.layers.{i}"
        q, k, v = rotated_heads(g, normed, f"{layer}.self_attn", config, "cos", "sin")
        attended = _cached_attention(g, i, q, k, v, last_key, total, config)
        projected = g.linear(attended, f"{layer}.self_attn.o_proj")
        normed, hidden = g.add_rms_norm(hidden, projected,
                                        f"{layer}.post_attention_layernorm.weight", eps)
        added = swiglu(g, normed, f"{layer}.mlp")
        if i < len(deepstack):
            added = g.op("Add", added, deepstack[i])
        following = f"layers.{i + 1}.input_layernorm" if i + 1 < text.num_layers else "norm"
        normed, hidden = g.add_rms_norm(hidden, added, f"{LANGUAGE}.{following}.weight", eps,
                                        f"hidden_{i}")
        g.output(hidden, f"hidden_{i}", FLOAT, [1, "n", text.hidden_size])
    g.output(normed, "last_hidden", FLOAT, [1, "n", text.hidden_size])
    _choose(g, normed, config, top_k)
    return g


def _embedded(g: GraphBuilder, levels: int) -> tuple[str, list[str]]:
    """(1, n, hidden) token embeddings with visual tokens in their places, and DeepStack's."""
    table = g.stored(f"{LANGUAGE}.embed_tokens.weight")
    words = g.op("Cast", g.op("Gather", table, "input_ids"), to=FLOAT)      # (n, hidden)
    rows = g.op("Unsqueeze", "visual_index", g.constant([1], np.int64))
    empty = g.op("ConstantOfShape", g.op("Shape", words))
    placed = []
    for level in range(levels):
        feature = g.op("Gather", "visual_features", g.constant(level, np.int64), axis=0)
        full = g.op("ScatterND", words if level == 0 else empty, rows, feature)
        placed.append(g.op("Unsqueeze", full, g.constant([0], np.int64)))
    return placed[0], placed[1:]


def rotated_heads(g: GraphBuilder, normed: str, attention: str, config: ModelConfig, cos: str,
                  sin: str) -> tuple[str, str, str]:
    """Rotated q, rotated k, and v, (1, n, heads * D)."""
    text, turned = config.text, []
    for part in ("q", "k"):
        flat = g.linear(normed, f"{attention}.{part}_proj")
        heads = g.reshape(flat, (1, -1, _width(g, attention, part) // text.head_dim,
                                 text.head_dim))
        heads = g.rms_norm(heads, f"{attention}.{part}_norm.weight", text.rms_norm_eps)
        flat = g.reshape(heads, (1, -1, _width(g, attention, part)))
        turned.append(g.rotate(flat, cos, sin))
    return turned[0], turned[1], g.linear(normed, f"{attention}.v_proj")


def _width(g: GraphBuilder, attention: str, part: str) -> int:
    return g.shape(f"{attention}.{part}_proj.weight")[0]


def _cached_attention(g: GraphBuilder, i: int, q: str, k: str, v: str, last_key: str,
                      total: str, config: ModelConfig) -> str:
    """Causal attention over the buffers, into which k and v are written."""
    text = config.text
    buffer = [1, text.num_kv_heads, "capacity", text.head_dim]
    past = [g.input(f"past_{kind}_{i}", FLOAT, buffer) for kind in ("key", "value")]
    out = f"attention_{i}"
    present = [f"present_{kind}_{i}" for kind in ("key", "value")]
    g.named("GroupQueryAttention",
            [q, k, v, *past, last_key, total, "", "", "", "attention_bias"], [out, *present],
            MICROSOFT, num_heads=text.num_heads, kv_num_heads=text.num_kv_heads, do_rotary=0,
            scale=text.head_dim ** -0.5)
    for name in present:
        g.output(name, name, FLOAT, buffer)
    return out


def swiglu(g: GraphBuilder, x: str, mlp: str) -> str:
    """down(silu(gate(x)) up(x)), of the layer `mlp`."""
    gate = g.silu(g.linear(x, f"{mlp}.gate_proj"))
    return g.linear(g.op("Mul", gate, g.linear(x, f"{mlp}.up_proj")), f"{mlp}.down_proj")


def _choose(g: GraphBuilder, last_hidden: str, config: ModelConfig, top_k: int) -> None:
    """The next token of the rows asked for; a trajectory bin never is one."""
    vocabulary, bins = config.text.vocab_size, config.tokens.trajectory_bins
    rows = g.op("Gather", g.op("Squeeze", last_hidden, g.constant([0], np.int64)), "logit_index")
    allowed = np.ones(vocabulary, dtype=bool)
    allowed[bins.start:bins.stop] = False
    logits = g.op("Where", g.constant(allowed), g.linear(rows, "vlm.lm_head"),
                  g.constant(-np.inf, np.float32))                          # (m, vocabulary)
    g.output(g.op("ArgMax", logits, axis=-1, keepdims=0), "token_ids", INT64, ["m"])
    log_probs, ids = g.op("TopK", g.op("LogSoftmax", logits, axis=-1),
                          g.constant([top_k], np.int64), axis=-1, outputs=2)
    g.output(ids, "top_ids", INT64, ["m", top_k])
    g.output(log_probs, "top_log_probs", FLOAT, ["m", top_k])
    g.output(logits, "logits", FLOAT, ["m", vocabulary])
