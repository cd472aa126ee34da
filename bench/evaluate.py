"""lm-evaluation-harness with our kernels, and tasks for it (docs/EVALUATE.md).

copy        k q z f = k q z f
add         4 7 + 8 5 = 1 3 2
recall_D    k 3 q 7 . . . . q 7         D symbols from a key's value to the question's
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import PositiveInt

import attention
from core.files import write_at_once
from core.settings import UserError, check_fields, exit_on_user_error, read

COPIED = 20  # longest text to copy, symbols
Question = tuple[str, str]


def harness(argv: list[str]) -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as e:
        raise UserError(f'the harness needs: pip install ".[eval]" ({e})') from e
    bridge, made = attention.hf, []

    @register_model("nanoattn")
    class Model(HFLM):
        def __init__(self, *, attention: str = "auto", **options: Any) -> None:
            super().__init__(attn_implementation=bridge.implementation(attention), **options)
            made.append(self.model)

    bridge.register(policy=attention.Policy(fallback=False))
    sys.argv = ["lm_eval", "run", "--model", "nanoattn", *argv]
    cli_evaluate()
    print(*map(bridge.report, made), sep="\n")
    return 0


@dataclass(frozen=True)
class TasksConfig:
    """Write tasks for the harness, and text to train on: python -m bench.evaluate tasks FOLDER."""

    folder: str | None = None
    separator: Annotated[str, "may be empty"] = " "  # between symbols; empty: one token for each
    keys: str = "abcdefghijklmnopqrstuvwxyz"  # symbols to copy, and the keys of recall
    values: str = "0123456789"
    pairs: PositiveInt = 4  # of recall, keys with a value each
    distances: tuple[PositiveInt, ...] = (8, 16, 32)  # of recall, one task for each
    questions: PositiveInt = 500  # of each task
    lines: PositiveInt = 150000
    seed: int = 1337

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pairs > len(self.keys) or len({*self.keys}) < len(self.keys):
            raise ValueError(f"keys={self.keys}: expected {self.pairs} or more, all different")
        if both := {*self.keys} & {*self.values, *self.separator, *"=+."}:
            raise ValueError(f"keys={self.keys}: {min(both)!r} has another meaning in a task")
        if wrong := [d for d in self.distances if d % 2 or d < 2 * self.pairs]:
            raise ValueError(f"distances {wrong}: even ones of {self.pairs} pairs' length or more")


def copy(config: TasksConfig, draw: random.Random, length: int = COPIED // 2) -> Question:
    text = "".join(draw.sample(config.keys, min(length, len(config.keys))))
    return text + "=", text


def add(draw: random.Random, question: bool) -> Question:
    """The text has other sums than the questions."""
    while True:
        a, b = draw.randrange(100), draw.randrange(100)
        if ((3 * a + b) % 10 == 0) == question:
            return f"{a}+{b}=", str(a + b)


def recall(config: TasksConfig, draw: random.Random, distance: int) -> Question:
    keys = draw.sample(config.keys, config.pairs)
    values = draw.choices(config.values, k=config.pairs)
    asked = draw.randrange(config.pairs)
    text = "".join(k + v for k, v in zip(keys, values, strict=True))
    return text.ljust(distance + 2 * asked, ".") + keys[asked], values[asked]


def line(config: TasksConfig, draw: random.Random) -> str:
    kind = draw.choice(("copy", "copy", "add", "recall"))
    if kind == "copy":
        return "".join(copy(config, draw, draw.randint(1, COPIED)))
    if kind == "add":
        return "".join(add(draw, question=False))
    distance = 2 * draw.randint(config.pairs, draw.choice(config.distances) // 2)
    question, _ = recall(config, draw, distance)
    pairs = [question[i : i + 2] for i in range(0, 2 * config.pairs, 2)]
    return question[:distance] + "".join(draw.choices(pairs, k=4 * config.pairs))


def main(argv: list[str]) -> int:
    if argv[:1] != ["tasks"]:
        return harness(argv)
    config = read(TasksConfig, argv[1:], positional="folder").settings
    if config.folder is None:
        raise UserError("usage: python -m bench.evaluate tasks FOLDER")
    folder, gap, draw = Path(config.folder), config.separator, random.Random(f"text {config.seed}")
    folder.mkdir(parents=True, exist_ok=True)
    text = (gap.join(line(config, draw)) + "\n" for _ in range(config.lines))
    write_at_once(folder / "text.txt", "".join(text))
    draw = random.Random(f"questions {config.seed}")
    kinds = {"copy": partial(copy, config, draw), "add": partial(add, draw, question=True)}
    kinds |= {f"recall_{d}": partial(recall, config, draw, d) for d in config.distances}
    for name, ask in kinds.items():
        file = folder.resolve() / f"{name}.jsonl"
        asked = [ask() for _ in range(config.questions)]
        # A question begins a line, as in text.txt.
        rows = [{"context": "\n" + gap.join(q), "answer": gap + gap.join(a)} for q, a in asked]
        write_at_once(file, "".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": f"nanoattn_{name}", "tag": "nanoattn", "output_type": "loglikelihood",
            "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test", "metric_list": [{"metric": "acc"}], "doc_to_text": "{{context}}",
            "doc_to_target": "{{answer}}", "target_delimiter": "", "fewshot_delimiter": "",
        }  # fmt: skip
        write_at_once(folder / f"{name}.yaml", json.dumps(task, indent=1))
        print(f"{file}: {task['task']}")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
