"""Arguments and kernels of flash-attn's calls. Fully masked rows have L = -inf, not its inf."""

from __future__ import annotations

import math
import operator
from collections import defaultdict, namedtuple
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..caps import Backend, BackendUnavailable, Refusal, must_be, shape_of
from ..function import attention, not_compiled
from ..machine.system import devices, outside_a_trace
from ..masks import kept, nothing, symbolic
from ..names import BACKENDS, RULES, check_name, get
from ..plan import Key, Plans
from ..select import select
from ..spec import DTYPES, NO_LIMIT, Policy, Spec

HINTS = ("max_seqlen_q", "num_splits", "pack_gqa", "scheduler_metadata", "sm_margin")  # not read
REFUSED = ("attention_chunk", "qv", "q_descale", "k_descale", "v_descale", "cu_seqlens_q",
           "cu_seqlens_k_new")
Returned = Any  # out, (out, L), or (out, L, None)
Layouts = tuple[Tensor | None, str]  # a tensor and its sizes, "B T H D"
# A plain tuple: torch.compile traces how it is made.
Request = namedtuple("Request", "n_head n_kv_head head_dim dtype window dropout segments grad "
                     "cache compiled page_size scale softcap sinks lse right alibi")
_spec = lru_cache(maxsize=4096)(Spec)
# [True]: of dropout with the log-sum-exp
_plans = {seeded: Plans("auto") for seeded in (False, True)}
_traced = SimpleNamespace()  # by repr of the call
_ran: defaultdict[Key, tuple[Any, int]] = defaultdict(lambda: (None, 0))  # choice, count


def wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shape_of(got)}")


def match(sizes: dict[str, int], on: object, dtypes: tuple[str, ...], **tensors: Layouts) -> None:
    for name, (t, layout) in tensors.items():
        if t is not None:
            axes, shape = layout.split(), getattr(t, "shape", ())
            same = len(axes) == len(shape)  # then unknown sizes are its own
            want = map(sizes.setdefault, axes, shape) if same else (sizes.get(a, -1) for a in axes)
            must_be(name, t, tuple(want), on, dtypes)


def requested(sizes: dict[str, int], q: Tensor, layout: str, tensors: dict[str, Layouts],
              dropout: Any, scale: Any, causal: bool, window: Any, softcap: Any,
              slopes: Tensor | None, lse: bool, others: dict[str, object],
              deterministic: bool = False) -> Request:
    for name, value in others.items():
        if name not in REFUSED and name not in HINTS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if name in REFUSED and (isinstance(value, Tensor) or value not in (None, False, 0)):
            raise ValueError(f"{name} is not supported")
    if deterministic:
        check_deterministic(q)
    dtype = str(q.dtype).removeprefix("torch.")
    match(sizes, q.device, DTYPES, q=(q, layout))
    match(sizes, q.device, (dtype,), **tensors)
    heads = sizes["H"], sizes["Hkv"], sizes["D"]
    if not all(heads) or heads[0] % heads[1]:
        wrong("q", f"of heads that are a multiple of the {heads[1]} key heads", q)
    given = (q, *(t for t, _ in tensors.values() if t is not None))
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if slopes is not None:
        axes = "B H" if slopes.dim() > 1 else "H"
        match(sizes, q.device, ("float32",), alibi_slopes=(slopes, axes))
        if slopes.requires_grad:
            raise ValueError("alibi_slopes must not require gradients: they get none")
    # Also NumPy's numbers, and tensors.
    sides = (n if isinstance(n, int) else operator.index(n) for n in window)
    left, right = (n if 0 <= n < NO_LIMIT else None for n in sides)
    numbers = [None if x is None else float(x) for x in (dropout, scale, softcap)]
    if torch.compiler.is_compiling():  # else their second values are symbols
        numbers = [x if x is None else math.ldexp(*math.frexp(x)) for x in numbers]
    dropout, scale, softcap = numbers
    return Request(
        *heads, dtype, None if left is None else left + 1, dropout, False, grad, "none",
        torch.compiler.is_compiling(), None, scale, softcap or None, False, lse,
        0 if causal else right, slopes is not None)


def check_deterministic(q: Tensor) -> None:
    if q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")


def on_host(t: Tensor, wait: bool = False) -> list[Any] | None:
    return None if symbolic(t) or not (wait or t.device.type == "cpu") else t.tolist()


@not_compiled
@kept
def read(t: Tensor) -> list[int]:
    return t.tolist()  # waits for the device, once per tensor


def lengths_of(name: str, cu_seqlens: Tensor, total: int | None,
               used: Tensor | None = None) -> tuple[list[int], list[int]]:
    """Lengths of sequences, and how many first tokens of each are used."""
    ends = read(cu_seqlens)
    if ends[:1] != [0] or sorted(ends) != ends or total not in (None, ends[-1]):
        wrong(name, f"ascending from 0 to the number of tokens ({total})", ends)
    lengths = [b - a for a, b in pairwise(ends)]
    found = lengths if used is None else read(used)
    if not all(0 <= n <= length for n, length in zip(found, lengths)):
        wrong(name.replace("cu_seqlens", "seqused"), f"from 0 to the lengths {lengths}", found)
    return lengths, found


