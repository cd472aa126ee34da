"""The decoding loop of engine.py (one batch) and serve.py (continuous batching).

Model, logits processor, constraint, sampling. Unless the processor does, the host never waits
before it launches a step: on CUDA the tokens are copied back while the next step runs.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from inference.cache import Step
from inference.constrain import END, Automaton, combined
from inference.sampling import (
    INVALID,
    Generators,
    Options,
    Processor,
    SamplingParams,
    Uniform,
    sample_token,
)

if TYPE_CHECKING:
    from model import GPT

    Read = tuple[GPT, Tensor, Tensor | None, Step | None, int | None]  # of next_logits()

Texts = tuple[Processor, Tensor, Tensor]  # a processor, its tokens (B, N) and lengths (B,)
How = tuple[SamplingParams, Automaton | None, Tensor | None, Tensor | None]  # of sample_step()
Drawn = tuple[Tensor, Tensor | None, Tensor | None]  # see sample_step()


@dataclass(eq=False)
class Row:
    """The text of one prompt."""

    index: int
    room: int  # tokens that may be drawn
    new: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = not self.room


R = TypeVar("R", bound=Row)
# Rows, and a function that waits for their tokens: [token] a row, with a constraint [token, 1 if it
# ends the text]. None: the rows have no room for a token.
Launched = tuple[Sequence[R], Callable[[], list[list[int]]] | None]


class Decoder(Generic[R]):
    """Generate until each text has ended."""

    def __init__(self, model: GPT, options: Options) -> None:
        self.model, self.options = model, options
        self.device = model.transformer.wte.weight.device
        self.block_size = model.config.block_size
        self.stops = options.ends(model.config.vocab_size)
        self.params = SamplingParams.on(self.device, options)
        given = options.constraint
        self.constraint = combined(given) if isinstance(given, Sequence) else given
        if self.constraint is not None:
            self.constraint.to(self.device)
        # A processor with a parameter `lengths` is part of the step (docs/GENERATE.md).
        called = getattr(options.logits_processor, "forward", options.logits_processor)
        self.in_step = called is not None and "lengths" in inspect.signature(called).parameters
        self.ahead = 1 if self.device.type == "cuda" else 0  # steps launched before one is read

    def launch(self) -> Iterator[Launched[R]]:
        """Sample a token for each row on the device."""
        raise NotImplementedError

    def steps(self) -> Iterator[Sequence[R]]:
        """The rows of each step whose `new` has grown."""
        pending: deque[Launched[R]] = deque()
        for step in self.launch():
            pending.append(step)
            if len(pending) > self.ahead:
                yield self._read(*pending.popleft())
        for step in pending:
            yield self._read(*step)

    def _read(self, rows: Sequence[R], tokens: Callable[[], list[list[int]]] | None) -> Sequence[R]:
        if tokens is None:
            return rows
        got = []
        for row, (token, *over) in zip(rows, tokens(), strict=True):
            if token == INVALID and not row.ended:
                raise UserError(
                    f"no token can follow text {row.index}: its logits contain NaN, or all are "
                    "-infinity (by the model, or by a logits_processor)"
                )
            if not row.ended:  # else the step was launched before its end was known
                row.new.append(token)
                over.append(len(row.new) == row.room)
                row.ended = any(over) or self.stops(row.index, row.new)
                got.append(row)
        return got

    def uniform(self, B: int, generator: Generators | None) -> Uniform | None:
        return None if self.options.temperature == 0 else Uniform(B, self.device, generator)

    def processed(self, logits: Tensor, texts: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Apply a processor without lengths to logits (B, V), to the rows of one length at a time.
        Row b is texts[b, begin : end], with spans[b]."""
        processor, logits = self.options.logits_processor, logits.float()
        assert processor is not None
        if len(set(spans)) == 1:
            return process(processor, texts[:, slice(*spans[0])], logits)
        made = torch.empty_like(logits)
        for span in dict.fromkeys(spans):
            of = torch.tensor([b for b, other in enumerate(spans) if other == span])
            rows = to_device(of, self.device)
            made[rows] = process(processor, texts[rows, slice(*span)], logits[rows])
        return made


def process(processor: Processor, tokens: Tensor, logits: Tensor, **lengths: Tensor) -> Tensor:
    """The processor's logits, in the dtype of its input. Raises ValueError for another shape."""
    made = processor(tokens, logits, **lengths)
    got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if got != (want := tuple(logits.shape)):
        raise ValueError(f"logits_processor: expected logits {want}, got {got}")
    return made.to(logits.dtype)


def next_logits(
    model: GPT, idx: Tensor, last: Tensor | None, step: Step | None, vocab_size: int | None
) -> Tensor:
    """The logits (B, V) after each row of idx (B, T), which ends at column last (B, 1)."""
    x = model.hidden(idx, None, step)
    if last is not None:
        x = x.gather(1, last[:, :, None].expand(-1, 1, x.shape[2]))
    return model.head(x[:, -1])[:, :vocab_size]


def sample_step(logits: Tensor, how: How, texts: Texts | None = None) -> Drawn:
    """Sample: token (B,) int64, next state (B, 2), (B,) bool: the constraint ends the text."""
    params, constraint, state, u = how
    if texts is not None:
        processor, tokens, lengths = texts
        logits = process(processor, tokens, logits.float(), lengths=lengths)
    if constraint is None or state is None:
        return sample_token(logits, u, params), None, None
    token = sample_token(constraint(logits, state), u, params)
    state = constraint.advance(state, token)
    return token, state, state[:, 0] == END


def next_token(read: Read, how: How, texts: Texts | None) -> Drawn:
    """next_logits(*read) and sample_step(): one graph if compiled."""
    return sample_step(next_logits(*read), how, texts)


def to_host(token: Tensor, over: Tensor | None) -> Callable[[], list[list[int]]]:
    """Start to copy a step's tokens to the host; returns a function that waits for them."""
    drawn = token[:, None] if over is None else torch.stack([token, over], dim=1)
    if not drawn.is_cuda:
        return drawn.tolist
    host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(drawn.device))

    def wait() -> list[list[int]]:
        event.synchronize()
        return host.tolist()

    return wait
