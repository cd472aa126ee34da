"""The capabilities that a kernel declares, and the reasons to refuse a request. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

from .machine.system import UNKNOWN_VERSION, autocast_off
from .spec import CACHES, DTYPES, Machine, Spec

if TYPE_CHECKING:
    from torch import Tensor


def version(text: str) -> tuple[int, ...]:
    """The leading numbers: "2.13.0+cpu" is (2, 13, 0). A beta sorts before its release:
    "4.0.0b26" is (4, 0, -1, 26)."""
    leading = re.match(r"(\d+(?:\.\d+)*)(?:\.?b(?:eta)?(\d+))?", text)
    if not leading:
        return ()
    *first, last = (int(n) for n in leading[1].split("."))
    return (*first, last - 1, int(leading[2])) if leading[2] else (*first, last)


def dotted(capability: tuple[int, int] | None) -> str:
    return "{}.{}".format(*capability) if capability else "none"


class Refusal(str):
    """One reason to refuse a request. `kind` is the field of Spec or Machine that causes it."""

    kind: str  # "device", "packages", "capability", "dtype", ...

    def __new__(cls, text: str, kind: str = "") -> Refusal:
        refusal = super().__new__(cls, text)
        refusal.kind = kind
        return refusal


# Fields that Spec and Caps share: requested there, supported here.
LACKS = {
    "right": "it is causal only (got right={0.right})",
    "window": "it does not support a sliding window",
    "segments": "it does not support segments (packed or padded sequences)",
    "scale": "it scales scores by 1/sqrt(head_dim) only (got scale {0.scale:g})",
    "softcap": "it does not support a softcap",
    "sinks": "it does not support attention sinks",
    "dropout": "it does not support dropout (got {0.dropout:g}; use --dropout=0)",
    "lse": "it does not return the log-sum-exp, which --context_parallel needs",
    "grad": "it has no backward pass",
}


def requests(spec: Spec, feature: str) -> bool:
    """True if the Spec requests this feature of LACKS."""
    if feature == "right":
        return spec.right != 0
    if feature == "window":  # a limit on either side
        return bool(spec.window or spec.right)
    return bool(getattr(spec, feature))


@dataclass(frozen=True)
class Caps:
    """What a backend supports on some devices."""

    devices: tuple[str, ...] = ("cuda", "cpu", "mps")
    dtypes: tuple[str, ...] = DTYPES
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    min_torch: str | None = None
    head_dim_max: int | None = None
    head_dim_multiple: int = 1
    right: bool = False  # later keys: all of them, or with `window` a number
    window: bool = True
    dropout: bool = True
    dropout_step: float | None = None  # dropout must be a multiple of this
    segments: bool = True
    scale: bool = False
    softcap: bool = False
    sinks: bool = False
    lse: bool = False  # the backend has a `partial`, which takes no dropout, sinks or cache
    lse_segments: bool = True  # `partial` takes segments
    grad: bool = True
    deterministic: bool = True  # the backward obeys use_deterministic_algorithms(True)
    caches: tuple[str, ...] = ("none", "dynamic")
    page_multiple: int = 1  # page_size must be a multiple of this
    packages: tuple[str, ...] = ()  # import names, with a minimum version if needed: "a>=2.1"
    interpreted: bool = False  # only in Triton's interpreter

    def __post_init__(self) -> None:
        for name, known in (("devices", ()), ("dtypes", DTYPES), ("caches", CACHES)):
            texts = getattr(self, name)
            ok = isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
            if not ok or (known and set(texts) - set(known)):
                some = f" of {', '.join(known)}" if known else ""
                raise ValueError(f"{name} must be a tuple{some}, got {texts!r}")

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        """Every reason why this cannot do `spec` on `machine`; empty if it can."""
        why: list[Refusal] = []

        def refuse(kind: str, text: str) -> None:
            why.append(Refusal(text, kind))

        if machine.device not in self.devices:
            refuse("device", f"it runs on {' and '.join(self.devices)}, not on {machine.device}")
        if self.min_torch and version(machine.torch) < version(self.min_torch):
            refuse("torch", f"it needs torch >= {self.min_torch}, this is {machine.torch}")
        if self.interpreted and not machine.interpreted:
            text = "only in Triton's slow interpreter, for tests (TRITON_INTERPRET=1)"
            refuse("interpreted", f"it runs on {machine.device} {text}")
        for package, least in (p.partition(">=")[::2] for p in self.packages):
            found = machine.version_of(package)
            if found is None:
                refuse("packages", f"package '{package}' is not installed")
            elif not version(found) and found != UNKNOWN_VERSION:
                broken = f"is installed but does not import ({found})"
                refuse("packages", f"package '{package}' {broken}")
            elif least and version(found) and version(found) < version(least):
                refuse("packages", f"package '{package}' must be >= {least}, this is {found}")
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
        for name in (n for n in LACKS if requests(spec, n) and not getattr(self, n)):
            if name != "window" or spec.window or self.right:  # else it is refused for `right`
                refuse(name, LACKS[name].format(spec))
        if (p := self.dropout_step) and spec.dropout % p:
            refuse("dropout", f"dropout must be a multiple of {p:g}, not {spec.dropout:g}")
        if spec.lse and self.lse:
            clashes = {
                "segments": spec.segments and self.segments and not self.lse_segments,
                f"dropout (got {spec.dropout:g}; use --dropout=0)": spec.dropout and self.dropout,
                "attention sinks": spec.sinks and self.sinks,
                "a cache": spec.cache != "none",
            }
            for what in (what for what, clash in clashes.items() if clash):
                refuse("lse", f"it does not support {what} when the sequence is split")
        if spec.grad and machine.deterministic and not self.deterministic:
            refuse("deterministic", "its backward is not deterministic (--deterministic=False)")
        if spec.cache not in self.caches:
            only = f"it only reads a {' or '.join(self.caches)} cache (--kv_cache)"
            lacks = f"it does not support the '{spec.cache}' cache"
            refuse("cache", only if spec.cache == "none" else lacks)
        elif (size := spec.page_size) and size % (step := self.page_multiple):
            refuse("page_size", f"page_size must be a multiple of {step}, not {size}")
        return why


@dataclass(frozen=True)
class Partial:
    """Attention to some of the keys, and L, the log-sum-exp of each row's scores (ring.py).

    ``forward(q, k, v, spec, offset, segments) -> (out, L)``: out (B, Tq, H, D), normalized over
    these keys, and L (B, H, Tq), a natural logarithm. A fully masked row has out 0 and L -inf.
    ``backward(dout, q, k, v, out, L, spec, offset, segments) -> (dq, dk, dv)``: takes out and L of
    the whole rows and returns the contribution of these queries and keys.

    `offset` is the first query's position minus the first key's, as in visible(). `segments` is
    None or a pair of ids: (B, Tq) and (B, Tk). All results are float32, or float64 for float64.
    If the Spec is not causal, these are all keys of the rows: offset is Tk - Tq.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


