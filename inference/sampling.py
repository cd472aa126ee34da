"""A text in progress; a decode step, from logits to a token.

One random number selects an entry of the cumulative sum, in float64 for rare tokens.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from data.schema import well_formed
from data.tokenizer import CharTokenizer, Tokenizer
from inference.constrain import END, Automaton
from model import GPT

log = logging.getLogger("nanoattn")
ENDED = -1
INVALID = -2  # NaN, or all -inf

Processor = Callable[..., Tensor]
Prompt = Tensor | Sequence[int] | str


@dataclass
class Stats:
    """Peak memory of a call."""

    cache_bytes: int = 0
    pages: int = 0  # in use
    all_pages: int = 0  # in the pool
    shared_pages: int = 0  # of other prompts


@dataclass
class Options:
    """Sampling options and stop conditions. Raises ValueError."""

    n_ids: int  # of the model
    tokenizer: Any  # limits the ids to those with a token
    temperature: float = 1.0  # divides the logits; 0: the likeliest token
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # then the fewest that sum to top_p
    vocab_size: int | None = None  # only the first ids
    unused: Sequence[int] = ()  # ids without a token
    logits_processor: Processor | None = None  # docs/GENERATE.md
    constraint: Automaton | Sequence[Automaton | None] | None = None  # for all, or one a row
    # A token, a string, several of both, or a function (row number, new tokens) -> bool.
    stop: Any = None
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.temperature = in_range("temperature", self.temperature, 0, convert=float)
        if self.top_p is not None:
            self.top_p = in_range("top_p", self.top_p, 5e-324, 1, convert=float)
        for name in ("top_k", "vocab_size"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, in_range(name, value, 1))
        given = self.constraint
        for c in given if isinstance(given, list | tuple) else [given]:
            if not isinstance(c, Automaton | None):
                raise ValueError(f"constraint: expected regex(pattern, tokenizer), got {c!r:.60}")
            if c and (n := len(c.token_class)) != getattr(self.tokenizer, "vocab_size", n):
                raise ValueError(f"constraint: of a tokenizer of {n} tokens, not the model's")
        if self.tokenizer is not None and self.vocab_size is None:
            self.vocab_size = self.tokenizer.vocab_size
            self.unused = [*self.unused, *self.tokenizer.unused]
        sampled = min(self.n_ids, self.vocab_size or self.n_ids)
        self.unused = [in_range("unused", i, 0, sampled - 1) for i in _each(self.unused)]
        entries = [] if callable(self.stop) else _each(self.stop)
        self.stop_strings = [item for item in entries if isinstance(item, str)]
        ids = (item for item in entries if not isinstance(item, str))
        self.stop_ids = [in_range("stop", i, 0, self.n_ids - 1) for i in ids]
        if self.stop_strings:
            needed(self.tokenizer, f"stop: {self.stop_strings[0]!r}")
        if "" in self.stop_strings:
            raise ValueError("stop: expected strings of at least one character, got ''")
        called = getattr(self.logits_processor, "forward", self.logits_processor)
        self.in_step = called is not None and "lengths" in inspect.signature(called).parameters


def needed(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{what} needs a model with a tokenizer, as inference.load() returns")


def in_range(name: str, value: Any, least: float, most: float = math.inf,
             convert: Callable[[Any], Any] = operator.index) -> Any:  # fmt: skip
    """To int or float, also from NumPy or a tensor. Raises ValueError."""
    with suppress(TypeError, ValueError, RuntimeError):
        is_bool = "bool" in str(getattr(value, "dtype", type(value)))
        if not is_bool and least <= (number := convert(value)) <= most:
            return number
    kind = "a number" if convert is float else "an integer"
    raise ValueError(f"{name}: expected {kind} from {least} to {most}, got {value!r:.60}")


def _each(given: Any) -> list[Any]:
    if given is None:
        return []
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0
    return [*given] if several and not isinstance(given, str) else [given]


# --- a text in progress ---


def default_prompt(tokenizer: Tokenizer) -> str:
    """A newline; if no text has one, the first character, or nothing."""
    if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.ids:
        return next(filter(None, tokenizer.vocabulary))
    return "\n" if tokenizer.encode("\n") else ""


def encode(index: int, prompt: Prompt, model: GPT) -> tuple[str | None, list[int]]:
    """Text and tokens. An empty text begins with eot or default_prompt(). Raises ValueError."""
    V, T, tokenizer = model.config.vocab_size, model.config.block_size, model.tokenizer
    text = None
    if isinstance(prompt, str):
        needed(tokenizer, f"the prompt {prompt!r:.60}")
        eot = [] if tokenizer.eot is None else [tokenizer.eot]
        text = prompt if prompt or eot else default_prompt(tokenizer)
        prompt = [*tokenizer.begin, *tokenizer.encode(well_formed(text))]
        prompt = prompt or ([] if text else eot)
        if not prompt:
            raise UserError(f"the prompt {text!r} has no tokens")
        if len(prompt) > T:
            log.warning(f"a prompt has {len(prompt)} tokens: only the last {T} are read")
    ids = torch.as_tensor(prompt)
    several = ids.dim() == 1 and ids.dtype != torch.bool and not ids.is_floating_point()
    tokens: list[int] = ids.tolist() if several else []
    if not tokens or not 0 <= min(tokens) <= max(tokens) < V:
        want = f"at least one token, integers (T,) from 0 to {V - 1}"
        raise ValueError(f"prompt {index}: expected {want}, got {prompt!r:.60}")
    return text, tokens


class Row:
    """A text in progress."""

    def __init__(self, index: int, prompt: tuple[str | None, list[int]], room: int,
                 generator: torch.Generator | None, device: torch.device,
                 options: Options) -> None:  # fmt: skip
        self.index, self.room, self.options = index, room, options
        self.text, self.prompt = prompt
        self.random = uniform(device, generator) if options.temperature else None
        self.tokenizer = options.tokenizer
        self.new: list[int] = []  # at most `room`
        self.slot = -1
        self.stored = 0  # tokens in the cache
        self.ended = not room  # as far as the host knows
        self.n = len(self.prompt)  # of the text, on the device too
        self.most = self.n + room - 1  # that the model may read: all but the last

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
        text = self.tokenizer.new_text(before, self.new[-n:])
        return any(stop in text for stop in stops)

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


# --- a step ---


class Draw(NamedTuple):
    """Tensors: a graph would keep plain numbers as constants."""

    temperature: Tensor
    top_k: int | None
    top_p: Tensor | None
    unused: Tensor | None
    constraint: Automaton | None = None
    state: Tensor | None = None  # of the constraint, (B, 2)
    u: Tensor | None = None  # (B,); None: the likeliest
    processor: Processor | None = None  # in the step
    tokens: Tensor | None = None  # (B, N)
    lengths: Tensor | None = None  # (B,)

    @classmethod
    def by(cls, options: Options, device: torch.device) -> Draw:
        def tensor(value: float) -> Tensor:  # beyond: 0 or infinity in float32
            return torch.tensor(min(max(1e-20, value), 1e30), device=device)

        top_p = None if options.top_p in (None, 1) else tensor(options.top_p)
        unused = torch.tensor(options.unused, device=device) if options.unused else None
        return cls(tensor(options.temperature), options.top_k, top_p, unused)


def sample_token(logits: Tensor, draw: Draw) -> Tensor:
    """Sample from logits (B, V). Returns (B,) int64 or INVALID. top_p: Holtzman et al. 2020, arXiv
    1904.09751."""
    u, top_k, top_p, order = draw.u, draw.top_k, draw.top_p, None
    if draw.unused is not None:
        logits = logits.index_fill(-1, draw.unused, -torch.inf)
    if u is None:
        best, token = logits.max(dim=-1)  # NaN if there is one
        return torch.where(best > -torch.inf, token, INVALID)
    logits = logits.float() / draw.temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)
    probs = logits.softmax(dim=-1)
    if top_p is not None and order is None:
        probs, order = _likeliest(probs, top_p)
    upto = probs.cumsum(dim=-1, dtype=u.dtype)  # (B, V)
    total = upto[:, -1:]
    if top_p is not None:  # while likelier ones sum to less
        total = upto.masked_fill(upto - probs >= top_p, 0.0).amax(dim=-1, keepdim=True)
    # The first entry above u: never one of probability 0.
    at = torch.searchsorted(upto, u[:, None] * total, right=True)  # (B, 1)
    at = at.clamp(max=upto.shape[-1] - 1)  # NaN
    return torch.where(total > 0, at if order is None else order.gather(1, at), INVALID)[:, 0]


def _likeliest(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted probabilities and ids (B, k) of the likeliest tokens, which sum to top_p or more."""
    if probs.device.type == "cpu" and probs.shape[-1] > 2048 and not torch.compiler.is_compiling():
        some, order = probs.topk(1024, dim=-1)  # faster than a sort
        if (some.sum(dim=-1, dtype=torch.float64) >= top_p + 1e-9).all():
            return some, order
    return probs.sort(dim=-1, descending=True)


