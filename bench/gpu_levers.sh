#!/usr/bin/env bash
# What each lever saves of a training step, GPT-2 124M, batch 32, T = 1024, bfloat16, on one GPU.
#
#     bash bench/gpu_levers.sh                                        LIMIT=280: seconds at most
#     VARIANTS=residual,graphs LIMIT=120 bash bench/gpu_levers.sh       some of the variants
#     TINY=1 OUT=/tmp/tiny bash bench/gpu_levers.sh                   try the script on a CPU
#
# Writes $OUT/levers.txt: the rate of each matrix product; the 40 longest kernels of the compiled
# step; then the variants, their rounds interleaved. A lever that changes the loss or the gradient
# norm of the first step is none. CE=FILE: another head and loss, as loss(x, weight, targets, ...)
# with core.loss.linear_cross_entropy's arguments; it is the variant "ce".
set -u
me=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$me")/.."
OUT=${OUT:-/tmp/gpu_levers}
LIMIT=${LIMIT:-280}
PY=${PY:-python3}
mkdir -p "$OUT"
if compgen -G ".whl/*.whl" >/dev/null; then
  $PY -m pip install -q --no-index --no-deps --upgrade --target "$OUT/site" .whl/*.whl
  export PYTHONPATH=$OUT/site${PYTHONPATH:+:$PYTHONPATH}
fi

cat >"$OUT/levers.py" <<'PY'
import gc
import os
import runpy
import statistics
import time

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import core.loss
from attention import triton_flash
from bench.candidates import Bench, Ours
from bench.settings import load_config
from core import flops

END = time.time() + float(os.environ["LIMIT"])
TINY = bool(os.environ.get("TINY"))
device = torch.device("cpu" if TINY else "cuda")
synchronize = (lambda: None) if TINY else torch.cuda.synchronize
N, C, V = (256, 64, 512) if TINY else (32 * 1024, 768, 50304)


def show(*words):
    print(*words, flush=True)
    with open(f"{os.environ['OUT']}/levers.txt", "a") as f:
        print(*words, file=f)


def milliseconds(call, n):
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(n):
        call()
    synchronize()
    return (time.perf_counter() - start) / n * 1e3


def products():
    """Show the rates of the model's products: forward, input gradient, weight gradient."""
    layers = {"qkv": (3 * C, C), "attn out": (C, C), "fc": (4 * C, C), "mlp out": (C, 4 * C)}
    for name, (rows, columns) in {**layers, "head": (V, C)}.items():
        sizes = (N, columns), (rows, columns), (N, rows)
        x, w, dy = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in sizes)
        calls = {"y": lambda: x @ w.t(), "dx": lambda: dy @ w, "dw": lambda: dy.t() @ x}
        for library in ("cublas", "cublaslt"):
            if not TINY:
                torch.backends.cuda.preferred_blas_library(library)
            work = 2 * N * rows * columns / 1e9
            rates = (f"{k} {work / milliseconds(call, 10):.3g}" for k, call in calls.items())
            show(f"TFLOP/s {library:8s} {name:8s} {rows} x {columns}:", *rates)
    if not TINY:
        torch.backends.cuda.preferred_blas_library("default")


def full_logits(x, weight, targets, *_, **__):
    """Compute all logits at once, as plain PyTorch code does."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)


def one_chunk(N, V, *_):
    """Return as many rows as an int32 index allows, a multiple of 128."""
    chunks = -(-N * V // (2**31 - 1))
    return min(N, -(-N // (128 * chunks)) * 128)


def half_chunks(N, V, *about):
    """Return half of the rows that core.loss takes."""
    return max(128, chunk_rows(N, V, *about) // 256 * 128)


chunk_rows = core.loss.chunk_rows
RESIDUAL = {"residual_dtype": "autocast"}
TRITON = ["triton", *(b.name for b in (*triton_flash.TILED, triton_flash.TMA))]
VARIANTS = {  # options of train.py, replaced names of modules, options of Inductor
    "base": ({}, {}, {}),
    "residual": (RESIDUAL, {}, {}),
    "one chunk": ({}, {(core.loss, "chunk_rows"): one_chunk}, {}),
    "half chunks": ({}, {(core.loss, "chunk_rows"): half_chunks}, {}),
    "full logits": ({}, {(core.loss, "linear_cross_entropy"): full_logits}, {}),
    "nomix": ({}, {}, {"triton.mix_order_reduction": False}),
    "triton": ({"attention_backend": "triton"}, {}, {}),
    "sdpa_flash": ({"attention_backend": "sdpa_flash"}, {}, {}),
    **{f"residual+{name}": ({**RESIDUAL, "attention_backend": name}, {}, {}) for name in TRITON},
    "residual+batch 64": ({**RESIDUAL, "batch_size": 64}, {}, {}),
    "graphs": ({"compile_mode": "reduce-overhead"}, {}, {}),
    "tuned": ({"compile_mode": "max-autotune-no-cudagraphs"}, {}, {}),
}
if path := os.environ.get("CE"):
    loss = {(core.loss, "linear_cross_entropy"): runpy.run_path(path)["loss"]}
    VARIANTS |= {"ce": ({}, loss, {}), "residual+ce": (RESIDUAL, loss, {})}
BASE = {"attention_backend": "sdpa_cudnn", "batch_size": 32, "gradient_accumulation_steps": 1}
BASE |= {"residual_dtype": "float32"}
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": C, "block_size": 64, "batch_size": 4}
SMALL |= {"attention_backend": "sdpa", "compile": False, "onednn": False}
# All variants share the code of GPT.forward.
torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 64
settings = load_config([f"--device={device}"], "train").settings


class Variant:
    """A model with its compiled step, and the times of its rounds."""

    def __init__(self, name):
        options, self.replaced, inductor = VARIANTS[name]
        options = {**BASE, **(SMALL if TINY else {}), **options}
        bench = Bench("train", settings, device, (), {}, V, {})
        self.who = Ours(bench, name, **options)
        self.name, self.times, config = name, [], self.who.config
        before = 0 if TINY else torch.cuda.memory_allocated()
        torch.manual_seed(config.seed)
        self.who.for_training()
        self.batch = self.who.random_tokens(config.batch_size)
        self.tokens = config.batch_size * config.block_size
        start = time.time()
        with torch._inductor.config.patch(inductor):
            self.loss = float(self.step(self.look))
            self.first_step = time.time() - start
            for _ in range(3):
                self.step()
        if not TINY:
            torch.cuda.reset_peak_memory_stats()
        self.round()
        self.gb = 0.0 if TINY else (torch.cuda.max_memory_allocated() - before) / 1e9

    def look(self, part):
        if part == "update":
            self.norm = self.who.gradient_norm()

    def step(self, mark=lambda part: None):
        # In place at each step: Dynamo guards them, and would compile the old ones again.
        before = {(module, name): getattr(module, name) for module, name in self.replaced}
        for (module, name), value in self.replaced.items():
            setattr(module, name, value)
        try:
            return self.who.step(*self.batch, 1, mark)
        finally:
            for (module, name), value in before.items():
                setattr(module, name, value)

    def round(self):
        self.times.append(milliseconds(self.step, 8))

    def line(self, base):
        ms, model = statistics.median(self.times), self.who.model.config
        more = ms - statistics.median(base.times) * self.tokens / base.tokens
        rate = flops.flops_per_token(model, model.block_size) * self.tokens / ms / 1e9
        found = [f"{self.name:18s} {ms:8.2f} ms {more:+7.2f}", f"{rate:6.1f} TFLOP/s"]
        if peak := None if TINY else flops.datasheet_peak(torch.cuda.get_device_name(), "bfloat16"):
            found.append(f"mfu {rate / peak.tflops:.1%}")
        found.append(f"loss {self.loss - base.loss:+.1e}, norm {self.norm / base.norm - 1:+.1e}")
        return "  ".join([*found, f"{self.gb:.1f} GB", f"first step {self.first_step:.0f} s"])


def kernels(variant):
    with profile(activities=[ProfilerActivity.CPU if TINY else ProfilerActivity.CUDA]) as watched:
        for _ in range(2):
            variant.step()
        synchronize()
    kind = "cpu" if TINY else "device"
    times = {e: getattr(e, f"self_{kind}_time_total") / 2e3 for e in watched.key_averages()}
    show(f"kernels of a step of {variant.name}: {sum(times.values()):.2f} ms")
    for e in sorted(times, key=times.get, reverse=True)[:40]:
        show(f"  {times[e]:7.3f} ms {e.count // 2:4d} x  {e.key[:150]}")


products()
done = {}
wanted = os.environ.get("VARIANTS")
for name in dict.fromkeys(["base", *(wanted.split(",") if wanted else VARIANTS)]):
    left = END - time.time()
    if left < (110 if name == "tuned" else 45):
        show(f"{name}: no time ({left:.0f} s left)")
        continue
    try:
        done[name] = variant = Variant(name)
        show(variant.line(next(iter(done.values()))))
        if name == "base":
            kernels(variant)
    except Exception as e:
        done.pop(name, None)
        show(f"{name}: {type(e).__name__}: {str(e).strip().splitlines()[:1]}")
        gc.collect()
        if not TINY:
            torch.cuda.empty_cache()
for _ in range(3):
    for variant in done.values():
        if END - time.time() > 5:
            variant.round()
show("\nmedians of interleaved rounds; the second time: more than the first for as many tokens")
for variant in done.values():
    base = next(iter(done.values()))
    show(variant.line(base), " rounds", *(f"{ms:.2f}" for ms in variant.times))
PY

export OUT LIMIT
PYTHONPATH=.:${PYTHONPATH:-} timeout -k 5 $((LIMIT + 20)) $PY "$OUT/levers.py" 2>"$OUT/levers.err"
code=$?
tail -3 "$OUT/levers.err"
exit $code
