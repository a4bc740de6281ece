"""World samples as training data: shards of uint8 images on disk, and batches of one token layout.

Renders what is missing, by seed; draws wordings, drops cameras and cuts the prompt. It knows the
tokens of a prompt, but no model and no loss.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Sequence

import numpy as np

from ..actions.unicycle import normalise_controls
from ..errors import DataError
from ..models.config import ModelConfig, TokenConfig
from ..tokenization.prompt import ALPAMAYO_R1, FIXED_TEXTS, build_prompt
from ..tokenization.text_tokenizer import TextTokenizer, train_text_tokenizer
from ..tokenization.trajectory_tokenizer import DeltaTrajectoryTokenizer
from ..world.language import MANOEUVRES, all_sentences
from ..world.samples import LABEL_NAMES, WorldSample, make_sample
from ..world.scene import KINDS

FIRST_HELD_OUT_SEED = 10_000_000        # training seeds lie below, held-out seeds from here on
SHARD_SIZE = 500
CAMERAS, FRAMES, ANCHOR = 4, 4, 1
ROUTE_PHRASES = tuple(f"Turn {side} in {metres}m" for side in ("left", "right")
                      for metres in (*range(10, 100, 10), *range(100, 501, 50))) + (
    "Continue straight", "Keep left", "Keep right", "Make a U-turn", "Take the exit on the right")
# The images a short prompt keeps: front and tele, at t0 - 0.3 s and t0.
SHORT_PROMPT = ((1, 0), (1, 3), (3, 0), (3, 3))
FULL_PROMPT = tuple((camera, frame) for camera in range(CAMERAS) for frame in range(FRAMES))


@functools.lru_cache(maxsize=1)
def world_version() -> str:
    """Hash of one small sample of each kind: what changes a pixel or a word changes it."""
    digest = hashlib.sha256()
    for seed, kind in enumerate(KINDS):
        sample = make_sample(seed, kind, (32, 64))
        digest.update(sample.images.tobytes() + sample.controls.astype(np.float32).tobytes())
        digest.update("|".join(sample.valid_cocs).encode())
    return digest.hexdigest()[:16]


def check_seeds(seeds: Sequence[int], held_out: bool) -> None:
    """Refuse training seeds among the held-out ones and the reverse.

    Raises:
        DataError: a seed on the wrong side of FIRST_HELD_OUT_SEED.
    """
    wrong = [seed for seed in seeds if (seed >= FIRST_HELD_OUT_SEED) != held_out or seed < 0]
    if wrong:
        side = f"{FIRST_HELD_OUT_SEED} or more" if held_out else f"0 .. {FIRST_HELD_OUT_SEED - 1}"
        raise DataError(f"seed: given {wrong[0]}, expected {side}")


@dataclass(frozen=True)
class Shard:
    """SHARD_SIZE samples, or fewer.

    Attributes:
        images: (N, 4, 4, H, W, 3) uint8, perhaps on disk: slot, then frame.
        history: (N, 16, 3) float32, metres.
        controls: (N, 64, 2) float32, normalised.
        v0_mps: (N,) float32.
        labels: (N, len(LABEL_NAMES)) float32.
        seeds: (N,) int64.
        kinds: (N,) int64, index into KINDS.
        manoeuvres: (N,) int64, index into MANOEUVRES.
        cocs: the valid wordings of each sample, the preferred one first.
    """

    images: np.ndarray
    history: np.ndarray
    controls: np.ndarray
    v0_mps: np.ndarray
    labels: np.ndarray
    seeds: np.ndarray
    kinds: np.ndarray
    manoeuvres: np.ndarray
    cocs: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.seeds)


_NUMBERS = ("history", "controls", "v0_mps", "labels", "seeds", "kinds", "manoeuvres")


def make_shard(seeds: Iterable[int], size: tuple[int, int]) -> Shard:
    """Render the samples of these seeds."""
    return shard_of([make_sample(seed, None, size) for seed in seeds])


def shard_of(samples: Sequence[WorldSample]) -> Shard:
    """Put samples together."""
    controls = [normalise_controls(s.controls[:, 0], s.controls[:, 1]) for s in samples]
    return Shard(
        np.stack([s.images for s in samples]),
        np.stack([s.history_positions for s in samples]).astype(np.float32),
        np.stack(controls).astype(np.float32),
        np.array([s.v0_mps for s in samples], np.float32),
        np.stack([s.labels for s in samples]),
        np.array([s.seed for s in samples], np.int64),
        np.array([KINDS.index(s.kind) for s in samples], np.int64),
        np.array([MANOEUVRES.index(s.manoeuvre) for s in samples], np.int64),
        tuple(s.valid_cocs for s in samples))


def save_shard(shard: Shard, folder: Path) -> None:
    """Write a shard; the folder appears whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    np.save(partial / "images.npy", shard.images)
    np.savez(partial / "numbers.npz", **{name: getattr(shard, name) for name in _NUMBERS})
    (partial / "cocs.json").write_text(json.dumps(shard.cocs), encoding="utf-8")
    partial.rename(folder)


