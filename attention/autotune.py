"""fastest: the backend that a stopwatch chooses, at the very shape of the run, and remembers.

    python train.py config/train_gpt2.py --attention_backend=fastest

Who runs     every backend that may run here (resolve.py) and whose numbers are right (probe.py).
What         one attention call as the model makes it: q, k and v are views of one projection's
             output, the result is flattened to (B, T, C) for the next one; in training with the
             backward down to the projection. Eager or compiled, as the run will be.
How          warm-up calls first. Then rounds, each backend once a round and in a new order, so that
             a clock that drifts, a neighbour that wakes up, or caches that the one before has
             emptied, meet all of them; the median of the rounds counts. The device is synchronized
             at the ends of each sample; on CUDA its own events are the clock.
Who wins     the fastest; but what "auto" would take keeps its place unless it is beaten by 2 %.
How long     about a second each, and what a first compilation takes. One that is 5 times slower
             than the best so far is let go after a few calls.
Memory       that runs out is a refusal in PyTorch's own words. On Linux this is so for the CPU too,
             where else the system would end the process: see memory_limit(). The peak memory that
             a run reports includes that of the measurement where it was the larger one.
Many         with torch.distributed one process measures, rank 0, and all take what it found.
Remembered   in ~/.cache/nanoattn/fastest.json ($XDG_CACHE_HOME is heeded; $NANOATTN_CACHE names
             another folder), under everything that could change the answer: see conditions(). What
             is remembered has to pass the probe again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attention.probe import probe, select
from attention.resolve import BACKENDS, packages, resolve
from attention.spec import Backend, BackendUnavailable, Machine, Policy, Resolution, Spec
from inference.cache import PagedCache, PagedView, StaticCache, StaticView

log = logging.getLogger("nanoattn")

MARGIN = 0.02  # how much faster than auto's choice a rival must be
BUDGET_S = 1.0  # of samples, for each backend
TOO_SLOW = 5.0  # times the best so far
SAMPLE_S = 0.005  # a sample is as many calls as fill this, 20 at most
REMEMBERED = 100  # answers that the file holds

Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each


@dataclass(frozen=True)
class Timing:
    """What one backend did; a line of the table."""

    name: str
    ms: float | None = None  # median; None: it was not measured to the end
    error: float | None = None  # max |out - float64| over max |float64|, of the probe
    why: str = ""  # why it was dropped


class Inputs(NamedTuple):
    """What a model hands to attention."""

    qkv: Tensor  # (B, Tq, (H + 2 Hkv) D), the projection's output
    past: tuple[Tensor, Tensor] | None  # k, v (B, Tk, Hkv, D) where they are not all in qkv
    segments: Tensor | None  # (B, Tk) int32
    view: PagedView | StaticView | None  # of a cache that is the kernel's to read
    dout: Tensor  # (B, Tq, H D)


# ----------------------------------------------------------------------------- the choice


def fastest(spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy(), *,
            again: bool = False) -> Resolution:  # fmt: skip
    """The backend that is fastest here; remembered, or measured, which takes seconds.

    Call it as the run will call attention, inside its autocast if it has one. With
    torch.distributed rank 0 measures, and the others wait for what it found.

    Args:
        shape: sequences, queries and keys of a sequence: (B, T, T) in training, (B, 1, T) for
            decoding with a cache. Training has as many queries as keys.
        allow_mps_sdpa: lift the guard that keeps SDPA off Apple's Metal.
        again: measure even if the answer is remembered.

    Raises:
        BackendUnavailable: not even what "auto" begins with can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape
    allow_mps_sdpa = policy.mps_sdpa

    def take(name: str) -> Resolution:
        # auto names no kernel, so it may go on to another; a name that was measured may not.
        chosen = select(name, spec, device, replace(policy, fallback=name == "auto"),
                        shape=(shape[0], shape[2]))  # fmt: skip
        return replace(chosen, requested="fastest")

    def find() -> Resolution:
        machine = Machine.here(str(device), packages())
        key, path = conditions(spec, device, shape, machine, allow_mps_sdpa), memory()
        if not again and (found := recall(path, key)):
            try:
                chosen = take(found["backend"])
            except ValueError as e:  # refused now, or no longer there
                log.info(f"fastest: {found['backend']} is remembered, but {e}; measuring anew")
            else:
                log.info(f"fastest: {chosen.backend.name}, remembered from {found['date']}; "
                         f"delete {path} to measure again")  # fmt: skip
                return chosen
        rule = take("auto").backend.name
        began = perf_counter()
        timings = measure(rule, spec, device, shape, machine, allow_mps_sdpa)
        name = decide(timings, rule)
        log.info(table(timings, rule, name, spec, device, shape, perf_counter() - began))
        chosen = take(name)
        if any(t.ms for t in timings):
            remember(path, key, name, timings)
        return chosen

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return find()
    # By the processes' key-value store, not by a broadcast: rank 0 may ask alone, to write a
    # sample, and then must not wait for the others.
    store = dist.distributed_c10d._get_default_store()
    question = f"nanoattn/fastest/{spec}/{shape}"
    if dist.get_rank():
        return take(store.get(question).decode())
    name = "auto"  # what the others take if this fails, so that nobody waits
    try:
        chosen = find()
        name = chosen.backend.name
    finally:
        store.set(question, name)
    return chosen


