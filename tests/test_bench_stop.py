"""Failures and ends of a bench: the results that it keeps, and no process that survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import in_process
import pytest
import stub_worker
from test_bench import SMALL, run, small, write_tokens

import bench_mfu
from bench import ROOT, rounds
from bench.job import Bench, Plan
from bench.settings import Train
from bench.workers import GRACE, Failure, Progress, Stop, Worker
from core.settings import UserError

STUB = "stub_worker:Stub"


def lives(pid: int) -> bool:
    """Return False for a zombie too."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and "Z" not in found.stdout


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_survives_its_bench(tmp_path, how):
    """kill -9, or Ctrl-C, which a terminal sends to the whole process group."""
    pids_file = tmp_path / "pids"
    job = {"name": "a", "log": f"{tmp_path / 'log'}", "job": "has a child", "device": "cpu",
           "pids": f"{pids_file}"}
    # A program that was started in the background ignores SIGINT.
    program = f"""import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from bench.workers import Stop, Worker
worker = Worker({STUB!r}, {job!r}, 600, Stop())
try:
    worker.ask({{}})
finally:
    worker.close()"""
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
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


@pytest.mark.slow
def test_processes_that_end_are_reasons(tmp_path):
    """They are real; of those that hang one is too slow, one's bench has no time, one's Ctrl-C."""
    log = {"log": f"{tmp_path / 'log'}", "device": "cpu"}
    want = {"dies": ("died", "exit code 3"), "killed": ("died", "SIGKILL"),
            "hangs": ("died", "20 s"), "refuses": ("unavailable", "too old"),
            "fails": ("failed", "RuntimeError: no"), "late": ("stopped", "time limit"),
            "signal": ("stopped", "Ctrl-C")}
    for how, (kind, why) in want.items():
        stop: Any = Stop(signals=SimpleNamespace(signal=None))  # type: ignore[arg-type]
        does = "hangs" if kind == "stopped" else how
        worker = Worker(STUB, {"name": how, "round p": does, **log}, 20, stop)
        try:
            assert worker.ask({}) == {} and worker.setup_s > 0
            stop.deadline = time.monotonic() - GRACE - 1 if how == "late" else None
            stop.signals.signal = signal.SIGINT if how == "signal" else None
            with pytest.raises(Failure, match=why) as e:
                worker.ask({"at": "p"})
            assert (e.value.kind, e.value.built) == (kind, True)
            assert stop.code == (130 if how == "signal" else 0)
            assert how != "dies" or "Fatal: bad address" in str(e.value)
            if how in ("refuses", "fails"):
                assert worker.ask({"at": "q"})["ms"] == 1.0
        finally:
            worker.close()


# --- the rounds ---


