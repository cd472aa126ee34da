"""Exercise 3: attention of many queries and heads, with a mask, forward and backward."""

from __future__ import annotations

from types import ModuleType

import torch

from course.exercises.check import draws, forbidding, reference, same

# name -> H, Hkv, seen
CASES = {
    "a causal mask": (2, 2, torch.ones(3, 3).tril().bool()),
    "fewer queries than keys": (1, 1, torch.ones(2, 5).tril(3).bool()),
    "4 query heads, 2 key/value heads": (4, 2, torch.ones(3, 3).tril().bool()),
    "a query that sees no key": (4, 2, torch.ones(4, 3).tril(-1).bool()),
}
REPEAT = "t.repeat_interleave(H // k.shape[1], dim=1)"
MISTAKES = [
    (" / math.sqrt(D)", "", "Divide the scores by sqrt(D)"),
    (REPEAT, "t.repeat(1, H // k.shape[1], 1)", "Head h reads head h // (H / Hkv), not h % Hkv"),
    ("dim=-1", "dim=1", "Softmax over the keys, not over the queries"),
    ("dim=-1", "dim=0", "Softmax over the keys, not over the heads"),
    ("~seen", "seen", "The mask is inverted: hide the keys where seen is False"),
    ("scores.masked_fill(~seen, torch.finfo(scores.dtype).min)", "scores",
     "Hide the keys before softmax: weights that are zeroed after it do not sum to 1"),
    ("    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)\n    probs = "
     "torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)",
     "    probs = torch.softmax(scores, dim=-1)", "The mask is missing"),
    (".masked_fill(~seen, 0.0)", "", "A query that sees no key must return zeros"),
    ("(scores, dim=-1).masked_fill(~seen, 0.0)", "(scores.masked_fill(~seen, -math.inf), dim=-1)",
     "Softmax of a row of -inf is NaN: give it finite numbers"),
]


def check(answer: ModuleType) -> None:
    for case, (H, Hkv, seen) in CASES.items():
        Tq, Tk = seen.shape
        q, k, v, dout = draws(0, (Tq, H, 4), (Tk, Hkv, 4), (Tk, Hkv, 4), (Tq, H, 4))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        Q, K, V = (t.repeat_interleave(H // t.shape[1], 1).transpose(0, 1) for t in leaves)
        want = reference(Q, K, V, seen)[0].transpose(0, 1)
        with forbidding(answer, ("scaled_dot_product_attention",), "compute the scores yourself"):
            out = answer.attention(*(t.clone() for t in (q, k, v)), seen.clone())
        same(out, want, "out", case)
        assert out.requires_grad, "no gradient flows: do not use .detach(), no_grad() or numpy"
        got = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        for name, grad, w in zip(("dq", "dk", "dv"), got, torch.autograd.grad(want, leaves, dout)):
            same(grad, w, name, case)
