"""Prompts in, text out.

python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"
python sample.py --init_from=gpt2 --start=FILE:prompt.txt --num_samples=3 --stream=True
python sample.py --init_from=gpt2 --start="Call me at " --regex="[0-9]{3}-[0-9]{4}"
python sample.py --init_from=gpt2 --prompts=questions.jsonl --out=answers.jsonl --batch_size=16
python sample.py --init_from=gpt2 --prompts=questions.jsonl --out=answers.jsonl --kv_cache=paged

Texts go to stdout, or as JSON lines to --out, in the order of their prompts; how fast they came, to
stderr. Ctrl-C keeps what is there: the texts so far are written, and the exit code is 130.

With --kv_cache=paged a prompt takes the place of a text that has ended (serve.py), and samples of
one prompt share its part of the cache; with the other caches one batch follows another.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import torch

import attention
import checkpoint
import data
from core import cpu_matmul
from core.runtime import pick_device, show_log, synchronize, why_not_compile
from core.settings import Texts, UserError, exit_on_user_error, read
from inference import constrain, serve
from inference.engine import ENDED, Stats, check_options, prefill_of
from model import GPT

log = logging.getLogger("nanoattn")


@dataclass(frozen=True)
class SampleConfig:
    """Generate text from a trained model."""

    # --- model ---
    out_dir: str = "out"  # folder of the run to sample from
    init_from: str = "resume"  # resume: out_dir's run; gpt2[-...], a checkpoint, ckpt.pt
    checkpoint: Literal["latest", "best"] = "latest"  # best: the lowest validation loss
    attention_backend: str = "auto"  # a name from python -m attention
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
    attention_hub_kernels: bool = False  # flash_attn_*: download a prebuilt kernel, and run it
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- text ---
    start: Texts = ()  # a prompt, or FILE:prompt.txt; may be given several times; none: a newline
    prompts: str | None = None  # a file of prompts: one a line, or JSON lines with "prompt"
    num_samples: int = 1  # texts for each prompt
    max_new_tokens: int = 500  # tokens to generate; less where the model ends the text
    temperature: float = 0.8  # below 1 plays safe, above dares; 0 takes the likeliest token
    top_k: int | None = 200  # draw from the k likeliest tokens only; none: from all
    top_p: float | None = None  # then from the fewest whose probabilities sum to p; none: from all
    stop: str | None = None  # a text ends before this string
    seed: int = 1337  # sample i of a prompt is drawn with seed + i
    overflow: Literal["slide", "stop"] = "slide"  # at block_size: drop the oldest tokens, or end
    # --- what each text must match, and does (inference/constrain.py) ---
    regex: str | None = None  # a regular expression, as a whole
    choices: tuple[str, ...] = ()  # one of these, or of the lines of FILE:choices.txt
    json_schema: str | None = None  # JSON that this schema describes, or FILE:schema.json
    # --- output ---
    stream: bool = False  # print tokens as they come, one text at a time
    json: bool = False  # JSON lines on stdout
    out: str | None = None  # a file for JSON lines, in place of stdout
    # --- speed ---
    kv_cache: Literal["none", "dynamic", "static", "paged"] = "dynamic"  # see inference/engine.py
    compile: bool = False  # each decode step as one graph, with --kv_cache=static
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights and arithmetic
    batch_size: int = 8  # texts at a time
    n_pages: int | None = None  # of 16 tokens, with --kv_cache=paged; none: enough for batch_size
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_options(self.temperature, self.top_k, self.top_p, self.overflow, self.kv_cache,
                      self.compile)  # fmt: skip
        if self.n_pages is not None and (self.n_pages < 2 or self.kv_cache != "paged"):
            raise ValueError(
                f"n_pages must be at least 2 (page 0 is not used), with kv_cache=paged; got "
                f"{self.n_pages}, {self.kv_cache}"
            )
        if self.json and (self.stream or self.out):
            other = "--stream" if self.stream else "--out"
            raise ValueError(f"--json and {other} both say where the texts go; take one of them")
        if self.stop == "":
            raise ValueError("stop must have at least one character, or be none")
        given = [n for n in ("regex", "choices", "json_schema", "stop") if getattr(self, n)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} cannot be combined")


def load(config: SampleConfig) -> tuple[GPT, Any]:
    """The model in evaluation mode on its device, and its tokenizer."""
    device = pick_device(config.device)
    if config.compile and (why := why_not_compile(True, device)):
        raise UserError(f"--compile cannot work here: {why}")
    changes = {
        "attention_backend": config.attention_backend,
        "attention_fallback": config.attention_fallback,
        "attention_hub_kernels": config.attention_hub_kernels,
        "allow_mps_sdpa": config.allow_mps_sdpa,
        "gradient_checkpointing": False,
    }
    source = config.out_dir if config.init_from == "resume" else config.init_from
    if config.init_from == "resume" or checkpoint.folders(source):
        folder = checkpoint.latest(source)
        if config.checkpoint == "best":
            folder = checkpoint.best_folder(source) or folder
        source = str(folder)
    model = checkpoint.init_model(source, **changes).to(device, getattr(torch, config.dtype)).eval()
    with torch.no_grad():
        model.attention(
            False, None, *prefill_of(config.kv_cache)
        )  # says what runs, before the text
    if device.type == "cpu":
        model.use_onednn(cpu_matmul.why_not() is None)
    meta = checkpoint.tokenizer_meta(source)
    tokenizer = data.GPT2Tokenizer() if meta is None else data.from_meta(meta)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{source} has a vocabulary of {model.config.vocab_size} tokens and no tokenizer of "
            "its own; GPT-2's, which would be used, has more"
        )
    return model, tokenizer


@dataclass
class Prompt:
    """What one text begins with, and where that came from."""

    text: str
    where: str = ""  # "prompts.txt:3: ", for messages
    ids: list[int] = field(default_factory=list)


def prompts(config: SampleConfig) -> list[Prompt]:
    """Every --start that was given, files read, and the lines of --prompts."""
    if config.prompts is None:
        return [Prompt(_text(start)) for start in config.start or ("\n",)]
    return [Prompt(_text(start)) for start in config.start] + prompt_lines(config.prompts)


def prompt_lines(path: str) -> list[Prompt]:
    """The prompts of a file; where its first line is an object with "prompt", it is JSON lines."""
    lines = [(n, line) for n, line in enumerate(_read(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"there is no prompt in {path}")
    if _prompt_of(lines[0][1]) is None:
        return [Prompt(line, f"{path}:{n}: ") for n, line in lines]
    found = []
    for n, line in lines:
        text = _prompt_of(line)
        if text is None:
            raise UserError(f'{path}:{n} must be an object with a text "prompt", as line 1 is')
        found.append(Prompt(text, f"{path}:{n}: "))
    return found


def _prompt_of(line: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    text = row.get("prompt") if isinstance(row, dict) else None
    return text if isinstance(text, str) else None


def _text(given: str) -> str:
    """What was given, or what is in the file of FILE:path."""
    return _read(given.removeprefix("FILE:")) if given.startswith("FILE:") else given


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the prompt file {path} cannot be read ({e})") from e


def encode(given: Iterable[Prompt], tokenizer: Any, block_size: int, overflow: str) -> None:
    """Fill in the ids of each prompt.

    Raises:
        UserError: a prompt is empty, or has a character that the tokenizer lacks, or is longer
            than the context where overflow="stop".
    """
    for prompt in given:
        try:
            prompt.ids = tokenizer.encode(prompt.text)
        except UserError as e:
            raise UserError(f"{prompt.where}{e}") from None
        if not prompt.ids:
            raise UserError(
                f"{prompt.where}a prompt is empty; leave --start out, or give it a character"
            )
        if len(prompt.ids) > block_size:
            too_long = f"{prompt.where}a prompt has {len(prompt.ids)} tokens, the model's context "
            too_long += f"{block_size}"
            if overflow == "stop":
                raise UserError(f"{too_long}; --overflow=slide reads its last {block_size}")
            log.warning(f"{too_long}: it reads the last {block_size} of them")


def constraint_of(config: SampleConfig, tokenizer: Any) -> constrain.Automaton | None:
    """What each text must match, if anything."""
    if config.regex:
        return constrain.regex(config.regex, tokenizer)
    if config.choices:
        lines = _text(config.choices[0]).splitlines() if len(config.choices) == 1 else []
        return constrain.choices([c for c in lines if c] or config.choices, tokenizer)
    if config.json_schema:
        return constrain.json_schema(_text(config.json_schema), tokenizer)
    return None


@dataclass
class Text:
    """One text that is being written."""

    prompt: Prompt
    seed: int
    new: list[int] = field(default_factory=list)
    finish: str = "waiting"  # then "interrupted", as long as it is not "stop" or "length"

    @property
    def done(self) -> bool:
        return self.finish in ("stop", "length")


def write(model: GPT, tokenizer: Any, texts: Sequence[Text], config: SampleConfig,
          stats: Stats,
          constraint: constrain.Automaton | None = None) -> Iterator[None]:  # fmt: skip
    """Write the texts, some of them at a time; after each step all that is new is in them."""
    device = model.transformer.wte.weight.device
    size = 1 if config.stream else config.batch_size
    ends = ends_with(config.stop, tokenizer)

    def stop(number: int, new: list[int]) -> bool:
        return new[-1] == tokenizer.eot or ends(new)

    def add(text: Text, token: int) -> None:
        if token == ENDED:
            if not text.done:
                text.finish = "length" if constraint is None else "stop"
            return
        text.new.append(token)
        text.finish = "stop" if stop(0, text.new) else "interrupted"
        if token == tokenizer.eot:
            text.new.pop()

    def generators(texts: Iterable[Text]) -> Iterator[torch.Generator]:
        return (torch.Generator(device).manual_seed(text.seed) for text in texts)

    options: dict[str, Any] = {
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "vocab_size": tokenizer.vocab_size,
        "overflow": config.overflow,
        "constraint": constraint,
        "stop": stop,
        "stats": stats,
    }
    if config.kv_cache == "paged":
        lengths = [len(text.prompt.ids) for text in texts]
        enough = serve.enough_pages(model, lengths, config.max_new_tokens, size)
        for number, token in serve.stream(
            model, (text.prompt.ids for text in texts), config.max_new_tokens,
            generator=generators(texts), slots=size,
            n_pages=config.n_pages or enough, **options,
        ):  # fmt: skip
            add(texts[number], token)
            yield
        return
    for first in range(0, len(texts), size):
        batch = texts[first : first + size]
        for tokens in model.stream(
            [text.prompt.ids for text in batch], config.max_new_tokens,
            generator=list(generators(batch)),
            kv_cache=config.kv_cache, compile=config.compile, **options,
        ):  # fmt: skip
            for text, token in zip(batch, tokens.tolist(), strict=True):
                add(text, token)
            yield
        for text in batch:
            add(text, ENDED)
        yield


def ends_with(stop: str | None, tokenizer: Any) -> Callable[[list[int]], bool]:
    """Whether tokens have `stop` in the text of the last few, as many as it has bytes."""
    if stop is None:
        return lambda new: False
    n = len(stop.encode())  # no token is shorter than a byte
    return lambda new: stop in tokenizer.decode(new[-n:])


def before(stop: str | None, pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text up to `stop`; what may be its beginning is held back."""
    held = ""
    for piece in pieces:
        held += piece
        if stop is None:
            sure = len(held)
        elif stop in held:
            yield held.partition(stop)[0]
            return
        else:
            sure = len(held) - next(n for n in range(len(stop), -1, -1) if held.endswith(stop[:n]))
        if sure:
            yield held[:sure]
            held = held[sure:]
    if held:
        yield held


