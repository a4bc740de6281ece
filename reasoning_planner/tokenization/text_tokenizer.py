"""Text to token ids and back: Qwen's byte-level BPE under Alpamayo's own tokens.

Reads a Hugging Face `tokenizer.json` with or without Alpamayo's tokens, and trains the small one
of the stand-in model. Plain text never becomes a control token, whatever it spells: those are put
into a prompt by id, so a route instruction cannot end a turn or pose as ego history.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import trainers

from ..errors import DataError
from .special_tokens import (PADDING_TOKEN_NAMES, QWEN_TOKEN_NAMES, QwenTokens, SpecialTokens,
                             content_of)

# How Qwen cuts text before merging: contractions, words, single digits, punctuation, spaces.
QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
              r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _byte_of_symbol() -> dict[str, int]:
    """The byte each symbol of a byte-level vocabulary stands for.

    Bytes that print stand for themselves, the other 68 for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_SYMBOL = _byte_of_symbol()


class TextTokenizer:
    """A text vocabulary extended with the trajectory bins and Alpamayo's special tokens.

    Attributes:
        special: ids of the bins and of Alpamayo's tokens.
        qwen: ids of the text vocabulary's own control tokens.
    """

    def __init__(self, definition: dict[str, Any]):
        """
        Args:
            definition: a parsed `tokenizer.json`; the load functions below are the usual way.
        Raises:
            DataError: not a byte-level BPE, ids with gaps, control tokens missing or misplaced.
        """
        self._definition = definition
        vocabulary = definition["model"]["vocab"]
        added = {token["content"]: token["id"] for token in definition["added_tokens"]}
        _require_byte_level(vocabulary)
        base_size = added.get("<i0>", _size_without_gaps(vocabulary, added))
        self.special = SpecialTokens.for_base(base_size)
        if "<i0>" in added:
            _require_alpamayo_order(added, self.special)
        else:
            added |= {text: base_size + i for i, text in enumerate(self.special.contents())}
        self.qwen = _qwen_tokens(added)
        self._content_of_added = {token_id: content for content, token_id in added.items()}
        self._bpe = Tokenizer.from_str(json.dumps(definition | {"added_tokens": []}))

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            DataError: missing, unreadable or unfit; the text has the path and what was expected.
        """
        expected = "expected the tokenizer.json of a byte-level BPE (Qwen3's, or the stand-in's)"
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise DataError(f"tokenizer {path}: no such file, {expected}") from None
        except DataError as error:
            raise DataError(f"tokenizer {path}: {error}, {expected}") from error
        except Exception as error:      # the tokenizers library raises bare Exceptions
            raise DataError(f"tokenizer {path}: cannot be read ({type(error).__name__}: {error}), "
                            f"{expected}") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as it was made; Alpamayo's tokens are added again on loading."""
        text = json.dumps(self._definition, ensure_ascii=False, indent=1) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    @property
    def size(self) -> int:
        """Number of tokens, Alpamayo's included."""
        return self.special.size

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; never a control token."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, control tokens and bins left out; broken UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        raw = b"".join(self._bytes_of(int(i)) for i in token_ids
                       if int(i) not in self._content_of_added)
        return raw.decode("utf-8", errors="replace")

    def token_texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """One string a token, for display: control tokens by name, the others by their text.

        A character spread over several tokens is shown at the token that completes it.
        """
        texts: list[str] = []
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in map(int, token_ids):
            if token_id in self._content_of_added:
                texts.append(decoder.decode(b"", final=True) + self._content_of_added[token_id])
                decoder.reset()
            else:
                texts.append(decoder.decode(self._bytes_of(token_id)))
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return tuple(texts)

    def _bytes_of(self, token_id: int) -> bytes:
        symbols = self._bpe.id_to_token(token_id) if token_id >= 0 else None
        if symbols is None:
            raise ValueError(f"token id: given {token_id}, expected 0 .. {self.size - 1}")
        return bytes(BYTE_OF_SYMBOL[symbol] for symbol in symbols)


def _require_byte_level(vocabulary: dict[str, int]) -> None:
    missing = sum(symbol not in vocabulary for symbol in BYTE_OF_SYMBOL)
    if missing:
        raise DataError(f"{missing} of the 256 byte symbols are not in the vocabulary")


def _size_without_gaps(vocabulary: dict[str, int], added: dict[str, int]) -> int:
    ids = {*vocabulary.values(), *added.values()}
    if max(ids) + 1 != len(ids):
        raise DataError(f"{len(ids)} ids reach up to {max(ids)}, so some are left out")
    return len(ids)


def _require_alpamayo_order(added: dict[str, int], special: SpecialTokens) -> None:
    optional = {content_of(name) for name in PADDING_TOKEN_NAMES}
    for offset, content in enumerate(special.contents()):
        expected = special.base_size + offset
        found = added.get(content, expected if content in optional else None)
        if found != expected:
            raise DataError(f"token {content} has the id {found} where {expected} was expected")


def _qwen_tokens(added: dict[str, int]) -> QwenTokens:
    missing = [content_of(name) for name in QWEN_TOKEN_NAMES if content_of(name) not in added]
    if missing:
        raise DataError(f"control tokens are missing: {', '.join(missing)}")
    return QwenTokens(**{name: added[content_of(name)] for name in QWEN_TOKEN_NAMES})


def train_text_tokenizer(sentences: Iterable[str], base_size: int = 1000) -> TextTokenizer:
    """Train a small byte-level BPE that cuts text as Qwen's does, the control tokens last.

    Args:
        sentences: everything the vocabulary should serve: the prompt's fixed texts, route
            phrases, reasoning. The same sentences in the same order give the same vocabulary.
        base_size: largest text vocabulary, Qwen's control tokens included; it comes out
            smaller when the sentences have no more pairs to merge.
    Raises:
        ValueError: no room for the 256 bytes and the control tokens.
    """
    controls = [content_of(name) for name in QWEN_TOKEN_NAMES]
    smallest = len(BYTE_OF_SYMBOL) + len(controls)
    if base_size < smallest:
        raise ValueError(f"base_size: given {base_size}, expected at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=base_size - len(controls), show_progress=False, special_tokens=[],
        initial_alphabet=sorted(BYTE_OF_SYMBOL))
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return TextTokenizer(json.loads(tokenizer.to_str()))
