"""manual: softmax(Q K^T / sqrt(D)) V, written out. Read it first.

    S = Q K^T / sqrt(D)      (Tq, Tk)  how well each query matches each key
    P = softmax(S)           (Tq, Tk)  each row sums to 1 over the keys that it may see
    O = P V                  (Tq, D)   each output is a weighted mean of the values

for every head of every sequence (Vaswani et al. 2017, section 3.2.1). Course: page 3.

Memory  O(Tq * Tk) a head: P is kept for the backward pass.
FLOPs   4 * Tq * Tk * D a head forward, twice that backward; masked pairs are computed too.
Layout  (B, G, R, T, D) inside: G = Hkv groups of R = H / Hkv query heads that share k and v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .caps import Backend, Caps
from .masks import StaticView, alibi, for_any_shape, mask
from .spec import Spec


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *,
           segments: Tensor | None = None, cache: StaticView | None = None,
           sinks: Tensor | None = None, alibi_slopes: Tensor | None = None) -> Tensor:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D)."""
    (_, Tq, H, _), (_, Tk, Hkv, _) = q.shape, k.shape
    dtype = q.dtype
    if dtype == torch.float16:  # scores and dP can exceed its 65,504
        q, k, v = q.float(), k.float(), v.float()
    # Query heads of a key/value head are rows of one matmul: no copy of k or v.
    q_BGRTD = q.transpose(1, 2).unflatten(1, (Hkv, H // Hkv))  # (B, Hkv, H/Hkv, Tq, D)
    k_BG1DT = k.permute(0, 2, 3, 1).unsqueeze(2)  # (B, Hkv, 1, D, Tk)
    v_BG1TD = v.transpose(1, 2).unsqueeze(2)  # (B, Hkv, 1, Tk, D)

    scores = (q_BGRTD * spec.softmax_scale) @ k_BG1DT  # (B, Hkv, H/Hkv, Tq, Tk)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if alibi_slopes is not None:
        offset = Tk - Tq if cache is None else cache.start[:, None, None, None]
        bias = alibi(alibi_slopes, Tq, Tk, offset, scores.dtype)  # (1 or B, H, Tq, Tk)
        scores = scores + bias.unflatten(1, (Hkv, -1))
    if cache is None:
        seen = mask(Tq, Tk, spec.window, segments, q.device, right=spec.right)
    else:
        seen = cache.seen(Tq, spec.window, spec.right)
    seen = seen[:, None]  # (1 or B, 1, 1, Tq, Tk)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more key, for every query of a head
        column = sinks.to(scores.dtype).view(Hkv, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = F.softmax(scores, dim=-1)[..., :Tk].to(v.dtype)  # the sink has no value
    probs = F.dropout(probs, spec.dropout)
    out = probs @ v_BG1TD  # (B, Hkv, H/Hkv, Tq, D)
    return out.flatten(1, 2).transpose(1, 2).to(dtype)  # (B, Tq, H, D)


BACKEND = Backend("manual", "softmax(QK^T)V written out, O(S^2) memory", attend,
                  (Caps(right=True, scale=True, softcap=True, sinks=True, alibi=True,
                        caches=("none", "dynamic", "static")),),
                  fallback=None, aliases=("eager",))
