"""The target on ONNX Runtime, on the CPU unless asked otherwise: the embedded default. No torch.

The KV cache is a set of numpy buffers, each bound as a graph's past and as its present: attention
writes in place, rollback moves one number, and a step allocates nothing that grows with the cache.
There is one binding for each block length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from . import positions
from .base import Step, ascending, default_capacity, require_images, visual_places
from .manifest import Manifest, load_config
from ..errors import MissingDependencyError, ModelError
from ..models.config import ModelConfig

# What computes; each is followed by the CPU, which takes the operators it has none for: the cached
# attention of these graphs always, so the cache stays in host memory.
PROVIDERS = {"cpu": (), "cuda": ("CUDAExecutionProvider",),
             "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider")}
HIDDEN_VALUE = -1e30        # of the bias where a token may not look; -inf would make NaNs
MAX_KEPT_BLOCK = 64         # longer blocks (prompts) share one binding, remade when n changes


@dataclass
class _Block:
    """Everything bound for a pass over n tokens with m rows of logits."""

    binding: ort.IOBinding
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


class OrtRuntime:
    """See base.Runtime."""

    name = "ort"

    def __init__(self, checkpoint: Path, graphs: Path | None = None, *, threads: int = 0,
                 capacity: int | None = None, hidden_layers: Sequence[int] = (),
                 provider: str = "cpu"):
        """Load what `reasoning-planner export` wrote.

        Args:
            checkpoint: directory with config.json and the weights.
            graphs: directory of the export; None: the checkpoint's.
            threads: of the pool that all sessions of the process share; 0: one a core. The first
                runtime of a process decides.
            capacity: tokens the cache holds; None: `default_capacity`.
            hidden_layers: whose outputs `Step.hidden_states` has.
            provider: what computes, one of PROVIDERS.
        Raises:
            ModelError: a file is missing, damaged or foreign, or ONNX Runtime refuses a graph.
            MissingDependencyError: the installed ONNX Runtime has not this provider.
        """
        require_provider(provider)
        self.name = "ort" if provider == "cpu" else f"ort-{provider}"
        checkpoint, graphs = Path(checkpoint), Path(graphs or checkpoint)
        manifest = Manifest.load(graphs)
        manifest.require_checkpoint(checkpoint)
        self.config = load_config(checkpoint)
        self._top_k = manifest.top_k
        self._layers = _checked_layers(hidden_layers, self.config)
        options = session_options(threads, checkpoint)
        self._vision, self._decoder, self._expert = (
            open_session(manifest.graph_bytes(graphs, name), graphs / manifest.graphs[name].file,
                         options, provider)
            for name in ("vision", "decoder", "expert"))
        self._capacity = default_capacity(self.config) if capacity is None else capacity
        self._length = 0
        self._rope_delta = 0
        self._allocate()

    def _allocate(self) -> None:
        text = self.config.text
        shape = (1, text.num_kv_heads, self._capacity, text.head_dim)
        self._cache = {f"{kind}_{i}": np.zeros(shape, np.float32)
                       for i in range(text.num_layers) for kind in ("key", "value")}
        # Rotation of every position a token may have, the waypoints behind a full cache included.
        places = np.arange(self._capacity + self.config.flow.num_waypoints)
        self._cos, self._sin = self._cos_sin(places)
        self._total_length = np.zeros(1, np.int32)
        self._no_bias = np.zeros(MAX_KEPT_BLOCK * self._capacity, np.float32)
        self._blocks: dict[tuple[int, int, bool], _Block] = {}
        self._long_block: tuple[tuple[int, int, int, bool], _Block] | None = None
        self._act_binding = self._bind_expert()

    @property
    def capacity(self) -> int:
        """See base.Runtime."""
        return self._capacity

    @property
    def length(self) -> int:
        """See base.Runtime."""
        return self._length

    def encode_images(self, images: np.ndarray) -> np.ndarray:
        """See base.Runtime. One image at a time: the same numbers in any company."""
        vision = self.config.vision
        require_images(images, self.config.vision)
        levels = 1 + len(vision.deepstack_indexes)
        out = np.empty((len(images), levels, vision.tokens_per_image, vision.out_hidden_size),
                       np.float32)
        for i in range(len(images)):
            out[i], = self._vision.run(["features"], {"images": images[i:i + 1]})
        return out

    def prefill(self, input_ids: np.ndarray, features: np.ndarray, *,
                logits: bool = False) -> Step:
        """See base.Runtime."""
        n = len(input_ids)
        self._require_room(0, n, "prompt")
        is_visual = visual_places(input_ids, features.shape[0], self.config)
        count = int(is_visual.sum())
        ids, self._rope_delta = positions.mrope_position_ids(is_visual,
                                                             self.config.vision.merged_grid)
        self._length = 0
        block = self._long_block_of(n, count, logits)
        block.inputs["visual_index"][:] = np.flatnonzero(is_visual)
        block.inputs["visual_features"][:] = np.moveaxis(features, 1, 0).reshape(
            block.inputs["visual_features"].shape)
        block.inputs["logit_index"][:] = n - 1
        return self._run(block, input_ids, self._cos_sin(ids), None)

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """See base.Runtime."""
        n = len(token_ids)
        self._require_room(self._length, n, "block")
        if n > MAX_KEPT_BLOCK:
            block = self._long_block_of(n, 0, logits, rows=n)
        else:
            key = (n, n, logits)
            if key not in self._blocks:
                self._blocks[key] = self._bind_decoder(n, n, 0, logits)
            block = self._blocks[key]
        if indices is None:
            places = slice(self._length + self._rope_delta, self._length + self._rope_delta + n)
        else:
            places = np.asarray(indices) + self._rope_delta
        return self._run(block, token_ids, (self._cos[places], self._sin[places]), visible)

    def crop(self, length: int) -> None:
        """See base.Runtime."""
        assert 0 <= length <= self._length, f"cannot crop {self._length} tokens to {length}"
        self._length = length

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """See base.Runtime."""
        kept = ascending(nodes, self._length - start)
        in_place = next((i for i, node in enumerate(kept) if i != node), len(kept))
        if in_place < len(kept):
            source, first = np.asarray(kept[in_place:]) + start, start + in_place
            for buffer in self._cache.values():
                buffer[:, :, first:start + len(kept)] = buffer[:, :, source]
        self._length = start + len(kept)

    def act(self, noise: np.ndarray, num_steps: int | None = None) -> np.ndarray:
        """See base.Runtime."""
        flow = self.config.flow
        block, steps = self._act_binding, num_steps or flow.num_steps
        block.inputs["noise"][0] = noise
        block.inputs["offset"][0] = self._length
        start = self._length + self._rope_delta
        for name, table in (("cos", self._cos), ("sin", self._sin)):
            block.inputs[name][:] = table[start:start + flow.num_waypoints]
        times = np.linspace(0.0, 1.0, steps + 1, dtype=np.float32)
        _bind(block.binding.bind_input, "times", times)
        self._expert.run_with_iobinding(block.binding)
        return block.outputs["actions"][0].copy()

    def _cos_sin(self, position_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        text = self.config.text
        return positions.rope_cos_sin(position_ids, text.head_dim, text.rope_theta,
                                      text.mrope_section)

    def _require_room(self, past: int, n: int, what: str) -> None:
        if n < 1 or past + n > self._capacity:
            raise ModelError(f"{what}: given {n} tokens behind {past} cached ones, expected 1 to "
                             f"{self._capacity - past} (cache of {self._capacity})")

    def _run(self, block: _Block, token_ids: np.ndarray,
             cos_sin: tuple[np.ndarray, np.ndarray], visible: np.ndarray | None) -> Step:
        """One pass of the decoder; the tokens are in the cache afterwards."""
        n = len(token_ids)
        total = self._length + n
        block.inputs["input_ids"][:] = token_ids
        block.inputs["cos"][:], block.inputs["sin"][:] = cos_sin
        self._total_length[0] = total
        bias = self._bias(n, total, visible)
        _bind(block.binding.bind_input, "attention_bias", bias)
        self._decoder.run_with_iobinding(block.binding)
        self._length = total
        out = block.outputs
        return Step(out["token_ids"].copy(), out["top_ids"].copy(), out["top_log_probs"].copy(),
                    tuple(out[f"hidden_{i}"][0].copy() for i in self._layers),
                    out["logits"].copy() if "logits" in out else None)

    def _bias(self, n: int, total: int, visible: np.ndarray | None) -> np.ndarray:
        """(1, 1, n, total): zero for a block, since the operator itself is causal."""
        if visible is not None:
            bias = np.zeros((1, 1, n, total), np.float32)
            bias[0, 0, :, total - n:][~visible] = HIDDEN_VALUE
            return bias
        if n * total > self._no_bias.size:
            self._no_bias = np.zeros(n * total, np.float32)
        return self._no_bias[:n * total].reshape(1, 1, n, total)

    def _long_block_of(self, n: int, visual: int, logits: bool, rows: int = 1) -> _Block:
        key = (n, visual, rows, logits)
        if self._long_block is None or self._long_block[0] != key:
            self._long_block = (key, self._bind_decoder(n, rows, visual, logits))
        return self._long_block[1]

    def _bind_decoder(self, n: int, m: int, visual: int, logits: bool) -> _Block:
        text = self.config.text
        levels = 1 + len(self.config.vision.deepstack_indexes)
        half = text.head_dim // 2
        inputs = {"input_ids": np.zeros(n, np.int64), "visual_index": np.zeros(visual, np.int64),
                  "visual_features": np.zeros((levels, visual, text.hidden_size), np.float32),
                  "cos": np.zeros((n, half), np.float32), "sin": np.zeros((n, half), np.float32),
                  "total_length": self._total_length, "logit_index": np.arange(m)}
        outputs = {"token_ids": np.zeros(m, np.int64),
                   "top_ids": np.zeros((m, self._top_k), np.int64),
                   "top_log_probs": np.zeros((m, self._top_k), np.float32)}
        outputs |= {f"hidden_{i}": np.zeros((1, n, text.hidden_size), np.float32)
                    for i in self._layers}
        if logits:
            outputs["logits"] = np.zeros((m, text.vocab_size), np.float32)
        return self._bound(self._decoder, inputs, outputs, present=True)

    def _bind_expert(self) -> _Block:
        flow, half = self.config.flow, self.config.text.head_dim // 2
        action = (1, flow.num_waypoints, flow.action_size)
        inputs = {"noise": np.zeros(action, np.float32), "offset": np.zeros(1, np.int64),
                  "cos": np.zeros((flow.num_waypoints, half), np.float32),
                  "sin": np.zeros((flow.num_waypoints, half), np.float32)}
        return self._bound(self._expert, inputs, {"actions": np.zeros(action, np.float32)},
                           present=False)

    def _bound(self, session: ort.InferenceSession, inputs: dict[str, np.ndarray],
               outputs: dict[str, np.ndarray], present: bool) -> _Block:
        binding = session.io_binding()
        for name, array in inputs.items():
            _bind(binding.bind_input, name, array)
        for name, array in outputs.items():
            _bind(binding.bind_output, name, array)
        for name, array in self._cache.items():
            _bind(binding.bind_input, f"past_{name}", array)
            if present:
                _bind(binding.bind_output, f"present_{name}", array)
        return _Block(binding, inputs, outputs)


def _bind(bind, name: str, array: np.ndarray) -> None:
    """Bind memory as it is; whoever holds the binding holds the array."""
    assert array.flags.c_contiguous, name
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def session_options(threads: int, weights: Path, lent: Mapping[str, np.ndarray] | None = None
                    ) -> ort.SessionOptions:
    """One pool for all sessions: two pools that spin on the same cores doubled a verify's time.

    Args:
        threads: of that pool; the first call of a process decides.
        weights: folder of the files that a graph's external weights lie in.
        lent: weights given as arrays instead, by name. They may be read in place: keep them as
            long as the session.
    """
    try:
        ort.set_global_thread_pool_sizes(threads, 1)
    except Exception as error:      # ONNX Runtime's Fail, which has no public name
        if "already been created" not in str(error):
            raise
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.enable_mem_pattern = False      # shapes inside grow with the context
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     str(weights))
    if lent:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in lent.values()]
        options.add_external_initializers(list(lent), values)
    return options


def require_provider(provider: str) -> None:
    """
    Raises:
        ModelError: no such provider.
        MissingDependencyError: the installed ONNX Runtime is built without it.
    """
    if provider not in PROVIDERS:
        raise ModelError(f"provider: given {provider!r}, expected one of {', '.join(PROVIDERS)}")
    available = ort.get_available_providers()
    missing = [name for name in PROVIDERS[provider] if name not in available]
    if missing:
        raise MissingDependencyError(
            f"provider {provider}: ONNX Runtime {ort.__version__} has {', '.join(available)}, "
            f"expected {', '.join(missing)}: pip install onnxruntime-gpu in place of onnxruntime")


def open_session(content: bytes, path: Path, options: ort.SessionOptions, provider: str = "cpu"
                 ) -> ort.InferenceSession:
    """A session that computes where it was asked to or not at all.

    Args:
        content: the graph.
        path: of its file, for the message.
    Raises:
        ModelError: ONNX Runtime refuses the graph, or that provider.
    """
    wanted = [*PROVIDERS[provider], "CPUExecutionProvider"]
    try:
        session = ort.InferenceSession(content, options, providers=wanted, enable_fallback=0)
    except Exception as error:      # ONNX Runtime raises a dozen private kinds
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: refused by ONNX Runtime {ort.__version__}: {reason}") from error
    lost = [name for name in wanted if name not in session.get_providers()]
    if lost:        # a library it needs cannot be loaded; ONNX Runtime only logs that
        raise ModelError(f"{path}: ONNX Runtime {ort.__version__} could not start "
                         f"{', '.join(lost)}, expected its CUDA and TensorRT libraries and a "
                         f"device")
    return session


def _checked_layers(layers: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    count = config.text.num_layers
    if any(not 0 <= layer < count for layer in layers):
        raise ModelError(f"hidden_layers: given {tuple(layers)}, expected 0 .. {count - 1}")
    return tuple(layers)
