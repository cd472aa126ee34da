"""Generate text from prompts (docs/GENERATE.md). Ctrl-C writes the texts so far.

python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"
python sample.py --init_from=gpt2 --prompts=questions.txt --out=answers.jsonl --kv_cache=paged
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from core import process
from core.options import Dtype
from core.settings import Size, Texts, Words, check_fields, exit_on_user_error, read, read_early

log = logging.getLogger("nanoattn")
Share = Annotated[float, Field(gt=0, le=1)]


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
    temperature: NonNegativeFloat = 0.8  # below 1: safer, above: bolder; 0: the likeliest token
    top_k: PositiveInt | None = 200  # draw from the k likeliest tokens only; none: from all
    top_p: Share | None = None  # then from the fewest whose probabilities sum to p; none: from all
    seed: int = 1337  # of the first text; one more for each further text
    regex: Words | None = None  # each new text matches this regular expression
    stop: Texts = ()  # a text ends before this string, repeatable
    # --- output ---
    stream: bool = False  # print tokens as they come, one text at a time
    out: str | None = None  # file for JSON lines instead of stdout
    # --- speed ---
    # auto: dynamic; on CUDA static, with its steps captured as CUDA graphs
    kv_cache: Literal["auto", "none", "dynamic", "static", "paged"] = "auto"
    compile: bool = False  # each decode step as one graph, with --kv_cache=static
    dtype: Dtype = "auto"  # auto: half on CUDA
    weights: Literal["dtype", "int8"] = "dtype"  # int8: linear layers and head in 8 bits
    batch_size: PositiveInt = 8  # texts at a time
    n_pages: Annotated[int, Field(ge=2)] | None = None  # --kv_cache=paged; none: enough
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        check_fields(self)
        attention.check_name(self.attention_backend)
        if "" in self.stop:
            raise ValueError("stop: expected strings of at least one character, got ''")
        if self.compile and self.kv_cache != "static":
            raise ValueError(f"compile needs kv_cache=static, got {self.kv_cache}")
        if self.n_pages is not None and self.kv_cache != "paged":
            raise ValueError(f"n_pages needs kv_cache=paged, got {self.kv_cache}")


if __name__ == "__main__":  # --help and mistakes come before torch
    read_early(SampleConfig, sys.argv[1:])

import torch

import attention
import checkpoint
import data
import inference
from attention.machine.system import synchronize
from core.files import open_output, printable
from core.runtime import explained, pick_device, show_log, why_not_compile
from core.settings import UserError, user_errors
from data.schema import well_formed
from inference import constrain, graphs
from inference.sampling import Row, default_prompt
from inference.serve import Scheduler
from model import GPT


def load(config: SampleConfig, **changes: object) -> tuple[GPT, data.Tokenizer]:
    """`changes` go into the GPTConfig."""
    device = pick_device(config.device)
    if config.compile and (why := why_not_compile(True, device)):
        raise UserError(f"--compile is not possible here: {why}")
    source = config.init_from
    if source == "resume":
        source = config.out_dir
        checkpoint.latest(source)  # UserError if there is none
    policy = attention.Policy(
        config.attention_fallback, config.attention_hub_kernels, config.allow_mps_sdpa)  # fmt: skip
    model, tokenizer = inference.load(
        source, which=config.checkpoint, dataset=config.dataset, device=config.device,
        dtype=config.dtype, weights=config.weights, policy=policy,
        attention_backend=config.attention_backend, **changes)  # fmt: skip
    graphs.plan(model, config.kv_cache, config.compile)  # logs the kernel before any text
    return model, tokenizer


def prompts(config: SampleConfig) -> list[str]:
    texts = [_read(s.removeprefix("FILE:")) if s.startswith("FILE:") else s for s in config.start]
    if config.prompts is not None:
        lines = _read(config.prompts).removesuffix("\n").split("\n")
        found = [line for line in lines if line.strip()]
        name = printable(config.prompts)
        if not found:
            raise UserError(f"no prompt in {name}")
        if blank := len(lines) - len(found):
            log.warning(f"left out {blank} blank line{'s' * (blank > 1)} of {name}")
        texts += found
    return [well_formed(text) for text in texts]


def _read(path: str) -> str:
    with user_errors(f"cannot read {printable(path)}: "):
        return Path(path).expanduser().read_text(encoding="utf-8-sig")


class Writer:
    """Writes the texts in the order of their prompts, while a scheduler continues them."""

    def __init__(self, config: SampleConfig, model: GPT, prompts: list[str]) -> None:
        self.config = config
        self.ends = model.tokenizer.ends
        device = model.transformer.wte.weight.device
        starts = prompts or [default_prompt(model.tokenizer)]
        self.n_texts = len(starts) * config.num_samples
        regex = config.regex
        self.scheduler = Scheduler(
            model, starts, config.max_new_tokens, samples=config.num_samples,
            # A negative seed as PyTorch reads it.
            generator=(torch.Generator(device).manual_seed(s % 2**64) for s in count(config.seed)),
            slots=1 if config.stream else config.batch_size, kv_cache=config.kv_cache,
            compile=config.compile, n_pages=config.n_pages, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, stop=config.stop,
            constraint=None if regex is None else constrain.regex(regex, model.tokenizer),
        )  # fmt: skip
        if self.scheduler.slides:
            model.plan(grad=False)  # without a cache: log the kernel first
        self.rows: dict[int, Row] = {}  # begun, not written
        self.written = 0
        self.tokens = 0  # written
        self.began = 0.0
        self.first = 0.0  # seconds to the first token
        self.seconds = 0.0

    def write_all(self, out: IO[str]) -> int:
        """Write every text, or those that Ctrl-C leaves; return the exit code."""
        code, shown = 0, -1
        self.began = time.perf_counter()
        with closing(self.scheduler.progress()) as progress:
            try:
                while self.written < self.n_texts:
                    while self.written not in self.rows:
                        self.advance(progress)
                    row = self.rows[self.written]
                    new = self.new_tokens(row, progress)
                    if self.config.stream:
                        shown = row.index
                        print(row.text, end="", flush=True)
                        for piece in row.pieces(new):
                            print(piece, end="", flush=True)
                    deque(new, maxlen=0)
                    self.write(row, out)
            except KeyboardInterrupt as e:
                code = e.args[0] if e.args else 130  # of core/settings.py
        synchronize(self.scheduler.device)
        self.seconds = time.perf_counter() - self.began
        for row in [*self.rows.values()]:
            if row.new or row.index == shown:
                self.write(row, out)
        return code

    def new_tokens(self, row: Row, progress: Iterator[Row]) -> Iterator[int]:
        """A row's tokens as they come."""
        n = 0
        while True:
            yield from row.new[n:]
            n = len(row.new)
            if row.ended:
                return
            self.advance(progress)

    def advance(self, progress: Iterator[Row]) -> None:
        row = next(progress)
        if row.index >= self.written:
            self.rows[row.index] = row
        if row.new and not self.first:
            self.first = time.perf_counter() - self.began

    def write(self, row: Row, out: IO[str]) -> None:
        new = "".join(row.pieces(row.new))
        n = sum(token not in self.ends for token in row.new)
        finish = "length" if row.ended else "interrupted"
        if row.ended and (self.config.regex is not None or len(row.new) < row.room or row.stops()):
            finish = "stop"
        found = {"prompt": row.text, "text": new, "tokens": n,
                 "seed": self.config.seed + row.index, "finish": finish}  # fmt: skip
        print(json.dumps(found, ensure_ascii=False), file=out, flush=True)
        if self.config.stream or self.config.out is None:
            text = "" if self.config.stream else f"{row.text}{new}"
            print(f"{text}\n---------------", flush=True)
        del self.rows[row.index]
        self.written += 1
        self.tokens += n

    def report(self) -> str:
        s, n = self.scheduler.stats, self.written
        kind = ", ".join(filter(None, (self.scheduler.kv_cache, self.scheduler.graph)))
        cache = f"{s.cache_bytes / 1e6:.1f} MB" if s.cache_bytes else "not used"
        if s.pages:
            cache += f", {s.pages} of {s.all_pages} pages used, {s.shared_pages} shared"
        return (
            f"{n} text{'s' * (n != 1)}, {self.tokens} tokens in {self.seconds:.2f} s: "
            f"{self.tokens / max(self.seconds, 1e-9):.1f} tokens/s, first token after "
            f"{1e3 * self.first:.0f} ms; KV cache ({kind}): {cache}"
        )


@explained("a smaller --batch_size or --max_new_tokens, --dtype=bfloat16 or --weights=int8")
def main(argv: list[str]) -> int:
    show_log()
    config = read(SampleConfig, argv).settings
    starts = prompts(config)
    files = [os.path.realpath(path) for path in (config.prompts, config.out) if path]
    if len(files) > len(set(files)):
        raise UserError(f"--out={printable(config.out)} would replace --prompts")
    process.prepare(lasting=bool(config.out))  # the texts go on without their reader
    writer = Writer(config, load(config)[0], starts)
    with user_errors(f"cannot write {printable(config.out)}: "):
        out = open_output(Path(config.out or os.devnull), "w")
    with out:
        code = writer.write_all(out)
    print(writer.report(), file=sys.stderr)
    return code


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
