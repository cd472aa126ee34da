"""The arithmetic of the bench, with expected values from elsewhere: by hand, by made-up clocks.

Whoever measures is measured: every figure of a row is computed here from made-up rounds, stamps
and files, by the code that computes it in a run.
"""

from __future__ import annotations

import json
import math
import pickle
import platform
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_bench import job
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import bench_mfu
from attention import Spec
from bench import (
    against_nanogpt,
    candidates,
    compare,
    decoding,
    kernels,
    machine,
    modes,
    records,
    rows,
    tables,
    training,
)  # fmt: skip
from bench import worker as worker_
from bench.bench import Bench
from bench.config import BenchConfig, load_config
from bench.job import Job
from bench.kernels import Kernels
from bench.process import Failure, Outcome
from core import runtime
from core.flops import Peak
from core.settings import UserError
from inference import engine
from model import GPT, GPTConfig
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


def test_a_row_whose_process_died_in_a_round_is_no_row():
    found = outcome(8.0, 2.0)
    for kind, status in (("died", "failed"), ("failed", "failed"), ("stopped", "ok")):
        found.failure = Failure(kind, ["so"])
        row = rows.begin("train", "a", {}, found)
        assert row["status"] == status and ("ms" in row) == (status == "ok")


def test_a_point_in_words():
    assert rows.where({"B": 1, "window": None, "processor": True, "late": False}) == "B=1 processor"


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


def test_a_step_is_of_all_micro_batches(monkeypatch):
    config = BenchConfig(train=TrainConfig(batch_size=4, gradient_accumulation_steps=3,
                                           block_size=16, n_layer=1, n_head=2, n_embd=32),
                         batch_size=4, sweep=False)  # fmt: skip
    here = {"peak_tflops": 1.0, "peak_source": "given", "peak_measured": False}
    bench = Bench("train", config, "cpu", 64, ["sdpa"], None, print, here)
    asked = []

    def measure(self: Any, found: Any, jobs: Any, ask: Any, row: Any, **how: Any) -> Any:
        asked.append(jobs["sdpa"]["train"]["gradient_accumulation_steps"])
        return [row("sdpa", "", outcome(10.0))]

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(Bench, "ask_once", lambda self, kind, n: {"why": f"{kind} {n}"})
    (row,) = modes.train(bench)
    assert asked == [3] and bench.reference == {"why": "reference 12"}
    assert row["tokens_a_step"] == 4 * 3 * 16 and row["tokens_per_s"] == pytest.approx(19200)


@pytest.mark.parametrize("device, given, tokens", [
    ("cpu", None, 16), ("cuda:0", None, 128), ("cuda:0", 32, 32)])  # fmt: skip
