"""A kernel, its capabilities, the reasons to refuse a request, and the check of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .machine.system import UNKNOWN_VERSION, autocast_off
from .masks import Mods, in_pieces
from .spec import BUFFERS, CACHES, DROPOUT_STEP, DTYPES, Machine, Spec


def version(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"; a beta is earlier: (4, 0, -1, 26) of "4.0.0b26"."""
    leading = re.match(r"(\d+(?:\.\d+)*)(?:\.?b(?:eta)?(\d+))?", text)
    if not leading:
        return ()
    *first, last = (int(n) for n in leading[1].split("."))
    return (*first, last - 1, int(leading[2])) if leading[2] else (*first, last)


def dotted(capability: tuple[int, int] | None) -> str:
    return "{}.{}".format(*capability) if capability else "none"


class Refusal(str):
    """A reason to refuse; `kind`: the field of Spec or Machine that causes it."""

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Refusal:
        refusal = super().__new__(cls, text)
        refusal.kind = kind
        return refusal


class BackendUnavailable(ValueError):
    """No allowed backend can run the request."""


class DeviceLost(RuntimeError):
    """A kernel crashed: this process can no longer use the GPU."""


LACKS = {  # fields of Spec and Caps
    "right": "later keys (right={0.right})",
    "window": "a sliding window",
    "segments": "segments (packed or padded)",
    "scale": "a scale (got {0.scale:g})",
    "softcap": "a softcap",
    "sinks": "attention sinks",
    "alibi": "ALiBi",
    "dropout": "dropout (got {0.dropout:g}; use --dropout=0)",
    "lse": "the log-sum-exp",
    "grad": "a backward pass on {1}",
}


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
    right: bool = False  # later keys: all, or with `window` a number
    window: bool = True
    dropout: bool = True
    dropout_step: float | None = None  # 1/16: dropout must be a multiple of it
    segments: bool = True
    scale: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False  # in `partial` too
    lse: bool = False  # Backend.partial, without dropout, sinks and caches
    grad: bool = True
    deterministic: bool = True  # its backward
    caches: tuple[str, ...] = ("none", "dynamic")
    page_multiple: int = 1
    packages: tuple[str, ...] = ()  # import names, or "a>=2.1"
    interpreted: bool = False  # only in Triton's interpreter

    def __post_init__(self) -> None:
        for name, known in (("dtypes", DTYPES), ("caches", CACHES)):
            if not {*getattr(self, name)} <= {*known}:
                got = getattr(self, name)
                raise ValueError(f"{name} must be some of {', '.join(known)}, got {got!r}")
        if self.dropout_step not in (None, DROPOUT_STEP):  # other steps are one kind (Spec.kind)
            raise ValueError(f"dropout_step must be {DROPOUT_STEP}, got {self.dropout_step!r}")

    def lacks(self, spec: Spec, on: str) -> list[Refusal]:
        found, split = [], spec.lse and self.lse
        special = {"right": spec.right != 0, "window": spec.window or (spec.right and self.right)}
        for name, text in LACKS.items():
            able = getattr(self, name)
            apart = able and split and name in ("dropout", "sinks")
            if special.get(name, getattr(spec, name)) and (apart or not able):
                text = f"it does not support {text}" + " when the sequence is split" * apart
                found.append(Refusal(text.format(spec, on), name))
        caches = ("none",) if split else self.caches
        if spec.cache not in caches:
            text = f"its caches are {', '.join(caches)}, not {spec.cache} (--kv_cache)"
            found.append(Refusal(text, "cache"))
        return found

    def missing(self, machine: Machine) -> Iterator[str]:
        for requirement in self.packages:
            package, _, least = requirement.partition(">=")
            there = machine.version_of(package)
            if there is None:
                yield f"package '{package}' is not installed"
            elif there != UNKNOWN_VERSION and not version(there):
                yield f"package '{package}' is installed but does not import ({there})"
            elif there != UNKNOWN_VERSION and version(there) < version(least):
                yield f"package '{package}' must be >= {least}, this is {there}"

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        low, high = self.min_capability or (0, 0), self.max_capability or (99, 0)
        need = f"{dotted(low)} to {dotted(high)}" if self.max_capability else f">= {dotted(low)}"
        need = dotted(low) if low == high else need
        on = machine.name if machine.device == "cuda" else machine.device
        limits = [  # kind, refused, reason
            ("device", machine.device not in self.devices,
             f"it runs on {' and '.join(self.devices)}, not on {machine.device}"),
            ("torch", self.min_torch and version(machine.torch) < version(self.min_torch),
             f"it needs torch >= {self.min_torch}, this is {machine.torch}"),
            ("interpreted", self.interpreted and not machine.interpreted,
             f"it runs on {machine.device} only in Triton's interpreter (TRITON_INTERPRET=1)"),
            *(("packages", True, text) for text in self.missing(machine)),
            ("capability", not low <= (machine.capability or (0, 0)) <= high,
             f"it needs compute capability {need}, {machine.name} has "
             f"{dotted(machine.capability)}"),
            ("dtype", spec.dtype not in self.dtypes,
             f"it takes {' and '.join(self.dtypes)}, not {spec.dtype} (--dtype={self.dtypes[-1]})"),
            ("head_dim", spec.head_dim > (self.head_dim_max or spec.head_dim),
             f"it takes a head_dim up to {self.head_dim_max}, not {spec.head_dim}"),
            ("head_dim", spec.head_dim % self.head_dim_multiple,
             f"head_dim must be a multiple of {self.head_dim_multiple}, not {spec.head_dim}"),
            *((why.kind, True, why) for why in self.lacks(spec, on)),
            ("dropout", self.dropout_step and spec.dropout % self.dropout_step,
             f"dropout must be a multiple of {self.dropout_step}, not {spec.dropout:g}"),
            ("deterministic", spec.grad and machine.deterministic and not self.deterministic,
             "its backward is not deterministic (--deterministic=False)"),
            ("page_size", (spec.page_size or 0) % self.page_multiple,
             f"page_size must be a multiple of {self.page_multiple}, not {spec.page_size}"),
        ]
        return [Refusal(text, kind) for kind, refused, text in limits if refused]


