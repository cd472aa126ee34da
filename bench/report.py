"""The text of a record: facts, tables, conclusions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attention.truth import allowed_error
from bench import Json, converge, decode, kernel, parts, tables, train
from bench.tables import Cells, Mode, Row, count, failure, heads
from core import flops
from core.options import TrainConfig
from core.runtime import decide_residual

MODES: dict[str, Mode] = {
    "train": train.MODE, "kernel": kernel.MODE, "decode": decode.MODE, "converge": converge.MODE
}  # fmt: skip
SLOW = 0.6  # of the peak, for large products
SHARES = {"mfu": "mfu", "share": "share of the peak", "mbu": "mbu"}
PROOF = "backend, right, wrong, refused, not reached, canary, first failure"
MEASURE = "[MEASURE.md](../../../docs/MEASURE.md)"  # as seen from bench/records/NAME
NAMED = ("gelu", "position", "norm", "mlp", "qk_norm", "tied", "optimizer")  # if not the default
KNOWN = ("command", "date", "commit", "device", "software")  # to who runs the bench


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
    wrong = "stages" in content and any(row["wrong"] for row in rows_of(content, "proof"))
    for part in sections_of(content):
        rows = [row for row in part["rows"] if row["status"] == "ok"]
        wrong |= any(row.get("verdict") == "FAIL" for row in part["rows"])
        wrong |= any(disagreeing(rows, part))
    ended = {one["status"] for one in content["stages" if "stages" in content else "rows"]}
    if content["mode"] == "converge":
        ended &= {row.get("verdict") for row in content["rows"]}
    return wrong or not ended & {"ok", "done"}


def title(content: Json) -> str:
    what = "What this machine can do" if "stages" in content else MODES[content["mode"]].title
    incomplete = "" if content.get("complete", True) else "INCOMPLETE: "
    return f"{incomplete}{what}, {content['machine']['about']}"


def facts(content: Json) -> dict[str, str]:
    m, s, mode = content["machine"], content["settings"], content["mode"]
    packages = m["packages"] | {k: m.get(k) for k in ("driver", "cuda", "cudnn", "python")}
    software = [f"{name} {version}" for name, version in packages.items() if version]
    dirty = " (with changes)" if content["dirty"] else ""
    found = {name: content[name] for name in ("command", "date")}
    found |= {"commit": (content["commit"] or "none")[:10] + dirty, "device": m["about"]}
    found["software"] = ", ".join([*software, m["system"]])
    if mode != "kernel":
        numbers = content.get("hf", {}).get("counted", {}).get("parameters", 0)
        used = f", random weights, {numbers:,} parameters that a token uses" if numbers else ""
        batch = f", batch {s['batch_size']}" if mode != "decode" else ""
        found["model"] = f"{work(content)}{used}, {s['block_size']} tokens{batch}"
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        by_torch = content["reference"].get("flops_per_token")
        counts = content["flops_per_token"] | ({"torch's counter": by_torch} if by_torch else {})
        found["MFLOP a token"] = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in counts.items())
    rounds = count(s.get("rounds", 0), "round")
    rounds += MODES[mode].warm_up.format(s.get("warm_up_steps")) if mode in MODES else ""
    if mode == "converge":  # without warm-up: every step counts
        rounds = f"{s['steps']} steps, seeds: {s.get('seeds', 1)}"
    return found | {
        "rounds": rounds + ", each in new processes" * content.get("fresh_rounds", False)
    }


def work(part: Json) -> str:
    """The model and its step: rows compete where these words are the same."""
    m, s, here = parts.model_of(part), part["settings"], part["machine"]
    windows = ", ".join(str(w or "none") for w in dict.fromkeys(m.windows))
    residual = decide_residual(s.get("residual_dtype", "float32"), here["kind"], here["dtype"])
    micro = s.get("gradient_accumulation_steps", 1) if part["mode"] != "decode" else 1
    names = NAMED if "hf" not in part else ("optimizer",)
    words = {
        part.get("hf", {}).get("name", ""): "hf" in part,
        f"{m.n_layer} layers, {m.n_embd} wide, {heads(m.n_head, m.kv_heads, ' heads')}": True,
        f"vocabulary {m.vocab_size:,}": True,
        f"window {windows}": windows != "none",
        here["dtype"]: True,
        "biases": m.bias,
        f"dropout {m.dropout:g}": m.dropout,
        **{f"{n}={s.get(n)}": n in s and s[n] != getattr(TrainConfig, n) for n in names},
        "our weights in int8": s.get("weights") == "int8",
        f"{micro} micro-batches": micro > 1,
        "gradient checkpointing": s.get("gradient_checkpointing"),
        "residual in autocast": residual == "autocast" and "hf" not in part,
        f"{s.get('steps')} steps": part["mode"] == "converge",
    }
    return ", ".join(word for word, on in words.items() if on)


def sections(content: Json) -> Iterator[tuple[str, Cells, str]]:
    if proved := rows_of(content, "proof") if "stages" in content else []:
        yield "Proof", tables.table(PROOF, proved), ""
    for part in sections_of(content):
        of, rows = flops.given(part["machine"]["peak_source"]), part["rows"]
        for name, mode in MODES.items():
            if its := [row for row in rows if (row["status"], row["mode"]) == ("ok", name)]:
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
        text += [f"\n{name}", tables.markdown(made, True), *([f"\n{notes}"] if notes else [])]
    return "\n".join([*text, "", *content["answers"]])


def answers(content: Json) -> list[str]:
    if content["mode"] == "qualify":
        return list(dict.fromkeys(of_stages(content)))
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    found = [f"Fastest: {text}" for text in tables.fastest(rows)]
    for of, name in SHARES.items():
        unknown = {why: None for row in rows if (why := row.get(f"{of}_why"))}
        for why in unknown:
            names = {row["backend"]: None for row in rows if row.get(f"{of}_why") == why}
            found.append(f"Peak: {name} not known of {', '.join(names)}: {why}.")
    found += [f"Agreement: {why}." for why in disagreeing(rows, content)]
    return [*found, *filter(None, [MODES[content["mode"]].conclude(content)])]


def disagreeing(rows: list[Row], content: Json) -> Iterator[str]:
    dtype = getattr(torch, content["machine"]["dtype"])
    exact = "eager" if "hf" in content else "manual"
    loss, norm = (1e-2, 5e-2) if dtype.itemsize == 2 else (1e-4, 1e-3)
    loss *= content["reference"].get("loss", 0.0)
    manual = {str(r["point"]): r for r in rows if r["backend"] == "manual" and "error_out" in r}
    for r in rows:
        off, grad = r.get("loss_difference", 0.0), r.get("gradient_norm_difference", 0.0)
        if not (abs(off) <= loss and abs(grad) <= norm):
            by = f"the loss by {off:.1e}, the gradient norm by {grad:.1e} of itself"
            yield f"{r['backend']} DISAGREES with {exact} in float32: {by}"
        for name, m in (("error_out", 2), ("error_grad", 3)):
            others = max((row[name] for row in manual.values()), default=8 * torch.finfo(dtype).eps)
            plain = manual.get(str(r["point"]), {}).get(name, others)
            if name in r and not r[name] <= allowed_error(plain, 1, 1, dtype, m):
                at = f"{name} {r[name]:.1e} at {r['point']['T']} tokens"
                yield f"{r['backend']} is WRONG against float64 ({at})"


def of_stages(content: Json) -> Iterator[str]:
    m, proved = content["machine"], rows_of(content, "proof")
    doubts = [f"{r['backend']} is wrong in {failure(f)}" for r in proved for f in r["failures"][:3]]
    if proved:
        right = [r for r in proved if r["right"] and not r["wrong"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in right) or "none"
        yield f"Proof: every number right and nothing leaked: {names}."
    if left := [f"{r['backend']} {r['not_reached']}" for r in proved if r["not_reached"]]:
        yield f"Proof: cases not reached in the time: {', '.join(left)}."
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < SLOW * peak:
        share = f"{reached / peak:.0%} of {peak:,.4g} ({m['peak_source']})"
        of = f"large matmuls reach {reached:,.4g} TFLOP/s, {share}"
        doubts.append(f"{of}: is the power limit lowered?")
    for stage in content["stages"]:
        made = stage["record"]
        yield from made.get("answers", [])
        timed = [r for r in made.get("rows", []) if r.get("status") == "ok"]
        noisy = sum(bool(row.get("noisy")) for row in timed)
        doubts += made.get("busy", [])
        if noisy > len(timed) / 2:
            doubts.append(f"{noisy} of {len(timed)} rows of {stage['name']} are noisy")
    yield from (f"Suspicious: {text}." for text in doubts)
    for s in content["stages"]:
        if s["status"] != "done":
            yield f"Missing: {s['name']}: {s['status']}: {s['why']}."
