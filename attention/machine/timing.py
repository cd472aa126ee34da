"""Time of one attention call: median of interleaved rounds; on CUDA by the device's clock."""

from __future__ import annotations

import math
import random
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..caps import Backend, BackendUnavailable
from ..masks import filled_cache
from ..proof import KernelFailed, attempt, attend_of, draw_inputs, probe
from ..select import Shape, admit
from ..spec import BUFFERS, Machine, Policy, Spec
from .system import own_code, synchronize

BUDGET_S = 0.5  # a call
SAMPLE_S = 0.005  # of 1 to 20 calls


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    why: tuple[str, ...] = ()  # of not running
    ms: tuple[float, ...] = ()  # medians by mode
    error: float | None = None  # max |out - float64| / max |float64|
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # of modes that were not timed

    def as_json(self, modes: Sequence[Spec]) -> dict[str, Any]:
        names = ["forward_backward" if spec.grad else "forward" for spec in modes]
        error = self.error if math.isfinite(self.error or 0) else None  # JSON has no NaN
        return asdict(self) | {"ms": dict(zip(names, self.ms)), "error": error}


Call = Callable[[], None]
Calls = dict[tuple[str, Spec], tuple[Call, float]]  # and its approximate seconds


def declared(name: str, spec: Spec, machine: Machine, policy: Policy) -> tuple[Row, Backend | None]:
    """None: its code does not load."""
    try:
        backend, why = admit(name, spec, machine, policy)
    except BackendUnavailable as e:
        return Row(name, "", (str(e),)), None
    return Row(name, backend.title, tuple(why)), backend


def measure(names: Iterable[str], modes: Sequence[Spec], machine: Machine, policy: Policy,
            device: torch.device, shape: Shape,
            show: Callable[[str], object] = lambda line: None) -> list[Row]:
    """Probe and time; modes: without backward, with it, or both; `show` gets a line each."""
    rows: dict[str, Row] = {}
    calls: Calls = {}
    machine = replace(machine, interpreted=False)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        make = calls_of(modes[-1], device, shape)
        for name in names:
            row, backend = declared(name, modes[-1], machine, policy)
            able = [spec for spec in modes if not declared(name, spec, machine, policy)[0].why]
            once: Calls = {}
            if backend is not None and able:
                seen = probe(backend, able[-1], device, min(max(shape[2], 64), 512))
                error = seen.proof["error"] if seen.proof else None
                row = Row(name, backend.title, seen.why, (), error, seen.kernels, row.why)
                try:
                    for spec in () if row.why else able:
                        call = make(backend, spec)
                        with attempt(backend, device):
                            once[name, spec] = call, warmed_up(call, device)
                except KernelFailed as e:
                    row, once = replace(row, why=(f"at this shape: {e}",)), {}
            text = row.why[0] if row.why else f"{1e3 * [*once.values()][-1][1]:.4g} ms"
            show(f"{name:14}  {text}")
            rows[name] = row
            calls |= once
        for (name, _), s in race(calls, device).items():
            rows[name] = replace(rows[name], ms=(*rows[name].ms, 1e3 * s))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(rows.values())


def race(calls: Calls, device: torch.device) -> Mapping[tuple[str, Spec], float]:
    """Median seconds of each call, in interleaved rounds."""
    taken: dict[tuple[str, Spec], list[float]] = {key: [] for key in calls}
    order, going = random.Random(0), [*calls]
    while going:
        order.shuffle(going)
        for key in [*going]:
            call, s = calls[key]
            n = min(20, max(1, round(SAMPLE_S / s)))
            taken[key].append(time_call(call, device, n))
            if len(taken[key]) >= min(100, max(3, round(BUDGET_S / s / n))):
                going.remove(key)
    return {key: statistics.median(samples) for key, samples in taken.items()}


def warmed_up(call: Call, device: torch.device) -> float:
    time_call(call, device)  # compiles, loads, allocates
    samples = [time_call(call, device)]
    while len(samples) < 3 and sum(samples) < BUDGET_S:
        samples.append(time_call(call, device))
    return min(samples)


def calls_of(spec: Spec, device: torch.device, shape: Shape) -> Callable[[Backend, Spec], Call]:
    B, Tq, Tk = shape
    given = draw_inputs(spec, device, shape, torch.Generator().manual_seed(0))
    options: dict[str, Any] = dict(given.options)
    if spec.cache in BUFFERS:
        k, v, view = filled_cache(given.k, given.v, spec)
        given = given._replace(k=k, v=v)
        options["cache"] = view([Tk - Tq] * B, [Tq] * B)

    def make(backend: Backend, spec: Spec) -> Call:
        attend = attend_of(backend, spec)

        def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return attend(q, k, v, spec, **options)

        if spec.compiled:
            run = torch.compile(own_code(run, f"forward_{backend.name}"), dynamic=False)
        leaves = {name: t.detach().requires_grad_(spec.grad) for name, t in given.tensors.items()
                  if name in ("q", "k", "v", "sinks")}

        def call() -> None:
            with torch.set_grad_enabled(spec.grad):
                out = run(**options | leaves)
                if spec.grad:
                    torch.autograd.grad(out, [*leaves.values()], given.dout)

        return call

    return make


Stamp = Any  # seconds, or an event


class Clock:
    """Time stamps without synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.apart = device.type != "mps"  # stamps within a step

    def stamp(self) -> Stamp:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            return event
        return perf_counter()

    def start(self) -> Stamp:
        synchronize(self.device)
        return self.stamp()

    def stop(self) -> Stamp:
        stamp = self.stamp()
        synchronize(self.device)
        return stamp if self.device.type == "cuda" else self.stamp()

    def ms(self, a: Stamp, b: Stamp) -> float:
        return float(a.elapsed_time(b) if self.device.type == "cuda" else (b - a) * 1e3)


def time_call(call: Callable[[], object], device: torch.device, n: int = 1) -> float:
    clock = Clock(device)
    start = clock.start()
    for _ in range(n):
        call()
    return clock.ms(start, clock.stop()) / 1e3 / n


def table(rows: Sequence[Row], modes: Sequence[Spec]) -> str:
    """Backends that run, fastest first, notes, and reasons. No `modes`: nothing ran."""
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
    for note in dict.fromkeys(note for row in able for note in row.notes):
        lines.append(f"- {', '.join(row.name for row in able if note in row.notes)}: {note}")
    lines += ["", "does not run"] * (len(able) < len(rows))
    wide = max(len(row.name) for row in rows)
    for row in rows:
        for n, why in enumerate(row.why):
            first = f"{row.name if n == 0 else '':{wide}}  "
            lines += textwrap.wrap(why, 100, initial_indent=first, break_long_words=False,
                                   subsequent_indent=" " * len(first))
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], side: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{side if n else '<'}{width}}}" for n, width in enumerate(widths))
    return [line.format(*row).rstrip() for row in rows]