def test_a_text_on_cuda_is_longer_than_it_takes_to_record_a_graph(
    device, given, tokens, monkeypatch
):
    config = BenchConfig(new_tokens=given, kv_caches=("static",))
    bench = Bench("decode", config, device, 64, ["sdpa"], None, print, {"bandwidth": 1.0})
    asked: list[Any] = []

    def measure(self: Any, found: Any, jobs: Any, points: Any, *how: Any, **more: Any) -> Any:
        asked.extend((p["P"], p["new_tokens"]) for p in points.values())
        return []

    monkeypatch.setattr(Bench, "measure", measure)
    modes.decode(bench)
    assert asked == [(1024 // 2 - tokens, tokens)] * 2


def test_the_better_of_two_looks_at_the_machine_counts_for_all_rows():
    def told(tflops: float, gbs: float | None, when: str) -> dict[str, Any]:
        return {"peak_tflops": tflops, "peak_source": f"measured {when}", "peak_measured": True,
                "bandwidth": gbs, "bandwidth_source": f"measured {when}"}  # fmt: skip

    here, looks = told(0.1, 5.0, "before"), iter([told(0.3, 4.0, "after"), told(9.0, 9.0, "late")])
    bench = Bench("train", BenchConfig(), "cpu", 64, [], None, print, here)
    bench.ask_once = lambda kind, n=1: next(looks)  # type: ignore[method-assign]
    bench.look_again()
    bench.look_again()
    assert (here["peak_tflops"], here["bandwidth"]) == (0.3, 5.0)
    assert bench.peak == Peak(0.3, "measured after", True)
    assert here["bandwidth_source"] == "measured before"
    given: dict[str, Any] = {"peak_tflops": 0.1, "peak_source": "--peak_tflops",
                             "peak_measured": False, "bandwidth": None}  # fmt: skip
    Bench("train", BenchConfig(), "cpu", 64, [], None, print, given).look_again()
    assert given["peak_tflops"] == 0.1


def test_decoding_is_held_against_the_better_of_two_bandwidths():
    """Also where the peak is a datasheet's."""
    here = {"peak_tflops": 989.4, "peak_source": "datasheet: x", "peak_measured": False,
            "bandwidth": 5.0, "bandwidth_source": "measured before"}  # fmt: skip
    bench = modes.Bench("decode", BenchConfig(), "cpu", 64, [], None, print, here)
    again = {**here, "bandwidth": 6.0, "bandwidth_source": "measured after"}
    bench.ask_once = lambda kind, n=1: again  # type: ignore[method-assign]
    bench.look_again()
    assert (here["bandwidth"], here["bandwidth_source"]) == (6.0, "measured after")


def test_a_share_of_more_than_one_is_no_figure_of_a_row():
    """Half as fast a peak or a memory, and the same times: no figure, and the reason."""
    peaks = Peak(1e-3, "--peak_tflops"), Peak(1e-6, "--peak_tflops")
    point = {"B": 1, "T": 64, "H": 2, "Hkv": 2, "D": 16, "window": None}
    found = outcome(10.0)
    good, bad = (rows.of_kernel(rows.begin("kernel", "a", point, found), found, p) for p in peaks)
    assert 0 < good["share"] < 1 and "share_why" not in good
    why = "it does more than the peak of 1e-06 TFLOP/s (--peak_tflops)"
    assert (bad["share"], bad["share_why"]) == (None, why)
    point = {"B": 1, "P": 8, "new_tokens": 8, "cache": "none"}
    found = outcome(10.0, about={"weight_bytes": 1e6, "token_bytes": 10})
    found.rounds[0]["cache_bytes"] = 1
    row = rows.of_decoding(rows.begin("decode", "a", point, found), found, 1e7)
    assert row["mbu"] is None and "more than the 0.01 GB/s of the memory" in row["mbu_why"]
    for bandwidth, known in ((0.99e8, False), (1.02e8, True)):  # 1.0001 MB in 10 ms
        assert (rows.of_decoding(row, found, bandwidth)["mbu"] is not None) == known
    said = tables.answers({"mode": "kernel", "rows": [bad, {**bad, "backend": "b"}]})
    assert f"Peak: share of the peak not known of a, b: {why}." in said


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


def test_a_round_has_as_many_steps_as_its_seconds_hold(monkeypatch):
    worker = training.Training(job("train", "manual"))
    asked: list[int] = []
    monkeypatch.setattr(worker, "timed", lambda n: asked.append(n) or {"ms": 1.0})
    for step_s in (0.2, 0.3, 7.0):
        worker.step_s = step_s
        worker.round({"seconds": 1.0})
    assert asked == [5, 3, 1]


@pytest.mark.parametrize("more", [0, 1, 3])
def test_what_comes_before_the_first_round_and_each_round(more, monkeypatch):
    """The first step and its gradients; as many again; one that is timed, one that is looked at."""
    worker = training.Training(job("train", "manual", grad_clip=0.0))
    x, y = worker.batch
    did: list[str] = []
    held = iter((10, 20, 30))
    step = worker.who.step

    def noted(x: Any, y: Any, micro: int, mark: Any) -> Any:
        did.append("step")
        return step(x, y, micro, mark)

    def timed(steps: int) -> dict[str, Any]:
        did.append(f"{steps} timed")
        return {"ms": 250.0}

    def memory(device: Any, peak: bool = True) -> int:
        did.append("peak" if peak else "held")
        return next(held)

    monkeypatch.setattr(worker.who, "step", noted)
    monkeypatch.setattr(worker, "timed", timed)
    monkeypatch.setattr(worker.scaler, "get_scale", lambda: 8.0)
    monkeypatch.setattr(machine, "memory", memory)
    monkeypatch.setattr(machine, "reset_peak", lambda device: did.append("reset"))
    model = Job(job("train", "manual")).model()
    loss = model(x, y)[1]
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    found = worker.round({"warm_up": True, "warm_up_steps": more})
    assert did == ["step", "reset", *["step"] * more, "1 timed", "peak", "step", "reset"]
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6) and found["peak_bytes"] == 10
    assert found["gradient_norm"] == pytest.approx(norm / 8, rel=1e-5)
    assert worker.step_s == 0.25 and found["first_step_s"] > 0 and "profile" not in found
    did.clear()
    assert worker.round({"seconds": 1.1}) == {"ms": 250.0, "peak_bytes": 20}
    assert did == ["step", "4 timed", "peak"]
    did.clear()
    assert worker.round({"steps": 7})["peak_bytes"] == 30 and did == ["7 timed", "peak"]


def test_a_profile_is_taken_once(monkeypatch):
    worker = training.Training(job("train", "manual"))
    asked: list[int] = []
    monkeypatch.setattr(worker, "profile", lambda steps: asked.append(steps) or {"of": steps})
    monkeypatch.setattr(training, "profiler", lambda device: nullcontext())
    monkeypatch.setattr(training, "kernels_of", lambda looking: {"kernels": ["x"]})
    found = [worker.warm_up({"profile": n, "again": again, "warm_up_steps": 0})
             for n in (0, 3) for again in (False, True)]  # fmt: skip
    assert [answer.get("profile") for answer in found] == [None, None, {"of": 3}, None]
    assert asked == [3] and all(answer["kernels"] == ["x"] for answer in found)


def test_modules_are_watched_in_steps_that_are_not_compiled(monkeypatch):
    """Hooks would break its graph: there the names of the kernels tell."""
    worker = training.Training(job("train", "manual"))
    did: list[bool] = []
    looking: Any = nullcontext()
    looking.events = list  # it saw nothing
    monkeypatch.setattr(training, "profiler", lambda device, shapes: looking)
    monkeypatch.setattr(
        training.Scopes, "modules", lambda self: nullcontext(did.append(worker.compiled))
    )
    for worker.compiled in (False, True):
        assert worker.profile(1)["why"].startswith("the profiler saw no kernel")
    assert did == [False]


def test_what_a_worker_tells_of_its_training(monkeypatch):
    """The dtype that was taken, not the one that was asked for; the memory before the model."""
    held = iter(range(100, 200))
    did: list[str] = []
    monkeypatch.setattr(training, "keep_freed_memory", lambda: did.append("kept"))
    training.Training({**job("train", "manual"), "baseline": "plain"})
    assert not did  # a baseline runs as its users run it
    monkeypatch.setattr(machine, "memory", lambda device, peak=True: next(held) + 1000 * peak)
    told = job("train", "manual", dtype="auto")
    about = training.Training(told).about
    assert about == {
        "title": attention.get("manual").title, "compiled": False, "base_bytes": 100,
        "dtype": runtime.dtype_name(Job(told).setup.dtype),
    }  # fmt: skip
    assert did == ["kept"]


def test_the_seconds_of_a_step_that_fits_and_the_most_that_it_held(monkeypatch):
    worker = training.Training(job("train", "manual"))
    worker.clock = Ticks(1)
    did: list[Any] = []
    monkeypatch.setattr(machine, "memory", lambda device, peak=True: 100 if peak else 1)
    monkeypatch.setattr(machine, "reset_peak", lambda device: did.append("reset"))
    monkeypatch.setattr(worker, "step", lambda x, y: did.append(len(x)) or torch.ones(()))
    found = worker.fits(3)
    assert found["seconds"] == pytest.approx(0.001)  # one stop
    assert found["peak_bytes"] == 100 and did == [1, "reset", 3]
    monkeypatch.setattr(worker, "step", lambda x, y: torch.tensor(math.nan))
    with pytest.raises(FloatingPointError):
        worker.fits(3)


def test_a_kernel_is_asked_for_in_the_dtype_of_the_run(monkeypatch):
    worker = Kernels(job("kernel", "manual", dtype="bfloat16"))
    asked: list[Any] = []
    attend = attention.get("manual").attend

    def noted(q: Any, k: Any, v: Any, spec: Any) -> Any:
        asked.append((spec, q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, spec)

    monkeypatch.setattr(attention, "get", lambda name: SimpleNamespace(attend=noted))
    point = {"B": 1, "T": 4, "H": 4, "Hkv": 2, "D": 8, "window": 3}
    worker.round({**point, "seconds": 1e-9})
    spec = Spec(4, 2, 8, "bfloat16", window=3, hub_kernels=worker.config.attention_hub_kernels)
    assert set(asked) == {(spec, *[torch.bfloat16] * 3)}


def test_every_backend_is_called_with_the_same_numbers():
    point = {"B": 2, "T": 6, "H": 4, "Hkv": 2, "D": 8, "window": None}
    first = Kernels(job("kernel", "manual", dtype="bfloat16"))
    made = [first.tensors(point) for _ in range(2)][1]  # in every round
    again = Kernels(job("kernel", "sdpa", dtype="bfloat16")).tensors(point)
    other = Kernels(job("kernel", "sdpa", dtype="bfloat16", seed=5)).tensors(point)
    assert [tuple(t.shape) for t in made] == [(2, 6, n, 8) for n in (4, 2, 2, 4)]
    assert all(map(torch.equal, made, again)) and not any(map(torch.equal, made, other))
    assert [t.requires_grad for t in made] == [True, True, True, False]
    assert {t.dtype for t in made} == {torch.bfloat16}


def test_the_memory_of_a_call_is_what_it_takes_beyond_its_inputs(monkeypatch):
    """Where the machine can tell the most since the call began; and the probe is made once."""
    worker = Kernels(job("kernel", "manual"))
    point = {"B": 1, "T": 4, "H": 2, "Hkv": 1, "D": 8, "window": None, "warm_up": True}
    held, can, chosen = [500, 120], [True], list[Any]()
    monkeypatch.setattr(machine, "memory", lambda device, peak=True: held[0 if peak else 1])
    monkeypatch.setattr(machine, "reset_peak", lambda device: can[0])
    select = kernels.select
    monkeypatch.setattr(kernels, "select", lambda *how: chosen.append(how) or select(*how))
    assert worker.round(point)["memory_bytes"] == 380
    held[0] = 100  # what was freed between the two looks
    assert worker.round(point)["memory_bytes"] == 0 and len(chosen) == 1
    assert chosen[0][:3] == ("manual", Spec(2, 1, 8, "float32"), CPU)
    can[0] = False
    monkeypatch.setattr(kernels, "LONGEST_CHECKED", 4)
    found = worker.round({**point, "window": 3})
    assert "memory_bytes" not in found and "error_out" in found and len(chosen) == 2
    found = worker.round({**point, "T": 5})
    assert "error_out" not in found and found["point"]["T"] == 5 and len(chosen) == 2


def test_the_bytes_of_a_token_are_of_the_dtype_and_of_the_heads_of_keys():
    sizes: Any = {"n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_layer": 3}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        about = decoding.Decoding(job("decode", "sdpa", dtype=dtype, **sizes)).about
        assert about["token_bytes"] == 2 * 3 * 2 * 8 * size
        weights = 64 * 32 + 3 * ((32 + 2 * 16 + 32) * 32 + 8 * 32 * 32) + 7 * 32
        assert about["weight_bytes"] == weights * size
    assert decoding.weight_bytes(100, 60, 2) == 40 * 2 + 60


def test_a_cache_is_asked_for_as_it_will_be_read(monkeypatch):
    worker = decoding.Decoding(job("decode", "sdpa"))
    asked: list[Any] = []
    monkeypatch.setattr(worker.who.model, "attention", lambda **how: asked.append(how) or ("x", 1))
    assert [worker.who.chosen(cache) for cache in ("none", "static", "paged")] == [["x"]] * 3
    assert asked == [{"cache": "none", "page_size": None}, {"cache": "static", "page_size": None},
                     {"cache": "paged", "page_size": 16}]  # fmt: skip


@pytest.mark.parametrize("error, says", [
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                  "allocate memory: you tried to allocate 5 bytes.\nError code 12"),
     "out of memory: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
     "allocate memory: you tried to allocate 5 bytes."),
    (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
     "out of memory: CUDA out of memory. Tried"),
    (ValueError(""), "ValueError: no message"), (KeyError("x"), "KeyError: 'x'"),
    (RuntimeError("\n  boom \n"), "RuntimeError: boom"),
])  # fmt: skip
def test_what_a_worker_says_of_an_error(error, says, monkeypatch):
    def fails(request: Any) -> Any:
        raise error

    handler = worker_.Handler()
    handler.job = SimpleNamespace(round=fails, device=CPU)
    monkeypatch.setattr(machine, "reset_peak", lambda device: device is CPU)
    assert handler.answer({}) == {"failed": says, "broken": False}
    monkeypatch.setattr(machine, "reset_peak", fails)
    assert handler.answer({}) == {"failed": says, "broken": True}
    assert Outcome(failure=Failure("failed", [says])).out_of_memory == says.startswith("out of m")


def test_a_worker_works_on_the_gpu_that_was_named(monkeypatch):
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(worker_, "JOBS", {"some": ("builtins", "dict")})
    for device in ("cuda:1", "cuda", "cpu"):
        job = {"job": "some", "device": device, "memory_limit": None}
        assert worker_.begin(job) == job
    assert chosen == ["cuda:1"]


