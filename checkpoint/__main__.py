"""Export a checkpoint to one folder: python -m checkpoint export FOLDER --to=PLACE."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from checkpoint import store
from checkpoint.convert import save_hf
from core.settings import Texts, UserError, exit_on_user_error, read


@dataclass(frozen=True)
class ExportConfig:
    """Export the weights of a checkpoint: python -m checkpoint export FOLDER --to=PLACE."""

    command: Texts = ()  # export FOLDER: a checkpoint, or a run's folder (its newest checkpoint)
    to: str | None = None  # new folder
    format: Literal["safetensors", "transformers"] = "safetensors"  # safetensors: for --init_from


def main(argv: list[str]) -> int:
    config = read(ExportConfig, argv, positional="command").settings
    if len(config.command) != 2 or config.command[0] != "export" or config.to is None:
        raise UserError("usage: python -m checkpoint export FOLDER --to=PLACE")
    to, source = Path(config.to), store.own_checkpoint(config.command[1])
    if source is None:
        raise UserError(f"no checkpoint in {config.command[1]}")
    if to.exists():
        raise UserError(f"{to} exists: name a new folder, or delete it")
    model, partial = store.load(source).model(), to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed export left it
    try:
        partial.mkdir(parents=True)
        if config.format == "transformers":
            save_hf(model, partial)
        else:
            store.save_weights(model.state_dict(), partial / "model.safetensors")
            for name in ("settings.json", "train_state.json"):
                shutil.copyfile(source / name, partial / name)
        partial.rename(to)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        reason = store.with_sizes(store.disk_error(e), to.parent, model.state_dict())
        raise UserError(f"could not write {to} ({reason})") from e
    print(f"exported {source} to {to} ({config.format})")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
