"""Time of one attention call as a model makes it, for `python -m attention` and for "fastest".

The median of interleaved rounds in random order, after a warm-up; on CUDA by the device's clock.
"""

from __future__ import annotations

import random
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..caps import Backend, BackendUnavailable
from ..masks import filled_cache
from ..proof import Inputs, attend_of, draw_inputs, probe, survives
from ..select import Shape, admit
from ..spec import Machine, Policy, Spec
from .system import KERNEL_ERRORS, first_line, loses_device, own_code, synchronize

BUDGET_S = 0.5  # samples of each call, in all
SAMPLE_S = 0.005  # a sample is as many calls as fill this time, 20 at most


@dataclass(frozen=True)
class Row:
    """A backend's row in the table and in --json."""

    name: str
    title: str
    why: tuple[str, ...] = ()  # why it does not run
    ms: tuple[float, ...] = ()  # median of each mode that it supports; empty: not timed
    error: float | None = None  # max |out - float64| over max |float64|, from the probe
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # why a mode was not timed


def measure(
    names: Iterable[str], modes: Sequence[Spec], machine: Machine, policy: Policy,
    device: torch.device, shape: Shape, too_slow: float = float("inf"),
    show: Callable[[str], object] = lambda line: None,
) -> list[Row]:
    """Probe and time the backends. The random state is restored.

    Args:
        modes: without the backward pass, with it, or both in this order.
        show: called with a line for each backend as soon as it has run once or is refused.
        too_slow: skip a backend whose last mode is this many times slower than the best yet.
    """
    rows: dict[str, Row] = {}
    calls: dict[tuple[str, Spec], Callable[[], None]] = {}
    once: dict[tuple[str, Spec], float] = {}  # seconds of one call
    best = float("inf")
    # The probe stores all scores in float64: only as long as needed to see the usual kernel.
    tokens = min(max(shape[2], 64), 512)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        given, options = draw(modes[-1], device, shape)
        for name in names:
            try:
                backend, refused = admit(name, modes[-1], machine, policy)
            except BackendUnavailable as e:  # other people's code
                rows[name] = Row(name, "", (str(e),))
                show(f"{name:14}  {e}")
                continue
            able = [s for s in modes if not admit(name, s, machine, policy)[1]]
            row = Row(name, backend.title, tuple(refused))
            fit = [c for c in backend.caps if able and not c.why_not(able[-1], machine)]
            if fit and all(c.interpreted for c in fit):  # thousands of times slower than a GPU
                row = replace(row, why=("Triton's interpreter is for tests, not for speed",))
            elif able:
                tried = probe(backend, able[-1], device, tokens)
                row = Row(name, backend.title, tried.why, (), tried.error, tried.kernels, row.why)
            rows[name] = row
            if row.why:
                show(f"{name:14}  {row.why[0]}")
                continue
            try:
                for spec in able:
                    key = name, spec
                    calls[key] = work(backend, spec, given, options)
                    with survives(backend, device):
                        once[key] = warmed_up(calls[key], device)
            except KERNEL_ERRORS as e:  # any failure, such as out of memory, is the reason
                if loses_device(e):
                    raise
                rows[name] = replace(row, why=(f"at this shape: {first_line(e)}",))
                show(f"{name:14}  {rows[name].why[0]}")
                continue
            show(f"{name:14}  {1e3 * once[key]:.4g} ms")
            best = min(best, once[key])
            if once[key] > too_slow * best:
                ratio = f"{once[key] * 1e3:.3g} ms, {once[key] / best:.1f} times the best so far"
                rows[name] = replace(row, why=(ratio,))
        calls = {key: call for key, call in calls.items() if not rows[key[0]].why}
        for (name, _), s in race(calls, once, device).items():
            rows[name] = replace(rows[name], ms=(*rows[name].ms, 1e3 * s))
    if device.type == "cuda":  # the run reports its own peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(rows.values())


Key = tuple[str, Spec]


def race(
    calls: Mapping[Key, Callable[[], None]], once: Mapping[Key, float], device: torch.device
) -> dict[Key, float]:
    """Median seconds of each call, in interleaved rounds, each until its budget is spent.

    Args:
        once: roughly the seconds of one call, from warmed_up().
    """
    many = {n: min(20, max(1, round(SAMPLE_S / max(once[n], 1e-9)))) for n in calls}
    taken: dict[Key, list[float]] = {name: [] for name in calls}

    def wants_more(name: Key) -> bool:
        spent = sum(taken[name]) * many[name]
        return len(taken[name]) < 3 or (spent < BUDGET_S and len(taken[name]) < 100)

    order = random.Random(0)
    while going := [name for name in calls if wants_more(name)]:
        order.shuffle(going)
        for name in going:
            taken[name].append(time_call(calls[name], device, many[name]))
    return {name: statistics.median(samples) for name, samples in taken.items()}


