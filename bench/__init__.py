"""The benchmark behind bench_mfu.py: one process per backend, interleaved rounds, records.

config.py, bench.py, modes.py   options; state of a run; train, kernel, decode, converge
process.py, worker.py, job.py   worker processes and interleaved rounds
training.py, kernels.py, decoding.py, proof.py   what a worker measures
candidates.py, hf.py            our model, nanoGPT's, transformers' GPT-2; --hf
machine.py                      clock, memory, bandwidth
profiling.py, roofline.py       time of a step by its parts, and its least time
rows.py, stats.py, tables.py, records.py   results -> rows -> tables -> records
verify.py, board.py            checks of records; docs/BOARD.md
qualify.py, plan/               all modes on a new machine; a step on many GPUs
support.py, hf_table.py         tables of README and docs
tasks.py, harness.py            tasks for lm-evaluation-harness; the harness with our kernels
against_nanogpt.py              whole runs of train.py against nanoGPT's
"""

from typing import Any

Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer
