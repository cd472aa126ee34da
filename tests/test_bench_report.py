"""What is made of rows: the conclusions under the tables."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench import report, tables

Row = dict[str, Any]


def row(backend: str, times: list[float], mode: str = "train", **more: Any) -> Row:
    """A row whose rounds took these milliseconds."""
    rounds = [{"ms": t} for t in times]
    made = {"mode": mode, "backend": backend, "point": {}, "status": "ok", "rounds": rounds}
    return made | tables.medians(made) | more


def content(rows: list[Row]) -> Row:
    here = {"mode": "train", "machine": {"dtype": "float32"}, "reference": {"loss": 10.9}}
    return here | {"answers": report.answers(here | {"rows": rows})}


SLOW, FAST = [100.0, 101, 99, 100, 102], [50.0, 50.5, 49.5, 50, 51]
TRAIN = [row("manual", SLOW), row("sdpa", FAST), row("sdpa_flash", [50.4, 50.2, 49.9, 49.6, 51.3])]
KERNEL = [row(name, [ms, ms * 1.01, ms * 0.99], "kernel", point={"B": B, "T": T})
          for name, T, ms, B in [
    ("manual", 128, 1.0, 1), ("sdpa", 128, 2.0, 1), ("manual", 1024, 20.0, 1),
    ("sdpa", 1024, 10.0, 1), ("manual", 128, 4.0, 8), ("sdpa", 128, 3.0, 8)]]  # fmt: skip


def test_fastest_names_who_is_level_and_where_the_crossover_lies():
    said = content([*TRAIN, *KERNEL])["answers"]
    assert "train: sdpa (level: sdpa_flash)" in said[0]
    assert re.search(r"B=1: manual .* 128 .* sdpa .* 1,024", said[1])
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
