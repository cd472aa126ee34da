"""Records: a folder DATE_DEVICE_SLUG with record.json and README.md.

record.json has the machine, software and settings and every raw round; all other figures are
computed from the rounds, when it is written (complete) and when it is read (verify.py).
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import ModuleType

import torch

from attention.truth import allowed_error
from bench import ROOT, Json, converge, decode, hf, kernel, parts, tables, train
from bench.tables import Cells, Row
from core import flops
from core.files import write_at_once
from core.settings import UserError

FORMAT = 2  # format 1 has no sizes in its rounds, and no proofs
MODES: dict[str, ModuleType] = {
    "train": train,
    "kernel": kernel,
    "decode": decode,
    "converge": converge,
}
OLD_CUDNN = 91500  # before 9.15 PyTorch does not take cuDNN's kernel on Hopper
# Entries of a qualify record that its stages share.
SHARED = (
    "format", "command", "date", "commit", "dirty", "seconds", "machine", "vocab_size",
    "settings", "fresh_rounds", "reference", "complete",
)  # fmt: skip


def git_state() -> Json:
    """Return commit and dirty, None outside a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip("\n") if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def sections_of(content: Json) -> list[Json]:
    """Return the contents of a qualify record's stages, or the record itself."""
    if content.get("mode") != "qualify":
        return [content]
    shared = {name: content[name] for name in SHARED if name in content}
    own = (stage.get("record") or {} for stage in content["stages"])
    return [{**shared, **record} for record in own if record.get("mode") in MODES]


def planned(mode: str, settings: Json) -> int:
    """Return the number of rounds of a row."""
    return converge.planned(settings) if mode == "converge" else settings["rounds"]


def complete(content: Json) -> Json:
    """Return a record with the figures of its rows, and the sentences under the tables."""
    content = copy.deepcopy(content)
    model = hf.model_of(content)
    both = {"mfu": False, "mfu_causal": True}
    content["flops_per_token"] = {
        name: flops.flops_per_token(model, model.block_size, causal=c) for name, c in both.items()
    }
    for row in content["rows"]:
        if row["status"] == "ok":
            row |= MODES[row["mode"]].figures(row, content)
            for one in row["rounds"]:
                one.pop("losses", None)
        else:
            row.pop("rounds", None)
    if content["mode"] == "converge":
        converge.compare(content["rows"], content["settings"])
    return content | {"answers": answers(content)}


# --- write ---


def device_slug(machine: Json) -> str:
    """Return the device for a folder's name: "cpu", "h100-80gb-hbm3"."""
    if machine["kind"] == "cpu":
        return "cpu"
    name = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", machine["name"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def new_folder(records_dir: str | Path, slug: str, machine: Json) -> Path:
    """Make and return DATE_DEVICE_SLUG, or with -2, -3, ...; UserError if it cannot be made."""
    first = Path(records_dir) / f"{date.today()}_{device_slug(machine)}_{slug}"
    folder, n = first, 1
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:  # mkdir, not exists(): another bench may end at the same time
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            folder, n = Path(f"{first}-{n + 1}"), n + 1
    except OSError as e:
        raise UserError(f"cannot write record {folder} ({e.strerror})") from e


