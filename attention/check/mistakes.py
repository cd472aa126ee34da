"""The name of a kernel's mistake.

named() runs the kernel on failing cases, and on the same inputs a plain program (program.py) with
each common mistake. A mistake is named if one variant of it reproduces the kernel's output in all
of them (the gradients, where the output is right), and the program without it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import proof
from ..caps import Backend
from ..machine.system import KERNEL_ERRORS, loses_device
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
DROPOUT = "dropout: float = 0.0  # on the attention probabilities"
LAYOUT = "Layout ``(B, T, H, D)``: q ``(B, Tq, H, D)``, k and v ``(B, Tk, Hkv, D)``"
Switch = dict[str, Any]  # arguments of program(); "read": (input, way), for read()


def variants(spec: Spec) -> Iterator[tuple[str, str, list[Switch]]]:
    """The common mistakes with a Spec: a name, the contract's sentence, and variants of each, in
    the same order for all Specs of a kind."""
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
        yield "the limit on later keys is ignored", text, [{"right": None}]
    if r != 0:
        yield "later keys are masked", RIGHT, [{"right": 0}]
    yield "the mask is aligned top-left: offset 0, not Tk - Tq", CAUSAL, [{"offset": 0}]
    yield "the mask is inverted", CAUSAL, [{"inverted": True}]
    if spec.segments:
        yield "segments are ignored", SEGMENTS, [{"segments": None}]
        yield "segments are compared by order", SEGMENTS, [{"order": -1}, {"order": 1}]
    if group > 1:
        yield "query head h reads key/value head h % Hkv", HEADS, [{"modulo": True}]
        one = [{"gradient_of": 0}, {"gradient_of": group - 1}]
        mean = [{"factor": {"k": 1 / group, "v": 1 / group}}]
        yield "dK and dV are not summed over the query heads of a group", HEADS, one + mean
    yield "the scores are not scaled", SCALE, [{"scale": 1.0}]
    yield "the scores are divided by D, or scaled twice", SCALE, [{"scale": 1 / D}, {"scale": scale**2}]
    yield "the scores are multiplied by sqrt(D)", SCALE, [{"scale": D**0.5}]
    if spec.scale is not None:
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
        yield "the sinks are scaled", SINKS, [{"sink_factor": scale}]
    stale = [{"tile": n, "stale": s} for n in (16, 32, 64, 128) for s in ("out", "sum", "both")]
    yield "sums are not rescaled to a new maximum", FORMULA, stale
    for half in (torch.float16, torch.bfloat16):
        for text, at in {"q, k and v are": "inputs", "q . k is": "products",
                         "the scores are": "scores", "the softmax is": "probs"}.items():
            yield f"{text} rounded to {str(half)[6:]}", FORMULA, [{"half": half, "rounded": at}]
    for name in ("q", "k", "v", "sinks")[: 4 if spec.sinks else 3]:
        yield f"the gradient of {name} is missing", FORMULA, [{"factor": {name: 0.0}}]
    for names in ("q", "k", "qk"):
        lacks = {"factor": dict.fromkeys(names, 1 / scale)}
        yield f"the gradient of {' and '.join(names)} is not scaled", FORMULA, [lacks]
    yield "the gradient of the softmax lacks rowsum(dO * O)", FORMULA, [{"no_rowsum": True}]
    for name in ("q", "k", "v", "dout", "segments")[: 5 if spec.segments else 4]:
        ways = [{"read": (name, way)} for way in ("dense", "innermost")]
        yield f"the strides of {name} are ignored", LAYOUT, ways


def read(t: Tensor, way: str) -> Tensor:
    """t as a kernel reads it that ignores its strides, or the innermost one."""
    stride = t.new_empty(t.shape, device="meta").stride() if way == "dense" else t.stride()
    return t.as_strided(t.shape, (*stride[:-1], 1))


def mistaken(given: Inputs, spec: Spec, switch: Switch) -> tuple[Result, Result]:
    """The program's result with a mistake, in float64 and in float32."""
    more = dict(switch)
    if "read" in more:
        name, way = more.pop("read")
        given = given._replace(**{name: read(getattr(given, name), way)})
    for name in more.keys() & {"segments", "sinks"}:
        given, spec = given._replace(**{name: more.pop(name)}), replace(spec, **{name: False})
    found = []
    for dtype in (torch.float64, torch.float32):
        tensors = (t if t is None else t.cpu() for t in given)
        wide = (t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)
        of_dtype = replace(spec, dtype=str(dtype)[6:])
        found.append(run(partial(program, **more), Inputs(*wide), of_dtype))  # type: ignore[arg-type]
    return found[0], found[1]


