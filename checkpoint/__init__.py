"""Save, load and resume; weights from other formats and to them."""

from checkpoint.convert import init_model, load_hf, load_nanogpt, save_hf
from checkpoint.store import (
    Checkpoint,
    best_folder,
    folders,
    latest,
    load,
    model_settings,
    save,
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
