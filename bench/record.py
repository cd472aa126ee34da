"""Records: record.json and README.md, with figures computed from raw rounds (docs/MEASURE.md)."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch

from attention import is_code
from bench import ROOT, Json, converge, parts, report, tables
from bench.tables import Row
from core import flops
from core.files import write_at_once
from core.settings import user_errors

FORMAT = 4  # 1: rounds without sizes, no proofs; 2: no digest; 3: other conclusions
ANY = r"(flash|efficient|cudnn|math|overrideable)( \((CPU|MPS|FA\d)\))?"
KERNELS = {  # names in attention/proof.py's KERNELS
    "manual": "", "tiled": "", "hf_eager": "", "sdpa": ANY, "sdpa_bmm": ANY, "hf_sdpa": ANY,
    "sdpa_flash": r"flash( \((CPU|FA\d)\))?", "sdpa_efficient": "efficient",
    "sdpa_cudnn": "cudnn", "sdpa_math": r"math( \(MPS\))?", "nanogpt": f"({ANY})?",
    "triton": r"flash \(our Triton\)", "paged": rf"(paged decode \(Triton\)|{ANY})?",
}  # fmt: skip
FLASH = r"^(?!.*pytorch_).*flash"  # not PyTorch's own FlashAttention-2
ON_GPU = {  # of kernels without an operator of PyTorch's
    "flex": "flex", "flex_flash": "flash", "hf_flash_attention_2": FLASH,
    "flash_attn_2": FLASH, "flash_attn_3": FLASH, "flash_attn_4": FLASH,
}  # fmt: skip
FUSED = re.compile(r"flash|fmha|cudnn.*sdpa", re.I)
RIVALS = {"nanogpt", "hf_eager", "hf_sdpa", "hf_flash_attention_2"}
STATUSES = ("ok", "unavailable", "failed", "skipped", "stopped")
TOLERANCE = 0.01  # the largest of converge


def git_state() -> Json:
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        commit, _, dirty = done.stdout.strip().partition("-")
        return {"commit": commit, "dirty": bool(dirty)}
    return {"commit": None, "dirty": None}


def complete(content: Json) -> Json:
    """A record with all figures and conclusions, computed from its rounds."""
    content = copy.deepcopy(content)
    if content["mode"] != "qualify":
        if "n_layer" in content["settings"]:
            model, both = parts.model_of(content), {"mfu": False, "mfu_causal": True}
            content["flops_per_token"] = {
                of: flops.flops_per_token(model, model.block_size, c) for of, c in both.items()
            }
        for row in content["rows"]:
            if row["status"] != "ok":
                row.pop("rounds", None)
                continue
            row |= tables.medians(row)
            row |= report.MODES[row["mode"]].figures(row, content)
            if "ms" in (profile := row.get("profile", {})):
                profile |= parts.computed(profile, row, content)
            for one in row["rounds"]:
                one.pop("losses", None)
        report.MODES[content["mode"]].compare(content["rows"], content["settings"])
    content["answers"] = report.answers(content)
    return content | {"digest": digest(content)}


def digest(content: Json) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def new_folder(records_dir: str | Path, slug: str, machine: Json) -> Path:
    device = "cpu" if machine["kind"] == "cpu" else machine["name"]
    device = re.sub(r"^(NVIDIA|AMD)\s+(GeForce\s+)?", "", device)
    device = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    with user_errors(f"cannot write a record in {records_dir}: "):
        Path(records_dir).mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        number = f"-{n}" if n > 1 else ""
        folder = Path(records_dir) / f"{date.today()}_{device}_{slug}{number}"
        # not exists(): another bench may end at the same time
        with user_errors(f"cannot write record {folder}: "), suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def write(folder: Path, content: Json, whole: bool = True) -> None:
    made = {"record.json": json.dumps(content, indent=1, allow_nan=False) + "\n"}
    made |= {"README.md": report.readme(content)} if whole else {}
    with user_errors(f"cannot write record {folder}: "):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            write_at_once(folder / name, text)


# --- verify ---


def verify(content: Json) -> list[str]:
    """Problems: what complete() computes otherwise, what contradicts the settings, what no kernel
    of that name does."""
    try:
        return list(dict.fromkeys(problems(content)))
    except Exception as e:
        return [f"it is malformed ({type(e).__name__}: {e})"]


def problems(content: Json) -> Iterator[str]:
    if not {"rows", "stages"} & content.keys():
        return
    if (content["format"] > 2 or "digest" in content) and content.get("digest") != digest(content):
        yield "its digest is another one: a field was edited"
    if content["format"] >= FORMAT:
        yield from differences(content["answers"], complete(content)["answers"], "answers")
    for part in report.sections_of(content):
        m, settings, again = part["machine"], part["settings"], complete(part)
        known = flops.datasheet_peak(m["name"], m["dtype"], bool(settings.get("tf32")))
        bandwidth = settings.get("bandwidth_gbs")
        given = {"dtype": settings.get("dtype"), "bandwidth": bandwidth and 1e9 * bandwidth}
        given["peak_tflops"] = known.tflops if known else settings.get("peak_tflops")
        for name, value in given.items():
            if value not in (None, "auto", "measure") and m[name] is not None:
                yield from differences(m[name], value, f"machine {name}")
        if not m["peak_source"]:
            yield f"its peak of {m['peak_tflops']:,.4g} TFLOP/s has no source"
        if part["format"] > 1 and (counts := again.get("flops_per_token")):
            yield from differences(part.get("flops_per_token"), counts, "flops_per_token")
        for row, new in zip(part["rows"], again["rows"], strict=True):
            at = tables.where(row["point"], row["mode"], row["backend"])
            yield from (f"{at}: {why}" for why in of_row(row, new, part))
        yield from report.disagreeing([row for row in part["rows"] if row["status"] == "ok"], part)
        if part["mode"] == "converge" and (wide := settings["tolerance"]) > TOLERANCE:
            yield f"its tolerance is {wide:.0%}, at most {TOLERANCE:.0%} is allowed"


def differences(got: Any, want: Any, name: str = "") -> Iterator[str]:
    """A sentence for each value that is not `want`'s; last digits may differ."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in (key for key in want if not key.endswith("_why")):  # versions word them anew
            yield from differences(got.get(key), want[key], f"{name} {key}".strip())
    elif isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        for one, other in zip(got, want):
            yield from differences(one, other, name)
    else:
        numbers = isinstance(want, (int, float)) and isinstance(got, (int, float))
        if not (math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-15) if numbers else got == want):
            yield f"{name} is {got}, and the rest of the record gives {want}"


def of_row(row: Row, again: Row, part: Json) -> Iterator[str]:
    settings, mode, status = part["settings"], row["mode"], row["status"]
    old, rival = part["format"] == 1, row["backend"] in RIVALS
    rounds = 0 if (mode, status) == ("converge", "stopped") else len(row.get("rounds", ()))
    if status not in (STATUSES[:1] if rounds else STATUSES):
        yield f"its status is {status!r}, and it has {rounds} rounds"
    expected = report.MODES[mode].rounds(settings)
    if status != "ok":
        return
    if rounds < expected and part.get("complete", True) and not old:
        yield f"it has {rounds} of {expected} rounds"
    own, paths = {"dtype": part["machine"]["dtype"]}, mode == "converge" and settings.get("paths")
    if paths:
        own["dtype"] = (converge.PATHS | {"plain": converge.EXACT})[row["backend"]]["dtype"]
    if mode in ("train", "converge") and settings["batch_size"] != "auto":
        own["batch_size"] = settings["batch_size"]
    again |= {name: value for name, value in own.items() if name in row}
    sizes = tables.sizes(row, settings)
    if not (old or rival or mode == "kernel" or "hf" in part):
        sizes["parameters"] = flops.n_params(parts.model_of(part))
    for shape in (one["shape"] for one in again["rounds"] if "shape" in one):
        shape |= {name: value for name, value in sizes.items() if name in shape}
    peak = max(one.get("peak_bytes", 0) for one in row["rounds"])
    again |= {"memory_bytes": peak} if row.get("memory_bytes", 0) < peak else {}
    if old:  # with another MBU, and without the sizes of rivals
        again.pop("mbu", None)
    yield from differences(row, again)
    if row.get("verdict") == "FAIL":
        yield f"it did not converge: its final loss is {row['difference']:+.2%} off"
    if not paths:
        yield from of_kernels(row, part)
        if not rival and not old:
            yield from of_proof(row, row.get("dtype", own["dtype"]))


def of_kernels(row: Row, part: Json) -> Iterator[str]:
    name, _ = tables.named(row, part["settings"])
    seen, on_device = row["kernels"], row.get("device_kernels") or []
    if name not in KERNELS | ON_GPU:
        if not is_code(name):
            yield f"unknown backend {name!r}"
        return
    usual, device = KERNELS.get(name, rf"(?!{ANY}$).*"), ON_GPU.get(name)
    wrong = [kernel for kernel in seen if not re.fullmatch(usual, kernel)]
    lacks = not seen and not re.fullmatch(usual, "")
    if device and part["machine"]["kind"] == "cuda" and row["mode"] in ("train", "kernel"):
        lacks = not any(re.search(device, kernel, re.I) for kernel in on_device)
    elif not (usual or device):
        wrong += [kernel for kernel in on_device if FUSED.search(kernel)]
    if wrong or lacks:
        yield f"its kernels are not {name}'s: {', '.join(wrong or on_device) or 'none'}"


def of_proof(row: Row, dtype: str) -> Iterator[str]:
    proof, eps = row.get("proof") or {}, torch.finfo(getattr(torch, dtype)).eps
    # Above allowed_error(), by some roundings.
    most = 16 * eps + 2048 * min(eps, torch.finfo(torch.float32).eps)
    if proof.get("canary") is not True:
        yield "its causality test did not pass"
    for grad in ("",) if row["mode"] == "decode" else ("", "grad_"):
        error, allowed = (proof.get(grad + name, math.nan) for name in ("error", "allowed"))
        if not error <= allowed <= most:
            yield f"its {grad}error is {error:.2g}, allowed is {allowed:.2g}, at most {most:.2g}"