def load_shard(folder: Path) -> Shard:
    """Open a shard; its images stay on disk.

    Raises:
        DataError: unreadable.
    """
    try:
        images = np.load(folder / "images.npy", mmap_mode="r")
        with np.load(folder / "numbers.npz") as stored:
            numbers = {name: stored[name] for name in _NUMBERS}
        cocs = json.loads((folder / "cocs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: expected a shard of world samples ({error})") from error
    return Shard(images=images, cocs=tuple(map(tuple, cocs)), **numbers)


def _shard_folder(root: Path, index: int) -> Path:
    return root / f"shard_{index:04d}"


def _render(task: tuple[Path, int, tuple[int, int]]) -> int:
    root, index, size = task
    folder = _shard_folder(root, index)
    if not folder.exists():
        seeds = range(index * SHARD_SIZE, (index + 1) * SHARD_SIZE)
        check_seeds((seeds[0], seeds[-1]), held_out=False)
        save_shard(make_shard(seeds, size), folder)
    return index


def render_shards(root: Path, count: int, size: tuple[int, int], processes: int = 1,
                  done: Callable[[int], None] = lambda index: None) -> None:
    """Render shards 0 .. count - 1 that are not there yet.

    Args:
        root: folder of the shards.
        size: (H, W) of the images.
        processes: how many render at a time.
        done: called with each index, for a progress bar.
    Raises:
        DataError: the folder holds samples of another world or size.
    """
    root.mkdir(parents=True, exist_ok=True)
    _check_version(root, size)
    tasks = [(root, index, size) for index in range(count)]
    if processes <= 1:
        for task in tasks:
            done(_render(task))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for index in pool.imap_unordered(_render, tasks):
            done(index)


def _check_version(root: Path, size: tuple[int, int]) -> None:
    path, expected = root / "data.json", {"world": world_version(), "size": list(size)}
    if not path.exists():
        path.write_text(json.dumps(expected), encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["size"] != expected["size"]:
        raise DataError(f"{root}: holds images of {found['size']}, expected {expected['size']}")


def data_version(root: Path) -> str:
    """The world version that the shards of a folder were first rendered with."""
    return json.loads((root / "data.json").read_text(encoding="utf-8"))["world"]


class ShardStore:
    """All finished shards of a folder as one sequence of samples."""

    def __init__(self, shards: Sequence[Shard]):
        if not shards:
            raise DataError("no shard of world samples, expected at least one")
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *map(len, shards)])

    @classmethod
    def open(cls, root: Path, limit: int | None = None) -> ShardStore:
        """Open the first `limit` shards of a folder, or all of them.

        Raises:
            DataError: there are none.
        """
        folders = sorted(p for p in Path(root).glob("shard_*") if p.suffix != ".partial")
        if not folders:
            raise DataError(f"{root}: no shards, expected folders shard_0000, ...")
        return cls([load_shard(folder) for folder in folders[:limit]])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and its row there."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])


def train_tokenizer(base_size: int = 1000) -> TextTokenizer:
    """The stand-in's vocabulary: prompt texts, route phrases and every sentence of the world."""
    sentences = [*FIXED_TEXTS * 50, *ROUTE_PHRASES, *all_sentences()]
    return train_text_tokenizer(sentences, base_size)


def token_config(tokenizer: TextTokenizer) -> TokenConfig:
    """The ids of a tokenizer as a model's configuration states them."""
    qwen = tokenizer.qwen
    controls = {name: getattr(qwen, name) for name in (
        "endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad",
        "video_pad")}
    return TokenConfig.extending(tokenizer.special.base_size, controls)


def choose_wording(cocs: Sequence[str], rng: np.random.Generator, preferred: float = 0.75,
                   period: float = 0.75) -> str:
    """One of the valid wordings, each given with and without its period in turn."""
    wordings = len(cocs) // 2
    index = 0 if wordings == 1 or rng.random() < preferred else 1 + rng.integers(wordings - 1)
    return cocs[2 * index + (rng.random() >= period)]


def drop_cameras(rng: np.random.Generator, probability: float = 0.15) -> np.ndarray:
    """(4,) bool, which slots see anything; the anchor always does.

    With `probability` each other camera is lost by even odds; in a fifth of those cases all are.
    """
    present = np.ones(CAMERAS, bool)
    if rng.random() < probability:
        present[:] = rng.random(CAMERAS) < 0.5
        if rng.random() < 0.2:
            present[:] = False
        present[ANCHOR] = True
    return present


def to_grey(images: np.ndarray) -> np.ndarray:
    """RGB to three equal channels, ITU-R BT.601 luma; (..., 3) uint8 both."""
    luma = images @ np.array([0.299, 0.587, 0.114], np.float32)
    return np.repeat(np.rint(luma).astype(np.uint8)[..., None], 3, axis=-1)


