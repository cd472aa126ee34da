"""The name of a kernel's mistake.

named() compares the kernel, in cases that fail, with a plain program (program.py) that makes each
common mistake. A mistake is named if one variant of it reproduces the kernel's output in all of
them (the gradients, where the output is right), and the program without it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..caps import Backend
from ..machine.system import KERNEL_ERRORS, loses_device, settings_stay
from ..proof import Inputs, Result, run
from ..spec import Machine, Spec
from . import matrix
from .matrix import Case, Item, Wrong
from .program import program
from .properties import draw, weights

FAILING, TRIED = 4, 16  # cases: at most so many that fail, among so many

# Sentences of the contract (spec.py).
FORMULA = "out[b,i,h] = sum_j softmax_j( q[b,i,h] . k[b,j,g(h)] / sqrt(D) ) v[b,j,g(h)]"
CAUSAL = "Causal, aligned bottom-right: the last query attends to the last key."
WINDOW = "window: the most keys up to its own that a query attends to, itself included; None: all."
RIGHT = "right: the most keys after its own that a query attends to; None: all."
SEGMENTS = "seg_i, seg_j: segment ids of the query and of the key, which must be equal."
HEADS = "Query head h reads key/value head ``g(h) = h // (H / Hkv)``."
ROWS = "A fully masked row gives zeros and zero gradients."
SCALE = "factor of the scores; None: 1 / sqrt(head_dim)"
SOFTCAP = "`softcap` c bounds each score s to c * tanh(s / c)"
SINKS = "`sinks` adds to each head's softmax a learned logit without a value"
DROPOUT = "dropout: float = 0.0 # on the attention probabilities"
Switch = dict[str, Any]  # arguments of program()


def variants(spec: Spec) -> Iterator[tuple[str, str, list[Switch]]]:
    """The common mistakes with a Spec: a name, the contract's sentence, and the variants, in the
    same order for all Specs."""
    scale, D, w, r = spec.softmax_scale, spec.head_dim, spec.window, spec.right
    group = spec.n_head // spec.n_kv_head
    yield "a query that sees no key does not give zeros", ROWS, [{}]
    if w:
        yield "the window is one key too large", WINDOW, [{"window": w + 1}]
        yield "the window is one key too small", WINDOW, [{"window": w - 1}]
        yield "the window is ignored", WINDOW, [{"window": None}]
    if r is not None:
        text = RIGHT if r else CAUSAL
        yield "a query sees one later key too many", text, [{"right": r + 1}, {"shift": 1}]
        yield "a query sees one key too few", text, [{"right": r - 1}, {"shift": -1}]
        yield "later keys are not masked", text, [{"right": None}]
    if r != 0:
        yield "later keys are masked", RIGHT, [{"right": 0}]
    yield "the mask is aligned top-left: offset 0, not Tk - Tq", CAUSAL, [{"offset": 0}]
    yield "the mask is inverted", CAUSAL, [{"inverted": True}]
    if spec.segments:
        yield "segments are ignored", SEGMENTS, [{"segments": None}]
        yield "segments are compared by order", SEGMENTS, [{"order": -1}, {"order": 1}]
    yield "query head h reads key/value head h % Hkv", HEADS, [{"modulo": True}]
    not_summed: list[Switch] = [{"gradient_of": 0}, {"gradient_of": group - 1}]
    not_summed += [{"factor": {"k": 1 / group, "v": 1 / group}}]
    yield "dK and dV are not the sums over a group's query heads", HEADS, not_summed
    yield "the scores are not scaled", SCALE, [{"scale": 1.0}]
    yield "the scores are scaled twice", SCALE, [{"scale": 1 / D}, {"scale": scale**2}]
    yield "the scores are multiplied by sqrt(D)", SCALE, [{"scale": D**0.5}]
    yield "the Spec's scale is ignored", SCALE, [{"scale": D**-0.5}]
    few = [{"dims": D // n * n} for n in (4, 8, 16, 32, 64)]
    yield "the last dimensions of q and k are left out", FORMULA, few
    if spec.softcap is not None:
        yield "the softcap is ignored", SOFTCAP, [{"softcap": None}]
        yield "the softcap comes after the mask", SOFTCAP, [{"cap": "late"}]
        yield "the softcap comes before the scale", SOFTCAP, [{"cap": "early"}]
        yield "the gradient of the softcap is missing", SOFTCAP, [{"cap": "flat"}]
    if spec.sinks:
        yield "the sinks are ignored", SINKS, [{"sinks": None}]
    stale = [{"tile": n, "stale": s} for n in (16, 32, 64, 128) for s in ("out", "sum", "both")]
    yield "sums are not rescaled to a new maximum", FORMULA, stale
    for half in (torch.float16, torch.bfloat16):
        for name in ("q, k and v are", "q . k is", "the scores are", "the softmax is"):
            switch = {"half": half, "rounded": name}
            yield f"{name} rounded to {str(half)[6:]}", FORMULA, [switch]
    for name in ("q", "k", "v", "sinks")[: 4 if spec.sinks else 3]:
        yield f"the gradient of {name} is missing", FORMULA, [{"factor": {name: 0.0}}]
    for names in ("q", "k", "qk"):
        lacks = {"factor": dict.fromkeys(names, 1 / scale)}
        yield f"the gradient of {' and '.join(names)} is not scaled", FORMULA, [lacks]
    yield "the gradient of the softmax lacks rowsum(dO * O)", FORMULA, [{"no_rowsum": True}]


def mistaken(given: Inputs, spec: Spec, dtype: torch.dtype, switch: Switch) -> Result:
    """The program's result with a mistake, computed in this dtype."""
    gone: Switch = {name: None for name in ("segments", "sinks") if name in switch}
    less: Switch = {"dtype": str(dtype)[6:], **dict.fromkeys(gone, False)}
    given = Inputs(*(
        t if t is None else t.detach().cpu().to(dtype if t.is_floating_point() else t.dtype)
        for t in given._replace(**gone)
    ))  # type: ignore[arg-type]
    more = {name: value for name, value in switch.items() if name not in gone}
    return run(partial(program, **more), given, replace(spec, **less))


