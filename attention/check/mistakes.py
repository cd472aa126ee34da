"""The name of a kernel's mistake: a plain program with it reproduces the output (the gradients,
where the output is right) of all failing cases tried, and without it does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import proof
from ..machine.system import KERNEL_ERRORS, loses_device, settings_stay
from ..proof import Inputs, Result, run
from ..spec import Machine, Spec, visible
from . import matrix
from .matrix import Case, Item

# --- attention as a plain program that can make mistakes ---


def cast(given: Inputs, dtype: str) -> Inputs:
    """The floating-point tensors in this dtype."""
    to = getattr(torch, dtype)
    found = (t.detach().to(to) if t is not None and t.is_floating_point() else t for t in given)
    return Inputs(*found)  # type: ignore[arg-type]


def program(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, keep: Tensor | None = None,
    without: str = "", offset: int | None = None, shift: int = 0, inverted: bool = False,
    order: int = 0, modulo: bool = False, gradient_of: int | None = None, dims: int | None = None,
    late: bool = False, tile: int = 0, stale: str = "", half: str = "",
    rounded: str = "", no_rowsum: bool = False, factor: Mapping[str, float] = {}, **sides: Any,
) -> Tensor:
    """attend() by the formula, in q's dtype. A row that sees no key gives zeros.
    `keep` (B, H, Tq, Tk) are dropout's factors; what follows are mistakes: `without` an input,
    `factor` of gradients by the input's name, `sides` other values of window, right, scale and
    softcap."""
    Tq, Tk, H, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    of = {**vars(spec), "scale": spec.softmax_scale, **sides}
    i, j, h = (torch.arange(n, device=q.device) for n in (Tq, Tk, H))

    def half_at(t: Tensor, place: str) -> Tensor:
        return t.to(getattr(torch, half)).to(t.dtype) if place == rounded else t

    def leaf(t: Tensor, name: str) -> Tensor:
        times = factor.get(name, 1.0)
        t = t if times == 1 else t.detach() + times * (t - t.detach())
        return half_at(t, "q, k and v are")

    heads = h % k.shape[2] if modulo else h // group
    q, k, v = leaf(q, "q"), leaf(k, "k")[:, :, heads], leaf(v, "v")[:, :, heads]
    if gradient_of is not None:
        own = (h % group == gradient_of)[:, None]
        k, v = (torch.where(own, t, t.detach()) for t in (k, v))
    at = i + (Tk - Tq if offset is None else offset)
    seen = visible(at[:, None] + shift, j, 0, of["window"], right=of["right"])[None]
    if segments is not None and without != "segments":
        own = i + Tk - Tq
        ahead = segments[:, None] - segments[:, own.clamp(min=0), None]
        seen = seen & (ahead * order >= 0 if order else ahead == 0) & (own >= 0)[:, None]
    seen = (seen != inverted)[:, None]  # (B or 1, 1, Tq, Tk)

    s = half_at(torch.einsum("bihd,bjhd->bhij", q[..., :dims], k[..., :dims]), "q . k is")
    s = s * of["scale"]
    s = s.masked_fill(~seen, -torch.inf) if late else s
    if of["softcap"] is not None:
        s = of["softcap"] * torch.tanh(s / of["softcap"])
    if alibi_slopes is not None and without != "alibi":
        s = s - alibi_slopes[..., None, None] * (at[:, None] - j).abs()
    s = half_at(s if late else s.masked_fill(~seen, -torch.inf), "the scores are")
    sink = s.new_full((H, 1, 1), -torch.inf)
    if sinks is not None:
        sink = leaf(sinks, "sinks").to(s.dtype)[:, None, None] - 1e30 * (without == "sinks")
    lowest = torch.finfo(s.dtype).min
    m = torch.maximum(s.amax(3, keepdim=True), sink).clamp(min=lowest).detach()
    e, e_sink = torch.exp(s - m), torch.exp(sink - m)
    top = bottom = e
    if tile:  # exponentials from the maximum of the tiles so far
        tiles = F.pad(s, (0, -Tk % tile), value=-torch.inf).unflatten(3, (-1, tile))
        so_far = torch.maximum(tiles.amax(4).cummax(3).values, sink).clamp(min=lowest)
        old = torch.exp(s - so_far.repeat_interleave(tile, dim=3)[..., :Tk])
        top, bottom = e if stale == "sum" else old, e if stale == "out" else old
    total = bottom.sum(3, keepdim=True) + e_sink
    total = total.detach() + 0 * total if no_rowsum else total
    p = half_at(top / total.masked_fill(total == 0, 1), "the softmax is")
    p = p * seen.any(3, keepdim=True) * (1 if keep is None else keep)
    return torch.einsum("bhij,bjhd->bihd", p, v)


# --- the common mistakes ---

Options = dict[str, Any]  # of program()
STALE = [{"tile": n, "stale": s} for n in (16, 32, 64, 128) for s in ("out", "sum", "both")]
PLACES = "q, k and v are", "q . k is", "the scores are", "the softmax is"
ROUNDED = [(half, place) for half in ("float16", "bfloat16") for place in PLACES]


def mistakes(spec: Spec) -> list[tuple[str, str, Options]]:
    """Name, the contract's sentence (spec.py) and what the program does. It changes nothing if the
    Spec has no such option."""
    scale, D, window, right = spec.softmax_scale, spec.head_dim, spec.window, spec.right
    more, less = (None if right is None else right + n for n in (1, -1))
    group = spec.n_head // spec.n_kv_head
    causal = "Causal, aligned bottom-right: the last query attends to the last key."
    ahead = "right: the most keys after its own that a query attends to; None: all."
    table: dict[str, dict[str, list[Options]]] = {
        "A fully masked row gives zeros and zero gradients.": {
            "a query that sees no key does not give zeros": [{}]},
        "window: the most keys up to its own that a query attends to, itself included; None: all.":
            {"the window is one key too large": [{"window": window and window + 1}],
             "the window is one key too small": [{"window": window and window - 1}],
             "the window is ignored": [{"window": None}]},
        ahead if right else causal: {
            "a query sees one later key too many": [{"right": more}, {"shift": 1}],
            "a query sees one key too few": [{"right": less}, {"shift": -1}],
            "later keys are not masked": [{"right": None}],
            "later keys are masked": [{"right": 0}],
            "the mask is aligned top-left: offset 0, not Tk - Tq": [{"offset": 0}],
            "the mask is inverted": [{"inverted": True}]},
        "seg_i, seg_j: segment ids of the query and of the key, which must be equal.": {
            "segments are ignored": [{"without": "segments"}],
            "segments are compared by order": [{"order": -1}, {"order": 1}]},
        "Query head h reads key/value head ``g(h) = h // (H / Hkv)``.": {
            "query head h reads key/value head h % Hkv": [{"modulo": True}],
            "dK and dV are not the sums over a group's query heads": [
                {"gradient_of": 0}, {"gradient_of": group - 1},
                {"factor": dict.fromkeys("kv", 1 / group)}]},
        "factor of the scores; None: 1 / sqrt(head_dim)": {
            "the scores are not scaled": [{"scale": 1.0}],
            "the scores are scaled twice": [{"scale": 1 / D}, {"scale": scale**2}],
            "the Spec's scale is ignored": [{"scale": D**-0.5}]},
        "`softcap` c bounds each score s to c * tanh(s / c)": {
            "the softcap is ignored": [{"softcap": None}],
            "the softcap comes after the mask": [{"late": True}]},
        "`sinks` adds to each head's softmax a learned logit without a value": {
            "the sinks are ignored": [{"without": "sinks"}]},
        "`alibi` adds :func:`alibi_bias` to each score": {
            "ALiBi is ignored": [{"without": "alibi"}]},
        "out[b,i,h] = sum_j softmax_j( q[b,i,h] . k[b,j,g(h)] / sqrt(D) ) v[b,j,g(h)]": {
            "the last dimensions of q and k are left out": [
                {"dims": D // n * n} for n in (4, 8, 16, 32, 64)],
            "sums are not rescaled to a new maximum": STALE,
            "the gradient of the softmax lacks rowsum(dO * O)": [{"no_rowsum": True}],
            **{f"{place} rounded to {half}": [{"half": half, "rounded": place}]
               for half, place in ROUNDED},
            **{f"the gradient of {name} is missing": [{"factor": {name: 0.0}}]
               for name in ("q", "k", "v", "sinks")},
            **{f"the gradient of {' and '.join(names)} is not scaled": [
                {"factor": dict.fromkeys(names, 1 / scale)}] for names in ("q", "k", "qk")}},
    }
    return [(name, sentence, options) for sentence, names in table.items()
            for name, several in names.items() for options in several]


# --- the search ---

FAILING, TRIED = 4, 16  # cases: at most so many that fail, among so many


class Failure(NamedTuple):
    """A run with wrong numbers."""

    case: Case
    spec: Spec
    got: Result
    errors: list[proof.Deviation]


def failures(item: Item) -> Iterator[Failure]:
    """Wrong runs of the item's case and of others with its features."""
    others = [replace(c, D=item.case.D if c.D == Case.D else c.D) for c in matrix.in_order()
              if {*item.case.features} <= {*c.features} and c.Tk < 300]
    dtype, device = item.dtype, item.device
    for case in dict.fromkeys((item.case, *others[:TRIED])):
        for grad in (True, False)[not item.case.grad :]:  # a backward pass may raise an error
            spec = case.spec(dtype, grad=grad)
            if item.backend.why_not(spec, Machine.here(device)):
                continue
            try:
                with settings_stay():
                    got = item.run(matrix.inputs(case, dtype, device), spec)
            except (*KERNEL_ERRORS, GeneratorExit) as e:
                if loses_device(e):
                    return
                continue
            finally:
                matrix.inputs.cache_clear()  # the kernel may have written to its inputs
            rough, exact = matrix.plain(case, dtype, device), matrix.truth(case, dtype)
            errors = proof.errors(got, rough, exact, getattr(torch, dtype))
            if proof.wrong(errors):
                yield Failure(case, spec, got, errors)
                break


