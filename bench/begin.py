"""The begin of a run: backends, vocabulary, machine, the model of --hf."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import attention
from bench import Json, hf
from bench.job import Bench, rivals
from bench.machine import free_memory
from bench.results import Progress
from bench.settings import Settings, vocabulary
from bench.workers import Failure, Stop, once
from core.settings import UserError


def begin(
    mode: str, config: Settings, device: torch.device, stop: Stop, progress: Progress
) -> Bench[Any]:
    """Describe the machine, and count the model of --hf. Raises UserError for a mistake."""
    model, auto = getattr(config, "hf", None), config.batch_size == "auto"
    rivals(getattr(config, "rival", ()))
    backends, left_out = names(config, device.type)
    vocab_size, source = vocabulary(config)
    found: Json = {}
    if model:
        found = {"name": model, "config": hf.read(model)}
        vocab_size, source = found["config"]["vocab_size"], f"--hf={model}"
    progress.tell(f"vocabulary: {vocab_size:,} ({source})")
    limit = None
    if device.type == "cpu":
        limit = int(1e9 * config.memory_gb if config.memory_gb else 0.7 * free_memory(device))
    here = {"memory_limit": limit}
    bench = Bench(mode, config, str(device), (*backends,), here, vocab_size, left_out, found)
    job = bench.job() | {"bandwidth_gbs": getattr(config, "bandwidth_gbs", None)}
    job["wants_bandwidth"] = mode in ("decode", "qualify") or getattr(config, "profile", False)
    about = once("bench.machine:Description", job, config.timeout, stop)
    bench = replace(bench, machine={**about, "memory_limit": limit or about["free_memory"]})
    if not model:
        return bench
    counts = mode == "train" and not auto
    batch = config.batch_size * config.gradient_accumulation_steps if counts else 1
    try:
        job = bench.job(batch_size=batch)
        reference = once("bench.reference:Reference", job, config.timeout, stop)
    except Failure as e:
        if e.kind == "stopped":
            raise
        raise UserError(f"--hf={model}: {e}") from None
    counted = reference.pop("counted")
    return replace(bench, hf={**bench.hf, "counted": counted}, reference=reference)


def names(config: Settings, device: str) -> tuple[list[str], dict[str, str]]:
    """Return the backends, and {name: reason} of those of "all" that are not to be measured."""
    wanted = config.backends if not getattr(config, "paths", ()) else ()
    if wanted == ("all",) and config.attention_backend != "auto":  # --attention_backend=sdpa
        wanted = (config.attention_backend,)
    named: dict[str, None] = {}
    left_out: dict[str, str] = {}
    for word in wanted:
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule, not a backend; name backends, or all")
        if word != "all":
            try:
                backend = attention.get(word)  # of others' code the worker needs the name
            except ValueError as e:
                raise UserError(str(e)) from None
            if backend.mods is not None:
                raise UserError(f"{word} has another mask than the kernels it is compared with")
            named[word if attention.is_code(word) else backend.name] = None
            continue
        for name, backend in attention.BACKENDS.items():
            caps = [c for c in backend.caps if device in c.devices]
            if caps and all(c.interpreted for c in caps):
                left_out[name] = "only Triton's interpreter runs it here; its speed is meaningless"
    every = attention.BACKENDS if "all" in wanted else {}
    return list(named | dict.fromkeys(every)), {k: v for k, v in left_out.items() if k not in named}
