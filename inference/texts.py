"""A text in progress: its prompt, its new tokens, its end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from core.settings import UserError
from data.schema import well_formed
from data.tokenizer import CharTokenizer, Tokenizer
from inference.sampling import Options, Prompt, in_range, needed, uniform
from model import GPT

log = logging.getLogger("nanoattn")


def default_prompt(tokenizer: Tokenizer) -> str:
    """A newline; if no text has one, the first character, or nothing."""
    if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.ids:
        return next(filter(None, tokenizer.vocabulary))
    return "\n" if tokenizer.encode("\n") else ""


class Row:
    """A text in progress. An empty text begins with eot or default_prompt(). Raises ValueError."""

    def __init__(self, index: int, prompt: Prompt, room: int, generator: torch.Generator | None,
                 model: GPT, options: Options) -> None:  # fmt: skip
        V, T, tokenizer = model.config.vocab_size, model.config.block_size, model.tokenizer
        self.text: str | None = None  # the prompt
        if isinstance(prompt, str):
            needed(tokenizer, f"the prompt {prompt!r:.60}")
            eot = [] if tokenizer.eot is None else [tokenizer.eot]
            self.text = prompt if prompt or eot else default_prompt(tokenizer)
            prompt = [*tokenizer.begin, *tokenizer.encode(well_formed(self.text))]
            prompt = prompt or ([] if self.text else eot)
            if not prompt:
                raise UserError(f"the prompt {self.text!r} has no tokens")
            if len(prompt) > T:
                log.warning(f"a prompt has {len(prompt)} tokens: only the last {T} are read")
        ids = torch.as_tensor(prompt)
        several = ids.dim() == 1 and ids.dtype != torch.bool and not ids.is_floating_point()
        self.prompt: list[int] = ids.tolist() if several else []
        if not self.prompt or not 0 <= min(self.prompt) <= max(self.prompt) < V:
            want = f"at least one token, integers (T,) from 0 to {V - 1}"
            raise ValueError(f"prompt {index}: expected {want}, got {prompt!r:.60}")
        device = model.transformer.wte.weight.device
        self.random = uniform(device, generator) if options.temperature else None
        self.index, self.options, self.tokenizer = index, options, tokenizer
        self.room: int = in_range("max_new_tokens", room, 0)  # most new tokens
        self.new: list[int] = []
        self.slot = -1
        self.stored = 0  # tokens in the cache
        self.ended = False  # as far as the host knows
        self.n = len(self.prompt)  # of the text, on the device too
        self.most = self.n + self.room - 1  # that the model may read: all but the last

    @property
    def done(self) -> bool:
        return self.ended or self.n > self.most

    def stops(self) -> bool:
        """True if the last new token ends the text."""
        stop, stops, last = self.options.stop, self.options.stop_strings, self.new[-1]
        if self.text is not None and last in self.tokenizer.ends:
            return True
        if callable(stop):
            return bool(stop(self.index, self.new))
        if last in self.options.stop_ids or not stops:
            return last in self.options.stop_ids
        n = 4 * max(map(len, stops)) + 16  # at most 4 tokens a character
        before = [*self.prompt, *self.new[:-n]][-16:]  # for the spaces between tokens
        known = self.tokenizer.decode(before)
        text = self.tokenizer.decode([*before, *self.new[-n:]])
        begin = next((i for i, (a, b) in enumerate(zip(known, text)) if a != b), len(known))
        return any(stop in text[begin:] for stop in stops)

    def pieces(self, new: Iterable[int]) -> Iterator[str]:
        """The text of new tokens, up to an end token or stop string."""
        tokenizer, prompt, stops = self.tokenizer, self.text or "", self.options.stop_strings
        known = (token for token in new if token not in tokenizer.ends)
        found = tokenizer.stream_decode(known, self.prompt if prompt else ())
        if prompt[-1:].isspace() and not tokenizer.decode(self.prompt)[-1:].isspace():
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
