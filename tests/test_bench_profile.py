"""bench_mfu.py train --profile: kernels and their rooflines."""

from __future__ import annotations

import json

import pytest
from benches import MODEL, run, small

from bench.parts import at_roofline, work
from core import flops
from model import GPTConfig

GPT2 = GPTConfig(bias=False)  # 124M, vocabulary 50304, T = 1024
H200, PEAK = 4.8e12, 989.4


def test_a_step_of_gpt2_on_an_h200():
    """By hand."""
    works = work(GPT2, 64, 1, "bfloat16", clip=True)
    N, C, L, P = 65536, 768, 12, 123_587_328 + 1024 * 768
    assert works["attention"].bytes == 2 * N * L * 12 * C
    assert works["norms and elementwise"].bytes == 2 * N * C * 8 * 25
    assert works["optimizer"].bytes == 32 * P
    assert works["embedding"].bytes == N * C * 8 + 8 * C * 50304
    by_bytes = {k for k, w in works.items() if w.limit(PEAK, H200) == "bytes"}
    assert by_bytes == {"norms and elementwise", "optimizer", "embedding"}
    best = at_roofline(works, GPT2, 64, PEAK, H200, PEAK)
    assert f"{best['ms']:.2f}" == "58.66"
    assert best["mfu"] == pytest.approx(854.77e6 * N / (best["ms"] / 1e3) / 989.4e12, rel=1e-5)


@pytest.mark.parametrize("kv_head, window", [(None, None), (2, None), (4, 3)])
def test_the_flops_of_the_parts_are_those_of_mfu(kv_head, window):
    """MFU counts norm gains, but not QK^T once more."""
    config = GPTConfig(16, 77, 3, 4, 32, kv_head, bias=False, attention_window=window)
    works = work(config, 5, 1, "float32", clip=False)
    model = works["linear"].flops + works["head and loss"].flops
    model += works["attention"].flops * 12 / 14
    a_token = flops.flops_per_token(config, 16, causal=True) - 6 * (2 * 3 + 1) * 32
    assert model == pytest.approx(5 * 16 * a_token, rel=1e-12)


@pytest.mark.parametrize("more", [
    (), pytest.param(("--compile=True", "--rounds=1"), marks=pytest.mark.slow)])
def test_a_profile_is_of_the_step_that_runs(more):
    """All micro-batches; compiled: Inductor's kernels."""
    code, out = run([*small("train"), "--backends=sdpa", "--gradient_accumulation_steps=3",
                     "--profile", "--bandwidth_gbs=8", "--json", *more])
    row = json.loads(out.splitlines()[-1])["rows"][0]
    found = row["profile"]
    assert code == 0 and {"products", "attention", "optimizer", "loss"} <= {*found["classes"]}
    calls = {name: n for name, _, n in found["names"]["attention"]}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 3 * 2  # of each layer
    fused = [name for name, *_ in found["names"]["elementwise"] if "cpp_fused" in name]
    assert bool(fused) == bool(more) == row["compiled"]
    works = work(MODEL, 3 * 4, 3, "float32", clip=True)
    parts = {"products": ("linear", "head and loss"), "attention": ("attention",), "gaps": (),
             "elementwise": ("norms and elementwise", "embedding"), "optimizer": ("optimizer",)}
    for kind, names in parts.items():
        least = sum(max(w.flops / 0.5e9, w.bytes / 8e6) for w in (works[name] for name in names))
        line = found["rooflines"][kind]
        assert line["roofline_ms"] == pytest.approx(least)
        assert line["share"] == pytest.approx(line["ms"] / sum(found["classes"].values()))
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    head = next(i for i, cells in enumerate(table) if cells[0].split()[1] == "kernels")
    shown = [[cell.strip(" |") for cell in line] for line in table[head + 2 :]]
    assert {line[0] for line in shown} >= {*found["classes"], "the step"}
    assert all(len(line) == 6 for line in shown)
    assert max(len(cell) for line in shown for cell in line) < 80
