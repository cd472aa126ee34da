"""Exercise 3: attention of many queries and heads, with a mask, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import Wrong, call, same, show, small

NAMES = ("attention",)
TASK = """
Attention by the formula, with masks and shared heads

Write

    attention(q, k, v, seen)

    q      (Tq, H, D)
    k, v   (Tk, Hkv, D). H is a multiple of Hkv: query head h reads the keys and values of head
           h // (H / Hkv), so that neighbouring query heads share them
    seen   (Tq, Tk), bool: may query i see key j?

    returns (Tq, H, D): for each query and head the values that it sees, weighted by the softmax
    of q . k / sqrt(D) over the keys that it sees

A query that sees no key gives zeros. Autograd must work through your function: gradients are finite
everywhere, and zero for a query that sees nothing. torch.softmax is allowed now;
scaled_dot_product_attention is not the point.
"""
START = '''
import math

import torch


def attention(q, k, v, seen):
    """q: (Tq, H, D); k, v: (Tk, Hkv, D); seen: (Tq, Tk). Returns (Tq, H, D)."""
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])  # for Hkv = H only
    probs = torch.softmax(scores, dim=-1)  # of all keys, seen or not
    return torch.einsum("hij,jhd->ihd", probs, v)
'''


def check(answer: Any) -> None:
    """Causal, then with shared heads, then with rows that see nothing; values and gradients."""
    draw = torch.Generator().manual_seed(0)
    blind = torch.ones(4, 3).tril(-1).bool()  # the first query sees nothing
    cases = {
        "a causal mask": (2, 2, torch.ones(3, 3).tril().bool()),
        "a causal mask and fewer queries than keys": (1, 1, torch.ones(2, 5).tril(3).bool()),
        "4 query heads on 2 key/value heads": (4, 2, torch.ones(3, 3).tril().bool()),
        "3 query heads on 1 key/value head": (3, 1, torch.ones(2, 2).tril().bool()),
        "a first query that sees nothing": (1, 1, blind),
        "a first query that sees nothing, and shared heads": (4, 2, blind),
    }
    for name, (H, Hkv, seen) in cases.items():
        Tq, Tk = seen.shape
        q, k, v = (
            torch.randn(T, heads, 4, generator=draw) for T, heads in ((Tq, H), (Tk, Hkv), (Tk, Hkv))
        )
        rows = ", ".join(map(show, seen.int()))
        given = f"with {name}: H = {H}, Hkv = {Hkv}, seen = [{rows}]"
        got = call(answer.attention, q, k, v, seen)
        mistakes = typical(q, k, v, seen)
        same(got, by_rows(q, k, v, seen), "out", given, mistakes)

        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        dout = torch.randn(Tq, H, 4, generator=draw)
        out = answer.attention(*leaves, seen.clone())
        if not out.requires_grad:
            raise Wrong("no gradient flows through out: leave .detach(), no_grad() and numpy away")
        try:
            grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        except RuntimeError as e:
            raise Wrong(f"the backward pass fails, {given}: {e}") from None
        true = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
        wants = torch.autograd.grad(by_rows(*true, seen), true, dout)
        for label, grad, want in zip(("dq", "dk", "dv"), grads, wants):
            if grad is None:
                raise Wrong(f"no gradient reaches {label[1:]}, {given}")
            if grad.isnan().any():
                raise Wrong(
                    f"out is right, but {label} is NaN, {given}. A NaN was made on the way and "
                    "replaced: softmax over a row of -inf is 0 / 0, forward and backward. Give "
                    "softmax finite numbers, and make its output zero where nothing is seen"
                )
            same(grad, want, label, given)

    q, k, v = torch.tensor([[[60.0]]]), torch.tensor([[[9.0]], [[10.0]]]), torch.eye(2)[:, :1, None]
    seen = torch.ones(1, 2).bool()
    want = by_rows(q, k, v, seen)
    same(call(answer.attention, q, k, v, seen), want, "out", small(q=q, k=k, v=v, seen=seen))


def by_rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The truth, a row at a time, over the keys that are seen and no others."""
    (Tq, H, D), Hkv = q.shape, k.shape[1]
    rows = []
    for i in range(Tq):
        for h in range(H):
            keys, values = (t[seen[i], h // (H // Hkv)] for t in (k, v))
            p = torch.softmax(keys @ q[i, h] / math.sqrt(D), dim=0)
            rows.append(p @ values + 0 * q[i, h])  # in the graph even where it sees nothing
    return torch.stack(rows).unflatten(0, (Tq, H))


def typical(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """What typical mistakes give."""
    H, D, Hkv = *q.shape[1:], k.shape[1]
    shared = k.repeat_interleave(H // Hkv, dim=1), v.repeat_interleave(H // Hkv, dim=1)
    in_turn = k.repeat(1, H // Hkv, 1), v.repeat(1, H // Hkv, 1)

    def formula(keys: Tensor, values: Tensor, scale: float, hidden: float | None,
                weights: Tensor | float = 1.0) -> Tensor:  # fmt: skip
        s = torch.einsum("ihd,jhd->hij", q, keys) * scale
        p = torch.softmax(s if hidden is None else s.masked_fill(~seen, hidden), dim=-1)
        return torch.einsum("hij,jhd->ihd", p * weights, values)

    least, scale = torch.finfo(q.dtype).min, 1 / math.sqrt(D)
    return {
        "A row that sees nothing is softmax over -inf alone, 0 / 0; it must give zeros": (
            formula(*shared, scale, -math.inf)
        ),
        "A row that sees nothing got equal weights for all keys; it must give zeros": (
            formula(*shared, scale, least)
        ),
        "The mask is left out": formula(*shared, scale, None),
        "The mask came after softmax: hidden keys are still in its sum, and the weights of the "
        "others do not add up to 1": formula(*shared, scale, None, seen),
        "The hidden scores are set to 0, which is a score like any other: exp(0) = 1": (
            formula(*shared, scale, 0.0)
        ),
        "The scores are not divided by sqrt(D)": formula(*shared, 1.0, least, seen),
        "There head h reads key/value head h % Hkv; it must be h // (H / Hkv)": (
            formula(*in_turn, scale, least, seen)
        ),
    }
