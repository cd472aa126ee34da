"""Generate text from prompts.

python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"
python sample.py --init_from=gpt2 --prompts=questions.txt --out=answers.jsonl --kv_cache=paged

Texts go to stdout, or as JSON lines to --out, in prompt order. Ctrl-C writes the texts so far and
exits with code 130. Text n has the seed --seed + n. In float32 it is the same with any batch and
cache; in other dtypes and with --weights=int8 rounding depends on them, and texts can differ.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field, PositiveInt

from core import terminal
from core.settings import Size, Texts, UserError, check_fields, exit_on_user_error, read, read_early

log = logging.getLogger("nanoattn")


@dataclass(frozen=True)
class SampleConfig:
    """Generate text from a trained model."""

    # --- model ---
    out_dir: str = "out/gpt"  # folder of the run to sample from
    init_from: str = "resume"  # resume: out_dir's run; gpt2[-...], ckpt.pt, an exported folder
    dataset: str | None = None  # its tokenizer, if the model has none: as in train.py, or a folder
    checkpoint: Literal["latest", "best"] = "latest"  # best: the lowest validation loss
    attention_backend: str = "auto"  # a name (python -m attention), or code (docs/KERNEL.md)
    attention_fallback: bool = True  # False: error if the backend cannot run here
    attention_hub_kernels: bool = False  # flash_attn_*, hub:...: download a kernel and run it
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- text ---
    start: Texts = ()  # prompt or FILE:prompt.txt, repeatable; none: a newline
    prompts: str | None = None  # a file with one prompt a line
    num_samples: Size = 1  # texts for each prompt
    max_new_tokens: Size = 500  # most tokens to generate
    temperature: float = 0.8  # below 1: safer, above: bolder; 0: the likeliest token
    top_k: int | None = 200  # draw from the k likeliest tokens only; none: from all
    top_p: float | None = None  # then from the fewest whose probabilities sum to p; none: from all
    seed: int = 1337  # of the first text; one more for each further text
    regex: str | None = None  # each new text matches this regular expression
    # --- output ---
    stream: bool = False  # print tokens as they come, one text at a time
    out: str | None = None  # file for JSON lines instead of stdout
    # --- speed ---
    kv_cache: Literal["none", "dynamic", "static", "paged"] = "dynamic"  # see inference/engine.py
    compile: bool = False  # each decode step as one graph, with --kv_cache=static
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: half on CUDA
    weights: Literal["dtype", "int8"] = "dtype"  # int8: linear layers and head in 8 bits
    batch_size: PositiveInt = 8  # texts at a time
    n_pages: Annotated[int, Field(ge=2)] | None = None  # --kv_cache=paged; none: enough
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        check_fields(self)
        attention.check_name(self.attention_backend)
        Options(self.temperature, self.top_k, self.top_p)
        if self.compile and self.kv_cache != "static":
            raise ValueError(f"compile needs kv_cache=static, got {self.kv_cache}")
        if self.n_pages is not None and self.kv_cache != "paged":
            raise ValueError(f"n_pages needs kv_cache=paged, got {self.kv_cache}")


ALIASES = {"attn_implementation": "attention_backend"}

if __name__ == "__main__":  # --help and errors before torch takes its seconds
    read_early(SampleConfig, sys.argv[1:], aliases=ALIASES)


import attention
import checkpoint
import data
from core.cpu import int8
from core.files import open_output
from core.runtime import Setup, decide_compile, explained, pick_device, show_log
from data.loader import fits
from data.tokenizer import well_formed
from inference import constrain
from inference.sampling import Options
from inference.texts import Text, Writer
from model import GPT


def load(config: SampleConfig, **changes: object) -> tuple[GPT, data.Tokenizer]:
    """The model in evaluation mode and its tokenizer; `changes` go into the GPTConfig."""
    device = pick_device(config.device)
    if config.compile and not (possible := decide_compile(True, device)):
        raise UserError(f"--compile is not possible here: {possible.reason}")
    setup = Setup.of(device, config.dtype)
    source = config.out_dir if config.init_from == "resume" else config.init_from
    if config.init_from == "resume" or checkpoint.folders(source):
        folder = checkpoint.latest(source)
        if config.checkpoint == "best" and (best := checkpoint.best_folder(source)):
            folder = best
        elif config.checkpoint == "best":
            log.warning(f"--checkpoint=best: none of {source} was evaluated; using {folder.name}")
        source = str(folder)
    elif config.checkpoint == "best":
        raise UserError(f"--checkpoint=best: expected a run of train.py, got {source}")
    permitted = config.attention_fallback, config.attention_hub_kernels, config.allow_mps_sdpa
    changes["attention_backend"] = config.attention_backend
    model = checkpoint.init_model(source, attention.Policy(*permitted), **changes)
    model = setup.place(model, cast=True).eval()
    if config.weights == "int8":
        head = model.head_weight
        if why := int8.why_not(model, head.device, head.dtype):
            raise UserError(f"--weights=int8: {why}")
        int8.convert(model, head)
    # Logs the kernel before any text.
    kind = config.kv_cache if config.kv_cache in ("dynamic", "paged") else "none"
    model.plan(grad=False, cache=kind, page_size=16 if kind == "paged" else None)
    return model, tokenizer_of(config, source, model.config.vocab_size)


def tokenizer_of(config: SampleConfig, source: str, vocab_size: int) -> data.Tokenizer:
    """The checkpoint's own tokenizer, else the dataset's, else GPT-2's."""
    meta = checkpoint.tokenizer_meta(source)
    dataset = config.dataset or checkpoint.trained_on(source)
    if meta is None and dataset and (config.dataset or data.find(dataset).is_dir()):
        meta = data.read_meta(data.find(dataset))["tokenizer"]
    tokenizer = data.GPT2Tokenizer() if meta is None else data.from_meta(meta)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{source} has a vocabulary of {vocab_size} tokens, the tokenizer of "
            f"{dataset if meta else 'GPT-2'} has {tokenizer.vocab_size}: name its own dataset, as "
            "in --dataset=shakespeare_char"
        )
    if meta is None and not fits(data.GPT2Tokenizer.vocab_size, vocab_size):
        log.warning(f"{source} has no tokenizer: GPT-2's may be another (--dataset=NAME sets it)")
    return tokenizer


# --- prompts ---


def prompts(config: SampleConfig) -> list[str]:
    """The prompts of --start and --prompts."""
    texts = [_read(s.removeprefix("FILE:")) if s.startswith("FILE:") else s for s in config.start]
    if config.prompts is not None:
        lines = [line for line in _read(config.prompts).split("\n") if line.strip()]
        if not lines:
            raise UserError(f"no prompt in {config.prompts}")
        texts += lines
    return [well_formed(text) for text in texts]


def default_prompt(tokenizer: data.Tokenizer) -> str:
    """A newline, or where no text has one: the first character, or nothing."""
    if isinstance(tokenizer, data.CharTokenizer) and "\n" not in tokenizer.ids:
        return next(filter(None, tokenizer.vocabulary))
    return "\n" if tokenizer.encode("\n") else ""


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path} ({e})") from e


def encode(prompt: str, tokenizer: data.Tokenizer, block_size: int) -> list[int]:
    """The prompt's token ids. Raises UserError if it is empty or has unknown characters."""
    ids = [*tokenizer.begin, *tokenizer.encode(prompt)]
    if not ids and not prompt and tokenizer.eot is not None:
        ids = [tokenizer.eot]  # as between two documents
    if not ids:
        raise UserError(f"the prompt {prompt!r} has no tokens")
    if len(ids) > block_size:
        log.warning(
            f"a prompt has {len(ids)} tokens, more than block_size: only the last {block_size} "
            "are read"
        )
    return ids


# --- output ---


@explained("a smaller --batch_size or --max_new_tokens, --dtype=bfloat16 or --weights=int8")
def main(argv: list[str]) -> int:
    """Continue every prompt; returns the exit code."""
    show_log()
    config = read(SampleConfig, argv, aliases=ALIASES).settings
    starts = prompts(config)
    files = [os.path.realpath(path) for path in (config.prompts, config.out) if path]
    if len(files) > len(set(files)):
        raise UserError(f"--out={config.out} would replace --prompts")
    terminal.prepare(*["stdout"] * bool(config.out))  # the texts go on without their reader
    model, tokenizer = load(config)
    writer = writer_of(config, model, tokenizer, starts)
    code = written = 0
    with _open(config.out or os.devnull) as out:
        steps = writer.steps()
        try:
            for text in writer.texts:
                new = _new(steps, text)
                if config.stream:
                    _stream(new, text, writer)
                for _ in new:
                    pass
                _print(text, writer, out, config)
                written += 1
        except KeyboardInterrupt as e:
            code = e.args[0] if e.args else 130  # of core/settings.py
        finally:
            steps.close()
        for text in writer.texts[written:]:
            if text.finish != "waiting":
                _print(text, writer, out, config)
    print(writer.report(), file=sys.stderr)
    return code


def writer_of(c: SampleConfig, model: GPT, tokenizer: data.Tokenizer, prompts: list[str]) -> Writer:
    texts: list[Text] = []
    for prompt in prompts or [default_prompt(tokenizer)]:
        ids = encode(prompt, tokenizer, model.config.block_size)
        for _ in range(c.num_samples):
            texts.append(Text(prompt, ids, c.seed + len(texts)))
    if max(len(text.ids) for text in texts) + c.max_new_tokens > model.config.block_size + 1:
        model.plan(grad=False)  # a text that slides has no cache: log its kernel before any text
    vocabulary = tokenizer.vocab_size, tokenizer.unused
    options = Options(c.temperature, c.top_k, c.top_p, *vocabulary)
    if c.regex is not None:
        options.constraint = constrain.regex(c.regex, tokenizer)
    size = 1 if c.stream else c.batch_size
    how = c.max_new_tokens, size, c.kv_cache, c.compile, c.n_pages
    return Writer(model, tokenizer, texts, options, *how)


def _new(steps: Iterator[None], text: Text) -> Iterator[int]:
    """Generate a text; yields its tokens as they come."""
    shown = 0
    while not text.done:
        next(steps)
        yield from text.new[shown:]
        shown = len(text.new)


def _stream(new: Iterator[int], text: Text, writer: Writer) -> None:
    print(text.prompt, end="", flush=True)
    text.finish = "interrupted"
    for piece in _decoded(new, text, writer.tokenizer):
        print(piece, end="", flush=True)


def _decoded(new: Iterable[int], text: Text, tokenizer: data.Tokenizer) -> Iterator[str]:
    """The pieces of the new text, which continue the prompt."""
    pieces = tokenizer.stream_decode(new, text.ids if text.prompt else ())
    if text.prompt[-1:].isspace() and not tokenizer.decode(text.ids)[-1:].isspace():
        yield next(pieces, "").removeprefix(" ")  # the prompt's last space has no token (WordPiece)
    yield from pieces


def _print(text: Text, writer: Writer, out: IO[str], config: SampleConfig) -> None:
    new = "".join(_decoded(text.new, text, writer.tokenizer))
    row = {"prompt": text.prompt, "text": new, "tokens": len(text.new), "seed": text.seed}
    print(json.dumps({**row, "finish": text.finish}, ensure_ascii=False), file=out, flush=True)
    if config.stream:
        print("\n---------------", flush=True)
    elif config.out is None:
        print(f"{text.prompt}{new}\n---------------", flush=True)


def _open(path: str) -> IO[str]:
    try:
        return open_output(Path(path), "w")
    except OSError as e:
        raise UserError(f"cannot write {path} ({e.strerror})") from e


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