def uniform(device: torch.device, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Random numbers in [0, 1), (1,) float64 a step, float32 on MPS."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    on = device if generator is None else generator.device

    def draw() -> Tensor:
        return to_device(torch.rand(64, 1, generator=generator, dtype=dtype, device=on), device)

    # The first at once: rows with one generator draw in order.
    return chain.from_iterable(chain([draw()], iter(draw, None)))


def next_logits(model: GPT, idx: Tensor, last: Tensor | None, step: Any,
                vocab_size: int | None) -> Tensor:  # fmt: skip
    """Logits (B, V) after each row of idx (B, T), which ends at column last (B, 1)."""
    x = model.hidden(idx, None, step)
    if last is not None:
        x = x.gather(1, last[:, :, None].expand(-1, 1, x.shape[2]))
    return model.head(x[:, -1])[:, :vocab_size]


def sample_step(draw: Draw, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens (B,) int64, next states (B, 2), (B,) bool: the constraint ends the text."""
    constraint, state = draw.constraint, draw.state
    if draw.processor is not None:
        logits = process(draw.processor, draw.tokens, logits.float(), lengths=draw.lengths)
    if constraint is None or state is None:
        return sample_token(logits, draw), None, None
    token = sample_token(constraint(logits, state), draw)
    state = constraint.advance(state, token)
    return token, state, state[:, 0] == END


def next_token(draw: Draw, *read: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return sample_step(draw, next_logits(*read))


def process(processor: Processor, tokens: Any, logits: Tensor, **lengths: Any) -> Tensor:
    made = processor(tokens, logits, **lengths)
    got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if got != (want := tuple(logits.shape)):
        raise ValueError(f"logits_processor: expected logits {want}, got {got}")
    return made.to(logits.dtype)


def process_rows(processor: Processor, texts: Tensor, logits: Tensor,
                 lengths: Sequence[int]) -> Tensor:  # fmt: skip
    """Process logits (B, V) of texts[b, : lengths[b]], rows of one length at once."""
    logits = logits.float()
    made = torch.empty_like(logits)
    for n in dict.fromkeys(lengths):
        rows = to_device([b for b, other in enumerate(lengths) if other == n], logits.device)
        made[rows] = process(processor, texts[rows, :n], logits[rows])
    return made


def to_host(token: Tensor, over: Tensor | None) -> Callable[[], list[list[int]]]:
    """Copy to the host; the returned function waits for rows [token], or [token, ends the text]."""
    drawn = token[:, None] if over is None else torch.stack([token, over], dim=1)
    if not drawn.is_cuda:
        return drawn.tolist
    host = drawn.to("cpu", non_blocking=True)  # into pinned memory
    event = torch.cuda.current_stream(drawn.device).record_event()

    def wait() -> list[list[int]]:
        event.synchronize()
        return host.tolist()

    return wait
