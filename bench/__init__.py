"""The benchmark behind bench_mfu.py: one process a candidate, interleaved rounds, records.

    bench_mfu.py -> a mode -> rounds.py -> worker.py, one process a candidate -> rounds as JSON
                              rounds.py -> rows -> record.py: figures, tables, the record

config.py                 options
rounds.py, process.py     starts workers, interleaves their rounds, keeps what failed as a row
worker.py, job.py         the process: a job in, then a round for each request
candidates.py, hf.py      what is measured: our model, nanoGPT's, transformers'
train.py, kernel.py, decode.py, converge.py   a mode each: what is timed, its figures, its columns
runs.py, qualify.py       whole runs of train.py against nanoGPT's; all modes on a new machine
proof.py                  the tests of `python -m attention check`, as a stage of qualify
parts.py                  time of a step by its parts, next to its rooflines
machine.py                memory, bandwidth, description
record.py, verify.py      write a record; compute its figures again and compare
report.py                 its text: facts, tables, conclusions
board.py                  all records as docs/BOARD.md
compare.py                finished runs of train.py side by side
tables.py                 medians, noise, tables
plan/                     estimates for other machines
evaluate.py               lm-evaluation-harness with our kernels
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # of the repository
Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer
