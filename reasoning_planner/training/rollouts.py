"""What a frozen target writes for samples of the world, with the hidden states a draft reads.

Made once, kept in shards on disk, and cut into blocks for training. It knows no draft and no
loss.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import torch

from ..errors import DataError
from ..models.target import Target
from ..models.vision import VisionFeatures, image_patches
from .dataset import PromptLayout, Shard, ShardStore, augment_images
from .validation import MAX_NEW_TOKENS

PLAN_NAME = "rollouts.json"
SHARD_ROWS = 100
BATCH_ROWS = 20         # prompts the target reads at a time
AUGMENT_STREAM = 4       # of random numbers
VISION_IMAGES = 32      # images the tower reads at a time: more leave the processor's caches


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
                  layers: Sequence[int], augment: float = 0.0) -> Rollouts:
    """Let the target write, then read its own text once more for the hidden states.

    Args:
        layers: feature layers of the draft.
        augment: share of the samples whose images are altered as the target's own training
            alters them: cameras lost, colours changed. Which and how depends on the seed alone.
    Raises:
        DataError: a hidden state does not fit float16.
    """
    parts = [_rollouts_of_batch(target, layout, shard, rows[i:i + BATCH_ROWS], layers, augment)
             for i in range(0, len(rows), BATCH_ROWS)]
    joined = Rollouts(*(np.concatenate([getattr(part, name) for part in parts])
                        for name in _NAMES))
    for name in ("prompt_states", "text_states", "text_last"):
        if not np.isfinite(getattr(joined, name)).all():
            raise DataError(f"rollouts: {name} given beyond float16, expected below 65504")
    return joined


def _rollouts_of_batch(target: Target, layout: PromptLayout, shard: Shard, rows: Sequence[int],
                       layers: Sequence[int], augment: float) -> Rollouts:
    ids = torch.from_numpy(np.stack([layout.prompt(shard.history[row]) for row in rows]))
    images = np.concatenate([_images(layout, shard, row, augment) for row in rows])
    cache = target.new_cache(layout.length + MAX_NEW_TOKENS, len(rows))
    prefilled = target.prefill(ids, cache, _features(target, torch.from_numpy(images)),
                               select_layers=layers)
    written = target.generate(prefilled, cache, MAX_NEW_TOKENS)
    cache.crop(layout.length)
    assert prefilled.rope_delta is not None
    step = target.extend(written.token_ids, cache, prefilled.rope_delta, select_layers=layers)
    missing = MAX_NEW_TOKENS - written.token_ids.shape[1]
    text = [torch.nn.functional.pad(states, (0, 0, 0, missing))
            for states in (torch.cat(step.selected, -1), step.last_hidden)]
    token_ids = torch.nn.functional.pad(written.token_ids, (0, missing),
                                        value=target.config.tokens.endoftext_id)
    return Rollouts(_half(torch.cat(prefilled.selected, -1)), *map(_half, text),
                    token_ids.numpy(), written.lengths.numpy())


def _images(layout: PromptLayout, shard: Shard, row: int, augment: float) -> np.ndarray:
    """(places, H, W, 3) uint8."""
    rng = np.random.default_rng((int(shard.seeds[row]), AUGMENT_STREAM))
    if rng.random() < augment:
        return augment_images(shard.images[row], rng, layout.places)
    return np.stack([shard.images[row][place] for place in layout.places])


def _features(target: Target, images: torch.Tensor) -> VisionFeatures:
    config = target.config.vision
    parts = [target.encode_images(image_patches(some, config), config.grid)
             for some in images.split(VISION_IMAGES)]
    return VisionFeatures(torch.cat([part.tokens for part in parts]),
                          tuple(map(torch.cat, zip(*(part.deepstack for part in parts)))))


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


@dataclass(frozen=True)
class RolloutsPlan:
    """What a folder of rollouts holds.

    Attributes:
        target_sha256: of the target's weights.
        layers: whose outputs are kept.
        length: of the prompts.
        augment: see make_rollouts.
    """

    target_sha256: str
    layers: tuple[int, ...]
    length: int
    augment: float = 0.0

    @classmethod
    def load(cls, root: Path) -> RolloutsPlan:
        """Of a folder.

        Raises:
            DataError: it has none, or a damaged one.
        """
        path = root / PLAN_NAME
        try:
            plan = cls(**json.loads(path.read_text(encoding="utf-8")))
            return replace(plan, layers=tuple(plan.layers))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path}: {error}, expected what train-draft writes beside its "
                            f"rollouts") from error

    def serves(self, wanted: RolloutsPlan) -> bool:
        """Whether the folder will do: it may hold more layers than are wanted."""
        return (set(wanted.layers) <= set(self.layers)
                and replace(self, layers=wanted.layers) == wanted)


def plan_rollouts(root: Path, wanted: RolloutsPlan) -> RolloutsPlan:
    """What a folder holds, or from now on will.

    Raises:
        DataError: it holds rollouts of another target, or lacks a layer.
    """
    if not (root / PLAN_NAME).exists():
        root.mkdir(parents=True, exist_ok=True)
        partial = root / f"{PLAN_NAME}.partial"
        partial.write_text(json.dumps(asdict(wanted)), encoding="utf-8")
        partial.rename(root / PLAN_NAME)
    found = RolloutsPlan.load(root)
    if not found.serves(wanted):
        raise DataError(f"{root}: holds rollouts of {found}, expected {wanted}: name another "
                        f"folder, or delete this one")
    return found


def write_rollouts(root: Path, target: Target, layout: PromptLayout, samples: ShardStore,
                   wanted: RolloutsPlan, done: Callable[[], bool] = lambda: True) -> bool:
    """Make the shards that are not there yet.

    Args:
        root: their folder.
        done: called after each shard; False stops.
    Returns:
        Whether all are there.
    Raises:
        DataError: see plan_rollouts.
    """
    plan = plan_rollouts(root, wanted)
    for start in range(0, len(samples), SHARD_ROWS):
        folder = root / f"rollouts_{start:07d}"
        if folder.exists():
            continue
        places = [samples.place(i) for i in range(start, min(start + SHARD_ROWS, len(samples)))]
        shards: dict[int, tuple[Shard, list[int]]] = {}
        for shard, row in places:
            shards.setdefault(id(shard), (shard, []))[1].append(row)
        parts = [make_rollouts(target, layout, shard, rows, plan.layers, plan.augment)
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

    def __init__(self, shards: Sequence[Rollouts], columns: np.ndarray | None = None):
        """
        Args:
            columns: (n,) int64, of the hidden states that are read; None: all.
        """
        if not shards:
            raise DataError("no shard of rollouts, expected at least one")
        self._shards = tuple(shards)
        self._columns = columns
        self._starts = np.cumsum([0, *map(len, shards)])

    @classmethod
    def open(cls, root: Path, layers: Sequence[int] | None = None, limit: int | None = None
             ) -> RolloutStore:
        """Open the shards of a folder.

        Args:
            layers: whose outputs are read, all of them in the folder; None: every layer there.
            limit: of rollouts, rounded up to whole shards; None: all.
        Raises:
            DataError: there are none.
        """
        folders = sorted(p for p in root.glob("rollouts_*") if p.suffix != ".partial")
        shards = [load_rollouts(folder) for folder in folders]
        if limit is not None:
            shards = shards[:math.ceil(limit / SHARD_ROWS)]
        if layers is None:
            return cls(shards)
        kept = RolloutsPlan.load(root).layers
        columns = np.arange(shards[0].prompt_states.shape[-1]).reshape(len(kept), -1)
        columns = columns[[kept.index(layer) for layer in layers]].ravel()
        return cls(shards, None if len(layers) == len(kept) else columns)

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
                           for shard, row in chosen])
        if self._columns is not None:
            states = states[..., self._columns]
        states = states.astype(np.float32)
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
