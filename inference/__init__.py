"""Load a trained model.

model, tokenizer = inference.load("out/run")
print(engine.generate(model, "ROMEO:", 40))
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import checkpoint
import data
from attention import Policy
from core.cpu import int8
from core.files import printable
from core.options import Dtype, TrainConfig
from core.runtime import Setup, pick_device
from core.settings import UserError, user_errors
from data.loader import fits
from model import GPT

log = logging.getLogger("nanoattn")


def load(source: str | Path, *, which: str = "latest", dataset: str | None = None,
         device: str = "auto", dtype: Dtype = "auto", weights: str = "dtype",
         policy: Policy | None = None, **changes: Any) -> tuple[GPT, data.Tokenizer]:  # fmt: skip
    """Load a model in evaluation mode, and its tokenizer. Raises UserError.

    source: a run, a checkpoint, a nanoGPT ckpt.pt, an exported folder, gpt2[-...].
    which: a run's "latest" checkpoint, or "best": the lowest validation loss.
    dataset, device, dtype, weights: options of sample.py; changes: GPTConfig fields.
    """
    source = str(source)
    if which not in ("latest", "best") or weights not in ("dtype", "int8"):
        raise UserError(f"unknown {which=} (latest, best) or {weights=} (dtype, int8)")
    setup = Setup(pick_device(device), TrainConfig(dtype=dtype, compile=False))
    if which == "best":
        named = printable(source)
        if not checkpoint.folders(source):
            raise UserError(f"--checkpoint=best: expected a run of train.py, got {named}")
        if best := checkpoint.best_folder(source):
            source = str(best)
        else:
            newest = checkpoint.latest(source).name
            log.warning(f"--checkpoint=best: none of {named} was evaluated; using {newest}")
    model = checkpoint.init_model(source, policy or Policy(), **changes)
    model = setup.place(model, cast=True).eval()
    if weights == "int8":
        with user_errors("--weights=int8: "):
            int8.convert(model, model.head_weight)
    model.tokenizer = _tokenizer(source, model.config.vocab_size, dataset)
    return model, model.tokenizer


def _tokenizer(source: str, vocab_size: int, dataset: str | None) -> data.Tokenizer:
    meta, named = checkpoint.tokenizer_meta(source), dataset
    dataset = dataset or checkpoint.trained_on(source)
    if meta is None and dataset and (named or data.find(dataset).is_dir()):
        meta = data.read_meta(data.find(dataset))["tokenizer"]
    with user_errors(f"{printable(source)}: "):
        tokenizer = data.GPT2Tokenizer() if meta is None else data.from_meta(meta)
    if tokenizer.vocab_size > vocab_size:
        of = printable(dataset) if meta else "GPT-2"
        has = f"a vocabulary of {vocab_size} tokens, the tokenizer of {of} has"
        how = "name its dataset, as --dataset=shakespeare_char"
        raise UserError(f"{printable(source)} has {has} {tokenizer.vocab_size}: {how}")
    if meta is None and not fits(data.GPT2Tokenizer.vocab_size, vocab_size):
        log.warning(f"{printable(source)} has no tokenizer: using GPT-2's (--dataset sets another)")
    return tokenizer
