"""The table of the lab's results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from course import format
from course.lab.mqar import LEVELS
from course.lab.training import PLAYS, Json, build, costs
from course.lab.variants import NAMES

RECORD = Path(__file__).parent / "record.json"  # of a run of python -m course.lab
TITLES = {
    "mha": "MHA", "gqa": "GQA", "mqa": "MQA", "window": "window, sinks", "gate": "gate",
    "value_residual": "value residual", "forgetting": "forgetting",
    "differential": "differential", "mla": "MLA", "delta": "gated delta rule",
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
    for name in (n for n in NAMES if n in present):
        cost = costs(build(name, PLAYS))
        own = [row for row in content["rows"] if row["variant"] == name]
        recall = [row["recalled"] for row in own if "recalled" in row]
        kept = f"{cost['cached']:,.0f}" if name != "delta" else f"0 ({cost['state']:,.0f} in all)"
        rows.append((
            TITLES[name], kept, f"{cost['flops'] / 1e6:.2f}", f"{cost['parameters']:,}",
            spread((row["loss"] for row in own if "loss" in row), ".3f"),
            f"{content['speed'][name]:,.0f}" if name in content["speed"] else "",
            *(spread((r[str(pairs)] for r in recall), ".0%") for pairs, _ in LEVELS),
        ))
    titles = ("variant", "cache, bytes a token", "MFLOP a token", "parameters", "loss", "tokens/s",
              *(f"{pairs} pairs" for pairs, _ in LEVELS))
    return format.table(titles, rows)


def record() -> Json:
    return json.loads(RECORD.read_text(encoding="utf-8"))
