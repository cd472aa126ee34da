"""Idle threads on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkout import ROOT

PROGRAM = """import os
from core.threads import wait_passively
wait_passively()
print("policy", os.environ.get("OMP_WAIT_POLICY"))"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's /proc/stat")
def test_on_a_busy_machine_idle_threads_sleep_unless_the_user_says_so() -> None:
    """While every core spins."""
    spin = [sys.executable, "-c", "while True: pass"]
    unset = {n: x for n, x in os.environ.items() if n not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    cases = [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"),
             ({"GOMP_SPINCOUNT": "10000"}, "None"), ({"OMP_NUM_THREADS": "1"}, "None")]
    others = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        programs = [subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**unset, "OMP_NUM_THREADS": "2", **env},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for env, _ in cases]
        found = [program.communicate() for program in programs]
    finally:
        for other in others:
            other.kill()
            other.wait()
    for (out, err), (env, policy) in zip(found, cases, strict=True):
        assert out == f"policy {policy}\n", env
        assert bool(err) == (not env)  # what it does it says
