"""What is made of rows: the sentences under the tables, and marks of figures of a given peak."""

from __future__ import annotations

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

Row = dict[str, Any]


def row(backend: str, times: list[float], mode: str = "train", **more: Any) -> Row:
    """A row whose rounds took these milliseconds."""
    s = sorted(times)
    base: Row = {"mode": mode, "backend": backend, "point": {}, "status": "ok", "kernels": [],
                 "setup_s": 1.0, "warm_up_s": 2.0, "rounds": [{"ms": t} for t in times],
                 "ms": s[len(s) // 2], "q1_ms": s[0], "q3_ms": s[-1], "spread": 0.01,
                 "noisy": False}
    if mode == "train":
        base |= {"batch_size": 8, "tokens_per_s": 8e6 / base["ms"], "mfu": 0.4, "mfu_causal": 0.3}
    return base | more


def attention_row(backend: str, T: int, ms: float, B: int = 1) -> Row:
    point = {"B": B, "T": T, "H": 4, "Hkv": 4, "D": 64, "window": None}
    figures = {"tflops_causal": 0.1, "tflops_full": 0.2, "share": 1 / ms}
    return row(backend, [ms, ms * 1.01, ms * 0.99], "kernel", point=point, **figures)


def content(rows: list[Row], **machine: Any) -> Row:
    """A record with these rows."""
    here = {"dtype": "float32", "peak_tflops": 989.4, "peak_source": "datasheet"}
    made = {"mode": "train", "machine": here | machine, "settings": {}, "rows": rows,
            "reference": {"loss": 10.9}}
    return made | {"answers": record.answers(made)}


SLOW, FAST = [100.0, 101, 99, 100, 102], [50.0, 50.5, 49.5, 50, 51]
TRAIN = [row("manual", SLOW), row("sdpa", FAST), row("sdpa_flash", [50.4, 50.2, 49.9, 49.6, 51.3])]
KERNEL = [attention_row(name, T, ms, B) for name, T, ms, B in [
    ("manual", 128, 1.0, 1), ("sdpa", 128, 2.0, 1), ("manual", 1024, 20.0, 1),
    ("sdpa", 1024, 10.0, 1), ("manual", 128, 4.0, 8), ("sdpa", 128, 3.0, 8)]]


def test_fastest_names_who_is_level_and_where_the_crossover_lies():
    said = content([*TRAIN, *KERNEL])["answers"]
    assert "train: sdpa (level: sdpa_flash)" in said[0]
    assert re.search(r"B=1 .* manual .* 128 .* sdpa .* 1,024", said[1])
    assert "B=8" in said[2] and "sdpa" in said[2] and "manual" not in said[2]
    larger = row("tiled", [90.0, 90, 90, 90, 90], batch_size=16)
    assert content([row("sdpa", FAST), larger])["answers"][0].endswith("train: tiled")
    for rounds, words in ((2, "too few rounds"), (3, "level: sdpa_flash")):
        few = [row(name, FAST[:rounds]) for name in ("sdpa", "sdpa_flash")]
        assert f"train: sdpa ({words})" in content(few)["answers"][0]


def figures(tflops: float) -> dict[str, list[list[str]]]:
    """{column: its cells} of tables with a peak that the user gave, and {sentence: []}."""
    model, peak = GPTConfig(n_layer=2), Peak(tflops, "--peak_tflops")
    train = [r | Speed(model, 1024, r["tokens_per_s"], peak).row() for r in TRAIN]
    kernel = [r | {"share": 100 / tflops} for r in KERNEL]
    found = {"parts": dict.fromkeys(parts.PARTS, 1.0), "names": {}, "by": "x", "seen_ms": 7.0,
             "plain_ms": 6.0}
    here = {"name": "x", "dtype": "float32", "peak_tflops": tflops, "bandwidth": 1e13,
            "bandwidth_source": "b"}
    config = BenchConfig(bandwidth_gbs=1e4, products_tflops=300)
    bench: Any = SimpleNamespace(model=model, config=config, part={"machine": here})
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
        both = {"loss_difference": 0.0, "gradient_norm_difference": 0.0, name: off}
        said = content([TRAIN[0], row("flash_attn_3", FAST, **both)])["answers"]
        assert any(re.match("Agreement: flash_attn_3 ", answer) for answer in said) == named
