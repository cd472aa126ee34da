"""The attention contract: mathematics, request, permissions and machine.

For every query i of head h, over the keys j that it may attend to (see :func:`visible`):

    out[b,i,h] = sum_j softmax_j( q[b,i,h] . k[b,j,g(h)] / sqrt(D) ) v[b,j,g(h)]

`scale` replaces 1 / sqrt(D); `softcap` c turns scores s into c * tanh(s / c) (Gemma 2, arXiv
2408.00118); `sinks`: a learned logit a head in the softmax, without a value (Miller 2023,
"Attention is off by one"); `alibi` adds :func:`alibi_bias` (Press et al. 2022, arXiv 2108.12409).

q and out are ``(B, Tq, H, D)``, k and v ``(B, Tk, Hkv, D)``; query head h reads key/value head
``g(h) = h // (H / Hkv)``. A fully masked row gives zeros and zero gradients. A segment is a run of
positions with one id in `segments`: a document, or padding."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from .machine import system

DTYPES = ("float16", "bfloat16", "float32", "float64")
CACHES = ("none", "dynamic", "static", "paged")
BUFFERS = CACHES[2:]  # read through a view (masks.py)
NO_LIMIT = 2**30  # larger windows overflow int32 positions
TINY = 2.0**-126  # the least normal float32: a smaller softcap would be rounded to 0
DROPOUT_STEP = 1 / 16  # cuDNN rounds dropout to multiples: they are a kind of their own
Numbers = Any  # integers or bools, also in tensors or arrays


def visible(i: Numbers, j: Numbers, offset: Numbers = 0, window: int | None = None,
            seg_i: Numbers = None, seg_j: Numbers = None, right: Numbers = 0) -> Numbers:
    """True if query i may attend to key j: the one definition of masking in this project.

    Causal, aligned bottom-right with ``offset = Tk - Tq``; pictures: docs/ATTENTION.md.

    i, j: integers, or tensors that broadcast. window: keys up to its own that a query attends to,
    itself included; None: all. seg_i, seg_j: segment ids, which must be equal. right: later keys
    that a query attends to; None: all."""
    seen = (i == i) & (j == j) if right is None else j <= i + offset + right
    if window is not None:
        seen = seen & (j > i + offset - window)
    if seg_i is not None:
        seen = seen & (seg_i == seg_j)
    return seen


def alibi_bias(slope: Numbers, i: Numbers, j: Numbers, offset: Numbers = 0) -> Numbers:
    """ALiBi's bias of a score; `offset` is Tk - Tq."""
    return -slope * abs(i + offset - j)


@dataclass(frozen=True)
class Spec:
    """A requested attention. Raises ValueError: an option is out of range."""

    n_head: int
    n_kv_head: int
    head_dim: int
    dtype: str
    window: int | None = None  # see visible()
    dropout: float = 0.0
    segments: bool = False  # attend() receives `segments`
    grad: bool = True  # backward() will be called
    cache: str = "none"
    compiled: bool = False  # runs inside torch.compile
    page_size: int | None = None  # tokens
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float | None = None
    sinks: bool = False  # attend() receives `sinks`
    lse: bool = False  # Backend.partial is called
    right: int | None = 0  # see visible(); 0: causal
    alibi: bool = False  # attend() receives `alibi_slopes`
    kind: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_head", "n_kv_head", "head_dim", "window", "right", "page_size"):
            value, least = getattr(self, name), int(name != "right")
            optional = name in ("window", "right", "page_size")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
            if optional and not value < NO_LIMIT:
                vars(self)[name] = None
        if self.n_head % self.n_kv_head:
            got = f"n_head={self.n_head}, n_kv_head={self.n_kv_head}"
            raise ValueError(f"n_head must be a multiple of n_kv_head, got {got}")
        for name, above in (("scale", 0.0), ("softcap", TINY)):
            value = getattr(self, name)
            if value is not None and not above < value < math.inf:
                raise ValueError(f"{name} must be finite and above {above:.2g}, got {value!r}")
        for name, known in (("dtype", DTYPES), ("cache", CACHES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
        if (self.page_size is not None) != (self.cache == "paged"):
            got = f"page_size={self.page_size} and cache={self.cache!r}"
            raise ValueError(f"page_size belongs to the 'paged' cache, got {got}")
        if self.segments and self.cache in BUFFERS:
            raise ValueError(f"segments must be False with a {self.cache} cache, got True")
        default = 1 / math.sqrt(self.head_dim)
        if self.scale is not None and abs(self.scale - default) <= 1e-15 * default:
            vars(self)["scale"] = None
        vars(self)["kind"] = self._words(numbers=False)

    def __str__(self) -> str:
        return self._words(numbers=True)

    def _words(self, numbers: bool) -> str:
        group = self.n_head // self.n_kv_head
        heads = f"{group} query heads a key/value head" if group > 1 else "heads"
        if numbers:
            heads = f"{self.n_head} heads" + f" over {self.n_kv_head}" * (group > 1)
        words = [f"{heads} of {self.head_dim}", self.dtype]
        for name in ("window", "right", "dropout", "scale", "softcap"):
            if value := getattr(self, name):
                words.append(f"{name} {value:g}" if numbers else name)
        if not numbers and self.dropout and not self.dropout % DROPOUT_STEP:
            words.append("in sixteenths")
        if self.right is None:
            words.append("not causal")
        flags = "segments", "sinks", "alibi", "lse", "compiled"
        words += [name for name in flags if getattr(self, name)]
        if self.cache != "none":
            words.append(f"{self.cache} cache" + f" of {self.page_size}" * bool(self.page_size))
        return ", ".join([*words, "training" if self.grad else "inference"])

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale


@dataclass(frozen=True)
class Policy:
    fallback: bool = True  # False: a refusal is an error
    hub_kernels: bool = False  # download prebuilt kernels
    mps_sdpa: bool = False  # SDPA on Apple's Metal despite known bugs


@dataclass(frozen=True)
class Machine:
    """A device and its software, here or described."""

    device: str  # "cuda", "cpu" or "mps"
    name: str  # "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] | None = None  # of CUDA
    torch: str = "0"  # version, "2.13.0+cpu"
    cuda: str | None = None  # that torch was built with
    # Import name -> version or error; None: import when needed.
    packages: Mapping[str, str] | None = field(default_factory=dict)
    interpreted: bool = False  # Triton's interpreter, on the CPU
    deterministic: bool = False  # torch.use_deterministic_algorithms(True)
    bfloat16_units: bool = False  # AMX or AVX512_BF16

    def version_of(self, package: str) -> str | None:
        """Version, or the error of the import; None: not installed."""
        known = self.packages
        return system.import_version(package) if known is None else known.get(package)

    @classmethod
    def here(cls, device: str) -> Machine:
        kind = torch.device(device).type
        name, capability = system.cpu_name() or platform.processor() or platform.machine(), None
        if kind == "cuda":
            name = torch.cuda.get_device_name(device)
            capability = torch.cuda.get_device_capability(device)
        return cls(
            kind, name, capability, torch.__version__, torch.version.cuda, packages=None,
            interpreted=os.environ.get("TRITON_INTERPRET") == "1",
            deterministic=torch.get_deterministic_debug_mode() == 2,  # 1 only warns
            bfloat16_units=kind == "cpu" and bool(system.bfloat16_units()),
        )
