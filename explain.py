"""See the attention of a model at work, on your own text: one HTML file, or --text in a terminal.

python explain.py --out_dir=out/shakespeare_cpu --prompt="To be, or not to be"
python explain.py --init_from=gpt2 --prompt="The cat sat on the mat" --layer=5 --head=1
python explain.py --prompt="To be|or not to be" --segments="|" --window=6 --text

Maps of every layer and head, the tiles of FlashAttention one by one with the bytes that they move,
a decode step through each KV cache, what it all costs on a GPU as the text grows, and a ring of
processes that share the text. No GPU is needed. Everything shown is computed in that run, by the
model and by the code in attention/.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt

import attention
import checkpoint
import sample
from core.runtime import describe, show_log
from core.settings import UserError, check_fields, exit_on_user_error, read
from model import GPT
from viewer.caches import caches, refused
from viewer.cost import costs
from viewer.document import About, Document, Token, token_of
from viewer.maps import Call, maps, watched
from viewer.page import render as as_page
from viewer.ring import play
from viewer.text import render as as_text
from viewer.tiles import tiles

MOST_TOKENS = 256  # shown; what comes after them is left out


@dataclass(frozen=True)
class ExplainConfig:
    """Show the attention of a trained model at work."""

    # --- model ---
    out_dir: str = "out/shakespeare_cpu"  # folder of the run to explain
    init_from: str = "resume"  # resume: out_dir's run; gpt2[-...], a checkpoint, ckpt.pt
    checkpoint: Literal["latest", "best"] = "latest"  # best: the lowest validation loss
    attention_backend: str = "auto"  # a name from python -m attention, or a file (docs/KERNEL.md)
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
    window: PositiveInt | None = None  # keys that a query sees; none: as the model has it
    # --- text ---
    prompt: str = "To be, or not to be"  # the text, or FILE:prompt.txt
    segments: str | None = None  # a mark that cuts the prompt into documents; it is left out
    # --- what to look at ---
    layer: int = 0  # what the page begins with, and --text shows
    head: int = 0  # of that layer
    block_m: PositiveInt = 8  # rows of a tile, queries: small, so that a short text has several
    block_n: PositiveInt = 8  # columns of a tile, keys
    ring: PositiveInt = 4  # processes that share the text where the ring is played
    fast_memory: PositiveInt = 192 << 10  # bytes on chip assumed, as a processor of an A100 has
    gpu: str = "A100-SXM4-80GB"  # whose roofline
    # --- output ---
    html: str | None = None  # the page; none: explain.html in out_dir, or here with --init_from
    text: bool = False  # to the terminal instead
    json: str | None = None  # the numbers behind it, as a file
    # --- machine ---
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights and arithmetic
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        check_fields(self)
        if self.segments == "":
            raise ValueError("segments must have at least one character, or be none")


def load(config: ExplainConfig) -> tuple[GPT, Any]:
    """The model in evaluation mode on its device, and its tokenizer."""
    same = ("out_dir", "init_from", "checkpoint", "attention_backend", "attention_fallback",
            "dtype", "device")  # fmt: skip
    asked = sample.SampleConfig(kv_cache="none", **{name: getattr(config, name) for name in same})
    window = {} if config.window is None else {"attention_window": config.window}
    model, tokenizer = sample.load(asked, **window)
    c = model.config
    for name, got, n in (("layer", config.layer, c.n_layer), ("head", config.head, c.n_head)):
        if not 0 <= got < n:
            raise UserError(f"{name} must be 0 to {n - 1}, which this model has, got {got}")
    return model, tokenizer


@dataclass
class Prompt:
    """The tokens that are shown."""

    text: str
    ids: list[int]
    segments: list[int] | None  # the document of each token
    notes: list[str]  # what was left out


def prompt_of(config: ExplainConfig, tokenizer: Any, block_size: int) -> Prompt:
    """The prompt's tokens, at most MOST_TOKENS; a UserError if it cannot be used."""
    given = sample.prompts(sample.SampleConfig(start=(config.prompt,)))[0].text  # FILE: is read
    parts = [given] if config.segments is None else given.split(config.segments)
    encoded = [ids for part in parts if (ids := tokenizer.encode(part))]
    ids = [id_ for part in encoded for id_ in part]
    segments = [n for n, part in enumerate(encoded) for _ in part]
    if not ids:
        raise UserError("the prompt is empty; leave --prompt out, or give it a character")
    if len(ids) > block_size:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the model takes {block_size} (block_size); "
            "shorten it"
        )
    if block_size < 2:
        raise UserError("the model takes one token only (block_size 1): there is nothing to see")
    notes = []
    if len(ids) > MOST_TOKENS:
        notes.append(
            f"The prompt has {len(ids)} tokens; the first {MOST_TOKENS} are shown. No later token "
            "changes what they see."
        )
    cut = slice(MOST_TOKENS)
    return Prompt(given, ids[cut], None if config.segments is None else segments[cut], notes)


