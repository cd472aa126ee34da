"""The tokens of 40 settings with every cache (texts.json).

A line a setting, a word a text, a character a token. `python tests/test_recorded.py` rewrites it,
if other tokens are meant.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_constrain import ENDS, TOKENS, Vocabulary, by_python, rarely
from test_generate import lively, ragged
from test_model import tokens
from torch import Tensor

from core.cpu import int8
from inference import constrain, engine, serve
from inference.sampling import ENDED

FILE = Path(__file__).with_name("texts.json")
LETTERS = string.digits + string.ascii_letters
CACHES = ("none", "dynamic", "static", "paged")
LLAMA = {"position": "rope", "norm": "rms", "mlp": "swiglu", "bias": False, "tied": False}
GREEDY = {"temperature": 0.0}
WIDE = {"block_size": 48, "vocab_size": 96, "n_embd": 64, "n_kv_head": 2}

# The model's options, those of generate(), and the number of new tokens: block_size is 16.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "greedy": ({}, GREEDY, 7),
    "sliding": ({}, GREEDY, 20),
    "seeds": ({}, {}, 14),
    "one token": ({}, {}, 1),
    "none": ({}, {}, 0),
    "one generator": ({"block_size": 96}, {"generator": 5}, 75),
    "one generator, rows end": (
        {"block_size": 96}, {"generator": 5, "stop": lambda b, new: len(new) == 9 + 4 * b}, 75,
    ),
    "no generator": ({}, {"generator": None, "top_k": 5}, 14),
    "temperature": ({}, {"temperature": 0.6}, 14),
    "hot": ({}, {"temperature": 3.0}, 14),
    "top_k": ({}, {"top_k": 4}, 14),
    "top_p": ({}, {"top_p": 0.7}, 14),
    "top_k and top_p": ({}, {"top_k": 9, "top_p": 0.8, "temperature": 0.9}, 14),
    "vocab_size, unused": ({}, {"vocab_size": 30, "unused": [3, 17, 29], "top_p": 0.9}, 14),
    "stop": ({}, {"stop": [3, 9, 30]}, 20),
    "stop by length": ({}, {**GREEDY, "stop": lambda b, new: len(new) == 3 + 2 * b}, 20),
    "in step": ({}, {**GREEDY, "logits_processor": rarely}, 14),
    "in step, seeds": ({"n_kv_head": 2}, {"logits_processor": rarely, "top_k": 9}, 9),
    "python": ({}, {**GREEDY, "logits_processor": by_python}, 14),
    "python, stop": ({}, {"logits_processor": by_python, "stop": 5}, 14),
    "constraint": ({}, {"constraint": "[a-f]{2,5}-é?[0-9]+"}, 12),
    "constraints": ({}, {"constraint": ["[ab]+", None, "(00|é)*-", "[x-y]{9}"]}, 12),
    "constraint, greedy": ({"n_kv_head": 1}, {"constraint": "[^a]{3,}", **GREEDY}, 8),
    "all": ({"attention_window": 5}, {
        "constraint": "[a-m]*", "logits_processor": rarely, "top_k": 20, "top_p": 0.95,
    }, 9),
    "gqa": ({"n_kv_head": 2}, GREEDY, 14),
    "mqa": ({"n_kv_head": 1}, {"top_k": 7}, 20),
    "window": ({"attention_window": 4}, GREEDY, 20),
    "windows": ({"attention_window": (3, None)}, {}, 14),
    "window of one": ({"attention_window": 1}, GREEDY, 9),
    "rope": ({"position": "rope"}, GREEDY, 14),
    "llama": ({**LLAMA, "n_kv_head": 2, "qk_norm": True}, GREEDY, 14),
    "llama, window": ({**LLAMA, "n_kv_head": 2, "attention_window": (6, 2)}, {"top_p": 0.9}, 20),
    "alibi": ({"position": "alibi"}, GREEDY, 14),
    "alibi, window": ({"position": "alibi", "attention_window": 5, "n_kv_head": 2}, {}, 14),
    "float64": ({"dtype": torch.float64}, {}, 9),
    "int8": ({**WIDE, "int8": True}, GREEDY, 14),
    "int8, seeds": ({**WIDE, **LLAMA, "int8": True}, {"top_k": 20}, 14),
    "shared prefix": ({"block_size": 48}, {"prompts": "shared"}, 14),
    "shared, window": ({"block_size": 48, "attention_window": 9}, {"prompts": "shared"}, 14),
    "longer than block_size": ({}, {"prompts": "long", "top_k": 5}, 5),
}  # fmt: skip


def model_of(changes: dict[str, Any]) -> Any:
    changes = dict(changes)
    dtype, as_int8 = changes.pop("dtype", torch.float32), changes.pop("int8", False)
    model = lively(**changes).to(dtype)
    if as_int8:
        int8.convert(model, model.head_weight)
    return model


def prompts_of(kind: str) -> list[Tensor]:
    if kind == "shared":  # pages of 4: two full ones are common, one more to two of them
        begin = tokens(1, 11, seed=3)[0]
        ends = [[1], [1, 2, 3, 4], [1, 2, 3, 5], [6]]
        return [
            torch.cat([begin[: 11 - 2 * (b == 3)], torch.tensor(e)]) for b, e in enumerate(ends)
        ]
    return [tokens(1, T, seed=T)[0] for T in (20, 3, 16)] if kind == "long" else ragged()


def texts_of(setting: str, kv: str, slots: int | None = None) -> str:
    """slots: rows of serve.stream()."""
    changes, options, n = SETTINGS[setting]
    model, options = model_of(changes), dict(options)
    prompts = prompts_of(options.pop("prompts", "ragged"))
    given = options.get("constraint", ())
    made = [c if c is None else constrain.regex(c, Vocabulary(TOKENS, ENDS))
            for c in ([given] if isinstance(given, str) else given)]  # fmt: skip
    options |= {"constraint": made[0] if isinstance(given, str) else made} if made else {}
    seed = options.get("generator", ...)
    each = [torch.Generator().manual_seed(b) for b in range(len(prompts))]
    options["generator"] = each if seed is ... else seed and torch.Generator().manual_seed(seed)
    torch.manual_seed(7)
    if slots is None:
        options |= {"page_size": 4} if kv == "paged" else {}
        texts = engine.generate(model, prompts, n, kv_cache=kv, **options)
        new = [t[len(p) :].tolist() for t, p in zip(texts, prompts, strict=True)]
    else:
        new = [[] for _ in prompts]
        for b, token in serve.stream(model, prompts, n, slots=slots, page_size=4, **options):
            new[b] += [] if token == ENDED else [token]
    return " ".join("".join(LETTERS[t % 62] for t in row) for row in new)


RECORDED = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_cache_gives_the_recorded_tokens(setting) -> None:
    for kv in CACHES:
        assert texts_of(setting, kv) == RECORDED[setting], kv
    if "generator" not in SETTINGS[setting][1]:  # numbers of one generator come in another order
        assert texts_of(setting, "paged", slots=2) == RECORDED[setting]


if __name__ == "__main__":
    texts = {setting: {texts_of(setting, kv) for kv in CACHES} for setting in SETTINGS}
    sys.exit(differ) if (differ := [s for s, found in texts.items() if len(found) > 1]) else None
    lines = {setting: found.pop() for setting, found in texts.items()}
    FILE.write_text(json.dumps(lines, indent=0) + "\n", encoding="utf-8")
