"""What a benchmark reasons about: held-out scenes, each cold, and drives, one cycle every 100 ms.

Seeds lie in a range of the benchmark's own, so that no training, validation or other evaluation
has seen them. Knows prompts and visual features, no proposer and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from ..datatypes import HISTORY_LENGTH
from ..runtimes.base import Runtime
from ..tokenization.text_tokenizer import TextTokenizer
from ..training.dataset import FRAMES, PromptLayout
from ..world.drive import make_drive
from ..world.samples import ego_history, make_sample

COLD, CONTINUOUS, PEER = "cold", "continuous", "peer"       # a row's `kind`
FIRST_COLD_SEED = 10_800_000
FIRST_DRIVE_SEED = 10_850_000
FIRST_WARM_UP_SEED = 10_890_000         # scenes that are run and not counted
CYCLES_A_DRIVE = 60                     # 6 s, then another road and other events


@dataclass(frozen=True)
class BenchScene:
    """One cycle: everything before the reasoning.

    Attributes:
        name: of seed and cycle, for reports.
        scene_class: the world's kind of scene, such as "red_light".
        input_ids: (L,) int64, the prompt.
        features: (16, 1 + D, T, hidden) float32, of the prompt's images.
        images: (16, H, W, 3) uint8 RGB, for who must encode them again.
    """

    name: str
    scene_class: str
    input_ids: np.ndarray
    features: np.ndarray
    images: np.ndarray


class SceneSource:
    """Draws scenes and encodes them with one runtime."""

    def __init__(self, runtime: Runtime, tokenizer: TextTokenizer):
        vision = runtime.config.vision
        self._runtime = runtime
        self._size = (vision.image_height, vision.image_width)
        self._layout = PromptLayout(tokenizer, runtime.config)

    def cold(self, count: int, first_seed: int = FIRST_COLD_SEED) -> Iterator[BenchScene]:
        """Scenes that have nothing to do with each other."""
        for seed in range(first_seed, first_seed + count):
            sample = make_sample(seed, None, self._size)
            images = np.stack([sample.images[place] for place in self._layout.places])
            yield BenchScene(f"scene {seed}", sample.kind,
                             self._layout.prompt(sample.history_positions),
                             self._runtime.encode_images(images), images)

    def continuous(self, count: int) -> Iterator[BenchScene]:
        """Cycles 100 ms apart; after CYCLES_A_DRIVE of them another drive begins."""
        for first in range(0, count, CYCLES_A_DRIVE):
            yield from self._drive(FIRST_DRIVE_SEED + first // CYCLES_A_DRIVE,
                                   min(CYCLES_A_DRIVE, count - first))

    def _drive(self, seed: int, count: int) -> Iterator[BenchScene]:
        """The first `count` cycles that have a whole history."""
        first = HISTORY_LENGTH - 1
        drive = make_drive(seed, max(0.1 * (first + count), 2.0))
        seen: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=FRAMES)
        for step, frame in enumerate(drive.frames(self._size)):
            if step >= first + count:
                return
            if step > first - FRAMES:
                seen.append((frame.images, self._runtime.encode_images(frame.images)))
            if step >= first:
                history, _ = ego_history(drive.drive, frame.moment.anchor)
                images, features = (self._in_prompt_order(part) for part in zip(*seen))
                yield BenchScene(f"drive {seed}, {frame.time_s:.1f} s", frame.moment.kind,
                                 self._layout.prompt(history), features, images)

    def _in_prompt_order(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        """FRAMES arrays of one entry a camera, oldest first -> one array, camera by camera."""
        return np.stack([frames[frame][camera] for camera, frame in self._layout.places])
