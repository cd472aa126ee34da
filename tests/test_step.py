"""A training step: its rate, its update, its waits for the device, graph breaks."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_model
import torch
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import make_data, refusal, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from core import profile
from core.optimizer import (
    about,
    build_optimizer,
    learning_rate,
    orthogonal,
    set_learning_rate,
    update,
)
from model import GPT, GPTConfig
from train import TrainConfig, train_step

B, T, L, C, V = 3, 20, 2, 32, 80
KINDS = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "autocast")]
kinds = pytest.mark.parametrize("dtype, residual", few(KINDS), ids=map(" ".join, KINDS))


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("last", [None, 1, 2, 5, 20])
@pytest.mark.parametrize("low", [None, 0.0, 0.3])
def test_the_rate_rises_in_a_line_falls_as_a_cosine_and_stays(warmup, last, low):
    """In closed form; no rate is 0."""
    how = TrainConfig(learning_rate=2.0, min_lr=low, warmup_iters=warmup, max_iters=15,
                      lr_decay_iters=last)
    end, floor = 15 if last is None else last, 0.2 if low is None else low
    for step in range(30):
        cosine = math.cos(math.pi * (step - warmup) / (end - warmup)) if end > step >= warmup else 0
        want = ((step + 1) / (warmup + 1) * 2 if step < warmup else floor if step >= end
                else floor + (2 - floor) * (1 + cosine) / 2)
        assert learning_rate(step, how) == pytest.approx(want)
        assert learning_rate(step, replace(how, decay_lr=False)) == 2.0


# --- an update ---

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
RATES = 0.03, 0.02, 0.01, 0.005  # of matrices, embeddings, head and vectors
MUON: dict[str, Any] = {"optimizer": "muon", "muon_rates": RATES, "weight_decay": 0.1}
LLAMA = {**test_model.LLAMA, "n_kv_head": 1}
gpt_and_llama = pytest.mark.parametrize("sizes", [{"bias": True}, LLAMA], ids=["gpt", "llama"])


def small(sizes: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(8, 19, 2, 2, 12, attention_backend="manual", **sizes)).double()


def muon(model: GPT) -> Any:
    return build_optimizer(model, TrainConfig(**MUON), torch.device("cpu"))


def pieces(model: GPT, name: str) -> list[int]:
    """Rows of the matrices that a parameter joins."""
    if "c_attn" in name:
        return [12, 12, 12] if model.config.kv_heads == 2 else [12, 6, 6]
    if "c_fc" in name and model.config.mlp == "swiglu":
        return [model.config.hidden] * 2
    return [len(model.get_parameter(name))]


def factor(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def draw_gradients(model: GPT, step: int) -> None:
    """Singular values near 1: Muon's iterations lose none."""
    own, noise = (torch.Generator().manual_seed(seed) for seed in (0, step + 1))
    for name, p in model.named_parameters():
        p.grad = 0.04 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
        for part in p.grad.split(pieces(model, name)) if p.dim() == 2 else ():
            part += factor(torch.randn(part.shape, generator=own, dtype=p.dtype))


def state_of(optimizer: torch.optim.Optimizer, model: GPT) -> list[Tensor]:
    params = [*model.parameters()]
    kept = [t for p in params for _, t in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in [*params, *kept]]


@pytest.mark.parametrize("kind, scaled", [
    *itertools.product(("fused", "unfused"), (True, False)), ("muon", False)])
@pytest.mark.parametrize("clip", [0.0, 0.3, 1e6])
def test_an_update_is_clip_grad_norm_and_then_a_step(kind, scaled, clip):
    """Whatever the loss scale. What is not finite never reaches the weights, and is noted: the loop
    may look steps later."""
    models, how = [small(LLAMA).float() for _ in range(2)], {"lr": 1e-2, "weight_decay": 0.1}
    ours, theirs = models
    a, b = (muon(m) if kind == "muon" else torch.optim.AdamW(
        m.parameters(), fused=kind == "fused" and m is ours, foreach=False, **how) for m in models)
    scaler, bad = torch.amp.GradScaler("cpu", enabled=scaled), torch.zeros(())

    def step(i: int, loss: float = 1.0, spoil: float = 0.0) -> None:
        for m in models:
            draw_gradients(m, i)
            for p in m.parameters():
                p.grad *= 10**i  # norms that differ: Adam itself ignores a scale
        for p in ours.parameters():
            p.grad = scaler.scale(p.grad)
        ours.transformer.h[1].mlp.c_fc.weight.grad[2, 3] += spoil
        update(a, scaler, torch.tensor(loss), clip, bad)

    for i in range(3):
        step(i)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        b.step()
        torch.testing.assert_close(state_of(a, ours), state_of(b, theirs), rtol=1e-5, atol=1e-6)
    assert not bad
    for value, where in itertools.product((math.nan, math.inf, -math.inf), ("spoil", "loss")):
        bad.zero_()
        before, overflow = state_of(a, ours), scaled and where == "spoil"  # it only skips its step
        step(1, **{where: value})
        assert bool(bad) != overflow
        if not scaled or overflow:
            for x, y in zip(before, state_of(a, ours), strict=True):
                assert torch.equal(x, y)
        if not overflow:
            step(2)
            assert bad


