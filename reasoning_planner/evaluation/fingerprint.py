"""Telling whether a bag, a checkpoint and settings are those of a result already there.

Files are sampled, not read whole: a bag of many GB would otherwise be read twice.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Mapping

import numpy as np

PACKAGE = Path(__file__).resolve().parent.parent


def fingerprint_of(identity: Mapping[str, Any], checkpoint: str) -> str:
    """Of everything a result depends on, this package's code too: equal ones give equal results.

    Args:
        identity: the bag's id and every setting, as plain values.
        checkpoint: of the model, "" for none; its files are sampled too.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    if checkpoint:
        from ..vla import checkpoint_directory      # the kinematic planner needs none of its parts
        for file in sorted(checkpoint_directory(checkpoint).rglob("*")):
            if file.is_file():          # those of its draft lie a folder below
                _add_sampled(digest, file)
    return digest.hexdigest()


def bag_id(bag: Path) -> str:
    """Of the bag's content, sampled, wherever it lies: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    files = [bag] if bag.is_file() else sorted(
        file for file in bag.rglob("*") if file.is_file() and file.name != "metadata.yaml")
    for file in files:
        _add_sampled(digest, file)
    return digest.hexdigest()[:16]


def _add_sampled(digest: Any, file: Path, pieces: int = 16, size: int = 4096) -> None:
    """Length, beginning, end and evenly spread pieces: a bag of many GB is not read twice."""
    try:
        length = file.stat().st_size
        digest.update(str(length).encode())
        with file.open("rb") as stream:
            for offset in np.unique(np.linspace(0, max(length - size, 0), pieces).astype(int)):
                stream.seek(int(offset))
                digest.update(stream.read(size))
    except OSError:
        return              # whoever opens it will say why
