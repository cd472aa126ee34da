"""The contract by its words (`formula`), the tolerance without a Spec (`right`), random cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Spec, proof
from attention.check import matrix
from attention.check.matrix import Case
from attention.masks import filled_cache
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
    s = torch.einsum("...ihd,...jhd->...hij", q, k) * (spec.scale or q.shape[-1] ** -0.5)
    s = spec.softcap * torch.tanh(s / spec.softcap) if spec.softcap else s
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[..., None, None] * ahead.abs()
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= True if spec.window is None else ahead > -spec.window
    seen &= True if spec.right is None else ahead <= spec.right
    if segments is not None:
        own = segments[..., at[:, 0].clamp(min=0), None]
        seen = (seen & (at >= 0) & (own == segments[..., None, :]))[..., None, :, :]
    s = s.masked_fill(~seen, -math.inf)
    sink = s.new_full((*s.shape[:-1], 1), -math.inf)
    sink = sink if sinks is None else sinks[:, None, None].expand_as(sink)
    most = torch.cat((s, sink), dim=-1).amax(-1, keepdim=True).clamp(min=-1e30).detach()
    weights = (s - most).exp()
    total = weights.sum(-1, keepdim=True) + (sink - most).exp()
    out = torch.einsum("...hij,...jhd->...ihd", weights / torch.where(total == 0, 1, total), v)
    return out, (total.log() + most).squeeze(-1).detach()


def leaves_of(given: Inputs, grad: bool = True) -> dict[str, Tensor]:
    """What may have a gradient."""
    found = {name: getattr(given, name) for name in ("q", "k", "v", "sinks")}
    return {n: t.detach().requires_grad_(grad) for n, t in found.items() if t is not None}


def right(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, segments: Tensor | None = None,
          sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, **options: Any) -> None:
    """Raise AssertionError unless `out` is within the tolerance of the truth."""
    dtype, scores = str(q.dtype).removeprefix("torch."), (segments, sinks, alibi_slopes)
    has = dict(zip(("segments", "sinks", "alibi"), (t is not None for t in scores), strict=True))
    spec = Spec(q.shape[2], k.shape[2], q.shape[3], dtype, **has, **options)
    given = Inputs(q, k, v, torch.ones_like(q), *scores)
    on_cpu = Inputs(*(t if t is None else t.cpu() for t in given))  # type: ignore[arg-type]
    matrix.agree(Result(out), proof.plain(given, spec), proof.truth(on_cpu, spec), dtype)


COUNTS = st.integers(0, 31).map(lambda n: n if n < 31 else 300)  # 300: blocks, pages of 256


@st.composite
def views(draw: Any, ended: bool = False) -> tuple[list[tuple[int, int]], int]:
    """(start, count) of three rows and the slots of a cache, which may be full; `ended`: or shorter
    than a row that is no longer read."""
    rows = draw(st.lists(st.tuples(st.integers(0, 30), COUNTS), min_size=3, max_size=3))
    slots = draw(st.sampled_from([336, max(1, *(a + n for a, n in rows))]))
    if ended and draw(st.booleans()):
        rows = [(rows[0][0], 1), (slots + 8, 1), (0, 1)]
    return rows, slots


def check_view(name: str, spec: Spec, rows: list[tuple[int, int]], slots: int,
               device: str = "cpu", **scores: Tensor) -> None:
    """Row b has `start` tokens and `count` new ones among the queries; other slots are loud."""
    start, count = zip(*rows)
    lengths = max(1, *count), slots, slots
    q, k, v = (torch.randn(3, T, H, spec.head_dim).to(device, getattr(torch, spec.dtype))
               for T, H in zip(lengths, (spec.n_head, spec.n_kv_head, spec.n_kv_head)))
    for b, (a, n) in enumerate(rows):
        k[b, a + n :], v[b, a + n :] = 9, 99
    k_held, v_held, view = filled_cache(k, v, spec)
    with torch.no_grad():
        out = BACKENDS[name].attend(q, k_held, v_held, spec, cache=view(start, count), **scores)
    assert out.shape == q.shape and out.isfinite().all()
    options = {n: getattr(spec, n) for n in ("window", "right", "scale", "softcap")}
    for b, (a, n) in enumerate(rows):
        if n and a + n <= slots:  # else nothing is real
            own = {n: t if t.dim() == 1 else t[b] for n, t in scores.items()}
            new = (t[b : b + 1] for t in (out[:, :n], q[:, :n], k[:, : a + n], v[:, : a + n]))
            right(*new, **options, **own)


@st.composite
def cases(draw: Any, longest: int = 70, layouts: tuple[str, ...] = ("contiguous",)) -> Case:
    """Any lengths, masks, heads and options of the contract."""
    Hkv, group = draw(st.sampled_from([(2, 1), (1, 3), (2, 2)]))
    window, right = draw(Sides), draw(st.just(0) | Sides)
    Tq, Tk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    alibi = draw(st.sampled_from([False, False, True, "rows"]))
    return Case(
        "random", Tq, Tk, Hkv * group, Hkv, draw(st.sampled_from([4, 16])),
        draw(st.integers(1, 3)), None if window is None else window + 1, right,
        draw(st.sampled_from([None, None, "packed", "many", "left"])),
        draw(st.sampled_from(layouts)), scale=draw(st.sampled_from([None, 0.5])),
        softcap=draw(st.sampled_from([None, None, 3.0])), sinks=draw(st.booleans()), alibi=alibi)
