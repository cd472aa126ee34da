"""What int8 weights cost: measured on the model at hand, once, and kept beside its checkpoint.

The measure is perplexity on text that the model itself writes, before and after. For such a text
the logarithm of the ratio is a divergence, the mean over its places of

    KL(p || q) = sum_v p(v) (log p(v) - log q(v)),      p before, q after

which needs no text to be at hand, is exact at each place instead of for one token of it, and is
never negative. On validation text it agreed (docs/LOG.md).
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import int8
from core.runtime import dtype_name
from core.settings import UserError
from inference import engine
from model import GPT

log = logging.getLogger("nanoattn")

KEPT = "int8.json"  # in the checkpoint's folder
TEXTS, TOKENS = 8, 32
MOST = 1.01  # a perplexity of more than that, relative, is a warning


@torch.no_grad()
def to_int8(model: GPT, folder: Path | None = None) -> float:
    """Give a model int8 weights, and say what its perplexity is then, relative to before.

    Args:
        folder: of its checkpoint: what was measured is kept there, where it can be written.

    Raises:
        UserError: core.int8.why_not().
    """
    embedding = model.transformer.wte.weight
    if why := int8.why_not(model, embedding.device, embedding.dtype):
        raise UserError(f"--weights=int8: {why}")
    kept = None if folder is None else folder / KEPT
    key = {"dtype": dtype_name(embedding.dtype), "device": embedding.device.type,
           "torch": torch.__version__, "tokens": TEXTS * TOKENS}  # fmt: skip
    ratio = _remembered(kept, key)
    if ratio is not None:
        int8.convert(model, embedding)
    else:
        texts = own_texts(model)
        before = log_probs(model, texts)
        int8.convert(model, embedding)
        after = log_probs(model, texts)
        ratio = math.exp(float((before.exp() * (before - after)).sum(-1).mean()))
        if kept is not None:
            with suppress(OSError):  # a folder that cannot be written: measured again next time
                kept.write_text(json.dumps({**key, "perplexity": ratio}) + "\n", encoding="utf-8")
    change = f"{100 * (ratio - 1):+.3f} %"
    said = f"int8 weights: perplexity {change} on {TEXTS * TOKENS} tokens of the model's own text"
    if ratio > MOST or math.isnan(ratio):
        log.warning(f"{said}, a loss of more than 1 %: --weights=dtype keeps them as they are")
    else:
        log.info(said)
    return ratio


def own_texts(model: GPT) -> Tensor:
    """What the model writes after one random token each, (B, T) int64: the same each time."""
    device = model.transformer.wte.weight.device
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(model.config.vocab_size, (TEXTS, 1), generator=draw)
    own = torch.Generator(device).manual_seed(0)
    n = min(TOKENS, model.config.block_size) - 1
    texts = engine.generate(model, first, n, generator=own)
    assert isinstance(texts, Tensor)
    return texts


def log_probs(model: GPT, texts: Tensor) -> Tensor:
    """(B, T) int64 -> (B, T, V) float32."""
    return model.head(model.hidden(texts)).float().log_softmax(dim=-1)


def _remembered(kept: Path | None, key: dict[str, Any]) -> float | None:
    with suppress(OSError, ValueError):
        found = json.loads(kept.read_text(encoding="utf-8")) if kept is not None else None
        if isinstance(found, dict) and all(found.get(k) == v for k, v in key.items()):
            return float(found.get("perplexity", "missing"))
    return None
