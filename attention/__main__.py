"""What runs here, what does not and why, and how fast and how exact it is.

    python -m attention                                   every backend on this machine
    python -m attention sdpa_flash --dtype=float32        explain one decision
    python -m attention flash_attn_2 --as="NVIDIA TITAN RTX"    what would run there?
    python -m attention --as=h100 --packages=none         every backend there
    python -m attention --help                            all options

The times are of one attention call at the shape that is given, not of a model; bench_mfu.py
measures those. The error is max|out - float64| over max|float64|, as the probe found it. For a
machine that is only described nothing is run: what the backends declare decides.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch as pytorch  # Options has a field named torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attention import autotune
from attention.machines import describe
from attention.probe import Probe, probe, select
from attention.resolve import BACKENDS, RULES, get, packages, resolve
from attention.spec import (
    Backend,
    BackendUnavailable,
    Machine,
    Resolution,
    Spec,
    dotted,
    version,
)
from core.runtime import pick_device, show_log
from core.settings import UserError, exit_on_user_error, read

ALIASES = {
    "as": "machine",  # which can be no field: it is a word of Python's
    # What the reasons name, as train.py and sample.py call it.
    "attention_window": "window",
    "attention_deterministic": "deterministic",
    "attention_hub_kernels": "hub_kernels",
}


@dataclass(frozen=True)
class Options:
    """What is asked of attention, and on which device."""

    backend: str | None = None  # explain the choice of this one; none: measure all of them
    # --- where ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = (
        None  # of the inputs and the output (None: the GPU's best half, else float32)
    )
    allow_mps_sdpa: bool = False  # let PyTorch's SDPA run on Apple's Metal

    # --- another machine: nothing is run, it is only described ---
    machine: str | None = None  # its name: "NVIDIA TITAN RTX", 4090, h100, "apple m3", cpu
    capability: str | None = None  # its CUDA compute capability, 8.9, if the name is not known
    torch: str | None = None  # its PyTorch version, 2.13 (None: as here)
    cuda: str | None = None  # its CUDA version, 12.8
    packages: str = "all"  # what is installed there: all, none, or flash_attn=2.8.3,triton=3.6

    # --- shape; the defaults are GPT-2 124M's ---
    batch_size: int | None = None  # sequences (None: 16 on cuda, else 1)
    seq_len: int = 1024  # tokens a sequence, queries and keys alike
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key and value heads (None: as many as n_head)
    head_dim: int = 64  # numbers a head

    # --- what else ---
    window: int | None = None  # keys that a query sees, itself included (None: all)
    dropout: float = 0.0  # on the attention probabilities
    segments: bool = False  # two documents a sequence that do not see each other
    inference: bool = False  # no backward pass
    kv_cache: Literal["none", "dynamic", "static", "paged"] = "none"  # inference with this cache
    page_size: int | None = None  # tokens a page of the paged cache (None: 256)
    deterministic: bool = False  # the backward gives the same bits each time
    compiled: bool = False  # inside torch.compile
    hub_kernels: bool = False  # a prebuilt kernel may be downloaded, and run
    json: bool = False  # print one JSON object and nothing else

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.page_size is not None and self.kv_cache != "paged":
            raise ValueError("page_size belongs to the paged cache (--kv_cache=paged)")
        if not self.described:
            for name in ("torch", "cuda", "packages"):
                if getattr(self, name) not in (None, "all"):
                    raise ValueError(
                        f"--{name} describes another machine; say which, with --as=... or "
                        "--capability=..."
                    )
        elif self.device != "auto":
            raise ValueError("--device is of this machine; leave it out with --as or --capability")
        self.spec("float32")  # checks the rest

    @property
    def described(self) -> bool:
        """Whether the machine is another one than this."""
        return self.machine is not None or self.capability is not None

    def spec(self, dtype: str) -> Spec:
        """The Spec that these options ask for."""
        n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        page_size = (self.page_size or 256) if self.kv_cache == "paged" else None
        return Spec(self.n_head, n_kv_head, self.head_dim, dtype, window=self.window,
                    dropout=self.dropout, segments=self.segments,
                    grad=not self.inference and self.kv_cache == "none", cache=self.kv_cache,
                    page_size=page_size, compiled=self.compiled,
                    deterministic=self.deterministic, hub_kernels=self.hub_kernels)  # fmt: skip

    @property
    def shape(self) -> autotune.Shape:
        """Sequences, queries and keys; a cache is measured while decoding, one token."""
        queries = self.seq_len if self.kv_cache == "none" else 1
        return self.batch_size or 1, queries, self.seq_len


@dataclass(frozen=True)
class Row:
    """One backend at one shape; times in milliseconds."""

    name: str
    title: str
    why: tuple[str, ...]  # why it does not run here; empty: it does
    kernels: tuple[str, ...] = ()
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    error: float | None = None
    no_backward: tuple[str, ...] = ()  # why it was not timed with its backward
    untimed: str = ""  # why it was not timed at all


def best_dtype(machine: Machine) -> str:
    """What train.py takes there if it is not told: runtime.pick_dtype's rule."""
    if machine.device != "cuda":
        return "float32"
    return "bfloat16" if (machine.capability or (0, 0)) >= (8, 0) else "float16"