class Scripted(in_process.InProcess):
    """Its stub cannot end this process: that would be a death."""

    def send(self, request: Any) -> None:
        what = f"{'warm' if request.get('warm_up') else 'round'} {request.get('at')}"
        if self.job.get(what) in ("dies", "hangs"):
            self.answers.append(b"")
        else:
            super().send(request)

    def receive(self) -> dict[str, Any]:
        if not self.answers[0]:
            raise Failure("died", "made up")
        found = super().receive()
        self.held_bytes = stub_worker.HELD
        return found


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs scripted workers: the rows by name and point, the content, the log."""
    monkeypatch.setattr(rounds, "Worker", Scripted)

    def run(jobs: dict[str, Any], points: str = "p", limit: int = 100, stop: Stop | None = None,
            device: str = "cpu", **more: Any) -> Any:
        here = {"memory_limit": limit, "dtype": "float32", "kind": "cpu"}
        bench = Bench("train", Train(vocab_size=64, rounds=2), device, (), here, 64)
        given = {name: {"name": name, "log": f"{tmp_path / 'log'}", "device": "cpu", **job}
                 for name, job in jobs.items()}
        plan = Plan(STUB, given, 3, [], [{"at": p} for p in points], **more)
        content = rounds.measure(bench, [plan], stop or Stop(), Progress())
        log = (tmp_path / "log").read_text().splitlines()
        (tmp_path / "log").unlink()
        return {(r["backend"], r["point"]["at"]): r for r in content["rows"]}, content, log

    return run


def test_rounds_are_interleaved_and_a_failure_ends_nothing_else(measured):
    jobs = {"a": {}, "refused": {"job": "refuses"}, "dies": {"round p": "dies"},
            "fails": {"round p": "fails"}, "hangs": {"warm p": "hangs"}, "skipped": {}}
    skip = {"skipped": "too long"}
    found, content, log = measured(jobs, "pq", skip=lambda name, *_: skip.get(name, ""))
    assert not content["fresh_rounds"] and content["complete"]
    assert {name: found[name, "p"]["status"] for name in jobs} == {
        "a": "ok", "refused": "unavailable", "dies": "failed", "fails": "failed",
        "hangs": "failed", "skipped": "skipped",
    }
    assert found["refused", "q"]["why"] == ["too old"] and log.count("refused job") == 1
    assert found["skipped", "p"]["why"] == ["too long"] and "skipped job" not in log
    for name in ("a", "fails", "dies"):  # the last one in a new process
        assert len(found[name, "q"]["rounds"]) == 3
    mine = [line for line in log if line.startswith(("a ", "fails "))]
    assert mine == [
        "a job", "a warm p", "a round p", "fails job", "fails warm p", "fails round p",
        "a warm q", "a round q", "fails warm q", "fails round q",
        *["a round p", "a round q", "fails round q"] * 2,
    ]


def test_on_a_gpu_three_warm_up_together_and_none_while_a_round_is_timed(measured):
    jobs = {"a": {}, "b": {}, "c": {}, "d": {}}
    _, _, log = measured(jobs, device="cuda", stop=Stop(time.monotonic() + 600))
    assert log[:6] == [f"{name} {what}" for name in "abc" for what in ("job", "warm p")]
    assert log[6:12] == ["a round p", "b round p", "c round p"] * 2  # a row has two rounds
    assert log[12:16] == ["d job", "d warm p", "d round p", "d round p"]
    assert log[16:] == [f"{name} round p" for name in "abcd"]


def test_processes_that_do_not_fit_together_are_new_in_each_round(measured):
    """6 + 6 bytes are held and 5 needed; nine tenths of the limit may be filled."""
    _, content, log = measured({"a": {}, "b": {}}, limit=18)
    assert content["fresh_rounds"]
    assert log.count("a job") == log.count("a warm p") == log.count("a round p") == 3
    _, content, log = measured({"a": {}, "b": {}}, limit=19)
    assert not content["fresh_rounds"] and log.count("a job") == 1 and log.count("a round p") == 3
    found, content, log = measured({"a": {}, "b": {}, "c": {}}, limit=18, one_process=True)
    assert all(len(r["rounds"]) == 3 for r in found.values()) and not content["fresh_rounds"]
    assert [log.count(f"{name} job") for name in "abc"] == [1, 1, 1]  # each compiles once
    found, _, _ = measured({"a": {"again": "refuses"}}, "pq", limit=1)  # the second process
    assert found["a", "q"]["status"] == "unavailable" and len(found["a", "p"]["rounds"]) == 3


def test_what_has_no_time_left_is_named_with_the_time_it_takes(measured):
    stop = Stop(time.monotonic() + 1.2)
    jobs: dict[str, Any] = {"a": {"round p": "slow"}, "b": {"round p": "slow"}}
    found, content, log = measured(jobs, stop=stop)
    assert found["b", "p"]["status"] == "stopped" and "b job" not in log
    assert "about 1 s" in found["b", "p"]["why"][0]
    assert found["a", "p"]["status"] == "ok" and "1 of 2 rows" in content["incomplete"]


# --- a whole run ---


def stopping(at: int, how: Callable[[Any], None]) -> type[in_process.InProcess]:
    """Return workers that do something to the bench after the `at`-th answer of a backend."""
    answers = [0]

    class Stops(in_process.InProcess):
        def receive(self) -> dict[str, Any]:
            answer = super().receive()
            if answer:  # not of the machine and the reference
                answers[0] += 1
                if answers[0] == at:
                    how(self.stop)
            return answer

    return Stops


def end_time(stop: Stop) -> None:
    stop.deadline = time.monotonic() - 1


@pytest.mark.parametrize("how, code, why", [
    (lambda stop: os.kill(os.getpid(), signal.SIGINT), 130, "Ctrl-C"),
    pytest.param(lambda stop: os.kill(os.getpid(), signal.SIGTERM), 143, "SIGTERM",
                 marks=pytest.mark.slow),
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
    assert of["sdpa"]["status"] == "stopped" and of["sdpa"]["why"][0]
    (record,) = tmp_path.glob("*_cut")
    assert json.loads((record / "record.json").read_text(encoding="utf-8")) == content
    page = (record / "README.md").read_text(encoding="utf-8")
    assert all("INCOMPLETE" in text and why in text for text in (page, out))
    assert not list(record.glob("*.part"))


def test_a_run_that_is_killed_leaves_the_rounds_that_had_ended(tmp_path, monkeypatch):
    def die(stop: Stop) -> None:
        raise MemoryError  # the bench does no more about it than about kill -9

    in_process.use(monkeypatch, stopping(4, die))
    with pytest.raises(MemoryError):
        run([*SMALL, "--backends=manual,sdpa", "--record=k", f"--records_dir={tmp_path}"])
    (record,) = tmp_path.glob("*_k/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["complete"] is False and len(content["rows"][0]["rounds"]) == 1


def test_a_training_that_was_cut_short_is_not_judged(tmp_path, monkeypatch):
    in_process.use(monkeypatch, stopping(2 + 2 * 9, end_time))  # in the last round but one
    argv = [*small("converge"), "--backends=sdpa", "--steps=10", "--dataset=tiny", "--json"]
    code, out = run([*argv, f"--data_dir={write_tokens(tmp_path)}"])
    content = json.loads(out.splitlines()[-1])
    assert code == 1 and not any("verdict" in r for r in content["rows"])
    assert not any("1.00%" in answer for answer in content["answers"])
    assert [(r["status"], r["why"]) for r in content["rows"]] == [
        ("stopped", ["9 of 10 parts"])
    ] * 2


def test_what_ends_before_it_began_leaves_nothing(monkeypatch, capsys):
    class Ends(in_process.InProcess):
        def __init__(self, work: str, job: Any, timeout: float, stop: Any) -> None:
            if broken:
                raise Failure("died", "it has no torch")
            os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    in_process.use(monkeypatch, Ends)
    broken = False
    assert bench_mfu.main([*SMALL, "--backends=sdpa"]) == 143
    assert "SIGTERM" in capsys.readouterr().err
    broken = True
    with pytest.raises(UserError, match="it has no torch"):
        bench_mfu.main([*SMALL, "--backends=sdpa"])
