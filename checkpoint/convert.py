"""Other formats: import and export of transformers' GPT-2, import of nanoGPT's ckpt.pt."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from attention import Policy
from checkpoint.store import (
    has_dicts,
    load,
    load_json,
    load_torch,
    load_weights,
    own_checkpoint,
    read_file,
)
from core.hub import why_not_hub
from core.settings import UserError, did_you_mean, first_line, from_dict
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SAME_NAMES = ("n_layer", "n_head", "n_embd", "vocab_size")  # here and in transformers


def load_nanogpt(path: str | Path, policy: Policy = Policy(), **changes: Any) -> GPT:
    """The model in a nanoGPT ckpt.pt, without its training state."""
    saved = read_file(Path(path), load_torch)
    if not has_dicts(saved, "model", "model_args"):
        raise UserError(f"{path} is no nanoGPT checkpoint: it has no 'model' and 'model_args'")
    fields = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    sizes = {f: saved["model_args"][f] for f in fields if f in saved["model_args"]}
    model = GPT(from_dict(GPTConfig, {**sizes, **changes}, str(path)), policy)
    weights = {k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()}
    load_weights(model, {k: v for k, v in weights.items() if not _derived(k)}, str(path))
    return model


def load_hf(source: str, policy: Policy = Policy(), **changes: Any) -> GPT:
    """GPT-2 from a folder with config.json and model.safetensors, as `transformers` writes it, or
    from the hub: "gpt2" and its larger sizes, or "owner/name". `changes` go into the GPTConfig."""
    folder = Path(source) if Path(source).is_dir() else _download(source)
    saved = read_file(folder / "config.json", load_json)
    kind = saved.get("model_type") if isinstance(saved, dict) else None
    if kind != "gpt2":
        raise UserError(f"{source} is a {kind!r} model, only 'gpt2' can be loaded")
    if lacking := [key for key in (*SAME_NAMES, "n_positions") if key not in saved]:
        raise UserError(f"{folder / 'config.json'} lacks {', '.join(lacking)}")
    gelus = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
    unlike = {  # options that our model lacks, and the only values that it supports
        "n_inner": (None, 4 * saved["n_embd"]),
        "layer_norm_epsilon": (1e-5,),
        "activation_function": tuple(gelus),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, same in unlike.items():
        if saved.get(key, same[0]) not in same:
            raise UserError(f"{source} has {key}={saved[key]!r}; the model here has {same[0]!r}")
    sizes = {key: saved[key] for key in SAME_NAMES}
    sizes |= {"block_size": saved["n_positions"], "bias": True}
    sizes["gelu"] = gelus[saved.get("activation_function", "gelu_new")]
    weights = {}
    for name, tensor in read_file(folder / "model.safetensors", load_file).items():
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not _derived(name):
            weights[name] = tensor.t() if _is_conv1d(name) else tensor
    wanted = changes.pop("block_size", None)
    model = GPT(from_dict(GPTConfig, {**sizes, **changes}, source), policy)
    load_weights(model, weights, source)
    if wanted is not None:
        if wanted > model.config.block_size:
            raise UserError(
                f"block_size can be at most {model.config.block_size} with the weights of "
                f"{source}, got {wanted}"
            )
        model.crop_block_size(wanted)
    return model


def save_hf(model: GPT, folder: str | Path) -> None:
    """Write a folder that transformers.GPT2LMHeadModel loads, with the same logits."""
    config = model.config
    if config.kv_heads != config.n_head or config.attention_window is not None:
        raise UserError("a model with n_kv_head or attention_window has no GPT-2 format to go to")
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name] = (tensor.t() if _is_conv1d(name) else tensor).detach().cpu().contiguous()
        bias = name.removesuffix("weight") + "bias"
        has_bias = not name.endswith(("wte.weight", "wpe.weight", "bias"))
        if has_bias and bias not in model.state_dict():
            weights[bias] = torch.zeros(tensor.shape[0])  # transformers always has a bias
    config_json = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(config, key) for key in SAME_NAMES},
        "n_positions": config.block_size,
        "activation_function": "gelu_new" if config.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def init_model(source: str, policy: Policy = Policy(), **changes: Any) -> GPT:
    """A model with the weights of our own checkpoint or a run's folder, of a nanoGPT ckpt.pt, or of
    anything that load_hf() takes; `changes` go into the GPTConfig."""
    if Path(source).is_file():
        return load_nanogpt(source, policy, **changes)
    if own := own_checkpoint(source):
        return load(own).model(policy, **changes)
    return load_hf(source, policy, **changes)


def _derived(name: str) -> bool:
    """Whether a tensor in another format is no separate weight: a mask, the tied head."""
    return name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias"))


def _is_conv1d(name: str) -> bool:
    """Whether transformers stores this weight as (in, out), unlike nn.Linear's (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def _download(name: str) -> Path:
    """The local folder with config.json and model.safetensors of a model on the hub."""
    no_file = f"{name!r} is no local folder or file"
    owner = re.fullmatch(r"([\w.-]+)/[\w.-]+", name)
    if name not in HUB_NAMES and (owner is None or Path(owner[1]).exists() or name.endswith(".pt")):
        beside = {p.name: str(p) for p in Path(name).parent.glob("*")}
        known = {**beside, **dict(zip(HUB_NAMES, HUB_NAMES))}
        raise UserError(
            f"{no_file}, and no model's name{did_you_mean(Path(name).name, known)} "
            f"(known: {', '.join(HUB_NAMES)}, and owner/name on the hub)"
        )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        needs = "taking it from the hub needs: pip install huggingface_hub"
        raise UserError(f"{no_file}, and {needs}") from None
    # It prints its own warnings; the root logger would print each of them again.
    logging.getLogger("huggingface_hub").propagate = False
    offline = why_not_hub()  # then only files downloaded before will do
    try:
        hf_hub_download(name, "model.safetensors", local_files_only=offline is not None)
        config = hf_hub_download(name, "config.json", local_files_only=offline is not None)
        return Path(config).parent
    except (OSError, ValueError, HfHubHTTPError) as e:
        raise UserError(
            f"{no_file}, and the hub did not give it ({offline or first_line(e)})"
        ) from e
