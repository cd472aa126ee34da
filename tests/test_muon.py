"""Muon: a step against the singular value decomposition, torch.optim.Muon and AdamW, alone and on
several processes."""

from __future__ import annotations

import contextlib
import io
import math
import re
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import test_train
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel import data_dir, ended_well, lines, losses, trained
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import checkpoint
import train
from core import parallel
from core.distributed import DistInfo
from core.optimizer import build_optimizer, orthogonal, set_learning_rate, update
from core.runtime import Setup
from model import GPT, GPTConfig
from train import TrainConfig

__all__ = ["data_dir"]  # a fixture
CPU = torch.device("cpu")
RATES = 0.03, 0.02, 0.01, 0.005  # of matrices, embeddings, head and vectors
HOW: dict[str, Any] = {"optimizer": "muon", "muon_rates": RATES, "weight_decay": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"bias": True},
    "llama": {"position": "rope", "norm": "rms", "mlp": "swiglu", "n_kv_head": 1, "tied": False,
              "bias": False, "qk_norm": True},
}  # fmt: skip


def small(kind: str) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(8, 19, 2, 2, 12, attention_backend="manual", **KINDS[kind])).double()


def pieces(model: GPT, name: str) -> list[int]:
    """The rows of each matrix in a parameter, by hand."""
    if "c_attn" in name:
        return [12, 12, 12] if model.config.kv_heads == 2 else [12, 6, 6]
    if "c_fc" in name and model.config.mlp == "swiglu":
        return [model.config.hidden] * 2
    return [dict(model.named_parameters())[name].shape[0]]


def factor(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def gradients(model: GPT, step: int) -> None:
    """Gradients of matrices whose singular values are near 1: the iterations lose none."""
    own, noise = (torch.Generator().manual_seed(seed) for seed in (0, step + 1))
    for name, p in model.named_parameters():
        p.grad = 0.04 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        if p.dim() == 2:
            for part in p.grad.split(pieces(model, name)):
                part += factor(torch.randn(part.shape, generator=own, dtype=p.dtype))


shapes = st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=4)


@given(shapes, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_batch_of_matrices_becomes_orthogonal(shapes: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    exact = [factor(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    for scale in (1e-4, 1.0, 1e4):
        found = orthogonal([x * scale for x in exact])
        for x, want in zip(found, exact, strict=True):
            torch.testing.assert_close(x, want, rtol=0, atol=1e-6)
    squeezed = []
    for x in exact:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        squeezed.append(u * (0.05 + 0.95 * torch.rand_like(s))[:, None] @ vh)
    for x, want in zip(orthogonal(squeezed), exact, strict=True):
        torch.testing.assert_close(x, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_the_singular_value_decomposition_and_by_adamw(kind: str) -> None:
    """q, k and v apart, and the two parts of SwiGLU; all else by AdamW with its own rates."""
    model, config = small(kind), TrainConfig(**HOW)
    optimizer = build_optimizer(model, config, CPU)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in want.items()}
    rate_of = {"transformer.wte": RATES[1], "transformer.wpe": RATES[1], "lm_head": RATES[2]}
    rest: dict[str, torch.optim.AdamW] = {}
    for name, p in want.items():
        if p.dim() < 2 or ".h." not in name:
            rate = RATES[3] if p.dim() < 2 else rate_of[name.removesuffix(".weight")]
            betas = config.beta1, config.beta2
            rest[name] = torch.optim.AdamW([p], rate, betas, eps=1e-10, weight_decay=1e-3)
    for step in range(3):
        gradients(model, step)
        for name, p in model.named_parameters():
            assert p.grad is not None
            if name in rest:
                want[name].grad = p.grad.clone()
                rest[name].step()
                continue
            momentum[name] = 0.95 * momentum[name] + 0.05 * p.grad
            nesterov = 0.05 * p.grad + 0.95 * momentum[name]
            want[name] *= 1 - RATES[0] * 0.1
            for rows, part in zip(want[name].split(pieces(model, name)),
                                  nesterov.split(pieces(model, name))):  # fmt: skip
                wide = math.sqrt(max(1, part.shape[0] / part.shape[1]))
                rows -= RATES[0] * wide * factor(part)
        update(optimizer, torch.amp.GradScaler("cpu", enabled=False), torch.zeros(()), 0.0,
               torch.zeros(()))  # fmt: skip
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), want[name], rtol=1e-6, atol=1e-7, msg=name)


def test_steps_by_torch() -> None:
    """torch.optim.Muon always iterates in bfloat16."""
    model = small("gpt").float()
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and "c_proj" in name]
    theirs = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}
    how: Any = {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12}
    muon = torch.optim.Muon(theirs.values(), RATES[0], weight_decay=0.1, **how)
    optimizer = build_optimizer(model, TrainConfig(**HOW), CPU)
    for step in range(4):
        before = {name: p.clone() for name, p in theirs.items()}
        gradients(model, step)
        for name, p in theirs.items():
            p.grad = model.get_parameter(name).grad
        muon.step()
        optimizer.step()
        for name, p in theirs.items():
            moved = (p - before[name]).norm()
            error = (model.get_parameter(name).detach() - p).norm()
            assert error < (step + 1) * 2**-7 * moved, (step, name, error / moved)


