"""What a frozen target writes for samples of the world, with the hidden states a draft reads.

Made once, kept in shards on disk, and cut into blocks for training. It knows no draft and no
loss.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import torch

from ..errors import DataError
from ..models.target import Target
from ..models.vision import image_patches
from .dataset import PromptLayout, Shard, ShardStore
from .validation import MAX_NEW_TOKENS

SHARD_ROWS = 100
BATCH_ROWS = 10         # prompts the target reads at a time


@dataclass(frozen=True)
class Rollouts:
    """N greedy texts behind prompts of one layout of L tokens; T = MAX_NEW_TOKENS.

    Attributes:
        prompt_states: (N, L, K * hidden) float16, of the feature layers side by side.
        text_states: (N, T, K * hidden) float16, likewise, of the text's tokens.
        text_last: (N, T, hidden) float16, after the final norm: lm_head of row t gives the
            distribution of token t + 1.
        token_ids: (N, T) int64, endoftext behind the stop token.
        lengths: (N,) int64, stop token included.
    """

    prompt_states: np.ndarray
    text_states: np.ndarray
    text_last: np.ndarray
    token_ids: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)


_NAMES = ("prompt_states", "text_states", "text_last", "token_ids", "lengths")


@torch.no_grad()
def make_rollouts(target: Target, layout: PromptLayout, shard: Shard, rows: Sequence[int],
                  layers: Sequence[int]) -> Rollouts:
    """Let the target write, then read its own text once more for the hidden states.

    Args:
        layers: feature layers of the draft.
    Raises:
        DataError: a hidden state does not fit float16.
    """
    parts = [_rollouts_of_batch(target, layout, shard, rows[i:i + BATCH_ROWS], layers)
             for i in range(0, len(rows), BATCH_ROWS)]
    joined = Rollouts(*(np.concatenate([getattr(part, name) for part in parts])
                        for name in _NAMES))
    for name in ("prompt_states", "text_states", "text_last"):
        if not np.isfinite(getattr(joined, name)).all():
            raise DataError(f"rollouts: {name} given beyond float16, expected below 65504")
    return joined


def _rollouts_of_batch(target: Target, layout: PromptLayout, shard: Shard, rows: Sequence[int],
                       layers: Sequence[int]) -> Rollouts:
    ids = torch.from_numpy(np.stack([layout.prompt(shard.history[row]) for row in rows]))
    images = np.stack([shard.images[row][place] for row in rows for place in layout.places])
    config = target.config.vision
    vision = target.encode_images(image_patches(torch.from_numpy(images), config), config.grid)
    cache = target.new_cache(layout.length + MAX_NEW_TOKENS, len(rows))
    prefilled = target.prefill(ids, cache, vision, select_layers=layers)
    written = target.generate(prefilled, cache, MAX_NEW_TOKENS)
    missing = MAX_NEW_TOKENS - written.token_ids.shape[1]
    token_ids = torch.nn.functional.pad(written.token_ids, (0, missing),
                                        value=target.config.tokens.endoftext_id)
    cache.crop(layout.length)
    assert prefilled.rope_delta is not None
    step = target.extend(token_ids, cache, prefilled.rope_delta, select_layers=layers)
    return Rollouts(_half(torch.cat(prefilled.selected, -1)), _half(torch.cat(step.selected, -1)),
                    _half(step.last_hidden), token_ids.numpy(), written.lengths.numpy())


def _half(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float16).numpy()


def save_rollouts(rollouts: Rollouts, folder: Path) -> None:
    """Write a shard; the folder appears whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        np.save(partial / f"{name}.npy", getattr(rollouts, name))
    partial.rename(folder)


