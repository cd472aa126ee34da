"""kill -9 of a random process of a run, at a random moment, again and again: is anything lost?

    PYTHONPATH=. python tests/killing.py --kills=20               # each time it is resumed by hand
    PYTHONPATH=. python tests/killing.py --kills=20 --restarts    # torchrun starts it again
    PYTHONPATH=. python tests/killing.py --processes=4 --parallel=fsdp --dropout=0

train.py runs as it is, a tiny model under torchrun. After each kill the others must end within
60 s, each with the sentence of core/watch.py if the training had begun; what is on the disk must
resume; and in the end every loss in metrics.jsonl must be that of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import watch
from core.distributed import DistInfo
from core.restarts import DEAD, state
from core.runtime import StopSignal

ROOT = Path(__file__).resolve().parent.parent
STEPS = 30  # of member()
LIMIT_S = 60  # for the others to end


class Job:
    """A torchrun of this machine: its processes, and what it has said so far."""

    def __init__(self, log: Path, line: list[str], *how: str, processes: int = 2) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", *(how or ("--standalone",))]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        env = {k: v for k, v in os.environ.items() if k not in names}
        self.log = log
        with log.open("wb") as out:
            self.torchrun = subprocess.Popen(
                [*launcher, f"--nproc_per_node={processes}", *line], cwd=ROOT,
                env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank -> pid, of the processes that are alive."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()
                if int(parent[1]) == self.torchrun.pid and parent[0] not in "ZX":
                    about = (path / "environ").read_bytes()
                    if rank := re.search(rb"(?:^|\0)RANK=(\d+)", about):
                        found[int(rank[1])] = int(path.name)
            except OSError:
                continue
        return found

    def wait_for(self, what: Callable[[], Any], seconds: float) -> Any:
        """The first true answer.

        Raises:
            AssertionError: there was none.
        """
        deadline = time.monotonic() + seconds
        while not (answer := what()):
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.said()}"
            time.sleep(0.02)
        return answer

    def ended(self, seconds: float) -> int:
        """torchrun's exit code."""
        self.wait_for(lambda: self.torchrun.poll() is not None, seconds)
        return int(self.torchrun.returncode)

    def close(self) -> None:
        for pid in (*self.ranks().values(), self.torchrun.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()


def member(rank: int, size: int, port: int, log: str, fault: str, victim: int, how: Any) -> None:
    """A process of a group that does what train.py does with a Watch, around collectives alone.
    In step 10 something happens to the victim; all are still "starting", where train.py has no
    StopSignal yet, if `how` says so. (In this file: it is soon imported.)"""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    watch.FIRST_S = how.get("first", watch.FIRST_S)
    distributed = DistInfo.join("cpu")
    with watch.Watch(distributed, how["timeout"], how["beat"]) as looking:
        stop = None if how.get("starting") else StopSignal()
        for step in range(1, STEPS + 1):
            looking.mark(step, "forward")
            if step == 10 and rank == victim:
                time.sleep(0.5)  # the others are waiting, or computing
                happen(fault)
            elif step == 10 and how.get("computing"):
                time.sleep(1000)
            looking.mark(step, "backward")
            dist.all_reduce(torch.ones(10))
            looking.mark(step, "agree")
            if step == 20 and "pause" in how:
                looking.mark(step, "evaluate")
                time.sleep(how["pause"])
            if distributed.sum([float(stop is not None and stop.signal is not None)])[0]:
                os._exit(143)
    distributed.leave()


def happen(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hangs":
        time.sleep(1000)
    elif fault == "fails":
        raise ValueError("no more tokens")
    elif fault == "exits":
        sys.exit(7)
    elif fault == "preempted":
        os.kill(os.getpid(), signal.SIGTERM)


def gone(pid: int) -> bool:
    return state(pid) in DEAD


def kill_one(job: Job, chance: random.Random, since: int, unfinished: Callable[[], bool]) -> str:
    """Kill one of its processes, and see the others end.

    Args:
        since: where in its output the present attempt begins.
        unfinished: whether steps are left to do.

    Returns:
        what was seen, in words; empty if there is none to kill.
    """
    ranks = job.ranks()
    if len(ranks) < 2:
        return ""
    victim = chance.choice(sorted(ranks))
    os.kill(ranks[victim], signal.SIGKILL)
    killed, rest = time.monotonic(), [p for r, p in ranks.items() if r != victim]
    training = "\niter " in job.said()[since:]
    job.wait_for(lambda: all(map(gone, rest)), LIMIT_S)
    took, said = time.monotonic() - killed, job.said()[since:]
    named = re.findall(rf"error \(rank \d+\): rank {victim} \(", said)
    assert "error (rank" not in re.sub(rf"error \(rank \d+\): rank {victim} \(", "", said), said
    assert len(named) == len(rest) or not (training and unfinished()), said
    return f"rank {victim} killed, {len(named)} of {len(rest)} named it, all ended in {took:.1f} s"


def losses(out: Path) -> dict[int, float]:
    from core.metrics import read

    if not (out / "metrics.jsonl").exists():
        return {}

    rows = [(row["iter"], row["loss"]) for row in read(out / "metrics.jsonl") if "loss" in row]
    assert len(rows) == len(dict(rows)), "a step is logged twice"
    return dict(rows)


def same(one: dict[int, float], other: dict[int, float], processes: int) -> None:
    """Two sum to the same bits in either order. The sum of three depends on where a gradient lies
    in DDP's buffers, which are laid out anew after the first step that follows a start."""
    apart = max((abs(one[step] - other[step]) for step in one.keys() & other.keys()), default=0.0)
    assert one.keys() == other.keys() and apart <= (0.0 if processes == 2 else 1e-4), (
        f"a loss differs by {apart} from that of the undisturbed run, or steps are missing"
    )


def prove(
    folder: Path,
    kills: int,
    processes: int,
    restarts: bool,
    seed: int,
    steps: int,
    say: Any = print,
    settings: Sequence[str] = (),
) -> None:
    """Raises AssertionError if anything was lost."""
    from test_train import argv, make_data

    chance, data_dir = random.Random(seed), make_data(folder / "data")
    knobs = {
        "max_iters": steps, "eval_interval": 50, "dropout": 0.1, "n_layer": 2,
        "gradient_accumulation_steps": processes,
    }  # fmt: skip

    def line(out: str, *more: str) -> list[str]:
        return ["train.py", *argv(data_dir, folder / out, **knobs), *settings, *more]

    began = time.monotonic()
    job = Job(folder / "straight.log", line("straight"), processes=processes)
    try:
        assert job.ended(600) == 0, job.said()
    finally:
        job.close()
    whole, straight = time.monotonic() - began, losses(folder / "straight")
    assert len(straight) == steps
    done, attempt, resumed, out = 0, 0, 0, folder / "out"

    def unfinished() -> bool:
        return len(losses(out)) < steps

    how = ("--standalone", f"--max_restarts={kills}") if restarts else ("--standalone",)
    while done < kills or unfinished():
        attempt += 1
        assert attempt < 4 * kills + 4, "the run ends before it is killed: take more --steps"
        more = ("--init_from=resume",) if any(out.glob("step-*")) else ()
        job, since = (
            Job(folder / f"{attempt}.log", line("out", *more), *how, processes=processes),
            0,
        )
        try:
            while done < kills and job.torchrun.poll() is None:
                time.sleep(chance.uniform(0, whole))
                if seen := kill_one(job, chance, since, unfinished):
                    done += 1
                    say(f"{done}: {seen}")
                    if restarts:
                        since = len(job.said())
                        job.wait_for(lambda j=job: j.ranks() or j.torchrun.poll() is not None, 60)
                    else:
                        assert job.ended(LIMIT_S) != 0
            code = job.ended(600)
            assert code == 0 or not restarts, job.said()
            resumed += len(re.findall("resuming .* after step", job.said()))
        finally:
            job.close()
        if code == 0 and done < kills:  # it was faster than the next kill: another one
            same(losses(out), straight, processes)
            out.rename(folder / f"whole-{attempt}")
    same(losses(out), straight, processes)
    say(f"{done} kills, {resumed} times resumed, {steps} losses are those of the undisturbed run")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restarts", action="store_true")
    given, settings = parser.parse_known_args()  # the rest is train.py's
    with tempfile.TemporaryDirectory() as place:
        prove(Path(place), **vars(given), settings=settings)
