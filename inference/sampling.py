"""From logits to a token: temperature, top-k, top-p, and the random numbers they are drawn with.

The tokens share the interval [0, 1), each as wide as it is likely, and a uniform random number
falls into one of them (the inverse of the distribution function). So one random number is needed
for a token, where the Gumbel trick and torch.multinomial draw one for every entry of the
vocabulary; in float64 the shares of the rarest tokens are right too; and a CUDA graph can hold it,
for nothing depends on a value on the host.

What the two loops that generate text (engine.py, serve.py) have in common is here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from core.runtime import to_device

if TYPE_CHECKING:
    from inference.constrain import Automaton
    from model import GPT

T = TypeVar("T")

ENDED = -1  # in the place of a token: this row's text has ended before

Processor = Callable[[Tensor, Tensor], Tensor]
StopCondition = int | Iterable[int] | Callable[[int, list[int]], bool]
Generators = torch.Generator | Sequence[torch.Generator]


@dataclass
class Stats:
    """What a call notes for its caller."""

    cache_bytes: int = 0  # keys and values, the most that were allocated at once
    # Of a paged cache:
    pages: int = 0  # the most that were in use at once
    all_pages: int = 0  # in the pool
    shared_pages: int = 0  # that a prompt found there, computed for another: not taken again


@dataclass
class Options:
    """How each token is drawn, and when a text ends.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: then from the fewest likeliest tokens whose probabilities sum to at least p.
        vocab_size: draw from the first so many tokens only: those beyond the tokenizer's pad the
            vocabulary.
        overflow: "slide" or "stop", where a text reaches block_size tokens.
        logits_processor: (input_ids, logits) -> logits, called before each draw with the text so
            far, (B, T) int64, prompts included, and (B, V); for each row by itself where prompts
            have different lengths, so that it never sees padding, and by serve.py.
        constraint: what the new text must match (constrain.py), on the model's device. Its mask
            comes last, after the logits_processor; a row ends where its match does.
        stop: a row ends with this token, or with one of these; or a function of the row's number
            and its new tokens that says whether it ends here.
        stats: is filled in.

    Raises:
        ValueError: a value that means nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    vocab_size: int | None = None
    overflow: str = "slide"
    logits_processor: Processor | None = None
    constraint: Automaton | None = None
    stop: StopCondition | None = None
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        if self.overflow not in ("slide", "stop"):
            raise ValueError(f"overflow must be one of slide, stop, got {self.overflow!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def room(self, row: int, T: int, max_new_tokens: int, block_size: int) -> int:
        """Tokens that a prompt of T tokens may be followed by; a ValueError if it cannot be."""
        if not T:
            raise ValueError(f"each prompt must have at least one token; prompt {row} has none")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        if self.overflow == "slide":
            return max_new_tokens
        if block_size < T:
            raise ValueError(
                f"a prompt of {T} tokens does not fit into block_size {block_size} (prompt {row})"
            )
        return min(max_new_tokens, block_size - T)

    def ends(self) -> Callable[[int, list[int]], bool]:
        """`stop` in each of its forms, as a function of the row and its new tokens."""
        if callable(self.stop):
            return self.stop
        ids = {self.stop} if isinstance(self.stop, int) else set(self.stop or ())
        return lambda row, new: new[-1] in ids


@dataclass(frozen=True)
class SamplingParams:
    """Temperature and cuts of Options, as sample_token() wants them: numbers that change from call
    to call are tensors, since a Python number would be compiled into the graph."""

    temperature: Tensor | float = 1.0
    top_k: int | None = None
    top_p: Tensor | float | None = None

    @classmethod
    def on(cls, device: torch.device, options: Options) -> SamplingParams:
        top_p = options.top_p if options.top_p != 1 else None
        return cls(
            torch.tensor(float(options.temperature), device=device),
            options.top_k,
            None if top_p is None else torch.tensor(top_p, device=device),
        )


def next_logits(
    model: GPT, idx: Tensor, last: Tensor | None, step: Any, vocab_size: int | None
) -> Tensor:
    """The logits (B, V) of what follows each row of idx (B, T), read into a step of a cache, if
    there is one. last (B, 1): where each row ends; None: at T - 1."""
    x = model.hidden(idx, None, step)
    if last is not None:
        x = x.gather(1, last[:, :, None].expand(-1, 1, x.shape[2]))
    return model.head(x[:, -1])[:, :vocab_size]


def each_alone(processor: Processor, texts: Iterable[Tensor | None], logits: Tensor) -> Tensor:
    """The logits (B, V) after the processor, which is given one text (T,) at a time; None: one that
    has ended, whose logits stay."""
    pairs = zip(texts, logits.split(1), strict=True)
    return torch.cat([one if text is None else processor(text[None], one) for text, one in pairs])


def sample_token(logits: Tensor, u: Tensor | None, params: SamplingParams) -> Tensor:
    """The token that the number u stands for: (B,) int64.

    Args:
        logits: (B, V).
        u: (B,) in [0, 1), see Uniform; None takes the likeliest token.
        params: top_k keeps no more than k of equal tokens; top_p is nucleus sampling (Holtzman et
            al. 2020, arXiv 1904.09751).
    """
    if u is None:
        return logits.argmax(dim=-1)
    logits = logits.float() / params.temperature
    top_k, top_p, order = params.top_k, params.top_p, None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # sorted
        probs = logits.softmax(dim=-1)
    elif top_p is not None:
        probs, order = _likeliest(logits.softmax(dim=-1), top_p)
    else:
        probs = logits.softmax(dim=-1)
    upto = probs.cumsum(dim=-1, dtype=u.dtype)  # (B, V) the mass of a token and all before it
    total = upto[:, -1:]
    if top_p is not None:  # a token stays if those that are likelier have less than top_p together
        total = upto.masked_fill(upto - probs >= top_p, 0.0).amax(dim=-1, keepdim=True)
    # The first whose `upto` is larger: never one of probability 0, and u < 1 keeps it below total.
    at = torch.searchsorted(upto, u[:, None] * total, right=True)  # (B, 1)
    return (at if order is None else order.gather(1, at))[:, 0]


def _likeliest(probs: Tensor, top_p: Tensor | float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in falling order, as many as sum to top_p and maybe more: (B, k) their
    probabilities, (B, k) int64 which they are, of probs (B, V).

    On the CPU, where a look at a value costs nothing, a few are sorted before all of them are: of
    GPT-2's 50,257 tokens a top_p of 0.9 often needs no more than hundreds.
    """
    V = probs.shape[-1]
    if probs.device.type == "cpu" and not torch.compiler.is_compiling():
        for k in (64, 1024, 16384):
            if 2 * k > V:
                break
            some, order = probs.topk(k, dim=-1)  # sorted
            mass = some.sum(dim=-1, dtype=torch.float64)
            if (mass >= top_p + 1e-9).all():
                return some, order
            if (mass < top_p / 10).any():
                break  # so flat that most of the vocabulary is needed
    return probs.sort(dim=-1, descending=True)


def sample_step(
    logits: Tensor,
    params: SamplingParams,
    constraint: Automaton | None,
    u: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draw among the tokens that the constraint allows: the token, the state after it, (B,) bool
    whether the text is over with it."""
    if constraint is None or state is None:
        return sample_token(logits, u, params), None, None
    token = sample_token(constraint(logits, state), u, params)
    state = constraint.advance(state, token)
    return token, state, state[:, 0] == constraint.end


class Uniform:
    """Random numbers in [0, 1), one for each row and step, drawn many steps at a time.

    Args:
        generator: one for each row; or one for all, or None, PyTorch's own: then the rows take
            their blocks from it in turn.
        block: steps at a time. A fixed number, so that a longer text begins like a shorter one.
    """

    def __init__(
        self, B: int, device: torch.device, generator: Generators | None, block: int = 64
    ) -> None:
        generators = generator if isinstance(generator, Sequence) else [generator] * B
        if len(generators) != B:
            raise ValueError(f"{B} rows need as many generators, got {len(generators)}")
        self.generators: Sequence[torch.Generator | None] = generators
        self.device, self.block = device, block
        self.left = self._draw()

    def next(self) -> Tensor:
        """(B,) float64, float32 on MPS."""
        if not self.left:
            self.left = self._draw()
        return self.left.pop()

    def _draw(self) -> list[Tensor]:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        rows = []
        for g in self.generators:
            on = self.device if g is None else g.device
            drawn = torch.rand(self.block, generator=g, dtype=dtype, device=on)
            rows.append(to_device(drawn, self.device))
        return list(torch.stack(rows, dim=1).unbind())[::-1]


class Copy:
    """A copy of a step's tokens to the host; on CUDA it runs beside the next step."""

    def __init__(self, token: Tensor, over: Tensor | None) -> None:
        self.event = None
        drawn = token[:, None] if over is None else torch.stack([token, over], dim=1)
        self.host = drawn
        if drawn.is_cuda:
            self.host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
            self.host.copy_(drawn, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(drawn.device))

    def wait(self) -> list[list[int]]:
        """Of each row its token and, with a constraint, whether the text is over: the one place
        where the host waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def behind(launched: Iterable[T], ahead: int) -> Iterator[T]:
    """Each step when `ahead` more have been launched: the host reads one while the device computes
    the next."""
    pending: deque[T] = deque()
    for step in launched:
        pending.append(step)
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending
