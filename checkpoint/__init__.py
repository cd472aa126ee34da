"""Save, load and resume; weights from other formats and to them."""

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
    "folders",
    "init_model",
    "latest",
    "load",
    "load_hf",
    "load_nanogpt",
    "model_settings",
    "save",
    "save_hf",
    "set_aside",
    "tokenizer_meta",
]
