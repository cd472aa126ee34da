"""fastest: times every backend at the run's shape, takes the fastest and remembers it.

    python train.py config/train_gpt2.py --attention_backend=fastest

Who      every backend that may run here and whose results are right (select.py).
What     one attention call as the model makes it, in training with the backward: draw(), work().
How      after a warm-up, in rounds, each backend once a round and in a new order, so that a
         drifting clock or a busy neighbour affects all alike. A backend's figure is the median of
         its samples. About a second each; one 5 times slower than the best is dropped at once.
Wins     the fastest; but the choice of "auto" stays unless it is beaten by 2 %.
Ranks    with torch.distributed rank 0 measures, and all ranks use its result.
Cache    the winner's name is kept in ~/.cache/nanoattn/fastest ($XDG_CACHE_HOME, $NANOATTN_CACHE),
         keyed by all that could change it: see answer_file(). It has to pass the probe again.
"""

from __future__ import annotations

import hashlib
import logging
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .flash_impl import flash_impl
from .own import is_file
from .probing import Probe, probe
from .ring import Ring
from .select import BACKENDS, packages, resolve, select
from .spec import Backend, BackendUnavailable, Machine, Policy, Resolution, Spec
from .system import cache_folder, first_line, own_code, synchronize, write_at_once
from .views import PagedView, StaticView, filled_cache

log = logging.getLogger("nanoattn")

Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each

MARGIN = 0.02  # how much faster than auto's choice a backend must be
BUDGET_S = 1.0  # of samples, for each backend
TOO_SLOW = 5.0  # times as long as the best so far
SAMPLE_S = 0.005  # a sample is as many calls as take this long, 20 at most


@dataclass(frozen=True)
class Timing:
    """The result for one backend; a line of the table."""

    name: str
    ms: float | None = None  # median; None: not measured to the end
    error: float | None = None  # max |out - float64| over max |float64|, from the probe
    why: str = ""  # why it was dropped


# --- the choice ---


def fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy()
) -> Resolution:
    """The fastest backend here, from the cache or measured, which takes seconds.

    Call it as the run will call attention, inside its autocast if it has one.

    Args:
        shape: sequences, queries and keys of a sequence: (B, T, T) in training, (B, 1, T) for
            decoding with a cache. Training has as many queries as keys.

    Raises:
        BackendUnavailable: not even "auto" finds one that can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape

    def take(name: str) -> Resolution:
        # auto names no kernel, so it may fall back; a name that was measured may not.
        strict = replace(policy, fallback=name == "auto")
        chosen = select(name, spec, device, strict, shape=(shape[0], shape[2]))
        return replace(chosen, requested="fastest")

    def find() -> Resolution:
        machine = Machine.here(str(device), packages())
        answer = answer_file(spec, device, shape, machine, policy)
        if answer.is_file():
            try:
                name = answer.read_text(encoding="utf-8")
                if is_file(name):  # which nobody typed: it would be run
                    raise ValueError(f"it names the file {name!r}")
                chosen = take(name)
            except (OSError, ValueError) as e:  # unreadable, refused now, or no longer there
                log.warning(f"fastest: {answer} is of no use now ({e}); measuring anew")
            else:
                log.info(f"fastest: {name}, remembered; delete {answer} to measure again")
                return chosen
        rule = take("auto").backend.name
        began = perf_counter()
        timings = measure(rule, spec, torch.device(device), shape, machine, policy)
        where = f"on {device} ({perf_counter() - began:.1f} s)"
        name = decide(timings, rule)
        log.info(table(timings, rule, name, spec, shape, where))
        chosen = take(name)
        try:
            if any(t.ms for t in timings):
                write_at_once(answer, name)
        except OSError as e:
            log.warning(f"fastest: {answer} cannot be written, so nothing is remembered ({e})")
        return chosen

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return find()
    # Through the processes' key-value store, not a broadcast: rank 0 may call this alone, to
    # write a sample, and then must not wait for the others.
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


def answer_file(
    spec: Spec, device: str | torch.device, shape: Shape, machine: Machine, policy: Policy
) -> Path:
    """The file that caches the answer, named by a hash of all that could change it."""
    kind = torch.device(device).type
    conditions = (
        machine,
        spec,
        shape,
        policy.mps_sdpa,
        torch.get_num_threads() if kind == "cpu" else None,
        torch.is_autocast_enabled(kind),
        torch.backends.cuda.matmul.allow_tf32 if kind == "cuda" else None,
        torch.are_deterministic_algorithms_enabled(),
        flash_impl(),
    )
    digest = hashlib.sha256(repr(conditions).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):  # an edited kernel is measured again
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_folder() / "fastest" / digest.hexdigest()[:32]


def decide(timings: list[Timing], rule: str) -> str:
    """The name of the fastest; or `rule`, auto's choice, if none beats it by MARGIN."""
    ms = {t.name: t.ms for t in timings if t.ms is not None}
    best = min(ms, key=lambda name: ms[name], default=rule)
    return rule if rule in ms and ms[best] > (1 - MARGIN) * ms[rule] else best


