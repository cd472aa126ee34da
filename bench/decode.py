"""The mode decode: generated tokens, timed by the host.

Greedy. MBU, model bandwidth utilization: a token reads all weights but embeddings that are only
looked up (int8: a byte each), and in each layer the cached keys that it sees of a mean text:

    MBU = (weights + B * keys * 2 * L * Hkv * D * bytes) * tokens/s per sequence / bandwidth
"""

from __future__ import annotations

import itertools
import time
from functools import cache

import torch
from torch import Tensor

import data
from attention.machine.system import synchronize
from bench import Json, machine, parts, rivals, tables
from bench.candidates import Bench, Candidate, Plan, Times
from bench.tables import Row
from core import flops
from core.cpu import int8
from core.settings import UserError
from inference import constrain, graphs

MOST = 1024  # sequences tried by --batch_size=auto


def plans(bench: Bench) -> list[Plan]:
    config, T = bench.config, bench.model.block_size
    new = config.new_tokens or (128 if bench.cuda else 16)  # the first three record the graph
    sizes = ("auto",) if bench.auto else config.batch_sizes or ((1, 8) if bench.cuda else (1, 4))
    prompts = config.prompts or (max(1, T // 2 - new),)
    if (most := max(prompts)) + new > T:
        given = f"--prompts, --new_tokens: {most} + {new}"
        raise UserError(f"{given} tokens exceed --block_size={T}")
    # static last: see warm_up()
    caches = sorted(config.kv_caches, key=lambda c: config.compile is True and c == "static")
    points = [
        {"B": B, "P": P, "cache": kv, "constraint": constraint, "new_tokens": new}
        for B, P, kv, constraint in itertools.product(sizes, prompts, caches, config.constraint)
    ]

    def spec(point: Json) -> Json:
        return bench.layer | graphs.decode_phase(point["cache"], captured=bench.cuda)

    plain = {"dropout": 0.0, "gradient_checkpointing": False, "optimizer": "adamw"}
    longest = dict.fromkeys(bench.slow if bench.cuda else (), 0)
    return [Plan(Decoding, rivals.candidates(bench, **plain), config.rounds, points, spec, longest,
                 one_process=config.compile is True, most=MOST)]  # fmt: skip


def figures(row: Row, part: Json) -> Json:
    model, m, point = parts.model_of(part), part["machine"], row["point"]
    shape, s = row["rounds"][0].get("shape", {}), row["ms"] / 1e3
    B, size = row.get("batch_size", point["B"]), 4 if m["dtype"] == "float32" else 2
    N, of_int8 = shape.get("parameters"), shape.get("int8_parameters", 0)
    weights = ((N or flops.n_params(model)) - of_int8) * size + of_int8
    each = {"n_kv_head": model.kv_heads, "head_dim": model.head_dim}
    layers = getattr(model, "layers", [each | {"window": w} for w in model.windows])
    keys = 0 if point["cache"] == "none" else point["P"] + point["new_tokens"] / 2
    pairs = sum(at["n_kv_head"] * at["head_dim"] * min(at["window"] or keys, keys) for at in layers)
    bytes_read = weights + B * 2 * pairs * size
    found: Json = {"tokens_per_s": B / s, "mbu": bytes_read / s / m["bandwidth"]}
    found["cache_bytes"] = max(r["cache_bytes"] for r in row["rounds"])
    if found["mbu"] > 1:
        rate = f"{m['bandwidth'] / 1e9:,.4g} GB/s: from a cache, or measured too low"
        found |= {"mbu": None, "mbu_why": f"above the memory's {rate}"}
    return found


MODE = tables.Mode(
    title="Generation",
    columns="B, prompt, cache, tok/s, ms/token, quartiles, rounds, first ms, memory, cache size, "
    "mbu, kernel",
    notes="ms/token: after the first; first ms: from the call to the first token; mbu: bytes of "
    f"weights and cache read a second, over the memory's bandwidth; {tables.EXPLAINED}",
    board="tok/s, ms/token, quartiles, mbu",
    plans=plans,
    figures=figures,
    warm_up=" after each text once (static and paged caches in each round)",
)


# --- in the worker ---


class Decoding:
    def __init__(self, who: Candidate) -> None:
        self.who, self.device = who, who.device
        who.for_decoding()

    def write(self, request: Json) -> Times:
        """Continue B prompts by new_tokens."""
        V, draw = self.who.bench.vocab_size, torch.Generator().manual_seed(request["P"])
        prompt = torch.randint(V, (request["B"], request["P"]), generator=draw).to(self.device)
        how = constrained(request["constraint"], V)
        return self.who.write(prompt, request["new_tokens"], request["cache"], **how)

    def fits(self, request: Json) -> Json:
        self.write(request)
        return {}

    def warm_up(self, request: Json) -> Json:
        who, cache = self.who, request["cache"]
        # Before the text: later plans recompile its graphs. Transformers' are known after it.
        chosen = who.chosen(cache) if not who.bench.hf else []
        machine.reset_peak(self.device)
        self.write(request)
        answer = {"peak_bytes": machine.memory(self.device)}
        if chosen := chosen or who.chosen(cache):
            return answer | who.evidence(chosen)
        ran = parts.kernels_of(lambda: self.write(request | {"new_tokens": 2}), self.device)
        return answer | {"kernels": ran["kernels"], "proof": None}

    def round(self, request: Json) -> Json:
        if request["cache"] not in ("none", "dynamic"):  # others may have taken its graphs
            self.write(request)
        synchronize(self.device)
        start = time.perf_counter()
        first, last, cache_bytes = self.write(request)
        new, as_int8 = request["new_tokens"], int8.parameters(self.who.model)
        shape = {name: request[name] for name in ("B", "P", "new_tokens")}
        shape |= {"parameters": self.who.parameters}
        shape |= {"int8_parameters": as_int8} if as_int8 else {}
        times = {"first_ms": (first - start) * 1e3, "ms": (last - first) / (new - 1) * 1e3}
        return {**times, "cache_bytes": cache_bytes, "shape": shape}


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
