"""python -m data shakespeare_char [--key=value ...]: prepare a dataset."""

from __future__ import annotations

import sys

from data.prepare import DATASETS, PrepareConfig, prepare
from settings import UserError, exit_on_user_error, read


def main(argv: list[str]) -> int:
    names = [a for a in argv if not a.startswith("-") and not a.endswith(".py")]
    options = [a for a in argv if a not in names[:1]]
    config = read(PrepareConfig, options).settings
    if not names:
        raise UserError(f"name a dataset: python -m data {{{','.join(DATASETS)}}}")
    prepare(names[0], config)
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