def augment_images(images: np.ndarray, rng: np.random.Generator,
                   places: Sequence[tuple[int, int]] = FULL_PROMPT) -> np.ndarray:
    """The images at (slot, frame) `places`, cameras dropped and colours changed at random.

    Args:
        images: (4, 4, H, W, 3) uint8.
    Returns:
        (len(places), H, W, 3) uint8.
    """
    present = drop_cameras(rng)
    grey = rng.random() < 0.05
    gain = rng.uniform(0.88, 1.12)
    chosen = np.stack([images[slot, frame] for slot, frame in places])
    chosen = np.clip(chosen * np.float32(gain), 0, 255).astype(np.uint8)
    if grey:
        chosen = to_grey(chosen)
    chosen[[not present[slot] for slot, _ in places]] = 0
    return chosen


class PromptLayout:
    """The stand-in's fixed prompt, whole or with some images cut out, as a template.

    Attributes:
        places: (slot, frame) of its images, in order.
        length: tokens up to and with <|cot_start|>.
    """

    def __init__(self, tokenizer: TextTokenizer, config: ModelConfig,
                 places: Sequence[tuple[int, int]] = FULL_PROMPT):
        self.places = tuple(places)
        self._tokenizer = tokenizer
        self._history = DeltaTrajectoryTokenizer(tokenizer.special)
        grids = np.tile((1, *config.vision.grid), (CAMERAS * FRAMES, 1))
        blank = self._history.encode(np.zeros((16, 3)))
        prompt = build_prompt(tokenizer, blank, grids, ALPAMAYO_R1)
        keep = np.ones(len(prompt), bool)
        for place, (start, stop) in zip(FULL_PROMPT, prompt.image_spans):
            keep[start - 1:stop + 1] = place in self.places     # its two delimiters too
        start = int(keep[:prompt.history_span[0]].sum())
        self._template = prompt.input_ids[keep]
        self._span = slice(start, start + prompt.history_span[1] - prompt.history_span[0])
        self.length = len(self._template)

    def prompt(self, history_positions: np.ndarray) -> np.ndarray:
        """(length,) int64 for an ego history of (16, 3) metres."""
        ids = self._template.copy()
        ids[self._span] = self._history.encode(history_positions)
        return ids

    def answer(self, text: str) -> list[int]:
        """What the model is to write: the text, <|cot_end|>, <|traj_future_start|>."""
        special = self._tokenizer.special
        return [*self._tokenizer.encode(text), special.cot_end, special.traj_future_start]


@dataclass(frozen=True)
class Batch:
    """B samples of one prompt layout.

    Attributes:
        input_ids: (B, L) int64, right-padded with endoftext.
        label_mask: (B, L) bool, the answer's tokens.
        images: (B * places, H, W, 3) uint8, row by row.
        offset: (B,) int64, tokens up to and with <|traj_future_start|>.
        controls: (B, 64, 2) float32, normalised.
        v0_mps: (B,) float32.
        labels: (B, len(LABEL_NAMES)) float32.
        indexes: (B,) int64, of the samples in the store.
    """

    input_ids: np.ndarray
    label_mask: np.ndarray
    images: np.ndarray
    offset: np.ndarray
    controls: np.ndarray
    v0_mps: np.ndarray
    labels: np.ndarray
    indexes: np.ndarray


def make_batch(store: ShardStore, layout: PromptLayout, indexes: Sequence[int],
               rng: np.random.Generator | None) -> Batch:
    """Put samples together.

    Args:
        rng: draws wordings, cameras and colours; None takes the preferred wording and the
            images as they are.
    """
    ids, answers, images, controls, speeds, labels = [], [], [], [], [], []
    for index in indexes:
        shard, row = store.place(int(index))
        ids.append(layout.prompt(shard.history[row]))
        text = shard.cocs[row][0] if rng is None else choose_wording(shard.cocs[row], rng)
        answers.append(layout.answer(text))
        pictures = shard.images[row]
        images.append(np.stack([pictures[place] for place in layout.places]) if rng is None
                      else augment_images(pictures, rng, layout.places))
        controls.append(shard.controls[row])
        speeds.append(shard.v0_mps[row])
        labels.append(shard.labels[row])
    longest = max(map(len, answers))
    input_ids = np.full((len(ids), layout.length + longest),
                        layout._tokenizer.qwen.endoftext, np.int64)
    label_mask = np.zeros(input_ids.shape, bool)
    offset = np.array([layout.length + len(answer) for answer in answers], np.int64)
    for row, (prompt, answer) in enumerate(zip(ids, answers)):
        input_ids[row, :layout.length] = prompt
        input_ids[row, layout.length:offset[row]] = answer
        label_mask[row, layout.length:offset[row]] = True
    return Batch(input_ids, label_mask, np.concatenate(images), offset, np.stack(controls),
                 np.array(speeds, np.float32), np.stack(labels), np.asarray(indexes, np.int64))


NUM_ONE_HOT = LABEL_NAMES.index("distance_50m")     # labels before it are 0 or 1
