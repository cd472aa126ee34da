"""Cases that compare a kernel with the float64 truth."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import proof
from ..caps import Backend
from ..proof import Inputs, Result, run
from ..spec import Spec
from ..truth import worst


@dataclass(frozen=True)
class Case:
    name: str
    Tq: int
    Tk: int
    H: int = 2
    Hkv: int = 2
    D: int = 32
    B: int = 2
    window: int | None = None
    right: int | None = 0
    segments: str | None = None  # "packed", "many", "padded" on the right, "left"
    layout: str = "contiguous"  # "split" from one tensor, or of WAYS: "k BHTD"
    size: float = 1.0  # of q, k and v
    scale: float | None = None
    softcap: float | None = None
    sinks: bool | str = False  # or its dtype; True: that of q
    alibi: bool | str = False  # True: slopes (H,); "rows": (B, H)
    kind: str = "noise"  # "negative": scores below float16's range
    dropout: float = 0.0
    cache: str = "none"
    page_size: int | None = None
    grad: bool = True
    lse: bool = False
    compiled: bool = False

    def spec(self, dtype: str, **options: Any) -> Spec:
        fields = {name: x for name, x in vars(self).items() if name in Spec.__match_args__}
        fields |= {name: bool(fields[name]) for name in ("segments", "sinks", "alibi")}
        fields["cache"] = "paged" if self.page_size else self.cache
        return Spec(self.H, self.Hkv, self.D, dtype, **(fields | options))

    @property
    def features(self) -> tuple[str, ...]:
        has = {"lengths": self.Tq != self.Tk, "masked rows": self.masked > 0,
               "grouped heads": self.Hkv < self.H, "window": self.window, "right": self.right != 0,
               "segments": self.segments, "scale": self.scale, "softcap": self.softcap,
               "sinks": self.sinks, "alibi": self.alibi, "large scores": self.size > 2,
               "unusual scores": self.kind != "noise", "strides": self.layout != "contiguous"}
        return tuple(name for name, there in has.items() if there) or ("causal",)

    @property
    def masked(self) -> int:
        """First queries that see no key."""
        right = 0 if self.segments else self.Tq if self.right is None else self.right
        return max(self.Tq - self.Tk - right, 0)


@dataclass(frozen=True)
class Item:
    case: Case
    dtype: str
    test: Callable[[Item], None]
    features: tuple[str, ...]
    title: str = ""  # of a property; "": accuracy
    deterministic: bool = False
    backend: Any = None
    device: str = "cpu"
    verdict: str = ""  # "right", "wrong" or "refused"
    why: tuple[str, ...] = ()
    lost: bool = False  # the device

    @property
    def name(self) -> str:
        return f"{self.title}, {self.case.name}" if self.title else self.case.name

    @property
    def spec(self) -> Spec:
        return self.case.spec(self.dtype)

    @property
    def given(self) -> Inputs:
        return inputs(self.case, self.dtype, self.device)

    def run(self, given: Inputs, spec: Spec, **options: Any) -> Result:
        return run(self.backend.attend, given, spec, **options)


WAYS = ("BHTD", "sliced", "strided", "expanded")
LAYOUTS = [f"{name} {way}" for name in ("q", "k", "v", "dout", "segments") for way in WAYS
           if (name, way) != ("segments", "BHTD")]
WORDS: dict[str, dict[str, Any]] = {  # of a case's text
    "gqa": {"H": 4}, "mqa": {"Hkv": 1}, "both": {"right": None}, "scale": {"scale": 0.5},
    "softcap": {"softcap": 4}, "sinks": {"sinks": True}, "large": {"size": 30},
    "overflow": {"size": 50},  # q . k overflows float16, the scores do not
    "long": {"Hkv": 1, "D": 16}, "alibi": {"alibi": True}, "rows": {"alibi": "rows"},
    "lse": {"lse": True}, "inference": {"grad": False}, "compiled": {"compiled": True},
    **{word: {"cache": word, "grad": False} for word in ("dynamic", "static")},
    **{word: {"sinks": word} for word in ("bfloat16", "float32")},
    **{word: {"segments": word} for word in ("packed", "many", "padded", "left")},
    **{word: {"layout": word} for word in ("split", "BHTD")},
    **{word: {"kind": word} for word in ("equal", "dominant", "negative")},
}


def cases(*texts: str) -> list[Case]:
    """Cases by texts: "window16-43x97 B1", named by its first word, has window 16, Tq 43, Tk 97
    (default: both 97) and batch 1. Several texts are combined."""
    found = []
    for words in itertools.product(*(text.split(",") for text in texts)):
        text = "-".join(word.strip() for word in words if word.strip())
        fields: dict[str, Any] = {"Tq": 97, "Tk": 97}
        for word in text.replace("-", " ").split():
            field = word.rstrip("x.0123456789")
            first, _, second = word.removeprefix(field).partition("x")
            if word in WORDS:
                fields |= WORDS[word]
            elif field:
                fields[field] = float(first) if "." in first else int(first)
            else:
                fields |= {"Tq": int(first), "Tk": int(second or first)}
        found.append(Case(text.split()[0], **fields))
    return found


SAMPLE = [  # --quick: every feature and every kind of border
    *cases("""97, 1 B4, 2 B4, 17 B4, 64, 113x203 B1, 1x97, 64x17, 63x64, long-600 B1 H1,
        gqa 17 H16 B1, mqa-64x17 H3, split 64 H4, window16, window64-113x203 B1, window10-64x17,
        packed, packed-97x43, padded-43x97, packed-window16-gqa, BHTD-31x64-window20-packed H4,
        large D64, large-gqa-window30-packed-43x97 D64, D17 33, D72 33, D128 33, D192 33,
        overflow D64, D80-mqa-window7-17x33 H3, scale D20, softcap3 D64 size2,
        sinks-64x17 mqa H3 bfloat16, softcap50-large-window16-packed D64,
        sinks-gqa-window16-padded, sinks-size4 D64,
        scale-softcap-sinks-packed-window20-43x97 H4 split, equal, dominant, negative-20,
        negative-window5-7x20, both, both-97x43 H4, both-padded-43x97, both-packed-97x43,
        right16, right30-97x43 H4, window16-right16, window20-right9-113x203 B1,
        window16-right7-packed-gqa, scale-softcap-sinks-window20-right9-packed-43x97 H4 split,
        alibi, alibi-gqa-43x97, alibi-113x97, rows-window16-packed-softcap3-43x97 H4,
        rows-both-97x43"""),
    *(Case(x, 17, 17, layout=x, segments="packed" if "segments" in x else None) for x in LAYOUTS),
    Case("beyond the view", 1, 33, layout="k v sliced"),  # NaN after the last key
    Case("sinks strided", 17, 17, layout="sinks strided", sinks="bfloat16")]
# --quick: in every dtype
EACH_DTYPE = ("1x97", "64x17", "packed-window16-gqa", "D80-mqa-window7-17x33", "large", "overflow",
              "dominant", "sinks-gqa-window16-padded", "scale-softcap-sinks-packed-window20-43x97",
              "in a cache, 64-gqa-static", "in a cache, 64-gqa-inference-page_size16")
CASES = SAMPLE + cases("""192, 1025 B1 H1 Hkv1 D64, 113x203-H4 Hkv4, 128x217, 2x97, 203x113, 97x1,
    65x64, gqa-33 H16, mqa 65 H8, gqa-113x203 H6 Hkv3 B1, mqa-1x97 H8 B5, window1, window2,
    window64, window96, window97, window98, window500, window16-113x203 B1, window113-113x203 B1,
    window203-113x203 B1, window500-113x203 B1, window16-1x97, packed-97 B4, packed-43x97,
    packed-1x97, long-window100-600 B1, long-window300-280x700, long-280x700 B1,
    long-packed-550x900, long-many-window40-520x600, D20 33, D80 33, BHTD 64 H4,
    split-31x64-window20-packed H4, negative-7x20, negative-1x20, negative-window5-20,
    negative-window5-1x20, both-43x97 H4, both-1x97 H4, both-2x97 H4, both-65x1 H4, right1,
    right64, right95, right96, right500, right20-113x203 B1 H6 Hkv3, right1-97x43 H4,
    right54-97x43 H4, right80-97x43 H4, window1-right1, window64-right5, window3-both,
    window500-right96, window20-right40-97x43, window20-both-97x43, both-packed B4, both-left,
    long-window60-right100-280x700 B1, long-window60-right100-600x300 B1,
    long-both-packed-550x900, long-many-window40-right20-520x600, large-sinks-both size4 D64,
    sinks, sinks-1x97 float32, scale-softcap-sinks-gqa-113x203 H6 Hkv3 B1, alibi-1x97 H8 B5,
    rows-gqa-packed, alibi-left, rows-window60-right100-280x700 B1, rows-many-520x600,
    rows-scale-sinks-mqa-65 H8, alibi-right9-113x97, rows-sinks-both-window20-113x97 H4,
    alibi-sinks-right40-65x17, rows-sinks-right30-65x17, alibi-right500-65x17 H4""")


IDS = (65543, 7, 2**24 + 1, 2**24, -1, 0, *range(100, 120))


def segments(case: Case) -> Tensor:
    Tk, rows = case.Tk, []
    for b in range(case.B):
        starts = {"packed": [Tk // 3 + b, Tk // 2 + 3 * b], "left": [10 * b],
                  "many": range(30 + 7 * b, Tk, 30 + 7 * b), "padded": [Tk - 10 - 20 * b]}
        borders = torch.tensor([*starts[str(case.segments)]])
        run = torch.bucketize(torch.arange(Tk), borders, right=True)
        rows.append(torch.tensor(IDS).roll(-b)[run])
    return torch.stack(rows).int()


def laid_out(t: Tensor, name: str, case: Case) -> Tensor:
    *names, way = case.layout.split()
    if way not in WAYS or name not in (names or ("q", "k", "v", "dout")):
        return t
    if way == "BHTD":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "expanded":  # dout as of out.sum()
        first = t.flatten()[0] if name == "dout" else t[:1, :, :1] if t.dim() == 4 else t[:1]
        return first.expand(t.shape)
    fill, inner = torch.nan if t.is_floating_point() else 7, (slice(1, -1),) * t.dim()
    if way == "sliced":
        return t.new_full([n + 2 for n in t.shape], fill)[inner].copy_(t)
    return t.new_full([*t.shape, 2], fill)[..., 0].copy_(t)


@lru_cache(maxsize=8)
def inputs(case: Case, dtype: str, device: str = "cpu") -> Inputs:
    """Of three sinks or more the first has no weight, of four the second all."""
    chance = torch.Generator().manual_seed(case.Tq * 1000 + case.Tk)

    def noise(T: int, H: int, size: float) -> Tensor:
        x = torch.randn(case.B, T, H, case.D, generator=chance, dtype=torch.float64)
        return (x * size).to(getattr(torch, dtype))

    q = noise(max(case.Tq, case.Tk), case.H, case.size)
    k, v = (noise(case.Tk, case.Hkv, case.size) for _ in "kv")
    if case.kind == "equal":
        k = k[:, :1].expand_as(k).contiguous()
    elif case.kind == "dominant":
        one = k[:, case.Tk // 2].mul_(10)  # (B, Hkv, D)
        q = q + one.repeat_interleave(case.H // case.Hkv, dim=1)[:, None]
    elif case.kind == "negative":
        q, k = torch.full_like(q, -12000), torch.ones_like(k)
    if case.layout == "split":
        q, k, v = torch.cat((q, k, v), dim=2).split((case.H, case.Hkv, case.Hkv), dim=2)
    found = {"q": q[:, -case.Tq :], "k": k, "v": v, "dout": noise(case.Tq, case.H, 1.0)}
    chance.manual_seed(case.H)
    if case.sinks:
        sinks = (3 + 2 * torch.randn(case.H, generator=chance)) * case.size**2
        if case.H > 2:
            sinks[:2] = torch.tensor([-1e4, 100.0 if case.H > 3 else sinks[1]])
        found["sinks"] = sinks.to(getattr(torch, dtype if case.sinks is True else case.sinks))
    if case.alibi:  # slopes, 1/16 to 1
        shape = (case.B, case.H) if case.alibi == "rows" else (case.H,)
        found["alibi_slopes"] = torch.exp2(-4 * torch.rand(shape, generator=chance))
    if case.segments:
        found["segments"] = segments(case)
    return Inputs(**{name: laid_out(t.to(device), name, case) for name, t in found.items()})


def require(ok: bool | Tensor, text: str) -> None:
    if not ok:
        raise AssertionError(text)


@lru_cache(maxsize=128)  # the truth is slower than most kernels
def truth(case: Case, dtype: str) -> Result:
    return proof.truth(inputs(case, dtype), case.spec(dtype))


@lru_cache(maxsize=8)
def plain(case: Case, dtype: str, device: str = "cpu") -> Result:
    return proof.plain(inputs(case, dtype, device), case.spec(dtype))


def agree(got: Result, rough: Result, exact: Result, dtype: str) -> None:
    why = proof.wrong(proof.errors(got, rough, exact, getattr(torch, dtype)))
    require(not why, "; ".join(why))


def compare(got: Result, case: Case, dtype: str, device: str) -> None:
    agree(got, plain(case, dtype, device), truth(case, dtype), dtype)


def check(backend: Backend, case: Case, dtype: str, device: str = "cpu",
          attend: Callable[..., Tensor] | None = None) -> None:
    """Test with any gradients and without. Raises AssertionError: wrong or changed tensors."""
    given = inputs(case, dtype, device)
    before = {name: t.clone() for name, t in given.tensors.items()}
    for grad in (True, False)[not case.grad :]:
        got = run(attend or backend.attend, given, case.spec(dtype, grad=grad))
        compare(got, case, dtype, device)
        zeros = not any(t is not None and t[:, : case.masked].any() for t in (got.out, got.dq))
        require(zeros, "a fully masked row must give zeros and a zero gradient")
        with torch.inference_mode():
            got.out.zero_()
        for name, was in before.items():
            if not given.tensors[name].equal(was):
                inputs.cache_clear()
                raise AssertionError(f"it wrote to its input {name}, or returned it")


def accuracy(item: Item, attend: Callable[..., Tensor] | None = None) -> None:
    check(item.backend, item.case, item.dtype, item.device, attend)


def show(backend: Backend, case: Case, dtype: str, device: str) -> None:
    """Print the inputs, and each result and its truth at the worst place."""
    given = inputs(case, dtype, device)
    before = {name: t.clone() for name, t in given.tensors.items()}
    for name, t in given.tensors.items():
        print(name, tuple(t.shape), t.stride(), t.dtype)
    for grad in (True, False)[not case.grad :]:
        spec = case.spec(dtype, grad=grad)
        print(spec)
        got, exact = run(backend.attend, given, spec), proof.truth(given, spec)
        for name, x in got.tensors.items():
            x, want = x.cpu().double(), exact.tensors[name].cpu()
            at = worst(x, want)
            print(f"{name} at {list(at)}: the kernel {x[at]:.9g}, the truth {want[at]:.9g}")
    print("overwritten:", [n for n, t in given.tensors.items() if not t.equal(before[n])])
