"""What a target in PyTorch writes and plans for samples of the world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import numpy as np
import torch

from ..datatypes import HORIZON_LENGTH
from ..models.target import Target
from ..models.vision import image_patches
from ..tokenization.text_tokenizer import TextTokenizer
from .checkpoint import load_release
from .dataset import PromptLayout, Shard
from .validation import MAX_NEW_TOKENS, fixed_noise, path_of


@dataclass(frozen=True)
class Predictions:
    """What was written and planned for N samples.

    Attributes:
        texts: N sentences.
        token_ids: N lists, stop tokens included.
        paths: (N, 64, 2) float64, metres, t0 + 0.1 .. t0 + 6.4 s.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    paths: np.ndarray


@torch.no_grad()
def predict(target: Target, tokenizer: TextTokenizer, layout: PromptLayout, shard: Shard,
            rows: Sequence[int], blind: bool = False, act: bool = True,
            noise_scale: float = 1.0) -> Predictions:
    """Greedy text, then one plan from noise of a fixed seed.

    Args:
        rows: of the shard, together one batch.
        blind: all images black.
        act: False leaves the paths at the origin.
        noise_scale: of the flow's start; 0 starts from the mean, and gives the middle plan.
    """
    ids = np.stack([layout.prompt(shard.history[row]) for row in rows])
    images = np.stack([shard.images[row][slot, frame] for row in rows
                       for slot, frame in layout.places])
    pixels = torch.from_numpy(np.zeros_like(images) if blind else images)
    config = target.config.vision
    vision = target.encode_images(image_patches(pixels, config), config.grid)
    cache = target.new_cache(layout.length + MAX_NEW_TOKENS + 1, len(rows))
    prefilled = target.prefill(torch.from_numpy(ids), cache, vision)
    written = target.generate(prefilled, cache, MAX_NEW_TOKENS)
    token_ids = tuple(tuple(line[:length].tolist())
                      for line, length in zip(written.token_ids, written.lengths))
    paths = np.zeros((len(rows), HORIZON_LENGTH, 2))
    if act:
        noise = torch.from_numpy(fixed_noise(noise_scale)).repeat(len(rows), 1, 1)
        actions = target.act(cache, written.offset, prefilled.rope_delta, noise)
        paths = np.stack([path_of(action, float(shard.v0_mps[row]))
                          for action, row in zip(actions.double().numpy(), rows)])
    return Predictions(tuple(map(tokenizer.decode, token_ids)), token_ids, paths)


def predict_all(target: Target, tokenizer: TextTokenizer, layout: PromptLayout, shard: Shard,
                batch: int = 32, blind: bool = False, act: bool = True) -> Predictions:
    """`predict` over a whole shard."""
    parts = [predict(target, tokenizer, layout, shard, range(i, min(i + batch, len(shard))),
                     blind, act) for i in range(0, len(shard), batch)]
    return Predictions(tuple(text for part in parts for text in part.texts),
                       tuple(ids for part in parts for ids in part.token_ids),
                       np.concatenate([part.paths for part in parts]))


class ReleasePredictor:
    """A released target, one batch at a time; see evaluate_target.Predictor."""

    name = "torch-cpu-float32"

    def __init__(self, checkpoint: Path, noise_scale: float, threads: int):
        torch.set_num_threads(threads)
        self._noise_scale = noise_scale
        self._target, self._tokenizer = load_release(checkpoint)
        vision = self._target.config.vision
        self.image_size = (vision.image_height, vision.image_width)
        self._layout = PromptLayout(self._tokenizer, self._target.config)

    def predict(self, shard: Shard, rows: Sequence[int], blind: bool
                ) -> tuple[Sequence[str], np.ndarray]:
        """Texts of the rows, and (N, 64, 2) float64 paths; `blind` blacks all images out."""
        found = predict(self._target, self._tokenizer, self._layout, shard, rows, blind,
                        noise_scale=self._noise_scale)
        return found.texts, found.paths
