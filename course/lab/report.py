"""The table of the lab's results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from course import figures
from course.lab.training import LEVELS, PLAYS, Json, build, costs
from course.lab.variants import VARIANTS

RECORD = Path(__file__).parent / "record.json"  # of a run of python -m course.lab
TITLES = {name: name.replace("_", " ") for name in VARIANTS} | {
    "mha": "MHA", "gqa": "GQA", "mqa": "MQA", "window": "window, sinks", "mla": "MLA",
    "delta": "gated delta rule",
}


def spread(values: Iterable[float], digits: str) -> str:
    """The mean of some seeds, and the smallest and largest."""
    found = sorted(values)
    if not found:
        return ""
    low, middle, high = (f"{x:{digits}}" for x in (found[0], mean(found), found[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(content: Json) -> str:
    """A row a variant, from the content of results.json."""
    rows = []
    present = {row["variant"] for row in content["rows"]} | content["speed"].keys()
    for name in (n for n in VARIANTS if n in present):
        cost = costs(build(name, PLAYS))
        own = [row for row in content["rows"] if row["variant"] == name]
        recall = [row["recalled"] for row in own if "recalled" in row]
        kept = f"{cost['cached']:,.0f}" if name != "delta" else f"0 ({cost['state']:,.0f} in all)"
        speed = content["speed"].get(name)
        rows.append({
            "variant": TITLES[name], "cache, bytes a token": kept,
            "MFLOP a token": f"{cost['flops'] / 1e6:.2f}", "parameters": f"{cost['parameters']:,}",
            "loss": spread((row["loss"] for row in own if "loss" in row), ".3f"),
            "tokens/s": "" if speed is None else f"{speed:,.0f}",
            **{f"{pairs} pairs": spread((r[str(pairs)] for r in recall), ".0%")
               for pairs, _ in LEVELS},
        })
    return figures.table(rows)


def record() -> Json:
    return json.loads(RECORD.read_text(encoding="utf-8"))
