"""lm-evaluation-harness with our kernels (docs/EVALUATE.md).

    python -m evaluate.harness --model_args pretrained=FOLDER,attention=sdpa --tasks nanoattn

It takes the options of `lm_eval run`. The last lines name the kernels that ran.
"""

from __future__ import annotations

import sys
from typing import Any

from core.settings import UserError, end_at_once, exit_on_user_error

if __name__ == "__main__":
    end_at_once()

import attention


def main(argv: list[str]) -> int:
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


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
