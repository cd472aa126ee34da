"""Processes that are killed, freeze, hang or fail: the others say which one, and end."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from killing import LIMIT_S, Job, gone, losses, member, prove
from processes import free_port
from test_train import argv, make_data, run

import checkpoint
from core import restarts, watch
from core.distributed import DistInfo
from core.settings import UserError

# A fresh process that has torch already: a start costs a hundredth of a second.
FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "core.watch", "core.distributed"])


def end(folder: Path, size: int, fault: str, victim: int = 1, **how: Any) -> list[tuple[int, str]]:
    """(exit code, what it said) of each process; of one that is frozen, None for its code.
    If they are "starting", the others get torchrun's SIGTERM as soon as the victim has ended."""
    how = {"timeout": 60.0, "beat": 0.2, **how}
    port, logs = free_port(), [str(folder / f"{r}.log") for r in range(size)]
    begun = [FORKED.Process(target=member, args=(r, size, port, logs[r], fault, victim, how))
             for r in range(size)]  # fmt: skip
    for process in begun:
        process.start()
    try:
        if how.get("starting"):
            begun[victim].join(LIMIT_S)
            time.sleep(0.1)  # torchrun looks as often
            for process in begun:
                process.terminate()
        for rank, process in enumerate(begun):
            if not (fault == "frozen" and rank == victim):
                process.join(LIMIT_S)
                assert process.exitcode is not None, f"rank {rank}: {Path(logs[rank]).read_text()}"
        return [(p.exitcode, Path(log).read_text()) for p, log in zip(begun, logs, strict=True)]
    finally:
        for process in begun:
            process.kill()
            process.join()


def sentence(ended: tuple[int, str], rank: int) -> str:
    """What a process ended with, without its own rank; fails if it is not one sentence."""
    code, said = ended
    (line,) = [x for x in said.splitlines() if x.startswith("error (rank")]
    start = f"error (rank {rank}): "
    assert code == 1 and line.startswith(start) and "docs/SCALE.md" in line, (code, said)
    return line.removeprefix(start)


@pytest.mark.parametrize(
    ("fault", "victim", "computing", "words"),
    [
        pytest.param("killed", 1, False, "is gone in 'forward' of step", marks=pytest.mark.slow),
        ("killed", 0, False, "is gone in 'forward' of step"),
        pytest.param("killed", 1, True, "is gone in 'forward' of step", marks=pytest.mark.slow),
        ("fails", 1, False, "ended with an error: ValueError: no more tokens"),
        pytest.param("exits", 0, True, "ended with an error: exit code 7", marks=pytest.mark.slow),
    ],
)
def test_the_others_name_who_ended(tmp_path, fault, victim, computing, words):
    ended = end(tmp_path, 3, fault, victim, computing=computing)
    said = {sentence(ended[r], r) for r in range(3) if r != victim}
    assert len(said) == 1 and words in (text := said.pop()), said
    assert text.startswith(f"rank {victim} (") and ended[victim][0] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "computing"), [("fails", False), ("killed", False), ("killed", True)]
)
def test_the_others_name_who_ended_before_torchrun_ends_them(tmp_path, fault, computing):
    """Its SIGTERM comes at once, their next look may be a beat away."""
    ended = end(tmp_path, 3, fault, 1, starting=True, beat=2.0, computing=computing)
    assert all(sentence(ended[r], r).startswith("rank 1 (") for r in (0, 2)), ended


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_name_who_is_frozen(tmp_path, victim):
    ended = end(tmp_path, 3, "frozen", victim)
    said = {sentence(ended[r], r) for r in range(3) if r != victim}
    assert len(said) == 1 and (text := said.pop()).startswith(f"rank {victim} ("), said
    assert "no sign of life" in text and "SIGSTOP" in text


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_name_who_hangs_and_where_each_is(tmp_path, victim):
    ended = end(tmp_path, 3, "hangs", victim, timeout=2.0)
    for rank in range(3):
        text = sentence(ended[rank], rank)
        assert text.startswith(f"rank {victim} (") and "hangs in 'forward' of step 10" in text
        assert "the others wait in 'backward' of step 10" in text
        assert ("killing.py, line" in text) and ("in happen" in text) == (rank == victim)


@pytest.mark.slow
def test_who_hangs_is_not_guessed(tmp_path):
    """All are in the same phase: none is named."""
    ended = end(tmp_path, 2, "hangs", 1, timeout=2.0, computing=True)
    for rank in range(2):
        text = sentence(ended[rank], rank)
        assert text.startswith("none has moved") and "which one hangs is not known" in text