def write(folder: Path, content: Json, whole: bool = True) -> None:
    """Write record.json atomically; if `whole` also README.md. UserError if that is impossible."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_at_once(folder / "record.json", text)
        if whole:
            write_at_once(folder / "README.md", readme(content))
    except OSError as e:
        raise UserError(f"cannot write record {folder} ({e.strerror})") from e


# --- show ---


def title(content: Json) -> str:
    mode = content["mode"]
    what = MODES[mode].TITLE if mode in MODES else "What this machine can do"
    title = f"{what}, {content['machine']['about']}"
    return title if content.get("complete", True) else f"INCOMPLETE: {title}"


def facts(content: Json) -> dict[str, str]:
    """Return machine, software and settings."""
    m, s, mode = content["machine"], content["settings"], content["mode"]
    software = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    software += "".join(f", {k} {m[k]}" for k in ("driver", "cuda", "cudnn") if m.get(k))
    rounds = f"{s.get('rounds')} rounds"
    rounds += ", each in new processes" if content.get("fresh_rounds") else ""
    if mode == "converge":  # without warm-up: every step counts
        rounds = f"{s['steps']} steps"
        rounds += f", {s['seeds']} seeds" if s.get("seeds", 1) > 1 else ""
    warm_up = {
        "train": f"; warm-up: a first step and {s.get('warm_up_steps')} more",
        "kernel": "; warm-up: a call, and another in each round",
        "decode": "; warm-up: each text once",
    }
    found = {
        "command": content["command"],
        "date": content["date"],
        "commit": (content["commit"] or "none")[:10]
        + (" (with changes)" if content["dirty"] else ""),
        "device": m["about"],
        "software": f"{software}, python {m['python']}, {m['system']}",
    }
    if "hf" in content:
        h, counted = content["hf"], content["hf"]["counted"]
        model = (
            f"{h['name']} ({h['config']['model_type']}), random weights, {len(counted['layers'])} "
            f"layers of attention, {counted['parameters']:,} parameters that a token multiplies"
        )
    else:
        model = f"{s['n_layer']} layers, {s['n_embd']} wide, {s['n_head']} heads, "
        model += f"vocabulary {content['vocab_size']:,}"
    if mode != "kernel":
        found["model"] = f"{model}, {s['block_size']} tokens, batch {s['batch_size']}, {m['dtype']}"
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        counts = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in content["flops_per_token"].items())
        if "flops_per_token" in content["reference"]:
            by_torch = content["reference"]["flops_per_token"] / 1e6
            counts += f"; torch's counter: {by_torch:,.2f}"
        if "hf" in content:
            counts += "; both are the counter's, with attention's products by the formula"
        found["MFLOP a token"] = counts
    if 0 < (m.get("cudnn") or 0) < OLD_CUDNN:
        found["remark"] = "cuDNN before 9.15: PyTorch may choose another attention kernel"
    return found | {"rounds": rounds + warm_up.get(mode, "")}


def sections(content: Json) -> list[tuple[str, Cells]]:
    """Return the tables of a record or its stages, with titles."""
    if content["mode"] == "qualify":
        proved = (s["record"] for s in content["stages"] if s["name"] == "proof")
        found = [("Proof", proof(part["rows"])) for part in proved if part]
        return found + [table for part in sections_of(content) for table in sections(part)]
    of, found = flops.given(content["machine"]["peak_source"]), []
    for name, mode in MODES.items():
        made = tables.cells(mode.COLUMNS, [r for r in content["rows"] if r["mode"] == name], of)
        if made[1]:
            found.append((mode.TITLE, made))
    for row in content["rows"]:
        p = row.get("profile", {})
        if isinstance(p.get("parts"), list):  # else the run was stopped before its sums
            found.append((parts.title(row["backend"], p), parts.table(p, of)))
    if (made := tables.missing(content["rows"]))[1]:
        found.append(("Not measured", made))
    return found


VERDICTS = ("right", "wrong", "refused", "not_reached")


def proof(rows: list[Json]) -> Cells:
    """Return the table of qualify's proof."""
    head = ["backend", "right", "wrong", "refused", "not reached", "canary", "first failure"]
    lines = []
    for r in rows:
        canary = {True: "ok", False: "LEAKS", None: "-"}[r["canary"]]
        counts = [str(r[n]) for n in VERDICTS]
        lines.append([r["backend"], *counts, canary, *[*map(failure, r["failures"]), "-"][:1]])
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
    for name, made in sections(content):
        text += [f"## {name}", tables.markdown(made)]
    text.append("[Every round](record.json)")
    return "\n\n".join(text) + "\n"


def answers(content: Json) -> list[str]:
    """Return what cannot be read at a glance: the fastest, doubtful peaks, wrong numbers."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    found = [f"Fastest: {text}" for text in tables.fastest(rows)]
    for of, name in (("mfu", "mfu"), ("share", "share of the peak"), ("mbu", "mbu")):
        reasons: dict[str, list[str]] = {}
        for r in (r for r in rows if f"{of}_why" in r):
            reasons.setdefault(r[f"{of}_why"], []).append(r["backend"])
        for why, names in reasons.items():
            found.append(f"Peak: {name} not known of {', '.join(dict.fromkeys(names))}: {why}.")
    if content["mode"] != "decode" and (doubt := content["machine"].get("peak_doubt")):
        found.append(f"Peak: {doubt}.")
    found += [f"Agreement: {why}." for why in disagreeing(rows, content)]
    if content["mode"] == "converge" and rows:
        found.append(f"Agreement: {verdict(rows, content)}")
    return found


def verdict(rows: list[Row], content: Json) -> str:
    base = next((r["backend"] for r in rows if r.get("verdict") == "baseline"), "the baseline")
    within = f"{content['settings']['tolerance']:.2%}"
    if noise := next((r["seed_noise"] for r in rows if "seed_noise" in r), None):
        within = f"{noise:.4f}, as far as the seeds scatter,"
    if bad := [r["backend"] for r in rows if r.get("verdict") == "FAIL"]:
        return f"FAIL: {', '.join(bad)} ended further than {within} from {base}."
    return f"Every final loss is within {within} of {base}'s."


def disagreeing(rows: list[Row], content: Json) -> list[str]:
    """Return a sentence per backend whose results differ by more than rounding."""
    dtype, found = content["machine"]["dtype"], []
    eps = torch.finfo(getattr(torch, dtype)).eps
    exact = "eager" if "hf" in content else "manual"
    loss, norm = (1e-2, 5e-2) if dtype in ("float16", "bfloat16") else (1e-4, 1e-3)  # relative
    manual = {str(r["point"]): r for r in rows if r["backend"] == "manual" and "error_out" in r}
    for r in rows:
        if "loss_difference" in r:
            off, grad = r["loss_difference"], r.get("gradient_norm_difference", 0.0)
            if not (abs(off) <= loss * content["reference"]["loss"] and abs(grad) <= norm):
                found.append(
                    f"{r['backend']} DISAGREES with {exact} in float32: the loss by {off:.1e}, "
                    f"the gradient norm by {grad:.1e} of itself"
                )
        for name, m in (("error_out", 2), ("error_grad", 3)):
            others = max((row[name] for row in manual.values()), default=8 * eps)
            plain = manual.get(str(r["point"]), {}).get(name, others)
            if name in r and not r[name] <= allowed_error(plain, 1, 1, getattr(torch, dtype), m):
                at = f"{name} {r[name]:.1e} at {r['point']['T']} tokens"
                found.append(f"{r['backend']} is WRONG against float64 ({at})")
    return found