def test_what_a_worker_answers(monkeypatch):
    """Where it was measured, in which run, and what it still holds; what may not run, and why."""
    begun: list[Any] = []
    held: list[Any] = []
    made = SimpleNamespace(about={"title": "x"}, device=CPU, round=lambda request: {"ms": 1.0})
    monkeypatch.setattr(worker_, "begin", lambda request: begun.append(request) or made)
    monkeypatch.setattr(worker_, "describe", lambda device: f"{device} in words")
    monkeypatch.setattr(machine, "empty_cache", lambda *how: held.append(how) or 77)
    handler = worker_.Handler()
    job = {"device": "cpu", "run": "abc"}
    assert handler.answer(job) == {"ok": {"title": "x"}} and begun == [job] and not held
    want = {"ok": {"ms": 1.0, "held_bytes": 77, "machine": "cpu in words, run abc"}}
    assert handler.answer({}) == want and begun == [job]
    made.keeps_memory = True
    assert handler.answer({}) == want and held == [(CPU, False), (CPU, True)]
    refused = attention.BackendUnavailable("attention backend 'x' cannot run here. x: no; and so")
    other = attention.BackendUnavailable("in words of its own: no")
    said = (refused, "no; and so"), (other, str(other)), (UserError("what?"), "what?")
    for error, why in said:

        def fails(request: Any, error: Any = error) -> Any:
            raise error

        made.round = fails
        assert handler.answer({}) == {"unavailable": [why]}


def test_the_calls_that_fill_a_round(monkeypatch):
    """Of one, two, four... calls until a tenth of the time is over; 5 ms each, the first 50."""
    for seconds, rounds, wanted in ((1.0, [1, 1, 2, 4, 8, 16, 32], 200), (0.01, [1], 1),
                                    (0.04, [1], 1), (0.06, [1, 1, 2], 12)):  # fmt: skip
        worker, made = Kernels(job("kernel", "manual")), [0]

        def call(stamps: Any, made: list[int] = made) -> None:
            made[-1] += 1

        worker.clock = SimpleNamespace(  # type: ignore[assignment]
            start=lambda made=made: made.append(0),
            stop=lambda made=made: made[-1],
            ms=lambda _, n, made=made: 5.0 * n + 45.0 * (len(made) == 2),
        )
        assert worker.fill(call, seconds) == wanted
        assert made[1:] == rounds
    worker.clock = SimpleNamespace(start=int, stop=int, ms=lambda a, b: 1e-9)  # type: ignore[assignment]
    assert worker.fill(lambda stamps: None, 1.0) == 1000


def test_the_seconds_of_a_call_for_the_plan():
    worker = Kernels(job("kernel", "manual"))
    worker.clock = Ticks(1, 2, 4)
    point = {"B": 1, "T": 4, "H": 2, "Hkv": 2, "D": 8, "window": None}
    assert worker.round({**point, "warm_up": True})["call_s"] == pytest.approx(8e-3)


def test_the_parts_of_an_attention_call_by_made_up_stamps():
    worker = Kernels(job("kernel", "manual"))
    worker.clock = Ticks(1, 2, 4)  # until a call, its forward, its backward
    point = {"B": 1, "T": 4, "H": 2, "Hkv": 2, "D": 8, "window": None}
    found = worker.round({**point, "seconds": 0.028})  # a call takes 8 ms, its stop included
    assert found["calls"] == round(28 / 8)
    assert found["ms"] == pytest.approx((found["calls"] * 7 + 1) / found["calls"])
    assert found["forward_ms"] == pytest.approx(2)
    assert found["backward_ms"] == pytest.approx(found["ms"] - 2)


def test_the_times_of_a_text(monkeypatch):
    worker = decoding.Decoding(job("decode", "sdpa"))
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(worker.who, "write", lambda *asked: (100.010, 100.070, 55))
    ask = {"B": 3, "P": 5, "cache": "dynamic", "new_tokens": 4}
    found = worker.round(ask)
    assert found["first_ms"] == pytest.approx(10) and found["ms"] == pytest.approx(20)
    shape = {"B": 3, "P": 5, "new_tokens": 4, "parameters": 64 * 32 + 12 * 32 * 32 + 3 * 32}
    assert found["cache_bytes"] == 55 and found["shape"] == shape
    worker.int8 = 9
    assert worker.round(ask)["shape"] == {**shape, "int8_parameters": 9}
    did: list[str] = []
    monkeypatch.setattr(machine, "reset_peak", lambda device: did.append("reset"))
    monkeypatch.setattr(worker.who, "write", lambda *asked: did.append("write"))
    monkeypatch.setattr(machine, "memory", lambda device: did.append("look") or 66)
    assert worker.round({**ask, "warm_up": True})["peak_bytes"] == 66
    assert did == ["reset", "write", "look"]
    for kind in ("autocast", "float32"):
        model = Job(job("train", "sdpa", residual_dtype=kind)).model()
        assert model.residual_autocast == (kind == "autocast")
    # by hand: 1 layer of 2 heads of 16, float32, keys and values
    assert worker.about["token_bytes"] == 2 * 1 * 2 * 16 * 4
    assert worker.about["weight_bytes"] == 4 * shape["parameters"]


# ----------------------------------------------------------------------------- the machine


def files(folder: Path, **content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")


def test_the_memory_of_a_process_is_what_linux_says(tmp_path, monkeypatch):
    files(tmp_path, status="Name: x\nVmHWM:\t   3000 kB\nVmRSS:\t   1000 kB\n")
    monkeypatch.setattr(machine, "STATUS", tmp_path / "status")
    assert machine.memory(CPU) == 3000 * 1024
    assert machine.memory(CPU, peak=False) == 1000 * 1024
    monkeypatch.setattr(machine, "trim", lambda: files(tmp_path, status="VmHWM: 9 kB\nVmRSS: 2 kB"))
    assert machine.empty_cache(CPU) == 2 * 1024  # of now, and after what was freed is given back
    monkeypatch.setattr(machine, "STATUS", tmp_path / "none")  # a Mac, which counts in bytes
    rusage = SimpleNamespace(getrusage=lambda who: SimpleNamespace(ru_maxrss=7), RUSAGE_SELF=0)
    monkeypatch.setitem(machine.sys.modules, "resource", rusage)  # type: ignore[arg-type]
    for system, most in (("darwin", 7), ("freebsd", 7 * 1024)):
        monkeypatch.setattr(machine.sys, "platform", system)
        assert machine.memory(CPU) == most


def test_the_memory_of_a_process_on_a_gpu_and_what_it_holds_for_later(monkeypatch):
    done: list[str] = []
    held = {"max_memory_allocated": 9, "memory_allocated": 5, "memory_reserved": 7}
    for name, number in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, n=number: n)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    gpu = torch.device("cuda", 0)
    assert (machine.memory(gpu), machine.memory(gpu, peak=False)) == (9, 5)
    assert machine.empty_cache(gpu, keep=True) == 7 + machine.CONTEXT and not done
    assert machine.empty_cache(gpu) == 7 + machine.CONTEXT and done == ["emptied"]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append("reset"))
    with monkeypatch.context() as refused:  # a system that lets nobody reset it
        refused.setattr(machine, "trim", Mock(side_effect=OSError))
        assert machine.reset_peak(CPU) is False
    ring = torch.nn.Module()  # garbage that only the collector finds
    ring.__dict__["itself"], seen = ring, weakref.ref(ring)
    del ring
    assert machine.reset_peak(gpu) and seen() is None and done == ["emptied"] * 2 + ["reset"]


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


def test_the_last_level_cache_is_all_that_our_cores_share(tmp_path, monkeypatch):
    """Two groups of two cores, each with its own cache of the third level; we may use three."""
    for cpu in range(4):
        cache = tmp_path / f"cpu{cpu}" / "cache"
        files(cache / "index0", level="1", shared_cpu_list=f"{cpu}", size="48K")
        files(cache / "index2", level="2", shared_cpu_list=f"{cpu}", size="1M")
        group = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        files(cache / "index3", level="3", shared_cpu_list=group, size="32768K")
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", {0: {0, 1, 2}}.get, raising=False)
    assert machine.last_level_cache(CPU) == 2 * 32 * 2**20
    monkeypatch.setattr(machine.os, "sched_getaffinity", {0: {0, 1}}.get, raising=False)
    assert machine.last_level_cache(CPU) == 32 * 2**20
    monkeypatch.setattr(machine, "CPUS", tmp_path / "none")
    assert machine.last_level_cache(CPU) is None
    of_gpu = SimpleNamespace(L2_cache_size=60 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_gpu)
    assert machine.last_level_cache(torch.device("cuda")) == 60 * 2**20


@pytest.mark.parametrize(
    "cache, free, limit, size, doubt",
    [
        (None, 64e9, None, 2**30, ""),
        (32e6, 64e9, None, 2**30, ""),
        (480e6, 64e9, None, 4 * 480e6, ""),
        (480e6, 64e9, 4e9, 1e9, ", of which a cache of 480 MB holds a part"),
        (480e6, 2e9, None, 0.5e9, ", of which a cache of 480 MB holds a part"),
        (480e6, 0, None, 4 * 480e6, ""),  # not known
    ],
)
def test_the_copied_arrays_are_four_times_the_cache(cache, free, limit, size, doubt, monkeypatch):
    monkeypatch.setattr(machine, "last_level_cache", lambda device: cache and int(cache))
    monkeypatch.setattr(machine, "free_memory", lambda device: int(free))
    assert machine.copy_size(CPU, limit and int(limit)) == (int(size), doubt)


