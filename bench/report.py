"""The text of a record: facts, tables, conclusions, README.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType

import torch

from attention.truth import allowed_error
from bench import Json, converge, decode, kernel, parts, tables, train
from bench.tables import Cells, Row
from core import flops

MODES: dict[str, ModuleType] = {
    mode.__name__.removeprefix("bench."): mode for mode in (train, kernel, decode, converge)
}
WARM_UP = {
    "train": " after a first step and {} more",
    "kernel": " after a call, and another in each round",
    "decode": " after each text once",
}
SHARES = {"mfu": "mfu", "share": "share of the peak", "mbu": "mbu"}
MEASURE = "[MEASURE.md](../../../docs/MEASURE.md)"  # as seen from bench/records/NAME


def sections_of(content: Json) -> list[Json]:
    """Return the contents of a qualify record's stages, or the record itself."""
    if content.get("mode") != "qualify":
        return [content]
    shared = {name: value for name, value in content.items() if name != "stages"}
    own = (stage.get("record") or {} for stage in content["stages"])
    return [{**shared, **record} for record in own if record.get("mode") in MODES]


def planned(mode: str, settings: Json) -> int:
    """Return the number of rounds of a row."""
    return converge.planned(settings) if mode == "converge" else settings["rounds"]


def incomplete(rows: list[Row], part: Json, why: str) -> str:
    """Return why a record is not complete, and what it lacks; "" if it is. `why`: of the run."""
    none = sum(row["status"] == "stopped" for row in rows)
    if not why and not none:
        return ""
    rounds = planned(part["mode"], part["settings"])
    few = sum(row["status"] == "ok" and len(row["rounds"]) < rounds for row in rows)
    found = [why or "the time limit was reached"]
    found += [f"{none} of {len(rows)} rows were not measured"] if none else []
    return "; ".join([*found, *([f"{few} have fewer than {rounds} rounds"] if few else [])])


def title(content: Json) -> str:
    mode = content["mode"]
    what = MODES[mode].TITLE if mode in MODES else "What this machine can do"
    title = f"{what}, {content['machine']['about']}"
    return title if content.get("complete", True) else f"INCOMPLETE: {title}"


def facts(content: Json) -> dict[str, str]:
    """Return machine, software and settings."""
    m, s, mode = content["machine"], content["settings"], content["mode"]
    versions = {k: m[k] for k in ("driver", "cuda", "cudnn", "python") if m.get(k)}
    software = ", ".join(f"{k} {v}" for k, v in (m["packages"] | versions).items())
    found = {name: content[name] for name in ("command", "date")}
    dirty = " (with changes)" if content["dirty"] else ""
    found["commit"] = (content["commit"] or "none")[:10] + dirty
    found |= {"device": m["about"], "software": f"{software}, {m['system']}"}
    model = f"{s['n_layer']} layers, {s['n_embd']} wide, {s['n_head']} heads, vocabulary "
    model += f"{content['vocab_size']:,}"
    if "hf" in content:
        count = content["hf"]["counted"]["parameters"]
        model = f"{content['hf']['name']}, random weights, {count:,} parameters that a token uses"
    if mode != "kernel":
        found["model"] = f"{model}, {s['block_size']} tokens, batch {s['batch_size']}, {m['dtype']}"
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        counts, by_torch = content["flops_per_token"], content["reference"].get("flops_per_token")
        counts = counts | ({"torch's counter": by_torch} if by_torch else {})
        found["MFLOP a token"] = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in counts.items())
    rounds = tables.count(s.get("rounds", 0), "round") + WARM_UP.get(mode, "")
    if mode == "converge":  # without warm-up: every step counts
        rounds = f"{s['steps']} steps, seeds: {s.get('seeds', 1)}"
    fresh = ", each in new processes" if content.get("fresh_rounds") else ""
    return found | {"rounds": rounds.format(s.get("warm_up_steps")) + fresh}


def sections(content: Json) -> Iterator[tuple[str, Cells, str]]:
    """Yield the tables of a record or its stages, with titles and notes."""
    for stage in content.get("stages", ()):
        if stage["name"] == "proof" and stage["record"]:
            yield "Proof", proof(stage["record"]["rows"]), ""
    for part in sections_of(content):
        of, rows = flops.given(part["machine"]["peak_source"]), part["rows"]
        for name, mode in MODES.items():
            made = tables.cells(mode.COLUMNS, [r for r in rows if r["mode"] == name], of)
            if made[1]:
                yield mode.TITLE, made, mode.NOTES
        for row in rows:
            p = row.get("profile", {})
            if "rooflines" in p:  # not of older records, nor of a run that was stopped
                yield parts.title(row["backend"], p), parts.table(p, of), parts.NOTES
        if (made := tables.missing(rows))[1]:
            yield "Not measured", made, ""


