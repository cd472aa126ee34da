"""sdpa: PyTorch's scaled_dot_product_attention, free to choose its kernel or pinned to one.

The formula of manual.py, by a fused kernel where there is one:

    sdpa_flash      FlashAttention-2 (Dao 2023, arXiv 2307.08691) on CUDA; a blocked kernel on the
                    CPU. O(T) memory. On CUDA it takes no mask.
    sdpa_efficient  xFormers' memory-efficient kernel (Rabe & Staats 2021, arXiv 2112.05682), CUDA.
    sdpa_cudnn      cuDNN's fused attention, CUDA.
    sdpa_math       the unfused formula, O(T^2) memory, everywhere; in float32 for half precision.
    sdpa            PyTorch's choice among these (see permitted()); the profiler shows which.

FLOPs   4 * Tq * Tk * D a head forward, about half where a causal kernel skips masked tiles; a
        flash-type backward recomputes S: 2.5 times the forward instead of 2.
Layout  (B, H, T, D) to PyTorch; these are transposed views.
Masks   `is_causal=True` is aligned top-left in PyTorch: used only for Tq == Tk. Where every query
        sees every key, as a single one does: no mask. All else gets a bool mask, in blocks of
        queries (blocks.py), so a window costs T * W; pinned flash on CUDA takes none
        (sdpa_flash.py). ALiBi is a mask of numbers: the backward pass keeps H * Tq * Tk of them.
Bits    On CUDA the backward of flash and efficient is deterministic only under
        torch.use_deterministic_algorithms(True); cuDNN's never is (attention_backward.cu).
Refuses a softcap and sinks, and what Caps declare (sdp_utils.cpp and sdp_utils_cpp.cpp of PyTorch
        2.13). The probe finds the limits of older releases.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .caps import Backend, Caps
from .function import dense_gradient, not_compiled
from .masks import Pair, StaticView, alibi, for_any_shape, in_blocks, mask, maskless
from .sdpa_flash import PARTIAL, bias_dtype, varlen
from .spec import Spec

HALF = ("float16", "bfloat16")
CUDNN_DROPOUT_STEP = 1 / 16


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: StaticView | None = None, alibi_slopes: Tensor | None = None,
           kernel: SDPBackend | None = None) -> Tensor:
    """Attention by F.scaled_dot_product_attention; shapes as in caps.Backend.

    Args:
        kernel: the only one that may run, else RuntimeError (PyTorch's words); None: its choice.
    """
    Tq, Tk = q.shape[1], k.shape[1]
    plain = segments is None and cache is None and alibi_slopes is None
    if plain and (kind := maskless(Tq, Tk, spec.window, Tk - Tq, spec.right)):
        return fused(q, k, v, spec, kernel, is_causal=kind == "causal")
    return in_blocks(with_mask, q, k, v, spec, segments, cache, kernel=kernel,
                     alibi_slopes=alibi_slopes)


def fused(q: Tensor, k: Tensor, v: Tensor, spec: Spec, kernel: SDPBackend | None,
          attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    grouped, kernels = spec.n_kv_head != spec.n_head, None if kernel is None else [kernel]
    if q.is_cuda:
        if kernel == SDPBackend.CUDNN_ATTENTION and k.shape[1] == 1:
            return _only_key(q, k, v, spec)
        masked = attn_mask is not None
        if attn_mask is not None and spec.grad and kernel == SDPBackend.CUDNN_ATTENTION:
            k, v = (F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % 128)) for t in (k, v))  # see permitted()
            hidden = -torch.inf if attn_mask.is_floating_point() else False
            attn_mask = F.pad(attn_mask, (0, -attn_mask.shape[-1] % 128), value=hidden)
        repeats = masked or kernel == SDPBackend.EFFICIENT_ATTENTION
        if grouped and kernel is None:  # flash and cuDNN need half precision and 8.0
            major = torch.cuda.get_device_properties(q.device).major
            repeats |= spec.dtype not in HALF or major < 8
        if grouped and repeats:
            # Other kernels take no grouped heads, and PyTorch would fall back to the math kernel
            # and its O(T^2) memory (transformers issue 48633, PyTorch issue 181528).
            k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
            grouped = False
        kernels = kernels or permitted(spec, masked)
    inputs = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    call = *inputs, attn_mask, spec.dropout, is_causal
    if not (kernels or grouped or spec.scale):  # one query: the context and the options cost 1 us
        return dense_gradient(F.scaled_dot_product_attention(*call).transpose(1, 2))
    with sdpa_kernel(kernels) if kernels else nullcontext():
        out = F.scaled_dot_product_attention(*call, scale=spec.scale, enable_gqa=grouped)
    return dense_gradient(out.transpose(1, 2))


def with_mask(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, offset: int = 0,
              segments: Pair = None, cache: StaticView | None = None,
              alibi_slopes: Tensor | None = None, kernel: SDPBackend | None = None) -> Tensor:
    """Attention of a block of queries, with the mask that it needs; it holds ALiBi's bias."""
    (Tq, Tk), sides = (q.shape[1], k.shape[1]), (spec.window, offset, spec.right)
    if cache is not None:
        attn_mask = cache.seen(Tq, spec.window, spec.right)  # (B, 1, Tq, Tk)
    elif segments is alibi_slopes is None and (kind := maskless(Tq, Tk, *sides)):
        return fused(q, k, v, spec, kernel, is_causal=kind == "causal")
    elif segments is None and kernel == SDPBackend.FLASH_ATTENTION and q.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: 1 s

        attn_mask = causal_lower_right(Tq, Tk)
    else:
        attn_mask = mask(Tq, Tk, spec.window, segments, q.device, offset, spec.right)
    if alibi_slopes is not None:
        at = offset if cache is None else cache.start[:, None, None, None]
        bias = alibi(alibi_slopes, Tq, Tk, at, bias_dtype(q))
        attn_mask = bias.masked_fill(~attn_mask, -torch.inf)
    return fused(q, k, v, spec, kernel, attn_mask)


def permitted(spec: Spec, masked: bool) -> list[SDPBackend] | None:
    """The kernels that PyTorch may choose from on CUDA; None: all of them.

    On Hopper and Blackwell it prefers cuDNN (since torch 2.11, which brings cuDNN 9.15.1 or later).
    But cuDNN builds a plan for each new length, which takes the host tens of ms: too slow in
    decoding. Some of its kernels round dropout to sixteenths, unchecked by torch 2.11 (pull request
    174245), and with a mask dq may be NaN if keys do not fill tiles of 128 (issue 196678).
    """
    if masked or not spec.grad or spec.dropout % CUDNN_DROPOUT_STEP:
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return None


def _only_key(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
    """Attention to a single key, which cuDNN does not take: P = 1, so q and k have no gradient."""
    k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
    return F.dropout(torch.ones_like(q[..., :1]), spec.dropout) * v + 0 * (q + k)


BACKEND = Backend(
    name="sdpa",
    title="PyTorch scaled_dot_product_attention",
    attend=attend,
    caps=(Caps(right=True, scale=True, alibi=True, caches=("none", "dynamic", "static")),),
    fallback=None,
)


varlen_by_segments = not_compiled(varlen)  # shapes depend on the data


@for_any_shape
def flash(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
          cache: None = None, alibi_slopes: Tensor | None = None) -> Tensor:
    """attend() by PyTorch's FlashAttention; on CUDA a window or segments by its varlen function."""
    if q.is_cuda and segments is not None:
        return varlen_by_segments(q, k, v, spec, segments=segments)
    if q.is_cuda and (spec.right or (spec.window or k.shape[1]) < k.shape[1]):
        return varlen(q, k, v, spec)
    return attend(q, k, v, spec, segments=segments, alibi_slopes=alibi_slopes,
                  kernel=SDPBackend.FLASH_ATTENTION)


def _pinned(name: str, title: str, kernel: SDPBackend, *caps: Caps) -> Backend:
    return Backend(name, title, partial(attend, kernel=kernel), caps, fallback="sdpa")


_FLASH = Caps(("cuda",), HALF, (8, 0), right=True, head_dim_max=256, scale=True)
FLASH = Backend(
    "sdpa_flash",
    "PyTorch SDPA pinned to its FlashAttention kernel",
    flash,
    (
        replace(_FLASH, window=False, segments=False, lse=True),
        replace(_FLASH, min_torch="2.12", dropout=False),  # varlen_attn with a window
        Caps(("cpu",), right=True, dropout=False, scale=True, alibi=True, lse=True),
    ),
    fallback="sdpa",
    partial=PARTIAL,
    varlen=("cuda",),
)
_EFFICIENT = Caps(("cuda",), HALF, (8, 0), right=True, head_dim_multiple=8, scale=True, alibi=True)
EFFICIENT = _pinned(
    "sdpa_efficient",
    "PyTorch SDPA pinned to its memory-efficient kernel",
    SDPBackend.EFFICIENT_ATTENTION,
    _EFFICIENT,
    replace(_EFFICIENT, dtypes=("float16",), min_capability=(5, 0)),
    replace(_EFFICIENT, dtypes=("float32",), min_capability=(5, 0), head_dim_multiple=4),
)
CUDNN = _pinned(
    "sdpa_cudnn",
    "PyTorch SDPA pinned to cuDNN's kernel",
    SDPBackend.CUDNN_ATTENTION,
    Caps(("cuda",), HALF, (8, 0), right=True, head_dim_max=128, head_dim_multiple=8, scale=True,
         alibi=True, dropout_step=CUDNN_DROPOUT_STEP, deterministic=False),
)
MATH = _pinned(
    "sdpa_math",
    "PyTorch SDPA pinned to its unfused kernel, O(S^2) memory",
    SDPBackend.MATH,
    Caps(right=True, scale=True, alibi=True),
)