def test_bandwidth_is_both_ways_of_the_best_copy(monkeypatch):
    monkeypatch.setattr(machine, "copy_size", lambda device, limit: (4000, ", a doubt"))
    times = iter([5.0, 2.0, 4.0, *[3.0] * 20])
    monkeypatch.setattr(machine.Clock, "ms", lambda self, a, b: next(times))
    did: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if call.overloadpacket is torch.ops.aten.copy_:
                did.append(f"copy of {args[0].nbytes}")
            return call(*args, **(kw or {}))

    for name in ("start", "stop"):
        monkeypatch.setattr(machine.Clock, name, lambda self, name=name: did.append(name))
    with Watched():
        rate, how = machine.bandwidth(CPU)
    assert did == ["start", "copy of 4000", "stop"] * 10
    assert rate == pytest.approx((4000 + 4000) / 2e-3)
    assert how == "measured: copies of 4e-06 GB, a doubt"


def test_a_bandwidth_is_remembered_unless_a_cache_may_hold_the_copies(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "LEAST_COPY", 4000)
    rate = 2e-3

    def measured(size: int, doubt: str) -> tuple[float, str]:
        monkeypatch.setattr(machine, "copy_size", lambda device, limit: (size, doubt))
        monkeypatch.setattr(machine.Clock, "ms", lambda self, a, b: rate * 1e3)
        return machine.bandwidth(CPU)

    for small in ((4000, ", a doubt"), (3996, "")):
        assert measured(*small)[1].startswith("measured: ") and not [*tmp_path.iterdir()]
    assert measured(4000, "")[0] == pytest.approx(8000 / 2e-3)
    rate = 3e-3  # a neighbour
    again, how = measured(4000, "")
    assert again == pytest.approx(8000 / 2e-3) and how.endswith("; now 0.002667 GB/s")


def test_a_clock_gives_milliseconds():
    clock = machine.Clock(CPU)
    assert clock.ms(10.0, 10.25) == 250


# ----------------------------------------------------------------------------- records, tables


def test_a_pipe_in_a_cell_begins_no_column():
    text = tables.markdown((["backend", "kernel"], [["a|b", "x"], ["c", "void f<int|long>"]]))
    assert [line.count("|") for line in text.splitlines()] == [3, 3, 3, 3]
    assert "a/b" in text


def test_sizes_and_rates_as_people_read_them():
    assert [tables.bytes_(n) for n in (None, 0, 5e6, 999e6, 1e9, 2.5e9)] == [
        "-", "0.0 MB", "5.0 MB", "999.0 MB", "1.00 GB", "2.50 GB"]  # fmt: skip
    assert [tables.number(x) for x in (None, 0.6912, 4.51, 99.94, 999.0, 1000, 1234.4)] == [
        "-", "0.691", "4.51", "99.9", "999", "1,000", "1,234"]  # fmt: skip


@pytest.mark.parametrize(
    "mode, row, rate",
    [
        ("train", {"tokens_a_step": 8000, "point": {}}, 400_000),
        ("converge", {"tokens_a_step": 100, "point": {}}, 5000),
        ("decode", {"point": {"B": 8, "P": 9}}, 400),
        ("kernel", {"point": {"B": 8, "T": 9}}, 50),  # calls
    ],
)
def test_the_rate_that_two_records_are_compared_by(mode, row, rate):
    row = {"mode": mode, "backend": "sdpa", "rounds": [{"ms": 20.0}, {"ms": 10.0}], **row}
    assert compare._speed(row) == pytest.approx([rate, 2 * rate])
    manual = {**row, "backend": "manual", "rounds": [{"ms": 40.0}, {"ms": 5.0}]}
    both = {compare._key(r): r for r in (row, manual)}
    own, ratio = compare._ratios(compare._key(row), both, [compare._key(manual)])
    assert own.median == pytest.approx(1.5 * rate) and ratio.median == pytest.approx(1.25)


def test_the_noise_of_a_comparison_is_both_spreads():
    def one(*ms: float) -> dict[str, Any]:
        row = {"mode": "train", "backend": "sdpa", "status": "ok", "point": {},
               "tokens_a_step": 1000, "rounds": [{"ms": t} for t in ms]}  # fmt: skip
        return {"machine": {"about": "x", "dtype": "", "packages": ""}, "settings": {},
                "rows": [row]}  # fmt: skip

    _, (head, (line,)) = compare.compare(one(10, 10.2, 10.4), one(5, 5.1, 5.2))
    cells = dict(zip(head, line))
    assert cells["A/s"] == "98,039" and cells["B/s"] == "196,078" and cells["B / A"] == "2.000"
    # quartiles of 1/x: half the distance of the ends from the middle, two percent of it each
    spread = (1 / 10.1 - 1 / 10.3) * 10.2
    assert cells["noise"] == f"{2 * spread:.1%}" and cells["verdict"] == "B faster"


def committed() -> list[Path]:
    """The records of bench_mfu.py; some others have a form of their own."""
    files = sorted((records.ROOT / "bench" / "records").glob("*/record.json"))
    return [f.parent for f in files if '"format": 1' in f.read_text(encoding="utf-8")[:200]]


@pytest.mark.parametrize("folder", committed(), ids=lambda folder: folder.name)
def test_every_record_that_was_ever_committed_can_still_be_compared(folder, capsys):
    assert len(committed()) >= 7
    assert bench_mfu.main(["compare", str(folder), str(folder)]) == 0
    lines = [s for s in capsys.readouterr().out.splitlines() if "within noise" in s]
    content = records.read(folder)
    ok = {compare._key(r) for r in content["rows"] if r["status"] == "ok"}
    held_against = {k for key in ok for k in compare.baselines(key, list(ok), content, content)}
    assert len(lines) == len(ok - held_against) > 0
    assert all("1.000" in line for line in lines)
    assert records.title(content) and records.sections(content) and records.facts(content)


def test_which_rows_two_records_are_held_against():
    """Third-party code at the point, else anywhere in the mode, else manual at the point."""
    here, there = (("T", 16),), (("T", 32),)
    rows_ = [("train", "nanogpt", here), ("train", "hf_sdpa", there), ("train", "manual", here),
             ("kernel", "manual", here), ("kernel", "sdpa", here)]  # fmt: skip
    new: Any = {"machine": {"packages": {"transformers": "5.1"}}}
    old: Any = {"machine": {"packages": {"transformers": "5.0"}}}

    def held(mode: str, at: Any, b: Any = new) -> list[Any]:
        return compare.baselines((mode, "triton", at), rows_, new, b)

    assert held("train", here) == [rows_[0]] and held("train", there) == [rows_[1]]
    assert held("train", there, old) == [rows_[0]]  # another transformers is other code
    assert held("train", (("T", 64),)) == rows_[:2]
    assert held("kernel", here) == [rows_[3]]
    assert held("kernel", there) == held("decode", here) == []


def test_a_row_of_the_comparison_with_nanogpt_by_hand():
    size = against_nanogpt.Size(1, 1, 8, block_size=10, batch_size=2)  # 20 tokens a step
    pairs = [((0.1, 2 * 10**9), (0.2, 4 * 10**9)), ((0.1, 10**9), (0.4, 5 * 10**9)),
             ((0.2, 3 * 10**9), (0.2, 6 * 10**9))]  # fmt: skip
    title, *cells = against_nanogpt.row(size, pairs)
    assert title == "1 layers, 8 wide, block 10, batch 2"
    assert cells == ["100", "200", "**2.00** (1.00 to 4.00)", "5.00", "2.00"]
    told = [against_nanogpt.row(size, pairs)[0] for size, _ in against_nanogpt.SIZES.values()]
    page = (records.ROOT / "docs" / "SPEED.md").read_text(encoding="utf-8")
    assert all(page.count(f"| {title} |") > 1 for title in told), "rows that line up with the page"


def test_the_first_steps_of_both_loops_are_left_out(tmp_path: Path, monkeypatch) -> None:
    """Ours counts from 1; nanoGPT from 0, an iteration that is a step more."""
    took = {n: 1000.0 if n <= 3 else 10.0 + n for n in range(6)}  # ms
    (tmp_path / "ours").mkdir()
    rows = [{"iter": n, "ms": took[n]} for n in range(1, 6)] + [{"iter": 5, "val_loss": 2.0}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "ours" / "metrics.jsonl").write_text(lines, encoding="utf-8")
    text = "".join(f"iter {n}: loss 4.0, time {took[n]:.2f}ms, mfu 1.00%\n" for n in took)
    commands: list[list[str]] = []
    monkeypatch.setattr(against_nanogpt, "run", lambda *how: commands.append(how[0]) or (text, 7))
    config = against_nanogpt.BenchConfig(str(tmp_path), attention_backend="x", dtype="bfloat16")
    for loop in (against_nanogpt.ours, against_nanogpt.theirs):
        assert loop("a", config, tmp_path) == (pytest.approx(14.5e-3), 7)
    assert all("--max_iters=403" in words and "--n_embd=128" in words for words in commands)
    own = [set(words) - set(against_nanogpt.settings("a", config)) for words in commands]
    assert own[0] == {
        against_nanogpt.sys.executable, str(records.ROOT / "train.py"), "--peak_tflops=1",
        f"--data_dir={tmp_path}/data", f"--out_dir={tmp_path}/ours", "--attention_backend=x",
        "--dtype=bfloat16",
    }  # fmt: skip
    assert own[1] == {against_nanogpt.sys.executable, str(tmp_path / "train.py"),
                      f"--out_dir={tmp_path}/theirs", "--always_save_checkpoint=False"}  # fmt: skip


