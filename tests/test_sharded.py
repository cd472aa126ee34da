"""Checkpoints of several processes: saved by any number, loaded by any other, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from checkpoint.resume import tensors
from core.distributed import DistInfo
from core.optimizer import build_optimizer
from model import GPT, GPTConfig

# Sizes that 3 and 4 processes do not divide; LayerNorms of 6 for 4, and biases.
TINY = GPTConfig(block_size=7, vocab_size=19, n_layer=2, n_head=2, n_embd=6,
                 attention_backend="manual")  # fmt: skip
HOW: Any = SimpleNamespace(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)
CPU = torch.device("cpu")


@dataclass
class Knobs:
    """What save_run() asks of train.py's TrainConfig."""

    out_dir: str
    keep_checkpoints: int = 2
    async_checkpoint: bool = False


class Run:
    """A run like train.py's, of this process and the others of its group."""

    global_batch = 4
    best_loss = float("inf")
    meta: Any = MappingProxyType({"tokenizer": {"name": "char"}})
    chosen: Any = SimpleNamespace(backend=SimpleNamespace(name="manual"), kernels=())

    def __init__(self, out: Path | str, kind: str = "one", seed: int = 0, **knobs: Any) -> None:
        """kind: "one", "ddp", "fsdp", or "hybrid", where 2 processes share one copy."""
        torch.manual_seed(seed)  # of the weights: the same on each process
        world = dist.get_world_size() if kind != "one" else 1
        rank, group = (dist.get_rank(), dist.group.WORLD) if kind != "one" else (0, None)
        control = dist.new_group(backend="gloo") if group else None
        self.distributed = DistInfo(CPU, rank, world, control)
        self.config: Any = Knobs(str(out), **knobs)
        self.model = self.module = GPT(TINY)
        if kind == "ddp":
            self.module = DistributedDataParallel(self.model)
        elif kind in ("fsdp", "hybrid"):
            shape = (world,) if kind == "fsdp" else (world // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(self.model, HOW, CPU)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step = 0

    def train(self, steps: int) -> Run:
        """Steps on batches of which each process has its part, and an evaluation: FSDP then leaves
        the root's parameters whole."""
        size, rank = self.distributed.world_size, self.distributed.rank
        for _ in range(steps):
            batch = torch.Generator().manual_seed(self.step)
            x, y = torch.randint(19, (2, 12, 7), generator=batch)
            loss = self.module(x.chunk(size)[rank], y.chunk(size)[rank])[1]
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        with torch.no_grad():
            self.module(*torch.zeros(2, 1, 7, dtype=torch.long))
        return self

    def save(self, val_loss: float | None = None) -> Path:
        checkpoint.save_run(self, val_loss)
        return Path(self.config.out_dir)

    def load(self) -> Run:
        saved = checkpoint.load(checkpoint.latest(self.config.out_dir))
        self.step, self.best_loss = checkpoint.restore(
            saved, self.model, self.optimizer, self.scaler, 1, self.distributed
        )
        return self

    def whole(self) -> dict[str, Tensor]:
        """Weights and optimizer, whole, copied."""
        flat: dict[str, Any] = tensors(self.model, self.optimizer)
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
            for name, t in flat.items()
        }


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all bits are the same."""
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


# --- saved by N, loaded by M ---


def train_and_save(rank: int, n: int, out: str, kind: str, steps: int = 3) -> dict[str, Tensor]:
    r = Run(out, kind).train(steps)
    r.save()
    return r.whole()


def load_and_compare(rank: int, n: int, kind: str, saved: dict[str, Any]) -> list[str]:
    """The kinds of run whose checkpoint gave what they held."""
    good = []
    for of, (out, want) in saved.items():
        r = Run(out, kind, seed=5).load()
        good += [of] * (r.step == 3 and same(r.whole(), want))
    return good


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """Where each kind of run was saved, and what it held."""
    made = {}
    for kind, n in (("one", 1), ("ddp", 2), ("fsdp", 2), ("hybrid", 4)):
        out = str(tmp_path_factory.mktemp(kind))
        gathered = run(train_and_save, n, out, kind)
        assert all(same(g, gathered[0]) for g in gathered)
        made[kind] = out, gathered[0]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("ddp", 2),
                                     ("hybrid", 4)])  # fmt: skip
def test_what_any_run_saved_any_number_of_processes_load_bit_for_bit(kind, n, saved):
    assert run(load_and_compare, n, kind, saved) == [list(saved)] * n


@pytest.mark.parametrize("of", ["ddp", "fsdp", "hybrid"])
def test_one_process_reads_all_of_it_on_its_own(of, saved):
    out, want = saved[of]
    assert load_and_compare(0, 1, "one", {of: saved[of]}) == [of]
    there = checkpoint.load(checkpoint.latest(out))
    weights = {f"model.{name}": t for name, t in there.weights().items()}
    assert same(weights, {name: t for name, t in want.items() if name.startswith("model.")})
    fresh = Run(out)  # by torch's own rules
    fresh.model = there.model()
    fresh.optimizer = build_optimizer(fresh.model, HOW, CPU)
    fresh.optimizer.load_state_dict(there.optimizer()["optimizer"])
    assert same(fresh.whole(), want)
