"""Trained drafts of one target on the same held-out texts: what is accepted, where they look.

Loads releases and refuses to compare drafts that were not trained alike. It writes no report.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from tqdm import tqdm

from ..errors import DataError
from ..models.draft import Draft
from ..models.draft_config import DraftConfig
from ..models.draft_positions import PARTS, prompt_parts
from ..models.draft_release import INFO_NAME, load_draft
from ..models.target import Target
from ..runtimes.draft_base import load_draft_config, require_target_weights
from .checkpoint import load_release
from .dataset import PromptLayout, Shard
from .draft_sequences import (SHORT_PASS, Sequences, accepted_behind, attention_shares,
                              held_out_figures, passes_of)
from .rollouts import Rollouts, make_rollouts

SWITCHES = ("rope", "context", "context_k")     # what drafts trained alike may differ in
ALIKE = ("seed", "texts", "step", "schedule", "target_sha256")
SWAPPED = {"flat": "mrope", "mrope": "flat"}


@dataclass(frozen=True)
class Judged:
    """One draft on the texts.

    Attributes:
        config: of the draft.
        figures: see draft_sequences.held_out_figures.
        passes: (N,) int64, of each text, with passes of at most SHORT_PASS tokens.
        shares: (layers, heads, PARTS) float64, of the attention of the drafted places.
        swapped: the same weights with the positions of the other rope, flat or M-RoPE; None for
            other ropes.
    """

    config: DraftConfig
    figures: dict[str, float]
    passes: np.ndarray
    shares: np.ndarray
    swapped: np.ndarray | None


class DraftJudge:
    """A target's own texts of some scenes, and drafts that are asked for them."""

    def __init__(self, checkpoint: Path, threads: int):
        torch.set_num_threads(threads)
        self._checkpoint = checkpoint
        self._target, tokenizer = load_release(checkpoint)
        self._target.requires_grad_(False)
        self._layout = PromptLayout(tokenizer, self._target.config)
        self._prompt = self._layout.prompt(np.zeros((16, 3)))
        vision = self._target.config.vision
        self.image_size = (vision.image_height, vision.image_width)

    def prompt_tokens(self) -> dict[str, int]:
        """How many tokens of the prompt are of which part."""
        counts = np.bincount(prompt_parts(self._prompt, self._target.config.tokens),
                             minlength=len(PARTS))
        return {part: int(count) for part, count in zip(PARTS, counts) if count}

    def judge(self, folders: Sequence[Path], shard: Shard) -> list[Judged]:
        """Ask every draft for the texts of all scenes of a shard.

        Raises:
            DataError: the drafts were not trained alike.
            ModelError: a file is missing, damaged, or of another target.
        """
        configs = [load_draft_config(folder) for folder in folders]
        require_alike(folders, configs)
        require_target_weights(configs[0], folders[0], self._checkpoint)
        with tqdm(total=1 + len(folders), desc="texts, then drafts",
                  disable=not sys.stderr.isatty()) as bar:
            rollouts = make_rollouts(self._target, self._layout, shard, range(len(shard)),
                                     configs[0].feature_layers)
            judged = []
            for folder, config in zip(folders, configs):
                bar.update()
                judged.append(self._judge(load_draft(folder, config, self._target), rollouts))
            bar.update()
        return judged

    def _judge(self, draft: Draft, rollouts: Rollouts) -> Judged:
        sequences = Sequences(draft, self._target, self._prompt)
        accepted = accepted_behind(sequences, rollouts)
        other = SWAPPED.get(draft.config.rope)
        swapped = None
        if other is not None:
            moved = with_rope(draft, other, self._target)
            swapped = attention_shares(Sequences(moved, self._target, self._prompt), rollouts)
        return Judged(draft.config, held_out_figures(sequences, rollouts),
                      passes_of(accepted, rollouts.lengths, SHORT_PASS),
                      attention_shares(sequences, rollouts), swapped)


def with_rope(draft: Draft, name: str, target: Target) -> Draft:
    """The same weights with other positions."""
    other = Draft(replace(draft.config, rope=name), target)
    other.load_state_dict(draft.state_dict())
    return other.eval().requires_grad_(False)


def require_alike(folders: Sequence[Path], configs: Sequence[DraftConfig]) -> None:
    """
    Raises:
        DataError: two drafts differ in more than SWITCHES, or in how they were trained.
    """
    plain = DraftConfig()
    stated = [({**replace(config, **{name: getattr(plain, name) for name in SWITCHES}).to_dict()},
               _training(folder)) for folder, config in zip(folders, configs)]
    for folder, (shape, training) in zip(folders, stated):
        for given, expected in ((shape, stated[0][0]), (training, stated[0][1])):
            wrong = sorted(name for name in expected if given[name] != expected[name])
            if wrong:
                raise DataError(
                    f"{folder}: given {', '.join(f'{name} {given[name]}' for name in wrong)}, "
                    f"expected {', '.join(str(expected[name]) for name in wrong)} as "
                    f"{folders[0]} has: train the drafts alike")


def _training(folder: Path) -> dict[str, Any]:
    path = folder / INFO_NAME
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        return {name: info[name] for name in ALIKE}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {type(error).__name__} {error}, expected what train-draft "
                        f"writes") from error
