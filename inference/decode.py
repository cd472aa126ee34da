"""The decoding loop of engine.py (one batch) and serve.py (continuous batching).

The host never waits before it launches a step: on CUDA the tokens are copied back while the next
step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from inference.cache import Step
from inference.sampling import Generators, Options, SamplingParams, Uniform, sample_token

if TYPE_CHECKING:
    from model import GPT

    Read = tuple[GPT, Tensor, Tensor | None, Step | None, int | None]  # of next_logits()


@dataclass(eq=False)
class Row:
    """The text of one prompt."""

    index: int
    room: int  # tokens that may be drawn
    new: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = not self.room


R = TypeVar("R", bound=Row)
# Rows, and a function that waits for their tokens; None: the rows have no room for a token.
Launched = tuple[Sequence[R], Callable[[], list[int]] | None]


class Decoder(Generic[R]):
    """Generate until each text has ended."""

    def __init__(self, model: GPT, options: Options) -> None:
        self.model, self.options = model, options
        self.device = model.transformer.wte.weight.device
        self.block_size = model.config.block_size
        self.params = SamplingParams.on(self.device, options)
        self.stops = options.ends()
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

    def _read(self, rows: Sequence[R], tokens: Callable[[], list[int]] | None) -> Sequence[R]:
        if tokens is None:
            return rows
        got = []
        for row, token in zip(rows, tokens(), strict=True):
            if not row.ended:  # else the step was launched before its end was known
                row.new.append(token)
                row.ended = len(row.new) == row.room or self.stops(row.index, row.new)
                got.append(row)
        return got

    def uniform(self, B: int, generator: Generators | None) -> Uniform | None:
        return None if self.options.temperature == 0 else Uniform(B, self.device, generator)


def next_logits(
    model: GPT, idx: Tensor, last: Tensor | None, step: Step | None, vocab_size: int | None
) -> Tensor:
    """The logits (B, V) after each row of idx (B, T), which ends at column last (B, 1)."""
    x = model.hidden(idx, None, step)
    if last is not None:
        x = x.gather(1, last[:, :, None].expand(-1, 1, x.shape[2]))
    return model.head(x[:, -1])[:, :vocab_size]


def next_token(read: Read, u: Tensor | None, params: SamplingParams) -> Tensor:
    """next_logits(*read) and sample_token(): one graph if compiled."""
    return sample_token(next_logits(*read), u, params)


def to_host(token: Tensor) -> Callable[[], list[int]]:
    """Start to copy a step's tokens (B,) to the host; returns a function that waits for them."""
    if not token.is_cuda:
        return token.tolist
    host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
    host.copy_(token, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(token.device))

    def wait() -> list[int]:
        event.synchronize()
        return host.tolist()

    return wait
