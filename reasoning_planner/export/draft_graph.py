"""A block draft as one graph for ONNX Runtime: context in, block out, in one run a round.

New context rows are projected to keys and values, given out as rows that the host keeps, and the
block attends to [past; new; itself] at once. Plain attention operators: ONNX Runtime's fused one
is causal, and a block is not. The arithmetic is that of models/draft.py. Batch is 1.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from .decoder_graph import LANGUAGE, swiglu
from .graph_builder import FLOAT, INT64, GraphBuilder, StoredWeights
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.draft_config import WEIGHTS_NAME, DraftConfig
from ..runtimes.draft_base import (GRAPH_NAME, MANIFEST_NAME, TOP_K, load_draft_config,
                                   require_target_weights)
from ..runtimes.manifest import load_config, replace_file, sha256_of

EMBEDDING, HEAD = f"{LANGUAGE}.embed_tokens.weight", "vlm.lm_head.weight"


class DraftWeights(StoredWeights):
    """The draft's own tensors, and the two that the target lends."""

    def __init__(self, folder: Path, checkpoint: Path):
        super().__init__(folder)
        lent = StoredWeights(checkpoint)
        self._tensors |= {name: lent[name] for name in (EMBEDDING, HEAD)}


def export_draft(folder: Path, checkpoint: Path) -> Path:
    """Write draft.onnx and draft_ort.json into the folder of a release of train-draft.

    Args:
        checkpoint: directory of the target that the draft was trained on.
    Returns:
        The graph's path.
    Raises:
        ModelError, DataError: a file is missing or damaged, or the draft is another target's.
    """
    folder, checkpoint = Path(folder), Path(checkpoint)
    config, model = load_draft_config(folder), load_config(checkpoint)
    config.require_target(model)
    require_target_weights(config, folder, checkpoint)
    try:
        weights = DraftWeights(folder, checkpoint)
    except KeyError as error:
        raise ModelError(f"{checkpoint}: no tensor {error}, expected a target's") from error
    content = draft_graph(config, model, weights, TOP_K).serialised()
    replace_file(folder / GRAPH_NAME, content)
    about = {"format": 1, "top_k": TOP_K, "sha256": {
        GRAPH_NAME: hashlib.sha256(content).hexdigest(),
        WEIGHTS_NAME: sha256_of(folder / WEIGHTS_NAME)}}
    replace_file(folder / MANIFEST_NAME, (json.dumps(about, indent=1) + "\n").encode())
    return folder / GRAPH_NAME


def draft_graph(config: DraftConfig, model: ModelConfig, weights: StoredWeights, top_k: int
                ) -> GraphBuilder:
    """n new context rows behind P cached ones, then one block of m = block_length - 1 drafts.

    Inputs: hidden_states (n, K * hidden), n >= 1; context_cos, context_sin (n, D / 2); last_id
    (1,); block_cos, block_sin (block_length, D / 2); past_key_i, past_value_i (P, Hkv * D).
    Outputs: token_ids (m,); top_ids, top_log_probs (m, k); new_key_i, new_value_i (n, Hkv * D).
    """
    eps, half, width = config.rms_norm_eps, config.head_dim // 2, config.num_kv_heads \
        * config.head_dim
    g = GraphBuilder("draft", weights)
    g.input("hidden_states", FLOAT, ["n", len(config.feature_layers) * config.hidden_size])
    g.input("last_id", INT64, [1])
    for name, rows in (("context", "n"), ("block", config.block_length)):
        for kind in ("cos", "sin"):
            g.input(f"{name}_{kind}", FLOAT, [rows, half])
    context = g.rms_norm(g.op("Unsqueeze", g.linear("hidden_states", "fc"),
                              g.constant([0], np.int64)), "context_norm.weight", eps)
    hidden = _block_embeddings(g, config)
    for i in range(config.num_layers):
        attention = f"layers.{i}.self_attn"
        past = [g.input(f"past_{kind}_{i}", FLOAT, ["P", width]) for kind in ("key", "value")]
        normed = g.rms_norm(hidden, f"layers.{i}.input_layernorm.weight", eps)
        new = _key_value(g, context, attention, config, "context")
        own = _key_value(g, normed, attention, config, "block")
        for kind, value in zip(("key", "value"), new):
            g.output(value, f"new_{kind}_{i}", FLOAT, ["n", width])
        k, v = (g.op("Concat", *parts, axis=0) for parts in zip(past, new, own))
        q = _rotated(g, normed, attention, "q", config, "block")
        attended = _attention(g, q, k, v, config)
        hidden = g.op("Add", hidden, g.linear(attended, f"{attention}.o_proj"))
        normed = g.rms_norm(hidden, f"layers.{i}.post_attention_layernorm.weight", eps)
        hidden = g.op("Add", hidden, swiglu(g, normed, f"layers.{i}.mlp"))
    _choose(g, g.rms_norm(hidden, "norm.weight", eps), config, model, top_k)
    return g


