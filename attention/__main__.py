"""Which backends run, why others do not, and how fast and exact each is.

    python -m attention                                         measure every backend here
    python -m attention sdpa_flash --dtype=float32              explain one choice
    python -m attention flash_attn_2 --as="NVIDIA TITAN RTX"    the same on another machine
    python -m attention --as=h100                               every backend there
    python -m attention check my_kernel.py                      test a kernel (check --help)

Each time is for one attention call, not for a model (bench_mfu.py). The error is
max|out - float64| / max|float64|, from the probe. On a described machine nothing runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .caps import BackendUnavailable, dotted
from .machine import autotune
from .machine.gpus import describe
from .machine.system import first_line
from .probing import Probe, probe
from .select import BACKENDS, RULES, admit, packages, resolve, select
from .spec import CACHES, DTYPES, Machine, Policy, Spec


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def parser() -> argparse.ArgumentParser:
    """The command line. The defaults are the shape of GPT-2 124M."""
    made = argparse.ArgumentParser(
        prog="python -m attention",
        description=__doc__,
        epilog=f"backends: {', '.join([*RULES, *BACKENDS])}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("backend", nargs="?", help="explain the choice of this name or file; none: measure all")
    add("--device", default="auto", help="auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps")
    add("--dtype", choices=DTYPES, help="of inputs and output; default: the GPU's, else float32")
    add("--as", dest="machine", help='another machine: "NVIDIA TITAN RTX", 4090, h100, cpu, ...')
    add("--batch_size", type=int, help="sequences; default: 16 on cuda, else 1")
    add("--seq_len", type=int, default=1024, help="tokens in a sequence (default: 1024)")
    add("--n_head", type=int, default=12, help="query heads (default: 12)")
    add("--n_kv_head", type=int, help="key and value heads; default: n_head")
    add("--head_dim", type=int, default=64, help="channels of a head (default: 64)")
    add("--window", "--attention_window", type=int, help="keys that a query attends to")
    add("--dropout", type=float, default=0.0, help="on the attention probabilities")
    add("--scale", type=float, help="factor of the scores; default: 1/sqrt(head_dim)")
    add("--softcap", type=float, help="c: scores become c * tanh(s / c)")
    add("--kv_cache", choices=CACHES, default="none", help="inference with this cache")
    add("--page_size", type=int, help="tokens in a page of the paged cache (default: 256)")
    flags = {
        "allow_mps_sdpa": "allow PyTorch's SDPA on Apple's Metal",
        "segments": "two documents in each sequence",
        "sinks": "a logit for each head in the softmax's denominator",
        "lse": "split sequences, as --context_parallel of train.py",
        "inference": "no backward pass",
        "deterministic": "under torch.use_deterministic_algorithms(True)",
        "compiled": "inside torch.compile",
    }
    for name, text in flags.items():
        add(f"--{name}", type=flag, nargs="?", const=True, default=False, help=text)
    add("--hub_kernels", "--attention_hub_kernels", type=flag, nargs="?", const=True,
        default=False, help="allow downloading a prebuilt kernel and running it")  # fmt: skip
    return made


def spec_of(asked: argparse.Namespace, dtype: str) -> Spec:
    """The requested attention. Raises ValueError if the options are inconsistent."""
    cache = asked.kv_cache
    return Spec(
        asked.n_head, asked.n_kv_head or asked.n_head, asked.head_dim, dtype, asked.window,
        asked.dropout, asked.segments, grad=not asked.inference and cache == "none", cache=cache,
        compiled=asked.compiled, page_size=asked.page_size or (256 if cache == "paged" else None),
        scale=asked.scale, softcap=asked.softcap, sinks=asked.sinks, lse=asked.lse,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    why: tuple[str, ...]  # why it does not run here; empty if it does
    kernels: tuple[str, ...] = ()
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    error: float | None = None
    notes: tuple[str, ...] = ()  # why it was not timed, or only without the backward


def best_dtype(machine: Machine) -> str:
    if machine.device != "cuda":
        return "float32"
    return "bfloat16" if (machine.capability or (0, 0)) >= (8, 0) else "float16"


# --- this machine ---


def measure(
    name: str, spec: Spec, machine: Machine, policy: Policy, device: torch.device,
    shape: autotune.Shape,
) -> Row:  # fmt: skip
    """Probe and time one backend; only the forward if it has no backward."""
    backend, why = admit(name, spec, machine, policy)
    notes: tuple[str, ...] = ()
    if why and not admit(name, replace(spec, grad=False), machine, policy)[1]:
        why, notes, spec = [], tuple(why), replace(spec, grad=False)
    if why:
        return Row(name, backend.title, tuple(why))
    slow = autotune.only_interpreted(backend, spec, machine)
    # The probe stores all scores in float64: only as long as needed to see the kernel.
    tried = probe(backend, spec, device, 64 if slow else min(max(shape[2], 64), 512))
    row = Row(name, backend.title, tried.why, kernel_names(tried), error=tried.error, notes=notes)
    if tried.why or slow:
        return replace(row, notes=(*notes, "Triton's interpreter, for tests: not timed"))
    try:
        inputs, ms = autotune.draw(spec, device, shape), []
        for one in (replace(spec, grad=False), spec)[: 1 + spec.grad]:
            call = {"": autotune.work(backend, one, inputs)}
            once = {"": autotune.warmed_up(call[""], device)}
            ms.append(1e3 * autotune.race(call, once, device, budget_s=0.5)[""])
    except RuntimeError as e:  # usually out of memory
        return Row(name, backend.title, (f"at this shape: {first_line(e)}",))
    return replace(row, forward_ms=ms[0], forward_backward_ms=ms[1] if spec.grad else None)


def kernel_names(tried: Probe) -> tuple[str, ...]:
    """PyTorch's kernels in the probe, else another library's operators."""
    of_torch = "aten|prims|autograd|c10d|mkldnn|inductor"
    names = [e for e in tried.events if re.fullmatch(rf"(?!({of_torch})::)\w+::\w+", e)]
    if not names and any(e.startswith("Torch-Compiled Region") for e in tried.events):
        names = ["by torch.compile"]
    return tried.kernels or tuple(name.partition("::")[2] or name for name in names)


# --- printing ---


def heading(machine: Machine, spec: Spec, shape: autotune.Shape, described: bool) -> str:
    software = f"torch {machine.torch}" + (f", CUDA {machine.cuda}" if machine.cuda else "")
    if machine.capability:
        software = f"compute capability {dotted(machine.capability)}, " + software
    groups = f" over {spec.n_kv_head} key/value heads" if spec.n_kv_head != spec.n_head else ""
    pages = f" of {spec.page_size}" if spec.page_size else ""
    request = {
        f"batch {shape[0]}, {shape[2]} tokens": True,
        f"{spec.n_head} heads{groups} of {spec.head_dim}, {spec.dtype}, causal": True,
        f"window {spec.window}": spec.window,
        f"dropout {spec.dropout:g}": spec.dropout,
        "2 segments": spec.segments,
        f"scale {spec.softmax_scale:g}": spec.scale,
        f"softcap {spec.softcap or 0:g}": spec.softcap,
        "sinks": spec.sinks,
        "split": spec.lse,
        "inference": not spec.grad,
        f"{spec.cache} cache{pages}": spec.cache != "none",
        "one query": shape[1] < shape[2],
        "deterministic": machine.deterministic,
        "compiled": spec.compiled,
    }
    lines = [f"{machine.name} ({machine.device}), {software}"]
    lines.append(", ".join(text for text, holds in request.items() if holds))
    if described:
        rows = (c for b in BACKENDS.values() for c in b.caps)
        possible = [c for c in rows if machine.device in c.devices and not c.interpreted]
        wanted = {p.partition(">=")[0] for c in possible for p in c.packages}
        there = [p for p in machine.packages if p in wanted]
        assumed = f", with {', '.join(there)} installed" if there else ""
        lines.append(f"Nothing was run: the backends declare this{assumed}.")
    return "\n".join(lines)


def table(rows: Sequence[Row], described: bool) -> str:
    able, lines = [row for row in rows if not row.why], []
    if able and described:
        lines += autotune.aligned([["runs there", ""], *([r.name, r.title] for r in able)], "<")
    elif able:
        cells = [["runs here", "forward ms", "fwd+bwd ms", "error", "kernel"]]
        for row in able:
            ms = [
                "-" if t is None else f"{t:.2f}" for t in (row.forward_ms, row.forward_backward_ms)
            ]
            cells.append([row.name, *ms, f"{row.error:.1e}", ", ".join(row.kernels) or "-"])
        lines += autotune.aligned(cells, ">")
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
                                   subsequent_indent=" " * len(first))  # fmt: skip
    return "\n".join(lines)


# --- the entry ---


def run(asked: argparse.Namespace) -> None:
    """Explain one backend, or measure all. Raises ValueError for inconsistent options."""
    if min(asked.batch_size or 1, asked.seq_len) < 1:
        raise ValueError("--batch_size and --seq_len must be at least 1")
    if asked.machine and (asked.device != "auto" or asked.backend == "fastest"):
        raise ValueError("--as describes a machine: --device and fastest need a real one")
    if asked.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True)
    needed = packages(asked.backend or "")
    if asked.machine:
        described = describe(asked.machine, torch.__version__.partition("+")[0], needed)
        machine = replace(described, deterministic=asked.deterministic)
    else:
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        best = "cuda" if torch.cuda.is_available() else mps
        device = torch.device(best if asked.device == "auto" else asked.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device={device}: not found on this machine")
        machine = Machine.here(str(device), needed)
    spec = spec_of(asked, asked.dtype or best_dtype(machine))
    batch_size = asked.batch_size or (16 if machine.device == "cuda" else 1)
    shape = batch_size, asked.seq_len if spec.cache == "none" else 1, asked.seq_len
    policy = Policy(hub_kernels=asked.hub_kernels, mps_sdpa=asked.allow_mps_sdpa)
    head = heading(machine, spec, shape, bool(asked.machine))
    if asked.backend and asked.machine:
        print(head, resolve(asked.backend, spec, machine, policy), sep="\n\n")
    elif asked.backend == "fastest":
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
        print(autotune.fastest(spec, device, shape, policy))
    elif asked.backend:
        print(select(asked.backend, spec, device, policy))
    elif asked.machine:
        found = [(b, *admit(b.name, spec, machine, policy)[1:]) for b in BACKENDS.values()]
        rows = [Row(b.name, b.title, tuple(why)) for b, why in found]
        print(head, table(rows, True), sep="\n\n")
        try:
            chosen = resolve("auto", spec, machine, policy).backend.name
            print(f"\nauto takes {chosen} there.")
        except BackendUnavailable as e:
            print(f"\nauto: {e}")
    else:
        rows = []
        for name in BACKENDS:
            if sys.stderr.isatty():
                print(f"\rmeasuring {name:20}", end="\r", file=sys.stderr, flush=True)
            rows.append(measure(name, spec, machine, policy, device, shape))
        print(head, table(rows, False), sep="\n\n")


def main(argv: Sequence[str]) -> None:
    """Run one command; an invalid option prints one line and exits with 2."""
    if argv[:1] == ["check"]:
        from .check.command import main as check

        sys.exit(check(argv[1:]))
    if __package__ == "nanoattn":
        sys.exit("python -m nanoattn has one command, check; the others need a checkout of the "
                 "project: python -m attention")  # fmt: skip
    try:
        run(parser().parse_args(argv))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