@dataclass
class Failure:
    """A case in which a kernel's result is wrong."""

    given: Inputs
    spec: Spec
    got: Result
    exact: Result
    names: list[str]  # compared: the output, or the gradients if that is right
    allowed: dict[tuple[str, int], float]  # of each tensor, the largest error and the mean

    @classmethod
    def of(cls, case: Case, device: str, error: Wrong) -> Failure:
        spec, got = error.spec, error.got
        given, exact = matrix.inputs(case, spec.dtype, device), matrix.truth(case, spec.dtype)
        rough = matrix.plain(case, spec.dtype, device)
        errors = proof.errors(got, rough, exact, given.q.dtype)
        wrong = {e.name for e in errors if not e.off <= e.allowed}
        names = [name for name in got.tensors if name != "out"]
        allowed = {(e.name, n % 2): e.allowed for n, e in enumerate(errors)}
        return cls(given, spec, got, exact, ["out"] if "out" in wrong else names, allowed)

    def shows(self, switch: Switch) -> bool:
        """True if the program with a mistake reproduces the kernel, and without it does not.
        Queries that the mistake leaves without keys are not compared."""
        want, rough = mistaken(self.given, self.spec, switch)
        differs = not switch  # all other queries are right
        for name in self.names:
            some = ...
            if name == "out" or (name == "dq" and not switch):
                some = want.out.any(3)
            tensors = (x.tensors[name].cpu().double()[some]
                       for x in (self.got, want, rough, self.exact))
            got, this, low, true = tensors
            finite = this.isfinite()
            if not finite.any() or not finite.equal(got.isfinite()):
                return False
            differs = differs or not finite.all()
            off, effect, noise = (x[finite].abs() for x in (got - this, true - this, low - this))
            # Where a product of this program is rounded down, the kernel's may be rounded up.
            half = switch.get("half", torch.float64)
            jump = torch.finfo(half).eps * float(this[finite].abs().max())
            for n, size in enumerate((torch.max, lambda x: x.square().mean().sqrt())):
                limit = 2 * self.allowed[name, n] + 4 * float(size(noise.nan_to_num(0)))
                limit += jump if n == 0 else 0.0
                if not float(size(off)) <= limit:
                    return False
                differs = differs or float(size(effect)) > 2 * limit
        return differs


def failures(backend: Backend, case: Case, spec: Spec, device: str) -> Iterator[Failure]:
    """The case and others with its features, as far as the kernel fails in them."""
    machine = Machine.here(device)
    others = [c for c in matrix.in_order() if {*case.features} <= {*c.features}]
    others = [replace(c, D=spec.head_dim if c.D == Case.D else c.D) for c in others]
    for one in dict.fromkeys((case, *others[:TRIED])):
        if backend.why_not(one.spec(spec.dtype, grad=spec.grad), machine):
            continue
        try:
            matrix.check(backend, one, spec.dtype, device, grad=spec.grad)
        except Wrong as e:
            yield Failure.of(one, device, e)
        except KERNEL_ERRORS as e:
            if loses_device(e):
                return


def named(backend: Backend, item: Item, spec: Spec, device: str) -> list[str]:
    """Lines about the mistake that a failing item shows: its name and the contract's sentence, if
    it is a common one, and the largest score where the output is not finite."""
    if item.case is None:
        return dropout_named(backend, spec, device) if spec.dropout else []
    found: dict[tuple[str, int], str] | None = None
    first: Failure | None = None
    count = 0
    for failure in failures(backend, replace(item.case, D=spec.head_dim), spec, device):
        first = first or failure
        count += 1
        found = {
            (name, n): sentence for name, sentence, switches in variants(failure.spec)
            for n, switch in enumerate(switches)
            if (found is None or (name, n) in found) and failure.shows(switch)
        }
        if count == FAILING or not found:
            break
    if first is None:
        return []
    lines = []
    if found:
        names = {name: sentence for (name, _), sentence in found.items()}
        what = "output" if first.names == ["out"] else "gradients"
        lines = lines_of(names, f"the kernel's {what} in {count} failing cases")
    return lines + not_finite(first)


def lines_of(names: dict[str, str], what: str) -> list[str]:
    quotes = " ".join(f'"{sentence}"' for sentence in dict.fromkeys(names.values()))
    return [
        f"The mistake: {', or '.join(names)}.",
        f"(A plain program with this mistake reproduces {what}.)",
        f"The contract, attention/spec.py: {quotes}",
    ]


def not_finite(failure: Failure) -> list[str]:
    """The largest score of the rows that are not finite."""
    given, spec, out = failure.given, failure.spec, failure.got.out.cpu()
    rows = ~out.isfinite().all(3)  # (B, Tq, H)
    if not rows.any():
        return []
    q, k = (t.detach().cpu().double() for t in (given.q, given.k))
    k = k.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2)
    product = torch.einsum("bihd,bjhd->bihj", q, k)[rows].abs().nan_to_num(0).max().item()
    most = torch.finfo(given.q.dtype).max
    where = rows.nonzero()[0].tolist()
    return [f"out is not finite in {int(rows.sum())} rows, the first at [b, i, h] = {where}. There "
            f"|q . k| is up to {product:,.5g}, a score up to {product * spec.softmax_scale:,.5g}; "
            f"{spec.dtype} ends at {most:,.5g}."]


def dropout_named(backend: Backend, spec: Spec, device: str) -> list[str]:
    """The factor of the probabilities that are kept, if it is not 1 / (1 - p)."""
    p, given = spec.dropout, draw(spec, device, 16)
    quiet = replace(spec, grad=False)
    before, after = (weights(backend, given, replace(quiet, dropout=x), 0) for x in (0.0, p))
    factor = (after / before)[(after != 0) & (before != 0)].double()
    names = {"are not divided by 1 - p": 1.0, "are multiplied by 1 - p": 1 - p,
             "are divided by p": 1 / p}
    for name, times in names.items():
        if len(factor) and bool(((factor - times).abs() < 0.02 * times).all()):
            text = f"the kept probabilities {name} in dropout"
            return lines_of({text: DROPOUT}, f"them: they are {times:.3g} times those before it")
    return []
