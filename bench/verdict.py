"""The conclusions of a qualification, in sentences."""

from __future__ import annotations

from typing import Any

from bench import tables

Content = dict[str, Any]


def stages_of(record: Content) -> dict[str, Content]:
    """The stages with results, by name."""
    return {s["name"]: s for s in record["stages"] if s["record"]}


def rows_of(record: Content, stage: str) -> list[Content]:
    """The rows of a stage; none where it has no results."""
    return stages_of(record).get(stage, {}).get("record", {}).get("rows", [])


def ok_rows(record: Content, stage: str) -> list[Content]:
    return [row for row in rows_of(record, stage) if row.get("status") == "ok"]


def of(record: Content) -> list[str]:
    """Who was right, what each stage says, what makes a figure doubtful, what is missing."""
    said = [f"Proof: {text}." for text in of_proof(record)]
    for stage in record["stages"]:
        said += stage["record"].get("answers", [])
    said += [f"Suspicious: {text}." for text in doubts(record)]
    for stage in record["stages"]:
        if stage["status"] != "done":
            said.append(f"Missing: {stage['name']}: {stage['status']}: {stage['why']}.")
    return said


def of_proof(record: Content) -> list[str]:
    """Who was right in all cases that were reached, and how many those were."""
    if not (rows := rows_of(record, "proof")):
        return []
    ok = [r for r in rows if not r["wrong"] and r["right"]]
    names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in ok) or "none"
    left = [f"{r['backend']} {r['not_reached']}" for r in rows if r["not_reached"]]
    said = [f"every number right and nothing leaked: {names}"]
    if left:
        said.append(f"cases not reached in the time: {', '.join(left)}")
    return said


def doubts(record: Content) -> list[str]:
    """What is wrong, or makes a figure doubtful."""
    said = []
    for row in rows_of(record, "proof"):
        said += [f"{row['backend']} is wrong in {tables.failure(f)}" for f in row["failures"][:3]]
    m = record["machine"]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        said.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of the datasheet's "
            f"{peak:,.4g}: is the power limit lowered, or the name another's?"
        )
    said += stages_of(record).get("machine", {}).get("record", {}).get("busy", [])
    for stage in record["stages"]:
        if held := stage.get("watched", {}).get("held_down_by"):
            said.append(
                f"in the stage {stage['name']} the GPU's clock was held down by "
                f"{' and '.join(held)}"
            )
        rows = ok_rows(record, stage["name"])
        noisy = [row for row in rows if row.get("noisy")]
        if len(noisy) > len(rows) / 2:
            said.append(f"{len(noisy)} of {len(rows)} rows of {stage['name']} are noisy")
    return said


def failed(record: Content) -> bool:
    """Whether a kernel was wrong, or nothing was done."""
    wrong = any(row["wrong"] for row in rows_of(record, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in record["stages"])
