"""transformers' models that GPT can be: config.json, and names of weights.

gpt2      GPT-2
llama     Llama 1 to 3.2, SmolLM2
mistral   llama with one window
qwen2     llama with biases of q, k, v, and a window in some layers
qwen3     llama with qk_norm, and a window in some layers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from core.files import printable
from core.settings import UserError, from_dict
from data.schema import FileError, Json
from model import GPT, GPTConfig

GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
SIZES = {  # GPTConfig's field -> config.json's
    "gpt2": {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd",
             "vocab_size": "vocab_size", "block_size": "n_positions"},
    "llama": {"vocab_size": "vocab_size", "n_embd": "hidden_size", "n_hidden": "intermediate_size",
              "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
              "block_size": "max_position_embeddings"},
}  # fmt: skip
HAS = {
    "gpt2": {"position": "learned", "norm": "layer", "mlp": "gelu"},
    "llama": {"position": "rope", "norm": "rms", "mlp": "swiglu"},
}
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LLAMA_BLOCK = {  # ours -> theirs, stacked
    "ln_1": ("input_layernorm",),
    "ln_2": ("post_attention_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
}
LLAMA_ENDS = {"transformer.wte": ("model.embed_tokens",), "transformer.ln_f": ("model.norm",),
              "lm_head": ("lm_head",)}  # fmt: skip
MASKS = (".attn.bias", ".attn.masked_bias")  # no weights
# transformers' defaults for missing fields.
ASSUMED: dict[str, Json] = {
    "gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
}
# Fields with one supported value.
FIXED: Json = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1, "pretraining_tp": 1,
    "rope_interleaved": False, "quantization_config": None, "add_cross_attention": False,
}  # fmt: skip


def read_config(saved: Any, source: str, **changes: object) -> GPTConfig:
    """Raises UserError for what GPTConfig cannot hold."""
    source = f"config.json of {printable(source)}"
    kind = saved.get("model_type") if isinstance(saved, dict) else None
    if not isinstance(kind, str) or kind not in ASSUMED:
        raise FileError(f"{source} has model_type={kind!r}, expected one of {', '.join(ASSUMED)}")
    saved = ASSUMED[kind] | saved
    for name, expected in FIXED.items():
        if saved.get(name) not in (None, expected):
            raise FileError(f"{source} has {name}={saved[name]!r}, expected {expected!r}")
    family = "gpt2" if kind == "gpt2" else "llama"
    if lacking := [name for name in SIZES[family].values() if name not in saved]:
        raise FileError(f"{source} lacks {', '.join(lacking)}")
    sizes = {ours: saved[theirs] for ours, theirs in SIZES[family].items()}
    try:
        more = _from_gpt2(saved) if kind == "gpt2" else _from_llama(kind, saved)
    except UserError as e:
        raise FileError(f"{source} has {e}") from None
    except (TypeError, AttributeError, ValueError) as e:
        raise FileError(f"{source} has a value of another type ({e})") from e
    return from_dict(GPTConfig, {**sizes, **HAS[family], **more, **changes}, source)


def _from_gpt2(saved: Json) -> Json:
    if (gelu := saved["activation_function"]) not in GELUS:
        raise FileError(f"activation_function={gelu!r}, expected {', '.join(GELUS)}")
    return {
        "bias": True, "gelu": GELUS[gelu], "n_hidden": saved.get("n_inner"),
        "norm_eps": saved["layer_norm_epsilon"], "tied": saved.get("tie_word_embeddings", True),
    }  # fmt: skip


def _from_llama(kind: str, saved: Json) -> Json:
    # Version 5 has rope_parameters; earlier ones rope_theta and rope_scaling.
    rope = {"rope_theta": saved.get("rope_theta", 10000.0)} | (saved.get("rope_scaling") or {})
    rope |= saved.get("rope_parameters") or {}
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise FileError(f"rope_parameters of {nested[0]} alone")
    how = rope.get("rope_type", rope.get("type", "default"))
    if how not in ("default", "llama3"):
        raise FileError(f"rope_type={how!r}, expected 'default' or 'llama3'")
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise FileError(f"partial_rotary_factor={part}, expected 1")
    if how == "llama3" and (lacking := [name for name in ROPE if name not in rope]):
        raise FileError(f"a rope_scaling without {', '.join(lacking)}")
    return {
        "n_kv_head": saved.get("num_key_value_heads") or saved["num_attention_heads"],
        "head_size": saved.get("head_dim"),
        "norm_eps": saved.get("rms_norm_eps", 1e-6),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": tuple(rope[name] for name in ROPE) if how == "llama3" else None,
        "tied": saved.get("tie_word_embeddings", False),
        "bias": "qkv" if kind == "qwen2" else False,
        "attention_window": _windows(kind, saved),
        "qk_norm": kind == "qwen3",
    }


def _windows(kind: str, saved: Json) -> int | tuple[int | None, ...] | None:
    """Each layer's window, in keys that a query sees."""
    window, types = saved.get("sliding_window"), saved.get("layer_types")
    n = saved["num_hidden_layers"]
    if types and (len(types) != n or {*types} - {"full_attention", "sliding_attention"}):
        raise FileError(f"layer_types={types}")
    if kind == "mistral" or window is None:
        return window
    if kind == "llama" or not saved.get("use_sliding_window", False):
        return None
    first = saved.get("max_window_layers", 28)
    types = types or ["full_attention"] * min(first, n) + ["sliding_attention"] * (n - first)
    return tuple(window if name == "sliding_attention" else None for name in types)