# ----------------------------------------------------------------------------- this machine


def measure(backend: Backend, spec: Spec, machine: Machine, device: str, options: Options) -> Row:
    """Resolve, probe and time one backend; forward only where it has no backward."""
    row = Row(backend.name, backend.title, ())
    why = autotune.refusals(backend, spec, machine, options.allow_mps_sdpa)
    if why and spec.grad:
        forward_only = replace(spec, grad=False)
        if not autotune.refusals(backend, forward_only, machine, options.allow_mps_sdpa):
            row, spec, why = replace(row, no_backward=why), forward_only, ()
    if why:
        return replace(row, why=why)
    slow = autotune.only_interpreted(backend, spec, machine)
    # The probe holds all scores in float64: no longer than it takes to see the kernel.
    tried = probe(backend, spec, device, T=min(options.seq_len, 64 if slow else 512))
    if tried.why:
        return replace(row, why=tried.why)
    row = replace(row, kernels=kernel_names(tried), error=tried.error)
    if slow:
        return replace(row, untimed="Triton's interpreter, for tests: not timed")
    try:
        forward, both = times(backend, spec, device, options)
    except RuntimeError as e:  # out of memory, as a rule; PyTorch's own words say it
        why = (f"at this shape: {str(e).splitlines()[0]}",)
        return Row(backend.name, backend.title, why)
    return replace(row, forward_ms=forward, forward_backward_ms=both)


def kernel_names(tried: Probe) -> tuple[str, ...]:
    """What ran in the probe: a kernel of PyTorch's, else another library's operators."""
    names = [e for e in tried.events if re.fullmatch(r"(?!aten|prims|autograd|c10d)\w+::\w+", e)]
    if not names and any(e.startswith("Torch-Compiled Region") for e in tried.events):
        names = ["by torch.compile"]
    return tried.kernels or tuple(name.partition("::")[2] or name for name in names)


def times(
    backend: Backend, spec: Spec, device: str, options: Options
) -> tuple[float, float | None]:
    """Median milliseconds of a forward pass without gradients, and of forward and backward."""
    inputs = autotune.draw(spec, pytorch.device(device), options.shape)
    forward = median_ms(autotune.work(backend, replace(spec, grad=False), inputs), device)
    if not spec.grad:
        return forward, None
    return forward, median_ms(autotune.work(backend, spec, inputs), device)


def median_ms(call: Callable[[], None], device: str) -> float:
    """The median of 3 to 100 calls, about half a second of them, after two that are not counted."""
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < 0.5 and len(taken) < 102):
        taken.append(autotune.seconds(call, pytorch.device(device)))
    return statistics.median(taken[2:]) * 1e3


