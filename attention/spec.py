"""The attention contract: what can be requested, what a machine has, what a backend can do.

For every query i of head h, over the keys j that it may see (see :func:`visible`):

    out[b,i,h] = sum_j softmax_j( q[b,i,h] . k[b,j,g(h)] / sqrt(D) ) v[b,j,g(h)]

Three things that some models change: `scale` stands in place of 1 / sqrt(D); `softcap`, c, makes of
each score s the bounded c * tanh(s / c) (Gemma 2, arXiv 2408.00118); `sinks`, a learned number for
each head, joins the softmax as the score of one more key that all see and that has no value, so a
head may attend to nothing (GPT-OSS; Miller 2023, "Attention is off by one").

Layout ``(B, T, H, D)``: q ``(B, Tq, H, D)``, k and v ``(B, Tk, Hkv, D)``, out ``(B, Tq, H, D)``.
Query head h reads key/value head ``g(h) = h // (H / Hkv)``, so multi-head, grouped-query and
multi-query attention are one rule. A row that sees no key gives zeros, and zero gradients. A
segment is one run of neighbouring positions, such as a packed document or padding: `segments` holds
the segment ids.

This file does not import torch: what one machine would choose can be computed and tested on any.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

DTYPES = ("float16", "bfloat16", "float32", "float64")
CACHES = ("none", "dynamic", "static", "paged")
UNKNOWN_VERSION = "unknown version"  # of a package that imports but has no version


def visible(
    i: Any, j: Any, offset: Any = 0, window: int | None = None, seg_i: Any = None, seg_j: Any = None
) -> Any:
    """Whether query i may see key j: the one definition of masking in this project.

    Causal, aligned bottom-right, so that the last query always meets the last key. With
    ``offset = Tk - Tq`` (here Tq = 3, Tk = 5, and on the right with ``window=2``)::

                k0 k1 k2 k3 k4           k0 k1 k2 k3 k4
            q0   x  x  x  .  .       q0   .  x  x  .  .
            q1   x  x  x  x  .       q1   .  .  x  x  .
            q2   x  x  x  x  x       q2   .  .  .  x  x

    Args:
        i, j: query and key positions, integers or integer tensors that broadcast.
        offset: Tk - Tq.
        window: a query sees at most this many keys, itself included; None is all of them.
        seg_i, seg_j: segment ids of the query and of the key, which must be equal.

    Returns:
        bool, or a bool tensor of the broadcast shape.
    """
    seen = j <= i + offset
    if window is not None:
        seen = seen & (j > i + offset - window)
    if seg_i is not None:
        seen = seen & (seg_i == seg_j)
    return seen


@dataclass(frozen=True)
class Spec:
    """What an attention backend is asked to compute, the same for all layers of a model.

    Raises:
        ValueError: a value that no backend could ever support.
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    dtype: str
    window: int | None = None  # keys that a query sees, itself included
    dropout: float = 0.0  # on the attention probabilities
    segments: bool = False  # will `segments` be passed to attend()?
    grad: bool = True  # will backward() be called?
    cache: str = "none"
    compiled: bool = False  # will it run inside torch.compile?
    page_size: int | None = None  # tokens a page, with cache="paged"
    hub_kernels: bool = False  # may prebuilt kernels be downloaded, and run?
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # c: scores become c * tanh(s / c), after the scale
    sinks: bool = False  # will `sinks` be passed to attend()?
    lse: bool = False  # will Backend.partial be called? It returns each row's log-sum-exp too

    def __post_init__(self) -> None:
        if self.n_head < 1 or self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            got = f"n_head={self.n_head}, n_kv_head={self.n_kv_head}"
            raise ValueError(f"n_head must be a positive multiple of n_kv_head, got {got}")
        for name in ("head_dim", "window", "page_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("scale", "softcap"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        # The default written out is the default still: one Spec, one key.
        if self.scale is not None and math.isclose(self.scale, 1 / math.sqrt(self.head_dim)):
            object.__setattr__(self, "scale", None)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {self.cache!r}")
        if (self.page_size is not None) != (self.cache == "paged"):
            got = f"page_size={self.page_size} and cache={self.cache!r}"
            raise ValueError(f"page_size belongs to the 'paged' cache, got {got}")

    @property
    def softmax_scale(self) -> float:
        """What q . k is multiplied by."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale


@dataclass(frozen=True)
class Policy:
    """What is allowed in choosing a backend; it does not change what is computed."""

    fallback: bool = True  # go on to the next backend; False: a refusal is an error
    hub_kernels: bool = False  # download prebuilt kernels, and run them
    mps_sdpa: bool = False  # run PyTorch's SDPA on Apple's Metal, where it has given wrong numbers


@dataclass(frozen=True)
class Machine:
    """A device and its software: this machine's, or one that a test describes."""

    device: str  # "cuda", "cpu" or "mps"
    name: str  # "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] | None = None  # CUDA compute capability
    torch: str = "0"  # version, "2.13.0+cpu"
    cuda: str | None = None  # the CUDA version that torch was built with
    # Import name -> version, or the text of the error that its import raised; only those that are
    # installed.
    packages: Mapping[str, str] = field(default_factory=dict)
    interpreted: bool = False  # do Triton kernels run in Triton's interpreter, on the CPU?
    deterministic: bool = False  # is torch.use_deterministic_algorithms(True) on?
    matrix_units: bool = False  # has the CPU units for bfloat16 products (AMX)?

    @classmethod
    def here(cls, device: str, packages: Iterable[str] = ()) -> Machine:
        """This machine. The packages are imported: one that is installed may still fail to load."""
        import torch

        from .system import cpu_name, import_version, matrix_units

        kind = torch.device(device).type
        name, capability = cpu_name() or platform.processor() or platform.machine(), None
        if kind == "cuda":
            name = torch.cuda.get_device_name(device)
            capability = torch.cuda.get_device_capability(device)
        versions = {p: import_version(p) for p in packages}
        found = {p: v or UNKNOWN_VERSION for p, v in versions.items() if v is not None}
        return cls(
            kind, name, capability, torch.__version__, torch.version.cuda, found,
            interpreted=os.environ.get("TRITON_INTERPRET") == "1",
            deterministic=torch.get_deterministic_debug_mode() == 2,  # 1 only warns
            matrix_units=kind == "cpu" and matrix_units(),
        )  # fmt: skip


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0). A beta comes before what it
    leads to: "4.0.0b26" is (4, 0, -1, 26)."""
    leading = re.match(r"(\d+(?:\.\d+)*)(?:\.?b(?:eta)?(\d+))?", text)
    if not leading:
        return ()
    *first, last = (int(n) for n in leading[1].split("."))
    return (*first, last - 1, int(leading[2])) if leading[2] else (*first, last)


def dotted(capability: tuple[int, int] | None) -> str:
    """(9, 0) as "9.0"."""
    return "{}.{}".format(*capability) if capability else "none"


class Refusal(str):
    """One reason why a backend cannot do what is asked: a sentence for people, a kind for code."""

    kind: str  # a field of Spec or of Machine: "device", "packages", "capability", "dtype", ...

    def __new__(cls, text: str, kind: str = "") -> Refusal:
        refusal = super().__new__(cls, text)
        refusal.kind = kind
        return refusal


# What a Spec may ask for and a row of Caps may lack, by the name that it has in both.
LACKS = {
    "window": "it has no sliding window",
    "segments": "it has no segments (packed or padded sequences)",
    "scale": "its scores are scaled by 1/sqrt(head_dim), not by {0.scale:g}",
    "softcap": "it does not cap scores",
    "sinks": "it has no attention sinks",
    "dropout": "it has no dropout, and {0.dropout:g} is asked (--dropout=0)",
    "lse": "it does not return the log-sum-exp, which --context_parallel needs",
    "grad": "it has no backward pass",
}


@dataclass(frozen=True)
class Caps:
    """What a backend supports on some devices. By default: all devices and dtypes, window,
    dropout, segments, the backward pass, a dynamic cache. To be declared: `scale`, `softcap`,
    `sinks`, `lse`, a static and a paged cache."""

    devices: tuple[str, ...] = ("cuda", "cpu", "mps")
    dtypes: tuple[str, ...] = DTYPES
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None  # the latest supported
    min_torch: str | None = None
    head_dim_max: int | None = None
    head_dim_multiple: int = 1
    window: bool = True
    dropout: bool = True
    dropout_step: float | None = None  # dropout must be a multiple of this
    segments: bool = True
    scale: bool = False
    softcap: bool = False
    sinks: bool = False
    lse: bool = False  # has it a `partial`? It takes no dropout, sinks or cache
    lse_segments: bool = True  # and does that take segments, where `segments` does?
    grad: bool = True
    deterministic: bool = True  # the backward obeys use_deterministic_algorithms(True)
    caches: tuple[str, ...] = ("none", "dynamic")
    page_multiple: int = 1  # page_size must be a multiple of this
    packages: tuple[str, ...] = ()  # import names, with a minimum version if needed: "a>=2.1"
    hub_kernels: bool = False  # downloads its kernels from the hub, if the Spec allows it
    interpreted: bool = False  # only in Triton's interpreter

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        """Every reason why this cannot do `spec` on `machine`; empty means that it can."""
        why: list[Refusal] = []

        def refuse(kind: str, text: str) -> None:
            why.append(Refusal(text, kind))

        if machine.device not in self.devices:
            refuse("device", f"it runs on {' and '.join(self.devices)}, not on {machine.device}")
        if self.min_torch and version(machine.torch) < version(self.min_torch):
            refuse("torch", f"it needs torch >= {self.min_torch}, this is {machine.torch}")
        if self.interpreted and not machine.interpreted:
            text = "in Triton's interpreter only, which is slow and for tests (TRITON_INTERPRET=1)"
            refuse("interpreted", f"it runs on {machine.device} {text}")
        for package, least in (p.partition(">=")[::2] for p in self.packages):
            found = machine.packages.get(package)
            if found is None:
                refuse("packages", f"package '{package}' is not installed")
            elif not version(found) and found != UNKNOWN_VERSION:
                broken = f"is installed but does not import ({found})"
                refuse("packages", f"package '{package}' {broken}")
            elif least and version(found) and version(found) < version(least):
                refuse("packages", f"package '{package}' must be >= {least}, this is {found}")
        if self.hub_kernels and not spec.hub_kernels:
            refuse("hub_kernels", "it may not download a kernel (--attention_hub_kernels=True)")
        low, high, has = self.min_capability, self.max_capability, machine.capability or (0, 0)
        if low and (has < low or (high and has > high)):
            need = dotted(low) if high == low else f"{dotted(low)} to {dotted(high)}"
            need = need if high else f">= {dotted(low)}"
            have = f"{machine.name} has {dotted(machine.capability)}"
            refuse("capability", f"it needs compute capability {need}, {have}")
        if spec.dtype not in self.dtypes:
            takes = " and ".join(self.dtypes)
            refuse("dtype", f"it takes {takes}, not {spec.dtype} (--dtype={self.dtypes[-1]})")
        if (most := self.head_dim_max) and spec.head_dim > most:
            refuse("head_dim", f"it takes a head_dim up to {most}, not {spec.head_dim}")
        if spec.head_dim % (step := self.head_dim_multiple):
            refuse("head_dim", f"head_dim must be a multiple of {step}, not {spec.head_dim}")
        for name, text in LACKS.items():
            if getattr(spec, name) and not getattr(self, name):
                refuse(name, text.format(spec))
        if (p := self.dropout_step) and spec.dropout % p:
            refuse("dropout", f"dropout must be a multiple of {p:g}, not {spec.dropout:g}")
        if spec.lse and self.lse:
            parts = "over a sequence in parts it has no"
            if spec.segments and self.segments and not self.lse_segments:
                refuse("lse", f"{parts} segments")
            if spec.dropout and self.dropout:
                refuse("lse", f"{parts} dropout, and {spec.dropout:g} is asked (--dropout=0)")
            if spec.sinks and self.sinks:
                refuse("lse", f"{parts} attention sinks")
            if spec.cache != "none":
                refuse("lse", f"{parts} cache")
        if spec.grad and machine.deterministic and not self.deterministic:
            mend = "--deterministic=False"
            refuse("deterministic", f"its backward pass adds up in no fixed order ({mend})")
        if spec.cache not in self.caches and spec.cache == "none":
            refuse("cache", f"it only reads a {' or '.join(self.caches)} cache (--kv_cache)")
        elif spec.cache not in self.caches:
            refuse("cache", f"it has no '{spec.cache}' cache")
        elif (size := spec.page_size) and size % (step := self.page_multiple):
            refuse("page_size", f"page_size must be a multiple of {step}, not {size}")
        return why


@dataclass(frozen=True)
class Partial:
    """Attention to some of the keys, and L, the log-sum-exp of each row's scores, by which ring.py
    merges it with attention to the others. `offset` is that of visible(): the position of the first
    query less that of the first key. `segments` is None or a pair, of the queries (B, Tq) and of
    the keys (B, Tk). Every result is float32, or float64 for float64.

    ``forward(q, k, v, spec, offset, segments) -> (out, L)``: out (B, Tq, H, D), normalised over
    these keys alone, and L (B, H, Tq), the natural logarithm. A row that sees none of these keys
    has out 0 and L -inf.
    ``backward(dout, q, k, v, out, L, spec, offset, segments) -> (dq, dk, dv)``: with out and L of
    the whole rows, what these keys add to dq, and these queries to dk and dv.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """One attention kernel.

    ``attend(q, k, v, spec, *, segments=None, cache=None) -> out`` takes q ``(B, Tq, H, D)``, k
    and v ``(B, Tk, Hkv, D)``, segments ``(B, Tk)`` int32 whose last Tq positions are the
    queries', and returns ``(B, Tq, H, D)`` in q's dtype. With spec.sinks, and only then, it also
    gets ``sinks=``, ``(H,)`` of any floating dtype, whose gradient flows too. With a static or
    paged cache `cache` is a view (attention/views.py), and k and v are the cache's own buffers or
    pages, which already hold this call's keys and values. A kernel only reads them.
    """

    name: str
    title: str
    attend: Callable[..., Any]
    caps: tuple[Caps, ...]  # a row for each group of devices and dtypes with the same limits
    fallback: str | None  # the next name to try
    aliases: tuple[str, ...] = ()
    install: str | None = None  # the command that installs it
    fullgraph: bool = True  # does torch.compile trace it without a graph break?
    partial: Partial | None = None  # what Caps.lse promises

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        """Every reason why this cannot do `spec` on `machine`; empty means that it can.

        Of several rows of caps for this device, the reasons are those of the closest one.
        """
        rows = [c for c in self.caps if machine.device in c.devices]
        if not rows:
            devices = dict.fromkeys(d for c in self.caps for d in c.devices)
            text = f"it runs on {' and '.join(devices)}, not on {machine.device}"
            return [Refusal(text, "device")]

        def distance(why: list[Refusal]) -> tuple[int, bool]:
            # A tie: the user can change a dtype, but not the GPU, nor that this is training.
            return len(why), any(w.kind in ("capability", "grad") for w in why)

        why = min((c.why_not(spec, machine) for c in rows), key=distance)
        return [
            Refusal(f"{w} ({self.install})", w.kind) if self.install and w.kind == "packages" else w
            for w in why
        ]


