"""paged: attention over pages, or a static cache, one page a row. Inference only.

    j-th key of row b = k_pages[page_table[b, j // page_size], j % page_size]

One query a row on CUDA: triton/paged_kernels.py. Else gather() copies the tokens for SDPA, or with
softcap, sinks or ALiBi for manual.py's formula.

Source  Kwon et al. 2023 (arXiv 2309.06180)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .caps import Backend, Caps
from .machine.system import outside_a_trace
from .masks import PagedView, StaticView, alibi, for_any_shape
from .spec import Spec, visible

KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN plans each new length
BLOCK = 256  # queries in gather()


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: None = None,
           cache: PagedView | StaticView | None = None, sinks: Tensor | None = None,
           alibi_slopes: Tensor | None = None) -> Tensor:
    """Attend to pages or buffers k and v. Queries from cache.count on are padding."""
    assert cache is not None, "paged reads a cache"
    cache = cache.as_pages() if isinstance(cache, StaticView) else cache
    least = (8, 0) if q.dtype == torch.bfloat16 else (7, 5)
    fits = q.shape[1] == 1 and q.dtype != torch.float64 and spec.head_dim <= 256
    if fits and q.is_cuda and _triton_capability() >= least:
        from .triton.paged_kernels import decode

        sinks = None if sinks is None else sinks.float().contiguous()
        rows = cache.page_table, cache.start, cache.count, sinks, alibi_slopes
        numbers = spec.window or 0, spec.softmax_scale, spec.softcap
        return decode(q, k, v, *rows, *numbers, splits=0)
    outs, end = [], cache.start + cache.count
    for a in range(0, q.shape[1], BLOCK):
        start = cache.start + cache.count.clamp(max=a)
        # Later queries are keys of this block.
        ahead = q.shape[1] if spec.right is None else spec.right
        part = PagedView(cache.page_table, start, (end - start).clamp(max=BLOCK + ahead))
        outs.append(gather(q[:, a : a + BLOCK], k, v, spec, part, sinks, alibi_slopes))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def gather(q: Tensor, k_pages: Tensor, v_pages: Tensor, spec: Spec, cache: PagedView,
           sinks: Tensor | None = None, alibi_slopes: Tensor | None = None) -> Tensor:
    """Attend with q (B, Tq, H, D) to copies of its tokens, up to cache.start + cache.count."""
    (_, Tq, H, _), (_, size, Hkv, _) = q.shape, k_pages.shape
    i = torch.arange(Tq, device=q.device)
    j = torch.arange(cache.page_table.shape[1] * size, device=q.device)[None]
    if spec.window is not None:  # earlier pages may be freed
        first = (cache.start[:, None] - spec.window + 1).clamp(min=0)
        ahead = j.shape[1] if spec.right is None else spec.right
        j = first + j[:, : spec.window + Tq - 1 + ahead]
    end = (cache.start + cache.count)[:, None]
    last = (end - 1).clamp(min=0)
    at = torch.minimum(j, last)  # 0 * NaN, of a foreign slot, is NaN
    slot = cache.page_table.gather(1, (at // size).long()) * size + at % size
    k, v = (pages.flatten(2).flatten(0, 1).index_select(0, slot.flatten())
            .view(*slot.shape, *pages.shape[2:]) for pages in (k_pages, v_pages))
    at = torch.minimum(cache.start[:, None] + i, last)  # padding sees as the last query
    seen = visible(at[:, :, None], j[:, None], 0, spec.window, right=spec.right)  # (B, Tq, Tk)
    if spec.right != 0:
        seen &= j[:, None] <= last[:, :, None]

    q_BGRTD = q.transpose(1, 2).unflatten(1, (Hkv, H // Hkv))
    bias, wide = None, torch.promote_types(q.dtype, torch.float32)
    if alibi_slopes is not None:
        offset = (cache.start[:, None] - j[:, :1])[..., None, None]
        bias = alibi(alibi_slopes, Tq, j.shape[1], offset, wide).unflatten(1, (Hkv, -1))
    bare = spec.softcap is None and sinks is None and bias is None
    run = _sdpa if bare and q.device.type != "mps" else _formula
    out = run(q_BGRTD, k.transpose(1, 2), v.transpose(1, 2), seen, spec, sinks, bias)
    out = out.flatten(1, 2).transpose(1, 2)
    # A row without new tokens may have lost its pages.
    return out.masked_fill((cache.count == 0)[:, None, None, None], 0.0)


def _formula(q_BGRTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, seen: Tensor, spec: Spec,
             sinks: Tensor | None, bias: Tensor | None) -> Tensor:
    """(B, Hkv, H/Hkv, Tq, D), masked by `seen` (B, Tq, Tk)."""
    if q_BGRTD.dtype == torch.float16:  # as in manual.py
        q_BGRTD, k_BGTD = q_BGRTD.float(), k_BGTD.float()
    k_BG1DT = k_BGTD.transpose(2, 3).unsqueeze(2)
    scores = (q_BGRTD * spec.softmax_scale) @ k_BG1DT
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(*scores.shape[1:3], 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    probs = F.softmax(scores, dim=-1)[..., : k_BGTD.shape[2]].to(v_BGTD.dtype)
    return probs @ v_BGTD.unsqueeze(2)


def _sdpa(q_BGRTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, seen: Tensor, spec: Spec,
          *_: object) -> Tensor:
    R, Tq = q_BGRTD.shape[2:4]
    mask = seen[:, None, None].expand(-1, -1, R, -1, -1).flatten(2, 3)  # (B, 1, R * Tq, Tk)
    call = q_BGRTD.flatten(2, 3), k_BGTD, v_BGTD, mask
    with sdpa_kernel(KERNELS) if mask.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(*call, scale=spec.scale)
    return out.unflatten(2, (R, Tq))


@outside_a_trace  # torch 2.13 cannot pass a Spec's integers
def _triton_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability(None) if find_spec("triton") else (0, 0)


_PAGED = Caps(right=True, dropout=False, segments=False, scale=True, softcap=True, sinks=True,
              alibi=True, grad=False, caches=("paged",))
# On CUDA decode only: gather() copies the whole cache.
_STATIC = replace(_PAGED, devices=("cuda",), dtypes=("float16", "bfloat16", "float32"),
                  min_capability=(8, 0), head_dim_max=256, caches=("static",), packages=("triton",))
BACKEND = Backend("paged", "attention over a page table", attend,
                  (_PAGED, _STATIC, replace(_PAGED, devices=("cpu",), caches=("static",))), "sdpa",
                  aliases=("paged_attention",))
