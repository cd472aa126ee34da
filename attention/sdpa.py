"""sdpa: PyTorch's scaled_dot_product_attention, free to choose its kernel or pinned to one.

The same formula as manual.py, computed by a fused kernel where there is one:

    sdpa_flash      FlashAttention-2 (Dao 2023, arXiv 2307.08691) on CUDA; a blocked kernel on the
                    CPU. O(T) memory. On CUDA it takes no mask: causal only.
    sdpa_efficient  xFormers' memory-efficient kernel (Rabe & Staats 2021, arXiv 2112.05682), CUDA.
    sdpa_cudnn      cuDNN's fused attention, CUDA.
    sdpa_math       the formula in several steps, O(T^2) memory, everywhere. In half precision it
                    computes in float32 inside.
    sdpa            whichever of these PyTorch picks; what ran is read from the profiler (probe.py).

FLOPs   4 * Tq * Tk * D a head forward, about half of it where a causal kernel skips masked tiles;
        a flash-type backward recomputes S, so 2.5 times the forward instead of 2.
Layout  (B, H, T, D) to PyTorch; these are transposed views, nothing is copied.
Masks   `is_causal=True` is aligned top-left in PyTorch: used only for Tq == Tk, where that is the
        same thing. A lone query sees every key: no mask. All else gets an explicit bool mask,
        except that pinned flash on CUDA takes none and gets torch's own bottom-right bias object.
Bits    On CUDA the backward of flash and efficient adds up in no fixed order. PyTorch has a switch,
        torch.use_deterministic_algorithms(True), for the whole process and all of its operators:
        under it both take a slower way that repeats its bits, and cuDNN's is not chosen
        (attention_backward.cu beside the files below; tried on CUDA in PyTorch's pull request
        182551). The switch is read again in each backward, so it has to stay on. Under it cuBLAS
        wants CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, and operators without such a way
        raise: the cumulative sum with which generate() samples is one.
Refuses what the rows of Caps below say (checked against aten/src/ATen/native/transformers/
        cuda/sdp_utils.cpp and sdp_utils_cpp.cpp of PyTorch 2.13). What they do not know, an older
        release's limits say, the probe finds out.

From torch 2.12 on the kernel behind its flash can be swapped for FlashAttention-3's or -4's: see
use_flash_impl(). They have no dropout; the report then names them, "flash (FA3)".
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.spec import Backend, BackendUnavailable, Caps, Spec, visible

HALF = ("float16", "bfloat16")
CACHES = ("none", "dynamic", "static")


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: Any = None, kernel: SDPBackend | None = None) -> Tensor:  # fmt: skip
    """Attention by F.scaled_dot_product_attention.

    Args:
        q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D), all of one dtype.
        segments: (B, Tk) int32; the queries are the last Tq positions.
        cache: a StaticView, where k and v are the buffers of a static cache; or None.
        kernel: the one kernel that may run; None leaves the choice to PyTorch.

    Returns:
        (B, Tq, H, D) in q's dtype.

    Raises:
        RuntimeError: the pinned kernel cannot run these inputs (PyTorch's own words), or the switch
            for deterministic algorithms was on when this was chosen and is off now.
    """
    if spec.deterministic and spec.grad:
        check_switch(q.device.type, kernel)
    Tq, Tk = q.shape[1], k.shape[1]
    if Tq > Tk:  # the first Tq - Tk queries come before every key: zeros, and no kernel is asked
        out = attend(q[:, Tq - Tk :], k, v, spec, segments=segments, kernel=kernel)
        return F.pad(out, (0, 0, 0, 0, Tq - Tk, 0))

    window = None if spec.window is None or spec.window >= Tk else spec.window
    attn_mask: Tensor | None = None
    is_causal = False
    if cache is not None:
        attn_mask = cache.seen(Tq, spec.window)
    elif window is None and segments is None:
        if Tq == Tk:
            is_causal = True
        elif Tq > 1:
            if kernel == SDPBackend.FLASH_ATTENTION and q.is_cuda:
                from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: 1 s

                attn_mask = causal_lower_right(Tq, Tk)
            else:
                attn_mask = mask(Tq, Tk, None, None, q.device)
    else:
        attn_mask = mask(Tq, Tk, window, segments, q.device)

    grouped = spec.n_kv_head != spec.n_head
    takes_no_groups = attn_mask is not None or kernel == SDPBackend.EFFICIENT_ATTENTION
    if grouped and takes_no_groups and q.is_cuda:
        # Of the CUDA kernels that take a mask, most take no grouped heads: rather than fall to
        # the math kernel and its O(T^2) memory, repeat each K/V head for its query heads.
        k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
        grouped = False

    q_BHTD, k_BHTD, v_BHTD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # A list given to sdpa_kernel is a set of permissions; one element is a pin.
    with sdpa_kernel([kernel]) if kernel is not None else nullcontext():
        out = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask, spec.dropout, is_causal, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def check_switch(device: str, kernel: SDPBackend | None) -> None:
    """Raises: RuntimeError where a deterministic backward needs PyTorch's switch, and it is off."""
    needed = device == "cuda" and kernel != SDPBackend.MATH
    if needed and not torch.are_deterministic_algorithms_enabled():  # may be compiled
        raise RuntimeError(
            "the backward was to give the same bits each time, and for that "
            "torch.use_deterministic_algorithms(True) must stay on"
        )


def mask(Tq: int, Tk: int, window: int | None, segments: Tensor | None,
         device: torch.device) -> Tensor:  # fmt: skip
    """Which keys each query sees, as bool (Tq, Tk), or (B, 1, Tq, Tk) with segments."""
    i = torch.arange(Tq, device=device)[:, None]
    j = torch.arange(Tk, device=device)[None, :]
    if segments is None:
        return visible(i, j, Tk - Tq, window)
    return visible(i, j, Tk - Tq, window, segments[:, -Tq:, None], segments[:, None, :])[:, None]


# Capabilities (major) that each is made for: _fa3.py and _fa4.py of torch/nn/attention in 2.13.
FLASH_IMPLS = {"FA2": (), "FA3": (9,), "FA4": (9, 10)}


def flash_impl() -> str:
    """Whose kernel PyTorch's flash is on CUDA now: its own "FA2", or "FA3" or "FA4"."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current and current()) or "FA2"


def use_flash_impl(impl: str) -> None:
    """Make PyTorch's flash kernel on CUDA, for the whole process, the one of that generation.

    Args:
        impl: "FA2" is PyTorch's own; "FA3" and "FA4" are those of packages that must be installed.

    Raises:
        BackendUnavailable: no such name, torch before 2.12, no CUDA device or one that the kernel
            is not made for: nothing has changed. Or the package does not load: PyTorch's own is
            back.
    """
    if impl not in FLASH_IMPLS:
        raise BackendUnavailable(
            f"the flash kernel must be one of {', '.join(FLASH_IMPLS)}, got {impl!r}"
        )
    if impl == flash_impl():
        return
    if impl == "FA2":
        torch.nn.attention.restore_flash_attention_impl()
        return
    why = f"PyTorch's flash kernel cannot be {impl} here: "
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise BackendUnavailable(f"{why}that needs torch >= 2.12, this is {torch.__version__}")
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"{why}there is no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if major not in FLASH_IMPLS[impl]:
        made_for = " and ".join(f"{m}.x" for m in FLASH_IMPLS[impl])
        raise BackendUnavailable(
            f"{why}it is made for compute capability {made_for}, "
            f"{torch.cuda.get_device_name()} has {major}.{minor}"
        )
    try:
        torch.nn.attention.activate_flash_attention_impl(impl)
    except Exception as e:  # whatever the import of its package raises
        raise BackendUnavailable(f"{why}its package does not load ({type(e).__name__}: {e})") from e


def _pinned(name: str, title: str, kernel: SDPBackend, *caps: Caps) -> Backend:
    return Backend(name, title, partial(attend, kernel=kernel), caps, fallback="sdpa")


BACKEND = Backend(
    name="sdpa",
    title="PyTorch scaled_dot_product_attention",
    attend=attend,
    caps=(
        Caps(("cuda",), min_torch="2.0", deterministic_switch=True, caches=CACHES),
        Caps(("cpu", "mps"), min_torch="2.0", caches=CACHES),
    ),
    fallback="manual",
)
FLASH = _pinned(
    "sdpa_flash",
    "PyTorch SDPA pinned to its FlashAttention kernel",
    SDPBackend.FLASH_ATTENTION,
    Caps(
        ("cuda",),
        HALF,
        min_capability=(8, 0),
        min_torch="2.3",
        head_dim_max=256,
        window=False,
        segments=False,
        deterministic_switch=True,
    ),
    Caps(("cpu",), min_torch="2.3", dropout=False),
)
_EFFICIENT = Caps(
    ("cuda",),
    HALF,
    min_capability=(8, 0),
    min_torch="2.3",
    head_dim_multiple=8,
    deterministic_switch=True,
)
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
    Caps(
        ("cuda",),
        HALF,
        min_capability=(8, 0),
        min_torch="2.5",
        head_dim_max=128,
        head_dim_multiple=8,
        dropout_step=1 / 16,
        deterministic=False,
    ),
)
MATH = _pinned(
    "sdpa_math",
    "PyTorch SDPA pinned to its unfused kernel, O(S^2) memory",
    SDPBackend.MATH,
    Caps(min_torch="2.3"),
)
