"""The benchmark behind bench_mfu.py: one process a candidate, interleaved rounds, records.

settings.py     options, a dataclass a mode
job.py          the machine, the backends, and what a mode requests of each candidate
train.py kernel.py decode.py converge.py   a mode each: what is timed, its figures, its columns
candidates.py hf.py   what is measured: our model, nanoGPT's, transformers'
workers.py rounds.py  a process a candidate; their turns; a result a row
record.py verify.py   write a record; compute its figures again and compare
report.py tables.py   facts, tables, conclusions; medians, noise
compare.py      whole runs: train.py next to nanoGPT's, finished runs side by side
qualify.py      all modes on a new machine
machine.py parts.py   memory, bandwidth, description; rooflines of a step
board.py        all records as docs/BOARD.md
plan/ evaluate.py     estimates for other machines; lm-evaluation-harness with our kernels
"""

import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # of the repository
Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer


def load(name: str) -> Any:
    """Return the class that a job names, as in "bench.train:Training"."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)
