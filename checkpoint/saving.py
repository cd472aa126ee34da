"""Checkpoints of a run, written at once or in the background."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from checkpoint.store import save
from checkpoint.tensors import numbers, tensors
from core.distributed import DistInfo
from core.parallel import is_sharded
from model import GPT


@dataclass
class Saver:
    """Writes the checkpoints of a run, one at a time.

    saver = Saver("out/gpt", keep=2, distributed=distributed, background=True)
    saver.save(model, optimizer, scaler, settings, tokenizer, step=100, val_loss=3.2)
    saver.wait()  # before the run ends
    """

    out_dir: str
    keep: int  # the newest ones that stay, besides the best
    distributed: DistInfo
    background: bool = False  # write while the training goes on
    best_loss: float = math.inf  # lowest validation loss so far
    _thread: threading.Thread | None = field(default=None, init=False)
    _failure: list[BaseException] = field(default_factory=list, init=False)

    def save(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        settings: dict[str, Any],
        tokenizer: dict[str, Any],
        *,
        step: int,
        val_loss: float | None,
        **state: Any,
    ) -> None:
        """Write a checkpoint; in the background, return when the tensors are copied.

        Args:
            settings: of the run, as plain values.
            tokenizer: from the dataset's meta.json.
            val_loss: None if this step was not evaluated.
            state: more values for train_state.json.

        Raises:
            UserError: this checkpoint or the previous one could not be written.
        """
        self.wait()
        distributed, random_state = self.distributed, {"cpu": torch.get_rng_state()}
        if distributed.device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state(distributed.device)
        rest = {"scaler": scaler.state_dict(), "rng": distributed.gather(random_state)}
        saved, contents = optimizer.state_dict(), dict[str, Any]()
        if distributed.world_size == 1 and not is_sharded(model):
            contents["weights"] = model.state_dict()
            contents["optimizer"] = {"optimizer": saved, **rest}
        else:
            number = numbers(model, optimizer)
            contents["shards"] = tensors(model, optimizer)
            groups = {"param_groups": saved["param_groups"]}
            names = sorted(number, key=number.__getitem__)
            contents["optimizer"] = {"optimizer": groups, "names": names, **rest}
        if val_loss is not None:
            self.best_loss = min(self.best_loss, val_loss)
        contents["settings"] = {
            "train": settings,
            "model": asdict(model.config),
            "tokenizer": tokenizer,
        }
        contents["state"] = {
            "step": step,
            "val_loss": val_loss,
            "best_val_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "processes": distributed.world_size,
            "job": distributed.job,  # after a restart by torchrun this checkpoint is resumed
            "torch": torch.__version__,
            **state,
        }
        if self.background:
            contents = copied(contents)
            # A daemon: a failing run ends at once.
            self._thread = threading.Thread(target=self._in_thread, args=[contents], daemon=True)
            self._thread.start()
        else:
            self._write(contents)

    def _write(self, contents: dict[str, Any]) -> None:
        # A separate group: training uses `control` at the same time.
        distributed = replace(self.distributed, control=self.distributed.disk)
        save(self.out_dir, keep=self.keep, **contents, distributed=distributed)

    def _in_thread(self, contents: dict[str, Any]) -> None:
        try:
            if (device := self.distributed.device).type == "cuda":
                torch.cuda.set_device(device)  # a new thread starts on device 0
            self._write(contents)
        except BaseException as e:
            self._failure.append(e)

    def wait(self) -> None:
        """Wait for a checkpoint in the background. Raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure.pop()


def copied(value: Any) -> Any:
    """Copy nested dicts and lists, tensors to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value
