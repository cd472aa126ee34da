"""The arithmetic of the bench: its figures from made-up rounds, stamps and files, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import job

from attention import Spec
from bench import candidates, decoding, kernels, machine, rows, training
from bench.config import BenchConfig
from bench.job import Job
from bench.plan import planned
from bench.process import Outcome
from core.flops import Peak
from train import TrainConfig

CPU = torch.device("cpu")


# ----------------------------------------------------------------------------- rows


def outcome(*ms: float, about: dict[str, Any] | None = None, **warm: Any) -> Outcome:
    """Rounds of so many milliseconds; their parts are a half, a third and a tenth of it."""
    about = {"base_bytes": 1, "compiled": False, "dtype": "float32", **(about or {})}
    rounds = [
        {"ms": t, "forward_ms": t / 2, "backward_ms": t / 3, "optimizer_ms": t / 10,
         "peak_bytes": 100 + t}
        for t in ms
    ]
    return Outcome(about=about, setup_s=3.0, warm=warm, warm_up_s=2.0, rounds=rounds)


def test_a_share_of_more_than_one_is_no_figure_of_a_row():
    """Half as fast a peak or a memory, and the same times: no figure, and the reason."""
    peaks = Peak(1e-3, "--peak_tflops"), Peak(1e-6, "--peak_tflops")
    point = {"B": 1, "T": 64, "H": 2, "Hkv": 2, "D": 16, "window": None}
    found = outcome(10.0)
    good, bad = (rows.of_kernel(rows.begin("kernel", "a", point, found), found, p) for p in peaks)
    assert 0 < good["share"] < 1 and "share_why" not in good
    assert bad["share"] is None and bad["share_why"]
    point = {"B": 1, "P": 8, "new_tokens": 8, "cache": "none"}
    found = outcome(10.0, about={"weight_bytes": 1e6, "token_bytes": 10})
    found.rounds[0]["cache_bytes"] = 1
    row = rows.of_decoding(rows.begin("decode", "a", point, found), found, 1e7)
    assert row["mbu"] is None and row["mbu_why"]
    for bandwidth, known in ((0.99e8, False), (1.02e8, True)):  # 1.0001 MB in 10 ms
        assert (rows.of_decoding(row, found, bandwidth)["mbu"] is not None) == known


# ----------------------------------------------------------------------------- stamps


def test_the_bytes_of_a_token_are_of_the_dtype_and_of_the_heads_of_keys():
    sizes: Any = {"n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_layer": 3}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        about = decoding.Decoding(job("decode", "sdpa", dtype=dtype, **sizes)).about
        assert about["token_bytes"] == 2 * 3 * 2 * 8 * size
        weights = 64 * 32 + 3 * ((32 + 2 * 16 + 32) * 32 + 8 * 32 * 32) + 7 * 32
        assert about["weight_bytes"] == weights * size
    assert decoding.weight_bytes(100, 60, 2) == 40 * 2 + 60


# ----------------------------------------------------------------------------- the machine


def files(folder: Path, **content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")


def test_the_free_memory_of_a_container_is_what_its_limit_leaves(tmp_path, monkeypatch):
    files(tmp_path, meminfo="MemTotal: 9 kB\nMemAvailable:   5000000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory(CPU) == 5_000_000 * 1024
    files(tmp_path, memory__max="max\n", memory__current="7\n")
    assert machine.free_memory(CPU) == 5_000_000 * 1024
    files(tmp_path, memory__max="3000000000\n", memory__current="1200000000\n")
    assert machine.free_memory(CPU) == 1_800_000_000
    files(tmp_path, memory__max="30000000000\n")  # more than the machine has
    assert machine.free_memory(CPU) == 5_000_000 * 1024


def test_the_reference_is_of_the_whole_batch_and_its_flops_of_a_token():
    found = []
    for n in (1, 3):
        told = job("reference", "", batch_size=n)
        about = training.Reference(told).about
        model = Job(told).model()
        loss = model(*Job(told).random_tokens(n))[1]
        loss.backward()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        assert about["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert about["gradient_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)
        found.append(about["flops_per_token"])
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_micro_batches_make_the_step_of_the_whole_batch(clip):
    """Of a baseline's loop: the same loss, gradients and weights, and the marks of each part."""
    ends = []
    for micro in (1, 2, 4):
        told = job("train", "plain", attention_backend="manual", grad_clip=clip)
        plain = candidates.build("plain", Job(told))
        plain.for_training(plain.setup.scaler())
        marks: list[str] = []
        norms: list[float] = []

        def note(part: str, plain: Any = plain, marks: Any = marks, norms: Any = norms) -> None:
            marks.append(part)
            if part == "update":
                norms.append(training.gradient_norm(plain.model.parameters()))

        x, y = Job(told).random_tokens(4)
        loss = plain.step(x, y, micro, note).detach()
        assert marks == ["forward", "backward"] * micro + ["update", "end"]
        assert all(p.grad is None for p in plain.model.parameters())
        logits = Job(told).model()(x)[0]
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        assert float(loss) == pytest.approx(own.item(), rel=1e-5)
        ends.append((norms[0], plain.model.state_dict()))
    for norm, weights in ends[1:]:
        assert norm == pytest.approx(ends[0][0], rel=1e-4) and norm > 0.05
        for name, w in weights.items():
            torch.testing.assert_close(w, ends[0][1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_the_errors_of_a_call_by_hand(window):
    """Of the first sequence and the first two query heads, which share a head of keys."""
    torch.manual_seed(0)
    B, T, H, Hkv, D = 2, 6, 4, 2, 8
    q, k, v, dout = (torch.randn(B, T, h, D, dtype=torch.float64) for h in (H, Hkv, Hkv, H))
    for t in (q, k, v):
        t.requires_grad_()
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= i) & (j > i - (window or T))
    keys, values = (t.repeat_interleave(2, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / D**0.5
    probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", probs, values)
    truth = [t.detach() for t in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    spec = Spec(H, Hkv, D, "float64", window=window)

    def errors(bumped: int, *at: int) -> tuple[float, float]:
        got = [t.clone() for t in truth]
        got[bumped][at] += 0.25
        return kernels.errors(tuple(got), (q, k, v, dout), spec)

    for n, heads in enumerate((2, 2, 1, 1)):  # of the output, and the gradients of q, k, v
        most = 0.25 / float(truth[n][:1, :, :heads].abs().max())
        found = errors(n, 0, 4, heads - 1, 5)
        want = (most, 0.0) if n == 0 else (0.0, most)
        assert found == pytest.approx(want, abs=1e-12)
        for elsewhere in ((1, 4, 0, 5), (0, 4, heads, 5)):
            assert errors(n, *elsewhere) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("tf32, dtype, tflops", [
    (False, "float32", 19.5), (True, "float32", 156), (True, "bfloat16", 312), (True, "auto", 312),
])
def test_a_gpu_that_is_not_here_has_the_peak_of_what_is_asked_for(tf32, dtype, tflops) -> None:
    config = BenchConfig(train=TrainConfig(dtype=dtype, tf32=tf32))
    used, peak, (bandwidth, _) = planned.datasheet(config, "NVIDIA A100-SXM4-80GB")
    assert used == ("bfloat16" if dtype == "auto" else dtype)
    assert (peak.tflops, bandwidth) == (tflops, 2039e9)
