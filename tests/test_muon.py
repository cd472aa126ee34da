"""Muon against the singular value decomposition, torch.optim.Muon and AdamW."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import test_step
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step import NO_SCALER, state_of
from test_train import make_data, refusal, run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from core.optimizer import build_optimizer, orthogonal, set_learning_rate, update
from model import GPT, GPTConfig
from train import TrainConfig

CPU = torch.device("cpu")
RATES = 0.03, 0.02, 0.01, 0.005  # of matrices, embeddings, head and vectors
HOW: dict[str, Any] = {"optimizer": "muon", "muon_rates": RATES, "weight_decay": 0.1}
LLAMA: dict[str, Any] = {"position": "rope", "norm": "rms", "mlp": "swiglu", "n_kv_head": 1,
                         "tied": False, "bias": False, "qk_norm": True}  # fmt: skip
kinds = pytest.mark.parametrize("kind", [{"bias": True}, LLAMA], ids=["gpt", "llama"])


def small(kind: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(8, 19, 2, 2, 12, attention_backend="manual", **kind)).double()


def muon(model: GPT, **how: Any) -> Any:
    return build_optimizer(model, TrainConfig(**HOW | how), CPU)


def pieces(model: GPT, name: str) -> list[int]:
    if "c_attn" in name:
        return [12, 12, 12] if model.config.kv_heads == 2 else [12, 6, 6]
    if "c_fc" in name and model.config.mlp == "swiglu":
        return [model.config.hidden] * 2
    return [len(model.get_parameter(name))]


def factor(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def gradients(model: GPT, step: int) -> None:
    """Singular values near 1: the iterations lose none."""
    own, noise = (torch.Generator().manual_seed(seed) for seed in (0, step + 1))
    for name, p in model.named_parameters():
        p.grad = 0.04 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        for part in p.grad.split(pieces(model, name)) if p.dim() == 2 else ():
            part += factor(torch.randn(part.shape, generator=own, dtype=p.dtype))


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_batch_of_matrices_becomes_orthogonal(shapes: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    parts = [torch.linalg.svd(torch.randn(shape).double(), full_matrices=False) for shape in shapes]
    scaled = [(0.05 + torch.rand_like(s)) * 10 ** torch.randn(1) for _, s, _ in parts]
    found = orthogonal([(u * s[:, None]) @ vh for s, (u, _, vh) in zip(scaled, parts, strict=True)])
    for x, (u, _, vh) in zip(found, parts, strict=True):
        torch.testing.assert_close(x, u @ vh, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@kinds
def test_steps_by_the_singular_value_decomposition_and_by_adamw(kind: Any, dtype: Any) -> None:
    """q, k, v and SwiGLU's parts apart; all else by AdamW. Iterations may be in bfloat16."""
    model = small(kind)
    optimizer, config = muon(model), TrainConfig()
    optimizer.dtype = dtype
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum, rest = {name: torch.zeros_like(p) for name, p in want.items()}, {}
    for name, p in want.items():
        if p.dim() < 2 or ".h." not in name:
            rate = RATES[3] if p.dim() < 2 else RATES[2] if "lm_head" in name else RATES[1]
            betas = config.beta1, config.beta2
            rest[name] = torch.optim.AdamW([p], rate, betas, eps=1e-10, weight_decay=1e-3)
    for step in range(3):
        gradients(model, step)
        for name, p in model.named_parameters():
            want[name].grad = grad = p.grad.clone()  # type: ignore[union-attr]
            if name in rest:
                rest[name].step()
                continue
            momentum[name] = 0.95 * momentum[name] + 0.05 * grad
            nesterov = (0.05 * grad + 0.95 * momentum[name]).split(pieces(model, name))
            want[name] *= 1 - RATES[0] * 0.1
            for rows, part in zip(want[name].split(pieces(model, name)), nesterov, strict=True):
                rows -= RATES[0] * math.sqrt(max(1, len(part) / part.shape[1])) * factor(part)
        update(optimizer, NO_SCALER, torch.zeros(()), 0.0, torch.zeros(()))
        for name, p in model.named_parameters():
            atol = 1e-3 if dtype and name not in rest else 1e-7
            torch.testing.assert_close(p.detach(), want[name], rtol=1e-6, atol=atol, msg=name)


@pytest.mark.parametrize("spoiled", ["gradient", "loss"])
def test_clipping_and_what_is_not_finite(spoiled: str) -> None:
    models, bad = [small(LLAMA).float() for _ in range(2)], torch.zeros(())
    clipped, plain = models
    ours, theirs = muon(clipped), muon(plain)
    for step in range(3):
        for m in models:
            gradients(m, step)
            for p in m.parameters():
                p.grad *= 10**step  # type: ignore[operator]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
        update(ours, NO_SCALER, torch.zeros(()), 0.3, bad)
        torch.testing.assert_close([*clipped.parameters()], [*plain.parameters()])
    before = state_of(ours, [*clipped.parameters()])
    gradients(clipped, 3)
    if spoiled == "gradient":
        clipped.transformer.h[1].mlp.c_fc.weight.grad[2, 3] = math.inf
    update(ours, NO_SCALER, torch.tensor(math.nan if spoiled == "loss" else 1.0), 0.3, bad)
    assert bad
    for a, b in zip(before, state_of(ours, [*clipped.parameters()]), strict=True):
        assert torch.equal(a, b)


def test_a_step_never_asks_the_device() -> None:
    step = test_step.Step("float32", "float32", 2)
    step.optimizer = muon(step.model)
    assert step.watched().reads == []


@kinds
def test_operations_are_those_of_a_step(kind: Any) -> None:
    model = small(kind).float()
    optimizer = muon(model)
    gradients(model, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == optimizer.flops


def test_all_rates_follow_the_schedule() -> None:
    how: dict[str, Any] = {"max_iters": 100, "warmup_iters": 10, "min_lr": 0.0}
    config, optimizer = TrainConfig(**HOW, **how, decay_lr="linear"), muon(small(LLAMA))
    for step, share in ((0, 1 / 11), (10, 1), (30, 1), (65, 0.5), (93, 0.1), (100, 0)):
        rate = set_learning_rate(optimizer, step, config)
        assert rate == pytest.approx(share * RATES[0])  # the matrices'
        found = {group["lr"] for group in optimizer.param_groups}
        assert sorted(found) == pytest.approx(sorted({share * r for r in RATES}))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(make_data(tmp_path), out, max_iters=1, optimizer="muon").code == 0
    said = refusal(run(tmp_path, out, init_from="resume", optimizer="adamw"))
    assert "--optimizer=muon" in said and f"--init_from={out}" in said
