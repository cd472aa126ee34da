"""What repeats a failure: a script for a case, by public names alone; a command for a property."""

from __future__ import annotations

import os
import shlex
from itertools import groupby

import torch
from torch import Tensor

from ..spec import Spec
from . import matrix
from .matrix import Case

PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.abspath(__file__).removesuffix(os.path.join(PACKAGE, "check", "script.py"))
HEAD = """\
from dataclasses import replace
{imports}
import torch

values = torch.Generator().manual_seed({seed})


def draw(T, H, size={case.size!r}):
    x = torch.randn({case.B}, T, H, {case.D}, generator=values, dtype=torch.float64) * size
    return x.to(torch.{dtype}).to({device!r})


"""
LAID_OUT = """\
def laid_out(t, stride, offset):  # in memory that holds other values elsewhere
    size = [n if step else 1 for n, step in zip(t.shape, stride)]
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    memory = t.new_full((last + offset + 2,), torch.nan if t.is_floating_point() else 7)
    memory.as_strided(size, stride, offset).copy_(t[tuple(slice(n) for n in size)])
    return memory.as_strided(t.shape, stride, offset)


"""
RUN = """\
inputs = {{**tensors, "dout": dout, **options}}
for name, t in inputs.items():
    print(name, tuple(t.shape), t.dtype)


def run(kernel, device, dtype=None):
    x = {{n: t.detach().to(device, dtype).requires_grad_(spec.grad) for n, t in tensors.items()}}
    more = {{n: t.to(device) for n, t in options.items()}}
    of_dtype = replace(spec, dtype=str(x["q"].dtype)[6:])
    out = nanoattn.get(kernel).attend(**x, spec=of_dtype, **more)
    leaves = [*x.values()] if spec.grad else []
    return [out, *(torch.autograd.grad(out, leaves, dout.to(device, dtype)) if leaves else ())]


before = {{name: t.clone() for name, t in inputs.items()}}
kernel, truth = run({name!r}, {device!r}), run("manual", "cpu", torch.float64)  # by the formula
print("overwritten:", [name for name, t in inputs.items() if (t != before[name]).any()])
for name, got, want in zip(["out", *(f"d{{n}}" for n in tensors)], kernel, truth):
    error = (got.detach().cpu().double() - want).abs().nan_to_num(torch.inf)
    at = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
    x, y = (t[tuple(at)].item() for t in (got, want))
    print(f"{{name}} at {{at}}: the kernel {{x:.9g}}, the truth {{y:.9g}}")"""


def literal(t: Tensor) -> str:
    """The values in Python, equal ones in a row as [x] * n."""
    if t.dim() > 1:
        return f"[{', '.join(map(literal, t))}]"
    return " + ".join(f"[{x!r}] * {len([*same])}" for x, same in groupby(t.tolist()))


def of_case(name: str, case: Case, spec: Spec, device: str) -> str:
    given, T = matrix.inputs(case, spec.dtype, device), max(case.Tq, case.Tk)
    of_keys = f"draw({case.Tk}, {case.Hkv})"
    lines = [f"q, k, v = draw({T}, {case.H}), {of_keys}, {of_keys}"]
    if case.kind == "equal":
        lines += ["k = k[:, :1].expand_as(k).contiguous()"]
    elif case.kind == "dominant":
        lines += [f"largest = k[:, {case.Tk // 2}].mul_(10)"]
        lines += [f"q = q + largest.repeat_interleave({case.H // case.Hkv}, dim=1)[:, None]"]
    lines += [f"q, dout = q[:, -{case.Tq}:], draw({case.Tq}, {case.H}, 1)"]
    for option, t in given.options.items():
        lines += [f"{option} = torch.tensor({literal(t)}, dtype={t.dtype}, device={device!r})"]
    laid_out = ""
    for field, t in given._asdict().items():
        usual = None if t is None else torch.empty(t.shape)
        if field == "q":
            usual = torch.empty(case.B, T, case.H, case.D)[:, -case.Tq :]
        if usual is not None and usual.stride() != t.stride():
            laid_out = LAID_OUT
            lines += [f"{field} = laid_out({field}, {t.stride()}, {t.storage_offset()})"]
    leaves = [field for field in ("q", "k", "v", "sinks") if getattr(given, field) is not None]
    others = [option for option in given.options if option != "sinks"]
    for what, names in (("tensors", leaves), ("options", others)):
        lines += [f"{what} = {{{', '.join(f'{n!r}: {n}' for n in names)}}}"]
    lines += [f"spec = nanoattn.{spec!r}"]
    imports = "import nanoattn" if PACKAGE == "nanoattn" else (
        f"import sys\nsys.path.insert(0, {FOLDER!r})\nimport {PACKAGE} as nanoattn")
    head = HEAD.format(imports=imports, seed=case.seed, case=case, dtype=spec.dtype, device=device)
    return head + laid_out + "\n".join([*lines, RUN.format(name=name, device=device)])


def of_property(name: str, test: str, dtype: str, device: str, length: int) -> str:
    go = "" if PACKAGE == "nanoattn" else f"cd {shlex.quote(FOLDER)} && "
    options = f"--dtype={dtype} --device={device}{f' --length={length}' * bool(length)}"
    quoted = f"{shlex.quote(name)} --test={shlex.quote(test)}"
    return f"{go}python -m {PACKAGE} check {quoted} {options}"
