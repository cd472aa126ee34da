"""The benchmark behind bench_mfu.py; docs/DESIGN.md, "The bench", has its files in order."""

from pathlib import Path
from typing import Any

import core.process  # before torch: makes Ctrl-C one line

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]  # a JSON object
