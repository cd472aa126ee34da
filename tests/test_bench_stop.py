"""Failures and ends of a bench: the results that it keeps, and no process that survives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_process
import pytest
import stub_worker
from test_bench import SMALL, write_tokens

import bench_mfu
from bench import config as config_
from bench import process
from bench.process import Failure, Outcome, Stop, measure
from core.settings import UserError


def lives(pid: int) -> bool:
    """Does it still run? Who waits to be buried does not."""
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
    note = tmp_path / "note"
    # A program that was started in the background ignores SIGINT.
    program = """import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
import bench.process, stub_worker
bench.process.Worker(60, None, stub_worker.stuck).begin({})"""
    path = os.pathsep.join([str(config_.ROOT / "tests"), str(config_.ROOT)])
    env = {**os.environ, stub_worker.NOTE: str(note), "PYTHONPATH": path}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env=env, start_new_session=True, stderr=subprocess.PIPE
    )
    there = Path(f"{note}.there")
    pids = []
    try:
        assert wait_for(there.exists), "the worker did not start"
        pids = [int(pid) for pid in there.read_text().split()]
        assert all(lives(pid) for pid in pids)
        os.killpg(parent.pid, how)
        parent.communicate(timeout=30)
        assert wait_for(lambda: not any(lives(pid) for pid in pids))
    finally:
        parent.kill()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


# ----------------------------------------------------------------------------- the rounds


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs measure() with scripted workers: the outcomes, whether rounds were fresh, the log."""
    start = process.Worker.__init__

    def scripted_start(self: Any, timeout: float, stop: Any = None) -> None:
        start(self, timeout, stop, stub_worker.scripted)

    monkeypatch.setattr(process.Worker, "__init__", scripted_start)

    def run(jobs: dict[str, Any], points: str = "p", rounds: int = 2, **how: Any) -> Any:
        log, found = tmp_path / "log", dict[Any, Outcome]()
        given = {name: {"name": name, "log": str(log), **job} for name, job in jobs.items()}
        fresh = measure(given, {p: {"at": p} for p in points}, rounds, found, **how)
        return found, fresh, log.read_text().splitlines()

    return run


def test_rounds_are_interleaved_and_a_failure_ends_nothing_else(measured):
    jobs = {
        "a": {},
        "refused": {"refuses": ["too old"]},
        "dies": {"round p": "dies"},
        "killed": {"warm p": "killed"},
        "fails": {"round p": "failed"},
    }
    found, fresh, log = measured(jobs, "pq")
    assert not fresh and len(found[("a", "p")].rounds) == len(found[("a", "q")].rounds) == 2
    why = {name: found[name, "p"].failure for name in jobs}
    assert why["a"] is None and why["refused"].kind == "unavailable"
    assert (why["dies"].kind, why["killed"].kind, why["fails"].kind) == ("died", "died", "failed")
    assert "exit code 3" in str(why["dies"]) and "Fatal: bad address" in str(why["dies"])
    assert "SIGKILL" in str(why["killed"])
    assert found["refused", "q"].failure is why["refused"]
    assert len(found["fails", "q"].rounds) == 2  # its process lives on
    assert len(found["dies", "q"].rounds) == 2  # in a new process
    mine = [line for line in log if line.startswith(("a ", "fails "))]
    assert mine == [
        "a job", "a warm p", "fails job", "fails warm p", "a warm q", "fails warm q",
        "a round p", "fails round p", "a round q", "fails round q",
        "a round p", "a round q", "fails round q",
    ]


def test_workers_that_do_not_fit_together_get_new_processes_each_round(measured):
    _, fresh, log = measured({"a": {}, "b": {}}, budget=16)  # 6 + 6 held, and 5 needed
    assert fresh and log.count("a job") == 3 and log.count("a warm p") == 3
    assert log.count("a round p") == log.count("b round p") == 2
    assert not measured({"a": {}, "b": {}}, budget=17)[1]


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_and_a_skipped_pair_costs_nothing(measured):
    jobs = {"hangs": {"warm p": "hangs"}, "a": {}, "skipped": {}}
    how = {"skip": lambda name, point: "too long" * (name == "skipped")}
    found, _, log = measured(jobs, timeout=4.0, ahead=True, **how)
    assert found["hangs", "p"].failure.kind == "died" and "4 s" in str(found["hangs", "p"].failure)
    assert found["skipped", "p"].failure.kind == "skipped" and "skipped warm p" not in log
    assert len(found["a", "p"].rounds) == 2