@pytest.mark.slow
def test_a_long_quiet_phase_is_no_hang(tmp_path):
    """The first evaluation takes longer than the timeout, on all of them: it may compile."""
    ended = end(tmp_path, 2, "nothing", pause=4.0, timeout=1.0)
    assert [code for code, _ in ended] == [0, 0] and not any("error" in x for _, x in ended)
    ended = end(tmp_path, 2, "nothing", pause=60.0, timeout=1.0, first=2.0)
    assert all("none has moved" in sentence(x, r) and "'evaluate'" in x[1]
               for r, x in enumerate(ended))  # fmt: skip


def test_a_process_that_is_told_to_stop_stops_all(tmp_path):
    assert [code for code, _ in end(tmp_path, 3, "preempted")] == [143] * 3


def test_what_takes_long_each_time_is_no_hang(monkeypatch):
    """Ten times as long as ever, but for two times that may have been compilation."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    phases = "forward", "evaluate", "log", watch.WRITING
    pace, limits = watch.Pace(45.0), {phase: [] for phase in phases}
    times = {"evaluate": 100, watch.WRITING: 0}  # no write has ever been waited for
    for step in range(6):
        forward, last = [300, 200, 1][min(step, 2)], [1, 1, 50, 30, 20, 10][step]
        for phase, takes in {"forward": forward, "log": last, **times}.items():
            pace.begin(step, phase)
            limits[phase].append(pace.limit())
            now[0] += takes
    assert limits["forward"] == [watch.FIRST_S] * 3 + [45.0] * 3
    assert limits["evaluate"] == [watch.FIRST_S] * 3 + [1000.0] * 3
    assert limits["log"] == [watch.FIRST_S] * 3 + [45.0, 45.0, 200.0]  # the third longest
    assert limits[watch.WRITING] == [watch.FIRST_S] * 6


def test_the_first_three_steps_have_half_an_hour_also_in_a_run_that_goes_on():
    """However often a phase has begun in them: once for each micro-batch."""
    pace, limits = watch.Pace(45.0), []
    for step in range(1000, 1004):
        for _ in range(4):
            pace.begin(step, "forward")
            limits.append(pace.limit())
    assert limits == [watch.FIRST_S] * 12 + [45.0] * 4


def test_what_a_run_does_seldom_has_half_an_hour(data_dir, tmp_path, monkeypatch):
    """Its first evaluations and checkpoints, and what comes at the end, however many log lines."""
    pace, limits, steps = watch.Pace(45.0), {}, {}

    def mark(self, step, phase):
        pace.begin(step, phase)
        steps.setdefault(phase, []).append(step)
        limits.setdefault(phase, []).append(pace.limit())

    monkeypatch.setattr(watch.Watch, "mark", mark)
    assert run(data_dir, tmp_path, max_iters=16, eval_interval=8, log_interval=1).code == 0
    most = watch.FIRST_S
    assert limits["evaluate"] == limits["checkpoint"] == [most] * 2 and limits["finish"] == [most]
    for phase in ("forward", "backward", "update", "agree", "data"):
        assert limits[phase] == [most] * (len(limits[phase]) - 13) + [45.0] * 13, phase
    assert limits["log"][-1] == 45.0
    assert steps["forward"] == steps["agree"] == list(range(1, 17))  # counted from 1, as told
    assert steps["evaluate"] == steps["checkpoint"] == [8, 16]
    assert steps["data"] == list(range(2, 18)) and steps["finish"] == [16]


def test_a_checkpoint_slower_than_the_steps_between_two_is_no_hang(data_dir, tmp_path, monkeypatch):
    """The one before is waited for in a phase that has half an hour each time."""
    phases, limits, waits, wait = [], [], [], checkpoint.Saving.wait

    def waited(self):
        waits.extend([phases[-1]] if self.thread else [])
        wait(self)

    monkeypatch.setattr(checkpoint.Saving, "wait", waited)

    def mark(self, step, phase):
        phases.append(phase)
        limits.append(self.pace.timeout)

    monkeypatch.setattr(watch.Watch, "mark", mark)
    knobs = {"max_iters": 6, "eval_interval": 2, "async_checkpoint": True, "hang_timeout": 7}
    assert run(data_dir, tmp_path, **knobs).code == 0 and set(limits) == {7.0}
    assert waits == [watch.WRITING, watch.WRITING, "finish"]
    assert phases.count("checkpoint") == 3


def test_who_is_behind_has_begun_the_fewest_phases():
    """A process that hangs after a checkpoint, while the others wait in the next step; one that is
    done does not count."""
    looking = watch.Watch(DistInfo(torch.device("cpu")))
    looking.size, looking.machines, looking.pids = 4, ["a"] * 4, [1, 2, 3, 4]
    ahead, done = watch.Beat(9, 21, "forward", 50, True, 160), watch.Beat(9, 21, "done", 2, False)
    looking.beats = {0: ahead, 1: watch.Beat(9, 20, "checkpoint", 60, True, 158), 2: ahead, 3: done}
    looking.missed = dict.fromkeys(range(4), 0)
    text = looking._judge([], [0, 1, 2, 3])
    assert text is not None and text.startswith("rank 1 (a, pid 2) hangs in 'checkpoint' of step")
    assert "none has moved for 50 s, the others wait in 'forward' of step 21" in text
    looking.size, looking.machines, looking.pids = 40, ["a"] * 40, [*range(40)]
    looking.missed = dict.fromkeys(range(40), 0)
    looking.beats = dict.fromkeys(range(30), looking.beats[1]) | dict.fromkeys(range(30, 40), ahead)
    text = looking._judge([], [*range(40)])
    assert text is not None and text.count("pid") == 8  # more names say no more


def test_who_is_silent_is_named_after_20_beats_with_the_seconds():
    looking = watch.Watch(DistInfo(torch.device("cpu")), beat=3.0)
    looking.size, looking.machines, looking.pids = 2, ["a"] * 2, [1, 2]
    looking.beats, looking.neighbours = dict.fromkeys(range(2), watch.Beat(9, 21, "forward")), set()
    looking.missed = {0: 0, 1: 20}
    assert looking._judge([], [0, 1]) is None
    looking.missed[1] += 1
    said = str(looking._judge([], [0, 1]))
    assert said.startswith("rank 1 (a, pid 2) has given no sign of life for 63 s in 'forward' of")
    looking.beats[1] = watch.Beat(9, 21, "done")
    assert looking._judge([], [0, 1]) is None


# --- the looks of several processes, taken by hand ---


class Store(dict[str, bytes]):
    """What core/watch.py asks of torch.distributed's."""

    def multi_set(self, keys, values):
        self.update(zip(keys, (v.encode() for v in values), strict=True))

    def set(self, key, value):
        self[key] = value.encode()

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def compare_set(self, key, expected, wanted):
        self[key] = wanted.encode() if self[key] == expected.encode() else self[key]
        return self[key]