def warmed_up(call: Callable[[], None], device: torch.device) -> float:
    """Roughly the seconds of a call: the least of 3, or of as many as fit the budget."""
    time_call(call, device)  # compiles, loads, allocates
    samples = [time_call(call, device)]
    while len(samples) < 3 and sum(samples) < BUDGET_S:
        samples.append(time_call(call, device))
    return min(samples)


Stamp = float | torch.cuda.Event  # seconds, or an event


class Clock:
    """Time stamps that need no synchronization, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.apart = device.type != "mps"  # stamps within a step are meaningful

    def stamp(self) -> Stamp:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # events belong to the current device
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            return event
        return perf_counter()

    def start(self) -> Stamp:
        synchronize(self.device)
        return self.stamp()

    def stop(self) -> Stamp:
        """Stamp the end of all work; earlier stamps can be read after it."""
        stamp = self.stamp()
        synchronize(self.device)
        return stamp if self.device.type == "cuda" else self.stamp()

    def ms(self, a: Stamp, b: Stamp) -> float:
        if isinstance(a, float) or isinstance(b, float):
            assert isinstance(a, float) and isinstance(b, float)
            return (b - a) * 1e3
        return float(a.elapsed_time(b))


def time_call(call: Callable[[], object], device: torch.device, n: int = 1) -> float:
    """Seconds of one call, the mean of n in a row; on CUDA by the device's clock."""
    clock = Clock(device)
    start = clock.start()
    for _ in range(n):
        call()
    return clock.ms(start, clock.stop()) / 1e3 / n


# --- one attention call ---


def draw(spec: Spec, device: torch.device, shape: Shape) -> tuple[Inputs, dict[str, Any]]:
    """Random inputs with the strides of a model's tensors, and the options of attend()."""
    B, Tq, Tk = shape
    given = draw_inputs(spec, device, shape, torch.Generator().manual_seed(0))
    if spec.cache not in ("static", "paged"):
        return given, dict(given.options)
    k, v, view = filled_cache(given.k, given.v, spec)
    return given._replace(k=k, v=v), {**given.options, "cache": view([Tk - Tq] * B, [Tq] * B)}


def work(
    backend: Backend, spec: Spec, given: Inputs, options: dict[str, Any]
) -> Callable[[], None]:
    """One attention call, with the backward if spec.grad."""
    attend = attend_of(backend, spec)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attend(q, k, v, spec, **options)

    run = forward
    if spec.compiled:
        run = torch.compile(own_code(forward, f"forward_{backend.name}"), dynamic=False)
    qkv = [t.detach().requires_grad_(spec.grad) for t in given[:3]]
    leaves = list(qkv)
    if given.sinks is not None:
        leaves.append(given.sinks.detach().requires_grad_(spec.grad))
        options = {**options, "sinks": leaves[3]}

    def call() -> None:
        with torch.set_grad_enabled(spec.grad):
            out = run(*qkv, **options)
            if spec.grad:
                torch.autograd.grad(out, leaves, given.dout)

    return call


# --- the table ---


def table(rows: Sequence[Row], modes: Sequence[Spec]) -> str:
    """A line for each backend that runs, fastest first, then notes and the reasons of the others.

    Args:
        modes: as in measure(); none: nothing was run.
    """
    able, lines = [row for row in rows if not row.why], []
    if able and modes:
        times = ["fwd+bwd ms" if spec.grad else "forward ms" for spec in modes]
        cells = [["runs here", *times, "error", "kernel"]]
        for row in sorted(able, key=lambda row: (-len(row.ms), row.ms[-1:])):
            ms = [f"{t:.3f}" for t in row.ms] + ["-"] * (len(modes) - len(row.ms))
            cells.append([row.name, *ms, f"{row.error:.1e}", ", ".join(row.kernels) or "-"])
        lines += aligned(cells, ">")
    elif able:
        lines += aligned([["runs there", ""], *([row.name, row.title] for row in able)], "<")
    notes: dict[str, list[str]] = {}
    for row in able:
        for note in row.notes:
            notes.setdefault(note, []).append(row.name)
    lines += [f"- {', '.join(names)}: {note}" for note, names in notes.items()]
    if len(able) < len(rows):
        lines += ["", "does not run"]
    wide = max(len(row.name) for row in rows)
    for row in rows:
        for n, why in enumerate(row.why):
            first = f"{row.name if n == 0 else '':{wide}}  "
            lines += textwrap.wrap(why, 100, initial_indent=first, break_long_words=False,
                                   subsequent_indent=" " * len(first))
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], side: str) -> list[str]:
    """The rows of a text table; `side`, < or >, aligns all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<"] + [side] * (len(widths) - 1)
    return [
        "  ".join(f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
