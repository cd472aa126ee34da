"""The numbers in the tables of docs/SPEED.md are those of the records that their section links."""

from __future__ import annotations

import re

from checkout import ROOT

NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
RATIO = re.compile(r"([\d.]+), ([\d.]+): \*\*([\d.]+)\*\*")  # ours, theirs, and their ratio


def numbers(text: str) -> set[str]:
    return {word.replace(",", "") for word in NUMBER.findall(text)}


def rounds_to(measured: str, shown: str) -> bool:
    """True if a measured number is the shown one, which may have fewer digits."""
    return abs(float(measured) - float(shown)) <= 0.51 * 10 ** -len(shown.partition(".")[2])


def test_the_tables_of_speed_are_the_records() -> None:
    page = (ROOT / "docs" / "SPEED.md").read_text(encoding="utf-8")
    unknown = []
    for section in re.split(r"^(?=## )", page, flags=re.M)[1:]:
        records = re.findall(r"\]\(\.\./(bench/records/[^)]+README\.md)\)", section)
        known = set().union(*(numbers((ROOT / r).read_text("utf-8")) for r in records))
        for before, table in re.findall(r"((?:.+\n)*)\n((?:\|.*\n)+)", section):
            if "no record" in before:
                continue
            for a, b, ratio in RATIO.findall(table):
                assert abs(float(a) / float(b) - float(ratio)) < 0.01, (a, b, ratio)
            rows = [row for row in table.splitlines()[2:] if not row.startswith("| anchor")]
            shown = numbers(RATIO.sub(r"\1 \2", "\n".join(rows)))
            unknown += [x for x in shown if not any(rounds_to(y, x) for y in known)]
    assert not unknown
