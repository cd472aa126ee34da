"""Generate text with a KV cache, one row for each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from inference.sampling import ENDED, Prompt
from inference.serve import Scheduler
from model import GPT

Prompts = str | Tensor | Sequence[Prompt]


def generate(model: GPT, idx: Prompts, max_new_tokens: int, **options: Any) -> Any:
    """Append up to `max_new_tokens` tokens to each prompt; arguments as in stream().

    Returns (B, T + n) int64 for a tensor, an ended row's last token repeated; a list of (T_i +
    n_i,) int64 for a list; for texts whole texts, up to an end token or stop string.
    """
    scheduler = Scheduler(model, idx, max_new_tokens, samples=None, **options)
    rows = {row.index: row for row in scheduler.progress()}
    made: list[Any] = [
        torch.tensor([*row.prompt, *row.new], device=scheduler.device) if row.text is None
        else "".join([row.text, *row.pieces(row.new)])
        for row in rows.values()
    ]  # fmt: skip
    if not isinstance(idx, Tensor):
        return made[0] if isinstance(idx, str) else made
    longest = max(map(len, made))
    return torch.stack([torch.cat([t, t[-1:].expand(longest - len(t))]) for t in made])


def stream(model: GPT, idx: Prompts, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
    """Sample tokens one at a time.

    idx: (B, T) int64, a list of prompts (T,), one text or several.
    generator: one for each row, or for all. None: PyTorch's own.
    kv_cache, compile: docs/GENERATE.md; page_size: tokens of a page; options: sampling.Options.
    Yields (B,) int64 on the CPU; ENDED (-1) for a row that has ended.
    Raises ValueError: an option is out of range, a prompt is empty, or no match is short enough.
    """
    scheduler = Scheduler(model, idx, max_new_tokens, samples=None, **options)
    n = 1 if isinstance(idx, str) else len(idx)
    # A prompt that waits for a shared prefix is a token late.
    ready: list[deque[int]] = [deque() for _ in range(n)]
    with closing(scheduler.progress()) as rows:
        for row in rows:
            ready[row.index] += [*row.new[-1:], *[ENDED] * row.ended]
            while all(ready):
                got = [of[0] if of[0] == ENDED else of.popleft() for of in ready]
                if set(got) == {ENDED}:
                    return
                yield torch.tensor(got)
