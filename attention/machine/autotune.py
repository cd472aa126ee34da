"""fastest: times every backend at the run's shape, takes the fastest and remembers it.

    python train.py config/train_gpt2.py --attention_backend=fastest

Times    one attention call as the model makes it, with the backward in training: draw(), work().
         Median of interleaved rounds in random order, after a warm-up; about a second for each
         backend. A backend 5 times slower than the best so far is dropped.
Chooses  the fastest, if it beats the choice of "auto" by 2 %.
Ranks    with torch.distributed rank 0 measures, and all ranks use its result.
Cache    fastest.json in ~/.cache/nanoattn ($XDG_CACHE_HOME, $NANOATTN_CACHE): the chosen names, by
         the versions of this package and of torch, the device, the request and the shape. A
         remembered name has to pass the probe. Delete the file to measure again.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..caps import Backend, BackendUnavailable, Refusal, Resolution
from ..probing import Probe, probe
from ..ring import Ring
from ..select import BACKENDS, admit, packages, select
from ..spec import Machine, Policy, Spec
from ..views import PagedView, StaticView, filled_cache
from .flash_impl import flash_impl
from .system import cache_folder, first_line, own_code, synchronize, write_at_once

log = logging.getLogger("nanoattn")

Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each

MARGIN = 0.02  # a backend must be this much faster than auto's choice
BUDGET_S = 1.0  # samples of each backend, in all
TOO_SLOW = 5.0  # times the best so far
SAMPLE_S = 0.005  # a sample is as many calls as fill this time, 20 at most


@dataclass(frozen=True)
class Timing:
    name: str
    ms: float | None = None  # median; None: dropped
    error: float | None = None  # max |out - float64| over max |float64|, from the probe
    why: str = ""  # why it was dropped


# --- the choice ---


def fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy()
) -> Resolution:
    """The fastest backend here, remembered or measured, which takes seconds.

    Call it under the same autocast as the run.

    Args:
        shape: sequences, queries and keys: (B, T, T) in training, (B, 1, T) for decoding with a
            cache.

    Raises:
        BackendUnavailable: "auto" finds no backend that can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape

    def take(name: str) -> Resolution:
        # Only auto falls back, not a measured name.
        strict = replace(policy, fallback=name == "auto")
        chosen = select(name, spec, device, strict, shape=(shape[0], shape[2]))
        return replace(chosen, requested="fastest")

    def find() -> Resolution:
        machine = Machine.here(str(device), packages())
        file = cache_folder() / "fastest.json"
        version = sys.modules[__name__.partition(".")[0]].__version__
        here = machine.name, machine.deterministic, torch.get_num_threads(), flash_impl()
        key = repr((version, torch.__version__, here, spec, shape, policy))
        known = remembered(file)
        if (name := known.get(key, "")) in BACKENDS:  # a file is never run from here
            try:
                chosen = take(name)
                log.info(f"fastest: {name}, remembered; delete {file} to measure again")
                return chosen
            except BackendUnavailable as e:
                log.warning(f"fastest: {name}, from {file}, cannot run now ({e}): measuring again")
        rule = take("auto").backend.name
        began = perf_counter()
        timings = measure(rule, spec, torch.device(device), shape, machine, policy)
        where = f"on {device} ({perf_counter() - began:.1f} s)"
        name = decide(timings, rule)
        log.info(table(timings, rule, name, spec, shape, where))
        chosen = take(name)
        if any(t.ms for t in timings):
            try:
                write_at_once(file, json.dumps({**known, key: name}, indent=1))
            except OSError as e:
                log.warning(f"fastest: cannot write {file}: {e}")
        return chosen

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return find()
    # A key-value store, not a broadcast: rank 0 may call this alone, to write a sample.
    store = dist.distributed_c10d._get_default_store()
    question = f"nanoattn/fastest/{spec}/{shape}"
    if dist.get_rank():
        return take(store.get(question).decode())
    name = "auto"  # what the other ranks use if this fails, rather than wait
    try:
        chosen = find()
        name = chosen.backend.name
    finally:
        store.set(question, name)
    return chosen