def reproduces(wrong: Wrong, switch: Switch) -> bool | None:
    """None unless the program with a mistake reproduces the kernel; False if it does so without
    it, too. Queries that the mistake leaves without keys are not compared."""
    spec, got = wrong.spec, wrong.got
    names = {e.name for e in wrong.errors if not e.off <= e.allowed}
    names = {"out"} & names or ({*got.tensors} - {"out"} if switch else {"dq"} & names)
    spec = replace(spec, grad=names != {"out"})
    given, exact = matrix.inputs(wrong.case, spec.dtype), matrix.truth(wrong.case, spec.dtype)
    wide, low = (mistaken(given, spec, dtype, switch) for dtype in (torch.float64, torch.float32))
    differs = not switch
    for name in names:
        rows = wide.out.any(3) if name == "out" or not switch else ...
        x, want, rough, true = (
            of.tensors[name].cpu().double()[rows] for of in (got, wide, low, exact)
        )
        finite = want.isfinite()
        if not finite.equal(x.isfinite()):
            return None
        # Root mean squares: where a program rounds down, a kernel may round up.
        off, effect, noise = (
            float((t - want)[finite].nan_to_num(0).square().mean().nan_to_num(0).sqrt())
            for t in (x, true, rough)
        )
        allowed = max(e.allowed for e in wrong.errors if e.name == name and "mean" in e.where)
        limit = 2 * allowed + 4 * noise
        if not off <= limit:
            return None
        differs = differs or effect > 2 * limit or not finite.all()
    return differs if names else None


