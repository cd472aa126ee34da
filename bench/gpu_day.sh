#!/usr/bin/env bash
# Test and measure on a GPU that you have for ten minutes, the most valuable first.
#
#     bash bench/gpu_day.sh                                  LIMIT=540: seconds at most
#     STAGES="step decode" bash bench/gpu_day.sh             some of the stages
#     TINY=1 SCALE=5 OUT=/tmp/tiny bash bench/gpu_day.sh     try the script on a slow CPU
#
# Stages: smoke (each kernel against float64) next to train (train, resume, sample), untimed; then
# alone step and step64 (a training step), decode, kernels, qualify. When one ends, $OUT gets its
# key lines in summary.txt (read that first), and records.tgz: records/, and all output in stages/.
# Without a network: wheels of the packages that are missing in .whl/, nanoGPT in .rivals/nanoGPT.
set -u
me=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$me")/.."
OUT=${OUT:-/tmp/gpu_day}     # results
W=${W:-/tmp/gpu_work}        # caches, runs, records
LIMIT=${LIMIT:-540}
SCALE=${SCALE:-1}            # factor of each stage's seconds
PY=${PY:-python3}
STAGES=${STAGES:-smoke train step step64 decode kernels qualify}
TINY=${TINY:-}
mkdir -p "$OUT" "$W/records" "$W/stages"

if [ "${1:-}" != run ] && compgen -G ".whl/*.whl" >/dev/null; then
  $PY -m pip install -q --no-index --no-deps --upgrade --target "$W/site" .whl/*.whl
  export PYTHONPATH=$W/site${PYTHONPATH:+:$PYTHONPATH}
fi
export OUT W SCALE PY TINY PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NANOATTN_CACHE=$W/cache GLOO_SOCKET_IFNAME=lo  # Gloo's first guess may be a name without a host

rival=()
for folder in .rivals/nanoGPT ../nanoGPT; do
  [ -f "$folder/model.py" ] && rival=("--rival=nanogpt=$folder") && break
done
if [ -n "$TINY" ]; then
  device=cpu batch=4 length=8 tokens=60000 vocabulary=512 padded=512
  one=sdpa fast=sdpa,manual
  names="sdpa sdpa_flash manual"
  size=(--n_layer=2 --n_head=2 --n_embd=64 --block_size=64) peak=(--peak_tflops=1)
  batch_sizes=1,2
else
  device=cuda batch=32 length=128 tokens=3000000 vocabulary=50257 padded=50304
  one=sdpa_cudnn fast=triton,sdpa_cudnn,sdpa_flash
  names="sdpa_cudnn sdpa triton sdpa_flash sdpa_efficient flex manual tiled sdpa_math paged
    flash_attn_2 flash_attn_3 flash_attn_4 flex_flash"
  size=() peak=()
  batch_sizes=1,8,128
fi

# ---------------------------------------------------------------------------- what a stage runs

smoke() {  # five processes at a time
  echo $names | tr ' ' '\n' | PYTHONPATH=.:${PYTHONPATH:-} xargs -P 5 -I{} \
    timeout --foreground -k 5 $((110 * SCALE)) $PY "$W/smoke.py" {} $device
}

train() {
  local run=$W/run cache
  go() {
    $PY "$@"
    echo "RUN exit code $?: ${*:1:3}"
  }
  $PY "$W/tokens.py" "$W/data/zipf" $vocabulary $tokens
  go train.py config/train_gpt2.py --dataset=zipf --data_dir="$W/data" --out_dir="$run" \
    --batch_size=$batch --gradient_accumulation_steps=2 "${size[@]}" "${peak[@]}" --device=$device \
    --max_iters=30 --eval_interval=15 --eval_iters=3 --log_interval=5 --warmup_iters=10 \
    --lr_decay_iters=60 --async_checkpoint=True
  go train.py --init_from=resume --out_dir="$run" --max_iters=60 --sample_tokens=20
  for cache in dynamic auto "static --compile=True" paged; do
    go sample.py --out_dir="$run" --kv_cache=$cache --start=the --temperature=0 --num_samples=2 \
      --max_new_tokens=40 --device=$device --out="$W/${cache%% *}.jsonl"
    cmp -s "$W/dynamic.jsonl" "$W/${cache%% *}.jsonl" && echo "RUN ${cache%% *}: as dynamic" ||
      echo "RUN ${cache%% *}: other text than dynamic (allowed in bfloat16)"
  done
}

bench() {
  $PY bench_mfu.py "$1" "${size[@]}" --vocab_size=$padded --device=$device \
    --records_dir="$W/records" "${@:2}"
}

step() {
  bench train "${peak[@]}" --batch_size="$1" --gradient_accumulation_steps=1 --rounds=3 --seconds=0.7 \
    --record="train-b$1" "${rival[@]}" "${@:2}"
}

decode() {
  PYTHONPATH=.:${PYTHONPATH:-} $PY "$W/graphs.py" $device
  bench decode --backends=sdpa,paged --kv_caches=dynamic,auto,static,paged --batch_sizes=$batch_sizes \
    --prompts=$length --new_tokens=$length --compile=True --rounds=2 --minutes="$1" --record=decode
}

qualify() {
  bench qualify "${peak[@]}" --stages="$1" --backends=manual,$fast --minutes="$2" --record="$3"
}

minutes() { $PY -c "print(round($1 * $SCALE / 60, 2))"; }

if [ "${1:-}" = run ]; then
  trap 'exit 143' TERM  # after the command, which writes its record first
  "${@:2}"
  exit
fi

# ---------------------------------------------------------------------------- its programs

cat >"$W/smoke.py" <<'PY'
"""One backend against float64: eager and compiled, forward and backward, also at 1,024 tokens."""

import dataclasses
import sys
import time

import torch

from attention.names import BACKENDS
from attention.proof import probe, probe_long
from attention.select import admit
from attention.spec import Machine, Policy, Spec

name, device = sys.argv[1:]


def say(*words):  # other processes write too
    sys.stdout.write(" ".join(map(str, words)) + "\n")


here = Machine.here(device)
cuda = device == "cuda"
half = "bfloat16" if cuda else "float32"
cases = [  # also compiled?, heads, key heads, channels of a head, dtype, more of the Spec
    (True, (12, 12, 64, half), {}),
    (True, (8, 2, 128, half), {}),
    (True, (4, 4, 64, half), {"segments": True}),
    (False, (4, 2, 64, half), {"window": 100}),
    (False, (4, 4, 64, "float32"), {}),
    (False, (4, 4, 80, "float16"), {}),
]
for cache, page_size in (("dynamic", None), ("static", None), ("paged", 16)):
    options = {"grad": False, "cache": cache, "page_size": page_size}
    cases.append((True, (12, 12, 64, half), options))
for both, heads, more in cases[:2] if not cuda else cases:
    for compiled in (False, True) if both and cuda else (False,):
        spec, began, kernels = Spec(*heads, **more, compiled=compiled), time.time(), ()
        why = [str(reason) for reason in admit(name, spec, here, Policy())[1]]
        if why:
            say("refused", name, spec, why[0])
            continue
        backend = BACKENDS[name]
        if compiled:
            torch.compiler.reset()
            eager = backend.attend

            def run(q, k, v, spec, **options):
                return eager(q, k, v, spec, **options)

            made = torch.compile(run, dynamic=False, fullgraph=backend.fullgraph)
            backend = dataclasses.replace(backend, attend=made)
        try:
            found = probe(backend, spec, device)
            why, kernels = list(found.why), found.kernels
            fused = name not in ("manual", "sdpa_math", "tiled")
            if not why and not compiled and fused and spec.cache == "none":
                n = 1024 if cuda else 300
                why = list(probe_long(backend, spec, device, (1, n, n)))
        except Exception as e:
            why = [f"{type(e).__name__}: {str(e).strip().splitlines()[:1]}"]
            if type(e).__name__ == "DeviceLost":
                say("LOST", name, spec, *why)
                raise
        how = "compiled" if compiled else "eager"
        took = f"{time.time() - began:.1f} s"
        say("WRONG" if why else "OK", name, how, spec, *kernels, took, *why)
PY

cat >"$W/tokens.py" <<'PY'
"""A dataset without a text: tokens by Zipf's law, each second one follows from the one before."""

import json
import pathlib
import sys

import numpy as np

folder, V, n = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
p = 1 / np.arange(1, V + 1)
tokens = np.random.default_rng(0).choice(V, size=n, p=p / p.sum())
tokens[1::2] = (7 * tokens[::2] + 1)[: n // 2] % V
tokens[n // 10 :].astype("<u2").tofile(folder / "train.bin")
tokens[: n // 10].astype("<u2").tofile(folder / "val.bin")
characters = [chr(32 + i) for i in range(V)]
meta = {"tokenizer": {"name": "char", "vocabulary": characters, "eot": None}, "vocab_size": V}
meta["tokens"] = {"train": n - n // 10, "val": n // 10}
(folder / "meta.json").write_text(json.dumps(meta))
PY

cat >"$W/graphs.py" <<'PY'
"""Decoding with CUDA graphs: are they replayed, and are the tokens those of other caches?

Captured graphs must give those of the eager static cache, to the bit."""

import json
import statistics
import sys
import time

import torch
from torch._dynamo.utils import counters

from attention.machine.system import synchronize
from core.options import TrainConfig
from core.runtime import Setup
from inference import graphs
from inference.engine import generate, stream
from model import GPT, GPTConfig

device = torch.device(sys.argv[1])
cuda = device.type == "cuda"
setup = Setup(device, TrainConfig(dtype="bfloat16" if cuda else "float32", compile=False))


def now(device):
    synchronize(device)
    return time.perf_counter()


torch.manual_seed(0)
size = {} if cuda else {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512}
model = setup.place(GPT(GPTConfig(block_size=512, bias=False, **size)), cast=True).eval()
rows, new = (8, 100) if cuda else (2, 10)
for B in (1, 8) if cuda else (1, 2):
    for how in ({"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}):
        text = torch.randint(512, (B, 64), generator=torch.Generator().manual_seed(B)).to(device)
        found = []
        for cache in ("static", "auto", "auto"):
            torch.manual_seed(1)  # of the default generators, CUDA's too
            times, tokens = [now(device)], []
            for token in stream(model, text, 128, kv_cache=cache, **how):
                times.append(now(device))
                tokens.append(token)
            found.append(torch.stack(tokens))
            ms = 1e3 * statistics.median(b - a for a, b in zip(times[2:], times[3:]))
            print(f"CAPTURED {B} rows, {cache}: first token {times[1] - times[0]:.2f} s, "
                  f"second {times[2] - times[1]:.2f} s, then {ms:.2f} ms (synchronized)")
        same = torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        n = sum(g.replay is not None for g in graphs._captured.get(model, {}).values())
        print("CAPTURED", "EQUAL" if same else "WRONG", f"to eager static, {n} graphs")
prompt = torch.randint(512, (rows, new), generator=torch.Generator().manual_seed(0)).to(device)
want = generate(model, prompt, new, temperature=0.0)


def compiled():
    return generate(model, prompt, new, temperature=0.0, kv_cache="static", compile=True)


for call in range(3):  # the first compiles and records
    began = now(device)
    same = float((compiled() == want).float().mean())
    took = now(device) - began
    print(f"compiled static, call {call}: {took:.2f} s, {same:.1%} of the tokens as dynamic")
with torch.profiler.profile() as profile:
    compiled()
calls = {e.key: e.count for e in profile.key_averages() if e.key.startswith("cuda")}
skips = {key: n for key, n in counters["inductor"].items() if "cudagraph" in key}
replayed = "replayed" if calls.get("cudaGraphLaunch", 0) >= 0.9 * new else "NOT REPLAYED"
print("GRAPHS", replayed, json.dumps(calls), json.dumps(skips))
PY

# ---------------------------------------------------------------------------- the stages

BAD='WRONG|LOST|DISAGREE|Error|error:'
KEYS='^(GRAPHS|CAPTURED|RUN|peak|compiled|Fastest|\| )'
stage() {  # name, seconds at most, command
  local name=$1 most=$(($2 * SCALE)) from=$SECONDS left=$((LIMIT - SECONDS - 3)) code
  shift 2
  [[ " $STAGES " == *" $name "* ]] || return 0
  ((most > left)) && most=$left
  if ((most < 20)); then
    echo "== $name: no time" >>"$OUT/summary.txt"
    return
  fi
  # An Inductor cache for each stage: one that is killed may leave a damaged file.
  local text=$W/stages/$name.txt
  TORCHINDUCTOR_CACHE_DIR=$W/inductor-$name timeout -k 15 "$most" "$@" >"$text" 2>&1
  code=$?
  {
    echo "== $name: exit code $code after $((SECONDS - from)) of $most s, $(grep -c ^OK "$text") OK"
    grep -hE "$BAD" "$text" | cut -c-230 | head -40
    grep -hE "$KEYS" "$text" | grep -vE "$BAD" | cut -c-230 | head -60
  } >>"$OUT/summary.txt"
  tar czf "$W/$name.tgz" -C "$W" records stages && mv "$W/$name.tgz" "$OUT/records.tgz"
}

stage smoke 115 bash "$me" run smoke &
first=$!
stage train 125 bash "$me" run train
wait $first
# Imports come before --minutes.
stage step 185 bash "$me" run step $batch --backends=$fast --profile --minutes="$(minutes 170)"
stage step64 75 bash "$me" run step $((2 * batch)) --backends=$one --minutes="$(minutes 62)"
stage decode 90 bash "$me" run decode "$(minutes 50)"
stage kernels 50 bash "$me" run qualify 3 "$(minutes 40)" kernels
left=$(((LIMIT - SECONDS - 20) / SCALE))
stage qualify 400 bash "$me" run qualify 1,2,6 "$(minutes $left)" qualify
cat "$OUT/summary.txt"
