"""Models of other programs: nanoGPT's ckpt.pt, and transformers' gpt2, llama (1 to 3.2, SmolLM2),
mistral (a window), qwen2 (biases of q, k, v) and qwen3 (qk_norm), both with windows in some layers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from attention import Policy
from checkpoint import store
from core.files import printable
from core.settings import first_line, from_dict
from data.schema import Count, FileError, Json, read_json, record, valid
from data.tokenizer import ENDS_IN, OTHER_FILES, FileTokenizer, GPT2Tokenizer
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS = "model.safetensors"
SHARD = 5_000_000_000  # bytes of a file
NanoGPT = record(model=Json, model_args=Json)
Listed = record(weight_map=dict[str, str])
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
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
No, One = Literal[False] | None, Annotated[float, Field(ge=1, le=1)]
SUPPORTED = {  # in config.json; other fields are free
    "scale_attn_weights": Literal[True] | None, "scale_attn_by_inverse_layer_idx": No,
    "add_cross_attention": No, "attention_bias": No, "mlp_bias": No, "rope_interleaved": No,
    "hidden_act": Literal["silu"] | None, "quantization_config": None,
    "pretraining_tp": One | None, "partial_rotary_factor": One | None,
    "rope_scaling": Json | None, "rope_parameters": Json | None,
    "layer_types": list[Literal["full_attention", "sliding_attention"]] | None,
    "max_window_layers": Count,
}  # fmt: skip


def init_model(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a checkpoint, a run, a ckpt.pt, or as load_hf(). Raises UserError."""
    if own := store.own_checkpoint(source):
        return store.load(own).model(policy, **changes)
    if not Path(source).is_file():
        return load_hf(source, policy, **changes)
    file, origin = Path(source), f"{source} is not nanoGPT's, with model and model_args"
    saved = valid(store.read_file(file.parent, file.name, store.load_torch), NanoGPT, origin)
    fields = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    sizes = {f: saved["model_args"][f] for f in fields if f in saved["model_args"]}
    config = from_dict(GPTConfig, {**sizes, **changes}, source)
    prefix = r"((_orig_mod|module)\.)*"  # of torch.compile and DDP
    weights = {re.sub(prefix, "", name, count=1): t for name, t in saved["model"].items()}
    derived = (*MASKS, "lm_head.weight")
    weights = {name: t for name, t in weights.items() if not name.endswith(derived)}
    return store.new_model(config, policy, source, weights)


def tokenizer_meta(source: str) -> Json | None:
    """The tokenizer of init_model()'s source, or None. Raises UserError."""
    if own := store.own_checkpoint(source):
        return store.load(own).settings["tokenizer"]
    if Path(source).is_file():
        return None
    if not Path(source).is_dir() and source in HUB_NAMES:
        return {"name": GPT2Tokenizer.name}
    found = FileTokenizer.read(folder_of(source))
    return None if found is None else found.to_meta()


def trained_on(source: str) -> str | None:
    """The dataset's name, if known."""
    file = Path(source)
    match store.read_file(file.parent, file.name, store.load_torch) if file.is_file() else None:
        case {"config": {"dataset": str(name)}}:
            return name
    return None


def load_hf(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a folder of transformers or a hub model ("gpt2-xl", "owner/name"). Raises UserError."""
    folder = folder_of(source)
    saved = store.read_file(folder, "config.json", lambda path: read_json(path, Json))
    config = read_config(saved, source, **changes)
    files, index = {WEIGHTS}, f"{WEIGHTS}.index.json"
    if (folder / index).exists():
        listed = store.read_file(folder, index, lambda path: read_json(path, Listed))
        files = {Path(name).name for name in listed["weight_map"].values()}
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise FileError(f"{source} has weights in *.bin, expected *.safetensors")
    weights: dict[str, Tensor] = {}
    for file in sorted(files):
        weights |= store.read_file(folder, file, load_file)
    return store.new_model(config, policy, source, read_weights(weights, config))


def folder_of(source: str) -> Path:
    """The folder, or a download from the hub. Raises UserError."""
    if Path(source).is_dir():
        return Path(source)
    no_file = f"{source} is not a local folder or file"
    owner = re.fullmatch(r"([\w.-]+)/[\w.-]+", source)
    if source not in HUB_NAMES and (owner is None or Path(owner[1]).exists()):
        raise FileError(f"{no_file}; models on the hub: {', '.join(HUB_NAMES)}, owner/name")
    # The root logger would repeat its warnings.
    logging.getLogger("huggingface_hub").propagate = False
    files = ["model*.safetensors", f"{WEIGHTS}.index.json", "*config.json", "tokenizer.json"]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=[*files, *OTHER_FILES, *ENDS_IN]))
    except (ImportError, OSError, ValueError) as e:
        install = "; pip install huggingface_hub" * isinstance(e, ImportError)
        raise FileError(f"{no_file}; download failed ({first_line(e)}){install}") from e


def save_hf(model: GPT, folder: str | Path, vocab_size: int | None = None, **more: object) -> None:
    """Write weights and config.json (with `more`), for the first vocab_size tokens. Raises
    UserError."""
    V = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
    gpt = replace(model.config, vocab_size=V)
    config = {**write_config(gpt), **more}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = ("transformer.wte.weight", "lm_head.weight")
    own = {name: t[:V] if name in rows else t for name, t in model.state_dict().items()}
    weights = write_weights(own, gpt)
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if parts[-1] and sum(t.nbytes for t in (*parts[-1].values(), tensor)) > SHARD:
            parts.append({})
        parts[-1][name] = tensor
    n = len(parts)
    files = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    files = files if n > 1 else [WEIGHTS]
    for file, part in zip(files, parts, strict=True):
        store.save_weights(part, folder / file)
    if n > 1:
        where = {name: file for file, part in zip(files, parts) for name in part}
        size = {"total_size": sum(t.nbytes for t in weights.values())}
        store.save_json({"metadata": size, "weight_map": where}, folder / f"{WEIGHTS}.index.json")
    store.save_json(config, folder / "config.json")


def read_config(saved: Any, source: str, **changes: object) -> GPTConfig:
    """Raises UserError for what GPTConfig cannot hold."""
    source = f"config.json of {printable(source)}"
    kind = valid(saved, record(model_type=Literal[tuple(ASSUMED)]), source)["model_type"]
    family = "gpt2" if kind == "gpt2" else "llama"
    needed: Json = dict.fromkeys(SIZES[family].values(), int)
    needed[SIZES[family]["n_layer"]] = Annotated[int, Field(ge=1, le=9999)]
    needed |= {"activation_function": Literal[tuple(GELUS)]} if kind == "gpt2" else {}
    saved = valid(ASSUMED[kind] | saved, record(SUPPORTED, **needed), source)
    found = {ours: saved[theirs] for ours, theirs in SIZES[family].items()} | HAS[family]
    found |= _from_llama(kind, saved, source) if kind != "gpt2" else {
        "bias": True, "gelu": GELUS[saved["activation_function"]],
        "n_hidden": saved.get("n_inner"), "norm_eps": saved["layer_norm_epsilon"],
        "tied": saved.get("tie_word_embeddings", True)}  # fmt: skip
    return from_dict(GPTConfig, found | changes, source)


def _from_llama(kind: str, saved: Json, source: str) -> Json:
    # Version 5 has rope_parameters; earlier ones rope_theta and rope_scaling.
    rope = {"rope_theta": saved.get("rope_theta", 10000.0)} | (saved.get("rope_scaling") or {})
    rope |= saved.get("rope_parameters") or {}
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise FileError(f"{source} has rope_parameters of {nested[0]} alone")
    how = rope.get("rope_type", rope.get("type", "default"))
    numbers = dict.fromkeys(ROPE if how == "llama3" else (), float)
    known = {"rope_type": Literal["default", "llama3"], **numbers}
    where = f"{source}: rope_parameters or rope_scaling"
    valid(rope | {"rope_type": how}, record({"partial_rotary_factor": One}, **known), where)
    return {
        "n_kv_head": saved.get("num_key_value_heads") or saved["num_attention_heads"],
        "head_size": saved.get("head_dim"),
        "norm_eps": saved.get("rms_norm_eps", 1e-6),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": tuple(rope[name] for name in ROPE) if numbers else None,
        "tied": saved.get("tie_word_embeddings", False),
        "bias": "qkv" if kind == "qwen2" else False,
        "attention_window": _windows(kind, saved, source),
        "qk_norm": kind == "qwen3",
    }


def _windows(kind: str, saved: Json, source: str) -> int | tuple[int | None, ...] | None:
    """Each layer's window, in keys that a query sees."""
    window, types = saved.get("sliding_window"), saved.get("layer_types")
    n = saved["num_hidden_layers"]
    if types and len(types) != n:
        raise FileError(f"{source} has {len(types)} layer_types, expected {n}")
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
    gpt2 = config.position == "learned"
    derived = MASKS if gpt2 else "rotary_emb.inv_freq"
    left = {name: t for name, t in saved.items() if not name.endswith(derived)}
    head = left.pop("lm_head.weight", None) if config.tied else None  # held twice
    ends = (t for name, t in left.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    if head is not None and not torch.equal(head, next(ends, head)):
        raise FileError("lm_head.weight is not the embedding: tie_word_embeddings must be false")
    found: dict[str, Tensor] = {}
    if gpt2:
        for name, t in left.items():
            ours = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
            found[ours] = t.t() if is_conv1d(ours) else t
        if (positions := "transformer.wpe.weight") in found:
            found[positions] = found[positions][: config.block_size]
        return found
    for ours, theirs in _llama_names(config):
        parts = [left.pop(name) for name in theirs if name in left]
        if len(parts) == len(theirs):
            found[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return found | left  # reported as unknown


def write_weights(own: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    own = {name: t.detach().cpu() for name, t in own.items()}
    if config.position == "learned":
        for name, tensor in own.items():
            found[name] = tensor.t() if is_conv1d(name) else tensor
            bias = name.removesuffix("weight") + "bias"
            if re.search(r"\.(ln|c)_\w+\.weight$", name) and bias not in own:
                found[bias] = torch.zeros(len(tensor))  # transformers always has it
        return found
    D, H, Hkv = config.head_dim, config.n_head, config.kv_heads
    for ours, theirs in _llama_names(config):
        if ours in own:
            rows = {1: [len(own[ours])], 2: [config.hidden] * 2, 3: [H * D, Hkv * D, Hkv * D]}
            found |= zip(theirs, own[ours].split(rows[len(theirs)]), strict=True)
    return found


def _llama_names(config: GPTConfig) -> Iterator[tuple[str, list[str]]]:
    layers = [(f"transformer.h.{i}.", f"model.layers.{i}.") for i in range(config.n_layer)]
    for here, there in [("", ""), *layers]:
        table = LLAMA_BLOCK if here else LLAMA_ENDS
        for ours, theirs in table.items():
            for part in (".weight", ".bias"):
                yield here + ours + part, [there + name + part for name in theirs]


def is_conv1d(name: str) -> bool:
    """GPT-2's are transposed."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
