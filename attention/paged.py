"""paged: attention whose keys and values lie in pages, found through a table. Inference only.

    j-th key of row b = k_pages[page_table[b, j // page_size], j % page_size]

and else the formula of manual.py: the pages of cache.py may lie in any order, and rows of different
lengths go through one call with no padding between them (Kwon et al. 2023, arXiv 2309.06180).
This call's k and v are stored first, then two paths read the pages:

    decode   one query a row, on CUDA with Triton, float16, bfloat16 or float32: the kernels of
             paged_kernels.py read the pages where they lie, and only those that the row sees. The
             profiler shows nanoattn::paged_decode.
    gather   all else (prefill, chunks, float64, any device): the pages that the table names are
             copied into one tensor, then manual.py's formula. The profiler shows aten::index.

Memory  gather: 2 * B * max_pages * page_size * Hkv * D numbers for the copies, as long as the
        longest row for all rows, and the scores, B * H * Tq * max_pages * page_size.
        decode: nothing but B * H * (D + 2) float32 numbers for each run of keys, at most 64 runs.
FLOPs   gather: 4 * Tq * max_pages * page_size * D a head; decode: 4 * D for each key that is seen.
        What decode costs is reading the keys and values once.
Layout  (B, Hkv, H/Hkv, T, D) inside; pages (n_pages, page_size, Hkv, D).
Masks   visible(), with an offset for each row. What was never written, other sequences' pages and
        the null page are no part of any sum, whatever they hold, NaN included.
Refuses to run without a paged cache, so training falls back; segments and dropout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cache import PagedView
from attention.spec import Backend, Caps, Spec, visible


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: None = None,
           cache: PagedView | None = None) -> Tensor:  # fmt: skip
    """Store k and v in the cache's pages, and attend to all that is stored.

    Args:
        q: (B, Tq, H, D); k, v: (B, Tq, Hkv, D), all of one dtype; padded on the right where a row
            has fewer tokens than Tq (cache.count).

    Returns:
        (B, Tq, H, D) in q's dtype; what stands beyond cache.count is finite and means nothing.
    """
    assert cache is not None, "paged reads a cache"
    assert segments is None, "paged has no segments"
    cache.append(k, v)
    if q.shape[1] == 1 and q.is_cuda and _has_kernel(q.dtype, spec.head_dim):
        from attention.paged_kernels import decode

        view = (cache.k_pages, cache.v_pages, cache.page_table, cache.start, cache.count)
        return decode(q, *view, spec.window or 0, 0)
    return gather(q, spec, cache)


def gather(q: Tensor, spec: Spec, cache: PagedView) -> Tensor:
    """Attention of q (B, Tq, H, D) over the pages, copied together. As manual.attend."""
    _, Tq, H, D = q.shape
    Hkv = cache.k_pages.shape[2]
    # (B, Tk, Hkv, D), where Tk = max_pages * page_size is beyond the end of every row but, maybe,
    # the longest.
    k, v = (pages[cache.page_table].flatten(1, 2) for pages in (cache.k_pages, cache.v_pages))

    i = torch.arange(Tq, device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)
    start, count = cache.start[:, None, None], cache.count[:, None, None]
    # Queries beyond count are padding; without this they would see what was never written.
    seen = visible(i, j, start, spec.window) & (j < start + count)  # (B, Tq, Tk)

    q_BGRTD = q.transpose(1, 2).unflatten(1, (Hkv, H // Hkv))  # (B, Hkv, H/Hkv, Tq, D)
    k_BG1DT = k.permute(0, 2, 3, 1).unsqueeze(2)  # (B, Hkv, 1, D, Tk)
    # A probability of 0 does not silence a NaN: 0 * NaN is NaN. So what no query sees becomes 0.
    v = v.masked_fill(~seen.any(dim=1)[:, :, None, None], 0.0)
    v_BG1TD = v.transpose(1, 2).unsqueeze(2)  # (B, Hkv, 1, Tk, D)

    scores = (q_BGRTD / math.sqrt(D)) @ k_BG1DT  # (B, Hkv, H/Hkv, Tq, Tk)
    # The least finite number rather than -inf: a row that sees nothing stays free of NaN.
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
    out = F.softmax(scores, dim=-1) @ v_BG1TD  # (B, Hkv, H/Hkv, Tq, D)
    return out.flatten(1, 2).transpose(1, 2)  # (B, Tq, H, D)


def _has_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the decode kernel takes this on the current CUDA device."""
    least = (8, 0) if dtype == torch.bfloat16 else (7, 5)  # what Triton compiles for
    return dtype != torch.float64 and head_dim <= 256 and _triton_capability() >= least


@torch.compiler.assume_constant_result  # without arguments: 2.13 cannot pass it a Spec's integers
def _triton_capability() -> tuple[int, int]:
    """Compute capability of the current CUDA device; (0, 0) without Triton."""
    from importlib.util import find_spec

    return (0, 0) if find_spec("triton") is None else torch.cuda.get_device_capability(None)


BACKEND = Backend(
    name="paged",
    title="attention over a page table",
    attend=attend,
    caps=(Caps(dropout=False, segments=False, grad=False, caches=("paged",)),),
    fallback="sdpa",
    aliases=("paged_attention",),
)
