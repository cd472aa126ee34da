"""Attention maps P = softmax(Q K^T / sqrt(D)), which a fused kernel never materializes.

Hooks capture the q, k and v of each layer; attention.weights() recomputes P, tiled.py the scores S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import attention
from attention import Spec, manual, masks, tiled
from attention.truth import allowed_error
from model import GPT
from viewer.document import Agreement, Maps, Tiles, pack

FINE = 5_000_000  # weights stored in 16 bits, else in 8; GPT-2 at 256 tokens has 4.7 million
MOST_SCORES = 1_000_000  # stored, 4 MB: GPT-2 at 117 tokens
COMPONENTS = 4  # of v and the output
EARLY = 8  # queries that see few keys: their entropy is low in any head


@dataclass(frozen=True)
class Call:
    """The inputs and output of one layer's attention. One sequence: B = 1."""

    q: Tensor  # (1, T, H, D)
    k: Tensor  # (1, Tk, Hkv, D)
    v: Tensor  # (1, Tk, Hkv, D)
    out: Tensor  # (1, T, H, D)
    spec: Spec
    segments: Tensor | None  # (1, T) int32


@contextmanager
def watched(model: GPT) -> Iterator[list[Call]]:
    """A list to which each layer appends a Call while the model runs inside."""
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...]:
        x, attend, *rest = args

        def noted(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *,
                  segments: Tensor | None = None, **more: object) -> Tensor:  # fmt: skip
            out: Tensor = attend(q, k, v, spec, segments=segments, **more)
            calls.append(Call(q, k, v, out, spec, segments))
            return out

        return x, noted, *rest

    hooks = [block.attn.register_forward_pre_hook(hook) for block in model.transformer.h]
    try:
        yield calls
    finally:
        for h in hooks:
            h.remove()


def maps(calls: list[Call]) -> Maps:
    T, H = calls[0].q.shape[1:3]
    levels = 65535 if len(calls) * H * T * (T + 1) // 2 <= FINE else 255
    lower = torch.tril_indices(T, T)
    P = [weights(call).cpu() for call in calls]
    cells = [x[:, lower[0], lower[1]].numpy() for x in P]
    late = slice(min(EARLY, T // 2), None)
    kind = np.uint16 if levels > 255 else np.uint8
    return {
        "weights": pack(np.stack([np.rint(x * levels).astype(kind) for x in cells])),
        "levels": levels,
        "seen": [seen(T, call.spec.window, call.segments) for call in calls],
        "layers": [agreement(call) for call in calls],
        "entropy": [torch.special.entr(x[:, late]).sum(dim=-1).mean(dim=-1).tolist() for x in P],
    }


def tiles(calls: list[Call]) -> Tiles:
    """The scores of all heads, and some components of v and out, for the page's recurrence."""
    T, H = calls[0].q.shape[1:3]
    pairs = MOST_SCORES // (len(calls) * H)
    N = min(T, (math.isqrt(8 * pairs + 1) - 1) // 2)  # N (N + 1) / 2 pairs
    lower = torch.tril_indices(N, N)
    S = [scores(call, N)[:, lower[0], lower[1]] for call in calls]
    v, out = (
        [t[0, :N, :, :COMPONENTS].transpose(0, 1).float().cpu() for t in ts]
        for ts in ([call.v for call in calls], [call.out for call in calls])
    )
    found = [pack(torch.stack(x).numpy()) for x in (S, v, out)]
    return {"scores": found[0], "v": found[1], "out": found[2]}


def scores(call: Call, N: int) -> Tensor:
    """S of every head for the first N tokens, (H, N, N) float32: tiled's only tile of that size."""
    found: list[Tensor] = []
    q, k, v = (t[:, :N].float().cpu() for t in (call.q, call.k, call.v))
    pair = None if call.segments is None else (call.segments[:, :N].cpu(),) * 2
    tiled.forward_tiles(q, k, v, replace(call.spec, dtype="float32"), segments=pair, B_r=N, B_c=N,
                        on_tile=lambda i, j, S, *_: found.append(S.flatten(1, 2)[0]))  # fmt: skip
    return found[0]


def weights(call: Call) -> Tensor:
    """P of every head, (H, T, T) float32."""
    spec = replace(call.spec, dtype="float32")
    return attention.weights(call.q.float(), call.k.float(), spec, segments=call.segments)[0]


def seen(T: int, window: int | None, segments: Tensor | None) -> list[list[int]]:
    """[first, stop) of the keys that each query sees."""
    seg = None if segments is None else segments.cpu()
    sees = masks.mask(T, T, window, seg, torch.device("cpu"))[0, 0]
    first, count = sees.int().argmax(dim=1), sees.sum(dim=1)
    runs = [[int(a), int(a + n)] for a, n in zip(first, count, strict=True)]
    assert all(bool(sees[i, a:b].all()) for i, (a, b) in enumerate(runs)), "not one run"
    return runs


def agreement(call: Call) -> Agreement:
    """One layer's output compared with manual in float64."""
    device = "cpu" if call.q.device.type == "mps" else call.q.device  # Metal has no float64
    q, k, v = (t.to(device).double() for t in (call.q, call.k, call.v))
    seg = None if call.segments is None else call.segments.to(device)
    exact = manual.attend(q, k, v, replace(call.spec, dtype="float64"), segments=seg)
    heads = off(call.out, exact).amax(dim=(0, 1, 3))  # (H,)
    plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)
    manual_error, largest = float(off(plain, exact).max()), float(exact.abs().max())
    allowed, error = allowed_error(manual_error, largest, largest, call.q.dtype), float(heads.max())
    agrees = error <= allowed
    return {"error": error, "allowed": allowed, "agrees": agrees, "heads": heads.tolist()}


def off(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in float64, on the CPU."""
    return (a.cpu().double() - b.cpu().double()).abs()
