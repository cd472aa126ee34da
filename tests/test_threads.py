"""Idle threads on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core import threads

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """import os
from core.threads import wait_passively
wait_passively()
print("policy", os.environ.get("OMP_WAIT_POLICY"))"""


def policy(**env: str) -> str:
    """What the program prints while every core spins."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        own = {**os.environ, "OMP_NUM_THREADS": "2", **env}
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=own, text=True,
                              capture_output=True, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return done.stderr + done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's /proc/stat")
def test_on_a_busy_machine_idle_threads_sleep_unless_the_user_says_so(monkeypatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert 0 <= threads.cores_in_use() <= 1
    assert policy().endswith("policy passive\n") and "OMP_WAIT_POLICY" in policy()
    assert policy(OMP_WAIT_POLICY="active") == "policy active\n"
    assert policy(GOMP_SPINCOUNT="10000") == policy(OMP_NUM_THREADS="1") == "policy None\n"
