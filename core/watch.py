"""Who died: each process looks after the others, and ends with a sentence that names the lost one.

A thread in each process tells about once a second (a beat), in torch.distributed's store, where its
main thread is. It looks at its neighbours on the machine directly; process 0 judges all others
by their beats, and these judge process 0. A verdict is written once, so that all say the same.
The main thread may be in a collective for ever: the thread ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from core.restarts import DEAD, machine, state
from core.settings import UserError, first_line

LOST = 20  # beats that stay away: frozen, or cut off
EXPLAIN = 25  # beats to wait for a verdict; torchrun kills 30 s after its SIGTERM
CLOSE = 30  # beats that a process which is done waits for the others
FIRST_S = 1800.0  # for the first three steps, the first three times of a phase, and WRITING
WRITING = "writing"  # the phase in which the checkpoint before is waited for: on a disk
AGENT_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else process 0 keeps it
ROOT = Path(__file__).resolve().parent.parent
NEXT = "--init_from=resume goes on from the last checkpoint; docs/SCALE.md has the rest"


class Beat(NamedTuple):
    """What a process tells each beat."""

    number: int = 0
    step: int = 0
    phase: str = "start"
    quiet: int = 0  # beats since its main thread was last heard of
    hung: bool = False  # that is too long
    marks: int = 0  # phases that it has begun, the same ones in every process


class Pace:
    """How long the main thread stays in each phase, and how long it may."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.first_step = timeout, -1
        self.step, self.phase, self.since = 0, "start", time.monotonic()
        self.longest: dict[str, list[float]] = {}  # phase -> the longest three times, s

    def begin(self, step: int, phase: str) -> None:
        took = time.monotonic() - self.since
        self.longest[self.phase] = sorted([*self.longest.get(self.phase, []), took])[-3:]
        self.first_step = step if self.first_step < 0 else self.first_step
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def limit(self) -> float:
        """Seconds after which it hangs. Of the longest times two may have been compilation."""
        longest = self.longest.get(self.phase, [])
        seldom = len(longest) < 3 or self.phase == WRITING
        if self.first_step < 0 or self.step < self.first_step + 3 or seldom:
            return max(self.timeout, FIRST_S)
        return max(self.timeout, 10 * longest[0])


