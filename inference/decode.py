"""A decode step: model, logits processor, constraint, sampling. The device never waits in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.runtime import to_device
from inference.cache import Step
from inference.constrain import END, Automaton
from inference.sampling import Processor, SamplingParams, sample_token

if TYPE_CHECKING:
    from model import GPT

    Read = tuple[GPT, Tensor, Tensor | None, Step | None, int | None]  # of next_logits()

Texts = tuple[Processor, Tensor, Tensor]  # a processor, its tokens (B, N) and lengths (B,)
How = tuple[SamplingParams, Automaton | None, Tensor | None, Tensor | None]  # of sample_step()
Drawn = tuple[Tensor, Tensor | None, Tensor | None]  # see sample_step()


def next_logits(read: Read) -> Tensor:
    """The logits (B, V) after each row of idx (B, T), which ends at column last (B, 1)."""
    model, idx, last, step, vocab_size = read
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
    """next_logits(read) and sample_step(): one graph if compiled or captured."""
    return sample_step(next_logits(read), how, texts)


def process(processor: Processor, tokens: Tensor, logits: Tensor, **lengths: Tensor) -> Tensor:
    """The processor's logits, in the dtype of its input. Raises ValueError for another shape."""
    made = processor(tokens, logits, **lengths)
    got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if got != (want := tuple(logits.shape)):
        raise ValueError(f"logits_processor: expected logits {want}, got {got}")
    return made.to(logits.dtype)


def process_rows(
    processor: Processor, texts: Tensor, logits: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Apply a processor without lengths to logits (B, V), to the rows of one length at a time; row
    b is texts[b, : lengths[b]]."""
    logits = logits.float()
    made = torch.empty_like(logits)
    for n in dict.fromkeys(lengths):
        of = torch.tensor([b for b, other in enumerate(lengths) if other == n])
        rows = to_device(of, logits.device)
        made[rows] = process(processor, texts[rows, :n], logits[rows])
    return made


def to_host(token: Tensor, over: Tensor | None) -> Callable[[], list[list[int]]]:
    """Start to copy a step's tokens to the host; returns a function that waits for them: [token] a
    row, with a constraint [token, 1 if it ends the text]."""
    drawn = token[:, None] if over is None else torch.stack([token, over], dim=1)
    if not drawn.is_cuda:
        return drawn.tolist
    host = drawn.to("cpu", non_blocking=True)  # into pinned memory
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(drawn.device))

    def wait() -> list[list[int]]:
        event.synchronize()
        return host.tolist()

    return wait
