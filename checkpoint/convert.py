"""Import and export transformers' models; import nanoGPT's ckpt.pt."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from attention import Policy
from checkpoint import families, store
from checkpoint.store import Json
from core.files import printable
from core.settings import UserError, first_line, from_dict
from data.tokenizer import ENDS_IN, OTHER_FILES, GPT2Tokenizer, from_path
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS = "model.safetensors"
SHARD = 5_000_000_000  # bytes of a file


def load_nanogpt(path: str | Path, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a nanoGPT ckpt.pt. Raises UserError."""
    saved = store.read_file(Path(path), store.load_torch)
    if not store.has_dicts(saved, "model", "model_args"):
        raise UserError(f"{printable(path)} lacks 'model' or 'model_args' of a nanoGPT checkpoint")
    fields = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    sizes = {f: saved["model_args"][f] for f in fields if f in saved["model_args"]}
    model = GPT(from_dict(GPTConfig, {**sizes, **changes}, str(path)), policy)
    prefix = r"((_orig_mod|module)\.)*"  # of torch.compile and DDP
    weights = {re.sub(prefix, "", name, count=1): t for name, t in saved["model"].items()}
    store.load_weights(
        model, {k: v for k, v in weights.items() if not families.derived(k)}, str(path)
    )
    return model


def load_hf(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a folder of transformers or a hub model ("gpt2-xl", "owner/name"). Raises UserError."""
    folder = Path(source) if Path(source).is_dir() else _download(source)
    saved = store.read_file(folder / "config.json", store.load_json)
    config = families.read_config(saved, source, **changes)
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise UserError(f"{printable(source)} has weights in *.bin, expected *.safetensors")
    files, index = [folder / WEIGHTS], folder / f"{WEIGHTS}.index.json"
    if index.exists():
        files = store.read_file(index, _listed)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= store.read_file(file, load_file)
    model = GPT(config, policy)
    store.load_weights(model, families.read_weights(weights, config), source)
    return model


def _listed(index: Path) -> list[Path]:
    names = {*store.load_json(index)["weight_map"].values()}
    return sorted(index.with_name(Path(name).name) for name in names)


def save_hf(model: GPT, folder: str | Path, **more: object) -> Json:
    """Write weights and config.json (with `more`). Raises UserError."""
    folder, config = Path(folder), {**families.write_config(model.config), **more}
    folder.mkdir(parents=True, exist_ok=True)
    weights = families.write_weights(model, config["model_type"])
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in weights.items():
        if parts[-1] and sum(t.nbytes for t in (*parts[-1].values(), tensor)) > SHARD:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        store.save_weights(weights, folder / WEIGHTS)
    else:
        files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            store.save_weights(part, folder / file)
        size = {"total_size": sum(t.nbytes for t in weights.values())}
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        store.save_json({"metadata": size, "weight_map": where}, folder / f"{WEIGHTS}.index.json")
    store.save_json(config, folder / "config.json")
    return config


def init_model(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a checkpoint, a run, a ckpt.pt, or as load_hf()."""
    if Path(source).is_file():
        return load_nanogpt(source, policy, **changes)
    if own := store.own_checkpoint(source):
        return store.load(own).model(policy, **changes)
    return load_hf(source, policy, **changes)


def tokenizer_meta(source: str) -> Json | None:
    """The tokenizer of init_model()'s source, or None. Raises UserError."""
    if own := store.own_checkpoint(source):
        return store.load(own).settings["tokenizer"]
    path = Path(source)
    if path.is_file():
        return None
    if not path.is_dir() and source in HUB_NAMES:
        return {"name": GPT2Tokenizer.name}
    found = from_path(path if path.is_dir() else _download(source))
    return None if found is None else found.to_meta()


def trained_on(source: str) -> str | None:
    """The dataset's name, if known."""
    saved = store.read_file(Path(source), store.load_torch) if Path(source).is_file() else {}
    return saved["config"].get("dataset") if store.has_dicts(saved, "config") else None


def _download(name: str) -> Path:
    no_file = f"{printable(name)} is not a local folder or file"
    owner = re.fullmatch(r"([\w.-]+)/[\w.-]+", name)
    if name not in HUB_NAMES and (owner is None or Path(owner[1]).exists()):
        raise UserError(f"{no_file}; models on the hub: {', '.join(HUB_NAMES)}, owner/name")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UserError(f"{no_file}; to download it: pip install huggingface_hub") from None
    # The root logger would repeat its warnings.
    logging.getLogger("huggingface_hub").propagate = False
    files = ["model*.safetensors", f"{WEIGHTS}.index.json", "*config.json", "tokenizer.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=[*files, *OTHER_FILES, *ENDS_IN]))
    except (OSError, ValueError, HfHubHTTPError) as e:
        raise UserError(f"{no_file}; download failed ({printable(first_line(e))})") from e
