"""The block draft in PyTorch behind DraftRuntime: the oracle of every other engine."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np

from .base import default_capacity
from .draft_base import (DraftBlock, Placement, block_of, load_draft_config,
                         require_target_weights, side_by_side)
from .torch_runtime import load_target
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.draft import Draft, DraftSession
from ..models.draft_release import load_draft


class TorchDraft:
    """See draft_base.DraftRuntime."""

    name = "torch"

    def __init__(self, draft: Draft, model: ModelConfig, capacity: int | None = None):
        """
        Args:
            draft: on any device.
            model: the target's configuration.
            capacity: context tokens it can hold; None: as many as the target's cache.
        """
        self.config = draft.config
        self._model = model
        self._session = DraftSession(
            draft, default_capacity(model) if capacity is None else capacity)
        self._placement: Placement | None = None

    @classmethod
    def load(cls, folder: Path, checkpoint: Path, capacity: int | None = None) -> TorchDraft:
        """Load a release of `train-draft` for the target in a checkpoint directory.

        Raises:
            ModelError: a file is missing or damaged, or the draft was trained on other weights.
        """
        folder, checkpoint = Path(folder), Path(checkpoint)
        config = load_draft_config(folder)
        require_target_weights(config, folder, checkpoint)
        target = load_target(checkpoint)
        draft = load_draft(folder, config, target)
        return cls(draft, target.config, capacity)

    def begin(self, input_ids: np.ndarray, hidden_states: Sequence[np.ndarray]) -> None:
        """See DraftRuntime."""
        rows = side_by_side(self.config, hidden_states)
        if len(rows) != len(input_ids):
            raise ModelError(f"draft: given {len(rows)} hidden states of a prompt of "
                             f"{len(input_ids)} tokens, expected one each")
        self._placement = Placement(self.config, self._model, np.asarray(input_ids))
        self._session.clear()
        positions = self._placement.prompt()
        self._append(rows[self._placement.kept], positions)

    def draft(self, last_id: int, hidden_states: Sequence[np.ndarray]) -> DraftBlock:
        """See DraftRuntime."""
        if self._placement is None:
            raise ModelError("draft: given no prompt, expected `begin` first")
        rows = side_by_side(self.config, hidden_states)
        if len(rows):
            self._append(rows, self._placement.advance(len(rows)))
        logits = self._session.block(last_id, self._placement.block(), self._last())
        return block_of(logits)

    def _append(self, rows: np.ndarray, positions: np.ndarray) -> None:
        room = self._session.capacity - self._session.length
        if len(rows) > room:
            raise ModelError(f"draft: given {len(rows)} context tokens, expected at most {room} "
                             f"(cache of {self._session.capacity})")
        self._session.append(rows, positions)

    def _last(self) -> int | None:
        return self.config.context_k if self.config.context == "last_k" else None