def test_what_a_loop_printed_and_the_memory_of_its_own_process(tmp_path):
    code = "import os, sys; x = b'1' * 5 * 10**7; print(os.getcwd()); print('b', file=sys.stderr)"
    text, memory = against_nanogpt.run([against_nanogpt.sys.executable, "-Sc", code], tmp_path)
    assert set(text.splitlines(keepends=True)) == {f"{tmp_path.resolve()}\n", "b\n"}
    assert 5e7 < memory < 5e10  # bytes: Linux begins with what our own process holds
    fails = [against_nanogpt.sys.executable, "-Sc", "print('a'); print('why'); raise SystemExit(3)"]
    with pytest.raises(UserError, match=r"-Sc .* failed \(3\): why$"):
        against_nanogpt.run(fails, tmp_path)


@pytest.mark.parametrize(
    "size, sizes, steps",
    [("a", (4, 4, 128, 64, 12, "shakespeare_char"), 400),
     ("b", (6, 6, 384, 256, 16, "shakespeare_char"), 15),
     ("c", (12, 12, 768, 512, 2, "shakespeare"), 6)],
)  # fmt: skip
def test_both_loops_are_told_the_same_sizes(size, sizes, steps):
    names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dataset")
    want = dict(zip(names, map(str, sizes), strict=True)) | {
        "max_iters": str(3 + steps), "compile": "True", "device": "cpu", "dropout": "0.0",
        "bias": "False", "gradient_accumulation_steps": "1", "warmup_iters": "10",
        "eval_interval": "1000000", "eval_iters": "1", "log_interval": "1",
    }  # fmt: skip
    words = against_nanogpt.settings(size, against_nanogpt.BenchConfig(compile=True))
    assert dict(word[2:].split("=") for word in words) == want and len(words) == len(want)


def test_the_loops_run_in_turn_and_every_pair_is_in_the_table(monkeypatch, capsys):
    asked: list[str] = []

    def loop(name: str, *seconds: float) -> Any:
        each = {"a": iter(seconds), "b": iter(seconds)}

        def run(size: str, config: Any, work: Path) -> tuple[float, int]:
            asked.append(name + size)
            return next(each[size]), 10**9

        return run

    monkeypatch.setattr(against_nanogpt, "ours", loop("ours ", 0.1, 0.2))
    monkeypatch.setattr(against_nanogpt, "theirs", loop("theirs ", 0.2, 0.2))
    monkeypatch.setattr(against_nanogpt, "prepare", lambda config, work: asked.append("prepare"))
    monkeypatch.setattr(against_nanogpt.sys, "argv", ["x", "--sizes=ab", "--rounds=2"])
    assert against_nanogpt.main() == 0
    assert asked == ["prepare", *["ours a", "theirs a", "ours b", "theirs b"] * 2]
    out = capsys.readouterr().out
    assert "2 rounds, ours in float32, not compiled" in out
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if "|" in line]
    assert lines[0] == ["size", "nanoGPT tok/s", "ours tok/s", "ratio (lowest to highest)",
                        "nanoGPT GB", "ours GB"]  # fmt: skip
    assert lines[2] == ["4 layers, 128 wide, block 64, batch 12", "3,840", "5,760",
                        "**1.50** (1.00 to 2.00)", "1.00", "1.00"]  # fmt: skip
    assert lines[3][:2] == ["6 layers, 384 wide, block 256, batch 16", "20,480"]


def test_the_data_for_both_loops(tmp_path, monkeypatch):
    config = against_nanogpt.BenchConfig(nanogpt=str(tmp_path / "theirs"), sizes="ac")
    (tmp_path / "work").mkdir()
    files(tmp_path / "theirs", train__py="", model__py="")
    with pytest.raises(UserError, match=r"theirs is no checkout of nanoGPT: it has no configurat"):
        against_nanogpt.prepare(config, tmp_path / "work")
    files(tmp_path / "theirs", configurator__py="theirs")

    def prepare(command: list[str], cwd: Path) -> None:
        *_, dataset, folder = command
        size = 65 if dataset == "shakespeare_char" else 50304
        files(Path(folder.removeprefix("--out_dir=")), meta__json=json.dumps({"vocab_size": size}))

    monkeypatch.setattr(against_nanogpt, "run", prepare)
    against_nanogpt.prepare(config, tmp_path / "work")
    work = tmp_path / "work"
    assert (work / "configurator.py").read_text(encoding="utf-8") == "theirs"
    char, bpe = (work / "data" / name for name in ("shakespeare_char", "shakespeare"))
    assert pickle.loads((char / "meta.pkl").read_bytes()) == {"vocab_size": 65}
    assert (bpe / "meta.json").exists() and not (bpe / "meta.pkl").exists()


# ----------------------------------------------------------------------------- the candidates


def test_what_a_baseline_cannot_do_is_refused_and_no_more(monkeypatch):
    for name in ("NanoGPT", "HuggingFace"):
        monkeypatch.setattr(candidates, name, lambda what, job: what)
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"n_kv_head": 2}, ()), ({"n_kv_head": 1}, ("nanogpt", "hf")),
        ({"attention_window": 8}, ("nanogpt", "hf")), ({"gelu": "tanh"}, ("nanogpt",)),
        ({"gradient_checkpointing": True}, ("nanogpt", "hf")),
    ]  # fmt: skip
    for changes, lacks in cases:
        told = Job(job("train", "", n_head=2, **changes))
        for name in ("nanogpt", "hf"):
            if name in lacks:
                with pytest.raises(UserError, match="it has no "):
                    candidates.build(f"{name}=x", told)
            else:
                assert candidates.build(f"{name}=x", told) == "x"


def test_int8_weights_are_ours_to_decode_with_where_they_can_be(monkeypatch):
    told = Job(job("decode", "sdpa"))
    made = candidates.Ours(told).for_decoding(False, "int8")
    assert any(t.dtype == torch.int8 for t in made.model.state_dict().values())
    plain = candidates.Ours(told).for_decoding(False, "dtype")
    assert not any(t.dtype == torch.int8 for t in plain.model.state_dict().values())
    monkeypatch.setattr(candidates.int8, "why_not", lambda model, device, dtype: "not here")
    with pytest.raises(UserError, match=r"^not here$"):
        candidates.Ours(told).for_decoding(False, "int8")
    with pytest.raises(UserError, match="caches dynamic and static, not with paged"):
        candidates.HuggingFace.write(told, torch.zeros(1, 1), 1, "paged")  # type: ignore[arg-type]


def test_our_model_is_compiled_for_its_micro_batches_and_writes_without_dropout(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(runtime.Setup, "compiled", lambda self, model, micro: seen.append(micro))
    told = Job(job("train", "manual", gradient_accumulation_steps=3, dropout=0.5))
    candidates.Ours(told).for_training(told.setup.scaler())
    assert seen == [3]

    def stream(model: Any, prompt: Any, new: int, **how: Any) -> Any:
        seen.append((model.training, how["kv_cache"], how["compile"]))
        return iter(range(new))

    monkeypatch.setattr(engine, "stream", stream)
    who: Any = candidates.Ours(told).for_decoding(True, "dtype")
    for cache in ("dynamic", "static"):
        who.write(torch.zeros(1, 3, dtype=torch.int64), 4, cache)
    assert seen[1:] == [(False, "dynamic", False), (False, "static", True)]


def test_transformers_trains_with_our_betas_and_writes_compiled_where_we_do():
    told = Job(job("train", "", beta1=0.7, beta2=0.8, weight_decay=0.3))
    stub: Any = SimpleNamespace(config=told.config, setup=told.setup, model=torch.nn.Linear(2, 2))
    (group,) = candidates.HuggingFace.make_optimizer(stub).param_groups
    assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.7, 0.8), 0.3, True)
    seen: list[Any] = []

    def generate(prompt: Any, **how: Any) -> Any:
        seen.append((how["cache_implementation"], how["disable_compile"], how["do_sample"]))
        for _ in range(1 + how["max_new_tokens"]):
            how["streamer"].put(None)
        text = torch.zeros(1, prompt.shape[1] + how["max_new_tokens"])
        layer = SimpleNamespace(keys=torch.zeros(6), values=torch.zeros(2))
        return SimpleNamespace(sequences=text, past_key_values=SimpleNamespace(layers=[layer] * 3))

    for compile in (False, True):
        stub = SimpleNamespace(compile=compile, model=SimpleNamespace(generate=generate))
        found = candidates.HuggingFace.write(stub, torch.zeros(1, 3), 4, "static")
        assert found[2] == 3 * 8 * 4
    assert seen == [("static", True, False), ("static", False, False)]


