"""Records: a folder DATE_DEVICE_SLUG with record.json and README.md.

record.json has every round, machine, software and settings, with hashes of the rounds and of the
Python source.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from datetime import date
from pathlib import Path

from bench import Json, tables
from core import flops
from core.settings import UserError

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 2  # format 1, without hashes and proofs, stays on the board
TITLES = {"train": "Training steps", "kernel": "Attention alone, forward and backward",
          "decode": "Generation", "converge": "Final losses and the baseline's"}  # fmt: skip
# Entries of a qualify record that its stages share.
SHARED = ("format", "command", "date", "commit", "dirty", "source_sha256", "seconds", "machine",
          "vocab_size", "settings", "fresh_rounds", "reference", "complete")  # fmt: skip


def git(*words: str, text: str | None = None) -> str | None:
    """Return git's output, with `text` as its input; None if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, input=text)
    except OSError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None


def git_state() -> Json:
    """Return commit, dirty and source_sha256, each None outside a checkout."""
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    dirty = None if status is None else bool(status)
    return {"commit": commit, "dirty": dirty, "source_sha256": source_sha256()}


def source_sha256() -> str | None:
    """Return a hash of the paths and git blobs of all tracked *.py; None outside a checkout."""
    names = (git("ls-files", "-z", "--", "*.py") or "").split("\0")
    found = [name for name in names if name and (ROOT / name).is_file()]
    blobs = git("hash-object", "--stdin-paths", text="\n".join(found) + "\n")
    pairs = list(zip(found, (blobs or "").split("\n"), strict=True)) if blobs else []
    return _sha256(sorted(pairs)) if pairs else None


def parts(content: Json) -> list[Json]:
    """Return the contents of a qualify record's stages, or the record itself."""
    if content.get("mode") != "qualify":
        return [content]
    told = {name: content[name] for name in SHARED if name in content}
    own = (stage.get("record") or {} for stage in content["stages"])
    return [{**told, **record} for record in own if record.get("mode") in TITLES]


def rounds_sha256(content: Json) -> str:
    """Return a hash of each row's mode, backend, point and raw rounds."""
    names = ("mode", "backend", "point", "rounds")
    found = [[row.get(n) for n in names] for part in parts(content) for row in part["rows"]]
    return _sha256(found)


def seal(content: Json) -> Json:
    """Add the hash of the rounds, in place."""
    content["rounds_sha256"] = rounds_sha256(content)
    return content


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def device_slug(machine: Json) -> str:
    """Return the device for a folder's name: "cpu", "h100-80gb-hbm3"."""
    if machine["kind"] == "cpu":
        return "cpu"
    name = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", machine["name"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def folder_of(records_dir: str | Path, slug: str, machine: Json) -> Path:
    return Path(records_dir) / f"{date.today()}_{device_slug(machine)}_{slug}"


def write(folder: Path, content: Json, whole: bool = True) -> None:
    """Write record.json atomically; if `whole` also README.md.

    Raises UserError if the folder cannot be written.
    """
    text = json.dumps(seal(content), indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "record.json.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / "record.json")
        if whole:
            (folder / "README.md").write_text(readme(content), encoding="utf-8")
    except OSError as e:
        raise UserError(f"cannot write record {folder} ({e.strerror})") from e


def title(content: Json) -> str:
    what = {**TITLES, "qualify": "What this machine can do"}[content["mode"]]
    title = f"{what}, {content['machine']['about']}"
    return title if content.get("complete", True) else f"INCOMPLETE: {title}"


def facts(content: Json) -> list[tuple[str, str]]:
    """Return machine, software and settings as (name, value)."""
    m, s, mode = content["machine"], content["settings"], content["mode"]
    software = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    software += "".join(f", {k} {m[k]}" for k in ("driver", "cuda") if m[k])
    fresh = content.get("fresh_rounds", False)
    rounds = f"{s['rounds']} rounds" + (", each in new processes" if fresh else "")
    if mode == "converge":  # without warm-up: every step counts
        rounds = f"{s['steps']} steps" + (
            f", {s.get('seeds')} seeds" if s.get("seeds", 1) > 1 else ""
        )
    warm_up = {
        "train": f"; warm-up: a first step and {s['warm_up_steps']} more",
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
        sizes = f"{s['block_size']} tokens, batch {s['batch_size']}, {m['dtype']}"
        found["model"] = f"{model}, {sizes}"
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        said = ", ".join(f"{v / 1e6:,.2f} ({k})" for k, v in content["flops_per_token"].items())
        if "flops_per_token" in content["reference"]:
            by_torch = content["reference"]["flops_per_token"] / 1e6
            said += f"; torch's counter: {by_torch:,.2f}"
        if "hf" in content:
            said += "; both are the counter's, with attention's products by the formula"
        found["MFLOP a token"] = said
    return [*found.items(), ("rounds", rounds + warm_up.get(mode, ""))]


def sections(content: Json) -> list[tuple[str, tables.Cells]]:
    """Return the tables of a record or its stages, with titles."""
    found = []
    if content["mode"] == "qualify":
        for stage in content["stages"]:
            if stage["name"] == "proof" and stage["record"]:
                found.append(("Proof", tables.proof(stage["record"]["rows"])))
        return found + [table for part in parts(content) for table in sections(part)]
    given = flops.given(content["machine"]["peak_source"])
    for mode, name in TITLES.items():
        made = tables.cells(mode, [r for r in content["rows"] if r["mode"] == mode], given)
        if made[1]:
            found.append((name, made))
    for row in content["rows"]:
        if "parts" in (p := row.get("profile", {})):
            of = p.get("micro_batches", 1)
            whole = f"One of {of} micro-batches, and the update," if of > 1 else "A step"
            name = (
                f"{whole} of {row['backend']} by parts, from {p['by']} "
                f"({p['seen_ms']:,.4g} ms under the profiler, {p['plain_ms']:,.4g} without)"
            )
            found.append((name, tables.profile(p, given)))
    if (made := tables.missing(content["rows"]))[1]:
        found.append(("Not measured", made))
    return found


def readme(content: Json) -> str:
    parts = [f"# {title(content)}"]
    if "incomplete" in content:
        parts.append(f"**Incomplete**: {content['incomplete']}.")
    known = ((k, f"`{v}`" if k == "command" else v) for k, v in facts(content))
    parts.append("\n".join(f"- {name}: {value}" for name, value in known))
    parts += [f"- **{a.partition(': ')[0]}**: {a.partition(': ')[2]}" for a in content["answers"]]
    for name, made in sections(content):
        parts += [f"## {name}", tables.markdown(made)]
    parts.append("[Every round](record.json)")
    return "\n\n".join(parts) + "\n"
