"""Sizes of a record's model, and rooflines of its training step: the larger of FLOPs at peak rate
and bytes at full bandwidth (Williams, Waterman and Patterson 2009, CACM 52(4)), perfectly fused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

import data
from attention.machine.system import kineto, synchronize
from attention.proof import KERNELS
from bench import Json, tables
from bench.settings import varied
from bench.tables import Cells, Row
from core import flops, profile
from core.flops import Sizes, flops_per_token, mean_keys
from core.gpus import datasheet_bandwidth
from core.options import TrainConfig
from core.settings import UserError, from_dict
from model import GPTConfig

OF_CLASS = {  # class of kernels -> parts
    "products": ("linear", "head and loss"),
    "attention": ("attention",),
    "elementwise": ("norms and elementwise", "embedding"),
    "optimizer": ("optimizer",),
}
LARGEST = 5
COLUMNS = "kernels, ms, share, roofline ms, times, limit"
NOTES = (
    "share: of the step, with its gaps between the kernels; times: how often the time at the "
    "roofline (Muon has none); products of manual's attention count as attention on the CPU only"
)


@flops_per_token.register
def _(config: SimpleNamespace, T: int, causal: bool = False) -> float:
    found: float = config.other_flops
    for layer in config.layers:
        keys = mean_keys(T, layer["window"]) if causal else T
        found += 12 * layer["n_head"] * layer["head_dim"] * keys
    return found


def model_of(part: Json) -> Sizes:
    """A record's GPTConfig, or the counted sizes of a transformers model (rivals.py)."""
    if counted := part.get("hf", {}).get("counted"):
        layers = counted["layers"]
        sizes = {name: layers[0][name] for name in ("n_head", "head_dim")}
        sizes |= {"kv_heads": layers[0]["n_kv_head"], "n_layer": len(layers)}
        windows = tuple(layer["window"] for layer in layers)
        return SimpleNamespace(**counted, **sizes, windows=windows)
    ours = {f.name for f in fields(TrainConfig)} - {"batch_size"}
    given = {k: v for k, v in part["settings"].items() if k in ours}
    return GPTConfig.of(from_dict(TrainConfig, given), part["vocab_size"])


def vocabulary(config: Any) -> tuple[int, str]:
    """Its size in tokens, and where that comes from."""
    if config.vocab_size:
        return config.vocab_size, "vocab_size"
    folder = data.find(config.dataset, config.data_dir)
    with suppress(UserError):
        return data.padded(data.read_meta(folder)["vocab_size"]), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"


@dataclass(frozen=True)
class Work:
    flops: float = 0
    bytes: float = 0

    def ms(self, tflops: float, bandwidth: float) -> float:
        return 1e3 * max(self.flops / (tflops * 1e12), self.bytes / bandwidth)


def work(
    config: GPTConfig, sequences: float, micro: int, dtype: str, clip: bool
) -> dict[str, Work]:
    """Work by part; `sequences` may be fractional (context parallelism).

    Logits stay on the chip; GELU, biases fused. Weights, gradients and AdamW's moments are float32.
    Attention: 7 products (QK^T twice), 2 C FLOPs per visible pair. AdamW reads and writes 28 bytes
    per weight (no new gradient), clipping 4 more, each further micro-batch 12 more.
    """
    T, L, C, V = config.block_size, config.n_layer, config.n_embd, config.vocab_size
    K, N = config.kv_heads * config.head_dim, sequences * config.block_size
    a = 4 if dtype == "float32" else 2  # bytes of an activation
    made = flops.matrices(config)
    # Matmuls of a layer: weights; inputs and outputs.
    W, S = sum(m * n for m, n, _ in made), sum(m + n for m, n, _ in made)
    P = flops.n_params(config)
    P += T * C if config.position == "learned" else 0
    P += 0 if config.tied else V * C
    keys = sum(mean_keys(T, w) for w in config.windows) / config.n_layer
    return {
        "linear": Work(6 * N * L * W, L * (3 * a * N * S + micro * W * (2 * a + 4))),
        "head and loss": Work(6 * N * V * C, 3 * a * N * C + micro * V * C * (2 * a + 4)),
        "attention": Work(14 * N * L * C * keys, a * N * L * (6 * C + 6 * K)),
        "norms and elementwise": Work(0, 8 * a * N * C * (2 * L + 1)),
        "embedding": Work(0, N * C * (4 + 2 * a) + 8 * C * min(N, V)),
        "optimizer": Work(0, (28 + 4 * clip + 12 * (micro - 1)) * P),
    }


