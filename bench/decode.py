"""The mode decode: generated tokens, timed by the host.

Greedy. MBU, model bandwidth utilization: a token reads all weights but position embeddings (int8:
a byte each), and the cache of a mean text:

    MBU = (weights + B * context * 2 * L * Hkv * D * bytes) * tokens/s per sequence / bandwidth
"""

from __future__ import annotations

import itertools
import time
from functools import cache, partial

import torch
from torch import Tensor

import data
from attention.machine.system import kineto, synchronize
from bench import Json, candidates, hf, machine, parts, tables
from bench.candidates import Job
from bench.job import Bench, Plan
from bench.settings import Decode
from bench.tables import MEMORY, QUARTILES, Column, Row, bytes_, number, percent
from core import flops
from core.cpu import int8
from core.settings import UserError
from inference import constrain

MOST = 1024  # sequences tried by --batch_size=auto


def plans(bench: Bench[Decode]) -> list[Plan]:
    config, points = bench.config, texts(bench)
    rivals = bench.candidates(("sdpa",))
    jobs = {name: bench.job(name, rival=rival) for name, rival in rivals.items()}
    of = {"auto": "static" if bench.cuda else "dynamic"}
    caches = dict.fromkeys(of.get(point["cache"], point["cache"]) for point in points)
    specs = [{**bench.layer, "grad": False, "cache": cache} for cache in caches]
    specs = [{**s, "page_size": 16} if s["cache"] == "paged" else s for s in specs]
    how: Json = {"longest": dict.fromkeys(bench.slow if bench.cuda else (), 0)}
    how["one_process"] = config.compile is True
    return [Plan("bench.decode:Decoding", jobs, config.rounds, specs, points, **how)]


def texts(bench: Bench[Decode]) -> list[Json]:
    config, T = bench.config, bench.model.block_size
    new = config.new_tokens or (128 if bench.cuda else 16)  # three record the CUDA graph
    sizes: tuple[object, ...] = config.batch_sizes or ((1, 8) if bench.cuda else (1, 4))
    sizes = ("auto",) if bench.auto else sizes
    prompts = config.prompts or (max(1, T // 2 - new),)
    if (longest := max(prompts)) + new > T:
        given = f"--prompts, --new_tokens: {longest} + {new}"
        raise UserError(f"{given} tokens exceed --block_size={T}")
    caches = [c for c in config.kv_caches if not bench.hf or c in hf.CACHES]
    if config.compile:  # last: see warm_up()
        caches.sort(key="static".__eq__)
    shapes = itertools.product(sizes, prompts, caches, config.constraint)
    keys = ("B", "P", "cache", "constraint")
    return [{**dict(zip(keys, shape)), "new_tokens": new} for shape in shapes]


def figures(row: Row, part: Json) -> Json:
    model, m, found, point = hf.model_of(part), part["machine"], tables.medians(row), row["point"]
    shape = row["rounds"][0].get("shape", {})
    B, new = row.get("batch_size", point["B"]), point["new_tokens"]
    N = shape.get("parameters") or flops.n_params(model)
    size = 4 if m["dtype"] == "float32" else 2
    int8_bytes = shape.get("int8_parameters", 0)  # of the head
    bytes_read = (N - int8_bytes) * size + int8_bytes
    heads = [{"n_kv_head": model.kv_heads, "head_dim": model.head_dim}] * model.n_layer
    numbers = sum(2 * at["n_kv_head"] * at["head_dim"] for at in getattr(model, "layers", heads))
    bytes_read += B * (point["P"] + new / 2) * numbers * size
    found["tokens_per_s"] = B / (found["ms"] / 1e3)
    found["cache_bytes"] = max(r["cache_bytes"] for r in row["rounds"])
    found["mbu"] = bytes_read / (found["ms"] / 1e3) / m["bandwidth"]
    if found["mbu"] > 1:
        rate = m["bandwidth"] / 1e9
        why = f"above the memory's {rate:,.4g} GB/s: from a cache, or measured too low"
        found |= {"mbu": None, "mbu_why": why}
    return found


MODE = tables.Mode(
    title="Generation",
    columns=[
        Column("B", lambda r: r.get("batch_size", r["point"]["B"])),
        Column("prompt", lambda r: r["point"]["P"]),
        Column("cache", tables.cache),
        Column("tok/s", "tokens_per_s", number),
        Column("ms/token", "ms", number),
        *QUARTILES,
        Column("first ms", "first_ms", number),
        MEMORY,
        Column("cache size", "cache_bytes", bytes_),
        Column("mbu", "mbu", percent),
        Column("kernel", tables.kernel_names),
    ],
    notes="ms/token: after the first; first ms: from the call to the first token; mbu: bytes of "
    f"weights and cache read a second, over the memory's bandwidth; {tables.EXPLAINED}",
    board=("tok/s", "ms/token", "quartiles", "mbu"),
    plans=plans,
    figures=figures,
    warm_up=" after each text once",
)


# --- in the worker ---


class Decoding:
    keeps_memory = True  # rounds have no warm-up

    def __init__(self, sent: Json) -> None:
        compile = sent["train"]["compile"] is True  # of decode steps
        job = self.job = Job(sent, dropout=0.0, gradient_checkpointing=False, compile=False)
        self.device = job.device
        candidate = candidates.build(sent["rival"], job)
        self.who = candidate.for_decoding(compile, sent["settings"]["weights"])
        self.about = {"title": self.who.title, "dtype": job.dtype}

    def write(self, request: Json, B: int = 0, new: int = 0) -> candidates.Times:
        """Continue B prompts by `new` tokens; 0: as requested."""
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
        # Before the text: later plans recompile its graphs.
        evidence = who.evidence(cache) if not self.job.hf and who.chosen(cache) else None
        machine.reset_peak(self.device)
        self.write(request)
        answer: Json = {"peak_bytes": machine.memory(self.device)}
        if self.job.hf and who.chosen(cache):
            evidence = who.evidence(cache)
        if evidence is None:  # by the profiler
            with kineto(self.device.type) as watched:
                self.write(request, new=2)
                synchronize(self.device)
            evidence = {"kernels": parts.kernels_of(watched)["kernels"], "proof": None}
        return answer | evidence

    def round(self, request: Json) -> Json:
        synchronize(self.device)
        start = time.perf_counter()
        first, last, cache_bytes = self.write(request)
        new, as_int8 = request["new_tokens"], int8.parameters(self.who.model)
        shape = {"B": request["batch_size"] or request["B"], "P": request["P"], "new_tokens": new}
        shape["parameters"] = self.who.parameters
        return {
            "first_ms": (first - start) * 1e3,
            "ms": (last - first) / (new - 1) * 1e3,
            "cache_bytes": cache_bytes,
            "shape": shape | ({"int8_parameters": as_int8} if as_int8 else {}),
        }


@cache
def constrained(how: str | None, V: int) -> Json:
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
