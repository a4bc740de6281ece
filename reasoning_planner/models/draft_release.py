"""A trained draft on disk: draft_config.json and draft.safetensors, and its weights back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import ConfigError, ModelError
from .draft import Draft
from .draft_config import CONFIG_NAME, WEIGHTS_NAME, DraftConfig
from .target import Target

INFO_NAME = "training.json"


def save_draft(draft: Draft, folder: Path, info: dict[str, Any]) -> None:
    """Write a release; the weights, rounded to float16, are replaced in one move.

    Args:
        info: seed, data, steps, figures, commit: training.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in ((CONFIG_NAME, draft.config.to_dict()), (INFO_NAME, info)):
        (folder / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    weights = {name: tensor.detach().to(torch.float16).contiguous()
               for name, tensor in draft.state_dict().items()}
    partial = folder / (WEIGHTS_NAME + ".partial")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)                # the library makes it unreadable to others
    os.replace(partial, folder / WEIGHTS_NAME)


def load_draft(folder: Path, config: DraftConfig, target: Target) -> Draft:
    """The draft in float32 on the CPU, its weights the rounded ones.

    Args:
        config: from `runtimes.draft_base.load_draft_config`.
    Raises:
        ModelError: the weights are missing, or fit neither configuration nor target.
    """
    path = folder / WEIGHTS_NAME
    try:
        draft = Draft(config, target)
        draft.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    except (OSError, SafetensorError, RuntimeError, ConfigError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    return draft.eval().requires_grad_(False)
