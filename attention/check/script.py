"""A script that repeats a failed case, or a command for a property."""

from __future__ import annotations

import os
import shlex

from .matrix import Item

PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.abspath(__file__).removesuffix(os.path.join(PACKAGE, "check", "script.py"))
SCRIPT = """\
# {what}
import sys

import torch

sys.path.insert(0, {folder!r})
from {package} import get
from {package}.check.matrix import Case, inputs
from {package}.proof import run, truth

case = {case!r}
given = inputs(case, {dtype!r}, {device!r})
tensors = {{name: t for name, t in given._asdict().items() if t is not None}}
before = {{name: t.clone() for name, t in tensors.items()}}
for name, t in tensors.items():
    print(name, tuple(t.shape), t.stride(), t.dtype)
for grad in (True, False)[not case.grad :]:
    spec = case.spec({dtype!r}, grad=grad)
    print(spec)
    got, exact = run(get({name!r}).attend, given, spec), truth(given, spec)
    for name, x in got.tensors.items():
        x, want = x.cpu().double(), exact.tensors[name].cpu()
        error = (x - want).abs().nan_to_num(torch.inf)
        at = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
        x, want = (t[tuple(at)].item() for t in (x, want))
        print(f"{{name}} at {{at}}: the kernel {{x:.9g}}, the truth {{want:.9g}}")
print("overwritten:", [name for name, t in tensors.items() if not t.equal(before[name])])"""


def script(name: str, item: Item, length: int) -> str:
    name = os.path.abspath(name) if os.path.exists(name) else name
    if not item.title:
        return SCRIPT.format(what=f"{item.name}: {'; '.join(item.why)}", folder=FOLDER,
                             package=PACKAGE, case=item.case, dtype=item.dtype,
                             device=item.device, name=name)
    go = "" if PACKAGE == "nanoattn" else f"cd {shlex.quote(FOLDER)} && "
    options = f"--test={shlex.quote(item.name)} --dtype={item.dtype} --device={item.device}"
    options += f" --length={length}" if length else ""
    return f"{go}python -m {PACKAGE} check {shlex.quote(name)} {options}"
