"""Checks of a record that need no other machine: docs/MEASURE.md lists them.

All figures are computed again from the raw rounds and compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from attention import is_code
from bench import Json, converge, tables
from bench.record import complete, digest
from bench.report import disagreeing, planned, sections_of
from bench.tables import Row
from core.gpus import datasheet_tflops
from core.settings import UserError

# Kernels by backend: a pattern of the short names (KERNELS in attention/proof.py; empty: none of
# them), and one of the names on a GPU (empty: not checked).
ANY = r"(flash|efficient|cudnn|math|overrideable)( \((CPU|MPS|FA\d)\))?"
SHOWS: dict[str, tuple[str, str]] = {
    "manual tiled hf_eager": ("", ""),
    "sdpa sdpa_bmm hf_sdpa": (ANY, r"flash|fmha|sdpa|cudnn|attn"),
    "sdpa_flash": (r"flash( \((CPU|FA\d)\))?", "flash|attn"),
    "sdpa_efficient": ("efficient", "fmha|attn"),
    "sdpa_cudnn": ("cudnn", "cudnn|sdpa"),
    "sdpa_math": (r"math( \(MPS\))?", ""),
    "flex": ("", "flex"),
    "flex_flash": ("", "flash"),
    "triton": (r"flash \(our Triton\)", r"forward|dkdv|dq"),
    # PyTorch's own FlashAttention-2 is not the package.
    "flash_attn_2 flash_attn_3 flash_attn_4 hf_flash_attention_2": ("", "^(?!.*pytorch_).*flash"),
    "paged": (rf"(paged decode \(Triton\)|{ANY})?", ""),
    "nanogpt": (rf"({ANY})?", ""),
}
SHOWS = {name: shown for names, shown in SHOWS.items() for name in names.split()}
FUSED = re.compile(r"flash|fmha|cudnn.*sdpa", re.I)
RIVALS = {"nanogpt", "hf_eager", "hf_sdpa", "hf_flash_attention_2"}
STATUSES = ("ok", "unavailable", "failed", "skipped", "stopped")
TOLERANCE = 0.01  # of a final loss in converge: a larger one proves nothing


def verify(content: Json) -> list[str]:
    """Return the problems of a record, one sentence each."""
    if not {"rows", "stages"} & content.keys():
        return []  # another program's
    try:
        return list(dict.fromkeys(_problems(content)))
    except UserError as e:
        return [f"its settings are invalid: {e}"]
    except Exception as e:  # whatever its fields lead to, also within torch
        return [f"it is malformed ({type(e).__name__}: {e})"]


def _problems(content: Json) -> Iterator[str]:
    sealed = content["format"] > 2 or "digest" in content
    if sealed and content.get("digest") != digest(content):
        yield "its digest is another one: a field was edited"
    for part in sections_of(content):
        m, settings, again = part["machine"], part["settings"], complete(part)
        known = datasheet_tflops(m["name"], m["dtype"], bool(settings.get("tf32")))
        if not m["peak_source"]:
            yield f"its peak of {m['peak_tflops']:,.4g} TFLOP/s has no source"
        elif known and not math.isclose(m["peak_tflops"], known[0]):
            yield f"its peak is {m['peak_tflops']:,.4g} TFLOP/s, but {known[1]} has {known[0]:,.4g}"
        if settings.get("dtype", "auto") not in ("auto", m["dtype"]):
            yield f"its settings have dtype={settings['dtype']}, its machine {m['dtype']}"
        if part["format"] > 1:
            name = "flops_per_token"
            yield from differences(part[name], again[name], name)
            lost = [text for text in again["answers"] if text not in part["answers"]]
            yield from (f"its conclusions lack {text!r}" for text in lost)  # older ones have more
        for row, new in zip(part["rows"], again["rows"], strict=True):
            at = tables.where(row["point"], row["mode"], row["backend"])
            cut = part["mode"] == "converge" and row["status"] == "stopped"
            if row["status"] not in (["ok"] if row.get("rounds") and not cut else STATUSES):
                rounds = len(row.get("rounds", ()))
                yield f"{at}: its status is {row['status']!r}, and it has {rounds} rounds"
            if row["status"] == "ok":
                yield from (f"{at}: {why}" for why in _row(row, new, part))
        yield from disagreeing([row for row in part["rows"] if row["status"] == "ok"], part)
        if part["mode"] == "converge" and settings["tolerance"] > TOLERANCE:
            wide = settings["tolerance"]
            yield f"its tolerance is {wide:.0%}, at most {TOLERANCE:.0%} is allowed"


def differences(got: Any, want: Any, name: str) -> Iterator[str]:
    """Yield a sentence for each value that differs; the last digits of floats may, between
    processors."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key, value in want.items():
            yield from differences(got.get(key), value, f"{name} {key}".strip())
    elif isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        for one, other in zip(got, want):
            yield from differences(one, other, name)
    else:
        numbers = isinstance(want, (int, float)) and isinstance(got, (int, float))
        if not (math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-15) if numbers else got == want):
            yield f"{name} is {got}, but its rounds and sizes give {want}"


def _row(row: Row, again: Row, part: Json) -> Iterator[str]:
    settings, mode = part["settings"], row["mode"]
    paths, dtype = mode == "converge" and settings.get("paths"), part["machine"]["dtype"]
    if paths:
        dtype = {"plain": {"dtype": "float32"}, **converge.PATHS}[row["backend"]]["dtype"]
    old = part["format"] == 1  # it has no sizes in its rounds, and no proofs
    expected = planned(mode, settings)
    if len(row["rounds"]) < expected and part.get("complete", True) and not old:
        yield f"it has {len(row['rounds'])} of {expected} rounds"
    if old and row["backend"] in RIVALS:  # it lacks their parameters
        again = {name: value for name, value in again.items() if name != "mbu"}
    yield from differences(row, again, "")
    sizes, wanted = dict(row["point"]), {"dtype": dtype}
    if "batch_size" in row:
        sizes["B"] = row["batch_size"]
    if mode in ("train", "converge"):
        wanted["batch_size"] = settings["batch_size"]
        sequences = row.get("batch_size", settings["batch_size"])
        sizes["B"] = sequences * settings["gradient_accumulation_steps"]
        sizes["T"] = settings["block_size"]
    for name in wanted.keys() & row.keys():
        if wanted[name] not in ("auto", row[name]):
            yield f"it has {name}={row[name]}, but the record's is {wanted[name]}"
    for ran in (r.get("shape", {}) for r in row["rounds"]):
        for name in sizes.keys() & ran.keys():
            if sizes[name] != ran[name]:
                yield f"it has {name}={sizes[name]}, but a round ran {name}={ran[name]}"
    held, peak = row.get("memory_bytes", 0), max(r.get("peak_bytes", 0) for r in row["rounds"])
    if held < peak:  # else of the warm-up
        yield f"memory_bytes is {held}, but the most of its rounds is {peak}"
    for name in ("mfu", "share"):  # mfu_causal is never more than mfu
        if (row.get(name) or 0) > 1:
            yield f"{name} of {row[name]:.1%} is more than the peak"
    if row.get("verdict") == "FAIL":
        yield f"it did not converge: its final loss is {row['difference']:+.2%} off"
    if not paths:
        yield from _kernel(row, part["machine"]["kind"] == "cuda")
        if row["backend"] not in RIVALS and not old:
            yield from _proof(row, row.get("dtype", dtype))


def _kernel(row: Row, cuda: bool) -> Iterator[str]:
    """Compare the kernels in the profile with the backend's name."""
    name, seen, on_device = row["backend"], row["kernels"], row.get("device_kernels") or []
    if is_code(name):  # a user's kernel: no name to expect
        return
    if name not in SHOWS:
        yield f"unknown backend {name!r}"
        return
    short, device = SHOWS[name]
    wrong = [kernel for kernel in seen if not re.fullmatch(short, kernel)]
    if not (short or device):
        wrong += [kernel for kernel in on_device if FUSED.search(kernel)]
    if wrong:
        yield f"another kernel than {name}'s ran: {', '.join(wrong)}"
    # Only these modes record the names on the device.
    profiled = cuda and device and row["mode"] in ("train", "kernel")
    missing = profiled and not any(re.search(device, kernel, re.I) for kernel in on_device)
    if not seen and (missing or not re.fullmatch(short, "")):
        yield f"the profiler saw no kernel of this backend, but: {', '.join(on_device) or 'none'}"


def _proof(row: Row, dtype: str) -> Iterator[str]:
    proof, eps = row.get("proof") or {}, torch.finfo(getattr(torch, dtype)).eps
    # Above allowed_error(): plain PyTorch is off by some roundings, the largest value is some times
    # the others' mean.
    most = 16 * eps + 2048 * min(eps, torch.finfo(torch.float32).eps)
    if proof.get("canary") is not True:
        yield "its causality test did not pass"
    for grad in ("",) if row["mode"] == "decode" else ("", "grad_"):
        error, allowed = (proof.get(grad + name, math.nan) for name in ("error", "allowed"))
        if not error <= allowed:  # also for NaN
            yield f"its {grad}error is {error:.2g}, and {allowed:.2g} is allowed"
        if allowed > most:
            yield f"its {grad}allowed is {allowed:.2g}, more than any test of {dtype} allows"
