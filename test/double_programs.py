"""The PyTorch oracle behind the tensors of the graphs `trt` and `plain`, for tensorrt_double.py.

What a TensorRT engine is to compute, from the same names, shapes and memory: the cache in place
or as new rows, visibility as additive biases, one Euler step of the action expert a pass.
"""

from __future__ import annotations

import functools
import pickle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from reasoning_planner.export.build_engines import engine_profiles
from reasoning_planner.export.build_trt import profile_shapes
from reasoning_planner.models.kv_cache import AttentionBackend
from reasoning_planner.models.vision import image_patches
from reasoning_planner.runtimes.engine_manifest import (FORMAT, BuiltEngine, EngineManifest,
                                                        source_hash)
from reasoning_planner.runtimes.manifest import load_config, sha256_of
from reasoning_planner.runtimes.torch_runtime import load_target

TOP_K = 8
HALF, WORD, INDEX = np.float16, np.float32, np.int64


class Bound(AttentionBackend):
    """Attention over bound arrays."""

    def __init__(self, arrays, is_plain):
        self._bound = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._is_plain = is_plain

    def attend(self, layer_index, q, k, v, mask):
        bound = self._bound
        past = [bound[f"past_{kind}_{layer_index}"] for kind in ("key", "value")]
        n = k.shape[2]
        if self._is_plain:
            for kind, rows in zip(("key", "value"), (k, v)):
                if f"new_{kind}_{layer_index}" in bound:
                    bound[f"new_{kind}_{layer_index}"].copy_(rows)
            keys, values = (torch.cat(pair, dim=2).float() for pair in zip(past, (k, v)))
            among = bound.get("attention_bias", torch.zeros(1, 1, n, n))
            bias = torch.cat((bound["past_bias"].expand(1, 1, n, -1), among), dim=3)
        else:
            start = int(bound["write_index"])
            for cache, rows in zip(past, (k, v)):
                cache[:, :, start:start + n] = rows
            keys, values = (cache.float() for cache in past)
            bias = bound["attention_bias"]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias.float(),
                                              enable_gqa=True)


@functools.cache
def oracle(checkpoint):
    """The target of a checkpoint, one for all programs."""
    return load_target(checkpoint).eval()


class Program:
    """Base: names and shapes of one engine, and the oracle that computes it."""

    aliases: dict = {}

    def __init__(self, checkpoint, kind, dtype, slots, layers):
        self._checkpoint, self._is_plain, self._layers = Path(checkpoint), kind == "plain", layers
        config = load_config(self._checkpoint)
        self._past = "P" if self._is_plain else slots
        text = config.text
        names = [f"{k}_{i}" for i in range(text.num_layers) for k in ("key", "value")]
        cache = (dtype, (1, text.num_kv_heads, self._past, text.head_dim))
        self._caches = {f"past_{name}": cache for name in names}
        self._names = names
        self._describe(config, dtype, cache)

    def described(self):
        """Inputs and outputs as a manifest has them."""
        return [[{"name": each, "dtype": np.dtype(of).name, "shape": list(dims)}
                 for each, (of, dims) in side.items()] for side in (self.inputs, self.outputs)]

    def target(self):
        return oracle(self._checkpoint)

    def run(self, arrays):
        with torch.no_grad():
            for name, value in self.compute(arrays).items():
                arrays[name][...] = value.numpy()


class Vision(Program):
    def _describe(self, config, dtype, cache):
        v = config.vision
        self.inputs = {"images": (np.uint8, ("N", v.image_height, v.image_width, 3))}
        self.outputs = {"features": (dtype, ("N", 1 + len(v.deepstack_indexes),
                                             v.tokens_per_image, v.out_hidden_size))}

    def compute(self, arrays):
        target = self.target()
        patches = image_patches(torch.from_numpy(arrays["images"]), target.config.vision)
        found = target.encode_images(patches, target.config.vision.grid)
        return {"features": torch.stack((found.tokens, *found.deepstack), dim=1)}


