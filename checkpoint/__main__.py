"""python -m checkpoint export FOLDER --to=PLACE: one folder of weights, whatever wrote them."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file

from checkpoint.convert import save_hf
from checkpoint.store import load, own_checkpoint
from core.settings import Texts, UserError, exit_on_user_error, first_line, read


@dataclass(frozen=True)
class ExportConfig:
    """Write the weights of a checkpoint into one folder, on the CPU, by one process, whatever
    number of processes saved it: python -m checkpoint export FOLDER --to=PLACE."""

    command: Texts = ()  # export FOLDER: a checkpoint, or a run's folder and so its newest
    to: str | None = None  # the folder to write, which is not there yet
    format: Literal["safetensors", "transformers"] = "safetensors"  # ours (--init_from), or GPT-2's


def main(argv: list[str]) -> int:
    config = read(ExportConfig, argv, positional="command").settings
    if len(config.command) != 2 or config.command[0] != "export" or config.to is None:
        raise UserError("say what and where to: python -m checkpoint export FOLDER --to=PLACE")
    export(config.command[1], Path(config.to), config.format)
    return 0


def export(source: str, to: Path, form: str) -> None:
    """Write the weights of our own checkpoint `source` to the new folder `to`: model.safetensors,
    settings.json and train_state.json, or the files of transformers. The optimizer stays behind.

    Raises:
        UserError: there is no such checkpoint, it is damaged, `to` is there, or cannot be written.
    """
    if (own := own_checkpoint(source)) is None:
        raise UserError(f"there is no checkpoint in {source}")
    if to.exists():
        raise UserError(f"{to} is there already: name a new folder, or delete it")
    saved = load(own)
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
        partial.mkdir(parents=True)
        if form == "transformers":
            save_hf(saved.model(), partial)
        else:
            path = partial / "model.safetensors"
            save_file(saved.weights(), path, metadata={"format": "pt"})
            for name in ("settings.json", "train_state.json"):
                shutil.copyfile(own / name, partial / name)
        partial.rename(to)
    except (OSError, SafetensorError) as e:
        raise UserError(f"could not write {to} ({first_line(e)})") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{own} is now in {to} ({form})")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
