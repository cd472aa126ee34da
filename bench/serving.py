"""Many prompts, timed: batches one after another, against continuous batching (inference/serve.py).

    python -m bench.serving                                   GPT-2 124M, 32 prompts, 8 at a time
    python -m bench.serving --shared=64 --record=serving      with a common beginning; keep it

The prompts have different lengths, and each wants a different number of new tokens, both drawn
evenly from a range. The candidates write the same texts (greedily), with the same weights, in one
process, and take turns (A B A B ...):

    batches    engine.stream() of `batch_size` prompts in their order; a row that has its tokens
               idles until the last of its batch has them
    sorted     the same, prompts that want about as many new tokens together: the least that batches
               can lose, for one who knows in advance how long each text will be
    serve      inference/serve.py: a prompt enters when a text ends

Reported: tokens a second, of the tokens that were wanted; how many of the rows that went through
the model in decode steps were wanted; when the average text was finished; bytes of the keys and
values (of batches the buffers, of serve the pages that were in use at most); and how many texts are
those of the first candidate. In float32 on the CPU that should be all: the rounding of another
batch size can only decide between two tokens that are all but equally likely.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.progress import Progress

from bench import records, tables
from bench.machine import versions
from bench.stats import Summary, differ
from core.runtime import Setup, describe, dtype_name, pick_device, synchronize
from core.settings import check_fields, exit_on_user_error, read
from inference import engine, serve
from inference.sampling import ENDED, Stats
from model import GPT, GPTConfig

Candidates = tuple[Literal["batches", "sorted", "serve"], ...]
NOISY = 0.05  # spread from which a row is called noisy, as in bench_mfu.py


@dataclass(frozen=True)
class ServingConfig:
    """Time serve() against generate() in batches, on prompts of different lengths."""

    # --- prompts ---
    prompts: PositiveInt = 32  # how many
    prompt_tokens: tuple[int, ...] = (16, 128)  # from, to
    new_tokens: tuple[int, ...] = (8, 128)  # from, to
    shared: int = 0  # tokens that all prompts begin with, before their own
    seed: int = 1337  # of the weights and the prompts
    # --- how they are served ---
    candidates: Candidates = ("batches", "sorted", "serve")  # in this order
    batch_size: PositiveInt = 8  # texts at a time
    kv_cache: Literal["dynamic", "static", "paged"] = "dynamic"  # of the batches
    page_size: PositiveInt = 16  # tokens a page
    # --- model, its weights random ---
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key and value heads; none: n_head
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # context length, tokens
    vocab_size: int = 50304  # tokens to draw the prompts from
    attention_window: int | None = None  # keys that a query sees; none: all
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # of weights and arithmetic; auto: the GPU's best half, else float32
    )
    # --- measuring ---
    rounds: PositiveInt = 5  # of each, in turn
    record: str | None = None  # also write bench/records/DATE_DEVICE_RECORD
    records_dir: str = "bench/records"  # the folder of the records

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("prompt_tokens", "new_tokens"):
            got = getattr(self, name)
            if len(got) != 2 or not 1 <= got[0] <= got[1]:
                raise ValueError(f"{name} must be two numbers, from and to, got {got}")
        longest = self.shared + self.prompt_tokens[1] + self.new_tokens[1]
        if self.shared < 0 or longest > self.block_size:
            raise ValueError(f"texts of {longest} tokens do not fit into {self.block_size}")
        if not self.candidates:
            raise ValueError("candidates must name at least one")


@dataclass
class Round:
    """What one candidate gave in one round."""

    seconds: float
    finished: float  # seconds until a text was there, the mean
    rows: int  # in decode steps, wanted or not
    cache_bytes: int
    texts: list[list[int]]  # the new tokens of each prompt


class Serving:
    """The model and its prompts."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        setup = Setup.of(self.device, config.dtype)
        self.dtype = dtype_name(setup.dtype)
        torch.manual_seed(config.seed)
        sizes = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "vocab_size",
                 "attention_window")  # fmt: skip
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in sizes}))
        self.model = setup.place(model, cast=True).eval()
        draw = random.Random(config.seed)

        def tokens(n: int) -> list[int]:
            return [draw.randrange(config.vocab_size) for _ in range(n)]

        common = tokens(config.shared)
        self.prompts = [common + tokens(draw.randint(*config.prompt_tokens))
                        for _ in range(config.prompts)]  # fmt: skip
        self.wanted = [draw.randint(*config.new_tokens) for _ in self.prompts]

    def round(self, candidate: str) -> Round:
        """All prompts, once."""
        synchronize(self.device)
        if candidate == "serve":
            return self.serve()
        order: Sequence[int] = range(len(self.prompts))
        if candidate == "sorted":
            order = sorted(order, key=self.wanted.__getitem__)
        return self.batches(order)

    def batches(self, order: Sequence[int]) -> Round:
        """The prompts in this order, batch after batch."""
        size, stats = self.config.batch_size, Stats()
        texts: list[list[int]] = [[] for _ in self.prompts]
        ends: list[float] = []
        rows, begin = 0, time.perf_counter()
        for first in range(0, len(order), size):
            batch = order[first : first + size]

            def enough(row: int, new: list[int], batch: Sequence[int] = batch) -> bool:
                return len(new) == self.wanted[batch[row]]

            prompts, most = [self.prompts[i] for i in batch], max(self.wanted[i] for i in batch)
            how: dict[str, Any] = {
                "kv_cache": self.config.kv_cache,
                "page_size": self.config.page_size,
            }
            for tokens in engine.stream(
                self.model, prompts, most, temperature=0.0, stop=enough, stats=stats, **how
            ):
                rows += len(batch)
                for i, token in zip(batch, tokens.tolist(), strict=True):
                    if token != ENDED:
                        texts[i].append(token)
                        if len(texts[i]) == self.wanted[i]:
                            ends.append(time.perf_counter() - begin)
            rows -= len(batch)  # the first tokens are the prompt's
        seconds = time.perf_counter() - begin
        return Round(seconds, sum(ends) / len(ends), rows, stats.cache_bytes, texts)

    def serve(self) -> Round:
        """The prompts through inference/serve.py."""
        stats = Stats()
        texts: list[list[int]] = [[] for _ in self.prompts]
        ends: list[float] = []
        begin = time.perf_counter()
        lengths = [len(prompt) for prompt in self.prompts]
        most, size = max(self.wanted), self.config.page_size
        n_pages = serve.enough_pages(self.model, lengths, most, self.config.batch_size, size)
        for i, token in serve.stream(
            self.model, self.prompts, iter(self.wanted), temperature=0.0,
            slots=self.config.batch_size, n_pages=n_pages, page_size=size, stats=stats,
        ):  # fmt: skip
            if token == ENDED:
                ends.append(time.perf_counter() - begin)
            else:
                texts[i].append(token)
        seconds = time.perf_counter() - begin
        rows = sum(self.wanted) - len(self.wanted)
        used = stats.cache_bytes // (stats.all_pages + 1) * stats.pages
        return Round(seconds, sum(ends) / len(ends), rows, used, texts)


