"""What a runtime is: one target model on one engine, its KV cache inside, numpy in and out.

Read `Runtime` as the alphabet of a planning cycle: encode, prefill, extend, crop or keep, act.
Batch is 1. It knows no prompts, no text and no drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import numpy as np

from ..errors import ModelError
from ..models.config import ModelConfig, VisionConfig


@dataclass(frozen=True)
class Step:
    """What a pass of the decoder over n tokens says; m of them were asked for their next token.

    Attributes:
        token_ids: (m,) int64, greedy next token of each; never a trajectory bin.
        top_ids: (m, k) int64, the k likeliest, best first.
        top_log_probs: (m, k) float32, natural logarithms over the whole vocabulary without bins.
        hidden_states: for each layer chosen when the runtime was made, (n, hidden) float32, the
            layer's output with DeepStack, before the final norm.
        logits: (m, vocabulary) float32, bins at -inf; None unless asked for.
    """

    token_ids: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray
    hidden_states: tuple[np.ndarray, ...]
    logits: np.ndarray | None = None


class Runtime(Protocol):
    """One model on one engine. Not for use by several threads at once.

    Attributes:
        name: of the engine, for reports: "ort", "torch", "trt".
        config: the model's.
        capacity: tokens the cache holds, the waypoints of `act` not counted.
        length: tokens in the cache now.
    """

    name: str
    config: ModelConfig

    @property
    def capacity(self) -> int: ...

    @property
    def length(self) -> int: ...

    def encode_images(self, images: np.ndarray) -> np.ndarray:
        """Visual tokens; the same numbers for an image whatever images come with it.

        Args:
            images: (N, H, W, 3) uint8 RGB, of the model's size.
        Returns:
            (N, 1 + D, T, hidden) float32: what takes the placeholders' places, then what
            DeepStack adds behind each of the first D layers.
        """

    def prefill(self, input_ids: np.ndarray, features: np.ndarray, *,
                logits: bool = False) -> Step:
        """Forget what is cached and read a prompt; m = 1, its last token.

        Args:
            input_ids: (n,) int64.
            features: (N, 1 + D, T, hidden), of the prompt's images in reading order.
            logits: whether to give the full logits out.
        Raises:
            ModelError: the prompt does not fit the cache, or not its images.
        """

    def extend(self, token_ids: np.ndarray, *, indices: np.ndarray | None = None,
               visible: np.ndarray | None = None, logits: bool = False) -> Step:
        """Decode a token, verify a block or verify a tree; m = n. All n go into the cache.

        Args:
            token_ids: (n,) int64.
            indices: (n,) int64, each token's index in the sequence: in a tree the cached length
                plus the depth. None: one after the other.
            visible: (n, n) bool, which of the new tokens each one sees besides all cached ones;
                itself among them, none behind it. None: all before it.
            logits: whether to give the full logits out.
        Raises:
            ModelError: the tokens do not fit the cache.
        """

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens: what a rejected draft wrote is behind them."""

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """After a tree: keep its tokens start + i for i in `nodes`, ascending, moved up to start.

        Args:
            start: length before the tree.
            nodes: numbers of the accepted path's nodes; nothing behind `start` else is kept.
        """

    def act(self, noise: np.ndarray, num_steps: int | None = None) -> np.ndarray:
        """Integrate the flow over everything cached, whose last token is traj_future_start.

        Args:
            noise: (waypoints, 2), standard normal.
            num_steps: Euler steps; None: as the model's configuration says.
        Returns:
            (waypoints, 2) float32, normalised actions. The cache is as before.
        """


def require_images(images: np.ndarray, vision: VisionConfig) -> None:
    """
    Raises:
        ModelError: they are not uint8 (N, H, W, C) of the model's size.
    """
    size = (vision.image_height, vision.image_width, vision.in_channels)
    if images.shape[1:] != size or images.dtype != np.uint8:
        raise ModelError(f"images: given {images.dtype} {images.shape}, expected uint8 (N, "
                         f"{', '.join(map(str, size))})")


def visual_places(input_ids: np.ndarray, num_images: int, config: ModelConfig) -> np.ndarray:
    """(n,) bool, where a prompt's visual tokens stand.

    Raises:
        ModelError: they are not as many as the images have.
    """
    tokens, vision = config.tokens, config.vision
    is_visual = (input_ids == tokens.image_pad_id) | (input_ids == tokens.video_pad_id)
    count = int(is_visual.sum())
    if count != num_images * vision.tokens_per_image:
        raise ModelError(f"prompt: given {count} image placeholders and {num_images} "
                         f"images, expected {vision.tokens_per_image} for each")
    return is_visual


def ascending(nodes: Sequence[int], count: int) -> list[int]:
    """The rows that `Runtime.keep` is to keep of the last `count`, held to its contract."""
    kept = list(nodes)
    assert all(a < b for a, b in zip(kept, kept[1:])), f"not ascending: {kept}"
    assert not kept or (kept[0] >= 0 and kept[-1] < count), (count, kept)
    return kept


def tree_visibility(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """A tree of draft tokens as `Runtime.extend` takes it.

    Args:
        parents: number of each node's parent, which comes before it; -1 for a root.
    Returns:
        visible (n, n) bool, and depths (n,) int64 from 0: `indices` less the cached length.
    """
    paths: list[list[int]] = []         # each node's ancestors and itself
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"node {node}: parent {parent} is not before it"
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    depths = np.array([len(path) - 1 for path in paths], dtype=np.int64)
    visible = np.zeros((len(paths), len(paths)), dtype=bool)
    visible[np.repeat(np.arange(len(paths)), depths + 1),
            [node for path in paths for node in path]] = True
    return visible, depths


def default_capacity(config: ModelConfig, num_images: int = 16) -> int:
    """Room for the images, 512 tokens of prompt and reasoning, and a round number."""
    needed = num_images * config.vision.tokens_per_image + 512
    return min(-(-needed // 64) * 64, config.text.max_positions)
