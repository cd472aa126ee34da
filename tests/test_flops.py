"""The arithmetic of MFU: against real models, against torch's own counter, against datasheets."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import LLAMA
from torch.utils.flop_counter import FlopCounterMode

from attention import visible
from core import flops
from core.cpu import matmul as cpu_matmul
from core.flops import Peak, Speed, datasheet_peak, flops_per_token, mean_keys, n_params
from core.gpus import RATED, datasheet_bandwidth
from model import GPT, GPTConfig

GPT2 = GPTConfig(bias=False)  # 124M, vocabulary 50304, T = 1024


def test_gpt2_124m_by_hand() -> None:
    N = 123_587_328
    with torch.device("meta"):
        model = GPT(GPT2)
    assert n_params(GPT2) == model.get_num_params() == N
    assert model.get_num_params(non_embedding=False) == 124_373_760
    narrow = replace(GPT2, attention_window=128)
    for config, keys in ((GPT2, (1024 + 1) / 2),  # a query sees itself; T / 2 would give 798.15
                         (narrow, (128 * 129 / 2 + (1024 - 128) * 128) / 1024)):
        assert flops_per_token(config, 1024) == 6 * N + 12 * 12 * 12 * 64 * 1024
        assert flops_per_token(config, 1024, causal=True) == 6 * N + 12 * 12 * 12 * 64 * keys
    in_millions = [flops_per_token(GPT2, 1024, causal) / 1e6 for causal in (False, True)]
    assert [f"{n:.2f}" for n in in_millions] == ["854.77", "798.20"]


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({
    "n_layer": st.integers(1, 3), "vocab_size": st.sampled_from([7, 65, 50304]),
    "position": st.sampled_from(["learned", "rope", "alibi"]),
    "norm": st.sampled_from(["layer", "rms"]), "mlp": st.sampled_from(["gelu", "swiglu"]),
    "bias": st.sampled_from([True, False, "qkv"]), "qk_norm": st.booleans(), "tied": st.booleans(),
    "head_size": st.sampled_from([None, 8]), "n_hidden": st.sampled_from([None, 20])}),
    st.sampled_from([(1, None), (4, None), (4, 2), (4, 1), (12, 3)]))
def test_n_params_is_the_real_models(changes, heads) -> None:
    changes |= {"head_size": 8} if changes["position"] == "rope" else {}  # an even width
    config = GPTConfig(16, n_head=heads[0], n_kv_head=heads[1], n_embd=48, **changes)
    with torch.device("meta"):
        model = GPT(config)
    assert n_params(config) == model.get_num_params()


@pytest.mark.parametrize("T", [1, 2, 64, 1025, 2100])
def test_mean_keys_counts_what_is_visible(T) -> None:
    for window in (None, 1, 2, 7, T - 1 or 1, T, T + 1, 10 * T):
        at = torch.arange(T)
        seen = int(visible(at[:, None], at[None, :], 0, window).sum())
        assert mean_keys(T, window) == seen / T, window


# --- against torch's counter ---


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False, "n_kv_head": 2}, LLAMA],
                         ids=["gpt2", "gqa", "llama"])
def test_the_formula_against_flop_counter_mode(options) -> None:
    """But for norm gains and biases; addmm_ is new to the counter. manual computes the whole square
    of scores."""
    config = GPTConfig(32, 65, 3, 4, 16, attention_backend="manual", **options)
    model, idx = GPT(config), torch.randint(65, (2, 24))
    model(idx, idx)

    def addmm_flops(self, a, b, out_shape, **kwargs) -> int:  # the shapes of its arguments
        return 2 * a[0] * a[1] * b[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops})
    with counter:
        model(idx, idx)[1].backward()
    elementwise = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    a_token = flops_per_token(config, idx.shape[1]) - 6 * elementwise
    assert counter.get_total_flops() == a_token * idx.numel()


def test_the_peak_is_that_of_either_setting_of_tf32(monkeypatch) -> None:
    """PyTorch refuses to read allow_tf32 once fp32_precision was used."""
    matmul = torch.backends.cuda.matmul
    before, name = matmul.allow_tf32, "NVIDIA A100-SXM4-80GB"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    try:
        for tf32, new in itertools.product((True, False), (False, True)):
            if new:
                matmul.fp32_precision = "tf32" if tf32 else "ieee"
            else:
                matmul.allow_tf32 = tf32
            assert flops.peak("cuda", "float32") == datasheet_peak(name, "float32", tf32)
    finally:
        matmul.allow_tf32 = before


def test_the_mfu_anchors_are_recomputed_from_their_own_columns() -> None:
    """docs/MEASURE.md, the table of published figures."""
    track_3 = GPTConfig(n_head=6, position="rope", norm="rms", tied=False)
    configs = (GPT2, GPTConfig(), track_3, GPTConfig(vocab_size=50257, bias=False))
    by_size = {f"{n_params(c) / 1e6:.2f}": c for c in configs}
    page = (Path(__file__).parents[1] / "docs" / "MEASURE.md").read_text(encoding="utf-8")
    lines = page.partition("## MFU anchors")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    known = [row for row in rows[2:] if row[6] != "-"]
    assert len(known) >= 10
    for gpus, _, N, tflops, tokens, ms, rate, *shares, _ in known:
        count, _, name = gpus.partition(" x ")
        full_name = next(gpu.name for gpu in RATED if gpu.short.startswith(name))
        peak = datasheet_peak(full_name, "bfloat16")
        assert peak and f"{peak.tflops:,g}" == tflops
        tokens_per_s, tokens, ms = (x.replace(",", "") for x in (rate, tokens, ms))
        if ms != "-":
            assert round(1000 * int(tokens) / float(ms) / int(count)) == int(tokens_per_s), gpus
        found = Speed(by_size[N], 1024, int(tokens_per_s), peak).mfu
        assert [f"{share:.1%}" for share in found] == shares, gpus


# --- peak rates ---

ALSO = ["A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A800 40GB Active", "NVIDIA H800",
        "TITAN RTX", "AMD Instinct MI300X VF"]  # other names of devices in the table
UNKNOWN = ["NVIDIA A10G", "NVIDIA H20", "NVIDIA GB200", "NVIDIA T1000", "NVIDIA RTX A5000",
           "NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER",
           "NVIDIA GeForce RTX 4090 D", "Tesla V100S-PCIE-32GB", "GRID A100-10C",
           "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 64GB HBM2", "AMD Instinct MI325X"]


@pytest.mark.parametrize("name", [*(gpu.name for gpu in RATED), *ALSO])
def test_the_rates_of_a_datasheet_fit_one_another(name) -> None:
    """A dense TF32 product runs at half the half precision rate; a sparse figure is twice the dense
    one."""
    half, bfloat16, single = (datasheet_peak(name, d) for d in ("float16", "bfloat16", "float32"))
    tf32 = datasheet_peak(name, "float32", True)
    assert half and single and half.tflops > single.tflops
    assert half.source.startswith("datasheet: ") and str(half.source) in str(half)
    assert (bfloat16 is None) == (tf32 is None)  # before Ampere there is neither
    if tf32:
        assert bfloat16 == half and tf32.tflops == pytest.approx(half.tflops / 2, rel=0.012)
    assert datasheet_peak(name, "float64") is None
    rate, source = datasheet_bandwidth(name)
    assert 3e11 <= rate < 1e13 and source == half.source


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_device_that_is_not_in_the_table_is_not_taken_for_another(name) -> None:
    for dtype, tf32 in itertools.product(("bfloat16", "float16", "float32"), (False, True)):
        assert datasheet_peak(name, dtype, tf32) is None


def test_a_measured_peak_leaves_the_random_state_alone(monkeypatch) -> None:
    cpu_matmul.exact()  # remembered: it is tried at its own sizes
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **how: randn(2, 64, 64, **how))
    before = torch.get_rng_state()
    assert 0 < flops.measured_tflops(torch.device("cpu"), torch.bfloat16) < math.inf
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def kept(tmp_path: Path, monkeypatch) -> Path:
    """Measurements give 1, 2, 3, ... TFLOP/s."""
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    numbers = map(float, itertools.count(1))
    monkeypatch.setattr(flops, "measured_tflops", lambda *device: next(numbers))
    return tmp_path / "rates.json"


def test_a_measured_peak_is_kept_and_shown_with_its_age(kept: Path) -> None:
    found = [flops.peak("cpu", "float32") for _ in range(2)]
    assert [p.tflops for p in found] == [1.0, 1.0] and all(p.measured for p in found)
    assert all(p.of == " of measured peak" for p in found)
    assert flops.peak("cpu", "bfloat16").tflops == 2.0
    text = kept.read_text(encoding="utf-8")
    today = str(datetime.now(timezone.utc).date())
    before = str(datetime.now(timezone.utc).date() - timedelta(days=6))
    kept.write_text(text.replace(today, before), encoding="utf-8")
    old = flops.peak("cpu", "float32")
    assert old.tflops == 1.0 and before in old.source and "6 days" in old.source
    again = flops.peak("cpu", "float32", "measure")
    assert again.tflops == 3.0 and today in again.source
    assert flops.peak("cpu", "float32").tflops == 3.0
    own = flops.peak("cpu", "float32", 0.5)
    assert own.tflops == 0.5 and own.of == " of --peak_tflops" and not Peak(3, "datasheet: x").of
    assert flops.peak("cpu", "bfloat16").tflops == 2


@pytest.mark.parametrize("value", [1.0, [math.nan, "x", False]])
def test_a_damaged_file_of_rates_is_measured_again(value: Any, kept: Path, caplog) -> None:
    flops.peak("cpu", "float32")
    known = json.loads(kept.read_text(encoding="utf-8"))
    kept.write_text(json.dumps(dict.fromkeys(known, value)), encoding="utf-8")
    assert [flops.peak("cpu", "float32").tflops for _ in range(2)] == [2.0, 2.0]
    kept.unlink()
    kept.mkdir()  # it cannot be kept: measured each time, with a warning
    assert [flops.peak("cpu", "float32").tflops for _ in range(2)] == [3.0, 4.0]
    assert len(caplog.records) == 2 and [*kept.parent.iterdir()] == [kept]
    kept.rmdir()  # nor is it written through a link
    (precious := kept.with_name("precious")).write_text("mine", encoding="utf-8")
    kept.with_name(f"rates.json.{os.getpid()}.partial").symlink_to(precious)
    assert [flops.peak("cpu", "float32").tflops for _ in range(2)] == [5.0, 5.0]
    assert precious.read_text(encoding="utf-8") == "mine" and not kept.is_symlink()


def test_a_rate_of_a_busy_machine_is_measured_again_when_it_is_idle(
    kept: Path, monkeypatch
) -> None:
    share, ticks = [0.0], itertools.count()  # of the time in which this thread has a core
    monkeypatch.setattr(flops, "clock", lambda: ((n := next(ticks)), n * (1 - share[0])))
    for share[0], rate, busy in ((0.5, 1, True), (0.5, 1, True), (1.0, 2, False), (0.5, 2, False)):
        found = flops.peak("cpu", "float32")
        assert found.tflops == rate and ("other programs" in found.source) == busy


@pytest.mark.parametrize("peak, devices, full, causal", [
    (312, 1, 128.2155 / 312, 119.7306 / 312), (312, 8, 128.2155 / 312, 119.7306 / 312),
    (125, 1, None, 119.7306 / 125), (100, 1, None, None)])
def test_mfu_is_a_share_of_the_peak_of_all_devices(peak, devices, full, causal) -> None:
    """150,000 tokens/s of GPT-2 124M are 128.2 TFLOP/s, 119.7 of them on visible pairs. More than
    the peak is no figure."""
    of = Peak(peak, "--peak_tflops")
    row = Speed(GPT2, 1024, devices * 150_000, of, devices=devices).row()
    for key, want in (("mfu", full), ("mfu_causal", causal)):
        assert row[key] == (want and pytest.approx(want, rel=1e-5))
    assert (full is None) == (f"{peak} TFLOP/s" in row.get("mfu_why", ""))
