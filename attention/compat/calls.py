"""The arguments of flash-attn's functions, the kernel of each call, and what ran since use().

A ValueError comes before anything is written. Values on a GPU are checked only where the host waits
for them anyway: cu_seqlens, seqused, and cache_seqlens for a log-sum-exp or a cache_leftpad. Rows
that see no key give zeros, and a log-sum-exp of -inf, where flash-attn has inf."""

from __future__ import annotations

import math
import operator
from collections import defaultdict, namedtuple
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import manual, tiled
from ..caps import INTEGERS, Backend, BackendUnavailable, Refusal, must_be, shape_of
from ..function import attention, not_compiled
from ..machine.system import devices
from ..masks import kept, nothing, symbolic
from ..names import BACKENDS, RULES, check_name, get
from ..plan import Key, Plans
from ..select import select
from ..spec import DTYPES, NO_LIMIT, Policy, Spec

HINTS = ("max_seqlen_q", "num_splits", "pack_gqa", "scheduler_metadata", "sm_margin")
REFUSED = {  # and what to do instead
    "attention_chunk": "pass each chunk as a sequence of flash_attn_varlen_func",
    "qv": "append it to q, v to k, and zeros to v, along head_dim",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "multiply q, k and v by it"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new"), "flash_attn_varlen_func reads pages too"),
}
NAMES = {getattr(torch, name): name for name in DTYPES}
Returned = Any  # out; with the log-sum-exp (out, L), or (out, L, None)
NO_MODE, PLAIN = nullcontext(), (bool, float, str, type(None))
_spec = lru_cache(maxsize=4096)(Spec)
_plans = Plans("auto")
_seeded = Plans("auto")  # of the log-sum-exp with dropout, which few kernels have
_ran: defaultdict[Key, tuple[Any, int]] = defaultdict(lambda: (None, 0))  # choice or error, calls


# The options that all functions share. Spec checks the ranges of the numbers.
Request = namedtuple("Request", "dropout scale window right softcap lse grad slopes")


def requested(
    q: Tensor, k: Tensor, v: Tensor, B: int, dropout: Any, scale: Any, causal: bool, window: Any,
    softcap: Any, slopes: Tensor | None, lse: bool, others: Any, deterministic: bool = False,
) -> Request:
    """`others` are HINTS, or REFUSED unless None, False or 0. B: sequences."""
    for name, value in others.items():
        if name not in REFUSED and name not in HINTS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if name in REFUSED and (isinstance(value, Tensor) or value not in (None, False, 0)):
            raise ValueError(f"{name} is not supported; instead: {REFUSED[name]}")
    if deterministic:
        check_deterministic(q)
    if slopes is not None:
        must_be("alibi_slopes", slopes, (B, q.shape[-2])[-slopes.dim() :], q.device, ("float32",))
        if slopes.requires_grad:
            raise ValueError("alibi_slopes must not require gradients: they get none")
    sides = [n if isinstance(n, int) else operator.index(n) for n in window]  # or NumPy's, a tensor
    left, right = [n if 0 <= n < NO_LIMIT else None for n in sides]
    traced = torch.compiler.is_compiling()  # then a constant, not the symbol of any float
    number = (lambda x: math.ldexp(*math.frexp(float(x)))) if traced else float
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    return Request(number(dropout), None if scale is None else number(scale),
                   None if left is None else left + 1, 0 if causal else right,
                   number(softcap or 0) or None, lse, grad and torch.is_grad_enabled(), slopes)


def wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shape_of(got)}")


def integers(on: object, *shape: int, **given: Tensor | None) -> None:
    """Those that are given have this shape; -1: any size."""
    for name, t in given.items():
        if t is not None:
            must_be(name, t, shape, on, INTEGERS)


def on_host(t: Tensor, wait: bool = False) -> list[Any] | None:
    return None if symbolic(t) or not (wait or t.device.type == "cpu") else t.tolist()


def check(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v"), *,
          dims: int = 4, paged: bool = False) -> None:
    """q of so many dimensions, k and v too or pages; heads that divide q's; the rest alike."""
    if q.dim() != dims or q.dtype not in NAMES or not (q.shape[-1] and q.shape[-2]):
        layout = "total tokens" if dims == 3 else "batch, tokens"
        wrong("q", f"({layout}, heads, head_dim) of {' or '.join(DTYPES)}", q)
    Hkv, alike = k.shape[-2], (q.device, (NAMES[q.dtype],))
    must_be(names[0], k, (*[-1] * (2 if paged else dims - 2), Hkv, q.shape[-1]), *alike)
    must_be(names[1], v, k.shape, *alike)
    if not Hkv or q.shape[-2] % Hkv:
        wrong(names[0], f"of heads that divide q's {q.shape[-2]}", k)