def write_config(config: GPTConfig) -> Json:
    """The config.json of the simplest family that fits. Raises UserError."""
    c, own, needs = config, asdict(config), HAS["llama"]
    if needs.items() <= own.items():
        return _to_llama(c)
    lacks = {
        "n_kv_head < n_head": c.kv_heads != c.n_head,
        "attention_window": {*c.windows} != {None},
        "head_size": c.head_dim * c.n_head != c.n_embd,
        "qk_norm": c.qk_norm,
        f"gelu={c.gelu}": c.gelu not in GELUS.values(),
    } | {f"{name}={own[name]}": own[name] != value for name, value in HAS["gpt2"].items()}
    if wrong := [name for name, has in lacks.items() if has]:
        flags = " ".join(f"--{name}={value}" for name, value in needs.items() if own[name] != value)
        raise FileError(f"GPT-2's format has no {', '.join(wrong)}; Llama's needs {flags}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: own[ours] for ours, theirs in SIZES["gpt2"].items()},
        "n_inner": c.n_hidden,
        "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout),
    }


def _to_llama(c: GPTConfig) -> Json:
    sizes = {*c.windows} - {None}
    if len(sizes) > 1:
        raise FileError(f"no format has windows of several sizes, got {c.attention_window}")
    if sizes and None in c.windows and not (c.qk_norm or c.bias):
        raise FileError("no format has windows in some layers only, except with --qk_norm=True")
    if c.bias is True or (c.qk_norm and c.bias):
        raise FileError(f"no format has bias={c.bias} with --norm=rms; use --bias=False")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.bias else "mistral" if sizes else "llama"
    if kind == "qwen2" and c.head_dim * c.n_head != c.n_embd:
        raise FileError(f"qwen2's format has no heads of {c.head_dim}; use --qk_norm=True (qwen3)")
    rope: Json = {"rope_type": "default"}
    if c.rope_scaling is not None:
        rope = {"rope_type": "llama3", **dict(zip(ROPE, c.rope_scaling, strict=True))}
    found: Json = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(c, ours) for ours, theirs in SIZES["llama"].items()},
        "intermediate_size": c.hidden,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,  # for other engines, and transformers < 5
        "rope_scaling": rope if c.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "attention_dropout": c.dropout,
        "attention_bias": False,
    }
    if kind == "llama":
        return found | {"mlp_bias": False}
    found |= {"sliding_window": next(iter(sizes), None)}
    if kind != "mistral":
        types = ["full_attention" if w is None else "sliding_attention" for w in c.windows]
        found |= {"use_sliding_window": bool(sizes), "layer_types": types}
        found |= {"max_window_layers": 0 if sizes else c.n_layer}
    return found


def read_weights(saved: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our names, in torch.nn.Linear's layout."""
    left = {name: t for name, t in saved.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied:  # held twice
        left.pop("lm_head.weight", None)
    if config.position == "learned":
        whole = ("transformer.", "lm_head.")
        left = {n if n.startswith(whole) else f"transformer.{n}": t for n, t in left.items()}
        if (positions := left.get("transformer.wpe.weight")) is not None:
            left["transformer.wpe.weight"] = positions[: config.block_size]
        weights = {name: t for name, t in left.items() if not name.endswith(MASKS)}
        return {name: t.t() if is_conv1d(name) else t for name, t in weights.items()}
    found: dict[str, Tensor] = {}
    for ours, theirs in _llama_names(config):
        parts = [left.pop(name) for name in theirs if name in left]
        if len(parts) == len(theirs):
            found[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return found | left  # reported as unknown


def write_weights(model: GPT, kind: str) -> dict[str, Tensor]:
    config, own = model.config, {name: t.detach().cpu() for name, t in model.state_dict().items()}
    found: dict[str, Tensor] = {}
    if kind == "gpt2":
        for name, tensor in own.items():
            found[name] = tensor.t() if is_conv1d(name) else tensor
            bias = name.removesuffix("weight") + "bias"
            alone = name.endswith(("wte.weight", "wpe.weight", "lm_head.weight", "bias"))
            if not alone and bias not in own:
                found[bias] = torch.zeros(tensor.shape[0])  # transformers always has it
        return found
    D, H, Hkv = config.head_dim, config.n_head, config.kv_heads
    for ours, theirs in _llama_names(config):
        if (tensor := own.get(ours)) is not None:
            rows = {1: [len(tensor)], 2: [config.hidden] * 2, 3: [H * D, Hkv * D, Hkv * D]}
            found |= zip(theirs, tensor.split(rows[len(theirs)]), strict=True)
    return found


def _llama_names(config: GPTConfig) -> Iterator[tuple[str, list[str]]]:
    names: list[tuple[str, tuple[str, ...]]] = [*LLAMA_ENDS.items()]
    for i in range(config.n_layer):
        for ours, theirs in LLAMA_BLOCK.items():
            in_layer = tuple(f"model.layers.{i}.{name}" for name in theirs)
            names.append((f"transformer.h.{i}.{ours}", in_layer))
    for ours, theirs in names:
        for part in ("weight", "bias"):
            yield f"{ours}.{part}", [f"{name}.{part}" for name in theirs]


def is_conv1d(name: str) -> bool:
    """GPT-2's are transposed."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
