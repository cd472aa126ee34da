"""The contract by its words (`formula`), the truth and tolerance of attention/proof.py without a
Spec, and random cases."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, device, dtype

from attention import Spec, proof
from attention.check.matrix import Case, agree
from attention.proof import Inputs, Result

Sides = st.none() | st.integers(0, 40)


def formula(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
            sinks: Tensor | None = None, alibi_slopes: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
    """out, and the log-sum-exp (..., H, Tq): naive, and differentiable any number of times."""
    (Tq, H), (Tk, Hkv) = q.shape[-3:-1], k.shape[-3:-1]
    k, v = (t.repeat_interleave(H // Hkv, dim=-2) for t in (k, v))
    at = torch.arange(Tq)[:, None] + Tk - Tq  # of the queries, among the keys
    ahead = torch.arange(Tk) - at
    s = torch.einsum("...ihd,...jhd->...hij", q, k) * spec.softmax_scale
    s = spec.softcap * torch.tanh(s / spec.softcap) if spec.softcap else s
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[..., None, None] * ahead.abs()
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= True if spec.window is None else ahead > -spec.window
    seen &= True if spec.right is None else ahead <= spec.right
    if segments is not None:
        own = segments[..., at[:, 0].clamp(min=0), None]
        seen = (seen & (at >= 0) & (own == segments[..., None, :]))[..., None, :, :]
    weights = s.exp() * seen
    total = weights.sum(-1) + (0 if sinks is None else sinks.exp()[:, None])
    share = weights / torch.where(total == 0, 1, total)[..., None]
    return torch.einsum("...hij,...jhd->...ihd", share, v), total.detach().log()


def _call(of: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: Any) -> Result:
    more = [options.pop(name, None) for name in ("segments", "sinks", "alibi_slopes")]
    has = dict(zip(("segments", "sinks", "alibi"), (t is not None for t in more), strict=True))
    shape = q.shape[2], k.shape[2], q.shape[3], str(q.dtype).removeprefix("torch.")
    return of(Inputs(q, k, v, dout, *more), Spec(*shape, **has, **options))


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """In float64, on the CPU."""
    with device("cpu"):
        return _call(proof.truth, q.cpu(), k.cpu(), v.cpu(), dout.cpu(), options)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    return _call(proof.plain, q, k, v, dout, options)


def check(got: Result, rough: Result, exact: Result, dtype: dtype) -> None:
    agree(got, rough, exact, str(dtype).removeprefix("torch."))


def right(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Raise AssertionError unless `out` is within the tolerance of the truth."""
    rough, exact = (f(q, k, v, torch.ones_like(q), **options) for f in (plain, attention))
    check(Result(out), rough, exact, q.dtype)


@st.composite
def cases(draw: Any, longest: int = 70, layouts: tuple[str, ...] = ("contiguous",)) -> Case:
    """Any lengths, masks, heads and options of the contract."""
    Hkv, group = draw(st.sampled_from([(2, 1), (1, 3), (2, 2)]))
    window, right = draw(Sides), draw(st.just(0) | Sides)
    Tq, Tk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    alibi = draw(st.sampled_from([False, False, True, "rows"]))
    if alibi and right != 0:  # refused with more queries than keys
        Tq = min(Tq, Tk)
    return Case(
        "random", Tq, Tk, Hkv * group, Hkv, draw(st.sampled_from([4, 16])),
        draw(st.integers(1, 3)), None if window is None else window + 1, right,
        draw(st.sampled_from([None, None, "packed", "many", "left"])),
        draw(st.sampled_from(layouts)), scale=draw(st.sampled_from([None, 0.5])),
        softcap=draw(st.sampled_from([None, None, 3.0])), sinks=draw(st.booleans()), alibi=alibi)
