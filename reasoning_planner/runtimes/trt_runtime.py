"""The target on TensorRT: engines of `build-engines`, the cache on the device. Needs no torch.

Everything a pass needs goes up in one copy, token ids and what else is small come down in one;
visual features, cache and logits stay where they are. A pass over a length seen before is one CUDA
graph.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Sequence

import numpy as np

from . import positions
from .base import Step, ascending, require_images, visual_places
from .device_features import DeviceFeatures
from .device_memory import (Arena, Buffer, DeviceMemory, Replayed, Rows,
                            create_device_memory)
from .engine_manifest import BuiltEngine, EngineManifest, find_engines
from .manifest import load_config
from .trt_decoder import HIDDEN_BIAS, DecoderPass, TrtDecoder
from .trt_engine import Engine, EngineLoader, load_tensorrt
from ..errors import ModelError
from ..models.config import ModelConfig

ENGINES = ("vision", "decoder", "expert_step")


class TrtRuntime:
    """See base.Runtime."""

    name = "trt"

    def __init__(self, manifest: EngineManifest, config: ModelConfig, engines: dict[str, Engine],
                 memory: DeviceMemory, *, capacity: int | None = None,
                 hidden_layers: Sequence[int] = (), with_graphs: bool = True):
        """
        Args:
            engines: one for each of ENGINES.
            capacity: tokens the cache holds; None: as many as the engines were built for.
            hidden_layers: whose outputs `Step.hidden_states` has.
            with_graphs: capture passes as CUDA graphs.
        Raises:
            ModelError: the engines give or hold less than is asked for.
        """
        self.config = config
        self._manifest, self._memory = manifest, memory
        self._capacity = _checked_capacity(capacity, manifest, config)
        self._layers = _checked_layers(hidden_layers, manifest)
        vision, decoder, self._expert = (engines[name] for name in ENGINES)
        self._decoder = TrtDecoder(decoder, manifest, config, memory, self._layers, with_graphs)
        self._image_pass = _ImagePass(vision, config, memory, with_graphs)
        self._expert_passes: dict[int, _ExpertPass] = {}
        self._with_graphs = with_graphs
        self._length = self._rope_delta = 0
        self._is_poisoned = False
        places = np.arange(self._capacity + config.flow.num_waypoints)
        self._cos, self._sin = self._cos_sin(places)

    @classmethod
    def load(cls, checkpoint: Path, engines: Path | None = None, *, capacity: int | None = None,
             hidden_layers: Sequence[int] = (), memory: DeviceMemory | None = None,
             trt: ModuleType | None = None, with_graphs: bool = True) -> TrtRuntime:
        """Load what `reasoning-planner build-engines` wrote.

        Args:
            checkpoint: directory with config.json and tokenizer.json, with or without weights.
            engines: directory of the engines; None: the one in the checkpoint's `engines`.
            memory: None: the first library that finds a device.
            trt: the module; None: `tensorrt`.
        Raises:
            ModelError: engines are missing, damaged, stale or foreign, or refused by TensorRT.
            MissingDependencyError: TensorRT or a library for device memory is not installed.
        """
        checkpoint = Path(checkpoint)
        engines = Path(engines) if engines else find_engines(checkpoint, cls.name)
        if engines is None:
            raise ModelError(f"{checkpoint / 'engines'}: no engines for the runtime trt, expected "
                             f"those of `reasoning-planner build-engines --checkpoint "
                             f"{checkpoint} --platform orin|thor|x86`")
        manifest = EngineManifest.load(engines)
        manifest.require_runtime(engines, cls.name, "")
        trt = trt or load_tensorrt()
        manifest.require_runtime(engines, cls.name, f"tensorrt {trt.__version__}")
        manifest.require_checkpoint(engines, checkpoint)
        memory = memory or create_device_memory()
        return cls(manifest, load_config(checkpoint),
                   _loaded(engines, manifest, EngineLoader(trt, memory)), memory,
                   capacity=capacity, hidden_layers=hidden_layers, with_graphs=with_graphs)

    @property
    def capacity(self) -> int:
        """See base.Runtime."""
        return self._capacity

    @property
    def length(self) -> int:
        """See base.Runtime."""
        return self._length

    def encode_images(self, images: np.ndarray) -> Any:
        """See base.Runtime; what is returned stands for the array and stays on the device."""
        require_images(images, self.config.vision)
        encoded = tuple(self._image_pass.encode(image) for image in images)
        return DeviceFeatures(self._memory, encoded, self._image_pass.shape,
                              self._image_pass.dtype)

    def prefill(self, input_ids: np.ndarray, features: Any, *, logits: bool = False) -> Step:
        """See base.Runtime."""
        n = len(input_ids)
        self._require_room(0, n, "prompt")
        self._decoder.require_size("prefill", n, "prompt")
        is_visual = visual_places(input_ids, features.shape[0], self.config)
        count = int(is_visual.sum())
        ids, self._rope_delta = positions.mrope_position_ids(is_visual,
                                                             self.config.vision.merged_grid)
        self._forget()
        bound = self._decoder.prompt(n, count)
        if count:
            bound.given["visual_index"][:] = np.flatnonzero(is_visual)
            bound.place(features)
        bound.given["logit_index"][0] = n - 1
        return self._run(bound, input_ids, self._cos_sin(ids), logits)

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """See base.Runtime."""
        n = len(token_ids)
        self._require_room(self._length, n, "block")
        self._decoder.require_size("decode" if n == 1 else "verify", n, "block")
        bound = self._decoder.block(n)
        bound.write_bias(self._length, n, visible)
        first = self._length + self._rope_delta
        places = (slice(first, first + n) if indices is None
                  else np.asarray(indices) + self._rope_delta)
        return self._run(bound, token_ids, (self._cos[places], self._sin[places]), logits)

    def crop(self, length: int) -> None:
        """See base.Runtime."""
        assert 0 <= length <= self._length, f"cannot crop {self._length} tokens to {length}"
        self._length = length

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """See base.Runtime."""
        kept = ascending(nodes, self._length - start)
        self._decoder.cache.keep(start, kept)
        self._length = start + len(kept)

    def act(self, noise: np.ndarray, num_steps: int | None = None) -> np.ndarray:
        """See base.Runtime."""
        steps = num_steps or self.config.flow.num_steps
        if steps not in self._expert_passes:
            self._expert_passes[steps] = _ExpertPass(self._expert, self._decoder, steps)
        start = self._length + self._rope_delta
        places = slice(start, start + self.config.flow.num_waypoints)
        actions = self._expert_passes[steps].run(noise, self._length, self._cos[places],
                                                 self._sin[places])
        self._is_poisoned |= not np.isfinite(actions).all()
        return actions

    def _forget(self) -> None:
        """Empty the cache; zero it after a pass that was not finite."""
        if self._is_poisoned:
            self._decoder.cache.clear()
        self._length, self._is_poisoned = 0, False

    def _run(self, bound: DecoderPass, token_ids: np.ndarray,
             cos_sin: tuple[np.ndarray, np.ndarray], logits: bool) -> Step:
        """One pass of the decoder; the tokens are in the cache afterwards."""
        bound.given["input_ids"][:] = token_ids
        bound.given["cos"][:], bound.given["sin"][:] = cos_sin
        rows = bound.run(self._length, logits)
        self._length += len(token_ids)
        found = bound.found
        self._is_poisoned |= not np.isfinite(found["top_log_probs"]).all()
        return Step(found["token_ids"].copy(), found["top_ids"].copy(),
                    found["top_log_probs"].copy(),
                    tuple(found[f"hidden_{i}"][0].astype(np.float32) for i in self._layers), rows)

    def _cos_sin(self, position_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        text = self.config.text
        return positions.rope_cos_sin(position_ids, text.head_dim, text.rope_theta,
                                      text.mrope_section)

    def _require_room(self, past: int, n: int, what: str) -> None:
        if n < 1 or past + n > self._capacity:
            raise ModelError(f"{what}: given {n} tokens behind {past} cached ones, expected 1 to "
                             f"{self._capacity - past} (cache of {self._capacity})")


class _ImagePass:
    """The vision engine, one image at a time: the same numbers in any company."""

    def __init__(self, engine: Engine, config: ModelConfig, memory: DeviceMemory,
                 with_graphs: bool):
        vision = config.vision
        image = (1, vision.image_height, vision.image_width, vision.in_channels)
        self.shape = (1 + len(vision.deepstack_indexes), vision.tokens_per_image,
                      vision.out_hidden_size)
        self.dtype = engine.outputs["features"].dtype
        self._memory = memory
        self._given = Arena(memory, {"images": (image, np.uint8)})
        self._features = self._new_buffer()
        self._pass = engine.bind(0, {"images": image}, {
            **self._given.addresses, "features": self._features.address})
        self._queue = Replayed(memory, self._work, with_graphs)

    def encode(self, image: np.ndarray) -> Buffer:
        """(H, W, 3) uint8 -> memory that holds (1 + D, tokens, hidden)."""
        self._given.arrays["images"][0] = image
        self._queue()
        kept = self._new_buffer()
        self._memory.copy_rows(_whole(kept), _whole(self._features))
        self._memory.synchronise()
        return kept

    def _work(self) -> None:
        self._given.upload()
        self._pass.queue()

    def _new_buffer(self) -> Buffer:
        return self._memory.allocate(int(np.prod(self.shape)) * self.dtype.itemsize)


class _ExpertPass:
    """All Euler steps: one bound pass for each, every one reading what the one before wrote."""

    def __init__(self, engine: Engine, decoder: TrtDecoder, steps: int):
        self._decoder, self._engine = decoder, engine
        shapes = self._shapes()
        changing = ("cos", "sin", "past_bias", "attention_bias", "write_index")
        self._given = Arena(decoder.memory, {
            "x_0": (shapes["noise"], np.float32),
            **{name: (shapes[name], engine.inputs[name].dtype) for name in changing
               if name in shapes}})
        self._states = [Arena(decoder.memory, {"x": (shapes["noise"], np.float32)})
                        for _ in range(steps)]
        self._times = Arena(decoder.memory, {f"times_{i}": ((2,), np.float32)
                                             for i in range(steps)})
        self._upload_times(steps)
        self._passes = [engine.bind(0, shapes, self._addresses(i)) for i in range(steps)]
        self._queue = Replayed(decoder.memory, self._work, decoder.with_graphs)

    def _shapes(self) -> dict[str, tuple]:
        config, slots = self._decoder.config, self._decoder.manifest.slots
        text, flow = config.text, config.flow
        half = (flow.num_waypoints, text.head_dim // 2)
        shapes: dict[str, tuple] = {"noise": (1, flow.num_waypoints, flow.action_size),
                                    "times": (2,), "cos": half, "sin": half}
        if self._decoder.is_plain:
            shapes["past_bias"] = (1, 1, 1, slots)
        else:
            shapes |= {"write_index": (1,), "attention_bias": (1, 1, flow.num_waypoints, slots)}
        cache = (1, text.num_kv_heads, slots, text.head_dim)
        return shapes | {f"past_{name}": cache for name in self._decoder.cache.names}

    def _upload_times(self, steps: int) -> None:
        times = np.linspace(0.0, 1.0, steps + 1, dtype=np.float32)
        for i in range(steps):
            self._times.arrays[f"times_{i}"][:] = times[i:i + 2]
        self._times.upload()
        self._decoder.memory.synchronise()

    def _addresses(self, step: int) -> dict[str, int]:
        """The step's own times, the state before it and the state behind it; else all alike."""
        before = (self._given.addresses["x_0"] if step == 0
                  else self._states[step - 1].addresses["x"])
        addresses = {**self._given.addresses, "noise": before,
                     "times": self._times.addresses[f"times_{step}"],
                     "actions": self._states[step].addresses["x"]}
        for name, address in self._decoder.cache.addresses.items():
            addresses |= {f"past_{name}": address, f"present_{name}": address}
        return addresses

    def run(self, noise: np.ndarray, length: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        """(waypoints, 2) float32, behind `length` cached tokens."""
        given, count = self._given.arrays, len(noise)
        given["x_0"][0], given["cos"][:], given["sin"][:] = noise, cos, sin
        if self._decoder.is_plain:
            bias, seen = given["past_bias"], length
        else:
            bias, seen = given["attention_bias"], length + count
            given["write_index"][0] = length
        bias[..., :seen], bias[..., seen:] = 0.0, HIDDEN_BIAS[self._decoder.dtype]
        self._queue()
        self._decoder.memory.synchronise()
        return self._states[-1].arrays["x"][0].copy()

    def _work(self) -> None:
        self._given.upload()
        for step in self._passes:
            step.queue()
        self._states[-1].download()


def _whole(buffer: Buffer) -> Rows:
    return Rows(buffer, 0, buffer.num_bytes, buffer.num_bytes, 1)


def _loaded(folder: Path, manifest: EngineManifest, loader: EngineLoader) -> dict[str, Engine]:
    """The engines of a folder, compared with their manifest."""
    engines = {}
    for name in ENGINES:
        with manifest.engine_content(folder, name) as content:
            engines[name] = loader.load(content, folder / manifest.engines[name].file)
        _require_signature(engines[name], manifest.engines[name])
    return engines


def _require_signature(engine: Engine, built: BuiltEngine) -> None:
    """
    Raises:
        ModelError: the engine has other tensors than its manifest says.
    """
    given = {name: tensor.dtype.name for name, tensor in {**engine.inputs,
                                                          **engine.outputs}.items()}
    expected = {name: tensor["dtype"] for name, tensor in built.tensors.items()}
    if given != expected:
        differing = sorted(name for name in {*given, *expected}
                           if given.get(name) != expected.get(name))
        raise ModelError(f"{engine.path}: tensors {', '.join(differing)} are not as its manifest "
                         f"says; run `reasoning-planner build-engines` again")
    if engine.knows_aliases and engine.aliases != built.aliases:
        raise ModelError(f"{engine.path}: given aliased tensors {engine.aliases}, expected "
                         f"{built.aliases}")


def _checked_capacity(asked: int | None, manifest: EngineManifest, config: ModelConfig) -> int:
    if asked is not None and asked > manifest.capacity:
        raise ModelError(f"capacity: given {asked} tokens, expected at most {manifest.capacity}, "
                         f"the cache of the engines for {manifest.platform}")
    needed = manifest.capacity + config.flow.num_waypoints
    if manifest.slots < needed:
        raise ModelError(f"engines for {manifest.platform}: given {manifest.slots} slots of "
                         f"cache, expected {needed}: the tokens and the waypoints behind them")
    return manifest.capacity if asked is None else asked


def _checked_layers(layers: Sequence[int], manifest: EngineManifest) -> tuple[int, ...]:
    given = manifest.hidden_layers or []
    if not set(layers) <= set(given):
        raise ModelError(f"hidden_layers: given {tuple(layers)}, expected some of {tuple(given)}, "
                         f"which the engines for {manifest.platform} give out")
    return tuple(layers)
