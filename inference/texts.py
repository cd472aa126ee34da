"""Texts to prompts, and new tokens to texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from core.settings import UserError
from data.schema import well_formed
from data.tokenizer import CharTokenizer

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

log = logging.getLogger("nanoattn")


def default_prompt(tokenizer: Tokenizer) -> str:
    """A newline; if no text has one, the first character, or nothing."""
    if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.ids:
        return next(filter(None, tokenizer.vocabulary))
    return "\n" if tokenizer.encode("\n") else ""


def encode(prompt: str, tokenizer: Tokenizer, block_size: int) -> tuple[str, list[int]]:
    """The prompt and its ids; for an empty one eot or default_prompt(). Raises UserError."""
    if not prompt and tokenizer.eot is None:
        prompt = default_prompt(tokenizer)
    ids = [*tokenizer.begin, *tokenizer.encode(well_formed(prompt))]
    if not ids and not prompt and tokenizer.eot is not None:
        ids = [tokenizer.eot]
    if not ids:
        raise UserError(f"the prompt {prompt!r} has no tokens")
    if len(ids) > block_size:
        log.warning(f"a prompt has {len(ids)} tokens: only the last {block_size} are read")
    return prompt, ids


def pieces(new: Iterable[int], tokenizer: Tokenizer, prompt: str, ids: Sequence[int],
           stops: Sequence[str]) -> Iterator[str]:  # fmt: skip
    """The text of new tokens after a prompt's `ids`, up to an end token or stop string."""
    known = (token for token in new if token not in tokenizer.ends)
    found = tokenizer.stream_decode(known, ids if prompt else ())
    if prompt[-1:].isspace() and not tokenizer.decode(ids)[-1:].isspace():
        # The prompt's last space has no token (WordPiece).
        found = chain([next(found, "").removeprefix(" ")], found)
    held = ""
    for piece in found:
        held += piece
        if ends := [at for stop in stops if (at := held.find(stop)) >= 0]:
            yield held[: min(ends)]
            return
        begins = (n for n in range(len(held)) if any(s.startswith(held[n:]) for s in stops))
        n = next(begins, len(held))
        yield held[:n]
        held = held[n:]
    yield held


def has_stop(new: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer,
             stops: Sequence[str]) -> bool:  # fmt: skip
    if not stops:
        return False
    n = 4 * max(map(len, stops)) + 16  # at most 4 tokens a character
    before = [*ids, *new[:-n]][-16:]  # for the spaces between tokens
    known, text = tokenizer.decode(before), tokenizer.decode([*before, *new[-n:]])
    begin = next((i for i, (a, b) in enumerate(zip(known, text)) if a != b), len(known))
    return any(stop in text[begin:] for stop in stops)