def remembered(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def aligned(rows: Sequence[Sequence[str]], side: str) -> list[str]:
    """The rows of a text table; `side`, < or >, aligns all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<"] + [side] * (len(widths) - 1)
    return [
        "  ".join(f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def decide(timings: list[Timing], rule: str) -> str:
    ms = {t.name: t.ms for t in timings if t.ms is not None}
    best = min(ms, key=lambda name: ms[name], default=rule)
    return rule if rule in ms and ms[best] > (1 - MARGIN) * ms[rule] else best


def only_interpreted(backend: Backend, spec: Spec, machine: Machine) -> bool:
    """True if it would run in Triton's interpreter, thousands of times slower than a GPU."""
    rows = [c for c in backend.caps if not c.why_not(spec, machine)]
    return bool(rows) and all(c.interpreted for c in rows)


# --- the measurement ---


def measure(
    rule: str, spec: Spec, device: torch.device, shape: Shape, machine: Machine, policy: Policy
) -> list[Timing]:
    """Try every backend, `rule` first, and time those that pass. The random state is restored."""
    tried: dict[str, Timing] = {}
    calls: dict[str, Callable[[], None]] = {}
    once: dict[str, float] = {}  # seconds of one call
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        inputs = draw(spec, device, shape)
        for name in [rule, *(n for n in BACKENDS if n != rule)]:
            backend, why = admit(name, spec, machine, policy)
            if not why and only_interpreted(backend, spec, machine):
                why = [Refusal("Triton's interpreter is for tests, not for speed")]
            found = Probe(tuple(why)) if why else probe(backend, spec, device)
            tried[name] = Timing(name, None, found.error, "; ".join(found.why))
            if found.why:
                continue
            try:
                calls[name] = work(backend, spec, inputs)
                once[name] = warmed_up(calls[name], device)
                # If one call takes the whole budget, only those near the best are measured.
                limit = TOO_SLOW if once[name] < BUDGET_S else 1.25
                if (ratio := once[name] / min(once.values())) > limit:
                    slow = f"{once[name] * 1e3:.3g} ms, {ratio:.1f} times the best so far"
                    tried[name] = replace(tried[name], why=slow)
            except Exception as e:  # any failure, such as out of memory, is the reason
                tried[name] = replace(tried[name], why=f"at this shape: {first_line(e)}")
        calls = {name: call for name, call in calls.items() if not tried[name].why}
        for name, s in race(calls, once, device).items():
            tried[name] = replace(tried[name], ms=1e3 * s)
    if device.type == "cuda":  # the run reports its own peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(tried.values())


def race(
    calls: Mapping[str, Callable[[], None]], once: Mapping[str, float], device: torch.device,
    budget_s: float = BUDGET_S,
) -> dict[str, float]:  # fmt: skip
    """Median seconds of each call, in interleaved rounds, each until its budget is spent.

    Args:
        once: roughly the seconds of one call, from warmed_up().
    """
    many = {n: min(20, max(1, round(SAMPLE_S / max(once[n], 1e-9)))) for n in calls}
    taken: dict[str, list[float]] = {name: [] for name in calls}

    def wants_more(name: str) -> bool:
        spent = sum(taken[name]) * many[name]
        return len(taken[name]) < 3 or (spent < budget_s and len(taken[name]) < 100)

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


def table(timings: list[Timing], rule: str, name: str, spec: Spec, shape: Shape, where: str) -> str:
    B, Tq, Tk = shape
    tokens = f"{Tq:,} tokens" if Tq == Tk else f"{Tq:,} queries and {Tk:,} keys"
    passes = "forward and backward" if spec.grad else "forward"
    dtype = f"{spec.dtype}{', compiled' if spec.compiled else ''}"
    lines = [f"fastest: {passes} of one attention call, batch {B}, {tokens}, {dtype}, {where}"]
    known = {t.name: t.ms for t in timings if t.ms is not None}
    rows: list[list[str]] = [["", "ms", f"to {rule}", "error"]]
    dropped: list[list[str]] = []
    for t in sorted(timings, key=lambda t: (t.ms is None, t.ms or 0.0)):
        if t.ms is None:
            dropped.append([t.name, t.why])
        else:
            ratio = f"{t.ms / known[rule]:.3f}" if rule in known else "-"
            rows.append([t.name, f"{t.ms:.3f}", ratio, f"{t.error or 0.0:.1e}"])
    lines += [*aligned(rows, ">"), *aligned(dropped, "<")]
    if not known:
        why = "nothing could be measured; auto's choice"
    elif name == rule:
        why = f"auto's choice, which no other beats by {MARGIN:.0%}"
    elif rule in known:
        why = f"{1 - known[name] / known[rule]:.1%} less time than auto's {rule}"
    else:
        why = f"auto's {rule} could not be measured"
    return "\n      ".join([*lines, f"chosen: {name} ({why})"])


# --- one attention call, as a model makes it ---


class Inputs(NamedTuple):
    """The arguments of an attention call in a model."""

    qkv: Tensor  # (B, Tq, (H + 2 Hkv) D), the projection's output
    past: tuple[Tensor, Tensor] | None  # k, v of a cache; None: those in qkv
    segments: Tensor | None  # (B, Tk) int32
    view: PagedView | StaticView | None  # of a static or paged cache
    sinks: Tensor | None  # (H,), a parameter of the layer
    dout: Tensor  # (B, Tq, H D)


def draw(spec: Spec, device: torch.device, shape: Shape) -> Inputs:
    """Random inputs with the strides of a model's tensors."""
    B, Tq, Tk = shape
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, spec.dtype)}
    qkv = torch.randn(B, Tq, (H + 2 * Hkv) * D, **kind).requires_grad_(spec.grad)
    past = view = segments = sinks = None
    if spec.sinks:
        sinks = torch.randn(H, **kind).requires_grad_(spec.grad)
    if Tq != Tk or spec.cache in ("static", "paged"):
        k, v = torch.randn(2, B, Tk, Hkv, D, **kind)
        k, v, view_of = filled_cache(k, v, spec)
        past, view = (k, v), view_of([Tk - Tq] * B, [Tq] * B)
    if spec.segments:  # two documents
        segments = (torch.arange(Tk, device=device) >= Tk // 2).int().expand(B, Tk).contiguous()
    return Inputs(qkv, past, segments, view, sinks, torch.randn(B, Tq, H * D, **kind))


def work(backend: Backend, spec: Spec, inputs: Inputs) -> Callable[[], None]:
    """One attention call as the model makes it, with the backward if spec.grad."""
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    attend = Ring().attend(backend) if spec.lse else backend.attend

    def forward(
        qkv: Tensor, past: Any, segments: Tensor | None, view: Any, sinks: Tensor | None
    ) -> Tensor:
        q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
        if past is not None:
            k, v = past
        more = {} if sinks is None else {"sinks": sinks}
        return attend(q, k, v, spec, segments=segments, cache=view, **more).flatten(2)

    run: Any = forward
    if spec.compiled:
        run = torch.compile(own_code(forward, f"forward_{backend.name}"), dynamic=False)
    *given, dout = inputs
    leaves = [t for t in (inputs.qkv, inputs.sinks) if t is not None]

    def call() -> None:
        with torch.set_grad_enabled(spec.grad):
            out = run(*given)
            if spec.grad:
                torch.autograd.grad(out, leaves, dout)

    return call


def time_call(call: Callable[[], None], device: torch.device, n: int = 1) -> float:
    """Seconds of one call, the mean of n in a row; on CUDA by the device's clock."""
    synchronize(device)
    if device.type == "cuda":
        with torch.cuda.device(device):  # events belong to the current device
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(n):
                call()
            end.record()
            synchronize(device)
        return start.elapsed_time(end) / 1e3 / n
    began = perf_counter()
    for _ in range(n):
        call()
    synchronize(device)
    return (perf_counter() - began) / n
