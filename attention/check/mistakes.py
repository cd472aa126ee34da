"""The name of a kernel's mistake: a plain program (program.py) with it reproduces the output (the
gradients, where the output is right) of all failing cases tried, and without it does not."""

from __future__ import annotations

import itertools
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
from .program import cast, program
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
ALIBI = "`alibi` adds :func:`alibi_bias` to each score"
ROUNDED = "q, k and v are", "q . k is", "the scores are", "the softmax is"
Switch = dict[str, Any]  # arguments of program()


def variants(spec: Spec) -> dict[tuple[str, int], tuple[str, Switch]]:
    """The common mistakes: name and number of a variant -> the contract's sentence and the
    program's arguments, which change nothing if the Spec has no such option."""
    scale, D, w, r = spec.softmax_scale, spec.head_dim, spec.window, spec.right
    group, later = spec.n_head // spec.n_kv_head, RIGHT if r else CAUSAL
    more, less = (None if r is None else r + d for d in (1, -1))
    stale = [{"tile": n, "stale": s} for n in (16, 32, 64, 128) for s in ("out", "sum", "both")]
    table: list[tuple[Any, ...]] = [  # name, sentence, variants
        ("a query that sees no key does not give zeros", ROWS, {}),
        ("the window is one key too large", WINDOW, {"window": w and w + 1}),
        ("the window is one key too small", WINDOW, {"window": w and w - 1}),
        ("the window is ignored", WINDOW, {"window": None}),
        ("a query sees one later key too many", later, {"right": more}, {"shift": 1}),
        ("a query sees one key too few", later, {"right": less}, {"shift": -1}),
        ("later keys are not masked", later, {"right": None}),
        ("later keys are masked", RIGHT, {"right": 0}),
        ("the mask is aligned top-left: offset 0, not Tk - Tq", CAUSAL, {"offset": 0}),
        ("the mask is inverted", CAUSAL, {"inverted": True}),
        ("segments are ignored", SEGMENTS, {"segments": None}),
        ("segments are compared by order", SEGMENTS, {"order": -1}, {"order": 1}),
        ("query head h reads key/value head h % Hkv", HEADS, {"modulo": True}),
        ("dK and dV are not the sums over a group's query heads", HEADS, {"gradient_of": 0},
         {"gradient_of": group - 1}, {"factor": dict.fromkeys("kv", 1 / group)}),
        ("the scores are not scaled", SCALE, {"scale": 1.0}),
        ("the scores are scaled twice", SCALE, {"scale": 1 / D}, {"scale": scale**2}),
        ("the Spec's scale is ignored", SCALE, {"scale": D**-0.5}),
        ("the last dimensions of q and k are left out", FORMULA,
         *({"dims": D // n * n} for n in (4, 8, 16, 32, 64))),
        ("the softcap is ignored", SOFTCAP, {"softcap": None}),
        ("the softcap comes after the mask", SOFTCAP, {"late": True}),
        ("the sinks are ignored", SINKS, {"sinks": None}),
        ("ALiBi is ignored", ALIBI, {"alibi_slopes": None}),
        ("sums are not rescaled to a new maximum", FORMULA, *stale),
        ("the gradient of the softmax lacks rowsum(dO * O)", FORMULA, {"no_rowsum": True}),
        *((f"{name} rounded to {half}", FORMULA, {"half": half, "rounded": name})
          for half in ("float16", "bfloat16") for name in ROUNDED),
        *((f"the gradient of {name} is missing", FORMULA, {"factor": {name: 0.0}})
          for name in ("q", "k", "v", "sinks")),
        *((f"the gradient of {' and '.join(names)} is not scaled", FORMULA,
           {"factor": dict.fromkeys(names, 1 / scale)}) for names in ("q", "k", "qk")),
    ]
    return {(name, n): (sentence, switch) for name, sentence, *switches in table
            for n, switch in enumerate(switches)}


def mistaken(given: Inputs, spec: Spec, dtype: str, switch: Switch) -> Result:
    """The program's result with a mistake, computed in this dtype."""
    gone: Switch = {name: switch[name] for name in Inputs._fields if name in switch}  # None
    less: Switch = {name.partition("_")[0]: False for name in gone}
    more = {name: value for name, value in switch.items() if name not in gone}
    given = cast(given._replace(**gone), dtype)
    return run(partial(program, **more), given, replace(spec, dtype=dtype, **less))


def reproduces(wrong: Wrong, switch: Switch) -> bool | None:
    """None unless the program with a mistake reproduces the kernel; False if it does so without
    it, too. Queries that the mistake leaves without keys are not compared."""
    spec, got = wrong.spec, wrong.got
    names = {e.name for e in wrong.errors if not e.off <= e.allowed}
    names = {"out"} & names or ({*got.tensors} - {"out"} if switch else {"dq"} & names)
    spec = replace(spec, grad=names != {"out"})
    given, exact = matrix.inputs(wrong.case, spec.dtype), matrix.truth(wrong.case, spec.dtype)
    wide, low = (mistaken(given, spec, dtype, switch) for dtype in ("float64", "float32"))
    differs = not switch
    for name in names:
        rows = wide.out.any(3) if name == "out" or not switch else ...
        x, want, *others = (of.tensors[name].cpu().double()[rows] for of in (got, wide, exact, low))
        finite = want.isfinite()
        # Root mean squares: where a program rounds down, a kernel may round up.
        off, effect, noise = (
            float((t - want)[finite].nan_to_num(0).square().mean().nan_to_num(0).sqrt())
            for t in (x, *others))
        allowed = max(e.allowed for e in wrong.errors if e.name == name and "mean" in e.where)
        limit = 2 * allowed + 4 * noise
        if not (finite.equal(x.isfinite()) and off <= limit):
            return None
        differs = differs or effect > 2 * limit or not finite.all()
    return differs if names else None


def failures(backend: Backend, case: Case, spec: Spec, device: str) -> Iterator[Wrong]:
    """The case and others with its features, as far as the kernel fails in them."""
    others = [replace(c, D=spec.head_dim if c.D == Case.D else c.D) for c in matrix.in_order()
              if {*case.features} <= {*c.features} and c.Tk < 300]
    for one in dict.fromkeys((case, *others[:TRIED])):
        for grad in (True, False)[not spec.grad :]:  # a backward pass may raise an error
            if backend.why_not(one.spec(spec.dtype, grad=grad), Machine.here(device)):
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
    """Lines on a failing item's mistake, and the largest score where its output is not finite."""
    if item.case is None:
        return dropout_named(backend, spec, device) if spec.dropout else []
    left: dict[tuple[str, int], str] = {}  # the variants that reproduce all
    differ: set[str] = set()
    found: list[Wrong] = []
    case = replace(item.case, D=spec.head_dim)
    for wrong in itertools.islice(failures(backend, case, spec, device), FAILING):
        answers = {at: (sentence, reproduces(wrong, switch))
                   for at, (sentence, switch) in variants(wrong.spec).items()
                   if not found or at in left}
        left = {at: text for at, (text, differs) in answers.items() if differs is not None}
        differ |= {name for (name, _), (_, differs) in answers.items() if differs}
        found.append(wrong)
        if not left:
            break
    names = {name: sentence for (name, _), sentence in left.items() if name in differ}
    bad = [text for wrong in found for text in not_finite(wrong)]
    return lines(names, f"the kernel in {', '.join(w.case.name for w in found)}") + bad[:1]


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
    return [f"{wrong.case.name}: out is not finite in {int(rows.sum())} rows; there |q . k| is up "
            f"to {most:,.5g}, a score up to {most * spec.softmax_scale:,.5g} (float16: 65,504)."]


def dropout_named(backend: Backend, spec: Spec, device: str) -> list[str]:
    """Whether the probabilities that are kept are not divided by 1 - p."""
    given, quiet = draw(spec, device, 16), replace(spec, grad=False)
    try:
        with settings_stay():
            before = weights(backend, given, replace(quiet, dropout=0.0), 0)
            after = weights(backend, given, quiet, 0)
    except (*KERNEL_ERRORS, GeneratorExit):
        return []
    kept = (after != 0) & (before != 0)
    if not kept.any() or bool(((after / before)[kept].double() - 1).abs().ge(0.02).any()):
        return []
    name = "in dropout the kept probabilities are not divided by 1 - p"
    name = name if kept.sum() < (before != 0).sum() else "dropout is ignored"
    return lines({name: DROPOUT}, "them: they are those without it")