@pytest.fixture
def four(monkeypatch) -> tuple[list[watch.Watch], dict[int, str | None]]:
    """Four processes on two machines, a beat of 100 s; and the states of those that are not well.
    Number 2 is on host1, its pid is 102; all are in 'forward' of step 7 and have looked once."""
    store, states, all_of_them = Store(), {}, []
    told = [(f"host{r // 2} pid:[1]", 100 + r, f"name{r}") for r in range(4)]
    threads = SimpleNamespace(Event=threading.Event, Lock=threading.Lock, Thread=Mock())
    monkeypatch.setattr(watch, "threading", threads)
    monkeypatch.setattr(watch, "state", lambda pid: states.get(pid, "S"))
    monkeypatch.setattr(watch.Watch, "_connect", lambda self: store)
    for rank in range(4):
        monkeypatch.setattr(watch, "machine", lambda rank=rank: told[rank][0])
        everyone = SimpleNamespace(rank=rank, world_size=4, gather=lambda mine: told)
        all_of_them.append(watch.Watch(everyone, beat=100.0))
        all_of_them[-1].mark(7, "forward")
    look(*all_of_them)
    return all_of_them, states


def look(*processes: watch.Watch) -> set[str | None]:
    """One look of each, in turn; their verdicts."""
    for process in processes:
        process._look()
        process.rounds += 1
    return {process.verdict for process in processes}


@pytest.mark.parametrize("state, done", [(None, False), ("Z", False), ("X", False), ("Z", True)])
def test_a_neighbour_sees_who_is_gone_and_all_say_the_same(state, done, four):
    """Also one that is done itself, and waits for it."""
    processes, states = four
    processes[2].done, states[103] = done, state
    assert look(*processes[:2]) == {None}  # on the other machine
    text = (
        "rank 3 (host1, pid 103) is gone in 'forward' of step 7: killed, out of memory, or crashed"
    )
    assert look(processes[2]) == {text}
    processes[0].own_error = "ValueError: later"  # the first verdict stays
    assert look(*processes[:3]) == {text}


def test_what_a_process_ends_with_is_told_to_all(four):
    processes, _ = four
    processes[1].own_error = "ValueError: no more tokens"
    assert look(*processes[1:], processes[0]) == {
        "rank 1 (host0, pid 101) ended with an error: ValueError: no more tokens"
    }


@pytest.mark.parametrize("silent", [3, 0])
def test_who_gives_no_sign_of_life_is_named_after_20_beats(four, silent):
    """Process 0 judges all others, and these judge process 0. That it is stopped only a neighbour
    can see: on another machine its pid is somebody else's."""
    processes, states = four
    states[100 + silent] = "T"
    others = [process for process in processes if process.rank != silent]
    for _ in range(15):
        assert look(*others) == {None}
    look(processes[silent])  # one sign, and all is well for 20 beats after it is seen
    for _ in range(21):
        assert look(*others) == {None}
    who, why = ("rank 3 (host1, pid 103)", "frozen, or its machine is lost")
    if silent == 0:
        who, why = "rank 0 (host0, pid 100)", "it is stopped (SIGSTOP)"
    said = f"{who} has given no sign of life for 2100 s in 'forward' of step 7: {why}"
    assert look(*others) == {said}


def test_who_hangs_is_named_when_none_has_moved_for_the_limit(four):
    processes, _ = four
    for process in processes[:3]:
        process.mark(7, "backward")
    assert look(*processes) == {None}
    for _ in range(18):  # half an hour, for the first steps
        assert look(*processes) == {None}
    processes[2].mark(7, "update")  # one that moves is enough
    for _ in range(19):
        assert look(*processes) == {None}
    look(*processes)  # the nineteenth quiet beat of number 2: 1,900 s, as the others will read
    assert look(*processes) == {
        "rank 3 (host1, pid 103) hangs in 'forward' of step 7: none has moved for 1900 s, "
        "the others wait in 'backward' of step 7, in 'update' of step 7"
    }


def test_all_wait_until_the_last_is_done(four):
    processes, states = four
    for process in processes[1:]:
        process.done = True
    for _ in range(15):
        assert look(*processes) == {None}
    assert not any(process.closed.is_set() for process in processes)
    states[103] = None  # it was done, and may go
    assert look(*processes[:3]) == {None}
    processes[0].done = True
    assert look(*processes[:3]) == look(*processes[:3]) == {None}
    assert all(process.closed.is_set() for process in processes[:3])


def test_without_a_store(four, monkeypatch):
    """Who keeps it: process 0, or torchrun, which outlives it."""
    (_, one, two, _), states = four
    for process in (one, two):
        said = process._without_store(ValueError("broken\npipe"))
        assert said.startswith("rank 0 (host0, pid 100) has given no sign of life for 2000 s in ")
    monkeypatch.setattr(watch, "AGENT_STORE", True)
    for process in (one, two):
        assert process._without_store(ValueError("broken\npipe")) == (
            "torchrun on the machine of rank 0 (host0, pid 100), which keeps the store, cannot be "
            "reached (broken)"
        )
    states[100] = "Z"
    assert "is gone" in one._without_store(ValueError()) and "torchrun" in two._without_store(
        ValueError()
    )


class Ended(BaseException):
    """What os._exit() does here."""