def summary(serving: Serving, rounds: dict[str, list[Round]]) -> tables.Cells:
    """A line a candidate; the ratios are to the first, round by round."""
    head = ["", "tok/s", "quartiles", "ratio", "rows wanted", "mean finish s", "KV cache", "same"]
    wanted, lines = sum(serving.wanted), []
    first = next(iter(rounds.values()))
    for name, got in rounds.items():
        rate = Summary.of([wanted / r.seconds for r in got])
        ratio = Summary.of([a.seconds / b.seconds for a, b in zip(first, got, strict=True)])
        told = f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})"
        if differ([r.seconds for r in first], [r.seconds for r in got]) is False:
            told += " within the noise"
        same = sum(a == b for a, b in zip(got[0].texts, first[0].texts, strict=True))
        quartiles = f"{tables.rate(rate.q1)} to {tables.rate(rate.q3)}"
        lines.append([
            name, tables.rate(rate.median), quartiles + " noisy" * rate.noisy(NOISY),
            "" if got is first else told,
            f"{(wanted - len(serving.wanted)) / max(got[0].rows, 1):.0%}",
            f"{Summary.of([r.finished for r in got]).median:.2f}",
            tables.bytes_(max(r.cache_bytes for r in got)),
            "" if got is first else f"{same} of {len(serving.prompts)}",
        ])  # fmt: skip
    return head, lines


def facts(serving: Serving) -> str:
    """One line: what was measured, where."""
    c = serving.config
    beginning = f" after {c.shared} that all have" if c.shared else ""
    return (
        f"{describe(serving.device)}, torch {torch.__version__}: {c.n_layer} layers, {c.n_embd} "
        f"wide, {serving.dtype}; {c.prompts} prompts of "
        f"{c.prompt_tokens[0]} to {c.prompt_tokens[1]} tokens{beginning}, {c.new_tokens[0]} to "
        f"{c.new_tokens[1]} new ones, {c.batch_size} at a time; batches with the {c.kv_cache} "
        f"cache; {c.rounds} rounds"
    )


def write_record(serving: Serving, rounds: dict[str, list[Round]], argv: list[str]) -> Path:
    """record.json with every round, and README.md with the table."""
    config, device = serving.config, serving.device
    kind = {"kind": device.type, "name": describe(device)}
    folder = records.folder_of(config.records_dir, config.record or "serving", kind)
    content = {
        "command": records.command(argv).replace("bench_mfu.py", "-m bench.serving"),
        "date": str(date.today()),
        **records.git_state(),
        "device": describe(device),
        "threads": torch.get_num_threads(),
        "dtype": serving.dtype,
        "packages": versions(),
        "settings": asdict(config),
        "wanted_tokens": sum(serving.wanted),
        "rounds": {
            name: [{k: v for k, v in asdict(r).items() if k != "texts"} for r in got]
            for name, got in rounds.items()
        },
    }
    about = [
        "# Serving many prompts",
        facts(serving) + ".",
        tables.markdown(summary(serving, rounds)),
        f"Commit {records.commit(content)}: `{content['command']}`. Every round is in "
        "[record.json](record.json); the columns are explained in "
        "[bench/serving.py](../../serving.py).",
    ]
    records.save(folder, content, "\n\n".join(about) + "\n")
    return folder


def main(argv: list[str]) -> int:
    config = read(ServingConfig, argv).settings
    if config.record is not None:
        records.check_slug(config.record)
    serving = Serving(config)
    rounds: dict[str, list[Round]] = {name: [] for name in config.candidates}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warm-up", total=len(rounds) * config.rounds)
        for name in rounds:
            serving.round(name)  # kernels are compiled and probed, memory is touched
        for n in range(config.rounds):
            for name, got in rounds.items():
                progress.update(task, description=f"round {n + 1} of {config.rounds}, {name}")
                got.append(serving.round(name))
                progress.advance(task)
    print(f"{facts(serving)}\n")
    print(tables.markdown(summary(serving, rounds)))
    if config.record is not None:
        print(f"\nrecord: {write_record(serving, rounds, argv)}")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
