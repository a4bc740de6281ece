"""Names and shapes of every tensor in a checkpoint of the target, from its configuration alone.

The names are those of Alpamayo 1 and 1.5, and of `Target.state_dict()`. Needs no torch, so that a
checkpoint of 22 GB can be checked on a machine that could not hold it.
Source: alpamayo.md, sections 1.1 and 8.
"""

from __future__ import annotations

from typing import Mapping

from .config import ModelConfig, TextConfig, VisionConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

ACTION_CONSTANTS = ("accel_mean", "accel_std", "curvature_mean", "curvature_std")


def expected_tensors(config: ModelConfig) -> Shapes:
    """Every learned tensor: name -> shape, in the order of the forward pass."""
    text = config.text
    vlm = (_under("model.visual", _vision(config.vision))
           | {"model.language_model.embed_tokens.weight": (text.vocab_size, text.hidden_size)}
           | _under("model.language_model", _decoder(text, text.hidden_size, text.num_heads,
                                                     text.intermediate_size))
           | {"lm_head.weight": (text.vocab_size, text.hidden_size)})
    expert = config.expert
    return (_under("vlm", vlm)
            | _under("expert", _decoder(text, expert.hidden_size, expert.num_heads,
                                        expert.intermediate_size))
            | _under("action_in_proj", _action_in(config))
            | _linear("action_out_proj", expert.hidden_size, config.flow.action_size))


def constant_tensors(config: ModelConfig) -> Shapes:
    """Constants a checkpoint may hold as tensors: Fourier frequencies and the action scale.

    Alpamayo 1 ships them, 1.5 does not; the code states them itself either way.
    """
    frequencies = (1, config.expert.num_fourier_frequencies)
    encoders = [f"sinus.{i}" for i in range(config.flow.action_size)]
    encoders.append("timestep_fourier_encoder")
    return ({f"action_in_proj.{encoder}.freqs": frequencies for encoder in encoders}
            | {f"action_space.{name}": () for name in ACTION_CONSTANTS})


def _under(prefix: str, shapes: Mapping[str, Shape]) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _linear(name: str, in_size: int, out_size: int) -> Shapes:
    return {f"{name}.weight": (out_size, in_size), f"{name}.bias": (out_size,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _decoder(text: TextConfig, hidden: int, num_heads: int, intermediate: int) -> Shapes:
    """Layers and last norm; the expert shares depth, KV heads and head width with the text."""
    query, key = num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (text.head_dim,),
        "self_attn.k_norm.weight": (text.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate)}
    shapes: Shapes = {}
    for i in range(text.num_layers):
        shapes |= _under(f"layers.{i}", layer)
    return shapes | {"norm.weight": (hidden,)}


def _vision(vision: VisionConfig) -> Shapes:
    hidden = vision.hidden_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    block = (_norm("norm1", hidden) | _linear("attn.qkv", hidden, 3 * hidden)
             | _linear("attn.proj", hidden, hidden) | _norm("norm2", hidden)
             | _linear("mlp.linear_fc1", hidden, vision.intermediate_size)
             | _linear("mlp.linear_fc2", vision.intermediate_size, hidden))
    shapes: Shapes = {"patch_embed.proj.weight": (hidden, *patch),
                      "patch_embed.proj.bias": (hidden,),
                      "pos_embed.weight": (vision.num_position_embeddings, hidden)}
    for i in range(vision.depth):
        shapes |= _under(f"blocks.{i}", block)
    shapes |= _under("merger", _merger(vision, norm_size=hidden))
    merged = hidden * vision.spatial_merge_size ** 2
    for i in range(len(vision.deepstack_indexes)):
        shapes |= _under(f"deepstack_merger_list.{i}", _merger(vision, norm_size=merged))
    return shapes


def _merger(vision: VisionConfig, norm_size: int) -> Shapes:
    merged = vision.hidden_size * vision.spatial_merge_size ** 2
    return (_norm("norm", norm_size) | _linear("linear_fc1", merged, merged)
            | _linear("linear_fc2", merged, vision.out_hidden_size))


def _action_in(config: ModelConfig) -> Shapes:
    """The trunk is linear, SiLU, RMSNorm, repeated, then a linear: hence the steps of three."""
    expert, width = config.expert, config.expert.projector_hidden_size
    in_size = 2 * expert.num_fourier_frequencies * (config.flow.action_size + 1)
    shapes: Shapes = {}
    for i in range(expert.projector_layers):
        shapes |= _linear(f"encoder.trunk.{3 * i}", in_size, width)
        shapes |= {f"encoder.trunk.{3 * i + 2}.weight": (width,)}
        in_size = width
    shapes |= _linear(f"encoder.trunk.{3 * expert.projector_layers}", width, expert.hidden_size)
    return shapes | _norm("norm", expert.hidden_size)