@dataclass(frozen=True)
class Partial:
    """Attention to some of the keys (ring.py), and L (B, H, Tq): each row's natural log-sum-exp,
    float32, or float64 for float64.

    ``forward(q, k, v, spec, offset, segments) -> (out, L)``: out (B, Tq, H, D), normalized over
    these keys; 0 and L -inf in fully masked rows.
    ``backward(dout, q, k, v, out, L, spec, offset, segments) -> (dq, dk, dv)``: the share of these
    keys; out and L of whole rows.

    `offset` as in visible(), `segments` None or ids (B, Tq) and (B, Tk). Where the Spec has them,
    also `sinks=`, `seed=` (of dropout), `alibi_slopes=`. Not causal: all keys at once."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]
    dropout: bool = False


@dataclass(frozen=True)
class Backend:
    """One attention kernel (docs/KERNEL.md).

    ``attend(q, k, v, spec, *, segments=None, cache=None)`` computes the contract of spec.py in q's
    dtype: segments ``(B, Tk)`` int32, the last Tq of them the queries'; with spec.sinks ``sinks=``
    ``(H,)``, with spec.alibi ``alibi_slopes=`` ``(H,)`` or ``(B, H)`` float32; `cache`: a view
    (masks.py) of k and v. Raises ValueError: Caps refuse the Spec, or tensors contradict it;
    ``compute`` does not check."""

    name: str
    title: str
    attend: Callable[..., Tensor]
    caps: tuple[Caps, ...]
    fallback: str | None  # tried before select.PREFERENCE
    aliases: tuple[str, ...] = ()
    install: str | None = None  # a shell command
    fullgraph: bool = True  # no graph break in torch.compile
    partial: Partial | None = None  # for Caps.lse
    prebuilt: Backend | None = None  # for Policy.hub_kernels
    varlen: tuple[str, ...] = ()  # devices where NaN stays in its segment
    mods: Mods | None = None  # instead of visible()
    compute: Callable[..., Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.caps
        if not (rows and isinstance(rows, tuple) and all(isinstance(row, Caps) for row in rows)):
            raise ValueError(f"caps must be a tuple of Caps, got {rows!r}")
        made = getattr(self.attend, "of_backend", None)  # functools.wraps copies it to wrappers
        compute = made[1] if made and made[0] is self.attend else in_own_dtype(self.attend)
        vars(self).update(compute=compute, attend=checked(self.name, compute, rows))

    @property
    def packages(self) -> list[str]:
        return [text.partition(">=")[0] for row in self.caps for text in row.packages]

    def why_not(self, spec: Spec, machine: Machine) -> list[Refusal]:
        """The reasons of the Caps row with the fewest."""
        at, hard = machine.capability or (0, 0), {"capability": 1, "grad": 2}
        rows = [(c.why_not(spec, machine), c) for c in self.caps if machine.device in c.devices]
        if not rows:
            devices = dict.fromkeys(d for c in self.caps for d in c.devices)
            text = f"it runs on {' and '.join(devices)}, not on {machine.device}"
            return [Refusal(text, "device")]

        def distance(row: tuple[list[Refusal], Caps]) -> tuple[int, int, int]:
            # In a tie: the nearest GPU, then what a user can change, the dtype.
            near = max(row[1].min_capability or at, min(at, row[1].max_capability or at))
            apart = abs(10 * (near[0] - at[0]) + near[1] - at[1])
            return len(row[0]), apart, max((hard.get(w.kind, 0) for w in row[0]), default=0)

        why = min(rows, key=distance)[0]
        more = {"packages": f" ({self.install})"} if self.install else {}
        if self.prebuilt and "capability" not in [
                w.kind for w in self.prebuilt.why_not(spec, machine)]:
            more["capability"] = "; a prebuilt kernel runs there (--attention_hub_kernels=True)"
        return [Refusal(w + more.get(w.kind, ""), w.kind) for w in why]


def in_own_dtype(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # faster than a context

    @wraps(attend)
    def compute(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        if not is_autocast():
            return attend(q, k, v, spec, **options)
        with autocast_off(q):
            return attend(q, k, v, spec, **options)

    return compute


def checked(name: str, compute: Callable[..., Tensor],
            caps: tuple[Caps, ...]) -> Callable[..., Tensor]:
    admitted: dict[tuple[str, object], bool] = {}  # by kind and device

    @wraps(compute)
    def call(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        kind = spec.kind, q.device
        if kind not in admitted:
            on = q.device.type
            rows = [c for c in caps if on in c.devices and spec.dtype in c.dtypes] or caps
            lacks = [[w for w in c.lacks(spec, on) if w.kind not in ("lse", "grad")] for c in rows]
            if all(lacks):
                raise ValueError(f"{name} cannot do this: {', '.join(lacks[0])}")
            admitted[kind] = True
        check_call(q, k, v, spec, **options)
        return compute(q, k, v, spec, **options)

    call.of_backend = call, compute  # type: ignore[attr-defined]
    return call


INTEGERS = ("int32", "int64", "int16", "int8", "uint8")


def check_call(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Any = None, cache: Any = None,
               sinks: Any = None, alibi_slopes: Any = None) -> None:
    """Raise ValueError if arguments contradict the Spec or one another."""
    H, Hkv, D, dtype, on = spec.n_head, spec.n_kv_head, spec.head_dim, (spec.dtype,), q.device
    must_be("q", q, (*q.shape[:2], H, D), on, dtype)
    B, kind = q.shape[0], "none" if cache is None else getattr(cache, "kind", type(cache).__name__)
    if kind != (spec.cache if spec.cache in BUFFERS else "none"):
        raise ValueError(f"cache must be a view of the Spec's '{spec.cache}' cache, got {kind!r}")
    size: Any = (B, *k.shape[1:2]) if cache is None else (B, getattr(cache, "length", -1))
    size = (*k.shape[:1], spec.page_size) if kind == "paged" else size
    must_be("k", k, (*size, Hkv, D), on, dtype)
    must_be("v", v, k.shape, on, dtype)
    for name in ("start", "count") if cache is not None else ():
        must_be(f"cache.{name}", getattr(cache, name), (B,), on, INTEGERS)
    if kind == "paged":
        must_be("cache.page_table", cache.page_table, (B, -1), on, INTEGERS)
    if segments is sinks is alibi_slopes is None and not (
            spec.segments or spec.sinks or spec.alibi):
        return
    by_row = getattr(alibi_slopes, "ndim", 1) == 2
    for name, t, requested, shape, dtypes in (
        ("segments", segments, spec.segments, (B, k.shape[1]), INTEGERS),
        ("sinks", sinks, spec.sinks, (H,), DTYPES),
        ("alibi_slopes", alibi_slopes, spec.alibi, (B, H) if by_row else (H,), ("float32",)),
    ):
        if (t is not None) != requested:
            raise ValueError(f"{name} must agree with the Spec's {requested}, got {shape_of(t)}")
        if t is not None:
            must_be(name, t, shape, on, dtypes)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes must not require a gradient: they get none")
    if segments is not None and in_pieces(segments):
        raise ValueError("segments must be runs of equal ids, got an id that comes again")


def must_be(name: str, t: Any, shape: tuple[int, ...], on: object, dtypes: tuple[str, ...]) -> None:
    if isinstance(t, Tensor) and t.device == on and str(t.dtype)[6:] in dtypes and (
            t.shape == shape or (t.dim() == len(shape) and all(
                n == -1 or n == m for n, m in zip(shape, t.shape)))):  # `in` fails in a trace
        return
    want = f"{tuple(shape)} {' or '.join(dtypes)} on {on}"
    raise ValueError(f"{name} must be {want}, got {shape_of(t)}")


def shape_of(t: Any) -> str:
    """A tensor as "(2, 3) float32 on cpu", an array by its type, else repr()."""
    if not isinstance(t, Tensor):
        return type(t).__name__ if hasattr(t, "shape") else repr(t)
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
