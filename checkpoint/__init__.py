"""Save, load and resume; weights from other formats and to them."""

from checkpoint.resume import build_model, random_state, restore, resumed
from checkpoint.store import (
    Checkpoint,
    best_folder,
    folders,
    init_model,
    latest,
    load,
    load_hf,
    load_nanogpt,
    model_settings,
    save,
    save_hf,
    set_aside,
    tokenizer_meta,
)

__all__ = [
    "Checkpoint",
    "best_folder",
    "build_model",
    "folders",
    "init_model",
    "latest",
    "load",
    "load_hf",
    "load_nanogpt",
    "model_settings",
    "random_state",
    "restore",
    "resumed",
    "save",
    "save_hf",
    "set_aside",
    "tokenizer_meta",
]