def main(argv: list[str]) -> int:
    try:
        return run(argv)
    except attention.BackendUnavailable as e:
        raise UserError(str(e)) from e


def run(argv: list[str]) -> int:
    """Answer every prompt; the exit code."""
    show_log()
    aliases = {"attn_implementation": "attention_backend"}
    config = read(SampleConfig, argv, aliases=aliases).settings
    given = prompts(config)
    model, tokenizer = load(config)
    encode(given, tokenizer, model.config.block_size, config.overflow)
    constraint = constraint_of(config, tokenizer)
    if constraint is not None:
        constraint = constraint.to(model.transformer.wte.weight.device)
    texts = [Text(p, config.seed + i) for p in given for i in range(config.num_samples)]
    clock = Clock(model.transformer.wte.weight.device)
    with ExitStack() as stack:
        out = _open(config.out, stack)
        code = written = 0
        writing = clock.watch(
            write(model, tokenizer, texts, config, clock.stats, constraint), texts
        )
        try:
            while written < len(texts):
                text = texts[written]
                if config.stream:
                    _stream(writing, text, tokenizer, config)
                while not text.done:
                    next(writing)
                _print(text, tokenizer, config, out)
                written += 1
        except KeyboardInterrupt:
            code = 130
        finally:
            writing.close()
        for text in texts[written:]:
            if text.finish != "waiting":
                _print(text, tokenizer, config, out)
    print(clock.report(config), file=sys.stderr)
    return code