def checked(name: str, attend: Callable[..., Tensor],
            caps: tuple[Caps, ...]) -> Callable[..., Tensor]:
    """Make attend() raise ValueError for options that no row of its caps has together, and for
    tensors that contradict the Spec or one another, and compute in the inputs' dtype whatever
    autocast says. torch.compile checks while it traces."""
    made = getattr(attend, "unchecked", None)  # functools.wraps gives it to a wrapper, too
    if made is not None and made[0] is attend:
        attend = made[1]
    # For each device and dtype the rows of caps, as (missing options, caches).
    optional = [option for option in LACKS if option not in ("lse", "grad")]
    every = [(tuple(o for o in optional if not getattr(c, o)), c.caches, c) for c in caps]
    rows = {
        (device, dtype): [row[:2] for row in every
                          if device in row[2].devices and dtype in row[2].dtypes]
        for device in dict.fromkeys(d for c in caps for d in c.devices) for dtype in DTYPES
    }
    others = [row[:2] for row in every]  # for a device or dtype that no row names

    @wraps(attend)
    def call(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: object) -> Tensor:
        able, reasons = False, ""
        for missing, caches in rows.get((q.device.type, spec.dtype)) or others:
            lacks = [LACKS[o].format(spec) for o in missing if requests(spec, o)]
            if spec.cache not in caches:
                lacks.append(f"it does not read the '{spec.cache}' cache")
            if not lacks:
                able = True
                break
            reasons = reasons or ", ".join(lacks)
        if not able:
            raise ValueError(f"{name} cannot do this: {reasons}")
        if wrong := contradiction(q, k, v, spec, *map(options.get, OPTIONS)):
            raise ValueError(wrong)
        with autocast_off(q):
            return attend(q, k, v, spec, **options)

    call.unchecked = call, attend  # type: ignore[attr-defined]
    return call


OPTIONS = ("segments", "cache", "sinks")  # arguments of attend()
INTEGERS = ("int32", "int64", "int16", "int8", "uint8")


