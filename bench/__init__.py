"""The benchmark behind bench_mfu.py: one process per backend, interleaved rounds, records.

config.py       options: the bench's own, and train.py's for the model
bench.py        state and methods that all modes share
modes.py        train, kernel, decode, converge: requests to the workers, and their rows
process.py      worker processes and interleaved rounds
worker.py       the process that measures one backend; job.py: its settings and model
training.py     training steps (train, converge)
kernels.py      attention calls (kernel)
decoding.py     generated tokens (decode)
machine.py      clock, memory, peak rate, bandwidth, description of the device
candidates.py   our model, nanoGPT's, transformers' GPT-2, a plain training step
hf.py           --hf: any causal language model of transformers
fitting.py      --batch_size=auto: the largest batch that fits
profiling.py    time of a step by its parts
roofline.py     least time of each part, from the sizes alone
rows.py         results -> rows; stats.py: medians, quartiles, noise
tables.py       rows -> tables and conclusions; pictures.py: plots
records.py      records; compare.py: two side by side; verify.py: checks; board.py: docs/BOARD.md
qualify.py      all modes on a new machine; proof.py: correctness of each backend
plan/           a training step on many GPUs
support.py      the support tables of README and docs; hf_table.py: the one of docs/HF.md
against_nanogpt.py  whole runs of train.py against nanoGPT's
"""

from typing import Any

Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer
