"""Train a variant on the plays or on recall.

Recall is MQAR of Arora et al. 2023 ("Zoology", arXiv 2312.04927), for a laptop: keys with values,
and later the keys again, among blanks.

    k1 v1 k2 v2 k3 v3  .  .  k2  .  .  k1  .  k3  .  .
                             v2        v1     v3           the targets
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.flops import mean_keys
from core.optimizer import build_optimizer, set_learning_rate, update
from course.lab.variants import VARIANTS, replace_attention
from data.loader import Batches, eval_batches, find, load, read_meta
from model import GPT, GPTConfig

VOCABULARY = 256  # a blank, 127 keys, 128 values
LEVELS = ((4, 64), (8, 64), (16, 128))  # pairs, tokens
WIDTH = 64
HEADS = 4
LENGTH = 128  # tokens of a sequence: plays, longest recall
TOKENS = 1024  # in a step
Json = dict[str, Any]
Batch = tuple[Tensor, ...]  # token ids and targets, (B, T) int64


@dataclass(frozen=True)
class Task:
    """From `learning_rate` on: settings of core/optimizer.py."""

    n_layer: int
    n_hidden: int  # of MHA; others get as many parameters
    convolution: bool  # a short one before each attention
    vocab_size: int
    learning_rate: float
    max_iters: int
    warmup_iters: int = 50
    decay_lr: str = "linear"
    min_lr: float = 0.0
    lr_decay_iters: int | None = None
    beta1: float = 0.9
    beta2: float = 0.99  # few tokens a step
    weight_decay: float = 0.1


RECALL = Task(2, WIDTH, True, VOCABULARY, 1e-2, 500)
PLAYS = Task(4, 4 * WIDTH, False, 70, 3e-3, 250)  # 70 characters


class ShortConvolution(nn.Module):
    """x (B, T, C) plus a sum of each channel's last three values, as in Zoology: attention is slow
    to learn a token's predecessor."""

    def __init__(self, C: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(C, C, kernel, groups=C, padding=kernel - 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT)[..., : x.shape[1]].mT


def build(name: str, task: Task, backend: str = "manual", n_hidden: int | None = None) -> GPT:
    """With as many parameters as MHA unless `n_hidden` is given."""
    if n_hidden is None:
        mha, own = (build(v, task, backend, task.n_hidden) for v in ("mha", name))
        more = own.get_num_params() - mha.get_num_params()
        n_hidden = task.n_hidden - round(more / (2 * WIDTH * task.n_layer))
    variant = VARIANTS[name]
    config = GPTConfig(
        block_size=LENGTH, vocab_size=task.vocab_size, n_layer=task.n_layer, n_embd=WIDTH,
        bias=False, position="rope", norm="rms", n_hidden=n_hidden, attention_backend=backend,
        **{"n_head": HEADS, **variant.settings},
    )
    model = GPT(config)
    replace_attention(model, variant)
    if task.convolution:
        for block in model.transformer.h:
            block.ln_1 = nn.Sequential(block.ln_1, ShortConvolution(WIDTH))
    for name, p in model.named_parameters():  # 0.02 is too small for 64 channels
        if p.dim() == 2:
            out = name.endswith("c_proj.weight")
            nn.init.normal_(p, std=WIDTH**-0.5 / math.sqrt(2 * task.n_layer) ** out)
    return model


def costs(model: GPT) -> dict[str, float]:
    """Parameters; FLOPs of a trained token (6 a weight, 6 a multiply-add between tokens); float32
    bytes cached for a token, and for LENGTH tokens."""
    N, layers = model.get_num_params(), [block.attn for block in model.transformer.h]
    flops = 6.0 * N + sum(6 * a.products(mean_keys(LENGTH, a.window)) for a in layers)
    token = sum(4 * a.cached for a in layers)
    state = sum(4 * (a.cached * min(LENGTH, a.window or LENGTH) + a.state) for a in layers)
    return {"parameters": N, "flops": flops, "cached": token, "state": state}


def sequences(n: int, pairs: int, T: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """n sequences (n, T) int64, and targets, -1 for none."""
    half = VOCABULARY // 2
    keys = torch.rand(n, half - 1, generator=draw).argsort(dim=1)[:, :pairs] + 1
    values = torch.randint(half, VOCABULARY, (n, pairs), generator=draw)
    idx, targets = torch.zeros(n, T, dtype=torch.int64), torch.full((n, T), -1)
    idx[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
    at = torch.rand(n, T - 2 * pairs, generator=draw).argsort(dim=1)[:, :pairs] + 2 * pairs
    return idx.scatter(1, at, keys), targets.scatter(1, at, values)


@torch.no_grad()
def recalled(model: GPT) -> dict[str, float]:
    """Part of values recalled, of 128 sequences for each number of pairs."""
    draw = torch.Generator().manual_seed(10**6)
    found = {}
    for pairs, T in LEVELS:
        idx, targets = sequences(128, pairs, T, draw)
        guess = model.head(model.hidden(idx)).argmax(dim=-1)
        found[str(pairs)] = float((guess == targets)[targets >= 0].float().mean())
    return found


def step(model: GPT, batch: Batch, optimizer: torch.optim.AdamW) -> None:
    loss = model(*batch)[1]
    optimizer.zero_grad()
    loss.backward()
    no_scaler = torch.amp.GradScaler("cpu", enabled=False)
    update(optimizer, no_scaler, loss, 1.0, found_inf=torch.zeros(()))


class Job(NamedTuple):
    variant: str
    task: str
    seed: int
    scale: float  # of the number of steps
    data_dir: str
    backend: str


def start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    torch.set_num_threads(1)


def train(job: Job) -> Json:
    began = time.perf_counter()
    task = RECALL if job.task == "recall" else PLAYS
    task = replace(task, max_iters=max(1, round(task.max_iters * job.scale)))
    held_out: list[Batch] = []
    batches: Iterable[Batch]
    if job.task == "recall":
        draw = torch.Generator().manual_seed(job.seed)
        levels = islice(cycle(LEVELS), task.max_iters)
        batches = (sequences(TOKENS // T, pairs, T, draw) for pairs, T in levels)
    else:
        folder, B = find("shakespeare_char", job.data_dir), TOKENS // LENGTH
        task = replace(task, vocab_size=read_meta(folder)["vocab_size"])
        texts, val = (load(folder, part, LENGTH, task.vocab_size) for part in ("train", "val"))
        batches = Batches(texts, LENGTH, B, job.seed).prefetch(0, task.max_iters)
        held_out = [*eval_batches(val, LENGTH, 40, B)]
    torch.manual_seed(job.seed)
    model = build(job.variant, task, job.backend)
    optimizer = build_optimizer(model, task, torch.device("cpu"))
    for n, batch in enumerate(batches):
        set_learning_rate(optimizer, n, task)
        step(model, batch, optimizer)
    model.eval()
    row: Json = {"variant": job.variant, "task": job.task, "seed": job.seed, **costs(model)}
    if job.task == "recall":
        row["recalled"] = recalled(model)
    else:
        with torch.no_grad():
            row["loss"] = sum(float(model(*b)[1]) for b in held_out) / len(held_out)
    return row | {"seconds": time.perf_counter() - began}


def speeds(names: Sequence[str], backend: str, rounds: int = 7) -> dict[str, float]:
    """Tokens per second of the plays' training step, one thread: median of interleaved rounds."""
    torch.set_num_threads(1)
    trained = []
    for name in names:
        model = build(name, PLAYS, backend)
        trained.append((model, build_optimizer(model, PLAYS, torch.device("cpu"))))
    idx = torch.randint(PLAYS.vocab_size, (TOKENS // LENGTH, LENGTH + 1))
    seconds: list[list[float]] = [[] for _ in names]
    for n in range(rounds + 1):
        for (model, optimizer), taken in zip(trained, seconds, strict=True):
            began = time.perf_counter()
            step(model, (idx[:, :-1], idx[:, 1:].contiguous()), optimizer)
            if n:  # the first one warms up
                taken.append(time.perf_counter() - began)
    return {name: TOKENS / sorted(taken)[rounds // 2] for name, taken in zip(names, seconds)}
