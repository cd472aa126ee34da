"""core/profile.py on the CPU; no time is asserted.

Names of a GPU's kernels are from H100 profiles (bench/records).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core import profile
from core.optimizer import update
from model import GPT, GPTConfig

L = 2
SMALL = {"n_layer": L, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 64}


def profiled(backend: str, trace: Path | None = None, compiled: bool = False):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, attention_backend=backend))
    model.plan(2, compiled=compiled)
    module = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x = torch.randint(64, (2, 32))

    def step() -> None:
        loss = module(x, x)[1]
        loss.backward()
        update(optimizer, scaler, loss.detach(), 1.0, torch.zeros(()))
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile.profiled(torch.device("cpu"), 2, trace) as found:
        step()
        step()
    return found


@pytest.mark.parametrize("backend", ["sdpa", "manual"])
def test_a_step_by_classes(backend: str, tmp_path: Path):
    found = profiled(backend, tmp_path / "trace.json")
    calls = {kind: dict((n, c) for n, _, c in found.largest(kind, 99)) for kind in found.kernels}
    # Four linear layers and the head: one product forward, two backward.
    assert sum(calls["products"].get(f"aten::{n}", 0) for n in ("mm", "addmm")) == 3 * (4 * L + 1)
    attention = {"sdpa": "_scaled_dot_product_flash_attention_for_cpu", "manual": "_softmax"}
    assert calls["attention"][f"aten::{attention[backend]}"] == L
    assert calls["elementwise"]["aten::gelu"] == L
    assert calls["loss"]["aten::_log_softmax"] == 1
    assert calls["optimizer"]["aten::_fused_adamw_"] == 1
    assert "aten::linalg_vector_norm" in calls["optimizer"]  # clipping
    assert "communication" not in found.kernels
    assert sum(found.classes.values()) == pytest.approx(found.ms)
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(e["name"] == "aten::gelu" for e in events) == 2 * L


@pytest.mark.slow
def test_kernels_of_a_compiled_step():
    profile.prepare(torch.device("cpu"))
    found = profiled("manual", compiled=True)
    fused = {kind: [n for n, _, _ in found.largest(kind, 99) if "fused" in n]
             for kind in found.kernels}  # fmt: skip
    assert any("gelu" in name for name in fused["elementwise"])
    assert len(fused["loss"]) == 1
    assert any("_softmax" in name for name in fused["attention"])


@pytest.mark.parametrize(("kind", "names"), [  # a kernel's, then of what it ran in
    ("products", "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_splitK_NTN"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"),
    ("attention", "dkdv_kernel"),
    ("elementwise", "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_gelu_addmm_3"),
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
