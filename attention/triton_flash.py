"""triton: FlashAttention-2 in Triton (triton/flash_kernels.py), the algorithm of tiled.py.

S and P stay on chip; each row stores L = log2 sum_j 2^(s_j). Dropout is Philox's, of a seed and
b, h, i, j. Course: page 7.

Memory  O(T): q, k, v, out and L; backward also delta_i = rowsum(dO_i * O_i).
CPU     In Triton's interpreter, for tests (TRITON_INTERPRET=1).
Source  Dao 2023 (arXiv 2307.08691), Algorithms 1 and 2."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .caps import Backend, Caps, Partial
from .function import attention
from .masks import Pair, begins, for_any_shape
from .spec import Spec


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
           kernel: Partial | None = None) -> Tensor:
    """Shapes as in caps.Backend; kernel: None is WHOLE."""
    assert cache is None, "triton has no cache"
    pair = None
    if segments is not None:
        runs = borders(segments)
        pair = runs[:, :, k.shape[1] - q.shape[1] :].contiguous(), runs
    seed = torch.randint(2**62, (1,), device=q.device) if spec.dropout else None
    options = {"sinks": sinks, "seed": seed, "alibi_slopes": alibi_slopes}
    return attention(q, k, v, spec, kernel=kernel or WHOLE, segments=pair, **options)[0]


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int, segments: Pair = None,
            sinks: Tensor | None = None, seed: Tensor | None = None,
            alibi_slopes: Tensor | None = None, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """As caps.Partial. whole: `segments` are borders(), out has q's dtype, L is log2."""
    from .triton.flash_kernels import LOWEST, flash_forward

    sinks = None if sinks is None else sinks.float().contiguous()
    runs, numbers = _given(k, spec, offset, segments, seed, whole)
    out, L = flash_forward(q, k, v, *runs, seed, sinks, alibi_slopes, *numbers)
    return out, L if whole else torch.where(L.eq(LOWEST.value), -torch.inf, L * math.log(2))


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, spec: Spec,
             offset: int, segments: Pair = None, sinks: Tensor | None = None,
             seed: Tensor | None = None, alibi_slopes: Tensor | None = None, *, whole: bool = False,
             tiles: list[int] | None = None, tma: bool = False) -> tuple[Tensor, ...]:
    """As caps.Partial; tiles, tma: of flash_backward()."""
    from .triton.flash_kernels import LOWEST, flash_backward, unpack

    if not whole:  # -inf would give NaN
        out, L = out.contiguous(), (L / math.log(2)).clamp(min=LOWEST.value).contiguous()
    runs, numbers = _given(k, spec, offset, segments, seed, whole)
    packed, delta = flash_backward(
        dout, q, k, v, out, L, *runs, seed, alibi_slopes, tiles, tma, *numbers)
    grads = unpack(packed, q, k)
    if sinks is None:
        return grads
    P_sink = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - L)  # (B, H, Tq)
    return *grads, -(P_sink * delta).sum(dim=(0, 2))


WHOLE = Partial(partial(forward, whole=True), partial(backward, whole=True))


def _given(k: Tensor, spec: Spec, offset: int, segments: Pair, seed: Tensor | None,
           whole: bool) -> tuple[tuple[Tensor, Tensor] | tuple[None, None], tuple[Any, ...]]:
    """run_q and run_k, then numbers, of flash_forward()."""
    p = 0.0 if seed is None else spec.dropout
    numbers = spec.window, spec.right, p, spec.softmax_scale, spec.softcap
    if whole or segments is None:
        return segments or (None, None), (*numbers, None if whole else offset)
    (seg_q, seg_k), Tk = segments, k.shape[1]
    Tq, gap = seg_q.shape[1], max(offset - Tk, 0)
    past = min(max(Tk - offset, 0), Tq)  # the first query past the last key
    # These move next to it: a shared segment stays one run.
    runs = borders(torch.cat([seg_k, seg_q[:, past:]], dim=1))
    i = torch.arange(Tq, device=seg_q.device) + offset - gap
    run_q, run_k = runs[:, :, i.clamp(min=0)], runs[:, :, :Tk]
    run_k = torch.where(run_k < Tk, run_k, run_k + gap)
    return (run_q.contiguous(), run_k.contiguous()), (*numbers, offset)


def borders(segments: Tensor) -> Tensor:
    """First and last positions (B, 2, T) int32: [[5, 5, 2]] gives [[[0, 0, 2], [1, 1, 2]]]."""
    j = torch.arange(segments.shape[1], dtype=torch.int32, device=segments.device)
    first = torch.where(begins(segments), j, 0).cummax(dim=1).values
    ends = begins(segments.flip(1))
    last = torch.where(ends, j.flip(0), len(j) - 1).cummin(dim=1).values.flip(1)
    return torch.stack((first, last), dim=1)


_AMPERE = Caps(("cuda",), ("float16", "bfloat16", "float32"), (8, 0), right=True, scale=True,
               head_dim_max=128, softcap=True, sinks=True, alibi=True, lse=True,
               packages=("triton>=3.1",))
_TURING = replace(_AMPERE, dtypes=("float16", "float32"), min_capability=(7, 5))
BACKEND = Backend(
    "triton", "our own FlashAttention-2 kernels in Triton", attend,
    (_AMPERE, _TURING, replace(_TURING, devices=("cpu",), min_capability=None, interpreted=True)),
    "sdpa", install="pip install triton", partial=Partial(forward, backward, dropout=True))


def other(name: str, about: str, capability: tuple[int, int], head_dim: int,
          **options: Any) -> Backend:
    """triton with `options` of backward(), in half precision."""
    kernel = replace(WHOLE, backward=partial(WHOLE.backward, **options))
    caps = replace(_AMPERE, dtypes=("float16", "bfloat16"), min_capability=capability,
                   head_dim_max=head_dim, head_dim_multiple=8, lse=False)
    interpreted = replace(caps, devices=("cpu",), min_capability=None, interpreted=True,
                          dtypes=("float16",))
    return replace(BACKEND, name=f"triton:{name}", title=f"{BACKEND.title}, {about}",
                   attend=partial(attend, kernel=kernel), caps=(caps, interpreted),
                   fallback="triton", partial=None)


# Queries, keys, warps, stages. Up to head_dim 64 they fit every GPU from 8.0 on.
BACKWARD_TILES = ((64, 64, 4, 3), (128, 64, 8, 3))
TILED = tuple(other(f"dq{dq[0]}-dkdv{dkdv[0]}", f"backward tiles {dq} and {dkdv}", (8, 0), 64,
                    tiles=[*dq, *dkdv]) for dq, dkdv in product(BACKWARD_TILES, repeat=2))
TMA = other("tma", "backward by TMA descriptors", (9, 0), 128, tma=True)  # no GPU has run it
