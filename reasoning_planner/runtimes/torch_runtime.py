"""The target in PyTorch behind the same protocol: the oracle of every other runtime.

The only file that runs a model with torch outside training and export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .base import Step, default_capacity
from .manifest import load_config
from ..errors import ModelError
from ..models import masks
from ..models.target import Step as TargetStep
from ..models.target import Target
from ..models.vision import VisionFeatures, image_patches

TOP_K = 8


class TorchRuntime:
    """See base.Runtime."""

    name = "torch"

    def __init__(self, target: Target, *, capacity: int | None = None,
                 hidden_layers: Sequence[int] = (), top_k: int = TOP_K):
        """
        Args:
            target: on any device, in any dtype.
            capacity: tokens the cache holds; None: `default_capacity`.
            hidden_layers: whose outputs `Step.hidden_states` has.
            top_k: how many likeliest tokens a step names.
        """
        self.config = target.config
        self._target = target.eval()
        self._layers = tuple(hidden_layers)
        self._top_k = top_k
        weight = target.lm_head.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._cache = target.new_cache(
            default_capacity(self.config) if capacity is None else capacity)
        self._rope_delta = torch.zeros(1, dtype=torch.int64, device=self._device)

    @classmethod
    def load(cls, checkpoint: Path, *, device: str = "cpu", dtype: str = "float32",
             capacity: int | None = None, hidden_layers: Sequence[int] = ()) -> TorchRuntime:
        """Load a checkpoint directory.

        Raises:
            ModelError: a file is missing or does not fit the configuration.
        """
        return cls(load_target(Path(checkpoint)).to(device, getattr(torch, dtype)),
                   capacity=capacity, hidden_layers=hidden_layers)

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
        ids = torch.from_numpy(np.asarray(input_ids)).to(self._device)[None]
        count = int(self._target.is_visual(ids).sum())
        if count != features.shape[0] * self.config.vision.tokens_per_image:
            raise ModelError(f"prompt: given {count} image placeholders and {features.shape[0]} "
                             f"images, expected {self.config.vision.tokens_per_image} for each")
        levels = torch.from_numpy(features).to(self._device, self._dtype).unbind(1)
        self._cache.crop(0)
        step = self._target.prefill(ids, self._cache, VisionFeatures(levels[0], levels[1:]),
                                    select_layers=self._layers)
        assert step.rope_delta is not None
        self._rope_delta = step.rope_delta
        return self._step(step, logits)

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """See base.Runtime."""
        count, past = len(token_ids), self._cache.length
        self._require_room(past, count, "block")
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


def load_target(checkpoint: Path) -> Target:
    """The model of a checkpoint directory, float32 on the CPU.

    Raises:
        ModelError: a file is missing or does not fit the configuration.
    """
    target = Target(load_config(checkpoint))
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{checkpoint}: given no *.safetensors, expected a checkpoint")
    try:
        weights = {name: tensor.float() for path in paths
                   for name, tensor in load_file(path).items()}
        target.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{checkpoint}: weights do not fit config.json: {reason}") from error
    return target.requires_grad_(False)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
