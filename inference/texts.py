"""Generation of text for sample.py."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from core.runtime import synchronize
from core.settings import UserError
from inference import constrain, engine, serve
from inference.sampling import ENDED, Stats

if TYPE_CHECKING:
    from model import GPT


@dataclass
class Prompt:
    text: str
    where: str = ""  # "prompts.txt:3: ", for messages
    ids: list[int] = field(default_factory=list)


@dataclass
class Text:
    prompt: Prompt
    seed: int
    new: list[int] = field(default_factory=list)
    finish: str = "waiting"  # then "interrupted", at the end "stop" or "length"

    @property
    def done(self) -> bool:
        return self.finish in ("stop", "length")


@dataclass
class Writer:
    """Generates the texts, some at a time."""

    model: GPT
    tokenizer: Any
    texts: list[Text]
    config: Any  # a SampleConfig
    constraint: constrain.Automaton | None
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    first: float = 0.0  # seconds to the first token

    def steps(self) -> Generator[None, None, None]:
        """Generate; each step adds one token to a text."""
        device = self.model.transformer.wte.weight.device
        begin = time.perf_counter()
        try:
            for text, token in self.tokens(device):
                self.first = self.first or time.perf_counter() - begin
                self.add(text, token)
                yield
        finally:
            synchronize(device)
            self.seconds = time.perf_counter() - begin

    def tokens(self, device: torch.device) -> Iterator[tuple[Text, int]]:
        config, texts = self.config, self.texts
        size = 1 if config.stream else config.batch_size
        options: dict[str, Any] = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "vocab_size": self.tokenizer.vocab_size,
            "overflow": config.overflow,
            "constraint": self.constraint,
            "stop": lambda _, new: self.stops(new),
            "stats": self.stats,
        }
        generators = (torch.Generator(device).manual_seed(text.seed) for text in texts)
        if config.kv_cache == "paged":
            ids = [text.prompt.ids for text in texts]
            options["n_pages"] = config.n_pages or serve.enough_pages(
                self.model, map(len, ids), config.max_new_tokens, size
            )
            options |= {"generator": generators, "slots": size}
            for n, token in serve.stream(self.model, ids, config.max_new_tokens, **options):
                yield texts[n], token
            return
        options |= {"kv_cache": config.kv_cache, "compile": config.compile}
        for at in range(0, len(texts), size):
            batch = texts[at : at + size]
            options["generator"] = list(islice(generators, len(batch)))
            ids = [text.prompt.ids for text in batch]
            for step in engine.stream(self.model, ids, config.max_new_tokens, **options):
                yield from zip(batch, step.tolist(), strict=True)
            yield from ((text, ENDED) for text in batch)

    def add(self, text: Text, token: int) -> None:
        if token == ENDED:
            if not text.done:
                text.finish = "length" if self.constraint is None else "stop"
            return
        text.new.append(token)
        text.finish = "stop" if self.stops(text.new) else "interrupted"
        if token == self.tokenizer.eot:
            text.new.pop()

    def stops(self, new: list[int]) -> bool:
        """True if the text ends with the end-of-text token or contains --stop."""
        stop = self.config.stop
        if new[-1] == self.tokenizer.eot or stop is None:
            return new[-1] == self.tokenizer.eot
        last = new[-len(stop.encode()) :]  # no token is shorter than a byte
        return stop in self.tokenizer.decode(last)

    def report(self) -> str:
        texts = sum(text.finish != "waiting" for text in self.texts)
        n, s = sum(len(text.new) for text in self.texts), self.stats
        cache = f"{s.cache_bytes / 1e6:.1f} MB" if s.cache_bytes else "not used"
        if s.pages:
            cache += f", {s.pages} of {s.all_pages} pages in use at most"
            cache += f", {s.shared_pages} saved by sharing"
        return (
            f"{texts} text{'s' * (texts != 1)}, {n} tokens in {self.seconds:.2f} s: "
            f"{n / max(self.seconds, 1e-9):.1f} tokens/s, first token after "
            f"{1e3 * self.first:.0f} ms; KV cache ({self.config.kv_cache}): {cache}"
        )


def continuation(
    model: GPT, tokenizer: Any, start: str, max_new_tokens: int, *, seed: int, **options: Any
) -> str:
    """`start` and its continuation; options as sampling.Options.

    Begins with token 0 if the vocabulary lacks a character of `start`.
    """
    try:
        ids = tokenizer.encode(start)
    except UserError:
        ids = [0]
    generator = torch.Generator(model.transformer.wte.weight.device).manual_seed(seed)
    options |= {"generator": generator, "vocab_size": tokenizer.vocab_size}
    (text,) = engine.generate(model, [ids], max_new_tokens, **options)
    return tokenizer.decode(text.tolist())


def before(stop: str | None, pieces: Iterable[str]) -> Iterator[str]:
    """Yield the text before `stop`; a possible prefix of `stop` is held back."""
    held = ""
    for piece in pieces:
        held += piece
        if stop is None:
            sure = len(held)
        elif stop in held:
            yield held.partition(stop)[0]
            return
        else:
            sure = len(held) - next(n for n in range(len(stop), -1, -1) if held.endswith(stop[:n]))
        if sure:
            yield held[:sure]
            held = held[sure:]
    if held:
        yield held