def explain(model: GPT, tokenizer: Any, config: ExplainConfig, source: str) -> Document:
    """Everything that is shown; `source` says where the weights come from."""
    prompt = prompt_of(config, tokenizer, model.config.block_size)
    pieces = tokenizer.token_bytes()
    shown = [token_of(id_, pieces) for id_ in prompt.ids]
    notes = []
    if prompt.segments is not None:
        notes.append("A cache holds one text: here the documents are read as one.")
    try:
        calls = forward(model, prompt)
        return {
            "about": about(model, tokenizer, config, prompt, shown, source),
            "maps": maps(calls),
            "tiles": tiles(calls, config.block_m, config.block_n, config.layer, config.head),
            "ring": play(calls[config.layer], config.ring, config.layer, config.head),
            "caches": caches(model, prompt.ids, pieces, notes),
            "costs": costs(calls[0].spec, config.gpu, config.fast_memory),
        }
    except ValueError as e:  # BackendUnavailable is one
        raise UserError(str(e)) from e


@torch.no_grad()
def forward(model: GPT, prompt: Prompt) -> list[Call]:
    """Run the prompt through the model: the inputs and output of each layer's attention."""
    device = model.transformer.wte.weight.device
    idx = torch.tensor([prompt.ids], device=device)
    segments = None
    if prompt.segments is not None:
        segments = torch.tensor([prompt.segments], dtype=torch.int32, device=device)
    with watched(model) as calls:
        last = model.hidden(idx, segments)
    outputs = {f"the attention of layer {n}": call.out for n, call in enumerate(calls)}
    for where, x in {**outputs, "the last layer": last}.items():
        if not x.isfinite().all():
            raise UserError(f"{where} gives NaN or infinity: there is nothing to show")
    return calls


@torch.no_grad()
def about(model: GPT, tokenizer: Any, config: ExplainConfig, prompt: Prompt, shown: list[Token],
          source: str) -> About:  # fmt: skip
    """The model, the prompt, and the backend that ran."""
    c = model.config
    chosen, spec = model.attention(prompt.segments is not None, (1, len(shown)))
    return {
        "source": source,
        "tokenizer": tokenizer.name,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_kv_head": c.kv_heads,
        "head_dim": c.head_dim,
        "n_embd": c.n_embd,
        "block_size": c.block_size,
        "vocab_size": c.vocab_size,
        "n_params": sum(p.numel() for p in model.parameters()),
        "device": describe(model.transformer.wte.weight.device),
        "dtype": spec.dtype,
        "backend": chosen.backend.name,
        "kernels": list(chosen.kernels),
        "announced": chosen.info(),
        "refused": refused(chosen),
        "torch": torch.__version__,
        "prompt": prompt.text,
        "tokens": shown,
        "segments": prompt.segments,
        "window": spec.window,
        "layer": config.layer,
        "head": config.head,
        "notes": prompt.notes,
    }


def source_of(config: ExplainConfig) -> str:
    """Where the weights come from, as sample.load() finds them."""
    source = config.out_dir if config.init_from == "resume" else config.init_from
    if not checkpoint.folders(source):
        return source
    best = checkpoint.best_folder(source) if config.checkpoint == "best" else None
    return str(best or checkpoint.latest(source))


def main(argv: list[str]) -> int:
    show_log()
    aliases = {"attn_implementation": "attention_backend"}
    config = read(ExplainConfig, argv, aliases=aliases).settings
    begin = time.perf_counter()
    try:
        model, tokenizer = load(config)
    except attention.BackendUnavailable as e:
        raise UserError(str(e)) from e
    loaded = time.perf_counter()
    document = explain(model, tokenizer, config, source_of(config))
    took, n = time.perf_counter() - loaded, len(document["about"]["tokens"])
    said = f"{n} token{'s' * (n != 1)} explained in {took:.1f} s"
    print(f"{said}, after {loaded - begin:.1f} s for the model", file=sys.stderr)
    if config.json is not None:
        write(config.json, json.dumps(document, allow_nan=False))
    if config.text:
        if hasattr(sys.stdout, "reconfigure"):  # signs that the terminal has not become "?"
            sys.stdout.reconfigure(errors="replace")
        print(as_text(document))
        return 0
    folder = Path(config.out_dir if config.init_from == "resume" else ".")
    path, page = config.html or str(folder / "explain.html"), as_page(document)
    write(path, page)
    print(f"{path} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser")
    return 0


def write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e})") from e


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
