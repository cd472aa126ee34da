"""python -m data shakespeare_char [--key=value ...]: prepare a dataset."""

from __future__ import annotations

import sys

from core.settings import UserError, exit_on_user_error, read
from data.prepare import DATASETS, PrepareConfig, prepare


def main(argv: list[str]) -> int:
    named = bool(argv) and not argv[0].startswith("-")
    config = read(PrepareConfig, argv[1:] if named else argv).settings
    if not named:
        raise UserError(f"name a dataset first: python -m data {{{','.join(DATASETS)}}}")
    prepare(argv[0], config)
    return 0


if __name__ == "__main__":
    sys.argv[0] = "-m data NAME"  # what core/settings.py tells the user to type
    exit_on_user_error(lambda: main(sys.argv[1:]))
