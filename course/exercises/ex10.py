"""Exercise 10: attention over keys of several processes."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import causal, draws, same, several

MISTAKES = [
    ("share * O + share_new * O_new", "(O + O_new) / 2",
     "Weight each by its share, exp(L - L_of_both)"),
    ("share * O + share_new * O_new", "share_new * O + share * O_new", "The shares are swapped"),
    ("torch.logaddexp(L, L_new)", "torch.log(torch.exp(L) + torch.exp(L_new))",
     "exp(L) overflows above 88: use logaddexp"),
    (".nan_to_num()", "", "O is NaN, since -inf - (-inf) is NaN: its share is any finite number"),
    ("torch.logaddexp(L, L_new)", "torch.maximum(L, L_new)", "L is logaddexp of both"),
    ("S - L[:, None]", "S - S.masked_fill(j > i + offset, -1e30).logsumexp(1, keepdim=True)",
     "L is of the block alone: P = exp(S - L) with the L over ALL keys"),
    ("S - L[:, None]", "S - S.logsumexp(1, keepdim=True)",
     "L is of the block alone: P = exp(S - L) with the L over ALL keys"),
    ("(dout * out).sum(dim=1, keepdim=True)", "(P * dP).sum(dim=1, keepdim=True)",
     "delta is of the block alone: it is rowsum(dout * out), with the out over ALL keys"),
    ("P * (dP - (dout * out).sum(dim=1, keepdim=True))", "P * dP",
     "Subtract delta = rowsum(dout * out) from dP"),
    ("P * (dP - (dout", "(dP - (dout", "Multiply dP - delta by P"),
    (".masked_fill(j > i + offset, 0.0)", "", "The causal mask is missing"),
    ("j > i + offset", "j > i", "Query i sees key j where j <= i + offset, not j <= i"),
    ("tau * (dS @ k)", "dS @ k", "Scale dq by 1 / sqrt(D)"),
    ("tau * (dS.T @ q)", "dS.T @ q", "Scale dk by 1 / sqrt(D)"),
]


def check(answer: ModuleType) -> None:
    never = -math.inf
    both = torch.tensor([[[1.0], [6.0]], [[5.0], [-2.0]]])  # O and O_new
    for parts in (((1.0, 1.0), (1.0, 3.0)), ((1000.0, -900.0), (1001.0, -901.0)),
                 ((2.0, never), (never, 0.5)), ((never, 1.0), (never, 1.0))):
        L = torch.tensor(parts)
        O = both.masked_fill(L[..., None] == never, 0)
        case = f"L = {parts[0]}, L_new = {parts[1]}"
        want_L = L.logsumexp(0)
        shares = torch.exp(L - want_L).nan_to_num()[..., None]
        inputs = (t.clone() for pair in zip(O, L) for t in pair)
        got = several(answer.join(*inputs), 2, "join()")
        same(got[1], want_L, "L", case)
        same(got[0], (shares * O).sum(0), "O", case)
    check_block(answer)


def check_block(answer: ModuleType) -> None:
    for Tq, Tk, offset in ((3, 3, 3), (3, 3, 0), (4, 4, 2), (4, 4, -2), (2, 5, 3)):
        seed = 10 * Tq + Tk + offset
        # The keys before belong to another process, which computes their part of dq.
        (q, dout), (k, v), before = draws(seed, (2, Tq, 4), (2, Tk, 4), (2, 3, 4))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        S = (q @ k.T / 2).masked_fill(~causal(Tq, Tk, offset), -math.inf)
        whole = torch.cat([q.detach() @ before[0].T / 2, S], dim=1)
        out, L = whole.softmax(1) @ torch.cat([before[1], v]), whole.logsumexp(1)
        want = torch.autograd.grad(out, leaves, dout)
        inputs = (t.detach().clone() for t in (dout, q, k, v, out, L))
        got = several(answer.backward_block(*inputs, offset), 3, "backward_block()")
        for g, w, name in zip(got, want, ("dq", "dk", "dv")):
            same(g, w, name, f"Tq = {Tq}, Tk = {Tk}, offset = {offset}")