class Watch:
    """Looks after the processes of a run:

    with Watch(distributed, timeout) as watch:
        watch.mark(step, "forward")  # at the beginning of each phase
    """

    def __init__(self, distributed: Any, timeout: float = 45.0, beat: float = 1.0) -> None:
        """Call it on all processes, after they have joined; with one process it does nothing.

        Args:
            timeout: seconds after which main threads that all stand still are hung; more where a
                phase takes longer than a tenth of it.
            beat: seconds between two looks; all limits in beats grow with it.
        """
        self.rank, self.size = distributed.rank, distributed.world_size
        self.beat = beat
        self.pace, self.marks = Pace(timeout), 0
        self.quiet, self.marks_seen = 0, 0  # beats since the last mark
        self.verdict: str | None = None  # what is wrong with whom
        self.wake, self.known, self.closed = (threading.Event() for _ in range(3))
        self.ending = threading.Event()  # the main thread is on its way out
        self.own_error: str | None = None  # what it ends with
        self.done = False  # it has come to its end
        self.stack = ""  # where the main thread was then
        self.lock = threading.Lock()
        if self.size == 1:
            return
        self.store = self._connect()
        told = distributed.gather((machine(), os.getpid(), uuid.uuid4().hex))
        self.machines, self.pids = [t[0] for t in told], [t[1] for t in told]
        name = told[0][2]
        self.keys = [f"watch/{name}/verdict", *(f"watch/{name}/{r}" for r in range(self.size))]
        if self.rank == 0:
            self.store.multi_set(self.keys, ["-"] * len(self.keys))
        distributed.gather(None)  # from here on they are there
        self.neighbours = {
            r for r in range(self.size) if r != self.rank and self.machines[r] == machine()
        }
        self.beats = dict.fromkeys(range(self.size), Beat())
        self.missed = dict.fromkeys(range(self.size), 0)  # own beats since their last one
        self.rounds = 0
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        if not AGENT_STORE or 0 not in {self.rank, *self.neighbours}:
            threading.Thread(target=self._look_after_store, name="watch2", daemon=True).start()

    # ------------------------------------------------------------------- for the main thread

    def mark(self, step: int, phase: str) -> None:
        """The main thread begins a phase of a step; in all processes the same phases, in order."""
        if self.size > 1:
            self.pace.begin(step, phase)
            self.marks += 1

    def __enter__(self) -> Watch:
        """With more than one process SIGTERM waits for a verdict, until StopSignal takes it."""
        if self.size > 1:
            signal.signal(signal.SIGTERM, self._terminated)
        return self

    def _terminated(self, signum: int, frame: Any) -> None:
        """torchrun sends it to all as soon as one has died: one of the next looks shows it."""
        self.wake.set()
        enough, deadline = self.rounds + 3, time.monotonic() + EXPLAIN * self.beat
        while self.rounds < enough and time.monotonic() < deadline:
            if self.known.wait(self.beat / 10):
                self._exit(str(self.verdict))
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Tell the others that this process is done, or what it ends with, and wait for them a
        while; where a collective has failed, end by saying who was lost."""
        if self.size == 1:
            return
        self.ending.set()
        if _of_collective(error):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, while the next look comes
            self.wake.set()
            if self.known.wait(EXPLAIN * self.beat):
                self._exit(str(self.verdict))
        if signal.getsignal(signal.SIGTERM) in (self._terminated, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.done = error is None
        self.own_error = None if error is None else _described(error)
        self.wake.set()
        if self.done:  # torchrun stops all as soon as one fails, and one may still be writing
            self.closed.wait(CLOSE * self.beat)
        else:
            self.known.wait(5 * self.beat)
            self._linger()

    # ------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """A look at the others each beat, until there is a verdict or all are done."""
        while self.verdict is None and not self.closed.is_set():
            try:
                self._look()
            except Exception as e:  # the store's: what it raises differs with the release
                if self.done:  # process 0 had the store, and has left
                    self.closed.set()
                else:
                    self.verdict = self._without_store(e)
            self.rounds += 1
            if self.verdict is None:
                self.wake.wait(self.beat / 10 if self.done else self.beat)
                self.wake.clear()
        if self.verdict is not None:
            self._act()

    def _look_after_store(self) -> None:
        """If the store's process is frozen or its machine lost, a look never returns (nor does
        the store's own timeout help: it waits for a last word)."""
        before, quiet = -1, 0
        while not self.closed.is_set() and self.verdict is None:
            quiet, before = (quiet + 1 if self.rounds == before else 0), self.rounds
            if quiet > LOST:
                self.verdict = self._without_store(TimeoutError("no answer"))
                self._act()
            time.sleep(self.beat)

    def _connect(self) -> Any:
        """A connection of its own to the store: the main thread may wait in the group's."""
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            return store
        limit = timedelta(seconds=10 * LOST * self.beat)
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=limit)

    def _look(self) -> None:
        """Tell where the main thread is, and read where the others are."""
        self.quiet = self.quiet + 1 if self.marks == self.marks_seen else 0
        self.marks_seen, phase = self.marks, self.pace.phase
        if self.done:
            phase = "over" if self.rank == 0 and self._others_are_done() else "done"
        hung = self.quiet * self.beat > self.pace.limit()
        beat = Beat(self.rounds, self.pace.step, phase, self.quiet, hung, self.marks)
        gone = [r for r in self.neighbours if state(self.pids[r]) in DEAD]
        self.store.set(self.keys[1 + self.rank], json.dumps(beat))
        # Process 0 reads all beats, the others its own: not N times N.
        ranks = sorted({*gone, *(range(self.size) if self.rank == 0 else [0])})
        verdict, *told = self.store.multi_get([self.keys[0], *(self.keys[1 + r] for r in ranks)])
        for r, text in zip(ranks, told, strict=True):
            now = Beat() if text == b"-" else Beat(*json.loads(text))
            self.missed[r] = self.missed[r] + 1 if now == self.beats[r] and r != self.rank else 0
            self.beats[r] = now
        if phase == "over" or (self.done and self.beats[0].phase == "over"):
            self.closed.set()
        elif verdict != b"-":
            self.verdict = verdict.decode()
        elif text := self._judge(gone, ranks):
            self.verdict = self.store.compare_set(self.keys[0], "-", text).decode()

    def _judge(self, gone: list[int], ranks: list[int]) -> str | None:
        """What is wrong with whom, if anything is."""
        if self.own_error is not None:
            return f"{self._name(self.rank)} ended with an error: {self.own_error}"
        for r in gone:
            if not self._is_done(r):
                return self._gone(r)
        if self.done:
            return None
        for r in ranks:
            if self.missed[r] > LOST and not self._is_done(r):
                return self._silent(r, self.missed[r] * self.beat)
        told = {r: self.beats[r] for r in ranks if not self._is_done(r)}
        if self.rank != 0 or not told or not all(beat.hung for beat in told.values()):
            return None
        # Nothing moves. Who waits in a collective has got further than the one that hangs.
        least = min(beat.marks for beat in told.values())
        behind = [r for r in told if told[r].marks == least]
        still = f"for {min(b.quiet for b in told.values()) * self.beat:.0f} s"
        if len(behind) == len(told):
            return f"none has moved {still}{self._was(behind[0])}: which one hangs is not known"
        wait = sorted({self._was(r) for r in told if r not in behind})
        who = ", ".join(map(self._name, behind[:8])) + f" hangs{self._was(behind[0])}"
        return f"{who}: none has moved {still}, the others wait{','.join(wait[:4])}"

    def _act(self) -> None:
        """There is a verdict: the process ends by itself, or else by this."""
        self.stack = self._stack()
        self.known.set()
        if self.ending.wait(self.beat):  # an exception, perhaps, which has its own way out
            time.sleep(10)
        if self.own_error is None:
            self._exit(str(self.verdict))

    def _exit(self, text: str) -> NoReturn:
        self._linger()
        with self.lock:  # never given back
            threading.Timer(10, os._exit, (1,)).start()  # nobody may be reading what is written
            here = f"; this process: {self.stack}" if "none has moved" in text else ""
            os.write(2, f"error (rank {self.rank}): {text}{here}. {NEXT}\n".encode())
            os._exit(1)

    def _linger(self) -> None:
        """If this process keeps the store, the others must have read the verdict before it ends."""
        if self.rank == 0 and not AGENT_STORE:
            time.sleep(5 * self.beat)

    # ------------------------------------------------------------------- words

    def _name(self, r: int) -> str:
        return f"rank {r} ({self.machines[r].split()[0]}, pid {self.pids[r]})"

    def _was(self, r: int) -> str:
        return f" in {self.beats[r].phase!r} of step {self.beats[r].step}"

    def _is_done(self, r: int) -> bool:
        return self.beats[r].phase in ("done", "over")

    def _others_are_done(self) -> bool:
        return all(self._is_done(r) for r in range(self.size) if r != self.rank)

    def _gone(self, r: int) -> str:
        return f"{self._name(r)} is gone{self._was(r)}: killed, out of memory, or crashed"

    def _without_store(self, error: Exception) -> str:
        """It has gone, or does not answer."""
        if 0 in self.neighbours and state(self.pids[0]) in DEAD:
            return self._gone(0)
        if not AGENT_STORE:
            return self._silent(0, LOST * self.beat)
        by = f"torchrun on the machine of {self._name(0)}, which keeps the store"
        return f"{by}, cannot be reached ({first_line(error)})"

    def _silent(self, r: int, seconds: float) -> str:
        stopped = r in self.neighbours and state(self.pids[r]) == "T"
        why = "it is stopped (SIGSTOP)" if stopped else "frozen, or its machine is lost"
        silent = f"has given no sign of life for {seconds:.0f} s"
        return f"{self._name(r)} {silent}{self._was(r)}: {why}"

    def _stack(self) -> str:
        """Where the main thread is, in the project's own code."""
        main = threading.main_thread().ident
        frames = traceback.extract_stack(sys._current_frames()[main or 0])
        own = [f for f in frames if ROOT in Path(f.filename).resolve().parents]
        own = [f for f in own if "site-packages" not in f.filename] or frames
        return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name}"


def _described(error: BaseException) -> str:
    if isinstance(error, UserError):
        return first_line(error)
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    return f"{type(error).__name__}: {first_line(error)}"


def _of_collective(error: BaseException | None) -> bool:
    """Whether it came out of a collective, and so perhaps from another process."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in words or "nccl" in words)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