def contradiction(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: object, cache: Any,
                   sinks: object) -> str:
    """What is wrong with attend()'s arguments, in words; "" if nothing is."""
    import torch

    flat = q.layout == k.layout == v.layout == torch.strided
    if not flat or q.is_nested or k.is_nested or v.is_nested:
        return f"q, k and v must be dense, got {shape_of(q)}, {shape_of(k)}, {shape_of(v)}"
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    fits = q.dim() == 4 and k.dim() == 4 and q.shape[2:] == (H, D) and k.shape[2:] == (Hkv, D)
    if not (fits and q.dtype == k.dtype == v.dtype and str(q.dtype)[6:] == spec.dtype):
        swapped = q.dim() == 4 and q.shape[1] == H and q.shape[2] != H
        hint = "; PyTorch's (batch, heads, tokens, head_dim) needs .transpose(1, 2)"
        return (
            f"q, k and v must be (batch, tokens, heads, head_dim) with {H}, {Hkv} and {Hkv} heads "
            f"of {D} in {spec.dtype}, as the Spec says; got {shape_of(q)}, {shape_of(k)}, "
            f"{shape_of(v)}{hint if swapped else ''}"
        )
    if k.shape != v.shape:
        return f"v must have k's shape {tuple(k.shape)}, got {shape_of(v)}"
    if not (on := q.device) == k.device == v.device:
        return f"q, k and v must be on one device, got {on}, {k.device} and {v.device}"
    B, kind = q.shape[0], "none" if cache is None else getattr(cache, "kind", "")
    if kind != (spec.cache if spec.cache in ("static", "paged") else "none"):
        return (
            f"cache must be a view of the Spec's '{spec.cache}' cache, got {type(cache).__name__}"
        )
    if kind == "paged" and k.shape[1] != spec.page_size:
        return f"k and v must be pages of {spec.page_size} tokens, got {shape_of(k)}"
    if kind != "paged" and k.shape[0] != B:
        return f"k and v must have q's batch of {B}, got {shape_of(k)}"
    if kind == "static" and cache.length != k.shape[1]:
        return f"cache.length must be k's {k.shape[1]} positions, got {cache.length}"
    for name, t in (("segments", segments), ("sinks", sinks)):
        if (t is not None) != (own := getattr(spec, name)):
            return f"{name} must agree with {name}={own} in the Spec, got {shape_of(t)}"
    wanted: list[tuple[str, object, tuple[int, ...], tuple[str, ...]]] = []
    if spec.sinks:
        wanted.append(("sinks", sinks, (H,), DTYPES))
    if spec.segments:
        if cache is not None:
            return f"segments must be None with a view of a cache, got {shape_of(segments)}"
        wanted.append(("segments", segments, (B, k.shape[1]), INTEGERS))
    if cache is not None:
        wanted += [(f"cache.{n}", getattr(cache, n), (B,), INTEGERS) for n in ("start", "count")]
    if kind == "paged":
        wanted.append(("cache.page_table", cache.page_table, (B, -1), INTEGERS))
    for name, t, shape, dtypes in wanted:
        if why := unlike(t, shape, on, dtypes):
            return f"{name} must be {why}"
    if spec.segments:
        from .views import in_pieces

        if in_pieces(segments):
            return "segments must be runs of equal ids, got an id that comes again after others"
    return ""


def unlike(t: object, shape: tuple[int, ...], on: object, dtypes: tuple[str, ...]) -> str:
    """Empty if t is a tensor of this shape (-1: any size), device and one of these dtypes, else
    what is expected and what t is."""
    import torch

    if (isinstance(t, torch.Tensor) and dense(t) and t.device == on and str(t.dtype)[6:] in dtypes
            and t.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, t.shape))):
        return ""
    return f"{shape} {' or '.join(dtypes)} on {on}, got {shape_of(t)}"


def dense(t: Tensor) -> bool:
    """False for sparse and nested tensors, and those of other layouts."""
    import torch

    return t.layout == torch.strided and not t.is_nested


def shape_of(t: object) -> str:
    """A tensor as "(2, 3) float32 on cpu", anything else as it prints itself."""
    import torch

    if not isinstance(t, torch.Tensor):
        return repr(t)
    if not dense(t):
        return f"a {'nested' if t.is_nested else str(t.layout).removeprefix('torch.')} tensor"
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