def decide(timings: list[Timing], rule: str) -> str:
    """The name of the fastest; `rule`, what auto takes, where nothing beats it by MARGIN."""
    ms = {t.name: t.ms for t in timings if t.ms is not None}
    best = min(ms, key=lambda name: ms[name], default=rule)
    return rule if rule in ms and ms[best] > (1 - MARGIN) * ms[rule] else best


def refusals(backend: Backend, spec: Spec, machine: Machine,
             allow_mps_sdpa: bool = False) -> tuple[str, ...]:  # fmt: skip
    """Every reason why resolve() would not run `backend` itself; empty: it would."""
    try:
        found = resolve(backend.name, spec, machine, allow_mps_sdpa=allow_mps_sdpa)
    except BackendUnavailable:  # nothing at all is left
        return tuple(backend.why_not(spec, machine)) or ("it may not run here",)
    return found.rejected.get(backend.name, ())


def only_interpreted(backend: Backend, spec: Spec, machine: Machine) -> bool:
    """Whether all that would run is Triton's interpreter, thousands of times slower than a GPU."""
    rows = [c for c in backend.caps if not c.why_not(spec, machine)]
    return bool(rows) and all(c.interpreted for c in rows)


# ----------------------------------------------------------------------------- the measurement


def measure(rule: str, spec: Spec, device: str | torch.device, shape: Shape, machine: Machine,
            allow_mps_sdpa: bool = False) -> list[Timing]:  # fmt: skip
    """Try every backend, `rule` first, and time those that pass. The random state is left alone."""
    device = torch.device(device)
    tried: dict[str, Timing] = {}
    calls: dict[str, Callable[[], None]] = {}
    once: dict[str, float] = {}  # seconds of one call
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), memory_limit(device):
        inputs = draw(spec, device, shape)
        for name in [rule, *(n for n in BACKENDS if n != rule)]:
            backend = BACKENDS[name]
            why = refusals(backend, spec, machine, allow_mps_sdpa)
            if not why and only_interpreted(backend, spec, machine):
                why = ("Triton's interpreter is for tests, not for speed",)
            error = None
            if not why:
                found = probe(backend, spec, device)
                why, error = found.why, found.error
            if not why:
                call = work(backend, spec, inputs)
                try:
                    once[name] = warmed_up(call, device)
                except Exception as e:  # any failure of a kernel is its refusal, in its own words
                    why = (f"at this shape: {first_line(e)}",)
                    give_back(device)
                else:
                    best = min(once.values())
                    # A call that is a sample and more has to come near the best to be worth more.
                    limit = TOO_SLOW if once[name] < BUDGET_S else 1.25
                    if once[name] > limit * best:
                        times = once[name] / best
                        why = (f"{once[name] * 1e3:.3g} ms, {times:.1f} times the best so far",)
                    else:
                        calls[name] = call
            tried[name] = Timing(name, None, error, "; ".join(why))
        medians = race(calls, once, device)
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found_ms = {name: replace(tried[name], ms=1e3 * s) for name, s in medians.items()}
    return list({**tried, **found_ms}.values())


def race(calls: dict[str, Callable[[], None]], once: dict[str, float],
         device: torch.device) -> dict[str, float]:  # fmt: skip
    """Median seconds of each call, in rounds; each takes part until its budget is spent.

    Args:
        once: about how long one call takes, seconds.
    """
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
    """About how long a call takes, seconds: the least of 3, or of those that the budget allows."""
    seconds(call, device)  # compiles, loads, allocates
    samples = [seconds(call, device)]
    while len(samples) < 3 and sum(samples) < BUDGET_S:
        samples.append(seconds(call, device))
    return min(samples)