@not_compiled
@kept
def _read(t: Tensor) -> list[int]:
    return t.tolist()  # waits for the device, once per tensor


def lengths_of(name: str, cu_seqlens: Tensor, total: int | None,
               used: Tensor | None = None) -> tuple[list[int], list[int]]:
    """The lengths of sequences of `total` tokens, and the first tokens of each that are used."""
    ends = _read(cu_seqlens)
    if ends[:1] != [0] or sorted(ends) != ends or total not in (None, ends[-1]):
        wrong(name, f"ascending from 0 to the number of tokens ({total})", ends)
    lengths = [b - a for a, b in pairwise(ends)]
    found = lengths if used is None else _read(used)
    if not all(0 <= n <= length for n, length in zip(found, lengths)):
        wrong(name.replace("cu_seqlens", "seqused"), f"from 0 to the lengths {lengths}", found)
    return lengths, found


def pages_seen(table: Tensor, pages: Tensor, lengths_q: list[int], lengths_k: list[int],
               window: int | None) -> list[Tensor]:
    """Each row's pages from the first one that its queries see: -1 marks an absent page."""
    n_pages, size = pages.shape[:2]
    rows = []
    for row, Tq, Tk in zip(table, lengths_q, lengths_k, strict=True):
        first = 0 if window is None else max(0, Tk - Tq - window + 1) // size
        rows.append(row[first : -(-Tk // size)])
        if -(-Tk // size) > len(row):
            wrong("cu_seqlens_k", f"of at most {len(row) * size} tokens a row of block_table", Tk)
        if not all(0 <= page < n_pages for page in on_host(rows[-1]) or ()):
            wrong("block_table", f"pages of 0 .. {n_pages - 1} where there are tokens", row)
    return rows


def tokens(pages: Tensor, used: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The tokens (n, Hkv, D) in each row's used pages, of pages (pages, page_size, Hkv, D)."""
    size = pages.shape[1]
    return [pages[u].flatten(0, 1)[: len(u) * size - -n % size] for u, n in zip(used, lengths)]


def check_deterministic(q: Tensor) -> None:
    if q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")


class Choice(NamedTuple):
    """The backend of use(). Printed, it is what select() prints for a plain call."""

    backend: str
    policy: Policy

    def __repr__(self) -> str:
        device = next(d for d in ("cuda", "mps", "cpu") if d in devices())
        spec = Spec(1, 1, 64, "float32" if device == "cpu" else "float16", grad=False)
        try:
            return str(select(self.backend, spec, device, self.policy))
        except BackendUnavailable as e:
            return f"ERROR: {e}"


def use(backend: str = "auto", policy: Policy = Policy()) -> Choice:
    """Choose the backend of all later calls: a name, an alias, "auto", "fastest" or a file, else
    ValueError. print(use(...)) tries it."""
    global _plans, _seeded
    check_name(backend)
    _plans, _seeded = Plans(backend, policy), Plans(backend, policy)
    _ran.clear()
    return Choice(backend, policy)


def report() -> str:
    """Each kind of call since use(): the kernel that ran, how often, and what was refused."""
    known: dict[Any, Any] = {key: (plan[0].chosen, 0) for key, plan in _plans.known.items()}
    lines = []
    for key, (chosen, n) in (known | _ran).items():
        if not n and (len(key) > 3 or not chosen.traced):  # or the values of a traced call
            continue
        calls = f"{n} calls" if n else "traced by torch.compile, calls not counted"
        if isinstance(chosen, str):
            ran = f"{calls} refused: {chosen}"
        else:
            kernels = ", ".join(chosen.kernels) or "plain operators"
            lost = [f"; {x} refused: {'; '.join(why)}" for x, why in chosen.rejected.items()]
            ran = f"{chosen.backend.name} (kernel: {kernels}), {calls}{''.join(lost)}"
        lines.append(f"{key[0]} on {key[1]}: {ran}")
    return "\n".join(lines) or "no call since use()"


def kernel(
    q: Tensor, Tk: int, Hkv: int, request: Request, *, segments: bool = False, cache: str = "none",
    page_size: int | None = None, dry: bool = False,
) -> tuple[Backend, Spec]:
    """The kernel and the Spec of a call with Tk keys of Hkv heads; `dry`: it may not be run."""
    B, Tq, H, D = q.shape
    compiled, alibi = torch.compiler.is_compiling(), request.slopes is not None
    # A side that hides nothing is none: more kernels have that.
    window = request.window if cache == "paged" or (request.window or Tk) < Tk else None
    right, dropout, plans = request.right, request.dropout, _plans
    if right != 0:
        right = 0 if Tq == 1 else None if right is None or right >= Tq - 1 else right
    if alibi and cache == "none" and Tq > Tk and right != 0 and (window or right):
        wrong("alibi_slopes", f"None, or causal=True, for {Tq} queries, {Tk} keys", request.slopes)
    if dropout and request.lse:
        dropout, plans = 0.0, _seeded
        if compiled:
            wrong("dropout_p", "0 for the log-sum-exp while torch.compile traces", request.dropout)
    fields: tuple[Any, ...] = (  # in the order of Spec's
        H, Hkv, D, NAMES[q.dtype], window, dropout, segments, request.grad, cache, compiled,
        page_size, request.scale, request.softcap, False, request.lse, right, alibi,
    )
    if compiled or type(Tq) is not int:  # sizes may be a tracer's
        fields = tuple(n if type(n) in PLAIN else operator.index(n) for n in fields)
    device, deterministic = str(q.device), torch.are_deterministic_algorithms_enabled()
    if compiled:
        traced = device, deterministic, *fields
        plans.choose_in_trace(*traced)
        call = plans.known[traced][0]
        return call.chosen.backend, call.spec
    spec = _spec(*fields)
    if shape_only(q):
        return (tiled if request.lse else manual).BACKEND, spec
    key = spec.kind, device, deterministic
    if plans is _seeded and key not in plans.known:
        why = Refusal("dropout_p must be 0 for the log-sum-exp (return_attn_probs)", "dropout")
        known = [*BACKENDS.values(), *([] if plans.name in RULES else [get(plans.name)])]
        lacking = {b.name: (why,) for b in known if b.partial and not b.partial.dropout}
        plans.refused.setdefault(key, {}).update(lacking)
    try:
        chosen = plans.choose(spec, device, (B, Tq, Tk), " (flash_attn functions)")
    except BackendUnavailable as e:
        _ran[key] = str(e), _ran[key][1] + 1
        raise
    if plans is _seeded:
        spec = replace(spec, dropout=request.dropout)
        key = spec.kind, device, deterministic
    _ran[key] = chosen, _ran[key][1] + (not dry)
    return chosen.backend, spec


def dense(
    q: Tensor, k: Tensor, v: Tensor, request: Request, segments: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out (B, Tq, H, D), and the log-sum-exp (B, H, Tq) float32 if requested."""
    if not (q.numel() and k.numel()):
        out, L = nothing(q, k, v, None, lse=True)
        return out, L.float() if request.lse else None
    more: dict[str, Any] = {} if segments is None else {"segments": segments}
    if request.slopes is not None:
        more["alibi_slopes"] = request.slopes
    backend, spec = kernel(q, k.shape[1], k.shape[2], request, segments=segments is not None)
    with getattr(q, "fake_mode", NO_MODE) if shape_only(q) else NO_MODE:
        if not request.lse:
            return backend.compute(q, k, v, spec, **more), None
        if spec.dropout:
            more["seed"] = torch.randint(2**62, (1,), device=q.device)
        out, L = attention(q, k, v, spec, kernel=backend.partial, **more)
        return out, L.float()


def texts(
    qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor], request: Request
) -> tuple[list[Tensor], list[Tensor]]:
    """out (Tq, H, D) of each text, and its log-sum-exp (H, Tq) if requested. Texts of one length
    are a batch. NaN in one text reaches no other, as it does through a masked key."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (q, k) in enumerate(zip(qs, ks)):
        alike.setdefault((len(q), len(k)), []).append(i)
    outs, Ls, slopes = [*qs], [*qs], request.slopes
    for group in alike.values():
        q, k, v = (torch.stack([t[i] for i in group]) if len(group) > 1 else t[group[0]][None]
                   for t in (qs, ks, vs))
        if slopes is not None and slopes.dim() == 2:
            request = request._replace(slopes=slopes[group])
        out, L = dense(q, k, v, request)
        for i, row, L_row in zip(group, out, out if L is None else L):
            outs[i], Ls[i] = row, L_row
    return outs, Ls


def shape_only(t: Tensor) -> bool:  # meta and fake tensors: no kernel could run
    return symbolic(t) and not torch.compiler.is_compiling()


def returned(out: Tensor, L: Tensor | None, probs: bool = False) -> Returned:
    return out if L is None else (out, L, None) if probs else (out, L)
