"""Exercise 6: gradients of attention from out and L, block by block."""

from __future__ import annotations

from types import ModuleType

import torch

from course.exercises.check import Live, causal, draws, reference, same, several

MISTAKES = [
    ("P * (dP - delta)", "P * dP", "Subtract delta, the row sums of dout * out, from dP"),
    ("P * (dP - delta)", "dP - delta", "Multiply dP - delta by P"),
    ("P * (dP - delta)", "P * (1 - P) * dP",
     "The derivative of softmax is not diagonal: dS = P * (dP - delta)"),
    ("P * (dP - delta)", "P * (dP - (P * dP).sum(dim=-1, keepdim=True))",
     "delta is a sum over all keys, not over the block: the row sums of dout * out"),
    ("(dout * out).sum", "tau * (dout * out).sum", "delta has no factor 1 / sqrt(D)"),
    ("out).sum(dim=-1", "out).mean(dim=-1", "delta is a sum over the D channels, not a mean"),
    ("tau * (dS @ k[J])", "dS @ k[J]", "Scale dq by 1 / sqrt(D), since S is scaled"),
    ("tau * (dS.mT @ q)", "(dS.mT @ q)", "Scale dk by 1 / sqrt(D), since S is scaled"),
    ("dq += tau", "dq = tau", "Add the parts of dq of all blocks: dq is overwritten"),
    ("dv[J] = (P.mT @ dout).sum(dim=0)", "dv[J] = (P.mT @ dout)[0]",
     "Add the gradients of the R query heads that share k and v"),
    ("dv[J] = (P.mT @ dout).sum(dim=0)", "dv[J] = (P.mT @ dout).mean(dim=0)",
     "Add the gradients of the R query heads, do not average them"),
    ("(dS.mT @ q).sum(dim=0)", "(dS.mT @ q)[0]",
     "Add the gradients of the R query heads that share k and v"),
    ("(dS.mT @ q).sum(dim=0)", "(dS.mT @ q).mean(dim=0)",
     "Add the gradients of the R query heads, do not average them"),
    (".masked_fill(j > i + Tk - Tq, 0.0)", "", "The causal mask is missing"),
    ("j > i + Tk - Tq", "j > i", "Query i sees key j where j <= i + Tk - Tq, not j <= i"),
    ("torch.exp(S - L[..., None])", "torch.softmax(S, dim=-1)",
     "P is exp(S - L): softmax of the block leaves out the other keys"),
    ("torch.exp(S - L[..., None])", "torch.exp(S)", "P is exp(S - L)"),
]


def check(answer: ModuleType) -> None:
    for R, Tq, Tk, block in ((1, 4, 4, 2), (1, 2, 5, 2), (2, 3, 4, 3), (3, 12, 12, 3)):
        q, k, v, dout = draws(10 * Tq + Tk, (R, Tq, 4), (Tk, 4), (Tk, 4), (R, Tq, 4))
        case = f"R = {R}, Tq = {Tq}, Tk = {Tk}, block = {block}"
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, L = reference(q, k, v, causal(Tq, Tk, Tk - Tq))
        want = torch.autograd.grad(out, leaves, dout)
        with Live() as made:
            inputs = (t.detach().clone() for t in (q, k, v, out, L, dout))
            got = several(answer.backward(*inputs, block), 3, "backward()")
        for name, g, w in zip(("dq", "dk", "dv"), got, want):
            same(g, w, name, case)
        assert Tk < 12 or made.largest < R * Tq * Tk, (
            f"a tensor of {made.largest} numbers was made, as many as P has, {case}: compute the "
            "scores of one block of keys at a time"
        )
