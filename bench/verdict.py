"""The conclusions of a qualification in sentences, and the page of its record."""

from __future__ import annotations

from typing import Any

from bench import proof, records, tables

Content = dict[str, Any]


def stages_of(record: Content) -> dict[str, Content]:
    """The stages with results, by name."""
    return {s["name"]: s for s in record["stages"] if s["record"]}


def ok_rows(record: Content, stage: str) -> list[Content]:
    found = stages_of(record).get(stage, {}).get("record", {})
    return [row for row in found.get("rows", []) if row.get("status") == "ok"]


def of(record: Content) -> list[str]:
    """The stages' conclusions: the best, the gaps, the doubts, what is missing."""
    said = [f"Proof: {text}." for text in of_proof(record)]
    # B and H are dropped: a call's tokens and width are the same at all lengths.
    alone = [
        {**row, "point": {k: v for k, v in row["point"].items() if k not in ("B", "H")}}
        for row in ok_rows(record, "kernels")
    ]
    said += [f"Fastest {text}." for text in tables.fastest(alone)]
    ours = [row for row in ok_rows(record, "training") if row.get("mfu") is not None]
    if ours:
        best = max(ours, key=lambda row: row["mfu"])
        said.append(
            f"Training: {best['backend']} reaches {best['mfu']:.1%} MFU (causal "
            f"{best['mfu_causal']:.1%}), {best['tokens_per_s']:,.0f} tok/s."
        )
        parts = best.get("profile", {}).get("parts")
        if parts:
            worst, whole = parts[0], best["profile"]["ms"]
            said.append(
                f"Largest gap: {worst['part']}, {worst['ms'] / whole:.0%} of a step under the "
                f"profiler, {worst['over_ms'] / whole:.0%} of it beyond the roofline."
            )
    by_batch: dict[int, list[Content]] = {}
    for row in ok_rows(record, "decode"):
        by_batch.setdefault(row["point"]["B"], []).append(row)
    for B, those in sorted(by_batch.items()):
        best = max(those, key=lambda row: row["tokens_per_s"])
        said.append(
            f"Decode, batch {B}: {best['backend']} with the cache {best['point']['cache']}, "
            f"{best['tokens_per_s']:,.0f} tok/s."
        )
    done = stages_of(record).get("converge", {}).get("record", {})
    said += [line for line in done.get("answers", []) if line.startswith("Agreement")]
    said += [f"Suspicious: {text}." for text in doubts(record)]
    for stage in record["stages"]:
        if stage["status"] != "done":
            said.append(f"Missing: {stage['name']}: {stage['status']}: {stage['why']}.")
    return said


def of_proof(record: Content) -> list[str]:
    """Who was right in all cases that were reached, and how many those were."""
    rows = ok = stages_of(record).get("proof", {}).get("record", {}).get("rows", [])
    if not rows:
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
    for row in stages_of(record).get("proof", {}).get("record", {}).get("rows", []):
        for f in row["failures"][:3]:
            what = proof.failed(f)
            said.append(f"{row['backend']} is wrong in {what}, {f['dtype']}: {f['why']}")
    m = record["machine"]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        said.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of the datasheet's "
            f"{peak:,.4g}: is the power limit lowered, or the name another's?"
        )
    about = stages_of(record).get("machine", {}).get("record", {})
    said += about.get("busy", [])
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
        for row in rows:
            if (row.get("mfu") or row.get("share") or 0) > 1:
                said.append(f"{row['backend']} does more than the peak of {peak:,.4g} TFLOP/s")
    return said


def page(record: Content) -> str:
    """The record's README.md: the sentences, then each stage's tables."""
    m = record["machine"]
    parts = [f"# {records.title(record)}", "\n".join(f"- {line}" for line in record["answers"])]
    software = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    facts = [f"command: `{record['command']}`", f"date: {record['date']}",
             f"commit: {records.commit(record)}", f"device: {m['about']}", f"software: {software}",
             f"peak: {m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"]  # fmt: skip
    parts.append("\n".join(f"- {fact}" for fact in facts))
    found = stages_of(record).get("proof", {}).get("record", {})
    if found:
        parts += ["## Proof", tables.markdown(proof.cells(found["rows"]))]
    for part in records.parts(record):
        for name, made in records.sections(part):
            parts += [f"## {name}", tables.markdown(made)]
    return "\n\n".join([*parts, "Every round is in [record.json](record.json)."]) + "\n"
