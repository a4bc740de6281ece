"""The action expert as a graph: all Euler steps of the flow, in a loop inside.

The prompt's keys are cut out of the decoder's buffers once, before the loop. The arithmetic is
that of models/expert.py and models/flow.py.
"""

from __future__ import annotations

import math

import numpy as np

from .decoder_graph import rotated_heads, swiglu
from .graph_builder import BOOL, FLOAT, INT64, GraphBuilder, StoredWeights
from ..models.config import ModelConfig

PROJECTOR_NORM_EPS = 1e-5
ACTION_NORM_EPS = 1e-5          # torch's default for LayerNorm


def expert_graph(config: ModelConfig, weights: StoredWeights) -> GraphBuilder:
    """All Euler steps of the flow: noise -> normalised actions, both (1, waypoints, 2).

    Inputs: noise; times (steps + 1,), the grid from 0 to 1; cos, sin (waypoints, D / 2);
    offset (1,), how many of the cached keys exist; past_key_i, past_value_i, the decoder's
    buffers.
    """
    text, flow = config.text, config.flow
    g = GraphBuilder("expert", weights)
    action = [1, flow.num_waypoints, flow.action_size]
    g.input("noise", FLOAT, action)
    g.input("times", FLOAT, ["points"])
    for name in ("cos", "sin"):
        g.input(name, FLOAT, [flow.num_waypoints, text.head_dim // 2])
    g.input("offset", INT64, [1])
    zero, one = g.constant([0], np.int64), g.constant([1], np.int64)
    axis = g.constant([2], np.int64)
    prefix = []
    for i in range(text.num_layers):
        past = [g.input(f"past_{kind}_{i}", FLOAT,
                        [1, text.num_kv_heads, "capacity", text.head_dim])
                for kind in ("key", "value")]
        prefix.append([g.op("Slice", p, zero, "offset", axis) for p in past])
    steps = g.op("Squeeze", g.op("Sub", g.op("Shape", "times"), one))
    body = _euler_step(g, config, weights, prefix)
    actions = g.op("Loop", steps, "", "noise", body=body.graph())
    g.output(actions, "actions", FLOAT, action)
    return g


def _euler_step(outer: GraphBuilder, config: ModelConfig, weights: StoredWeights,
                prefix: list[list[str]]) -> GraphBuilder:
    """Loop body: (step number, go on, x) -> (go on, x + dt v(x, t))."""
    flow = config.flow
    g = GraphBuilder("euler_step", weights, outer)
    g.input("step", INT64, [])
    g.input("go_on", BOOL, [])
    g.input("x", FLOAT, [1, flow.num_waypoints, flow.action_size])
    begin = g.op("Gather", "times", "step")
    end = g.op("Gather", "times", g.op("Add", "step", g.constant(1, np.int64)))
    velocity = _velocity(g, config, begin, prefix)
    moved = g.op("Add", "x", g.op("Mul", g.op("Sub", end, begin), velocity))
    g.output("go_on", "go_on_still", BOOL, [])
    g.output(moved, "moved", FLOAT, [1, flow.num_waypoints, flow.action_size])
    return g


def _velocity(g: GraphBuilder, config: ModelConfig, time: str, prefix: list[list[str]]) -> str:
    text, eps = config.text, config.text.rms_norm_eps
    hidden = _waypoint_tokens(g, config, time)
    normed = g.rms_norm(hidden, "expert.layers.0.input_layernorm.weight", eps)
    for i in range(text.num_layers):
        layer = f"expert.layers.{i}"
        q, k, v = rotated_heads(g, normed, f"{layer}.self_attn", config, "cos", "sin")
        attended = _prefix_attention(g, q, k, v, prefix[i], config)
        projected = g.linear(attended, f"{layer}.self_attn.o_proj")
        normed, hidden = g.add_rms_norm(hidden, projected,
                                        f"{layer}.post_attention_layernorm.weight", eps)
        following = f"layers.{i + 1}.input_layernorm" if i + 1 < text.num_layers else "norm"
        normed, hidden = g.add_rms_norm(hidden, swiglu(g, normed, f"{layer}.mlp"),
                                        f"expert.{following}.weight", eps)
    return g.linear(normed, "action_out_proj", bias=True)


def _waypoint_tokens(g: GraphBuilder, config: ModelConfig, time: str) -> str:
    """Fourier features of both actions and of the time, through the trunk: (1, 64, hidden)."""
    flow, expert = config.flow, config.expert
    shape = g.constant((1, flow.num_waypoints, 1), np.int64)
    times = g.op("Expand", g.reshape(time, (1, 1, 1)), shape)
    scalars = g.op("Concat", "x", times, axis=-1)                           # (1, 64, 3)
    exponents = np.linspace(0.0, math.log10(expert.max_fourier_frequency),
                            expert.num_fourier_frequencies, dtype=np.float32)
    frequencies = np.float32(10.0) ** exponents
    angles = g.op("Mul", g.op("Mul", g.op("Unsqueeze", scalars, g.constant([3], np.int64)),
                              g.constant(frequencies)),
                  g.constant(2.0 * math.pi, np.float32))                    # (1, 64, 3, 10)
    waves = g.op("Concat", g.op("Sin", angles), g.op("Cos", angles), axis=-1)
    waves = g.op("Mul", waves, g.constant(math.sqrt(2.0), np.float32))
    x = g.reshape(waves, (1, flow.num_waypoints, -1))
    for i in range(expert.projector_layers):
        x = g.silu(g.linear(x, f"action_in_proj.encoder.trunk.{3 * i}", bias=True))
        x = g.rms_norm(x, f"action_in_proj.encoder.trunk.{3 * i + 2}.weight", PROJECTOR_NORM_EPS)
    x = g.linear(x, f"action_in_proj.encoder.trunk.{3 * expert.projector_layers}", bias=True)
    return g.layer_norm(x, "action_in_proj.norm", ACTION_NORM_EPS)


def _prefix_attention(g: GraphBuilder, q: str, k: str, v: str, prefix: list[str],
                      config: ModelConfig) -> str:
    """Every waypoint sees the prompt and every waypoint.

    The query heads that share a key head are rows of one product, so no key is repeated.
    """
    text, expert, count = config.text, config.expert, config.flow.num_waypoints
    width = text.head_dim

    def by_head(x: str, heads: int) -> str:
        return g.op("Transpose", g.reshape(x, (1, count, heads, width)), perm=[0, 2, 1, 3])

    keys = g.op("Concat", prefix[0], by_head(k, text.num_kv_heads), axis=2)
    values = g.op("Concat", prefix[1], by_head(v, text.num_kv_heads), axis=2)
    queries = g.reshape(by_head(q, expert.num_heads), (1, text.num_kv_heads, -1, width))
    scores = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(width ** -0.5, np.float32))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
    mixed = g.op("Transpose", g.reshape(mixed, (1, expert.num_heads, count, width)),
                 perm=[0, 2, 1, 3])
    return g.reshape(mixed, (1, count, expert.num_heads * width))
