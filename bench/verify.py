"""Checks of a record that need no other machine.

A record keeps raw rounds, sizes and the profiler's kernel names. Medians, rates and MFU are
recomputed from them by bench/rows.py and compared. docs/MEASURE.md lists the checks.
"""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from attention import is_file
from attention.machine.gpus import datasheet_tflops
from bench import Json, hf, records, rows, tables
from bench.candidates import HF
from bench.decoding import token_numbers, weight_bytes
from bench.modes import CONVERGE_ROUNDS
from bench.process import Outcome
from bench.rows import Row
from core import flops
from core.settings import UserError, from_dict
from model import GPTConfig
from train import TrainConfig

TOLERANCE = 0.01  # of a final loss in converge: a larger one proves nothing
OLD = "old"
# Records of format 1 and of other programs, accepted by their hash (sha256sum -c).
FROZEN = records.ROOT / "bench" / "records" / "before_proofs.sha256"

# Kernels by backend: a pattern of the short names (KERNELS in attention/probing.py; empty: none of
# them), and one of the names on a GPU (empty: not checked).
ANY = r"(flash|efficient|cudnn|math|overrideable)( \((CPU|MPS|FA\d)\))?"
PACKAGE = r"^(?!.*pytorch_flash).*flash"  # PyTorch's own FlashAttention-2 is not the package
FLASH_PACKAGES = ("flash_attn_2", "flash_attn_3", "flash_attn_4", "hf_flash_attention_2")
SHOWS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("manual", "tiled", "hf_eager"), ("", "")),
    **dict.fromkeys(("sdpa", "sdpa_bmm", "hf_sdpa"), (ANY, r"flash|fmha|sdpa|cudnn|attn")),
    "sdpa_flash": (r"flash( \((CPU|FA\d)\))?", "flash|attn"),
    "sdpa_efficient": ("efficient", "fmha|attn"),
    "sdpa_cudnn": ("cudnn", "cudnn|sdpa"),
    "sdpa_math": (r"math( \(MPS\))?", ""),
    "flex": ("", "flex"),
    "triton": (r"flash \(our Triton\)", r"forward|dkdv|dq"),
    **dict.fromkeys(FLASH_PACKAGES, ("", PACKAGE)),
    "paged": (rf"(paged decode \(Triton\)|{ANY})?", ""),
    "nanogpt": (rf"({ANY})?", ""),
}
FUSED = re.compile(r"flash|fmha|cudnn.*sdpa", re.I)
OTHERS = {"nanogpt", *(f"hf_{name}" for name in HF)}


