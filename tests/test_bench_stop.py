"""Failures and ends of a bench: the results that it keeps, and no process that survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import in_process
import pytest
import stub_worker
from conftest import few
from test_bench import SMALL, run, small, write_tokens

import bench_mfu
from bench import ROOT, process
from bench.config import BenchConfig
from bench.process import Failure, Stop
from bench.rounds import Run
from core.settings import UserError

STUB = str(ROOT / "tests" / "stub_worker.py")


def lives(pid: int) -> bool:
    """Return False for a zombie too."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and "Z" not in found.stdout


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_survives_its_bench(tmp_path, how):
    """kill -9, or Ctrl-C, which a terminal sends to the whole process group."""
    # A program that was started in the background ignores SIGINT.
    program = f"""import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)
from bench.process import Stop, Worker
Worker.command = (sys.executable, {STUB!r}, "stuck")
Worker({{}}, 60, Stop())"""
    pids_file = tmp_path / "pids"
    env = {**os.environ, stub_worker.PIDS: str(pids_file), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env=env, start_new_session=True, stderr=subprocess.PIPE
    )
    pids = []
    try:
        assert wait_for(pids_file.exists), "the worker did not start"
        pids = [int(pid) for pid in pids_file.read_text().split()]
        assert all(lives(pid) for pid in pids)
        os.killpg(parent.pid, how)
        parent.communicate(timeout=30)
        assert wait_for(lambda: not any(lives(pid) for pid in pids))
    finally:
        parent.kill()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


