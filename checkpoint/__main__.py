"""Export a checkpoint (docs/SERVE.md)."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

import data
from checkpoint import store
from checkpoint.families import save_hf, write_config
from checkpoint.store import Checkpoint
from core.files import printable
from core.settings import Texts, exit_on_user_error, read, user_errors
from data.schema import FileError, Json
from model import GPT


@dataclass(frozen=True)
class ExportConfig:
    """Export a checkpoint: python -m checkpoint export FOLDER [--to=PLACE]."""

    command: Texts = ()  # export FOLDER: a checkpoint, or a run's folder (its newest checkpoint)
    to: str | None = None  # new folder; none: FOLDER/export
    format: Literal["transformers", "safetensors"] = "transformers"  # safetensors: for --init_from


def main(argv: list[str]) -> int:
    config = read(ExportConfig, argv, positional="command").settings
    name, folder = (*config.command, "", "")[:2]
    if name != "export" or not folder or config.command[2:]:
        raise FileError("usage: python -m checkpoint export FOLDER [--to=PLACE]")
    to = Path(config.to or f"{folder}/export")
    if (source := store.own_checkpoint(folder)) is None:
        raise FileError(f"no checkpoint in {folder}")
    if to.exists():
        raise FileError(f"{to} exists: name a new folder, or delete it")
    saved = store.load(source)
    model, partial = saved.model(), to.with_name(f".{to.name}.partial")
    new = [path for path in partial.parents if not path.exists()]
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        if config.format == "transformers":
            export(model, saved, partial)
        else:
            store.save_weights(model.state_dict(), partial / "model.safetensors")
            for name in ("settings.json", "train_state.json"):
                shutil.copyfile(source / name, partial / name)
        partial.rename(to)
    except (OSError, SafetensorError) as e:
        raise FileError(f"could not write {to} ({store.disk_error(e)})") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # not empty: it holds the export
            for path in new:
                path.rmdir()
    print(f"exported {printable(source)} to {printable(to)} ({config.format})")
    return 0


def export(model: GPT, saved: Checkpoint, folder: Path) -> None:
    kind, train = write_config(model.config)["model_type"], saved.settings["train"]
    with user_errors(f"{saved.folder}: "):
        tokenizer = data.from_meta(saved.settings["tokenizer"])
    if kind == "qwen2" and not isinstance(tokenizer, data.FileTokenizer):
        # It ignores the pre-tokenizer of tokenizer.json: other ids, without a warning.
        raise FileError("--bias=qkv (qwen2) needs Qwen's tokenizer: transformers uses no other")
    eot, content, ends = tokenizer.eot, tokenizer.to_json(), [*tokenizer.ends]
    bos = next(iter(tokenizer.begin), eot)
    ids: Json = {"bos_token_id": bos, "eos_token_id": ends if ends[1:] else eot}
    save_hf(model, folder, tokenizer.vocab_size, **ids)
    store.save_json(content, folder / "tokenizer.json")
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    unknown = content["model"].get("unk_token")  # ctranslate2 expects one
    names = {"bos_token": special.get(bos), "eos_token": special.get(eot)}
    names["unk_token"] = unknown if unknown in special.values() else special.get(eot)
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.block_size,
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in names.items() if token is not None},
    }
    store.save_json(tokens, folder / "tokenizer_config.json")
    ids |= {"do_sample": True, "max_new_tokens": 100}  # else a server ignores the temperature
    if tokenizer.unused:
        ids["suppress_tokens"] = [*tokenizer.unused]
    store.save_json(ids, folder / "generation_config.json")
    loss = saved.state.get("val_loss")
    evaluated = "not known" if loss is None else f"{loss:.4f} nats a token"
    card = f"""---
library_name: transformers
pipeline_tag: text-generation
---

A {kind} model of {model.get_num_params(False):,} parameters, trained with nanoattn
on `{train.get("dataset")}` for {saved.step:,} steps. Validation loss: {evaluated}.

```json
{json.dumps(saved.settings["model"], indent=1)}
```
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
