"""python -m data NAME: prepare a dataset."""

from __future__ import annotations

import sys

from core.settings import UserError, exit_on_user_error, read
from data.prepare import DATASETS, PrepareConfig, prepare


def main(argv: list[str]) -> int:
    config = read(PrepareConfig, argv, positional="dataset").settings
    if config.dataset is None:
        raise UserError(f"name a dataset: python -m data {{{','.join(DATASETS)}}}")
    prepare(config.dataset, config)
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
