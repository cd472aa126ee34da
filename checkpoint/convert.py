"""Import and export transformers' models; import nanoGPT's ckpt.pt."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from attention import Policy
from checkpoint import families, store
from core.settings import first_line, from_dict
from data.schema import FileError, Json, read_json, record, valid
from data.tokenizer import ENDS_IN, OTHER_FILES, FileTokenizer, GPT2Tokenizer
from model import GPT, GPTConfig

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS = "model.safetensors"
SHARD = 5_000_000_000  # bytes of a file
NanoGPT = record(model=Json, model_args=Json)
Listed = record(weight_map=dict[str, str])


def load_nanogpt(path: str | Path, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a nanoGPT ckpt.pt. Raises UserError."""
    origin = f"{path} is not nanoGPT's, with model and model_args"
    saved = store.read_file(Path(path), lambda p: valid(store.load_torch(p), NanoGPT, origin))
    fields = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    sizes = {f: saved["model_args"][f] for f in fields if f in saved["model_args"]}
    config = from_dict(GPTConfig, {**sizes, **changes}, str(path))
    model = store.new_model(config, policy, str(path))
    prefix = r"((_orig_mod|module)\.)*"  # of torch.compile and DDP
    weights = {re.sub(prefix, "", name, count=1): t for name, t in saved["model"].items()}
    derived = (*families.MASKS, "lm_head.weight")
    weights = {name: t for name, t in weights.items() if not name.endswith(derived)}
    store.load_weights(model, weights, str(path))
    return model


def load_hf(source: str, policy: Policy = Policy(), **changes: object) -> GPT:
    """Load a folder of transformers or a hub model ("gpt2-xl", "owner/name"). Raises UserError."""
    folder = Path(source) if Path(source).is_dir() else _download(source)
    saved = store.read_file(folder / "config.json", lambda path: read_json(path, Json))
    config = families.read_config(saved, source, **changes)
    files, index = {WEIGHTS}, folder / f"{WEIGHTS}.index.json"
    if index.exists():
        listed = store.read_file(index, lambda path: read_json(path, Listed))["weight_map"]
        files = {Path(name).name for name in listed.values()}
    weights: dict[str, Tensor] = {}
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise FileError(f"{source} has weights in *.bin, expected *.safetensors")
    for file in sorted(files):
        weights |= store.read_file(folder / file, load_file)
    model = store.new_model(config, policy, source)
    store.load_weights(model, families.read_weights(weights, config), source)
    return model


def save_hf(model: GPT, folder: str | Path, **more: object) -> Json:
    """Write weights and config.json (with `more`). Raises UserError."""
    folder, config = Path(folder), {**families.write_config(model.config), **more}
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, tensor in families.write_weights(model, config["model_type"]).items():
        if parts[-1] and sizes[-1] + tensor.nbytes > SHARD:
            parts.append({})
            sizes.append(0)
        parts[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    where: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        several = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        file = several if len(parts) > 1 else WEIGHTS
        store.save_weights(part, folder / file)
        where |= dict.fromkeys(part, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        store.save_json(index, folder / f"{WEIGHTS}.index.json")
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
    found = FileTokenizer.read(path if path.is_dir() else _download(source))
    return None if found is None else found.to_meta()


def trained_on(source: str) -> str | None:
    """The dataset's name, if known."""
    match store.read_file(Path(source), store.load_torch) if Path(source).is_file() else None:
        case {"config": {"dataset": str(name)}}:
            return name
    return None


def _download(name: str) -> Path:
    no_file = f"{name} is not a local folder or file"
    owner = re.fullmatch(r"([\w.-]+)/[\w.-]+", name)
    if name not in HUB_NAMES and (owner is None or Path(owner[1]).exists()):
        raise FileError(f"{no_file}; models on the hub: {', '.join(HUB_NAMES)}, owner/name")
    # The root logger would repeat its warnings.
    logging.getLogger("huggingface_hub").propagate = False
    files = ["model*.safetensors", f"{WEIGHTS}.index.json", "*config.json", "tokenizer.json"]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*files, *OTHER_FILES, *ENDS_IN]))
    except (ImportError, OSError, ValueError) as e:
        install = "; pip install huggingface_hub" * isinstance(e, ImportError)
        raise FileError(f"{no_file}; download failed ({first_line(e)}){install}") from e