def seen(name: str, table: Tensor, pages: Tensor, Tq: Sequence[int], Tk: Sequence[int],
         window: int | None) -> list[tuple[Tensor, int]]:
    """Each row's visible pages (earlier ones may be absent, -1), and their number of tokens."""
    n_pages, size = pages.shape[:2]
    columns = -(-max(Tk, default=0) // size)
    if columns > table.shape[1]:
        most = table.shape[1] * size
        wrong("cu_seqlens_k", f"of at most {most} tokens a row of block_table", max(Tk))
    known = on_host(table[:, :columns])
    rows = []
    for i, (row, queries, keys) in enumerate(zip(table, Tq, Tk, strict=True)):
        first = 0 if window is None else max(0, keys - queries - window + 1) // size
        used = slice(first, -(-keys // size))
        if known and not all(0 <= page < n_pages for page in known[i][used]):
            wrong(name, f"in 0 .. {n_pages - 1} where there are tokens", known[i])
        rows.append((row[used], keys - first * size))
    return rows


def tokens(pages: Tensor, rows: list[tuple[Tensor, int]], starts: Sequence[int]) -> list[Tensor]:
    texts = (pages[used[0]] if len(used) == 1 else pages[used].flatten(0, 1) for used, _ in rows)
    return [text[a:n] for text, (_, n), a in zip(texts, rows, starts)]


class Choice(NamedTuple):
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
    """Set the backend of later calls: a name, an alias, "auto", "fastest" or a file."""
    check_name(backend)
    _plans.update({seeded: Plans(backend, policy) for seeded in _plans})
    _ran.clear()
    vars(_traced).clear()
    return Choice(backend, policy)


def report() -> str:
    """List the kinds of calls since use(): kernel, number of calls, refusals."""
    found = [(key, f"{n} call{'s' * (n > 1)}", chosen) for key, (chosen, n) in _ran.items() if n]
    found += [(key, "traced, calls not counted", chosen)
              for key, chosen in _plans[False].chosen.items() if chosen.traced]
    lines = [f"{kind} on {device}, {n}:\n{chosen}" for (kind, device, _), n, chosen in found]
    return "\n".join(line.replace("\n", "\n  ") for line in lines) or "no call since use()"


def kernel(q: Tensor, Tk: int, request: Request, dry: bool = False) -> tuple[Backend, Spec]:
    """Kernel and Spec for q (B, Tq, H, D) and Tk keys; `dry`: the call is not counted."""
    (B, Tq), device = q.shape[:2], str(q.device)
    if request.cache != "paged" and (request.window or 0) >= Tk:
        request = request._replace(window=None)
    if request.right != 0:
        far = request.right is None or request.right >= Tq - 1
        request = request._replace(right=0 if Tq == 1 else None if far else request.right)
    if request.compiled or type(Tq) is not int:
        other = bool, float, str, type(None)
        request = Request(*(n if isinstance(n, other) else operator.index(n) for n in request))
    seeded = bool(request.dropout and request.lse)
    plans, deterministic = _plans[seeded], torch.are_deterministic_algorithms_enabled()
    if request.compiled:
        if seeded:
            wrong("dropout_p", "0 for the log-sum-exp while torch.compile traces", request.dropout)
        spec, backend = getattr(_traced, _choose_in_trace(device, *request))
        return backend, spec
    spec = _spec(*request)
    planned = _spec(*request._replace(dropout=0.0)) if seeded else spec
    key = planned.kind, device, deterministic
    if seeded and key not in plans.chosen:
        why = Refusal("dropout_p must be 0 for the log-sum-exp (return_attn_probs)", "dropout")
        known = [*BACKENDS.values(), *([] if plans.name in RULES else [get(plans.name)])]
        lacking = {b.name: (why,) for b in known if b.partial and not b.partial.dropout}
        plans.refused.setdefault(key, {}).update(lacking)
    key = spec.kind, device, deterministic
    chosen = plans.choose(planned, device, (B, Tq, Tk), " (flash_attn functions)")
    _ran[key] = chosen, _ran[key][1] + (not dry)
    return chosen.backend, spec


@outside_a_trace
def _choose_in_trace(device: str, *fields: Any) -> str:
    """A name in _traced: a trace sees new attributes, but no new keys of a dict."""
    spec, call = Spec(*fields), (device, torch.are_deterministic_algorithms_enabled(), *fields)
    name = "of_" + repr(call).encode().hex()  # without dots
    setattr(_traced, name, (spec, _plans[False].choose_in_trace(spec, device).backend))
    return name


def dense(q: Tensor, k: Tensor, v: Tensor, request: Request, slopes: Tensor | None,
          segments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """out (B, Tq, H, D), and any L (B, H, Tq) float32."""
    if not (q.numel() and k.numel()):
        out, L = nothing(q, k, v, None, lse=True)
        return out, L.float() if request.lse else None
    more = {} if segments is None else {"segments": segments}
    more |= {} if slopes is None else {"alibi_slopes": slopes}
    backend, spec = kernel(q, k.shape[1], request._replace(segments=segments is not None))
    if not request.lse:
        return backend.compute(q, k, v, spec, **more), None
    if spec.dropout:
        more["seed"] = torch.randint(2**62, (1,), device=q.device)
    out, L = attention(q, k, v, spec, kernel=backend.partial, **more)
    return out, L.float()


def texts(qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor], request: Request,
          slopes: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (q, k) in enumerate(zip(qs, ks)):
        alike.setdefault((len(q), len(k)), []).append(i)
    outs, Ls = [*qs], [*qs]
    for group in alike.values():
        q, k, v = (torch.stack([t[i] for i in group]) if len(group) > 1 else t[group[0]][None]
                   for t in (qs, ks, vs))
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[group]
        out, L = dense(q, k, v, request, own)
        for i, row, L_row in zip(group, out, out if L is None else L):
            outs[i], Ls[i] = row, L_row
    return outs, Ls


def returned(out: Tensor, L: Tensor | None, probs: bool = False) -> Returned:
    return out if L is None else (out, L, None) if probs else (out, L)
