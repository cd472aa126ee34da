"""Export a checkpoint to one folder: python -m checkpoint export FOLDER --to=PLACE."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from checkpoint.convert import save_hf
from checkpoint.store import load, own_checkpoint, plain_disk_errors, save_weights
from core.settings import Texts, UserError, exit_on_user_error, first_line, read


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
    export(config.command[1], Path(config.to), config.format)
    return 0


def export(source: str, to: Path, form: str) -> None:
    """Write a checkpoint's weights to the new folder `to`.

    Raises:
        UserError: `source` is missing or damaged, `to` exists or cannot be written.
    """
    if (own := own_checkpoint(source)) is None:
        raise UserError(f"no checkpoint in {source}")
    if to.exists():
        raise UserError(f"{to} exists: name a new folder, or delete it")
    saved = load(own)
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a killed export left it
        partial.mkdir(parents=True)
        with plain_disk_errors(partial):
            if form == "transformers":
                save_hf(saved.model(), partial)
            else:
                save_weights(saved.weights(), partial / "model.safetensors")
        if form == "safetensors":
            for name in ("settings.json", "train_state.json"):
                shutil.copyfile(own / name, partial / name)
        partial.rename(to)
    except (OSError, SafetensorError) as e:
        raise UserError(f"could not write {to} ({first_line(e)})") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"exported {own} to {to} ({form})")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