def beside(ms: float, least: float) -> float | None:
    """Multiple of the roofline; None below it (caches, other parts' work)."""
    return ms / least if least and ms >= least else None


def computed(found: Json, row: Row, part: Json) -> Json:
    """Figures from a profile's times; older records have parts, and one micro-batch."""
    model, settings, m = model_of(part), part["settings"], part["machine"]
    old = found.get("parts", ())
    classes = {p["part"]: p["ms"] for p in old} or found["classes"]
    micro = 1 if old else settings["gradient_accumulation_steps"]
    batch = row["batch_size"] * micro
    works = work(model, batch, micro, m["dtype"], bool(settings["grad_clip"]))
    word = tables.named(row, settings)[1]
    if (settings | (varied(word) if word else {})).get("optimizer") == "muon":
        del works["optimizer"]  # its roofline is AdamW's
    known = None if settings.get("bandwidth_gbs") else datasheet_bandwidth(m["name"])
    bandwidth, source = known or (m["bandwidth"], m["bandwidth_source"])
    peak, products = m["peak_tflops"], settings.get("products_tflops") or m["products_tflops"]
    total, lines = sum(classes.values()), {}
    for name, ms in classes.items():
        its = [works[p] for p in OF_CLASS.get(name, (name,)) if p in works]
        least = sum((w.ms(peak, bandwidth) for w in its), 0.0)
        computing = sum(w.flops for w in its) / (peak * 1e12)
        limit = "FLOPs" if computing > sum(w.bytes for w in its) / bandwidth else "bytes"
        lines[name] = {"ms": ms, "share": ms / total, "roofline_ms": least}
        lines[name] |= {"times": beside(ms, least), "limit": limit if its else "-"}
    made: Json = {"bandwidth": bandwidth, "bandwidth_source": source, "products_tflops": products}
    if old:
        for line in lines.values():
            line["over_ms"] = line["ms"] - line["roofline_ms"]
        made["parts"] = [{**p, **lines[p["part"]]} for p in old]
        made["ms"] = total
    else:
        made |= {"rooflines": lines, "plain_ms": row["rounds"][0]["ms"]}
    for name, rate in (("ceiling", peak), ("reachable", products)):
        if rate:
            ms = sum(w.ms(rate, bandwidth) for w in works.values())
            speed = batch * model.block_size / (ms / 1e3)
            at = flops.Peak(peak, "the roofline's")
            made[name] = {"ms": ms, **flops.Speed(model, model.block_size, speed, at).row()}
    return made


def title(backend: str, found: Json) -> str:
    known, _, _ = flops.in_words(found["ceiling"]).partition(":")  # no run that exceeds a peak
    took = f"{found['plain_ms']:,.4g} ms ({found['ms']:,.4g} under the profiler)"
    return f"A step of {backend} by {found['of']}: {took}, at its roofline {known}"


def table(found: Json, of: str = "") -> Cells:
    total = sum(found["classes"].values())
    lines = [{**p, "name": c, "roofline_ms": p["roofline_ms"] or None}
             for c, p in found["rooflines"].items()]  # fmt: skip
    rate = f"with products at {found['products_tflops'] or 0:,.4g} TFLOP/s"
    for of_all, name in (("ceiling", "the step"), ("reachable", rate)):
        if of_all in found:
            least = found[of_all]["ms"]
            whole = {"ms": total, "share": 1, "roofline_ms": least, "times": beside(total, least)}
            lines.append({"name": name, **whole})
    names = [(ms, c, name, n) for c, of_c in found["names"].items() for name, ms, n in of_c]
    for ms, c, name, n in sorted(names, reverse=True)[:LARGEST]:
        calls = f"{c}: {profile.short(name, 60)}, {tables.count(n, 'call')}"
        lines.append({"name": calls, "ms": ms, "share": ms / total})
    return tables.table(COLUMNS, lines, of)


def kernels_of(call: Callable[[], object], device: torch.device) -> dict[str, list[str]]:
    with kineto(device.type) as watched:
        call()
        synchronize(device)
    ran: Any = watched.key_averages()
    on_device = [e.key for e in ran if e.device_type != DeviceType.CPU]
    return {
        "kernels": list(dict.fromkeys(KERNELS[e.key] for e in ran if e.key in KERNELS)),
        "device_kernels": [name for name in on_device if profile.class_of(name) == "attention"],
    }
