"""The text decoder on TensorRT: passes with everything bound, and the cache they share.

Two kinds of graph: `trt` writes its keys in place (past and present are one memory), `plain` gives
new rows out, which are copied into the cache on the device. Knows no prompts and no positions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Sequence

import numpy as np

from .device_cache import DeviceCache, NewRows
from .device_features import DeviceFeatures
from .device_memory import Arena, Buffer, DeviceMemory, Replayed
from .engine_manifest import EngineManifest
from .trt_engine import Engine
from ..errors import ModelError
from ..models.config import ModelConfig

HIDDEN_BIAS = {np.dtype(np.float32): -1e30, np.dtype(np.float16): -3e4}     # -inf makes NaNs
PREFILL_SLOTS = 1       # of the past that a plain decoder is shown, all hidden, with a prompt
BIASES = ("past_bias", "attention_bias")


class TrtDecoder:
    """An engine, its cache, and a pass for every length asked for.

    Attributes:
        cache: on the device.
        dtype: of cache and biases.
        is_plain: which kind of graph.
        layers: whose outputs are given.
    """

    def __init__(self, engine: Engine, manifest: EngineManifest, config: ModelConfig,
                 memory: DeviceMemory, layers: Sequence[int], with_graphs: bool):
        self.engine, self.manifest, self.config, self.memory = engine, manifest, config, memory
        self.layers, self.with_graphs = tuple(layers), with_graphs
        self.is_plain = manifest.graphs == "plain"
        self.dtype = engine.inputs["past_key_0"].dtype
        self.cache = DeviceCache(memory, config.text, manifest.slots, self.dtype)
        self._blocks: dict[int, DecoderPass] = {}
        self._prompt: tuple[tuple[int, int], DecoderPass] | None = None

    def require_size(self, profile: str, n: int, what: str) -> None:
        """
        Raises:
            ModelError: the engine was built for fewer tokens in a pass.
        """
        smallest, _, largest = self.manifest.sizes[profile]
        if not smallest <= n <= largest:
            raise ModelError(f"{what}: given {n} tokens, expected {smallest} to {largest}: the "
                             f"{profile} profile of the engines for {self.manifest.platform}")

    def block(self, n: int) -> DecoderPass:
        """For n tokens behind cached ones, all of which are asked for their next token."""
        if n not in self._blocks:
            self._blocks[n] = DecoderPass(self, n, n, 0, "decode" if n == 1 else "verify")
        return self._blocks[n]

    def prompt(self, n: int, visual: int) -> DecoderPass:
        """For a prompt of n tokens, `visual` of them visual; its last is asked for the next."""
        if self._prompt is None or self._prompt[0] != (n, visual):
            self._prompt = None         # gives its memory back first
            self._prompt = ((n, visual), DecoderPass(self, n, 1, visual, "prefill"))
        return self._prompt[1]

    def input_shapes(self, n: int, m: int, visual: int, profile: str) -> dict[str, tuple]:
        """Of every input for n tokens with m rows of logits and `visual` visual ones."""
        text, slots = self.config.text, self.manifest.slots
        past = PREFILL_SLOTS if self.is_plain and profile == "prefill" else slots
        levels = 1 + len(self.config.vision.deepstack_indexes)
        shapes: dict[str, tuple] = {
            "input_ids": (n,), "logit_index": (m,), "visual_index": (visual,),
            "visual_features": (levels, visual, text.hidden_size),
            "cos": (n, text.head_dim // 2), "sin": (n, text.head_dim // 2)}
        if self.is_plain:
            shapes |= {"past_bias": (1, 1, 1, past), "attention_bias": (1, 1, n, n)}
        else:
            shapes |= {"write_index": (1,), "attention_bias": (1, 1, n, slots)}
        cache = (1, text.num_kv_heads, past, text.head_dim)
        return shapes | {f"past_{name}": cache for name in self.cache.names}


class DecoderPass:
    """Everything bound for n tokens with m rows of logits.

    Attributes:
        given: arrays to be filled before `run`; a prompt's biases are not among them.
        found: arrays that hold the small outputs after it.
    """

    def __init__(self, decoder: TrtDecoder, n: int, m: int, visual: int, profile: str):
        """`visual` 0 binds one spare row, which no token reads."""
        self._decoder, self._rows = decoder, m
        self._addresses: dict[str, int] = {}
        self._held: list[Buffer] = []       # memory that only addresses refer to
        shapes = decoder.input_shapes(n, m, max(visual, 1), profile)
        self._bind_inputs(shapes, ("visual_features",) + (BIASES if profile == "prefill" else ()))
        self._bind_outputs(n, m)
        self._new_rows = self._bind_cache(n, profile)
        index = list(decoder.manifest.engines["decoder"].profiles).index(profile)
        self._pass = decoder.engine.bind(index, shapes, self._addresses)
        self.given["visual_index"][:] = n
        self.given["logit_index"][:] = np.arange(m)
        self._queue = Replayed(decoder.memory, self._work,
                               decoder.with_graphs and profile != "prefill")
        if profile == "prefill":
            self._upload_causal_bias(shapes, n)

    def _bind_inputs(self, shapes: dict[str, tuple], own: Sequence[str]) -> None:
        """One arena for all that changes with every pass; `own` tensors lie by themselves."""
        decoder = self._decoder
        types = {name: tensor.dtype for name, tensor in decoder.engine.inputs.items()}
        caches = {f"past_{name}" for name in decoder.cache.names}
        small = [name for name in shapes if name not in caches and name not in own]
        self._given = Arena(decoder.memory, {name: (shapes[name], types[name]) for name in small})
        self.given = self._given.arrays
        self._addresses |= self._given.addresses
        self._own = {name: self._allocate(name, shapes[name], types[name])
                     for name in own if name in shapes}

    def _bind_outputs(self, n: int, m: int) -> None:
        """One arena for what comes down; logits and what nobody reads lie by themselves."""
        decoder = self._decoder
        outputs, hidden = decoder.engine.outputs, decoder.config.text.hidden_size
        top = (m, decoder.manifest.top_k)
        small = {"token_ids": (m,), "top_ids": top, "top_log_probs": top,
                 **{f"hidden_{i}": (1, n, hidden) for i in decoder.layers}}
        self._found = Arena(decoder.memory, {name: (shape, outputs[name].dtype)
                                             for name, shape in small.items()})
        self.found = self._found.arrays
        self._addresses |= self._found.addresses
        self._logits = self._allocate("logits", (m, decoder.config.text.vocab_size),
                                      outputs["logits"].dtype)
        for name, tensor in outputs.items():
            if name not in self._addresses and not name.startswith(("present_", "new_")):
                self._allocate(name, (1, n, hidden), tensor.dtype)

    def _bind_cache(self, n: int, profile: str) -> NewRows | None:
        decoder, cache = self._decoder, self._decoder.cache
        past = cache.addresses
        if not decoder.is_plain:
            for name, address in past.items():
                self._addresses |= {f"past_{name}": address, f"present_{name}": address}
            return None
        if profile == "prefill":
            text = decoder.config.text
            shape = (text.num_kv_heads, PREFILL_SLOTS, text.head_dim)
            nothing = self._allocate("past", shape, decoder.dtype).address
            past = dict.fromkeys(cache.names, nothing)
        rows = cache.new_rows(n)
        for name in cache.names:
            self._addresses |= {f"past_{name}": past[name], f"new_{name}": rows.addresses[name]}
        return rows

    def _allocate(self, name: str, shape: Sequence[int], dtype: np.dtype) -> Buffer:
        buffer = self._decoder.memory.allocate(int(np.prod(shape)) * dtype.itemsize)
        self._held.append(buffer)
        self._addresses[name] = buffer.address
        return buffer

    def _upload_causal_bias(self, shapes: dict[str, tuple], n: int) -> None:
        """A prompt of n tokens behind nothing always has the same."""
        memory, dtype = self._decoder.memory, self._decoder.dtype
        names = [name for name in BIASES if name in shapes]
        arrays = {name: memory.pinned(shapes[name], dtype) for name in names}
        self.write_bias(0, n, None, arrays)
        for name, array in arrays.items():
            memory.upload(self._own[name], array)
        memory.synchronise()

    def write_bias(self, length: int, n: int, visible: np.ndarray | None,
                   arrays: dict[str, np.ndarray] | None = None) -> None:
        """Say what n tokens behind `length` cached ones see.

        Args:
            visible: (n, n) bool among the new ones; None: all before it and itself.
            arrays: biases to fill; None: those of `given`.
        """
        arrays = self.given if arrays is None else arrays
        hidden = HIDDEN_BIAS[self._decoder.dtype]
        among = np.where(np.tri(n, dtype=bool) if visible is None else visible, 0.0, hidden)
        if self._decoder.is_plain:
            arrays["past_bias"][..., :length] = 0.0
            arrays["past_bias"][..., length:] = hidden
            arrays["attention_bias"][0, 0] = among
            return
        bias = arrays["attention_bias"][0, 0]       # (n, slots)
        bias[:, :length], bias[:, length + n:] = 0.0, hidden
        bias[:, length:length + n] = among

    def place(self, features: Any) -> None:
        """Queue a prompt's visual features, (images, 1 + D, tokens, hidden)."""
        memory, target = self._decoder.memory, self._own["visual_features"]
        if isinstance(features, DeviceFeatures):
            features.copy_levels(target)
            return
        levels = np.moveaxis(np.asarray(features), 1, 0)
        pinned = memory.pinned(levels.shape, self._decoder.engine.inputs["visual_features"].dtype)
        pinned[...] = levels
        memory.upload(target, pinned)
        memory.synchronise()            # before the pinned memory goes

    def run(self, length: int, logits: bool) -> np.ndarray | None:
        """The pass behind `length` cached tokens; `found` is filled and the cache written.

        Returns:
            (m, vocabulary) float32 logits, or None where they are not asked for.
        """
        memory = self._decoder.memory
        if not self._decoder.is_plain:
            self.given["write_index"][0] = length
        self._queue()
        if self._new_rows is not None:
            self._decoder.cache.write(length, self._new_rows)
        if logits:
            memory.download(self._host_logits, self._logits)
        memory.synchronise()
        return self._host_logits.astype(np.float32) if logits else None

    @cached_property
    def _host_logits(self) -> np.ndarray:
        """Made when logits are first asked for: greedy decoding never does."""
        decoder = self._decoder
        return decoder.memory.pinned((self._rows, decoder.config.text.vocab_size),
                                     decoder.engine.outputs["logits"].dtype)

    def _work(self) -> None:
        self._given.upload()
        self._pass.queue()
        self._found.download()
