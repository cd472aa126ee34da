"""flex: PyTorch's flex_attention, whose mask is a Python function.

torch.compile traces visible() into a template of FlashAttention (tiled.py). A BlockMask lists tiles
of 128 x 128 scores, "partial" (masked) and "full". Softcap and ALiBi are a score_mod. Sinks: out *
sigmoid(L - sink).

Memory  O(T): q, k, v, out and L; the lists are (T / 128)^2 integers.
Source  Dong et al. 2024 (arXiv 2412.05496). flex_flash: the same on FlashAttention-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .caps import Backend, Caps
from .machine.system import own_code
from .masks import begins, for_any_shape, kept
from .spec import Spec, alibi_bias, visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mod = Callable[..., Tensor]
OwnMask = Callable[[int, int, int, int, torch.device], "tuple[BlockMask, Mod | None]"]
TILE = 128  # rows and columns
FEW = 16  # at most, in PyTorch's decoding kernel
THREE = ("float16", "bfloat16", "float32")
# With these head dims PyTorch's C++ for AVX2 overwrites memory (cpp_micro_gemm.py up to 2.13,
# tail_n with trans_b and K < 24), not with four zeros more.
SPOILT = (8, 16)


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
           flash: bool = False, own_mask: OwnMask | None = None) -> Tensor:
    assert cache is None, "flex has no cache"
    (B, Tq, H, D), Tk, on = q.shape, k.shape[1], q.device
    scale, score_mod = spec.scale, None
    if not torch.is_grad_enabled():  # the CPU takes no leaves
        q, k, v = (t.detach() for t in (q, k, v))
    if on.type == "cpu" and D in SPOILT:
        scale = scale or D**-0.5
        q, k, v = (F.pad(t, (0, 4)) for t in (q, k, v))
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous().view(-1, H)
    rows = None
    if flash:  # FlashAttention-4 takes two tiles at once on Blackwell
        rows = 2 * TILE if torch.cuda.get_device_properties(on).major >= 10 else TILE
    sides = Tq, Tk, spec.window, spec.right, rows
    # Strings: a symbol's C++ does not compile (2.13).
    scale_text, softcap = (None if n is None else str(n) for n in (scale, spec.softcap))
    if torch.compiler.is_compiling():
        call, mask = flex, block_mask(segments, on, *sides)
    else:
        call = compiled(graph_of(q, Tk, spec, segments, slopes, flash, own_mask))
        if own_mask is not None:  # names.py
            mask, score_mod = own_mask(B, H, Tq, Tk, on)
        else:
            mask = _by_shape(on, *sides) if segments is None else _by_segments(segments, *sides)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    shift = torch.full((), Tk - Tq, device=on)
    out_BHTD = call(q, k, v, mask, scale_text, softcap, sinks, flash, slopes, shift, score_mod)
    return out_BHTD.transpose(1, 2)[..., :D]


def flex(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: BlockMask, scale: str | None,
         softcap: str | None, sinks: Tensor | None, flash: bool, slopes: Tensor | None,
         shift: Tensor, own_score: Mod | None) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {"block_mask": mask, "scale": scale and float(scale)}
    options["enable_gqa"] = q_BHTD.shape[1] != k_BHTD.shape[1]
    if flash:
        options["kernel_options"] = {"BACKEND": "FLASH"}
    elif q_BHTD.is_cuda and q_BHTD.shape[2] > FEW:
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    c = softcap and float(softcap)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = c * torch.tanh(score / c) if c else score
        if slopes is not None:
            score = score + alibi_bias(slopes[b % len(slopes), h], i, j, shift)
        return score

    if own_score is not None or c or slopes is not None:
        options["score_mod"] = own_score or score_mod
    if sinks is None:
        return flex_attention(q_BHTD, k_BHTD, v_BHTD, **options)
    options["return_aux"] = AuxRequest(lse=True)
    out, aux = flex_attention(q_BHTD, k_BHTD, v_BHTD, **options)
    left = torch.sigmoid(aux.lse - sinks[:, None])  # (B, H, Tq) float32
    return (out * left[..., None]).to(out.dtype)


class Graph(NamedTuple):
    """Key of a copy of flex(), which torch.compile recompiles at most 8 times."""

    spec: Spec  # window and `right` are tensors
    sizes: tuple[int, ...]  # in training; else the special ones
    segments: tuple[int, int] | bool  # padded
    slopes: int  # rows
    flash: bool
    own_mask: OwnMask | None


def graph_of(q: Tensor, Tk: int, spec: Spec, segments: Tensor | None, slopes: Tensor | None,
             flash: bool, own_mask: OwnMask | None) -> Graph:
    B, Tq = q.shape[:2]
    sizes = (B, Tq, Tk) if spec.grad or flash else (
        B == 1, Tq == 1, q.is_cuda and Tq <= FEW, Tq <= TILE, Tk <= TILE)
    if slopes is not None:
        torch._dynamo.mark_static(slopes)
    padded, rows = segments is not None and room(segments), slopes is not None and len(slopes)
    return Graph(replace(spec, window=None, right=0), sizes, padded, rows, flash, own_mask)


@lru_cache(maxsize=4096)
def compiled(graph: Graph) -> Callable[..., Tensor]:
    own = own_code(flex, f"flex_{hash(graph) & 0xFFFFFFFF:x}")
    return torch.compile(own, fullgraph=True, dynamic=not (graph.spec.grad or graph.flash))


def block_mask(segments: Tensor | None, device: torch.device, Tq: int, Tk: int, window: int | None,
               right: int | None = 0, rows: int | None = None) -> BlockMask:
    """visible() as a BlockMask, with segments for Tq <= Tk. rows: of FlashAttention-4's tiles."""
    offset = Tk - Tq  # only j - i matters
    top, bottom = corners(Tq, rows or TILE, device)
    first, last = corners(Tk, TILE, device)
    least, most = first - bottom[:, None], last - top[:, None]  # (tiles, tiles) each
    nearest = torch.minimum(most, least.clamp(min=offset))
    some, lower, upper = (visible(0, distance, offset, window, right=right)[None]
                          for distance in (nearest, least, most))
    every = lower & upper
    if segments is not None:
        number = begins(segments[:, :Tk]).cumsum(dim=1)  # (B, Tk), of each segment
        q_from, q_to = number[:, top + offset, None], number[:, bottom + offset, None]
        k_from, k_to = number[:, None, first], number[:, None, last]
        some = some & (q_from <= k_to) & (k_from <= q_to)
        every = every & (k_from == q_to) & (q_from == k_to)

    sides: tuple[Any, ...] = offset, window, right
    if rows is None and not torch.compiler.is_compiling():
        finite = offset, window or Tk, Tq if right is None else right
        sides = tuple(torch.full((), n, device=device) for n in finite)
    shift, width, ahead = sides

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if segments is None:
            return visible(i, j, shift, width, right=ahead)
        return visible(i, j, shift, width, segments[b, i + shift], segments[b, j], ahead)

    return listed(some[:, None], every[:, None], (Tq, Tk), rows or TILE, mask_mod)


