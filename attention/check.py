"""python -m attention check my_kernel.py: the whole proof of a kernel in one command.

Every case of matrix.py, outputs and gradients against the float64 oracle by its one tolerance, and
every promise of promises.py, on the devices here and in each dtype that the backend's Caps declare.
What Caps refuse is listed with the reason; what they declare must run, and be right. The first
failure is printed as a script that reproduces it. Exit code 1 where anything failed, 2 where
nothing could be asked. The tests and `bench_mfu.py qualify` ask the same items by the same judge().
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial

import torch

from . import matrix
from .matrix import Case
from .promises import Item, promises
from .select import get, packages
from .spec import DTYPES, Backend, Machine, Refusal, Spec
from .system import first_line

# Rows of the table, in this order; a case belongs to all that it has.
FEATURES = ("causal", "lengths", "blind rows", "grouped heads", "window", "segments", "scale",
            "softcap", "sinks", "large scores", "unusual scores", "strides", "gradients", "canary",
            "dropout", "determinism", "torch.compile", "caches", "parts")  # fmt: skip
# What refuses a dtype on a device whatever else is asked.
THERE = ("device", "dtype", "packages", "capability", "torch", "interpreted", "hub_kernels")


def items(dtypes: Iterable[str], quick: bool = False) -> Iterator[Item]:
    """All questions, those that cover most first; with quick matrix.SAMPLE instead of all cases."""
    cases = matrix.in_order()[: len(matrix.SAMPLE) if quick else None]
    for dtype in dtypes:
        for case in cases:
            yield Item(case.name, case.features, case.spec(dtype), partial(_right, case), case=case)
        yield from promises(dtype)


def _right(case: Case, backend: Backend, spec: Spec, device: str) -> None:
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad)


@dataclass(frozen=True)
class Answer:
    verdict: str  # "right", "wrong" or "refused"
    why: tuple[Refusal | str, ...] = ()
    grad: bool = False  # were gradients compared?


def judge(backend: Backend, item: Item, machine: Machine, device: str) -> Answer:
    """Ask one question. What the kernel itself raises is not caught: it may have broken CUDA.

    A kernel without a backward pass is asked the cases all the same, forward only.
    """
    machine, spec = replace(machine, deterministic=item.deterministic), item.spec
    why = backend.why_not(spec, machine)
    if item.case and [w.kind for w in why] == ["grad"]:
        spec = replace(spec, grad=False)
        why = backend.why_not(spec, machine)
    if why:
        return Answer("refused", tuple(why))
    try:
        item.ask(backend, spec, device)
    except AssertionError as e:
        return Answer("wrong", (str(e),))
    return Answer("right", grad=spec.grad and item.case is not None)


# --- a whole check ---


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    refused: int = 0


@dataclass
class Report:
    """What was found; as a dict it is what --json prints."""

    name: str  # as it was given
    backend: str
    title: str
    machine: dict[str, str]  # device -> what it is
    torch: str
    quick: bool = False  # a sample of the cases
    total: Count = field(default_factory=Count)
    features: dict[str, Count] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)  # reason -> how often
    failures: list[dict[str, str]] = field(default_factory=list)
    script: str = ""  # reproduces the first failure
    seconds: float = 0.0

    def add(self, item: Item, device: str, answer: Answer) -> None:
        kind = {"right": "passed", "wrong": "failed", "refused": "refused"}[answer.verdict]
        for why in answer.why if answer.verdict == "refused" else ():
            self.refusals[str(why)] = self.refusals.get(str(why), 0) + 1
        there = any(w.kind in THERE for w in answer.why if isinstance(w, Refusal))
        rows = [*item.features, *["gradients"] * answer.grad]
        for row in [f"{item.dtype}, {device}", *rows * (not there)]:
            count = self.features.setdefault(row, Count())
            setattr(count, kind, getattr(count, kind) + 1)
        setattr(self.total, kind, getattr(self.total, kind) + 1)
        if answer.verdict == "wrong":
            why = "; ".join(answer.why)
            found = {"what": item.name, "dtype": item.dtype, "device": device, "why": why}
            self.failures.append(found)
            self.script = self.script or script(self.name, item, device, why)

    @property
    def code(self) -> int:
        """The exit code. A backend that refuses all has shown nothing."""
        return 1 if self.failures or not self.total.passed else 0


def check(
    name: str, devices: Sequence[str], dtypes: Sequence[str] = DTYPES, *, quick: bool = False,
    first: bool = False, watch: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> Report:  # fmt: skip
    """Ask a backend everything.

    Args:
        name: a backend's name, alias or file.
        first: end at the first failure.
        watch: called before each question: how many are answered, of how many, the next one.

    Raises:
        ValueError: there is no such backend, or it cannot be loaded.
    """
    backend, began = get(name), time.monotonic()
    here = {device: Machine.here(device, packages(name)) for device in devices}
    said = {device: machine.name for device, machine in here.items()}
    report = Report(name, backend.name, backend.title, said, torch.__version__, quick)
    asked = [(device, item) for device in devices for item in items(dtypes, quick)]
    for n, (device, item) in enumerate(asked):
        watch(n, len(asked), f"{item.name}, {item.dtype}, {device}")
        try:
            with torch.random.fork_rng([device] if device[:4] == "cuda" else []):  # seeds are set
                answer = judge(backend, item, here[device], device)
        except Exception as e:  # whatever a kernel raises: it declares that it can do this
            answer = Answer("wrong", (f"{type(e).__name__}: {first_line(e)}",))
        report.add(item, device, answer)
        if first and report.failures:
            break
    watch(len(asked), len(asked), "done")
    report.seconds = time.monotonic() - began
    return report


def script(name: str, item: Item, device: str, why: str) -> str:
    """About ten lines that fail as the item did, to be run where the package is importable."""
    package = (__package__ or "attention").partition(".")[0]
    name = os.path.abspath(name) if os.path.exists(name) else name
    lines = [f"# {line}" for line in f"{item.name}, {item.dtype}: {why}".splitlines()]
    if item.case is None:
        return "\n".join([
            *lines,
            f"from {package} import get",
            f"from {package}.promises import promises",
            "",
            f"promise = next(p for p in promises({item.dtype!r}) if p.name == {item.name!r})",
            "print(promise.spec)",
            f"promise.ask(get({name!r}), promise.spec, {device!r})  # promises.py says how",
        ])  # fmt: skip
    given = {f.name: getattr(item.case, f.name) for f in fields(Case)}
    changed = ", ".join(f"{k}={v!r}" for k, v in given.items() if v != getattr(Case, k, None))
    sinks = f", sinks=matrix.sinks(case, dtype, {device!r})" * item.case.sinks
    return "\n".join([
        *lines,
        f"from {package} import get, matrix",
        "",
        f"dtype, backend = {item.dtype!r}, get({name!r})",
        f"case = matrix.Case({changed})",
        f"q, k, v, dout = matrix.draw(case, dtype, {device!r})  # (B, T, H, D)",
        f"seg = matrix.segments(case, {device!r})",
        f"out = backend.attend(q, k, v, case.spec(dtype, grad=False), segments=seg{sinks})",
        "off = (out.cpu().double() - matrix.truth(case, dtype).out).abs()",
        'print("the largest error of each query:", off.amax(dim=(0, 2, 3)))',
        f"matrix.check(backend, case, dtype, {device!r})  # gradients too",
    ])  # fmt: skip


# --- what is printed ---


def text(report: Report) -> str:
    """The report as a table, then refusals, failures and the script."""
    on = "; ".join(f"{device}: {name}" for device, name in report.machine.items())
    lines = [f"{report.backend} ({report.title})", f"{on}; torch {report.torch}", ""]
    rows = [f for f in FEATURES if f in report.features]
    rows += [f for f in report.features if f not in FEATURES]
    width = max(map(len, rows))
    lines.append(f"{'':{width}}  passed  failed  refused")
    for row in (*rows, "in all"):
        c = report.features.get(row, report.total)
        counts = [str(n or "-") for n in (c.passed, c.failed, c.refused)]
        lines.append("{:{}}  {:>6}  {:>6}  {:>7}".format(row, width, *counts))
    if report.refusals:
        lines += ["", "Refused, as its Caps declare:"]
        lines += [f"  {n:>4}  {why}" for why, n in report.refusals.items()]
    failures, total = report.failures, report.total
    if not failures:
        end = "All that it declares is right." if total.passed else "It refuses all: nothing ran."
        end += " Without --quick more is asked." * (report.quick and total.passed > 0)
        return "\n".join([*lines, "", f"{end} {report.seconds:.0f} s."])
    lines += ["", f"{len(failures)} of {total.passed + total.failed} failed:"]
    lines += [f"  {f['what']}, {f['dtype']}, {f['device']}: {f['why']}" for f in failures[:10]]
    lines += [f"  and {len(failures) - 10} more (--json has all)"] * (len(failures) > 10)
    return "\n".join([*lines, "", "The first as a script:", "", report.script])


def progress() -> Callable[[int, int, str], None]:
    """On stderr: a bar in a terminal, else a line every ten seconds."""
    last = time.monotonic()

    def watch(done: int, of: int, what: str) -> None:
        nonlocal last
        if sys.stderr.isatty():
            bar = f"[{'#' * (30 * done // of):30}] {done}/{of} {what:.40}" if done < of else ""
            print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{done} of {of}: {what}", file=sys.stderr, flush=True)

    return watch


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; a mistake in it ends the process with exit code 2."""
    program = f"python -m {__package__ or 'attention'} check"
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("backend", help="a file that defines BACKEND, or a backend's name")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; all that are here if left out")
    parser.add_argument("--dtype", help=f"some of {','.join(DTYPES)}, all if left out")
    parser.add_argument("--quick", action="store_true", help="a sample of the cases")
    parser.add_argument("--first", action="store_true", help="end at the first failure")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    options.dtypes = options.dtype.split(",") if options.dtype else DTYPES
    if unknown := set(options.dtypes) - set(DTYPES):
        parser.error(f"--dtype must be some of {', '.join(DTYPES)}, got {min(unknown)}")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    options.devices = ["cpu", *["cuda"] * cuda, *["mps"] * mps]
    if options.device:
        kind, _, number = options.device.partition(":")
        most = torch.cuda.device_count() if kind == "cuda" else 1
        if kind not in options.devices or (number or "0") not in map(str, range(most)):
            parser.error(f"--device={options.device}: there is no such device here")
        options.devices = [options.device]
    return options


def main(argv: Sequence[str]) -> int:
    """Check one backend as the command line says; the exit code."""
    asked = read(argv)
    try:
        report = check(asked.backend, asked.devices, asked.dtypes, quick=asked.quick,
                       first=asked.first, watch=progress())  # fmt: skip
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report)) if asked.json else text(report))
    return report.code
