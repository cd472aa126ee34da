"""What repeats a failure: a script for a case, by public names alone; a command for a property."""

from __future__ import annotations

import os
import shlex

from .matrix import Item

PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.abspath(__file__).removesuffix(os.path.join(PACKAGE, "check", "script.py"))
IMPORTS = "import nanoattn" if PACKAGE == "nanoattn" else (
    f"import sys\nsys.path.insert(0, {FOLDER!r})\nimport {PACKAGE} as nanoattn")
KINDS = {  # of the values
    "noise": "",
    "equal": "k = k[:, :1].expand_as(k)",
    "dominant": "q = q + k[:, {Tk} // 2].mul_(10).repeat_interleave({H} // {Hkv}, dim=1)[:, None]",
    "negative": "q, k = torch.full_like(q, -12000), torch.ones_like(k)",
}
SCRIPT = """\
# {what}
from dataclasses import replace
{IMPORTS}
import torch

values = torch.Generator().manual_seed({case.seed})
spec = nanoattn.{spec!r}
places = {places}  # of each tensor: strides and offset in memory


def draw(T, H, size={case.size!r}):
    x = torch.randn({case.B}, T, H, {case.D}, generator=values, dtype=torch.float64) * size
    return x.to(torch.{spec.dtype}).to({device!r})


def laid_out(t, stride, offset):  # in memory that holds other values elsewhere
    size = [n if step else 1 for n, step in zip(t.shape, stride)]
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    memory = t.new_full((last + offset + 2,), torch.nan if t.is_floating_point() else 7)
    memory.as_strided(size, stride, offset).copy_(t[tuple(slice(n) for n in size)])
    return memory.as_strided(t.shape, stride, offset)


q, k, v = draw({T}, {case.H}), draw({case.Tk}, {case.Hkv}), draw({case.Tk}, {case.Hkv})
{kind}
inputs = {{"q": q[:, -{case.Tq}:], "k": k, "v": v, "dout": draw({case.Tq}, {case.H}, 1)}}
{options}
inputs = {{name: laid_out(inputs[name].to({device!r}), *places[name]) for name in places}}
wrt = [name for name in ("q", "k", "v", "sinks") if name in inputs]
for name, t in inputs.items():
    print(name, tuple(t.shape), t.dtype)


def run(kernel, device, grad, dtype=None):
    x = {{n: t.detach().to(device, dtype if n in wrt else t.dtype) for n, t in inputs.items()}}
    dout, leaves = x.pop("dout").to(x["q"].dtype), [x[n].requires_grad_() for n in wrt if grad]
    of_dtype = replace(spec, dtype=str(x["q"].dtype)[6:], grad=grad)
    out = nanoattn.get(kernel).attend(**x, spec=of_dtype)
    return [out, *(torch.autograd.grad(out, leaves, dout) if leaves else ())]


before = {{name: t.clone() for name, t in inputs.items()}}
for grad in (True, False)[not spec.grad:]:
    print("with gradients" if grad else "without gradients")
    kernel = run({name!r}, {device!r}, grad)
    truth = run("manual", "cpu", grad, torch.float64)  # by the formula
    for name, got, want in zip(["out", *(f"d{{n}}" for n in wrt)], kernel, truth):
        error = (got.detach().cpu().double() - want).abs().nan_to_num(torch.inf)
        at = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
        x, y = (t[tuple(at)].item() for t in (got, want))
        print(f"{{name}} at {{at}}: the kernel {{x:.9g}}, the truth {{y:.9g}}")
print("overwritten:", [name for name, t in inputs.items() if (t != before[name]).any()])"""


def script(name: str, item: Item, length: int) -> str:
    """Code or a command that repeats the failure of an item that ran, of the backend that `name`
    names."""
    name = os.path.abspath(name) if os.path.exists(name) else name
    if item.title:
        go = "" if PACKAGE == "nanoattn" else f"cd {shlex.quote(FOLDER)} && "
        options = f"--dtype={item.dtype} --device={item.device}"
        options += f" --length={length}" if length else ""
        test = f"--test={shlex.quote(item.name)}"
        return f"{go}python -m {PACKAGE} check {shlex.quote(name)} {test} {options}"
    case, given = item.case, item.given
    options = "\n".join(f'inputs["{option}"] = torch.tensor({t.tolist()}, dtype={t.dtype})'
                        for option, t in given.options.items())
    places = {field: (t.stride(), t.storage_offset())
              for field, t in given._asdict().items() if t is not None}
    return SCRIPT.format(
        what=f"{item.name}: {'; '.join(item.why)}", IMPORTS=IMPORTS, name=name, case=case,
        spec=item.spec, device=item.device, places=places, options=options, T=max(case.Tq, case.Tk),
        kind=KINDS[case.kind].format_map(vars(case)))
