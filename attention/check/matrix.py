"""Cases in which every backend is compared with the float64 oracle; `check()` runs one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import proof
from ..caps import Backend
from ..proof import Inputs, Result, run
from ..spec import Spec

OPTIONS = ("window", "right", "segments", "scale", "softcap", "sinks")
Fields = dict[str, Any]  # by name, of a Case, of a Spec or of the oracle's arguments


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
    right: int | None = 0
    # "packed": three documents; "many": of 30 tokens; "padded" on the right; "left": on the left
    segments: str | None = None
    # "split": q, k and v are views of one tensor; else one of WAYS, and before it the tensors that
    # have that layout (default: q, k, v and dout): "k BHTD"
    layout: str = "contiguous"
    size: float = 1.0  # factor of q, k and v
    scale: float | None = None
    softcap: float | None = None
    sinks: bool | str = False  # True: in q's dtype; or a dtype
    kind: str = "noise"  # Gaussian; "equal": all keys equal; "dominant": one key takes all

    def spec(self, dtype: str, **options: Any) -> Spec:
        options |= {name: getattr(self, name) for name in OPTIONS}
        options |= {"segments": self.segments is not None, "sinks": bool(self.sinks)}
        return Spec(self.H, self.Hkv, self.D, dtype, **options)

    @property
    def features(self) -> tuple[str, ...]:
        """Rows of command.FEATURES in which the case counts."""
        has = {
            "lengths": self.Tq != self.Tk,
            "masked rows": self.masked > 0,
            "grouped heads": self.Hkv < self.H,
            "large scores": self.size > 2,
            "unusual scores": self.kind != "noise",
            "strides": self.layout != "contiguous",
        }
        has |= {name: getattr(self, name) for name in OPTIONS} | {"right": self.right != 0}
        return tuple(name for name, there in has.items() if there) or ("causal",)

    @property
    def masked(self) -> int:
        """The first queries that see no key."""
        before = max(self.Tq - self.Tk, 0)
        if self.segments is not None:
            return before
        return 0 if self.right is None else max(before - self.right, 0)


def case_of(spec: Spec, T: int, segments: str = "packed") -> Case:
    sizes = spec.n_head, spec.n_kv_head, spec.head_dim, 2
    options: Fields = {name: getattr(spec, name) for name in OPTIONS}
    options["segments"] = segments if spec.segments else None
    return Case(f"{T}", T, T, *sizes, **options)


WAYS = ("BHTD", "sliced", "strided", "expanded")
LAYOUTS = (*(f"{name} {way}" for name in ("q", "k", "v", "dout") for way in WAYS),
           *(f"segments {way}" for way in WAYS[1:]))

CASES = [
    *(Case(f"{T}", T, T, B=4 if T < 64 else 2) for T in (1, 2, 17, 64, 97, 192)),
    Case("1025", 1025, 1025, B=1, H=1, Hkv=1, D=64),
    *(Case(f"{Tq}x{Tk}", Tq, Tk)
      for Tq, Tk in ((113, 203), (128, 217), (1, 97), (2, 97), (63, 64),
                     (203, 113), (64, 17), (97, 1), (65, 64))),
    Case("gqa", 33, 33, H=16, B=4),
    Case("mqa", 65, 65, H=8, Hkv=1),
    Case("gqa-113x203", 113, 203, H=6, Hkv=3, B=1),
    Case("mqa-64x17", 64, 17, H=3, Hkv=1),
    Case("mqa-1x97", 1, 97, H=8, Hkv=1, B=5),
    *(Case(f"window{w}", 97, 97, window=w) for w in (1, 2, 16, 64, 96, 97, 98, 500)),
    *(Case(f"window{w}-113x203", 113, 203, B=1, window=w) for w in (16, 64, 113, 203, 500)),
    Case("window16-1x97", 1, 97, window=16),
    Case("beyond the view", 1, 33, layout="k v sliced"),  # NaN after the last key, as in a cache
    Case("window10-64x17", 64, 17, window=10),
    Case("packed", 97, 97, B=4, segments="packed"),
    Case("packed-43x97", 43, 97, segments="packed"),
    Case("padded-43x97", 43, 97, segments="padded"),
    Case("packed-1x97", 1, 97, segments="packed"),
    Case("packed-97x43", 97, 43, segments="packed"),
    Case("packed-window16-gqa", 97, 97, H=4, window=16, segments="packed"),
    # Longer than a block of queries (masks.py).
    *(Case(name, Tq, Tk, Hkv=1, D=16, **has)
      for name, Tq, Tk, has in (
          ("long-window100", 600, 600, {"B": 1, "window": 100}),
          ("long-window300-280x700", 280, 700, {"B": 1, "window": 300}),
          ("long-280x700", 280, 700, {"B": 1}),
          ("long-packed-550x900", 550, 900, {"segments": "packed"}),
          ("long-many-window40-520x600", 520, 600, {"segments": "many", "window": 40}))),
    *(Case(f"D{D}", 33, 33, D=D) for D in (17, 20, 72, 80, 128, 192)),
    Case("D80-mqa-window-17x33", 17, 33, H=3, Hkv=1, D=80, window=7),
    *(Case(x, 64, 64, H=4, layout=x) for x in ("split", "BHTD")),
    *(Case(x, 17, 17, layout=x, segments="packed" if "segments" in x else None)
      for x in LAYOUTS),
    Case("sinks strided", 17, 17, layout="sinks strided", sinks="bfloat16"),
    *(Case(f"{x}-31x64-window-packed", 31, 64, H=4, window=20, segments="packed", layout=x)
      for x in ("split", "BHTD")),
    Case("both", 97, 97, right=None),
    *(Case(f"both-{Tq}x{Tk}", Tq, Tk, H=4, right=None)
      for Tq, Tk in ((43, 97), (97, 43), (1, 97), (2, 97), (65, 1))),
    *(Case(f"right{n}", 97, 97, right=n) for n in (1, 16, 64, 95, 96, 500)),
    Case("right20-113x203", 113, 203, B=1, H=6, Hkv=3, right=20),
    *(Case(f"right{n}-97x43", 97, 43, H=4, right=n) for n in (1, 30, 54, 80)),
    *(Case(f"window{w}-right{n}", 97, 97, window=w, right=n)
      for w, n in ((1, 1), (16, 16), (64, 5), (3, None), (500, 96))),
    Case("window20-right9-113x203", 113, 203, B=1, window=20, right=9),
    Case("window20-right40-97x43", 97, 43, window=20, right=40),
    Case("window20-both-97x43", 97, 43, window=20, right=None),
    Case("both-packed", 97, 97, B=4, right=None, segments="packed"),
    Case("both-padded-43x97", 43, 97, right=None, segments="padded"),
    Case("both-left", 97, 97, right=None, segments="left"),
    Case("both-packed-97x43", 97, 43, right=None, segments="packed"),
    Case("window16-right7-packed-gqa", 97, 97, H=4, window=16, right=7, segments="packed"),
    *(Case(name, Tq, Tk, Hkv=1, D=16, **has)
      for name, Tq, Tk, has in (
          ("long-right100-280x700", 280, 700, {"B": 1, "window": 60, "right": 100}),
          ("long-right100-600x300", 600, 300, {"B": 1, "window": 60, "right": 100}),
          ("long-both-packed-550x900", 550, 900, {"segments": "packed", "right": None}),
          ("long-many-right20-520x600", 520, 600,
           {"segments": "many", "window": 40, "right": 20}))),
    Case("scale-softcap-sinks-window20-right9-packed", 43, 97, H=4, window=20, right=9,
         segments="packed", layout="split", scale=0.5, softcap=4, sinks=True),
    Case("large-sinks-both", 97, 97, D=64, size=4, right=None, sinks=True),
    Case("scale", 97, 97, D=20, scale=0.4),
    Case("softcap", 97, 97, D=64, size=2, softcap=3),
    Case("softcap-large-window16-packed", 97, 97, D=64, window=16, segments="packed", size=30,
         softcap=50),
    Case("sinks", 97, 97, sinks=True),
    Case("sinks-gqa-window16-padded", 97, 97, H=4, window=16, segments="padded", sinks=True),
    Case("sinks-64x17", 64, 17, H=3, Hkv=1, sinks="bfloat16"),
    Case("sinks-1x97", 1, 97, sinks="float32"),
    Case("sinks-large4", 97, 97, D=64, size=4, sinks=True),
    Case("scale-softcap-sinks-gqa", 113, 203, H=6, Hkv=3, B=1, scale=0.5, softcap=4, sinks=True),
    Case("scale-softcap-sinks-packed-window20", 43, 97, H=4, window=20, segments="packed",
         layout="split", scale=0.5, softcap=4, sinks=True),
    Case("large", 97, 97, D=64, size=30),
    Case("large-gqa-window-packed", 43, 97, H=4, D=64, window=30, segments="packed", size=30),
    # q . k goes beyond 65,504, the largest float16; the scores, an eighth of it, do not.
    Case("overflow", 97, 97, D=64, size=50),
    Case("equal", 97, 97, kind="equal"),
    Case("dominant", 97, 97, kind="dominant"),
]

# For --quick and slow kernels: every feature and every kind of border.
SAMPLE = ("gqa", "113x203", "split", "window16", "packed-window16-gqa", "1x97", "D128", "64x17",
          "large", "97", "1", "2", "17", "window64-113x203", "padded-43x97", "D80-mqa-window-17x33",
          "BHTD-31x64-window-packed", "mqa-64x17", "window10-64x17", "packed-97x43", "D17", "64",
          "63x64", "packed", "large-gqa-window-packed", "scale", "softcap", "sinks-64x17",
          "sinks-gqa-window16-padded", "scale-softcap-sinks-packed-window20",
          "softcap-large-window16-packed", "sinks-large4", "overflow", "equal",
          "dominant", "D72", "D192", "beyond the view", "sinks strided", *LAYOUTS,
          "both", "right16", "both-97x43", "window16-right16", "right30-97x43",
          "window20-right9-113x203", "both-padded-43x97", "window16-right7-packed-gqa",
          "scale-softcap-sinks-window20-right9-packed", "both-packed-97x43")
# Segment ids: in no order; some are equal as int8, int16 or float32.
IDS = (65543, 7, 2**24 + 1, 2**24, -1, 0, *range(100, 120))


def in_order() -> list[Case]:
    """Return all cases: SAMPLE, then the others; in both, those with fewer features first."""

    def key(case: Case) -> tuple[bool, int]:
        return case.name not in SAMPLE, len(case.features) if case.features != ("causal",) else 0

    return sorted(CASES, key=key)


def segments(case: Case, device: str = "cpu") -> Tensor | None:
    """Return (B, Tk) int32, or None. Each row has its own borders and ids."""
    if not case.segments:
        return None
    Tk, rows = case.Tk, []
    for b in range(case.B):
        starts = {
            "packed": [Tk // 3 + b, Tk // 2 + 3 * b], "many": range(30 + 7 * b, Tk, 30 + 7 * b),
            "left": [10 * b], "padded": [Tk - 10 - 20 * b],
        }[case.segments]
        run = torch.bucketize(torch.arange(Tk), torch.tensor([*starts]), right=True)
        rows.append(torch.tensor(IDS).roll(-b)[run])
    return laid_out(torch.stack(rows).int().to(device), "segments", case)


def laid_out(t: Tensor, name: str, case: Case) -> Tensor:
    """Return t in the case's layout: a part of a tensor of NaN, or its first values, expanded."""
    *names, way = case.layout.split()
    if way not in WAYS or name not in (names or ("q", "k", "v", "dout")):
        return t
    if way == "BHTD":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "expanded":  # over batch and heads; the gradient of out.sum() everywhere
        first = t.flatten()[0] if name == "dout" else t[:1, :, :1] if t.dim() == 4 else t[:1]
        return first.expand(t.shape)
    shape = [n + 2 for n in t.shape] if way == "sliced" else [*t.shape, 2]
    larger = t.new_full(shape, torch.nan if t.is_floating_point() else 7)
    part = larger[(slice(1, -1),) * t.dim()] if way == "sliced" else larger[..., 0]
    return part.copy_(t)