def seconds(call: Callable[[], None], device: torch.device, n: int = 1) -> float:
    """How long a call takes, the mean of n in a row."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # events are of the current device
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(n):
                call()
            end.record()
            torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / n
    synchronize = torch.mps.synchronize if device.type == "mps" else lambda: None
    synchronize()
    began = perf_counter()
    for _ in range(n):
        call()
    synchronize()
    return (perf_counter() - began) / n


def draw(spec: Spec, device: torch.device, shape: Shape) -> Inputs:
    """Random inputs with the strides that a model gives them."""
    B, Tq, Tk = shape
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, spec.dtype)}
    qkv = torch.randn(B, Tq, (H + 2 * Hkv) * D, **kind).requires_grad_(spec.grad)
    past = None
    view: PagedView | StaticView | None = None
    if spec.cache == "paged":
        size = spec.page_size or 1
        pages = PagedCache(1, Hkv, D, n_pages=B * -(-Tk // size) + 1, page_size=size, **kind)
        pages.k.normal_()
        pages.v.normal_()
        rows = [pages.pool.new() for _ in range(B)]
        if Tq < Tk:
            pages.reserve(rows, [Tk - Tq] * B).advance()
        view = pages.reserve(rows, [Tq] * B).view(0)
    elif spec.cache == "static":
        static = StaticCache(1, B, Tk, Hkv, D, **kind)
        for t in (*static.k, *static.v):
            t.normal_()
        if Tq < Tk:
            static.reserve(Tk - Tq).advance()
        view = replace(static.reserve(Tq).view(0), first=False)
    elif Tq != Tk:
        past = torch.randn(B, Tk, Hkv, D, **kind), torch.randn(B, Tk, Hkv, D, **kind)
    segments = None
    if spec.segments:  # two documents
        segments = (torch.arange(Tk, device=device) >= Tk // 2).int().expand(B, Tk).contiguous()
    return Inputs(qkv, past, segments, view, torch.randn(B, Tq, H * D, **kind))


def work(backend: Backend, spec: Spec, inputs: Inputs) -> Callable[[], None]:
    """One attention call as the model makes it, with the backward where spec.grad asks for it."""
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    attend = backend.attend

    def forward(qkv: Tensor, past: tuple[Tensor, Tensor] | None, segments: Tensor | None,
                view: PagedView | StaticView | None) -> Tensor:  # fmt: skip
        q, k, v = qkv.split([H * D, Hkv * D, Hkv * D], dim=2)
        q, k, v = (t.unflatten(2, (-1, D)) for t in (q, k, v))
        if past is not None:
            k, v = past
        return attend(q, k, v, spec, segments=segments, cache=view).flatten(2)

    run: Any = forward
    if spec.compiled:
        # A code object of its own: the compiler counts and limits recompilations by it, and would
        # leave the ninth backend uncompiled.
        code = forward.__code__.replace(co_name=f"forward_{backend.name}")
        own = FunctionType(code, globals(), code.co_name, None, forward.__closure__)
        run = torch.compile(own, dynamic=False)
    qkv, past, segments, view, dout = inputs

    def call() -> None:
        with torch.set_grad_enabled(spec.grad):
            out = run(qkv, past, segments, view)
            if spec.grad:
                torch.autograd.grad(out, qkv, dout)

    return call


@contextlib.contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """On Linux and the CPU: no more memory than is free now; an error is raised beyond that.

    Linux promises more memory than it has, and ends the process that takes it at its word. With a
    limit on the address space the allocation itself fails, and PyTorch raises.
    """
    free = free_memory() if device.type == "cpu" else None
    if free is None:
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + free
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def free_memory() -> int | None:
    """Bytes of main memory that may still be taken; None where that is not known.

    The machine's, or what is left of a container's limit (cgroup version 2).
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # not in a container, or "max": no limit
        used = int((group / "memory.current").read_text(encoding="ascii"))
        free = min(free, int((group / "memory.max").read_text(encoding="ascii")) - used)
    return max(free, 0)


