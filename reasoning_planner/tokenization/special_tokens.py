"""The tokens Alpamayo appends to a text vocabulary: which ones, in which order, with which ids.

4,000 trajectory bins come first, then 28 special tokens. Over Qwen3's 151,669 tokens this gives
exactly Alpamayo's ids; over the stand-in's small vocabulary the same layout, shifted. Knows
nothing of how text is split into tokens.
Source: alpamayo.md, section 2.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

NUM_FUTURE_BINS = 3000          # <i0> .. <i2999>
NUM_HISTORY_BINS = 1000         # <i3000> .. <i3999>
NUM_BINS = NUM_FUTURE_BINS + NUM_HISTORY_BINS
QWEN3_BASE_SIZE = 151_669       # text tokens and Qwen's own added tokens


@dataclass(frozen=True)
class QwenTokens:
    """Ids of the control tokens the text vocabulary itself must have."""

    endoftext: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of Alpamayo's own tokens. The fields after `base_size` stand in the vocabulary's order.

    Attributes:
        base_size: size of the text vocabulary below; also the id of `<i0>`.
        traj_history, traj_future: placeholders, overwritten by bins before the embedding.
        traj_future_start: ends the reasoning; generation stops after it.
    """

    base_size: int
    prompt_start: int
    prompt_end: int
    image_start: int
    image_pre_tkn: int
    image_end: int
    traj_history_start: int
    traj_history_pre_tkn: int
    traj_history_end: int
    cot_start: int
    cot_end: int
    meta_action_start: int
    meta_action_end: int
    traj_future_start: int
    traj_future_pre_tkn: int
    traj_future_end: int
    traj_history: int
    traj_future: int
    vectorized_wm: int
    vectorized_wm_start: int
    vectorized_wm_end: int
    vectorized_wm_pre_tkn: int
    route_start: int
    route_pad: int
    route_end: int
    question_start: int
    question_end: int
    answer_start: int
    answer_end: int

    @classmethod
    def for_base(cls, base_size: int) -> SpecialTokens:
        """The ids over a text vocabulary of `base_size` tokens."""
        if base_size <= 0:
            raise ValueError(f"base_size: given {base_size}, expected a positive size")
        first = base_size + NUM_BINS
        return cls(base_size, *range(first, first + len(SPECIAL_TOKEN_NAMES)))

    @property
    def first_future_bin(self) -> int:
        """Id of `<i0>`."""
        return self.base_size

    @property
    def first_history_bin(self) -> int:
        """Id of `<i3000>`."""
        return self.base_size + NUM_FUTURE_BINS

    @property
    def bins(self) -> range:
        """Ids of all 4,000 bins: never sampled while the text is written."""
        return range(self.base_size, self.base_size + NUM_BINS)

    @property
    def history_bins(self) -> range:
        """Ids of the 1,000 bins of ego history."""
        return range(self.first_history_bin, self.base_size + NUM_BINS)

    @property
    def size(self) -> int:
        """Number of tokens altogether: rows of the embedding and of the output layer."""
        return self.base_size + NUM_BINS + len(SPECIAL_TOKEN_NAMES)

    def contents(self) -> tuple[str, ...]:
        """The 4,028 token strings; item i has the id `base_size + i`."""
        bins = tuple(f"<i{i}>" for i in range(NUM_BINS))
        return bins + tuple(content_of(name) for name in SPECIAL_TOKEN_NAMES)


def content_of(name: str) -> str:
    """cot_start -> <|cot_start|>"""
    return f"<|{name}|>"


SPECIAL_TOKEN_NAMES = tuple(f.name for f in dataclasses.fields(SpecialTokens))[1:]
QWEN_TOKEN_NAMES = tuple(f.name for f in dataclasses.fields(QwenTokens))
# Alpamayo 1.5 keeps these slots under other names; nothing here reads or writes them.
PADDING_TOKEN_NAMES = frozenset((
    "image_pre_tkn", "traj_history_pre_tkn", "meta_action_start", "meta_action_end",
    "traj_future_pre_tkn", "vectorized_wm", "vectorized_wm_start", "vectorized_wm_end",
    "vectorized_wm_pre_tkn"))
