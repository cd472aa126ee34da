"""Many prompts, timed: batches one after another, against continuous batching (inference/serve.py).

    python -m bench.serving                                  GPT-2 124M, 32 prompts, 8 at a time
    python -m bench.serving --prompts=16 --record=serving    and keep it in bench/records/

The prompts have different lengths, and each wants a different number of new tokens. In a batch a
row that has its tokens idles until the last of its batch has them; in serve a prompt enters when a
text ends. Both write the same texts (greedily) with the same weights, in turn (A B A B ...).

Reported: tokens a second, of those that were wanted; how many of the rows that went through the
model in decode steps were wanted; when the average text was finished; bytes of the keys and values
(of serve the pages that were in use at most); and how many texts are the same. In float32 on the
CPU that should be all: rounding can only decide between two tokens that are all but equally likely.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from typing import Literal

import torch
from pydantic import PositiveInt

from bench import records, tables
from bench.machine import versions
from bench.stats import Summary, differ
from core.runtime import Setup, describe, dtype_name, pick_device, synchronize
from core.settings import check_fields, exit_on_user_error, read
from inference import engine, serve
from inference.sampling import ENDED, Stats
from model import GPT, GPTConfig


@dataclass(frozen=True)
class ServingConfig:
    """Time serve() against generate() in batches, on prompts of different lengths."""

    prompts: PositiveInt = 32  # how many
    prompt_tokens: PositiveInt = 128  # of the longest; the shortest has an eighth
    new_tokens: PositiveInt = 128  # the most; the fewest are an eighth
    batch_size: PositiveInt = 8  # texts at a time
    n_layer: int = 12  # blocks
    n_head: int = 12  # heads
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # context length, tokens
    vocab_size: int = 50304  # tokens to draw the prompts from
    seed: int = 1337  # of the weights, which are random, and the prompts
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: a GPU's best half
    rounds: PositiveInt = 5  # of each, in turn
    record: str | None = None  # also write bench/records/DATE_DEVICE_RECORD
    records_dir: str = "bench/records"  # the folder of the records

    def __post_init__(self) -> None:
        check_fields(self)
        longest = self.prompt_tokens + self.new_tokens
        if longest > self.block_size:
            raise ValueError(f"texts of {longest} tokens do not fit into {self.block_size}")
        if self.record is not None:
            records.check_slug(self.record)


@dataclass
class Round:
    """What batches, or serve, gave in one round."""

    seconds: float
    finished: float  # seconds until a text was there, the mean
    rows: int  # in decode steps, wanted or not
    cache_bytes: int
    texts: list[list[int]]  # the new tokens of each prompt


class Serving:
    """The model and its prompts."""

    def __init__(self, config: ServingConfig) -> None:
        self.config, self.device = config, pick_device(config.device)
        setup = Setup.of(self.device, config.dtype)
        self.dtype = dtype_name(setup.dtype)
        torch.manual_seed(config.seed)
        sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in sizes}))
        self.model = setup.place(model, cast=True).eval()
        draw = random.Random(config.seed)

        def lengths(most: int) -> list[int]:
            return [draw.randint(max(1, most // 8), most) for _ in range(config.prompts)]

        self.prompts = [
            [draw.randrange(config.vocab_size) for _ in range(n)]
            for n in lengths(config.prompt_tokens)
        ]
        self.wanted = lengths(config.new_tokens)

    def round(self, name: str) -> Round:
        """All prompts, once; by "batches" or by "serve"."""
        stats, rows = Stats(), -len(self.prompts)  # the first token of a text is its prompt's
        texts: list[list[int]] = [[] for _ in self.prompts]
        ends: list[float] = []
        synchronize(self.device)
        begin = time.perf_counter()
        for i, token in self.serve(stats) if name == "serve" else self.batches(stats):
            rows += 1
            if token != ENDED:
                texts[i].append(token)
                if len(texts[i]) == self.wanted[i]:
                    ends.append(time.perf_counter() - begin)
        seconds, cache_bytes = time.perf_counter() - begin, stats.cache_bytes
        if name == "serve":
            cache_bytes = cache_bytes // (stats.all_pages + 1) * stats.pages
        return Round(seconds, sum(ends) / len(ends), rows, cache_bytes, texts)

    def batches(self, stats: Stats) -> Iterator[tuple[int, int]]:
        """Which prompt, and its next token, ENDED where its row idles."""
        order, size = range(len(self.prompts)), self.config.batch_size
        for batch in (order[first : first + size] for first in order[::size]):

            def enough(row: int, new: list[int], batch: range = batch) -> bool:
                return len(new) == self.wanted[batch[row]]

            prompts, most = [self.prompts[i] for i in batch], max(self.wanted[i] for i in batch)
            for tokens in engine.stream(
                self.model, prompts, most, temperature=0.0, stop=enough, stats=stats
            ):
                yield from zip(batch, tokens.tolist(), strict=True)

    def serve(self, stats: Stats) -> Iterator[tuple[int, int]]:
        """Which prompt, and its next token."""
        slots, lengths = self.config.batch_size, map(len, self.prompts)
        n_pages = serve.enough_pages(self.model, lengths, max(self.wanted), slots)
        how = {"temperature": 0.0, "slots": slots, "n_pages": n_pages, "stats": stats}
        tokens = serve.stream(self.model, self.prompts, iter(self.wanted), **how)
        return ((i, token) for i, token in tokens if token != ENDED)


def summary(serving: Serving, rounds: dict[str, list[Round]]) -> tables.Cells:
    """A line for batches and one for serve, whose ratio is round by round."""
    head = ["", "tok/s", "ratio", "rows wanted", "mean finish s", "KV cache", "same"]
    first, wanted, lines = rounds["batches"], sum(serving.wanted), []
    for name, got in rounds.items():
        ratio = Summary.of([a.seconds / b.seconds for a, b in zip(first, got, strict=True)])
        told = f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})"
        if differ([r.seconds for r in first], [r.seconds for r in got]) is False:
            told += " within the noise"
        same = sum(a == b for a, b in zip(got[0].texts, first[0].texts, strict=True))
        rate = tables.rate(Summary.of([wanted / r.seconds for r in got]).median)
        share = f"{(wanted - len(serving.wanted)) / max(got[0].rows, 1):.0%}"
        finished = f"{Summary.of([r.finished for r in got]).median:.2f}"
        cache = tables.bytes_(max(r.cache_bytes for r in got))
        lines.append([name, rate, told, share, finished, cache, f"{same} of {len(got[0].texts)}"])
    return head, lines


def main(argv: list[str]) -> int:
    config = read(ServingConfig, argv).settings
    serving = Serving(config)
    rounds: dict[str, list[Round]] = {"batches": [], "serve": []}
    for name in rounds:
        serving.round(name)  # kernels are compiled and probed, memory is touched
    for n in range(config.rounds):
        for name, got in rounds.items():
            print(f"round {n + 1} of {config.rounds}, {name}", file=sys.stderr)
            got.append(serving.round(name))
    device, table = describe(serving.device), tables.markdown(summary(serving, rounds))
    print(f"{device}, {serving.dtype}, {config.prompts} prompts, {config.rounds} rounds\n\n{table}")
    if config.record is not None:
        content = {
            "command": records.command(argv, "-m bench.serving"),
            "date": str(date.today()),
            **records.git_state(),
            "device": device,
            "threads": torch.get_num_threads(),
            "packages": versions(),
            "settings": {**asdict(config), "dtype": serving.dtype},
            "rounds": {name: [asdict(r) for r in got] for name, got in rounds.items()},
        }
        page = (f"# Serving many prompts\n\n{table}\n\n{device}, commit {records.commit(content)}: "
                f"`{content['command']}`. Every round is in [record.json](record.json); "
                "[bench/serving.py](../../serving.py) explains the columns.\n")  # fmt: skip
        kind = {"kind": serving.device.type, "name": device}
        folder = records.folder_of(config.records_dir, config.record, kind)
        records.save(folder, content, page)
        print(f"\nrecord: {folder}")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
