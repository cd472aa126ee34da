"""Cases in which every backend is compared with the float64 oracle; `check()` runs one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..caps import Backend
from ..spec import Spec
from . import oracle


@dataclass(frozen=True)
class Case:
    """One case; the defaults are the simplest."""

    name: str
    Tq: int
    Tk: int
    H: int = 2
    Hkv: int = 2
    D: int = 32
    B: int = 2
    window: int | None = None
    # "packed": three documents; "many": of 30 tokens; "padded" on the right; "left": on the left
    segments: str | None = None
    # "split": views of one tensor; "BHTD": heads before positions; "mixed": that for q and v only
    layout: str = "contiguous"
    size: float = 1.0  # factor of q, k and v
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    kind: str = "noise"  # Gaussian; "equal": all keys equal; "dominant": one key takes all

    def spec(
        self, dtype: str, grad: bool = True, cache: str = "none", compiled: bool = False,
        lse: bool = False,
    ) -> Spec:  # fmt: skip
        return Spec(
            self.H, self.Hkv, self.D, dtype, self.window, segments=self.segments is not None,
            grad=grad, cache=cache, compiled=compiled, scale=self.scale, softcap=self.softcap,
            sinks=self.sinks, lse=lse,
        )  # fmt: skip

    @property
    def features(self) -> tuple[str, ...]:
        """Rows of command.FEATURES in which the case counts."""
        has = {
            "lengths": self.Tq != self.Tk,
            "masked rows": self.Tq > self.Tk,
            "grouped heads": self.Hkv < self.H,
            "window": self.window,
            "segments": self.segments,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "large scores": self.size > 2,
            "unusual scores": self.kind != "noise",
            "strides": self.layout != "contiguous",
        }
        return tuple(name for name, there in has.items() if there) or ("causal",)


CASES = [
    *(Case(f"{T}", T, T) for T in (1, 2, 17, 64, 97, 192)),
    Case("1025", 1025, 1025, B=1, H=1, Hkv=1, D=64),
    *(Case(f"{Tq}x{Tk}", Tq, Tk)
      for Tq, Tk in ((113, 203), (128, 217), (1, 97), (2, 97), (63, 64),
                     (203, 113), (64, 17), (97, 1), (65, 64))),
    Case("gqa", 97, 97, H=4),
    Case("mqa", 97, 97, H=4, Hkv=1),
    Case("gqa-113x203", 113, 203, H=6, Hkv=3, B=1),
    Case("mqa-64x17", 64, 17, H=3, Hkv=1),
    Case("mqa-1x97", 1, 97, H=4, Hkv=1),
    *(Case(f"window{w}", 97, 97, window=w) for w in (1, 2, 16, 64, 96, 97, 98, 500)),
    *(Case(f"window{w}-113x203", 113, 203, B=1, window=w) for w in (16, 64, 113, 203, 500)),
    Case("window16-1x97", 1, 97, window=16),
    Case("window10-64x17", 64, 17, window=10),
    Case("packed", 97, 97, segments="packed"),
    Case("padded", 97, 97, segments="padded"),
    Case("packed-43x97", 43, 97, segments="packed"),
    Case("padded-43x97", 43, 97, segments="padded"),
    Case("packed-1x97", 1, 97, segments="packed"),
    Case("packed-97x43", 97, 43, segments="packed"),
    Case("packed-window16-gqa", 97, 97, H=4, window=16, segments="packed"),
    # Longer than a block of queries (blocks.py).
    *(Case(name, Tq, Tk, Hkv=1, D=16, **has)
      for name, Tq, Tk, has in (
          ("long-window100", 600, 600, {"B": 1, "window": 100}),
          ("long-window300-280x700", 280, 700, {"B": 1, "window": 300}),
          ("long-280x700", 280, 700, {"B": 1}),
          ("long-packed-550x900", 550, 900, {"segments": "packed"}),
          ("long-many-window40-520x600", 520, 600, {"segments": "many", "window": 40}))),
    *(Case(f"D{D}", 33, 33, D=D) for D in (16, 20, 64, 80, 96, 128)),
    Case("D80-mqa-window-17x33", 17, 33, H=3, Hkv=1, D=80, window=7),
    *(Case(f"{x}", 64, 64, H=4, layout=x) for x in ("split", "BHTD")),
    Case("mixed", 33, 33, layout="mixed"),
    *(Case(f"{x}-31x64-window-packed", 31, 64, H=4, window=20, segments="packed", layout=x)
      for x in ("split", "BHTD")),
    Case("scale", 97, 97, D=20, scale=0.4),
    Case("scale-1x97", 1, 97, scale=0.02),
    Case("softcap", 97, 97, D=64, size=2, softcap=3),
    Case("softcap-113x203", 113, 203, B=1, H=4, softcap=1.5),
    Case("softcap-large-window16-packed", 97, 97, D=64, window=16, segments="packed", size=30,
         softcap=50),
    Case("sinks", 97, 97, sinks=True),
    Case("sinks-gqa-window16-padded", 97, 97, H=4, window=16, segments="padded", sinks=True),
    Case("sinks-64x17", 64, 17, H=3, Hkv=1, sinks=True),
    Case("sinks-1x97", 1, 97, sinks=True),
    Case("sinks-large4", 97, 97, D=64, size=4, sinks=True),
    Case("scale-softcap-sinks-gqa", 113, 203, H=6, Hkv=3, B=1, scale=0.5, softcap=4, sinks=True),
    Case("scale-softcap-sinks-packed-window20", 43, 97, H=4, window=20, segments="packed",
         layout="split", scale=0.5, softcap=4, sinks=True),
    Case("large4", 97, 97, D=64, size=4),
    Case("large", 97, 97, D=64, size=30),
    Case("large-gqa-window-packed", 43, 97, H=4, D=64, window=30, segments="packed", size=30),
    # q . k goes beyond 65,504, the largest float16; the scores, an eighth of it, do not.
    Case("overflow", 97, 97, D=64, size=50),
    Case("equal", 97, 97, kind="equal"),
    Case("equal-gqa-113x203", 113, 203, H=4, B=1, kind="equal"),
    Case("dominant", 97, 97, kind="dominant"),
    Case("dominant-gqa-113x203", 113, 203, H=4, B=1, kind="dominant"),
]  # fmt: skip

# For --quick and slow kernels: every feature and every kind of border.
SAMPLE = ("gqa", "113x203", "split", "window16", "packed-window16-gqa", "1x97", "D128", "64x17",
          "large", "97", "1", "2", "window64-113x203", "padded-43x97", "D80-mqa-window-17x33",
          "BHTD-31x64-window-packed", "mqa-64x17", "window10-64x17", "packed-97x43", "D20", "64",
          "63x64", "packed", "large-gqa-window-packed", "scale", "softcap", "sinks-64x17",
          "sinks-gqa-window16-padded", "scale-softcap-sinks-packed-window20",
          "softcap-large-window16-packed", "sinks-large4", "overflow", "equal",
          "dominant", "mixed")  # fmt: skip


def in_order() -> list[Case]:
    """Return all cases: SAMPLE, then the others; in both, those with fewer features first."""

    def key(case: Case) -> tuple[bool, int]:
        return case.name not in SAMPLE, len(case.features) if case.features != ("causal",) else 0

    return sorted(CASES, key=key)


def segments(case: Case, device: str = "cpu") -> Tensor | None:
    """Return (B, Tk) int32, or None. Each row has its own borders."""
    if not case.segments:
        return None
    j, rows = torch.arange(case.Tk), []
    for b in range(case.B):
        if case.segments == "packed":
            rows.append((j >= case.Tk // 3 + b).int() + (j >= case.Tk // 2 + 3 * b).int())
        elif case.segments == "many":
            rows.append(j // (30 + 7 * b))
        else:
            rows.append((j >= (10 * b if case.segments == "left" else case.Tk - 10 - 20 * b)).int())
    return torch.stack(rows).int().to(device)


@lru_cache(maxsize=8)
def draw(case: Case, dtype: str, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of out in dtype, with the case's layout.

    The layout is made on the device: a view copied to another device becomes contiguous.
    """
    chance = torch.Generator().manual_seed(case.Tq * 1000 + case.Tk)

    def tensor(T: int, H: int, size: float = 1.0) -> Tensor:
        x = torch.randn(case.B, T, H, case.D, generator=chance, dtype=torch.float64)
        return (x * size).to(getattr(torch, dtype)).to(device)

    q, k, v = (tensor(case.Tk, h, case.size) for h in (case.H, case.Hkv, case.Hkv))
    if case.kind == "equal":
        k = k[:, :1].expand_as(k).contiguous()
    elif case.kind == "dominant":  # its scores are about 500, the others' about 10
        one = k[:, case.Tk // 2].mul_(10)  # (B, Hkv, D)
        q = q + one.repeat_interleave(case.H // case.Hkv, dim=1)[:, None]
    if case.layout == "split":
        q, k, v = torch.cat((q, k, v), dim=2).split((case.H, case.Hkv, case.Hkv), dim=2)
    elif case.layout != "contiguous":
        Q, K, V = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        q, k, v = Q, K if case.layout == "BHTD" else k, V
    more = case.Tq - case.Tk  # queries are a slice of the same tensor, as in a model
    q = q[:, -more:] if more <= 0 else tensor(case.Tq, case.H, case.size)
    return q, k, v, tensor(case.Tq, case.H)


def sinks(case: Case, dtype: str, device: str = "cpu") -> Tensor | None:
    """Return (H,), or None; about as large as the log-sum-exp of the scores."""
    if not case.sinks:
        return None
    draws = torch.randn(case.H, generator=torch.Generator().manual_seed(case.H))
    found = ((3 + 2 * draws) * case.size**2).to(device, getattr(torch, dtype))
    return torch.stack((found, -found), dim=1)[:, 0] if case.layout == "split" else found


def options(case: Case, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Return the oracle's keyword arguments."""
    more: dict[str, Any] = {"window": case.window, "scale": case.scale, "softcap": case.softcap}
    return more | {"segments": segments(case, device), "sinks": sinks(case, dtype, device)}


@lru_cache(maxsize=96)  # all cases of a dtype: the oracle is slower than most kernels
def truth(case: Case, dtype: str) -> oracle.Result:
    """Return the float64 result of the rounded inputs."""
    return oracle.attention(*draw(case, dtype), **options(case, dtype))


@lru_cache(maxsize=8)
def plain(case: Case, dtype: str, device: str = "cpu") -> oracle.Result:
    return oracle.plain(*draw(case, dtype, device), **options(case, dtype, device))


def compare(got: oracle.Result, case: Case, dtype: str, device: str) -> None:
    rough, exact = plain(case, dtype, device), truth(case, dtype)
    oracle.check(got, rough, exact, getattr(torch, dtype))


def check(
    backend: Backend, case: Case, dtype: str, device: str = "cpu", *, grad: bool = True,
    cache: str = "none", compiled: bool = False,
) -> None:  # fmt: skip
    """Run the case with gradients, then without: a library may use another kernel there.

    Args:
        grad: False for a backend without a backward pass.

    Raises:
        AssertionError: a larger error than oracle.check() allows, a fully masked row that is not
            zero, or an input that the kernel overwrote.
    """
    spec = case.spec(dtype, cache=cache, compiled=compiled)
    q, k, v, dout = (t.detach() for t in draw(case, dtype, device))  # detach() keeps the strides
    before = [t.clone() for t in (q, k, v, dout)]
    leaves = [t.requires_grad_(grad) for t in (q, k, v)]
    given: dict[str, Tensor | None] = {"segments": segments(case, device)}
    if (learned := sinks(case, dtype, device)) is not None:
        given["sinks"] = learned
        leaves.append(learned.requires_grad_(grad))
    masked = max(case.Tq - case.Tk, 0)  # fully masked rows: the first queries precede all keys
    if grad:
        out = backend.attend(q, k, v, spec, **given)
        got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, dout))
        compare(got, case, dtype, device)
        zeros = not any(t is not None and t[:, :masked].any() for t in (got.out, got.dq))
        oracle.require(zeros, "a fully masked row must give zeros and a zero gradient")
    with torch.no_grad():
        out = backend.attend(q, k, v, replace(spec, grad=False), **given)
    oracle.require(not out.requires_grad, "the output requires a gradient under no_grad")
    compare(oracle.Result(out), case, dtype, device)
    oracle.require(not out[:, :masked].any(), "a fully masked row must give zeros")
    for name, t, was in zip(("q", "k", "v", "dout"), (q, k, v, dout), before, strict=True):
        if not torch.equal(t, was):
            draw.cache_clear()
            raise AssertionError(f"it wrote to its input {name}")