def load_rollouts(folder: Path) -> Rollouts:
    """Open a shard; its arrays stay on disk.

    Raises:
        DataError: unreadable.
    """
    try:
        return Rollouts(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: expected a shard of rollouts ({error})") from error


def write_rollouts(root: Path, target: Target, layout: PromptLayout, samples: ShardStore,
                   layers: Sequence[int], origin: str,
                   done: Callable[[], bool] = lambda: True) -> bool:
    """Make the shards that are not there yet.

    Args:
        root: their folder.
        origin: what identifies the target's weights.
        done: called after each shard; False stops.
    Returns:
        Whether all are there.
    Raises:
        DataError: the folder holds rollouts of another target or other layers.
    """
    root.mkdir(parents=True, exist_ok=True)
    about = {"target_sha256": origin, "layers": list(layers), "length": layout.length}
    path = root / "rollouts.json"
    if not path.exists():
        path.write_text(json.dumps(about), encoding="utf-8")
    found = json.loads(path.read_text(encoding="utf-8"))
    if found != about:
        raise DataError(f"{root}: holds rollouts of {found}, expected {about}")
    for start in range(0, len(samples), SHARD_ROWS):
        folder = root / f"rollouts_{start:07d}"
        if folder.exists():
            continue
        places = [samples.place(i) for i in range(start, min(start + SHARD_ROWS, len(samples)))]
        shards: dict[int, tuple[Shard, list[int]]] = {}
        for shard, row in places:
            shards.setdefault(id(shard), (shard, []))[1].append(row)
        parts = [make_rollouts(target, layout, shard, rows, layers)
                 for shard, rows in shards.values()]
        save_rollouts(Rollouts(*(np.concatenate([getattr(part, name) for part in parts])
                                 for name in _NAMES)), folder)
        if not done():
            return start + SHARD_ROWS >= len(samples)
    return True


def num_shards(samples: ShardStore) -> int:
    """How many shards `write_rollouts` makes."""
    return math.ceil(len(samples) / SHARD_ROWS)


@dataclass(frozen=True)
class Blocks:
    """A blocks for each of B rollouts, M drafted places each.

    Attributes:
        states: (B, L + T, K * hidden) float32, of prompt and text.
        anchors: (B, A) int64, index in the sequence of the last committed token.
        last_ids: (B, A) int64, that token.
        labels: (B, A, M) int64, the tokens behind it.
        valid: (B, A, M) bool, False behind the stop token.
        before: (B, A, M, hidden) float32, what lm_head reads to write each label.
    """

    states: torch.Tensor
    anchors: np.ndarray
    last_ids: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    before: torch.Tensor


class RolloutStore:
    """All shards as one sequence of rollouts."""

    def __init__(self, shards: Sequence[Rollouts]):
        if not shards:
            raise DataError("no shard of rollouts, expected at least one")
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *map(len, shards)])

    @classmethod
    def open(cls, root: Path) -> RolloutStore:
        """Open the shards of a folder.

        Raises:
            DataError: there are none.
        """
        folders = sorted(p for p in root.glob("rollouts_*") if p.suffix != ".partial")
        return cls([load_rollouts(folder) for folder in folders])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[Rollouts, int]:
        """The shard of a rollout, and its row there."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])

    def lengths(self, indexes: Sequence[int]) -> np.ndarray:
        """(B,) int64."""
        places = [self.place(int(index)) for index in indexes]
        return np.array([int(shard.lengths[row]) for shard, row in places])

    def blocks(self, indexes: Sequence[int], starts: np.ndarray, places: int) -> Blocks:
        """Cut rollouts into blocks.

        Args:
            starts: (B, A) int64, number in the text of each block's last committed token.
            places: M.
        """
        chosen = [self.place(int(index)) for index in indexes]
        states = np.stack([np.concatenate((shard.prompt_states[row], shard.text_states[row]))
                           for shard, row in chosen]).astype(np.float32)
        ids, last = (np.stack([getattr(shard, name)[row] for shard, row in chosen])
                     for name in ("token_ids", "text_last"))
        wanted = starts[..., None] + 1 + np.arange(places)              # (B, A, M)
        valid = wanted < self.lengths(indexes)[:, None, None]
        wanted = np.minimum(wanted, ids.shape[1] - 1)
        row = np.arange(len(chosen))[:, None]
        length = states.shape[1] - ids.shape[1]
        return Blocks(torch.from_numpy(states), starts + length,
                      torch.from_numpy(ids[row, starts]),
                      torch.from_numpy(ids[row[..., None], wanted]), torch.from_numpy(valid),
                      torch.from_numpy(last[row[..., None], wanted - 1].astype(np.float32)))
