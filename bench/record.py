"""Records: a folder DATE_DEVICE_SLUG with record.json and README.md.

record.json has the machine, software, settings and every raw round. complete() computes all other
figures from them: when a record is written, and when it is read (verify.py). From format 3 on a
digest covers what no formula gives: devices, kernels, dtypes, the rounds themselves.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
from collections import defaultdict
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import ModuleType

import torch

from attention.truth import allowed_error
from bench import ROOT, Json, converge, decode, hf, kernel, parts, tables, train
from bench.tables import Cells, Column, Row
from core import flops
from core.files import write_at_once
from core.settings import UserError

FORMAT = 3  # 1: rounds without sizes, no proofs; 2: no digest, conclusions by ratios of rounds
MODES: dict[str, ModuleType] = {
    "train": train,
    "kernel": kernel,
    "decode": decode,
    "converge": converge,
}
WARM_UP = {
    "train": "; warm-up: a first step and {} more",
    "kernel": "; warm-up: a call, and another in each round",
    "decode": "; warm-up: each text once",
}
SHARES = {"mfu": "mfu", "share": "share of the peak", "mbu": "mbu"}
PROOF: list[Column] = [
    *((n.replace("_", " "), lambda r, n=n: str(r[n])) for n in ("right", "wrong", "refused")),
    ("not reached", lambda r: str(r["not_reached"])),
    ("canary", lambda r: {True: "ok", False: "LEAKS", None: "-"}[r["canary"]]),
    ("first failure", lambda r: failure(r["failures"][0]) if r["failures"] else "-"),
]
MEASURE = "[MEASURE.md](../../../docs/MEASURE.md)"  # as seen from bench/records/NAME


def git_state() -> Json:
    """Return commit and dirty, None outside a checkout."""

    def git(*words: str) -> str | None:
        with suppress(OSError):
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
            return done.stdout.strip("\n") if done.returncode == 0 else None
        return None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


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


def complete(content: Json) -> Json:
    """Return a record with the figures of its rows, its conclusions and its digest."""
    content = copy.deepcopy(content)
    model = hf.model_of(content)
    both = {"mfu": False, "mfu_causal": True}
    content["flops_per_token"] = {
        name: flops.flops_per_token(model, model.block_size, causal=c) for name, c in both.items()
    }
    for row in content["rows"]:
        if row["status"] == "ok":
            row |= MODES[row["mode"]].figures(row, content)
            if "ms" in (profile := row.get("profile", {})):  # else the reason why there is none
                row["profile"] = profile | parts.computed(profile, row, content)
            for one in row["rounds"]:
                one.pop("losses", None)
        else:
            row.pop("rounds", None)
    if content["mode"] == "converge":
        converge.compare(content["rows"], content["settings"])
    return sealed(content | {"answers": answers(content)})


def digest(content: Json) -> str:
    """Return the SHA-256 of a content's JSON with sorted keys, without its own digest."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(content: Json) -> Json:
    return content | {"digest": digest(content)}


# --- write ---


def new_folder(records_dir: str | Path, slug: str, machine: Json) -> Path:
    """Make and return DATE_DEVICE_SLUG, or with -2, -3, ...; UserError if it cannot be made."""
    name = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", machine["name"])
    device = "cpu" if machine["kind"] == "cpu" else name
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    first = Path(records_dir) / f"{date.today()}_{device}_{slug}"
    folder, n = first, 1
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:  # mkdir, not exists(): another bench may end at the same time
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            n += 1
            folder = Path(f"{first}-{n}")
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
    versions = m["packages"] | {k: m[k] for k in ("driver", "cuda", "cudnn") if m.get(k)}
    versions |= {"python": m["python"]}
    changed = " (with changes)" if content["dirty"] else ""
    found = {
        "command": content["command"],
        "date": content["date"],
        "commit": (content["commit"] or "none")[:10] + changed,
        "device": m["about"],
        "software": ", ".join([*(f"{k} {v}" for k, v in versions.items()), m["system"]]),
    }
    if "hf" in content:
        counted = content["hf"]["counted"]
        model = f"{content['hf']['name']}, random weights, {len(counted['layers'])} layers of "
        model += f"attention, {counted['parameters']:,} parameters that a token multiplies"
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
        counts = dict(content["flops_per_token"])
        if "flops_per_token" in content["reference"]:
            counts["torch's counter"] = content["reference"]["flops_per_token"]
        found["MFLOP a token"] = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in counts.items())
    if mode == "converge":  # without warm-up: every step counts
        seeds = s.get("seeds", 1)
        return found | {"rounds": f"{s['steps']} steps" + (f", {seeds} seeds" if seeds > 1 else "")}
    fresh = ", each in new processes" if content.get("fresh_rounds") else ""
    warm_up = WARM_UP.get(mode, "").format(s.get("warm_up_steps"))
    return found | {"rounds": f"{s['rounds']} rounds{fresh}{warm_up}"}