class Watch(TorchDispatchMode):
    """Counts the host's reads."""

    reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Step:
    def __init__(self, dtype: str, residual: str, micro: int = 1, **changes: Any) -> None:
        torch.manual_seed(0)
        config: Any = {"bias": False, "attention_backend": "sdpa", **changes}
        self.model = GPT(GPTConfig(T, V, L, 2, C, **config))
        self.model.residual_autocast = residual == "autocast"
        cpu, half = torch.device("cpu"), dtype != "float32"
        self.optimizer = build_optimizer(self.model, TrainConfig(), cpu)
        self.autocast = torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=half)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.micro, self.bad = micro, torch.zeros(())
        self.x, self.y = torch.randint(V, (2, micro * B, T)).unbind()
        with self.autocast:
            self.model.plan()  # the probe is none of the step's work
        self.run: Any = self.model

    def __call__(self) -> Tensor:
        return train_step(self.run, self.optimizer, self.scaler, self.autocast, self.x, self.y,
                          self.micro, 1.0, self.bad)

    def reads(self) -> int:
        """Of the second step; in the first AdamW makes its state."""
        self()
        with Watch() as watch:
            loss = self()
        assert math.isfinite(loss)
        return watch.reads


def test_steps_are_those_of_plain_pytorch() -> None:
    """AdamW decays the matrices, not biases and norms."""
    step, config = Step("float32", "float32", 2, bias=True), TrainConfig()
    for group in step.optimizer.param_groups:
        group["eps"] = 1e-4  # else it enlarges the noise of a key bias's gradient
    for p in step.model.parameters():
        p.data += 0.3 * torch.randn(p.shape)  # nothing is zero
    plain = copy.deepcopy(step.model)
    matrices, vectors = ([p for p in plain.parameters() if (p.dim() > 1) == m] for m in (1, 0))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay},
         {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-4)
    for _ in range(3):
        losses = [plain(x, y)[1] for x, y in zip(step.x.split(B), step.y.split(B))]
        loss = torch.stack(losses).mean()
        adamw.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1
        adamw.step()
        torch.testing.assert_close(step(), loss.detach())
        torch.testing.assert_close([*step.model.parameters()], [*plain.parameters()])


@kinds
@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_never_asks_the_device(dtype, residual, micro):
    step = Step(dtype, residual, micro)
    assert step.reads() == 0
    step.optimizer = muon(step.model)
    assert step.reads() == 0


def test_between_log_lines_a_run_asks_for_nothing_but_the_flag_of_the_cpu(tmp_path):
    """The CPU reads whether all is finite after every step, a GPU does not."""
    make_data(tmp_path)
    reads = []
    for steps in (3, 3, 12):  # first it also tries the kernel
        with Watch() as watch:
            assert run(tmp_path, tmp_path / f"{steps}", max_iters=steps, log_interval=50).code == 0
        reads.append(watch.reads)
    assert reads[2] - reads[1] == 9


@kinds
@pytest.mark.parametrize("backend", few(["sdpa", "manual"]))
def test_forward_and_loss_are_one_graph_without_a_break(dtype, residual, backend):
    plain, step = (Step(dtype, residual, 2, attention_backend=backend) for _ in range(2))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    step.run = torch.compile(step.model, backend=keep, fullgraph=True)
    losses = [(float(plain()), float(step())) for _ in range(3)]
    torch.compiler.reset()
    assert len(graphs) == 1  # for every step and micro-batch
    for want, got in losses:
        assert got == pytest.approx(want, rel=1e-5 if dtype == "float32" else 1e-2)


# --- its profile ---


@pytest.mark.parametrize(("kind", "names"), [  # of an H100: a kernel's, then of what it ran in
    ("products", "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_splitK_NTN"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"),
    ("attention", "dkdv_kernel"),
    ("elementwise", "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_gelu_addmm_3"),
    ("elementwise", "cpp_fused__mkl_linear_add_2"),
    ("attention", "triton_per_fused__softmax_add_1"),
    ("elementwise", "triton_poi_fused_add_0 in triton_per_fused__softmax_add_1"),
    ("loss", "triton_red_fused__log_softmax__to_copy_sub_2"),
    ("optimizer", "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"),
    ("communication", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("other", "a_kernel_of_tomorrow"),
    ("attention", "nvjet_sm90_tst_192x192 in aten::bmm in aten::matmul"),
    ("products", "nvjet_sm90_tst_192x192 in aten::mm in _LinearCrossEntropy"),
    ("loss", "void at::native::elementwise_kernel<4> in aten::exp_ in _LinearCrossEntropy"),
    ("optimizer", "nvjet_sm90_tst_192x192 in aten::mm in Optimizer.step#Muon.step"),
])  # fmt: skip
def test_names_of_a_gpu(kind: str, names: str):
    name, *around = names.split(" in ")
    assert profile.class_of(name, around) == kind


# --- Muon against the singular value decomposition, torch.optim.Muon and AdamW ---

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
@gpt_and_llama
def test_steps_by_the_singular_value_decomposition_and_by_adamw(sizes: Any, dtype: Any) -> None:
    """q, k, v and SwiGLU's parts apart; all else by AdamW. Iterations may be in bfloat16."""
    model = small(sizes)
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
        draw_gradients(model, step)
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


@gpt_and_llama
def test_operations_are_those_of_a_step(sizes: Any) -> None:
    model = small(sizes).float()
    optimizer = muon(model)
    draw_gradients(model, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    printed = re.search(r"([\d.e-]+) GFLOP", about(optimizer)[0])
    assert printed and float(printed[1]) == pytest.approx(counter.get_total_flops() / 1e9, rel=1e-3)


def test_all_rates_follow_the_schedule() -> None:
    how: dict[str, Any] = {"max_iters": 100, "warmup_iters": 10, "min_lr": 0.0}
    config, optimizer = TrainConfig(**MUON, **how, decay_lr="linear"), muon(small(LLAMA))
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
