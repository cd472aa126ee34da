"""A record: what was measured, where and with what, every round of it.

A folder DATE_DEVICE_SLUG with record.json (all of it), README.md (the tables, what they say) and
the pictures. Two records are compared row by row. On one machine their rates may be; between two
machines a rate says nothing about the code, so there it is each backend's ratio to manual, round by
round within a record, that is compared.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from bench import pictures, tables
from bench.rows import Row
from bench.stats import Summary, exceeds_noise
from core.settings import UserError

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 1
TITLES = {"train": "Training steps", "kernel": "Attention alone, forward and backward",
          "decode": "Generation", "converge": "Final losses beside the baseline's"}  # fmt: skip
SAME = ("kind", "name", "capability", "threads", "cpu")  # of what makes two machines one


def command(argv: list[str], program: str = "bench_mfu.py") -> str:
    return shlex.join(["python", *program.split(), *argv])


def git_state() -> dict[str, Any]:
    """The commit, and whether tracked files differ from it; None where this is no checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def device_slug(machine: dict[str, Any]) -> str:
    """The device as part of a folder's name: "cpu", "h100-80gb-hbm3"."""
    if machine["kind"] == "cpu":
        return "cpu"
    name = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", machine["name"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def folder_of(records_dir: str | Path, slug: str, machine: dict[str, Any]) -> Path:
    return Path(records_dir) / f"{date.today()}_{device_slug(machine)}_{slug}"


def check_slug(slug: str) -> None:
    """Raises: UserError for a name that is no part of a folder's."""
    if not re.fullmatch(r"[\w.-]+", slug):
        raise UserError(f"--record must be letters, digits, '-', '_' and '.', got {slug!r}")


def write(folder: Path, content: dict[str, Any]) -> None:
    """record.json, the pictures and README.md."""
    drawn = pictures.draw(content)
    save(folder, content, readme(content, list(drawn)), drawn)


def save(
    folder: Path, content: dict[str, Any], page: str, drawn: Mapping[str, bytes] | None = None
) -> None:
    """Write a record's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (folder / "record.json").write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(page, encoding="utf-8")
        for name, picture in (drawn or {}).items():
            (folder / f"{name}.png").write_bytes(picture)
    except OSError as e:
        raise UserError(f"the record {folder} cannot be written ({e.strerror})") from e


def commit(content: dict[str, Any]) -> str:
    """The commit in short, and whether the code was changed since."""
    return (content["commit"] or "none")[:10] + (" (with changes)" if content["dirty"] else "")


def read(path: str | Path) -> dict[str, Any]:
    """The content of a record, by its folder or its record.json."""
    path = Path(path)
    path = path / "record.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is no record that can be read ({e})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or "rows" not in content:
        raise UserError(f"{path} is no record of bench_mfu.py's, format {FORMAT}")
    return content


def title(content: dict[str, Any]) -> str:
    title = f"{TITLES[content['mode']]}, {content['machine']['about']}"
    return title if content.get("complete", True) else f"INCOMPLETE: {title}"


def facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """What a figure depends on, as (name, value)."""
    m, s, mode = content["machine"], content["settings"], content["mode"]
    software = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    software += "".join(f", {k} {m[k]}" for k in ("driver", "cuda") if m[k])
    rounds = f"{s['rounds']} rounds" + ", each in new processes" * content["fresh_rounds"]
    if mode == "converge":  # it has no warm-up: there every step counts
        rounds = f"{s['steps']} steps" + f", {s.get('seeds')} seeds" * (s.get("seeds", 1) > 1)
    warm_up = {
        "train": f"; warm-up: a first step and {s['warm_up_steps']} more",
        "kernel": "; warm-up: a call, and another in each round",
        "decode": "; warm-up: each text once",
    }
    found = {
        "command": content["command"],
        "date": content["date"],
        "commit": commit(content),
        "device": m["about"],
        "software": f"{software}, python {m['python']}, {m['system']}",
    }
    if mode != "kernel":
        found["model"] = (
            f"{s['n_layer']} layers, {s['n_embd']} wide, {s['n_head']} heads, vocabulary "
            f"{content['vocab_size']:,}, {s['block_size']} tokens, batch {s['batch_size']}, "
            f"{m['dtype']}"
        )
    if mode == "decode":
        source = m.get("bandwidth_source", "measured")
        found["bandwidth"] = f"{m['bandwidth'] / 1e9:,.4g} GB/s ({source})"
    else:
        found["peak"] = f"{m['peak_tflops']:,.4g} TFLOP/s ({m['peak_source']})"
    if mode in ("train", "converge"):
        per_token = {k: f"{v / 1e6:,.2f}" for k, v in content["flops_per_token"].items()}
        counted = f"{per_token['mfu']} (mfu), {per_token['mfu_causal']} (mfu_causal)"
        if "flops_per_token" in content["reference"]:
            by_torch = content["reference"]["flops_per_token"] / 1e6
            counted += f"; torch's counter: {by_torch:,.2f}"
        found["MFLOP a token"] = counted
    return [*found.items(), ("rounds", rounds + warm_up.get(mode, ""))]


def sections(content: dict[str, Any]) -> list[tuple[str, tables.Cells]]:
    """The tables of a record, with their titles."""
    found = []
    for mode, name in TITLES.items():
        made = tables.cells(mode, [r for r in content["rows"] if r["mode"] == mode])
        if made[1]:
            found.append((name, made))
    for row in content["rows"]:
        if "parts" in (p := row.get("profile", {})):
            of = p.get("micro_batches", 1)
            whole = f"One of {of} micro-batches, and the update," if of > 1 else "A step"
            name = (
                f"{whole} of {row['backend']} by its parts, which are told by {p['by']} "
                f"({p['seen_ms']:,.4g} ms under the profiler, {p['plain_ms']:,.4g} without)"
            )
            found.append((name, tables.profile(p)))
    if (made := tables.missing(content["rows"]))[1]:
        found.append(("Not measured", made))
    return found


def readme(content: dict[str, Any], pictures: list[str]) -> str:
    """A page of Markdown about a record."""
    parts = [f"# {title(content)}"]
    if "incomplete" in content:
        parts.append(f"**Incomplete**: {content['incomplete']}.")
    known = ((k, f"`{v}`" if k == "command" else v) for k, v in facts(content))
    parts.append("\n".join(f"- {name}: {value}" for name, value in known))
    parts += [f"- **{a.partition(': ')[0]}**: {a.partition(': ')[2]}" for a in content["answers"]]
    for name, made in sections(content):
        parts += [f"## {name}", tables.markdown(made)]
    parts += [f"![{name}]({name}.png)" for name in pictures]
    parts.append("Every round is in [record.json](record.json).")
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------- comparing


def compare(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], tables.Cells]:
    """What there is to say before the table, and the table: B against A, row by row."""
    notes = []
    differs = any(a["machine"].get(n) != b["machine"].get(n) for n in SAME)
    if differs:
        notes.append(
            f"two machines ({a['machine']['about']}; {b['machine']['about']}): their rates are no "
            "comparison of code, so each backend's ratio to manual is compared instead"
        )
    told = []
    for part, names in (("settings", a["settings"]), ("machine", ("dtype", "packages"))):
        for name in names:
            x, y = a[part][name], b[part].get(name, a[part][name])
            if x != y and name not in ("record", "json"):
                told.append("versions" if name == "packages" else f"{name} ({x} / {y})")
    if told:
        notes.append(f"not only the code differs: {', '.join(told)}")
    unit = " x manual" if differs else "/s"
    head = ["backend", "where", f"A{unit}", f"B{unit}", "B / A", "noise", "verdict"]
    lines = []
    of_a, of_b = ({_key(r): r for r in c["rows"] if r["status"] == "ok"} for c in (a, b))
    for key, row in of_a.items():
        if key not in of_b or (differs and row["backend"] == "manual"):
            continue
        speed = [_speed(r, rows if differs else {}) for r, rows in ((row, of_a), (of_b[key], of_b))]
        if None in speed:
            continue
        x, y = (Summary.of(s) for s in speed if s)
        sure = exceeds_noise(x, y)
        word = "noise unknown" if sure is None else "within noise"
        if sure:
            word = "B faster" if y.median > x.median else "B slower"
        noise = "-" if sure is None else f"{(x.spread or 0) + (y.spread or 0):.1%}"
        where = f"{row['mode']} {tables.point(row)}".strip()
        ratio = f"{y.median / x.median:.3f}"
        lines.append([row["backend"], where, _rate(x), _rate(y), ratio, noise, word])
    for name, mine, other in (("A", of_a, of_b), ("B", of_b, of_a)):
        if only := sorted({k[1] for k in mine} - {k[1] for k in other}):
            notes.append(f"only in {name}: {', '.join(only)}")
    if not lines:
        why = " and manual is needed in both" if differs else ""
        notes.append(f"no row is in both{why}: there is nothing to compare")
    return notes, (head, lines)


def _rate(x: Summary) -> str:
    return f"{x.median:,.0f}" if x.median >= 1000 else f"{x.median:.4g}"


def _key(row: Row) -> tuple[str, str, str]:
    return row["mode"], row["backend"], json.dumps(row["point"], sort_keys=True)


def _speed(row: Row, beside: dict[tuple[str, str, str], Row]) -> list[float] | None:
    """Tokens, or calls, a second of each round; with `beside`, as a multiple of manual's."""
    size = row.get("tokens_a_step") or row["point"].get("B", 1) if row["mode"] != "kernel" else 1
    own = [size / (r["ms"] / 1e3) for r in row["rounds"]]
    if not beside:
        return own
    manual = beside.get((row["mode"], "manual", _key(row)[2]))
    base = None if manual is None else _speed(manual, {})
    return None if base is None else [s / m for s, m in zip(own, base, strict=False)]