def proof(rows: list[Json]) -> Cells:
    """Return the table of qualify's proof."""
    head = ["backend", "right", "wrong", "refused", "not reached", "canary", "first failure"]
    canary = {True: "ok", False: "LEAKS", None: "-"}
    lines = []
    for r in rows:
        counts = [str(r[name.replace(" ", "_")]) for name in head[1:5]]
        first = failure(r["failures"][0]) if r["failures"] else "-"
        lines.append([r["backend"], *counts, canary[r["canary"]], first])
    return head, lines


def failure(found: dict[str, str]) -> str:
    return f"{found['what']}, {found['dtype']}: {found['why']}"


def readme(content: Json) -> str:
    text = [f"# {title(content)}"]
    if "incomplete" in content:
        text.append(f"**Incomplete**: {content['incomplete']}.")
    known = ((k, f"`{v}`" if k == "command" else v) for k, v in facts(content).items())
    text.append("\n".join(f"- {name}: {value}" for name, value in known))
    text += [f"- **{a.partition(': ')[0]}**: {a.partition(': ')[2]}" for a in content["answers"]]
    for name, made, notes in sections(content):
        text += [f"## {name}", tables.markdown(made), *([notes] if notes else [])]
    text.append(f"[Every round](record.json). Columns, and what to report: {MEASURE}")
    return "\n\n".join(text) + "\n"


def terminal(content: Json) -> str:
    """Return the same for the terminal, without what the user knows; the conclusions at the end."""
    known = facts(content)
    hidden = ("command", "date", "commit", "device", "software")
    text = [title(content)]
    text += [f"incomplete: {content['incomplete']}"] if "incomplete" in content else []
    text += [f"{name}: {value}" for name, value in known.items() if name not in hidden]
    if why := content.get("reference", {}).get("why"):
        text.append(f"no reference: {why}")
    if content["mode"] != "qualify":  # its tables are in the record
        for name, made, notes in sections(content):
            text.append(f"\n{name}\n{tables.markdown(made)}" + (f"\n\n{notes}" if notes else ""))
    return "\n".join([*text, "", *content["answers"]])


# --- conclusions ---


def answers(content: Json) -> list[str]:
    """Return what cannot be read at a glance: the fastest, doubtful peaks, wrong numbers."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    old = content.get("format", 3) < 3  # by ratios of rounds
    found = [f"Fastest: {text}" for text in tables.fastest(rows, old)]
    unknown: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for of, name in SHARES.items():
            if f"{of}_why" in row:
                unknown[name, row[f"{of}_why"]].append(row["backend"])
    for (name, why), names in unknown.items():
        found.append(f"Peak: {name} not known of {', '.join(dict.fromkeys(names))}: {why}.")
    found += [f"Agreement: {why}." for why in disagreeing(rows, content)]
    if content["mode"] == "converge":
        found.append(f"Agreement: {verdict(content)}")
    return found


def verdict(content: Json) -> str:
    """Return the conclusion of a converge record."""
    names: dict[str, list[str]] = defaultdict(list)
    for r in content["rows"]:
        names[r.get("verdict", "") if r["status"] == "ok" else r["status"]].append(r["backend"])
    if not names["baseline"]:
        return "no verdict, for the baseline did not end."
    within = f"{content['settings']['tolerance']:.2%}"
    if noise := next((r["seed_noise"] for r in content["rows"] if "seed_noise" in r), None):
        within = f"{noise:.4f}, as far as the seeds scatter,"
    if bad := names["FAIL"]:
        return f"FAIL: {', '.join(bad)} ended further than {within} from {names['baseline'][0]}."
    if lost := [*names["failed"], *names["stopped"]]:
        return f"no verdict on {', '.join(lost)}, which did not end."
    return f"Every final loss is within {within} of {names['baseline'][0]}'s."


def disagreeing(rows: list[Row], content: Json) -> list[str]:
    """Return a sentence per backend whose results differ by more than rounding."""
    dtype, found = getattr(torch, content["machine"]["dtype"]), []
    exact = "eager" if "hf" in content else "manual"
    loss, norm = (1e-2, 5e-2) if dtype.itemsize == 2 else (1e-4, 1e-3)  # relative
    loss *= content["reference"].get("loss", 0.0)
    manual = {str(r["point"]): r for r in rows if r["backend"] == "manual" and "error_out" in r}
    for r in rows:
        off, grad = r.get("loss_difference", 0.0), r.get("gradient_norm_difference", 0.0)
        if not (abs(off) <= loss and abs(grad) <= norm):
            found.append(
                f"{r['backend']} DISAGREES with {exact} in float32: the loss by {off:.1e}, the "
                f"gradient norm by {grad:.1e} of itself"
            )
        for name, m in (("error_out", 2), ("error_grad", 3)):
            others = max((row[name] for row in manual.values()), default=8 * torch.finfo(dtype).eps)
            plain = manual.get(str(r["point"]), {}).get(name, others)
            if name in r and not r[name] <= allowed_error(plain, 1, 1, dtype, m):
                at = f"{name} {r[name]:.1e} at {r['point']['T']} tokens"
                found.append(f"{r['backend']} is WRONG against float64 ({at})")
    return found
