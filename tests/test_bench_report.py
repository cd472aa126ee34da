"""What is made of a record: the answers in words, the comparison and the tables."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

import bench_mfu
from bench import records, tables
from bench.config import BenchConfig
from core.settings import UserError
from train import TrainConfig


def row(backend: str, times: list[float], mode: str = "train", **more: Any) -> dict[str, Any]:
    """A row whose rounds took these milliseconds."""
    s = sorted(times)
    middle, q1, q3 = s[len(s) // 2], s[len(s) // 4], s[-1 - len(s) // 4]
    base = {
        "mode": mode, "backend": backend, "point": {}, "status": "ok", "title": backend,
        "kernels": [], "setup_s": 1.0, "warm_up_s": 2.0,
        "rounds": [{"ms": t} for t in times], "ms": middle, "q1_ms": q1, "q3_ms": q3,
        "spread": (q3 - q1) / middle if len(times) > 1 else None, "noisy": False,
        "forward_ms": middle / 3, "backward_ms": middle / 2, "memory_bytes": 2.5e9,
    }  # fmt: skip
    if mode == "train":
        base |= {"batch_size": 8, "tokens_a_step": 8000, "tokens_per_s": 8e6 / middle,
                 "mfu": 40 / middle, "mfu_causal": 36 / middle, "loss_difference": 1e-6,
                 "gradient_norm_difference": -2e-6}  # fmt: skip
    return base | more


def attention_row(backend: str, T: int, ms: float, B: int = 1, **more: Any) -> dict[str, Any]:
    point = {"B": B, "T": T, "H": 4, "Hkv": 4, "D": 64, "window": None}
    figures = {"tflops_causal": 0.1, "tflops_full": 0.2, "share": 1 / (10 * ms), "error_out": 3e-7,
               "error_grad": 9e-7, "memory_bytes": 1e6 * T}  # fmt: skip
    times = [ms, ms * 1.01, ms * 0.99]
    return row(backend, times, "kernel", **{"point": point, **figures, **more})


def content(table: list[dict[str, Any]], mode: str = "train", **machine: Any) -> dict[str, Any]:
    """A record with these rows."""
    here = {
        "device": "cuda", "kind": "cuda", "name": "NVIDIA X1", "about": "NVIDIA X1", "threads": 8,
        "capability": [9, 0], "driver": "570.1", "cuda": "12.8", "cpu": "a CPU",
        "dtype": "bfloat16",
        "system": "Linux 6", "python": "3.11.7", "packages": {"torch": "2.13.0"},
        "peak_tflops": 989.4, "peak_source": "datasheet: a sheet", "peak_measured": False,
        "bandwidth": 3.2e12, "bandwidth_source": "measured: copies of 1 GB",
        "free_memory": 80e9, "memory_limit": 80e9,
    }  # fmt: skip
    made = {
        "format": records.FORMAT, "mode": mode, "command": "python bench_mfu.py train",
        "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False,
        "seconds": 60.0, "machine": here | machine, "vocab_size": 50304,
        "settings": json.loads(json.dumps(BenchConfig(train=TrainConfig(block_size=1000)).flat())),
        "fresh_rounds": False, "flops_per_token": {"mfu": 8.5e8, "mfu_causal": 8e8},
        "reference": {"loss": 10.9, "gradient_norm": 1.0, "flops_per_token": 8.4e8},
        "rows": table, "answers": [],
    }  # fmt: skip
    made["answers"] = tables.answers(made)
    return made


SLOW, FAST = [100.0, 101, 99, 100, 102], [50.0, 50.5, 49.5, 50, 51]
TRAIN = [
    row("manual", SLOW),
    row("sdpa", FAST, kernels=["flash"]),
    row("sdpa_flash", [50.4, 50.2, 49.9, 49.6, 51.3]),
    {"mode": "train", "backend": "flex", "point": {}, "status": "failed",
     "why": ["out of memory: CUDA out of memory"], "batch_size": 8},
    {"mode": "train", "backend": "triton", "point": {}, "status": "unavailable",
     "why": ["a <reason> & another"], "batch_size": 8},
]  # fmt: skip
KERNEL = [
    attention_row("manual", 128, 1.0), attention_row("sdpa", 128, 2.0),
    attention_row("manual", 1024, 20.0), attention_row("sdpa", 1024, 10.0),
    attention_row("manual", 4096, 400.0), attention_row("sdpa", 4096, 90.0),
    attention_row("manual", 128, 4.0, 8), attention_row("sdpa", 128, 3.0, 8),
]  # fmt: skip


# ----------------------------------------------------------------------------- the answers


def test_fastest_names_who_is_level_and_where_the_crossover_lies():
    said = content([*TRAIN, *KERNEL])["answers"]
    assert "train: sdpa (level: sdpa_flash)" in said[0]
    assert re.search(r"B=1 .* manual .* 128 .* sdpa .* 1,024", said[1])
    assert "B=8" in said[2] and "sdpa" in said[2] and "manual" not in said[2]
    larger = row("tiled", [90.0, 90, 90, 90, 90], batch_size=16, tokens_a_step=16000)
    assert content([row("sdpa", FAST), larger])["answers"][0].endswith("train: tiled")


@pytest.mark.parametrize("name, most", [("loss_difference", 0.1), ("gradient_norm_difference", 1)])
def test_agreement_names_who_disagrees(name, most):
    """In float32 a run may be off by rounding, but not by a percent."""
    for off, named in ((1e-9, False), (most, True), (-most, True)):
        rows = [TRAIN[0], row("flash_attn_3", FAST, **{name: off})]
        said = content(rows, dtype="float32")["answers"][-1]
        assert said.startswith("Agreement") and ("flash_attn_3" in said) == named


# ----------------------------------------------------------------------------- comparing


def compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], capsys: Any) -> str:
    for name, made in (("a", a), ("b", b)):
        records.write(tmp_path / name, made, whole=False)
    assert (
        bench_mfu.main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "record.json")]) == 0
    )
    return capsys.readouterr().out


def lines_of(out: str) -> dict[str, str]:
    return {line.strip("| ").split()[0]: line for line in out.splitlines() if line.strip("| ")}


def test_compare_says_which_differences_exceed_the_noise(tmp_path, capsys):
    later = copy.deepcopy(TRAIN)
    later[1] = row("sdpa", [40.0, 40.4, 39.6, 40, 40.8])  # from 50
    out = compare(tmp_path, content(TRAIN), content(later), capsys)
    lines = lines_of(out)
    assert "B faster" in lines["sdpa"] and "160,000" in lines["sdpa"] and "1.250" in lines["sdpa"]
    assert "within noise" in lines["sdpa_flash"] and "flex" not in lines and "manual" not in lines
    back = compare(tmp_path, content(later), content(TRAIN), capsys)
    assert "B slower" in back


def slower(table: list[dict[str, Any]], times: float) -> list[dict[str, Any]]:
    """The same on a day when every round took so many times as long."""
    made = []
    for r in table:
        if r["status"] == "ok":
            r = row(r["backend"], [times * one["ms"] for one in r["rounds"]], r["mode"])
        made.append(r)
    return made


def test_compare_divides_the_drift_of_the_machine_out(tmp_path, capsys):
    rival = row("nanogpt", [80.0, 81, 79, 80, 82])
    a, b = [*TRAIN, rival], slower([*TRAIN, rival], 1.25)
    out = compare(tmp_path, content(a), content(b), capsys)
    lines = lines_of(out)
    assert "0.800 in train by nanogpt" in " ".join(out.split())
    assert all("within noise" in lines[name] and "1.000" in lines[name]
               for name in ("manual", "sdpa")), out  # fmt: skip
    assert "nanogpt" not in lines  # the yardstick has no line of its own
    b[1] = row("sdpa", FAST)  # as fast as before on a machine that became slower
    said = lines_of(compare(tmp_path, content(a), content(b), capsys))["sdpa"]
    assert "B faster" in said and "1.250" in said and "160,000" in said


def test_the_noise_is_what_is_left_when_the_drift_is_divided_out(tmp_path, capsys):
    """Every round half as fast or twice as fast, and sdpa a tenth faster in each: that is sure."""
    clock = [1.0, 2.0, 0.5, 1.5, 0.7]

    def made(ms: float) -> dict[str, Any]:
        rival, mine = ([t * c for c in clock] for t in (80.0, ms))
        return content([row("nanogpt", rival), row("sdpa", mine)])

    a, b = made(50.0), made(45.0)
    b["machine"]["packages"] = {"torch": "2.14.0"}
    out = compare(tmp_path, a, b, capsys)
    cells = [cell.strip() for cell in lines_of(out)["sdpa"].split("|")]
    assert cells[5:8] == ["1.111", "0.0%", "B faster"]
    assert "versions" in out


def test_two_qualify_records_are_compared_stage_by_stage(tmp_path, capsys):
    def whole(table: list[dict[str, Any]]) -> dict[str, Any]:
        made = content(table)
        stages = [
            {"name": "training", "status": "done", "record": made},
            {"name": "proof", "status": "done", "record": {"rows": [{"backend": "sdpa"}]}},
        ]
        shared = {k: v for k, v in made.items() if k in records.SHARED}
        return {**shared, "mode": "qualify", "stages": stages}

    for name, times in (("a", FAST), ("b", SLOW)):
        made = whole([row("manual", SLOW), row("sdpa", times)])
        records.write(tmp_path / name, made, whole=False)
    assert bench_mfu.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "B slower" in lines_of(capsys.readouterr().out)["sdpa"]


def test_what_was_not_measured_to_its_end_is_not_compared(tmp_path, capsys):
    cut = {**row("sdpa", [5.0, 5.0, 5.0]), "status": "stopped", "why": ["9 of 10 parts"]}
    out = compare(tmp_path, content(TRAIN), content([TRAIN[0], cut]), capsys)
    assert "sdpa" not in lines_of(out) and "only in A: sdpa, sdpa_flash" in out


def test_compare_of_two_machines_is_of_ratios(tmp_path, capsys):
    # The other machine is ten times faster, and sdpa gains less there: 1.6 x manual, not 2 x.
    other = [row("manual", [10.0, 10.1, 9.9, 10, 10.2]), row("sdpa", [6.25, 6.3, 6.2, 6.25, 6.4])]
    out = compare(tmp_path, content(TRAIN), content(other, name="NVIDIA X2"), capsys)
    assert "two machines" in out and "A/s" not in out
    lines = lines_of(out)
    assert [c.strip() for c in lines["sdpa"].split("|")][3:6] == ["2", "1.6", "0.800"]
    assert "B slower" in lines["sdpa"] and "A ratio | B ratio" in out and "manual" not in lines
    assert "only in A: sdpa_flash" in out
    alone = content([row("sdpa", FAST)], threads=3)
    assert "nothing to compare" in compare(tmp_path, content(TRAIN), alone, capsys)


def test_what_is_no_record_is_refused(tmp_path):
    old = records.ROOT / "bench" / "records" / "2026-11-21_cpu_nanogpt"
    with pytest.raises(UserError, match="record"):
        records.read(old)
    (tmp_path / "record.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="record"):
        records.read(tmp_path)
    made = content(TRAIN)
    for other in ([made], {**made, "format": 3}, {"format": made["format"], "row": []}):
        (tmp_path / "record.json").write_text(json.dumps(other), encoding="utf-8")
        with pytest.raises(UserError, match="record"):
            records.read(tmp_path)
