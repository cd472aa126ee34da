"""Generated tokens, timed: the mode decode.

Decoding is greedy. Time is the host's: `first` from the call to the first token, the rate from all
later ones.

MBU, model bandwidth utilization: every token reads all weights but the position embeddings (with
--weights=int8 linear layers and head take a byte each) and the keys and values of every sequence:

    MBU = (weights + B * context * 2 * L * Hkv * D * bytes) * tokens/s per sequence / bandwidth

with context the mean length of the text.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import data
from attention.machine.system import kineto, synchronize
from bench import Json, candidates, hf, machine, parts, tables
from bench.job import Job
from bench.tables import MEMORY, QUARTILES, Column, Row, bytes_, number, percent
from bench.train import LONGEST
from core import flops
from core.cpu import int8
from core.settings import UserError
from inference import constrain
from model import GPTConfig

if TYPE_CHECKING:
    from bench.rounds import Run

TITLE = "Generation"
MOST = 1024  # sequences that --batch_size=auto tries
COLUMNS: list[Column] = [
    ("B", lambda r: str(r.get("batch_size", r["point"]["B"]))),
    ("prompt", lambda r: str(r["point"]["P"])),
    ("cache", tables.cache),
    ("tok/s", lambda r: number(r["tokens_per_s"])),
    ("ms/token", lambda r: number(r["ms"])),
    *QUARTILES,
    ("first ms", lambda r: number(r["first_ms"])),
    MEMORY,
    ("cache size", lambda r: bytes_(r["cache_bytes"])),
    ("mbu", lambda r: percent(r["mbu"])),
    ("kernel", tables.kernel_names),
]


def texts(run: Run) -> list[Json]:
    """Return the points."""
    config, T = run.config, run.model.block_size
    new = config.new_tokens or (128 if run.cuda else 16)  # three record the CUDA graph
    sizes: tuple[object, ...] = config.batch_sizes or ((1, 8) if run.cuda else (1, 4))
    sizes = ("auto",) if config.batch_size == "auto" else sizes
    prompts = config.prompts or (max(1, T // 2 - new),)
    if max(prompts) + new > T or min(prompts) < 1:
        raise UserError(
            f"--prompts, --new_tokens: {max(*prompts, 1)} + {new} tokens exceed --block_size={T}"
        )
    caches = [c for c in config.kv_caches if "hf" not in run.part or c in hf.CACHES]
    shapes = itertools.product(sizes, prompts, caches, config.constraint)
    keys = ("B", "P", "cache", "constraint")
    return [{**dict(zip(keys, shape)), "new_tokens": new} for shape in shapes]


def specs(run: Run) -> list[Json]:
    """Return fields of the Specs; a backend that supports none is not started."""
    of = {"auto": "static" if run.cuda else "dynamic"}
    caches = dict.fromkeys(of.get(point["cache"], point["cache"]) for point in texts(run))
    wanted = [{**run.layer, "grad": False, "cache": cache} for cache in caches]
    return [{**s, "page_size": 16} if s["cache"] == "paged" else s for s in wanted]


def measure(run: Run) -> None:
    """Generation of every backend and rival over texts()."""
    everyone = candidates.everyone(run, ("sdpa",))
    jobs = {name: run.job("decode", name, rival=rival) for name, rival in everyone.items()}
    auto = run.config.batch_size == "auto"
    run.measure(jobs, texts(run), {"auto": auto}, skip=lambda name, _: too_long(run, name))


def too_long(run: Run, name: str) -> str:
    slow = name in LONGEST and run.cuda and name not in run.config.backends
    return "too slow on a GPU; name it in --backends" if slow else ""


def figures(row: Row, part: Json) -> Json:
    """Compute a row's figures from its rounds and their sizes."""
    model, m, found, point = hf.model_of(part), part["machine"], tables.medians(row), row["point"]
    shape = row["rounds"][0].get("shape", {})  # as executed; older records have none
    B, new = row.get("batch_size", point["B"]), point["new_tokens"]
    N = shape.get("parameters")
    N = N or (flops.n_params(model) if isinstance(model, GPTConfig) else model.parameters)
    size = 4 if m["dtype"] == "float32" else 2
    bytes_read = weight_bytes(N, shape.get("int8_parameters", 0), size)
    bytes_read += B * (point["P"] + new / 2) * token_numbers(model) * size
    found["tokens_per_s"] = B / (found["ms"] / 1e3)
    found["cache_bytes"] = max(r["cache_bytes"] for r in row["rounds"])
    found["mbu"] = bytes_read / (found["ms"] / 1e3) / m["bandwidth"]
    if found["mbu"] > 1:
        rate = m["bandwidth"] / 1e9
        why = f"above the memory's {rate:,.4g} GB/s: from a cache, or measured too low"
        found |= {"mbu": None, "mbu_why": why}
    return found


