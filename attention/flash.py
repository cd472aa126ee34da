"""Three generations of Tri Dao's flash-attn.

    flash_attn_2  import flash_attn (>= 2.6.2) Ampere and later  Dao 2023, arXiv 2307.08691
    flash_attn_3  import flash_attn_interface  Hopper, 8.0 (hub) Shah et al. 2024, arXiv 2407.08608
    flash_attn_4  import flash_attn.cute       8.0 to 12.1

Layout  (B, T, H, D); with segments (total, H, D).
Masks   aligned bottom-right. W keys and n later ones: window_size=(W - 1, n)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .caps import Backend, Caps
from .function import dense_gradient, not_compiled
from .masks import PagedView, StaticView, for_any_shape, runs
from .spec import BUFFERS, CACHES, Spec

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Package:
    module: str
    unbounded: int | None  # unlimited side of the window
    dropout: bool = False
    kvcache: str | None = None  # page table in flash_attn_with_kvcache
    hub: tuple[str, str] | None = None  # prebuilt: repository, commit
    accepts: frozenset[str] | None = None  # its arguments; None: all
    sinks: str = "learnable_sink"


FA2 = Package("flash_attn", unbounded=-1, dropout=True, kvcache="block_table")
FA3 = Package("flash_attn_interface", unbounded=-1, kvcache="page_table")
FA4 = Package("flash_attn.cute", unbounded=None)
# "v2" ("v3" raises in the backward with grouped heads) and "v1". Not run yet.
HUB2 = "kernels-community/flash-attn2", "db6b51744f0cd7061386442c09df890fc6d9f47e"
HUB3 = "kernels-community/flash-attn3", "7cb368cf8278b583132eb72cbf312d54586df2e2"


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: PagedView | StaticView | None = None, sinks: Tensor | None = None,
           alibi_slopes: Tensor | None = None, package: Package) -> Tensor:
    flash = load(package)
    causal, left = spec.right == 0, package.unbounded
    right = package.unbounded if spec.right is None or causal else spec.right
    if spec.window is not None and (spec.window < k.shape[1] or cache is not None):
        left, right = spec.window - 1, 0 if causal else right
    options: dict[str, object] = {"causal": causal, "window_size": (left, right)}
    options["softmax_scale"] = spec.scale
    if spec.softcap is not None:
        options["softcap"] = spec.softcap
    if sinks is not None:  # 4 takes no float64
        options[package.sinks] = sinks.float().contiguous()
    if alibi_slopes is not None:  # causal kernels add m * j, which moves only L
        options["alibi_slopes"] = alibi_slopes.contiguous()
    if cache is not None:
        return _from_cache(flash, q, k, v, cache, package, options)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if package.dropout:
        options["dropout_p"] = spec.dropout
    if package.accepts is not None:  # Caps refuse other values
        options = {name: x for name, x in options.items() if name in package.accepts}
    if segments is not None:
        return _varlen(flash, q, k, v, segments, options)
    return dense_gradient(_tensor(flash.flash_attn_func(q, k, v, **options)))


@not_compiled
def _varlen(flash: ModuleType, q: Tensor, k: Tensor, v: Tensor, segments: Tensor,
            options: dict[str, object]) -> Tensor:
    found = runs(segments, q.shape[1])
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    slopes = options.get("alibi_slopes")
    if isinstance(slopes, Tensor) and slopes.dim() == 2:
        row = found.cu_q[:-1] // q.shape[1]
        options = {**options, "alibi_slopes": slopes[row.long()]}
    packed, ends = found.pack(q, k, v), dict(zip(names, found))
    out = _tensor(flash.flash_attn_varlen_func(*packed, **ends, **options))
    return dense_gradient(out).unflatten(0, q.shape[:2])


def _from_cache(flash: ModuleType, q: Tensor, k: Tensor, v: Tensor, cache: PagedView | StaticView,
                package: Package, options: dict[str, object]) -> Tensor:
    Tq = q.shape[1]
    there, i = cache.count.clamp(max=1), torch.arange(Tq, device=q.device)
    seen = (cache.start + Tq) * there  # a row without new tokens may have lost its pages
    row, back = torch.arange(q.shape[0], device=q.device)[:, None], None
    if Tq > 1 and not options["causal"]:  # padding first: else queries see past the end
        shift = (Tq - cache.count)[:, None]
        q, back = q[row, (i - shift) % Tq], (i + shift) % Tq
        seen = (cache.start + cache.count) * there
    if isinstance(cache, PagedView):
        table = F.pad(cache.page_table, (0, (Tq - 1) // k.shape[1] + 1))  # padding sees a null page
        options["page_table" if package.kvcache is None else package.kvcache] = table
    else:
        if Tq > 1:
            k, v = (F.pad(t, (0, 0, 0, 0, 0, Tq)) for t in (k, v))
        seen = seen.clamp(max=k.shape[1])
    if package.kvcache is None:
        out = _tensor(flash.flash_attn_varlen_func(q, k, v, seqused_k=seen, **options))
    else:
        out = _tensor(flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=seen, **options))
    return out if back is None else out[row, back]


def _tensor(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


_loaded: dict[object, ModuleType] = {}  # torch.compile cannot trace functools.cache


def load(package: Package) -> ModuleType:
    key = package.hub or package.module
    if key not in _loaded:
        if package.hub is not None:
            from kernels import get_kernel

            repository, commit = package.hub
            _loaded[key] = get_kernel(repository, revision=commit, trust_remote_code=[repository])
        else:
            _loaded[key] = importlib.import_module(package.module)
    return _loaded[key]


# csrc/flash_attn/flash_api.cpp of 2.6.2 to 2.8.3; before, softcap's gradients are wrong.
_FA2 = Caps(("cuda",), HALF, (8, 0), right=True, head_dim_max=256, dropout=False, scale=True,
            softcap=True, alibi=True, page_multiple=256, packages=("flash_attn>=2.6.2",))
_FA2_DROPOUT = replace(_FA2, dropout=True, softcap=False)
# 8.6, 8.9, 12.0: dropout past head_dim 192 silently has no backward (flash_bwd_launch_template.h).
FA2_CAPS = (
    _FA2,
    replace(_FA2, grad=False, caches=BUFFERS),
    replace(_FA2_DROPOUT, head_dim_max=192),
    replace(_FA2_DROPOUT, max_capability=(8, 0)),
    replace(_FA2_DROPOUT, min_capability=(9, 0), max_capability=(10, 3)))

# from hopper/flash_api.cpp at 0251105a
_FA3 = Caps(("cuda",), HALF, (9, 0), (9, 0), right=True, head_dim_max=256, head_dim_multiple=8,
            dropout=False, scale=True, softcap=True, deterministic=False,
            packages=("flash_attn_interface",))
FA3_CAPS = (_FA3, replace(_FA3, head_dim_max=192, deterministic=True),
            replace(_FA3, grad=False, caches=BUFFERS))
FA3_HUB_CAPS = (  # also for 8.0 (flash-attn3/build.toml of kernels-community)
    *FA3_CAPS, *(replace(c, min_capability=(8, 0), max_capability=(8, 0)) for c in FA3_CAPS))

# flash_attn/cute/interface.py of 4.0.0b36; a sink has a gradient from b26 on.
_FA4 = Caps(("cuda",), HALF, (9, 0), (11, 0), right=True, head_dim_max=128, head_dim_multiple=8,
            dropout=False, scale=True, softcap=True, sinks=True, grad=False, caches=CACHES,
            packages=("flash_attn.cute>=4.0.0b26",))
_FA4_WIDE = replace(_FA4, head_dim_max=256, caches=("none", "dynamic"))
# Wrong gradients if head_dim is not a multiple of 32 (flash-attention pull requests 2896,
# 2698), and at 256 on Blackwell (TransformerEngine issue 3216); softcap hangs (issue 2466).
_FA4_GRAD = replace(_FA4_WIDE, head_dim_max=128, grad=True, head_dim_multiple=32, softcap=False)
_FA4_MMA = replace(_FA4, max_capability=(8, 9), min_capability=(8, 0), softcap=False, sinks=False,
                   caches=("none", "dynamic"))
_FA4_12 = replace(_FA4_MMA, min_capability=(12, 0), max_capability=(12, 1))
FA4_CAPS = (
    _FA4,
    _FA4_GRAD,
    replace(_FA4_GRAD, max_capability=(9, 0), softcap=True),
    replace(_FA4_WIDE, max_capability=(9, 0)),
    replace(_FA4_WIDE, max_capability=(9, 0), grad=True, head_dim_multiple=32,
            packages=("flash_attn.cute>=4.0.0b36",)),
    replace(_FA4_WIDE, min_capability=(10, 0), max_capability=(10, 3), head_dim_multiple=256,
            window=False, softcap=False, sinks=False),
    _FA4_MMA,
    _FA4_12,
    replace(_FA4_12, grad=True, head_dim_multiple=32, deterministic=False))


def _backend(generation: int, package: Package, caps: tuple[Caps, ...], fallback: str, install: str,
             hub: tuple[str, str] | None = None, hub_caps: tuple[Caps, ...] = ()) -> Backend:
    distribution = "flash-attn" if generation == 2 else f"flash-attn-{generation}"
    run = partial(attend, package=package)
    plain = Backend(
        f"flash_attn_{generation}", f"FlashAttention-{generation}, package {distribution}",
        not_compiled(run) if generation == 4 else run, caps, fallback,
        (f"flash_attention_{generation}",), install, fullgraph=generation != 4, varlen=("cuda",))
    if hub is None:
        return plain
    rows = tuple(replace(row, packages=("kernels>=0.14",)) for row in hub_caps or caps)
    prebuilt = _backend(generation, replace(package, hub=hub), rows, fallback, install)
    install += ", or --attention_hub_kernels=True with pip install kernels"
    return replace(plain, install=install, prebuilt=prebuilt)


V2 = _backend(2, FA2, FA2_CAPS, "sdpa", "pip install flash-attn --no-build-isolation", HUB2)
V3 = _backend(3, FA3, FA3_CAPS, "flash_attn_2", "pip install flash-attn-3 --no-deps --index-url "
              "https://download.pytorch.org/whl/cu130", HUB3, FA3_HUB_CAPS)
V4 = _backend(4, FA4, FA4_CAPS, "flash_attn_3", "pip install --pre flash-attn-4")
