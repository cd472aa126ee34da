"""python -m attention check my_kernel.py: run every correctness test on one backend.

Compares outputs and gradients with float64 (matrix.py) and tests properties (properties.py), on
each device here and in each declared dtype. Prints a script that reproduces the first failure. Exit
code: 0 if all passed, 1 if a test failed or a declared capability was not tested, 2 for a wrong
command line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..caps import LACKS, Backend, Caps, Refusal
from ..machine.system import KERNEL_ERRORS, devices, first_line, loses_device, settings_stay
from ..machine.timing import aligned
from ..proof import probe_long
from ..select import RULES, get
from ..spec import DTYPES, Machine, Spec
from . import matrix
from .matrix import Case
from .properties import Item, properties

# Rows of the table. A test counts in the rows of all its features.
FEATURES = (
    *("causality", "causal", "lengths", "masked rows"),
    *("grouped heads", "window", "segments", "right", "scale", "softcap", "sinks"),
    *("large scores", "unusual scores", "strides"),
    *("gradients", "long sequences", "repeated calls", "surroundings", "dropout", "determinism"),
    *("torch.compile", "caches", "parts"),
)
VERDICTS = {"right": "passed", "wrong": "failed", "refused": "refused"}  # columns


def items(dtypes: Iterable[str], quick: bool = False, length: int = 0,
          caps: Sequence[Caps] = ()) -> Iterator[Item]:
    """Yield all tests: cases from simple to complex, then the other properties.

    Args:
        quick: only the cases of matrix.SAMPLE.
        length: compare some queries at this length too; 0: do not.
        caps: test the limits that these declare, too.
    """
    cases = matrix.in_order()[: len(matrix.SAMPLE) if quick else None]
    for dtype in dtypes:
        for case in cases:
            yield Item(case.name, case.features, case.spec(dtype), partial(_right, case), case=case)
        yield from {item.name: item for item in properties(dtype, caps)}.values()
        for grad, window in itertools.product((True, False), (None, 100)) if length else ():
            spec = Spec(2, 1, 64, dtype, window=window, grad=grad)
            name = f"{length:,} tokens" + ", no gradients" * (not grad) + ", window" * bool(window)
            yield Item(name, ("long sequences",), spec, partial(_right_at, length))


def _right_at(length: int, backend: Backend, spec: Spec, device: str) -> None:
    if why := probe_long(backend, spec, device, (1, length, length)):
        raise AssertionError("; ".join(why))


def _right(case: Case, backend: Backend, spec: Spec, device: str) -> None:
    case = replace(case, D=spec.head_dim)
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad)


@dataclass(frozen=True)
class Answer:
    """The result of one test."""

    verdict: str  # "right", "wrong" or "refused"
    why: tuple[Refusal | str, ...] = ()
    spec: Spec | None = None  # with which it ran


def fitted(item: Item, backend: Backend, machine: Machine) -> tuple[Spec, Sequence[Refusal]]:
    """The item's Spec as the backend takes it, and why it takes none: cases also run without
    gradients, and what is not about its size also at the nearest head_dim, page size or dropout."""
    spec, any_size = item.spec, not item.case or item.case.D == Case.D
    tries = [spec, *[replace(spec, grad=False)] * (spec.grad and item.case is not None)]
    for row in backend.caps if any_size else ():
        D = min(-(-spec.head_dim // row.head_dim_multiple) * row.head_dim_multiple,
                row.head_dim_max or spec.head_dim + row.head_dim_multiple)
        size = spec.page_size and -(-spec.page_size // row.page_multiple) * row.page_multiple
        p = max(spec.dropout, row.dropout_step or 0) if spec.dropout else 0.0
        tries += [replace(s, head_dim=D, page_size=size, dropout=p) for s in tries[:2]]
    refusals = (backend.why_not(s, machine) for s in tries)
    return next(((s, why) for s, why in zip(tries, refusals) if not why),
                (spec, backend.why_not(spec, machine)))


def judge(backend: Backend, item: Item, machine: Machine, device: str) -> Answer:
    """Run one test. An exception of the kernel is not caught: CUDA may be unusable after it."""
    machine = replace(machine, deterministic=item.deterministic)
    spec, why = fitted(item, backend, machine)
    if why:
        return Answer("refused", tuple(why))
    try:
        item.ask(backend, spec, device)
    except AssertionError as e:
        return Answer("wrong", (str(e),), spec)
    return Answer("right", (), spec)


def untested(caps: Iterable[Caps], ran: Iterable[tuple[Spec, bool]], machine: Machine,
             dtypes: Sequence[str]) -> list[str]:
    """Capabilities that a row of Caps declares for this machine, and that no test used.

    Args:
        ran: of each test its Spec, and if it was deterministic.
        dtypes: those to test.
    """
    ran, missing = list(ran), []
    for row in caps:
        able = {"device", "torch", "interpreted", "packages", "capability"}
        if able & {w.kind for w in row.why_not(Spec(1, 1, 64, row.dtypes[0]), machine)}:
            continue  # not on this machine
        declared = [name for name in LACKS if getattr(row, name)]
        declared += [dtype for dtype in row.dtypes if dtype in dtypes]
        declared += [f"cache '{cache}'" for cache in row.caches]
        declared += [f"head_dim {row.head_dim_max}"] if row.head_dim_max else []
        declared += [f"page_size {row.page_multiple}"] if "paged" in row.caches else []
        declared += ["deterministic"] if row.deterministic and row.grad else []
        used: set[str] = set()
        for spec, deterministic in ran:
            if not row.why_not(spec, replace(machine, deterministic=deterministic)):
                used |= {name for name in LACKS if getattr(spec, name)} - {"right"}
                used |= {"right"} if spec.right != 0 else set()
                used |= {spec.dtype, f"cache '{spec.cache}'", f"head_dim {spec.head_dim}"}
                used |= {f"page_size {spec.page_size}", *["deterministic"] * deterministic}
        if row.dtypes and set(row.dtypes) & set(dtypes):
            missing += [name for name in declared if name not in used]
    return missing


@dataclass
class Report:
    """Results of a check; --json prints them as a dict."""

    name: str  # as given on the command line
    backend: str
    title: str
    machine: dict[str, str]  # device -> its name
    torch: str
    quick: bool = False
    length: int = 0  # tokens of the longest sequence
    # "total", "float32, cpu", "window", ... -> number of tests "passed", "failed" and "refused"
    features: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)  # reason -> number of tests
    failures: list[dict[str, str]] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)  # declared capabilities, by device
    script: str = ""  # reproduces the first failure
    seconds: float = 0.0

    def add(self, item: Item, device: str, answer: Answer) -> None:
        gradients = answer.verdict == "right" and item.case and answer.spec and answer.spec.grad
        if answer.verdict == "refused":
            self.refusals.update(map(str, answer.why))
        elif answer.verdict == "wrong":
            why = "; ".join(answer.why)
            self.script = self.script or script(self.name, item, device, answer)
            failure = {"what": item.name, "dtype": item.spec.dtype, "device": device, "why": why}
            self.failures.append(failure)
        rows = "total", f"{item.spec.dtype}, {device}", *item.features
        for row in (*rows, *["gradients"] * bool(gradients)):
            counts = self.features.setdefault(row, dict.fromkeys(VERDICTS.values(), 0))
            counts[VERDICTS[answer.verdict]] += 1

    @property
    def code(self) -> int:
        """Exit code. A backend that refuses everything fails."""
        wrong = self.failures or self.untested
        return 1 if wrong or not self.features["total"]["passed"] else 0


def check(
    name: str, devices: Sequence[str], dtypes: Sequence[str] = DTYPES, *, quick: bool = False,
    first: bool = False, length: int = 0,
    watch: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> Report:
    """Run every test on a backend.

    Args:
        name: a backend's name, alias or file.
        first: stop at the first failure.
        watch: called before each test with the number done, the total, and the test's name.

    Raises:
        ValueError: unknown backend, or a file that defines none.
    """
    if name in RULES:
        raise ValueError(f"{name} is a rule: name one kernel, or a file")
    backend, began = get(name), time.monotonic()
    here = {device: Machine.here(device) for device in devices}
    todo = list(itertools.product(devices, items(dtypes, quick, length, backend.caps)))
    longest = max(length, *(item.case.Tk for _, item in todo if item.case))
    names = {device: machine.name for device, machine in here.items()}
    report = Report(name, backend.name, backend.title, names, torch.__version__, quick, longest)
    ran: dict[str, list[tuple[Spec, bool]]] = {device: [] for device in devices}
    lost = False
    for n, (device, item) in enumerate(todo):
        watch(n, len(todo), f"{item.name}, {item.spec.dtype}, {device}")
        try:
            with settings_stay(), torch.random.fork_rng([device] if device[:4] == "cuda" else []):
                answer = judge(backend, item, here[device], device)
        except KERNEL_ERRORS as e:  # its Caps declare the Spec, so any exception is a failure
            answer = Answer("wrong", (f"{type(e).__name__}: {first_line(e)}",), item.spec)
            lost = loses_device(e)  # every later test would fail
        report.add(item, device, answer)
        if answer.spec:
            ran[device].append((answer.spec, item.deterministic))
        if lost or (first and report.failures):
            break
    else:
        for device, specs in ran.items():
            found = untested(backend.caps, specs, here[device], dtypes)
            report.untested += [f"{name} on {device}" for name in dict.fromkeys(found)]
    watch(len(todo), len(todo), "done")
    report.seconds = time.monotonic() - began
    return report


def script(name: str, item: Item, device: str, answer: Answer) -> str:
    """Return a script that reproduces the item's failure."""
    package = (__package__ or "attention").partition(".")[0]
    name = os.path.abspath(name) if os.path.exists(name) else name
    why = f"{item.name}, {item.spec.dtype}: {'; '.join(answer.why)}"
    length = int(item.name.split()[0].replace(",", "")) if item.features[0][:4] == "long" else 0
    options = f"[{item.spec.dtype!r}], length={length}, caps=backend.caps"
    return "\n".join([
        *(f"# {line}" for line in why.splitlines()),
        f"from {package}.check.command import Spec, get, items",
        "",
        f"backend = get({name!r})",
        f"test = next(t for t in items({options}) if t.name == {item.name!r})",
        "print(test.case or test.spec)  # matrix.draw(test.case, test.spec.dtype): its inputs",
        f"test.ask(backend, {answer.spec!r}, {device!r})",
    ])
