"""The benchmark behind bench_mfu.py: one process a candidate, interleaved rounds, records.

    bench_mfu.py -> a mode: its plans -> rounds.py -> workers.py, one process a candidate
                    rounds as JSON -> rows -> record.py: figures, report.py: tables

settings.py               options, a dataclass a mode
job.py, begin.py          what is measured, on which machine, by which candidates
train.py, kernel.py, decode.py, converge.py   a mode each: what is timed, its figures, its columns
candidates.py, hf.py      what is measured: our model, nanoGPT's, transformers'
workers.py, rounds.py, results.py   processes, their turns, a result a row
runs.py, qualify.py       whole runs of train.py against nanoGPT's; all modes on a new machine
proof.py                  the tests of `python -m attention check`, as a stage of qualify
reference.py, parts.py    the first step in float32; rooflines of a step
machine.py                memory, bandwidth, description
record.py, verify.py      write a record; compute its figures again and compare
report.py, tables.py      facts, tables, conclusions; medians, noise
board.py                  all records as docs/BOARD.md
compare.py                finished runs of train.py side by side
plan/                     estimates for other machines
evaluate.py               lm-evaluation-harness with our kernels
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # of the repository
Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer
