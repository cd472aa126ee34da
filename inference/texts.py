"""Generation of text for sample.py."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attention.machine.system import synchronize
from inference import engine, serve
from inference.sampling import ENDED, Options

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model import GPT


@dataclass
class Text:
    prompt: str
    ids: list[int]  # of the prompt
    seed: int
    new: list[int] = field(default_factory=list)
    finish: str = "waiting"  # then "interrupted", at the end "stop" or "length"

    @property
    def done(self) -> bool:
        return self.finish in ("stop", "length")


@dataclass
class Writer:
    """Generates the texts, batch_size at a time."""

    model: GPT
    tokenizer: Tokenizer
    texts: list[Text]
    options: Options
    max_new_tokens: int
    batch_size: int
    kv_cache: str
    compile: bool
    n_pages: int | None
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
        model, texts, most, size = self.model, self.texts, self.max_new_tokens, self.batch_size
        options = vars(self.options) | {"stop": self.tokenizer.ends}
        ids = [text.ids for text in texts]
        seeds = [text.seed % 2**64 for text in texts]  # as PyTorch reads a negative one
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        if self.kv_cache == "paged":
            n = self.n_pages or serve.enough_pages(model, map(len, ids), most, size)
            options |= {"generator": generators, "slots": size, "n_pages": n}
            for index, token in serve.stream(model, ids, most, **options):
                yield texts[index], token
            return
        options |= {"kv_cache": self.kv_cache, "compile": self.compile}
        for at in range(0, len(texts), size):
            batch = slice(at, at + size)
            options["generator"] = generators[batch]
            for step in engine.stream(model, ids[batch], most, **options):
                yield from zip(texts[batch], step.tolist(), strict=True)
            yield from ((text, ENDED) for text in texts[batch])

    def add(self, text: Text, token: int) -> None:
        if token != ENDED:
            if token in self.tokenizer.ends:
                text.finish = "stop"
            else:
                text.finish = "interrupted"
                text.new.append(token)
        elif not text.done:
            text.finish = "length" if self.options.constraint is None else "stop"

    def report(self) -> str:
        texts = sum(text.finish != "waiting" for text in self.texts)
        n, s = sum(len(text.new) for text in self.texts), self.options.stats
        cache = f"{s.cache_bytes / 1e6:.1f} MB" if s.cache_bytes else "not used"
        if s.pages:
            cache += f", {s.pages} of {s.all_pages} pages used, {s.shared_pages} shared"
        return (
            f"{texts} texts, {n} tokens in {self.seconds:.2f} s: "
            f"{n / max(self.seconds, 1e-9):.1f} tokens/s, first token after "
            f"{1e3 * self.first:.0f} ms; KV cache ({self.kv_cache}): {cache}"
        )
