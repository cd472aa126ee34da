"""A kernel's mistake: a plain program gives the kernel's numbers with it, and not without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import proof
from ..machine.system import KERNEL_ERRORS
from ..proof import Inputs, Result, run
from ..spec import Spec, visible
from . import matrix
from .matrix import Case, Item


def cast(given: Inputs, dtype: str) -> Inputs:
    to = getattr(torch, dtype)
    return Inputs(**{name: t.detach().to(to) if t.is_floating_point() else t
                     for name, t in given.tensors.items()})


RIGHT: dict[str, Any] = {  # program() without a mistake; others change it, or the Spec
    "without": "", "offset": None, "shift": 0, "inverted": False, "order": 0, "modulo": False,
    "gradient_of": None, "dims": None, "late": False, "tile": 0, "stale": "", "rounded": ("", ""),
    "no_rowsum": False, "factor": {}}


def program(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
            sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
            keep: Tensor | None = None, **mistake: Any) -> Tensor:
    """Compute attend() by the formula, in q's dtype. keep (B, H, Tq, Tk): dropout's factors."""
    of = {**vars(spec), "scale": spec.softmax_scale, **RIGHT, **mistake}
    Tq, Tk, H, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    i, j, h = (torch.arange(n, device=q.device) for n in (Tq, Tk, H))

    def rounded(t: Tensor, place: str) -> Tensor:
        half, where = of["rounded"]
        return t.to(getattr(torch, half)).to(t.dtype) if place == where else t

    def leaf(t: Tensor, name: str) -> Tensor:  # its gradient times a factor
        times = of["factor"].get(name, 1.0)
        return t if times == 1 else t.detach() + times * (t - t.detach())

    heads = h % k.shape[2] if of["modulo"] else h // group
    q, k, v = leaf(q, "q"), leaf(k, "k")[:, :, heads], leaf(v, "v")[:, :, heads]
    q, k, v = (rounded(t, "q, k and v are") for t in (q, k, v))
    if of["gradient_of"] is not None:
        own = (h % group == of["gradient_of"])[:, None]
        k, v = (torch.where(own, t, t.detach()) for t in (k, v))
    at = i + (Tk - Tq if of["offset"] is None else of["offset"])
    seen = visible(at[:, None] + of["shift"], j, 0, of["window"], right=of["right"])[None]
    if segments is not None and of["without"] != "segments":
        own = i + Tk - Tq
        ahead = segments[:, None] - segments[:, own.clamp(min=0), None]
        seen = seen & (ahead * of["order"] >= 0 if of["order"] else ahead == 0)
        seen = seen & (own >= 0)[:, None]
    seen = (seen != of["inverted"])[:, None]  # (B or 1, 1, Tq, Tk)

    s = torch.einsum("bihd,bjhd->bhij", q[..., : of["dims"]], k[..., : of["dims"]])
    s = rounded(s, "q . k is") * of["scale"]
    s = s.masked_fill(~seen, -torch.inf) if of["late"] else s
    if of["softcap"] is not None:
        s = of["softcap"] * torch.tanh(s / of["softcap"])
    if alibi_slopes is not None and of["without"] != "alibi":
        s = s - alibi_slopes[..., None, None] * (at[:, None] - j).abs()
    s = rounded(s if of["late"] else s.masked_fill(~seen, -torch.inf), "the scores are")
    sink = s.new_full((H, 1, 1), -torch.inf)
    if sinks is not None:
        sink = rounded(leaf(sinks, "sinks"), "q, k and v are").to(s.dtype)[:, None, None]
        sink = sink - 1e30 * (of["without"] == "sinks")
    lowest, tile = torch.finfo(s.dtype).min, of["tile"]
    m = torch.maximum(s.amax(3, keepdim=True), sink).clamp(min=lowest).detach()
    e, e_sink = torch.exp(s - m), torch.exp(sink - m)
    top = bottom = e
    if tile:  # exponentials from the running maximum of tiles
        tiles = F.pad(s, (0, -Tk % tile), value=-torch.inf).unflatten(3, (-1, tile))
        so_far = torch.maximum(tiles.amax(4).cummax(3).values, sink).clamp(min=lowest)
        old = torch.exp(s - so_far.repeat_interleave(tile, dim=3)[..., :Tk])
        top = e if of["stale"] == "sum" else old
        bottom = e if of["stale"] == "out" else old
    total = bottom.sum(3, keepdim=True) + e_sink
    total = total.detach() + 0 * total if of["no_rowsum"] else total
    p = rounded(top / total.masked_fill(total == 0, 1), "the softmax is")
    p = p * seen.any(3, keepdim=True) * (1 if keep is None else keep)
    return torch.einsum("bhij,bjhd->bihd", p, v)


Options = dict[str, Any]  # of program()
PLACES = "q, k and v are", "q . k is", "the scores are", "the softmax is"


def mistakes(spec: Spec) -> list[tuple[str, Options]]:
    scale, D, window, right = spec.softmax_scale, spec.head_dim, spec.window, spec.right
    group = spec.n_head // spec.n_kv_head
    table: dict[str, list[Options]] = {
        "a query that sees no key does not give zeros": [{}],
        "the window is one key too large": [{"window": window and window + 1}],
        "the window is one key too small": [{"window": window and window - 1}],
        "the window is ignored": [{"window": None}],
        "a query sees one later key too many": [
            {"right": None if right is None else right + 1}, {"shift": 1}],
        "a query sees one key too few": [
            {"right": None if right is None else right - 1}, {"shift": -1}],
        "later keys are not masked": [{"right": None}],
        "later keys are masked": [{"right": 0}],
        "the mask is aligned top-left: offset 0, not Tk - Tq": [{"offset": 0}],
        "the mask is inverted": [{"inverted": True}],
        "segments are ignored": [{"without": "segments"}],
        "segments are compared by order": [{"order": -1}, {"order": 1}],
        "query head h reads key/value head h % Hkv, not h // (H / Hkv)": [{"modulo": True}],
        "dK and dV are not the sums over a group's query heads": [
            {"gradient_of": 0}, {"gradient_of": group - 1},
            {"factor": dict.fromkeys("kv", 1 / group)}],
        "the scores are not scaled": [{"scale": 1.0}],
        "the scores are scaled twice": [{"scale": 1 / D}, {"scale": scale**2}],
        "the Spec's scale is ignored": [{"scale": D**-0.5}],
        "the softcap is ignored": [{"softcap": None}],
        "the softcap comes after the mask": [{"late": True}],
        "the sinks are ignored": [{"without": "sinks"}],
        "ALiBi is ignored": [{"without": "alibi"}],
        "the last dimensions of q and k are left out": [
            {"dims": D // n * n} for n in (4, 8, 16, 32, 64)],
        "sums are not rescaled to a new maximum": [
            {"tile": n, "stale": s} for n in (16, 32, 64, 128) for s in ("out", "sum", "both")],
        "the gradient of the softmax lacks rowsum(dO * O)": [{"no_rowsum": True}],
        **{f"{place} rounded to {half}": [{"rounded": (half, place)}]
           for half in ("float16", "bfloat16") for place in PLACES},
        **{f"the gradient of {name} is missing": [{"factor": {name: 0.0}}]
           for name in ("q", "k", "v", "sinks")},
        **{f"the gradient of {' and '.join(names)} is not scaled": [
            {"factor": dict.fromkeys(names, 1 / scale)}] for names in ("q", "k", "qk")}}
    return [(name, options) for name, several in table.items() for options in several]


def named(item: Item) -> list[str]:
    case, dtype, device = item.case, item.dtype, item.device
    for grad in (True, False)[not case.grad :] if not item.title else ():
        spec = case.spec(dtype, grad=grad)
        try:
            got = item.run(item.given, spec)
        except KERNEL_ERRORS:
            continue
        finally:
            matrix.inputs.cache_clear()  # it may have written to its inputs
        rough, exact = matrix.plain(case, dtype, device), matrix.truth(case, dtype)
        errors = proof.errors(got, rough, exact, getattr(torch, dtype))
        if proof.wrong(errors):
            names = dict.fromkeys(name for name, options in mistakes(spec)
                                  if reproduces(case, spec, got, errors, options))
            return [f"The mistake: {', or '.join(names)} (attention/spec.py). A plain program with "
                    "it gives the same numbers."] if names else []
    return []


def reproduces(case: Case, spec: Spec, got: Result, errors: list[proof.Deviation],
               options: Options) -> bool:
    """True if only the mistake gives these numbers, but for queries that it leaves without keys."""
    names = {e.name for e in errors if not e.off <= e.allowed}
    names = {"out"} & names or ({*got.tensors} - {"out"} if options else {"dq"} & names)
    given, exact = matrix.inputs(case, spec.dtype), matrix.truth(case, spec.dtype)
    wide, low = (
        run(partial(program, **options), cast(given, dtype),
            replace(spec, dtype=dtype, grad=names != {"out"}))
        for dtype in ("float64", "float32"))
    differs = not options
    for name in names:
        rows = wide.out.any(3) if name == "out" or not options else ...
        x, want, *others = (of.tensors[name].cpu().double()[rows] for of in (got, wide, exact, low))
        finite = want.isfinite()
        off, effect, noise = (  # A kernel may round up where a program rounds down
            float((t - want)[finite].nan_to_num(0).square().mean().nan_to_num(0).sqrt())
            for t in (x, *others))
        allowed = max(e.allowed for e in errors if e.name == name and "mean" in e.where)
        limit = 2 * allowed + 4 * noise
        if not (finite.equal(x.isfinite()) and off <= limit):
            return False
        differs = differs or effect > 2 * limit or not bool(finite.all())
    return bool(names) and differs
