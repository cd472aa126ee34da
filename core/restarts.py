"""Processes that torchrun starts again: how they meet, and how they know their own run."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core.settings import UserError

JOIN_S = 1800.0  # for all processes to come; PyTorch's own limit for gloo
DEAD = (None, "Z", "X")  # what state() says of a process that has ended
MARK = ".started.json"  # in out_dir: whose run it is


def meet(wait_s: float = JOIN_S) -> tuple[Any, int, int]:
    """A store that only the processes of this attempt share; this one's rank; how many they are.

    torchrun keeps one store for all attempts, with every key of the dead: a process that starts
    again finds their addresses in it and connects to nobody (PyTorch issue 135712; so in 2.13).
    Nothing that torchrun tells is the same for all processes and new in each attempt: a node counts
    its own restarts only (issue 108158). So each process leaves a word that was never used before,
    and goes by the name that rank 0 answers it with.

    Raises:
        UserError: on rank 0, if some have not come in `wait_s` seconds.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=wait_s)))
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", word)
        name = store.get(f"welcome/{word}").decode()
        store.set(f"here/{name}/{rank}", "")
        return dist.PrefixStore(name, store), rank, size
    missing, deadline = list(range(1, size)), time.monotonic() + wait_s
    while missing:
        for r in missing:
            if store.check([f"hello/{r}"]):  # to that of an attempt before nobody listens
                store.set(f"welcome/{store.get(f'hello/{r}').decode()}", word)
        missing = [r for r in missing if not store.check([f"here/{word}/{r}"])]
        if missing and time.monotonic() > deadline:
            raise UserError(f"of {size} processes {missing[:8]} have not joined in {wait_s:.0f} s")
        time.sleep(0.02 if missing else 0)
    return dist.PrefixStore(word, store), rank, size


def restarted(out_dir: str, distributed: Any) -> bool:
    """Whether torchrun has started the run in out_dir again: the run, not an earlier one there.

    A run goes on as long as one of its torchrun processes does. Its count of restarts would not
    tell: it does not grow where a node joins or leaves, and is 0 on a new node.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    launchers, again = distributed.gather(_launcher()), False
    if distributed.main:
        with suppress(OSError, ValueError, KeyError, TypeError):  # no mark, or no good one
            before = json.loads((Path(out_dir) / MARK).read_text(encoding="utf-8"))["torchrun"]
            again = not set(launchers).isdisjoint(before)
    return distributed.gather(again)[0]


def mark_begun(out_dir: str, distributed: Any) -> None:
    """Note whose run out_dir holds from now on: an earlier one's checkpoints have been moved."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launchers = sorted(set(distributed.gather(_launcher())))
    if distributed.main:
        partial = Path(out_dir) / (MARK + ".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"torchrun": launchers}) + "\n", encoding="utf-8")
        partial.replace(partial.with_name(MARK))


def _launcher() -> str:
    """The torchrun above this process, so that no other one ever has this name: the nearest
    process above that was not itself started by torchrun (there may be a script between)."""
    pid = os.getppid()
    proc = Path("/proc")
    try:
        while b"\0TORCHELASTIC_RUN_ID=" in b"\0" + (proc / str(pid) / "environ").read_bytes():
            pid = int(_stat(pid)[1])
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {_stat(pid)[19]}"
    except OSError:  # no /proc: macOS
        import subprocess

        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        began = subprocess.run(ps, capture_output=True, text=True).stdout.strip()
        return f"{os.uname().nodename} {pid} {began}"


def _stat(pid: int) -> list[str]:
    """Of /proc/PID/stat what follows the name: [0] is the state, [1] the parent, [19] the start."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()


def state(pid: int) -> str | None:
    """One letter for a process on this machine: R, S, D, T is stopped, Z is dead; None: gone."""
    try:
        if sys.platform == "linux":
            return _stat(pid)[0]
        os.kill(pid, 0)
        return "S"
    except OSError:
        return None


def machine() -> str:
    """The machine's name, with the space of process numbers that this process lives in."""
    inside = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
    return f"{os.uname().nodename} {inside}".strip()