def explain(name: str, spec: Spec, machine: Machine, device: str | None, options: Options) -> None:
    """Print what a run that asks for `name` would say, and do; device None: on that machine."""
    guard = options.allow_mps_sdpa
    try:
        if device is None:
            chosen = resolve(name, spec, machine, allow_mps_sdpa=guard)
        elif name == "fastest":
            if not options.json:
                show_log()
            chosen = autotune.fastest(spec, device, options.shape, allow_mps_sdpa=guard)
        else:
            chosen = select(name, spec, device, allow_mps_sdpa=guard)
    except ValueError as e:  # an unknown name, or nothing that may run
        raise UserError(str(e)) from None
    if options.json:
        print(json.dumps({**decision(chosen), **assumed(machine, spec, device)}))
        return
    if device is None:
        say_where(machine, spec, options)
        print()
    print(chosen)


def decision(chosen: Resolution) -> dict[str, Any]:
    """A Resolution as JSON."""
    rejected = {n: list(why) for n, why in chosen.rejected.items()}
    return {"requested": chosen.requested, "backend": chosen.backend.name, "rejected": rejected,
            "kernels": list(chosen.kernels)}  # fmt: skip


# ----------------------------------------------------------------------------- another machine


def assumed(machine: Machine, spec: Spec, device: str | None) -> dict[str, Any]:
    """What a decision was made from, as JSON; nothing for this machine."""
    return {} if device else {"machine": asdict(machine), "spec": asdict(spec), "run": False}


def say_where(machine: Machine, spec: Spec, options: Options) -> None:
    """Print the machine and the shape, and, of one that is not this one, what was assumed."""
    console = Console(highlight=False)
    software = f"torch {machine.torch}" + (f", CUDA {machine.cuda}" if machine.cuda else "")
    if machine.capability:
        software = f"compute capability {dotted(machine.capability)}, " + software
    console.print(Text(f"{machine.name} ({machine.device}), {software}", style="bold"))
    _, queries, _ = options.shape
    shape = f"batch {options.batch_size}, {options.seq_len} tokens, {spec.n_head} heads"
    if spec.n_kv_head != spec.n_head:
        shape += f" over {spec.n_kv_head} key/value heads"
    shape += f" of {spec.head_dim}, {spec.dtype}, causal"
    shape += f", window {spec.window}" if spec.window else ""
    shape += f", dropout {spec.dropout:g}" if spec.dropout else ""
    shape += ", 2 segments" if spec.segments else ""
    shape += "" if spec.grad else ", inference"
    if spec.cache != "none":
        shape += f", {spec.cache} cache" + (f" of {spec.page_size}" if spec.page_size else "")
    shape += ", one query" if queries < options.seq_len else ""
    shape += ", deterministic" if spec.deterministic else ""
    shape += ", compiled" if spec.compiled else ""
    console.print(Text(shape))
    if options.described:
        rows = (c for b in BACKENDS.values() for c in b.caps)
        asked = [c for c in rows if machine.device in c.devices and not c.interpreted]
        wanted = {p.partition(">=")[0] for c in asked for p in c.packages}
        has = [f"{p} {v}" if version(v) else p for p, v in machine.packages.items() if p in wanted]
        there = f", with {', '.join(has) or 'no packages'} installed (--packages)" if wanted else ""
        console.print(Text(f"Nothing was run: this is what the backends declare{there}."))


def survey_there(spec: Spec, machine: Machine, options: Options) -> None:
    """Print, for a machine that is only described, what would run there and what not."""
    rows = [
        Row(b.name, b.title, autotune.refusals(b, spec, machine, options.allow_mps_sdpa))
        for b in BACKENDS.values()
    ]
    auto: Resolution | None = None
    try:
        auto = resolve("auto", spec, machine, allow_mps_sdpa=options.allow_mps_sdpa)
        takes = f"auto takes {auto.backend.name} there."
    except BackendUnavailable as e:
        takes = f"auto: {e}"
    if options.json:
        backends = [{"name": r.name, "title": r.title, "why": r.why} for r in rows]
        found = {"backends": backends, "auto": auto and decision(auto)}
        print(json.dumps({**assumed(machine, spec, None), **found}))
        return
    say_where(machine, spec, options)
    runs = table("runs there", "what it is", rows=rows)
    does_not = table("does not", "why", rows=rows)
    for row in rows:
        if row.why:
            does_not.add_row(row.name, Text("\n".join(row.why)))
        else:
            runs.add_row(row.name, row.title)
    show_tables(runs, does_not)
    print(f"\n{takes}")