# ----------------------------------------------------------------------------- what is asked


def asking(mode: str, device: str = "cpu", **config: Any) -> Bench:
    """A run that is not begun, of a model with 4 heads for 2 of keys, and a window."""
    model: Any = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "block_size": 100,
                  "attention_window": 32, "dropout": 0.1, "batch_size": 3}  # fmt: skip
    train = TrainConfig(**model)
    here = {"peak_tflops": 1.0, "peak_source": "given", "peak_measured": False}
    config = {"batch_size": 3, **config}
    return Bench(mode, BenchConfig(train=train, **config), device, 64, ["sdpa"], None, print, here)


def test_the_sweep_has_the_models_window_fewer_rounds_and_shorter_ones(monkeypatch):
    seen: list[Bench] = []
    monkeypatch.setattr(Bench, "measure", lambda self, *how: [{"status": "ok"}])
    monkeypatch.setattr(modes, "kernel", lambda bench: seen.append(bench) or [])
    for rounds in (2, 9):
        bench = asking("train", windows=(8,), seconds=3.0, rounds=rounds)
        modes.train(replace(bench, reference={"loss": 1.0}))
    assert [(b.config.windows, b.config.seconds, b.config.rounds) for b in seen] == [
        ((), 1.5, 2), ((), 1.5, 3)]  # fmt: skip
    assert all(b.earlier == [{"status": "ok"}] for b in seen)


def test_a_run_may_take_the_memory_that_was_named_or_what_is_free(monkeypatch):
    probe = SimpleNamespace(about={"free_memory": 9})
    worker = SimpleNamespace(begin=lambda job: probe)
    monkeypatch.setattr("bench.bench.Worker", lambda timeout, stop: worker)
    for named, limit in ((5, 5), (None, 9)):
        bench = replace(asking("kernel"), memory_limit=named)
        assert bench.begin() is probe and bench.machine["memory_limit"] == limit


def test_the_points_of_every_mode():
    def lengths(bench: Bench) -> list[Any]:
        found = modes.points(bench)
        assert all((p["H"], p["Hkv"], p["D"]) == (4, 2, 16) for p in found)
        return [(p["B"], p["T"], p["window"]) for p in found]

    assert modes.points(asking("train", sweep=False)) == modes.points(asking("converge")) == []
    here = [(1, 128, 32), (1, 512, 32), (1, 2048, 32), (4, 128, 32), (4, 512, 32)]
    assert lengths(asking("kernel")) == lengths(asking("train")) == here
    many = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    want = [(1, T, 32) for T in many] + [(8, T, 32) for T in many[:4]]
    assert lengths(asking("kernel", "cuda")) == want
    assert lengths(asking("train", "cuda:0")) == [(1, T, 32) for T in (1024, 4096, 16384)]
    given: Any = {"lengths": (32, 16), "batch_sizes": (2, 1), "windows": (8, None)}
    want = [(B, T, window) for B in (2, 1) for T in (32, 16) for window in (8, None)]
    assert lengths(asking("kernel", **given)) == want
    # Only what was chosen here is spared the largest corner.
    want = [(1, 16, 32), (1, 32, 32), (1, 64, 32), (4, 16, 32), (4, 32, 32)]
    assert lengths(asking("kernel", lengths=(16, 32, 64))) == want
    want = [(4, 128, 32), (4, 512, 32), (1, 128, 32), (1, 512, 32), (1, 2048, 32)]
    assert lengths(asking("kernel", batch_sizes=(4, 1))) == want
    some = asking("decode", prompts=(5, 9), kv_caches=("none", "paged"), new_tokens=7)
    assert modes.points(some) == [
        {"B": B, "P": P, "cache": cache, "new_tokens": 7}
        for B in (1, 4) for P in (5, 9) for cache in ("none", "paged")
    ]  # fmt: skip
    assert [p["B"] for p in modes.points(asking("decode", "cuda", new_tokens=7))[::4]] == [1, 8]
    modes.points(asking("decode", prompts=(1, 93), new_tokens=7))
    for prompt in (94, 120):
        with pytest.raises(UserError, match=f"a prompt of {prompt} and 7 new tokens do not fit"):
            modes.points(asking("decode", prompts=(1, prompt), new_tokens=7))


def test_who_is_measured_in_every_mode():
    theirs = {"hf_eager": "hf=eager", "hf_sdpa": "hf=sdpa"}
    flash = {"hf_flash_attention_2": "hf=flash_attention_2"}
    bench = asking("train", baseline=("hf",))
    assert bench.everyone() == {"sdpa": "", **theirs, **flash}
    assert bench.everyone(("sdpa",)) == {"sdpa": "", "hf_sdpa": "hf=sdpa"}  # as decode asks
    bench.hf = {"name": "x"}
    assert bench.everyone() == {"sdpa": "hf=nanoattn:SDPA", **theirs}


def test_a_point_of_a_mode_has_a_fifth_of_the_seconds(monkeypatch):
    bench, asked = asking("kernel", seconds=3.0, lengths=(8, 16), batch_sizes=(1,)), []
    monkeypatch.setattr(Bench, "measure", lambda bench, who, jobs, ask, row: asked.append(ask))
    modes.kernel(bench)
    assert [(p["T"], p["seconds"]) for p in asked[0].values()] == [(8, 0.6), (16, 0.6)]


@pytest.mark.parametrize("compile, cache, want", [(True, "static", True), (False, "static", False),
                                                  (True, "dynamic", False)])  # fmt: skip
def test_only_a_static_cache_is_compiled_and_only_where_asked(monkeypatch, compile, cache, want):
    worker, given = decoding.Decoding(job("decode", "sdpa")), dict[str, Any]()
    worker.who.compile = compile

    def stream(model: Any, prompt: Any, new: int, **how: Any) -> list[int]:
        given.update(how)
        return [0] * new

    monkeypatch.setattr(engine, "stream", stream)
    worker.who.write(torch.zeros(1, 3, dtype=torch.long), 2, cache)
    assert (given["compile"], given["kv_cache"], given["temperature"]) == (want, cache, 0.0)


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


def test_a_roofline_elsewhere_is_of_the_model_that_train_has():
    """On a CPU a run without a config is of a small model, but not where nothing runs here."""
    assert load_config(["--device=cpu"]).settings.train.n_layer == 4
    assert load_config(["--device=cpu", "--roofline=NVIDIA H200"]).settings.train.n_layer == 12
    assert load_config(["--device=cpu"], "plan").settings.train.n_embd == 768
    assert load_config(["--device=cpu", "--n_layer=3"]).settings.train.n_layer == 3


def test_the_specs_that_backends_are_asked_for():
    own = {"n_head": 4, "n_kv_head": 2, "head_dim": 16}
    for mode in ("train", "converge"):
        assert modes.specs(asking(mode)) == [{**own, "window": 32, "dropout": 0.1}]
    kernel = asking("kernel", windows=(8, None), lengths=(16,), batch_sizes=(1,))
    assert modes.specs(kernel) == [{**own, "window": 8}, {**own, "window": None}]
    writing = {**own, "window": 32, "grad": False}
    assert modes.specs(asking("decode", kv_caches=("static", "paged"))) == [
        {**writing, "cache": "static"},
        {**writing, "cache": "paged", "page_size": 16},
    ]


def test_a_worker_is_told_all_that_it_needs():
    bench = asking("train", weights="int8", profile=True, bandwidth_gbs=7.0)
    bench.memory_limit, bench.hf, bench.run = 123, {"name": "x"}, "a run"
    told = bench.job("decode", "sdpa", 5, compile=False)
    train = told.pop("train")
    assert told == {
        "job": "decode", "run": "a run", "name": "sdpa", "baseline": "", "device": "cpu",
        "vocab_size": 64, "hf": {"name": "x"}, "weights": "int8", "memory_limit": 123,
        "profile": True, "bandwidth_gbs": 7.0, "wants_bandwidth": True,
    }  # fmt: skip
    assert (train["batch_size"], train["attention_backend"], train["compile"]) == (5, "sdpa", False)
    assert train["attention_fallback"] is False and train["n_kv_head"] == 2
    theirs = bench.job("train", "hf_sdpa", baseline="hf=sdpa")
    assert theirs["baseline"] == "hf=sdpa" and theirs["train"]["attention_backend"] == "auto"
    wants = {mode: asking(mode).job("machine", "")["wants_bandwidth"]
             for mode in ("train", "kernel", "decode", "converge", "qualify")}  # fmt: skip
    assert [mode for mode, wanted in wants.items() if wanted] == ["decode", "qualify"]


def test_the_memory_that_workers_may_have(monkeypatch):
    """A worker what was given, or 70 % of what is free; all together nine tenths of the limit."""
    asked: list[Any] = []

    def begin(*told: Any, **more: Any) -> None:
        asked.append(told[5])
        raise Failure("failed", ["enough"])

    monkeypatch.setattr(bench_mfu, "Bench", begin)
    monkeypatch.setattr(bench_mfu, "free_memory", lambda device: 10**10)
    for more in ([], ["--memory_gb=2"]):
        with pytest.raises(Failure, match="enough"):
            bench_mfu.main(["--device=cpu", "--backends=sdpa", *more])
    assert asked == [7 * 10**9, 2 * 10**9]
    how: dict[str, Any] = {}
    monkeypatch.setattr("bench.bench.measure", lambda *a, **more: (how.update(more), False))
    for device, ahead in (("cpu", False), ("cuda:0", True)):
        bench = asking("train", device, timeout=77.0)
        bench.machine |= {"memory_limit": 1000, "looked_again": True}
        assert bench.measure({}, {}, {}, lambda *pair: {}) == []
        assert (how["budget"], how["ahead"], how["timeout"]) == (900, ahead, 77.0)
        assert how["fresh"] is None and how["stop"] is bench.stop


def test_a_record_says_what_is_missing_in_it():
    bench = asking("train", rounds=2)
    ok: dict[str, Any] = {"status": "ok", "mode": "train", "backend": "a", "point": {}, "ms": 1.0,
                          "mfu": None}  # fmt: skip
    full, part = ({**ok, "rounds": [{"ms": 1.0}] * n} for n in (2, 1))
    none = {"status": "stopped", "mode": "train", "backend": "c", "point": {}, "why": ["x"]}
    made = bench.content([full])
    assert made["complete"] is True and "incomplete" not in made
    assert made["seconds"] > 0 and bench.began + made["seconds"] <= time.perf_counter()
    made = bench.content([full, part, none], "it is being written")
    assert made["complete"] is False
    assert made["incomplete"] == (
        "it is being written; 1 of 3 rows were not measured; 1 have fewer than 2 rounds"
    )
    assert bench.content([full, none])["incomplete"] == (
        "its time was over; 1 of 2 rows were not measured"
    )
    model = GPTConfig(100, 64, 2, 4, 64, n_kv_head=2, bias=False, attention_window=32)
    N = 64 * 64 + 2 * (64 * (64 + 64) + 64 * 64 + 8 * 64 * 64)  # and the gains
    N += sum(p.numel() for n, p in GPT(model).named_parameters() if p.dim() == 1)
    keys = sum(min(t, 32) for t in range(1, 101)) / 100
    assert made["flops_per_token"] == pytest.approx(
        {"mfu": 6 * N + 12 * 2 * 64 * 100, "mfu_causal": 6 * N + 12 * 2 * 64 * keys}
    )


def test_the_reference_is_of_the_whole_batch_and_its_flops_of_a_token(monkeypatch):
    found, ran = [], list[Any]()
    build = candidates.build
    monkeypatch.setattr(candidates, "build", lambda w, job: ran.append(job.config) or build(w, job))
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
    with monkeypatch.context() as patch:  # where the loss adds up the head's gradient in pieces
        patch.setattr("core.loss.chunk_rows", lambda *a: 5)
        assert training.Reference(job("reference", "")).about["flops_per_token"] == found[0]
    fast = job("reference", "", dtype="bfloat16", tf32=True, onednn=True, compile=True)
    training.Reference(fast)
    got = ran[-1]
    assert (got.dtype, got.attention_backend) == ("float32", "manual")
    assert not (got.tf32 or got.onednn or got.compile)


def test_the_reference_is_of_all_that_a_step_has(monkeypatch):
    """Of every micro-batch; where texts are written, of one sequence."""
    asked: list[Any] = []

    class Worker:
        about: ClassVar[Any] = {"loss": 2.0, "counted": {"parameters": 5}}

        def __init__(self, *how: Any) -> None:
            pass

        def begin(self, job: dict[str, Any]) -> Any:
            asked.append((job["job"], job["train"]["batch_size"]))
            return self

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr("bench.bench.Worker", Worker)
    for mode, sequences in (("train", 3 * 5), ("decode", 1)):
        bench = asking(mode)
        train = replace(bench.config.train, gradient_accumulation_steps=5)
        bench.config, bench.hf = replace(bench.config, train=train), {"name": "x"}
        Worker.about = {"loss": 2.0, "counted": {"parameters": 5}}
        bench.count()
        assert asked == [("reference", sequences), "closed"]
        assert bench.reference == {"loss": 2.0} and bench.hf["counted"] == {"parameters": 5}
        asked.clear()


def test_who_cannot_be_counted_is_told_and_who_is_stopped_just_ends(monkeypatch):
    for kind, error, says in (("failed", UserError, "--hf=a/b: why; so"),
                              ("stopped", Failure, "^why; so")):  # fmt: skip

        def fails(self: Bench, *how: Any, kind: str = kind) -> Any:
            raise Failure(kind, ["why", "so"])

        monkeypatch.setattr(Bench, "ask_once", fails)
        with pytest.raises(error, match=says):
            asking("train", hf="a/b").count()


def test_the_proof_of_a_row_is_its_worst_layers():
    """By how far it goes of what is allowed; kernels once, in order."""
    proofs = [{"error": 2.0, "allowed": 10.0}, {"error": 1.0, "allowed": 2.0}, None,
              {"error": 3.0, "allowed": 9.0}]  # fmt: skip
    names = (["flash"], ["math"], ["flash"], ["math", "efficient"])
    chosen: Any = [SimpleNamespace(proof=p, kernels=k) for p, k in zip(proofs, names)]
    found = candidates.evidence(chosen)
    assert found == {"kernels": ["flash", "math", "efficient"], "proof": proofs[1]}
    assert candidates.evidence([]) == {"kernels": [], "proof": None}


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


def test_the_scale_of_a_loss_grows_and_changes_no_step_of_a_baseline():
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False),
                   torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)):  # fmt: skip
        plain: Any = candidates.build("plain", Job(job("train", "manual", grad_clip=0.05)))
        plain.for_training(scaler)
        for _ in range(2):
            plain.step(*plain.job.random_tokens(4), 2, lambda part: None)
        ends.append(plain.model.state_dict())
    assert scaler.get_scale() == 4 * 2 * 2
    for name, w in ends[1].items():
        torch.testing.assert_close(w, ends[0][name], rtol=0, atol=1e-6)


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


# ----------------------------------------------------------------------------- the machine at hand


def test_all_that_is_known_of_a_machine(monkeypatch):
    peak = Peak(1.5, "measured: x", True)
    told: list[Any] = []
    monkeypatch.setattr(machine, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(machine, "describe", lambda device: f"{device} in words")
    monkeypatch.setattr(machine, "free_memory", lambda device: 77)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 1234)
    monkeypatch.setattr(machine.peaks, "peak", lambda *asked: told.append(asked) or peak)
    monkeypatch.setattr(machine, "bandwidth", lambda device, limit: (1e9 * limit, "copies"))
    request = {**job("machine", ""), "memory_limit": 9, "wants_bandwidth": True}
    about = machine.MachineProbe({**request, "bandwidth_gbs": None}).about
    packages = about.pop("packages")
    assert packages["torch"] == torch.__version__ and packages["numpy"] == np.__version__
    assert about == {
        "device": "cpu", "kind": "cpu", "name": "a CPU", "capability": None, "driver": None,
        "products_tflops": None, "about": "cpu in words", "cuda": torch.version.cuda,
        "threads": 1234, "cpu": "a CPU", "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "dtype": "float32", "free_memory": 77,
        "peak_tflops": 1.5, "peak_source": "measured: x", "peak_measured": True,
        "bandwidth": 9e9, "bandwidth_source": "copies",
    }  # fmt: skip
    assert told == [(CPU, "float32", None)]
    about = machine.MachineProbe({**request, "bandwidth_gbs": 8.0}).about
    assert (about["bandwidth"], about["bandwidth_source"]) == (8e9, "--bandwidth_gbs")
    about = machine.MachineProbe({**request, "bandwidth_gbs": None, "wants_bandwidth": False}).about
    assert (about["bandwidth"], about["bandwidth_source"]) == (None, "not measured")


def test_a_backend_that_can_do_some_of_what_is_asked_is_tried():
    given = {"bandwidth_gbs": None, "wants_bandwidth": False}
    probe = machine.MachineProbe({**job("machine", ""), **given})
    heads = {"n_head": 2, "n_kv_head": 2, "head_dim": 16}
    specs = [{**heads, "dropout": 0.1}, {**heads, "softcap": 3.0}]
    asked = {"names": ["manual", "sdpa_math", "sdpa_flash", "flash_attn_2"], "specs": specs}
    refused = probe.round(asked)["refused"]
    assert list(refused) == ["sdpa_flash", "flash_attn_2"]  # sdpa_math has dropout, and no softcap
    assert refused["sdpa_flash"] == ["it has no dropout, and 0.1 is asked (--dropout=0)"]
    assert [list(probe.round({**asked, "specs": specs[1:]})["refused"])] == [
        list(asked["names"][1:])
    ]