def give_back(device: torch.device) -> None:
    """Return to the device what PyTorch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def first_line(e: Exception) -> str:
    """What an exception says, its first line."""
    return (str(e).strip() or type(e).__name__).splitlines()[0]


# ----------------------------------------------------------------------------- what is said


def table(timings: list[Timing], rule: str, name: str, spec: Spec, device: str | torch.device,
          shape: Shape, took: float) -> str:  # fmt: skip
    """The lines of the log: what was measured, every backend, and why it is `name`."""
    B, Tq, Tk = shape
    tokens = f"{Tq:,} tokens" if Tq == Tk else f"{Tq:,} queries and {Tk:,} keys"
    passes = "forward and backward" if spec.grad else "forward"
    compiled = ", compiled" if spec.compiled else ""
    lines = [f"fastest: {passes} of one attention call, batch {B}, {tokens}, {spec.dtype}"
             f"{compiled}, on {device} ({took:.1f} s)"]  # fmt: skip
    known = {t.name: t.ms for t in timings if t.ms is not None}
    wide = max(len(t.name) for t in timings)
    lines.append(f"{'':{wide}}{'ms':>10}{f'to {rule}':>{max(9, len(rule) + 5)}}{'error':>10}")
    for t in sorted(timings, key=lambda t: (t.ms is None, t.ms or 0.0)):
        if t.ms is None:
            lines.append(f"{t.name:{wide}}  {t.why}")
            continue
        ratio = f"{t.ms / known[rule]:.3f}" if rule in known else "-"
        lines.append(
            f"{t.name:{wide}}{t.ms:>10.3f}{ratio:>{max(9, len(rule) + 5)}}{t.error or 0.0:>10.1e}"
        )
    if not known:
        why = "nothing could be measured; auto's choice"
    elif name == rule:
        why = f"auto's choice, which no other beats by {MARGIN:.0%}"
    elif rule in known:
        why = f"{1 - known[name] / known[rule]:.1%} less time than auto's {rule}"
    else:
        why = f"auto's {rule} could not be measured"
    return "\n      ".join([*lines, f"chosen: {name} ({why})"])


# ----------------------------------------------------------------------------- what is remembered


def memory() -> Path:
    """The file that remembers."""
    if own := os.environ.get("NANOATTN_CACHE"):
        return Path(own) / "fastest.json"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "nanoattn" / "fastest.json"


def conditions(spec: Spec, device: str | torch.device, shape: Shape, machine: Machine,
               allow_mps_sdpa: bool = False) -> dict[str, Any]:  # fmt: skip
    """Everything that could change the answer, as JSON knows it."""
    kind = torch.device(device).type
    # "FA2", "FA3" or "FA4": which kernel PyTorch's own flash attention is; newer than torch 2.5.
    flash = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    found = {
        "machine": asdict(machine),
        "spec": asdict(spec),
        "shape": shape,
        "threads": torch.get_num_threads() if kind == "cpu" else None,
        "autocast": torch.is_autocast_enabled(kind),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if kind == "cuda" else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flash": str(flash()),
        "allow_mps_sdpa": allow_mps_sdpa,
        "code": code_version(),
    }
    return json.loads(json.dumps(found))


def code_version() -> str:
    """A hash of the files of attention/, so that an edited kernel is measured anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def recall(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The answer under `key`: its backend and date. None where there is none."""
    return next((e for e in entries(path) if e["key"] == key), None)


def entries(path: Path) -> list[dict[str, Any]]:
    """All answers in the file, the newest first; none where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(e[field], kind) for e in found for field, kind in
                   (("key", dict), ("backend", str), ("date", str))):  # fmt: skip
            raise ValueError("it is not what was written there")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning(f"fastest: {path} cannot be read ({e}); measuring anew")
        return []
    return found


def remember(path: Path, key: dict[str, Any], name: str, timings: list[Timing]) -> None:
    """Put an answer into the file, in one step; a file that cannot be written is a warning."""
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    ms = {t.name: round(t.ms, 4) for t in timings if t.ms is not None}
    entry = {"backend": name, "date": now, "ms": ms, "key": key}
    kept = [entry, *(e for e in entries(path) if e["key"] != key)][:REMEMBERED]
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
        ) as f:
            temporary = f.name
            json.dump(kept, f, indent=1)
        os.replace(temporary, path)
    except OSError as e:
        log.warning(f"fastest: the answer is not remembered: {path} cannot be written ({e})")
        if temporary:
            Path(temporary).unlink(missing_ok=True)
