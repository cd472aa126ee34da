"""Generated tokens, timed: the mode decode.

Decoding is greedy. Time is the host's: `first` from the call to the first token, the rate from all
later ones.

MBU, model bandwidth utilization: every token reads all weights but the position embeddings (with
--weights=int8 linear layers and head take a byte each) and the keys and values of every sequence:

    MBU = (weights + B * context * 2 * L * Hkv * D * bytes) * tokens/s per sequence / bandwidth

with context the mean length of the text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

import data
from attention.machine.system import kineto, synchronize
from bench import Json, candidates, hf, machine, parts, tables
from bench.candidates import Job
from bench.job import LONGEST, Bench, Plan
from bench.settings import Decode
from bench.tables import MEMORY, QUARTILES, Column, Row, bytes_, number, percent
from core import flops
from core.cpu import int8
from core.settings import UserError
from inference import constrain
from model import GPTConfig

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
NOTES = (
    f"ms/token: after the first; first ms: from the call to the first token; mbu: bytes of weights "
    f"and cache read a second, over the memory's bandwidth; {tables.EXPLAINED}"
)


def plans(bench: Bench[Decode]) -> list[Plan]:
    """Generation of every backend and rival over texts()."""
    config, points = bench.config, texts(bench)
    rivals = bench.candidates(("sdpa",))
    jobs = {name: bench.job(name, rival=rival) for name, rival in rivals.items()}
    of = {"auto": "static" if bench.cuda else "dynamic"}
    caches = dict.fromkeys(of.get(point["cache"], point["cache"]) for point in points)
    wanted: list[Json] = [{**bench.layer, "grad": False, "cache": cache} for cache in caches]
    specs = [{**s, "page_size": 16} if s["cache"] == "paged" else s for s in wanted]
    skip, one_process = partial(too_slow, bench), config.compile is True
    return [Plan("bench.decode:Decoding", jobs, config.rounds, specs, points, skip, one_process)]


def too_slow(bench: Bench[Decode], name: str, point: Json, rows: Sequence[Row]) -> str:
    slow = name in LONGEST and bench.cuda and not bench.named(name)
    return "too slow on a GPU; name it in --backends" if slow else ""


def texts(bench: Bench[Decode]) -> list[Json]:
    """Return the points."""
    config, T = bench.config, bench.model.block_size
    new = config.new_tokens or (128 if bench.cuda else 16)  # three record the CUDA graph
    sizes: tuple[object, ...] = config.batch_sizes or ((1, 8) if bench.cuda else (1, 4))
    sizes = ("auto",) if bench.auto else sizes
    prompts = config.prompts or (max(1, T // 2 - new),)
    if max(prompts) + new > T:
        raise UserError(
            f"--prompts, --new_tokens: {max(prompts)} + {new} tokens exceed --block_size={T}"
        )
    caches = [c for c in config.kv_caches if not bench.hf or c in hf.CACHES]
    if config.compile:  # last: a plan for another cache would compile its graphs again
        caches.sort(key="static".__eq__)
    shapes = itertools.product(sizes, prompts, caches, config.constraint)
    keys = ("B", "P", "cache", "constraint")
    return [{**dict(zip(keys, shape)), "new_tokens": new} for shape in shapes]


def figures(row: Row, part: Json) -> Json:
    """Compute a row's figures from its rounds and their sizes."""
    model, m, found, point = hf.model_of(part), part["machine"], tables.medians(row), row["point"]
    shape = row["rounds"][0].get("shape", {})  # as executed; older records have none
    B, new = row.get("batch_size", point["B"]), point["new_tokens"]
    N = shape.get("parameters")
    N = N or (flops.n_params(model) if isinstance(model, GPTConfig) else model.parameters)
    size = 4 if m["dtype"] == "float32" else 2
    int8_bytes = shape.get("int8_parameters", 0)  # with int8 the head's, not the embedding's
    bytes_read = (N - int8_bytes) * size + int8_bytes
    heads = [{"n_kv_head": model.kv_heads, "head_dim": model.head_dim}] * model.n_layer
    layers = model.layers if isinstance(model, hf.Counted) else heads
    numbers = 2 * sum(layer["n_kv_head"] * layer["head_dim"] for layer in layers)
    bytes_read += B * (point["P"] + new / 2) * numbers * size
    found["tokens_per_s"] = B / (found["ms"] / 1e3)
    found["cache_bytes"] = max(r["cache_bytes"] for r in row["rounds"])
    found["mbu"] = bytes_read / (found["ms"] / 1e3) / m["bandwidth"]
    if found["mbu"] > 1:
        rate = m["bandwidth"] / 1e9
        why = f"above the memory's {rate:,.4g} GB/s: from a cache, or measured too low"
        found |= {"mbu": None, "mbu_why": why}
    return found


# --- in the worker ---


class Decoding:
    """Generation by one model, for any batch size, prompt length and cache."""

    keeps_memory = True  # between rounds, which have no warm-up of their own

    def __init__(self, sent: Json) -> None:
        compile = sent["train"]["compile"] is True  # of single decode steps, not of the model
        job = self.job = Job(sent, dropout=0.0, gradient_checkpointing=False, compile=False)
        self.device = job.device
        candidate = candidates.build(sent["rival"], job)
        self.who = who = candidate.for_decoding(compile, sent["settings"]["weights"])
        self.parameters, self.int8 = who.parameters, int8.parameters(who.model)
        self.about = {"title": who.title, "dtype": job.dtype}

    def write(self, request: Json, B: int = 0, new: int = 0) -> candidates.Times:
        """Continue B prompts by `new` tokens; 0: as many as requested."""
        B = B or request["batch_size"] or request["B"]
        draw = torch.Generator().manual_seed(request["P"])
        prompt = torch.randint(self.job.vocab_size, (B, request["P"]), generator=draw)
        how = constrained(request["constraint"], self.job.vocab_size)
        new = new or request["new_tokens"]
        return self.who.write(prompt.to(self.device), new, request["cache"], **how)

    def largest(self, request: Json) -> Json:
        fits = partial(self.write, request)
        return {"batch_size": machine.largest(fits, self.device, MOST)}

    def warm_up(self, request: Json) -> Json:
        who, cache = self.who, request["cache"]
        # Before the text: plans that come after it compile its graphs again.
        evidence = who.evidence(cache) if not self.job.hf and who.chosen(cache) else None
        machine.reset_peak(self.device)
        self.write(request)
        answer: Json = {"peak_bytes": machine.memory(self.device)}
        if self.job.hf and who.chosen(cache):  # its layers' kernels are known once they ran
            evidence = who.evidence(cache)
        if evidence is None:  # the kernels that torch chose, from the profiler, in two tokens
            with kineto(self.device.type) as watched:
                self.write(request, new=2)
                synchronize(self.device)
            evidence = {"kernels": parts.kernels_of(watched)["kernels"], "proof": None}
        return answer | evidence

    def round(self, request: Json) -> Json:
        synchronize(self.device)
        start = time.perf_counter()
        first, last, cache_bytes = self.write(request)
        new = request["new_tokens"]
        shape = {"B": request["batch_size"] or request["B"], "P": request["P"], "new_tokens": new}
        shape["parameters"] = self.parameters
        return {
            "first_ms": (first - start) * 1e3,
            "ms": (last - first) / (new - 1) * 1e3,
            "cache_bytes": cache_bytes,
            "shape": shape | ({"int8_parameters": self.int8} if self.int8 else {}),
        }


@cache
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