@pytest.fixture
def exits(monkeypatch) -> Iterator[list[int]]:
    """The codes that os._exit() was called with; of processes that are made up."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(watch.os, "_exit", leave)
    monkeypatch.setattr(watch.Watch, "_stack", lambda self: "here")
    monkeypatch.setattr(watch.threading, "Timer", Mock(), raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield codes
    signal.signal(signal.SIGTERM, before)


def test_the_last_words_of_a_process(four, exits, monkeypatch, capfd):
    """Where it stands is of use where all wait; process 0 stays until its store has been read."""
    (zero, one, *_), naps = four[0], []
    monkeypatch.setattr(watch.time, "sleep", naps.append)
    monkeypatch.setattr(watch, "AGENT_STORE", False)
    for process, text in ((zero, "rank 3 is gone"), (one, "none has moved for 60 s")):
        process.stack = "train.py, line 7, in train"
        with pytest.raises(Ended):
            process._exit(text)
    here = "; this process: train.py, line 7, in train"
    assert capfd.readouterr().err.splitlines() == [
        f"error (rank 0): rank 3 is gone. {watch.NEXT}",
        f"error (rank 1): none has moved for 60 s{here}. {watch.NEXT}",
    ]
    assert exits == [1, 1] and naps == [5 * zero.beat]
    timer = watch.threading.Timer  # for the case that nobody reads them
    assert timer.call_args_list == [((10, watch.os._exit, (1,)),)] * 2


@pytest.mark.parametrize("own_error", ["ValueError: no more tokens", None])
@pytest.mark.parametrize("ending", [True, False])
def test_who_ends_with_an_error_of_its_own_has_time_to_say_it(
    ending, own_error, four, exits, monkeypatch
):
    process, naps = four[0][1], []
    process.verdict, process.own_error = "rank 3 is gone", own_error
    process.ending.wait = lambda seconds: ending  # type: ignore[method-assign]
    monkeypatch.setattr(watch.time, "sleep", naps.append)
    with nullcontext() if own_error else pytest.raises(Ended):
        process._act()
    assert naps == [10] * ending and process.known.is_set() and process.stack == "here"
    assert exits == ([] if own_error else [1])


@pytest.mark.parametrize("verdict", [None, "rank 3 is gone"])
@pytest.mark.parametrize("lost", [True, False])
def test_how_the_main_thread_leaves(verdict, lost, four, exits, monkeypatch, capfd):
    """After a collective that failed it waits for the verdict, if there is one to come; SIGTERM,
    which it did not heed meanwhile, ends it again."""
    process, ignored = four[0][1], []
    process.beat, process.verdict = 1e-4, verdict
    if verdict:
        process.known.set()
    wait = process.known.wait

    def waited(seconds: float) -> bool:
        ignored.append(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
        return wait(seconds)

    process.known.wait = waited  # type: ignore[method-assign]
    error = RuntimeError("gloo: closed by peer" if lost else "size mismatch")
    with pytest.raises(Ended if verdict and lost else RuntimeError), process:
        assert signal.getsignal(signal.SIGTERM) == process._terminated
        raise error
    assert ignored[0] == lost and process.ending.is_set() and process.wake.is_set()
    if verdict and lost:
        assert f"error (rank 1): {verdict}. " in capfd.readouterr().err and exits == [1]
        return
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not exits
    assert process.own_error == f"RuntimeError: {error}" and not process.done
    process.own_error = None
    with process:  # a run has put its own in its place, which stays
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    assert process.done and process.own_error is None


@pytest.mark.parametrize("looks, verdict", [(1, None), (1, "rank 3 is gone"), (0, None)])
def test_torchruns_sigterm_is_heeded_after_three_looks_without_a_verdict(
    looks, verdict, four, exits, monkeypatch, capfd
):
    """Or where there are none, after 25 beats."""
    process, now, killed = four[0][1], [0.0], []
    before = process.rounds

    def wait(seconds: float) -> bool:
        assert process.wake.is_set()
        now[0] += seconds
        process.rounds += looks
        process.verdict = verdict if process.rounds == before + 2 else None
        return process.verdict is not None

    process.known.wait = wait  # type: ignore[method-assign]
    monkeypatch.setattr(watch.os, "kill", lambda *given: killed.append(given))
    signal.signal(signal.SIGTERM, process._terminated)
    with monkeypatch.context() as patch:
        patch.setattr(watch.time, "monotonic", lambda: now[0])
        with pytest.raises(Ended) if verdict else nullcontext():
            process._terminated(signal.SIGTERM, None)
    if verdict:
        assert exits == [1] and not killed and f"): {verdict}. " in capfd.readouterr().err
        return
    assert killed == [(os.getpid(), signal.SIGTERM)] and not exits
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert process.rounds == before + 3 if looks else now[0] == pytest.approx(25 * process.beat)


@pytest.mark.parametrize("busy", [True, False])
def test_a_store_that_never_answers_is_told_after_20_beats(busy, four, exits, monkeypatch, capfd):
    process, naps = four[0][1], []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        process.rounds += busy
        if len(naps) == 60:
            process.closed.set()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(process.ending, "wait", lambda seconds: False)
    if busy:
        process._look_after_store()
        assert process.verdict is None and naps == [process.beat] * 60
        return
    with pytest.raises(Ended):
        process._look_after_store()
    assert naps == [process.beat] * 21 and process.known.is_set()
    assert "rank 0 (host0, pid 100) has given no sign of life for 2000 s" in capfd.readouterr().err


@pytest.mark.parametrize("done", [True, False])
def test_a_store_that_fails_ends_a_process_that_is_not_done(done, four, exits, capfd):
    process = four[0][1]
    process.done, rounds = done, process.rounds
    process._look = Mock(side_effect=RuntimeError("broken pipe"))  # type: ignore[method-assign]
    process.ending.wait = lambda seconds: False  # type: ignore[method-assign]
    process.wake.wait = lambda seconds: True  # type: ignore[method-assign]
    if done:
        process._run()
        assert process.verdict is None and not exits
    else:
        with pytest.raises(Ended):
            process._run()
        assert "rank 0 (host0, pid 100) has given no sign" in capfd.readouterr().err
    assert process.closed.is_set() == done and process.rounds == rounds + 1


def test_where_the_main_thread_is(tmp_path, monkeypatch):
    """In our own code, though it waits in a package that lies in a folder below it."""
    place = watch.ROOT / ".venv" / "lib" / "site-packages" / "theirs.py"
    code, there = "def wait(begun, thread):\n    begun.set(); thread.join()", dict[str, Any]()
    exec(compile(code, str(place), "exec"), there)
    looking, found = watch.Watch(DistInfo(torch.device("cpu"))), []
    begun = threading.Event()

    def look() -> None:
        begun.wait(20)
        found.append(looking._stack())
        monkeypatch.setattr(watch, "ROOT", tmp_path)  # where nothing of ours is in the way
        found.append(looking._stack())

    thread = threading.Thread(target=look)
    thread.start()
    there["wait"](begun, thread)
    name, line, where = found[0].split(", ")
    assert (name, where) == ("test_watch.py", "in test_where_the_main_thread_is")
    assert line.startswith("line ") and found[1].startswith("threading.py, line ")


def test_what_a_process_ends_with_in_words():
    assert watch._described(UserError("no such file\nmore")) == "no such file"
    assert watch._described(SystemExit(7)) == "exit code 7"
    assert watch._described(KeyError("x")) == "KeyError: 'x'"


def test_the_state_of_a_process(tmp_path, monkeypatch):
    """Also of one whose name looks like the end of a name."""
    odd = shutil.copy(str(shutil.which("sleep")), tmp_path / "a) Z (b")
    child = subprocess.Popen(["sleep", "60"], executable=odd)

    def becomes(state: str | None) -> bool:
        deadline = time.monotonic() + 20
        while (now := restarts.state(child.pid)) != state and time.monotonic() < deadline:
            time.sleep(0.01)
        return now == state

    try:
        assert becomes("S") and int(restarts._stat(child.pid)[1]) == os.getpid()
        child.send_signal(signal.SIGSTOP)
        assert becomes("T") and "T" not in restarts.DEAD
        child.kill()
        assert becomes("Z")
    finally:
        child.kill()
        child.wait()
    assert restarts.state(child.pid) is None and restarts.machine().startswith(os.uname().nodename)
    monkeypatch.setattr(restarts.sys, "platform", "darwin")  # where only life and death can be told
    assert restarts.state(os.getpid()) not in restarts.DEAD and restarts.state(child.pid) is None
    assert restarts.machine() == os.uname().nodename


def test_one_process_has_no_thread():
    before = threading.active_count()
    with watch.Watch(DistInfo(torch.device("cpu")), 1.0) as looking:
        looking.mark(1, "forward")
        assert threading.active_count() == before
    with pytest.raises(KeyError), watch.Watch(DistInfo(torch.device("cpu")), 1.0):
        raise KeyError("x")


def test_what_a_collective_raised():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert watch._of_collective(lost) and watch._of_collective(torch.distributed.DistError("x"))
    assert watch._of_collective(RuntimeError("NCCL communicator was aborted on rank 1"))
    assert not watch._of_collective(RuntimeError("size mismatch"))
    assert not watch._of_collective(ValueError("gloo")) and not watch._of_collective(None)
    try:
        try:
            raise lost
        except RuntimeError as e:
            raise ValueError("of its own words") from e
    except ValueError as error:
        assert watch._of_collective(error)
    try:
        try:
            raise lost
        finally:
            {}["what tidies up fails too"]
    except KeyError as error:
        assert watch._of_collective(error)


# --- the run that is started again ---


def test_processes_meet_past_what_the_dead_have_left(monkeypatch):
    """The store is the same in each attempt, and so are its keys."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = threading.local()

    def rendezvous(url: str, timeout: Any) -> Iterator[Any]:
        client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False)
        yield client, here.rank, 3

    def join(rank: int) -> Any:
        here.rank = rank
        return restarts.meet(20.0)

    monkeypatch.setattr(restarts.dist, "rendezvous", rendezvous)
    with ThreadPoolExecutor(3) as pool:
        for attempt in range(3):
            server.set("hello/2", "of a process that died before it was answered")
            met = list(pool.map(join, [2, 1, 0] if attempt else [0, 1, 2]))
            assert sorted(rank for _, rank, _ in met) == [0, 1, 2]
            assert not any(store.check(["key"]) for store, _, _ in met)
            met[0][0].set("key", str(attempt))
            assert [store.get("key") for store, _, _ in met] == [str(attempt).encode()] * 3
    server.delete_key("hello/1")  # one that has not come at all
    here.rank = 0
    with pytest.raises(UserError, match=r"of 3 processes \[1, 2\] have not joined"):
        restarts.meet(0.1)


