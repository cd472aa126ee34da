"""What runs here, what does not and why, and how fast and how exact it is.

    python -m attention                                   every backend on this machine
    python -m attention sdpa_flash --dtype=float32        explain one decision
    python -m attention flash_attn_2 --as="NVIDIA TITAN RTX"    what would run there?
    python -m attention --as=h100                         every backend there
    python -m attention check my_kernel.py                prove a kernel; check --help: options
    python -m attention --help                            all options

The times are of one attention call at the given shape, not of a model; bench_mfu.py measures those.
The error is max|out - float64| over max|float64|, from the probe. For a machine that is only
described nothing is run: what the backends declare decides.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and (sys.argv[1:2] == ["check"] or __package__ == "nanoattn"):
    # Before the imports below, of what pip does not install.
    if sys.argv[1:2] != ["check"]:
        sys.exit("python -m nanoattn has one command, check; all else is in a checkout of the "
                 "project: python -m attention")  # fmt: skip
    from .check import main as check

    sys.exit(check(sys.argv[2:]))

import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.runtime import pick_device, show_log
from core.settings import UserError, exit_on_user_error, read

from . import autotune
from .autotune import Shape, draw, seconds, work
from .gpus import describe
from .probing import Probe, probe
from .select import BACKENDS, RULES, packages, resolve, select
from .spec import Backend, BackendUnavailable, Machine, Policy, Spec, dotted
from .system import first_line

ALIASES = {
    "as": "machine",  # a keyword in Python, so no name for a field
    # The reasons use the names of train.py and sample.py.
    "attention_window": "window",
    "attention_hub_kernels": "hub_kernels",
}
Dtype = Literal["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True)
class Options:
    # The docstring is set below: it names the backends.

    backend: str | None = None  # explain the choice of this name or file; none: measure all
    # --- where ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Dtype | None = None  # of inputs and output (None: the GPU's best half, else float32)
    allow_mps_sdpa: bool = False  # let PyTorch's SDPA run on Apple's Metal

    # --- another machine: nothing is run, it is only described ---
    machine: str | None = None  # its name, --as: "NVIDIA TITAN RTX", 4090, h100, "apple m3", cpu

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
    scale: float | None = None  # of the scores (None: 1/sqrt(head_dim))
    softcap: float | None = None  # c: scores become c * tanh(s / c) (None: they stay)
    sinks: bool = False  # a logit a head in the softmax's denominator, without a value
    lse: bool = False  # in parts, joined by L: what --context_parallel of train.py needs
    inference: bool = False  # no backward pass
    kv_cache: Literal["none", "dynamic", "static", "paged"] = "none"  # inference with this cache
    page_size: int | None = None  # tokens a page of the paged cache (None: 256)
    deterministic: bool = False  # under torch.use_deterministic_algorithms(True)
    compiled: bool = False  # inside torch.compile
    hub_kernels: bool = False  # a prebuilt kernel may be downloaded, and run

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.page_size is not None and self.kv_cache != "paged":
            raise ValueError("page_size belongs to the paged cache (--kv_cache=paged)")
        if self.machine is not None and self.device != "auto":
            raise ValueError("--device is of this machine; leave it out with --as")
        if self.machine is not None and self.backend == "fastest":
            raise ValueError("what is fastest has to be measured there; ask for auto, or a name")
        self.spec("float32")  # checks the rest

    def spec(self, dtype: str) -> Spec:
        """The Spec that these options ask for."""
        asked = {f.name: getattr(self, f.name) for f in fields(Spec) if hasattr(self, f.name)}
        asked |= {"dtype": dtype, "cache": self.kv_cache}
        asked["grad"] = not self.inference and self.kv_cache == "none"
        if self.n_kv_head is None:
            asked["n_kv_head"] = self.n_head
        if self.kv_cache == "paged":
            asked["page_size"] = self.page_size or 256
        return Spec(**asked)

    @property
    def policy(self) -> Policy:
        return Policy(hub_kernels=self.hub_kernels, mps_sdpa=self.allow_mps_sdpa)

    @property
    def shape(self) -> Shape:
        """Sequences, queries and keys; with a cache one query, as in decoding."""
        queries = self.seq_len if self.kv_cache == "none" else 1
        return self.batch_size or 1, queries, self.seq_len


Options.__doc__ = f"""What is asked of attention, and on which device. The backends:
{", ".join([*RULES, *BACKENDS])}."""


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
    notes: tuple[str, ...] = ()  # why it was not timed, or without the backward


def best_dtype(machine: Machine) -> str:
    """train.py's default there, except on a CPU: the rule of runtime.pick_dtype."""
    if machine.device != "cuda":
        return "float32"
    return "bfloat16" if (machine.capability or (0, 0)) >= (8, 0) else "float16"


