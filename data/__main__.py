"""python -m data shakespeare_char [--key=value ...]: prepare a dataset."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from core.settings import UserError, exit_on_user_error, read
from data.prepare import DATASETS, PrepareConfig, prepare


@dataclass(frozen=True)
class DataConfig(PrepareConfig):
    """Prepare a dataset: python -m data NAME, with NAME one of shakespeare_char, shakespeare,
    chars, text, openwebtext, fineweb and shards."""

    dataset: str | None = None  # its name


def main(argv: list[str]) -> int:
    config = read(DataConfig, argv, positional="dataset").settings
    if config.dataset is None:
        raise UserError(f"name a dataset: python -m data {{{','.join(DATASETS)}}}")
    prepare(config.dataset, config)
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