@dataclass(frozen=True)
class Backend:
    """One attention kernel.

    ``attend(q, k, v, spec, *, segments=None, cache=None) -> out`` takes q ``(B, Tq, H, D)``, k
    and v ``(B, Tk, Hkv, D)``, segments ``(B, Tk)`` int32 (the queries are the last Tq positions),
    and returns ``(B, Tq, H, D)`` in q's dtype. With spec.sinks it also receives ``sinks=``,
    ``(H,)`` of any floating dtype, and returns its gradient. With a static or paged cache `cache`
    is a view (attention/views.py) of k and v, read-only buffers or pages that already hold this
    call's keys and values.
    """

    name: str
    title: str
    attend: Callable[..., Tensor]
    caps: tuple[Caps, ...]  # a row for each group of devices and dtypes with the same limits
    fallback: str | None  # where the search in select.PREFERENCE starts if this is refused
    aliases: tuple[str, ...] = ()
    install: str | None = None  # a shell command
    fullgraph: bool = True  # torch.compile traces it without a graph break
    partial: Partial | None = None  # present if Caps.lse
    prebuilt: Backend | None = None  # the same kernel, downloaded: used if Policy.hub_kernels
    varlen: tuple[str, ...] = ()  # devices where it reads each segment as a sequence of its own:
    # NaN in one does not reach another. Elsewhere masked keys are multiplied by 0.

    def __post_init__(self) -> None:
        rows = self.caps
        if not (rows and isinstance(rows, tuple) and all(isinstance(c, Caps) for c in rows)):
            raise ValueError(f"caps must be a tuple of Caps: caps=(Caps(...),), got {rows!r}")
        if not (isinstance(self.name, str) and self.name.isprintable() and self.name.strip()):
            raise ValueError(f"name must be a text on one line, got {self.name!r}")
        if not callable(self.attend):
            raise ValueError(f"attend must be a function, got {self.attend!r}")
        object.__setattr__(self, "attend", checked(self.name, self.attend, self.caps))

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        """The reasons of the Caps row with the fewest violations; empty if one has none."""
        rows = [c for c in self.caps if machine.device in c.devices]
        if not rows:
            devices = dict.fromkeys(d for c in self.caps for d in c.devices)
            text = f"it runs on {' and '.join(devices)}, not on {machine.device}"
            return [Refusal(text, "device")]

        has, hard = machine.capability or (0, 0), {"capability": 1, "grad": 2}

        def distance(row: tuple[Caps, list[Refusal]]) -> tuple[int, int, int]:
            # In a tie prefer what a user can change, the dtype, then the nearest GPU.
            worst = max((hard.get(w.kind, 0) for w in row[1]), default=0)
            near = max(row[0].min_capability or has, min(has, row[0].max_capability or (99, 0)))
            return len(row[1]), worst, abs(16 * (near[0] - has[0]) + near[1] - has[1])

        why = min(((c, c.why_not(spec, machine)) for c in rows), key=distance)[1]
        fits = not all(c.why_not(replace(spec, grad=False), machine) for c in rows)
        if fits and [w.kind for w in why] == ["capability"]:
            text = f"to train {why[0]}; without gradients it runs (--inference)"
            why = [Refusal(text, "capability")]
        return [
            Refusal(f"{w} ({self.install})", w.kind) if self.install and w.kind == "packages" else w
            for w in why
        ]


class BackendUnavailable(ValueError):
    """No allowed backend can compute what was requested."""


class DeviceLost(RuntimeError):
    """A kernel has left the GPU in a state in which this process can run nothing more."""


class Proof(TypedDict):
    """The errors of a probe, relative to the largest true value, and their limits."""

    error: float  # of the output, on ordinary scores
    allowed: float
    grad_error: float | None  # of the gradient closest to its limit
    grad_allowed: float | None
    canary: bool  # earlier outputs did not move when the last token changed


@dataclass(frozen=True)
class Resolution:
    """The backend that will run, and those refused before it, with the reasons."""

    requested: str
    backend: Backend
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()  # kernels that the profiler saw in the probe; empty: not probed
    proof: Proof | None = None  # None: not probed
    note: str = ""  # a warning

    def warnings(self) -> list[str]:
        """One text for each refused backend, with its reasons; then the note."""
        names = [*self.rejected, self.backend.name]
        lines = []
        for name, after in pairwise(names):
            named = name == names[0] and self.requested not in ("auto", "fastest")
            verb = "requested but " if named else "refused: "
            why = "; ".join(self.rejected[name])
            lines.append(f"{name} {verb}{why}.\nFalling back to '{after}'.")
        return lines + [self.note] * bool(self.note)

    def info(self) -> str:
        kernels = f"; kernel: {', '.join(self.kernels)}" if self.kernels else ""
        return f"Attention backend: {self.backend.name} ({self.backend.title}{kernels})"

    def __str__(self) -> str:
        warned = ["WARNING: " + w.replace("\n", "\n         ") for w in self.warnings()]
        return "\n".join([*warned, "INFO: " + self.info()])
