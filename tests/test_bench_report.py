"""What is made of a record: the answers in words, the comparison and the tables."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from bench import parts, record
from bench.config import BenchConfig
from bench.plan import planned
from bench.plan.scale import Cluster, Job, Plan
from core.flops import Peak, Speed
from model import GPTConfig
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
    }
    if mode == "train":
        base |= {"batch_size": 8, "tokens_a_step": 8000, "tokens_per_s": 8e6 / middle,
                 "mfu": 40 / middle, "mfu_causal": 36 / middle, "loss_difference": 1e-6,
                 "gradient_norm_difference": -2e-6}
    return base | more


def attention_row(backend: str, T: int, ms: float, B: int = 1, **more: Any) -> dict[str, Any]:
    point = {"B": B, "T": T, "H": 4, "Hkv": 4, "D": 64, "window": None}
    figures = {"tflops_causal": 0.1, "tflops_full": 0.2, "share": 1 / (10 * ms), "error_out": 3e-7,
               "error_grad": 9e-7, "memory_bytes": 1e6 * T}
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
    }
    made = {
        "format": record.FORMAT, "mode": mode, "command": "python bench_mfu.py train",
        "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False,
        "seconds": 60.0, "machine": here | machine, "vocab_size": 50304,
        "settings": json.loads(json.dumps(BenchConfig(train=TrainConfig(block_size=1000)).flat())),
        "fresh_rounds": False, "flops_per_token": {"mfu": 8.5e8, "mfu_causal": 8e8},
        "reference": {"loss": 10.9, "gradient_norm": 1.0, "flops_per_token": 8.4e8},
        "rows": table, "answers": [],
    }
    made["answers"] = record.answers(made)
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
]
KERNEL = [
    attention_row("manual", 128, 1.0), attention_row("sdpa", 128, 2.0),
    attention_row("manual", 1024, 20.0), attention_row("sdpa", 1024, 10.0),
    attention_row("manual", 4096, 400.0), attention_row("sdpa", 4096, 90.0),
    attention_row("manual", 128, 4.0, 8), attention_row("sdpa", 128, 3.0, 8),
]


# --- the answers ---


def test_fastest_names_who_is_level_and_where_the_crossover_lies():
    said = content([*TRAIN, *KERNEL])["answers"]
    assert "train: sdpa (level: sdpa_flash)" in said[0]
    assert re.search(r"B=1 .* manual .* 128 .* sdpa .* 1,024", said[1])
    assert "B=8" in said[2] and "sdpa" in said[2] and "manual" not in said[2]
    larger = row("tiled", [90.0, 90, 90, 90, 90], batch_size=16, tokens_a_step=16000)
    assert content([row("sdpa", FAST), larger])["answers"][0].endswith("train: tiled")
    for rounds, words in ((1, "too few rounds"), (2, "too few rounds"), (3, "level: sdpa_flash")):
        few = [row(name, FAST[:rounds]) for name in ("sdpa", "sdpa_flash")]
        assert f"train: sdpa ({words})" in content(few)["answers"][0]
    assert content([row("sdpa", FAST[:2])])["answers"][0].endswith("train: sdpa")


def figures(tflops: float) -> dict[str, list[list[str]]]:
    """{column: its cells} of tables with a peak that the user gave, and {sentence: []}."""
    model, peak = GPTConfig(n_layer=2), Peak(tflops, "--peak_tflops")
    train = [r | Speed(model, 1024, r["tokens_per_s"], peak).row() for r in TRAIN[:3]]
    kernel = [r | {"share": 100 / tflops} for r in KERNEL]
    found = {"parts": dict.fromkeys(parts.PARTS, 1.0), "names": {}, "by": "x", "seen_ms": 7.0,
             "plain_ms": 6.0}
    here = {"name": "x", "dtype": "float32", "peak_tflops": tflops, "bandwidth_source": "b"}
    config = BenchConfig(bandwidth_gbs=1e4, products_tflops=300)
    bench: Any = SimpleNamespace(model=model, config=config,
                                 part={"machine": {**here, "bandwidth": 1e13}})
    profile = parts.beside_roofline(bench, found, 8, 1)
    made = content([train[0] | {"profile": profile}, *train[1:], *kernel],
                   peak_tflops=tflops, peak_source=peak.source)
    job = Job(model, 64, 8, False, True, 4)
    at = Cluster("bfloat16", peak, tflops, 1e12, 1e15, 8, 1e11, 1e10)
    plans = [planned.row(Plan(job, at, "ddp", n, 1)) for n in (1, 8)]
    out: dict[str, list[list[str]]] = {sentence: [] for sentence in made["answers"]}
    for title, (head, lines) in [*record.sections(made), *planned.sections(plans, peak.of)]:
        for name, cells in zip(head, zip(*lines)):
            out.setdefault(f"{title}: {name}", []).append(sorted(cells))  # parts are sorted by gap
    return out


def test_a_given_peak_marks_every_figure_that_uses_it():
    one, other = figures(900), figures(700)
    differ = {name for name in one if other.get(name) != one[name]}
    same = one.keys() - differ
    assert len(differ) > 10 and len(same) > 40
    assert [name for name in differ if "of --peak_tflops" not in name] == []
    marked = {name.split(": ")[-1].split(" of --")[0] for name in same if "--peak" in name}
    assert marked <= {"limit", "exposed"}  # equal by chance


@pytest.mark.parametrize("name, most", [("loss_difference", 0.1), ("gradient_norm_difference", 1)])
def test_agreement_names_who_disagrees(name, most):
    """In float32 a run may be off by rounding, but not by a percent."""
    for off, named in ((1e-9, False), (most, True), (-most, True)):
        rows = [TRAIN[0], row("flash_attn_3", FAST, **{name: off})]
        said = content(rows, dtype="float32")["answers"]
        assert any(re.match("Agreement: flash_attn_3 ", answer) for answer in said) == named
