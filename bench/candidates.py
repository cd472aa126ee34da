"""Candidates in their process: ours with one backend, and nanoGPT (transformers: hf.py)."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import train
from attention import Resolution
from attention.machine.system import synchronize
from bench import Json
from core.cpu import int8
from core.optimizer import build_optimizer
from core.options import TrainConfig
from core.runtime import Setup, dtype_name
from core.settings import UserError, user_errors
from inference import engine, graphs
from inference.sampling import Stats
from model import GPT, GPTConfig

Mark = Callable[[str], None]
Times = tuple[float, float, int]


@dataclass(frozen=True)
class Job:
    """A row's candidate and its settings, as a process receives them."""

    name: str  # of the row
    kind: type[Candidate]
    what: str  # for this kind: a path, or a name
    settings: Any  # the mode's
    config: TrainConfig
    device: torch.device
    vocab_size: int
    hf: Json | None  # transformers' config
    memory_limit: int | None

    def but(self, **changes: Any) -> Job:
        return replace(self, config=replace(self.config, **changes))

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.device, self.config, self.config.n_embd)

    @property
    def dtype(self) -> str:
        return dtype_name(self.setup.dtype)

    def model(self, cast: bool = False) -> GPT:
        config, setup = self.config, self.setup
        model = setup.place(GPT(GPTConfig.of(config, self.vocab_size), config.policy), cast)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = setup.residual == "autocast"
        return model

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """n sequences and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        tokens = torch.randint(self.vocab_size, (n, self.config.block_size + 1), generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)


def refuse(lacking: Json) -> None:
    """UserError for {option that a model lacks: is it used?}"""
    if used := [name for name, is_used in lacking.items() if is_used]:
        raise UserError(f"it does not support {' and '.join(used)}")


class Candidate:
    model: Any
    run: Any  # the model, compiled or not
    optimizer: torch.optim.AdamW
    make_optimizer: Callable[[], torch.optim.AdamW]
    # write(prompt (B, T) int64, new, cache): when the first and the last token came, cache bytes
    write: Callable[..., Times]
    compile = False  # decode steps of a static cache

    def __init__(self, job: Job) -> None:
        self.job, self.setup, self.config = job, job.setup, job.config

    def for_training(self) -> None:
        self.scaler = self.setup.scaler()
        self.model.train()
        self.optimizer = self.make_optimizer()
        self.run = self.setup.compiled(self.model, self.config.gradient_accumulation_steps)

    def for_decoding(self) -> None:
        self.model.to(self.setup.dtype).eval()

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        """Kernels of its layers, with a cache or in training; [] if unknown."""
        return []

    def evidence(self, cache: str | None = None) -> Json:
        chosen = self.chosen(cache)
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
        config = self.config
        self.model = self.job.model()
        super().for_training()
        with self.setup.autocast:
            plan = self.model.plan(config.batch_size, compiled=bool(self.setup.compile))
        self.to_train = plan[0].chosen
        self.found_inf = torch.zeros((), device=self.job.device)

    def for_decoding(self) -> None:
        self.model = self.job.model(cast=True).eval()
        if self.job.settings.weights == "int8":
            with user_errors():
                int8.convert(self.model, self.model.head_weight)

    def make_optimizer(self) -> torch.optim.AdamW:
        return build_optimizer(self.model, self.config, self.job.device)

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
        how["compile"] = self.compile and cache == "static"
        times = [time.perf_counter() for _ in engine.stream(self.model, prompt, new, **how)]
        assert len(times) == new, (len(times), new)
        return times[0], times[-1], stats.cache_bytes


class NanoGPT(Candidate):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        config, plain = self.config, TrainConfig()
        names = ("position", "norm", "mlp", "qk_norm", "tied", "optimizer")
        lacking = {n: getattr(config, n) != getattr(plain, n) for n in names}
        lacking["gradient_checkpointing"] = config.gradient_checkpointing
        lacking["attention_window"] = any(config.attention_window)
        lacking["n_kv_head"] = config.n_kv_head not in (None, config.n_head)
        lacking |= {"gelu=tanh": config.gelu == "tanh", "bias=qkv": config.bias == "qkv"}
        refuse(lacking)
        spec = importlib.util.spec_from_file_location("nanogpt_model", job.what)
        assert spec and spec.loader
        theirs = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = theirs  # its dataclass looks itself up there
        spec.loader.exec_module(theirs)
        same = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
        sizes = {name: getattr(config, name) for name in same}
        its_config = theirs.GPTConfig(vocab_size=job.vocab_size, **sizes)
        self.model = theirs.GPT(its_config).to(job.device)

    def make_optimizer(self) -> torch.optim.AdamW:
        c = self.config
        args = (c.weight_decay, c.learning_rate, (c.beta1, c.beta2), self.setup.device.type)
        return self.model.configure_optimizers(*args)

    def write(self, prompt: Tensor, new: int, cache: str, **more: object) -> Times:
        if cache != "none" or more:
            raise UserError("its generate() has no cache and no --constraint")
        began: list[float] = []

        def note(module: object, inputs: object) -> None:  # once per token
            if len(began) == 1:  # on a GPU the first token may still be computed
                synchronize(self.setup.device)
            began.append(time.perf_counter())

        with self.model.register_forward_pre_hook(note):
            text = self.model.generate(prompt, new, temperature=1.0, top_k=None)
        synchronize(self.setup.device)
        end = time.perf_counter()
        assert len(began) == new and text.shape[1] == prompt.shape[1] + new, text.shape
        return began[1], end, 0