# --- this machine ---


def declared(backend: Backend, spec: Spec, machine: Machine, options: Options) -> Row:
    """What the backend says of itself; nothing is run."""
    why = autotune.refusals(backend, spec, machine, options.policy)
    return Row(backend.name, backend.title, why)


def measure(backend: Backend, spec: Spec, machine: Machine, options: Options) -> Row:
    """Resolve, probe and time one backend; only the forward if it has no backward."""
    row = declared(backend, spec, machine, options)
    forward = declared(backend, replace(spec, grad=False), machine, options)
    if row.why and not forward.why:
        row, spec = replace(forward, notes=row.why), replace(spec, grad=False)
    if row.why:
        return row
    device = str(pick_device(options.device))
    slow = autotune.only_interpreted(backend, spec, machine)
    # The probe holds all scores in float64: only as long as needed to see the kernel.
    T = 64 if slow else min(max(options.seq_len, 64), 512)
    tried = probe(backend, spec, device, T)
    if tried.why:
        return replace(row, why=tried.why)
    row = replace(row, kernels=kernel_names(tried), error=tried.error)
    if slow:
        return replace(row, notes=(*row.notes, "Triton's interpreter, for tests: not timed"))
    try:
        inputs = draw(spec, torch.device(device), options.shape)
        ms = median_ms(work(backend, replace(spec, grad=False), inputs), device)
        both_ms = median_ms(work(backend, spec, inputs), device) if spec.grad else None
    except RuntimeError as e:  # usually out of memory; PyTorch's message says so
        return Row(backend.name, backend.title, (f"at this shape: {first_line(e)}",))
    return replace(row, forward_ms=ms, forward_backward_ms=both_ms)


def kernel_names(tried: Probe) -> tuple[str, ...]:
    """What ran in the probe: PyTorch's kernels, else another library's operators."""
    of_torch = "aten|prims|autograd|c10d|mkldnn|inductor"
    names = [e for e in tried.events if re.fullmatch(rf"(?!({of_torch})::)\w+::\w+", e)]
    if not names and any(e.startswith("Torch-Compiled Region") for e in tried.events):
        names = ["by torch.compile"]
    return tried.kernels or tuple(name.partition("::")[2] or name for name in names)


def median_ms(call: Callable[[], None], device: str) -> float:
    """The median of 3 to 100 calls, about half a second in all, after two for warming up."""
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < 0.5 and len(taken) < 102):
        taken.append(seconds(call, torch.device(device)))
    return statistics.median(taken[2:]) * 1e3


def survey(spec: Spec, machine: Machine, options: Options) -> None:
    """Print what runs and what does not: measured here, or as declared for another machine."""
    there = options.machine is not None
    console, rows = Console(stderr=True), []
    for backend in BACKENDS.values():
        status = console.status(f"measuring {backend.name}")
        with status if console.is_terminal and not there else nullcontext():
            rows.append((declared if there else measure)(backend, spec, machine, options))
    show(rows, spec, machine, options)
    if there:
        try:
            takes = f" takes {resolve('auto', spec, machine, options.policy).backend.name} there."
        except BackendUnavailable as e:
            takes = f": {e}"
        print(f"\nauto{takes}")


def explain(name: str, spec: Spec, machine: Machine, options: Options) -> None:
    """Print what a run with the backend `name` would say and do, here or on that machine."""
    try:
        if options.machine is not None:
            chosen = resolve(name, spec, machine, options.policy)
            say_where(machine, spec, options)
            print()
        elif name == "fastest":
            show_log()
            device = pick_device(options.device)
            chosen = autotune.fastest(spec, device, options.shape, options.policy)
        else:
            chosen = select(name, spec, pick_device(options.device), options.policy)
    except ValueError as e:  # an unknown name, or nothing that may run
        raise UserError(str(e)) from None
    print(chosen)


# --- what is printed ---


def say_where(machine: Machine, spec: Spec, options: Options) -> None:
    """Print the machine and the shape, and for another machine what was assumed."""
    console = Console(highlight=False)
    software = f"torch {machine.torch}" + (f", CUDA {machine.cuda}" if machine.cuda else "")
    if machine.capability:
        software = f"compute capability {dotted(machine.capability)}, " + software
    console.print(Text(f"{machine.name} ({machine.device}), {software}", style="bold"))
    groups = f" over {spec.n_kv_head} key/value heads" if spec.n_kv_head != spec.n_head else ""
    pages = f" of {spec.page_size}" if spec.page_size else ""
    said = {
        f"batch {options.batch_size}": True,
        f"{options.seq_len} tokens": True,
        f"{spec.n_head} heads{groups} of {spec.head_dim}": True,
        f"{spec.dtype}, causal": True,
        f"window {spec.window}": spec.window,
        f"dropout {spec.dropout:g}": spec.dropout,
        "2 segments": spec.segments,
        f"scale {spec.softmax_scale:g}": spec.scale,
        f"softcap {spec.softcap or 0:g}": spec.softcap,
        "sinks": spec.sinks,
        "in parts": spec.lse,
        "inference": not spec.grad,
        f"{spec.cache} cache{pages}": spec.cache != "none",
        "one query": options.shape[1] < options.seq_len,
        "deterministic": machine.deterministic,
        "compiled": spec.compiled,
    }
    console.print(Text(", ".join(text for text, holds in said.items() if holds)))
    if options.machine is not None:
        rows = (c for b in BACKENDS.values() for c in b.caps)
        asked = [c for c in rows if machine.device in c.devices and not c.interpreted]
        wanted = {p.partition(">=")[0] for c in asked for p in c.packages}
        has = [p for p in machine.packages if p in wanted]
        there = f", with {', '.join(has)} installed" if has else ""
        console.print(Text(f"Nothing was run: this is what the backends declare{there}."))


def show(rows: Sequence[Row], spec: Spec, machine: Machine, options: Options) -> None:
    """Print the table of what runs, and below it what does not, with every reason."""
    say_where(machine, spec, options)
    there = options.machine is not None
    notes: dict[str, list[str]] = {}
    runs, does_not = (Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)) for _ in range(2))
    for table, title in ((runs, f"runs {'there' if there else 'here'}"), (does_not, "does not")):
        table.add_column(title, no_wrap=True, min_width=max(len(row.name) for row in rows))
    does_not.add_column("why", overflow="fold")  # never cut a path short
    if there:
        runs.add_column("what it is", overflow="fold")
    else:
        runs.add_column("kernel", no_wrap=True, overflow="ellipsis", max_width=26)
        for title in ("forward ms", "fwd+bwd ms", "error"):
            runs.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row.why:
            does_not.add_row(row.name, Text("\n".join(row.why)))
        elif there:
            runs.add_row(row.name, row.title)
        else:
            times = row.forward_ms, row.forward_backward_ms
            ms = ("-" if t is None else f"{t:.2f}" for t in times)
            runs.add_row(row.name, ", ".join(row.kernels) or "-", *ms, f"{row.error:.1e}")
        for note in () if row.why else row.notes:
            notes.setdefault(note, []).append(row.name)
    console = Console(highlight=False, markup=False)
    if runs.row_count:
        console.print("", runs, sep="\n")
    for note, names in notes.items():
        console.print(Text(f"- {', '.join(names)}: {note}"))
    if does_not.row_count:
        console.print("", does_not, sep="\n")


# --- the entry ---


def main(argv: Sequence[str]) -> None:
    """Read the options, then explain one backend or survey all."""
    options = read(Options, argv, aliases=ALIASES, positional="backend").settings
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it
        torch.use_deterministic_algorithms(True)
    try:
        needed = packages(options.backend or "")
        if options.machine is None:
            machine = Machine.here(str(pick_device(options.device)), needed)
        else:
            there = describe(options.machine, torch.__version__.partition("+")[0], needed)
            machine = replace(there, deterministic=options.deterministic)
    except ValueError as e:  # an unknown machine, or a file that defines no backend
        raise UserError(str(e)) from None
    spec = options.spec(options.dtype or best_dtype(machine))
    batch_size = options.batch_size or (16 if machine.device == "cuda" else 1)
    options = replace(options, batch_size=batch_size)
    if options.backend is not None:
        explain(options.backend, spec, machine, options)
    else:
        survey(spec, machine, options)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