@pytest.mark.parametrize("spoiled", ["gradient", "loss"])
def test_clipping_and_what_is_not_finite(spoiled: str) -> None:
    scaler, bad = torch.amp.GradScaler("cpu", enabled=False), torch.zeros(())
    clipped, plain = small("llama").float(), small("llama").float()
    ours, theirs = (build_optimizer(m, TrainConfig(**HOW), CPU) for m in (clipped, plain))

    def state() -> list[Tensor]:
        kept = [t for s in ours.state.values() for t in s.values()]
        return [t.detach().clone() for t in [*clipped.parameters(), *kept]]

    for step in range(3):
        for m in (clipped, plain):
            gradients(m, step)
            for p in m.parameters():
                p.grad *= 10**step  # type: ignore[operator]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
        update(ours, scaler, torch.zeros(()), 0.3, bad)
        for p, q in zip(clipped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    before = state()
    gradients(clipped, 3)
    if spoiled == "gradient":
        clipped.transformer.h[1].mlp.c_fc.weight.grad[2, 3] = math.inf
    update(ours, scaler, torch.tensor(math.nan if spoiled == "loss" else 1.0), 0.3, bad)
    assert bad
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_operations_and_memory_are_those_of_a_step(kind: str) -> None:
    model = small(kind).float()
    optimizer: Any = build_optimizer(model, TrainConfig(**HOW), CPU)
    gradients(model, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == optimizer.flops
    tensors = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    tensors += [t for p in model.parameters() for t in (p, p.grad)]
    said = float(re.search(r"([\d.]+) MB", parallel.held(model, optimizer))[1])  # type: ignore
    assert said == pytest.approx(sum(t.nbytes for t in tensors) / 1e6, abs=0.05)


def test_all_rates_follow_the_schedule() -> None:
    config = TrainConfig(**HOW, decay_lr="linear", max_iters=100, warmup_iters=10, min_lr=0.0)
    optimizer = build_optimizer(small("llama"), config, CPU)
    for step, share in ((0, 1 / 11), (10, 1), (30, 1), (65, 0.5), (93, 0.1), (100, 0)):
        rate = set_learning_rate(optimizer, step, config)
        assert rate == pytest.approx(share * config.learning_rate)
        found = {group["lr"] for group in optimizer.param_groups}
        assert sorted(found) == pytest.approx(sorted({share * r for r in RATES}))


# --- several processes ---

RUN: dict[str, Any] = {**HOW, "muon_rates": "0.02", "max_iters": 20, "eval_interval": 20,
                       "position": "rope", "mlp": "swiglu", "norm": "rms", "bias": False,
                       "n_layer": 3, "decay_lr": "linear", "warmup_iters": 0, "peak_tflops": 1.0}


@pytest.fixture(scope="module")
def alone(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process; stopped after 10 steps, too."""
    out = tmp_path_factory.mktemp("alone")
    runs = lines(data_dir, out, one=RUN, half={**RUN, "max_iters": 10, "lr_decay_iters": 20})
    for line in runs.values():
        with contextlib.redirect_stdout(io.StringIO()):
            assert train.main(line) == 0
    return out


def same(out: Path, alone: Path, bits: bool = False) -> None:
    """Losses and weights are those of one process to 1e-5."""
    want, found = losses(alone / "one"), losses(out)
    assert want["20 loss"] < want["1 loss"] - 0.3 and "20 val_loss" in found
    ours, theirs = (checkpoint.load(checkpoint.latest(p)).weights() for p in (out, alone / "one"))
    assert {f"{step} loss" for step in range(11, 21)} < found.keys()
    for name in found.keys() & want.keys():
        x = found[name]
        assert x == want[name] if bits else abs(x - want[name]) < 1e-5, (out, name, x, want[name])
    for name, t in theirs.items():
        error = float((ours[name] - t).abs().max())
        assert error == 0 if bits else error < 1e-5, (out, name, error)


SHARED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"ddp": {}},
    2: {"ddp": {}, "fsdp": {"parallel": "fsdp"}},
    3: {"ddp": {}, "fsdp": {"parallel": "fsdp"}},
    4: {"ddp": {}, "fsdp": {"parallel": "fsdp"}, "ring": {"context_parallel": 2},
        "hybrid": {"parallel": "fsdp", "shard_size": 2}},
}  # fmt: skip


def stepped(rank: int, n: int, kinds: list[str]) -> dict[str, dict[str, Tensor]]:
    """The weights after three steps, by the kind of sharing."""
    found = {}
    everyone = DistInfo(CPU, rank, n, dist.group.WORLD if n > 1 else None)
    setup = Setup.of(CPU, "float32")
    for kind in kinds:
        model = small("llama")
        if kind != "ddp":
            parallel.shard(model, everyone, setup, None if kind == "fsdp" else 2)
        optimizer = build_optimizer(model, TrainConfig(**HOW), CPU, n)
        module = parallel.replicate(model, everyone) if kind == "ddp" else model
        for step in range(3):
            torch.manual_seed(step)
            x, y = (t.tensor_split(n)[rank] for t in torch.randint(19, (2, 12, 8)))
            train.train_step(module, optimizer, setup.scaler(), setup.autocast, x, y, 1, 0.0,
                             torch.zeros(()))  # fmt: skip
        found[kind] = {name: parallel.whole(t).clone() for name, t in model.state_dict().items()}
    return found


@pytest.mark.parametrize("n, kinds", [
    (2, ["ddp", "fsdp"]), pytest.param(3, ["ddp", "fsdp"], marks=pytest.mark.slow),
    pytest.param(4, ["ddp", "fsdp", "hybrid"], marks=pytest.mark.slow),
])  # fmt: skip
def test_whole_matrices_are_orthogonalized(n: int, kinds: list[str]) -> None:
    """In float64 the weights of one process, with rows that do not divide by n."""
    want = stepped(0, 1, ["ddp"])["ddp"]
    for found in processes.run(stepped, n, kinds):
        for kind in kinds:
            for name, t in want.items():
                torch.testing.assert_close(found[kind][name], t, rtol=0, atol=1e-8, msg=kind)


@pytest.mark.slow
@pytest.mark.parametrize("n", SHARED)
def test_any_number_of_processes_learns_the_same(
    n: int, data_dir: Path, alone: Path, tmp_path: Path
) -> None:
    runs = {name: {**RUN, **how} for name, how in SHARED[n].items()}
    ended_well(processes.run(trained, n, lines(data_dir, tmp_path, **runs), timeout=300))
    for name in runs:
        same(tmp_path / name, alone)


def resume(folder: Path, **how: Any) -> list[str]:
    words = {"out_dir": folder, "init_from": "resume", "max_iters": 20, **how}
    return [f"--{k}={v}" for k, v in words.items()]


def test_one_process_resumes_bit_for_bit(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone / "half", tmp_path / "out")
    with contextlib.redirect_stdout(io.StringIO()):
        assert train.main(resume(tmp_path / "out")) == 0
    same(tmp_path / "out", alone, bits=True)


@pytest.mark.slow
def test_other_numbers_of_processes_resume(alone: Path, data_dir: Path, tmp_path: Path) -> None:
    half = {**RUN, "max_iters": 10, "lr_decay_iters": 20}
    saved = lines(data_dir, tmp_path, ddp=half, fsdp={**half, "parallel": "fsdp"})
    ended_well(processes.run(trained, 3, saved, timeout=300))
    shutil.copytree(alone / "half", tmp_path / "one")
    for n, parallel_ in ((1, "ddp"), (2, "ddp"), (4, "fsdp")):
        runs = {}
        for name in ("one", "ddp", "fsdp"):
            shutil.copytree(tmp_path / name, folder := tmp_path / f"{name}-{n}")
            runs[name] = resume(folder, parallel=parallel_)
        ended_well(processes.run(trained, n, runs, timeout=300))
        for name in runs:
            same(tmp_path / f"{name}-{n}", alone)


def test_another_optimizer_is_refused(alone: Path) -> None:
    said = test_train.refusal(test_train.run_line(
        resume(alone / "half", optimizer="adamw"), alone / "half"))
    assert "--optimizer=muon" in said and f"--init_from={alone / 'half'}" in said
