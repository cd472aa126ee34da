"""The checkpoints that a run writes, now or in the background."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.store import save
from checkpoint.tensors import numbers, tensors
from core.distributed import DistInfo
from core.parallel import is_sharded


def save_run(run: Any, val_loss: float | None) -> None:
    """Write a checkpoint after a step of train.py's Run (val_loss None: it was not evaluated).

    With run.config.async_checkpoint only the copying is waited for; see Saving.
    """
    finish(run)
    distributed, random_state = run.distributed, {"cpu": torch.get_rng_state()}
    if distributed.device.type == "cuda":
        random_state["cuda"] = torch.cuda.get_rng_state(distributed.device)
    rng = distributed.gather(random_state)
    if val_loss is not None:
        run.best_loss = min(run.best_loss, val_loss)
    optimizer, rest = run.optimizer.state_dict(), {"scaler": run.scaler.state_dict(), "rng": rng}
    contents: dict[str, Any] = {}
    if distributed.world_size == 1 and not is_sharded(run.model):
        contents["weights"] = run.model.state_dict()
        contents["optimizer"] = {"optimizer": optimizer, **rest}
    else:
        from checkpoint.shards import check_replicas

        check_replicas(run.model.state_dict(), distributed)
        numbered = numbers(run.model, run.optimizer)
        contents["shards"] = tensors(run.model, run.optimizer)
        groups = {"param_groups": optimizer["param_groups"]}
        names = sorted(numbered, key=numbered.__getitem__)
        contents["optimizer"] = {"optimizer": groups, "names": names, **rest}
    contents["settings"] = {
        "train": asdict(run.config),
        "model": asdict(run.model.config),
        "tokenizer": run.meta["tokenizer"],
    }
    contents["state"] = {
        "step": run.step,
        "val_loss": val_loss,
        "best_val_loss": run.best_loss if math.isfinite(run.best_loss) else None,
        "sequences_seen": run.step * run.global_batch,  # the data position, derived from step
        "processes": distributed.world_size,
        "attention_backend": run.chosen.backend.name,
        "attention_kernels": list(run.chosen.kernels),
        "torch": torch.__version__,
    }
    how = {"out_dir": run.config.out_dir, "keep": run.config.keep_checkpoints}
    if not run.config.async_checkpoint:
        save(**how, **contents, distributed=distributed)
        return
    run.saving = run.saving or Saving(distributed)
    run.saving.begin(**how, **copied(contents))


def finish(run: Any) -> None:
    """Wait for the checkpoint that is being written in the background, if there is one; a run calls
    this before it ends.

    Raises:
        UserError: it could not be written.
    """
    if run.saving:
        run.saving.wait()


class Saving:
    """save() in the background, while the run goes on; one at a time."""

    def __init__(self, distributed: DistInfo) -> None:
        group = distributed.control  # in which the run's steps agree meanwhile
        group = None if group is None else dist.new_group(backend="gloo")
        self.distributed = replace(distributed, control=group)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def begin(self, **contents: Any) -> None:
        def work() -> None:
            try:
                if (device := self.distributed.device).type == "cuda":
                    torch.cuda.set_device(device)  # a new thread starts on device 0
                save(**contents, distributed=self.distributed)
            except BaseException as e:
                self.failure = e

        # A daemon: a run that fails ends at once, and leaves the checkpoint before.
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.thread, failure, self.failure = None, self.failure, None
        if failure is not None:
            raise failure


def copied(value: Any) -> Any:
    """Dicts and lists as they are now: a copy, with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value
