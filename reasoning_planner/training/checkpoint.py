"""Training state on disk, and the release a runtime reads. Nothing of losses or data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..errors import DataError
from ..models.config import ModelConfig
from ..models.target import Target
from ..tokenization.text_tokenizer import TextTokenizer

RELEASE_FILES = ("config.json", "tokenizer.json", "model.safetensors", "training.json")


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a training state; an interruption leaves the previous file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path) -> dict[str, Any]:
    """Read a training state; plain values and tensors only, nothing in it is executed.

    Raises:
        DataError: missing or unreadable.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"training state {path}: no such file") from None
    except Exception as error:          # torch.load raises many kinds
        raise DataError(f"training state {path}: cannot be read "
                        f"({type(error).__name__}: {error})") from error


def half_rounded(target: Target) -> dict[str, torch.Tensor]:
    """The weights as they are released: contiguous float16."""
    return {name: tensor.detach().to(torch.float16).contiguous()
            for name, tensor in target.state_dict().items()}


def save_release(target: Target, tokenizer: TextTokenizer, folder: Path, info: dict[str, Any]
                 ) -> None:
    """Write what a runtime reads: config.json, tokenizer.json, model.safetensors, training.json.

    Args:
        target: its weights are rounded to float16, which then are the reference.
        folder: made if needed; the weights are replaced in one move.
        info: seed, data version, steps, figures, commit.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target.config.to_dict(), indent=1) + "\n")
    tokenizer.save(folder / "tokenizer.json")
    (folder / "training.json").write_text(json.dumps(info, indent=1) + "\n")
    partial = folder / "model.safetensors.partial"
    save_file(half_rounded(target), partial, metadata={"format": "pt"})
    partial.chmod(0o644)                # the library makes it unreadable to others
    os.replace(partial, folder / "model.safetensors")


def load_release(folder: Path) -> tuple[Target, TextTokenizer]:
    """The released model in float32 arithmetic, its weights the rounded ones.

    Raises:
        DataError: a file is missing or unfit.
    """
    folder = Path(folder)
    missing = [name for name in RELEASE_FILES[:3] if not (folder / name).is_file()]
    if missing:
        raise DataError(f"checkpoint {folder}: {', '.join(missing)} missing, expected "
                        f"{', '.join(RELEASE_FILES)}")
    try:
        config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
        target = Target(config)
        target.load_state_dict(load_file(folder / "model.safetensors"))
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"checkpoint {folder}: {' '.join(str(error).split())[:300]}") from error
    return target.eval(), TextTokenizer.load(folder / "tokenizer.json")
