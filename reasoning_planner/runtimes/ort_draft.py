"""The block draft on ONNX Runtime, CPU. Needs no torch.

The context's keys and values are numpy rows, token by token, so that what is cached is one piece
of memory. A prompt is read with the first draft: one run a round, and none for a prompt alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Sequence

import numpy as np

from . import positions
from .base import default_capacity
from .draft_base import (GRAPH_NAME, MANIFEST_NAME, DraftBlock, Placement, load_draft_config,
                         require_target_weights, side_by_side)
from .manifest import load_config, sha256_of
from .ort_runtime import open_session, session_options
from .stored_tensors import stored_arrays
from ..errors import ModelError
from ..models.draft_config import WEIGHTS_NAME

LENT = ("vlm.model.language_model.embed_tokens.weight", "vlm.lm_head.weight")


class OrtDraft:
    """See draft_base.DraftRuntime."""

    name = "ort"

    def __init__(self, folder: Path, checkpoint: Path, *, threads: int = 0,
                 capacity: int | None = None):
        """Load what `export_draft` wrote.

        Args:
            folder: a release of train-draft, with its graph.
            checkpoint: directory of the target.
            threads: as for OrtRuntime; the first runtime of a process decides.
            capacity: context tokens it can hold; None: as many as the target's cache.
        Raises:
            ModelError: a file is missing, damaged or foreign, or ONNX Runtime refuses the graph.
        """
        folder, checkpoint = Path(folder), Path(checkpoint)
        self.config, self._model = load_draft_config(folder), load_config(checkpoint)
        require_target_weights(self.config, folder, checkpoint)
        content = _checked_graph(folder)
        self._weights = stored_arrays(folder / WEIGHTS_NAME)
        self._weights |= stored_arrays(checkpoint / "model.safetensors", LENT)
        self._session = open_session(content, folder / GRAPH_NAME,
                                     session_options(threads, checkpoint, self._weights))
        self._outputs = [item.name for item in self._session.get_outputs()]
        capacity = default_capacity(self._model) if capacity is None else capacity
        width = self.config.num_kv_heads * self.config.head_dim
        self._cache = {f"{kind}_{i}": np.zeros((capacity, width), np.float32)
                       for i in range(self.config.num_layers) for kind in ("key", "value")}
        self._capacity, self._length = capacity, 0
        self._placement: Placement | None = None
        self._rows = np.zeros((0, 0), np.float32)           # not cached yet
        self._places = np.zeros((3, 0), np.int64)

    def begin(self, input_ids: np.ndarray, hidden_states: Sequence[np.ndarray]) -> None:
        """See DraftRuntime."""
        rows = side_by_side(self.config, hidden_states)
        if len(rows) != len(input_ids):
            raise ModelError(f"draft: given {len(rows)} hidden states of a prompt of "
                             f"{len(input_ids)} tokens, expected one each")
        self._placement = Placement(self.config, self._model, np.asarray(input_ids))
        places = self._placement.prompt()
        self._length = 0
        self._rows, self._places = rows[self._placement.kept], places
        self._require_room()

    def draft(self, last_id: int, hidden_states: Sequence[np.ndarray]) -> DraftBlock:
        """See DraftRuntime."""
        if self._placement is None:
            raise ModelError("draft: given no prompt, expected `begin` first")
        rows = side_by_side(self.config, hidden_states)
        places = self._placement.advance(len(rows))
        if self._length:
            # The row read last is read again, so that there always is one: an empty tensor is
            # not every operator's strength.
            self._length -= 1
            self._rows, self._places = self._rows[-1:], self._places[:, -1:]
        self._rows = np.concatenate((self._rows, rows))
        self._places = np.concatenate((self._places, places), axis=1)
        self._require_room()
        return self._run(last_id, self._placement.block())

    def _run(self, last_id: int, block: np.ndarray) -> DraftBlock:
        seen = self._length + len(self._rows)
        last = self.config.context_k if self.config.context == "last_k" else seen
        cut = max(0, len(self._rows) - last)                # rows that nobody will see
        self._rows, self._places = self._rows[cut:], self._places[:, cut:]
        if cut:
            self._length = 0
        start = max(0, self._length + len(self._rows) - last)
        inputs = {"hidden_states": self._rows, "last_id": np.array([last_id], np.int64)}
        for name, ids in (("context", self._places), ("block", block)):
            inputs[f"{name}_cos"], inputs[f"{name}_sin"] = self._cos_sin(ids)
        inputs |= {f"past_{name}": buffer[start:self._length]
                   for name, buffer in self._cache.items()}
        found = dict(zip(self._outputs, self._session.run(self._outputs, inputs)))
        stop = self._length + len(self._rows)
        for name, buffer in self._cache.items():
            buffer[self._length:stop] = found[f"new_{name}"]
        self._length = stop
        if not np.isfinite(found["top_log_probs"]).all():
            raise ModelError("draft: given log probabilities that are not finite, expected "
                             "numbers")
        return DraftBlock(found["token_ids"], found["top_ids"], found["top_log_probs"])

    def _cos_sin(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        config = self.config
        return positions.rope_cos_sin(ids, config.head_dim, config.rope_theta,
                                      config.mrope_section)

    def _require_room(self) -> None:
        if self._length + len(self._rows) > self._capacity:
            raise ModelError(f"draft: given {len(self._rows)} context tokens, expected at most "
                             f"{self._capacity - self._length} (cache of {self._capacity})")


def _checked_graph(folder: Path) -> bytes:
    path = folder / MANIFEST_NAME
    remedy = "expected what `reasoning-planner export` writes for a draft"
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        content = (folder / GRAPH_NAME).read_bytes()
        given = {GRAPH_NAME: hashlib.sha256(content).hexdigest(),
                 WEIGHTS_NAME: sha256_of(folder / WEIGHTS_NAME)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: {error}, {remedy}") from error
    if given != expected:
        raise ModelError(f"{path}: given {given}, expected {expected}: not the files of this "
                         f"export")
    return content
