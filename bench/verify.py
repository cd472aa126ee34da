"""Is a record what it claims to be? All checks that need no other machine.

A record keeps what was measured: raw rounds, sizes, the profiler's names. Everything derived from
these is recomputed here, by the functions that computed it when it was written (bench/rows.py), and
compared. The rest (the numerical error, the canary, the source) is checked against the policy, the
table of GPUs, or the repository's history. What it does not find stands in docs/MEASURE.md.
"""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import attention
from attention.gpus import datasheet_tflops
from bench import hf, records, rows, tables
from bench.candidates import HF
from bench.compare import SAME
from bench.decoding import token_numbers, weight_bytes
from bench.modes import CONVERGE_ROUNDS, SWEEP_ROUNDS
from bench.process import Outcome
from bench.rows import Row
from core import flops
from core.settings import UserError, from_dict
from train import TrainConfig

TOLERANCE = 0.01  # of a final loss in converge: a larger one proves nothing
OLD = "before proofs were kept"
# Records of format 1 and of other programs, accepted by their hash, for sha256sum -c.
FROZEN = records.ROOT / "bench" / "records" / "before_proofs.sha256"

# What the profiler shows when a backend ran: short names of PyTorch's and our own kernels (KERNELS
# in attention/probing.py; empty: none of them), and what the names of the device's kernels have in
# common, the only trace of another package or of a CUDA graph.
ANY = r"(flash|efficient|cudnn|math|overrideable)( \((CPU|MPS|FA\d)\))?"
PACKAGE = r"^(?!.*pytorch_flash).*flash"  # PyTorch's own FlashAttention-2 is not the package
SHOWS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("manual", "tiled", "hf_eager"), ("", "")),  # not fused
    **dict.fromkeys(("sdpa", "sdpa_bmm", "hf_sdpa"), (ANY, r"flash|fmha|sdpa|cudnn|attn")),
    "sdpa_flash": (r"flash( \((CPU|FA\d)\))?", "flash|attn"),
    "sdpa_efficient": ("efficient", "fmha|attn"),
    "sdpa_cudnn": ("cudnn", "cudnn|sdpa"),
    "sdpa_math": (r"math( \(MPS\))?", ""),
    "flex": ("", "flex"),
    "triton": (r"flash \(our Triton\)", r"forward|dkdv|dq"),
    **dict.fromkeys(("flash_attn_2", "flash_attn_3", "flash_attn_4", "hf_flash_attention_2"),
                    ("", PACKAGE)),
    "paged": (rf"paged decode \(Triton\)|{ANY}", ""),
    "nanogpt": (ANY, ""),
}  # fmt: skip
MAY_SHOW_NONE = {"paged", "nanogpt"}  # plain PyTorch does, where their fast kernel cannot
FUSED = re.compile(r"flash|fmha|cudnn.*sdpa", re.I)
OTHERS = {"nanogpt", *(f"hf_{name}" for name in HF)}
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "command": str, "date": str, "commit": (str, type(None)), "dirty": (bool, type(None)),
    "machine": dict, "vocab_size": int, "settings": dict, "reference": dict, "rows": list,
}  # fmt: skip


def verify(content: dict[str, Any], folder: Path) -> list[str]:
    """Everything wrong with a record, a sentence each; empty: nothing."""
    if content.get("format") != records.FORMAT:
        digest = hashlib.sha256((folder / "record.json").read_bytes()).hexdigest()
        if digest in FROZEN.read_text(encoding="ascii").split():
            return []
        return [f"it is not of format {records.FORMAT}, and none of the old records, byte for byte"]
    try:
        return list(dict.fromkeys([*_whole(content), *_parts(content)]))
    except UserError as e:
        return [f"its settings are none of train.py's ({e})"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        return [f"it is malformed ({type(e).__name__}: {e})"]


def _whole(content: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the record as a whole."""
    if content["rounds_sha256"] != records.rounds_sha256(content):
        yield "the hash of the raw rounds is not that of its rounds: they were edited"
    if source_state(content) == "another":
        yield (
            f"it says that its code is clean at {content['commit'][:10]}, but the source that "
            "ran is not that commit's"
        )
    for stage in content["stages"] if content["mode"] == "qualify" else ():
        if stage["status"] not in ("done", "cut", "skipped", "failed"):
            yield f"stage {stage['name']}: there is no status {stage['status']!r}"
        if stage["status"] == "cut" and content.get("complete", True):
            yield f"stage {stage['name']} was cut off, but the record says that it is complete"


def source_state(content: dict[str, Any]) -> str:
    """Whether the source that ran is its commit's: "checked", "another", "changed" (it says so),
    or "unverifiable": no checkout, or a commit that is not in this history."""
    if content["dirty"]:
        return "changed"
    known = content["commit"] and records.source_sha256(content["commit"])
    if not known:
        return "unverifiable"
    return "checked" if known == content.get("source_sha256") else "another"


def _parts(content: dict[str, Any]) -> Iterator[str]:
    devices = set()
    for part in records.parts(content):
        for name, kind in SCHEMA.items():
            if not isinstance(part[name], kind):
                yield f"{name} is {part[name]!r}, which is of another kind"
                return
        devices.add(tuple(str(part["machine"][name]) for name in SAME))
        ok = [row for row in part["rows"] if row["status"] == "ok"]
        yield from _peak(part)
        yield from _machine(ok, part["machine"]["about"])
        for row in ok:
            at = f"{row['mode']} {row['backend']} {rows.where(row['point'])}".strip()
            yield from (f"{at}: {why}" for why in _row(row, part))
        yield from tables.disagreeing(ok, part)
        if part["mode"] == "converge":
            yield from _convergence(part)
    if len(devices) > 1:
        yield "its stages were measured on two machines"


def _peak(part: dict[str, Any]) -> Iterator[str]:
    """The peak is labelled; where the table of GPUs has the device, it is the table's dense one."""
    m = part["machine"]
    source, rate = m["peak_source"], m["peak_tflops"]
    if not re.match(r"datasheet: \w|measured|--peak_tflops", source or ""):
        yield f"the peak of {rate:,.4g} TFLOP/s is not labelled: its source is {source!r}"
        return
    known = datasheet_tflops(m["name"], m["dtype"], bool(part["settings"].get("tf32")))
    if known is None:
        if source.startswith("datasheet"):
            yield f"no datasheet of {m['name']!r} is known, so its peak cannot be one's"
    elif not math.isclose(rate, known[0]):
        sparse = ", the sparse one" if math.isclose(rate, 2 * known[0], rel_tol=0.01) else ""
        yield f"the peak is {rate:,.4g} TFLOP/s{sparse}; {known[1]} has {known[0]:,.4g}, dense"


def _machine(ok: list[Row], named: str) -> Iterator[str]:
    """All rounds are from the named machine, and from one run."""
    where = {r["machine"] for row in ok for r in row["rounds"]}
    if len(where) > 1:
        yield f"its rounds are from two machines or runs: {'; '.join(sorted(where))}"
    elif any(w.rpartition(", run ")[0] != named for w in where):
        yield f"its rounds are from {where.pop()}, and the record names {named}"


# ----------------------------------------------------------------------------- a row


def _row(row: Row, part: dict[str, Any]) -> Iterator[str]:
    settings, mode = part["settings"], row["mode"]
    asked = settings["rounds"]
    if mode == "converge":
        asked = CONVERGE_ROUNDS * settings.get("seeds", 1)
    elif mode == "kernel" and part["mode"] == "train":
        asked = min(SWEEP_ROUNDS, asked)
    if len(row["rounds"]) < asked and part.get("complete", True):
        yield f"it has {len(row['rounds'])} of {asked} rounds"
    yield from _work(row, part)
    again = figures(row, part)
    for name, value in again.items():
        if not same(row.get(name), value):
            yield f"{name} is {row.get(name)}, but its rounds and sizes give {value}"
    for name in ("mfu", "share"):  # mfu_causal is never more than mfu
        if (row.get(name) or 0) > 1:
            yield f"{name} of {row[name]:.1%} is more than the peak: that peak is too low"
    if not (mode == "converge" and settings.get("paths")):
        yield from _kernel(row, part["machine"]["kind"] == "cuda")
        if row["backend"] not in OTHERS:
            yield from _proof(row)


def model_of(part: dict[str, Any]) -> Any:
    """The model that the settings describe, or the one that was counted."""
    if "hf" in part:
        return hf.Counted(**part["hf"]["counted"])
    mine = {f.name for f in fields(TrainConfig)} - {"batch_size"}  # which may be "auto"
    given = {k: v for k, v in part["settings"].items() if k in mine}
    return from_dict(TrainConfig, given).model(part["vocab_size"])


def sequences_of(row: Row, part: dict[str, Any]) -> int:
    """Sequences of a training step."""
    settings = part["settings"]
    if settings["batch_size"] == "auto":
        return row["batch_size"]
    return settings["batch_size"] * settings["gradient_accumulation_steps"]


def _work(row: Row, part: dict[str, Any]) -> Iterator[str]:
    """The row's sizes are those of each of its rounds."""
    mode, model = row["mode"], model_of(part)
    said: dict[str, Any] = dict(row["point"])
    if mode in ("train", "converge"):
        said = {"B": sequences_of(row, part), "T": model.block_size}
        if row["dtype"] != part["machine"]["dtype"] and not part["settings"].get("paths"):
            yield f"it ran in {row['dtype']}, and the record is of {part['machine']['dtype']}"
    for ran in (r["shape"] for r in row["rounds"]):
        for name in said.keys() & ran.keys():
            if said[name] != ran[name]:
                yield f"it is filed under {name}={said[name]}, and a round ran {name}={ran[name]}"
        if (N := ran.get("parameters")) is not None:
            # transformers' GPT-2 always has biases: about one parameter more in n_embd
            least = model.parameters if "hf" in part else flops.n_params(model)
            most = least * (1 + 2 / model.n_embd * (row["backend"] in OTHERS and "hf" not in part))
            if not least <= N <= most:
                yield f"a round ran {N:,} parameters, and its settings describe {least:,}"
        ours = row["backend"] not in OTHERS and part["settings"].get("weights") == "int8"
        if ran.get("int8_parameters", 0) != (int8_parameters(model) if ours else 0):
            yield f"a round ran {ran.get('int8_parameters', 0):,} weights in int8"


def int8_parameters(model: Any) -> int:
    """The weights of the linear layers and the head."""
    C, KV = model.n_embd, model.kv_heads * model.head_dim
    return model.n_layer * (2 * C * C + 2 * C * KV + 8 * C * C) + model.vocab_size * C


def figures(row: Row, part: dict[str, Any]) -> dict[str, Any]:
    """What is derived from rounds and sizes: medians, quartiles, rates, shares of the peak.

    Computed by the functions that made them when the record was written.
    """
    m, mode, model = part["machine"], row["mode"], model_of(part)
    first = ("first_step_s", "loss", "gradient_norm")
    warm: dict[str, Any] = {k: row[k] for k in first if k in row}
    outcome = Outcome(row, row["setup_s"], warm, row["warm_up_s"], row["rounds"])
    again = rows.begin(mode, row["backend"], row["point"], outcome)
    peak = flops.Peak(m["peak_tflops"], m["peak_source"])
    if mode in ("train", "converge"):
        known = part["reference"] if mode == "train" else {}
        again = rows.of_training(again, outcome, model, sequences_of(row, part), peak, known)
    elif mode == "kernel":
        again = rows.of_kernel(again, outcome, peak)
    elif mode == "decode":
        size = 4 if m["dtype"] == "float32" else 2
        shape = row["rounds"][0]["shape"]
        read = weight_bytes(shape["parameters"], shape.get("int8_parameters", 0), size)
        outcome.about = {"weight_bytes": read, "token_bytes": token_numbers(model) * size}
        again = rows.of_decoding(again, outcome, m["bandwidth"])
    else:
        raise ValueError(f"there is no mode {mode!r}")
    # These include the warm-up, of which a record keeps only the sum.
    told = {"memory_bytes", "kernels", "events", "device_kernels", "title", "proof"}
    return {k: v for k, v in again.items() if k not in told}


def same(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of floats, which another processor may round differently."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)
    return a == b


def _kernel(row: Row, cuda: bool) -> Iterator[str]:
    """The kernel that the profiler saw is the one that is named."""
    name, seen = row["backend"], row["kernels"]
    if name not in SHOWS or not (name in OTHERS or name in attention.BACKENDS):
        yield "no backend and no baseline of this name is known, so nothing can be checked"
        return
    short, device = SHOWS[name]
    on_device = row.get("device_kernels") or []
    there = any(re.search(device, kernel, re.I) for kernel in on_device) if device else False
    if foreign := [kernel for kernel in seen if not re.fullmatch(short, kernel)]:
        yield f"the profiler saw another kernel than is named: {', '.join(foreign)}"
    # In other modes a worker records the short names only.
    looked = cuda and device and row["mode"] in ("train", "kernel")
    needed = (short or looked) and name not in MAY_SHOW_NONE
    if needed and not (seen or on_device):
        yield "the profiler saw no kernel of this backend"
    elif device and on_device and not there:
        yield f"the profiler saw another kernel than is named: {', '.join(on_device)}"
    elif not (short or device) and (fused := [k for k in on_device if FUSED.search(k)]):
        yield f"the profiler saw another kernel than is named: {', '.join(fused)}"


def _proof(row: Row) -> Iterator[str]:
    """Its results were right on that machine, and no later token leaked into an earlier one."""
    proof = row.get("proof") or {}
    if proof.get("canary") is not True:
        word = "failed" if "canary" in proof else "is absent"
        yield f"the canary {word}: nobody knows whether a later token leaks into an earlier one"
    if not proof:
        return
    for grad in ("",) if row["mode"] == "decode" else ("", "grad_"):
        off, most = proof.get(f"{grad}error"), proof.get(f"{grad}allowed")
        if off is None or most is None:
            yield f"its proof has no {grad}error"
        elif not off <= most:  # written so that NaN fails
            yield f"its {grad}error of {off:.2g} is more than the {most:.2g} that is allowed"


def _convergence(part: dict[str, Any]) -> Iterator[str]:
    """Every candidate ended where its baseline did, and that follows from the losses."""
    settings, judged = part["settings"], [r for r in part["rows"] if r["mode"] == "converge"]
    base = next((r for r in judged if r.get("verdict") == "baseline"), None)
    if base is None:  # of one that was stopped early no row claims to have passed
        if part.get("complete", True):
            yield "converge has no baseline, so nothing has passed"
        return
    if settings["tolerance"] > TOLERANCE:
        yield f"a tolerance of {settings['tolerance']:.0%} is more than {TOLERANCE:.0%}"
    for row in judged:
        if row["status"] == "unavailable":
            continue
        name = f"converge {row['backend']}"
        if row["status"] != "ok" or row["verdict"] not in ("ok", "baseline"):
            yield f"{name} did not converge as {base['backend']} did"
            continue
        finals, most = row["final_losses"], rows.allowed(base, settings["tolerance"])
        found = rows.final_loss(row["losses"]), statistics.fmean(finals)
        if not same(found[0], finals[0]) or not same(found[1], row["final_loss"]):
            yield f"{name}: its final loss does not follow from its losses"
        if not same(off := row["final_loss"] / base["final_loss"] - 1, row["difference"]):
            yield f"{name}: its final loss is {off:+.2%} off, not {row['difference']:+.2%}"
        saved = {"time_saved": "ms", "memory_saved": "memory_bytes"}
        again = {what: 1 - row[of] / base[of] for what, of in saved.items() if what in row}
        if "seed_noise" in row:
            again["seed_noise"] = statistics.stdev(base["final_losses"])
        for what, value in again.items():
            if not same(row[what], value):
                yield f"{name}: {what} is {row[what]}, but its figures give {value}"
        if row is not base and not abs(off) <= most:
            yield f"{name} did not converge: {off:+.2%} off, {most:.2%} is allowed"
