"""FlashAttention-2 as Stanford's course CS336 assigns it: tests of a student's autograd.Function.

get_flashattention_autograd_function_pytorch() of adapters.py, and ..._triton(), return the class.
Its apply(q, k, v, is_causal) takes q (B, Tq, D), k and v (B, Tk, D), returns (B, Tq, D) and saves
L (B, Tq), the log-sum-exp of each row's scores. Causal: query i sees key j where j <= i.

A wrong result is compared with common mistakes, put into the text of tiled.py (named.py). The
assignment itself promises float32, contiguous, and sizes that are powers of two, at least 16.

Source  github.com/stanford-cs336/assignment2-systems, tests/test_attention.py and tests/adapters.py
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import own, tiled
from ..caps import Backend, BackendUnavailable, Caps
from ..spec import Spec
from . import matrix
from .matrix import Case, Fields
from .named import Mistake, Wrong, named, same
from .oracle import require
from .properties import Item

KINDS = ("pytorch", "triton")
DTYPES = ("float32", "float64")  # float64: PyTorch only
TILES = (128, 64, 32, 16)  # sizes that an answer may have, and on which some wrong numbers depend
WHAT = "the assignment"  # in errors
LIMIT_S = 120  # for a test or an import: Python then prints where it hangs, and exits with 1
SHARE = 0.9  # of the wrong numbers: a row that sees no key has others in each answer


def case(Tq: int, Tk: int, causal: bool, D: int = 64, B: int = 2, **more: Any) -> Case:
    words = [f"{Tq} x {Tk}, D = {D}, batch {B}", *["causal"] * causal]
    words += [f"scores to {3 * more['size'] ** 2:g}"] if "size" in more else []
    words += [more["layout"]] if "layout" in more else []
    right = 0 if causal else None
    return Case(", ".join(words), Tq, Tk, H=1, Hkv=1, D=D, B=B, right=right, **more)


SIZES: list[tuple[tuple[int, int], Fields]] = [
    ((128, 128), {"B": 4}),  # the assignment's own test
    ((64, 64), {"D": 16, "B": 1}), ((64, 64), {"D": 32, "B": 3}), ((64, 64), {"D": 128}),
    ((64, 64), {"size": 10.0}),
    ((64, 128), {}), ((128, 64), {}), ((16, 16), {}),
    ((1, 1), {"D": 16}), ((17, 17), {"D": 32}), ((100, 100), {}), ((33, 129), {"D": 32}),
    ((129, 33), {"D": 32}), ((97, 97), {"size": 10.0}),
    *(((64, 64), {"layout": x}) for x in ("BHTD", "split", "q k v sliced", "dout expanded")),
]  # fmt: skip
CASES = [case(*sizes, causal, **more) for sizes, more in SIZES for causal in (False, True)]
SAMPLE = 12  # cases of --quick

# The right answer: tiled.py, called as the assignment calls it.
RIGHT = Path(tiled.__file__).read_text(encoding="utf-8") + '''

def answer(q, k, v, dout, is_causal, B):
    q, k, v, dout = (t[:, :, None] for t in (q, k, v, dout))
    offset, right = 0, 0 if is_causal else None
    spec = Spec(1, 1, q.shape[3], str(q.dtype)[6:], right=right)
    out, L = forward_tiles(q, k, v, spec, offset, B_r=B, B_c=B)
    grads = backward_tiles(dout, q, k, v, out, L, spec, offset, B_r=B, B_c=B)
    return [out[:, :, 0], L[:, 0], *(t[:, :, 0] for t in grads)]
'''
MAX = "torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))"
HIDE = "~seen[:, None], -torch.inf"
LOG = "m_i + torch.log(l_i)"
MISTAKES: list[Mistake] = [
    ("right = 0, 0 if is_causal else None", "right = 0, None", "is_causal is ignored"),
    ("right = 0, 0 if is_causal else None", "right = 0, 0",
     "The causal mask is applied though is_causal is False"),
    ("tau * (Q_i @ K_j.mT)", "(Q_i @ K_j.mT)", "Multiply the scores by 1 / sqrt(D)"),
    ("tau * (Q_i @ K_j.mT)", "tau * tau * (Q_i @ K_j.mT)",
     "The scores are divided by D, not by sqrt(D)"),
    (HIDE, "seen[:, None], -torch.inf", "The mask is inverted: hide keys j > i"),
    ("spec.right)  # (1 or B, 1, n, m)", "spec.right).mT",
     "The mask is transposed: query i sees key j where j <= i"),
    (HIDE, "~seen[:, None], 0.0", "A hidden score must be -inf (or -1e6), not 0"),
    ("offset, right = 0,", "offset, right = k.shape[1] - q.shape[1],",
     "The mask is aligned bottom-right: in this assignment query i sees key j where j <= i"),
    ("offset, right = 0,", "offset, right = -1,", "Query i sees key i too: j <= i, not j < i"),
    ("offset, right = 0,", "offset, right = 1,", "Query i sees one key too many: j <= i"),
    (MAX, "torch.zeros_like(m_i)", "exp() overflows: subtract the largest score of the row so far"),
    ("O_i = rescale * O_i", "O_i = O_i", "Rescale O by exp(m - m_new)"),
    ("l_i = rescale * l_i", "l_i = l_i", "Rescale l by exp(m - m_new)"),
    ("rescale = torch.exp(m_i - m_new)", "rescale = torch.ones_like(m_i)",
     "Rescale l and O by exp(m - m_new) when the maximum rises"),
    ("torch.exp(m_i - m_new)", "torch.exp(m_new - m_i.clamp(min=-50))",
     "The factor is exp(m - m_new), not exp(m_new - m)"),
    ("= O_i / l_i", "= O_i", "Divide O by l after the last tile"),
    (MAX, "torch.maximum(m_i, S_ij.amax(dim=(-2, -1), keepdim=True))",
     "m is a maximum for each row, not one for the tile"),
    (MAX, "S_ij.amax(dim=-1, keepdim=True)", "m_new is the maximum of m and of the tile"),
    (LOG, "torch.log(l_i)", "L is m + log l: m is missing"),
    (LOG, "m_i", "L is m + log l: log l is missing"),
    (LOG, "l_i", "L is m + log l, not l"),
    (LOG, "m_i", "L is m + log l, not m"),
    (LOG, "(m_i + torch.log(l_i)) / math.log(2)", "L is to base 2: use the natural logarithm"),
    ("dP_ij - delta[..., I, :]", "dP_ij", "Subtract delta, the row sums of dO * O, from dP"),
    ("delta[..., I, :])", "(P_ij * dP_ij).sum(dim=-1, keepdim=True))",
     "delta is a sum over all keys, not over a tile: the row sums of dO * O"),
    ("O.to(acc)).sum(dim=-1", "O.to(acc)).mean(dim=-1", "delta is the sum of dO * O, not the mean"),
    ("(dO.to(acc) * O.to(acc))", "(O.to(acc) * O.to(acc))", "delta is the row sums of dO * O"),
    ("P_ij * (dP_ij - delta", "(dP_ij - delta", "Multiply dP - delta by P"),
    ("dQ[..., I, :] += ", "dQ[..., I, :] = ", "dQ is overwritten: add the parts of all key tiles"),
    ("dK_j += ", "dK_j = ", "dK is overwritten: add the parts of all query tiles"),
    ("dV_j += ", "dV_j = ", "dV is overwritten: add the parts of all query tiles"),
    ("tau * (dS_ij @ K_j)", "(dS_ij @ K_j)", "Multiply dQ by 1 / sqrt(D)"),
    ("tau * (dS_ij.mT @ Q_i)", "(dS_ij.mT @ Q_i)", "Multiply dK by 1 / sqrt(D)"),
    ("(dS_ij.mT @ Q_i)", "(dS_ij @ Q_i)", "dK is dS^T Q: dS is not transposed"),
    ("(dropped.mT @ dO_i)", "(dropped @ dO_i)", "dV is P^T dO: P is not transposed"),
    ("P_ij = torch.exp(masked(S_ij, I, J, offset, spec, segments) - L[..., I, :])",
     "P_ij = torch.exp(S_ij - L[..., I, :])", "The backward pass has no causal mask"),
    ("P_ij = torch.exp(masked(S_ij, I, J, offset, spec, segments) - L[..., I, :])",
     "P_ij = torch.softmax(masked(S_ij, I, J, offset, spec, segments), dim=-1)",
     "P is exp(S - L): softmax of a tile leaves out the other keys"),
]  # fmt: skip


class Student(Backend):
    """A Backend whose attend() takes (B, T, D)."""

    def __post_init__(self) -> None:
        """Leave attend() as it is: a Backend's checks its arguments, (B, T, H, D)."""