class Decoder(Program):
    def _describe(self, config, dtype, cache):
        text, levels = config.text, 1 + len(config.vision.deepstack_indexes)
        half, hidden = text.head_dim // 2, (dtype, (1, "n", text.hidden_size))
        self.inputs = {
            "input_ids": (INDEX, ("n",)), "visual_index": (INDEX, ("V",)),
            "visual_features": (dtype, (levels, "V", text.hidden_size)),
            "cos": (WORD, ("n", half)), "sin": (WORD, ("n", half)), "logit_index": (INDEX, ("m",)),
            **({"past_bias": (dtype, (1, 1, 1, "P")), "attention_bias": (dtype, (1, 1, "n", "n"))}
               if self._is_plain else {"write_index": (INDEX, (1,)),
                                       "attention_bias": (dtype, (1, 1, "n", self._past))}),
            **self._caches}
        rows = (dtype, (*cache[1][:2], "n", cache[1][3]))
        kept = "new" if self._is_plain else "present"
        self.outputs = {
            "token_ids": (INDEX, ("m",)), "top_ids": (INDEX, ("m", TOP_K)),
            "top_log_probs": (WORD, ("m", TOP_K)), "logits": (WORD, ("m", text.vocab_size)),
            "last_hidden": hidden, **{f"hidden_{i}": hidden for i in self._layers},
            **{f"{kept}_{name}": rows if self._is_plain else cache for name in self._names}}
        self.aliases = {} if self._is_plain else {
            f"present_{name}": f"past_{name}" for name in self._names}

    def compute(self, arrays):
        target = self.target()
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        n = len(given["input_ids"])
        embeds = target.language_model.embed_tokens(given["input_ids"])
        spare = torch.cat((embeds, torch.zeros_like(embeds[:1])))       # row n: nobody's
        spare[given["visual_index"]] = given["visual_features"][0].float()
        added = []
        for level in given["visual_features"][1:]:
            full = torch.zeros_like(spare)
            full[given["visual_index"]] = level.float()
            added.append(full[None, :n])
        output = target.language_model(spare[None, :n], given["cos"][None], given["sin"][None],
                                       None, Bound(arrays, self._is_plain), added, self._layers)
        logits = target.mask_trajectory_bins(
            target.lm_head(output.last_hidden[0, given["logit_index"]]))
        top = logits.log_softmax(-1).topk(TOP_K)
        return {"token_ids": logits.argmax(-1), "top_ids": top.indices,
                "top_log_probs": top.values, "logits": logits, "last_hidden": output.last_hidden,
                **{f"hidden_{i}": layer for i, layer in zip(self._layers, output.selected)}}


class ExpertStep(Program):
    def _describe(self, config, dtype, cache):
        flow, half = config.flow, config.text.head_dim // 2
        action, angles = (WORD, (1, flow.num_waypoints, 2)), (WORD, (flow.num_waypoints, half))
        self.inputs = {
            "noise": action, "times": (WORD, (2,)), "cos": angles, "sin": angles,
            **({"past_bias": (dtype, (1, 1, 1, "P"))} if self._is_plain else {
                "write_index": (INDEX, (1,)),
                "attention_bias": (dtype, (1, 1, flow.num_waypoints, self._past))}),
            **self._caches}
        self.outputs = {"actions": action}
        if not self._is_plain:
            self.outputs |= {f"present_{name}": cache for name in self._names}
            self.aliases = {f"present_{name}": f"past_{name}" for name in self._names}

    def compute(self, arrays):
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        now, then = given["times"]
        velocity = self.target().velocity(given["noise"], now[None],
                                          Bound(arrays, self._is_plain), given["cos"][None],
                                          given["sin"][None], None)
        return {"actions": given["noise"] + (then - now) * velocity}


PROGRAMS = {"vision": Vision, "decoder": Decoder, "expert_step": ExpertStep}


def write_engines(checkpoint, out, platform, layers=(0, 1, 3), builder="tensorrt 10.16.1.11"):
    """What build-engines leaves, with programs for engines."""
    config = load_config(checkpoint)
    dtype = {"float32": np.float32, "float16": np.float16}[platform.precision]
    built = {}
    for name, kind in PROGRAMS.items():
        program = kind(checkpoint, platform.graphs, dtype, platform.slots_of(config), layers)
        described = program.described()
        ranges = engine_profiles(name, platform, config)
        profiles = [profile_shapes(described[0], each) for each in ranges.values()]
        path = out / f"{name}.engine"
        path.write_bytes(pickle.dumps({"program": program, "profiles": profiles}))
        built[name] = BuiltEngine(path.name, sha256_of(path), "", *described, program.aliases,
                                  {p: {s: list(r) for s, r in each.items()}
                                   for p, each in ranges.items()})
    files = {name: sha256_of(checkpoint / name)
             for name in ("config.json", "tokenizer.json", "model.safetensors")}
    manifest = EngineManifest(
        FORMAT, platform.name, platform.digest(), "trt", platform.graphs, platform.precision,
        config.name, builder, "double", platform.capacity_of(config),
        platform.slots_of(config), TOP_K, list(layers),
        {name: [s.minimum, s.usual, s.maximum] for name, s in platform.sizes_of(config).items()},
        files, source_hash(files), built)
    manifest.save(out)
    return manifest
