"""Idle threads on a busy machine."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from checkout import ROOT

from core import terminal

STAT = "cpu  0 0 0 0 0 0 0 0\n{}intr 5\n"  # of Linux: user, nice, system, idle, waiting, ...
PROGRAM = """import os
from core.terminal import wait_passively
wait_passively()
print("policy", os.environ.get("OMP_WAIT_POLICY"))"""


@pytest.mark.parametrize("mine, share", [({0}, 0), ({1}, 1), ({0, 1}, 0.5), ({10}, 0.25), ({7}, 0)])
def test_only_the_cores_that_it_may_use_are_looked_at(mine, share, monkeypatch) -> None:
    cores = {"cpu0": (0, 4), "cpu1": (4, 0), "cpu10": (1, 3)}  # busy, and idle
    looks = iter([0, 1])

    def proc_stat(path: str, **_: object) -> io.StringIO:
        n = next(looks)
        lines = (f"{c} {n * b} 0 0 {n * idle} 0 0 0 0 0 0\n" for c, (b, idle) in cores.items())
        return io.StringIO(STAT.format("".join(lines)))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine, raising=False)
    monkeypatch.setattr(terminal, "open", proc_stat, raising=False)
    assert terminal.cores_in_use() == share


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
