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
from ..proof import Deviation, Inputs, Result, run
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
    inputs = [("q",), ("k",), ("v",), ("q", "k", "v"), ("dout",), *[("segments",)] * spec.segments]
    ways = [{"read": (names, way)} for names in inputs for way in ("dense", "innermost", "copied")]
    yield "the strides of an input are ignored", LAYOUT, ways


def read(t: Tensor, way: str) -> Tensor:
    """t as a kernel reads it that ignores its strides: all, the innermost one, or those of a copy
    (B, H, T, D)."""
    if way == "copied":
        return t if t.is_contiguous() or t.dim() != 4 else t.transpose(1, 2).reshape(t.shape)
    stride = t.new_empty(t.shape, device="meta").stride() if way == "dense" else t.stride()
    return t.as_strided(t.shape, (*stride[:-1], 1))


def mistaken(given: Inputs, spec: Spec, switch: Switch) -> tuple[Result, Result]:
    """The program's result with a mistake, in float64 and in float32."""
    more = dict(switch)
    if "read" in more:
        names, way = more.pop("read")
        given = given._replace(**{name: read(getattr(given, name), way) for name in names})
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
    errors: dict[str, list[Deviation]]  # of each tensor: the largest, and the mean

    @classmethod
    def of(cls, case: Case, device: str, error: Wrong) -> Failure:
        spec, got = error.spec, error.got
        given, exact = matrix.inputs(case, spec.dtype, device), matrix.truth(case, spec.dtype)
        found = proof.errors(got, matrix.plain(case, spec.dtype, device), exact, given.q.dtype)
        errors = {name: [e for e in found if e.name == name] for name in got.tensors}
        return cls(given, spec, got, exact, errors)

    def wrong(self, name: str) -> bool:
        return any(not e.off <= e.allowed for e in self.errors[name])

    def compare(self, switch: Switch) -> tuple[bool, bool]:
        """If the program with a mistake reproduces the kernel, and if that is not true without it.

        Queries that the mistake leaves without keys are not compared, nor other gradients if these
        are the mistake.
        """
        names = [name for name in self.got.tensors if name != "out"]
        names = ["out"] if self.wrong("out") else names if switch else ["dq"]
        if not switch and not self.wrong(names[0]):
            return False, False
        try:
            want, rough = mistaken(self.given, self.spec, switch)
        except RuntimeError:  # read() beyond the memory
            return False, False
        differs = not switch
        for name in names:
            rows = want.out.any(3) if name == "out" or not switch else ...
            tensors = (x.tensors[name].cpu().double()[rows]
                       for x in (self.got, want, rough, self.exact))
            got, this, low, true = tensors
            finite = this.isfinite() & got.isfinite()
            # Gradients of NaN depend on what is multiplied by 0.
            same = finite.equal(this.isfinite()) or (name != "out" and not this.isfinite().all())
            if not same or finite.all() != got.isfinite().all():
                return False, False
            differs = differs or not finite.all()
            if not finite.any():
                continue
            off, effect, noise = (x[finite].abs() for x in (got - this, true - this, low - this))
            # Where a product of this program is rounded down, the kernel's may be rounded up.
            half = torch.finfo(switch.get("half", torch.float64))
            jumps = half.eps * float(this[finite].abs().max()), 0.0
            sizes = torch.max, lambda x: x.square().mean().sqrt()
            for error, size, jump in zip(self.errors[name], sizes, jumps):
                limit = 2 * error.allowed + 4 * float(size(noise.nan_to_num(0))) + jump
                if not float(size(off)) <= limit:
                    return False, False
                differs = differs or float(size(effect)) > 2 * limit
        return True, differs


def failures(backend: Backend, case: Case, spec: Spec, device: str) -> Iterator[Failure]:
    """The case and others with its features, as far as the kernel fails in them."""
    machine = Machine.here(device)
    others = [c for c in matrix.in_order() if {*case.features} <= {*c.features} and c.Tk < 300]
    others = [replace(c, D=spec.head_dim if c.D == Case.D else c.D) for c in others]
    for one in dict.fromkeys((case, *others[:TRIED])):
        for grad in (True, False)[not spec.grad :]:  # a backward pass may raise an error
            if backend.why_not(one.spec(spec.dtype, grad=grad), machine):
                continue
            try:
                matrix.check(backend, one, spec.dtype, device, grad=grad)
            except Wrong as e:
                yield Failure.of(one, device, e)
                break
            except KERNEL_ERRORS as e:
                if loses_device(e):
                    return


def named(backend: Backend, item: Item, spec: Spec, device: str) -> list[str]:
    """Lines about the mistake that a failing item shows: its name and the contract's sentence, if
    it is a common one, and the largest score where the output is not finite."""
    if item.case is None:
        return dropout_named(backend, spec, device) if spec.dropout else []
    left: dict[tuple[str, int], str] | None = None  # variants that reproduce all, by their name
    differ: set[tuple[str, int]] = set()
    found: list[Failure] = []
    for failure in failures(backend, replace(item.case, D=spec.head_dim), spec, device):
        found.append(failure)
        before, left = left, {}
        for name, sentence, switches in variants(failure.spec):
            for n, switch in enumerate(switches):
                if before is None or (name, n) in before:
                    same, differs = failure.compare(switch)
                    if same:
                        left[name, n] = sentence
                        differ |= {(name, n)} if differs else set()
        if len(found) == FAILING or not left:
            break
    names = {key[0]: sentence for key, sentence in (left or {}).items() if key in differ}
    lines = []
    if names:
        what = "output" if found[0].wrong("out") else "gradients"
        many = f"{len(found)} failing cases" if len(found) > 1 else "one failing case"
        lines = lines_of(names, f"the kernel's {what} in {many}")
    return lines + (not_finite(found[0]) if found else [])


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
    names = {"dropout is ignored": 1.0}
    if not after[before != 0].all():
        names = {"in dropout the kept probabilities are not divided by 1 - p": 1.0,
                 "in dropout the kept probabilities are divided by p": 1 / p,
                 "in dropout the kept probabilities are multiplied by 1 - p": 1 - p}
    for name, times in names.items():
        close = bool(((factor - times).abs() < 0.02 * times).all())
        if close and times != 1 / (1 - p) and len(factor):
            return lines_of({name: DROPOUT}, f"them: they are {times:.3g} times those without it")
    return []