def _block_embeddings(g: GraphBuilder, config: DraftConfig) -> str:
    """(1, block_length, hidden): the last committed token, then MASK."""
    first = g.op("Cast", g.op("Gather", g.stored(EMBEDDING), "last_id"), to=FLOAT)
    mask = g.op("Expand", g.weight("mask_embedding"),
                g.constant([config.block_length - 1, config.hidden_size], np.int64))
    return g.op("Unsqueeze", g.op("Concat", first, mask, axis=0), g.constant([0], np.int64))


def _rotated(g: GraphBuilder, x: str, attention: str, part: str, config: DraftConfig,
             place: str) -> str:
    """Rotated q or k, (1, n, heads * D)."""
    width = g.shape(f"{attention}.{part}_proj.weight")[0]
    heads = g.reshape(g.linear(x, f"{attention}.{part}_proj"),
                      (1, -1, width // config.head_dim, config.head_dim))
    heads = g.rms_norm(heads, f"{attention}.{part}_norm.weight", config.rms_norm_eps)
    return g.rotate(g.reshape(heads, (1, -1, width)), f"{place}_cos", f"{place}_sin")


def _key_value(g: GraphBuilder, x: str, attention: str, config: DraftConfig, place: str
               ) -> tuple[str, str]:
    """Rotated k, and v, (n, Hkv * D)."""
    batch = g.constant([0], np.int64)
    return (g.op("Squeeze", _rotated(g, x, attention, "k", config, place), batch),
            g.op("Squeeze", g.linear(x, f"{attention}.v_proj"), batch))


def _attention(g: GraphBuilder, q: str, k: str, v: str, config: DraftConfig) -> str:
    """Everything is seen; the query heads of one key head go together. (1, block, heads * D)."""
    groups, size = config.num_heads // config.num_kv_heads, config.head_dim
    q = g.op("Transpose", g.reshape(q, (config.block_length, config.num_kv_heads, groups, size)),
             perm=[1, 2, 0, 3])                                             # (Hkv, G, n, D)
    k, v = (g.reshape(x, (-1, config.num_kv_heads, 1, size)) for x in (k, v))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[1, 2, 3, 0]))     # (Hkv, G, n, keys)
    scores = g.op("Mul", scores, g.constant(size ** -0.5, np.float32))
    attended = g.op("MatMul", g.op("Softmax", scores, axis=-1),
                    g.op("Transpose", v, perm=[1, 2, 0, 3]))                # (Hkv, G, n, D)
    return g.reshape(g.op("Transpose", attended, perm=[2, 0, 1, 3]),
                     (1, config.block_length, config.num_heads * size))


def _choose(g: GraphBuilder, hidden: str, config: DraftConfig, model: ModelConfig, top_k: int
            ) -> None:
    """The drafted tokens; a trajectory bin never is one.

    lm_head's rows for bins are left out where the graph is loaded: with them, the head of nano
    took half of a draft's time.
    """
    bins = model.tokens.trajectory_bins
    rows = g.op("Gather", g.op("Squeeze", hidden, g.constant([0], np.int64)),
                g.constant(np.arange(1, config.block_length), np.int64))
    logits = g.op("MatMul", rows, _text_head(g, bins))                  # (m, vocabulary - bins)
    log_probs, columns = g.op("TopK", g.op("LogSoftmax", logits, axis=-1),
                              g.constant([top_k], np.int64), axis=-1, outputs=2)
    behind = g.op("Add", columns, g.constant(len(bins), np.int64))
    ids = g.op("Where", g.op("Less", columns, g.constant(bins.start, np.int64)), columns, behind)
    count = config.block_length - 1
    best = g.op("Squeeze", g.op("Gather", ids, g.constant([0], np.int64), axis=1),
                g.constant([1], np.int64))
    g.output(best, "token_ids", INT64, [count])
    g.output(ids, "top_ids", INT64, [count, top_k])
    g.output(log_probs, "top_log_probs", FLOAT, [count, top_k])


def _text_head(g: GraphBuilder, bins: range) -> str:
    """(hidden, vocabulary - bins), from weights alone: folded where the graph is loaded."""
    head, axis = g.stored(HEAD), g.constant([0], np.int64)
    parts = [g.op("Slice", head, g.constant([start], np.int64), g.constant([stop], np.int64), axis)
             for start, stop in ((0, bins.start), (bins.stop, g.shape(HEAD)[0]))]
    text = g.op("Cast", g.op("Concat", *parts, axis=0), to=FLOAT)
    return g.op("Transpose", text, perm=[1, 0])