def failures(backend: Backend, case: Case, spec: Spec, device: str) -> Iterator[Wrong]:
    """The case and others with its features, as far as the kernel fails in them."""
    machine = Machine.here(device)
    others = [c for c in matrix.in_order() if {*case.features} <= {*c.features} and c.Tk < 300]
    others = [replace(c, D=spec.head_dim) if c.D == Case.D else c for c in others]
    for one in dict.fromkeys((case, *others[:TRIED])):
        for grad in (True, False)[not spec.grad :]:  # a backward pass may raise an error
            if backend.why_not(one.spec(spec.dtype, grad=grad), machine):
                continue
            try:
                with settings_stay():
                    matrix.check(backend, one, spec.dtype, device, grad=grad)
            except Wrong as e:
                yield e
                break
            except (*KERNEL_ERRORS, GeneratorExit) as e:
                if loses_device(e):
                    return


def named(backend: Backend, item: Item, spec: Spec, device: str) -> list[str]:
    """Lines about the mistake that a failing item shows: its name and the contract's sentence, if
    it is a common one, and the largest score where the output is not finite."""
    if item.case is None:
        return dropout_named(backend, spec, device) if spec.dropout else []
    left: dict[tuple[str, int], str] | None = None  # the variants that reproduce all
    differ: set[str] = set()
    found: list[Wrong] = []
    for wrong in failures(backend, replace(item.case, D=spec.head_dim), spec, device):
        found.append(wrong)
        before, left = left, {}
        for name, sentence, switches in variants(wrong.spec):
            for n, switch in enumerate(switches):
                if before is None or (name, n) in before:
                    differs = reproduces(wrong, switch)
                    if differs is not None:
                        left[name, n] = sentence
                        differ |= {name} if differs else set()
        if len(found) == FAILING or not left:
            break
    names = {name: sentence for (name, _), sentence in (left or {}).items() if name in differ}
    where = ", ".join(wrong.case.name for wrong in found)
    bad = [text for wrong in found for text in not_finite(wrong)]
    return lines(names, f"the kernel in {where}") + bad[:1]


def lines(names: dict[str, str], what: str) -> list[str]:
    quotes = " ".join(f'"{sentence}"' for sentence in dict.fromkeys(names.values()))
    return [f"The mistake: {', or '.join(names)}. A plain program with it reproduces {what}.",
            f"The contract (attention/spec.py): {quotes}"] if names else []


def not_finite(wrong: Wrong) -> list[str]:
    """The largest score of the rows that are not finite."""
    spec, rows = wrong.spec, ~wrong.got.out.cpu().isfinite().all(3)  # (B, Tq, H)
    if not rows.any():
        return []
    q, k = (t.double() for t in matrix.draw(wrong.case, spec.dtype)[:2])
    k = k.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2)
    most = float(torch.einsum("bihd,bjhd->bihj", q, k)[rows].abs().max())
    text = f"{wrong.case.name}: out is not finite in {int(rows.sum())} rows; there |q . k| is up to"
    scaled = f"a score up to {most * spec.softmax_scale:,.5g}"
    return [f"{text} {most:,.5g}, {scaled} (float16 ends at 65,504)."]


def dropout_named(backend: Backend, spec: Spec, device: str) -> list[str]:
    """The factor of the probabilities that are kept, if it is not 1 / (1 - p)."""
    p, given, quiet = spec.dropout, draw(spec, device, 16), replace(spec, grad=False)
    specs = quiet, replace(quiet, dropout=0.0)
    try:
        with settings_stay():
            after, before = (weights(backend, given, of, 0) for of in specs)
    except (*KERNEL_ERRORS, GeneratorExit):
        return []
    factor = (after / before)[(after != 0) & (before != 0)].double()
    names = {"are not divided by 1 - p": 1.0, "are divided by p": 1 / p}
    for name, times in names.items() if p != 0.5 else ():
        if len(factor) and bool(((factor - times).abs() < 0.02 * times).all()):
            name = f"in dropout the kept probabilities {name}"
            name = name if len(factor) < (before != 0).sum() else "dropout is ignored"
            return lines({name: DROPOUT}, f"them: they are {times:.3g} times those without it")
    return []
