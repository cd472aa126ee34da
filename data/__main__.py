"""python -m data NAME: prepare a dataset."""

from __future__ import annotations

import sys

from core.settings import exit_on_user_error, read
from data.prepare import PrepareConfig, prepare


def main(argv: list[str]) -> int:
    prepare(read(PrepareConfig, argv, positional="dataset").settings)
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