def refusals(
    backend: Backend, spec: Spec, machine: Machine, policy: Policy = Policy()
) -> tuple[str, ...]:
    """Every reason why resolve() would not choose `backend` itself; empty: it would."""
    try:
        found = resolve(backend.name, spec, machine, replace(policy, fallback=True))
    except BackendUnavailable:  # no backend is left
        return tuple(backend.why_not(spec, machine)) or ("it may not run here",)
    return found.rejected.get(backend.name, ())


def only_interpreted(backend: Backend, spec: Spec, machine: Machine) -> bool:
    """Whether it would run in Triton's interpreter, thousands of times slower than a GPU."""
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
            backend = BACKENDS[name]
            found = Probe(refusals(backend, spec, machine, policy))
            if not found.why and only_interpreted(backend, spec, machine):
                found = Probe(("Triton's interpreter is for tests, not for speed",))
            if not found.why:
                found = probe(backend, spec, device)
            tried[name] = Timing(name, None, found.error, "; ".join(found.why))
            if found.why:
                continue
            try:
                calls[name] = work(backend, spec, inputs)
                once[name] = warmed_up(calls[name], device)
                # If one call takes the whole budget, only those near the best are measured.
                limit = TOO_SLOW if once[name] < BUDGET_S else 1.25
                if (ratio := once[name] / min(once.values())) > limit:
                    why = f"{once[name] * 1e3:.3g} ms, {ratio:.1f} times the best so far"
                    tried[name] = replace(tried[name], why=why)
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
    calls: dict[str, Callable[[], None]], once: dict[str, float], device: torch.device
) -> dict[str, float]:
    """Median seconds of each call, in rounds; each takes part until its budget is spent."""
    many = {n: min(20, max(1, round(SAMPLE_S / max(once[n], 1e-9)))) for n in calls}
    taken: dict[str, list[float]] = {name: [] for name in calls}

    def wants_more(name: str) -> bool:
        spent = sum(taken[name]) * many[name]
        return len(taken[name]) < 3 or (spent < BUDGET_S and len(taken[name]) < 100)

    order = random.Random(0)
    while going := [name for name in calls if wants_more(name)]:
        order.shuffle(going)
        for name in going:
            taken[name].append(seconds(calls[name], device, many[name]))
    return {name: statistics.median(samples) for name, samples in taken.items()}


def warmed_up(call: Callable[[], None], device: torch.device) -> float:
    """About how long a call takes, seconds: the least of 3, or of as many as fit the budget."""
    seconds(call, device)  # compiles, loads, allocates
    samples = [seconds(call, device)]
    while len(samples) < 3 and sum(samples) < BUDGET_S:
        samples.append(seconds(call, device))
    return min(samples)


def table(timings: list[Timing], rule: str, name: str, spec: Spec, shape: Shape, where: str) -> str:
    """The log: what was measured, every backend's result, and why `name` is chosen."""
    B, Tq, Tk = shape
    tokens = f"{Tq:,} tokens" if Tq == Tk else f"{Tq:,} queries and {Tk:,} keys"
    passes = "forward and backward" if spec.grad else "forward"
    dtype = f"{spec.dtype}{', compiled' if spec.compiled else ''}"
    lines = [f"fastest: {passes} of one attention call, batch {B}, {tokens}, {dtype}, {where}"]
    known = {t.name: t.ms for t in timings if t.ms is not None}
    wide, ratio_wide = max(len(t.name) for t in timings), max(9, len(rule) + 5)
    lines.append(f"{'':{wide}}{'ms':>10}{f'to {rule}':>{ratio_wide}}{'error':>10}")
    for t in sorted(timings, key=lambda t: (t.ms is None, t.ms or 0.0)):
        if t.ms is None:
            lines.append(f"{t.name:{wide}}  {t.why}")
            continue
        ratio = f"{t.ms / known[rule]:.3f}" if rule in known else "-"
        lines.append(f"{t.name:{wide}}{t.ms:>10.3f}{ratio:>{ratio_wide}}{t.error or 0.0:>10.1e}")
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
    """What a model passes to attention."""

    qkv: Tensor  # (B, Tq, (H + 2 Hkv) D), the projection's output
    past: tuple[Tensor, Tensor] | None  # k, v of a cache; None: those in qkv
    segments: Tensor | None  # (B, Tk) int32
    view: PagedView | StaticView | None  # of a static or paged cache
    sinks: Tensor | None  # (H,), a parameter of the layer
    dout: Tensor  # (B, Tq, H D)


def draw(spec: Spec, device: torch.device, shape: Shape) -> Inputs:
    """Random inputs with the strides that they have in a model."""
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
    """One attention call as the model makes it, with the backward where spec.grad asks for it."""
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


def seconds(call: Callable[[], None], device: torch.device, n: int = 1) -> float:
    """How long a call takes, the mean of n in a row; on CUDA by the device's clock."""
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