# ----------------------------------------------------------------------------- what is shown


def table(*titles: str, rows: Sequence[Row]) -> Table:
    """An empty table whose first column is as wide as the longest name, whose last one folds."""
    wide = max(len(row.name) for row in rows)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(titles[0], no_wrap=True, min_width=wide)
    for title in titles[1:]:
        made.add_column(title, overflow="fold")  # a path that is cut short helps nobody
    return made


def show_tables(*tables: Table) -> None:
    """Print those that have rows, an empty line before each."""
    console = Console(highlight=False)
    for made in tables:
        if made.row_count:
            console.print()
            console.print(made)


def show(rows: Sequence[Row], spec: Spec, machine: Machine, options: Options) -> None:
    """Print the table of what runs, and below it what does not, with every reason."""
    say_where(machine, spec, options)
    runs, does_not = table("runs here", rows=rows), table("does not", "why", rows=rows)
    runs.add_column("kernel", no_wrap=True, overflow="ellipsis", max_width=26)
    for title in ("forward ms", "fwd+bwd ms", "error"):
        runs.add_column(title, justify="right", no_wrap=True)
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            does_not.add_row(row.name, Text("\n".join(row.why)))
            continue
        ms = ("-" if t is None else f"{t:.2f}" for t in (row.forward_ms, row.forward_backward_ms))
        runs.add_row(row.name, ", ".join(row.kernels) or "-", *ms, f"{row.error:.1e}")
        for note in (*row.no_backward, *([row.untimed] if row.untimed else [])):
            notes.setdefault(note, []).append(row.name)
    show_tables(runs)
    for note, names in notes.items():
        Console(highlight=False).print(Text(f"- {', '.join(names)}: {note}"))
    show_tables(does_not)


# ----------------------------------------------------------------------------- the entry


def main(argv: Sequence[str]) -> None:
    """Read the options, and explain one backend or go through all."""
    names = f"backends: {', '.join([*RULES, *BACKENDS])}"
    options = read(Options, argv, aliases=ALIASES, positional="backend", epilog=names).settings
    name = options.backend
    try:
        if name is not None and name not in RULES:
            get(name)
        if options.described and name == "fastest":
            raise ValueError("what is fastest has to be measured there; ask for auto, or a name")
        if options.described:
            torch = options.torch or pytorch.__version__.partition("+")[0]
            machine = describe(options.machine, options.capability, torch, options.cuda,
                               options.packages, packages())  # fmt: skip
    except ValueError as e:
        raise UserError(str(e)) from None
    device = None
    if not options.described:
        device = str(pick_device(options.device))
        machine = Machine.here(device, packages())
    spec = options.spec(options.dtype or best_dtype(machine))
    batch_size = options.batch_size or (16 if machine.device == "cuda" else 1)
    options = replace(options, batch_size=batch_size)
    if name is not None:
        explain(name, spec, machine, device, options)
    elif device is None:
        survey_there(spec, machine, options)
    else:
        survey(spec, machine, device, options)


def survey(spec: Spec, machine: Machine, device: str, options: Options) -> None:
    """Measure every backend on this machine, and print what was found."""
    rows = []
    console = Console(stderr=True)
    for backend in BACKENDS.values():
        quiet = options.json or not console.is_terminal
        with nullcontext() if quiet else console.status(f"measuring {backend.name}"):
            rows.append(measure(backend, spec, machine, device, options))
    if options.json:
        shape = {"batch_size": options.batch_size, "seq_len": options.seq_len}
        found: dict[str, Any] = {"machine": asdict(machine), "spec": asdict(spec), **shape}
        print(json.dumps({**found, "backends": [asdict(row) for row in rows]}))
    else:
        show(rows, spec, machine, options)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
