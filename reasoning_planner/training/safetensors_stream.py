"""Safetensors files read and written in small pieces: no tensor is ever whole in memory.

Works on raw bytes, so bfloat16 needs no torch. Knows the file format, not what the tensors mean.
Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from ..errors import DataError

CHUNK_BYTES = 4 << 20
MAX_HEADER_BYTES = 100 << 20        # the format's own bound
BYTES_OF_DTYPE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2,
                  "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor's bytes lie.

    Attributes:
        name, dtype, shape: as the header has them; dtype in the format's words ("BF16").
        path: the file.
        begin: position of the first byte in the file.
        num_bytes: how many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    num_bytes: int

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes, a piece at a time; pieces end between elements.

        Raises:
            DataError: the file ends early.
        """
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            left = self.num_bytes
            while left:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise DataError(f"{self.path}: ends {left} bytes early, in {self.name}")
                left -= len(chunk)
                yield chunk


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises:
        DataError: missing, cut short, or not a safetensors file.
    """
    expected = "expected a safetensors file"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise DataError(f"{path}: given a header of {length} bytes in a file of {size}, "
                                f"{expected}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(name, entry, path, 8 + length, size)
                for name, entry in header.items()}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), {expected}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: header cannot be read ({type(error).__name__}: {error}), "
                        f"{expected}") from error


def _stored(name: str, entry: dict[str, Any], path: Path, start: int, size: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in BYTES_OF_DTYPE:
        raise DataError(f"{path}: {name}: given dtype {dtype}, "
                        f"expected one of {', '.join(BYTES_OF_DTYPE)}")
    if end - begin != math.prod(shape) * BYTES_OF_DTYPE[dtype] or begin < 0:
        raise DataError(f"{path}: {name}: given bytes {begin} .. {end}, expected as many as "
                        f"{dtype} {shape} needs")
    if start + end > size:
        raise DataError(f"{path}: {name}: ends at byte {start + end}, but the file has {size}; "
                        f"it was probably cut short while it was copied")
    return StoredTensor(name, dtype, shape, path, start + begin, end - begin)


def write_copies(tensors: Sequence[StoredTensor], path: Path,
                 watch: Callable[[StoredTensor, bytes], None]) -> str:
    """Write a new file with copies of the tensors, flushed to disk.

    Args:
        tensors: in the order they shall have in the file.
        watch: called with every piece on its way.
    Returns:
        The file's sha256, as hexadecimal digits.
    """
    digest = hashlib.sha256()
    header = _header(tensors)
    with open(path, "wb") as file:
        file.write(header)
        digest.update(header)
        for tensor in tensors:
            for chunk in tensor.chunks():
                watch(tensor, chunk)
                file.write(chunk)
                digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                                "data_offsets": [position, position + tensor.num_bytes]}
        position += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)         # tensors start aligned
    return len(text).to_bytes(8, "little") + text
