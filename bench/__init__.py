"""The benchmark behind bench_mfu.py; docs/DESIGN.md, "The bench", has its files in order."""

import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]  # a JSON object


def load(name: str) -> Any:
    """The class of a job's "bench.train:Training"."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)
