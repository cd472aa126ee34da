"""Show each head's attention over your text: an HTML page, or --text in a terminal.

python explain.py --out_dir=out/shakespeare_cpu --prompt="To be, or not to be"
python explain.py --init_from=gpt2 --prompt="The cat sat on the mat" --layer=5 --head=1
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from core.settings import Words, check_fields, exit_on_user_error, read, read_early

log = logging.getLogger("nanoattn")
MOST_TOKENS = 256  # shown


@dataclass(frozen=True)
class ExplainConfig:
    """Show every head's attention over your text, and whether the executed kernel agrees with the
    formula. Example: --prompt="To be|or not to be" --segments="|" --window=6 --json=numbers.json"""

    out_dir: str = "out/shakespeare_cpu"  # folder of the run
    init_from: str = "resume"  # or gpt2[-...], a checkpoint, ckpt.pt
    attention_backend: str = "auto"  # as in sample.py
    attention_fallback: bool = True  # False: fail if the backend cannot run here
    window: PositiveInt | None = None  # keys that a query sees; none: the model's
    prompt: Words = "To be, or not to be"  # the text, or FILE:prompt.txt
    segments: Words | None = None  # separator of documents in the prompt
    layer: int | None = None  # shown first, and by --text; none: that of the lowest entropy
    head: int | None = None  # of that layer
    html: str | None = None  # none: explain.html in out_dir, or here with --init_from
    text: bool = False  # print to the terminal instead
    json: str | None = None  # file for the numbers too (explain.py, viewer/document.py)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights and computation
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        check_fields(self)


if __name__ == "__main__":  # --help and mistakes come before torch
    read_early(ExplainConfig, sys.argv[1:])

import torch

import checkpoint
import sample
from core.files import printable, write_at_once
from core.runtime import describe, explained, show_log
from core.settings import UserError, user_errors
from data.tokenizer import Tokenizer
from model import GPT
from viewer.document import Document, maps, tiles, token_of, watched
from viewer.page import as_text
from viewer.page import render as as_page


@torch.no_grad()
def explain(model: GPT, tokenizer: Tokenizer, config: ExplainConfig, source: str) -> Document:
    """`source` names the weights. Raises ValueError or UserError."""
    c = model.config
    for name in ("layer", "head"):
        got, n = getattr(config, name), getattr(c, f"n_{name}")
        if got is not None and not 0 <= got < n:
            raise UserError(f"--{name}: expected 0 to {n - 1}, got {got}")
    prompt = sample.prompts(sample.SampleConfig(start=(config.prompt,)))[0]  # FILE: is read
    parts = [prompt] if config.segments is None else prompt.split(config.segments)
    encoded = [[*tokenizer.begin, *part] for part in map(tokenizer.encode, parts) if part]
    ids = [id_ for part in encoded for id_ in part]
    if not ids:
        raise UserError("--prompt: expected at least one token, got 0")
    segments = [n for n, part in enumerate(encoded) for _ in part] if config.segments else None
    most, notes = min(c.block_size, MOST_TOKENS), []
    if len(ids) > most:
        why = f": the model reads at most {most} (block_size)" if most == c.block_size else ""
        notes.append(f"Only the first {most} of the prompt's {len(ids)} tokens are shown{why}.")
        ids, segments = ids[:most], segments and segments[:most]
    device = model.transformer.wte.weight.device
    own = None if segments is None else torch.tensor([segments], dtype=torch.int32, device=device)
    with watched(model) as calls:
        last = model.hidden(torch.tensor([ids], device=device), own)
    names = [*(f"the attention of layer {n}" for n in range(len(calls))), "the last layer"]
    for name, x in zip(names, [*(call.out for call in calls), last], strict=True):
        if not x.isfinite().all():
            raise UserError(f"{name} contains NaN or infinity")
    pieces = tokenizer.token_bytes()
    found = maps(calls)
    layers = range(c.n_layer) if config.layer is None else [config.layer]
    heads = range(c.n_head) if config.head is None else [config.head]
    _, layer, head = min((found["entropy"][n][h], n, h) for n in layers for h in heads)
    _, spec, chosen = model.plan(grad=False, segments=segments is not None)[0]
    about = {
        "source": source,  # of the weights
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_kv_head": c.kv_heads,
        "head_dim": c.head_dim,
        "n_params": sum(p.numel() for p in model.parameters()),
        "device": describe(device),
        "dtype": spec.dtype,
        "backend": chosen.backend.name,
        "announced": chosen.info(),
        "refused": [{"name": name, "why": list(why)} for name, why in chosen.rejected.items()],
        "prompt": prompt,
        "tokens": [token_of(id_, pieces) for id_ in ids],
        "segments": segments,  # of each token, or null
        "windows": list(c.windows),  # of each layer, in keys that a query sees
        "layer": layer,
        "head": head,
        "notes": notes,
    }
    return {"about": about, "maps": found, "tiles": tiles(calls)}


def main(argv: list[str]) -> int:
    show_log()
    config = read(ExplainConfig, argv).settings
    same = ("out_dir", "init_from", "attention_backend", "attention_fallback", "dtype", "device")
    fields = {name: getattr(config, name) for name in same}
    window = {} if config.window is None else {"attention_window": config.window}
    with explained("a shorter --prompt"), user_errors():
        model, tokenizer = sample.load(sample.SampleConfig(kv_cache="none", **fields), **window)
        resumed = config.init_from == "resume"
        source = config.out_dir if resumed else config.init_from
        named = checkpoint.latest(source) if checkpoint.folders(source) else source
        document = explain(model, tokenizer, config, str(named))
    for note in document["about"]["notes"]:
        log.warning(note)
    if config.json is not None:
        write(config.json, json.dumps(document, allow_nan=False))
    if config.text:
        print(as_text(document))
        return 0
    path = config.html or str(Path(config.out_dir if resumed else ".") / "explain.html")
    page = as_page(document)
    write(path, page)
    print(f"{printable(path)} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser")
    return 0


def write(path: str, text: str) -> None:
    with user_errors(f"cannot write {printable(path)}: "):
        write_at_once(Path(path), text)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
