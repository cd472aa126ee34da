"""paged: attention whose keys and values lie in pages, found through a table. Inference only.

    j-th key of row b = k_pages[page_table[b, j // page_size], j % page_size]

and else the formula of manual.py: the cache's pages may lie in any order, and rows of different
lengths go through one call with no padding between them (Kwon et al. 2023, arXiv 2309.06180). This
call's keys and values are stored already. Two paths read the pages:

    decode   one query a row, on CUDA with Triton, float16, bfloat16 or float32: the kernels of
             paged_kernels.py read the pages where they lie, and only those that the row sees. The
             profiler shows nanoattn::paged_decode.
    gather   all else (prefill, chunks, float64, any device): the tokens that the table leads to are
             copied into one tensor, and the formula is PyTorch's SDPA on the CPU, elsewhere that
             of manual.py. The profiler shows aten::index_select.

Memory  gather: 2 * B * max_pages * page_size * Hkv * D numbers for the copies, as long as the
        longest row for all rows; on the CPU a mask of B * H / Hkv * Tq * max_pages * page_size,
        elsewhere the scores, B * H * Tq * max_pages * page_size.
        decode: nothing but B * H * (D + 2) float32 numbers for each run of keys, at most 64 runs.
FLOPs   gather: 4 * Tq * max_pages * page_size * D a head; decode: 4 * D for each key that is seen.
        What decode costs is reading the keys and values once.
Layout  (B, Hkv, H/Hkv, T, D) inside; pages (n_pages, page_size, Hkv, D).
Masks   visible(), with an offset for each row. What was never written, other sequences' pages and
        the null page are no part of any sum, whatever they hold, NaN included: where a row has no
        token its own last one is copied, which is masked.
Refuses to run without a paged cache, so training falls back; segments and dropout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.spec import Backend, Caps, Spec, visible
from attention.views import PagedView


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: None = None,
           cache: PagedView | None = None) -> Tensor:  # fmt: skip
    """Attend to the tokens in the pages k and v that cache.page_table names.

    Queries beyond cache.count are padding: what they give is finite and means nothing.
    """
    assert cache is not None, "paged reads a cache"
    assert segments is None, "paged has no segments"
    if q.shape[1] == 1 and q.is_cuda and _has_kernel(q.dtype, spec.head_dim):
        from attention.paged_kernels import decode

        return decode(
            q, k, v, cache.page_table, cache.start, cache.count, spec.window or 0, splits=0
        )
    return gather(q, k, v, spec, cache)


def gather(q: Tensor, k_pages: Tensor, v_pages: Tensor, spec: Spec, cache: PagedView) -> Tensor:
    """Attention of q (B, Tq, H, D) over the tokens of the pages, copied together."""
    (_, Tq, H, _), (_, size, Hkv, _) = q.shape, k_pages.shape
    i = torch.arange(Tq, device=q.device)
    j = torch.arange(cache.page_table.shape[1] * size, device=q.device)
    end = (cache.start + cache.count)[:, None]  # (B, 1)
    last = (end - 1).clamp(min=0)
    # A probability of 0 does not silence a NaN: 0 * NaN is NaN. So behind a row's last token that
    # token is read again, and not what another sequence may have left there.
    at = torch.minimum(j, last)  # (B, Tk)
    slot = cache.page_table.gather(1, (at // size).long()) * size + at % size
    k, v = (_take(pages, slot) for pages in (k_pages, v_pages))  # (B, Tk, Hkv, D)
    # Queries beyond count are padding: they see what the last one does.
    at = torch.minimum(cache.start[:, None] + i, last)  # (B, Tq)
    seen = visible(at[:, :, None], j, 0, spec.window)  # (B, Tq, Tk)

    q_BGRTD = q.transpose(1, 2).unflatten(1, (Hkv, H // Hkv))  # (B, Hkv, H/Hkv, Tq, D)
    attend = _sdpa if q.device.type == "cpu" else _formula
    out = attend(q_BGRTD, k.transpose(1, 2), v.transpose(1, 2), seen)
    out = out.flatten(1, 2).transpose(1, 2)  # (B, Tq, H, D)
    return out.masked_fill((end == 0)[:, :, None, None], 0.0)  # a row that has no token at all


def _take(pages: Tensor, slot: Tensor) -> Tensor:
    """The tokens in these places, (B, Tk) int32: (B, Tk, Hkv, D)."""
    taken = pages.flatten(2).flatten(0, 1).index_select(0, slot.flatten())
    return taken.view(*slot.shape, *pages.shape[2:])


def _formula(q_BGRTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over what is seen, (B, Tq, Tk): (B, Hkv, H/Hkv, Tq, D)."""
    k_BG1DT = k_BGTD.transpose(2, 3).unsqueeze(2)
    scores = (q_BGRTD / math.sqrt(q_BGRTD.shape[-1])) @ k_BG1DT  # (B, Hkv, H/Hkv, Tq, Tk)
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1) @ v_BGTD.unsqueeze(2)


def _sdpa(q_BGRTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, seen: Tensor) -> Tensor:
    """The same by PyTorch's kernel; the query heads of a key head are rows beside one another."""
    R, Tq = q_BGRTD.shape[2:4]
    mask = seen[:, None, None].expand(-1, -1, R, -1, -1).flatten(2, 3)  # (B, 1, R * Tq, Tk)
    out = F.scaled_dot_product_attention(q_BGRTD.flatten(2, 3), k_BGTD, v_BGTD, attn_mask=mask)
    return out.unflatten(2, (R, Tq))


def _has_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the decode kernel takes this on the current CUDA device."""
    least = (8, 0) if dtype == torch.bfloat16 else (7, 5)  # what Triton compiles for
    return dtype != torch.float64 and head_dim <= 256 and _triton_capability() >= least


def _triton_capability() -> tuple[int, int]:
    """Compute capability of the current CUDA device; (0, 0) without Triton."""
    from importlib.util import find_spec

    return (0, 0) if find_spec("triton") is None else torch.cuda.get_device_capability(None)


# torch.compiler.assume_constant_result, which is this line and an import of torch._dynamo. Without
# arguments: 2.13 cannot pass it a Spec's integers.
_triton_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


BACKEND = Backend(
    name="paged",
    title="attention over a page table",
    attend=attend,
    caps=(Caps(dropout=False, segments=False, grad=False, caches=("paged",)),),
    fallback="sdpa",
    aliases=("paged_attention",),
)