class Alone:
    """One process, as DistInfo; or the answers of several."""

    main = True

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others] if isinstance(value, str) else [value]


def test_a_run_knows_itself_by_the_torchrun_above_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    restarts.mark_begun(str(tmp_path), Alone())
    assert not list(tmp_path.iterdir()) and not restarts.restarted(str(tmp_path), Alone())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's, where nobody has named it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of a node that has just joined
    assert not restarts.restarted(str(tmp_path), Alone())
    restarts.mark_begun(str(tmp_path), Alone("boot pid:[1] 77 12345"))
    assert restarts.restarted(str(tmp_path), Alone())
    monkeypatch.setattr(restarts, "_launcher", lambda: "boot pid:[1] 78 5")  # on another machine
    assert not restarts.restarted(str(tmp_path), Alone())
    assert restarts.restarted(str(tmp_path), Alone("boot pid:[1] 77 12345"))  # one has stayed

    def full(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(Path, "write_text", full)
        restarts.mark_begun(str(tmp_path), Alone())
    assert restarts.restarted(str(tmp_path), Alone("boot pid:[1] 77 12345"))  # as it was before
    for damaged in ("[", "[]", "{}", '{"torchrun": 3}'):
        (tmp_path / restarts.MARK).write_text(damaged)
        assert not restarts.restarted(str(tmp_path), Alone())


def test_the_torchrun_above_a_script_between():
    """The first process above that torchrun did not start: this one."""
    code = "from core import restarts; print(restarts._launcher())"
    line = ["sh", "-c", f'"{sys.executable}" -c "{code}"; true']
    env, root = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}, Path(__file__).parent.parent
    how: Any = {"capture_output": True, "text": True, "timeout": 60, "start_new_session": True}
    found = subprocess.run(line, env=env, cwd=root, **how)
    assert found.stdout.split()[-2] == str(os.getpid()), found.stderr


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps")
def test_without_proc_a_torchrun_goes_by_its_number_and_beginning(monkeypatch):
    monkeypatch.setattr(restarts, "_stat", Mock(side_effect=FileNotFoundError))
    pid, named = os.getppid(), restarts._launcher()
    began = subprocess.check_output(["ps", "-o", "lstart=", "-p", str(pid)], text=True)
    assert len(began.split()) == 5 and named == f"{os.uname().nodename} {pid} {began.strip()}"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def training(data_dir: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts train.py under torchrun."""
    jobs = []

    def start(*how: str, processes: int = 2, **knobs: Any) -> Job:
        knobs = {"max_iters": 4000, "eval_interval": 20, "gradient_accumulation_steps": 2, **knobs}
        line = ["train.py", *argv(data_dir, tmp_path / "out", **knobs)]
        jobs.append(Job(tmp_path / f"{len(jobs)}.log", line, *how, processes=processes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def trained(job: Job, out: Path, steps: int = 40) -> dict[int, int]:
    """Wait until so many steps are done; rank -> pid."""
    job.wait_for(lambda: len(losses(out)) >= steps or job.torchrun.poll() is not None, 90)
    assert job.torchrun.poll() is None, job.said()
    return job.ranks()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["one", "all", "group"])
def test_a_preempted_run_saves_and_says_how_to_go_on(training, tmp_path, to):
    """A scheduler may tell one process, all, or these and torchrun, which tells them again."""
    job = training()
    ranks = trained(job, tmp_path / "out")
    for pid in {"one": [ranks[1]], "all": [*ranks.values()]}.get(
        to, [*ranks.values(), job.torchrun.pid]
    ):
        os.kill(pid, signal.SIGTERM)
    assert job.ended(LIMIT_S) != 0
    assert "stopped after step" in job.said() and "error (rank" not in job.said(), job.said()
    saved = max(int(p.name.split("-")[1]) for p in (tmp_path / "out").glob("step-*"))
    assert saved == max(losses(tmp_path / "out")) and saved < 4000


FAILS = """
import os, sys, time
import train
from core.settings import UserError, exit_on_user_error

def load(*args):
    time.sleep(1)  # the other one is ready long before
    raise UserError("no data on this machine")

if os.environ["RANK"] == "1":
    train.data.load = load
exit_on_user_error(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_earlier_run_stays_where_it_is_until_all_can_begin(data_dir, tmp_path):
    earlier, script = tmp_path / "out" / "step-00000003", tmp_path / "fails.py"
    earlier.mkdir(parents=True)
    script.write_text(FAILS)
    line = argv(data_dir, tmp_path / "out", parallel="fsdp", peak_tflops=1,
                gradient_accumulation_steps=2)  # fmt: skip
    job = Job(tmp_path / "log", [str(script), *line])
    try:
        assert job.ended(90) != 0
    finally:
        job.close()
    assert "rank 1" in job.said() and "ended with an error: no data on this machine" in job.said()
    assert [p.name for p in (tmp_path / "out").iterdir()] == [earlier.name]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--standalone", "static"])
def test_torchrun_starts_the_run_again_and_it_goes_on(training, tmp_path, how):
    """Not with the checkpoints of an earlier run in the same folder, which are moved aside."""
    out = tmp_path / "out"
    earlier = training(max_iters=30)
    assert earlier.ended(90) == 0, earlier.said()
    rendezvous = how if how == "--standalone" else f"--master_port={free_port()}"
    job = training(rendezvous, "--max_restarts=2", max_iters=200)
    job.wait_for(lambda: "earlier run's checkpoints" in job.said(), 90)
    for n in (1, 2):
        before = trained(job, out, 30 * n)
        os.kill(before[n % 2], signal.SIGKILL)
        job.wait_for(lambda: all(map(gone, before.values())), LIMIT_S)  # noqa: B023
        job.wait_for(lambda: job.said().count("started the run again") == n, 60)  # noqa: B023
    assert job.ended(200) == 0, job.said()
    assert job.said().count("error (rank") == 2 and job.said().count("earlier run's") == 1
    assert list(losses(out)) == list(range(1, 201))
    assert json.loads((out / restarts.MARK).read_text())["torchrun"]


@pytest.mark.slow
def test_a_node_comes_and_is_lost(training, tmp_path, monkeypatch):
    """Two torchrun, each a node of one process: the run goes on with two, then with one."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    out = tmp_path / "out"
    how = ("--nnodes=1:2", "--max_restarts=5", "--rdzv_backend=c10d", "--rdzv_id=job",
           f"--rdzv_endpoint=localhost:{free_port()}", "--local_addr=127.0.0.1")  # fmt: skip
    conf = "--rdzv_conf=last_call_timeout=2,is_host="
    first = training(*how, f"{conf}1", processes=1, max_iters=10**6)
    trained(first, out)
    second = training(*how, f"{conf}0", processes=1, max_iters=10**6)
    first.wait_for(lambda: ", 2 processes" in first.said(), 90)
    before = max(losses(out))
    first.wait_for(lambda: max(losses(out)) > before + 40, 60)
    second.close()
    first.wait_for(lambda: first.said().count(", 1 process\n") == 2, 90)
    assert first.said().count("it goes on from its last checkpoint") == 2
    assert "error (rank 0): rank 1 (" in first.said()
    first.wait_for(lambda: "\niter " in first.said().rpartition("resuming")[2], 60)
    first.torchrun.terminate()
    first.ended(60)
    assert "stopped after step" in first.said()
    assert list(losses(out)) == list(range(1, max(losses(out)) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_lost_by_kills_at_random_moments(tmp_path, again):
    prove(tmp_path, kills=2, processes=2, restarts=again, seed=random.randrange(10**6), steps=200)


def test_the_watch_has_a_connection_of_its_own(monkeypatch) -> None:
    """The group's store waits as long as an operation may take; other stores are taken as is."""
    group = dist.TCPStore("localhost", 0, is_master=True)
    wrapped = dist.PrefixStore("b", dist.PrefixStore("a", group))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: wrapped)
    own = watch.Watch._connect(SimpleNamespace(beat=0.5))
    assert isinstance(own, dist.TCPStore) and (own.host, own.port) == (group.host, group.port)
    assert own is not group and own.timeout.total_seconds() == 10 * watch.LOST * 0.5
    own.set("x", "1")
    assert group.get("x") == b"1"
    local = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: local)
    assert watch.Watch._connect(SimpleNamespace(beat=0.5)) is local