def kinds(path: str) -> tuple[list[str], list[str]]:
    """The names that get() takes, "adapters.py::pytorch", and why others cannot be checked.

    Raises:
        BackendUnavailable: the file cannot be imported, or nothing can be checked.
    """
    found, why = [], []
    for kind in KINDS:
        try:
            get(f"{path}::{kind}")
            found.append(f"{path}::{kind}")
        except BackendUnavailable as e:
            unwritten = isinstance(e.__cause__, NotImplementedError)  # the assignment's own file
            if not unwritten and not (found and kind == "triton" and find_spec("triton") is None):
                raise
            why.append(f"{kind} is not checked: {'it is not written' if unwritten else e}")
    if not found:
        raise BackendUnavailable("; ".join(why))
    return found, why


def get(name: str) -> Backend:
    """The Function of "adapters.py::pytorch" or "...::triton" as a Backend.

    Raises:
        BackendUnavailable: the file, the function or a package is missing, or raises.
    """
    path, _, kind = name.rpartition("::")
    interpreter = kind == "triton" and not torch.cuda.is_available()
    if kind == "triton" and find_spec("triton") is None:
        raise own.invalid(path, "package 'triton' is not installed", WHAT)
    if not torch.cuda.is_available() and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # before the answer imports triton
    folder = Path(path).resolve().parent
    sys.path += [str(p) for p in (folder.parent, folder) if str(p) not in sys.path]
    with limited():
        module = own.execute(os.path.abspath(path), WHAT)
    getter = f"get_flashattention_autograd_function_{kind}"
    if not hasattr(module, getter):
        raise own.invalid(path, f"it does not define {getter}()", WHAT)
    with own.explained(path, WHAT):
        function = getattr(module, getter)()
    if not callable(getattr(function, "apply", None)):
        why = f"{getter}() must return a torch.autograd.Function, got {function!r}"
        raise own.invalid(path, why, WHAT)
    devices = ("cuda", "cpu") if kind == "pytorch" else ("cpu",) if interpreter else ("cuda",)
    dtypes = DTYPES if kind == "pytorch" else DTYPES[:1]
    title = f"{getattr(function, '__name__', function)}; odd lengths, strides and float64 are "
    caps = Caps(devices, dtypes, right=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        out: Tensor = function.apply(q, k, v, spec.right == 0)
        return out

    return Student(kind, f"{title}beyond the assignment", attend, (caps,), fallback=None)


@contextmanager
def limited() -> Iterator[None]:
    """Within this context the process ends after LIMIT_S."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def items(dtypes: Iterable[str], quick: bool = False, length: int = 0) -> Iterator[Item]:
    """Yield all tests, simple ones first."""
    for dtype in dtypes:
        for c in CASES[: SAMPLE if quick else None]:
            rows = {
                "causal": c.right == 0, "not causal": c.right is None, "lengths": c.Tq != c.Tk,
                "odd lengths": c.Tq % 16 or c.Tk % 16, "large scores": c.size > 1,
                "strides": c.layout != "contiguous",
            }  # fmt: skip
            features = tuple(name for name, has in rows.items() if has)
            yield Item(c.name, features, c.spec(dtype), partial(right, c), case=c)


def right(case: Case, backend: Backend, spec: Spec, device: str) -> None:
    """Raise Wrong or AssertionError, with the hint of a mistake that gives the same numbers."""
    tf32 = backend.name == "triton" and device != "cpu"  # tl.dot rounds float32 to 10 bits
    given = [t[:, :, 0] for t in matrix.draw(case, spec.dtype, device)]
    try:
        with limited():
            got = run(backend, spec, given)
        compare(got, case, spec.dtype, tf32)
    except Wrong as e:
        hint = "" if tf32 else mistake(e, case, spec.dtype)
        said = str(e).removesuffix(f", {case.name}")
        raise Wrong(f"{said}. {hint}" if hint else said) from None


def run(backend: Backend, spec: Spec, given: list[Tensor]) -> list[Tensor]:
    """out, L and the gradients of q, k and v."""
    before = [t.clone() for t in given]
    *inputs, dout = given
    leaves = [t.detach().requires_grad_() for t in inputs]
    eager = getattr(torch.compiler, "set_stance", nullcontext)  # each shape would be compiled
    with eager("force_eager"):
        out = backend.attend(*leaves, spec)
        require(isinstance(out, Tensor), f"apply() must return a tensor, got {type(out).__name__}")
        require(out.grad_fn is not None, "out has no grad_fn: is it made by Function.apply()?")
        saved = [t for t in getattr(out.grad_fn, "saved_tensors", ()) if t.shape == out.shape[:2]]
        require(len(saved) == 1, "ctx.save_for_backward() must save one tensor of shape (B, Tq), "
                f"the log-sum-exp L; found {len(saved)}")  # fmt: skip
        L = saved[0].detach().clone()
        grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    for name, g in zip(("q", "k", "v"), grads, strict=True):
        require(g is not None, f"backward() returned None as the gradient of {name}")
    for name, t, was in zip(("q", "k", "v", "dout"), given, before, strict=True):
        require(t.equal(was), f"it wrote to its input {name}, or returned it")
    return [out.detach(), L, *grads]


def compare(got: list[Tensor], case: Case, dtype: str, tf32: bool = False) -> None:
    largest, *truth = want(case, dtype)
    eps = 1e-3 if tf32 else torch.finfo(getattr(torch, dtype)).eps
    for what, g, w in zip(("out", "L", "dQ", "dK", "dV"), got, truth, strict=True):
        room = 10 * eps * max(10.0, float(largest)) * max(1.0, float(w.abs().max()))
        same(g.cpu(), w.to(getattr(torch, dtype)), what, case.name, room)


@lru_cache(maxsize=2)
def want(case: Case, dtype: str) -> list[Tensor]:
    """The largest score, out, L and the gradients of q, k and v in float64, from the formula."""
    *inputs, dout = (t[:, :, 0].double() for t in matrix.draw(case, dtype))
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    S = q @ k.mT / math.sqrt(case.D)
    if case.right == 0:
        hidden = torch.arange(case.Tk) > torch.arange(case.Tq)[:, None]
        S = S.masked_fill(hidden, -torch.inf)
    out, L = S.softmax(dim=-1) @ v, S.logsumexp(dim=-1)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [S.detach()[S.isfinite()].abs().max(), out.detach(), L.detach(), *grads]


def mistake(error: Wrong, case: Case, dtype: str) -> str:
    """The hint of the mistake that gives these wrong numbers with some size of tiles, or ""."""
    if dtype == "float64" and error.want is not None and error.value is not None:
        scale = 1e-3 * max(1.0, float(error.want.abs().max()))
        if float((error.value - error.want).abs().max()) < scale:
            return "It is exact to float32 only: create tensors with dtype=q.dtype"
    given = [t[:, :, 0] for t in matrix.draw(case, dtype)]
    start = "import math\n"  # in place of the docstring and the future import
    for B in (b for b in TILES if b == TILES[-1] or b < 2 * max(case.Tq, case.Tk)):

        def fails(text: str, B: int = B) -> BaseException | None:
            module = ModuleType("answer")
            module.__package__ = tiled.__package__
            try:
                exec(start + text.partition("annotations\n")[2], module.__dict__)
                compare(module.answer(*given, case.right == 0, B), case, dtype)
            except Exception as e:
                return e
            return None

        if hint := named(error, RIGHT, MISTAKES, fails, SHARE):
            return hint
    return ""