class BackendUnavailable(ValueError):
    """No allowed backend can compute what was requested."""


@dataclass(frozen=True)
class Resolution:
    """The backend that will run, and every backend refused before it, with the reasons."""

    requested: str
    backend: Backend
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()  # that the profiler saw in the probe; empty: not probed
    proof: dict[str, Any] | None = None  # probing.Probe.proof; None: not probed
    note: str = ""  # a warning about what will run

    def warnings(self) -> list[str]:
        """One text for each refused backend: its reasons, and what is tried next; then the note."""
        names = [*self.rejected, self.backend.name]
        lines = []
        for name, after in pairwise(names):
            named = name == names[0] and self.requested not in ("auto", "fastest")
            asked = "requested but " if named else "refused: "
            why = "; ".join(self.rejected[name])
            lines.append(f"{name} {asked}{why}.\nFalling back to '{after}'.")
        return lines + [self.note] * bool(self.note)

    def info(self) -> str:
        """The one line that says what will run."""
        kernels = f"; kernel: {', '.join(self.kernels)}" if self.kernels else ""
        return f"Attention backend: {self.backend.name} ({self.backend.title}{kernels})"

    def __str__(self) -> str:
        """The lines that a user sees."""
        warned = ["WARNING: " + w.replace("\n", "\n         ") for w in self.warnings()]
        return "\n".join([*warned, "INFO: " + self.info()])