@lru_cache(maxsize=8)
def draw(case: Case, dtype: str, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of out in dtype, with the case's layout.

    The layout is made on the device: a view copied to another device becomes contiguous.
    """
    chance = torch.Generator().manual_seed(case.Tq * 1000 + case.Tk)

    def tensor(name: str, T: int, H: int, size: float = 1.0) -> Tensor:
        x = torch.randn(case.B, T, H, case.D, generator=chance, dtype=torch.float64)
        return laid_out((x * size).to(getattr(torch, dtype)).to(device), name, case)

    q = tensor("q", max(case.Tq, case.Tk), case.H, case.size)
    k, v = (tensor(name, case.Tk, case.Hkv, case.size) for name in "kv")
    if case.kind == "equal":
        k = k[:, :1].expand_as(k).contiguous()
    elif case.kind == "dominant":  # its scores are about 500, the others' about 10
        one = k[:, case.Tk // 2].mul_(10)  # (B, Hkv, D)
        q = q + one.repeat_interleave(case.H // case.Hkv, dim=1)[:, None]
    if case.layout == "split":
        q, k, v = torch.cat((q, k, v), dim=2).split((case.H, case.Hkv, case.Hkv), dim=2)
    # Queries are a slice of the same tensor, as in a model.
    return q[:, -case.Tq :], k, v, tensor("dout", case.Tq, case.H)


def sinks(case: Case, dtype: str, device: str = "cpu") -> Tensor | None:
    """Return (H,), or None; about as large as the log-sum-exp of the scores, but in three and more
    heads the first does not matter, and in four the second matters alone."""
    if not case.sinks:
        return None
    draws = torch.randn(case.H, generator=torch.Generator().manual_seed(case.H))
    found = (3 + 2 * draws) * case.size**2
    if case.H > 2:
        found[:2] = torch.tensor([-1e4, 100.0 if case.H > 3 else found[1]])
    found = found.to(device, getattr(torch, dtype if case.sinks is True else str(case.sinks)))
    return laid_out(found, "sinks", case)


def inputs(case: Case, dtype: str, device: str = "cpu") -> Inputs:
    return Inputs(*draw(case, dtype, device), segments(case, device), sinks(case, dtype, device))


@lru_cache(maxsize=128)  # all cases of a dtype: the truth is slower than most kernels
def truth(case: Case, dtype: str) -> Result:
    """Return the float64 result of the rounded inputs."""
    return proof.truth(inputs(case, dtype), case.spec(dtype))


@lru_cache(maxsize=8)
def plain(case: Case, dtype: str, device: str = "cpu") -> Result:
    return proof.plain(inputs(case, dtype, device), case.spec(dtype))


def compare(got: Result, case: Case, dtype: str, device: str) -> None:
    agree(got, plain(case, dtype, device), truth(case, dtype), dtype)


def agree(got: Result, rough: Result, exact: Result, dtype: str) -> None:
    """Raise AssertionError with the errors that are larger than allowed (proof.errors)."""
    if found := proof.wrong(proof.errors(got, rough, exact, getattr(torch, dtype))):
        raise AssertionError("; ".join(found))


def require(ok: bool | Tensor, text: str) -> None:
    """Assert, also under `python -O`."""
    if not ok:
        raise AssertionError(text)


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Assert |got - want| <= tolerance * (1 + |want|)."""
    got, want = got.detach().double(), want.detach().double()
    off = (got - want).abs() - tolerance * want.abs()
    require((off <= tolerance).all(), f"{what} is off by up to {float(off.max()):.3g}")


def check(
    backend: Backend, case: Case, dtype: str, device: str = "cpu", *, grad: bool = True,
    cache: str = "none", compiled: bool = False,
) -> None:
    """Run the case with gradients (False: the backend has none), then without: a library may use
    another kernel there. An AssertionError names the first error, or an input that the kernel
    overwrote or returned."""
    given = inputs(case, dtype, device)
    before = [None if t is None else t.clone() for t in given]
    masked = case.masked
    for recorded in (True, False) if grad else (False,):
        spec = case.spec(dtype, grad=recorded, cache=cache, compiled=compiled)
        got = run(backend.attend, given, spec)
        compare(got, case, dtype, device)
        zeros = not any(t is not None and t[:, :masked].any() for t in (got.out, got.dq))
        require(zeros, "a fully masked row must give zeros and a zero gradient")
        with torch.inference_mode():
            got.out.zero_()
        for name, t, was in zip(Inputs._fields, given, before):
            if t is not None and was is not None and not t.equal(was):
                draw.cache_clear()
                raise AssertionError(f"it wrote to its input {name}, or returned it")
