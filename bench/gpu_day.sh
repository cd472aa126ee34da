#!/usr/bin/env bash
# Test and measure on a GPU that you have for ten minutes, the most valuable first.
#
#     bash bench/gpu_day.sh                                  LIMIT=540: seconds at most
#     STAGES=levers LIMIT=260 bash bench/gpu_day.sh          what options save of a training step
#     TINY=1 SCALE=5 OUT=/tmp/tiny bash bench/gpu_day.sh     try the script on a slow CPU
#
# Stages: smoke (each kernel against float64), tests (caches, CUDA graphs) and train (train, resume,
# sample) together, untimed; then alone step and step64 (a training step), decode, kernels, levers
# (only if named), qualify. When one ends, $OUT gets its key lines in summary.txt (read that first),
# and records.tgz: records/, and all output in stages/. Without a network: wheels of the missing
# packages (also pytest and hypothesis) in .whl/, nanoGPT in .rivals/nanoGPT.
set -u
me=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$me")/.."
OUT=${OUT:-/tmp/gpu_day}     # results
W=${W:-/tmp/gpu_work}        # caches, runs, records
LIMIT=${LIMIT:-540}
SCALE=${SCALE:-1}            # factor of each stage's seconds
PY=${PY:-python3}
STAGES=${STAGES:-smoke tests train step step64 decode kernels qualify}
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
  device=cpu batch=4 length=8 seconds=40
  one=sdpa fast=sdpa,manual vary=residual_dtype=autocast
  names="sdpa sdpa_flash manual"
  size=(--n_layer=2 --n_head=2 --n_embd=64 --block_size=64) peak=(--peak_tflops=1)
  batch_sizes=1,2
else
  device=cuda batch=32 length=128 seconds=45
  one=sdpa_cudnn fast=triton,sdpa_cudnn,sdpa_flash
  vary=residual_dtype=float32,gradient_checkpointing=True,compile_mode=reduce-overhead
  vary+=,compile_mode=max-autotune-no-cudagraphs
  names="sdpa_cudnn sdpa triton sdpa_flash sdpa_efficient flex manual tiled sdpa_math paged
    flash_attn_2 flash_attn_3 flash_attn_4 flex_flash"
  size=() peak=()
  batch_sizes=1,8,128
fi

# ---------------------------------------------------------------------------- what a stage runs

smoke() {  # five processes at a time
  echo $names | tr ' ' '\n' | PYTHONPATH=.:${PYTHONPATH:-} xargs -P 5 -I{} \
    $PY "$W/smoke.py" {} $device $seconds
}

train() {
  local run=$W/run cache
  go() {
    $PY "$@"
    echo "RUN exit code $?: ${*:1:3}"
  }
  cat docs/*.md >"$W/pages.txt"
  go -m data shakespeare_char --source="$W/pages.txt" --out_dir="$W/data/pages"
  go train.py config/train_gpt2.py --dataset=pages --data_dir="$W/data" --out_dir="$run" \
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
  $PY bench_mfu.py "$1" "${size[@]}" --vocab_size=50304 --device=$device \
    --records_dir="$W/records" "${@:2}"
}

step() {
  bench train "${peak[@]}" --batch_size="$1" --gradient_accumulation_steps=1 --rounds=3 --seconds=0.7 \
    --record="train-b$1" "${@:2}"
}

tests() { $PY -m pytest -q -rf -m gpu tests/test_generate.py tests/test_serve.py; }

decode() {
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
"""Tests of `python -m attention check` on a backend, for some seconds, compiled ones first."""

import sys
import time

from attention import get
from attention.check import command
from attention.spec import Machine

name, device, seconds = sys.argv[1:]
end = time.monotonic() + float(seconds)
here, half = Machine.here(device), "bfloat16" if device == "cuda" else "float32"
order = {"torch.compile": 0, "causal": 1, "caches": 2}
dtypes = (half, *{"float32", "float16"} - {half}) if device == "cuda" else (half,)
for dtype in dtypes:
    for item in sorted(command.items([dtype], quick=True), key=lambda i: order.get(i.features[0], 3)):
        if time.monotonic() < end:
            found = command.judge(get(name), item, here, device)
            word = {"right": "OK", "wrong": "WRONG"}.get(found.verdict, found.verdict)
            line = " ".join(map(str, (word, name, item.name, dtype, *found.why)))
            sys.stdout.write(line + "\n")  # other processes write too
            if found.lost:
                sys.exit(f"LOST the device: {line}")
PY

# ---------------------------------------------------------------------------- the stages

BAD='WRONG|LOST|DISAGREE|Error|error:|^FAILED|No module'
KEYS='^(RUN|peak|Fastest|\| )'
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
stage tests 125 bash "$me" run tests &
stage train 125 bash "$me" run train
wait
# Imports come before --minutes.
stage step 185 bash "$me" run step $batch --backends=$fast "${rival[@]}" --profile \
  --minutes="$(minutes 170)"
stage step64 75 bash "$me" run step $((2 * batch)) --backends=$one --minutes="$(minutes 62)"
stage decode 90 bash "$me" run decode "$(minutes 50)"
stage kernels 50 bash "$me" run qualify 3 "$(minutes 40)" kernels
stage levers 250 bash "$me" run step $batch --backends=$one --vary=$vary --record=levers \
  --minutes="$(minutes 235)"
left=$(((LIMIT - SECONDS - 20) / SCALE))
stage qualify 400 bash "$me" run qualify 1,2,6 "$(minutes $left)" qualify
cat "$OUT/summary.txt"
