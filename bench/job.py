"""Before anything runs: the machine, the backends, a mode's Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import attention
from attention import Spec
from attention.spec import Machine
from bench import Json, hf
from bench.machine import free_memory, reason
from bench.settings import Measured, vocabulary
from bench.workers import Failure, Stop, once
from core import flops
from core.options import TrainConfig
from core.settings import UserError, user_errors

HF = ("eager", "sdpa", "flash_attention_2")
# Longest sequences of backends that are not named.
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
S = TypeVar("S", bound=Measured)


@dataclass(frozen=True)
class Bench(Generic[S]):
    mode: str
    config: S
    device: str
    backends: tuple[str, ...]
    machine: Json
    vocab_size: int
    left_out: Mapping[str, str]  # backend -> reason
    hf: Json  # name, config, sizes
    reference: Json = field(default_factory=dict)  # of the first batch

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

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

    @property
    def model(self) -> flops.Sizes:
        return hf.model_of(self.part)

    @property
    def layer(self) -> Json:
        model = self.model
        own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
        return own | (model.layers[0] if self.hf else {"window": model.windows[0]})

    @property
    def slow(self) -> list[str]:
        named = {attention.get(word).name for word in self.config.backends if word != "all"}
        return [name for name in self.backends if name in LONGEST and name not in named]

    def candidates(self, implementations: tuple[str, ...] = HF) -> dict[str, str]:
        """{row: argument of candidates.build()}: first backend, rivals, others, slow ones."""
        ours = dict.fromkeys(sorted(self.backends, key=self.slow.__contains__), "")
        others = rivals(getattr(self.config, "rival", ()), implementations)
        if self.hf:
            ours = {name: hf.ours(name) for name in ours}
            others = {"hf_eager": hf.KIND + "eager", "hf_sdpa": hf.KIND + "sdpa"}
        return dict([*ours.items()][:1]) | others | ours

    def refused(self, specs: Sequence[Json]) -> dict[str, str]:
        m, here = self.machine, Machine.here("cpu")
        made = [Spec(**{"dtype": m["dtype"], **spec}) for spec in specs]
        if m["kind"] != "cpu":
            capability = tuple(m["capability"] or ()) or None
            here = replace(here, device=m["kind"], name=m["name"], capability=capability)
        policy, found = replace(self.config.policy, fallback=False), dict(self.left_out)
        for name in self.backends:
            whys = []
            for spec in made:
                try:
                    attention.resolve(name, spec, here, policy)
                except attention.BackendUnavailable as e:
                    whys.append(reason(e))
            if whys and len(whys) == len(made):
                found.setdefault(name, whys[0])
        return found

    def job(self, name: str = "", batch_size: int = 1, rival: str = "", **changes: object) -> Json:
        """`name`: the row, and without a rival the backend."""
        ours = {"attention_backend": name} if name and not rival else {}
        changes = {**ours, "attention_fallback": False, "batch_size": batch_size, **changes}
        return {
            "name": name,
            "rival": rival,
            "settings": self.config.flat(),
            "train": asdict(self.config.to(TrainConfig, **changes)),
            "device": self.device,
            "vocab_size": self.vocab_size,
            "hf": self.hf.get("config"),
            "memory_limit": None if self.cuda else self.machine.get("memory_limit"),
        }


@dataclass(frozen=True)
class Plan:
    work: str
    jobs: Mapping[str, Json]  # row -> job, most valuable first
    rounds: int
    specs: Sequence[Json]  # fields of Specs; a backend that supports none is not started
    points: Sequence[Json] = ({},)
    longest: Mapping[str, int] = field(default_factory=dict)  # tokens of a slow backend
    skip: Callable[[Json, Sequence[Json]], str] = lambda row, rows: ""  # reason, or ""
    one_process: bool = False  # for all rounds of a candidate
    reference: Json | None = None


def rivals(words: tuple[str, ...], implementations: tuple[str, ...] = HF) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if name == "nanogpt" and path:
            model = Path(path).expanduser().resolve() / "model.py"
            if not model.is_file():
                raise UserError(f"{path} is not a nanoGPT checkout (model.py not found)")
            found["nanogpt"] = f"bench.candidates:NanoGPT={model}"
        elif word == "hf":
            found |= {f"hf_{a}": hf.KIND + a for a in implementations}
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


def begin(mode: str, config: Measured, device: torch.device, stop: Stop) -> Bench[Any]:
    rivals(getattr(config, "rival", ()))
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
    here = {"memory_limit": limit}
    bench = Bench(mode, config, str(device), (*backends,), here, vocab_size, left_out, found)
    rates = ["peak"] * (mode != "decode")  # each takes seconds
    if mode in ("decode", "qualify") or getattr(config, "profile", False):
        rates.append("bandwidth")
    job = {"bandwidth_gbs": getattr(config, "bandwidth_gbs", None), "rates": rates, **bench.job()}
    about = once("bench.machine:Description", job, config.timeout, stop)
    bench = replace(bench, machine={**about, "memory_limit": limit or about["free_memory"]})
    if not model:
        return bench
    counts = mode == "train" and not bench.auto
    batch = config.batch_size * config.gradient_accumulation_steps if counts else 1
    try:
        job = bench.job(batch_size=batch)
        reference = once("bench.hf:Reference", job, config.timeout, stop)
    except Failure as e:
        if e.kind == "stopped":
            raise
        raise UserError(f"--hf={model}: {e}") from None
    return replace(bench, hf=found | {"counted": reference.pop("counted")}, reference=reference)
