"""The project's own files, in a checkout with answers, kernels and records of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def tracked() -> frozenset[Path] | None:
    """None where the project is no git checkout."""
    try:
        found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    names = found.stdout.split("\0")
    return frozenset(ROOT / name for name in names) if "train.py" in names else None


def files(*patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    known = tracked()
    return sorted(found if known is None else found & known)


def python(*words: str, cwd: Path = ROOT, input: str | None = None, timeout: float = 600,
           **env: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, input=input, timeout=timeout,
                          capture_output=True, text=True)