def weight_bytes(parameters: int, int8_parameters: int, itemsize: int) -> int:
    """Return the bytes of weights that a token reads; with int8 the head's, not the embedding's."""
    return (parameters - int8_parameters) * itemsize + int8_parameters


def token_numbers(sizes: GPTConfig | hf.Counted) -> int:
    """Return the numbers in the keys and values of a token, all layers."""
    if isinstance(sizes, hf.Counted):
        return 2 * sum(layer["n_kv_head"] * layer["head_dim"] for layer in sizes.layers)
    return 2 * sizes.n_layer * sizes.kv_heads * sizes.head_dim


# --- in the worker ---


class Decoding:
    """Generation by one model, for any batch size, prompt length and cache."""

    keeps_memory = True  # between rounds, which have no warm-up of their own

    def __init__(self, sent: Json) -> None:
        compile = sent["train"]["compile"] is True  # of single decode steps, not of the model
        job = self.job = Job(sent, dropout=0.0, gradient_checkpointing=False, compile=False)
        self.device = job.device
        candidate = candidates.build(sent["rival"], job)
        self.who = who = candidate.for_decoding(compile, sent["weights"])
        self.parameters, self.int8 = candidates.parameters(who), int8.parameters(who.model)
        self.about = {"title": who.title, "dtype": job.dtype}

    def round(self, request: Json) -> Json:
        how = constrained(request["constraint"], self.job.vocab_size)
        write = functools.partial(self.write, request, how)
        if request.get("largest"):
            return {"batch_size": machine.largest(write, self.device, MOST)}
        B = request["batch_size"] if request["auto"] else request["B"]
        if request.get("warm_up"):
            return self.warm_up(request, B, how)
        synchronize(self.device)
        start = time.perf_counter()
        first, last, cache_bytes = write(B)
        new = request["new_tokens"]
        shape = {"B": B, "P": request["P"], "new_tokens": new, "parameters": self.parameters}
        return {
            "first_ms": (first - start) * 1e3,
            "ms": (last - first) / (new - 1) * 1e3,
            "cache_bytes": cache_bytes,
            "shape": shape | ({"int8_parameters": self.int8} if self.int8 else {}),
        }

    def write(
        self, request: Json, how: Json, B: int, new: int | None = None
    ) -> tuple[float, float, int]:
        draw = torch.Generator().manual_seed(request["P"])
        prompt = torch.randint(self.job.vocab_size, (B, request["P"]), generator=draw)
        new = new or request["new_tokens"]
        return self.who.write(prompt.to(self.device), new, request["cache"], **how)

    def warm_up(self, request: Json, B: int, how: Json) -> Json:
        machine.reset_peak(self.device)
        self.write(request, how, B)
        peak = machine.memory(self.device)
        if chosen := self.who.chosen(request["cache"]):
            return {**candidates.evidence(chosen), "peak_bytes": peak}
        # The kernels that torch chose, from the profiler, in two tokens.
        with kineto(self.device.type) as watched:
            self.write(request, how, B, 2)
            synchronize(self.device)
        kernels = parts.kernels_of(watched)["kernels"]
        return {"kernels": kernels, "proof": None, "peak_bytes": peak}


@functools.cache
def constrained(how: str | None, V: int) -> Json:
    """Return the options of engine.stream() for --constraint; with "regex" texts never end."""
    if how == "regex":
        characters = data.CharTokenizer([chr(32 + i) for i in range(V)])
        known = data.GPT2Tokenizer() if V >= 50257 else characters
        return {"constraint": constrain.regex("[^ ]+( [^ ]+)*", known, stop=())}
    return {"logits_processor": {"tensor": penalty, "python": by_python}[how]} if how else {}


def penalty(tokens: Tensor, logits: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Repetition penalty 1.2 (Keskar et al. 2019, arXiv 1909.05858)."""
    seen = logits.gather(1, tokens)
    return logits.scatter(1, tokens, torch.where(seen < 0, seen * 1.2, seen / 1.2))


def by_python(tokens: Tensor, logits: Tensor) -> Tensor:
    return penalty(torch.tensor(tokens.tolist(), device=logits.device), logits)
