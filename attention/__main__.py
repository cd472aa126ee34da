"""Which backends run, why others do not, and how fast and exact each is.

    python -m attention                                         measure every backend here
    python -m attention sdpa_flash --dtype=float32              explain one choice
    python -m attention flash_attn_2 --as="NVIDIA TITAN RTX"    the same on another machine
    python -m attention --as=h100                               every backend there
    python -m attention --json                                  the same for programs
    python -m attention check my_kernel.py                      test a kernel (check --help)

Each time is for one attention call, not for a model (bench_mfu.py). The error is
max|out - float64| / max|float64|, from the probe. On a described machine nothing runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from .caps import BackendUnavailable, DeviceLost, dotted
from .machine.gpus import describe
from .machine.system import devices
from .machine.timing import declared, measure, table
from .names import BACKENDS, RULES, entry_points, packages
from .plan import fastest
from .select import configuration, resolve, select
from .spec import CACHES, DTYPES, Machine, Policy, Spec

FLAGS = {
    "allow_mps_sdpa": "allow PyTorch's SDPA on Apple's Metal before torch 2.13",
    "segments": "two documents in each sequence",
    "sinks": "a logit a head in the softmax's denominator",
    "alibi": "a bias that falls with the distance",
    "lse": "split sequences, as --context_parallel of train.py",
    "inference": "no backward pass",
    "deterministic": "under torch.use_deterministic_algorithms(True)",
    "compiled": "inside torch.compile",
    "json": "print JSON, with all versions",
    "hub_kernels": "allow downloading a prebuilt kernel and running it",
}


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m attention", usage="%(prog)s [OPTIONS] [backend]", description=__doc__,
        epilog=f"backends: {', '.join([*RULES, *BACKENDS])}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
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
    for name, text in FLAGS.items():
        also = ["--attention_hub_kernels"] * (name == "hub_kernels")
        add(f"--{name}", *also, type=flag, nargs="?", const=True, default=False, help=text)
    return made


def run(args: argparse.Namespace) -> None:
    """Explain one backend, or measure all."""
    if args.seq_len < 1 or (args.batch_size is not None and args.batch_size < 1):
        raise ValueError("--batch_size and --seq_len must be at least 1")
    if "" in (args.backend, args.machine):
        raise ValueError("a backend and --as cannot be empty")
    if args.machine and (args.device != "auto" or args.backend == "fastest"):
        raise ValueError("--as describes a machine: --device and fastest need a real one")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True)
    needed, every = packages(args.backend or ""), [*BACKENDS, *entry_points()]
    here, on = devices(), args.device
    if args.machine:
        machine = describe(args.machine, torch.__version__.partition("+")[0], needed)
        machine = replace(machine, deterministic=args.deterministic)
    else:
        on = next(d for d in ("cuda", "mps", "cpu") if d in here) if on == "auto" else on
        if on not in here:
            raise ValueError(f"--device={on}: no such device here")
        machine = Machine.here(on)
    on_cuda, ampere = machine.device == "cuda", (machine.capability or (0, 0)) >= (8, 0)
    half = "bfloat16" if ampere else "float16"
    paged = args.kv_cache == "paged"
    fields = {name: x for name, x in vars(args).items() if name in Spec.__dataclass_fields__}
    spec = Spec(**fields | {
        "n_kv_head": args.n_head if args.n_kv_head is None else args.n_kv_head,
        "dtype": args.dtype or (half if on_cuda else "float32"), "cache": args.kv_cache,
        "page_size": 256 if paged and args.page_size is None else args.page_size,
        "grad": not args.inference and args.kv_cache == "none"})
    B, Tk = args.batch_size or (16 if on_cuda else 1), args.seq_len
    shape = B, Tk if spec.cache == "none" else 1, Tk
    policy = Policy(hub_kernels=args.hub_kernels, mps_sdpa=args.allow_mps_sdpa)
    content = configuration(spec, machine, policy, needed)
    content["shape"] = dict(zip(("batch", "queries", "keys"), shape))
    has = f"compute capability {dotted(machine.capability)}, " if machine.capability else ""
    head = (f"{machine.name} ({machine.device}), {has}torch {machine.torch}\n"
            f"batch {B}, {shape[1]:,} queries, {Tk:,} keys, {spec}"
            + ", deterministic" * machine.deterministic)
    if args.machine:
        head += "\nNothing was run: the backends declare this, all optional packages installed."
    if args.backend:
        if args.machine:
            chosen = resolve(args.backend, spec, machine, policy)
            text = f"{head}\n\n{chosen}"
        elif args.backend == "fastest":
            logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
            chosen = fastest(spec, on, shape, policy)
            text = str(replace(chosen, rejected={}))  # which it has logged
        else:
            # Without a handler Python would print the refusals, too, bare.
            logging.getLogger("nanoattn").addHandler(logging.NullHandler())
            chosen = select(args.backend, spec, on, policy)
            text = str(chosen)
        found = chosen.as_json()
    elif args.machine:
        rows = [declared(name, spec, machine, policy)[0] for name in every]
        try:
            auto = f"auto takes {resolve('auto', spec, machine, policy).backend.name} there."
        except BackendUnavailable as e:
            auto = f"auto: {e}"
        found = {"backends": [row.as_json([]) for row in rows]}
        text = f"{head}\n\n{table(rows, modes=[])}\n\n{auto}"
    else:
        modes = [replace(spec, grad=False), spec][: 1 + spec.grad]
        if not args.json:
            print(head, flush=True)
        show = partial(print, file=sys.stderr, flush=True)
        rows = measure(every, modes, machine, policy, torch.device(on), shape, show=show)
        found = {"backends": [row.as_json(modes) for row in rows]}
        text = f"\n{table(rows, modes)}"
    print(json.dumps(content | found) if args.json else text)


def main(argv: Sequence[str]) -> None:
    """Run one command; an invalid option prints one line and exits with 2."""
    if argv[:1] == ["check"]:
        from .check.command import main as check

        sys.exit(check(argv[1:]))
    try:
        run(parser().parse_args(argv))
    except (ValueError, DeviceLost) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, lambda *_: os.write(2, b"\ninterrupted\n") and os._exit(130))
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ... | head
    main(sys.argv[1:])
