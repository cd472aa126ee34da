"""Run one function in N gloo processes."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

PRELOAD = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "train",
           "matplotlib.figure", "pytest", "hypothesis"]  # fmt: skip


def run(function: Callable[..., Any], n: int, *args: Any, timeout: float = 120) -> list[Any]:
    """[function(rank, n, *args) for each rank], each in a process of one gloo group.

    function: of a module; its result is pickled. Raises AssertionError: a process failed, ended
    without a result, or took more than `timeout` s.
    """
    # The server has imported what takes seconds, and started no threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        begun = [context.Process(target=_child, args=(function, rank, n, folder, args))
                 for rank in range(n)]  # fmt: skip
        for process in begun:
            process.start()
        waiting = {process.sentinel: rank for rank, process in enumerate(begun)}
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * n
        try:
            while waiting:
                ended = wait([*waiting], max(0, deadline - time.monotonic()))
                assert ended, f"ranks {[*waiting.values()]} were not done in {timeout} s"
                for rank in map(waiting.pop, ended):
                    path = Path(folder, f"result-{rank}")
                    good, results[rank] = False, f"rank {rank} ended without a word"
                    if path.exists():  # gloo's own thread may crash while hanging up
                        good, results[rank] = torch.load(path, weights_only=False)
                    assert good, f"{results[rank]}, exit code {begun[rank].exitcode}"
            return results
        finally:
            for process in begun:
                process.kill()
                process.join()


def _child(function: Any, rank: int, n: int, folder: str, args: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    path = Path(folder, f"result-{rank}")
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n)
        result = function(rank, n, *args)
        dist.barrier()
        torch.save((True, result), path)
        dist.destroy_process_group()
    except BaseException:
        torch.save((False, f"rank {rank}:\n{traceback.format_exc()}"), path)
        raise SystemExit(1) from None


def trained(rank: int, n: int, lines: list[list[str]]) -> list[str]:
    """What train.py prints with each command line, in this process of the group."""
    import torch.distributed as dist
    from matplotlib.figure import Figure

    import train

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # fmt: skip
    os.environ |= {k: str(v) for k, v in told.items()}
    said = []
    Figure.savefig = lambda figure, path, **_: Path(path).touch()
    gc.freeze()  # else each run looks for garbage among all modules
    gc.unfreeze = lambda: None
    nothing = Mock()
    place = Mock(side_effect=lambda *args, **how: iter([(dist.HashStore(), rank, n)]))
    with patch.multiple(dist, init_process_group=nothing, destroy_process_group=nothing,
                        rendezvous=place):  # fmt: skip
        for line in lines:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                assert train.main(line) == 0, out.getvalue()
            said.append(out.getvalue())
    return said
