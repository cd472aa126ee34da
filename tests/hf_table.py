"""Tiny models of `transformers` with each kernel, against their eager attention in float64.

    python tests/hf_table.py      writes the table of docs/HF.md

Random weights are so large that windows, softcaps and sinks matter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: these are many tiny tensors

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton
from torch import Tensor

from attention import BackendUnavailable, Policy, hf
from attention import get as get_backend
from attention.truth import allowed_error

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "HF.md"
BACKENDS = ("manual", "tiled", "sdpa", "triton")
CACHED = ("dynamic cache", "static cache")
CASES = ("full", "left-padded", "right-padded", "packed", *CACHED, "training")
T, NEW, PADDED, SPLIT = 20, 4, 5, 8  # tokens; new ones; padding; length of the first packed text

_TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN = _TOKENS | {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_WINDOW = _GROUPED | {"sliding_window": 7}
_SECOND = _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}  # in layer 2
_MIXED = _WINDOW | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Json] = {  # model_type -> config
    "llama": _GROUPED,
    "mistral": _WINDOW,
    "qwen2": _SECOND,
    "qwen3": _SECOND | {"head_dim": 16},
    "phi3": _WINDOW,
    "gemma2": _MIXED | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 4},
    "gemma3_text": _MIXED | {"query_pre_attn_scalar": 4},
    "granite": _GROUPED | {"attention_multiplier": 0.9},
    "olmo2": _GROUPED,
    "gpt2": _TOKENS | {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "gpt_neox": _PLAIN,
    "gpt_oss": _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 2,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "starcoder2": _WINDOW | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "bloom": _TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4}
_IMAGES = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48,
           "num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH = {"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
           "decoder_ffn_dim": 48}
ENCODERS: dict[str, Json] = {  # and encoders with decoders
    **dict.fromkeys(("bert", "roberta", "electra", "xlm-roberta", "albert"), _SIZES),
    "layoutlm": _SIZES,  # its mask has one row for all queries
    "distilbert": {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "modernbert": _SIZES | {
        "local_attention": 6, "global_attn_every_n_layers": 2, "reference_compile": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id",
                         "sep_token_id"), 0)},
    "llama, both sides": MODELS["llama"] | {"is_causal": False},
    "gemma3_text, both sides": MODELS["gemma3_text"] | {"use_bidirectional_attention": True},
    **dict.fromkeys(("vit", "clip_vision_model", "dinov2"), _IMAGES),
    "siglip_vision_model": _IMAGES | {"vision_use_head": False},  # by torch's own module
    "clip_text_model": _SIZES,
    "whisper": _SPEECH | {"num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0,
                          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "bart": _SPEECH | {"max_position_embeddings": 32},
}


def build(name: str, implementation: str, dtype: torch.dtype = torch.float32, **other: Any) -> Any:
    """In evaluation mode; the weights depend on the name only."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    fields = {**ENCODERS, **MODELS}.get(name, {}) | other
    config = AutoConfig.for_model(name.partition(",")[0], **fields)
    config._experts_implementation = "eager"  # grouped_mm has no float64
    auto = AutoModel if name in ENCODERS else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=implementation)
        for key, weight in model.named_parameters():
            if "sinks" in key:
                torch.nn.init.normal_(weight, mean=1.0)
    return model.to(dtype).eval()