def _stream(writing: Iterator[None], text: Text, tokenizer: Any, config: SampleConfig) -> None:
    """Print one text while it is being written."""
    print(text.prompt.text, end="", flush=True)
    text.finish = "interrupted"

    def new() -> Iterator[int]:
        shown = 0
        while not text.done:
            next(writing)
            yield from text.new[shown:]
            shown = len(text.new)

    for piece in before(config.stop, tokenizer.stream_decode(new())):
        print(piece, end="", flush=True)


def _print(text: Text, tokenizer: Any, config: SampleConfig, out: IO[str] | None) -> None:
    """Put a text where it belongs, at once, so that a later Ctrl-C takes nothing away."""
    new = "".join(before(config.stop, [tokenizer.decode(text.new)]))
    row = {"prompt": text.prompt.text, "text": new, "tokens": len(text.new), "seed": text.seed,
           "finish": text.finish}  # fmt: skip
    if out is not None:
        print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
    if config.json:
        print(json.dumps(row, ensure_ascii=False), flush=True)
    elif out is None or config.stream:
        shown = "" if config.stream else text.prompt.text + new
        print(f"{shown}\n---------------", flush=True)


def _open(path: str | None, stack: ExitStack) -> IO[str] | None:
    if path is None:
        return None
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e})") from e


class Clock:
    """How fast the texts came."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stats = device, Stats()
        self.seconds, self.first, self.tokens, self.texts = 0.0, 0.0, 0, 0

    def watch(self, writing: Iterator[None], texts: Sequence[Text]) -> Generator[None, None, None]:
        """The same, with the time taken."""
        begin = time.perf_counter()
        try:
            for _ in writing:
                self.first = self.first or time.perf_counter() - begin
                yield
        finally:
            synchronize(self.device)
            self.seconds = time.perf_counter() - begin
            self.texts = sum(text.finish != "waiting" for text in texts)
            self.tokens = sum(len(text.new) for text in texts)

    def report(self, config: SampleConfig) -> str:
        """One line: tokens/s, time to the first token, memory of the cache."""
        rate = self.tokens / max(self.seconds, 1e-9)
        stats = self.stats
        cache = f"{stats.cache_bytes / 1e6:.1f} MB" if stats.cache_bytes else "not used"
        if stats.pages:
            cache += (
                f", {stats.pages} of {stats.all_pages} pages in use at most, "
                f"{stats.shared_pages} saved by sharing"
            )
        return (
            f"{self.texts} text{'s' * (self.texts != 1)}, {self.tokens} tokens in "
            f"{self.seconds:.2f} s: {rate:.1f} tokens/s, first token after "
            f"{1e3 * self.first:.0f} ms; KV cache ({config.kv_cache}): {cache}"
        )


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
