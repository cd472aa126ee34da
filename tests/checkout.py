"""The project's own files, in a checkout where somebody works: answers, kernels, records."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def tracked() -> frozenset[Path] | None:
    """Files that git tracks; None where the project is no git checkout."""
    try:
        found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    names = found.stdout.split("\0")
    return frozenset(ROOT / name for name in names) if "train.py" in names else None


def files(*patterns: str) -> list[Path]:
    """Sorted files that match a glob pattern of the root; without git a user's own too."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    known = tracked()
    return sorted(found if known is None else found & known)