def batch(case: str) -> tuple[Tensor, Tensor]:
    """Four texts (4, T), and a mask: two in the middle may be padded."""
    ids = torch.randint(3, 61, (4, T), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    if case not in ("full", "packed"):
        for row, n in ((1, PADDED), (2, PADDED - 2)):
            seen[row, slice(-n, None) if case == "right-padded" else slice(n)] = 0
    return ids, seen


def inputs(model: Any, case: str) -> Json:
    """Texts, images or sound, by the model."""
    ids, seen = batch(case)
    draw = torch.Generator().manual_seed(0)
    shape = {"pixel_values": (2, 3, 16, 16), "input_features": (4, 8, T)}.get(model.main_input_name)
    found: Json = {"input_ids": ids}
    if shape:
        found = {model.main_input_name: torch.randn(shape, generator=draw).to(model.dtype)}
    elif case == "packed":
        at = torch.cat([torch.arange(SPLIT), torch.arange(T - SPLIT)])
        found["position_ids"] = at.expand(4, T)
    elif case != "full":
        found["attention_mask"] = seen
    return found | ({"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {})


def run(model: Any, case: str) -> dict[str, Tensor]:
    """Logits (an encoder's last states) of all tokens but padding; in training the gradients."""
    ids, seen = batch(case)
    if case in CACHED:
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=seen, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                cache_implementation=case.partition(" ")[0], output_logits=True,
                return_dict_in_generate=True)
        return {"logits": torch.stack(made.logits, dim=1), "tokens": made.sequences}
    asked, decoder = inputs(model, case), model.can_generate()
    model.train(decoder and case == "training")
    with torch.set_grad_enabled(case == "training"):
        out = model(**asked, **{"use_cache": False} if decoder else {})
    model.eval()
    values = out.logits if decoder else out.last_hidden_state
    values = values[seen.bool()] if values.shape[:2] == seen.shape else values
    if case != "training":
        return {"logits": values}
    draw = torch.Generator().manual_seed(1)  # of squares a normalization makes a constant
    loss = (values * torch.randn(values.shape, generator=draw)).mean()
    names, weights = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return {n: g for n, g in zip(names, grads, strict=True) if g is not None}


@contextmanager
def finite_masks() -> Iterator[None]:
    """In float64 the minimum of eager attention's mask becomes -inf in a float32 softmax, NaN for
    padding: take float32's."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def finite(**asked: Any) -> Tensor | None:
        mask: Tensor | None = eager_mask(**asked)
        return None if mask is None else mask.clamp(min=torch.finfo(torch.float32).min)

    masks: Any = AttentionMaskInterface._global_mapping
    with mock.patch.dict(masks, eager=finite):
        yield


@cache
def eager(name: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    with finite_masks():
        return run(build(name, "eager", dtype), case)


def check(name: str, case: str, got: dict[str, Tensor]) -> None:
    plain, truth = eager(name, case, torch.float32), eager(name, case, torch.float64)
    assert got.keys() == truth.keys(), got.keys() ^ truth.keys()
    largest = max(float(t.abs().max()) for n, t in truth.items() if n != "tokens")
    for key, t in truth.items():
        if key == "tokens":
            assert torch.equal(got[key], t), f"{name}, {case}: other tokens were generated"
            continue
        off, usual = (float((x[key].double() - t).abs().max()) for x in (got, plain))
        m = 2 if key == "logits" else 3
        allowed = allowed_error(usual, float(t.abs().max()), largest, torch.float32, m)
        assert off <= allowed, f"{name}, {case}: {key} is off by {off:.3g}, allowed {allowed:.3g}"


def cell(name: str, backend: str, case: str) -> str:
    """Run one model; return "" if this kernel ran in every layer and is right, else the refusal.

    Raises AssertionError: a wrong number, or another kernel.
    """
    hf.register([backend], Policy(fallback=False))
    model = build(name, hf.implementation(backend))
    try:
        got = run(model, case)
    except BackendUnavailable as e:
        if " refuses " in str(e) or "does not call" in str(e):  # by the bridge
            return str(e).partition(": ")[2]
        return str(e).partition(f" {backend}: ")[2]
    check(name, case, got)
    layers = hf.report(model)
    ran = [(chosen.backend.name, n) for layer in layers for _, chosen, n in layer.ran]
    assert {who for who, _ in ran} == {get_backend(backend).name}, ran
    passes = NEW if case in CACHED else 1
    counted = sum(n for _, n in ran) == model.config.num_hidden_layers * passes
    assert all(layer.ran for layer in layers) if name in ENCODERS else counted, ran
    return ""


def table() -> str:
    """Models with the same cells share a row; refusals are notes."""
    lines = ["| model | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    notes: dict[str, int] = {}
    rows: dict[str, list[str]] = {}
    for name in MODELS:
        cells = []
        for case in CASES:
            refused = {b: why for b in BACKENDS if (why := cell(name, b, case))}
            marks = {b: notes.setdefault(why, len(notes) + 1) for b, why in refused.items()}
            if len(marks) == len(BACKENDS) and len(set(marks.values())) == 1:
                cells.append(f"none [{min(marks.values())}]")
            else:
                but = ", ".join(f"{b} [{n}]" for b, n in marks.items())
                cells.append(f"all but {but}" if but else "all")
        rows.setdefault(" | ".join(cells), []).append(name)
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    lines += ["", *(f"[{n}] refused: {why}" for why, n in notes.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    made = re.sub(r"(?s)(hf_table.py -->\n).*(<!-- end)", lambda m: m[1] + table() + m[2], text)
    PAGE.write_text(made, encoding="utf-8")
