"""The benchmark behind bench_mfu.py: one process a candidate, interleaved rounds, records.

    bench_mfu.py -> a mode -> rounds.py -> worker.py, one process a candidate -> rounds as JSON
                              rounds.py -> rows -> record.py: figures, tables, the record

config.py                 options
worker.py                 the process: a job in, then a round for each request
rounds.py                 starts workers, interleaves their rounds, keeps what failed as a row
candidates.py, hf.py      what is measured: our model, nanoGPT's, transformers'
train.py, kernel.py, decode.py, converge.py   a mode each: what is timed, its figures, its columns
runs.py, qualify.py       whole runs of train.py against nanoGPT's; all modes on a new machine
parts.py                  time of a step by its parts, next to its rooflines
machine.py                memory, bandwidth, description
record.py, board.py       write, read and recompute a record; docs/BOARD.md
tables.py                 medians, noise, tables
plan/                     estimates for other machines
"""

from typing import Any

Json = dict[str, Any]  # a JSON object: a row, a record, a request, an answer