def test_what_is_known_of_a_gpu(monkeypatch):
    """Its name, its driver, and beside the datasheet's rate the one that products reach."""
    told = Job(job("machine", "", dtype="bfloat16"))
    told.device = torch.device("cuda", 1)
    asked: list[Any] = []
    cuda = SimpleNamespace(get_device_name=lambda device: f"GPU {device.index}",
                           get_device_capability=lambda device: (9, device.index))  # fmt: skip
    for name, made in vars(cuda).items():
        monkeypatch.setattr(machine.torch.cuda, name, made)
    monkeypatch.setattr(machine, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(machine, "describe", lambda device: "in words")
    monkeypatch.setattr(machine, "free_memory", lambda device: asked.append("free") or 77)
    monkeypatch.setattr(machine.peaks, "peak", lambda *how: asked.append(how) or Peak(9.0, "x"))
    monkeypatch.setattr(machine.peaks, "best_peak", lambda *how: asked.append(how) or Peak(7.0, ""))
    for lines, driver in (([["570.1"], ["570.2"]], "570.1"), ([], None)):
        monkeypatch.setattr(machine, "nvidia_smi", lambda query, lines=lines: lines)
        about = machine.look(told)
        assert about["driver"] == driver and about["kind"] == "cuda"
    assert (about["name"], about["cpu"], about["capability"]) == ("GPU 1", "a CPU", (9, 1))
    assert (about["peak_tflops"], about["products_tflops"]) == (9.0, 7.0)
    assert (about["peak_measured"], about["device"]) == (False, "cuda:1")
    assert asked[:3] == ["free", (told.device, "bfloat16", None), (told.device, "bfloat16")]


def test_nvidia_smi_is_asked_once_and_may_be_missing(monkeypatch):
    ran: list[Any] = []
    done = SimpleNamespace(returncode=0, stdout="570.1, 7\n 580.2 ,8\n")
    answer = lambda command, timeout, **how: ran.append(command) or done  # noqa: E731
    monkeypatch.setattr(machine.subprocess, "run", answer)
    assert machine.nvidia_smi("a,b") == [["570.1", "7"], ["580.2", "8"]]
    assert ran == [["nvidia-smi", "--query-gpu=a,b", "--format=csv,noheader,nounits"]]
    done.returncode = 9
    assert machine.nvidia_smi("a") == []
    for error in (FileNotFoundError(), machine.subprocess.TimeoutExpired("x", 20)):

        def fails(*how: Any, error: Any = error, **more: Any) -> Any:
            raise error

        monkeypatch.setattr(machine.subprocess, "run", fails)
        assert machine.nvidia_smi("a") == []


def test_a_cpu_with_work_for_half_its_cores_is_busy(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    for load, said in ((4.0, []), (4.04, ["4.0"]), (6.0, ["6.0"])):
        monkeypatch.setattr(machine.os, "getloadavg", lambda load=load: (load, 0.0, 50.0))
        want = [f"the CPU was busy before we began: a load of {text}" for text in said]
        assert machine.busy("cpu", lambda query: [["5000", "97"]]) == want


def test_a_target_is_the_token_that_follows():
    x, y = Job(job("train", "sdpa")).random_tokens(3)
    assert x.shape == y.shape == (3, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, y) and 32 < int(x.max()) < 64
    again = Job(job("train", "manual")).random_tokens(3)
    assert torch.equal(again[0], x) and torch.equal(again[1], y)


@pytest.mark.parametrize("kind, started, stopped", [
    ("cpu", ["wait", "stamp"], ["stamp", "wait", "stamp"]),
    ("cuda", ["wait", "stamp"], ["stamp", "wait"])])  # fmt: skip
def test_an_interval_begins_and_ends_with_nothing_under_way(kind, started, stopped, monkeypatch):
    """A device's own stamp stands in its queue behind the work; the host's is taken after it."""
    did: list[str] = []
    monkeypatch.setattr(machine, "synchronize", lambda device: did.append("wait"))
    clock = machine.Clock(torch.device(kind))
    monkeypatch.setattr(clock, "stamp", lambda: did.append("stamp") or len(did))
    assert clock.start() == 2 and did == started
    did.clear()
    assert clock.stop() == (1 if kind == "cuda" else 3) and did == stopped


def test_what_is_said_and_kept_while_rounds_go_on(monkeypatch):
    """Who is done with the median, who failed once for each reason; who may not run gets none."""
    bench = asking("kernel", rounds=4, timeout=5.0)
    said: list[str] = []
    kept: list[Any] = []
    judged: list[int] = []
    asked: dict[str, Any] = {}
    bench.tell, bench.refused = said.append, {"b": ["it may not", "never"]}
    bench.keep = lambda bench, table: kept.append((len(table), table[0], judged[-1]))
    bench.earlier = [{"mode": "train"}]
    bench.machine |= {"memory_limit": 1000}
    looks: list[str] = []
    monkeypatch.setattr(Bench, "look_again", lambda self: looks.append("again"))

    def rounds(jobs: Any, points: Any, n: int, **how: Any) -> tuple[Any, bool]:
        asked.update(how, jobs=jobs, points=points, n=n)
        found = how["outcomes"]
        how["after_round"]()
        for t in (30.0, 2.0, 1.0):
            found["a", "x"].rounds.append({"ms": t})
        found["a", "y"].failure = Failure("died", ["gone"])
        found["c", "x"].failure = found["c", "y"].failure = Failure("failed", ["no", "really"])
        found["d", "x"].failure = Failure("skipped", ["too long"])
        found["d", "y"].failure = Failure("stopped", ["its time was over"])
        for name in "acd":
            how["known"](name, "x")
            how["known"](name, "y")
        how["after_round"]()
        bench.stop.why = "its time was over"
        how["after_round"]()
        return found, True

    monkeypatch.setattr("bench.bench.measure", rounds)
    jobs: Any = {name: {"name": name} for name in "abcd"}
    points = {"x": {"T": 1}, "y": {"T": 2}}
    row = lambda *told: {"of": (*told[:2], told[2].failure)}  # noqa: E731
    made = bench.measure({}, jobs, points, row, judge=lambda table: judged.append(len(table)))
    assert said == [
        "a x: 2 ms, the median of 3 rounds", "a y: died: gone", "c x: failed: no; really",
        "d x: skipped: too long"]  # fmt: skip
    assert kept == [(9, {"mode": "train"}, 8)] * 2 and judged == [8] * 3  # none once it is stopped
    assert [r["of"][:2] for r in made] == [(n, p) for p in "xy" for n in "abcd"]
    refused = made[1]["of"][2]
    assert (refused.kind, refused.why) == ("unavailable", ("it may not", "never"))
    assert list(asked["jobs"]) == [*"acd"] and asked["points"] is points and asked["n"] == 4
    assert bench.fresh and looks == ["again"] and asked["watch"] is bench.watch
    tried: list[Any] = []
    monkeypatch.setattr("bench.bench.plan.too_long", lambda *told: tried.append(told) or "so long")
    assert asked["skip"]("c", "y") == "so long"
    assert tried == [(bench, "c", {"T": 2}, asked["outcomes"])]
    bench.measure({}, jobs, points, row, rounds=2, fresh=False)
    assert (asked["n"], asked["fresh"]) == (2, False)


def test_a_look_that_is_stopped_costs_no_row(monkeypatch):
    def stopped(self: Bench) -> None:
        raise Failure("stopped", ["its time was over"])

    monkeypatch.setattr("bench.bench.measure", lambda *how, **more: ({}, False))
    monkeypatch.setattr(Bench, "look_again", stopped)
    bench = asking("kernel")
    bench.machine |= {"memory_limit": 1000}
    bench.fresh = True
    assert bench.measure({}, {"a": {}}, {"x": {}}, lambda *told: {"a": 1}) == [{"a": 1}]
    assert bench.fresh  # what an earlier part had stays true of the run


def test_sizes_that_are_none_of_ours_are_named(monkeypatch):
    monkeypatch.setattr(against_nanogpt, "prepare", lambda *how: pytest.fail("it began"))
    for sizes in ("ad", "d", "abcabx"):
        monkeypatch.setattr(against_nanogpt.sys, "argv", ["x", f"--sizes={sizes}"])
        with pytest.raises(UserError, match=f"sizes must be some of a, b and c, got '{sizes}'"):
            against_nanogpt.main()


@pytest.mark.parametrize("tf32, dtype, tflops", [
    (False, "float32", 19.5), (True, "float32", 156), (True, "bfloat16", 312), (True, "auto", 312),
])  # fmt: skip
def test_a_gpu_that_is_not_here_has_the_peak_of_what_is_asked_for(tf32, dtype, tflops) -> None:
    config = BenchConfig(train=TrainConfig(dtype=dtype, tf32=tf32))
    used, peak, (bandwidth, _) = modes.datasheet(config, "NVIDIA A100-SXM4-80GB", "--gpu")
    assert used == ("bfloat16" if dtype == "auto" else dtype)
    assert (peak.tflops, bandwidth) == (tflops, 2039e9)
