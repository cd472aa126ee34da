"""The kernel of each call, and what ran since use(). Rows that see no key give zeros, and a
log-sum-exp of -inf, where flash-attn has inf."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import manual, tiled
from ..caps import Backend, BackendUnavailable, Refusal
from ..function import attention
from ..machine.system import devices
from ..masks import nothing, symbolic
from ..names import BACKENDS, RULES, check_name, get
from ..plan import Key, Plans
from ..select import select
from ..spec import Policy, Spec
from .arguments import NAMES, Request, wrong

Returned = Any  # out; with the log-sum-exp (out, L), or (out, L, None)
NO_MODE, PLAIN = nullcontext(), (bool, float, str, type(None))
_spec = lru_cache(maxsize=4096)(Spec)
_plans = Plans("auto")
_seeded = Plans("auto")  # of the log-sum-exp with dropout, which few kernels have
NEVER = None, 0
_ran: dict[Key, tuple[Any, int]] = {}  # choice or error, calls


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
    window, right, dropout, plans = request.window, request.right, request.dropout, _plans
    if window is not None and window >= Tk and cache != "paged":
        window = None
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
        _ran[key] = str(e), _ran.get(key, NEVER)[1] + 1
        raise
    if plans is _seeded:
        spec = replace(spec, dropout=request.dropout)
        key = spec.kind, device, deterministic
    _ran[key] = chosen, _ran.get(key, NEVER)[1] + (not dry)
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


def shape_only(t: Tensor) -> bool:
    """True for meta and fake tensors: no kernel runs, or could."""
    return symbolic(t) and not torch.compiler.is_compiling()


def returned(out: Tensor, L: Tensor | None, probs: bool = False) -> Returned:
    return out if L is None else (out, L, None) if probs else (out, L)
