"""python -m attention check my_kernel.py: run every correctness test on one backend.

On each device here and in each declared dtype. Prints a script that reproduces the first failure.
Exit code: 1 if a test failed or a declared capability was not tested, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .. import hub
from ..caps import LACKS, Backend, Caps, Refusal
from ..machine.system import KERNEL_ERRORS, devices, first_line, loses_device, settings_stay
from ..machine.timing import aligned
from ..names import RULES, get
from ..spec import DTYPES, Machine, Spec
from . import matrix
from .matrix import Case, Item
from .mistakes import named
from .properties import properties
from .script import of_case, of_property

# Rows of the table. A test counts in the rows of all its features.
FEATURES = (
    *("causality", "causal", "lengths", "masked rows"),
    *("grouped heads", "window", "segments", "right", "scale", "softcap", "sinks", "alibi"),
    *("large scores", "unusual scores", "strides"),
    *("gradients", "long sequences", "repeated calls", "surroundings", "dropout", "determinism"),
    *("torch.compile", "caches", "parts"),
)
VERDICTS = {"right": "passed", "wrong": "failed", "refused": "refused"}  # columns


def items(dtypes: Iterable[str], quick: bool = False, length: int = 0,
          caps: Sequence[Caps] = ()) -> Iterator[Item]:
    """All tests: cases, the simple ones first (quick: matrix.SAMPLE), then properties()."""
    cases = matrix.in_order()[: len(matrix.SAMPLE) if quick else None]
    for dtype in dtypes:
        for case in cases:
            yield Item(case.name, case.features, case.spec(dtype), partial(_right, case), case=case)
        yield from {item.name: item for item in properties(dtype, length, caps)}.values()


def _right(case: Case, backend: Backend, spec: Spec, device: str) -> None:
    case = replace(case, D=spec.head_dim)
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad)


@dataclass(frozen=True)
class Answer:
    """The result of one test."""

    verdict: str  # "right", "wrong" or "refused"
    why: tuple[Refusal | str, ...]
    spec: Spec  # with which it ran, or would have
    failed: Spec | None = None  # of the run with wrong numbers


def fitted(item: Item, backend: Backend, machine: Machine) -> tuple[Spec, Sequence[Refusal]]:
    """The item's Spec as the backend takes it (a case also without gradients; both at the nearest
    head_dim, page size and dropout), or why it does not."""
    spec = item.spec
    specs = [spec, replace(spec, grad=False)] if item.case else [spec]
    for row in backend.caps if not item.case or item.case.D == Case.D else ():
        D = -(-spec.head_dim // row.head_dim_multiple) * row.head_dim_multiple
        sizes: dict[str, Any] = {"head_dim": min(D, row.head_dim_max or D)}
        if spec.page_size:
            sizes["page_size"] = -(-spec.page_size // row.page_multiple) * row.page_multiple
        dropout = max(spec.dropout, row.dropout_step or 0) if spec.dropout else 0.0
        specs += [replace(s, **sizes, dropout=dropout) for s in specs[: 2 if item.case else 1]]
    why = [backend.why_not(s, machine) for s in specs]
    at = next((n for n, reasons in enumerate(why) if not reasons), 0)
    return specs[at], why[at]


def judge(backend: Backend, item: Item, machine: Machine, device: str) -> Answer:
    """Run one test. An exception of the kernel is not caught: CUDA may be unusable after it."""
    spec, why = fitted(item, backend, replace(machine, deterministic=item.deterministic))
    if why:
        return Answer("refused", tuple(why), spec)
    try:
        item.ask(backend, spec, device)
    except AssertionError as e:
        return Answer("wrong", (str(e),), spec, e.spec if isinstance(e, matrix.Wrong) else None)
    return Answer("right", (), spec)


def untested(caps: Iterable[Caps], ran: Sequence[tuple[Spec, bool]], machine: Machine,
             dtypes: Sequence[str]) -> list[str]:
    """What Caps declare for this machine and these dtypes, and no test used. `ran` has each test's
    Spec, and True if it was deterministic."""
    missing: dict[str, None] = {}
    elsewhere = {"device", "torch", "interpreted", "packages", "capability"}
    for row in caps:
        refusals = row.why_not(Spec(1, 1, 64, row.dtypes[0]), machine)
        tested = [dtype for dtype in row.dtypes if dtype in dtypes]
        if not tested or elsewhere & {refusal.kind for refusal in refusals}:
            continue
        declared = [*tested, *(name for name in LACKS if getattr(row, name)),
                    *(f"cache '{cache}'" for cache in row.caches),
                    *[f"head_dim {row.head_dim_max}"] * bool(row.head_dim_max),
                    *[f"page_size {row.page_multiple}"] * ("paged" in row.caches),
                    *["deterministic"] * (row.deterministic and row.grad)]
        used: set[str] = set()
        for spec, deterministic in ran:
            if not row.why_not(spec, replace(machine, deterministic=deterministic)):
                used |= {name for name in LACKS if getattr(spec, name)}
                used |= {spec.dtype, f"cache '{spec.cache}'", f"head_dim {spec.head_dim}",
                         f"page_size {spec.page_size}", "deterministic" * deterministic,
                         "right" * (spec.right is None)}
        missing |= dict.fromkeys(name for name in declared if name not in used)
    return [*missing]


@dataclass
class Report:
    """Results of a check; --json prints them as a dict."""

    backend: str
    title: str
    machine: dict[str, str]  # device -> its name
    torch: str
    quick: bool
    length: int  # tokens of the longest sequence
    # "total", "float32, cpu", "window", ... -> number of tests "passed", "failed" and "refused"
    features: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: Counter[Refusal] = field(default_factory=Counter)  # number of tests
    failures: list[dict[str, str]] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)  # declared capabilities that no test used
    script: str = ""  # reproduces the first failure
    mistake: list[str] = field(default_factory=list)  # that it shows, in lines of text
    seconds: float = 0.0

    def add(self, item: Item, device: str, answer: Answer) -> None:
        dtype, wrong = item.spec.dtype, answer.verdict == "wrong"
        rows = ["total", *item.features, f"{dtype}, {device}"]
        rows += ["gradients"] * (answer.verdict == "right" and bool(item.case and answer.spec.grad))
        self.refusals.update(why for why in answer.why if isinstance(why, Refusal))
        self.failures += [{"what": item.name, "dtype": dtype, "device": device,
                           "why": "; ".join(answer.why)}] * wrong
        for row in rows:
            counts = self.features.setdefault(row, dict.fromkeys(VERDICTS.values(), 0))
            counts[VERDICTS[answer.verdict]] += 1

    @property
    def code(self) -> int:
        """Exit code. A backend that refuses everything fails."""
        return int(bool(self.failures or self.untested or not self.features["total"]["passed"]))


def check(
    name: str, devices: Sequence[str], dtypes: Sequence[str] = DTYPES, *, quick: bool = False,
    first: bool = False, length: int = 0, test: str = "",
    watch: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> Report:
    """Run every test (`test`: one, by its name; `first`: up to the first failure) on a backend,
    given by its name, alias or file. `watch` hears of each: how many are done, of all, its name.
    Raises ValueError: unknown backend or test, or a file that defines none."""
    if name in RULES:
        raise ValueError(f"{name} is a rule: name one kernel, or a file")
    backend, began = get(name), time.monotonic()
    if backend.mods is not None or name.startswith(hub.PREFIX):
        raise ValueError(f"{name}: check takes no mask of one's own and no kernel of the hub; "
                         f"python -m attention {name} proves it")
    here = {device: Machine.here(device) for device in devices}
    tests = items(dtypes, quick, length, backend.caps)
    todo = [(d, i) for d, i in itertools.product(devices, tests) if test in ("", i.name)]
    if not todo:
        raise ValueError(f"unknown test {test!r}")
    report = Report(
        backend.name, backend.title, {device: machine.name for device, machine in here.items()},
        torch.__version__, quick or bool(test),
        max([length, *(item.case.Tk for _, item in todo if item.case)]))
    ran: dict[str, list[tuple[Spec, bool]]] = {device: [] for device in devices}
    for n, (device, item) in enumerate(todo):
        watch(n, len(todo), f"{item.name}, {item.spec.dtype}, {device}")
        forked, lost = partial(torch.random.fork_rng, [device] * (device[:4] == "cuda")), False
        try:
            with settings_stay(), forked():
                answer = judge(backend, item, here[device], device)
        except (*KERNEL_ERRORS, GeneratorExit) as e:  # its Caps declare the Spec
            spec, lost = fitted(item, backend, here[device])[0], loses_device(e)
            answer = Answer("wrong", (f"{type(e).__name__}: {first_line(e)}",), spec)
        if answer.verdict == "wrong" and not report.script:
            report.script = script(name, item, device, answer, length)
            if not lost:
                with forked():
                    report.mistake = named(backend, item, answer.spec, device)
        report.add(item, device, answer)
        if answer.verdict != "refused":
            ran[device].append((answer.spec, item.deterministic))
        if lost or (first and report.failures):  # after a loss every later test would fail
            break
    else:
        report.untested = [
            f"{capability} on {device}" for device in ([] if test else devices)
            for capability in untested(backend.caps, ran[device], here[device], dtypes)]
    watch(len(todo), len(todo), "done")
    report.seconds = time.monotonic() - began
    return report


def script(name: str, item: Item, device: str, answer: Answer, length: int) -> str:
    name = os.path.abspath(name) if os.path.exists(name) else name
    if item.case is None:
        return of_property(name, item.name, item.spec.dtype, device, length)
    case, spec = replace(item.case, D=answer.spec.head_dim), answer.failed or answer.spec
    return f"# {item.name}: {'; '.join(answer.why)}\n{of_case(name, case, spec, device)}"


def in_one_line(reasons: Sequence[str]) -> str:
    """As in "it takes a head_dim up to 64, not 72/80/128"."""
    words = [re.sub(r" \(got[^)]*\)", "", reason).split() for reason in reasons]
    if len({len(of_one) for of_one in words}) > 1:
        return "; ".join(dict.fromkeys(map(" ".join, words)))
    return " ".join("/".join(dict.fromkeys(column)) for column in zip(*words))


def text(report: Report) -> str:
    on = "; ".join(f"{device}: {name}" for device, name in report.machine.items())
    lines = [f"{report.backend} ({report.title})", f"{on}; torch {report.torch}", ""]
    others = sorted({*report.features} - {*FEATURES, "total"})
    cells = [[row, *(str(n or "-") for n in report.features[row].values())]
             for row in (*FEATURES, *others, "total") if row in report.features]
    lines += [*aligned([["", *VERDICTS.values()], *cells], ">"), ""]
    refused: dict[str, list[Refusal]] = {}
    for why in report.refusals:
        refused.setdefault(why.kind, []).append(why)
    lines += ["Refused, as its Caps declare:"] * bool(refused)
    lines += [f"  {sum(report.refusals[why] for why in reasons):>4}  {in_one_line(reasons)}"
              for reasons in refused.values()] + [""] * bool(refused)
    lines += [f"declared, not tested: {name}" for name in report.untested]
    failures, total = report.failures, report.features["total"]
    ran = total["passed"] + total["failed"]
    if not ran:
        lines += ["It refused every test."]
    elif failures:
        lines += [f"{len(failures)} of {ran} failed:"]
        lines += [f"  {f['what']}, {f['dtype']}, {f['device']}: {f['why']}" for f in failures[:10]]
        lines += [f"  and {len(failures) - 10} more (--json lists all)"] * (len(failures) > 10)
        lines += ["", *report.mistake, *[""] * bool(report.mistake)]
        lines += ["To repeat the first failure:", "", report.script]
    else:
        right = f"A sample of {ran} cases passed." if report.quick else (
            "The rest is right." if report.untested else "Everything it declares is right.")
        lines += [f"{right} {report.seconds:.0f} s.",
                  f"(Up to {report.length:,} tokens; --length=N looks further.)"]
    return "\n".join(lines)


def progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{of} {what:.60}", end="", file=sys.stderr, flush=True)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; a mistake exits with code 2."""
    program = f"python -m {(__package__ or 'attention').partition('.')[0]} check"
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n\n")[2])
    add = parser.add_argument
    add("name", metavar="backend", help="a file that defines BACKEND, or a backend's name")
    add("--device", dest="devices", help="cpu, cuda, cuda:1 or mps (default: all that are here)")
    add("--dtype", dest="dtypes", type=lambda text: text.split(","), default=DTYPES,
        help=f"some of {','.join(DTYPES)} (default: all)")
    add("--quick", action="store_true", help="run a sample of the cases")
    add("--test", default="", help="run one test, by its name")
    add("--length", type=int, default=0, help="check sequences of N tokens too")
    add("--first", action="store_true", help="stop at the first failure")
    add("--json", action="store_true", help="print the report as JSON")
    options, here = parser.parse_args(argv), devices()
    if options.length < 0:
        parser.error(f"--length must be a number of tokens, got {options.length}")
    if unknown := {*options.dtypes} - {*DTYPES}:
        parser.error(f"--dtype must be some of {', '.join(DTYPES)}, got {min(unknown)}")
    if options.devices and options.devices not in here:
        parser.error(f"--device={options.devices}: no such device here")
    options.devices = [options.devices] if options.devices else [d for d in here if ":" not in d]
    return options


def main(argv: Sequence[str]) -> int:
    """Check one backend; returns the exit code."""
    options = vars(read(argv))
    as_json = options.pop("json")
    try:
        report = check(**options, watch=progress)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(json.dumps(vars(report)) if as_json else text(report))
    return report.code
