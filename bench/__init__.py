"""The benchmark behind bench_mfu.py: one process a candidate, interleaved rounds, records.

The flow (docs/DESIGN.md, "The bench"): settings, job, a mode (train, kernel, decode, converge),
rounds, workers, candidates (hf: transformers'), record and verify, report and tables. Next to it:
compare (whole runs), qualify (all modes), board, machine, parts (rooflines), plan/, evaluate.
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