def verify(content: Json, folder: Path) -> list[str]:
    """Return the problems of a record, one sentence each."""
    if content.get("format") != records.FORMAT:
        digest = hashlib.sha256((folder / "record.json").read_bytes()).hexdigest()
        if digest in FROZEN.read_text(encoding="ascii").split():
            return []
        return [f"its format is not {records.FORMAT}, and it is not in {FROZEN.name}"]
    try:
        return list(dict.fromkeys(_problems(content)))
    except UserError as e:
        return [f"its settings are invalid: {e}"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        return [f"it is malformed ({type(e).__name__}: {e})"]


def _problems(content: Json) -> Iterator[str]:
    if content["rounds_sha256"] != records.rounds_sha256(content):
        yield "its raw rounds do not match their hash"
    for part in records.parts(content):
        yield from _peak(part)
        ok = [row for row in part["rows"] if row["status"] == "ok"]
        for row in ok:
            at = f"{row['mode']} {row['backend']} {rows.where(row['point'])}".strip()
            yield from (f"{at}: {why}" for why in _row(row, part))
        yield from tables.disagreeing(ok, part)
        if part["mode"] == "converge":
            yield from _convergence(part)


def _peak(part: Json) -> Iterator[str]:
    m = part["machine"]
    known = datasheet_tflops(m["name"], m["dtype"], bool(part["settings"].get("tf32")))
    if not m["peak_source"]:
        yield f"its peak of {m['peak_tflops']:,.4g} TFLOP/s has no source"
    elif known and not math.isclose(m["peak_tflops"], known[0]):
        yield f"its peak is {m['peak_tflops']:,.4g} TFLOP/s, but {known[1]} has {known[0]:,.4g}"


# ----------------------------------------------------------------------------- a row


def _row(row: Row, part: Json) -> Iterator[str]:
    settings, mode = part["settings"], row["mode"]
    expected = settings["rounds"]
    if mode == "converge":
        expected = CONVERGE_ROUNDS * settings.get("seeds", 1)
    if len(row["rounds"]) < expected and part.get("complete", True):
        yield f"it has {len(row['rounds'])} of {expected} rounds"
    yield from _work(row, part)
    for name, value in figures(row, part).items():
        if not same(row.get(name), value):
            yield f"{name} is {row.get(name)}, but its rounds and sizes give {value}"
    for name in ("mfu", "share"):  # mfu_causal is never more than mfu
        if (row.get(name) or 0) > 1:
            yield f"{name} of {row[name]:.1%} is more than the peak"
    if not (mode == "converge" and settings.get("paths")):
        yield from _kernel(row, part["machine"]["kind"] == "cuda")
        if row["backend"] not in OTHERS:
            yield from _proof(row)


def model_of(part: Json) -> GPTConfig | hf.Counted:
    """The model of the settings, or the counted one of transformers."""
    if "hf" in part:
        return hf.Counted(**part["hf"]["counted"])
    ours = {f.name for f in fields(TrainConfig)}
    given = {k: v for k, v in part["settings"].items() if k in ours}
    return from_dict(TrainConfig, given).model(part["vocab_size"])


def sequences_of(part: Json) -> int:
    """Sequences in a training step."""
    settings = part["settings"]
    return settings["batch_size"] * settings["gradient_accumulation_steps"]


def _work(row: Row, part: Json) -> Iterator[str]:
    """Compare the row's sizes with each round's."""
    model, sizes = model_of(part), dict(row["point"])
    if row["mode"] in ("train", "converge"):
        sizes = {"B": sequences_of(part), "T": model.block_size}
        if row["dtype"] != part["machine"]["dtype"] and not part["settings"].get("paths"):
            yield f"it ran in {row['dtype']}, but the record is of {part['machine']['dtype']}"
    least = flops.n_params(model) if isinstance(model, GPTConfig) else model.parameters
    biases = row["backend"] in OTHERS and isinstance(model, GPTConfig)  # transformers' always
    most = least * (1 + 2 / model.n_embd * biases)
    for ran in (r["shape"] for r in row["rounds"]):
        for name in sizes.keys() & ran.keys():
            if sizes[name] != ran[name]:
                yield f"it has {name}={sizes[name]}, but a round ran {name}={ran[name]}"
        if not least <= ran.get("parameters", least) <= most:
            yield f"a round ran {ran['parameters']:,} parameters, its settings give {least:,}"


def figures(row: Row, part: Json) -> Json:
    """Recompute medians, quartiles, rates and shares of the peak from rounds and sizes."""
    m, mode, model = part["machine"], row["mode"], model_of(part)
    first = ("first_step_s", "loss", "gradient_norm")
    warm: Json = {k: row[k] for k in first if k in row}
    outcome = Outcome(row, row["setup_s"], warm, row["warm_up_s"], row["rounds"])
    again = rows.begin(mode, row["backend"], row["point"], outcome)
    peak = flops.Peak(m["peak_tflops"], m["peak_source"])
    if mode in ("train", "converge"):
        known = part["reference"] if mode == "train" else {}
        again = rows.of_training(again, outcome, model, sequences_of(part), peak, known)
    elif mode == "kernel":
        again = rows.of_kernel(again, outcome, peak)
    elif mode == "decode":
        size = 4 if m["dtype"] == "float32" else 2
        shape = row["rounds"][0]["shape"]
        read = weight_bytes(shape["parameters"], shape.get("int8_parameters", 0), size)
        outcome.about = {"weight_bytes": read, "token_bytes": token_numbers(model) * size}
        again = rows.of_decoding(again, outcome, m["bandwidth"])
    else:
        raise ValueError(f"unknown mode {mode!r}")
    # They include the warm-up, which a record keeps only as a sum.
    skip = {"memory_bytes", "kernels", "device_kernels", "title", "proof"}
    return {k: v for k, v in again.items() if k not in skip}


def same(a: object, b: object) -> bool:
    """Compare; the last digits of floats may differ between processors."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)
    return a == b


def _kernel(row: Row, cuda: bool) -> Iterator[str]:
    """Compare the kernels in the profile with the backend's name."""
    name, seen, on_device = row["backend"], row["kernels"], row.get("device_kernels") or []
    if is_file(name):  # a user's kernel: no name to expect
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


def _proof(row: Row) -> Iterator[str]:
    proof = row.get("proof") or {}
    if proof.get("canary") is not True:
        yield "its causality test did not pass"
    for grad in ("",) if row["mode"] == "decode" else ("", "grad_"):
        error, allowed = (proof.get(grad + name, math.nan) for name in ("error", "allowed"))
        if not error <= allowed:  # also for NaN
            yield f"its {grad}error is {error:.2g}, and {allowed:.2g} is allowed"


def _convergence(part: Json) -> Iterator[str]:
    """Check that each candidate's final loss is near its baseline's."""
    tolerance = part["settings"]["tolerance"]
    judged = [r for r in part["rows"] if r["mode"] == "converge" and r["status"] != "unavailable"]
    base = next((r for r in judged if r.get("verdict") == "baseline"), None)
    if base is None:
        if part.get("complete", True):
            yield "converge has no baseline"
        return
    if tolerance > TOLERANCE:
        yield f"its tolerance is {tolerance:.0%}, at most {TOLERANCE:.0%} is allowed"
    for row in judged:
        name = f"converge {row['backend']}"
        if row["status"] != "ok" or row["verdict"] == "FAIL":
            yield f"{name} did not converge"
            continue
        finals, off = row["final_losses"], row["final_loss"] / base["final_loss"] - 1
        if not same(finals[0], rows.final_loss(row["losses"])):
            yield f"{name}: its final loss does not follow from its losses"
        if not (same(row["final_loss"], statistics.fmean(finals)) and same(row["difference"], off)):
            yield f"{name}: final_loss or difference does not follow from its losses"
        if not abs(off) <= rows.allowed(base, tolerance):
            yield f"{name} did not converge: its final loss is {off:+.2%} off"
