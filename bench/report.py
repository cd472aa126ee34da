"""The text of a record: facts, tables, conclusions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch

from attention.truth import allowed_error
from bench import Json, converge, decode, kernel, parts, tables, train
from bench.tables import Cells, Column, Mode, Row
from core import flops

MODES: dict[str, Mode] = {
    "train": train.MODE, "kernel": kernel.MODE, "decode": decode.MODE, "converge": converge.MODE
}  # fmt: skip
SLOW = 0.6  # of the peak, for large products
SHARES = {"mfu": "mfu", "share": "share of the peak", "mbu": "mbu"}
MEASURE = "[MEASURE.md](../../../docs/MEASURE.md)"  # as seen from bench/records/NAME
KNOWN = ("command", "date", "commit", "device", "software")  # to who runs the bench


def failure(found: dict[str, str]) -> str:
    return f"{found['what']}, {found['dtype']}: {found['why']}"


PROOF = [Column(name, name) for name in ("backend", "right", "wrong", "refused")]
PROOF += [
    Column("not reached", "not_reached"),
    Column("canary", "canary", {True: "ok", False: "LEAKS"}.__getitem__),
    Column("first failure", lambda r: next(map(failure, r["failures"]), None)),
]


def sections_of(content: Json) -> list[Json]:
    if content.get("mode") != "qualify":
        return [content]
    shared = {name: value for name, value in content.items() if name != "stages"}
    own = (stage.get("record") or {} for stage in content["stages"])
    return [{**shared, **record} for record in own if record.get("mode") in MODES]


def incomplete(rows: list[Row], part: Json, why: str) -> str:
    """Reason why a record is incomplete, or ""."""
    none = sum(row["status"] == "stopped" for row in rows)
    rounds = MODES[part["mode"]].rounds(part["settings"])
    few = sum(row["status"] == "ok" and len(row["rounds"]) < rounds for row in rows)
    found = [why or "the time limit was reached"] if why or none else []
    found += [f"{none} of {len(rows)} rows were not measured"] if none else []
    return "; ".join(found + [f"{few} have fewer than {rounds} rounds"] * bool(found and few))


def rows_of(content: Json, name: str) -> list[Json]:
    return [r for s in content["stages"] if s["name"] == name for r in s["record"].get("rows", ())]


def failed(content: Json) -> bool:
    """True if a kernel was wrong, a training ended elsewhere, or nothing was measured."""
    if content["mode"] == "qualify":
        wrong = any(row["wrong"] for row in rows_of(content, "proof"))
        return wrong or not any(stage["status"] == "done" for stage in content["stages"])
    bad = content["mode"] == "converge" and any(r.get("verdict") == "FAIL" for r in content["rows"])
    return bad or not any(r["status"] == "ok" for r in content["rows"])


def title(content: Json) -> str:
    mode = MODES.get(content["mode"])
    title = f"{mode.title if mode else 'What this machine can do'}, {content['machine']['about']}"
    return title if content.get("complete", True) else f"INCOMPLETE: {title}"


def facts(content: Json) -> dict[str, str]:
    m, s, mode = content["machine"], content["settings"], content["mode"]
    versions = {k: m[k] for k in ("driver", "cuda", "cudnn", "python") if m.get(k)}
    software = ", ".join(f"{k} {v}" for k, v in (m["packages"] | versions).items())
    dirty = " (with changes)" if content["dirty"] else ""
    found = {name: content[name] for name in ("command", "date")}
    found["commit"] = (content["commit"] or "none")[:10] + dirty
    found |= {"device": m["about"], "software": f"{software}, {m['system']}"}
    if mode != "kernel":
        model = f"{s['n_layer']} layers, {s['n_embd']} wide, {s['n_head']} heads, vocabulary "
        model += f"{content['vocab_size']:,}"
        if "hf" in content:
            name, count = content["hf"]["name"], content["hf"]["counted"]["parameters"]
            model = f"{name}, random weights, {count:,} parameters that a token uses"
        batch = f"batch {s['batch_size']}, " if mode != "decode" else ""
        found["model"] = f"{model}, {s['block_size']} tokens, {batch}{m['dtype']}"
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        counts, by_torch = content["flops_per_token"], content["reference"].get("flops_per_token")
        counts = counts | ({"torch's counter": by_torch} if by_torch else {})
        found["MFLOP a token"] = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in counts.items())
    rounds = tables.count(s.get("rounds", 0), "round")
    rounds += MODES[mode].warm_up.format(s.get("warm_up_steps")) if mode in MODES else ""
    if mode == "converge":  # without warm-up: every step counts
        rounds = f"{s['steps']} steps, seeds: {s.get('seeds', 1)}"
    fresh = ", each in new processes" if content.get("fresh_rounds") else ""
    return found | {"rounds": rounds + fresh}


def sections(content: Json) -> Iterator[tuple[str, Cells, str]]:
    for stage in content.get("stages", ()):
        if stage["name"] == "proof" and stage["record"]:
            yield "Proof", tables.table(PROOF, stage["record"]["rows"]), ""
    for part in sections_of(content):
        of, rows = flops.given(part["machine"]["peak_source"]), part["rows"]
        ok = [row for row in rows if row["status"] == "ok"]
        for name, mode in MODES.items():
            if its := [row for row in ok if row["mode"] == name]:
                yield mode.title, tables.measured(mode.columns, its, of), mode.notes
        for row in rows:
            p = row.get("profile", {})
            if "rooflines" in p:
                yield parts.title(row["backend"], p), parts.table(p, of), parts.NOTES
        if (made := tables.missing(rows))[1]:
            yield "Not measured", made, ""


def readme(content: Json) -> str:
    known = ((k, f"`{v}`" if k == "command" else v) for k, v in facts(content).items())
    text = [f"# {title(content)}"]
    text += [f"**Incomplete**: {content['incomplete']}."] if "incomplete" in content else []
    text.append("\n".join(f"- {name}: {value}" for name, value in known))
    text += ["- **{0}**: {2}".format(*a.partition(": ")) for a in content["answers"]]
    for name, made, notes in sections(content):
        text += [f"## {name}", tables.markdown(made), *([notes] if notes else [])]
    text.append(f"[Every round](record.json). Columns, and what to report: {MEASURE}")
    return "\n\n".join(text) + "\n"


def terminal(content: Json) -> str:
    known = {"incomplete": content.get("incomplete", ""), **facts(content)}
    known["no reference"] = content.get("reference", {}).get("why", "")
    text = [title(content)]
    text += [f"{name}: {value}" for name, value in known.items() if value and name not in KNOWN]
    for name, made, notes in sections(content) if content["mode"] != "qualify" else ():
        text += [f"\n{name}\n{tables.markdown(made, terminal=True)}"]
        text += [f"\n{notes}"] if notes else []
    return "\n".join([*text, "", *content["answers"]])


def answers(content: Json) -> list[str]:
    if content["mode"] == "qualify":
        return of_stages(content)
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    found = [f"Fastest: {text}" for text in tables.fastest(rows)]
    unknown: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for row, (of, name) in itertools.product(rows, SHARES.items()):
        if why := row.get(f"{of}_why"):
            unknown[name, why][row["backend"]] = None
    for (name, why), names in unknown.items():
        found.append(f"Peak: {name} not known of {', '.join(names)}: {why}.")
    found += [f"Agreement: {why}." for why in disagreeing(rows, content)]
    return [*found, *filter(None, [MODES[content["mode"]].conclude(content)])]


def disagreeing(rows: list[Row], content: Json) -> list[str]:
    dtype, found = getattr(torch, content["machine"]["dtype"]), []
    exact = "eager" if "hf" in content else "manual"
    loss, norm = (1e-2, 5e-2) if dtype.itemsize == 2 else (1e-4, 1e-3)
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


def of_stages(content: Json) -> list[str]:
    stages: Json = {stage["name"]: stage["record"] for stage in content["stages"]}
    proved, m = rows_of(content, "proof"), content["machine"]
    found, doubts = [], []
    if proved:
        right = [r for r in proved if r["right"] and not r["wrong"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in right) or "none"
        found.append(f"Proof: every number right and nothing leaked: {names}.")
    if left := [f"{r['backend']} {r['not_reached']}" for r in proved if r["not_reached"]]:
        found.append(f"Proof: cases not reached in the time: {', '.join(left)}.")
    for r in proved:
        doubts += [f"{r['backend']} is wrong in {failure(f)}" for f in r["failures"][:3]]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < SLOW * peak:
        doubts.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of {peak:,.4g} "
            f"({m['peak_source']}): is the power limit lowered?"
        )
    for name, made in stages.items():
        found += made.get("answers", [])
        doubts += made.get("busy", [])
        timed = [r for r in made.get("rows", []) if r.get("status") == "ok"]
        noisy = [row for row in timed if row.get("noisy")]
        if len(noisy) > len(timed) / 2:
            doubts.append(f"{len(noisy)} of {len(timed)} rows of {name} are noisy")
    found += [f"Suspicious: {text}." for text in doubts]
    for s in content["stages"]:
        found += [f"Missing: {s['name']}: {s['status']}: {s['why']}."] * (s["status"] != "done")
    return list(dict.fromkeys(found))