# --- the rounds ---


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs scripted workers: the rows by name and point, whether rounds were fresh, the log."""
    monkeypatch.setattr(process.Worker, "command", (sys.executable, STUB))

    def run(jobs: dict[str, Any], points: str = "p", limit: int = 100, stop: Stop | None = None,
            timeout: float = 60.0, skip: Any = lambda name, point: "") -> Any:
        config = BenchConfig(rounds=2, timeout=timeout, device="cpu")
        part: dict[str, Any] = {"machine": {"memory_limit": limit, "peak_measured": False},
                                "rows": []}
        bench = Run("train", config, "cpu", [*jobs], {}, part, stop or Stop())
        given = {name: {"name": name, "log": f"{tmp_path / 'log'}", **job}
                 for name, job in jobs.items()}
        rows = bench.measure(given, [{"at": p} for p in points], skip=skip)
        log = (tmp_path / "log").read_text().splitlines()
        (tmp_path / "log").unlink()
        return {(r["backend"], r["point"]["at"]): r for r in rows}, part["fresh_rounds"], log

    return run


def test_rounds_are_interleaved_and_a_failure_ends_nothing_else(measured):
    jobs = {"a": {}, "refused": {"job": "refuses"}, "dies": {"round p": "dies"},
            "killed": {"warm p": "killed"}, "fails": {"round p": "fails"}}
    found, fresh, log = measured(jobs, "pq")
    assert not fresh and len(found["a", "p"]["rounds"]) == len(found["a", "q"]["rounds"]) == 2
    assert {name: found[name, "p"]["status"] for name in jobs} == {
        "a": "ok", "refused": "unavailable", "dies": "failed", "killed": "failed", "fails": "failed"
    }
    died, killed = (found[name, "p"]["why"][0] for name in ("dies", "killed"))
    assert "exit code 3" in died and "Fatal: bad address" in died and "SIGKILL" in killed
    assert found["refused", "q"]["why"] == ["too old"] and log.count("refused job") == 1
    assert len(found["fails", "q"]["rounds"]) == 2  # its process lives on
    assert len(found["dies", "q"]["rounds"]) == 2  # in a new process
    mine = [line for line in log if line.startswith(("a ", "fails "))]
    assert mine == [
        "a job", "a warm p", "a round p", "fails job", "fails warm p", "fails round p",
        "a warm q", "a round q", "fails warm q", "fails round q",
        "a round p", "a round q", "fails round q",
    ]


def test_workers_that_do_not_fit_together_get_new_processes_each_round(measured):
    """6 + 6 bytes are held and 5 needed; nine tenths of the limit may be filled."""
    _, fresh, log = measured({"a": {}, "b": {}}, limit=18)
    assert fresh and log.count("a job") == log.count("a warm p") == log.count("a round p") == 2
    _, fresh, log = measured({"a": {}, "b": {}}, limit=19)
    assert not fresh and log.count("a job") == 1 and log.count("a round p") == 2


@pytest.mark.parametrize("limit", few([1, 100]), ids=["fresh", "asleep"])
def test_no_candidate_begins_when_little_time_is_left(measured, limit):
    stop = Stop(time.monotonic() + 1.3)
    found, fresh, log = measured({"a": {"round p": "slow"}, "b": {}}, limit=limit, stop=stop)
    assert found["b", "p"]["status"] == "stopped" and "b job" not in log
    assert found["a", "p"]["status"] == "ok" and fresh == (limit == 1)


def test_a_process_that_cannot_begin_again_keeps_the_rounds_of_other_points(measured):
    """New processes in each round; the second one is refused."""
    found, _, _ = measured({"a": {"again": "refuses"}}, "pq", limit=1)
    assert found["a", "q"]["status"] == "unavailable" and len(found["a", "p"]["rounds"]) == 2


def test_a_worker_that_hangs_is_ended_and_a_skipped_pair_costs_nothing(measured):
    jobs = {"hangs": {"warm p": "hangs"}, "a": {}, "skipped": {}}
    skip = {"skipped": "too long"}.get
    found, _, log = measured(jobs, timeout=2.0, skip=lambda name, _: skip(name, ""))
    assert found["hangs", "p"]["status"] == "failed" and "2 s" in found["hangs", "p"]["why"][0]
    assert found["skipped", "p"]["why"] == ["too long"] and "skipped job" not in log
    assert len(found["a", "p"]["rounds"]) == 2


@pytest.mark.parametrize("when", ["signal", "deadline"])
def test_a_stop_ends_a_long_round_and_keeps_the_others(measured, when):
    stop = Stop(signals=SimpleNamespace(signal=None))  # type: ignore[arg-type]

    def end() -> None:
        if when == "signal":
            stop.signals.signal = signal.SIGINT  # type: ignore[union-attr]
        else:
            stop.deadline = time.monotonic() - process.GRACE - 1

    def later(name: str, point: Any) -> str:
        if name == "b":
            threading.Timer(0.5, end).start()
        return ""

    found, _, _ = measured({"a": {}, "b": {"warm p": "hangs"}}, stop=stop, skip=later)
    assert found["a", "p"]["status"] == "ok" and len(found["a", "p"]["rounds"]) == 1
    assert found["b", "p"]["status"] == "stopped" and found["b", "p"]["why"] == [stop.why]
    assert stop.why and stop.code == (130 if when == "signal" else 0)


# --- a whole run ---


def stopping(at: int, how: Callable[[Any], None]) -> type[in_process.InProcess]:
    """Return workers that do something to the bench after the `at`-th request to a backend."""
    asked = [0]

    class Stops(in_process.InProcess):
        counts = False

        def __init__(self, job: Any, timeout: float, stop: Any) -> None:
            super().__init__(job, timeout, stop)
            self.stop, self.counts = stop, job["job"] in ("train", "kernel", "converge")

        def ask(self, request: Any) -> dict[str, Any]:
            answer = super().ask(request)
            asked[0] += self.counts
            if self.counts and asked[0] == at:
                how(self.stop)
            return answer

    return Stops


def send(number: int) -> Callable[[Any], None]:
    return lambda stop: os.kill(os.getpid(), number)


def end_time(stop: Stop) -> None:
    stop.deadline = time.monotonic() - 1


@pytest.mark.parametrize("how, code, why", [
    (send(signal.SIGINT), 130, "Ctrl-C"),
    pytest.param(send(signal.SIGTERM), 143, "SIGTERM", marks=pytest.mark.slow),
    pytest.param(end_time, 0, "time limit", marks=pytest.mark.slow),
], ids=["Ctrl-C", "SIGTERM", "deadline"])
def test_a_run_that_is_stopped_leaves_table_and_record(tmp_path, monkeypatch, how, code, why):
    """After the warm-up and the first round of manual."""
    in_process.use(monkeypatch, stopping(2, how))
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in both]
    ended, out = run([*SMALL, "--backends=manual,sdpa", "--record=cut",
                      f"--records_dir={tmp_path}", "--json"])
    content = json.loads(out.splitlines()[-1])
    assert ended == code and [signal.getsignal(number) for number in both] == before
    assert content["complete"] is False and why in content["incomplete"]
    of = {r["backend"]: r for r in content["rows"]}
    assert len(of["manual"]["rounds"]) == 1 and of["manual"]["mfu"] > 0
    assert of["sdpa"]["status"] == "stopped" and why in of["sdpa"]["why"][0]
    (record,) = tmp_path.glob("*_cut")
    assert json.loads((record / "record.json").read_text(encoding="utf-8")) == content
    page = (record / "README.md").read_text(encoding="utf-8")
    assert all("INCOMPLETE" in text and why in text for text in (page, out))
    assert not list(record.glob("*.part"))


def test_a_run_that_is_killed_leaves_the_rounds_that_had_ended(tmp_path, monkeypatch):
    def die(stop: Stop) -> None:
        raise MemoryError  # the bench does no more about it than about kill -9

    in_process.use(monkeypatch, stopping(6, die))
    with pytest.raises(MemoryError):
        run([*small("kernel"), "--backends=manual,sdpa", "--lengths=16", "--batch_sizes=1",
             "--record=k", f"--records_dir={tmp_path}"])
    (record,) = tmp_path.glob("*_k/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["complete"] is False and content["incomplete"]
    assert [len(r["rounds"]) for r in content["rows"]] == [1, 1]


def test_a_training_that_was_cut_short_is_not_judged(tmp_path, monkeypatch):
    in_process.use(monkeypatch, stopping(2 + 2 * 9, end_time))  # in the last round but one
    argv = [*small("converge"), "--backends=sdpa", "--steps=10", "--dataset=tiny", "--json"]
    code, out = run([*argv, f"--data_dir={write_tokens(tmp_path)}"])
    content = json.loads(out.splitlines()[-1])
    assert code == 1 and not any("verdict" in r for r in content["rows"])
    assert [(r["status"], r["why"]) for r in content["rows"]] == [
        ("stopped", ["9 of 10 parts"])
    ] * 2


def test_what_is_stopped_before_it_began_leaves_nothing(monkeypatch, capsys):
    class Stopped(in_process.InProcess):
        def __init__(self, job: Any, timeout: float, stop: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    in_process.use(monkeypatch, Stopped)
    assert bench_mfu.main([*SMALL, "--backends=sdpa"]) == 143
    assert "SIGTERM" in capsys.readouterr().err

    class Broken(in_process.InProcess):
        def __init__(self, job: Any, timeout: float, stop: Any) -> None:
            raise Failure("died", ["it has no torch"])

    in_process.use(monkeypatch, Broken)
    with pytest.raises(UserError, match="it has no torch"):
        bench_mfu.main([*SMALL, "--backends=sdpa"])