def text(report: Report) -> str:
    on = "; ".join(f"{device}: {name}" for device, name in report.machine.items())
    lines = [f"{report.backend} ({report.title})", f"{on}; torch {report.torch}", ""]
    others = [row for row in report.features if row not in (*FEATURES, "total")]
    rows = [row for row in (*FEATURES, *others, "total") if row in report.features]
    cells = [[row, *(str(n or "-") for n in report.features[row].values())] for row in rows]
    lines += aligned([["", *VERDICTS], *cells], ">")
    if report.refusals:
        lines += ["", "Refused, as its Caps declare:"]
        lines += [f"  {n:>4}  {why}" for why, n in report.refusals.items()]
    failures, total = report.failures, report.features["total"]
    if not total["passed"] + total["failed"]:
        return "\n".join([*lines, "", "It refused every test."])
    if not failures:
        lines += ["", f"Everything it declares is right. {report.seconds:.0f} s."]
        return "\n".join([*lines, f"(Up to {report.length:,} tokens; --length=N looks further.)"])
    lines += ["", f"{len(failures)} of {total['passed'] + total['failed']} failed:"]
    lines += [f"  {f['what']}, {f['dtype']}, {f['device']}: {f['why']}" for f in failures[:10]]
    lines += [f"  and {len(failures) - 10} more (--json lists all)"] * (len(failures) > 10)
    return "\n".join([*lines, "", "Script for the first failure:", "", report.script])


def progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{of} {what:.60}", end="", file=sys.stderr, flush=True)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; a mistake exits with code 2."""
    program = f"python -m {(__package__ or 'attention').partition('.')[0]} check"
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("backend", help="a file that defines BACKEND, or a backend's name")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: all that are here)")
    parser.add_argument("--dtype", help=f"some of {','.join(DTYPES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="run a sample of the cases")
    parser.add_argument("--length", type=int, default=0, help="check sequences of N tokens too")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    options.dtypes = options.dtype.split(",") if options.dtype else DTYPES
    if options.length < 0:
        parser.error(f"--length must be a number of tokens, got {options.length}")
    if unknown := set(options.dtypes) - set(DTYPES):
        parser.error(f"--dtype must be some of {', '.join(DTYPES)}, got {min(unknown)}")
    options.devices = [name for name in devices() if ":" not in name]
    if options.device:
        if options.device not in devices():
            parser.error(f"--device={options.device}: no such device here")
        options.devices = [options.device]
    return options


def main(argv: Sequence[str]) -> int:
    """Check one backend; returns the exit code."""
    options = read(argv)
    try:
        report = check(
            options.backend, options.devices, options.dtypes, quick=options.quick,
            first=options.first, length=options.length, watch=progress,
        )
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(json.dumps(vars(report)) if options.json else text(report))
    return report.code
