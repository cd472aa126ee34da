"""python -m attention check my_kernel.py: run every correctness test on one backend.

On each device here and in each declared dtype. Prints a script that reproduces the first failure.
Exit code: 1 if a test failed or a declared capability was not tested, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..caps import LACKS, Backend, Caps, Refusal
from ..machine.system import KERNEL_ERRORS, devices, first_line, loses_device
from ..machine.timing import aligned
from ..names import HUB, RULES, get
from ..spec import DTYPES, Machine, Spec
from . import matrix
from .matrix import Case, Item
from .mistakes import named
from .properties import properties

VERDICTS = {"right": "passed", "wrong": "failed", "refused": "refused"}
ORDER = "float32", "bfloat16", "float16", "float64"  # --quick runs most tests in the first
QUICK_S = 120  # for --quick, a device


def items(dtypes: Iterable[str], quick: bool = False, length: int = 0,
          caps: Sequence[Caps] = ()) -> Iterator[Item]:
    n = len(matrix.SAMPLE)
    parts = [sorted(part, key=lambda case: len({*case.features} - {"causal"}))
             for part in (matrix.CASES[:n], matrix.CASES[n:])]
    for dtype in dtypes:
        for case in (*parts[0], *([] if quick else parts[1])):
            yield Item(case, dtype, matrix.accuracy, case.features)
        yield from properties(dtype, length, caps, quick)


def fitted(item: Item, backend: Backend, machine: Machine) -> tuple[Spec, Sequence[Refusal]]:
    """The Spec at the nearest head_dim, perhaps without gradients; or the reasons against it."""
    specs = [item.spec]
    for row in backend.caps if item.title or item.case.D == Case.D else ():
        D = -(-item.spec.head_dim // row.head_dim_multiple) * row.head_dim_multiple
        specs.append(replace(item.spec, head_dim=min(D, row.head_dim_max or D)))
    specs += [replace(spec, grad=False) for spec in specs if not item.title]
    tried = [(spec, backend.why_not(spec, machine)) for spec in specs]
    return next((pair for pair in tried if not pair[1]), tried[0])


def judge(backend: Backend, item: Item, machine: Machine, device: str) -> Item:
    spec, why = fitted(item, backend, replace(machine, deterministic=item.deterministic))
    case = replace(item.case, D=spec.head_dim, grad=spec.grad)
    item = replace(item, case=case, backend=backend, device=device)
    if why:
        return replace(item, verdict="refused", why=tuple(why))
    try:
        with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
            item.test(item)
    except AssertionError as e:
        return replace(item, verdict="wrong", why=(str(e),))
    except KERNEL_ERRORS as e:
        text = f"{type(e).__name__}: {first_line(e)}"
        return replace(item, verdict="wrong", why=(text,), lost=loses_device(e))
    return replace(item, verdict="right")


def untested(caps: Iterable[Caps], ran: Iterable[Item], machine: Machine,
             dtypes: Sequence[str]) -> list[str]:
    declared: dict[str, None] = {}
    elsewhere = {"device", "torch", "interpreted", "packages", "capability"}
    for row in caps:
        refusals = row.why_not(Spec(1, 1, 64, row.dtypes[0]), machine)
        here = [dtype for dtype in row.dtypes if dtype in dtypes]
        if here and not elsewhere & {refusal.kind for refusal in refusals}:
            options = [name for name in LACKS if getattr(row, name)]
            options += ["deterministic"] * (row.deterministic and row.grad)
            options += [f"cache '{cache}'" for cache in row.caches]
            options += [f"head_dim {row.head_dim_max}"] * bool(row.head_dim_max)
            declared |= dict.fromkeys([*here, *options])
    for item in ran:
        spec = item.spec
        used = {name for name in LACKS if getattr(spec, name)}
        used |= {spec.dtype, f"cache '{spec.cache}'", f"head_dim {spec.head_dim}",
                 "right" * (spec.right is None), "deterministic" * item.deterministic}
        declared = {name: None for name in declared if name not in used}
    return [*declared]


@dataclass
class Report:
    """Results; --json prints them as a dict."""

    backend: str
    title: str
    machine: dict[str, str]  # device -> its name
    torch: str = torch.__version__
    # by "total", "float32, cpu", "window", ...: tests "passed", "failed", "refused"
    features: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: Counter[Refusal] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    left_out: int = 0  # tests
    script: str = ""
    mistake: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, item: Item) -> None:
        rows = [*item.features, f"{item.dtype}, {item.device}", "total"]
        rows += ["gradients"] * (item.verdict == "right" and not item.title and item.spec.grad)
        for row in rows:
            counts = self.features.setdefault(row, dict.fromkeys(VERDICTS.values(), 0))
            counts[VERDICTS[item.verdict]] += 1
        self.refusals.update(why for why in item.why if isinstance(why, Refusal))
        if item.verdict == "wrong":
            self.failures.append({"what": item.name, "dtype": item.dtype, "device": item.device,
                                  "why": "; ".join(item.why)})

    @property
    def code(self) -> int:
        passed = self.features["total"]["passed"]
        return int(bool(self.failures or self.untested or not passed))


def check(name: str, devices: Sequence[str], dtypes: Sequence[str] = DTYPES, *, quick: bool = False,
          first: bool = False, length: int = 0, test: str = "") -> Report:
    """Test a backend. Raises ValueError: unknown backend or test, or no backend in the file."""
    if name in RULES:
        raise ValueError(f"{name} is a rule: name one kernel, or a file")
    backend, began = get(name), time.monotonic()
    if backend.mods is not None or name.startswith(HUB):
        raise ValueError(f"{name}: check takes no mask of one's own and no kernel of the hub; "
                         f"python -m attention {name} proves it")
    here = {device: Machine.here(device) for device in devices}
    dtypes = sorted(dtypes, key=ORDER.index)
    every, some = ([*items(dtypes, few, length, backend.caps)] for few in (False, quick))
    if quick:  # numbers first: properties take longer
        some.sort(key=lambda item: bool(item.title))
    todo = [(device, item) for device in devices for item in some if test in ("", item.name)]
    if not todo:
        raise ValueError(f"unknown test {test!r}")
    report = Report(backend.name, backend.title, {d: here[d].name for d in devices})
    ran: list[Item] = []
    cut = bool(test)
    for n, (device, item) in enumerate(todo):
        known = any((device, item.name) == (other.device, other.name) for other in ran)
        if quick and known and item.name not in matrix.EACH_DTYPE:
            continue
        if quick and time.monotonic() - began > QUICK_S * (1 + devices.index(device)):
            cut = True
            continue
        progress(n, len(todo), f"{item.name}, {item.dtype}, {device}")
        item = judge(backend, item, here[device], device)
        report.add(item)
        if item.verdict == "refused":
            continue
        ran.append(item)
        if report.failures and not report.script:
            report.script = script(name, item, length)
            report.mistake = [] if item.lost else named(item)
        if item.lost or (first and report.failures):  # lost: later tests would fail too
            cut = True
            break
    if not cut:
        report.untested = [
            f"{capability} on {device}" for device in devices
            for capability in untested(backend.caps, [i for i in ran if i.device == device],
                                       here[device], dtypes)]
    progress(len(todo), len(todo), "done")
    report.left_out = len(every) * len(devices) - sum(report.features["total"].values())
    report.seconds = time.monotonic() - began
    return report


PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.abspath(__file__).removesuffix(os.path.join(PACKAGE, "check", "command.py"))
SCRIPT = """\
# {what}
import sys

