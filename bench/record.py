"""Records: a folder DATE_DEVICE_SLUG with record.json and README.md.

record.json has machine, software, settings and every raw round. complete() computes all figures
from them: when a record is written, and again when it is verified. From format 3 on a digest covers
what no formula gives: devices, kernels, dtypes, the rounds. docs/MEASURE.md lists the checks.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import subprocess
from contextlib import suppress
from datetime import date
from pathlib import Path

from bench import ROOT, Json, converge, hf, parts, report
from core import flops
from core.files import write_at_once
from core.settings import UserError

FORMAT = 3  # 1: rounds without sizes, no proofs; 2: no digest
SLOW = 0.6  # of the peak: a GPU whose large products are slower is no longer as sold


def git_state() -> Json:
    """Return commit and dirty, None outside a checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        commit, _, dirty = done.stdout.strip().partition("-")
        if done.returncode == 0:
            return {"commit": commit, "dirty": bool(dirty)}
    return {"commit": None, "dirty": None}


def complete(content: Json) -> Json:
    """Return a record with the figures of its rows, its conclusions and its digest."""
    content = copy.deepcopy(content)
    if content["mode"] != "qualify":  # its stages are records
        model = hf.model_of(content)
        content["flops_per_token"] = {
            name: flops.flops_per_token(model, model.block_size, causal=name == "mfu_causal")
            for name in ("mfu", "mfu_causal")
        }
        for row in content["rows"]:
            if row["status"] != "ok":
                row.pop("rounds", None)
                continue
            row |= report.MODES[row["mode"]].figures(row, content)
            if "ms" in (profile := row.get("profile", {})):  # else the reason why there is none
                row["profile"] = profile | parts.computed(profile, row, content)
            for one in row["rounds"]:
                one.pop("losses", None)
        if content["mode"] == "converge":
            converge.compare(content["rows"], content["settings"])
    made = conclusions if content["mode"] == "qualify" else report.answers
    content["answers"] = made(content)
    return content | {"digest": digest(content)}


def digest(content: Json) -> str:
    """Return the SHA-256 of a content's JSON with sorted keys, without its own digest."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def conclusions(content: Json) -> list[str]:
    """Return those of a qualify record: proof, the stages' own, doubts, missing stages."""
    stages: Json = {stage["name"]: stage["record"] for stage in content["stages"]}
    proved, m = stages.get("proof", {}).get("rows", []), content["machine"]
    found, doubts = [], []
    if proved:
        right = [r for r in proved if r["right"] and not r["wrong"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in right) or "none"
        found.append(f"Proof: every number right and nothing leaked: {names}.")
    if left := [f"{r['backend']} {r['not_reached']}" for r in proved if r["not_reached"]]:
        found.append(f"Proof: cases not reached in the time: {', '.join(left)}.")
    for r in proved:
        doubts += [f"{r['backend']} is wrong in {report.failure(f)}" for f in r["failures"][:3]]
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
    return list(dict.fromkeys(found))  # the stages have one peak


# --- write ---


def new_folder(records_dir: str | Path, slug: str, machine: Json) -> Path:
    """Make and return DATE_DEVICE_SLUG, or with -2, -3, ...; UserError if it cannot be made."""
    device = "cpu" if machine["kind"] == "cpu" else machine["name"]
    device = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", device)
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    for n in itertools.count(1):
        number = f"-{n}" if n > 1 else ""
        folder = Path(records_dir) / f"{date.today()}_{device}_{slug}{number}"
        try:
            folder.mkdir(parents=True)  # not exists(): another bench may end at the same time
        except FileExistsError:
            continue
        except OSError as e:
            raise UserError(f"cannot write record {folder} ({e.strerror})") from e
        return folder
    raise AssertionError


def write(folder: Path, content: Json, whole: bool = True) -> None:
    """Write record.json atomically; if `whole` also README.md. UserError if that is impossible."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_at_once(folder / "record.json", text)
        if whole:
            write_at_once(folder / "README.md", report.readme(content))
    except OSError as e:
        raise UserError(f"cannot write record {folder} ({e.strerror})") from e
