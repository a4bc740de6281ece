"""The prompt of one planning cycle, token by token: images, ego history, route, instruction.

Knows the wording and order Alpamayo 1 and 1.5 were trained with, and where each part lies in the
sequence. Does not know what the images show, nor how positions are made of the grids.
Source: alpamayo.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from .text_tokenizer import TextTokenizer
from .trajectory_tokenizer import NUM_HISTORY_TOKENS

ALPAMAYO_R1 = "alpamayo-r1"
ALPAMAYO_15 = "alpamayo-1.5"
VERSIONS = (ALPAMAYO_R1, ALPAMAYO_15)
FRAMES_PER_CAMERA = 4
SPATIAL_MERGE_SIZE = 2          # patches along a side of one visual token
DEFAULT_CAMERA_IDS = (0, 1, 2, 6)
CAMERA_NAMES = ("Front left camera", "Front camera", "Front right camera", "Rear left camera",
                "Rear camera", "Rear right camera", "Front telephoto camera")
SYSTEM_TEXT = "You are a driving assistant that generates safe and accurate actions."
INSTRUCTION_TEXT = ("output the chain-of-thought reasoning of the driving process, "
                    "then output the future trajectory.")
# Every fixed text, as it is cut between control tokens: what a vocabulary must serve.
FIXED_TEXTS = (f"system\n{SYSTEM_TEXT}", "user\n", INSTRUCTION_TEXT, "\n", "assistant\n",
               *(f"{name}: frame 0 " for name in CAMERA_NAMES),
               *(f"frame {k} " for k in range(FRAMES_PER_CAMERA)))


@dataclass(frozen=True)
class Prompt:
    """A prompt and the places of its parts. Spans are (start, stop) positions, stop excluded.

    Attributes:
        input_ids: (T,) int64, ending in <|cot_start|>.
        image_grids: (N, 3) int64, patches of each image: (time, rows, columns).
        image_spans: (N, 2) int64, the visual tokens of each image, delimiters not included.
        history_span: the 48 history bins, delimiters not included.
        route_span: the navigation instruction with its delimiters; None without one.
        instruction_span: the sentence that says what to output.
    """

    input_ids: np.ndarray
    image_grids: np.ndarray
    image_spans: np.ndarray
    history_span: tuple[int, int]
    route_span: tuple[int, int] | None
    instruction_span: tuple[int, int]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def visual_index(self) -> np.ndarray:
        """(V,) int64, positions of all visual tokens, in the order of the images."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.image_spans])


