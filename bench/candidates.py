"""A Bench, which is a mode's settings on a machine, and its candidates: pickled as they are, built
in their own processes. Here is ours with one backend; the others are in rivals.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import attention
import train
from attention import Resolution
from bench import Json
from bench.parts import model_of
from core.cpu import int8
from core.flops import Sizes, n_params
from core.optimizer import build_optimizer
from core.options import TrainConfig
from core.runtime import Setup, dtype_name
from core.settings import UserError, user_errors
from inference import engine, graphs
from inference.sampling import Stats
from model import GPT, GPTConfig

# Longest sequences of backends that are not named.
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
Mark = Callable[[str], None]
Times = tuple[float, float, int]


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
        return getattr(self.config, "batch_size", 1) == "auto"

    @property
    def part(self) -> Json:
        """The record, without rows."""
        known: Json = {"mode": self.mode, "settings": self.config.flat(), "machine": self.machine}
        known |= {"vocab_size": self.vocab_size, "reference": self.reference}
        return known | ({"hf": self.hf} if self.hf else {})

    @cached_property
    def model(self) -> Sizes:
        return model_of(self.part)

    @property
    def layer(self) -> Json:
        """Fields of the first layer's Spec."""
        m = self.model
        ours = {"n_head": m.n_head, "n_kv_head": m.kv_heads, "head_dim": m.head_dim}
        return m.layers[0] if self.hf else {**ours, "window": m.windows[0]}

    @property
    def slow(self) -> list[str]:
        named = {attention.get(word).name for word in self.config.backends if word != "all"}
        return [name for name in self.backends if name in LONGEST and name not in named]


class Candidate:
    """A row's model: ours, unless a subclass builds another one."""

    model: Any
    run: Any  # the model, compiled or not
    optimizer: torch.optim.AdamW
    make_optimizer: Callable[[], torch.optim.AdamW]
    # write(prompt (B, T) int64, new, cache): when the first and the last token came, cache bytes
    write: Callable[..., Times]

    def __init__(self, bench: Bench, name: str = "", what: str = "", **changes: Any) -> None:
        """name: the row's; what: a path or name for its kind; changes: of the options."""
        self.bench, self.name, self.what, self.changes = bench, name, what, changes
        fixed: Json = {"attention_fallback": False, "batch_size": 1, "profile_step": None}
        if changes.get("optimizer") == "adamw":  # in place of a config file's Muon
            fixed["muon_rates"] = TrainConfig.muon_rates
        self.config = bench.config.to(TrainConfig, **fixed | changes)
        self.device = bench.device

    def but(self, **changes: Any) -> Candidate:
        return type(self)(self.bench, self.name, self.what, **self.changes | changes)

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.device, self.config, self.config.n_embd)

    @property
    def dtype(self) -> str:
        return dtype_name(self.setup.dtype)

    def build(self, cast: bool = False) -> Any:
        config, setup = self.config, self.setup
        model = GPT(GPTConfig.of(config, self.bench.vocab_size), config.policy)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = setup.residual == "autocast"
        return setup.place(model, cast)

    def for_training(self) -> None:
        self.model, self.scaler = self.build().train(), self.setup.scaler()
        self.optimizer = self.make_optimizer()
        self.run = self.setup.compiled(self.model, self.config.gradient_accumulation_steps)

    def for_decoding(self) -> None:
        self.model = self.build(cast=True).eval()

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """n sequences and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        size = (n, self.config.block_size + 1)
        tokens = torch.randint(self.bench.vocab_size, size, generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        """Kernels of its layers, with a cache or in training; [] if unknown."""
        return []

    def evidence(self, chosen: Sequence[Resolution]) -> Json:
        proofs = [c.proof for c in chosen if c.proof]
        worst = max(proofs, key=lambda proof: proof["error"] / proof["allowed"], default=None)
        return {"kernels": [*dict.fromkeys(k for c in chosen for k in c.kernels)], "proof": worst}

    @property
    def parameters(self) -> int:
        return sum(p.numel() for name, p in self.model.named_parameters() if "wpe" not in name)

    def gradient_norm(self) -> float:
        grads = [p.grad.float() for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)[1]

    def step(self, x: Tensor, y: Tensor, micro: int, mark: Mark) -> Tensor:
        loss, scaler = torch.zeros((), device=x.device), self.scaler
        for mx, my in zip(x.chunk(micro), y.chunk(micro), strict=True):
            mark("forward")
            with self.setup.autocast:
                part = self.loss(mx, my) / micro
            mark("backward")
            scaler.scale(part).backward()
            loss += part.detach()
        mark("update")
        if self.config.grad_clip:
            scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        mark("end")
        return loss


class Ours(Candidate):
    def for_training(self) -> None:
        super().for_training()
        with self.setup.autocast:
            compiled = bool(self.setup.compile)
            plan = self.model.plan(self.config.batch_size, compiled=compiled)
        self.to_train = plan[0].chosen
        self.found_inf = torch.zeros((), device=self.device)

    def for_decoding(self) -> None:
        super().for_decoding()
        if self.bench.config.weights == "int8":
            with user_errors():
                int8.convert(self.model, self.model.head_weight)

    def make_optimizer(self) -> torch.optim.AdamW:
        return build_optimizer(self.model, self.config, self.device)

    @property
    def parameters(self) -> int:
        return n_params(self.model.config)  # also of int8's head, which is no parameter

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        if cache is None:
            return [self.to_train]
        return [graphs.plan(self.model, cache)[0].chosen]

    def step(self, x: Tensor, y: Tensor, micro: int, mark: Mark) -> Tensor:
        how = (self.run, self.optimizer, self.scaler, self.setup.autocast)
        return train.train_step(*how, x, y, micro, self.config.grad_clip, self.found_inf, mark)

    def write(self, prompt: Tensor, new: int, cache: str, **more: object) -> Times:
        stats = Stats()
        how: Json = {"temperature": 0.0, "kv_cache": cache, "stats": stats, **more}
        how["compile"] = self.config.compile is True and cache == "static"
        times = [time.perf_counter() for _ in engine.stream(self.model, prompt, new, **how)]
        assert len(times) == new, (len(times), new)
        return times[0], times[-1], stats.cache_bytes


@dataclass(frozen=True)
class Plan:
    work: type[Any]  # of a candidate, in its process
    candidates: Mapping[str, Candidate]  # by row, most valuable first
    rounds: int
    points: Sequence[Json]
    spec: Callable[[Json], Json]  # of a point: fields of its Spec
    longest: Mapping[str, int] = field(default_factory=dict)  # tokens of a slow backend
    skip: Callable[[Json, Sequence[Json]], str] = lambda row, rows: ""  # reason, or ""
    one_process: bool = False  # for all rounds of a candidate
    most: int = 1  # sequences tried by --batch_size=auto
    reference: Candidate | None = None


def names(config: Any, device: str) -> tuple[tuple[str, ...], dict[str, str]]:
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
    return (*found,), left_out
