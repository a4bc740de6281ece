"""The block draft in PyTorch behind DraftRuntime: the oracle of every other engine."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np

from .base import default_capacity
from .draft_base import (TOP_K, DraftBlock, Placement, block_of, load_draft_config,
                         require_target_weights, side_by_side)
from .torch_graphs import StaticDraftSession
from .torch_runtime import load_target, randomise, weights_dtype
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.draft import Draft, DraftSession
from ..models.draft_config import DraftConfig
from ..models.draft_release import load_draft
from ..models.target import Target


class TorchDraft:
    """See draft_base.DraftRuntime."""

    name = "torch"

    def __init__(self, draft: Draft, model: ModelConfig, capacity: int | None = None, *,
                 fixed_shapes: bool | None = None):
        """
        Args:
            draft: on any device.
            model: the target's configuration.
            capacity: context tokens it can hold; None: as many as the target's cache.
            fixed_shapes: draft in passes of fixed shapes, as CUDA graphs where there is CUDA;
                None: there and nowhere else.
        """
        self.config = draft.config
        self._model = model
        capacity = default_capacity(model) if capacity is None else capacity
        if fixed_shapes is None:
            fixed_shapes = draft.fc.weight.device.type == "cuda"
        self._session = (StaticDraftSession(draft, capacity, TOP_K) if fixed_shapes
                         else DraftSession(draft, capacity))
        self._placement: Placement | None = None

    @classmethod
    def load(cls, folder: Path, checkpoint: Path, capacity: int | None = None, *,
             device: str = "cpu") -> TorchDraft:
        """Load a release of `train-draft` for the target in a checkpoint directory.

        Args:
            device: "cpu" or "cuda".
        Raises:
            ModelError: a file is missing or damaged, or the draft was trained on other weights.
            MissingDependencyError: torch sees no such device.
        """
        folder, checkpoint = Path(folder), Path(checkpoint)
        dtype = weights_dtype(device)
        config = load_draft_config(folder)
        require_target_weights(config, folder, checkpoint)
        target = load_target(checkpoint, device, dtype)
        draft = load_draft(folder, config, target).to(device, dtype)
        return cls(draft, target.config, capacity)

    @classmethod
    def random(cls, config: DraftConfig, target: Target, capacity: int, seed: int = 0
               ) -> TorchDraft:
        """A draft of random weights beside a target, where and as that is held: for measuring."""
        weight = target.lm_head.weight
        draft = Draft(config, target).to(weight.device, weight.dtype)
        return cls(randomise(draft, seed), target.config, capacity)

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
        place, last = self._placement.block(), self._last()
        if isinstance(self._session, StaticDraftSession):
            return self._chosen(*self._session.choose(last_id, place, last))
        return block_of(self._session.block(last_id, place, last))

    @staticmethod
    def _chosen(token_ids: np.ndarray, top_ids: np.ndarray, top_log_probs: np.ndarray
                ) -> DraftBlock:
        if not np.isfinite(top_log_probs).all():
            raise ModelError("draft: given log probabilities that are not finite, expected "
                             "numbers")
        return DraftBlock(token_ids, top_ids, top_log_probs)

    def _append(self, rows: np.ndarray, positions: np.ndarray) -> None:
        room = self._session.capacity - self._session.length
        if len(rows) > room:
            raise ModelError(f"draft: given {len(rows)} context tokens, expected at most {room} "
                             f"(cache of {self._session.capacity})")
        self._session.append(rows, positions)

    def _last(self) -> int | None:
        return self.config.context_k if self.config.context == "last_k" else None
