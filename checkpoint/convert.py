"""Import and export of transformers' GPT-2, import of nanoGPT's ckpt.pt."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from attention import Policy
from checkpoint import store
from core.hub import why_not_hub
from core.settings import UserError, first_line, from_dict
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SAME_NAMES = ("n_layer", "n_head", "n_embd", "vocab_size")  # here and in transformers


def load_nanogpt(path: str | Path, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a nanoGPT ckpt.pt; `changes` go into the GPTConfig. Raises UserError."""
    saved = store.read_file(Path(path), store.load_torch)
    if not store.has_dicts(saved, "model", "model_args"):
        raise UserError(f"{path} is not a nanoGPT checkpoint ('model' or 'model_args' is missing)")
    fields = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    sizes = {f: saved["model_args"][f] for f in fields if f in saved["model_args"]}
    model = GPT(from_dict(GPTConfig, {**sizes, **changes}, str(path)), policy)
    weights = {k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()}
    store.load_weights(model, {k: v for k, v in weights.items() if not _derived(k)}, str(path))
    return model


def load_hf(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load GPT-2 from a transformers folder or the hub ("gpt2-xl", "owner/name").

    `changes` go into the GPTConfig.

    Raises:
        UserError: it is missing or damaged, another architecture, or the download failed.
    """
    folder = Path(source) if Path(source).is_dir() else _download(source)
    saved = store.read_file(folder / "config.json", store.load_json)
    kind = saved.get("model_type") if isinstance(saved, dict) else None
    if kind != "gpt2":
        raise UserError(f"{source} is a {kind!r} model, expected 'gpt2'")
    if lacking := {*SAME_NAMES, "n_positions"} - saved.keys():
        raise UserError(f"{folder / 'config.json'} lacks {', '.join(lacking)}")
    gelus = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
    fixed = {  # supported values
        "n_inner": (None, 4 * saved["n_embd"]),
        "layer_norm_epsilon": (1e-5,),
        "activation_function": tuple(gelus),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, same in fixed.items():
        if saved.get(key, same[0]) not in same:
            raise UserError(f"{source} has {key}={saved[key]!r}, expected {same[0]!r}")
    sizes = {key: saved[key] for key in SAME_NAMES}
    sizes |= {"block_size": saved["n_positions"], "bias": True}
    sizes["gelu"] = gelus[saved.get("activation_function", "gelu_new")]
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in store.read_file(folder / "model.safetensors", load_file).items():
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not _derived(name):
            weights[name] = tensor.t() if _is_conv1d(name) else tensor
    model = GPT(from_dict(GPTConfig, {**sizes, **changes}, source), policy)
    positions = weights["transformer.wpe.weight"]
    weights["transformer.wpe.weight"] = positions[: model.config.block_size]
    store.load_weights(model, weights, source)
    return model


def save_hf(model: GPT, folder: str | Path) -> None:
    """Write a folder that transformers.GPT2LMHeadModel loads, with the same logits."""
    config = model.config
    if config.kv_heads != config.n_head or any(config.windows):
        raise UserError("a model with n_kv_head or attention_window has no GPT-2 format")
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name] = (tensor.t() if _is_conv1d(name) else tensor).cpu()
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
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    store.save_weights(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def init_model(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a checkpoint or a run, a nanoGPT ckpt.pt, or any source of load_hf()."""
    if Path(source).is_file():
        return load_nanogpt(source, policy, **changes)
    if own := store.own_checkpoint(source):
        return store.load(own).model(policy, **changes)
    return load_hf(source, policy, **changes)


def _derived(name: str) -> bool:
    """True for masks and the tied head."""
    return name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias"))


def _is_conv1d(name: str) -> bool:
    """True if transformers stores this weight as (in, out), unlike nn.Linear's (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def _download(name: str) -> Path:
    no_file = f"{name!r} is not a local folder or file"
    owner = re.fullmatch(r"([\w.-]+)/[\w.-]+", name)
    if name not in HUB_NAMES and (owner is None or Path(owner[1]).exists()):
        raise UserError(f"{no_file}; models on the hub: {', '.join(HUB_NAMES)}, owner/name")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UserError(f"{no_file}; to download it: pip install huggingface_hub") from None
    # It prints its own warnings; the root logger would repeat them.
    logging.getLogger("huggingface_hub").propagate = False
    offline = why_not_hub()
    try:
        files = ["model.safetensors", "config.json"]
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=bool(offline)))
    except (OSError, ValueError, HfHubHTTPError) as e:
        raise UserError(f"{no_file}; downloading it failed ({offline or first_line(e)})") from e