def sections(content: Json) -> list[tuple[str, Cells]]:
    """Return the tables of a record or its stages, with titles."""
    if content["mode"] == "qualify":
        found = []
        for rows in (s["record"].get("rows") for s in content["stages"] if s["name"] == "proof"):
            lines = [[r["backend"], *(cell(r) for _, cell in PROOF)] for r in rows or ()]
            found += [("Proof", (["backend", *dict(PROOF)], lines))] if rows else []
        return found + [table for part in sections_of(content) for table in sections(part)]
    of, found = flops.given(content["machine"]["peak_source"]), []
    for name, mode in MODES.items():
        made = tables.cells(mode.COLUMNS, [r for r in content["rows"] if r["mode"] == name], of)
        found += [(mode.TITLE, made)] if made[1] else []
    for row in content["rows"]:
        p = row.get("profile", {})
        if "ms" in p and row["status"] == "ok":  # else the run was stopped before its sums
            found.append((parts.title(row["backend"], p), parts.table(p, of)))
    if (made := tables.missing(content["rows"]))[1]:
        found.append(("Not measured", made))
    return found


def failure(found: dict[str, str]) -> str:
    return f"{found['what']}, {found['dtype']}: {found['why']}"


def readme(content: Json) -> str:
    text = [f"# {title(content)}"]
    if "incomplete" in content:
        text.append(f"**Incomplete**: {content['incomplete']}.")
    known = ((k, f"`{v}`" if k == "command" else v) for k, v in facts(content).items())
    text.append("\n".join(f"- {name}: {value}" for name, value in known))
    text += [f"- **{a.partition(': ')[0]}**: {a.partition(': ')[2]}" for a in content["answers"]]
    notes = {mode.TITLE: mode.NOTES for mode in MODES.values() if hasattr(mode, "NOTES")}
    for name, made in sections(content):
        text += [f"## {name}", tables.markdown(made), *([notes[name]] if name in notes else [])]
    text.append(f"[Every round](record.json). Columns, and what to report: {MEASURE}")
    return "\n\n".join(text) + "\n"


# --- conclusions ---


def answers(content: Json) -> list[str]:
    """Return what cannot be read at a glance: the fastest, doubtful peaks, wrong numbers."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    old = content.get("format", FORMAT) < 3
    found = [f"Fastest: {text}" for text in tables.fastest(rows, old)]
    unknown: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for of, name in SHARES.items():
            if f"{of}_why" in row:
                unknown.setdefault((name, row[f"{of}_why"]), []).append(row["backend"])
    for (name, why), names in unknown.items():
        found.append(f"Peak: {name} not known of {', '.join(dict.fromkeys(names))}: {why}.")
    if content["mode"] != "decode" and (doubt := content["machine"].get("peak_doubt")):
        found.append(f"Peak: {doubt}.")  # of older records
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
    noise = next((r["seed_noise"] for r in content["rows"] if "seed_noise" in r), None)
    within = f"{noise:.4f}, as far as the seeds scatter," if noise else ""
    within = within or f"{content['settings']['tolerance']:.2%}"
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
