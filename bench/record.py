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
from contextlib import suppress
from datetime import date
from pathlib import Path

from bench import ROOT, Json, converge, hf, parts
from bench.report import MODES, answers, readme
from core import flops
from core.files import write_at_once
from core.settings import UserError

FORMAT = 3  # 1: rounds without sizes, no proofs; 2: no digest


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
    device = "cpu" if machine["kind"] == "cpu" else machine["name"]
    device = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", device)
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
