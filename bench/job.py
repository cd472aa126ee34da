"""Before anything runs: the machine, the backends, a mode's Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import attention
from attention import Spec
from attention.hf import implementation
from attention.spec import Machine
from bench import Json, hf
from bench.candidates import Candidate, Job, NanoGPT, Ours
from bench.machine import Description, free_memory, reason
from bench.parts import model_of
from bench.settings import Measured, vocabulary
from bench.workers import Failure, Stop, once
from core.flops import Sizes
from core.options import TrainConfig
from core.settings import UserError, user_errors

# Longest sequences of backends that are not named.
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
Who = tuple[type[Candidate], str]  # a job's kind and what


@dataclass(frozen=True)
class Bench:
    mode: str
    config: Any  # of the mode's class
    device: torch.device
    backends: tuple[str, ...]
    left_out: Mapping[str, str]  # backend -> reason
    vocab_size: int
    hf: Json  # name, config, sizes
    machine: Json = field(default_factory=dict)
    reference: Json = field(default_factory=dict)  # of the first batch

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def auto(self) -> bool:
        return self.mode in ("train", "decode") and self.config.batch_size == "auto"

    @property
    def compiled(self) -> bool:
        return self.cuda if self.config.compile is None else self.config.compile

    @property
    def part(self) -> Json:
        known: Json = {"mode": self.mode, "settings": self.config.flat(), "machine": self.machine}
        known |= {"vocab_size": self.vocab_size, "reference": self.reference}
        return known | ({"hf": self.hf} if self.hf else {})

    @cached_property
    def model(self) -> Sizes:
        return model_of(self.part)

    @property
    def layer(self) -> Json:
        model = self.model
        own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
        return own | (model.layers[0] if self.hf else {"window": model.windows[0]})

    @property
    def slow(self) -> list[str]:
        named = {attention.get(word).name for word in self.config.backends if word != "all"}
        return [name for name in self.backends if name in LONGEST and name not in named]

    def candidates(self) -> dict[str, Who]:
        """By row: first backend, rivals, others, slow ones."""
        names = sorted(self.backends, key=self.slow.__contains__)
        ours: dict[str, Who] = {name: (Ours, "") for name in names}
        others = rivals(getattr(self.config, "rival", ()), self.mode)
        if self.hf:
            ours = {name: (hf.HuggingFace, implementation(name)) for name in names}
            others = {f"hf_{a}": (hf.HuggingFace, a) for a in ("eager", "sdpa")}
        return dict([*ours.items()][:1]) | others | ours

    def admit(self, name: str, spec: Json) -> None:
        """Failure: a process of the backend could only refuse the Spec."""
        if why := self.left_out.get(name):
            raise Failure("unavailable", why)
        if name not in self.backends:
            return
        m, here = self.machine, Machine.here("cpu")
        if m["kind"] != "cpu":
            capability = tuple(m["capability"] or ()) or None
            here = replace(here, device=m["kind"], name=m["name"], capability=capability)
        policy = replace(self.config.policy, fallback=False)
        try:
            attention.resolve(name, Spec(**{"dtype": m["dtype"], **spec}), here, policy)
        except attention.BackendUnavailable as e:
            raise Failure("unavailable", reason(e)) from None

    def job(self, name: str = "", who: Who = (Ours, ""), batch_size: int = 1, **more: Any) -> Job:
        """`name`: the row, and of our own the backend."""
        ours = {"attention_backend": name} if name and who[0] is Ours else {}
        changes = {**ours, "attention_fallback": False, "batch_size": batch_size, **more}
        limit = None if self.cuda else self.machine.get("memory_limit")
        config, (kind, what) = self.config.to(TrainConfig, **changes), who
        return Job(name, kind, what, self.config, config, self.device, self.vocab_size,
                   self.hf.get("config"), limit)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    work: type[Any]
    jobs: Mapping[str, Job]  # by row, most valuable first
    rounds: int
    spec: Callable[[Json], Json]  # fields of a point's Spec
    points: Sequence[Json] = ({},)
    longest: Mapping[str, int] = field(default_factory=dict)  # tokens of a slow backend
    skip: Callable[[Json, Sequence[Json]], str] = lambda row, rows: ""  # reason, or ""
    one_process: bool = False  # for all rounds of a candidate
    reference: Job | str | None = None  # or why there is none


def rivals(words: tuple[str, ...], mode: str = "train") -> dict[str, Who]:
    of_hf = ("sdpa",) if mode == "decode" else ("eager", "sdpa", "flash_attention_2")
    found: dict[str, Who] = {}
    for word in words:
        name, _, path = word.partition("=")
        if name == "nanogpt" and path:
            model = Path(path).expanduser().resolve() / "model.py"
            if not model.is_file():
                raise UserError(f"{path} is not a nanoGPT checkout (model.py not found)")
            found["nanogpt"] = NanoGPT, str(model)
        elif word == "hf":
            found |= {f"hf_{a}": (hf.HuggingFace, a) for a in of_hf}
        else:
            raise UserError(f"--rival must be nanogpt=PATH or hf, got {word!r}")
    return found


def names(config: Measured, device: str) -> tuple[list[str], dict[str, str]]:
    """Backends, and reasons not to measure some of "all"."""
    words = config.backends if not getattr(config, "paths", ()) else ()
    if words == ("all",) and config.attention_backend != "auto":
        words = (config.attention_backend,)
    found: dict[str, None] = {}
    for word in (word for word in words if word != "all"):
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule, not a backend; name backends, or all")
        with user_errors():
            backend = attention.get(word)
        if backend.mods is not None:
            raise UserError(f"{word} has another mask than the kernels it is compared with")
        found[word if attention.is_code(word) else backend.name] = None  # of code the worker's
    left_out = {}
    for name, backend in attention.BACKENDS.items() if "all" in words else ():
        caps = [c for c in backend.caps if device in c.devices]
        if name not in found and caps and all(c.interpreted for c in caps):
            left_out[name] = "only Triton's interpreter runs it here; its speed is meaningless"
        found[name] = None
    return list(found), left_out


def begin(mode: str, config: Measured, device: torch.device, stop: Stop) -> Bench:
    rivals(getattr(config, "rival", ()))  # before minutes of work
    backends, left_out = names(config, device.type)
    vocab_size, source = vocabulary(config)
    found: Json = {}
    if model := getattr(config, "hf", None):
        found = {"name": model, "config": hf.read(model)}
        vocab_size, source = found["config"]["vocab_size"], f"--hf={model}"
    if mode != "kernel":
        stop.tell(f"vocabulary: {vocab_size:,} ({source})")
    limit = None
    if device.type == "cpu":
        limit = int(1e9 * config.memory_gb if config.memory_gb else 0.7 * free_memory(device))
    elif config.memory_gb:
        raise UserError(f"--memory_gb limits processes on the CPU, got --device={device}")
    here = {"memory_limit": limit}
    bench = Bench(mode, config, device, (*backends,), left_out, vocab_size, found, here)
    about = once(Description, bench.job(), stop)
    bench = replace(bench, machine={**about, "memory_limit": limit or about["free_memory"]})
    if not model:
        return bench
    counts = mode == "train" and not bench.auto
    batch = config.batch_size * config.gradient_accumulation_steps if counts else 1
    try:
        reference = once(hf.Reference, bench.job(batch_size=batch), stop)
    except Failure as e:
        if e.kind == "stopped":
            raise
        raise UserError(f"--hf={model}: {e}") from None
    return replace(bench, hf=found | {"counted": reference.pop("counted")}, reference=reference)
