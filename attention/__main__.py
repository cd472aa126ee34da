"""What runs here, what does not and why, and how fast and how exact it is.

    python -m attention                                   every backend on this machine
    python -m attention sdpa_flash --dtype=float32        explain one decision
    python -m attention --help                            all options

The times are of one attention call at the shape that is given, not of a model; bench_mfu.py
measures those. The error is max|out - float64| over max|float64|, as the probe found it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attention.probe import probe, select
from attention.resolve import BACKENDS, BackendUnavailable, get, packages, resolve
from attention.spec import DTYPES, Backend, Machine, Spec
from settings import UserError, exit_on_user_error, help_text, read

USAGE = "usage: python -m attention [backend] [--name=value ...]"


@dataclass(frozen=True)
class Options:
    """What is asked of attention, and on which device."""

    # --- where ---
    device: str | None = None  # cpu, mps, cuda or cuda:N (None: cuda if there, else mps, else cpu)
    # of the inputs and the output (None: bfloat16 on cuda, else float32)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    allow_mps_sdpa: bool = False  # let PyTorch's SDPA run on Apple's Metal

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
    json: bool = False  # print one JSON object and nothing else

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.spec("float32")  # checks the rest

    def spec(self, dtype: str) -> Spec:
        """The Spec that these options ask for."""
        n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        return Spec(self.n_head, n_kv_head, self.head_dim, dtype, window=self.window,
                    dropout=self.dropout, segments=self.segments)  # fmt: skip


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


def measure(backend: Backend, spec: Spec, machine: Machine, device: str, options: Options) -> Row:
    """Resolve, probe and time one backend."""
    why: tuple[str, ...]
    try:
        found = resolve(backend.name, spec, machine, allow_mps_sdpa=options.allow_mps_sdpa)
        why = found.rejected.get(backend.name, ())
    except BackendUnavailable as e:
        why = (str(e),)
    if why:
        return Row(backend.name, backend.title, why)
    # The probe holds all scores in float64: no longer than it takes to see the kernel.
    tried = probe(backend, spec, device, T=min(options.seq_len, 512))
    if tried.why:
        return Row(backend.name, backend.title, tried.why)
    try:
        forward, both = times(backend, spec, device, options)
    except RuntimeError as e:  # out of memory, as a rule; PyTorch's own words say it
        return Row(backend.name, backend.title, (f"at this shape: {str(e).splitlines()[0]}",))
    return Row(backend.name, backend.title, (), tried.kernels, forward, both, tried.error)


def times(backend: Backend, spec: Spec, device: str, options: Options) -> tuple[float, float]:
    """Median milliseconds of a forward pass without gradients, and of forward and backward."""
    B, T, D = options.batch_size or 1, options.seq_len, spec.head_dim
    heads, dtype = (spec.n_head, spec.n_kv_head, spec.n_kv_head), getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(B, T, h, D, device=device, dtype=dtype, requires_grad=True) for h in heads
    )
    dout = torch.randn(B, T, spec.n_head, D, device=device, dtype=dtype)
    seg = None
    if spec.segments:
        seg = (torch.arange(T, device=device) >= T // 2).int().expand(B, T).contiguous()

    def forward() -> None:
        with torch.no_grad():
            backend.attend(q, k, v, replace(spec, grad=False), segments=seg)

    def forward_backward() -> None:
        torch.autograd.grad(backend.attend(q, k, v, spec, segments=seg), (q, k, v), dout)

    return median_ms(forward, device), median_ms(forward_backward, device)


def median_ms(call: Callable[[], None], device: str) -> float:
    """The median of 3 to 100 calls, about half a second of them, after two that are not counted."""
    kind = torch.device(device).type
    waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
    synchronize = waits.get(kind, lambda: None)
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < 0.5 and len(taken) < 102):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:]) * 1e3


def present(device: str | None) -> str:
    """The device to use.

    Raises: UserError where it is not there.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device is None:
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "mps", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"--device must be cpu, mps, cuda or cuda:N, got {device!r}")
    there = {"cpu": 1, "mps": int(has_mps), "cuda": torch.cuda.device_count() if has_cuda else 0}
    if int(index or 0) >= there[kind]:
        here = ", ".join(name for name, n in there.items() if n)
        raise UserError(
            f"device {device!r} is not there (torch {torch.__version__} sees: {here}); "
            "leave --device out to take the best one"
        )
    return device


def split_name(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The backend's name, if one is given, and the options."""
    switches = [f"--{f.name}" for f in fields(Options) if f.type == "bool"]
    names, options = [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            names.append(word)
        elif word in switches and words[:1] not in (["True"], ["False"]):
            options.append(f"{word}=True")
        else:
            takes_next = "=" not in word and words and not words[0].startswith("--")
            options += [word, words.pop(0)] if takes_next else [word]
    if len(names) > 1:
        raise UserError(f"give one backend, or none for all of them, got {' '.join(names)}")
    return (names[0] if names else None), options


def explain(name: str, spec: Spec, device: str, options: Options) -> None:
    """Print what a run that asks for `name` would say, and do."""
    try:
        chosen = select(name, spec, device, allow_mps_sdpa=options.allow_mps_sdpa)
    except ValueError as e:  # an unknown name, or nothing that may run
        raise UserError(str(e)) from None
    if options.json:
        rejected = {n: list(why) for n, why in chosen.rejected.items()}
        print(json.dumps({"requested": name, "backend": chosen.backend.name,
                          "rejected": rejected, "kernels": chosen.kernels}))  # fmt: skip
    else:
        print(chosen)


def show(rows: Sequence[Row], spec: Spec, machine: Machine, options: Options) -> None:
    """Print the table of what runs, and below it what does not, with every reason."""
    console = Console(highlight=False)
    software = f"torch {machine.torch}" + (f", CUDA {machine.cuda}" if machine.cuda else "")
    if machine.capability:
        software = "compute capability {}.{}, ".format(*machine.capability) + software
    console.print(Text(f"{machine.name} ({machine.device}), {software}", style="bold"))
    shape = f"batch {options.batch_size}, {options.seq_len} tokens, {spec.n_head} heads"
    if spec.n_kv_head != spec.n_head:
        shape += f" over {spec.n_kv_head} key/value heads"
    shape += f" of {spec.head_dim}, {spec.dtype}, causal"
    shape += f", window {spec.window}" if spec.window else ""
    shape += f", dropout {spec.dropout:g}" if spec.dropout else ""
    shape += ", 2 segments" if spec.segments else ""
    console.print(Text(shape))

    wide = max(len(row.name) for row in rows)
    runs = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    runs.add_column("runs here", no_wrap=True, min_width=wide)
    runs.add_column("kernel", no_wrap=True)
    for title in ("forward ms", "fwd+bwd ms", "error"):
        runs.add_column(title, justify="right", no_wrap=True)
    does_not = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    does_not.add_column("does not", no_wrap=True, min_width=wide)
    does_not.add_column("why", overflow="fold")  # a path that is cut short helps nobody
    for row in rows:
        if row.why:
            does_not.add_row(row.name, Text("\n".join(row.why)))
        else:
            runs.add_row(row.name, ", ".join(row.kernels) or "not fused", f"{row.forward_ms:.2f}",
                         f"{row.forward_backward_ms:.2f}", f"{row.error:.1e}")  # fmt: skip
    for table in (runs, does_not):
        if table.row_count:
            console.print()
            console.print(table)


def support_table() -> str:
    """What each backend declares, as the README's Markdown table: a row for each row of Caps."""
    lines = ["| name | device | dtypes | head_dim | window | segments | dropout | falls back to |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for backend in BACKENDS.values():
        names = " ".join(f"`{n}`" for n in (backend.name, *backend.aliases))
        for caps in backend.caps:
            device = ", ".join(caps.devices)
            if caps.min_capability:
                device += " >= {}.{}".format(*caps.min_capability)
            dtypes = "all" if caps.dtypes == DTYPES else ", ".join(caps.dtypes)
            head_dim = f"up to {caps.head_dim_max}" if caps.head_dim_max else "any"
            if caps.head_dim_multiple > 1:
                head_dim += f", multiple of {caps.head_dim_multiple}"
            dropout = "yes" if caps.dropout else "no"
            if caps.dropout_step:
                dropout = f"multiples of {caps.dropout_step:g}"
            window, segments = ("yes" if has else "no" for has in (caps.window, caps.segments))
            last = f"`{backend.fallback}`" if backend.fallback else "nothing"
            cells = (names, device, dtypes, head_dim, window, segments, dropout, last)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Read the options, and explain one backend or measure all."""
    if any(word in ("-h", "--help") for word in argv):
        _, rest = help_text(Options, asdict(Options())).split("\n", 1)
        print(f"{USAGE}\n{rest}\n\nbackends: auto, {', '.join(BACKENDS)}")
        return
    name, words = split_name(argv)
    options = read(Options, words).settings
    if name not in (None, "auto"):
        try:
            get(str(name))
        except ValueError as e:
            raise UserError(str(e)) from None
    device = present(options.device)
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    spec = options.spec(dtype)
    batch_size = options.batch_size or (16 if device.startswith("cuda") else 1)
    options = replace(options, batch_size=batch_size)
    if name is not None:
        explain(name, spec, device, options)
        return
    machine = Machine.here(device, packages())
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
    sys.argv[0] = "-m attention"  # what settings.py tells the user to type
    exit_on_user_error(lambda: main(sys.argv[1:]))
