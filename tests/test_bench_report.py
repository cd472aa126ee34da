"""What is made of rows: the conclusions under the tables."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench import report

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
    return made | {"answers": report.answers(made)}


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
    for rounds, words in ((2, "2 rounds; level: sdpa_flash"), (3, "level: sdpa_flash")):
        few = [row(name, FAST[:rounds]) for name in ("sdpa", "sdpa_flash")]
        assert f"train: sdpa ({words})" in content(few)["answers"][0]


@pytest.mark.parametrize("name, most", [("loss_difference", 0.1), ("gradient_norm_difference", 1)])
def test_agreement_names_who_disagrees(name, most):
    """In float32 a run may be off by rounding, but not by a percent."""
    for off, named in ((1e-9, False), (most, True), (-most, True)):
        both = {"loss_difference": 0.0, "gradient_norm_difference": 0.0, name: off}
        said = content([TRAIN[0], row("flash_attn_3", FAST, **both)])["answers"]
        assert any(re.match("Agreement: flash_attn_3 ", answer) for answer in said) == named