def reproduces(failure: Failure, options: Options) -> bool | None:
    """None unless the program with a mistake reproduces the kernel; False if it does so without
    it, too. Queries that the mistake leaves without keys are not compared."""
    case, spec, got, errors = failure
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
        # Root mean squares: where a program rounds down, a kernel may round up.
        off, effect, noise = (
            float((t - want)[finite].nan_to_num(0).square().mean().nan_to_num(0).sqrt())
            for t in (x, *others))
        allowed = max(e.allowed for e in errors if e.name == name and "mean" in e.where)
        limit = 2 * allowed + 4 * noise
        if not (finite.equal(x.isfinite()) and off <= limit):
            return None
        differs = differs or effect > 2 * limit or not finite.all()
    return differs if names else None


def named(item: Item) -> list[str]:
    """Lines on the mistake of a kernel that fails a case, and the largest score where its output is
    not finite."""
    if item.title:
        return []
    found: list[Failure] = []
    left = dict.fromkeys(range(len(mistakes(item.spec))), False)  # reproduce all: one differs
    for failure in itertools.islice(failures(item), FAILING):
        table = mistakes(failure.spec)
        answers = {n: reproduces(failure, table[n][2]) for n in left}
        left = {n: left[n] or yes for n, yes in answers.items() if yes is not None}
        found.append(failure)
        if not left:
            break
    if not found:
        return []
    rows = [row for n, row in enumerate(mistakes(item.spec)) if left.get(n)]
    names = ", or ".join(dict.fromkeys(name for name, *_ in rows))
    quotes = " ".join(dict.fromkeys(f'"{sentence}"' for _, sentence, _ in rows))
    cases = ", ".join(failure.case.name for failure in found)
    lines = [f"The mistake: {names}. A plain program with it reproduces the kernel in {cases}.",
             f"The contract (attention/spec.py): {quotes}"]
    bad = [text for failure in found for text in not_finite(failure)]
    return lines * bool(rows) + bad[:1]


def not_finite(failure: Failure) -> list[str]:
    """The largest score of the rows that are not finite."""
    spec, rows = failure.spec, ~failure.got.out.cpu().isfinite().all(3)  # (B, Tq, H)
    if not rows.any():
        return []
    q, k = (t.double() for t in matrix.inputs(failure.case, spec.dtype)[:2])
    k = k.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2)
    most = float(torch.einsum("bihd,bjhd->bihj", q, k)[rows].abs().max())
    return [f"{failure.case.name}: out is not finite in {int(rows.sum())} rows; there |q . k| is "
            f"up to {most:,.5g}, a score up to {most * spec.softmax_scale:,.5g} (float16: 65,504)."]