sys.path.insert(0, {folder!r})
from {package} import get
from {package}.check.matrix import Case, show

show(get({name!r}), {case!r}, {dtype!r}, {device!r})"""


def script(name: str, item: Item, length: int) -> str:
    name = os.path.abspath(name) if os.path.exists(name) else name
    if not item.title:
        return SCRIPT.format(what=f"{item.name}: {'; '.join(item.why)}", folder=FOLDER,
                             package=PACKAGE, case=item.case, dtype=item.dtype,
                             device=item.device, name=name)
    go = "" if PACKAGE == "nanoattn" else f"cd {shlex.quote(FOLDER)} && "
    options = f"--test={shlex.quote(item.name)} --dtype={item.dtype} --device={item.device}"
    options += f" --length={length}" * bool(length)
    return f"{go}python -m {PACKAGE} check {shlex.quote(name)} {options}"


def text(report: Report) -> str:
    on = "; ".join(f"{device}: {name}" for device, name in report.machine.items())
    lines = [f"{report.backend} ({report.title})", f"{on}; torch {report.torch}", ""]
    rows = sorted(report.features, key=lambda row: (row == "total", ", " in row))
    cells = [[row, *(str(n or "-") for n in report.features[row].values())] for row in rows]
    lines += [*aligned([["", *VERDICTS.values()], *cells], ">"), ""]
    refused: dict[str, list[Refusal]] = {}
    for why in report.refusals:
        refused.setdefault(why.kind, []).append(why)
    lines += ["Refused, as its Caps declare:"] * bool(refused)
    for reasons in refused.values():
        also = f", and {len(reasons) - 1} alike" if len(reasons) > 1 else ""
        lines += [f"  {sum(report.refusals[why] for why in reasons):>4}  {reasons[0]}{also}"]
    lines += [""] * bool(refused)
    lines += [f"declared, not tested: {name}" for name in report.untested]
    failures, total = report.failures, report.features["total"]
    ran, left_out = total["passed"] + total["failed"], report.left_out
    if left_out:
        lines += [f"Left out by --quick, --test or --first: {left_out:,} of "
                  f"{left_out + sum(total.values()):,} tests."]
    if not ran:
        lines += ["It refused every test."]
    elif failures:
        lines += [f"{len(failures)} of {ran} failed:"]
        lines += [f"  {f['what']}, {f['dtype']}, {f['device']}: {f['why']}" for f in failures[:10]]
        lines += [f"  and {len(failures) - 10} more (--json lists all)"] * (len(failures) > 10)
        lines += ["", *report.mistake, "To repeat the first failure:", "", report.script]
    else:
        right = f"A sample of {ran} cases passed." if left_out else (
            "The rest is right." if report.untested else "Everything it declares is right.")
        lines += [f"{right} {report.seconds:.0f} s."]
    return "\n".join(lines)


def progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{of} {what:.60}", end="", file=sys.stderr, flush=True)


def read(argv: Sequence[str]) -> dict[str, Any]:
    here = devices()
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE} check", description=(__doc__ or "").partition("\n\n")[2])
    add = parser.add_argument
    add("name", metavar="backend", help="a file that defines BACKEND, or a backend's name")
    add("--device", dest="devices", choices=here, help="default: all that are here")
    add("--dtype", dest="dtypes", type=lambda text: text.split(","), default=DTYPES,
        help=f"some of {','.join(DTYPES)} (default: all)")
    add("--quick", action="store_true",
        help=f"run a sample, most of it in one dtype, {QUICK_S} s a device")
    add("--test", default="", help="run one test, by its name")
    add("--length", type=int, default=0, help="check sequences of N tokens too")
    add("--first", action="store_true", help="stop at the first failure")
    add("--json", action="store_true", help="print the report as JSON")
    options = vars(parser.parse_args(argv))
    if options["length"] < 0:
        parser.error(f"--length must be a number of tokens, got {options['length']}")
    if unknown := {*options["dtypes"]} - {*DTYPES}:
        parser.error(f"--dtype must be some of {', '.join(DTYPES)}, got {min(unknown)}")
    one = options["devices"]
    return options | {"devices": [one] if one else [d for d in here if ":" not in d]}


def main(argv: Sequence[str]) -> int:
    options = read(argv)
    as_json = options.pop("json")
    try:
        report = check(**options)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(json.dumps(vars(report)) if as_json else text(report))
    return report.code