class _Sequence:
    """Token ids as they are strung together. Text is held back until a control token ends it,
    since neighbouring words may merge."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._text = ""
        self.parts: list[np.ndarray] = []
        self.length = 0

    def text(self, text: str) -> None:
        self._text += text

    def ids(self, ids: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """Append ids as they are; returns where they lie."""
        self.flush()
        return self._append(ids)

    def flush(self) -> tuple[int, int]:
        """Append the text held back; returns where it lies."""
        text, self._text = self._text, ""
        return self._append(self._tokenizer.encode(text) if text else ())

    def _append(self, ids: Sequence[int] | np.ndarray) -> tuple[int, int]:
        part = np.asarray(ids, dtype=np.int64)
        self.parts.append(part)
        self.length += len(part)
        return self.length - len(part), self.length


def build_prompt(tokenizer: TextTokenizer, history_token_ids: np.ndarray, image_grids: np.ndarray,
                 version: str = ALPAMAYO_15, camera_ids: Sequence[int] = DEFAULT_CAMERA_IDS,
                 route_text: str = "") -> Prompt:
    """String the prompt together.

    Args:
        tokenizer: the target's vocabulary.
        history_token_ids: (48,) int64, as DeltaTrajectoryTokenizer gives them.
        image_grids: (4 * cameras, 3), patches (time = 1, rows, columns) of each image;
            camera-major, oldest frame first.
        version: "alpamayo-r1" (images without labels, no route) or "alpamayo-1.5".
        camera_ids: which camera each group of 4 images is, ascending: an index of CAMERA_NAMES.
        route_text: e.g. "Turn right in 30m"; empty for none.
    Raises:
        ValueError: an argument is not as described.
    """
    _check_wording(version, camera_ids, route_text)
    grids = _checked_grids(image_grids, camera_ids)
    history = _checked_history(tokenizer, history_token_ids)
    special, qwen = tokenizer.special, tokenizer.qwen
    sequence = _Sequence(tokenizer)
    sequence.ids([qwen.im_start])
    sequence.text(f"system\n{SYSTEM_TEXT}")
    sequence.ids([qwen.im_end])
    sequence.text("\n")
    sequence.ids([qwen.im_start])
    sequence.text("user\n")
    image_spans = _append_images(sequence, tokenizer, grids, version, camera_ids)
    sequence.ids([special.traj_history_start])
    history_span = sequence.ids(history)
    sequence.ids([special.traj_history_end])
    route_span = _append_route(sequence, tokenizer, route_text)
    sequence.text(INSTRUCTION_TEXT)
    instruction_span = sequence.flush()
    sequence.ids([qwen.im_end])
    sequence.text("\n")
    sequence.ids([qwen.im_start])
    sequence.text("assistant\n")
    sequence.ids([special.cot_start])
    return Prompt(np.concatenate(sequence.parts), grids, image_spans, history_span, route_span,
                  instruction_span)


def _append_images(sequence: _Sequence, tokenizer: TextTokenizer, grids: np.ndarray, version: str,
                   camera_ids: Sequence[int]) -> np.ndarray:
    qwen = tokenizer.qwen
    spans = []
    counts = grids.prod(axis=1) // SPATIAL_MERGE_SIZE ** 2
    for image, count in enumerate(counts):
        camera, frame = divmod(image, FRAMES_PER_CAMERA)
        if version == ALPAMAYO_15:
            label = f"{CAMERA_NAMES[camera_ids[camera]]}: " if frame == 0 else ""
            sequence.text(f"{label}frame {frame} ")
        sequence.ids([qwen.vision_start])
        spans.append(sequence.ids(np.full(count, qwen.image_pad)))
        sequence.ids([qwen.vision_end])
    return np.array(spans, dtype=np.int64)


def _append_route(sequence: _Sequence, tokenizer: TextTokenizer,
                  route_text: str) -> tuple[int, int] | None:
    if not route_text:
        return None
    start, _ = sequence.ids([tokenizer.special.route_start])
    sequence.text(route_text)
    _, stop = sequence.ids([tokenizer.special.route_end])
    return start, stop


def _checked_grids(image_grids: np.ndarray, camera_ids: Sequence[int]) -> np.ndarray:
    grids = np.array(image_grids, dtype=np.int64)
    expected = (FRAMES_PER_CAMERA * len(camera_ids), 3)
    if grids.shape != expected:
        raise ValueError(f"image_grids: given shape {grids.shape}, expected {expected}")
    sides = grids[:, 1:]
    if (grids[:, 0] != 1).any() or (sides <= 0).any() or (sides % SPATIAL_MERGE_SIZE).any():
        raise ValueError(f"image_grids: given {grids.tolist()}, expected (1, rows, columns) with "
                         f"positive multiples of {SPATIAL_MERGE_SIZE}")
    return grids


def _checked_history(tokenizer: TextTokenizer, history_token_ids: np.ndarray) -> np.ndarray:
    history = np.asarray(history_token_ids, dtype=np.int64)
    if history.shape != (NUM_HISTORY_TOKENS,):
        raise ValueError(f"history_token_ids: given shape {history.shape}, "
                         f"expected ({NUM_HISTORY_TOKENS},)")
    bins = tokenizer.special.history_bins
    if history.min() < bins.start or history.max() >= bins.stop:
        raise ValueError(f"history_token_ids: given {history.min()} .. {history.max()}, "
                         f"expected {bins.start} .. {bins.stop - 1}")
    return history


def _check_wording(version: str, camera_ids: Sequence[int], route_text: str) -> None:
    if version not in VERSIONS:
        raise ValueError(f"version: given {version!r}, expected one of {', '.join(VERSIONS)}")
    ascending = sorted(set(camera_ids).intersection(range(len(CAMERA_NAMES))))
    if not camera_ids or list(camera_ids) != ascending:
        raise ValueError(f"camera_ids: given {tuple(camera_ids)}, expected one or more ascending "
                         f"indexes 0 .. {len(CAMERA_NAMES) - 1}")
    if route_text and version == ALPAMAYO_R1:
        raise ValueError(f"route_text: given {route_text!r}, expected none: {ALPAMAYO_R1} was "
                         f"trained without a route")
