"""The arithmetic of the bench: its figures from made-up rounds, stamps and files, by hand."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bench import job

import bench_mfu
from attention import Spec
from bench import (
    candidates,
    decoding,
    kernels,
    machine,
    modes,
    records,
    roofline,
    rows,
    tables,
    training,
)  # fmt: skip
from bench.config import BenchConfig
from bench.job import Job
from bench.kernels import Kernels
from bench.process import Failure, Outcome
from core.flops import Peak
from inference import engine
from model import GPTConfig
from train import TrainConfig

CPU = torch.device("cpu")


class Ticks(machine.Clock):
    """A clock that moves on by given milliseconds at each stamp, in a circle; 1 at a stop."""

    def __init__(self, *steps: float) -> None:
        super().__init__(CPU)
        self.steps, self.now, self.n = steps, 0.0, 0

    def stamp(self) -> float:
        self.now += self.steps[self.n % len(self.steps)] / 1e3
        self.n += 1
        return self.now

    def start(self) -> float:
        return self.now

    def stop(self) -> float:
        self.now += 1 / 1e3
        return self.now


# ----------------------------------------------------------------------------- rows


def outcome(*ms: float, about: dict[str, Any] | None = None, **warm: Any) -> Outcome:
    """Rounds of so many milliseconds; their parts are a half, a third and a tenth of it."""
    about = {"base_bytes": 1, "compiled": False, "dtype": "float32", **(about or {})}
    rounds = [
        {"ms": t, "forward_ms": t / 2, "backward_ms": t / 3, "optimizer_ms": t / 10,
         "peak_bytes": 100 + t}
        for t in ms
    ]  # fmt: skip
    return Outcome(about=about, setup_s=3.0, warm=warm, warm_up_s=2.0, rounds=rounds)


def test_what_every_row_has():
    found = outcome(8.0, 2.0, 4.0, 1.0, 2.0, peak_bytes=90)
    row = rows.begin("train", "a", {}, found)
    assert (row["ms"], row["q1_ms"], row["q3_ms"]) == (2.0, 2.0, 4.0)
    assert row["spread"] == pytest.approx(1.0) and row["noisy"] is True
    parts = row["forward_ms"], row["backward_ms"], row["optimizer_ms"]
    assert parts == pytest.approx((1.0, 2 / 3, 0.2))
    assert row["memory_bytes"] == 108 and (row["setup_s"], row["warm_up_s"]) == (3.0, 2.0)
    assert rows.begin("train", "a", {}, outcome(1.0, peak_bytes=500))["memory_bytes"] == 500
    # numpy's percentiles are another library's quartiles
    ms = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0, 3.5]
    row = rows.begin("train", "a", {}, outcome(*ms))
    assert [row["q1_ms"], row["ms"], row["q3_ms"]] == pytest.approx(np.percentile(ms, (25, 50, 75)))


def test_a_training_row_by_hand():
    # V C + (C 3C + C C + 8 C C) + 3 gains of C = 20 + 48 + 6 = 74 weights; 6 * 74 = 444 FLOPs,
    # and 12 L C T = 96 for the square of scores, 60 for the 2.5 keys that a query sees
    config = GPTConfig(block_size=4, vocab_size=10, n_layer=1, n_head=1, n_embd=2, bias=False)
    found = outcome(1.0, 2.0, 4.0, 3.0, 2.0, first_step_s=5.0, loss=2.5, gradient_norm=3.0)
    reference = {"loss": 2.0, "gradient_norm": 2.0}

    def made(found: Outcome, sequences: int = 3) -> dict[str, Any]:
        row = rows.begin("train", "a", {}, found)
        return rows.of_training(row, found, config, sequences, Peak(1e-3, ""), reference)

    row = made(found)
    assert row["tokens_a_step"] == 12 and row["tokens_per_s"] == pytest.approx(6000)
    assert row["mfu"] == pytest.approx(6000 * 540 / 1e9)
    assert row["mfu_causal"] == pytest.approx(6000 * 504 / 1e9)
    assert row["loss_difference"] == 0.5 and row["gradient_norm_difference"] == 0.5
    assert "compile_s" not in row and row["first_step_s"] == 5.0
    slow = outcome(2.0, about={"compiled": True}, first_step_s=5.0)
    assert made(slow)["compile_s"] == pytest.approx(4.998)
    config = replace(config, dropout=0.1)  # which has drawn other weights than the reference
    assert "loss_difference" not in made(found)


def test_a_kernel_row_by_hand():
    point = {"B": 2, "T": 3, "H": 2, "Hkv": 1, "D": 4, "window": None}
    found = outcome(0.001, error_out=1e-7, error_grad=2e-7, memory_bytes=7)
    row = rows.of_kernel(rows.begin("kernel", "a", point, found), found, Peak(0.01, ""))
    # 4 B H D = 64 FLOPs a pair forward, twice that backward; 6 visible pairs of 9; a microsecond
    assert row["tflops_causal"] == pytest.approx(3 * 64 * 6 / 1e-6 / 1e12)
    assert row["tflops_full"] == pytest.approx(3 * 64 * 9 / 1e-6 / 1e12)
    assert row["share"] == pytest.approx(0.1152)
    assert (row["error_out"], row["error_grad"], row["memory_bytes"]) == (1e-7, 2e-7, 7)


def test_a_decoding_row_by_hand():
    point = {"B": 2, "P": 10, "cache": "dynamic", "new_tokens": 4}
    found = outcome(5.0, 5.0, about={"weight_bytes": 1000, "token_bytes": 10})
    for n, r in enumerate(found.rounds):
        r |= {"first_ms": 7.0, "cache_bytes": 50 + n}
    row = rows.of_decoding(rows.begin("decode", "a", point, found), found, 1e6)
    assert row["tokens_per_s"] == pytest.approx(400) and row["cache_bytes"] == 51
    assert row["mbu"] == pytest.approx((1000 + 2 * 12 * 10) / 0.005 / 1e6)
    assert row["first_ms"] == 7.0


def test_a_failure_is_no_figure():
    for kind, status in (("unavailable", "unavailable"), ("failed", "failed"), ("died", "failed")):
        found = Outcome(failure=Failure(kind, ["why"]))
        row = rows.begin("train", "a", {}, found)
        assert row["status"] == status and row["why"] == ["why"] and "ms" not in row
        assert rows.of_training(row, found, GPTConfig(), 1, Peak(1, ""), {}) == row
    row = rows.begin("train", "a", {}, Outcome())
    assert (row["status"], row["why"]) == ("stopped", ["no round was measured yet"])


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


def test_the_roofline_of_gpt2_by_hand():
    """Weights in float32, cast for each of 2 micro-batches; AdamW reads and writes 28 bytes."""
    C, L, V, T, tokens = 768, 12, 50304, 1024, 4 * 1024
    parts = roofline.work(GPTConfig(bias=False), 4, 2, "bfloat16", clip=False)
    assert parts["linear"].flops == 6 * tokens * L * 12 * C * C
    assert parts["head and loss"].flops == 6 * tokens * V * C
    # 2 products forward, 5 backward, of C numbers for each of (T + 1) / 2 keys: 2 FLOPs each
    assert parts["attention"].flops == 7 * 2 * tokens * L * C * (T + 1) / 2
    P = V * C + T * C + L * (12 * C * C + 2 * C) + C
    assert parts["optimizer"].bytes == (28 + 12) * P  # gradients of 2 micro-batches are added
    lines = roofline.lines(parts, 989.4, 4.8e12)
    by = {line["part"]: line for line in lines}
    assert by["linear"]["roofline_ms"] == pytest.approx(parts["linear"].flops / 989.4e9)
    assert by["optimizer"]["roofline_ms"] == pytest.approx(40 * P / 4.8e9)
    assert (by["linear"]["limit"], by["optimizer"]["limit"]) == ("FLOPs", "bytes")
    best = roofline.ceiling(parts, GPTConfig(bias=False), 4, 989.4, 4.8e12, 989.4)
    assert best["ms"] == pytest.approx(sum(line["roofline_ms"] for line in lines))


# ----------------------------------------------------------------------------- stamps


def test_the_parts_of_a_step_by_made_up_stamps():
    """Of two micro-batches: forward, backward, forward, backward, update, end."""
    worker = training.Training(job("train", "manual", gradient_accumulation_steps=2))
    worker.clock = Ticks(1, 2, 4, 8, 16, 32)
    found = worker.timed(2)
    assert found["ms"] == pytest.approx((2 * 63 + 1) / 2) and found["steps"] == 2
    assert found["forward_ms"] == pytest.approx(2 + 8)  # from "forward" to "backward"
    assert found["backward_ms"] == pytest.approx(4 + 16)
    assert found["optimizer_ms"] == pytest.approx(32)
    N = 64 * 32 + 12 * 32 * 32 + 3 * 32  # one layer, and the gains of its norms
    assert found["shape"] == {"B": 2 * 4, "T": 16, "parameters": N}


def test_the_bytes_of_a_token_are_of_the_dtype_and_of_the_heads_of_keys():
    sizes: Any = {"n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_layer": 3}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        about = decoding.Decoding(job("decode", "sdpa", dtype=dtype, **sizes)).about
        assert about["token_bytes"] == 2 * 3 * 2 * 8 * size
        weights = 64 * 32 + 3 * ((32 + 2 * 16 + 32) * 32 + 8 * 32 * 32) + 7 * 32
        assert about["weight_bytes"] == weights * size
    assert decoding.weight_bytes(100, 60, 2) == 40 * 2 + 60


def test_the_parts_of_an_attention_call_by_made_up_stamps():
    worker = Kernels(job("kernel", "manual"))
    worker.clock = Ticks(1, 2, 4)  # until a call, its forward, its backward
    point = {"B": 1, "T": 4, "H": 2, "Hkv": 2, "D": 8, "window": None}
    found = worker.round({**point, "seconds": 0.028})  # a call takes 8 ms, its stop included
    assert found["calls"] == round(28 / 8)
    assert found["ms"] == pytest.approx((found["calls"] * 7 + 1) / found["calls"])
    assert found["forward_ms"] == pytest.approx(2)
    assert found["backward_ms"] == pytest.approx(found["ms"] - 2)


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


def test_a_pipe_in_a_cell_begins_no_column():
    text = tables.markdown((["backend", "kernel"], [["a|b", "x"], ["c", "void f<int|long>"]]))
    assert [line.count("|") for line in text.splitlines()] == [3, 3, 3, 3]
    assert "a/b" in text


def committed() -> list[Path]:
    """The records of bench_mfu.py; some others have a form of their own."""
    files = sorted((records.ROOT / "bench" / "records").glob("*/record.json"))
    return [f.parent for f in files if '"format": 1' in f.read_text(encoding="utf-8")[:200]]


@pytest.mark.parametrize("folder", committed(), ids=lambda folder: folder.name)
def test_every_record_that_was_ever_committed_can_still_be_compared(folder, capsys):
    assert bench_mfu.main(["compare", str(folder), str(folder)]) == 0
    lines = [s for s in capsys.readouterr().out.splitlines() if "within noise" in s]
    assert lines and all("1.000" in line for line in lines)


def test_a_text_is_the_likeliest(monkeypatch):
    """Twice the same, and every token the largest logit of the model that is read whole."""
    worker = decoding.Decoding(job("decode", "sdpa"))
    drawn, there = list[Any](), list[float]()
    stream = engine.stream

    def noted(*given: Any, **how: Any) -> Any:
        for token in stream(*given, **how):
            drawn.append(token)
            there.append(time.perf_counter())
            yield token

    monkeypatch.setattr(engine, "stream", noted)
    prompt = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(3))
    first, last, _ = worker.who.write(prompt, 6, "dynamic")
    assert there[0] <= first <= there[1] < there[-1] <= last
    text, model = prompt, worker.who.model
    for tokens in drawn:
        with torch.no_grad():
            best = model(text)[0][:, -1].argmax(-1)
        assert [*map(int, torch.as_tensor(tokens).flatten())] == best.tolist()
        text = torch.cat((text, best[:, None]), dim=1)
    assert len(drawn) == 6


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


def test_a_target_is_the_token_that_follows():
    x, y = Job(job("train", "sdpa")).random_tokens(3)
    assert x.shape == y.shape == (3, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, y) and 32 < int(x.max()) < 64
    again = Job(job("train", "manual")).random_tokens(3)
    assert torch.equal(again[0], x) and torch.equal(again[1], y)


@pytest.mark.parametrize("tf32, dtype, tflops", [
    (False, "float32", 19.5), (True, "float32", 156), (True, "bfloat16", 312), (True, "auto", 312),
])  # fmt: skip
def test_a_gpu_that_is_not_here_has_the_peak_of_what_is_asked_for(tf32, dtype, tflops) -> None:
    config = BenchConfig(train=TrainConfig(dtype=dtype, tf32=tf32))
    used, peak, (bandwidth, _) = modes.datasheet(config, "NVIDIA A100-SXM4-80GB", "--gpu")
    assert used == ("bfloat16" if dtype == "auto" else dtype)
    assert (peak.tflops, bandwidth) == (tflops, 2039e9)