def corners(T: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, T, size, device=device)
    return first, (first + size).clamp(max=T) - 1


def listed(some: Tensor, every: Tensor, lengths: tuple[int, int], rows: int,
           mask_mod: Mod) -> BlockMask:
    """A BlockMask from bool (1 or B, 1 or H, tiles, tiles): is some, is every pair visible?"""
    from torch.nn.attention.flex_attention import BlockMask

    def of_rows(tiles: Tensor) -> tuple[Tensor, Tensor]:
        order = tiles.int().argsort(dim=-1, descending=True, stable=True)
        return tiles.sum(dim=-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(*of_rows(some & ~every), *of_rows(every),
                                    BLOCK_SIZE=(rows, TILE), mask_mod=mask_mod, seq_lengths=lengths)


# Inference tensors cannot be used in training.
_by_shape = lru_cache(maxsize=16)(torch.inference_mode(False)(partial(block_mask, None)))


@kept
def _by_segments(segments: Tensor, Tq: int, Tk: int, *sides: Any) -> BlockMask:
    copy = F.pad(segments, (0, room(segments)[1] - Tk)).clone()
    torch._dynamo.mark_static(copy)
    return block_mask(copy, segments.device, Tq, Tk, *sides)


def room(segments: Tensor) -> tuple[int, int]:
    """The padded size, (B, 128 * 2^n >= Tk): a symbolic one may fail to compile in PyTorch 2.13."""
    Tk = segments.shape[1]
    return len(segments), TILE << ((Tk - 1) // TILE).bit_length()


_CUDA = Caps(("cuda",), THREE, (8, 0), right=True, dropout=False, scale=True, softcap=True,
             alibi=True)
BACKEND = Backend(
    "flex", "PyTorch flex_attention, compiled", attend,
    (replace(_CUDA, sinks=True),
     replace(_CUDA, dtypes=THREE[::2], min_capability=(7, 0), sinks=True),
     replace(_CUDA, devices=("cpu",), min_capability=None, grad=False),
     replace(_CUDA, devices=("mps",), min_capability=None, min_torch="2.13", grad=False)),
    "sdpa", aliases=("flex_attention",))

# flash_attn/cute/interface.py of 4.0.0b13.
_FLASH = Caps(("cuda",), THREE[:2], (9, 0), (11, 0), head_dim_max=128,
              head_dim_multiple=8, right=True, dropout=False, scale=True, softcap=True, grad=False,
              packages=("flash_attn.cute>=4.0",))
_FLASH_GRAD = replace(_FLASH, head_dim_multiple=32, softcap=False, grad=True, deterministic=False)
FLASH = Backend(
    "flex_flash", "PyTorch flex_attention, compiled into FlashAttention-4",
    partial(attend, flash=True),
    (_FLASH, _FLASH_GRAD, replace(_FLASH_GRAD, max_capability=(9, 0), softcap=True)), "flex",
    install="pip install --pre flash-attn-4")
