"""The target in PyTorch behind the same protocol: the oracle of every other runtime.

On CUDA it is a runtime of its own, where TensorRT is not installed: short blocks are passes of
fixed shapes, one CUDA graph each. With torch_graphs.py, the only file that runs a model with torch
outside training and export.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .base import Step, default_capacity, visual_places
from .manifest import load_config
from .torch_graphs import MAX_STATIC_BLOCK, StaticBlock, StaticCache
from ..errors import MissingDependencyError, ModelError
from ..models import masks
from ..models.config import ModelConfig
from ..models.target import Step as TargetStep
from ..models.target import Target
from ..models.vision import VisionFeatures, image_patches

TOP_K = 8
# On CUDA the weights are in the type that Alpamayo's checkpoints have.
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


class TorchRuntime:
    """See base.Runtime."""

    name = "torch"

    def __init__(self, target: Target, *, capacity: int | None = None,
                 hidden_layers: Sequence[int] = (), top_k: int = TOP_K,
                 fixed_shapes: bool | None = None):
        """
        Args:
            target: on any device, in any dtype.
            capacity: tokens the cache holds; None: `default_capacity`.
            hidden_layers: whose outputs `Step.hidden_states` has.
            top_k: how many likeliest tokens a step names.
            fixed_shapes: run short blocks as passes of fixed shapes, as CUDA graphs where there
                is CUDA; None: there and nowhere else.
        """
        self.config = target.config
        self._target = target.eval()
        self._layers = tuple(hidden_layers)
        self._top_k = top_k
        weight = target.lm_head.weight
        self._device, self._dtype = weight.device, weight.dtype
        if self._device.type == "cuda":
            self.name = "torch-cuda"
        self._cache = StaticCache.of(
            target, default_capacity(self.config) if capacity is None else capacity)
        self._rope_delta = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._delta = 0         # the same, on the host
        self._has_fixed_shapes = (self._device.type == "cuda" if fixed_shapes is None
                                  else fixed_shapes)
        self._blocks: dict[int, StaticBlock] = {}
        self._is_poisoned = False

    @classmethod
    def load(cls, checkpoint: Path, *, device: str = "cpu", dtype: str | None = None,
             capacity: int | None = None, hidden_layers: Sequence[int] = ()) -> TorchRuntime:
        """Load a checkpoint directory.

        Args:
            device: "cpu" or "cuda".
            dtype: of the weights; None: as DTYPES says.
        Raises:
            ModelError: a file is missing or does not fit the configuration.
            MissingDependencyError: torch sees no such device.
        """
        target = load_target(Path(checkpoint), device, weights_dtype(device, dtype))
        return cls(target, capacity=capacity, hidden_layers=hidden_layers)

    @property
    def capacity(self) -> int:
        """See base.Runtime."""
        return self._cache.capacity

    @property
    def length(self) -> int:
        """See base.Runtime."""
        return self._cache.length

    @torch.no_grad()
    def encode_images(self, images: np.ndarray) -> np.ndarray:
        """See base.Runtime. One image at a time."""
        vision = self.config.vision
        encoded = []
        for image in torch.from_numpy(images).to(self._device):
            patches = image_patches(image[None], vision)
            features = self._target.encode_images(patches, vision.grid)
            encoded.append(torch.stack((features.tokens[0],
                                        *(level[0] for level in features.deepstack))))
        levels = 1 + len(vision.deepstack_indexes)
        empty = np.zeros((0, levels, vision.tokens_per_image, vision.out_hidden_size), np.float32)
        return _numpy(torch.stack(encoded)) if encoded else empty

    def prefill(self, input_ids: np.ndarray, features: np.ndarray, *,
                logits: bool = False) -> Step:
        """See base.Runtime."""
        self._require_room(0, len(input_ids), "prompt")
        input_ids = np.asarray(input_ids)
        visual_places(input_ids, features.shape[0], self.config)
        ids = torch.from_numpy(input_ids).to(self._device)[None]
        levels = torch.from_numpy(features).to(self._device, self._dtype).unbind(1)
        if self._is_poisoned:
            self._cache.clear()
        self._cache.crop(0)
        self._is_poisoned = False
        step = self._target.prefill(ids, self._cache, VisionFeatures(levels[0], levels[1:]),
                                    select_layers=self._layers)
        assert step.rope_delta is not None
        self._rope_delta, self._delta = step.rope_delta, int(step.rope_delta)
        return self._step(step, logits)

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """See base.Runtime."""
        count, past = len(token_ids), self._cache.length
        self._require_room(past, count, "block")
        if self._has_fixed_shapes and count <= MAX_STATIC_BLOCK:
            return self._extend_fixed(np.asarray(token_ids), indices, visible, logits)
        mask = None
        if visible is not None:
            allowed = np.concatenate([np.ones((count, past), bool), visible], axis=1)
            mask = masks.additive(torch.from_numpy(allowed).to(self._device),
                                  self._dtype)[None, None]
        places = None if indices is None else torch.from_numpy(np.asarray(indices))
        step = self._target.extend(
            torch.from_numpy(np.asarray(token_ids)).to(self._device)[None], self._cache,
            self._rope_delta, None if places is None else places.to(self._device), mask,
            self._layers)
        return self._step(step, logits)

    def _extend_fixed(self, token_ids: np.ndarray, indices: np.ndarray | None,
                      visible: np.ndarray | None, logits: bool) -> Step:
        """`extend` by a pass of fixed shapes."""
        count, past = len(token_ids), self._cache.length
        if count not in self._blocks:
            self._blocks[count] = StaticBlock(self._target, self._cache, count, self._layers,
                                              self._top_k)
        places = np.arange(past, past + count) if indices is None else np.asarray(indices)
        chosen, top_ids, top_log_probs, rows, *selected = self._blocks[count].run(
            token_ids, places + self._delta, past, visible)
        self._cache.advance(count)
        log_probs = _numpy(top_log_probs)
        self._is_poisoned |= not np.isfinite(log_probs).all()
        return Step(chosen.cpu().numpy(), top_ids.cpu().numpy(), log_probs,
                    tuple(_numpy(layer) for layer in selected), _numpy(rows) if logits else None)

    def crop(self, length: int) -> None:
        """See base.Runtime."""
        self._cache.crop(length)

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """See base.Runtime."""
        self._cache.compact(start, nodes)

    def act(self, noise: np.ndarray, num_steps: int | None = None) -> np.ndarray:
        """See base.Runtime."""
        given = torch.from_numpy(np.asarray(noise, np.float32)).to(self._device)[None]
        offset = torch.tensor([self._cache.length], device=self._device)
        return _numpy(self._target.act(self._cache, offset, self._rope_delta, given,
                                       num_steps)[0])

    def _require_room(self, past: int, n: int, what: str) -> None:
        if n < 1 or past + n > self.capacity:
            raise ModelError(f"{what}: given {n} tokens behind {past} cached ones, expected 1 to "
                             f"{self.capacity - past} (cache of {self.capacity})")

    def _step(self, step: TargetStep, logits: bool) -> Step:
        masked = self._target.mask_trajectory_bins(step.logits[0].float())      # (m, vocabulary)
        top = masked.log_softmax(-1).topk(self._top_k, dim=-1)
        return Step(masked.argmax(-1).cpu().numpy(), top.indices.cpu().numpy(),
                    _numpy(top.values), tuple(_numpy(layer[0]) for layer in step.selected),
                    _numpy(masked) if logits else None)


def weights_dtype(device: str, name: str | None = None) -> torch.dtype:
    """What the weights are held in on a device.

    Args:
        device: "cpu" or "cuda".
        name: such as "float16"; None: as DTYPES says.
    Raises:
        ModelError: no such kind of device.
        MissingDependencyError: torch sees none.
    """
    if device not in DTYPES:
        raise ModelError(f"provider: given {device!r} for torch, expected one of "
                         f"{', '.join(DTYPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(f"provider cuda: torch {torch.__version__} sees no CUDA "
                                     f"device, expected its CUDA build and an NVIDIA driver")
    return getattr(torch, name or DTYPES[device])


def load_target(checkpoint: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
                ) -> Target:
    """The model of a checkpoint directory.

    Raises:
        ModelError: a file is missing or does not fit the configuration.
    """
    config = load_config(checkpoint)
    with torch.device("meta"):      # shapes alone: the memory is the checkpoint's tensors
        target = Target(config)
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{checkpoint}: given no *.safetensors, expected a checkpoint")
    try:
        weights = {name: tensor.to(dtype) for path in paths
                   for name, tensor in load_file(path, device=device).items()}
        target.load_state_dict(weights, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{checkpoint}: weights do not fit config.json: {reason}") from error
    return target.requires_grad_(False)


def random_target(config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> Target:
    """A model of random weights, made where it runs: for measuring."""
    with torch.device("meta"):
        target = Target(config).to(dtype)
    return randomise(target.to_empty(device=device), seed)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Norms about 1, matrices about their width to the power -1/2: numbers of a usual size."""
    for index, weight in enumerate(model.parameters()):
        generator = torch.Generator(weight.device).manual_seed(seed + index)
        if weight.dim() == 1:
            weight.normal_(1.0, 0.02, generator=generator)
        else:
            weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
    return model.eval().requires_grad_(False)


def measure_bandwidth_gbps(device: str, num_bytes: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes read and written a second, in 1e9, when a device copies its own memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(repeats):
        started_s = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * num_bytes / best_s / 1e9


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
