"""The arithmetic of the bench, with expected values from elsewhere: by hand, by made-up clocks.

Whoever measures is measured: every figure of a row is computed here from made-up rounds, stamps
and files, by the code that computes it in a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bench import job

import bench_mfu
from bench import (
    against_nanogpt,
    compare,
    decoding,
    machine,
    modes,
    records,
    rows,
    tables,
    training,
)  # fmt: skip
from bench.bench import Bench
from bench.config import BenchConfig
from bench.job import Job
from bench.kernels import Kernels
from bench.process import Failure, Outcome
from core.flops import Peak
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
    assert rows.of_decoding(row, found, 1e12)["mbu"] < 1
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


def test_a_round_has_as_many_steps_as_its_seconds_hold(monkeypatch):
    worker = training.Training(job("train", "manual"))
    asked: list[int] = []
    monkeypatch.setattr(worker, "timed", lambda n: asked.append(n) or {"ms": 1.0})
    for step_s in (0.2, 0.3, 7.0):
        worker.step_s = step_s
        worker.round({"seconds": 1.0})
    assert asked == [5, 3, 1]


def test_the_seconds_of_a_step_that_fits():
    worker = training.Training(job("train", "manual"))
    worker.clock = Ticks(1)
    assert worker.fits(2)["seconds"] == pytest.approx(0.001)  # one stop


def test_the_parts_of_an_attention_call_by_made_up_stamps():
    kernels = Kernels(job("kernel", "manual"))
    kernels.clock = Ticks(1, 2, 4)  # until a call, its forward, its backward
    point = {"B": 1, "T": 4, "H": 2, "Hkv": 2, "D": 8, "window": None}
    found = kernels.round({**point, "seconds": 0.028})  # a call takes 8 ms, its stop included
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
    assert found["cache_bytes"] == 55
    # by hand: 1 layer of 2 heads of 16, float32, keys and values
    assert worker.about["token_bytes"] == 2 * 1 * 2 * 16 * 4
    gains = 3 * 32
    assert worker.about["weight_bytes"] == 4 * (64 * 32 + 12 * 32 * 32 + gains)


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
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert machine.last_level_cache(CPU) == 2 * 32 * 2**20
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert machine.last_level_cache(CPU) == 32 * 2**20
    monkeypatch.setattr(machine, "CPUS", tmp_path / "none")
    assert machine.last_level_cache(CPU) is None


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
    rate, how = machine.bandwidth(CPU)
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
    assert [tables.bytes_(n) for n in (None, 5e6, 999e6, 1e9, 2.5e9)] == [
        "-", "5.0 MB", "999.0 MB", "1.00 GB", "2.50 GB"]  # fmt: skip
    assert [tables.number(x) for x in (None, 0.6912, 4.51, 99.94, 1234.4)] == [
        "-", "0.691", "4.51", "99.9", "1,234"]  # fmt: skip


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
    config = against_nanogpt.BenchConfig(nanogpt=str(tmp_path), dtype="bfloat16")
    for loop in (against_nanogpt.ours, against_nanogpt.theirs):
        assert loop("a", config, tmp_path) == (pytest.approx(14.5e-3), 7)
    assert all("--max_iters=403" in words and "--n_embd=128" in words for words in commands)
    assert "--dtype=bfloat16" in commands[0] and "--dtype=bfloat16" not in commands[1]


def test_a_target_is_the_token_that_follows():
    x, y = Job(job("train", "sdpa")).random_tokens(3)
    assert x.shape == y.shape == (3, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, y) and 32 < int(x.max()) < 64
    again = Job(job("train", "manual")).random_tokens(3)
    assert torch.equal(again[0], x) and torch.equal(again[1], y)
