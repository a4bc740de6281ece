"""Tensors of safetensors files as they are stored: mapped arrays, and a hash of some of them.

Needs no torch and no safetensors library. It knows the file format, not what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from ..errors import ModelError

NUMPY_OF_STORED = {"F16": np.float16, "F32": np.float32}
CHUNK_BYTES = 1 << 22
_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError)


def stored_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Tensors of one file, read when they are used.

    Args:
        names: which; None: all.
    Raises:
        ModelError: unreadable, a name is missing, or a dtype is not one of numpy's.
    """
    try:
        start, header = _header(path)
        return {name: np.memmap(path, NUMPY_OF_STORED[header[name]["dtype"]], "r",
                                start + header[name]["data_offsets"][0],
                                tuple(header[name]["shape"]))
                for name in (header if names is None else names)}
    except _DAMAGES as error:
        raise ModelError(f"{path}: {type(error).__name__} {error}, expected safetensors of "
                         f"{', '.join(NUMPY_OF_STORED)}") from error


def tensors_sha256(folder: Path, prefix: str) -> str:
    """What names, dtypes, shapes and bytes of a folder's tensors come to, however they are filed.

    Args:
        folder: its *.safetensors are read, in pieces.
        prefix: of the names that count.
    Returns:
        Hexadecimal digits.
    Raises:
        ModelError: unreadable, or no tensor has such a name.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            start, header = _header(path)
            found |= {name: (path, start, entry) for name, entry in header.items()
                      if name.startswith(prefix)}
        for name in sorted(found):
            path, start, entry = found[name]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            first, stop = entry["data_offsets"]
            _add_bytes(digest, path, start + first, stop - first)
    except _DAMAGES as error:
        raise ModelError(f"{folder}: {type(error).__name__} {error}, expected safetensors "
                         f"files") from error
    if not found:
        raise ModelError(f"{folder}: given no tensor {prefix}*, expected a checkpoint's "
                         f"*.safetensors")
    return digest.hexdigest()


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and name -> dtype, shape, data_offsets."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def _add_bytes(digest: Any, path: Path, start: int, count: int) -> None:
    with open(path, "rb") as file:
        file.seek(start)
        while count:
            chunk = file.read(min(CHUNK_BYTES, count))
            if not chunk:
                raise ValueError(f"{path} ends {count} bytes early")
            digest.update(chunk)
            count -= len(chunk)