@pytest.mark.parametrize("when", ["signal", "deadline"])
def test_a_stopped_bench_keeps_its_rounds(measured, when):
    stop = Stop(signals=SimpleNamespace(signal=None))  # type: ignore[arg-type]

    def end(name: str, point: str) -> None:
        if when == "signal":
            stop.signals.signal = signal.SIGINT  # type: ignore[union-attr]
        else:
            stop.deadline = time.monotonic() - 1

    found, _, log = measured({"a": {}, "b": {}}, rounds=1, stop=stop, known=end)
    assert len(found["a", "p"].rounds) == 1 and found["a", "p"].failure is None
    assert found["b", "p"].failure.kind == "stopped" and "b round p" not in log
    assert stop.why and stop.code == (130 if when == "signal" else 0)


# ----------------------------------------------------------------------------- a whole run


def stopping(at: int, how: Callable[[Any], None]) -> type[in_process.InProcess]:
    """Workers that do something to the bench at the `at`-th request to a backend."""
    asked = [0]

    class Stops(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None) -> None:
            super().__init__(timeout, stop)
            self.stop, self.counts = stop, False

        def begin(self, job: Any) -> in_process.InProcess:
            self.counts = job["job"] in ("train", "kernel", "converge")
            return super().begin(job)

        def ask(self, request: Any) -> dict[str, Any]:
            answer = super().ask(request)
            asked[0] += self.counts and "job" not in request
            if self.counts and asked[0] == at:
                how(self.stop)
            return answer

    return Stops


def run(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bench_mfu.main(argv)
    return code, out.getvalue(), err.getvalue()


def send(number: int) -> Callable[[Any], None]:
    return lambda stop: os.kill(os.getpid(), number)


def end_time(stop: Stop) -> None:
    stop.deadline = time.monotonic() - 1


ENDS = [
    (send(signal.SIGINT), 130, "Ctrl-C"),
    pytest.param(send(signal.SIGTERM), 143, "SIGTERM", marks=pytest.mark.slow),
    pytest.param(end_time, 0, "time limit", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how, code, why", ENDS, ids=["Ctrl-C", "SIGTERM", "deadline"])
def test_a_run_that_is_stopped_leaves_table_and_record(tmp_path, monkeypatch, how, code, why):
    """After the warm-up of both and the first round of manual."""
    in_process.use(monkeypatch, stopping(3, how))
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in both]
    argv = [*SMALL, "--backends=manual,sdpa", "--record=cut", f"--records_dir={tmp_path}", "--json"]
    ended, out, _ = run(argv)
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
        raise MemoryError  # no more than kill -9 does the bench do anything about it

    in_process.use(monkeypatch, stopping(6, die))
    with pytest.raises(MemoryError):
        run(["kernel", *SMALL, "--backends=manual,sdpa", "--lengths=16", "--batch_sizes=1",
             "--record=k", f"--records_dir={tmp_path}"])
    (record,) = tmp_path.glob("*_k/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["complete"] is False and content["incomplete"]
    assert [len(r["rounds"]) for r in content["rows"]] == [1, 1]


def test_a_training_that_was_cut_short_is_not_judged(tmp_path, monkeypatch):
    in_process.use(monkeypatch, stopping(2 + 2 * 9, end_time))  # in the last round but one
    argv = ["converge", *SMALL, "--backends=sdpa", "--steps=10", "--dataset=tiny", "--json"]
    code, out, _ = run([*argv, f"--data_dir={write_tokens(tmp_path)}"])
    content = json.loads(out.splitlines()[-1])
    assert code == 1 and not any("verdict" in r for r in content["rows"])
    assert [(r["status"], r["why"]) for r in content["rows"]] == [
        ("stopped", ["9 of 10 parts"])
    ] * 2


def test_what_is_stopped_before_it_began_leaves_nothing(monkeypatch, capsys):
    class Refuses(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    in_process.use(monkeypatch, Refuses)
    assert bench_mfu.main([*SMALL, "--backends=sdpa"]) == 143
    assert "SIGTERM" in capsys.readouterr().err

    class Broken(in_process.InProcess):
        def __init__(self, timeout: float, stop: Any = None) -> None:
            raise Failure("died", ["it has no torch"])

    in_process.use(monkeypatch, Broken)
    with pytest.raises(UserError, match="it has no torch"):
        bench_mfu.main([*SMALL, "--backends=sdpa"])
